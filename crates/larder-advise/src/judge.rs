//! Advice from measurements. It applies the three practices of the study of memory over-commit (Intel IT, 2016):
//! - Give VMs the size that they use.
//! - Over-commit memory up to 80 % of active memory, with CPUs busy to about 80 %.
//! - Check whether the disks are slow, which looks like a lack of CPUs or memory.
//!
//! The study saw no more degradation at 150 % over-subscription with a swap cache on SSDs than without. More than
//! that is not advised, however little memory is active now.
//!
//! No system call is made here, and no clock is read: the same numbers give the same sentences.

mod fit;
mod format;
mod headroom;
mod over_commit;
mod right_size;
mod storage;

use serde::Serialize;

use crate::measured::{Measured, MeasuredVm};

pub use fit::{Fit, WouldFit};
pub use format::{percent, size, time};
pub use headroom::{AdditionalVms, Headroom, TypicalVm};

/// Shortest window, in seconds, from which the needs of a VM are judged.
pub const WINDOW_SECONDS_MIN: f64 = 5.0;

/// Ready time up to this share is no problem.
pub const READY_LOW: f64 = 0.05;

/// Ready time from this share on is noticeable in the guest.
pub const READY_HIGH: f64 = 0.10;

/// Intended mean load of the CPUs (from the study).
pub const CPU_TARGET: f64 = 0.80;

/// Goals of the operator.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct AdvicePolicy {
    /// Memory in bytes that is reserved for other uses than VMs, beyond present use.
    pub reserve: u64,
    /// Share of the host's memory that may be active.
    pub active_share: f64,
    /// Memory that VMs may be given in all, as a share of the host's memory.
    pub overcommit: f64,
    /// Accepted share of the time spent waiting for memory.
    pub stall: f64,
    /// Accepted time of a disk request, in seconds.
    pub latency_seconds: f64,
}

impl Default for AdvicePolicy {
    fn default() -> Self {
        Self { reserve: 1 << 30, active_share: 0.80, overcommit: 1.50, stall: 0.05, latency_seconds: 0.020 }
    }
}

/// Practice that a finding belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Practice {
    /// VMs as large as their use.
    RightSize,
    /// Number of VMs that fit in addition.
    OverCommit,
    /// Slowness of disks.
    Storage,
}

/// Severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Level {
    /// No action is needed.
    Fine,
    /// An improvement is possible.
    Advice,
    /// There is a problem now.
    Warning,
    /// No judgement is possible.
    Unknown,
}

/// Finding with its evidence.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Practice that the finding belongs to.
    pub practice: Practice,
    /// Title of the VM; `None` for the host.
    pub vm: Option<String>,
    /// Severity.
    pub level: Level,
    /// Identifier of the finding, for programs.
    pub code: &'static str,
    /// Sentence that states the finding to the operator.
    pub text: String,
}

impl Finding {
    fn for_vm(vm: &MeasuredVm, practice: Practice, level: Level, code: &'static str, text: String) -> Self {
        Self { practice, vm: Some(vm.title()), level, code, text }
    }

    fn for_host(practice: Practice, level: Level, code: &'static str, text: String) -> Self {
        Self { practice, vm: None, level, code, text }
    }
}

/// Result of the judgement.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Advice {
    /// Policy that was applied.
    pub policy: AdvicePolicy,
    /// Findings.
    pub findings: Vec<Finding>,
    /// Room for more VMs.
    pub room: Headroom,
    /// Answer whether one more VM would fit, if that was asked.
    pub would_fit: Option<WouldFit>,
}

/// Judges measurements; `size` is the memory in bytes of a VM for which the answer whether it fits is wanted.
pub fn judge(measured: &Measured, policy: &AdvicePolicy, size: Option<u64>) -> Advice {
    let mut findings = right_size::findings(measured, policy);
    let room = Headroom::new(measured, policy);
    findings.extend(over_commit::findings(measured, policy, &room));
    findings.extend(storage::findings(measured, policy));
    Advice { policy: *policy, findings, would_fit: size.map(|size| WouldFit::new(size, measured, policy, &room)), room }
}

/// Returns the worst memory stall: of the host's tasks, or of a VM whose memory Larder manages.
fn memory_stall(measured: &Measured) -> Option<f64> {
    let managed = measured.vms.iter().filter_map(|vm| Some(vm.managed.as_ref()?.stall));
    managed.chain(measured.host.memory_stall).reduce(f64::max)
}
