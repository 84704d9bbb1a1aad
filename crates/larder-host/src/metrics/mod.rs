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

use crate::balancing::{HostMemory, Moved};
use crate::find::LeftOut;
use crate::fleet::Fleet;
use crate::joined::joined;
use crate::vm::{Health, Memory, NamedDisk, Sample};
use families::{FAMILIES, Of};
use migration::MigrationMetrics;
use write::{Labels, Writer};

/// Exposition format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    OpenMetrics,
    Text,
}

impl Format {
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
    of_memory: Option<Arc<Sample>>,
    moved: Moved,
}

impl VmMetrics {
    fn memory(&self) -> Option<&Memory> {
        self.of_memory.as_ref()?.memory.as_ref()
    }
}

/// Data of a VM's memory for the metrics.
struct MemoryMetrics<'a> {
    memory: &'a Memory,
    moved: &'a Moved,
}

/// Data of the host for the metrics.
struct HostMetrics {
    /// Sockets by health.
    sockets: Vec<(&'static str, u64)>,
    /// Counts of control sockets that are not watched.
    left_out: LeftOut,
    /// Memory of the host, while budgets are balanced.
    memory: Option<HostMemory>,
}

/// Collects the data of the host and of all VMs that have a server or whose server was killed.
fn seen(fleet: &Fleet) -> (Vec<VmMetrics>, HostMetrics) {
    let vms = fleet.vms();
    let balance = fleet.balance();
    let sockets = Health::ALL.map(|(health, name)| {
        let count = vms.values().filter(|vm| vm.health == health).count();
        (name, count as u64)
    });
    let all = joined(&vms).into_iter();
    let told = all.filter(|vm| matches!(vm.health(), Health::Up | Health::Stuck | Health::Killed));
    let all = told.map(|vm| VmMetrics {
        uuid: vm.head().uuid().map(str::to_owned),
        health: vm.health(),
        server: vm.head().server.clone(),
        sample: vm.disks_now().cloned(),
        of_memory: vm.memory_now().cloned(),
        moved: balance.moved(&vm.name),
        domain: vm.name,
    });
    let host = HostMetrics {
        sockets: sockets.into(),
        left_out: fleet.left_out(),
        memory: balance.host,
    };
    (all.collect(), host)
}

/// Makes names unique: the second `web` becomes `web#2`.
pub(crate) fn names_of(names: impl Iterator<Item = String>) -> Vec<String> {
    let mut seen: HashMap<String, u32> = HashMap::new();
    let unique = names.map(|name| {
        let count = seen.entry(name.clone()).or_default();
        *count += 1;
        match *count {
            1 => name,
            count => format!("{name}#{count}"),
        }
    });
    unique.collect()
}

/// Renders all metrics.
pub(crate) fn render(fleet: &Fleet, format: Format) -> String {
    let (vms, host) = seen(fleet);
    let mut writer = Writer::new(format);
    let of_vms: Vec<(Labels, &VmMetrics)> = vms
        .iter()
        .map(|vm| (Labels::new(&[("domain", &vm.domain)]), vm))
        .collect();
    let mut of_disks: Vec<(Labels, &NamedDisk)> = Vec::new();
    for vm in &vms {
        for disk in vm.sample.iter().flat_map(|sample| &sample.disks) {
            let labels = Labels::new(&[("domain", &vm.domain), ("target_device", &disk.name)]);
            of_disks.push((labels, disk));
        }
    }
    let moves = migration::seen(fleet);
    let of_moves: Vec<(Labels, &MigrationMetrics)> = moves.iter().map(|of| (of.labels(), of)).collect();
    for family in FAMILIES.iter().chain(memory::FAMILIES).chain(migration::FAMILIES) {
        let mut put = writer.family(family);
        match family.of {
            Of::Host(tell) => tell(&host, &mut put),
            Of::Vm(tell) => of_vms.iter().for_each(|(labels, vm)| tell(vm, put.of(labels))),
            Of::Disk(tell) => of_disks
                .iter()
                .for_each(|(labels, disk)| tell(&disk.state, put.of(labels))),
            Of::Migration(tell) => of_moves.iter().for_each(|(labels, of)| tell(of, put.of(labels))),
            Of::Memory(tell) => of_vms.iter().for_each(|(labels, vm)| {
                if let Some(memory) = vm.memory() {
                    let moved = &vm.moved;
                    tell(&MemoryMetrics { memory, moved }, put.of(labels));
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
        assert_eq!(names_of(names.into_iter()), ["web", "db", "web#2", "web#3"]);
    }

    #[test]
    fn openmetrics_is_served_on_request() {
        let mut headers = HeaderMap::new();
        assert_eq!(Format::accepted(&headers), Format::Text);
        headers.insert(ACCEPT, "text/html, */*".parse().expect("a value"));
        assert_eq!(Format::accepted(&headers), Format::Text);
        let prometheus = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5,*/*;q=0.1";
        headers.insert(ACCEPT, prometheus.parse().expect("a value"));
        assert_eq!(Format::accepted(&headers), Format::OpenMetrics);
    }
}
