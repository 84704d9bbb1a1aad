//! Random input for the parsers of a peer's bytes and of QEMU's migration stream: a small part of the runs of
//! `testbed/fuzz.sh`.

mod fuzz_inputs;

use fuzz_inputs::{stream, wire};

/// Pieces of Larder's wire formats, so that random input gets far into them.
const WIRE_PIECES: &[&[u8]] = &[
    b"LARDMIG\x01\x01\0\0\0",
    b"LARDMIG\x01\x01\0\x01\0",
    b"LARDMIG\x02\x01\0\0\0\0\0\0\0",
    b"LARDMIG\x02\x01\0\x01\0\x05\0\0\0",
    b"LM\x0a\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
    b"LM\x08\0\x04\0\0\0",
    b"LFRM\0\0\0\0",
    // A literal of eight bytes; a uniform page; stored and delta pages; zeros.
    b"\x01\x08",
    b"\x02\x01abcdabcd",
    b"\x04\x01\0",
    b"\x05\x01\0",
    b"\x06\x03\0\0\0\0\0\0\x10\x22",
    &[0x82, 1],
    &[0; 64],
    &[0; 24],
];

/// Pieces of QEMU's formats.
const STREAM_PIECES: &[&[u8]] = &[
    b"QEVM\0\0\0\x03",
    b"\x07\0\0\0\x03abc",
    b"\x05\x18configuration/capabilities\0\0\0\x01\0\0\0\x01",
    b"\x05\x12configuration/uuid\0\0\0\x01",
    b"\x08\0\x07\0\x04\0\0\0\x30",
    b"\x08\0\x03\0\x10",
    b"\x08\0\x05\0\0",
    b"\x01\0\0\0\x02\x03ram\0\0\0\0\0\0\0\x04",
    b"\x04\0\0\0\x09\x03abc\0\0\0\0\0\0\0\x01",
    b"\x02\0\0\0\x02",
    b"\x03\0\0\0\x02",
    b"\x7e\0\0\0\x02",
    b"\x7e\0\0\0\x07",
    b"\0\0\0\0\0\0\x20\x04\x01b\0\0\0\0\0\0\x10\0",
    b"\0\0\0\0\0\0\x10\x28",
    b"\0\0\0\0\0\0\x10\x22\0",
    b"\0\0\0\0\0\0\x20\x22\0",
    b"\0\0\0\0\0\0\x30\x22\x05",
    b"\0\0\0\0\0\0\x10\x08\x01b",
    b"\0\0\0\0\0\0\x10\x60\x01\0\x03abc",
    b"\0\0\0\0\0\0\x11\x20\0\0\0\x04abcd",
    b"\0\0\0\0\0\0\0\x10",
    b"\0\0\0\0\0\0\x02\0",
    b"\x11\x22\x33\x44\0\0\0\x01\0\0\0\x40",
    b"\x11\x22\x33\x44\0\0\0\x01\0\0\0\0\0\0\0\x80\0\0\0\x01\0\0\x10\0",
    &[0; 4096],
    &[0; 1312],
];

/// Runs inputs from a fixed sequence: a byte below each of `heads`, which select a format, then pieces and random
/// bytes.
fn each(heads: &[u64], pieces: &[&[u8]], count: u64, mut run: impl FnMut(&[u8])) {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut input = Vec::new();
    for _ in 0..count {
        input.clear();
        input.extend(heads.iter().map(|head| (next() % head) as u8));
        for _ in 0..next() % 24 {
            match next() % 4 {
                0 => input.extend((0..next() % 20).map(|_| (next() % 9) as u8)),
                1 => input.push(next() as u8),
                _ => input.extend_from_slice(pieces[next() as usize % pieces.len()]),
            }
        }
        run(&input);
    }
}

/// Any input of a peer is either parsed to values that encode to the same meaning, or rejected.
#[test]
fn random_peer_input_is_handled() {
    each(&[256], WIRE_PIECES, 20_000, wire::run);
}

/// Any channel is parsed to its end, with the same result however it is cut.
#[test]
fn random_channel_parses_alike_when_cut() {
    // The last two heads select where the channel is cut.
    each(&[256, 256, 4], STREAM_PIECES, 20_000, stream::run);
}
