//! Fault handling: resolves missing, write-protected and minor faults.

use std::time::{Duration, Instant};

use super::{Pager, Phase, Source, Waiting};
use crate::entry::{Encoding, Location, Stored, Tier, Word, checksum};
use crate::guest::GuestMemory;
use crate::lists::Queue;
use crate::log::data_at;
use crate::units::{PAGE, PAGE_BYTES, PageIndex, PageRun};
use crate::userfaultfd::{Cause, Filled, Range};
use crate::worker::Worker;

/// Result of putting a page in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Put {
    /// The page was put in place from this source, and is in this queue.
    There(Source, Queue),
    /// The page was in memory already.
    Found,
    /// The page cannot be read back.
    Lost,
    /// The mappings are changing; see [`Filled::Changing`].
    Changing,
    /// There is no memory; see [`Filled::NoMemory`].
    NoMemory,
    /// The memory is not mapped; see [`Filled::Gone`].
    Gone,
    /// The page is being read from a disk.
    Reading,
}

/// Delay before an allocation that failed is retried.
const NO_MEMORY_FOR: Duration = Duration::from_millis(1);

/// Minimum time between two log messages about missing memory.
const LOG_AGAIN_AFTER: Duration = Duration::from_secs(600);

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    pub(super) fn fault_at(&mut self, address: u64, cause: Cause, write: bool) {
        let now = Instant::now();
        match self.page_at(address) {
            Some(page) => self.fault(page, cause, write, now),
            // The memory was unmapped after the fault, so no thread waits there.
            None => tracing::debug!("a fault at {address:#x}, where no memory is mapped"),
        }
    }

    pub(super) fn fault(&mut self, page: PageIndex, cause: Cause, write: bool, since: Instant) {
        match self.phases.get(page) {
            Phase::Absent if self.must_stall() => self.stalled.push_back((page, Waiting { since, write })),
            Phase::Absent => self.bring(page, since, write),
            Phase::Punching | Phase::Reading => {
                let waiting = self.waiting.entry(page).or_insert(Waiting { since, write });
                waiting.write |= write;
            }
            phase @ (Phase::Resident | Phase::Leaving(_)) => match cause {
                Cause::Protected => self.written(page, since),
                Cause::Missing => self.taken_out(page, since, write),
                Cause::Minor => {
                    self.stays_unprotected(page, phase);
                    self.guest.map(page);
                }
            },
        }
    }

    /// Handles a write to the protected `page`.
    fn written(&mut self, page: PageIndex, since: Instant) {
        self.drop_copy(page);
        if matches!(self.phases.get(page), Phase::Leaving(_)) {
            self.figures.saved += 1;
            self.settle(page, Queue::Working);
            self.let_write.push((page, self.now));
        }
        if self.guest.unprotect(PageRun::one(page)).is_err() {
            // The mappings are changing. The thread faults again.
            self.guest.wake(PageRun::one(page));
        }
        self.figures.writes.add(since.elapsed());
    }

    /// Handles a missing fault on a page that should be in memory. Either another process has removed the page from
    /// the file, so that it reads as zeros, or the page was put in place after the fault.
    fn taken_out(&mut self, page: PageIndex, since: Instant, write: bool) {
        let mut is_there = false;
        let looked = self.guest.present(PageRun::one(page), &mut |_| is_there = true);
        if looked.is_ok() && is_there {
            self.guest.wake(PageRun::one(page));
            return;
        }
        self.drop_copy(page);
        self.vanish(page);
        self.bring(page, since, write);
    }

    /// Pages in an absent page for a thread that has waited since `since`.
    pub(super) fn bring(&mut self, page: PageIndex, since: Instant, write: bool) {
        let put = self.put_in_place(page, write);
        self.answer(page, put, since, write);
        match put {
            _ if !self.options.prefetch => {}
            Put::There(Source::Disk, _) | Put::Reading => self.follow(page),
            // A stream of writes would wait at each page for its write-protection to be lifted.
            Put::There(Source::Ram, _) if !write => self.follow(page),
            Put::There(Source::Zero, _) => self.follow_zero(page),
            _ => {}
        }
    }

    /// Finishes a fault that has waited since `since`, according to what was done with its page.
    pub(super) fn answer(&mut self, page: PageIndex, put: Put, since: Instant, write: bool) {
        match put {
            Put::There(source, queue) => {
                if queue == Queue::Working {
                    self.figures.refaults += 1;
                }
                // Uniform pages have no eviction timestamp.
                if matches!(source, Source::Ram | Source::Disk) {
                    self.figures.returned_after(self.evicted_since(page));
                }
                self.figures.brought(source, since.elapsed());
            }
            // The thread faults again after the messages about mappings have been read.
            Put::Changing => self.guest.wake(PageRun::one(page)),
            Put::NoMemory => self.stalled.push_back((page, Waiting { since, write })),
            Put::Reading => {
                self.waiting.insert(page, Waiting { since, write });
            }
            Put::Found | Put::Lost | Put::Gone => {}
        }
    }

    /// Puts an absent page in place. `write` is set if the waiting thread wants to write.
    pub(super) fn put_in_place(&mut self, page: PageIndex, write: bool) -> Put {
        let word = self.state.word(page);
        let (source, queue, filled) = match word.decode() {
            Some(Location::Nowhere) => (Source::Zero, Queue::Probation, self.guest.fill_zero(page)),
            // The page was given up after it was lost.
            Some(Location::Lost) if word.is_clean() => (Source::Zero, Queue::Probation, self.guest.fill_zero(page)),
            Some(Location::Uniform { .. }) => {
                self.load_uniform(page);
                let filled = match self.state.second_word(page) {
                    0 => self.guest.fill_zero(page),
                    _ => self.guest.fill(page, &*self.content, false).1,
                };
                (Source::Uniform, Queue::Probation, filled)
            }
            Some(Location::In {
                tier: Tier::Ram,
                stored,
                ..
            }) if self.load_from_ram(page, stored) => {
                let queue = self.queue_of_returned(page);
                (Source::Ram, queue, self.guest.fill(page, &*self.content, false).1)
            }
            Some(Location::In { tier, stored, .. }) if let Some(disk) = self.disks.index_of(tier) => {
                if let Some(content) = self.streams.take(page, word)
                    && checksum(page, &content) == self.state.proof(page).checksum
                {
                    self.content = content;
                    return self.fill_from_disk(page, word, write);
                }
                self.begin_read(page, word, stored, disk);
                return Put::Reading;
            }
            _ => {
                self.lose(page, word, "its stored copy is damaged");
                return Put::Lost;
            }
        };
        if filled == Filled::Done {
            self.drop_copy(page);
        }
        self.was_filled(page, filled, queue, source)
    }

    /// Puts a page in place that was read from a disk to `content`. Unless `write` is set, the page is
    /// write-protected, and its copy stays valid for the next eviction.
    pub(super) fn fill_from_disk(&mut self, page: PageIndex, word: Word, write: bool) -> Put {
        let queue = self.queue_of_returned(page);
        let write = write || self.are_evictions_paused;
        if !write {
            // The entry is set to *clean* before the page is put in place. So a page that is in memory without that
            // bit was never put in place write-protected and then given up.
            self.set_word(page, word.with_clean(true));
        }
        let filled = self.guest.fill(page, &*self.content, !write).1;
        match filled {
            Filled::Done if write => self.drop_copy(page),
            Filled::Done | Filled::Present => {}
            Filled::Changing | Filled::NoMemory | Filled::Gone => self.set_word(page, word),
        }
        self.was_filled(page, filled, queue, Source::Disk)
    }

    /// Updates the state of a page after an attempt to put it in place.
    fn was_filled(&mut self, page: PageIndex, filled: Filled, queue: Queue, source: Source) -> Put {
        match filled {
            Filled::Done => {
                self.settle(page, queue);
                Put::There(source, queue)
            }
            Filled::Present if source == Source::Zero => self.was_there(page, queue),
            Filled::Present => {
                let copy = *self.content;
                self.found_in_memory(page, &copy, queue, source)
            }
            Filled::Changing => Put::Changing,
            Filled::NoMemory => self.is_without_memory(),
            Filled::Gone => Put::Gone,
        }
    }

    /// Handles an evicted page that is in memory already. Only the pager fills pages, so another process has touched
    /// the memory's file. A read there allocates a page of zeros, which is not the guest's content: the stored copy
    /// replaces it. A kill before that is done leaves the page missing, with a valid copy.
    pub(super) fn found_in_memory(&mut self, page: PageIndex, copy: &[u8; PAGE], queue: Queue, source: Source) -> Put {
        let word = self.state.word(page).with_clean(false);
        self.set_word(page, word);
        let mut found = [0; PAGE];
        let is_read = self.guest.read(page, &mut found).is_ok();
        if is_read && found == *copy {
            return self.was_there(page, queue);
        }
        if !is_read || found != [0; PAGE] {
            self.report_found(page, "with other content, which replaces its stored copy");
            return self.was_there(page, queue);
        }
        self.report_found(page, "filled with zeros, which its stored copy replaces");
        if let Err(error) = self.guest.take_out(PageRun::one(page)) {
            tracing::error!("its stored copy cannot be restored now: {error}");
            return Put::Changing;
        }
        match self.guest.fill(page, copy, false).1 {
            Filled::Done => {
                self.drop_copy(page);
                self.settle(page, queue);
                Put::There(source, queue)
            }
            // The other process has touched the page again.
            Filled::Present | Filled::Changing => Put::Changing,
            Filled::NoMemory => self.is_without_memory(),
            Filled::Gone => Put::Gone,
        }
    }

    /// Counts such pages, and logs the first one, the second, the fourth and so on.
    fn report_found(&mut self, page: PageIndex, what: &str) {
        self.figures.touched_by_others += 1;
        let count = self.figures.touched_by_others;
        if count.is_power_of_two() {
            let address = self.address_of(page);
            tracing::error!(
                "page {:#x} (at {address:#x} of the process) was evicted, but found in memory, {what}; another process uses the \
                 file of this memory, which is not allowed while it is managed ({count} such pages so far)",
                page.get()
            );
        }
    }

    /// Handles `page`, which was to be put in place, and is in memory already. The content in memory is newer than
    /// the copy.
    pub(super) fn was_there(&mut self, page: PageIndex, queue: Queue) -> Put {
        self.figures.found += 1;
        self.drop_copy(page);
        self.settle(page, queue);
        // The page may still be protected, and the waiting thread has not been woken.
        if self.guest.unprotect(PageRun::one(page)).is_err() {
            tracing::debug!(?page, "cannot be unprotected now");
        }
        // The page may not be mapped.
        self.guest.map(page);
        Put::Found
    }

    /// Handles a failed allocation of a page.
    pub(super) fn is_without_memory(&mut self) -> Put {
        let was_logged = |at: Instant| self.now - at < LOG_AGAIN_AFTER;
        if !self.no_memory_logged.is_some_and(was_logged) {
            self.no_memory_logged = Some(self.now);
            tracing::warn!(
                "there is no free memory for a page that is paged in (of the host, a control group, or the tmpfs of the memory's \
                 file): threads that need the page wait; the allocation is retried, and this is logged at most every {} minutes",
                LOG_AGAIN_AFTER.as_secs() / 60
            );
        }
        self.no_memory_until = Some(self.now + NO_MEMORY_FOR);
        Put::NoMemory
    }

    /// Fills `content` with the repeated word of the uniform `page`.
    pub(super) fn load_uniform(&mut self, page: PageIndex) {
        let bytes = self.state.second_word(page).to_le_bytes();
        self.content.as_chunks_mut::<8>().0.fill(bytes);
    }

    /// Reads a page from compressed RAM to `content`, and returns true if its checksum is right.
    pub(super) fn load_from_ram(&mut self, page: PageIndex, stored: Stored) -> bool {
        let (at, len) = (data_at(stored.place), usize::from(stored.len));
        if at + len as u64 > self.compressed.len() as u64 {
            return false;
        }
        let at = self.compressed.at(at as usize, len);
        // SAFETY: the range is in the mapping, and is a live object, which no thread writes to.
        let data = unsafe { std::slice::from_raw_parts(at.as_ptr(), len) };
        self.decode(page, stored, data)
    }

    /// Decodes `data`, which is encoded as `stored` says, to `content`. Returns true if it has the checksum of
    /// `page`.
    pub(super) fn decode(&mut self, page: PageIndex, stored: Stored, data: &[u8]) -> bool {
        let is_read = match stored.encoding {
            Encoding::Raw => match <&[u8; PAGE]>::try_from(data) {
                Ok(data) => {
                    *self.content = *data;
                    true
                }
                Err(_) => false,
            },
            Encoding::Codec(codec) => self.decoder.decode(codec, data, &mut self.content).is_ok(),
        };
        is_read && checksum(page, &self.content) == self.state.proof(page).checksum
    }

    /// Marks `page` as lost, since its copy is unusable. A thread that touches the page gets a memory error.
    pub(super) fn lose(&mut self, page: PageIndex, word: Word, why: &str) {
        // If the page is in memory after all (its removal may have failed), nothing is lost.
        let mut is_there = false;
        let looked = self.guest.present(PageRun::one(page), &mut |_| is_there = true);
        if looked.is_ok() && is_there {
            self.was_there(page, Queue::Probation);
            return;
        }
        let lost = Word::of(Location::Lost);
        if word != lost {
            let address = self.address_of(page);
            tracing::error!(
                "page {:#x} (at {address:#x} of the process) is lost, because {why}: a thread that touches it gets a memory error",
                page.get()
            );
            self.forget_copy(word);
            self.set_word(page, lost);
            self.figures.lost += 1;
        }
        match self.guest.poison(page) {
            Filled::Done | Filled::Present => self.guest.wake(PageRun::one(page)),
            // The waiting thread faults again. If none waits, a detach retries.
            Filled::Changing | Filled::NoMemory => {
                self.is_unmarked = true;
                self.guest.wake(PageRun::one(page));
            }
            Filled::Gone => tracing::error!(
                "page {:#x} cannot be poisoned: threads that wait for it keep waiting",
                page.get()
            ),
        }
    }

    fn address_of(&self, page: PageIndex) -> u64 {
        let region = self.regions.iter().find(|region| region.contains(page));
        region.map_or(0, |region| region.address_of(page))
    }

    /// Returns the queue for a page that was evicted: `Working` if twice the resident memory would have kept it.
    pub(super) fn queue_of_returned(&self, page: PageIndex) -> Queue {
        match self.evicted_since(page) < self.present {
            true => Queue::Working,
            false => Queue::Probation,
        }
    }

    /// Returns the number of pages evicted since `page` was.
    fn evicted_since(&self, page: PageIndex) -> u32 {
        let evicted = self.state.evicted().load(std::sync::atomic::Ordering::Relaxed) as u32;
        evicted.wrapping_sub(self.state.proof(page).evicted_at)
    }

    /// Invalidates the copy of `page`.
    pub(super) fn drop_copy(&mut self, page: PageIndex) {
        let word = self.state.word(page);
        if word != Word::NOWHERE {
            self.set_word(page, Word::NOWHERE);
            self.forget_copy(word);
        }
    }

    /// Marks the object that `word` points to as dead.
    pub(super) fn forget_copy(&mut self, word: Word) {
        let Some(Location::In { tier, stored, .. }) = word.decode() else {
            return;
        };
        match (tier, self.disks.index_of(tier)) {
            (Tier::Ram, _) => self.ram.remove(stored),
            (Tier::Ssd | Tier::Slow, Some(disk)) => self.disks.all[disk].log.remove(stored),
            (Tier::Ssd | Tier::Slow, None) => {}
        }
    }

    /// Handles a range of memory that the process has given up or unmapped.
    pub(super) fn removed(&mut self, range: Range, unmapped: bool) {
        for index in 0..self.regions.len() {
            let region = self.regions[index];
            let start = range.start.max(region.address);
            let end = range.end().min(region.address + region.bytes());
            if start >= end {
                continue;
            }
            let Some(first) = region.page_at(start) else { continue };
            let run = PageRun {
                first,
                count: ((end - start) / PAGE_BYTES) as u32,
            };
            if unmapped {
                self.unmapped(run);
            } else if run.count > 0 {
                self.given_up(run);
            }
        }
    }

    /// Drops these pages, in memory and in tiers. A page that is in memory was put there between the hole and its
    /// message (by a fault of another thread, or by prefetching), or the hole is yet to be punched (`MADV_REMOVE`).
    fn given_up(&mut self, run: PageRun) {
        for page in run.pages() {
            let was_there = matches!(self.phases.get(page), Phase::Resident | Phase::Leaving(_));
            if was_there || self.state.word(page) != Word::NOWHERE {
                self.figures.removed += 1;
            }
            if self.state.word(page).decode() == Some(Location::Lost) {
                // The poison marker in the page table survives the give-up. The page is cleared later, by this pager
                // or its successor.
                self.set_word(page, Word::of(Location::Lost).with_clean(true));
                self.to_clear.push(page);
                continue;
            }
            self.drop_copy(page);
            // Pages that the worker is removing are handled when it reports them.
            if self.phases.get(page) != Phase::Punching {
                self.vanish(page);
            }
        }
        let mut there: Vec<PageRun> = Vec::new();
        let looked = self.guest.present(run, &mut |found| there.push(found));
        let gone = looked.and_then(|()| there.into_iter().try_for_each(|found| self.guest.take_out(found)));
        if let Err(error) = gone {
            tracing::warn!("discarded pages cannot be removed from memory: {error}");
        }
    }

    /// Puts zeros in place of pages that were lost and then given up. Returns true if there was one.
    pub(super) fn clear_lost(&mut self) -> bool {
        let mut worked = false;
        for page in std::mem::take(&mut self.to_clear) {
            if self.state.word(page).decode() != Some(Location::Lost) {
                continue;
            }
            match self.guest.fill_zero(page) {
                Filled::Done => {
                    self.drop_copy(page);
                    self.settle(page, Queue::Probation);
                    worked = true;
                }
                Filled::Changing | Filled::NoMemory => self.to_clear.push(page),
                Filled::Present | Filled::Gone => {}
            }
        }
        worked
    }

    /// Drops the copy of a page that is about to be mapped without write-protection, and cancels its eviction.
    fn stays_unprotected(&mut self, page: PageIndex, phase: Phase) {
        self.drop_copy(page);
        if matches!(phase, Phase::Leaving(_)) {
            self.settle(page, Queue::Working);
            // A thread that waits to write to the page can continue.
            if self.guest.unprotect(PageRun::one(page)).is_err() {
                self.guest.wake(PageRun::one(page));
            }
        }
    }

    /// Forgets pages that the process has unmapped. Their memory belongs to the file now, and the process that
    /// unmapped them is responsible for it.
    fn unmapped(&mut self, run: PageRun) {
        for page in run.pages() {
            self.drop_copy(page);
            if self.phases.get(page) != Phase::Punching {
                self.vanish(page);
            }
        }
        if let Some(region) = self.regions.iter_mut().find(|region| region.first == run.first)
            && region.pages == run.count
        {
            self.state.forget_region(region.first);
            region.address = 0;
            let region = *region;
            self.guest.forget(&region);
        }
    }

    /// Serves the thread that has waited until `page` was removed from memory or read.
    pub(super) fn answer_waiting(&mut self, page: PageIndex) {
        let Some(Waiting { since, write }) = self.waiting.remove(&page) else {
            return;
        };
        match self.phases.get(page) {
            Phase::Absent => self.bring(page, since, write),
            // The page was paged in by another fault since then, or is being read.
            _ => self.fault(page, Cause::Missing, write, since),
        }
    }
}
