//! What goes over the connections between a sender and a receiver ([bytes](../../../docs/migration-wire.md)).
//!
//! Everything is little-endian. A connection begins with a [`Hello`] of the sender and a [`Welcome`] of the receiver.
//! One connection, the *control*, then carries [`Message`]s both ways; the others, the *lanes*, carry frames
//! ([`FrameHeader`], then its sections) from the sender to the receiver. All of them together are a *link*; a session goes
//! on over another one when one is lost.
//!
//! Invariants:
//! - No length that a peer says is believed before it is checked against a constant of this module or a limit of the
//!   session, and nothing is allocated by it.
//! - What is read has a magic or a known type and a right checksum, or the session ends with an error.

mod chain;
mod frame_header;
mod greeting;
mod message;

use std::io;

use thiserror::Error;

pub use self::chain::{Chain, LINKS_MAX, Proof, continues};
pub use self::frame_header::FrameHeader;
pub use self::greeting::{Hello, Role, Welcome};
pub use self::message::{Kind, Message};

/// The version of all that this module describes. Another one is refused by both sides.
pub const VERSION: u16 = 1;

/// Bytes of a channel that one frame stands for, at most: 64 pages with their headers, and room for what is no page.
pub const FRAME_RAW_MAX: usize = 272 << 10;
/// Pages of one frame, at most.
pub const FRAME_PAGES_MAX: usize = 64;
/// Bytes of a frame's operations, at most.
pub const FRAME_OPERATIONS_MAX: usize = 64 << 10;
/// Bytes of a frame's deltas, at most: each is shorter than its page.
pub const FRAME_DELTAS_MAX: usize = FRAME_PAGES_MAX * larder_codec::PAGE;
/// Bytes that a control message carries, at most.
pub const BODY_MAX: usize = 64 << 10;
/// Channels of a session, at most, whatever a receiver offers.
pub const CHANNELS_MAX: u16 = 256;
/// Lanes of a session, at most, whatever a receiver offers.
pub const LANES_MAX: u16 = 64;
/// Frames of a channel that may have been sent and not yet been taken by QEMU, at most: many small ones would take more
/// memory than the window says.
pub const CHANNEL_FRAMES_MAX: usize = 1024;

/// What names a session: chosen by the receiver at random, shown by each connection but the first.
pub type SessionId = [u8; 16];

/// Why what a peer sent is not understood.
#[derive(Debug, Error)]
pub enum WireError {
    /// The connection broke, or ended in the middle of something.
    #[error("{what}: {source}")]
    Io {
        /// What was being read or written.
        what: &'static str,
        /// As the system says it.
        source: io::Error,
    },
    /// It is something else than a Larder.
    #[error("{what}: the other side does not speak Larder's migration protocol (it sent {found:02x?})")]
    Magic {
        /// What was being read.
        what: &'static str,
        /// Its first bytes.
        found: [u8; 8],
    },
    /// It expects to be spoken to by TLS.
    #[error("{what}: it speaks TLS: give --tls here as well")]
    Tls {
        /// What was being read.
        what: &'static str,
    },
    /// It is a Larder of another time.
    #[error(
        "the other side speaks version {found} of Larder's migration protocol, this one {VERSION}: use the same version of Larder on both hosts"
    )]
    Version {
        /// What it says.
        found: u16,
    },
    /// Bytes changed on the way.
    #[error("{what}: its checksum is {found:#010x} and should be {expected:#010x}: damaged on the way")]
    Checksum {
        /// What was read.
        what: &'static str,
        /// As it came.
        found: u32,
        /// As computed.
        expected: u32,
    },
    /// A field has a value that no Larder writes.
    #[error("{what}: {field} is {value}, and may be {allowed}")]
    Field {
        /// What was read.
        what: &'static str,
        /// Of it.
        field: &'static str,
        /// As it came.
        value: u64,
        /// What would be right.
        allowed: &'static str,
    },
    /// The receiver does not take part.
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

/// Puts the CRC32C of all bytes before the last four into those.
fn seal(bytes: &mut [u8]) {
    let at = bytes.len() - 4;
    let crc = crc32c::crc32c(&bytes[..at]);
    put_u32(bytes, at, crc);
}

fn check_seal(bytes: &[u8], what: &'static str) -> Result<(), WireError> {
    let at = bytes.len() - 4;
    let expected = crc32c::crc32c(&bytes[..at]);
    let found = get_u32(bytes, at);
    if found == expected {
        Ok(())
    } else {
        Err(WireError::Checksum { what, found, expected })
    }
}

/// What a peer says, fit for a terminal.
fn printable(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes)
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect()
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
