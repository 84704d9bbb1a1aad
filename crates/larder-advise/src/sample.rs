//! Counters that were read at one moment. Each counts from some start on, so the events in an interval are the
//! difference of two samples.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::procfs::ReadResult;
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
    pub vms: BTreeMap<ProcessId, ReadResult<Threads>>,
}

/// Threads of a process, by thread ID.
pub type Threads = BTreeMap<i32, ThreadSample>;

/// Counters of a thread.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ThreadSample {
    /// Name of the thread.
    pub name: String,
    /// Run time and wait time.
    pub times: ReadResult<ThreadTimes>,
}

/// Counters of the host.
#[derive(Clone, Debug)]
pub struct HostSample {
    /// CPU times.
    pub cpu: ReadResult<CpuTimes>,
    /// Pages that were read back from the kernel's swap.
    pub swapped_in: ReadResult<u64>,
    /// Total time for which some task waited for a CPU.
    pub cpu_stall: ReadResult<Duration>,
    /// Total time for which some task waited for memory.
    pub memory_stall: ReadResult<Duration>,
    /// Total time for which some task waited for a disk.
    pub io_stall: ReadResult<Duration>,
    /// Block devices.
    pub devices: ReadResult<BTreeMap<DeviceNumber, DeviceCounts>>,
}
