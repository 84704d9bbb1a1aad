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
    }

    /// Takes up the disk's size.
    pub(crate) async fn see_size(&self) -> IoResult {
        let whole = ByteRange::new(0, 1);
        let _alone = self.sizing.enter(whole, Mode::Exclusive).await;
        while self.has_other_size() && !self.has_failed() {
            let generation = self.lower.size_changes().generation();
            let size = self.lower.geometry().size;
            if size.get() < self.size.get() {
                self.cut(size.get()).await?;
            }
            self.size.set(size.get());
            if let Err(error) = self.note(|superblock| superblock.disk_size = size).await {
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
        if let Err(error) = self.load_all().await {
            self.fail(&error);
        }
        for set in 0..self.shape.sets {
            let slots = self.index.borrow().slots_of(set);
            for slot in slots {
                let tag = self.index.borrow().tag(slot);
                if tag == 0 {
                    continue;
                }
                let start = self.shape.line_of(set, tag) << self.shape.line_bits;
                let whole = ByteRange::new(start, self.shape.line_len());
                let part = whole.intersection(behind);
                if !part.is_empty() {
                    let sectors = self.shape.part_of(self.shape.line_at(whole.start), part).sectors;
                    self.take_sectors(slot, sectors);
                }
            }
        }
        match self.commit().await {
            Ok(()) => Ok(()),
            Err(_) => self.detached(Operation::Write, behind).await,
        }
    }
}
