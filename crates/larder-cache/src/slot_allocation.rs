//! Assigns slots to lines, and removes lines from slots.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;

use larder_block::event_loop::WorkSlice;
use larder_block::{ByteLen, ByteOffset, ByteRange, IoResult, Operation};

use crate::Cache;
use crate::commit::CacheFailed;
use crate::entry::Entry;
use crate::index::SlotUse;
use crate::layout::{Line, SectorMask, Slot, WAYS_MAX};
use crate::line_parts::LinePart;
use larder_policy::policy::AccessContext;

/// Lines that are changed before other tasks run: some 0.1 ms of work.
const SLICE_LINES: usize = 128;

/// Lines that memory has removed, while recovery would still find them.
#[derive(Default)]
pub(crate) struct PendingRemovals {
    slots: BTreeMap<Line, Slot>,
    lines: HashMap<Slot, Line>,
}

impl PendingRemovals {
    /// Returns those of some lines that memory has removed, with the slots where recovery would find them.
    pub(crate) fn within(&self, lines: Range<Line>) -> impl Iterator<Item = (Line, Slot)> {
        self.slots.range(lines).map(|(line, slot)| (*line, *slot))
    }
}

/// Selection of the sectors to remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Invalidation {
    All,
    /// Sectors that are not dirty: the disk has them too.
    Clean,
}

/// Slot that is being written to. No other line gets it until this is dropped.
pub(crate) struct WriteSlot<'a> {
    cache: &'a Cache,
    slot: Slot,
    /// Set if the slot held the line before the write.
    was_cached: bool,
}

impl WriteSlot<'_> {
    pub(crate) fn slot(&self) -> Slot {
        self.slot
    }

    /// Returns whether the slot held the line before; if so, the line may be removed during the write.
    pub(crate) fn was_cached(&self) -> bool {
        self.was_cached
    }
}

impl Drop for WriteSlot<'_> {
    fn drop(&mut self) {
        self.cache.index.borrow_mut().unpin(self.slot, SlotUse::Write);
        if self.was_cached {
            let mut ledger = self.cache.ledger.borrow_mut();
            ledger.end(self.slot);
            ledger.remove_if_persisted(self.slot, self.cache.index.borrow().entry(self.slot));
        }
    }
}

impl Cache {
    /// Returns the position on the cache device of a byte of the disk in a slot.
    pub(crate) fn data_at(&self, slot: Slot, at: ByteOffset) -> ByteOffset {
        self.layout.data_of(slot) + ByteLen::new(self.layout.offset_in_line(at))
    }

    /// Pins the slot of a cached line for writing.
    pub(crate) fn pin_for_write(&self, slot: Slot) -> WriteSlot<'_> {
        let mut index = self.index.borrow_mut();
        index.pin(slot, SlotUse::Write);
        self.ledger.borrow_mut().begin(slot, || index.entry(slot));
        WriteSlot { cache: self, slot, was_cached: true }
    }

    /// Returns a slot for data of a line that is not cached yet: the line's slot, or a free one. The line's set is
    /// loaded.
    pub(crate) fn slot_for_store(&self, part: LinePart) -> Option<WriteSlot<'_>> {
        if self.ledger.borrow().len() >= self.unpersisted_max {
            self.start_persist();
            return None;
        }
        let found = self.index.borrow().find(part.line);
        match found {
            Some(slot) if self.index.borrow().valid(slot) & part.sectors != 0 => None,
            Some(slot) => Some(self.pin_for_write(slot)),
            None => self.allocate_slot(self.layout.set_of(part.line)),
        }
    }

    fn allocate_slot(&self, set: u32) -> Option<WriteSlot<'_>> {
        let slot = self.free_slot(set).or_else(|| {
            self.make_room(set);
            self.free_slot(set)
        });
        let Some(slot) = slot else {
            // Slots that are about to become free do so with the next commit.
            self.start_commit();
            return None;
        };
        self.index.borrow_mut().pin(slot, SlotUse::Write);
        Some(WriteSlot { cache: self, slot, was_cached: false })
    }

    fn is_free(&self, slot: Slot) -> bool {
        let index = self.index.borrow();
        index.tag(slot) == 0 && !index.is_pinned(slot) && self.ledger.borrow().get(slot).is_none()
    }

    fn free_slot(&self, set: u32) -> Option<Slot> {
        // The way of the last line: the next line of a run most likely gets the same.
        let hint = self.way_hint.get();
        let hinted = Slot::new(set, hint.min(self.layout.ways - 1));
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
        let used = slots.into_iter().filter(|slot| self.index.borrow().tag(*slot) != 0).count();
        for _ in self.layout.ways as usize - used..self.layout.spare_ways() {
            let victim = {
                let index = &mut *self.index.borrow_mut();
                let mut evictable = [false; WAYS_MAX as usize];
                for slot in index.slots_of(set) {
                    let is_idle = index.tag(slot) != 0 && index.dirty(slot) == 0 && !index.is_pinned(slot);
                    evictable[slot.way() as usize] = is_idle;
                }
                index.policy().victim(set, |slot| evictable[slot.way() as usize])
            };
            let Some(slot) = victim else { break };
            self.counts.borrow_mut().evicted += 1;
            {
                let index = &mut *self.index.borrow_mut();
                let line = self.layout.line_of(set, index.tag(slot));
                index.policy().evict(slot, line);
            }
            self.remove_line(slot);
        }
    }

    /// Empties a slot in memory, and queues a record if recovery would find a line in it.
    fn remove_line(&self, slot: Slot) {
        let current = self.index.borrow().entry(slot);
        let state = *self.ledger.borrow_mut().record_change(slot, || current);
        self.cleaner.mark_changed(slot);
        self.index.borrow_mut().remove(slot);
        match state.after_kill() {
            recoverable if !recoverable.is_empty() => self.add_pending_removal(slot, recoverable),
            _ if !state.last.is_empty() => self.add_pending_removal(slot, state.last),
            _ => {
                self.ledger.borrow_mut().remove_if_persisted(slot, Entry::default());
                return;
            }
        }
        self.queue(slot, Entry::default());
    }

    /// Records that recovery would find a line in a slot from which memory has removed it.
    pub(crate) fn add_pending_removal(&self, slot: Slot, entry: Entry) {
        let line = self.layout.line_of(slot.set(), entry.tag);
        let mut pending = self.pending_removals.borrow_mut();
        pending.slots.insert(line, slot);
        pending.lines.insert(slot, line);
    }

    /// Records that recovery would find some slots empty.
    pub(crate) fn finish_removals(&self, slots: impl Iterator<Item = Slot>) {
        let pending = &mut *self.pending_removals.borrow_mut();
        if pending.lines.is_empty() {
            return;
        }
        for slot in slots {
            if let Some(line) = pending.lines.remove(&slot)
                && pending.slots.get(&line) == Some(&slot)
            {
                pending.slots.remove(&line);
            }
        }
    }

    /// Returns whether recovery would find any of these lines, although memory has removed them.
    pub(crate) fn has_pending_removal(&self, lines: Range<Line>) -> bool {
        self.pending_removals.borrow().within(lines).next().is_some()
    }

    /// Makes data that was written to `target` usable; `dirty` are those of its sectors that the disk does not have.
    pub(crate) fn finish_store(
        &self,
        target: &WriteSlot<'_>,
        part: LinePart,
        dirty: SectorMask,
        context: AccessContext,
    ) {
        let slot = target.slot;
        if part.range.end().get() > self.size.get() {
            // The disk has become shorter during the write.
            if target.was_cached {
                self.remove_sectors(slot, part.sectors);
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
                None if target.was_cached => return,
                None => {
                    self.ledger.borrow_mut().record_change(slot, Entry::default);
                    index.insert(slot, part.line, part.sectors, dirty);
                    index.policy().insert(slot, part.line, context);
                }
            }
        }
        self.make_room(slot.set());
        self.schedule_persist();
    }

    /// Removes the sectors of `range` from memory and durably: all, or those that are not dirty. The caller has
    /// locked the range, and its sets are loaded.
    pub(crate) async fn invalidate(&self, range: ByteRange, which: Invalidation) -> Result<(), CacheFailed> {
        if self.has_failed() {
            return Err(CacheFailed);
        }
        if self.has_unflushed_records(range) {
            self.harden_queued().await?;
        }
        let lines = self.layout.lines_of(range);
        let mut commits = false;
        self.for_each_cached(lines.clone(), |line, slot| {
            let part = self.layout.part_of(line, range);
            let dirty = self.index.borrow().dirty(slot);
            let sectors = match which {
                Invalidation::All => part.sectors,
                Invalidation::Clean => part.sectors & !dirty,
            };
            commits |= self.remove_sectors(slot, sectors);
            if dirty & sectors != 0 {
                self.add_dropped_dirty(part.range);
            }
        })
        .await;
        if self.has_failed() {
            return Err(CacheFailed);
        }
        // Lines that were evicted in the meantime count too.
        match commits || self.has_pending_removal(lines) {
            true => self.commit().await,
            false => Ok(()),
        }
    }

    /// Returns a work slice that lets other tasks run during work on many lines.
    pub(crate) fn work_slice(&self) -> WorkSlice {
        WorkSlice::new(SLICE_LINES.min(self.unpersisted_max) as u64)
    }

    /// Calls `change` for each cached one of `lines`, in order, and lets other tasks run in between.
    pub(crate) async fn for_each_cached(&self, mut lines: Range<Line>, mut change: impl FnMut(Line, Slot)) {
        let mut slice = self.work_slice();
        loop {
            let batch: Vec<Line> = self.index.borrow().lines.within(lines.clone()).take(SLICE_LINES).collect();
            let Some(last) = batch.last() else { return };
            lines.start = last + 1;
            for line in batch {
                // The line may have been evicted since.
                let found = self.index.borrow().find(line);
                if let Some(slot) = found {
                    change(line, slot);
                }
                slice.complete_steps(1).await;
            }
        }
    }

    /// Records that dirty data of `range` leaves memory, and that recovery would find it until the queued records are
    /// written.
    fn add_dropped_dirty(&self, range: ByteRange) {
        let records = self.commits.queued();
        let mut dropped = self.dropped_dirty.borrow_mut();
        match dropped.last_mut() {
            // An entry without records (`u64::MAX`) stays separate.
            Some((last, of)) if last.end() == range.start && *of <= records => {
                last.len += range.len;
                *of = records;
            }
            _ => dropped.push((range, records)),
        }
    }

    /// Returns whether memory has removed dirty data of `range` that recovery may still find.
    pub(crate) fn has_dropped_dirty(&self, range: ByteRange) -> bool {
        let mut dropped = self.dropped_dirty.borrow_mut();
        dropped.retain(|(_, records)| !self.commits.has_written(*records));
        dropped.iter().any(|(undoing, _)| undoing.overlaps(range))
    }

    /// Waits until recovery would find no dirty data of a range that memory has removed. The disk has other data
    /// there, which no reader may see before.
    pub(crate) async fn wait_dropped_dirty(&self, operation: Operation, range: ByteRange) -> IoResult {
        while self.has_dropped_dirty(range) {
            if !self.has_failed() && self.commit().await.is_ok() {
                continue;
            }
            self.wait_failure_recorded(operation, range).await?;
            let dropped = self.dropped_dirty.borrow().clone();
            for entry in dropped.iter().filter(|(undoing, _)| undoing.overlaps(range)) {
                self.record_superseded(operation, entry.0).await?;
                self.dropped_dirty.borrow_mut().retain(|other| other != entry);
            }
        }
        Ok(())
    }

    /// Removes a range from the memory of a failed cache. The state that recovery would find is not changed.
    pub(crate) fn drop_range(&self, range: ByteRange) {
        let mut index = self.index.borrow_mut();
        let lines: Vec<Line> = index.lines.within(self.layout.lines_of(range)).collect();
        for line in lines {
            let part = self.layout.part_of(line, range);
            let Some(slot) = index.find(part.line) else { continue };
            let (valid, dirty) = (index.valid(slot), index.dirty(slot));
            self.cleaner.mark_changed(slot);
            match valid & !part.sectors {
                0 => index.remove(slot),
                remaining => index.set_sectors(slot, remaining, dirty & remaining),
            }
        }
    }

    /// Returns whether a range has unflushed records.
    pub(crate) fn has_unflushed_records(&self, range: ByteRange) -> bool {
        if !self.may_be_dirty.get() {
            return false;
        }
        let (index, ledger) = (self.index.borrow(), self.ledger.borrow());
        let slot = |line| index.find(line).and_then(|slot| ledger.get(slot));
        let mut states = index.lines.within(self.layout.lines_of(range)).filter_map(slot);
        states.any(|state| state.unflushed.is_some())
    }

    /// Removes sectors of a slot from memory; returns whether recovery would still find them.
    pub(crate) fn remove_sectors(&self, slot: Slot, sectors: SectorMask) -> bool {
        let current = self.index.borrow().entry(slot);
        if current.is_empty() || sectors == 0 {
            return false;
        }
        if current.valid & !sectors == 0 {
            let ledger = self.ledger.borrow();
            let commits = ledger.get(slot).is_none_or(|state| !state.last.is_empty() || state.commits > 0);
            drop(ledger);
            self.remove_line(slot);
            return commits;
        }
        let state = *self.ledger.borrow_mut().record_change(slot, || current);
        debug_assert!(
            state.unflushed.is_none() || current.dirty & sectors == 0,
            "the record should have been made durable before"
        );
        self.cleaner.mark_changed(slot);
        self.index.borrow_mut().set_sectors(slot, current.valid & !sectors, current.dirty & !sectors);
        if state.last.trusted() & sectors == 0 {
            // No record is needed, and so no unflushed one is replaced by a firm one too early.
            return state.commits > 0;
        }
        let mut entry = state.last;
        entry.valid &= !sectors;
        entry.dirty &= !sectors;
        if entry.valid == 0 {
            entry = Entry::default();
        }
        self.queue(slot, entry);
        true
    }
}
