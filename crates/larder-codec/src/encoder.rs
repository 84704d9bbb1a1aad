//! Pages to bytes.

use crate::{Codec, PAGE, lz4, zstd};

/// The state of all codecs that encode, for one thread at a time; some 70 KiB, kept from page to page.
pub struct Encoder {
    lz4: lz4::Encoder,
    zstd: zstd::Encoder,
}

impl Encoder {
    /// With no page seen; what comes out of it never depends on earlier pages.
    #[must_use]
    pub fn new() -> Self {
        Self {
            lz4: lz4::Encoder::new(),
            zstd: zstd::Encoder::new(),
        }
    }

    /// Encodes `page` into the front of `out` and returns the bytes it takes there, at least 1; `None` if it does not fit,
    /// or leaves fewer than some 30 bytes to spare, and `out` is then of no meaning. Who wants no page that saves less than
    /// a quarter passes 3/4 of a page.
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
