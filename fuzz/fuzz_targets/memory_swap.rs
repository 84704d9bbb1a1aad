//! What a disk for pages begins with, and what the control socket is told of limits.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| larder_vm::memory::read_any(data));
