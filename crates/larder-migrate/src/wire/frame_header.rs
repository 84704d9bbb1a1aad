//! Header of a frame.

use super::{
    FRAME_DELTAS_MAX, FRAME_OPERATIONS_MAX, FRAME_RAW_MAX, WireError, get_u16, get_u32, get_u64, put_u16, put_u32,
    put_u64, verify_checksum, write_checksum,
};

const FRAME_MAGIC: u32 = u32::from_le_bytes(*b"LFRM");

/// Header before each frame: 64 bytes.
///
/// ```text
///  0  magic "LFRM"                                32  raw u32, bytes of the channel in the frame
///  4  channel u16                                 36  bytes of the operations u32
///  6  method of the pages u8, 0: not encoded      40  bytes of the literals u32
///  7  0                                           44  bytes of the encoded pages u32
///  8  number u64, counts all frames               48  bytes of the deltas u32
/// 16  after u64: decode frames below it first     52  CRC32C of the raw bytes
/// 24  offset u64 in the channel                   56  0 u32
///                                                 60  CRC32C of the 60 bytes before
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameHeader {
    /// Number of the channel.
    pub channel: u16,
    /// Number of the method that the pages are encoded with; 0: they are not encoded.
    pub method: u8,
    /// Number of the frame. Frames are numbered from 0 in the order in which they were cut, across all channels.
    pub number: u64,
    /// All frames with lower numbers than this must be decoded first: this frame uses an old page that one of them
    /// has changed, or changes one that they use. At most `number`.
    pub after: u64,
    /// Offset of the frame's first byte in the channel.
    pub offset: u64,
    /// Bytes of the channel in this frame, 1 to [`FRAME_RAW_MAX`].
    pub raw_len: u32,
    /// Bytes of the first section, the operations of [`crate::frame`].
    pub operations_len: u32,
    /// Bytes of the second section, the channel's bytes that are not pages.
    pub literals_len: u32,
    /// Bytes of the third section, the encoded pages.
    pub pages_len: u32,
    /// Bytes of the fourth section, the deltas.
    pub deltas_len: u32,
    /// CRC32C of the raw bytes, which verifies that encoding and decoding have preserved them.
    pub raw_crc: u32,
}

impl FrameHeader {
    /// Bytes of a header.
    pub const LEN: usize = 64;
    const WHAT: &'static str = "a frame's header";

    /// Returns the header's bytes.
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
        write_checksum(&mut bytes);
        bytes
    }

    /// Parses a header and validates it.
    ///
    /// # Errors
    /// The bytes are no header, are damaged, or have lengths that no frame has.
    pub fn from_bytes(bytes: &[u8; Self::LEN]) -> Result<Self, WireError> {
        if get_u32(bytes, 0) != FRAME_MAGIC {
            let found = *bytes.first_chunk().expect("64 bytes");
            return Err(WireError::Magic { what: Self::WHAT, found });
        }
        verify_checksum(bytes, Self::WHAT)?;
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
            ("the length of the operations", self.operations_len, FRAME_OPERATIONS_MAX),
            ("the length of the literals", self.literals_len, self.raw_len as usize),
            ("the length of the pages", self.pages_len, self.raw_len as usize),
            ("the length of the deltas", self.deltas_len, FRAME_DELTAS_MAX),
        ];
        for (field, value, most) in bounds {
            if value as usize > most {
                return Err(WireError::InvalidField {
                    what: Self::WHAT,
                    field,
                    value: value.into(),
                    allowed: "what fits in a frame",
                });
            }
        }
        if self.raw_len == 0 || self.after > self.number || self.offset.checked_add(self.raw_len.into()).is_none() {
            return Err(WireError::InvalidField {
                what: Self::WHAT,
                field: "the order",
                value: self.number,
                allowed: "that of a frame of at least one byte, at a valid offset, that depends only on earlier frames",
            });
        }
        Ok(())
    }

    /// Returns the number of bytes that follow the header.
    #[must_use]
    pub fn body_len(&self) -> usize {
        (self.operations_len + self.literals_len + self.pages_len + self.deltas_len) as usize
    }
}
