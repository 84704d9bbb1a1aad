//! The disks for evicted pages: ownership, and protection of foreign data.
//!
//! Only the state in the managed process describes the data in the log, so the log is worthless once that process has
//! ended. The header of a disk is in [`header`], the cleanup at the end in [`release`].

mod header;
mod release;

use std::fs::{File, Metadata};
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::file::{FileDevice, FileOpenError, FileOptions, LockedFile, claim_device, open_locked};
use larder_block::boot::is_tmpfs;
use larder_block::opener::open_safe_path;
use larder_block::small_file;
use larder_block::{BlockDevice, ByteLen, ByteOffset, ByteRange, IoError, Loop, WriteBuf, WriteFlags};
use larder_memory::attach::SwapStore;
use larder_memory::entry::Tier;
use larder_memory::segment_log::{SEGMENT_BYTES, SEGMENTS_MAX};
use larder_memory::state::SwapIdentity;
use larder_memory::store::{BeforeWrite, DeviceStore};
use rustix::fs::FallocateFlags;
use rustix::process::geteuid;

use crate::foreign_data::{self, ForeignData, clear_instructions};
use crate::image::{ImageAddress, ImageError, ImageOptions, open_export};
use header::{HEADER_BYTES, Header, HeaderFields, MAGIC, VERSION, read_header};
use release::{ErasableLog, HighWaterMark, SwapKind, erase};

pub(crate) use header::live_owner_pid;
pub(super) use header::{SwapOwner, fuzz_parse};
pub(super) use release::SwapRelease;

/// Maximum attempts to create a file that another pager is removing as it ends.
const CREATE_ATTEMPTS_MAX: u32 = 3;
/// Time for which requests wait for an unreachable NBD server before they fail; failed requests are repeated.
const NBD_RECONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Smallest useful swap cache.
pub(super) const SWAP_SIZE_MIN: ByteLen = ByteLen::new(16 << 20);

/// A disk for evicted pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwapConfig {
    /// A file, a block device, or an NBD export. A missing file is created, and removed in the end.
    pub address: ImageAddress,
    /// Usable size; required for a new file, otherwise the whole disk by default.
    pub size: Option<ByteLen>,
}

/// Reason why a disk cannot be used for evicted pages.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum SwapError {
    #[error("swap cache {name}: {source}")]
    Image { name: String, source: ImageError },
    #[error("swap cache {name}: cannot {what}: {source}")]
    Os { name: String, what: &'static str, source: io::Error },
    #[error("swap cache {0}")]
    Io(String),
    #[error("swap cache {0}: it does not exist; give its maximum size (--swap-size, swap-size in a VM's file)")]
    NoSize(String),
    #[error("swap cache {name}: {size} is too small; the minimum is {SWAP_SIZE_MIN}")]
    TooSmall { name: String, size: ByteLen },
    #[error("swap cache {name}: its size is {has}, and {size} was requested")]
    TooLarge { name: String, has: ByteLen, size: ByteLen },
    #[error(
        "swap cache {name}: it holds pages of process {pid}, whose pager has ended: restart that pager (larder memory attach --pid {pid}), or give another path"
    )]
    InUse { name: String, pid: u32 },
    #[error("{0} is given both as the swap cache and as the slow store")]
    SameDisk(String),
    #[error("swap cache {name}: {size} was requested, and there is space for {free}")]
    NoSpace { name: String, size: ByteLen, free: ByteLen },
    #[error("swap cache {0}: it is neither a file nor a block device")]
    NotFileOrDevice(String),
    #[error(
        "swap cache {name}: {why}, and is not overwritten: give another path, or clear it if none of its data is needed (a file: {}; a device: {})",
        clear_instructions(true),
        clear_instructions(false)
    )]
    Foreign { name: String, why: ForeignData },
    #[error("swap cache {name}: it has version {version}; this program supports version {VERSION}")]
    Version { name: String, version: u32 },
    #[error("swap cache {given}: the pages of the process are on {left}: give that one, or none")]
    DifferentDisk { given: String, left: String },
    #[error("swap cache {0}: it is not the disk that holds pages of the process, or it is damaged: restore that disk")]
    Replaced(String),
    #[error("swap cache {0}: it holds pages of the process, and the file no longer exists: restore it")]
    Missing(String),
    #[error(
        "swap cache {name}: a file of {size} is larger than its file system allows, or a file of this process may be \
         (RLIMIT_FSIZE: ulimit -f, or LimitFSIZE= of its service): raise that, or give a smaller size"
    )]
    FileSize { name: String, size: ByteLen },
    #[error("swap cache {0}: a path that is not UTF-8 cannot be recorded")]
    NotUtf8(String),
}

/// A disk that was opened.
pub(super) struct OpenedSwap {
    /// The disk for the pager.
    pub(super) swap: SwapStore,
    /// Cleanup, to be performed in the end.
    pub(super) release: SwapRelease,
    /// The disk has no pages yet.
    pub(super) is_new: bool,
}

fn os_error(name: &str, what: &'static str) -> impl Fn(io::Error) -> SwapError {
    move |source| SwapError::Os { name: name.to_owned(), what, source }
}

/// Checks that swap cache and slow store are different disks.
///
/// # Errors
/// Both are the same.
pub(super) fn check_distinct(swap: Option<&SwapConfig>, slow: Option<&SwapConfig>) -> Result<(), SwapError> {
    let (Some(swap), Some(slow)) = (swap, slow) else {
        return Ok(());
    };
    let name = disk_name(&swap.address)?;
    match name == disk_name(&slow.address)? {
        true => Err(SwapError::SameDisk(name)),
        false => Ok(()),
    }
}

/// Opens the disk of this tier. If a disk already has pages of the process, it is that disk. Pages are encrypted if
/// `is_encrypted`.
///
/// # Errors
/// See [`SwapError`]. Only a disk of Larder's can have been changed.
pub(super) async fn open_swap(
    on: &Loop,
    tier: Tier,
    owner: SwapOwner,
    config: Option<&SwapConfig>,
    existing: Option<SwapIdentity>,
    is_encrypted: bool,
) -> Result<Option<OpenedSwap>, SwapError> {
    let (address, size) = match (config, &existing) {
        (None, None) => return Ok(None),
        (Some(config), None) => (config.address.clone(), config.size),
        (config, Some(existing)) => {
            let address: ImageAddress =
                existing.name.parse().map_err(|_| SwapError::Replaced(existing.name.clone()))?;
            if let Some(given) = config.map(|config| disk_name(&config.address)).transpose()?
                && given != existing.name
            {
                let existing = existing.name.clone();
                return Err(SwapError::DifferentDisk { given, left: existing });
            }
            if let ImageAddress::Path(path) = &address
                && !path.exists()
            {
                return Err(SwapError::Missing(existing.name.clone()));
            }
            (address, None)
        }
    };
    let is_new = existing.is_none();
    let (device, file, prior_state) = open_device(on, &address, size, owner, is_new).await?;
    let name = disk_name(&address)?;
    let (header, mark) = read_header(&name, &device).await?;
    // A pager that is killed before it writes the header leaves an empty file, which the next pager takes for a
    // user's file.
    let is_made =
        prior_state.is_created_by_larder() || matches!(header, Header::Larder(HeaderFields { is_created: true, .. }));
    let (identity, written) = match existing {
        Some(existing) => match header {
            Header::Larder(fields)
                if fields.uuid == existing.uuid && segment_capacity(&device) >= existing.segments =>
            {
                let written = mark.unwrap_or(existing.segments);
                (existing, written)
            }
            _ => return Err(SwapError::Replaced(name)),
        },
        None => {
            match header {
                Header::Foreign => return Err(foreign_error(&name)(ForeignData::Data)),
                Header::Larder(fields) => {
                    fields.check_unused(&name, owner)?;
                    erase_stale_log(&name, &device, &fields, mark).await?;
                }
                Header::Zeros if prior_state == PriorState::Unchecked => {
                    let checked = foreign_data::check(on, &device, &address).await;
                    checked.map_err(foreign_error(&name))?;
                    if let Some(file) = &file {
                        // A disk of a guest can begin with zeros, and a file is emptied as a whole.
                        let content = File::open(file.content_path()).map_err(os_error(&name, "read it"))?;
                        let checked = on.run_blocking(move || foreign_data::check_zeros(&content)).await;
                        let checked = checked.map_err(ForeignData::unknown).and_then(|checked| checked);
                        checked.map_err(foreign_error(&name))?;
                    }
                }
                Header::Zeros => {}
            }
            let fields = HeaderFields {
                uuid: crate::image::random().map_err(os_error(&name, "choose its identity"))?,
                segments: choose_segments(&name, &device, size)?,
                owner,
                is_created: is_made,
                is_exported: matches!(address, ImageAddress::Nbd(_)),
                is_encrypted,
            };
            (write_header(&name, &device, &fields, file.is_some()).await?, 0)
        }
    };
    if is_new && file.as_ref().is_some_and(|file| is_on_tmpfs(file.path())) {
        tracing::warn!(
            "swap cache {}: it is on tmpfs, which is memory: pages evicted to it save no memory; give a path on a disk",
            identity.name
        );
    }
    let segments = identity.segments;
    let kind = match file {
        Some(file) if is_made => SwapKind::CreatedFile(file),
        Some(file) => SwapKind::ExistingFile(file),
        None if is_encrypted => SwapKind::Encrypted(segments),
        None => SwapKind::Plain(HighWaterMark::new(&device, identity.uuid, segments, written)),
    };
    let prior_state: Option<Rc<dyn BeforeWrite>> = match &kind {
        SwapKind::Plain(mark) => Some(Rc::clone(mark) as _),
        SwapKind::CreatedFile(_) | SwapKind::ExistingFile(_) | SwapKind::Encrypted(_) => None,
    };
    let store = DeviceStore::new(on, Rc::clone(&device), segments, prior_state);
    let writes = store.pending_writes();
    Ok(Some(OpenedSwap {
        swap: SwapStore { tier, identity, store: Box::new(store) },
        release: SwapRelease { device, writes, kind },
        is_new,
    }))
}

impl HeaderFields {
    /// Checks that no other live process needs the pages of this disk.
    fn check_unused(&self, name: &str, owner: SwapOwner) -> Result<(), SwapError> {
        match self.owner.pid != owner.pid && self.owner.is_alive() {
            true => Err(SwapError::InUse { name: name.to_owned(), pid: self.owner.pid }),
            false => Ok(()),
        }
    }
}

/// Erases the data of a killed pager whose process has ended. `mark` is the number of segments written, if it is
/// known.
async fn erase_stale_log(
    name: &str,
    device: &Rc<dyn BlockDevice>,
    fields: &HeaderFields,
    mark: Option<u32>,
) -> Result<(), SwapError> {
    let all = segment_capacity(device);
    let segments = match *fields == HeaderFields::default() {
        true => all,
        false => fields.segments.min(all),
    };
    if fields.is_encrypted {
        // The key ended with the process: if the device does not discard the data, it remains as noise.
        if let Err(error) = erase(device, ErasableLog::Encrypted(segments)).await {
            tracing::debug!("swap cache {name}: encrypted pages of an ended process are not discarded: {error}");
        }
        return Ok(());
    }
    let written = mark.unwrap_or(segments).min(segments);
    let erased = erase(device, ErasableLog::Plain(written)).await;
    erased.map_err(|error| SwapError::Io(format!("{name}: the data of a killed pager cannot be erased: {error}")))
}

/// State of a new disk's path before it was opened.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PriorState {
    /// No file existed.
    Missing,
    /// A file of Larder's, or without data; `is_created` if Larder created it. Its old data is not needed, and is
    /// erased.
    Reusable { is_created: bool },
    /// Something that has to be checked.
    Unchecked,
}

impl PriorState {
    fn is_created_by_larder(self) -> bool {
        matches!(self, Self::Missing | Self::Reusable { is_created: true })
    }
}

/// Opens a disk, and creates its file if there is none. A file's open handle is returned as well.
async fn open_device(
    on: &Loop,
    address: &ImageAddress,
    size: Option<ByteLen>,
    owner: SwapOwner,
    is_new: bool,
) -> Result<(Rc<dyn BlockDevice>, Option<LockedFile>, PriorState), SwapError> {
    let image = |source| SwapError::Image { name: address.to_string(), source };
    let path = match address {
        ImageAddress::Path(path) => path,
        ImageAddress::Nbd(uri) => {
            let device = open_export(on, uri, &nbd_options()).await.map_err(image)?;
            return Ok((device, None, PriorState::Unchecked));
        }
    };
    let mut attempts = 0;
    loop {
        let before = match is_new {
            false => PriorState::Unchecked,
            true => prepare_file(on, path, size, owner).await?,
        };
        match open_claimed(on, path, is_new).await {
            Ok(device) => {
                let name = address.to_string();
                let opened = device.metadata().map_err(os_error(&name, "inspect it"))?;
                if is_new {
                    check_path(&name, path, Some(&opened))?;
                }
                let held = match opened.is_file() {
                    true => Some(device.retain_locks().map_err(os_error(&name, "keep it open"))?),
                    false => None,
                };
                return Ok((device, held, before));
            }
            // Another pager used the file until now, and has removed it in the end.
            Err(FileOpenError::Open { source, .. })
                if is_new && source.kind() == io::ErrorKind::NotFound && attempts < CREATE_ATTEMPTS_MAX =>
            {
                attempts += 1;
            }
            Err(error) => return Err(image(error.into())),
        }
    }
}

/// Checks that a new disk's path leads through no symbolic link of another user, who could have root overwrite any
/// file; if it is `opened`, also that the path leads to it now.
fn check_path(name: &str, path: &Path, opened: Option<&Metadata>) -> Result<(), SwapError> {
    if !geteuid().is_root() {
        return Ok(());
    }
    let located = open_safe_path(path).and_then(|place| place.metadata());
    let result = match (located, opened) {
        (Err(refused), _) if refused.raw_os_error().is_none() => Err(refused),
        // The file may be missing yet. Opening it reports all other errors.
        (_, None) => Ok(()),
        (Err(error), Some(_)) => Err(error),
        (Ok(found), Some(opened)) if (found.dev(), found.ino()) == (opened.dev(), opened.ino()) => Ok(()),
        (Ok(_), Some(_)) => Err(io::Error::other("another file has replaced it in the meantime; try again")),
    };
    result.map_err(os_error(name, "follow its path"))
}

/// Opens a disk for exclusive use. If pages are on it already, it is used even if another process has claimed it.
async fn open_claimed(on: &Loop, path: &Path, is_new: bool) -> Result<Rc<FileDevice>, FileOpenError> {
    let options = FileOptions { exclusive: true, ..FileOptions::default() };
    match FileDevice::open(on, path, options).await {
        Err(error @ FileOpenError::Claimed { .. }) if !is_new => {
            tracing::warn!("{error}; Larder uses it nevertheless, because it holds pages of the process");
            FileDevice::open(on, path, FileOptions::default()).await
        }
        opened => opened,
    }
}

/// Returns NBD options with a short timeout: an unreachable server must be detected soon, because pages then stay in
/// memory.
fn nbd_options() -> ImageOptions {
    let mut options = ImageOptions::default();
    options.nbd.reconnect = NBD_RECONNECT_TIMEOUT;
    options
}

/// Returns the disk's name, independent of the working directory.
fn disk_name(address: &ImageAddress) -> Result<String, SwapError> {
    match address {
        ImageAddress::Path(path) => {
            let absolute = path.canonicalize().or_else(|_| std::path::absolute(path));
            let absolute = absolute.unwrap_or_else(|_| path.clone());
            match absolute.to_str() {
                Some(name) => Ok(name.to_owned()),
                None => Err(SwapError::NotUtf8(path.display().to_string())),
            }
        }
        ImageAddress::Nbd(uri) => Ok(uri.to_string()),
    }
}

fn segment_capacity(device: &Rc<dyn BlockDevice>) -> u32 {
    let log = device.geometry().size.get().saturating_sub(SEGMENT_BYTES as u64);
    // Page entries cannot address more segments.
    u32::try_from(log / SEGMENT_BYTES as u64).map_or(SEGMENTS_MAX, |segments| segments.min(SEGMENTS_MAX))
}

/// Creates a missing file, and gives a file of Larder's or an empty one its size. Pages of a process that has ended
/// are erased. A file that another process uses, or whose pages a live process needs, is not changed.
async fn prepare_file(
    on: &Loop,
    path: &Path,
    size: Option<ByteLen>,
    owner: SwapOwner,
) -> Result<PriorState, SwapError> {
    let name = path.display().to_string();
    check_path(&name, path, None)?;
    let found = match path.metadata() {
        Ok(metadata) => Some(metadata),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => return Err(os_error(&name, "inspect it")(error)),
    };
    if found.as_ref().is_some_and(|found| found.file_type().is_block_device()) {
        return Ok(PriorState::Unchecked);
    }
    if found.as_ref().is_some_and(|found| !found.is_file()) {
        return Err(SwapError::NotFileOrDevice(name));
    }
    let Some(size) = size else {
        // An existing file has its size.
        return match found.is_some_and(|found| found.len() > 0) {
            true => Ok(PriorState::Unchecked),
            false => Err(SwapError::NoSize(name)),
        };
    };
    let file_bytes = size.get().saturating_add(SEGMENT_BYTES as u64) / SEGMENT_BYTES as u64 * SEGMENT_BYTES as u64;
    let check = || {
        check_size(&name, size)?;
        check_free_space(&name, path, file_bytes)
    };
    if found.is_none() {
        check()?;
    }
    let file =
        open_locked(on, path).await.map_err(|error| SwapError::Image { name: name.clone(), source: error.into() })?;
    let claimed = file.metadata().map_err(os_error(&name, "inspect it"))?;
    check_path(&name, path, Some(&claimed))?;
    let is_same_file = found.is_some_and(|found| (found.dev(), found.ino()) == (claimed.dev(), claimed.ino()));
    let before = match !is_same_file && claimed.len() == 0 {
        true => PriorState::Missing,
        false => PriorState::Reusable { is_created: erase_file(&name, &file, owner)? },
    };
    let allocated = check().and_then(|()| allocate(&name, &file, file_bytes));
    if allocated.is_err() {
        let rolled_back = match before.is_created_by_larder() {
            true => std::fs::remove_file(path),
            false => file.set_len(claimed.len()),
        };
        if let Err(error) = rolled_back {
            tracing::warn!("swap cache {name}: its previous state cannot be restored: {error}");
        }
    }
    allocated.map(|()| before)
}

/// Erases the data of a killed pager in a file, unless its process still lives. Returns whether Larder created the
/// file.
fn erase_file(name: &str, file: &File, owner: SwapOwner) -> Result<bool, SwapError> {
    match read_file_header(name, file)? {
        Header::Foreign => Err(foreign_error(name)(ForeignData::Data)),
        Header::Zeros => Ok(false),
        Header::Larder(fields) => {
            fields.check_unused(name, owner)?;
            let len = file.metadata().map_err(os_error(name, "inspect it"))?.len();
            let erased = file.set_len(0).and_then(|()| file.set_len(len));
            erased.map_err(os_error(name, "empty it"))?;
            Ok(fields.is_created)
        }
    }
}

fn allocate(name: &str, file: &File, whole: u64) -> Result<(), SwapError> {
    file.set_len(whole).map_err(|error| match error.kind() {
        io::ErrorKind::FileTooLarge => SwapError::FileSize { name: name.to_owned(), size: ByteLen::new(whole) },
        _ => os_error(name, "set its size")(error),
    })?;
    // Lack of space is reported now. A file system that cannot preallocate reports it later.
    match rustix::fs::fallocate(file, FallocateFlags::empty(), 0, whole) {
        Ok(()) | Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::NOSYS) => Ok(()),
        Err(error) => Err(os_error(name, "allocate space for it")(error.into())),
    }
}

/// Checks whether a disk could be used, without changing anything. NBD servers are not contacted.
///
/// # Errors
/// The disk could not be used.
pub fn check_swap_disk(disk: &SwapConfig) -> Result<(), SwapError> {
    let ImageAddress::Path(path) = &disk.address else {
        return Ok(());
    };
    let name = path.display().to_string();
    check_path(&name, path, None)?;
    let found = match path.metadata() {
        Ok(found) => found,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            let Some(size) = disk.size else {
                return Err(SwapError::NoSize(name));
            };
            return check_free_space(&name, path, size.get());
        }
        Err(error) => return Err(os_error(&name, "inspect it")(error)),
    };
    let is_device = found.file_type().is_block_device();
    if !found.is_file() && !is_device {
        return Err(SwapError::NotFileOrDevice(name));
    }
    let opened = match is_device {
        true => File::open(path),
        false => small_file::open(path),
    };
    let file = opened.map_err(os_error(&name, "open it"))?;
    if has_magic(&file).map_err(os_error(&name, "read it"))? {
        // Its pager may be using it now.
        return disk.size.map_or(Ok(()), |size| match is_device {
            true => Ok(()),
            false => check_free_space(&name, path, size.get()),
        });
    }
    match disk.size {
        _ if is_device => {
            claim_device(path).map_err(|error| SwapError::Image { name: name.clone(), source: error.into() })?;
            foreign_data::check_file(file).map_err(foreign_error(&name))
        }
        Some(size) => {
            check_free_space(&name, path, size.get())?;
            match is_empty(&file).map_err(os_error(&name, "read it"))? {
                true => Ok(()),
                false => Err(foreign_error(&name)(ForeignData::Data)),
            }
        }
        None if found.len() == 0 => Err(SwapError::NoSize(name)),
        // The file is used with its present size.
        None => {
            check_size(&name, ByteLen::new(found.len()))?;
            let content = file.try_clone().map_err(os_error(&name, "read it"))?;
            foreign_data::check_file(file).map_err(foreign_error(&name))?;
            foreign_data::check_zeros(&content).map_err(foreign_error(&name))
        }
    }
}

/// Checks that the file system has space for a file of this size, including the space that the file already uses.
fn check_free_space(name: &str, path: &Path, whole: u64) -> Result<(), SwapError> {
    let path = std::path::absolute(path).map_err(os_error(name, "inspect it"))?;
    let directory = path.parent().unwrap_or(Path::new("/"));
    let fs_stat =
        rustix::fs::statvfs(directory).map_err(|error| os_error(name, "inspect its directory")(error.into()))?;
    let allocated = path.metadata().map_or(0, |found| found.blocks() * 512);
    let free = fs_stat.f_bavail.saturating_mul(fs_stat.f_frsize).saturating_add(allocated);
    match free < whole {
        true => Err(SwapError::NoSpace {
            name: name.to_owned(),
            size: ByteLen::new(whole),
            free: ByteLen::new(free / SEGMENT_BYTES as u64 * SEGMENT_BYTES as u64),
        }),
        false => Ok(()),
    }
}

/// Returns whether a file is in memory rather than on a disk.
fn is_on_tmpfs(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|found| is_tmpfs(&found))
}

fn check_size(name: &str, size: ByteLen) -> Result<(), SwapError> {
    if size < SWAP_SIZE_MIN {
        let name = name.to_owned();
        return Err(SwapError::TooSmall { name, size });
    }
    Ok(())
}

/// Reads the header of a file. A file that was only given its size consists of holes, and is empty.
fn read_file_header(name: &str, file: &File) -> Result<Header, SwapError> {
    match is_empty(file).and_then(|is_empty| Ok((is_empty, !is_empty && has_magic(file)?))) {
        Ok((true, _)) => Ok(Header::Zeros),
        Ok((false, false)) => Ok(Header::Foreign),
        Ok((false, true)) => {
            let mut bytes = vec![0; HEADER_BYTES];
            read_prefix(file, &mut bytes).map_err(os_error(name, "read it"))?;
            Header::parse(&mut bytes).map_err(|version| SwapError::Version { name: name.to_owned(), version })
        }
        Err(error) => Err(os_error(name, "read it")(error)),
    }
}

/// Returns whether the file has no data.
fn is_empty(file: &File) -> io::Result<bool> {
    match rustix::fs::seek(file, rustix::fs::SeekFrom::Data(0)) {
        Err(rustix::io::Errno::NXIO) => Ok(true),
        Ok(_) => Ok(false),
        Err(rustix::io::Errno::INVAL) => Ok(file.metadata()?.len() == 0),
        Err(error) => Err(error.into()),
    }
}

/// Reads the beginning of a file, which may be shorter than the buffer.
fn read_prefix(file: &File, bytes: &mut [u8]) -> io::Result<()> {
    use std::os::unix::fs::FileExt as _;
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], filled as u64) {
            Ok(0) => break,
            Ok(count) => filled += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

fn has_magic(file: &File) -> io::Result<bool> {
    let mut begin = [0; MAGIC.len()];
    read_prefix(file, &mut begin)?;
    Ok(begin == *MAGIC)
}

fn foreign_error(name: &str) -> impl Fn(ForeignData) -> SwapError {
    move |why| SwapError::Foreign { name: name.to_owned(), why }
}

/// Returns the number of segments for the log.
fn choose_segments(name: &str, device: &Rc<dyn BlockDevice>, size: Option<ByteLen>) -> Result<u32, SwapError> {
    let capacity = segment_capacity(device);
    let Some(size) = size else { return Ok(capacity) };
    check_size(name, size)?;
    let wanted = u32::try_from(size.get() / SEGMENT_BYTES as u64).unwrap_or(u32::MAX);
    match wanted > capacity {
        true => Err(SwapError::TooLarge {
            name: name.to_owned(),
            has: ByteLen::new(u64::from(capacity) * SEGMENT_BYTES as u64),
            size,
        }),
        false => Ok(wanted),
    }
}

/// Writes the header, which claims the disk.
async fn write_header(
    name: &str,
    device: &Rc<dyn BlockDevice>,
    fields: &HeaderFields,
    is_file: bool,
) -> Result<SwapIdentity, SwapError> {
    let io = |error: IoError| SwapError::Io(error.to_string());
    // Old data is not needed, and a thin disk should not have to store it.
    let log = ByteRange::new(SEGMENT_BYTES as u64, u64::from(fields.segments) * SEGMENT_BYTES as u64);
    if device.geometry().discard_granularity > 0 && !is_file {
        device.discard(log).await.map_err(io)?;
    }
    let header = fields.encode(!fields.is_encrypted && !is_file);
    let written = device.write(ByteOffset::ZERO, WriteBuf::new(&header), WriteFlags::FUA);
    written.await.map_err(io)?;
    Ok(SwapIdentity { uuid: fields.uuid, segments: fields.segments, name: name.to_owned() })
}
