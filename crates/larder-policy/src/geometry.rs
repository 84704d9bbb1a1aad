//! Division of a cache into sets.
//!
//! A cache has a number of sets of up to 256 ways each. Consecutive lines form groups, and the lines of a group share
//! a set, so that one request finds its lines together. Groups are assigned to a prime number of sets in turn, so
//! that no stride uses only a few of them.

/// The most ways of a set: a way's number is a byte.
pub const WAYS_MAX: usize = 256;

/// Fewest ways of a set, except in smaller caches. With so many ways, a prime number of sets leaves only a small
/// share of the lines unused.
const WAYS_MIN: usize = 128;

/// Number and size of the sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetGeometry {
    sets: u64,
    ways: usize,
    group_lines: u64,
}

impl SetGeometry {
    /// Divides at most `lines` lines (at least one) into sets, with groups of `group_lines` lines. Among the prime
    /// numbers of sets that give 128 to 256 ways, the result has the one that leaves the fewest lines unused.
    pub fn new(lines: u64, group_lines: u64) -> Self {
        let lines = lines.max(1);
        let ways_max = WAYS_MAX as u64;
        let group_lines = group_lines.max(1);
        if lines <= ways_max {
            return Self { sets: 1, ways: lines as usize, group_lines };
        }
        let fewest = lines.div_ceil(ways_max);
        let most = lines / WAYS_MIN as u64;
        // Near the fewest sets there are enough primes to choose from.
        let sets = (fewest..=most.max(fewest))
            .filter(|sets| is_prime(*sets))
            .take(64)
            .max_by_key(|sets| (sets * (lines / sets), lines / sets))
            .unwrap_or(fewest);
        Self { sets, ways: (lines / sets) as usize, group_lines }
    }

    /// Returns the number of sets.
    pub fn sets(&self) -> u64 {
        self.sets
    }

    /// Returns the ways of each set, 1 to 256.
    pub fn ways(&self) -> usize {
        self.ways
    }

    /// Returns the lines of the cache.
    pub fn lines(&self) -> u64 {
        self.sets * self.ways as u64
    }

    /// Returns the set of a line, given by its number on the disk.
    pub fn set_of(&self, line: u64) -> u64 {
        line / self.group_lines % self.sets
    }
}

/// Returns whether a number is prime.
pub fn is_prime(number: u64) -> bool {
    if number < 4 {
        return number >= 2;
    }
    let odd = (3..).step_by(2).take_while(|factor| factor * factor <= number);
    number % 2 == 1 && !odd.into_iter().any(|factor| number.is_multiple_of(factor))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Caches of any size use nearly all of their lines.
    #[test]
    fn geometry_leaves_few_lines_unused() {
        for lines in (1..100_000u64).chain([1 << 24, 1 << 28, (1 << 32) - 1]) {
            let geometry = SetGeometry::new(lines, 16);
            assert!(geometry.lines() <= lines && (1..=WAYS_MAX).contains(&geometry.ways()), "{lines}");
            let lost = lines - geometry.lines();
            let share = if lines < 2_000 { 0.12 } else { 0.03 };
            assert!(lost as f64 <= lines as f64 * share, "{lines} {geometry:?}");
            assert!(geometry.sets() == 1 || is_prime(geometry.sets()), "{lines} {geometry:?}");
        }
    }

    #[test]
    fn is_prime_matches_trial_division() {
        for number in 0..2_000u64 {
            let naive = number > 1 && !(2..number).any(|factor| number.is_multiple_of(factor));
            assert_eq!(is_prime(number), naive, "{number}");
        }
    }

    /// The lines of a group share a set, and consecutive groups do not.
    #[test]
    fn lines_of_group_share_set() {
        let geometry = SetGeometry::new(10_000, 16);
        assert_eq!(geometry.set_of(160), geometry.set_of(175));
        assert_ne!(geometry.set_of(160), geometry.set_of(176));
    }
}
