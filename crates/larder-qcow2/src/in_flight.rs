//! The requests in flight, so that a cluster that they may access is not reused.
//!
//! Requests are counted by epoch. A cluster that is freed in an epoch may be reused once every request of that epoch
//! and of earlier ones has ended.

use std::cell::Cell;
use std::rc::Rc;

use larder_block::SizeChanges;
use larder_block::device::RequestWatch;

/// The number of epochs that can be distinguished.
const EPOCHS: usize = 16;

/// The number of requests in flight, by epoch.
pub(crate) struct InFlight {
    counts: [Cell<u32>; EPOCHS],
    current: Cell<u64>,
    /// The oldest epoch that may have requests: every earlier one has ended.
    oldest: Cell<u64>,
    /// Raised when an epoch ends.
    pub(crate) ended: Rc<SizeChanges>,
}

/// A request that is counted until this value is dropped.
pub(crate) struct InFlightGuard<'a>(&'a InFlight, u32);

impl Drop for InFlightGuard<'_> {
    fn drop(&mut self) {
        self.0.request_ended(self.1);
    }
}

impl InFlight {
    pub(crate) fn new() -> Self {
        Self { counts: Default::default(), current: Cell::new(0), oldest: Cell::new(0), ended: Rc::default() }
    }

    /// Counts a request, and returns the ticket for
    /// [`RequestWatch::request_ended`].
    pub(crate) fn enter(&self) -> u32 {
        let ticket = (self.current.get() % EPOCHS as u64) as u32;
        let count = &self.counts[ticket as usize];
        count.set(count.get() + 1);
        ticket
    }

    /// Returns true if no request is in flight.
    pub(crate) fn is_idle(&self) -> bool {
        self.counts.iter().all(|count| count.get() == 0)
    }

    /// Counts a request until the result is dropped.
    pub(crate) fn count_until_drop(&self) -> InFlightGuard<'_> {
        InFlightGuard(self, self.enter())
    }

    /// Begins a new epoch if one is available. Returns the epoch that must end before clusters freed now can be
    /// reused.
    pub(crate) fn next_epoch(&self) -> u64 {
        self.advance_oldest();
        let epoch = self.current.get();
        if epoch + 1 - self.oldest.get() < EPOCHS as u64 {
            self.current.set(epoch + 1);
        }
        epoch
    }

    /// Returns true if all requests of `epoch` and of earlier ones have ended.
    pub(crate) fn has_ended(&self, epoch: u64) -> bool {
        self.advance_oldest();
        epoch < self.oldest.get()
    }

    /// Waits until every request that is in flight now has ended.
    pub(crate) async fn drain(&self) {
        let epoch = self.next_epoch();
        loop {
            let generation = self.ended.generation();
            if self.has_ended(epoch) || self.is_idle() {
                return;
            }
            if self.current.get() == epoch {
                // No epoch was available before.
                self.next_epoch();
            }
            self.ended.changed_after(generation).await;
        }
    }

    fn advance_oldest(&self) {
        while self.oldest.get() < self.current.get()
            && self.counts[(self.oldest.get() % EPOCHS as u64) as usize].get() == 0
        {
            self.oldest.set(self.oldest.get() + 1);
        }
    }
}

impl RequestWatch for InFlight {
    fn request_ended(&self, ticket: u32) {
        let count = &self.counts[ticket as usize];
        count.set(count.get() - 1);
        if count.get() == 0 && u64::from(ticket) != self.current.get() % EPOCHS as u64 {
            self.ended.announce();
        }
    }
}
