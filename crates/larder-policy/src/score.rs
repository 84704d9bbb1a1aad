//! Score of a line: the hits per tick that its slot brings, if the line is kept for the optimal time.
//!
//! The score is the Gittins index ("Bandit Processes and Dynamic Allocation Indices", Journal of the Royal
//! Statistical Society B 41, 1979) of a line of a class that has not been used for a given time. It is the maximum,
//! over all times to wait, of the probability to see the next use, divided by the expected time in the slot. Hit
//! density (Beckmann et al., "LHD: Improving Cache Hit Rate by Maximizing Hit Density", NSDI 2018) is the same idea;
//! here reuse times are learnt from a sample of all lines, cached or not.

use crate::age::{AGE_MIN_TICKS, AGE_WIDTH_TICKS, AGES};
use crate::class::{self, Class};
use crate::reuse::ReuseTimes;

/// Lines of average reuse that are added to the evidence about each class.
const PRIOR_LINES: f32 = 8.0;

/// Rank of an empty way; together with the way in one number it stays above the numbers of lines.
pub(crate) const RANK_NONE: u32 = (1 << 24) - 1;

/// Bits of a rank that hold the age.
const AGE_BITS: u32 = 7;

/// Scores by class and age; a line with a larger one is more valuable.
pub(crate) struct ScoreTable {
    /// Numbers of 23 bits in the order of the scores; among equal scores the older line has a lower rank.
    ranks: Vec<u32>,
    values: Vec<f32>,
    /// Probability that a line of the class is used again by that age.
    hits: Vec<f32>,
}

impl ScoreTable {
    /// Returns scores for the time before anything is learnt: uses divided by the time since the last one (as in
    /// Blankstein, Sen and Freedman, "Hyperbolic Caching", ATC 17).
    pub(crate) fn uses_by_age() -> Self {
        Self::fixed(|class, ticks| f32::from(1u16 << class.uses()) / (1.0 + ticks))
    }

    /// Returns scores by the last use alone, as in LRU.
    pub(crate) fn recency() -> Self {
        Self::fixed(|_, ticks| 1.0 / (1.0 + ticks))
    }

    /// Returns scores that need no learning; `value` gets the class, and the ticks since the last use.
    pub(crate) fn fixed(value: impl Fn(Class, f32) -> f32) -> Self {
        let mut table = Self {
            ranks: vec![RANK_NONE; class::COUNT * AGES],
            values: vec![0.0; class::COUNT * AGES],
            hits: vec![0.5; class::COUNT * AGES],
        };
        for number in 1..=class::LAST {
            for (age, ticks) in AGE_MIN_TICKS.iter().enumerate() {
                table.set(number.into(), age, value(Class::from_number(number), *ticks));
            }
        }
        table
    }

    fn set(&mut self, class: usize, age: usize, value: f32) {
        // Positive floats have the same order as their bits.
        let rank = value.to_bits() >> 15 << AGE_BITS | (AGES - 1 - age) as u32;
        self.ranks[class * AGES + age] = rank;
        self.values[class * AGES + age] = value;
    }

    /// Computes the scores from learnt reuse times, by class.
    pub(crate) fn learn(&mut self, times: &[ReuseTimes]) {
        let mut all = [0.0; AGES];
        let mut all_ended = [0.0; AGES];
        for class_times in times {
            for age in 0..AGES {
                all[age] += class_times.reused[age];
                all_ended[age] += class_times.ended[age];
            }
        }
        let total: f32 = all.iter().chain(&all_ended).sum();
        let share = PRIOR_LINES / total.max(1.0);
        for (class, class_times) in times.iter().enumerate().take(usize::from(class::LAST) + 1).skip(1) {
            let reused = |age: usize| class_times.reused[age] + share * all[age];
            let ended = |age: usize| class_times.ended[age] + share * all_ended[age];
            self.learn_class(class, reused, ended);
        }
    }

    fn learn_class(&mut self, class: usize, reused: impl Fn(usize) -> f32, ended: impl Fn(usize) -> f32) {
        // From the highest age down; stretches in which waiting longer is better are merged.
        let mut stretches = [(0.0f32, 0.0f32); AGES];
        let mut count = 0;
        let mut alive = 0.0;
        for age in (0..AGES).rev() {
            alive += reused(age) + ended(age);
            let (mut hits, mut time) = (reused(age), (alive * AGE_WIDTH_TICKS[age]).max(f32::MIN_POSITIVE));
            while count > 0 && stretches[count - 1].0 * time > hits * stretches[count - 1].1 {
                count -= 1;
                hits += stretches[count].0;
                time += stretches[count].1;
            }
            stretches[count] = (hits, time);
            count += 1;
            self.set(class, age, hits / time);
        }
        let mut hits = 0.0;
        for age in 0..AGES {
            hits += reused(age);
            self.hits[class * AGES + age] = hits / alive.max(f32::MIN_POSITIVE);
        }
    }

    /// Returns the ranks for [`crate::set::Set::lowest`]; those of class 0 are the highest.
    pub(crate) fn ranks(&self) -> &[u32] {
        &self.ranks
    }

    /// Returns the score of a line in hits per tick.
    pub(crate) fn value(&self, class: Class, age: usize) -> f32 {
        self.values[usize::from(class.number()) * AGES + age]
    }

    /// Returns the probability that a line of `class`, just used, is used again before its score falls below `lowest`.
    pub(crate) fn hit_probability(&self, class: Class, lowest: f32) -> f32 {
        let class = usize::from(class.number());
        let values = &self.values[class * AGES..][..AGES];
        match values.iter().position(|value| *value < lowest) {
            Some(0) => 0.0,
            Some(age) => self.hits[class * AGES + age - 1],
            None => self.hits[class * AGES + AGES - 1],
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Computes the score by its definition: the maximum, over all ages to wait until, of hits divided by the time
    /// until then.
    fn score_by_definition(reused: &[f32], ended: &[f32], age: usize) -> f32 {
        let alive = |at: usize| reused[at..].iter().chain(&ended[at..]).sum::<f32>();
        let until = |last: usize| {
            let hits: f32 = reused[age..=last].iter().sum();
            let time: f32 = (age..=last).map(|at| alive(at) * AGE_WIDTH_TICKS[at]).sum();
            if time > 0.0 { hits / time } else { 0.0 }
        };
        (age..AGES).map(until).fold(0.0, f32::max)
    }

    proptest! {
        /// The scores equal their definition, and the ranks have the same order.
        #[test]
        fn scores_match_definition(
            reused in prop::collection::vec(prop_oneof![3 => Just(0u8), 1 => any::<u8>()], AGES),
            ended in prop::collection::vec(prop_oneof![3 => Just(0u8), 1 => any::<u8>()], AGES),
        ) {
            let [reused, ended] = [reused, ended].map(|counts| counts.into_iter().map(f32::from).collect::<Vec<f32>>());
            let mut table = ScoreTable::recency();
            table.learn_class(1, |age| reused[age], |age| ended[age]);
            let class = Class::from_number(1);
            let all: f32 = reused.iter().chain(&ended).sum();
            for age in 0..AGES {
                let expected = score_by_definition(&reused, &ended, age);
                let worth = table.value(class, age);
                prop_assert!((worth - expected).abs() <= 1e-4 * expected.max(1e-6), "{age}: {worth}, not {expected}");
            }
            if all > 0.0 {
                let hit: f32 = reused.iter().sum();
                prop_assert!((table.hit_probability(class, 0.0) - hit / all).abs() < 1e-4);
            }
            for age in 1..AGES {
                let higher = table.value(class, age - 1) > 1.02 * table.value(class, age);
                let ranked = table.ranks()[AGES + age - 1] > table.ranks()[AGES + age];
                prop_assert!(!higher || ranked, "{age}");
            }
        }
    }
}
