//! How many fetches may be under way: fewer when the device takes much longer for one than it can, because then it is
//! busy, and the guest's own requests come first.

use std::time::Duration;

/// At most so many at a time.
const LIMIT_MAX: usize = 16;

/// A device that answers within this is not busy.
const NEVER_BUSY: Duration = Duration::from_micros(500);

/// How many times its best a device takes when it is busy.
const BUSY: u32 = 4;

pub(crate) struct Pace {
    limit: usize,
    /// The least that a fetch takes, forgotten slowly.
    best: Duration,
    /// What fetches take lately.
    usual: Duration,
    /// Fetches since the limit was made smaller.
    since: usize,
}

impl Pace {
    pub(crate) fn new() -> Self {
        Self {
            limit: LIMIT_MAX / 2,
            best: Duration::MAX,
            usual: Duration::ZERO,
            since: 0,
        }
    }

    /// How many fetches may be under way.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// A fetch took so long.
    pub(crate) fn took(&mut self, time: Duration) {
        self.usual = match self.usual {
            Duration::ZERO => time,
            usual => (usual * 7 + time) / 8,
        };
        self.best = self.best.min(time);
        self.best = self.best.saturating_add(self.best / 256);
        self.since += 1;
        let is_busy = self.usual > NEVER_BUSY && self.usual > self.best.saturating_mul(BUSY);
        if is_busy && self.since >= self.limit {
            self.limit = (self.limit / 2).max(1);
            self.since = 0;
        } else if !is_busy && self.since >= self.limit {
            self.limit = (self.limit + 1).min(LIMIT_MAX);
            self.since = 0;
        }
    }
}
