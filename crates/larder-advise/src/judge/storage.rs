//! Judgement of disks. From within a guest, a slow disk looks like a lack of CPUs or memory. It is recognised by
//! three signs: vCPUs do not wait for CPUs, some task waits all the same, and disk requests take long.

use super::format::{percent, size, time};
use super::{AdvicePolicy, Finding, Level, Practice, READY_LOW};
use crate::measured::{Measured, MeasuredVm};

/// Lowest request rate at which a mean is meaningful.
const REQUESTS_PER_SECOND_MIN: f64 = 1.0;

/// Share of the time for which tasks or requests must wait to count as a stall.
const IO_STALL_MIN: f64 = 0.10;

/// Disk that a VM uses.
struct UsedDisk<'a> {
    name: &'a str,
    /// True if Larder serves it, so that the guest's own requests were timed.
    is_served: bool,
    await_seconds: f64,
    requests_per_second: f64,
    utilization: f64,
    limits: Option<&'a str>,
}

pub(super) fn findings(measured: &Measured, policy: &AdvicePolicy) -> Vec<Finding> {
    let mut findings: Vec<Finding> = measured.vms.iter().map(|vm| judge_vm(vm, measured, policy)).collect();
    findings.extend(measured.vms.iter().filter_map(|vm| judge_swap(vm, policy)));
    findings.extend(judge_host(measured, policy));
    findings
}

fn judge_vm(vm: &MeasuredVm, measured: &Measured, policy: &AdvicePolicy) -> Finding {
    let finding = |level, code, text| Finding::for_vm(vm, Practice::Storage, level, code, text);
    let disks = disks(vm, measured);
    let Some(slowest) = disks.iter().max_by(|one, other| one.await_seconds.total_cmp(&other.await_seconds)) else {
        let text = "no activity of it on a disk is visible here".to_owned();
        return finding(Level::Unknown, "no-disk-seen", text);
    };
    let facts = disk_facts(slowest);
    if slowest.await_seconds <= policy.latency_seconds {
        return finding(Level::Fine, "disk-fine", format!("{facts}: the disk is not the bottleneck"));
    }
    let limit = time(policy.latency_seconds);
    let stall = largest_stall(slowest, vm, measured);
    let stall_text = match stall {
        Some((share, source_text)) => format!("{source_text} {} of the time", percent(share)),
        None => "how long tasks wait for a disk is not measured".to_owned(),
    };
    let (Some(ready), Some((share, _))) = (vm.worst_vcpu().map(|vcpu| vcpu.ready), stall) else {
        let text = format!("{facts}, more than {limit}; {stall_text}");
        return finding(Level::Advice, "disk-slow", text);
    };
    if ready > READY_LOW {
        let text = format!(
            "{facts}, more than {limit}, and a vCPU of it was ready but had no CPU {} of the time: both are short",
            percent(ready)
        );
        return finding(Level::Warning, "disk-and-cpus", text);
    }
    if share < IO_STALL_MIN {
        let text = format!("{facts}, more than {limit}, but {stall_text}: tasks seldom wait for it");
        return finding(Level::Advice, "disk-slow", text);
    }
    let text = format!(
        "{facts}, more than {limit}, and {stall_text}, while no vCPU waited for a CPU more than {} of it: what looks like a lack of \
         CPUs or memory is the disk",
        percent(ready)
    );
    finding(Level::Warning, "disk-disguised", text)
}

/// Returns the disks with activity: those that Larder serves, and the host's devices with files of the VM.
fn disks<'a>(vm: &'a MeasuredVm, measured: &'a Measured) -> Vec<UsedDisk<'a>> {
    let served = vm.disks.iter().filter_map(|disk| {
        Some(UsedDisk {
            name: &disk.name,
            is_served: true,
            await_seconds: disk.await_seconds?,
            requests_per_second: disk.requests_per_second,
            utilization: disk.utilization,
            limits: disk.limits.as_deref(),
        })
    });
    let devices = measured.host.devices.iter().filter(|device| vm.devices.contains(&device.name));
    let devices = devices.filter_map(|device| {
        Some(UsedDisk {
            name: &device.name,
            is_served: false,
            await_seconds: device.await_seconds?,
            requests_per_second: device.requests_per_second,
            utilization: device.utilization,
            limits: None,
        })
    });
    let is_used = |disk: &UsedDisk<'_>| disk.requests_per_second >= REQUESTS_PER_SECOND_MIN;
    served.chain(devices).filter(is_used).collect()
}

fn disk_facts(disk: &UsedDisk<'_>) -> String {
    let disk_text = match disk.is_served {
        true => format!("its disk {}", disk.name),
        false => format!("{}, on which it has files,", disk.name),
    };
    let limits = match disk.limits {
        Some(limits) => format!(" (including the delay by its limits: {limits})"),
        None => String::new(),
    };
    format!(
        "{disk_text} took {}{limits} for each of {:.0} requests/s and was busy {} of the time",
        time(disk.await_seconds),
        disk.requests_per_second,
        percent(disk.utilization)
    )
}

/// Returns the share of the time in which some task or request waited, with a description. It is the largest of: the
/// VM's own disk, its managed memory, and the whole host.
fn largest_stall(disk: &UsedDisk<'_>, vm: &MeasuredVm, measured: &Measured) -> Option<(f64, &'static str)> {
    let served = disk.is_served.then_some((disk.utilization, "a request to it was in flight"));
    let memory = vm.managed.as_ref().map(|managed| (managed.stall, "it waited for its memory"));
    let host = measured.host.io_stall.map(|share| (share, "some task of the host waited for a disk"));
    let all = [served, memory, host].into_iter().flatten();
    all.max_by(|one, other| one.0.total_cmp(&other.0))
}

/// Judges the disk from which a VM's cold memory is paged in.
fn judge_swap(vm: &MeasuredVm, policy: &AdvicePolicy) -> Option<Finding> {
    let managed = vm.managed.as_ref()?;
    let fault_seconds = managed.disk_fault_seconds?;
    let facts = format!("a page of its memory that is on a disk takes {} to be paged in", time(fault_seconds));
    let stall_text = format!("it waits {} of the time for its memory", percent(managed.stall));
    let (level, code, text) = match (fault_seconds > policy.latency_seconds, managed.stall > policy.stall) {
        (true, true) => (
            Level::Warning,
            "swap-disguised",
            format!("{facts}, and {stall_text}: what looks like a lack of memory is the disk of its swap cache"),
        ),
        (true, false) => (Level::Advice, "swap-slow", format!("{facts}; {stall_text}")),
        (false, _) => (Level::Fine, "swap-fine", format!("{facts}; {stall_text}")),
    };
    Some(Finding::for_vm(vm, Practice::Storage, level, code, text))
}

/// Judges the slowest device and the kernel's swap, for VMs whose disks are unknown.
fn judge_host(measured: &Measured, policy: &AdvicePolicy) -> Option<Finding> {
    let host = &measured.host;
    let devices = host.devices.iter();
    let used = devices.filter(|device| device.requests_per_second >= REQUESTS_PER_SECOND_MIN);
    let (slowest, request_seconds) = used
        .filter_map(|device| Some((device, device.await_seconds?)))
        .max_by(|one, other| one.1.total_cmp(&other.1))?;
    let stall = match host.io_stall {
        Some(stall) => format!("some task waited for a disk {} of the time", percent(stall)),
        None => "how long tasks wait for disks is not measured".to_owned(),
    };
    let swap = match host.swap_used {
        0 => String::new(),
        used => format!("; the kernel has {} swapped out", size(used)),
    };
    let facts = format!(
        "the host's slowest disk, {}, took {} for each of {:.0} requests/s; {stall}{swap}",
        slowest.name,
        time(request_seconds),
        slowest.requests_per_second
    );
    let (level, code) = match request_seconds > policy.latency_seconds {
        true => (Level::Advice, "host-disk-slow"),
        false => (Level::Fine, "host-disk-fine"),
    };
    Some(Finding::for_host(Practice::Storage, level, code, facts))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measured::{MeasuredDevice, MeasuredDisk, MeasuredHost, PagedMemory, Vcpu, VmCpu};

    /// Returns a VM with the given ready time, and with a disk of Larder's with the given request time and
    /// utilization.
    fn vm(ready: f64, await_seconds: f64, utilization: f64) -> MeasuredVm {
        let vcpu = Vcpu { ready, ..Vcpu::default() };
        MeasuredVm {
            name: "web".to_owned(),
            pid: 7,
            cpu: Some(VmCpu { vcpus: vec![vcpu], ..VmCpu::default() }),
            disks: vec![MeasuredDisk {
                name: "vda".to_owned(),
                requests_per_second: 50.0,
                await_seconds: Some(await_seconds),
                read_p99_seconds: None,
                utilization,
                limits: None,
            }],
            ..MeasuredVm::default()
        }
    }

    fn judged(vm: MeasuredVm, host: MeasuredHost) -> Vec<(&'static str, String)> {
        let measured = Measured { window_seconds: 10.0, host, vms: vec![vm], ..Measured::default() };
        let findings = findings(&measured, &AdvicePolicy::default());
        findings.into_iter().map(|finding| (finding.code, finding.text)).collect()
    }

    fn code(vm: MeasuredVm, host: MeasuredHost) -> &'static str {
        judged(vm, host)[0].0
    }

    /// A slow disk is reported as the bottleneck if ready time is low and some task waits.
    #[test]
    fn slow_disk_is_reported_as_bottleneck() {
        let cases = [
            ((0.004, 0.045, 0.97), "disk-disguised"),
            ((0.05, 0.0201, 0.10), "disk-disguised"),
            // The disk is not slow.
            ((0.004, 0.020, 0.97), "disk-fine"),
            ((0.004, 0.0029, 0.97), "disk-fine"),
            ((0.34, 0.0029, 0.97), "disk-fine"),
            // Few requests wait for the disk.
            ((0.004, 0.045, 0.09), "disk-slow"),
            // CPUs are short.
            ((0.051, 0.045, 0.97), "disk-and-cpus"),
        ];
        for ((ready, await_seconds, utilization), expected) in cases {
            let code = code(vm(ready, await_seconds, utilization), MeasuredHost::default());
            assert_eq!(code, expected, "{ready} {await_seconds} {utilization}");
        }
        assert_eq!(
            judged(vm(0.004, 0.045, 0.97), MeasuredHost::default())[0].1,
            "its disk vda took 45 ms for each of 50 requests/s and was busy 97 % of the time, more than 20 ms, and a request \
             to it was in flight 97 % of the time, while no vCPU waited for a CPU more than 0.4 % of it: what looks like \
             a lack of CPUs or memory is the disk"
        );
    }

    #[test]
    fn host_devices_count_without_served_disk() {
        let mut one = vm(0.0, 0.0, 0.0);
        (one.disks, one.devices) = (Vec::new(), vec!["sda".to_owned()]);
        let host = |stall| MeasuredHost {
            io_stall: stall,
            devices: vec![
                MeasuredDevice {
                    name: "sda".to_owned(),
                    requests_per_second: 100.0,
                    await_seconds: Some(0.04),
                    utilization: 0.9,
                },
                MeasuredDevice {
                    name: "sdb".to_owned(),
                    requests_per_second: 0.5,
                    await_seconds: Some(3.0),
                    utilization: 0.9,
                },
            ],
            ..MeasuredHost::default()
        };
        let codes =
            |vm: &MeasuredVm, stall| -> Vec<_> { judged(vm.clone(), host(stall)).into_iter().map(|it| it.0).collect() };
        assert_eq!(codes(&one, Some(0.5)), ["disk-disguised", "host-disk-slow"]);
        assert_eq!(codes(&one, Some(0.05)), ["disk-slow", "host-disk-slow"]);
        assert_eq!(codes(&one, None), ["disk-slow", "host-disk-slow"]);
        one.devices.clear();
        assert_eq!(codes(&one, Some(0.5)), ["no-disk-seen", "host-disk-slow"]);
        one.devices.push("sdb".to_owned());
        assert_eq!(codes(&one, Some(0.5)), ["no-disk-seen", "host-disk-slow"]);
    }

    #[test]
    fn unknown_ready_time_excludes_bottleneck() {
        let mut one = vm(0.0, 0.045, 0.97);
        one.cpu = None;
        assert_eq!(code(one, MeasuredHost::default()), "disk-slow");
    }

    /// A slow swap cache is reported, because it looks like a lack of memory.
    #[test]
    fn slow_swap_cache_is_reported() {
        let cases = [
            (Some(0.045), 0.3, Some("swap-disguised")),
            (Some(0.045), 0.05, Some("swap-slow")),
            (Some(0.0001), 0.3, Some("swap-fine")),
            (None, 0.3, None),
        ];
        for (disk_fault_seconds, stall, expected) in cases {
            let mut one = vm(0.0, 0.001, 0.1);
            one.managed = Some(PagedMemory { disk_fault_seconds, stall, ..PagedMemory::default() });
            let all = judged(one, MeasuredHost::default());
            assert_eq!(all.get(1).map(|it| it.0), expected, "{disk_fault_seconds:?} {stall}");
        }
    }
}
