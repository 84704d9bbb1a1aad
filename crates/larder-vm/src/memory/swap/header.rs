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
use larder_memory::segment_log::SEGMENT_BYTES;
use larder_memory::target::is_alive;
use rustix::process::Pid;

use super::{SwapError, check_size};

pub(super) const MAGIC: &[u8; 8] = b"LRDRSWAP";
pub(super) const VERSION: u32 = 1;
/// Length of the header, in bytes.
pub(super) const HEADER_BYTES: usize = 4096;
/// Length of the header and the mark, in bytes.
pub(super) const HEADER_AND_MARK_BYTES: usize = 2 * HEADER_BYTES;
const VERSION_OFFSET: usize = 8;
const CHECKSUM_OFFSET: usize = 12;
const IDENTITY_OFFSET: usize = 16;
const SEGMENTS_OFFSET: usize = 32;
const OWNER_OFFSET: usize = 40;
const CREATED_OFFSET: usize = 56;
/// Offset of the flag for an NBD export, whose server may export this very file.
const EXPORTED_OFFSET: usize = 60;
const ENCRYPTED_OFFSET: usize = 64;

const MARK_MAGIC: &[u8; 8] = b"LRDRUSED";
const MARK_CHECKSUM_OFFSET: usize = 8;
const MARK_SEGMENTS_OFFSET: usize = 12;
const MARK_BYTES: usize = 32;

/// Classification of a disk by its first bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Header {
    /// All zeros.
    Zeros,
    /// The header of a swap cache.
    Larder(HeaderFields),
    /// Any other content.
    Foreign,
}

/// The fields of a header. All are zero in a damaged header, which belongs to no known disk, and may be overwritten.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct HeaderFields {
    pub(super) uuid: [u8; 16],
    pub(super) segments: u32,
    pub(super) owner: SwapOwner,
    pub(super) is_created: bool,
    pub(super) is_exported: bool,
    pub(super) is_encrypted: bool,
}

/// The process whose pages are on a disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(in crate::memory) struct SwapOwner {
    /// Process ID.
    pub(in crate::memory) pid: u32,
    /// Start time; see [`larder_memory::target::Target::start_time`].
    pub(in crate::memory) started: u64,
}

impl SwapOwner {
    pub(super) fn is_alive(self) -> bool {
        let pid = i32::try_from(self.pid).ok().and_then(Pid::from_raw);
        pid.is_some_and(|pid| is_alive(pid, self.started))
    }
}

fn get_u32(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]])
}

fn put_u32(bytes: &mut [u8], at: usize, number: u32) {
    bytes[at..at + 4].copy_from_slice(&number.to_le_bytes());
}

/// Returns whether the checksum at `at` matches `bytes`. Afterwards zeros are in its place.
fn verify_checksum(bytes: &mut [u8], at: usize) -> bool {
    let checksum = get_u32(bytes, at);
    bytes[at..at + 4].fill(0);
    crc32c::crc32c(bytes) == checksum
}

fn set_checksum(bytes: &mut [u8], at: usize) {
    let checksum = crc32c::crc32c(bytes);
    put_u32(bytes, at, checksum);
}

impl Header {
    /// Parses the header from at least [`HEADER_BYTES`] bytes; the error is an unknown version.
    pub(super) fn parse(bytes: &mut [u8]) -> Result<Self, u32> {
        if bytes[..8] != *MAGIC {
            return Ok(match bytes.iter().all(|byte| *byte == 0) {
                true => Self::Zeros,
                false => Self::Foreign,
            });
        }
        let header = &mut bytes[..HEADER_BYTES];
        let version = get_u32(header, VERSION_OFFSET);
        if version != VERSION {
            return Err(version);
        }
        let mut fields = HeaderFields::default();
        if verify_checksum(header, CHECKSUM_OFFSET) {
            let mut started = [0; 8];
            started.copy_from_slice(&header[OWNER_OFFSET + 8..OWNER_OFFSET + 16]);
            fields.uuid.copy_from_slice(&header[IDENTITY_OFFSET..SEGMENTS_OFFSET]);
            fields.segments = get_u32(header, SEGMENTS_OFFSET);
            fields.owner = SwapOwner { pid: get_u32(header, OWNER_OFFSET), started: u64::from_le_bytes(started) };
            fields.is_created = get_u32(header, CREATED_OFFSET) == 1;
            fields.is_exported = get_u32(header, EXPORTED_OFFSET) == 1;
            fields.is_encrypted = get_u32(header, ENCRYPTED_OFFSET) == 1;
        }
        Ok(Self::Larder(fields))
    }
}

impl HeaderFields {
    /// Returns the bytes of the header, and of a mark at segment 0 if requested.
    pub(super) fn encode(&self, with_mark: bool) -> AlignedBuf {
        let mut bytes = AlignedBuf::zeroed(HEADER_AND_MARK_BYTES);
        let (header, rest) = bytes.split_at_mut(HEADER_BYTES);
        header[..8].copy_from_slice(MAGIC);
        put_u32(header, VERSION_OFFSET, VERSION);
        header[IDENTITY_OFFSET..SEGMENTS_OFFSET].copy_from_slice(&self.uuid);
        put_u32(header, SEGMENTS_OFFSET, self.segments);
        put_u32(header, OWNER_OFFSET, self.owner.pid);
        header[OWNER_OFFSET + 8..OWNER_OFFSET + 16].copy_from_slice(&self.owner.started.to_le_bytes());
        put_u32(header, CREATED_OFFSET, u32::from(self.is_created));
        put_u32(header, EXPORTED_OFFSET, u32::from(self.is_exported));
        put_u32(header, ENCRYPTED_OFFSET, u32::from(self.is_encrypted));
        set_checksum(header, CHECKSUM_OFFSET);
        if with_mark {
            rest.copy_from_slice(&mark_bytes(&self.uuid, 0));
        }
        bytes
    }
}

fn mark_bytes(uuid: &[u8; 16], segments: u32) -> AlignedBuf {
    let mut bytes = AlignedBuf::zeroed(HEADER_BYTES);
    let mark = &mut bytes[..MARK_BYTES];
    mark[..8].copy_from_slice(MARK_MAGIC);
    put_u32(mark, MARK_SEGMENTS_OFFSET, segments);
    mark[16..].copy_from_slice(uuid);
    set_checksum(mark, MARK_CHECKSUM_OFFSET);
    bytes
}

/// Parses the mark; `None` if there is no valid mark of this disk.
fn parse_mark(bytes: &[u8], uuid: &[u8; 16]) -> Option<u32> {
    let mut mark = [0; MARK_BYTES];
    mark.copy_from_slice(bytes.get(HEADER_BYTES..HEADER_BYTES + MARK_BYTES)?);
    let is_valid =
        mark.starts_with(MARK_MAGIC) && mark[16..] == *uuid && verify_checksum(&mut mark, MARK_CHECKSUM_OFFSET);
    is_valid.then(|| get_u32(&mark, MARK_SEGMENTS_OFFSET))
}

/// Writes the mark to the disk, durably.
pub(super) async fn write_mark(device: &Rc<dyn BlockDevice>, uuid: &[u8; 16], segments: u32) -> IoResult {
    let bytes = mark_bytes(uuid, segments);
    let written = device.write(ByteOffset::new(HEADER_BYTES as u64), WriteBuf::new(&bytes), WriteFlags::FUA);
    written.await
}

/// Reads the header and its mark from a disk.
pub(super) async fn read_header(name: &str, device: &Rc<dyn BlockDevice>) -> Result<(Header, Option<u32>), SwapError> {
    let size = device.geometry().size;
    check_size(name, size)?;
    let mut bytes = AlignedBuf::zeroed(SEGMENT_BYTES);
    device.read(ByteOffset::ZERO, ReadBuf::new(&mut bytes)).await.map_err(|error| SwapError::Io(error.to_string()))?;
    let header = Header::parse(&mut bytes).map_err(|version| SwapError::Version { name: name.to_owned(), version })?;
    let mark = match &header {
        Header::Larder(fields) => parse_mark(&bytes, &fields.uuid),
        Header::Zeros | Header::Foreign => None,
    };
    Ok((header, mark))
}

/// Returns the process that has pages on a disk with these first bytes, of which there must be at least
/// [`HEADER_BYTES`]. `None` if the disk is no swap cache, or its process has ended. `None` also if it is used through
/// an NBD server, which must be able to serve it. The content of the buffer is destroyed.
pub(crate) fn live_owner_pid(beginning: &mut [u8]) -> Option<u32> {
    match Header::parse(beginning) {
        Ok(Header::Larder(fields)) if fields.owner.is_alive() && !fields.is_exported => Some(fields.owner.pid),
        _ => None,
    }
}

/// Parses `data` as the beginning of a disk, for fuzzing.
pub(in crate::memory) fn fuzz_parse(data: &[u8]) {
    let mut bytes = vec![0; HEADER_AND_MARK_BYTES];
    let len = data.len().min(HEADER_AND_MARK_BYTES);
    bytes[..len].copy_from_slice(&data[..len]);
    let is_empty = bytes.iter().all(|byte| *byte == 0);
    let found = Header::parse(&mut bytes);
    assert_eq!(found == Ok(Header::Zeros), is_empty);
    assert_eq!(found == Ok(Header::Foreign), !is_empty && !data.starts_with(MAGIC));
    if let Ok(Header::Larder(fields)) = found {
        let written = fields.encode(true);
        assert_eq!(Header::parse(&mut written.to_vec()), Ok(Header::Larder(fields)));
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
        let mut bytes = vec![0; HEADER_AND_MARK_BYTES];
        assert_eq!(parse_mark(&bytes, &uuid), None);
        bytes[HEADER_BYTES..].copy_from_slice(&mark_bytes(&uuid, 300));
        assert_eq!(parse_mark(&bytes, &uuid), Some(300));
        assert_eq!(parse_mark(&bytes, &[8; 16]), None);
        for at in 0..MARK_BYTES {
            bytes[HEADER_BYTES + at] ^= 1;
            assert_eq!(parse_mark(&bytes, &uuid), None, "byte {at}");
            bytes[HEADER_BYTES + at] ^= 1;
        }
        assert_eq!(parse_mark(&bytes[..HEADER_BYTES], &uuid), None);
    }

    /// A header parses back as written, and a flipped bit is detected.
    #[test]
    fn header_parses_back_and_detects_damage() {
        let fields = HeaderFields {
            uuid: [3; 16],
            segments: 77,
            owner: SwapOwner { pid: 5, started: 6 },
            is_created: true,
            is_exported: false,
            is_encrypted: true,
        };
        let bytes = fields.encode(true);
        assert_eq!(Header::parse(&mut bytes.to_vec()), Ok(Header::Larder(fields)));
        assert_eq!(parse_mark(&bytes, &fields.uuid), Some(0));
        let mut damaged = fields.encode(false).to_vec();
        assert_eq!(parse_mark(&damaged, &fields.uuid), None);
        damaged[SEGMENTS_OFFSET] ^= 1;
        assert_eq!(Header::parse(&mut damaged), Ok(Header::Larder(HeaderFields::default())));
    }
}
