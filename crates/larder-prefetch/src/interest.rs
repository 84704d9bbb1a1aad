//! Detector of random access: after many consecutive reads outside of any stream, hardly any read is inspected.
//!
//! A disk with long random access then pays only for a look-up of each read. Inspection resumes as soon as some reads
//! are adjacent (in any order, if there are not too many others between them), and periodically for a few reads,
//! which detects all other patterns.

use std::ops::Range;

use crate::units::Block;

/// Number of consecutive reads outside of any stream after which the access counts as random.
const BORED_AFTER: u32 = 4096;

/// Reads that are skipped during random access before [`LOOKS`] reads are inspected.
const ROUND: u32 = 4096;
const LOOKS: u32 = 256;

/// Entries for recent starts of reads, and for recent ends; a newer one replaces an older one.
const PLACES: usize = 64;

/// Weight in reads of a read that is adjacent to another one; two close to each other end the random state.
const NEIGHBOUR: u32 = 64;

pub(crate) struct Interest {
    /// Reads since the last one that belonged to a stream.
    fruitless: u32,
    /// Low halves of the block numbers where reads began during random access; `ends` has those where they ended.
    starts: [u32; PLACES],
    ends: [u32; PLACES],
    /// Weight of recent adjacent reads; each read reduces it by one.
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

    /// Records a read that belongs to a stream.
    #[inline]
    pub(crate) fn wake(&mut self) {
        self.fruitless = 0;
    }

    /// Records a read that found nothing in memory, and is inspected.
    #[inline]
    pub(crate) fn missed(&mut self) {
        self.fruitless += 1;
    }

    /// Returns whether the access is random.
    #[inline]
    pub(crate) fn is_bored(&self) -> bool {
        self.fruitless >= BORED_AFTER
    }

    /// Returns whether a read of `blocks`, which are not in memory, is inspected during random access.
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

    /// Returns blocks without adjacent ones.
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

    /// During random access, only the periodic share of reads is inspected.
    #[test]
    fn random_reads_are_hardly_inspected() {
        let mut interest = bored();
        let rounds = 10;
        let reads = scattered().take((rounds * (ROUND + LOOKS)) as usize);
        let looks = reads.filter(|block| interest.looks_at(*block)).count() as u32;
        assert!(looks.abs_diff(rounds * LOOKS) <= LOOKS, "{looks}");
    }

    /// Three adjacent reads, mixed with others, end the random state in both directions.
    #[test]
    fn adjacent_reads_end_random_state() {
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

    /// A read that belongs to a stream ends the random state.
    #[test]
    fn stream_ends_random_state() {
        let mut interest = bored();
        interest.wake();
        assert!(
            scattered()
                .take(BORED_AFTER as usize)
                .all(|block| interest.looks_at(block))
        );
    }
}
