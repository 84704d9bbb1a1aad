//! A place in a disk's stack whose layer can be exchanged while the disk is used.
//!
//! Every request has a share in the layer that it went to, so that one that was exchanged goes with its last request, and
//! it is known how many are under way. To be exchanged, new ones are held, and those under way are waited for.

use std::cell::{Cell, Ref, RefCell};
use std::rc::Rc;
use std::time::Duration;

use crate::buffer::{ReadBuf, WriteBuf};
use crate::device::{BlockDevice, BoxFuture, Extent, Geometry, Io, Lent, SizeChanges, WriteFlags, ZeroFlags};
use crate::error::IoResult;
use crate::event_loop::WeakLoop;
use crate::signal::Signal;
use crate::units::{ByteLen, ByteOffset, ByteRange};

/// How often it is looked whether requests are still under way.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// A layer over a disk, which can be exchanged for another one over the same disk. All promises are the layer's.
pub struct Switch {
    disk: Rc<dyn BlockDevice>,
    layer: RefCell<Rc<Lent>>,
    is_held: Cell<bool>,
    is_closed: Cell<bool>,
    /// Requests are not held any more.
    goes_on: Signal,
}

impl Switch {
    /// `layer`, which is over `disk`, and like it in name, geometry and changes of the size.
    pub fn new(disk: Rc<dyn BlockDevice>, layer: Rc<dyn BlockDevice>) -> Self {
        Self {
            disk,
            layer: RefCell::new(Rc::new(Lent(layer))),
            is_held: Cell::new(false),
            is_closed: Cell::new(false),
            goes_on: Signal::default(),
        }
    }

    /// Has new requests wait, until what is returned goes. `None` if they do already, or the disk is closed, or about to be.
    pub fn hold(&self) -> Option<Held<'_>> {
        let can_be = !self.is_closed.get() && !self.is_held.replace(true);
        can_be.then(|| Held(self))
    }

    /// What was [kept](Held::keep), to be ended.
    pub fn held(&self) -> Option<Held<'_>> {
        self.is_held.get().then(|| Held(self))
    }

    /// The layer, unless requests are held.
    fn now(&self) -> Option<Ref<'_, Rc<Lent>>> {
        (!self.is_held.get()).then(|| self.layer.borrow())
    }

    /// The layer, once requests are not held.
    async fn layer(&self) -> Rc<Lent> {
        self.goes_on.until(|| self.now().map(|layer| Rc::clone(&layer))).await
    }
}

/// New requests of a [`Switch`] wait as long as this lives.
pub struct Held<'a>(&'a Switch);

impl Held<'_> {
    /// Completes when no request is under way.
    pub async fn drained(&self, on: &WeakLoop) {
        while Rc::strong_count(&self.0.layer.borrow()) > 1 {
            let Some(sleep) = on.upgrade().map(|on| on.sleep(LOOK_INTERVAL)) else {
                return std::future::pending().await;
            };
            sleep.await;
        }
    }

    /// Requests wait until [`Switch::held`] is asked for it, and that goes.
    pub fn keep(self) {
        std::mem::forget(self);
    }

    /// From now on it is `layer`.
    pub fn exchange(&self, layer: Rc<dyn BlockDevice>) {
        self.0.layer.replace(Rc::new(Lent(layer)));
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.is_held.set(false);
        self.0.goes_on.raise();
    }
}

impl BlockDevice for Switch {
    fn name(&self) -> &Rc<str> {
        self.disk.name()
    }

    fn geometry(&self) -> Geometry {
        self.disk.geometry()
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        match self.now() {
            Some(layer) => Io::lent(&layer, |device| device.read(start, buffer)),
            None => Io::task(async move { self.layer().await.0.read(start, buffer).await }),
        }
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        match self.now() {
            Some(layer) => Io::lent(&layer, |device| device.write(start, buffer, flags)),
            None => Io::task(async move { self.layer().await.0.write(start, buffer, flags).await }),
        }
    }

    fn minds_content(&self, range: ByteRange) -> bool {
        self.disk.minds_content(range)
    }

    fn check_content(&self, start: ByteOffset, buffer: WriteBuf<'_>) -> IoResult {
        self.disk.check_content(start, buffer)
    }

    fn flush(&self) -> Io<'_> {
        match self.now() {
            Some(layer) => Io::lent(&layer, |device| device.flush()),
            None => Io::task(async { self.layer().await.0.flush().await }),
        }
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        Io::task(async move { self.layer().await.0.discard(range).await })
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        Io::task(async move { self.layer().await.0.write_zeroes(range, flags).await })
    }

    fn allocate(&self, range: ByteRange) -> Io<'_> {
        Io::task(async move { self.layer().await.0.allocate(range).await })
    }

    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        Box::pin(async move { self.layer().await.0.extents(range, limit).await })
    }

    fn grow(&self, size: ByteLen) -> BoxFuture<'_, IoResult> {
        Box::pin(async move { self.layer().await.0.grow(size).await })
    }

    fn close(&self) -> BoxFuture<'_, IoResult> {
        Box::pin(async {
            self.is_closed.set(true);
            self.layer().await.0.close().await
        })
    }

    fn size_changes(&self) -> &SizeChanges {
        self.disk.size_changes()
    }
}
