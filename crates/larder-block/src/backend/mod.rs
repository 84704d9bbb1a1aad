//! The plain backends: what a stack of layers ends in.

pub mod file;
pub mod image_lock;
pub mod memory;
pub mod nbd;
pub mod simulated;
