//! What a move may take. It may be changed while the move goes on.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Bounds; `None` is none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Limits {
    /// Bytes per second on the link.
    pub bandwidth: Option<u64>,
    /// Processors whose time the sender's lanes take: 1.5 is 1.5 s of CPU time in a second.
    pub processors: Option<f64>,
    /// How long the guest may stand still in the end, in milliseconds.
    pub downtime_ms: u64,
    /// After so long without an end the move is given up.
    pub timeout: Option<Duration>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            bandwidth: None,
            processors: None,
            downtime_ms: 300,
            timeout: None,
        }
    }
}

/// The limits that are in force, for those who keep to them and those who change them.
#[derive(Debug, Default)]
pub struct InForce(Mutex<Limits>);

impl InForce {
    /// These, until they are changed.
    #[must_use]
    pub fn new(limits: Limits) -> Self {
        Self(Mutex::new(limits))
    }

    /// As they are now.
    #[must_use]
    pub fn now(&self) -> Limits {
        *self.lock()
    }

    /// Changes them, and returns what they are then.
    pub fn change(&self, change: impl FnOnce(&mut Limits)) -> Limits {
        let mut limits = self.lock();
        change(&mut limits);
        *limits
    }

    fn lock(&self) -> MutexGuard<'_, Limits> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
