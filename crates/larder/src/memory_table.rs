//! The memory of VMs: queries of the pagers, their state, and their activity in an interval.

use std::collections::HashMap;
use std::path::PathBuf;

use larder_vm::control::memory::MemoryState;
use larder_vm::control::memory_rates::{FaultRates, MemoryRates};
use larder_vm::control::state::DiskState;
use larder_vm::control::{ControlClientError, fetch_memory};
use larder_vm::vm::find::{self, KnownVm};
use serde::Serialize;
use serde_json::Value;

use crate::concurrent::query_each;
use crate::disk_image::format_size;
use crate::output::Table;

/// State of a pager: the JSON as received, and the fields that this program knows.
pub(crate) type MemoryReply = (Value, MemoryState);

/// Name of a VM, and the result of querying its pager.
pub(crate) type MemoryQuery = (String, Result<MemoryReply, ControlClientError>);

/// Queries all processes that may manage memory, those of `vms` and others, concurrently. The sockets of `disks` are
/// not queried, and processes that manage no memory are left out.
pub(crate) fn query_all<'a>(vms: &[KnownVm], disks: impl Iterator<Item = &'a DiskState>) -> Vec<MemoryQuery> {
    let exports = disks.filter_map(|disk| disk.exports.vhost_user.as_ref());
    let disk_sockets: Vec<PathBuf> = exports.map(|export| PathBuf::from(&export.socket)).collect();
    let mut all: Vec<KnownVm> = vms.to_vec();
    for found in find::memory_services(&disk_sockets) {
        if !all.iter().any(|vm| vm.control == found.control) {
            all.push(found);
        }
    }
    let results = query_each(&all, |vm| fetch_memory(&vm.control));
    let all = all.into_iter().zip(results);
    all.filter_map(|(vm, results)| match results {
        // Errors of the VMs' disk servers are reported elsewhere.
        Err(_) if vms.contains(&vm) => None,
        Err(ControlClientError::Missing { .. }) => None,
        Err(error) if manages_no_memory(&error) => None,
        results => Some((vm.name, results)),
    })
    .collect()
}

/// Queries the memory of one VM, at its control socket or at a separate pager's.
pub(crate) fn query_one(vm: &KnownVm, disks: &[DiskState]) -> Option<Result<MemoryReply, ControlClientError>> {
    let result = query_all(std::slice::from_ref(vm), disks.iter());
    result.into_iter().find(|(name, _)| *name == vm.name).map(|(_, result)| result)
}

/// Returns true if the error means that the process manages no memory.
fn manages_no_memory(error: &ControlClientError) -> bool {
    // The server reports that only in the text of its error.
    matches!(error, ControlClientError::Refused { error, .. } if error.contains("there is no /v1/memory"))
}

/// Memory activity of one VM.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct VmMemoryRates {
    pub(crate) vm: String,
    pub(crate) budget: u64,
    pub(crate) used: u64,
    #[serde(flatten)]
    pub(crate) rates: MemoryRates,
}

/// Turns successive states of memory into activity rates.
#[derive(Default)]
pub(crate) struct MemorySampler {
    before: HashMap<String, MemoryState>,
}

/// Sampled state of a VM's memory, and its activity since the previous sample, or since the pager attached.
#[derive(Clone)]
pub(crate) struct MemorySample {
    pub(crate) vm: String,
    pub(crate) state: MemoryState,
    pub(crate) rates: MemoryRates,
}

impl MemorySampler {
    pub(crate) fn sample(&mut self, states: Vec<(String, MemoryState)>) -> Vec<MemorySample> {
        let mut before = std::mem::take(&mut self.before);
        let samples = states.into_iter().map(|(vm, state)| {
            let old = before.remove(&vm);
            let rates = old.and_then(|old| MemoryRates::between(&old, &state));
            self.before.insert(vm.clone(), state.clone());
            let rates = rates.unwrap_or_else(|| MemoryRates::since_start(&state));
            MemorySample { vm, state, rates }
        });
        samples.collect()
    }
}

/// Describes a problem of the memory in few words; empty if there is none.
pub(crate) fn problem_text(state: &MemoryState) -> String {
    if state.lost_pages > 0 {
        return format!("{} pages lost", state.lost_pages);
    }
    if let Some(disk) = state.disks.iter().find(|disk| disk.failed) {
        return format!("{} has failed", disk.tier.name());
    }
    match (state.problem, state.detaching) {
        (Some(problem), _) => problem.name().to_owned(),
        (None, true) => "detaching".to_owned(),
        (None, false) => String::new(),
    }
}

/// Formats the state of the VMs' memory.
pub(crate) fn state_table(all: &[(String, MemoryState)]) -> String {
    let mut table = Table::new(["vm", "memory", "budget", "used", "compressed", "disks", "lost, 60 s", "state"]);
    for (vm, state) in all {
        let ratio = state.compression_ratio();
        let on_disks: u64 = state.disks.iter().map(|disk| disk.live).sum();
        table.row([
            vm.clone(),
            format_size(state.size),
            format_size(state.budget),
            format_size(state.used),
            ratio.map_or_else(
                || "-".to_owned(),
                |ratio| format!("{} ({ratio:.1} to 1)", format_size(state.compressed.pages * 4096)),
            ),
            match state.disks.is_empty() {
                true => "-".to_owned(),
                false => format_size(on_disks),
            },
            format!("{:.2} %", state.pressure.some.avg60),
            match problem_text(state) {
                none if none.is_empty() => "works".to_owned(),
                trouble => trouble,
            },
        ]);
    }
    table.into_text()
}

/// Formats the activity of the VMs' memory.
pub(crate) fn rates_table(all: &[VmMemoryRates]) -> String {
    let mut table = Table::new([
        "vm",
        "budget",
        "used",
        "comp/s",
        "c_await",
        "disk/s",
        "d_await",
        "zero/s",
        "write/s",
        "refault/s",
        "evict/s",
        "wMiB/s",
        "rMiB/s",
        "%some",
        "%full",
    ]);
    let mib = |bytes: f64| format!("{:.2}", bytes / f64::from(1 << 20));
    let faults = |of: &FaultRates| {
        let wait = of.await_seconds.map_or_else(|| "-".to_owned(), |time| format!("{:.3}", time * 1e3));
        (format!("{:.1}", of.per_second), wait)
    };
    for VmMemoryRates { vm, budget, used, rates } in all {
        let (compressed, compressed_await) = faults(&rates.compressed);
        let (disk, disk_await) = faults(&rates.disk);
        table.row([
            vm.clone(),
            format_size(*budget),
            format_size(*used),
            compressed,
            compressed_await,
            disk,
            disk_await,
            format!("{:.1}", rates.zero.per_second + rates.uniform.per_second),
            format!("{:.1}", rates.write.per_second),
            format!("{:.1}", rates.refaults),
            format!("{:.1}", rates.evicted),
            mib(rates.swap_written + rates.slow_written),
            mib(rates.swap_read + rates.slow_read),
            format!("{:.2}", rates.some * 100.0),
            format!("{:.2}", rates.full * 100.0),
        ]);
    }
    table.into_text()
}

impl From<MemorySample> for VmMemoryRates {
    fn from(seen: MemorySample) -> Self {
        Self { vm: seen.vm, budget: seen.state.budget, used: seen.state.used, rates: seen.rates }
    }
}
