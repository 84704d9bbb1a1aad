//! What a host and its VMs did in a time, and what they have: all that judgement is made of, in plain numbers.
//!
//! These are also the fields that `larder advise --output json` prints under `measured`. Shares are from 0 to 1, sizes in
//! bytes, times in seconds; `None` is where something was not measured, and then [`Measured::gaps`] says why.

use serde::Serialize;

/// All of it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Measured {
    /// For how long it was looked.
    pub window_seconds: f64,
    /// The parts of that time of which the busiest one counts as the peak.
    pub slice_seconds: f64,
    /// The host.
    pub host: Host,
    /// Its VMs, in the order of their names.
    pub vms: Vec<Vm>,
    /// Control sockets of Larder's where there was no answer, so that VMs may wait for memory without it being known.
    pub silent: Vec<String>,
    /// What was not measured.
    pub gaps: Vec<Gap>,
}

/// The host.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Host {
    /// CPUs that are online.
    pub cpus: Option<u32>,
    /// The share of their time in which they did something.
    pub cpu_busy: Option<f64>,
    /// The share of their time that a hypervisor below this host took.
    pub cpu_stolen: Option<f64>,
    /// All memory.
    pub memory_total: u64,
    /// What of it could be had without swapping.
    pub memory_available: u64,
    /// The kernel's swap.
    pub swap_total: u64,
    /// What of it is used.
    pub swap_used: u64,
    /// Bytes per second read back from the kernel's swap.
    pub swapped_in_per_second: Option<f64>,
    /// The share of the time in which some task waited for a CPU (PSI).
    pub cpu_stall: Option<f64>,
    /// The same for memory.
    pub memory_stall: Option<f64>,
    /// The same for disks.
    pub io_stall: Option<f64>,
    /// Block devices that did something.
    pub devices: Vec<Device>,
}

/// A block device of the host's.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Device {
    /// As in `/dev`.
    pub name: String,
    /// Requests per second.
    pub requests_per_second: f64,
    /// How long they took on average, from when the kernel had them.
    pub await_seconds: Option<f64>,
    /// The share of the time in which there were any.
    pub utilization: f64,
}

/// A VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Vm {
    /// Its name; without one `PID` and its process's number.
    pub name: String,
    /// QEMU's process number.
    pub pid: i32,
    /// The memory that it was given, if that is known.
    pub ram: Option<u64>,
    /// The vCPUs that it was given, if that is known.
    pub vcpus_given: Option<u32>,
    /// What it did with CPUs.
    pub cpu: Option<VmCpu>,
    /// What of its memory is in the host's.
    pub memory: Option<VmMemory>,
    /// What the Larder that manages its memory tells.
    pub managed: Option<Managed>,
    /// Its disks that Larder serves.
    pub disks: Vec<VmDisk>,
    /// Devices of the host's, by their names, that it has files open on.
    pub devices: Vec<String>,
}

/// CPU time of a VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct VmCpu {
    /// CPUs that all its threads used on average.
    pub used: f64,
    /// CPUs that its vCPUs used on average, if they can be told from other threads.
    pub vcpus_used: Option<f64>,
    /// The same in the slice in which that was most.
    pub vcpus_used_peak: Option<f64>,
    /// How many of its threads waited in a CPU's queue on average.
    pub waiting: f64,
    /// Its vCPUs; empty if they cannot be told apart.
    pub vcpus: Vec<Vcpu>,
}

/// A vCPU.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Vcpu {
    /// Its thread's name.
    pub thread: String,
    /// The share of the time in which it ran.
    pub busy: f64,
    /// The share of the time in which it could have run and waited for a CPU (ready time).
    pub ready: f64,
    /// The same in the slice in which that was most.
    pub ready_peak: f64,
}

/// Memory of a VM's process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct VmMemory {
    /// What is in memory; the process's share of it, where others have it too.
    pub resident: u64,
    /// What the kernel has swapped out.
    pub swapped: u64,
}

/// A VM's memory as `larder memory attach` keeps it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Managed {
    /// Where it was asked.
    pub control: String,
    /// All of the memory.
    pub size: u64,
    /// What may be used for it.
    pub budget: u64,
    /// What is: pages in memory, compressed ones, and what is kept of each page.
    pub used: u64,
    /// Pages in memory.
    pub resident: u64,
    /// Pages per second that came back because they were touched, from compressed RAM and from disks.
    pub faults_per_second: f64,
    /// Those of them that would not have gone with a little more memory.
    pub refaults_per_second: f64,
    /// How long whoever touches a page of a disk waits, on average.
    pub disk_fault_seconds: Option<f64>,
    /// The time that its threads together waited for pages that had gone, as a share of the time, of one vCPU.
    pub stall: f64,
    /// Why the budget is not kept, if it is not.
    pub problem: Option<String>,
    /// Faults by budget, in the order of budgets: with this one, and what would have been left with larger ones. Of pages
    /// in compressed RAM and on disks; empty if Larder is too old to tell.
    pub curve: Vec<AtBudget>,
}

/// A point of that.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct AtBudget {
    /// The budget.
    pub budget: u64,
    /// Pages per second that come back.
    pub faults_per_second: f64,
}

/// A disk that Larder serves to a VM.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct VmDisk {
    /// What its VM calls it, or its image.
    pub name: String,
    /// Reads and writes per second.
    pub requests_per_second: f64,
    /// How long they took on average, as the guest sees it.
    pub await_seconds: Option<f64>,
    /// How long 99 % of the reads took at most.
    pub read_p99_seconds: Option<f64>,
    /// The share of the time in which there were any.
    pub utilization: f64,
    /// Its limits, if it has any: what they make a request wait for is part of the time that it takes.
    pub limits: Option<String>,
}

/// What was not measured.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Gap {
    /// Of which VM; `None` for the host.
    pub vm: Option<String>,
    /// What.
    pub what: String,
    /// Why.
    pub why: String,
}

impl Vm {
    /// How it is called in sentences.
    pub fn title(&self) -> String {
        match self.name == unnamed(self.pid) {
            true => self.name.clone(),
            false => format!("{} (PID {})", self.name, self.pid),
        }
    }

    /// The vCPU that was ready and waited for the longest time: one that others wait for keeps all of them waiting.
    pub fn worst_vcpu(&self) -> Option<&Vcpu> {
        let vcpus = self.cpu.as_ref()?.vcpus.iter();
        vcpus.max_by(|one, other| one.ready.total_cmp(&other.ready))
    }

    /// What it takes of the host's memory, with what Larder keeps for it elsewhere.
    pub fn footprint(&self) -> Option<u64> {
        let resident = self.memory?.resident;
        Some(match &self.managed {
            // Compressed pages are in Larder's process.
            Some(managed) => resident.saturating_sub(managed.resident).saturating_add(managed.used),
            None => resident,
        })
    }
}

/// What a VM is called that has no name.
pub fn unnamed(pid: i32) -> String {
    format!("PID {pid}")
}
