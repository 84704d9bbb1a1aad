//! Fuzzes an NBD client whose peer sends arbitrary bytes.
#![no_main]

#[path = "../../crates/larder-export/tests/front_end/mod.rs"]
mod front_end;
#[path = "../../crates/larder-export/tests/fuzz_inputs/mod.rs"]
mod fuzz_inputs;

libfuzzer_sys::fuzz_target!(|data: &[u8]| fuzz_inputs::nbd::client(data));
