//! Statistics of the selector's picks, which explain its choice.

use super::{Class, Way};
use crate::PAGE;

/// Statistics of all picks since the start; the difference of two describes the time between them.
#[derive(Clone, Debug, PartialEq)]
pub struct Evidence {
    /// Present value of a byte on the wire, in nanoseconds of an encoder.
    pub ns_per_byte: f32,
    /// Pages that were sent unencoded because encoding would have gained nothing.
    pub pages_as_they_are: u64,
    ways: [Made; Way::COUNT],
}

/// Present pick for batches of one class. Regions whose results deviate from their class may have another pick.
#[derive(Clone, Debug, PartialEq)]
pub struct Chosen {
    /// Class of the batches.
    pub class: Class,
    /// Number of batches of the class so far.
    pub batches: u32,
    /// Picked way; `None` if the batches are sent unencoded.
    pub way: Option<Way>,
    /// Expected results of all ways for a page of the class; the first is sending it unencoded.
    pub offers: Vec<Offer>,
}

/// Expected result of one way for a page: measured, or an initial expectation before the way was tried.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Offer {
    /// Way; `None` for the page unencoded.
    pub way: Option<Way>,
    /// Remaining bytes of the page.
    pub bytes: f32,
    /// Nanoseconds that encoding takes.
    pub ns: f32,
    /// Cost of time and bytes together, at the present value of a byte on the wire; the cheapest way is picked.
    pub cost_ns: f32,
}

/// Statistics of one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Made {
    /// Pages that were encoded.
    pub pages: u64,
    /// Pages that did not become short enough, and were sent unencoded.
    pub misfit_pages: u64,
    /// Bytes on the wire for all these pages, misfits included.
    pub bytes: u64,
    /// Nanoseconds that encoding took.
    pub ns: u64,
}

impl Made {
    /// Returns the bytes of memory per byte on the wire; 1 without pages.
    #[must_use]
    pub fn ratio(&self) -> f64 {
        match self.bytes {
            0 => 1.0,
            bytes => (self.pages * PAGE as u64) as f64 / bytes as f64,
        }
    }

    /// Returns the encoding rate of one encoder, in 10^6 bytes of memory per second; 0 without pages.
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

    /// Returns the statistics of a way.
    #[must_use]
    pub fn of(&self, way: impl Into<Way>) -> Made {
        self.ways[way.into().index()]
    }

    /// Returns the number of pages whose results were recorded.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.pages_as_they_are + self.ways.iter().map(|made| made.pages).sum::<u64>()
    }

    /// Returns the share of pages that this way encoded, from 0 to 1.
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
