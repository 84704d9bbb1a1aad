//! Read-ahead options, as users give them.

use std::fmt;
use std::str::FromStr;

use larder_block::{ByteLen, SizeError};
use larder_prefetch::PrefetchOptions;

/// Memory for read-ahead: `off`, or a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefetchMemory {
    /// No read-ahead.
    Off,
    /// Memory size.
    Size(ByteLen),
}

/// Reason why a text is not a valid read-ahead size.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum PrefetchMemoryError {
    #[error("give a size, or off: {0}")]
    Size(#[from] SizeError),
    #[error("give at least {}, or off", PrefetchOptions::MEMORY_MIN)]
    TooSmall,
    #[error("give at most {}: read-ahead does not use more", PrefetchOptions::MEMORY_MAX)]
    TooLarge,
}

impl PrefetchMemory {
    /// Default for a disk.
    pub const DEFAULT: Self = Self::Size(ByteLen::mib(4));
}

impl FromStr for PrefetchMemory {
    type Err = PrefetchMemoryError;

    fn from_str(text: &str) -> Result<Self, PrefetchMemoryError> {
        if text == "off" {
            return Ok(Self::Off);
        }
        match text.parse()? {
            memory if memory < PrefetchOptions::MEMORY_MIN => Err(PrefetchMemoryError::TooSmall),
            memory if memory > PrefetchOptions::MEMORY_MAX => Err(PrefetchMemoryError::TooLarge),
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

/// Parses the maximum read-ahead distance, or the longest read that causes read-ahead.
///
/// # Errors
/// The text is not a size, or out of range; the error is a message for the user.
pub fn parse_prefetch_len(text: &str) -> Result<ByteLen, String> {
    let len: ByteLen = text.parse().map_err(|error: SizeError| error.to_string())?;
    match (PrefetchOptions::LEN_MIN..=PrefetchOptions::MEMORY_MAX).contains(&len) {
        true => Ok(len),
        false => Err(format!(
            "give {} to {}; for no read-ahead use prefetch off",
            PrefetchOptions::LEN_MIN,
            PrefetchOptions::MEMORY_MAX
        )),
    }
}

/// Read-ahead options as a user gave them; `None` means that an option was not given.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PrefetchSpec {
    /// Memory for prefetched data.
    pub memory: Option<PrefetchMemory>,
    /// Maximum distance ahead of a reader.
    pub ahead: Option<ByteLen>,
    /// Longest read that causes read-ahead.
    pub largest_read: Option<ByteLen>,
}

/// Reason why options contradict each other. The names are those of the options, with or without dashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum PrefetchSpecError {
    #[error(
        "{0} cannot be combined with share: read-ahead would not notice writes of other programs; omit one of the two"
    )]
    Shared(&'static str),
    #[error("{0} has no effect with prefetch off; omit one of the two")]
    Off(&'static str),
}

impl PrefetchSpec {
    /// Returns the read-ahead options of an image, which is shared or not; `None` for no read-ahead.
    ///
    /// # Errors
    /// The options contradict each other.
    pub fn options(&self, share: bool) -> Result<Option<PrefetchOptions>, PrefetchSpecError> {
        let detail = match (self.ahead, self.largest_read) {
            (Some(_), _) => Some("prefetch-ahead"),
            (None, Some(_)) => Some("prefetch-largest-read"),
            (None, None) => None,
        };
        let memory = match (self.memory, detail) {
            (Some(PrefetchMemory::Off), Some(detail)) => return Err(PrefetchSpecError::Off(detail)),
            (Some(PrefetchMemory::Size(_)), _) if share => return Err(PrefetchSpecError::Shared("prefetch")),
            (_, Some(detail)) if share => return Err(PrefetchSpecError::Shared(detail)),
            (memory, _) => memory.unwrap_or(PrefetchMemory::DEFAULT),
        };
        let defaults = PrefetchOptions::default();
        Ok(match memory {
            PrefetchMemory::Size(memory) if !share => Some(PrefetchOptions {
                memory,
                largest_read: self.largest_read.unwrap_or(defaults.largest_read),
                ahead_max: self.ahead.unwrap_or(defaults.ahead_max),
            }),
            _ => None,
        })
    }
}
