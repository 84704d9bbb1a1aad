//! What the pager has done, counted.

use std::time::Duration;

use larder_block::histogram::Histogram;

/// Where a page came from.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Source {
    /// It was never touched, or given up: zeros.
    Zero,
    /// One word all over.
    Uniform,
    /// Compressed RAM.
    Ram,
    /// A disk.
    Disk,
    /// It could not be read back.
    Lost,
}

/// The last one has all that are further.
const DISTANCES: usize = 32;

/// Counts since the pager began.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// Faults on missing pages, by where the page came from, with the time from when we were told until it was there.
    pub zero: Histogram,
    /// As above.
    pub uniform: Histogram,
    /// As above.
    pub ram: Histogram,
    /// As above.
    pub disk: Histogram,
    /// Pages that were brought because others were wanted.
    pub ahead: u64,
    /// Pages of zeros that were put in place because those before them were wanted.
    pub ahead_zero: u64,
    /// Faults that went on where pages had been brought.
    pub streamed: u64,
    /// Pages that could not be read back.
    pub lost: u64,
    /// Writes to protected pages.
    pub writes: Histogram,
    /// Pages that came back so soon that they would have stayed with a little more memory.
    pub refaults: u64,
    /// Pages that came back from compressed RAM and disks, by how many pages had gone since they had: fewer than 2 to the
    /// power of the index, and not fewer than half as many. With memory for so many more they would have stayed.
    pub distances: [u64; DISTANCES],
    /// Pages evicted.
    pub evicted: u64,
    /// Of them, those of which a disk had a copy still.
    pub evicted_clean: u64,
    /// Of them, those of one word all over.
    pub evicted_uniform: u64,
    /// Bytes in which the others were stored.
    pub evicted_bytes: u64,
    /// Pages that were to go and stayed, because they cannot be compressed and there is no tier for such.
    pub kept: u64,
    /// Pages that were written to while they were leaving, and stayed.
    pub saved: u64,
    /// Pages that the process has given up.
    pub removed: u64,
    /// Pages that were in memory though nothing was known of it.
    pub found: u64,
    /// Evicted pages that another process has touched or written to in the memory's file.
    pub touched_by_others: u64,
}

impl Figures {
    /// A page came back before whose coming so many others had gone since it had.
    pub(super) fn returned_after(&mut self, evicted: u32) {
        let bits = (u32::BITS - evicted.leading_zeros()) as usize;
        self.distances[bits.min(DISTANCES - 1)] += 1;
    }

    pub(super) fn brought(&mut self, source: Source, took: Duration) {
        match source {
            Source::Zero => self.zero.add(took),
            Source::Uniform => self.uniform.add(took),
            Source::Ram => self.ram.add(took),
            Source::Disk => self.disk.add(took),
            Source::Lost => self.lost += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances_are_counted_by_powers_of_two() {
        let mut figures = Figures::default();
        for evicted in [0, 1, 2, 3, 4, 7, 8, u32::MAX] {
            figures.returned_after(evicted);
        }
        assert_eq!(figures.distances[..6], [1, 1, 2, 2, 1, 0]);
        assert_eq!(figures.distances[31], 1);
    }
}
