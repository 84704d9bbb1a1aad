//! Slots whose metadata on the cache device differs from memory.
//!
//! A slot that is not in the ledger is *persisted*: recovery would find the state that memory has, and that state is
//! valid. For every other slot the ledger has the state that recovery would find ([`UnpersistedSlot::durable`]). The
//! state in memory may be made durable once every change of the line has ended, and both devices were flushed after
//! that.
//!
//! Recovery finds [`UnpersistedSlot::durable`] after a power loss. After a kill it finds the state that was written
//! *loosely* (unflushed) since, if any.
//!
//! A slot is *free* when memory has no line in it, recovery would find none, and it has no users.

use std::collections::HashMap;

use crate::entry::Entry;
use crate::layout::{SectorMask, Slot};

/// State of a slot whose metadata on the cache device differs from memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct UnpersistedSlot {
    /// State after recovery from a power loss.
    pub(crate) durable: Entry,
    /// State after recovery from a power loss, once all commits that were queued have ended.
    pub(crate) last: Entry,
    /// Firm commits that were queued and have not ended.
    pub(crate) commits: u32,
    /// Records with lower numbers are obsolete.
    obsolete_below: u64,
    /// Newest loose record, if it is newer than all firm ones: its entry, and its number. It may not be written yet.
    pub(crate) unflushed: Option<(Entry, u64)>,
    /// Dirty sectors of replaced loose records, until the firm records that replaced them are durable.
    replaced: SectorMask,
    /// Changes of the line that are under way.
    pub(crate) changes: u32,
    /// Epoch in which the last change ended.
    pub(crate) epoch: u64,
}

impl UnpersistedSlot {
    /// Returns whether no change is under way that affects recovery.
    fn is_quiet(&self) -> bool {
        self.commits == 0 && self.changes == 0 && self.unflushed.is_none()
    }

    /// Returns whether nothing has changed since the end of `epoch`, nor is changing.
    fn is_persistable(&self, epoch: u64) -> bool {
        self.is_quiet() && self.epoch <= epoch
    }

    /// Returns the sectors that recovery could find dirty, now or once the queued records are written.
    pub(crate) fn possibly_dirty(&self) -> SectorMask {
        let unflushed = self.unflushed.map_or(0, |(entry, _)| entry.dirty);
        self.durable.dirty | self.last.dirty | unflushed | self.replaced
    }

    /// Returns the state after recovery from a kill, once all queued records are written.
    pub(crate) fn after_kill(&self) -> Entry {
        self.unflushed.map_or(self.last, |(entry, _)| entry)
    }
}

#[derive(Default)]
pub(crate) struct Ledger {
    slots: HashMap<Slot, UnpersistedSlot>,
    epoch: u64,
    /// Number of the next record.
    next_number: u64,
}

impl Ledger {
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Returns whether recovery could find any dirty sector.
    pub(crate) fn has_any_dirty(&self) -> bool {
        self.slots.values().any(|state| state.possibly_dirty() != 0)
    }

    /// Returns the slots with a loose record.
    pub(crate) fn unflushed_slots(&self) -> impl Iterator<Item = Slot> {
        let unflushed = self.slots.iter().filter(|(_, state)| state.unflushed.is_some());
        unflushed.map(|(slot, _)| *slot)
    }

    pub(crate) fn get(&self, slot: Slot) -> Option<&UnpersistedSlot> {
        self.slots.get(&slot)
    }

    /// Returns the entry of a slot, and creates it if the slot is persisted; `memory` is the state before any change.
    fn slot_state(&mut self, slot: Slot, memory: impl FnOnce() -> Entry) -> &mut UnpersistedSlot {
        let (epoch, firm) = (self.epoch, self.next_number);
        self.slots.entry(slot).or_insert_with(|| {
            let durable = memory();
            UnpersistedSlot {
                durable,
                last: durable,
                // Loose records of a persisted slot no longer matter.
                obsolete_below: firm,
                epoch,
                ..UnpersistedSlot::default()
            }
        })
    }

    /// Begins a change of the line in a slot.
    pub(crate) fn begin(&mut self, slot: Slot, memory: impl FnOnce() -> Entry) -> &UnpersistedSlot {
        let state = self.slot_state(slot, memory);
        state.changes += 1;
        state
    }

    /// Ends a change of the line in a slot.
    pub(crate) fn end(&mut self, slot: Slot) {
        let epoch = self.epoch;
        if let Some(state) = self.slots.get_mut(&slot) {
            state.changes -= 1;
            state.epoch = epoch;
        }
    }

    /// Records a change of the state in memory that takes no time.
    pub(crate) fn record_change(&mut self, slot: Slot, memory: impl FnOnce() -> Entry) -> &UnpersistedSlot {
        let epoch = self.epoch;
        let state = self.slot_state(slot, memory);
        state.epoch = epoch;
        state
    }

    /// Records that firm record `number` with `entry` was queued for a slot.
    pub(crate) fn begin_commit(&mut self, slot: Slot, entry: Entry, number: u64) {
        self.next_number = number + 1;
        if let Some(state) = self.slots.get_mut(&slot) {
            state.commits += 1;
            state.last = entry;
            state.obsolete_below = number;
            state.replaced |= state.unflushed.take().map_or(0, |(entry, _)| entry.dirty);
        }
    }

    /// Records that loose record `number` with `entry` was queued for a slot; `memory` is the state in memory.
    pub(crate) fn queue_unflushed(&mut self, slot: Slot, entry: Entry, number: u64, memory: impl FnOnce() -> Entry) {
        self.slot_state(slot, memory).unflushed = Some((entry, number));
        self.next_number = number + 1;
    }

    /// Records that loose record `number`, with `entry`, has become durable; `memory` is the present state in memory.
    pub(crate) fn mark_durable(&mut self, slot: Slot, entry: Entry, number: u64, memory: Entry) {
        let Some(state) = self.slots.get_mut(&slot) else {
            return;
        };
        if state.obsolete_below > number {
            return;
        }
        (state.durable, state.last) = (entry, entry);
        state.unflushed.take_if(|(_, of)| *of == number);
        self.remove_if_persisted(slot, memory);
    }

    /// Records that a firm record with `entry` has become durable; `memory` is the present state in memory.
    pub(crate) fn end_commit(&mut self, slot: Slot, entry: Entry, memory: Entry) {
        let Some(state) = self.slots.get_mut(&slot) else {
            return;
        };
        state.durable = entry;
        state.commits -= 1;
        if state.commits == 0 {
            state.replaced = 0;
        }
        self.remove_if_persisted(slot, memory);
    }

    /// Removes the entry of a slot that has become persisted.
    pub(crate) fn remove_if_persisted(&mut self, slot: Slot, memory: Entry) {
        let is_persisted = self.slots.get(&slot).is_some_and(|state| state.is_quiet() && state.durable == memory);
        if is_persisted {
            self.slots.remove(&slot);
        }
    }

    /// Begins a new epoch. Changes that have ended so far belong to the returned epoch or to an earlier one.
    pub(crate) fn next_epoch(&mut self) -> u64 {
        self.epoch += 1;
        self.epoch - 1
    }

    /// Returns the slots in which nothing has changed since the end of `epoch`, nor is changing.
    pub(crate) fn persistable(&self, epoch: u64) -> Vec<Slot> {
        let persistable = self.slots.iter().filter(|(_, state)| state.is_persistable(epoch));
        persistable.map(|(slot, _)| *slot).collect()
    }

    /// Returns whether a slot is one of [`Self::persistable`].
    pub(crate) fn is_persistable(&self, slot: Slot, epoch: u64) -> bool {
        self.slots.get(&slot).is_some_and(|state| state.is_persistable(epoch))
    }
}
