//! QEMU's image locks: OFD byte-range locks on the image file that state what its users do and tolerate.
//!
//! Each permission has two bytes. A user read-locks byte 100+p if it uses permission p, and byte 200+p if it does not
//! tolerate that others use p. It may proceed if no other process has locked the opposite byte of its own locks (QEMU
//! `block/file-posix.c`, `raw_check_lock_bytes`). Because Larder takes the same locks, QEMU and its tools refuse a
//! disk that Larder has in use, and Larder refuses one of theirs.
//!
//! In addition, a process that writes an image exclusively write-locks [`WRITER_BYTE`], a byte that QEMU does not use.
//!
//! The locks belong to the open file description. When a server dies, the kernel drops them only after its last
//! in-flight I/O has ended, so a successor that holds the writer's byte knows that no old write can still land. That
//! holds also where the process that starts the servers keeps QEMU's locks from one server to the next ([`LockMode`]).

mod owners;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;

use owners::is_locked_by_this_process;
pub use owners::owners_except;

use crate::opener::{Access, PathSource, opener};

const PERMISSION_BASE: i64 = 100;
const UNSHARED_BASE: i64 = 200;

/// The byte of an exclusive writer. QEMU has 64 permissions at most, so its bytes end at 263.
pub(crate) const WRITER_BYTE: i64 = 300;

/// QEMU's `BLK_PERM_*` bits.
const CONSISTENT_READ: u32 = 1 << 0;
const WRITE: u32 = 1 << 1;
const RESIZE: u32 = 1 << 3;
const PERMISSIONS: [(u32, &str); 4] =
    [(CONSISTENT_READ, "read"), (WRITE, "write"), (1 << 2, "write unchanged data"), (RESIZE, "resize")];

/// The use of an image, and the other uses that it tolerates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// Exclusive use: this process writes, no other process may.
    Exclusive,
    /// Read-only use: this process reads, others may read, none may write.
    ReadOnly,
    /// Shared use: others may read and write; the user is responsible for the consequences.
    Shared {
        /// This process writes.
        writable: bool,
    },
}

impl Sharing {
    fn used_permissions(self) -> u32 {
        match self {
            Self::Exclusive => CONSISTENT_READ | WRITE | RESIZE,
            Self::ReadOnly | Self::Shared { writable: false } => CONSISTENT_READ,
            Self::Shared { writable: true } => CONSISTENT_READ | WRITE,
        }
    }

    fn unshared_permissions(self) -> u32 {
        match self {
            Self::Exclusive | Self::ReadOnly => WRITE | RESIZE,
            Self::Shared { .. } => 0,
        }
    }
}

/// The process that keeps others from using an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LockMode {
    /// This process, which uses the image itself.
    #[default]
    Direct,
    /// This process, for processes that it starts, which lock the writer's byte.
    ForChildren,
    /// The parent process, which holds QEMU's locks as long as this process lives. This process takes the same locks,
    /// in case the parent dies first, but cannot check them against those of others.
    Inherited,
    /// No process: the file is only inspected, without any lock, and its user may change it meanwhile.
    Unlocked,
}

/// The reason why an image could not be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process uses the image in a conflicting way.
    #[error("in use by another process{}: {conflict}", owners_text(holders))]
    InUse {
        /// The permissions that conflict.
        conflict: String,
        /// The other processes as `qemu-nbd, pid 4711`, as far as the kernel shows them to this user.
        holders: Vec<String>,
    },
    /// This process has the image open already, in a way that conflicts with this use.
    #[error("already in use by this process, as another disk or in the backing chain of one: {conflict}")]
    InUseByThisProcess {
        /// The permissions that conflict.
        conflict: String,
    },
    /// A server that was killed has writes in flight.
    #[error("writes of a killed server are still in flight")]
    WritesInFlight,
    /// The parent process holds QEMU's locks on another file, or on none.
    #[error("this is not the file that the parent process has locked; was it replaced just now?")]
    NotInherited,
    /// The file system cannot lock.
    #[error("its file system does not support file locks: {0}")]
    Os(io::Error),
}

fn owners_text(holders: &[String]) -> String {
    match holders {
        [] => String::new(),
        holders => format!(" ({})", holders.join("; ")),
    }
}

/// Takes the locks for `sharing` on an open image. Closing the file releases them.
///
/// # Errors
/// The image is in use, or cannot be locked.
pub fn lock(file: BorrowedFd<'_>, sharing: Sharing, mode: LockMode) -> Result<(), LockError> {
    let result = try_lock(file, sharing, mode);
    if result.is_err() {
        unlock(file);
    }
    result
}

fn try_lock(file: BorrowedFd<'_>, sharing: Sharing, mode: LockMode) -> Result<(), LockError> {
    if mode == LockMode::Unlocked {
        return Ok(());
    }
    lock_bytes(file, sharing)?;
    match mode {
        LockMode::Inherited => check_inherited(file)?,
        _ => check_conflicts(file, sharing)?,
    }
    match (sharing, mode) {
        (Sharing::Exclusive, LockMode::Direct | LockMode::Inherited) => lock_writer_byte(file),
        _ => Ok(()),
    }
}

/// Releases the locks. Errors are ignored, because closing the file releases them too.
pub fn unlock(file: BorrowedFd<'_>) {
    for (bit, _) in PERMISSIONS {
        for base in [PERMISSION_BASE, UNSHARED_BASE] {
            let _ = set_lock(file, base + i64::from(bit.trailing_zeros()), libc::F_UNLCK);
        }
    }
    let _ = set_lock(file, WRITER_BYTE, libc::F_UNLCK);
}

/// Returns the processes that may write an image or keep others from writing it, as far as the kernel shows them to
/// this user; `None` if there is no such process. Takes no lock, and does not block on a path that is no image, such
/// as a FIFO.
///
/// # Errors
/// The image cannot be opened, or its file system cannot lock.
pub fn other_users(image: &Path) -> io::Result<Option<Vec<String>>> {
    let file = opener().open(image, Access::Read, PathSource::User)?;
    let write = i64::from(WRITE.trailing_zeros());
    let used = is_locked_elsewhere(file.as_fd(), PERMISSION_BASE + write)?
        || is_locked_elsewhere(file.as_fd(), UNSHARED_BASE + write)?;
    Ok(used.then(|| opener().image_lock_owners(file.as_fd())))
}

fn lock_bytes(file: BorrowedFd<'_>, sharing: Sharing) -> Result<(), LockError> {
    for (bit, _) in PERMISSIONS {
        let index = i64::from(bit.trailing_zeros());
        if sharing.used_permissions() & bit != 0 {
            set_lock(file, PERMISSION_BASE + index, libc::F_RDLCK).map_err(LockError::Os)?;
        }
        if sharing.unshared_permissions() & bit != 0 {
            set_lock(file, UNSHARED_BASE + index, libc::F_RDLCK).map_err(LockError::Os)?;
        }
    }
    Ok(())
}

fn check_conflicts(file: BorrowedFd<'_>, sharing: Sharing) -> Result<(), LockError> {
    for (bit, name) in PERMISSIONS {
        let index = i64::from(bit.trailing_zeros());
        if sharing.used_permissions() & bit != 0
            && is_locked_elsewhere(file, UNSHARED_BASE + index).map_err(LockError::Os)?
        {
            return Err(in_use_error(file, format!("it does not allow others to {name}")));
        }
        if sharing.unshared_permissions() & bit != 0
            && is_locked_elsewhere(file, PERMISSION_BASE + index).map_err(LockError::Os)?
        {
            return Err(in_use_error(file, format!("it may {name}")));
        }
    }
    Ok(())
}

/// Checks that the parent process has the image locked. Any user of an image locks the read permission.
fn check_inherited(file: BorrowedFd<'_>) -> Result<(), LockError> {
    let read = PERMISSION_BASE + i64::from(CONSISTENT_READ.trailing_zeros());
    match is_locked_elsewhere(file, read).map_err(LockError::Os)? {
        true => Ok(()),
        false => Err(LockError::NotInherited),
    }
}

fn lock_writer_byte(file: BorrowedFd<'_>) -> Result<(), LockError> {
    set_lock(file, WRITER_BYTE, libc::F_WRLCK).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::PermissionDenied => LockError::WritesInFlight,
        _ => LockError::Os(error),
    })
}

fn in_use_error(file: BorrowedFd<'_>, conflict: String) -> LockError {
    if is_locked_by_this_process(file) {
        return LockError::InUseByThisProcess { conflict };
    }
    LockError::InUse { conflict, holders: opener().image_lock_owners(file) }
}

fn byte_lock(byte: i64, kind: i32) -> libc::flock {
    // SAFETY: all fields are integers; zero is valid for each, and `l_pid` must be zero for OFD locks.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = kind as _;
    lock.l_whence = libc::SEEK_SET as _;
    lock.l_start = byte;
    lock.l_len = 1;
    lock
}

fn set_lock(file: BorrowedFd<'_>, byte: i64, kind: i32) -> io::Result<()> {
    let lock = byte_lock(byte, kind);
    // SAFETY: the descriptor is open and `lock` is a valid `struct flock`.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

/// Returns true if another open file has locked the byte. The kernel does not report its process: OFD locks have
/// none.
fn is_locked_elsewhere(file: BorrowedFd<'_>, byte: i64) -> io::Result<bool> {
    let mut lock = byte_lock(byte, libc::F_WRLCK);
    // SAFETY: the descriptor is open and `lock` is a valid `struct flock` that the kernel fills in.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(lock.l_type != libc::F_UNLCK as libc::c_short),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::AsFd;

    use super::*;

    /// Servers with an inherited claim follow one another, and no other process gets the lock in between.
    #[test]
    fn inherited_claim_excludes_strangers_between_servers() {
        let image = tempfile::NamedTempFile::new_in("/dev/shm").expect("a file");
        let open = || File::options().read(true).write(true).open(image.path()).expect("opens");
        let try_lock = |file: &File, claim| lock(file.as_fd(), Sharing::Exclusive, claim);
        let (parent, first, second, stranger) = (open(), open(), open(), open());
        assert!(matches!(try_lock(&first, LockMode::Inherited), Err(LockError::NotInherited)));
        try_lock(&parent, LockMode::ForChildren).expect("it is unlocked");
        try_lock(&first, LockMode::Inherited).expect("the parent process has locked it");
        assert!(matches!(try_lock(&second, LockMode::Inherited), Err(LockError::WritesInFlight)));
        assert!(try_lock(&stranger, LockMode::Direct).is_err());
        drop(first);
        assert!(try_lock(&stranger, LockMode::Direct).is_err());
        try_lock(&second, LockMode::Inherited).expect("the first server has released its lock");
        drop(parent);
        assert!(try_lock(&stranger, LockMode::Direct).is_err());
        unlock(second.as_fd());
        try_lock(&stranger, LockMode::Direct).expect("it is unlocked again");
    }
}
