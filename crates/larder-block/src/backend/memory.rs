//! A disk in RAM: for tests, and as the upper bound of performance for every other backend.

use std::cell::Cell;
use std::rc::Rc;

use crate::buffer::{AlignedBuf, ReadBuf, WriteBuf};
use crate::device::{
    BlockDevice, BoxFuture, Extent, ExtentKind, Geometry, Io, SizeChanges, WriteFlags, ZeroFlags, check_request,
};
use crate::error::{IoError, IoResult, Operation};
use crate::units::{ByteLen, ByteOffset, ByteRange};

/// A disk of zeros in RAM. Its content is lost when it is dropped.
pub struct MemoryDevice {
    name: Rc<str>,
    geometry: Geometry,
    bytes: AlignedBuf,
    base: Cell<*mut u8>,
    changes: SizeChanges,
}

impl MemoryDevice {
    /// Creates a disk of `size` bytes, rounded down to whole blocks of `block_size` bytes (a power of two).
    ///
    /// # Panics
    /// If `block_size` is not a power of two.
    pub fn new(size: ByteLen, block_size: u32) -> Self {
        assert!(block_size.is_power_of_two());
        let size = ByteOffset::new(size.get()).align_down(u64::from(block_size)) - ByteOffset::ZERO;
        let mut bytes = AlignedBuf::zeroed(size.as_usize());
        let base = Cell::new(bytes.as_mut_ptr());
        Self {
            name: "memory".into(),
            geometry: Geometry {
                size,
                block_size,
                physical_block_size: block_size,
                discard_granularity: block_size,
                memory_alignment: 1,
                read_only: false,
                fast_zeroes: true,
            },
            bytes,
            base,
            changes: SizeChanges::default(),
        }
    }

    fn checked_address(&self, operation: Operation, range: ByteRange) -> Result<*mut u8, IoError> {
        check_request(&self.name, &self.geometry, operation, range)?;
        debug_assert!(range.end().get() <= self.bytes.len() as u64);
        // The address is inside the allocation, because `check_request` has compared the range with the disk's size.
        Ok(self.base.get().wrapping_add(range.start.get() as usize))
    }

    fn zero(&self, operation: Operation, range: ByteRange) -> IoResult {
        let at = self.checked_address(operation, range)?;
        // SAFETY: `checked_address` found the range inside our allocation, to which no reference exists.
        unsafe { std::ptr::write_bytes(at, 0, range.len.as_usize()) };
        Ok(())
    }

    fn read_now(&self, start: ByteOffset, buffer: ReadBuf<'_>) -> IoResult {
        let mut at = self.checked_address(Operation::Read, start.range(buffer.byte_len()))?;
        for piece in buffer.pieces() {
            // SAFETY: `checked_address` found the range inside our allocation; the piece is valid for writes by
            // `ReadBuf`'s contract. `copy`, not `copy_nonoverlapping`: a careless caller may read the disk into itself.
            unsafe { std::ptr::copy(at, piece.base(), piece.len()) };
            at = at.wrapping_add(piece.len());
        }
        Ok(())
    }

    fn write_now(&self, start: ByteOffset, buffer: WriteBuf<'_>) -> IoResult {
        let mut at = self.checked_address(Operation::Write, start.range(buffer.byte_len()))?;
        for piece in buffer.pieces() {
            // SAFETY: as in `read_now`, in the other direction.
            unsafe { std::ptr::copy(piece.base(), at, piece.len()) };
            at = at.wrapping_add(piece.len());
        }
        Ok(())
    }
}

impl BlockDevice for MemoryDevice {
    fn name(&self) -> &Rc<str> {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        self.geometry
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        Io::ready(self.read_now(start, buffer))
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, _: WriteFlags) -> Io<'a> {
        Io::ready(self.write_now(start, buffer))
    }

    fn flush(&self) -> Io<'_> {
        Io::ready(Ok(()))
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        Io::ready(self.zero(Operation::Discard, range))
    }

    fn write_zeroes(&self, range: ByteRange, _: ZeroFlags) -> Io<'_> {
        Io::ready(self.zero(Operation::WriteZeroes, range))
    }

    fn extents(&self, range: ByteRange, _: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        Box::pin(async move {
            self.checked_address(Operation::Extents, range)?;
            Ok(vec![Extent { range, kind: ExtentKind::Data }])
        })
    }

    fn size_changes(&self) -> &SizeChanges {
        &self.changes
    }
}
