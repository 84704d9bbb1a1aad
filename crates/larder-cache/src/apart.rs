//! Changes of the disk past a failed cache that may have dirty data. No reader may get data that the next opening of
//! the cache would discard. So the dirty lines of a range are written to the disk before it changes, and the witness
//! records that. Dirty data that the cache device can no longer read can still be overwritten: readers do not get the
//! disk's data until the disk has the new data durably, and that is recorded.

use std::ops::Range;

use larder_block::range_lock::Mode as Hold;
use larder_block::{ByteRange, IoResult, Operation, WriteBuf, WriteFlags};

use crate::Cache;
use crate::parts::runs;
use crate::shape::Line;

/// The most lines that an error lists one by one when they are lost with a cache.
const TOLD_MAX: usize = 1024;

impl Cache {
    /// Writes to `range`, which the caller has locked, past a failed cache.
    pub(crate) async fn write_apart(&self, range: ByteRange, buffer: WriteBuf<'_>, flags: WriteFlags) -> IoResult {
        let lines = range.widened(self.shape.line_len());
        let _alone = self.cleaning.busy.enter(lines, Hold::Exclusive).await;
        self.write_past(range, buffer, flags).await
    }

    /// Writes to `range` past a failed cache; the caller has locked its lines in [`crate::clean::Cleaning::busy`]
    /// too.
    pub(crate) async fn write_past(&self, range: ByteRange, buffer: WriteBuf<'_>, flags: WriteFlags) -> IoResult {
        let operation = Operation::Write;
        self.leave_to_disk(operation, range).await?;
        self.lower.write(range.start, buffer, flags).await?;
        self.changes.flushing.changed();
        if self.has_only(range) {
            self.flush_disk().await?;
            self.outdate(operation, range).await?;
        }
        Ok(())
    }

    /// Prepares a change of the disk in `range`, which the caller has locked, also in
    /// [`crate::clean::Cleaning::busy`]: writes the range's dirty lines to the disk, and records that for the next
    /// opening.
    ///
    /// Dirty data that cannot be read is not changed: readers do not get the disk's data until [`Cache::outdate`].
    pub(crate) async fn leave_to_disk(&self, operation: Operation, range: ByteRange) -> IoResult {
        self.detached(operation, range).await?;
        if !self.has_only(range) || self.supersede(operation, range).await.is_ok() {
            return Ok(());
        }
        let mut on_disk: Vec<ByteRange> = Vec::new();
        let mut rest = range;
        let dirty_lines = self.index.borrow().dirty.within(self.shape.lines_of(range), usize::MAX);
        for line in dirty_lines {
            let part = self.shape.part_of(line, range);
            let index = self.index.borrow();
            let dirty = index.find(line).map_or(0, |slot| index.dirty(slot));
            for (_, piece) in runs(part, dirty).filter(|(is_dirty, _)| *is_dirty) {
                on_disk.push(ByteRange::between(rest.start, piece.start));
                rest = ByteRange::between(piece.end(), range.end());
            }
        }
        on_disk.push(rest);
        on_disk.retain(|piece| !piece.is_empty());
        for piece in on_disk {
            self.note_superseded(operation, piece).await?;
        }
        Ok(())
    }

    /// Writes the dirty data of the lines of a range to the disk, and records that it is superseded.
    async fn supersede(&self, operation: Operation, range: ByteRange) -> IoResult {
        self.clean_range(operation, range).await?;
        let lines = self.shape.lines_of(range);
        let whole = range.widened(self.shape.line_len());
        self.note_superseded(operation, whole).await?;
        self.are_superseded(lines);
        Ok(())
    }

    /// Marks the cached data of some lines as superseded. No other line of a failed cache becomes dirty.
    fn are_superseded(&self, lines: Range<Line>) {
        let mut superseded = self.superseded.borrow_mut();
        let (index, leaving) = (self.index.borrow(), self.leaving.borrow());
        let cached = index.lines.within(lines.clone());
        let left = leaving.within(lines).map(|(line, _)| line);
        cached.chain(left).for_each(|line| {
            superseded.insert(line);
        });
    }

    /// Returns the ranges of the dirty lines as text for messages.
    pub(crate) fn dirty_text(&self) -> String {
        let index = self.index.borrow();
        let lines = index.dirty.within(0..Line::MAX, TOLD_MAX);
        let runs = lines.chunk_by(|line, next| *next == line + 1);
        let ranges = runs.map(|run| self.range_of(run[0]..run[run.len() - 1] + 1).to_string());
        let told = ranges.collect::<Vec<_>>().join(", ");
        match index.dirty.len() - lines.len() as u64 {
            0 => told,
            more => format!("{told}, and {more} more lines after them"),
        }
    }

    /// Records that the disk has newer data of `range`, durably, than the cache's dirty data. Readers find the disk's
    /// data from now on, and so does the next opening. The range is locked as for [`Self::leave_to_disk`].
    pub(crate) async fn outdate(&self, operation: Operation, range: ByteRange) -> IoResult {
        self.forget(range);
        let lines = self.shape.lines_of(range);
        let is_all = self.index.borrow().dirty.within(lines.clone(), 1).is_empty();
        let gone = match is_all {
            true => range.widened(self.shape.line_len()),
            false => range,
        };
        {
            let mut undoing = self.undoing.borrow_mut();
            undoing.retain(|(other, _)| !gone.contains(*other));
            // No record of the removal will be written.
            undoing.push((gone, u64::MAX));
        }
        self.undone(operation, gone).await?;
        if is_all {
            self.are_superseded(lines);
        }
        Ok(())
    }
}
