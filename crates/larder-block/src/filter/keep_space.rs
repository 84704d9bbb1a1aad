//! Keeps what a disk has allocated: discards are ignored, and zeroes are written without giving space back. For images
//! that were allocated in full on purpose (QEMU's `discard=ignore`).

use std::rc::Rc;

use crate::buffer::{ReadBuf, WriteBuf};
use crate::device::{BlockDevice, BoxFuture, Extent, Geometry, Io, SizeChanges, WriteFlags, ZeroFlags, check_request};
use crate::error::{IoResult, Operation};
use crate::units::{ByteLen, ByteOffset, ByteRange};

/// A device that never gives space back, over one that may. All promises are the lower device's.
pub struct KeepSpace(Rc<dyn BlockDevice>);

impl KeepSpace {
    /// `lower`, without discards.
    pub fn new(lower: Rc<dyn BlockDevice>) -> Self {
        Self(lower)
    }
}

impl BlockDevice for KeepSpace {
    fn name(&self) -> &Rc<str> {
        self.0.name()
    }

    fn geometry(&self) -> Geometry {
        Geometry {
            discard_granularity: 0,
            ..self.0.geometry()
        }
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        self.0.read(start, buffer)
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        self.0.write(start, buffer, flags)
    }

    fn flush(&self) -> Io<'_> {
        self.0.flush()
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        Io::ready(check_request(self.name(), &self.geometry(), Operation::Discard, range))
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        self.0.write_zeroes(range, ZeroFlags { unmap: false, ..flags })
    }

    fn allocate(&self, range: ByteRange) -> Io<'_> {
        self.0.allocate(range)
    }

    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        self.0.extents(range, limit)
    }

    fn grow(&self, size: ByteLen) -> BoxFuture<'_, IoResult> {
        self.0.grow(size)
    }

    fn close(&self) -> BoxFuture<'_, IoResult> {
        self.0.close()
    }

    fn size_changes(&self) -> &SizeChanges {
        self.0.size_changes()
    }
}
