//! Errors of standard output.

use std::fs::File;
use std::process::{Command, Stdio};

use crate::support::{larder_path, run_tool, temp_dir_on_tmpfs};
use crate::text_of;

/// A closed pipe on standard output is no error; a full file system is one.
#[test]
fn closed_pipe_succeeds_full_disk_fails() {
    let folder = temp_dir_on_tmpfs();
    let image = folder.path().join("disk.qcow2");
    run_tool("qemu-img", &["create", "-q", "-f", "qcow2", text_of(&image), "1G"]);
    let image = text_of(&image);
    let drive = format!("file={image},if=virtio,format=qcow2");
    let commands: [&[&str]; 8] = [
        &["disk", "info", image],
        &["disk", "info", image, "--output", "json"],
        &["disk", "check", image],
        &["disk", "check", image, "--output", "json"],
        &["disk", "tune", image],
        &["disk", "tune", image, "--output", "json"],
        &["disk", "serve", "--print-capabilities"],
        &["run", "--dry-run", "--", "qemu-system-x86_64", "-drive", &drive],
    ];
    for arguments in commands {
        let run = |stdout: Stdio| {
            let output = Command::new(larder_path()).args(arguments).stdout(stdout).output();
            let output = output.expect("larder starts");
            (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
        };
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let (code, said) = run(writer.into());
        assert_eq!(code, Some(0), "{arguments:?}: {said}");
        assert!(!said.contains("pipe") && !said.contains("panicked"), "{arguments:?}: {said}");
        let full = File::options().write(true).open("/dev/full").expect("/dev/full");
        let (code, said) = run(full.into());
        assert_eq!(code, Some(2), "{arguments:?}: {said}");
        assert!(said.contains("larder: cannot write to standard output"), "{arguments:?}: {said}");
    }
}
