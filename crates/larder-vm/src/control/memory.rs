//! What the control socket tells of a VM's memory, and is told to do with it. Sizes are in bytes. Numbers of what has been
//! done count from when the process that tells them attached.

use larder_block::ByteLen;
use larder_memory::entry::Tier;
use larder_memory::pager::{COMPRESSED_BYTES_MIN, DiskStatus, Stuck};
use larder_memory::pressure::Lost;
use larder_memory::service::Status;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::state::Latency;
use crate::memory::MemoryLimits;
pub use crate::memory::range::BudgetRange;

/// The answer to `GET /v1/memory`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MemoryState {
    /// What the process that has the memory calls itself.
    pub process: String,
    /// Its number.
    pub pid: i32,
    /// When all this was so: the time since Larder attached, in nanoseconds.
    pub time_ns: u64,
    /// All of the memory.
    pub size: u64,
    /// What of it is in memory as it is.
    pub resident: u64,
    /// How much memory may be used for it in all.
    pub budget: u64,
    /// Where the budget may be moved to by whoever shares the host's memory among VMs (`larder host --balance-memory`);
    /// `null`: nowhere.
    #[serde(default)]
    pub range: Option<BudgetRange>,
    /// What is: resident pages, compressed ones, and what is kept of each page.
    pub used: u64,
    /// Compressed pages.
    pub compressed: CompressedState,
    /// The swap cache and the slow store, as far as there are such.
    pub disks: Vec<SwapState>,
    /// Pages, each of one word all over, that take no memory.
    pub uniform_pages: u64,
    /// Pages that could not be read back; whoever touches one gets a memory error.
    pub lost_pages: u64,
    /// Faults that were answered.
    pub faults: FaultsState,
    /// Pages that came back so soon that with a little more memory they would not have gone.
    pub refaults: u64,
    /// Pages that came back from compressed RAM and disks, by how many pages had been evicted since they had. With memory
    /// for so many more pages they would have stayed.
    #[serde(default)]
    pub refault_distances: Vec<RefaultDistance>,
    /// Pages that were evicted.
    pub evicted_pages: u64,
    /// Of them, those of which a disk had a copy already.
    pub evicted_clean_pages: u64,
    /// Of them, those of one word all over.
    pub evicted_uniform_pages: u64,
    /// The bytes in which the others were stored.
    pub evicted_bytes: u64,
    /// Pages that were brought because others were wanted.
    pub ahead_pages: u64,
    /// Pages of zeros that were put in place because those before them were wanted.
    pub ahead_zero_pages: u64,
    /// Faults that went on where pages had been brought before they were wanted.
    pub streamed_faults: u64,
    /// Pages that are in memory and equal to a copy on a disk.
    pub clean_pages: u64,
    /// Pages that were to go, and stayed because they were written to.
    pub saved_pages: u64,
    /// Pages that were to go, and stayed because they cannot be compressed.
    pub kept_pages: u64,
    /// Pages that the guest has given up (balloon, free page reporting, virtio-mem).
    pub given_up_pages: u64,
    /// Who waits for a page that cannot be had now.
    pub stalled: u64,
    /// How much of the time was lost by waiting for memory.
    pub pressure: PressureState,
    /// Why the budget is not kept, if it is not.
    pub problem: Option<MemoryProblem>,
    /// All is being brought back.
    pub detaching: bool,
    /// The reason why a detach waits, or why the last one was stopped, refused or cancelled.
    #[serde(default)]
    pub detach_problem: Option<String>,
}

/// How much of the time was lost by waiting for memory, as the kernel's pressure stall information tells it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PressureState {
    /// Somebody waited.
    pub some: LostState,
    /// All vCPUs waited (of another program than QEMU, all threads).
    pub full: LostState,
}

/// A share of the time.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct LostState {
    /// Of the last 10 seconds, in %.
    pub avg10: f64,
    /// Of the last 60 seconds, in %.
    pub avg60: f64,
    /// Of the last 300 seconds, in %.
    pub avg300: f64,
    /// All of it since Larder began, in microseconds.
    pub total_us: u64,
}

/// Pages that came back after fewer than so many others had been evicted, and not fewer than half as many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RefaultDistance {
    /// So many.
    pub below_pages: u64,
    /// How many of them there were.
    pub count: u64,
}

/// Compressed pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CompressedState {
    /// How many.
    pub pages: u64,
    /// The memory that they take.
    pub used: u64,
    /// The memory that they may take.
    pub limit: u64,
}

/// A disk for evicted pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SwapState {
    /// What it is for.
    pub tier: SwapTier,
    /// Its path, or address.
    pub name: String,
    /// Pages that are there and not in memory.
    pub pages: u64,
    /// What it holds, with what is not needed any more.
    pub used: u64,
    /// What of that is needed.
    pub live: u64,
    /// What it may hold.
    pub limit: u64,
    /// What was written.
    pub written_bytes: u64,
    /// What was read.
    pub read_bytes: u64,
    /// Writes have failed, and no more are made.
    pub failed: bool,
    /// It cannot be reached now (an NBD server that is away): who wants a page that is there waits until it can.
    #[serde(default)]
    pub unreachable: bool,
    /// What is there is encrypted, with a key that ends with the process.
    #[serde(default)]
    pub encrypted: bool,
}

/// What a disk for evicted pages is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SwapTier {
    /// What compressed RAM has no room for.
    SwapCache,
    /// What the swap cache has no room for.
    SlowStore,
}

/// Faults, by where the page came from. The time is from when Larder was told until the page was there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FaultsState {
    /// Pages that had never been touched, or were given up: zeros.
    pub zero: Latency,
    /// Pages of one word all over.
    pub uniform: Latency,
    /// Compressed pages.
    pub compressed: Latency,
    /// Pages that were read from a disk.
    pub disk: Latency,
    /// Writes to pages that were about to go.
    pub write: Latency,
}

/// Why a budget is not kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryProblem {
    /// There is no room for more evicted pages.
    TiersFull,
    /// Pages cannot be read, or taken out of memory; the log has the reason.
    Memory,
    /// What is in memory cannot be compressed.
    Incompressible,
    /// There is no room for more compressed pages, and the disk below fails.
    DiskFailed,
}

impl SwapState {
    fn new(disk: &DiskStatus, status: &Status) -> Self {
        let (tier, pages) = match disk.tier {
            Tier::Slow => (SwapTier::SlowStore, status.stored.slow),
            Tier::Ram | Tier::Ssd => (SwapTier::SwapCache, status.stored.ssd),
        };
        Self {
            tier,
            name: disk.name.clone(),
            pages: pages.into(),
            used: disk.used_bytes,
            live: disk.live_bytes,
            limit: disk.limit_bytes,
            written_bytes: disk.written_bytes,
            read_bytes: disk.read_bytes,
            failed: disk.failed,
            unreachable: disk.unreachable,
            encrypted: disk.encrypted,
        }
    }
}

impl MemoryProblem {
    /// All that there are.
    pub const ALL: [Self; 4] = [Self::TiersFull, Self::Memory, Self::Incompressible, Self::DiskFailed];

    /// As a word of the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::TiersFull => "tiers-full",
            Self::Memory => "memory",
            Self::Incompressible => "incompressible",
            Self::DiskFailed => "disk-failed",
        }
    }

    /// For people.
    pub fn words(self) -> &'static str {
        match self {
            Self::TiersFull => "there is no room for more evicted pages",
            Self::Memory => "pages cannot be evicted (the log has the reason)",
            Self::Incompressible => "what is in memory cannot be compressed, and there is no swap cache",
            Self::DiskFailed => "there is no room for more evicted pages, as the disk for them fails",
        }
    }
}

impl SwapTier {
    /// As a word of the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::SwapCache => "swap-cache",
            Self::SlowStore => "slow-store",
        }
    }
}

/// Those that there are, by the powers of two that they are below.
fn distances(counts: &[u64]) -> Vec<RefaultDistance> {
    let all = counts.iter().enumerate().map(|(power, count)| RefaultDistance {
        below_pages: 1 << power,
        count: *count,
    });
    all.filter(|distance| distance.count > 0).collect()
}

impl MemoryState {
    /// How many times as large pages are as what compressed ones take; `None` without such pages.
    pub fn compression_ratio(&self) -> Option<f64> {
        let bytes = self.compressed.pages as f64 * larder_memory::units::PAGE_BYTES as f64;
        (self.compressed.pages > 0 && self.compressed.used > 0).then(|| bytes / self.compressed.used as f64)
    }

    pub(crate) fn new(process: &str, pid: i32, time_ns: u64, range: &BudgetRange, status: &Status) -> Self {
        let figures = &status.figures;
        Self {
            process: process.to_owned(),
            pid,
            time_ns,
            size: status.bytes,
            resident: status.present_bytes,
            budget: status.limit_bytes,
            range: (*range != BudgetRange::default()).then_some(*range),
            used: status.used_bytes,
            compressed: CompressedState {
                pages: status.stored.ram.into(),
                used: status.compressed_bytes,
                // What goes to a disk passes through a few segments, whatever the limit is.
                limit: match status.disks.is_empty() {
                    true => status.compressed_limit_bytes,
                    false => status.compressed_limit_bytes.max(COMPRESSED_BYTES_MIN),
                },
            },
            disks: status.disks.iter().map(|disk| SwapState::new(disk, status)).collect(),
            uniform_pages: status.stored.uniform.into(),
            lost_pages: status.stored.lost.into(),
            faults: FaultsState {
                zero: Latency::new(&figures.zero),
                uniform: Latency::new(&figures.uniform),
                compressed: Latency::new(&figures.ram),
                disk: Latency::new(&figures.disk),
                write: Latency::new(&figures.writes),
            },
            refaults: figures.refaults,
            refault_distances: distances(&figures.distances),
            evicted_pages: figures.evicted,
            evicted_clean_pages: figures.evicted_clean,
            evicted_uniform_pages: figures.evicted_uniform,
            evicted_bytes: figures.evicted_bytes,
            ahead_pages: figures.ahead,
            ahead_zero_pages: figures.ahead_zero,
            streamed_faults: figures.streamed,
            clean_pages: status.stored.clean.into(),
            saved_pages: figures.saved,
            kept_pages: figures.kept,
            given_up_pages: figures.removed,
            stalled: status.stalled as u64,
            pressure: PressureState {
                some: LostState::new(status.pressure.some),
                full: LostState::new(status.pressure.full),
            },
            problem: status.stuck.map(|why| match why {
                Stuck::TiersFull => MemoryProblem::TiersFull,
                Stuck::Memory => MemoryProblem::Memory,
                Stuck::Incompressible => MemoryProblem::Incompressible,
                Stuck::DiskFailed => MemoryProblem::DiskFailed,
            }),
            detaching: status.detaching,
            detach_problem: status.detach_problem.clone(),
        }
    }
}

impl LostState {
    fn new(lost: Lost) -> Self {
        let [avg10, avg60, avg300] = lost.averages.map(|share| (share * 1e4).round() / 1e2);
        Self {
            avg10,
            avg60,
            avg300,
            total_us: u64::try_from(lost.total.as_micros()).unwrap_or(u64::MAX),
        }
    }
}

/// What is set: the body of `PATCH /v1/memory`. What is left out stays as it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MemoryPatch {
    /// How much memory may be used in all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<u64>,
    /// How much of that may be compressed pages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compressed: Option<u64>,
    /// All bounds that the budget is to have; without any (`{}`) it is moved no more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<BudgetRange>,
}

impl MemoryPatch {
    /// As limits.
    pub fn limits(&self) -> MemoryLimits {
        MemoryLimits {
            budget: self.budget.map(ByteLen::new),
            compressed: self.compressed.map(ByteLen::new),
            range: self.range,
        }
    }
}

/// The answer to `POST /v1/memory/detach`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Detached {
    /// The process is alone again; otherwise its pages are still being brought back, and it will be.
    pub detached: bool,
}
