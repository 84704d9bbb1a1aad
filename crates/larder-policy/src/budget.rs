//! Daily write budget of the SSD.

use std::time::Duration;

const DAY_SECONDS: f64 = 86_400.0;

/// Share of a day's budget that may be spent at once; the rest is added evenly over the day.
const BURST_SHARE: f64 = 1.0 / 24.0;

/// Token bucket of bytes. In any 24 hours no more than the budget is spent, except for writes that cannot be refused.
pub(crate) struct WriteBudget {
    /// Bytes added per second.
    rate: f64,
    /// Most bytes that the bucket holds.
    capacity: f64,
    /// Bytes that may be spent; negative after writes that exceeded the level.
    level: f64,
    /// Time up to which bytes were added.
    refilled_at: Duration,
}

impl WriteBudget {
    /// Creates a budget of `bytes_per_day`.
    pub(crate) fn new(bytes_per_day: u64) -> Self {
        let bytes = bytes_per_day as f64;
        Self {
            rate: bytes * (1.0 - BURST_SHARE) / DAY_SECONDS,
            capacity: bytes * BURST_SHARE,
            level: bytes * BURST_SHARE,
            refilled_at: Duration::ZERO,
        }
    }

    /// Changes the budget from `now` on. The bytes that may be spent at once do not increase by that.
    pub(crate) fn change(&mut self, bytes_per_day: u64, now: Duration) {
        self.refill(now);
        let changed = Self::new(bytes_per_day);
        *self = Self { level: changed.level.min(self.level), refilled_at: self.refilled_at, ..changed };
    }

    /// Adds the bytes up to `now`. A time before the last one adds nothing.
    fn refill(&mut self, now: Duration) {
        let passed = now.saturating_sub(self.refilled_at);
        self.refilled_at = self.refilled_at.max(now);
        self.level = (self.level + self.rate * passed.as_secs_f64()).min(self.capacity);
    }

    /// Returns how scarce writes are: 0 while the bucket is at least half full, 1 when `bytes` exceed the level.
    pub(crate) fn scarcity(&mut self, bytes: u64, now: Duration) -> f32 {
        self.refill(now);
        if self.level < bytes as f64 {
            return 1.0;
        }
        (1.0 - 2.0 * self.level / self.capacity).max(0.0) as f32
    }

    /// Records that `bytes` are written.
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
        /// A caller that checks the scarcity before each write spends no more than the budget in any 24 hours.
        #[test]
        fn no_day_exceeds_its_budget(
            steps in prop::collection::vec((0u64..4_000, 10_000u64..500_000), 1..400),
            budget in 10_000_000u64..100_000_000,
        ) {
            let mut bucket = WriteBudget::new(budget);
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

    /// The scarcity grows continuously as the bucket empties, and is zero again after a day.
    #[test]
    fn scarcity_grows_as_budget_empties() {
        let mut bucket = WriteBudget::new(24_000);
        assert_eq!(bucket.scarcity(1, Duration::ZERO), 0.0);
        bucket.spend(750, Duration::ZERO);
        assert!((bucket.scarcity(1, Duration::ZERO) - 0.5).abs() < 1e-3);
        bucket.spend(500, Duration::ZERO);
        assert_eq!(bucket.scarcity(1, Duration::ZERO), 1.0);
        assert_eq!(bucket.scarcity(1, Duration::from_secs(86_400)), 0.0);
    }
}
