//! Judgement of VM sizes: vCPUs by their use and ready time, memory by the touched amount or, where Larder keeps a
//! budget, by refaults.

use super::format::{count, cpus, percent, rate, size, time};
use super::{AdvicePolicy, CPU_TARGET, Finding, Level, Practice, READY_HIGH, READY_LOW, WINDOW_SECONDS_MIN};
use crate::measured::{FaultRatePoint, Measured, MeasuredHost, MeasuredVm, PagedMemory, Vcpu, VmCpu};
use crate::qemu::is_all_vcpus;

/// Step of advised memory sizes, in bytes.
const RAM_STEP_BYTES: u64 = 256 << 20;

/// Share of its memory by which a VM must be too large to be reported.
const RAM_GAIN_FRACTION_MIN: f64 = 0.25;

pub(super) fn findings(measured: &Measured, policy: &AdvicePolicy) -> Vec<Finding> {
    let mut findings = Vec::new();
    if measured.window_seconds < WINDOW_SECONDS_MIN && !measured.vms.is_empty() {
        findings.push(Finding::for_host(
            Practice::RightSize,
            Level::Unknown,
            "window-too-short",
            format!(
                "{} are too short to judge how many vCPUs a VM needs: observe for {WINDOW_SECONDS_MIN} s or longer (--for)",
                time(measured.window_seconds)
            ),
        ));
    }
    for vm in &measured.vms {
        findings.extend(vm.cpu.as_ref().and_then(|cpu| judge_cpus(vm, cpu, measured)));
        findings.extend(match &vm.managed {
            Some(managed) => Some(judge_budget(vm, managed, policy)),
            None => judge_memory(vm, policy),
        });
    }
    findings
}

fn judge_cpus(vm: &MeasuredVm, cpu: &VmCpu, measured: &Measured) -> Option<Finding> {
    let finding = |level, code, text| Some(Finding::for_vm(vm, Practice::RightSize, level, code, text));
    let (Some(used), Some(peak), Some(worst)) = (cpu.vcpus_used, cpu.vcpus_used_peak, vm.worst_vcpu()) else {
        let text = format!(
            "all its threads together used {} CPUs, and {} of them on average waited for one",
            cpus(cpu.used),
            cpus(cpu.waiting)
        );
        return finding(Level::Unknown, "vcpus-not-told-apart", text);
    };
    let number = u32::try_from(cpu.vcpus.len()).unwrap_or(u32::MAX);
    let busy = used / f64::from(number);
    let vcpus_text = count(number, "vCPU");
    let ready_text = ready_time_text(&cpu.vcpus, worst);
    if worst.ready > READY_LOW {
        let (level, code) = match worst.ready >= READY_HIGH {
            true => (Level::Warning, "cpu-contended"),
            false => (Level::Advice, "cpu-waits"),
        };
        let text = format!(
            "its {vcpus_text} ran for {} of the time, and {ready_text}; {}",
            percent(busy),
            remedy(&measured.host)
        );
        return finding(level, code, text);
    }
    if measured.window_seconds < WINDOW_SECONDS_MIN {
        let text = format!("its {vcpus_text} ran for {} of the time, and {ready_text}", percent(busy));
        return finding(Level::Unknown, "vcpus-not-judged", text);
    }
    let peak_text = format!("{} at most in any {}", cpus(peak), time(measured.slice_seconds));
    let facts = format!("its {vcpus_text} used {} CPUs on average, {peak_text}, and {ready_text}", cpus(used));
    if cpu.vcpus.iter().any(|vcpu| is_all_vcpus(&vcpu.thread)) {
        return finding(Level::Fine, "vcpus-take-turns", facts);
    }
    let needed = needed_vcpus(peak);
    if busy >= CPU_TARGET {
        let text = format!("{facts}: it could use more{}", with_separator(host_text(&measured.host)));
        return finding(Level::Advice, "vcpus-too-few", text);
    }
    if needed < number {
        let text =
            format!("{facts}: {} would be enough, busy to {} at most", count(needed, "vCPU"), percent(CPU_TARGET));
        return finding(Level::Advice, "vcpus-too-many", text);
    }
    finding(Level::Fine, "vcpus-right", facts)
}

/// Returns the number of vCPUs that have this peak at the intended load.
fn needed_vcpus(peak: f64) -> u32 {
    // Rounding errors just above a whole number are ignored.
    ((peak / CPU_TARGET - 1e-9).ceil() as u32).max(1)
}

/// Describes the time for which vCPUs were ready and had no CPU.
fn ready_time_text(vcpus: &[Vcpu], worst: &Vcpu) -> String {
    let mean = vcpus.iter().map(|vcpu| vcpu.ready).sum::<f64>() / vcpus.len() as f64;
    let thread = crate::qemu::printable(&worst.thread);
    match vcpus.len() {
        1 => format!("for {} of the time was ready but had no CPU (ready time of {thread})", percent(mean)),
        _ => format!(
            "for {} of the time were ready but had no CPU (ready time: {thread} most, {})",
            percent(mean),
            percent(worst.ready)
        ),
    }
}

/// Returns a remedy for a VM that waits for CPUs.
fn remedy(host: &MeasuredHost) -> String {
    let advice = match host.cpu_busy {
        Some(busy) if busy < CPU_TARGET => {
            "there are CPUs with time to spare, so check what keeps it from them: pinning, cpusets or quotas"
        }
        _ => "more vCPUs would make it worse, fewer VMs or vCPUs on this host would help",
    };
    match host_text(host) {
        host if host.is_empty() => advice.to_owned(),
        host => format!("{host}: {advice}"),
    }
}

/// Prefixes an optional part of a sentence with a separator.
fn with_separator(part: String) -> String {
    match part.as_str() {
        "" => part,
        part => format!("; {part}"),
    }
}

fn host_text(host: &MeasuredHost) -> String {
    let stolen = match host.cpu_stolen {
        Some(stolen) if stolen >= 0.005 => format!(", {} of it taken by the hypervisor below", percent(stolen)),
        _ => String::new(),
    };
    match (host.cpus, host.cpu_busy) {
        (Some(number), Some(busy)) => {
            format!("the host's {} are busy to {}{stolen}", count(number, "CPU"), percent(busy))
        }
        _ => String::new(),
    }
}

/// Judges unmanaged memory, of which only the touched amount is known: the most that was ever used.
fn judge_memory(vm: &MeasuredVm, policy: &AdvicePolicy) -> Option<Finding> {
    let (ram, memory) = (vm.ram?, vm.memory?);
    let touched = memory.resident.saturating_add(memory.swapped);
    let swapped = match memory.swapped {
        0 => String::new(),
        swapped => format!(", of that {} swapped out", size(swapped)),
    };
    let facts = format!("it has {} and takes {} of the host's memory{swapped}", size(ram), size(touched));
    // A zero share makes the quotient infinite, so that no size is enough.
    let enough = (touched as f64 / policy.active_share) as u64;
    let enough = enough.div_ceil(RAM_STEP_BYTES).saturating_mul(RAM_STEP_BYTES);
    let finding = |level, code, text| Some(Finding::for_vm(vm, Practice::RightSize, level, code, text));
    if (enough as f64) <= ram as f64 * (1.0 - RAM_GAIN_FRACTION_MIN) {
        let text = format!(
            "{facts}, which is all memory that it has touched and not returned: {} would be enough, {} of it used",
            size(enough),
            percent(touched as f64 / enough as f64)
        );
        return finding(Level::Advice, "memory-too-large", text);
    }
    let text = format!("{facts}: at most that much is active");
    finding(Level::Fine, "memory-touched", text)
}

/// Judges memory with a budget: the faults show whether the budget is enough.
fn judge_budget(vm: &MeasuredVm, managed: &PagedMemory, policy: &AdvicePolicy) -> Finding {
    let finding = |level, code, text| Finding::for_vm(vm, Practice::RightSize, level, code, text);
    let facts = format!(
        "with a budget of {} for {} ({} used) its vCPUs waited {} of the time for evicted pages (faults: {}, of \
         them refaults {})",
        size(managed.budget),
        size(managed.size),
        size(managed.used),
        percent(managed.stall),
        rate(managed.faults_per_second),
        rate(managed.refaults_per_second)
    );
    if let Some(problem) = &managed.problem {
        return finding(Level::Warning, "budget-not-kept", format!("{facts}; the budget is exceeded: {problem}"));
    }
    if managed.stall > policy.stall {
        let text = format!(
            "{facts}, more than the {} that are accepted: give it a larger budget{}",
            percent(policy.stall),
            larger_budgets_text(managed, policy)
        );
        return finding(Level::Warning, "budget-too-small", text);
    }
    if managed.budget >= managed.size {
        return finding(Level::Fine, "budget-without-effect", format!("{facts}: all of its memory fits"));
    }
    finding(Level::Fine, "budget-enough", format!("{facts}: the budget is enough"))
}

/// Describes the effect of larger budgets: of the next ones, and of the first that suffices.
fn larger_budgets_text(managed: &PagedMemory, policy: &AdvicePolicy) -> String {
    let [now, larger @ ..] = managed.curve.as_slice() else {
        return String::new();
    };
    if now.faults_per_second <= 0.0 {
        return String::new();
    }
    let point_text = |at: &FaultRatePoint| format!("{} with {}", rate(at.faults_per_second), size(at.budget));
    let next: Vec<String> = larger.iter().take(3).map(point_text).collect();
    let sufficient = larger.iter().find(|at| {
        let share = at.faults_per_second / now.faults_per_second;
        managed.stall * share <= policy.stall
    });
    let enough = match sufficient {
        Some(at) => format!("; about {} would be enough", size(at.budget)),
        None => "; its working set is larger than this budget can show".to_owned(),
    };
    match next.is_empty() {
        true => String::new(),
        false => format!(
            " (from compressed RAM and disks {}; of these there would be {}){enough}",
            point_text(now),
            next.join(", ")
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measured::MeasuredMemory;

    const GIB: u64 = 1 << 30;

    /// Returns a VM of four vCPUs, each with the given load, peak load and ready time.
    fn vm(busy: f64, peak: f64, ready: f64) -> MeasuredVm {
        let vcpu = |number| Vcpu { thread: format!("CPU {number}/KVM"), busy, ready, ready_peak: ready };
        MeasuredVm {
            name: "web".to_owned(),
            pid: 7,
            cpu: Some(VmCpu {
                used: busy * 4.0,
                vcpus_used: Some(busy * 4.0),
                vcpus_used_peak: Some(peak * 4.0),
                waiting: ready * 4.0,
                vcpus: (0..4).map(vcpu).collect(),
            }),
            ..MeasuredVm::default()
        }
    }

    fn measured(seconds: f64, vm: MeasuredVm) -> Measured {
        Measured {
            window_seconds: seconds,
            slice_seconds: seconds / 10.0,
            host: MeasuredHost { cpus: Some(8), cpu_busy: Some(0.5), ..MeasuredHost::default() },
            vms: vec![vm],
            ..Measured::default()
        }
    }

    fn codes(measured: &Measured) -> Vec<&'static str> {
        let findings = findings(measured, &AdvicePolicy::default());
        findings.iter().map(|finding| finding.code).collect()
    }

    /// Ready time is judged first, then the use of vCPUs.
    #[test]
    fn ready_time_is_judged_before_use() {
        let cases = [
            // Load, peak load, ready time.
            ((0.90, 0.90, 0.34), "cpu-contended"),
            ((0.10, 0.10, 0.10), "cpu-contended"),
            ((0.90, 0.90, 0.0999), "cpu-waits"),
            ((0.90, 0.90, 0.0501), "cpu-waits"),
            ((0.90, 0.90, 0.05), "vcpus-too-few"),
            ((0.80, 0.80, 0.0), "vcpus-too-few"),
            // 4 vCPUs at a peak of 0.7 need 4 * 0.7 / 0.8 = 3.5.
            ((0.50, 0.70, 0.0), "vcpus-right"),
            // 4 vCPUs at a peak of 0.6 need 4 * 0.6 / 0.8 = 3.
            ((0.50, 0.60, 0.0), "vcpus-too-many"),
            ((0.50, 0.61, 0.0), "vcpus-right"),
            ((0.0, 0.0, 0.0), "vcpus-too-many"),
        ];
        for ((busy, peak, ready), code) in cases {
            assert_eq!(codes(&measured(10.0, vm(busy, peak, ready))), [code], "{busy} {peak} {ready}");
        }
    }

    #[test]
    fn one_waiting_vcpu_is_reported() {
        let mut one = vm(0.1, 0.1, 0.0);
        if let Some(cpu) = &mut one.cpu {
            cpu.vcpus[2].ready = 0.2;
        }
        let measured = measured(10.0, one);
        assert_eq!(codes(&measured), ["cpu-contended"]);
        let text = &findings(&measured, &AdvicePolicy::default())[0].text;
        assert!(
            text.contains("for 5.0 % of the time were ready but had no CPU (ready time: CPU 2/KVM most, 20 %)"),
            "{text}"
        );
    }

    #[test]
    fn needed_vcpus_are_80_percent_busy() {
        for (peak, number) in [(0.0, 1), (0.8, 1), (0.81, 2), (1.6, 2), (2.4, 3), (3.2, 4), (3.3, 5)] {
            assert_eq!(needed_vcpus(peak), number, "{peak}");
        }
    }

    /// A window that is too short gives values but no advice on sizes.
    #[test]
    fn short_window_gives_no_advice() {
        let short = measured(2.0, vm(0.1, 0.1, 0.01));
        assert_eq!(codes(&short), ["window-too-short", "vcpus-not-judged"]);
        // A present wait is reported even by a short window.
        assert_eq!(codes(&measured(2.0, vm(0.1, 0.1, 0.5))), ["window-too-short", "cpu-contended"]);
        assert_eq!(codes(&measured(5.0, vm(0.1, 0.1, 0.01))), ["vcpus-too-many"]);
    }

    #[test]
    fn sentences_contain_evidence() {
        let all = findings(&measured(10.0, vm(0.2, 0.3, 0.34)), &AdvicePolicy::default());
        let waits = "its 4 vCPUs ran for 20 % of the time, and for 34 % of the time were ready but had no CPU (ready time: CPU 3/KVM most, \
                     34 %); the host's 8 CPUs are busy to ";
        let spare =
            "50 %: there are CPUs with time to spare, so check what keeps it from them: pinning, cpusets or quotas";
        assert_eq!(all[0].text, format!("{waits}{spare}"));
        let mut full = measured(10.0, vm(0.2, 0.3, 0.34));
        full.host.cpu_busy = Some(0.97);
        let none = "97 %: more vCPUs would make it worse, fewer VMs or vCPUs on this host would help";
        assert_eq!(findings(&full, &AdvicePolicy::default())[0].text, format!("{waits}{none}"));
        let all = findings(&measured(10.0, vm(0.1, 0.15, 0.004)), &AdvicePolicy::default());
        assert_eq!(
            all[0].text,
            "its 4 vCPUs used 0.4 CPUs on average, 0.6 at most in any 1.0 s, and for 0.4 % of the time were ready but had no CPU \
             (ready time: CPU 3/KVM most, 0.4 %): 1 vCPU would be enough, busy to 80 % at most"
        );
        assert_eq!(all[0].vm.as_deref(), Some("web (PID 7)"));
    }

    #[test]
    fn indistinguishable_vcpus_are_not_judged() {
        let mut vm = vm(0.1, 0.1, 0.5);
        vm.cpu = Some(VmCpu { used: 0.5, waiting: 1.25, ..VmCpu::default() });
        let measured = measured(10.0, vm);
        assert_eq!(codes(&measured), ["vcpus-not-told-apart"]);
        let text = &findings(&measured, &AdvicePolicy::default())[0].text;
        assert_eq!(text, "all its threads together used 0.5 CPUs, and 1.2 of them on average waited for one");
    }

    /// Memory is too large if the touched amount is at most 80 % of three quarters of it.
    #[test]
    fn memory_is_judged_by_touched_amount() {
        let cases = [
            // 1.6 / 0.8 = 2 GiB are enough, a quarter of 8.
            (1.6, 0.0, "memory-too-large"),
            // 4.8 / 0.8 = 6 GiB are enough, three quarters of 8.
            (4.8, 0.0, "memory-too-large"),
            (4.9, 0.0, "memory-touched"),
            (4.0, 0.9, "memory-touched"),
            (8.2, 0.0, "memory-touched"),
        ];
        for (resident, swapped, code) in cases {
            let of = |gib: f64| (gib * GIB as f64) as u64;
            let vm = MeasuredVm {
                ram: Some(8 * GIB),
                memory: Some(MeasuredMemory { resident: of(resident), swapped: of(swapped) }),
                ..MeasuredVm::default()
            };
            assert_eq!(codes(&measured(10.0, vm.clone())), [code], "{resident}");
            let none = AdvicePolicy { active_share: 0.0, ..AdvicePolicy::default() };
            assert_eq!(findings(&measured(10.0, vm), &none)[0].code, "memory-touched");
        }
    }

    /// The advice for a budget shows the fault rates of larger budgets.
    #[test]
    fn larger_budget_is_advised_with_faults() {
        let at = |gib: f64, faults_per_second| FaultRatePoint { budget: (gib * GIB as f64) as u64, faults_per_second };
        let managed = |curve| PagedMemory {
            size: 4 * GIB,
            budget: GIB,
            used: GIB,
            stall: 0.20,
            faults_per_second: 100.0,
            refaults_per_second: 80.0,
            curve,
            ..PagedMemory::default()
        };
        let text = |curve| judge_budget(&MeasuredVm::default(), &managed(curve), &AdvicePolicy::default()).text;
        let facts = "with a budget of 1 GiB for 4 GiB (1 GiB used) its vCPUs waited 20 % of the time for evicted pages \
                     (faults: 100/s, of them refaults 80/s), more than the 5.0 % that are accepted: give it a larger \
                     budget";
        assert_eq!(text(Vec::new()), facts);
        // A quarter of the faults stall for 5 %.
        let curve = vec![at(1.0, 100.0), at(1.25, 60.0), at(1.5, 26.0), at(2.0, 25.0), at(3.0, 0.0)];
        assert_eq!(
            text(curve),
            format!(
                "{facts} (from compressed RAM and disks 100/s with 1 GiB; of these there would be 60/s with 1.2 GiB, 26/s with \
                 1.5 GiB, 25/s with 2 GiB); about 2 GiB would be enough"
            )
        );
        assert!(
            text(vec![at(1.0, 100.0), at(2.0, 90.0)])
                .ends_with("; its working set is larger than this budget can show")
        );
    }

    #[test]
    fn budget_is_judged_by_stall() {
        let managed = |stall, budget| PagedMemory { size: 4 * GIB, budget, stall, ..PagedMemory::default() };
        let failing = PagedMemory { problem: Some("its swap cache is full".to_owned()), ..managed(0.0, GIB) };
        let cases = [
            (managed(0.05, GIB), "budget-enough"),
            (managed(0.051, GIB), "budget-too-small"),
            (managed(0.0, 4 * GIB), "budget-without-effect"),
            (failing, "budget-not-kept"),
        ];
        for (managed, code) in cases {
            let vm = MeasuredVm { managed: Some(managed.clone()), ..MeasuredVm::default() };
            assert_eq!(codes(&measured(10.0, vm)), [code], "{managed:?}");
        }
    }
}
