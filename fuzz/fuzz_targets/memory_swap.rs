//! Fuzzes the header of a swap disk, and the body of `PATCH /v1/memory`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| larder_vm::memory::fuzz_parse(data));
