//! What follows from what was measured: the three practices of the study of memory over-commit (Intel IT, 2016): give VMs
//! the size that they use, over-commit memory up to 80 % of active memory with CPUs busy to about 80 %, and look whether the
//! disks are slow, which looks like a want of CPUs or memory. It saw no more degradation at 150 % over-subscription with a
//! swap cache on SSDs than without: more than that is not advised either, however little is active now.
//!
//! No system call is made here, and no clock read: the same numbers have the same sentences.

mod fit;
mod over_commit;
mod right_size;
mod room;
mod storage;
mod words;

use serde::Serialize;

use crate::measured::{Measured, Vm};

pub use fit::{Fit, WouldFit};
pub use room::{More, Room, Typical};
pub use words::{percent, size, time};

/// Shorter looks say nothing of what a VM needs.
pub const WINDOW_SECONDS_MIN: f64 = 5.0;

/// Ready time up to this share is no trouble.
pub const READY_LOW: f64 = 0.05;

/// Ready time from this share on is felt in the guest.
pub const READY_HIGH: f64 = 0.10;

/// How busy CPUs are to be on average (the study's).
pub const CPU_TARGET: f64 = 0.80;

/// What the operator wants.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Policy {
    /// Memory in bytes that VMs are not to have, besides what others use now.
    pub reserve: u64,
    /// The share of the host's memory that may be active.
    pub active_share: f64,
    /// What VMs may be given in all, as a share of the host's memory.
    pub overcommit: f64,
    /// The share of the time for which waiting for memory is accepted.
    pub stall: f64,
    /// How long a request to a disk may take, in seconds.
    pub latency_seconds: f64,
}

impl Default for Policy {
    fn default() -> Self {
        Self {
            reserve: 1 << 30,
            active_share: 0.80,
            overcommit: 1.50,
            stall: 0.05,
            latency_seconds: 0.020,
        }
    }
}

/// Which of the three practices a finding is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Practice {
    /// VMs as large as what they use.
    RightSize,
    /// How many more fit.
    OverCommit,
    /// Whether it is a disk.
    Storage,
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// Nothing.
    Fine,
    /// Something could be better.
    Advice,
    /// Something is wrong now.
    Warning,
    /// It cannot be said.
    Unknown,
}

/// What was found, with its evidence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Of what.
    pub practice: Practice,
    /// Of which VM, as it is called in sentences; `None` for the host.
    pub vm: Option<String>,
    /// What is to be done.
    pub level: Level,
    /// Which finding it is, for programs.
    pub code: &'static str,
    /// A sentence for people.
    pub text: String,
}

impl Finding {
    fn of(vm: &Vm, practice: Practice, level: Level, code: &'static str, text: String) -> Self {
        Self {
            practice,
            vm: Some(vm.title()),
            level,
            code,
            text,
        }
    }

    fn of_host(practice: Practice, level: Level, code: &'static str, text: String) -> Self {
        Self {
            practice,
            vm: None,
            level,
            code,
            text,
        }
    }
}

/// All that follows.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// By which it was judged.
    pub policy: Policy,
    /// What was found.
    pub findings: Vec<Finding>,
    /// How much more fits.
    pub room: Room,
    /// Whether one more VM would fit, if that was asked.
    pub would_fit: Option<WouldFit>,
}

/// Judges; `size` is that of a VM of which somebody wants to know whether it would fit.
pub fn judge(measured: &Measured, policy: &Policy, size: Option<u64>) -> Advice {
    let mut findings = right_size::findings(measured, policy);
    let room = Room::of(measured, policy);
    findings.extend(over_commit::findings(measured, policy, &room));
    findings.extend(storage::findings(measured, policy));
    Advice {
        policy: *policy,
        findings,
        would_fit: size.map(|size| WouldFit::of(size, measured, policy, &room)),
        room,
    }
}

/// The stall of memory that is worst: that of the host's tasks, or of a VM whose memory Larder manages.
fn memory_stall(measured: &Measured) -> Option<f64> {
    let managed = measured.vms.iter().filter_map(|vm| Some(vm.managed.as_ref()?.stall));
    managed.chain(measured.host.memory_stall).reduce(f64::max)
}
