//! The experiments that the tests share with `larder-bench`: kill campaigns, the simulator, the fuzzer for disks,
//! malicious images, and disk space.

pub mod campaign;
pub mod fuzz_disks;
pub mod hostile_images;
pub mod simulate;
pub mod space;
