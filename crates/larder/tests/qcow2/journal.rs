//! What a killed server had not flushed: who finds it, who is refused, and what the commands about images say of it.

use std::fs::{self, Permissions};
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};
use std::process::Command;

use larder_bench::campaign::process::Process;
use tempfile::TempDir;

use crate::bad_input::Bytes;
use crate::served::{Health, await_release, health, qemu_io, text};
use crate::support::{
    LIMIT, LoopDevice, io_without_flush, larder, need_root, on_disk, on_tmpfs, run, tool, wait_until,
};

const AUTOCLEAR: u64 = 88;
const NOBODY: u32 = 65534;

/// Who serves an image, with which folder for journals, and with a file in place of the boot ID, as in a container.
#[derive(Clone, Copy, Default)]
struct Who<'a> {
    user: Option<u32>,
    runtime: Option<&'a Path>,
    boot_id: Option<&'a Path>,
}

impl Who<'_> {
    fn command(self, arguments: &[&str]) -> Command {
        let mut command = match (self.user, self.boot_id) {
            (None, None) => Command::new(larder()),
            (None, Some(id)) => {
                need_root("to mount");
                let mut command = Command::new("unshare");
                let mounts = "mount --bind -- \"$0\" /proc/sys/kernel/random/boot_id && exec \"$@\"";
                command.args(["--mount", "sh", "-c", mounts, text(id), text(larder())]);
                command
            }
            (Some(user), _) => {
                need_root("to be another user");
                let mut command = Command::new("setpriv");
                let user = user.to_string();
                command.args(["--reuid", &user, "--regid", &user, "--clear-groups"]);
                command.arg(larder());
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
        let folder = on_tmpfs();
        fs::set_permissions(folder.path(), Permissions::from_mode(0o777)).expect("a folder for all");
        let uri = format!("nbd+unix:///?socket={}/socket", folder.path().display());
        let process = Process::start(self.command(&["disk", "serve", text(image), "--nbd", &uri])).expect("starts");
        Server {
            process,
            uri,
            _folder: folder,
        }
    }

    /// The server ends with an error; what it says.
    fn is_refused(self, image: &Path) -> String {
        let before = fs::read(image).expect("reads");
        let mut server = self.serve(image);
        assert!(server.process.wait_for("serving", LIMIT).is_err(), "it is served");
        let status = server.process.wait(LIMIT).expect("ends");
        let said = server.process.output();
        assert_eq!(status.code(), Some(2), "{said}");
        assert!(
            fs::read(image).expect("reads") == before,
            "the image has changed: {said}"
        );
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
        if let Err(error) = self.process.wait_for("serving", LIMIT) {
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
        let status = self.process.wait(LIMIT).expect("ends");
        let said = self.process.output();
        assert_eq!(status.code(), Some(0), "{said}");
        said
    }
}

/// An image for all to use, one of whose clusters was flushed.
fn image(folder: &TempDir) -> PathBuf {
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("a folder for all");
    let image = folder.path().join("image.qcow2");
    tool("qemu-img", &["create", "-f", "qcow2", text(&image), "64M"]);
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
    let client = io_without_flush(&server.uri, &WRITES);
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
    run(Who::default().command(&all))
}

/// The journal that `disk info` tells of.
fn journal_of(image: &Path) -> PathBuf {
    let (code, said) = disk(&["info", "--output", "json"], image);
    assert_eq!(code, Some(0), "{said}");
    let info: serde_json::Value = serde_json::from_str(&said).expect("JSON");
    assert_eq!(info["journal"]["state"], "pending", "{said}");
    assert!(info["journal"]["changes"].as_u64() > Some(0), "{said}");
    info["journal"]["file"].as_str().expect("a path").into()
}

#[test]
fn a_journal_is_found_whatever_the_environment_says() {
    let (folder, runtime, other) = (on_disk(), on_tmpfs(), on_tmpfs());
    let (runtime, other) = (Some(runtime.path()), Some(other.path()));
    // Root may have a folder that comes first; somebody else has not.
    for user in [None, Some(NOBODY)] {
        let image = image(&folder);
        for directory in [runtime, other] {
            chown(directory.expect("one"), user, None).expect("chowns");
        }
        let without = Who { user, ..Who::default() };
        kill_unflushed(without, &image);
        is_all_there(
            Who {
                user,
                runtime,
                ..Who::default()
            }
            .serve(&image),
            &image,
        );
        let with = Who {
            user,
            runtime,
            ..Who::default()
        };
        kill_unflushed(with, &image);
        is_all_there(with.serve(&image), &image);
    }
}

#[test]
fn an_image_whose_journal_is_missing_is_refused_until_it_is_given_up() {
    let folder = on_disk();
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
    assert!(said.contains("is not to be found"), "{said}");
    assert!(said.contains("state:            incomplete"), "{said}");
    let (code, said) = disk(&["check"], &image);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("error: journal: a server of it was killed"), "{said}");
    let (code, said) = disk(&["check", "--repair"], &image);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("--discard-journal"), "{said}");
    let (code, said) = disk(&["check", "--discard-journal"], &image);
    assert!(matches!(code, Some(0 | 1)), "{said}");
    assert!(said.contains("nobody can say what that was"), "{said}");
    let server = anybody.serve(&image).serving();
    server.io(&LOST);
    server.stop();
}

#[test]
fn an_image_whose_server_is_dying_is_never_told_to_be_clean() {
    let folder = on_disk();
    for _ in 0..20 {
        let image = image(&folder);
        let server = Who::default().serve(&image).serving();
        server.io(&["write -P 8 30M 64k", "flush"]);
        // It loses its locks while some of these look.
        let looks = std::array::from_fn::<_, 6, _>(|_| {
            let look = Who::default().command(&["disk", "info", "--output", "json", text(&image)]);
            Process::start(look).expect("starts")
        });
        server.process.signal(libc::SIGKILL);
        for mut look in looks {
            let status = look.wait(LIMIT).expect("ends");
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
fn what_a_killed_server_has_left_of_a_backing_file_is_told_of_the_overlay() {
    let folder = on_disk();
    let base = image(&folder);
    kill_unflushed(Who::default(), &base);
    let journal = journal_of(&base);
    let overlay = folder.path().join("overlay.qcow2");
    let create = [
        "create",
        "-f",
        "qcow2",
        "-b",
        text(&base),
        "-F",
        "qcow2",
        text(&overlay),
    ];
    tool("qemu-img", &create);
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
    is_told("missing", "is not to be found");
    let (_, said) = disk(&["check", "--discard-journal", "--repair"], &base);
    let (_, of_overlay) = disk(&["info", "--backing-chain"], &overlay);
    assert!(!of_overlay.contains("journal:"), "{said} {of_overlay}");
}

#[test]
fn an_image_that_has_left_its_journal_behind_is_refused_until_it_is_given_up() {
    let folder = on_disk();
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
fn a_journal_of_a_block_device_is_of_no_other_that_gets_its_number() {
    let folder = on_disk();
    let anybody = Who::default();
    // None that other tests are given.
    let device = PathBuf::from(format!("/dev/loop{}", 100 + std::process::id() % 100));
    let attach = || {
        let image = image(&folder);
        let file = fs::File::options().write(true).open(&image).expect("opens");
        file.set_len(64 << 20).expect("room for what is written");
        LoopDevice::at(&device, &image)
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

#[test]
fn an_image_that_was_replaced_although_nothing_was_missing_is_served_with_a_warning() {
    let folder = on_disk();
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
fn an_idle_server_that_was_killed_leaves_nothing_to_warn_of() {
    let folder = on_disk();
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

#[test]
fn a_journal_is_found_by_who_sees_another_boot_id() {
    let folder = on_disk();
    let image = image(&folder);
    let id = folder.path().join("boot_id");
    fs::write(&id, "01234567-89ab-cdef-0123-456789abcdef\n").expect("writes");
    let contained = Who {
        boot_id: Some(&id),
        ..Who::default()
    };
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
fn a_journal_can_be_given_up() {
    let folder = on_disk();
    let image = image(&folder);
    kill_unflushed(Who::default(), &image);
    let journal = journal_of(&image);
    let (_, said) = disk(&["info"], &image);
    assert!(
        said.contains("state:            incomplete without its journal"),
        "{said}"
    );
    let (code, said) = disk(&["check", "--discard-journal", "--repair"], &image);
    assert_eq!(code, Some(0), "{said}");
    assert!(!journal.exists(), "{said}");
    let removed = format!("removed: {}\n", text(&journal));
    for words in [
        "given up: ",
        " for 384 KiB of its disk, made between 20",
        "  guest offsets 0x10000 to 0x20000 (64 KiB)\n  guest offsets 0x1400000 to 0x1450000 (320 KiB)\n",
        &removed,
    ] {
        assert!(said.contains(words), "'{words}' is missing: {said}");
    }
    let (_, said) = disk(&["check", "--discard-journal"], &image);
    assert!(said.contains("nothing to give up"), "{said}");
    assert_eq!(health(&image), Health::Clean);
    let server = Who::default().serve(&image).serving();
    server.io(&LOST);
    server.stop();
}

#[test]
fn after_a_start_of_the_host_an_image_is_served_without_its_journal() {
    let folder = on_disk();
    let image = image(&folder);
    kill_unflushed(Who::default(), &image);
    fs::remove_file(journal_of(&image)).expect("removes");
    let mut bytes = Bytes::of(&image);
    bytes.put_u64(AUTOCLEAR, bytes.u64_at(AUTOCLEAR) ^ 1 << 60);
    fs::write(&image, &bytes.0).expect("writes");
    let (_, said) = disk(&["info"], &image);
    assert!(said.contains("before the host was started"), "{said}");
    let server = Who::default().serve(&image).serving();
    server.io(&LOST);
    let said = server.stop();
    assert!(
        said.contains("WARN") && said.contains("its journal is not here"),
        "{said}"
    );
}

#[test]
fn root_goes_on_where_the_server_of_the_image_s_owner_was_killed() {
    need_root("to take up what another user has left");
    let folder = on_disk();
    let image = image(&folder);
    let nobody = Who {
        user: Some(NOBODY),
        ..Who::default()
    };
    kill_unflushed(nobody, &image);
    // Of a user who does not own the image it is not believed.
    let said = Who::default().is_refused(&image);
    assert!(said.contains("does not own the image"), "{said}");
    chown(&image, Some(NOBODY), None).expect("chowns");
    let journal = journal_of(&image);
    is_all_there(Who::default().serve(&image), &image);
    assert!(!journal.exists(), "{} is left", journal.display());
}

#[test]
fn another_user_is_refused_where_a_server_of_root_was_killed() {
    need_root("to take up what another user has left");
    let folder = on_disk();
    let image = image(&folder);
    let nobody = Who {
        user: Some(NOBODY),
        ..Who::default()
    };
    kill_unflushed(Who::default(), &image);
    let said = nobody.is_refused(&image);
    assert!(said.contains("ermission denied") && said.contains("as root"), "{said}");
    is_all_there(Who::default().serve(&image), &image);
}

#[test]
fn a_repair_puts_what_was_not_flushed_into_the_image_first() {
    let folder = on_disk();
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
fn a_dirty_image_is_repaired_and_keeps_what_was_not_flushed() {
    let folder = on_disk();
    let image = image(&folder);
    kill_unflushed(Who::default(), &image);
    let mut bytes = Bytes::of(&image);
    bytes.put_u64(72, bytes.u64_at(72) | 1);
    // What the journal leads to has no refcount yet, and what the image leads to has lost its own.
    let block = bytes.refcount_block();
    bytes.put(block + 2 * 5, &[0; 40]);
    fs::write(&image, &bytes.0).expect("writes");
    is_all_there(Who::default().serve(&image), &image);
}

#[test]
fn a_read_only_server_reads_what_is_not_in_the_image_yet_and_leaves_it() {
    let folder = on_disk();
    let image = image(&folder);
    kill_unflushed(Who::default(), &image);
    let (before, journal) = (fs::read(&image).expect("reads"), journal_of(&image));
    let folder = on_tmpfs();
    let uri = format!("nbd+unix:///?socket={}/socket", folder.path().display());
    let arguments = ["disk", "serve", text(&image), "--read-only", "--nbd", &uri];
    let server = Server {
        process: Process::start(Who::default().command(&arguments)).expect("starts"),
        uri,
        _folder: folder,
    };
    let server = server.serving();
    let mut reads = vec!["-r"];
    READS.iter().for_each(|read| reads.extend(["-c", read]));
    let (code, said) = run({
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
fn an_overlay_sees_what_is_not_in_its_backing_file_yet() {
    let folder = on_disk();
    let who = Who::default();
    let base = image(&folder);
    kill_unflushed(who, &base);
    let before = fs::read(&base).expect("reads");
    let overlay = folder.path().join("overlay.qcow2");
    tool(
        "qemu-img",
        &[
            "create",
            "-f",
            "qcow2",
            "-F",
            "qcow2",
            "-b",
            text(&base),
            text(&overlay),
        ],
    );
    let server = who.serve(&overlay).serving();
    server.io(&READS);
    server.io(&["write -P 9 48k 512", "flush"]);
    server.stop();
    assert!(
        fs::read(&base).expect("reads") == before,
        "the backing file has changed"
    );
    let after = ["read -P 9 48k 512", "read -P 2 49k 47k", "read -P 3 20M 300k"];
    // The same when it is there.
    let journal = journal_of(&base);
    let (code, said) = disk(&["check", "--repair"], &base);
    assert_eq!(code, Some(0), "{said}");
    let server = who.serve(&overlay).serving();
    server.io(&after);
    server.stop();

    // What is missing may turn up, and would change the disk then.
    kill_unflushed(who, &base);
    assert!(journal.exists());
    fs::remove_file(&journal).expect("removes");
    let said = who.is_refused(&overlay);
    assert!(
        said.contains(text(&base)) && said.contains("--discard-journal"),
        "{said}"
    );
}

#[test]
fn journals_of_images_that_are_no_more_are_swept_away_and_no_others() {
    need_root("to know whether an image is no more");
    let folder = on_disk();
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
    tool("qemu-img", &["create", "-f", "qcow2", text(&beside), "1M"]);
    who.serve(&beside).serving().stop();
    // An image that gets the inode of one that is gone is not told of its journal.
    assert!(
        !of_gone.exists() || of_gone == own_journal(&other),
        "{} is left",
        of_gone.display()
    );
    assert!(of_kept.exists(), "{} is swept away", of_kept.display());
    assert!(
        own_journal(&other).exists(),
        "the journal of a running server is swept away"
    );
    let said = server.stop();
    assert!(!said.contains("WARN"), "{said}");
    is_all_there(who.serve(&renamed), &renamed);
    assert!(!of_kept.exists());
}

/// Where root's server of an image has its journal.
fn own_journal(image: &Path) -> PathBuf {
    let found = image.metadata().expect("it is there");
    let name = format!("qcow2-{:x}-{:x}.journal", found.dev(), found.ino());
    let places = ["/run/larder/journals", "/dev/shm/larder-0"].map(|folder| Path::new(folder).join(&name));
    places
        .into_iter()
        .find(|path| path.exists())
        .unwrap_or_else(|| name.into())
}

/// A write does not wait for room in a journal that is emptied early enough.
#[test]
fn half_full_journal_is_committed_without_a_flush() {
    const CLUSTER: u64 = 512;
    const HALF: u64 = 4096;
    const FIRST_VALID: usize = 48;
    let folder = on_disk();
    let image = folder.path().join("image.qcow2");
    tool(
        "qemu-img",
        &["create", "-f", "qcow2", "-o", "cluster_size=512", text(&image), "16M"],
    );
    let who = Who::default();
    let mut server = who.serve(&image).serving();
    let clusters: Vec<u64> = (0..HALF + 100).map(|number| number * 2 * CLUSTER).collect();
    let commands = |command: &str| -> Vec<String> {
        let all = clusters.iter().map(|at| format!("{command} -P 7 {at} {CLUSTER}"));
        all.collect()
    };
    let client = io_without_flush(&server.uri, &commands("write"));
    let journal = own_journal(&image);
    let first_valid = || {
        let bytes = fs::read(&journal).expect("reads");
        let word = bytes[FIRST_VALID..].first_chunk().expect("a journal");
        u64::from_ne_bytes(*word)
    };
    wait_until("the journal is half full and nothing is committed", || {
        first_valid() >= HALF
    });
    server.process.kill();
    drop(client);
    await_release(&image);
    let server = who.serve(&image).serving();
    let reads = commands("read");
    server.io(&reads.iter().map(String::as_str).collect::<Vec<_>>());
    server.stop();
    // Clusters that were taken ahead may leak.
    health(&image);
}
