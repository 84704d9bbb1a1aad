//! Changes of the disk past a cache that has failed, which may have data that the disk has not.
//!
//! Nobody may read what the next one to open the cache would not believe. So before the disk is changed it is given what
//! only the cache has of these lines, and that is noted elsewhere. What cannot be read from the cache device any more can
//! still be written over: readers do not get it from the disk until the disk has the new durably, and that is noted.

use std::ops::Range;

use larder_block::range_lock::Mode as Hold;
use larder_block::{ByteRange, IoResult, Operation, WriteBuf, WriteFlags};

use crate::Cache;
use crate::parts::runs;
use crate::shape::Line;

/// So many lines that are lost with a cache are told of one by one.
const TOLD_MAX: usize = 1024;

impl Cache {
    /// A write to `range`, which is held, past a cache that has failed.
    pub(crate) async fn write_apart(&self, range: ByteRange, buffer: WriteBuf<'_>, flags: WriteFlags) -> IoResult {
        let lines = range.widened(self.shape.line_len());
        let _alone = self.cleaning.busy.enter(lines, Hold::Exclusive).await;
        self.write_past(range, buffer, flags).await
    }

    /// The same of lines that are held in [`crate::clean::Cleaning::busy`], too.
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

    /// Before the disk is changed in `range`, which is held, also in [`crate::clean::Cleaning::busy`]: has the disk have all
    /// that there is of its lines, and whoever opens the cache next know that.
    ///
    /// Of what cannot be read nothing changes: readers do not get the disk's until [`Cache::outdate`].
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

    /// Has the disk have all that there is of the lines of a range, and notes that.
    async fn supersede(&self, operation: Operation, range: ByteRange) -> IoResult {
        self.clean_range(operation, range).await?;
        let lines = self.shape.lines_of(range);
        let whole = range.widened(self.shape.line_len());
        self.note_superseded(operation, whole).await?;
        self.are_superseded(lines);
        Ok(())
    }

    /// Notes that the cached data of some lines is superseded. No other line of a cache that has failed becomes dirty.
    fn are_superseded(&self, lines: Range<Line>) {
        let mut superseded = self.superseded.borrow_mut();
        let (index, leaving) = (self.index.borrow(), self.leaving.borrow());
        let cached = index.lines.within(lines.clone());
        let left = leaving.within(lines).map(|(line, _)| line);
        cached.chain(left).for_each(|line| {
            superseded.insert(line);
        });
    }

    /// Where the lines are that only the cache has something of, for people.
    pub(crate) fn dirty_text(&self) -> String {
        let index = self.index.borrow();
        let lines = index.dirty.within(0..Line::MAX, TOLD_MAX);
        let runs = lines.chunk_by(|line, next| *next == line + 1);
        let ranges = runs.map(|run| self.range_of(run[0]..run[run.len() - 1] + 1).to_string());
        let told = ranges.collect::<Vec<_>>().join(", ");
        match index.dirty.len() - lines.len() as u64 {
            0 => told,
            more => format!("{told}, and of {more} lines behind that"),
        }
    }

    /// The disk has, durably, something newer of `range`, which is held as above, than only the cache has: that is what
    /// readers find from now on, and who opens the cache next.
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
            // No record of it will be written.
            undoing.push((gone, u64::MAX));
        }
        self.undone(operation, gone).await?;
        if is_all {
            self.are_superseded(lines);
        }
        Ok(())
    }
}
