//! A disk's cache on a fast device: how it is made and opened.

use std::cell::RefCell;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::file::Role;
use larder_block::backend::image_lock::Claim;
use larder_block::backend::nbd::NbdOptions;
use larder_block::boot::boot_id;
use larder_block::event_loop::SocketAddress;
use larder_block::opener::{self, Access, NamedBy, opener};
use larder_block::{BlockDevice, ByteLen, ByteOffset, ByteRange, Failure, IoError, Loop};
use larder_cache::{
    Cache, CleanOptions, CreateOptions, Detached, DiskId, Mode, OpenError, OpenOptions, SettleOptions, Superblock,
    SuperblockError, Verdict, read_superblock,
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

/// Whether a cache on `file` can be the only place that has something.
///
/// # Errors
/// Its server may lose what it has not flushed while this host, and so the guest, goes on.
pub(super) fn may_write_back(file: &ImageAddress) -> Result<(), CacheError> {
    match file {
        ImageAddress::Nbd(uri) if matches!(uri.address, SocketAddress::Tcp { .. }) => {
            Err(CacheError::Remote { file: file.to_string() })
        }
        _ => Ok(()),
    }
}

/// What tells two starts of the host of the cache apart; zero if nothing does.
pub(super) fn boot_of(file: &ImageAddress) -> [u8; 16] {
    match may_write_back(file) {
        Ok(()) => boot_id().unwrap_or_default().to_le_bytes(),
        Err(_) => [0; 16],
    }
}

pub(super) fn no_note(place: impl std::fmt::Display) -> String {
    format!(
        "it cannot be noted that the cache works, without which nobody could tell after a kill or a crash what of it is right, and write-back needs that ({place}); make that possible, or use wt (write-through)"
    )
}

/// Why a disk has not got its cache.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CacheError {
    #[error("{}: there is no such file; to have it made, say how large (cache-size)", path.display())]
    Missing { path: PathBuf },
    #[error("{}: it is empty; say how large it shall be (cache-size)", path.display())]
    Empty { path: PathBuf },
    #[error("{file}: a cache of 0 bytes (cache-size) holds nothing; leave the cache out to have none")]
    ZeroSize { file: String },
    #[error("{}: it cannot be made: {source}", path.display())]
    Make { path: PathBuf, source: std::io::Error },
    #[error("{}: its file system has no files of {size}; give a smaller cache-size, or another file system", path.display())]
    TooLarge { path: PathBuf, size: ByteLen },
    #[error(
        "{}: no file of this process may have {size} (RLIMIT_FSIZE: ulimit -f, or LimitFSIZE= of its service): raise that, or give a smaller cache-size",
        path.display()
    )]
    Limit { path: PathBuf, size: ByteLen },
    #[error("{file}: its file system has no room for {size}; make some, or give a smaller cache-size")]
    NoRoom { file: String, size: ByteLen },
    #[error("{file}: it has {is}, not {wished}; {}", what_of_other_size(*is_file))]
    OtherSize {
        file: String,
        is: ByteLen,
        wished: ByteLen,
        is_file: bool,
    },
    #[error(
        "{file}: its lines have {is}, not {wished}, and keep that; leave cache-line out, or drop the cache (larder disk cache drop) and begin anew"
    )]
    OtherLine { file: String, is: ByteLen, wished: ByteLen },
    #[error(
        "{file}: it is no cache, and not empty: what is in its first MiB would be lost; give another file, or, if it is of no use any more, {}",
        occupied::how_to_clear(*is_file)
    )]
    NotEmpty { file: String, is_file: bool },
    #[error("{file}: {why}, and is not overwritten: give another file or device, or clear this one if nothing on it is needed ({})", occupied::how_to_clear(*is_file))]
    Occupied { file: String, why: Occupied, is_file: bool },
    #[error(
        "{file}: it was not closed, may have data that the disk has not, and nothing says that it has worked to its end (a note of that is looked for at {note}, and says nothing of an older copy of the cache); serve the disk as the same user as before, with the cache that it was used with last; or, if it was not changed since without its cache, have that data written to it with `larder disk cache flush --force`; or give it up with `larder disk cache drop --lose-dirty`"
    )]
    NoNote { file: String, note: String },
    #[error(
        "{file}: it was not closed, may have data that the disk has not, and the disk was changed since without it: only you can say which is right: take the disk as it is with `larder disk cache drop --lose-dirty`, or write over it what the cache has with `larder disk cache flush --force`, if only the image's times are wrong, or once it is restored as it was"
    )]
    Changed { file: String },
    #[error(
        "{file}: write-back (wb) needs its cache on this host, in a file, on a block device, or served on a unix socket: another host may lose what it has not flushed while this one goes on; use wt (write-through)"
    )]
    Remote { file: String },
    #[error("{file}: {why}")]
    Unnoted { file: String, why: String },
    #[error(
        "{file}, a cache of it, was not closed, and may have data that was never written to it: serve it with that cache; or have that data written to it with `larder disk cache flush {file}`; or give it up with `larder disk cache drop --lose-dirty {file}`"
    )]
    LeftOut { file: ImageAddress },
    #[error(
        "{file}, a cache of it, was not closed, and may have data that was never written to it, and it is not there now: mount or attach what it is on, and serve it with that cache; or give that data up with `larder disk cache drop --lose-dirty {file}`"
    )]
    Away { file: ImageAddress },
    #[error(
        "{file}: it is an older copy of the disk's cache, which was not closed when it was used last, and may have data then that was never written to the disk: serve the disk with that one, as {newer} was; or give that data up with `larder disk cache drop --lose-dirty {newer}`"
    )]
    Older { file: String, newer: String },
    #[error("{file}, a cache of it, is used by its server, and has data that it has not: read it from that server")]
    Served { file: ImageAddress },
    #[error("{file}: another server uses it, or a command")]
    InUse { file: String },
    #[error(transparent)]
    Device(Box<ImageError>),
    /// What the cache itself, or its device, says.
    #[error("{0}")]
    Cache(String),
}

impl CacheError {
    /// The same of a disk that is being served.
    pub(super) fn of_served(self: Box<Self>) -> Box<Self> {
        match *self {
            Self::LeftOut { file } => Box::new(Self::Served { file }),
            _ => self,
        }
    }
}

impl From<OpenError> for CacheError {
    fn from(error: OpenError) -> Self {
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
        true => "leave cache-size out to keep it; larder disk cache resize changes it",
        false => "a device is taken whole: leave cache-size out",
    }
}

/// What a file that is made is a multiple of, in bytes: every way to do direct I/O goes with that.
const FILE_UNIT: u64 = 4096;

/// The memory of a cache: its journal, copies of writes, fills and what a move asks of it, in bytes; and...
const CACHE_MEMORY_BASE: u64 = 192 << 20;
/// ...for each line, of which the tables take about 12 bytes, and sets of lines up to 8, twice as much while they grow.
const CACHE_MEMORY_PER_LINE: u64 = 32;
/// Bytes of the shortest line.
const CACHE_LINE_MIN: u64 = 4096;

/// How long a cache on an NBD export is waited for: its disk has all that is needed, and the guest waits.
const PATIENCE: Duration = Duration::from_secs(5);

/// The stamp of a disk that was used without its cache: no disk's files have it.
const USED_STAMP: &[u8] = b"used";

/// The disk that a cache is for.
pub(super) struct Cached {
    pub(super) image: ImageAddress,
    pub(super) device: Rc<dyn BlockDevice>,
    pub(super) identity: Vec<u8>,
    pub(super) files: Vec<DiskFile>,
    /// Of the files, since the disk was used last.
    pub(super) proof: Proof,
    /// Part of it is on a device or an export, of which no file's times tell who has written to it.
    pub(super) lacks_times: bool,
    pub(super) used: Used,
}

/// Where a disk was used since a cache of it may have been closed here, or its server killed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Used {
    /// It is being opened, and its files tell.
    AsFilesTell,
    /// Here: a cache that was closed before does not fit it any more, whatever it looks like.
    Here,
    /// On another host: one that was not closed is not believed either, though the disk may have no file whose times say so.
    Elsewhere,
}

impl Cached {
    /// The same as it is now.
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
            stamp: match self.used {
                Used::AsFilesTell => disk_id::stamp_at_opening(&self.files),
                Used::Here | Used::Elsewhere => USED_STAMP.to_vec(),
            },
        }
    }
}

/// Whether a cache could be opened, as far as that can be told without changing anything.
pub(super) async fn look(
    on: &Loop,
    identity: &[u8],
    wish: &CacheOptions,
    options: &ImageOptions,
) -> Result<(), CacheError> {
    wish.check()?;
    match &wish.file {
        ImageAddress::Path(path) if matches!(Place::of(path, wish.size)?, Place::Filled) => {}
        _ => return Ok(()),
    }
    let fast = open_device(on, wish, options, None).await?;
    let fits = match look_at(&fast, identity, wish).await {
        Ok(None) => refuse_occupied(on, &fast, &wish.file).await,
        found => found.map(drop),
    };
    // Nothing was written.
    let _ = fast.close().await;
    fits
}

/// A cache that is not open yet, and nobody else's.
pub(super) struct Prepared {
    wish: CacheOptions,
    fast: Rc<dyn BlockDevice>,
    superblock: Superblock,
    /// What its file was before.
    was: Place,
    lock: Option<Lock>,
}

/// Looks at the cache of a disk, which is made, with lines of `line` if nothing else is wished, if it is not there.
///
/// # Errors
/// See [`CacheError`]; a file that was made for it is gone then.
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
    // From here on it is nobody else's.
    let fast = open_device(on, wish, options, Some(disk)).await?;
    let found = match look_at(&fast, &disk.identity, wish).await {
        Ok(None) if matches!(was, Place::Filled) => {
            // Nothing was made: there is nothing to undo.
            refuse_occupied(on, &fast, &wish.file).await?;
            tracing::info!(
                "{}: {}, which begins with zeros, becomes a cache of it",
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
    /// Takes its room on its file system once more: what begins anew gives room back.
    pub(super) async fn allocate(&self, image: &ImageAddress) {
        if let Err(error) = allocate(&self.fast, &self.file).await {
            tracing::warn!("{image}: its cache: {error}; it will fail when there is none");
        }
    }
}

impl Prepared {
    /// It is not wanted any more: a file that was made for it goes.
    pub(super) fn undo(self) {
        self.was.undo(&self.wish.file);
    }

    /// Opens it, over the disk. The caches that may have something of the disk are this one and `instead`, which it takes
    /// the place of.
    ///
    /// # Errors
    /// See [`CacheError`]; a file that was made for it is gone then.
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

/// Memory that a cache of this size takes at most, whatever the length of its lines, in bytes.
fn memory_of(size: ByteLen) -> u64 {
    CACHE_MEMORY_BASE + size.get() / CACHE_LINE_MIN * CACHE_MEMORY_PER_LINE
}

/// Locks a cache that is used, if it is on what cannot be locked itself.
pub(super) fn lock(file: &ImageAddress, superblock: &Superblock) -> Result<Option<Lock>, CacheError> {
    let ImageAddress::Nbd(_) = file else { return Ok(None) };
    Note::of(superblock).lock().or_else(|error| match error.kind() {
        ErrorKind::WouldBlock => Err(CacheError::InUse { file: file.to_string() }),
        // Then there is no note either, which is told.
        _ => Ok(None),
    })
}

/// A file, before it is a cache.
#[derive(Clone, Copy)]
enum Place {
    /// It is not there, and shall be so large.
    Missing(ByteLen),
    /// It has nothing, and shall be so large.
    Empty(ByteLen),
    /// It has something, or is no file.
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
            // Whoever opens it says what is wrong.
            _ => Ok(Self::Filled),
        }
    }

    fn make(self, path: &Path) -> Result<Self, CacheError> {
        let (size, is_new) = match self {
            Self::Missing(size) => (size, true),
            Self::Empty(size) => (size, false),
            Self::Filled => return Ok(self),
        };
        // It has what the disk has: for this user alone.
        let file = match is_new {
            true => opener().make(path),
            false => opener().open(path, Access::Write, NamedBy::User),
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

    /// As well as that goes.
    fn undo(self, file: &ImageAddress) {
        let ImageAddress::Path(path) = file else { return };
        let _ = match self {
            Self::Missing(_) => opener().remove(path),
            Self::Empty(_) => {
                let file = opener().open(path, Access::Write, NamedBy::User);
                file.and_then(|file| file.set_len(0))
            }
            Self::Filled => Ok(()),
        };
    }
}

/// Why a file of a cache cannot be made so large.
pub(super) fn not_made(path: &Path, size: ByteLen, source: std::io::Error) -> CacheError {
    let path = path.to_owned();
    let limit = getrlimit(Resource::Fsize).current;
    match source.kind() {
        ErrorKind::FileTooLarge if limit.is_some_and(|limit| limit < size.get()) => CacheError::Limit { path, size },
        // The second is what is said of a size that no file at all can have.
        ErrorKind::FileTooLarge | ErrorKind::InvalidInput => CacheError::TooLarge { path, size },
        _ => CacheError::Make { path, source },
    }
}

/// An address that means the same everywhere on this host.
pub(crate) fn absolute(address: &ImageAddress) -> String {
    match address {
        ImageAddress::Path(path) => std::path::absolute(path)
            .unwrap_or_else(|_| path.clone())
            .display()
            .to_string(),
        ImageAddress::Nbd(uri) => uri.to_string(),
    }
}

/// A size that the file of a cache can have.
pub(super) fn rounded(size: ByteLen) -> ByteLen {
    ByteLen::new(size.get().next_multiple_of(FILE_UNIT))
}

/// Whether a cache is made there, of the size that is said.
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

/// Opens what the cache is on for a disk; only to look without one.
async fn open_device(
    on: &Loop,
    wish: &CacheOptions,
    options: &ImageOptions,
    disk: Option<&Cached>,
) -> Result<Rc<dyn BlockDevice>, CacheError> {
    let nbd = &options.nbd;
    let only_to_look = disk.is_none();
    let options = ImageOptions {
        role: disk.map_or(Role::Image, |disk| Role::CacheOf(disk.image.to_string())),
        read_only: only_to_look,
        // Its server may still be there.
        share: only_to_look,
        // Whoever starts the servers of a disk has claimed the disk.
        claim: Claim::Own,
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

/// What a cache says of itself, which goes with what is wished; nothing if what it is on is empty.
async fn look_at(
    fast: &Rc<dyn BlockDevice>,
    identity: &[u8],
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
        return Err(CacheError::from(OpenError::OtherDisk {
            cache: wish.file.to_string(),
            other: superblock.disk.name,
        }));
    }
    if let Some(wished) = wish.line.filter(|wished| wished.get() != superblock.shape.line_len()) {
        return Err(CacheError::OtherLine {
            file: wish.file.to_string(),
            is: ByteLen::new(superblock.shape.line_len()),
            wished,
        });
    }
    if wish.mode.unwrap_or(superblock.mode) == Mode::WriteBack {
        may_write_back(&wish.file)?;
    }
    Ok(Some(superblock))
}

/// What is there is no cache, not even one that is damaged.
pub(super) fn is_other(error: &OpenError) -> bool {
    matches!(
        error,
        OpenError::Superblock {
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
        tracing::warn!("cache {}: what an earlier server has noted of it: {error}", wish.file);
    }
    let used: Vec<&Note> = instead
        .map(|cache| cache.note.note())
        .into_iter()
        .chain([&note])
        .collect();
    leave_out_others(on, disk, &used, &replaced::old_of(&note)).await?;
    if superblock.clean
        && !wish.force
        && let Some(newer) = note.newer_than(superblock)
    {
        let file = wish.file.to_string();
        return Err(CacheError::Older { file, newer });
    }
    let says = match superblock.clean {
        true => Says::Believe(Verdict::Proven),
        false => match note.says(superblock, &disk.files, &disk.proof) {
            Says::Believe(_) | Says::Detached(_) if disk.used == Used::Elsewhere => Says::Changed,
            says => says,
        },
    };
    let verdict = match says {
        Says::Believe(Verdict::Unproven) if wish.exclusive => Verdict::Proven,
        Says::Believe(verdict) => verdict,
        // What is not believed is given up below.
        _ => Verdict::Proven,
    };
    let believed_after_kill = match says {
        _ if superblock.clean => None,
        Says::Believe(Verdict::Proven) => Some("nothing else has written to the disk since"),
        Says::Believe(_) if wish.exclusive => Some("nothing else writes to the disk, as was said (cache-exclusive)"),
        _ => None,
    };
    let mut detached = detached(superblock, says, &note, disk, wish)?;
    let closed = superblock.clean.then(|| note.says_of_closed(superblock));
    let is_used = match closed {
        Some(Says::Changed) => {
            tracing::warn!(
                "{}: it was used without its cache {} since that was closed, so the cache is not believed",
                disk.image,
                wish.file
            );
            true
        }
        // Its note stays where nothing else tells whether the disk was used without it.
        Some(Says::Nothing) if disk.lacks_times && !superblock.may_be_dirty => {
            tracing::warn!(
                "{}: its cache {} was closed, but the note that tells whether the disk was used without it is gone (looked for at {}), so the cache is not believed",
                disk.image,
                wish.file,
                note.place()
            );
            true
        }
        _ => false,
    };
    // Of one that may be dirty the user decides.
    let is_empty_then = is_used && !superblock.may_be_dirty;
    let is_forced = wish.force && superblock.clean && superblock.may_be_dirty;
    if is_empty_then || is_forced {
        detached = Some(Detached::default());
    }
    let mut disk_id = disk.id();
    if is_used {
        disk_id.stamp = USED_STAMP.to_vec();
    }
    let is_dirty = mode == Mode::WriteBack || superblock.may_be_dirty;
    let of_use =
        u128::from_le_bytes(random().map_err(|error| CacheError::Cache(format!("getrandom(2): {error}")))?) as u64;
    // Until the last mark is of this use, marks of the one before speak for the cache.
    let mut uses = disk.proof.uses_of_marks(&note.uses(superblock));
    uses.push(of_use);
    let made = note.make(superblock, &wish.file, is_dirty, detached.as_ref(), &disk.files, uses);
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
    let open = OpenOptions {
        mode: wish.mode,
        disk: disk_id,
        verdict,
        stamp: Box::new(move || disk_id::together(&disk_id::stamps_of_all(&files))),
        detached,
        witness: Box::new(made.clone()),
        boot: boot_of(&wish.file),
        load_ahead: true,
        settling: SettleOptions::default(),
        endurance: wish.endurance,
        cleaning: CleanOptions::default(),
    };
    let opened = Cache::open(on, Rc::clone(&disk.device), Rc::clone(fast), open).await;
    let cache = opened.inspect_err(|_| {
        if superblock.clean && !superblock.may_be_dirty {
            // It has nothing that anybody would miss.
            let _ = made.take_back();
        }
    })?;
    disk.proof.acknowledge(of_use);
    made.is_opened();
    if let Some(why) = believed_after_kill {
        tracing::info!(
            "{}: its cache {} was not closed; {why}, so all that it has is used",
            disk.image,
            wish.file
        );
    }
    on.spawn(made.clone().keep(on.clone(), Rc::downgrade(&cache)));
    Ok((cache, made))
}

/// The disk is about to be changed without the caches that there are notes of, but for those of `used`: what they have in
/// common with it is not to be believed any more. The place of those that were `replaced` was taken.
///
/// # Errors
/// One of them may have something that the disk has not.
async fn leave_out_others(on: &Loop, disk: &Cached, used: &[&Note], replaced: &[Vec<u8>]) -> Result<(), CacheError> {
    let others = Note::others(&disk.identity, used);
    let (old, others): (Vec<Other>, Vec<Other>) = others.into_iter().partition(|other| other.is_one_of(replaced));
    refuse_dirty(on, &others).await?;
    if !disk.device.geometry().read_only {
        old.iter().chain(&others).for_each(Other::is_used_without);
    }
    Ok(())
}

/// # Errors
/// One of the caches may have something that its disk has not.
pub(super) async fn refuse_dirty(on: &Loop, others: &[Other]) -> Result<(), CacheError> {
    for other in others.iter().filter(|other| other.is_dirty()) {
        let Some(file) = other.file() else { continue };
        match read_superblock_of(on, &file).await {
            Some(superblock) if other.is_of(&superblock) && !superblock.may_be_dirty => {}
            Some(superblock) if other.is_of(&superblock) => return Err(CacheError::LeftOut { file }),
            _ => return Err(CacheError::Away { file }),
        }
    }
    Ok(())
}

/// `None` if there is none any more, or it cannot be read.
async fn read_superblock_of(on: &Loop, file: &ImageAddress) -> Option<Superblock> {
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
    let fast = open_bytes(on, file, &options, false).await.ok()?;
    read_superblock(&fast).await.ok()
}

/// What of a cache that was not closed is not to be believed.
fn detached(
    superblock: &Superblock,
    says: Says,
    note: &Note,
    disk: &Cached,
    wish: &CacheOptions,
) -> Result<Option<Detached>, CacheError> {
    let file = || wish.file.to_string();
    let is_refused = superblock.may_be_dirty && !wish.force;
    match says {
        Says::Believe(_) => return Ok(None),
        Says::Detached(detached) => {
            tracing::warn!(
                "{}: its cache {} had failed, so of it nothing is believed but what the disk has not",
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
            "{}: of its cache {} only what the disk has not is believed, as was asked for (--force)",
            disk.image,
            wish.file
        ),
        Says::Nothing => tracing::warn!(
            "{}: its cache {} was not closed, and there is no note that it has worked to its end (looked for at {}), so it is not believed",
            disk.image,
            wish.file,
            note.place()
        ),
        Says::Changed => tracing::warn!(
            "{}: its cache {} was not closed, and the disk was changed since without it, so it is not believed",
            disk.image,
            wish.file
        ),
    }
    Ok(Some(Detached::default()))
}

/// Makes a cache of what is empty, and locked.
async fn create(
    fast: &Rc<dyn BlockDevice>,
    disk: &Cached,
    wish: &CacheOptions,
    line: ByteLen,
) -> Result<Superblock, CacheError> {
    allocate(fast, &wish.file).await?;
    let options = CreateOptions {
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

/// # Errors
/// Something that is not Larder's is on it.
async fn refuse_occupied(on: &Loop, fast: &Rc<dyn BlockDevice>, file: &ImageAddress) -> Result<(), CacheError> {
    let checked = occupied::check(on, fast, file).await;
    checked.map_err(|why| CacheError::Occupied {
        file: file.to_string(),
        why,
        is_file: is_file(file),
    })
}

/// Takes the room on its file system, so that it does not fail for want of it. What is too large is not begun with: others
/// would have no room meanwhile.
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

/// Whether the file system of a file has less room than the file still needs for so many bytes.
fn lacks_room(path: &Path, size: ByteLen) -> bool {
    let Ok(place) = opener().open(path, Access::Look, NamedBy::User) else {
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
