//! A disk whose sectors lie at odd byte offsets of a larger one, which checks byte granularity with an oracle that
//! knows only sectors.
//!
//! Each [`GROUP`] of bytes of the lower disk begins with `shift` unused bytes, followed by seven sectors; its last
//! bytes are unused too. The lower disk writes a group atomically, so a stop tears no sector of this disk. A request
//! for several groups is one request of the lower disk, from the first byte to the last. It may change unused bytes
//! as well.

use std::rc::Rc;

use larder_block::{
    BlockDevice, BoxFuture, ByteLen, ByteOffset, ByteRange, Extent, ExtentKind, Failure, Geometry, Io, IoError,
    IoResult, Operation, ReadBuf, SizeChanges, WriteBuf, WriteFlags, ZeroFlags, check_request,
};

use super::stamp::SECTOR;

/// Bytes that the lower disk writes atomically.
pub(super) const GROUP: u64 = 4096;

/// Sectors in a group.
const SECTORS: u64 = GROUP / SECTOR - 1;

/// The disk.
pub(super) struct ScatteredDevice {
    lower: Rc<dyn BlockDevice>,
    shift: u64,
}

impl ScatteredDevice {
    /// Creates a disk over `lower`, which must accept byte-granular requests; `shift` must be less than a sector.
    pub(super) fn new(lower: Rc<dyn BlockDevice>, shift: u64) -> Self {
        assert!(lower.geometry().block_size == 1 && shift < SECTOR);
        Self { lower, shift }
    }

    /// Returns the position of a sector on the lower disk.
    fn place(&self, sector: u64) -> u64 {
        sector / SECTORS * GROUP + self.shift + sector % SECTORS * SECTOR
    }

    /// Returns the bytes of the lower disk from the first sector of `range` to its last; `range` is not empty.
    fn below(&self, range: ByteRange) -> ByteRange {
        let last = range.end().get() / SECTOR - 1;
        let start = ByteOffset::new(self.place(range.start.get() / SECTOR));
        ByteRange::between(start, ByteOffset::new(self.place(last) + SECTOR))
    }

    /// Returns the position of each sector of `range` in a buffer of `range`, and in a buffer of [`Self::below`].
    fn sectors(&self, range: ByteRange) -> impl Iterator<Item = (usize, usize)> {
        let first = range.start.get() / SECTOR;
        let base = self.place(first);
        (0..range.len.get() / SECTOR).map(move |index| {
            let below = self.place(first + index) - base;
            ((index * SECTOR) as usize, below as usize)
        })
    }

    /// Returns the request's bytes on the lower disk, or its answer if none is needed.
    fn begin(&self, operation: Operation, range: ByteRange) -> Result<ByteRange, IoResult> {
        match check_request(self.lower.name(), &self.geometry(), operation, range) {
            Err(error) => Err(Err(error)),
            Ok(()) if range.is_empty() => Err(Ok(())),
            Ok(()) => Ok(self.below(range)),
        }
    }

    fn error(&self, operation: Operation, range: ByteRange, failure: Failure) -> IoError {
        IoError::new(self.lower.name(), operation, range, failure)
    }

    async fn extents_steps(&self, range: ByteRange, limit: usize) -> IoResult<Vec<Extent>> {
        check_request(self.lower.name(), &self.geometry(), Operation::Extents, range)?;
        let below = self.below(range);
        let found = self.lower.extents(below, limit).await?;
        let is_contiguous = |at: &mut ByteOffset, extent: &Extent| {
            let is_next = extent.range.start == *at && !extent.range.is_empty();
            *at = extent.range.end();
            is_next
        };
        let mut at = below.start;
        if found.is_empty() || found.len() > limit || !found.iter().all(|extent| is_contiguous(&mut at, extent)) {
            return Err(self.error(Operation::Extents, range, Failure::Invalid));
        }
        let mut extents: Vec<Extent> = Vec::new();
        for (index, (_, place)) in self.sectors(range).enumerate() {
            let sector = ByteRange::new(below.start.get() + place as u64, SECTOR);
            let mut parts = found.iter().filter(|extent| extent.range.overlaps(sector));
            let is_known = sector.end() <= at;
            if !is_known && index > 0 {
                break;
            }
            let kind = match parts.all(|extent| extent.kind != ExtentKind::Data) && is_known {
                true => ExtentKind::Zero,
                false => ExtentKind::Data,
            };
            let here = ByteRange::new(range.start.get() + index as u64 * SECTOR, SECTOR);
            let is_full = extents.len() == limit;
            match extents.last_mut() {
                Some(last) if last.kind == kind => last.range.len += here.len,
                _ if is_full => break,
                _ => extents.push(Extent { range: here, kind }),
            }
        }
        Ok(extents)
    }
}

impl BlockDevice for ScatteredDevice {
    fn name(&self) -> &Rc<str> {
        self.lower.name()
    }

    fn geometry(&self) -> Geometry {
        let lower = self.lower.geometry();
        Geometry { size: ByteLen::new(lower.size.get() / GROUP * SECTORS * SECTOR), block_size: SECTOR as u32, ..lower }
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        let range = start.range(buffer.byte_len());
        let below = match self.begin(Operation::Read, range) {
            Ok(below) => below,
            Err(answer) => return Io::ready(answer),
        };
        Io::task(async move {
            let mut bytes = vec![0; below.len.as_usize()];
            self.lower.read(below.start, ReadBuf::new(&mut bytes)).await?;
            for (upper, lower) in self.sectors(range) {
                let sector = &bytes[lower..][..SECTOR as usize];
                buffer.slice(upper, sector.len()).copy_from_slice(sector);
            }
            Ok(())
        })
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        let range = start.range(buffer.byte_len());
        let below = match self.begin(Operation::Write, range) {
            Ok(below) => below,
            Err(answer) => return Io::ready(answer),
        };
        Io::task(async move {
            let mut bytes = vec![0xdd; below.len.as_usize()];
            for (here, there) in self.sectors(range) {
                let sector = &mut bytes[there..][..SECTOR as usize];
                buffer.slice(here, sector.len()).copy_to_slice(sector);
            }
            self.lower.write(below.start, WriteBuf::new(&bytes), flags).await
        })
    }

    fn flush(&self) -> Io<'_> {
        self.lower.flush()
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        match self.begin(Operation::Discard, range) {
            Ok(below) => self.lower.discard(below),
            Err(answer) => Io::ready(answer),
        }
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        match self.begin(Operation::WriteZeroes, range) {
            Ok(below) => self.lower.write_zeroes(below, flags),
            Err(answer) => Io::ready(answer),
        }
    }

    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        Box::pin(self.extents_steps(range, limit.max(1)))
    }

    fn close(&self) -> BoxFuture<'_, IoResult> {
        self.lower.close()
    }

    fn size_changes(&self) -> &SizeChanges {
        self.lower.size_changes()
    }
}
