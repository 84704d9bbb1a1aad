//! Counters that were read at one moment. Each counts from some start on, so the events in an interval are the
//! difference of two samples.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::procfs::Read;
use crate::procfs::host::{CpuTimes, DeviceCounts, DeviceNumber};
use crate::procfs::process::{ProcessId, ThreadTimes};

/// Counters of the host and of its VMs at one moment.
#[derive(Clone, Debug)]
pub struct Sample {
    /// Time since the first sample.
    pub at: Duration,
    /// Counters of the host.
    pub host: HostSample,
    /// Threads of each VM.
    pub vms: BTreeMap<ProcessId, Read<Threads>>,
}

/// Threads of a process, by thread ID.
pub type Threads = BTreeMap<i32, ThreadSample>;

/// Counters of a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadSample {
    /// Name of the thread.
    pub name: String,
    /// Run time and wait time.
    pub times: Read<ThreadTimes>,
}

/// Counters of the host.
#[derive(Clone, Debug)]
pub struct HostSample {
    /// CPU times.
    pub cpu: Read<CpuTimes>,
    /// Pages that were read back from the kernel's swap.
    pub swapped_in: Read<u64>,
    /// Total time for which some task waited for a CPU.
    pub cpu_stall: Read<Duration>,
    /// Total time for which some task waited for memory.
    pub memory_stall: Read<Duration>,
    /// Total time for which some task waited for a disk.
    pub io_stall: Read<Duration>,
    /// Block devices.
    pub devices: Read<BTreeMap<DeviceNumber, DeviceCounts>>,
}
