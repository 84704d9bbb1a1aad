//! `larder advise`, looking at processes that are called as QEMU's are and do what is to be seen, and at QEMU.

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
use support::{LIMIT, larder, run};

/// How the program below is told what it does.
const FAKE: &str = "LARDER_TEST_FAKE_QEMU";

/// What it says when it does that.
const STARTED: &str = "the fake has started";

/// No test, but the program that looks like QEMU.
#[test]
#[ignore = "started by other tests"]
fn fake_qemu() {
    let Ok(kind) = std::env::var(FAKE) else { return };
    match kind.as_str() {
        // Three vCPUs that work on one CPU, and one that does nothing.
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
        // Its memory is managed.
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

/// A thread that is called like that of a vCPU, and has begun.
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

/// A process that looks like a QEMU with these words, and does that.
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
    process.wait_for(STARTED, LIMIT).expect("does it");
    process
}

/// `larder advise` with these words; the exit code, and what was said.
fn advise(words: &str) -> (Option<i32>, String) {
    let mut command = Command::new(larder());
    command.arg("advise").args(words.split(' '));
    run(command)
}

/// What it tells programs.
fn advise_json(words: &str) -> Value {
    let (code, said) = advise(&format!("{words} --output json"));
    assert_eq!(code, Some(0), "{said}");
    serde_json::from_str(&said).unwrap_or_else(|error| panic!("{error}: {said}"))
}

/// What was measured of the VM whose process that is.
fn vm(advice: &Value, pid: u32) -> &Value {
    found(advice, pid).unwrap_or_else(|| panic!("no {pid} in {advice:#}"))
}

/// If it was seen.
fn found(advice: &Value, pid: u32) -> Option<&Value> {
    let vms = advice["measured"]["vms"].as_array().expect("a list");
    vms.iter().find(|vm| vm["pid"] == pid)
}

/// The findings about it, by their codes.
fn findings(advice: &Value, pid: u32) -> Vec<(&str, &str)> {
    let whose = format!("PID {pid}");
    let findings = advice["findings"].as_array().expect("a list").iter();
    let about = findings.filter(|finding| finding["vm"].as_str().is_some_and(|vm| vm.contains(&whose)));
    let texts = about.map(|finding| (finding["code"].as_str(), finding["text"].as_str()));
    texts
        .map(|(code, text)| (code.expect("a code"), text.expect("a text")))
        .collect()
}

/// Why something was not measured of it.
fn gap<'a>(advice: &'a Value, pid: u32, what: &str) -> Option<&'a str> {
    let whose = format!("PID {pid}");
    let gaps = advice["measured"]["gaps"].as_array().expect("a list").iter();
    let mut about = gaps.filter(|gap| gap["vm"].as_str().is_some_and(|vm| vm.contains(&whose)) && gap["what"] == what);
    about.next()?["why"].as_str()
}

fn number(of: &Value) -> f64 {
    of.as_f64().unwrap_or_else(|| panic!("{of} is no number"))
}
