//! Fuzzes damaged qcow2 images, which are then served.
#![no_main]

#[path = "../../crates/larder-qcow2/tests/fuzz_inputs/mod.rs"]
mod fuzz_inputs;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_inputs::image::run(data));
