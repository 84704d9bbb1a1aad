//! Slot for the image of a disk that may move to another host with its VM. The image can be closed and opened again,
//! while the disk's exports remain as they are.
//!
//! While the slot is empty, requests wait. The disk then has the size and the features of the last image, or those
//! read from the image without locking it. No guest queue takes a request in this state
//! ([`larder_export::vhost_user::VhostUserServer::set_paused`]), so only clients of an NBD server wait.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use larder_block::filter::switch::LayerSwitch;
use larder_block::{
    BlockDevice, BoxFuture, ByteOffset, ByteRange, Extent, Failure, Geometry, Io, IoError, IoResult, Loop, Operation,
    ReadBuf, SizeChanges, WriteBuf, WriteFlags, ZeroFlags,
};

/// The slot for an image.
pub(super) struct DiskSlot {
    on: Loop,
    placeholder: Rc<PlaceholderDevice>,
    switch: Rc<LayerSwitch>,
}

impl DiskSlot {
    /// Creates an empty slot, for an image with this geometry.
    pub(super) fn empty(on: &Loop, name: &Rc<str>, geometry: Geometry) -> Self {
        let placeholder = Rc::new(PlaceholderDevice {
            name: Rc::clone(name),
            geometry: Cell::new(geometry),
            changes: SizeChanges::default(),
            image: RefCell::default(),
        });
        let switch = LayerSwitch::new(
            Rc::clone(&placeholder) as Rc<dyn BlockDevice>,
            Rc::clone(&placeholder) as Rc<dyn BlockDevice>,
        );
        if let Some(held) = switch.pause() {
            held.retain();
        }
        Self { on: on.clone(), placeholder, switch: Rc::new(switch) }
    }

    /// Returns the disk, for its exports.
    pub(super) fn device(&self) -> Rc<dyn BlockDevice> {
        Rc::clone(&self.switch) as Rc<dyn BlockDevice>
    }

    /// Returns the geometry of the image, or of the last one.
    pub(super) fn geometry(&self) -> Geometry {
        self.placeholder.geometry()
    }

    /// Inserts an image. Requests keep waiting until [`DiskSlot::resume`].
    pub(super) fn attach(&self, image: &Rc<dyn BlockDevice>) {
        self.placeholder.image.replace(Some(Rc::clone(image)));
        self.on.spawn(forward_size_changes(Rc::clone(&self.placeholder), Rc::clone(image)));
        if self.placeholder.geometry.get().size != image.geometry().size {
            self.placeholder.announce_size(image);
        }
        self.placeholder.geometry.set(image.geometry());
    }

    /// Resumes requests.
    pub(super) fn resume(&self) {
        let image = self.placeholder.image.borrow().clone();
        if let (Some(held), Some(image)) = (self.switch.retained_pause(), image) {
            held.replace_layer(image);
        }
    }

    /// Holds new requests from now on; completes when none is in flight.
    pub(super) async fn quiesce(&self) {
        match self.switch.pause() {
            Some(held) => {
                held.drain(&self.on.downgrade()).await;
                held.retain();
            }
            None => {
                if let Some(held) = self.switch.retained_pause() {
                    held.drain(&self.on.downgrade()).await;
                    held.retain();
                }
            }
        }
    }

    /// Removes the image. Requests must be held already.
    pub(super) fn detach(&self) {
        let Some(image) = self.placeholder.image.take() else {
            return;
        };
        self.placeholder.geometry.set(image.geometry());
        image.size_changes().wake();
        if let Some(held) = self.switch.retained_pause() {
            held.replace_layer(Rc::clone(&self.placeholder) as Rc<dyn BlockDevice>);
            held.retain();
        }
    }

    /// Fails waiting and new requests, because the process ends.
    pub(super) fn fail_waiters(&self) {
        drop(self.switch.retained_pause());
    }
}

/// Forwards size changes of an image while the image is in the slot.
async fn forward_size_changes(placeholder: Rc<PlaceholderDevice>, image: Rc<dyn BlockDevice>) {
    let changes = image.size_changes();
    let is_attached = || placeholder.image.borrow().as_ref().is_some_and(|now| Rc::ptr_eq(now, &image));
    loop {
        let generation = changes.generation();
        changes.changed_after_or(generation, || !is_attached()).await;
        if !is_attached() {
            return;
        }
        placeholder.announce_size(&image);
    }
}

/// Device that stands in for the image while the slot is empty.
struct PlaceholderDevice {
    name: Rc<str>,
    /// Geometry while there is no image.
    geometry: Cell<Geometry>,
    changes: SizeChanges,
    image: RefCell<Option<Rc<dyn BlockDevice>>>,
}

impl PlaceholderDevice {
    fn announce_size(&self, image: &Rc<dyn BlockDevice>) {
        self.changes.announce_size(image.geometry().size);
    }

    fn refusal_error(&self, operation: Operation, range: ByteRange) -> IoError {
        IoError::new(&self.name, operation, range, Failure::Os(libc::ESHUTDOWN))
    }

    fn refuse(&self, operation: Operation, range: ByteRange) -> Io<'_> {
        Io::ready(Err(self.refusal_error(operation, range)))
    }
}

impl BlockDevice for PlaceholderDevice {
    fn name(&self) -> &Rc<str> {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        match &*self.image.borrow() {
            Some(image) => image.geometry(),
            None => self.geometry.get(),
        }
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        self.refuse(Operation::Read, ByteRange::new(start.get(), buffer.len() as u64))
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, _: WriteFlags) -> Io<'a> {
        self.refuse(Operation::Write, ByteRange::new(start.get(), buffer.len() as u64))
    }

    fn flush(&self) -> Io<'_> {
        self.refuse(Operation::Flush, ByteRange::default())
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        self.refuse(Operation::Discard, range)
    }

    fn write_zeroes(&self, range: ByteRange, _: ZeroFlags) -> Io<'_> {
        self.refuse(Operation::WriteZeroes, range)
    }

    fn extents(&self, range: ByteRange, _: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        Box::pin(std::future::ready(Err(self.refusal_error(Operation::Read, range))))
    }

    fn close(&self) -> BoxFuture<'_, IoResult> {
        Box::pin(std::future::ready(Ok(())))
    }

    fn size_changes(&self) -> &SizeChanges {
        &self.changes
    }
}
