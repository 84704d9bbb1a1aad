//! The disk's size changes while it is in use.
//!
//! What lay behind a new end is lost, and if the disk grows again zeros are there. So before anything else is done after a
//! change of the size, neither memory nor a crash finds anything behind the smallest end that there was.

use larder_block::range_lock::Mode;
use larder_block::{ByteOffset, ByteRange, IoResult, Operation};

use crate::Cache;

impl Cache {
    /// Whether the disk may have another size than the cache knows of.
    pub(crate) fn has_other_size(&self) -> bool {
        self.size_generation.get() != self.lower.size_changes().generation()
            // It grows, and says so when that is over.
            || self.size.get() < self.lower.geometry().size.get()
    }

    /// Takes up the disk's size.
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
                // Nothing is put behind it from here on.
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

    /// Forgets what lies behind `end`.
    async fn cut(&self, end: u64) -> IoResult {
        let behind = ByteRange::between(ByteOffset::new(end), ByteOffset::new(u64::MAX >> 1));
        self.fills.forget(behind);
        self.fills.landing(behind).await;
        let _alone = self.cleaning.busy.enter(behind, Mode::Exclusive).await;
        // What cannot be loaded is believed no more than the rest of a cache that has failed.
        if let Err(error) = self.load_all().await {
            self.fail(&error);
        }
        while !self.has_failed() && self.has_loose_behind(end) {
            // A failure is seen to next.
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

    /// Something was written loosely of a line that reaches behind `end`.
    fn has_loose_behind(&self, end: u64) -> bool {
        let ledger = self.ledger.borrow();
        let index = self.index.borrow();
        let mut loose = ledger.loose_slots();
        loose.any(|slot| {
            let line = self.shape.line_of(slot.set(), index.tag(slot).max(1));
            (line + 1) << self.shape.line_bits > end
        })
    }

    /// The same, of a cache that has failed.
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
