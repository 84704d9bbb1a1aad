//! Observation of a host for a while: samples it periodically, and queries Larder's servers at both ends.
//!
//! Only procfs files and Larder's control sockets are read. No VM is paused, queried, or changed. QEMU's monitor is
//! not used, because it accepts a single connection, which belongs to another program.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::judge::size;
use crate::measured::{Gap, Host, Measured, Vm, VmMemory, unnamed};
use crate::procfs::host::{DeviceNumber, Resource};
use crate::procfs::process::ProcessId;
use crate::procfs::{Procfs, Read, Unread};
use crate::qemu::{Described, is_all_vcpus, is_qemu, printable, program};
use crate::sample::{HostSample, Sample, ThreadSample, Threads};
use crate::servers::{AllTold, ask_all};
use crate::told;
use crate::window::Window;

/// Number of slices of the window; the busiest one counts as the peak.
const SLICES: u32 = 10;

/// Options of an observation.
#[derive(Clone, Debug)]
pub struct Look {
    /// Length of the window.
    pub window: Duration,
    /// Control sockets to query in addition to those that are found.
    pub controls: Vec<PathBuf>,
    /// Mount point of procfs.
    pub procfs: Procfs,
}

/// VM that existed at the start of the observation.
struct Found {
    id: ProcessId,
    described: Described,
    owner: Option<u32>,
}

impl Look {
    /// Observes the host.
    ///
    /// # Errors
    /// The memory of the host cannot be read, without which no advice is possible.
    pub fn run(&self) -> Read<Measured> {
        let procfs = &self.procfs;
        procfs.memory()?;
        let mut gaps = Vec::new();
        let found = self.find(&mut gaps);
        let told_before = ask_all(procfs, &self.controls);
        let samples = self.sample(&found);
        let told_now = ask_all(procfs, &self.controls);
        let Some(window) = Window::of(&samples) else {
            return Err(Unread::Unknown {
                path: PathBuf::from("/proc"),
                what: "no time has passed".to_owned(),
            });
        };
        let mut host = window.host(&mut gaps);
        let memory = procfs.memory()?;
        host.memory_total = memory.total;
        host.memory_available = memory.available;
        host.swap_total = memory.swap_total;
        host.swap_used = memory.swap_total.saturating_sub(memory.swap_free);
        let (silent, silences): (Vec<String>, Vec<Gap>) = told::silences(&told_now).unzip();
        gaps.extend(silences);
        let mut vms: Vec<Vm> = found
            .iter()
            .map(|found| self.vm(found, &window, (&told_before, &told_now), &host, &mut gaps))
            .collect();
        vms.sort_by(|one, other| (&one.name, one.pid).cmp(&(&other.name, other.pid)));
        Ok(Measured {
            window_seconds: window.seconds(),
            slice_seconds: window.slice_seconds(),
            host,
            vms,
            silent,
            gaps,
        })
    }

    /// Returns every QEMU process that is visible.
    fn find(&self, gaps: &mut Vec<Gap>) -> Vec<Found> {
        let procfs = &self.procfs;
        let mut all = Vec::new();
        for pid in procfs.processes() {
            let Ok(words) = procfs.command_line(pid) else {
                continue;
            };
            let names = [program(&words), procfs.program(pid)];
            // The program's name is checked too, because a script of QEMU's name runs as a shell.
            let is_one = !words.is_empty() && names.iter().flatten().any(|name| is_qemu(name));
            let Ok(id) = procfs.id(pid) else { continue };
            if is_one {
                all.push(Found {
                    id,
                    described: Described::by(&words),
                    owner: procfs.owner(pid),
                });
            }
        }
        if all.is_empty() && procfs.processes().len() <= 1 {
            gaps.push(Gap {
                vm: None,
                what: "VMs of other users".to_owned(),
                why: "their processes are hidden (hidepid): only root can see them".to_owned(),
            });
        }
        all
    }

    fn sample(&self, found: &[Found]) -> Vec<Sample> {
        let begun = Instant::now();
        let mut samples = Vec::with_capacity(SLICES as usize + 1);
        for round in 0..=SLICES {
            let next = begun + self.window * round / SLICES;
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            // The first sample counts as taken at zero, so that the window is not shorter than requested.
            let at = match round {
                0 => Duration::ZERO,
                _ => begun.elapsed(),
            };
            let vms: BTreeMap<ProcessId, Read<Threads>> =
                found.iter().map(|found| (found.id, self.threads(found.id))).collect();
            samples.push(Sample {
                at,
                host: self.host(),
                vms,
            });
        }
        samples
    }

    fn host(&self) -> HostSample {
        let procfs = &self.procfs;
        HostSample {
            cpu: procfs.cpu_times(),
            swapped_in: procfs.swapped_in(),
            cpu_stall: procfs.pressure(Resource::Cpu),
            memory_stall: procfs.pressure(Resource::Memory),
            io_stall: procfs.pressure(Resource::Io),
            devices: procfs.devices(),
        }
    }

    /// Reads the threads of a VM; threads that end meanwhile are left out.
    fn threads(&self, vm: ProcessId) -> Read<Threads> {
        let procfs = &self.procfs;
        let numbers = procfs.threads(vm.pid)?;
        let threads = numbers.into_iter().filter_map(|number| {
            let name = procfs.thread_name(vm.pid, number).ok()?;
            let times = procfs.thread_times(vm.pid, number);
            Some((number, ThreadSample { name, times }))
        });
        let threads = threads.collect();
        // If the ID differs, the PID belongs to another process now.
        match procfs.id(vm.pid)? == vm {
            true => Ok(threads),
            false => Err(Unread::Gone),
        }
    }

    fn vm(
        &self,
        found: &Found,
        window: &Window<'_>,
        (before, now): (&AllTold, &AllTold),
        host: &Host,
        gaps: &mut Vec<Gap>,
    ) -> Vm {
        let Found { id, described, owner } = found;
        let name = described.name.clone().filter(|name| !name.is_empty());
        let mut vm = Vm {
            name: name.unwrap_or_else(|| unnamed(id.pid)),
            pid: id.pid,
            ram: described.ram,
            vcpus_given: described.vcpus,
            ..Vm::default()
        };
        let title = vm.title();
        let mut note = |what: &str, why: String| {
            gaps.push(Gap {
                vm: Some(title.clone()),
                what: what.to_owned(),
                why,
            });
        };
        match window.cpu(*id) {
            Ok(cpu) => {
                if let Some(why) = untold(&cpu.vcpus, described) {
                    note("the ready time of each vCPU", why);
                }
                vm.cpu = Some(cpu);
            }
            Err(why) => note("its CPU time and ready time", why),
        }
        match self.same(*id).and_then(|()| self.procfs.footprint(id.pid)) {
            Ok(footprint) => {
                vm.memory = Some(VmMemory {
                    resident: footprint.proportional.unwrap_or(footprint.resident),
                    swapped: footprint.swapped,
                });
            }
            Err(why) => note("its memory", why.to_string()),
        }
        if vm.ram.is_none() {
            note(
                "how much memory it was given",
                "its command line does not give it".to_owned(),
            );
        }
        if let Some(max) = described.ram_max {
            note(
                "memory that it was given since it was started",
                format!("only QEMU knows it; the VM may have up to {}", size(max)),
            );
        }
        let told = told::of(&vm, described, *owner, before, now);
        vm.managed = told.managed;
        vm.disks = told.disks;
        if vm.managed.is_none() {
            note(
                "which of its memory is active",
                "the kernel reports that only if it is reset, which would not be an observation; where Larder keeps a budget \
                 (larder memory attach), refaults show it"
                    .to_owned(),
            );
        }
        match self.procfs.devices_of(id.pid) {
            Ok(devices) => vm.devices = self.device_names(&devices, host),
            Err(why) => note("which of the host's disks it uses", why.to_string()),
        }
        vm
    }

    /// Checks that the process is still the one that was found.
    fn same(&self, id: ProcessId) -> Read<()> {
        match self.procfs.id(id.pid)? == id {
            true => Ok(()),
            false => Err(Unread::Gone),
        }
    }

    /// Returns the names of the devices that had any activity.
    fn device_names(&self, devices: &BTreeSet<DeviceNumber>, host: &Host) -> Vec<String> {
        let known = self.procfs.devices().unwrap_or_default();
        let names = devices.iter().filter_map(|number| known.get(number));
        let names = names.map(|device| device.name.clone());
        let is_busy = |name: &String| host.devices.iter().any(|device| device.name == *name);
        names.filter(is_busy).collect()
    }
}

/// Returns the reason why not every vCPU is reported, if there is one.
fn untold(vcpus: &[crate::measured::Vcpu], described: &Described) -> Option<String> {
    match vcpus {
        [] if described.names_threads() => Some("it has no thread with the name of a vCPU".to_owned()),
        [] => Some(
            "its threads have no individual names, so vCPUs cannot be distinguished from others: start QEMU with \
             -name debug-threads=on (libvirt does)"
                .to_owned(),
        ),
        [one] if is_all_vcpus(&one.thread) && described.vcpus != Some(1) => Some(format!(
            "its vCPUs take turns on one thread ({}), whose time is reported",
            printable(&one.thread)
        )),
        _ => None,
    }
}
