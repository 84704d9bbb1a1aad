//! Statistics of the pager.

use std::time::Duration;

use larder_block::histogram::Histogram;

/// Origin of a page that was paged in.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PageSource {
    /// Zeros: the page was never touched, or was given up.
    Zero,
    /// A repeated word.
    Uniform,
    /// Compressed RAM.
    Ram,
    /// A disk.
    Disk,
    /// None: the page could not be read back.
    Lost,
}

/// Number of buckets of refault distances. The last bucket includes all larger distances.
const DISTANCE_BUCKETS: usize = 32;

/// Statistics since the pager was made.
#[derive(Clone, Debug, Default)]
pub struct PagerStats {
    /// Time from the fault message to the end of the fault, for pages of zeros that are stored nowhere.
    pub zero: Histogram,
    /// Time to resolve faults on uniform pages.
    pub uniform: Histogram,
    /// Time to resolve faults on pages in compressed RAM.
    pub ram: Histogram,
    /// Time to resolve faults on pages on disks.
    pub disk: Histogram,
    /// Pages prefetched from a tier because others were wanted.
    pub prefetched: u64,
    /// Pages of zeros prefetched because the pages before them were wanted.
    pub prefetched_zero: u64,
    /// Faults that continued a stream.
    pub stream_faults: u64,
    /// Pages that could not be read back.
    pub lost: u64,
    /// Time to resolve writes to protected pages.
    pub protected_writes: Histogram,
    /// Pages that were wanted so soon after their eviction that a little more memory would have kept them.
    pub refaults: u64,
    /// Refault distances: pages that came back from compressed RAM and disks, by the number of pages evicted since
    /// their own eviction. A bucket counts distances below 2 to the power of its index and not below half of that.
    /// With memory for that many more pages, they would have stayed.
    pub refault_distances: [u64; DISTANCE_BUCKETS],
    /// Evicted pages.
    pub evicted: u64,
    /// Evicted pages that still had a copy in a tier.
    pub evicted_clean: u64,
    /// Evicted pages that were uniform (one repeated word).
    pub evicted_uniform: u64,
    /// Bytes in which the other evicted pages were stored.
    pub evicted_bytes: u64,
    /// Pages that were chosen for eviction and kept, because they cannot be compressed and no tier accepts
    /// incompressible pages.
    pub incompressible: u64,
    /// Pages that were written to during their eviction, which was cancelled.
    pub evictions_cancelled: u64,
    /// Pages that the process has given up.
    pub discarded: u64,
    /// Pages that were unexpectedly in memory.
    pub already_present: u64,
    /// Evicted pages that another process has read or written in the memory's file.
    pub touched_externally: u64,
}

impl PagerStats {
    /// Counts a page that came back after `evicted` other pages were evicted.
    pub(super) fn count_refault(&mut self, evicted: u32) {
        let bits = (u32::BITS - evicted.leading_zeros()) as usize;
        self.refault_distances[bits.min(DISTANCE_BUCKETS - 1)] += 1;
    }

    pub(super) fn count_page_in(&mut self, source: PageSource, took: Duration) {
        match source {
            PageSource::Zero => self.zero.add(took),
            PageSource::Uniform => self.uniform.add(took),
            PageSource::Ram => self.ram.add(took),
            PageSource::Disk => self.disk.add(took),
            PageSource::Lost => self.lost += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refault_distances_use_log2_buckets() {
        let mut figures = PagerStats::default();
        for evicted in [0, 1, 2, 3, 4, 7, 8, u32::MAX] {
            figures.count_refault(evicted);
        }
        assert_eq!(figures.refault_distances[..6], [1, 1, 2, 2, 1, 0]);
        assert_eq!(figures.refault_distances[31], 1);
    }
}
