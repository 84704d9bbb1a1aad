//! Fault handling: resolves missing, write-protected and minor faults.

use std::time::{Duration, Instant};

use super::{PageSource, PageWaiter, Pager, Phase};
use crate::entry::{CopyLocation, EntryWord, PageEncoding, StoredObject, Tier, checksum};
use crate::guest::GuestMemory;
use crate::resident_queues::ResidentQueue;
use crate::segment_log::data_at;
use crate::units::{PAGE, PAGE_BYTES, PageIndex, PageRun};
use crate::userfaultfd::{AddressRange, FaultCause, FillResult};
use crate::worker::Worker;

/// Result of putting a page in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum PageInResult {
    /// The page was put in place from this source, and is in this queue.
    Installed(PageSource, ResidentQueue),
    /// The page was in memory already.
    AlreadyPresent,
    /// The page cannot be read back.
    Lost,
    /// The mappings are changing; see [`FillResult::MappingChanged`].
    MappingChanged,
    /// There is no memory; see [`FillResult::NoMemory`].
    NoMemory,
    /// The memory is not mapped; see [`FillResult::Unmapped`].
    Unmapped,
    /// The page is being read from a disk.
    Reading,
}

/// Delay before an allocation that failed is retried.
const ALLOCATION_RETRY_DELAY: Duration = Duration::from_millis(1);

/// Minimum time between two log messages about missing memory.
const NO_MEMORY_LOG_INTERVAL: Duration = Duration::from_secs(600);

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    pub(super) fn fault_at(&mut self, address: u64, cause: FaultCause, write: bool) {
        let now = Instant::now();
        match self.page_at(address) {
            Some(page) => self.fault(page, cause, write, now),
            // The memory was unmapped after the fault, so no thread waits there.
            None => tracing::debug!("a fault at {address:#x}, where no memory is mapped"),
        }
    }

    pub(super) fn fault(&mut self, page: PageIndex, cause: FaultCause, write: bool, since: Instant) {
        match self.phases.get(page) {
            Phase::Absent if self.must_stall() => {
                self.stalled.push_back((page, PageWaiter { since, wants_write: write }))
            }
            Phase::Absent => self.page_in(page, since, write),
            Phase::Punching | Phase::Reading => {
                let waiting = self.waiters.entry(page).or_insert(PageWaiter { since, wants_write: write });
                waiting.wants_write |= write;
            }
            phase @ (Phase::Resident | Phase::Evicting(_)) => match cause {
                FaultCause::Protected => self.on_protected_write(page, since),
                FaultCause::Missing => self.on_missing_unexpectedly(page, since, write),
                FaultCause::Minor => {
                    self.cancel_protection(page, phase);
                    self.guest.map(page);
                }
            },
        }
    }

    /// Handles a write to the protected `page`.
    fn on_protected_write(&mut self, page: PageIndex, since: Instant) {
        self.drop_copy(page);
        if matches!(self.phases.get(page), Phase::Evicting(_)) {
            self.stats.evictions_cancelled += 1;
            self.enqueue(page, ResidentQueue::Working);
            self.recently_unprotected.push((page, self.now));
        }
        if self.guest.unprotect(PageRun::one(page)).is_err() {
            // The mappings are changing. The thread faults again.
            self.guest.wake(PageRun::one(page));
        }
        self.stats.protected_writes.add(since.elapsed());
    }

    /// Handles a missing fault on a page that should be in memory. Either another process has removed the page from
    /// the file, so that it reads as zeros, or the page was put in place after the fault.
    fn on_missing_unexpectedly(&mut self, page: PageIndex, since: Instant, write: bool) {
        let mut is_resident = false;
        let searched = self.guest.visit_resident(PageRun::one(page), &mut |_| is_resident = true);
        if searched.is_ok() && is_resident {
            self.guest.wake(PageRun::one(page));
            return;
        }
        self.drop_copy(page);
        self.mark_absent(page);
        self.page_in(page, since, write);
    }

    /// Pages in an absent page for a thread that has waited since `since`.
    pub(super) fn page_in(&mut self, page: PageIndex, since: Instant, write: bool) {
        let result = self.install(page, write);
        self.finish_fault(page, result, since, write);
        match result {
            _ if !self.options.prefetch => {}
            PageInResult::Installed(PageSource::Disk, _) | PageInResult::Reading => self.prefetch_after(page),
            // A stream of writes would wait at each page for its write-protection to be lifted.
            PageInResult::Installed(PageSource::Ram, _) if !write => self.prefetch_after(page),
            PageInResult::Installed(PageSource::Zero, _) => self.prefetch_zeros_after(page),
            _ => {}
        }
    }

    /// Finishes a fault that has waited since `since`, according to what was done with its page.
    pub(super) fn finish_fault(&mut self, page: PageIndex, result: PageInResult, since: Instant, write: bool) {
        match result {
            PageInResult::Installed(source, queue) => {
                if queue == ResidentQueue::Working {
                    self.stats.refaults += 1;
                }
                // Uniform pages have no eviction timestamp.
                if matches!(source, PageSource::Ram | PageSource::Disk) {
                    self.stats.count_refault(self.refault_distance(page));
                }
                self.stats.count_page_in(source, since.elapsed());
            }
            // The thread faults again after the messages about mappings have been read.
            PageInResult::MappingChanged => self.guest.wake(PageRun::one(page)),
            PageInResult::NoMemory => self.stalled.push_back((page, PageWaiter { since, wants_write: write })),
            PageInResult::Reading => {
                self.waiters.insert(page, PageWaiter { since, wants_write: write });
            }
            PageInResult::AlreadyPresent | PageInResult::Lost | PageInResult::Unmapped => {}
        }
    }

    /// Puts an absent page in place. `write` is set if the waiting thread wants to write.
    pub(super) fn install(&mut self, page: PageIndex, write: bool) -> PageInResult {
        let word = self.state.word(page);
        let (source, queue, filled) = match word.decode() {
            Some(CopyLocation::NotStored) => (PageSource::Zero, ResidentQueue::Probation, self.guest.fill_zero(page)),
            // The page was given up after it was lost.
            Some(CopyLocation::Lost) if word.is_clean() => {
                (PageSource::Zero, ResidentQueue::Probation, self.guest.fill_zero(page))
            }
            Some(CopyLocation::Uniform { .. }) => {
                self.load_uniform(page);
                let filled = match self.state.second_word(page) {
                    0 => self.guest.fill_zero(page),
                    _ => self.guest.fill(page, &*self.page_buffer, false).1,
                };
                (PageSource::Uniform, ResidentQueue::Probation, filled)
            }
            Some(CopyLocation::InTier { tier: Tier::Ram, object: stored, .. }) if self.load_from_ram(page, stored) => {
                let queue = self.queue_for_refault(page);
                (PageSource::Ram, queue, self.guest.fill(page, &*self.page_buffer, false).1)
            }
            Some(CopyLocation::InTier { tier, object: stored, .. }) if let Some(disk) = self.disks.index_of(tier) => {
                if let Some(content) = self.streams.take(page, word)
                    && checksum(page, &content) == self.state.eviction_record(page).checksum
                {
                    self.page_buffer = content;
                    return self.fill_from_disk(page, word, write);
                }
                self.begin_read(page, word, stored, disk);
                return PageInResult::Reading;
            }
            _ => {
                self.mark_lost(page, word, "its stored copy is damaged");
                return PageInResult::Lost;
            }
        };
        if filled == FillResult::Done {
            self.drop_copy(page);
        }
        self.finish_fill(page, filled, queue, source)
    }

    /// Puts a page in place that was read from a disk to `page_buffer`. Unless `write` is set, the page is
    /// write-protected, and its copy stays valid for the next eviction.
    pub(super) fn fill_from_disk(&mut self, page: PageIndex, word: EntryWord, write: bool) -> PageInResult {
        let queue = self.queue_for_refault(page);
        let write = write || self.evictions_paused;
        if !write {
            // The entry is set to *clean* before the page is put in place. So a page that is in memory without that
            // bit was never put in place write-protected and then given up.
            self.set_word(page, word.with_clean(true));
        }
        let filled = self.guest.fill(page, &*self.page_buffer, !write).1;
        match filled {
            FillResult::Done if write => self.drop_copy(page),
            FillResult::Done | FillResult::AlreadyPresent => {}
            FillResult::MappingChanged | FillResult::NoMemory | FillResult::Unmapped => self.set_word(page, word),
        }
        self.finish_fill(page, filled, queue, PageSource::Disk)
    }

    /// Updates the state of a page after an attempt to put it in place.
    fn finish_fill(
        &mut self,
        page: PageIndex,
        filled: FillResult,
        queue: ResidentQueue,
        source: PageSource,
    ) -> PageInResult {
        match filled {
            FillResult::Done => {
                self.enqueue(page, queue);
                PageInResult::Installed(source, queue)
            }
            FillResult::AlreadyPresent if source == PageSource::Zero => self.on_already_present(page, queue),
            FillResult::AlreadyPresent => {
                let copy = *self.page_buffer;
                self.resolve_already_present(page, &copy, queue, source)
            }
            FillResult::MappingChanged => PageInResult::MappingChanged,
            FillResult::NoMemory => self.on_no_memory(),
            FillResult::Unmapped => PageInResult::Unmapped,
        }
    }

    /// Handles an evicted page that is in memory already. Only the pager fills pages, so another process has touched
    /// the memory's file. A read there allocates a page of zeros, which is not the guest's content: the stored copy
    /// replaces it. A kill before that is done leaves the page missing, with a valid copy.
    pub(super) fn resolve_already_present(
        &mut self,
        page: PageIndex,
        copy: &[u8; PAGE],
        queue: ResidentQueue,
        source: PageSource,
    ) -> PageInResult {
        let word = self.state.word(page).with_clean(false);
        self.set_word(page, word);
        let mut found = [0; PAGE];
        let is_read = self.guest.read(page, &mut found).is_ok();
        if is_read && found == *copy {
            return self.on_already_present(page, queue);
        }
        if !is_read || found != [0; PAGE] {
            self.report_external_touch(page, "with other content, which replaces its stored copy");
            return self.on_already_present(page, queue);
        }
        self.report_external_touch(page, "filled with zeros, which its stored copy replaces");
        if let Err(error) = self.guest.remove_pages(PageRun::one(page)) {
            tracing::error!("its stored copy cannot be restored now: {error}");
            return PageInResult::MappingChanged;
        }
        match self.guest.fill(page, copy, false).1 {
            FillResult::Done => {
                self.drop_copy(page);
                self.enqueue(page, queue);
                PageInResult::Installed(source, queue)
            }
            // The other process has touched the page again.
            FillResult::AlreadyPresent | FillResult::MappingChanged => PageInResult::MappingChanged,
            FillResult::NoMemory => self.on_no_memory(),
            FillResult::Unmapped => PageInResult::Unmapped,
        }
    }

    /// Counts such pages, and logs the first one, the second, the fourth and so on.
    fn report_external_touch(&mut self, page: PageIndex, what: &str) {
        self.stats.touched_externally += 1;
        let count = self.stats.touched_externally;
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
    pub(super) fn on_already_present(&mut self, page: PageIndex, queue: ResidentQueue) -> PageInResult {
        self.stats.already_present += 1;
        self.drop_copy(page);
        self.enqueue(page, queue);
        // The page may still be protected, and the waiting thread has not been woken.
        if self.guest.unprotect(PageRun::one(page)).is_err() {
            tracing::debug!(?page, "cannot be unprotected now");
        }
        // The page may not be mapped.
        self.guest.map(page);
        PageInResult::AlreadyPresent
    }

    /// Handles a failed allocation of a page.
    pub(super) fn on_no_memory(&mut self) -> PageInResult {
        let was_logged = |at: Instant| self.now - at < NO_MEMORY_LOG_INTERVAL;
        if !self.no_memory_logged.is_some_and(was_logged) {
            self.no_memory_logged = Some(self.now);
            tracing::warn!(
                "there is no free memory for a page that is paged in (of the host, a control group, or the tmpfs of the memory's \
                 file): threads that need the page wait; the allocation is retried, and this is logged at most every {} minutes",
                NO_MEMORY_LOG_INTERVAL.as_secs() / 60
            );
        }
        if self.no_memory_until.is_none() {
            tracing::debug!("an allocation for a page has failed");
        }
        self.no_memory_until = Some(self.now + ALLOCATION_RETRY_DELAY);
        PageInResult::NoMemory
    }

    /// Fills `page_buffer` with the repeated word of the uniform `page`.
    pub(super) fn load_uniform(&mut self, page: PageIndex) {
        let bytes = self.state.second_word(page).to_le_bytes();
        self.page_buffer.as_chunks_mut::<8>().0.fill(bytes);
    }

    /// Reads a page from compressed RAM to `page_buffer`, and returns true if its checksum is right.
    pub(super) fn load_from_ram(&mut self, page: PageIndex, stored: StoredObject) -> bool {
        let (at, len) = (data_at(stored.offset), usize::from(stored.len));
        if at + len as u64 > self.compressed.len() as u64 {
            return false;
        }
        let at = self.compressed.ptr_at(at as usize, len);
        // SAFETY: the range is in the mapping, and is a live object, which no thread writes to.
        let data = unsafe { std::slice::from_raw_parts(at.as_ptr(), len) };
        self.decode(page, stored, data)
    }

    /// Decodes `data`, which is encoded as `stored` says, to `page_buffer`. Returns true if it has the checksum of
    /// `page`.
    pub(super) fn decode(&mut self, page: PageIndex, stored: StoredObject, data: &[u8]) -> bool {
        let is_decoded = match stored.encoding {
            PageEncoding::Raw => match <&[u8; PAGE]>::try_from(data) {
                Ok(data) => {
                    *self.page_buffer = *data;
                    true
                }
                Err(_) => false,
            },
            PageEncoding::Codec(codec) => self.decoder.decode(codec, data, &mut self.page_buffer).is_ok(),
        };
        is_decoded && checksum(page, &self.page_buffer) == self.state.eviction_record(page).checksum
    }

    /// Marks `page` as lost, since its copy is unusable. A thread that touches the page gets a memory error.
    pub(super) fn mark_lost(&mut self, page: PageIndex, word: EntryWord, why: &str) {
        // If the page is in memory after all (its removal may have failed), nothing is lost.
        let mut is_resident = false;
        let searched = self.guest.visit_resident(PageRun::one(page), &mut |_| is_resident = true);
        if searched.is_ok() && is_resident {
            self.on_already_present(page, ResidentQueue::Probation);
            return;
        }
        let lost = EntryWord::encode(CopyLocation::Lost);
        if word != lost {
            let address = self.address_of(page);
            tracing::error!(
                "page {:#x} (at {address:#x} of the process) is lost, because {why}: a thread that touches it gets a memory error",
                page.get()
            );
            self.release_copy(word);
            self.set_word(page, lost);
            self.stats.lost += 1;
        }
        match self.guest.poison(page) {
            FillResult::Done | FillResult::AlreadyPresent => self.guest.wake(PageRun::one(page)),
            // The waiting thread faults again. If none waits, a detach retries.
            FillResult::MappingChanged | FillResult::NoMemory => {
                self.poison_pending = true;
                self.guest.wake(PageRun::one(page));
            }
            FillResult::Unmapped => {
                tracing::error!("page {:#x} cannot be poisoned: threads that wait for it keep waiting", page.get())
            }
        }
    }

    fn address_of(&self, page: PageIndex) -> u64 {
        let region = self.regions.iter().find(|region| region.contains(page));
        region.map_or(0, |region| region.address_of(page))
    }

    /// Returns the queue for a page that was evicted: `Working` if twice the resident memory would have kept it.
    pub(super) fn queue_for_refault(&self, page: PageIndex) -> ResidentQueue {
        match self.refault_distance(page) < self.resident {
            true => ResidentQueue::Working,
            false => ResidentQueue::Probation,
        }
    }

    /// Returns the number of pages evicted since `page` was.
    fn refault_distance(&self, page: PageIndex) -> u32 {
        let evicted = self.state.eviction_count().load(std::sync::atomic::Ordering::Relaxed) as u32;
        evicted.wrapping_sub(self.state.eviction_record(page).evicted_at)
    }

    /// Invalidates the copy of `page`.
    pub(super) fn drop_copy(&mut self, page: PageIndex) {
        let word = self.state.word(page);
        if word != EntryWord::NOT_STORED {
            self.set_word(page, EntryWord::NOT_STORED);
            self.release_copy(word);
        }
    }

    /// Marks the object that `word` points to as dead.
    pub(super) fn release_copy(&mut self, word: EntryWord) {
        let Some(CopyLocation::InTier { tier, object: stored, .. }) = word.decode() else {
            return;
        };
        match (tier, self.disks.index_of(tier)) {
            (Tier::Ram, _) => self.ram.remove_live(stored),
            (Tier::Ssd | Tier::Slow, Some(disk)) => self.disks.all[disk].log.remove_live(stored),
            (Tier::Ssd | Tier::Slow, None) => {}
        }
    }

    /// Handles a range of memory that the process has given up or unmapped.
    pub(super) fn on_removed(&mut self, range: AddressRange, unmapped: bool) {
        for index in 0..self.regions.len() {
            let region = self.regions[index];
            let start = range.start.max(region.address);
            let end = range.end().min(region.address + region.bytes());
            if start >= end {
                continue;
            }
            let Some(first) = region.page_at(start) else { continue };
            let run = PageRun { first, count: ((end - start) / PAGE_BYTES) as u32 };
            if unmapped {
                self.on_unmapped(run);
            } else if run.count > 0 {
                self.on_discarded(run);
            }
        }
    }

    /// Drops these pages, in memory and in tiers. A page that is in memory was put there between the hole and its
    /// message (by a fault of another thread, or by prefetching), or the hole is yet to be punched (`MADV_REMOVE`).
    fn on_discarded(&mut self, run: PageRun) {
        for page in run.pages() {
            let was_resident = matches!(self.phases.get(page), Phase::Resident | Phase::Evicting(_));
            if was_resident || self.state.word(page) != EntryWord::NOT_STORED {
                self.stats.discarded += 1;
            }
            if self.state.word(page).decode() == Some(CopyLocation::Lost) {
                // The poison marker in the page table survives the give-up. The page is cleared later, by this pager
                // or its successor.
                self.set_word(page, EntryWord::encode(CopyLocation::Lost).with_clean(true));
                self.lost_then_discarded.push(page);
                continue;
            }
            self.drop_copy(page);
            // Pages that the worker is removing are handled when it reports them.
            if self.phases.get(page) != Phase::Punching {
                self.mark_absent(page);
            }
        }
        let mut resident: Vec<PageRun> = Vec::new();
        let searched = self.guest.visit_resident(run, &mut |found| resident.push(found));
        let removed = searched.and_then(|()| resident.into_iter().try_for_each(|found| self.guest.remove_pages(found)));
        if let Err(error) = removed {
            tracing::warn!("discarded pages cannot be removed from memory: {error}");
        }
    }

    /// Puts zeros in place of pages that were lost and then given up. Returns true if there was one.
    pub(super) fn clear_lost(&mut self) -> bool {
        let mut worked = false;
        for page in std::mem::take(&mut self.lost_then_discarded) {
            if self.state.word(page).decode() != Some(CopyLocation::Lost) {
                continue;
            }
            match self.guest.fill_zero(page) {
                FillResult::Done => {
                    self.drop_copy(page);
                    self.enqueue(page, ResidentQueue::Probation);
                    worked = true;
                }
                FillResult::MappingChanged | FillResult::NoMemory => self.lost_then_discarded.push(page),
                FillResult::AlreadyPresent | FillResult::Unmapped => {}
            }
        }
        worked
    }

    /// Drops the copy of a page that is about to be mapped without write-protection, and cancels its eviction.
    fn cancel_protection(&mut self, page: PageIndex, phase: Phase) {
        self.drop_copy(page);
        if matches!(phase, Phase::Evicting(_)) {
            self.enqueue(page, ResidentQueue::Working);
            // A thread that waits to write to the page can continue.
            if self.guest.unprotect(PageRun::one(page)).is_err() {
                self.guest.wake(PageRun::one(page));
            }
        }
    }

    /// Forgets pages that the process has unmapped. Their memory belongs to the file now, and the process that
    /// unmapped them is responsible for it.
    fn on_unmapped(&mut self, run: PageRun) {
        for page in run.pages() {
            self.drop_copy(page);
            if self.phases.get(page) != Phase::Punching {
                self.mark_absent(page);
            }
        }
        if let Some(region) = self.regions.iter_mut().find(|region| region.first == run.first)
            && region.pages == run.count
        {
            self.state.mark_unmapped(region.first);
            region.address = 0;
            let region = *region;
            self.guest.drop_region(&region);
        }
    }

    /// Serves the thread that has waited until `page` was removed from memory or read.
    pub(super) fn serve_waiter(&mut self, page: PageIndex) {
        let Some(PageWaiter { since, wants_write: write }) = self.waiters.remove(&page) else {
            return;
        };
        match self.phases.get(page) {
            Phase::Absent => self.page_in(page, since, write),
            // The page was paged in by another fault since then, or is being read.
            _ => self.fault(page, FaultCause::Missing, write, since),
        }
    }
}
