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

use super::cache_note::{Lock, Made, Note, Other, Says};
use super::cache_wish::CacheOptions;
use super::disk_id::DiskFile;
use super::open_cache::OpenCache;
use super::proof::Proof;
use super::{ImageAddress, ImageError, ImageOptions, disk_id, open_bytes, replaced};
use crate::data_limit::Share;
use crate::occupied::{self, Occupied};
use crate::opener::helper;

/// Checks that a cache on `file` may hold the only copy of data.
///
/// # Errors
/// Its NBD server may be on another host, and so may crash and lose unflushed data while this host, and so the guest,
/// keeps running.
pub(super) fn may_write_back(file: &ImageAddress) -> Result<(), CacheError> {
    match file {
        ImageAddress::Nbd(uri) if matches!(uri.address, SocketAddress::Tcp { .. }) => {
            Err(CacheError::Remote { file: file.to_string() })
        }
        _ => Ok(()),
    }
}

/// Returns an ID of the current boot of the host whose crash would lose the cache's unflushed data; zero if that host
/// may be another one.
pub(super) fn boot_of(file: &ImageAddress) -> [u8; 16] {
    match may_write_back(file) {
        Ok(()) => boot_id().unwrap_or_default().to_le_bytes(),
        Err(_) => [0; 16],
    }
}

pub(super) fn no_note(place: impl std::fmt::Display) -> String {
    format!(
        "the cache's state file cannot be written ({place}), and write-back needs it to know which cached data is valid after a kill or a crash; make it writable, or use wt (write-through)"
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
    Make { path: PathBuf, source: std::io::Error },
    #[error("{}: its file system does not support files of {size}; give a smaller cache-size, or use another file system", path.display())]
    TooLarge { path: PathBuf, size: ByteLen },
    #[error(
        "{}: no file of this process may be as large as {size} (RLIMIT_FSIZE: ulimit -f, or LimitFSIZE= of its service): raise that limit, or give a smaller cache-size",
        path.display()
    )]
    Limit { path: PathBuf, size: ByteLen },
    #[error("{file}: its file system has no space for {size}; free some, or give a smaller cache-size")]
    NoRoom { file: String, size: ByteLen },
    #[error("{file}: it has {is}, not {wished}; {}", what_of_other_size(*is_file))]
    OtherSize {
        file: String,
        is: ByteLen,
        wished: ByteLen,
        is_file: bool,
    },
    #[error(
        "{file}: its lines have {is}, not {wished}, which cannot be changed; omit cache-line, or drop the cache (larder disk cache drop) to create a new one"
    )]
    OtherLine { file: String, is: ByteLen, wished: ByteLen },
    #[error(
        "{file}: it is not a cache, and not empty: the data in its first MiB would be lost; give another file, or, if this one is no longer needed, {}",
        occupied::how_to_clear(*is_file)
    )]
    NotEmpty { file: String, is_file: bool },
    #[error("{file}: {why}, and is not overwritten: give another file or device, or clear this one if none of its data is needed ({})", occupied::how_to_clear(*is_file))]
    Occupied { file: String, why: Occupied, is_file: bool },
    #[error(
        "{file}: it was not closed, may have data that is not on the disk, and no state file confirms that it worked until its server ended (the state file is expected at {note}, and does not cover an older copy of the cache); serve the disk as the same user as before, with the cache that it was last used with; or, if the disk was not changed since then without its cache, write that data to the disk with `larder disk cache flush --force {file}`; or discard it with `larder disk cache drop --lose-dirty {file}`"
    )]
    NoNote { file: String, note: String },
    #[error(
        "{file}: it was not closed, may have data that is not on the disk, and the disk was changed since without it: only you can decide which data is valid: keep the disk as it is with `larder disk cache drop --lose-dirty {file}`; or, if only the image's timestamps are wrong, or after you have restored the image, write the cache's data to it with `larder disk cache flush --force {file}`"
    )]
    Changed { file: String },
    #[error(
        "{file}: write-back (wb) needs its cache on this host, in a file, on a block device, or served on a unix socket: another host may lose unflushed data while this one keeps running; use wt (write-through)"
    )]
    Remote { file: String },
    #[error("{file}: {why}")]
    Unnoted { file: String, why: String },
    #[error(
        "{file}, a cache of this disk, was not closed, and may have data that was never written to the disk: serve the disk with that cache; or write the data to the disk with `larder disk cache flush {file}`; or discard it with `larder disk cache drop --lose-dirty {file}`"
    )]
    LeftOut { file: ImageAddress },
    #[error(
        "{file}, a cache of this disk, was not closed, and may have data that was never written to the disk, and that cache is not there now: mount its file system, attach its device or restore its file, and serve the disk with it; or discard the data with `larder disk cache drop --lose-dirty {file}`"
    )]
    Away { file: ImageAddress },
    #[error(
        "{file}, a cache of this disk, was not closed, and may have data that was never written to the disk, and the VM's file does not name it, so this server may not open it: serve the disk with that cache (add cache = \"{file}\" to the VM's file); or write the data to the disk with `larder disk cache flush {file}`; or discard it with `larder disk cache drop --lose-dirty {file}`"
    )]
    NotNamed { file: ImageAddress },
    #[error(
        "{file}, a cache of this disk, was not closed, and may have data that was never written to the disk, and this user may not open it: as a user who may, serve the disk with that cache; or write the data to the disk with `larder disk cache flush {file}`; or discard it with `larder disk cache drop --lose-dirty {file}`"
    )]
    NotPermitted { file: ImageAddress },
    #[error(
        "{file}: it is an older copy of the disk's cache; the newer one was not closed, and may have data that was never written to the disk: serve the disk with that one, which was at {newer}; or discard its data with `larder disk cache drop --lose-dirty {newer}`"
    )]
    Older { file: String, newer: String },
    #[error(
        "{file}, a cache of this disk, is used by its server, and has data that is not on the disk: read the disk through that server"
    )]
    Served { file: ImageAddress },
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
    pub(super) fn of_served(self: Box<Self>) -> Box<Self> {
        match *self {
            Self::LeftOut { file } => Box::new(Self::Served { file }),
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

fn what_of_other_size(is_file: bool) -> &'static str {
    match is_file {
        true => "omit cache-size to keep the size; larder disk cache resize changes it",
        false => "a device is used as a whole: omit cache-size",
    }
}

/// Unit of the size of a new cache file, in bytes: a multiple of every alignment that direct I/O requires.
const FILE_UNIT: u64 = 4096;

/// Memory limit of a cache, in bytes, without the part that grows with its lines: journal, copies of writes, fills
/// and what a move needs.
const CACHE_MEMORY_BASE: u64 = 192 << 20;
/// Memory limit of a cache for each line, in bytes. Tables take about 12 bytes, and sets of lines up to 8; both take
/// twice as much while they grow.
const CACHE_MEMORY_PER_LINE: u64 = 32;
/// Length of the shortest line, in bytes.
const CACHE_LINE_MIN: u64 = 4096;

/// Longest wait for a cache on an NBD export: its disk has all data that is needed, and the guest is waiting.
const PATIENCE: Duration = Duration::from_secs(5);

/// Fingerprint of a disk that was used without its cache: no file has this fingerprint.
const USED_STAMP: &[u8] = b"used";

/// The disk that a cache is for.
pub(super) struct Cached {
    pub(super) image: ImageAddress,
    pub(super) device: Rc<dyn BlockDevice>,
    pub(super) identity: Vec<u8>,
    pub(super) files: Vec<DiskFile>,
    /// Proof for the files, since the disk was last used.
    pub(super) proof: Proof,
    /// Part of the disk is on a device or an export, which have no modification time that would show a foreign write.
    pub(super) lacks_times: bool,
    pub(super) used: Used,
}

/// Place and time of the last use of a disk, relative to a cache of it that was closed here or whose server was
/// killed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Used {
    /// The disk is being opened, and its files show whether it was used.
    AsFilesTell,
    /// On this host: a cache that was closed before is stale, whatever its fingerprint.
    Here,
    /// On another host: a cache that was not closed is stale too, even if the disk has no file whose modification
    /// time shows that.
    Elsewhere,
}

impl Cached {
    /// Returns the same disk with its files' current fingerprints.
    pub(super) fn again(&self) -> Self {
        Self {
            image: self.image.clone(),
            device: Rc::clone(&self.device),
            identity: self.identity.clone(),
            files: self.files.iter().map(DiskFile::again).collect(),
            proof: self.proof.clone(),
            lacks_times: self.lacks_times,
            used: Used::Here,
        }
    }

    fn id(&self) -> DiskId {
        DiskId {
            name: absolute(&self.image),
            identity: self.identity.clone(),
            fingerprint: match self.used {
                Used::AsFilesTell => disk_id::stamp_at_opening(&self.files),
                Used::Here | Used::Elsewhere => USED_STAMP.to_vec(),
            },
        }
    }
}

/// Checks whether a cache could be opened, as far as possible without changing anything, and whether the disk may be
/// used without its other caches.
pub(super) async fn look(
    on: &Loop,
    (image, identity): (&ImageAddress, &[u8]),
    wish: &CacheOptions,
    options: &ImageOptions,
) -> Result<(), CacheError> {
    wish.check()?;
    let note = match &wish.file {
        ImageAddress::Path(path) if matches!(Place::of(path, wish.size)?, Place::Filled) => {
            let fast = open_device(on, wish, options, None).await?;
            let found = match look_at(&fast, (image, identity), wish).await {
                Ok(None) => refuse_occupied(on, &fast, &wish.file).await.map(|()| None),
                found => found,
            };
            // Nothing was written, so a failed close loses nothing.
            let _ = fast.close().await;
            found?.as_ref().map(Note::of)
        }
        _ => None,
    };
    let (_, others) = others_of(identity, note.as_ref().as_slice(), note.as_ref());
    let others: Vec<Other> = others.into_iter().filter(Other::is_at_a_path).collect();
    refuse_dirty(on, &others).await
}

/// Returns the state files of the disk's caches except those in `used`: first of the caches that the cache with the
/// state file `new` has replaced, then of all others.
fn others_of(identity: &[u8], used: &[&Note], new: Option<&Note>) -> (Vec<Other>, Vec<Other>) {
    let replaced = new.map(replaced::old_of).unwrap_or_default();
    let others = Note::others(identity, used);
    others.into_iter().partition(|other| other.is_one_of(&replaced))
}

/// A cache that is locked for this process, but not open yet.
pub(super) struct Prepared {
    wish: CacheOptions,
    fast: Rc<dyn BlockDevice>,
    superblock: Superblock,
    /// State of its file before.
    was: Place,
    lock: Option<Lock>,
}

/// Locks the cache of a disk and reads its superblock. A cache that does not exist is created, with lines of `line`
/// unless the options give another length.
///
/// # Errors
/// See [`CacheError`]; a file that was created for the cache is removed then.
pub(super) async fn prepare(
    on: &Loop,
    disk: &Cached,
    wish: &CacheOptions,
    options: &ImageOptions,
    line: ByteLen,
) -> Result<Prepared, CacheError> {
    wish.check()?;
    let was = match &wish.file {
        ImageAddress::Path(path) => Place::of(path, wish.size)?.make(path)?,
        ImageAddress::Nbd(_) => Place::Filled,
    };
    // From here on the cache is locked against other processes.
    let fast = open_device(on, wish, options, Some(disk)).await?;
    let found = match look_at(&fast, (&disk.image, &disk.identity), wish).await {
        Ok(None) if matches!(was, Place::Filled) => {
            // Nothing was created, so there is nothing to undo.
            refuse_occupied(on, &fast, &wish.file).await?;
            tracing::info!(
                "{}: creating a cache for it on {}, which begins with zeros",
                disk.image,
                wish.file
            );
            create(&fast, disk, wish, line).await
        }
        Ok(None) => create(&fast, disk, wish, line).await,
        Ok(Some(superblock)) => Ok(superblock),
        Err(error) => Err(error),
    };
    let found = found.and_then(|superblock| Ok((lock(&wish.file, &superblock)?, superblock)));
    let (lock, superblock) = found.inspect_err(|_| was.undo(&wish.file))?;
    Ok(Prepared {
        wish: wish.clone(),
        fast,
        superblock,
        was,
        lock,
    })
}

impl OpenCache {
    /// Allocates the cache's file again: a cache that starts empty has given space back.
    pub(super) async fn allocate(&self, image: &ImageAddress) {
        if let Err(error) = allocate(&self.fast, &self.file).await {
            tracing::warn!("{image}: its cache: {error}; the cache will fail when space runs out");
        }
    }
}

impl Prepared {
    /// Abandons the cache: a file that was created for it is removed.
    pub(super) fn undo(self) {
        self.was.undo(&self.wish.file);
    }

    /// Opens the cache over the disk. Only this cache and `instead`, which it replaces, may have dirty data of the
    /// disk.
    ///
    /// # Errors
    /// See [`CacheError`]; a file that was created for the cache is removed then.
    pub(super) async fn open(
        self,
        on: &Loop,
        disk: &Cached,
        instead: Option<&OpenCache>,
    ) -> Result<OpenCache, CacheError> {
        let size = self.fast.geometry().size;
        let memory = Share::new(memory_of(size));
        let opened = open_on(on, &self, disk, instead).await;
        let (layer, note) = opened.inspect_err(|_| self.was.undo(&self.wish.file))?;
        Ok(OpenCache {
            layer,
            size,
            _memory: memory,
            fast: self.fast,
            file: self.wish.file,
            note,
            keeps_note: disk.lacks_times,
            lock: RefCell::new(self.lock),
        })
    }
}

/// Returns the memory limit of a cache of this size for any line length, in bytes.
fn memory_of(size: ByteLen) -> u64 {
    CACHE_MEMORY_BASE + size.get() / CACHE_LINE_MIN * CACHE_MEMORY_PER_LINE
}

/// Locks the state file of a cache in use, if the cache itself is on something that cannot be locked.
pub(super) fn lock(file: &ImageAddress, superblock: &Superblock) -> Result<Option<Lock>, CacheError> {
    let ImageAddress::Nbd(_) = file else { return Ok(None) };
    Note::of(superblock).lock().or_else(|error| match error.kind() {
        ErrorKind::WouldBlock => Err(CacheError::InUse { file: file.to_string() }),
        // Then the state file cannot be written either, which is reported.
        _ => Ok(None),
    })
}

/// State of a file before it becomes a cache.
#[derive(Clone, Copy)]
enum Place {
    /// Does not exist, and is to be created with this size.
    Missing(ByteLen),
    /// Exists and is empty, and is to get this size.
    Empty(ByteLen),
    /// Has content, or is not a regular file.
    Filled,
}

impl Place {
    fn of(path: &Path, size: Option<ByteLen>) -> Result<Self, CacheError> {
        let size = size.map(rounded);
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

    fn make(self, path: &Path) -> Result<Self, CacheError> {
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
        let made = file.and_then(|file| {
            let sized = file.set_len(size.get());
            sized.inspect_err(|_| self.undo(&ImageAddress::Path(path.to_owned())))
        });
        match made {
            Ok(()) => Ok(self),
            Err(source) => Err(not_made(path, size, source)),
        }
    }

    /// Undoes the creation as far as possible.
    fn undo(self, file: &ImageAddress) {
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
pub(super) fn not_made(path: &Path, size: ByteLen, source: std::io::Error) -> CacheError {
    let path = path.to_owned();
    let limit = getrlimit(Resource::Fsize).current;
    match source.kind() {
        ErrorKind::FileTooLarge if limit.is_some_and(|limit| limit < size.get()) => CacheError::Limit { path, size },
        // `InvalidInput` is the error for a size that no file system supports.
        ErrorKind::FileTooLarge | ErrorKind::InvalidInput => CacheError::TooLarge { path, size },
        _ => CacheError::Make { path, source },
    }
}

/// Returns the address in a form that is valid in every process of this host.
pub(crate) fn absolute(address: &ImageAddress) -> String {
    match address {
        ImageAddress::Path(path) => std::path::absolute(path)
            .unwrap_or_else(|_| path.clone())
            .display()
            .to_string(),
        ImageAddress::Nbd(uri) => uri.to_string(),
    }
}

/// Rounds a size up to one that a cache file can have.
pub(super) fn rounded(size: ByteLen) -> ByteLen {
    ByteLen::new(size.get().next_multiple_of(FILE_UNIT))
}

/// Returns whether opening the cache, with a size given, would create it.
pub(super) fn is_empty(file: &ImageAddress) -> bool {
    match file {
        ImageAddress::Path(path) => !matches!(Place::of(path, Some(ByteLen::mib(1))), Ok(Place::Filled)),
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
    wish: &CacheOptions,
    options: &ImageOptions,
    disk: Option<&Cached>,
) -> Result<Rc<dyn BlockDevice>, CacheError> {
    let nbd = &options.nbd;
    let only_to_look = disk.is_none();
    let options = ImageOptions {
        role: disk.map_or(FileRole::Image, |disk| FileRole::CacheOf(disk.image.to_string())),
        read_only: only_to_look,
        // The cache's server may be running.
        share: only_to_look,
        // The supervisor's claim covers the disk's own files only.
        claim: match options.claim {
            LockMode::Unlocked => LockMode::Unlocked,
            _ => LockMode::Direct,
        },
        nbd: NbdOptions {
            reconnect: nbd.reconnect.min(PATIENCE),
            request_timeout: nbd.request_timeout.min(PATIENCE),
            ..nbd.clone()
        },
        ..options.clone()
    };
    let opened = open_bytes(on, &wish.file, &options, false).await;
    opened.map_err(|error| CacheError::Device(Box::new(error)))
}

/// Reads a cache's superblock and checks it against the options; `None` if the device is empty.
async fn look_at(
    fast: &Rc<dyn BlockDevice>,
    (image, identity): (&ImageAddress, &[u8]),
    wish: &CacheOptions,
) -> Result<Option<Superblock>, CacheError> {
    let superblock = match read_superblock(fast).await {
        Err(error) if is_other(&error) && occupied::begins_with_zeros(fast).await? => None,
        Err(error) if is_other(&error) => {
            return Err(CacheError::NotEmpty {
                file: wish.file.to_string(),
                is_file: is_file(&wish.file),
            });
        }
        found => Some(found?),
    };
    let size = fast.geometry().size;
    if let Some(wished) = wish.size.map(rounded).filter(|wished| *wished != size) {
        return Err(CacheError::OtherSize {
            file: wish.file.to_string(),
            is: size,
            wished,
            is_file: is_file(&wish.file),
        });
    }
    let Some(superblock) = superblock else { return Ok(None) };
    if superblock.disk.identity != identity {
        return Err(CacheError::from(CacheOpenError::OtherDisk {
            cache: wish.file.to_string(),
            is_renewed: superblock.disk.name == absolute(image),
            other: superblock.disk.name,
        }));
    }
    if let Some(wished) = wish.line.filter(|wished| wished.get() != superblock.layout.line_len()) {
        return Err(CacheError::OtherLine {
            file: wish.file.to_string(),
            is: ByteLen::new(superblock.layout.line_len()),
            wished,
        });
    }
    if wish.mode.unwrap_or(superblock.mode) == CacheMode::WriteBack {
        may_write_back(&wish.file)?;
    }
    Ok(Some(superblock))
}

/// Returns whether the error means that the device has no cache, not even a damaged one.
pub(super) fn is_other(error: &CacheOpenError) -> bool {
    matches!(
        error,
        CacheOpenError::Superblock {
            source: SuperblockError::NoMagic,
            ..
        }
    )
}

async fn open_on(
    on: &Loop,
    prepared: &Prepared,
    disk: &Cached,
    instead: Option<&OpenCache>,
) -> Result<(Rc<Cache>, Made), CacheError> {
    let Prepared {
        wish, fast, superblock, ..
    } = prepared;
    let mode = wish.mode.unwrap_or(superblock.mode);
    let note = Note::of(superblock);
    if let Err(error) = note.adopt(&disk.identity) {
        tracing::warn!(
            "cache {}: the state file of an earlier server cannot be used: {error}",
            wish.file
        );
    }
    let used: Vec<&Note> = instead
        .map(|cache| cache.note.note())
        .into_iter()
        .chain([&note])
        .collect();
    leave_out_others(on, disk, &used, &note).await?;
    if superblock.clean
        && !wish.force
        && let Some(newer) = note.newer_than(superblock)
    {
        let file = wish.file.to_string();
        return Err(CacheError::Older { file, newer });
    }
    let says = match superblock.clean {
        true => Says::Believe(Verdict::Unchanged),
        false => match note.says(superblock, &disk.files, &disk.proof) {
            Says::Believe(_) | Says::Detached(_) if disk.used == Used::Elsewhere => Says::Changed,
            says => says,
        },
    };
    let verdict = match says {
        Says::Believe(Verdict::Unproven) if wish.exclusive => Verdict::Unchanged,
        Says::Believe(verdict) => verdict,
        // Untrusted data is discarded below.
        _ => Verdict::Unchanged,
    };
    let believed_after_kill = match says {
        _ if superblock.clean => None,
        Says::Believe(Verdict::Unchanged) => Some("nothing else has written to the disk since"),
        Says::Believe(_) if wish.exclusive => Some("nothing else writes to the disk, according to cache-exclusive"),
        _ => None,
    };
    let is_proven = says != Says::Believe(Verdict::Unproven);
    let mut detached = detached(superblock, says, &note, disk, wish)?;
    let closed = superblock.clean.then(|| note.says_of_closed(superblock));
    let is_used = match closed {
        Some(Says::Changed) => {
            tracing::warn!(
                "{}: the disk was used without its cache {} after the cache was closed, so the cached data is not used",
                disk.image,
                wish.file
            );
            true
        }
        // A closed cache keeps its state file if nothing else shows that the disk was used without it.
        Some(Says::Nothing) if disk.lacks_times && !superblock.may_be_dirty => {
            tracing::warn!(
                "{}: its cache {} was closed, but the state file that records whether the disk was used without it does not exist (expected at {}), so the cached data is not used",
                disk.image,
                wish.file,
                note.place()
            );
            true
        }
        _ => false,
    };
    // Only the user may discard a cache that may be dirty.
    let is_empty_then = is_used && !superblock.may_be_dirty;
    let is_forced = wish.force && superblock.clean && superblock.may_be_dirty;
    if is_empty_then || is_forced {
        detached = Some(FailureRecord::default());
    }
    let mut disk_id = disk.id();
    if is_used {
        disk_id.fingerprint = USED_STAMP.to_vec();
    }
    let is_dirty = mode == CacheMode::WriteBack || superblock.may_be_dirty;
    let of_use =
        u128::from_le_bytes(random().map_err(|error| CacheError::Cache(format!("getrandom(2): {error}")))?) as u64;
    // Until all marks are renewed for this use, marks of the previous use count for the cache as well.
    let mut uses = disk.proof.uses_of_marks(&note.uses(superblock));
    uses.push(of_use);
    let files = (&disk.files[..], is_proven);
    let made = note.make(superblock, &wish.file, is_dirty, detached.as_ref(), files, uses);
    let made = match made {
        Ok(made) => made,
        Err(error) if is_dirty => {
            return Err(CacheError::Unnoted {
                file: wish.file.to_string(),
                why: no_note(format_args!("{}: {error}", note.place())),
            });
        }
        Err(error) => {
            tracing::warn!(
                "{}: the state of its cache cannot be recorded ({}: {error}), so the cache will be empty after a kill or a crash{}",
                disk.image,
                note.place(),
                if disk.lacks_times { ", and after a stop" } else { "" }
            );
            note.unmade()
        }
    };
    let files = disk.files.clone();
    let open = CacheOpenOptions {
        mode: wish.mode,
        disk: disk_id,
        verdict,
        fingerprint: Box::new(move || disk_id::together(&disk_id::stamps_of_all(&files))),
        failure: detached,
        failure_log: Box::new(made.clone()),
        boot: boot_of(&wish.file),
        load_ahead: true,
        persist: PersistOptions::default(),
        endurance: wish.endurance,
        cleaning: CleanOptions::default(),
    };
    let opened = Cache::open(on, Rc::clone(&disk.device), Rc::clone(fast), open).await;
    let cache = opened.inspect_err(|_| {
        if superblock.clean && !superblock.may_be_dirty {
            // The cache has no dirty data, so losing its state file costs nothing.
            let _ = made.take_back();
        }
    })?;
    disk.proof.acknowledge(of_use);
    made.is_opened();
    if let Some(why) = believed_after_kill {
        tracing::info!(
            "{}: its cache {} was not closed; {why}, so all its data is used",
            disk.image,
            wish.file
        );
    }
    on.spawn(made.clone().keep(on.clone(), Rc::downgrade(&cache)));
    Ok((cache, made))
}

/// Prepares a disk for changes without the caches that have state files, except those of `used`: their clean data
/// becomes stale. The cache with the state file `new` may have replaced some of them.
///
/// # Errors
/// One of the caches may have dirty data.
async fn leave_out_others(on: &Loop, disk: &Cached, used: &[&Note], new: &Note) -> Result<(), CacheError> {
    let (old, others) = others_of(&disk.identity, used, Some(new));
    refuse_dirty(on, &others).await?;
    if !disk.device.geometry().read_only {
        old.iter().chain(&others).for_each(Other::is_used_without);
    }
    Ok(())
}

/// Refuses caches that may hold the only copy of data.
///
/// # Errors
/// One of the caches may have dirty data.
pub(super) async fn refuse_dirty(on: &Loop, others: &[Other]) -> Result<(), CacheError> {
    for other in others.iter().filter(|other| other.is_dirty()) {
        let Some(file) = other.file() else { continue };
        match read_superblock_of(on, &file).await {
            Ok(superblock) if other.is_of(&superblock) && !superblock.may_be_dirty => {}
            Ok(superblock) if other.is_of(&superblock) => return Err(CacheError::LeftOut { file }),
            Err(error) if is_denied(&error) && helper().is_some() => return Err(CacheError::NotNamed { file }),
            Err(error) if is_denied(&error) => return Err(CacheError::NotPermitted { file }),
            _ => return Err(CacheError::Away { file }),
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
        nbd: NbdOptions {
            reconnect: PATIENCE,
            request_timeout: PATIENCE,
            ..NbdOptions::default()
        },
        ..ImageOptions::default()
    };
    let fast = open_bytes(on, file, &options, false).await;
    let fast = fast.map_err(|error| CacheError::Device(Box::new(error)))?;
    Ok(read_superblock(&fast).await?)
}

/// Decides which data of a cache that was not closed is stale; `None` if all of it can be used.
fn detached(
    superblock: &Superblock,
    says: Says,
    note: &Note,
    disk: &Cached,
    wish: &CacheOptions,
) -> Result<Option<FailureRecord>, CacheError> {
    let file = || wish.file.to_string();
    let is_refused = superblock.may_be_dirty && !wish.force;
    match says {
        Says::Believe(_) => return Ok(None),
        Says::Detached(detached) => {
            tracing::warn!(
                "{}: its cache {} had failed, so only its data that is not on the disk is used",
                disk.image,
                wish.file
            );
            return Ok(Some(detached));
        }
        Says::Nothing if is_refused => {
            return Err(CacheError::NoNote {
                file: file(),
                note: note.place(),
            });
        }
        Says::Changed if is_refused => return Err(CacheError::Changed { file: file() }),
        Says::Nothing | Says::Changed if superblock.may_be_dirty => tracing::warn!(
            "{}: of its cache {}, only data that is not on the disk is used, as requested (--force)",
            disk.image,
            wish.file
        ),
        Says::Nothing => tracing::warn!(
            "{}: its cache {} was not closed, and no state file confirms that it worked until its server ended (expected at {}), so the cached data is not used",
            disk.image,
            wish.file,
            note.place()
        ),
        Says::Changed => tracing::warn!(
            "{}: its cache {} was not closed, and the disk was changed since without it, so the cached data is not used",
            disk.image,
            wish.file
        ),
    }
    Ok(Some(FailureRecord::default()))
}

/// Creates a cache on a device that is empty and locked.
async fn create(
    fast: &Rc<dyn BlockDevice>,
    disk: &Cached,
    wish: &CacheOptions,
    line: ByteLen,
) -> Result<Superblock, CacheError> {
    allocate(fast, &wish.file).await?;
    let options = CacheCreateOptions {
        line_bits: wish.line.unwrap_or(line).get().trailing_zeros(),
        mode: wish.mode.unwrap_or_default(),
        uuid: random().map_err(|source| CacheError::Make {
            path: "getrandom(2)".into(),
            source,
        })?,
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
    let checked = occupied::check(on, fast, file).await;
    checked.map_err(|why| CacheError::Occupied {
        file: file.to_string(),
        why,
        is_file: is_file(file),
    })
}

/// Allocates the space of the cache on its file system, so that later writes cannot fail for lack of it. If the free
/// space obviously does not suffice, no allocation is started, since it would leave other programs without space
/// meanwhile.
pub(super) async fn allocate(fast: &Rc<dyn BlockDevice>, file: &ImageAddress) -> Result<(), CacheError> {
    let size = fast.geometry().size;
    let no_room = || CacheError::NoRoom {
        file: file.to_string(),
        size,
    };
    if let ImageAddress::Path(path) = file
        && lacks_room(path, size)
    {
        return Err(no_room());
    }
    let whole = ByteRange::between(ByteOffset::ZERO, ByteOffset::new(size.get()));
    match fast.allocate(whole).await {
        Err(error) if error.failure() == Failure::NoSpace => Err(no_room()),
        result => Ok(result?),
    }
}

/// Returns whether a file's file system has less free space than the file still needs to reach this size.
fn lacks_room(path: &Path, size: ByteLen) -> bool {
    let Ok(place) = opener().open(path, Access::Inspect, PathSource::User) else {
        return false;
    };
    let (Ok(found), Ok(system)) = (place.metadata(), rustix::fs::fstatvfs(&place)) else {
        return false;
    };
    let has = found.blocks() * 512;
    found.is_file() && size.get().saturating_sub(has) > system.f_bavail.saturating_mul(system.f_frsize)
}

pub(crate) fn random() -> std::io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    let mut filled = 0;
    while filled < bytes.len() {
        filled += rustix::rand::getrandom(&mut bytes[filled..], GetRandomFlags::empty())?;
    }
    Ok(bytes)
}
