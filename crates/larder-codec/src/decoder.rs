//! Decoder of single pages, safe for arbitrary input.

use thiserror::Error;

use crate::{Codec, PAGE, lz4, zstd};

/// Reason why stored bytes do not decode to a page.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// The bytes are not valid for this codec.
    #[error("{codec}: the {len} stored bytes are damaged: {why}")]
    Damaged {
        /// Codec of the data.
        codec: Codec,
        /// Length of the data.
        len: usize,
        /// Message of the codec's library.
        why: String,
    },
    /// The bytes end before the page does.
    #[error("{codec}: the {len} stored bytes decode to {decoded} bytes instead of a page of {PAGE}")]
    Short {
        /// Codec of the data.
        codec: Codec,
        /// Length of the data.
        len: usize,
        /// Number of decoded bytes.
        decoded: usize,
    },
}

/// State of all decoding codecs, for one thread at a time; about 100 KiB, reused from page to page.
pub struct Decoder {
    zstd: zstd::Decoder,
}

impl Decoder {
    /// Creates the state.
    #[must_use]
    pub fn new() -> Self {
        Self { zstd: zstd::Decoder::new() }
    }

    /// Decodes all of `data`, which must result in exactly one page.
    ///
    /// # Errors
    /// The data is damaged. `page` then has no meaningful contents, and must not reach a guest.
    pub fn decode(&mut self, codec: Codec, data: &[u8], page: &mut [u8; PAGE]) -> Result<(), DecodeError> {
        let decoded = match codec {
            Codec::Lz4 => lz4::decode(data, page),
            Codec::Zstd => self.zstd.decode(data, page),
        };
        match decoded {
            Ok(PAGE) => Ok(()),
            Ok(decoded) => Err(DecodeError::Short { codec, len: data.len(), decoded }),
            Err(why) => Err(DecodeError::Damaged { codec, len: data.len(), why }),
        }
    }
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}
