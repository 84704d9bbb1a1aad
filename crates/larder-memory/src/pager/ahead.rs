//! What to bring besides what is wanted: the pages behind it, if somebody goes through memory.
//!
//! A fault that goes on where pages were brought last is of a stream, and the more of them there were, the more pages
//! are brought with the next one. Of those that begin anew few are followed if few were gone on with lately.

use std::collections::VecDeque;

use super::{Pager, Phase};
use crate::entry::{Location, Stored, Tier, Word};
use crate::guest::GuestMemory;
use crate::lists::Queue;
use crate::units::{PAGE_BYTES, PageIndex, PageRun};
use crate::worker::Worker;

/// How many streams are known.
const STREAMS: usize = 32;
/// Pages that are brought with the first one of a stream, and at most.
const FIRST: u32 = 4;
const MOST: u32 = 128;
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
}

/// The streams, that used last at the end.
pub(super) struct Streams {
    all: VecDeque<Stream>,
    /// Of the last ones, how many were gone on with, times [`REMEMBERED`]: a moving average.
    hits: u32,
    new: u32,
}

impl Default for Streams {
    fn default() -> Self {
        Self {
            all: VecDeque::with_capacity(STREAMS),
            hits: REMEMBERED * REMEMBERED / 2,
            new: 0,
        }
    }
}

impl Streams {
    /// How many pages to bring behind `page`, which is wanted.
    fn behind(&mut self, page: PageIndex) -> u32 {
        let at = page.get();
        let goes_on = |stream: &Stream| (stream.end..stream.end.saturating_add(GAP)).contains(&at);
        let count = match self.all.iter().position(goes_on) {
            Some(index) => {
                self.remember(true);
                let stream = self.all.remove(index);
                stream.map_or(FIRST, |stream| (stream.count * 2).clamp(FIRST, MOST))
            }
            None => {
                if self.all.len() == STREAMS && self.all.pop_front().is_some_and(|stream| stream.count > 0) {
                    self.remember(false);
                }
                self.new = self.new.wrapping_add(1);
                let is_worth_it = self.hits >= REMEMBERED * REMEMBERED / WORTH_SHARE;
                if is_worth_it || self.new.is_multiple_of(TRY_EACH) {
                    FIRST
                } else {
                    0
                }
            }
        };
        self.all.push_back(Stream {
            end: at.saturating_add(1 + count),
            count,
        });
        count
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
    pub(super) fn follow(&mut self, page: PageIndex) {
        let count = self.streams.behind(page);
        if count > 0 {
            let first = page.plus(1);
            self.ahead.push_back(PageRun { first, count });
        }
    }

    /// Brings what was found worth it; whether there was something.
    pub(super) fn bring_ahead(&mut self) -> bool {
        let Some(run) = self.ahead.pop_front() else {
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
            // Those that are one word all over are had for little when they are wanted.
            if let Some(Location::In {
                tier: Tier::Ram,
                stored,
                ..
            }) = self.state.word(page).decode()
            {
                if brought == AT_ONCE {
                    let count = end - page.get();
                    self.ahead.push_front(PageRun { first: page, count });
                    break;
                }
                if !self.has_room_ahead(0) {
                    break;
                }
                if self.load_from_ram(page, stored) {
                    self.add_to_run(page, Word::NOWHERE);
                    brought += 1;
                }
                if self.run_pages.len() == RUN_MAX {
                    self.put_run();
                }
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
