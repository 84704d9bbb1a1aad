//! Fuzzes the kernel's userfaultfd messages.
#![no_main]

#[path = "../../crates/larder-memory/tests/fuzz_inputs/mod.rs"]
mod fuzz_inputs;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_inputs::told::messages(data));
