//! Pagers that keep a program's memory within a limit.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::bail;
use clap::ValueEnum;

use super::MIB;
use super::cgroup::{Cgroup, named};
use super::swap::Zswap;

/// The pagers that are compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(super) enum Variant {
    /// No pager: there is no limit
    None,
    /// The kernel with a swap file
    Swap,
    /// The kernel with zswap before a swap file; the limit covers the program and zswap's pool
    Zswap,
    /// Larder with compressed RAM and a swap cache; the limit covers the program and Larder
    Larder,
    /// Larder with compressed RAM and a slow store, whose latency --slow-ms adds to the disk's
    Slow,
}

impl Variant {
    /// Returns the name for tables and plots.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::None => "no limit",
            Self::Swap => "swap",
            Self::Zswap => "zswap",
            Self::Larder => "Larder",
            Self::Slow => "Larder, slow store",
        }
    }
}

/// A running pager.
pub(super) trait Pager: Send + Sync {
    /// Reduces the memory in use to `bytes`, and keeps it there from then on.
    fn limit(&self, bytes: u64) -> anyhow::Result<()>;

    /// Returns the bytes in use now, the pager's own included. It is called every few milliseconds, and may adjust
    /// settings to keep the limit.
    fn used(&self) -> anyhow::Result<u64>;

    /// Returns the work done so far.
    fn done(&self) -> anyhow::Result<Done>;
}

/// Work that a pager has done.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Done {
    /// Faults that brought a page back from any tier.
    pub(super) faults: u64,
    /// Bytes read from the disk, and written to it.
    pub(super) read: u64,
    pub(super) written: u64,
    /// Bytes decompressed from compressed memory, and compressed into it.
    pub(super) unpacked: u64,
    pub(super) packed: u64,
}

impl Done {
    /// Returns the difference from an earlier value.
    pub(super) fn since(self, earlier: Self) -> Self {
        Self {
            faults: self.faults - earlier.faults,
            read: self.read - earlier.read,
            written: self.written - earlier.written,
            unpacked: self.unpacked - earlier.unpacked,
            packed: self.packed - earlier.packed,
        }
    }
}

/// The absence of a pager.
pub(super) struct Nobody {
    pub(super) cgroup: Arc<Cgroup>,
}

impl Pager for Nobody {
    fn limit(&self, _bytes: u64) -> anyhow::Result<()> {
        Ok(())
    }

    fn used(&self) -> anyhow::Result<u64> {
        self.cgroup.used()
    }

    fn done(&self) -> anyhow::Result<Done> {
        Ok(Done { faults: self.cgroup.major_faults()?, ..Done::default() })
    }
}

/// The kernel. cgroup v1 does not charge zswap's pool: its size is subtracted from the group's limit.
pub(super) struct Kernel {
    cgroup: Arc<Cgroup>,
    zswap: Option<Zswap>,
    /// Limit for the program and the pool, once it is set.
    limit: AtomicU64,
    /// Part of the limit that the group has.
    of_group: AtomicU64,
}

const PAGE: u64 = 4096;

/// Time within which the kernel must reclaim the memory beyond the limit.
const RECLAIM_TIMEOUT: Duration = Duration::from_secs(120);

/// Divisor of the limit that gives the permitted excess: with zswap, evictions make the pool larger.
const OVER: u64 = 200;

/// Change of the pool's size after which the group's limit is adjusted.
const FOLLOW: u64 = MIB;

/// Minimum limit of the group, however large the pool.
const LEAST: u64 = 16 * MIB;

impl Kernel {
    /// Creates the pager. A swap file must exist.
    pub(super) fn new(cgroup: Arc<Cgroup>, zswap: Option<Zswap>) -> Self {
        Self { cgroup, zswap, limit: AtomicU64::new(u64::MAX), of_group: AtomicU64::new(u64::MAX) }
    }

    fn pool(&self) -> anyhow::Result<u64> {
        self.zswap.as_ref().map_or(Ok(0), |_| Zswap::pool())
    }

    /// Sets the group's limit to what the pool leaves. Returns false if the kernel refuses.
    fn follow(&self, pool: u64) -> anyhow::Result<bool> {
        let limit = self.limit.load(Ordering::Relaxed);
        if limit == u64::MAX {
            return Ok(true);
        }
        let of_group = limit.saturating_sub(pool).max(LEAST) / PAGE * PAGE;
        if self.of_group.load(Ordering::Relaxed).abs_diff(of_group) < FOLLOW {
            return Ok(true);
        }
        let set = self.cgroup.limit(of_group)?;
        if set {
            self.of_group.store(of_group, Ordering::Relaxed);
        }
        Ok(set)
    }
}

impl Pager for Kernel {
    fn limit(&self, bytes: u64) -> anyhow::Result<()> {
        self.limit.store(bytes, Ordering::Relaxed);
        let deadline = Instant::now() + RECLAIM_TIMEOUT;
        loop {
            let set = self.follow(self.pool()?)?;
            let used = self.cgroup.used()? + self.pool()?;
            if set && used <= bytes + bytes / OVER {
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!(
                    "with the kernel's swap, {used} bytes are in use after {RECLAIM_TIMEOUT:?}, with a limit of {bytes}"
                );
            }
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn used(&self) -> anyhow::Result<u64> {
        let pool = self.pool()?;
        let used = self.cgroup.used()? + pool;
        self.follow(pool)?;
        Ok(used)
    }

    fn done(&self) -> anyhow::Result<Done> {
        let pages = |name| Ok::<_, anyhow::Error>(named(Path::new("/proc/vmstat"), name)? * PAGE);
        Ok(Done {
            faults: self.cgroup.major_faults()?,
            read: pages("pswpin ")?,
            written: pages("pswpout ")?,
            unpacked: pages("zswpin ")?,
            packed: pages("zswpout ")?,
        })
    }
}
