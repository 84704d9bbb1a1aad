//! How users say how much memory is for reading ahead.

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
        let memory: ByteLen = text.parse()?;
        match memory < PrefetchOptions::MEMORY_MIN {
            true => Err(PrefetchMemoryError::Little),
            false => Ok(Self::Size(memory)),
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
