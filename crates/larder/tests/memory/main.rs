//! `larder memory`: programs that use and verify their memory, and a guest, within budgets below their memory.

mod control;
mod control_group;
mod encrypted;
mod ended;
mod erased;
mod failures;
mod foreign;
mod given_up;
mod guest;
mod holder;
mod kills;
mod limits;
mod refused;
mod room;
mod service;
mod successor;
#[path = "../support/mod.rs"]
mod support;
mod swap_device;
mod swap_file;
mod userfaultfd;
mod views;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::Command;

use larder_bench::campaign::memory::{Attach, Pager, Verifier};
use larder_bench::campaign::verifier;
use support::{larder_path, run_command, temp_dir_on_disk, temp_dir_on_tmpfs};
use tempfile::TempDir;

/// Variable that selects the memory content of the program below.
const VERIFIER: &str = "LARDER_TEST_VERIFIER";

/// Program whose memory is managed. It is no test: other tests start it.
#[test]
#[ignore = "started by other tests"]
fn verified() {
    let Ok(kind) = std::env::var(VERIFIER) else { return };
    let arguments = verifier::Arguments {
        mib: VERIFIED_MIB as usize,
        threads: 2,
        hot: 25,
        compressible: kind == "compressible",
        incompressible: kind == "incompressible",
        seed: u64::from(std::process::id()),
    };
    verifier::main(&arguments).expect("all is as it was written");
}

const MIB: u64 = 1 << 20;

/// Memory of the program, in MiB.
const VERIFIED_MIB: u64 = 64;

/// Budget: half of the program's memory.
const BUDGET: &str = "32MiB";

fn verifier_command(kind: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.args(["--ignored", "--exact", "verified", "--nocapture"]);
    command.env(VERIFIER, kind);
    command
}

/// A program that uses and verifies its memory, and a directory for the pager's files.
struct Fixture {
    verifier: Verifier,
    folder: TempDir,
}

impl Fixture {
    fn new() -> Self {
        Self::with("mixed")
    }

    fn with(kind: &str) -> Self {
        Self {
            verifier: Verifier::start(verifier_command(kind)).expect("a program to manage"),
            folder: temp_dir_on_tmpfs(),
        }
    }

    /// Starts a program whose memory is charged to that control group.
    fn in_group(kind: &str, group: &control_group::ControlGroup) -> Self {
        let command = group.with(&verifier_command(kind));
        Self { verifier: Verifier::start(command).expect("a program to manage"), folder: temp_dir_on_tmpfs() }
    }

    fn pid(&self) -> u32 {
        self.verifier.pid()
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn attach(&self, words: &[&str]) -> Attach {
        Attach::new(larder_path(), self.folder.path(), self.pid(), words)
    }

    fn start(&self) -> Pager {
        self.attach(&["--budget", BUDGET]).start().expect("it attaches")
    }

    /// Runs `larder memory` with these arguments and the control socket; returns the exit status and the output.
    fn ask(&self, words: &str) -> (Option<i32>, String) {
        let mut command = Command::new(larder_path());
        command.arg("memory").args(words.split(' ')).arg("--control");
        command.arg(self.path("control"));
        run_command(command)
    }

    /// Returns the names of the files in the directory.
    fn left(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).expect("a folder").flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    }

    fn alone(&self) -> Alone {
        Alone::of(self.pid())
    }

    fn works(&mut self) {
        self.verifier.works().expect("it works");
    }

    fn verify(self) {
        self.verifier.stop().expect("all is as it was written");
    }
}

/// State of a process that must be as before once it is not managed any more.
#[derive(Debug, PartialEq, Eq)]
struct Alone {
    descriptors: BTreeMap<u32, PathBuf>,
    /// Number of memory ranges that are registered with a userfaultfd.
    watched: usize,
}

impl Alone {
    fn of(pid: u32) -> Self {
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).expect("procfs").flatten();
        let descriptors = descriptors.filter_map(|entry| {
            let number = entry.file_name().to_str()?.parse().ok()?;
            Some((number, std::fs::read_link(entry.path()).ok()?))
        });
        let smaps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).expect("procfs");
        let flags = smaps.lines().filter_map(|line| line.strip_prefix("VmFlags:"));
        Self {
            descriptors: descriptors.collect(),
            watched: flags
                .filter(|flags| flags.split_whitespace().any(|flag| ["um", "uw", "ui"].contains(&flag)))
                .count(),
        }
    }
}

#[test]
fn budget_is_kept_and_detach_restores() {
    let mut fixture = Fixture::new();
    let before = fixture.alone();
    assert_eq!(before.watched, 0);
    let mut pager = fixture.start();
    assert!(pager.stood_still.is_some(), "{}", pager.process.output());
    let state = pager.wait_for_budget().expect("within the budget");
    assert_eq!((state.size, state.budget), (VERIFIED_MIB * MIB, 32 * MIB));
    assert!(state.evicted_pages > 0 && state.compressed.pages > 0, "{state:#?}");
    assert_eq!(state.pid as u32, fixture.pid());
    let during = fixture.alone();
    assert!(during.watched > 0, "nobody is told of what it touches");
    assert_eq!(during.descriptors.len(), before.descriptors.len() + 5);
    let mut most = 0;
    for _ in 0..5 {
        fixture.works();
        let state = pager.state().expect("answers");
        assert!(state.resident <= state.used, "{state:#?}");
        most = most.max(state.used);
    }
    // A little of the budget is kept free, and operations in flight may exceed it.
    assert!(most <= 32 * MIB + 4 * MIB, "{most} bytes are used");
    let faults = pager.state().expect("answers").faults;
    assert!(faults.compressed.count > 0 && faults.uniform.count > 0, "{faults:?}");
    // `larder memory status` reports the same.
    let (code, said) = fixture.ask("status --output json");
    let told: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!((code, &told["budget"]), (Some(0), &(32 * MIB).into()));
    let (code, said) = fixture.ask("status");
    assert!(code == Some(0) && said.contains("budget:           32 MiB, used "), "{said}");
    let (code, said) = fixture.ask("detach");
    let alone = format!("process {} is no longer managed", fixture.pid());
    assert_eq!((code, said.trim_end()), (Some(0), alone.as_str()));
    let ended = pager.process.wait(support::TEST_TIMEOUT).expect("ends");
    assert!(ended.success(), "{}", pager.process.output());
    assert_eq!(fixture.alone(), before);
    assert_eq!(fixture.left(), [""; 0]);
    fixture.works();
    fixture.verify();
}

#[test]
fn process_can_be_reattached() {
    let mut fixture = Fixture::new();
    let before = fixture.alone();
    for _ in 0..3 {
        let mut pager = fixture.start();
        pager.wait_for_budget().expect("within the budget");
        fixture.works();
        pager.detach().expect("lets go");
        assert_eq!(fixture.alone(), before);
    }
    fixture.verify();
}

/// SIGTERM asks for a detach, which is refused while the host has no free memory for the pages.
#[test]
fn sigterm_detaches_only_with_room() {
    let mut fixture = Fixture::new();
    support::require_root("to have the pager see another /proc/meminfo");
    let before = fixture.alone();
    // The pager sees a /proc/meminfo in which no memory is free.
    let (full, real) = (fixture.path("meminfo"), "/proc/meminfo");
    let meminfo = std::fs::read_to_string(real).expect("procfs");
    let none = meminfo.lines().map(|line| match line.starts_with("MemAvailable") {
        true => "MemAvailable:          0 kB\n".to_owned(),
        false => format!("{line}\n"),
    });
    std::fs::write(&full, none.collect::<String>()).expect("writes");
    // The pager gets its own /run, where it claims memory, so that it does not see the claims of other tests' pagers.
    let bind = format!(
        "mount --bind {} {real} && mount --bind {} /run && exec \"$@\"",
        full.display(),
        fixture.folder.path().display()
    );
    let words = ["unshare", "--mount", "sh", "-c", &bind, "sh"];
    let mut pager = fixture.attach(&["--budget", BUDGET]).by(&words).start().expect("it attaches");
    pager.wait_for_budget().expect("within the budget");
    pager.process.signal(libc::SIGTERM);
    let refused = pager.process.wait_for("not detached, and the memory is still managed: ", support::TEST_TIMEOUT);
    assert!(refused.expect("is refused").contains("but the host has "));
    let (code, said) = fixture.ask("detach");
    assert!(code == Some(2) && said.contains("MiB free: free some first"), "{code:?} {said}");
    fixture.works();
    assert!(!pager.state().expect("answers").detaching);
    std::fs::write(&full, meminfo).expect("writes");
    pager.detach().expect("lets go");
    assert_eq!(fixture.alone(), before);
    fixture.verify();
}

/// One file with two mappings, as of two memory-backend-file objects with different offsets, is managed.
#[test]
fn file_with_two_mappings_is_managed() {
    let mut holder = holder::Holder::start_in_halves();
    let (folder, disk) = (temp_dir_on_tmpfs(), temp_dir_on_disk());
    let swap = disk.path().join("swap").display().to_string();
    let words = ["--swap-cache", &swap, "--swap-size", "128MiB"];
    let mut pager = holder.attach(folder.path(), &words).start().expect("it attaches");
    pager.wait_for_budget().expect("within the budget");
    assert_eq!(holder.check(), holder::NONE);
    pager.process.kill();
    let mut pager = holder.attach(folder.path(), &words).start().expect("its successor attaches");
    assert_eq!(holder.check(), holder::NONE);
    pager.detach().expect("lets go");
    holder.stop();
}
