//! Attaching to a process that may have only just been started: QEMU writes its pid file, and listens for QMP, before it
//! has all of its memory.
//!
//! It is attached to once its shared memory is the same on two looks, one after the other. One that waits for its pager,
//! which was killed, is attached to at once. Nothing is changed of a process that cannot be managed, so it is tried again,
//! less and less often, as long as it lives: what is in the way may go.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use larder_memory::attach::AttachError;
use larder_memory::state::PAGES_NAME;
use larder_memory::target::{QmpError, pid_of_qmp};
use rustix::process::Pid;

use super::{BudgetError, ManagedMemory, MemoryConfig, MemoryError, SwapError};
use crate::vm::config::QemuAt;

/// The time between two looks at memory that should be the same.
const SETTLING: Duration = Duration::from_millis(250);

/// A process whose memory does not settle, or that has none to share, is tried all the same after this: what is in the way
/// is to be told.
const SETTLED_BY: Duration = Duration::from_secs(10);

/// The time before it is tried again, at first and at last.
const PAUSE: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// By so much a process may seem younger than the pid file that names it, as clocks are set.
const OF_CLOCKS: Duration = Duration::from_secs(10);

/// The longest pid file, in bytes.
const PID_FILE_BYTES_MAX: usize = 64;

/// A process, as no later one of the same number is it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Process {
    /// Its number.
    pub pid: Pid,
    /// When it was started, in ticks since the host was.
    started: u64,
}

impl Process {
    /// The process of that number that lives now.
    pub fn alive(pid: Pid) -> Option<Self> {
        let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_pid())).ok()?;
        // Its name may have anything in it (proc(5)); behind it the state comes first, and the start as the 20th.
        let mut words = stat.rsplit_once(')')?.1.split_whitespace();
        let state = words.next()?;
        let started = words.nth(18)?.parse().ok()?;
        (!matches!(state, "Z" | "X")).then_some(Self { pid, started })
    }

    /// Whether it has not ended.
    pub fn is_alive(&self) -> bool {
        Self::alive(self.pid) == Some(*self)
    }

    /// How long ago it was started.
    fn age(&self) -> Option<Duration> {
        let uptime = fs::read_to_string("/proc/uptime").ok()?;
        let uptime: f64 = uptime.split_whitespace().next()?.parse().ok()?;
        // SAFETY: it only answers.
        let ticks = unsafe { libc::sysconf(libc::_SC_CLK_TCK) };
        Duration::try_from_secs_f64(uptime - self.started as f64 / ticks as f64).ok()
    }

    /// Whether it is managed, or waits to be managed on.
    pub(super) fn is_waiting(&self) -> bool {
        let name = format!("/memfd:{PAGES_NAME}");
        let descriptors = fs::read_dir(format!("/proc/{}/fd", self.pid.as_raw_pid()));
        let mut links = descriptors
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| fs::read_link(entry.path()).ok());
        links.any(|link| link.to_string_lossy().starts_with(&name))
    }

    /// The memory that it shares, a line each.
    fn shared_memory(&self) -> Vec<String> {
        let maps = fs::read_to_string(format!("/proc/{}/maps", self.pid.as_raw_pid())).unwrap_or_default();
        let is_shared = |line: &&str| {
            line.split(' ')
                .nth(1)
                .is_some_and(|how| how.starts_with("rw") && how.ends_with('s'))
        };
        maps.lines().filter(is_shared).map(str::to_owned).collect()
    }
}

/// Why it is not known where a VM's QEMU is.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum FindError {
    #[error(transparent)]
    Qmp(#[from] QmpError),
    #[error("pid file {path}: {why}")]
    PidFile { path: String, why: String },
}

/// The process of a VM's QEMU; `None` if it does not run.
///
/// # Errors
/// That cannot be told.
pub fn find(qemu: &QemuAt) -> Result<Option<Process>, FindError> {
    match qemu {
        QemuAt::PidFile(path) => of_pid_file(path).map_err(|why| FindError::PidFile {
            path: path.display().to_string(),
            why,
        }),
        QemuAt::Qmp(path) => match pid_of_qmp(path) {
            Ok(pid) => Ok(Process::alive(pid)),
            // It does not run, or has left its socket behind.
            Err(QmpError::NoFile { error, .. }) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(QmpError::NobodyListens { unreadable: 0, .. }) => Ok(None),
            Err(error) => Err(error.into()),
        },
    }
}

fn of_pid_file(path: &Path) -> Result<Option<Process>, String> {
    let read = fs::read(path).and_then(|bytes| Ok((bytes, fs::metadata(path)?.modified()?)));
    let (bytes, written) = match read {
        Ok(read) => read,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error.to_string()),
    };
    let text = bytes.trim_ascii();
    // It is being written.
    if text.is_empty() {
        return Ok(None);
    }
    let number = std::str::from_utf8(text)
        .ok()
        .filter(|_| bytes.len() <= PID_FILE_BYTES_MAX);
    let number = number
        .and_then(|text| text.parse().ok())
        .filter(|number: &i32| *number > 0);
    let pid = number
        .and_then(Pid::from_raw)
        .ok_or("there is no process number in it")?;
    let Some(process) = Process::alive(pid) else {
        return Ok(None);
    };
    // QEMU leaves it behind when it is killed, and then the number may become another process's.
    let is_older = match (written.elapsed(), process.age()) {
        (Ok(written), Some(age)) => written > age + OF_CLOCKS,
        _ => false,
    };
    match is_older {
        true => Err(format!(
            "process {} was started after it was written, so it is another one: has QEMU been killed?",
            pid.as_raw_pid()
        )),
        false => Ok(Some(process)),
    }
}

/// What has become of a try.
pub enum Step {
    /// It is managed.
    Attached(ManagedMemory),
    /// Try again after this.
    Later(Duration),
    /// It has ended.
    Gone,
}

/// Tries to attach to a process.
pub struct Approach {
    process: Process,
    since: Instant,
    seen: Vec<String>,
    pause: Duration,
    /// What was in the way last, and whether that was told.
    obstacle: Option<(String, bool)>,
    is_of_another: bool,
}

impl Approach {
    /// To this one.
    pub fn new(process: Process) -> Self {
        Self {
            process,
            since: Instant::now(),
            seen: Vec::new(),
            pause: PAUSE,
            obstacle: None,
            is_of_another: false,
        }
    }

    /// Whether another pager manages it, as the last try has found.
    pub fn is_of_another(&self) -> bool {
        self.is_of_another
    }

    /// Something has changed: it is tried again soon.
    pub fn hurry(&mut self) {
        self.pause = PAUSE;
    }

    /// Tries it, and tells what is in the way, once, if it stays there.
    pub fn step(&mut self, config: &MemoryConfig) -> Step {
        if !self.process.is_alive() {
            return Step::Gone;
        }
        let is_waiting = self.process.is_waiting();
        if !is_waiting && !self.has_settled() {
            return Step::Later(SETTLING);
        }
        let error = match start(config, is_waiting) {
            Ok(managed) => return Step::Attached(managed),
            Err(error) => error,
        };
        if !self.process.is_alive() {
            return Step::Gone;
        }
        self.is_of_another = matches!(error, MemoryError::Attach(AttachError::Managed { .. }));
        let why = error.to_string();
        match &mut self.obstacle {
            Some((last, told)) if *last == why => {
                if !std::mem::replace(told, true) {
                    tracing::error!("{why} (it is tried again)");
                }
            }
            // It may be about to go.
            obstacle => *obstacle = Some((why, false)),
        }
        let pause = self.pause;
        self.pause = (pause * 2).min(PAUSE_MAX);
        Step::Later(pause)
    }

    fn has_settled(&mut self) -> bool {
        let now = self.process.shared_memory();
        let is_same = !now.is_empty() && now == self.seen;
        self.seen = now;
        is_same || self.since.elapsed() >= SETTLED_BY
    }
}

/// Attaches. A process that waits for its memory is not left waiting for what is wished wrongly by now: it goes on with the
/// disks that its pages are on, and with the least budget that will do.
fn start(config: &MemoryConfig, is_waiting: bool) -> Result<ManagedMemory, MemoryError> {
    let mut config = config.clone();
    loop {
        let error = match ManagedMemory::start(config.clone()) {
            Err(error) if is_waiting => error,
            started => return started,
        };
        match &error {
            MemoryError::Swap(SwapError::Gone(_)) => return Err(error),
            MemoryError::Swap(_) if config.has_disk() => {
                (config.swap, config.slow) = (None, None);
                tracing::error!("{error}; meanwhile those disks are used that its pages are on");
            }
            MemoryError::Budget(BudgetError::TooSmall { needed, .. }) if *needed > config.budget => {
                config.budget = *needed;
                tracing::error!("{error}; meanwhile that is used");
            }
            MemoryError::Budget(BudgetError::Compressed { .. }) if config.compressed.is_some() => {
                config.compressed = None;
                tracing::error!("{error}; meanwhile it is as usual");
            }
            _ => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Result<Option<Process>, String> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("pid");
        fs::write(&path, text).expect("writes");
        of_pid_file(&path)
    }

    #[test]
    fn pid_files_name_living_processes_or_none() {
        let us = Pid::from_raw(std::process::id() as i32).expect("a number");
        assert_eq!(found(&format!("{}\n", us.as_raw_pid())), Ok(Process::alive(us)));
        assert_eq!(found(""), Ok(None));
        // Above every process number.
        assert_eq!(found("1073741824\n"), Ok(None));
        for wrong in ["qemu\n", "-1\n", "0", "12 13", "99999999999999999999"] {
            assert_eq!(
                found(wrong),
                Err("there is no process number in it".to_owned()),
                "{wrong}"
            );
        }
        assert_eq!(of_pid_file(Path::new("/nosuch/pid")), Ok(None));
    }

    #[test]
    fn a_pid_file_that_is_older_than_its_process_is_of_another_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("pid");
        fs::write(&path, std::process::id().to_string()).expect("writes");
        let long_ago = std::time::SystemTime::now() - Duration::from_secs(365 * 86400);
        let file = fs::File::options().write(true).open(&path).expect("opens");
        file.set_modified(long_ago).expect("it is ours");
        let why = of_pid_file(&path).expect_err("is older");
        assert!(why.contains("another one"), "{why}");
    }
}
