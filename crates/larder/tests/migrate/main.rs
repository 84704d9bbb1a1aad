//! `larder migrate send` and `larder migrate receive`: between two real QEMUs, and between simulated ends where each
//! byte and each moment matters.

mod again;
mod bandwidth;
mod cuts;
mod damaged;
mod devices;
mod disks;
mod ends;
mod guests;
mod hostile;
mod in_flight;
mod moves;
mod postcopy;
mod strangers;
#[path = "../support/mod.rs"]
mod support;
mod tls;
mod user;
mod watched;
mod whole;
mod wire;
mod wrong;

/// Memory of the guests in MiB. Their file system has 90 MiB, and may take half.
const MEMORY_MIB: u64 = 288;
