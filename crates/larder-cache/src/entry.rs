//! What is known of a line in the cache, and its bytes in pages and in the journal.
//!
//! ```text
//! byte 0  tag, u32: line number / sets + 1; 0 if the slot is empty
//!      4  what the policy wants to be told again, u8
//!      5  flags, u8: bit 0: open
//!      6  valid sectors, one bit each, 1 to 16 bytes
//!         dirty sectors, as many
//! ```
//! All numbers are little-endian.

use crate::shape::{SECTOR_BITS, Sectors, Shape};

const FLAG_OPEN: u8 = 1;
const FIXED_LEN: usize = 6;

/// Where the flags are.
pub(crate) const FLAGS_AT: usize = 5;

/// Bytes of the longest entry.
pub(crate) const LEN_MAX: usize = len_for(16);

/// A line in the cache; empty by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    /// See [`Shape::tag_of`]; zero if there is no line.
    pub(crate) tag: u32,
    /// For the policy.
    pub(crate) hotness: u8,
    /// The disk may hold something else than the cache does where it is not dirty: whoever finds this after a crash
    /// believes the disk.
    pub(crate) open: bool,
    /// The cache has them.
    pub(crate) valid: Sectors,
    /// Only the cache has them; valid.
    pub(crate) dirty: Sectors,
}

/// Bytes of an entry of a cache with such lines.
pub(crate) const fn len_for(line_bits: u32) -> usize {
    FIXED_LEN + 2 * (1 << (line_bits - SECTOR_BITS - 3))
}

impl Entry {
    pub(crate) fn is_empty(&self) -> bool {
        self.tag == 0
    }

    /// The sectors that are what they should be, also after a crash.
    pub(crate) fn believed(&self) -> Sectors {
        if self.open { self.dirty } else { self.valid }
    }

    /// Writes it into bytes as long as [`len_for`] says.
    pub(crate) fn encode(&self, shape: &Shape, bytes: &mut [u8]) {
        let mask = shape.mask_len();
        bytes[..4].copy_from_slice(&self.tag.to_le_bytes());
        bytes[4] = self.hotness;
        bytes[FLAGS_AT] = if self.open { FLAG_OPEN } else { 0 };
        bytes[FIXED_LEN..FIXED_LEN + mask].copy_from_slice(&self.valid.to_le_bytes()[..mask]);
        bytes[FIXED_LEN + mask..FIXED_LEN + 2 * mask].copy_from_slice(&self.dirty.to_le_bytes()[..mask]);
    }

    /// Reads it; `None` if no cache has such an entry.
    pub(crate) fn decode(shape: &Shape, bytes: &[u8]) -> Option<Self> {
        let mask = shape.mask_len();
        let sectors = |from: usize| {
            let mut wide = [0; 16];
            wide[..mask].copy_from_slice(&bytes[from..from + mask]);
            Sectors::from_le_bytes(wide)
        };
        let entry = Self {
            tag: u32::from_le_bytes(bytes[..4].try_into().ok()?),
            hotness: bytes[4],
            open: bytes[FLAGS_AT] & FLAG_OPEN != 0,
            valid: sectors(FIXED_LEN),
            dirty: sectors(FIXED_LEN + mask),
        };
        let is_sound = bytes[FLAGS_AT] & !FLAG_OPEN == 0
            && entry.dirty & !entry.valid == 0
            && (entry.is_empty() == (entry.valid == 0))
            && (!entry.is_empty() || !entry.open);
        is_sound.then_some(entry)
    }
}
