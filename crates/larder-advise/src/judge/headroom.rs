//! Number of VMs that fit in addition: without over-commit, by the memory that VMs were given; with it, by the active
//! memory, up to 80 % of the host's memory; and by CPUs. None fits if VMs already wait for memory or CPUs.

use serde::Serialize;

use super::format::size;
use super::{AdvicePolicy, CPU_TARGET, READY_LOW, memory_stall};
use crate::measured::{Measured, MeasuredVm};

/// Lowest CPU use of a typical VM for which the number of VMs by CPUs is computed.
const TYPICAL_CPUS_MIN: f64 = 0.01;

/// Allocation of the host's memory, in bytes.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Headroom {
    /// Memory of the host, without the reserve.
    pub capacity: u64,
    /// Memory used by other processes than VMs, and not available without swapping.
    pub others: u64,
    /// Memory that VMs were given; for a VM with a budget, the budget.
    pub committed: u64,
    /// Active part of that memory, at most.
    pub active: u64,
    /// Memory that can be given without over-commit; negative if memory is over-committed already.
    pub spare_committed: i64,
    /// Memory that may become active until the intended share is reached; negative if it is exceeded already.
    pub spare_active: i64,
    /// Memory that can be given until the accepted over-commit is reached; negative if it is exceeded already.
    pub spare_overcommit: i64,
    /// VMs for which the given or the resident memory is unknown.
    pub unknown: Vec<String>,
    /// Worst memory stall now, if it is measured.
    pub stall: Option<f64>,
    /// Average VM of this host.
    pub typical: Option<TypicalVm>,
    /// Number of average VMs that fit in addition.
    pub more: Option<AdditionalVms>,
}

/// Average VM of a host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct TypicalVm {
    /// Memory that it was given.
    pub ram: u64,
    /// Active part of that memory, at most.
    pub active: u64,
    /// CPUs that it uses.
    pub cpus: f64,
}

/// Number of VMs that fit in addition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct AdditionalVms {
    /// Number without over-commit.
    pub without_overcommit: u64,
    /// Number with over-commit; 0 if VMs wait for memory longer than is accepted, `None` if the stall is not
    /// measured.
    pub with_overcommit: Option<u64>,
    /// Number by CPUs alone, if CPU times are measured and VMs use CPUs.
    pub by_cpus: Option<u64>,
}

impl Headroom {
    /// Computes the room from measurements.
    pub fn new(measured: &Measured, policy: &AdvicePolicy) -> Self {
        let host = &measured.host;
        let capacity = host.memory_total.saturating_sub(policy.reserve);
        let sum =
            |value_of: &dyn Fn(&MeasuredVm) -> u64| measured.vms.iter().map(value_of).fold(0, u64::saturating_add);
        let footprints = sum(&|vm| vm.footprint().unwrap_or_default());
        let others = host.memory_total.saturating_sub(host.memory_available).saturating_sub(footprints);
        let committed = sum(&committed);
        let active = sum(&|vm| active(vm, measured.window_seconds, policy));
        let is_unknown = |vm: &&MeasuredVm| vm.ram.is_none() || vm.memory.is_none();
        let target = (capacity as f64 * policy.active_share) as u64;
        let overcommit_limit = (capacity as f64 * policy.overcommit) as u64;
        let stall = memory_stall(measured);
        let mut headroom = Self {
            capacity,
            others,
            committed,
            active,
            spare_committed: difference(capacity, others.saturating_add(committed)),
            spare_active: difference(target, others.saturating_add(active)),
            spare_overcommit: difference(overcommit_limit, others.saturating_add(committed)),
            unknown: measured.vms.iter().filter(is_unknown).map(MeasuredVm::title).collect(),
            stall,
            typical: typical(measured, policy),
            more: None,
        };
        headroom.more = headroom.typical.map(|typical| headroom.additional_vms(&typical, measured, policy));
        headroom
    }

    fn additional_vms(&self, typical: &TypicalVm, measured: &Measured, policy: &AdvicePolicy) -> AdditionalVms {
        let times = |spare: i64, each: u64| u64::try_from(spare).unwrap_or(0) / each.max(1);
        let without = times(self.spare_committed, typical.ram);
        let with = self.stall.map(|stall| match stall > policy.stall {
            true => 0,
            false => {
                times(self.spare_active, typical.active).min(times(self.spare_overcommit, typical.ram)).max(without)
            }
        });
        let by_cpus = match (measured.host.cpus, measured.host.cpu_busy) {
            _ if mean_ready_time(measured).is_some_and(|ready| ready > READY_LOW) => Some(0),
            (Some(number), Some(busy)) if typical.cpus >= TYPICAL_CPUS_MIN => {
                let spare = (CPU_TARGET - busy) * f64::from(number);
                Some((spare / typical.cpus + 1e-9).max(0.0) as u64)
            }
            _ => None,
        };
        AdditionalVms { without_overcommit: without, with_overcommit: with, by_cpus }
    }

    /// Returns the active share of the memory that VMs were given, at most.
    pub(super) fn active_share(&self) -> Option<f64> {
        let typical = self.typical?;
        (typical.ram > 0).then(|| (typical.active as f64 / typical.ram as f64).min(1.0))
    }

    /// Describes the allocation of the capacity, for sentences.
    pub(super) fn capacity_text(&self, policy: &AdvicePolicy) -> String {
        let reserve = match policy.reserve {
            0 => String::new(),
            reserve => format!(", without a reserve of {}", size(reserve)),
        };
        format!("the host has {} for VMs{reserve}; others use {} of it", size(self.capacity), size(self.others))
    }
}

fn difference(one: u64, other: u64) -> i64 {
    let signed = |bytes| i64::try_from(bytes).unwrap_or(i64::MAX);
    signed(one).saturating_sub(signed(other))
}

/// Returns the memory that a VM may eventually use.
fn committed(vm: &MeasuredVm) -> u64 {
    let footprint = vm.footprint().unwrap_or_default();
    match &vm.managed {
        // A VM that exceeds its budget is not bounded by it.
        Some(managed) if managed.problem.is_none() => managed.budget.min(managed.size).max(footprint),
        _ => vm.ram.unwrap_or_default().max(footprint),
    }
}

/// Returns the memory that a VM used within the window, at most.
fn active(vm: &MeasuredVm, seconds: f64, policy: &AdvicePolicy) -> u64 {
    let resident = vm.memory.map_or(0, |memory| memory.resident);
    match &vm.managed {
        // The budget is smaller than the working set, whose size is unknown, so all memory may be active.
        Some(managed) if managed.stall > policy.stall => {
            resident.saturating_sub(managed.resident).saturating_add(managed.size)
        }
        // Resident memory, and memory that was faulted in meanwhile and may have been evicted again.
        Some(managed) => {
            let faulted_in = (managed.faults_per_second * seconds * 4096.0) as u64;
            resident.saturating_add(faulted_in.min(managed.size.saturating_sub(managed.resident)))
        }
        None => resident,
    }
}

fn typical(measured: &Measured, policy: &AdvicePolicy) -> Option<TypicalVm> {
    let known: Vec<(u64, &MeasuredVm)> =
        measured.vms.iter().filter(|vm| vm.memory.is_some()).filter_map(|vm| Some((vm.ram?, vm))).collect();
    let number = known.len() as u64;
    let mean = |value_of: &dyn Fn(&(u64, &MeasuredVm)) -> u64| {
        known.iter().map(value_of).fold(0, u64::saturating_add).checked_div(number)
    };
    let used = |(_, vm): &(u64, &MeasuredVm)| vm.cpu.as_ref().map_or(0.0, |cpu| cpu.used);
    Some(TypicalVm {
        ram: mean(&|(ram, _)| *ram)?,
        active: mean(&|(_, vm)| active(vm, measured.window_seconds, policy))?,
        cpus: known.iter().map(used).sum::<f64>() / number as f64,
    })
}

/// Returns the mean ready time of all vCPUs.
pub(super) fn mean_ready_time(measured: &Measured) -> Option<f64> {
    let vcpus = measured.vms.iter().filter_map(|vm| vm.cpu.as_ref()).flat_map(|cpu| &cpu.vcpus);
    let all: Vec<f64> = vcpus.map(|vcpu| vcpu.ready).collect();
    (!all.is_empty()).then(|| all.iter().sum::<f64>() / all.len() as f64)
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::over_commit::findings;
    use super::*;
    use crate::measured::{MeasuredHost, MeasuredMemory, PagedMemory, Vcpu, VmCpu};

    pub(crate) const GIB: u64 = 1 << 30;

    /// Returns a VM with the given memory and resident memory, in GiB.
    pub(crate) fn vm(ram: u64, resident: u64) -> MeasuredVm {
        MeasuredVm {
            ram: Some(ram * GIB),
            memory: Some(MeasuredMemory { resident: resident * GIB, swapped: 0 }),
            ..MeasuredVm::default()
        }
    }

    /// Returns a VM with a fully used budget and the given stall.
    pub(crate) fn managed(ram: u64, budget: u64, stall: f64) -> MeasuredVm {
        MeasuredVm {
            managed: Some(PagedMemory {
                size: ram * GIB,
                budget: budget * GIB,
                used: budget * GIB,
                resident: budget * GIB,
                stall,
                ..PagedMemory::default()
            }),
            ..vm(ram, budget)
        }
    }

    /// Returns a host of 101 GiB, of which other processes use 1 GiB, without a stall.
    pub(crate) fn host(vms: Vec<MeasuredVm>) -> Measured {
        let footprints: u64 = vms.iter().filter_map(MeasuredVm::footprint).sum();
        Measured {
            window_seconds: 10.0,
            host: MeasuredHost {
                memory_total: 101 * GIB,
                memory_available: 100 * GIB - footprints,
                memory_stall: Some(0.0),
                ..MeasuredHost::default()
            },
            vms,
            ..Measured::default()
        }
    }

    fn room(measured: &Measured) -> Headroom {
        Headroom::new(measured, &AdvicePolicy::default())
    }

    fn more(measured: &Measured) -> (u64, Option<u64>) {
        let more = room(measured).more.expect("there are VMs");
        (more.without_overcommit, more.with_overcommit)
    }

    /// VMs fit by given memory without over-commit, and by 80 % active memory with it.
    #[test]
    fn room_counts_given_and_active_memory() {
        // 100 GiB are for VMs and other processes, which use 1 GiB. Four VMs of 10 GiB leave 59 GiB, room for 5.
        // Active are 1 + 4 * 2 of 80 GiB; the remaining 71 GiB hold 35 VMs with 2 GiB each. But of the 150 GiB that
        // may be given, 109 are left, for 10 VMs.
        let four = host(vec![vm(10, 2); 4]);
        assert_eq!(more(&four), (5, Some(10)));
        let headroom = room(&four);
        assert_eq!((headroom.capacity, headroom.others), (100 * GIB, GIB));
        assert_eq!((headroom.committed, headroom.active), (40 * GIB, 8 * GIB));
        assert_eq!((headroom.spare_committed, headroom.spare_active), (59 << 30, 71 << 30));
        // 12 VMs of 10 GiB are 120: over-committed. Active are 1 + 12 * 6 of 80, so one more of 6 fits.
        assert_eq!(more(&host(vec![vm(10, 6); 12])), (0, Some(1)));
        assert_eq!(more(&host(vec![vm(10, 7); 12])), (0, Some(0)));
        // All given memory is active, but the room without over-commit is promised to no VM.
        assert_eq!(more(&host(vec![vm(10, 10); 8])), (1, Some(1)));
    }

    /// A budget counts as the committed memory while it is not exceeded.
    #[test]
    fn kept_budget_is_committed_memory() {
        // Committed: 99 - 4 * 5 = 79 GiB, 20 for each VM.
        // Active: 80 - 1 - 20 = 59 GiB, 5 for each.
        // Over-commit: 150 - 1 - 20 = 129 GiB, 20 for each.
        assert_eq!(more(&host(vec![managed(20, 5, 0.01); 4])), (3, Some(6)));
        let mut failing = managed(20, 5, 0.01);
        if let Some(managed) = &mut failing.managed {
            managed.problem = Some("full".to_owned());
        }
        assert_eq!(room(&host(vec![failing])).committed, 20 * GIB);
    }

    #[test]
    fn compressed_pages_count_for_their_vm() {
        let mut one = managed(20, 5, 0.0);
        if let (Some(managed), Some(memory)) = (&mut one.managed, &mut one.memory) {
            (managed.resident, memory.resident) = (3 * GIB, 4 * GIB);
        }
        assert_eq!(one.footprint(), Some(6 * GIB));
        let measured = host(vec![one]);
        assert_eq!(room(&measured).others, GIB);
        // Only resident memory is active.
        assert_eq!(room(&measured).active, 4 * GIB);
    }

    #[test]
    fn refaulted_pages_count_as_active() {
        let mut one = managed(20, 5, 0.0);
        if let Some(managed) = &mut one.managed {
            managed.faults_per_second = f64::from(1 << 18) / 10.0;
        }
        assert_eq!(room(&host(vec![one])).active, 6 * GIB);
    }

    #[test]
    fn stall_above_policy_prevents_overcommit() {
        assert_eq!(more(&host(vec![managed(20, 5, 0.05); 4])).1, Some(6));
        assert_eq!(more(&host(vec![managed(20, 5, 0.051); 4])).1, Some(0));
        let mut waits = host(vec![vm(10, 2)]);
        waits.host.memory_stall = Some(0.06);
        assert_eq!(more(&waits).1, Some(0));
        let codes = |measured: &Measured| -> Vec<_> {
            let policy = AdvicePolicy::default();
            let findings = findings(measured, &policy, &Headroom::new(measured, &policy));
            findings.iter().map(|finding| finding.code).collect()
        };
        assert_eq!(codes(&waits), ["fit-without-overcommit", "stall-too-high"]);
        waits.host.memory_stall = None;
        assert_eq!(more(&waits).1, None);
        assert_eq!(codes(&waits), ["fit-without-overcommit", "stall-not-measured"]);
        assert_eq!(codes(&host(vec![vm(60, 2); 2])), ["overcommitted", "fit-with-overcommit"]);
        assert_eq!(codes(&host(Vec::new())), ["left-without-overcommit"]);
    }

    /// CPUs may be busy to 80 %, and no VM fits if vCPUs wait for CPUs.
    #[test]
    fn room_by_cpus_needs_idle_cpus() {
        let with_cpus = |used: f64, busy: f64, ready: f64| {
            let mut one = vm(10, 2);
            one.cpu = Some(VmCpu { used, vcpus: vec![Vcpu { ready, ..Vcpu::default() }], ..VmCpu::default() });
            let mut measured = host(vec![one]);
            (measured.host.cpus, measured.host.cpu_busy) = (Some(10), Some(busy));
            room(&measured).more.expect("there is a VM").by_cpus
        };
        // 8 less 3 CPUs, 0.5 each.
        assert_eq!(with_cpus(0.5, 0.3, 0.01), Some(10));
        assert_eq!(with_cpus(0.5, 0.8, 0.01), Some(0));
        assert_eq!(with_cpus(0.5, 0.9, 0.01), Some(0));
        assert_eq!(with_cpus(0.5, 0.3, 0.051), Some(0));
        assert_eq!(with_cpus(0.001, 0.3, 0.01), None);
    }

    #[test]
    fn sentences_contain_evidence() {
        let policy = AdvicePolicy::default();
        let measured = host(vec![vm(10, 2); 4]);
        let texts: Vec<_> =
            findings(&measured, &policy, &room(&measured)).into_iter().map(|finding| finding.text).collect();
        assert_eq!(
            texts,
            [
                "the host has 100 GiB for VMs, without a reserve of 1 GiB; others use 1 GiB of it, and VMs were given 40 \
                 GiB: without over-commit 5 more VMs of 10 GiB fit, 59 GiB are left",
                "VMs and others have at most 9 GiB active (for 4 VMs, all resident memory counts, because the active part \
                 is unknown), 9.0 % of the host's memory, and tasks wait for memory 0 % of the time (5.0 % accepted): up to \
                 80 %, and 150 % given in all, 10 more VMs such as these fit by memory (10 GiB, 2 GiB active)",
            ]
        );
    }
}
