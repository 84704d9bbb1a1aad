//! QEMU's image locks: OFD byte-range locks on the image file that say what its users do and tolerate.
//!
//! Each permission has two bytes. A user read-locks byte 100+p if it uses permission p, and byte 200+p if it does not
//! tolerate others using p. It may go on if nobody has locked the opposite byte of what it wants (QEMU
//! `block/file-posix.c`, `raw_check_lock_bytes`). Taking the same locks, QEMU and its tools refuse a disk that Larder
//! has in use, and Larder refuses one of theirs.
//!
//! The locks belong to the open file description. When a server dies, the kernel drops them only after its last I/O
//! under way has ended, so a successor that holds the exclusive lock knows that no old write can still land.

mod holders;

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

pub use holders::holders;
use holders::is_held_here;

const PERMISSION_BASE: i64 = 100;
const UNSHARED_BASE: i64 = 200;

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

/// How an image is used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// We write; nobody else does.
    Exclusive,
    /// We read; others may read, nobody writes.
    ReadOnly,
    /// Others may do what they like; the user answers for it.
    Shared {
        /// Whether we write.
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

/// Why an image could not be locked.
#[derive(Debug, thiserror::Error)]
pub enum LockError {
    /// Another process uses the image in a way that does not go with ours.
    #[error("in use by another process{}: {conflict}", holders_text(holders))]
    InUse {
        /// What stands against what.
        conflict: String,
        /// The other processes as `qemu-nbd, pid 4711`, as far as the kernel tells this user.
        holders: Vec<String>,
    },
    /// This process has the image open already, and uses it in a way that does not go with this one.
    #[error("already in use here, as another disk or behind one: {conflict}")]
    InUseHere {
        /// What stands against what.
        conflict: String,
    },
    /// The file system cannot lock.
    #[error("its file system cannot lock files: {0}")]
    Os(io::Error),
}

fn holders_text(holders: &[String]) -> String {
    match holders {
        [] => String::new(),
        holders => format!(" ({})", holders.join("; ")),
    }
}

/// Takes the locks for `sharing` on an open image. They go when the file is closed.
///
/// # Errors
/// The image is in use, or cannot be locked.
pub fn lock(file: BorrowedFd<'_>, sharing: Sharing) -> Result<(), LockError> {
    let result = take(file, sharing).and_then(|()| check(file, sharing));
    if result.is_err() {
        unlock(file);
    }
    result
}

/// Gives the locks back, as well as that goes: the file's end drops them for certain.
pub fn unlock(file: BorrowedFd<'_>) {
    for (bit, _) in BITS {
        for base in [PERMISSION_BASE, UNSHARED_BASE] {
            let _ = set_lock(file, base + i64::from(bit.trailing_zeros()), libc::F_UNLCK);
        }
    }
}

/// Whether another process may write an image, or keeps others from writing it: who, as far as the kernel tells this
/// user. Takes no lock.
///
/// # Errors
/// The file system cannot lock.
pub fn used_by_others(file: BorrowedFd<'_>) -> io::Result<Option<Vec<String>>> {
    let write = i64::from(WRITE.trailing_zeros());
    let used = is_held(file, PERMISSION_BASE + write)? || is_held(file, UNSHARED_BASE + write)?;
    Ok(used.then(|| holders(file)))
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
            return Err(in_use(file, format!("it does not let others {name}")));
        }
        if sharing.unshared() & bit != 0 && is_held(file, PERMISSION_BASE + index).map_err(LockError::Os)? {
            return Err(in_use(file, format!("it may {name}")));
        }
    }
    Ok(())
}

fn in_use(file: BorrowedFd<'_>, conflict: String) -> LockError {
    if is_held_here(file) {
        return LockError::InUseHere { conflict };
    }
    LockError::InUse {
        conflict,
        holders: holders(file),
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

/// Whether another open file has the byte locked. The kernel does not say whose it is: OFD locks have no process.
fn is_held(file: BorrowedFd<'_>, byte: i64) -> io::Result<bool> {
    let mut lock = byte_lock(byte, libc::F_WRLCK);
    // SAFETY: the descriptor is open and `lock` is a valid `struct flock` that the kernel fills in.
    match unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(lock.l_type != libc::F_UNLCK as libc::c_short),
    }
}
