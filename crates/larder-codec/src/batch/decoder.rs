//! Decoder of batches, safe for arbitrary input.

use thiserror::Error;

use super::{BATCH_BYTES, Method, deflate, lz4, words, zstd};
use crate::PAGE;

/// Reason why bytes do not decode to a batch.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// The bytes are not valid for this method, or decode to more than expected.
    #[error("{method}: {len} encoded bytes of a batch of {expected} bytes are damaged: {why}")]
    Damaged {
        /// Method of the data.
        method: Method,
        /// Length of the data.
        len: usize,
        /// Expected length of the pages.
        expected: usize,
        /// Message of the method's library.
        why: String,
    },
    /// The bytes end before the pages do.
    #[error("{method}: {len} encoded bytes decode to {decoded} bytes instead of the {expected} of the batch")]
    Short {
        /// Method of the data.
        method: Method,
        /// Length of the data.
        len: usize,
        /// Expected length of the pages.
        expected: usize,
        /// Number of decoded bytes.
        decoded: usize,
    },
}

/// State of all decoding methods, for one thread at a time, reused from batch to batch: about 700 KiB.
pub struct Decoder {
    /// Buffer for sorted words.
    shuffled: Box<[u8]>,
    zstd: zstd::Decoder,
    deflate: deflate::Decoder,
}

impl Decoder {
    /// Creates the state.
    #[must_use]
    pub fn new() -> Self {
        Self { shuffled: vec![0; BATCH_BYTES].into(), zstd: zstd::Decoder::new(), deflate: deflate::Decoder::new() }
    }

    /// Decodes all of `data`, which must fill `out` exactly.
    ///
    /// # Errors
    /// The data is damaged. `out` then has no meaningful contents, and must not reach a guest.
    ///
    /// # Panics
    /// `out` is not of 1 to [`super::BATCH_PAGES`] whole pages: a count from a peer must be checked before.
    pub fn decode(&mut self, method: Method, data: &[u8], out: &mut [u8]) -> Result<(), DecodeError> {
        let expected = out.len();
        assert!(
            (PAGE..=BATCH_BYTES).contains(&expected) && expected.is_multiple_of(PAGE),
            "invalid batch length: {expected} bytes"
        );
        let decoded = match method {
            Method::Lz4 | Method::Lz4Fast => lz4::decode(data, out),
            Method::WordsLz4 => {
                let shuffled = &mut self.shuffled[..expected];
                let decoded = lz4::decode(data, shuffled);
                if decoded == Ok(expected) {
                    words::unshuffle(shuffled, out);
                }
                decoded
            }
            Method::ZstdFast | Method::Zstd => self.zstd.decode(data, out),
            Method::Deflate => self.deflate.decode(data, out),
        };
        match decoded {
            Ok(decoded) if decoded == expected => Ok(()),
            Ok(decoded) => Err(DecodeError::Short { method, len: data.len(), expected, decoded }),
            Err(why) => Err(DecodeError::Damaged { method, len: data.len(), expected, why: why.to_owned() }),
        }
    }
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}
