//! What goes over the connections between a sender and a receiver ([bytes](../../../docs/migration-wire.md)).
//!
//! Everything is little-endian. A connection begins with a [`Hello`] of the sender and a [`Welcome`] of the receiver.
//! One connection, the *control*, then carries [`Message`]s both ways; the others, the *lanes*, carry frames
//! ([`FrameHeader`], then its sections) from the sender to the receiver.
//!
//! Invariants:
//! - No length that a peer says is believed before it is checked against a constant of this module or a limit of the
//!   session, and nothing is allocated by it.
//! - What is read has a magic or a known type and a right checksum, or the session ends with an error.

use std::fmt;
use std::io::{self, Read, Write};

use thiserror::Error;

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

const HELLO_MAGIC: [u8; 8] = *b"LARDMIG\x01";
const WELCOME_MAGIC: [u8; 8] = *b"LARDMIG\x02";
const FRAME_MAGIC: u32 = u32::from_le_bytes(*b"LFRM");
const MESSAGE_MAGIC: u16 = u16::from_le_bytes(*b"LM");

/// What names a session: chosen by the receiver at random, shown by each lane.
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

/// What a connection is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// The first one, which opens a session.
    Control,
    /// One that carries frames of the session with this number.
    Lane(SessionId),
}

/// The sender's first bytes on each connection: 48 of them.
///
/// ```text
///  0  magic "LARDMIG\1"        16  session, or zeros
///  8  version u16              32  delta memory u64, bytes that the sender would use
/// 10  role u8: 0 control 1 lane 40  lanes u16, that the sender would open
/// 11  0                        42  0
/// 12  0 u32                    44  CRC32C of the 44 bytes before
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// What the connection is for.
    pub role: Role,
    /// Bytes of old pages that the sender would keep; of a control connection.
    pub delta_memory: u64,
    /// How many lanes it would open; of a control connection.
    pub lanes: u16,
}

impl Hello {
    const LEN: usize = 48;
    const WHAT: &'static str = "the greeting of a sender";

    /// Writes it.
    ///
    /// # Errors
    /// The connection broke.
    pub fn write(&self, to: &mut impl Write) -> Result<(), WireError> {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&HELLO_MAGIC);
        put_u16(&mut bytes, 8, VERSION);
        if let Role::Lane(session) = self.role {
            bytes[10] = 1;
            bytes[16..32].copy_from_slice(&session);
        }
        put_u64(&mut bytes, 32, self.delta_memory);
        put_u16(&mut bytes, 40, self.lanes);
        seal(&mut bytes);
        to.write_all(&bytes)
            .and_then(|()| to.flush())
            .map_err(WireError::io(Self::WHAT))
    }

    /// Reads it.
    ///
    /// # Errors
    /// The connection broke, or what came is no greeting of this version.
    pub fn read(from: &mut impl Read) -> Result<Self, WireError> {
        let bytes: [u8; Self::LEN] = read_greeting(from, Self::WHAT, HELLO_MAGIC)?;
        let role = match bytes[10] {
            0 => Role::Control,
            1 => Role::Lane(bytes[16..32].try_into().expect("16 bytes")),
            other => {
                return Err(WireError::Field {
                    what: Self::WHAT,
                    field: "the role",
                    value: other.into(),
                    allowed: "0 or 1",
                });
            }
        };
        Ok(Self {
            role,
            delta_memory: get_u64(&bytes, 32),
            lanes: get_u16(&bytes, 40),
        })
    }
}

/// The receiver's answer to a [`Hello`]: 56 bytes, and a reason if it refuses.
///
/// ```text
///  0  magic "LARDMIG\2"        32  delta memory u64, bytes that both keep
///  8  version u16              40  window u32, bytes of a channel that may wait at the receiver
/// 10  refused u8               44  lanes u16
/// 11  0                        46  channels u16
/// 12  bytes of the reason u32  48  methods u32, a bit for each number that it decodes
/// 16  session                  52  CRC32C of the 52 bytes before
/// 56  the reason, UTF-8, at most 1,024 bytes
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// What the session's lanes must show.
    pub session: SessionId,
    /// Bytes of old pages that both sides keep, at most.
    pub delta_memory: u64,
    /// Bytes of each channel that may have been sent and not yet been taken by QEMU.
    pub window: u32,
    /// How many lanes may be opened.
    pub lanes: u16,
    /// How many channels may be opened.
    pub channels: u16,
    /// Bit n: the receiver decodes the method with the number n.
    pub methods: u32,
}

impl Welcome {
    const LEN: usize = 56;
    const REASON_MAX: usize = 1024;
    const WHAT: &'static str = "the answer of the receiver";

    /// Writes it.
    ///
    /// # Errors
    /// The connection broke.
    pub fn write(&self, to: &mut impl Write) -> Result<(), WireError> {
        let mut bytes = Self::begin();
        bytes[16..32].copy_from_slice(&self.session);
        put_u64(&mut bytes, 32, self.delta_memory);
        put_u32(&mut bytes, 40, self.window);
        put_u16(&mut bytes, 44, self.lanes);
        put_u16(&mut bytes, 46, self.channels);
        put_u32(&mut bytes, 48, self.methods);
        seal(&mut bytes);
        to.write_all(&bytes)
            .and_then(|()| to.flush())
            .map_err(WireError::io(Self::WHAT))
    }

    /// Tells a sender that it is not wanted, and why.
    ///
    /// # Errors
    /// The connection broke.
    pub fn refuse(to: &mut impl Write, reason: &str) -> Result<(), WireError> {
        let reason = &reason.as_bytes()[..reason.len().min(Self::REASON_MAX)];
        let mut bytes = Self::begin();
        bytes[10] = 1;
        put_u32(&mut bytes, 12, reason.len() as u32);
        seal(&mut bytes);
        to.write_all(&bytes)
            .and_then(|()| to.write_all(reason))
            .and_then(|()| to.flush())
            .map_err(WireError::io(Self::WHAT))
    }

    /// Reads it.
    ///
    /// # Errors
    /// The connection broke, what came is no answer of this version, or the receiver refuses.
    pub fn read(from: &mut impl Read) -> Result<Self, WireError> {
        let bytes: [u8; Self::LEN] = read_greeting(from, Self::WHAT, WELCOME_MAGIC)?;
        if bytes[10] != 0 {
            let len = get_u32(&bytes, 12) as usize;
            if len > Self::REASON_MAX {
                return Err(WireError::Field {
                    what: Self::WHAT,
                    field: "the length of the reason",
                    value: len as u64,
                    allowed: "at most 1024",
                });
            }
            let mut reason = vec![0; len];
            from.read_exact(&mut reason).map_err(WireError::io(Self::WHAT))?;
            return Err(WireError::Refused(printable(&reason)));
        }
        let welcome = Self {
            session: bytes[16..32].try_into().expect("16 bytes"),
            delta_memory: get_u64(&bytes, 32),
            window: get_u32(&bytes, 40),
            lanes: get_u16(&bytes, 44),
            channels: get_u16(&bytes, 46),
            methods: get_u32(&bytes, 48),
        };
        let wrong = |field, value, allowed| {
            Err(WireError::Field {
                what: Self::WHAT,
                field,
                value,
                allowed,
            })
        };
        if (welcome.window as usize) < FRAME_RAW_MAX {
            return wrong("the window", welcome.window.into(), "at least a frame (278528)");
        }
        if welcome.lanes == 0 || welcome.lanes > LANES_MAX {
            return wrong("the number of lanes", welcome.lanes.into(), "1 to 64");
        }
        if welcome.channels == 0 || welcome.channels > CHANNELS_MAX {
            return wrong("the number of channels", welcome.channels.into(), "1 to 256");
        }
        Ok(welcome)
    }

    /// Whether it is an answer to this greeting.
    ///
    /// # Errors
    /// It has the sender keep more old pages than that was ready to.
    pub fn answers(&self, hello: &Hello) -> Result<(), WireError> {
        if self.delta_memory <= hello.delta_memory {
            return Ok(());
        }
        Err(WireError::Field {
            what: Self::WHAT,
            field: "the delta memory",
            value: self.delta_memory,
            allowed: "at most what this side asked for (--delta-memory)",
        })
    }

    fn begin() -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&WELCOME_MAGIC);
        put_u16(&mut bytes, 8, VERSION);
        bytes
    }
}

/// Reads a greeting of `LEN` bytes: magic first, so that a stranger is told apart before its version is believed.
fn read_greeting<const LEN: usize>(
    from: &mut impl Read,
    what: &'static str,
    magic: [u8; 8],
) -> Result<[u8; LEN], WireError> {
    let mut bytes = [0; LEN];
    let (found, rest) = bytes.split_at_mut(8);
    let read = from.read_exact(found);
    // One that wants TLS closes the connection after an alert of 7 bytes; one that speaks it begins with its hello.
    if matches!(found[..2], [0x15 | 0x16, 3]) {
        return Err(WireError::Tls { what });
    }
    read.map_err(WireError::io(what))?;
    if *found != magic {
        let found = (&*found).try_into().expect("8 bytes");
        return Err(WireError::Magic { what, found });
    }
    from.read_exact(rest).map_err(WireError::io(what))?;
    let found = get_u16(&bytes, 8);
    if found != VERSION {
        return Err(WireError::Version { found });
    }
    check_seal(&bytes, what)?;
    Ok(bytes)
}

/// What a control message is about; its numbers never change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Sender: QEMU has opened this channel; the receiver opens it to the other QEMU, in the order of these messages.
    Open = 1,
    /// Sender: QEMU has closed this channel after the bytes that `value` says.
    Close = 2,
    /// Receiver: QEMU has taken `value` bytes of this channel, from its beginning.
    Delivered = 3,
    /// Both: bytes that go the other way, from the destination's QEMU to the source's.
    Return = 4,
    /// Receiver: the destination's QEMU has closed this channel, or does not read it any more.
    Closed = 5,
    /// Both: I am here.
    Alive = 6,
    /// Both: the session is over, for the reason in the body.
    Failed = 7,
    /// Both: something for those who move the VM, which the carrying of streams does not look into.
    Note = 8,
    /// Sender: all channels are closed and nothing will follow. The receiver answers with the same.
    End = 9,
}

impl Kind {
    const ALL: [Self; 9] = [
        Self::Open,
        Self::Close,
        Self::Delivered,
        Self::Return,
        Self::Closed,
        Self::Alive,
        Self::Failed,
        Self::Note,
        Self::End,
    ];
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
    /// What it is about.
    pub kind: Kind,
    /// Of which channel; 0 where it is about none.
    pub channel: u16,
    /// A count of bytes, where the kind says so.
    pub value: u64,
    /// At most [`BODY_MAX`] bytes.
    pub body: Vec<u8>,
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:?} of channel {} with {} and {} bytes",
            self.kind,
            self.channel,
            self.value,
            self.body.len()
        )
    }
}

impl Message {
    /// Bytes of a message's header.
    pub const HEADER_LEN: usize = 24;
    const WHAT: &'static str = "a control message";

    /// Without a body.
    #[must_use]
    pub const fn new(kind: Kind, channel: u16, value: u64) -> Self {
        Self {
            kind,
            channel,
            value,
            body: Vec::new(),
        }
    }

    /// With a reason or a note; what is longer than [`BODY_MAX`] is cut off.
    #[must_use]
    pub fn with_body(kind: Kind, channel: u16, body: &[u8]) -> Self {
        Self {
            kind,
            channel,
            value: 0,
            body: body[..body.len().min(BODY_MAX)].to_vec(),
        }
    }

    /// The body as words to show.
    #[must_use]
    pub fn text(&self) -> String {
        printable(&self.body)
    }

    /// Appends its bytes.
    pub fn append_to(&self, out: &mut Vec<u8>) {
        let mut header = [0; Self::HEADER_LEN];
        put_u16(&mut header, 0, MESSAGE_MAGIC);
        header[2] = self.kind as u8;
        put_u32(&mut header, 4, self.body.len() as u32);
        put_u64(&mut header, 8, self.value);
        put_u16(&mut header, 16, self.channel);
        let crc = crc32c::crc32c_append(crc32c::crc32c(&header[..20]), &self.body);
        put_u32(&mut header, 20, crc);
        out.extend_from_slice(&header);
        out.extend_from_slice(&self.body);
    }

    /// The message at the front of `bytes` and how many of them it takes; `None` while it is not whole.
    ///
    /// # Errors
    /// It is none, or damaged.
    pub fn parse(bytes: &[u8]) -> Result<Option<(Self, usize)>, WireError> {
        let Some(header) = bytes.first_chunk::<{ Self::HEADER_LEN }>() else {
            return Ok(None);
        };
        let wrong = |field, value, allowed| {
            Err(WireError::Field {
                what: Self::WHAT,
                field,
                value,
                allowed,
            })
        };
        if get_u16(header, 0) != MESSAGE_MAGIC {
            return wrong("the magic", get_u16(header, 0).into(), "19788");
        }
        let len = get_u32(header, 4) as usize;
        if len > BODY_MAX {
            return wrong("the length of the body", len as u64, "at most 65536");
        }
        let Some(kind) = Kind::ALL.into_iter().find(|kind| *kind as u8 == header[2]) else {
            return wrong("the kind", header[2].into(), "1 to 9");
        };
        let Some(body) = bytes.get(Self::HEADER_LEN..Self::HEADER_LEN + len) else {
            return Ok(None);
        };
        let expected = crc32c::crc32c_append(crc32c::crc32c(&header[..20]), body);
        let found = get_u32(header, 20);
        if found != expected {
            return Err(WireError::Checksum {
                what: Self::WHAT,
                found,
                expected,
            });
        }
        let message = Self {
            kind,
            channel: get_u16(header, 16),
            value: get_u64(header, 8),
            body: body.to_vec(),
        };
        Ok(Some((message, Self::HEADER_LEN + len)))
    }
}

/// Before each frame: 64 bytes.
///
/// ```text
///  0  magic "LFRM"                                32  raw u32, bytes of the channel it stands for
///  4  channel u16                                 36  bytes of the operations u32
///  6  method of the pages u8, 0 as they are       40  bytes of the literals u32
///  7  0                                           44  bytes of the pages, encoded, u32
///  8  number u64, of all frames in order          48  bytes of the deltas u32
/// 16  after u64: frames below are decoded first   52  CRC32C of the raw bytes
/// 24  offset u64 in the channel                   56  0 u32
///                                                 60  CRC32C of the 60 bytes before
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// Of which channel.
    pub channel: u16,
    /// The number of the method that the pages are encoded by; 0: they lie there as they are.
    pub method: u8,
    /// Frames are numbered from 0 in the order in which they were cut, over all channels.
    pub number: u64,
    /// All frames with lower numbers must be decoded first: this one takes something from the old pages that one of them
    /// has changed, or changes what one of them takes. At most `number`.
    pub after: u64,
    /// Bytes of the channel before this frame's.
    pub offset: u64,
    /// Bytes of the channel that it stands for, 1 to [`FRAME_RAW_MAX`].
    pub raw_len: u32,
    /// Bytes of its first section, [`crate::frame`]'s operations.
    pub operations_len: u32,
    /// Bytes of the second, those of the channel that are no pages.
    pub literals_len: u32,
    /// Bytes of the third, the encoded pages.
    pub pages_len: u32,
    /// Bytes of the fourth, the deltas.
    pub deltas_len: u32,
    /// Of the raw bytes, so that what was encoded and decoded is known to be the same.
    pub raw_crc: u32,
}

impl FrameHeader {
    /// Bytes of a header.
    pub const LEN: usize = 64;
    const WHAT: &'static str = "a frame's header";

    /// Its bytes.
    #[must_use]
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        put_u32(&mut bytes, 0, FRAME_MAGIC);
        put_u16(&mut bytes, 4, self.channel);
        bytes[6] = self.method;
        put_u64(&mut bytes, 8, self.number);
        put_u64(&mut bytes, 16, self.after);
        put_u64(&mut bytes, 24, self.offset);
        put_u32(&mut bytes, 32, self.raw_len);
        put_u32(&mut bytes, 36, self.operations_len);
        put_u32(&mut bytes, 40, self.literals_len);
        put_u32(&mut bytes, 44, self.pages_len);
        put_u32(&mut bytes, 48, self.deltas_len);
        put_u32(&mut bytes, 52, self.raw_crc);
        seal(&mut bytes);
        bytes
    }

    /// Checks and reads it.
    ///
    /// # Errors
    /// It is none, is damaged, or has lengths that no frame has.
    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Result<Self, WireError> {
        if get_u32(bytes, 0) != FRAME_MAGIC {
            let found = *bytes.first_chunk().expect("64 bytes");
            return Err(WireError::Magic {
                what: Self::WHAT,
                found,
            });
        }
        check_seal(bytes, Self::WHAT)?;
        let header = Self {
            channel: get_u16(bytes, 4),
            method: bytes[6],
            number: get_u64(bytes, 8),
            after: get_u64(bytes, 16),
            offset: get_u64(bytes, 24),
            raw_len: get_u32(bytes, 32),
            operations_len: get_u32(bytes, 36),
            literals_len: get_u32(bytes, 40),
            pages_len: get_u32(bytes, 44),
            deltas_len: get_u32(bytes, 48),
            raw_crc: get_u32(bytes, 52),
        };
        header.check()?;
        Ok(header)
    }

    fn check(&self) -> Result<(), WireError> {
        let bounds = [
            ("the number of raw bytes", self.raw_len, FRAME_RAW_MAX),
            (
                "the length of the operations",
                self.operations_len,
                FRAME_OPERATIONS_MAX,
            ),
            ("the length of the literals", self.literals_len, self.raw_len as usize),
            ("the length of the pages", self.pages_len, self.raw_len as usize),
            ("the length of the deltas", self.deltas_len, FRAME_DELTAS_MAX),
        ];
        for (field, value, most) in bounds {
            if value as usize > most {
                return Err(WireError::Field {
                    what: Self::WHAT,
                    field,
                    value: value.into(),
                    allowed: "what fits a frame",
                });
            }
        }
        if self.raw_len == 0 || self.after > self.number || self.offset.checked_add(self.raw_len.into()).is_none() {
            return Err(WireError::Field {
                what: Self::WHAT,
                field: "the order",
                value: self.number,
                allowed: "after nothing later, with at least a byte at an offset that there is",
            });
        }
        Ok(())
    }

    /// Bytes that follow it.
    #[must_use]
    pub fn body_len(&self) -> usize {
        (self.operations_len + self.literals_len + self.pages_len + self.deltas_len) as usize
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
