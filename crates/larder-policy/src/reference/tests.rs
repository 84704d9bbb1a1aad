//! Comparison of each policy with a simple model of its description, which searches lists.

use proptest::prelude::*;

use super::{AccessOutcome, Arc, Larc, LineAccess, Lru, ReferenceCache, S3Fifo, Sieve, WTinyLfu};

const KEYS: u32 = 24;

/// List of keys, front first.
type List = Vec<u32>;

fn access_to(key: u32) -> LineAccess {
    LineAccess { key, request_lines: 1, write: false, at_ms: 0 }
}

fn remove(list: &mut List, key: u32) -> bool {
    let at = list.iter().position(|entry| *entry == key);
    at.map(|at| list.remove(at)).is_some()
}

fn lru(lists: &mut [List; 1], capacity: usize, key: u32) -> AccessOutcome {
    let hit = remove(&mut lists[0], key);
    lists[0].insert(0, key);
    lists[0].truncate(capacity);
    if hit { AccessOutcome::Hit } else { AccessOutcome::Filled }
}

/// State of SIEVE: the queue with its bits, newest first, and the key at the hand.
#[derive(Default)]
struct SieveModel {
    queue: Vec<(u32, bool)>,
    hand: Option<u32>,
}

impl SieveModel {
    fn access(&mut self, capacity: usize, key: u32) -> AccessOutcome {
        if let Some(entry) = self.queue.iter_mut().find(|entry| entry.0 == key) {
            entry.1 = true;
            return AccessOutcome::Hit;
        }
        if self.queue.len() == capacity {
            let position = |queue: &[(u32, bool)], key| queue.iter().position(|entry| Some(entry.0) == key);
            let mut at = position(&self.queue, self.hand).unwrap_or(capacity - 1);
            while self.queue[at].1 {
                self.queue[at].1 = false;
                at = at.checked_sub(1).unwrap_or(capacity - 1);
            }
            self.hand = at.checked_sub(1).map(|newer| self.queue[newer].0);
            self.queue.remove(at);
        }
        self.queue.insert(0, (key, false));
        AccessOutcome::Filled
    }
}

/// ARC by the paper's figure 4, step by step: T1, T2, B1, B2, and p.
fn arc(lists: &mut [List; 4], p: &mut usize, c: usize, key: u32) -> AccessOutcome {
    fn replace(lists: &mut [List; 4], p: usize, in_b2: bool) {
        let t1 = lists[0].len();
        let from = usize::from(!(t1 >= 1 && (t1 > p || in_b2 && t1 == p)));
        if let Some(key) = lists[from].pop() {
            lists[from + 2].insert(0, key);
        }
    }
    let (b1, b2) = (lists[2].len(), lists[3].len());
    if lists[..2].iter_mut().any(|list| remove(list, key)) {
        lists[1].insert(0, key);
        return AccessOutcome::Hit;
    }
    if lists[2].contains(&key) {
        *p = (*p + (b2 / b1).max(1)).min(c);
        replace(lists, *p, false);
        remove(&mut lists[2], key);
        lists[1].insert(0, key);
    } else if lists[3].contains(&key) {
        *p = p.saturating_sub((b1 / b2).max(1));
        replace(lists, *p, true);
        remove(&mut lists[3], key);
        lists[1].insert(0, key);
    } else {
        let l1 = lists[0].len() + b1;
        let all: usize = lists.iter().map(Vec::len).sum();
        if l1 == c && lists[0].len() < c {
            lists[2].pop();
            replace(lists, *p, false);
        } else if l1 == c {
            lists[0].pop();
        } else if all >= c {
            if all == 2 * c {
                lists[3].pop();
            }
            replace(lists, *p, false);
        }
        lists[0].insert(0, key);
    }
    AccessOutcome::Filled
}

/// LARC: resident lines, ghosts, and the target number of ghosts.
fn larc(lists: &mut [List; 2], ghosts: &mut f64, capacity: usize, key: u32) -> AccessOutcome {
    let c = capacity as f64;
    if remove(&mut lists[0], key) {
        *ghosts = (*ghosts - c / (c - *ghosts)).max(0.1 * c);
        lists[0].insert(0, key);
        return AccessOutcome::Hit;
    }
    *ghosts = (*ghosts + c / *ghosts).min(0.9 * c);
    if remove(&mut lists[1], key) {
        lists[0].insert(0, key);
        lists[0].truncate(capacity);
        return AccessOutcome::Filled;
    }
    lists[1].insert(0, key);
    if lists[1].len() as f64 > *ghosts {
        lists[1].pop();
    }
    AccessOutcome::Bypassed
}

/// State of S3-FIFO: small, main and ghost queue, newest first, with frequencies.
#[derive(Default)]
struct S3Model {
    small: Vec<(u32, u8)>,
    main: Vec<(u32, u8)>,
    ghosts: List,
}

impl S3Model {
    fn evict_small(&mut self, ghosts_max: usize) -> bool {
        while let Some((oldest, frequency)) = self.small.pop() {
            if frequency == 0 {
                self.ghosts.insert(0, oldest);
                self.ghosts.truncate(ghosts_max);
                return true;
            }
            self.main.insert(0, (oldest, 0));
        }
        false
    }

    fn evict_main(&mut self) {
        while let Some((oldest, frequency)) = self.main.pop() {
            if frequency == 0 {
                return;
            }
            self.main.insert(0, (oldest, frequency - 1));
        }
    }

    fn access(&mut self, capacity: usize, key: u32) -> AccessOutcome {
        let small_max = (capacity / 10).max(1);
        if let Some(entry) = self.small.iter_mut().chain(&mut self.main).find(|entry| entry.0 == key) {
            entry.1 = (entry.1 + 1).min(3);
            return AccessOutcome::Hit;
        }
        let known = self.ghosts.contains(&key);
        if self.small.len() + self.main.len() == capacity {
            let small =
                (self.small.len() >= small_max || self.main.is_empty()) && self.evict_small(capacity - small_max);
            if !small {
                self.evict_main();
            }
        }
        remove(&mut self.ghosts, key);
        let queue = if known { &mut self.main } else { &mut self.small };
        queue.insert(0, (key, 0));
        AccessOutcome::Filled
    }
}

fn keys() -> impl Strategy<Value = Vec<u32>> {
    prop::collection::vec(prop_oneof![3 => 0..KEYS, 2 => 0..4u32], 1..400)
}

proptest! {
    #[test]
    fn lru_matches_its_model(capacity in 1usize..12, keys in keys()) {
        let mut cache = Lru::new(capacity, KEYS as usize);
        let mut lists = Default::default();
        for key in keys {
            prop_assert_eq!(cache.access(access_to(key)), lru(&mut lists, capacity, key));
        }
    }

    #[test]
    fn sieve_matches_its_model(capacity in 1usize..12, keys in keys()) {
        let mut cache = Sieve::new(capacity, KEYS as usize);
        let mut model = SieveModel::default();
        for key in keys {
            prop_assert_eq!(cache.access(access_to(key)), model.access(capacity, key));
        }
    }

    #[test]
    fn s3_fifo_matches_its_model(capacity in 2usize..24, keys in keys()) {
        let mut cache = S3Fifo::new(capacity, KEYS as usize);
        let mut model = S3Model::default();
        for key in keys {
            prop_assert_eq!(cache.access(access_to(key)), model.access(capacity, key));
        }
    }

    #[test]
    fn arc_matches_its_model(capacity in 1usize..12, keys in keys()) {
        let mut cache = Arc::new(capacity, KEYS as usize);
        let (mut lists, mut p) = Default::default();
        for key in keys {
            prop_assert_eq!(cache.access(access_to(key)), arc(&mut lists, &mut p, capacity, key));
        }
    }

    #[test]
    fn larc_matches_its_model(capacity in 1usize..12, keys in keys()) {
        let mut cache = Larc::new(capacity, KEYS as usize);
        let (mut lists, mut ghosts) = (Default::default(), 0.1 * capacity as f64);
        for key in keys {
            prop_assert_eq!(cache.access(access_to(key)), larc(&mut lists, &mut ghosts, capacity, key));
        }
    }

    /// The sketch is approximate, so only general properties and the effect of the window are checked.
    #[test]
    fn w_tiny_lfu_respects_capacity(capacity in 2usize..12, keys in keys()) {
        let mut cache = WTinyLfu::new(capacity, KEYS as usize);
        let mut seen = vec![false; KEYS as usize];
        let mut before = None;
        for key in keys {
            let outcome = cache.access(access_to(key));
            prop_assert!(outcome != AccessOutcome::Hit || seen[key as usize]);
            prop_assert!(before != Some(key) || outcome == AccessOutcome::Hit);
            seen[key as usize] = true;
            before = Some(key);
            prop_assert!(cache.resident() <= capacity);
        }
    }
}

/// Frequently used lines survive repeated scans.
#[test]
fn w_tiny_lfu_resists_scans() {
    let mut cache = WTinyLfu::new(10, 10_000);
    for round in 0..50 {
        (0..8).for_each(|key| _ = cache.access(access_to(key)));
        (0..12).for_each(|key| _ = cache.access(access_to(1_000 + round * 12 + key)));
    }
    let hits = (0..8).filter(|key| cache.access(access_to(*key)) == AccessOutcome::Hit).count();
    assert!(hits >= 7, "{hits} of 8");
}
