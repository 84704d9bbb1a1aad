//! Findings about the number of VMs that fit in addition.

use super::format::{count, cpus, percent, size};
use super::headroom::{Headroom, mean_ready_time};
use super::{AdvicePolicy, CPU_TARGET, Finding, Level, Practice, READY_LOW};
use crate::measured::Measured;

pub(super) fn findings(measured: &Measured, policy: &AdvicePolicy, room: &Headroom) -> Vec<Finding> {
    let host = |level, code, text| Finding::for_host(Practice::OverCommit, level, code, text);
    let mut findings = vec![judge_without_overcommit(policy, room)];
    if !measured.vms.is_empty() {
        findings.push(judge_with_overcommit(measured, policy, room));
    }
    findings.extend(judge_by_cpus(measured, room));
    if let Some(rate) = measured.host.swapped_in_per_second.filter(|rate| *rate > 0.0) {
        findings.push(host(
            Level::Advice,
            "kernel-swaps-in",
            format!(
                "the kernel swaps in {} per second, of {} that it has swapped out: memory is already short",
                size(rate as u64),
                size(measured.host.swap_used)
            ),
        ));
    }
    findings
}

fn judge_without_overcommit(policy: &AdvicePolicy, room: &Headroom) -> Finding {
    let host = |level, code, text| Finding::for_host(Practice::OverCommit, level, code, text);
    let facts = format!("{}, and VMs were given {}", room.capacity_text(policy), size(room.committed));
    let Ok(spare) = u64::try_from(room.spare_committed) else {
        let excess = size(room.spare_committed.unsigned_abs());
        return host(Level::Advice, "overcommitted", format!("{facts}: that is {excess} more than there is"));
    };
    match (room.typical, room.more) {
        (Some(typical), Some(more)) => {
            let number = count(more.without_overcommit, "more VM");
            let text =
                format!("{facts}: without over-commit {number} of {} fit, {} are left", size(typical.ram), size(spare));
            host(Level::Fine, "fit-without-overcommit", text)
        }
        _ => host(Level::Fine, "left-without-overcommit", format!("{facts}: {} are left", size(spare))),
    }
}

fn judge_with_overcommit(measured: &Measured, policy: &AdvicePolicy, room: &Headroom) -> Finding {
    let host = |level, code, text| Finding::for_host(Practice::OverCommit, level, code, text);
    let unmanaged = measured.vms.iter().filter(|vm| vm.managed.is_none()).count() as u64;
    let unmanaged_text = match unmanaged {
        0 => String::new(),
        _ => {
            format!(" (for {}, all resident memory counts, because the active part is unknown)", count(unmanaged, "VM"))
        }
    };
    let facts = format!(
        "VMs and others have at most {} active{unmanaged_text}, {} of the host's memory",
        size(room.active.saturating_add(room.others)),
        percent(room.active.saturating_add(room.others) as f64 / room.capacity.max(1) as f64)
    );
    let target = percent(policy.active_share);
    let Some(stall) = room.stall else {
        let text = format!("{facts}; how long VMs wait for memory is not measured, so over-commit is not judged");
        return host(Level::Unknown, "stall-not-measured", text);
    };
    if stall > policy.stall {
        let text = format!(
            "{facts}, and tasks wait for memory {} of the time, more than the {} that are accepted: no more VMs",
            percent(stall),
            percent(policy.stall)
        );
        return host(Level::Warning, "stall-too-high", text);
    }
    let stall_text =
        format!("tasks wait for memory {} of the time ({} accepted)", percent(stall), percent(policy.stall));
    match (room.typical, room.more.and_then(|more| more.with_overcommit)) {
        (Some(typical), Some(number)) => {
            let text = format!(
                "{facts}, and {stall_text}: up to {target}, and {} given in all, {} such as these fit by memory ({}, {} active)",
                percent(policy.overcommit),
                count(number, "more VM"),
                size(typical.ram),
                size(typical.active)
            );
            host(Level::Fine, "fit-with-overcommit", text)
        }
        _ => host(
            Level::Unknown,
            "no-typical-vm",
            format!("{facts}, and {stall_text}: the given and the resident memory are known of no VM"),
        ),
    }
}

fn judge_by_cpus(measured: &Measured, room: &Headroom) -> Option<Finding> {
    let (number, busy) = (measured.host.cpus?, measured.host.cpu_busy?);
    let more = room.more?.by_cpus?;
    let facts = format!("the host's {} are busy to {}", count(number, "CPU"), percent(busy));
    let (level, code, text) = match mean_ready_time(measured).filter(|ready| *ready > READY_LOW) {
        Some(ready) => (
            Level::Warning,
            "cpus-short",
            format!(
                "{facts}, and vCPUs were ready but had no CPU {} of the time on average: no more VMs",
                percent(ready)
            ),
        ),
        None => (
            Level::Fine,
            "fit-by-cpus",
            format!(
                "{facts}: up to {} {} such as these fit ({} CPUs each)",
                percent(CPU_TARGET),
                count(more, "more VM"),
                cpus(room.typical?.cpus)
            ),
        ),
    };
    Some(Finding::for_host(Practice::OverCommit, level, code, text))
}
