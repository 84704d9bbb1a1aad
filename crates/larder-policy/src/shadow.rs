//! Small caches beside the real one, which show what other ways to value lines would have brought.
//!
//! Each is a cache of a few sets for the lines of a sample (by hash, as in SHARDS), smaller than the real one by as much
//! as the sample is smaller than all lines; Waldspurger et al., "Cache Modeling and Optimization using Miniature
//! Simulations", ATC 17, show that such a cache hits about as often as the real one would. All see the same lines, so
//! what differs between them is the way to value lines.

use crate::admission::is_worth_it;
use crate::class::{Class, count};
use crate::policy::{Admission, Context};
use crate::set::{self, Set};
use crate::worth::Worths;

/// Ways of a set, and sets at most.
const WAYS: usize = 64;
const SETS_MAX: u64 = 64;

/// The sample is at most this share of all lines, so that it costs little for each use.
const SHARE_MAX: f64 = 1.0 / 16.0;

/// After so many uses of lines of the sample what was counted is looked at, and then counts for so much less.
const LOOK_USES: u32 = 1024;
const FADE: f32 = 0.97;

/// Another way to value lines than the first, or than the one before, must bring more hits by this share of the uses.
const GAIN_MIN: f32 = 0.01;

/// No line.
const NONE: u32 = 0;

/// A small cache.
struct Shadow {
    sets: Vec<u8>,
    /// By set and way, a part of the line's hash.
    tags: Vec<u32>,
    hits: f32,
}

/// Several, one for each way to value lines.
pub(crate) struct Shadows {
    /// Hashes below it are of the sample.
    threshold: u64,
    sets: u64,
    shadows: Vec<Shadow>,
    uses: f32,
    look_in: u32,
    best: usize,
}

impl Shadows {
    /// For a cache of so many lines, and `count` ways to value them, of which the first is taken at first.
    pub(crate) fn new(lines: u64, count: usize) -> Self {
        let sets = (lines as f64 * SHARE_MAX / WAYS as f64) as u64;
        let sets = sets.clamp(1, SETS_MAX);
        let share = (sets * WAYS as u64) as f64 / lines.max(1) as f64;
        let shadow = || Shadow {
            sets: vec![0; sets as usize * set::bytes(WAYS)],
            tags: vec![NONE; sets as usize * WAYS],
            hits: 0.0,
        };
        Self {
            threshold: (share.min(1.0) * u64::MAX as f64) as u64,
            sets,
            shadows: (0..count).map(|_| shadow()).collect(),
            uses: 0.0,
            look_in: LOOK_USES,
            best: 0,
        }
    }

    /// Whether the line with this hash is of the sample.
    pub(crate) fn has(&self, hash: u64) -> bool {
        hash <= self.threshold
    }

    /// The way to value lines that brings most.
    pub(crate) fn best(&self) -> usize {
        self.best
    }

    /// A line of the sample was used; `random` is any number.
    pub(crate) fn used(&mut self, hash: u64, context: &Context, tick: u32, random: u64, worths: &[Worths]) {
        let place = (hash % self.sets) as usize;
        for (shadow, worths) in self.shadows.iter_mut().zip(worths) {
            shadow.used(place, hash, context, tick, random, worths);
        }
        self.uses += 1.0;
        self.look_in -= 1;
        if self.look_in == 0 {
            self.look_in = LOOK_USES;
            self.look();
        }
    }

    /// The first way, and the one that is taken now, have a lead.
    fn look(&mut self) {
        let lead = GAIN_MIN * self.uses;
        let score = |index: usize| {
            let has_lead = index == 0 || index == self.best;
            self.shadows[index].hits + if has_lead { lead } else { 0.0 }
        };
        let best = (0..self.shadows.len()).max_by(|a, b| score(*a).total_cmp(&score(*b)));
        self.best = best.unwrap_or(0);
        self.uses *= FADE;
        self.shadows.iter_mut().for_each(|shadow| shadow.hits *= FADE);
    }
}

impl Shadow {
    fn used(&mut self, place: usize, hash: u64, context: &Context, tick: u32, random: u64, worths: &Worths) {
        let bytes = set::bytes(WAYS);
        let mut set = Set::new(&mut self.sets[place * bytes..][..bytes], WAYS, tick);
        let tags = &mut self.tags[place * WAYS..][..WAYS];
        let tag = (hash >> 16) as u32 | 1;
        if let Some(way) = tags.iter().position(|there| *there == tag) {
            self.hits += 1.0;
            let uses = set.class(way as u8).map_or(0, |class| count(class.uses(), random));
            set.put(way as u8, Class::new(context, uses), 0);
            return;
        }
        // A ghost keeps the upper bits, which say little about lines of the sample; those of the tag are as good as any.
        let hash = ghost_hash(tag);
        let ghost = set.find_ghost(hash);
        let uses = ghost.map_or(0, |ghost| count(set.ghost_uses(ghost), random));
        let class = Class::new(context, uses);
        if let Some(ghost) = ghost {
            set.forget(ghost);
        }
        if !is_worth_it(worths, &mut set, class, 0, Admission::Worth, 0.0) {
            set.remember(hash, uses);
            return;
        }
        let free = tags.iter().position(|there| *there == NONE);
        let Some(way) = free.or_else(|| set.least(worths.ranks()).map(usize::from)) else {
            return;
        };
        if let Some(old) = set.class(way as u8) {
            set.clear(way as u8);
            set.remember(ghost_hash(tags[way]), old.uses());
        }
        set.put(way as u8, class, 0);
        tags[way] = tag;
    }
}

/// What ghosts are made of, of the line with this tag.
fn ghost_hash(tag: u32) -> u64 {
    u64::from(tag) << 32
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::hash::mix;
    use crate::policy::Access;

    /// Uses of lines, of all of which half are of the last 300, through the best of these ways; which one that is.
    fn best_of(worths: &[Worths]) -> usize {
        let mut shadows = Shadows::new(1 << 14, worths.len());
        let context = Context {
            access: Access::Read,
            request_bytes: 4096,
            now: Duration::ZERO,
        };
        for at in 0..200_000u64 {
            let random = mix(at);
            let line = if random.is_multiple_of(2) {
                at
            } else {
                at - at.min(2 * ((random >> 32) % 150))
            };
            let hash = mix(line) % shadows.threshold;
            let tick = (at / 64) as u32;
            shadows.used(hash, &context, tick, random, worths);
        }
        shadows.best()
    }

    #[test]
    fn the_way_that_brings_more_hits_takes_over() {
        let worst = || Worths::fixed(|_, ticks| 1.0 + ticks);
        assert_eq!(best_of(&[worst(), Worths::recency(), worst()]), 1);
        assert_eq!(best_of(&[worst(), worst(), Worths::recency()]), 2);
    }

    #[test]
    fn among_equals_the_first_stays() {
        assert_eq!(
            best_of(&[Worths::recency(), Worths::recency(), Worths::uses_by_age()]),
            0
        );
    }
}
