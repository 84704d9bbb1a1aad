//! The policy of Larder's disk cache, as the cache uses it.
//!
//! The cache owns the memory: for each set [`Policy::set_bytes`] bytes, zero at first, which are handed to every call
//! about that set. What is not of a set is in [`Policy`]. Lines are named by their number on the disk (offset divided
//! by the line's size), the place of one in its set by its way.
//!
//! - A hit: [`Policy::touch`].
//! - A miss: [`Policy::admit`]; if the line is to be brought in and no way is free, [`Policy::victim`] and, once that
//!   line has been given up, [`Policy::evict`]; then [`Policy::insert`].
//! - A line that was dropped for another reason, as a discard: [`Policy::remove`].
//!
//! Invariant: a way is in the set's order from its `insert` (or `load`) to its `evict` or `remove`. Calls about a way
//! that is not are ignored, one about a way that the set does not have panics.

use std::time::Duration;

use crate::admission::is_worth_it;
use crate::age::{HORIZON, TICKS_PER_CACHE};
use crate::budget::Budget;
use crate::class::{Class, count};
use crate::geometry::WAYS_MAX;
use crate::hash::mix;
use crate::reuse::Reuse;
use crate::set::{self, Set};
use crate::shadow::Shadows;
use crate::worth::Worths;

/// What a guest wants of a line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// All or some of it is read.
    Read,
    /// All or some of it is written.
    Write,
}

/// The circumstances of an access.
#[derive(Clone, Copy, Debug)]
pub struct Context {
    /// What is wanted.
    pub access: Access,
    /// Bytes of the whole request that wants it.
    pub request_bytes: u64,
    /// Time since any one moment, the same for all calls.
    pub now: Duration,
}

/// How a cache's policy is set up.
#[derive(Clone, Copy, Debug)]
pub struct PolicyOptions {
    /// Ways of each set, 1 to 256.
    pub ways: usize,
    /// How many of them the caller keeps without a line: a set is full without those.
    pub spare_ways: usize,
    /// Lines of the cache, all sets together.
    pub lines: u64,
    /// Bytes of a line.
    pub line_bytes: u32,
    /// What is let in.
    pub admission: Admission,
    /// What may be written to the SSD in a day, in bytes; `None` if that does not matter.
    pub budget: Option<u64>,
}

/// What is let in where another line must leave for it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Admission {
    /// Lines whose hits are likely to be worth the write.
    #[default]
    Worth,
    /// All.
    All,
}

/// Worths are learnt anew when the cache's lines could have been used so many times; what was learnt counts for so much
/// less each time.
const LEARN_CACHES: f64 = 0.25;
const FADE: f32 = 0.98;

/// And not sooner than after so many uses, that it cost little for each.
const LEARN_USES_MIN: u64 = 4096;

/// Ticks that have passed before the first use, so that what is loaded can be older.
const TICK_START: u32 = 256;

/// Which of the ways to value lines is learnt.
const LEARNT: usize = 0;

/// What a cache keeps. See the [module](self).
pub struct Policy {
    options: PolicyOptions,
    /// Uses of lines so far.
    uses: u64,
    /// Uses in a tick.
    tick_uses: u64,
    tick: u32,
    /// When the next tick is, and when worths are learnt next, in uses.
    tick_at: u64,
    learn_at: u64,
    learn_every: u64,
    reuse: Reuse,
    /// Ways to value lines: what was learnt, and what needs no learning.
    worths: Vec<Worths>,
    shadows: Shadows,
    budget: Option<Budget>,
}

impl Policy {
    /// A policy for a cache that is empty.
    ///
    /// # Panics
    /// Sets have no ways, or more than 256.
    pub fn new(options: PolicyOptions) -> Self {
        assert!((1..=WAYS_MAX).contains(&options.ways), "a set has 1 to 256 ways");
        let tick_uses = (options.lines / TICKS_PER_CACHE).max(1);
        let learn_every = ((options.lines as f64 * LEARN_CACHES) as u64).max(LEARN_USES_MIN);
        Self {
            options,
            uses: 0,
            tick_uses,
            tick: TICK_START,
            tick_at: tick_uses,
            learn_at: learn_every,
            learn_every,
            reuse: Reuse::new(tick_uses * u64::from(HORIZON)),
            shadows: Shadows::new(options.lines, 3),
            worths: vec![Worths::uses_by_age(), Worths::uses_by_age(), Worths::recency()],
            budget: options.budget.map(Budget::new),
        }
    }

    /// Bytes of the state of a set: 4 for each way, and 24. All zero is a set without lines.
    pub fn set_bytes(&self) -> usize {
        set::bytes(self.options.ways)
    }

    fn set<'a>(&self, state: &'a mut [u8]) -> Set<'a> {
        Set::new(state, self.options.ways, self.tick)
    }

    /// The way to value lines that is best now.
    fn worths(&self) -> &Worths {
        &self.worths[self.shadows.best()]
    }

    fn random(&self) -> u64 {
        mix(self.uses)
    }

    /// A line was asked for.
    fn used(&mut self, hash: u64, class: Class, context: &Context) {
        self.reuse.used(hash, class, self.tick);
        if self.shadows.has(hash) {
            let random = self.random();
            self.shadows.used(hash, context, self.tick, random, &self.worths);
        }
        self.uses += 1;
        if self.uses >= self.tick_at {
            self.tick_at += self.tick_uses;
            self.tick = self.tick.wrapping_add(1);
        }
        if self.uses >= self.learn_at {
            self.learn_at += self.learn_every;
            self.worths[LEARNT].learn(&self.reuse.times(self.tick));
            self.reuse.fade(FADE);
        }
    }

    /// Where in the state of a set [`Self::touch`] of `way` will look, so that memory can be asked for it before.
    pub fn touched(&self, way: u8) -> [usize; 3] {
        set::touched(self.options.ways, way)
    }

    /// `line`, in `way`, was hit.
    pub fn touch(&mut self, set: &mut [u8], way: u8, line: u64, context: Context) {
        let mut set = self.set(set);
        let uses = set.class(way).map_or(0, |class| count(class.uses(), self.random()));
        let class = Class::new(&context, uses);
        set.put(way, class, 0);
        self.used(mix(line), class, &context);
    }

    /// Whether `line`, which is not in its set, shall be brought in: if so, its bytes count as written. To be asked once
    /// for each miss.
    pub fn admit(&mut self, set: &mut [u8], line: u64, context: Context) -> bool {
        let hash = mix(line);
        let scarcity = self.scarcity(self.options.line_bytes.into(), context.now);
        let mut set = self.set(set);
        let ghost = set.find_ghost(hash);
        let uses = ghost.map_or(0, |ghost| count(set.ghost_uses(ghost), self.random()));
        let class = Class::new(&context, uses);
        let admit = scarcity < 1.0
            && is_worth_it(
                self.worths(),
                &mut set,
                class,
                self.options.spare_ways,
                self.options.admission,
                scarcity,
            );
        if !admit {
            if let Some(ghost) = ghost {
                set.forget(ghost);
            }
            set.remember(hash, uses);
        }
        self.used(hash, class, &context);
        if admit {
            self.written(self.options.line_bytes.into(), context.now);
        }
        admit
    }

    fn scarcity(&mut self, bytes: u64, now: Duration) -> f32 {
        self.budget.as_mut().map_or(0.0, |budget| budget.scarcity(bytes, now))
    }

    /// The way that shall become free: of those that may (`may_evict` says no to dirty or busy ones) the one that is
    /// worth least. It stays in the set until [`Self::evict`].
    pub fn victim(&mut self, set: &mut [u8], may_evict: impl FnMut(u8) -> bool) -> Option<u8> {
        let mut set = self.set(set);
        set.least_of(self.worths().ranks(), may_evict)
    }

    /// `line` has left `way` to make room.
    pub fn evict(&mut self, set: &mut [u8], way: u8, line: u64) {
        let mut set = self.set(set);
        let uses = set.class(way).map_or(0, Class::uses);
        set.clear(way);
        set.remember(mix(line), uses);
    }

    /// `line` is in `way` now, which was free; `context` is that of the access which brought it in.
    pub fn insert(&mut self, set: &mut [u8], way: u8, line: u64, context: Context) {
        let mut set = self.set(set);
        let ghost = set.find_ghost(mix(line));
        let uses = ghost.map_or(0, |ghost| count(set.ghost_uses(ghost), self.random()));
        set.put(way, Class::new(&context, uses), 0);
        if let Some(ghost) = ghost {
            set.forget(ghost);
        }
    }

    /// What was in `way` is not any more, whatever it was worth.
    pub fn remove(&mut self, set: &mut [u8], way: u8) {
        self.set(set).clear(way);
    }

    /// So many bytes were written to the SSD besides lines that were let in: writes that hit, and the cache's own
    /// records. They count against the budget.
    pub fn written(&mut self, bytes: u64, now: Duration) {
        if let Some(budget) = &mut self.budget {
            budget.spend(bytes, now);
        }
    }

    /// Keeps to another budget from `now` on, in bytes a day, or to none.
    pub fn set_budget(&mut self, bytes_per_day: Option<u64>, now: Duration) {
        match (&mut self.budget, bytes_per_day) {
            (Some(budget), Some(bytes)) => budget.change(bytes, now),
            (budget, bytes) => *budget = bytes.map(Budget::new),
        }
    }

    /// Whether so many bytes are more than may be written now.
    pub fn is_spent(&mut self, bytes: u64, now: Duration) -> bool {
        self.scarcity(bytes, now) >= 1.0
    }

    /// What is worth saving about the line in `way`, for [`Self::load`] after a restart; 0 if there is none.
    pub fn save(&self, set: &mut [u8], way: u8) -> u8 {
        let set = self.set(set);
        set.line(way).map_or(0, |(class, age)| {
            let older = SAVED_AGES
                .iter()
                .filter(|ticks| age >= crate::age::age(**ticks))
                .count();
            class.number() | ((older - 1) as u8) << SAVED_AGE_SHIFT
        })
    }

    /// Fills a set that has no lines with those that were found after a restart: ways, and what [`Self::save`] said of
    /// each; any byte is good.
    pub fn load(&mut self, set: &mut [u8], ways: impl IntoIterator<Item = (u8, u8)>) {
        let mut set = self.set(set);
        for (way, saved) in ways {
            let class = Class::from_number(saved & ((1 << SAVED_AGE_SHIFT) - 1));
            set.put(way, class, SAVED_AGES[usize::from(saved >> SAVED_AGE_SHIFT)]);
        }
    }
}

/// How many heats [`heat_of`] tells apart.
pub const HEATS: usize = 32;

/// How hot a line is of which [`Policy::save`] has said this, below [`HEATS`]: how lately it was used, and of those that were
/// used as lately, how often.
pub fn heat_of(saved: u8) -> u8 {
    let class = Class::from_number(saved & ((1 << SAVED_AGE_SHIFT) - 1));
    let age = saved >> SAVED_AGE_SHIFT;
    (SAVED_AGES.len() as u8 - 1 - age) << 3 | class.uses()
}

/// In what is saved of a line, two bits of its age are above the class: the last of these ages, in ticks, that it has
/// reached. That is up to a quarter of the cache's lines used since, up to all, up to four times all, or more.
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
            admission: Admission::default(),
            budget: None,
        }
    }

    fn context(write: bool, now: u64) -> Context {
        Context {
            access: if write { Access::Write } else { Access::Read },
            request_bytes: 4096 << (now % 7),
            now: Duration::from_secs(now),
        }
    }

    /// A set as the cache has it: which line is in which way.
    #[derive(Default)]
    struct Lines {
        ways: BTreeMap<u8, u64>,
    }

    impl Lines {
        fn way_of(&self, line: u64) -> Option<u8> {
            let mut ways = self.ways.iter();
            ways.find(|(_, there)| **there == line).map(|(way, _)| *way)
        }
    }

    proptest! {
        /// Whatever comes, a victim is a way with a line that may leave, and there is one as long as one may.
        #[test]
        fn victims_are_lines_that_may_leave(
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
                        let may_leave = |way: u8| busy >> way & 1 == 0;
                        let way = free.or_else(|| {
                            let way = policy.victim(&mut set, may_leave)?;
                            policy.evict(&mut set, way, lines.ways[&way]);
                            lines.ways.remove(&way).map(|_| way)
                        });
                        prop_assert_eq!(way.is_none(), !(0..ways as u8).any(may_leave) && free.is_none());
                        if let Some(way) = way {
                            prop_assert!(free.is_some() || may_leave(way));
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

        /// What is saved of a set is what is saved of the one that it was loaded into, and no byte does harm.
        #[test]
        fn what_is_saved_is_loaded(saved in prop::collection::vec(any::<u8>(), 1..=256)) {
            let mut policy = Policy::new(options(saved.len(), saved.len() as u64));
            let mut sets = [vec![0; policy.set_bytes()], vec![0; policy.set_bytes()]];
            policy.load(&mut sets[0], (0..=255).zip(saved.iter().copied()));
            let first: Vec<u8> = (0..saved.len()).map(|way| policy.save(&mut sets[0], way as u8)).collect();
            policy.load(&mut sets[1], (0..=255).zip(first.iter().copied()));
            let second: Vec<u8> = (0..saved.len()).map(|way| policy.save(&mut sets[1], way as u8)).collect();
            prop_assert_eq!(first, second);
        }
    }

    #[test]
    fn what_was_hot_before_a_restart_leaves_last() {
        let mut policy = Policy::new(options(4, 4));
        let mut set = vec![0; policy.set_bytes()];
        for line in 0..4 {
            policy.insert(&mut set, line as u8, line, context(false, 0));
        }
        for at in 0..20 {
            policy.touch(&mut set, 2, 2, context(false, 7 * at));
        }
        let saved: Vec<(u8, u8)> = (0..4).map(|way| (way, policy.save(&mut set, way))).collect();
        let mut again = Policy::new(options(4, 4));
        let mut set = vec![0; again.set_bytes()];
        again.load(&mut set, saved);
        for _ in 0..3 {
            let victim = again.victim(&mut set, |_| true).expect("a line");
            assert_ne!(victim, 2);
            again.evict(&mut set, victim, victim.into());
        }
        assert_eq!(again.victim(&mut set, |_| true), Some(2));
    }

    #[test]
    fn a_set_is_full_without_the_ways_that_are_kept_empty() {
        let admitted = |spare_ways| {
            let mut policy = Policy::new(PolicyOptions {
                spare_ways,
                ..options(32, 32)
            });
            let mut set = vec![0; policy.set_bytes()];
            for way in 0..28 {
                policy.insert(&mut set, way, way.into(), context(false, 0));
            }
            for at in 0..20 * 28 {
                let way = (at % 28) as u8;
                policy.touch(&mut set, way, way.into(), context(false, at));
            }
            let cold = 1000..2000;
            cold.filter(|line| policy.admit(&mut set, *line, context(false, *line)))
                .count()
        };
        assert_eq!(admitted(0), 1000);
        // What it has not learnt yet to be of little worth comes in.
        assert!(admitted(4) < 1000);
    }

    /// Victims are found several at a time; one that is used, or dropped, meanwhile is none any more.
    #[test]
    fn a_victim_that_is_used_again_stays() {
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

    #[test]
    fn a_budget_is_kept() {
        let lines = 1 << 10;
        let budget = 24 << 20;
        let mut policy = Policy::new(PolicyOptions {
            budget: Some(budget),
            ..options(256, lines)
        });
        let mut set = vec![0; policy.set_bytes()];
        // New lines all the time, each of which a cache with room lets in.
        let admitted = (0..86_400u64).filter(|line| policy.admit(&mut set, *line, context(true, *line)));
        let bytes = admitted.count() as u64 * 4096;
        assert!(bytes <= budget && bytes >= budget / 2, "{bytes} of {budget}");
    }

    /// A small cache that is busy for weeks has more ticks than there are numbers.
    #[test]
    fn ticks_may_run_out() {
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
        assert_eq!(
            policy
                .victim(&mut set, |_| true)
                .map(|way| policy.save(&mut set, way) != 0),
            Some(true)
        );
    }

    /// Stamps are a byte; a set that is not looked at for long must not take old lines for new ones.
    #[test]
    fn lines_of_a_set_that_nobody_asked_for_stay_old() {
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
