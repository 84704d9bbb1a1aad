//! A layer of a disk's stack that can be exchanged while the disk is in use.
//!
//! Every request shares ownership of the layer that it was passed to. So an exchanged layer is dropped with its last
//! request, and the reference count is the number of requests in flight. For an exchange, new requests are held back,
//! and those in flight are waited for.

use std::cell::{Cell, Ref, RefCell};
use std::rc::Rc;
use std::time::Duration;

use crate::buffer::{ReadBuf, WriteBuf};
use crate::device::{BlockDevice, BoxFuture, Extent, Geometry, Io, SharedDevice, SizeChanges, WriteFlags, ZeroFlags};
use crate::error::IoResult;
use crate::event_loop::WeakLoop;
use crate::signal::Signal;
use crate::units::{ByteLen, ByteOffset, ByteRange};

/// The interval at which requests in flight are rechecked.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(1);

/// A layer over a disk that can be exchanged for another one over the same disk. All promises are the layer's.
pub struct LayerSwitch {
    disk: Rc<dyn BlockDevice>,
    layer: RefCell<Rc<SharedDevice>>,
    is_paused: Cell<bool>,
    is_closed: Cell<bool>,
    /// Raised when requests are no longer held back.
    resumed: Signal,
}

impl LayerSwitch {
    /// Creates a switch with `layer`, which is over `disk` and has its name, geometry and size changes.
    pub fn new(disk: Rc<dyn BlockDevice>, layer: Rc<dyn BlockDevice>) -> Self {
        Self {
            disk,
            layer: RefCell::new(Rc::new(SharedDevice(layer))),
            is_paused: Cell::new(false),
            is_closed: Cell::new(false),
            resumed: Signal::default(),
        }
    }

    /// Holds back new requests until the result is dropped. Returns `None` if they are held back already, or the disk
    /// is closed or closing.
    pub fn pause(&self) -> Option<RequestPause<'_>> {
        let can_pause = !self.is_closed.get() && !self.is_paused.replace(true);
        can_pause.then(|| RequestPause(self))
    }

    /// Returns the guard that was [retained](RequestPause::retain), so that it can be dropped.
    pub fn retained_pause(&self) -> Option<RequestPause<'_>> {
        self.is_paused.get().then(|| RequestPause(self))
    }

    /// Returns the layer, unless requests are held back.
    fn layer_unless_paused(&self) -> Option<Ref<'_, Rc<SharedDevice>>> {
        (!self.is_paused.get()).then(|| self.layer.borrow())
    }

    /// Returns the layer, once requests are not held back.
    async fn wait_for_layer(&self) -> Rc<SharedDevice> {
        self.resumed.until(|| self.layer_unless_paused().map(|layer| Rc::clone(&layer))).await
    }
}

/// A guard that holds back new requests of a [`LayerSwitch`] until it is dropped.
pub struct RequestPause<'a>(&'a LayerSwitch);

impl RequestPause<'_> {
    /// Completes when no request is in flight.
    pub async fn drain(&self, on: &WeakLoop) {
        while Rc::strong_count(&self.0.layer.borrow()) > 1 {
            let Some(sleep) = on.upgrade().map(|on| on.sleep(DRAIN_POLL_INTERVAL)) else {
                return std::future::pending().await;
            };
            sleep.await;
        }
    }

    /// Keeps holding back requests without the guard, until a guard from [`LayerSwitch::retained_pause`] is dropped.
    pub fn retain(self) {
        std::mem::forget(self);
    }

    /// Replaces the layer.
    pub fn replace_layer(&self, layer: Rc<dyn BlockDevice>) {
        self.0.layer.replace(Rc::new(SharedDevice(layer)));
    }
}

impl Drop for RequestPause<'_> {
    fn drop(&mut self) {
        self.0.is_paused.set(false);
        self.0.resumed.raise();
    }
}

impl BlockDevice for LayerSwitch {
    fn name(&self) -> &Rc<str> {
        self.disk.name()
    }

    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        match self.layer_unless_paused() {
            Some(layer) => Io::on_shared(&layer, |device| device.read(start, buffer)),
            None => Io::task(async move { self.wait_for_layer().await.0.read(start, buffer).await }),
        }
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        match self.layer_unless_paused() {
            Some(layer) => Io::on_shared(&layer, |device| device.write(start, buffer, flags)),
            None => Io::task(async move { self.wait_for_layer().await.0.write(start, buffer, flags).await }),
        }
    }

    fn may_reject_content(&self, range: ByteRange) -> bool {
        self.disk.may_reject_content(range)
    }

    fn check_content(&self, start: ByteOffset, buffer: WriteBuf<'_>) -> IoResult {
        self.disk.check_content(start, buffer)
    }

    fn flush(&self) -> Io<'_> {
        match self.layer_unless_paused() {
            Some(layer) => Io::on_shared(&layer, |device| device.flush()),
            None => Io::task(async { self.wait_for_layer().await.0.flush().await }),
        }
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        Io::task(async move { self.wait_for_layer().await.0.discard(range).await })
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        Io::task(async move { self.wait_for_layer().await.0.write_zeroes(range, flags).await })
    }

    fn allocate(&self, range: ByteRange) -> Io<'_> {
        Io::task(async move { self.wait_for_layer().await.0.allocate(range).await })
    }

    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        Box::pin(async move { self.wait_for_layer().await.0.extents(range, limit).await })
    }

    fn grow(&self, size: ByteLen) -> BoxFuture<'_, IoResult> {
        Box::pin(async move { self.wait_for_layer().await.0.grow(size).await })
    }

    fn close(&self) -> BoxFuture<'_, IoResult> {
        Box::pin(async {
            self.is_closed.set(true);
            self.wait_for_layer().await.0.close().await
        })
    }

    fn size_changes(&self) -> &SizeChanges {
        self.disk.size_changes()
    }
}
