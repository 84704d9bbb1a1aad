//! The experiments: the seed tables, measured and plotted, the simulator, and the fuzzer for disks.

pub mod campaign;
pub mod fuzz_disks;
pub mod hostile_images;
pub mod simulate;
pub mod space;
