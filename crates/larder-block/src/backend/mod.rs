//! The backends at the bottom of a stack of layers.

pub mod file;
pub mod image_lock;
pub mod memory;
pub mod nbd;
pub mod simulated;
