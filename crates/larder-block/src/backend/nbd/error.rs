//! The reasons why an NBD export cannot be opened, and why a connection to it ended.

use std::time::Duration;
use std::{fmt, io};

use crate::nbd::handshake::{option_name, reply_error_text};
use crate::nbd::{Malformed, NbdUriError};
use crate::printable;
use crate::tls::TlsError;
use crate::units::ByteLen;

/// The reason why an export cannot be opened as a disk.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum NbdOpenError {
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
    #[error("timed out after {limit:?}, waiting for {step}")]
    Timeout { limit: Duration, step: ConnectStep },
    #[error("the connection broke during the handshake: {0}")]
    Io(#[from] io::Error),
    #[error("not an NBD server, or one that violates the protocol: {0}")]
    Malformed(#[from] Malformed),
    #[error("the server speaks the oldstyle protocol of before 2011, which is not supported")]
    Oldstyle,
    #[error("{0}")]
    Tls(#[from] TlsError),
    #[error("the server does not support TLS: {0}; use nbd:// if an unencrypted connection is acceptable")]
    TlsRefused(OptionRefusal),
    #[error("the server requires TLS: use nbds:// instead of nbd://")]
    TlsRequired,
    #[error("the server sent {0} unencrypted bytes where TLS had to begin; the connection may have been tampered with")]
    Injected(usize),
    #[error("the server refused: {0}")]
    Refused(OptionRefusal),
    #[error("a reply of {len} bytes to {} exceeds the maximum of {allowed} bytes", option_name(*option))]
    LongReply { option: u32, len: u32, allowed: u32 },
    #[error("too many replies to {}", option_name(*option))]
    TooManyReplies { option: u32 },
    #[error("the server replied to {} when {} was requested", option_name(*found), option_name(*asked))]
    UnexpectedOption { asked: u32, found: u32 },
    #[error("the server answered {} with a reply of kind {kind:#x}", option_name(*option))]
    UnexpectedReply { option: u32, kind: u32 },
    #[error("the server reported no size for the export")]
    NoExportSize,
    #[error("the export is empty")]
    Empty,
    #[error("the server reports an export of {0} bytes; a disk has at most 2^63 - 512 bytes, in whole sectors")]
    SizeTooLarge(u64),
    #[error(
        "the server reports invalid block sizes: minimum {minimum}, preferred {preferred}, largest payload {payload_max}"
    )]
    BlockSizes { minimum: u32, preferred: u32, payload_max: u32 },
    #[error("the export differs from the one before the connection was lost: {0}")]
    Changed(ExportChange),
    #[error("writes that the server had acknowledged before the connection was lost could not be replayed: {0}")]
    Replay(ConnectionLoss),
}

/// Returns a hint at the cause of a failed connection.
fn dial_hint(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ECONNREFUSED) => {
            "; no server listens there: check whether it runs, and on which address and port (default: 10809) or socket"
        }
        Some(libc::ENOENT) => "; there is no such socket: check whether the server runs, and on which socket",
        Some(libc::EACCES) => "; the user that runs larder has no permission to use that socket",
        _ => "",
    }
}

/// The step of connection set-up that is waited for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum ConnectStep {
    Dial,
    Greeting,
    Options,
}

impl fmt::Display for ConnectStep {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dial => "the connection; is the host up, and does no firewall block it?",
            Self::Greeting => {
                "the server's greeting; it may serve one client at a time and have another one now, or not be an NBD server"
            }
            Self::Options => "the server's replies in the handshake",
        })
    }
}

/// A server's refusal of an option.
#[derive(Debug, thiserror::Error)]
#[error("{}, in reply to {}{}", reply_error_text(*kind), option_name(*option), quoted(text))]
pub struct OptionRefusal {
    /// The number of the option.
    pub option: u32,
    /// The type of the error reply.
    pub kind: u32,
    /// The server's message.
    pub text: String,
}

fn quoted(text: &str) -> String {
    if text.is_empty() { String::new() } else { format!(" ('{}')", printable(text)) }
}

/// The difference that keeps an export from replacing the one before the connection broke.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ExportChange {
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
pub enum ConnectionLoss {
    #[error("the server closed the connection")]
    Closed,
    #[error("{0}")]
    Io(io::Error),
    #[error("no byte was transferred for {0:?} although requests are waiting")]
    Stalled(Duration),
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("protocol error by the server: {0}")]
    Malformed(#[from] Malformed),
    #[error("protocol error by the server: a reply to an unknown request (cookie {0:#x})")]
    UnknownCookie(u64),
    #[error("protocol error by the server: a {got} in reply to a {command} of {len} bytes at {offset:#x}")]
    UnexpectedReply { got: String, command: &'static str, offset: u64, len: u64 },
    #[error("protocol error by the server: a read of {len} bytes at {offset:#x} ended with {received} bytes")]
    ShortRead { offset: u64, len: u64, received: u64 },
    #[error("the server failed a replayed change with error {error} ({text})")]
    ReplayFailed { error: u32, text: String },
}

impl From<io::Error> for ConnectionLoss {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::UnexpectedEof => Self::Closed,
            _ => Self::Io(error),
        }
    }
}
