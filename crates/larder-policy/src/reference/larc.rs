//! LARC (Huang et al., "Improving Flash-based Disk Cache with Lazy Adaptive Replacement", MSST 2013): LRU that admits
//! only keys in a queue of ghosts. The queue's length adapts: shorter with each hit, longer with each miss.

use super::list::KeyLists;
use super::{AccessOutcome, LineAccess, ReferenceCache};

const RESIDENT: u8 = 0;
const GHOST: u8 = 1;

/// LARC cache. See the module.
pub struct Larc {
    capacity: usize,
    /// Target number of ghosts: the paper's C_r, which is not an integer.
    ghosts: f64,
    lists: KeyLists<2>,
}

impl Larc {
    /// Creates an empty cache of `capacity` lines, at least one, for keys below `keys`.
    pub fn new(capacity: usize, keys: usize) -> Self {
        let capacity = capacity.max(1);
        Self { capacity, ghosts: 0.1 * capacity as f64, lists: KeyLists::new(keys) }
    }
}

impl ReferenceCache for Larc {
    fn access(&mut self, LineAccess { key, .. }: LineAccess) -> AccessOutcome {
        let capacity = self.capacity as f64;
        let list = self.lists.list_of(key);
        if list == RESIDENT {
            self.ghosts = (self.ghosts - capacity / (capacity - self.ghosts)).max(0.1 * capacity);
            self.lists.push(RESIDENT, key);
            return AccessOutcome::Hit;
        }
        self.ghosts = (self.ghosts + capacity / self.ghosts).min(0.9 * capacity);
        if list == GHOST {
            if self.lists.len(RESIDENT) == self.capacity {
                self.lists.pop(RESIDENT);
            }
            self.lists.push(RESIDENT, key);
            return AccessOutcome::Filled;
        }
        self.lists.push(GHOST, key);
        if self.lists.len(GHOST) as f64 > self.ghosts {
            self.lists.pop(GHOST);
        }
        AccessOutcome::Bypassed
    }
}
