//! Tracks whether a device has been flushed since it completed a change.

use std::cell::Cell;

/// Flush state of a device.
#[derive(Default)]
pub(crate) struct FlushTracker {
    /// Set if no flush that has begun covers all completed changes.
    unflushed: Cell<bool>,
    /// Number of flushes that are under way.
    in_flight: Cell<u32>,
}

/// Flush that is under way. One that is dropped without success covers nothing.
pub(crate) struct FlushGuard<'a> {
    tracker: &'a FlushTracker,
    uncovered: bool,
}

impl FlushTracker {
    /// Returns the state after a kill, which may have left changes unflushed.
    pub(crate) fn unflushed() -> Self {
        let flushing = Self::default();
        flushing.record_change();
        flushing
    }

    /// Records that the device has completed a change.
    pub(crate) fn record_change(&self) {
        self.unflushed.set(true);
    }

    /// Begins a change. The device may complete it at any time until the returned guard is dropped, even if it is
    /// cancelled.
    pub(crate) fn begin_change(&self) -> ChangeGuard<'_> {
        ChangeGuard(self)
    }

    /// Returns whether every completed change is covered by a flush that has ended.
    pub(crate) fn is_flushed(&self) -> bool {
        !self.unflushed.get() && self.in_flight.get() == 0
    }

    /// Begins a flush.
    pub(crate) fn begin_flush(&self) -> FlushGuard<'_> {
        self.in_flight.set(self.in_flight.get() + 1);
        FlushGuard { tracker: self, uncovered: self.unflushed.take() }
    }
}

/// Change that is under way.
pub(crate) struct ChangeGuard<'a>(&'a FlushTracker);

impl Drop for ChangeGuard<'_> {
    fn drop(&mut self) {
        self.0.record_change();
    }
}

impl FlushGuard<'_> {
    /// Ends the flush successfully.
    pub(crate) fn finish(mut self) {
        self.uncovered = false;
    }
}

impl Drop for FlushGuard<'_> {
    fn drop(&mut self) {
        self.tracker.in_flight.set(self.tracker.in_flight.get() - 1);
        self.tracker.unflushed.set(self.tracker.unflushed.get() || self.uncovered);
    }
}
