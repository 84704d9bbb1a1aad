//! Options that users give for a disk's cache.

use larder_block::ByteLen;
use larder_cache::CacheMode;
#[cfg(doc)]
use larder_cache::Verdict;

use super::ImageAddress;
use super::cache::{CacheError, check_write_back};

/// The modes that users can choose.
pub const CACHE_MODES: [CacheMode; 4] =
    [CacheMode::WriteThrough, CacheMode::WriteBack, CacheMode::WriteAround, CacheMode::PassThrough];

/// Returns the option value for a mode.
pub fn cache_mode_name(mode: CacheMode) -> &'static str {
    match mode {
        CacheMode::WriteThrough => "wt",
        CacheMode::WriteBack => "wb",
        CacheMode::WriteAround => "wa",
        CacheMode::PassThrough => "pt",
    }
}

/// Returns a mode's name in words.
pub fn cache_mode_long_name(mode: CacheMode) -> &'static str {
    match mode {
        CacheMode::WriteThrough => "write-through",
        CacheMode::WriteBack => "write-back",
        CacheMode::WriteAround => "write-around",
        CacheMode::PassThrough => "pass-through",
    }
}

/// Parses the option value for a mode.
///
/// # Errors
/// There is no such mode; the error is a message for the user.
pub fn parse_cache_mode(text: &str) -> Result<CacheMode, String> {
    let found = CACHE_MODES.into_iter().find(|mode| cache_mode_name(*mode) == text);
    found.ok_or_else(|| {
        let names = CACHE_MODES.map(|mode| format!("{} ({})", cache_mode_name(mode), cache_mode_long_name(mode)));
        format!("give {}", names.join(", "))
    })
}

/// Default line length, in bytes.
pub const CACHE_LINE_DEFAULT: ByteLen = ByteLen::new(4 << 10);

/// Longest line, in bytes.
const LINE_MAX: ByteLen = ByteLen::new(64 << 10);

/// Smallest limit for the bytes written to a cache per day.
pub const CACHE_ENDURANCE_MIN: ByteLen = ByteLen::mib(64);

/// Largest limit for the bytes written to a cache per day: 12 GB per second.
pub const CACHE_ENDURANCE_MAX: ByteLen = ByteLen::mib(1 << 30);

/// Parses the limit for the bytes written to a cache per day.
///
/// # Errors
/// The text is not a size, or out of range; the error is a message for the user.
pub fn parse_cache_endurance(text: &str) -> Result<ByteLen, String> {
    let bytes: ByteLen = text.parse().map_err(|error: larder_block::SizeError| error.to_string())?;
    match (CACHE_ENDURANCE_MIN..=CACHE_ENDURANCE_MAX).contains(&bytes) {
        true => Ok(bytes),
        false => Err(format!("give {CACHE_ENDURANCE_MIN} to {CACHE_ENDURANCE_MAX} per day")),
    }
}

/// Parses the line length of a cache.
///
/// # Errors
/// The text is not a size, or not a valid line length; the error is a message for the user.
pub fn parse_cache_line(text: &str) -> Result<ByteLen, String> {
    let line: ByteLen = text.parse().map_err(|error: larder_block::SizeError| error.to_string())?;
    match line.get().is_power_of_two() && (CACHE_LINE_DEFAULT..=LINE_MAX).contains(&line) {
        true => Ok(line),
        false => Err(format!("give a power of two from {CACHE_LINE_DEFAULT} to {LINE_MAX}")),
    }
}

/// Cache options as a user gave them; `None` means that an option was not given.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheSpec {
    /// File or device of the cache; without it there is no cache.
    pub file: Option<ImageAddress>,
    /// Size of a new cache file.
    pub size: Option<ByteLen>,
    /// Line length.
    pub line: Option<ByteLen>,
    /// Write policy.
    pub mode: Option<CacheMode>,
    /// Limit for the bytes written per day.
    pub endurance: Option<ByteLen>,
    /// Only the disk's own server writes to the disk.
    pub exclusive: bool,
}

/// Reason why options contradict each other. The names are those of the options, with or without dashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum CacheSpecError {
    #[error(
        "cache cannot be combined with share: the cache would not notice writes of other programs, and would return stale data; omit one of the two"
    )]
    Shared,
    #[error("{0} has no effect without cache, the file or device of the cache; give that option too")]
    NoFile(&'static str),
}

impl CacheSpec {
    /// Returns the options for caching an image, which is shared or not; `None` if it is not to be cached.
    ///
    /// # Errors
    /// The options contradict each other.
    pub fn options(&self, share: bool) -> Result<Option<CacheOptions>, CacheSpecError> {
        let Some(file) = self.file.clone() else {
            let dependent = [
                ("cache-size", self.size.is_some()),
                ("cache-line", self.line.is_some()),
                ("cache-mode", self.mode.is_some()),
                ("cache-endurance", self.endurance.is_some()),
                ("cache-exclusive", self.exclusive),
            ];
            return match dependent.iter().find(|(_, is_set)| *is_set) {
                Some((name, _)) => Err(CacheSpecError::NoFile(name)),
                None => Ok(None),
            };
        };
        match share {
            true => Err(CacheSpecError::Shared),
            false => Ok(Some(CacheOptions {
                file,
                size: self.size,
                line: self.line,
                mode: self.mode,
                endurance: self.endurance,
                exclusive: self.exclusive,
                force: false,
                ignores_replacement: false,
            })),
        }
    }
}

/// Options of a disk's cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// File, block device or NBD export that the cache is on. A missing file is created.
    pub file: ImageAddress,
    /// Size of a new cache file; an existing file must have this size.
    pub size: Option<ByteLen>,
    /// Line length; if unset, that of the existing cache, or [`CACHE_LINE_DEFAULT`].
    pub line: Option<ByteLen>,
    /// Write policy; if unset, that of the existing cache, or write-through.
    pub mode: Option<CacheMode>,
    /// Limit for the bytes written per day; see [`larder_cache::CacheOpenOptions::endurance`].
    pub endurance: Option<ByteLen>,
    /// The user asserts that only the disk's server writes to the disk, so unproven data ([`Verdict::Unproven`]) is
    /// used.
    pub exclusive: bool,
    /// Dirty data counts as newer than the disk, even if the disk seems to have been changed without the cache.
    pub force: bool,
    /// Use exactly this cache, not one that has replaced it while the disk was in use.
    pub ignores_replacement: bool,
}

impl CacheOptions {
    /// Checks the options as far as possible without I/O.
    pub(super) fn check(&self) -> Result<(), CacheError> {
        if self.size.is_some_and(|size| size.get() == 0) {
            return Err(CacheError::ZeroSize { file: self.file.to_string() });
        }
        match self.mode {
            Some(CacheMode::WriteBack) => check_write_back(&self.file),
            _ => Ok(()),
        }
    }
}
