//! Deltas of pages: any bytes as one, and between any two pages.
#![no_main]

#[path = "../../crates/larder-codec/tests/fuzz_inputs/mod.rs"]
mod fuzz_inputs;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_inputs::delta::run(data));
