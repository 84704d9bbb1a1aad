//! Fuzzes damaged copies of pages, which a pager pages in.
#![no_main]

#[path = "../../crates/larder-memory/tests/fuzz_inputs/mod.rs"]
mod fuzz_inputs;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_inputs::stored::run(data));
