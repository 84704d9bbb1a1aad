//! Access to files by their paths: by this process itself, or through an opener, a process with more rights that
//! opens only permitted files for it.
//!
//! A server that guests and images may take over drops its rights before it reads a byte of theirs. From then on all
//! files outside its own directories come only from the opener, which has a list of the server's permitted files. All
//! code that opens, finds or removes such a file by its path does so through [`opener`].

mod blkid;
mod counters;
mod path_walk;

use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

pub use blkid::BlkidOutput;
pub use counters::{DiskCounters, FileTimes};
pub use path_walk::{open_safe_path, walk_path};

use crate::backend::image_lock;
use crate::lock_wait::{self, LockKind, LockOwner};

/// The purpose of opening a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// Inspection from outside: the descriptor refers to the file, and gives no access to its content (open(2),
    /// `O_PATH`).
    Inspect,
    /// Reading.
    Read,
    /// Reading and writing.
    Write,
    /// Claiming a block device (open(2), `O_EXCL`), which can be read then.
    Claim,
}

/// The source of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathSource {
    /// The user.
    User,
    /// An image's header, and the user. The path must not lead through the links of /proc, which point to files that
    /// processes have open.
    Header,
    /// An image's header alone. In addition, for root, no symbolic link on the way may belong to another user; see
    /// [`open_safe_path`].
    HeaderOnly,
}

/// Access to files by their paths. A forbidden access is an error of the kind [`io::ErrorKind::PermissionDenied`].
pub trait Opener: Send + Sync {
    /// Opens the file at `path`. Only regular files and block devices are opened for more than [`Access::Inspect`]:
    /// opening another device can have effects, and a FIFO waits for its other end.
    ///
    /// # Errors
    /// The host's error; [`io::ErrorKind::InvalidInput`] if the path leads to no regular file or block device.
    fn open(&self, path: &Path, access: Access, path_source: PathSource) -> io::Result<File>;

    /// Creates a regular file, for its owner alone, and opens it for writing.
    ///
    /// # Errors
    /// The host's error; the path exists already.
    fn create_file(&self, path: &Path) -> io::Result<File>;

    /// Removes a file that was created by [`Opener::create_file`].
    ///
    /// # Errors
    /// The host's error.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Connects to the unix socket at `path`, without waiting: [`io::ErrorKind::WouldBlock`] if its backlog is full.
    ///
    /// # Errors
    /// The host's error.
    fn connect(&self, path: &Path) -> io::Result<OwnedFd>;

    /// Returns the path without symbolic links.
    ///
    /// # Errors
    /// The path does not exist.
    fn canonicalize(&self, path: &Path) -> io::Result<PathBuf>;

    /// Returns the names in `directory` (a directory of /dev) that lead to the same device as `path`.
    ///
    /// # Errors
    /// One of the two cannot be read.
    fn device_names(&self, directory: &Path, path: &Path) -> io::Result<Vec<PathBuf>>;

    /// Returns the sequence number that the kernel has given to a disk when it appeared, and gives to no other disk
    /// until a reboot. A partition has its disk's number.
    ///
    /// # Errors
    /// The kernel does not report it.
    fn disk_sequence(&self, device: u64) -> io::Result<String>;

    /// Returns the kernel's counters of the writes to a block device.
    ///
    /// # Errors
    /// The kernel does not report them.
    fn disk_counters(&self, device: u64) -> io::Result<DiskCounters>;

    /// Runs `blkid` of util-linux on an open file or device.
    ///
    /// # Errors
    /// It cannot be run, or does not answer.
    fn blkid(&self, file: &File) -> io::Result<BlkidOutput>;

    /// Returns the owner of a lock on the same file as `file` that belongs to another open file description.
    fn lock_owner(&self, file: BorrowedFd<'_>, kind: LockKind) -> LockOwner;

    /// Returns the other processes that have image locks on an open file, in the form `qemu-nbd, pid 4711`.
    fn image_lock_owners(&self, file: BorrowedFd<'_>) -> Vec<String>;
}

static OPENER: OnceLock<Box<dyn Opener>> = OnceLock::new();

/// Returns the opener that this process uses.
pub fn opener() -> &'static dyn Opener {
    match OPENER.get() {
        Some(helper) => &**helper,
        None => &DirectOpener,
    }
}

/// Makes this process use `helper` from now on, for good. It can be set once.
pub fn set_opener(helper: Box<dyn Opener>) {
    let is_first = OPENER.set(helper).is_ok();
    assert!(is_first, "the opener of a process can be set only once");
}

/// Returns the metadata of the file at `path`.
///
/// # Errors
/// The host's error.
pub fn metadata(path: &Path) -> io::Result<Metadata> {
    opener().open(path, Access::Inspect, PathSource::User)?.metadata()
}

/// An opener that uses this process's own rights.
#[derive(Clone, Copy, Debug)]
pub struct DirectOpener;

impl Opener for DirectOpener {
    fn open(&self, path: &Path, access: Access, path_source: PathSource) -> io::Result<File> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let path_file = match path_source {
            // Plain open works on any kernel, and also where openat2 is forbidden.
            PathSource::User => rustix::fs::open(path, flags, Mode::empty())?.into(),
            PathSource::Header => {
                let resolve = ResolveFlags::NO_MAGICLINKS;
                rustix::fs::openat2(rustix::fs::CWD, path, flags, Mode::empty(), resolve)?.into()
            }
            PathSource::HeaderOnly => open_safe_path(path)?,
        };
        if access == Access::Inspect {
            return Ok(path_file);
        }
        let kind = path_file.metadata()?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "it is neither a regular file nor a block device"));
        }
        // Non-blocking: the open does not wait for a process that has a lease on the file. That process is notified,
        // and the next attempt succeeds.
        let claim = if access == Access::Claim { libc::O_EXCL } else { 0 };
        let file = fs::OpenOptions::new()
            .read(true)
            .write(access == Access::Write)
            .custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK | claim)
            .open(format!("/proc/self/fd/{}", path_file.as_raw_fd()))?;
        let flags = rustix::fs::fcntl_getfl(&file)?;
        rustix::fs::fcntl_setfl(&file, flags & !OFlags::NONBLOCK)?;
        Ok(file)
    }

    fn create_file(&self, path: &Path) -> io::Result<File> {
        File::options().write(true).create_new(true).mode(0o600).open(path)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn connect(&self, path: &Path) -> io::Result<OwnedFd> {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        rustix::net::connect(&socket, &unix_address(path)?)?;
        Ok(socket)
    }

    fn canonicalize(&self, path: &Path) -> io::Result<PathBuf> {
        path.canonicalize()
    }

    fn device_names(&self, directory: &Path, path: &Path) -> io::Result<Vec<PathBuf>> {
        let device = path.canonicalize()?;
        let names = fs::read_dir(directory)?.flatten().map(|entry| entry.path());
        let matching = names.filter(|name| name.canonicalize().is_ok_and(|found| found == device));
        Ok(matching.collect())
    }

    fn disk_sequence(&self, device: u64) -> io::Result<String> {
        let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        let sysfs_path = Path::new("/sys/dev/block").join(number).canonicalize()?;
        let read_sequence = |place: &Path| fs::read_to_string(place.join("diskseq"));
        let sequence =
            read_sequence(&sysfs_path).or_else(|_| read_sequence(sysfs_path.parent().unwrap_or(&sysfs_path)))?;
        Ok(sequence.trim().to_owned())
    }

    fn disk_counters(&self, device: u64) -> io::Result<DiskCounters> {
        counters::read(Path::new("/sys/dev/block"), device)
    }

    fn blkid(&self, file: &File) -> io::Result<BlkidOutput> {
        blkid::run(file)
    }

    fn lock_owner(&self, file: BorrowedFd<'_>, kind: LockKind) -> LockOwner {
        lock_wait::find_owner(file, kind)
    }

    fn image_lock_owners(&self, file: BorrowedFd<'_>) -> Vec<String> {
        image_lock::owners_except(&[std::process::id()], file)
    }
}

fn unix_address(path: &Path) -> io::Result<SocketAddrUnix> {
    SocketAddrUnix::new(path).map_err(|error| match error {
        Errno::NAMETOOLONG => io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "socket path {} is {} bytes long; the kernel accepts at most 107",
                path.display(),
                path.as_os_str().len()
            ),
        ),
        error => error.into(),
    })
}
