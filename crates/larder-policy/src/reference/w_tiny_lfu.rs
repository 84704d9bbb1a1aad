//! W-TinyLFU (Einziger, Friedman and Manes, "TinyLFU: A Highly Efficient Cache Admission Policy", ACM Transactions on
//! Storage 13, 2017): new lines enter a window of 1 % of the cache. A line that leaves the window replaces the next
//! victim of the main part, a segmented LRU of 20 % probation and 80 % protected, only if it was used more often, by
//! a count-min sketch of four bits that is halved after ten uses per line.

use super::list::KeyLists;
use super::{AccessOutcome, LineAccess, ReferenceCache};
use crate::hash::mix;

const WINDOW: u8 = 0;
const PROBATION: u8 = 1;
const PROTECTED: u8 = 2;

/// W-TinyLFU cache. See the module.
pub struct WTinyLfu {
    window_max: usize,
    main_max: usize,
    protected_max: usize,
    lists: KeyLists<3>,
    sketch: Sketch,
}

impl WTinyLfu {
    /// Creates an empty cache of `capacity` lines, at least two, for keys below `keys`.
    pub fn new(capacity: usize, keys: usize) -> Self {
        let capacity = capacity.max(2);
        let window_max = (capacity / 100).max(1);
        let main_max = capacity - window_max;
        Self {
            window_max,
            main_max,
            protected_max: main_max * 8 / 10,
            lists: KeyLists::new(keys),
            sketch: Sketch::new(capacity),
        }
    }

    #[cfg(test)]
    pub(super) fn resident(&self) -> usize {
        [WINDOW, PROBATION, PROTECTED].map(|list| self.lists.len(list)).iter().sum()
    }

    fn hit(&mut self, key: u32) {
        match self.lists.list_of(key) {
            WINDOW => self.lists.push(WINDOW, key),
            _ => {
                self.lists.push(PROTECTED, key);
                if self.lists.len(PROTECTED) > self.protected_max
                    && let Some(oldest) = self.lists.back(PROTECTED)
                {
                    self.lists.push(PROBATION, oldest);
                }
            }
        }
    }

    /// Moves the oldest line of the window to the main part, or evicts it.
    fn evict_from_window(&mut self) {
        let Some(candidate) = self.lists.pop(WINDOW) else {
            return;
        };
        if self.lists.len(PROBATION) + self.lists.len(PROTECTED) >= self.main_max {
            let Some(victim) = self.lists.back(PROBATION).or(self.lists.back(PROTECTED)) else {
                return;
            };
            if self.sketch.estimate(candidate) <= self.sketch.estimate(victim) {
                return;
            }
            self.lists.remove(victim);
        }
        self.lists.push(PROBATION, candidate);
    }
}

impl ReferenceCache for WTinyLfu {
    fn access(&mut self, LineAccess { key, .. }: LineAccess) -> AccessOutcome {
        self.sketch.add(key);
        if self.lists.list_of(key) != super::list::NO_LIST {
            self.hit(key);
            return AccessOutcome::Hit;
        }
        self.lists.push(WINDOW, key);
        if self.lists.len(WINDOW) > self.window_max {
            self.evict_from_window();
        }
        AccessOutcome::Filled
    }
}

/// Count-min sketch with conservative update and aging.
struct Sketch {
    counters: [Vec<u8>; 4],
    mask: u64,
    added: usize,
    sample: usize,
}

impl Sketch {
    fn new(capacity: usize) -> Self {
        let width = (4 * capacity).next_power_of_two();
        Self {
            counters: [const { Vec::new() }; 4].map(|_: Vec<u8>| vec![0; width]),
            mask: width as u64 - 1,
            added: 0,
            sample: 10 * capacity,
        }
    }

    fn index(&self, row: usize, key: u32) -> usize {
        (mix(u64::from(key) << 2 | row as u64) & self.mask) as usize
    }

    fn estimate(&self, key: u32) -> u8 {
        let counts = (0..4).map(|row| self.counters[row][self.index(row, key)]);
        counts.min().unwrap_or(0)
    }

    fn add(&mut self, key: u32) {
        let least = self.estimate(key);
        if least == 15 {
            return;
        }
        for row in 0..4 {
            let index = self.index(row, key);
            if self.counters[row][index] == least {
                self.counters[row][index] += 1;
            }
        }
        self.added += 1;
        if self.added >= self.sample {
            self.added /= 2;
            self.counters.iter_mut().flatten().for_each(|counter| *counter /= 2);
        }
    }
}
