//! Prometheus exporter: OpenMetrics 1.0, or its predecessor, the text format 0.0.4. `docs/metrics.md` describes the
//! metrics for users.

mod families;
mod labelled;
mod memory;
mod migration;
mod write;

use std::collections::HashMap;
use std::sync::Arc;

use hyper::header::{ACCEPT, HeaderMap};
use larder_vm::control::state::ServerState;

use crate::assembled_vm::assemble_vms;
use crate::balance_loop::{BudgetChanges, HostMemory};
use crate::discovery::UnwatchedCounts;
use crate::fleet::Fleet;
use crate::vm_process::{Health, MemorySample, NamedDisk, Sample};
use families::{FAMILIES, FamilyScope};
use migration::MigrationMetrics;
use write::{ExpositionWriter, Labels};

/// Exposition format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ExpositionFormat {
    OpenMetrics,
    Text,
}

impl ExpositionFormat {
    /// Returns the format that the `Accept` headers ask for: OpenMetrics if they name it, otherwise text.
    pub(crate) fn accepted(headers: &HeaderMap) -> Self {
        let all = headers.get_all(ACCEPT).iter().filter_map(|value| value.to_str().ok());
        let mut types = all.flat_map(|value| value.split(','));
        match types.any(|kind| kind.trim().starts_with("application/openmetrics-text")) {
            true => Self::OpenMetrics,
            false => Self::Text,
        }
    }

    pub(crate) fn content_type(self) -> &'static str {
        match self {
            Self::OpenMetrics => "application/openmetrics-text; version=1.0.0; charset=utf-8",
            Self::Text => "text/plain; version=0.0.4; charset=utf-8",
        }
    }
}

/// Data of a VM for the metrics.
struct VmMetrics {
    /// Name, unique among all VMs.
    domain: String,
    uuid: Option<String>,
    health: Health,
    server: Option<ServerState>,
    /// Sample of the VM's disks, if their server answers.
    sample: Option<Arc<Sample>>,
    /// Sample of the VM's memory, if the process that manages it answers.
    memory_sample: Option<Arc<Sample>>,
    budget_changes: BudgetChanges,
}

impl VmMetrics {
    fn memory(&self) -> Option<&MemorySample> {
        self.memory_sample.as_ref()?.memory.as_ref()
    }
}

/// Data of a VM's memory for the metrics.
struct MemoryMetrics<'a> {
    memory: &'a MemorySample,
    budget_changes: &'a BudgetChanges,
}

/// Data of the host for the metrics.
struct HostMetrics {
    /// Sockets by health.
    sockets: Vec<(&'static str, u64)>,
    /// Counts of control sockets that are not watched.
    unwatched: UnwatchedCounts,
    /// Memory of the host, while budgets are balanced.
    memory: Option<HostMemory>,
}

/// Collects the data of the host and of all VMs that have a server or whose server was killed.
fn collect(fleet: &Fleet) -> (Vec<VmMetrics>, HostMetrics) {
    let vms = fleet.vms();
    let balance = fleet.balance();
    let sockets = Health::ALL.map(|(health, name)| {
        let count = vms.values().filter(|vm| vm.health == health).count();
        (name, count as u64)
    });
    let all = assemble_vms(&vms).into_iter();
    let shown = all.filter(|vm| matches!(vm.health(), Health::Up | Health::Stuck | Health::Killed));
    let all = shown.map(|vm| VmMetrics {
        uuid: vm.describing_process().uuid().map(str::to_owned),
        health: vm.health(),
        server: vm.describing_process().server.clone(),
        sample: vm.current_disks().cloned(),
        memory_sample: vm.current_memory().cloned(),
        budget_changes: balance.changes_of(&vm.name),
        domain: vm.name,
    });
    let host = HostMetrics { sockets: sockets.into(), unwatched: fleet.unwatched(), memory: balance.host };
    (all.collect(), host)
}

/// Makes names unique: the second `web` becomes `web#2`.
pub(crate) fn unique_names(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut counts: HashMap<String, u32> = HashMap::new();
    let unique = names.map(|name| {
        let count = counts.entry(name.clone()).or_default();
        *count += 1;
        match *count {
            1 => name,
            count => format!("{name}#{count}"),
        }
    });
    unique.collect()
}

/// Renders all metrics.
pub(crate) fn render(fleet: &Fleet, format: ExpositionFormat) -> String {
    let (vms, host) = collect(fleet);
    let mut writer = ExpositionWriter::new(format);
    let vm_rows: Vec<(Labels, &VmMetrics)> =
        vms.iter().map(|vm| (Labels::new(&[("domain", &vm.domain)]), vm)).collect();
    let mut disk_rows: Vec<(Labels, &NamedDisk)> = Vec::new();
    for vm in &vms {
        for disk in vm.sample.iter().flat_map(|sample| &sample.disks) {
            let labels = Labels::new(&[("domain", &vm.domain), ("target_device", &disk.name)]);
            disk_rows.push((labels, disk));
        }
    }
    let migrations = migration::collect(fleet);
    let migration_rows: Vec<(Labels, &MigrationMetrics)> =
        migrations.iter().map(|metrics| (metrics.labels(), metrics)).collect();
    for family in FAMILIES.iter().chain(memory::FAMILIES).chain(migration::FAMILIES) {
        let mut put = writer.family(family);
        match family.scope {
            FamilyScope::Host(emit) => emit(&host, &mut put),
            FamilyScope::Vm(emit) => vm_rows.iter().for_each(|(labels, vm)| emit(vm, put.with_labels(labels))),
            FamilyScope::Disk(emit) => {
                disk_rows.iter().for_each(|(labels, disk)| emit(&disk.state, put.with_labels(labels)))
            }
            FamilyScope::Migration(emit) => {
                migration_rows.iter().for_each(|(labels, metrics)| emit(metrics, put.with_labels(labels)))
            }
            FamilyScope::Memory(emit) => vm_rows.iter().for_each(|(labels, vm)| {
                if let Some(memory) = vm.memory() {
                    let budget_changes = &vm.budget_changes;
                    emit(&MemoryMetrics { memory, budget_changes }, put.with_labels(labels));
                }
            }),
        }
    }
    writer.end()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vm_names_are_made_unique() {
        let names = ["web", "db", "web", "web"].map(str::to_owned);
        assert_eq!(unique_names(names.into_iter()), ["web", "db", "web#2", "web#3"]);
    }

    #[test]
    fn openmetrics_is_served_on_request() {
        let mut headers = HeaderMap::new();
        assert_eq!(ExpositionFormat::accepted(&headers), ExpositionFormat::Text);
        headers.insert(ACCEPT, "text/html, */*".parse().expect("a value"));
        assert_eq!(ExpositionFormat::accepted(&headers), ExpositionFormat::Text);
        let prometheus = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        headers.insert(ACCEPT, prometheus.parse().expect("a value"));
        assert_eq!(ExpositionFormat::accepted(&headers), ExpositionFormat::OpenMetrics);
    }
}
