//! Encoder of single pages.

use crate::{Codec, PAGE, lz4, zstd};

/// State of all encoding codecs, for one thread at a time; about 70 KiB, reused from page to page.
pub struct Encoder {
    lz4: lz4::Encoder,
    zstd: zstd::Encoder,
}

impl Encoder {
    /// Creates the state. The output of an encoder never depends on earlier pages.
    #[must_use]
    pub fn new() -> Self {
        Self { lz4: lz4::Encoder::new(), zstd: zstd::Encoder::new() }
    }

    /// Encodes `page` into the front of `out` and returns the length of the result, at least 1. Returns `None` if the
    /// result does not fit, or would leave fewer than about 30 bytes free; `out` then has no meaningful contents. A
    /// caller that rejects pages which save less than a quarter passes 3/4 of a page.
    pub fn encode(&mut self, codec: Codec, page: &[u8; PAGE], out: &mut [u8]) -> Option<usize> {
        match codec {
            Codec::Lz4 => self.lz4.encode(page, out),
            Codec::Zstd => self.zstd.encode(page, out),
        }
    }
}

impl Default for Encoder {
    fn default() -> Self {
        Self::new()
    }
}
