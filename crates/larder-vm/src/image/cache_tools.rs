//! What can be done with a cache while no server uses it.

use std::fs::File;
use std::rc::Rc;

use larder_block::backend::file::OpenError as FileError;
use larder_block::backend::image_lock::LockError;
use larder_block::{BlockDevice, ByteLen, ByteOffset, ByteRange, IoError, Loop, ZeroFlags};
use larder_cache::{Lines, Mode, OpenError, Superblock, SuperblockError, read_superblock};

use super::cache::{LOOKED_AT, is_file};
use super::cache_note::Note;
use super::{ImageAddress, ImageError, ImageOptions, open_bytes};

/// Why something cannot be done with a cache.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CacheToolError {
    #[error("{0}; stop its server first")]
    InUse(String),
    #[error(transparent)]
    Device(Box<ImageError>),
    #[error("{file}: it is no cache of Larder's")]
    NoCache { file: String },
    #[error(
        "{file}: it may have data that was never written to {disk}; serve the disk once more and stop it, or give that data up with --lose-dirty"
    )]
    Dirty { file: String, disk: String },
    #[error("{why}; whether it has data that the disk has not cannot be told: with --lose-dirty that is given up")]
    Unknown { why: String },
    /// What the cache itself, or its device, says.
    #[error("{0}")]
    Cache(String),
    #[error("{file}: {source}")]
    Truncate { file: String, source: std::io::Error },
}

impl From<OpenError> for CacheToolError {
    fn from(error: OpenError) -> Self {
        Self::Cache(error.to_string())
    }
}

impl From<IoError> for CacheToolError {
    fn from(error: IoError) -> Self {
        Self::Cache(error.to_string())
    }
}

/// What a cache is.
pub struct CacheReport {
    /// Bytes of what it is on.
    pub size: ByteLen,
    /// What it says of itself.
    pub superblock: Superblock,
    /// What it holds, unless somebody may be changing that.
    pub lines: Option<Lines>,
}

/// Looks at a cache; what it holds is counted unless it `is_used`.
///
/// # Errors
/// See [`CacheToolError`].
pub async fn inspect_cache(on: &Loop, file: &ImageAddress, is_used: bool) -> Result<CacheReport, CacheToolError> {
    let fast = open(on, file, true).await?;
    let superblock = superblock_of(file, &fast).await?;
    let lines = match is_used {
        true => None,
        false => Some(larder_cache::count_lines(&fast, &superblock).await?),
    };
    Ok(CacheReport {
        size: fast.geometry().size,
        superblock,
        lines,
    })
}

/// Has a cache do something else with writes when it is opened the next time.
///
/// # Errors
/// See [`CacheToolError`].
pub async fn set_mode_of_cache(on: &Loop, file: &ImageAddress, mode: Mode) -> Result<(), CacheToolError> {
    let fast = open(on, file, false).await?;
    superblock_of(file, &fast).await?;
    larder_cache::set_mode(&fast, mode).await?;
    Ok(fast.close().await?)
}

/// Makes a cache none any more: a file has no bytes left then, a device none of the cache at its beginning. What only the
/// cache has is lost, if that is agreed to.
///
/// # Errors
/// See [`CacheToolError`].
pub async fn drop_cache(on: &Loop, file: &ImageAddress, lose_dirty: bool) -> Result<(), CacheToolError> {
    let fast = open(on, file, false).await?;
    let note = match read_superblock(&fast).await {
        Ok(superblock) if superblock.may_be_dirty && !lose_dirty => {
            return Err(CacheToolError::Dirty {
                file: file.to_string(),
                disk: superblock.disk.name,
            });
        }
        Ok(superblock) => Some(Note::of(&superblock)),
        Err(error) if is_other(&error) => return Err(CacheToolError::NoCache { file: file.to_string() }),
        Err(error @ OpenError::Superblock { .. }) => match lose_dirty {
            true => None,
            false => return Err(CacheToolError::Unknown { why: error.to_string() }),
        },
        Err(error) => return Err(error.into()),
    };
    let beginning = fast.geometry().size.get().min(LOOKED_AT);
    let beginning = ByteRange::between(ByteOffset::ZERO, ByteOffset::new(beginning));
    fast.write_zeroes(beginning, ZeroFlags::default()).await?;
    fast.flush().await?;
    if let (ImageAddress::Path(path), true) = (file, is_file(file)) {
        let emptied = File::options().write(true).open(path).and_then(|it| it.set_len(0));
        emptied.map_err(|source| CacheToolError::Truncate {
            file: file.to_string(),
            source,
        })?;
    }
    if let Some(note) = note {
        // Of a cache that is no more it means nothing.
        let _ = note.take_back();
    }
    Ok(fast.close().await?)
}

async fn open(on: &Loop, file: &ImageAddress, only_to_look: bool) -> Result<Rc<dyn BlockDevice>, CacheToolError> {
    let options = ImageOptions {
        read_only: only_to_look,
        share: only_to_look,
        prefetch: None,
        ..ImageOptions::default()
    };
    open_bytes(on, file, &options, false)
        .await
        .map_err(|error| match &error {
            ImageError::File(FileError::Locked {
                source: LockError::InUse { .. },
                ..
            }) => CacheToolError::InUse(error.to_string()),
            _ => CacheToolError::Device(Box::new(error)),
        })
}

async fn superblock_of(file: &ImageAddress, fast: &Rc<dyn BlockDevice>) -> Result<Superblock, CacheToolError> {
    match read_superblock(fast).await {
        Err(error) if is_other(&error) => Err(CacheToolError::NoCache { file: file.to_string() }),
        found => Ok(found?),
    }
}

/// What is there is no cache, not even one that is damaged.
fn is_other(error: &OpenError) -> bool {
    matches!(
        error,
        OpenError::Superblock {
            source: SuperblockError::NoMagic,
            ..
        }
    )
}
