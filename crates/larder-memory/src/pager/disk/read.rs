//! Reads from disks: for waiting threads, for prefetching, and for moving segments.

use std::time::Duration;

use larder_block::{AlignedBuf, IoError};

use super::{DiskRead, PREFETCH_FILL_PAGES_MAX, ReadTarget, WRITE_RETRY_DELAY};
use crate::entry::{CopyLocation, EntryWord, StoredObject, Tier};
use crate::guest::GuestMemory;
use crate::pager::{PageSource, PageWaiter, Pager, Phase};
use crate::resident_queues::ResidentQueue;
use crate::segment_log::{SEGMENT_BYTES, SegmentIndex, data_at, object_bytes};
use crate::units::{PAGE, PageIndex};
use crate::userfaultfd::FillResult;
use crate::worker::{DemotionSource, Worker};

/// Number of attempts to read, and the delay between two.
const READ_ATTEMPTS_MAX: u32 = 4;
const READ_RETRY_DELAY: Duration = Duration::from_millis(200);
/// Delay between attempts while the disk is unreachable. Their number is not limited.
const UNREACHABLE_RETRY_DELAY: Duration = Duration::from_millis(500);

/// Maximum length of one read, and maximum gap between two wanted objects in it, in bytes.
const READ_BYTES_MAX: u64 = 256 << 10;
const GAP_BYTES_MAX: u64 = 16 << 10;

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    /// Starts to read an absent page whose entry has the first word `word`. Its waiters are served when the read
    /// ends.
    pub(in crate::pager) fn begin_read(&mut self, page: PageIndex, word: EntryWord, stored: StoredObject, disk: usize) {
        debug_assert_eq!(self.phases.get(page), Phase::Absent);
        self.phases.set(page, Phase::Reading);
        self.reading += 1;
        if let Some(pages) = self.disks.pages_of_covering_read(disk, stored) {
            pages.push((page, word));
            return;
        }
        let from = stored.offset.bytes();
        let end = from + object_bytes(stored.len) as u64;
        self.read_range(disk, from, end, vec![(page, word)]);
    }

    /// Starts to read absent pages that no thread waits for.
    pub(in crate::pager) fn read_ahead(&mut self, mut pages: Vec<(PageIndex, EntryWord, Tier, StoredObject)>) {
        pages.sort_unstable_by_key(|(_, _, tier, stored)| (*tier as u8, stored.offset));
        let mut pages = pages.into_iter().peekable();
        while let Some((page, word, tier, stored)) = pages.next() {
            let Some(disk) = self.disks.index_of(tier) else {
                continue;
            };
            self.phases.set(page, Phase::Reading);
            self.reading += 1;
            if let Some(covered_pages) = self.disks.pages_of_covering_read(disk, stored) {
                covered_pages.push((page, word));
                continue;
            }
            let from = stored.offset.bytes();
            let mut end = from + object_bytes(stored.len) as u64;
            let mut pages_of_read = vec![(page, word)];
            let segment = SegmentIndex::containing(stored.offset);
            while let Some((page, word, _, stored)) = pages.next_if(|(_, _, of, next)| {
                *of == tier
                    && SegmentIndex::containing(next.offset) == segment
                    && next.offset.bytes() <= end + GAP_BYTES_MAX
                    && next.offset.bytes() + object_bytes(next.len) as u64 <= from + READ_BYTES_MAX
            }) {
                self.phases.set(page, Phase::Reading);
                self.reading += 1;
                // Damaged entries may point to overlapping ranges.
                end = end.max(stored.offset.bytes() + object_bytes(stored.len) as u64);
                pages_of_read.push((page, word));
            }
            self.read_range(disk, from, end, pages_of_read);
        }
    }

    /// Reads a part of a segment, extended to whole blocks of the disk.
    fn read_range(&mut self, disk: usize, from: u64, end: u64, pages: Vec<(PageIndex, EntryWord)>) {
        let disk_state = &mut self.disks.all[disk];
        let block = disk_state.store.block_bytes() as u64;
        let segment_end = (from / SEGMENT_BYTES as u64 + 1) * SEGMENT_BYTES as u64;
        let start = from / block * block;
        let end = end.next_multiple_of(block).min(segment_end);
        disk_state.read_bytes += end - start;
        self.disks.start_read(DiskRead {
            disk,
            start,
            len: (end - start) as usize,
            attempts: 0,
            target: ReadTarget::Pages(pages),
        });
    }

    pub(super) fn on_read_failed(&mut self, mut reading: DiskRead, error: &IoError) {
        let is_unreachable = self.disks.all[reading.disk].is_unreachable;
        if is_unreachable && let ReadTarget::Pages(_) = reading.target {
            self.disks.retries.push((self.now + UNREACHABLE_RETRY_DELAY, reading));
            return;
        }
        reading.attempts += 1;
        if reading.attempts < READ_ATTEMPTS_MAX && !is_unreachable {
            tracing::warn!("{error}: the read is retried");
            self.disks.retries.push((self.now + READ_RETRY_DELAY, reading));
            return;
        }
        if !is_unreachable {
            tracing::error!("{error}");
        }
        match reading.target {
            ReadTarget::Segment(segment, _) => {
                let disk = &mut self.disks.all[reading.disk];
                disk.log.unreserve(segment);
                disk.is_cleaning = false;
                disk.failed_until = Some(self.now + WRITE_RETRY_DELAY);
            }
            ReadTarget::Pages(pages) => {
                for (page, word) in pages {
                    if self.drop_stale_read(page, word) {
                        continue;
                    }
                    self.end_read(page);
                    // A page that no thread waits for is not lost: the disk may be readable when it is wanted.
                    if self.waiters.remove(&page).is_some() || self.is_detaching {
                        self.mark_lost(page, word, "it cannot be read from the disk");
                    }
                }
            }
        }
    }

    /// Returns true if a page that was read is not to be put in place, because it was given up or its entry has
    /// changed. Serves its waiters then.
    fn drop_stale_read(&mut self, page: PageIndex, word: EntryWord) -> bool {
        if self.phases.get(page) != Phase::Reading {
            return true;
        }
        if self.state.word(page) == word {
            return false;
        }
        self.end_read(page);
        self.serve_waiter(page);
        true
    }

    pub(super) fn on_disk_read(&mut self, reading: DiskRead, bytes: AlignedBuf) {
        let DiskRead { disk, start, len, target: what, .. } = reading;
        let pages = match what {
            ReadTarget::Segment(segment, to) => {
                let origin = DemotionSource::Disk {
                    tier: self.disks.all[disk].tier,
                    segment,
                    bytes,
                    is_encrypted: self.cipher.is_some(),
                };
                self.disks.all[to].queue.push_back((origin, crate::segment_log::SEGMENT_HEADER_BYTES));
                return;
            }
            ReadTarget::Pages(pages) => pages,
        };
        let read = &bytes[..len];
        let (wanted, mut ahead): (Vec<_>, Vec<_>) =
            pages.into_iter().partition(|(page, _)| self.waiters.contains_key(page));
        for (page, word) in wanted {
            if !self.drop_stale_read(page, word) {
                self.install_read(page, word, start, read);
            }
        }
        ahead.sort_unstable_by_key(|(page, _)| *page);
        self.install_prefetched(ahead, start, read);
        self.disks.recycle(bytes);
    }

    /// Decodes a page from `read`, which begins at byte `start` of the log, as its entry `word` says. Returns true if
    /// the checksum is right.
    fn decode_read(&mut self, page: PageIndex, word: EntryWord, start: u64, read: &[u8]) -> bool {
        self.end_read(page);
        let Some(CopyLocation::InTier { tier, object: stored, .. }) = word.decode() else {
            return false;
        };
        let at = (data_at(stored.offset) - start) as usize;
        let data = at..at + usize::from(stored.len);
        let Some(cipher) = &self.cipher else {
            return self.decode(page, stored, &read[data]);
        };
        // Objects begin and end at block boundaries of the cipher.
        let object = (stored.offset.bytes() - start) as usize;
        let enciphered = &read[object..object + object_bytes(stored.len)];
        let mut deciphered = std::mem::take(&mut self.decrypted);
        let plaintext = &mut deciphered[..enciphered.len()];
        plaintext.copy_from_slice(enciphered);
        cipher.decrypt(tier, stored.offset.bytes(), plaintext);
        let is_valid = self.decode(page, stored, &plaintext[data.start - object..data.end - object]);
        self.decrypted = deciphered;
        is_valid
    }

    /// Puts a page in place that was read and that a thread waits for.
    fn install_read(&mut self, page: PageIndex, word: EntryWord, start: u64, read: &[u8]) {
        let is_valid = self.decode_read(page, word, start, read);
        let Some(PageWaiter { since, wants_write: write }) = self.waiters.remove(&page) else {
            return;
        };
        if !is_valid {
            self.mark_lost(page, word, "its stored copy is damaged");
            return;
        }
        let put = self.fill_from_disk(page, word, write);
        self.finish_fault(page, put, since, write);
    }

    /// Puts prefetched pages in place, in rising order, as far as there is room. The others are read again when they
    /// are wanted.
    fn install_prefetched(&mut self, pages: Vec<(PageIndex, EntryWord)>, start: u64, read: &[u8]) {
        let mut run: Vec<(PageIndex, EntryWord)> = Vec::new();
        for (page, word) in pages {
            if self.drop_stale_read(page, word) {
                continue;
            }
            if !self.decode_read(page, word, start, read) {
                if self.is_detaching {
                    self.mark_lost(page, word, "its stored copy is damaged");
                }
                continue;
            }
            self.stats.prefetched += 1;
            if !self.is_detaching && (self.streams.must_buffer(page) || !self.may_prefetch()) {
                self.streams.buffer(page, word, &self.page_buffer);
                continue;
            }
            self.add_prefetched(&mut run, page, word);
        }
        self.fill_prefetched(&run);
    }

    /// Adds a page, which was read to `page_buffer`, to the pages that are put in place together. If it does not follow
    /// them, puts those in place first.
    pub(in crate::pager) fn add_prefetched(
        &mut self,
        run: &mut Vec<(PageIndex, EntryWord)>,
        page: PageIndex,
        word: EntryWord,
    ) {
        let is_adjacent = run.last().is_none_or(|(last, _)| last.plus(1) == page);
        if !is_adjacent || run.len() == PREFETCH_FILL_PAGES_MAX {
            self.fill_prefetched(run);
            run.clear();
        }
        let at = run.len() * PAGE;
        self.prefetch_buffer[at..at + PAGE].copy_from_slice(&*self.page_buffer);
        run.push((page, word));
    }

    /// Puts consecutive pages in place from the buffer `prefetch_buffer`, write-protected and clean.
    /// [`Self::fill_from_disk`] does the same for one page.
    pub(in crate::pager) fn fill_prefetched(&mut self, run: &[(PageIndex, EntryWord)]) {
        let protect = !self.evictions_paused;
        for (page, word) in run.iter().filter(|_| protect) {
            self.set_word(*page, word.with_clean(true));
        }
        let mut done = 0;
        while let Some((page, _)) = run.get(done) {
            let (filled, result) =
                self.guest.fill(*page, &self.prefetch_buffer[done * PAGE..run.len() * PAGE], protect);
            for (page, _) in &run[done..done + filled] {
                let queue = self.queue_for_refault(*page);
                if !protect {
                    self.drop_copy(*page);
                }
                self.enqueue(*page, queue);
            }
            done += filled;
            match result {
                FillResult::Done if filled > 0 => {}
                FillResult::AlreadyPresent => {
                    let mut copy = [0; PAGE];
                    copy.copy_from_slice(&self.prefetch_buffer[done * PAGE..(done + 1) * PAGE]);
                    self.resolve_already_present(run[done].0, &copy, ResidentQueue::Probation, PageSource::Disk);
                    done += 1;
                }
                _ => break,
            }
        }
        for (page, word) in &run[done..] {
            self.set_word(*page, *word);
        }
    }

    /// Records that the read of `page` has ended.
    fn end_read(&mut self, page: PageIndex) {
        self.phases.set(page, Phase::Absent);
        self.reading -= 1;
    }
}
