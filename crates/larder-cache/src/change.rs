//! The guest's writes, discards and write-zeroes, where the cache equals the disk at all times (write-through) or
//! does not take writes (write-around, pass-through).
//!
//! The order of writes keeps a crash from leaving a stale byte. Before the disk changes, the cache device says
//! durably that its data of these lines is invalid (the lines are *open*), or that it has none of them. Lines are
//! closed again when both devices have been flushed. A line that is written again and again is opened once.

use std::rc::Rc;

use larder_block::range_lock::{Held, Mode as Hold, Ranges, Ticket};
use larder_block::{ByteLen, ByteRange, Io, IoResult, Operation, Watch, WriteBuf, WriteFlags, ZeroFlags, join};
use larder_policy::policy::{Access, Context};
use smallvec::SmallVec;

use crate::commit::Failed;
use crate::copies::{Room, WriteCopy};
use crate::entry::Entry;
use crate::flushing::Flushing;
use crate::parts::Part;
use crate::place::{Place, Retract};
use crate::shape::{SECTOR, Slot};
use crate::{Cache, Mode, State};

/// Lines of the cache that a piece of a discard or write-zeroes touches at most. If 16 times `unsettled_max` is less,
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
pub(crate) struct Changes {
    ranges: Ranges,
    pub(crate) flushing: Flushing,
}

impl Changes {
    /// Returns the state after a kill, which may have left changes unflushed.
    pub(crate) fn unflushed() -> Self {
        Self {
            flushing: Flushing::unflushed(),
            ..Self::default()
        }
    }

    /// Completes when all changes that are under way now have ended.
    pub(crate) async fn drained(&self) {
        let whole = ByteRange::new(0, u64::MAX >> 1);
        drop(self.ranges.enter(whole, Hold::Exclusive).await);
    }

    /// Locks `range`, so that other changes of it wait.
    pub(crate) async fn enter(&self, range: ByteRange, hold: Hold) -> Held<'_> {
        self.ranges.enter(range, hold).await
    }

    /// Returns whether a change that touches `range` is under way, or waits.
    pub(crate) fn touch(&self, range: ByteRange) -> bool {
        self.ranges.touch(range)
    }
}

impl Watch for Changes {
    fn ended(&self, ticket: Ticket) {
        self.flushing.changed();
        self.ranges.ended(ticket);
    }
}

/// Lines and parts that a write goes to. When the write fails or is cancelled, neither the content of the cache nor
/// that of the disk is known, so the parts are removed from memory. Recovery discards them too, since their lines are
/// open.
struct Writing<'a> {
    cache: &'a Cache,
    places: SmallVec<[(Part, Place<'a>); 2]>,
    context: Context,
}

impl Writing<'_> {
    /// Hides the sectors from readers until the disk has them: a write that fails must not have been seen. Then waits
    /// for present readers, unless the cache has failed: a failed device may keep its readers forever.
    async fn hide(&self) -> Result<(), Failed> {
        for (part, place) in &self.places {
            self.cache.index.borrow_mut().hide(place.slot(), part.sectors);
        }
        let is_read = |(_, place): &(Part, Place<'_>)| self.cache.index.borrow().has_readers(place.slot());
        let is_over = || self.cache.has_failed() || !self.places.iter().any(is_read);
        self.cache.readers.when(is_over).await;
        (!self.cache.has_failed()).then_some(()).ok_or(Failed)
    }

    /// Ends the write successfully: disk and cache have the data.
    fn done(mut self) {
        for (part, place) in self.places.drain(..) {
            self.cache.index.borrow_mut().hide(place.slot(), 0);
            self.cache.is_stored(&place, part, 0, self.context);
        }
    }
}

impl Drop for Writing<'_> {
    fn drop(&mut self) {
        for (part, place) in &self.places {
            self.cache.index.borrow_mut().hide(place.slot(), 0);
            if place.is_old() {
                self.cache.take_sectors(place.slot(), part.sectors);
            }
        }
    }
}

impl Cache {
    pub(crate) fn write_any<'a>(&'a self, range: ByteRange, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        if !self.is_fit(range) || self.is_apart() {
            return self.lower.write(range.start, buffer, flags);
        }
        self.written.add(range);
        if matches!(self.mode.get(), Mode::WriteThrough | Mode::WriteBack) {
            self.uses(range);
        }
        let lines = self.lines_whole(range);
        if !self.keeps_write(range)
            && self.mode.get() != Mode::WriteBack
            && self.has_nothing_of(range)
            && let Some(ticket) = self.changes.ranges.try_share(lines)
        {
            self.fills.forget(range);
            return self
                .lower
                .write(range.start, buffer, flags)
                .watched(&self.changes, ticket);
        }
        Io::task(self.write_steps(range, buffer, flags))
    }

    /// Flushes the disk, and records which changes that covers.
    pub(crate) async fn flush_disk(&self) -> IoResult {
        let flush = self.changes.flushing.begin();
        self.lower.flush().await?;
        flush.done();
        Ok(())
    }

    /// Returns `range`, widened to whole lines.
    fn lines_whole(&self, range: ByteRange) -> ByteRange {
        range.widened(self.shape.line_len())
    }

    /// Returns whether data written to a range may be stored in the cache.
    fn keeps_write(&self, range: ByteRange) -> bool {
        self.mode.get() == Mode::WriteThrough && !self.has_failed() && !self.is_spent(range.len)
    }

    /// Returns whether the cache has failed for good and has no dirty data, so that it is never used again.
    fn is_apart(&self) -> bool {
        self.state.get() == State::Detached && !self.may_be_dirty.get()
    }

    /// Returns whether it is certain without waiting that neither memory has, nor recovery would find, a part of
    /// `range`.
    fn has_nothing_of(&self, range: ByteRange) -> bool {
        if self.has_failed() || self.has_other_size() {
            return false;
        }
        let lines = self.shape.lines_of(range);
        let index = self.index.borrow();
        !self.has_leaving(lines.clone())
            && lines.into_iter().all(|line| {
                let set = self.shape.set_of(line);
                index.is_loaded(set) && index.find(line).is_none()
            })
    }

    async fn write_steps(&self, range: ByteRange, buffer: WriteBuf<'_>, flags: WriteFlags) -> IoResult {
        let lines = self.lines_whole(range);
        let _held = self.changes.ranges.enter(lines, Hold::Exclusive).await;
        // A fill must not store old data of a line during the write.
        self.fills.forget(lines);
        self.fills.landing(lines).await;
        let result = self.write_alone(range, buffer, flags).await;
        self.changes.flushing.changed();
        result
    }

    async fn write_alone(&self, range: ByteRange, buffer: WriteBuf<'_>, flags: WriteFlags) -> IoResult {
        self.undone(Operation::Write, range).await?;
        self.load_range(range, Operation::Write).await?;
        // The following steps handle a cache that fails here.
        let _ = self.retract_unproven(range).await;
        if self.mode.get() == Mode::WriteBack && !self.has_failed() {
            return self.write_back(range, buffer, flags).await;
        }
        let _alone = self.cleaning.busy.enter(self.lines_whole(range), Hold::Exclusive).await;
        // Lines may be dirty from the time of another mode.
        self.make_clean(range).await?;
        if !self.keeps_write(range) {
            return match self.retract(range, Retract::All).await {
                Ok(()) => self.lower.write(range.start, buffer, flags).await,
                Err(Failed) => self.write_past(range, buffer, flags).await,
            };
        }
        let Ok(room) = self.room_for_copy(buffer).await else {
            return self.write_past(range, buffer, flags).await;
        };
        let context = self.context(self.turn_time(), Access::Write, range.len.get());
        let mut writing = Writing {
            cache: self,
            places: SmallVec::new(),
            context,
        };
        let mut commits = self.has_leaving(self.shape.lines_of(range));
        for part in self.shape.parts_of(range) {
            let found = self.index.borrow().find(part.line);
            if let Some(slot) = found {
                self.index.borrow_mut().policy().touch(slot, part.line, context);
                let place = self.place_of(slot);
                commits |= self.open_line(slot, part);
                writing.places.push((part, place));
            }
        }
        if commits && self.commit().await.is_err() {
            drop(writing);
            return self.write_past(range, buffer, flags).await;
        }
        let there = writing.places.len();
        let mut at = 0;
        for part in self.shape.parts_of(range) {
            // The cached lines are in order.
            if writing.places[..there]
                .get(at)
                .is_some_and(|(other, _)| other.line == part.line)
            {
                at += 1;
                continue;
            }
            if self.admits(part.line, context)
                && let Some(place) = self.place_for(part)
            {
                writing.places.push((part, place));
            }
        }
        if writing.hide().await.is_err() {
            drop(writing);
            return self.write_past(range, buffer, flags).await;
        }
        if writing.places.is_empty() {
            // No copy is needed, so the room is free.
            drop(room);
            return self.lower.write(range.start, buffer, flags).await;
        }
        let memory = room.copy(buffer);
        let kept: SmallVec<[Io<'_>; 2]> = writing
            .places
            .iter()
            .map(|(part, place)| self.write_slot(place, part, range, &memory))
            .collect();
        let mut on_disk = Ok(());
        let disk = Io::task(async {
            let bytes = WriteBuf::new(&memory[..buffer.len()]);
            on_disk = self.lower.write(range.start, bytes, flags).await;
            Ok(())
        });
        let both: SmallVec<[Io<'_>; 2]> = SmallVec::from_buf([disk, Io::task(join(kept))]);
        let in_cache = join(both).await;
        match in_cache {
            Ok(()) if on_disk.is_ok() => writing.done(),
            Ok(()) => {}
            Err(error) => self.fail(&error),
        }
        on_disk
    }

    /// Reserves room for a copy of a guest's write. The holder waits for no other write.
    pub(crate) async fn room_for_copy(&self, buffer: WriteBuf<'_>) -> Result<Room, Failed> {
        let room = self.fast.copies.reserve(buffer.len(), || self.has_failed()).await;
        room.ok_or(Failed)
    }

    /// Writes `part` of a request for `range` from `memory`, which has the whole request, to its slot.
    pub(crate) fn write_slot<'a>(
        &'a self,
        place: &Place<'_>,
        part: &Part,
        range: ByteRange,
        memory: &Rc<WriteCopy>,
    ) -> Io<'a> {
        let at = self.data_at(place.slot(), part.range.start);
        let from = (part.range.start - range.start).as_usize();
        let bytes = from..from + part.range.len.as_usize();
        Io::task(self.fast.write(at, Rc::clone(memory), bytes, WriteFlags::NONE))
    }

    /// Queues the record that opens a slot before a change of `part`, if recovery would otherwise trust its content.
    /// Returns whether a commit must be waited for.
    fn open_line(&self, slot: Slot, part: Part) -> bool {
        let Some(place) = self.ledger.borrow().get(slot).copied() else {
            return false;
        };
        // Sectors that were cleaned must not be taken for dirty any more.
        let dirty = place.last.dirty & self.index.borrow().dirty(slot);
        let is_believed = !place.last.open && place.last.valid & part.sectors != 0;
        if is_believed || (place.last.dirty & !dirty) & part.sectors != 0 {
            self.queue(
                slot,
                Entry {
                    open: true,
                    dirty,
                    ..place.last
                },
            );
            return true;
        }
        place.commits > 0
    }

    /// Writes all dirty data of `range` to the disk. The range is loaded, and the caller has locked it, also in
    /// [`crate::clean::Cleaning::busy`].
    async fn make_clean(&self, range: ByteRange) -> IoResult {
        // A failed cache's dirty data is handled before the disk changes.
        if !self.may_be_dirty.get() || self.has_failed() {
            return Ok(());
        }
        if self.has_loose(range) && self.harden_queued().await.is_err() {
            return Ok(());
        }
        self.clean_range(Operation::Write, range).await
    }

    pub(crate) fn discard_any(&self, range: ByteRange) -> Io<'_> {
        if !self.is_fit(range) || self.is_apart() {
            return self.lower.discard(range);
        }
        Io::task(self.clear_steps(range, Clear::Discard))
    }

    pub(crate) fn write_zeroes_any(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        if !self.is_fit(range) || self.is_apart() {
            return self.lower.write_zeroes(range, flags);
        }
        Io::task(self.clear_steps(range, Clear::WriteZeroes(flags)))
    }

    async fn clear_steps(&self, range: ByteRange, clear: Clear) -> IoResult {
        self.written.forget(range);
        let mut rest = range;
        while !rest.is_empty() {
            let len_max = ByteLen::new(self.end().get() / PIECES_PER_DISK).max(PIECE_LEN_MIN);
            let part = rest.intersection(rest.start.range(len_max));
            self.load_range(part, clear.operation()).await?;
            let piece = self.whole_below(self.piece_of(part), rest);
            self.clear_piece(piece, clear).await?;
            rest = ByteRange::between(piece.end(), rest.end());
        }
        Ok(())
    }

    /// Returns the beginning of `range`, with a bounded number of cached lines, which bounds memory. A range without
    /// cached lines is one piece, however long it is.
    pub(crate) fn piece_of(&self, range: ByteRange) -> ByteRange {
        let index = self.index.borrow();
        let mut cached = index.lines.within(self.shape.lines_of(range));
        match cached.nth(PIECE_LINES.min(16 * self.unsettled_max.max(1))) {
            Some(line) => ByteRange::between(range.start, self.range_of(line..line + 1).start),
            None => range,
        }
    }

    /// Returns `piece`, the beginning of `range`, with its end at a multiple of the disk's discard granularity: a
    /// cluster that two pieces share would not be discarded by either.
    fn whole_below(&self, piece: ByteRange, range: ByteRange) -> ByteRange {
        let granularity = u64::from(self.lower.geometry().discard_granularity.max(1)).max(1 << self.shape.line_bits);
        let before = piece.end().align_down(granularity);
        let end = match before > range.start {
            _ if piece.end() == range.end() => piece.end(),
            true => before,
            false => (range.start + ByteLen::new(1)).align_up(granularity).min(range.end()),
        };
        ByteRange::between(range.start, end)
    }

    async fn clear_piece(&self, piece: ByteRange, clear: Clear) -> IoResult {
        let operation = clear.operation();
        let lines = self.lines_whole(piece);
        let _held = self.changes.ranges.enter(lines, Hold::Exclusive).await;
        self.fills.forget(piece);
        self.undone(operation, piece).await?;
        self.load_range(piece, operation).await?;
        let _alone = self.cleaning.busy.enter(lines, Hold::Exclusive).await;
        // Clean data is removed first. If the disk's operation fails, dirty data is still the content of its sectors.
        if self.retract(piece, Retract::Clean).await.is_err() {
            self.leave_to_disk(operation, piece).await?;
        }
        let cleared = match clear {
            Clear::Discard => self.lower.discard(piece),
            Clear::WriteZeroes(flags) => self.lower.write_zeroes(piece, flags),
        };
        let result = cleared.await;
        self.changes.flushing.changed();
        result?;
        if self.has_only(piece) {
            // Dirty data may be removed once the disk has newer data durably.
            self.flush_disk().await?;
            if self.retract(piece, Retract::All).await.is_err() {
                self.detached(operation, piece).await?;
                return self.outdate(operation, piece).await;
            }
        }
        self.undone(operation, piece).await
    }

    /// Returns whether the cache can serve a request: inside the disk, and of whole sectors.
    pub(crate) fn is_fit(&self, range: ByteRange) -> bool {
        !range.is_empty() && range.is_aligned(SECTOR) && range.checked_end().is_some_and(|end| end <= self.end())
    }
}
