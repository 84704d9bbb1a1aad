//! A device that adds the service times of a model to another device.

use std::cell::RefCell;
use std::future::Future;
use std::rc::Rc;

use super::model::{RequestDirection, Schedule, ServiceModel};
use crate::buffer::{ReadBuf, WriteBuf};
use crate::device::{BlockDevice, BoxFuture, Extent, Geometry, Io, SizeChanges, WriteFlags, ZeroFlags};
use crate::error::IoResult;
use crate::event_loop::{Loop, LoopTime, WeakLoop};
use crate::units::{ByteLen, ByteOffset, ByteRange};

/// A layer over `lower` whose requests take at least the time that a model gives. On the real clock a timer adds some
/// tens of microseconds, so models of the fastest disks are exact on the virtual one only. All promises are
/// `lower`'s.
pub struct SlowDevice {
    lower: Rc<dyn BlockDevice>,
    on: WeakLoop,
    schedule: RefCell<Schedule>,
}

impl SlowDevice {
    /// Creates a layer over `lower` with the speed of `model`, on the loop `on`.
    pub fn new(on: &Loop, lower: Rc<dyn BlockDevice>, model: ServiceModel) -> Self {
        Self { lower, on: on.downgrade(), schedule: RefCell::new(Schedule::new(model)) }
    }

    fn now(&self) -> LoopTime {
        self.on.upgrade().map_or_else(LoopTime::default, |on| on.now())
    }

    fn admit(&self, kind: RequestDirection, range: ByteRange, bytes: ByteLen) -> LoopTime {
        let now = self.now();
        self.schedule.borrow_mut().admit(kind, range, bytes, now)
    }

    /// Returns the request's result at `done`, or later if the request takes longer.
    async fn until(&self, done: LoopTime, request: impl Future<Output = IoResult>) -> IoResult {
        let result = request.await;
        let sleep = self.on.upgrade().map(|on| on.sleep_until(done));
        if let Some(sleep) = sleep {
            sleep.await;
        }
        result
    }

    /// Delays a request by the model's time, unless it has failed synchronously.
    fn slowed<'a>(&'a self, mut request: Io<'a>, admit: impl FnOnce() -> LoopTime) -> Io<'a> {
        match request.take_ready_result() {
            Some(Err(error)) => Io::ready(Err(error)),
            Some(Ok(())) => Io::task(self.until(admit(), std::future::ready(Ok(())))),
            None => Io::task(self.until(admit(), request)),
        }
    }
}

impl BlockDevice for SlowDevice {
    fn name(&self) -> &Rc<str> {
        self.lower.name()
    }

    fn geometry(&self) -> Geometry {
        self.lower.geometry()
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        let bytes = buffer.byte_len();
        let request = self.lower.read(start, buffer);
        self.slowed(request, || self.admit(RequestDirection::Read, start.range(bytes), bytes))
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        let bytes = buffer.byte_len();
        let request = self.lower.write(start, buffer, flags);
        self.slowed(request, || self.admit(RequestDirection::Write, start.range(bytes), bytes))
    }

    fn flush(&self) -> Io<'_> {
        self.slowed(self.lower.flush(), || self.schedule.borrow().admit_flush(self.now()))
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        self.slowed(self.lower.discard(range), || self.admit(RequestDirection::Write, range, ByteLen::ZERO))
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        let request = self.lower.write_zeroes(range, flags);
        self.slowed(request, || self.admit(RequestDirection::Write, range, ByteLen::ZERO))
    }

    fn allocate(&self, range: ByteRange) -> Io<'_> {
        self.lower.allocate(range)
    }

    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        self.lower.extents(range, limit)
    }

    fn grow(&self, size: ByteLen) -> BoxFuture<'_, IoResult> {
        self.lower.grow(size)
    }

    fn close(&self) -> BoxFuture<'_, IoResult> {
        self.lower.close()
    }

    fn size_changes(&self) -> &SizeChanges {
        self.lower.size_changes()
    }
}
