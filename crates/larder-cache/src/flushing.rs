//! Tracks whether a device has been flushed since it completed a change.

use std::cell::Cell;

/// Flush state of a device.
#[derive(Default)]
pub(crate) struct Flushing {
    /// Set if no flush that has begun covers all completed changes.
    unflushed: Cell<bool>,
    /// Number of flushes that are under way.
    running: Cell<u32>,
}

/// Flush that is under way. One that is dropped without success covers nothing.
pub(crate) struct Flush<'a> {
    of: &'a Flushing,
    uncovered: bool,
}

impl Flushing {
    /// Returns the state after a kill, which may have left changes unflushed.
    pub(crate) fn unflushed() -> Self {
        let flushing = Self::default();
        flushing.changed();
        flushing
    }

    /// Records that the device has completed a change.
    pub(crate) fn changed(&self) {
        self.unflushed.set(true);
    }

    /// Begins a change. The device may complete it at any time until the returned guard is dropped, even if it is
    /// cancelled.
    pub(crate) fn change(&self) -> Change<'_> {
        Change(self)
    }

    /// Returns whether every completed change is covered by a flush that has ended.
    pub(crate) fn is_flushed(&self) -> bool {
        !self.unflushed.get() && self.running.get() == 0
    }

    /// Begins a flush.
    pub(crate) fn begin(&self) -> Flush<'_> {
        self.running.set(self.running.get() + 1);
        Flush {
            of: self,
            uncovered: self.unflushed.take(),
        }
    }
}

/// Change that is under way.
pub(crate) struct Change<'a>(&'a Flushing);

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.0.changed();
    }
}

impl Flush<'_> {
    /// Ends the flush successfully.
    pub(crate) fn done(mut self) {
        self.uncovered = false;
    }
}

impl Drop for Flush<'_> {
    fn drop(&mut self) {
        self.of.running.set(self.of.running.get() - 1);
        self.of.unflushed.set(self.of.unflushed.get() || self.uncovered);
    }
}
