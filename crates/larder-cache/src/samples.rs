//! Samples of the disk's content, taken when the cache is closed: where the guest wrote last. Who uses the disk without its
//! cache, be it only to mount a file system, writes to the same places. They are compared because block devices and NBD
//! exports have no times of their last change, and those of files can be put back.

use std::cell::RefCell;
use std::rc::Rc;

use larder_block::{AlignedBuf, BlockDevice, ByteOffset, ByteRange, Io, ReadBuf, join};
use smallvec::SmallVec;

use crate::Cache;
use crate::shape::SECTOR;

/// So many places are remembered.
pub(crate) const SAMPLES: usize = 8;

/// A sector of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Sample {
    /// Its first byte.
    pub(crate) at: u64,
    /// CRC32C of what is there.
    pub(crate) sum: u32,
}

/// The places that were written last; the newest is the last one.
#[derive(Default)]
pub(crate) struct Written(RefCell<SmallVec<[u64; SAMPLES]>>);

impl Written {
    /// As an earlier cache had them.
    pub(crate) fn before(samples: &[Sample]) -> Self {
        Self(RefCell::new(samples.iter().map(|sample| sample.at).collect()))
    }

    /// A range is written, of which the first sector is remembered.
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

    /// What a range has may change by itself from now on, or has no meaning.
    pub(crate) fn forget(&self, range: ByteRange) {
        self.0
            .borrow_mut()
            .retain(|at| !ByteRange::new(*at, SECTOR).overlaps(range));
    }
}

impl Cache {
    /// What the disk has now where it was written last; nothing of what cannot be read.
    pub(crate) async fn samples(&self) -> Vec<Sample> {
        let places = self.written.0.borrow().to_vec();
        let found = sums(&self.lower, &places).await;
        let samples = places.into_iter().zip(found);
        samples.filter_map(|(at, sum)| Some(Sample { at, sum: sum? })).collect()
    }
}

/// Whether a disk still has all of them, as far as that can be read.
pub(crate) async fn are_there(disk: &Rc<dyn BlockDevice>, samples: &[Sample]) -> bool {
    let places: Vec<u64> = samples.iter().map(|sample| sample.at).collect();
    let found = sums(disk, &places).await;
    samples
        .iter()
        .zip(found)
        .all(|(sample, sum)| sum.is_none_or(|sum| sum == sample.sum))
}

/// CRC32C of the sectors at some places, read at the same time.
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
    // What could not be read is told by `is_read`.
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
    fn the_places_that_were_written_last_are_remembered() {
        let written = Written::default();
        for at in (0..10).chain([5, 9]) {
            written.add(ByteRange::new(at * 4096 + 700, 9000));
        }
        written.forget(ByteRange::new(6 * 4096, 1024));
        let places: Vec<u64> = [2, 3, 4, 7, 8, 5, 9].map(|at| at * 4096 + 512).to_vec();
        assert_eq!(written.0.borrow().to_vec(), places);
    }
}
