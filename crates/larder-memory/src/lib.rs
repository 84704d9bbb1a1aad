//! Manages the memory of a running VM from outside its process. The pager keeps the memory within a budget, moves
//! cold pages to compressed RAM and to an SSD, and pages them in again when they are touched.

pub mod attach;
pub mod crypt;
pub mod entry;
mod group;
pub mod guest;
pub mod inject;
pub mod lists;
pub mod locked_ring;
pub mod log;
pub mod pager;
pub mod pressure;
pub mod room;
pub mod service;
pub mod shared;
pub mod state;
pub mod store;
pub mod target;
pub mod units;
pub mod userfaultfd;
pub mod views;
pub mod worker;
