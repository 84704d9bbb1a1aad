//! Prefetching: pages that follow a wanted page in a stream, or else neighbours that were evicted with it.
//!
//! Two faults near each other begin a stream, upwards or downwards (databases often read compressed columns
//! backwards). A fault that continues a stream doubles the number of pages to prefetch, up to a bound. Random faults
//! prefetch no stream.
//!
//! Prefetched pages are put in the process's memory, write-protected. One page in the middle of each read is the
//! marker: it stays in a buffer of the pager until it is touched, which shows that the stream continues. The process
//! may have given up a prefetched page a moment ago, in a message that is not read yet: `given_up` then removes the
//! page again.
//!
//! Pages that were never written to form streams, too. Zeros are put in place after the wanted page.
//!
//! For a wanted page outside any stream, its neighbours are read from the disk if they were evicted together with it,
//! because they are close to it on the disk and cost little. The kernel does not report whether neighbours are used,
//! so now and then one is kept in a buffer as a sample. A sample is either wanted soon, or was prefetched in vain.
//! While too many samples are in vain, only samples are prefetched.

use std::collections::{HashMap, HashSet, VecDeque};

use super::{Pager, Phase};
use crate::entry::{Location, Stored, Tier, Word};
use crate::guest::GuestMemory;
use crate::lists::Queue;
use crate::units::{PAGE, PAGE_BYTES, PageIndex, PageRun};
use crate::userfaultfd::Filled;
use crate::worker::Worker;

/// Maximum number of streams.
const STREAMS: usize = 64;
/// Number of pages that are prefetched when a stream begins, and the maximum.
const FIRST: u32 = 8;
const MOST: u32 = 32;
/// A stream continues if a fault skips fewer pages than this.
const GAP: u32 = 16;
/// Number of pages in the aligned group that has a wanted page and its neighbours.
const NEIGHBOURS: u32 = 16;
/// Maximum distance on a disk, in bytes, of pages that were evicted together.
const TOGETHER: u64 = 64 << 10;
/// Sampling interval: one in this many faults with neighbours keeps one of them as a sample.
const SAMPLE_EVERY: u32 = 4;
/// Sampling interval while neighbours are not useful.
const SAMPLE_USELESS_EVERY: u32 = 32;
/// Neighbours are useful if more than one of this many samples is wanted.
const USED_SHARE: u32 = 3;
/// Neighbours count as useful until there are this many samples.
const SAMPLES_MIN: u32 = 32;
/// Number of samples after which both counts are halved.
const SAMPLES_HALVED: u32 = 256;
/// Maximum number of buffered pages.
const KEPT_MAX: usize = 256;

/// A sequence of pages that were wanted in order.
#[derive(Clone, Copy)]
struct Stream {
    way: Option<Way>,
    /// The page after the prefetched ones, in the stream's direction. Before there is a direction, the wanted page.
    next: u32,
    count: u32,
    /// The marker in the middle of the prefetched pages. A fault on it prefetches the next ones.
    middle: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Up,
    Down,
}

impl Stream {
    /// Returns the direction of the stream if page number `at` belongs to it.
    fn has(&self, at: u32) -> Option<Way> {
        if self.middle == Some(at) {
            return self.way;
        }
        let (ahead, behind) = (at.wrapping_sub(self.next), self.next.wrapping_sub(at));
        match self.way {
            Some(Way::Up) => (ahead < GAP).then_some(Way::Up),
            Some(Way::Down) => (behind < GAP).then_some(Way::Down),
            None if ahead < GAP => Some(Way::Up),
            None => (behind < GAP).then_some(Way::Down),
        }
    }
}

/// All streams, the most recently used last, and the buffered pages.
#[derive(Default)]
pub(super) struct Streams {
    all: VecDeque<Stream>,
    /// Buffered pages in order of arrival.
    kept: VecDeque<PageIndex>,
    /// Buffered contents, with the first words of the pages' entries.
    contents: HashMap<PageIndex, (Word, Box<[u8; PAGE]>)>,
    neighbours: Neighbours,
}

/// Statistics on whether neighbours of wanted pages are used.
#[derive(Default)]
struct Neighbours {
    /// Number of faults that could prefetch neighbours.
    faults: u32,
    /// Pages that are samples, whether they are buffered already or not.
    samples: HashSet<PageIndex>,
    /// Numbers of samples that were wanted, and that were not.
    used: u32,
    in_vain: u32,
}

impl Neighbours {
    fn are_of_use(&self) -> bool {
        let seen = self.used + self.in_vain;
        seen < SAMPLES_MIN || self.used * USED_SHARE > seen
    }

    /// Counts a fault, and returns true if one of its neighbours is to be a sample.
    fn are_to_be_sampled(&mut self) -> bool {
        self.faults = self.faults.wrapping_add(1);
        let every = match self.are_of_use() {
            true => SAMPLE_EVERY,
            false => SAMPLE_USELESS_EVERY,
        };
        self.faults.is_multiple_of(every)
    }

    /// Makes `page` a sample: it is buffered when it has been read.
    fn sample(&mut self, page: PageIndex) {
        // Samples that never arrive are not reported here, so the set has a bound.
        if self.samples.len() == KEPT_MAX {
            self.samples.clear();
        }
        self.samples.insert(page);
    }

    /// Counts a sample that is not buffered any more.
    fn learn(&mut self, page: PageIndex, is_used: bool) {
        if !self.samples.remove(&page) {
            return;
        }
        match is_used {
            true => self.used += 1,
            false => self.in_vain += 1,
        }
        if self.used + self.in_vain >= SAMPLES_HALVED {
            self.used /= 2;
            self.in_vain /= 2;
        }
    }
}

impl Streams {
    /// Returns the pages to prefetch after a fault on `page`.
    fn of(&mut self, page: PageIndex) -> Option<PageRun> {
        let at = page.get();
        let found = self.all.iter().enumerate();
        let found = found.rev().find_map(|(index, stream)| Some((index, stream.has(at)?)));
        let Some((index, way)) = found else {
            if self.all.len() == STREAMS {
                self.all.pop_front();
            }
            self.all.push_back(Stream {
                way: None,
                next: at,
                count: 0,
                middle: None,
            });
            return None;
        };
        let stream = self.all.remove(index)?;
        let count = (stream.count * 2).clamp(FIRST, MOST);
        // At a marker, the pages up to `next` are in memory or being read.
        let is_middle = stream.middle == Some(at);
        let (run, next) = match way {
            Way::Up => {
                let first = if is_middle { stream.next } else { at.saturating_add(1) };
                let end = first.saturating_add(count);
                (first..end, end)
            }
            Way::Down => {
                let end = if is_middle { stream.next.saturating_add(1) } else { at };
                let first = end.saturating_sub(count);
                (first..end, first.saturating_sub(1))
            }
        };
        let count = run.end - run.start;
        self.all.push_back(Stream {
            way: Some(way),
            next,
            count,
            middle: (count > 1).then_some(run.start + count / 2),
        });
        let first = PageIndex::new(run.start);
        (count > 0).then_some(PageRun { first, count })
    }

    /// Returns true if `page` must be buffered, as the marker of a stream or as a sample.
    pub(super) fn is_marker(&self, page: PageIndex) -> bool {
        self.all.iter().any(|stream| stream.middle == Some(page.get())) || self.neighbours.samples.contains(&page)
    }

    /// Buffers a page until it is wanted. Drops the oldest one if there are too many.
    pub(super) fn keep(&mut self, page: PageIndex, word: Word, content: &[u8; PAGE]) {
        if self.contents.len() == KEPT_MAX
            && let Some(oldest) = self.kept.pop_front()
        {
            self.contents.remove(&oldest);
            self.neighbours.learn(oldest, false);
        }
        if self.contents.insert(page, (word, Box::new(*content))).is_none() {
            self.kept.push_back(page);
        }
    }

    /// Returns true if `page` is buffered and its entry has not changed.
    fn has(&self, page: PageIndex, word: Word) -> bool {
        self.contents.get(&page).is_some_and(|(of, _)| *of == word)
    }

    /// Takes the buffered content of `page`, if its entry has not changed.
    pub(super) fn take(&mut self, page: PageIndex, word: Word) -> Option<Box<[u8; PAGE]>> {
        let (of, content) = self.contents.remove(&page)?;
        if let Some(index) = self.kept.iter().position(|other| *other == page) {
            self.kept.remove(index);
        }
        self.neighbours.learn(page, of == word);
        (of == word).then_some(content)
    }

    /// Returns the memory that buffered pages use, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.contents.len() as u64 * PAGE_BYTES
    }
}

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    /// Prefetches the pages after `page` in its stream, if it has one, or else its neighbours. `page` was wanted, and
    /// was put in place or is being read.
    pub(super) fn follow(&mut self, page: PageIndex) {
        let Some(run) = self.streams.of(page) else {
            return self.bring_neighbours(page);
        };
        self.figures.streamed += 1;
        let Some(region) = self.regions.iter().find(|region| region.contains(run.first)) else {
            return;
        };
        let end = (run.first.get() + run.count).min(region.first.get() + region.pages);
        let mut on_disk: Vec<(PageIndex, Word, Tier, Stored)> = Vec::new();
        let mut in_ram: Vec<(PageIndex, Word)> = Vec::new();
        for page in (run.first.get()..end).map(PageIndex::new) {
            let word = self.state.word(page);
            if self.phases.get(page) != Phase::Absent || self.streams.has(page, word) {
                continue;
            }
            match word.decode() {
                Some(Location::In {
                    tier: tier @ (Tier::Ssd | Tier::Slow),
                    stored,
                    ..
                }) if self.has_room_ahead() => on_disk.push((page, word, tier, stored)),
                Some(Location::In {
                    tier: Tier::Ram,
                    stored,
                    ..
                }) if self.may_keep_copies()
                    && self.has_room_ahead()
                    && !self.streams.is_marker(page)
                    && self.load_from_ram(page, stored) =>
                {
                    self.add_ahead(&mut in_ram, page, word);
                    self.figures.ahead += 1;
                }
                _ => {}
            }
        }
        self.fill_ahead(&in_ram);
        self.read_ahead(on_disk);
    }

    /// Reads the neighbours of `page` that were evicted with it. `page` was wanted, belongs to no stream, and is
    /// being read.
    fn bring_neighbours(&mut self, page: PageIndex) {
        if self.phases.get(page) != Phase::Reading || !self.has_room_ahead() {
            return;
        }
        let Some(region) = self.regions.iter().find(|region| region.contains(page)) else {
            return;
        };
        let is_sampled = self.streams.neighbours.are_to_be_sampled();
        let are_of_use = self.streams.neighbours.are_of_use();
        if !is_sampled && !are_of_use {
            return;
        }
        let wanted = self.state.word(page);
        let first = page.get() / NEIGHBOURS * NEIGHBOURS;
        let end = (first + NEIGHBOURS).min(region.first.get() + region.pages);
        let mut pages: Vec<(PageIndex, Word, Tier, Stored)> = Vec::new();
        for page in (first.max(region.first.get())..end).map(PageIndex::new) {
            let word = self.state.word(page);
            if self.phases.get(page) == Phase::Absent
                && !self.streams.has(page, word)
                && let Some((tier, stored)) = evicted_together(wanted, word)
            {
                pages.push((page, word, tier, stored));
            }
        }
        if is_sampled && !pages.is_empty() {
            let sample = pages.swap_remove(page.as_usize() % pages.len());
            self.streams.neighbours.sample(sample.0);
            if !are_of_use {
                pages.clear();
            }
            pages.push(sample);
        }
        self.read_ahead(pages);
    }

    /// Puts zeros in place after `page` if it continues a stream. `page` was never written to, was wanted, and was
    /// put in place.
    pub(super) fn follow_zero(&mut self, page: PageIndex) {
        let Some(run) = self.zero_streams.of(page) else {
            return;
        };
        let Some(region) = self.regions.iter().find(|region| region.contains(run.first)) else {
            return;
        };
        let end = (run.first.get() + run.count).min(region.first.get() + region.pages);
        for page in (run.first.get()..end).map(PageIndex::new) {
            let is_zero = self.phases.get(page) == Phase::Absent && self.state.word(page) == Word::NOWHERE;
            if !is_zero {
                continue;
            }
            if !self.has_room_ahead() || self.guest.fill_zero(page) != Filled::Done {
                return;
            }
            self.settle(page, Queue::Probation);
            self.figures.ahead_zero += 1;
        }
    }

    /// Returns true if compressed RAM may keep copies of pages that are in memory too. This needs a working disk: the
    /// copies are dropped when old segments are moved there.
    fn may_keep_copies(&self) -> bool {
        self.disks.all.first().is_some_and(|disk| !disk.has_failed())
    }

    /// Returns true if there is room for pages that no thread waits for.
    pub(super) fn has_room_ahead(&self) -> bool {
        self.no_memory_until.is_none() && self.used_bytes() < self.options.limit_bytes
    }
}

/// Returns the location of the copy that `other` points to, if it is near the copy of `one` on the same disk. Such
/// pages were evicted one soon after the other.
fn evicted_together(one: Word, other: Word) -> Option<(Tier, Stored)> {
    let Some(Location::In {
        tier: of, stored: near, ..
    }) = one.decode()
    else {
        return None;
    };
    let Some(Location::In { tier, stored, .. }) = other.decode() else {
        return None;
    };
    let apart = near.place.bytes().abs_diff(stored.place.bytes());
    (tier == of && tier != Tier::Ram && apart <= TOGETHER).then_some((tier, stored))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffered_page_expires_with_its_entry() {
        let (page, content) = (PageIndex::new(7), [3; PAGE]);
        let mut streams = Streams::default();
        streams.keep(page, Word(0x13), &content);
        assert!(streams.has(page, Word(0x13)) && !streams.has(page, Word(0x23)));
        assert_eq!(streams.take(page, Word(0x13)).as_deref(), Some(&content));
        streams.keep(page, Word(0x13), &content);
        assert_eq!(streams.take(page, Word(0x23)), None);
        assert_eq!(streams.bytes(), 0, "a stale page is dropped");
    }

    #[test]
    fn unused_neighbours_stop_and_are_resampled() {
        let mut neighbours = Neighbours::default();
        let mut see = |is_used: bool, times: u32| {
            for index in 0..times {
                neighbours.sample(PageIndex::new(index));
                neighbours.learn(PageIndex::new(index), is_used);
            }
            let sampled = (0..SAMPLE_USELESS_EVERY)
                .filter(|_| neighbours.are_to_be_sampled())
                .count();
            (neighbours.are_of_use(), sampled)
        };
        assert_eq!(see(false, SAMPLES_MIN - 1), (true, 8));
        assert_eq!(see(false, 1), (false, 1));
        assert_eq!(see(true, SAMPLES_MIN), (true, 8));
        assert_eq!(see(false, 100 * SAMPLES_HALVED), (false, 1));
        assert_eq!(see(true, SAMPLES_HALVED), (true, 8), "old samples expire");
    }
}
