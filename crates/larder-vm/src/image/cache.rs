//! A disk's cache on a fast device: how users say it, and how it is made and opened.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::image_lock::Claim;
use larder_block::backend::nbd::NbdOptions;
use larder_block::boot::boot_id;
use larder_block::event_loop::SocketAddress;
use larder_block::{
    AlignedBuf, BlockDevice, ByteLen, ByteOffset, ByteRange, Failure, IoError, IoResult, Loop, ReadBuf,
};
use larder_cache::{
    Cache, CleanOptions, CreateOptions, Detached, DiskId, Mode, OpenError, OpenOptions, SettleOptions, Superblock,
    SuperblockError, read_superblock,
};

use super::cache_note::{Made, Note, Says};
use super::disk_id::DiskFile;
use super::{ImageAddress, ImageError, ImageOptions, disk_id, open_bytes};

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
const CACHE_ENDURANCE_MIN: ByteLen = ByteLen::mib(64);

/// Reads what may be written to a cache in a day.
///
/// # Errors
/// It is no size, or too little for any use, as a text for people.
pub fn parse_cache_endurance(text: &str) -> Result<ByteLen, String> {
    let bytes: ByteLen = text
        .parse()
        .map_err(|error: larder_block::SizeError| error.to_string())?;
    match bytes >= CACHE_ENDURANCE_MIN {
        true => Ok(bytes),
        false => Err(format!("give {CACHE_ENDURANCE_MIN} a day at least")),
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
                force: false,
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
    /// What only the cache has is right, also if the disk seems to have been changed without it.
    pub force: bool,
}

impl CacheOptions {
    fn check(&self) -> Result<(), CacheError> {
        match self.mode {
            Some(Mode::WriteBack) => may_write_back(&self.file),
            _ => Ok(()),
        }
    }
}

/// A cache that is open.
pub struct OpenCache {
    /// The layer of the disk's stack.
    pub layer: Rc<Cache>,
    /// What it is on.
    pub file: ImageAddress,
    /// How large that is.
    pub size: ByteLen,
    /// What may be written to it in a day.
    pub endurance: Option<ByteLen>,
    /// What is written to the disk because somebody wants it there.
    pub(crate) flush: Flush,
    note: Made,
}

impl OpenCache {
    /// After the disk was closed, and the cache with it: its note is of no use any more, unless it could not be closed.
    pub(crate) fn forget_note(&self) {
        if self.layer.works() {
            // One that stays speaks for this session only, which has ended.
            let _ = self.note.take_back();
        }
    }

    /// Has writes go another way; see [`Cache::set_mode`].
    ///
    /// # Errors
    /// As a text for people.
    pub(crate) async fn set_mode(&self, mode: Mode) -> Result<(), String> {
        if mode == Mode::WriteBack {
            may_write_back(&self.file).map_err(|error| error.to_string())?;
            if !self.note.is_there() {
                return Err(no_note(self.note.place()));
            }
        }
        let changed = self.flush.during(self.layer.set_mode(mode)).await;
        changed.map_err(|error| error.to_string())
    }

    /// Has the disk have all that only the cache has.
    ///
    /// # Errors
    /// As a text for people.
    pub(crate) async fn flush(&self) -> Result<(), String> {
        let flushed = self.flush.during(self.layer.clean()).await;
        flushed.map_err(|error| error.to_string())
    }
}

/// What is being written to the disk because somebody wants it there.
#[derive(Default)]
pub(crate) struct Flush {
    running: Cell<u32>,
    error: RefCell<Option<String>>,
}

impl Flush {
    async fn during(&self, work: impl Future<Output = IoResult>) -> IoResult {
        self.running.set(self.running.get() + 1);
        let done = work.await;
        self.running.set(self.running.get() - 1);
        *self.error.borrow_mut() = done.as_ref().err().map(ToString::to_string);
        done
    }

    /// It has not ended.
    pub(crate) fn is_running(&self) -> bool {
        self.running.get() > 0
    }

    /// Why the last one that has ended could not be done.
    pub(crate) fn error(&self) -> Option<String> {
        self.error.borrow().clone()
    }
}

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

fn no_note(place: impl std::fmt::Display) -> String {
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
    #[error("{}: it cannot be made: {source}", path.display())]
    Make { path: PathBuf, source: std::io::Error },
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
        how_to_empty(*is_file)
    )]
    NotEmpty { file: String, is_file: bool },
    #[error(
        "{file}: it was not closed, may have data that the disk has not, and nothing says that it has worked to its end (a note of that is looked for at {note}); serve the disk as the same user as before; or, if it was not changed since without its cache, have that data written to it with `larder disk cache flush --force`; or give it up with `larder disk cache drop --lose-dirty`"
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
    #[error(transparent)]
    Device(Box<ImageError>),
    /// What the cache itself, or its device, says.
    #[error("{0}")]
    Cache(String),
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

fn how_to_empty(is_file: bool) -> &'static str {
    match is_file {
        true => "remove it",
        false => "make its beginning zero (blkdiscard -z, or dd if=/dev/zero bs=1M count=1)",
    }
}

/// So much at its beginning must be zero for a device to be taken.
pub(super) const LOOKED_AT: u64 = 1 << 20;

/// What a file that is made is a multiple of, in bytes: every way to do direct I/O goes with that.
const FILE_UNIT: u64 = 4096;

/// How long a cache on an NBD export is waited for: its disk has all that is needed, and the guest waits.
const PATIENCE: Duration = Duration::from_secs(5);

/// The disk that a cache is for.
pub(super) struct Cached<'a> {
    pub(super) image: &'a ImageAddress,
    pub(super) device: &'a Rc<dyn BlockDevice>,
    pub(super) identity: Vec<u8>,
    pub(super) files: Vec<DiskFile>,
}

impl Cached<'_> {
    fn id(&self) -> DiskId {
        DiskId {
            name: absolute(self.image),
            identity: self.identity.clone(),
            stamp: disk_id::stamp_at_opening(&self.files),
        }
    }
}

/// Whether a cache could be opened, as far as that can be told without changing anything.
pub(super) fn look(wish: &CacheOptions) -> Result<(), CacheError> {
    wish.check()?;
    match &wish.file {
        ImageAddress::Path(path) => Place::of(path, wish.size).map(drop),
        ImageAddress::Nbd(_) => Ok(()),
    }
}

/// Opens the cache of a disk, which is made if it is not there.
pub(super) async fn open_over(
    on: &Loop,
    disk: Cached<'_>,
    wish: &CacheOptions,
    options: &ImageOptions,
) -> Result<OpenCache, CacheError> {
    wish.check()?;
    let made = match &wish.file {
        ImageAddress::Path(path) => Place::of(path, wish.size)?.make(path)?,
        ImageAddress::Nbd(_) => Place::Filled,
    };
    let fast = open_device(on, wish, options).await?;
    // From here on it is nobody else's.
    let opened = open_on(on, &fast, disk, wish).await;
    if let (Err(_), ImageAddress::Path(path)) = (&opened, &wish.file) {
        made.undo(path);
    }
    let (layer, note) = opened?;
    Ok(OpenCache {
        layer,
        file: wish.file.clone(),
        size: fast.geometry().size,
        endurance: wish.endurance,
        flush: Flush::default(),
        note,
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
        let size = size.filter(|size| size.get() > 0).map(rounded);
        let path = || path.to_owned();
        match path().metadata() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => match size {
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
        let file = File::options().write(true).create_new(is_new).mode(0o600).open(path);
        let made = file.and_then(|file| file.set_len(size.get()));
        match made {
            Ok(()) => Ok(self),
            Err(source) => {
                let path = path.to_owned();
                Err(CacheError::Make { path, source })
            }
        }
    }

    /// As well as that goes.
    fn undo(self, path: &Path) {
        let _ = match self {
            Self::Missing(_) => std::fs::remove_file(path),
            Self::Empty(_) => File::options().write(true).open(path).and_then(|file| file.set_len(0)),
            Self::Filled => Ok(()),
        };
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

pub(super) fn is_file(file: &ImageAddress) -> bool {
    match file {
        ImageAddress::Path(path) => path.metadata().is_ok_and(|found| found.is_file()),
        ImageAddress::Nbd(_) => false,
    }
}

async fn open_device(
    on: &Loop,
    wish: &CacheOptions,
    options: &ImageOptions,
) -> Result<Rc<dyn BlockDevice>, CacheError> {
    let nbd = &options.nbd;
    let options = ImageOptions {
        read_only: false,
        share: false,
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

async fn open_on(
    on: &Loop,
    fast: &Rc<dyn BlockDevice>,
    disk: Cached<'_>,
    wish: &CacheOptions,
) -> Result<(Rc<Cache>, Made), CacheError> {
    let size = fast.geometry().size;
    if let Some(wished) = wish.size.map(rounded).filter(|wished| *wished != size) {
        return Err(CacheError::OtherSize {
            file: wish.file.to_string(),
            is: size,
            wished,
            is_file: is_file(&wish.file),
        });
    }
    let superblock = match read_superblock(fast).await {
        Err(OpenError::Superblock {
            source: SuperblockError::NoMagic,
            ..
        }) => create(fast, &disk, wish).await?,
        found => found?,
    };
    if let Some(wished) = wish.line.filter(|wished| wished.get() != superblock.shape.line_len()) {
        return Err(CacheError::OtherLine {
            file: wish.file.to_string(),
            is: ByteLen::new(superblock.shape.line_len()),
            wished,
        });
    }
    let mode = wish.mode.unwrap_or(superblock.mode);
    if mode == Mode::WriteBack {
        may_write_back(&wish.file)?;
    }
    let note = Note::of(&superblock);
    let says = match superblock.clean {
        true => Says::Believe,
        false => note.says(&superblock, &disk.files),
    };
    let mut detached = detached(&superblock, says, &note, &disk, wish)?;
    if wish.force && superblock.clean && superblock.may_be_dirty {
        detached = Some(Detached::default());
    }
    let made = note.make(&superblock, detached.as_ref(), &disk.files);
    let made = match made {
        Ok(made) => made,
        Err(error) if mode == Mode::WriteBack || superblock.may_be_dirty => {
            return Err(CacheError::Unnoted {
                file: wish.file.to_string(),
                why: no_note(format_args!("{}: {error}", note.place())),
            });
        }
        Err(error) => {
            tracing::warn!(
                "{}: it cannot be noted that its cache works ({}: {error}), so after a kill or a crash the cache will begin anew, empty",
                disk.image,
                note.place()
            );
            note.unmade()
        }
    };
    let files = disk.files.clone();
    let open = OpenOptions {
        mode: wish.mode,
        disk: disk.id(),
        stamp: Box::new(move || disk_id::together(&disk_id::stamps_of_all(&files))),
        detached,
        witness: Box::new(made.clone()),
        boot: boot_of(&wish.file),
        load_ahead: true,
        settling: SettleOptions::default(),
        endurance: wish.endurance,
        cleaning: CleanOptions::default(),
    };
    let cache = Cache::open(on, Rc::clone(disk.device), Rc::clone(fast), open).await?;
    on.spawn(made.clone().keep(on.clone(), Rc::downgrade(&cache)));
    // What begins anew gives room back.
    if let Err(error) = allocate(fast, &wish.file).await {
        tracing::warn!("{}: its cache: {error}; it will fail when there is none", disk.image);
    }
    Ok((cache, made))
}

/// What of a cache that was not closed is not to be believed.
fn detached(
    superblock: &Superblock,
    says: Says,
    note: &Note,
    disk: &Cached<'_>,
    wish: &CacheOptions,
) -> Result<Option<Detached>, CacheError> {
    let file = || wish.file.to_string();
    let is_refused = superblock.may_be_dirty && !wish.force;
    match says {
        Says::Believe => return Ok(None),
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

/// Makes a cache of what is empty.
async fn create(fast: &Rc<dyn BlockDevice>, disk: &Cached<'_>, wish: &CacheOptions) -> Result<Superblock, CacheError> {
    if !begins_empty(fast).await? {
        return Err(CacheError::NotEmpty {
            file: wish.file.to_string(),
            is_file: is_file(&wish.file),
        });
    }
    allocate(fast, &wish.file).await?;
    let options = CreateOptions {
        line_bits: wish.line.unwrap_or(CACHE_LINE_DEFAULT).get().trailing_zeros(),
        mode: wish.mode.unwrap_or_default(),
        uuid: random().map_err(|source| CacheError::Make {
            path: "/dev/urandom".into(),
            source,
        })?,
        disk: disk.id(),
        disk_size: disk.device.geometry().size,
    };
    larder_cache::create(fast, &options).await?;
    Ok(read_superblock(fast).await?)
}

async fn begins_empty(fast: &Rc<dyn BlockDevice>) -> Result<bool, CacheError> {
    let len = fast.geometry().size.get().min(LOOKED_AT);
    let mut bytes = AlignedBuf::zeroed(len as usize);
    fast.read(ByteOffset::ZERO, ReadBuf::new(&mut bytes)).await?;
    Ok(bytes.iter().all(|byte| *byte == 0))
}

/// Takes the room on its file system, so that it does not fail for want of it.
pub(super) async fn allocate(fast: &Rc<dyn BlockDevice>, file: &ImageAddress) -> Result<(), CacheError> {
    let size = fast.geometry().size;
    let whole = ByteRange::between(ByteOffset::ZERO, ByteOffset::new(size.get()));
    match fast.allocate(whole).await {
        Err(error) if error.failure() == Failure::NoSpace => Err(CacheError::NoRoom {
            file: file.to_string(),
            size,
        }),
        result => Ok(result?),
    }
}

pub(super) fn random() -> std::io::Result<[u8; 16]> {
    let mut bytes = [0; 16];
    File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(bytes)
}
