//! Wire format between a sender and a receiver ([bytes](../../../docs/migration-wire.md)).
//!
//! All numbers are little-endian. A connection begins with a [`Hello`] from the sender and a [`Welcome`] from the
//! receiver. One connection, the *control* connection, then carries [`Message`]s both ways. The others, the *lanes*,
//! carry frames ([`FrameHeader`], then its sections) from the sender to the receiver. All of them together are a
//! *link*. When a link is lost, the session continues over a new one.
//!
//! Invariants:
//! - A length sent by a peer is checked against a constant of this module or a limit of the session before it is used
//!   for anything, allocation included.
//! - Everything that is read has a magic or a known type and a valid checksum, or the session ends with an error.

mod chain;
mod frame_header;
mod greeting;
mod message;

use std::io;

use thiserror::Error;

pub use self::chain::{LINKS_MAX, Proof, ProofChain, continues};
pub use self::frame_header::FrameHeader;
pub use self::greeting::{ConnectionRole, Hello, Welcome};
pub use self::message::{Message, MessageKind};

/// Version of the wire format that this module describes. Both sides refuse any other version.
pub const VERSION: u16 = 1;

/// Maximum bytes of a channel in one frame: 64 pages with their headers, and room for other bytes.
pub const FRAME_RAW_MAX: usize = 272 << 10;
/// Maximum pages of one frame.
pub const FRAME_PAGES_MAX: usize = 64;
/// Maximum bytes of a frame's operations.
pub const FRAME_OPERATIONS_MAX: usize = 64 << 10;
/// Maximum bytes of a frame's deltas: each delta is shorter than its page.
pub const FRAME_DELTAS_MAX: usize = FRAME_PAGES_MAX * larder_codec::PAGE;
/// Maximum bytes of a control message's body.
pub const BODY_MAX: usize = 64 << 10;
/// Maximum channels of a session, whatever a receiver offers.
pub const CHANNELS_MAX: u16 = 256;
/// Maximum lanes of a session, whatever a receiver offers.
pub const LANES_MAX: u16 = 64;
/// Maximum frames of a channel that are sent and not yet taken by QEMU. The window bounds bytes; many small frames
/// would take more memory than that.
pub const CHANNEL_FRAMES_MAX: usize = 1024;

/// Identifier of a session: chosen by the receiver at random, sent on each connection but the first.
pub type SessionId = [u8; 16];

/// Reasons to reject bytes received from a peer.
#[derive(Debug, Error)]
pub enum WireError {
    /// The connection broke, or ended inside a message.
    #[error("{what}: {source}")]
    Io {
        /// Name of the item that was being read or written.
        what: &'static str,
        /// Error of the system call.
        source: io::Error,
    },
    /// The peer is not a Larder.
    #[error("{what}: the other side does not speak Larder's migration protocol (it sent {found:02x?})")]
    Magic {
        /// Name of the item that was being read.
        what: &'static str,
        /// First bytes received.
        found: [u8; 8],
    },
    /// The peer expects TLS.
    #[error("{what}: the other side speaks TLS: use --tls here as well")]
    UnexpectedTls {
        /// Name of the item that was being read.
        what: &'static str,
    },
    /// The peer uses another version of the wire format.
    #[error(
        "the other side speaks version {found} of Larder's migration protocol, this one {VERSION}: use the same version of Larder on both hosts"
    )]
    Version {
        /// Version that the peer sent.
        found: u16,
    },
    /// The bytes were damaged in transit.
    #[error("{what}: its checksum is {found:#010x}, expected {expected:#010x}: it was damaged in transit")]
    Checksum {
        /// Name of the item that was read.
        what: &'static str,
        /// Checksum received.
        found: u32,
        /// Checksum computed.
        expected: u32,
    },
    /// A field has a value that no Larder writes.
    #[error("{what}: {field} is {value}, and may be {allowed}")]
    InvalidField {
        /// Name of the item that was read.
        what: &'static str,
        /// Name of the field.
        field: &'static str,
        /// Value received.
        value: u64,
        /// Description of the valid values.
        allowed: &'static str,
    },
    /// The receiver refuses the connection, with this reason.
    #[error("the receiver refuses: {0}")]
    Refused(String),
}

impl WireError {
    pub(crate) const fn io(what: &'static str) -> impl Fn(io::Error) -> Self {
        move |source| {
            let source = match source.kind() {
                io::ErrorKind::UnexpectedEof => {
                    io::Error::new(source.kind(), "the other side has closed the connection")
                }
                _ => source,
            };
            Self::Io { what, source }
        }
    }
}

/// Writes the CRC32C of all bytes but the last four into the last four.
fn write_checksum(bytes: &mut [u8]) {
    let at = bytes.len() - 4;
    let crc = crc32c::crc32c(&bytes[..at]);
    put_u32(bytes, at, crc);
}

fn verify_checksum(bytes: &[u8], what: &'static str) -> Result<(), WireError> {
    let at = bytes.len() - 4;
    let expected = crc32c::crc32c(&bytes[..at]);
    let found = get_u32(bytes, at);
    if found == expected { Ok(()) } else { Err(WireError::Checksum { what, found, expected }) }
}

/// Returns text received from a peer, with control characters replaced so that it is safe to print.
fn printable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).chars().map(|c| if c.is_control() { ' ' } else { c }).collect()
}

fn put_u16(bytes: &mut [u8], at: usize, value: u16) {
    bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
}

fn put_u32(bytes: &mut [u8], at: usize, value: u32) {
    bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
}

fn put_u64(bytes: &mut [u8], at: usize, value: u64) {
    bytes[at..at + 8].copy_from_slice(&value.to_le_bytes());
}

fn get_u16(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes(bytes[at..at + 2].try_into().expect("2 bytes"))
}

fn get_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn get_u64(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}
