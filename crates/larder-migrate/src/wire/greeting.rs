//! Greetings at the beginning of each connection.

use std::io::{Read, Write};

use super::chain::Proof;
use super::{
    CHANNELS_MAX, FRAME_RAW_MAX, LANES_MAX, SessionId, VERSION, WireError, get_u16, get_u32, get_u64, printable,
    put_u16, put_u32, put_u64, verify_checksum, write_checksum,
};

const HELLO_MAGIC: [u8; 8] = *b"LARDMIG\x01";
const WELCOME_MAGIC: [u8; 8] = *b"LARDMIG\x02";

/// Purpose of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ConnectionRole {
    /// Control connection, the first one of a link. That of link 0 opens a session; those of later links resume it.
    Control,
    /// Lane with this number, which carries frames.
    Lane(u16),
}

/// First bytes of the sender on each connection: 96 of them.
///
/// ```text
///  0  magic "LARDMIG\1"          32  delta memory u64, bytes that the sender would use
///  8  version u16                40  lanes u16 that the sender would open
/// 10  role u8: 0 control 1 lane  42  lane u16, its number
/// 11  0                          44  patience u32, milliseconds
/// 12  link u32                   48  received u64, receiver's messages received in full
/// 16  session, or zeros          56  proof, 32 bytes
///                                88  0 u32
///                                92  CRC32C of the 92 bytes before
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// Purpose of the connection.
    pub role: ConnectionRole,
    /// Number of the link: how often the session's connections were made, or tried, before.
    pub link: u32,
    /// Identifier of the session, or zeros where none is open yet.
    pub session: SessionId,
    /// Bytes of delta memory that the sender would use; valid where a session is opened.
    pub delta_memory: u64,
    /// Number of lanes that the sender would open; valid where a session is opened.
    pub lanes: u16,
    /// Time in milliseconds for which the sender tries to reconnect; 0: it does not. Valid where a session is opened.
    pub patience_ms: u32,
    /// Number of the receiver's messages received in full; valid on a control connection.
    pub received: u64,
    /// Proof that this sender opened the session; valid on a control connection.
    pub proof: Proof,
}

impl Hello {
    const LEN: usize = 96;
    const WHAT: &'static str = "the greeting of a sender";

    /// Writes the greeting.
    ///
    /// # Errors
    /// The connection broke.
    pub fn write(&self, to: &mut impl Write) -> Result<(), WireError> {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&HELLO_MAGIC);
        put_u16(&mut bytes, 8, VERSION);
        if let ConnectionRole::Lane(number) = self.role {
            bytes[10] = 1;
            put_u16(&mut bytes, 42, number);
        }
        put_u32(&mut bytes, 12, self.link);
        bytes[16..32].copy_from_slice(&self.session);
        put_u64(&mut bytes, 32, self.delta_memory);
        put_u16(&mut bytes, 40, self.lanes);
        put_u32(&mut bytes, 44, self.patience_ms);
        put_u64(&mut bytes, 48, self.received);
        bytes[56..88].copy_from_slice(&self.proof);
        write_checksum(&mut bytes);
        to.write_all(&bytes).and_then(|()| to.flush()).map_err(WireError::io(Self::WHAT))
    }

    /// Reads and validates a greeting.
    ///
    /// # Errors
    /// The connection broke, or the bytes received are no greeting of this version.
    pub fn read(from: &mut impl Read) -> Result<Self, WireError> {
        let bytes: [u8; Self::LEN] = read_greeting(from, Self::WHAT, HELLO_MAGIC)?;
        let role = match bytes[10] {
            0 => ConnectionRole::Control,
            1 => ConnectionRole::Lane(get_u16(&bytes, 42)),
            other => {
                return Err(WireError::InvalidField {
                    what: Self::WHAT,
                    field: "the role",
                    value: other.into(),
                    allowed: "0 or 1",
                });
            }
        };
        Ok(Self {
            role,
            link: get_u32(&bytes, 12),
            session: bytes[16..32].try_into().expect("16 bytes"),
            delta_memory: get_u64(&bytes, 32),
            lanes: get_u16(&bytes, 40),
            patience_ms: get_u32(&bytes, 44),
            received: get_u64(&bytes, 48),
            proof: bytes[56..88].try_into().expect("32 bytes"),
        })
    }
}

/// Answer of the receiver to a [`Hello`]: 72 bytes, and a reason if it refuses.
///
/// ```text
///  0  magic "LARDMIG\2"        44  lanes u16
///  8  version u16              46  channels u16
/// 10  refused u8               48  methods u32, bit n: method n is decoded
/// 11  0                        52  0 u32
/// 12  bytes of the reason u32  56  received u64, messages or frames received in full
/// 16  session                  64  0 u32
/// 32  delta memory u64         68  CRC32C of the 68 bytes before
/// 40  window u32               72  the reason, UTF-8, at most 1,024 bytes
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// Identifier that the session's lanes must show.
    pub session: SessionId,
    /// Maximum bytes of delta memory on each side.
    pub delta_memory: u64,
    /// Maximum bytes of each channel that are sent and not yet taken by QEMU.
    pub window: u32,
    /// Maximum number of lanes.
    pub lanes: u16,
    /// Maximum number of channels.
    pub channels: u16,
    /// Set of methods: bit n is set if the receiver decodes the method with the number n.
    pub methods: u32,
    /// Number of items received in full: the sender's messages on a control connection, its frames on a lane.
    pub received: u64,
}

impl Welcome {
    const LEN: usize = 72;
    const REASON_MAX: usize = 1024;
    const WHAT: &'static str = "the answer of the receiver";

    /// Writes the answer.
    ///
    /// # Errors
    /// The connection broke.
    pub fn write(&self, to: &mut impl Write) -> Result<(), WireError> {
        let mut bytes = Self::header();
        bytes[16..32].copy_from_slice(&self.session);
        put_u64(&mut bytes, 32, self.delta_memory);
        put_u32(&mut bytes, 40, self.window);
        put_u16(&mut bytes, 44, self.lanes);
        put_u16(&mut bytes, 46, self.channels);
        put_u32(&mut bytes, 48, self.methods);
        put_u64(&mut bytes, 56, self.received);
        write_checksum(&mut bytes);
        to.write_all(&bytes).and_then(|()| to.flush()).map_err(WireError::io(Self::WHAT))
    }

    /// Refuses a sender, with the reason.
    ///
    /// # Errors
    /// The connection broke.
    pub fn refuse(to: &mut impl Write, reason: &str) -> Result<(), WireError> {
        let reason = &reason.as_bytes()[..reason.len().min(Self::REASON_MAX)];
        let mut bytes = Self::header();
        bytes[10] = 1;
        put_u32(&mut bytes, 12, reason.len() as u32);
        write_checksum(&mut bytes);
        to.write_all(&bytes)
            .and_then(|()| to.write_all(reason))
            .and_then(|()| to.flush())
            .map_err(WireError::io(Self::WHAT))
    }

    /// Reads and validates an answer.
    ///
    /// # Errors
    /// The connection broke, the bytes received are no answer of this version, or the receiver refuses.
    pub fn read(from: &mut impl Read) -> Result<Self, WireError> {
        let bytes: [u8; Self::LEN] = read_greeting(from, Self::WHAT, WELCOME_MAGIC)?;
        if bytes[10] != 0 {
            let len = get_u32(&bytes, 12) as usize;
            if len > Self::REASON_MAX {
                return Err(WireError::InvalidField {
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
            received: get_u64(&bytes, 56),
        };
        let invalid = |field, value, allowed| Err(WireError::InvalidField { what: Self::WHAT, field, value, allowed });
        if (welcome.window as usize) < FRAME_RAW_MAX {
            return invalid("the window", welcome.window.into(), "at least a frame (278528)");
        }
        if welcome.lanes == 0 || welcome.lanes > LANES_MAX {
            return invalid("the number of lanes", welcome.lanes.into(), "1 to 64");
        }
        if welcome.channels == 0 || welcome.channels > CHANNELS_MAX {
            return invalid("the number of channels", welcome.channels.into(), "1 to 256");
        }
        Ok(welcome)
    }

    /// Checks that the answer fits the greeting that it replies to.
    ///
    /// # Errors
    /// The answer demands more delta memory than the sender offered.
    pub fn check_answer(&self, hello: &Hello) -> Result<(), WireError> {
        if self.delta_memory <= hello.delta_memory {
            return Ok(());
        }
        Err(WireError::InvalidField {
            what: Self::WHAT,
            field: "the delta memory",
            value: self.delta_memory,
            allowed: "at most what this side asked for (--delta-memory)",
        })
    }

    fn header() -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..8].copy_from_slice(&WELCOME_MAGIC);
        put_u16(&mut bytes, 8, VERSION);
        bytes
    }
}

/// Reads a greeting of `LEN` bytes. The magic is checked first, so that a foreign protocol is recognised before its
/// bytes are taken for a version.
fn read_greeting<const LEN: usize>(
    from: &mut impl Read,
    what: &'static str,
    magic: [u8; 8],
) -> Result<[u8; LEN], WireError> {
    let mut bytes = [0; LEN];
    let (found, rest) = bytes.split_at_mut(8);
    let read = from.read_exact(found);
    // A peer that requires TLS closes the connection after an alert of 7 bytes; one that starts TLS sends its
    // ClientHello.
    if matches!(found[..2], [0x15 | 0x16, 3]) {
        return Err(WireError::UnexpectedTls { what });
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
    verify_checksum(&bytes, what)?;
    Ok(bytes)
}
