//! Metadata of a cached line, and its encoding in pages and in the journal.
//!
//! ```text
//! byte 0  tag, u32: line number / sets + 1; 0 if the slot is empty
//!      4  hotness, u8: the policy's state of the line
//!      5  flags, u8: bit 0: open
//!      6  valid sectors, one bit each, 1 to 16 bytes
//!         dirty sectors, as many
//! ```
//! All numbers are little-endian.

use crate::layout::{CacheLayout, SECTOR_BITS, SectorMask};

const FLAG_OPEN: u8 = 1;
const FIXED_LEN: usize = 6;

/// Offset of the flags in an entry.
pub(crate) const FLAGS_AT: usize = 5;

/// Bytes of the longest entry.
pub(crate) const LEN_MAX: usize = len_for(16);

/// Metadata of a cached line; empty by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Tag of the line ([`CacheLayout::tag_of`]); zero if the slot is empty.
    pub(crate) tag: u32,
    /// State of the line that the policy restores after an opening.
    pub(crate) hotness: u8,
    /// Set while the disk may differ from the cache's clean sectors: recovery trusts only dirty sectors then.
    pub(crate) open: bool,
    /// Sectors that the cache has.
    pub(crate) valid: SectorMask,
    /// Sectors that only the cache has; a subset of `valid`.
    pub(crate) dirty: SectorMask,
}

/// Returns the bytes of an entry in a cache with lines of `line_bits`.
pub(crate) const fn len_for(line_bits: u32) -> usize {
    FIXED_LEN + 2 * (1 << (line_bits - SECTOR_BITS - 3))
}

impl Entry {
    pub(crate) fn is_empty(&self) -> bool {
        self.tag == 0
    }

    /// Returns the sectors that recovery trusts.
    pub(crate) fn trusted(&self) -> SectorMask {
        if self.open { self.dirty } else { self.valid }
    }

    /// Encodes the entry into `bytes`, which are [`len_for`] long.
    pub(crate) fn encode(&self, layout: &CacheLayout, bytes: &mut [u8]) {
        let mask = layout.mask_len();
        bytes[..4].copy_from_slice(&self.tag.to_le_bytes());
        bytes[4] = self.hotness;
        bytes[FLAGS_AT] = if self.open { FLAG_OPEN } else { 0 };
        bytes[FIXED_LEN..FIXED_LEN + mask].copy_from_slice(&self.valid.to_le_bytes()[..mask]);
        bytes[FIXED_LEN + mask..FIXED_LEN + 2 * mask].copy_from_slice(&self.dirty.to_le_bytes()[..mask]);
    }

    /// Decodes an entry; `None` if it is invalid.
    pub(crate) fn decode(layout: &CacheLayout, bytes: &[u8]) -> Option<Self> {
        let mask = layout.mask_len();
        let sectors = |from: usize| {
            let mut wide = [0; 16];
            wide[..mask].copy_from_slice(&bytes[from..from + mask]);
            SectorMask::from_le_bytes(wide)
        };
        let entry = Self {
            tag: u32::from_le_bytes(bytes[..4].try_into().ok()?),
            hotness: bytes[4],
            open: bytes[FLAGS_AT] & FLAG_OPEN != 0,
            valid: sectors(FIXED_LEN),
            dirty: sectors(FIXED_LEN + mask),
        };
        let is_valid = bytes[FLAGS_AT] & !FLAG_OPEN == 0
            && entry.dirty & !entry.valid == 0
            && (entry.is_empty() == (entry.valid == 0))
            && (!entry.is_empty() || !entry.open);
        is_valid.then_some(entry)
    }
}
