//! The guest's writes in write-back mode, where the cache may have data that the disk does not have.
//!
//! A write is complete when its data is on the cache device and a record of it in the journal, both written and
//! neither flushed: it survives a kill. A flush makes both durable ([`Cache::harden`]). A power loss between the two
//! must leave either the old or the new data:
//! - Where recovery would trust that the slot equals the disk, a record first says, durably, that the slot is dirty.
//!   So old or new data stays valid, even after the line is evicted.
//! - Anywhere else recovery finds nothing until the record is durable.

use larder_block::{
    ByteLen, ByteRange, Extent, ExtentKind, Geometry, Io, IoResult, Operation, WriteBuf, WriteFlags, check_request,
    join,
};
use larder_policy::policy::{AccessContext, AccessKind};
use smallvec::SmallVec;

use crate::Cache;
use crate::commit::CacheFailed;
use crate::entry::Entry;
use crate::layout::{SectorMask, Slot};
use crate::line_parts::LinePart;
use crate::slot_allocation::WriteSlot;

/// Fewest dirty lines that a request for extents looks up.
const DIRTY_LOOKUP_MIN: usize = 1024;

/// Parts of a write with their slots.
type WriteSlots<'a> = SmallVec<[(LinePart, WriteSlot<'a>); 2]>;

/// Sectors that are being written in slots where recovery would not find them: no reader may see data that a crash
/// would undo. If the write does not complete, the content of the sectors is unknown, and they are removed.
struct HiddenSectors<'a> {
    cache: &'a Cache,
    slots: SmallVec<[(Slot, SectorMask); 2]>,
}

impl HiddenSectors<'_> {
    async fn hide(&mut self, targets: &[(LinePart, WriteSlot<'_>)]) -> Result<(), CacheFailed> {
        let cache = self.cache;
        let mut unrecorded: SmallVec<[Slot; 2]> = SmallVec::new();
        for (part, target) in targets {
            let sectors = part.sectors & !cache.state_after_kill(target.slot()).dirty;
            if sectors == 0 {
                continue;
            }
            unrecorded.push(target.slot());
            let mut index = cache.index.borrow_mut();
            let sectors = sectors & index.valid(target.slot());
            if sectors != 0 {
                index.hide(target.slot(), sectors);
                self.slots.push((target.slot(), sectors));
            }
        }
        // Readers of a line that was removed from the slot count too.
        let has_readers = |slot: &Slot| cache.index.borrow().has_readers(*slot);
        let is_over = || cache.has_failed() || !unrecorded.iter().any(has_readers);
        cache.reader_done.when(is_over).await;
        (!cache.has_failed()).then_some(()).ok_or(CacheFailed)
    }

    /// Makes the written data visible; a reader then waits until it survives a kill.
    fn reveal(&mut self) {
        for (slot, _) in self.slots.drain(..) {
            self.cache.index.borrow_mut().hide(slot, 0);
        }
    }
}

impl Drop for HiddenSectors<'_> {
    fn drop(&mut self) {
        for (slot, sectors) in &self.slots {
            self.cache.index.borrow_mut().hide(*slot, 0);
            self.cache.remove_sectors(*slot, *sectors);
        }
    }
}

impl Cache {
    /// Writes to `range`, which the caller has locked, and whose sets are loaded. Data that the disk would refuse is
    /// refused here, because it could never be cleaned.
    pub(crate) async fn write_back(&self, range: ByteRange, buffer: WriteBuf<'_>, flags: WriteFlags) -> IoResult {
        // A copy is checked and written, since a guest could change its memory in between. It is short: only the
        // beginning of the disk is checked, and one write at a time touches that.
        let copied = self.lower.may_reject_content(range).then(|| buffer.to_vec());
        let buffer = copied.as_deref().map_or(buffer, WriteBuf::new);
        if copied.is_some() {
            self.lower.check_content(range.start, buffer)?;
        }
        loop {
            match self.write_to_cache(range, buffer, flags).await {
                Ok(Some(written)) => return written,
                Ok(None) => {}
                Err(CacheFailed) => return self.write_through_failed_cache(range, buffer, flags).await,
            }
        }
    }

    /// Writes to `range` while the cache device works; returns `None` if cached lines were removed during the write.
    async fn write_to_cache(
        &self,
        range: ByteRange,
        buffer: WriteBuf<'_>,
        flags: WriteFlags,
    ) -> Result<Option<IoResult>, CacheFailed> {
        let context = self.context(self.turn_time(), AccessKind::Write, range.len.get());
        self.allow_dirty().await?;
        let room = self.reserve_copy(buffer).await?;
        let mut targets = self.cached_slots(range, context);
        self.mark_dirty_before_write(&targets).await?;
        let mut hidden = HiddenSectors { cache: self, slots: SmallVec::new() };
        hidden.hide(&targets).await?;
        let mut bypassing: SmallVec<[LinePart; 2]> = SmallVec::new();
        let cached_count = targets.len();
        let mut at = 0;
        for part in self.layout.parts_of(range) {
            // The cached lines are in order.
            if targets[..cached_count].get(at).is_some_and(|(other, _)| other.line == part.line) {
                at += 1;
                continue;
            }
            let target = match self.should_admit(part.line, context) {
                true => self.slot_for_store(part),
                false => None,
            };
            match target {
                Some(target) => targets.push((part, target)),
                None => bypassing.push(part),
            }
        }
        let has_pending = bypassing.iter().any(|part| self.has_pending_removal(part.line..part.line + 1));
        if has_pending {
            self.commit().await?;
        }
        let piece = |part: &LinePart| {
            let from = (part.range.start - range.start).as_usize();
            buffer.slice(from, part.range.len.as_usize())
        };
        let memory = (!targets.is_empty()).then(|| room.copy(buffer));
        let changed = (!targets.is_empty()).then(|| self.device_flush_tracker.begin_change());
        let to_cache: SmallVec<[Io<'_>; 2]> = targets
            .iter()
            .zip(memory.iter().cycle())
            .map(|((part, target), memory)| self.write_part(target, part, range, memory))
            .collect();
        let to_disk: SmallVec<[Io<'_>; 2]> =
            bypassing.iter().map(|part| self.lower.write(part.range.start, piece(part), flags)).collect();
        let mut in_cache = Ok(());
        let cached = Io::task(async {
            in_cache = join(to_cache).await;
            Ok(())
        });
        let both: SmallVec<[Io<'_>; 2]> = SmallVec::from_buf([cached, Io::task(join(to_disk))]);
        let on_disk = join(both).await;
        drop((changed, memory));
        if let Err(error) = in_cache {
            self.fail(&error);
        }
        if self.has_failed() {
            // From now on no line may become dirty.
            return Err(CacheFailed);
        }
        let size = self.size.get();
        if range.end().get() > size {
            // The disk has become shorter during the write.
            let geometry = Geometry { size: ByteLen::new(size), ..self.lower.geometry() };
            let refused = check_request(self.lower.name(), &geometry, Operation::Write, range);
            return Ok(Some(refused));
        }
        let was_removed = |(part, target): &(LinePart, WriteSlot<'_>)| {
            let found = self.index.borrow().find(part.line);
            target.was_cached() && found != Some(target.slot())
        };
        if targets.iter().any(was_removed) {
            // The disk was shorter for a moment.
            return Ok(None);
        }
        hidden.reveal();
        if self.queue_dirty_records(&targets, context) {
            self.commit().await?;
        }
        drop((hidden, targets));
        self.schedule_cleaning();
        if flags.fua && self.harden().await.is_err() {
            return Ok(Some(Err(self.device_error(Operation::Write, range))));
        }
        Ok(Some(on_disk))
    }

    /// Returns the parts of a write whose lines are cached, with their slots.
    fn cached_slots(&self, range: ByteRange, context: AccessContext) -> WriteSlots<'_> {
        let mut targets = WriteSlots::new();
        for part in self.layout.parts_of(range) {
            let found = self.index.borrow().find(part.line);
            if let Some(slot) = found {
                self.index.borrow_mut().policy().touch(slot, part.line, context);
                self.cleaner.mark_changed(slot);
                targets.push((part, self.pin_for_write(slot)));
            }
        }
        targets
    }

    /// Returns the sectors of `part` that recovery would trust as clean.
    fn trusted_clean(&self, slot: Slot, part: LinePart) -> SectorMask {
        match self.ledger.borrow().get(slot) {
            Some(state) if !state.last.open => state.last.valid & !state.last.dirty & part.sectors,
            _ => 0,
        }
    }

    /// Ensures, durably, that recovery finds the sectors of a write dirty before they are written.
    async fn mark_dirty_before_write(&self, targets: &[(LinePart, WriteSlot<'_>)]) -> Result<(), CacheFailed> {
        let is_clean = |(part, target): &&(LinePart, WriteSlot<'_>)| self.trusted_clean(target.slot(), *part) != 0;
        let has_unflushed = |(_, target): &(LinePart, WriteSlot<'_>)| {
            let ledger = self.ledger.borrow();
            ledger.get(target.slot()).is_some_and(|state| state.unflushed.is_some())
        };
        if targets.iter().filter(is_clean).any(has_unflushed) {
            // A firm record replaces the unflushed one, which must be durable before.
            self.harden_queued().await?;
        }
        // Records that a cancelled write has queued may not be written yet.
        let has_commit = |(_, target): &(LinePart, WriteSlot<'_>)| {
            let ledger = self.ledger.borrow();
            ledger.get(target.slot()).is_some_and(|state| state.commits > 0)
        };
        let mut commits = targets.iter().any(has_commit);
        for (part, target) in targets.iter().filter(is_clean) {
            let slot = target.slot();
            let Some(last) = self.ledger.borrow().get(slot).map(|state| state.last) else {
                continue;
            };
            let dirty = last.dirty | (last.valid & part.sectors);
            self.queue(slot, Entry { dirty, ..last });
            commits = true;
        }
        if commits {
            self.commit().await?;
        }
        if self.has_failed() {
            return Err(CacheFailed);
        }
        // From here on the slots may have any mix of old and new data, and recovery would find them dirty.
        for (part, target) in targets {
            let recoverable = self.state_after_kill(target.slot());
            let mut index = self.index.borrow_mut();
            let (valid, dirty) = (index.valid(target.slot()), index.dirty(target.slot()));
            // The disk may have become shorter in between.
            if valid != 0 {
                index.set_sectors(target.slot(), valid, dirty | (valid & part.sectors & recoverable.dirty));
            }
        }
        Ok(())
    }

    /// Makes written data dirty in memory and queues its records; returns whether the commit must be waited for.
    fn queue_dirty_records(&self, targets: &[(LinePart, WriteSlot<'_>)], context: AccessContext) -> bool {
        let mut commits = false;
        for (part, target) in targets {
            let slot = target.slot();
            let recoverable = self.state_after_kill(slot);
            if recoverable.dirty & part.sectors != part.sectors {
                let tag = self.layout.tag_of(part.line);
                let (valid, dirty) = (recoverable.valid | part.sectors, recoverable.dirty | part.sectors);
                self.queue_unflushed(slot, Entry { tag, valid, dirty, ..recoverable });
            }
            commits |= self.has_queued_unflushed(slot);
            self.finish_store(target, *part, part.sectors, context);
        }
        commits
    }

    /// Returns the state of a slot after a kill, once all queued records are written.
    fn state_after_kill(&self, slot: Slot) -> Entry {
        let ledger = self.ledger.borrow();
        let state = ledger.get(slot);
        state.map_or_else(|| self.index.borrow().entry(slot), |place| place.after_kill())
    }

    /// Returns whether an unflushed record of a slot is still queued.
    pub(crate) fn has_queued_unflushed(&self, slot: Slot) -> bool {
        let ledger = self.ledger.borrow();
        let unflushed = ledger.get(slot).and_then(|state| state.unflushed);
        unflushed.is_some_and(|(_, number)| !self.commits.has_written(number + 1))
    }

    /// Flushes both devices.
    pub(crate) async fn flush_both(&self) -> IoResult {
        if self.has_failed() && self.may_be_dirty.get() {
            // The data cannot be made durable on the failed cache device.
            self.clean_and_invalidate().await?;
            return self.flush_disk().await;
        }
        let disk = Io::task(self.flush_disk());
        let cache = Io::task(async {
            if self.has_failed() || self.harden().await.is_ok() {
                return Ok(());
            }
            self.clean_and_invalidate().await?;
            self.flush_disk().await
        });
        let both: SmallVec<[Io<'_>; 2]> = SmallVec::from_buf([disk, cache]);
        join(both).await
    }

    /// Returns whether memory has, or recovery would find, data that the disk does not have.
    pub(crate) fn has_any_dirty(&self) -> bool {
        self.index.borrow().dirty.len() > 0 || self.ledger.borrow().has_any_dirty()
    }

    /// Returns whether it is certain that memory has no dirty data and recovery would find none: all sets are loaded
    /// and undamaged.
    pub(crate) fn is_known_clean(&self) -> bool {
        self.index.borrow().are_all_loaded() && !self.loading.has_fenced_sets() && !self.has_any_dirty()
    }

    /// Returns the extents of the disk, with dirty lines as data.
    pub(crate) async fn extents_of(&self, range: ByteRange, limit: usize) -> IoResult<Vec<Extent>> {
        if !self.may_be_dirty.get() {
            return self.lower.extents(range, limit).await;
        }
        if !self.index.borrow().are_all_loaded() {
            self.load_all().await?;
        }
        // Looked up before the disk is asked: the disk's answer may predate the cleaning of a line.
        let count = limit.max(DIRTY_LOOKUP_MIN);
        let dirty = self.index.borrow().dirty.within(self.layout.lines_of(range), count);
        let covered = match dirty.last() {
            // After the last line that was looked up nothing is known.
            Some(last) if dirty.len() >= count => ByteRange::between(range.start, self.range_of(0..last + 1).end()),
            _ => range,
        };
        let below = self.lower.extents(range.intersection(covered), limit).await?;
        self.wait_dropped_dirty(Operation::Extents, range).await?;
        let mut extents: Vec<Extent> = Vec::new();
        let mut push = |range: ByteRange, kind: ExtentKind| match extents.last_mut() {
            _ if range.is_empty() => {}
            Some(last) if last.kind == kind => last.range.len += range.len,
            _ => extents.push(Extent { range, kind }),
        };
        for Extent { range, kind } in below {
            let lines = self.layout.lines_of(range);
            let position_of = |line| dirty.partition_point(|other| *other < line);
            let dirty = match kind {
                ExtentKind::Data => &[],
                _ => &dirty[position_of(lines.start)..position_of(lines.end)],
            };
            let mut at = range.start;
            for line in dirty {
                let part = self.range_of(*line..line + 1).intersection(range);
                push(ByteRange::between(at, part.start), kind);
                push(part, ExtentKind::Data);
                at = part.end();
            }
            push(ByteRange::between(at, range.end()), kind);
        }
        extents.truncate(limit.max(1));
        Ok(extents)
    }

    /// Records, durably, that there may be dirty lines.
    async fn allow_dirty(&self) -> Result<(), CacheFailed> {
        if self.may_be_dirty.get() {
            return Ok(());
        }
        if let Err(error) = self.update_superblock(|superblock| superblock.may_be_dirty = true).await {
            self.fail(&error);
            return Err(CacheFailed);
        }
        if self.has_failed() {
            // Writes may bypass the cache already, and a fill may have data older than those.
            return Err(CacheFailed);
        }
        self.may_be_dirty.set(true);
        Ok(())
    }
}
