//! `larder vm --confine`: the rights that a server has given up once it serves, and that it works without them.

use std::fs;
use std::io;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use larder_bench::campaign::front_end::queue::Request;
use larder_bench::campaign::front_end::ring::Buffer;
use larder_bench::campaign::process::killed_with_parent;

use crate::support::{larder_path, require_root, temp_dir_on_tmpfs, test_pattern};
use crate::{
    FrontEnd, Options, Process, TEST_TIMEOUT, TWO, Vm, assert_io_works, curl, data_io, ends, own_folder, run_command,
    run_tool, start_as_a_service_with, text, two,
};

const CONFINED: &[&str] = &["--confine"];

fn start(vm: &Vm) -> Process {
    let process = Process::start(vm.command(CONFINED)).expect("larder starts");
    process.wait_for(" ready ", TEST_TIMEOUT).expect("it serves");
    process
}

fn reload(vm: &Vm) -> (Option<i32>, String) {
    run_command(vm.command(&["--reload"]))
}

/// Returns all threads of a process, with their names.
pub(crate) fn threads(process: u32) -> Vec<(i32, String)> {
    let tasks = fs::read_dir(format!("/proc/{process}/task")).expect("it runs");
    let thread = |entry: io::Result<fs::DirEntry>| -> Option<(i32, String)> {
        let entry = entry.ok()?;
        // A thread that has ended meanwhile has no name.
        let name = fs::read_to_string(entry.path().join("comm")).ok()?;
        Some((entry.file_name().to_str()?.parse().ok()?, name.trim_end().to_owned()))
    };
    tasks.filter_map(thread).collect()
}

/// Returns a thread's status file in /proc.
fn all_of(process: u32, thread: i32) -> String {
    fs::read_to_string(format!("/proc/{process}/task/{thread}/status")).expect("it runs")
}

/// Returns one field of a thread's status.
pub(crate) fn status(process: u32, thread: i32, field: &str) -> String {
    let all = all_of(process, thread);
    let value = all.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(":\t"));
    value.unwrap_or_else(|| panic!("no {field}")).to_owned()
}

/// With `--confine`, the check refuses what a confined server refuses.
#[test]
fn check_follows_confined_servers_rules() {
    require_root("to have another user's link");
    let vm = two();
    let link = vm.images.path().join("link.raw");
    std::os::unix::fs::symlink(vm.images.path().join("data.raw"), &link).expect("links");
    let check = || run_command(vm.command(&["--check", "--confine"]));
    vm.write(&TWO.replace("data.raw", "link.raw"));
    assert_eq!(check(), (Some(0), "web: 2 disks can be served".to_owned()));
    std::os::unix::fs::lchown(&link, Some(12345), None).expect("root may");
    let wanted = "belongs to user 12345, who could redirect it to any file of this host";
    for (code, said) in [check(), run_command(vm.command(CONFINED))] {
        assert!(code == Some(2) && said.contains(wanted), "{said}");
    }
    // The lines for a chain are those of a check without --confine.
    let (base, system) = (vm.images.path().join("base.raw"), vm.images.path().join("system.qcow2"));
    run_tool("qemu-img", &["create", "-q", "-f", "raw", text(&base), "64M"]);
    let backed = ["create", "-q", "-f", "qcow2", "-F", "raw", "-b", text(&base)];
    run_tool("qemu-img", &[&backed[..], &[text(&system)]].concat());
    vm.write(TWO);
    let (code, said) = check();
    let line = format!("backing = [{{ image = \"{}\", format = \"raw\" }}]", text(&base));
    assert!(code == Some(2) && said.contains(&line), "{said}");
}

/// A file that was given by a relative path stays the same file once the server is confined.
#[test]
fn confined_reload_finds_relative_file() {
    let vm = two();
    fs::copy(vm.images.path().join("data.raw"), vm.path("data.raw")).expect("is copied");
    vm.write("control = \"control\"\n[[disk]]\nimage = \"data.raw\"\nformat = \"raw\"\nsocket = \"vda\"\n");
    let command = |options: &[&str]| {
        let mut command = std::process::Command::new(crate::support::larder_path());
        command.arg("vm").arg("./web.toml").args(options);
        command.current_dir(vm.folder.path()).env("STATE_DIRECTORY", vm.path("state"));
        command
    };
    let process = Process::start(command(CONFINED)).expect("larder starts");
    process.wait_for(" ready ", TEST_TIMEOUT).expect("it serves");
    let unchanged = (Some(0), "web: already as configured in its file".to_owned());
    assert_eq!(run_command(command(&["--reload"])), unchanged);
    assert_eq!(reload(&vm), unchanged);
    ends(process);
}

#[test]
fn every_thread_has_dropped_its_rights() {
    require_root("to have rights to give up");
    let vm = two();
    let process = start(&vm);
    let mut guest = FrontEnd::connect(&vm.path("vda"), Options::default()).expect("connects");
    assert_io_works(&mut guest, 1);
    data_io(&vm, &["write -P 9 0 1M", "flush"]);
    let all = threads(process.id());
    for name in ["larder", "larder-disk", "larder-control", "larder-signals", "larder-notify"] {
        assert!(all.iter().any(|(_, it)| it == name), "{name}: {all:?}");
    }
    for (thread, name) in all {
        let is = |field, value: &str| assert_eq!(status(process.id(), thread, field), value, "{field} of {name}");
        is("NoNewPrivs", "1");
        is("Seccomp", "2");
        is("Seccomp_filters", "2");
        // The kernel's worker threads may be older; they make no calls, and execute requests with the requester's
        // rights.
        if !name.starts_with("iou-") {
            let sets = all_of(process.id(), thread);
            let sets: Vec<&str> = sets.lines().filter(|line| line.starts_with("Cap")).collect();
            assert_eq!(sets.len(), 5, "{sets:?}");
            assert!(sets.iter().all(|set| set.ends_with(":\t0000000000000000")), "{name}: {sets:?}");
        }
    }
    drop(guest);
    ends(process);
}

#[cfg(target_arch = "x86_64")]
mod taken_over {
    use super::*;
    use crate::attacker::{Argument, Victim, number, path};

    /// Another VM's server, with the same user and the same directory of notes.
    struct Other {
        process: Process,
        image: PathBuf,
        note: PathBuf,
        journal: PathBuf,
        _vm: Vm,
    }

    fn other(state: &Path) -> Other {
        let vm = two();
        let mut command = vm.command(&[]);
        command.env("STATE_DIRECTORY", state);
        let process = Process::start(command).expect("larder starts");
        process.wait_for(" ready ", TEST_TIMEOUT).expect("it serves");
        let notes = fs::read_dir(own_folder(state).join("caches")).expect("a folder").flatten();
        let note = notes.map(|note| note.path()).find(|path| path.extension().is_none());
        let maps = fs::read_to_string(format!("/proc/{}/maps", process.id())).expect("it runs");
        let journal = maps.split_whitespace().find(|word| word.ends_with(".journal"));
        Other {
            image: vm.images.path().join("data.raw"),
            note: note.expect("there is a note"),
            journal: journal.expect("there is a journal").into(),
            process,
            _vm: vm,
        }
    }

    /// Returns an attacker's next steps: name, system call, and arguments.
    fn attacks(other: &Other) -> Vec<(&'static str, libc::c_long, Vec<Argument>)> {
        let id = other.process.id();
        let open = |place: &str, flags: i32| vec![number(libc::AT_FDCWD), path(place), number(flags)];
        let read = |place: &Path| open(text(place), libc::O_RDONLY);
        let memory = vec![number(libc::AT_FDCWD), path(&format!("/proc/{id}/mem")), number(libc::O_RDWR)];
        let socket = |family: i32, kind: i32| vec![number(family), number(kind), number(0)];
        let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let executable = libc::PROT_READ | libc::PROT_EXEC;
        let nothing = Argument::Bytes(vec![0; 16]);
        let calls = [
            ("another VM's image", libc::SYS_openat, read(&other.image)),
            ("another VM's note", libc::SYS_openat, read(&other.note)),
            ("another VM's journal", libc::SYS_openat, read(&other.journal)),
            ("a file of the host", libc::SYS_openat, read(Path::new("/etc/passwd"))),
            ("the list of files", libc::SYS_openat, open("/", libc::O_RDONLY | libc::O_DIRECTORY)),
            ("a new file", libc::SYS_openat, {
                let mut new = open("/tmp", libc::O_TMPFILE | libc::O_RDWR);
                new.push(number(0o600));
                new
            }),
            ("another VM's memory", libc::SYS_openat, memory),
            ("a signal to another VM", libc::SYS_kill, vec![number(id), number(0)]),
            ("a signal to its thread", libc::SYS_tgkill, vec![number(id), number(id), number(0)]),
            ("netlink", libc::SYS_socket, socket(libc::AF_NETLINK, libc::SOCK_RAW)),
            ("packets", libc::SYS_socket, socket(libc::AF_PACKET, libc::SOCK_RAW)),
            ("the sockets of other VMs", libc::SYS_socket, socket(libc::AF_UNIX, libc::SOCK_STREAM)),
            ("the network", libc::SYS_socket, socket(libc::AF_INET, libc::SOCK_STREAM)),
            (
                "code",
                libc::SYS_mmap,
                vec![number(0), number(4096), number(executable), number(anonymous), number(-1), number(0)],
            ),
            ("the kernel's log", libc::SYS_syslog, vec![number(10), number(0), number(0)]),
            ("a new namespace's check", libc::SYS_unshare, vec![number(0)]),
            ("io_uring", libc::SYS_io_uring_setup, vec![number(1), Argument::Bytes(vec![0; 120])]),
            (
                "another VM's memory at once",
                libc::SYS_process_vm_readv,
                vec![number(id), nothing.clone(), number(0), nothing.clone(), number(0), number(0)],
            ),
        ];
        calls.to_vec()
    }

    /// Returns the results of the attacks in each thread.
    fn answers(process: &Process, other: &Other) -> Vec<(String, i64)> {
        let victim = Victim::new(process.id());
        let mut answers = Vec::new();
        // A thread that only writes a note may end meanwhile.
        'threads: for (thread, name) in victim.threads() {
            for (what, call, arguments) in attacks(other) {
                let Some(answer) = victim.call(thread, call, &arguments) else {
                    continue 'threads;
                };
                answers.push((format!("{what}, from {name}"), answer));
            }
            // The path does not exist, so that nothing is started where the call is allowed.
            let arguments = [path("/nosuch"), number(0), number(0)];
            let Some(execve) = victim.call(thread, libc::SYS_execve, &arguments) else {
                continue;
            };
            let is_refused = execve == i64::from(-libc::EPERM);
            assert!(is_refused || execve == i64::from(-libc::ENOENT), "{execve}");
            answers.push((format!("a program, from {name}"), if is_refused { execve } else { 0 }));
        }
        // Only one thread tries this, since a traced process cannot be traced again.
        let seize = [number(libc::PTRACE_SEIZE), number(other.process.id()), number(0), number(0)];
        let traced = victim.call(process.id() as i32, libc::SYS_ptrace, &seize);
        let traced = traced.expect("its first thread stays");
        answers.push(("tracing".to_owned(), traced));
        answers
    }

    /// An allocation past the limit of private memory is refused, and the server continues.
    #[test]
    fn memory_past_limit_is_refused() {
        let vm = two();
        let mapping = [
            number(0),
            number(1_i64 << 40),
            number(libc::PROT_READ | libc::PROT_WRITE),
            number(libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE),
            number(-1),
            number(0),
        ];
        let answer = |process: &Process| {
            let victim = Victim::new(process.id());
            victim.call(process.id() as i32, libc::SYS_mmap, &mapping)
        };
        let free = vm.start();
        assert!(answer(&free) > Some(0), "nothing would be shown by its failure");
        drop(free);
        let process = start(&vm);
        assert_eq!(answer(&process), Some(i64::from(-libc::ENOMEM)));
        let mut guest = FrontEnd::connect(&vm.path("vda"), Options::default()).expect("connects");
        assert_io_works(&mut guest, 1);
        drop(guest);
        ends(process);
    }

    /// An attacker who has taken over a confined server reaches no other file, process or socket.
    #[test]
    fn confined_server_reaches_nothing_else() {
        require_root("to take a server over");
        let state = temp_dir_on_tmpfs();
        let server = |options: &[&str]| {
            let vm = two();
            let mut command = vm.command(options);
            command.env("STATE_DIRECTORY", state.path());
            let process = Process::start(command).expect("larder starts");
            process.wait_for(" ready ", TEST_TIMEOUT).expect("it serves");
            (vm, process)
        };
        let other = other(state.path());

        let (_vm, free) = server(&[]);
        for (what, answer) in answers(&free, &other) {
            assert!(answer >= 0, "{what}: {answer}; nothing would be shown by its failure");
        }
        drop(free);

        let (vm, process) = server(CONFINED);
        let answers = answers(&process, &other);
        assert!(answers.len() > 5 * 18, "of all threads: {answers:?}");
        for (what, answer) in answers {
            let refused = [-libc::EPERM, -libc::EACCES].map(i64::from);
            assert!(refused.contains(&answer), "{what}: {answer}");
        }
        // The other server is unharmed.
        let mut guest = FrontEnd::connect(&vm.path("vda"), Options::default()).expect("connects");
        assert_io_works(&mut guest, 1);
        drop(guest);
        ends(process);
        ends(other.process);
    }
}

/// Returns the soft limit of a process's private memory in bytes; `None` if there is none.
fn data_limit(process: u32) -> Option<u64> {
    let limits = fs::read_to_string(format!("/proc/{process}/limits")).expect("it runs");
    let line = limits.lines().find_map(|line| line.strip_prefix("Max data size"));
    let soft = line.and_then(|line| line.split_whitespace().next()).expect("a limit");
    (soft != "unlimited").then(|| soft.parse().expect("a number"))
}

/// A server has a limit of private memory with room for all of its work, and the limit grows with a larger cache.
#[test]
fn confined_servers_private_memory_is_limited() {
    let vm = two();
    let free = vm.start();
    assert_eq!(data_limit(free.id()), None);
    ends(free);

    let process = start(&vm);
    let limit = data_limit(process.id()).expect("there is a limit");
    let mut guest = FrontEnd::connect(&vm.path("vda"), Options::default()).expect("connects");
    assert_io_works(&mut guest, 1);
    data_io(&vm, &["write -P 9 0 4M", "flush"]);
    let used = status(process.id(), process.id() as i32, "VmData");
    let used: u64 = used.trim_end_matches(" kB").trim().parse().expect("a number");
    assert!(limit > used * 1024 + (1 << 30), "{limit} bytes, {used} kB used");

    vm.write(&TWO.replace("system.cache", "another.cache").replace("16MiB", "256MiB"));
    let (code, said) = reload(&vm);
    assert_eq!(code, Some(0), "{said}");
    let raised = data_limit(process.id()).expect("there is a limit");
    assert!(raised > limit, "{raised} after {limit}");
    assert_io_works(&mut guest, 2);
    drop(guest);
    ends(process);
}

/// An NBD server for an image, on its own port.
struct NbdServer {
    image: PathBuf,
    port: u16,
    process: Process,
}

impl NbdServer {
    fn new(image: &Path) -> Self {
        // The port was free a moment ago.
        let taken = TcpListener::bind("127.0.0.1:0").expect("binds");
        let port = taken.local_addr().expect("has one").port();
        drop(taken);
        Self { process: Self::start(image, port), image: image.to_owned(), port }
    }

    fn start(image: &Path, port: u16) -> Process {
        let mut command = killed_with_parent("qemu-nbd");
        let port = port.to_string();
        command.args(["-t", "-f", "raw", "-b", "127.0.0.1", "-p", &port, "-e", "8"]).arg(image);
        let process = Process::start(command).expect("qemu-nbd starts; testbed/setup.sh installs what the tests need");
        let port = port.parse().expect("a number");
        while TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_err() {
            assert!(!process.has_ended(), "{}", process.output());
            std::thread::sleep(Duration::from_millis(5));
        }
        process
    }

    fn start_again(&mut self) {
        self.process.kill();
        self.process = Self::start(&self.image, self.port);
    }
}

/// Adds a third disk, on an NBD server that is given by a host name.
fn with_remote(vm: &Vm, port: u16) {
    vm.write(&format!(
        "{TWO}\n[[disk]]\nname = \"far\"\nimage = \"nbd://localhost:{port}/\"\nformat = \"raw\"\nnbd = \"nbd+unix:///far?socket=far.nbd\"\n"
    ));
}

fn far_io(vm: &Vm, commands: &[&str]) -> String {
    let uri = format!("nbd+unix:///far?socket={}", text(&vm.path("far.nbd")));
    let mut all = vec!["-f", "raw"];
    commands.iter().for_each(|command| all.extend(["-c", command]));
    all.push(&uri);
    run_tool("qemu-io", &all)
}

#[test]
fn confined_server_reconnects_to_nbd() {
    let vm = two();
    vm.raw("far.raw", 8);
    let mut server = NbdServer::new(&vm.images.path().join("far.raw"));
    with_remote(&vm, server.port);
    let process = start(&vm);
    far_io(&vm, &["write -P 7 0 1M", "flush"]);
    server.start_again();
    assert!(far_io(&vm, &["read -P 7 0 1M", "write -P 8 1M 1M", "flush"]).contains("read 1048576/1048576"));
    ends(process);
    assert_eq!(vm.sockets(), [""; 0]);
}

/// Returns all files in a directory and its subdirectories.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut all = Vec::new();
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        match entry.path() {
            path if path.is_dir() => all.extend(files(&path)),
            path => all.push(path),
        }
    }
    all.sort();
    all
}

#[test]
fn confined_server_removes_its_files() {
    let vm = two();
    // Outside the sockets' directory, where the server has more rights.
    let state = vm.images.path().join("state");
    let mut command = vm.command(CONFINED);
    command.env("STATE_DIRECTORY", &state);
    let process = Process::start(command).expect("larder starts");
    process.wait_for(" ready ", TEST_TIMEOUT).expect("it serves");
    let mut guest = FrontEnd::connect(&vm.path("vda"), Options::default()).expect("connects");
    assert_io_works(&mut guest, 1);
    let maps = fs::read_to_string(format!("/proc/{}/maps", process.id())).expect("it runs");
    let journal = maps.split_whitespace().find(|word| word.ends_with(".journal"));
    let journal = PathBuf::from(journal.expect("there is one"));
    drop(guest);
    assert!(files(&state).len() == 1, "there is a note");
    ends(process);
    assert!(!journal.exists(), "{journal:?}");
    assert_eq!(files(&state), [""; 0].map(PathBuf::from));
    assert_eq!(files(vm.folder.path()), [vm.file()]);
}

/// Other VMs' directories cost a start no request to the process that opens files, however many there are.
#[test]
fn start_opens_nothing_of_other_vms() {
    let vm = two();
    let runtime = temp_dir_on_tmpfs();
    for other in 0..100 {
        let journals = runtime.path().join(format!("private/other-{other}/journals"));
        fs::create_dir_all(&journals).expect("creates");
        fs::write(journals.join("qcow2-1-1.journal"), "").expect("writes");
    }
    let plain = vm.command(CONFINED);
    let trace = vm.path("trace");
    let mut command = Command::new("strace");
    command.args(["-D", "-f", "-qq", "-e", "trace=open,openat,openat2", "-o", text(&trace)]);
    command.arg(plain.get_program()).args(plain.get_args());
    command.env("STATE_DIRECTORY", vm.path("state"));
    command.env("RUNTIME_DIRECTORY", runtime.path());
    let process = Process::start(command).expect("strace starts");
    process.wait_for(" ready ", TEST_TIMEOUT).expect("it serves");
    ends(process);
    let trace = fs::read_to_string(&trace).expect("is traced");
    assert!(trace.contains(".journal\""), "it has a journal of its own");
    let others: Vec<&str> = trace.lines().filter(|call| call.contains("other-")).collect();
    assert!(others.is_empty(), "{} calls, first {}", others.len(), others[0]);
}

/// Asserts that a guest reads the data that [`assert_io_works`] has written.
fn holds(guest: &mut FrontEnd, seed: u64) {
    let data = guest.data();
    let into = [Buffer { address: data, len: 4096 }];
    assert_eq!(guest.queue().run(&Request::read(8, &into)).expect("reads").status, 0);
    assert_eq!(guest.memory.read_vec(data, 4096), test_pattern(seed, 4096));
}

#[test]
fn dirty_cache_survives_kill_when_confined() {
    let vm = two();
    vm.write(&TWO.replace("cache-size", "cache-mode = \"wb\"\ncache-size"));
    for (round, options) in [(1, CONFINED), (2, CONFINED), (3, &[] as &[&str])] {
        let mut process = Process::start(vm.command(options)).expect("larder starts");
        process.wait_for(" ready ", TEST_TIMEOUT).expect("it serves");
        let mut guest = FrontEnd::connect(&vm.path("vda"), Options::default()).expect("connects");
        if round > 1 {
            holds(&mut guest, round - 1);
        }
        assert_io_works(&mut guest, round);
        if round < 3 {
            process.kill();
        } else {
            drop(guest);
            ends(process);
        }
    }
}

/// Returns a VM's file with one disk, which has a write-back cache.
fn with_cache(cache: &str) -> String {
    format!(
        r#"
control = "control"

[[disk]]
name = "data"
image = "IMAGES/data.raw"
format = "raw"
nbd = "nbd+unix:///data?socket=data.nbd"
prefetch = "off"
cache = "IMAGES/{cache}"
cache-size = "4MiB"
cache-mode = "wb"
"#
    )
}

/// A dirty cache that the VM's file no longer names is no missing one: the start and `--check` give advice that works.
#[test]
fn unnamed_dirty_cache_is_explained() {
    let vm = Vm::new(&with_cache("old.cache"));
    vm.raw("data.raw", 8);
    let at = |name: &str| vm.images.path().join(name);
    let reads = |pattern: u8| {
        let said = data_io(&vm, &[&format!("read -P {pattern} 0 1M")]);
        assert!(!said.contains("failed"), "{said}");
    };
    let is_refused = |unnamed: &str| {
        let unnamed = at(unnamed);
        let flush = format!("`larder disk cache flush {}`", text(&unnamed));
        let key = format!("(add cache = \"{}\" to the VM's file)", text(&unnamed));
        let (code, said) = run_command(vm.command(CONFINED));
        assert!(code == Some(2) && said.contains(&flush) && said.contains(&key), "{said}");
        assert!(!said.contains("is not there now"), "{said}");
        let (code, said) = run_command(vm.command(&["--check"]));
        assert!(code == Some(2) && said.contains(&flush), "{said}");
    };
    let mut process = start(&vm);
    data_io(&vm, &["write -P 5 0 1M", "flush"]);
    process.kill();
    vm.write(&with_cache("new.cache"));
    is_refused("old.cache");
    assert!(!at("new.cache").exists());
    vm.write(&with_cache("old.cache"));
    let (code, said) = run_command(vm.command(&["--check"]));
    assert!(code == Some(0) && said.contains("web: 1 disk can be served"), "{said}");
    let mut process = start(&vm);
    reads(5);

    // A reload replaces the cache, and then the file names the old one again.
    vm.write(&with_cache("new.cache"));
    let (code, said) = reload(&vm);
    assert_eq!(code, Some(0), "{said}");
    data_io(&vm, &["write -P 6 0 1M", "flush"]);
    process.kill();
    vm.write(&with_cache("old.cache"));
    is_refused("new.cache");
    let mut flush = Command::new(larder_path());
    flush.args(["disk", "cache", "flush", text(&at("new.cache"))]);
    flush.env("STATE_DIRECTORY", vm.path("state"));
    let (code, said) = run_command(flush);
    assert_eq!(code, Some(0), "{said}");
    let process = start(&vm);
    reads(6);
    ends(process);
}

/// A confined server rereads its file, and opens the files that the new version names, but no others.
#[test]
fn confined_server_reloads_its_file() {
    let vm = two();
    let (process, next) = start_as_a_service_with(&vm, CONFINED);
    assert!(next().starts_with("READY=1"));
    assert_eq!(reload(&vm), (Some(0), "web: already as configured in its file".to_owned()));
    assert!(next().starts_with("RELOADING=1") && next().starts_with("READY=1"));

    // A file that the VM's file does not name is not opened, whichever client asks.
    let new = vm.images.path().join("another.cache");
    let with = format!("{{\"with\":\"{}\"}}", text(&new));
    let (status, said) = curl(&vm, &["-X", "POST", "-d", &with, "http://x/v1/disks/vda/cache/replace"]);
    assert!(status == 409 && said.contains("the VM's file does not name it") && !new.exists(), "{status} {said}");

    let more = "[[disk]]\nname = \"more\"\nimage = \"IMAGES/data.raw\"\nformat = \"raw\"\nsocket = \"more\"\n";
    let changed = TWO.replace("iops-total = 1000000", "iops-total = 5000");
    let changed = changed.replace("system.cache", "another.cache");
    vm.write(&format!("{changed}\n{more}"));
    let (code, said) = reload(&vm);
    assert_eq!(code, Some(1), "{said}");
    for part in [
        "changed disk data: limits: iops-total=5000",
        &format!("changed disk vda: cache: {}", text(&new)),
        "pending disk more: it is new, and this server is confined: it is served when the VM's server is restarted",
    ] {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(!said.contains("failed") && new.exists(), "{said}");
    vm.write("[[disk]]\n");
    let (code, said) = reload(&vm);
    assert!(code == Some(2) && said.contains("this disk has no image"), "{said}");

    // SIGHUP does the same.
    vm.write(&TWO.replace("system.cache", "another.cache"));
    process.signal(libc::SIGHUP);
    process.wait_for("the VM's file was reloaded: 1 changed", TEST_TIMEOUT).expect("it says so");
    // Clients cannot pass the names of files to open.
    let (status, said) = curl(&vm, &["-X", "POST", "-d", "[[disk]]", "http://x/v1/reload"]);
    assert!(status == 400 && said.contains("send no body"), "{status} {said}");
    let (_, server) = curl(&vm, &["http://x/v1"]);
    assert!(server.contains("\"confined\":true"), "{server}");
    ends(process);
}

#[test]
fn confined_reload_knows_socket_owners() {
    require_root("to give sockets to others");
    let vm = two();
    vm.write(&TWO.replace("serial", "socket-owner = \"nobody\"\nsocket-group = \"nogroup\"\nserial"));
    let process = start(&vm);
    assert_eq!(reload(&vm), (Some(0), "web: already as configured in its file".to_owned()));
    ends(process);
}

/// Returns systemd's exposure level of a service, from 0 to 10.
fn exposure(unit: &str) -> f64 {
    let unit = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/systemd").join(unit);
    let said = run_tool("systemd-analyze", &["security", "--no-pager", "--offline=yes", text(&unit)]);
    let overall = said.lines().find_map(|line| line.split_once("Overall exposure level for "));
    let level = overall.and_then(|(_, rest)| rest.split_whitespace().nth(1));
    level.and_then(|level| level.parse().ok()).unwrap_or_else(|| panic!("no level: {said}"))
}

#[test]
fn services_have_low_exposure_level() {
    for (unit, most) in [("larder@.service", 1.4), ("larder-host.service", 0.9)] {
        let level = exposure(unit);
        assert!(level <= most, "{unit}: {level}");
    }
}
