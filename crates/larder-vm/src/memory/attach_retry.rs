//! Attaching to a process that may have only just started: QEMU writes its pid file, and listens for QMP, before it
//! has all of its memory.
//!
//! The attach begins once two consecutive samples of the process's shared memory are equal. A process that waits
//! because its pager was killed is attached to at once. A failed attach changes nothing of the process, so it is
//! retried as long as the process lives, at growing intervals: the obstacle may disappear.

use std::ffi::OsStr;
use std::fs;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use larder_block::boot::is_tmpfs;
use larder_block::small_file;
use larder_memory::attach::AttachError;
use larder_memory::state::{COMPRESSED_NAME, PAGES_NAME};
use larder_memory::target::{QmpError, pid_of_qmp};
use rustix::process::Pid;

use super::{BudgetError, ManagedMemory, MemoryConfig, MemoryError, SwapError, path_trust};
use crate::vm::config::QemuLocation;
use crate::vm::peer_domain::find_other_domain;

/// Time between two samples of memory that should be equal.
const STABLE_INTERVAL: Duration = Duration::from_millis(250);

/// Time after which an attach is tried even if the memory keeps changing, or none is shared, so that the obstacle is
/// reported.
const STABLE_WAIT_MAX: Duration = Duration::from_secs(10);

/// First pause before a retry; it doubles up to the maximum.
const RETRY_DELAY: Duration = Duration::from_millis(250);
const RETRY_DELAY_MAX: Duration = Duration::from_secs(30);

/// Maximum length of a pid file, in bytes.
const PID_FILE_BYTES_MAX: u64 = 64;

/// A process, identified by process ID and start time, so that a later process with the same ID is different.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QemuProcess {
    /// Process ID.
    pub pid: Pid,
    /// Start time, in ticks since boot.
    started: u64,
}

impl QemuProcess {
    /// Returns the live process with this ID.
    pub fn find_alive(pid: Pid) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).ok()?;
        // The name in parentheses may contain anything (proc(5)). The state is the first field after it, and the
        // start time the 20th.
        let mut words = stat.rsplit_once(')')?.1.split_whitespace();
        let state = words.next()?;
        let started = words.nth(18)?.parse().ok()?;
        (!matches!(state, "Z" | "X")).then_some(Self { pid, started })
    }

    /// Returns the start time, in ticks since boot.
    pub fn started(&self) -> u64 {
        self.started
    }

    /// Returns whether the process is alive.
    pub fn is_alive(&self) -> bool {
        Self::find_alive(self.pid) == Some(*self)
    }

    /// Returns whether the process has this file open. QEMU keeps its pid file open and locked as long as it lives;
    /// libvirt has QEMU inherit the one that libvirt writes.
    fn has_file_open(&self, name: &OsStr, file: &PathFingerprint) -> bool {
        let descriptors = fs::read_dir(format!("/proc/{}/fd", self.pid.as_raw_pid()));
        let mut paths = descriptors.into_iter().flatten().flatten().map(|entry| entry.path());
        // Only files with this name are inspected: another file may be on a server that does not answer.
        let has_name = |path: &Path| fs::read_link(path).is_ok_and(|link| link.file_name() == Some(name));
        paths.any(|path| {
            has_name(&path) && fs::metadata(&path).is_ok_and(|found| (found.dev(), found.ino()) == file.identity)
        })
    }

    /// Returns whether the process is managed, or waits for a new pager.
    pub(super) fn has_pager_state(&self) -> bool {
        self.has_memfd(PAGES_NAME).unwrap_or(false)
    }

    /// Returns whether the process is managed, or its pager was killed: it has the compressed memory of a pager open.
    /// (The list of its pages is no evidence, since it remains after a detach if pages were lost.)
    ///
    /// # Errors
    /// The descriptors of the process cannot be read.
    pub fn is_managed(&self) -> io::Result<bool> {
        match self.has_memfd(COMPRESSED_NAME) {
            Err(_) if !self.is_alive() => Ok(false),
            found => found,
        }
    }

    fn has_memfd(&self, name: &str) -> io::Result<bool> {
        let name = format!("/memfd:{name}");
        let descriptors = fs::read_dir(format!("/proc/{}/fd", self.pid.as_raw_pid()))?;
        let mut links = descriptors.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
        Ok(links.any(|link| link.to_string_lossy().starts_with(&name)))
    }

    /// Returns the shared memory mappings of the process, one line each.
    fn shared_memory(&self) -> Vec<String> {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.pid.as_raw_pid())).unwrap_or_default();
        let is_shared = |line: &&str| {
            line.split(' ')
                .nth(1)
                .is_some_and(|permissions| permissions.starts_with("rw") && permissions.ends_with('s'))
        };
        maps.lines().filter(is_shared).map(str::to_owned).collect()
    }
}

/// Reason why a VM's QEMU cannot be determined.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum QemuFindError {
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error("pid file {path}: {why}")]
    PidFile { path: String, why: String },
    #[error("QMP socket {path}: {why}")]
    Socket { path: String, why: String },
    #[error("{at} names process {process}, which is the QEMU of another domain: {other}")]
    OtherDomain { at: String, process: i32, other: String },
}

/// A state of a file. States are compared only for equality, because the clock of the timestamps may be set.
#[derive(Clone, PartialEq, Eq, Debug)]
struct PathFingerprint {
    /// Device and inode.
    identity: (u64, u64),
    modified: (i64, i64),
    changed: (i64, i64),
}

impl PathFingerprint {
    fn from_metadata(found: &fs::Metadata) -> Self {
        Self {
            identity: (found.dev(), found.ino()),
            modified: (found.mtime(), found.mtime_nsec()),
            changed: (found.ctime(), found.ctime_nsec()),
        }
    }
}

/// Returns the process that listens on QEMU's QMP socket; `None` if it has just ended.
///
/// # Errors
/// No process listens, or a user other than root and the process's own could have chosen the process.
pub fn qmp_listener(path: &Path) -> Result<Option<QemuProcess>, QemuFindError> {
    let pid = pid_of_qmp(path)?;
    let Some(process) = QemuProcess::find_alive(pid) else {
        return Ok(None);
    };
    path_trust::check_path_trusted(path, pid)
        .map_err(|why| QemuFindError::Socket { path: path.display().to_string(), why })?;
    Ok(Some(process))
}

/// Finds a VM's QEMU, repeatedly over the VM's restarts.
///
/// A killed QEMU leaves its pid file behind, and another process may get its process ID. The file's times do not show
/// that, because the host's clock may be set while QEMU runs. A process ID is accepted if
/// - its process has the file open, or waits for a pager;
/// - or the file is in the host's memory, so that it was written since boot, and has not named another process before
///   in the same state.
#[derive(Default, Debug)]
pub struct QemuFinder {
    /// State of the pid file when it last named a process, and that process.
    last_named: Option<(PathFingerprint, QemuProcess)>,
}

impl QemuFinder {
    /// Returns the process of a VM's QEMU; `None` if it does not run. If the VM has a UUID, the process must not
    /// belong to another libvirt domain, as far as the host shows.
    ///
    /// # Errors
    /// The process cannot be determined, or a user other than root and the process's own could have chosen it.
    pub fn find(&mut self, qemu: &QemuLocation, uuid: Option<&str>) -> Result<Option<QemuProcess>, QemuFindError> {
        let process = match qemu {
            QemuLocation::PidFile(path) => self
                .read_pid_file(path)
                .map_err(|why| QemuFindError::PidFile { path: path.display().to_string(), why })?,
            QemuLocation::Qmp(path) => match qmp_listener(path) {
                Ok(process) => process,
                // QEMU does not run, or has left its socket behind.
                Err(QemuFindError::Qmp(QmpError::NoFile { error, .. })) if error.kind() == io::ErrorKind::NotFound => {
                    None
                }
                Err(QemuFindError::Qmp(QmpError::NoListener { unreadable: 0, .. })) => None,
                Err(error) => return Err(error),
            },
        };
        let Some(process) = process else { return Ok(None) };
        let pid = process.pid.as_raw_pid();
        match uuid.and_then(|uuid| find_other_domain(pid, uuid)) {
            Some(other) => Err(QemuFindError::OtherDomain { at: qemu.to_string(), process: pid, other }),
            None => Ok(Some(process)),
        }
    }

    fn read_pid_file(&mut self, path: &Path) -> Result<Option<QemuProcess>, String> {
        let file = match small_file::open(path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        let found = file.metadata().map_err(|error| error.to_string())?;
        let mut bytes = Vec::new();
        let read = (&file).take(PID_FILE_BYTES_MAX + 1).read_to_end(&mut bytes);
        read.map_err(|error| error.to_string())?;
        // A file on tmpfs was written since boot.
        let is_in_memory = rustix::fs::fstatfs(&file).is_ok_and(|found| is_tmpfs(&found));
        drop(file);
        let text = bytes.trim_ascii();
        // The file is being written.
        if text.is_empty() {
            return Ok(None);
        }
        let number = std::str::from_utf8(text).ok().filter(|_| bytes.len() as u64 <= PID_FILE_BYTES_MAX);
        let number = number.and_then(|text| text.parse().ok()).filter(|number: &i32| *number > 0);
        let pid = number.and_then(Pid::from_raw).ok_or("it contains no process ID")?;
        let Some(process) = QemuProcess::find_alive(pid) else {
            return Ok(None);
        };
        path_trust::check_path_trusted(path, pid)?;
        let state = PathFingerprint::from_metadata(&found);
        let name = path.file_name().unwrap_or_default();
        if !process.has_file_open(name, &state) && !process.has_pager_state() {
            self.check_pid(process, &state, is_in_memory)?;
        }
        self.last_named = Some((state, process));
        Ok(Some(process))
    }

    /// Checks a process ID from a pid file that its process does not have open.
    ///
    /// # Errors
    /// The file may be older than the process with this ID.
    fn check_pid(&self, process: QemuProcess, state: &PathFingerprint, is_in_memory: bool) -> Result<(), String> {
        let pid = process.pid.as_raw_pid();
        if self.last_named.as_ref().is_some_and(|(last, other)| last == state && *other != process) {
            return Err(format!(
                "it has not changed since it named a process that has ended, and process {pid} is a different one: was QEMU killed?"
            ));
        }
        match is_in_memory {
            true => Ok(()),
            false => Err(format!(
                "process {pid} does not have it open, so it may be older than the last boot of the host: let QEMU write it (-pidfile), or keep it in /run"
            )),
        }
    }
}

/// Result of an attempt to attach.
pub enum AttachStep {
    /// The memory is managed.
    Attached(ManagedMemory),
    /// Try again after this pause.
    RetryAfter(Duration),
    /// The process has ended.
    Exited,
}

/// Repeated attempts to attach to a process.
pub struct AttachRetry {
    process: QemuProcess,
    since: Instant,
    last_sample: Vec<String>,
    retry_delay: Duration,
    /// The last obstacle, and whether it was reported.
    obstacle: Option<(String, bool)>,
    managed_by_other: bool,
}

impl AttachRetry {
    /// Returns an approach to this process.
    pub fn new(process: QemuProcess) -> Self {
        Self {
            process,
            since: Instant::now(),
            last_sample: Vec::new(),
            retry_delay: RETRY_DELAY,
            obstacle: None,
            managed_by_other: false,
        }
    }

    /// Returns whether the last attempt found that another pager manages the process.
    pub fn is_managed_by_other(&self) -> bool {
        self.managed_by_other
    }

    /// Resets the pause after a change that may have removed the obstacle.
    pub fn reset_delay(&mut self) {
        self.retry_delay = RETRY_DELAY;
    }

    /// Makes one attempt. An obstacle is reported once, when a second attempt finds it as well.
    pub fn attempt(&mut self, config: &MemoryConfig) -> AttachStep {
        if !self.process.is_alive() {
            return AttachStep::Exited;
        }
        let has_pager_state = self.process.has_pager_state();
        if !has_pager_state && !self.is_stable() {
            return AttachStep::RetryAfter(STABLE_INTERVAL);
        }
        let config = MemoryConfig { started: Some(self.process.started), ..config.clone() };
        let error = match attach_with_fallback(&config, has_pager_state) {
            Ok(managed) => return AttachStep::Attached(managed),
            Err(error) => error,
        };
        if !self.process.is_alive() {
            return AttachStep::Exited;
        }
        self.managed_by_other = matches!(error, MemoryError::Attach(AttachError::Managed { .. }));
        let why = error.to_string();
        tracing::debug!(pid = self.process.pid.as_raw_pid(), retry_delay = ?self.retry_delay, "not attached: {why}");
        match &mut self.obstacle {
            Some((last, reported)) if *last == why => {
                if !std::mem::replace(reported, true) {
                    tracing::error!("{why} (Larder will try again)");
                }
            }
            // The obstacle may disappear soon.
            obstacle => *obstacle = Some((why, false)),
        }
        let pause = self.retry_delay;
        self.retry_delay = (pause * 2).min(RETRY_DELAY_MAX);
        AttachStep::RetryAfter(pause)
    }

    fn is_stable(&mut self) -> bool {
        let now = self.process.shared_memory();
        let is_same = !now.is_empty() && now == self.last_sample;
        self.last_sample = now;
        is_same || self.since.elapsed() >= STABLE_WAIT_MAX
    }
}

/// Attaches. A process that waits for its memory must not wait because the options have become invalid: in that case
/// the disks that have its pages are used, and the smallest sufficient budget.
fn attach_with_fallback(config: &MemoryConfig, is_waiting: bool) -> Result<ManagedMemory, MemoryError> {
    let mut config = config.clone();
    loop {
        let error = match ManagedMemory::start(config.clone()) {
            Err(error) if is_waiting => error,
            started => return started,
        };
        match &error {
            MemoryError::Swap(SwapError::Replaced(_)) => return Err(error),
            MemoryError::Swap(_) if config.has_disk() => {
                (config.swap, config.slow) = (None, None);
                tracing::error!("{error}; meanwhile Larder uses the disks that hold the pages");
            }
            MemoryError::Budget(BudgetError::TooSmall { needed, .. }) if *needed > config.budget => {
                config.budget = *needed;
                tracing::error!("{error}; meanwhile Larder uses that budget");
            }
            MemoryError::Budget(BudgetError::Compressed { .. }) if config.compressed.is_some() => {
                config.compressed = None;
                tracing::error!("{error}; meanwhile Larder uses the default");
            }
            _ => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;

    fn in_memory() -> tempfile::TempDir {
        tempfile::tempdir_in("/dev/shm").expect("a directory in /dev/shm")
    }

    fn found(text: &str) -> Result<Option<QemuProcess>, String> {
        let directory = in_memory();
        let path = directory.path().join("pid");
        fs::write(&path, text).expect("writes");
        QemuFinder::default().read_pid_file(&path)
    }

    fn this_process() -> QemuProcess {
        let pid = Pid::from_raw(std::process::id() as i32).expect("a number");
        QemuProcess::find_alive(pid).expect("it lives")
    }

    #[test]
    fn pid_file_names_only_live_process() {
        let us = this_process();
        assert_eq!(found(&format!("{}\n", us.pid.as_raw_pid())), Ok(Some(us)));
        assert_eq!(found(""), Ok(None));
        // Larger than every process ID.
        assert_eq!(found("1073741824\n"), Ok(None));
        for wrong in ["qemu\n", "-1\n", "0", "12 13", "99999999999999999999"] {
            assert_eq!(found(wrong), Err("it contains no process ID".to_owned()), "{wrong}");
        }
        let nowhere = QemuFinder::default().read_pid_file(Path::new("/nosuch/pid"));
        assert_eq!(nowhere, Ok(None));
    }

    /// The clock was set forward after the file was written, or back.
    #[test]
    fn timestamps_of_pid_file_are_ignored() {
        let directory = in_memory();
        let path = directory.path().join("pid");
        let us = this_process();
        fs::write(&path, us.pid.as_raw_pid().to_string()).expect("writes");
        let year = Duration::from_secs(365 * 86400);
        let now = std::time::SystemTime::now();
        for time in [now - year, now + year] {
            let file = File::options().write(true).open(&path).expect("opens");
            file.set_modified(time).expect("it is ours");
            assert_eq!(QemuFinder::default().read_pid_file(&path), Ok(Some(us)));
        }
    }

    /// A killed QEMU leaves its pid file, and another process gets its process ID.
    #[test]
    fn unchanged_pid_file_names_one_process() {
        let directory = in_memory();
        let path = directory.path().join("pid");
        let us = this_process();
        let before = QemuProcess { started: us.started - 1, ..us };
        fs::write(&path, us.pid.as_raw_pid().to_string()).expect("writes");
        let state = PathFingerprint::from_metadata(&path.metadata().expect("is there"));
        let mut finder = QemuFinder { last_named: Some((state, before)) };
        let why = finder.read_pid_file(&path).expect_err("is of the one before");
        assert!(why.contains("is a different one"), "{why}");
        // An open file identifies the process, as in QEMU.
        let open = File::open(&path).expect("opens");
        assert_eq!(finder.read_pid_file(&path), Ok(Some(us)));
        drop(open);
        finder.last_named = None;
        fs::remove_file(&path).expect("is ours");
        fs::write(&path, us.pid.as_raw_pid().to_string()).expect("writes");
        assert_eq!(finder.read_pid_file(&path), Ok(Some(us)));
    }

    #[test]
    fn disk_pid_file_must_be_open() {
        let directory = tempfile::tempdir_in("/var/tmp").expect("a directory on a disk");
        let path = directory.path().join("pid");
        let us = this_process();
        fs::write(&path, us.pid.as_raw_pid().to_string()).expect("writes");
        let why = QemuFinder::default().read_pid_file(&path).expect_err("may be old");
        assert!(why.contains("-pidfile"), "{why}");
        let _open = File::open(&path).expect("opens");
        assert_eq!(QemuFinder::default().read_pid_file(&path), Ok(Some(us)));
    }
}
