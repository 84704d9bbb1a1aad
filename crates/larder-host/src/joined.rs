//! VMs assembled from the processes that serve them: one for the disks and one for the memory, or one for both.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use crate::metrics::names_of;
use crate::vm::{Health, Sample, Vm};

/// VM with the processes that serve it.
pub(crate) struct Joined<'a> {
    /// Name, unique among all VMs.
    pub(crate) name: String,
    /// Process that serves the disks; if there is none, the one that manages the memory.
    pub(crate) main: &'a Vm,
    /// Process that manages the memory, if it is a separate one.
    pub(crate) beside: Option<&'a Vm>,
}

/// Assembles all known VMs, those with disks first. Processes that only migrate a VM are left out. A process that
/// only manages memory belongs to the VM of its name.
pub(crate) fn joined(vms: &BTreeMap<PathBuf, Vm>) -> Vec<Joined<'_>> {
    let (of_memory, of_disks): (Vec<&Vm>, Vec<&Vm>) = vms
        .values()
        .filter(|vm| vm.is_vm() && vm.moved.is_none())
        .partition(|vm| vm.is_of_memory);
    let alone = |main| Joined {
        name: String::new(),
        main,
        beside: None,
    };
    let mut all: Vec<Joined<'_>> = of_disks.into_iter().map(alone).collect();
    for memory in of_memory {
        let name = memory.name();
        let fits = |vm: &&mut Joined<'_>| vm.beside.is_none() && !vm.has_memory_itself() && vm.main.name() == name;
        match all.iter_mut().find(fits) {
            // That the memory is no longer managed says nothing about the disks.
            Some(_) if memory.health == Health::Stopped => {}
            Some(vm) => vm.beside = Some(memory),
            None => all.push(alone(memory)),
        }
    }
    let names = names_of(all.iter().map(|vm| vm.main.name()));
    all.iter_mut().zip(names).for_each(|(vm, name)| vm.name = name);
    all
}

impl<'a> Joined<'a> {
    fn has_memory_itself(&self) -> bool {
        self.main.is_of_memory || self.main.sample.as_ref().is_some_and(|sample| sample.memory.is_some())
    }

    /// Returns the health of the VM, which is the worst of its processes'.
    pub(crate) fn health(&self) -> Health {
        self.worst().health
    }

    /// Returns an explanation of the health, as text for people.
    pub(crate) fn why(&self) -> Option<String> {
        let worst = self.worst();
        let why = worst.why.clone()?;
        Some(match self.beside.is_some_and(|beside| std::ptr::eq(beside, worst)) {
            true => format!("its memory: {why}"),
            false => why,
        })
    }

    fn worst(&self) -> &'a Vm {
        let rank = |vm: &Vm| match vm.health {
            Health::Killed => 6,
            Health::Stuck => 5,
            Health::Denied => 4,
            Health::Up => 3,
            Health::New => 2,
            Health::Foreign => 1,
            // A stopped process does not determine the health while the other one runs.
            Health::Stopped => 0,
        };
        match self.beside {
            Some(beside) if rank(beside) > rank(self.main) => beside,
            _ => self.main,
        }
    }

    /// Returns the process that describes the VM.
    pub(crate) fn head(&self) -> &'a Vm {
        match self.beside {
            Some(beside) if self.main.server.is_none() || self.main.health == Health::Stopped => beside,
            _ => self.main,
        }
    }

    /// Returns the process that manages the memory.
    pub(crate) fn of_memory(&self) -> Option<&'a Vm> {
        self.beside.or_else(|| self.has_memory_itself().then_some(self.main))
    }

    /// Returns the latest sample of the disks, if their server answers.
    pub(crate) fn disks_now(&self) -> Option<&'a Arc<Sample>> {
        self.main.now()
    }

    /// Returns the latest sample that includes the memory, if the process that manages it answers.
    pub(crate) fn memory_now(&self) -> Option<&'a Arc<Sample>> {
        self.of_memory()?.now().filter(|sample| sample.memory.is_some())
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use larder_vm::control::state::ServerState;

    use super::*;

    fn vm(path: &str, health: Health, vm: Option<&str>, is_of_memory: bool) -> (PathBuf, Vm) {
        let mut it = Vm::new(Path::new(path));
        it.health = health;
        it.is_of_memory = is_of_memory;
        it.why = (health != Health::Up).then(|| "so it is".to_owned());
        it.server = Some(ServerState {
            vm: vm.map(str::to_owned),
            uuid: None,
            file: None,
            version: String::new(),
            pid: 1,
            confined: false,
            started_ms: 1,
        });
        (PathBuf::from(path), it)
    }

    fn told(all: impl IntoIterator<Item = (PathBuf, Vm)>) -> Vec<(String, Health, bool, Option<String>)> {
        let vms: BTreeMap<PathBuf, Vm> = all.into_iter().collect();
        let all = joined(&vms).into_iter();
        all.map(|vm| (vm.name.clone(), vm.health(), vm.of_memory().is_some(), vm.why()))
            .collect()
    }

    #[test]
    fn memory_joins_vm_by_name() {
        let all = told([
            vm("/run/db.sock", Health::Up, Some("db"), false),
            vm("/run/web.sock", Health::Up, Some("web"), false),
            vm("/run/web-memory.sock", Health::Up, None, true),
            vm("/run/x-memory.sock", Health::Up, Some("db"), true),
            vm("/run/alone-memory.sock", Health::Up, None, true),
            vm("/run/team-memory.sock", Health::Up, None, false),
        ]);
        let is = |name: &str, has_memory: bool| (name.to_owned(), Health::Up, has_memory, None);
        let wanted = [
            is("db", true),
            is("team-memory", false),
            is("web", true),
            is("alone", true),
        ];
        assert_eq!(all, wanted);
    }

    /// The health of a VM is the worst of its processes', and a stopped process does not count.
    #[test]
    fn vm_health_is_worst_of_processes() {
        for (disks, memory, wanted) in [
            (Health::Up, Health::Killed, Health::Killed),
            (Health::Stuck, Health::Up, Health::Stuck),
            (Health::Stopped, Health::Up, Health::Up),
            (Health::Up, Health::New, Health::Up),
            (Health::Up, Health::Stopped, Health::Up),
            (Health::Stopped, Health::Stopped, Health::Stopped),
        ] {
            let all = told([
                vm("/run/web.sock", disks, Some("web"), false),
                vm("/run/web-memory.sock", memory, None, true),
            ]);
            assert_eq!(all.len(), 1, "{disks:?} {memory:?}");
            assert_eq!(all[0].1, wanted, "{disks:?} {memory:?}");
            let is_of_memory = all[0].3.as_ref().is_some_and(|why| why.starts_with("its memory: "));
            assert_eq!(
                is_of_memory,
                wanted == memory && wanted != disks && wanted != Health::Up
            );
        }
    }
}
