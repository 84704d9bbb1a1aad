//! In-memory table of all sets, with one row for each. Most of the time of a lookup is spent on memory latency, so
//! the data of a set lies together, on one memory page or two.
//!
//! ```text
//! byte 0         lowest bytes of the tags, which nearly always distinguish the lines of a set
//!      w         for each way the rest of its tag, 3 bytes, and its valid sectors, m bytes
//!      (4 + m) w state of the policy
//! ```
//!
//! Here w is the number of ways, and m the bytes of a sector mask. Dirty sectors are in a separate array, which takes
//! no memory while nothing is dirty.

use std::ops::Range;

use larder_block::memory;

use crate::layout::{CacheLayout, Line, SectorMask, Slot};

/// Bytes of a tag without the lowest.
const TAG_HIGH_LEN: usize = 3;

pub(crate) struct SetTable {
    layout: CacheLayout,
    /// Bytes of a set.
    len: usize,
    /// Zeroed memory that was never touched takes no space.
    bytes: Vec<u8>,
    dirty: Vec<u8>,
}

impl SetTable {
    /// Creates sets without lines; the policy has `policy_len` bytes in each.
    pub(crate) fn new(layout: CacheLayout, policy_len: usize) -> Self {
        let ways = layout.ways as usize;
        let len = ways * (1 + TAG_HIGH_LEN + layout.mask_len()) + policy_len;
        Self {
            layout,
            len,
            bytes: vec![0; len * layout.sets as usize],
            dirty: vec![0; ways * layout.mask_len() * layout.sets as usize],
        }
    }

    fn ways(&self) -> usize {
        self.layout.ways as usize
    }

    fn row(&self, set: u32) -> &[u8] {
        &self.bytes[set as usize * self.len..][..self.len]
    }

    fn row_mut(&mut self, set: u32) -> &mut [u8] {
        &mut self.bytes[set as usize * self.len..][..self.len]
    }

    /// Returns the offset in its set of the rest of a way's tag, which the valid sectors follow.
    fn way_at(&self, way: usize) -> usize {
        self.ways() + way * (TAG_HIGH_LEN + self.layout.mask_len())
    }

    /// Prefetches the memory that [`Self::find`] reads first for a line of `set`.
    pub(crate) fn prefetch(&self, set: u32) {
        const CACHE_LINE: usize = 64;
        let lows = &self.row(set)[..self.ways()];
        lows.iter().step_by(CACHE_LINE).for_each(memory::prefetch_cache_line);
    }

    /// Returns the slot of a line.
    pub(crate) fn find(&self, line: Line) -> Option<Slot> {
        let (set, tag) = (self.layout.set_of(line), self.layout.tag_of(line));
        let [low, high @ ..] = tag.to_le_bytes();
        let bytes = self.row(set);
        let has_high = |way: &usize| bytes[self.way_at(*way)..][..TAG_HIGH_LEN] == high;
        let way = memchr::memchr_iter(low, &bytes[..self.ways()]).find(has_high)?;
        Some(Slot::new(set, way as u32))
    }

    /// Returns the tag of the line in a slot; 0 if the slot is empty.
    pub(crate) fn tag(&self, slot: Slot) -> u32 {
        let (way, set) = (slot.way() as usize, self.row(slot.set()));
        let high = self.way_at(way);
        u32::from_le_bytes([set[way], set[high], set[high + 1], set[high + 2]])
    }

    pub(crate) fn set_tag(&mut self, slot: Slot, tag: u32) {
        let way = slot.way() as usize;
        let high_at = self.way_at(way);
        let set = self.row_mut(slot.set());
        let [low, high @ ..] = tag.to_le_bytes();
        set[way] = low;
        set[high_at..high_at + TAG_HIGH_LEN].copy_from_slice(&high);
    }

    fn valid_at(&self, slot: Slot) -> Range<usize> {
        let from = self.way_at(slot.way() as usize) + TAG_HIGH_LEN;
        from..from + self.layout.mask_len()
    }

    fn dirty_at(&self, slot: Slot) -> Range<usize> {
        let len = self.layout.mask_len();
        let from = (slot.set() as usize * self.ways() + slot.way() as usize) * len;
        from..from + len
    }

    /// Returns the valid sectors of a slot.
    pub(crate) fn valid(&self, slot: Slot) -> SectorMask {
        sectors(&self.row(slot.set())[self.valid_at(slot)])
    }

    pub(crate) fn set_valid(&mut self, slot: Slot, valid: SectorMask) {
        let at = self.valid_at(slot);
        let len = at.len();
        self.row_mut(slot.set())[at].copy_from_slice(&valid.to_le_bytes()[..len]);
    }

    /// Returns the dirty sectors of a slot.
    pub(crate) fn dirty(&self, slot: Slot) -> SectorMask {
        sectors(&self.dirty[self.dirty_at(slot)])
    }

    pub(crate) fn set_dirty(&mut self, slot: Slot, dirty: SectorMask) {
        let at = self.dirty_at(slot);
        let len = at.len();
        self.dirty[at].copy_from_slice(&dirty.to_le_bytes()[..len]);
    }

    /// Returns the policy's state of a set.
    pub(crate) fn policy(&self, set: u32) -> &[u8] {
        &self.row(set)[self.policy_at()..]
    }

    pub(crate) fn policy_mut(&mut self, set: u32) -> &mut [u8] {
        let from = self.policy_at();
        &mut self.row_mut(set)[from..]
    }

    fn policy_at(&self) -> usize {
        self.way_at(self.ways())
    }
}

fn sectors(mask: &[u8]) -> SectorMask {
    if let [all] = mask {
        return SectorMask::from(*all);
    }
    let mut wide = [0; size_of::<SectorMask>()];
    wide[..mask.len()].copy_from_slice(mask);
    SectorMask::from_le_bytes(wide)
}
