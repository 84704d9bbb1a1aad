//! Eviction of pages.

use std::io;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::{Pager, Phase, Stuck};
use crate::entry::{Location, Proof, Tier, Word};
use crate::guest::GuestMemory;
use crate::lists::Queue;
use crate::log::SegmentIndex;
use crate::units::{PageIndex, PageRun, runs};
use crate::worker::{BatchIndex, Copied, Done, Job, Lease, Outcome, Worker};

/// Maximum number of pages in one store job. The worker reports at least this often.
const STORE_PAGES: usize = 64;
/// Delay before write-protection that failed is retried.
const NO_EVICTION_FOR: Duration = Duration::from_millis(10);
/// Minimum time that a page stays unprotected after a writer has faulted on it. Longer than a thread takes to wake
/// up.
const LET_WRITE_FOR: Duration = Duration::from_millis(1);
/// Number of consecutive incompressible pages after which eviction pauses.
const KEPT_MAX: u32 = 4096;
/// Minimum number of segments of compressed RAM if there is a disk.
const SEGMENTS_MIN: u32 = 6;
/// Minimum size of compressed RAM if there is a disk, in bytes.
pub const COMPRESSED_BYTES_MIN: u64 = SEGMENTS_MIN as u64 * crate::log::SEGMENT as u64;
/// Maximum number of concurrent batches.
const BATCHES: usize = 64;

/// Pages that were write-protected together.
#[derive(Default)]
struct Batch {
    /// Pages that the worker has not received yet, in falling order.
    pages: Vec<PageIndex>,
    /// Time at which the pages were write-protected.
    protected_at: Option<Instant>,
    /// Result of [`GuestMemory::io_mark`] at that time.
    io_mark: u64,
    /// The worker is storing pages of this batch.
    is_stored: bool,
}

/// Batches whose eviction is in progress.
pub(super) struct Batches {
    slots: Vec<Batch>,
    /// Batches in the order in which they are stored.
    order: std::collections::VecDeque<u8>,
    free: Vec<u8>,
    /// Number of pages in all batches that have not been stored.
    leaving: usize,
}

impl Default for Batches {
    fn default() -> Self {
        Self {
            slots: std::iter::repeat_with(Batch::default).take(BATCHES).collect(),
            order: std::collections::VecDeque::new(),
            free: (0..BATCHES as u8).rev().collect(),
            leaving: 0,
        }
    }
}

impl Batches {
    /// Returns the number of pages whose eviction is in progress.
    pub(super) fn leaving(&self) -> usize {
        self.leaving
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
        let mut pages: Vec<PageIndex> = std::iter::from_fn(|| self.lists.pop()).take(count).collect();
        // A thread whose page was unprotected gets the time to write before the page is evicted again.
        self.let_write
            .retain(|(_, since)| now.saturating_duration_since(*since) < LET_WRITE_FOR);
        let let_write: Vec<PageIndex> = pages.extract_if(.., |page| self.is_let_write(*page)).collect();
        for page in let_write {
            self.lists.push(Queue::Working, page);
        }
        pages.sort_unstable();
        let clean = pages.extract_if(.., |page| self.state.word(*page).is_clean());
        let clean: Vec<PageIndex> = clean.collect();
        let gone = clean.len();
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
                    self.phases.set(page, Phase::Leaving(slot));
                    protected.push(page);
                } else {
                    self.lists.push(Queue::Working, page);
                }
            }
        }
        if let Some(error) = failed {
            tracing::debug!("pages cannot be write-protected now: {error}");
            self.no_eviction_until = Some(now + NO_EVICTION_FOR);
        }
        let count = protected.len();
        if count == 0 {
            self.batches.free.push(slot);
            return gone;
        }
        protected.reverse();
        self.batches.leaving += count;
        self.batches.slots[usize::from(slot)] = Batch {
            pages: protected,
            protected_at: Some(now),
            io_mark: self.guest.io_mark(),
            is_stored: false,
        };
        self.batches.order.push_back(slot);
        count + gone
    }

    fn is_let_write(&self, page: PageIndex) -> bool {
        self.let_write.iter().any(|(of, _)| *of == page)
    }

    /// Evicts pages that are write-protected and equal to their copies in a tier.
    fn evict_clean(&mut self, slot: u8, pages: Vec<PageIndex>) {
        if pages.is_empty() {
            return;
        }
        let mut number = self.state.evicted().load(Ordering::Relaxed);
        for page in &pages {
            let word = self.state.word(*page);
            let checksum = self.state.proof(*page).checksum;
            let evicted_at = number as u32;
            self.state.set_evicted_at(*page, Proof { checksum, evicted_at });
            self.set_word(*page, word.with_clean(false));
            self.phases.set(*page, Phase::Punching);
            number += 1;
        }
        self.state.evicted().store(number, Ordering::Relaxed);
        self.figures.evicted += pages.len() as u64;
        self.figures.evicted_clean += pages.len() as u64;
        self.is_stuck_no_more();
        self.punch(slot, pages);
    }

    fn punch(&mut self, slot: u8, pages: Vec<PageIndex>) {
        self.punching += pages.len();
        self.give(Job::Punch {
            batch: BatchIndex(slot),
            pages,
        });
    }

    /// Returns the time at which the quarantine of the next batch ends. `None` if there is no batch, or while the
    /// worker has the lease.
    fn next_due(&self) -> Option<Instant> {
        let at = self.batches.next()?.protected_at?;
        (!self.lease_is_out).then(|| at + self.options.quarantine)
    }

    /// Returns true if the next pages can be stored, because no device writes to them any more.
    fn is_due(&self, now: Instant) -> bool {
        self.next_due().is_some_and(|due| due <= now)
            && self
                .batches
                .next()
                .is_some_and(|batch| self.guest.io_has_ended(batch.io_mark))
    }

    /// Returns true if evicted pages wait for the end of device I/O, which the pager cannot stop. The time at which
    /// memory becomes free is then unknown.
    pub(super) fn has_quarantine(&self) -> bool {
        !self.options.quarantine.is_zero() || self.guest.has_device_io()
    }

    /// Returns the time of the next turn that is due without an event.
    pub fn next_turn(&self) -> Option<Instant> {
        self.next_due().into_iter().chain(self.next_read_again()).min()
    }

    /// Passes pages whose quarantine has ended to the worker. Returns true if there were any.
    pub(super) fn go_on_storing(&mut self, now: Instant) -> bool {
        // Checked for each batch: after the last page of one, the next may still be in quarantine.
        while self.is_due(now)
            && let Some(slot) = self.batches.order.front().copied()
        {
            let batch = &mut self.batches.slots[usize::from(slot)];
            let mut pages = Vec::with_capacity(STORE_PAGES);
            let mut gone = 0;
            while pages.len() < STORE_PAGES
                && let Some(page) = batch.pages.pop()
            {
                // Pages that have been written to or given up are not being evicted any more.
                match self.phases.get(page) {
                    Phase::Leaving(of) if of == slot => pages.push(page),
                    _ => gone += 1,
                }
            }
            self.batches.leaving -= gone;
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
                self.stay(slot, pages.iter().copied());
                self.stay_all();
                self.is_stuck(self.why_full());
                return true;
            };
            self.batches.slots[usize::from(slot)].is_stored = true;
            self.give(Job::Store {
                batch: BatchIndex(slot),
                pages,
                lease,
                raw: !self.disks.all.is_empty(),
            });
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
    pub(super) fn take_lease(&mut self) -> Option<Lease> {
        if self.lease.is_none() && self.ram.used() < self.segments_max() {
            self.lease = self.new_segment();
        }
        let lease = self.lease.take()?;
        self.lease_is_out = true;
        Some(lease)
    }

    /// Returns true if [`Self::take_lease`] would return a lease.
    pub(super) fn has_room_in_ram(&self) -> bool {
        self.lease.is_some() || self.ram.used() < self.segments_max()
    }

    /// Takes a lease for moving the live objects of another segment. This may exceed the limit by one segment, since
    /// the other segment becomes free.
    pub(super) fn take_lease_to_compact(&mut self) -> Option<Lease> {
        if self.lease.is_none() && self.ram.used() <= self.segments_max() {
            self.lease = self.new_segment();
        }
        self.take_lease()
    }

    fn new_segment(&mut self) -> Option<Lease> {
        let (segment, filling) = self.ram.take()?;
        Some(Lease {
            segment,
            from: 0,
            filling,
        })
    }

    /// Returns the maximum number of segments of compressed RAM. With a disk there are always a few, since pages pass
    /// through them.
    pub(super) fn segments_max(&self) -> u32 {
        let max = u32::try_from(self.options.compressed_bytes / crate::log::SEGMENT as u64).unwrap_or(u32::MAX);
        match self.disks.all.is_empty() {
            true => max,
            false => max.max(SEGMENTS_MIN),
        }
    }

    /// Takes the lease back from the worker. With `is_full` the segment is sealed.
    fn return_lease(&mut self, lease: Lease, is_full: bool) {
        self.lease_is_out = false;
        if is_full {
            self.ram.seal(lease.segment);
        } else {
            self.lease = Some(lease);
        }
    }

    /// Cancels the eviction of pages of a batch.
    fn stay(&mut self, slot: u8, pages: impl Iterator<Item = PageIndex>) {
        let mut staying: Vec<PageIndex> = Vec::new();
        for page in pages {
            self.batches.leaving -= 1;
            if self.phases.get(page) == Phase::Leaving(slot) {
                self.settle(page, Queue::Working);
                staying.push(page);
            }
        }
        for run in runs(staying) {
            self.unprotect(run);
        }
    }

    /// Cancels all evictions, except those of pages that the worker has.
    pub(super) fn stay_all(&mut self) {
        for slot in self.batches.order.clone() {
            let mut pages = std::mem::take(&mut self.batches.slots[usize::from(slot)].pages);
            pages.reverse();
            self.stay(slot, pages.into_iter());
        }
    }

    /// Removes the write-protection of `run`. If that is not possible now, the first write faults and retries it.
    fn unprotect(&self, run: PageRun) {
        if self.guest.unprotect(run).is_err() {
            self.guest.wake(run);
        }
    }

    /// Handles a job that the worker has done.
    pub(super) fn done(&mut self, done: Done) {
        self.jobs -= 1;
        match done {
            Done::Stored {
                batch,
                pages,
                outcomes,
                lease,
                failed,
            } => self.stored(batch, pages, outcomes, lease, failed),
            Done::Punched { pages, failed, .. } => self.punched(pages, failed),
            Done::Moved {
                segment,
                copied,
                left_out,
                lease,
                complete,
            } => {
                self.drop_clean(left_out);
                self.moved(segment, copied, lease, complete);
            }
            Done::Demoted {
                origin,
                next_at,
                copied,
                left_out,
                into,
                is_full,
            } => {
                self.drop_clean(left_out);
                self.demoted(origin, next_at, copied, into, is_full);
            }
            Done::Released(segment) => self.ram.cooled(segment),
        }
    }

    fn stored(
        &mut self,
        BatchIndex(slot): BatchIndex,
        mut pages: Vec<PageIndex>,
        outcomes: Vec<Outcome>,
        lease: Lease,
        failed: Option<io::Error>,
    ) {
        let rest = pages.split_off(outcomes.len());
        self.batches.leaving -= pages.len();
        let mut number = self.state.evicted().load(Ordering::Relaxed);
        let mut going = Vec::with_capacity(pages.len());
        let mut kept = Vec::new();
        for (page, outcome) in pages.into_iter().zip(outcomes) {
            if self.phases.get(page) != Phase::Leaving(slot) {
                continue;
            }
            let (word, second) = match outcome {
                Outcome::Kept => {
                    kept.push(page);
                    self.settle(page, Queue::Working);
                    continue;
                }
                Outcome::Uniform(word) => {
                    self.figures.evicted_uniform += 1;
                    (Word::of(Location::Uniform { clean: false }), word)
                }
                Outcome::Stored(stored, checksum) => {
                    self.ram.add(stored);
                    self.figures.evicted_bytes += u64::from(stored.len);
                    let location = Location::In {
                        tier: Tier::Ram,
                        stored,
                        clean: false,
                    };
                    let evicted_at = number as u32;
                    (Word::of(location), Proof { checksum, evicted_at }.word())
                }
            };
            self.state.store(page, word, second);
            self.stored.change(Word::NOWHERE, word);
            self.phases.set(page, Phase::Punching);
            self.figures.evicted += 1;
            number += 1;
            going.push(page);
        }
        self.state.evicted().store(number, Ordering::Relaxed);
        self.figures.kept += kept.len() as u64;
        self.kept_in_row = match going.is_empty() {
            true => self.kept_in_row + kept.len() as u32,
            false => 0,
        };
        // Sealed only now: a sealed segment without counted live objects would be freed.
        self.return_lease(lease, !rest.is_empty() && failed.is_none());
        for run in runs(kept) {
            self.unprotect(run);
        }
        if !going.is_empty() {
            self.is_stuck_no_more();
            self.punch(slot, going);
        }
        if self.kept_in_row >= KEPT_MAX.min(self.present) {
            self.kept_in_row = 0;
            self.is_stuck(Stuck::Incompressible);
        }
        match failed {
            Some(error) => {
                tracing::error!("pages to evict cannot be read, and stay in memory: {error}");
                self.stay(slot, rest.into_iter());
                self.is_stuck(Stuck::Memory);
            }
            None if self.is_leaving => self.stay(slot, rest.into_iter()),
            // The segment had no room for these pages. They come first in the next segment.
            None => self.batches.slots[usize::from(slot)]
                .pages
                .extend(rest.into_iter().rev()),
        }
        if self.batches.slots[usize::from(slot)].pages.is_empty() {
            self.end_batch(slot);
        }
    }

    fn punched(&mut self, pages: Vec<PageIndex>, failed: Option<io::Error>) {
        if let Some(error) = failed {
            // A later fault finds the pages that are still in memory.
            tracing::error!("pages cannot be removed from memory: {error}");
            self.is_stuck(Stuck::Memory);
        }
        self.punching -= pages.len();
        for page in &pages {
            self.vanish(*page);
        }
        if !self.waiting.is_empty() {
            for page in pages {
                self.answer_waiting(page);
            }
        }
    }

    /// Drops copies of pages that are in memory too, instead of moving them. The pages are stored again when they are
    /// evicted.
    fn drop_clean(&mut self, left_out: Vec<(PageIndex, Word)>) {
        for (page, word) in left_out {
            if self.state.word(page) == word {
                self.drop_copy(page);
            }
        }
    }

    fn moved(&mut self, segment: SegmentIndex, copied: Vec<Copied>, lease: Lease, complete: bool) {
        for Copied { page, from, to } in copied {
            let Some(Location::In { stored, clean, .. }) = from.decode() else {
                continue;
            };
            if self.state.word(page) == from {
                let tier = Tier::Ram;
                let stored_there = Location::In {
                    tier,
                    stored: to,
                    clean,
                };
                self.set_word(page, Word::of(stored_there));
                self.ram.add(to);
                self.ram.remove(stored);
            }
        }
        self.return_lease(lease, !complete);
        self.ram.left(segment);
    }
}
