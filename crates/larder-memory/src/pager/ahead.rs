//! What to bring besides what is wanted: the pages behind it, if somebody goes through memory.
//!
//! A fault that goes on where pages were brought last is of a stream, and the more of them there were, the more pages
//! are brought with the next one. Of those that begin anew few are followed if few were gone on with lately.
//!
//! Nobody tells that a page that was brought is used. So of a stream that is read from a disk one page in the middle of
//! what was read is put by, and not in place: when it is wanted it is there, and what comes next is read before anybody
//! waits for it.

use std::collections::{HashMap, VecDeque};

use super::{Pager, Phase};
use crate::entry::{Location, Stored, Tier, Word};
use crate::guest::GuestMemory;
use crate::lists::Queue;
use crate::units::{PAGE, PAGE_BYTES, PageIndex, PageRun};
use crate::worker::Worker;

/// How many streams are known.
const STREAMS: usize = 64;
/// Pages that are brought with the first one of a stream: the more streams are gone on with, the more. And at most.
const FIRST: u32 = 4;
const FIRST_MOST: u32 = 16;
const MOST: u32 = 128;
/// Pages that were never touched are brought so many at a time at most.
const ZEROS_MAX: u32 = 32;
/// From so many on one is put by.
const PUT_BY_FROM: u32 = 16;
/// How many pages are put by at most.
const PUT_BY_MAX: usize = 2 * STREAMS;
/// A stream goes on if it leaves out so many pages at most.
const GAP: u32 = 16;
/// So many pages are brought from compressed RAM before faults are looked for again, and so many are put in place in one
/// call: who goes through them is not far behind.
const AT_ONCE: usize = 16;
const RUN_MAX: usize = 4;
/// Of so many streams it is remembered whether they were gone on with.
const REMEMBERED: u32 = 32;
/// If less than this share of them was, only each so-manieth new one is followed.
const WORTH_SHARE: u32 = 8;
const TRY_EACH: u32 = 16;

/// Pages that were brought one after the other.
#[derive(Clone, Copy)]
struct Stream {
    /// The page behind them.
    end: u32,
    count: u32,
    /// The one of them that is put by, or 0.
    put_by: u32,
}

/// What to bring behind a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Behind {
    first: u32,
    count: u32,
    /// The stream was known before.
    goes_on: bool,
}

/// Pages that may be wanted soon.
#[derive(Clone, Copy, Debug)]
pub(super) struct Soon {
    run: PageRun,
    /// Those that were never touched, too.
    zeros: bool,
}

/// The streams, that used last at the end.
pub(super) struct Streams {
    all: VecDeque<Stream>,
    /// Of the last ones, how many were gone on with, times [`REMEMBERED`]: a moving average.
    hits: u32,
    new: u32,
    /// What was put by, in the order of its coming, and what its entries said.
    put_by: VecDeque<PageIndex>,
    contents: HashMap<PageIndex, (Word, Box<[u8; PAGE]>)>,
}

impl Default for Streams {
    fn default() -> Self {
        Self {
            all: VecDeque::with_capacity(STREAMS),
            hits: REMEMBERED * REMEMBERED / 2,
            new: 0,
            put_by: VecDeque::new(),
            contents: HashMap::new(),
        }
    }
}

impl Streams {
    /// What to bring behind `page`, which is wanted.
    fn behind(&mut self, page: PageIndex) -> Option<Behind> {
        let at = page.get();
        let goes_on =
            |stream: &Stream| stream.put_by == at || (stream.end..stream.end.saturating_add(GAP)).contains(&at);
        let known = self.all.iter().position(goes_on);
        let (first, count) = match known {
            Some(index) => {
                self.remember(true);
                let stream = self.all.remove(index)?;
                let first = if stream.put_by == at { stream.end } else { at + 1 };
                (first, (stream.count * 2).clamp(FIRST, MOST))
            }
            None => {
                if self.all.len() == STREAMS && self.all.pop_front().is_some_and(|stream| stream.count > 0) {
                    self.remember(false);
                }
                self.new = self.new.wrapping_add(1);
                let is_worth_it = self.hits >= REMEMBERED * REMEMBERED / WORTH_SHARE;
                let most_go_on = self.hits >= REMEMBERED * REMEMBERED / 2;
                let count = match (is_worth_it, most_go_on) {
                    (_, true) => FIRST_MOST,
                    (true, _) => FIRST,
                    _ if self.new.is_multiple_of(TRY_EACH) => FIRST,
                    _ => 0,
                };
                (at + 1, count)
            }
        };
        let put_by = if count >= PUT_BY_FROM { first + count / 2 } else { 0 };
        let end = first.saturating_add(count);
        self.all.push_back(Stream { end, count, put_by });
        let goes_on = known.is_some();
        (count > 0).then_some(Behind { first, count, goes_on })
    }

    /// Whether this page is to be put by.
    pub(super) fn is_put_by(&self, page: PageIndex) -> bool {
        self.all.iter().any(|stream| stream.put_by == page.get())
    }

    /// Puts a page by.
    pub(super) fn put_by(&mut self, page: PageIndex, word: Word, content: &[u8; PAGE]) {
        if self.contents.len() == PUT_BY_MAX
            && let Some(oldest) = self.put_by.pop_front()
        {
            self.contents.remove(&oldest);
        }
        if self.contents.insert(page, (word, Box::new(*content))).is_none() {
            self.put_by.push_back(page);
        }
    }

    /// What was put by of a page whose entry says `word`.
    pub(super) fn take(&mut self, page: PageIndex, word: Word) -> Option<Box<[u8; PAGE]>> {
        let (of, content) = self.contents.remove(&page)?;
        self.put_by.retain(|other| *other != page);
        (of == word).then_some(content)
    }

    fn remember(&mut self, hit: bool) {
        self.hits -= self.hits / REMEMBERED;
        if hit {
            self.hits += REMEMBERED;
        }
    }
}

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    /// `page` has been wanted, and was brought, or is being read: what is behind it is brought, too, if that is worth it.
    /// If it had never been touched, so are others.
    pub(super) fn follow(&mut self, page: PageIndex, zeros: bool) {
        let Some(Behind { first, count, goes_on }) = self.streams.behind(page) else {
            return;
        };
        self.figures.streamed += u64::from(goes_on);
        // Who touches one may well leave the next ones alone, and they would take memory.
        if zeros && !goes_on {
            return;
        }
        let run = PageRun {
            first: PageIndex::new(first),
            count: if zeros { count.min(ZEROS_MAX) } else { count },
        };
        self.ahead.push_back(Soon { run, zeros });
        if self.ahead.len() > STREAMS {
            self.ahead.pop_front();
        }
    }

    /// Brings what was found worth it; whether there was something.
    pub(super) fn bring_ahead(&mut self) -> bool {
        let Some(Soon { run, zeros }) = self.ahead.pop_front() else {
            return false;
        };
        let Some(region) = self.regions.iter().find(|region| region.contains(run.first)) else {
            return true;
        };
        let end = (run.first.get() + run.count).min(region.first.get() + region.pages);
        self.read_what_is_ahead(run.first.get(), end);
        let mut brought = 0;
        for page in (run.first.get()..end).map(PageIndex::new) {
            if self.phases.get(page) != Phase::Absent {
                continue;
            }
            let word = self.state.word(page);
            let is_read = match word.decode() {
                Some(Location::In {
                    tier: Tier::Ram,
                    stored,
                    ..
                }) => self.has_room_ahead(0) && self.load_from_ram(page, stored),
                Some(Location::Nowhere) if zeros => {
                    self.content.fill(0);
                    true
                }
                Some(Location::Uniform { .. }) => {
                    self.load_uniform(page);
                    true
                }
                _ => false,
            };
            if is_read && self.has_room_ahead(0) {
                self.add_to_run(page, Word::NOWHERE);
                brought += 1;
            }
            if self.run_pages.len() == RUN_MAX {
                self.put_run();
            }
            if brought == AT_ONCE {
                let first = page.plus(1);
                if first.get() < end {
                    let count = end - first.get();
                    let run = PageRun { first, count };
                    self.ahead.push_front(Soon { run, zeros });
                }
                break;
            }
        }
        self.put_run();
        true
    }

    /// Has pages read that are on disks.
    fn read_what_is_ahead(&mut self, first: u32, end: u32) {
        let mut on_disk: Vec<(PageIndex, Word, Tier, Stored)> = Vec::new();
        for page in (first..end).map(PageIndex::new) {
            if self.phases.get(page) != Phase::Absent {
                continue;
            }
            let word = self.state.word(page);
            match word.decode() {
                Some(Location::In {
                    tier: tier @ (Tier::Ssd | Tier::Slow),
                    stored,
                    ..
                }) if self.has_room_ahead(on_disk.len()) => on_disk.push((page, word, tier, stored)),
                _ => {}
            }
        }
        self.read_ahead(on_disk);
    }

    /// Whether there is room for pages that nobody wants yet, besides so many.
    fn has_room_ahead(&self, besides: usize) -> bool {
        let coming = (besides + self.run_pages.len() + self.reading) as u64 * PAGE_BYTES;
        self.no_memory_until.is_none() && self.used_bytes() + coming < self.options.limit_bytes
    }

    /// The content that was read last is that of `page`, and is put in place with the next [`Self::put_run`]. With
    /// `copy` its entry goes on leading there.
    pub(super) fn add_to_run(&mut self, page: PageIndex, copy: Word) {
        let goes_on = self
            .run_pages
            .last()
            .is_none_or(|(last, of)| last.plus(1) == page && (*of == Word::NOWHERE) == (copy == Word::NOWHERE));
        if !goes_on {
            self.put_run();
        }
        self.run.extend_from_slice(&*self.content);
        self.run_pages.push((page, copy));
    }

    /// Puts pages in place that lie one after the other. What cannot be stays where it is.
    pub(super) fn put_run(&mut self) {
        let (run, pages) = (std::mem::take(&mut self.run), std::mem::take(&mut self.run_pages));
        if let Some((first, copy)) = pages.first() {
            let is_protected = *copy != Word::NOWHERE;
            let (filled, _) = self.guest.fill(*first, &run, is_protected);
            for (page, copy) in &pages[..filled.min(pages.len())] {
                self.settle(*page, Queue::Probation);
                if is_protected {
                    self.set_word(*page, copy.with_clean(true));
                } else {
                    self.drop_copy(*page);
                }
                self.figures.ahead += 1;
            }
        }
        (self.run, self.run_pages) = (run, pages);
        self.run.clear();
        self.run_pages.clear();
    }
}
