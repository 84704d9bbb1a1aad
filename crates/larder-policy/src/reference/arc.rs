//! ARC (Nimrod Megiddo and Dharmendra S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 03): lines
//! that were used once and lines that were used again are in separate lists, each with ghosts; a ghost hit enlarges
//! its list.

use super::list::{KeyLists, NO_LIST};
use super::{AccessOutcome, LineAccess, ReferenceCache};

const T1: u8 = 0;
const T2: u8 = 1;
const B1: u8 = 2;
const B2: u8 = 3;

/// ARC cache. See the module.
pub struct Arc {
    capacity: usize,
    /// Target length of T1: the paper's p.
    target: usize,
    lists: KeyLists<4>,
}

impl Arc {
    /// Creates an empty cache of `capacity` lines, at least one, for keys below `keys`.
    pub fn new(capacity: usize, keys: usize) -> Self {
        Self { capacity: capacity.max(1), target: 0, lists: KeyLists::new(keys) }
    }

    /// Performs the paper's REPLACE.
    fn replace(&mut self, ghost_of_t2: bool) {
        let t1 = self.lists.len(T1);
        let from_t1 = t1 > 0 && (t1 > self.target || ghost_of_t2 && t1 == self.target);
        let (from, to) = if from_t1 || self.lists.len(T2) == 0 { (T1, B1) } else { (T2, B2) };
        if let Some(key) = self.lists.back(from) {
            self.lists.push(to, key);
        }
    }

    fn make_room(&mut self) {
        let [t1, t2, b1, b2] = [T1, T2, B1, B2].map(|list| self.lists.len(list));
        if t1 + b1 == self.capacity {
            if t1 < self.capacity {
                self.lists.pop(B1);
                self.replace(false);
            } else {
                self.lists.pop(T1);
            }
        } else if t1 + t2 + b1 + b2 >= self.capacity {
            if t1 + t2 + b1 + b2 == 2 * self.capacity {
                self.lists.pop(B2);
            }
            self.replace(false);
        }
    }
}

impl ReferenceCache for Arc {
    fn access(&mut self, LineAccess { key, .. }: LineAccess) -> AccessOutcome {
        let (b1, b2) = (self.lists.len(B1), self.lists.len(B2));
        match self.lists.list_of(key) {
            NO_LIST => {
                self.make_room();
                self.lists.push(T1, key);
                return AccessOutcome::Filled;
            }
            B1 => {
                self.target = (self.target + (b2 / b1).max(1)).min(self.capacity);
                self.replace(false);
            }
            B2 => {
                self.target = self.target.saturating_sub((b1 / b2).max(1));
                self.replace(true);
            }
            _ => {
                self.lists.push(T2, key);
                return AccessOutcome::Hit;
            }
        }
        self.lists.push(T2, key);
        AccessOutcome::Filled
    }
}
