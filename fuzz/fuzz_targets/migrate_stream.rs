//! Fuzzes the channels of QEMU's migration stream.
#![no_main]

#[path = "../../crates/larder-migrate/tests/fuzz_inputs/mod.rs"]
mod fuzz_inputs;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_inputs::stream::run(data));
