//! Reads from disks: for waiting threads, for prefetching, and for moving segments.

use std::time::Duration;

use larder_block::{AlignedBuf, IoError};

use super::{AHEAD_PAGES, Reading, WRITE_AGAIN_AFTER, Wanted};
use crate::entry::{Location, Stored, Tier, Word};
use crate::guest::GuestMemory;
use crate::lists::Queue;
use crate::log::{SEGMENT, SegmentIndex, data_at, object_bytes};
use crate::pager::{Pager, Phase, Source, Waiting};
use crate::units::{PAGE, PageIndex};
use crate::userfaultfd::Filled;
use crate::worker::{Origin, Worker};

/// Number of attempts to read, and the delay between two.
const READS_MAX: u32 = 4;
const READ_AGAIN_AFTER: Duration = Duration::from_millis(200);
/// Delay between attempts while the disk is unreachable. Their number is not limited.
const REACH_AGAIN_AFTER: Duration = Duration::from_millis(500);

/// Maximum length of one read, and maximum gap between two wanted objects in it, in bytes.
const READ_MAX: u64 = 256 << 10;
const GAP_MAX: u64 = 16 << 10;

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    /// Starts to read an absent page whose entry has the first word `word`. Its waiters are served when the read
    /// ends.
    pub(in crate::pager) fn begin_read(&mut self, page: PageIndex, word: Word, stored: Stored, disk: usize) {
        debug_assert_eq!(self.phases.get(page), Phase::Absent);
        self.phases.set(page, Phase::Reading);
        self.reading += 1;
        if let Some(pages) = self.disks.reading_of(disk, stored) {
            pages.push((page, word));
            return;
        }
        let from = stored.place.bytes();
        let end = from + object_bytes(stored.len) as u64;
        self.read_range(disk, from, end, vec![(page, word)]);
    }

    /// Starts to read absent pages that no thread waits for.
    pub(in crate::pager) fn read_ahead(&mut self, mut pages: Vec<(PageIndex, Word, Tier, Stored)>) {
        pages.sort_unstable_by_key(|(_, _, tier, stored)| (*tier as u8, stored.place));
        let mut pages = pages.into_iter().peekable();
        while let Some((page, word, tier, stored)) = pages.next() {
            let Some(disk) = self.disks.index_of(tier) else {
                continue;
            };
            self.phases.set(page, Phase::Reading);
            self.reading += 1;
            if let Some(others) = self.disks.reading_of(disk, stored) {
                others.push((page, word));
                continue;
            }
            let from = stored.place.bytes();
            let mut end = from + object_bytes(stored.len) as u64;
            let mut together = vec![(page, word)];
            let segment = SegmentIndex::of(stored.place);
            while let Some((page, word, _, stored)) = pages.next_if(|(_, _, of, next)| {
                *of == tier
                    && SegmentIndex::of(next.place) == segment
                    && next.place.bytes() <= end + GAP_MAX
                    && next.place.bytes() + object_bytes(next.len) as u64 <= from + READ_MAX
            }) {
                self.phases.set(page, Phase::Reading);
                self.reading += 1;
                // Damaged entries may point to overlapping ranges.
                end = end.max(stored.place.bytes() + object_bytes(stored.len) as u64);
                together.push((page, word));
            }
            self.read_range(disk, from, end, together);
        }
    }

    /// Reads a part of a segment, extended to whole blocks of the disk.
    fn read_range(&mut self, disk: usize, from: u64, end: u64, pages: Vec<(PageIndex, Word)>) {
        let of = &mut self.disks.all[disk];
        let block = of.store.block_bytes() as u64;
        let segment_end = (from / SEGMENT as u64 + 1) * SEGMENT as u64;
        let start = from / block * block;
        let end = end.next_multiple_of(block).min(segment_end);
        of.read_bytes += end - start;
        self.disks.begin(Reading {
            disk,
            start,
            len: (end - start) as usize,
            tries: 0,
            what: Wanted::Pages(pages),
        });
    }

    pub(super) fn read_failed(&mut self, mut reading: Reading, error: &IoError) {
        let is_unreachable = self.disks.all[reading.disk].is_unreachable;
        if is_unreachable && let Wanted::Pages(_) = reading.what {
            self.disks.again.push((self.now + REACH_AGAIN_AFTER, reading));
            return;
        }
        reading.tries += 1;
        if reading.tries < READS_MAX && !is_unreachable {
            tracing::warn!("{error}: the read is retried");
            self.disks.again.push((self.now + READ_AGAIN_AFTER, reading));
            return;
        }
        if !is_unreachable {
            tracing::error!("{error}");
        }
        match reading.what {
            Wanted::Segment(segment, _) => {
                let disk = &mut self.disks.all[reading.disk];
                disk.log.left(segment);
                disk.is_cleaning = false;
                disk.failed_until = Some(self.now + WRITE_AGAIN_AFTER);
            }
            Wanted::Pages(pages) => {
                for (page, word) in pages {
                    if self.is_read_no_more(page, word) {
                        continue;
                    }
                    self.is_read(page);
                    // A page that no thread waits for is not lost: the disk may be readable when it is wanted.
                    if self.waiting.remove(&page).is_some() || self.is_leaving {
                        self.lose(page, word, "it cannot be read from the disk");
                    }
                }
            }
        }
    }

    /// Returns true if a page that was read is not to be put in place, because it was given up or its entry has
    /// changed. Serves its waiters then.
    fn is_read_no_more(&mut self, page: PageIndex, word: Word) -> bool {
        if self.phases.get(page) != Phase::Reading {
            return true;
        }
        if self.state.word(page) == word {
            return false;
        }
        self.is_read(page);
        self.answer_waiting(page);
        true
    }

    pub(super) fn read_from_disk(&mut self, reading: Reading, bytes: AlignedBuf) {
        let Reading {
            disk, start, len, what, ..
        } = reading;
        let pages = match what {
            Wanted::Segment(segment, to) => {
                let origin = Origin::Disk {
                    tier: self.disks.all[disk].tier,
                    segment,
                    bytes,
                    is_encrypted: self.cipher.is_some(),
                };
                self.disks.all[to].queue.push_back((origin, crate::log::SEGMENT_HEADER));
                return;
            }
            Wanted::Pages(pages) => pages,
        };
        let read = &bytes[..len];
        let (wanted, mut ahead): (Vec<_>, Vec<_>) =
            pages.into_iter().partition(|(page, _)| self.waiting.contains_key(page));
        for (page, word) in wanted {
            if !self.is_read_no_more(page, word) {
                self.put_read(page, word, start, read);
            }
        }
        ahead.sort_unstable_by_key(|(page, _)| *page);
        self.put_ahead(ahead, start, read);
        self.disks.give_back(bytes);
    }

    /// Decodes a page from `read`, which begins at byte `start` of the log, as its entry `word` says. Returns true if
    /// the checksum is right.
    fn decode_read(&mut self, page: PageIndex, word: Word, start: u64, read: &[u8]) -> bool {
        self.is_read(page);
        let Some(Location::In { tier, stored, .. }) = word.decode() else {
            return false;
        };
        let at = (data_at(stored.place) - start) as usize;
        let data = at..at + usize::from(stored.len);
        let Some(cipher) = &self.cipher else {
            return self.decode(page, stored, &read[data]);
        };
        // Objects begin and end at block boundaries of the cipher.
        let object = (stored.place.bytes() - start) as usize;
        let enciphered = &read[object..object + object_bytes(stored.len)];
        let mut deciphered = std::mem::take(&mut self.deciphered);
        let whole = &mut deciphered[..enciphered.len()];
        whole.copy_from_slice(enciphered);
        cipher.decrypt(tier, stored.place.bytes(), whole);
        let is_sound = self.decode(page, stored, &whole[data.start - object..data.end - object]);
        self.deciphered = deciphered;
        is_sound
    }

    /// Puts a page in place that was read and that a thread waits for.
    fn put_read(&mut self, page: PageIndex, word: Word, start: u64, read: &[u8]) {
        let is_sound = self.decode_read(page, word, start, read);
        let Some(Waiting { since, write }) = self.waiting.remove(&page) else {
            return;
        };
        if !is_sound {
            self.lose(page, word, "its stored copy is damaged");
            return;
        }
        let put = self.fill_from_disk(page, word, write);
        self.answer(page, put, since, write);
    }

    /// Puts prefetched pages in place, in rising order, as far as there is room. The others are read again when they
    /// are wanted.
    fn put_ahead(&mut self, pages: Vec<(PageIndex, Word)>, start: u64, read: &[u8]) {
        let mut run: Vec<(PageIndex, Word)> = Vec::new();
        for (page, word) in pages {
            if self.is_read_no_more(page, word) {
                continue;
            }
            if !self.decode_read(page, word, start, read) {
                if self.is_leaving {
                    self.lose(page, word, "its stored copy is damaged");
                }
                continue;
            }
            self.figures.ahead += 1;
            if !self.is_leaving && (self.streams.is_marker(page) || !self.has_room_ahead()) {
                self.streams.keep(page, word, &self.content);
                continue;
            }
            self.add_ahead(&mut run, page, word);
        }
        self.fill_ahead(&run);
    }

    /// Adds a page, which was read to `content`, to the pages that are put in place together. If it does not follow
    /// them, puts those in place first.
    pub(in crate::pager) fn add_ahead(&mut self, run: &mut Vec<(PageIndex, Word)>, page: PageIndex, word: Word) {
        let goes_on = run.last().is_none_or(|(last, _)| last.plus(1) == page);
        if !goes_on || run.len() == AHEAD_PAGES {
            self.fill_ahead(run);
            run.clear();
        }
        let at = run.len() * PAGE;
        self.ahead[at..at + PAGE].copy_from_slice(&*self.content);
        run.push((page, word));
    }

    /// Puts consecutive pages in place from the buffer `ahead`, write-protected and clean. [`Self::fill_from_disk`]
    /// does the same for one page.
    pub(in crate::pager) fn fill_ahead(&mut self, run: &[(PageIndex, Word)]) {
        let protect = !self.are_evictions_paused;
        for (page, word) in run.iter().filter(|_| protect) {
            self.set_word(*page, word.with_clean(true));
        }
        let mut done = 0;
        while let Some((page, _)) = run.get(done) {
            let (filled, then) = self
                .guest
                .fill(*page, &self.ahead[done * PAGE..run.len() * PAGE], protect);
            for (page, _) in &run[done..done + filled] {
                let queue = self.queue_of_returned(*page);
                if !protect {
                    self.drop_copy(*page);
                }
                self.settle(*page, queue);
            }
            done += filled;
            match then {
                Filled::Done if filled > 0 => {}
                Filled::Present => {
                    let mut copy = [0; PAGE];
                    copy.copy_from_slice(&self.ahead[done * PAGE..(done + 1) * PAGE]);
                    self.found_in_memory(run[done].0, &copy, Queue::Probation, Source::Disk);
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
    fn is_read(&mut self, page: PageIndex) {
        self.phases.set(page, Phase::Absent);
        self.reading -= 1;
    }
}
