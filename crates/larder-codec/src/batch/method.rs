//! Encoding methods of batches, and their numbers on the wire.

use std::fmt;

use thiserror::Error;

/// Encoding of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum Method {
    /// One LZ4 block.
    Lz4 = 1,
    /// One LZ4 block, which is encoded faster and is longer.
    Lz4Fast = 2,
    /// Differences of adjacent 64-bit words, their bytes sorted by significance, as one LZ4 block: for counters,
    /// columns of numbers and tables of pointers. See `batch/words.rs`.
    WordsLz4 = 3,
    /// One zstd frame, encoded at a fast level: no entropy coding of literals.
    ZstdFast = 4,
    /// One zstd frame, encoded at level 1.
    Zstd = 5,
    /// One raw deflate stream (RFC 1951), which accelerators can also make.
    Deflate = 6,
}

/// Error for a number that no method of this version has: the data is damaged, or was sent by a later version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[error("unknown batch encoding number {0}")]
pub struct UnknownMethod(pub u8);

impl Method {
    /// Number of methods.
    pub const COUNT: usize = 6;
    /// All methods, in the order of their numbers.
    pub const ALL: [Self; Self::COUNT] =
        [Self::Lz4, Self::Lz4Fast, Self::WordsLz4, Self::ZstdFast, Self::Zstd, Self::Deflate];

    /// Returns the number on the wire. It is never 0, which a caller may use for unencoded pages.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8
    }

    /// Returns the index in [`Self::ALL`].
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize - 1
    }

    /// Returns the name in reports and on the command line.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Lz4 => "lz4",
            Self::Lz4Fast => "lz4-fast",
            Self::WordsLz4 => "words-lz4",
            Self::ZstdFast => "zstd-fast",
            Self::Zstd => "zstd",
            Self::Deflate => "deflate",
        }
    }

    /// Returns the method with this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|method| method.name() == name)
    }
}

impl TryFrom<u8> for Method {
    type Error = UnknownMethod;

    fn try_from(number: u8) -> Result<Self, UnknownMethod> {
        Self::ALL.into_iter().find(|method| method.number() == number).ok_or(UnknownMethod(number))
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn method_numbers_are_stable() {
        let numbers = [
            (Method::Lz4, 1),
            (Method::Lz4Fast, 2),
            (Method::WordsLz4, 3),
            (Method::ZstdFast, 4),
            (Method::Zstd, 5),
            (Method::Deflate, 6),
        ];
        assert_eq!(numbers.map(|(method, _)| method), Method::ALL);
        for (method, number) in numbers {
            assert_eq!(method.number(), number);
            assert_eq!(Method::ALL[method.index()], method);
            assert_eq!(Method::from_name(method.name()), Some(method));
        }
        for number in 0..=u8::MAX {
            let known = numbers.iter().find(|known| known.1 == number);
            assert_eq!(Method::try_from(number).ok(), known.map(|known| known.0));
        }
    }
}
