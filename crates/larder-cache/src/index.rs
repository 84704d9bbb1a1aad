//! Which lines are in the cache, and what is valid and dirty of them: what the program knows, in memory. What that is for
//! each line is in [`crate::sets`], some ten bytes with those of the policy, whose matter it is which are worth most.

use std::collections::HashMap;
use std::ops::Range;

use larder_block::memory;
use larder_policy::Policy;

use crate::dirty::DirtyLines;
use crate::entry::Entry;
use crate::lines::LineSet;
use crate::page::{Newest, TURNS};
use crate::policy::{self, OverSets};
use crate::sets::Sets;
use crate::shape::{Line, Sectors, Shape, Slot};

/// What is known of a set besides its lines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SetFlags(u8);

impl SetFlags {
    const LOADED: u8 = 1;
    const SECOND: u8 = 2;
    const CHANGED: [u8; 2] = [4, 8];
    /// From this bit on: the turn of the newer page.
    const TURN_SHIFT: u32 = 4;
    const TURN: u8 = (TURNS - 1) << Self::TURN_SHIFT;

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
    sets: Sets,
    flags: Vec<SetFlags>,
    /// Sets that are not loaded.
    unloaded: u32,
    policy: Policy,
    /// Slots that are in use.
    pinned: HashMap<Slot, Pins>,
    /// All cached lines.
    pub(crate) lines: LineSet,
    pub(crate) dirty: DirtyLines,
    /// Lines whose clean sectors are not to be used before they were compared with the disk: see [`crate::compare`].
    pub(crate) unproven: LineSet,
}

impl Index {
    pub(crate) fn new(shape: Shape, budget: Option<u64>) -> Self {
        let policy = policy::new(&shape, budget);
        Self {
            shape,
            sets: Sets::new(shape, policy.set_bytes()),
            flags: vec![SetFlags::default(); shape.sets as usize],
            unloaded: shape.sets,
            policy,
            pinned: HashMap::new(),
            lines: LineSet::default(),
            dirty: DirtyLines::default(),
            unproven: LineSet::default(),
        }
    }

    /// The policy, over what it keeps of all sets.
    pub(crate) fn policy(&mut self) -> OverSets<'_> {
        OverSets {
            policy: &mut self.policy,
            sets: &mut self.sets,
        }
    }

    /// The line in `slot` is going to be touched: memory has time meanwhile to bring what the policy knows of it.
    pub(crate) fn announce(&self, slot: Slot) {
        let state = self.sets.policy(slot.set());
        let touched = self.policy.touched(slot.way() as u8);
        touched.iter().for_each(|at| memory::prefetch(&state[*at]));
    }

    /// A line of `set` is going to be looked for.
    pub(crate) fn announce_set(&self, set: u32) {
        self.sets.announce(set);
        memory::prefetch(&self.flags[set as usize].0);
    }

    pub(crate) fn is_loaded(&self, set: u32) -> bool {
        self.flags[set as usize].0 & SetFlags::LOADED != 0
    }

    pub(crate) fn are_all_loaded(&self) -> bool {
        self.unloaded == 0
    }

    /// Returns whether the sets of some lines are loaded.
    pub(crate) fn are_loaded(&self, lines: Range<Line>) -> bool {
        self.are_all_loaded() || self.shape.sets_of(lines).all(|set| self.is_loaded(set))
    }

    pub(crate) fn set_loaded(&mut self, set: u32) {
        self.unloaded -= u32::from(!self.is_loaded(set));
        self.flags[set as usize].set(SetFlags::LOADED, true);
    }

    /// The newer page of a set.
    pub(crate) fn newest_page(&self, set: u32) -> Newest {
        let SetFlags(flags) = self.flags[set as usize];
        Newest {
            is_second: flags & SetFlags::SECOND != 0,
            turn: (flags & SetFlags::TURN) >> SetFlags::TURN_SHIFT,
        }
    }

    pub(crate) fn set_newest_page(&mut self, set: u32, newest: Newest) {
        let flags = &mut self.flags[set as usize];
        flags.set(SetFlags::SECOND, newest.is_second);
        flags.set(SetFlags::TURN, false);
        flags.set(newest.turn << SetFlags::TURN_SHIFT, true);
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
        self.sets.find(line)
    }

    pub(crate) fn tag(&self, slot: Slot) -> u32 {
        self.sets.tag(slot)
    }

    /// The line in a slot that is not empty.
    fn line(&self, slot: Slot) -> Line {
        self.shape.line_of(slot.set(), self.tag(slot))
    }

    pub(crate) fn valid(&self, slot: Slot) -> Sectors {
        self.sets.valid(slot)
    }

    pub(crate) fn dirty(&self, slot: Slot) -> Sectors {
        match self.dirty.len() {
            0 => 0,
            _ => self.sets.dirty(slot),
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
        self.sets.set_valid(slot, valid);
        if was_dirty || dirty != 0 {
            self.sets.set_dirty(slot, dirty);
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
        self.sets.set_tag(slot, self.shape.tag_of(line));
        self.lines.insert(line);
        self.set_sectors(slot, valid, dirty);
    }

    /// Empties a slot.
    pub(crate) fn remove(&mut self, slot: Slot) {
        debug_assert!(self.tag(slot) != 0);
        let line = self.line(slot);
        if self.dirty(slot) != 0 {
            self.dirty.remove(line);
        }
        self.lines.remove(line);
        self.unproven.remove(line);
        self.sets.set_tag(slot, 0);
        self.sets.set_valid(slot, 0);
        if self.sets.dirty(slot) != 0 {
            self.sets.set_dirty(slot, 0);
        }
        self.policy().remove(slot);
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
        let valid = match self.unproven.is_empty() || !self.unproven.contains(self.line(slot)) {
            true => self.valid(slot),
            false => self.dirty(slot),
        };
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
