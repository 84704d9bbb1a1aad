//! Messages of the control connection.

use std::fmt;

use super::{BODY_MAX, WireError, get_u16, get_u32, get_u64, printable, put_u16, put_u32, put_u64};

const MESSAGE_MAGIC: u16 = u16::from_le_bytes(*b"LM");

/// Kind of a control message. The numbers never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum MessageKind {
    /// From the sender: QEMU has opened this channel. The receiver opens it to the other QEMU, in the order of these
    /// messages.
    Open = 1,
    /// From the sender: QEMU has closed this channel after `value` bytes.
    Close = 2,
    /// From the receiver: QEMU has taken the first `value` bytes of this channel.
    Delivered = 3,
    /// From the receiver: bytes in the reverse direction, from the destination's QEMU to the source's.
    Return = 4,
    /// From the receiver: the destination's QEMU has closed this channel, or no longer reads it.
    Closed = 5,
    /// From both: keep-alive, with the number of messages received in full, except this kind and [`Self::Received`].
    Alive = 6,
    /// From both: the session has failed, for the reason in the body.
    Failed = 7,
    /// From both: a message of the movers' protocol, which the carrier does not interpret.
    Note = 8,
    /// From the sender: all channels are closed and nothing follows. The receiver answers with the same kind.
    End = 9,
    /// From the receiver: `value` frames of the lane numbered `channel` have been received in full.
    Received = 10,
}

impl MessageKind {
    const ALL: [Self; 10] = [
        Self::Open,
        Self::Close,
        Self::Delivered,
        Self::Return,
        Self::Closed,
        Self::Alive,
        Self::Failed,
        Self::Note,
        Self::End,
        Self::Received,
    ];

    /// Returns true if the message is kept and sent again after a loss. The other kinds report a current state, which
    /// the next message of the kind supersedes.
    #[must_use]
    pub const fn is_retained(self) -> bool {
        !matches!(self, Self::Alive | Self::Received)
    }
}

/// A control message: a header of 24 bytes, then its body.
///
/// ```text
///  0  magic "LM"    4  bytes of the body u32   16  channel u16
///  2  kind u8       8  value u64               18  0
///  3  0                                        20  CRC32C of the 20 bytes before and of the body
/// ```
#[derive(Clone, PartialEq, Eq)]
pub struct Message {
    /// Kind of the message.
    pub kind: MessageKind,
    /// Number of the channel; 0 where the kind concerns none.
    pub channel: u16,
    /// Count of bytes or messages, where the kind has one.
    pub value: u64,
    /// Body, at most [`BODY_MAX`] bytes.
    pub body: Vec<u8>,
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} of channel {} with {} and {} bytes", self.kind, self.channel, self.value, self.body.len())
    }
}

impl Message {
    /// Bytes of a message's header.
    pub const HEADER_LEN: usize = 24;
    const WHAT: &'static str = "a control message";

    /// Creates a message without a body.
    #[must_use]
    pub const fn new(kind: MessageKind, channel: u16, value: u64) -> Self {
        Self { kind, channel, value, body: Vec::new() }
    }

    /// Creates a message whose body is a reason or a note. A body longer than [`BODY_MAX`] is truncated.
    #[must_use]
    pub fn with_body(kind: MessageKind, channel: u16, body: &[u8]) -> Self {
        Self { kind, channel, value: 0, body: body[..body.len().min(BODY_MAX)].to_vec() }
    }

    /// Returns the body as printable text.
    #[must_use]
    pub fn text(&self) -> String {
        printable(&self.body)
    }

    /// Returns the number of bytes of the encoded message.
    #[must_use]
    pub fn wire_len(&self) -> usize {
        Self::HEADER_LEN + self.body.len()
    }

    /// Appends the encoded message to `out`.
    pub fn append_to(&self, out: &mut impl Extend<u8>) {
        let mut header = [0; Self::HEADER_LEN];
        put_u16(&mut header, 0, MESSAGE_MAGIC);
        header[2] = self.kind as u8;
        put_u32(&mut header, 4, self.body.len() as u32);
        put_u64(&mut header, 8, self.value);
        put_u16(&mut header, 16, self.channel);
        let crc = crc32c::crc32c_append(crc32c::crc32c(&header[..20]), &self.body);
        put_u32(&mut header, 20, crc);
        out.extend(header);
        out.extend(self.body.iter().copied());
    }

    /// Parses the message at the front of `bytes` and returns it with its length; returns `None` while it is
    /// incomplete.
    ///
    /// # Errors
    /// The bytes are no message, or are damaged.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        let Some(header) = bytes.first_chunk::<{ Self::HEADER_LEN }>() else {
            return Ok(None);
        };
        let invalid = |field, value, allowed| Err(WireError::InvalidField { what: Self::WHAT, field, value, allowed });
        if get_u16(header, 0) != MESSAGE_MAGIC {
            return invalid("the magic", get_u16(header, 0).into(), "19788");
        }
        let len = get_u32(header, 4) as usize;
        if len > BODY_MAX {
            return invalid("the length of the body", len as u64, "at most 65536");
        }
        let Some(kind) = MessageKind::ALL.into_iter().find(|kind| *kind as u8 == header[2]) else {
            return invalid("the kind", header[2].into(), "1 to 10");
        };
        let Some(body) = bytes.get(Self::HEADER_LEN..Self::HEADER_LEN + len) else {
            return Ok(None);
        };
        let expected = crc32c::crc32c_append(crc32c::crc32c(&header[..20]), body);
        let found = get_u32(header, 20);
        if found != expected {
            return Err(WireError::Checksum { what: Self::WHAT, found, expected });
        }
        let message = Self { kind, channel: get_u16(header, 16), value: get_u64(header, 8), body: body.to_vec() };
        Ok(Some((message, Self::HEADER_LEN + len)))
    }
}
