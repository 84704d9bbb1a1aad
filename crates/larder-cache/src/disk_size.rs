//! Changes of the disk's size while it is in use.
//!
//! Data past a new end is lost, and zeros appear there if the disk grows again. So before any other request is served
//! after a change, everything past the smallest end in between is removed from memory and durably.

use larder_block::range_lock::RangeLockMode;
use larder_block::{ByteOffset, ByteRange, IoResult, Operation};

use crate::Cache;

impl Cache {
    /// Returns whether the disk may have a size that the cache does not know yet.
    pub(crate) fn has_size_changed(&self) -> bool {
        self.size_generation.get() != self.lower.size_changes().generation()
            // A growing disk counts its change only when it has ended.
            || self.size.get() < self.lower.geometry().size.get()
    }

    /// Applies the disk's present size.
    pub(crate) async fn apply_size(&self) -> IoResult {
        let unit = ByteRange::new(0, 1);
        let _exclusive = self.size_lock.lock(unit, RangeLockMode::Exclusive).await;
        while self.has_size_changed() {
            let changes = self.lower.size_changes();
            let generation = changes.generation();
            let size = self.lower.geometry().size;
            let smallest = changes.smallest_since(self.size_generation.get()).unwrap_or(size).min(size);
            if smallest.get() < self.content_end.get() {
                // From here on nothing is stored past the new end.
                self.size.set(smallest.get());
                self.drop_past_end(smallest.get()).await?;
            }
            self.size.set(size.get());
            self.content_end.set(size.get());
            if !self.has_failed()
                && let Err(error) = self.update_superblock(|superblock| superblock.disk_size = size).await
            {
                self.fail(&error);
            }
            self.size_generation.set(generation);
        }
        Ok(())
    }

    /// Removes everything past `end`.
    async fn drop_past_end(&self, end: u64) -> IoResult {
        let past_end = ByteRange::between(ByteOffset::new(end), ByteOffset::new(u64::MAX >> 1));
        self.fills.invalidate(past_end);
        self.fills.wait_stores(past_end).await;
        let _exclusive = self.cleaner.busy.lock(past_end, RangeLockMode::Exclusive).await;
        // Sets that cannot be loaded are discarded with the rest of a failed cache.
        if let Err(error) = self.load_all().await {
            self.fail(&error);
        }
        while !self.has_failed() && self.has_unflushed_past(end) {
            // The following check handles a failure.
            let _ = self.harden_queued().await;
        }
        if self.has_failed() {
            return self.drop_past_end_of_failed(past_end).await;
        }
        let mut rest = past_end;
        while !rest.is_empty() {
            let piece = self.piece_of(rest);
            self.for_each_cached(self.layout.lines_of(piece), |line, slot| {
                let sectors = self.layout.part_of(line, past_end).sectors;
                self.remove_sectors(slot, sectors);
            })
            .await;
            if self.commit().await.is_err() {
                return self.drop_past_end_of_failed(past_end).await;
            }
            rest = ByteRange::between(piece.end(), past_end.end());
        }
        Ok(())
    }

    /// Returns whether a line that reaches past `end` has unflushed records.
    fn has_unflushed_past(&self, end: u64) -> bool {
        let ledger = self.ledger.borrow();
        let index = self.index.borrow();
        let mut unflushed = ledger.unflushed_slots();
        unflushed.any(|slot| {
            let line = self.layout.line_of(slot.set(), index.tag(slot).max(1));
            (line + 1) << self.layout.line_bits > end
        })
    }

    /// Removes the range past the end, `past_end`, from a failed cache.
    async fn drop_past_end_of_failed(&self, past_end: ByteRange) -> IoResult {
        self.wait_failure_recorded(Operation::Write, past_end).await?;
        if self.may_be_dirty.get() {
            let dirty = self.index.borrow().dirty.within(self.layout.lines_of(past_end), usize::MAX);
            for line in dirty {
                self.drop_range(self.range_of(line..line + 1).intersection(past_end));
            }
            self.record_superseded(Operation::Write, past_end).await?;
        }
        Ok(())
    }
}
