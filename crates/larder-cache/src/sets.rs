//! What memory has of every set, in a row for each: finding a line and touching it is mostly waiting for memory, and what
//! is of one set is of one page of memory, or two.
//!
//! ```text
//! byte 0         tags, their lowest bytes: what nearly always tells a line from the others of its set
//!      w         tags, the rest, 3 bytes each
//!      4 w       sectors that are valid, m bytes each
//!      (4 + m) w what the policy keeps
//! ```
//!
//! with w ways and m bytes of the mask of a line's sectors. Which sectors are dirty is apart: where nothing is, that takes
//! no memory.

use std::ops::Range;

use crate::shape::{Line, Sectors, Shape, Slot};

pub(crate) struct Sets {
    shape: Shape,
    /// Of a set.
    len: usize,
    /// Zeroed memory that nobody has touched costs nothing.
    bytes: Vec<u8>,
    dirty: Vec<u8>,
}

impl Sets {
    /// Without lines; the policy keeps so many bytes of each.
    pub(crate) fn new(shape: Shape, policy_len: usize) -> Self {
        let ways = shape.ways as usize;
        let len = ways * (4 + shape.mask_len()) + policy_len;
        Self {
            shape,
            len,
            bytes: vec![0; len * shape.sets as usize],
            dirty: vec![0; ways * shape.mask_len() * shape.sets as usize],
        }
    }

    fn ways(&self) -> usize {
        self.shape.ways as usize
    }

    fn of(&self, set: u32) -> &[u8] {
        &self.bytes[set as usize * self.len..][..self.len]
    }

    fn of_mut(&mut self, set: u32) -> &mut [u8] {
        &mut self.bytes[set as usize * self.len..][..self.len]
    }

    /// The slot in which a line is.
    pub(crate) fn find(&self, line: Line) -> Option<Slot> {
        let (set, tag) = (self.shape.set_of(line), self.shape.tag_of(line));
        let [low, high @ ..] = tag.to_le_bytes();
        let (lows, rest) = self.of(set).split_at(self.ways());
        let way = memchr::memchr_iter(low, lows).find(|way| rest[3 * way..3 * way + 3] == high)?;
        Some(Slot::new(set, way as u32))
    }

    /// The tag of the line in a slot; 0 if there is none.
    pub(crate) fn tag(&self, slot: Slot) -> u32 {
        let (way, ways, set) = (slot.way() as usize, self.ways(), self.of(slot.set()));
        let high = ways + 3 * way;
        u32::from_le_bytes([set[way], set[high], set[high + 1], set[high + 2]])
    }

    pub(crate) fn set_tag(&mut self, slot: Slot, tag: u32) {
        let (way, ways, set) = (slot.way() as usize, self.ways(), self.of_mut(slot.set()));
        let [low, high @ ..] = tag.to_le_bytes();
        set[way] = low;
        set[ways + 3 * way..][..3].copy_from_slice(&high);
    }

    fn valid_at(&self, slot: Slot) -> Range<usize> {
        let len = self.shape.mask_len();
        let from = 4 * self.ways() + slot.way() as usize * len;
        from..from + len
    }

    fn dirty_at(&self, slot: Slot) -> Range<usize> {
        let len = self.shape.mask_len();
        let from = (slot.set() as usize * self.ways() + slot.way() as usize) * len;
        from..from + len
    }

    /// The sectors of a slot that are valid.
    pub(crate) fn valid(&self, slot: Slot) -> Sectors {
        sectors(&self.of(slot.set())[self.valid_at(slot)])
    }

    pub(crate) fn set_valid(&mut self, slot: Slot, valid: Sectors) {
        let at = self.valid_at(slot);
        let len = at.len();
        self.of_mut(slot.set())[at].copy_from_slice(&valid.to_le_bytes()[..len]);
    }

    /// The sectors of a slot that are dirty.
    pub(crate) fn dirty(&self, slot: Slot) -> Sectors {
        sectors(&self.dirty[self.dirty_at(slot)])
    }

    pub(crate) fn set_dirty(&mut self, slot: Slot, dirty: Sectors) {
        let at = self.dirty_at(slot);
        let len = at.len();
        self.dirty[at].copy_from_slice(&dirty.to_le_bytes()[..len]);
    }

    /// What the policy keeps of a set.
    pub(crate) fn policy(&self, set: u32) -> &[u8] {
        &self.of(set)[self.policy_at()..]
    }

    pub(crate) fn policy_mut(&mut self, set: u32) -> &mut [u8] {
        let from = self.policy_at();
        &mut self.of_mut(set)[from..]
    }

    fn policy_at(&self) -> usize {
        self.ways() * (4 + self.shape.mask_len())
    }
}

fn sectors(mask: &[u8]) -> Sectors {
    if let [all] = mask {
        return Sectors::from(*all);
    }
    let mut wide = [0; size_of::<Sectors>()];
    wide[..mask.len()].copy_from_slice(mask);
    Sectors::from_le_bytes(wide)
}
