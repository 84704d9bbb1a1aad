//! Block device interface of read-ahead.

use std::rc::Rc;

use larder_block::{
    BlockDevice, BoxFuture, ByteLen, ByteOffset, ByteRange, Filter, Io, IoResult, ReadBuf, WriteBuf, WriteFlags,
    ZeroFlags,
};

use crate::Prefetch;
use crate::units::blocks_of;

impl Prefetch {
    /// Runs a change of `range`, which is removed from memory before the change begins, and is not fetched until it
    /// has ended.
    fn run_change<'a>(&'a self, range: ByteRange, begin: impl FnOnce() -> Io<'a>) -> Io<'a> {
        if range.len == ByteLen::ZERO || range.checked_end().is_none() {
            return begin();
        }
        let blocks = blocks_of(range.start.get(), range.len.get());
        {
            let mut state = self.state.borrow_mut();
            state.invalidate(&blocks);
            state.extents.invalidate_holes(&blocks);
        }
        let ticket = self.writes.begin(blocks);
        begin().watched(&self.writes, ticket)
    }
}

impl Filter for Prefetch {
    fn lower(&self) -> &Rc<dyn BlockDevice> {
        &self.lower
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        if self.is_off.get() {
            return self.lower.read(start, buffer);
        }
        self.read_any(start, buffer)
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        self.run_change(start.range(buffer.byte_len()), || self.lower.write(start, buffer, flags))
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        self.run_change(range, || self.lower.discard(range))
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        self.run_change(range, || self.lower.write_zeroes(range, flags))
    }

    /// Stops fetching, and closes the lower device.
    fn close(&self) -> BoxFuture<'_, IoResult> {
        Box::pin(async move {
            self.is_closed.set(true);
            let running = {
                let mut state = self.state.borrow_mut();
                state.closing = true;
                state.running.clone()
            };
            for fetch in running {
                self.wait_fetch(fetch).await;
            }
            let statistics = self.statistics();
            if statistics.fetched > 0 {
                tracing::info!("{}: {statistics}", self.lower.name());
            }
            self.lower.close().await
        })
    }
}
