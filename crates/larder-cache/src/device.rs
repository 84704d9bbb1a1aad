//! Block device interface of the cache.

use std::rc::Rc;

use larder_block::{
    BlockDevice, BoxFuture, ByteOffset, ByteRange, Extent, Filter, Io, IoResult, ReadBuf, WriteBuf, WriteFlags,
    ZeroFlags,
};

use crate::Cache;

impl Filter for Cache {
    fn lower(&self) -> &Rc<dyn BlockDevice> {
        &self.lower
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        self.cleaner.count_request();
        self.read_any(start.range(buffer.byte_len()), buffer)
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        self.cleaner.count_request();
        self.write_any(start.range(buffer.byte_len()), buffer, flags)
    }

    fn flush(&self) -> Io<'_> {
        self.cleaner.count_request();
        Io::task(self.flush_both())
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        self.cleaner.count_request();
        self.discard_any(range)
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        self.cleaner.count_request();
        self.write_zeroes_any(range, flags)
    }

    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        Box::pin(self.extents_of(range, limit))
    }

    fn close(&self) -> BoxFuture<'_, IoResult> {
        Box::pin(self.close_steps())
    }
}
