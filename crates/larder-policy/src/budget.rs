//! What may be written to the SSD in a day.

use std::time::Duration;

const DAY_SECONDS: f64 = 86_400.0;

/// The share of a day's budget that may be spent at once; the rest of it comes evenly over the day.
const AT_ONCE: f64 = 1.0 / 24.0;

/// A token bucket of bytes. In no 24 hours are more spent than the budget, but for what had to be.
pub(crate) struct Budget {
    /// Bytes that come in a second.
    rate: f64,
    /// Bytes that are kept at most.
    full: f64,
    /// Bytes that may be spent; below 0 if more had to be than was there.
    level: f64,
    /// Up to when what comes has been counted.
    counted: Duration,
}

impl Budget {
    /// So many bytes a day.
    pub(crate) fn new(bytes_per_day: u64) -> Self {
        let bytes = bytes_per_day as f64;
        Self {
            rate: bytes * (1.0 - AT_ONCE) / DAY_SECONDS,
            full: bytes * AT_ONCE,
            level: bytes * AT_ONCE,
            counted: Duration::ZERO,
        }
    }

    /// So many bytes a day from `now` on, of which no more than was left before may be spent at once.
    pub(crate) fn change(&mut self, bytes_per_day: u64, now: Duration) {
        self.refill(now);
        let changed = Self::new(bytes_per_day);
        *self = Self {
            level: changed.level.min(self.level),
            counted: self.counted,
            ..changed
        };
    }

    /// What comes until `now`. Times that go back count as standing still.
    fn refill(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.counted);
        self.counted = self.counted.max(now);
        self.level = (self.level + self.rate * passed.as_secs_f64()).min(self.full);
    }

    /// How scarce writes are: 0 as long as half of what can be kept is there, 1 when there is not enough for `bytes`.
    pub(crate) fn scarcity(&mut self, bytes: u64, now: Duration) -> f32 {
        self.refill(now);
        if self.level < bytes as f64 {
            return 1.0;
        }
        (1.0 - 2.0 * self.level / self.full).max(0.0) as f32
    }

    /// So many bytes are written.
    pub(crate) fn spend(&mut self, bytes: u64, now: Duration) {
        self.refill(now);
        self.level -= bytes as f64;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whoever asks before each write spends no more in any 24 hours than the budget.
        #[test]
        fn no_day_costs_more_than_its_budget(
            steps in prop::collection::vec((0u64..4_000, 10_000u64..500_000), 1..400),
            budget in 10_000_000u64..100_000_000,
        ) {
            let mut bucket = Budget::new(budget);
            let mut spent = Vec::new();
            let mut now = 0;
            for (pause, bytes) in steps {
                now += pause;
                let at = Duration::from_secs(now);
                while bucket.scarcity(bytes, at) < 1.0 {
                    bucket.spend(bytes, at);
                    spent.push((now, bytes));
                    prop_assert!(spent.len() < 100_000);
                }
            }
            let mut first = 0;
            let mut sum = 0;
            for (at, bytes) in &spent {
                sum += bytes;
                while spent[first].0 + 86_400 <= *at {
                    sum -= spent[first].1;
                    first += 1;
                }
                prop_assert!(sum <= budget, "{sum} of {budget}");
            }
        }
    }

    #[test]
    fn writes_become_scarce_before_there_are_none() {
        let mut bucket = Budget::new(24_000);
        assert_eq!(bucket.scarcity(1, Duration::ZERO), 0.0);
        bucket.spend(750, Duration::ZERO);
        assert!((bucket.scarcity(1, Duration::ZERO) - 0.5).abs() < 1e-3);
        bucket.spend(500, Duration::ZERO);
        assert_eq!(bucket.scarcity(1, Duration::ZERO), 1.0);
        assert_eq!(bucket.scarcity(1, Duration::from_secs(86_400)), 0.0);
    }
}
