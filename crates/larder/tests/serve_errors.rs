//! Errors and messages of `larder disk serve`.

mod support;

use std::ffi::OsStr;
use std::fs::{self, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use larder_bench::campaign::front_end::queue::Request;
use larder_bench::campaign::front_end::ring::Buffer;
use larder_bench::campaign::front_end::{FrontEnd, Options};
use larder_bench::campaign::process::{Process, install_program};
use larder_bench::campaign::server::Server;
use support::{
    TEST_TIMEOUT, assert_io_works, create_image, disk_serve_command, larder_path, require_root, run_command, run_tool,
    start_server, temp_dir_on_disk, temp_dir_on_tmpfs, test_pattern,
};

const MIB: u64 = 1 << 20;

fn text(path: &Path) -> &str {
    path.to_str().expect("UTF-8")
}

/// Asserts that `larder disk serve` with these arguments fails with all of `words` in its output.
fn refused(arguments: &[&str], words: &[&str]) -> String {
    let (code, said) = run_command(disk_serve_command(arguments));
    assert_eq!(code, Some(2), "{arguments:?}: {said}");
    for word in words {
        assert!(said.contains(word), "{arguments:?} says nothing of '{word}': {said}");
    }
    assert!(!said.contains("panicked"), "{said}");
    assert!(!said.contains(": read ahead "), "nothing was: {said}");
    said
}

#[test]
fn unsuitable_image_is_refused_with_reason() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let socket = sockets.path().join("s");
    let serve = |image: &Path, words: &[&str]| {
        refused(&[text(image), "--socket", text(&socket)], words);
        assert!(!socket.exists(), "no socket is left behind");
    };
    let missing = folder.path().join("missing.raw");
    serve(&missing, &["missing.raw", "No such file", "create the image first"]);
    serve(folder.path(), &[text(folder.path()), "directory"]);
    let fifo = folder.path().join("fifo");
    run_tool("mkfifo", &[text(&fifo)]);
    serve(&fifo, &["fifo", "FIFO"]);
    serve(Path::new("/dev/zero"), &["/dev/zero", "character device"]);
    let empty = folder.path().join("empty.raw");
    fs::File::create(&empty).expect("a file");
    serve(&empty, &["empty.raw", "is empty", "truncate -s"]);
    for (format, name, options) in [
        ("vmdk", "VMDK", &[][..]),
        ("vdi", "VDI", &[]),
        ("vhdx", "VHDX", &[]),
        ("vpc", "VPC", &[]),
        ("qed", "QED", &[]),
        ("parallels", "Parallels", &[]),
        ("luks", "LUKS", &["--object", "secret,id=s,data=x", "-o", "key-secret=s,iter-time=10"]),
    ] {
        let image = folder.path().join(format!("a.{format}"));
        let create = [&["create", "-q", "-f", format], options, &[text(&image), "1M"]].concat();
        run_tool("qemu-img", &create);
        let looks = format!("a.{format} looks like a {name} image");
        serve(&image, &[&looks, "qemu-img convert -O qcow2", "--format raw"]);
    }
    let bound = folder.path().join("bound");
    let _listener = UnixListener::bind(&bound);
    if bound.exists() {
        serve(&bound, &["bound"]);
    }
}

#[test]
fn missing_permission_is_reported() {
    require_root("to run larder as nobody");
    let folder = tempfile::tempdir().expect("a folder");
    fs::set_permissions(folder.path(), Permissions::from_mode(0o755)).expect("chmod");
    let program = folder.path().join("larder");
    install_program(larder_path(), &program);
    let disk = create_image(folder.path(), MIB);
    fs::set_permissions(&disk, Permissions::from_mode(0o644)).expect("chmod");
    let as_nobody = |socket: &str| {
        let mut command = Command::new(&program);
        command.args(["disk", "serve", text(&disk), "--socket", socket]).uid(65534).gid(65534);
        run_command(command)
    };
    let (code, said) = as_nobody("/tmp/never");
    assert_eq!(code, Some(2), "{said}");
    for word in ["Permission denied", "read and write permission", "--read-only"] {
        assert!(said.contains(word), "{said}");
    }
    fs::set_permissions(&disk, Permissions::from_mode(0o666)).expect("chmod");
    let (code, said) = as_nobody(text(&folder.path().join("s")));
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("may not write to its directory"), "{said}");
}

/// A disk in use by QEMU is refused, and QEMU refuses a disk that Larder serves.
#[test]
fn locks_exclude_qemu_both_ways() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let disk = create_image(folder.path(), MIB);
    let socket = sockets.path().join("s");
    let (pid_file, nbd) = (sockets.path().join("pid"), sockets.path().join("nbd"));
    struct Nbd(i32);
    impl Drop for Nbd {
        fn drop(&mut self) {
            // SAFETY: a plain system call; the process was started by this test, and is waited for only here.
            unsafe { libc::kill(self.0, libc::SIGKILL) };
        }
    }
    let pid_text = format!("--pid-file={}", text(&pid_file));
    run_tool("qemu-nbd", &["--fork", "--persistent", "-f", "raw", &pid_text, "-k", text(&nbd), text(&disk)]);
    let pid = fs::read_to_string(&pid_file).expect("its number").trim().parse().expect("a number");
    let theirs = Nbd(pid);
    let arguments = [text(&disk), "--socket", text(&socket)];
    let named = format!("in use by another process (qemu-nbd, pid {pid})");
    let said = refused(&arguments, &[&named, "waiting up to 3 s", "stop that first, or pass --share"]);
    assert!(!said.contains("share=on"), "that is how others spell it: {said}");
    assert!(!socket.exists());
    drop(theirs);
    // The server waits for the lock of the process that is ending.
    let ours = start_server(&disk, sockets.path(), &[]);
    let output =
        Command::new("qemu-io").args(["-f", "raw", "-c", "write 0 512", text(&disk)]).output().expect("qemu-io");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("lock"), "qemu-io should have met our lock: {said}");
    let named = format!("in use by another process (larder, pid {})", ours.process.id());
    refused(&arguments, &[&named, "pass --share"]);
    let said = refused(&[arguments.as_slice(), &["--share"]].concat(), &[&named, "must share it too"]);
    assert!(!said.contains("pass --share"), "it was given: {said}");
    // Two readers can share the disk.
    ours.stop().expect("stops");
    let _reader = start_server(&disk, sockets.path(), &["--read-only"]);
    run_tool("qemu-io", &["-r", "-f", "raw", "-c", "read 0 512", text(&disk)]);
}

#[test]
fn unusable_socket_is_left_alone() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let disk = create_image(folder.path(), MIB);
    let at = |socket: &Path, words: &[&str]| refused(&[text(&disk), "--socket", text(socket)], words);
    let taken = sockets.path().join("taken");
    let _listener = UnixListener::bind(&taken).expect("listens");
    at(&taken, &["in use", "another process listens"]);
    assert!(UnixStream::connect(&taken).is_ok(), "it still listens");
    at(&sockets.path().join("x".repeat(120)), &["bytes long", "107"]);
    at(&sockets.path().join("no/such/folder"), &["directory does not exist"]);
    let file = sockets.path().join("file");
    fs::write(&file, "mine").expect("a file");
    at(&file, &["is not a socket", "not changed"]);
    assert_eq!(fs::read(&file).expect("is there"), b"mine");
    at(sockets.path(), &["is not a socket"]);
    // The error does not blame another process.
    let once = sockets.path().join("once");
    let again = sockets.path().join("./again/../once");
    fs::create_dir(sockets.path().join("again")).expect("a folder");
    let nbd = format!("nbd+unix:///?socket={}", text(&once));
    for (options, words) in [
        (["--nbd", &nbd, "--control", text(&once)], "--nbd and --control are the same path"),
        (["--nbd", &nbd, "--socket", text(&again)], "--socket and --nbd are the same path"),
        (["--nbd", &nbd, "--pidfile", text(&once)], "--nbd and --pidfile are the same path"),
    ] {
        refused(&[[text(&disk)].as_slice(), &options].concat(), &[words]);
        assert!(!once.exists());
    }
    // The socket of a killed server is replaced.
    let mut dead = start_server(&disk, sockets.path(), &[]);
    dead.process.kill();
    assert!(dead.socket.exists());
    let server = start_server(&disk, sockets.path(), &[]);
    let socket = server.socket.clone();
    assert_eq!(server.stop().expect("stops"), Some(0));
    assert!(!socket.exists(), "an orderly end leaves nothing");
}

#[test]
fn wrong_option_error_names_valid_values() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let disk = create_image(folder.path(), MIB);
    let socket = sockets.path().join("s");
    let with = |options: &[&str], words: &[&str]| {
        let mut arguments = vec![text(&disk), "--socket", text(&socket)];
        arguments.extend(options);
        refused(&arguments, words);
        assert!(!socket.exists());
    };
    with(&["--queues", "0"], &["1 to 64"]);
    with(&["--queues", "65"], &["1 to 64"]);
    with(&["--queues", "many"], &["many"]);
    with(&["--block-size", "100"], &["100", "512 or 4096"]);
    with(&["--block-size", "1024"], &["1024", "512 or 4096"]);
    with(&["--poll-us", "-1"], &["-1"]);
    with(&["--poll-us", "10001"], &["10001", "at most 10000 microseconds"]);
    with(&["--poll-us", "99999999999999999999"], &["from 0 to 10000"]);
    with(&["--nbd-reconnect", "18446744073709551615"], &["--nbd-reconnect"]);
    with(&["--no-such-option"], &["--no-such-option"]);
    with(&["--prefetch", "16TiB"], &["16TiB", "at most 128 MiB"]);
    with(&["--prefetch-ahead", "0"], &["--prefetch-ahead", "4 KiB to 128 MiB"]);
    with(&["--prefetch-largest-read", "0"], &["--prefetch-largest-read", "4 KiB to 128 MiB"]);
    with(&["--share", "--prefetch", "8M"], &["--prefetch cannot be combined with share"]);
    with(&["--share", "--prefetch-ahead", "1M"], &["--prefetch-ahead cannot be combined with share"]);
    with(
        &["--prefetch", "off", "--prefetch-largest-read", "64k"],
        &["--prefetch-largest-read has no effect with prefetch off"],
    );
    with(&["--throttle", "nonsense"], &["nonsense", "KEY=VALUE"]);
    with(&["--throttle", ""], &["no limit is given"]);
    with(&["--throttle", "iops=1,iops-total=2"], &["iops-total has a value already"]);
    with(&["--throttle", "iops-size=4096"], &["together with a limit on requests"]);
    with(&["--throttle", "bps=1.5G"], &["bps=1.5G", "smaller unit"]);
    with(&["--throttle", "bps=99999999999999T"], &["1000000000000000 bytes", "no limit"]);
    refused(&[text(&disk)], &["--socket"]);
    refused(&[], &["IMAGE"]);
    // Invalid values are refused even if they would have no effect.
    let nbd = format!("nbd+unix:///?socket={}", text(&socket));
    for (option, value, word) in [("--queues", "0", "1 to 64"), ("--block-size", "1024", "512 or 4096")] {
        refused(&[text(&disk), "--nbd", &nbd, option, value], &[word]);
        assert!(!socket.exists());
    }
}

/// Names in the log cannot add lines, and contain no terminal control sequences.
#[test]
fn control_characters_in_log_are_escaped() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let named = folder.path().join("a\n<2>forged \u{1b}[31m.raw");
    fs::rename(create_image(folder.path(), MIB), &named).expect("renamed");
    let server = start_server(&named, sockets.path(), &[]);
    let line = server.process.wait_for("serving", TEST_TIMEOUT).expect("says so");
    assert!(line.contains(r"a\u000a<2>forged \u001b[31m.raw"), "{line}");
    let said = server.process.output();
    assert!(!said.contains('\u{1b}') && !said.contains("\n<2>forged"), "{said:?}");
    assert_eq!(server.stop().expect("stops"), Some(0));
}

#[test]
fn served_disk_logs_pasteable_addresses() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let disk = create_image(folder.path(), MIB);
    let with_space = sockets.path().join("a folder");
    fs::create_dir(&with_space).expect("a folder");
    let nbd = format!("nbd+unix:///web?socket={}", text(&sockets.path().join("nbd")));
    let limits = "iops=1000,bps_rd=100M,write_bytes_sec=1000000,iops_size=4k";
    let options = ["--nbd", &nbd, "--throttle", limits, "--block-size", "4096"];
    let server = start_server(&disk, &with_space, &options);
    let line = server.process.wait_for("serving", TEST_TIMEOUT).expect("says so");
    for part in
        [format!("image={}", text(&disk)), format!("vhost_user_blk='{}'", text(&server.socket)), format!("nbd='{nbd}'")]
    {
        assert!(line.contains(&part), "'{part}' is not in: {line}");
    }
    assert_eq!(server.stop().expect("stops"), Some(0));
}

/// An image of an odd size is reported, and has the same rounded size in both exports.
#[test]
fn odd_size_is_reported_and_rounded() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let disk = folder.path().join("odd.raw");
    let uri = format!("nbd+unix:///?socket={}", text(&sockets.path().join("nbd")));
    let bytes = test_pattern(9, 5000);
    fs::write(&disk, &bytes).expect("an image");
    {
        let server = start_server(&disk, sockets.path(), &["--nbd", &uri]);
        server.process.wait_for("not a multiple of 512", TEST_TIMEOUT).expect("a warning");
        let said = server.process.output();
        assert!(said.contains("WARN") && said.contains("120 bytes larger"), "{said}");
        assert!(said.contains("goes through the page cache"), "{said}");
        assert!(run_tool("qemu-img", &["info", "-f", "raw", &uri]).contains("(5120 bytes)"));
        let mut guest = FrontEnd::connect(&server.socket, Options::default()).expect("connects");
        assert_eq!(guest.capacity().expect("an answer"), 5120);
        let data = guest.data();
        let into = [Buffer { address: data, len: 512 }];
        assert_eq!(guest.queue().run(&Request::read(9, &into)).expect("reads").status, 0);
        let mut tail = bytes[4608..].to_vec();
        tail.resize(512, 0);
        assert_eq!(guest.memory.read_vec(data, 512), tail, "zeros behind the file's end");
        assert_eq!(fs::metadata(&disk).expect("is there").len(), 5000, "reading changes nothing");
        assert_eq!(guest.queue().run(&Request::write(9, &into)).expect("writes").status, 0);
        assert_eq!(fs::metadata(&disk).expect("is there").len(), 5120, "a write fills it up");
        drop(guest);
        server.stop().expect("stops");
    }
    let socket = sockets.path().join("s");
    refused(
        &[text(&disk), "--socket", text(&socket), "--block-size", "4096"],
        &["no multiple of the sectors of 4096 bytes", "1024 bytes", "truncate -s %4096"],
    );
    assert!(!socket.exists());
    run_tool("truncate", &["-s", "%4096", text(&disk)]);
    let _served = start_server(&disk, sockets.path(), &["--block-size", "4096"]);
}

#[test]
fn odd_export_size_is_reported() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let (disk, theirs) = (folder.path().join("odd.raw"), sockets.path().join("theirs"));
    fs::write(&disk, test_pattern(9, 5000)).expect("an image");
    let mut command = Command::new("nbdkit");
    command.args(["--foreground", "--unix", text(&theirs), "file", text(&disk)]);
    let _theirs = Process::start(command).expect("nbdkit; testbed/setup.sh installs it");
    let give_up = Instant::now() + TEST_TIMEOUT;
    while UnixStream::connect(&theirs).is_err() {
        assert!(Instant::now() < give_up, "nbdkit does not listen");
        std::thread::yield_now();
    }
    let uri = format!("nbd+unix:///?socket={}", text(&theirs));
    let server = start_server(Path::new(&uri), sockets.path(), &[]);
    let said = server.process.output();
    assert!(said.contains("120 bytes larger") && said.contains("other data there fail"), "{said}");
    let guest = FrontEnd::connect(&server.socket, Options::default()).expect("connects");
    assert_eq!(guest.capacity().expect("an answer"), 5120);
}

#[test]
fn shrinking_image_logs_warning() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let disk = create_image(folder.path(), 2 * MIB);
    let server = start_server(&disk, sockets.path(), &["--block-size", "4096"]);
    let _guest = FrontEnd::connect(&server.socket, Options::default()).expect("connects");
    let resize = |bytes| {
        let file = fs::OpenOptions::new().write(true).open(&disk);
        file.and_then(|file| file.set_len(bytes)).expect("is resized");
    };
    resize(MIB);
    let line = server.process.wait_for("has shrunk from 2097152 to 1048576 bytes", TEST_TIMEOUT).expect("says so");
    assert!(line.contains("WARN") && line.contains("is lost"), "{line}");
    resize(3 * MIB + 512);
    server.process.wait_for("has grown from 1048576 to ", TEST_TIMEOUT).expect("says so");
    let line = server.process.wait_for("last 512 bytes", TEST_TIMEOUT).expect("says so");
    assert!(line.contains("WARN"), "{line}");
}

#[test]
fn unwritable_pidfile_leaves_nothing_behind() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let disk = create_image(folder.path(), MIB);
    let socket = sockets.path().join("s");
    let with = |pidfile: &Path, words: &[&str]| {
        refused(&[text(&disk), "--socket", text(&socket), "--pidfile", text(pidfile)], words);
        assert!(!socket.exists(), "no socket is left behind");
    };
    with(&sockets.path().join("no/such/pid"), &["--pidfile", "its directory does not exist"]);
    with(sockets.path(), &["is not a file", "not changed"]);
    with(Path::new("/dev/null"), &["/dev/null", "not changed"]);
    with(&disk, &[text(&disk), "not a pid file", "not changed"]);
    with(&socket, &["--socket and --pidfile are the same path"]);
    // Nothing is left behind either if the disk cannot be served.
    let pidfile = sockets.path().join("pid");
    fs::write(&socket, "mine").expect("a file");
    refused(&[text(&disk), "--socket", text(&socket), "--pidfile", text(&pidfile)], &["is not a socket"]);
    fs::remove_file(&socket).expect("is removed");
    assert_eq!(fs::read_dir(sockets.path()).expect("a folder").count(), 0);
    let server = start_server(&disk, sockets.path(), &["--pidfile", text(&pidfile)]);
    let number = format!("{}\n", server.process.id());
    assert_eq!(fs::read_to_string(&pidfile).expect("is there"), number);
    assert_eq!(server.stop().expect("stops"), Some(0));
    assert_eq!(fs::read_dir(sockets.path()).expect("a folder").count(), 0);
}

/// Paths need not be UTF-8; an argument that must be is named in the error.
#[test]
fn non_utf8_paths_work() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let odd = |path: &Path, name: &[u8]| path.join(OsStr::from_bytes(name));
    let disk = odd(folder.path(), b"d\xffsk.raw");
    fs::write(&disk, vec![0; MIB as usize]).expect("an image");
    let socket = odd(sockets.path(), b"s\xffcket");
    let server = Server::start(larder_path(), &disk, &socket, &[]).expect("serves");
    assert_io_works(&mut FrontEnd::connect(&server.socket, Options::default()).expect("connects"), 1);
    server.stop().expect("stops");
    let mut command = disk_serve_command(&[text(folder.path()), "--socket", "/tmp/never", "--serial"]);
    command.arg(OsStr::from_bytes(b"S\xff1"));
    let (code, said) = run_command(command);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("'S\u{fffd}1' is not UTF-8"), "{said}");
}

#[test]
fn invalid_log_level_is_explained() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let disk = create_image(folder.path(), MIB);
    let with_level = |level: &str| {
        let mut command = disk_serve_command(&[text(&disk), "--socket", text(&sockets.path().join("s"))]);
        command.env("LARDER_LOG", level);
        Process::start(command).expect("starts")
    };
    let process = with_level("chatty");
    let line = process.wait_for("LARDER_LOG=chatty", TEST_TIMEOUT).expect("says so");
    assert!(line.contains("'chatty' is not a level") && line.contains("off, error, warn, info, debug, trace"));
    process.wait_for("serving", TEST_TIMEOUT).expect("serves all the same");
    drop(process);
    let process = with_level("info,larder_block=debug");
    process.wait_for("serving", TEST_TIMEOUT).expect("serves");
    assert!(!process.output().contains("LARDER_LOG"), "{}", process.output());
}

/// Standard streams as `--fd`, and raw images with `--format qcow2`, are refused with advice.
#[test]
fn standard_streams_and_mislabelled_images_refused() {
    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let disk = create_image(folder.path(), MIB);
    for number in ["0", "1", "2"] {
        refused(&[text(&disk), "--fd", number], &["standard input", "3 or higher"]);
    }
    refused(&[text(&disk), "--fd", "99"], &["no such descriptor was inherited"]);
    let socket = sockets.path().join("s");
    refused(
        &[text(&disk), "--format", "qcow2", "--socket", text(&socket)],
        &["it is not a qcow2 image", "without --format"],
    );
}

/// The wait for an NBD server that serves one client at a time is reported before it times out.
#[test]
fn busy_nbd_server_is_reported() {
    let folder = temp_dir_on_tmpfs();
    let socket = folder.path().join("busy");
    let uri = format!("nbd+unix:///?socket={}", text(&socket));
    refused(&[&uri, "--socket", "unused"], &["there is no such socket", "check whether the server runs"]);
    // A listener that does not accept, like a server that already has its one client.
    let busy = UnixListener::bind(&socket).expect("listens");
    let mut command = Command::new(larder_path());
    command.args(["disk", "info", &uri]);
    let mut process = Process::start(command).expect("starts");
    let told = "for the server's greeting; it may serve one client at a time";
    process.wait_for(told, TEST_TIMEOUT).expect("says so");
    drop(busy);
    assert_eq!(process.wait(TEST_TIMEOUT).expect("ends").code(), Some(2));
    refused(&[&uri, "--socket", "unused"], &["Connection refused", "no server listens there"]);
}
