//! The guest's writes, discards and write-zeroes, when the cache agrees with the disk at all times (write-through), or
//! has nothing of what is written (write-around, pass-through).
//!
//! The order that keeps a crash from leaving an old byte: before the disk changes, the cache device says durably that what
//! it has of these lines is not to be believed (they are *open*), or has nothing of them. They are closed again when both
//! devices have been flushed. A line that is written again and again is opened once.

use std::cell::Cell;

use larder_block::range_lock::{Mode as Hold, Ranges, Ticket};
use larder_block::{ByteRange, Io, IoResult, Operation, Watch, WriteBuf, WriteFlags, ZeroFlags, join};
use larder_policy::policy::{Access, Context};
use smallvec::SmallVec;

use crate::entry::Entry;
use crate::parts::Part;
use crate::place::Place;
use crate::shape::{SECTOR, Slot};
use crate::{Cache, Mode, State};

/// Discards and write-zeroes are done in pieces of this many lines, so that nobody waits for a whole disk.
const PIECE_LINES: u64 = 16 << 10;

/// The changes that are under way.
#[derive(Default)]
pub(crate) struct Changes {
    ranges: Ranges,
    /// The disk has completed changes that no flush has covered which had begun by now.
    unflushed: Cell<bool>,
    /// Flushes of the disk that are under way.
    flushes: Cell<u32>,
}

/// A flush of the disk that is under way, or was given up.
struct Flush<'a> {
    changes: &'a Changes,
    /// There is something that it has not covered if it does not succeed.
    uncovered: bool,
}

impl<'a> Flush<'a> {
    fn begin(changes: &'a Changes) -> Self {
        changes.flushes.set(changes.flushes.get() + 1);
        Self {
            changes,
            uncovered: changes.unflushed.take(),
        }
    }
}

impl Drop for Flush<'_> {
    fn drop(&mut self) {
        let changes = self.changes;
        changes.flushes.set(changes.flushes.get() - 1);
        changes.unflushed.set(changes.unflushed.get() || self.uncovered);
    }
}

impl Changes {
    /// As after the death of a process that may have left something unflushed.
    pub(crate) fn unflushed() -> Self {
        Self {
            unflushed: Cell::new(true),
            ..Self::default()
        }
    }

    /// A change that touches `range` is under way, or waits.
    pub(crate) fn touch(&self, range: ByteRange) -> bool {
        self.ranges.touch(range)
    }

    /// Nothing that the disk has completed waits for a flush to end.
    pub(crate) fn are_flushed(&self) -> bool {
        !self.unflushed.get() && self.flushes.get() == 0
    }
}

impl Watch for Changes {
    fn ended(&self, ticket: Ticket) {
        self.unflushed.set(true);
        self.ranges.ended(ticket);
    }
}

/// The lines that a write goes to, and the parts of it. What of a write that has failed, or was given up, is in the cache
/// nobody knows, nor what the disk has: it is taken out. A crash does not believe it either, for it is open.
struct Writing<'a> {
    cache: &'a Cache,
    places: SmallVec<[(Part, Place<'a>); 2]>,
    context: Context,
}

impl Writing<'_> {
    /// Keeps readers from what is going to be written: if the disk does not take it, they must not have seen it.
    async fn hide(&self) {
        for (part, place) in &self.places {
            self.cache.index.borrow_mut().hide(place.slot(), part.sectors);
        }
        let is_read = |(_, place): &(Part, Place<'_>)| self.cache.index.borrow().has_readers(place.slot());
        self.cache.readers.until(|| !self.places.iter().any(is_read)).await;
    }

    /// Disk and cache have it.
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
        let lines = self.lines_whole(range);
        if !self.keeps_writes()
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

    /// Flushes the disk.
    pub(crate) async fn flush_disk(&self) -> IoResult {
        let mut flush = Flush::begin(&self.changes);
        self.lower.flush().await?;
        flush.uncovered = false;
        Ok(())
    }

    /// `range`, as far as whole lines reach.
    fn lines_whole(&self, range: ByteRange) -> ByteRange {
        range.widened(self.shape.line_len())
    }

    /// Whether what is written may be brought into the cache.
    fn keeps_writes(&self) -> bool {
        self.mode.get() == Mode::WriteThrough && !self.has_failed()
    }

    /// The cache is not used any more, and never will be.
    fn is_apart(&self) -> bool {
        self.state.get() == State::Detached
    }

    /// Whether it is known at once that neither memory nor a crash would find anything of `range` in the cache.
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
        let _held = self
            .changes
            .ranges
            .enter(self.lines_whole(range), Hold::Exclusive)
            .await;
        self.fills.forget(range);
        self.fills.landing(range).await;
        let result = self.write_alone(range, buffer, flags).await;
        self.changes.unflushed.set(true);
        result
    }

    async fn write_alone(&self, range: ByteRange, buffer: WriteBuf<'_>, flags: WriteFlags) -> IoResult {
        self.load_range(range, Operation::Write).await?;
        if !self.keeps_writes() {
            if self.retract(range).await.is_err() {
                self.detached(Operation::Write, range).await?;
            }
            return self.lower.write(range.start, buffer, flags).await;
        }
        let context = self.context(Access::Write, range.len.get());
        let mut writing = Writing {
            cache: self,
            places: SmallVec::new(),
            context,
        };
        let mut commits = self.has_leaving(self.shape.lines_of(range));
        for part in self.shape.parts_of(range) {
            let found = self.index.borrow().find(part.line);
            if let Some(slot) = found {
                self.index.borrow_mut().policy.touch(slot, part.line, context);
                let place = self.place_of(slot);
                commits |= self.open_line(slot, part);
                writing.places.push((part, place));
            }
        }
        if commits && self.commit().await.is_err() {
            self.detached(Operation::Write, range).await?;
            return self.lower.write(range.start, buffer, flags).await;
        }
        for part in self.shape.parts_of(range) {
            let is_there = writing.places.iter().any(|(other, _)| other.line == part.line);
            if !is_there
                && self.admits(part.line, context)
                && let Some(place) = self.place_for(part)
            {
                writing.places.push((part, place));
            }
        }
        writing.hide().await;
        let piece = |part: &Part| {
            let from = (part.range.start - range.start).as_usize();
            buffer.slice(from, part.range.len.as_usize())
        };
        let kept: SmallVec<[Io<'_>; 2]> = writing
            .places
            .iter()
            .map(|(part, place)| {
                let at = self.data_at(place.slot(), part.range.start);
                self.fast.write(at, piece(part), WriteFlags::NONE)
            })
            .collect();
        let mut on_disk = Ok(());
        let disk = Io::task(async {
            on_disk = self.lower.write(range.start, buffer, flags).await;
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

    /// Has a slot be open before a change of `part`, if a crash would otherwise believe what it has; whether a commit must
    /// be waited for.
    fn open_line(&self, slot: Slot, part: Part) -> bool {
        let Some(place) = self.ledger.borrow().get(slot).copied() else {
            return false;
        };
        if !place.last.open && place.last.valid & part.sectors != 0 {
            self.queue(
                slot,
                Entry {
                    open: true,
                    ..place.last
                },
            );
            return true;
        }
        place.commits > 0
    }

    pub(crate) fn discard_any(&self, range: ByteRange) -> Io<'_> {
        if !self.is_fit(range) || self.is_apart() {
            return self.lower.discard(range);
        }
        Io::task(self.clear_steps(range, Operation::Discard, |piece| self.lower.discard(piece)))
    }

    pub(crate) fn write_zeroes_any(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        if !self.is_fit(range) || self.is_apart() {
            return self.lower.write_zeroes(range, flags);
        }
        Io::task(self.clear_steps(range, Operation::WriteZeroes, move |piece| {
            self.lower.write_zeroes(piece, flags)
        }))
    }

    async fn clear_steps<'a>(
        &'a self,
        range: ByteRange,
        operation: Operation,
        clear: impl Fn(ByteRange) -> Io<'a>,
    ) -> IoResult {
        let mut rest = range;
        while !rest.is_empty() {
            let end = (self.shape.line_at(rest.start) + PIECE_LINES) << self.shape.line_bits;
            let piece = rest.intersection(ByteRange::new(rest.start.get(), end - rest.start.get()));
            let _held = self
                .changes
                .ranges
                .enter(self.lines_whole(piece), Hold::Exclusive)
                .await;
            self.fills.forget(piece);
            self.load_range(piece, operation).await?;
            if self.retract(piece).await.is_err() {
                self.detached(operation, piece).await?;
            }
            let result = clear(piece).await;
            self.changes.unflushed.set(true);
            result?;
            rest = ByteRange::between(piece.end(), rest.end());
        }
        Ok(())
    }

    /// Whether the request is one that the cache can look at: on the disk, and of whole sectors.
    pub(crate) fn is_fit(&self, range: ByteRange) -> bool {
        !range.is_empty() && range.is_aligned(SECTOR) && range.checked_end().is_some_and(|end| end <= self.end())
    }
}
