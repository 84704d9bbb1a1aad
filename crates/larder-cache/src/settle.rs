//! Persists the metadata of lines: flushes both devices, then writes what memory has to the journal.

use std::cell::Cell;

use crate::Cache;
use crate::commit::Failed;
use larder_block::signal::Signal;

/// State of the background task that persists metadata.
#[derive(Default)]
pub(crate) struct Settling {
    running: Cell<bool>,
    timed: Cell<bool>,
    stopped: Cell<bool>,
    ended: Signal,
}

impl Cache {
    /// Flushes both devices, then journals the metadata of every line that has no write in flight.
    pub(crate) async fn settle(&self) -> Result<(), Failed> {
        let epoch = self.ledger.borrow_mut().next_epoch();
        if !self.changes.flushing.is_flushed() && self.flush_disk().await.is_err() {
            // The caller of a flush gets its error. Data that the disk may lose must not be recorded as clean.
            return Ok(());
        }
        self.harden_all().await?;
        let ripe = self.ledger.borrow().ripe(epoch);
        let mut slice = self.work_slice();
        for slot in ripe {
            slice.did(1).await;
            // Other tasks have run, and may have changed the line.
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

    /// Persists metadata if `lines` more unpersisted lines would exceed the limit; returns whether there is room for
    /// them.
    pub(crate) async fn settles_before(&self, lines: usize) -> bool {
        let has_room = || self.ledger.borrow().len() + lines <= self.unsettled_max.max(lines);
        has_room() || (self.settle().await.is_ok() && has_room())
    }

    /// Starts to persist metadata in the background, unless that is running.
    pub(crate) fn start_settle(&self) {
        if self.has_failed() || self.settling.stopped.get() || self.settling.running.replace(true) {
            return;
        }
        let Some(cache) = self.this.upgrade() else { return };
        self.spawn(async move {
            // A failure was already recorded.
            let _ = cache.settle().await;
            cache.settling.running.set(false);
            cache.settling.ended.raise();
            // Delayed, however much is left: those lines are still changing.
            cache.settle_later();
        });
    }

    /// Stops the background task for good, and waits until it has stopped.
    pub(crate) async fn stop_settling(&self) {
        let settling = &self.settling;
        settling.stopped.set(true);
        settling.ended.when(|| !settling.running.get()).await;
    }

    /// Schedules that unpersisted metadata is persisted after a delay, or at once if there is much.
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
                // Many lines do not wait for the timer. If all is persisted, no flush is needed.
                if cache.ledger.borrow().len() > 0 {
                    cache.start_settle();
                }
            }
        });
    }
}
