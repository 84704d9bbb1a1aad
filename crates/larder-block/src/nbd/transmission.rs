//! The transmission phase: requests and replies (spec, "Transmission phase").
//!
//! A connection uses one [`Framing`] throughout: compact headers (requests of 28 bytes; simple replies of 16 and
//! chunks of 20) or extended ones (32 bytes both ways).

use super::flags::{Command, CommandFlags};
use super::{Fields, Malformed, STATUS_DESCRIPTORS_MAX};

/// The first word of a compact request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// The first word of an extended request.
pub const EXTENDED_REQUEST_MAGIC: u32 = 0x21e4_1c71;
/// The first word of a simple reply.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// The first word of a chunk of a structured reply.
pub const STRUCTURED_REPLY_MAGIC: u32 = 0x668e_33ef;
/// The first word of a chunk of an extended reply.
pub const EXTENDED_REPLY_MAGIC: u32 = 0x6e8a_278c;

/// Types of chunks (spec, "Structured reply types").
#[allow(missing_docs)]
pub mod chunks {
    pub const NONE: u16 = 0;
    pub const OFFSET_DATA: u16 = 1;
    pub const OFFSET_HOLE: u16 = 2;
    pub const BLOCK_STATUS: u16 = 5;
    pub const BLOCK_STATUS_EXT: u16 = 6;
    /// Set in the types that report an error.
    pub const ERROR_BIT: u16 = 1 << 15;
    pub const ERROR: u16 = ERROR_BIT | 1;
    pub const ERROR_OFFSET: u16 = ERROR_BIT | 2;
}

/// Set in the last chunk of a reply.
pub const CHUNK_DONE: u16 = 1 << 0;

/// The headers that a connection uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framing {
    /// Compact headers, with 32-bit lengths. Reads are answered by simple replies.
    Simple,
    /// Compact headers, and reads are answered in chunks.
    Structured,
    /// Extended headers, with 64-bit lengths.
    Extended,
}

/// The maximum length of a request header, in bytes.
pub const REQUEST_HEADER_LEN_MAX: usize = 32;

/// A request's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestHeader {
    /// The options of the command.
    pub flags: CommandFlags,
    /// The command's code, which may be unknown.
    pub command: u16,
    /// A number chosen by the client, which the reply returns.
    pub cookie: u64,
    /// The offset in bytes.
    pub offset: u64,
    /// The length in bytes: of the payload for a write, of the range otherwise.
    pub len: u64,
}

impl Framing {
    /// Returns the length of a request's header, in bytes.
    pub const fn request_header_len(self) -> usize {
        match self {
            Self::Simple | Self::Structured => 28,
            Self::Extended => 32,
        }
    }

    /// Returns the length of a chunk's header, in bytes.
    pub const fn chunk_header_len(self) -> usize {
        match self {
            Self::Simple | Self::Structured => 20,
            Self::Extended => 32,
        }
    }
}

impl RequestHeader {
    /// Parses a header of [`Framing::request_header_len`] bytes.
    ///
    /// # Errors
    /// The magic number is wrong.
    pub fn parse(framing: Framing, message: &[u8]) -> Result<Self, Malformed> {
        let mut fields = Fields::new("a request", message);
        let magic = match framing {
            Framing::Simple | Framing::Structured => REQUEST_MAGIC,
            Framing::Extended => EXTENDED_REQUEST_MAGIC,
        };
        super::check_magic("a request", u64::from(magic), u64::from(fields.u32("magic")?))?;
        Ok(Self {
            flags: CommandFlags(fields.u16("flags")?),
            command: fields.u16("type")?,
            cookie: fields.u64("cookie")?,
            offset: fields.u64("offset")?,
            len: match framing {
                Framing::Simple | Framing::Structured => u64::from(fields.u32("length")?),
                Framing::Extended => fields.u64("length")?,
            },
        })
    }

    /// Appends the header to `message`. With compact headers the length must fit in 32 bits. With extended ones the
    /// flag for the payload of a write is added.
    pub fn push(&self, framing: Framing, message: &mut Vec<u8>) {
        match framing {
            Framing::Simple | Framing::Structured => {
                debug_assert!(u32::try_from(self.len).is_ok());
                message.extend(REQUEST_MAGIC.to_be_bytes());
                message.extend(self.flags.0.to_be_bytes());
                message.extend(self.command.to_be_bytes());
                message.extend(self.cookie.to_be_bytes());
                message.extend(self.offset.to_be_bytes());
                message.extend((self.len as u32).to_be_bytes());
            }
            Framing::Extended => {
                let flags = self.flags.with_if(self.command == Command::Write.code(), CommandFlags::PAYLOAD_LEN);
                message.extend(EXTENDED_REQUEST_MAGIC.to_be_bytes());
                message.extend(flags.0.to_be_bytes());
                message.extend(self.command.to_be_bytes());
                message.extend(self.cookie.to_be_bytes());
                message.extend(self.offset.to_be_bytes());
                message.extend(self.len.to_be_bytes());
            }
        }
    }

    /// Returns the length in bytes of the payload after the header. With extended headers a write should announce it
    /// by a flag. QEMU's client (seen in 10.0) omits the flag; QEMU's server and this code accept that.
    pub fn payload_len(&self, framing: Framing) -> u64 {
        let is_announced = framing == Framing::Extended && self.flags.contains(CommandFlags::PAYLOAD_LEN);
        if is_announced || self.command == Command::Write.code() { self.len } else { 0 }
    }
}

/// A reply's header, without its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReplyHeader {
    /// The whole reply; a read's data follows if there is no error.
    Simple {
        /// The error number; 0 for success.
        error: u32,
        /// The cookie of the request.
        cookie: u64,
    },
    /// One chunk of a reply.
    Chunk {
        /// This is the last chunk of the reply.
        done: bool,
        /// The type of the chunk, one of [`chunks`].
        kind: u16,
        /// The cookie of the request.
        cookie: u64,
        /// The offset of the request, with extended headers.
        offset: Option<u64>,
        /// The length in bytes of the payload after the header.
        len: u64,
    },
}

/// The length of a simple reply's header, in bytes: as much can be waited for before the type of the reply is known.
pub const SIMPLE_REPLY_LEN: usize = 16;

impl ReplyHeader {
    /// Returns the length in bytes of the header that begins with the four bytes `start`.
    ///
    /// # Errors
    /// No reply of that framing begins like this.
    pub fn len(framing: Framing, start: [u8; 4]) -> Result<usize, Malformed> {
        let magic = u32::from_be_bytes(start);
        match (framing, magic) {
            (Framing::Simple | Framing::Structured, SIMPLE_REPLY_MAGIC) => Ok(SIMPLE_REPLY_LEN),
            (Framing::Structured, STRUCTURED_REPLY_MAGIC) => Ok(20),
            (Framing::Extended, EXTENDED_REPLY_MAGIC) => Ok(32),
            (framing, found) => Err(Malformed::Magic {
                what: "a reply",
                expected: u64::from(match framing {
                    Framing::Simple => SIMPLE_REPLY_MAGIC,
                    Framing::Structured => STRUCTURED_REPLY_MAGIC,
                    Framing::Extended => EXTENDED_REPLY_MAGIC,
                }),
                found: u64::from(found),
            }),
        }
    }

    /// Parses a header of [`ReplyHeader::len`] bytes.
    ///
    /// # Errors
    /// The header is shorter than its type requires.
    pub fn parse(message: &[u8]) -> Result<Self, Malformed> {
        let mut fields = Fields::new("a reply", message);
        let magic = fields.u32("magic")?;
        if magic == SIMPLE_REPLY_MAGIC {
            return Ok(Self::Simple { error: fields.u32("error")?, cookie: fields.u64("cookie")? });
        }
        let extended = magic == EXTENDED_REPLY_MAGIC;
        Ok(Self::Chunk {
            done: fields.u16("flags")? & CHUNK_DONE != 0,
            kind: fields.u16("type")?,
            cookie: fields.u64("cookie")?,
            offset: if extended { Some(fields.u64("offset")?) } else { None },
            len: if extended { fields.u64("length")? } else { u64::from(fields.u32("length")?) },
        })
    }
}

/// Appends a simple reply's header to `message`.
pub fn push_simple_reply(message: &mut impl Extend<u8>, error: u32, cookie: u64) {
    message.extend(SIMPLE_REPLY_MAGIC.to_be_bytes());
    message.extend(error.to_be_bytes());
    message.extend(cookie.to_be_bytes());
}

/// Appends a chunk's header to `message`; `request` is the request that it answers, `len` the length in bytes of the
/// payload that will follow.
pub fn push_chunk_header(
    message: &mut impl Extend<u8>,
    framing: Framing,
    request: &RequestHeader,
    kind: u16,
    done: bool,
    len: u64,
) {
    let extended = framing == Framing::Extended;
    let magic = if extended { EXTENDED_REPLY_MAGIC } else { STRUCTURED_REPLY_MAGIC };
    message.extend(magic.to_be_bytes());
    message.extend(if done { CHUNK_DONE } else { 0 }.to_be_bytes());
    message.extend(kind.to_be_bytes());
    message.extend(request.cookie.to_be_bytes());
    if extended {
        message.extend(request.offset.to_be_bytes());
        message.extend(len.to_be_bytes());
    } else {
        debug_assert!(u32::try_from(len).is_ok());
        message.extend((len as u32).to_be_bytes());
    }
}

/// Appends an error chunk, the last of its reply, to `message`.
pub fn push_error_chunk(
    message: &mut impl Extend<u8>,
    framing: Framing,
    request: &RequestHeader,
    error: u32,
    text: &str,
) {
    let mut end = text.len().min(super::STRING_LEN_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let text = &text.as_bytes()[..end];
    push_chunk_header(message, framing, request, chunks::ERROR, true, 6 + text.len() as u64);
    message.extend(error.to_be_bytes());
    message.extend((text.len() as u16).to_be_bytes());
    message.extend(text.iter().copied());
}

/// The payload of an error chunk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ErrorChunk {
    /// The error number, one of [`super::flags::errors`], or unknown.
    pub error: u32,
    /// A message for human readers; may be empty.
    pub text: String,
}

/// The maximum valid payload of an error chunk, in bytes: the longest text, and a few fields.
pub const ERROR_CHUNK_LEN_MAX: u64 = 64 + super::STRING_LEN_MAX as u64;

impl ErrorChunk {
    /// Parses the payload of a chunk of any type with the error bit.
    ///
    /// # Errors
    /// The text is longer than the payload, or there is no error number.
    pub fn parse(payload: &[u8]) -> Result<Self, Malformed> {
        let mut fields = Fields::new("an error chunk", payload);
        let error = fields.u32("error")?;
        let len = fields.u16("message length")?;
        let text = fields.bytes(usize::from(len), "message")?;
        Ok(Self { error, text: String::from_utf8_lossy(text).into_owned() })
    }
}

/// The layout of the descriptors of a block status reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StatusLayout {
    /// The length of the fields before the first descriptor, in bytes.
    pub head_len: usize,
    /// The length of a descriptor, in bytes.
    pub descriptor_len: usize,
    /// The number of descriptors.
    pub count: u32,
}

impl StatusLayout {
    /// Returns the layout of a chunk of type `kind` with `len` bytes of payload.
    ///
    /// # Errors
    /// The length is no whole number of descriptors, none, or more than the spec allows.
    pub fn from_chunk(kind: u16, len: u64) -> Result<Self, Malformed> {
        let (head_len, descriptor_len) = if kind == chunks::BLOCK_STATUS_EXT { (8, 16) } else { (4, 8) };
        let rest = len.saturating_sub(head_len as u64);
        let count = rest / descriptor_len as u64;
        if !rest.is_multiple_of(descriptor_len as u64) || count == 0 || count > u64::from(STATUS_DESCRIPTORS_MAX) {
            return Err(Malformed::Length {
                what: "a block status chunk",
                len,
                allowed: "1 to 2^20 whole descriptors are",
            });
        }
        Ok(Self { head_len, descriptor_len, count: count as u32 })
    }

    /// Returns the metadata context in the first [`StatusLayout::head_len`] bytes.
    ///
    /// # Errors
    /// The count in an extended chunk does not agree with its length.
    pub fn parse_head(&self, head: &[u8]) -> Result<u32, Malformed> {
        let mut fields = Fields::new("a block status chunk", head);
        let context = fields.u32("metadata context")?;
        if self.descriptor_len == 16 && fields.u32("descriptor count")? != self.count {
            return Err(Malformed::Length {
                what: "the list in a block status chunk",
                len: u64::from(self.count),
                allowed: "only as many descriptors as its header states are",
            });
        }
        Ok(context)
    }

    /// Returns the length in bytes and the status of a descriptor of [`StatusLayout::descriptor_len`] bytes.
    ///
    /// # Errors
    /// The length is zero.
    pub fn parse_descriptor(&self, descriptor: &[u8]) -> Result<(u64, u64), Malformed> {
        let mut fields = Fields::new("a block status descriptor", descriptor);
        let (len, status) = if self.descriptor_len == 16 {
            (fields.u64("length")?, fields.u64("status")?)
        } else {
            (u64::from(fields.u32("length")?), u64::from(fields.u32("status")?))
        };
        if len == 0 {
            return Err(Malformed::Length {
                what: "an extent in a block status chunk",
                len,
                allowed: "at least 1 byte is",
            });
        }
        Ok((len, status))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn request_round_trips(
            flags in 0u16..32, command in 0u16..10, cookie: u64, offset: u64, len: u32, pick in 0..2,
        ) {
            let framing = [Framing::Structured, Framing::Extended][pick as usize];
            let request = RequestHeader {
                flags: CommandFlags(flags), command, cookie, offset, len: u64::from(len),
            };
            let mut message = Vec::new();
            request.push(framing, &mut message);
            prop_assert_eq!(message.len(), framing.request_header_len());
            let mut back = RequestHeader::parse(framing, &message).expect("is well-formed");
            prop_assert_eq!(back.payload_len(framing) > 0, command == 1 && len > 0);
            back.flags = back.flags.without(CommandFlags::PAYLOAD_LEN);
            prop_assert_eq!(back, request);
        }

        #[test]
        fn garbage_never_panics(data in prop::collection::vec(any::<u8>(), 4..64), kind: u16, len: u64) {
            let start = [data[0], data[1], data[2], data[3]];
            for framing in [Framing::Simple, Framing::Structured, Framing::Extended] {
                let _ = RequestHeader::parse(framing, &data);
                let _ = ReplyHeader::len(framing, start);
            }
            let _ = ReplyHeader::parse(&data);
            let _ = ErrorChunk::parse(&data);
            if let Ok(layout) = StatusLayout::from_chunk(kind, len) {
                let _ = layout.parse_head(&data);
                let _ = layout.parse_descriptor(&data);
            }
        }
    }

    #[test]
    fn error_chunk_round_trips() {
        let request = RequestHeader { flags: CommandFlags::NONE, command: 0, cookie: 7, offset: 512, len: 512 };
        for framing in [Framing::Structured, Framing::Extended] {
            let mut message = Vec::new();
            let text = "ä".repeat(3000);
            push_error_chunk(&mut message, framing, &request, 28, &text);
            let header = framing.chunk_header_len();
            let parsed = ReplyHeader::parse(&message[..header]).expect("is well-formed");
            let ReplyHeader::Chunk { done, kind, cookie, len, .. } = parsed else { panic!("{parsed:?}") };
            assert_eq!((done, kind, cookie), (true, chunks::ERROR, 7));
            assert_eq!(len as usize, message.len() - header);
            let error = ErrorChunk::parse(&message[header..]).expect("is well-formed");
            assert_eq!((error.error, error.text), (28, "ä".repeat(2048)), "cut at a whole character");
        }
    }
}
