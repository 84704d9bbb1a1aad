//! Obstacles to a first attach that do not stop a killed pager's successor; and frozen processes.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::process::Command;
use std::sync::mpsc;
use std::thread;

use larder_bench::campaign::process::Process;
use rustix::mm::{MapFlags, ProtFlags};

use crate::control_group::ControlGroup;
use crate::holder::{Holder, NONE};
use crate::support::{TEST_TIMEOUT, larder_path, run_command, temp_dir_on_disk, temp_dir_on_tmpfs};
use crate::{BUDGET, Fixture, VERIFIED_MIB};

/// A tracer of all threads of a process, like strace.
struct Tracer {
    stop: mpsc::Sender<()>,
    thread: thread::JoinHandle<()>,
}

impl Tracer {
    fn of(pid: u32) -> Self {
        let (stop, stopped) = mpsc::channel();
        let (began, begun) = mpsc::channel();
        let thread = thread::spawn(move || {
            for task in std::fs::read_dir(format!("/proc/{pid}/task")).expect("procfs").flatten() {
                let tid: i32 = task.file_name().to_str().and_then(|name| name.parse().ok()).expect("a thread");
                // SAFETY: PTRACE_SEIZE takes no pointers.
                let done = unsafe { libc::ptrace(libc::PTRACE_SEIZE, tid, 0_usize, 0_usize) };
                assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
            }
            began.send(()).expect("it is waited for");
            // The kernel detaches the tracer when its thread ends.
            let _ = stopped.recv();
        });
        begun.recv().expect("it traces");
        Self { stop, thread }
    }

    fn stop(self) {
        drop(self.stop);
        self.thread.join().expect("it traced");
    }
}

/// A mapping of a program's memory in this process, until it is dropped.
struct Mapped(*mut std::ffi::c_void, usize);

impl Mapped {
    fn of(fixture: &Fixture) -> Self {
        let entries = std::fs::read_dir(format!("/proc/{}/fd", fixture.pid())).expect("procfs");
        let is_ram = |path: &std::path::PathBuf| {
            let link = std::fs::read_link(path).unwrap_or_default();
            let link = link.to_string_lossy();
            link.starts_with("/memfd:") && !link.contains("larder-")
        };
        let path = entries.flatten().map(|entry| entry.path()).find(is_ram);
        let file = File::open(path.expect("its memory")).expect("opens");
        let bytes = (VERIFIED_MIB << 20) as usize;
        // SAFETY: a new mapping, at an address that the kernel chooses; it is never accessed.
        let at = unsafe {
            let nowhere = std::ptr::null_mut();
            rustix::mm::mmap(nowhere, bytes, ProtFlags::READ, MapFlags::SHARED, file.as_fd(), 0)
        };
        Self(at.expect("a mapping"), bytes)
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: this object made the mapping.
        unsafe { rustix::mm::munmap(self.0, self.1) }.expect("it is a mapping");
    }
}

/// A successor attaches although the process has a tracer and another process has its memory mapped; a first attach
/// is refused then.
#[test]
fn successor_ignores_tracer_and_external_mapping() {
    let mut fixture = Fixture::new();
    let before = fixture.alone();
    let mut pager = fixture.start();
    pager.wait_for_budget().expect("within the budget");
    let (tracer, mapped) = (Tracer::of(fixture.pid()), Mapped::of(&fixture));
    pager.process.kill();
    let mut pager = fixture.start();
    let said = pager.process.output();
    let warned = said.matches("its memory stays managed, although a new attach would be refused: ");
    assert_eq!(warned.count(), 2, "{said}");
    fixture.works();
    pager.wait_for_budget().expect("within the budget");
    // The end of a detach needs ptrace, so it waits for the tracer to exit.
    pager.process.signal(libc::SIGTERM);
    let waits = |text: &Option<String>| text.as_ref().is_some_and(|why| why.contains("traces it: detach that first"));
    let state = pager.wait_until(|state| waits(&state.detach_problem)).expect("it waits");
    assert!(state.detaching, "{state:#?}");
    fixture.works();
    tracer.stop();
    let ended = pager.process.wait(TEST_TIMEOUT).expect("ends");
    assert!(ended.success(), "{}", pager.process.output());
    assert_eq!(fixture.alone(), before);
    // A first attach is still refused.
    let (code, said) = run_command(fixture.attach(&["--budget", BUDGET]).command());
    assert!(code == Some(2) && said.contains("is also mapped by process"), "{said}");
    drop(mapped);
    fixture.verify();
}

/// A successor with the packaged service's capabilities manages memory for which the process has no descriptor any
/// more. The service has neither CAP_SYS_ADMIN nor CAP_CHECKPOINT_RESTORE, so it opens memory by descriptors alone.
#[test]
fn successor_ignores_memory_without_descriptor() {
    let mut holder = Holder::start();
    let (folder, disk) = (temp_dir_on_tmpfs(), temp_dir_on_disk());
    let swap = disk.path().join("swap").display().to_string();
    let words = ["--swap-cache", &swap, "--swap-size", "128MiB"];
    let kept = "--bounding-set=-all,+sys_ptrace,+dac_override";
    let attach = holder.attach(folder.path(), &words).by(&["setpriv", kept]);
    let mut pager = attach.start().expect("it attaches");
    pager.wait_for_budget().expect("within the budget");
    holder.map_more();
    pager.process.kill();
    let mut pager = attach.start().expect("the successor attaches");
    let said = pager.process.output();
    assert!(said.contains("(more") && said.contains("cannot be opened"), "{said}");
    assert_eq!(holder.check(), NONE);
    pager.detach().expect("lets go");
    holder.stop();
}

#[test]
fn frozen_process_is_refused_at_once() {
    let group = ControlGroup::new("freezer");
    let mut fixture = Fixture::new();
    let before = fixture.alone();
    group.add(fixture.pid());
    fixture.verifier.process.signal(libc::SIGSTOP);
    group.freeze(true);
    let (code, said) = run_command(fixture.attach(&["--budget", BUDGET]).command());
    let wanted = format!("is frozen by the control group {}: thaw it", group.folder().display());
    assert!(code == Some(2) && said.contains(&wanted), "{said}");
    group.freeze(false);
    fixture.verifier.process.signal(libc::SIGCONT);
    assert_eq!(fixture.alone(), before);
    fixture.works();
    fixture.verify();
}

#[test]
fn frozen_process_detaches_after_thaw() {
    let group = ControlGroup::new("freezer");
    let mut fixture = Fixture::new();
    let before = fixture.alone();
    group.add(fixture.pid());
    let mut pager = fixture.start();
    pager.wait_for_budget().expect("within the budget");
    group.freeze(true);
    let is_frozen =
        |text: &Option<String>| text.as_ref().is_some_and(|why| why.contains("is frozen by the control group"));
    pager.process.signal(libc::SIGTERM);
    pager.wait_until(|state| is_frozen(&state.detach_problem)).expect("it waits");
    // The waiting detach can be cancelled, too.
    let (code, said) = fixture.ask("detach --cancel");
    assert!(code == Some(0) && said.contains("is still managed: cancelled"), "{said}");
    let refused = pager.process.wait_for("not detached, and the memory is still managed: cancelled", TEST_TIMEOUT);
    refused.expect("it is logged");
    pager.wait_for_budget().expect("within the budget");
    pager.process.signal(libc::SIGTERM);
    pager.wait_until(|state| is_frozen(&state.detach_problem)).expect("it waits");
    group.freeze(false);
    let ended = pager.process.wait(TEST_TIMEOUT).expect("ends");
    assert!(ended.success(), "{}", pager.process.output());
    assert_eq!(fixture.alone(), before, "{}", pager.process.output());
    fixture.works();
    fixture.verify();
}

/// The command does not take the pager's end for a completed detach.
#[test]
fn detach_reports_killed_pager() {
    let mut fixture = Fixture::new();
    // Dropped first, since a frozen process cannot be killed.
    let group = ControlGroup::new("freezer");
    group.add(fixture.pid());
    let mut pager = fixture.start();
    pager.wait_for_budget().expect("within the budget");
    group.freeze(true);
    let mut command = Command::new(larder_path());
    command.args(["memory", "detach", "--control"]).arg(fixture.path("control"));
    let mut detach = Process::start(command).expect("starts");
    detach.wait_for("is frozen by the control group", TEST_TIMEOUT).expect("waits");
    pager.process.kill();
    let ended = detach.wait(TEST_TIMEOUT).expect("ends");
    let said = detach.output();
    assert!(ended.code() == Some(2) && said.contains("its pager has ended, and the guest waits"), "{said}");
    group.freeze(false);
    let mut pager = fixture.start();
    fixture.works();
    let (code, said) = fixture.ask("detach");
    assert!(code == Some(0) && said.contains("is no longer managed"), "{said}");
    pager.process.wait(TEST_TIMEOUT).expect("ends");
    fixture.verify();
}

/// When memory runs out, the kernel kills the pager rather than the guest.
#[test]
fn pager_has_higher_oom_score() {
    let fixture = Fixture::new();
    let mut pager = fixture.start();
    let score = |pid: u32| -> i64 {
        let text = std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).expect("procfs");
        text.trim().parse().expect("a number")
    };
    let pid = pager.process.id();
    assert!(score(pid) > score(fixture.pid()), "{} and {}", score(pid), score(fixture.pid()));
    pager.detach().expect("lets go");
    fixture.verify();
}
