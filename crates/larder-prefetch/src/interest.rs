//! Whether reads are worth to be looked at: after many in a row that were of no stream, hardly any.
//!
//! A disk that is read at random for long pays for nothing but a look-up then. It is looked at again as soon as some reads
//! follow each other (whatever their order, if not too many others are between them), and for a few reads every now and
//! then, which finds all else that can be found.

use std::ops::Range;

use crate::units::Block;

/// After so many reads of no stream the disk is boring.
const BORED_AFTER: u32 = 4096;

/// Of so many reads of a boring disk, and then some, [`LOOKS`] are looked at.
const ROUND: u32 = 4096;
const LOOKS: u32 = 256;

/// Places for where reads lately began, and for where they ended; the newest one has it.
const PLACES: usize = 64;

/// A read that has a neighbour counts for so many reads; two at a time make the disk interesting.
const NEIGHBOUR: u32 = 64;

pub(crate) struct Interest {
    /// Reads since one was of a stream.
    fruitless: u32,
    /// Low halves of where reads of a boring disk began, and where they ended.
    starts: [u32; PLACES],
    ends: [u32; PLACES],
    /// Of neighbours; a read more is one less.
    neighbours: u32,
}

impl Interest {
    pub(crate) fn new() -> Self {
        Self {
            fruitless: 0,
            starts: [0; PLACES],
            ends: [0; PLACES],
            neighbours: 0,
        }
    }

    /// A read was of a stream.
    #[inline]
    pub(crate) fn wake(&mut self) {
        self.fruitless = 0;
    }

    /// A read found nothing in memory, and is looked at.
    #[inline]
    pub(crate) fn missed(&mut self) {
        self.fruitless += 1;
    }

    /// Whether the disk is boring.
    #[inline]
    pub(crate) fn is_bored(&self) -> bool {
        self.fruitless >= BORED_AFTER
    }

    /// Whether a read of `blocks`, which are not in memory, is worth looking at though the disk is boring.
    #[inline]
    pub(crate) fn is_roused_by(&mut self, blocks: &Range<Block>) -> bool {
        let (start, end) = (blocks.start as u32, blocks.end as u32);
        let place = |block: u32| (block ^ block >> 4) as usize % PLACES;
        let has_neighbour = self.ends[place(start)] == start || self.starts[place(end)] == end;
        self.starts[place(start)] = start;
        self.ends[place(end)] = end;
        self.neighbours = self.neighbours.saturating_sub(1);
        if has_neighbour {
            self.neighbours += NEIGHBOUR;
            if self.neighbours > NEIGHBOUR {
                (self.fruitless, self.neighbours) = (BORED_AFTER - LOOKS, 0);
                return true;
            }
        }
        self.fruitless += 1;
        if self.fruitless >= BORED_AFTER + ROUND {
            self.fruitless = BORED_AFTER - LOOKS;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks that have no neighbours.
    fn scattered() -> impl Iterator<Item = Block> {
        (1u64..).map(|index| index.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 34 << 2)
    }

    impl Interest {
        fn looks_at(&mut self, block: Block) -> bool {
            let looks = !self.is_bored() || self.is_roused_by(&(block..block + 1));
            if looks {
                self.missed();
            }
            looks
        }
    }

    fn bored() -> Interest {
        let mut interest = Interest::new();
        for block in scattered().take(BORED_AFTER as usize) {
            assert!(interest.looks_at(block));
        }
        interest
    }

    #[test]
    fn a_disk_that_is_read_at_random_is_hardly_looked_at() {
        let mut interest = bored();
        let rounds = 10;
        let reads = scattered().take((rounds * (ROUND + LOOKS)) as usize);
        let looks = reads.filter(|block| interest.looks_at(*block)).count() as u32;
        assert!(looks.abs_diff(rounds * LOOKS) <= LOOKS, "{looks}");
    }

    #[test]
    fn reads_in_order_rouse_it() {
        for backward in [false, true] {
            let mut interest = bored();
            let mut others = scattered();
            let is_roused = |read: &u64| {
                let block = if backward { 1_000_000 - read } else { 1_000_000 + read };
                interest.looks_at(block) | interest.looks_at(others.next().unwrap())
            };
            assert_eq!((0..).find(is_roused), Some(2), "backward: {backward}");
        }
    }

    #[test]
    fn a_stream_makes_it_interesting() {
        let mut interest = bored();
        interest.wake();
        assert!(
            scattered()
                .take(BORED_AFTER as usize)
                .all(|block| interest.looks_at(block))
        );
    }
}
