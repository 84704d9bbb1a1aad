//! Random inputs for whatever reads what the kernel says, and what a disk or an earlier pager has: a small part of what
//! `testbed/fuzz.sh` does.

mod fuzz_inputs;

use fuzz_inputs::{adopted, log, state, stored, told};

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
fn any_segment_entry_and_encoded_page_is_read_without_harm() {
    each(5_000, log::run);
}

#[test]
fn a_page_whose_copy_is_damaged_is_what_it_was_or_cannot_be_read() {
    each(1_000, stored::run);
}

#[test]
fn any_state_is_opened_or_refused() {
    each(5_000, state::run);
}

#[test]
fn a_successor_outlives_any_state() {
    each(1_000, adopted::run);
}

#[test]
fn a_pager_outlives_any_messages() {
    each(1_000, told::messages);
}

#[test]
fn any_tables_of_the_kernel_are_read() {
    each(20_000, told::tables);
}

/// A successor of a killed pager that could not reach a disk server yet.
#[test]
fn paused_pager_evicts_nothing() {
    stored::paused();
}
