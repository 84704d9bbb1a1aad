//! Number of concurrent fetches: it is reduced while the device takes much longer for a fetch than its best time,
//! because the device is busy then, and the guest's own requests come first.

use std::time::Duration;

/// The most concurrent fetches.
const LIMIT_MAX: usize = 16;

/// Latency below which a device never counts as busy.
const NEVER_BUSY: Duration = Duration::from_micros(500);

/// Ratio of the usual to the best latency above which a device is busy.
const BUSY: u32 = 4;

pub(crate) struct Pace {
    limit: usize,
    /// Best latency of a fetch, which increases slowly to adapt.
    best: Duration,
    /// Average latency of recent fetches.
    usual: Duration,
    /// Fetches since the limit was changed.
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

    /// Returns the number of fetches that may be in flight.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Records the latency of a fetch, and adapts the limit.
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
