//! What was read lately: which blocks of which regions of the disk, and the last steps of reads that have no neighbours.
//!
//! A table with one place for many regions, found by a multiplication; a region that comes to a place takes it. So the
//! history has a fixed size, and a look-up a fixed cost. Streams are found by it however many there are at a time: what
//! counts is whether the blocks before (or behind) a read were read a short while ago, not by whom.

use std::ops::Range;

use crate::streams::StreamId;
use crate::units::{BLOCKS_PER_REGION, Block};

/// Places in the table.
const REGIONS: usize = 1024;

/// A region's blocks are forgotten if so many reads of the disk have passed it by.
const FORGET_AFTER: u32 = 8192;

/// Steps that are expected to be repeated, the newest ones.
const STEPS: usize = 16;

/// How many of the last reads a step is measured from.
const STEP_ORIGINS: usize = 3;

/// The longest step, in blocks: 64 MiB.
const STEP_MAX: u64 = 1 << 14;

/// How often a step must have been repeated before it is believed.
const REPEATS: u8 = 2;

/// History of a disk's reads.
pub(crate) struct Seen {
    regions: Box<[Region; REGIONS]>,
    /// Reads so far.
    now: u32,
    steps: Steps,
}

#[derive(Clone, Copy)]
struct Region {
    number: u64,
    /// The blocks that were read.
    blocks: u16,
    /// The one that was read last.
    last: u8,
    /// When, in reads.
    when: u32,
    /// The stream of a read here.
    stream: StreamId,
}

impl Seen {
    pub(crate) const BYTES: usize = REGIONS * size_of::<Region>();

    pub(crate) fn new() -> Self {
        let nothing = Region {
            number: u64::MAX,
            blocks: 0,
            last: 0,
            when: 0,
            stream: StreamId::default(),
        };
        Self {
            regions: Box::new([nothing; REGIONS]),
            now: 0,
            steps: Steps::default(),
        }
    }

    fn place(number: u64) -> usize {
        Self::place_in(Self::group(number), number)
    }

    /// Regions of one number lie side by side, in a few lines of the processor's cache.
    fn group(number: u64) -> u64 {
        number >> 5
    }

    fn place_in(group: u64, number: u64) -> usize {
        let high = group.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54;
        (high ^ number) as usize % REGIONS
    }

    /// Notes a read of `blocks`. A block that is read again begins a new pass over its region, unless it is the one that
    /// was read last (requests may be smaller than blocks).
    pub(crate) fn note(&mut self, blocks: Range<Block>) {
        self.now = self.now.wrapping_add(1);
        let mut block = blocks.start;
        while block < blocks.end {
            let number = block / BLOCKS_PER_REGION;
            let end = blocks.end.min((number + 1) * BLOCKS_PER_REGION);
            let first = (block % BLOCKS_PER_REGION) as u32;
            let bits = (((1u32 << (end - block)) - 1) << first) as u16;
            let region = &mut self.regions[Self::place(number)];
            let is_same = region.number == number && self.now.wrapping_sub(region.when) < FORGET_AFTER;
            let again = region.blocks & bits & !(1 << region.last);
            *region = Region {
                number,
                blocks: if is_same && again == 0 {
                    region.blocks | bits
                } else {
                    bits
                },
                last: ((end - 1) % BLOCKS_PER_REGION) as u8,
                when: self.now,
                stream: region.stream,
            };
            block = end;
        }
    }

    /// Whether anything around `blocks` was read lately, that is, in their regions or a neighbour of those. If not, they
    /// are no part of anything but a step.
    #[inline]
    pub(crate) fn knows_around(&self, blocks: &Range<Block>) -> bool {
        let (first, last) = regions_around(blocks);
        let group = Self::group(first);
        let is_known = |number: u64| self.regions[Self::place_in(group, number)].number == number;
        if last - first == 2 && Self::group(last) == group {
            // Without a branch for each.
            return is_known(first) | is_known(first + 1) | is_known(last);
        }
        let is_known = |number: u64| self.regions[Self::place(number)].number == number;
        is_known(first) | is_known(first + 1) | is_known(last - 1) | is_known(last)
    }

    /// Reads so far.
    pub(crate) fn now(&self) -> u32 {
        self.now
    }

    /// Notes that a read is of a stream.
    pub(crate) fn assign(&mut self, blocks: &Range<Block>, stream: StreamId) {
        for block in [blocks.start, blocks.end - 1] {
            self.regions[Self::place(block / BLOCKS_PER_REGION)].stream = stream;
        }
    }

    /// The stream of the last read in a region that was of one.
    pub(crate) fn stream_at(&self, number: u64) -> Option<StreamId> {
        let region = &self.regions[Self::place(number)];
        (region.number == number).then_some(region.stream)
    }

    fn blocks_of(&self, number: u64) -> u16 {
        let region = &self.regions[Self::place(number)];
        match region.number == number && self.now.wrapping_sub(region.when) < FORGET_AFTER {
            true => region.blocks,
            false => 0,
        }
    }

    /// Whether most of `blocks` were read lately.
    pub(crate) fn were_read(&self, blocks: Range<Block>) -> bool {
        let needed = (blocks.end - blocks.start) * 3;
        let (mut block, mut found) = (blocks.start, 0);
        while block < blocks.end {
            let number = block / BLOCKS_PER_REGION;
            let end = blocks.end.min((number + 1) * BLOCKS_PER_REGION);
            let bits = u32::from(self.blocks_of(number)) >> (block % BLOCKS_PER_REGION);
            let here = (bits & ((1 << (end - block)) - 1)).count_ones();
            if here == 0 {
                return false;
            }
            found += u64::from(here);
            block = end;
        }
        found * 4 >= needed
    }

    /// Notes a read at `block` that has no neighbours, and gives the step by which it follows others, if it does.
    pub(crate) fn step_to(&mut self, block: Block) -> Option<i64> {
        self.steps.to(block)
    }

    /// Expects a read at `block` that goes on with a known step.
    pub(crate) fn expect(&mut self, block: Block, step: i64) {
        self.steps.expect(block, step, REPEATS);
    }
}

/// The numbers of the region before that of a read's start, and of the one behind that of its end.
pub(crate) fn regions_around(blocks: &Range<Block>) -> (u64, u64) {
    let (first, last) = (blocks.start / BLOCKS_PER_REGION, (blocks.end - 1) / BLOCKS_PER_REGION);
    (first.saturating_sub(1), last + 1)
}

/// Which reads would go on with a step between earlier ones.
#[derive(Default)]
struct Steps {
    expected: [Block; STEPS],
    /// The low halves of those, which can be looked through at once.
    keys: [u32; STEPS],
    steps: [i32; STEPS],
    repeats: [u8; STEPS],
    next: usize,
    /// The newest first.
    origins: [Block; STEP_ORIGINS],
}

impl Steps {
    fn to(&mut self, block: Block) -> Option<i64> {
        let key = block as u32;
        let is_there = self
            .keys
            .iter()
            .fold(false, |is_there, other| is_there | (*other == key));
        if is_there
            && let Some(index) = self.expected.iter().position(|expected| *expected == block)
            && self.steps[index] != 0
        {
            let step = i64::from(self.steps[index]);
            self.repeats[index] += 1;
            match block.checked_add_signed(step) {
                Some(next) if self.repeats[index] < REPEATS => {
                    (self.expected[index], self.keys[index]) = (next, next as u32);
                }
                _ => self.steps[index] = 0,
            }
            return (self.repeats[index] >= REPEATS).then_some(step);
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
        self.next = (index + 1) % STEPS;
        (self.expected[index], self.keys[index]) = (block, block as u32);
        self.steps[index] = step as i32;
        self.repeats[index] = repeats;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_read_is_known_until_it_is_read_again() {
        let mut seen = Seen::new();
        seen.note(10..20);
        assert!(seen.were_read(10..20) && seen.were_read(9..13) && !seen.were_read(19..22));
        seen.note(11..12);
        // 11 is a new pass over the first region, 16 to 20 lie in the second.
        assert!(!seen.were_read(10..14) && seen.were_read(16..20));
        for _ in 0..FORGET_AFTER {
            seen.note(1 << 40..(1 << 40) + 1);
        }
        assert!(!seen.were_read(16..20));
    }

    #[test]
    fn a_step_is_found_among_others() {
        let mut seen = Seen::new();
        let mut found = Vec::new();
        for index in 0..6 {
            for (origin, step) in [(100_000, 40i64), (900_000, -7)] {
                let block = (origin as i64 + index * step) as u64;
                found.push(seen.step_to(block));
            }
        }
        assert_eq!(found.iter().flatten().count(), 2, "{found:?}");
        assert!(found.iter().flatten().all(|step| [40, -7].contains(step)));
    }
}
