//! What was read at one moment. Everything here counts from some start on, so that what happened in between is the
//! difference of two samples.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::procfs::Read;
use crate::procfs::host::{CpuTimes, DeviceCounts, DeviceNumber};
use crate::procfs::process::{ProcessId, ThreadTimes};

/// The host and its VMs at a moment.
#[derive(Clone, Debug)]
pub struct Sample {
    /// When, since the first one.
    pub at: Duration,
    /// The host.
    pub host: HostSample,
    /// The threads of each VM.
    pub vms: BTreeMap<ProcessId, Read<Threads>>,
}

/// The threads of a process, by their numbers.
pub type Threads = BTreeMap<i32, ThreadSample>;

/// A thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadSample {
    /// Its name.
    pub name: String,
    /// Its times.
    pub times: Read<ThreadTimes>,
}

/// The host.
#[derive(Clone, Debug)]
pub struct HostSample {
    /// Its CPUs.
    pub cpu: Read<CpuTimes>,
    /// Pages that were read back from the kernel's swap.
    pub swapped_in: Read<u64>,
    /// For how long some task waited for a CPU.
    pub cpu_stall: Read<Duration>,
    /// The same for memory.
    pub memory_stall: Read<Duration>,
    /// The same for disks.
    pub io_stall: Read<Duration>,
    /// Its block devices.
    pub devices: Read<BTreeMap<DeviceNumber, DeviceCounts>>,
}
