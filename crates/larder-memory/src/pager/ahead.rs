//! What to bring besides what is wanted: the pages behind it, if somebody goes through memory, or else those around it that
//! were evicted with it.
//!
//! Two faults near each other begin a stream, upwards or downwards (compressed columns of databases are read from behind
//! as often as not). A fault that goes on where its pages were brought last has more of them brought with it, up to a
//! bound. What is touched here and there has nothing brought.
//!
//! They are put in the process's memory, write-protected, but for one in the middle of each read: that is kept in memory of
//! ours until it is touched, which tells that the stream goes on. What is put in place so may have been given up a
//! moment ago, and nobody has said so yet: `given_up` takes it out again.
//!
//! Pages that nobody has ever written to come in streams, too: zeros are put in place behind the one that is wanted.
//!
//! Around a page that is wanted out of order its neighbours come from the disk, if they were evicted with it: they lie
//! together there, and are read for little more. Whether they are of any use the kernel does not tell, so now and then one
//! of them is kept beside instead: it is wanted soon, or it was read in vain. While too many of those are in vain no
//! neighbours come but these.

use std::collections::{HashMap, HashSet, VecDeque};

use super::{Pager, Phase};
use crate::entry::{Location, Stored, Tier, Word};
use crate::guest::GuestMemory;
use crate::lists::Queue;
use crate::units::{PAGE, PAGE_BYTES, PageIndex, PageRun};
use crate::userfaultfd::Filled;
use crate::worker::Worker;

/// How many streams are known.
const STREAMS: usize = 64;
/// Pages that are brought when a stream begins, and at most.
const FIRST: u32 = 8;
const MOST: u32 = 32;
/// A stream goes on if it leaves out fewer pages than this.
const GAP: u32 = 16;
/// Pages around one that is wanted out of order.
const NEIGHBOURS: u32 = 16;
/// So many bytes apart on a disk pages were evicted together.
const TOGETHER: u64 = 64 << 10;
/// Of the neighbours that one fault brings one is kept beside so often: one of so many times.
const SAMPLE_EVERY: u32 = 4;
/// The same while neighbours are of no use.
const SAMPLE_USELESS_EVERY: u32 = 32;
/// Neighbours are of use if more than one of so many that were kept beside is wanted.
const USED_SHARE: u32 = 3;
/// Until this many were kept beside they are.
const SAMPLES_MIN: u32 = 32;
/// After so many what was seen counts half.
const SAMPLES_HALVED: u32 = 256;
/// How many pages are kept beside at most.
const KEPT_MAX: usize = 256;

/// Pages that were wanted one after the other.
#[derive(Clone, Copy)]
struct Stream {
    way: Option<Way>,
    /// The page behind those that were brought; before there is a way, the page that was wanted.
    next: u32,
    count: u32,
    /// The one in their middle: when it is wanted, it is time for the next ones.
    middle: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Up,
    Down,
}

impl Stream {
    /// Which way it goes if the page with this number is of it.
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

/// The streams, that used last at the end, and what was brought for them.
#[derive(Default)]
pub(super) struct Streams {
    all: VecDeque<Stream>,
    /// In the order of their coming.
    kept: VecDeque<PageIndex>,
    /// With what their entries said.
    contents: HashMap<PageIndex, (Word, Box<[u8; PAGE]>)>,
    neighbours: Neighbours,
}

/// Whether what lies around a page is of use.
#[derive(Default)]
struct Neighbours {
    /// Faults that have brought some, or could have.
    faults: u32,
    /// Those that are to be kept beside, or are.
    samples: HashSet<PageIndex>,
    /// How many of those were wanted, and how many were not.
    used: u32,
    in_vain: u32,
}

impl Neighbours {
    fn are_of_use(&self) -> bool {
        let seen = self.used + self.in_vain;
        seen < SAMPLES_MIN || self.used * USED_SHARE > seen
    }

    /// Whether one is to be kept beside this time.
    fn are_to_be_sampled(&mut self) -> bool {
        self.faults = self.faults.wrapping_add(1);
        let every = match self.are_of_use() {
            true => SAMPLE_EVERY,
            false => SAMPLE_USELESS_EVERY,
        };
        self.faults.is_multiple_of(every)
    }

    /// Keeps `page` beside, when it comes.
    fn sample(&mut self, page: PageIndex) {
        // Of some that never came nobody has told.
        if self.samples.len() == KEPT_MAX {
            self.samples.clear();
        }
        self.samples.insert(page);
    }

    /// What was kept beside is not any more.
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
    /// What to bring besides `page`, which is wanted.
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
        // At the middle of some the pages up to `next` are there, or on their way.
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

    /// Whether it is to be told when `page` is wanted: to a stream, or because neighbours are.
    pub(super) fn is_marker(&self, page: PageIndex) -> bool {
        self.all.iter().any(|stream| stream.middle == Some(page.get())) || self.neighbours.samples.contains(&page)
    }

    /// Keeps a page until it is wanted.
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

    /// Whether a page is kept whose entry says `word`.
    fn has(&self, page: PageIndex, word: Word) -> bool {
        self.contents.get(&page).is_some_and(|(of, _)| *of == word)
    }

    /// What is kept of a page whose entry says `word`.
    pub(super) fn take(&mut self, page: PageIndex, word: Word) -> Option<Box<[u8; PAGE]>> {
        let (of, content) = self.contents.remove(&page)?;
        if let Some(index) = self.kept.iter().position(|other| *other == page) {
            self.kept.remove(index);
        }
        self.neighbours.learn(page, of == word);
        (of == word).then_some(content)
    }

    /// What is taken of memory, in bytes.
    pub(super) fn bytes(&self) -> u64 {
        self.contents.len() as u64 * PAGE_BYTES
    }
}

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    /// `page` has been wanted, and was brought, or is being read: what is behind it is brought, too, if that is worth it.
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

    /// `page` has been wanted, of no stream: if it is being read, those around it are, too, that were evicted with it.
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

    /// `page`, of zeros that nobody has written to, has been wanted, and was put in place: so are those behind it, if that
    /// is worth it.
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

    /// Whether compressed RAM may have copies of pages that are in memory, too: where it makes room by sending what is old
    /// away, they are dropped.
    fn may_keep_copies(&self) -> bool {
        self.disks.all.first().is_some_and(|disk| !disk.has_failed())
    }

    /// Whether there is room for pages that nobody wants yet.
    pub(super) fn has_room_ahead(&self) -> bool {
        self.no_memory_until.is_none() && self.used_bytes() < self.options.limit_bytes
    }
}

/// Where the copy is to which `other` leads, if it and that of `one` were made one soon after the other: they lie together
/// on a disk.
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
    fn what_is_kept_of_a_page_is_good_only_as_long_as_its_entry_says_the_same() {
        let (page, content) = (PageIndex::new(7), [3; PAGE]);
        let mut streams = Streams::default();
        streams.keep(page, Word(0x13), &content);
        assert!(streams.has(page, Word(0x13)) && !streams.has(page, Word(0x23)));
        assert_eq!(streams.take(page, Word(0x13)).as_deref(), Some(&content));
        streams.keep(page, Word(0x13), &content);
        assert_eq!(streams.take(page, Word(0x23)), None);
        assert_eq!(streams.bytes(), 0, "it will never be good again");
    }

    #[test]
    fn neighbours_that_nobody_wants_stop_coming_and_are_tried_again() {
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
        assert_eq!(see(true, SAMPLES_HALVED), (true, 8), "it was long ago");
    }
}
