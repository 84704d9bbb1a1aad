//! Number of concurrent fetches: it is reduced while the device takes much longer for a fetch than its best time,
//! because the device is busy then, and the guest's own requests come first.

use std::time::Duration;

/// The most concurrent fetches.
const LIMIT_MAX: usize = 16;

/// Latency below which a device never counts as busy.
const BUSY_LATENCY_MIN: Duration = Duration::from_micros(500);

/// Ratio of the usual to the best latency above which a device is busy.
const BUSY_RATIO: u32 = 4;

pub(crate) struct FetchLimit {
    limit: usize,
    /// Best latency of a fetch, which increases slowly to adapt.
    best: Duration,
    /// Average latency of recent fetches.
    average: Duration,
    /// Fetches since the limit was changed.
    fetches_since_change: usize,
}

impl FetchLimit {
    pub(crate) fn new() -> Self {
        Self { limit: LIMIT_MAX / 2, best: Duration::MAX, average: Duration::ZERO, fetches_since_change: 0 }
    }

    /// Returns the number of fetches that may be in flight.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Records the latency of a fetch, and adapts the limit.
    pub(crate) fn record_latency(&mut self, time: Duration) {
        self.average = match self.average {
            Duration::ZERO => time,
            average => (average * 7 + time) / 8,
        };
        self.best = self.best.min(time);
        self.best = self.best.saturating_add(self.best / 256);
        self.fetches_since_change += 1;
        let is_busy = self.average > BUSY_LATENCY_MIN && self.average > self.best.saturating_mul(BUSY_RATIO);
        if is_busy && self.fetches_since_change >= self.limit {
            self.limit = (self.limit / 2).max(1);
            self.fetches_since_change = 0;
        } else if !is_busy && self.fetches_since_change >= self.limit {
            self.limit = (self.limit + 1).min(LIMIT_MAX);
            self.fetches_since_change = 0;
        }
    }
}
