//! Observation of a host for a while: samples it periodically, and queries Larder's servers at both ends.
//!
//! Only procfs files and Larder's control sockets are read. No VM is paused, queried, or changed. QEMU's monitor is
//! not used, because it accepts a single connection, which belongs to another program.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::judge::size;
use crate::measured::{Measured, MeasuredHost, MeasuredMemory, MeasuredVm, MeasurementGap, unnamed_vm};
use crate::procfs::host::{DeviceNumber, Resource};
use crate::procfs::process::ProcessId;
use crate::procfs::{Procfs, ReadError, ReadResult};
use crate::qemu::{QemuCommandLine, is_all_vcpus, is_qemu, printable, program};
use crate::sample::{HostSample, Sample, ThreadSample, Threads};
use crate::servers::{TelemetryBySocket, query_all};
use crate::telemetry;
use crate::window::Window;

/// Number of slices of the window; the busiest one counts as the peak.
const SLICES: u32 = 10;

/// Options of an observation.
#[derive(Clone, Debug)]
pub struct Observation {
    /// Length of the window.
    pub window: Duration,
    /// Control sockets to query in addition to those that are found.
    pub controls: Vec<PathBuf>,
    /// Mount point of procfs.
    pub procfs: Procfs,
}

/// VM that existed at the start of the observation.
struct FoundVm {
    id: ProcessId,
    command_line: QemuCommandLine,
    owner: Option<u32>,
}

impl Observation {
    /// Observes the host.
    ///
    /// # Errors
    /// The memory of the host cannot be read, without which no advice is possible.
    pub fn run(&self) -> ReadResult<Measured> {
        let procfs = &self.procfs;
        procfs.memory()?;
        let mut gaps = Vec::new();
        let found = self.find(&mut gaps);
        let telemetry_before = query_all(procfs, &self.controls);
        let samples = self.sample(&found);
        let telemetry_now = query_all(procfs, &self.controls);
        let Some(window) = Window::new(&samples) else {
            return Err(ReadError::Malformed { path: PathBuf::from("/proc"), what: "no time has passed".to_owned() });
        };
        let mut host = window.host(&mut gaps);
        let memory = procfs.memory()?;
        host.memory_total = memory.total;
        host.memory_available = memory.available;
        host.swap_total = memory.swap_total;
        host.swap_used = memory.swap_total.saturating_sub(memory.swap_free);
        let (unanswered, unanswered_gaps): (Vec<String>, Vec<MeasurementGap>) =
            telemetry::unanswered_gaps(&telemetry_now).unzip();
        gaps.extend(unanswered_gaps);
        let mut vms: Vec<MeasuredVm> = found
            .iter()
            .map(|found| self.vm(found, &window, (&telemetry_before, &telemetry_now), &host, &mut gaps))
            .collect();
        vms.sort_by(|one, other| (&one.name, one.pid).cmp(&(&other.name, other.pid)));
        Ok(Measured {
            window_seconds: window.seconds(),
            slice_seconds: window.slice_seconds(),
            host,
            vms,
            silent: unanswered,
            gaps,
        })
    }

    /// Returns every QEMU process that is visible.
    fn find(&self, gaps: &mut Vec<MeasurementGap>) -> Vec<FoundVm> {
        let procfs = &self.procfs;
        let mut all = Vec::new();
        for pid in procfs.processes() {
            let Ok(words) = procfs.command_line(pid) else {
                continue;
            };
            let names = [program(&words), procfs.program(pid)];
            // The program's name is checked too, because a script of QEMU's name runs as a shell.
            let is_vm = !words.is_empty() && names.iter().flatten().any(|name| is_qemu(name));
            let Ok(id) = procfs.id(pid) else { continue };
            if is_vm {
                all.push(FoundVm { id, command_line: QemuCommandLine::parse(&words), owner: procfs.owner(pid) });
            }
        }
        if all.is_empty() && procfs.processes().len() <= 1 {
            gaps.push(MeasurementGap {
                vm: None,
                what: "VMs of other users".to_owned(),
                why: "their processes are hidden (hidepid): only root can see them".to_owned(),
            });
        }
        all
    }

    fn sample(&self, found: &[FoundVm]) -> Vec<Sample> {
        let start = Instant::now();
        let mut samples = Vec::with_capacity(SLICES as usize + 1);
        for round in 0..=SLICES {
            let next = start + self.window * round / SLICES;
            std::thread::sleep(next.saturating_duration_since(Instant::now()));
            // The first sample counts as taken at zero, so that the window is not shorter than requested.
            let at = match round {
                0 => Duration::ZERO,
                _ => start.elapsed(),
            };
            let vms: BTreeMap<ProcessId, ReadResult<Threads>> =
                found.iter().map(|found| (found.id, self.threads(found.id))).collect();
            samples.push(Sample { at, host: self.host(), vms });
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
    fn threads(&self, vm: ProcessId) -> ReadResult<Threads> {
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
            false => Err(ReadError::Exited),
        }
    }

    fn vm(
        &self,
        found: &FoundVm,
        window: &Window<'_>,
        (before, now): (&TelemetryBySocket, &TelemetryBySocket),
        host: &MeasuredHost,
        gaps: &mut Vec<MeasurementGap>,
    ) -> MeasuredVm {
        let FoundVm { id, command_line: described, owner } = found;
        let name = described.name.clone().filter(|name| !name.is_empty());
        let mut vm = MeasuredVm {
            name: name.unwrap_or_else(|| unnamed_vm(id.pid)),
            pid: id.pid,
            ram: described.ram,
            vcpus_given: described.vcpus,
            ..MeasuredVm::default()
        };
        let title = vm.title();
        let mut add_gap = |what: &str, why: String| {
            gaps.push(MeasurementGap { vm: Some(title.clone()), what: what.to_owned(), why });
        };
        match window.vm_cpu(*id) {
            Ok(cpu) => {
                if let Some(why) = missing_vcpus_reason(&cpu.vcpus, described) {
                    add_gap("the ready time of each vCPU", why);
                }
                vm.cpu = Some(cpu);
            }
            Err(why) => add_gap("its CPU time and ready time", why),
        }
        match self.check_same_process(*id).and_then(|()| self.procfs.footprint(id.pid)) {
            Ok(footprint) => {
                vm.memory = Some(MeasuredMemory {
                    resident: footprint.proportional.unwrap_or(footprint.resident),
                    swapped: footprint.swapped,
                });
            }
            Err(why) => add_gap("its memory", why.to_string()),
        }
        if vm.ram.is_none() {
            add_gap("how much memory it was given", "its command line does not give it".to_owned());
        }
        if let Some(max) = described.ram_max {
            add_gap(
                "memory that it was given since it was started",
                format!("only QEMU knows it; the VM may have up to {}", size(max)),
            );
        }
        let telemetry = telemetry::vm_telemetry(&vm, described, *owner, before, now);
        vm.managed = telemetry.managed;
        vm.disks = telemetry.disks;
        if vm.managed.is_none() {
            add_gap(
                "which of its memory is active",
                "the kernel reports that only if it is reset, which would not be an observation; where Larder keeps a budget \
                 (larder memory attach), refaults show it"
                    .to_owned(),
            );
        }
        match self.procfs.devices_of(id.pid) {
            Ok(devices) => vm.devices = self.device_names(&devices, host),
            Err(why) => add_gap("which of the host's disks it uses", why.to_string()),
        }
        vm
    }

    /// Checks that the process is still the one that was found.
    fn check_same_process(&self, id: ProcessId) -> ReadResult<()> {
        match self.procfs.id(id.pid)? == id {
            true => Ok(()),
            false => Err(ReadError::Exited),
        }
    }

    /// Returns the names of the devices that had any activity.
    fn device_names(&self, devices: &BTreeSet<DeviceNumber>, host: &MeasuredHost) -> Vec<String> {
        let known = self.procfs.devices().unwrap_or_default();
        let names = devices.iter().filter_map(|number| known.get(number));
        let names = names.map(|device| device.name.clone());
        let is_busy = |name: &String| host.devices.iter().any(|device| device.name == *name);
        names.filter(is_busy).collect()
    }
}

/// Returns the reason why not every vCPU is reported, if there is one.
fn missing_vcpus_reason(vcpus: &[crate::measured::Vcpu], command_line: &QemuCommandLine) -> Option<String> {
    match vcpus {
        [] if command_line.names_threads() => Some("it has no thread with the name of a vCPU".to_owned()),
        [] => Some(
            "its threads have no individual names, so vCPUs cannot be distinguished from others: start QEMU with \
             -name debug-threads=on (libvirt does)"
                .to_owned(),
        ),
        [one] if is_all_vcpus(&one.thread) && command_line.vcpus != Some(1) => {
            Some(format!("all its vCPUs run on one thread ({}), whose time is reported", printable(&one.thread)))
        }
        _ => None,
    }
}
