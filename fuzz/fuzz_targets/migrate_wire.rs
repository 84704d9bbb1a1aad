//! Fuzzes the messages between the sender and the receiver of a migration.
#![no_main]

#[path = "../../crates/larder-migrate/tests/fuzz_inputs/mod.rs"]
mod fuzz_inputs;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_inputs::wire::run(data));
