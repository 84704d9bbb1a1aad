//! The allowed content of each page: the process's last write, or zeros after a discard. The oracle knows nothing of
//! the pager.

use std::time::Duration;

use larder_memory::pager::HOLE_REPORT_DELAY_MAX;
use larder_memory::units::PageIndex;

use super::content::{self, PageWords, Stamp};

/// Reason for which a page may be unreadable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Damage {
    /// The page must be readable.
    None,
    /// The stored copy was damaged, or could not be read.
    Real,
    /// The stored copy was damaged or unreadable, but the page was discarded since. It becomes readable once the
    /// pager is idle.
    GivenUp,
}

struct PageTruth {
    /// Allowed contents.
    may: Vec<Stamp>,
    /// True if the page is being discarded.
    is_given_up: bool,
    /// Time at which the discard began.
    since: Duration,
    /// True if the discard goes unnoticed because the pager has detached, although it has waited for the report for
    /// as long as it promises to. The page may then keep its content.
    is_unheard: bool,
    /// Last write since the discard began.
    written: Option<Stamp>,
    damage: Damage,
    /// Content that a device is writing to the page.
    io: Option<Stamp>,
}

/// Allowed content of all pages.
#[derive(Default)]
pub(super) struct Oracle {
    pages: Vec<PageTruth>,
    numbers: u64,
}

impl Oracle {
    /// Adds zeroed pages.
    pub(super) fn grow(&mut self, pages: u32) {
        self.pages.extend((0..pages).map(|_| PageTruth {
            may: vec![0],
            is_given_up: false,
            since: Duration::ZERO,
            is_unheard: false,
            written: None,
            damage: Damage::None,
            io: None,
        }));
    }

    /// Returns a new stamp.
    pub(super) fn stamp(&mut self, kind: content::Kind) -> Stamp {
        self.numbers += 1;
        content::stamp(self.numbers, kind)
    }

    /// Returns whether there is neither a discard nor device I/O of `page`.
    pub(super) fn is_quiet(&self, page: PageIndex) -> bool {
        let truth = &self.pages[page.as_usize()];
        !truth.is_given_up && truth.io.is_none()
    }

    /// Returns whether a device is writing to the page.
    pub(super) fn has_device_write(&self, page: PageIndex) -> bool {
        self.pages[page.as_usize()].io.is_some()
    }

    /// Checks content that the process has read. Returns its stamp.
    pub(super) fn read(&mut self, page: PageIndex, words: &PageWords) -> Result<Stamp, String> {
        let truth = &mut self.pages[page.as_usize()];
        let Some(found) = truth.may.iter().copied().find(|write_id| content::is(words, *write_id)) else {
            let what = match self.write_id_of(words) {
                Some(0) => "zeros".to_owned(),
                Some(write_id) => format!("write {write_id}"),
                None => format!("{:x?}..., which was never written", &words[..4]),
            };
            let truth = &self.pages[page.as_usize()];
            return Err(format!(
                "{page:?} reads as {what}, but may only hold {:?} (0: zeros){}",
                truth.may,
                if truth.is_given_up { "; it is being discarded" } else { "" }
            ));
        };
        if !truth.is_given_up && truth.io.is_none() {
            truth.may.clear();
            truth.may.push(found);
        }
        Ok(found)
    }

    fn write_id_of(&self, words: &PageWords) -> Option<Stamp> {
        let mut all = (1..=self.numbers).flat_map(|number| {
            [content::Kind::Random, content::Kind::Structured, content::Kind::Uniform]
                .map(|kind| content::stamp(number, kind))
        });
        if content::is(words, 0) {
            return Some(0);
        }
        all.find(|stamp| content::is(words, *stamp))
    }

    /// Records the process's write.
    pub(super) fn written(&mut self, page: PageIndex, stamp: Stamp) {
        let truth = &mut self.pages[page.as_usize()];
        truth.may.clear();
        truth.may.push(stamp);
        truth.damage = Damage::None;
        if truth.is_given_up {
            truth.may.push(0);
            truth.written = Some(stamp);
        }
    }

    /// Checks a memory error that the process has received.
    pub(super) fn memory_error(&self, page: PageIndex) -> Result<(), String> {
        let truth = &self.pages[page.as_usize()];
        match truth.damage {
            Damage::None => Err(format!("{page:?} cannot be read, although its stored copy was not damaged")),
            Damage::Real | Damage::GivenUp => Ok(()),
        }
    }

    /// Records that the stored copy of a page was damaged, or cannot be read.
    pub(super) fn damaged(&mut self, page: PageIndex) {
        self.pages[page.as_usize()].damage = Damage::Real;
    }

    /// Records that the pager has come to rest: discarded pages are readable now.
    pub(super) fn settled(&mut self) {
        for truth in self.pages.iter_mut().filter(|truth| !truth.is_given_up) {
            if truth.damage == Damage::GivenUp {
                truth.damage = Damage::None;
            }
        }
    }

    /// Records that the process has punched the page out of its file at the time `now`, and is about to notify the
    /// pager.
    pub(super) fn begin_discard(&mut self, page: PageIndex, now: Duration) {
        let truth = &mut self.pages[page.as_usize()];
        truth.is_given_up = true;
        truth.since = now;
        truth.written = None;
        truth.may.push(0);
    }

    /// Records that the discard is complete, and its notification was received.
    pub(super) fn end_discard(&mut self, page: PageIndex) {
        let truth = &mut self.pages[page.as_usize()];
        truth.is_given_up = false;
        if !std::mem::take(&mut truth.is_unheard) {
            truth.may.clear();
            truth.may.extend(truth.written.take());
            truth.may.push(0);
        }
        if truth.damage == Damage::Real {
            truth.damage = Damage::GivenUp;
        }
    }

    /// Records that the pager has detached at the time `now`.
    pub(super) fn let_go(&mut self, now: Duration) {
        for truth in &mut self.pages {
            truth.is_unheard = truth.is_given_up && now.saturating_sub(truth.since) >= HOLE_REPORT_DELAY_MAX;
        }
    }

    /// Records that a device begins to write to the page.
    pub(super) fn begin_device_write(&mut self, page: PageIndex, stamp: Stamp) {
        let truth = &mut self.pages[page.as_usize()];
        truth.io = Some(stamp);
        truth.damage = Damage::None;
        truth.may.push(stamp);
    }

    /// Records that the device has finished.
    pub(super) fn end_device_write(&mut self, page: PageIndex) {
        let truth = &mut self.pages[page.as_usize()];
        if let Some(write_id) = truth.io.take() {
            truth.may.clear();
            truth.may.push(write_id);
        }
    }
}
