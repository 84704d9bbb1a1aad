//! Unflushed changes of a killed server: which server finds them, which is refused, and what the image commands
//! report.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use larder_bench::campaign::process::Process;
use tempfile::TempDir;

use crate::bad_input::Bytes;
use crate::served::{Health, await_release, health, qemu_io, text};
use crate::support::{
    LoopDevice, TEST_TIMEOUT, larder_path, require_root, run_command, run_tool, start_io_without_flush,
    temp_dir_on_disk, temp_dir_on_tmpfs, wait_until,
};

const AUTOCLEAR: u64 = 88;
const NOBODY: u32 = 65534;

/// User that serves an image, with a directory for journals, and with a file in place of the boot ID, as in a
/// container.
#[derive(Clone, Copy, Default)]
struct Who<'a> {
    user: Option<u32>,
    runtime: Option<&'a Path>,
    boot_id: Option<&'a Path>,
}

impl Who<'_> {
    fn command(self, arguments: &[&str]) -> Command {
        let mut command = match (self.user, self.boot_id) {
            (None, None) => Command::new(larder_path()),
            (None, Some(id)) => {
                require_root("to mount");
                let mut command = Command::new("unshare");
                let mounts = "mount --bind -- \"$0\" /proc/sys/kernel/random/boot_id && exec \"$@\"";
                command.args(["--mount", "sh", "-c", mounts, text(id), text(larder_path())]);
                command
            }
            (Some(user), _) => {
                require_root("to be another user");
                let mut command = Command::new("setpriv");
                let user = user.to_string();
                command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]);
                command.arg(larder_path());
                command
            }
        };
        command.args(arguments);
        match self.runtime {
            Some(folder) => command.env("XDG_RUNTIME_DIR", folder),
            None => command.env_remove("XDG_RUNTIME_DIR"),
        };
        command
    }

    fn serve(self, image: &Path) -> Server {
        let folder = temp_dir_on_tmpfs();
        fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).expect("a folder for all");
        let uri = format!("nbd+unix:///?socket={}/socket", folder.path().display());
        let process = Process::start(self.command(&["disk", "serve", text(image), "--nbd", &uri])).expect("starts");
        Server { process, uri, _folder: folder }
    }

    /// Asserts that the server fails; returns its output.
    fn is_refused(self, image: &Path) -> String {
        let before = fs::read(image).expect("reads");
        let mut server = self.serve(image);
        assert!(server.process.wait_for("serving", TEST_TIMEOUT).is_err(), "it is served");
        let status = server.process.wait(TEST_TIMEOUT).expect("ends");
        let said = server.process.output();
        assert_eq!(status.code(), Some(2), "{said}");
        assert!(fs::read(image).expect("reads") == before, "the image has changed: {said}");
        said
    }
}

struct Server {
    process: Process,
    uri: String,
    _folder: TempDir,
}

impl Server {
    fn serving(self) -> Self {
        if let Err(error) = self.process.wait_for("serving", TEST_TIMEOUT) {
            panic!("{error:#}");
        }
        self
    }

    fn io(&self, commands: &[&str]) {
        let (success, said) = qemu_io("raw", &self.uri, commands);
        assert!(success, "{said}\n{}", self.process.output());
    }

    fn stop(mut self) -> String {
        self.process.signal(libc::SIGTERM);
        let status = self.process.wait(TEST_TIMEOUT).expect("ends");
        let said = self.process.output();
        assert_eq!(status.code(), Some(0), "{said}");
        said
    }
}

/// Creates an image that all users may write, with one flushed cluster.
fn image(folder: &TempDir) -> PathBuf {
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("a folder for all");
    let image = folder.path().join("image.qcow2");
    run_tool("qemu-img", &["create", "-f", "qcow2", text(&image), "64M"]);
    assert!(qemu_io("qcow2", text(&image), &["write -P 1 0 64k"]).0);
    fs::set_permissions(&image, Permissions::from_mode(0o666)).expect("an image for all");
    image
}

const WRITES: [&str; 2] = ["write -P 2 32k 64k", "write -P 3 20M 300k"];
const READS: [&str; 3] = ["read -P 1 0 32k", "read -P 2 32k 64k", "read -P 3 20M 300k"];
const LOST: [&str; 2] = ["read -P 1 0 32k", "read -P 0 20M 300k"];

fn kill_unflushed(who: Who<'_>, image: &Path) {
    write_and_kill(who.serve(image).serving(), image);
}

/// Writes without a flush, and kills the server.
fn write_and_kill(mut server: Server, image: &Path) {
    let client = start_io_without_flush(&server.uri, &WRITES);
    server.process.kill();
    drop(client);
    await_release(image);
}

fn is_all_there(server: Server, image: &Path) {
    let server = server.serving();
    server.io(&READS);
    server.stop();
    assert_eq!(Bytes::of(image).u64_at(AUTOCLEAR), 0);
    assert_eq!(health(image), Health::Clean);
    assert!(qemu_io("qcow2", text(image), &READS).0);
}

fn disk(arguments: &[&str], image: &Path) -> (Option<i32>, String) {
    let mut all = vec!["disk"];
    all.extend(arguments);
    all.push(text(image));
    run_command(Who::default().command(&all))
}

/// Returns the journal that `disk info` reports.
fn journal_of(image: &Path) -> PathBuf {
    let (code, said) = disk(&["info", "--output", "json"], image);
    assert_eq!(code, Some(0), "{said}");
    let info: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(info["journal"]["state"], "pending", "{said}");
    assert!(info["journal"]["changes"].as_u64() > Some(0), "{said}");
    info["journal"]["file"].as_str().expect("a path").into()
}

#[test]
fn journal_is_found_in_any_environment() {
    let (folder, runtime, other) = (temp_dir_on_disk(), temp_dir_on_tmpfs(), temp_dir_on_tmpfs());
    let (runtime, other) = (Some(runtime.path()), Some(other.path()));
    // Root may have a further directory that is searched first; other users have not.
    for user in [None, Some(NOBODY)] {
        let image = image(&folder);
        for directory in [runtime, other] {
            chown(directory.expect("one"), user, None).expect("chowns");
        }
        let without = Who { user, ..Who::default() };
        kill_unflushed(without, &image);
        is_all_there(Who { user, runtime, ..Who::default() }.serve(&image), &image);
        let with = Who { user, runtime, ..Who::default() };
        kill_unflushed(with, &image);
        is_all_there(with.serve(&image), &image);
    }
}

#[test]
fn missing_journal_refuses_image_until_discarded() {
    let folder = temp_dir_on_disk();
    let image = image(&folder);
    let anybody = Who::default();
    kill_unflushed(anybody, &image);
    let journal = journal_of(&image);
    fs::remove_file(&journal).expect("removes");
    let said = anybody.is_refused(&image);
    let place = text(journal.parent().expect("a folder"));
    for word in [text(&image), place, "was killed", "--discard-journal"] {
        assert!(said.contains(word), "'{word}' is missing: {said}");
    }
    let (_, said) = disk(&["info"], &image);
    assert!(said.contains("cannot be found"), "{said}");
    assert!(said.contains("state:            incomplete"), "{said}");
    let (code, said) = disk(&["check"], &image);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("error: journal: a server of it was killed"), "{said}");
    let (code, said) = disk(&["check", "--repair"], &image);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("--discard-journal"), "{said}");
    let (code, said) = disk(&["check", "--discard-journal"], &image);
    assert!(matches!(code, Some(0 | 1)), "{said}");
    assert!(said.contains("they are unknown"), "{said}");
    let server = anybody.serve(&image).serving();
    server.io(&LOST);
    server.stop();
}

#[test]
fn dying_servers_image_never_looks_clean() {
    let folder = temp_dir_on_disk();
    for _ in 0..20 {
        let image = image(&folder);
        let server = Who::default().serve(&image).serving();
        server.io(&["write -P 8 30M 64k", "flush"]);
        // The server loses its locks while some of these commands run.
        let looks = std::array::from_fn::<_, 6, _>(|_| {
            let look = Who::default().command(&["disk", "info", "--output", "json", text(&image)]);
            Process::start(look).expect("starts")
        });
        server.process.signal(libc::SIGKILL);
        for mut look in looks {
            let status = look.wait(TEST_TIMEOUT).expect("ends");
            let said = look.output();
            assert_eq!(status.code(), Some(0), "{said}");
            let info: serde_json::Value = serde_json::from_str(&said).expect("JSON");
            let is_told = info["in-use"] == true || info["journal"]["state"] == "pending";
            assert!(is_told, "{said}");
        }
        drop(server);
        await_release(&image);
        Who::default().serve(&image).serving().stop();
    }
}

#[test]
fn overlay_reports_backing_files_journal() {
    let folder = temp_dir_on_disk();
    let base = image(&folder);
    kill_unflushed(Who::default(), &base);
    let journal = journal_of(&base);
    let overlay = folder.path().join("overlay.qcow2");
    let create = ["create", "-f", "qcow2", "-b", text(&base), "-F", "qcow2", text(&overlay)];
    run_tool("qemu-img", &create);
    let is_told = |state: &str, words: &str| {
        let (code, said) = disk(&["info", "--backing-chain"], &overlay);
        assert_eq!(code, Some(0), "{said}");
        assert!(said.contains("state:            clean"), "{said}");
        let line = said.lines().find(|line| line.starts_with("    journal: "));
        assert!(line.is_some_and(|line| line.contains(words)), "{said}");
        let (code, said) = disk(&["check"], &overlay);
        assert_eq!(code, Some(0), "{said}");
        let start = format!("backing file {}: journal: ", text(&base));
        let line = said.lines().last().and_then(|line| line.strip_prefix(&start));
        assert!(line.is_some_and(|line| line.contains(words)), "{said}");
        let json = |command: &str| -> serde_json::Value {
            let chain = (command == "info").then_some("--backing-chain");
            let arguments: Vec<&str> = [command, "--output", "json"].into_iter().chain(chain).collect();
            let (_, said) = disk(&arguments, &overlay);
            serde_json::from_str(&said).expect("JSON")
        };
        assert_eq!(json("info")["backing-chain"][0]["journal"]["state"], state);
        assert_eq!(json("check")["backing-journals"][0]["journal"]["state"], state);
    };
    is_told("pending", text(&journal));
    fs::remove_file(&journal).expect("removes");
    is_told("missing", "cannot be found");
    let (_, said) = disk(&["check", "--discard-journal", "--repair"], &base);
    let (_, of_overlay) = disk(&["info", "--backing-chain"], &overlay);
    assert!(!of_overlay.contains("journal:"), "{said} {of_overlay}");
}

/// An image that was changed or replaced since its server was killed is refused until its journal is discarded.
#[test]
fn overtaken_journal_refuses_image_until_discarded() {
    let folder = temp_dir_on_disk();
    let anybody = Who::default();
    let changed = image(&folder);
    kill_unflushed(anybody, &changed);
    assert!(qemu_io("qcow2", text(&changed), &["write -P 9 40M 64k"]).0);
    is_refused_until_given_up(anybody, &changed);

    let replaced = image(&folder);
    let server = anybody.serve(&replaced).serving();
    server.io(&["write -P 8 30M 64k", "flush"]);
    let copy = fs::read(&replaced).expect("reads");
    server.io(&["write -P 9 40M 64k", "flush"]);
    write_and_kill(server, &replaced);
    fs::write(&replaced, copy).expect("writes");
    is_refused_until_given_up(anybody, &replaced);
}

#[test]
fn device_journal_ignores_reused_device_number() {
    let folder = temp_dir_on_disk();
    let anybody = Who::default();
    // A number that is not allocated to other tests.
    let device = PathBuf::from(format!("/dev/loop{}", 100 + std::process::id() % 100));
    let attach = || {
        let image = image(&folder);
        let file = fs::File::options().write(true).open(&image).expect("opens");
        file.set_len(64 << 20).expect("room for what is written");
        LoopDevice::attach_at(&device, &image)
    };
    let first = attach();
    kill_unflushed(anybody, &device);
    let journal = journal_of(&device);
    is_all_there(anybody.serve(&device), &device);
    kill_unflushed(anybody, &device);
    assert!(journal.exists());
    drop(first);
    let second = attach();
    let server = anybody.serve(&device).serving();
    server.io(&LOST);
    assert!(!server.stop().contains("WARN"));
    drop(second);
}

/// An image that was replaced although its journal had no unflushed changes is served with a warning.
#[test]
fn replaced_image_is_served_with_warning() {
    let folder = temp_dir_on_disk();
    let who = Who::default();
    let image = image(&folder);
    let copy = fs::read(&image).expect("reads");
    let mut server = who.serve(&image).serving();
    server.io(&["write -P 9 40M 64k", "flush"]);
    server.process.kill();
    await_release(&image);
    fs::write(&image, copy).expect("writes");
    let server = who.serve(&image).serving();
    server.io(&["read -P 1 0 64k", "read -P 0 40M 64k"]);
    let said = server.stop();
    assert!(said.contains("WARN") && said.contains("end it"), "{said}");
    assert!(!who.serve(&image).serving().stop().contains("WARN"));
}

#[test]
fn killed_idle_server_causes_no_warning() {
    let folder = temp_dir_on_disk();
    let who = Who::default();
    let image = image(&folder);
    for _ in 0..2 {
        let mut server = who.serve(&image).serving();
        server.io(&["read -P 1 0 64k", "flush"]);
        assert!(!server.process.output().contains("WARN"), "{}", server.process.output());
        server.process.kill();
        await_release(&image);
    }
    kill_unflushed(who, &image);
    is_all_there(who.serve(&image), &image);
}

/// A journal is found by a server that sees another boot ID, as in a container.
#[test]
fn journal_is_found_across_boot_ids() {
    let folder = temp_dir_on_disk();
    let image = image(&folder);
    let id = folder.path().join("boot_id");
    fs::write(&id, "01234567-89ab-cdef-0123-456789abcdef\n").expect("writes");
    let contained = Who { boot_id: Some(&id), ..Who::default() };
    kill_unflushed(contained, &image);
    is_all_there(Who::default().serve(&image), &image);
    kill_unflushed(Who::default(), &image);
    is_all_there(contained.serve(&image), &image);
}

fn is_refused_until_given_up(who: Who<'_>, image: &Path) {
    let said = who.is_refused(image);
    for word in [text(image), ".journal", "changed since", "--discard-journal"] {
        assert!(said.contains(word), "'{word}' is missing: {said}");
    }
    let (code, said) = disk(&["info", "--output", "json"], image);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("\"overtaken\""), "{said}");
    let (code, said) = disk(&["check", "--repair"], image);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("--discard-journal"), "{said}");
    let (code, said) = disk(&["check", "--discard-journal", "--repair"], image);
    assert_eq!(code, Some(0), "{said}");
    assert_eq!(health(image), Health::Clean);
    let server = who.serve(image).serving();
    server.io(&LOST);
    assert!(!server.stop().contains("WARN"));
}

#[test]
fn journal_can_be_discarded() {
    let folder = temp_dir_on_disk();
    let image = image(&folder);
    kill_unflushed(Who::default(), &image);
    let journal = journal_of(&image);
    let (_, said) = disk(&["info"], &image);
    assert!(said.contains("state:            incomplete without its journal"), "{said}");
    let (code, said) = disk(&["check", "--discard-journal", "--repair"], &image);
    assert_eq!(code, Some(0), "{said}");
    assert!(!journal.exists(), "{said}");
    let removed = format!("removed: {}\n", text(&journal));
    for words in [
        "discarded: ",
        " for 384 KiB of its disk, made between 20",
        "  guest offsets 0x10000 to 0x20000 (64 KiB)\n  guest offsets 0x1400000 to 0x1450000 (320 KiB)\n",
        &removed,
    ] {
        assert!(said.contains(words), "'{words}' is missing: {said}");
    }
    let (_, said) = disk(&["check", "--discard-journal"], &image);
    assert!(said.contains("nothing to discard"), "{said}");
    assert_eq!(health(&image), Health::Clean);
    let server = Who::default().serve(&image).serving();
    server.io(&LOST);
    server.stop();
}

#[test]
fn journal_is_not_needed_after_reboot() {
    let folder = temp_dir_on_disk();
    let image = image(&folder);
    kill_unflushed(Who::default(), &image);
    fs::remove_file(journal_of(&image)).expect("removes");
    let mut bytes = Bytes::of(&image);
    bytes.put_u64(AUTOCLEAR, bytes.u64_at(AUTOCLEAR) ^ 1 << 60);
    fs::write(&image, &bytes.0).expect("writes");
    let (_, said) = disk(&["info"], &image);
    assert!(said.contains("before the last boot of the host"), "{said}");
    let server = Who::default().serve(&image).serving();
    server.io(&LOST);
    let said = server.stop();
    assert!(said.contains("WARN") && said.contains("its journal is missing"), "{said}");
}

#[test]
fn root_resumes_image_owners_journal() {
    require_root("to take up what another user has left");
    let folder = temp_dir_on_disk();
    let image = image(&folder);
    let nobody = Who { user: Some(NOBODY), ..Who::default() };
    kill_unflushed(nobody, &image);
    // A journal of a user who does not own the image is not trusted.
    let said = Who::default().is_refused(&image);
    assert!(said.contains("does not own the image"), "{said}");
    chown(&image, Some(NOBODY), None).expect("chowns");
    let journal = journal_of(&image);
    is_all_there(Who::default().serve(&image), &image);
    assert!(!journal.exists(), "{} is left", journal.display());
}

#[test]
fn user_cannot_resume_roots_journal() {
    require_root("to take up what another user has left");
    let folder = temp_dir_on_disk();
    let image = image(&folder);
    let nobody = Who { user: Some(NOBODY), ..Who::default() };
    kill_unflushed(Who::default(), &image);
    let said = nobody.is_refused(&image);
    assert!(said.contains("ermission denied") && said.contains("as root"), "{said}");
    is_all_there(Who::default().serve(&image), &image);
}

#[test]
fn repair_applies_journal_first() {
    let folder = temp_dir_on_disk();
    let image = image(&folder);
    kill_unflushed(Who::default(), &image);
    let (_, said) = disk(&["check"], &image);
    assert!(said.contains("journal: a server of it was killed"), "{said}");
    journal_of(&image);
    let (code, said) = disk(&["check", "--repair"], &image);
    assert_eq!(code, Some(0), "{said}");
    assert!(qemu_io("qcow2", text(&image), &READS).0);
    assert_eq!(health(&image), Health::Clean);
    assert_eq!(Bytes::of(&image).u64_at(AUTOCLEAR), 0);
}

#[test]
fn dirty_image_repair_keeps_journaled_writes() {
    let folder = temp_dir_on_disk();
    let image = image(&folder);
    kill_unflushed(Who::default(), &image);
    let mut bytes = Bytes::of(&image);
    bytes.put_u64(72, bytes.u64_at(72) | 1);
    // Clusters in the journal have no refcount yet, and clusters of the image have lost theirs.
    let block = bytes.refcount_block();
    bytes.put(block + 2 * 5, &[0; 40]);
    fs::write(&image, &bytes.0).expect("writes");
    is_all_there(Who::default().serve(&image), &image);
}

/// A read-only server reads unflushed changes from the journal, and changes neither image nor journal.
#[test]
fn read_only_server_reads_foreign_journal() {
    let folder = temp_dir_on_disk();
    let image = image(&folder);
    kill_unflushed(Who::default(), &image);
    let (before, journal) = (fs::read(&image).expect("reads"), journal_of(&image));
    let folder = temp_dir_on_tmpfs();
    let uri = format!("nbd+unix:///?socket={}/socket", folder.path().display());
    let arguments = ["disk", "serve", text(&image), "--read-only", "--nbd", &uri];
    let server =
        Server { process: Process::start(Who::default().command(&arguments)).expect("starts"), uri, _folder: folder };
    let server = server.serving();
    let mut reads = vec!["-r"];
    READS.iter().for_each(|read| reads.extend(["-c", read]));
    let (code, said) = run_command({
        let mut command = Command::new("qemu-io");
        command.args(["-f", "raw"]).args(&reads).arg(&server.uri);
        command
    });
    assert!(code == Some(0) && !said.contains("failed"), "{said}");
    let said = server.stop();
    assert!(said.contains(text(&journal)), "{said}");
    assert!(fs::read(&image).expect("reads") == before);
    is_all_there(Who::default().serve(&image), &image);
}

#[test]
fn overlay_sees_backing_files_journal() {
    let folder = temp_dir_on_disk();
    let who = Who::default();
    let base = image(&folder);
    kill_unflushed(who, &base);
    let before = fs::read(&base).expect("reads");
    let overlay = folder.path().join("overlay.qcow2");
    run_tool("qemu-img", &["create", "-f", "qcow2", "-F", "qcow2", "-b", text(&base), text(&overlay)]);
    let server = who.serve(&overlay).serving();
    server.io(&READS);
    server.io(&["write -P 9 48k 512", "flush"]);
    server.stop();
    assert!(fs::read(&base).expect("reads") == before, "the backing file has changed");
    let after = ["read -P 9 48k 512", "read -P 2 49k 47k", "read -P 3 20M 300k"];
    // The data is the same once it is in the backing file.
    let journal = journal_of(&base);
    let (code, said) = disk(&["check", "--repair"], &base);
    assert_eq!(code, Some(0), "{said}");
    let server = who.serve(&overlay).serving();
    server.io(&after);
    server.stop();

    // A missing journal refuses the overlay: if the journal turned up later, the disk would change.
    kill_unflushed(who, &base);
    assert!(journal.exists());
    fs::remove_file(&journal).expect("removes");
    let said = who.is_refused(&overlay);
    assert!(said.contains(text(&base)) && said.contains("--discard-journal"), "{said}");
}

#[test]
fn only_orphaned_journals_are_removed() {
    require_root("to know whether an image is no more");
    let folder = temp_dir_on_disk();
    let who = Who::default();
    let kept = image(&folder);
    let renamed = folder.path().join("renamed.qcow2");
    kill_unflushed(who, &kept);
    fs::rename(&kept, &renamed).expect("renames");
    let of_kept = journal_of(&renamed);
    let gone = image(&folder);
    kill_unflushed(who, &gone);
    let of_gone = journal_of(&gone);
    fs::remove_file(&gone).expect("removes");
    let other = image(&folder);
    let server = who.serve(&other).serving();
    server.io(&["write -P 5 1M 1M"]);
    let beside = folder.path().join("beside.qcow2");
    run_tool("qemu-img", &["create", "-f", "qcow2", text(&beside), "1M"]);
    who.serve(&beside).serving().stop();
    // An image that gets the inode of a removed one does not get its journal.
    assert!(!of_gone.exists() || of_gone == own_journal(&other), "{} is left", of_gone.display());
    assert!(of_kept.exists(), "{} is swept away", of_kept.display());
    assert!(own_journal(&other).exists(), "the journal of a running server is swept away");
    let said = server.stop();
    assert!(!said.contains("WARN"), "{said}");
    is_all_there(who.serve(&renamed), &renamed);
    assert!(!of_kept.exists());
}

/// Returns the path of the journal of root's server of an image.
fn own_journal(image: &Path) -> PathBuf {
    let found = image.metadata().expect("it is there");
    let name = format!("qcow2-{:x}-{:x}.journal", found.dev(), found.ino());
    let places = ["/run/larder/journals", "/dev/shm/larder-0"].map(|folder| Path::new(folder).join(&name));
    places.into_iter().find(|path| path.exists()).unwrap_or_else(|| name.into())
}

/// A journal that is half full is committed without a flush, so that writes need not wait for space in it.
#[test]
fn half_full_journal_commits_without_flush() {
    const CLUSTER: u64 = 512;
    const HALF: u64 = 4096;
    const FIRST_VALID: usize = 48;
    let folder = temp_dir_on_disk();
    let image = folder.path().join("image.qcow2");
    run_tool("qemu-img", &["create", "-f", "qcow2", "-o", "cluster_size=512", text(&image), "16M"]);
    let who = Who::default();
    let mut server = who.serve(&image).serving();
    let clusters: Vec<u64> = (0..HALF + 100).map(|number| number * 2 * CLUSTER).collect();
    let commands = |command: &str| -> Vec<String> {
        let all = clusters.iter().map(|at| format!("{command} -P 7 {at} {CLUSTER}"));
        all.collect()
    };
    let client = start_io_without_flush(&server.uri, &commands("write"));
    let journal = own_journal(&image);
    let first_valid = || {
        let bytes = fs::read(&journal).expect("reads");
        let word = bytes[FIRST_VALID..].first_chunk().expect("a journal");
        u64::from_ne_bytes(*word)
    };
    wait_until("the journal is half full and nothing is committed", || first_valid() >= HALF);
    server.process.kill();
    drop(client);
    await_release(&image);
    let server = who.serve(&image).serving();
    let reads = commands("read");
    server.io(&reads.iter().map(String::as_str).collect::<Vec<_>>());
    server.stop();
    // Clusters that were allocated ahead may leak.
    health(&image);
}
