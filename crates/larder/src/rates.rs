//! Activity of disks in an interval.

use std::collections::HashMap;

use larder_vm::control::rates::{DiskRates, RequestRates};
use larder_vm::control::state::DiskState;
use larder_vm::control::{ControlClientError, fetch_disks};
use larder_vm::vm::find::KnownVm;
use serde::Serialize;

use crate::concurrent::query_each;
use crate::output::Table;

/// Activity of one disk.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct VmDiskRates {
    pub(crate) vm: String,
    pub(crate) disk: String,
    #[serde(flatten)]
    pub(crate) rates: DiskRates,
}

/// Turns successive states of disks into activity rates.
#[derive(Default)]
pub(crate) struct DiskSampler {
    before: HashMap<(String, String), DiskState>,
}

/// Result of one sampling.
#[derive(Default)]
pub(crate) struct DiskSample {
    /// Activity of each disk since the previous sample, or since its server's start.
    pub(crate) rates: Vec<VmDiskRates>,
    /// The disks' states, in the same order, with their previous states if these are known.
    pub(crate) disks: Vec<(DiskState, Option<DiskState>)>,
}

impl DiskSampler {
    /// Samples the disks that each VM has now.
    pub(crate) fn sample(&mut self, states: Vec<(String, Vec<DiskState>)>) -> DiskSample {
        let mut before = std::mem::take(&mut self.before);
        let mut sample = DiskSample::default();
        for (vm, disks) in states {
            for (index, disk) in disks.into_iter().enumerate() {
                let name = disk.name.clone().unwrap_or_else(|| index.to_string());
                let key = (vm.clone(), name);
                let old = before.remove(&key);
                let rates = old.as_ref().and_then(|old| DiskRates::between(old, &disk));
                // The counters of a restarted server begin at 0, so its old state does not count.
                let old = old.filter(|_| rates.is_some());
                sample.rates.push(VmDiskRates {
                    vm: key.0.clone(),
                    disk: key.1.clone(),
                    rates: rates.unwrap_or_else(|| DiskRates::since_start(&disk)),
                });
                self.before.insert(key, disk.clone());
                sample.disks.push((disk, old));
            }
        }
        sample
    }
}

/// Queries all VMs concurrently, so that one that hangs does not delay the others. VMs without a server are left out.
pub(crate) fn query_disks(vms: &[KnownVm]) -> Vec<(String, Result<Vec<DiskState>, ControlClientError>)> {
    let results = query_each(vms, |vm| fetch_disks(&vm.control));
    let all = vms.iter().zip(results).filter_map(|(vm, results)| match results {
        Ok((_, disks)) => Some((vm.name.clone(), Ok(disks.disks))),
        Err(error) if is_not_served(&error) => None,
        Err(error) => Some((vm.name.clone(), Err(error))),
    });
    all.collect()
}

/// Returns true if no server listens at the socket, which need not be a problem.
pub(crate) fn is_not_served(error: &ControlClientError) -> bool {
    matches!(error, ControlClientError::Missing { .. } | ControlClientError::NoListener { .. })
}

const MIB: f64 = (1 << 20) as f64;
const KIB: f64 = 1024.0;

/// Formats the activity as a table.
pub(crate) fn rates_table(disks: &[VmDiskRates]) -> String {
    let mut table = Table::new([
        "vm", "disk", "r/s", "rMiB/s", "r_await", "rareq-sz", "w/s", "wMiB/s", "w_await", "wareq-sz", "f/s", "f_await",
        "aqu-sz", "%util", "%hit", "%ahead",
    ]);
    let or_none =
        |value: Option<f64>, unit: f64| value.map_or_else(|| "-".to_owned(), |value| format!("{:.2}", value * unit));
    for VmDiskRates { vm, disk, rates: it } in disks {
        let of = |kind: &RequestRates| {
            [
                format!("{:.1}", kind.per_second),
                format!("{:.2}", kind.bytes_per_second / MIB),
                or_none(kind.await_seconds, 1e3),
                or_none(kind.bytes, 1.0 / KIB),
            ]
        };
        let [reads, read_bytes, read_await, read_size] = of(&it.read);
        let [writes, written, write_await, write_size] = of(&it.write);
        table.row([
            vm.clone(),
            disk.clone(),
            reads,
            read_bytes,
            read_await,
            read_size,
            writes,
            written,
            write_await,
            write_size,
            format!("{:.1}", it.flush.per_second),
            or_none(it.flush.await_seconds, 1e3),
            format!("{:.2}", it.queue),
            format!("{:.1}", it.utilization * 100.0),
            or_none(it.cache_hits, 100.0),
            or_none(it.prefetch_hits, 100.0),
        ]);
    }
    table.into_text()
}
