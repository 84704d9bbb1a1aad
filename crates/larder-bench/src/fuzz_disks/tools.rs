//! QEMU's tools and the larder commands, run to their end.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use super::fault::Fault;
use crate::campaign::process::Process;

/// No tool takes longer for a disk of some MiB, on a machine as busy as it may be.
const PATIENCE: Duration = Duration::from_secs(300);

/// An exit code, `None` for a signal, and all that was printed.
pub(super) type Ended = (Option<i32>, String);

/// Runs a command to its end; one that does not end is killed, and a fault.
pub(super) fn run(command: Command) -> Result<Ended, Fault> {
    let name = words(&command);
    let mut process = Process::start(command).map_err(|error| Fault::new("set-up", format!("{error:#}")))?;
    match process.wait(PATIENCE) {
        Ok(status) => Ok((status.code(), process.output())),
        Err(error) => Err(Fault::new("hang", format!("{name}: {error:#}"))),
    }
}

/// Runs one of QEMU's tools, which is trusted to end.
pub(super) fn qemu(program: &str, arguments: &[&str]) -> Result<Ended, Fault> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    let output: Output = command.output().map_err(|error| {
        Fault::new(
            "set-up",
            format!("starting {program}: {error}; testbed/setup.sh installs it"),
        )
    })?;
    let mut said = String::from_utf8_lossy(&output.stdout).into_owned();
    said.push_str(&String::from_utf8_lossy(&output.stderr));
    Ok((output.status.code(), said))
}

/// The same, of which anything but success is a fault of the set-up.
pub(super) fn qemu_must(program: &str, arguments: &[&str]) -> Result<String, Fault> {
    let (code, said) = qemu(program, arguments)?;
    match code {
        Some(0) => Ok(said),
        _ => Err(Fault::new("qemu", format!("{program} {}: {said}", arguments.join(" ")))),
    }
}

/// The disk's bytes, or a snapshot's, as `qemu-img convert` gives them.
pub(super) fn contents(image: &Path, format: &str, snapshot: Option<&str>, folder: &Path) -> Result<Vec<u8>, Fault> {
    let raw = folder.join("converted");
    let (image, to) = (image.to_string_lossy(), raw.to_string_lossy());
    let mut arguments = vec!["convert", "-f", format, "-O", "raw"];
    if let Some(snapshot) = snapshot {
        arguments.extend(["-l", snapshot]);
    }
    arguments.extend([&*image, &*to]);
    qemu_must("qemu-img", &arguments)?;
    let bytes = std::fs::read(&raw)?;
    std::fs::remove_file(&raw)?;
    Ok(bytes)
}

/// A command as it would be typed.
pub(super) fn words(command: &Command) -> String {
    let mut all = vec![command.get_program().to_string_lossy()];
    all.extend(command.get_args().map(|word| word.to_string_lossy()));
    all.join(" ")
}
