//! Random numbers from a seed, the same on every host and in every version.

use std::time::Duration;

/// A generator of random numbers: splitmix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators",
/// 2014). Good enough to choose what happens in a simulation; not for secrets.
#[derive(Clone, Debug)]
pub struct SeededRng {
    state: u64,
}

impl SeededRng {
    /// Creates the generator for `seed`.
    pub fn new(seed: u64) -> Self {
        Self { state: seed }
    }

    /// Returns a separate generator for a part of the simulation, so that a change in one part does not alter the
    /// numbers of the others.
    pub fn fork(&mut self) -> Self {
        Self::new(self.next_u64())
    }

    /// Returns a random number of 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `bound`; 0 if `bound` is 0.
    pub fn below(&mut self, bound: u64) -> u64 {
        // The high half of the product is uniform enough for bounds far below 2^64.
        ((u128::from(self.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// Returns a number from `min` to `max`, both included; `min` if `max` is smaller.
    pub fn between(&mut self, min: u64, max: u64) -> u64 {
        min + self.below(max.saturating_sub(min).saturating_add(1))
    }

    /// Returns true `per_mille` times in a thousand.
    pub fn chance(&mut self, per_mille: u32) -> bool {
        self.below(1000) < u64::from(per_mille)
    }

    /// Returns one of `choices`.
    ///
    /// # Panics
    /// If `choices` is empty.
    pub fn pick<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }

    /// Returns a time from `min` to `max`, both included.
    pub fn duration(&mut self, min: Duration, max: Duration) -> Duration {
        let nanos = |time: Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        Duration::from_nanos(self.between(nanos(min), nanos(max)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seed_always_gives_same_numbers() {
        // The first outputs of the published splitmix64 for seed 1234567.
        let mut random = SeededRng::new(1_234_567);
        assert_eq!(random.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(random.next_u64(), 3_203_168_211_198_807_973);
    }

    #[test]
    fn numbers_stay_within_bounds() {
        let mut random = SeededRng::new(7);
        assert_eq!(random.below(0), 0);
        assert_eq!(random.between(5, 5), 5);
        for _ in 0..1000 {
            assert!(random.below(3) < 3);
            assert!((2..=9).contains(&random.between(2, 9)));
        }
    }
}
