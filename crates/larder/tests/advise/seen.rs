//! VMs that `larder advise` measures, and the findings about them.

use std::io::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use larder_bench::campaign::memory::{Attach, Verifier};
use larder_bench::campaign::process::{Process, killed_with_parent};
use larder_bench::campaign::server::Server;

use crate::support::{TEST_TIMEOUT, create_image, larder_path, require_root, temp_dir_on_tmpfs};
use crate::{STARTED, advise, advise_json, fake, fake_command, findings, found, gap, number, vm};

const READY: &str = "the ready time of each vCPU";

#[test]
fn vcpus_sharing_cpu_are_reported_contended() {
    let fake = fake("contended", "-name guest=web,debug-threads=on -m 512M -smp 4");
    let pid = fake.id();
    let advice = advise_json("--for 1s");
    let seen = vm(&advice, pid);
    assert_eq!((&seen["name"], &seen["ram"], &seen["vcpus_given"]), (&"web".into(), &(512 << 20).into(), &4.into()));
    let vcpus = seen["cpu"]["vcpus"].as_array().expect("a list");
    let names: Vec<_> = vcpus.iter().map(|vcpu| vcpu["thread"].as_str().expect("a name")).collect();
    assert_eq!(names, ["CPU 0/TCG", "CPU 1/TCG", "CPU 2/TCG", "CPU 3/TCG"]);
    // At most one of the three runs at a time, and two wait.
    let sum = |what: &str| -> f64 { vcpus[..3].iter().map(|vcpu| number(&vcpu[what])).sum() };
    assert!(sum("busy") <= 1.1 && sum("ready") >= 1.5, "{seen:#}");
    assert!(number(&vcpus[3]["busy"]) < 0.1 && number(&vcpus[3]["ready"]) < 0.1, "{seen:#}");
    let said = findings(&advice, pid);
    let text = said.iter().find(|(code, _)| *code == "cpu-contended").expect("is told").1;
    assert!(
        text.starts_with("its 4 vCPUs ran for ") && text.contains(" were ready but had no CPU (ready time: CPU "),
        "{text}"
    );
    assert_eq!(gap(&advice, pid, READY), None);
    let (code, text) = advise("--for 1s");
    assert!(code == Some(0) && text.contains(&format!("\n! web (PID {pid}): its 4 vCPUs ran for ")), "{text}");
}

/// An idle VM is reported as too large only if it was measured for long enough.
#[test]
fn long_idle_vm_is_oversized() {
    let fake = fake("idle", "-name a)b(c,debug-threads=on -m 8G -smp 1");
    let pid = fake.id();
    let codes = |advice: &serde_json::Value| -> Vec<String> {
        let said = findings(advice, pid);
        said.iter().map(|(code, _)| (*code).to_owned()).collect()
    };
    let short = advise_json("--for 500ms");
    assert_eq!(vm(&short, pid)["name"], "a)b(c");
    // On a busy host the thread may have waited for a CPU before it became idle.
    let is_one_of = |advice, wanted: &[&str]| codes(advice).iter().any(|code| wanted.contains(&code.as_str()));
    assert!(is_one_of(&short, &["vcpus-not-judged", "cpu-waits", "cpu-contended"]), "{short:#}");
    assert_eq!(short["findings"][0]["code"], "window-too-short");
    let long = advise_json("--for 5s");
    assert!(!long["findings"].to_string().contains("window-too-short"), "{long:#}");
    assert!(is_one_of(&long, &["memory-too-large"]), "{long:#}");
    assert!(is_one_of(&long, &["vcpus-right", "cpu-waits", "cpu-contended"]), "{long:#}");
}

/// Without `debug-threads=on` vCPU threads cannot be distinguished, and the output explains that.
#[test]
fn unnamed_vcpu_threads_are_a_gap() {
    let fake = fake("unnamed", "-name web -m 512M -smp 2");
    let pid = fake.id();
    let advice = advise_json("--for 200ms");
    let why = gap(&advice, pid, READY).expect("is told");
    assert!(why.contains("-name debug-threads=on"), "{why}");
    assert_eq!(vm(&advice, pid)["cpu"]["vcpus"], serde_json::json!([]));
    assert_eq!(findings(&advice, pid)[0].0, "vcpus-not-told-apart");
    assert!(gap(&advice, pid, "which of its memory is active").is_some());
}

/// A VM that exits during the measurement is reported as a gap, and nothing fails.
#[test]
fn vm_exit_during_measurement_is_tolerated() {
    let fake = fake("ends", "-name short -m 512M");
    let pid = fake.id();
    let advice = advise_json("--for 2s");
    let why = gap(&advice, pid, "its CPU time and ready time").expect("is told");
    assert_eq!(why, "it has exited");
    assert_eq!(vm(&advice, pid)["memory"], serde_json::Value::Null);
}

/// Without pressure stall information in the kernel, the output names what was not measured.
#[test]
fn missing_kernel_feature_is_reported() {
    require_root("to hide a part of /proc in a mount namespace");
    let mut command = Command::new("unshare");
    let script = "mount -t tmpfs none /proc/pressure && exec \"$@\"";
    command.args(["--mount", "sh", "-c", script, "sh"]).arg(larder_path()).args(["advise", "--for", "200ms"]);
    let (code, said) = crate::support::run_command(command);
    assert_eq!(code, Some(0), "{said}");
    for what in ["CPUs: this kernel has no /proc/pressure/cpu", "memory: this kernel has no /proc/pressure/memory"] {
        assert!(said.contains(&format!("\n  host: for how long tasks wait for {what}\n")), "{said}");
    }
    assert!(said.contains("waited for CPUs -, memory -, disks - of the time\n"), "{said}");
}

/// Creates a disk that a BIOS boots; its boot code keeps the first vCPU busy.
fn busy_disk(folder: &Path) -> String {
    let path = folder.join("busy.raw");
    let mut sector = [0; 512];
    sector[..2].copy_from_slice(b"\xeb\xfe");
    sector[510..].copy_from_slice(b"\x55\xaa");
    let mut file = std::fs::File::create(&path).expect("a file");
    file.write_all(&sector).and_then(|()| file.set_len(1 << 20)).expect("is written");
    path.display().to_string()
}

/// A real QEMU is measured with its vCPUs, and its monitor is not occupied.
#[test]
fn qemu_is_measured_with_its_vcpus() {
    let folder = temp_dir_on_tmpfs();
    let disk = busy_disk(folder.path());
    let qemu = |name: &str| {
        let mut command = killed_with_parent("qemu-system-x86_64");
        command.args(["-name", name, "-accel", "tcg,thread=multi", "-smp", "2", "-m", "64", "-nodefaults"]);
        command.args(["-display", "none", "-serial", "stdio", "-qmp"]);
        command.arg(format!("unix:{},server=on,wait=off", folder.path().join(&name[6..9]).display()));
        command.args(["-drive", &format!("file={disk},format=raw,snapshot=on")]);
        Process::start(command).expect("starts")
    };
    let (named, unnamed) = (qemu("guest=one,debug-threads=on"), qemu("guest=two"));
    let give_up = Instant::now() + TEST_TIMEOUT;
    let advice = loop {
        let advice = advise_json("--for 1s");
        assert!(Instant::now() < give_up, "it does not boot: {advice:#}");
        assert!(!named.has_ended() && !unnamed.has_ended(), "{}{}", named.output(), unnamed.output());
        // Repeated until the guest is booted.
        let all = [named.id(), unnamed.id()].map(|pid| found(&advice, pid).is_some_and(|vm| vm["memory"].is_object()));
        if all == [true; 2] && vm(&advice, named.id())["cpu"]["vcpus_used"].as_f64() > Some(0.1) {
            break advice;
        }
    };
    let one = vm(&advice, named.id());
    assert_eq!((&one["name"], &one["ram"]), (&"one".into(), &(64 << 20).into()));
    let vcpus = one["cpu"]["vcpus"].as_array().expect("a list");
    let names: Vec<_> = vcpus.iter().map(|vcpu| &vcpu["thread"]).collect();
    assert_eq!(names, ["CPU 0/TCG", "CPU 1/TCG"]);
    assert!(number(&vcpus[0]["busy"]) > number(&vcpus[1]["busy"]), "{one:#}");
    assert!(number(&one["memory"]["resident"]) > 1e6, "{one:#}");
    assert!(gap(&advice, unnamed.id(), READY).is_some(), "{advice:#}");
    assert!(number(&vm(&advice, unnamed.id())["cpu"]["used"]) > 0.0);
    // The monitor still accepts a client, so `advise` has not connected.
    let mut monitor = larder_bench::campaign::guest::Monitor::connect(&folder.path().join("one")).expect("connects");
    monitor.run("query-status", "{}").expect("answers");
}

/// The advice about managed memory follows from its pager's statistics.
#[test]
fn pager_statistics_judge_managed_memory() {
    let folder = temp_dir_on_tmpfs();
    let command = fake_command("memory", "-name guest=small,debug-threads=on -m 64M -smp 2");
    let mut verifier = Verifier::start(command).expect("a program to manage");
    let pid = verifier.pid();
    let attach = Attach::new(larder_path(), folder.path(), pid, &["--budget", "32MiB"]);
    let pager = attach.start().expect("it attaches");
    pager.wait_for_budget().expect("within the budget");
    // `advise` finds the pager by the managed process.
    let advice = advise_json("--for 2s --stall 0%");
    verifier.works().expect("it works");
    let managed = &vm(&advice, pid)["managed"];
    assert_eq!(managed["control"], attach.control().to_str().expect("UTF-8"));
    assert_eq!((&managed["budget"], &managed["size"]), (&(32 << 20).into(), &(64 << 20).into()));
    assert!(number(&managed["faults_per_second"]) > 0.0 && number(&managed["stall"]) > 0.0, "{managed:#}");
    let said = findings(&advice, pid);
    let text = said.iter().find(|(code, _)| *code == "budget-too-small").expect("is told").1;
    assert!(text.starts_with("with a budget of 32 MiB for 64 MiB (") && text.contains(" (faults: "), "{text}");
    assert_eq!(gap(&advice, pid, "which of its memory is active"), None);
    // The curve falls: with more memory there are fewer faults.
    let curve = managed["curve"].as_array().expect("a list");
    let faults: Vec<f64> = curve.iter().map(|at| number(&at["faults_per_second"])).collect();
    assert!(faults.len() > 3 && faults[0] > 0.0 && faults.is_sorted_by(|one, next| one >= next), "{managed:#}");
    assert!(
        text.contains(" (from compressed RAM and disks ") && text.contains("/s with 32 MiB; of these there would be "),
        "{text}"
    );
    // Each refault was counted exactly once.
    let state = pager.state().expect("answers");
    let counted: u64 = state.refault_distances.iter().map(|distance| distance.count).sum();
    assert_eq!(counted, state.faults.compressed.count + state.faults.disk.count);
    // The stall never exceeds 100 %.
    let advice = advise_json("--for 1s --stall 100%");
    let codes: Vec<_> = findings(&advice, pid).into_iter().map(|it| it.0).collect();
    assert!(codes.contains(&"budget-enough"), "{advice:#}");
    drop(pager);
}

#[test]
fn slow_disk_is_reported_as_bottleneck() {
    let folder = temp_dir_on_tmpfs();
    let uri = format!("nbd+unix:///?socket={}", folder.path().join("n").display());
    let (image, control) = (create_image(folder.path(), 64 << 20), folder.path().join("c"));
    let mut server = killed_with_parent("env");
    server.arg(larder_path()).args(["disk", "serve", "--format", "raw", "--nbd", &uri, "--prefetch", "off"]);
    server.args(["--throttle", "iops-total=20", "--control"]).arg(&control).arg(&image);
    let _server = Server::from_command(server, &folder.path().join("n")).expect("starts");
    let fake = fake("idle", &format!("-name slow,debug-threads=on -m 64M -drive file={uri},if=virtio"));
    let mut load = killed_with_parent("qemu-img");
    load.args(["bench", "-f", "raw", "-c", "1000000", "-d", "4", "-s", "4096", &uri]);
    let _load = Process::start(load).expect("starts");
    let give_up = Instant::now() + TEST_TIMEOUT;
    let told = loop {
        let advice = advise_json("--for 2s");
        assert!(Instant::now() < give_up, "its disk does nothing: {advice:#}");
        let disks = vm(&advice, fake.id())["disks"].as_array().expect("a list").clone();
        // Repeated until the disk is under constant load.
        if disks.first().is_some_and(|disk| number(&disk["utilization"]) > 0.9) {
            break advice;
        }
    };
    let disk = &vm(&told, fake.id())["disks"][0];
    assert!(number(&disk["await_seconds"]) > 0.05, "{disk:#}");
    let said = findings(&told, fake.id());
    let storage: Vec<_> = said.iter().filter(|(code, _)| code.starts_with("disk-")).collect();
    let [(code, text)] = storage[..] else { panic!("{told:#}") };
    // The only vCPU is idle; but on a busy host it may have waited briefly for a CPU.
    assert!(["disk-disguised", "disk-and-cpus"].contains(code), "{told:#}");
    assert!(text.contains(&format!("its disk {} took ", image.display())), "{text}");
    assert!(text.contains("(including the delay by its limits: iops-total=20)"), "{text}");
    // The finding does not appear for another VM.
    let other = crate::fake("idle", "-name other,debug-threads=on -m 64M");
    let advice = advise_json("--for 200ms");
    assert_eq!(vm(&advice, other.id())["disks"], serde_json::json!([]));
    assert!(fake.output().contains(STARTED));
}

/// A control socket that does not answer is listed, and named among the gaps.
#[test]
fn silent_server_is_reported() {
    let folder = temp_dir_on_tmpfs();
    let nobody = folder.path().join("nobody").display().to_string();
    let advice = advise_json(&format!("--for 200ms --control {nobody}"));
    assert_eq!(advice["measured"]["silent"], serde_json::json!([nobody]));
    let gaps = advice["measured"]["gaps"].to_string();
    assert!(gaps.contains(&format!("Larder's report at {nobody}")) && gaps.contains(&format!("there is no {nobody}")));
    let (code, said) =
        advise(&format!("--for 200ms --control {nobody} --would-fit 1B --stall 100% --overcommit 1000%"));
    assert!(code == Some(4) || (code == Some(1) && said.contains("does not fit")), "{code:?} {said}");
}
