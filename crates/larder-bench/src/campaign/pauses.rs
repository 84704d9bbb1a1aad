//! A sample of repeated measurements of a duration.

use std::fmt;
use std::time::Duration;

/// A sample of durations.
#[derive(Clone, Debug, Default)]
pub struct DurationSample(Vec<Duration>);

impl DurationSample {
    /// Adds a duration.
    pub fn push(&mut self, pause: Duration) {
        self.0.push(pause);
    }

    /// Adds all durations of another sample.
    pub fn add(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// Returns the number of durations.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether the sample is empty.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the smallest duration that is at least as long as `percent` % of them.
    pub fn percentile(&self, percent: usize) -> Duration {
        let mut sorted = self.0.clone();
        sorted.sort_unstable();
        let rank = (sorted.len() * percent).div_ceil(100).max(1) - 1;
        sorted.get(rank).copied().unwrap_or_default()
    }
}

impl fmt::Display for DurationSample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [p50, p99, max] = [50, 99, 100].map(|percent| self.percentile(percent));
        write!(f, "{} pauses: P50 {p50:.1?}, P99 {p99:.1?}, longest {max:.1?}", self.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    /// Percentiles follow the nearest-rank method.
    fn percentiles_are_nearest_rank() {
        let mut pauses = DurationSample::default();
        assert_eq!(pauses.percentile(50), Duration::ZERO);
        (1..=200).rev().for_each(|millis| pauses.push(Duration::from_millis(millis)));
        assert_eq!(pauses.percentile(50), Duration::from_millis(100));
        assert_eq!(pauses.percentile(99), Duration::from_millis(198));
        assert_eq!(pauses.percentile(100), Duration::from_millis(200));
    }
}
