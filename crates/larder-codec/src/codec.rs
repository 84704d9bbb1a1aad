//! Codecs of single pages, and their numbers in stored data.

use std::fmt;

use thiserror::Error;

/// Encoding of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Codec {
    /// One LZ4 block, without a frame.
    Lz4 = 1,
    /// One zstd frame, with its magic and the length of a page, without a checksum.
    Zstd = 2,
}

/// Error for a number that no codec of this version has: the data is damaged, or was written by a later version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("unknown codec number {0}")]
pub struct UnknownCodec(pub u8);

impl Codec {
    /// All codecs.
    pub const ALL: [Self; 2] = [Self::Lz4, Self::Zstd];

    /// Returns the number that is stored with the data. It is never 0, so that memory that was never written names no
    /// codec.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8
    }
}

impl TryFrom<u8> for Codec {
    type Error = UnknownCodec;

    fn try_from(number: u8) -> Result<Self, UnknownCodec> {
        Self::ALL.into_iter().find(|codec| codec.number() == number).ok_or(UnknownCodec(number))
    }
}

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codec_numbers_are_stable() {
        assert_eq!(Codec::Lz4.number(), 1);
        assert_eq!(Codec::Zstd.number(), 2);
        for number in 0..=u8::MAX {
            match Codec::try_from(number) {
                Ok(codec) => assert_eq!(codec.number(), number),
                Err(refused) => {
                    assert_eq!(refused, UnknownCodec(number));
                    assert!(!Codec::ALL.iter().any(|codec| codec.number() == number));
                }
            }
        }
    }
}
