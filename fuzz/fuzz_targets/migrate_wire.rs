//! What a sender and a receiver of a migration say to one another.
#![no_main]

#[path = "../../crates/larder-migrate/tests/fuzz_inputs/mod.rs"]
mod fuzz_inputs;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_inputs::wire::run(data));
