//! Random inputs for whatever reads bytes of an image: a small part of what `testbed/fuzz.sh` does.

mod fuzz_inputs;

use fuzz_inputs::{header, image};

/// Inputs from a fixed sequence, of many lengths, with more zeros and small numbers than chance would give.
fn each(count: u64, mut run: impl FnMut(&[u8])) {
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    for _ in 0..count {
        let len = next() % 700;
        let input: Vec<u8> = (0..len)
            .map(|_| match next() % 4 {
                0 => 0,
                1 => (next() % 8) as u8,
                _ => next() as u8,
            })
            .collect();
        run(&input);
    }
}

#[test]
fn any_bytes_are_a_header_or_refused() {
    each(5_000, header::run);
}

#[test]
fn any_image_is_served_without_harm() {
    each(300, image::run);
}
