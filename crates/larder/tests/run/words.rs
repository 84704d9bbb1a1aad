//! Messages and process names of `larder run`, before a guest runs and with an idle one.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Command, Output, Stdio};

use larder_bench::campaign::memory::ATTACHED_TEXT;
use rustix::process::Signal;

use crate::drive;
use crate::guest::{Guest, Place, command_line, lock_byte, qemu, short_name, signal};

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Runs the command to its end, with arguments for QEMU.
fn output(place: &Place, options: &[&str], qemu: &Path, arguments: &[&str]) -> Output {
    let mut command = place.larder_run(options, qemu);
    command.args(arguments).output().expect("runs")
}

#[test]
fn impossible_run_is_refused_before_start() {
    let place = Place::new("refused");
    let image = place.image("disk.raw", 8);
    let served = drive(&image, "");
    let missing = drive(&place.path("missing.raw"), "");
    let other = place.image("other.raw", 8);
    let control = |image: &Path| format!("{},control={}", image.display(), place.path("control").display());
    let private = format!("memory-backend-file,id=r,size=128M,mem-path={}", image.display());
    for (options, arguments, message) in [
        (&[][..], &["-drive", &missing][..], "cannot open"),
        (&[], &["-daemonize"], "-daemonize: larder run stays in the foreground"),
        (&[], &["-drive", &served, "-m", "1000T"], "does not fit in /dev/shm"),
        (&[], &["-drive", &served, "-m", "much"], "cannot determine the size of the guest's RAM"),
        (&[], &["-drive", &served, "-object", &private, "-M", "memory-backend=r"], "which is not a directory"),
        (&["--disk", "/a,sreial=x"], &[], "did you mean 'serial'?"),
        (&["--disk", "/a,share=on,prefetch=8M"], &[], "--disk /a: prefetch cannot be combined with share"),
        (
            &["--memory-budget", "17MiB"],
            &["-m", "1G"],
            "--memory-budget: a budget of 17 MiB is too small: memory of 1 GiB needs at least 23 MiB",
        ),
        (
            &["--memory-budget", "1G", "--memory-swap-cache", image.to_str().expect("UTF-8")],
            &[],
            "memory: swap cache /",
        ),
        (&["--disk", &control(&image), "--disk", &control(&other)], &[], "have the same control="),
    ] {
        let output = output(&place, options, qemu(), arguments);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(message) && !said.contains("served over"), "{said}");
        assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());
    }
    let output = output(&place, &[], "true".as_ref(), &[]);
    assert!(text(&output.stderr).contains("give the QEMU program"), "{output:?}");
}

/// Advice about an image that cannot be served names the option by which the image was given.
#[test]
fn advice_names_the_right_option() {
    let place = Place::new("advice");
    let path = |name: &str| place.path(name).display().to_string();
    fs::write(place.path("other.vmdk"), b"KDMV0000").expect("writes");
    fs::write(place.path("luks.qcow2"), encrypted_qcow2()).expect("writes");
    let used = place.image("used.raw", 1);
    let holder = fs::OpenOptions::new().read(true).write(true).open(&used).expect("opens");
    // A lock like QEMU's when no other process may write.
    lock_byte(&holder, 201, libc::F_RDLCK);
    let used_drive = drive(&used, "");
    let used_for_device = format!("if=none,id=x,format=raw,file={}", used.display());
    let [other, luks, used] = [path("other.vmdk"), path("luks.qcow2"), path("used.raw")];
    let shared = format!("{used},share=on");
    for (disk, arguments, message) in [
        (Some(&other), &[][..], "other.vmdk looks like a VMDK image"),
        (Some(&other), &[], "add format=raw"),
        (Some(&luks), &[], "encrypted"),
        (Some(&luks), &[], "attach it with -drive, and QEMU serves it"),
        (Some(&used), &[], "in use by another process"),
        (Some(&used), &[], "share=on"),
        (Some(&shared), &[], "the other process must share it too"),
        (None, &["-drive", &used_drive], "-device virtio-blk-pci,share-rw=on"),
        (None, &["-drive", &used_for_device, "-device", "virtio-blk-pci,drive=x"], "add share-rw=on to its -device"),
    ] {
        let options: Vec<&str> = disk.map(|disk| ["--disk", disk]).into_iter().flatten().collect();
        let output = output(&place, &options, qemu(), arguments);
        let said = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        let line = said.lines().rfind(|line| line.starts_with("larder: ")).unwrap_or_default();
        assert!(line.contains(message), "{message}: {said}");
        assert!(!said.contains("--format") && !said.contains("--share"), "{said}");
        assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());
    }
}

/// Runs a command and sends `quit` to its guest's monitor at once; returns its exit status and its messages.
fn quits(mut command: Command, arguments: &[&str]) -> (Option<i32>, String) {
    command.args(["-accel", "tcg", "-m", "64", "-nodefaults", "-display", "none", "-S"]);
    command.args(["-monitor", "stdio"]).args(arguments);
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().expect("runs");
    // A command that has exited does not read it.
    let _ = child.stdin.take().expect("a pipe").write_all(b"quit\n");
    let output = child.wait_with_output().expect("ends");
    (output.status.code(), text(&output.stderr))
}

/// A guest that starts under QEMU alone also starts under `larder run`: Larder serves its disk as QEMU would, or
/// leaves the disk to QEMU and reports the reason.
#[test]
fn odd_disk_starts_as_under_qemu() {
    let place = Place::new("odd");
    let path = |name: &str| place.path(name).display().to_string();
    place.image("disk.raw", 1);
    fs::write(place.path("part.raw"), vec![0; (1 << 20) + 512]).expect("writes");
    fs::write(place.path("empty.raw"), "").expect("writes");
    let made = Command::new("qemu-img").args(["create", "-q", "-f", "qcow2", &path("disk.qcow2"), "1M"]).status();
    assert!(made.expect("qemu-img is there").success());
    let long = "serial=f9160a20-70c7-38f4-a980-29f0c16f0155";
    let [disk, part, empty, qcow2] =
        ["disk.raw", "part.raw", "empty.raw", "disk.qcow2"].map(|name| format!("format=raw,file={}", path(name)));
    let qcow2 = qcow2.replace("format=raw", "format=qcow2");
    for (drive, device, message) in [
        (&disk, long, "the guest sees the first 20, as with QEMU: 'f9160a20-70c7-38f4-a'"),
        (&disk, "num-queues=65", "stays with QEMU: queues 65: a disk has 1 to 64"),
        (&disk, "num-queues=65535", "served over vhost-user-blk"),
        (&disk, "num-queues=0x10", "served over vhost-user-blk"),
        (&disk, "num-queues=010", "stays with QEMU: num-queues=010"),
        (&disk, "queue-size=0x80", "served over vhost-user-blk"),
        (
            &disk,
            "logical_block_size=1024,physical_block_size=1024",
            "stays with QEMU: vhost-user-blk does not support the property physical_block_size=1024",
        ),
        (
            &part,
            "logical_block_size=4096,physical_block_size=4096",
            "stays with QEMU: vhost-user-blk does not support the property physical_block_size=4096",
        ),
        (&qcow2, "share-rw=on", "stays with QEMU: "),
        (&empty, "bootindex=1", "stays with QEMU: "),
        (&"format=raw,file=/dev/zero".to_owned(), "bootindex=1", "stays with QEMU: /dev/zero is a "),
    ] {
        let drive = format!("if=none,id=x,{drive}");
        let device = format!("virtio-blk-pci,drive=x,{device}");
        let arguments = ["-drive", &drive, "-device", &device];
        let (alone, said) = quits(Command::new(qemu()), &arguments);
        assert_eq!(alone, Some(0), "{device}: {said}");
        let (code, said) = quits(place.larder_run(&[], qemu()), &arguments);
        assert_eq!(code, Some(0), "{drive} {device}: {said}");
        assert!(said.contains(message), "{drive} {device}: {said}");
        assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());
    }
}

/// Returns the header of an image that QEMU can read, and Larder cannot.
fn encrypted_qcow2() -> Vec<u8> {
    let mut header = vec![0; 64 << 10];
    let words: [u32; 10] = [0x5146_49fb, 2, 0, 0, 0, 16, 0, 1 << 20, 1, 0];
    for (at, word) in words.into_iter().enumerate() {
        header[at * 4..at * 4 + 4].copy_from_slice(&word.to_be_bytes());
    }
    header
}

/// An image that only QEMU can read is left to QEMU.
#[test]
fn image_only_qemu_reads_stays_there() {
    let place = Place::new("qemus");
    let path = |name: &str| place.path(name).display().to_string();
    fs::write(place.path("other.vmdk"), b"KDMV0000").expect("writes");
    fs::write(place.path("luks.qcow2"), encrypted_qcow2()).expect("writes");
    let guessed = format!("file={},if=virtio", path("other.vmdk"));
    let named = format!("file={},if=virtio,format=qcow2", path("luks.qcow2"));
    let raw = place.image("raw", 8);
    let raw = format!("file={},if=virtio,discard=on", raw.display());
    let arguments = ["-drive", &guessed, "-drive", &named, "-drive", &raw];
    let output = output(&place, &["--dry-run"], qemu(), &arguments);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(0), "{said}");
    for message in [
        format!("disk {}: stays with QEMU: it looks like a VMDK image", path("other.vmdk")),
        format!("disk {}: stays with QEMU: ", path("luks.qcow2")),
        "it is encrypted".to_owned(),
        format!("disk {}: served over vhost-user-blk as vdc", path("raw")),
    ] {
        assert!(said.contains(&message), "{message}: {said}");
    }
    let commands = text(&output.stdout);
    assert_eq!(commands.matches("disk serve").count(), 1, "{commands}");
    assert_eq!(commands.matches("-device virtio-blk,").count(), 2, "{commands}");
}

#[test]
fn backing_files_are_checked_too() {
    let place = Place::new("chain");
    let base = place.image("base.raw", 8);
    let overlay = place.path("overlay.qcow2");
    let made = Command::new("qemu-img")
        .args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b", "base.raw"])
        .arg(&overlay)
        .status();
    assert!(made.expect("qemu-img is there").success());
    for arguments in [
        ["-drive", &format!("file={},if=virtio", overlay.display())],
        ["-drive", &format!("file={},if=virtio,format=qcow2", overlay.display())],
    ] {
        let dry = output(&place, &["--dry-run"], qemu(), &arguments);
        assert_eq!(dry.status.code(), Some(0), "{}", text(&dry.stderr));
    }
    let rebased = Command::new("qemu-img")
        .args(["rebase", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", "nbd+unix:///?socket=/no/such"])
        .arg(&overlay)
        .status();
    assert!(rebased.expect("qemu-img is there").success());
    let disk = overlay.display().to_string();
    let dry = output(&place, &["--dry-run", "--disk", &disk], qemu(), &[]);
    let said = text(&dry.stderr);
    assert_eq!(dry.status.code(), Some(0), "{said}");
    assert!(said.contains(&format!("disk {disk}: not checked completely")), "{said}");

    let rebased = Command::new("qemu-img")
        .args(["rebase", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b", "base.raw"])
        .arg(&overlay)
        .status();
    assert!(rebased.expect("qemu-img is there").success());
    fs::remove_file(base).expect("is there");
    let disk = format!("{},format=qcow2,metadata-memory=1MiB", overlay.display());
    let dry = output(&place, &["--dry-run", "--disk", &disk], qemu(), &[]);
    let said = text(&dry.stderr);
    assert_eq!(dry.status.code(), Some(1), "{said}");
    assert!(said.contains("its backing file 'base.raw' cannot be opened"), "{said}");
    let commands = text(&dry.stdout);
    assert!(commands.contains(" --format qcow2 --metadata-memory 1048576 "), "{commands}");
}

#[test]
fn missing_separator_is_explained() {
    let output = Command::new(env!("CARGO_BIN_EXE_larder"))
        .args(["run", "qemu-system-x86_64", "-m", "1G"])
        .output()
        .expect("runs");
    assert_eq!(output.status.code(), Some(2));
    let said = text(&output.stderr);
    assert!(said.contains("tip: put -- before the QEMU command: larder run -- qemu-system-x86_64"), "{said}");
}

#[test]
fn dry_run_prints_shell_commands_only() {
    let place = Place::new("dry");
    let image = place.image("disk.raw", 8);
    let served = drive(&image, "");
    let Output { status, stdout, stderr } =
        output(&place, &["--dry-run"], qemu(), &["-append", "a 'b'", "-drive", &served]);
    let said = text(&stderr);
    assert_eq!(status.code(), Some(0), "{said}");
    let lines = text(&stdout);
    let lines: Vec<&str> = lines.lines().collect();
    let [folder, ram, server, guest] = lines[..] else {
        panic!("four commands were expected: {lines:?}");
    };
    assert!(folder.starts_with("(umask 022; mkdir -p -m 700 /"), "{folder}");
    assert!(ram.starts_with("(umask 077; truncate -s 134217728 /dev/shm/larder-dry_"), "{ram}");
    let serve = format!("larder disk serve {} --socket ", image.display());
    assert!(server.contains(&serve) && server.ends_with(" &"), "{server}");
    assert!(guest.starts_with("qemu-system-x86_64 -name dry_"), "{guest}");
    assert!(guest.contains(r"-append 'a '\''b'\''' -chardev socket,id=larder-chr-0,"), "{guest}");
    assert!(said.contains(&format!("larder: disk {}: served", image.display())), "{said}");
    let name = ram.rsplit('/').next().unwrap_or_default().trim_end_matches(')');
    assert!(said.contains(&format!("larder: {name} stands for a name")), "{said}");
    let again = output(&place, &["--dry-run"], qemu(), &["-drive", &served]);
    assert!(!text(&again.stdout).contains(name), "it could be guessed");
    assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());
}

#[test]
fn dry_run_commands_work_when_pasted() {
    let place = Place::new("paste");
    let image = place.image("disk.raw", 8);
    let served = drive(&image, "");
    let arguments = ["-nodefaults", "-display", "none", "-S", "-monitor", "stdio", "-drive", &served];
    let printed = output(&place, &["--dry-run"], qemu(), &arguments).stdout;
    let printed = text(&printed);
    let ram = printed.split("mem-path=").nth(1).and_then(|text| text.split([' ', ',']).next());
    let ram = ram.expect("the RAM is a file");
    let folder = printed.split("mkdir -p -m 700 ").nth(1).and_then(|text| text.split(')').next());
    let folder = folder.expect("the sockets have a folder");
    // Without its disk's server QEMU would wait for it, and its monitor would not answer.
    let script = format!("{printed}code=$?; kill $!; wait $!; echo SERVER $?; rm -r {ram} {folder}; exit $code");
    let mut shell = Command::new("timeout")
        .args(["60", "sh", "-c", &script])
        .env("XDG_RUNTIME_DIR", place.path("runtime"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a shell");
    let mut monitor = shell.stdin.take().expect("is piped");
    writeln!(monitor, "info qtree\nquit").expect("QEMU reads");
    drop(monitor);
    let output = shell.wait_with_output().expect("ends");
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}{}", text(&output.stderr));
    assert!(said.contains("dev: vhost-user-blk-pci") && said.contains("SERVER 0"), "{said}");
}

/// The commands of a dry run with a budget start the pager, and work in a shell.
#[test]
fn dry_run_includes_the_pager() {
    let place = Place::new("budget");
    let options = ["--dry-run", "--memory-budget", "64MiB"];
    let arguments = ["-nodefaults", "-display", "none", "-S", "-monitor", "stdio"];
    let Output { status, stdout, stderr } = output(&place, &options, qemu(), &arguments);
    let said = text(&stderr);
    assert!(status.success() && said.contains("larder: memory: kept within 64 MiB; "), "{said}");
    let printed = text(&stdout);
    let [folder, ram, run] = printed.lines().collect::<Vec<_>>()[..] else {
        panic!("three commands were expected: {printed}");
    };
    let folder = folder.split("mkdir -p -m 700 ").nth(1).and_then(|text| text.split(')').next());
    let folder = folder.expect("the sockets have a folder");
    let ram = ram.rsplit(' ').next().expect("a path").trim_end_matches(')');
    let attach = format!(" memory attach --pid $$ --wait --budget=67108864 --control {folder}/memory.sock & exec ");
    assert!(run.starts_with("sh -c '") && run.contains(&attach), "{run}");
    // QEMU may end only after the pager has ended.
    let script = format!(
        "{printed}code=$?; rm {ram}; for i in $(seq 600); do [ -e {folder}/memory.sock ] || break; sleep 0.1; done; rmdir {folder} && exit $code"
    );
    let mut shell = Command::new("timeout")
        .args(["100", "sh", "-c", &script])
        .env("XDG_RUNTIME_DIR", place.path("runtime"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("a shell");
    let mut errors = BufReader::new(shell.stderr.take().expect("is piped")).lines();
    let attached = errors.by_ref().map_while(Result::ok).find(|line| line.contains(ATTACHED_TEXT));
    assert!(attached.is_some(), "it has not attached");
    let mut monitor = shell.stdin.take().expect("is piped");
    writeln!(monitor, "quit").expect("QEMU reads");
    let rest: Vec<String> = errors.map_while(Result::ok).collect();
    let ended = shell.wait_with_output().expect("ends");
    assert_eq!(ended.status.code(), Some(0), "{rest:?}");
}

#[test]
fn run_survives_closed_stderr() {
    let place = Place::new("unread");
    let image = place.image("disk.raw", 8);
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let mut command = place.larder_run(&["-v"], qemu());
    command.args(["-nodefaults", "-display", "none", "-S", "-monitor", "stdio"]).args(["-drive", &drive(&image, "")]);
    // Without its disk's server QEMU would wait for it, and its monitor would not answer.
    let mut run = Command::new("timeout")
        .args(["--kill-after=5", "60"])
        .arg(command.get_program())
        .args(command.get_args())
        .env("XDG_RUNTIME_DIR", place.path("runtime"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(writer)
        .spawn()
        .expect("starts");
    let mut first = String::new();
    BufReader::new(reader).read_line(&mut first).expect("a message");
    assert!(first.starts_with("larder: disk "), "{first}");
    let mut monitor = run.stdin.take().expect("is piped");
    writeln!(monitor, "info qtree\nquit").expect("QEMU reads");
    let output = run.wait_with_output().expect("ends");
    let said = text(&output.stdout);
    assert_eq!(output.status.code(), Some(0), "{said}");
    assert!(said.contains("dev: vhost-user-blk-pci"), "{said}");
    assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());
}

#[test]
fn dry_run_reports_problems() {
    let place = Place::new("would");
    let image = place.image("disk.raw", 8);
    fs::write(place.path("other.vmdk"), b"KDMV0000").expect("writes");
    let [missing, other] = ["missing.raw", "other.vmdk"].map(|name| place.path(name).display().to_string());
    let nbd = "nbd+unix:///?socket=/no/such";
    let options = ["--dry-run", "--disk", &missing, "--disk", &other, "--disk", nbd];
    let again = image.display().to_string();
    let options = [&options[..], &["--disk", &again]].concat();
    let output = output(&place, &options, qemu(), &["-drive", &drive(&image, ""), "-m", "1000T"]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    for message in [
        format!("larder: cannot open {missing}"),
        format!("larder: {other} looks like a VMDK image"),
        format!("larder: disk {again}: the command line gives it twice"),
        format!("larder: disk {nbd}: not checked completely"),
        "larder: the guest's RAM of 1000 TiB does not fit in /dev/shm".to_owned(),
    ] {
        assert!(said.contains(&message), "{message}: {said}");
    }
    assert!(!said.contains("waiting up to"), "for itself: {said}");
    assert_eq!(text(&output.stdout).matches("disk serve").count(), 5);
    assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());
}

/// A disk that is the backing file of another disk of the same run is refused as already in use.
#[test]
fn backing_file_as_disk_is_refused() {
    let place = Place::new("behind");
    let base = place.image("base.raw", 8).display().to_string();
    let overlay = place.path("overlay.qcow2").display().to_string();
    let made =
        Command::new("qemu-img").args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b", &base, &overlay]).status();
    assert!(made.expect("qemu-img is there").success());
    let output = output(&place, &["--disk", &overlay, "--disk", &base], qemu(), &[]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    let told =
        format!("larder: {base}: already in use by this process, as another disk or in the backing chain of one");
    assert!(said.contains(&told), "{said}");
}

/// Without a disk to serve, QEMU starts with its own command line, and Larder reserves no memory for its RAM.
#[test]
fn qemu_without_served_disks_is_unchanged() {
    let place = Place::new("none");
    let image = place.image("disk.raw", 8);
    let ide = format!("file={},if=ide,format=raw", image.display());
    let arguments = ["-m", "1000T", "-drive", &ide];
    let dry = output(&place, &["--dry-run"], qemu(), &arguments);
    let said = text(&dry.stderr);
    assert_eq!(dry.status.code(), Some(0), "{said}");
    assert!(said.contains("larder: no disk is served"), "{said}");
    let line = text(&dry.stdout);
    assert!(line.ends_with(&format!(" -m 1000T -drive {ide}\n")), "{line}");

    let mut command = place.larder_run(&[], &place.idle_qemu());
    command.args(arguments);
    let mut guest = Guest::start(command);
    guest.line("IDLE");
    signal(guest.pid(), Signal::TERM);
    assert_eq!(guest.end().0, 128 + 15);
}

/// Servers can be distinguished by their command lines, and larder reports the death of each.
#[test]
fn servers_are_distinguishable_and_deaths_reported() {
    let place = Place::new("called");
    let images = [place.image("one.raw", 8), place.image("two.raw", 8)];
    let mut command = place.larder_run(&["-v"], &place.idle_qemu());
    for image in &images {
        command.args(["-drive", &drive(image, "")]);
    }
    let mut guest = Guest::start(command);
    for image in &images {
        let path = image.display();
        // With -v each server's command is shown.
        let shown = guest.line(&format!("larder: {}", env!("CARGO_BIN_EXE_larder")));
        assert!(shown.contains(&format!(" disk serve {path} --socket ")), "{shown}");
    }
    guest.line("IDLE");
    for image in &images {
        let server = guest.child_when(&format!("larder disk serve {} ", image.display()), |_| true);
        assert_eq!(short_name(server), "larder");
        signal(server, Signal::KILL);
        guest
            .line(&format!("larder: disk {}: its server died (signal: 9 (SIGKILL)) and is restarted", image.display()));
        let next = guest
            .child_when("disk serve", |pid| pid != server && command_line(pid).contains(&image.display().to_string()));
        assert_ne!(next, server);
    }
    signal(guest.pid(), Signal::TERM);
    assert_eq!(guest.end().0, 128 + 15);
    assert!(place.leftovers().is_empty(), "{:?}", place.leftovers());
}
