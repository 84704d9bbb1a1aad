//! Detaches that lack room, and detaches that are cancelled.

use std::fs::File;
use std::io::Write as _;
use std::path::Path;
use std::process::Command;

use larder_bench::campaign::memory::Pager;
use larder_bench::campaign::process::Process;
use tempfile::TempDir;

use crate::control_group::ControlGroup;
use crate::failures::Server;
use crate::holder::{Holder, NONE};
use crate::support::{
    TEST_TIMEOUT, larder_path, require_root, run_command, run_tool, temp_dir_on_disk, temp_dir_on_tmpfs,
};
use crate::{BUDGET, Fixture, MIB};

/// A program whose pages are on a slow disk, so that a detach takes many seconds.
struct Slow {
    holder: Holder,
    pager: Pager,
    folder: TempDir,
    server: Server,
}

impl Slow {
    fn start(group: Option<&ControlGroup>, before: &[&str]) -> Self {
        let (holder, folder) = (Holder::start_in(group), temp_dir_on_tmpfs());
        let words = ["--filter=delay", "memory", "160M", "rdelay=20ms"];
        let server = Server::start(&folder, &words);
        let attach = holder.attach(folder.path(), &["--swap-cache", &server.uri()]);
        let pager = attach.by(before).start().expect("it attaches");
        let is_there = pager.wait_until(|state| state.used <= state.budget && state.disks[0].pages > 5000);
        is_there.expect("it goes to the disk");
        Self { holder, pager, folder, server }
    }

    fn command(&self, words: &[&str]) -> Command {
        let mut command = Command::new(larder_path());
        command.args(["memory", "detach"]).args(words).arg("--control");
        command.arg(self.folder.path().join("control"));
        command
    }

    /// Starts `larder memory detach`, and waits until it is in progress.
    fn begin_detach(&self) -> Process {
        let detach = Process::start(self.command(&[])).expect("starts");
        self.is_detaching();
        detach
    }

    fn is_detaching(&self) {
        let is_so = self.pager.wait_until(|state| state.detaching);
        is_so.expect("it is being detached from");
    }

    fn is_managed(&self) {
        let state = self.pager.wait_until(|state| !state.detaching && state.used <= state.budget);
        state.expect("it is within its budget again");
    }
}

/// A detach is refused if a VM's control group has less room than its pages need: the kernel would kill the VM.
#[test]
fn detach_beyond_group_limit_is_refused() {
    let group = ControlGroup::new("memory");
    let mut fixture = Fixture::in_group("mixed", &group);
    let before = fixture.alone();
    let mut pager = fixture.start();
    pager.wait_for_budget().expect("within the budget");
    group.limit(Some(group.used() + 16 * MIB));
    let (code, said) = fixture.ask("detach");
    let place = format!("the process's control group {} (memory.", group.folder().display());
    assert!(code == Some(2) && said.contains(&place) && said.contains("nothing was changed"), "{code:?} {said}");
    fixture.works();
    // A detach by a signal is refused, too.
    pager.process.signal(libc::SIGTERM);
    let refused = pager.process.wait_for("not detached, and the memory is still managed: ", TEST_TIMEOUT);
    assert!(refused.expect("is refused").contains(&place));
    fixture.works();
    group.limit(None);
    pager.detach().expect("lets go");
    assert_eq!(fixture.alone(), before);
    fixture.verify();
}

/// A detach stops before the kernel kills the VM, and the memory is kept within its budget again.
#[test]
fn detach_stops_when_room_runs_out() {
    let group = ControlGroup::new("memory");
    let mut slow = Slow::start(Some(&group), &[]);
    let mut detach = slow.begin_detach();
    group.limit(Some(group.used() + 4 * MIB));
    // An answer within two seconds is an error, a later one is a negative result.
    let code = detach.wait(TEST_TIMEOUT).expect("ends").code();
    assert!(matches!(code, Some(1 | 2)), "{code:?}");
    let said = detach.output();
    let wanted = "stopped, and its memory is limited to the budget again";
    assert!(said.contains(wanted) && said.contains("control group"), "{said}");
    slow.is_managed();
    let (_, status) = run_command({
        let mut command = Command::new(larder_path());
        command.args(["memory", "status", "--control"]);
        command.arg(slow.folder.path().join("control"));
        command
    });
    assert!(status.contains("detach:") && status.contains("control group"), "{status}");
    group.limit(None);
    assert_eq!(slow.holder.check(), NONE);
    slow.holder.stop();
}

/// A detach can be cancelled at any time: by SIGINT to the command, and by another command if a signal began it.
#[test]
fn signal_or_command_cancels_detach() {
    let mut slow = Slow::start(None, &[]);
    let mut detach = slow.begin_detach();
    detach.signal(libc::SIGINT);
    assert_eq!(detach.wait(TEST_TIMEOUT).expect("ends").code(), Some(1));
    let said = detach.output();
    assert!(said.contains("is still managed: cancelled"), "{said}");
    slow.is_managed();
    slow.pager.process.signal(libc::SIGTERM);
    slow.is_detaching();
    let (code, said) = run_command(slow.command(&["--cancel"]));
    assert!(code == Some(0) && said.contains("is still managed: cancelled"), "{said}");
    slow.is_managed();
    let (code, said) = run_command(slow.command(&["--cancel"]));
    assert!(code == Some(2) && said.contains("no detach is running"), "{said}");
    assert_eq!(slow.holder.check(), NONE);
    drop(slow.server);
    slow.holder.stop();
}

/// Returns the arguments that start a process with a fake /proc/meminfo, with these sizes in MiB, and with `run` as
/// /run.
fn host_of(folder: &Path, total: u64, available: u64, run: &Path) -> Vec<String> {
    require_root("to have the pager see another /proc/meminfo");
    let meminfo = folder.join("meminfo");
    let text = format!("MemTotal: {} kB\nMemAvailable: {} kB\n", total << 10, available << 10);
    std::fs::write(&meminfo, text).expect("writes");
    let (meminfo, run) = (meminfo.display(), run.display());
    let bind = format!("mount --bind {meminfo} /proc/meminfo && mount --bind {run} /run && exec \"$@\"");
    ["unshare", "--mount", "sh", "-c", &bind, "sh"].map(str::to_owned).to_vec()
}

/// Two concurrent detaches do not count the same free memory; the claim of a killed pager ends.
#[test]
fn concurrent_detaches_share_free_memory() {
    let shared = temp_dir_on_tmpfs();
    let host = host_of(shared.path(), 1024, 52, shared.path());
    let host: Vec<&str> = host.iter().map(String::as_str).collect();
    let mut fixture = Fixture::new();
    let mut pager = fixture.attach(&["--budget", BUDGET]).by(&host).start().expect("it attaches");
    pager.wait_for_budget().expect("within the budget");
    let mut slow = Slow::start(None, &host);
    slow.pager.process.signal(libc::SIGTERM);
    slow.is_detaching();
    let (code, said) = fixture.ask("detach");
    assert!(code == Some(2) && said.contains("are claimed by other detaches in progress"), "{code:?} {said}");
    fixture.works();
    slow.pager.process.kill();
    pager.detach().expect("lets go");
    fixture.verify();
    let attach = slow.holder.attach(slow.folder.path(), &["--swap-cache", &slow.server.uri()]);
    let _pager = attach.start().expect("it takes the place");
    slow.holder.stop();
}

/// A tmpfs with these mount options, for the time of a test.
struct Tmpfs(TempDir);

impl Tmpfs {
    fn mount(options: &str) -> Self {
        require_root("to mount a tmpfs");
        let folder = temp_dir_on_disk();
        let at = folder.path().display().to_string();
        run_tool("mount", &["-t", "tmpfs", "-o", options, "tmpfs", &at]);
        Self(folder)
    }

    fn path(&self) -> &Path {
        self.0.path()
    }
}

impl Drop for Tmpfs {
    fn drop(&mut self) {
        // Its processes may be about to exit.
        let at = self.path().display().to_string();
        let _ = Command::new("umount").args(["--lazy", &at]).status();
    }
}

/// When a tmpfs is full, a detach is refused with one log line; no process is killed, and a fault is resolved because
/// other pages of the process make room.
#[test]
fn full_tmpfs_refuses_detach_logging_once() {
    let (folder, disk) = (temp_dir_on_tmpfs(), temp_dir_on_disk());
    let tmpfs = Tmpfs::mount("size=64M");
    let mut holder = Holder::start_at(&tmpfs.path().join("ram"));
    let swap = disk.path().join("swap").display().to_string();
    let words = ["--swap-cache", &swap, "--swap-size", "128MiB"];
    let mut pager = holder.attach(folder.path(), &words).start().expect("it attaches");
    let is_there = pager.wait_until(|state| state.used <= state.budget && state.disks[0].pages > 5000);
    is_there.expect("it goes to the disk");
    let filler = tmpfs.path().join("filler");
    let mut filling = File::create(&filler).expect("a file");
    while filling.write_all(&[1; 4096]).is_ok() {}
    pager.process.signal(libc::SIGTERM);
    let refused =
        pager.process.wait_for("not detached, and the memory is still managed: ", TEST_TIMEOUT).expect("is refused");
    let place = format!("the tmpfs {} that contains its memory's file", tmpfs.path().display());
    assert!(refused.contains(&place), "{refused}");
    assert_eq!(holder.check(), NONE);
    std::fs::remove_file(&filler).expect("was there");
    drop(filling);
    let said = pager.process.output();
    assert_eq!(said.matches("there is no free memory for a page").count(), 1, "{said}");
    pager.detach().expect("lets go");
    assert_eq!(holder.check(), NONE);
    holder.stop();
}

/// Huge pages of other files do not matter for a VM whose memory has none.
#[test]
fn attach_ignores_foreign_huge_pages() {
    let mut fixture = Fixture::new();
    let meminfo = std::fs::read_to_string("/proc/meminfo").expect("procfs");
    let lines = meminfo.lines().map(|line| match line.starts_with("ShmemHugePages") {
        true => "ShmemHugePages:     4096 kB\n".to_owned(),
        false => format!("{line}\n"),
    });
    require_root("to have the pager see another /proc/meminfo");
    let path = fixture.path("meminfo");
    std::fs::write(&path, lines.collect::<String>()).expect("writes");
    let bind = format!("mount --bind {} /proc/meminfo && exec \"$@\"", path.display());
    let words = ["unshare", "--mount", "sh", "-c", &bind, "sh"];
    let mut pager = fixture.attach(&["--budget", BUDGET]).by(&words).start().expect("it attaches");
    fixture.works();
    pager.detach().expect("lets go");
    fixture.verify();
}

/// Memory in a tmpfs that allows huge pages, or that has some from before, is refused.
#[test]
fn attach_refuses_memory_in_huge_pages() {
    let (folder, tmpfs) = (temp_dir_on_tmpfs(), Tmpfs::mount("size=64M,huge=always"));
    let holder = Holder::start_at(&tmpfs.path().join("ram"));
    let refusal = || {
        let (code, said) = run_command(holder.attach(folder.path(), &[]).command());
        assert_eq!(code, Some(2), "{said}");
        said
    };
    let (said, at) = (refusal(), tmpfs.path().display().to_string());
    assert!(said.contains(&format!("its tmpfs {at} is mounted with huge=always")), "{said}");
    run_tool("mount", &["-o", "remount,huge=never", &at]);
    let said = refusal();
    assert!(said.contains("are in huge pages, of which no part can be removed safely"), "{said}");
    holder.stop();
}
