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
use crate::entry::{CopyLocation, EntryWord, StoredObject, Tier};
use crate::guest::GuestMemory;
use crate::resident_queues::ResidentQueue;
use crate::units::{PAGE, PAGE_BYTES, PageIndex, PageRun};
use crate::userfaultfd::FillResult;
use crate::worker::Worker;

/// Maximum number of streams.
const STREAMS_MAX: usize = 64;
/// Number of pages that are prefetched when a stream begins, and the maximum.
const STREAM_PAGES_MIN: u32 = 8;
const STREAM_PAGES_MAX: u32 = 32;
/// A stream continues if a fault skips fewer pages than this.
const STREAM_GAP_PAGES: u32 = 16;
/// Number of pages in the aligned group that has a wanted page and its neighbours.
const NEIGHBOUR_GROUP_PAGES: u32 = 16;
/// Maximum distance on a disk, in bytes, of pages that were evicted together.
const NEIGHBOUR_DISTANCE_BYTES_MAX: u64 = 64 << 10;
/// Sampling interval: one in this many faults with neighbours keeps one of them as a sample.
const SAMPLE_INTERVAL_FAULTS: u32 = 4;
/// Sampling interval while neighbours are not useful.
const SAMPLE_INTERVAL_FAULTS_USELESS: u32 = 32;
/// Neighbours are useful if more than one of this many samples is wanted.
const USED_SHARE_MIN: u32 = 3;
/// Neighbours count as useful until there are this many samples.
const SAMPLES_MIN: u32 = 32;
/// Number of samples after which both counts are halved.
const SAMPLES_HALVE_AT: u32 = 256;
/// Maximum number of buffered pages.
const BUFFERED_PAGES_MAX: usize = 256;

/// A sequence of pages that were wanted in order.
#[derive(Clone, Copy)]
struct Stream {
    direction: Option<StreamDirection>,
    /// The page after the prefetched ones, in the stream's direction. Before there is a direction, the wanted page.
    next: u32,
    count: u32,
    /// The marker in the middle of the prefetched pages. A fault on it prefetches the next ones.
    marker: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum StreamDirection {
    Upwards,
    Downwards,
}

impl Stream {
    /// Returns the direction of the stream if page number `at` belongs to it.
    fn direction_to(&self, at: u32) -> Option<StreamDirection> {
        if self.marker == Some(at) {
            return self.direction;
        }
        let (ahead, behind) = (at.wrapping_sub(self.next), self.next.wrapping_sub(at));
        match self.direction {
            Some(StreamDirection::Upwards) => (ahead < STREAM_GAP_PAGES).then_some(StreamDirection::Upwards),
            Some(StreamDirection::Downwards) => (behind < STREAM_GAP_PAGES).then_some(StreamDirection::Downwards),
            None if ahead < STREAM_GAP_PAGES => Some(StreamDirection::Upwards),
            None => (behind < STREAM_GAP_PAGES).then_some(StreamDirection::Downwards),
        }
    }
}

/// All streams, the most recently used last, and the buffered pages.
#[derive(Default)]
pub(super) struct Streams {
    all: VecDeque<Stream>,
    /// Buffered pages in order of arrival.
    buffered_order: VecDeque<PageIndex>,
    /// Buffered contents, with the first words of the pages' entries.
    buffered: HashMap<PageIndex, (EntryWord, Box<[u8; PAGE]>)>,
    neighbours: NeighbourStats,
}

/// Statistics on whether neighbours of wanted pages are used.
#[derive(Default)]
struct NeighbourStats {
    /// Number of faults that could prefetch neighbours.
    faults: u32,
    /// Pages that are samples, whether they are buffered already or not.
    samples: HashSet<PageIndex>,
    /// Numbers of samples that were wanted, and that were not.
    samples_used: u32,
    samples_unused: u32,
}

impl NeighbourStats {
    fn are_useful(&self) -> bool {
        let samples = self.samples_used + self.samples_unused;
        samples < SAMPLES_MIN || self.samples_used * USED_SHARE_MIN > samples
    }

    /// Counts a fault, and returns true if one of its neighbours is to be a sample.
    fn is_sample_due(&mut self) -> bool {
        self.faults = self.faults.wrapping_add(1);
        let every = match self.are_useful() {
            true => SAMPLE_INTERVAL_FAULTS,
            false => SAMPLE_INTERVAL_FAULTS_USELESS,
        };
        self.faults.is_multiple_of(every)
    }

    /// Makes `page` a sample: it is buffered when it has been read.
    fn sample(&mut self, page: PageIndex) {
        // Samples that never arrive are not reported here, so the set has a bound.
        if self.samples.len() == BUFFERED_PAGES_MAX {
            self.samples.clear();
        }
        self.samples.insert(page);
    }

    /// Counts a sample that is not buffered any more.
    fn record_sample(&mut self, page: PageIndex, is_used: bool) {
        if !self.samples.remove(&page) {
            return;
        }
        match is_used {
            true => self.samples_used += 1,
            false => self.samples_unused += 1,
        }
        if self.samples_used + self.samples_unused >= SAMPLES_HALVE_AT {
            self.samples_used /= 2;
            self.samples_unused /= 2;
        }
    }
}

impl Streams {
    /// Returns the pages to prefetch after a fault on `page`.
    fn next_run(&mut self, page: PageIndex) -> Option<PageRun> {
        let at = page.get();
        let found = self.all.iter().enumerate();
        let found = found.rev().find_map(|(index, stream)| Some((index, stream.direction_to(at)?)));
        let Some((index, direction)) = found else {
            if self.all.len() == STREAMS_MAX {
                self.all.pop_front();
            }
            self.all.push_back(Stream { direction: None, next: at, count: 0, marker: None });
            return None;
        };
        let stream = self.all.remove(index)?;
        let count = (stream.count * 2).clamp(STREAM_PAGES_MIN, STREAM_PAGES_MAX);
        // At a marker, the pages up to `next` are in memory or being read.
        let is_marker = stream.marker == Some(at);
        let (run, next) = match direction {
            StreamDirection::Upwards => {
                let first = if is_marker { stream.next } else { at.saturating_add(1) };
                let end = first.saturating_add(count);
                (first..end, end)
            }
            StreamDirection::Downwards => {
                let end = if is_marker { stream.next.saturating_add(1) } else { at };
                let first = end.saturating_sub(count);
                (first..end, first.saturating_sub(1))
            }
        };
        let count = run.end - run.start;
        self.all.push_back(Stream {
            direction: Some(direction),
            next,
            count,
            marker: (count > 1).then_some(run.start + count / 2),
        });
        let first = PageIndex::new(run.start);
        (count > 0).then_some(PageRun { first, count })
    }

    /// Returns true if `page` must be buffered, as the marker of a stream or as a sample.
    pub(super) fn must_buffer(&self, page: PageIndex) -> bool {
        self.all.iter().any(|stream| stream.marker == Some(page.get())) || self.neighbours.samples.contains(&page)
    }

    /// Buffers a page until it is wanted. Drops the oldest one if there are too many.
    pub(super) fn buffer(&mut self, page: PageIndex, word: EntryWord, content: &[u8; PAGE]) {
        if self.buffered.len() == BUFFERED_PAGES_MAX
            && let Some(oldest) = self.buffered_order.pop_front()
        {
            self.buffered.remove(&oldest);
            self.neighbours.record_sample(oldest, false);
        }
        if self.buffered.insert(page, (word, Box::new(*content))).is_none() {
            self.buffered_order.push_back(page);
        }
    }

    /// Returns true if `page` is buffered and its entry has not changed.
    fn is_buffered(&self, page: PageIndex, word: EntryWord) -> bool {
        self.buffered.get(&page).is_some_and(|(of, _)| *of == word)
    }

    /// Takes the buffered content of `page`, if its entry has not changed.
    pub(super) fn take(&mut self, page: PageIndex, word: EntryWord) -> Option<Box<[u8; PAGE]>> {
        let (of, content) = self.buffered.remove(&page)?;
        if let Some(index) = self.buffered_order.iter().position(|other| *other == page) {
            self.buffered_order.remove(index);
        }
        self.neighbours.record_sample(page, of == word);
        (of == word).then_some(content)
    }

    /// Returns the memory that buffered pages use, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.buffered.len() as u64 * PAGE_BYTES
    }
}

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    /// Prefetches the pages after `page` in its stream, if it has one, or else its neighbours. `page` was wanted, and
    /// was put in place or is being read.
    pub(super) fn prefetch_after(&mut self, page: PageIndex) {
        let Some(run) = self.streams.next_run(page) else {
            return self.prefetch_neighbours(page);
        };
        self.stats.stream_faults += 1;
        let Some(region) = self.regions.iter().find(|region| region.contains(run.first)) else {
            return;
        };
        let end = (run.first.get() + run.count).min(region.first.get() + region.pages);
        let mut on_disk: Vec<(PageIndex, EntryWord, Tier, StoredObject)> = Vec::new();
        let mut in_ram: Vec<(PageIndex, EntryWord)> = Vec::new();
        for page in (run.first.get()..end).map(PageIndex::new) {
            let word = self.state.word(page);
            if self.phases.get(page) != Phase::Absent || self.streams.is_buffered(page, word) {
                continue;
            }
            match word.decode() {
                Some(CopyLocation::InTier { tier: tier @ (Tier::Ssd | Tier::Slow), object: stored, .. })
                    if self.may_prefetch() =>
                {
                    on_disk.push((page, word, tier, stored))
                }
                Some(CopyLocation::InTier { tier: Tier::Ram, object: stored, .. })
                    if self.may_keep_copies()
                        && self.may_prefetch()
                        && !self.streams.must_buffer(page)
                        && self.load_from_ram(page, stored) =>
                {
                    self.add_prefetched(&mut in_ram, page, word);
                    self.stats.prefetched += 1;
                }
                _ => {}
            }
        }
        self.fill_prefetched(&in_ram);
        self.read_ahead(on_disk);
    }

    /// Reads the neighbours of `page` that were evicted with it. `page` was wanted, belongs to no stream, and is
    /// being read.
    fn prefetch_neighbours(&mut self, page: PageIndex) {
        if self.phases.get(page) != Phase::Reading || !self.may_prefetch() {
            return;
        }
        let Some(region) = self.regions.iter().find(|region| region.contains(page)) else {
            return;
        };
        let is_sampled = self.streams.neighbours.is_sample_due();
        let are_of_use = self.streams.neighbours.are_useful();
        if !is_sampled && !are_of_use {
            return;
        }
        let fault_word = self.state.word(page);
        let first = page.get() / NEIGHBOUR_GROUP_PAGES * NEIGHBOUR_GROUP_PAGES;
        let end = (first + NEIGHBOUR_GROUP_PAGES).min(region.first.get() + region.pages);
        let mut pages: Vec<(PageIndex, EntryWord, Tier, StoredObject)> = Vec::new();
        for page in (first.max(region.first.get())..end).map(PageIndex::new) {
            let word = self.state.word(page);
            if self.phases.get(page) == Phase::Absent
                && !self.streams.is_buffered(page, word)
                && let Some((tier, stored)) = evicted_together(fault_word, word)
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
    pub(super) fn prefetch_zeros_after(&mut self, page: PageIndex) {
        let Some(run) = self.zero_streams.next_run(page) else {
            return;
        };
        let Some(region) = self.regions.iter().find(|region| region.contains(run.first)) else {
            return;
        };
        let end = (run.first.get() + run.count).min(region.first.get() + region.pages);
        for page in (run.first.get()..end).map(PageIndex::new) {
            let is_zero = self.phases.get(page) == Phase::Absent && self.state.word(page) == EntryWord::NOT_STORED;
            if !is_zero {
                continue;
            }
            if !self.may_prefetch() || self.guest.fill_zero(page) != FillResult::Done {
                return;
            }
            self.enqueue(page, ResidentQueue::Probation);
            self.stats.prefetched_zero += 1;
        }
    }

    /// Returns true if compressed RAM may keep copies of pages that are in memory too. This needs a working disk: the
    /// copies are dropped when old segments are moved there.
    fn may_keep_copies(&self) -> bool {
        self.disks.all.first().is_some_and(|disk| !disk.has_failed())
    }

    /// Returns true if there is room for pages that no thread waits for.
    pub(super) fn may_prefetch(&self) -> bool {
        self.no_memory_until.is_none() && self.used_bytes() < self.options.limit_bytes
    }
}

/// Returns the location of the copy that `other` points to, if it is near the copy of `one` on the same disk. Such
/// pages were evicted one soon after the other.
fn evicted_together(one: EntryWord, other: EntryWord) -> Option<(Tier, StoredObject)> {
    let Some(CopyLocation::InTier { tier: of, object: near, .. }) = one.decode() else {
        return None;
    };
    let Some(CopyLocation::InTier { tier, object: stored, .. }) = other.decode() else {
        return None;
    };
    let distance = near.offset.bytes().abs_diff(stored.offset.bytes());
    (tier == of && tier != Tier::Ram && distance <= NEIGHBOUR_DISTANCE_BYTES_MAX).then_some((tier, stored))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffered_page_expires_with_its_entry() {
        let (page, content) = (PageIndex::new(7), [3; PAGE]);
        let mut streams = Streams::default();
        streams.buffer(page, EntryWord(0x13), &content);
        assert!(streams.is_buffered(page, EntryWord(0x13)) && !streams.is_buffered(page, EntryWord(0x23)));
        assert_eq!(streams.take(page, EntryWord(0x13)).as_deref(), Some(&content));
        streams.buffer(page, EntryWord(0x13), &content);
        assert_eq!(streams.take(page, EntryWord(0x23)), None);
        assert_eq!(streams.bytes(), 0, "a stale page is dropped");
    }

    #[test]
    fn unused_neighbours_stop_and_are_resampled() {
        let mut neighbours = NeighbourStats::default();
        let mut record_samples = |is_used: bool, times: u32| {
            for index in 0..times {
                neighbours.sample(PageIndex::new(index));
                neighbours.record_sample(PageIndex::new(index), is_used);
            }
            let sampled = (0..SAMPLE_INTERVAL_FAULTS_USELESS).filter(|_| neighbours.is_sample_due()).count();
            (neighbours.are_useful(), sampled)
        };
        assert_eq!(record_samples(false, SAMPLES_MIN - 1), (true, 8));
        assert_eq!(record_samples(false, 1), (false, 1));
        assert_eq!(record_samples(true, SAMPLES_MIN), (true, 8));
        assert_eq!(record_samples(false, 100 * SAMPLES_HALVE_AT), (false, 1));
        assert_eq!(record_samples(true, SAMPLES_HALVE_AT), (true, 8), "old samples expire");
    }
}
