//! Random inputs for all code that parses data of a peer: a small part of the fuzzing that `testbed/fuzz.sh` does.

mod fuzz_inputs;

use fuzz_inputs::{batch, delta};

/// Calls `run` with `count` inputs from a fixed pseudo-random sequence, of many lengths, with extra zeros and small
/// numbers.
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
                1 => (next() % 32) as u8,
                _ => next() as u8,
            })
            .collect();
        run(&input);
    }
}

#[test]
fn random_batches_decode_or_are_refused() {
    each(1_000, batch::run);
}

#[test]
fn random_delta_is_applied_or_refused() {
    each(20_000, delta::run);
}
