//! A process, as /proc describes it.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use super::{Obstacle, TargetError, printable};

/// A process, identified even if its PID is reused.
#[derive(Debug)]
pub(super) struct TargetProcess {
    pub(super) pid: Pid,
    pub(super) pidfd: OwnedFd,
    /// Start time, in clock ticks after the host's boot (field 22 of /proc/PID/stat).
    pub(super) start_time: u64,
}

impl TargetProcess {
    pub(super) fn open(pid: Pid) -> Result<Self, TargetError> {
        let pidfd = pidfd_open(pid, PidfdFlags::empty()).map_err(|error| match error {
            // INVAL and NOENT: the number is that of a thread, not of a process.
            Errno::SRCH | Errno::INVAL | Errno::NOENT => TargetError::NoSuchProcess { pid },
            error => failed(pid, "open a pidfd of it", error.into()),
        })?;
        let Stat { state, flags, start_time: started } = match stat(pid) {
            Ok(stat) => stat,
            Err(error) if error.kind() == io::ErrorKind::NotFound && !has_ended(pid, &pidfd)? => {
                let tried = "see it in /proc (which is mounted with hidepid)";
                return Err(TargetError::PermissionDenied { pid, tried });
            }
            Err(error) => return Err(failed(pid, "read its stat", error)),
        };
        if flags & PF_KTHREAD != 0 {
            return Err(TargetError::KernelThread { pid });
        }
        // A process whose main thread alone has ended is not a VM.
        if matches!(state, b'Z' | b'X') {
            return Err(TargetError::Ended { pid });
        }
        Ok(Self { pid, pidfd, start_time: started })
    }

    /// Checks that everything read by the PID since [`Self::open`] belongs to this process.
    pub(super) fn check(&self) -> Result<(), TargetError> {
        let pid = self.pid;
        let ended = has_ended(pid, &self.pidfd)?;
        match !ended && is_alive(pid, self.start_time) {
            true => Ok(()),
            false => Err(TargetError::Ended { pid }),
        }
    }
}

/// Returns true if process `pid` is alive and was started at `start_time` ([`super::Target::start_time`]).
pub fn is_alive(pid: Pid, start_time: u64) -> bool {
    stat(pid).is_ok_and(|stat| stat.start_time == start_time && !matches!(stat.state, b'Z' | b'X'))
}

fn has_ended(pid: Pid, pidfd: &OwnedFd) -> Result<bool, TargetError> {
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    let mut events = [PollFd::from_borrowed_fd(pidfd.as_fd(), PollFlags::IN)];
    let events = poll(&mut events, Some(&now)).map_err(|error| failed(pid, "poll its pidfd", error.into()))?;
    Ok(events > 0)
}

/// Returns true if this error, of reading a process's files in /proc, means that the process has ended.
pub(super) fn is_exit_error(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
}

/// Converts an error of reading /proc files of `pid`. `tried` completes "no right to ..." or "could not ...".
pub(super) fn failed(pid: Pid, tried: &'static str, error: io::Error) -> TargetError {
    match error.raw_os_error() {
        _ if is_exit_error(&error) => TargetError::Ended { pid },
        Some(libc::EACCES | libc::EPERM) => TargetError::PermissionDenied { pid, tried },
        _ => TargetError::Unreadable { pid, tried, error },
    }
}

/// Flag of a kernel thread (linux/sched.h).
const PF_KTHREAD: u64 = 0x0020_0000;

/// Fields of /proc/PID/stat.
#[derive(PartialEq, Eq, Debug)]
struct Stat {
    state: u8,
    flags: u64,
    start_time: u64,
}

fn stat(pid: Pid) -> io::Result<Stat> {
    let stat = fs::read(format!("/proc/{pid}/stat"))?;
    parse_stat(&stat).ok_or_else(|| io::ErrorKind::InvalidData.into())
}

fn parse_stat(stat: &[u8]) -> Option<Stat> {
    // The name, in brackets, may contain any bytes.
    let after_name = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let mut fields = std::str::from_utf8(&stat[after_name..]).ok()?.split_ascii_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    let flags = fields.nth(9 - 4)?.parse().ok()?;
    let started = fields.nth(22 - 10)?.parse().ok()?;
    Some(Stat { state, flags, start_time: started })
}

/// Returns the name of process or thread `pid`, or an empty string if it has ended.
pub(super) fn name(pid: i32) -> String {
    let comm = fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
    printable(comm.strip_suffix(b"\n").unwrap_or(&comm))
}

/// Returns all current processes.
pub(super) fn all() -> impl Iterator<Item = Pid> {
    // If there is no /proc, the target was not found either.
    let entries = fs::read_dir("/proc").into_iter().flatten();
    entries.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok().and_then(Pid::from_raw))
}

/// Fields of /proc/PID/status, or of a thread's.
#[derive(Default, PartialEq, Eq, Debug)]
struct Status {
    tracer: i32,
    process: i32,
    locked_bytes: u64,
    pinned_bytes: u64,
}

impl Status {
    fn parse(text: &[u8]) -> Self {
        let mut status = Self::default();
        for line in String::from_utf8_lossy(text).lines() {
            let Some((key, value)) = line.split_once(':') else {
                continue;
            };
            let number = value.split_ascii_whitespace().next().and_then(|word| word.parse::<u64>().ok());
            let number = number.unwrap_or_default();
            match key {
                "Tgid" => status.process = number as i32,
                "TracerPid" => status.tracer = number as i32,
                "VmLck" => status.locked_bytes = number.saturating_mul(1024),
                "VmPin" => status.pinned_bytes = number.saturating_mul(1024),
                _ => {}
            }
        }
        status
    }
}

/// Returns the obstacles that concern the process as a whole. Locked memory of less than `bytes_min` is a warning,
/// since libraries lock a few pages for keys.
pub(super) fn obstacles(pid: Pid, bytes_min: u64, warnings: &mut Vec<String>) -> Result<Vec<Obstacle>, TargetError> {
    let status = fs::read(format!("/proc/{pid}/status")).map_err(|error| failed(pid, "read its status", error))?;
    let status = Status::parse(&status);
    let mut found: Vec<Obstacle> = traced(pid).into_iter().collect();
    match status.locked_bytes {
        0 => {}
        bytes if bytes < bytes_min => warnings.push(format!(
            "{bytes} bytes of the process are locked in memory (VmLck), too little to be a guest's memory: guest pages \
             among them are evicted like all others"
        )),
        bytes => found.push(Obstacle::Locked { bytes }),
    }
    if status.pinned_bytes > 0 {
        found.push(Obstacle::Pinned { bytes: status.pinned_bytes });
    }
    Ok(found)
}

/// Returns the tracer of any thread of the process.
fn traced(pid: Pid) -> Option<Obstacle> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).ok()?;
    threads.flatten().find_map(|entry| {
        let status = Status::parse(&fs::read(entry.path().join("status")).ok()?);
        let tid = Pid::from_raw(entry.file_name().to_str()?.parse().ok()?)?;
        // The tracer is a thread ID, or zero without a tracer.
        let tracer = Pid::from_raw(status.tracer)?;
        let by_pid = fs::read(format!("/proc/{tracer}/status")).map_or(0, |text| Status::parse(&text).process);
        let by_pid = if by_pid == 0 { status.tracer } else { by_pid };
        let by = name(by_pid);
        Some(Obstacle::Traced { tid, tracer_name: by, tracer_pid: by_pid })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stat_name_may_contain_brackets() {
        let numbers: Vec<String> = (4..=52).map(|field| field.to_string()).collect();
        let stat = [b"1234 (a) \xff 5 (b) R ", numbers.join(" ").as_bytes()].concat();
        let expected = Stat { state: b'R', flags: 9, start_time: 22 };
        assert_eq!(parse_stat(&stat), Some(expected));
        assert_eq!(parse_stat(b"1234 (a) R 4 5"), None);
        assert_eq!(parse_stat(b"1234 (a)"), None);
    }

    #[test]
    fn status_fields_are_parsed() {
        let text = b"Name:\t\xff\nTgid:\t7\nTracerPid:\t42\nVmLck:\t      12 kB\nVmPin:\t       8 kB\n";
        let expected = Status { tracer: 42, process: 7, locked_bytes: 12 << 10, pinned_bytes: 8 << 10 };
        assert_eq!(Status::parse(text), expected);
    }
}
