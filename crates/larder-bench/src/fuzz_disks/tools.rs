//! Runs QEMU's tools and the larder commands.

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use super::fault::Fault;
use crate::campaign::process::Process;

/// Time limit of a tool, for a disk of some MiB on a very busy machine.
const PATIENCE: Duration = Duration::from_secs(300);

/// An exit code, `None` for a signal, and the output.
pub(super) type Ended = (Option<i32>, String);

/// Runs a command to its end. A command that does not exit is killed, and is a fault.
pub(super) fn run(command: Command) -> Result<Ended, Fault> {
    let name = words(&command);
    let mut process = Process::start(command).map_err(|error| Fault::new("set-up", format!("{error:#}")))?;
    match process.wait(PATIENCE) {
        Ok(status) => Ok((status.code(), process.output())),
        Err(error) => Err(Fault::new("hang", format!("{name}: {error:#}"))),
    }
}

/// Runs one of QEMU's tools, without a time limit.
pub(super) fn qemu(program: &str, arguments: &[&str]) -> Result<Ended, Fault> {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    let output: Output = command
        .output()
        .map_err(|error| Fault::new("set-up", format!("starting {program}: {error}; testbed/setup.sh installs it")))?;
    let mut stdout = String::from_utf8_lossy(&output.stdout).into_owned();
    stdout.push_str(&String::from_utf8_lossy(&output.stderr));
    Ok((output.status.code(), stdout))
}

/// Runs one of QEMU's tools, which must succeed.
pub(super) fn run_qemu_tool_ok(program: &str, arguments: &[&str]) -> Result<String, Fault> {
    let (code, output) = qemu(program, arguments)?;
    match code {
        Some(0) => Ok(output),
        _ => Err(Fault::new("qemu", format!("{program} {}: {output}", arguments.join(" ")))),
    }
}

/// Returns the bytes of the disk, or of a snapshot, as `qemu-img convert` reads them.
pub(super) fn contents(image: &Path, format: &str, snapshot: Option<&str>, directory: &Path) -> Result<Vec<u8>, Fault> {
    let raw = directory.join("converted");
    let (image, to) = (image.to_string_lossy(), raw.to_string_lossy());
    let mut arguments = vec!["convert", "-f", format, "-O", "raw"];
    if let Some(snapshot) = snapshot {
        arguments.extend(["-l", snapshot]);
    }
    arguments.extend([&*image, &*to]);
    run_qemu_tool_ok("qemu-img", &arguments)?;
    let bytes = std::fs::read(&raw)?;
    std::fs::remove_file(&raw)?;
    Ok(bytes)
}

/// Returns a command as one would type it.
pub(super) fn words(command: &Command) -> String {
    let mut all = vec![command.get_program().to_string_lossy()];
    all.extend(command.get_args().map(|word| word.to_string_lossy()));
    all.join(" ")
}
