//! LRU: evicts the line that was not used for longest.

use super::list::{KeyLists, NO_LIST};
use super::{AccessOutcome, LineAccess, ReferenceCache};

/// LRU cache. See the module.
pub struct Lru {
    capacity: usize,
    lists: KeyLists<1>,
}

impl Lru {
    /// Creates an empty cache of `capacity` lines, at least one, for keys below `keys`.
    pub fn new(capacity: usize, keys: usize) -> Self {
        Self { capacity: capacity.max(1), lists: KeyLists::new(keys) }
    }
}

impl ReferenceCache for Lru {
    fn access(&mut self, LineAccess { key, .. }: LineAccess) -> AccessOutcome {
        let hit = self.lists.list_of(key) != NO_LIST;
        if !hit && self.lists.len(0) == self.capacity {
            self.lists.pop(0);
        }
        self.lists.push(0, key);
        if hit { AccessOutcome::Hit } else { AccessOutcome::Filled }
    }
}
