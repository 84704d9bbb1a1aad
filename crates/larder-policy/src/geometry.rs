//! Which set a line belongs to.
//!
//! A cache is a number of sets of up to 256 ways each. Lines that follow each other are a group and share a set, so
//! that what one request needs is found in one place; groups are dealt out to a prime number of sets, so that no stride
//! meets only a few of them.

/// The most ways that a set has: a way's number is a byte.
pub const WAYS_MAX: usize = 256;

/// Fewer ways than this are taken only by caches that are not larger: so small a share of a set is given away for a
/// prime number of sets.
const WAYS_MIN: usize = 128;

/// How many sets there are, and how large.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    sets: u64,
    ways: usize,
    group_lines: u64,
}

impl Geometry {
    /// Sets for `lines` lines at most (at least one is taken), whose groups are `group_lines` lines: of the prime
    /// numbers of sets that leave 128 to 256 ways the one that leaves the fewest lines unused.
    pub fn new(lines: u64, group_lines: u64) -> Self {
        let lines = lines.max(1);
        let ways_max = WAYS_MAX as u64;
        let group_lines = group_lines.max(1);
        if lines <= ways_max {
            return Self {
                sets: 1,
                ways: lines as usize,
                group_lines,
            };
        }
        let fewest = lines.div_ceil(ways_max);
        let most = lines / WAYS_MIN as u64;
        // Close to full sets there are as many primes as are worth looking at.
        let sets = (fewest..=most.max(fewest))
            .filter(|sets| is_prime(*sets))
            .take(64)
            .max_by_key(|sets| (sets * (lines / sets), lines / sets))
            .unwrap_or(fewest);
        Self {
            sets,
            ways: (lines / sets) as usize,
            group_lines,
        }
    }

    /// Number of sets.
    pub fn sets(&self) -> u64 {
        self.sets
    }

    /// Ways of each set, 1 to 256.
    pub fn ways(&self) -> usize {
        self.ways
    }

    /// Lines of the cache.
    pub fn lines(&self) -> u64 {
        self.sets * self.ways as u64
    }

    /// The set that a line belongs to, by the line's number on its disk.
    pub fn set_of(&self, line: u64) -> u64 {
        line / self.group_lines % self.sets
    }
}

/// Whether only 1 and the number itself divide it.
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

    #[test]
    fn a_cache_of_any_size_loses_little_to_its_sets() {
        for lines in (1..100_000u64).chain([1 << 24, 1 << 28, (1 << 32) - 1]) {
            let geometry = Geometry::new(lines, 16);
            assert!(
                geometry.lines() <= lines && (1..=WAYS_MAX).contains(&geometry.ways()),
                "{lines}"
            );
            let lost = lines - geometry.lines();
            let share = if lines < 2_000 { 0.12 } else { 0.03 };
            assert!(lost as f64 <= lines as f64 * share, "{lines} {geometry:?}");
            assert!(
                geometry.sets() == 1 || is_prime(geometry.sets()),
                "{lines} {geometry:?}"
            );
        }
    }

    #[test]
    fn primes_are_those_without_factors() {
        for number in 0..2_000u64 {
            let naive = number > 1 && !(2..number).any(|factor| number.is_multiple_of(factor));
            assert_eq!(is_prime(number), naive, "{number}");
        }
    }

    #[test]
    fn lines_of_a_group_share_a_set_and_groups_are_spread() {
        let geometry = Geometry::new(10_000, 16);
        assert_eq!(geometry.set_of(160), geometry.set_of(175));
        assert_ne!(geometry.set_of(160), geometry.set_of(176));
    }
}
