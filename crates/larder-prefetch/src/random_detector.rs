//! Detector of random access: after many consecutive reads outside of any stream, hardly any read is inspected.
//!
//! A disk with long random access then pays only for a look-up of each read. Inspection resumes as soon as some reads
//! are adjacent (in any order, if there are not too many others between them), and periodically for a few reads,
//! which detects all other patterns.

use std::ops::Range;

use crate::units::Block;

/// Number of consecutive reads outside of any stream after which the access counts as random.
const RANDOM_THRESHOLD: u32 = 4096;

/// Reads that are skipped during random access before [`INSPECTED_READS`] reads are inspected.
const SKIPPED_READS: u32 = 4096;
const INSPECTED_READS: u32 = 256;

/// Entries for recent starts of reads, and for recent ends; a newer one replaces an older one.
const ENTRIES: usize = 64;

/// Weight in reads of a read that is adjacent to another one; two close to each other end the random state.
const ADJACENT_WEIGHT: u32 = 64;

pub(crate) struct RandomDetector {
    /// Reads since the last one that belonged to a stream.
    reads_outside_streams: u32,
    /// Low halves of the block numbers where reads began during random access; `ends` has those where they ended.
    starts: [u32; ENTRIES],
    ends: [u32; ENTRIES],
    /// Weight of recent adjacent reads; each read reduces it by one.
    adjacency: u32,
}

impl RandomDetector {
    pub(crate) fn new() -> Self {
        Self { reads_outside_streams: 0, starts: [0; ENTRIES], ends: [0; ENTRIES], adjacency: 0 }
    }

    /// Records a read that belongs to a stream.
    #[inline]
    pub(crate) fn record_stream_read(&mut self) {
        self.reads_outside_streams = 0;
    }

    /// Records a read that found nothing in memory, and is inspected.
    #[inline]
    pub(crate) fn record_miss(&mut self) {
        self.reads_outside_streams += 1;
    }

    /// Returns whether the access is random.
    #[inline]
    pub(crate) fn is_random(&self) -> bool {
        self.reads_outside_streams >= RANDOM_THRESHOLD
    }

    /// Returns whether a read of `blocks`, which are not in memory, is inspected during random access.
    #[inline]
    pub(crate) fn detects_locality(&mut self, blocks: &Range<Block>) -> bool {
        let (start, end) = (blocks.start as u32, blocks.end as u32);
        let entry = |block: u32| (block ^ block >> 4) as usize % ENTRIES;
        let is_adjacent = self.ends[entry(start)] == start || self.starts[entry(end)] == end;
        self.starts[entry(start)] = start;
        self.ends[entry(end)] = end;
        self.adjacency = self.adjacency.saturating_sub(1);
        if is_adjacent {
            self.adjacency += ADJACENT_WEIGHT;
            if self.adjacency > ADJACENT_WEIGHT {
                (self.reads_outside_streams, self.adjacency) = (RANDOM_THRESHOLD - INSPECTED_READS, 0);
                return true;
            }
        }
        self.reads_outside_streams += 1;
        if self.reads_outside_streams >= RANDOM_THRESHOLD + SKIPPED_READS {
            self.reads_outside_streams = RANDOM_THRESHOLD - INSPECTED_READS;
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

    impl RandomDetector {
        fn inspects(&mut self, block: Block) -> bool {
            let is_inspected = !self.is_random() || self.detects_locality(&(block..block + 1));
            if is_inspected {
                self.record_miss();
            }
            is_inspected
        }
    }

    fn random_state() -> RandomDetector {
        let mut detector = RandomDetector::new();
        for block in scattered().take(RANDOM_THRESHOLD as usize) {
            assert!(detector.inspects(block));
        }
        detector
    }

    /// During random access, only the periodic share of reads is inspected.
    #[test]
    fn random_reads_are_hardly_inspected() {
        let mut detector = random_state();
        let rounds = 10;
        let reads = scattered().take((rounds * (SKIPPED_READS + INSPECTED_READS)) as usize);
        let looks = reads.filter(|block| detector.inspects(*block)).count() as u32;
        assert!(looks.abs_diff(rounds * INSPECTED_READS) <= INSPECTED_READS, "{looks}");
    }

    /// Three adjacent reads, mixed with others, end the random state in both directions.
    #[test]
    fn adjacent_reads_end_random_state() {
        for backward in [false, true] {
            let mut detector = random_state();
            let mut others = scattered();
            let is_inspected = |read: &u64| {
                let block = if backward { 1_000_000 - read } else { 1_000_000 + read };
                detector.inspects(block) | detector.inspects(others.next().unwrap())
            };
            assert_eq!((0..).find(is_inspected), Some(2), "backward: {backward}");
        }
    }

    /// A read that belongs to a stream ends the random state.
    #[test]
    fn stream_ends_random_state() {
        let mut detector = random_state();
        detector.record_stream_read();
        assert!(scattered().take(RANDOM_THRESHOLD as usize).all(|block| detector.inspects(block)));
    }
}
