//! Tests with random inputs for the code that parses bytes of an image: a small part of `testbed/fuzz.sh`.

mod fuzz_inputs;

use fuzz_inputs::{header, image};

/// Runs `run` with inputs from a fixed sequence, of many lengths, with more zeros and small numbers than random bytes
/// have.
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
fn random_header_parses_or_is_refused() {
    each(5_000, header::run);
}

#[test]
fn random_image_is_served_without_harm() {
    each(300, image::run);
}
