//! Reuse times of lines, learnt from a sample.
//!
//! Sampling is spatial, as in SHARDS (Waldspurger et al., "Efficient MRC Construction with SHARDS", FAST 15): a line
//! is sampled if its hash is below a threshold, so all uses of a sampled line are seen. The sample is a table of
//! fixed size; the threshold is such that the lines that can be used within [`HORIZON_TICKS`] ticks fill half of it.

use crate::age::{AGES, HORIZON_TICKS, age};
use crate::class::{self, Class};

/// Entries of the table; [`BUCKET_ENTRIES`] is the number of entries in a bucket.
const ENTRIES: usize = 16 << 10;
const BUCKET_ENTRIES: usize = 4;

#[derive(Clone, Copy, Default)]
struct Entry {
    /// Part of the hash that does not choose the bucket.
    tag: u32,
    /// Tick of the line's last use.
    tick: u32,
    /// Class of the line's last use; 0 if the entry is empty.
    class: u8,
}

/// Reuse statistics of a class by age: how often lines were used again, and how often they had not been when they
/// left the sample. Both fade.
#[derive(Clone, Copy)]
pub(crate) struct ReuseTimes {
    pub(crate) reused: [f32; AGES],
    pub(crate) ended: [f32; AGES],
}

const EMPTY: ReuseTimes = ReuseTimes { reused: [0.0; AGES], ended: [0.0; AGES] };

pub(crate) struct ReuseSampler {
    entries: Vec<Entry>,
    /// Highest hash of sampled lines.
    threshold: u64,
    /// Entry that was last checked for being too old.
    hand: usize,
    times: Vec<ReuseTimes>,
}

impl ReuseSampler {
    /// Creates a sample for a cache in which `horizon` uses of lines make up the horizon.
    pub(crate) fn new(horizon: u64) -> Self {
        let entries = (2 * horizon).next_power_of_two().clamp(64, ENTRIES as u64) as usize;
        let share = entries as f64 / 2.0 / horizon as f64;
        Self {
            entries: vec![Entry::default(); entries],
            threshold: (share.min(1.0) * u64::MAX as f64) as u64,
            hand: 0,
            times: vec![EMPTY; class::COUNT],
        }
    }

    /// Records a use of a line, which is of `class` from now on.
    pub(crate) fn record_use(&mut self, hash: u64, class: Class, tick: u32) {
        if hash <= self.threshold {
            self.record_sampled(hash, class, tick);
        }
    }

    fn record_sampled(&mut self, hash: u64, class: Class, tick: u32) {
        let bucket = hash as usize % (self.entries.len() / BUCKET_ENTRIES) * BUCKET_ENTRIES;
        let tag = (hash >> 20) as u32;
        let now = Entry { tag, tick, class: class.number() };
        let entries = &mut self.entries[bucket..bucket + BUCKET_ENTRIES];
        let known = entries.iter().position(|entry| entry.tag == tag && entry.class != 0);
        let index = known.unwrap_or_else(|| {
            let oldest = entries.iter().enumerate().min_by_key(|(_, entry)| (entry.class != 0, entry.tick));
            oldest.map_or(0, |(index, _)| index)
        });
        let before = std::mem::replace(&mut entries[index], now);
        if before.class != 0 {
            self.finish_entry(before, tick, known.is_some());
        }
        for _ in 0..2 {
            self.hand = (self.hand + 1) % self.entries.len();
            let entry = &mut self.entries[self.hand];
            if entry.class != 0 && tick.wrapping_sub(entry.tick) >= HORIZON_TICKS {
                let entry = std::mem::take(entry);
                self.finish_entry(entry, tick, false);
            }
        }
    }

    fn finish_entry(&mut self, entry: Entry, tick: u32, reused: bool) {
        let times = &mut self.times[usize::from(entry.class)];
        let ticks = tick.wrapping_sub(entry.tick);
        if reused && ticks < HORIZON_TICKS {
            times.reused[age(ticks)] += 1.0;
        } else {
            times.ended[age(ticks)] += 1.0;
        }
    }

    /// Returns the statistics up to `tick`, by class. Lines whose next use is still to come count as ended now.
    pub(crate) fn times(&self, tick: u32) -> Vec<ReuseTimes> {
        let mut times = self.times.clone();
        for entry in self.entries.iter().filter(|entry| entry.class != 0) {
            times[usize::from(entry.class)].ended[age(tick.wrapping_sub(entry.tick))] += 1.0;
        }
        times
    }

    /// Multiplies all statistics by `by`, so that newer ones outweigh them.
    pub(crate) fn decay(&mut self, by: f32) {
        for times in &mut self.times {
            times.reused.iter_mut().chain(&mut times.ended).for_each(|count| *count *= by);
        }
    }
}
