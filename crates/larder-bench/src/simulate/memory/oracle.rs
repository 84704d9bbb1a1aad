//! What each page may hold: what the process wrote last, or zeros after giving it up. It knows nothing of the pager.

use larder_memory::units::PageIndex;

use super::content::{self, Stamp, Words};

/// Whether a page may be unreadable.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Damage {
    /// It may not.
    None,
    /// What was stored of it was damaged, or could not be read.
    Real,
    /// The same, but it was given up since: it will be readable once the pager has nothing else to do.
    GivenUp,
}

struct Truth {
    /// One of these, the last one in the first place.
    may: Vec<Stamp>,
    /// It is being given up.
    is_given_up: bool,
    /// That is not heard any more, as the pager has let go of the process: it may keep what it has.
    is_unheard: bool,
    /// What was written to it since that began.
    written: Option<Stamp>,
    damage: Damage,
    /// A device writes this to it.
    io: Option<Stamp>,
}

/// See the module's description.
#[derive(Default)]
pub(super) struct Oracle {
    pages: Vec<Truth>,
    numbers: u64,
}

impl Oracle {
    /// So many pages more, of zeros.
    pub(super) fn grow(&mut self, pages: u32) {
        self.pages.extend((0..pages).map(|_| Truth {
            may: vec![0],
            is_given_up: false,
            is_unheard: false,
            written: None,
            damage: Damage::None,
            io: None,
        }));
    }

    /// A stamp that no other write has.
    pub(super) fn stamp(&mut self, kind: content::Kind) -> Stamp {
        self.numbers += 1;
        content::stamp(self.numbers, kind)
    }

    /// Nothing is known to be done to `page` but plain accesses.
    pub(super) fn is_quiet(&self, page: PageIndex) -> bool {
        let truth = &self.pages[page.as_usize()];
        !truth.is_given_up && truth.io.is_none()
    }

    /// A device reads or writes it.
    pub(super) fn is_in_io(&self, page: PageIndex) -> bool {
        self.pages[page.as_usize()].io.is_some()
    }

    /// The process has read this.
    pub(super) fn read(&mut self, page: PageIndex, words: &Words) -> Result<Stamp, String> {
        let truth = &mut self.pages[page.as_usize()];
        let Some(found) = truth.may.iter().copied().find(|stamp| content::is(words, *stamp)) else {
            let what = match self.stamp_of(words) {
                Some(0) => "zeros".to_owned(),
                Some(stamp) => format!("write {stamp}"),
                None => format!("{:x?}..., which nobody wrote", &words[..4]),
            };
            let truth = &self.pages[page.as_usize()];
            return Err(format!(
                "{page:?} reads as {what}, and may hold {:?} (0: zeros){}",
                truth.may,
                if truth.is_given_up {
                    "; it is being given up"
                } else {
                    ""
                }
            ));
        };
        if !truth.is_given_up && truth.io.is_none() {
            truth.may.clear();
            truth.may.push(found);
        }
        Ok(found)
    }

    fn stamp_of(&self, words: &Words) -> Option<Stamp> {
        let mut all = (1..=self.numbers).flat_map(|number| {
            [content::Kind::Random, content::Kind::Structured, content::Kind::Uniform]
                .map(|kind| content::stamp(number, kind))
        });
        if content::is(words, 0) {
            return Some(0);
        }
        all.find(|stamp| content::is(words, *stamp))
    }

    /// The process has written this.
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

    /// The process has got a memory error.
    pub(super) fn memory_error(&self, page: PageIndex) -> Result<(), String> {
        let truth = &self.pages[page.as_usize()];
        match truth.damage {
            Damage::None => Err(format!(
                "{page:?} cannot be read, though nothing that was stored of it was damaged"
            )),
            Damage::Real | Damage::GivenUp => Ok(()),
        }
    }

    /// What is stored of a page was damaged, or cannot be read.
    pub(super) fn damaged(&mut self, page: PageIndex) {
        self.pages[page.as_usize()].damage = Damage::Real;
    }

    /// The pager has had all the time that it needs: what was given up can be read.
    pub(super) fn settled(&mut self) {
        for truth in self.pages.iter_mut().filter(|truth| !truth.is_given_up) {
            if truth.damage == Damage::GivenUp {
                truth.damage = Damage::None;
            }
        }
    }

    /// The process has taken it out of its file, and will say so.
    pub(super) fn give_up_begins(&mut self, page: PageIndex) {
        let truth = &mut self.pages[page.as_usize()];
        truth.is_given_up = true;
        truth.written = None;
        truth.may.push(0);
    }

    /// It has said so, and was heard.
    pub(super) fn give_up_ends(&mut self, page: PageIndex) {
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

    /// The pager has let go of the process.
    pub(super) fn let_go(&mut self) {
        for truth in &mut self.pages {
            truth.is_unheard = truth.is_given_up;
        }
    }

    /// A device begins to write this to the page.
    pub(super) fn io_begins(&mut self, page: PageIndex, stamp: Stamp) {
        let truth = &mut self.pages[page.as_usize()];
        truth.io = Some(stamp);
        truth.damage = Damage::None;
        truth.may.push(stamp);
    }

    /// It has.
    pub(super) fn io_ends(&mut self, page: PageIndex) {
        let truth = &mut self.pages[page.as_usize()];
        if let Some(stamp) = truth.io.take() {
            truth.may.clear();
            truth.may.push(stamp);
        }
    }
}
