//! SIEVE (Zhang et al., "SIEVE is Simpler than LRU", NSDI 2024): one queue in order of arrival. A hand moves from the
//! oldest to the newest, keeps lines that were hit since it passed last, and evicts the first that was not.

use super::list::{KeyLists, NO_LIST};
use super::{AccessOutcome, LineAccess, ReferenceCache};

/// SIEVE cache. See the module.
pub struct Sieve {
    capacity: usize,
    lists: KeyLists<1>,
    visited: Vec<bool>,
    /// Key at the hand; `None` for the oldest.
    hand: Option<u32>,
}

impl Sieve {
    /// Creates an empty cache of `capacity` lines, at least one, for keys below `keys`.
    pub fn new(capacity: usize, keys: usize) -> Self {
        Self { capacity: capacity.max(1), lists: KeyLists::new(keys), visited: vec![false; keys], hand: None }
    }

    fn evict(&mut self) {
        let mut at = self.hand.or(self.lists.back(0));
        while let Some(key) = at {
            let next = self.lists.newer(key);
            if !std::mem::take(&mut self.visited[key as usize]) {
                self.hand = next;
                self.lists.remove(key);
                return;
            }
            at = next.or(self.lists.back(0));
        }
    }
}

impl ReferenceCache for Sieve {
    fn access(&mut self, LineAccess { key, .. }: LineAccess) -> AccessOutcome {
        if self.lists.list_of(key) != NO_LIST {
            self.visited[key as usize] = true;
            return AccessOutcome::Hit;
        }
        if self.lists.len(0) == self.capacity {
            self.evict();
        }
        self.lists.push(0, key);
        self.visited[key as usize] = false;
        AccessOutcome::Filled
    }
}
