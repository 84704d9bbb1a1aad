//! Answering.

use std::time::{Duration, Instant};

use super::{Pager, Phase, Source, Waiting};
use crate::entry::{Encoding, Location, Stored, Tier, Word, checksum};
use crate::guest::GuestMemory;
use crate::lists::Queue;
use crate::log::data_at;
use crate::units::{PAGE, PAGE_BYTES, PageIndex, PageRun};
use crate::userfaultfd::{Cause, Filled, Range};
use crate::worker::Worker;

/// What became of a page that was to be put in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Put {
    /// It is there, from there, and in this queue.
    There(Source, Queue),
    /// It was there.
    Found,
    /// It cannot be read back.
    Lost,
    /// See [`Filled`].
    Changing,
    /// See [`Filled`].
    NoMemory,
    /// See [`Filled`].
    Gone,
    /// It is being read.
    Reading,
}

/// After so long it is tried again to get memory for a page.
const NO_MEMORY_FOR: Duration = Duration::from_millis(1);

/// The log has it again after so long.
const LOG_AGAIN_AFTER: Duration = Duration::from_secs(600);

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    pub(super) fn fault_at(&mut self, address: u64, cause: Cause, write: bool) {
        let now = Instant::now();
        match self.page_at(address) {
            Some(page) => self.fault(page, cause, write, now),
            // Of memory that was unmapped since: nobody waits there any more.
            None => tracing::debug!("a fault at {address:#x}, where no memory is"),
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

    /// `page` is to be written to, and is protected.
    fn written(&mut self, page: PageIndex, since: Instant) {
        self.drop_copy(page);
        if matches!(self.phases.get(page), Phase::Leaving(_)) {
            self.figures.saved += 1;
            self.settle(page, Queue::Working);
            self.let_write.push((page, self.now));
        }
        if self.guest.unprotect(PageRun::one(page)).is_err() {
            // Mappings are changing. It is asked again.
            self.guest.wake(PageRun::one(page));
        }
        self.figures.writes.add(since.elapsed());
    }

    /// `page` should be there, and was not: it was taken out of memory by somebody else, and reads as zeros. Or it has been
    /// brought since that was told.
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

    /// Puts an absent page in place, for somebody who has waited for it since then.
    pub(super) fn bring(&mut self, page: PageIndex, since: Instant, write: bool) {
        let put = self.put_in_place(page, write);
        self.answer(page, put, since, write);
        match put {
            _ if !self.options.prefetch => {}
            Put::There(Source::Disk, _) | Put::Reading => self.follow(page),
            // Whoever goes through memory to write would wait at each page for that to be allowed.
            Put::There(Source::Ram, _) if !write => self.follow(page),
            Put::There(Source::Zero, _) => self.follow_zero(page),
            _ => {}
        }
    }

    /// What became of a page that somebody has waited for since then.
    pub(super) fn answer(&mut self, page: PageIndex, put: Put, since: Instant, write: bool) {
        match put {
            Put::There(source, queue) => {
                if queue == Queue::Working {
                    self.figures.refaults += 1;
                }
                // Of a page of one word it is not kept when it went.
                if matches!(source, Source::Ram | Source::Disk) {
                    self.figures.returned_after(self.evicted_since(page));
                }
                self.figures.brought(source, since.elapsed());
            }
            // It comes again when what the process says of its mappings has been read.
            Put::Changing => self.guest.wake(PageRun::one(page)),
            Put::NoMemory => self.stalled.push_back((page, Waiting { since, write })),
            Put::Reading => {
                self.waiting.insert(page, Waiting { since, write });
            }
            Put::Found | Put::Lost | Put::Gone => {}
        }
    }

    /// Puts an absent page in place, for somebody who wants to write to it or not.
    pub(super) fn put_in_place(&mut self, page: PageIndex, write: bool) -> Put {
        let word = self.state.word(page);
        let (source, queue, filled) = match word.decode() {
            Some(Location::Nowhere) => (Source::Zero, Queue::Probation, self.guest.fill_zero(page)),
            // It was given up since it was lost.
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

    /// Puts a page in place whose copy is on a disk, and was read to `content`. Unless it is to be written to it is write-protected, and its copy
    /// stays good for the next time.
    pub(super) fn fill_from_disk(&mut self, page: PageIndex, word: Word, write: bool) -> Put {
        let queue = self.queue_of_returned(page);
        let write = write || self.are_evictions_paused;
        if !write {
            // Before it is there: so a page of which this is not said is never a protected one that was given up.
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

    /// What was filled, after it was tried.
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

    /// Handles an evicted page that is in memory already. Only the pager fills pages, so another process has touched the
    /// memory's file. A read there allocates a page of zeros, which is not the guest's: the stored copy replaces it. A kill
    /// before that is done leaves the page missing, with a valid copy.
    pub(super) fn found_in_memory(&mut self, page: PageIndex, copy: &[u8; PAGE], queue: Queue, source: Source) -> Put {
        let word = self.state.word(page).with_clean(false);
        self.set_word(page, word);
        let mut found = [0; PAGE];
        let is_read = self.guest.read(page, &mut found).is_ok();
        if is_read && found == *copy {
            return self.was_there(page, queue);
        }
        if !is_read || found != [0; PAGE] {
            self.report_found(page, "with other content: that counts, and its stored copy is dropped");
            return self.was_there(page, queue);
        }
        self.report_found(page, "of zeros: its stored copy is put back");
        if let Err(error) = self.guest.take_out(PageRun::one(page)) {
            tracing::error!("it cannot be put back now: {error}");
            return Put::Changing;
        }
        match self.guest.fill(page, copy, false).1 {
            Filled::Done => {
                self.drop_copy(page);
                self.settle(page, queue);
                Put::There(source, queue)
            }
            // It was touched again.
            Filled::Present | Filled::Changing => Put::Changing,
            Filled::NoMemory => self.is_without_memory(),
            Filled::Gone => Put::Gone,
        }
    }

    /// Logs and counts such pages: the first one, the second, the fourth and so on.
    fn report_found(&mut self, page: PageIndex, what: &str) {
        self.figures.touched_by_others += 1;
        let count = self.figures.touched_by_others;
        if count.is_power_of_two() {
            let address = self.address_of(page);
            tracing::error!(
                "page {:#x} (at {address:#x} of the process) was evicted, and found in memory, {what}; another process uses the \
                 file of this memory, which none may while it is managed ({count} such pages so far)",
                page.get()
            );
        }
    }

    /// `page`, which was to be put in place, is in memory already: whoever has put it there came later.
    pub(super) fn was_there(&mut self, page: PageIndex, queue: Queue) -> Put {
        self.figures.found += 1;
        self.drop_copy(page);
        self.settle(page, queue);
        // It may be protected still, and who waits does not know that it is there.
        if self.guest.unprotect(PageRun::one(page)).is_err() {
            tracing::debug!(?page, "cannot be unprotected now");
        }
        // It may not be mapped.
        self.guest.map(page);
        Put::Found
    }

    /// There is no memory for a page.
    pub(super) fn is_without_memory(&mut self) -> Put {
        let was_logged = |at: Instant| self.now - at < LOG_AGAIN_AFTER;
        if !self.no_memory_logged.is_some_and(was_logged) {
            self.no_memory_logged = Some(self.now);
            tracing::warn!(
                "there is no memory for a page that is wanted (of the host, a control group, or the tmpfs that the memory is a \
                 file of): who wants it waits; it is tried again, and this is logged at most every {} minutes",
                LOG_AGAIN_AFTER.as_secs() / 60
            );
        }
        self.no_memory_until = Some(self.now + NO_MEMORY_FOR);
        Put::NoMemory
    }

    /// Makes the content that of `page`, which is one word all over.
    pub(super) fn load_uniform(&mut self, page: PageIndex) {
        let bytes = self.state.second_word(page).to_le_bytes();
        self.content.as_chunks_mut::<8>().0.fill(bytes);
    }

    /// Reads a page from compressed RAM; whether it is the one that was evicted.
    pub(super) fn load_from_ram(&mut self, page: PageIndex, stored: Stored) -> bool {
        let (at, len) = (data_at(stored.place), usize::from(stored.len));
        if at + len as u64 > self.compressed.len() as u64 {
            return false;
        }
        let at = self.compressed.at(at as usize, len);
        // SAFETY: in the mapping, and a living object, to which nobody writes.
        let data = unsafe { std::slice::from_raw_parts(at.as_ptr(), len) };
        self.decode(page, stored, data)
    }

    /// Has `data`, which is stored so, become the content of `page`; whether it is what was evicted.
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

    /// Whoever touches `page` gets a memory error: its copy is not what was evicted.
    pub(super) fn lose(&mut self, page: PageIndex, word: Word, why: &str) {
        // It could not be taken out, say: then nothing is lost.
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
                "page {:#x} (at {address:#x} of the process) is lost, {why}: whoever touches it gets a memory error",
                page.get()
            );
            self.forget_copy(word);
            self.set_word(page, lost);
            self.figures.lost += 1;
        }
        match self.guest.poison(page) {
            Filled::Done | Filled::Present => self.guest.wake(PageRun::one(page)),
            // Who waits tries again, and so does who lets go of the process, if nobody waits.
            Filled::Changing | Filled::NoMemory => {
                self.is_unmarked = true;
                self.guest.wake(PageRun::one(page));
            }
            Filled::Gone => tracing::error!(
                "page {:#x} cannot be made unreadable: who waits for it waits on",
                page.get()
            ),
        }
    }

    fn address_of(&self, page: PageIndex) -> u64 {
        let region = self.regions.iter().find(|region| region.contains(page));
        region.map_or(0, |region| region.address_of(page))
    }

    /// A page that had left: whether it would be here still if there were as much memory again as it has now.
    pub(super) fn queue_of_returned(&self, page: PageIndex) -> Queue {
        match self.evicted_since(page) < self.present {
            true => Queue::Working,
            false => Queue::Probation,
        }
    }

    /// How many pages went since `page` did.
    fn evicted_since(&self, page: PageIndex) -> u32 {
        let evicted = self.state.evicted().load(std::sync::atomic::Ordering::Relaxed) as u32;
        evicted.wrapping_sub(self.state.proof(page).evicted_at)
    }

    /// The copy of `page` counts no more.
    pub(super) fn drop_copy(&mut self, page: PageIndex) {
        let word = self.state.word(page);
        if word != Word::NOWHERE {
            self.set_word(page, Word::NOWHERE);
            self.forget_copy(word);
        }
    }

    /// The copy that `word` leads to is dead.
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

    /// The process has given up a range of its memory, or has unmapped it.
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

    /// Whatever is in memory of these pages, or stored of them, counts no more. What is in memory was put there between
    /// the hole and the word of it, by us for somebody else or ahead, or the hole is yet to come (`MADV_REMOVE`).
    fn given_up(&mut self, run: PageRun) {
        for page in run.pages() {
            let was_there = matches!(self.phases.get(page), Phase::Resident | Phase::Leaving(_));
            if was_there || self.state.word(page) != Word::NOWHERE {
                self.figures.removed += 1;
            }
            if self.state.word(page).decode() == Some(Location::Lost) {
                // The mark that makes it unreadable does not go by itself. A successor goes on with it.
                self.set_word(page, Word::of(Location::Lost).with_clean(true));
                self.to_clear.push(page);
                continue;
            }
            self.drop_copy(page);
            // What the worker takes out it says when it has.
            if self.phases.get(page) != Phase::Punching {
                self.vanish(page);
            }
        }
        let mut there: Vec<PageRun> = Vec::new();
        let looked = self.guest.present(run, &mut |found| there.push(found));
        let gone = looked.and_then(|()| there.into_iter().try_for_each(|found| self.guest.take_out(found)));
        if let Err(error) = gone {
            tracing::warn!("pages that were given up stay as they were: {error}");
        }
    }

    /// Has pages that were lost, and given up since, be of zeros; whether there was one.
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

    /// A page stays of which the protection is lifted.
    fn stays_unprotected(&mut self, page: PageIndex, phase: Phase) {
        self.drop_copy(page);
        if matches!(phase, Phase::Leaving(_)) {
            self.settle(page, Queue::Working);
            // Who waits to write to it need not.
            if self.guest.unprotect(PageRun::one(page)).is_err() {
                self.guest.wake(PageRun::one(page));
            }
        }
    }

    /// Nobody touches these any more. What is in memory of them is the file's, and who unmapped them answers for that.
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

    /// Whoever has waited for `page` to be out of memory gets it.
    pub(super) fn answer_waiting(&mut self, page: PageIndex) {
        let Some(Waiting { since, write }) = self.waiting.remove(&page) else {
            return;
        };
        match self.phases.get(page) {
            Phase::Absent => self.bring(page, since, write),
            // It has been brought with another one since it went, or is on its way.
            _ => self.fault(page, Cause::Missing, write, since),
        }
    }
}
