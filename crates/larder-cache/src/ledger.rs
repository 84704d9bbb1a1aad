//! Slots whose metadata on the cache device differs from memory.
//!
//! A slot that is not in the ledger is *persisted*: recovery would find the state that memory has, and that state is
//! valid. For every other slot the ledger has the state that recovery would find ([`Unsettled::durable`]). The state
//! in memory may be made durable once every change of the line has ended, and both devices were flushed after that.
//!
//! Recovery finds [`Unsettled::durable`] after a power loss. After a kill it finds the state that was written
//! *loosely* (unflushed) since, if any.
//!
//! A slot is *free* when memory has no line in it, recovery would find none, and it has no users.

use std::collections::HashMap;

use crate::entry::Entry;
use crate::shape::{Sectors, Slot};

/// State of a slot whose metadata on the cache device differs from memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Unsettled {
    /// State after recovery from a power loss.
    pub(crate) durable: Entry,
    /// State after recovery from a power loss, once all commits that were queued have ended.
    pub(crate) last: Entry,
    /// Firm commits that were queued and have not ended.
    pub(crate) commits: u32,
    /// Records with lower numbers are obsolete.
    firm: u64,
    /// Newest loose record, if it is newer than all firm ones: its entry, and its number. It may not be written yet.
    pub(crate) loose: Option<(Entry, u64)>,
    /// Dirty sectors of replaced loose records, until the firm records that replaced them are durable.
    replaced: Sectors,
    /// Changes of the line that are under way.
    pub(crate) changes: u32,
    /// Epoch in which the last change ended.
    pub(crate) epoch: u64,
}

impl Unsettled {
    /// Returns whether no change is under way that affects recovery.
    fn is_quiet(&self) -> bool {
        self.commits == 0 && self.changes == 0 && self.loose.is_none()
    }

    /// Returns whether nothing has changed since the end of `epoch`, nor is changing.
    fn is_ripe(&self, epoch: u64) -> bool {
        self.is_quiet() && self.epoch <= epoch
    }

    /// Returns the sectors that recovery could find dirty, now or once the queued records are written.
    pub(crate) fn any_dirty(&self) -> Sectors {
        let loose = self.loose.map_or(0, |(entry, _)| entry.dirty);
        self.durable.dirty | self.last.dirty | loose | self.replaced
    }

    /// Returns the state after recovery from a kill, once all queued records are written.
    pub(crate) fn after_kill(&self) -> Entry {
        self.loose.map_or(self.last, |(entry, _)| entry)
    }
}

#[derive(Default)]
pub(crate) struct Ledger {
    slots: HashMap<Slot, Unsettled>,
    epoch: u64,
    /// Number of the next record.
    number: u64,
}

impl Ledger {
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Returns whether recovery could find any dirty sector.
    pub(crate) fn is_anything_dirty(&self) -> bool {
        self.slots.values().any(|place| place.any_dirty() != 0)
    }

    /// Returns the slots with a loose record.
    pub(crate) fn loose_slots(&self) -> impl Iterator<Item = Slot> {
        let loose = self.slots.iter().filter(|(_, place)| place.loose.is_some());
        loose.map(|(slot, _)| *slot)
    }

    pub(crate) fn get(&self, slot: Slot) -> Option<&Unsettled> {
        self.slots.get(&slot)
    }

    /// Returns the entry of a slot, and creates it if the slot is persisted; `memory` is the state before any change.
    fn place(&mut self, slot: Slot, memory: impl FnOnce() -> Entry) -> &mut Unsettled {
        let (epoch, firm) = (self.epoch, self.number);
        self.slots.entry(slot).or_insert_with(|| {
            let durable = memory();
            Unsettled {
                durable,
                last: durable,
                // Loose records of a persisted slot no longer matter.
                firm,
                epoch,
                ..Unsettled::default()
            }
        })
    }

    /// Begins a change of the line in a slot.
    pub(crate) fn begin(&mut self, slot: Slot, memory: impl FnOnce() -> Entry) -> &Unsettled {
        let place = self.place(slot, memory);
        place.changes += 1;
        place
    }

    /// Ends a change of the line in a slot.
    pub(crate) fn end(&mut self, slot: Slot) {
        let epoch = self.epoch;
        if let Some(place) = self.slots.get_mut(&slot) {
            place.changes -= 1;
            place.epoch = epoch;
        }
    }

    /// Records a change of the state in memory that takes no time.
    pub(crate) fn note(&mut self, slot: Slot, memory: impl FnOnce() -> Entry) -> &Unsettled {
        let epoch = self.epoch;
        let place = self.place(slot, memory);
        place.epoch = epoch;
        place
    }

    /// Records that firm record `number` with `entry` was queued for a slot.
    pub(crate) fn commit_begins(&mut self, slot: Slot, entry: Entry, number: u64) {
        self.number = number + 1;
        if let Some(place) = self.slots.get_mut(&slot) {
            place.commits += 1;
            place.last = entry;
            place.firm = number;
            place.replaced |= place.loose.take().map_or(0, |(entry, _)| entry.dirty);
        }
    }

    /// Records that loose record `number` with `entry` was queued for a slot; `memory` is the state in memory.
    pub(crate) fn loosen(&mut self, slot: Slot, entry: Entry, number: u64, memory: impl FnOnce() -> Entry) {
        self.place(slot, memory).loose = Some((entry, number));
        self.number = number + 1;
    }

    /// Records that loose record `number`, with `entry`, has become durable; `memory` is the present state in memory.
    pub(crate) fn harden(&mut self, slot: Slot, entry: Entry, number: u64, memory: Entry) {
        let Some(place) = self.slots.get_mut(&slot) else {
            return;
        };
        if place.firm > number {
            return;
        }
        (place.durable, place.last) = (entry, entry);
        place.loose.take_if(|(_, of)| *of == number);
        self.tidy(slot, memory);
    }

    /// Records that a firm record with `entry` has become durable; `memory` is the present state in memory.
    pub(crate) fn commit_ends(&mut self, slot: Slot, entry: Entry, memory: Entry) {
        let Some(place) = self.slots.get_mut(&slot) else {
            return;
        };
        place.durable = entry;
        place.commits -= 1;
        if place.commits == 0 {
            place.replaced = 0;
        }
        self.tidy(slot, memory);
    }

    /// Removes the entry of a slot that has become persisted.
    pub(crate) fn tidy(&mut self, slot: Slot, memory: Entry) {
        let is_settled = self
            .slots
            .get(&slot)
            .is_some_and(|place| place.is_quiet() && place.durable == memory);
        if is_settled {
            self.slots.remove(&slot);
        }
    }

    /// Begins a new epoch. Changes that have ended so far belong to the returned epoch or to an earlier one.
    pub(crate) fn next_epoch(&mut self) -> u64 {
        self.epoch += 1;
        self.epoch - 1
    }

    /// Returns the slots in which nothing has changed since the end of `epoch`, nor is changing.
    pub(crate) fn ripe(&self, epoch: u64) -> Vec<Slot> {
        let ripe = self.slots.iter().filter(|(_, place)| place.is_ripe(epoch));
        ripe.map(|(slot, _)| *slot).collect()
    }

    /// Returns whether a slot is one of [`Self::ripe`].
    pub(crate) fn is_ripe(&self, slot: Slot, epoch: u64) -> bool {
        self.slots.get(&slot).is_some_and(|place| place.is_ripe(epoch))
    }
}
