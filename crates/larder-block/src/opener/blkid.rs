//! The findings of util-linux's `blkid` on a file or device.

use std::fs::File;
use std::io::{self, Read as _};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The maximum time that a device may take to answer `blkid`.
const TIMEOUT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// The answer of `blkid`.
#[derive(Clone, Debug)]
pub struct BlkidOutput {
    /// The exit status; `None` if a signal has ended the program.
    pub status: Option<i32>,
    /// The findings: lines `KEY=VALUE`.
    pub stdout: String,
    /// The error output.
    pub stderr: String,
}

pub(super) fn run(file: &File) -> io::Result<BlkidOutput> {
    let mut command = Command::new("blkid");
    // The standard input is the very file that was opened.
    command.args(["--probe", "--output", "export", "/proc/self/fd/0"]);
    let started = command.stdin(file.try_clone()?).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = started.map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => io::Error::other("the program blkid was not found; install util-linux"),
        _ => io::Error::other(format!("blkid: {error}")),
    })?;
    let status = wait(&mut child)?;
    let mut output = BlkidOutput { status, stdout: String::new(), stderr: String::new() };
    // The output is shorter than a pipe's buffer.
    let _ = child.stdout.take().map(|mut out| out.read_to_string(&mut output.stdout));
    let _ = child.stderr.take().map(|mut out| out.read_to_string(&mut output.stderr));
    Ok(output)
}

fn wait(child: &mut Child) -> io::Result<Option<i32>> {
    let started = Instant::now();
    loop {
        match child.try_wait()? {
            Some(status) => return Ok(status.code()),
            None if started.elapsed() < TIMEOUT => std::thread::sleep(POLL_INTERVAL),
            None => {
                // A `blkid` that waits for its device exits once the device answers, and is not waited for.
                let _ = child.kill();
                return Err(io::Error::other(format!("blkid has not completed within {} s", TIMEOUT.as_secs())));
            }
        }
    }
}
