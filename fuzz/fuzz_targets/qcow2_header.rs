//! Fuzzes qcow2 headers.
#![no_main]

#[path = "../../crates/larder-qcow2/tests/fuzz_inputs/mod.rs"]
mod fuzz_inputs;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_inputs::header::run(data));
