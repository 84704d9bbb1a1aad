//! What the VMs of a host use, seen without touching them, and what follows from it: which are too large or too small, how
//! many more fit, and whether it is a disk that they wait for.
//!
//! Measuring and judging are apart. [`look`] reads procfs and asks the servers of Larder for a while ([`sample`] is what is
//! read at a moment, [`window`] what happened between two) and tells it in plain numbers, [`measured`]. [`judge`] makes
//! sentences of those numbers and a policy, reads nothing, and is tested with numbers alone.
//!
//! Invariants:
//! - Nothing is changed, and no counter reset: no file of the kernel's is written to, no monitor of QEMU's connected to.
//! - What was not measured is told with the reason, and nothing is advised without what it takes to know it.
//! - A process may end at any moment, and another one may get its number: what was read of it counts only if it was the
//!   same at both ends.

pub mod judge;
pub mod look;
pub mod measured;
mod procfs;
mod qemu;
pub mod sample;
mod servers;
mod told;
pub mod window;

pub use procfs::host::{CpuTimes, DeviceCounts, DeviceNumber};
pub use procfs::process::{ProcessId, ThreadTimes};
pub use procfs::{Procfs, Read, Unread};
