//! Bytes to pages, whatever the bytes are.

use thiserror::Error;

use super::{BATCH_BYTES, Method, deflate, lz4, words, zstd};
use crate::PAGE;

/// Why bytes make no batch.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// They are not of this method, or make more than was wanted.
    #[error("{method}: {len} bytes that should make {wanted} are damaged: {why}")]
    Damaged {
        /// By which they were to be decoded.
        method: Method,
        /// Bytes given.
        len: usize,
        /// Bytes of the pages wanted.
        wanted: usize,
        /// In the words of the method's library.
        why: String,
    },
    /// They end before the pages do.
    #[error("{method}: {len} bytes make {decoded} bytes and not the {wanted} of the batch")]
    Short {
        /// By which they were decoded.
        method: Method,
        /// Bytes given.
        len: usize,
        /// Bytes of the pages wanted.
        wanted: usize,
        /// Bytes they make.
        decoded: usize,
    },
}

/// The state of all methods that decode, for one thread at a time, kept from batch to batch: some 700 KiB.
pub struct Decoder {
    /// Sorted words.
    sorted: Box<[u8]>,
    zstd: zstd::Decoder,
    deflate: deflate::Decoder,
}

impl Decoder {
    /// With no batch seen.
    #[must_use]
    pub fn new() -> Self {
        Self {
            sorted: vec![0; BATCH_BYTES].into(),
            zstd: zstd::Decoder::new(),
            deflate: deflate::Decoder::new(),
        }
    }

    /// Decodes `data`, all of it, which must fill `out` exactly.
    ///
    /// # Errors
    /// `out` is then of no meaning, and must reach no guest.
    ///
    /// # Panics
    /// `out` is not of 1 to [`super::BATCH_PAGES`] whole pages: a count from a peer is to be checked first.
    pub fn decode(&mut self, method: Method, data: &[u8], out: &mut [u8]) -> Result<(), DecodeError> {
        let wanted = out.len();
        assert!(
            (PAGE..=BATCH_BYTES).contains(&wanted) && wanted.is_multiple_of(PAGE),
            "a batch of {wanted} bytes"
        );
        let decoded = match method {
            Method::Lz4 | Method::Lz4Fast => lz4::decode(data, out),
            Method::WordsLz4 => {
                let sorted = &mut self.sorted[..wanted];
                let decoded = lz4::decode(data, sorted);
                if decoded == Ok(wanted) {
                    words::restore(sorted, out);
                }
                decoded
            }
            Method::ZstdFast | Method::Zstd => self.zstd.decode(data, out),
            Method::Deflate => self.deflate.decode(data, out),
        };
        match decoded {
            Ok(decoded) if decoded == wanted => Ok(()),
            Ok(decoded) => Err(DecodeError::Short {
                method,
                len: data.len(),
                wanted,
                decoded,
            }),
            Err(why) => Err(DecodeError::Damaged {
                method,
                len: data.len(),
                wanted,
                why: why.to_owned(),
            }),
        }
    }
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}
