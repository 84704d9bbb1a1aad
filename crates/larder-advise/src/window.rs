//! Differences of samples: activity within an interval.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::measured::{MeasuredDevice, MeasuredHost, MeasurementGap, Vcpu, VmCpu};
use crate::procfs::process::{ProcessId, ThreadTimes};
use crate::procfs::{ReadError, ReadResult};
use crate::qemu::{is_vcpu, vcpu_number};
use crate::sample::{Sample, ThreadSample, Threads};

/// Page size of the kernel's swap, in bytes.
const PAGE_BYTES: f64 = 4096.0;

/// Message for a `schedstat` that contains only zeros.
const SCHEDSTAT_IS_ZERO: &str = "this kernel's /proc/PID/task/TID/schedstat has only zeros: it counts only with delay accounting enabled \
    (sysctl kernel.task_delayacct=1)";

/// Samples in order, taken at two moments at least.
pub struct Window<'a> {
    samples: &'a [Sample],
    first: &'a Sample,
    last: &'a Sample,
}

impl<'a> Window<'a> {
    /// Creates a window; returns `None` if no time has passed.
    pub fn new(samples: &'a [Sample]) -> Option<Self> {
        let (first, last) = (samples.first()?, samples.last()?);
        (last.at > first.at).then_some(Self { samples, first, last })
    }

    /// Returns the length of the window, in seconds.
    pub fn seconds(&self) -> f64 {
        self.last.at.saturating_sub(self.first.at).as_secs_f64()
    }

    /// Returns the longest time between two samples, in seconds.
    pub fn slice_seconds(&self) -> f64 {
        self.slices().map(|slice| slice.seconds()).fold(0.0, f64::max)
    }

    fn slices(&self) -> impl Iterator<Item = Self> {
        self.samples.windows(2).filter_map(Window::new)
    }

    /// Returns the activity of the host. Memory sizes are not filled in here.
    pub fn host(&self, gaps: &mut Vec<MeasurementGap>) -> MeasuredHost {
        let (first, last) = (&self.first.host, &self.last.host);
        let mut host = MeasuredHost::default();
        let mut add_gap = |what: &str, why: &ReadError| {
            gaps.push(MeasurementGap { vm: None, what: what.to_owned(), why: why.to_string() });
        };
        match (&first.cpu, &last.cpu) {
            (Ok(before), Ok(now)) => {
                host.cpus = Some(now.cpus);
                let all = now.all.saturating_sub(before.all);
                let share = |ticks: u64| (all > 0).then(|| ticks as f64 / all as f64);
                host.cpu_busy = share(all.saturating_sub(now.idle.saturating_sub(before.idle)));
                host.cpu_stolen = share(now.stolen.saturating_sub(before.stolen));
            }
            (Err(why), _) | (_, Err(why)) => add_gap("how busy the host's CPUs are", why),
        }
        match (&first.swapped_in, &last.swapped_in) {
            (Ok(before), Ok(now)) => {
                host.swapped_in_per_second = Some(now.saturating_sub(*before) as f64 * PAGE_BYTES / self.seconds());
            }
            (Err(why), _) | (_, Err(why)) => add_gap("what the kernel swaps in", why),
        }
        let mut stall = |what: &str, before: &ReadResult<Duration>, now: &ReadResult<Duration>| match (before, now) {
            (Ok(before), Ok(now)) => Some((now.saturating_sub(*before).as_secs_f64() / self.seconds()).min(1.0)),
            (Err(why), _) | (_, Err(why)) => {
                add_gap(what, why);
                None
            }
        };
        host.cpu_stall = stall("for how long tasks wait for CPUs", &first.cpu_stall, &last.cpu_stall);
        host.memory_stall = stall("for how long tasks wait for memory", &first.memory_stall, &last.memory_stall);
        host.io_stall = stall("for how long tasks wait for disks", &first.io_stall, &last.io_stall);
        match (&first.devices, &last.devices) {
            (Ok(before), Ok(now)) => {
                for (number, now) in now {
                    let before = before.get(number).filter(|before| before.name == now.name);
                    let Some(before) = before else { continue };
                    let requests = now.requests.saturating_sub(before.requests);
                    if requests == 0 {
                        continue;
                    }
                    let request_ms = now.request_ms.saturating_sub(before.request_ms);
                    let busy_ms = now.busy_ms.saturating_sub(before.busy_ms);
                    host.devices.push(MeasuredDevice {
                        name: now.name.clone(),
                        requests_per_second: requests as f64 / self.seconds(),
                        await_seconds: Some(request_ms as f64 / 1e3 / requests as f64),
                        utilization: (busy_ms as f64 / 1e3 / self.seconds()).min(1.0),
                    });
                }
            }
            (Err(why), _) | (_, Err(why)) => add_gap("how long the host's disks take", why),
        }
        host
    }

    /// Returns the activity of a VM's threads.
    ///
    /// # Errors
    /// The VM did not exist during the whole window, or its times were not measured.
    pub fn vm_cpu(&self, vm: ProcessId) -> Result<VmCpu, String> {
        let threads = |sample: &'a Sample| match sample.vms.get(&vm) {
            Some(Ok(threads)) => Ok(threads),
            Some(Err(why)) => Err(why.to_string()),
            None => Err("it did not run all the time".to_owned()),
        };
        let (before, now) = (threads(self.first)?, threads(self.last)?);
        // Every existing thread has run, so zeros mean that the kernel does not count.
        let counts_nothing = |thread: &ThreadSample| thread.times == Ok(ThreadTimes::default());
        if now.values().all(counts_nothing) {
            return Err(SCHEDSTAT_IS_ZERO.to_owned());
        }
        let mut cpu = VmCpu::default();
        let mut unread_reason = None;
        let mut vcpus = BTreeMap::new();
        for (number, (name, times)) in self.between(before, now) {
            let times = match times {
                Ok(times) => times,
                Err(why) => {
                    unread_reason = Some(why.to_string());
                    continue;
                }
            };
            let share = |ns: u64| ns as f64 / 1e9 / self.seconds();
            let (busy, ready) = (share(times.run), share(times.wait));
            cpu.used += busy;
            cpu.waiting += ready;
            if is_vcpu(name) {
                let vcpu = Vcpu {
                    thread: name.to_owned(),
                    busy: busy.min(1.0),
                    ready: ready.min(1.0),
                    ready_peak: self.ready_peak(vm, number),
                };
                vcpus.insert((vcpu_number(name), number), vcpu);
            }
        }
        if let Some(why) = unread_reason {
            return Err(why);
        }
        cpu.vcpus = vcpus.into_values().collect();
        if !cpu.vcpus.is_empty() {
            cpu.vcpus_used = Some(cpu.vcpus.iter().map(|vcpu| vcpu.busy).sum());
            cpu.vcpus_used_peak = self.slices().filter_map(|slice| slice.vcpus_used(vm)).reduce(f64::max);
        }
        Ok(cpu)
    }

    /// Returns the activity of the threads that existed at both ends, by thread ID and name.
    fn between(
        &self,
        before: &'a Threads,
        now: &'a Threads,
    ) -> impl Iterator<Item = (i32, (&'a str, ReadResult<ThreadTimes>))> {
        now.iter().filter_map(|(number, now)| {
            let before = before.get(number)?;
            let times = match (&before.times, &now.times) {
                (Ok(before), Ok(now)) => Ok(ThreadTimes {
                    run: now.run.saturating_sub(before.run),
                    wait: now.wait.saturating_sub(before.wait),
                }),
                (Err(ReadError::Exited), _) | (_, Err(ReadError::Exited)) => return None,
                (Err(why), _) | (_, Err(why)) => Err(why.clone()),
            };
            Some((*number, (now.name.as_str(), times)))
        })
    }

    fn vcpus_used(&self, vm: ProcessId) -> Option<f64> {
        let (Ok(before), Ok(now)) = (self.first.vms.get(&vm)?, self.last.vms.get(&vm)?) else {
            return None;
        };
        let runs = self.between(before, now).filter_map(|(_, (name, times))| {
            let run = times.ok()?.run;
            is_vcpu(name).then(|| (run as f64 / 1e9 / self.seconds()).min(1.0))
        });
        Some(runs.sum())
    }

    fn ready_peak(&self, vm: ProcessId, thread: i32) -> f64 {
        let thread_sample =
            |sample: &'a Sample| -> Option<&'a ThreadSample> { sample.vms.get(&vm)?.as_ref().ok()?.get(&thread) };
        let ready = |slice: Self| {
            let before = thread_sample(slice.first)?.times.as_ref().ok()?.wait;
            let now = thread_sample(slice.last)?.times.as_ref().ok()?.wait;
            Some((now.saturating_sub(before) as f64 / 1e9 / slice.seconds()).min(1.0))
        };
        self.slices().filter_map(ready).fold(0.0, f64::max)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::procfs::host::{CpuTimes, DeviceCounts, DeviceNumber};
    use crate::sample::HostSample;

    const VM: ProcessId = ProcessId { pid: 7, started: 1 };
    const MS: u64 = 1_000_000;

    fn missing<T>(file: &str) -> ReadResult<T> {
        Err(ReadError::Missing(file.into()))
    }

    /// Returns a sample at `at_ms` ms, by which the host's CPUs have idled for half of the time.
    fn sample(at_ms: u64, threads: &[(i32, &str, u64, u64)]) -> Sample {
        let threads = threads.iter().map(|(number, name, run_ms, wait_ms)| {
            let times = Ok(ThreadTimes { run: run_ms * MS, wait: wait_ms * MS });
            let name = (*name).to_owned();
            (*number, ThreadSample { name, times })
        });
        let sda = DeviceCounts { name: "sda".to_owned(), requests: at_ms, request_ms: at_ms * 5, busy_ms: at_ms / 4 };
        Sample {
            at: Duration::from_millis(at_ms),
            host: HostSample {
                cpu: Ok(CpuTimes { cpus: 2, idle: at_ms / 10, stolen: at_ms / 50, all: at_ms / 5 }),
                swapped_in: Ok(at_ms),
                cpu_stall: Ok(Duration::from_millis(at_ms / 2)),
                memory_stall: missing("/proc/pressure/memory"),
                io_stall: Ok(Duration::ZERO),
                devices: Ok(BTreeMap::from([(DeviceNumber { major: 8, minor: 0 }, sda)])),
            },
            vms: BTreeMap::from([(VM, Ok(threads.collect()))]),
        }
    }

    /// Ready time is the time in the run queue, divided by the elapsed time.
    #[test]
    fn ready_time_is_queue_wait_share() {
        // In 2 s the first vCPU ran for 500 ms and waited for 1 s, 900 ms of it in the second half.
        let samples = [
            sample(0, &[(7, "qemu", 10, 0), (8, "CPU 1/KVM", 100, 50), (9, "CPU 0/KVM", 5, 5)]),
            sample(1000, &[(7, "qemu", 10, 0), (8, "CPU 1/KVM", 500, 150), (9, "CPU 0/KVM", 5, 5)]),
            sample(2000, &[(7, "qemu", 210, 0), (8, "CPU 1/KVM", 600, 1050), (9, "CPU 0/KVM", 5, 5)]),
        ];
        let window = Window::new(&samples).expect("time has passed");
        let cpu = window.vm_cpu(VM).expect("is measured");
        let names: Vec<&str> = cpu.vcpus.iter().map(|vcpu| vcpu.thread.as_str()).collect();
        assert_eq!(names, ["CPU 0/KVM", "CPU 1/KVM"]);
        let vcpu = &cpu.vcpus[1];
        assert_eq!((vcpu.busy, vcpu.ready, vcpu.ready_peak), (0.25, 0.5, 0.9));
        assert_eq!((cpu.used, cpu.waiting), (0.35, 0.5));
        assert_eq!((cpu.vcpus_used, cpu.vcpus_used_peak), (Some(0.25), Some(0.4)));
        assert_eq!((window.seconds(), window.slice_seconds()), (2.0, 1.0));
    }

    /// Threads that start or end within the window are left out; a VM that does is not measured.
    #[test]
    fn transient_threads_are_left_out() {
        let mut samples = vec![
            sample(0, &[(8, "CPU 0/KVM", 0, 0), (9, "worker", 0, 0)]),
            sample(1000, &[(8, "CPU 0/KVM", 500, 0), (10, "worker", 900, 0)]),
        ];
        let window = Window::new(&samples).expect("time has passed");
        assert_eq!(window.vm_cpu(VM).expect("is measured").used, 0.5);
        let another = ProcessId { started: 2, ..VM };
        assert_eq!(window.vm_cpu(another), Err("it did not run all the time".to_owned()));
        samples[1].vms.insert(VM, Err(ReadError::Exited));
        let window = Window::new(&samples).expect("time has passed");
        assert_eq!(window.vm_cpu(VM), Err("it has exited".to_owned()));
    }

    #[test]
    fn missing_schedstat_prevents_cpu_times() {
        let mut samples = [sample(0, &[(8, "CPU 0/KVM", 0, 0)]), sample(1000, &[(8, "CPU 0/KVM", 0, 0)])];
        for sample in &mut samples {
            if let Some(Ok(threads)) = sample.vms.get_mut(&VM)
                && let Some(thread) = threads.get_mut(&8)
            {
                thread.times = missing("/proc/7/task/8/schedstat");
            }
        }
        let window = Window::new(&samples).expect("time has passed");
        assert_eq!(window.vm_cpu(VM), Err("this kernel has no /proc/7/task/8/schedstat".to_owned()));
        assert!(Window::new(&samples[..1]).is_none());
        // The files exist and contain only zeros.
        let samples = [sample(0, &[(8, "CPU 0/KVM", 0, 0)]), sample(1000, &[(8, "CPU 0/KVM", 0, 0)])];
        let window = Window::new(&samples).expect("time has passed");
        assert_eq!(window.vm_cpu(VM), Err(SCHEDSTAT_IS_ZERO.to_owned()));
    }

    /// A value that the kernel lacks is reported as a gap, with its file.
    #[test]
    fn host_report_includes_missing_files() {
        let samples = [sample(0, &[]), sample(2000, &[])];
        let mut gaps = Vec::new();
        let host = Window::new(&samples).expect("time has passed").host(&mut gaps);
        assert_eq!((host.cpus, host.cpu_busy, host.cpu_stolen), (Some(2), Some(0.5), Some(0.1)));
        assert_eq!((host.cpu_stall, host.memory_stall, host.io_stall), (Some(0.5), None, Some(0.0)));
        assert_eq!(host.swapped_in_per_second, Some(1000.0 * 4096.0));
        let sda = &host.devices[0];
        assert_eq!((sda.requests_per_second, sda.await_seconds, sda.utilization), (1000.0, Some(0.005), 0.25));
        assert_eq!(gaps.len(), 1);
        assert_eq!(gaps[0].why, "this kernel has no /proc/pressure/memory");
    }
}
