//! Random inputs for what reads a peer's bytes: a small part of what `testbed/fuzz.sh` does.

mod fuzz_inputs;

use fuzz_inputs::wire;

/// Pieces of the formats, so that chance finds its way into them.
const PIECES: &[&[u8]] = &[
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

/// Inputs from a fixed sequence.
fn each(count: u64, mut run: impl FnMut(&[u8])) {
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
        input.push(next() as u8);
        for _ in 0..next() % 24 {
            match next() % 4 {
                0 => input.extend((0..next() % 20).map(|_| (next() % 9) as u8)),
                1 => input.push(next() as u8),
                _ => input.extend_from_slice(PIECES[next() as usize % PIECES.len()]),
            }
        }
        run(&input);
    }
}

#[test]
fn whatever_a_peer_says_is_understood_as_it_was_meant_or_not_at_all() {
    each(20_000, wire::run);
}
