//! S3-FIFO (Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023): new lines enter a small queue
//! of a tenth of the cache. Lines that are hit there, or are known from a ghost queue as long as the main one, enter
//! the main queue. Two bits count the hits. A line of the main queue that was hit is inserted again.

use super::list::KeyLists;
use super::{AccessOutcome, LineAccess, ReferenceCache};

const SMALL: u8 = 0;
const MAIN: u8 = 1;
const GHOST: u8 = 2;

/// The highest frequency, in two bits.
const FREQUENCY_MAX: u8 = 3;

/// S3-FIFO cache. See the module.
pub struct S3Fifo {
    capacity: usize,
    small_max: usize,
    lists: KeyLists<3>,
    frequency: Vec<u8>,
}

impl S3Fifo {
    /// Creates an empty cache of `capacity` lines, at least one, for keys below `keys`.
    pub fn new(capacity: usize, keys: usize) -> Self {
        let capacity = capacity.max(1);
        Self { capacity, small_max: (capacity / 10).max(1), lists: KeyLists::new(keys), frequency: vec![0; keys] }
    }

    fn resident(&self) -> usize {
        self.lists.len(SMALL) + self.lists.len(MAIN)
    }

    fn evict(&mut self) {
        if self.lists.len(SMALL) < self.small_max && self.lists.len(MAIN) > 0 || !self.evict_small() {
            self.evict_main();
        }
    }

    /// Evicts a line from the small queue, and moves lines that were hit to the main queue; returns whether one was
    /// evicted.
    fn evict_small(&mut self) -> bool {
        while let Some(key) = self.lists.back(SMALL) {
            let frequency = std::mem::take(&mut self.frequency[key as usize]);
            if frequency > 0 {
                self.lists.push(MAIN, key);
                continue;
            }
            if self.lists.len(GHOST) >= self.capacity - self.small_max {
                self.lists.pop(GHOST);
            }
            self.lists.push(GHOST, key);
            return true;
        }
        false
    }

    fn evict_main(&mut self) {
        while let Some(key) = self.lists.back(MAIN) {
            if self.frequency[key as usize] == 0 {
                self.lists.remove(key);
                return;
            }
            self.frequency[key as usize] -= 1;
            self.lists.push(MAIN, key);
        }
    }
}

impl ReferenceCache for S3Fifo {
    fn access(&mut self, LineAccess { key, .. }: LineAccess) -> AccessOutcome {
        let list = self.lists.list_of(key);
        if list == SMALL || list == MAIN {
            let frequency = &mut self.frequency[key as usize];
            *frequency = (*frequency + 1).min(FREQUENCY_MAX);
            return AccessOutcome::Hit;
        }
        while self.resident() >= self.capacity {
            self.evict();
        }
        // The eviction may have dropped the key's ghost, which counts all the same.
        self.lists.push(if list == GHOST { MAIN } else { SMALL }, key);
        self.frequency[key as usize] = 0;
        AccessOutcome::Filled
    }
}
