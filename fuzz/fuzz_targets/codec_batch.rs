//! Batches of pages as a migration sends them: any bytes as one, and any pages there and back.
#![no_main]

#[path = "../../crates/larder-codec/tests/fuzz_inputs/mod.rs"]
mod fuzz_inputs;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_inputs::batch::run(data));
