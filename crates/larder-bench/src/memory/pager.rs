//! Who keeps a program's memory within a limit.

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

/// Those that are compared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(super) enum Variant {
    /// Nobody: there is no limit
    None,
    /// The kernel, by a swap file
    Swap,
    /// The kernel, by zswap with a swap file behind it; the limit is for the program and zswap's pool
    Zswap,
    /// Larder, by compressed RAM and a swap cache; the limit is for the program and Larder
    Larder,
    /// Larder, by compressed RAM and a slow store, which answers so much later than the disk as --slow-ms says
    Slow,
}

impl Variant {
    /// What tables and plots call it.
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

/// One of them at work.
pub(super) trait Pager: Send + Sync {
    /// Takes memory out until no more than `bytes` are really used, and sees to it from then on.
    fn limit(&self, bytes: u64) -> anyhow::Result<()>;

    /// Bytes really used now, its own included. It is asked every few milliseconds, and may use that to keep within the
    /// limit.
    fn used(&self) -> anyhow::Result<u64>;

    /// What it has done so far.
    fn done(&self) -> anyhow::Result<Done>;
}

/// What a pager has done.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Done {
    /// Faults for which something had to be brought back, from wherever.
    pub(super) faults: u64,
    /// Bytes read from the disk, and written to it.
    pub(super) read: u64,
    pub(super) written: u64,
    /// Bytes of memory that were brought back from a compressed copy in memory, and that were put there.
    pub(super) unpacked: u64,
    pub(super) packed: u64,
}

impl Done {
    /// What has come since `earlier`.
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

/// Nobody.
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
        Ok(Done {
            faults: self.cgroup.major_faults()?,
            ..Done::default()
        })
    }
}

/// The kernel. cgroup v1 does not charge zswap's pool: what the pool has is taken off the group's limit.
pub(super) struct Kernel {
    cgroup: Arc<Cgroup>,
    zswap: Option<Zswap>,
    /// For the program and the pool, once there is one.
    limit: AtomicU64,
    /// What the group has of it.
    of_group: AtomicU64,
}

const PAGE: u64 = 4096;

/// How long the kernel may take to put out what is beyond the limit.
const LIMIT_WITHIN: Duration = Duration::from_secs(120);

/// By how much memory really used may be over the limit when it is said to be kept, as a part of it: with zswap what is
/// put out makes the pool larger.
const OVER: u64 = 200;

/// The group's limit follows the pool when that has changed by so much.
const FOLLOW: u64 = MIB;

/// What the group has at least, however large the pool.
const LEAST: u64 = 16 * MIB;

impl Kernel {
    /// With a swap file, which there must be.
    pub(super) fn new(cgroup: Arc<Cgroup>, zswap: Option<Zswap>) -> Self {
        Self {
            cgroup,
            zswap,
            limit: AtomicU64::new(u64::MAX),
            of_group: AtomicU64::new(u64::MAX),
        }
    }

    fn pool(&self) -> anyhow::Result<u64> {
        self.zswap.as_ref().map_or(Ok(0), |_| Zswap::pool())
    }

    /// Gives the group what the pool leaves of the limit. False if it could not.
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
        let give_up = Instant::now() + LIMIT_WITHIN;
        loop {
            let set = self.follow(self.pool()?)?;
            let used = self.cgroup.used()? + self.pool()?;
            if set && used <= bytes + bytes / OVER {
                return Ok(());
            }
            if Instant::now() > give_up {
                bail!("the kernel leaves {used} bytes in use of {bytes} after {LIMIT_WITHIN:?}");
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
