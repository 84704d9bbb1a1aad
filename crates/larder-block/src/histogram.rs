//! A histogram of durations, in buckets whose bounds grow by a fifth to a quarter.

use std::cell::Cell;
use std::time::Duration;

/// The log2 of the number of buckets between a power of two and the next.
const STEPS_BITS: u32 = 2;
const STEPS: u64 = 1 << STEPS_BITS;

/// The log2 of the bound of the first bucket, in nanoseconds.
const FIRST_BITS: u32 = 8;

/// The log2 of the bound of the last bucket but one, in nanoseconds: 69 s.
const LAST_BITS: u32 = 36;

const BUCKETS: usize = ((LAST_BITS - FIRST_BITS) as usize) * STEPS as usize + 2;

/// Returns true once in `every` calls, for an event that should be timed; `untimed` counts the events since the last
/// one.
#[inline]
pub fn is_sample_due(untimed: &Cell<u32>, every: u32) -> bool {
    let before = untimed.get() + 1;
    let is_due = before >= every;
    untimed.set(if is_due { 0 } else { before });
    is_due
}

/// A histogram of durations. It takes constant memory, and a quantile read from it is at most 25 % above the true
/// one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Histogram {
    counts: [u64; BUCKETS],
    /// The sum in nanoseconds, like `max`.
    sum: u64,
    max: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: [0; BUCKETS], sum: 0, max: 0 }
    }
}

/// One bucket that is not empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bucket {
    /// The upper bound of the bucket, exclusive; the lower one is the bound of the previous bucket. `None` for the
    /// last bucket, which has no bound.
    pub below: Option<Duration>,
    /// The number of durations in the bucket.
    pub count: u64,
}

impl Histogram {
    /// Adds a duration.
    pub fn add(&mut self, time: Duration) {
        self.add_many(time, 1);
    }

    /// Adds a duration `count` times.
    pub fn add_many(&mut self, time: Duration, count: u32) {
        self.add_nanos(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), count);
    }

    /// Adds a duration in nanoseconds `count` times.
    pub fn add_nanos(&mut self, nanos: u64, count: u32) {
        let count = u64::from(count);
        self.counts[index(nanos)] += count;
        self.sum = self.sum.saturating_add(nanos.saturating_mul(count));
        self.max = self.max.max(nanos);
    }

    /// Returns the number of durations.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// Returns the sum of all durations.
    pub fn sum(&self) -> Duration {
        Duration::from_nanos(self.sum)
    }

    /// Returns the longest duration.
    pub fn max(&self) -> Duration {
        Duration::from_nanos(self.max)
    }

    /// Returns the buckets that are not empty, in ascending order.
    pub fn buckets(&self) -> impl Iterator<Item = Bucket> + '_ {
        let filled = self.counts.iter().enumerate().filter(|(_, count)| **count > 0);
        filled.map(|(index, count)| Bucket { below: bound(index), count: *count })
    }
}

/// Returns the bound that a share of the durations in `buckets` (in order) does not exceed: `longest` for the last
/// bucket, and `None` if there are no buckets.
pub fn quantile(buckets: &[Bucket], share: f64, longest: Duration) -> Option<Duration> {
    let all: u64 = buckets.iter().map(|bucket| bucket.count).sum();
    let mut remaining = (share * all as f64).ceil().max(1.0) as u64;
    for bucket in buckets {
        if bucket.count >= remaining {
            return Some(bucket.below.unwrap_or(longest).min(longest));
        }
        remaining -= bucket.count;
    }
    None
}

fn index(nanos: u64) -> usize {
    if nanos < 1 << FIRST_BITS {
        return 0;
    }
    let exponent = nanos.ilog2();
    let step = nanos >> (exponent - STEPS_BITS) & (STEPS - 1);
    let index = u64::from(exponent - FIRST_BITS) * STEPS + step + 1;
    (index as usize).min(BUCKETS - 1)
}

fn bound(index: usize) -> Option<Duration> {
    let steps = index as u64 + STEPS;
    let power = FIRST_BITS - STEPS_BITS + (steps / STEPS - 1) as u32;
    (index + 1 < BUCKETS).then(|| Duration::from_nanos((STEPS + steps % STEPS) << power))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_bound_durations_closely() {
        let mut before = Duration::ZERO;
        for index_of in 0..BUCKETS - 1 {
            let below = bound(index_of).expect("a bound");
            assert!(below > before && (index_of == 0 || below <= before + before / 4), "{below:?}");
            let nanos = below.as_nanos() as u64;
            assert_eq!((index(nanos - 1), index(nanos)), (index_of, index_of + 1));
            before = below;
        }
        assert_eq!(before, Duration::from_nanos(1 << LAST_BITS));
        assert_eq!((index(0), index(u64::MAX)), (0, BUCKETS - 1));
    }

    #[test]
    fn quantiles_match_the_durations() {
        let mut histogram = Histogram::default();
        (1..=1000).for_each(|micros| histogram.add(Duration::from_micros(micros)));
        histogram.add(Duration::from_secs(100));
        let buckets: Vec<Bucket> = histogram.buckets().collect();
        let quantile_of = |share| quantile(&buckets, share, histogram.max()).expect("it is not empty");
        for (share, micros) in [(0.1, 101), (0.5, 501), (0.99, 991)] {
            let (exact, found) = (Duration::from_micros(micros), quantile_of(share));
            assert!(found >= exact && found <= exact + exact / 4, "{share}: {found:?}");
        }
        assert_eq!(quantile_of(1.0), Duration::from_secs(100));
        assert_eq!((histogram.count(), histogram.max()), (1001, Duration::from_secs(100)));
        assert_eq!(quantile(&[], 0.5, Duration::ZERO), None);
    }
}
