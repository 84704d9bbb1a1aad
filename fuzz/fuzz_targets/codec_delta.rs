//! Fuzzes page deltas: decodes arbitrary bytes, and encodes and decodes the delta of two arbitrary pages.
#![no_main]

#[path = "../../crates/larder-codec/tests/fuzz_inputs/mod.rs"]
mod fuzz_inputs;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_inputs::delta::run(data));
