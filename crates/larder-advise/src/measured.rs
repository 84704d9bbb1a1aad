//! Activity and resources of a host and its VMs within a window: all input of the judgement, in plain numbers.
//!
//! These are also the fields that `larder advise --output json` prints under `measured`. Shares are from 0 to 1,
//! sizes in bytes, times in seconds. A value that was not measured is `None`, and [`Measured::gaps`] has the reason.

use serde::Serialize;

/// Measurements of a host and all its VMs.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Measured {
    /// Length of the window, in seconds.
    pub window_seconds: f64,
    /// Length of the slices of the window, in seconds; the busiest slice counts as the peak.
    pub slice_seconds: f64,
    /// Measurements of the host.
    pub host: MeasuredHost,
    /// VMs, sorted by name.
    pub vms: Vec<MeasuredVm>,
    /// Larder's control sockets that gave no answer, so that VMs may wait for memory unnoticed.
    pub silent: Vec<String>,
    /// Values that were not measured.
    pub gaps: Vec<MeasurementGap>,
}

/// Measurements of a host.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct MeasuredHost {
    /// CPUs that are online.
    pub cpus: Option<u32>,
    /// Share of CPU time that was not idle.
    pub cpu_busy: Option<f64>,
    /// Share of CPU time that a hypervisor below this host took.
    pub cpu_stolen: Option<f64>,
    /// Total memory, in bytes.
    pub memory_total: u64,
    /// Memory that is available without swapping, in bytes.
    pub memory_available: u64,
    /// Size of the kernel's swap, in bytes.
    pub swap_total: u64,
    /// Used part of the kernel's swap, in bytes.
    pub swap_used: u64,
    /// Bytes per second read back from the kernel's swap.
    pub swapped_in_per_second: Option<f64>,
    /// Share of the time in which some task waited for a CPU (PSI).
    pub cpu_stall: Option<f64>,
    /// Share of the time in which some task waited for memory (PSI).
    pub memory_stall: Option<f64>,
    /// Share of the time in which some task waited for a disk (PSI).
    pub io_stall: Option<f64>,
    /// Block devices with any activity.
    pub devices: Vec<MeasuredDevice>,
}

/// Block device of the host.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct MeasuredDevice {
    /// Name, as in `/dev`.
    pub name: String,
    /// Requests per second.
    pub requests_per_second: f64,
    /// Mean time of a request in seconds, from when the kernel received it.
    pub await_seconds: Option<f64>,
    /// Share of the time in which requests were in flight.
    pub utilization: f64,
}

/// Measurements of a VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct MeasuredVm {
    /// Name of the VM, or `PID` and the process ID if it has none.
    pub name: String,
    /// Process ID of QEMU.
    pub pid: i32,
    /// Memory that the VM was given in bytes, if it is known.
    pub ram: Option<u64>,
    /// vCPUs that the VM was given, if it is known.
    pub vcpus_given: Option<u32>,
    /// CPU times.
    pub cpu: Option<VmCpu>,
    /// Memory that it occupies on the host.
    pub memory: Option<MeasuredMemory>,
    /// State of the VM's memory, if Larder manages it.
    pub managed: Option<PagedMemory>,
    /// Disks that Larder serves to it.
    pub disks: Vec<MeasuredDisk>,
    /// Names of the host's block devices on which it has files open.
    pub devices: Vec<String>,
}

/// CPU time of a VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct VmCpu {
    /// Mean number of CPUs that all its threads used.
    pub used: f64,
    /// Mean number of CPUs that its vCPUs used, if they can be distinguished from other threads.
    pub vcpus_used: Option<f64>,
    /// Number of CPUs that its vCPUs used in the slice in which it was highest.
    pub vcpus_used_peak: Option<f64>,
    /// Mean number of its threads that waited in a run queue.
    pub waiting: f64,
    /// vCPUs; empty if they cannot be distinguished.
    pub vcpus: Vec<Vcpu>,
}

/// Measurements of a vCPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Vcpu {
    /// Name of its thread.
    pub thread: String,
    /// Share of the time in which it ran.
    pub busy: f64,
    /// Share of the time in which it was runnable and waited for a CPU (ready time).
    pub ready: f64,
    /// Ready time in the slice in which it was highest.
    pub ready_peak: f64,
}

/// Memory of a VM's process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct MeasuredMemory {
    /// Resident memory in bytes; of shared memory, the process's proportional share.
    pub resident: u64,
    /// Memory in the kernel's swap, in bytes.
    pub swapped: u64,
}

/// Memory of a VM, as managed by `larder memory attach`.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct PagedMemory {
    /// Control socket that was queried.
    pub control: String,
    /// Size of the memory, in bytes.
    pub size: u64,
    /// Budget, in bytes.
    pub budget: u64,
    /// Used part of the budget in bytes: resident pages, compressed pages, and metadata of each page.
    pub used: u64,
    /// Resident memory, in bytes.
    pub resident: u64,
    /// Pages faulted in per second, from compressed RAM and from disks.
    pub faults_per_second: f64,
    /// Refaults per second: faults that a little more memory would have avoided.
    pub refaults_per_second: f64,
    /// Mean time in seconds that a fault on a page on a disk takes.
    pub disk_fault_seconds: Option<f64>,
    /// Time that its threads together waited for evicted pages, as a share of the time of one vCPU.
    pub stall: f64,
    /// Reason why the budget is exceeded, if it is.
    pub problem: Option<String>,
    /// Fault rates by budget, in increasing order: with the current budget, and with larger ones. They count pages in
    /// compressed RAM and on disks. Empty if Larder is too old to report them.
    pub curve: Vec<FaultRatePoint>,
}

/// Point of the fault-rate curve.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct FaultRatePoint {
    /// Budget, in bytes.
    pub budget: u64,
    /// Pages faulted in per second.
    pub faults_per_second: f64,
}

/// Disk that Larder serves to a VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct MeasuredDisk {
    /// Name of the disk in the VM's configuration, or its image.
    pub name: String,
    /// Reads and writes per second.
    pub requests_per_second: f64,
    /// Mean time of a request in seconds, as the guest sees it.
    pub await_seconds: Option<f64>,
    /// 99th percentile of the read time, in seconds.
    pub read_p99_seconds: Option<f64>,
    /// Share of the time in which requests were in flight.
    pub utilization: f64,
    /// Limits of the disk, if there are any. Request times include the time for which the limits delay a request.
    pub limits: Option<String>,
}

/// Value that was not measured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct MeasurementGap {
    /// VM that the value is about; `None` for the host.
    pub vm: Option<String>,
    /// Name of the value.
    pub what: String,
    /// Reason why it was not measured.
    pub why: String,
}

impl MeasuredVm {
    /// Returns the name of the VM for sentences.
    pub fn title(&self) -> String {
        match self.name == unnamed_vm(self.pid) {
            true => self.name.clone(),
            false => format!("{} (PID {})", self.name, self.pid),
        }
    }

    /// Returns the vCPU with the longest ready time. One vCPU that other vCPUs wait for delays all of them.
    pub fn worst_vcpu(&self) -> Option<&Vcpu> {
        let vcpus = self.cpu.as_ref()?.vcpus.iter();
        vcpus.max_by(|one, other| one.ready.total_cmp(&other.ready))
    }

    /// Returns the bytes of the host's memory that the VM takes, including memory that Larder's pager holds for it.
    pub fn footprint(&self) -> Option<u64> {
        let resident = self.memory?.resident;
        Some(match &self.managed {
            // Compressed pages are in the pager's process.
            Some(managed) => resident.saturating_sub(managed.resident).saturating_add(managed.used),
            None => resident,
        })
    }
}

/// Returns the name of a VM that has no name.
pub fn unnamed_vm(pid: i32) -> String {
    format!("PID {pid}")
}
