//! Opening a file or block device as a disk: checks its kind, takes its locks, and probes whether direct I/O works on
//! it.

use std::cell::{Cell, RefCell};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use super::super::image_lock::{self, LockError, LockMode, Sharing};
use super::write_record::RecordedImage;
use super::{
    DataRuns, FileDevice, FileKind, NO_TURN, RecordFinding, SECTOR, SyncMode, WriteRecord, file_size,
    recheck_periodically, useful_workers, visible_size,
};
use crate::boot::{self, is_tmpfs};
use crate::buffer::AlignedBuf;
use crate::device::{Geometry, SizeChanges};
use crate::event_loop::Loop;
use crate::lock_wait::{LockKind, LockWait};
use crate::opener::{self, Access, PathSource, opener};

/// The interval between two attempts to take a lock that another process has.
const LOCK_INTERVAL: Duration = Duration::from_millis(20);

/// The unit in bytes to which a container appears padded.
pub const CONTAINER_UNIT: u64 = 4096;

/// The use of the host's page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Caching {
    /// Direct I/O where the file system has it, buffered elsewhere.
    #[default]
    Auto,
    /// Direct I/O; fail where there is none.
    Direct,
    /// I/O through the page cache.
    Buffered,
}

/// The purpose of a file, which log messages name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum FileRole {
    /// A disk, or a part of one.
    #[default]
    Image,
    /// A backing or data file of an image. It may be empty.
    Referenced,
    /// The cache of the disk with this name.
    CacheOf(String),
}

/// Options for opening a file.
#[derive(Clone, Debug, Default)]
pub struct FileOptions {
    /// The purpose of the file.
    pub role: FileRole,
    /// Only an image's header names a [`FileRole::Referenced`], see [`PathSource::HeaderOnly`].
    pub by_header_only: bool,
    /// Refuse changes.
    pub read_only: bool,
    /// Let other processes use the file too. The user is responsible for the consequences.
    pub share: bool,
    /// Claim a block device from the kernel (`O_EXCL`), as a mount, md and the device mapper do: refuse a claimed
    /// one, and keep others from claiming it. For devices that Larder overwrites.
    pub exclusive: bool,
    /// The process that keeps others from using the file, unless it is shared.
    pub lock_mode: LockMode,
    /// The use of the host's page cache.
    pub caching: Caching,
    /// The file is a container, not the disk itself, so its end has no meaning. It appears padded with zeros to whole
    /// blocks, and grows to that size once data is written there.
    pub container: bool,
    /// The directory in which the device keeps a mark of its writes, see [`FileDevice::verdict`]. It is on tmpfs and
    /// exclusive to this user, and is created if it is missing and its parent exists. A device that is shared or
    /// read-only reads the mark and keeps none.
    pub write_record_directory: Option<PathBuf>,
}

/// The reason why a file cannot be opened as a disk.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum FileOpenError {
    #[error("cannot open {}: {source}{}", path.display(), hint(source, *read_only))]
    Open {
        path: PathBuf,
        source: io::Error,
        /// The file was opened for reading only.
        read_only: bool,
    },
    #[error(
        "cannot open {}, which an image's header names: the path leads through a link of /proc to a file that a process has open, or \
         through an endless chain of symbolic links",
        path.display()
    )]
    Links { path: PathBuf },
    #[error("{} is a {kind}; a disk image is a regular file or a block device", path.display())]
    UnsupportedKind { path: PathBuf, kind: &'static str },
    #[error("{}: {source}", path.display())]
    Locked { path: PathBuf, source: LockError },
    #[error(
        "{}: the device is claimed by another program or by the kernel: it is mounted, or part of a RAID, a volume group or \
         another device (lsblk {} shows which); use a device that nothing else uses",
        path.display(),
        path.display()
    )]
    Claimed { path: PathBuf },
    #[error("{} is empty; make it as large as the disk first (truncate -s 10G {})", path.display(), path.display())]
    Empty { path: PathBuf },
    #[error("{} has size 0: the device has no backing storage (losetup {} shows the backing file of a loop device)", path.display(), path.display())]
    EmptyDevice { path: PathBuf },
    #[error("{}: direct I/O was requested, but {why}", path.display())]
    NoDirect { path: PathBuf, why: String },
    #[error("{}: {what}: {source}", path.display())]
    Os { path: PathBuf, what: &'static str, source: io::Error },
}

fn hint(error: &io::Error, read_only: bool) -> &'static str {
    match error.kind() {
        // Larder itself refuses the file, and the error has the reason; the user's rights are not it.
        _ if error.raw_os_error().is_none() => "",
        io::ErrorKind::NotFound => "; check the path, or create the image first",
        io::ErrorKind::WouldBlock => {
            "; another process has a lease on it, as file servers take: /proc/locks shows its PID; try again once the lease is released"
        }
        io::ErrorKind::PermissionDenied if read_only => "; the user that runs larder needs read permission",
        io::ErrorKind::PermissionDenied => "; the user that runs larder needs read and write permission",
        _ => "",
    }
}

impl FileDevice {
    /// Opens `path` as a disk on the loop `on`.
    ///
    /// # Errors
    /// See [`FileOpenError`]. A lock of a server that is just exiting is waited for.
    pub async fn open(on: &Loop, path: &Path, options: FileOptions) -> Result<Rc<Self>, FileOpenError> {
        let os = |what| move |source: io::Error| FileOpenError::Os { path: path.to_owned(), what, source };
        let (file, kind) = loop {
            let (file, kind) = open_unlocked(path, &options)?;
            lock_with_wait(on, &file, path, &options).await?;
            // The previous lock owner may have removed or replaced the file meanwhile. Then `file` has no name, and
            // its data would be lost when this process exits.
            if path_refers_to(path, &file) {
                break (file, kind);
            }
        };
        let claimed = match options.exclusive && kind == FileKind::Block {
            true => Some(claim_with_wait(on, &file, path).await?),
            false => None,
        };

        let mut size = file_size(&file).map_err(os("cannot determine its size"))?;
        if size == 0 && (options.role != FileRole::Referenced || kind == FileKind::Block) {
            let path = path.to_owned();
            return Err(match kind {
                FileKind::Block => FileOpenError::EmptyDevice { path },
                FileKind::Regular | FileKind::Tmpfs => FileOpenError::Empty { path },
            });
        }
        let container = options.container && kind != FileKind::Block;
        if container {
            // The file itself grows only when data is written there: the probe may yet show that it is no such
            // container.
            size = size.next_multiple_of(CONTAINER_UNIT);
        } else {
            warn_odd_size(path, size, options.read_only);
        }
        let direct = choose_direct(&file, path, kind, size, options.caching)
            .map_err(|why| FileOpenError::NoDirect { path: path.to_owned(), why })?;
        let block_size = direct.map_or(SECTOR as u32, |alignment| alignment.offset);
        let in_call = match (kind, direct) {
            (_, Some(_)) => SyncMode::Never,
            (FileKind::Tmpfs, None) => SyncMode::Plain,
            (_, None) => SyncMode::NoWait,
        };
        let geometry = Geometry {
            size: visible_size(size, block_size, direct.is_some(), container),
            block_size,
            physical_block_size: physical_block_size(&file, kind).max(block_size),
            discard_granularity: 4096.max(block_size),
            memory_alignment: direct.map_or(1, |alignment| alignment.memory),
            read_only: options.read_only,
            fast_zeroes: true,
        };
        tracing::debug!(event = "file-opened", path = %path.display(), ?kind, ?direct, ?geometry, "opened");
        let unit = CONTAINER_UNIT.max(block_size.into());
        let recorded = RecordedImage {
            file: &file,
            kind,
            is_direct: direct.is_some(),
            keeps_record: !options.read_only && !options.share,
            size_max: size.next_multiple_of(unit),
        };
        let is_local =
            kind == FileKind::Block || rustix::fs::fstatfs(&file).is_ok_and(|found| boot::is_local_file_system(&found));
        let (record_finding, write_record) =
            open_write_record(on, path, options.write_record_directory.as_deref(), &recorded);
        let device = Rc::new(Self {
            name: path.display().to_string().into(),
            path: path.to_owned(),
            file,
            claimed: RefCell::new(claimed),
            role: options.role,
            reported_path_change: Cell::new(None),
            on: on.clone(),
            ring: on.ring_or_panic(),
            geometry: Cell::new(geometry),
            direct: direct.is_some(),
            container,
            kind,
            is_local,
            grow_count: Cell::new(0),
            sync_read_mode: Cell::new(in_call),
            sync_write_mode: Cell::new(in_call),
            offloaded_writes_left: Cell::new(0),
            last_large_transfer_turn: Cell::new(NO_TURN),
            worker_transfers: Cell::new(0),
            worker_transfers_max: useful_workers() * 2,
            can_zero: Cell::new(kind != FileKind::Tmpfs),
            can_punch: Cell::new(true),
            can_allocate: Cell::new(kind != FileKind::Block),
            flush_failed: Cell::new(None),
            changes: SizeChanges::default(),
            data_runs: DataRuns::default(),
            record_finding,
            write_record,
        });
        on.spawn(recheck_periodically(on.clone(), Rc::downgrade(&device)));
        Ok(device)
    }
}

/// Returns the finding of the mark in `directory`, and the new mark. If no mark can be maintained, the image is
/// served without one.
fn open_write_record(
    on: &Loop,
    path: &Path,
    directory: Option<&Path>,
    recorded: &RecordedImage<'_>,
) -> (Option<RecordFinding>, Option<Rc<WriteRecord>>) {
    let Some(directory) = directory else {
        return (None, None);
    };
    match WriteRecord::open(on, directory, recorded) {
        Ok((finding, record)) => (Some(finding), record),
        Err(error) => {
            tracing::warn!(
                "{}: no record of its writes can be kept in {}: {error}; after a kill of this server nothing proves that no other \
                 program has written to the image",
                path.display(),
                directory.display()
            );
            (Some(RecordFinding::NO_RECORD), None)
        }
    }
}

/// Opens `path` and returns its kind.
fn open_unlocked(path: &Path, options: &FileOptions) -> Result<(File, FileKind), FileOpenError> {
    let read_only = options.read_only;
    let failed = |source| FileOpenError::Open { path: path.to_owned(), source, read_only };
    let path_source = match options.role {
        FileRole::Referenced if options.by_header_only => PathSource::HeaderOnly,
        FileRole::Referenced => PathSource::Header,
        FileRole::Image | FileRole::CacheOf(_) => PathSource::User,
    };
    let access = if read_only { Access::Read } else { Access::Write };
    let file = opener().open(path, access, path_source).map_err(|source| {
        if path_source != PathSource::User && source.raw_os_error() == Some(libc::ELOOP) {
            return FileOpenError::Links { path: path.to_owned() };
        }
        // If the file is of a wrong kind, that explains more than the error of the open call.
        let path_file = opener().open(path, Access::Inspect, path_source).ok();
        let kind_error = path_file.and_then(|place| kind_of(&place, path).err());
        kind_error
            .filter(|wrong| matches!(wrong, FileOpenError::UnsupportedKind { .. }))
            .unwrap_or_else(|| failed(source))
    })?;
    let kind = kind_of(&file, path)?;
    if kind == FileKind::Block && !read_only && is_read_only_device(&file) {
        return Err(failed(io::Error::from_raw_os_error(libc::EROFS)));
    }
    Ok((file, kind))
}

/// Opens the regular file at `path`, creating it if it is missing, so that its size can be changed before it is a
/// disk. No other process uses the file until it is closed.
///
/// # Errors
/// See [`FileOpenError`].
pub async fn open_locked(on: &Loop, path: &Path) -> Result<File, FileOpenError> {
    let failed = |source| FileOpenError::Open { path: path.to_owned(), source, read_only: false };
    loop {
        let mut options = std::fs::OpenOptions::new();
        options.read(true).write(true).create(true).truncate(false).mode(0o600);
        let file = options.custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY).open(path).map_err(failed)?;
        kind_of(&file, path)?;
        lock_with_wait(on, &file, path, &FileOptions::default()).await?;
        if path_refers_to(path, &file) {
            return Ok(file);
        }
    }
}

/// Returns true if `path` still refers to `file`, as far as is known. A file that was opened by its number
/// (`/proc/self/fd/5`) does, even if it was removed.
fn path_refers_to(path: &Path, file: &File) -> bool {
    match (opener::metadata(path), file.metadata()) {
        (Ok(at_path), Ok(file)) => (at_path.dev(), at_path.ino()) == (file.dev(), file.ino()),
        (Err(error), _) => error.kind() != io::ErrorKind::NotFound,
        (_, Err(_)) => true,
    }
}

fn kind_of(file: &File, path: &Path) -> Result<FileKind, FileOpenError> {
    let os = |what| move |source: io::Error| FileOpenError::Os { path: path.to_owned(), what, source };
    let wrong_kind = |kind| FileOpenError::UnsupportedKind { path: path.to_owned(), kind };
    let file_type = file.metadata().map_err(os("cannot read its type"))?.file_type();
    match file_type {
        found if found.is_dir() => Err(wrong_kind("directory")),
        found if found.is_fifo() => Err(wrong_kind("FIFO")),
        found if found.is_char_device() => Err(wrong_kind("character device")),
        found if found.is_block_device() => Ok(FileKind::Block),
        found if found.is_file() => {
            let file_system =
                rustix::fs::fstatfs(file).map_err(io::Error::from).map_err(os("cannot read its file system's type"))?;
            if is_tmpfs(&file_system) { Ok(FileKind::Tmpfs) } else { Ok(FileKind::Regular) }
        }
        _ => Err(wrong_kind("socket")),
    }
}

async fn lock_with_wait(on: &Loop, file: &File, path: &Path, options: &FileOptions) -> Result<(), FileOpenError> {
    let sharing = match (options.share, options.read_only) {
        (true, read_only) => Sharing::Shared { writable: !read_only },
        (false, true) => Sharing::ReadOnly,
        (false, false) => Sharing::Exclusive,
    };
    let (mut qemu_lock_wait, mut writer_wait) =
        (LockWait::new(LockKind::Ofd(None)), LockWait::new(LockKind::Ofd(Some(image_lock::WRITER_BYTE))));
    loop {
        match image_lock::lock(file.as_fd(), sharing, options.lock_mode) {
            Ok(()) => return Ok(()),
            Err(LockError::Os(error)) if is_unsupported(&error) => {
                tracing::warn!(path = %path.display(), "the file system does not support locks: nothing prevents other processes from using this image");
                return Ok(());
            }
            Err(source) => {
                let failure = format!("{}: {source}", path.display());
                let retry = match &source {
                    LockError::InUse { .. } => qemu_lock_wait.should_retry(file.as_fd(), &failure),
                    LockError::WritesInFlight => writer_wait.should_retry(file.as_fd(), &failure),
                    _ => false,
                };
                if retry {
                    on.sleep(LOCK_INTERVAL).await;
                    continue;
                }
                return Err(FileOpenError::Locked { path: path.to_owned(), source });
            }
        }
    }
}

/// Claims an open block device, and waits for a server that is just exiting.
async fn claim_with_wait(on: &Loop, file: &File, path: &Path) -> Result<File, FileOpenError> {
    let mut wait = LockWait::new(LockKind::Claim);
    loop {
        match claim_device(path) {
            Err(FileOpenError::Claimed { .. }) => {
                let error = FileOpenError::Claimed { path: path.to_owned() };
                if !wait.should_retry(file.as_fd(), &error) {
                    return Err(error);
                }
                on.sleep(LOCK_INTERVAL).await;
            }
            Ok(claimed) if !is_same_device(&claimed, file) => {
                return Err(FileOpenError::Open {
                    path: path.to_owned(),
                    source: io::Error::other("another device has replaced it in the meantime; try again"),
                    read_only: false,
                });
            }
            claimed => return claimed,
        }
    }
}

fn is_same_device(one: &File, other: &File) -> bool {
    let number = |file: &File| file.metadata().map(|found| found.rdev());
    matches!((number(one), number(other)), (Ok(one), Ok(other)) if one == other)
}

/// Claims a block device: no other program can claim it while the result is open. A claim has a descriptor of its
/// own, so that a closed device can release it while requests may still use the other descriptor.
///
/// # Errors
/// Another program or the kernel has claimed the device, or it cannot be opened.
pub fn claim_device(path: &Path) -> Result<File, FileOpenError> {
    let claimed = opener().open(path, Access::Claim, PathSource::User);
    claimed.map_err(|source| match source.kind() {
        io::ErrorKind::ResourceBusy => FileOpenError::Claimed { path: path.to_owned() },
        _ => FileOpenError::Open { path: path.to_owned(), source, read_only: true },
    })
}

fn is_unsupported(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(libc::EINVAL | libc::ENOLCK | libc::EOPNOTSUPP | libc::ENOSYS))
}

/// The alignment that direct I/O demands, in bytes.
#[derive(Clone, Copy, Debug)]
struct Alignment {
    memory: u32,
    offset: u32,
}

/// Enables direct I/O and returns its alignment, or returns `None` for buffered I/O.
fn choose_direct(
    file: &File,
    path: &Path,
    kind: FileKind,
    size: u64,
    caching: Caching,
) -> Result<Option<Alignment>, String> {
    if caching == Caching::Buffered {
        return Ok(None);
    }
    match probe_direct(file, kind) {
        Ok(alignment) if size.is_multiple_of(u64::from(alignment.offset)) => {
            let flags = rustix::fs::fcntl_getfl(file).map_err(|error| error.to_string())?;
            rustix::fs::fcntl_setfl(file, flags | rustix::fs::OFlags::DIRECT).map_err(|error| error.to_string())?;
            Ok(Some(alignment))
        }
        Ok(Alignment { offset, .. }) => {
            let why = format!("its size ({size} bytes) is not a multiple of {offset} bytes");
            if caching == Caching::Direct {
                return Err(why);
            }
            tracing::info!(
                "{}: I/O goes through the page cache, because {why}; truncate -s %{offset} extends it to whole blocks",
                path.display()
            );
            Ok(None)
        }
        Err(why) if caching == Caching::Direct => Err(why),
        Err(why) => {
            tracing::debug!(why, "buffered I/O");
            Ok(None)
        }
    }
}

/// Warns of a size that is no multiple of 512. It is rounded up, as in QEMU; the file grows when its last sector is
/// written.
fn warn_odd_size(path: &Path, size: u64, read_only: bool) {
    let missing = size.next_multiple_of(SECTOR) - size;
    if missing == 0 {
        return;
    }
    let written = match read_only {
        true => "",
        false => ", and the file grows by as much when they are written",
    };
    tracing::warn!(
        "{}: its size ({size} bytes) is not a multiple of {SECTOR}: the disk appears {missing} bytes larger; they read as zeros{written}",
        path.display()
    );
}

fn probe_direct(file: &File, kind: FileKind) -> Result<Alignment, String> {
    if kind == FileKind::Tmpfs {
        return Err("the image is on tmpfs, which is all page cache".to_owned());
    }
    if let Some(alignment) = reported_alignment(file) {
        return alignment.ok_or_else(|| "the file system has no direct I/O for this file".to_owned());
    }
    // Kernels before 6.1 do not report the alignment, so it is probed.
    let flags = rustix::fs::fcntl_getfl(file).map_err(|error| error.to_string())?;
    let direct = flags | rustix::fs::OFlags::DIRECT;
    rustix::fs::fcntl_setfl(file, direct).map_err(|_| "the file system has no direct I/O".to_owned())?;
    let mut buffer = AlignedBuf::zeroed(AlignedBuf::ALIGNMENT);
    let found = [512, 4096]
        .into_iter()
        .find(|unit| rustix::io::pread(file, &mut buffer[..*unit], 0).is_ok_and(|count| count == *unit));
    rustix::fs::fcntl_setfl(file, flags).map_err(|error| error.to_string())?;
    let unit = found.ok_or_else(|| "direct reads of 512 and of 4096 bytes both fail".to_owned())? as u32;
    Ok(Alignment { memory: unit, offset: unit })
}

/// Returns the alignment from statx's STATX_DIOALIGN: `None` if the kernel does not support it, `Some(None)` if there
/// is no direct I/O.
fn reported_alignment(file: &File) -> Option<Option<Alignment>> {
    const STATX_DIOALIGN: u32 = 0x2000;
    // SAFETY: `struct statx` is plain integers.
    let mut found: libc::statx = unsafe { std::mem::zeroed() };
    // SAFETY: an empty path with AT_EMPTY_PATH means the descriptor itself; `found` is valid for the result.
    let result =
        unsafe { libc::statx(file.as_raw_fd(), c"".as_ptr(), libc::AT_EMPTY_PATH, STATX_DIOALIGN, &raw mut found) };
    if result != 0 || found.stx_mask & STATX_DIOALIGN == 0 {
        return None;
    }
    let (memory, offset) = (found.stx_dio_mem_align, found.stx_dio_offset_align);
    let usable = memory.is_power_of_two() && offset.is_power_of_two() && memory <= 4096 && offset <= 65536;
    Some(usable.then_some(Alignment { memory, offset: offset.max(SECTOR as u32) }))
}

/// Returns true if a block device refuses writes, although it could be opened for writing.
fn is_read_only_device(file: &File) -> bool {
    const BLKROGET: libc::Ioctl = 0x125e;
    let mut read_only: libc::c_int = 0;
    // SAFETY: BLKROGET writes one int.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), BLKROGET, &raw mut read_only) };
    result == 0 && read_only != 0
}

fn physical_block_size(file: &File, kind: FileKind) -> u32 {
    const BLKPBSZGET: libc::Ioctl = 0x127b;
    if kind != FileKind::Block {
        return 4096;
    }
    let mut size: libc::c_uint = 0;
    // SAFETY: BLKPBSZGET writes one unsigned int.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), BLKPBSZGET, &raw mut size) };
    if result == 0 && size.is_power_of_two() { size.clamp(512, 65536) } else { 512 }
}
