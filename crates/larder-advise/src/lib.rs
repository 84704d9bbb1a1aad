//! Resource usage of the VMs of a host, observed without touching them, and advice derived from it: which VMs are too
//! large or too small, how many more fit, and whether a disk is the bottleneck.
//!
//! Measuring and judging are separate. [`observe`] reads procfs and queries Larder's servers for a while ([`sample`] is
//! one reading, [`window`] the difference of two) and returns plain numbers, [`measured`]. [`judge`] turns those
//! numbers and a policy into sentences; it reads nothing, and is tested with numbers alone.
//!
//! Invariants:
//! - Nothing is changed, and no counter is reset: no kernel file is written to, and no QEMU monitor is connected to.
//! - A value that was not measured is reported with the reason, and no advice is given without the values that it
//!   needs.
//! - A process may exit at any moment, and its PID may be reused: values of a process count only if it was the same
//!   process at both ends.

pub mod judge;
pub mod measured;
pub mod observe;
mod procfs;
mod qemu;
pub mod sample;
mod servers;
mod telemetry;
pub mod window;

pub use procfs::host::{CpuTimes, DeviceCounts, DeviceNumber};
pub use procfs::process::{ProcessId, ThreadTimes};
pub use procfs::{Procfs, ReadError, ReadResult};
