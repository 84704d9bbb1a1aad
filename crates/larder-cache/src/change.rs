//! The guest's writes, discards and write-zeroes, where the cache equals the disk at all times (write-through) or
//! does not take writes (write-around, pass-through).
//!
//! The order of writes keeps a crash from leaving a stale byte. Before the disk changes, the cache device says
//! durably that its data of these lines is invalid (the lines are *open*), or that it has none of them. Lines are
//! closed again when both devices have been flushed. A line that is written again and again is opened once.

use std::rc::Rc;

use larder_block::range_lock::{LockTicket, RangeLockGuard, RangeLockMode as DiskLocks, RangeLocks};
use larder_block::{ByteLen, ByteRange, Io, IoResult, Operation, RequestWatch, WriteBuf, WriteFlags, ZeroFlags, join};
use larder_policy::policy::{AccessContext, AccessKind};
use smallvec::SmallVec;

use crate::commit::CacheFailed;
use crate::copy_pool::{CopyReservation, WriteCopy};
use crate::entry::Entry;
use crate::flush_tracker::FlushTracker;
use crate::layout::{SECTOR, Slot};
use crate::line_parts::LinePart;
use crate::slot_allocation::{Invalidation, WriteSlot};
use crate::{Cache, CacheMode, DeviceState};

/// Lines of the cache that a piece of a discard or write-zeroes touches at most. If 16 times `unpersisted_max` is less,
/// that is the bound.
const PIECE_LINES: usize = 16 << 10;

/// The longest piece of a discard or write-zeroes is the disk divided by this, or [`PIECE_LEN_MIN`] if that is
/// longer: a write that overlaps a piece waits until the disk below has discarded it.
const PIECES_PER_DISK: u64 = 256;
const PIECE_LEN_MIN: ByteLen = ByteLen::mib(64);

/// Change without data.
#[derive(Clone, Copy)]
enum Clear {
    Discard,
    WriteZeroes(ZeroFlags),
}

impl Clear {
    fn operation(self) -> Operation {
        match self {
            Self::Discard => Operation::Discard,
            Self::WriteZeroes(_) => Operation::WriteZeroes,
        }
    }
}

/// Changes of the disk that are under way.
#[derive(Default)]
pub(crate) struct DiskChanges {
    ranges: RangeLocks,
    pub(crate) flushing: FlushTracker,
}

impl DiskChanges {
    /// Returns the state after a kill, which may have left changes unflushed.
    pub(crate) fn unflushed() -> Self {
        Self { flushing: FlushTracker::unflushed(), ..Self::default() }
    }

    /// Completes when all changes that are under way now have ended.
    pub(crate) async fn wait_drained(&self) {
        let everything = ByteRange::new(0, u64::MAX >> 1);
        drop(self.ranges.lock(everything, DiskLocks::Exclusive).await);
    }

    /// Locks `range`, so that other changes of it wait.
    pub(crate) async fn lock(&self, range: ByteRange, hold: DiskLocks) -> RangeLockGuard<'_> {
        self.ranges.lock(range, hold).await
    }

    /// Returns whether a change that touches `range` is under way, or waits.
    pub(crate) fn overlaps(&self, range: ByteRange) -> bool {
        self.ranges.overlaps(range)
    }
}

impl RequestWatch for DiskChanges {
    fn request_ended(&self, ticket: LockTicket) {
        self.flushing.record_change();
        self.ranges.request_ended(ticket);
    }
}

/// Lines and parts that a write goes to. When the write fails or is cancelled, neither the content of the cache nor
/// that of the disk is known, so the parts are removed from memory. Recovery discards them too, since their lines are
/// open.
struct SlotWrites<'a> {
    cache: &'a Cache,
    targets: SmallVec<[(LinePart, WriteSlot<'a>); 2]>,
    context: AccessContext,
}

impl SlotWrites<'_> {
    /// Hides the sectors from readers until the disk has them: a write that fails must not have been seen. Then waits
    /// for present readers, unless the cache has failed: a failed device may keep its readers forever.
    async fn hide(&self) -> Result<(), CacheFailed> {
        for (part, target) in &self.targets {
            self.cache.index.borrow_mut().hide(target.slot(), part.sectors);
        }
        let has_readers =
            |(_, target): &(LinePart, WriteSlot<'_>)| self.cache.index.borrow().has_readers(target.slot());
        let is_over = || self.cache.has_failed() || !self.targets.iter().any(has_readers);
        self.cache.reader_done.when(is_over).await;
        (!self.cache.has_failed()).then_some(()).ok_or(CacheFailed)
    }

    /// Ends the write successfully: disk and cache have the data.
    fn finish(mut self) {
        for (part, target) in self.targets.drain(..) {
            self.cache.index.borrow_mut().hide(target.slot(), 0);
            self.cache.finish_store(&target, part, 0, self.context);
        }
    }
}

impl Drop for SlotWrites<'_> {
    fn drop(&mut self) {
        for (part, target) in &self.targets {
            self.cache.index.borrow_mut().hide(target.slot(), 0);
            if target.was_cached() {
                self.cache.remove_sectors(target.slot(), part.sectors);
            }
        }
    }
}

impl Cache {
    pub(crate) fn write_any<'a>(&'a self, range: ByteRange, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        if !self.is_cacheable(range) || self.is_retired() {
            return self.lower.write(range.start, buffer, flags);
        }
        self.recent_writes.record(range);
        if matches!(self.mode.get(), CacheMode::WriteThrough | CacheMode::WriteBack) {
            self.record_use(range);
        }
        let lines = self.align_to_lines(range);
        if !self.stores_write(range)
            && self.mode.get() != CacheMode::WriteBack
            && self.is_absent(range)
            && let Some(ticket) = self.changes.ranges.try_lock_shared(lines)
        {
            self.fills.invalidate(range);
            return self.lower.write(range.start, buffer, flags).watched(&self.changes, ticket);
        }
        Io::task(self.write_steps(range, buffer, flags))
    }

    /// Flushes the disk, and records which changes that covers.
    pub(crate) async fn flush_disk(&self) -> IoResult {
        let flush = self.changes.flushing.begin_flush();
        self.lower.flush().await?;
        flush.finish();
        Ok(())
    }

    /// Returns `range`, widened to whole lines.
    fn align_to_lines(&self, range: ByteRange) -> ByteRange {
        range.widened(self.layout.line_len())
    }

    /// Returns whether data written to a range may be stored in the cache.
    fn stores_write(&self, range: ByteRange) -> bool {
        self.mode.get() == CacheMode::WriteThrough && !self.has_failed() && !self.exceeds_write_budget(range.len)
    }

    /// Returns whether the cache has failed for good and has no dirty data, so that it is never used again.
    fn is_retired(&self) -> bool {
        self.state.get() == DeviceState::FailedRecorded && !self.may_be_dirty.get()
    }

    /// Returns whether it is certain without waiting that neither memory has, nor recovery would find, a part of
    /// `range`.
    fn is_absent(&self, range: ByteRange) -> bool {
        if self.has_failed() || self.has_size_changed() {
            return false;
        }
        let lines = self.layout.lines_of(range);
        let index = self.index.borrow();
        !self.has_pending_removal(lines.clone())
            && lines.into_iter().all(|line| {
                let set = self.layout.set_of(line);
                index.is_loaded(set) && index.find(line).is_none()
            })
    }

    async fn write_steps(&self, range: ByteRange, buffer: WriteBuf<'_>, flags: WriteFlags) -> IoResult {
        let lines = self.align_to_lines(range);
        let _held = self.changes.ranges.lock(lines, DiskLocks::Exclusive).await;
        // A fill must not store old data of a line during the write.
        self.fills.invalidate(lines);
        self.fills.wait_stores(lines).await;
        let result = self.write_locked(range, buffer, flags).await;
        self.changes.flushing.record_change();
        result
    }

    async fn write_locked(&self, range: ByteRange, buffer: WriteBuf<'_>, flags: WriteFlags) -> IoResult {
        self.wait_dropped_dirty(Operation::Write, range).await?;
        self.load_range(range, Operation::Write).await?;
        // The following steps handle a cache that fails here.
        let _ = self.invalidate_unproven(range).await;
        if self.mode.get() == CacheMode::WriteBack && !self.has_failed() {
            return self.write_back(range, buffer, flags).await;
        }
        let _exclusive = self.cleaner.busy.lock(self.align_to_lines(range), DiskLocks::Exclusive).await;
        // Lines may be dirty from the time of another mode.
        self.clean_before_change(range).await?;
        if !self.stores_write(range) {
            return match self.invalidate(range, Invalidation::All).await {
                Ok(()) => self.lower.write(range.start, buffer, flags).await,
                Err(CacheFailed) => self.write_through_failed_cache_locked(range, buffer, flags).await,
            };
        }
        let Ok(room) = self.reserve_copy(buffer).await else {
            return self.write_through_failed_cache_locked(range, buffer, flags).await;
        };
        let context = self.context(self.turn_time(), AccessKind::Write, range.len.get());
        let mut writing = SlotWrites { cache: self, targets: SmallVec::new(), context };
        let mut commits = self.has_pending_removal(self.layout.lines_of(range));
        for part in self.layout.parts_of(range) {
            let found = self.index.borrow().find(part.line);
            if let Some(slot) = found {
                self.index.borrow_mut().policy().touch(slot, part.line, context);
                let target = self.pin_for_write(slot);
                commits |= self.reopen_line(slot, part);
                writing.targets.push((part, target));
            }
        }
        if commits && self.commit().await.is_err() {
            drop(writing);
            return self.write_through_failed_cache_locked(range, buffer, flags).await;
        }
        let cached_count = writing.targets.len();
        let mut at = 0;
        for part in self.layout.parts_of(range) {
            // The cached lines are in order.
            if writing.targets[..cached_count].get(at).is_some_and(|(other, _)| other.line == part.line) {
                at += 1;
                continue;
            }
            if self.should_admit(part.line, context)
                && let Some(target) = self.slot_for_store(part)
            {
                writing.targets.push((part, target));
            }
        }
        if writing.hide().await.is_err() {
            drop(writing);
            return self.write_through_failed_cache_locked(range, buffer, flags).await;
        }
        if writing.targets.is_empty() {
            // No copy is needed, so the room is free.
            drop(room);
            return self.lower.write(range.start, buffer, flags).await;
        }
        let memory = room.copy(buffer);
        let cache_writes: SmallVec<[Io<'_>; 2]> =
            writing.targets.iter().map(|(part, target)| self.write_part(target, part, range, &memory)).collect();
        let mut on_disk = Ok(());
        let disk = Io::task(async {
            let bytes = WriteBuf::new(&memory[..buffer.len()]);
            on_disk = self.lower.write(range.start, bytes, flags).await;
            Ok(())
        });
        let both: SmallVec<[Io<'_>; 2]> = SmallVec::from_buf([disk, Io::task(join(cache_writes))]);
        let in_cache = join(both).await;
        match in_cache {
            Ok(()) if on_disk.is_ok() => writing.finish(),
            Ok(()) => {}
            Err(error) => self.fail(&error),
        }
        on_disk
    }

    /// Reserves room for a copy of a guest's write. The holder waits for no other write.
    pub(crate) async fn reserve_copy(&self, buffer: WriteBuf<'_>) -> Result<CopyReservation, CacheFailed> {
        let room = self.fast.copies.reserve(buffer.len(), || self.has_failed()).await;
        room.ok_or(CacheFailed)
    }

    /// Writes `part` of a request for `range` from `memory`, which has the whole request, to its slot.
    pub(crate) fn write_part<'a>(
        &'a self,
        target: &WriteSlot<'_>,
        part: &LinePart,
        range: ByteRange,
        memory: &Rc<WriteCopy>,
    ) -> Io<'a> {
        let at = self.data_at(target.slot(), part.range.start);
        let from = (part.range.start - range.start).as_usize();
        let bytes = from..from + part.range.len.as_usize();
        Io::task(self.fast.write(at, Rc::clone(memory), bytes, WriteFlags::NONE))
    }

    /// Queues the record that opens a slot before a change of `part`, if recovery would otherwise trust its content.
    /// Returns whether a commit must be waited for.
    fn reopen_line(&self, slot: Slot, part: LinePart) -> bool {
        let Some(state) = self.ledger.borrow().get(slot).copied() else {
            return false;
        };
        // Sectors that were cleaned must not be taken for dirty any more.
        let dirty = state.last.dirty & self.index.borrow().dirty(slot);
        let is_trusted = !state.last.open && state.last.valid & part.sectors != 0;
        if is_trusted || (state.last.dirty & !dirty) & part.sectors != 0 {
            self.queue(slot, Entry { open: true, dirty, ..state.last });
            return true;
        }
        state.commits > 0
    }

    /// Writes all dirty data of `range` to the disk. The range is loaded, and the caller has locked it, also in
    /// [`crate::clean::Cleaner::busy`].
    async fn clean_before_change(&self, range: ByteRange) -> IoResult {
        // A failed cache's dirty data is handled before the disk changes.
        if !self.may_be_dirty.get() || self.has_failed() {
            return Ok(());
        }
        if self.has_unflushed_records(range) && self.harden_queued().await.is_err() {
            return Ok(());
        }
        self.clean_range(Operation::Write, range).await
    }

    pub(crate) fn discard_any(&self, range: ByteRange) -> Io<'_> {
        if !self.is_cacheable(range) || self.is_retired() {
            return self.lower.discard(range);
        }
        Io::task(self.clear_steps(range, Clear::Discard))
    }

    pub(crate) fn write_zeroes_any(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        if !self.is_cacheable(range) || self.is_retired() {
            return self.lower.write_zeroes(range, flags);
        }
        Io::task(self.clear_steps(range, Clear::WriteZeroes(flags)))
    }

    async fn clear_steps(&self, range: ByteRange, clear: Clear) -> IoResult {
        self.recent_writes.remove_range(range);
        let mut rest = range;
        while !rest.is_empty() {
            let len_max = ByteLen::new(self.end().get() / PIECES_PER_DISK).max(PIECE_LEN_MIN);
            let part = rest.intersection(rest.start.range(len_max));
            self.load_range(part, clear.operation()).await?;
            let piece = self.align_piece_end(self.piece_of(part), rest);
            self.clear_piece(piece, clear).await?;
            rest = ByteRange::between(piece.end(), rest.end());
        }
        Ok(())
    }

    /// Returns the beginning of `range`, with a bounded number of cached lines, which bounds memory. A range without
    /// cached lines is one piece, however long it is.
    pub(crate) fn piece_of(&self, range: ByteRange) -> ByteRange {
        let index = self.index.borrow();
        let mut cached = index.lines.within(self.layout.lines_of(range));
        match cached.nth(PIECE_LINES.min(16 * self.unpersisted_max.max(1))) {
            Some(line) => ByteRange::between(range.start, self.range_of(line..line + 1).start),
            None => range,
        }
    }

    /// Returns `piece`, the beginning of `range`, with its end at a multiple of the disk's discard granularity: a
    /// cluster that two pieces share would not be discarded by either.
    fn align_piece_end(&self, piece: ByteRange, range: ByteRange) -> ByteRange {
        let granularity = u64::from(self.lower.geometry().discard_granularity.max(1)).max(1 << self.layout.line_bits);
        let aligned_end = piece.end().align_down(granularity);
        let end = match aligned_end > range.start {
            _ if piece.end() == range.end() => piece.end(),
            true => aligned_end,
            false => (range.start + ByteLen::new(1)).align_up(granularity).min(range.end()),
        };
        ByteRange::between(range.start, end)
    }

    async fn clear_piece(&self, piece: ByteRange, clear: Clear) -> IoResult {
        let operation = clear.operation();
        let lines = self.align_to_lines(piece);
        let _held = self.changes.ranges.lock(lines, DiskLocks::Exclusive).await;
        self.fills.invalidate(piece);
        self.wait_dropped_dirty(operation, piece).await?;
        self.load_range(piece, operation).await?;
        let _exclusive = self.cleaner.busy.lock(lines, DiskLocks::Exclusive).await;
        // Clean data is removed first. If the disk's operation fails, dirty data is still the content of its sectors.
        if self.invalidate(piece, Invalidation::Clean).await.is_err() {
            self.flush_range_to_disk(operation, piece).await?;
        }
        let cleared = match clear {
            Clear::Discard => self.lower.discard(piece),
            Clear::WriteZeroes(flags) => self.lower.write_zeroes(piece, flags),
        };
        let result = cleared.await;
        self.changes.flushing.record_change();
        result?;
        if self.has_dirty_data(piece) {
            // Dirty data may be removed once the disk has newer data durably.
            self.flush_disk().await?;
            if self.invalidate(piece, Invalidation::All).await.is_err() {
                self.wait_failure_recorded(operation, piece).await?;
                return self.supersede_dirty(operation, piece).await;
            }
        }
        self.wait_dropped_dirty(operation, piece).await
    }

    /// Returns whether the cache can serve a request: inside the disk, and of whole sectors.
    pub(crate) fn is_cacheable(&self, range: ByteRange) -> bool {
        !range.is_empty() && range.is_aligned(SECTOR) && range.checked_end().is_some_and(|end| end <= self.end())
    }
}
