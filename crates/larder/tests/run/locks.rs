//! Locks of the images of a running guest: no other process can change them, whatever happens to their servers.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};

use larder_bench::campaign::process::Process;
use larder_bench::campaign::server::Server;
use rustix::process::Signal;

use crate::drive;
use crate::guest::{Guest, Pid, Place, command_line, listens, lock_byte, signal};
use crate::support::{LoopDevice, wait_until};

/// Error of QEMU and its tools about an image that another process uses.
const LOCKED: &str = "Failed to get";

/// Opens an image for writing, and writes to it; the error is the output.
fn write(format: &str, image: &Path) -> Result<(), String> {
    let output = Command::new("qemu-io")
        .args(["-f", format, "-c", "write -P 9 0 4k"])
        .arg(image)
        .output()
        .expect("qemu-io is there");
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

fn is_locked(format: &str, image: &Path) {
    let said = write(format, image).expect_err("nobody may write it");
    assert!(said.contains(LOCKED), "{said}");
}

/// Starts a run with an idle QEMU, and waits until its servers listen.
fn idle(place: &Place, options: &[&str], drives: &[&str]) -> Guest {
    let mut command = place.larder_run(options, &place.idle_qemu());
    for drive in drives {
        command.args(["-drive", drive]);
    }
    let mut guest = Guest::start(command);
    guest.line("IDLE");
    guest
}

/// Kills the server of an image, and returns its PID.
fn kill_server(guest: &Guest, image: &Path) -> Pid {
    let server = guest.child_when(&serving(image), |_| true);
    signal(server, Signal::KILL);
    guest.wait_until_gone(&[server]);
    server
}

fn serving(image: &Path) -> String {
    format!("disk serve {} ", image.display())
}

fn end(guest: Guest) -> String {
    signal(guest.pid(), Signal::TERM);
    let (code, output) = guest.end();
    assert_eq!(code, 128 + 15, "{output}");
    output
}

/// No other process can open an image for writing while its server is being replaced.
#[test]
fn image_stays_locked_while_server_restarts() {
    let place = Place::new("replaced");
    let raw = place.image("disk.raw", 8);
    let (base, data) = (place.path("base.qcow2"), place.path("data.raw"));
    let overlay = place.path("overlay.qcow2");
    let qemu_img = |arguments: &[&str], image: &Path, more: &[&str]| {
        let mut command = Command::new("qemu-img");
        let made = command.args(["create", "-q", "-f", "qcow2"]).args(arguments).arg(image);
        assert!(made.args(more).status().expect("qemu-img is there").success());
    };
    qemu_img(&[], &base, &["8M"]);
    let data_option = format!("data_file={}", data.display());
    qemu_img(&["-b", "base.qcow2", "-F", "qcow2", "-o", &data_option], &overlay, &["8M"]);
    let files: [(&str, PathBuf); 4] =
        [("raw", raw.clone()), ("qcow2", overlay.clone()), ("raw", data), ("qcow2", base)];
    let overlay_drive = format!("file={},if=virtio,format=qcow2", overlay.display());
    let guest = idle(&place, &[], &[&drive(&raw, ""), &overlay_drive]);

    let enough = AtomicBool::new(false);
    let tries: usize = std::thread::scope(|scope| {
        let trying = scope.spawn(|| {
            let mut tries = 0;
            while !enough.load(Ordering::Relaxed) {
                files.iter().for_each(|(format, file)| is_locked(format, file));
                tries += 1;
            }
            tries
        });
        for _ in 0..6 {
            for image in [&raw, &overlay] {
                let killed = kill_server(&guest, image);
                guest.child_when(&serving(image), |pid| pid != killed && listens(pid));
            }
        }
        enough.store(true, Ordering::Relaxed);
        trying.join().expect("each is refused")
    });
    assert!(tries > 0);

    // larder is stopped, so no server is started.
    signal(guest.pid(), Signal::STOP);
    for image in [&raw, &overlay] {
        kill_server(&guest, image);
    }
    files.iter().for_each(|(format, file)| is_locked(format, file));
    let socket = place.path("socket");
    let mut second_server = Command::new(env!("CARGO_BIN_EXE_larder"));
    second_server.args(["disk", "serve"]).arg(&raw).arg("--socket").arg(&socket);
    let mut second_run = place.larder_run(&[], &place.idle_qemu());
    second_run.args(["-drive", &drive(&raw, "")]);
    for command in [&mut second_server, &mut second_run] {
        let output = command.output().expect("runs");
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains("in use by another process"), "{said}");
    }
    signal(guest.pid(), Signal::CONT);
    for image in [&raw, &overlay] {
        guest.child_when(&serving(image), listens);
    }
    end(guest);
    for (format, file) in files {
        write(format, &file).expect("nobody uses it any more");
    }
}

#[test]
fn server_waits_for_predecessors_writes() {
    let place = Place::new("writes");
    let image = place.image("disk.raw", 8);
    let mut guest = idle(&place, &["-v"], &[&drive(&image, "")]);
    signal(guest.pid(), Signal::STOP);
    let killed = kill_server(&guest, &image);
    // A lock like the one that the kernel keeps for a killed server with writes in flight.
    let writes = File::options().read(true).write(true).open(&image).expect("opens");
    lock_byte(&writes, 300, libc::F_WRLCK);
    signal(guest.pid(), Signal::CONT);
    guest.line_with("writes of a killed server are still in flight; waiting up to 3 s");
    assert!(!guest.children("disk serve").into_iter().any(listens));
    drop(writes);
    guest.child_when("disk serve", |pid| pid != killed && listens(pid));
    end(guest);
}

/// No server is started on a file that has replaced the guest's image.
#[test]
fn server_never_starts_on_replaced_image() {
    let place = Place::new("another");
    let image = place.image("disk.raw", 8);
    let elsewhere = place.path("elsewhere.raw");
    let mut guest = idle(&place, &[], &[&drive(&image, "")]);
    let waits = format!(
        "larder: disk {}: its server is not restarted until its files are back: {}",
        image.display(),
        image.display()
    );

    fs::rename(&image, &elsewhere).expect("can be renamed");
    let other = place.image("disk.raw", 8);
    guest.line_with("the image was moved while in use");
    kill_server(&guest, &image);
    assert_eq!(
        guest.line(&waits),
        format!("{waits} no longer leads to the guest's file: put {} back there", elsewhere.display())
    );
    assert!(guest.children("disk serve").is_empty());
    write("raw", &other).expect("nobody uses it");
    fs::rename(&elsewhere, &image).expect("can be renamed");
    guest.line(&format!("larder: disk {}: its files are back", image.display()));
    guest.child_when("disk serve", listens);

    fs::remove_file(&image).expect("can be removed");
    guest.line_with("the image was deleted or replaced while in use");
    kill_server(&guest, &image);
    let said = guest.line(&format!("{waits} was deleted or replaced: copy "));
    let contents = said.split(' ').find(|word| word.starts_with("/proc/"));
    let copied = fs::read(contents.expect("a file is named")).expect("can be read");
    assert_eq!(copied.len(), 8 << 20);
    end(guest);
}

/// Disks of every kind keep the locks that the command line asks for, and get a new server.
#[test]
fn every_disk_kind_gets_next_server() {
    let place = Place::new("kinds");
    let memory = tempfile::tempdir_in("/dev/shm").expect("a folder");
    let read = memory.path().join("read.raw");
    File::create(&read).and_then(|file| file.set_len(8 << 20)).expect("an image");
    let shared = place.image("shared.raw", 8);
    let device = LoopDevice::new(&place.image("device.raw", 8), 512);
    let (base, socket) = (place.image("base.raw", 8), place.path("nbd"));
    let mut command = Command::new("qemu-nbd");
    command.args(["-f", "raw", "-r", "-t", "-e", "8", "-k"]).arg(&socket).arg(&base);
    let _theirs = Process::start(command).expect("qemu-nbd is there");
    let over_nbd = place.path("over-nbd.qcow2");
    let mut make = Command::new("qemu-img");
    make.args(["create", "-q", "-u", "-f", "qcow2", "-F", "raw", "-b"]);
    make.arg(format!("nbd+unix:///?socket={}", socket.display()));
    assert!(make.arg(&over_nbd).arg("8M").status().expect("qemu-img is there").success());
    wait_until("qemu-nbd listens", || socket.exists());

    let shared_disk = format!("{},format=raw,share=on", shared.display());
    let over_nbd_drive = format!("file={},if=virtio,format=qcow2", over_nbd.display());
    let drives = [&drive(&read, ",readonly=on"), &drive(&device.0, ""), &over_nbd_drive];
    let guest = idle(&place, &["--disk", &shared_disk], &drives.map(String::as_str));
    let images = [&read, &shared, &device.0, &over_nbd];
    signal(guest.pid(), Signal::STOP);
    let killed = images.map(|image| kill_server(&guest, image));
    for (format, image) in [("raw", &read), ("raw", &device.0), ("qcow2", &over_nbd)] {
        is_locked(format, image);
    }
    let mut reader = Command::new("qemu-io");
    reader.args(["-r", "-f", "raw", "-c", "read 0 4k"]).arg(&read);
    assert!(reader.status().expect("qemu-io is there").success());
    let larder = Path::new(env!("CARGO_BIN_EXE_larder"));
    let sharer = Server::start(larder, &shared, &place.path("socket"), &["--share"]).expect("it is shared");
    signal(guest.pid(), Signal::CONT);
    for (image, killed) in images.into_iter().zip(killed) {
        guest.child_when(&serving(image), |pid| pid != killed && listens(pid));
    }
    assert_eq!(sharer.stop().expect("stops"), Some(0));
    end(guest);
}

#[test]
fn printed_commands_inherit_no_locks() {
    let place = Place::new("paste");
    let image = place.image("disk.raw", 8);
    let guest = idle(&place, &["-v"], &[&drive(&image, "")]);
    let server = guest.child_when("disk serve", |_| true);
    assert!(command_line(server).contains(" --inherit-locks "));
    let output = end(guest);
    assert!(output.contains(" disk serve ") && !output.contains("--inherit-locks"), "{output}");

    let mut server = Command::new(env!("CARGO_BIN_EXE_larder"));
    server.args(["disk", "serve", "--inherit-locks"]).arg(&image);
    let output = server.arg("--socket").arg(place.path("socket")).output().expect("runs");
    let said = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{said}");
    assert!(said.contains("not the file that the parent process has locked"), "{said}");
}
