//! The process that serves a VM, started and stopped by the hook.
//!
//! On a host that runs systemd it is `larder@NAME.service`; elsewhere it is a confined process in its own session,
//! with an opener as its child. The log of both is `/var/log/larder/NAME.log`. The hook records the server that it
//! has started in `/run/larder-hook/NAME`. A server that ran before belongs to the user: it is used, and not stopped.
//!
//! Invariants:
//! - Only a server that the hook started is stopped. A process is identified by its PID and start time, and is
//!   signalled through a pidfd, which cannot refer to another process.
//! - A record is trusted because only the hook's user can write to its directory. The directory of sockets belongs to
//!   the servers.
//! - Nothing is killed. A server that gets SIGTERM may have to write a lot to its disks first; it continues on its own,
//!   and the next start waits for it.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Read, Seek, SeekFrom};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use larder_block::small_file::{self, CONFIG_BYTES_MAX};
use larder_vm::control::fetch_disks;
use larder_vm::libvirt::{hook_directory, socket_directory};
use larder_vm::vm::config::VmConfig;
use rustix::event::{PollFd, PollFlags, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use rustix::time::Timespec;

use crate::output::print_stderr;

/// Maximum time until a new server serves: as long as systemd gives a service.
const START_TIMEOUT: Duration = Duration::from_secs(90);

/// Maximum time that the end of a domain waits for its server to exit.
const STOP_TIMEOUT: Duration = Duration::from_secs(30);

/// Interval between two polls.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Maximum number of bytes of a server's log that are reported when it could not start.
const LOG_TAIL_BYTES_MAX: u64 = 4096;

/// Record of the server that the hook has started.
#[derive(Debug, PartialEq, Eq)]
enum ServerRecord {
    /// The unit `larder@NAME.service`.
    Unit,
    /// A process, identified by its PID and start time.
    Process { pid: i32, start_time: u64, is_stopping: bool },
}

impl ServerRecord {
    fn path(name: &str) -> anyhow::Result<PathBuf> {
        let directory = hook_directory().context("the directory of the hook's records")?;
        Ok(directory.join(name))
    }

    fn read(name: &str) -> anyhow::Result<Option<Self>> {
        let path = Self::path(name)?;
        Ok(match small_file::read_text(&path, CONFIG_BYTES_MAX) {
            Ok(text) => Self::parse(&text),
            Err(error) if error.kind() == ErrorKind::NotFound => Self::read_version_0_1(name),
            Err(error) => bail!("cannot read {}: {error}", path.display()),
        })
    }

    /// Reads a record of version 0.1 or earlier, from the directory of sockets. The user of that directory may have
    /// written the record, so a process in it is ignored, and never signalled.
    fn read_version_0_1(name: &str) -> Option<Self> {
        let path = socket_directory().join(format!("{name}.hook"));
        let text = small_file::read_text(&path, CONFIG_BYTES_MAX).ok()?;
        Self::parse(&text).filter(|note| *note == Self::Unit)
    }

    fn parse(text: &str) -> Option<Self> {
        let words: Vec<&str> = text.split_whitespace().collect();
        let process = |pid: &str, start: &str, is_stopping| {
            Some(Self::Process { pid: pid.parse().ok()?, start_time: start.parse().ok()?, is_stopping })
        };
        match words.as_slice() {
            ["unit"] => Some(Self::Unit),
            ["process", pid, start] => process(pid, start, false),
            ["process", pid, start, "stopping"] => process(pid, start, true),
            _ => None,
        }
    }

    fn write(&self, name: &str) -> anyhow::Result<()> {
        let text = match self {
            Self::Unit => "unit\n".to_owned(),
            Self::Process { pid: number, start_time: start, is_stopping } => {
                format!("process {number} {start}{}\n", if *is_stopping { " stopping" } else { "" })
            }
        };
        // A restart of the host removes the file, so it need not be durable.
        let path = Self::path(name)?;
        // No name of a VM begins with a dot.
        let temporary = path.with_file_name(format!(".{name}.new"));
        let written = fs::write(&temporary, text).and_then(|()| fs::rename(&temporary, &path));
        written.with_context(|| format!("cannot write {}", path.display()))
    }

    fn remove(name: &str) {
        // A record that cannot be removed is of a process that has exited.
        if let Ok(path) = Self::path(name) {
            let _ = fs::remove_file(path);
        }
        let _ = fs::remove_file(socket_directory().join(format!("{name}.hook")));
    }
}

/// Returns the start time of a process, in clock ticks since boot; `None` if it has exited.
fn process_start_time(number: i32) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{number}/stat")).ok()?;
    // The process name, in parentheses, may contain anything.
    let (_, rest) = stat.rsplit_once(')')?;
    let mut fields = rest.split_whitespace();
    let state = fields.next()?;
    let start = fields.nth(18)?.parse().ok()?;
    (!matches!(state, "Z" | "X")).then_some(start)
}

/// Opens the process with this PID, if it is the one with this start time.
fn open_process(number: i32, start: u64) -> Option<OwnedFd> {
    let process = pidfd_open(Pid::from_raw(number)?, PidfdFlags::empty()).ok()?;
    // If the start time fits now, the pidfd refers to this process: a PID is reused only after its process was
    // reaped, so no other process had the number when it was opened.
    (process_start_time(number) == Some(start)).then_some(process)
}

/// Waits for the process to exit; returns false after `limit`.
fn wait_for_exit(process: &OwnedFd, limit: Duration) -> bool {
    let begin = Instant::now();
    loop {
        let remaining = limit.saturating_sub(begin.elapsed());
        let remaining = Timespec { tv_sec: remaining.as_secs() as i64, tv_nsec: remaining.subsec_nanos().into() };
        match poll(&mut [PollFd::new(process, PollFlags::IN)], Some(&remaining)) {
            Err(rustix::io::Errno::INTR) => {}
            ready => return ready.is_ok_and(|ready| ready > 0),
        }
    }
}

fn has_systemd() -> bool {
    Path::new("/run/systemd/system").is_dir()
}

fn unit_name(name: &str) -> String {
    // A VM's name has no character that systemd escapes.
    format!("larder@{name}.service")
}

fn systemctl(arguments: &[&str]) -> anyhow::Result<(bool, String)> {
    let output = Command::new("systemctl").args(arguments).stdin(Stdio::null()).output();
    let output = output.context("cannot start systemctl")?;
    let message = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Ok((output.status.success(), message))
}

/// Starts the VM's server, unless it runs; when this returns, QEMU can connect.
pub(super) fn start(config: &VmConfig) -> anyhow::Result<()> {
    let name = config.name.as_str();
    let deadline = Instant::now() + START_TIMEOUT;
    if let Some(ServerRecord::Process { pid: number, start_time: start, is_stopping: true }) = ServerRecord::read(name)?
    {
        if let Some(process) = open_process(number, start)
            && !wait_for_exit(&process, START_TIMEOUT)
        {
            bail!("the VM's previous server ({number}) still writes to its disks; start the domain when it has ended");
        }
        ServerRecord::remove(name);
    }
    if UnixStream::connect(&config.control).is_ok() {
        // The running server may still be opening its disks.
        return wait_until_serving(config, None, deadline).with_context(|| format!("the running server of {name}"));
    }
    match has_systemd() {
        true => start_unit(config),
        false => start_process(config, deadline),
    }
}

fn start_unit(config: &VmConfig) -> anyhow::Result<()> {
    let unit = unit_name(&config.name);
    create_socket_directory()?;
    ServerRecord::Unit.write(&config.name)?;
    // The unit is of Type=notify, so the server serves when `systemctl start` returns.
    let (started, said) = systemctl(&["start", "--quiet", &unit])?;
    if started {
        return Ok(());
    }
    let journal = Command::new("journalctl")
        .args(["--quiet", "--no-pager", "--output=cat", "--lines=5", "--unit", &unit])
        .stdin(Stdio::null())
        .output();
    let journal = journal.map(|output| String::from_utf8_lossy(&output.stdout).trim().to_owned());
    bail!("{unit} could not be started: {said}\n{}", journal.unwrap_or_default());
}

fn create_socket_directory() -> anyhow::Result<()> {
    let directory = socket_directory();
    let made = DirBuilder::new().recursive(true).mode(0o755).create(&directory);
    made.with_context(|| format!("cannot create {}", directory.display()))
}

fn start_process(config: &VmConfig, deadline: Instant) -> anyhow::Result<()> {
    let name = config.name.as_str();
    create_socket_directory()?;
    let (log, mut log_file) = open_log(name)?;
    let program = std::env::current_exe().context("cannot find larder's own program file")?;
    let mut command = Command::new(&program);
    command.arg("vm").arg(name).arg("--confine").current_dir("/");
    // libvirtd's systemd variables are not for its children.
    for variable in ["NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES", "WATCHDOG_USEC", "WATCHDOG_PID"] {
        command.env_remove(variable);
    }
    let output = log_file.try_clone().context("the log")?;
    command.stdin(Stdio::null()).stdout(output.try_clone().context("the log")?).stderr(output);
    // SAFETY: between fork and exec the closure makes only system calls, which are async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            // libvirtd's session may end, and libvirtd waits for all processes that have its descriptors.
            libc::setsid();
            libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC);
            Ok(())
        });
    }
    let begin = log_file.seek(SeekFrom::End(0)).unwrap_or_default();
    let mut child = command.spawn().with_context(|| format!("cannot start {}", program.display()))?;
    let pid = child.id() as i32;
    let recorded = match process_start_time(pid) {
        Some(start) => ServerRecord::Process { pid, start_time: start, is_stopping: false }.write(name),
        // The process has exited, which is reported below.
        None => Ok(()),
    };
    let served = recorded.and_then(|()| wait_until_serving(config, Some(&mut child), deadline));
    let Err(error) = served else { return Ok(()) };
    stop_child(&mut child);
    ServerRecord::remove(name);
    let mut output = String::new();
    let _ = log_file.seek(SeekFrom::Start(begin));
    let _ = log_file.take(LOG_TAIL_BYTES_MAX).read_to_string(&mut output);
    match output.trim() {
        "" => Err(error.context(format!("larder vm {name} --confine (its log is in {})", log.display()))),
        output => bail!("larder vm {name} --confine: {error:#}\n{output}"),
    }
}

/// Stops a child that does not serve yet, so that no data was written through it.
fn stop_child(child: &mut Child) {
    if let Some(number) = Pid::from_raw(child.id() as i32) {
        // The child was not waited for yet, so its PID cannot have been reused.
        let _ = rustix::process::kill_process(number, Signal::TERM);
    }
    let begin = Instant::now();
    while begin.elapsed() < STOP_TIMEOUT {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

fn open_log(name: &str) -> anyhow::Result<(PathBuf, File)> {
    let directory = match rustix::process::geteuid().is_root() {
        true => PathBuf::from("/var/log/larder"),
        false => socket_directory(),
    };
    let path = directory.join(format!("{name}.log"));
    let made = DirBuilder::new().recursive(true).mode(0o755).create(&directory);
    let file = made.and_then(|()| {
        let mut options = OpenOptions::new();
        options.create(true).append(true).read(true).mode(0o640);
        options.open(&path)
    });
    let file = file.with_context(|| format!("cannot write {}", path.display()))?;
    Ok((path, file))
}

/// Waits until the control socket answers, which it does once all disks are served.
fn wait_until_serving(config: &VmConfig, mut child: Option<&mut Child>, deadline: Instant) -> anyhow::Result<()> {
    loop {
        let answer = fetch_disks(&config.control);
        let Err(error) = answer else { return Ok(()) };
        if let Some(child) = child.as_deref_mut() {
            if let Some(status) = child.try_wait().context("the server")? {
                bail!("it has ended ({status})");
            }
        } else if UnixStream::connect(&config.control).is_err() {
            bail!("it has ended");
        }
        if Instant::now() >= deadline {
            bail!("it did not serve within {} s: {error}", START_TIMEOUT.as_secs());
        }
        std::thread::sleep(POLL_INTERVAL);
    }
}

/// Stops the server that the hook started for the VM, if there is one, and waits up to `STOP_TIMEOUT` for it to
/// exit.
pub(super) fn stop(name: &Path) -> anyhow::Result<()> {
    let Some(name) = name.to_str().filter(|name| !name.contains('/')) else {
        return Ok(());
    };
    let ended = match ServerRecord::read(name)? {
        None => return Ok(()),
        Some(ServerRecord::Unit) => stop_unit(name)?,
        Some(ServerRecord::Process { pid: number, start_time: start, .. }) => match open_process(number, start) {
            None => true,
            Some(process) => {
                ServerRecord::Process { pid: number, start_time: start, is_stopping: true }.write(name)?;
                pidfd_send_signal(&process, Signal::TERM).with_context(|| format!("cannot stop {number}"))?;
                wait_for_exit(&process, STOP_TIMEOUT)
            }
        },
    };
    match ended {
        true => ServerRecord::remove(name),
        false => print_stderr(&format!("the server of {name} still writes to its disks, and exits afterwards")),
    }
    Ok(())
}

/// Stops the VM's unit; returns true if it ended in time.
fn stop_unit(name: &str) -> anyhow::Result<bool> {
    let unit = unit_name(name);
    let (stopping, said) = systemctl(&["stop", "--quiet", "--no-block", &unit])?;
    if !stopping {
        bail!("{unit} could not be stopped: {said}");
    }
    let begin = Instant::now();
    while begin.elapsed() < STOP_TIMEOUT {
        // `is-active` also fails for a unit that is stopping, so its output is compared instead of its exit status.
        let output = Command::new("systemctl").args(["is-active", &unit]).stdin(Stdio::null()).output();
        let state = output.context("cannot start systemctl")?.stdout;
        if matches!(state.trim_ascii(), b"inactive" | b"failed" | b"unknown") {
            return Ok(true);
        }
        std::thread::sleep(POLL_INTERVAL);
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process is opened only if both PID and start time fit, and not after it has exited.
    #[test]
    fn pid_and_start_identify_process() {
        let number = std::process::id() as i32;
        let start = process_start_time(number).expect("it runs");
        assert!(open_process(number, start).is_some());
        assert!(open_process(number, start + 1).is_none(), "the number belongs to another process by now");
        let mut child = Command::new("true").spawn().expect("starts");
        let ended = open_process(child.id() as i32, process_start_time(child.id() as i32).unwrap_or_default());
        if let Some(process) = ended {
            assert!(wait_for_exit(&process, START_TIMEOUT));
        }
        let number = child.id() as i32;
        child.wait().expect("ends");
        assert_eq!(process_start_time(number), None);
    }
}
