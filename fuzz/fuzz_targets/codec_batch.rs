//! Fuzzes page batches of migrations: decodes arbitrary bytes, and encodes and decodes arbitrary pages.
#![no_main]

#[path = "../../crates/larder-codec/tests/fuzz_inputs/mod.rs"]
mod fuzz_inputs;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_inputs::batch::run(data));
