//! Tests of a cache over simulated devices.

mod breaks;
mod devices;
mod discards;
mod failed_device;
mod handed_over;
mod hanging;
mod kills;
mod unproven;
mod warm;
