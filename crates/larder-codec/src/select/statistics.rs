//! Statistics of the selector's picks, which explain its choice.

use super::{BatchClass, BatchEncoding};
use crate::PAGE;

/// Statistics of all picks since the start; the difference of two describes the time between them.
#[derive(Clone, Debug, PartialEq)]
pub struct SelectorStatistics {
    /// Present value of a byte on the wire, in nanoseconds of an encoder.
    pub ns_per_byte: f32,
    /// Pages that were sent unencoded because encoding would have gained nothing.
    pub unencoded_pages: u64,
    encodings: [EncodingStatistics; BatchEncoding::COUNT],
}

/// Present pick for batches of one class. Regions whose results deviate from their class may have another pick.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassPick {
    /// Class of the batches.
    pub class: BatchClass,
    /// Number of batches of the class so far.
    pub batches: u32,
    /// Picked way; `None` if the batches are sent unencoded.
    pub encoding: Option<BatchEncoding>,
    /// Expected results of all ways for a page of the class; the first is sending it unencoded.
    pub expected_results: Vec<ExpectedResult>,
}

/// Expected result of one way for a page: measured, or an initial expectation before the way was tried.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpectedResult {
    /// Way; `None` for the page unencoded.
    pub encoding: Option<BatchEncoding>,
    /// Remaining bytes of the page.
    pub bytes: f32,
    /// Nanoseconds that encoding takes.
    pub ns: f32,
    /// Cost of time and bytes together, at the present value of a byte on the wire; the cheapest way is picked.
    pub cost_ns: f32,
}

/// Statistics of one way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EncodingStatistics {
    /// Pages that were encoded.
    pub pages: u64,
    /// Pages that did not become short enough, and were sent unencoded.
    pub incompressible_pages: u64,
    /// Bytes on the wire for all these pages, misfits included.
    pub bytes: u64,
    /// Nanoseconds that encoding took.
    pub ns: u64,
}

impl EncodingStatistics {
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

impl SelectorStatistics {
    pub(super) const fn new() -> Self {
        Self {
            ns_per_byte: 0.0,
            unencoded_pages: 0,
            encodings: [EncodingStatistics { pages: 0, incompressible_pages: 0, bytes: 0, ns: 0 };
                BatchEncoding::COUNT],
        }
    }

    /// Returns the statistics of a way.
    #[must_use]
    pub fn encoding(&self, encoding: impl Into<BatchEncoding>) -> EncodingStatistics {
        self.encodings[encoding.into().index()]
    }

    /// Returns the number of pages whose results were recorded.
    #[must_use]
    pub fn pages(&self) -> u64 {
        self.unencoded_pages + self.encodings.iter().map(|made| made.pages).sum::<u64>()
    }

    /// Returns the share of pages that this way encoded, from 0 to 1.
    #[must_use]
    pub fn share_of(&self, encoding: impl Into<BatchEncoding>) -> f64 {
        self.encoding(encoding).pages as f64 / self.pages().max(1) as f64
    }

    pub(super) fn record_unencoded(&mut self, pages: usize) {
        self.unencoded_pages += pages as u64;
    }

    pub(super) fn record_encoded(&mut self, encoding: BatchEncoding, pages: usize, encoded: Option<usize>, ns: u64) {
        let statistics = &mut self.encodings[encoding.index()];
        statistics.pages += pages as u64;
        if encoded.is_none() {
            statistics.incompressible_pages += pages as u64;
        }
        statistics.bytes = statistics.bytes.saturating_add(encoded.unwrap_or(pages * PAGE) as u64);
        statistics.ns = statistics.ns.saturating_add(ns);
    }
}
