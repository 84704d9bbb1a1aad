//! QEMU's image locks: OFD byte-range locks on the image file that state what its users do and tolerate.
//!
//! Each permission has two bytes. A user read-locks byte 100+p if it uses permission p, and byte 200+p if it does not
//! tolerate that others use p. It may proceed if no other process has locked the opposite byte of its own locks (QEMU
//! `block/file-posix.c`, `raw_check_lock_bytes`). Because Larder takes the same locks, QEMU and its tools refuse a
//! disk that Larder has in use, and Larder refuses one of theirs.
//!
//! In addition, a process that writes an image exclusively write-locks [`WRITER`], a byte that QEMU does not use.
//!
//! The locks belong to the open file description. When a server dies, the kernel drops them only after its last
//! in-flight I/O has ended, so a successor that holds the writer's byte knows that no old write can still land. That
//! holds also where the process that starts the servers keeps QEMU's locks from one server to the next ([`Claim`]).

mod holders;

use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::path::Path;

pub use holders::holders_but;
use holders::is_held_here;

use crate::opener::{Access, NamedBy, opener};

const PERMISSION_BASE: i64 = 100;
const UNSHARED_BASE: i64 = 200;

/// The byte of an exclusive writer. QEMU has 64 permissions at most, so its bytes end at 263.
pub(crate) const WRITER: i64 = 300;

/// QEMU's `BLK_PERM_*` bits.
const CONSISTENT_READ: u32 = 1 << 0;
const WRITE: u32 = 1 << 1;
const RESIZE: u32 = 1 << 3;
const BITS: [(u32, &str); 4] = [
    (CONSISTENT_READ, "read"),
    (WRITE, "write"),
    (1 << 2, "write unchanged data"),
    (RESIZE, "resize"),
];

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
    fn uses(self) -> u32 {
        match self {
            Self::Exclusive => CONSISTENT_READ | WRITE | RESIZE,
            Self::ReadOnly | Self::Shared { writable: false } => CONSISTENT_READ,
            Self::Shared { writable: true } => CONSISTENT_READ | WRITE,
        }
    }

    fn unshared(self) -> u32 {
        match self {
            Self::Exclusive | Self::ReadOnly => WRITE | RESIZE,
            Self::Shared { .. } => 0,
        }
    }
}

/// The process that keeps others from using an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Claim {
    /// This process, which uses the image itself.
    #[default]
    Own,
    /// This process, for processes that it starts, which lock the writer's byte.
    ForOthers,
    /// The parent process, which holds QEMU's locks as long as this process lives. This process takes the same locks,
    /// in case the parent dies first, but cannot check them against those of others.
    Inherited,
    /// No process: the file is only inspected, without any lock, and its user may change it meanwhile.
    Nobody,
}

/// The reason why an image could not be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process uses the image in a conflicting way.
    #[error("in use by another process{}: {conflict}", holders_text(holders))]
    InUse {
        /// The permissions that conflict.
        conflict: String,
        /// The other processes as `qemu-nbd, pid 4711`, as far as the kernel shows them to this user.
        holders: Vec<String>,
    },
    /// This process has the image open already, in a way that conflicts with this use.
    #[error("already in use by this process, as another disk or in the backing chain of one: {conflict}")]
    InUseHere {
        /// The permissions that conflict.
        conflict: String,
    },
    /// A server that was killed has writes in flight.
    #[error("writes of a killed server are still in flight")]
    StillWritten,
    /// The parent process holds QEMU's locks on another file, or on none.
    #[error("this is not the file that the parent process has locked; was it replaced just now?")]
    NotInherited,
    /// The file system cannot lock.
    #[error("its file system does not support file locks: {0}")]
    Os(io::Error),
}

fn holders_text(holders: &[String]) -> String {
    match holders {
        [] => String::new(),
        holders => format!(" ({})", holders.join("; ")),
    }
}

/// Takes the locks for `sharing` on an open image. Closing the file releases them.
///
/// # Errors
/// The image is in use, or cannot be locked.
pub fn lock(file: BorrowedFd<'_>, sharing: Sharing, claim: Claim) -> Result<(), LockError> {
    let result = try_to_lock(file, sharing, claim);
    if result.is_err() {
        unlock(file);
    }
    result
}

fn try_to_lock(file: BorrowedFd<'_>, sharing: Sharing, claim: Claim) -> Result<(), LockError> {
    if claim == Claim::Nobody {
        return Ok(());
    }
    take(file, sharing)?;
    match claim {
        Claim::Inherited => check_inherited(file)?,
        _ => check(file, sharing)?,
    }
    match (sharing, claim) {
        (Sharing::Exclusive, Claim::Own | Claim::Inherited) => take_writer(file),
        _ => Ok(()),
    }
}

/// Releases the locks. Errors are ignored, because closing the file releases them too.
pub fn unlock(file: BorrowedFd<'_>) {
    for (bit, _) in BITS {
        for base in [PERMISSION_BASE, UNSHARED_BASE] {
            let _ = set_lock(file, base + i64::from(bit.trailing_zeros()), libc::F_UNLCK);
        }
    }
    let _ = set_lock(file, WRITER, libc::F_UNLCK);
}

/// Returns the processes that may write an image or keep others from writing it, as far as the kernel shows them to
/// this user; `None` if there is no such process. Takes no lock, and does not block on a path that is no image, such
/// as a FIFO.
///
/// # Errors
/// The image cannot be opened, or its file system cannot lock.
pub fn used_by_others(image: &Path) -> io::Result<Option<Vec<String>>> {
    let file = opener().open(image, Access::Read, NamedBy::User)?;
    let write = i64::from(WRITE.trailing_zeros());
    let used = is_held(file.as_fd(), PERMISSION_BASE + write)? || is_held(file.as_fd(), UNSHARED_BASE + write)?;
    Ok(used.then(|| opener().lock_holders(file.as_fd())))
}

fn take(file: BorrowedFd<'_>, sharing: Sharing) -> Result<(), LockError> {
    for (bit, _) in BITS {
        let index = i64::from(bit.trailing_zeros());
        if sharing.uses() & bit != 0 {
            set_lock(file, PERMISSION_BASE + index, libc::F_RDLCK).map_err(LockError::Os)?;
        }
        if sharing.unshared() & bit != 0 {
            set_lock(file, UNSHARED_BASE + index, libc::F_RDLCK).map_err(LockError::Os)?;
        }
    }
    Ok(())
}

fn check(file: BorrowedFd<'_>, sharing: Sharing) -> Result<(), LockError> {
    for (bit, name) in BITS {
        let index = i64::from(bit.trailing_zeros());
        if sharing.uses() & bit != 0 && is_held(file, UNSHARED_BASE + index).map_err(LockError::Os)? {
            return Err(in_use(file, format!("it does not allow others to {name}")));
        }
        if sharing.unshared() & bit != 0 && is_held(file, PERMISSION_BASE + index).map_err(LockError::Os)? {
            return Err(in_use(file, format!("it may {name}")));
        }
    }
    Ok(())
}

/// Checks that the parent process has the image locked. Any user of an image locks the read permission.
fn check_inherited(file: BorrowedFd<'_>) -> Result<(), LockError> {
    let read = PERMISSION_BASE + i64::from(CONSISTENT_READ.trailing_zeros());
    match is_held(file, read).map_err(LockError::Os)? {
        true => Ok(()),
        false => Err(LockError::NotInherited),
    }
}

fn take_writer(file: BorrowedFd<'_>) -> Result<(), LockError> {
    set_lock(file, WRITER, libc::F_WRLCK).map_err(|error| match error.kind() {
        io::ErrorKind::WouldBlock | io::ErrorKind::PermissionDenied => LockError::StillWritten,
        _ => LockError::Os(error),
    })
}

fn in_use(file: BorrowedFd<'_>, conflict: String) -> LockError {
    if is_held_here(file) {
        return LockError::InUseHere { conflict };
    }
    LockError::InUse {
        conflict,
        holders: opener().lock_holders(file),
    }
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
fn is_held(file: BorrowedFd<'_>, byte: i64) -> io::Result<bool> {
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
        let open = || {
            File::options()
                .read(true)
                .write(true)
                .open(image.path())
                .expect("opens")
        };
        let try_to = |file: &File, claim| lock(file.as_fd(), Sharing::Exclusive, claim);
        let (holder, first, second, stranger) = (open(), open(), open(), open());
        assert!(matches!(try_to(&first, Claim::Inherited), Err(LockError::NotInherited)));
        try_to(&holder, Claim::ForOthers).expect("it is unlocked");
        try_to(&first, Claim::Inherited).expect("the parent process has locked it");
        assert!(matches!(
            try_to(&second, Claim::Inherited),
            Err(LockError::StillWritten)
        ));
        assert!(try_to(&stranger, Claim::Own).is_err());
        drop(first);
        assert!(try_to(&stranger, Claim::Own).is_err());
        try_to(&second, Claim::Inherited).expect("the first server has released its lock");
        drop(holder);
        assert!(try_to(&stranger, Claim::Own).is_err());
        unlock(second.as_fd());
        try_to(&stranger, Claim::Own).expect("it is unlocked again");
    }
}
