//! How long the requests of a simulated device take.

use std::time::Duration;

use super::random::Random;

/// How long requests take, each drawn for itself, so that they overtake each other.
#[derive(Clone, Copy, Debug)]
pub struct Latency {
    /// How many in a thousand are answered in the call itself.
    pub in_call_per_mille: u32,
    /// The shortest time of the others.
    pub least: Duration,
    /// The longest time of most of them.
    pub most: Duration,
    /// How many in a thousand of the others are slow...
    pub slow_per_mille: u32,
    /// ...and take up to this long.
    pub slow: Duration,
}

impl Latency {
    /// Every request is answered in the call.
    pub const NONE: Self = Self {
        in_call_per_mille: 1000,
        least: Duration::ZERO,
        most: Duration::ZERO,
        slow_per_mille: 0,
        slow: Duration::ZERO,
    };

    /// Some are answered in the call, most take up to a millisecond, a few up to 50 ms.
    pub const VARIED: Self = Self {
        in_call_per_mille: 150,
        least: Duration::from_micros(10),
        most: Duration::from_millis(1),
        slow_per_mille: 20,
        slow: Duration::from_millis(50),
    };

    /// The time for the next request; `None` if it is answered in the call.
    pub(super) fn draw(&self, random: &mut Random) -> Option<Duration> {
        if random.chance(self.in_call_per_mille) {
            None
        } else if random.chance(self.slow_per_mille) {
            Some(random.duration(self.most, self.slow))
        } else {
            Some(random.duration(self.least, self.most))
        }
    }
}
