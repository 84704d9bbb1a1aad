//! What the cache device says of the slots, where that is not what memory says.
//!
//! A slot that is not in the ledger is *settled*: a crash leaves of it what memory has, and that is true. For every
//! other one the ledger has what a crash would leave ([`Unsettled::durable`]). What memory has may become durable
//! once every change of the line has ended, and both devices were flushed after that.
//!
//! A slot is *free* when memory has no line in it, a crash would leave none, and nobody uses it.

use std::collections::HashMap;

use crate::entry::Entry;
use crate::shape::Slot;

/// A slot of which the cache device says something else than memory does.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Unsettled {
    /// What a crash leaves.
    pub(crate) durable: Entry,
    /// The same, when all commits that were asked for have ended.
    pub(crate) last: Entry,
    /// Commits that were asked for and have not ended.
    pub(crate) commits: u32,
    /// Changes of the line that are under way.
    pub(crate) changes: u32,
    /// When the last change ended.
    pub(crate) epoch: u64,
}

#[derive(Default)]
pub(crate) struct Ledger {
    slots: HashMap<Slot, Unsettled>,
    epoch: u64,
}

impl Ledger {
    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    pub(crate) fn get(&self, slot: Slot) -> Option<&Unsettled> {
        self.slots.get(&slot)
    }

    /// The slot's place, made if it is settled; `memory` is what memory has for it now, before any change.
    fn place(&mut self, slot: Slot, memory: impl FnOnce() -> Entry) -> &mut Unsettled {
        let epoch = self.epoch;
        self.slots.entry(slot).or_insert_with(|| {
            let durable = memory();
            Unsettled {
                durable,
                last: durable,
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

    /// A commit of a slot is asked for.
    pub(crate) fn commit_begins(&mut self, slot: Slot, entry: Entry) {
        if let Some(place) = self.slots.get_mut(&slot) {
            place.commits += 1;
            place.last = entry;
        }
    }

    /// It is durable; `memory` is what memory has now.
    pub(crate) fn commit_ends(&mut self, slot: Slot, entry: Entry, memory: Entry) {
        let Some(place) = self.slots.get_mut(&slot) else {
            return;
        };
        place.durable = entry;
        place.commits -= 1;
        self.tidy(slot, memory);
    }

    /// Takes a slot out that is settled after all.
    pub(crate) fn tidy(&mut self, slot: Slot, memory: Entry) {
        let is_settled = self
            .slots
            .get(&slot)
            .is_some_and(|place| place.commits == 0 && place.changes == 0 && place.durable == memory);
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
        let is_ripe = |place: &Unsettled| place.changes == 0 && place.commits == 0 && place.epoch <= epoch;
        self.slots
            .iter()
            .filter(|(_, place)| is_ripe(place))
            .map(|(slot, _)| *slot)
            .collect()
    }
}
