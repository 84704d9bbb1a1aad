//! Samples of the disk's content where the guest wrote last, taken when the cache is closed. A program that uses the
//! disk without the cache, even just to mount a file system, writes to the same sectors. The samples are compared
//! because block devices and NBD exports have no modification times, and those of files can be reset.

use std::cell::RefCell;
use std::rc::Rc;

use larder_block::{AlignedBuf, BlockDevice, ByteOffset, ByteRange, Io, ReadBuf, join};
use smallvec::SmallVec;

use crate::Cache;
use crate::layout::SECTOR;

/// Number of sectors that are sampled.
pub(crate) const SAMPLES: usize = 8;

/// Sample of one sector of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ContentSample {
    /// Offset of the sector in bytes.
    pub(crate) at: u64,
    /// CRC32C of the sector's content.
    pub(crate) sum: u32,
}

/// Offsets of the sectors that were written last; the newest comes last.
#[derive(Default)]
pub(crate) struct RecentWrites(RefCell<SmallVec<[u64; SAMPLES]>>);

impl RecentWrites {
    /// Returns the offsets that an earlier session has saved.
    pub(crate) fn from_samples(samples: &[ContentSample]) -> Self {
        Self(RefCell::new(samples.iter().map(|sample| sample.at).collect()))
    }

    /// Records a write of `range` by its first sector.
    pub(crate) fn record(&self, range: ByteRange) {
        let at = range.start.align_down(SECTOR).get();
        let mut offsets = self.0.borrow_mut();
        match offsets.iter().position(|offset| *offset == at) {
            Some(index) => offsets[index..].rotate_left(1),
            None => {
                if offsets.len() >= SAMPLES {
                    offsets.remove(0);
                }
                offsets.push(at);
            }
        }
    }

    /// Forgets a range whose content may change on its own, or has no meaning.
    pub(crate) fn remove_range(&self, range: ByteRange) {
        self.0.borrow_mut().retain(|at| !ByteRange::new(*at, SECTOR).overlaps(range));
    }
}

impl Cache {
    /// Returns samples of the sectors that were written last, without those that cannot be read.
    pub(crate) async fn take_samples(&self) -> Vec<ContentSample> {
        let offsets = self.recent_writes.0.borrow().to_vec();
        let found = checksums(&self.lower, &offsets).await;
        let samples = offsets.into_iter().zip(found);
        samples.filter_map(|(at, sum)| Some(ContentSample { at, sum: sum? })).collect()
    }
}

/// Returns whether a disk still matches all samples; unreadable sectors match.
pub(crate) async fn disk_matches(disk: &Rc<dyn BlockDevice>, samples: &[ContentSample]) -> bool {
    let offsets: Vec<u64> = samples.iter().map(|sample| sample.at).collect();
    let found = checksums(disk, &offsets).await;
    samples.iter().zip(found).all(|(sample, sum)| sum.is_none_or(|sum| sum == sample.sum))
}

/// Returns the CRC32C of some sectors, which are read concurrently; `None` for those that cannot be read.
async fn checksums(disk: &Rc<dyn BlockDevice>, offsets: &[u64]) -> Vec<Option<u32>> {
    let size = disk.geometry().size.get();
    let mut bytes = AlignedBuf::zeroed(offsets.len() * SECTOR as usize);
    let mut is_read = vec![false; offsets.len()];
    let reads: SmallVec<[Io<'_>; SAMPLES]> = offsets
        .iter()
        .zip(bytes.chunks_exact_mut(SECTOR as usize))
        .zip(&mut is_read)
        .filter(|((at, _), _)| at.saturating_add(SECTOR) <= size)
        .map(|((at, bytes), is_read)| {
            let read = disk.read(ByteOffset::new(*at), ReadBuf::new(bytes));
            Io::task(async move {
                *is_read = read.await.is_ok();
                Ok(())
            })
        })
        .collect();
    // Failures are in `is_read`.
    let _ = join(reads).await;
    let checksums = bytes.chunks_exact(SECTOR as usize).map(crc32c::crc32c);
    is_read.into_iter().zip(checksums).map(|(is_read, sum)| is_read.then_some(sum)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_keeps_latest_sectors_in_order() {
        let written = RecentWrites::default();
        for at in (0..10).chain([5, 9]) {
            written.record(ByteRange::new(at * 4096 + 700, 9000));
        }
        written.remove_range(ByteRange::new(6 * 4096, 1024));
        let offsets: Vec<u64> = [2, 3, 4, 7, 8, 5, 9].map(|at| at * 4096 + 512).to_vec();
        assert_eq!(written.0.borrow().to_vec(), offsets);
    }
}
