//! The files that make Larder known to programs that look for vhost-user back-ends (QEMU
//! `docs/interop/vhost-user.json`).

use std::path::Path;
use std::process::Command;

use larder_bench::campaign::front_end::{FrontEnd, Options};
use larder_bench::campaign::guest::project;
use larder_bench::campaign::process::Process;
use serde_json::Value;

use crate::support::{
    TEST_TIMEOUT, assert_io_works, create_image, larder_path, run_command, temp_dir_on_disk, temp_dir_on_tmpfs,
};

/// Returns the program that the description names, at its path in the project.
fn back_end(arguments: &[&Path]) -> Command {
    let mut command = Command::new(project().join("packaging/qemu/vhost-user-blk"));
    let folder = larder_path().parent().expect("a folder").display().to_string();
    command.env("PATH", format!("{folder}:/usr/bin:/bin")).args(arguments);
    command
}

#[test]
fn back_end_keeps_vhost_user_conventions() {
    let text = std::fs::read_to_string(project().join("packaging/qemu/50-larder.json")).expect("is there");
    let described: Value = serde_json::from_str(&text).expect("is JSON");
    let (code, said) = run_command(back_end(&["--print-capabilities".as_ref()]));
    let capabilities: Value = serde_json::from_str(&said).expect("is JSON");
    assert_eq!((code, &capabilities["type"]), (Some(0), &described["type"]));
    let binary = described["binary"].as_str().expect("a path");
    assert_eq!(Path::new(binary).file_name(), Some("vhost-user-blk".as_ref()));

    let (folder, sockets) = (temp_dir_on_disk(), temp_dir_on_tmpfs());
    let (disk, socket) = (create_image(folder.path(), 1 << 20), sockets.path().join("blk"));
    let arguments = ["--blk-file".as_ref(), disk.as_path(), "--socket-path".as_ref(), socket.as_path()];
    let mut process = Process::start(back_end(&arguments)).expect("starts");
    process.wait_for(" serving ", TEST_TIMEOUT).expect("serves");
    assert_io_works(&mut FrontEnd::connect(&socket, Options::default()).expect("connects"), 1);
    process.signal(libc::SIGTERM);
    assert!(process.wait(TEST_TIMEOUT).expect("ends").success(), "{}", process.output());
}
