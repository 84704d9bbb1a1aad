//! Settles lines: both devices are flushed, then what memory knows of the lines is written down.

use std::cell::Cell;

use crate::Cache;
use crate::commit::Failed;
use larder_block::signal::Signal;

/// When lines are settled.
#[derive(Default)]
pub(crate) struct Settling {
    running: Cell<bool>,
    timed: Cell<bool>,
    stopped: Cell<bool>,
    ended: Signal,
}

impl Cache {
    /// Settles what has changed up to now and is not changing.
    pub(crate) async fn settle(&self) -> Result<(), Failed> {
        let epoch = self.ledger.borrow_mut().next_epoch();
        if !self.changes.flushing.is_flushed() && self.flush_disk().await.is_err() {
            // Whoever flushes hears of it. What the disk may not keep is not written down as kept.
            return Ok(());
        }
        self.harden_all().await?;
        let ripe = self.ledger.borrow().ripe(epoch);
        let mut slice = self.work_slice();
        for slot in ripe {
            slice.did(1).await;
            // Others have run, and may have changed it.
            if !self.ledger.borrow().is_ripe(slot, epoch) {
                continue;
            }
            let entry = self.index.borrow().entry(slot);
            let is_said = self.ledger.borrow().get(slot).is_some_and(|place| place.last == entry);
            if is_said {
                self.ledger.borrow_mut().tidy(slot, entry);
            } else {
                self.queue(slot, entry);
            }
        }
        self.commit().await
    }

    /// Settles, if so many more lines would be too many unsettled ones; whether they are not.
    pub(crate) async fn settles_before(&self, lines: usize) -> bool {
        let has_room = || self.ledger.borrow().len() + lines <= self.unsettled_max.max(lines);
        has_room() || (self.settle().await.is_ok() && has_room())
    }

    /// Settles in the background, if that is not being done.
    pub(crate) fn start_settle(&self) {
        if self.has_failed() || self.settling.stopped.get() || self.settling.running.replace(true) {
            return;
        }
        let Some(cache) = self.this.upgrade() else { return };
        self.spawn(async move {
            // A failure is known by then.
            let _ = cache.settle().await;
            cache.settling.running.set(false);
            cache.settling.ended.raise();
            // Not at once, however much there is left: it is still changing.
            cache.settle_later();
        });
    }

    /// Completes when nothing is being settled in the background, nor will be.
    pub(crate) async fn stop_settling(&self) {
        let settling = &self.settling;
        settling.stopped.set(true);
        settling.ended.when(|| !settling.running.get()).await;
    }

    /// Sees to it that what is not settled is in a while, or soon if there is much.
    pub(crate) fn settle_in_time(&self) {
        if self.ledger.borrow().len() > self.unsettled_max / 2 {
            self.start_settle();
        } else {
            self.settle_later();
        }
    }

    fn settle_later(&self) {
        if self.ledger.borrow().len() == 0 || self.settling.timed.replace(true) {
            return;
        }
        let Some(sleep) = self.on.upgrade().map(|on| on.sleep(self.settle_after)) else {
            return;
        };
        let this = self.this.clone();
        self.spawn(async move {
            sleep.await;
            if let Some(cache) = this.upgrade() {
                cache.settling.timed.set(false);
                // Many lines do not wait for the timer. A settled cache needs no flush.
                if cache.ledger.borrow().len() > 0 {
                    cache.start_settle();
                }
            }
        });
    }
}
