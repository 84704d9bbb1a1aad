//! LRU: evicts the line that was not used for longest.

use super::list::{Lists, OUT};
use super::{Ask, Cache, Outcome};

/// LRU cache. See the module.
pub struct Lru {
    capacity: usize,
    lists: Lists<1>,
}

impl Lru {
    /// Creates an empty cache of `capacity` lines, at least one, for keys below `keys`.
    pub fn new(capacity: usize, keys: usize) -> Self {
        Self {
            capacity: capacity.max(1),
            lists: Lists::new(keys),
        }
    }
}

impl Cache for Lru {
    fn access(&mut self, Ask { key, .. }: Ask) -> Outcome {
        let hit = self.lists.list_of(key) != OUT;
        if !hit && self.lists.len(0) == self.capacity {
            self.lists.pop(0);
        }
        self.lists.push(0, key);
        if hit { Outcome::Hit } else { Outcome::Filled }
    }
}
