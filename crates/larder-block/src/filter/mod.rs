//! The filter interface, and filters that every disk may need, whatever its format.

pub mod align;
pub mod ignore_discard;
pub mod meter;
pub mod raw_format_guard;
pub mod switch;
pub mod throttle;

use std::rc::Rc;

use crate::buffer::{ReadBuf, WriteBuf};
use crate::device::{BlockDevice, BoxFuture, Extent, Geometry, Io, SizeChanges, WriteFlags, ZeroFlags};
use crate::error::IoResult;
use crate::units::{ByteLen, ByteOffset, ByteRange};

/// A layer that passes on to the layer below all requests that it does not override. It is a [`BlockDevice`] with
/// these methods.
pub trait Filter {
    /// Returns the layer below.
    fn lower(&self) -> &Rc<dyn BlockDevice>;

    /// See [`BlockDevice::geometry`].
    fn geometry(&self) -> Geometry {
        self.lower().geometry()
    }

    /// See [`BlockDevice::read`].
    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        self.lower().read(start, buffer)
    }

    /// See [`BlockDevice::write`].
    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        self.lower().write(start, buffer, flags)
    }

    /// See [`BlockDevice::may_reject_content`].
    fn may_reject_content(&self, range: ByteRange) -> bool {
        self.lower().may_reject_content(range)
    }

    /// See [`BlockDevice::check_content`].
    ///
    /// # Errors
    /// The error that the write would return.
    fn check_content(&self, start: ByteOffset, buffer: WriteBuf<'_>) -> IoResult {
        self.lower().check_content(start, buffer)
    }

    /// See [`BlockDevice::flush`].
    fn flush(&self) -> Io<'_> {
        self.lower().flush()
    }

    /// See [`BlockDevice::discard`].
    fn discard(&self, range: ByteRange) -> Io<'_> {
        self.lower().discard(range)
    }

    /// See [`BlockDevice::write_zeroes`].
    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        self.lower().write_zeroes(range, flags)
    }

    /// See [`BlockDevice::allocate`].
    fn allocate(&self, range: ByteRange) -> Io<'_> {
        self.lower().allocate(range)
    }

    /// See [`BlockDevice::extents`].
    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        self.lower().extents(range, limit)
    }

    /// See [`BlockDevice::grow`].
    fn grow(&self, size: ByteLen) -> BoxFuture<'_, IoResult> {
        self.lower().grow(size)
    }

    /// See [`BlockDevice::close`].
    fn close(&self) -> BoxFuture<'_, IoResult> {
        self.lower().close()
    }
}

impl<F: Filter> BlockDevice for F {
    fn name(&self) -> &Rc<str> {
        self.lower().name()
    }

    fn geometry(&self) -> Geometry {
        Filter::geometry(self)
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        Filter::read(self, start, buffer)
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        Filter::write(self, start, buffer, flags)
    }

    fn may_reject_content(&self, range: ByteRange) -> bool {
        Filter::may_reject_content(self, range)
    }

    fn check_content(&self, start: ByteOffset, buffer: WriteBuf<'_>) -> IoResult {
        Filter::check_content(self, start, buffer)
    }

    fn flush(&self) -> Io<'_> {
        Filter::flush(self)
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        Filter::discard(self, range)
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        Filter::write_zeroes(self, range, flags)
    }

    fn allocate(&self, range: ByteRange) -> Io<'_> {
        Filter::allocate(self, range)
    }

    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        Filter::extents(self, range, limit)
    }

    fn grow(&self, size: ByteLen) -> BoxFuture<'_, IoResult> {
        Filter::grow(self, size)
    }

    fn close(&self) -> BoxFuture<'_, IoResult> {
        Filter::close(self)
    }

    fn size_changes(&self) -> &SizeChanges {
        self.lower().size_changes()
    }
}
