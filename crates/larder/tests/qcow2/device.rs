//! Images that fill a device or an export, which cannot grow: no write fails while a cluster is free. An image in a
//! file grows only when no cluster is free.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use larder_bench::campaign::process::Process;
use larder_bench::space::{self, Case};

use crate::served::{Health, Served, health, qemu_io_with, text};
use crate::support::{LoopDevice, TEST_TIMEOUT, run_tool, temp_dir_on_disk, temp_dir_on_tmpfs};

const MIB: u64 = 1 << 20;

/// Creates a device of `size` bytes with an image of a disk of `disk` bytes, all of it mapped except `free`.
fn nearly_full(folder: &Path, size: u64, disk: u64, free: &str) -> (LoopDevice, PathBuf) {
    let file = folder.join("device");
    fs::File::create(&file).and_then(|file| file.set_len(size)).expect("a file");
    let device = LoopDevice::new(&file, 512);
    let (image, disk) = (text(&device.0), disk.to_string());
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", "-o", "preallocation=metadata", image, &disk]);
    let discard = format!("discard {free}");
    run_tool("qemu-io", &["-f", "qcow2", "-d", "unmap", "-c", &discard, image]);
    (device, file)
}

/// Free clusters far from the first slices of refcounts are found without a delay on a device.
#[test]
fn full_device_finds_free_clusters_immediately() {
    let folder = temp_dir_on_disk();
    let (device, _) = nearly_full(folder.path(), 8192 * MIB, 8184 * MIB, "7900M 256M");
    let served = Served::new(&device.0, &["--format", "qcow2"]);
    served.io(&["write -P 5 7950M 1M", "read -P 5 7950M 1M", "read -P 0 8000M 1M"]);
    served.stop();
    assert_eq!(health(&device.0), Health::Clean);
}

/// Free clusters far from the first slices of refcounts are found without a delay on an export.
#[test]
fn full_export_finds_free_clusters_immediately() {
    let folder = temp_dir_on_disk();
    let (device, _) = nearly_full(folder.path(), 8192 * MIB, 8184 * MIB, "7900M 256M");
    let sockets = temp_dir_on_tmpfs();
    let socket = sockets.path().join("export");
    let mut command = Command::new("qemu-nbd");
    command.args(["--persistent", "-f", "raw", "-x", "e", "-k"]);
    command.arg(&socket).arg(&device.0);
    let _export = Process::start(command).expect("qemu-nbd starts");
    let give_up = Instant::now() + TEST_TIMEOUT;
    while !socket.exists() {
        assert!(Instant::now() < give_up, "qemu-nbd does not listen");
        std::thread::yield_now();
    }
    let image = format!("nbd+unix:///e?socket={}", socket.display());
    let uri = format!("nbd+unix:///?socket={}", sockets.path().join("disk").display());
    let command = crate::support::disk_serve_command(&[&image, "--format", "qcow2", "--nbd", &uri]);
    let mut server = Process::start(command).expect("starts");
    server.wait_for("serving", TEST_TIMEOUT).expect("it serves");
    let commands = ["write -P 5 8100M 1M".to_owned(), "read -P 5 8100M 1M".to_owned()];
    let (success, said) = qemu_io_with(&[], "raw", &uri, &commands);
    assert!(success, "{said}");
    server.signal(libc::SIGTERM);
    server.wait(TEST_TIMEOUT).expect("ends");
}

/// Discarded clusters can be used by the next write, without a flush in between.
#[test]
fn full_device_takes_writes_after_discards() {
    let folder = temp_dir_on_disk();
    for (cluster_len, disk) in [(4096, 24 * MIB), (8192, 48 * MIB), (65536, 256 * MIB)] {
        let case = Case { size: disk, cluster_len, clusters_max: u64::MAX, bytes_max: u64::MAX, seed: cluster_len };
        let filled = space::fill(crate::support::larder_path(), folder.path(), case).expect("it is filled");
        assert_eq!(filled.refused, 0, "{case:?}: {filled:?}");
    }
}

/// An image file with free clusters does not grow over several starts of its server.
#[test]
fn image_with_free_clusters_never_grows() {
    let folder = temp_dir_on_disk();
    let grown = space::growth(crate::support::larder_path(), folder.path(), 8 << 30, 65536, 8).expect("it is served");
    assert_eq!(grown, 0);
}

/// The L1 table of a larger disk is placed in free clusters if there is no space at the end.
#[test]
fn resize_on_full_device_uses_gaps() {
    let folder = temp_dir_on_disk();
    let (device, _) = nearly_full(folder.path(), 8192 * MIB, 8184 * MIB, "1G 64M");
    let resize = ["disk", "resize", text(&device.0), "8T"];
    run_tool(text(crate::support::larder_path()), &resize);
    let served = Served::new(&device.0, &["--format", "qcow2"]);
    served.io(&["write -P 3 7T 64k", "read -P 3 7T 64k"]);
    served.stop();
    assert_eq!(health(&device.0), Health::Clean);
}

/// A volume that is extended while it is served, with stale bytes of other volumes in the new part, never shows
/// these.
#[test]
fn extended_device_never_shows_stale_bytes() {
    let folder = temp_dir_on_disk();
    let file = folder.path().join("device");
    fs::write(&file, vec![0x5e; 8 << 20]).expect("a file");
    fs::File::options().write(true).open(&file).and_then(|file| file.set_len(MIB)).expect("truncates");
    let device = LoopDevice::new(&file, 512);
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", text(&device.0), "64M"]);
    let served = Served::new(&device.0, &["--format", "qcow2"]);
    // The device is full.
    let (success, said) = served.try_io(&["write -P 1 0 2M"]);
    assert!(!success && said.contains("No space left"), "{said}");
    fs::write(folder.path().join("old"), vec![0x5e; 3 << 20]).expect("a file");
    let (old, to) = (folder.path().join("old"), text(&file));
    let old = format!("if={}", old.display());
    run_tool("dd", &["status=none", "conv=notrunc", "bs=1M", "seek=1", &old, &format!("of={to}")]);
    run_tool("losetup", &["--set-capacity", text(&device.0)]);
    // The server polls the size from time to time.
    let mut tries = 0;
    while !served.try_io(&["write -P 2 16M 512"]).0 {
        tries += 1;
        assert!(tries < 10_000, "the new room is not used");
    }
    served.io(&["read -P 2 16M 512", "read -P 0 16777728 65024"]);
    served.stop();
}
