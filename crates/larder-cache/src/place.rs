//! Finds places for lines, and takes lines out of them.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use larder_block::event_loop::WorkSlice;
use larder_block::{ByteLen, ByteOffset, ByteRange, IoResult, Operation};

use crate::Cache;
use crate::commit::Failed;
use crate::entry::Entry;
use crate::index::Use;
use crate::parts::Part;
use crate::shape::{Line, Sectors, Slot, WAYS_MAX};
use larder_policy::policy::Context;

/// Lines that are changed before other tasks run: some 0.1 ms.
const SLICE_LINES: usize = 128;

/// Lines that memory has taken out, while a crash would still leave them.
#[derive(Default)]
pub(crate) struct Leaving {
    slots: BTreeMap<Line, Slot>,
    lines: HashMap<Slot, Line>,
}

impl Leaving {
    /// Returns those of some lines that have left memory, with the slots that a crash would leave them in.
    pub(crate) fn within(&self, lines: Range<Line>) -> impl Iterator<Item = (Line, Slot)> {
        self.slots.range(lines).map(|(line, slot)| (*line, *slot))
    }
}

/// What is taken out of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retract {
    All,
    /// What the disk has, too.
    Clean,
}

/// A slot that is being written to: nobody else's until this is dropped.
pub(crate) struct Place<'a> {
    cache: &'a Cache,
    slot: Slot,
    /// The line was in it before.
    is_old: bool,
}

impl Place<'_> {
    pub(crate) fn slot(&self) -> Slot {
        self.slot
    }

    /// The line was in it before, and it may be taken out meanwhile.
    pub(crate) fn is_old(&self) -> bool {
        self.is_old
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.cache.index.borrow_mut().unpin(self.slot, Use::Write);
        if self.is_old {
            let mut ledger = self.cache.ledger.borrow_mut();
            ledger.end(self.slot);
            ledger.tidy(self.slot, self.cache.index.borrow().entry(self.slot));
        }
    }
}

impl Cache {
    /// Where a byte of the disk is in a slot.
    pub(crate) fn data_at(&self, slot: Slot, at: ByteOffset) -> ByteOffset {
        self.shape.data_of(slot) + ByteLen::new(self.shape.within(at))
    }

    /// The slot of a line that is in the cache, to be written to.
    pub(crate) fn place_of(&self, slot: Slot) -> Place<'_> {
        let mut index = self.index.borrow_mut();
        index.pin(slot, Use::Write);
        self.ledger.borrow_mut().begin(slot, || index.entry(slot));
        Place {
            cache: self,
            slot,
            is_old: true,
        }
    }

    /// Where what was read of a line can be put: beside what is there of it, or in a free slot. The line's set is loaded.
    pub(crate) fn place_for(&self, part: Part) -> Option<Place<'_>> {
        if self.ledger.borrow().len() >= self.unsettled_max {
            self.start_settle();
            return None;
        }
        let found = self.index.borrow().find(part.line);
        match found {
            Some(slot) if self.index.borrow().valid(slot) & part.sectors != 0 => None,
            Some(slot) => Some(self.place_of(slot)),
            None => self.free_place(self.shape.set_of(part.line)),
        }
    }

    fn free_place(&self, set: u32) -> Option<Place<'_>> {
        let slot = self.free_slot(set).or_else(|| {
            self.make_room(set);
            self.free_slot(set)
        });
        let Some(slot) = slot else {
            // Those that are about to become free do so with the next commit.
            self.start_commit();
            return None;
        };
        self.index.borrow_mut().pin(slot, Use::Write);
        Some(Place {
            cache: self,
            slot,
            is_old: false,
        })
    }

    fn is_free(&self, slot: Slot) -> bool {
        let index = self.index.borrow();
        index.tag(slot) == 0 && !index.is_pinned(slot) && self.ledger.borrow().get(slot).is_none()
    }

    fn free_slot(&self, set: u32) -> Option<Slot> {
        // The way that the line before has, or will most likely get.
        let hint = self.way_hint.get();
        let hinted = Slot::new(set, hint.min(self.shape.ways - 1));
        if self.is_free(hinted) {
            return Some(hinted);
        }
        let slots = self.index.borrow().slots_of(set);
        let slot = slots.into_iter().find(|slot| self.is_free(*slot))?;
        self.way_hint.set(slot.way());
        Some(slot)
    }

    /// Takes lines out of a set, so that there are a few free slots, now or after the next commit.
    fn make_room(&self, set: u32) {
        let slots = self.index.borrow().slots_of(set);
        let taken = slots
            .into_iter()
            .filter(|slot| self.index.borrow().tag(*slot) != 0)
            .count();
        for _ in self.shape.ways as usize - taken..self.shape.spare_ways() {
            let victim = {
                let index = &mut *self.index.borrow_mut();
                let mut may_leave = [false; WAYS_MAX as usize];
                for slot in index.slots_of(set) {
                    let is_idle = index.tag(slot) != 0 && index.dirty(slot) == 0 && !index.is_pinned(slot);
                    may_leave[slot.way() as usize] = is_idle;
                }
                index.policy().victim(set, |slot| may_leave[slot.way() as usize])
            };
            let Some(slot) = victim else { break };
            self.counts.borrow_mut().evicted += 1;
            {
                let index = &mut *self.index.borrow_mut();
                let line = self.shape.line_of(set, index.tag(slot));
                index.policy().evict(slot, line);
            }
            self.take_out(slot);
        }
    }

    /// Empties a slot. What a crash leaves of it is seen to with the next commit.
    fn take_out(&self, slot: Slot) {
        let memory = self.index.borrow().entry(slot);
        let place = *self.ledger.borrow_mut().note(slot, || memory);
        self.cleaning.is_changed(slot);
        self.index.borrow_mut().remove(slot);
        match place.after_kill() {
            left if !left.is_empty() => self.leaves(slot, left),
            _ if !place.last.is_empty() => self.leaves(slot, place.last),
            _ => {
                self.ledger.borrow_mut().tidy(slot, Entry::default());
                return;
            }
        }
        self.queue(slot, Entry::default());
    }

    /// Notes that a crash would leave a line in a slot from which memory has taken it.
    pub(crate) fn leaves(&self, slot: Slot, entry: Entry) {
        let line = self.shape.line_of(slot.set(), entry.tag);
        let mut leaving = self.leaving.borrow_mut();
        leaving.slots.insert(line, slot);
        leaving.lines.insert(slot, line);
    }

    /// Some slots are empty, also after a crash.
    pub(crate) fn have_left(&self, slots: impl Iterator<Item = Slot>) {
        let leaving = &mut *self.leaving.borrow_mut();
        if leaving.lines.is_empty() {
            return;
        }
        for slot in slots {
            if let Some(line) = leaving.lines.remove(&slot)
                && leaving.slots.get(&line) == Some(&slot)
            {
                leaving.slots.remove(&line);
            }
        }
    }

    /// A crash would leave some of these lines, although memory has taken them out.
    pub(crate) fn has_leaving(&self, lines: Range<Line>) -> bool {
        self.leaving.borrow().within(lines).next().is_some()
    }

    /// What was written to `place` is in the cache from now on; `dirty` are those of its sectors that the disk has not.
    pub(crate) fn is_stored(&self, place: &Place<'_>, part: Part, dirty: Sectors, context: Context) {
        let slot = place.slot;
        if part.range.end().get() > self.size.get() {
            // The disk has become shorter meanwhile.
            if place.is_old {
                self.take_sectors(slot, part.sectors);
            }
            return;
        }
        {
            let mut index = self.index.borrow_mut();
            match index.find(part.line) {
                Some(found) if found == slot => {
                    let (valid, was_dirty) = (index.valid(slot), index.dirty(slot));
                    index.set_sectors(slot, valid | part.sectors, was_dirty & !part.sectors | dirty);
                }
                // Another one was faster; or it was taken out, and does not come back from here.
                Some(_) => return,
                None if place.is_old => return,
                None => {
                    self.ledger.borrow_mut().note(slot, Entry::default);
                    index.insert(slot, part.line, part.sectors, dirty);
                    index.policy().insert(slot, part.line, context);
                }
            }
        }
        self.make_room(slot.set());
        self.settle_in_time();
    }

    /// Sees to it that neither memory nor a crash finds anything of `range` in the cache, or nothing that is what the disk
    /// has. The range is held, and its sets are loaded.
    pub(crate) async fn retract(&self, range: ByteRange, what: Retract) -> Result<(), Failed> {
        if self.has_failed() {
            return Err(Failed);
        }
        if self.has_loose(range) {
            self.harden_queued().await?;
        }
        let lines = self.shape.lines_of(range);
        let mut commits = false;
        self.each_cached(lines.clone(), |line, slot| {
            let part = self.shape.part_of(line, range);
            let dirty = self.index.borrow().dirty(slot);
            let sectors = match what {
                Retract::All => part.sectors,
                Retract::Clean => part.sectors & !dirty,
            };
            commits |= self.take_sectors(slot, sectors);
            if dirty & sectors != 0 {
                self.undo(part.range);
            }
        })
        .await;
        if self.has_failed() {
            return Err(Failed);
        }
        // Also those that have made room meanwhile.
        match commits || self.has_leaving(lines) {
            true => self.commit().await,
            false => Ok(()),
        }
    }

    /// Divides work on many lines.
    pub(crate) fn work_slice(&self) -> WorkSlice {
        WorkSlice::new(SLICE_LINES.min(self.unsettled_max) as u64)
    }

    /// Calls `change` for each of `lines` that is in the cache, in order, and lets other tasks run every now and then.
    pub(crate) async fn each_cached(&self, mut lines: Range<Line>, mut change: impl FnMut(Line, Slot)) {
        let mut slice = self.work_slice();
        loop {
            let some: Vec<Line> = self
                .index
                .borrow()
                .lines
                .within(lines.clone())
                .take(SLICE_LINES)
                .collect();
            let Some(last) = some.last() else { return };
            lines.start = last + 1;
            for line in some {
                // It may have left meanwhile.
                let found = self.index.borrow().find(line);
                if let Some(slot) = found {
                    change(line, slot);
                }
                slice.did(1).await;
            }
        }
    }

    /// Notes that data of `range` that only the cache had leaves memory with the records queued now.
    fn undo(&self, range: ByteRange) {
        let records = self.commits.queued();
        let mut undoing = self.undoing.borrow_mut();
        match undoing.last_mut() {
            // One that no record will be written of is by itself.
            Some((last, of)) if last.end() == range.start && *of <= records => {
                last.len += range.len;
                *of = records;
            }
            _ => undoing.push((range, records)),
        }
    }

    /// Something that only the cache had of `range` has been taken out of memory, and a crash may still find it.
    pub(crate) fn is_undoing(&self, range: ByteRange) -> bool {
        let mut undoing = self.undoing.borrow_mut();
        undoing.retain(|(_, records)| !self.commits.have_written(*records));
        undoing.iter().any(|(undoing, _)| undoing.overlaps(range))
    }

    /// Waits until a crash finds no more than memory does of what only the cache had of a range: the disk has something else
    /// there, which nobody is to see before.
    pub(crate) async fn undone(&self, operation: Operation, range: ByteRange) -> IoResult {
        while self.is_undoing(range) {
            if !self.has_failed() && self.commit().await.is_ok() {
                continue;
            }
            self.detached(operation, range).await?;
            let undoing = self.undoing.borrow().clone();
            for noted in undoing.iter().filter(|(undoing, _)| undoing.overlaps(range)) {
                self.note_superseded(operation, noted.0).await?;
                self.undoing.borrow_mut().retain(|other| other != noted);
            }
        }
        Ok(())
    }

    /// Has memory find nothing of a range in a cache that has failed. What a crash finds is not its concern.
    pub(crate) fn forget(&self, range: ByteRange) {
        let mut index = self.index.borrow_mut();
        let lines: Vec<Line> = index.lines.within(self.shape.lines_of(range)).collect();
        for line in lines {
            let part = self.shape.part_of(line, range);
            let Some(slot) = index.find(part.line) else { continue };
            let (valid, dirty) = (index.valid(slot), index.dirty(slot));
            self.cleaning.is_changed(slot);
            match valid & !part.sectors {
                0 => index.remove(slot),
                left => index.set_sectors(slot, left, dirty & left),
            }
        }
    }

    /// Something of a range was written loosely.
    pub(crate) fn has_loose(&self, range: ByteRange) -> bool {
        if !self.may_be_dirty.get() {
            return false;
        }
        let (index, ledger) = (self.index.borrow(), self.ledger.borrow());
        let slot = |line| index.find(line).and_then(|slot| ledger.get(slot));
        let mut places = index.lines.within(self.shape.lines_of(range)).filter_map(slot);
        places.any(|place| place.loose.is_some())
    }

    /// Takes sectors out of a slot; whether a crash would still leave them.
    pub(crate) fn take_sectors(&self, slot: Slot, sectors: Sectors) -> bool {
        let memory = self.index.borrow().entry(slot);
        if memory.is_empty() || sectors == 0 {
            return false;
        }
        if memory.valid & !sectors == 0 {
            let ledger = self.ledger.borrow();
            let commits = ledger
                .get(slot)
                .is_none_or(|place| !place.last.is_empty() || place.commits > 0);
            drop(ledger);
            self.take_out(slot);
            return commits;
        }
        let place = *self.ledger.borrow_mut().note(slot, || memory);
        debug_assert!(
            place.loose.is_none() || memory.dirty & sectors == 0,
            "it was to be made firm"
        );
        self.cleaning.is_changed(slot);
        self.index
            .borrow_mut()
            .set_sectors(slot, memory.valid & !sectors, memory.dirty & !sectors);
        if place.last.believed() & sectors == 0 {
            // So there is nothing to be said, and no loose record that a firm one would take the place of too early.
            return place.commits > 0;
        }
        let mut entry = place.last;
        entry.valid &= !sectors;
        entry.dirty &= !sectors;
        if entry.valid == 0 {
            entry = Entry::default();
        }
        self.queue(slot, entry);
        true
    }
}
