//! Fuzzes the header of a swap disk, and requests for limits on the control socket.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| larder_vm::memory::read_any(data));
