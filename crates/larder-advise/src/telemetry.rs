//! State that Larder's servers report about a VM, as the difference between two answers.

use larder_vm::control::memory::{MemoryProblem, MemoryState, StallState, SwapTier};
use larder_vm::control::rates::DiskRates;
use larder_vm::control::state::{DiskState, Latency};

use crate::measured::{FaultRatePoint, MeasuredDisk, MeasuredVm, MeasurementGap, PagedMemory};
use crate::qemu::{QemuCommandLine, printable};
use crate::servers::{Telemetry, TelemetryBySocket};

/// Page size, in bytes.
const PAGE_BYTES: u64 = 4096;

/// State of one VM according to Larder's servers.
#[derive(Default)]
pub(crate) struct VmTelemetry {
    pub(crate) managed: Option<PagedMemory>,
    pub(crate) disks: Vec<MeasuredDisk>,
}

/// Returns the sockets of servers that did not report everything, with the reason.
pub(crate) fn unanswered_gaps(now: &TelemetryBySocket) -> impl Iterator<Item = (String, MeasurementGap)> {
    now.iter().filter_map(|(path, telemetry)| {
        let path = printable(&path.display().to_string());
        let gap = MeasurementGap {
            vm: telemetry.vm.as_deref().map(printable),
            what: format!("Larder's report at {path}"),
            why: telemetry.incomplete_reason.clone()?,
        };
        Some((path, gap))
    })
}

/// Returns the state of `vm`, whose process belongs to the user `owner`.
pub(crate) fn vm_telemetry(
    vm: &MeasuredVm,
    command_line: &QemuCommandLine,
    owner: Option<u32>,
    before: &TelemetryBySocket,
    now: &TelemetryBySocket,
) -> VmTelemetry {
    let mut all = VmTelemetry::default();
    for (path, telemetry) in now {
        if !is_trusted(telemetry, owner) {
            continue;
        }
        let old = before.get(path);
        if let Some(memory) = telemetry.memory.as_ref().filter(|memory| memory.pid == vm.pid) {
            let before = old.and_then(|old| old.memory.as_ref());
            let before = before.filter(|before| before.pid == memory.pid);
            all.managed = before
                .and_then(|before| memory_activity(before, memory, vm.vcpus_given))
                .map(|managed| PagedMemory { control: path.display().to_string(), ..managed });
        }
        for (index, disk) in telemetry.disks.iter().enumerate() {
            let belongs_to_vm =
                is_served_to(disk, command_line) || telemetry.vm.as_ref().is_some_and(|name| *name == vm.name);
            let before = old.and_then(|old| old.disks.get(index));
            let before = before.filter(|before| before.image == disk.image);
            if let (true, Some(rates)) = (belongs_to_vm, before.and_then(|before| DiskRates::between(before, disk))) {
                all.disks.push(disk_activity(disk, &rates));
            }
        }
    }
    all
}

/// Returns whether a server is trusted: it must run as root or as the VM's user, because other users could report
/// anything.
fn is_trusted(telemetry: &Telemetry, owner: Option<u32>) -> bool {
    telemetry.owner.is_none_or(|server_owner| server_owner == 0 || Some(server_owner) == owner)
}

/// Returns whether QEMU's command line contains the address at which the disk is served.
fn is_served_to(disk: &DiskState, command_line: &QemuCommandLine) -> bool {
    let socket = disk.exports.vhost_user.as_ref().map(|server| server.socket.as_str());
    let uri = disk.exports.nbd.as_ref().map(|server| server.uri.as_str());
    socket.into_iter().chain(uri).any(|address| command_line.contains(address))
}

fn disk_activity(disk: &DiskState, rates: &DiskRates) -> MeasuredDisk {
    let kinds = [rates.read, rates.write];
    let requests: f64 = kinds.iter().map(|kind| kind.per_second).sum();
    let total_seconds: f64 = kinds.iter().map(|kind| kind.per_second * kind.await_seconds.unwrap_or_default()).sum();
    MeasuredDisk {
        name: printable(disk.name.as_deref().unwrap_or(&disk.image)),
        requests_per_second: requests,
        await_seconds: (requests > 0.0).then(|| total_seconds / requests),
        read_p99_seconds: rates.read.p99_seconds,
        utilization: rates.utilization,
        limits: Some(disk.limits.to_string()).filter(|limits| !limits.is_empty()),
    }
}

/// Returns the difference between two states, or `None` if `now` is not a later state of the same pager.
fn memory_activity(before: &MemoryState, now: &MemoryState, vcpus: Option<u32>) -> Option<PagedMemory> {
    let elapsed_ns = now.time_ns.checked_sub(before.time_ns).filter(|ns| *ns > 0)?;
    let seconds = elapsed_ns as f64 / 1e9;
    // Zero faults are left out: pages that were never written fault with any budget.
    let uniform = now.faults.uniform.since(&before.faults.uniform)?;
    let compressed = now.faults.compressed.since(&before.faults.compressed)?;
    let disk = now.faults.disk.since(&before.faults.disk)?;
    let write = now.faults.write.since(&before.faults.write)?;
    let waited = |latency: &Latency| latency.sum_ns as f64;
    let stalled_ns: f64 = [&uniform, &compressed, &disk, &write].map(waited).iter().sum();
    let faults = uniform.count + compressed.count + disk.count;
    // A wait enters these counters when it ends, including the part before this interval. It is therefore bounded by
    // the time that some threads (upper bound) and all threads (lower bound) lost in the interval.
    let vcpus = f64::from(vcpus.unwrap_or(1).max(1));
    let lost = |now: &StallState, before: &StallState| {
        let lost_us = now.total_us.saturating_sub(before.total_us);
        (lost_us as f64 * 1e3 / elapsed_ns as f64).min(1.0)
    };
    let some = lost(&now.pressure.some, &before.pressure.some);
    let full = lost(&now.pressure.full, &before.pressure.full);
    let in_flight = if now.stalled > 0 { some / vcpus } else { 0.0 };
    let stall = (stalled_ns / elapsed_ns as f64 / vcpus).min(some).max(full).max(in_flight);
    Some(PagedMemory {
        control: String::new(),
        size: now.size,
        budget: now.budget,
        used: now.used,
        resident: now.resident,
        faults_per_second: faults as f64 / seconds,
        refaults_per_second: now.refaults.checked_sub(before.refaults)? as f64 / seconds,
        disk_fault_seconds: disk.mean().map(|mean| mean.as_secs_f64()),
        stall,
        problem: now.problem.map(|problem| problem_text(problem, now)),
        curve: fault_curve(before, now, seconds),
    })
}

/// Computes faults by budget from refault distances: a page with distance N would have stayed with memory for N more
/// pages.
fn fault_curve(before: &MemoryState, now: &MemoryState, seconds: f64) -> Vec<FaultRatePoint> {
    let count_before = |below| {
        let mut all = before.refault_distances.iter();
        all.find(|old| old.below_pages == below).map_or(0, |old| old.count)
    };
    let distances = now.refault_distances.iter();
    let new: Vec<(u64, u64)> =
        distances.map(|it| (it.below_pages, it.count.saturating_sub(count_before(it.below_pages)))).collect();
    if new.is_empty() {
        return Vec::new();
    }
    let faults_with = |pages: u64| {
        let further = new.iter().filter(|(below, _)| *below > pages).map(|(_, count)| *count);
        further.sum::<u64>() as f64 / seconds
    };
    // Starts at a sixteenth more than the budget, and ends at the memory size.
    let steps = (0..u64::BITS - PAGE_BYTES.ilog2()).map(|power| 1_u64 << power);
    let steps = steps
        .skip_while(|pages| pages * PAGE_BYTES < now.budget / 16)
        .take_while(|pages| now.budget.saturating_add(pages * PAGE_BYTES) < now.size);
    std::iter::once(0)
        .chain(steps)
        .map(|pages| FaultRatePoint { budget: now.budget + pages * PAGE_BYTES, faults_per_second: faults_with(pages) })
        .collect()
}

fn problem_text(problem: MemoryProblem, state: &MemoryState) -> String {
    let has_cache = state.disks.iter().any(|disk| disk.tier == SwapTier::SwapCache);
    match problem {
        MemoryProblem::TiersFull if has_cache => "its swap cache is full",
        MemoryProblem::TiersFull => "its compressed memory is full, and it has no swap cache",
        MemoryProblem::Memory => "its pages cannot be evicted; the log of larder memory attach has the reason",
        MemoryProblem::DiskFailed => "the disk of its swap cache has failed",
        MemoryProblem::Incompressible => "its resident memory cannot be compressed, and it has no swap cache",
    }
    .to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns the state of a pager after `faults` disk faults of 2 ms each in `seconds` seconds.
    fn memory(seconds: u64, faults: u64) -> MemoryState {
        let lost = |ms: u64| json!({"avg10": 0.0, "avg60": 0.0, "avg300": 0.0, "total_us": ms * 1000});
        let (some, full) = (lost(faults * 2), lost(0));
        let none = json!({"count": 0, "sum_ns": 0, "max_ns": 0, "buckets": []});
        let disk = json!({"count": faults, "sum_ns": faults * 2_000_000, "max_ns": 2_000_000,
            "buckets": [{"below_ns": 2_097_152, "count": faults}]});
        let state = json!({
            "process": "qemu", "pid": 7, "time_ns": seconds * 1_000_000_000, "size": 4096, "resident": 1024,
            "budget": 2048, "used": 2000, "compressed": {"pages": 0, "used": 0, "limit": 0}, "disks": [],
            "uniform_pages": 0, "lost_pages": 0, "refaults": faults / 2, "evicted_pages": 0, "evicted_clean_pages": 0,
            "evicted_uniform_pages": 0, "evicted_bytes": 0, "ahead_pages": 0, "ahead_zero_pages": 0, "pressure": {"some": some, "full": full}, "streamed_faults": 0, "clean_pages": 0,
            "saved_pages": 0, "kept_pages": 0, "given_up_pages": 0, "stalled": 0, "problem": null, "detaching": false,
            "faults": {"zero": disk, "uniform": none, "compressed": none, "disk": disk, "write": none},
        });
        serde_json::from_value(state).expect("a state")
    }

    /// Stall is the time that threads waited for pages, divided by elapsed time and the number of vCPUs.
    #[test]
    fn stall_is_fault_time_per_vcpu() {
        // 1000 faults of 2 ms in 10 s are 20 % of one vCPU's time, 5 % of the time of four.
        let managed = memory_activity(&memory(10, 500), &memory(20, 1500), Some(4)).expect("time has passed");
        assert_eq!((managed.stall, managed.faults_per_second), (0.05, 100.0));
        assert_eq!((managed.refaults_per_second, managed.disk_fault_seconds), (50.0, Some(0.002)));
        let one = memory_activity(&memory(10, 500), &memory(20, 1500), None).expect("time has passed");
        assert_eq!(one.stall, 0.2);
        // Both vCPUs have been waiting for two seconds for a page on a disk that is unreachable.
        let (before, mut now) = (memory(10, 0), memory(14, 0));
        (now.pressure.some.total_us, now.pressure.full.total_us, now.stalled) = (3_000_000, 2_000_000, 2);
        assert_eq!(memory_activity(&before, &now, Some(2)).map(|managed| managed.stall), Some(0.5));
        // One vCPU waits, and the other one is not affected.
        now.pressure.full.total_us = 0;
        assert_eq!(memory_activity(&before, &now, Some(2)).map(|managed| managed.stall), Some(0.375));
        // A page arrived after the first of these 4 s; a thread had waited 10 s for it.
        let mut now = memory(14, 5000);
        now.pressure.some.total_us = 1_000_000;
        assert_eq!(memory_activity(&before, &now, Some(1)).map(|managed| managed.stall), Some(0.25));
        // Another pager counts from zero.
        assert_eq!(memory_activity(&memory(10, 500), &memory(20, 400), None), None);
        assert_eq!(memory_activity(&memory(10, 500), &memory(10, 500), None), None);
    }

    /// The fault curve counts, for each budget, the faults on pages that were evicted longer ago.
    #[test]
    fn fault_curve_counts_longer_distances() {
        // The budget is 64 pages of 256, so steps begin at 4 pages. 2 pages return after fewer than 4 others, 4 after
        // fewer than 8, 10 after fewer than 128, and 30 after more.
        let at = |seconds, counts: [u64; 4]| {
            let below = [4, 8, 128, 1024];
            let distances =
                below.iter().zip(counts).map(|(below, count)| json!({"below_pages": below, "count": count}));
            let mut state = memory(seconds, 0);
            (state.size, state.budget) = (256 * PAGE_BYTES, 64 * PAGE_BYTES);
            state.refault_distances = distances.map(|it| serde_json::from_value(it).expect("a distance")).collect();
            state
        };
        let mut before = at(10, [7, 7, 7, 7]);
        let now = at(12, [9, 11, 17, 37]);
        let points = |before: &MemoryState| -> Vec<(u64, f64)> {
            let curve = fault_curve(before, &now, 2.0);
            curve.iter().map(|at| (at.budget / PAGE_BYTES, at.faults_per_second)).collect()
        };
        let expected = [(64, 23.0), (68, 22.0), (72, 20.0), (80, 20.0), (96, 20.0), (128, 20.0), (192, 15.0)];
        assert_eq!(points(&before), expected);
        // The earlier state has no distances yet.
        before.refault_distances.clear();
        assert_eq!(points(&before)[0], (64, 37.0));
        assert_eq!(fault_curve(&before, &memory(12, 0), 2.0), []);
    }

    #[test]
    fn server_of_another_user_is_ignored() {
        let telemetry = |owner| Telemetry { owner, ..Telemetry::default() };
        assert!(
            is_trusted(&telemetry(Some(0)), Some(5))
                && is_trusted(&telemetry(Some(5)), Some(5))
                && is_trusted(&telemetry(None), None)
        );
        assert!(!is_trusted(&telemetry(Some(6)), Some(5)) && !is_trusted(&telemetry(Some(6)), None));
    }
}
