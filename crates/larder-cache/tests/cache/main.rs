//! A cache over simulated devices.

mod breaks;
mod devices;
mod failed_device;
mod hanging;
mod warm;
