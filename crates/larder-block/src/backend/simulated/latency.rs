//! The latency of the requests of a simulated device.

use std::time::Duration;

use super::random::SeededRng;

/// The distribution of request durations. Each request draws its own, so that requests overtake each other.
#[derive(Clone, Copy, Debug)]
pub struct LatencyDistribution {
    /// The number of requests in a thousand that complete synchronously, without any delay.
    pub synchronous_per_mille: u32,
    /// The minimum duration of asynchronous requests.
    pub min: Duration,
    /// The maximum duration of asynchronous requests that are not slow.
    pub max: Duration,
    /// The number of slow requests, which take up to [`Self::slow`], in a thousand asynchronous ones.
    pub slow_per_mille: u32,
    /// The maximum duration of slow requests.
    pub slow: Duration,
}

impl LatencyDistribution {
    /// Every request completes synchronously.
    pub const NONE: Self = Self {
        synchronous_per_mille: 1000,
        min: Duration::ZERO,
        max: Duration::ZERO,
        slow_per_mille: 0,
        slow: Duration::ZERO,
    };

    /// Some requests complete synchronously, most take up to a millisecond, a few up to 50 ms.
    pub const VARIED: Self = Self {
        synchronous_per_mille: 150,
        min: Duration::from_micros(10),
        max: Duration::from_millis(1),
        slow_per_mille: 20,
        slow: Duration::from_millis(50),
    };

    /// Returns the duration of the next request; `None` if it completes synchronously.
    pub(super) fn draw(&self, random: &mut SeededRng) -> Option<Duration> {
        if random.chance(self.synchronous_per_mille) {
            None
        } else if random.chance(self.slow_per_mille) {
            Some(random.duration(self.max, self.slow))
        } else {
            Some(random.duration(self.min, self.max))
        }
    }
}
