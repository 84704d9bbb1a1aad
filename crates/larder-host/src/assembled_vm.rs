//! VMs assembled from the processes that serve them: one for the disks and one for the memory, or one for both.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use crate::metrics::unique_names;
use crate::vm_process::{Health, Sample, VmProcess};

/// VM with the processes that serve it.
pub(crate) struct AssembledVm<'a> {
    /// Name, unique among all VMs.
    pub(crate) name: String,
    /// Process that serves the disks; if there is none, the one that manages the memory.
    pub(crate) main: &'a VmProcess,
    /// Process that manages the memory, if it is a separate one.
    pub(crate) memory_process: Option<&'a VmProcess>,
}

/// Assembles all known VMs, those with disks first. Processes that only migrate a VM are left out. A process that
/// only manages memory belongs to the VM of its name.
pub(crate) fn assemble_vms(vms: &BTreeMap<PathBuf, VmProcess>) -> Vec<AssembledVm<'_>> {
    let (memory_processes, disk_processes): (Vec<&VmProcess>, Vec<&VmProcess>) =
        vms.values().filter(|vm| vm.is_vm() && vm.migration.is_none()).partition(|vm| vm.manages_only_memory);
    let single = |main| AssembledVm { name: String::new(), main, memory_process: None };
    let mut all: Vec<AssembledVm<'_>> = disk_processes.into_iter().map(single).collect();
    for memory in memory_processes {
        let name = memory.name();
        let fits = |vm: &&mut AssembledVm<'_>| {
            vm.memory_process.is_none() && !vm.main_manages_memory() && vm.main.name() == name
        };
        match all.iter_mut().find(fits) {
            // That the memory is no longer managed says nothing about the disks.
            Some(_) if memory.health == Health::Stopped => {}
            Some(vm) => vm.memory_process = Some(memory),
            None => all.push(single(memory)),
        }
    }
    let names = unique_names(all.iter().map(|vm| vm.main.name()));
    all.iter_mut().zip(names).for_each(|(vm, name)| vm.name = name);
    all
}

impl<'a> AssembledVm<'a> {
    fn main_manages_memory(&self) -> bool {
        self.main.manages_only_memory || self.main.sample.as_ref().is_some_and(|sample| sample.memory.is_some())
    }

    /// Returns the health of the VM, which is the worst of its processes'.
    pub(crate) fn health(&self) -> Health {
        self.worst().health
    }

    /// Returns an explanation of the health, as text for people.
    pub(crate) fn why(&self) -> Option<String> {
        let worst = self.worst();
        let why = worst.reason.clone()?;
        Some(match self.memory_process.is_some_and(|memory_process| std::ptr::eq(memory_process, worst)) {
            true => format!("its memory: {why}"),
            false => why,
        })
    }

    fn worst(&self) -> &'a VmProcess {
        let rank = |vm: &VmProcess| match vm.health {
            Health::Killed => 6,
            Health::Stuck => 5,
            Health::Denied => 4,
            Health::Up => 3,
            Health::New => 2,
            Health::Foreign => 1,
            // A stopped process does not determine the health while the other one runs.
            Health::Stopped => 0,
        };
        match self.memory_process {
            Some(memory_process) if rank(memory_process) > rank(self.main) => memory_process,
            _ => self.main,
        }
    }

    /// Returns the process that describes the VM.
    pub(crate) fn describing_process(&self) -> &'a VmProcess {
        match self.memory_process {
            Some(memory_process) if self.main.server.is_none() || self.main.health == Health::Stopped => memory_process,
            _ => self.main,
        }
    }

    /// Returns the process that manages the memory.
    pub(crate) fn memory_manager(&self) -> Option<&'a VmProcess> {
        self.memory_process.or_else(|| self.main_manages_memory().then_some(self.main))
    }

    /// Returns the latest sample of the disks, if their server answers.
    pub(crate) fn current_disks(&self) -> Option<&'a Arc<Sample>> {
        self.main.current_sample()
    }

    /// Returns the latest sample that includes the memory, if the process that manages it answers.
    pub(crate) fn current_memory(&self) -> Option<&'a Arc<Sample>> {
        self.memory_manager()?.current_sample().filter(|sample| sample.memory.is_some())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use larder_vm::control::state::ServerState;

    use super::*;

    fn vm(path: &str, health: Health, vm: Option<&str>, is_of_memory: bool) -> (PathBuf, VmProcess) {
        let mut process = VmProcess::new(Path::new(path));
        process.health = health;
        process.manages_only_memory = is_of_memory;
        process.reason = (health != Health::Up).then(|| "so it is".to_owned());
        process.server = Some(ServerState {
            vm: vm.map(str::to_owned),
            uuid: None,
            file: None,
            version: String::new(),
            pid: 1,
            confined: false,
            started_ms: 1,
        });
        (PathBuf::from(path), process)
    }

    fn summaries(all: impl IntoIterator<Item = (PathBuf, VmProcess)>) -> Vec<(String, Health, bool, Option<String>)> {
        let vms: BTreeMap<PathBuf, VmProcess> = all.into_iter().collect();
        let all = assemble_vms(&vms).into_iter();
        all.map(|vm| (vm.name.clone(), vm.health(), vm.memory_manager().is_some(), vm.why())).collect()
    }

    #[test]
    fn memory_joins_vm_by_name() {
        let all = summaries([
            vm("/run/db.sock", Health::Up, Some("db"), false),
            vm("/run/web.sock", Health::Up, Some("web"), false),
            vm("/run/web-memory.sock", Health::Up, None, true),
            vm("/run/x-memory.sock", Health::Up, Some("db"), true),
            vm("/run/alone-memory.sock", Health::Up, None, true),
            vm("/run/team-memory.sock", Health::Up, None, false),
        ]);
        let is = |name: &str, has_memory: bool| (name.to_owned(), Health::Up, has_memory, None);
        let expected = [is("db", true), is("team-memory", false), is("web", true), is("alone", true)];
        assert_eq!(all, expected);
    }

    /// The health of a VM is the worst of its processes', and a stopped process does not count.
    #[test]
    fn vm_health_is_worst_of_processes() {
        for (disks, memory, expected) in [
            (Health::Up, Health::Killed, Health::Killed),
            (Health::Stuck, Health::Up, Health::Stuck),
            (Health::Stopped, Health::Up, Health::Up),
            (Health::Up, Health::New, Health::Up),
            (Health::Up, Health::Stopped, Health::Up),
            (Health::Stopped, Health::Stopped, Health::Stopped),
        ] {
            let all = summaries([
                vm("/run/web.sock", disks, Some("web"), false),
                vm("/run/web-memory.sock", memory, None, true),
            ]);
            assert_eq!(all.len(), 1, "{disks:?} {memory:?}");
            assert_eq!(all[0].1, expected, "{disks:?} {memory:?}");
            let is_of_memory = all[0].3.as_ref().is_some_and(|why| why.starts_with("its memory: "));
            assert_eq!(is_of_memory, expected == memory && expected != disks && expected != Health::Up);
        }
    }
}
