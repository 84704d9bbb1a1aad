//! Failures beneath a pager: their effect on the process, and the reports.

use std::collections::BTreeSet;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use larder_bench::campaign::memory::Attach;
use larder_bench::campaign::process::{Process, killed_with_parent};
use larder_vm::control::memory::MemoryProblem;
use tempfile::TempDir;

use crate::holder::{Holder, NONE, readable};
use crate::support::{TEST_TIMEOUT, larder_path, require_root, run_command, temp_dir_on_disk, temp_dir_on_tmpfs};
use crate::{Fixture, MIB};

/// A page whose copy on the disk is damaged gives a memory error when it is touched; all other pages are right.
#[test]
fn damaged_page_on_disk_is_poisoned() {
    let (folder, disk) = (temp_dir_on_tmpfs(), temp_dir_on_disk());
    let mut holder = Holder::start();
    let path = disk.path().join("swap");
    let swap = path.display().to_string();
    // Not encrypted, so that the test can find and damage pages.
    let words = ["--swap-cache", &swap, "--swap-size", "128MiB", "--encrypt", "off"];
    let mut pager = holder.attach(folder.path(), &words).start().expect("it attaches");
    let is_there = pager.wait_until(|state| state.used <= state.budget && state.disks[0].written_bytes >= 20 * MIB);
    is_there.expect("it goes to the disk");
    let file = std::fs::File::options().read(true).write(true).open(&path);
    let file = file.expect("the swap cache");
    let mut damaged = BTreeSet::new();
    for (page, at) in readable(&path) {
        if page.is_multiple_of(7) {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at + 2000).expect("a byte");
            file.write_all_at(&[byte[0] ^ 1], at + 2000).expect("a byte");
            damaged.insert(page);
        }
    }
    file.sync_all().expect("it is there");
    let lost = holder.check();
    // Pages that were in memory are right, since their copies do not count.
    assert!(lost.len() > 300, "{} of {} pages", lost.len(), damaged.len());
    assert!(lost.iter().all(|page| damaged.contains(page)), "{lost:?}");
    let state = pager.state().expect("answers");
    assert_eq!(state.lost_pages, lost.len() as u64);
    let each = " is lost, because its stored copy is damaged: a thread that touches it gets a memory error";
    // At least the first hundred are reported individually.
    let first = 100;
    let told = pager.process.wait_for_count(each, first, TEST_TIMEOUT);
    told.expect("each is told");
    let told = pager.process.output().matches(each).count();
    assert!((first..=lost.len()).contains(&told), "{told}");
    // The pages stay lost, for this pager and the next one.
    pager.process.kill();
    let mut pager = holder.attach(folder.path(), &words).start().expect("it takes the place");
    assert_eq!(holder.check(), lost);
    assert_eq!(pager.state().expect("answers").lost_pages, lost.len() as u64);
    assert_eq!(holder.touch(lost[0]).signal(), Some(libc::SIGBUS));
    assert!(pager.process.wait(TEST_TIMEOUT).expect("ends").success());
}

/// An NBD server on its own socket.
pub(crate) struct Server {
    process: Process,
    socket: PathBuf,
}

impl Server {
    /// Starts nbdkit with these arguments.
    pub(crate) fn start(folder: &TempDir, words: &[&str]) -> Self {
        let socket = folder.path().join("nbd");
        // A killed server leaves its socket.
        let _ = std::fs::remove_file(&socket);
        let mut command = killed_with_parent("nbdkit");
        command.args(["--foreground", "--unix"]).arg(&socket).args(words);
        let process = Process::start(command).expect("starts");
        let give_up = Instant::now() + TEST_TIMEOUT;
        while UnixStream::connect(&socket).is_err() {
            assert!(!process.has_ended() && Instant::now() < give_up, "{}", process.output());
            std::thread::yield_now();
        }
        Self { process, socket }
    }

    pub(crate) fn uri(&self) -> String {
        format!("nbd+unix:///?socket={}", self.socket.display())
    }
}

/// Returns nbdkit's arguments for a disk whose requests of this kind fail at this rate while the file `switch`
/// exists.
fn failing(kind: &str, rate: &str, switch: &Path) -> [String; 6] {
    [
        "--filter=error".to_owned(),
        "memory".to_owned(),
        "160M".to_owned(),
        format!("error-{kind}=EIO"),
        format!("error-{kind}-rate={rate}"),
        format!("error-{kind}-file={}", switch.display()),
    ]
}

fn limit(folder: &TempDir, words: &[&str]) {
    let mut command = Command::new(larder_path());
    command.args(["memory", "limit", "--control"]);
    command.arg(folder.path().join("control")).args(words);
    let (code, said) = run_command(command);
    assert_eq!(code, Some(0), "{said}");
}

fn status(folder: &TempDir) -> String {
    let mut command = Command::new(larder_path());
    command.args(["memory", "status", "--control"]);
    command.arg(folder.path().join("control"));
    let (code, said) = run_command(command);
    assert_eq!(code, Some(0), "{said}");
    said
}

#[test]
fn failed_reads_are_retried() {
    let folder = temp_dir_on_tmpfs();
    let mut holder = Holder::start();
    let switch = folder.path().join("fail");
    let server = Server::start(&folder, &failing("pread", "2%", &switch).each_ref().map(String::as_str));
    let uri = server.uri();
    let mut pager = holder.attach(folder.path(), &["--swap-cache", &uri]).start().expect("it attaches");
    pager.wait_for_budget().expect("within the budget");
    std::fs::write(&switch, "").expect("a file");
    for _ in 0..2 {
        assert_eq!(holder.check(), NONE);
    }
    let logged = pager.process.wait_for(": the read is retried", TEST_TIMEOUT);
    logged.expect("it is logged");
    std::fs::remove_file(&switch).expect("was there");
    assert_eq!(pager.state().expect("answers").lost_pages, 0);
    pager.detach().expect("lets go");
    assert_eq!(holder.check(), NONE);
    holder.stop();
}

/// Pages that the disk fails to read for good are lost and reported; all others are right.
#[test]
fn unreadable_pages_are_lost_and_reported() {
    let folder = temp_dir_on_tmpfs();
    let mut holder = Holder::start();
    let switch = folder.path().join("fail");
    let server = Server::start(&folder, &failing("pread", "90%", &switch).each_ref().map(String::as_str));
    let uri = server.uri();
    let mut pager =
        holder.attach(folder.path(), &["--swap-cache", &uri, "--prefetch", "off"]).start().expect("it attaches");
    // Almost all pages stay in memory, so that only a few have to be waited for.
    limit(&folder, &["--budget", "44MiB", "--compressed", "2MiB"]);
    pager.wait_for_budget().expect("within the budget");
    holder.check();
    let state = pager.wait_for_budget().expect("within the budget");
    assert_eq!(state.lost_pages, 0);
    // Prevents further evictions.
    limit(&folder, &["--budget", "128MiB", "--compressed", "2MiB"]);
    std::fs::write(&switch, "").expect("a file");
    let told = holder.begin_check();
    pager.wait_until(|state| state.lost_pages >= 3).expect("some are lost");
    std::fs::remove_file(&switch).expect("was there");
    let lost = holder.end_check(told);
    let state = pager.state().expect("answers");
    assert!(lost.len() >= 3 && state.lost_pages == lost.len() as u64, "{state:#?}");
    let told = pager.process.wait_for(" is lost, because it cannot be read from the disk", TEST_TIMEOUT);
    told.expect("it is told");
    let said = status(&folder);
    assert!(said.contains(&format!("{} pages\n", lost.len())), "{said}");
    pager.detach().expect("lets go");
    assert_eq!(holder.check(), lost);
    assert_eq!(holder.touch(lost[0]).signal(), Some(libc::SIGBUS));
}

/// A disk that fails writes loses no page and is reported, and the next pager tries it again.
#[test]
fn unwritable_disk_loses_nothing() {
    let folder = temp_dir_on_tmpfs();
    let mut holder = Holder::start();
    let switch = folder.path().join("fail");
    let server = Server::start(&folder, &failing("pwrite", "100%", &switch).each_ref().map(String::as_str));
    let uri = server.uri();
    let words = ["--budget", "128MiB", "--compressed", "2MiB", "--swap-cache", &uri];
    let attach = Attach::new(larder_path(), folder.path(), holder.pid(), &words);
    let mut pager = attach.start().expect("it attaches");
    std::fs::write(&switch, "").expect("a file");
    limit(&folder, &["--budget", "20MiB", "--compressed", "2MiB"]);
    pager.wait_until(|state| state.disks[0].failed).expect("it is given up");
    for text in ["nothing is lost; another segment is tried", "the disk is not written to any more"] {
        pager.process.wait_for(text, TEST_TIMEOUT).expect("it is told");
    }
    let is_told = pager.wait_until(|state| state.problem == Some(MemoryProblem::DiskFailed));
    is_told.expect("a problem");
    let said = status(&folder);
    assert!(said.contains(", cannot be written to") && said.contains("because their disk fails"), "{said}");
    assert_eq!(holder.check(), NONE);
    std::fs::remove_file(&switch).expect("was there");
    pager.process.kill();
    let attach = holder.attach(folder.path(), &["--swap-cache", &uri]);
    let mut pager = attach.start().expect("it takes the place");
    let state = pager.wait_for_budget().expect("within the budget");
    assert!(!state.disks[0].failed && state.lost_pages == 0, "{state:#?}");
    assert_eq!(holder.check(), NONE);
    pager.detach().expect("lets go");
    holder.stop();
}

/// A disk whose server is unreachable is reported and waited for, and no page is lost.
#[test]
fn unreachable_server_is_awaited() {
    let (folder, disk) = (temp_dir_on_tmpfs(), temp_dir_on_disk());
    let mut holder = Holder::start();
    let path = disk.path().join("export");
    let file = std::fs::File::create(&path).expect("a file");
    file.set_len(160 * MIB).expect("room");
    let words = ["file", path.to_str().expect("UTF-8")];
    let mut server = Server::start(&folder, &words);
    let uri = server.uri();
    let attach = holder.attach(folder.path(), &["--swap-cache", &uri]);
    let mut pager = attach.start().expect("it attaches");
    pager.wait_for_budget().expect("within the budget");
    server.process.kill();
    let told = holder.begin_check();
    let is_told = pager.wait_until(|state| state.disks[0].unreachable && state.stalled > 0);
    let state = is_told.expect("it is told");
    assert!(!state.disks[0].failed && state.lost_pages == 0, "{state:#?}");
    let said = status(&folder);
    assert!(said.contains(", cannot be reached: faults on its pages wait"), "{said}");
    let said = " cannot be reached: threads that need a page from it wait until it can";
    pager.process.wait_for(said, TEST_TIMEOUT).expect("it is logged");
    // Waits for as many failures as would disable a disk that answers with errors.
    let failed = "cannot reconnect";
    pager.process.wait_for(failed, TEST_TIMEOUT).expect("it is tried again");
    let before = state.time_ns;
    let waited = pager.wait_until(|state| state.time_ns > before + 10_000_000_000);
    let state = waited.expect("it waits on");
    assert!(!state.disks[0].failed && state.lost_pages == 0, "{state:#?}");
    let _server = Server::start(&folder, &words);
    assert_eq!(holder.end_check(told), NONE);
    let state = pager.wait_until(|state| !state.disks[0].unreachable).expect("it is back");
    assert_eq!(state.lost_pages, 0);
    pager.wait_for_budget().expect("within the budget");
    assert_eq!(holder.check(), NONE);
    pager.detach().expect("lets go");
    holder.stop();
}

/// A control group that limits memory; removed on drop.
struct Group {
    path: PathBuf,
    /// Names of the group's files with its usage and its limit.
    usage: &'static str,
    limit: &'static str,
}

impl Group {
    fn new() -> Self {
        require_root("to make a control group");
        let name = format!("larder-test-{}", std::process::id());
        let first = Path::new("/sys/fs/cgroup/memory");
        let (path, usage, limit, swap) = match first.is_dir() {
            true => (first.join(name), "memory.usage_in_bytes", "memory.limit_in_bytes", "memory.swappiness"),
            false => {
                let root = Path::new("/sys/fs/cgroup");
                std::fs::write(root.join("cgroup.subtree_control"), "+memory").expect("the memory controller");
                (root.join(name), "memory.current", "memory.max", "memory.swap.max")
            }
        };
        std::fs::create_dir(&path).expect("a control group of the memory controller");
        // The host may have swap, which the group must not use.
        if path.join(swap).exists() {
            std::fs::write(path.join(swap), "0").expect("no swap for it");
        }
        Self { path, usage, limit }
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        // A process that was just killed may still be in the group.
        for _ in 0..100 {
            if std::fs::remove_dir(&self.path).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
    }
}

#[test]
fn oom_killed_pager_loses_nothing() {
    let group = Group::new();
    let mut fixture = Fixture::with("compressible");
    let into = format!("echo $$ >{}/cgroup.procs && exec \"$@\"", group.path.display());
    let mut pager = fixture.attach(&["--budget", "1GiB"]).by(&["sh", "-c", &into, "sh"]).start().expect("it attaches");
    let usage = std::fs::read_to_string(group.path.join(group.usage)).expect("its use");
    let usage: u64 = usage.trim().parse().expect("a number");
    std::fs::write(group.path.join(group.limit), (usage + 3 * MIB).to_string()).expect("a limit");
    // The pager may be killed before it answers.
    let _ = fixture.ask("limit --budget 20MiB");
    let ended = pager.process.wait(TEST_TIMEOUT).expect("it is killed");
    assert_eq!(ended.signal(), Some(libc::SIGKILL), "{}", pager.process.output());
    let mut pager = fixture.start();
    fixture.works();
    let state = pager.wait_for_budget().expect("within the budget");
    assert!(state.lost_pages == 0 && state.compressed.pages > 0, "{state:#?}");
    pager.detach().expect("lets go");
    fixture.verify();
}
