//! Keeps the memory within its limit.

use std::time::{Duration, Instant};

use super::{PageWaiter, Pager, StuckReason};
use crate::guest::GuestMemory;
use crate::segment_log::SEGMENT_BYTES;
use crate::units::PAGE_BYTES;
use crate::userfaultfd::FaultCause;
use crate::worker::{Job, Worker};

/// Memory that is kept free below the limit for pages that are paged in: this share of the limit, within bounds. A
/// larger reserve leaves memory unused; with a smaller one, a thread that takes much memory at once waits for
/// evictions.
const RESERVE_SHARE: u64 = 128;
const RESERVE_BYTES_MIN: u64 = SEGMENT_BYTES as u64;
const RESERVE_BYTES_MAX: u64 = 32 << 20;

/// Maximum number of pages being evicted at a time without a quarantine: enough to keep the worker busy.
const EVICTING_PAGES_MAX: usize = 1024;
/// Maximum number of pages of a batch, and its minimum as a share of the reserve. Adjacent pages are then evicted
/// together, which saves most of the cost of an eviction.
const BATCH_PAGES_MAX: usize = 512;
const BATCH_MIN_SHARE: u64 = 4;
/// Maximum number of pages of a batch with a quarantine. Batches are then few and last long, so each is as large as
/// needed.
const QUARANTINED_BATCH_PAGES_MAX: usize = 8192;

/// Minimum number of pages to evict when an allocation has failed.
const MAKE_ROOM_PAGES_MIN: usize = 64;
/// Pages are evicted after a failed allocation only while more than this share of the limit is used: a guest with
/// less memory makes no progress anyway.
const MAKE_ROOM_SHARE_MIN: u64 = 4;

/// Delay before an eviction that failed is retried.
const RETRY_DELAY: Duration = Duration::from_secs(1);
/// Delay before eviction is retried when all tiers were full.
const TIERS_FULL_RETRY_DELAY: Duration = Duration::from_millis(100);
/// Delay before eviction is retried when no page could be compressed.
const INCOMPRESSIBLE_RETRY_DELAY: Duration = Duration::from_secs(10);

/// Maximum delay. The delay doubles after each unsuccessful attempt.
const RETRY_DELAY_MAX: Duration = Duration::from_secs(10);
const RETRY_DOUBLINGS_MAX: u32 = 10;

/// Excess over the limit, in bytes, from which it is logged, and the minimum time between two log messages about it.
const LOGGED_EXCESS_BYTES_MIN: u64 = 1 << 20;
const STUCK_LOG_INTERVAL: Duration = Duration::from_secs(600);

/// Number of free segments that stay allocated for the next pages.
const SPARE_SEGMENTS: usize = 2;

/// Compressed RAM is compacted when it uses a fourth more than its live objects need.
const SLACK_SHARE: u64 = 4;
const SLACK_BYTES: u64 = 4 * SEGMENT_BYTES as u64;

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    fn reserve_bytes(&self) -> u64 {
        let limit = self.options.limit_bytes;
        (limit / RESERVE_SHARE).clamp(RESERVE_BYTES_MIN, RESERVE_BYTES_MAX)
    }

    /// Returns the number of pages to evict, in addition to those whose eviction is in progress.
    fn excess_pages(&self) -> usize {
        let target = self.options.limit_bytes.saturating_sub(self.reserve_bytes());
        let excess = self.used_bytes().saturating_sub(target).div_ceil(PAGE_BYTES);
        (excess as usize).max(self.pages_to_make_room()).saturating_sub(self.batches.evicting() + self.punching)
    }

    /// Returns the number of pages to evict because an allocation has failed although the limit allows it. Evicting
    /// pages makes room for as many others in a full tmpfs, and frees some memory where the host or a control group
    /// is short of it.
    fn pages_to_make_room(&self) -> usize {
        let is_far_below = self.used_bytes() <= self.options.limit_bytes / MAKE_ROOM_SHARE_MIN;
        match self.no_memory_until.is_some() && !is_far_below {
            true => self.stalled.len().max(MAKE_ROOM_PAGES_MIN),
            false => 0,
        }
    }

    /// Returns true if a thread that wants a page must wait until others are evicted.
    pub(super) fn must_stall(&self) -> bool {
        if self.no_memory_until.is_some() {
            return true;
        }
        self.used_bytes() >= self.options.limit_bytes
            && !self.is_detaching
            && self.stuck.is_none()
            && !self.has_quarantine()
            && self.batches.evicting() + self.punching > 0
    }

    /// Evicts pages over the limit, demotes and compacts. Returns true if there was anything to do.
    pub(super) fn balance(&mut self, now: Instant) -> bool {
        let mut worked = false;
        if self.no_memory_until.is_some_and(|until| until <= now) {
            self.no_memory_until = None;
            tracing::debug!("allocations for pages are tried again");
        }
        while let Some((page, PageWaiter { since, wants_write: write })) = self.stalled.front().copied()
            && !self.must_stall()
        {
            self.stalled.pop_front();
            self.fault(page, FaultCause::Missing, write, since);
            worked = true;
        }
        worked |= self.clear_lost();
        if !self.is_detaching {
            worked |= !self.evictions_paused && self.evict(now);
            worked |= self.store_due_pages(now);
            worked |= self.demote(now);
            worked |= self.compact();
        }
        while let Some(segment) = self.ram.begin_release(SPARE_SEGMENTS) {
            self.submit(Job::Release(segment));
        }
        worked
    }

    fn evict(&mut self, now: Instant) -> bool {
        let excess = self.excess_pages();
        if excess == 0 {
            // Evictions in progress may still fail.
            if self.batches.evicting() + self.punching == 0 {
                self.clear_stuck();
            }
            return false;
        }
        let batch_pages_min = (self.reserve_bytes() / BATCH_MIN_SHARE / PAGE_BYTES) as usize;
        let is_urgent = self.used_bytes() >= self.options.limit_bytes || self.no_memory_until.is_some();
        if excess < batch_pages_min.min(BATCH_PAGES_MAX) && !is_urgent {
            return false;
        }
        if self.stuck.is_some() && !self.may_retry_eviction() {
            return false;
        }
        if self.no_eviction_until.is_some_and(|until| until > now) {
            return false;
        }
        let (batch, evicting_max) = match self.has_quarantine() {
            false => (BATCH_PAGES_MAX, EVICTING_PAGES_MAX),
            true => (QUARANTINED_BATCH_PAGES_MAX, usize::MAX),
        };
        let evicting = self.batches.evicting();
        if self.batches.is_full() || evicting >= evicting_max {
            return false;
        }
        self.begin_eviction(excess.min(batch), now) > 0
    }

    /// Frees the emptiest segment, by moving its live objects to the one that is being filled.
    fn compact(&mut self) -> bool {
        if self.worker_has_lease {
            return false;
        }
        let live = self.ram.live_bytes();
        let used = u64::from(self.ram.used()) * SEGMENT_BYTES as u64;
        // Dead objects in full segments use space that evicted pages need.
        let is_short = !self.has_room_in_ram() && self.excess_pages() > 0;
        if !is_short && used <= live + live / SLACK_SHARE + SLACK_BYTES {
            return false;
        }
        // A segment that is nearly full frees little.
        let Some(segment) = self.ram.reserve_emptiest((SEGMENT_BYTES - SEGMENT_BYTES / 8) as u32) else {
            return false;
        };
        let Some(lease) = self.take_lease_to_compact() else {
            self.ram.unreserve(segment);
            return false;
        };
        self.submit(Job::Move { segment, lease });
        true
    }

    /// Records that nothing can be evicted for the reason `why`. Logs a warning if the limit is exceeded by much, and
    /// at most once in ten minutes for the same reason.
    pub(super) fn set_stuck(&mut self, why: StuckReason) {
        let is_new = self.stuck.is_none_or(|(before, _)| before != why);
        self.stuck = Some((why, self.now));
        if is_new {
            tracing::debug!(?why, "nothing can be evicted");
        }
        let was_reported =
            |(reported, at): (StuckReason, Instant)| reported == why && self.now - at < STUCK_LOG_INTERVAL;
        let excess_bytes = self.used_bytes().saturating_sub(self.options.limit_bytes);
        if is_new && excess_bytes >= LOGGED_EXCESS_BYTES_MIN && !self.reported_stuck.is_some_and(was_reported) {
            self.reported_stuck = Some((why, self.now));
            tracing::warn!(
                "{}: memory stays {} MiB over its limit",
                match why {
                    StuckReason::TiersFull => {
                        "there is no space left for evicted pages (a larger swap cache or budget would help)"
                    }
                    StuckReason::DiskFailed => {
                        "there is no space left for evicted pages, because the disk for them fails or is unreachable"
                    }
                    StuckReason::Memory => "pages cannot be evicted",
                    StuckReason::Incompressible =>
                        "the pages in memory cannot be compressed, and there is no swap cache",
                },
                excess_bytes >> 20
            );
        }
    }

    /// Returns true if eviction may be retried. The pager counts as stuck until a page has been evicted. Each
    /// unsuccessful attempt doubles the delay, because it stops writes to many pages for nothing.
    fn may_retry_eviction(&mut self) -> bool {
        let Some((why, since)) = self.stuck else { return true };
        let backoff = |after: Duration| (after * (1 << self.stuck_retries)).min(RETRY_DELAY_MAX);
        let may = match why {
            StuckReason::TiersFull | StuckReason::DiskFailed => {
                // Compaction frees space, but not from segments that are nearly full, so the live objects must leave
                // two segments free.
                let may_have = self.disks_have_room()
                    || self.ram.live_bytes() + 2 * SEGMENT_BYTES as u64 <= self.options.compressed_bytes;
                self.has_room_in_ram() || may_have && self.now - since > backoff(TIERS_FULL_RETRY_DELAY)
            }
            StuckReason::Memory => self.now - since > backoff(RETRY_DELAY),
            StuckReason::Incompressible => self.now - since > INCOMPRESSIBLE_RETRY_DELAY,
        };
        if may {
            self.stuck = Some((why, self.now));
            self.stuck_retries = (self.stuck_retries + 1).min(RETRY_DOUBLINGS_MAX);
        }
        may
    }

    /// Records that pages have been evicted.
    pub(super) fn clear_stuck(&mut self) {
        if let Some((why, _)) = self.stuck.take() {
            tracing::debug!(?why, "pages can be evicted again");
        }
        self.stuck_retries = 0;
    }
}
