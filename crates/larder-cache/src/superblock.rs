//! Superblock: the layout of a cache, its disk, and how it was left.
//!
//! There are two copies, which are written one after the other with a barrier between. The one with the higher
//! sequence counts. Nothing that a new superblock allows is done before both copies are durable, so either copy is
//! sufficient.
//!
//! ```text
//! byte 0    magic "LRDRCACH"
//!      8    version, u32                   12   CRC32C of the rest, u32
//!      16   features, u64                  24   sequence, u64
//!      32   identity of the cache, 16 bytes
//!      48   log2 of a line's bytes, u32    52   sets, u32
//!      56   ways, u32                      60   mode, u32
//!      64   bytes of the journal, u64      72   bytes of a page, u64
//!      80   flags, u32: 1 clean stop, 2 dirty lines are possible
//!      84   session, u32
//!      88   next sequence of the journal at a clean stop, u64
//!      96   bytes of the disk, u64
//!      104  bytes of the disk's name, of its identity, of its stamp, and of the samples, u16 each
//!      112  identity of the host's boot when the cache was opened last, 16 bytes
//!      128  name, identity, stamp, samples, up to byte 4096; a sample is an offset on the disk, u64, and the CRC32C of
//!           the sector there when the cache was closed, u32
//! ```
//! All numbers are little-endian. A program refuses a cache with a feature that it does not know:
//!
//! | feature | meaning |
//! | --- | --- |
//! | 1, unproven | the disk may have changed without the cache: clean lines are compared with it before they are used |

use larder_block::ByteLen;

use crate::CacheMode;
use crate::journal::StopKind;
use crate::layout::{CacheLayout, SUPERBLOCK_LEN};
use crate::samples::{ContentSample, SAMPLES};

const MAGIC: &[u8; 8] = b"LRDRCACH";
const VERSION: u32 = 3;
/// Feature: clean lines are compared with the disk before they are used.
const FEATURE_UNPROVEN: u64 = 1;
const FLAG_CLEAN: u32 = 1;
const FLAG_DIRTY: u32 = 2;
const BOOT_AT: usize = 112;
const NAMES_AT: usize = 128;
/// Bytes of a sample.
const SAMPLE_LEN: usize = 12;
/// Bytes of name, identity, stamp and samples together.
const NAMES_MAX: usize = SUPERBLOCK_LEN as usize - NAMES_AT;

/// Identity of the disk that a cache belongs to.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskId {
    /// Name of the disk, for messages.
    pub name: String,
    /// Bytes that identify the disk as uniquely as possible; only the caller interprets them.
    pub identity: Vec<u8>,
    /// Bytes that change when the disk is written to; empty if unavailable.
    pub fingerprint: Vec<u8>,
}

/// Content of a superblock.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Superblock {
    pub(crate) sequence: u64,
    /// Unique identity of the cache.
    pub uuid: [u8; 16],
    /// Block layout of the cache.
    pub layout: CacheLayout,
    /// Handling of writes.
    pub mode: CacheMode,
    /// Set after a clean stop: nothing is missing.
    pub clean: bool,
    /// Set if the cache may have dirty data.
    pub may_be_dirty: bool,
    /// Set if clean lines must be compared with the disk before they are used.
    pub unproven: bool,
    /// Number of openings.
    pub session: u32,
    /// Sequence after the last journal sector at a clean stop.
    pub(crate) journal_end: u64,
    /// Identity of the host's boot when the cache was opened last: see [`crate::CacheOpenOptions::boot`].
    pub(crate) boot: [u8; 16],
    /// Size of the disk.
    pub disk_size: ByteLen,
    /// Identity of the cache's disk.
    pub disk: DiskId,
    /// Samples of the disk's content at a clean stop.
    pub(crate) samples: Vec<ContentSample>,
}

/// Error of an invalid superblock.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum SuperblockError {
    #[error("it does not begin with the superblock of a Larder cache")]
    NoMagic,
    #[error(
        "it is of version {0}; this program knows version {VERSION}: use the program that made it, or drop it (larder disk cache drop) and start with an empty one"
    )]
    Version(u32),
    #[error(
        "it uses features that this program does not know ({0:#x}): use the program that made it, or drop it (larder disk cache drop) and start with an empty one"
    )]
    Features(u64),
    #[error("both of its superblocks are damaged: drop it (larder disk cache drop) and start with an empty one")]
    Damaged,
    #[error(
        "it is cut off: it needs {needed} bytes, and has {size}; restore its full length, or drop it (larder disk cache drop) and start with an empty one"
    )]
    Truncated { needed: u64, size: u64 },
}

impl Superblock {
    /// Returns how the journal was left, if the host's present boot is `boot`; zero if that is unknown.
    pub(crate) fn stop_kind(&self, boot: [u8; 16]) -> StopKind {
        match self.clean {
            true => StopKind::Clean { end: self.journal_end },
            false if boot != [0; 16] && boot == self.boot => StopKind::Killed,
            false => StopKind::Unknown,
        }
    }

    /// Returns the initial value of this cache's checksums.
    pub(crate) fn seed(&self) -> u32 {
        crc32c::crc32c(&self.uuid)
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; SUPERBLOCK_LEN as usize];
        bytes[..8].copy_from_slice(MAGIC);
        let mut put = |at: usize, value: &[u8]| bytes[at..at + value.len()].copy_from_slice(value);
        put(8, &VERSION.to_le_bytes());
        let features = if self.unproven { FEATURE_UNPROVEN } else { 0 };
        put(16, &features.to_le_bytes());
        put(24, &self.sequence.to_le_bytes());
        put(32, &self.uuid);
        put(48, &self.layout.line_bits.to_le_bytes());
        put(52, &self.layout.sets.to_le_bytes());
        put(56, &self.layout.ways.to_le_bytes());
        put(60, &self.mode.number().to_le_bytes());
        put(64, &self.layout.journal_len.to_le_bytes());
        put(72, &self.layout.page_len.to_le_bytes());
        let flags = if self.clean { FLAG_CLEAN } else { 0 } | if self.may_be_dirty { FLAG_DIRTY } else { 0 };
        put(80, &flags.to_le_bytes());
        put(84, &self.session.to_le_bytes());
        put(88, &self.journal_end.to_le_bytes());
        put(96, &self.disk_size.get().to_le_bytes());
        put(BOOT_AT, &self.boot);
        // A name that is too long is truncated; the other two are short.
        let fingerprint = &self.disk.fingerprint[..self.disk.fingerprint.len().min(NAMES_MAX / 4)];
        let identity = &self.disk.identity[..self.disk.identity.len().min(NAMES_MAX / 4)];
        let name = self.disk.name.as_bytes();
        let name = &name[..name.len().min(NAMES_MAX / 2)];
        let pair = |sample: &ContentSample| [&sample.at.to_le_bytes()[..], &sample.sum.to_le_bytes()].concat();
        let samples: Vec<u8> = self.samples.iter().take(SAMPLES).flat_map(pair).collect();
        let mut at = NAMES_AT;
        for (index, part) in [name, identity, fingerprint, &samples].into_iter().enumerate() {
            put(104 + 2 * index, &(part.len() as u16).to_le_bytes());
            put(at, part);
            at += part.len();
        }
        let sum = checksum(&bytes);
        bytes[12..16].copy_from_slice(&sum.to_le_bytes());
        bytes
    }

    /// Decodes one copy.
    fn decode(bytes: &[u8]) -> Result<Self, SuperblockError> {
        if &bytes[..8] != MAGIC {
            return Err(SuperblockError::NoMagic);
        }
        let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
        let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
        if word(8) != VERSION {
            return Err(SuperblockError::Version(word(8)));
        }
        if word(12) != checksum(bytes) {
            return Err(SuperblockError::Damaged);
        }
        let unknown = long(16) & !FEATURE_UNPROVEN;
        if unknown != 0 {
            return Err(SuperblockError::Features(unknown));
        }
        let mut parts = [const { Vec::new() }; 4];
        let mut at = NAMES_AT;
        for (index, part) in parts.iter_mut().enumerate() {
            let len = usize::from(u16::from_le_bytes([bytes[104 + 2 * index], bytes[105 + 2 * index]]));
            *part = bytes.get(at..at + len).ok_or(SuperblockError::Damaged)?.to_vec();
            at += len;
        }
        let [name, identity, stamp, samples] = parts;
        let samples = samples.chunks_exact(SAMPLE_LEN).map(|pair| {
            let (at, sum) = pair.split_at(8);
            Some(ContentSample {
                at: u64::from_le_bytes(at.try_into().ok()?),
                sum: u32::from_le_bytes(sum.try_into().ok()?),
            })
        });
        let samples: Option<Vec<ContentSample>> = samples.collect();
        let (mut uuid, mut boot) = ([0; 16], [0; 16]);
        uuid.copy_from_slice(&bytes[32..48]);
        boot.copy_from_slice(&bytes[BOOT_AT..NAMES_AT]);
        Ok(Self {
            sequence: long(24),
            uuid,
            layout: CacheLayout {
                line_bits: word(48),
                sets: word(52),
                ways: word(56),
                journal_len: long(64),
                page_len: long(72),
            },
            mode: CacheMode::from_number(word(60)).ok_or(SuperblockError::Damaged)?,
            clean: word(80) & FLAG_CLEAN != 0,
            may_be_dirty: word(80) & FLAG_DIRTY != 0,
            unproven: long(16) & FEATURE_UNPROVEN != 0,
            session: word(84),
            journal_end: long(88),
            boot,
            disk_size: ByteLen::new(long(96)),
            disk: DiskId { name: String::from_utf8_lossy(&name).into_owned(), identity, fingerprint: stamp },
            samples: samples.ok_or(SuperblockError::Damaged)?,
        })
    }

    /// Returns the valid one of two copies with the higher sequence, of a file or device of `size` bytes.
    pub(crate) fn choose(first: &[u8], second: &[u8], size: ByteLen) -> Result<Self, SuperblockError> {
        let chosen = match (Self::decode(first), Self::decode(second)) {
            (Ok(first), Ok(second)) if first.uuid == second.uuid && second.sequence > first.sequence => second,
            (Ok(first), _) => first,
            (Err(_), Ok(second)) => second,
            (Err(SuperblockError::NoMagic), Err(SuperblockError::NoMagic)) => return Err(SuperblockError::NoMagic),
            (Err(SuperblockError::NoMagic), Err(_)) => return Err(SuperblockError::Damaged),
            (Err(error), Err(_)) => return Err(error),
        };
        let line_bits_valid = chosen.layout.line_bits.clamp(12, 16) == chosen.layout.line_bits;
        if !line_bits_valid || !chosen.layout.is_valid(ByteLen::new(u64::MAX >> 1)) {
            return Err(SuperblockError::Damaged);
        }
        if chosen.layout.len() > size {
            let needed = chosen.layout.len().get();
            return Err(SuperblockError::Truncated { needed, size: size.get() });
        }
        Ok(chosen)
    }
}

/// Returns the CRC32C of everything except the checksum itself.
fn checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&bytes[..12]), &bytes[16..])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn example() -> Superblock {
        Superblock {
            sequence: 7,
            uuid: *b"0123456789abcdef",
            layout: CacheLayout::for_size(ByteLen::mib(64), 12, 512).expect("large enough"),
            mode: CacheMode::WriteAround,
            clean: true,
            may_be_dirty: true,
            unproven: true,
            session: 3,
            journal_end: 99,
            boot: [5; 16],
            disk_size: ByteLen::mib(640),
            disk: DiskId { name: "/srv/disk.raw".to_owned(), identity: vec![1, 2, 3], fingerprint: vec![9; 40] },
            samples: (0..8).map(|at| ContentSample { at, sum: 7 }).collect(),
        }
    }

    /// The copy with the higher sequence is chosen, unless it is damaged.
    #[test]
    fn choose_takes_newest_undamaged_copy() {
        let old = example();
        let new = Superblock { sequence: 8, clean: false, ..old.clone() };
        let size = ByteLen::mib(64);
        let (first, second) = (old.encode(), new.encode());
        assert_eq!(Superblock::choose(&first, &second, size), Ok(new.clone()));
        assert_eq!(Superblock::choose(&second, &first, size), Ok(new.clone()));
        for at in 0..SUPERBLOCK_LEN as usize {
            let mut damaged = second.clone();
            damaged[at] ^= 1 << (at % 8);
            assert_eq!(Superblock::choose(&first, &damaged, size), Ok(old.clone()), "byte {at}");
            assert!(Superblock::choose(&damaged, &damaged, size).is_err(), "byte {at}");
        }
        let cut = Superblock::choose(&first, &second, ByteLen::mib(50));
        assert!(matches!(cut, Err(SuperblockError::Truncated { .. })), "{cut:?}");
    }
}
