//! What an earlier pager has left, and a successor goes on with.
#![no_main]

#[path = "../../crates/larder-memory/tests/fuzz_inputs/mod.rs"]
mod fuzz_inputs;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_inputs::adopted::run(data));
