//! The memory of VMs: queries of the pagers, their state, and their activity in an interval.

use std::collections::HashMap;
use std::path::PathBuf;

use larder_vm::control::memory::MemoryState;
use larder_vm::control::memory_rates::{FaultRates, MemoryRates};
use larder_vm::control::state::DiskState;
use larder_vm::control::{FetchError, fetch_memory};
use larder_vm::vm::find::{self, Found};
use serde::Serialize;
use serde_json::Value;

use crate::disk_image::human;
use crate::output::Table;

/// State of a pager: the JSON as received, and the fields that this program knows.
pub(crate) type Told = (Value, MemoryState);

/// Name of a VM, and the result of querying its pager.
pub(crate) type Asked = (String, Result<Told, FetchError>);

/// Queries all processes that may manage memory, those of `vms` and others, concurrently. The sockets of `disks` are
/// not queried, and processes that manage no memory are left out.
pub(crate) fn ask_all<'a>(vms: &[Found], disks: impl Iterator<Item = &'a DiskState>) -> Vec<Asked> {
    let exports = disks.filter_map(|disk| disk.exports.vhost_user.as_ref());
    let of_disks: Vec<PathBuf> = exports.map(|export| PathBuf::from(&export.socket)).collect();
    let mut all: Vec<Found> = vms.to_vec();
    for found in find::memories(&of_disks) {
        if !all.iter().any(|vm| vm.control == found.control) {
            all.push(found);
        }
    }
    let asked: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = all
            .iter()
            .map(|vm| scope.spawn(move || fetch_memory(&vm.control)))
            .collect();
        // A panic in a thread aborts the process, so `join` does not fail.
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    let all = all.into_iter().zip(asked);
    all.filter_map(|(vm, asked)| match asked {
        // Errors of the VMs' disk servers are reported elsewhere.
        Err(_) if vms.contains(&vm) => None,
        Err(FetchError::Missing { .. }) => None,
        Err(error) if is_none(&error) => None,
        asked => Some((vm.name, asked)),
    })
    .collect()
}

/// Queries the memory of one VM, at its control socket or at a separate pager's.
pub(crate) fn ask_one(vm: &Found, disks: &[DiskState]) -> Option<Result<Told, FetchError>> {
    let asked = ask_all(std::slice::from_ref(vm), disks.iter());
    asked
        .into_iter()
        .find(|(name, _)| *name == vm.name)
        .map(|(_, asked)| asked)
}

/// Returns true if the error means that the process manages no memory.
fn is_none(error: &FetchError) -> bool {
    // The server reports that only in the text of its error.
    matches!(error, FetchError::Refused { error, .. } if error.contains("there is no /v1/memory"))
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
pub(crate) struct MemorySeen {
    pub(crate) vm: String,
    pub(crate) state: MemoryState,
    pub(crate) rates: MemoryRates,
}

impl MemorySampler {
    pub(crate) fn sample(&mut self, told: Vec<(String, MemoryState)>) -> Vec<MemorySeen> {
        let mut before = std::mem::take(&mut self.before);
        let seen = told.into_iter().map(|(vm, state)| {
            let old = before.remove(&vm);
            let rates = old.and_then(|old| MemoryRates::between(&old, &state));
            self.before.insert(vm.clone(), state.clone());
            let rates = rates.unwrap_or_else(|| MemoryRates::since_start(&state));
            MemorySeen { vm, state, rates }
        });
        seen.collect()
    }
}

/// Describes a problem of the memory in few words; empty if there is none.
pub(crate) fn trouble(state: &MemoryState) -> String {
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
    let mut table = Table::new([
        "vm",
        "memory",
        "budget",
        "used",
        "compressed",
        "disks",
        "lost, 60 s",
        "state",
    ]);
    for (vm, state) in all {
        let ratio = state.compression_ratio();
        let on_disks: u64 = state.disks.iter().map(|disk| disk.live).sum();
        table.row([
            vm.clone(),
            human(state.size),
            human(state.budget),
            human(state.used),
            ratio.map_or_else(
                || "-".to_owned(),
                |ratio| format!("{} ({ratio:.1} to 1)", human(state.compressed.pages * 4096)),
            ),
            match state.disks.is_empty() {
                true => "-".to_owned(),
                false => human(on_disks),
            },
            format!("{:.2} %", state.pressure.some.avg60),
            match trouble(state) {
                well if well.is_empty() => "works".to_owned(),
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
        let wait = of
            .await_seconds
            .map_or_else(|| "-".to_owned(), |time| format!("{:.3}", time * 1e3));
        (format!("{:.1}", of.per_second), wait)
    };
    for VmMemoryRates {
        vm,
        budget,
        used,
        rates,
    } in all
    {
        let (compressed, compressed_await) = faults(&rates.compressed);
        let (disk, disk_await) = faults(&rates.disk);
        table.row([
            vm.clone(),
            human(*budget),
            human(*used),
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

impl From<MemorySeen> for VmMemoryRates {
    fn from(seen: MemorySeen) -> Self {
        Self {
            vm: seen.vm,
            budget: seen.state.budget,
            used: seen.state.used,
            rates: seen.rates,
        }
    }
}
