//! S3-FIFO (Yang et al., "FIFO Queues are All You Need for Cache Eviction", SOSP 2023): a small queue of a tenth of the
//! cache that new lines pass, a main queue for what was hit there or is known from a ghost queue as long as the main
//! one, and two bits of frequency. A line of the main queue that was hit goes round again.

use super::list::Lists;
use super::{Ask, Cache, Outcome};

const SMALL: u8 = 0;
const MAIN: u8 = 1;
const GHOST: u8 = 2;

/// What the frequency, two bits, counts to.
const FREQUENCY_MAX: u8 = 3;

/// See the module.
pub struct S3Fifo {
    capacity: usize,
    small_max: usize,
    lists: Lists<3>,
    frequency: Vec<u8>,
}

impl S3Fifo {
    /// An empty cache of `capacity` lines, at least one, for keys below `keys`.
    pub fn new(capacity: usize, keys: usize) -> Self {
        let capacity = capacity.max(1);
        Self {
            capacity,
            small_max: (capacity / 10).max(1),
            lists: Lists::new(keys),
            frequency: vec![0; keys],
        }
    }

    fn resident(&self) -> usize {
        self.lists.len(SMALL) + self.lists.len(MAIN)
    }

    fn evict(&mut self) {
        if self.lists.len(SMALL) < self.small_max && self.lists.len(MAIN) > 0 || !self.evict_small() {
            self.evict_main();
        }
    }

    /// Whether one has left the cache; what was hit goes to the main queue instead.
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

impl Cache for S3Fifo {
    fn access(&mut self, Ask { key, .. }: Ask) -> Outcome {
        let list = self.lists.list_of(key);
        if list == SMALL || list == MAIN {
            let frequency = &mut self.frequency[key as usize];
            *frequency = (*frequency + 1).min(FREQUENCY_MAX);
            return Outcome::Hit;
        }
        while self.resident() >= self.capacity {
            self.evict();
        }
        // Making room may have pushed the key's ghost out, but it was one when it was asked for.
        self.lists.push(if list == GHOST { MAIN } else { SMALL }, key);
        self.frequency[key as usize] = 0;
        Outcome::Filled
    }
}
