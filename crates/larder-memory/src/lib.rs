//! Manages the memory of a running VM from outside its process. The pager keeps the memory within a budget, moves
//! cold pages to compressed RAM and to an SSD, and pages them in again when they are touched.

pub mod attach;
mod cgroup;
pub mod crypt;
pub mod entry;
pub mod external_mappings;
pub mod guest;
pub mod headroom;
pub mod inject;
pub mod locked_ring;
pub mod pager;
pub mod pressure;
pub mod resident_queues;
pub mod segment_log;
pub mod service;
pub mod shared;
pub mod state;
pub mod store;
pub mod target;
pub mod units;
pub mod userfaultfd;
pub mod worker;
