//! Which lines are in the cache, and what is valid and dirty of them: what the program knows, in memory.
//!
//! For each slot a tag of four bytes and two bits for each sector, in arrays by set, so that a look-up reads memory in a
//! row. Which of a set's lines are worth most is the policy's matter, which keeps some bytes for each way.

use std::collections::HashMap;

use crate::dirty::DirtyLines;
use crate::entry::Entry;
use crate::policy::Policy;
use crate::shape::{Line, Sectors, Shape, Slot};

/// What is known of a set besides its lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SetFlags(u8);

impl SetFlags {
    const LOADED: u8 = 1;
    const SECOND: u8 = 2;
    const CHANGED: [u8; 2] = [4, 8];

    fn set(&mut self, bit: u8, on: bool) {
        self.0 = if on { self.0 | bit } else { self.0 & !bit };
    }
}

/// Who uses a slot, which no other line gets meanwhile.
#[derive(Clone, Copy, Debug, Default)]
struct Pins {
    readers: u32,
    writers: u32,
    /// What is being written, which readers do not get from here until it is known whether the disk has it.
    hidden: Sectors,
}

/// What a slot is used for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Use {
    Read,
    Write,
}

pub(crate) struct Index {
    shape: Shape,
    tags: Vec<u32>,
    valid: Vec<u8>,
    dirty_sectors: Vec<u8>,
    flags: Vec<SetFlags>,
    pub(crate) policy: Policy,
    /// Slots that are in use.
    pinned: HashMap<Slot, Pins>,
    lines: u64,
    pub(crate) dirty: DirtyLines,
}

impl Index {
    pub(crate) fn new(shape: Shape, budget: Option<u64>) -> Self {
        let slots = shape.slots() as usize;
        let masks = slots * shape.mask_len();
        Self {
            shape,
            // Zeroed memory that nobody has touched costs nothing.
            tags: vec![0; slots],
            valid: vec![0; masks],
            dirty_sectors: vec![0; masks],
            flags: vec![SetFlags::default(); shape.sets as usize],
            policy: Policy::new(&shape, budget),
            pinned: HashMap::new(),
            lines: 0,
            dirty: DirtyLines::default(),
        }
    }

    fn at(&self, slot: Slot) -> usize {
        slot.set() as usize * self.shape.ways as usize + slot.way() as usize
    }

    pub(crate) fn lines(&self) -> u64 {
        self.lines
    }

    pub(crate) fn is_loaded(&self, set: u32) -> bool {
        self.flags[set as usize].0 & SetFlags::LOADED != 0
    }

    pub(crate) fn set_loaded(&mut self, set: u32) {
        self.flags[set as usize].set(SetFlags::LOADED, true);
    }

    /// Whether the newer page of a set is the second one.
    pub(crate) fn is_page_second(&self, set: u32) -> bool {
        self.flags[set as usize].0 & SetFlags::SECOND != 0
    }

    pub(crate) fn set_page_second(&mut self, set: u32, second: bool) {
        self.flags[set as usize].set(SetFlags::SECOND, second);
    }

    /// Whether a set has changed, in the even or the odd half of the journal, and its page was not written since.
    pub(crate) fn is_changed(&self, set: u32, half: usize) -> bool {
        self.flags[set as usize].0 & SetFlags::CHANGED[half] != 0
    }

    pub(crate) fn set_changed(&mut self, set: u32, half: usize, changed: bool) {
        self.flags[set as usize].set(SetFlags::CHANGED[half], changed);
    }

    /// The slot in which a line is; of a set that is loaded.
    pub(crate) fn find(&self, line: Line) -> Option<Slot> {
        let (set, tag) = (self.shape.set_of(line), self.shape.tag_of(line));
        let from = set as usize * self.shape.ways as usize;
        let tags = &self.tags[from..from + self.shape.ways as usize];
        find_tag(tags, tag).map(|way| Slot::new(set, way))
    }

    pub(crate) fn tag(&self, slot: Slot) -> u32 {
        self.tags[self.at(slot)]
    }

    /// The line in a slot that is not empty.
    fn line(&self, slot: Slot) -> Line {
        self.shape.line_of(slot.set(), self.tag(slot))
    }

    fn mask(&self, bytes: &[u8], slot: Slot) -> Sectors {
        let len = self.shape.mask_len();
        let from = self.at(slot) * len;
        if len == 1 {
            return Sectors::from(bytes[from]);
        }
        let mut wide = [0; 16];
        wide[..len].copy_from_slice(&bytes[from..from + len]);
        Sectors::from_le_bytes(wide)
    }

    pub(crate) fn valid(&self, slot: Slot) -> Sectors {
        self.mask(&self.valid, slot)
    }

    pub(crate) fn dirty(&self, slot: Slot) -> Sectors {
        match self.dirty.len() {
            0 => 0,
            _ => self.mask(&self.dirty_sectors, slot),
        }
    }

    /// What is known of a slot, but for how hot it is.
    pub(crate) fn entry(&self, slot: Slot) -> Entry {
        let tag = self.tag(slot);
        if tag == 0 {
            return Entry::default();
        }
        Entry {
            tag,
            hotness: 0,
            open: false,
            valid: self.valid(slot),
            dirty: self.dirty(slot),
        }
    }

    /// Sets what is valid and dirty of a slot that holds a line.
    pub(crate) fn set_sectors(&mut self, slot: Slot, valid: Sectors, dirty: Sectors) {
        debug_assert!(dirty & !valid == 0 && valid != 0 && self.tag(slot) != 0);
        let was_dirty = self.dirty(slot) != 0;
        let len = self.shape.mask_len();
        let from = self.at(slot) * len;
        self.valid[from..from + len].copy_from_slice(&valid.to_le_bytes()[..len]);
        if was_dirty || dirty != 0 {
            self.dirty_sectors[from..from + len].copy_from_slice(&dirty.to_le_bytes()[..len]);
        }
        match (was_dirty, dirty != 0) {
            (false, true) => self.dirty.insert(self.line(slot)),
            (true, false) => self.dirty.remove(self.line(slot)),
            _ => {}
        }
    }

    /// Puts a line into an empty slot.
    pub(crate) fn insert(&mut self, slot: Slot, line: Line, valid: Sectors, dirty: Sectors) {
        debug_assert!(self.tag(slot) == 0 && self.find(line).is_none());
        let at = self.at(slot);
        self.tags[at] = self.shape.tag_of(line);
        self.lines += 1;
        self.set_sectors(slot, valid, dirty);
    }

    /// Empties a slot.
    pub(crate) fn remove(&mut self, slot: Slot) {
        debug_assert!(self.tag(slot) != 0);
        if self.dirty(slot) != 0 {
            self.dirty.remove(self.line(slot));
        }
        self.lines -= 1;
        let (at, len) = (self.at(slot), self.shape.mask_len());
        self.tags[at] = 0;
        self.valid[at * len..(at + 1) * len].fill(0);
        if self.dirty_sectors[at * len..(at + 1) * len]
            .iter()
            .any(|byte| *byte != 0)
        {
            self.dirty_sectors[at * len..(at + 1) * len].fill(0);
        }
        self.policy.remove(slot);
    }

    pub(crate) fn pin(&mut self, slot: Slot, what: Use) {
        let pins = self.pinned.entry(slot).or_default();
        match what {
            Use::Read => pins.readers += 1,
            Use::Write => pins.writers += 1,
        }
    }

    pub(crate) fn unpin(&mut self, slot: Slot, what: Use) {
        let std::collections::hash_map::Entry::Occupied(mut entry) = self.pinned.entry(slot) else {
            return;
        };
        let pins = entry.get_mut();
        match what {
            Use::Read => pins.readers -= 1,
            Use::Write => pins.writers -= 1,
        }
        if pins.readers == 0 && pins.writers == 0 {
            entry.remove();
        }
    }

    /// Has readers not get sectors of a slot, which is pinned for writing; of none again if `sectors` is zero.
    pub(crate) fn hide(&mut self, slot: Slot, sectors: Sectors) {
        if let Some(pins) = self.pinned.get_mut(&slot) {
            pins.hidden = sectors;
        }
    }

    pub(crate) fn has_writers(&self, slot: Slot) -> bool {
        self.pinned.get(&slot).is_some_and(|pins| pins.writers > 0)
    }

    pub(crate) fn has_readers(&self, slot: Slot) -> bool {
        self.pinned.get(&slot).is_some_and(|pins| pins.readers > 0)
    }

    /// What readers may have of a slot.
    pub(crate) fn visible(&self, slot: Slot) -> Sectors {
        let valid = self.valid(slot);
        match self.pinned.is_empty() {
            true => valid,
            false => valid & !self.pinned.get(&slot).map_or(0, |pins| pins.hidden),
        }
    }

    pub(crate) fn is_pinned(&self, slot: Slot) -> bool {
        !self.pinned.is_empty() && self.pinned.contains_key(&slot)
    }

    /// Every slot of a set.
    pub(crate) fn slots_of(&self, set: u32) -> impl Iterator<Item = Slot> + use<> {
        (0..self.shape.ways).map(move |way| Slot::new(set, way))
    }
}

/// The place of a tag in a set's tags.
fn find_tag(tags: &[u32], tag: u32) -> Option<u32> {
    const STEP: usize = 16;
    for (index, chunk) in tags.chunks(STEP).enumerate() {
        // Without an exit inside, so that it is done with wide registers.
        let found = chunk.iter().fold(false, |found, other| found | (*other == tag));
        if found {
            let within = chunk.iter().position(|other| *other == tag)?;
            return Some((index * STEP + within) as u32);
        }
    }
    None
}
