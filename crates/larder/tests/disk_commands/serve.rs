//! `larder disk serve` of a dirty image.

use std::io::Read;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;

use larder_bench::campaign::process::Process;

use crate::damage::Bytes;
use crate::made::Made;
use crate::support::{TEST_TIMEOUT, create_image, disk_serve_command, run_command, run_tool, temp_dir_on_tmpfs};
use crate::{larder_json, qemu_img, text_of};

/// Returns an image whose last user was killed before it wrote the refcounts, and a raw file with its content.
fn killed() -> (Made, std::path::PathBuf) {
    let folder = temp_dir_on_tmpfs();
    let image = folder.path().join("disk.qcow2");
    let create = ["create", "-q", "-f", "qcow2", "-o", "lazy_refcounts=on", text_of(&image), "1G"];
    run_tool("qemu-img", &create);
    let mut command = Command::new("qemu-io");
    command
        .args(["-f", "qcow2", "-c", "write -P 7 0 3M", "-c", "write -P 8 600M 1M", "-c", "flush", "-c", "abort"])
        .arg(&image);
    let status = command.output().expect("qemu-io").status;
    assert!(!status.success(), "it was to die");
    let made = Made { folder, image };
    let expected = made.content("expected.raw").expect("QEMU reads it");
    let (_, info) = larder_json(&["disk", "info"], &made.image);
    assert_eq!(info["dirty-flag"], true, "{info:#}");
    (made, expected)
}

fn serve(image: &Path, socket: &Path, more: &[&str]) -> Process {
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    let mut command = disk_serve_command(&["--nbd", &uri]);
    command.args(more).arg(image);
    let server = Process::start(command).expect("larder starts");
    server.wait_for("serving", TEST_TIMEOUT).expect("it serves");
    server
}

fn assert_serves(socket: &Path, expected: &Path) {
    let uri = format!("nbd+unix:///?socket={}", socket.display());
    run_tool("qemu-img", &["compare", "-f", "raw", "-F", "raw", text_of(expected), &uri]);
}

#[test]
fn dirty_image_is_repaired_then_served() {
    let (made, expected) = killed();
    let (code, _, _) = qemu_img(&["check", "-f", "qcow2", text_of(&made.image)]);
    assert_ne!(code, 0, "it was to have wrong refcounts");
    let socket = made.folder.path().join("socket");
    let mut server = serve(&made.image, &socket, &[]);
    let said = server.output();
    let lines = said.lines().filter(|line| line.contains("refcounts lazily"));
    assert_eq!(lines.count(), 1, "{said}");
    assert_serves(&socket, &expected);
    server.signal(libc::SIGTERM);
    server.wait(TEST_TIMEOUT).expect("it ends");
    let (code, said, errors) = qemu_img(&["check", "-f", "qcow2", text_of(&made.image)]);
    assert_eq!(code, 0, "{said} {errors}");
    let (_, info) = larder_json(&["disk", "info"], &made.image);
    assert_eq!(info["dirty-flag"], false, "{info:#}");
}

#[test]
fn read_only_dirty_image_is_unchanged() {
    let (made, expected) = killed();
    let before = Bytes::of(&made.image);
    let socket = made.folder.path().join("socket");
    let mut server = serve(&made.image, &socket, &["--read-only"]);
    assert_serves(&socket, &expected);
    server.signal(libc::SIGTERM);
    server.wait(TEST_TIMEOUT).expect("it ends");
    assert!(before.0 == Bytes::of(&made.image).0);
}

#[test]
fn damaged_dirty_image_is_refused_unchanged() {
    let (made, _) = killed();
    let mut bytes = Bytes::of(&made.image);
    // Image files are padded to whole blocks on open.
    bytes.0.resize(bytes.0.len().next_multiple_of(4096), 0);
    let entry = bytes.l2_entry(0);
    bytes.set(entry, bytes.u64(entry) + 512);
    bytes.put(&made.image);
    let uri = format!("nbd+unix:///?socket={}", made.folder.path().join("socket").display());
    let mut command = disk_serve_command(&["--nbd", &uri]);
    command.arg(&made.image);
    let (code, said) = run_command(command);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("are not errors of refcounts"), "{said}");
    assert!(said.contains("larder disk check --repair"), "{said}");
    assert!(bytes.0 == Bytes::of(&made.image).0);
}

/// Messages about many refused clients are limited, and their number is reported.
#[test]
fn refused_client_messages_are_rate_limited() {
    let folder = temp_dir_on_tmpfs();
    let disk = create_image(folder.path(), 1 << 20);
    let socket = folder.path().join("socket");
    let mut server = serve(&disk, &socket, &[]);
    // 64 clients are accepted, and stay in their handshake.
    let clients: Vec<UnixStream> = (0..200).map(|_| UnixStream::connect(&socket).expect("connects")).collect();
    for mut client in &clients[64..] {
        assert!(matches!(client.read(&mut [0]), Ok(0) | Err(_)), "it is let in");
    }
    server.signal(libc::SIGTERM);
    server.wait(TEST_TIMEOUT).expect("it ends");
    let said = server.output();
    let counts: Vec<u64> = said
        .lines()
        .filter_map(|line| line.split_once("too many NBD clients: ")?.1.split(' ').next())
        .map(|count| count.parse().unwrap_or(1))
        .collect();
    assert_eq!(counts.iter().sum::<u64>(), 136, "{said}");
    assert!(counts.len() < 20, "{said}");
}

#[test]
fn invalid_queue_size_is_refused() {
    for size in ["0", "2", "100", "2048", "many"] {
        let command = disk_serve_command(&["image.raw", "--socket", "socket", "--queue-size", size]);
        let (code, said) = run_command(command);
        assert_eq!(code, Some(2), "{size}: {said}");
        assert!(said.contains("give a power of two from 4 to 1024"), "{size}: {said}");
    }
}
