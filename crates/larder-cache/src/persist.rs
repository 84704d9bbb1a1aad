//! Persists the metadata of lines: flushes both devices, then writes what memory has to the journal.

use std::cell::Cell;

use crate::Cache;
use crate::commit::CacheFailed;
use larder_block::signal::Signal;

/// State of the background task that persists metadata.
#[derive(Default)]
pub(crate) struct MetadataPersister {
    running: Cell<bool>,
    timer_running: Cell<bool>,
    stopped: Cell<bool>,
    ended: Signal,
}

impl Cache {
    /// Flushes both devices, then journals the metadata of every line that has no write in flight.
    pub(crate) async fn persist_metadata(&self) -> Result<(), CacheFailed> {
        let epoch = self.ledger.borrow_mut().next_epoch();
        if !self.changes.flushing.is_flushed() && self.flush_disk().await.is_err() {
            // The caller of a flush gets its error. Data that the disk may lose must not be recorded as clean.
            return Ok(());
        }
        self.harden_all().await?;
        let persistable = self.ledger.borrow().persistable(epoch);
        let mut slice = self.work_slice();
        for slot in persistable {
            slice.complete_steps(1).await;
            // Other tasks have run, and may have changed the line.
            if !self.ledger.borrow().is_persistable(slot, epoch) {
                continue;
            }
            let entry = self.index.borrow().entry(slot);
            let is_recorded = self.ledger.borrow().get(slot).is_some_and(|state| state.last == entry);
            if is_recorded {
                self.ledger.borrow_mut().remove_if_persisted(slot, entry);
            } else {
                self.queue(slot, entry);
            }
        }
        self.commit().await
    }

    /// Persists metadata if `lines` more unpersisted lines would exceed the limit; returns whether there is room for
    /// them.
    pub(crate) async fn make_persist_room(&self, lines: usize) -> bool {
        let has_room = || self.ledger.borrow().len() + lines <= self.unpersisted_max.max(lines);
        has_room() || (self.persist_metadata().await.is_ok() && has_room())
    }

    /// Starts to persist metadata in the background, unless that is running.
    pub(crate) fn start_persist(&self) {
        if self.has_failed() || self.persister.stopped.get() || self.persister.running.replace(true) {
            return;
        }
        let Some(cache) = self.this.upgrade() else { return };
        self.spawn(async move {
            // A failure was already recorded.
            let _ = cache.persist_metadata().await;
            cache.persister.running.set(false);
            cache.persister.ended.raise();
            // Delayed, however much is left: those lines are still changing.
            cache.start_persist_timer();
        });
    }

    /// Stops the background task for good, and waits until it has stopped.
    pub(crate) async fn stop_persist(&self) {
        let persister = &self.persister;
        persister.stopped.set(true);
        persister.ended.when(|| !persister.running.get()).await;
    }

    /// Schedules that unpersisted metadata is persisted after a delay, or at once if there is much.
    pub(crate) fn schedule_persist(&self) {
        if self.ledger.borrow().len() > self.unpersisted_max / 2 {
            self.start_persist();
        } else {
            self.start_persist_timer();
        }
    }

    fn start_persist_timer(&self) {
        if self.ledger.borrow().len() == 0 || self.persister.timer_running.replace(true) {
            return;
        }
        let Some(sleep) = self.on.upgrade().map(|on| on.sleep(self.persist_delay_max)) else {
            return;
        };
        let this = self.this.clone();
        self.spawn(async move {
            sleep.await;
            if let Some(cache) = this.upgrade() {
                cache.persister.timer_running.set(false);
                // Many lines do not wait for the timer. If all is persisted, no flush is needed.
                if cache.ledger.borrow().len() > 0 {
                    cache.start_persist();
                }
            }
        });
    }
}
