//! Operations on a cache that no server is using.

use std::cell::Cell;
use std::fs::{File, Metadata, Permissions};
use std::io::{self, ErrorKind};
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::file::FileOpenError as FileError;
use larder_block::backend::image_lock::{self, LockError, LockMode, Sharing};
use larder_block::{BlockDevice, ByteLen, ByteOffset, ByteRange, IoError, Loop, ZeroFlags};
use larder_cache::{Cache, CacheMode, CacheOpenError, LineCounts, Superblock, read_superblock};

use super::cache::{
    CacheError, allocate, boot_id_for, check_write_back, create_error, is_file, is_no_cache, lock, random,
    round_up_size,
};
use super::cache_slot::CacheSlot;
use super::cache_spec::CacheOptions;
use super::cache_state::{CacheLock, StateFile};
use super::{
    Author, ChainPolicy, Format, ImageAddress, ImageError, ImageOptions, cache_replacement, disk_id, open_bytes,
};
use crate::foreign_data::HEAD_BYTES;

/// Reason why an operation on a cache failed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CacheToolError {
    #[error("{0}; stop its server first")]
    InUse(String),
    #[error(transparent)]
    Device(Box<ImageError>),
    #[error("{file}: it is not a Larder cache")]
    NotACache { file: String },
    #[error("{file}: no such file; check the path, or mount its file system")]
    Missing { file: String },
    #[error("{file}: it is empty, like a cache that was dropped")]
    Empty { file: String },
    #[error(
        "{file}: it may have data that was never written to {disk}; write it there with `larder disk cache flush {file}`, or discard it with `larder disk cache drop --lose-dirty {file}`"
    )]
    Dirty { file: String, disk: String },
    #[error(
        "{file}: the location of its disk cannot be derived from '{disk}', where the disk was when the cache was last used; give it with --image"
    )]
    Disk { file: String, disk: String },
    #[error(
        "{file}: {author}, and according to it, its disk is {disk} of format {format}; root would write there: if that is correct, confirm it with --image {disk} --format {format}"
    )]
    UntrustedOwner { file: String, author: Author, disk: String, format: &'static str },
    #[error("{file}: it is the cache of a {recorded} disk, but --format is {requested}")]
    Format { file: String, recorded: &'static str, requested: &'static str },
    #[error("{why}; whether it has data that is not on the disk cannot be determined: --lose-dirty discards such data")]
    MaybeDirty { why: String },
    /// Error of the cache layer or of its device.
    #[error("{0}")]
    Cache(String),
    #[error("{file}: {source}")]
    Host { file: String, source: std::io::Error },
    #[error("{file}: only a cache in a file can be resized: a device is used as a whole")]
    NotAFile { file: String },
    #[error("{file}: it was not closed; serve {disk} with it once more, and stop that server")]
    NotClosed { file: String, disk: String },
    #[error(
        "{file}: it may have data that was never written to {disk}; write it there first with `larder disk cache flush {file}`"
    )]
    ResizeDirty { file: String, disk: String },
    #[error("{file}, the new cache, cannot be created: {source}")]
    CreateNewFile { file: String, source: std::io::Error },
    #[error(transparent)]
    CacheFile(#[from] CacheError),
}

impl From<CacheOpenError> for CacheToolError {
    fn from(error: CacheOpenError) -> Self {
        Self::Cache(error.to_string())
    }
}

impl From<IoError> for CacheToolError {
    fn from(error: IoError) -> Self {
        Self::Cache(error.to_string())
    }
}

/// Description of a cache.
pub struct CacheReport {
    /// Size of the cache's device, in bytes.
    pub size: ByteLen,
    /// The cache's superblock.
    pub superblock: Superblock,
    /// Number of lines by state; `None` if a server may be changing them.
    pub lines: Option<LineCounts>,
    /// A process uses the cache.
    pub in_use: bool,
}

/// Inspects a cache. Its lines are counted unless it is `in_use`.
///
/// # Errors
/// See [`CacheToolError`].
pub async fn inspect_cache(on: &Loop, file: &ImageAddress, in_use: bool) -> Result<CacheReport, CacheToolError> {
    let fast = open(on, file, true).await?;
    let superblock = superblock_of(file, &fast).await?;
    let exclusive_lock = lock_exclusively(file, &superblock);
    let in_use = in_use || exclusive_lock.is_err();
    let lines = match in_use {
        true => None,
        false => Some(larder_cache::count_lines(&fast, &superblock, boot_id_for(file)).await?),
    };
    Ok(CacheReport { size: fast.geometry().size, superblock, lines, in_use })
}

/// Sets the write policy that a cache has from its next opening on; returns whether the cache may be dirty.
///
/// # Errors
/// See [`CacheToolError`].
pub async fn set_cache_mode(on: &Loop, file: &ImageAddress, mode: CacheMode) -> Result<bool, CacheToolError> {
    if mode == CacheMode::WriteBack {
        check_write_back(file)?;
    }
    let fast = open(on, file, false).await?;
    let superblock = superblock_of(file, &fast).await?;
    let _lock = lock_exclusively(file, &superblock)?;
    larder_cache::set_mode(&fast, mode).await?;
    fast.close().await?;
    Ok(superblock.may_be_dirty)
}

/// Options for flushing a cache to its disk.
#[derive(Clone, Debug)]
pub struct FlushOptions {
    /// File, device or export that the cache is on.
    pub file: ImageAddress,
    /// The cache's disk, if that is not where it was when the cache was last used.
    pub image: Option<ImageAddress>,
    /// The disk's format. Root does not trust what another user's cache records about its disk.
    pub format: Option<Format>,
    /// Root opens the files that the headers of other users' images name.
    pub trust_image: bool,
    /// Dirty data counts as newer than the disk, even if the disk seems to have been changed without the cache.
    pub force: bool,
}

/// Writes all dirty data of an unused cache to its disk. Returns the number of dirty bytes there were, in whole
/// lines; `report_progress` is called periodically with the number that is left.
///
/// # Errors
/// See [`CacheToolError`]; data that has not been written to the disk remains in the cache.
pub async fn flush_cache(
    on: &Loop,
    flush_options: &FlushOptions,
    report_progress: impl Fn(ByteLen) + 'static,
) -> Result<ByteLen, CacheToolError> {
    let file = &flush_options.file;
    let fast = open(on, file, false).await?;
    let superblock = superblock_of(file, &fast).await?;
    fast.close().await?;
    if !superblock.may_be_dirty {
        return Ok(ByteLen::ZERO);
    }
    let unknown_disk_error = || CacheToolError::Disk { file: file.to_string(), disk: superblock.disk.name.clone() };
    let image: ImageAddress = match &flush_options.image {
        Some(image) => image.clone(),
        None => superblock.disk.name.parse().map_err(|_| unknown_disk_error())?,
    };
    let recorded = disk_id::format_of(&superblock.disk.identity).ok_or_else(unknown_disk_error)?;
    match (flush_options.format, &flush_options.image) {
        (Some(format), _) if format != recorded => {
            return Err(CacheToolError::Format {
                file: file.to_string(),
                recorded: recorded.name(),
                requested: format.name(),
            });
        }
        (Some(_), Some(_)) => {}
        _ => {
            if let Some(author) = Author::untrusted(file) {
                return Err(CacheToolError::UntrustedOwner {
                    file: file.to_string(),
                    author,
                    disk: image.to_string(),
                    format: recorded.name(),
                });
            }
        }
    }
    let options = ImageOptions {
        format: Some(recorded),
        chain: ChainPolicy::Follow { trust_image: flush_options.trust_image },
        prefetch: None,
        cache: Some(CacheOptions {
            file: file.clone(),
            size: None,
            line: None,
            mode: None,
            endurance: None,
            exclusive: false,
            force: flush_options.force,
            ignores_replacement: true,
        }),
        ..ImageOptions::default()
    };
    let opened = super::open(on, &image, &options).await;
    let opened = opened.map_err(|error| CacheToolError::Device(Box::new(error)))?;
    let Some(cache) = opened.cache.as_ref().map(CacheSlot::current) else {
        return Ok(ByteLen::ZERO);
    };
    let layer_of_reporter = Rc::downgrade(&cache.layer);
    let dirty_bytes = |layer: &Cache| ByteLen::new(layer.statistics().dirty_lines * layer.layout().line_len());
    let (sleeping, is_over) = (on.clone(), Rc::new(Cell::new(false)));
    let is_over_for_reporter = Rc::clone(&is_over);
    on.spawn(async move {
        loop {
            sleeping.sleep(PROGRESS_INTERVAL).await;
            match layer_of_reporter.upgrade() {
                Some(layer) if !is_over_for_reporter.get() => report_progress(dirty_bytes(&layer)),
                _ => return,
            }
        }
    });
    let loaded = cache.layer.load_all().await;
    let dirty = dirty_bytes(&cache.layer);
    let flushed = match loaded {
        Ok(()) => cache.layer.clean().await,
        error => error,
    };
    is_over.set(true);
    // The disk is closed even if the flush has failed.
    let closed = opened.device.close().await;
    cache.close_state_file();
    flushed?;
    closed?;
    Ok(dirty)
}

/// Interval between progress reports.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

/// Result of [`drop_cache`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropOutcome {
    /// The cache was dropped.
    Cache,
    /// Only the state file of a dirty cache was removed: the cache itself no longer exists.
    StateFileOnly,
}

/// Drops a cache: its file is truncated to zero bytes, or the cache's first bytes on its device are zeroed. Dirty
/// data is lost, if `lose_dirty` permits that.
///
/// # Errors
/// See [`CacheToolError`].
pub async fn drop_cache(on: &Loop, file: &ImageAddress, lose_dirty: bool) -> Result<DropOutcome, CacheToolError> {
    let fast = match open(on, file, false).await {
        Err(CacheToolError::Device(_) | CacheToolError::Missing { .. } | CacheToolError::Empty { .. })
            if lose_dirty && StateFile::remove_all_on(file) =>
        {
            return Ok(DropOutcome::StateFileOnly);
        }
        opened => opened?,
    };
    let state_file = match read_superblock(&fast).await {
        Ok(superblock) if superblock.may_be_dirty && !lose_dirty => {
            return Err(CacheToolError::Dirty { file: file.to_string(), disk: superblock.disk.name });
        }
        Ok(superblock) => Some((lock_exclusively(file, &superblock)?, StateFile::for_cache(&superblock))),
        // The device may hold other data by now.
        Err(error) if is_no_cache(&error) => {
            return match lose_dirty && StateFile::remove_all_on(file) {
                true => Ok(DropOutcome::StateFileOnly),
                false => Err(CacheToolError::NotACache { file: file.to_string() }),
            };
        }
        Err(error @ CacheOpenError::Superblock { .. }) => match lose_dirty {
            true => None,
            false => return Err(CacheToolError::MaybeDirty { why: error.to_string() }),
        },
        Err(error) => return Err(error.into()),
    };
    let head = fast.geometry().size.get().min(HEAD_BYTES);
    let head = ByteRange::between(ByteOffset::ZERO, ByteOffset::new(head));
    fast.write_zeroes(head, ZeroFlags::default()).await?;
    fast.flush().await?;
    if let Some((_lock, state_file)) = state_file {
        // The state file of a dropped cache is meaningless.
        let _ = state_file.remove();
        cache_replacement::remove_record(&state_file);
    }
    if lose_dirty {
        // This removes the state file of another cache that was on the same file.
        StateFile::remove_all_on(file);
    }
    // A process that has the file open monitors its size.
    fast.close().await?;
    drop(fast);
    match file {
        ImageAddress::Path(path) if is_file(file) => {
            truncate_if_unused(path).map_err(|source| CacheToolError::Host { file: file.to_string(), source })?
        }
        _ => {}
    }
    Ok(DropOutcome::Cache)
}

/// Truncates a file that is no longer a cache, unless another process uses it by now.
fn truncate_if_unused(path: &Path) -> std::io::Result<()> {
    let file = File::options().read(true).write(true).open(path)?;
    if image_lock::lock(file.as_fd(), Sharing::Exclusive, LockMode::Direct).is_err() {
        return Ok(());
    }
    let mut head = [0; 512];
    file.read_exact_at(&mut head, 0)?;
    match head.iter().all(|byte| *byte == 0) {
        true => file.set_len(0),
        false => Ok(()),
    }
}

/// Resizes the file of a closed cache, keeping its data as far as there is space: a new file replaces the old one
/// once it is complete. Returns the lines by state before and after.
///
/// # Errors
/// See [`CacheToolError`]; the cache is unchanged then.
pub async fn resize_cache(on: &Loop, file: &ImageAddress, size: ByteLen) -> Result<Resized, CacheToolError> {
    let name = || file.to_string();
    let old = open(on, file, false).await?;
    let (ImageAddress::Path(path), true) = (file, is_file(file)) else {
        return Err(CacheToolError::NotAFile { file: name() });
    };
    let superblock = superblock_of(file, &old).await?;
    if !superblock.clean {
        return Err(CacheToolError::NotClosed { file: name(), disk: superblock.disk.name });
    }
    // For a moment one state file would have to describe both files.
    if superblock.may_be_dirty {
        return Err(CacheToolError::ResizeDirty { file: name(), disk: superblock.disk.name });
    }
    let before = larder_cache::count_lines(&old, &superblock, boot_id_for(file)).await?;
    let size = round_up_size(size);
    if size == old.geometry().size {
        old.close().await?;
        return Ok(Resized { before, after: before });
    }
    // A symbolic link remains a link, and the file remains on its file system.
    let target = path.canonicalize().unwrap_or_else(|_| path.clone());
    let mut new_path = target.clone().into_os_string();
    new_path.push(".resize");
    let new_path = PathBuf::from(new_path);
    let state_file = StateFile::for_cache(&superblock);
    let created = match target.metadata() {
        Ok(access) => create_resized(on, (&old, &superblock), (&new_path, &access), size).await,
        Err(source) => Err(CacheToolError::Host { file: name(), source }),
    };
    let replaced = created.and_then(|(lines, new)| {
        state_file
            .copy_to(&superblock, &new)
            .map_err(|source| CacheToolError::Host { file: state_file.display_path(), source })?;
        let replaced = std::fs::rename(&new_path, &target)
            .inspect_err(|_| {
                // A state file that remained would report a missing dirty cache.
                let _ = StateFile::for_cache(&new).remove();
            })
            .and_then(|()| match target.parent() {
                Some(directory) => File::open(directory)?.sync_all(),
                None => Ok(()),
            });
        let failed = |source| CacheToolError::Host { file: name(), source };
        replaced.map(|()| lines).map_err(failed)
    });
    let after = match replaced {
        Ok(after) => after,
        Err(error) => {
            if !matches!(error, CacheToolError::CreateNewFile { .. }) {
                // Removal is best effort; the error gives the reason why there is no new cache.
                let _ = std::fs::remove_file(&new_path);
            }
            return Err(error);
        }
    };
    // The old file is deleted with its last user, and its state file is meaningless.
    let _ = state_file.remove();
    Ok(Resized { before, after })
}

/// Lines of a cache by state, before and after a resize.
pub struct Resized {
    /// Lines before.
    pub before: LineCounts,
    /// Lines after.
    pub after: LineCounts,
}

/// Mode of an incomplete new cache: no other program creates a file with the sticky bit, so the next resize knows what
/// a killed one has left.
const INCOMPLETE_MODE: u32 = 0o1600;

/// Creates a cache of another size in a new file, with the old cache's data, owner and mode; returns its lines and
/// superblock.
async fn create_resized(
    on: &Loop,
    (old, old_superblock): (&Rc<dyn BlockDevice>, &Superblock),
    (new_path, access): (&Path, &Metadata),
    size: ByteLen,
) -> Result<(LineCounts, Superblock), CacheToolError> {
    let host = |source| CacheToolError::Host { file: new_path.display().to_string(), source };
    let address = ImageAddress::Path(new_path.to_owned());
    if is_leftover(on, new_path, old_superblock).await {
        // Removal is best effort: if the file is still in the way, creating the new one reports that.
        let _ = std::fs::remove_file(new_path);
    }
    let file = File::options().write(true).create_new(true).mode(INCOMPLETE_MODE).open(new_path);
    let file = file.map_err(|source| CacheToolError::CreateNewFile {
        file: new_path.display().to_string(),
        source: match source.kind() {
            ErrorKind::AlreadyExists => io::Error::new(
                ErrorKind::AlreadyExists,
                "a file of that name exists, and is not left over from a killed resize; move it away first",
            ),
            _ => source,
        },
    })?;
    file.set_len(size.get()).map_err(|source| create_error(new_path, size, source))?;
    let new = open(on, &address, false).await?;
    allocate(&new, &address).await?;
    let lines = larder_cache::copy(old, &new, random().map_err(host)?).await?;
    allocate(&new, &address).await?;
    let superblock = read_superblock(&new).await?;
    new.close().await?;
    copy_ownership(&file, access).map_err(host)?;
    Ok((lines, superblock))
}

/// Gives the complete new cache the owner and the mode of the old one, which its server needs.
fn copy_ownership(new: &File, old: &Metadata) -> io::Result<()> {
    let made = new.metadata()?;
    if (made.uid(), made.gid()) != (old.uid(), old.gid()) {
        fchown(new, Some(old.uid()), Some(old.gid())).map_err(|error| {
            let owner = format!("{}:{}", old.uid(), old.gid());
            io::Error::new(
                error.kind(),
                format!(
                    "its owner cannot be set to that of the old cache ({owner}): {error}; resize the cache as root"
                ),
            )
        })?;
    }
    new.set_permissions(Permissions::from_mode(old.mode() & 0o7777))?;
    new.sync_all()
}

/// Returns whether the file was left behind by a resize that was killed: it is incomplete, or a complete cache of the
/// same disk without dirty data, which was not renamed. No other process uses it, since none uses the old cache.
async fn is_leftover(on: &Loop, new_path: &Path, old_superblock: &Superblock) -> bool {
    let Ok(found) = new_path.symlink_metadata() else {
        return false;
    };
    let user = rustix::process::geteuid().as_raw();
    if found.is_file() && found.uid() == user && found.mode() & 0o7777 == INCOMPLETE_MODE {
        return true;
    }
    let Ok(leftover) = open(on, &ImageAddress::Path(new_path.to_owned()), true).await else {
        return false;
    };
    let superblock = read_superblock(&leftover).await;
    superblock.is_ok_and(|leftover| {
        leftover.disk.identity == old_superblock.disk.identity && leftover.clean && !leftover.may_be_dirty
    })
}

async fn open(on: &Loop, file: &ImageAddress, inspect_only: bool) -> Result<Rc<dyn BlockDevice>, CacheToolError> {
    let options =
        ImageOptions { read_only: inspect_only, share: inspect_only, prefetch: None, ..ImageOptions::default() };
    open_bytes(on, file, &options, false).await.map_err(|error| match &error {
        ImageError::File(FileError::Locked { source: LockError::InUse { .. }, .. }) => {
            CacheToolError::InUse(error.to_string())
        }
        ImageError::File(FileError::Open { source, .. }) if source.kind() == ErrorKind::NotFound => {
            CacheToolError::Missing { file: file.to_string() }
        }
        ImageError::File(FileError::Empty { .. }) => CacheToolError::Empty { file: file.to_string() },
        _ => CacheToolError::Device(Box::new(error)),
    })
}

async fn superblock_of(file: &ImageAddress, fast: &Rc<dyn BlockDevice>) -> Result<Superblock, CacheToolError> {
    match read_superblock(fast).await {
        Err(error) if is_no_cache(&error) => Err(CacheToolError::NotACache { file: file.to_string() }),
        found => Ok(found?),
    }
}

/// Locks a cache against other users.
fn lock_exclusively(file: &ImageAddress, superblock: &Superblock) -> Result<Option<CacheLock>, CacheToolError> {
    lock(file, superblock).map_err(|error| CacheToolError::InUse(error.to_string()))
}
