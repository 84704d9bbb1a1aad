//! The first MiB of a disk for evicted pages, before the log.
//!
//! ```text
//! byte 0    magic "LRDRSWAP"
//!      8    version, u32                   12   CRC32C of the 4 KiB with zeros here, u32
//!      16   identity, 16 bytes             32   segments, u32
//!      40   the process whose pages are here: its PID, u32; 48  its start time, u64 (field 22 of /proc/PID/stat)
//!      56   1 if Larder created the file, and removes it in the end; else 0, u32
//!      60   1 if the disk is an NBD export; else 0, u32
//!      64   1 if the log is encrypted; else 0, u32
//!      4 KiB  the mark, on an unencrypted device or export; else zeros
//!      1 MiB  the log (larder_memory::log), as many segments of 1 MiB
//! mark 0    magic "LRDRUSED"               8    CRC32C of the mark with zeros here, u32
//!      12   segments, u32: the log is unwritten from this one on
//!      16   identity, as in the header
//! ```
//! All numbers are little-endian. The mark is durable before the first segment past it is written, so that a
//! successor of a killed pager knows how much must be erased ([`super::release`]). Versions without marks wrote zeros
//! there: then all of the log may have been written.

use std::rc::Rc;

use larder_block::{AlignedBuf, BlockDevice, ByteOffset, IoResult, ReadBuf, WriteBuf, WriteFlags};
use larder_memory::log::SEGMENT;
use larder_memory::target::is_alive;
use rustix::process::Pid;

use super::{SwapError, check_size};

pub(super) const MAGIC: &[u8; 8] = b"LRDRSWAP";
pub(super) const VERSION: u32 = 1;
/// Length of the header, in bytes.
pub(super) const HEADER: usize = 4096;
/// Length of the header and the mark, in bytes.
pub(super) const BOTH: usize = 2 * HEADER;
const VERSION_AT: usize = 8;
const CHECKSUM_AT: usize = 12;
const IDENTITY_AT: usize = 16;
const SEGMENTS_AT: usize = 32;
const OWNER_AT: usize = 40;
const MADE_AT: usize = 56;
/// Offset of the flag for an NBD export, whose server may export this very file.
const EXPORTED_AT: usize = 60;
const ENCRYPTED_AT: usize = 64;

const MARK_MAGIC: &[u8; 8] = b"LRDRUSED";
const MARK_CHECKSUM_AT: usize = 8;
const MARK_SEGMENTS_AT: usize = 12;
const MARK_BYTES: usize = 32;

/// Classification of a disk by its first bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Header {
    /// All zeros.
    Nothing,
    /// The header of a swap cache.
    Ours(Fields),
    /// Any other content.
    Foreign,
}

/// The fields of a header. All are zero in a damaged header, which belongs to no known disk, and may be overwritten.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct Fields {
    pub(super) uuid: [u8; 16],
    pub(super) segments: u32,
    pub(super) of: Owner,
    pub(super) is_made: bool,
    pub(super) is_exported: bool,
    pub(super) is_encrypted: bool,
}

/// The process whose pages are on a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(in crate::memory) struct Owner {
    /// Process ID.
    pub(in crate::memory) pid: u32,
    /// Start time; see [`larder_memory::target::Target::started`].
    pub(in crate::memory) started: u64,
}

impl Owner {
    pub(super) fn is_alive(self) -> bool {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        pid.is_some_and(|pid| is_alive(pid, self.started))
    }
}

fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn set_number(bytes: &mut [u8], at: usize, number: u32) {
    bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
}

/// Returns whether the checksum at `at` matches `bytes`. Afterwards zeros are in its place.
fn takes_checksum(bytes: &mut [u8], at: usize) -> bool {
    let checksum = number(bytes, at);
    bytes[at..at + 4].fill(0);
    crc32c::crc32c(bytes) == checksum
}

fn set_checksum(bytes: &mut [u8], at: usize) {
    let checksum = crc32c::crc32c(bytes);
    set_number(bytes, at, checksum);
}

impl Header {
    /// Parses the header from at least [`HEADER`] bytes; the error is an unknown version.
    pub(super) fn parse(bytes: &mut [u8]) -> Result<Self, u32> {
        if bytes[..8] != *MAGIC {
            return Ok(match bytes.iter().all(|byte| *byte == 0) {
                true => Self::Nothing,
                false => Self::Foreign,
            });
        }
        let header = &mut bytes[..HEADER];
        let version = number(header, VERSION_AT);
        if version != VERSION {
            return Err(version);
        }
        let mut fields = Fields::default();
        if takes_checksum(header, CHECKSUM_AT) {
            let mut started = [0; 8];
            started.copy_from_slice(&header[OWNER_AT + 8..OWNER_AT + 16]);
            fields.uuid.copy_from_slice(&header[IDENTITY_AT..SEGMENTS_AT]);
            fields.segments = number(header, SEGMENTS_AT);
            fields.of = Owner {
                pid: number(header, OWNER_AT),
                started: u64::from_le_bytes(started),
            };
            fields.is_made = number(header, MADE_AT) == 1;
            fields.is_exported = number(header, EXPORTED_AT) == 1;
            fields.is_encrypted = number(header, ENCRYPTED_AT) == 1;
        }
        Ok(Self::Ours(fields))
    }
}

impl Fields {
    /// Returns the bytes of the header, and of a mark at segment 0 if requested.
    pub(super) fn bytes(&self, with_mark: bool) -> AlignedBuf {
        let mut bytes = AlignedBuf::zeroed(BOTH);
        let (header, rest) = bytes.split_at_mut(HEADER);
        header[..8].copy_from_slice(MAGIC);
        set_number(header, VERSION_AT, VERSION);
        header[IDENTITY_AT..SEGMENTS_AT].copy_from_slice(&self.uuid);
        set_number(header, SEGMENTS_AT, self.segments);
        set_number(header, OWNER_AT, self.of.pid);
        header[OWNER_AT + 8..OWNER_AT + 16].copy_from_slice(&self.of.started.to_le_bytes());
        set_number(header, MADE_AT, u32::from(self.is_made));
        set_number(header, EXPORTED_AT, u32::from(self.is_exported));
        set_number(header, ENCRYPTED_AT, u32::from(self.is_encrypted));
        set_checksum(header, CHECKSUM_AT);
        if with_mark {
            rest.copy_from_slice(&mark_bytes(&self.uuid, 0));
        }
        bytes
    }
}

fn mark_bytes(uuid: &[u8; 16], segments: u32) -> AlignedBuf {
    let mut bytes = AlignedBuf::zeroed(HEADER);
    let mark = &mut bytes[..MARK_BYTES];
    mark[..8].copy_from_slice(MARK_MAGIC);
    set_number(mark, MARK_SEGMENTS_AT, segments);
    mark[16..].copy_from_slice(uuid);
    set_checksum(mark, MARK_CHECKSUM_AT);
    bytes
}

/// Parses the mark; `None` if there is no valid mark of this disk.
fn parse_mark(bytes: &[u8], uuid: &[u8; 16]) -> Option<u32> {
    let mut mark = [0; MARK_BYTES];
    mark.copy_from_slice(bytes.get(HEADER..HEADER + MARK_BYTES)?);
    let is_ours = mark.starts_with(MARK_MAGIC) && mark[16..] == *uuid && takes_checksum(&mut mark, MARK_CHECKSUM_AT);
    is_ours.then(|| number(&mark, MARK_SEGMENTS_AT))
}

/// Writes the mark to the disk, durably.
pub(super) async fn write_mark(device: &Rc<dyn BlockDevice>, uuid: &[u8; 16], segments: u32) -> IoResult {
    let bytes = mark_bytes(uuid, segments);
    let written = device.write(ByteOffset::new(HEADER as u64), WriteBuf::new(&bytes), WriteFlags::FUA);
    written.await
}

/// Reads the header and its mark from a disk.
pub(super) async fn read_header(name: &str, device: &Rc<dyn BlockDevice>) -> Result<(Header, Option<u32>), SwapError> {
    let size = device.geometry().size;
    check_size(name, size)?;
    let mut bytes = AlignedBuf::zeroed(SEGMENT);
    device
        .read(ByteOffset::ZERO, ReadBuf::new(&mut bytes))
        .await
        .map_err(|error| SwapError::Io(error.to_string()))?;
    let header = Header::parse(&mut bytes).map_err(|version| SwapError::Version {
        name: name.to_owned(),
        version,
    })?;
    let mark = match &header {
        Header::Ours(fields) => parse_mark(&bytes, &fields.uuid),
        Header::Nothing | Header::Foreign => None,
    };
    Ok((header, mark))
}

/// Returns the process that has pages on a disk with these first bytes, of which there must be at least [`HEADER`].
/// `None` if the disk is no swap cache, or its process has ended. `None` also if it is used through an NBD server,
/// which must be able to serve it. The content of the buffer is destroyed.
pub(crate) fn pages_of(beginning: &mut [u8]) -> Option<u32> {
    match Header::parse(beginning) {
        Ok(Header::Ours(fields)) if fields.of.is_alive() && !fields.is_exported => Some(fields.of.pid),
        _ => None,
    }
}

/// Parses `data` as the beginning of a disk, for fuzzing.
pub(in crate::memory) fn read_any(data: &[u8]) {
    let mut bytes = vec![0; BOTH];
    let len = data.len().min(BOTH);
    bytes[..len].copy_from_slice(&data[..len]);
    let is_empty = bytes.iter().all(|byte| *byte == 0);
    let found = Header::parse(&mut bytes);
    assert_eq!(found == Ok(Header::Nothing), is_empty);
    assert_eq!(found == Ok(Header::Foreign), !is_empty && !data.starts_with(MAGIC));
    if let Ok(Header::Ours(fields)) = found {
        let written = fields.bytes(true);
        assert_eq!(Header::parse(&mut written.to_vec()), Ok(Header::Ours(fields)));
        assert_eq!(parse_mark(&written, &fields.uuid), Some(0));
        parse_mark(&bytes, &fields.uuid);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A damaged mark or one of another disk counts as none: then all of the log is erased.
    #[test]
    fn mark_must_be_valid_and_own() {
        let uuid = [7; 16];
        let mut bytes = vec![0; BOTH];
        assert_eq!(parse_mark(&bytes, &uuid), None);
        bytes[HEADER..].copy_from_slice(&mark_bytes(&uuid, 300));
        assert_eq!(parse_mark(&bytes, &uuid), Some(300));
        assert_eq!(parse_mark(&bytes, &[8; 16]), None);
        for at in 0..MARK_BYTES {
            bytes[HEADER + at] ^= 1;
            assert_eq!(parse_mark(&bytes, &uuid), None, "byte {at}");
            bytes[HEADER + at] ^= 1;
        }
        assert_eq!(parse_mark(&bytes[..HEADER], &uuid), None);
    }

    /// A header parses back as written, and a flipped bit is detected.
    #[test]
    fn header_parses_back_and_detects_damage() {
        let fields = Fields {
            uuid: [3; 16],
            segments: 77,
            of: Owner { pid: 5, started: 6 },
            is_made: true,
            is_exported: false,
            is_encrypted: true,
        };
        let bytes = fields.bytes(true);
        assert_eq!(Header::parse(&mut bytes.to_vec()), Ok(Header::Ours(fields)));
        assert_eq!(parse_mark(&bytes, &fields.uuid), Some(0));
        let mut damaged = fields.bytes(false).to_vec();
        assert_eq!(parse_mark(&damaged, &fields.uuid), None);
        damaged[SEGMENTS_AT] ^= 1;
        assert_eq!(Header::parse(&mut damaged), Ok(Header::Ours(Fields::default())));
    }
}
