//! What the cache device says of the slots, where that is not what memory says.
//!
//! A slot that is not in the ledger is *settled*: a crash leaves of it what memory has, and that is true. For every
//! other one the ledger has what a crash would leave ([`Unsettled::durable`]). What memory has may become durable
//! once every change of the line has ended, and both devices were flushed after that.
//!
//! Where the two crashes differ, a loss of power leaves [`Unsettled::durable`], and a kill what was written *loosely*
//! since.
//!
//! A slot is *free* when memory has no line in it, a crash would leave none, and nobody uses it.

use std::collections::HashMap;

use crate::entry::Entry;
use crate::shape::{Sectors, Slot};

/// A slot of which the cache device says something else than memory does.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Unsettled {
    /// What a crash leaves.
    pub(crate) durable: Entry,
    /// The same, when all commits that were asked for have ended.
    pub(crate) last: Entry,
    /// Firm commits that were asked for and have not ended.
    pub(crate) commits: u32,
    /// Records with lower numbers say nothing new.
    firm: u64,
    /// What was written loosely after all of them, or is about to be, with the number of that record.
    pub(crate) loose: Option<(Entry, u64)>,
    /// What such records have said to be dirty that firm ones take the place of, until these are durable.
    replaced: Sectors,
    /// Changes of the line that are under way.
    pub(crate) changes: u32,
    /// When the last change ended.
    pub(crate) epoch: u64,
}

impl Unsettled {
    /// Nothing is under way that a crash would see.
    fn is_quiet(&self) -> bool {
        self.commits == 0 && self.changes == 0 && self.loose.is_none()
    }

    /// Nothing has changed since `epoch` ended, nor is changing.
    fn is_ripe(&self, epoch: u64) -> bool {
        self.is_quiet() && self.epoch <= epoch
    }

    /// Sectors that some crash would take for dirty.
    pub(crate) fn any_dirty(&self) -> Sectors {
        let loose = self.loose.map_or(0, |(entry, _)| entry.dirty);
        self.durable.dirty | self.last.dirty | loose | self.replaced
    }

    /// What a kill leaves, when all that was asked for has been written.
    pub(crate) fn after_kill(&self) -> Entry {
        self.loose.map_or(self.last, |(entry, _)| entry)
    }
}

#[derive(Default)]
pub(crate) struct Ledger {
    slots: HashMap<Slot, Unsettled>,
    epoch: u64,
    /// Of the next record.
    number: u64,
}

impl Ledger {
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Some crash would take something for dirty.
    pub(crate) fn is_anything_dirty(&self) -> bool {
        self.slots.values().any(|place| place.any_dirty() != 0)
    }

    /// Slots of which something was written loosely.
    pub(crate) fn loose_slots(&self) -> impl Iterator<Item = Slot> {
        let loose = self.slots.iter().filter(|(_, place)| place.loose.is_some());
        loose.map(|(slot, _)| *slot)
    }

    pub(crate) fn get(&self, slot: Slot) -> Option<&Unsettled> {
        self.slots.get(&slot)
    }

    /// The slot's place, made if it is settled; `memory` is what memory has for it now, before any change.
    fn place(&mut self, slot: Slot, memory: impl FnOnce() -> Entry) -> &mut Unsettled {
        let (epoch, firm) = (self.epoch, self.number);
        self.slots.entry(slot).or_insert_with(|| {
            let durable = memory();
            Unsettled {
                durable,
                last: durable,
                // What was written loosely of a settled slot is of no matter any more.
                firm,
                epoch,
                ..Unsettled::default()
            }
        })
    }

    /// A change of the line in a slot begins.
    pub(crate) fn begin(&mut self, slot: Slot, memory: impl FnOnce() -> Entry) -> &Unsettled {
        let place = self.place(slot, memory);
        place.changes += 1;
        place
    }

    /// It has ended.
    pub(crate) fn end(&mut self, slot: Slot) {
        let epoch = self.epoch;
        if let Some(place) = self.slots.get_mut(&slot) {
            place.changes -= 1;
            place.epoch = epoch;
        }
    }

    /// What memory has is no longer what it was, without a change that takes time.
    pub(crate) fn note(&mut self, slot: Slot, memory: impl FnOnce() -> Entry) -> &Unsettled {
        let epoch = self.epoch;
        let place = self.place(slot, memory);
        place.epoch = epoch;
        place
    }

    /// Record `number` is to say firmly what a slot holds.
    pub(crate) fn commit_begins(&mut self, slot: Slot, entry: Entry, number: u64) {
        self.number = number + 1;
        if let Some(place) = self.slots.get_mut(&slot) {
            place.commits += 1;
            place.last = entry;
            place.firm = number;
            place.replaced |= place.loose.take().map_or(0, |(entry, _)| entry.dirty);
        }
    }

    /// Record `number` is to say loosely what a slot holds; `memory` is what memory has.
    pub(crate) fn loosen(&mut self, slot: Slot, entry: Entry, number: u64, memory: impl FnOnce() -> Entry) {
        self.place(slot, memory).loose = Some((entry, number));
        self.number = number + 1;
    }

    /// Loose record `number`, which said that a slot holds `entry`, is firm; `memory` is what memory has now.
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

    /// It is durable; `memory` is what memory has now.
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

    /// Takes a slot out that is settled after all.
    pub(crate) fn tidy(&mut self, slot: Slot, memory: Entry) {
        let is_settled = self
            .slots
            .get(&slot)
            .is_some_and(|place| place.is_quiet() && place.durable == memory);
        if is_settled {
            self.slots.remove(&slot);
        }
    }

    /// Begins a new epoch; what has ended before is of the returned one, or of an earlier one.
    pub(crate) fn next_epoch(&mut self) -> u64 {
        self.epoch += 1;
        self.epoch - 1
    }

    /// The slots in which nothing has changed since `epoch` ended, nor is changing.
    pub(crate) fn ripe(&self, epoch: u64) -> Vec<Slot> {
        let ripe = self.slots.iter().filter(|(_, place)| place.is_ripe(epoch));
        ripe.map(|(slot, _)| *slot).collect()
    }

    /// Returns whether a slot is one of [`Self::ripe`].
    pub(crate) fn is_ripe(&self, slot: Slot, epoch: u64) -> bool {
        self.slots.get(&slot).is_some_and(|place| place.is_ripe(epoch))
    }
}
