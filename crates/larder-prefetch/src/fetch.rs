//! Fetches: each is a task that reads into the slots that were planned for it.

use std::rc::Rc;

use larder_block::{ByteOffset, ByteRange, ReadBuf};

use crate::Prefetch;
use crate::state::PlannedFetch;
use crate::streams::Pattern;
use crate::units::BLOCK_BITS;

/// Blocks for which one query asks where data is, from a fetch on in its direction: 64 MiB.
const QUERY_BLOCKS: u64 = 1 << 14;

/// The most extents that one query asks for.
const QUERY_EXTENTS_MAX: usize = 16;

impl Prefetch {
    /// Starts all fetches that may start.
    pub(crate) fn start_fetches(&self) {
        loop {
            let planned = {
                let mut state = self.state.borrow_mut();
                if !state.has_work() {
                    return;
                }
                state.plan(self.lower.geometry().size.get(), &self.writes)
            };
            let (Some(planned), Some(this), Some(on)) = (planned, self.this.upgrade(), self.on.upgrade()) else {
                return;
            };
            this.start_expiry();
            on.spawn(async move { this.fetch(planned).await });
        }
    }

    async fn fetch(self: Rc<Self>, planned: PlannedFetch) {
        let started = self.on.upgrade().map(|on| on.now());
        let start = ByteOffset::new(planned.blocks.start << BLOCK_BITS);
        // SAFETY: the memory belongs to slots that are assigned to this fetch until it has ended; before, nothing
        // reads there or makes a reference to it. The cache that owns the memory lives as long as `self`.
        let buffer = unsafe { ReadBuf::from_pieces(&planned.memory) };
        let read = self.lower.read(start, buffer).await;
        let woken = {
            let mut state = self.state.borrow_mut();
            if let (Some(begun), Some(on)) = (started, self.on.upgrade()) {
                state.fetch_limit.record_latency(on.now().since(begun));
            }
            state.end_fetch(&planned, read.is_ok())
        };
        woken.into_iter().for_each(std::task::Waker::wake);
        self.start_fetches();
        if planned.needs_extents {
            self.query_extents(&planned).await;
        }
    }

    /// Queries the extents of the disk from a fetch on, in its direction.
    async fn query_extents(&self, planned: &PlannedFetch) {
        let disk = self.lower.geometry().size.get() >> BLOCK_BITS;
        let (from, to) = match planned.pattern {
            Pattern::Backward => (planned.blocks.end.saturating_sub(QUERY_BLOCKS), planned.blocks.end),
            _ => (planned.blocks.start, planned.blocks.start.saturating_add(QUERY_BLOCKS)),
        };
        let (from, to) = (from.min(disk), to.min(disk));
        let mut found = Vec::new();
        if from < to && !self.state.borrow().closing {
            let range = ByteRange::new(from << BLOCK_BITS, (to - from) << BLOCK_BITS);
            found = self.lower.extents(range, QUERY_EXTENTS_MAX).await.unwrap_or_default();
        }
        let mut state = self.state.borrow_mut();
        found.into_iter().for_each(|extent| state.extents.insert(extent));
        state.query_running = false;
    }
}
