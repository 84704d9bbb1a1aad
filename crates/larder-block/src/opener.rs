//! How this process gets at files by their paths: by itself, or through an opener, a process with more rights that opens for
//! it what it is meant to have.
//!
//! A server that guests and images may take over gives up its rights before it reads a byte of theirs. From then on all files
//! outside its own folders come from the opener, which knows what the server is meant to have, and from nowhere else. All code
//! that opens, finds or removes such a file by its path does so through [`opener`].

mod blkid;
mod counters;

use std::fs::{self, File, Metadata};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

pub use blkid::Blkid;
pub use counters::{DiskCounters, FileTimes};

use crate::backend::image_lock;
use crate::lock_wait::{self, LockKind, LockOwner};

/// For what a file is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// To look at it from outside: the descriptor stands for the file, and gives no access to what is in it (open(2), `O_PATH`).
    Look,
    /// To be read.
    Read,
    /// To be read and written.
    Write,
    /// To claim a block device (open(2), `O_EXCL`); it can be read.
    Claim,
}

/// Whoever has chosen a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NamedBy {
    /// The user.
    User,
    /// An image's header. The path does not lead through the links of /proc, which are to files that processes have open.
    Header,
}

/// Gets at files by their paths. What is not allowed is an error of the kind [`io::ErrorKind::PermissionDenied`].
pub trait Opener: Send + Sync {
    /// Opens what is at `path`. Only regular files and block devices are opened for more than a look: to open another device
    /// can have effects, and a FIFO waits for its other end.
    ///
    /// # Errors
    /// The host's; [`io::ErrorKind::InvalidInput`] if it is no file or block device.
    fn open(&self, path: &Path, access: Access, by: NamedBy) -> io::Result<File>;

    /// Makes a regular file, for its owner alone, and opens it to be written.
    ///
    /// # Errors
    /// The host's; there is something already.
    fn make(&self, path: &Path) -> io::Result<File>;

    /// Removes a file that was made.
    ///
    /// # Errors
    /// The host's.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Connects to the unix socket at `path`, without waiting: [`io::ErrorKind::WouldBlock`] if too many others wait there.
    ///
    /// # Errors
    /// The host's.
    fn connect(&self, path: &Path) -> io::Result<OwnedFd>;

    /// Returns the path of what is at `path`, without links.
    ///
    /// # Errors
    /// There is nothing.
    fn canonical(&self, path: &Path) -> io::Result<PathBuf>;

    /// Returns the names in `folder` (of /dev) that lead to the same device as `path`.
    ///
    /// # Errors
    /// One of the two cannot be looked at.
    fn names_of_device(&self, folder: &Path, path: &Path) -> io::Result<Vec<PathBuf>>;

    /// Returns the number that the kernel has given to a disk when it appeared, and gives to no other until the host is started
    /// anew. A partition has its disk's.
    ///
    /// # Errors
    /// The kernel does not say.
    fn disk_sequence(&self, device: u64) -> io::Result<String>;

    /// Returns what the kernel counts of the writes to a block device.
    ///
    /// # Errors
    /// The kernel does not say.
    fn disk_counters(&self, device: u64) -> io::Result<DiskCounters>;

    /// Asks `blkid` of util-linux what is on an open file or device.
    ///
    /// # Errors
    /// It cannot be run, or does not answer.
    fn blkid(&self, file: &File) -> io::Result<Blkid>;

    /// Returns who has a lock on an open file by another open file.
    fn lock_owner(&self, file: BorrowedFd<'_>, kind: LockKind) -> LockOwner;

    /// Returns the other processes that have locks of an image on an open file, as `qemu-nbd, pid 4711`.
    fn lock_holders(&self, file: BorrowedFd<'_>) -> Vec<String>;
}

static HELPER: OnceLock<Box<dyn Opener>> = OnceLock::new();

/// Returns what this process gets at files by.
pub fn opener() -> &'static dyn Opener {
    match HELPER.get() {
        Some(helper) => &**helper,
        None => &Itself,
    }
}

/// Has this process get at files by `helper` from now on, for good. It has one at most.
pub fn open_through(helper: Box<dyn Opener>) {
    let is_first = HELPER.set(helper).is_ok();
    assert!(is_first, "a process has one opener");
}

/// Returns what the host says of what is at `path`.
///
/// # Errors
/// The host's.
pub fn metadata(path: &Path) -> io::Result<Metadata> {
    opener().open(path, Access::Look, NamedBy::User)?.metadata()
}

/// The process itself, with its own rights.
#[derive(Clone, Copy, Debug)]
pub struct Itself;

impl Opener for Itself {
    fn open(&self, path: &Path, access: Access, by: NamedBy) -> io::Result<File> {
        let flags = OFlags::PATH | OFlags::CLOEXEC;
        let resolve = match by {
            NamedBy::User => ResolveFlags::empty(),
            NamedBy::Header => ResolveFlags::NO_MAGICLINKS,
        };
        let place = match resolve.is_empty() {
            // Of any kernel, and also where openat2 is not allowed.
            true => rustix::fs::open(path, flags, Mode::empty()),
            false => rustix::fs::openat2(rustix::fs::CWD, path, flags, Mode::empty(), resolve),
        };
        let place = File::from(place?);
        if access == Access::Look {
            return Ok(place);
        }
        let kind = place.metadata()?.file_type();
        if !kind.is_file() && !kind.is_block_device() {
            return Err(io::Error::new(
                io::ErrorKind::InvalidInput,
                "it is neither a file nor a block device",
            ));
        }
        // Without waiting for a process that has a lease on it: it is told, and the next try finds the file.
        let claim = if access == Access::Claim { libc::O_EXCL } else { 0 };
        let file = fs::OpenOptions::new()
            .read(true)
            .write(access == Access::Write)
            .custom_flags(libc::O_NOCTTY | libc::O_NONBLOCK | claim)
            .open(format!("/proc/self/fd/{}", place.as_raw_fd()))?;
        let flags = rustix::fs::fcntl_getfl(&file)?;
        rustix::fs::fcntl_setfl(&file, flags & !OFlags::NONBLOCK)?;
        Ok(file)
    }

    fn make(&self, path: &Path) -> io::Result<File> {
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

    fn canonical(&self, path: &Path) -> io::Result<PathBuf> {
        path.canonicalize()
    }

    fn names_of_device(&self, folder: &Path, path: &Path) -> io::Result<Vec<PathBuf>> {
        let device = path.canonicalize()?;
        let names = fs::read_dir(folder)?.flatten().map(|entry| entry.path());
        let same = names.filter(|name| name.canonicalize().is_ok_and(|found| found == device));
        Ok(same.collect())
    }

    fn disk_sequence(&self, device: u64) -> io::Result<String> {
        let number = format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device));
        let place = Path::new("/sys/dev/block").join(number).canonicalize()?;
        let of = |place: &Path| fs::read_to_string(place.join("diskseq"));
        let sequence = of(&place).or_else(|_| of(place.parent().unwrap_or(&place)))?;
        Ok(sequence.trim().to_owned())
    }

    fn disk_counters(&self, device: u64) -> io::Result<DiskCounters> {
        counters::read(Path::new("/sys/dev/block"), device)
    }

    fn blkid(&self, file: &File) -> io::Result<Blkid> {
        blkid::ask(file)
    }

    fn lock_owner(&self, file: BorrowedFd<'_>, kind: LockKind) -> LockOwner {
        lock_wait::owner(file, kind)
    }

    fn lock_holders(&self, file: BorrowedFd<'_>) -> Vec<String> {
        image_lock::holders_but(&[std::process::id()], file)
    }
}

fn unix_address(path: &Path) -> io::Result<SocketAddrUnix> {
    SocketAddrUnix::new(path).map_err(|error| match error {
        Errno::NAMETOOLONG => io::Error::new(
            io::ErrorKind::InvalidInput,
            format!(
                "socket path {} is {} bytes long; the kernel takes at most 107",
                path.display(),
                path.as_os_str().len()
            ),
        ),
        error => error.into(),
    })
}
