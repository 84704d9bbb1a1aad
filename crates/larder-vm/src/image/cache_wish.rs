//! What users say of a disk's cache.

use larder_block::ByteLen;
use larder_cache::Mode;
#[cfg(doc)]
use larder_cache::Verdict;

use super::ImageAddress;
use super::cache::{CacheError, may_write_back};

/// The modes that users can choose.
pub const CACHE_MODES: [Mode; 4] = [
    Mode::WriteThrough,
    Mode::WriteBack,
    Mode::WriteAround,
    Mode::PassThrough,
];

/// What users call a mode.
pub fn cache_mode_name(mode: Mode) -> &'static str {
    match mode {
        Mode::WriteThrough => "wt",
        Mode::WriteBack => "wb",
        Mode::WriteAround => "wa",
        Mode::PassThrough => "pt",
    }
}

/// The same in words.
pub fn cache_mode_words(mode: Mode) -> &'static str {
    match mode {
        Mode::WriteThrough => "write-through",
        Mode::WriteBack => "write-back",
        Mode::WriteAround => "write-around",
        Mode::PassThrough => "pass-through",
    }
}

/// Reads what users call a mode.
///
/// # Errors
/// There is no such mode, as a text for people.
pub fn parse_cache_mode(text: &str) -> Result<Mode, String> {
    let found = CACHE_MODES.into_iter().find(|mode| cache_mode_name(*mode) == text);
    found.ok_or_else(|| {
        let names = CACHE_MODES.map(|mode| format!("{} ({})", cache_mode_name(mode), cache_mode_words(mode)));
        format!("give {}", names.join(", "))
    })
}

/// What a line has unless something else is wished, in bytes.
pub const CACHE_LINE_DEFAULT: ByteLen = ByteLen::new(4 << 10);

/// The longest line, in bytes.
const LINE_MAX: ByteLen = ByteLen::new(64 << 10);

/// The least that may be written to a cache in a day, in bytes.
pub const CACHE_ENDURANCE_MIN: ByteLen = ByteLen::mib(64);

/// The most, in bytes: 12 GB a second.
pub const CACHE_ENDURANCE_MAX: ByteLen = ByteLen::mib(1 << 30);

/// Reads what may be written to a cache in a day.
///
/// # Errors
/// It is no size, or out of range, as a text for people.
pub fn parse_cache_endurance(text: &str) -> Result<ByteLen, String> {
    let bytes: ByteLen = text
        .parse()
        .map_err(|error: larder_block::SizeError| error.to_string())?;
    match (CACHE_ENDURANCE_MIN..=CACHE_ENDURANCE_MAX).contains(&bytes) {
        true => Ok(bytes),
        false => Err(format!("give {CACHE_ENDURANCE_MIN} to {CACHE_ENDURANCE_MAX} a day")),
    }
}

/// Reads how long a line of a cache is.
///
/// # Errors
/// It is no size, or none that a line can have, as a text for people.
pub fn parse_cache_line(text: &str) -> Result<ByteLen, String> {
    let line: ByteLen = text
        .parse()
        .map_err(|error: larder_block::SizeError| error.to_string())?;
    match line.get().is_power_of_two() && (CACHE_LINE_DEFAULT..=LINE_MAX).contains(&line) {
        true => Ok(line),
        false => Err(format!("give a power of two from {CACHE_LINE_DEFAULT} to {LINE_MAX}")),
    }
}

/// What a user has said of a cache; `None` is what there is nothing said of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CacheWish {
    /// Where it is; without it there is none.
    pub file: Option<ImageAddress>,
    /// How large its file is made.
    pub size: Option<ByteLen>,
    /// How long its lines are.
    pub line: Option<ByteLen>,
    /// What is done with writes.
    pub mode: Option<Mode>,
    /// What may be written to it in a day.
    pub endurance: Option<ByteLen>,
    /// Nothing but its server writes to the disk.
    pub exclusive: bool,
}

/// Why a wish contradicts itself. The names are those of the options, with or without dashes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum CacheWishError {
    #[error(
        "cache does not go with share: nobody would tell the cache of what others write, and it would give old data for new; leave one of them out"
    )]
    Shared,
    #[error("{0} says nothing without cache, the file or device that the cache is on; give that too")]
    NoFile(&'static str),
}

impl CacheWish {
    /// How to cache, if at all, an image that is shared, or not.
    ///
    /// # Errors
    /// Something is wished that cannot be.
    pub fn options(&self, share: bool) -> Result<Option<CacheOptions>, CacheWishError> {
        let Some(file) = self.file.clone() else {
            let alone = [
                ("cache-size", self.size.is_some()),
                ("cache-line", self.line.is_some()),
                ("cache-mode", self.mode.is_some()),
                ("cache-endurance", self.endurance.is_some()),
                ("cache-exclusive", self.exclusive),
            ];
            return match alone.iter().find(|(_, is_there)| *is_there) {
                Some((name, _)) => Err(CacheWishError::NoFile(name)),
                None => Ok(None),
            };
        };
        match share {
            true => Err(CacheWishError::Shared),
            false => Ok(Some(CacheOptions {
                file,
                size: self.size,
                line: self.line,
                mode: self.mode,
                endurance: self.endurance,
                exclusive: self.exclusive,
                force: false,
                exactly: false,
            })),
        }
    }
}

/// The cache of a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CacheOptions {
    /// The file, block device or NBD export that it is on. A file that is not there is made.
    pub file: ImageAddress,
    /// How large its file is made; what it has if it is there.
    pub size: Option<ByteLen>,
    /// How long the lines are; if nothing is said, as they are, or [`CACHE_LINE_DEFAULT`].
    pub line: Option<ByteLen>,
    /// What is done with writes; if nothing is said, as it was left, or write-through.
    pub mode: Option<Mode>,
    /// What may be written to it in a day; see [`OpenOptions::endurance`].
    pub endurance: Option<ByteLen>,
    /// Nothing but its server writes to the disk, says the user: what is not proven ([`Verdict::Unproven`]) is believed.
    pub exclusive: bool,
    /// What only the cache has is right, also if the disk seems to have been changed without it.
    pub force: bool,
    /// This one, and no other that has taken its place while the disk was used.
    pub exactly: bool,
}

impl CacheOptions {
    /// Whether that can be, as far as it can be told without asking anybody.
    pub(super) fn check(&self) -> Result<(), CacheError> {
        if self.size.is_some_and(|size| size.get() == 0) {
            return Err(CacheError::ZeroSize {
                file: self.file.to_string(),
            });
        }
        match self.mode {
            Some(Mode::WriteBack) => may_write_back(&self.file),
            _ => Ok(()),
        }
    }
}
