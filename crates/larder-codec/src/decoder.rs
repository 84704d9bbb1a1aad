//! Bytes to pages, whatever the bytes are.

use thiserror::Error;

use crate::{Codec, PAGE, lz4, zstd};

/// Why stored bytes make no page.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum DecodeError {
    /// They are not of this codec.
    #[error("{codec}: the {len} bytes stored are damaged: {why}")]
    Damaged {
        /// By which they were to be decoded.
        codec: Codec,
        /// Bytes stored.
        len: usize,
        /// In the words of the codec's library.
        why: String,
    },
    /// They end before the page does.
    #[error("{codec}: the {len} bytes stored make {decoded} bytes and no page of {PAGE}")]
    Short {
        /// By which they were decoded.
        codec: Codec,
        /// Bytes stored.
        len: usize,
        /// Bytes they make.
        decoded: usize,
    },
}

/// The state of all codecs that decode, for one thread at a time; some 100 KiB, kept from page to page.
pub struct Decoder {
    zstd: zstd::Decoder,
}

impl Decoder {
    /// With no page seen.
    #[must_use]
    pub fn new() -> Self {
        Self {
            zstd: zstd::Decoder::new(),
        }
    }

    /// Decodes `data`, all of it, which must make a page exactly.
    ///
    /// # Errors
    /// `page` is then of no meaning, and must reach no guest.
    pub fn decode(&mut self, codec: Codec, data: &[u8], page: &mut [u8; PAGE]) -> Result<(), DecodeError> {
        let decoded = match codec {
            Codec::Lz4 => lz4::decode(data, page),
            Codec::Zstd => self.zstd.decode(data, page),
        };
        match decoded {
            Ok(PAGE) => Ok(()),
            Ok(decoded) => Err(DecodeError::Short {
                codec,
                len: data.len(),
                decoded,
            }),
            Err(why) => Err(DecodeError::Damaged {
                codec,
                len: data.len(),
                why,
            }),
        }
    }
}

impl Default for Decoder {
    fn default() -> Self {
        Self::new()
    }
}
