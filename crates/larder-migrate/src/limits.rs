//! Resource limits of a move, which may be changed while it runs.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Limits of a move; `None` means unlimited.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Bytes per second on the link.
    pub bandwidth: Option<u64>,
    /// CPU time of the sender's lanes, in processors: 1.5 is 1.5 s of CPU time per second.
    pub processors: Option<f64>,
    /// Maximum downtime of the guest at the end, in milliseconds.
    pub downtime_ms: u64,
    /// Time after which a move that has not ended is aborted.
    pub timeout: Option<Duration>,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bandwidth: None, processors: None, downtime_ms: 300, timeout: None }
    }
}

/// Current limits, shared by the threads that obey them and the ones that change them.
#[derive(Debug, Default)]
pub struct SharedLimits(Mutex<Limits>);

impl SharedLimits {
    /// Creates the shared limits with an initial value.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self(Mutex::new(limits))
    }

    /// Returns the current limits.
    #[must_use]
    pub fn get(&self) -> Limits {
        *self.lock()
    }

    /// Changes the limits and returns the new ones.
    pub fn update(&self, change: impl FnOnce(&mut Limits)) -> Limits {
        let mut limits = self.lock();
        change(&mut limits);
        *limits
    }

    fn lock(&self) -> MutexGuard<'_, Limits> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
