//! Policy of Larder's disk cache: its interface to the cache.
//!
//! The cache owns the memory: [`Policy::set_bytes`] bytes for each set, zero at first, which it passes to every call
//! about that set. State that does not belong to a set is in [`Policy`]. A line is given by its number on the disk
//! (offset divided by the line's size), and its slot in the set by the way.
//!
//! - A hit: [`Policy::touch`].
//! - A miss: [`Policy::admit`]. If the line is admitted and no way is free: [`Policy::victim`] and, once that line
//!   has been evicted, [`Policy::evict`]. Then [`Policy::insert`].
//! - A line that is dropped for another reason, such as a discard: [`Policy::remove`].
//!
//! Invariant: a way is in the set's order from its `insert` (or `load`) to its `evict` or `remove`. Calls about a way
//! that is not in the order are ignored; one about a way that the set does not have panics.

use std::time::Duration;

use crate::admission::should_admit;
use crate::age::{HORIZON_TICKS, TICKS_PER_CACHE};
use crate::budget::WriteBudget;
use crate::class::{Class, count_use};
use crate::geometry::WAYS_MAX;
use crate::hash::mix;
use crate::reuse::ReuseSampler;
use crate::score::ScoreTable;
use crate::set::{self, Set};
use crate::shadow::ShadowCaches;

/// Kind of a guest's access to a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessKind {
    /// All or part of the line is read.
    Read,
    /// All or part of the line is written.
    Write,
}

/// Circumstances of an access.
#[derive(Clone, Copy, Debug)]
pub struct AccessContext {
    /// Kind of the access.
    pub access: AccessKind,
    /// Bytes of the whole request.
    pub request_bytes: u64,
    /// Time since an arbitrary moment, the same for all calls.
    pub now: Duration,
}

/// Options of a cache's policy.
#[derive(Clone, Copy, Debug)]
pub struct PolicyOptions {
    /// Ways of each set, 1 to 256.
    pub ways: usize,
    /// Ways of each set that the caller keeps empty: a set is full when all others are in use.
    pub spare_ways: usize,
    /// Lines of the cache in all sets.
    pub lines: u64,
    /// Bytes of a line.
    pub line_bytes: u32,
    /// Selection of the lines that are admitted.
    pub admission: AdmissionPolicy,
    /// Bytes that may be written to the SSD in a day; `None` if unlimited.
    pub budget: Option<u64>,
}

/// Selection of the lines that are admitted to a full set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AdmissionPolicy {
    /// Lines whose hits are likely to be worth the write.
    #[default]
    ByScore,
    /// All lines.
    All,
}

/// Uses between two computations of the scores, as a multiple of the cache's lines. Each time, earlier observations
/// are multiplied by [`DECAY`].
const LEARN_INTERVAL_CACHES: f64 = 0.25;
const DECAY: f32 = 0.98;

/// Fewest uses between two computations of the scores, which bounds the cost per use.
const LEARN_USES_MIN: u64 = 4096;

/// Tick of the first use, so that loaded lines can be older.
const TICK_START: u32 = 256;

/// Index of the learnt scores in the policy's `score_tables`.
const LEARNT_TABLE: usize = 0;

/// Eviction and admission policy. See the [module](self).
pub struct Policy {
    options: PolicyOptions,
    /// Uses of lines so far.
    uses: u64,
    /// Uses in a tick.
    tick_uses: u64,
    tick: u32,
    /// Uses at which the next tick begins; `learn_at` is the number at which scores are learnt next.
    tick_at: u64,
    learn_at: u64,
    learn_every: u64,
    reuse: ReuseSampler,
    /// Alternative scores: the learnt ones, and those that need no learning.
    score_tables: Vec<ScoreTable>,
    shadows: ShadowCaches,
    budget: Option<WriteBudget>,
}

impl Policy {
    /// Creates the policy of an empty cache.
    ///
    /// # Panics
    /// The sets have no ways, or more than 256.
    pub fn new(options: PolicyOptions) -> Self {
        assert!((1..=WAYS_MAX).contains(&options.ways), "a set has 1 to 256 ways");
        let tick_uses = (options.lines / TICKS_PER_CACHE).max(1);
        let learn_every = ((options.lines as f64 * LEARN_INTERVAL_CACHES) as u64).max(LEARN_USES_MIN);
        Self {
            options,
            uses: 0,
            tick_uses,
            tick: TICK_START,
            tick_at: tick_uses,
            learn_at: learn_every,
            learn_every,
            reuse: ReuseSampler::new(tick_uses * u64::from(HORIZON_TICKS)),
            shadows: ShadowCaches::new(options.lines, 3),
            score_tables: vec![ScoreTable::uses_by_age(), ScoreTable::uses_by_age(), ScoreTable::recency()],
            budget: options.budget.map(WriteBudget::new),
        }
    }

    /// Returns the bytes of a set's state: 4 for each way, and 24. All zero is a set without lines.
    pub fn set_bytes(&self) -> usize {
        set::bytes(self.options.ways)
    }

    fn set<'a>(&self, state: &'a mut [u8]) -> Set<'a> {
        Set::new(state, self.options.ways, self.tick)
    }

    /// Returns the scores that perform best now.
    fn best_scores(&self) -> &ScoreTable {
        &self.score_tables[self.shadows.best()]
    }

    fn random(&self) -> u64 {
        mix(self.uses)
    }

    /// Records a use of a line.
    fn record_use(&mut self, hash: u64, class: Class, context: &AccessContext) {
        self.reuse.record_use(hash, class, self.tick);
        if self.shadows.is_sampled(hash) {
            let random = self.random();
            self.shadows.record_use(hash, context, self.tick, random, &self.score_tables);
        }
        self.uses += 1;
        if self.uses >= self.tick_at {
            self.tick_at += self.tick_uses;
            self.tick = self.tick.wrapping_add(1);
        }
        if self.uses >= self.learn_at {
            self.learn_at += self.learn_every;
            self.score_tables[LEARNT_TABLE].learn(&self.reuse.times(self.tick));
            self.reuse.decay(DECAY);
        }
    }

    /// Returns the offsets in a set's state that [`Self::touch`] of `way` accesses, so that they can be prefetched.
    pub fn touched_offsets(&self, way: u8) -> [usize; 3] {
        set::touched_offsets(self.options.ways, way)
    }

    /// Records a hit of `line`, which is in `way`.
    pub fn touch(&mut self, set: &mut [u8], way: u8, line: u64, context: AccessContext) {
        let mut set = self.set(set);
        let uses = set.class(way).map_or(0, |class| count_use(class.uses(), self.random()));
        let class = Class::new(&context, uses);
        set.put(way, class, 0);
        self.record_use(mix(line), class, &context);
    }

    /// Returns whether `line`, which is not in its set, is admitted; if so, its bytes count as written. Called once
    /// for each miss.
    pub fn admit(&mut self, set: &mut [u8], line: u64, context: AccessContext) -> bool {
        let hash = mix(line);
        let scarcity = self.scarcity(self.options.line_bytes.into(), context.now);
        let mut set = self.set(set);
        let ghost = set.find_ghost(hash);
        let uses = ghost.map_or(0, |ghost| count_use(set.ghost_uses(ghost), self.random()));
        let class = Class::new(&context, uses);
        let admit = scarcity < 1.0
            && should_admit(
                self.best_scores(),
                &mut set,
                class,
                self.options.spare_ways,
                self.options.admission,
                scarcity,
            );
        if !admit {
            if let Some(ghost) = ghost {
                set.remove_ghost(ghost);
            }
            set.add_ghost(hash, uses);
        }
        self.record_use(hash, class, &context);
        if admit {
            self.record_write(self.options.line_bytes.into(), context.now);
        }
        admit
    }

    fn scarcity(&mut self, bytes: u64, now: Duration) -> f32 {
        self.budget.as_mut().map_or(0.0, |budget| budget.scarcity(bytes, now))
    }

    /// Returns the way to evict: of the ways that `may_evict` allows (not dirty or busy ones), the one with the
    /// lowest score. Its line stays in the set until [`Self::evict`].
    pub fn victim(&mut self, set: &mut [u8], may_evict: impl FnMut(u8) -> bool) -> Option<u8> {
        let mut set = self.set(set);
        set.lowest_allowed(self.best_scores().ranks(), may_evict)
    }

    /// Records that `line` was evicted from `way`.
    pub fn evict(&mut self, set: &mut [u8], way: u8, line: u64) {
        let mut set = self.set(set);
        let uses = set.class(way).map_or(0, Class::uses);
        set.clear(way);
        set.add_ghost(mix(line), uses);
    }

    /// Records that `line` was put into `way`, which was free; `context` is that of the access that missed.
    pub fn insert(&mut self, set: &mut [u8], way: u8, line: u64, context: AccessContext) {
        let mut set = self.set(set);
        let ghost = set.find_ghost(mix(line));
        let uses = ghost.map_or(0, |ghost| count_use(set.ghost_uses(ghost), self.random()));
        set.put(way, Class::new(&context, uses), 0);
        if let Some(ghost) = ghost {
            set.remove_ghost(ghost);
        }
    }

    /// Records that the line in `way` was dropped for another reason than an eviction.
    pub fn remove(&mut self, set: &mut [u8], way: u8) {
        self.set(set).clear(way);
    }

    /// Charges bytes to the budget that were written to the SSD in addition to admitted lines: write hits, and the
    /// cache's metadata.
    pub fn record_write(&mut self, bytes: u64, now: Duration) {
        if let Some(budget) = &mut self.budget {
            budget.spend(bytes, now);
        }
    }

    /// Sets the budget in bytes a day from `now` on; `None` removes the limit.
    pub fn set_budget(&mut self, bytes_per_day: Option<u64>, now: Duration) {
        match (&mut self.budget, bytes_per_day) {
            (Some(budget), Some(bytes)) => budget.change(bytes, now),
            (budget, bytes) => *budget = bytes.map(WriteBudget::new),
        }
    }

    /// Returns whether writing `bytes` now would exceed the budget.
    pub fn exceeds_budget(&mut self, bytes: u64, now: Duration) -> bool {
        self.scarcity(bytes, now) >= 1.0
    }

    /// Returns the state of the line in `way` to save for [`Self::load`] after a restart; 0 if there is none.
    pub fn save(&self, set: &mut [u8], way: u8) -> u8 {
        let set = self.set(set);
        set.line(way).map_or(0, |(class, age)| {
            let older = SAVED_AGES.iter().filter(|ticks| age >= crate::age::age(**ticks)).count();
            class.number() | ((older - 1) as u8) << SAVED_AGE_SHIFT
        })
    }

    /// Loads a set that has no lines after a restart: pairs of a way and the byte from [`Self::save`]; any byte is
    /// valid.
    pub fn load(&mut self, set: &mut [u8], ways: impl IntoIterator<Item = (u8, u8)>) {
        let mut set = self.set(set);
        for (way, saved) in ways {
            let class = Class::from_number(saved & ((1 << SAVED_AGE_SHIFT) - 1));
            set.put(way, class, SAVED_AGES[usize::from(saved >> SAVED_AGE_SHIFT)]);
        }
    }
}

/// Number of values that [`heat`] returns.
pub const HEAT_LEVELS: usize = 32;

/// Returns the heat of a line, below [`HEAT_LEVELS`], from its byte of [`Policy::save`]: a more recent use is hotter,
/// and among equally recent ones a higher number of uses.
pub fn heat(saved: u8) -> u8 {
    let class = Class::from_number(saved & ((1 << SAVED_AGE_SHIFT) - 1));
    let age = saved >> SAVED_AGE_SHIFT;
    (SAVED_AGES.len() as u8 - 1 - age) << 3 | class.uses()
}

/// Position of the age in a saved byte, two bits above the class: the index of the highest of [`SAVED_AGES`], in
/// ticks, that the line's age has reached. The four values stand for up to a quarter of the cache's lines used since,
/// up to all, up to four times all, and more.
const SAVED_AGE_SHIFT: u32 = 6;
const SAVED_AGES: [u32; 4] = [0, 3, 12, 48];

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn options(ways: usize, lines: u64) -> PolicyOptions {
        PolicyOptions {
            ways,
            spare_ways: 0,
            lines,
            line_bytes: 4096,
            admission: AdmissionPolicy::default(),
            budget: None,
        }
    }

    fn context(write: bool, now: u64) -> AccessContext {
        AccessContext {
            access: if write { AccessKind::Write } else { AccessKind::Read },
            request_bytes: 4096 << (now % 7),
            now: Duration::from_secs(now),
        }
    }

    /// Set as the cache knows it: lines by way.
    #[derive(Default)]
    struct Lines {
        ways: BTreeMap<u8, u64>,
    }

    impl Lines {
        fn way_of(&self, line: u64) -> Option<u8> {
            let mut ways = self.ways.iter();
            ways.find(|(_, cached)| **cached == line).map(|(way, _)| *way)
        }
    }

    proptest! {
        /// A victim is always a way with a line that may be evicted, and there is one as long as any may.
        #[test]
        fn victims_are_evictable_lines(
            ways in 1usize..20,
            steps in prop::collection::vec((0u8..10, 0u64..40, any::<u32>()), 1..600),
        ) {
            let mut policy = Policy::new(options(ways, ways as u64));
            let mut set = vec![0; policy.set_bytes()];
            let mut lines = Lines::default();
            for (at, (what, line, busy)) in steps.into_iter().enumerate() {
                let context = context(what % 2 == 0, at as u64);
                let way = lines.way_of(line);
                match (what, way) {
                    (0, Some(way)) => {
                        policy.remove(&mut set, way);
                        lines.ways.remove(&way);
                    }
                    (_, Some(way)) => policy.touch(&mut set, way, line, context),
                    (_, None) => {
                        if !policy.admit(&mut set, line, context) {
                            continue;
                        }
                        let free = (0..ways as u8).find(|way| !lines.ways.contains_key(way));
                        let evictable = |way: u8| busy >> way & 1 == 0;
                        let way = free.or_else(|| {
                            let way = policy.victim(&mut set, evictable)?;
                            policy.evict(&mut set, way, lines.ways[&way]);
                            lines.ways.remove(&way).map(|_| way)
                        });
                        prop_assert_eq!(way.is_none(), !(0..ways as u8).any(evictable) && free.is_none());
                        if let Some(way) = way {
                            prop_assert!(free.is_some() || evictable(way));
                            policy.insert(&mut set, way, line, context);
                            lines.ways.insert(way, line);
                        }
                    }
                }
                for way in 0..ways as u8 {
                    prop_assert_eq!(policy.save(&mut set, way) != 0, lines.ways.contains_key(&way));
                }
            }
        }

        /// Saving a loaded set gives the same bytes again, and any byte can be loaded.
        #[test]
        fn saved_state_survives_load(saved in prop::collection::vec(any::<u8>(), 1..=256)) {
            let mut policy = Policy::new(options(saved.len(), saved.len() as u64));
            let mut sets = [vec![0; policy.set_bytes()], vec![0; policy.set_bytes()]];
            policy.load(&mut sets[0], (0..=255).zip(saved.iter().copied()));
            let first: Vec<u8> = (0..saved.len()).map(|way| policy.save(&mut sets[0], way as u8)).collect();
            policy.load(&mut sets[1], (0..=255).zip(first.iter().copied()));
            let second: Vec<u8> = (0..saved.len()).map(|way| policy.save(&mut sets[1], way as u8)).collect();
            prop_assert_eq!(first, second);
        }
    }

    /// After a restart, the line that was hot before is evicted last.
    #[test]
    fn hot_line_survives_restart() {
        let mut policy = Policy::new(options(4, 4));
        let mut set = vec![0; policy.set_bytes()];
        for line in 0..4 {
            policy.insert(&mut set, line as u8, line, context(false, 0));
        }
        for at in 0..20 {
            policy.touch(&mut set, 2, 2, context(false, 7 * at));
        }
        let saved: Vec<(u8, u8)> = (0..4).map(|way| (way, policy.save(&mut set, way))).collect();
        let mut restarted = Policy::new(options(4, 4));
        let mut set = vec![0; restarted.set_bytes()];
        restarted.load(&mut set, saved);
        for _ in 0..3 {
            let victim = restarted.victim(&mut set, |_| true).expect("a line");
            assert_ne!(victim, 2);
            restarted.evict(&mut set, victim, victim.into());
        }
        assert_eq!(restarted.victim(&mut set, |_| true), Some(2));
    }

    /// Ways that the caller keeps empty do not count when a set is checked for being full.
    #[test]
    fn spare_ways_count_as_full() {
        let admitted = |spare_ways| {
            let mut policy = Policy::new(PolicyOptions { spare_ways, ..options(32, 32) });
            let mut set = vec![0; policy.set_bytes()];
            for way in 0..28 {
                policy.insert(&mut set, way, way.into(), context(false, 0));
            }
            for at in 0..20 * 28 {
                let way = (at % 28) as u8;
                policy.touch(&mut set, way, way.into(), context(false, at));
            }
            let cold = 1000..2000;
            cold.filter(|line| policy.admit(&mut set, *line, context(false, *line))).count()
        };
        assert_eq!(admitted(0), 1000);
        // Lines that are not yet known to have a low score are admitted.
        assert!(admitted(4) < 1000);
    }

    /// Several victims are found at once; one that is used or dropped before its turn is not returned again.
    #[test]
    fn touched_victim_is_not_returned() {
        let mut policy = Policy::new(options(256, 1 << 20));
        let mut set = vec![0; policy.set_bytes()];
        for way in 0..=255 {
            policy.insert(&mut set, way, way.into(), context(false, 0));
        }
        let mut used = Vec::new();
        for _ in 0..200 {
            let victim = policy.victim(&mut set, |_| true).expect("a line");
            assert!(!used.contains(&victim), "{victim} after {used:?}");
            match used.len() % 2 {
                0 => policy.touch(&mut set, victim, victim.into(), context(false, 0)),
                _ => policy.remove(&mut set, victim),
            }
            used.push(victim);
        }
    }

    /// A cache with a budget writes no more than that in a day, and at least half of it.
    #[test]
    fn admission_keeps_budget() {
        let lines = 1 << 10;
        let budget = 24 << 20;
        let mut policy = Policy::new(PolicyOptions { budget: Some(budget), ..options(256, lines) });
        let mut set = vec![0; policy.set_bytes()];
        // New lines all the time, each of which a cache with free ways admits.
        let admitted = (0..86_400u64).filter(|line| policy.admit(&mut set, *line, context(true, *line)));
        let bytes = admitted.count() as u64 * 4096;
        assert!(bytes <= budget && bytes >= budget / 2, "{bytes} of {budget}");
    }

    /// The tick counter of a small busy cache overflows after weeks; the policy must still work.
    #[test]
    fn ticks_may_overflow() {
        let mut policy = Policy::new(options(4, 4));
        policy.tick = u32::MAX - 300;
        let mut set = vec![0; policy.set_bytes()];
        for at in 0..20_000u64 {
            let line = at % 4;
            match at {
                0..4 => policy.insert(&mut set, line as u8, line, context(false, at)),
                _ => policy.touch(&mut set, line as u8, line, context(false, at)),
            }
        }
        assert!(policy.tick < 20_000);
        assert_eq!(policy.victim(&mut set, |_| true).map(|way| policy.save(&mut set, way) != 0), Some(true));
    }

    /// Stamps are one byte; lines of a set that is not accessed for long must not seem recent after an overflow.
    #[test]
    fn idle_set_lines_stay_old() {
        let mut policy = Policy::new(options(256, 512));
        let mut sets = [vec![0; policy.set_bytes()], vec![0; policy.set_bytes()]];
        policy.insert(&mut sets[0], 7, 7, context(false, 0));
        for way in 0..=255 {
            policy.insert(&mut sets[1], way, way.into(), context(false, 0));
        }
        for ticks in 1..2_000u64 {
            for at in 0..50 {
                policy.touch(&mut sets[1], 1, 1, context(false, at));
            }
            if ticks % 3 == 0 {
                policy.insert(&mut sets[0], 8, 8, context(false, 0));
                let victim = policy.victim(&mut sets[0], |_| true);
                assert!(ticks < 20 || victim == Some(7), "after {ticks} ticks");
                policy.remove(&mut sets[0], 8);
            }
        }
    }
}
