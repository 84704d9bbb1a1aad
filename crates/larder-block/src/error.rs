//! What can go wrong with a request to a block device.

use std::fmt;
use std::rc::Rc;

use crate::units::{ByteLen, ByteRange};

/// What a request asks a device to do; for errors, statistics and throttles.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[allow(missing_docs)]
pub enum Operation {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
    Extents,
    Grow,
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Discard => "discard",
            Self::WriteZeroes => "write zeroes",
            Self::Extents => "extents",
            Self::Grow => "growth",
        })
    }
}

/// Why a request failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Failure {
    /// The host's error number for it, other than those below.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Os(i32),
    /// The device or its file system is full. Nothing else is wrong: the same request succeeds once there is room.
    #[error("no space left on the device")]
    NoSpace,
    /// A change to a read-only device.
    #[error("the device is read-only")]
    ReadOnly,
    /// Not all of the range is on the device.
    #[error("beyond the end of the device")]
    OutOfRange,
    /// Start or length is no multiple of the device's block size.
    #[error("not aligned to the device's block size")]
    Misaligned,
    /// The device has no such operation.
    #[error("not supported by the device")]
    Unsupported,
    /// The store behind the device is gone, for good or for longer than the user allows.
    #[error("the store is not reachable")]
    Unreachable,
    /// What the store returned cannot be right.
    #[error("the store returned invalid data")]
    Invalid,
}

impl Failure {
    /// The failure for an error number of the host's.
    pub fn from_errno(errno: i32) -> Self {
        match errno {
            libc::ENOSPC | libc::EDQUOT => Self::NoSpace,
            libc::EROFS | libc::EPERM => Self::ReadOnly,
            libc::EOPNOTSUPP | libc::ENOSYS => Self::Unsupported,
            errno => Self::Os(errno),
        }
    }

    /// Whether the requester's memory is at fault, and not the device: the kernel cannot read or write it. Memory of a guest
    /// is like that once its front-end has made the file shorter.
    pub fn is_of_memory(self) -> bool {
        self == Self::Os(libc::EFAULT)
    }
}

/// A request that failed: what was tried, where, on what, and why. One pointer wide, because success is the common case.
#[derive(Clone)]
pub struct IoError(Box<Detail>);

#[derive(Clone)]
struct Detail {
    device: Rc<str>,
    operation: Operation,
    range: ByteRange,
    failure: Failure,
}

impl IoError {
    /// A failed `operation` on `range` of `device` (its name as the user knows it).
    pub fn new(device: &Rc<str>, operation: Operation, range: ByteRange, failure: Failure) -> Self {
        Self(Box::new(Detail {
            device: Rc::clone(device),
            operation,
            range,
            failure,
        }))
    }

    /// Why.
    pub fn failure(&self) -> Failure {
        self.0.failure
    }

    /// What was tried.
    pub fn operation(&self) -> Operation {
        self.0.operation
    }

    /// Where.
    pub fn range(&self) -> ByteRange {
        self.0.range
    }
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let detail = &*self.0;
        match detail.operation {
            Operation::Flush => write!(f, "{}: flush failed: {}", detail.device, detail.failure),
            // Its range is all that the device was to have.
            Operation::Grow => write!(
                f,
                "{}: growth to {} failed: {}",
                detail.device,
                ByteLen::new(detail.range.end().get()),
                detail.failure
            ),
            operation => write!(
                f,
                "{}: {operation} of {} failed: {}",
                detail.device, detail.range, detail.failure
            ),
        }
    }
}

impl fmt::Debug for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for IoError {}

/// How a request ends.
pub type IoResult<T = ()> = Result<T, IoError>;
