//! The waiting time for a lock on a file that another process has.
//!
//! A process that was killed keeps its locks until the kernel has ended its I/O and freed its memory, however long
//! that takes. Its successor waits as long as that process exists, without a time limit. In-flight I/O (direct I/O to
//! a slow device) may outlive the process itself and hold the lock: then no process of the host owns it. A process
//! that continues to run is waited for only briefly, in case it was asked to stop.

use std::fs;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::time::{Duration, Instant};

use crate::opener::opener;

/// The maximum waiting time for a lock owner that continues to run.
const RUNNING_WAIT_MAX: Duration = Duration::from_secs(3);

/// The maximum waiting time for a lock that no process of the host owns. The bound is for owners that are not
/// visible: in another PID namespace, or in a descriptor in transit through a socket.
const ORPHAN_WAIT_MAX: Duration = Duration::from_secs(60);

/// The initial and the maximum interval between two searches for the owner, each of which inspects every process of
/// the host.
const INSPECT_INTERVAL_MIN: Duration = Duration::from_millis(100);
const INSPECT_INTERVAL_MAX: Duration = Duration::from_secs(2);

/// The interval at which the reason for waiting is logged.
const REPORT_INTERVAL: Duration = Duration::from_secs(10);

/// The bit of SIGKILL in the masks of pending signals.
const KILL_PENDING: u64 = 1 << (libc::SIGKILL - 1);

/// The kernel's PF_EXITING: a task that is exiting.
const PF_EXITING: u64 = 4;

/// A kind of lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockKind {
    /// A byte-range lock that belongs to an open file (`F_OFD_SETLK`): any one, or one that includes the given byte.
    Ofd(Option<i64>),
    /// `flock`.
    Flock,
    /// The claim of a block device (open(2), `O_EXCL`). The kernel does not report which open file has it, so a
    /// process that is exiting counts as its owner if it has the device open.
    Claim,
}

impl LockKind {
    /// Returns true if a line of `/proc/PID/fdinfo` describes a lock of this kind.
    fn matches_line(self, line: &str) -> bool {
        let (name, byte) = match self {
            Self::Ofd(byte) => ("OFDLCK", byte),
            Self::Flock => ("FLOCK", None),
            Self::Claim => return false,
        };
        let mut words = line.split_whitespace();
        if !words.any(|word| word == name) {
            return false;
        }
        // An example: "ADVISORY WRITE -1 fe:00:123 300 300"
        let mut range = words.skip(4).map(|word| word.parse::<i64>().unwrap_or(i64::MAX));
        match (byte, range.next(), range.next()) {
            (Some(byte), Some(first), Some(last)) => (first..=last).contains(&byte),
            _ => true,
        }
    }
}

/// The owner of a lock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LockOwner {
    /// A process that continues to run, or one that cannot be inspected.
    Running,
    /// A process that was killed or is exiting, as `larder, pid 4711`.
    Exiting(String),
    /// The lock belongs to no process of this host.
    Orphaned,
}

/// Decides, from one attempt to the next, whether to keep waiting for a lock.
#[derive(Debug)]
pub struct LockWait {
    kind: LockKind,
    /// The start of the wait for an owner that is not exiting: the first attempt, or the time when an exiting owner
    /// had exited.
    since: Option<Instant>,
    owner: Option<LockOwner>,
    /// The times of the first and the last search for the owner.
    inspected: Option<(Instant, Instant)>,
    reported: Option<Instant>,
}

impl LockWait {
    /// Starts waiting for a lock, at the first attempt that fails.
    pub fn new(kind: LockKind) -> Self {
        Self { kind, since: None, owner: None, inspected: None, reported: None }
    }

    /// Returns true if the caller should retry to lock `file`, which failed just now, and logs the reason. `failure` is
    /// a text that names the locked object and the failure.
    pub fn should_retry(&mut self, file: BorrowedFd<'_>, failure: &dyn std::fmt::Display) -> bool {
        let now = Instant::now();
        let (first, last) = self.inspected.unwrap_or((now, now));
        if self.inspected.is_some() && now - last < inspect_interval(last - first) {
            return true;
        }
        self.inspected = Some((first, now));
        let owner = opener().lock_owner(file, self.kind);
        let owner_changed = |before: &LockOwner| std::mem::discriminant(before) != std::mem::discriminant(&owner);
        // Locks that an exiting process leaves to the kernel are waited for anew.
        let was_exiting = matches!(self.owner, Some(LockOwner::Exiting(_)));
        let since = match self.since {
            Some(since) if !was_exiting => since,
            _ => Instant::now(),
        };
        self.since = Some(since);
        let wait_max = match &owner {
            LockOwner::Running => Some(RUNNING_WAIT_MAX),
            LockOwner::Exiting(_) => None,
            LockOwner::Orphaned => Some(ORPHAN_WAIT_MAX),
        };
        let retry = wait_max.is_none_or(|patience| since.elapsed() < patience);
        let recently_reported = self.reported.is_some_and(|at| at.elapsed() < REPORT_INTERVAL);
        if retry && (!recently_reported || self.owner.as_ref().is_none_or(owner_changed)) {
            self.reported = Some(Instant::now());
            log_wait(failure, &owner);
        }
        self.owner = Some(owner);
        retry
    }
}

/// Returns the interval until the next search for the owner, after waiting for `waited`.
fn inspect_interval(waited: Duration) -> Duration {
    (waited / 4).clamp(INSPECT_INTERVAL_MIN, INSPECT_INTERVAL_MAX)
}

fn log_wait(busy: &dyn std::fmt::Display, owner: &LockOwner) {
    let (running, orphan) = (RUNNING_WAIT_MAX.as_secs(), ORPHAN_WAIT_MAX.as_secs());
    match owner {
        LockOwner::Running => {
            tracing::info!(
                event = "lock-wait",
                "{busy}; waiting up to {running} s, in case its owner is a server that is exiting"
            );
        }
        LockOwner::Exiting(process) => {
            tracing::info!(event = "lock-wait", "{busy}; waiting until {process} has exited");
        }
        LockOwner::Orphaned => {
            tracing::info!(
                event = "lock-wait",
                "{busy}; waiting until the kernel has completed the I/O of a killed process, for up to {orphan} s"
            );
        }
    }
}

/// Finds the process that has a lock on `file` through another open file, as far as it is visible to this process.
pub(crate) fn find_owner(file: BorrowedFd<'_>, kind: LockKind) -> LockOwner {
    let (Some(locked), Ok(processes)) = (target_identity(file, kind), fs::read_dir("/proc")) else {
        return LockOwner::Running;
    };
    let this_name = process_name(std::process::id());
    let (mut exiting, mut all_inspected) = (None, true);
    for pid in processes.filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok()) {
        let holds = holds_lock(pid, locked, kind);
        // The files of an exiting process may be closed already, while the kernel still holds them.
        let may_hold = holds.unwrap_or(false) || process_name(pid) == this_name;
        if may_hold && is_exiting(pid) {
            exiting.get_or_insert_with(|| format!("{}, pid {pid}", process_name(pid)));
        } else if holds == Some(true) && kind != LockKind::Claim {
            return LockOwner::Running;
        }
        all_inspected &= holds.is_some();
    }
    match exiting {
        Some(process) => LockOwner::Exiting(process),
        // The kernel's own users of a device (mounts, RAID) are no processes.
        None if all_inspected && kind != LockKind::Claim => LockOwner::Orphaned,
        None => LockOwner::Running,
    }
}

fn process_name(pid: u32) -> String {
    let name = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
    name.trim_end().to_owned()
}

/// Returns the numbers that identify the locked object: those of the file, or of the device that it represents.
fn target_identity(file: BorrowedFd<'_>, kind: LockKind) -> Option<(u64, u64)> {
    let metadata = fs::metadata(format!("/proc/self/fd/{}", file.as_raw_fd())).ok()?;
    Some(identity_of(&metadata, kind))
}

fn identity_of(metadata: &fs::Metadata, kind: LockKind) -> (u64, u64) {
    match kind {
        LockKind::Claim => (0, metadata.rdev()),
        LockKind::Ofd(_) | LockKind::Flock => (metadata.dev(), metadata.ino()),
    }
}

/// Returns true if a process has a lock of `kind` on the file `target`. Returns `None` if this user may not inspect
/// the process.
fn holds_lock(pid: u32, target: (u64, u64), kind: LockKind) -> Option<bool> {
    let descriptors = match fs::read_dir(format!("/proc/{pid}/fd")) {
        Ok(descriptors) => descriptors,
        Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => return None,
        // The process has exited.
        Err(_) => return Some(false),
    };
    let is_target = |path| fs::metadata(path).is_ok_and(|found| identity_of(&found, kind) == target);
    if kind == LockKind::Claim {
        let in_dev = |path: &std::path::Path| fs::read_link(path).is_ok_and(|link| link.starts_with("/dev"));
        let mut paths = descriptors.flatten().map(|descriptor| descriptor.path());
        return Some(paths.any(|path| in_dev(&path) && is_target(path)));
    }
    let inode = format!(":{} ", target.1);
    Some(descriptors.flatten().any(|descriptor| {
        let number = descriptor.file_name();
        let info = fs::read_to_string(format!("/proc/{pid}/fdinfo/{}", number.to_string_lossy())).unwrap_or_default();
        // The file itself is queried only after a match: a file on an unreachable server would not answer.
        info.lines().any(|line| line.contains(&inode) && kind.matches_line(line)) && is_target(descriptor.path())
    }))
}

/// Returns true if all threads of a process were killed or are exiting, and one of them still exists.
fn is_exiting(pid: u32) -> bool {
    let Ok(threads) = fs::read_dir(format!("/proc/{pid}/task")) else {
        return false;
    };
    let mut any_exiting = false;
    for thread in threads.flatten() {
        let file = |name: &str| fs::read_to_string(thread.path().join(name)).unwrap_or_default();
        match TaskState::parse(&file("stat"), &file("status")) {
            TaskState::Running => return false,
            TaskState::Exiting => any_exiting = true,
            TaskState::Exited => {}
        }
    }
    any_exiting
}

/// The state of a task of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TaskState {
    Running,
    Exiting,
    /// A zombie: it has released everything, but was not waited for.
    Exited,
}

impl TaskState {
    /// Parses `stat` and `status` of proc(5), which are both empty for a task that no longer exists.
    fn parse(stat: &str, status: &str) -> Self {
        // The name is in parentheses, and may contain some.
        let Some((_, rest)) = stat.rsplit_once(')') else {
            return Self::Exited;
        };
        let fields: Vec<&str> = rest.split_whitespace().collect();
        let flags = fields.get(6).and_then(|flags| flags.parse::<u64>().ok());
        let pending = |name: &str| {
            let mask = status.lines().find_map(|line| line.strip_prefix(name));
            mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
        };
        match fields.first() {
            Some(&("Z" | "X")) | None => Self::Exited,
            _ if flags.unwrap_or(0) & PF_EXITING != 0 => Self::Exiting,
            _ if (pending("SigPnd:") | pending("ShdPnd:")) & KILL_PENDING != 0 => Self::Exiting,
            _ => Self::Running,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    #[test]
    fn locks_match_by_kind_and_byte() {
        let ofd = "lock:\t1: OFDLCK ADVISORY  WRITE -1 fe:00:123 300 300";
        let flock = "lock:\t1: FLOCK  ADVISORY  WRITE 99 fe:00:123 0 EOF";
        assert!(LockKind::Ofd(None).matches_line(ofd) && LockKind::Ofd(Some(300)).matches_line(ofd));
        assert!(!LockKind::Ofd(Some(299)).matches_line(ofd) && !LockKind::Flock.matches_line(ofd));
        assert!(LockKind::Flock.matches_line(flock) && !LockKind::Ofd(None).matches_line(flock));
    }

    #[test]
    fn killed_task_is_exiting_until_exited() {
        let stat = |state: &str, flags: u64| format!("7 (a) b) {state} 1 2 3 4 5 {flags} 6");
        let status = |pending: &str| format!("Name:\ta\nSigPnd:\t{pending}\nShdPnd:\t0000000000000000\n");
        let state_of = |state, flags, pending| TaskState::parse(&stat(state, flags), &status(pending));
        assert_eq!(state_of("S", 0x40_0100, "0"), TaskState::Running);
        assert_eq!(state_of("S", 0x40_0100, "0000000000004000"), TaskState::Running);
        assert_eq!(state_of("D", 0x40_0100, "0000000000000100"), TaskState::Exiting);
        assert_eq!(state_of("R", 0x40_0104, "0"), TaskState::Exiting);
        assert_eq!(state_of("Z", 0x40_0104, "0000000000000100"), TaskState::Exited);
        assert_eq!(TaskState::parse("", ""), TaskState::Exited);
    }

    #[test]
    fn lock_of_living_process_is_running() {
        let file = tempfile::NamedTempFile::new().expect("a file");
        let open = || File::open(file.path()).expect("opens");
        let (locked, other) = (open(), open());
        let lock = |file: &File| rustix::fs::flock(file, rustix::fs::FlockOperation::NonBlockingLockExclusive);
        lock(&locked).expect("it is unlocked");
        assert!(lock(&other).is_err());
        assert_eq!(find_owner(other.as_fd(), LockKind::Flock), LockOwner::Running);
        assert!(LockWait::new(LockKind::Flock).should_retry(other.as_fd(), &"a file"));
    }
}
