//! Whether a device has been flushed since it completed something.

use std::cell::Cell;

/// What is known of a device.
#[derive(Default)]
pub(crate) struct Flushing {
    /// It has completed changes that no flush has covered which had begun by now.
    unflushed: Cell<bool>,
    /// Flushes that are under way.
    running: Cell<u32>,
}

/// A flush that is under way; one that is dropped without having succeeded has covered nothing.
pub(crate) struct Flush<'a> {
    of: &'a Flushing,
    uncovered: bool,
}

impl Flushing {
    /// As after the death of a process that may have left something unflushed.
    pub(crate) fn unflushed() -> Self {
        let flushing = Self::default();
        flushing.changed();
        flushing
    }

    /// The device has completed a change.
    pub(crate) fn changed(&self) {
        self.unflushed.set(true);
    }

    /// A change begins, which the device may complete, even if it is given up, until this is dropped.
    pub(crate) fn change(&self) -> Change<'_> {
        Change(self)
    }

    /// Nothing that it has completed waits for a flush to end.
    pub(crate) fn is_flushed(&self) -> bool {
        !self.unflushed.get() && self.running.get() == 0
    }

    /// A flush begins.
    pub(crate) fn begin(&self) -> Flush<'_> {
        self.running.set(self.running.get() + 1);
        Flush {
            of: self,
            uncovered: self.unflushed.take(),
        }
    }
}

/// A change that is under way.
pub(crate) struct Change<'a>(&'a Flushing);

impl Drop for Change<'_> {
    fn drop(&mut self) {
        self.0.changed();
    }
}

impl Flush<'_> {
    /// It has succeeded.
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
