//! Errors of requests to a block device.

use std::fmt;
use std::rc::Rc;

use crate::units::{ByteLen, ByteRange};

/// The kind of a request; for errors, statistics and throttles.
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

/// The reason why a request failed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Failure {
    /// An error number of the host that has no variant below.
    #[error("{}", std::io::Error::from_raw_os_error(*.0))]
    Os(i32),
    /// The device or its file system is full. Nothing else is wrong: the same request succeeds once there is space.
    #[error("no space left on the device")]
    NoSpace,
    /// A change to a read-only device.
    #[error("the device is read-only")]
    ReadOnly,
    /// A part of the range is beyond the end of the device.
    #[error("beyond the end of the device")]
    OutOfRange,
    /// Start or length is no multiple of the device's block size.
    #[error("not aligned to the device's block size")]
    Misaligned,
    /// The device does not support the operation.
    #[error("not supported by the device")]
    Unsupported,
    /// The store behind the device is unreachable, for good or for longer than the user allows.
    #[error("the store is not reachable")]
    Unreachable,
    /// The store returned impossible data.
    #[error("the store returned invalid data")]
    Invalid,
}

impl Failure {
    /// Returns the failure for a host's error number.
    pub fn from_errno(errno: i32) -> Self {
        match errno {
            libc::ENOSPC | libc::EDQUOT => Self::NoSpace,
            libc::EROFS | libc::EPERM => Self::ReadOnly,
            libc::EOPNOTSUPP | libc::ENOSYS => Self::Unsupported,
            errno => Self::Os(errno),
        }
    }

    /// Returns true if the requester's memory is at fault, not the device: the kernel cannot read or write it. Memory
    /// of a guest is like that after its front-end has truncated the file.
    pub fn is_memory_fault(self) -> bool {
        self == Self::Os(libc::EFAULT)
    }
}

/// A request that failed: operation, range, device and reason. One pointer wide, because success is the common case.
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
    /// Creates the error of a failed `operation` on `range` of `device` (its name as the user knows it).
    pub fn new(device: &Rc<str>, operation: Operation, range: ByteRange, failure: Failure) -> Self {
        Self(Box::new(Detail { device: Rc::clone(device), operation, range, failure }))
    }

    /// Returns the reason.
    pub fn failure(&self) -> Failure {
        self.0.failure
    }

    /// Returns the operation that failed.
    pub fn operation(&self) -> Operation {
        self.0.operation
    }

    /// Returns the range of the request.
    pub fn range(&self) -> ByteRange {
        self.0.range
    }
}

impl fmt::Display for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let detail = &*self.0;
        match detail.operation {
            Operation::Flush => write!(f, "{}: flush failed: {}", detail.device, detail.failure),
            // The range of a growth is the whole size that the device was to have.
            Operation::Grow => write!(
                f,
                "{}: growth to {} failed: {}",
                detail.device,
                ByteLen::new(detail.range.end().get()),
                detail.failure
            ),
            operation => write!(f, "{}: {operation} of {} failed: {}", detail.device, detail.range, detail.failure),
        }
    }
}

impl fmt::Debug for IoError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::error::Error for IoError {}

/// The result of a request.
pub type IoResult<T = ()> = Result<T, IoError>;
