//! `larder advise`, measuring processes that look like QEMU and behave as the tests need, and QEMU itself.

mod fits;
mod seen;
#[path = "../support/mod.rs"]
mod support;

use std::os::unix::process::CommandExt as _;
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;

use larder_bench::campaign::process::Process;
use larder_bench::campaign::verifier;
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use serde_json::Value;
use support::{TEST_TIMEOUT, larder_path, run_command};

/// Variable that makes this test program act as a fake QEMU; its value selects the behaviour.
const FAKE: &str = "LARDER_TEST_FAKE_QEMU";

/// Output of the fake QEMU once it has started.
const STARTED: &str = "the fake has started";

/// Program that looks like QEMU. It is no test: other tests start it.
#[test]
#[ignore = "started by other tests"]
fn fake_qemu() {
    let Ok(kind) = std::env::var(FAKE) else { return };
    match kind.as_str() {
        // Three vCPUs that are busy on one CPU, and an idle one.
        "contended" => {
            let all = sched_getaffinity(None).expect("CPUs to run on");
            let first = (0..CpuSet::MAX_CPU).find(|cpu| all.is_set(*cpu)).expect("one at least");
            let mut one = CpuSet::new();
            one.set(first);
            sched_setaffinity(None, &one).expect("runs there");
            for number in 0..3 {
                vcpu(number, std::hint::spin_loop);
            }
            vcpu(3, std::thread::park);
        }
        "idle" => vcpu(0, std::thread::park),
        "unnamed" => {}
        "ends" => {
            vcpu(0, std::thread::park);
            println!("{STARTED}");
            std::thread::sleep(Duration::from_millis(300));
            return;
        }
        // A process whose memory is managed.
        "memory" => {
            let arguments = verifier::Arguments {
                mib: 64,
                threads: 2,
                hot: 25,
                compressible: false,
                incompressible: false,
                seed: 1,
            };
            return verifier::main(&arguments).expect("all is as it was written");
        }
        _ => panic!("{kind}?"),
    }
    println!("{STARTED}");
    loop {
        std::thread::park();
    }
}

/// Starts a thread with the name of a vCPU's thread.
fn vcpu(number: u32, work: impl Fn() + Send + 'static) {
    let thread = std::thread::Builder::new().name(format!("CPU {number}/TCG"));
    let (begun, wait) = mpsc::channel();
    let started = thread.spawn(move || {
        begun.send(()).expect("is waited for");
        loop {
            work();
        }
    });
    started.expect("a thread");
    wait.recv().expect("begins");
}

/// Returns a command that starts a fake QEMU with these arguments and this behaviour.
fn fake_command(kind: &str, words: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command
        .arg0("/usr/bin/qemu-system-x86_64")
        .args(["fake_qemu", "--ignored", "--exact", "--nocapture", "--"])
        .args(words.split(' '))
        .env(FAKE, kind);
    command
}

fn fake(kind: &str, words: &str) -> Process {
    let process = Process::start(fake_command(kind, words)).expect("starts");
    process.wait_for(STARTED, TEST_TIMEOUT).expect("does it");
    process
}

/// Runs `larder advise` with these arguments; returns the exit status and the output.
fn advise(words: &str) -> (Option<i32>, String) {
    let mut command = Command::new(larder_path());
    command.arg("advise").args(words.split(' '));
    run_command(command)
}

/// Returns the JSON output of `larder advise`.
fn advise_json(words: &str) -> Value {
    let (code, said) = advise(&format!("{words} --output json"));
    assert_eq!(code, Some(0), "{said}");
    serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// Returns the measurements of the VM with this process.
fn vm(advice: &Value, pid: u32) -> &Value {
    found(advice, pid).unwrap_or_else(|| panic!("no {pid} in {advice:#}"))
}

/// Returns the measurements of the VM with this process, if it was detected.
fn found(advice: &Value, pid: u32) -> Option<&Value> {
    let vms = advice["measured"]["vms"].as_array().expect("a list");
    vms.iter().find(|vm| vm["pid"] == pid)
}

/// Returns the codes and texts of the findings about a VM.
fn findings(advice: &Value, pid: u32) -> Vec<(&str, &str)> {
    let whose = format!("PID {pid}");
    let findings = advice["findings"].as_array().expect("a list").iter();
    let about = findings.filter(|finding| finding["vm"].as_str().is_some_and(|vm| vm.contains(&whose)));
    let texts = about.map(|finding| (finding["code"].as_str(), finding["text"].as_str()));
    texts.map(|(code, text)| (code.expect("a code"), text.expect("a text"))).collect()
}

/// Returns the reason why a quantity of a VM was not measured.
fn gap<'a>(advice: &'a Value, pid: u32, what: &str) -> Option<&'a str> {
    let whose = format!("PID {pid}");
    let gaps = advice["measured"]["gaps"].as_array().expect("a list").iter();
    let mut about = gaps.filter(|gap| gap["vm"].as_str().is_some_and(|vm| vm.contains(&whose)) && gap["what"] == what);
    about.next()?["why"].as_str()
}

fn number(of: &Value) -> f64 {
    of.as_f64().unwrap_or_else(|| panic!("{of} is no number"))
}
