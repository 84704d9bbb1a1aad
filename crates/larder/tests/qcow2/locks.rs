//! Locks of an image that is served: no other process may change data that a user relies on.

use std::path::{Path, PathBuf};
use std::process::Command;

use tempfile::TempDir;

use crate::served::{Health, Served, health, qemu_io, refused, text};
use crate::support::{run_tool, temp_dir_on_disk, temp_dir_on_tmpfs, wait_until};

const LOCKED: &str = "Failed to get";

/// Creates an image with its own backing file.
fn overlay(folder: &TempDir, name: &str) -> PathBuf {
    let base = folder.path().join("base.qcow2");
    if !base.exists() {
        run_tool("qemu-img", &["create", "-f", "qcow2", text(&base), "1M"]);
        assert!(qemu_io("qcow2", text(&base), &["write -P 5 0 1M"]).0);
    }
    let image = folder.path().join(name);
    let options = ["create", "-f", "qcow2", "-b", "base.qcow2", "-F", "qcow2"];
    let mut arguments = options.to_vec();
    arguments.push(text(&image));
    run_tool("qemu-img", &arguments);
    image
}

/// Runs `qemu-img`; the error is its output.
fn qemu_img(arguments: &[&str]) -> Result<(), String> {
    let output = Command::new("qemu-img").args(arguments).output().expect("qemu-img is there");
    match output.status.success() {
        true => Ok(()),
        false => Err(String::from_utf8_lossy(&output.stderr).into_owned()),
    }
}

fn reads(image: &Path) -> Result<(), String> {
    qemu_img(&["compare", "-f", "qcow2", "-F", "qcow2", text(image), text(image)])
}

fn writes(image: &Path) -> Result<(), String> {
    match qemu_io("qcow2", text(image), &["write -P 9 64k 64k"]) {
        (true, _) => Ok(()),
        (false, said) => Err(said),
    }
}

fn is_locked(result: Result<(), String>) {
    let said = result.expect_err("it is locked");
    assert!(said.contains(LOCKED), "{said}");
}

#[test]
fn served_image_is_locked_until_stop() {
    for folder in [temp_dir_on_disk(), temp_dir_on_tmpfs()] {
        let image = overlay(&folder, "image.qcow2");
        let base = folder.path().join("base.qcow2");
        let served = Served::new(&image, &[]);
        is_locked(reads(&image));
        is_locked(writes(&image));
        is_locked(qemu_img(&["check", "-f", "qcow2", text(&image)]));
        is_locked(qemu_img(&["snapshot", "-c", "name", text(&image)]));
        for options in [&[][..], &["--read-only"]] {
            let said = refused(&image, options);
            assert!(said.contains("in use"), "{said}");
        }
        // The backing file can be read by all processes, and written by none.
        reads(&base).expect("a shared reader");
        is_locked(writes(&base));
        let said = refused(&base, &[]);
        assert!(said.contains("in use"), "{said}");
        Served::new(&base, &["--read-only"]).stop();
        let other = overlay(&folder, "other.qcow2");
        let beside = Served::new(&other, &[]);
        beside.io(&["write -P 7 0 64k"]);
        served.io(&["read -P 5 0 64k"]);
        beside.stop();
        served.stop();
        reads(&image).expect("nobody has it any more");
        writes(&image).expect("nobody has it any more");
        writes(&base).expect("nobody has it any more");
        assert_eq!(health(&image), Health::Clean);
    }
}

#[test]
fn read_only_image_allows_readers_only() {
    for folder in [temp_dir_on_disk(), temp_dir_on_tmpfs()] {
        let image = overlay(&folder, "image.qcow2");
        let served = Served::new(&image, &["--read-only"]);
        reads(&image).expect("a reader");
        is_locked(writes(&image));
        refused(&image, &[]);
        let beside = Served::new(&image, &["--read-only"]);
        for server in [&beside, &served] {
            let uri = server.uri();
            run_tool("qemu-img", &["compare", "-f", "qcow2", "-F", "raw", text(&image), &uri]);
        }
        let (success, said) = served.try_io(&["write -P 1 0 64k"]);
        assert!(!success, "{said}");
        beside.stop();
        served.stop();
        writes(&image).expect("nobody has it any more");
    }
}

#[test]
fn data_file_serves_one_image() {
    let folder = temp_dir_on_disk();
    let data = folder.path().join("data");
    let options = format!("data_file={}", text(&data));
    let image = folder.path().join("image.qcow2");
    run_tool("qemu-img", &["create", "-f", "qcow2", "-o", &options, text(&image), "1M"]);
    let served = Served::new(&image, &[]);
    is_locked(match qemu_io("raw", text(&data), &["write -P 9 0 64k"]) {
        (true, _) => Ok(()),
        (false, said) => Err(said),
    });
    served.stop();
}

#[test]
fn image_in_use_by_qemu_refused() {
    let folder = temp_dir_on_disk();
    let image = overlay(&folder, "image.qcow2");
    let socket = folder.path().join("qemu");
    let mut command = Command::new("qemu-nbd");
    command.args(["-f", "qcow2", "-t", "-k", text(&socket), text(&image)]);
    let _qemu = larder_bench::campaign::process::Process::start(command).expect("starts");
    // qemu-nbd listens once it has opened the image.
    wait_until("qemu-nbd listens", || socket.exists());
    let said = refused(&image, &[]);
    assert!(said.contains("in use"), "{said}");
    let said = refused(&overlay_of(&image), &[]);
    assert!(said.contains("image.qcow2") && said.contains("in use"), "{said}");
}

/// Creates an overlay of an image that is in use.
fn overlay_of(image: &Path) -> PathBuf {
    let top = image.with_file_name("top.qcow2");
    let name = image.file_name().and_then(|name| name.to_str()).expect("UTF-8");
    let arguments = ["create", "-u", "-f", "qcow2", "-b", name, "-F", "qcow2", text(&top), "1M"];
    run_tool("qemu-img", &arguments);
    top
}
