//! Changes of the disk's size while it is in use.
//!
//! Data past a new end is lost, and zeros appear there if the disk grows again. So before any other request is served
//! after a change, everything past the smallest end in between is removed from memory and durably.

use larder_block::range_lock::Mode;
use larder_block::{ByteOffset, ByteRange, IoResult, Operation};

use crate::Cache;

impl Cache {
    /// Returns whether the disk may have a size that the cache does not know yet.
    pub(crate) fn has_other_size(&self) -> bool {
        self.size_generation.get() != self.lower.size_changes().generation()
            // A growing disk counts its change only when it has ended.
            || self.size.get() < self.lower.geometry().size.get()
    }

    /// Applies the disk's present size.
    pub(crate) async fn see_size(&self) -> IoResult {
        let whole = ByteRange::new(0, 1);
        let _alone = self.sizing.enter(whole, Mode::Exclusive).await;
        while self.has_other_size() {
            let changes = self.lower.size_changes();
            let generation = changes.generation();
            let size = self.lower.geometry().size;
            let least = changes
                .least_since(self.size_generation.get())
                .unwrap_or(size)
                .min(size);
            if least.get() < self.reach.get() {
                // From here on nothing is stored past the new end.
                self.size.set(least.get());
                self.cut(least.get()).await?;
            }
            self.size.set(size.get());
            self.reach.set(size.get());
            if !self.has_failed()
                && let Err(error) = self.note(|superblock| superblock.disk_size = size).await
            {
                self.fail(&error);
            }
            self.size_generation.set(generation);
        }
        Ok(())
    }

    /// Removes everything past `end`.
    async fn cut(&self, end: u64) -> IoResult {
        let behind = ByteRange::between(ByteOffset::new(end), ByteOffset::new(u64::MAX >> 1));
        self.fills.forget(behind);
        self.fills.landing(behind).await;
        let _alone = self.cleaning.busy.enter(behind, Mode::Exclusive).await;
        // Sets that cannot be loaded are discarded with the rest of a failed cache.
        if let Err(error) = self.load_all().await {
            self.fail(&error);
        }
        while !self.has_failed() && self.has_loose_behind(end) {
            // The following check handles a failure.
            let _ = self.harden_queued().await;
        }
        if self.has_failed() {
            return self.cut_apart(behind).await;
        }
        let mut rest = behind;
        while !rest.is_empty() {
            let piece = self.piece_of(rest);
            self.each_cached(self.shape.lines_of(piece), |line, slot| {
                let sectors = self.shape.part_of(line, behind).sectors;
                self.take_sectors(slot, sectors);
            })
            .await;
            if self.commit().await.is_err() {
                return self.cut_apart(behind).await;
            }
            rest = ByteRange::between(piece.end(), behind.end());
        }
        Ok(())
    }

    /// Returns whether a line that reaches past `end` has unflushed records.
    fn has_loose_behind(&self, end: u64) -> bool {
        let ledger = self.ledger.borrow();
        let index = self.index.borrow();
        let mut loose = ledger.loose_slots();
        loose.any(|slot| {
            let line = self.shape.line_of(slot.set(), index.tag(slot).max(1));
            (line + 1) << self.shape.line_bits > end
        })
    }

    /// Removes the range past the end, `behind`, from a failed cache.
    async fn cut_apart(&self, behind: ByteRange) -> IoResult {
        self.detached(Operation::Write, behind).await?;
        if self.may_be_dirty.get() {
            let dirty = self
                .index
                .borrow()
                .dirty
                .within(self.shape.lines_of(behind), usize::MAX);
            for line in dirty {
                self.forget(self.range_of(line..line + 1).intersection(behind));
            }
            self.note_superseded(Operation::Write, behind).await?;
        }
        Ok(())
    }
}
