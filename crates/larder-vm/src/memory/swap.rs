//! The disks that evicted pages go to: whose they are, and that nothing else is overwritten.
//!
//! ```text
//! byte 0    magic "LRDRSWAP"
//!      8    version, u32                   12   CRC32C of the 4 KiB with zeros here, u32
//!      16   identity, 16 bytes             32   segments, u32
//!      40   the process whose pages are here: its PID, u32; 48  when it was started, u64 (field 22 of /proc/PID/stat)
//!      56   1 if the file was made by Larder, which removes it in the end; else 0, u32
//!      1 MiB  the log (larder_memory::log), as many segments of 1 MiB
//! ```
//! All numbers are little-endian. What is in the log only the state in the managed process tells: when that ends, it is
//! worth nothing.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::file::{FileDevice, FileOptions, HeldFile, OpenError, claim, claim_device};
use larder_block::boot::is_tmpfs;
use larder_block::small_file;
use larder_block::{
    AlignedBuf, BlockDevice, ByteLen, ByteOffset, ByteRange, IoError, Loop, ReadBuf, WriteBuf, WriteFlags,
};
use larder_memory::attach::Swap;
use larder_memory::entry::Tier;
use larder_memory::log::{SEGMENT, SEGMENTS_MAX};
use larder_memory::state::SwapIdentity;
use larder_memory::store::DeviceStore;
use larder_memory::target::is_alive;
use rustix::fs::FallocateFlags;
use rustix::process::Pid;

use crate::image::{ImageAddress, ImageError, ImageOptions, open_export};
use crate::occupied::{self, Occupied, how_to_clear};

const MAGIC: &[u8; 8] = b"LRDRSWAP";
const VERSION: u32 = 1;
const HEADER: usize = 4096;
const CHECKSUM_AT: usize = 12;
const OWNER_AT: usize = 40;
const MADE_AT: usize = 56;
/// 1 if the pager has it by way of an NBD server, whose file this may be.
const EXPORTED_AT: usize = 60;
/// How often a file is made that another pager removes as it ends.
const TRIES_MAX: u32 = 3;
/// For so long requests wait for an NBD server that is away before they fail, and are made again and again.
const RECONNECT: Duration = Duration::from_secs(5);
/// The smallest swap cache that makes sense.
pub(super) const SIZE_MIN: ByteLen = ByteLen::new(16 << 20);

/// A disk for evicted pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwapConfig {
    /// A file, a block device, or an NBD export. A file that is not there is made, and removed in the end.
    pub address: ImageAddress,
    /// How much of it may be used; needed for a file, otherwise by default all.
    pub size: Option<ByteLen>,
}

/// Why a disk cannot be used for evicted pages.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum SwapError {
    #[error("swap cache {name}: {source}")]
    Image { name: String, source: ImageError },
    #[error("swap cache {name}: {what}: {source}")]
    Os {
        name: String,
        what: &'static str,
        source: io::Error,
    },
    #[error("swap cache {0}")]
    Io(String),
    #[error("swap cache {0}: it does not exist; say how large it may become (--swap-size, swap-size in a VM's file)")]
    NoSize(String),
    #[error("swap cache {name}: {size} is too small; {SIZE_MIN} is the least")]
    TooSmall { name: String, size: ByteLen },
    #[error("swap cache {name}: it has {has}, and {size} were asked for")]
    TooLarge { name: String, has: ByteLen, size: ByteLen },
    #[error(
        "swap cache {name}: pages of process {pid} are on it, whose pager has ended: start that one again (larder memory attach --pid {pid}), or give another path"
    )]
    Used { name: String, pid: u32 },
    #[error("{0} is given as the swap cache and as the slow store")]
    Twice(String),
    #[error("swap cache {name}: it is to have {size}, and there is room for {free}")]
    NoRoom { name: String, size: ByteLen, free: ByteLen },
    #[error("swap cache {0}: it is neither a file nor a block device")]
    Kind(String),
    #[error(
        "swap cache {name}: {why}, and is not overwritten: give another path, or clear it if nothing of it is needed (a file: {}; a device: {})",
        how_to_clear(true),
        how_to_clear(false)
    )]
    Foreign { name: String, why: Occupied },
    #[error("swap cache {name}: it is of version {version}; this program knows version {VERSION}")]
    Version { name: String, version: u32 },
    #[error(
        "swap cache {given}: pages of the process are on {left}, where its pager has put them: give that one, or none"
    )]
    Other { given: String, left: String },
    #[error(
        "swap cache {0}: it is not the one any more that pages of the process are on, or it is damaged: put it back"
    )]
    Gone(String),
    #[error("swap cache {0}: pages of the process are on it, and there is no such file any more: put it back")]
    Missing(String),
    #[error(
        "swap cache {name}: a file of {size} is larger than its file system allows, or a file of this process may be \
         (RLIMIT_FSIZE: ulimit -f, or LimitFSIZE= of its service): raise that, or give a smaller size"
    )]
    FileSize { name: String, size: ByteLen },
    #[error("swap cache {0}: a path with other bytes than UTF-8 cannot be noted")]
    Name(String),
}

/// A disk that was opened, and what becomes of it in the end.
pub(super) struct Opened {
    /// For the pager.
    pub(super) swap: Swap,
    /// To leave it behind.
    pub(super) rest: Leaving,
    /// It has no pages yet.
    pub(super) is_new: bool,
}

/// How a disk is left when its pages are not needed any more.
pub(super) struct Leaving {
    device: Rc<dyn BlockDevice>,
    kind: Kind,
}

/// The kinds of disks, by what is done with them in the end.
enum Kind {
    /// A file that Larder made: it is removed.
    Made(HeldFile),
    /// A file that was there before: it loses all that is in it, and keeps its size.
    Given(HeldFile),
    /// A block device or an export: its header is cleared.
    Device,
}

impl Kind {
    fn of(file: Option<HeldFile>, is_made: bool) -> Self {
        match (file, is_made) {
            (Some(file), true) => Self::Made(file),
            (Some(file), false) => Self::Given(file),
            (None, _) => Self::Device,
        }
    }
}

impl Leaving {
    /// Gives up all that is on it.
    pub(super) async fn leave(self) {
        let name = self.device.name().to_string();
        let left = match self.kind {
            Kind::Made(file) => remove(&file).map_err(|error| error.to_string()),
            Kind::Given(file) => file.clear().map_err(|error| error.to_string()),
            Kind::Device => {
                let zeros = AlignedBuf::zeroed(HEADER);
                let written = self
                    .device
                    .write(ByteOffset::ZERO, WriteBuf::new(&zeros), WriteFlags::FUA);
                written.await.map_err(|error| error.to_string())
            }
        };
        if let Err(error) = left {
            tracing::warn!("swap cache {name}: it is left with the pages on it, which nothing needs: {error}");
        }
    }
}

/// Removes the file, unless another one has taken its path by now.
fn remove(file: &HeldFile) -> io::Result<()> {
    match file.displaced()? {
        None => std::fs::remove_file(file.path()),
        Some(_) => Err(io::Error::other("it was moved or replaced while it was in use")),
    }
}

fn os(name: &str, what: &'static str) -> impl Fn(io::Error) -> SwapError {
    move |source| SwapError::Os {
        name: name.to_owned(),
        what,
        source,
    }
}

/// Whether both are disks of their own.
///
/// # Errors
/// They are the same.
pub(super) fn check_both(swap: Option<&SwapConfig>, slow: Option<&SwapConfig>) -> Result<(), SwapError> {
    let (Some(swap), Some(slow)) = (swap, slow) else {
        return Ok(());
    };
    let name = name_of(&swap.address)?;
    match name == name_of(&slow.address)? {
        true => Err(SwapError::Twice(name)),
        false => Ok(()),
    }
}

/// Opens the disk of this tier: the one that has pages already, if there is one.
///
/// # Errors
/// See [`SwapError`]. Nothing but a disk of Larder's was changed.
pub(super) async fn open(
    on: &Loop,
    tier: Tier,
    owner: Owner,
    config: Option<&SwapConfig>,
    left: Option<SwapIdentity>,
) -> Result<Option<Opened>, SwapError> {
    let (address, size) = match (config, &left) {
        (None, None) => return Ok(None),
        (Some(config), None) => (config.address.clone(), config.size),
        (config, Some(left)) => {
            let address: ImageAddress = left.name.parse().map_err(|_| SwapError::Gone(left.name.clone()))?;
            if let Some(given) = config.map(|config| name_of(&config.address)).transpose()?
                && given != left.name
            {
                let left = left.name.clone();
                return Err(SwapError::Other { given, left });
            }
            if let ImageAddress::Path(path) = &address
                && !path.exists()
            {
                return Err(SwapError::Missing(left.name.clone()));
            }
            (address, None)
        }
    };
    let is_new = left.is_none();
    let (device, file, before) = open_device(on, &address, size, is_new).await?;
    let name = name_of(&address)?;
    let found = read_header(&name, &device).await?;
    // Who is killed before the header is written leaves an empty file, which its successor takes for a user's.
    let is_made = before == Before::Missing || matches!(found, Header::Ours { is_made: true, .. });
    let is_exported = matches!(address, ImageAddress::Nbd(_));
    let identity = match left {
        Some(left) => match found {
            Header::Ours { uuid, .. } if uuid == left.uuid && segments_of(&device) >= left.segments => left,
            _ => return Err(SwapError::Gone(name)),
        },
        None => match found {
            Header::Foreign => return Err(foreign(&name)(Occupied::Data)),
            Header::Ours { of, .. } if of.pid != owner.pid && of.is_alive() => {
                return Err(SwapError::Used { name, pid: of.pid });
            }
            Header::Ours { .. } => begin(&name, &device, size, owner, is_made, is_exported).await?,
            Header::Nothing => {
                if before == Before::Unknown {
                    let checked = occupied::check(on, &device, &address).await;
                    checked.map_err(foreign(&name))?;
                }
                begin(&name, &device, size, owner, is_made, is_exported).await?
            }
        },
    };
    if is_new && file.as_ref().is_some_and(|file| is_in_memory(file.path())) {
        tracing::warn!(
            "swap cache {}: it is on tmpfs, which is memory itself: what goes there saves nothing; give a path on a disk",
            identity.name
        );
    }
    let store = DeviceStore::new(on, Rc::clone(&device), identity.segments);
    Ok(Some(Opened {
        swap: Swap {
            tier,
            identity,
            store: Box::new(store),
        },
        rest: Leaving {
            device,
            kind: Kind::of(file, is_made),
        },
        is_new,
    }))
}

/// The state of a new disk's path before it was opened.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Before {
    /// Nothing.
    Missing,
    /// A file of Larder's, or without data.
    Free,
    /// Something that has to be checked.
    Unknown,
}

/// Opens a disk, and makes its file if there is none. A file is returned open, too.
async fn open_device(
    on: &Loop,
    address: &ImageAddress,
    size: Option<ByteLen>,
    is_new: bool,
) -> Result<(Rc<dyn BlockDevice>, Option<HeldFile>, Before), SwapError> {
    let image = |source| SwapError::Image {
        name: address.to_string(),
        source,
    };
    let path = match address {
        ImageAddress::Path(path) => path,
        ImageAddress::Nbd(uri) => {
            let device = open_export(on, uri, &nbd_options()).await.map_err(image)?;
            return Ok((device, None, Before::Unknown));
        }
    };
    let mut tries = 0;
    loop {
        let before = match is_new {
            false => Before::Unknown,
            true => prepare(on, path, size).await?,
        };
        match open_claimed(on, path, is_new).await {
            Ok(device) => {
                let held = match path.is_file() {
                    true => Some(device.hold().map_err(os(&address.to_string(), "keep it open"))?),
                    false => None,
                };
                return Ok((device, held, before));
            }
            // Another pager had it until now, and has removed it in the end.
            Err(OpenError::Open { source, .. })
                if is_new && source.kind() == io::ErrorKind::NotFound && tries < TRIES_MAX =>
            {
                tries += 1;
            }
            Err(error) => return Err(image(error.into())),
        }
    }
}

/// Opens a disk that nothing else uses. Pages that are on it already are needed all the same.
async fn open_claimed(on: &Loop, path: &Path, is_new: bool) -> Result<Rc<FileDevice>, OpenError> {
    let options = FileOptions {
        exclusive: true,
        ..FileOptions::default()
    };
    match FileDevice::open(on, path, options).await {
        Err(error @ OpenError::Claimed { .. }) if !is_new => {
            tracing::warn!("{error}; it is used all the same, as pages of the process are on it");
            FileDevice::open(on, path, FileOptions::default()).await
        }
        opened => opened,
    }
}

/// That a server is away is to be known soon, as pages then stay in memory.
fn nbd_options() -> ImageOptions {
    let mut options = ImageOptions::default();
    options.nbd.reconnect = RECONNECT;
    options
}

/// What it is called, whatever folder this process is in.
fn name_of(address: &ImageAddress) -> Result<String, SwapError> {
    match address {
        ImageAddress::Path(path) => {
            let whole = path.canonicalize().or_else(|_| std::path::absolute(path));
            let whole = whole.unwrap_or_else(|_| path.clone());
            match whole.to_str() {
                Some(name) => Ok(name.to_owned()),
                None => Err(SwapError::Name(path.display().to_string())),
            }
        }
        ImageAddress::Nbd(uri) => Ok(uri.to_string()),
    }
}

fn segments_of(device: &Rc<dyn BlockDevice>) -> u32 {
    let log = device.geometry().size.get().saturating_sub(SEGMENT as u64);
    // Of more, entries could not say where in it a page is.
    u32::try_from(log / SEGMENT as u64).map_or(SEGMENTS_MAX, |segments| segments.min(SEGMENTS_MAX))
}

/// Makes a file that is not there, and gives one that is of Larder's or empty its size. Nothing is changed of one that
/// another process uses.
async fn prepare(on: &Loop, path: &Path, size: Option<ByteLen>) -> Result<Before, SwapError> {
    let name = path.display().to_string();
    let found = match path.metadata() {
        Ok(metadata) => Some(metadata),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(os(&name, "look at it")(error)),
    };
    if found.as_ref().is_some_and(|found| found.file_type().is_block_device()) {
        return Ok(Before::Unknown);
    }
    if found.as_ref().is_some_and(|found| !found.is_file()) {
        return Err(SwapError::Kind(name));
    }
    let Some(size) = size else {
        // A file that is there has its size.
        return match found.is_some_and(|found| found.len() > 0) {
            true => Ok(Before::Unknown),
            false => Err(SwapError::NoSize(name)),
        };
    };
    check_size(&name, size)?;
    let whole = size.get().saturating_add(SEGMENT as u64) / SEGMENT as u64 * SEGMENT as u64;
    look_for_room(&name, path, whole)?;
    let file = claim(on, path).await.map_err(|error| SwapError::Image {
        name: name.clone(),
        source: error.into(),
    })?;
    let before = file.metadata().map_err(os(&name, "look at it"))?.len();
    if !is_ours_or_empty(&file).map_err(os(&name, "read it"))? {
        return Err(foreign(&name)(Occupied::Data));
    }
    let sized = give_size(&name, &file, whole);
    if sized.is_err() {
        // What it has taken is given back.
        let undone = match found {
            None => std::fs::remove_file(path),
            Some(_) => file.set_len(before),
        };
        if let Err(error) = undone {
            tracing::warn!("swap cache {name}: it stays larger than it was: {error}");
        }
    }
    sized.map(|()| match found {
        None => Before::Missing,
        Some(_) => Before::Free,
    })
}

fn give_size(name: &str, file: &File, whole: u64) -> Result<(), SwapError> {
    file.set_len(whole).map_err(|error| match error.kind() {
        io::ErrorKind::FileTooLarge => SwapError::FileSize {
            name: name.to_owned(),
            size: ByteLen::new(whole),
        },
        _ => os(name, "give it its size")(error),
    })?;
    // Where there is no room for it, that is said now. A file system that cannot promise it does not.
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, whole) {
        Ok(()) | Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => Ok(()),
        Err(error) => Err(os(name, "find room for it")(error.into())),
    }
}

/// Whether it could be used; nothing is changed. NBD servers are not asked.
///
/// # Errors
/// It could not.
pub fn look_at_disk(disk: &SwapConfig) -> Result<(), SwapError> {
    let ImageAddress::Path(path) = &disk.address else {
        return Ok(());
    };
    let name = path.display().to_string();
    let found = match path.metadata() {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let Some(size) = disk.size else {
                return Err(SwapError::NoSize(name));
            };
            return look_for_room(&name, path, size.get());
        }
        Err(error) => return Err(os(&name, "look at it")(error)),
    };
    let is_device = found.file_type().is_block_device();
    if !found.is_file() && !is_device {
        return Err(SwapError::Kind(name));
    }
    let opened = match is_device {
        true => File::open(path),
        false => small_file::open(path),
    };
    let file = opened.map_err(os(&name, "open it"))?;
    if begins_with_magic(&file).map_err(os(&name, "read it"))? {
        // Perhaps its pager has it now.
        return disk.size.map_or(Ok(()), |size| match is_device {
            true => Ok(()),
            false => look_for_room(&name, path, size.get()),
        });
    }
    match disk.size {
        _ if is_device => {
            claim_device(path).map_err(|error| SwapError::Image {
                name: name.clone(),
                source: error.into(),
            })?;
            occupied::check_file(file).map_err(foreign(&name))
        }
        Some(size) => {
            look_for_room(&name, path, size.get())?;
            match is_ours_or_empty(&file).map_err(os(&name, "read it"))? {
                true => Ok(()),
                false => Err(foreign(&name)(Occupied::Data)),
            }
        }
        None if found.len() == 0 => Err(SwapError::NoSize(name)),
        // It is used as it is.
        None => {
            check_size(&name, ByteLen::new(found.len()))?;
            occupied::check_file(file).map_err(foreign(&name))
        }
    }
}

/// Whether the file can have so many bytes, with those that it has.
fn look_for_room(name: &str, path: &Path, whole: u64) -> Result<(), SwapError> {
    let path = std::path::absolute(path).map_err(os(name, "look at it"))?;
    let folder = path.parent().unwrap_or(Path::new("/"));
    let room = rustix::fs::statvfs(folder).map_err(|error| os(name, "look at its folder")(error.into()))?;
    let has = path.metadata().map_or(0, |found| found.blocks() * 512);
    let free = room.f_bavail.saturating_mul(room.f_frsize).saturating_add(has);
    match free < whole {
        true => Err(SwapError::NoRoom {
            name: name.to_owned(),
            size: ByteLen::new(whole),
            free: ByteLen::new(free / SEGMENT as u64 * SEGMENT as u64),
        }),
        false => Ok(()),
    }
}

/// Whether a file takes memory instead of room on a disk.
fn is_in_memory(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|found| is_tmpfs(&found))
}

fn check_size(name: &str, size: ByteLen) -> Result<(), SwapError> {
    if size < SIZE_MIN {
        let name = name.to_owned();
        return Err(SwapError::TooSmall { name, size });
    }
    Ok(())
}

/// Whether the file is of Larder's, or has nothing in it: one that was given its size and nothing else is of holes.
fn is_ours_or_empty(file: &File) -> io::Result<bool> {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(0)) {
        Err(rustix::io::Errno::NXIO) => return Ok(true),
        Ok(_) => {}
        Err(rustix::io::Errno::INVAL) if file.metadata()?.len() == 0 => return Ok(true),
        Err(rustix::io::Errno::INVAL) => {}
        Err(error) => return Err(error.into()),
    }
    begins_with_magic(file)
}

fn begins_with_magic(file: &File) -> io::Result<bool> {
    use std::os::unix::fs::FileExt as _;
    let mut begin = [0; MAGIC.len()];
    match file.read_exact_at(&mut begin, 0) {
        Ok(()) => Ok(begin == *MAGIC),
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
        Err(error) => Err(error),
    }
}

fn foreign(name: &str) -> impl Fn(Occupied) -> SwapError {
    move |why| SwapError::Foreign {
        name: name.to_owned(),
        why,
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Header {
    Nothing,
    Ours { uuid: [u8; 16], of: Owner, is_made: bool },
    Foreign,
}

/// The process whose pages are on a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Owner {
    /// Its PID.
    pub(super) pid: u32,
    /// See [`larder_memory::target::Target::started`].
    pub(super) started: u64,
}

impl Owner {
    fn is_alive(self) -> bool {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        pid.is_some_and(|pid| is_alive(pid, self.started))
    }
}

/// What is on the disk. All that is before the log must be empty, or ours.
async fn read_header(name: &str, device: &Rc<dyn BlockDevice>) -> Result<Header, SwapError> {
    let size = device.geometry().size;
    check_size(name, size)?;
    let mut bytes = AlignedBuf::zeroed(SEGMENT);
    device
        .read(ByteOffset::ZERO, ReadBuf::new(&mut bytes))
        .await
        .map_err(|error| SwapError::Io(error.to_string()))?;
    Header::parse(&mut bytes).map_err(|version| {
        let name = name.to_owned();
        SwapError::Version { name, version }
    })
}

impl Header {
    /// Of what is before the log, at least [`HEADER`] bytes; its version if that is not known.
    fn parse(bytes: &mut [u8]) -> Result<Self, u32> {
        if bytes[..8] != *MAGIC {
            return Ok(match bytes.iter().all(|byte| *byte == 0) {
                true => Self::Nothing,
                false => Self::Foreign,
            });
        }
        let header = &mut bytes[..HEADER];
        let half =
            |at: usize, header: &[u8]| u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]]);
        let version = half(8, header);
        if version != VERSION {
            return Err(version);
        }
        let checksum = half(CHECKSUM_AT, header);
        header[CHECKSUM_AT..CHECKSUM_AT + 4].fill(0);
        let (mut uuid, mut started) = ([0; 16], [0; 8]);
        let (mut pid, mut is_made) = (0, false);
        if crc32c::crc32c(header) == checksum {
            is_made = half(MADE_AT, header) == 1;
            uuid.copy_from_slice(&header[16..32]);
            pid = half(OWNER_AT, header);
            started.copy_from_slice(&header[OWNER_AT + 8..OWNER_AT + 16]);
        }
        // A damaged one is of no disk that anybody knows, and may be used anew.
        let of = Owner {
            pid,
            started: u64::from_le_bytes(started),
        };
        Ok(Self::Ours { uuid, of, is_made })
    }
}

/// The process that has pages on a disk with this beginning, of at least [`HEADER`] bytes; `None` if it is no swap cache, or
/// nobody's any more, or is used by way of an NBD server, which must be able to serve it. The bytes have no meaning after
/// that.
pub(crate) fn pages_of(beginning: &mut [u8]) -> Option<u32> {
    let exported = beginning[EXPORTED_AT..EXPORTED_AT + 4] == 1u32.to_le_bytes();
    match Header::parse(beginning) {
        Ok(Header::Ours { of, .. }) if of.is_alive() && !exported => Some(of.pid),
        _ => None,
    }
}

/// Reads `data` as the beginning of a disk.
pub(super) fn read_any(data: &[u8]) {
    let mut bytes = vec![0; HEADER];
    let len = data.len().min(HEADER);
    bytes[..len].copy_from_slice(&data[..len]);
    let is_empty = bytes.iter().all(|byte| *byte == 0);
    let found = Header::parse(&mut bytes);
    assert_eq!(found == Ok(Header::Nothing), is_empty);
    assert_eq!(found == Ok(Header::Foreign), !is_empty && !data.starts_with(MAGIC));
}

/// Claims the disk.
async fn begin(
    name: &str,
    device: &Rc<dyn BlockDevice>,
    size: Option<ByteLen>,
    owner: Owner,
    is_made: bool,
    is_exported: bool,
) -> Result<SwapIdentity, SwapError> {
    let has = segments_of(device);
    let segments = match size {
        None => has,
        Some(size) => {
            check_size(name, size)?;
            let wanted = u32::try_from(size.get() / SEGMENT as u64).unwrap_or(u32::MAX);
            if wanted > has {
                let has = ByteLen::new(u64::from(has) * SEGMENT as u64);
                let name = name.to_owned();
                return Err(SwapError::TooLarge { name, has, size });
            }
            wanted
        }
    };
    let uuid = crate::image::random().map_err(os(name, "choose its identity"))?;
    let mut header = AlignedBuf::zeroed(HEADER);
    header[..8].copy_from_slice(MAGIC);
    header[8..12].copy_from_slice(&VERSION.to_le_bytes());
    header[16..32].copy_from_slice(&uuid);
    header[32..36].copy_from_slice(&segments.to_le_bytes());
    header[OWNER_AT..OWNER_AT + 4].copy_from_slice(&owner.pid.to_le_bytes());
    header[OWNER_AT + 8..OWNER_AT + 16].copy_from_slice(&owner.started.to_le_bytes());
    header[MADE_AT..MADE_AT + 4].copy_from_slice(&u32::from(is_made).to_le_bytes());
    header[EXPORTED_AT..EXPORTED_AT + 4].copy_from_slice(&u32::from(is_exported).to_le_bytes());
    let checksum = crc32c::crc32c(&header);
    header[CHECKSUM_AT..CHECKSUM_AT + 4].copy_from_slice(&checksum.to_le_bytes());
    let io = |error: IoError| SwapError::Io(error.to_string());
    // What was there before is not needed, and need not be kept from a thin disk.
    let log = ByteRange::new(SEGMENT as u64, u64::from(segments) * SEGMENT as u64);
    if device.geometry().discard_granularity > 0 && !Path::new(name).is_file() {
        device.discard(log).await.map_err(io)?;
    }
    let written = device.write(ByteOffset::ZERO, WriteBuf::new(&header), WriteFlags::FUA);
    written.await.map_err(io)?;
    Ok(SwapIdentity {
        uuid,
        segments,
        name: name.to_owned(),
    })
}
