//! History of recent reads: the blocks of the regions that were read, and the last steps between isolated reads.
//!
//! The history is a table with one entry for many regions, found by a multiplication; a new region replaces the old
//! one in its entry. So it has a fixed size, and a look-up a fixed cost. The number of concurrent streams does not
//! matter: a read belongs to a stream if the blocks before (or after) it were read recently, by whichever reader.

use std::ops::Range;

use crate::streams::StreamId;
use crate::units::{BLOCKS_PER_REGION, Block};

/// Entries of the table.
const REGIONS: usize = 1024;

/// Reads of the disk after which the blocks of a region that was not read again are forgotten.
const HISTORY_READS_MAX: u32 = 8192;

/// Steps that are expected to repeat, the newest ones.
const STEPS_MAX: usize = 16;

/// Number of recent reads from which steps to a new read are measured.
const STEP_ORIGINS: usize = 3;

/// The longest step, in blocks: 64 MiB.
const STEP_MAX: u64 = 1 << 14;

/// Repetitions of a step after which a stream begins.
const STEP_REPEATS_MIN: u8 = 2;

/// History of a disk's reads.
pub(crate) struct ReadHistory {
    regions: Box<[Region; REGIONS]>,
    /// Reads so far.
    now: u32,
    steps: Steps,
}

#[derive(Clone, Copy)]
struct Region {
    number: u64,
    /// Blocks that were read.
    blocks: u16,
    /// Block that was read last.
    last: u8,
    /// Time of the last read, in reads of the disk.
    last_read: u32,
    /// Stream of the last read in the region that belonged to one.
    stream: StreamId,
}

impl ReadHistory {
    pub(crate) const BYTES: usize = REGIONS * size_of::<Region>();

    pub(crate) fn new() -> Self {
        let empty = Region { number: u64::MAX, blocks: 0, last: 0, last_read: 0, stream: StreamId::default() };
        Self { regions: Box::new([empty; REGIONS]), now: 0, steps: Steps::default() }
    }

    fn index_of(number: u64) -> usize {
        Self::index_in(Self::group(number), number)
    }

    /// Group of regions with consecutive numbers, which share a few lines of the processor's cache.
    fn group(number: u64) -> u64 {
        number >> 5
    }

    fn index_in(group: u64, number: u64) -> usize {
        let high = group.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54;
        (high ^ number) as usize % REGIONS
    }

    /// Records a read of `blocks`. A block that is read again begins a new pass over its region, unless it is the one
    /// that was read last (requests may be smaller than blocks).
    pub(crate) fn record(&mut self, blocks: Range<Block>) {
        self.now = self.now.wrapping_add(1);
        let mut block = blocks.start;
        while block < blocks.end {
            let number = block / BLOCKS_PER_REGION;
            let end = blocks.end.min((number + 1) * BLOCKS_PER_REGION);
            let first = (block % BLOCKS_PER_REGION) as u32;
            let bits = (((1u32 << (end - block)) - 1) << first) as u16;
            let region = &mut self.regions[Self::index_of(number)];
            let is_same = region.number == number && self.now.wrapping_sub(region.last_read) < HISTORY_READS_MAX;
            let reread = region.blocks & bits & !(1 << region.last);
            *region = Region {
                number,
                blocks: if is_same && reread == 0 { region.blocks | bits } else { bits },
                last: ((end - 1) % BLOCKS_PER_REGION) as u8,
                last_read: self.now,
                stream: region.stream,
            };
            block = end;
        }
    }

    /// Returns whether any region of `blocks`, or one next to those, was read recently. If not, the read can only
    /// belong to a strided stream.
    #[inline]
    pub(crate) fn has_read_near(&self, blocks: &Range<Block>) -> bool {
        let (first, last) = regions_around(blocks);
        let group = Self::group(first);
        let is_known = |number: u64| self.regions[Self::index_in(group, number)].number == number;
        if last - first == 2 && Self::group(last) == group {
            // Without a branch for each comparison.
            return is_known(first) | is_known(first + 1) | is_known(last);
        }
        let is_known = |number: u64| self.regions[Self::index_of(number)].number == number;
        is_known(first) | is_known(first + 1) | is_known(last - 1) | is_known(last)
    }

    /// Returns the number of reads so far.
    pub(crate) fn now(&self) -> u32 {
        self.now
    }

    /// Records that a read of `blocks` belongs to a stream.
    pub(crate) fn assign(&mut self, blocks: &Range<Block>, stream: StreamId) {
        for block in [blocks.start, blocks.end - 1] {
            self.regions[Self::index_of(block / BLOCKS_PER_REGION)].stream = stream;
        }
    }

    /// Returns the stream of the last read in a region that belonged to one.
    pub(crate) fn stream_at(&self, number: u64) -> Option<StreamId> {
        let region = &self.regions[Self::index_of(number)];
        (region.number == number).then_some(region.stream)
    }

    fn blocks_of(&self, number: u64) -> u16 {
        let region = &self.regions[Self::index_of(number)];
        match region.number == number && self.now.wrapping_sub(region.last_read) < HISTORY_READS_MAX {
            true => region.blocks,
            false => 0,
        }
    }

    /// Returns whether at least three quarters of `blocks` were read recently, and some in each of their regions.
    pub(crate) fn were_read(&self, blocks: Range<Block>) -> bool {
        let needed = (blocks.end - blocks.start) * 3;
        let (mut block, mut found) = (blocks.start, 0);
        while block < blocks.end {
            let number = block / BLOCKS_PER_REGION;
            let end = blocks.end.min((number + 1) * BLOCKS_PER_REGION);
            let bits = u32::from(self.blocks_of(number)) >> (block % BLOCKS_PER_REGION);
            let read_blocks = (bits & ((1 << (end - block)) - 1)).count_ones();
            if read_blocks == 0 {
                return false;
            }
            found += u64::from(read_blocks);
            block = end;
        }
        found * 4 >= needed
    }

    /// Records an isolated read at `block`, and returns the step by which it follows earlier ones, if that was
    /// repeated.
    pub(crate) fn step_to(&mut self, block: Block) -> Option<i64> {
        self.steps.observe(block)
    }

    /// Expects a read at `block` that continues a known step.
    pub(crate) fn expect(&mut self, block: Block, step: i64) {
        self.steps.expect(block, step, STEP_REPEATS_MIN);
    }
}

/// Returns the numbers of the region before the one where a read starts, and of the region after the one where it
/// ends.
pub(crate) fn regions_around(blocks: &Range<Block>) -> (u64, u64) {
    let (first, last) = (blocks.start / BLOCKS_PER_REGION, (blocks.end - 1) / BLOCKS_PER_REGION);
    (first.saturating_sub(1), last + 1)
}

/// Expected continuations of steps between earlier reads.
#[derive(Default)]
struct Steps {
    expected: [Block; STEPS_MAX],
    /// Low halves of the expected blocks, which can be searched at once.
    keys: [u32; STEPS_MAX],
    steps: [i32; STEPS_MAX],
    repeats: [u8; STEPS_MAX],
    next: usize,
    /// Last reads, newest first.
    origins: [Block; STEP_ORIGINS],
}

impl Steps {
    fn observe(&mut self, block: Block) -> Option<i64> {
        let key = block as u32;
        let may_be_expected = self.keys.iter().fold(false, |found, other| found | (*other == key));
        if may_be_expected
            && let Some(index) = self.expected.iter().position(|expected| *expected == block)
            && self.steps[index] != 0
        {
            let step = i64::from(self.steps[index]);
            self.repeats[index] += 1;
            match block.checked_add_signed(step) {
                Some(next) if self.repeats[index] < STEP_REPEATS_MIN => {
                    (self.expected[index], self.keys[index]) = (next, next as u32);
                }
                _ => self.steps[index] = 0,
            }
            return (self.repeats[index] >= STEP_REPEATS_MIN).then_some(step);
        }
        for origin in self.origins {
            let step = block.wrapping_sub(origin) as i64;
            let is_short = step.wrapping_add(STEP_MAX as i64) as u64 <= 2 * STEP_MAX;
            if is_short
                && step != 0
                && let Some(next) = block.checked_add_signed(step)
            {
                self.expect(next, step, 0);
            }
        }
        let [newest, older, _] = self.origins;
        self.origins = [block, newest, older];
        None
    }

    fn expect(&mut self, block: Block, step: i64, repeats: u8) {
        let index = self.next;
        self.next = (index + 1) % STEPS_MAX;
        (self.expected[index], self.keys[index]) = (block, block as u32);
        self.steps[index] = step as i32;
        self.repeats[index] = repeats;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks count as read until one of their region is read again, or until many other reads have passed.
    #[test]
    fn reread_begins_new_pass_over_region() {
        let mut history = ReadHistory::new();
        history.record(10..20);
        assert!(history.were_read(10..20) && history.were_read(9..13) && !history.were_read(19..22));
        history.record(11..12);
        // Block 11 begins a new pass over the first region; blocks 16 to 20 lie in the second one.
        assert!(!history.were_read(10..14) && history.were_read(16..20));
        for _ in 0..HISTORY_READS_MAX {
            history.record(1 << 40..(1 << 40) + 1);
        }
        assert!(!history.were_read(16..20));
    }

    /// Two interleaved strided readers are both detected.
    #[test]
    fn interleaved_steps_are_detected() {
        let mut history = ReadHistory::new();
        let mut found = Vec::new();
        for index in 0..6 {
            for (origin, step) in [(100_000, 40i64), (900_000, -7)] {
                let block = (origin as i64 + index * step) as u64;
                found.push(history.step_to(block));
            }
        }
        assert_eq!(found.iter().flatten().count(), 2, "{found:?}");
        assert!(found.iter().flatten().all(|step| [40, -7].contains(step)));
    }
}
