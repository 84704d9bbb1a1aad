//! Checks that there is free memory for pages that are paged in by a detach, so that the detach causes neither the
//! kernel's OOM killer nor a guest that waits for a page forever.
//!
//! Three limits can apply to pages of the process: the host's memory, a control group of the process or one above it
//! (the kernel charges a page that is paged in to the process, not to Larder), and the size of the tmpfs that
//! contains a file of its memory. Each limit is read again before each step.
//!
//! # The ledger
//! Several pagers that detach at the same time would all count the same free memory. So each records its claims in a
//! shared directory: the remaining bytes, and the limits that they count against. A claim is a file `NUMBER` with
//! lines `BYTES LIMIT`, locked (flock(2)) as long as its pager detaches. An unlocked file belongs to a killed pager,
//! and the next pager removes it.
//!
//! A pager starts only if there is room in addition to all claims. Later it counts only claims with smaller numbers,
//! so that of two pagers that run short the earlier one can finish. The file `lock` is locked while claims are read
//! and written. A pager that is stopped while it holds that lock does not block others: after [`LOCK_ATTEMPTS_MAX`]
//! they continue without it.

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use rustix::fs::FlockOperation;
use rustix::process::{Pid, getpid};

use crate::cgroup::{self, CgroupDirectory};
use crate::guest::RegionFiles;

/// Bounds, in bytes, of the amount that is paged in between two checks, which is half of the free memory.
const STEP_BYTES_MIN: u64 = 512 << 10;
const STEP_BYTES_MAX: u64 = 16 << 20;

/// Maximum time between two checks. If paging in is slow, other processes may use memory meanwhile.
const CHECK_INTERVAL_MAX: Duration = Duration::from_millis(100);

/// Share of the host's memory, and of a control group's limit, that is left free for other uses, within bounds.
const MARGIN_SHARE: u64 = 128;
const MARGIN_BYTES_MIN: u64 = 1 << 20;
const MARGIN_BYTES_MAX: u64 = 64 << 20;

/// Number of attempts to get the ledger's lock, one millisecond apart. It is normally held for less than that.
const LOCK_ATTEMPTS_MAX: u32 = 10;

/// Maximum length of a claim's file, in bytes.
const CLAIM_BYTES_MAX: usize = 64 << 10;

/// A limit of memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum MemoryLimit {
    /// The host's memory.
    Host,
    /// The limit of a control group of the process, or of one above it.
    Cgroup {
        /// The group's directory.
        directory: PathBuf,
        /// The file that contains the limit.
        file: &'static str,
        /// The limit, in bytes.
        limit_bytes: u64,
    },
    /// The size of the tmpfs that contains the memory's file.
    Tmpfs {
        /// The mount point, or the device number as text if it is unknown.
        mount_point: PathBuf,
        /// Device number, as in stat(2).
        device: u64,
    },
}

impl MemoryLimit {
    /// Returns the name of the limit in the ledger.
    fn ledger_key(&self) -> String {
        match self {
            Self::Host => "host".to_owned(),
            Self::Cgroup { directory: folder, file, .. } => {
                format!("group {}/{file}", folder.display()).replace('\n', "?")
            }
            Self::Tmpfs { device, .. } => format!("tmpfs {device}"),
        }
    }
}

impl fmt::Display for MemoryLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("the host"),
            Self::Cgroup { directory: folder, file, limit_bytes } => {
                write!(f, "the process's control group {} ({file}: {} MiB)", folder.display(), limit_bytes >> 20)
            }
            Self::Tmpfs { mount_point: at, .. } => {
                write!(f, "the tmpfs {} that contains its memory's file", at.display())
            }
        }
    }
}

/// Reason why pages cannot be paged in.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{} MiB must be paged in, but {limit} has {} MiB free{}: {}",
    needed_bytes.div_ceil(1 << 20), free_bytes >> 20, ClaimedSuffix(*.claimed_bytes), advice(.limit)
)]
pub struct MemoryShortage {
    /// The limit that would be exceeded.
    pub limit: MemoryLimit,
    /// Bytes to be paged in.
    pub needed_bytes: u64,
    /// Free bytes, including those that other pagers have claimed.
    pub free_bytes: u64,
    /// Bytes that other detaching pagers have claimed.
    pub claimed_bytes: u64,
}

struct ClaimedSuffix(u64);

impl fmt::Display for ClaimedSuffix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            bytes => write!(f, ", of which {} MiB are claimed by other detaches in progress", bytes.div_ceil(1 << 20)),
        }
    }
}

fn advice(limit: &MemoryLimit) -> &'static str {
    match limit {
        MemoryLimit::Host => "free some first",
        MemoryLimit::Cgroup { .. } => "free some first, or raise that limit",
        MemoryLimit::Tmpfs { .. } => "free some first, or mount it with a larger size",
    }
}

/// Current value of a limit.
struct LimitState {
    kind: MemoryLimit,
    free_bytes: u64,
    /// Memory that becomes free while pages are paged in.
    freed_bytes: u64,
    /// Memory left free for other uses.
    margin_bytes: u64,
    /// Bytes to be paged in that count against this limit.
    needed_bytes: u64,
}

/// Room checks of one detach.
pub(crate) struct HeadroomCheck {
    pid: Pid,
    files: Arc<RegionFiles>,
    /// The ledger's directory; without it, other pagers are unknown.
    ledger_directory: Option<PathBuf>,
    claim: Option<Claim>,
    /// Bytes that remained at the last check, and the amount that may be paged in before the next.
    checked_bytes: u64,
    step_bytes: u64,
    checked_at: Instant,
}

impl HeadroomCheck {
    pub(crate) fn new(pid: Pid, files: Arc<RegionFiles>, ledger_directory: Option<PathBuf>) -> Self {
        Self { pid, files, ledger_directory, claim: None, checked_bytes: 0, step_bytes: 0, checked_at: Instant::now() }
    }

    /// Returns true if another check is needed before more is paged in.
    pub(crate) fn is_check_due(&self, needed_bytes: u64) -> bool {
        let paged_in_bytes = self.checked_bytes.saturating_sub(needed_bytes);
        paged_in_bytes >= self.step_bytes || paged_in_bytes > 0 && self.checked_at.elapsed() >= CHECK_INTERVAL_MAX
    }

    /// Checks that `needed_bytes` can be paged in, and claims them. `compressed_bytes` of compressed pages become
    /// free meanwhile.
    ///
    /// # Errors
    /// The limit that has too little room. An earlier claim stays until this is dropped.
    pub(crate) fn check(&mut self, needed_bytes: u64, compressed_bytes: u64) -> Result<(), MemoryShortage> {
        self.checked_bytes = needed_bytes;
        self.checked_at = Instant::now();
        self.step_bytes = STEP_BYTES_MAX;
        if needed_bytes == 0 {
            self.claim = None;
            return Ok(());
        }
        let limits = self.limits(needed_bytes, compressed_bytes);
        let ledger = self.ledger_directory.as_deref().and_then(|folder| {
            let opened = Ledger::open(folder);
            opened
                .inspect_err(|error| {
                    tracing::debug!("the claims of other detaching pagers are unknown: {}: {error}", folder.display())
                })
                .ok()
        });
        let claimed = match &ledger {
            Some(ledger) => ledger.claimed(self.claim.as_ref().map(|claim| claim.number)),
            None => HashMap::new(),
        };
        for limit in &limits {
            let claimed_bytes = claimed.get(&limit.kind.ledger_key()).copied().unwrap_or(0);
            let all = limit.needed_bytes.saturating_add(claimed_bytes).saturating_add(limit.margin_bytes);
            let next = limit.needed_bytes.min(STEP_BYTES_MIN) + limit.margin_bytes;
            // Compressed pages become free late: until then there must be room for the next step.
            if limit.needed_bytes > 0
                && (all > limit.free_bytes.saturating_add(limit.freed_bytes) || next > limit.free_bytes)
            {
                return Err(MemoryShortage {
                    limit: limit.kind.clone(),
                    needed_bytes: limit.needed_bytes,
                    free_bytes: limit.free_bytes,
                    claimed_bytes,
                });
            }
            let half = limit.free_bytes.saturating_sub(limit.margin_bytes) / 2;
            self.step_bytes = self.step_bytes.min(half.max(STEP_BYTES_MIN));
        }
        let Some(ledger) = ledger else { return Ok(()) };
        let written = match &self.claim {
            Some(claim) => claim.write(&limits),
            None => ledger.claim(&limits).map(|claim| self.claim = Some(claim)),
        };
        if let Err(error) = written {
            tracing::debug!("the claim of this detach cannot be recorded for other pagers: {error}");
        }
        Ok(())
    }

    fn limits(&self, needed_bytes: u64, compressed_bytes: u64) -> Vec<LimitState> {
        let mut limits = vec![host_limit(needed_bytes, compressed_bytes)];
        let own_cgroups = cgroup::cgroups_of(getpid(), "memory");
        for group in cgroup::cgroups_of(self.pid, "memory") {
            // Compressed pages are charged to this process.
            let freed_bytes = if own_cgroups.contains(&group) { compressed_bytes } else { 0 };
            limits.extend(cgroup_limits(&group).into_iter().map(|(place, free_bytes, limit_bytes)| LimitState {
                kind: place,
                free_bytes,
                freed_bytes,
                margin_bytes: margin_bytes(limit_bytes),
                needed_bytes,
            }));
        }
        limits.extend(self.tmpfs_limits(needed_bytes));
        limits
    }

    /// Returns the limits of file systems that have a size.
    fn tmpfs_limits(&self, needed_bytes: u64) -> Vec<LimitState> {
        let mut found: Vec<LimitState> = Vec::new();
        for (device, file, absent_bytes) in self.files.unallocated() {
            let Ok(system) = rustix::fs::fstatfs(&file) else {
                continue;
            };
            // The file system of memfds has no size.
            if system.f_blocks == 0 {
                continue;
            }
            let is_device =
                |limit: &&mut LimitState| matches!(limit.kind, MemoryLimit::Tmpfs { device: of, .. } if of == device);
            if let Some(limit) = found.iter_mut().find(is_device) {
                limit.needed_bytes = (limit.needed_bytes + absent_bytes).min(needed_bytes);
                continue;
            }
            found.push(LimitState {
                kind: MemoryLimit::Tmpfs { mount_point: mount_point_of(device), device },
                free_bytes: system.f_bavail.saturating_mul(system.f_bsize.unsigned_abs()),
                freed_bytes: 0,
                margin_bytes: 0,
                needed_bytes: absent_bytes.min(needed_bytes),
            });
        }
        found
    }
}

fn margin_bytes(limit_bytes: u64) -> u64 {
    (limit_bytes / MARGIN_SHARE).clamp(MARGIN_BYTES_MIN, MARGIN_BYTES_MAX)
}

fn host_limit(needed_bytes: u64, compressed_bytes: u64) -> LimitState {
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let bytes = |key: &str| -> Option<u64> {
        let line = memory.lines().find_map(|line| line.strip_prefix(key))?;
        let kib: u64 = line.trim().trim_end_matches(" kB").parse().ok()?;
        Some(kib << 10)
    };
    LimitState {
        kind: MemoryLimit::Host,
        free_bytes: bytes("MemAvailable:").unwrap_or(u64::MAX),
        freed_bytes: compressed_bytes,
        margin_bytes: margin_bytes(bytes("MemTotal:").unwrap_or(0)),
        needed_bytes,
    }
}

/// Returns the limits of a group, each with the free bytes below it and the limit in bytes.
fn cgroup_limits(group: &CgroupDirectory) -> Vec<(MemoryLimit, u64, u64)> {
    // Above `memory.high` the kernel throttles each charge to the group, which would slow every page.
    let files: &[(&'static str, &str)] = match group.is_v2 {
        true => &[("memory.max", "memory.current"), ("memory.high", "memory.current")],
        false => &[
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            ("memory.memsw.limit_in_bytes", "memory.memsw.usage_in_bytes"),
        ],
    };
    let mut found = Vec::new();
    for (file, usage) in files {
        let (Some(limit_bytes), Some(used_bytes)) = (group.read_number(file), group.read_number(usage)) else {
            continue;
        };
        // Page cache that the kernel drops before it kills: clean pages that were not used again.
        let table = group.read_table("memory.stat");
        let prefix = if group.is_v2 { "" } else { "total_" };
        let cache = |key: &str| table.get(&format!("{prefix}{key}"));
        let (dirty, writeback) = match group.is_v2 {
            true => ("file_dirty", "file_writeback"),
            false => ("dirty", "writeback"),
        };
        let clean_bytes = cache("inactive_file") + cache("active_file") / 2;
        let clean_bytes = clean_bytes.saturating_sub(cache(dirty) + cache(writeback));
        let limit = MemoryLimit::Cgroup { directory: group.path.clone(), file, limit_bytes };
        let free_bytes = limit_bytes.saturating_sub(used_bytes).saturating_add(clean_bytes);
        found.push((limit, free_bytes, limit_bytes));
    }
    found
}

/// Returns the smallest limit of a control group that contains both processes, in bytes.
pub fn common_cgroup_limit(one: Pid, other: Pid) -> Option<u64> {
    let others = cgroup::cgroups_of(other, "memory");
    let common = cgroup::cgroups_of(one, "memory").into_iter().filter(|group| others.contains(group));
    common.flat_map(|group| cgroup_limits(&group)).map(|(_, _, limit_bytes)| limit_bytes).min()
}

fn mount_point_of(device: u64) -> PathBuf {
    let numbers = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let mut matching = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(2);
        (fields.next()? == numbers).then(|| fields.nth(1)).flatten()
    });
    matching.next().map_or_else(|| PathBuf::from(numbers.clone()), PathBuf::from)
}

/// Claims of all detaching pagers, locked as long as this exists.
struct Ledger<'a> {
    directory: &'a Path,
    /// `None` if another process has held the lock for too long.
    lock: Option<File>,
}

impl<'a> Ledger<'a> {
    fn open(directory: &'a Path) -> io::Result<Self> {
        let lock = open_options(true).create(true).open(directory.join("lock"))?;
        for attempt in 0..LOCK_ATTEMPTS_MAX {
            if attempt > 0 {
                thread::sleep(Duration::from_millis(1));
            }
            if try_lock(&lock)? {
                return Ok(Self { directory, lock: Some(lock) });
            }
        }
        Ok(Self { directory, lock: None })
    }

    fn numbers(&self) -> Vec<u64> {
        let entries = fs::read_dir(self.directory).into_iter().flatten().flatten();
        entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
    }

    /// Returns the claims of other pagers against each limit: all claims, or those with numbers below `before`.
    fn claimed(&self, before: Option<u64>) -> HashMap<String, u64> {
        let mut all = HashMap::new();
        let counts = |number: &u64| before.is_none_or(|before| *number < before);
        for number in self.numbers().into_iter().filter(counts) {
            for (key, bytes) in self.read(number).unwrap_or_default() {
                let sum: &mut u64 = all.entry(key).or_default();
                *sum = sum.saturating_add(bytes);
            }
        }
        all
    }

    /// Reads one claim. Removes that of a killed pager.
    fn read(&self, number: u64) -> Option<Vec<(String, u64)>> {
        let path = self.directory.join(number.to_string());
        let file = open_options(false).open(&path).ok()?;
        if try_lock(&file).ok()? {
            // Without the lock, a new claim could have taken that path by now.
            if self.lock.is_some() {
                let _ = fs::remove_file(&path);
            }
            return None;
        }
        let mut text = vec![0; CLAIM_BYTES_MAX];
        let count = file.read_at(&mut text, 0).ok()?;
        let text = String::from_utf8_lossy(&text[..count]);
        let lines = text.lines().filter_map(|line| line.split_once(' '));
        let lines = lines.filter_map(|(bytes, key)| Some((key.to_owned(), bytes.parse().ok()?)));
        Some(lines.collect())
    }

    fn claim(&self, limits: &[LimitState]) -> io::Result<Claim> {
        let number = self.numbers().into_iter().max().unwrap_or(0).saturating_add(1);
        let path = self.directory.join(number.to_string());
        let file = open_options(true).create_new(true).open(&path)?;
        let claim = Claim { file, path, number };
        // A crash here leaves an unlocked file, which is removed.
        if !try_lock(&claim.file)? {
            // A reader without the ledger's lock has locked the file for a moment. A claim that is not locked here
            // would be removed as stale.
            return Err(io::ErrorKind::WouldBlock.into());
        }
        claim.write(limits)?;
        Ok(claim)
    }
}

/// Claim of this pager.
struct Claim {
    file: File,
    path: PathBuf,
    number: u64,
}

impl Claim {
    /// Writes the claim. Numbers always have the same length, so one write replaces all of it.
    fn write(&self, limits: &[LimitState]) -> io::Result<()> {
        let line = |limit: &LimitState| format!("{:020} {}\n", limit.needed_bytes, limit.kind.ledger_key());
        let text: String = limits.iter().map(line).collect();
        self.file.write_all_at(text.as_bytes(), 0)?;
        self.file.set_len(text.len() as u64)
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

fn open_options(write: bool) -> fs::OpenOptions {
    let mut options = File::options();
    options.read(true).write(write).mode(0o600);
    options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC);
    options
}

/// Locks a file. Returns false if another process has locked it.
fn try_lock(file: &File) -> io::Result<bool> {
    match rustix::fs::flock(file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(true),
        Err(rustix::io::Errno::WOULDBLOCK) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(bytes: u64) -> Vec<LimitState> {
        vec![LimitState {
            kind: MemoryLimit::Host,
            free_bytes: 0,
            freed_bytes: 0,
            margin_bytes: 0,
            needed_bytes: bytes,
        }]
    }

    fn host_claims(directory: &Path, before: Option<u64>) -> u64 {
        let ledger = Ledger::open(directory).expect("a ledger");
        ledger.claimed(before).get("host").copied().unwrap_or(0)
    }

    #[test]
    fn claims_add_up_until_dropped() {
        let directory = tempfile::tempdir().expect("a folder");
        let path = directory.path();
        let claim = |bytes| {
            let ledger = Ledger::open(path).expect("a ledger");
            ledger.claim(&limits(bytes)).expect("a claim")
        };
        let (first, second) = (claim(5), claim(7));
        assert_eq!(host_claims(path, None), 12);
        assert_eq!(host_claims(path, Some(second.number)), 5);
        assert_eq!(host_claims(path, Some(first.number)), 0);
        first.write(&limits(3)).expect("writes");
        assert_eq!(host_claims(path, None), 10);
        drop(first);
        assert_eq!(host_claims(path, None), 7);
        drop(second);
        assert_eq!(host_claims(path, None), 0);
    }

    #[test]
    fn claim_of_killed_pager_is_removed() {
        let directory = tempfile::tempdir().expect("a folder");
        let stale = directory.path().join("9");
        fs::write(&stale, "00000000000000000005 host\n").expect("writes");
        assert_eq!(host_claims(directory.path(), None), 0);
        assert!(!stale.exists());
    }

    #[test]
    fn damaged_claims_count_as_nothing() {
        let directory = tempfile::tempdir().expect("a folder");
        let path = directory.path().join("3");
        fs::write(&path, b"host\n-1 host\n\xff\xff 3\n99999999999999999999999 host\n").expect("writes");
        let held = File::open(&path).expect("opens");
        assert!(try_lock(&held).expect("locks"));
        assert_eq!(host_claims(directory.path(), None), 0);
        assert!(path.exists());
    }

    #[test]
    fn stopped_lock_owner_blocks_no_pager() {
        let directory = tempfile::tempdir().expect("a folder");
        let first = Ledger::open(directory.path()).expect("a ledger");
        let _claim = first.claim(&limits(5)).expect("a claim");
        assert!(first.lock.is_some());
        let second = Ledger::open(directory.path()).expect("a ledger");
        assert!(second.lock.is_none());
        assert_eq!(second.claimed(None).get("host"), Some(&5));
    }

    #[test]
    fn shortage_names_limit_numbers_and_remedy() {
        let shortage = |limit| {
            let (needed_bytes, free_bytes, claimed_bytes) = (100 << 20, 50 << 20, 0);
            MemoryShortage { limit, needed_bytes, free_bytes, claimed_bytes }
        };
        assert_eq!(
            shortage(MemoryLimit::Host).to_string(),
            "100 MiB must be paged in, but the host has 50 MiB free: free some first"
        );
        let group =
            MemoryLimit::Cgroup { directory: "/sys/fs/cgroup/vm".into(), file: "memory.max", limit_bytes: 512 << 20 };
        let message = MemoryShortage { claimed_bytes: 20 << 20, ..shortage(group) }.to_string();
        assert!(
            message.contains("control group /sys/fs/cgroup/vm (memory.max: 512 MiB) has 50 MiB free, of which 20 MiB"),
            "{message}"
        );
    }
}
