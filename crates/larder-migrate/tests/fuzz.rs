//! Random inputs for what reads a peer's bytes, and for the parser of QEMU's migration stream: a small part of what
//! `testbed/fuzz.sh` does.

mod fuzz_inputs;

use fuzz_inputs::{stream, wire};

/// Pieces of the formats, so that chance finds its way into them.
const WIRE_PIECES: &[&[u8]] = &[
    b"LARDMIG\x01\x01\0\0\0",
    b"LARDMIG\x01\x01\0\x01\0",
    b"LARDMIG\x02\x01\0\0\0\0\0\0\0",
    b"LARDMIG\x02\x01\0\x01\0\x05\0\0\0",
    b"LM\x0a\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0",
    b"LM\x08\0\x04\0\0\0",
    b"LFRM\0\0\0\0",
    // A literal of eight bytes; a page of a word; pages as they are, kept, changed; zeros.
    b"\x01\x08",
    b"\x02\x01abcdabcd",
    b"\x04\x01\0",
    b"\x05\x01\0",
    b"\x06\x03\0\0\0\0\0\0\x10\x22",
    &[0x82, 1],
    &[0; 64],
    &[0; 24],
];

/// The same, of QEMU's.
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

/// Inputs from a fixed sequence: bytes below each of `heads`, which lead into a format, then pieces and chance.
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

#[test]
fn whatever_a_peer_says_is_understood_as_it_was_meant_or_not_at_all() {
    each(&[256], WIRE_PIECES, 20_000, wire::run);
}

#[test]
fn any_channel_is_read_to_its_end_and_told_the_same_however_it_is_cut() {
    // The last two say where it is cut.
    each(&[256, 256, 4], STREAM_PIECES, 20_000, stream::run);
}
