//! `larder memory attach --vm`, which manages the memory of a VM's QEMUs, one after the other, as the VM's file
//! configures; and `--wait`.

use std::path::PathBuf;
use std::process::Command;
use std::time::Instant;

use larder_bench::campaign::memory::{ATTACHED_TEXT, Verifier};
use larder_bench::campaign::process::{Process, killed_with_parent};
use larder_vm::control::memory::MemoryState;
use larder_vm::control::{cancel_detach, fetch_memory};
use larder_vm::vm::find::memory_control_path;
use tempfile::TempDir;

use crate::control_group::ControlGroup;
use crate::support::{TEST_TIMEOUT, larder_path, run_command, temp_dir_on_disk, temp_dir_on_tmpfs};
use crate::{Alone, MIB, verifier_command};

/// A VM with a unique name, and with a program in place of its QEMU.
struct Vm {
    name: String,
    folder: TempDir,
}

const FILE: &str = "[memory]\nbudget = \"32MiB\"\npid-file = \"qemu.pid\"\n";

impl Vm {
    fn new(name: &str) -> Self {
        let vm = Self { name: format!("test-{name}-{}", std::process::id()), folder: temp_dir_on_tmpfs() };
        vm.write(FILE);
        vm
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join(format!("{}.toml", self.name))
    }

    fn write(&self, text: &str) {
        std::fs::write(self.file(), text).expect("writes the file");
    }

    /// Starts the program that stands for QEMU, with its pid file.
    fn boot(&self) -> Verifier {
        let verifier = Verifier::start(verifier_command("mixed")).expect("a program to manage");
        let written = self.folder.path().join("qemu.pid.new");
        std::fs::write(&written, format!("{}\n", verifier.pid())).expect("writes");
        std::fs::rename(written, self.folder.path().join("qemu.pid")).expect("renames");
        verifier
    }

    fn command(&self) -> Command {
        let mut command = killed_with_parent("env");
        command.arg(larder_path()).args(["memory", "attach", "--vm"]).arg(self.file());
        command
    }

    fn serve(&self) -> Process {
        Process::start(self.command()).expect("starts")
    }

    fn state(&self) -> Option<MemoryState> {
        Some(fetch_memory(&memory_control_path(&self.name)).ok()?.1)
    }

    /// Waits until the state of the memory satisfies `is_so`.
    fn wait_until(&self, service: &Process, is_so: impl Fn(&MemoryState) -> bool) -> MemoryState {
        let give_up = Instant::now() + TEST_TIMEOUT;
        loop {
            match self.state() {
                Some(state) if is_so(&state) => return state,
                state => assert!(Instant::now() < give_up, "{state:#?}: {}", service.output()),
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }

    fn wait_for_budget(&self, service: &Process, verifier: &Verifier) -> MemoryState {
        self.wait_until(service, |state| {
            state.pid as u32 == verifier.pid() && state.used <= state.budget + state.budget / 16
        })
    }

    /// Runs `larder memory` with these arguments and the VM's name.
    fn ask(&self, words: &str) -> (Option<i32>, String) {
        let mut command = Command::new(larder_path());
        command.arg("memory").args(words.split(' ')).arg(&self.name);
        run_command(command)
    }
}

fn ends(mut service: Process) {
    service.signal(libc::SIGTERM);
    let ended = service.wait(TEST_TIMEOUT).expect("ends");
    assert!(ended.success(), "{}", service.output());
}

/// The service manages one QEMU after the other, also after kills of a QEMU and of the service.
#[test]
fn service_manages_successive_qemus_through_kills() {
    let vm = Vm::new("lives");
    let service = vm.serve();
    let (code, said) = vm.ask("status");
    let wanted = format!("the memory of {} is not managed: no process listens on ", vm.name);
    assert!(code == Some(2) && said.contains(&wanted), "{said}");

    let mut first = vm.boot();
    let state = vm.wait_for_budget(&service, &first);
    assert_eq!(state.budget, 32 * MIB);
    first.works().expect("it works");
    let (code, said) = vm.ask("status");
    assert!(code == Some(0) && said.contains("budget:           32 MiB, used "), "{said}");
    // A second service changes nothing.
    let second_service = vm.serve();
    second_service.wait_for("is already managed by another larder", TEST_TIMEOUT).expect("is refused");
    ends(second_service);
    first.works().expect("it works");
    first.stop().expect("all is as it was written");

    let mut second = vm.boot();
    vm.wait_for_budget(&service, &second);
    second.works().expect("it works");
    let mut service = service;
    service.kill();
    // The guest is stalled by now, and its next pager takes over at once.
    let service = vm.serve();
    service.wait_for("in place of another pager", TEST_TIMEOUT).expect("attaches");
    second.works().expect("it works");
    vm.wait_for_budget(&service, &second);
    let before_end = Alone::of(second.pid()).watched;
    assert!(before_end > 0);
    ends(service);
    assert_eq!(Alone::of(second.pid()).watched, 0);
    assert!(!memory_control_path(&vm.name).exists(), "the control socket is left");
    second.stop().expect("all is as it was written");
}

/// A reload applies a changed budget, and reports settings that need a restart.
#[test]
fn reload_applies_budget_and_reports_rest() {
    let vm = Vm::new("reload");
    let (service, mut verifier) = (vm.serve(), vm.boot());
    vm.wait_for_budget(&service, &verifier);
    vm.write(&FILE.replace("32MiB", "40MiB\"\ncompressed = \"9MiB\"\nquarantine-ms = 3\nprefetch = \"off"));
    service.signal(libc::SIGHUP);
    let state = vm.wait_until(&service, |state| state.budget == 40 * MIB);
    assert_eq!(state.compressed.limit, 9 * MIB);
    for left in ["quarantine-ms: takes effect when", "prefetch: takes effect when"] {
        service.wait_for(left, TEST_TIMEOUT).expect("is told");
    }
    // An invalid file changes nothing, and neither does an impossible setting.
    for (wrong, why) in [
        ("budget = \"1MiB", ": memory: a budget of 1 MiB is too small"),
        ("budget = \"16MiB", "a budget of 16 MiB is too small: memory of 64 MiB needs at least 17 MiB"),
        ("bugdet = \"40MiB", "unknown key 'bugdet' (did you mean 'budget'?)"),
    ] {
        let told = service.lines();
        vm.write(&FILE.replace("budget = \"32MiB", wrong));
        service.signal(libc::SIGHUP);
        let said = service.wait_for_after(told, "nothing has changed: ", TEST_TIMEOUT).expect("is told");
        assert!(said.contains(why), "{said}");
    }
    assert_eq!(vm.state().expect("answers").budget, 40 * MIB);
    // A reload also reverts changes that were made by other means.
    let (code, said) = vm.ask("limit --budget 36MiB");
    assert!(code == Some(0) && said.starts_with("budget 36 MiB, "), "{said}");
    vm.write(FILE);
    service.signal(libc::SIGHUP);
    let state = vm.wait_until(&service, |state| state.budget == 32 * MIB);
    assert_eq!(state.compressed.limit, 16 * MIB);
    verifier.works().expect("it works");
    ends(service);
    verifier.stop().expect("all is as it was written");
}

/// After a detach by command, the service leaves the process alone until a reload.
#[test]
fn detached_process_is_left_alone() {
    let vm = Vm::new("let-go");
    let (service, mut verifier) = (vm.serve(), vm.boot());
    vm.wait_for_budget(&service, &verifier);
    let (code, said) = vm.ask("detach");
    let alone = format!("process {} is no longer managed", verifier.pid());
    assert_eq!((code, said.trim_end()), (Some(0), alone.as_str()));
    verifier.works().expect("it works");
    // Leaves the service time for another check: its inaction cannot be waited for.
    std::thread::sleep(std::time::Duration::from_secs(1));
    assert_eq!((Alone::of(verifier.pid()).watched, vm.state().is_none()), (0, true));
    service.signal(libc::SIGHUP);
    vm.wait_for_budget(&service, &verifier);
    verifier.works().expect("it works");
    ends(service);
    verifier.stop().expect("all is as it was written");
}

/// The service stops even though a detach by `larder memory detach` is in progress when it gets the signal, and is
/// cancelled then.
#[test]
fn stop_outlives_cancelled_detach_of_another() {
    let vm = Vm::new("outlives");
    let (service, verifier) = (vm.serve(), vm.boot());
    // Dropped first, since a frozen process cannot be killed.
    let group = ControlGroup::new("freezer");
    vm.wait_for_budget(&service, &verifier);
    group.add(verifier.pid());
    group.freeze(true);
    let mut command = Command::new(larder_path());
    command.args(["memory", "detach", &vm.name]);
    let _detach = Process::start(command).expect("starts");
    vm.wait_until(&service, |state| state.detach_problem.is_some());
    service.signal(libc::SIGTERM);
    service.wait_for("detaching: all pages are being paged in", TEST_TIMEOUT).expect("begins");
    // By the time this is answered, the service's own detach has been refused.
    let (code, said) = vm.ask("status");
    assert_eq!(code, Some(0), "{said}");
    cancel_detach(&memory_control_path(&vm.name)).expect("answers");
    service.wait_for("the detach was stopped: cancelled", TEST_TIMEOUT).expect("is logged");
    group.freeze(false);
    let mut service = service;
    let ended = service.wait(TEST_TIMEOUT).expect("ends");
    assert!(ended.success(), "{}", service.output());
    assert_eq!(Alone::of(verifier.pid()).watched, 0);
    verifier.stop().expect("all is as it was written");
}

/// A successor uses the swap cache that has the pages, even if the VM's file names another one by now.
#[test]
fn successor_uses_swap_cache_of_pages() {
    let (vm, disk) = (Vm::new("swap"), temp_dir_on_disk());
    let swap = |name: &str| {
        let path = disk.path().join(name).display().to_string();
        format!("{FILE}compressed = \"2MiB\"\nswap-cache = \"{path}\"\nswap-size = \"128MiB\"\n")
    };
    vm.write(&swap("one"));
    let (mut service, mut verifier) = (vm.serve(), vm.boot());
    vm.wait_until(&service, |state| state.disks.iter().any(|disk| disk.pages > 0));
    vm.write(&swap("two"));
    let told = service.lines();
    service.signal(libc::SIGHUP);
    let left = service.wait_for_after(told, "swap-cache: takes", TEST_TIMEOUT).expect("is told");
    assert!(left.contains("when this service is restarted"), "{left}");
    service.kill();
    let service = vm.serve();
    service.wait_for("in place of another pager", TEST_TIMEOUT).expect("attaches");
    verifier.works().expect("it works");
    let state = vm.state().expect("answers");
    assert!(state.disks.iter().all(|disk| disk.name.ends_with("/one")), "{state:#?}");
    verifier.stop().expect("all is as it was written");
    let next = vm.boot();
    let state = vm.wait_until(&service, |state| state.pid as u32 == next.pid());
    assert!(state.disks.iter().all(|disk| disk.name.ends_with("/two")), "{state:#?}");
    ends(service);
    next.stop().expect("all is as it was written");
    assert_eq!(std::fs::read_dir(disk.path()).expect("a folder").count(), 0, "files are left");
}

/// A guest that waits for its memory gets a successor even if the VM's file has impossible settings by now.
#[test]
fn stalled_guest_tolerates_impossible_config() {
    let vm = Vm::new("hasty");
    let (mut service, mut verifier) = (vm.serve(), vm.boot());
    vm.wait_for_budget(&service, &verifier);
    service.kill();
    vm.write(&FILE.replace("32MiB", "16MiB\"\nswap-size = \"64MiB\"\nswap-cache = \"/nosuch/swap"));
    let service = vm.serve();
    service.wait_for("in place of another pager", TEST_TIMEOUT).expect("attaches");
    for told in ["a budget of 16 MiB is too small: memory of 64 MiB needs at least 17 MiB", "/nosuch/swap"] {
        assert!(service.output().contains(told), "{told}: {}", service.output());
    }
    verifier.report().expect("nothing is wrong");
    vm.write(FILE);
    service.signal(libc::SIGHUP);
    vm.wait_until(&service, |state| state.budget == 32 * MIB);
    verifier.works().expect("it works");
    ends(service);
    verifier.stop().expect("all is as it was written");
}

/// The service waits for a new QEMU while the pid file names a process that has exited.
#[test]
fn stale_pid_file_is_waited_past() {
    let vm = Vm::new("stale");
    let gone = vm.boot();
    gone.stop().expect("all is as it was written");
    let service = vm.serve();
    let next = vm.boot();
    vm.wait_for_budget(&service, &next);
    ends(service);
    next.stop().expect("all is as it was written");
}

/// A pid file that another user can write is refused, since that user could name any process of the host.
#[test]
fn other_users_pid_file_is_refused() {
    const OTHER: u32 = 12345;
    let vm = Vm::new("foreign");
    let qemu = vm.boot();
    let path = vm.folder.path().join("qemu.pid");
    let of = |user| std::os::unix::fs::chown(&path, Some(user), None).expect("root may");
    of(OTHER);
    let service = vm.serve();
    let why = format!("user {OTHER} can replace it");
    service.wait_for(&why, TEST_TIMEOUT).expect("it says why");
    assert!(vm.state().is_none(), "it is not managed");
    of(0);
    vm.wait_for_budget(&service, &qemu);
    ends(service);
    qemu.stop().expect("all is as it was written");
}

/// The timestamps of the pid file do not matter: after the clock was set, a process is attached to, and its killed
/// pager has a successor.
#[test]
fn pid_file_timestamps_are_ignored() {
    let vm = Vm::new("clock");
    let mut qemu = vm.boot();
    let path = vm.folder.path().join("qemu.pid");
    let file = std::fs::File::options().write(true).open(path).expect("opens");
    let year = std::time::Duration::from_secs(365 * 86400);
    let now = std::time::SystemTime::now();
    for time in [now - year, now + year] {
        file.set_modified(time).expect("it is ours");
        let mut service = vm.serve();
        vm.wait_for_budget(&service, &qemu);
        service.kill();
        qemu_goes_on(&vm, &mut qemu);
    }
    qemu.stop().expect("all is as it was written");
}

/// Checks that a successor of the killed pager manages QEMU.
fn qemu_goes_on(vm: &Vm, qemu: &mut Verifier) {
    let service = vm.serve();
    vm.wait_for_budget(&service, qemu);
    qemu.works().expect("it works");
    ends(service);
}

#[test]
fn attach_waits_for_starting_qemu() {
    let folder = temp_dir_on_tmpfs();
    let (qmp, control) = (folder.path().join("qmp"), folder.path().join("control"));
    let mut command = killed_with_parent("env");
    command.arg(larder_path()).args(["memory", "attach", "--wait", "--budget", "64MiB", "--qmp"]);
    command.arg(&qmp).arg("--control").arg(&control);
    let mut pager = Process::start(command).expect("starts");
    let mut qemu = killed_with_parent("qemu-system-x86_64");
    qemu.args("-accel tcg -m 128 -nodefaults -display none -S -qmp".split(' '));
    qemu.arg(format!("unix:{},server=on,wait=off", qmp.display()));
    qemu.args(["-object", "memory-backend-memfd,id=m,size=128M,share=on,prealloc=on"]);
    qemu.args(["-machine", "q35,memory-backend=m"]);
    let mut qemu = Process::start(qemu).expect("starts");
    pager.wait_for(ATTACHED_TEXT, TEST_TIMEOUT).expect("attaches");
    assert_eq!(fetch_memory(&control).expect("answers").1.pid as u32, qemu.id());
    assert!(!pager.output().contains("ERROR"), "{}", pager.output());
    qemu.kill();
    let ended = pager.wait(TEST_TIMEOUT).expect("ends");
    assert!(ended.success() && pager.output().contains("the process has ended"), "{}", pager.output());
    assert!(!control.exists(), "the control socket is left");
}

/// While `attach --wait` waits, it reports why the process cannot be managed yet.
#[test]
fn waiting_attach_reports_unmanageable_process() {
    let mut cat = Process::start(Command::new("cat")).expect("starts");
    let mut command = killed_with_parent("env");
    command.arg(larder_path()).args(["memory", "attach", "--wait", "--budget", "64MiB", "--pid"]);
    command.arg(cat.id().to_string());
    let mut pager = Process::start(command).expect("starts");
    pager.wait_for("its memory cannot be managed", TEST_TIMEOUT).expect("is told");
    pager.wait_for("is this the process that runs the VM? (Larder will try again)", TEST_TIMEOUT).expect("is told");
    cat.kill();
    assert!(pager.wait(TEST_TIMEOUT).expect("ends").success(), "{}", pager.output());
}
