//! Random inputs for code that reads kernel messages, and data of a disk or of an earlier pager: a small part of
//! `testbed/fuzz.sh`.

mod fuzz_inputs;

use fuzz_inputs::{adopted, log, state, stored, told};

/// Runs `run` with inputs from a fixed sequence, of many lengths, with more zeros and small numbers than uniform
/// ones.
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
fn arbitrary_segments_are_parsed_safely() {
    each(5_000, log::run);
}

/// A page whose copy is damaged has its old content, or cannot be read.
#[test]
fn damaged_copy_yields_no_wrong_page() {
    each(1_000, stored::run);
}

#[test]
fn arbitrary_state_is_opened_or_refused() {
    each(5_000, state::run);
}

#[test]
fn successor_survives_arbitrary_state() {
    each(1_000, adopted::run);
}

#[test]
fn pager_survives_arbitrary_messages() {
    each(1_000, told::messages);
}

#[test]
fn arbitrary_kernel_tables_are_parsed() {
    each(20_000, told::tables);
}

/// Successor of a killed pager that cannot reach a disk server yet.
#[test]
fn paused_pager_evicts_nothing() {
    stored::paused();
}
