//! Keeping within the limit.

use std::time::{Duration, Instant};

use super::{Pager, Stuck, Waiting};
use crate::guest::GuestMemory;
use crate::log::SEGMENT;
use crate::units::PAGE_BYTES;
use crate::userfaultfd::Cause;
use crate::worker::{Job, Worker};

/// Below the limit so much is kept free for pages that come: this part of it, within bounds. More of it is memory that is not
/// used; with less whoever takes much memory at once waits for pages to go.
const RESERVE_SHARE: u64 = 128;
const RESERVE_BYTES_MIN: u64 = SEGMENT as u64;
const RESERVE_BYTES_MAX: u64 = 32 << 20;

/// How many pages leave at a time without a quarantine: enough that the worker always has some to do.
const LEAVING_MAX: usize = 1024;
/// How many pages an eviction has at most, and what share of the reserve it has at least: pages that lie together go together
/// then, which is most of what it costs.
const BATCH_PAGES: usize = 512;
const BATCH_SHARE: u64 = 4;
/// With a quarantine there are few evictions for long, so each is as large as need be.
const BATCH_PAGES_QUARANTINED: usize = 8192;

/// The least number of pages that make room for others when there is no memory.
const MAKE_ROOM_PAGES_MIN: usize = 64;
/// They leave only while more than this part of the limit is used: a guest with less does not get on either.
const MAKE_ROOM_SHARE_MIN: u64 = 4;

/// After so long it is tried again to evict pages, when that has failed.
const TRY_AGAIN_AFTER: Duration = Duration::from_secs(1);
/// The same when there was no room for them.
const TRY_FULL_AFTER: Duration = Duration::from_millis(100);
/// The same when none could be compressed.
const TRY_INCOMPRESSIBLE_AFTER: Duration = Duration::from_secs(10);

/// After each try that brought nothing twice as long, up to this.
const TRY_AGAIN_MAX: Duration = Duration::from_secs(10);
const STUCK_TRIES_MAX: u32 = 10;

/// Memory is said to stay over its limit if it is so much over it, and after so long again.
const TOLD_OVER: u64 = 1 << 20;
const TELL_AGAIN_AFTER: Duration = Duration::from_secs(600);

/// Free segments that are kept for the next pages.
const SEGMENTS_KEPT: usize = 2;

/// Compressed RAM is compacted when it takes a fourth more than what lives in it.
const SLACK_SHARE: u64 = 4;
const SLACK_BYTES: u64 = 4 * SEGMENT as u64;

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    fn reserve_bytes(&self) -> u64 {
        let limit = self.options.limit_bytes;
        (limit / RESERVE_SHARE).clamp(RESERVE_BYTES_MIN, RESERVE_BYTES_MAX)
    }

    /// How many pages should leave besides those that do.
    fn excess_pages(&self) -> usize {
        let target = self.options.limit_bytes.saturating_sub(self.reserve_bytes());
        let excess = self.used_bytes().saturating_sub(target).div_ceil(PAGE_BYTES);
        (excess as usize)
            .max(self.pages_to_make_room())
            .saturating_sub(self.batches.leaving() + self.punching)
    }

    /// How many pages should leave because there is no memory for those that are wanted, although the limit allows them. A
    /// full tmpfs has room again for as many; where memory is short, some is free.
    fn pages_to_make_room(&self) -> usize {
        let is_far_below = self.used_bytes() <= self.options.limit_bytes / MAKE_ROOM_SHARE_MIN;
        match self.no_memory_until.is_some() && !is_far_below {
            true => self.stalled.len().max(MAKE_ROOM_PAGES_MIN),
            false => 0,
        }
    }

    /// Whether whoever wants a page now must wait until others have gone.
    pub(super) fn must_stall(&self) -> bool {
        if self.no_memory_until.is_some() {
            return true;
        }
        self.used_bytes() >= self.options.limit_bytes
            && !self.is_leaving
            && self.stuck.is_none()
            && !self.has_quarantine()
            && self.batches.leaving() + self.punching > 0
    }

    /// Sends away what is too much, and tidies up; whether there was anything to do.
    pub(super) fn balance(&mut self, now: Instant) -> bool {
        let mut worked = false;
        if self.no_memory_until.is_some_and(|until| until <= now) {
            self.no_memory_until = None;
        }
        while let Some((page, Waiting { since, write })) = self.stalled.front().copied()
            && !self.must_stall()
        {
            self.stalled.pop_front();
            self.fault(page, Cause::Missing, write, since);
            worked = true;
        }
        worked |= self.clear_lost();
        if !self.is_leaving {
            worked |= !self.are_evictions_paused && self.evict(now);
            worked |= self.go_on_storing(now);
            worked |= self.demote(now);
            worked |= self.compact();
        }
        while let Some(segment) = self.ram.cool(SEGMENTS_KEPT) {
            self.give(Job::Release(segment));
        }
        worked
    }

    fn evict(&mut self, now: Instant) -> bool {
        let excess = self.excess_pages();
        if excess == 0 {
            // Those on their way may have to stay yet.
            if self.batches.leaving() + self.punching == 0 {
                self.is_stuck_no_more();
            }
            return false;
        }
        let enough = (self.reserve_bytes() / BATCH_SHARE / PAGE_BYTES) as usize;
        let is_wanted_now = self.used_bytes() >= self.options.limit_bytes || self.no_memory_until.is_some();
        if excess < enough.min(BATCH_PAGES) && !is_wanted_now {
            return false;
        }
        if self.stuck.is_some() && !self.may_try_again() {
            return false;
        }
        if self.no_eviction_until.is_some_and(|until| until > now) {
            return false;
        }
        let (batch, leaving_max) = match self.has_quarantine() {
            false => (BATCH_PAGES, LEAVING_MAX),
            true => (BATCH_PAGES_QUARANTINED, usize::MAX),
        };
        let leaving = self.batches.leaving();
        if self.batches.is_full() || leaving >= leaving_max {
            return false;
        }
        self.begin_eviction(excess.min(batch), now) > 0
    }

    /// Moves what lives in the emptiest segment together with what comes, so that it is free.
    fn compact(&mut self) -> bool {
        if self.lease_is_out {
            return false;
        }
        let live = self.ram.live_bytes();
        let used = u64::from(self.ram.used()) * SEGMENT as u64;
        // What has died in full segments is room for what should go.
        let is_short = !self.has_room_in_ram() && self.excess_pages() > 0;
        if !is_short && used <= live + live / SLACK_SHARE + SLACK_BYTES {
            return false;
        }
        // From a segment that is nearly full there is little to gain.
        let Some(segment) = self.ram.emptiest((SEGMENT - SEGMENT / 8) as u32) else {
            return false;
        };
        let Some(lease) = self.take_lease_to_compact() else {
            self.ram.left(segment);
            return false;
        };
        self.give(Job::Move { segment, lease });
        true
    }

    /// Nothing can be evicted. It is told if that means anything, and not again soon for the same reason.
    pub(super) fn is_stuck(&mut self, why: Stuck) {
        let is_new = self.stuck.is_none_or(|(before, _)| before != why);
        self.stuck = Some((why, self.now));
        let was_told = |(told, at): (Stuck, Instant)| told == why && self.now - at < TELL_AGAIN_AFTER;
        let over = self.used_bytes().saturating_sub(self.options.limit_bytes);
        if is_new && over >= TOLD_OVER && !self.told_stuck.is_some_and(was_told) {
            self.told_stuck = Some((why, self.now));
            tracing::warn!(
                "{}: memory stays {} MiB over its limit",
                match why {
                    Stuck::TiersFull => {
                        "there is no room left for evicted pages (a larger swap cache or budget would help)"
                    }
                    Stuck::DiskFailed => {
                        "there is no room left for evicted pages, as the disk for them fails or cannot be reached"
                    }
                    Stuck::Memory => "pages cannot be evicted",
                    Stuck::Incompressible => "what is in memory cannot be compressed, and there is no swap cache",
                },
                over >> 20
            );
        }
    }

    /// Whether to try again. It counts as stuck until a page has gone, and a try that brings nothing makes the next one
    /// later: each stops the process' writes to many pages for nothing.
    fn may_try_again(&mut self) -> bool {
        let Some((why, since)) = self.stuck else { return true };
        let later = |after: Duration| (after * (1 << self.stuck_tries)).min(TRY_AGAIN_MAX);
        let may = match why {
            Stuck::TiersFull | Stuck::DiskFailed => {
                // What can be moved together is, but not from segments that are nearly full: then there is none to be had.
                let may_have = self.disks_have_room()
                    || self.ram.live_bytes() + 2 * SEGMENT as u64 <= self.options.compressed_bytes;
                self.has_room_in_ram() || may_have && self.now - since > later(TRY_FULL_AFTER)
            }
            Stuck::Memory => self.now - since > later(TRY_AGAIN_AFTER),
            Stuck::Incompressible => self.now - since > TRY_INCOMPRESSIBLE_AFTER,
        };
        if may {
            self.stuck = Some((why, self.now));
            self.stuck_tries = (self.stuck_tries + 1).min(STUCK_TRIES_MAX);
        }
        may
    }

    /// Pages have gone.
    pub(super) fn is_stuck_no_more(&mut self) {
        self.stuck = None;
        self.stuck_tries = 0;
    }
}
