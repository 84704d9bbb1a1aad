//! `larder vm`: all disks of a VM from one file. Errors in a file are listed in `wrong.rs`.

#[cfg(target_arch = "x86_64")]
mod attacker;
mod comes;
mod confine;
mod hung;
mod leaves;
mod reload;
mod services;
#[path = "../support/mod.rs"]
mod support;
mod takeover;
mod wrong;

use std::fs::Permissions;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;

use larder_bench::campaign::front_end::{FrontEnd, Options};
use larder_bench::campaign::process::Process;
use serde_json::Value;
use support::{
    TEST_TIMEOUT, assert_io_works, larder_path, require_root, run_command, run_tool, temp_dir_on_disk,
    temp_dir_on_tmpfs,
};
use tempfile::TempDir;

const MIB: u64 = 1 << 20;

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// A VM's file, images and sockets.
struct Vm {
    /// Directory of the images, on a disk.
    images: TempDir,
    /// Directory of the file and the sockets.
    folder: TempDir,
}

impl Vm {
    /// Creates a VM with the file `web.toml`; `IMAGES` in it stands for the directory of the images.
    fn new(file: &str) -> Self {
        let vm = Self { images: temp_dir_on_disk(), folder: temp_dir_on_tmpfs() };
        vm.write(file);
        vm
    }

    fn write(&self, file: &str) {
        let file = file.replace("IMAGES", text(self.images.path()));
        std::fs::write(self.file(), file).expect("writes the file");
    }

    fn file(&self) -> PathBuf {
        self.path("web.toml")
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Creates an image of zeros.
    fn raw(&self, name: &str, mib: u64) {
        let file = std::fs::File::create(self.images.path().join(name));
        file.and_then(|file| file.set_len(mib * MIB)).expect("an image");
    }

    fn command(&self, options: &[&str]) -> Command {
        let mut command = Command::new(larder_path());
        command.arg("vm").arg(self.file()).args(options);
        command.env("STATE_DIRECTORY", self.path("state"));
        command
    }

    fn start(&self) -> Process {
        let process = Process::start(self.command(&[])).expect("larder starts");
        process.wait_for(" ready ", TEST_TIMEOUT).expect("it serves");
        process
    }

    /// Returns the state of all disks from the control socket.
    fn disks(&self) -> Vec<Value> {
        let told = run_tool("curl", &["-sS", "--unix-socket", text(&self.path("control")), "http://x/v1/disks"]);
        let told: Value = serde_json::from_str(&told).expect("it is JSON");
        told["disks"].as_array().expect("a list").clone()
    }

    /// Returns the names of the existing sockets.
    fn sockets(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder.path()).expect("a folder").flatten();
        let sockets = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()));
        let mut names: Vec<String> = sockets.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    }
}

/// Returns the private directory of the only VM with a server in a runtime or state directory.
fn own_folder(above: &Path) -> PathBuf {
    let mut all = std::fs::read_dir(above.join("private")).expect("a folder").flatten();
    let own = all.next().expect("it is there").path();
    assert!(all.next().is_none(), "of one VM");
    own
}

/// A VM's file with two disks, one of each kind of image and export.
const TWO: &str = r#"
control = "control"

[[disk]]
image = "IMAGES/system.qcow2"
format = "qcow2"
socket = "vda"
serial = "SYSTEM"
cache = "IMAGES/system.cache"
cache-size = "16MiB"

[[disk]]
name = "data"
image = "IMAGES/data.raw"
format = "raw"
nbd = "nbd+unix:///data?socket=data.nbd"
nbd-description = "the VM's data"
prefetch = "off"
iops-total = 1000000
readonly = false
"#;

fn two() -> Vm {
    let vm = Vm::new(TWO);
    let system = vm.images.path().join("system.qcow2");
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&system), "64M"]);
    vm.raw("data.raw", 8);
    vm
}

fn ends(mut process: Process) {
    process.signal(libc::SIGTERM);
    let status = process.wait(TEST_TIMEOUT).expect("ends");
    assert!(status.success(), "{}", process.output());
}

/// Sends a request to the control socket; returns the status and the body.
fn curl(vm: &Vm, arguments: &[&str]) -> (u32, String) {
    let socket = vm.path("control");
    let how = ["-sS", "--unix-socket", text(&socket), "-w", "\n%{http_code}"];
    let said = run_tool("curl", &[&how, arguments].concat());
    let (body, status) = said.rsplit_once('\n').expect("the status is on a line of its own");
    (status.parse().expect("a number"), body.to_owned())
}

fn data_io(vm: &Vm, commands: &[&str]) -> String {
    let uri = format!("nbd+unix:///data?socket={}", text(&vm.path("data.nbd")));
    let commands = commands.iter().flat_map(|command| ["-c", command]);
    run_tool("qemu-io", &["-f", "raw"].into_iter().chain(commands).chain([uri.as_str()]).collect::<Vec<_>>())
}

#[test]
fn one_process_serves_all_disks() {
    let vm = two();
    let process = vm.start();
    let mut guest = FrontEnd::connect(&vm.path("vda"), Options::default()).expect("connects");
    assert_io_works(&mut guest, 1);
    data_io(&vm, &["write -P 9 0 1M", "flush"]);
    assert!(data_io(&vm, &["read -P 9 0 1M"]).contains("read 1048576/1048576"));
    let uri = format!("nbd+unix:///data?socket={}", text(&vm.path("data.nbd")));
    assert!(run_tool("nbdinfo", &[&uri]).contains("the VM's data"));
    let disks = vm.disks();
    let names: Vec<&Value> = disks.iter().map(|disk| &disk["name"]).collect();
    assert_eq!(names, ["vda", "data"]);
    assert_eq!((&disks[0]["format"], &disks[1]["format"]), (&"qcow2".into(), &"raw".into()));
    assert_eq!(disks[0]["cache"]["size"], 16 * MIB);
    assert_eq!(disks[1]["prefetch"]["memory_limit"], 0, "it is off");
    let (code, said) = run_command({
        let mut status = Command::new(larder_path());
        status.arg("status").arg(vm.path("control"));
        status
    });
    assert!(code == Some(0) && said.contains("name:             vda"), "{said}");
    assert_eq!(vm.sockets(), ["control", "data.nbd", "vda"]);
    drop(guest);
    ends(process);
    assert_eq!(vm.sockets(), [""; 0]);
    run_tool("qemu-img", &["check", "-q", text(&vm.images.path().join("system.qcow2"))]);
}

#[test]
fn disk_threads_run_independently() {
    let vm = two();
    let process = vm.start();
    // Each client runs in its own process, concurrently.
    std::thread::scope(|scope| {
        for seed in 1..=2 {
            let vm = &vm;
            scope.spawn(move || match seed {
                1 => {
                    let mut guest = FrontEnd::connect(&vm.path("vda"), Options::default()).expect("connects");
                    (0..200).for_each(|round| assert_io_works(&mut guest, round));
                }
                _ => (0..5).for_each(|_| drop(data_io(vm, &["write -P 3 0 8M", "read -P 3 0 8M"]))),
            });
        }
    });
    ends(process);
}

/// Starts the VM's server as a service; the closure returns the next notification. Descriptors to be stored are
/// accepted.
fn start_as_a_service(vm: &Vm) -> (Process, impl Fn() -> String) {
    start_as_a_service_with(vm, &[])
}

fn start_as_a_service_with(vm: &Vm, options: &[&str]) -> (Process, impl Fn() -> String + use<>) {
    let told = UnixDatagram::bind(vm.path("notify")).expect("binds");
    let mut command = vm.command(options);
    command.env("NOTIFY_SOCKET", vm.path("notify"));
    let process = Process::start(command).expect("larder starts");
    let (heard, news) = mpsc::channel();
    std::thread::spawn(move || {
        let mut buffer = [0; 256];
        while let Ok(count) = told.recv(&mut buffer) {
            let said = String::from_utf8_lossy(&buffer[..count]).into_owned();
            if !said.starts_with("FDSTORE") && heard.send(said).is_err() {
                return;
            }
        }
    });
    let next = move || news.recv_timeout(TEST_TIMEOUT).expect("is told");
    (process, next)
}

#[test]
fn service_manager_gets_ready_and_stopping() {
    let vm = two();
    let (process, next) = start_as_a_service(&vm);
    let ready = next();
    assert!(ready.starts_with("READY=1\n") && ready.contains("STATUS=serving 2 disks"), "{ready}");
    // The server serves before it sends READY.
    let mut guest = FrontEnd::connect(&vm.path("vda"), Options::default()).expect("connects");
    assert_io_works(&mut guest, 1);
    drop(guest);
    assert_eq!(vm.disks().len(), 2);
    ends(process);
    assert_eq!(next(), "STOPPING=1\n");
}

/// Passes sockets to the command as systemd does.
fn hand_over(command: &mut Command, sockets: Vec<OwnedFd>) {
    let count = sockets.len() as i32;
    // SAFETY: between fork and exec only async-signal-safe functions are called: dup2, getpid, and formatting of a
    // number without allocation. The descriptors from 3 on are unused in the child, since the sockets are first moved
    // above them.
    unsafe {
        command.pre_exec(move || {
            for (number, socket) in (200..).zip(&sockets) {
                libc::dup2(socket.as_raw_fd(), number);
            }
            for number in 0..count {
                libc::dup2(200 + number, 3 + number);
                libc::close(200 + number);
            }
            Ok(())
        });
    }
}

fn with_sockets(vm: &Vm, sockets: &[&str]) -> Command {
    // The shell's PID becomes the program's by exec, so $LISTEN_PID is right.
    let mut command = Command::new("sh");
    let script = format!("export LISTEN_PID=$$ LISTEN_FDS={}; exec \"$0\" \"$@\"", sockets.len());
    command.args(["-c", &script]).arg(larder_path()).arg("vm").arg(vm.file());
    command.env("STATE_DIRECTORY", vm.path("state"));
    let sockets = sockets.iter().map(|name| UnixListener::bind(vm.path(name)).expect("binds").into());
    hand_over(&mut command, sockets.collect());
    command
}

/// Sockets from systemd are served, and not removed at the end.
#[test]
fn inherited_sockets_are_served_and_kept() {
    let vm = two();
    let process = Process::start(with_sockets(&vm, &["control", "vda", "data.nbd"])).expect("starts");
    // A client that connects before the server is ready is served once it is.
    let mut guest = FrontEnd::connect(&vm.path("vda"), Options::default()).expect("connects");
    assert_io_works(&mut guest, 1);
    data_io(&vm, &["write -P 9 0 1M"]);
    assert_eq!(vm.disks().len(), 2);
    drop(guest);
    ends(process);
    assert_eq!(vm.sockets(), ["control", "data.nbd", "vda"], "they belong to who made them");

    let vm = two();
    let mut other = Process::start(with_sockets(&vm, &["vdx"])).expect("starts");
    let status = other.wait(TEST_TIMEOUT).expect("ends");
    let said = other.output();
    assert_eq!(status.code(), Some(2), "{said}");
    for word in ["vdx", "this VM has no socket there", text(&vm.path("data.nbd"))] {
        assert!(said.contains(word), "nothing of {word}: {said}");
    }
    let vm = two();
    let mut command = vm.command(&[]);
    command.env("LISTEN_FDS", "3").env("LISTEN_PID", "1");
    let process = Process::start(command).expect("starts");
    process.wait_for(" ready ", TEST_TIMEOUT).expect("those are another one's");
    ends(process);
}

#[test]
fn sockets_get_configured_permissions() {
    support::require_root("to give sockets to others");
    let file = TWO.replace(
        "control = \"control\"\n",
        "control = \"control\"\ncontrol-mode = 0o660\ncontrol-group = \"nogroup\"\n",
    );
    let file =
        file.replace("socket = \"vda\"\n", "socket = \"vda\"\nsocket-mode = \"0600\"\nsocket-owner = \"nobody\"\n");
    let vm = two();
    vm.write(&file);
    let process = vm.start();
    let seen = |name: &str| {
        let found = std::fs::metadata(vm.path(name)).expect("is there");
        (found.permissions().mode() & 0o777, found.uid(), found.gid())
    };
    assert_eq!(seen("control"), (0o660, 0, 65534));
    assert_eq!(seen("vda"), (0o600, 65534, 0));
    ends(process);
}

/// Two VMs whose files have the same name and the same sockets are not taken for each other, whatever is done with the
/// second file.
#[test]
fn path_names_one_vm_alone() {
    let vm = two();
    let process = vm.start();
    let control = format!("control = \"{}\"", text(&vm.path("control")));
    std::fs::create_dir(vm.path("y")).expect("a folder");
    vm.raw("other.raw", 8);
    let image = format!("image = \"{}\"", text(&vm.images.path().join("other.raw")));
    let other = format!("{control}\n[[disk]]\n{image}\nformat = \"raw\"\nsocket = \"vda\"\n");
    std::fs::write(vm.path("y/web.toml"), other).expect("writes");
    for options in [&["--reload"][..], &["--expect"], &["--take"], &["--check"], &[]] {
        let mut command = Command::new(larder_path());
        command.arg("vm").arg(vm.path("y/web.toml")).args(options);
        command.env("STATE_DIRECTORY", vm.path("state"));
        let (code, said) = run_command(command);
        let wanted = format!("serves the VM of {}, not that of ", text(&vm.file()));
        assert!(code == Some(2) && said.contains(&wanted), "{options:?}: {said}");
    }
    assert!(vm.disks().iter().all(|disk| disk["away"] == false));
    // Another spelling of the path is the same file.
    let mut command = Command::new(larder_path());
    command.arg("vm").arg(vm.path("y/../web.toml")).arg("--reload");
    let unchanged = "web: already as configured in its file".to_owned();
    assert_eq!(run_command(command), (Some(0), unchanged));
    // The command in the message works.
    let (_, said) = run_command(vm.command(&[]));
    let command = format!("`larder vm {} --reload`", text(&vm.file()));
    assert!(said.contains(&command), "{said}");
    ends(process);
}

/// If one disk cannot be served, none is, and nothing is left behind.
#[test]
fn all_disks_are_served_or_none() {
    let vm = two();
    std::fs::remove_file(vm.images.path().join("data.raw")).expect("was there");
    let (code, said) = run_command(vm.command(&[]));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("disk data: ") && said.contains("data.raw: No such file"), "{said}");
    assert_eq!(vm.sockets(), [""; 0]);
    // The resources of the first disk were released.
    vm.raw("data.raw", 8);
    let process = vm.start();
    let (code, said) = run_command(vm.command(&[]));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("web is served already, by process "), "{said}");
    assert_eq!(vm.disks().len(), 2, "the other one is as it was");
    ends(process);
}

/// `--check` reports all problems, and changes nothing.
#[test]
fn check_reports_all_problems() {
    let vm = two();
    let before = std::fs::read_dir(vm.images.path()).expect("a folder").count();
    let (code, said) = run_command(vm.command(&["--check"]));
    assert_eq!((code, said.as_str()), (Some(0), "web: 2 disks can be served"));
    assert_eq!(vm.sockets(), [""; 0]);
    assert_eq!(std::fs::read_dir(vm.images.path()).expect("a folder").count(), before);
    std::fs::write(vm.images.path().join("system.qcow2"), b"QFI\xfb\0\0\0\x09").expect("writes");
    std::fs::remove_file(vm.images.path().join("data.raw")).expect("was there");
    let (code, said) = run_command(vm.command(&["--check"]));
    assert_eq!(code, Some(2), "{said}");
    for word in ["system.qcow2", "data.raw: No such file"] {
        assert!(said.contains(word), "nothing of {word}: {said}");
    }
}

#[test]
fn check_covers_sockets_and_caches() {
    let vm = two();
    vm.write(
        &TWO.replace("\"vda\"", "\"IMAGES/data.raw\"")
            .replace("data.nbd", "nowhere/data.nbd")
            .replace("system.cache", "nowhere/system.cache")
            .replace("prefetch = \"off\"", "cache = \"IMAGES/data.raw\"\ncache-size = \"1MiB\""),
    );
    let (code, said) = run_command(vm.command(&["--check"]));
    assert_eq!(code, Some(2), "{said}");
    for what in [
        "data.raw exists and is not a socket",
        "nowhere/data.nbd: there is no directory ",
        "nowhere/system.cache cannot be created: there is no directory ",
        "data.raw is the image ",
    ] {
        assert!(said.contains(what), "nothing of '{what}': {said}");
    }
    vm.write(&TWO.replace("16MiB", "900TiB"));
    let (code, said) = run_command(vm.command(&["--check"]));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("are free in"), "{said}");
}

#[test]
fn check_accepts_served_vm() {
    let vm = two();
    let process = vm.start();
    let (code, said) = run_command(vm.command(&["--check"]));
    let served = "web: 2 disks can be served, and served already";
    assert_eq!((code, said.as_str()), (Some(0), served));
    vm.write(&TWO.replace("data.raw", "gone.raw"));
    let (code, said) = run_command(vm.command(&["--check"]));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("gone.raw: No such file"), "{said}");
    assert!(!said.contains("in use"), "{said}");
    ends(process);
}

/// `--check` finds what would keep the next server from starting also in the disks that the running one serves, and
/// does not disturb that one.
#[test]
fn check_covers_served_disks() {
    let vm = two();
    vm.raw("base.raw", 64);
    let image = |name: &str| vm.images.path().join(name);
    let (base, system) = (image("base.raw"), image("system.qcow2"));
    let backed = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b"];
    run_tool("qemu-img", &[&backed[..], &[text(&base), text(&system)]].concat());
    let backing = "format = \"qcow2\"\nbacking = [{ image = \"IMAGES/base.raw\", format = \"raw\" }]";
    let right = TWO.replace("format = \"qcow2\"", backing);
    vm.write(&right);
    let process = vm.start();
    let mut guest = FrontEnd::connect(&vm.path("vda"), Options::default()).expect("connects");
    assert_io_works(&mut guest, 1);
    let served = (Some(0), "web: 2 disks can be served, and served already".to_owned());
    let check = || run_command(vm.command(&["--check"]));
    assert_eq!(check(), served);
    let wrong_format = right.replace("base.raw\", format = \"raw\"", "base.raw\", format = \"qcow2\"");
    for (file, wanted) in [
        (TWO.to_owned(), "which the VM's file does not name"),
        (wrong_format, "the format raw, but the VM's file gives qcow2"),
        (right.replace("format = \"qcow2\"\n", ""), "the VM's file does not give its format"),
        (right.replace("16MiB", "32MiB"), "it has 16 MiB, not 32 MiB"),
    ] {
        vm.write(&file);
        let (code, said) = check();
        assert!(code == Some(2) && said.contains(wanted), "{wanted}: {said}");
        assert!(!said.contains("in use"), "{said}");
    }
    vm.write(&right);
    for name in ["system.qcow2", "data.raw", "base.raw"] {
        std::fs::rename(image(name), image("away")).expect("is there");
        let (code, said) = check();
        std::fs::rename(image("away"), image(name)).expect("is there");
        let wanted = format!("{name}: No such file");
        assert!(code == Some(2) && said.contains(&wanted), "{name}: {said}");
    }
    assert_eq!(check(), served);
    assert_io_works(&mut guest, 2);
    drop(guest);
    ends(process);
}

/// A file that is a cache and something else is refused by the check, by a start and by a reload, before anything is
/// written to it.
#[test]
fn cache_of_two_purposes_is_refused() {
    let vm = two();
    let image = |name: &str| vm.images.path().join(name);
    let data = vm.images.path().join("data.raw");
    let mut content = vec![0; 8 * MIB as usize];
    content[2 * MIB as usize..].fill(7);
    std::fs::write(&data, &content).expect("writes");
    run_tool("qemu-img", &["create", "-q", "-f", "raw", text(&image("base.raw")), "64M"]);
    let (base, system) = (image("base.raw"), image("system.qcow2"));
    let backed = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b"];
    run_tool("qemu-img", &[&backed[..], &[text(&base), text(&system)]].concat());
    let backing = "format = \"qcow2\"\nbacking = [{ image = \"IMAGES/base.raw\", format = \"raw\" }]";
    let right = TWO.replace("format = \"qcow2\"", backing);
    let at = |cache: &str| right.replace("cache = \"IMAGES/system.cache\"\ncache-size = \"16MiB\"", cache);
    let twice =
        right.replace("prefetch = \"off\"", "cache = \"IMAGES/../IMAGES/system.cache\"\ncache-size = \"16MiB\"");
    let twice =
        twice.replace("/../IMAGES", &format!("/../{}", text(Path::new(vm.images.path().file_name().expect("a name")))));
    let wrong = [
        (at("cache = \"IMAGES/data.raw\""), "is the cache of disk vda and the image of disk data"),
        (at("cache = \"IMAGES/base.raw\""), "is a backing file of disk vda and the cache of disk vda"),
        (twice, "is the cache of disk vda and the cache of disk data"),
    ];
    let refused = |options: &[&str]| {
        for (file, wanted) in &wrong {
            vm.write(file);
            let (code, said) = run_command(vm.command(options));
            assert!(code == Some(2) && said.contains(wanted), "{options:?}: {wanted}: {said}");
            assert!(std::fs::read(&data).expect("reads") == content, "{options:?}: {wanted}");
            assert!(!image("system.cache").exists(), "{options:?}: {wanted}");
        }
    };
    refused(&["--check"]);
    refused(&[]);
    refused(&["--confine"]);
    vm.write(&at(""));
    let process = vm.start();
    refused(&["--reload"]);
    ends(process);
}

/// `larder status` lists VMs that are not served, with the error in their file.
#[test]
fn status_lists_unserved_vms() {
    require_root("to be a user with files of his own");
    let folder = temp_dir_on_tmpfs();
    let files = folder.path().join("larder/vms");
    std::fs::create_dir_all(&files).expect("a folder");
    std::fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("a folder for all");
    let disk = "[[disk]]\nimage = \"/nowhere\"\nformat = \"raw\"\n";
    std::fs::write(files.join("100.toml"), disk).expect("writes");
    std::fs::write(files.join("web.toml"), format!("bogus = 1\n{disk}")).expect("writes");
    let status = |arguments: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", "65534", "--regid", "65534", "--clear-groups"]);
        command.arg(larder_path()).arg("status").args(arguments);
        command.env("XDG_CONFIG_HOME", folder.path()).env_remove("XDG_RUNTIME_DIR");
        run_command(command)
    };
    let (code, said) = status(&[]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("not served") && said.contains("invalid file"), "{said}");
    assert!(said.contains("web.toml:1:1: unknown key 'bogus'"), "{said}");
    // The word is the name of a VM, not an interval.
    let (code, said) = status(&["100"]);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("`larder vm 100` serves it"), "{said}");
    let (_, said) = status(&["web"]);
    assert!(said.contains("its file is invalid: "), "{said}");
}

/// A service with an invalid file exits with 78, and is not restarted; one that cannot start exits with 2.
#[test]
fn service_exit_status_controls_restart() {
    let vm = two();
    std::fs::remove_file(vm.images.path().join("data.raw")).expect("was there");
    let as_a_service = |vm: &Vm| {
        let mut command = vm.command(&[]);
        command.env("NOTIFY_SOCKET", vm.path("notify"));
        run_command(command)
    };
    let _told = UnixDatagram::bind(vm.path("notify")).expect("binds");
    let (code, said) = as_a_service(&vm);
    assert_eq!(code, Some(2), "{said}");
    vm.write("bogus = 1");
    let (code, said) = as_a_service(&vm);
    assert_eq!(code, Some(78), "{said}");
    assert!(said.contains("unknown key 'bogus'"), "{said}");
}

#[test]
fn simultaneous_signals_are_one_stop() {
    let vm = two();
    let mut process = vm.start();
    process.signal(libc::SIGINT);
    process.signal(libc::SIGTERM);
    let status = process.wait(TEST_TIMEOUT).expect("ends");
    assert!(status.success(), "{}", process.output());
}
