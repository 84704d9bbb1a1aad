//! A leaky bucket: requests fill it, and it leaks at the permitted rate.
//!
//! The scheme and its constants are those of QEMU's docs/throttle.txt, so that the same settings have the same
//! effect. Without a burst, a tenth of a second's worth may be done at once. A burst of one second may be done at
//! once; in a longer burst a second bucket leaks at the burst's rate.

use std::time::Duration;

use super::RateLimit;
use crate::event_loop::LoopTime;

pub(super) struct LeakyBucket {
    limit: RateLimit,
    /// The amount that has not leaked yet, at `updated_at`.
    level: f64,
    /// The amount in a second bucket, which leaks at the burst's rate.
    burst_level: f64,
    updated_at: LoopTime,
}

impl LeakyBucket {
    pub(super) fn new(limit: RateLimit, now: LoopTime) -> Self {
        Self { limit, level: 0.0, burst_level: 0.0, updated_at: now }
    }

    /// Returns the waiting time of the next request; zero if it may start now.
    pub(super) fn wait(&mut self, now: LoopTime) -> Duration {
        if self.limit.average == 0 {
            return Duration::ZERO;
        }
        self.leak(now);
        let (average, burst) = (self.limit.average as f64, self.limit.burst as f64);
        if self.limit.burst == 0 {
            return time_to_leak(self.level - average / 10.0, average);
        }
        let size = burst * f64::from(self.limit.burst_seconds.max(1));
        let wait = time_to_leak(self.level - size, average);
        if wait.is_zero() && self.limit.burst_seconds > 1 {
            return time_to_leak(self.burst_level - burst / 10.0, burst);
        }
        wait
    }

    /// Adds a request's amount. A request may overfill the bucket; later ones wait the longer.
    pub(super) fn fill(&mut self, amount: f64, now: LoopTime) {
        if self.limit.average == 0 {
            return;
        }
        self.leak(now);
        self.level += amount;
        self.burst_level += amount;
    }

    fn leak(&mut self, now: LoopTime) {
        let seconds = now.since(self.updated_at).as_secs_f64();
        self.updated_at = now;
        self.level = (self.level - self.limit.average as f64 * seconds).max(0.0);
        self.burst_level = (self.burst_level - self.limit.burst as f64 * seconds).max(0.0);
    }
}

/// Returns the time in which `extra` leaks, in whole nanoseconds, rounded up; zero if there is none.
fn time_to_leak(extra: f64, rate: f64) -> Duration {
    if extra <= 0.0 {
        return Duration::ZERO;
    }
    // The conversion saturates.
    Duration::from_nanos((extra / rate * 1e9).ceil().max(1.0) as u64)
}
