//! Control socket types for a VM's memory. Sizes are in bytes. Counters start at zero when the process attaches.

use larder_block::ByteLen;
use larder_memory::entry::Tier;
use larder_memory::pager::{COMPRESSED_BYTES_MIN, DiskStatus, StuckReason};
use larder_memory::pressure::StallTime;
use larder_memory::service::PagerStatus;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::state::Latency;
use crate::memory::MemoryLimits;
pub use crate::memory::range::BudgetRange;

/// The answer to `GET /v1/memory`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct MemoryState {
    /// Name of the process whose memory is managed.
    pub process: String,
    /// Process ID of that process.
    pub pid: i32,
    /// Time of this report: nanoseconds since Larder attached.
    pub time_ns: u64,
    /// Size of the memory.
    pub size: u64,
    /// Bytes of resident pages.
    pub resident: u64,
    /// Limit on the memory used for the guest in all.
    pub budget: u64,
    /// Bounds within which a host-wide balancer may move the budget (`larder host --balance-memory`); `null`: the
    /// budget is not moved.
    #[serde(default)]
    pub range: Option<BudgetRange>,
    /// Memory used of the budget: resident pages, compressed pages, and metadata of each page.
    pub used: u64,
    /// Compressed pages.
    pub compressed: CompressedState,
    /// The swap cache and the slow store, if there are any.
    pub disks: Vec<SwapState>,
    /// Uniform pages, which repeat one word and take no memory.
    pub uniform_pages: u64,
    /// Pages that could not be read back; touching one causes a memory error.
    pub lost_pages: u64,
    /// Faults that were resolved.
    pub faults: FaultsState,
    /// Refaults: pages that returned so soon that slightly more memory would have avoided their eviction.
    pub refaults: u64,
    /// Pages that returned from compressed RAM and disks, by the number of pages evicted between their eviction and
    /// their return. With memory for that many more pages they would not have been evicted.
    #[serde(default)]
    pub refault_distances: Vec<RefaultDistance>,
    /// Evicted pages.
    pub evicted_pages: u64,
    /// Evicted pages of which a disk already had a copy.
    pub evicted_clean_pages: u64,
    /// Evicted uniform pages.
    pub evicted_uniform_pages: u64,
    /// Stored size of all other evicted pages.
    pub evicted_bytes: u64,
    /// Pages that were prefetched after faults on other pages.
    pub ahead_pages: u64,
    /// Pages of zeros that were mapped after faults on the pages before them.
    pub ahead_zero_pages: u64,
    /// Faults that continued a run of prefetched pages.
    pub streamed_faults: u64,
    /// Resident pages that equal a copy on a disk.
    pub clean_pages: u64,
    /// Pages whose eviction was cancelled because they were written to.
    pub saved_pages: u64,
    /// Pages whose eviction was cancelled because they cannot be compressed.
    pub kept_pages: u64,
    /// Pages that the guest has returned (balloon, free page reporting, virtio-mem).
    pub given_up_pages: u64,
    /// Faults that wait because their page cannot be provided now.
    pub stalled: u64,
    /// Fraction of the time lost by waiting for memory.
    pub pressure: PressureState,
    /// Reason why the budget is exceeded, if it is.
    pub problem: Option<MemoryProblem>,
    /// A detach is running: all pages are being paged in.
    pub detaching: bool,
    /// Reason why a detach waits, or why the last one was stopped, refused or cancelled.
    #[serde(default)]
    pub detach_problem: Option<String>,
}

/// Fraction of the time lost by waiting for memory, in the form of the kernel's pressure stall information.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct PressureState {
    /// Time in which some thread waited.
    pub some: StallState,
    /// Time in which all vCPUs waited (all threads, if the program is not QEMU).
    pub full: StallState,
}

/// Time lost by waiting.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct StallState {
    /// Percentage of the last 10 seconds.
    pub avg10: f64,
    /// Percentage of the last 60 seconds.
    pub avg60: f64,
    /// Percentage of the last 300 seconds.
    pub avg300: f64,
    /// Total since Larder attached, in microseconds.
    pub total_us: u64,
}

/// Histogram bucket of refaults: pages that returned after fewer than `below_pages` other evictions, and at least
/// half as many.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RefaultDistance {
    /// Upper bound of the bucket, in pages, exclusive.
    pub below_pages: u64,
    /// Number of pages in the bucket.
    pub count: u64,
}

/// Compressed pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CompressedState {
    /// Number of pages.
    pub pages: u64,
    /// Memory in use.
    pub used: u64,
    /// Limit of the memory.
    pub limit: u64,
}

/// A disk for evicted pages.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SwapState {
    /// Tier of the disk.
    pub tier: SwapTier,
    /// Path or address of the disk.
    pub name: String,
    /// Pages that are on the disk and not in memory.
    pub pages: u64,
    /// Bytes in use on the disk, including stale data.
    pub used: u64,
    /// Bytes in use on the disk without stale data.
    pub live: u64,
    /// Limit of the bytes on the disk.
    pub limit: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes have failed, and no more are made.
    pub failed: bool,
    /// The disk cannot be reached now (an NBD server that is down): faults on its pages wait until it can.
    #[serde(default)]
    pub unreachable: bool,
    /// The data is encrypted, with a key that ends with the process.
    #[serde(default)]
    pub encrypted: bool,
}

/// Tier of a disk for evicted pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum SwapTier {
    /// Receives the pages for which compressed RAM has no space.
    SwapCache,
    /// Receives the pages for which the swap cache has no space.
    SlowStore,
}

/// Latency of faults, by where the page came from: from Larder's notification until the page was present.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FaultsState {
    /// Pages that had never been touched, or that the guest had returned: zeros.
    pub zero: Latency,
    /// Uniform pages, which repeat one word.
    pub uniform: Latency,
    /// Compressed pages.
    pub compressed: Latency,
    /// Pages that were read from a disk.
    pub disk: Latency,
    /// Writes to pages that were being evicted.
    pub write: Latency,
}

/// Reason why a budget is exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum MemoryProblem {
    /// All tiers for evicted pages are full.
    TiersFull,
    /// Pages cannot be read or removed from memory; the log has the reason.
    Memory,
    /// The resident pages cannot be compressed.
    Incompressible,
    /// The space for compressed pages is full, and the disk below fails.
    DiskFailed,
}

impl SwapState {
    fn new(disk: &DiskStatus, status: &PagerStatus) -> Self {
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
    /// All variants.
    pub const ALL: [Self; 4] = [Self::TiersFull, Self::Memory, Self::Incompressible, Self::DiskFailed];

    /// Returns the value in the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::TiersFull => "tiers-full",
            Self::Memory => "memory",
            Self::Incompressible => "incompressible",
            Self::DiskFailed => "disk-failed",
        }
    }

    /// Returns a description for users.
    pub fn description(self) -> &'static str {
        match self {
            Self::TiersFull => "there is no space for more evicted pages",
            Self::Memory => "pages cannot be evicted (the log has the reason)",
            Self::Incompressible => "the pages in memory cannot be compressed, and there is no swap cache",
            Self::DiskFailed => "there is no space for more evicted pages, because their disk fails",
        }
    }
}

impl SwapTier {
    /// Returns the value in the JSON.
    pub fn name(self) -> &'static str {
        match self {
            Self::SwapCache => "swap-cache",
            Self::SlowStore => "slow-store",
        }
    }
}

/// Returns the non-empty buckets of counts, whose indexes are the powers of two of the upper bounds.
fn refault_histogram(counts: &[u64]) -> Vec<RefaultDistance> {
    let all =
        counts.iter().enumerate().map(|(power, count)| RefaultDistance { below_pages: 1 << power, count: *count });
    all.filter(|distance| distance.count > 0).collect()
}

impl MemoryState {
    /// Returns the compression ratio of the compressed pages; `None` without such pages.
    pub fn compression_ratio(&self) -> Option<f64> {
        let bytes = self.compressed.pages as f64 * larder_memory::units::PAGE_BYTES as f64;
        (self.compressed.pages > 0 && self.compressed.used > 0).then(|| bytes / self.compressed.used as f64)
    }

    pub(crate) fn new(process: &str, pid: i32, time_ns: u64, range: &BudgetRange, status: &PagerStatus) -> Self {
        let statistics = &status.stats;
        Self {
            process: process.to_owned(),
            pid,
            time_ns,
            size: status.bytes,
            resident: status.resident_bytes,
            budget: status.limit_bytes,
            range: (*range != BudgetRange::default()).then_some(*range),
            used: status.used_bytes,
            compressed: CompressedState {
                pages: status.stored.ram.into(),
                used: status.compressed_bytes,
                // Data for a disk passes through a few segments of compressed pages, even if the limit is smaller.
                limit: match status.disks.is_empty() {
                    true => status.compressed_limit_bytes,
                    false => status.compressed_limit_bytes.max(COMPRESSED_BYTES_MIN),
                },
            },
            disks: status.disks.iter().map(|disk| SwapState::new(disk, status)).collect(),
            uniform_pages: status.stored.uniform.into(),
            lost_pages: status.stored.lost.into(),
            faults: FaultsState {
                zero: Latency::new(&statistics.zero),
                uniform: Latency::new(&statistics.uniform),
                compressed: Latency::new(&statistics.ram),
                disk: Latency::new(&statistics.disk),
                write: Latency::new(&statistics.protected_writes),
            },
            refaults: statistics.refaults,
            refault_distances: refault_histogram(&statistics.refault_distances),
            evicted_pages: statistics.evicted,
            evicted_clean_pages: statistics.evicted_clean,
            evicted_uniform_pages: statistics.evicted_uniform,
            evicted_bytes: statistics.evicted_bytes,
            ahead_pages: statistics.prefetched,
            ahead_zero_pages: statistics.prefetched_zero,
            streamed_faults: statistics.stream_faults,
            clean_pages: status.stored.clean.into(),
            saved_pages: statistics.evictions_cancelled,
            kept_pages: statistics.incompressible,
            given_up_pages: statistics.discarded,
            stalled: status.stalled as u64,
            pressure: PressureState {
                some: StallState::new(status.pressure.some),
                full: StallState::new(status.pressure.full),
            },
            problem: status.stuck.map(|why| match why {
                StuckReason::TiersFull => MemoryProblem::TiersFull,
                StuckReason::Memory => MemoryProblem::Memory,
                StuckReason::Incompressible => MemoryProblem::Incompressible,
                StuckReason::DiskFailed => MemoryProblem::DiskFailed,
            }),
            detaching: status.detaching,
            detach_problem: status.detach_problem.clone(),
        }
    }
}

impl StallState {
    fn new(lost: StallTime) -> Self {
        let [avg10, avg60, avg300] = lost.averages.map(|share| (share * 1e4).round() / 1e2);
        Self { avg10, avg60, avg300, total_us: u64::try_from(lost.total.as_micros()).unwrap_or(u64::MAX) }
    }
}

/// Limits to change: the body of `PATCH /v1/memory`. Limits that are left out do not change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct MemoryPatch {
    /// Limit on the memory used for the guest in all.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub budget: Option<u64>,
    /// Limit on the part of the budget that compressed pages use.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub compressed: Option<u64>,
    /// All bounds of the budget; with none (`{}`) the budget is no longer moved.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<BudgetRange>,
}

impl MemoryPatch {
    /// Returns the patch as limits.
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
pub struct DetachResult {
    /// The detach is complete; otherwise pages are still being paged in, and it continues.
    pub detached: bool,
}
