//! Samples of the disk's content where the guest wrote last, taken when the cache is closed. A program that uses the
//! disk without the cache, even just to mount a file system, writes to the same sectors. The samples are compared
//! because block devices and NBD exports have no modification times, and those of files can be reset.

use std::cell::RefCell;
use std::rc::Rc;

use larder_block::{AlignedBuf, BlockDevice, ByteOffset, ByteRange, Io, ReadBuf, join};
use smallvec::SmallVec;

use crate::Cache;
use crate::shape::SECTOR;

/// Number of sectors that are sampled.
pub(crate) const SAMPLES: usize = 8;

/// Sample of one sector of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sample {
    /// Offset of the sector in bytes.
    pub(crate) at: u64,
    /// CRC32C of the sector's content.
    pub(crate) sum: u32,
}

/// Offsets of the sectors that were written last; the newest comes last.
#[derive(Default)]
pub(crate) struct Written(RefCell<SmallVec<[u64; SAMPLES]>>);

impl Written {
    /// Returns the offsets that an earlier session has saved.
    pub(crate) fn before(samples: &[Sample]) -> Self {
        Self(RefCell::new(samples.iter().map(|sample| sample.at).collect()))
    }

    /// Records a write of `range` by its first sector.
    pub(crate) fn add(&self, range: ByteRange) {
        let at = range.start.align_down(SECTOR).get();
        let mut places = self.0.borrow_mut();
        match places.iter().position(|place| *place == at) {
            Some(known) => places[known..].rotate_left(1),
            None => {
                if places.len() >= SAMPLES {
                    places.remove(0);
                }
                places.push(at);
            }
        }
    }

    /// Forgets a range whose content may change on its own, or has no meaning.
    pub(crate) fn forget(&self, range: ByteRange) {
        self.0
            .borrow_mut()
            .retain(|at| !ByteRange::new(*at, SECTOR).overlaps(range));
    }
}

impl Cache {
    /// Returns samples of the sectors that were written last, without those that cannot be read.
    pub(crate) async fn samples(&self) -> Vec<Sample> {
        let places = self.written.0.borrow().to_vec();
        let found = sums(&self.lower, &places).await;
        let samples = places.into_iter().zip(found);
        samples.filter_map(|(at, sum)| Some(Sample { at, sum: sum? })).collect()
    }
}

/// Returns whether a disk still matches all samples; unreadable sectors match.
pub(crate) async fn are_there(disk: &Rc<dyn BlockDevice>, samples: &[Sample]) -> bool {
    let places: Vec<u64> = samples.iter().map(|sample| sample.at).collect();
    let found = sums(disk, &places).await;
    samples
        .iter()
        .zip(found)
        .all(|(sample, sum)| sum.is_none_or(|sum| sum == sample.sum))
}

/// Returns the CRC32C of some sectors, which are read concurrently; `None` for those that cannot be read.
async fn sums(disk: &Rc<dyn BlockDevice>, places: &[u64]) -> Vec<Option<u32>> {
    let size = disk.geometry().size.get();
    let mut bytes = AlignedBuf::zeroed(places.len() * SECTOR as usize);
    let mut is_read = vec![false; places.len()];
    let reads: SmallVec<[Io<'_>; SAMPLES]> = places
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
    let sums = bytes.chunks_exact(SECTOR as usize).map(crc32c::crc32c);
    is_read
        .into_iter()
        .zip(sums)
        .map(|(is_read, sum)| is_read.then_some(sum))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn written_keeps_latest_sectors_in_order() {
        let written = Written::default();
        for at in (0..10).chain([5, 9]) {
            written.add(ByteRange::new(at * 4096 + 700, 9000));
        }
        written.forget(ByteRange::new(6 * 4096, 1024));
        let places: Vec<u64> = [2, 3, 4, 7, 8, 5, 9].map(|at| at * 4096 + 512).to_vec();
        assert_eq!(written.0.borrow().to_vec(), places);
    }
}
