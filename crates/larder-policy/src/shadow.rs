//! Miniature caches that simulate alternative scores of lines next to the real cache.
//!
//! Each is a cache of a few sets for a sample of the lines (by hash, as in SHARDS). It is smaller than the real cache
//! by the same factor as the sample is smaller than all lines. Waldspurger et al., "Cache Modeling and Optimization
//! using Miniature Simulations", ATC 17, show that its hit ratio is close to that of the real cache. All miniature
//! caches see the same lines, so that they differ by their scores only.

use crate::admission::should_admit;
use crate::class::{Class, count_use};
use crate::policy::{AccessContext, AdmissionPolicy};
use crate::score::ScoreTable;
use crate::set::{self, Set};

/// Ways of a set; [`SETS_MAX`] is the most sets.
const WAYS: usize = 64;
const SETS_MAX: u64 = 64;

/// Largest share of the lines that is sampled, which bounds the cost per use.
const SHARE_MAX: f64 = 1.0 / 16.0;

/// Sampled uses between two comparisons of the caches; after each, the counts are multiplied by [`DECAY`].
const COMPARISON_USES: u32 = 1024;
const DECAY: f32 = 0.97;

/// Share of the uses by which other scores must bring more hits than the first ones, or than the present ones.
const LEAD_SHARE: f32 = 0.01;

/// Tag of an empty way.
const NONE: u32 = 0;

/// One miniature cache.
struct ShadowCache {
    sets: Vec<u8>,
    /// Part of the line's hash, by set and way.
    tags: Vec<u32>,
    hits: f32,
}

/// Miniature caches, one for each kind of scores.
pub(crate) struct ShadowCaches {
    /// Highest hash of sampled lines.
    threshold: u64,
    sets: u64,
    shadows: Vec<ShadowCache>,
    uses: f32,
    uses_to_comparison: u32,
    best: usize,
}

impl ShadowCaches {
    /// Creates `count` miniature caches for a cache of `lines` lines; the first one is the best until others have
    /// proved better.
    pub(crate) fn new(lines: u64, count: usize) -> Self {
        let sets = (lines as f64 * SHARE_MAX / WAYS as f64) as u64;
        let sets = sets.clamp(1, SETS_MAX);
        let share = (sets * WAYS as u64) as f64 / lines.max(1) as f64;
        let shadow = || ShadowCache {
            sets: vec![0; sets as usize * set::bytes(WAYS)],
            tags: vec![NONE; sets as usize * WAYS],
            hits: 0.0,
        };
        Self {
            threshold: (share.min(1.0) * u64::MAX as f64) as u64,
            sets,
            shadows: (0..count).map(|_| shadow()).collect(),
            uses: 0.0,
            uses_to_comparison: COMPARISON_USES,
            best: 0,
        }
    }

    /// Returns whether the line with this hash is sampled.
    pub(crate) fn is_sampled(&self, hash: u64) -> bool {
        hash <= self.threshold
    }

    /// Returns the index of the scores with the most hits.
    pub(crate) fn best(&self) -> usize {
        self.best
    }

    /// Records a use of a sampled line; `random` is an arbitrary number.
    pub(crate) fn record_use(
        &mut self,
        hash: u64,
        context: &AccessContext,
        tick: u32,
        random: u64,
        tables: &[ScoreTable],
    ) {
        let set_index = (hash % self.sets) as usize;
        for (shadow, scores) in self.shadows.iter_mut().zip(tables) {
            shadow.record_use(set_index, hash, context, tick, random, scores);
        }
        self.uses += 1.0;
        self.uses_to_comparison -= 1;
        if self.uses_to_comparison == 0 {
            self.uses_to_comparison = COMPARISON_USES;
            self.choose_best();
        }
    }

    /// Chooses the best scores; the first ones and the present ones have a lead.
    fn choose_best(&mut self) {
        let lead = LEAD_SHARE * self.uses;
        let score = |index: usize| {
            let has_lead = index == 0 || index == self.best;
            self.shadows[index].hits + if has_lead { lead } else { 0.0 }
        };
        let best = (0..self.shadows.len()).max_by(|a, b| score(*a).total_cmp(&score(*b)));
        self.best = best.unwrap_or(0);
        self.uses *= DECAY;
        self.shadows.iter_mut().for_each(|shadow| shadow.hits *= DECAY);
    }
}

impl ShadowCache {
    fn record_use(
        &mut self,
        set_index: usize,
        hash: u64,
        context: &AccessContext,
        tick: u32,
        random: u64,
        scores: &ScoreTable,
    ) {
        let bytes = set::bytes(WAYS);
        let mut set = Set::new(&mut self.sets[set_index * bytes..][..bytes], WAYS, tick);
        let tags = &mut self.tags[set_index * WAYS..][..WAYS];
        let tag = (hash >> 16) as u32 | 1;
        if let Some(way) = tags.iter().position(|other| *other == tag) {
            self.hits += 1.0;
            let uses = set.class(way as u8).map_or(0, |class| count_use(class.uses(), random));
            set.put(way as u8, Class::new(context, uses), 0);
            return;
        }
        // A ghost has the upper bits of a hash, which hardly differ among sampled lines; the bits of the tag do.
        let hash = ghost_hash(tag);
        let ghost = set.find_ghost(hash);
        let uses = ghost.map_or(0, |ghost| count_use(set.ghost_uses(ghost), random));
        let class = Class::new(context, uses);
        if let Some(ghost) = ghost {
            set.remove_ghost(ghost);
        }
        if !should_admit(scores, &mut set, class, 0, AdmissionPolicy::ByScore, 0.0) {
            set.add_ghost(hash, uses);
            return;
        }
        let free = tags.iter().position(|other| *other == NONE);
        let Some(way) = free.or_else(|| set.lowest(scores.ranks()).map(usize::from)) else {
            return;
        };
        if let Some(old) = set.class(way as u8) {
            set.clear(way as u8);
            set.add_ghost(ghost_hash(tags[way]), old.uses());
        }
        set.put(way as u8, class, 0);
        tags[way] = tag;
    }
}

/// Returns the hash for the ghost of the line with this tag.
fn ghost_hash(tag: u32) -> u64 {
    u64::from(tag) << 32
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::hash::mix;
    use crate::policy::AccessKind;

    /// Returns the index of the best scores after many uses, half of which are of one of the last 300 lines.
    fn best_of(tables: &[ScoreTable]) -> usize {
        let mut shadows = ShadowCaches::new(1 << 14, tables.len());
        let context = AccessContext { access: AccessKind::Read, request_bytes: 4096, now: Duration::ZERO };
        for at in 0..200_000u64 {
            let random = mix(at);
            let line = if random.is_multiple_of(2) { at } else { at - at.min(2 * ((random >> 32) % 150)) };
            let hash = mix(line) % shadows.threshold;
            let tick = (at / 64) as u32;
            shadows.record_use(hash, &context, tick, random, tables);
        }
        shadows.best()
    }

    /// Scores that bring more hits replace the first ones.
    #[test]
    fn better_scores_take_over() {
        let worst = || ScoreTable::fixed(|_, ticks| 1.0 + ticks);
        assert_eq!(best_of(&[worst(), ScoreTable::recency(), worst()]), 1);
        assert_eq!(best_of(&[worst(), worst(), ScoreTable::recency()]), 2);
    }

    /// Among equally good scores the first ones are kept.
    #[test]
    fn first_scores_win_ties() {
        assert_eq!(best_of(&[ScoreTable::recency(), ScoreTable::recency(), ScoreTable::uses_by_age()]), 0);
    }
}
