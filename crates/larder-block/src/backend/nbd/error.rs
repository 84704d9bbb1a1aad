//! The reasons why an NBD export cannot be opened, and why a connection to it ended.

use std::time::Duration;
use std::{fmt, io};

use crate::nbd::handshake::{option_name, reply_error_name};
use crate::nbd::{Malformed, NbdUriError};
use crate::printable;
use crate::tls::TlsError;
use crate::units::ByteLen;

/// The reason why an export cannot be opened as a disk.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum OpenError {
    #[error(transparent)]
    Uri(#[from] NbdUriError),
    #[error("{uri}: {source}")]
    Connect { uri: String, source: ConnectError },
}

/// The reason why a connection failed before it was ready for requests.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ConnectError {
    #[error("cannot connect: {0}{hint}", hint = dial_hint(.0))]
    Dial(io::Error),
    #[error("waited {limit:?} in vain for {step}")]
    Timeout { limit: Duration, step: Step },
    #[error("the connection broke during the handshake: {0}")]
    Io(#[from] io::Error),
    #[error("not an NBD server, or one that breaks the protocol: {0}")]
    Malformed(#[from] Malformed),
    #[error("the server speaks the oldstyle protocol of before 2011, which is not supported")]
    Oldstyle,
    #[error("{0}")]
    Tls(#[from] TlsError),
    #[error("the server does not encrypt: {0}; use nbd:// if that is all right")]
    TlsRefused(Refusal),
    #[error("the server requires TLS: use nbds:// in place of nbd://")]
    TlsRequired,
    #[error(
        "the server sent {0} bytes unencrypted where TLS had to begin; somebody may be tampering with the connection"
    )]
    Injected(usize),
    #[error("the server refused: {0}")]
    Refused(Refusal),
    #[error("a reply of {len} bytes to {} is longer than the {allowed} bytes that make sense", option_name(*option))]
    LongReply { option: u32, len: u32, allowed: u32 },
    #[error("the replies to {} do not end", option_name(*option))]
    ManyReplies { option: u32 },
    #[error("the server answered {} when {} was asked", option_name(*found), option_name(*asked))]
    WrongOption { asked: u32, found: u32 },
    #[error("the server answered {} with a reply of kind {kind:#x}", option_name(*option))]
    WrongReply { option: u32, kind: u32 },
    #[error("the server gave no size for the export")]
    NoExport,
    #[error("the export has no bytes")]
    Empty,
    #[error("the export is said to have {0} bytes; a disk has at most 2^63 - 512, whole sectors")]
    AbsurdSize(u64),
    #[error(
        "the export's block sizes make no sense: minimum {minimum}, preferred {preferred}, largest payload {payload_max}"
    )]
    BlockSizes {
        minimum: u32,
        preferred: u32,
        payload_max: u32,
    },
    #[error("it is not the export that was there before: {0}")]
    Changed(Change),
    #[error("writes that the server had acknowledged before it went away could not be repeated: {0}")]
    Replay(Broken),
}

/// Returns a hint at the cause of a failed connection.
fn dial_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ECONNREFUSED) => {
            "; no server listens there: see whether it runs, and on which address and port (10809 if none is given) or socket"
        }
        Some(libc::ENOENT) => "; there is no such socket: see whether the server runs, and on which socket",
        Some(libc::EACCES) => "; the user that runs larder may not use that socket",
        _ => "",
    }
}

/// The step of connection set-up that is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Step {
    Dial,
    Greeting,
    Options,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dial => "the connection; is the host up, and no firewall in between?",
            Self::Greeting => {
                "the server's greeting; it may serve one client at a time, and have another one, or be no NBD server"
            }
            Self::Options => "the server's part of the handshake",
        })
    }
}

/// A server's refusal of an option.
#[derive(Debug, thiserror::Error)]
#[error("{} to {}{}", reply_error_name(*kind), option_name(*option), quoted(text))]
pub struct Refusal {
    /// The number of the option.
    pub option: u32,
    /// The type of the error reply.
    pub kind: u32,
    /// The server's message.
    pub text: String,
}

fn quoted(text: &str) -> String {
    if text.is_empty() {
        String::new()
    } else {
        format!(" ('{}')", printable(text))
    }
}

/// The difference that keeps an export from replacing the one before the connection broke.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum Change {
    #[error("it has shrunk from {from} to {to}")]
    Smaller { from: ByteLen, to: ByteLen },
    #[error("it is read-only now")]
    ReadOnly,
    #[error("its minimum block size has grown from {from} to {to} bytes")]
    LargerBlocks { from: u32, to: u32 },
    #[error("it no longer has {0}")]
    Lost(String),
}

/// The reason why a connection ended.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum Broken {
    #[error("the server closed the connection")]
    Ended,
    #[error("{0}")]
    Io(io::Error),
    #[error("no byte has moved for {0:?} though requests are waiting")]
    Stalled(Duration),
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("protocol error by the server: {0}")]
    Malformed(#[from] Malformed),
    #[error("protocol error by the server: a reply to a request that was not made (cookie {0:#x})")]
    UnknownCookie(u64),
    #[error("protocol error by the server: a {got} in reply to a {command} of {len} bytes at {offset:#x}")]
    WrongReply {
        got: String,
        command: &'static str,
        offset: u64,
        len: u64,
    },
    #[error("protocol error by the server: a read of {len} bytes at {offset:#x} ended with {received} bytes")]
    ShortRead { offset: u64, len: u64, received: u64 },
    #[error("the server failed a repeated change with error {error} ({text})")]
    ReplayFailed { error: u32, text: String },
}

impl From<io::Error> for Broken {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Ended,
            _ => Self::Io(error),
        }
    }
}
