//! Sending pages away.

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

/// How many pages are stored by one job: the worker is told so often.
const STORE_PAGES: usize = 64;
/// After so long it is tried again to stop writes.
const NO_EVICTION_FOR: Duration = Duration::from_millis(10);
/// A page of which the protection was lifted for somebody stays so long at least: longer than a thread takes to wake up.
const LET_WRITE_FOR: Duration = Duration::from_millis(1);
/// After so many pages in a row that cannot be compressed no more are tried for a while.
const KEPT_MAX: u32 = 4096;
/// With a disk compressed RAM has at least so many segments.
const SEGMENTS_MIN: u32 = 6;
/// The same in bytes.
pub const COMPRESSED_BYTES_MIN: u64 = SEGMENTS_MIN as u64 * crate::log::SEGMENT as u64;
/// How many evictions there are at a time.
const BATCHES: usize = 64;

/// Pages that were write-protected together.
#[derive(Default)]
struct Batch {
    /// Those that were not given to the worker yet, in falling order.
    pages: Vec<PageIndex>,
    /// When writes to them were stopped.
    protected_at: Option<Instant>,
    /// See [`GuestMemory::io_has_ended`].
    io_mark: u64,
    /// Pages of it that the worker stores.
    is_stored: bool,
}

/// The evictions under way.
pub(super) struct Batches {
    slots: Vec<Batch>,
    /// Those in the order in which they are to be stored.
    order: std::collections::VecDeque<u8>,
    free: Vec<u8>,
    /// Pages in all of them that have not been stored.
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
    /// Pages on their way.
    pub(super) fn leaving(&self) -> usize {
        self.leaving
    }

    pub(super) fn is_full(&self) -> bool {
        self.free.is_empty()
    }

    /// The one that is to be stored next.
    fn next(&self) -> Option<&Batch> {
        Some(&self.slots[usize::from(*self.order.front()?)])
    }
}

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    /// Has up to `count` pages go; how many. Those of which a disk has a copy go at once, to the others writes are
    /// stopped.
    pub(super) fn begin_eviction(&mut self, count: usize, now: Instant) -> usize {
        let Some(slot) = self.batches.free.pop() else { return 0 };
        let mut pages: Vec<PageIndex> = std::iter::from_fn(|| self.lists.pop()).take(count).collect();
        // Who was let write to a page gets to do so before it goes again.
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
            tracing::debug!("writes cannot be stopped now: {error}");
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

    /// Pages that are write-protected and equal to their copies on a disk.
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

    /// When the next pages come out of their quarantine, unless the worker is at others.
    fn next_due(&self) -> Option<Instant> {
        let at = self.batches.next()?.protected_at?;
        (!self.lease_is_out).then(|| at + self.options.quarantine)
    }

    /// Whether the next pages may be stored: nothing writes to them any more.
    fn is_due(&self, now: Instant) -> bool {
        self.next_due().is_some_and(|due| due <= now)
            && self
                .batches
                .next()
                .is_some_and(|batch| self.guest.io_has_ended(batch.io_mark))
    }

    /// Whether pages that are to go wait until writes have ended that nobody can stop, so that there is no telling when
    /// there is room again.
    pub(super) fn has_quarantine(&self) -> bool {
        !self.options.quarantine.is_zero() || self.guest.has_device_io()
    }

    /// When there is something to do though nothing happens.
    pub fn next_turn(&self) -> Option<Instant> {
        self.next_due().into_iter().chain(self.next_read_again()).min()
    }

    /// Has the worker store what has waited long enough; whether there was anything.
    pub(super) fn go_on_storing(&mut self, now: Instant) -> bool {
        // Asked of each: when nothing is left of one eviction, the next one may still be in its quarantine.
        while self.is_due(now)
            && let Some(slot) = self.batches.order.front().copied()
        {
            let batch = &mut self.batches.slots[usize::from(slot)];
            let mut pages = Vec::with_capacity(STORE_PAGES);
            let mut gone = 0;
            while pages.len() < STORE_PAGES
                && let Some(page) = batch.pages.pop()
            {
                // Those that were written to meanwhile, or given up, are not leaving any more.
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

    /// The segment to fill, for the worker.
    pub(super) fn take_lease(&mut self) -> Option<Lease> {
        if self.lease.is_none() && self.ram.used() < self.segments_max() {
            self.lease = self.new_segment();
        }
        let lease = self.lease.take()?;
        self.lease_is_out = true;
        Some(lease)
    }

    /// Whether [`Self::take_lease`] would have one.
    pub(super) fn has_room_in_ram(&self) -> bool {
        self.lease.is_some() || self.ram.used() < self.segments_max()
    }

    /// The same, to move what lives of another segment there. There may be one segment too many for that: the other one
    /// is free in the end.
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

    /// How many segments compressed RAM may have. What goes to a disk passes through a few.
    pub(super) fn segments_max(&self) -> u32 {
        let max = u32::try_from(self.options.compressed_bytes / crate::log::SEGMENT as u64).unwrap_or(u32::MAX);
        match self.disks.all.is_empty() {
            true => max,
            false => max.max(SEGMENTS_MIN),
        }
    }

    /// The lease is back. It is of no use any more if `is_full`.
    fn return_lease(&mut self, lease: Lease, is_full: bool) {
        self.lease_is_out = false;
        if is_full {
            self.ram.seal(lease.segment);
        } else {
            self.lease = Some(lease);
        }
    }

    /// Pages stay after all.
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

    /// All that leaves stays, but for what the worker has.
    pub(super) fn stay_all(&mut self) {
        for slot in self.batches.order.clone() {
            let mut pages = std::mem::take(&mut self.batches.slots[usize::from(slot)].pages);
            pages.reverse();
            self.stay(slot, pages.into_iter());
        }
    }

    /// Writes are free again. Where that cannot be said now, the first write asks for it.
    fn unprotect(&self, run: PageRun) {
        if self.guest.unprotect(run).is_err() {
            self.guest.wake(run);
        }
    }

    /// What the worker has done.
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
        // Not before what was put there counts: a full segment in which nothing lives is free.
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
                tracing::error!("pages to evict cannot be read, and stay: {error}");
                self.stay(slot, rest.into_iter());
                self.is_stuck(Stuck::Memory);
            }
            None if self.is_leaving => self.stay(slot, rest.into_iter()),
            // There was no room for them. They come first in the next segment.
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
            // Those that are still there are found when they are touched.
            tracing::error!("pages cannot be taken out of memory: {error}");
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

    /// Copies of pages that are in memory too are not moved: the pages come down again when they go.
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
