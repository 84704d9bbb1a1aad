//! Protocol between a server and its opener.
//!
//! A request is one message on a `SOCK_SEQPACKET` socket: JSON, with the descriptor of a socket for the answer, and
//! that of a file if the request concerns one. The answer is one message on that socket: JSON, and descriptors. So
//! several requests can be in flight, each of which may take as long as a file server does.

use std::ffi::OsStr;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use larder_block::lock_wait::{LockKind, LockOwner};
use larder_block::opener::{Access, BlkidOutput};
use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags, SocketType,
};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::image::ImageAddress;
use crate::image::journal::JournalDirectory;

/// Maximum length of a message in bytes: enough for a few paths.
const MESSAGE_BYTES_MAX: usize = 64 << 10;

/// Maximum number of descriptors in a message.
const DESCRIPTORS_MAX: usize = 2;

/// A path, which need not be UTF-8.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PathBytes(Vec<u8>);

impl PathBytes {
    pub(super) fn from_path(path: &Path) -> Self {
        Self(path.as_os_str().as_bytes().to_vec())
    }

    pub(super) fn path(&self) -> PathBuf {
        OsStr::from_bytes(&self.0).into()
    }
}

/// A request. Its variants correspond to the methods of the client.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum OpenerRequest {
    VmFile,
    Open {
        path: PathBytes,
        #[serde(with = "WireAccess")]
        access: Access,
    },
    Make(PathBytes),
    Remove(PathBytes),
    Connect(PathBytes),
    Canonical(PathBytes),
    NamesOfDevice {
        folder: PathBytes,
        path: PathBytes,
    },
    DiskSequence(u64),
    DiskCounters(u64),
    Blkid,
    LockOwner(WireLockKind),
    LockHolders,
    Listen(PathBytes),
    StopListening(PathBytes),
    MayConnect,
    NoteName,
    ForgetName,
    IsAway,
    SetAway(Option<String>),
    Journals(WireImage),
    Notes(Vec<u8>),
    MarkUsed(PathBytes),
}

/// Address of an image.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum WireImage {
    Path(PathBytes),
    Nbd(String),
}

impl WireImage {
    pub(super) fn from_address(image: &ImageAddress) -> Self {
        match image {
            ImageAddress::Path(path) => Self::Path(PathBytes::from_path(path)),
            ImageAddress::Nbd(uri) => Self::Nbd(uri.to_string()),
        }
    }

    pub(super) fn address(&self) -> io::Result<ImageAddress> {
        match self {
            Self::Path(path) => Ok(ImageAddress::Path(path.path())),
            Self::Nbd(uri) => uri.parse().map(ImageAddress::Nbd).map_err(io::Error::other),
        }
    }
}

/// Serialised form of [`Access`].
#[derive(Serialize, Deserialize)]
#[serde(remote = "Access")]
enum WireAccess {
    #[serde(rename = "Look")]
    Inspect,
    Read,
    Write,
    Claim,
}

/// Serialised form of [`LockKind`].
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) enum WireLockKind {
    Ofd(Option<i64>),
    Flock,
    Claim,
}

impl From<LockKind> for WireLockKind {
    fn from(kind: LockKind) -> Self {
        match kind {
            LockKind::Ofd(byte) => Self::Ofd(byte),
            LockKind::Flock => Self::Flock,
            LockKind::Claim => Self::Claim,
        }
    }
}

impl From<WireLockKind> for LockKind {
    fn from(kind: WireLockKind) -> Self {
        match kind {
            WireLockKind::Ofd(byte) => Self::Ofd(byte),
            WireLockKind::Flock => Self::Flock,
            WireLockKind::Claim => Self::Claim,
        }
    }
}

/// An answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum OpenerAnswer {
    /// The request succeeded; a requested file or socket is in the message.
    Done,
    /// A boolean.
    Is(bool),
    /// Paths; exactly one if one was requested.
    Paths(Vec<PathBytes>),
    /// A text.
    Text(String),
    /// Serialised form of [`BlkidOutput`].
    Blkid { status: Option<i32>, said: String, complaint: String },
    /// Serialised form of [`LockOwner`].
    Owner(WireLockOwner),
    /// Directories of journals.
    Folders(Vec<WireJournalDirectory>),
    /// The request failed, with a system error or another reason.
    Failed { errno: Option<i32>, is_denied: bool, text: String },
}

/// Serialised form of [`LockOwner`].
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum WireLockOwner {
    Running,
    Ending(String),
    Nobody,
}

impl From<LockOwner> for WireLockOwner {
    fn from(owner: LockOwner) -> Self {
        match owner {
            LockOwner::Running => Self::Running,
            LockOwner::Exiting(process) => Self::Ending(process),
            LockOwner::Orphaned => Self::Nobody,
        }
    }
}

impl From<WireLockOwner> for LockOwner {
    fn from(owner: WireLockOwner) -> Self {
        match owner {
            WireLockOwner::Running => Self::Running,
            WireLockOwner::Ending(process) => Self::Exiting(process),
            WireLockOwner::Nobody => Self::Orphaned,
        }
    }
}

/// A directory in which other processes keep journals.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct WireJournalDirectory {
    path: PathBytes,
    user: u32,
    is_believed: bool,
}

impl From<&JournalDirectory> for WireJournalDirectory {
    fn from(directory: &JournalDirectory) -> Self {
        Self { path: PathBytes::from_path(&directory.path), user: directory.user, is_believed: directory.is_trusted }
    }
}

impl From<WireJournalDirectory> for JournalDirectory {
    fn from(directory: WireJournalDirectory) -> Self {
        Self {
            path: directory.path.path(),
            user: directory.user,
            is_trusted: directory.is_believed,
            is_own_directory: false,
        }
    }
}

impl From<BlkidOutput> for OpenerAnswer {
    fn from(answer: BlkidOutput) -> Self {
        Self::Blkid { status: answer.status, said: answer.stdout, complaint: answer.stderr }
    }
}

impl From<io::Error> for OpenerAnswer {
    fn from(error: io::Error) -> Self {
        Self::Failed {
            errno: error.raw_os_error(),
            is_denied: error.kind() == io::ErrorKind::PermissionDenied,
            text: error.to_string(),
        }
    }
}

impl OpenerAnswer {
    /// Returns the answer, or the error in it.
    pub(super) fn result(self) -> io::Result<Self> {
        match self {
            Self::Failed { errno: Some(errno), .. } => Err(io::Error::from_raw_os_error(errno)),
            Self::Failed { is_denied, text, .. } => {
                let kind = match is_denied {
                    true => io::ErrorKind::PermissionDenied,
                    false => io::ErrorKind::Other,
                };
                Err(io::Error::new(kind, text))
            }
            answer => Ok(answer),
        }
    }
}

/// Returns a pair of connected sockets for messages.
pub(super) fn pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let pair = rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?;
    Ok(pair)
}

/// Sends one message with `descriptors`.
pub(super) fn send(socket: BorrowedFd<'_>, message: &impl Serialize, descriptors: &[BorrowedFd<'_>]) -> io::Result<()> {
    let bytes = serde_json::to_vec(message)?;
    if bytes.len() > MESSAGE_BYTES_MAX {
        return Err(io::Error::other(format!(
            "a message of {} bytes exceeds the limit of {MESSAGE_BYTES_MAX}",
            bytes.len()
        )));
    }
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !descriptors.is_empty() && !control.push(SendAncillaryMessage::ScmRights(descriptors)) {
        return Err(io::Error::other("too many descriptors for a message"));
    }
    loop {
        match rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return sent.map(drop).map_err(io::Error::from),
        }
    }
}

/// Receives one message; `None` if the other end was closed.
pub(super) fn receive<T: DeserializeOwned>(socket: &impl AsFd) -> io::Result<Option<(T, Vec<OwnedFd>)>> {
    let mut bytes = vec![0; MESSAGE_BYTES_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        let mut pieces = [IoSliceMut::new(&mut bytes)];
        match rustix::net::recvmsg(socket, &mut pieces, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            received => break received?,
        }
    };
    let mut descriptors = Vec::new();
    for item in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = item {
            descriptors.extend(rights);
        }
    }
    if received.flags.intersects(ReturnFlags::CTRUNC | ReturnFlags::TRUNC) {
        return Err(io::Error::other(
            "a message was received only in part: this process has too many open files (ulimit -n)",
        ));
    }
    if received.bytes == 0 {
        return Ok(None);
    }
    Ok(Some((serde_json::from_slice(&bytes[..received.bytes])?, descriptors)))
}
