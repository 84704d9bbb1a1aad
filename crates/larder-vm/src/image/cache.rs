//! A disk's cache on a fast device: creation and opening.

use std::cell::RefCell;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::file::FileRole;
use larder_block::backend::image_lock::LockMode;
use larder_block::backend::nbd::NbdOptions;
use larder_block::boot::boot_id;
use larder_block::event_loop::SocketAddress;
use larder_block::opener::{self, Access, PathSource, opener};
use larder_block::{BlockDevice, ByteLen, ByteOffset, ByteRange, Failure, IoError, Loop};
use larder_cache::{
    Cache, CacheCreateOptions, CacheMode, CacheOpenError, CacheOpenOptions, CleanOptions, DiskId, FailureRecord,
    PersistOptions, Superblock, SuperblockError, Verdict, read_superblock,
};

use rustix::process::{Resource, getrlimit};
use rustix::rand::GetRandomFlags;

use super::cache_spec::CacheOptions;
use super::cache_state::{CacheLock, OtherCache, StateFile, StateFileWriter, StateVerdict};
use super::disk_id::DiskFile;
use super::modification_proof::ModificationProof;
use super::open_cache::OpenCache;
use super::{ImageAddress, ImageError, ImageOptions, cache_replacement, disk_id, open_bytes};
use crate::data_limit::MemoryShare;
use crate::foreign_data::{self, ForeignData};
use crate::opener::opener_client;

/// Checks that a cache on `file` may hold the only copy of data.
///
/// # Errors
/// Its NBD server may be on another host, and so may crash and lose unflushed data while this host, and so the guest,
/// keeps running.
pub(super) fn check_write_back(file: &ImageAddress) -> Result<(), CacheError> {
    match file {
        ImageAddress::Nbd(uri) if matches!(uri.address, SocketAddress::Tcp { .. }) => {
            Err(CacheError::Remote { file: file.to_string() })
        }
        _ => Ok(()),
    }
}

/// Returns an ID of the current boot of the host whose crash would lose the cache's unflushed data; zero if that host
/// may be another one.
pub(super) fn boot_id_for(file: &ImageAddress) -> [u8; 16] {
    match check_write_back(file) {
        Ok(()) => boot_id().unwrap_or_default().to_le_bytes(),
        Err(_) => [0; 16],
    }
}

pub(super) fn state_file_required(location: impl std::fmt::Display) -> String {
    format!(
        "the cache's state file cannot be written ({location}), and write-back needs it to know which cached data is valid after a kill or a crash; make it writable, or use wt (write-through)"
    )
}

/// Reason why a disk's cache cannot be used.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CacheError {
    #[error("{}: no such file; to create it, give its size (cache-size)", path.display())]
    Missing { path: PathBuf },
    #[error("{}: it is empty; give its size (cache-size)", path.display())]
    Empty { path: PathBuf },
    #[error("{file}: a cache of 0 bytes (cache-size) holds nothing; omit the cache option for no cache")]
    ZeroSize { file: String },
    #[error("{}: it cannot be created: {source}", path.display())]
    Create { path: PathBuf, source: std::io::Error },
    #[error("{}: its file system does not support files of {size}; give a smaller cache-size, or use another file system", path.display())]
    TooLarge { path: PathBuf, size: ByteLen },
    #[error(
        "{}: no file of this process may be as large as {size} (RLIMIT_FSIZE: ulimit -f, or LimitFSIZE= of its service): raise that limit, or give a smaller cache-size",
        path.display()
    )]
    Limit { path: PathBuf, size: ByteLen },
    #[error("{file}: its file system has no space for {size}; free some, or give a smaller cache-size")]
    NoRoom { file: String, size: ByteLen },
    #[error("{file}: it has {actual}, not {requested}; {}", size_mismatch_hint(*is_file))]
    SizeMismatch { file: String, actual: ByteLen, requested: ByteLen, is_file: bool },
    #[error(
        "{file}: its lines have {actual}, not {requested}, which cannot be changed; omit cache-line, or drop the cache (larder disk cache drop) to create a new one"
    )]
    LineMismatch { file: String, actual: ByteLen, requested: ByteLen },
    #[error(
        "{file}: it is not a cache, and not empty: the data in its first MiB would be lost; give another file, or, if this one is no longer needed, {}",
        foreign_data::clear_instructions(*is_file)
    )]
    NotEmpty { file: String, is_file: bool },
    #[error("{file}: {why}, and is not overwritten: give another file or device, or clear this one if none of its data is needed ({})", foreign_data::clear_instructions(*is_file))]
    Occupied { file: String, why: ForeignData, is_file: bool },
    #[error(
        "{file}: it was not closed, may have data that is not on the disk, and no state file confirms that it worked until its server ended (the state file is expected at {state_file}, and does not cover an older copy of the cache); serve the disk as the same user as before, with the cache that it was last used with; or, if the disk was not changed since then without its cache, write that data to the disk with `larder disk cache flush --force {file}`; or discard it with `larder disk cache drop --lose-dirty {file}`"
    )]
    NoStateFile { file: String, state_file: String },
    #[error(
        "{file}: it was not closed, may have data that is not on the disk, and the disk was changed since without it: only you can decide which data is valid: keep the disk as it is with `larder disk cache drop --lose-dirty {file}`; or, if only the image's timestamps are wrong, or after you have restored the image, write the cache's data to it with `larder disk cache flush --force {file}`"
    )]
    DiskModified { file: String },
    #[error(
        "{file}: write-back (wb) needs its cache on this host, in a file, on a block device, or served on a unix socket: another host may lose unflushed data while this one keeps running; use wt (write-through)"
    )]
    Remote { file: String },
    #[error("{file}: {why}")]
    StateFileUnwritable { file: String, why: String },
    #[error(
        "{file}, a cache of this disk, was not closed, and may have data that was never written to the disk: serve the disk with that cache; or write the data to the disk with `larder disk cache flush {file}`; or discard it with `larder disk cache drop --lose-dirty {file}`"
    )]
    OtherDirty { file: ImageAddress },
    #[error(
        "{file}, a cache of this disk, was not closed, and may have data that was never written to the disk, and that cache is not there now: mount its file system, attach its device or restore its file, and serve the disk with it; or discard the data with `larder disk cache drop --lose-dirty {file}`"
    )]
    OtherMissing { file: ImageAddress },
    #[error(
        "{file}, a cache of this disk, was not closed, and may have data that was never written to the disk, and the VM's file does not name it, so this server may not open it: serve the disk with that cache (add cache = \"{file}\" to the VM's file); or write the data to the disk with `larder disk cache flush {file}`; or discard it with `larder disk cache drop --lose-dirty {file}`"
    )]
    OtherNotNamed { file: ImageAddress },
    #[error(
        "{file}, a cache of this disk, was not closed, and may have data that was never written to the disk, and this user may not open it: as a user who may, serve the disk with that cache; or write the data to the disk with `larder disk cache flush {file}`; or discard it with `larder disk cache drop --lose-dirty {file}`"
    )]
    OtherDenied { file: ImageAddress },
    #[error(
        "{file}: it is an older copy of the disk's cache; the newer one was not closed, and may have data that was never written to the disk: serve the disk with that one, which was at {newer}; or discard its data with `larder disk cache drop --lose-dirty {newer}`"
    )]
    OlderCopy { file: String, newer: String },
    #[error(
        "{file}, a cache of this disk, is used by its server, and has data that is not on the disk: read the disk through that server"
    )]
    OtherServed { file: ImageAddress },
    #[error("{file}: it is in use by another server or command")]
    InUse { file: String },
    #[error(transparent)]
    Device(Box<ImageError>),
    /// Error of the cache layer or of its device.
    #[error("{0}")]
    Cache(String),
}

impl CacheError {
    /// Returns the same error in the wording for a disk that is being served.
    pub(super) fn for_served_disk(self: Box<Self>) -> Box<Self> {
        match *self {
            Self::OtherDirty { file } => Box::new(Self::OtherServed { file }),
            _ => self,
        }
    }
}

impl From<CacheOpenError> for CacheError {
    fn from(error: CacheOpenError) -> Self {
        Self::Cache(error.to_string())
    }
}

impl From<IoError> for CacheError {
    fn from(error: IoError) -> Self {
        Self::Cache(error.to_string())
    }
}

fn size_mismatch_hint(is_file: bool) -> &'static str {
    match is_file {
        true => "omit cache-size to keep the size; larder disk cache resize changes it",
        false => "a device is used as a whole: omit cache-size",
    }
}

/// Unit of the size of a new cache file, in bytes: a multiple of every alignment that direct I/O requires.
const FILE_SIZE_UNIT_BYTES: u64 = 4096;

/// Memory limit of a cache, in bytes, without the part that grows with its lines: journal, copies of writes, fills
/// and what a move needs.
const CACHE_MEMORY_BASE_BYTES: u64 = 192 << 20;
/// Memory limit of a cache for each line, in bytes. Tables take about 12 bytes, and sets of lines up to 8; both take
/// twice as much while they grow.
const CACHE_MEMORY_PER_LINE_BYTES: u64 = 32;
/// Length of the shortest line, in bytes.
const CACHE_LINE_BYTES_MIN: u64 = 4096;

/// Longest wait for a cache on an NBD export: its disk has all data that is needed, and the guest is waiting.
const NBD_CACHE_TIMEOUT: Duration = Duration::from_secs(5);

/// Fingerprint of a disk that was used without its cache: no file has this fingerprint.
const USED_FINGERPRINT: &[u8] = b"used";

/// The disk that a cache is for.
pub(super) struct CachedDisk {
    pub(super) image: ImageAddress,
    pub(super) device: Rc<dyn BlockDevice>,
    pub(super) identity: Vec<u8>,
    pub(super) files: Vec<DiskFile>,
    /// Proof for the files, since the disk was last used.
    pub(super) proof: ModificationProof,
    /// Part of the disk is on a device or an export, which have no modification time that would show a foreign write.
    pub(super) lacks_timestamps: bool,
    pub(super) last_use: LastUse,
}

/// Place and time of the last use of a disk, relative to a cache of it that was closed here or whose server was
/// killed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum LastUse {
    /// The disk is being opened, and its files show whether it was used.
    FromFingerprints,
    /// On this host: a cache that was closed before is stale, whatever its fingerprint.
    ThisHost,
    /// On another host: a cache that was not closed is stale too, even if the disk has no file whose modification
    /// time shows that.
    OtherHost,
}

impl CachedDisk {
    /// Returns the same disk with its files' current fingerprints.
    pub(super) fn refreshed(&self) -> Self {
        Self {
            image: self.image.clone(),
            device: Rc::clone(&self.device),
            identity: self.identity.clone(),
            files: self.files.iter().map(DiskFile::refreshed).collect(),
            proof: self.proof.clone(),
            lacks_timestamps: self.lacks_timestamps,
            last_use: LastUse::ThisHost,
        }
    }

    fn id(&self) -> DiskId {
        DiskId {
            name: absolute(&self.image),
            identity: self.identity.clone(),
            fingerprint: match self.last_use {
                LastUse::FromFingerprints => disk_id::fingerprint_at_opening(&self.files),
                LastUse::ThisHost | LastUse::OtherHost => USED_FINGERPRINT.to_vec(),
            },
        }
    }
}

/// Checks whether a cache could be opened, as far as possible without changing anything, and whether the disk may be
/// used without its other caches.
pub(super) async fn check_openable(
    on: &Loop,
    (image, identity): (&ImageAddress, &[u8]),
    cache_options: &CacheOptions,
    options: &ImageOptions,
) -> Result<(), CacheError> {
    cache_options.check()?;
    let state_file = match &cache_options.file {
        ImageAddress::Path(path)
            if matches!(CacheFileState::inspect(path, cache_options.size)?, CacheFileState::Filled) =>
        {
            let fast = open_device(on, cache_options, options, None).await?;
            let found = match read_checked_superblock(&fast, (image, identity), cache_options).await {
                Ok(None) => refuse_occupied(on, &fast, &cache_options.file).await.map(|()| None),
                found => found,
            };
            // Nothing was written, so a failed close loses nothing.
            let _ = fast.close().await;
            found?.as_ref().map(StateFile::for_cache)
        }
        _ => None,
    };
    let (_, other_caches) = other_caches(identity, state_file.as_ref().as_slice(), state_file.as_ref());
    let other_caches: Vec<OtherCache> = other_caches.into_iter().filter(OtherCache::is_local).collect();
    refuse_dirty(on, &other_caches).await
}

/// Returns the state files of the disk's caches except those in `used`: first of the caches that the cache with the
/// state file `new_state_file` has replaced, then of all others.
fn other_caches(
    identity: &[u8],
    used: &[&StateFile],
    new_state_file: Option<&StateFile>,
) -> (Vec<OtherCache>, Vec<OtherCache>) {
    let replaced = new_state_file.map(cache_replacement::replaced_caches).unwrap_or_default();
    let other_caches = StateFile::other_caches(identity, used);
    other_caches.into_iter().partition(|cache| cache.is_listed_in(&replaced))
}

/// A cache that is locked for this process, but not open yet.
pub(super) struct PreparedCache {
    options: CacheOptions,
    fast: Rc<dyn BlockDevice>,
    superblock: Superblock,
    /// State of its file before.
    file_state: CacheFileState,
    lock: Option<CacheLock>,
}

/// Locks the cache of a disk and reads its superblock. A cache that does not exist is created, with lines of `line`
/// unless the options give another length.
///
/// # Errors
/// See [`CacheError`]; a file that was created for the cache is removed then.
pub(super) async fn prepare(
    on: &Loop,
    disk: &CachedDisk,
    cache_options: &CacheOptions,
    options: &ImageOptions,
    line: ByteLen,
) -> Result<PreparedCache, CacheError> {
    cache_options.check()?;
    let file_state = match &cache_options.file {
        ImageAddress::Path(path) => CacheFileState::inspect(path, cache_options.size)?.create(path)?,
        ImageAddress::Nbd(_) => CacheFileState::Filled,
    };
    // From here on the cache is locked against other processes.
    let fast = open_device(on, cache_options, options, Some(disk)).await?;
    let found = match read_checked_superblock(&fast, (&disk.image, &disk.identity), cache_options).await {
        Ok(None) if matches!(file_state, CacheFileState::Filled) => {
            // Nothing was created, so there is nothing to undo.
            refuse_occupied(on, &fast, &cache_options.file).await?;
            tracing::info!(
                "{}: creating a cache for it on {}, which begins with zeros",
                disk.image,
                cache_options.file
            );
            create(&fast, disk, cache_options, line).await
        }
        Ok(None) => create(&fast, disk, cache_options, line).await,
        Ok(Some(superblock)) => Ok(superblock),
        Err(error) => Err(error),
    };
    let found = found.and_then(|superblock| Ok((lock(&cache_options.file, &superblock)?, superblock)));
    let (lock, superblock) = found.inspect_err(|_| file_state.undo_creation(&cache_options.file))?;
    Ok(PreparedCache { options: cache_options.clone(), fast, superblock, file_state, lock })
}

impl OpenCache {
    /// Allocates the cache's file again: a cache that starts empty has given space back.
    pub(super) async fn allocate(&self, image: &ImageAddress) {
        if let Err(error) = allocate(&self.fast, &self.file).await {
            tracing::warn!("{image}: its cache: {error}; the cache will fail when space runs out");
        }
    }
}

impl PreparedCache {
    /// Abandons the cache: a file that was created for it is removed.
    pub(super) fn undo_creation(self) {
        self.file_state.undo_creation(&self.options.file);
    }

    /// Opens the cache over the disk. Only this cache and `predecessor`, which it replaces, may have dirty data of the
    /// disk.
    ///
    /// # Errors
    /// See [`CacheError`]; a file that was created for the cache is removed then.
    pub(super) async fn open(
        self,
        on: &Loop,
        disk: &CachedDisk,
        predecessor: Option<&OpenCache>,
    ) -> Result<OpenCache, CacheError> {
        let size = self.fast.geometry().size;
        let memory = MemoryShare::new(memory_limit(size));
        let opened = open_prepared(on, &self, disk, predecessor).await;
        let (layer, state_file) = opened.inspect_err(|_| self.file_state.undo_creation(&self.options.file))?;
        Ok(OpenCache {
            layer,
            size,
            _memory: memory,
            fast: self.fast,
            file: self.options.file,
            state_file,
            keeps_state_file: disk.lacks_timestamps,
            lock: RefCell::new(self.lock),
        })
    }
}

/// Returns the memory limit of a cache of this size for any line length, in bytes.
fn memory_limit(size: ByteLen) -> u64 {
    CACHE_MEMORY_BASE_BYTES + size.get() / CACHE_LINE_BYTES_MIN * CACHE_MEMORY_PER_LINE_BYTES
}

/// Locks the state file of a cache in use, if the cache itself is on something that cannot be locked.
pub(super) fn lock(file: &ImageAddress, superblock: &Superblock) -> Result<Option<CacheLock>, CacheError> {
    let ImageAddress::Nbd(_) = file else { return Ok(None) };
    StateFile::for_cache(superblock).lock().or_else(|error| match error.kind() {
        ErrorKind::WouldBlock => Err(CacheError::InUse { file: file.to_string() }),
        // Then the state file cannot be written either, which is reported.
        _ => Ok(None),
    })
}

/// State of a file before it becomes a cache.
#[derive(Clone, Copy)]
enum CacheFileState {
    /// Does not exist, and is to be created with this size.
    Missing(ByteLen),
    /// Exists and is empty, and is to get this size.
    Empty(ByteLen),
    /// Has content, or is not a regular file.
    Filled,
}

impl CacheFileState {
    fn inspect(path: &Path, size: Option<ByteLen>) -> Result<Self, CacheError> {
        let size = size.map(round_up_size);
        let path = || path.to_owned();
        match opener::metadata(&path()) {
            Err(error) if error.kind() == ErrorKind::NotFound => match size {
                Some(size) => Ok(Self::Missing(size)),
                None => Err(CacheError::Missing { path: path() }),
            },
            Ok(found) if found.is_file() && found.len() == 0 => match size {
                Some(size) => Ok(Self::Empty(size)),
                None => Err(CacheError::Empty { path: path() }),
            },
            // The caller's open reports the error.
            _ => Ok(Self::Filled),
        }
    }

    fn create(self, path: &Path) -> Result<Self, CacheError> {
        let (size, is_new) = match self {
            Self::Missing(size) => (size, true),
            Self::Empty(size) => (size, false),
            Self::Filled => return Ok(self),
        };
        // The cache will hold the disk's data, so only this user may read it.
        let file = match is_new {
            true => opener().create_file(path),
            false => opener().open(path, Access::Write, PathSource::User),
        };
        let created = file.and_then(|file| {
            let sized = file.set_len(size.get());
            sized.inspect_err(|_| self.undo_creation(&ImageAddress::Path(path.to_owned())))
        });
        match created {
            Ok(()) => Ok(self),
            Err(source) => Err(create_error(path, size, source)),
        }
    }

    /// Undoes the creation as far as possible.
    fn undo_creation(self, file: &ImageAddress) {
        let ImageAddress::Path(path) = file else { return };
        let _ = match self {
            Self::Missing(_) => opener().remove(path),
            Self::Empty(_) => {
                let file = opener().open(path, Access::Write, PathSource::User);
                file.and_then(|file| file.set_len(0))
            }
            Self::Filled => Ok(()),
        };
    }
}

/// Returns the reason why a cache file cannot be made as large as requested.
pub(super) fn create_error(path: &Path, size: ByteLen, source: std::io::Error) -> CacheError {
    let path = path.to_owned();
    let limit = getrlimit(Resource::Fsize).current;
    match source.kind() {
        ErrorKind::FileTooLarge if limit.is_some_and(|limit| limit < size.get()) => CacheError::Limit { path, size },
        // `InvalidInput` is the error for a size that no file system supports.
        ErrorKind::FileTooLarge | ErrorKind::InvalidInput => CacheError::TooLarge { path, size },
        _ => CacheError::Create { path, source },
    }
}

/// Returns the address in a form that is valid in every process of this host.
pub(crate) fn absolute(address: &ImageAddress) -> String {
    match address {
        ImageAddress::Path(path) => std::path::absolute(path).unwrap_or_else(|_| path.clone()).display().to_string(),
        ImageAddress::Nbd(uri) => uri.to_string(),
    }
}

/// Rounds a size up to one that a cache file can have.
pub(super) fn round_up_size(size: ByteLen) -> ByteLen {
    ByteLen::new(size.get().next_multiple_of(FILE_SIZE_UNIT_BYTES))
}

/// Returns whether opening the cache, with a size given, would create it.
pub(super) fn would_be_created(file: &ImageAddress) -> bool {
    match file {
        ImageAddress::Path(path) => {
            !matches!(CacheFileState::inspect(path, Some(ByteLen::mib(1))), Ok(CacheFileState::Filled))
        }
        ImageAddress::Nbd(_) => false,
    }
}

pub(super) fn is_file(file: &ImageAddress) -> bool {
    match file {
        ImageAddress::Path(path) => opener::metadata(path).is_ok_and(|found| found.is_file()),
        ImageAddress::Nbd(_) => false,
    }
}

/// Opens the device of a cache for a disk; without a disk, read-only and for inspection.
async fn open_device(
    on: &Loop,
    cache_options: &CacheOptions,
    options: &ImageOptions,
    disk: Option<&CachedDisk>,
) -> Result<Rc<dyn BlockDevice>, CacheError> {
    let nbd = &options.nbd;
    let inspect_only = disk.is_none();
    let options = ImageOptions {
        role: disk.map_or(FileRole::Image, |disk| FileRole::CacheOf(disk.image.to_string())),
        read_only: inspect_only,
        // The cache's server may be running.
        share: inspect_only,
        // The supervisor's claim covers the disk's own files only.
        claim: match options.claim {
            LockMode::Unlocked => LockMode::Unlocked,
            _ => LockMode::Direct,
        },
        nbd: NbdOptions {
            reconnect: nbd.reconnect.min(NBD_CACHE_TIMEOUT),
            request_timeout: nbd.request_timeout.min(NBD_CACHE_TIMEOUT),
            ..nbd.clone()
        },
        ..options.clone()
    };
    let opened = open_bytes(on, &cache_options.file, &options, false).await;
    opened.map_err(|error| CacheError::Device(Box::new(error)))
}

/// Reads a cache's superblock and checks it against the options; `None` if the device is empty.
async fn read_checked_superblock(
    fast: &Rc<dyn BlockDevice>,
    (image, identity): (&ImageAddress, &[u8]),
    cache_options: &CacheOptions,
) -> Result<Option<Superblock>, CacheError> {
    let superblock = match read_superblock(fast).await {
        Err(error) if is_no_cache(&error) && foreign_data::begins_with_zeros(fast).await? => None,
        Err(error) if is_no_cache(&error) => {
            return Err(CacheError::NotEmpty {
                file: cache_options.file.to_string(),
                is_file: is_file(&cache_options.file),
            });
        }
        found => Some(found?),
    };
    let size = fast.geometry().size;
    if let Some(requested) = cache_options.size.map(round_up_size).filter(|wished| *wished != size) {
        return Err(CacheError::SizeMismatch {
            file: cache_options.file.to_string(),
            actual: size,
            requested,
            is_file: is_file(&cache_options.file),
        });
    }
    let Some(superblock) = superblock else { return Ok(None) };
    if superblock.disk.identity != identity {
        return Err(CacheError::from(CacheOpenError::OtherDisk {
            cache: cache_options.file.to_string(),
            is_renewed: superblock.disk.name == absolute(image),
            other: superblock.disk.name,
        }));
    }
    if let Some(requested) = cache_options.line.filter(|wished| wished.get() != superblock.layout.line_len()) {
        return Err(CacheError::LineMismatch {
            file: cache_options.file.to_string(),
            actual: ByteLen::new(superblock.layout.line_len()),
            requested,
        });
    }
    if cache_options.mode.unwrap_or(superblock.mode) == CacheMode::WriteBack {
        check_write_back(&cache_options.file)?;
    }
    Ok(Some(superblock))
}

/// Returns whether the error means that the device has no cache, not even a damaged one.
pub(super) fn is_no_cache(error: &CacheOpenError) -> bool {
    matches!(error, CacheOpenError::Superblock { source: SuperblockError::NoMagic, .. })
}

async fn open_prepared(
    on: &Loop,
    prepared: &PreparedCache,
    disk: &CachedDisk,
    predecessor: Option<&OpenCache>,
) -> Result<(Rc<Cache>, StateFileWriter), CacheError> {
    let PreparedCache { options: wish, fast, superblock, .. } = prepared;
    let mode = wish.mode.unwrap_or(superblock.mode);
    let state_file = StateFile::for_cache(superblock);
    if let Err(error) = state_file.adopt(&disk.identity) {
        tracing::warn!("cache {}: the state file of an earlier server cannot be used: {error}", wish.file);
    }
    let used: Vec<&StateFile> =
        predecessor.map(|cache| cache.state_file.state_file()).into_iter().chain([&state_file]).collect();
    mark_others_stale(on, disk, &used, &state_file).await?;
    if superblock.clean
        && !wish.force
        && let Some(newer) = state_file.newer_than(superblock)
    {
        let file = wish.file.to_string();
        return Err(CacheError::OlderCopy { file, newer });
    }
    let state_verdict = match superblock.clean {
        true => StateVerdict::Trusted(Verdict::Unchanged),
        false => match state_file.verdict(superblock, &disk.files, &disk.proof) {
            StateVerdict::Trusted(_) | StateVerdict::Detached(_) if disk.last_use == LastUse::OtherHost => {
                StateVerdict::Modified
            }
            state_verdict => state_verdict,
        },
    };
    let verdict = match state_verdict {
        StateVerdict::Trusted(Verdict::Unproven) if wish.exclusive => Verdict::Unchanged,
        StateVerdict::Trusted(verdict) => verdict,
        // Untrusted data is discarded below.
        _ => Verdict::Unchanged,
    };
    let trust_reason = match state_verdict {
        _ if superblock.clean => None,
        StateVerdict::Trusted(Verdict::Unchanged) => Some("nothing else has written to the disk since"),
        StateVerdict::Trusted(_) if wish.exclusive => {
            Some("nothing else writes to the disk, according to cache-exclusive")
        }
        _ => None,
    };
    let is_proven = state_verdict != StateVerdict::Trusted(Verdict::Unproven);
    let mut detached = stale_data(superblock, state_verdict, &state_file, disk, wish)?;
    let close_verdict = superblock.clean.then(|| state_file.close_verdict(superblock));
    let used_without_cache = match close_verdict {
        Some(StateVerdict::Modified) => {
            tracing::warn!(
                "{}: the disk was used without its cache {} after the cache was closed, so the cached data is not used",
                disk.image,
                wish.file
            );
            true
        }
        // A closed cache keeps its state file if nothing else shows that the disk was used without it.
        Some(StateVerdict::Unknown) if disk.lacks_timestamps && !superblock.may_be_dirty => {
            tracing::warn!(
                "{}: its cache {} was closed, but the state file that records whether the disk was used without it does not exist (expected at {}), so the cached data is not used",
                disk.image,
                wish.file,
                state_file.display_path()
            );
            true
        }
        _ => false,
    };
    // Only the user may discard a cache that may be dirty.
    let must_discard = used_without_cache && !superblock.may_be_dirty;
    let is_forced = wish.force && superblock.clean && superblock.may_be_dirty;
    if must_discard || is_forced {
        detached = Some(FailureRecord::default());
    }
    let mut disk_id = disk.id();
    if used_without_cache {
        disk_id.fingerprint = USED_FINGERPRINT.to_vec();
    }
    let is_dirty = mode == CacheMode::WriteBack || superblock.may_be_dirty;
    let use_id =
        u128::from_le_bytes(random().map_err(|error| CacheError::Cache(format!("getrandom(2): {error}")))?) as u64;
    // Until all marks are renewed for this use, marks of the previous use count for the cache as well.
    let mut uses = disk.proof.marked_uses(&state_file.uses(superblock));
    uses.push(use_id);
    let files = (&disk.files[..], is_proven);
    let made = state_file.create(superblock, &wish.file, is_dirty, detached.as_ref(), files, uses);
    let made = match made {
        Ok(made) => made,
        Err(error) if is_dirty => {
            return Err(CacheError::StateFileUnwritable {
                file: wish.file.to_string(),
                why: state_file_required(format_args!("{}: {error}", state_file.display_path())),
            });
        }
        Err(error) => {
            tracing::warn!(
                "{}: the state of its cache cannot be recorded ({}: {error}), so the cache will be empty after a kill or a crash{}",
                disk.image,
                state_file.display_path(),
                if disk.lacks_timestamps { ", and after a stop" } else { "" }
            );
            state_file.disabled()
        }
    };
    let files = disk.files.clone();
    let open = CacheOpenOptions {
        mode: wish.mode,
        disk: disk_id,
        verdict,
        fingerprint: Box::new(move || disk_id::join_fingerprints(&disk_id::current_fingerprints(&files))),
        failure: detached,
        failure_log: Box::new(made.clone()),
        boot: boot_id_for(&wish.file),
        load_ahead: true,
        persist: PersistOptions::default(),
        endurance: wish.endurance,
        cleaning: CleanOptions::default(),
    };
    let opened = Cache::open(on, Rc::clone(&disk.device), Rc::clone(fast), open).await;
    let cache = opened.inspect_err(|_| {
        if superblock.clean && !superblock.may_be_dirty {
            // The cache has no dirty data, so losing its state file costs nothing.
            let _ = made.remove();
        }
    })?;
    disk.proof.acknowledge(use_id);
    made.drop_previous_session();
    if let Some(why) = trust_reason {
        tracing::info!("{}: its cache {} was not closed; {why}, so all its data is used", disk.image, wish.file);
    }
    on.spawn(made.clone().track_changes(on.clone(), Rc::downgrade(&cache)));
    Ok((cache, made))
}

/// Prepares a disk for changes without the caches that have state files, except those of `used`: their clean data
/// becomes stale. The cache with the state file `new_state_file` may have replaced some of them.
///
/// # Errors
/// One of the caches may have dirty data.
async fn mark_others_stale(
    on: &Loop,
    disk: &CachedDisk,
    used: &[&StateFile],
    new_state_file: &StateFile,
) -> Result<(), CacheError> {
    let (replaced, other_caches) = other_caches(&disk.identity, used, Some(new_state_file));
    refuse_dirty(on, &other_caches).await?;
    if !disk.device.geometry().read_only {
        replaced.iter().chain(&other_caches).for_each(OtherCache::mark_used);
    }
    Ok(())
}

/// Refuses caches that may hold the only copy of data.
///
/// # Errors
/// One of the caches may have dirty data.
pub(super) async fn refuse_dirty(on: &Loop, other_caches: &[OtherCache]) -> Result<(), CacheError> {
    for other in other_caches.iter().filter(|cache| cache.is_dirty()) {
        let Some(file) = other.file() else { continue };
        match read_superblock_of(on, &file).await {
            Ok(superblock) if other.is_state_file_of(&superblock) && !superblock.may_be_dirty => {}
            Ok(superblock) if other.is_state_file_of(&superblock) => return Err(CacheError::OtherDirty { file }),
            Err(error) if is_denied(&error) && opener_client().is_some() => {
                return Err(CacheError::OtherNotNamed { file });
            }
            Err(error) if is_denied(&error) => return Err(CacheError::OtherDenied { file }),
            _ => return Err(CacheError::OtherMissing { file }),
        }
    }
    Ok(())
}

/// Returns whether the file exists, but may not be opened.
fn is_denied(error: &CacheError) -> bool {
    let CacheError::Device(error) = error else { return false };
    let causes = std::iter::successors(Some(&**error as &dyn std::error::Error), |cause| cause.source());
    let mut causes = causes.filter_map(|cause| cause.downcast_ref::<std::io::Error>());
    causes.any(|cause| cause.kind() == ErrorKind::PermissionDenied)
}

/// Reads the superblock of a cache.
async fn read_superblock_of(on: &Loop, file: &ImageAddress) -> Result<Superblock, CacheError> {
    let options = ImageOptions {
        read_only: true,
        share: true,
        nbd: NbdOptions { reconnect: NBD_CACHE_TIMEOUT, request_timeout: NBD_CACHE_TIMEOUT, ..NbdOptions::default() },
        ..ImageOptions::default()
    };
    let fast = open_bytes(on, file, &options, false).await;
    let fast = fast.map_err(|error| CacheError::Device(Box::new(error)))?;
    Ok(read_superblock(&fast).await?)
}

/// Decides which data of a cache that was not closed is stale; `None` if all of it can be used.
fn stale_data(
    superblock: &Superblock,
    state_verdict: StateVerdict,
    state_file: &StateFile,
    disk: &CachedDisk,
    cache_options: &CacheOptions,
) -> Result<Option<FailureRecord>, CacheError> {
    let file = || cache_options.file.to_string();
    let is_refused = superblock.may_be_dirty && !cache_options.force;
    match state_verdict {
        StateVerdict::Trusted(_) => return Ok(None),
        StateVerdict::Detached(detached) => {
            tracing::warn!(
                "{}: its cache {} had failed, so only its data that is not on the disk is used",
                disk.image,
                cache_options.file
            );
            return Ok(Some(detached));
        }
        StateVerdict::Unknown if is_refused => {
            return Err(CacheError::NoStateFile { file: file(), state_file: state_file.display_path() });
        }
        StateVerdict::Modified if is_refused => return Err(CacheError::DiskModified { file: file() }),
        StateVerdict::Unknown | StateVerdict::Modified if superblock.may_be_dirty => tracing::warn!(
            "{}: of its cache {}, only data that is not on the disk is used, as requested (--force)",
            disk.image,
            cache_options.file
        ),
        StateVerdict::Unknown => tracing::warn!(
            "{}: its cache {} was not closed, and no state file confirms that it worked until its server ended (expected at {}), so the cached data is not used",
            disk.image,
            cache_options.file,
            state_file.display_path()
        ),
        StateVerdict::Modified => tracing::warn!(
            "{}: its cache {} was not closed, and the disk was changed since without it, so the cached data is not used",
            disk.image,
            cache_options.file
        ),
    }
    Ok(Some(FailureRecord::default()))
}

/// Creates a cache on a device that is empty and locked.
async fn create(
    fast: &Rc<dyn BlockDevice>,
    disk: &CachedDisk,
    cache_options: &CacheOptions,
    line: ByteLen,
) -> Result<Superblock, CacheError> {
    allocate(fast, &cache_options.file).await?;
    let options = CacheCreateOptions {
        line_bits: cache_options.line.unwrap_or(line).get().trailing_zeros(),
        mode: cache_options.mode.unwrap_or_default(),
        uuid: random().map_err(|source| CacheError::Create { path: "getrandom(2)".into(), source })?,
        disk: disk.id(),
        disk_size: disk.device.geometry().size,
    };
    larder_cache::create(fast, &options).await?;
    Ok(read_superblock(fast).await?)
}

/// Refuses a device with foreign data.
///
/// # Errors
/// The device has data that is not Larder's.
async fn refuse_occupied(on: &Loop, fast: &Rc<dyn BlockDevice>, file: &ImageAddress) -> Result<(), CacheError> {
    let checked = foreign_data::check(on, fast, file).await;
    checked.map_err(|why| CacheError::Occupied { file: file.to_string(), why, is_file: is_file(file) })
}

/// Allocates the space of the cache on its file system, so that later writes cannot fail for lack of it. If the free
/// space obviously does not suffice, no allocation is started, since it would leave other programs without space
/// meanwhile.
pub(super) async fn allocate(fast: &Rc<dyn BlockDevice>, file: &ImageAddress) -> Result<(), CacheError> {
    let size = fast.geometry().size;
    let no_space_error = || CacheError::NoRoom { file: file.to_string(), size };
    if let ImageAddress::Path(path) = file
        && lacks_room(path, size)
    {
        return Err(no_space_error());
    }
    let full_range = ByteRange::between(ByteOffset::ZERO, ByteOffset::new(size.get()));
    match fast.allocate(full_range).await {
        Err(error) if error.failure() == Failure::NoSpace => Err(no_space_error()),
        result => Ok(result?),
    }
}

/// Returns whether a file's file system has less free space than the file still needs to reach this size.
fn lacks_room(path: &Path, size: ByteLen) -> bool {
    let Ok(file) = opener().open(path, Access::Inspect, PathSource::User) else {
        return false;
    };
    let (Ok(found), Ok(system)) = (file.metadata(), rustix::fs::fstatvfs(&file)) else {
        return false;
    };
    let allocated = found.blocks() * 512;
    found.is_file() && size.get().saturating_sub(allocated) > system.f_bavail.saturating_mul(system.f_frsize)
}

pub(crate) fn random() -> std::io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    let mut filled = 0;
    while filled < bytes.len() {
        filled += rustix::rand::getrandom(&mut bytes[filled..], GetRandomFlags::empty())?;
    }
    Ok(bytes)
}
