//! How users say what is to be read ahead.

use std::fmt;
use std::str::FromStr;

use larder_block::{ByteLen, SizeError};
use larder_prefetch::PrefetchOptions;

/// `off`, or a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefetchMemory {
    /// Nothing is read ahead.
    Off,
    /// So many bytes.
    Size(ByteLen),
}

/// Why a text is not such a thing.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum PrefetchMemoryError {
    #[error("give a size, or off: {0}")]
    Size(#[from] SizeError),
    #[error("give {} at least, or off", PrefetchOptions::MEMORY_MIN)]
    Little,
    #[error("give {} at most: read-ahead makes no use of more", PrefetchOptions::MEMORY_MAX)]
    Much,
}

impl PrefetchMemory {
    /// What a disk gets.
    pub const DEFAULT: Self = Self::Size(ByteLen::mib(4));
}

impl FromStr for PrefetchMemory {
    type Err = PrefetchMemoryError;

    fn from_str(text: &str) -> Result<Self, PrefetchMemoryError> {
        if text == "off" {
            return Ok(Self::Off);
        }
        match text.parse()? {
            memory if memory < PrefetchOptions::MEMORY_MIN => Err(PrefetchMemoryError::Little),
            memory if memory > PrefetchOptions::MEMORY_MAX => Err(PrefetchMemoryError::Much),
            memory => Ok(Self::Size(memory)),
        }
    }
}

impl fmt::Display for PrefetchMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Off => f.write_str("off"),
            Self::Size(memory) => memory.fmt(f),
        }
    }
}

/// Reads how far ahead to be, or how long a read may be that is read ahead of.
///
/// # Errors
/// It is no size, or none that makes sense, as a text for people.
pub fn parse_prefetch_len(text: &str) -> Result<ByteLen, String> {
    let len: ByteLen = text.parse().map_err(|error: SizeError| error.to_string())?;
    match (PrefetchOptions::LEN_MIN..=PrefetchOptions::MEMORY_MAX).contains(&len) {
        true => Ok(len),
        false => Err(format!(
            "give {} to {}; prefetch off reads nothing ahead",
            PrefetchOptions::LEN_MIN,
            PrefetchOptions::MEMORY_MAX
        )),
    }
}

/// What a user has said of reading ahead; `None` is what there is nothing said of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefetchWish {
    /// Its memory.
    pub memory: Option<PrefetchMemory>,
    /// How far ahead of a reader to be at most.
    pub ahead: Option<ByteLen>,
    /// The longest read that is read ahead of.
    pub largest_read: Option<ByteLen>,
}

/// Why a wish contradicts itself. The names are those of the options, with or without dashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum PrefetchWishError {
    #[error(
        "{0} does not go with share: an image that others may write is not read ahead of, because nobody would tell of their writes; leave one of them out"
    )]
    Shared(&'static str),
    #[error("{0} does not go with prefetch off, which reads nothing ahead; leave one of them out")]
    Off(&'static str),
}

impl PrefetchWish {
    /// How to read ahead, if at all, of an image that is shared, or not.
    ///
    /// # Errors
    /// Something is wished that cannot be.
    pub fn options(&self, share: bool) -> Result<Option<PrefetchOptions>, PrefetchWishError> {
        let detail = match (self.ahead, self.largest_read) {
            (Some(_), _) => Some("prefetch-ahead"),
            (None, Some(_)) => Some("prefetch-largest-read"),
            (None, None) => None,
        };
        let memory = match (self.memory, detail) {
            (Some(PrefetchMemory::Off), Some(detail)) => return Err(PrefetchWishError::Off(detail)),
            (Some(PrefetchMemory::Size(_)), _) if share => return Err(PrefetchWishError::Shared("prefetch")),
            (_, Some(detail)) if share => return Err(PrefetchWishError::Shared(detail)),
            (memory, _) => memory.unwrap_or(PrefetchMemory::DEFAULT),
        };
        let usual = PrefetchOptions::default();
        Ok(match memory {
            PrefetchMemory::Size(memory) if !share => Some(PrefetchOptions {
                memory,
                largest_read: self.largest_read.unwrap_or(usual.largest_read),
                ahead_max: self.ahead.unwrap_or(usual.ahead_max),
            }),
            _ => None,
        })
    }
}
