//! Pseudo-random numbers: the same seed gives the same sequence on any machine.

use std::ops::Range;

/// SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
#[derive(Clone, Debug)]
pub(super) struct SeededRandom(u64);

impl SeededRandom {
    /// Creates the sequence `stream` of a seed. Different sequences of one seed are independent.
    pub(super) fn new(seed: u64, stream: u64) -> Self {
        let mut dice = Self(seed ^ stream.wrapping_mul(0xd605_bbb5_8c8a_bc03));
        dice.next();
        dice
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    pub(super) fn below(&mut self, limit: u64) -> u64 {
        self.next() % limit.max(1)
    }

    pub(super) fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }

    pub(super) fn pick<'a, T>(&mut self, choices: &'a [T]) -> &'a T {
        &choices[self.below(choices.len() as u64) as usize]
    }

    /// Returns a random byte range of a disk: at the edges of clusters and near them, near the end, or anywhere. The
    /// range is aligned to `unit` bytes, and at most `len_max` bytes long.
    pub(super) fn range(&mut self, size: u64, cluster: u64, unit: u64, len_max: u64) -> Range<u64> {
        let units = (size / unit).max(1);
        let per_cluster = (cluster / unit).max(1);
        let near = |dice: &mut Self, at: u64| (at + dice.below(5)).saturating_sub(2);
        let start = match self.below(5) {
            0 => self.below(units) / per_cluster * per_cluster,
            1 => {
                let edge = self.below(units) / per_cluster * per_cluster;
                near(self, edge)
            }
            2 => self.below(units),
            // The first clusters are preferred: they contain headers, boot sectors, and host offset 0.
            3 => self.below(3) * per_cluster,
            _ => units.saturating_sub(1 + self.below(2 * per_cluster)),
        };
        let start = start.min(units - 1);
        let len_max = (len_max / unit).max(1);
        let len = match self.below(6) {
            0 => 1 + self.below(8),
            1 => 1 + self.below(len_max),
            2 => per_cluster,
            3 => per_cluster * (1 + self.below(4)),
            4 => near(self, per_cluster).max(1),
            _ => units,
        };
        let len = len.min(len_max).min(units - start).max(1);
        start * unit..(start + len) * unit
    }
}
