//! Random inputs for whatever reads what a peer has sent: a small part of what `testbed/fuzz.sh` does.

mod fuzz_inputs;

use fuzz_inputs::{batch, delta};

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
                1 => (next() % 32) as u8,
                _ => next() as u8,
            })
            .collect();
        run(&input);
    }
}

#[test]
fn any_batch_is_decoded_or_refused_and_any_pages_come_back() {
    each(1_000, batch::run);
}

#[test]
fn any_delta_is_applied_or_refused() {
    each(20_000, delta::run);
}
