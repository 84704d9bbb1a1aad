//! What was picked, for those who ask why.

use super::{Class, Way};
use crate::PAGE;

/// All that a selector has picked since it began; differences of two tell of the time between them.
#[derive(Clone, Debug, PartialEq)]
pub struct Evidence {
    /// Nanoseconds of an encoder that a byte on the wire is worth now.
    pub ns_per_byte: f32,
    /// Pages that were sent as they are, since nothing was to be gained.
    pub pages_as_they_are: u64,
    ways: [Made; Way::COUNT],
}

/// What is picked for the batches of one class now. Regions that come out longer or shorter than their class may have
/// another way.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    /// Which.
    pub class: Class,
    /// Batches of it so far.
    pub batches: u32,
    /// The way; `None`: they are sent as they are.
    pub way: Option<Way>,
    /// What all ways would make of a page of it, and nothing but sending it as it is first.
    pub offers: Vec<Offer>,
}

/// What a page becomes in one way, as far as it is known: measured, or, before it was tried, expected.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Offer {
    /// Which; `None`: the page as it is.
    pub way: Option<Way>,
    /// Bytes that are left of the page.
    pub bytes: f32,
    /// Nanoseconds that it takes.
    pub ns: f32,
    /// Both together, at what a byte on the wire is worth: what costs least is picked.
    pub cost_ns: f32,
}

/// What was made in one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Made {
    /// Pages it was given.
    pub pages: u64,
    /// Of these, those that it did not make short enough, and that were sent as they are.
    pub misfit_pages: u64,
    /// Bytes on the wire for all its pages, misfits too.
    pub bytes: u64,
    /// Nanoseconds that it took.
    pub ns: u64,
}

impl Made {
    /// Bytes of memory for each byte on the wire; 1 for no page.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        match self.bytes {
            0 => 1.0,
            bytes => (self.pages * PAGE as u64) as f64 / bytes as f64,
        }
    }

    /// 10^6 bytes of memory that one encoder takes in a second; 0 for no page.
    #[must_use]
    pub fn megabytes_per_second(&self) -> f64 {
        match self.ns {
            0 => 0.0,
            ns => (self.pages * PAGE as u64) as f64 * 1e3 / ns as f64,
        }
    }
}

impl Evidence {
    pub(super) const fn new() -> Self {
        Self {
            ns_per_byte: 0.0,
            pages_as_they_are: 0,
            ways: [Made {
                pages: 0,
                misfit_pages: 0,
                bytes: 0,
                ns: 0,
            }; Way::COUNT],
        }
    }

    /// What was made in this way.
    #[must_use]
    pub fn of(&self, way: impl Into<Way>) -> Made {
        self.ways[way.into().index()]
    }

    /// All pages that were picked for and heard of.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages_as_they_are + self.ways.iter().map(|made| made.pages).sum::<u64>()
    }

    /// Of all pages those that were given to this way, from 0 to 1.
    #[must_use]
    pub fn share_of(&self, way: impl Into<Way>) -> f64 {
        self.of(way).pages as f64 / self.pages().max(1) as f64
    }

    pub(super) fn sent_as_they_are(&mut self, pages: usize) {
        self.pages_as_they_are += pages as u64;
    }

    pub(super) fn made(&mut self, way: Way, pages: usize, encoded: Option<usize>, ns: u64) {
        let made = &mut self.ways[way.index()];
        made.pages += pages as u64;
        if encoded.is_none() {
            made.misfit_pages += pages as u64;
        }
        made.bytes = made.bytes.saturating_add(encoded.unwrap_or(pages * PAGE) as u64);
        made.ns = made.ns.saturating_add(ns);
    }
}
