//! In-memory index of the cached lines, with their valid and dirty sectors. The metadata of each line is in
//! [`crate::set_table`]: some ten bytes including those of the policy, which scores the lines.

use std::collections::HashMap;
use std::ops::Range;

use larder_block::memory;
use larder_policy::Policy;

use crate::dirty::DirtyLines;
use crate::entry::Entry;
use crate::layout::{CacheLayout, Line, SectorMask, Slot};
use crate::line_set::LineSet;
use crate::page::{NewestPage, TURNS};
use crate::policy::{self, SetPolicy};
use crate::set_table::SetTable;

/// Flags of a set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct SetFlags(u8);

impl SetFlags {
    const LOADED: u8 = 1;
    const SECOND: u8 = 2;
    const CHANGED: [u8; 2] = [4, 8];
    /// Lowest bit of the newer page's turn.
    const TURN_SHIFT: u32 = 4;
    const TURN: u8 = (TURNS - 1) << Self::TURN_SHIFT;

    fn set(&mut self, bit: u8, on: bool) {
        self.0 = if on { self.0 | bit } else { self.0 & !bit };
    }
}

/// Users of a slot: no other line gets the slot while it has any.
#[derive(Clone, Copy, Debug, Default)]
struct Pins {
    readers: u32,
    writers: u32,
    /// Sectors that are being written. Readers do not get them from the slot until the disk has them, or the write
    /// has failed.
    hidden: SectorMask,
}

/// Kind of use of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SlotUse {
    Read,
    Write,
}

pub(crate) struct LineIndex {
    layout: CacheLayout,
    sets: SetTable,
    flags: Vec<SetFlags>,
    /// Number of sets that are not loaded.
    unloaded: u32,
    policy: Policy,
    /// Slots that are in use.
    pinned: HashMap<Slot, Pins>,
    /// All cached lines.
    pub(crate) lines: LineSet,
    pub(crate) dirty: DirtyLines,
    /// Lines whose clean sectors must be compared with the disk before they are used: see [`crate::compare`].
    pub(crate) unproven: LineSet,
}

impl LineIndex {
    pub(crate) fn new(layout: CacheLayout, budget: Option<u64>) -> Self {
        let policy = policy::new(&layout, budget);
        Self {
            layout,
            sets: SetTable::new(layout, policy.set_bytes()),
            flags: vec![SetFlags::default(); layout.sets as usize],
            unloaded: layout.sets,
            policy,
            pinned: HashMap::new(),
            lines: LineSet::default(),
            dirty: DirtyLines::default(),
            unproven: LineSet::default(),
        }
    }

    /// Returns the policy with its state of all sets.
    pub(crate) fn policy(&mut self) -> SetPolicy<'_> {
        SetPolicy { policy: &mut self.policy, sets: &mut self.sets }
    }

    /// Prefetches the policy's state of the line in `slot` into the processor's cache, because the line is touched
    /// soon.
    pub(crate) fn prefetch_policy_state(&self, slot: Slot) {
        let state = self.sets.policy(slot.set());
        let touched = self.policy.touched_offsets(slot.way() as u8);
        touched.iter().for_each(|at| memory::prefetch_cache_line(&state[*at]));
    }

    /// Prefetches the tags of `set` into the processor's cache, because a line of the set is looked up soon.
    pub(crate) fn prefetch_set(&self, set: u32) {
        self.sets.prefetch(set);
        memory::prefetch_cache_line(&self.flags[set as usize].0);
    }

    pub(crate) fn is_loaded(&self, set: u32) -> bool {
        self.flags[set as usize].0 & SetFlags::LOADED != 0
    }

    pub(crate) fn are_all_loaded(&self) -> bool {
        self.unloaded == 0
    }

    /// Returns whether the sets of some lines are loaded.
    pub(crate) fn are_loaded(&self, lines: Range<Line>) -> bool {
        self.are_all_loaded() || self.layout.sets_of(lines).all(|set| self.is_loaded(set))
    }

    pub(crate) fn set_loaded(&mut self, set: u32) {
        self.unloaded -= u32::from(!self.is_loaded(set));
        self.flags[set as usize].set(SetFlags::LOADED, true);
    }

    /// Returns the newer page of a set.
    pub(crate) fn newest_page(&self, set: u32) -> NewestPage {
        let SetFlags(flags) = self.flags[set as usize];
        NewestPage { is_second: flags & SetFlags::SECOND != 0, turn: (flags & SetFlags::TURN) >> SetFlags::TURN_SHIFT }
    }

    pub(crate) fn set_newest_page(&mut self, set: u32, newest: NewestPage) {
        let flags = &mut self.flags[set as usize];
        flags.set(SetFlags::SECOND, newest.is_second);
        flags.set(SetFlags::TURN, false);
        flags.set(newest.turn << SetFlags::TURN_SHIFT, true);
    }

    /// Returns whether a set has changed since its page was written; `change_mark` selects one of its two change marks.
    pub(crate) fn is_changed(&self, set: u32, change_mark: usize) -> bool {
        self.flags[set as usize].0 & SetFlags::CHANGED[change_mark] != 0
    }

    pub(crate) fn set_changed(&mut self, set: u32, change_mark: usize, changed: bool) {
        self.flags[set as usize].set(SetFlags::CHANGED[change_mark], changed);
    }

    /// Returns the slot of a line, whose set is loaded.
    pub(crate) fn find(&self, line: Line) -> Option<Slot> {
        self.sets.find(line)
    }

    pub(crate) fn tag(&self, slot: Slot) -> u32 {
        self.sets.tag(slot)
    }

    /// Returns the line in a slot that is not empty.
    fn line(&self, slot: Slot) -> Line {
        self.layout.line_of(slot.set(), self.tag(slot))
    }

    pub(crate) fn valid(&self, slot: Slot) -> SectorMask {
        self.sets.valid(slot)
    }

    pub(crate) fn dirty(&self, slot: Slot) -> SectorMask {
        match self.dirty.len() {
            0 => 0,
            _ => self.sets.dirty(slot),
        }
    }

    /// Returns the metadata of a slot, without its hotness.
    pub(crate) fn entry(&self, slot: Slot) -> Entry {
        let tag = self.tag(slot);
        if tag == 0 {
            return Entry::default();
        }
        Entry { tag, hotness: 0, open: false, valid: self.valid(slot), dirty: self.dirty(slot) }
    }

    /// Sets the valid and dirty sectors of a slot that holds a line.
    pub(crate) fn set_sectors(&mut self, slot: Slot, valid: SectorMask, dirty: SectorMask) {
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
    pub(crate) fn insert(&mut self, slot: Slot, line: Line, valid: SectorMask, dirty: SectorMask) {
        debug_assert!(self.tag(slot) == 0 && self.find(line).is_none());
        self.sets.set_tag(slot, self.layout.tag_of(line));
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

    pub(crate) fn pin(&mut self, slot: Slot, slot_use: SlotUse) {
        let pins = self.pinned.entry(slot).or_default();
        match slot_use {
            SlotUse::Read => pins.readers += 1,
            SlotUse::Write => pins.writers += 1,
        }
    }

    pub(crate) fn unpin(&mut self, slot: Slot, slot_use: SlotUse) {
        let std::collections::hash_map::Entry::Occupied(mut entry) = self.pinned.entry(slot) else {
            return;
        };
        let pins = entry.get_mut();
        match slot_use {
            SlotUse::Read => pins.readers -= 1,
            SlotUse::Write => pins.writers -= 1,
        }
        if pins.readers == 0 && pins.writers == 0 {
            entry.remove();
        }
    }

    /// Hides `sectors` of a slot, which is pinned for writing, from readers; zero makes all visible again.
    pub(crate) fn hide(&mut self, slot: Slot, sectors: SectorMask) {
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

    /// Returns the sectors of a slot that readers may use.
    pub(crate) fn visible(&self, slot: Slot) -> SectorMask {
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

    /// Returns all slots of a set.
    pub(crate) fn slots_of(&self, set: u32) -> impl Iterator<Item = Slot> + use<> {
        (0..self.layout.ways).map(move |way| Slot::new(set, way))
    }
}
