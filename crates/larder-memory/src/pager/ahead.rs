//! What to bring besides what is wanted: the pages behind it, if somebody goes through memory.
//!
//! Two faults near each other begin a stream, upwards or downwards (compressed columns of databases are read from behind
//! as often as not). A fault that goes on where its pages were brought last has more of them brought with it, up to a
//! bound. What is touched here and there has nothing brought.
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
/// Pages that are brought when a stream begins, and at most.
const FIRST: u32 = 8;
const MOST: u32 = 32;
/// A stream goes on if it leaves out fewer pages than this.
const GAP: u32 = 16;
/// Pages that were never touched are brought so many at a time at most.
const ZEROS_MAX: u32 = 32;
/// From so many on one is put by.
const PUT_BY_FROM: u32 = 8;
/// How many pages are put by at most.
const PUT_BY_MAX: usize = 2 * STREAMS;
/// So many pages are brought from compressed RAM before faults are looked for again, and so many are put in place in one
/// call: who goes through them is not far behind.
const AT_ONCE: u32 = 16;
const RUN_MAX: usize = 4;
/// Pages that were wanted one after the other.
#[derive(Clone, Copy)]
struct Stream {
    way: Option<Way>,
    /// The page behind those that were brought; before there is a way, the page that was wanted.
    next: u32,
    count: u32,
    /// The one of them that is put by.
    put_by: Option<u32>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Way {
    Up,
    Down,
}

impl Stream {
    /// Which way it goes if the page with this number is of it.
    fn has(&self, at: u32) -> Option<Way> {
        if self.put_by == Some(at) {
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

/// The streams, that used last at the end.
#[derive(Default)]
pub(super) struct Streams {
    all: VecDeque<Stream>,
    /// What was put by, in the order of its coming, and what its entries said.
    put_by: VecDeque<PageIndex>,
    contents: HashMap<PageIndex, (Word, Box<[u8; PAGE]>)>,
}

/// Pages that may be wanted soon.
#[derive(Clone, Copy, Debug)]
pub(super) struct Soon {
    run: PageRun,
    way: Way,
    /// Those that were never touched, too.
    zeros: bool,
}

impl Streams {
    /// What to bring besides `page`, which is wanted, and on which way.
    fn of(&mut self, page: PageIndex) -> Option<(PageRun, Way)> {
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
                put_by: None,
            });
            return None;
        };
        let stream = self.all.remove(index)?;
        let count = (stream.count * 2).clamp(FIRST, MOST);
        // Of one that was put by the pages up to `next` are there, or on their way.
        let is_put_by = stream.put_by == Some(at);
        let (run, next) = match way {
            Way::Up => {
                let first = if is_put_by { stream.next } else { at.saturating_add(1) };
                let end = first.saturating_add(count);
                (first..end, end)
            }
            Way::Down => {
                let end = if is_put_by { stream.next.saturating_add(1) } else { at };
                let first = end.saturating_sub(count);
                (first..end, first.saturating_sub(1))
            }
        };
        let count = run.end - run.start;
        self.all.push_back(Stream {
            way: Some(way),
            next,
            count,
            put_by: (count >= PUT_BY_FROM).then_some(run.start + count / 2),
        });
        let first = PageIndex::new(run.start);
        (count > 0).then_some((PageRun { first, count }, way))
    }

    /// Whether this page is to be put by.
    pub(super) fn is_put_by(&self, page: PageIndex) -> bool {
        self.all.iter().any(|stream| stream.put_by == Some(page.get()))
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
}

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    /// `page` has been wanted, and was brought, or is being read: what is behind it is brought, too, if that is worth it.
    /// If it had never been touched, so are others.
    pub(super) fn follow(&mut self, page: PageIndex, zeros: bool) {
        let Some((mut run, way)) = self.streams.of(page) else {
            return;
        };
        self.figures.streamed += 1;
        if zeros && run.count > ZEROS_MAX {
            if way == Way::Down {
                run.first = run.first.plus(run.count - ZEROS_MAX);
            }
            run.count = ZEROS_MAX;
        }
        self.ahead.push_back(Soon { run, way, zeros });
        if self.ahead.len() > STREAMS {
            self.ahead.pop_front();
        }
    }

    /// Brings what was found worth it; whether there was something.
    pub(super) fn bring_ahead(&mut self) -> bool {
        let Some(Soon { run, way, zeros }) = self.ahead.pop_front() else {
            return false;
        };
        let Some(region) = self.regions.iter().find(|region| region.contains(run.first)) else {
            return true;
        };
        let end = (run.first.get() + run.count).min(region.first.get() + region.pages);
        let pages = run.first.get()..end;
        self.read_what_is_ahead(pages.clone());
        // A part of them now, those that are wanted first.
        let part = match way {
            Way::Up => pages.start..pages.end.min(pages.start + AT_ONCE),
            Way::Down => pages.start.max(pages.end.saturating_sub(AT_ONCE))..pages.end,
        };
        let rest = match way {
            Way::Up => part.end..pages.end,
            Way::Down => pages.start..part.start,
        };
        if !rest.is_empty() {
            let run = PageRun {
                first: PageIndex::new(rest.start),
                count: rest.end - rest.start,
            };
            self.ahead.push_front(Soon { run, way, zeros });
        }
        for page in part.map(PageIndex::new) {
            if self.phases.get(page) != Phase::Absent || !self.has_room_ahead(0) {
                continue;
            }
            let is_read = match self.state.word(page).decode() {
                Some(Location::In {
                    tier: Tier::Ram,
                    stored,
                    ..
                }) => self.load_from_ram(page, stored),
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
            if is_read {
                self.add_to_run(page, Word::NOWHERE);
            }
            if self.run_pages.len() == RUN_MAX {
                self.put_run();
            }
        }
        self.put_run();
        true
    }

    /// Has pages read that are on disks.
    fn read_what_is_ahead(&mut self, pages: std::ops::Range<u32>) {
        let mut on_disk: Vec<(PageIndex, Word, Tier, Stored)> = Vec::new();
        for page in pages.map(PageIndex::new) {
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
                let queue = match self.state.word(*page).decode() {
                    Some(Location::In { .. }) => self.queue_of_returned(*page),
                    _ => Queue::Probation,
                };
                self.settle(*page, queue);
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
