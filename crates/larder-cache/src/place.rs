//! Assigns slots to lines, and removes lines from slots.

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

/// Lines that are changed before other tasks run: some 0.1 ms of work.
const SLICE_LINES: usize = 128;

/// Lines that memory has removed, while recovery would still find them.
#[derive(Default)]
pub(crate) struct Leaving {
    slots: BTreeMap<Line, Slot>,
    lines: HashMap<Slot, Line>,
}

impl Leaving {
    /// Returns those of some lines that memory has removed, with the slots where recovery would find them.
    pub(crate) fn within(&self, lines: Range<Line>) -> impl Iterator<Item = (Line, Slot)> {
        self.slots.range(lines).map(|(line, slot)| (*line, *slot))
    }
}

/// Selection of the sectors to remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retract {
    All,
    /// Sectors that are not dirty: the disk has them too.
    Clean,
}

/// Slot that is being written to. No other line gets it until this is dropped.
pub(crate) struct Place<'a> {
    cache: &'a Cache,
    slot: Slot,
    /// Set if the slot held the line before the write.
    is_old: bool,
}

impl Place<'_> {
    pub(crate) fn slot(&self) -> Slot {
        self.slot
    }

    /// Returns whether the slot held the line before; if so, the line may be removed during the write.
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
    /// Returns the position on the cache device of a byte of the disk in a slot.
    pub(crate) fn data_at(&self, slot: Slot, at: ByteOffset) -> ByteOffset {
        self.shape.data_of(slot) + ByteLen::new(self.shape.within(at))
    }

    /// Pins the slot of a cached line for writing.
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

    /// Returns a slot for data of a line that is not cached yet: the line's slot, or a free one. The line's set is
    /// loaded.
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
            // Slots that are about to become free do so with the next commit.
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
        // The way of the last line: the next line of a run most likely gets the same.
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

    /// Evicts lines of a set, so that a few slots are free now or after the next commit.
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

    /// Empties a slot in memory, and queues a record if recovery would find a line in it.
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

    /// Records that recovery would find a line in a slot from which memory has removed it.
    pub(crate) fn leaves(&self, slot: Slot, entry: Entry) {
        let line = self.shape.line_of(slot.set(), entry.tag);
        let mut leaving = self.leaving.borrow_mut();
        leaving.slots.insert(line, slot);
        leaving.lines.insert(slot, line);
    }

    /// Records that recovery would find some slots empty.
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

    /// Returns whether recovery would find any of these lines, although memory has removed them.
    pub(crate) fn has_leaving(&self, lines: Range<Line>) -> bool {
        self.leaving.borrow().within(lines).next().is_some()
    }

    /// Makes data that was written to `place` usable; `dirty` are those of its sectors that the disk does not have.
    pub(crate) fn is_stored(&self, place: &Place<'_>, part: Part, dirty: Sectors, context: Context) {
        let slot = place.slot;
        if part.range.end().get() > self.size.get() {
            // The disk has become shorter during the write.
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
                // Another write stored the line first; or the line was removed, and stays so.
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

    /// Removes the sectors of `range` from memory and durably: all, or those that are not dirty. The caller has
    /// locked the range, and its sets are loaded.
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
        // Lines that were evicted in the meantime count too.
        match commits || self.has_leaving(lines) {
            true => self.commit().await,
            false => Ok(()),
        }
    }

    /// Returns a work slice that lets other tasks run during work on many lines.
    pub(crate) fn work_slice(&self) -> WorkSlice {
        WorkSlice::new(SLICE_LINES.min(self.unsettled_max) as u64)
    }

    /// Calls `change` for each cached one of `lines`, in order, and lets other tasks run in between.
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
                // The line may have been evicted since.
                let found = self.index.borrow().find(line);
                if let Some(slot) = found {
                    change(line, slot);
                }
                slice.did(1).await;
            }
        }
    }

    /// Records that dirty data of `range` leaves memory, and that recovery would find it until the queued records are
    /// written.
    fn undo(&self, range: ByteRange) {
        let records = self.commits.queued();
        let mut undoing = self.undoing.borrow_mut();
        match undoing.last_mut() {
            // An entry without records (`u64::MAX`) stays separate.
            Some((last, of)) if last.end() == range.start && *of <= records => {
                last.len += range.len;
                *of = records;
            }
            _ => undoing.push((range, records)),
        }
    }

    /// Returns whether memory has removed dirty data of `range` that recovery may still find.
    pub(crate) fn is_undoing(&self, range: ByteRange) -> bool {
        let mut undoing = self.undoing.borrow_mut();
        undoing.retain(|(_, records)| !self.commits.have_written(*records));
        undoing.iter().any(|(undoing, _)| undoing.overlaps(range))
    }

    /// Waits until recovery would find no dirty data of a range that memory has removed. The disk has other data
    /// there, which no reader may see before.
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

    /// Removes a range from the memory of a failed cache. The state that recovery would find is not changed.
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

    /// Returns whether a range has unflushed records.
    pub(crate) fn has_loose(&self, range: ByteRange) -> bool {
        if !self.may_be_dirty.get() {
            return false;
        }
        let (index, ledger) = (self.index.borrow(), self.ledger.borrow());
        let slot = |line| index.find(line).and_then(|slot| ledger.get(slot));
        let mut places = index.lines.within(self.shape.lines_of(range)).filter_map(slot);
        places.any(|place| place.loose.is_some())
    }

    /// Removes sectors of a slot from memory; returns whether recovery would still find them.
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
            "the record should have been made durable before"
        );
        self.cleaning.is_changed(slot);
        self.index
            .borrow_mut()
            .set_sectors(slot, memory.valid & !sectors, memory.dirty & !sectors);
        if place.last.believed() & sectors == 0 {
            // No record is needed, and so no unflushed one is replaced by a firm one too early.
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
