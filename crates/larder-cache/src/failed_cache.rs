//! Changes of the disk past a failed cache that may have dirty data. No reader may get data that the next opening of
//! the cache would discard. So the dirty lines of a range are written to the disk before it changes, and the witness
//! records that. Dirty data that the cache device can no longer read can still be overwritten: readers do not get the
//! disk's data until the disk has the new data durably, and that is recorded.

use std::ops::Range;

use larder_block::range_lock::RangeLockMode as DiskLocks;
use larder_block::{ByteRange, IoResult, Operation, WriteBuf, WriteFlags};

use crate::Cache;
use crate::layout::Line;
use crate::line_parts::runs;

/// The most lines that an error lists one by one when they are lost with a cache.
const REPORTED_LINES_MAX: usize = 1024;

impl Cache {
    /// Writes to `range`, which the caller has locked, past a failed cache.
    pub(crate) async fn write_through_failed_cache(
        &self,
        range: ByteRange,
        buffer: WriteBuf<'_>,
        flags: WriteFlags,
    ) -> IoResult {
        let lines = range.widened(self.layout.line_len());
        let _exclusive = self.cleaner.busy.lock(lines, DiskLocks::Exclusive).await;
        self.write_through_failed_cache_locked(range, buffer, flags).await
    }

    /// Writes to `range` past a failed cache; the caller has locked its lines in [`crate::clean::Cleaner::busy`]
    /// too.
    pub(crate) async fn write_through_failed_cache_locked(
        &self,
        range: ByteRange,
        buffer: WriteBuf<'_>,
        flags: WriteFlags,
    ) -> IoResult {
        let operation = Operation::Write;
        self.flush_range_to_disk(operation, range).await?;
        self.lower.write(range.start, buffer, flags).await?;
        self.changes.flushing.record_change();
        if self.has_dirty_data(range) {
            self.flush_disk().await?;
            self.supersede_dirty(operation, range).await?;
        }
        Ok(())
    }

    /// Prepares a change of the disk in `range`, which the caller has locked, also in
    /// [`crate::clean::Cleaner::busy`]: writes the range's dirty lines to the disk, and records that for the next
    /// opening.
    ///
    /// Dirty data that cannot be read is not changed: readers do not get the disk's data until
    /// [`Self::supersede_dirty`].
    pub(crate) async fn flush_range_to_disk(&self, operation: Operation, range: ByteRange) -> IoResult {
        self.wait_failure_recorded(operation, range).await?;
        if !self.has_dirty_data(range) || self.flush_and_supersede(operation, range).await.is_ok() {
            return Ok(());
        }
        let mut on_disk: Vec<ByteRange> = Vec::new();
        let mut rest = range;
        let dirty_lines = self.index.borrow().dirty.within(self.layout.lines_of(range), usize::MAX);
        for line in dirty_lines {
            let part = self.layout.part_of(line, range);
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
            self.record_superseded(operation, piece).await?;
        }
        Ok(())
    }

    /// Writes the dirty data of the lines of a range to the disk, and records that it is superseded.
    async fn flush_and_supersede(&self, operation: Operation, range: ByteRange) -> IoResult {
        self.clean_range(operation, range).await?;
        let lines = self.layout.lines_of(range);
        let widened = range.widened(self.layout.line_len());
        self.record_superseded(operation, widened).await?;
        self.mark_superseded(lines);
        Ok(())
    }

    /// Marks the cached data of some lines as superseded. No other line of a failed cache becomes dirty.
    fn mark_superseded(&self, lines: Range<Line>) {
        let mut superseded = self.superseded.borrow_mut();
        let (index, leaving) = (self.index.borrow(), self.pending_removals.borrow());
        let cached = index.lines.within(lines.clone());
        let removed = leaving.within(lines).map(|(line, _)| line);
        cached.chain(removed).for_each(|line| {
            superseded.insert(line);
        });
    }

    /// Returns the ranges of the dirty lines as text for messages.
    pub(crate) fn format_dirty_ranges(&self) -> String {
        let index = self.index.borrow();
        let lines = index.dirty.within(0..Line::MAX, REPORTED_LINES_MAX);
        let runs = lines.chunk_by(|line, next| *next == line + 1);
        let ranges = runs.map(|run| self.range_of(run[0]..run[run.len() - 1] + 1).to_string());
        let told = ranges.collect::<Vec<_>>().join(", ");
        match index.dirty.len() - lines.len() as u64 {
            0 => told,
            more => format!("{told}, and {more} more lines after them"),
        }
    }

    /// Records that the disk has newer data of `range`, durably, than the cache's dirty data. Readers find the disk's
    /// data from now on, and so does the next opening. The range is locked as for [`Self::flush_range_to_disk`].
    pub(crate) async fn supersede_dirty(&self, operation: Operation, range: ByteRange) -> IoResult {
        self.drop_range(range);
        let lines = self.layout.lines_of(range);
        let is_all = self.index.borrow().dirty.within(lines.clone(), 1).is_empty();
        let superseded = match is_all {
            true => range.widened(self.layout.line_len()),
            false => range,
        };
        {
            let mut dropped = self.dropped_dirty.borrow_mut();
            dropped.retain(|(other, _)| !superseded.contains(*other));
            // No record of the removal will be written.
            dropped.push((superseded, u64::MAX));
        }
        self.wait_dropped_dirty(operation, superseded).await?;
        if is_all {
            self.mark_superseded(lines);
        }
        Ok(())
    }
}
