//! Eviction of pages.

use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Pager, Phase, StuckReason};
use crate::entry::{CopyLocation, EntryWord, EvictionRecord, Tier};
use crate::guest::GuestMemory;
use crate::resident_queues::ResidentQueue;
use crate::segment_log::SegmentIndex;
use crate::units::{PageIndex, PageRun, runs};
use crate::worker::{BatchIndex, CopiedObject, Job, SegmentLease, StoreOutcome, Worker, WorkerResult};

/// Maximum number of pages in one store job. The worker reports at least this often.
const STORE_JOB_PAGES_MAX: usize = 64;
/// Delay before write-protection that failed is retried.
const PROTECT_RETRY_DELAY: Duration = Duration::from_millis(10);
/// Minimum time that a page stays unprotected after a writer has faulted on it. Longer than a thread takes to wake
/// up.
const UNPROTECTED_TIME_MIN: Duration = Duration::from_millis(1);
/// Number of consecutive incompressible pages after which eviction pauses.
const INCOMPRESSIBLE_STREAK_MAX: u32 = 4096;
/// Minimum number of segments of compressed RAM if there is a disk.
const SEGMENTS_MIN: u32 = 6;
/// Minimum size of compressed RAM if there is a disk, in bytes.
pub const COMPRESSED_BYTES_MIN: u64 = SEGMENTS_MIN as u64 * crate::segment_log::SEGMENT_BYTES as u64;
/// Maximum number of concurrent batches.
const BATCHES_MAX: usize = 64;

/// Pages that were write-protected together.
#[derive(Default)]
struct Batch {
    /// Pages that the worker has not received yet, in falling order.
    pages: Vec<PageIndex>,
    /// Time at which the pages were write-protected.
    protected_at: Option<Instant>,
    /// Result of [`GuestMemory::io_fence`] at that time.
    io_fence: u64,
    /// The worker is storing pages of this batch.
    is_being_stored: bool,
}

/// Batches whose eviction is in progress.
pub(super) struct Batches {
    slots: Vec<Batch>,
    /// Batches in the order in which they are stored.
    order: std::collections::VecDeque<u8>,
    free: Vec<u8>,
    /// Number of pages in all batches that have not been stored.
    evicting: usize,
}

impl Default for Batches {
    fn default() -> Self {
        Self {
            slots: std::iter::repeat_with(Batch::default).take(BATCHES_MAX).collect(),
            order: std::collections::VecDeque::new(),
            free: (0..BATCHES_MAX as u8).rev().collect(),
            evicting: 0,
        }
    }
}

impl Batches {
    /// Returns the number of pages whose eviction is in progress.
    pub(super) fn evicting(&self) -> usize {
        self.evicting
    }

    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// Returns the batch that is stored next.
    fn next(&self) -> Option<&Batch> {
        Some(&self.slots[usize::from(*self.order.front()?)])
    }
}

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    /// Starts to evict up to `count` pages, and returns how many. Pages with a valid copy are removed at once; the
    /// others are write-protected.
    pub(super) fn begin_eviction(&mut self, count: usize, now: Instant) -> usize {
        let Some(slot) = self.batches.free.pop() else { return 0 };
        let mut pages: Vec<PageIndex> = std::iter::from_fn(|| self.queues.pop_victim()).take(count).collect();
        // A thread whose page was unprotected gets the time to write before the page is evicted again.
        self.recently_unprotected.retain(|(_, since)| now.saturating_duration_since(*since) < UNPROTECTED_TIME_MIN);
        let unprotected: Vec<PageIndex> = pages.extract_if(.., |page| self.is_recently_unprotected(*page)).collect();
        for page in unprotected {
            self.queues.push(ResidentQueue::Working, page);
        }
        pages.sort_unstable();
        let clean = pages.extract_if(.., |page| self.state.word(*page).is_clean());
        let clean: Vec<PageIndex> = clean.collect();
        let clean_count = clean.len();
        self.evict_clean(slot, clean);
        let mut failed = None;
        let mut protected = Vec::with_capacity(pages.len());
        for run in runs(pages.iter().copied()) {
            if failed.is_none()
                && let Err(error) = self.guest.protect(run)
            {
                failed = Some(error);
            }
            for page in run.pages() {
                if failed.is_none() {
                    self.phases.set(page, Phase::Evicting(slot));
                    protected.push(page);
                } else {
                    self.queues.push(ResidentQueue::Working, page);
                }
            }
        }
        if let Some(error) = failed {
            tracing::debug!("pages cannot be write-protected now: {error}");
            self.no_eviction_until = Some(now + PROTECT_RETRY_DELAY);
        }
        let count = protected.len();
        if count == 0 {
            self.batches.free.push(slot);
            return clean_count;
        }
        protected.reverse();
        self.batches.evicting += count;
        self.batches.slots[usize::from(slot)] = Batch {
            pages: protected,
            protected_at: Some(now),
            io_fence: self.guest.io_fence(),
            is_being_stored: false,
        };
        self.batches.order.push_back(slot);
        count + clean_count
    }

    fn is_recently_unprotected(&self, page: PageIndex) -> bool {
        self.recently_unprotected.iter().any(|(of, _)| *of == page)
    }

    /// Evicts pages that are write-protected and equal to their copies in a tier.
    fn evict_clean(&mut self, slot: u8, pages: Vec<PageIndex>) {
        if pages.is_empty() {
            return;
        }
        let mut number = self.state.eviction_count().load(Ordering::Relaxed);
        for page in &pages {
            let word = self.state.word(*page);
            let checksum = self.state.eviction_record(*page).checksum;
            let evicted_at = number as u32;
            self.state.set_eviction_record(*page, EvictionRecord { checksum, evicted_at });
            self.set_word(*page, word.with_clean(false));
            self.phases.set(*page, Phase::Punching);
            number += 1;
        }
        self.state.eviction_count().store(number, Ordering::Relaxed);
        self.stats.evicted += pages.len() as u64;
        self.stats.evicted_clean += pages.len() as u64;
        self.clear_stuck();
        self.punch(slot, pages);
    }

    fn punch(&mut self, slot: u8, pages: Vec<PageIndex>) {
        self.punching += pages.len();
        self.submit(Job::Punch { batch: BatchIndex(slot), pages });
    }

    /// Returns the time at which the quarantine of the next batch ends. `None` if there is no batch, or while the
    /// worker has the lease.
    fn next_due(&self) -> Option<Instant> {
        let at = self.batches.next()?.protected_at?;
        (!self.worker_has_lease).then(|| at + self.options.quarantine)
    }

    /// Returns true if the next pages can be stored, because no device writes to them any more.
    fn is_due(&self, now: Instant) -> bool {
        self.next_due().is_some_and(|due| due <= now)
            && self.batches.next().is_some_and(|batch| self.guest.is_io_fence_passed(batch.io_fence))
    }

    /// Returns true if evicted pages wait for the end of device I/O, which the pager cannot stop. The time at which
    /// memory becomes free is then unknown.
    pub(super) fn has_quarantine(&self) -> bool {
        !self.options.quarantine.is_zero() || self.guest.has_device_io()
    }

    /// Returns the time of the next turn that is due without an event.
    pub fn next_turn(&self) -> Option<Instant> {
        self.next_due().into_iter().chain(self.next_read_retry()).min()
    }

    /// Passes pages whose quarantine has ended to the worker. Returns true if there were any.
    pub(super) fn store_due_pages(&mut self, now: Instant) -> bool {
        // Checked for each batch: after the last page of one, the next may still be in quarantine.
        while self.is_due(now)
            && let Some(slot) = self.batches.order.front().copied()
        {
            let batch = &mut self.batches.slots[usize::from(slot)];
            let mut pages = Vec::with_capacity(STORE_JOB_PAGES_MAX);
            let mut cancelled = 0;
            while pages.len() < STORE_JOB_PAGES_MAX
                && let Some(page) = batch.pages.pop()
            {
                // Pages that have been written to or given up are not being evicted any more.
                match self.phases.get(page) {
                    Phase::Evicting(of) if of == slot => pages.push(page),
                    _ => cancelled += 1,
                }
            }
            self.batches.evicting -= cancelled;
            if pages.is_empty() {
                self.end_batch(slot);
                continue;
            }
            let Some(lease) = self.take_lease() else {
                if self.demote(now) || self.is_demoting() {
                    let batch = &mut self.batches.slots[usize::from(slot)];
                    batch.pages.extend(pages.into_iter().rev());
                    return false;
                }
                self.cancel_eviction(slot, pages.iter().copied());
                self.cancel_all_evictions();
                self.set_stuck(self.full_reason());
                return true;
            };
            self.batches.slots[usize::from(slot)].is_being_stored = true;
            self.submit(Job::Store { batch: BatchIndex(slot), pages, lease, allow_raw: !self.disks.all.is_empty() });
            return true;
        }
        false
    }

    fn end_batch(&mut self, slot: u8) {
        debug_assert_eq!(self.batches.order.front(), Some(&slot));
        self.batches.order.pop_front();
        self.batches.slots[usize::from(slot)] = Batch::default();
        self.batches.free.push(slot);
    }

    /// Takes the unfilled rest of a segment, for the worker.
    pub(super) fn take_lease(&mut self) -> Option<SegmentLease> {
        if self.lease.is_none() && self.ram.used() < self.segments_max() {
            self.lease = self.new_segment();
        }
        let lease = self.lease.take()?;
        self.worker_has_lease = true;
        Some(lease)
    }

    /// Returns true if [`Self::take_lease`] would return a lease.
    pub(super) fn has_room_in_ram(&self) -> bool {
        self.lease.is_some() || self.ram.used() < self.segments_max()
    }

    /// Takes a lease for moving the live objects of another segment. This may exceed the limit by one segment, since
    /// the other segment becomes free.
    pub(super) fn take_lease_to_compact(&mut self) -> Option<SegmentLease> {
        if self.lease.is_none() && self.ram.used() <= self.segments_max() {
            self.lease = self.new_segment();
        }
        self.take_lease()
    }

    fn new_segment(&mut self) -> Option<SegmentLease> {
        let (segment, filling) = self.ram.allocate()?;
        Some(SegmentLease { segment, from: 0, generation: filling })
    }

    /// Returns the maximum number of segments of compressed RAM. With a disk there are always a few, since pages pass
    /// through them.
    pub(super) fn segments_max(&self) -> u32 {
        let max =
            u32::try_from(self.options.compressed_bytes / crate::segment_log::SEGMENT_BYTES as u64).unwrap_or(u32::MAX);
        match self.disks.all.is_empty() {
            true => max,
            false => max.max(SEGMENTS_MIN),
        }
    }

    /// Takes the lease back from the worker. With `is_full` the segment is sealed.
    fn return_lease(&mut self, lease: SegmentLease, is_full: bool) {
        self.worker_has_lease = false;
        if is_full {
            self.ram.seal(lease.segment);
        } else {
            self.lease = Some(lease);
        }
    }

    /// Cancels the eviction of pages of a batch.
    fn cancel_eviction(&mut self, slot: u8, pages: impl Iterator<Item = PageIndex>) {
        let mut cancelled: Vec<PageIndex> = Vec::new();
        for page in pages {
            self.batches.evicting -= 1;
            if self.phases.get(page) == Phase::Evicting(slot) {
                self.enqueue(page, ResidentQueue::Working);
                cancelled.push(page);
            }
        }
        for run in runs(cancelled) {
            self.unprotect(run);
        }
    }

    /// Cancels all evictions, except those of pages that the worker has.
    pub(super) fn cancel_all_evictions(&mut self) {
        for slot in self.batches.order.clone() {
            let mut pages = std::mem::take(&mut self.batches.slots[usize::from(slot)].pages);
            pages.reverse();
            self.cancel_eviction(slot, pages.into_iter());
        }
    }

    /// Removes the write-protection of `run`. If that is not possible now, the first write faults and retries it.
    fn unprotect(&self, run: PageRun) {
        if self.guest.unprotect(run).is_err() {
            self.guest.wake(run);
        }
    }

    /// Handles a job that the worker has done.
    pub(super) fn on_job_done(&mut self, done: WorkerResult) {
        self.jobs -= 1;
        match done {
            WorkerResult::Stored { batch, pages, outcomes, lease, failed } => {
                self.on_stored(batch, pages, outcomes, lease, failed)
            }
            WorkerResult::Punched { pages, failed, .. } => self.on_punched(pages, failed),
            WorkerResult::Moved { segment, copied, skipped: left_out, lease, complete } => {
                self.drop_clean(left_out);
                self.on_moved(segment, copied, lease, complete);
            }
            WorkerResult::Demoted { origin, next_at, copied, skipped: left_out, into, is_full } => {
                self.drop_clean(left_out);
                self.on_demoted(origin, next_at, copied, into, is_full);
            }
            WorkerResult::Released(segment) => self.ram.end_release(segment),
        }
    }

    fn on_stored(
        &mut self,
        BatchIndex(slot): BatchIndex,
        mut pages: Vec<PageIndex>,
        outcomes: Vec<StoreOutcome>,
        lease: SegmentLease,
        failed: Option<io::Error>,
    ) {
        let rest = pages.split_off(outcomes.len());
        self.batches.evicting -= pages.len();
        let mut number = self.state.eviction_count().load(Ordering::Relaxed);
        let mut stored_pages = Vec::with_capacity(pages.len());
        let mut incompressible = Vec::new();
        for (page, outcome) in pages.into_iter().zip(outcomes) {
            if self.phases.get(page) != Phase::Evicting(slot) {
                continue;
            }
            let (word, second) = match outcome {
                StoreOutcome::Incompressible => {
                    incompressible.push(page);
                    self.enqueue(page, ResidentQueue::Working);
                    continue;
                }
                StoreOutcome::Uniform(word) => {
                    self.stats.evicted_uniform += 1;
                    (EntryWord::encode(CopyLocation::Uniform { clean: false }), word)
                }
                StoreOutcome::Stored(stored, checksum) => {
                    self.ram.add_live(stored);
                    self.stats.evicted_bytes += u64::from(stored.len);
                    let location = CopyLocation::InTier { tier: Tier::Ram, object: stored, clean: false };
                    let evicted_at = number as u32;
                    (EntryWord::encode(location), EvictionRecord { checksum, evicted_at }.to_word())
                }
            };
            self.state.insert(page, word, second);
            self.stored.change(EntryWord::NOT_STORED, word);
            self.phases.set(page, Phase::Punching);
            self.stats.evicted += 1;
            number += 1;
            stored_pages.push(page);
        }
        self.state.eviction_count().store(number, Ordering::Relaxed);
        self.stats.incompressible += incompressible.len() as u64;
        self.incompressible_streak = match stored_pages.is_empty() {
            true => self.incompressible_streak + incompressible.len() as u32,
            false => 0,
        };
        // Sealed only now: a sealed segment without counted live objects would be freed.
        self.return_lease(lease, !rest.is_empty() && failed.is_none());
        for run in runs(incompressible) {
            self.unprotect(run);
        }
        if !stored_pages.is_empty() {
            self.clear_stuck();
            self.punch(slot, stored_pages);
        }
        if self.incompressible_streak >= INCOMPRESSIBLE_STREAK_MAX.min(self.resident) {
            self.incompressible_streak = 0;
            self.set_stuck(StuckReason::Incompressible);
        }
        match failed {
            Some(error) => {
                tracing::error!("pages to evict cannot be read, and stay in memory: {error}");
                self.cancel_eviction(slot, rest.into_iter());
                self.set_stuck(StuckReason::Memory);
            }
            None if self.is_detaching => self.cancel_eviction(slot, rest.into_iter()),
            // The segment had no room for these pages. They come first in the next segment.
            None => self.batches.slots[usize::from(slot)].pages.extend(rest.into_iter().rev()),
        }
        if self.batches.slots[usize::from(slot)].pages.is_empty() {
            self.end_batch(slot);
        }
    }

    fn on_punched(&mut self, pages: Vec<PageIndex>, failed: Option<io::Error>) {
        if let Some(error) = failed {
            // A later fault finds the pages that are still in memory.
            tracing::error!("pages cannot be removed from memory: {error}");
            self.set_stuck(StuckReason::Memory);
        }
        self.punching -= pages.len();
        for page in &pages {
            self.mark_absent(*page);
        }
        if !self.waiters.is_empty() {
            for page in pages {
                self.serve_waiter(page);
            }
        }
    }

    /// Drops copies of pages that are in memory too, instead of moving them. The pages are stored again when they are
    /// evicted.
    fn drop_clean(&mut self, skipped: Vec<(PageIndex, EntryWord)>) {
        for (page, word) in skipped {
            if self.state.word(page) == word {
                self.drop_copy(page);
            }
        }
    }

    fn on_moved(&mut self, segment: SegmentIndex, copied: Vec<CopiedObject>, lease: SegmentLease, complete: bool) {
        for CopiedObject { page, from, to } in copied {
            let Some(CopyLocation::InTier { object: stored, clean, .. }) = from.decode() else {
                continue;
            };
            if self.state.word(page) == from {
                let tier = Tier::Ram;
                let location = CopyLocation::InTier { tier, object: to, clean };
                self.set_word(page, EntryWord::encode(location));
                self.ram.add_live(to);
                self.ram.remove_live(stored);
            }
        }
        self.return_lease(lease, !complete);
        self.ram.unreserve(segment);
    }
}
