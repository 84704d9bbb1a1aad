//! The contract of every layer of the block path: a block device over a block device.
//!
//! A request is a method call that returns a future. A request that needs no waiting (a hit in RAM, a page-cache
//! read) completes synchronously: the method returns a ready [`Io`]. For a request that the layer below answers, a
//! layer returns that layer's `Io`, without a wrapper. Only a request of several steps becomes a task. A layer is
//! written as straight code, and its fast path costs a function call.
//!
//! # Promises of every device
//! 1. A request starts when the method is called, or at the latest when its future is first polled, and completes
//!    exactly once, when its future resolves. Requests in flight at the same time are unordered. Dropping a future
//!    abandons the request: it may or may not take effect, but when the drop returns the buffer is no longer
//!    accessed.
//! 2. A read returns, for each byte, the last completed write, or, where a write is in flight, either the old or the
//!    new content, sector by sector.
//! 3. A completed [`flush`](BlockDevice::flush) (or FUA write) makes durable every write that had completed when it
//!    was called: these survive a crash. Other writes may be lost, sector by sector, in any order, but a sector reads
//!    as one of the versions written to it, and always as the same one.
//! 4. A failed write, discard or write-zeroes leaves each sector of its range old or new. A failed flush has promised
//!    nothing, and the next successful flush covers all that the failed one should have covered.
//! 5. Requests that are not multiples of [`Geometry::block_size`], or exceed the device, fail without effect.
//! 6. The size may change between requests ([`BlockDevice::size_changes`]); other geometry never changes.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use smallvec::SmallVec;

use crate::backend::file::FileIo;
use crate::backend::nbd::PendingReply;
use crate::buffer::{ReadBuf, WriteBuf};
use crate::error::{Failure, IoError, IoResult, Operation};
use crate::signal::Signal;
use crate::units::{ByteLen, ByteOffset, ByteRange};

/// The geometry and features of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// The size in bytes; a multiple of `block_size`.
    pub size: ByteLen,
    /// The unit of every request's start and length; a power of two, in bytes.
    pub block_size: u32,
    /// The size and alignment in bytes below which a request costs a read first; for the guest's information.
    pub physical_block_size: u32,
    /// The alignment and minimum size at which a discard frees space, in bytes; 0 if the device cannot discard.
    pub discard_granularity: u32,
    /// The alignment in memory of a request's buffer, below which the request needs a copy; a power of two, in bytes.
    pub memory_alignment: u32,
    /// Changes are refused.
    pub read_only: bool,
    /// Writing zeroes is cheaper than writing a buffer of zeros.
    pub fast_zeroes: bool,
}

/// Options of a write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WriteFlags {
    /// Force unit access: on completion the data survives a crash, as if a flush of just these bytes followed.
    pub fua: bool,
}

impl WriteFlags {
    /// A write that a later flush makes durable.
    pub const NONE: Self = Self { fua: false };
    /// A write that is durable on completion.
    pub const FUA: Self = Self { fua: true };
}

/// Options of writing zeroes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroFlags {
    /// The space may be deallocated.
    pub unmap: bool,
    /// Fail with [`Failure::Unsupported`] if it would not be faster than writing a buffer of zeros (NBD's FAST_ZERO).
    pub fast_only: bool,
    /// Force unit access, as in [`WriteFlags`].
    pub fua: bool,
}

/// The kind of an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// Allocated, with any content.
    Data,
    /// Allocated, and reads as zeros.
    Zero,
    /// Not allocated, and reads as zeros.
    Hole,
}

/// A part of a disk that is all of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The part's range.
    pub range: ByteRange,
    /// The part's kind.
    pub kind: ExtentKind,
}

/// A boxed future, for code that is not on the fast path.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// A block device, or a layer over one. The [module](self) lists its promises.
pub trait BlockDevice {
    /// Returns the device's name as the user knows it, for messages.
    fn name(&self) -> &Rc<str>;

    /// Returns the present geometry.
    fn geometry(&self) -> Geometry;

    /// Fills `buffer` with the bytes from `start` on.
    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a>;

    /// Writes `buffer` to the bytes from `start` on.
    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a>;

    /// Returns true if a write to `range` may fail because of its content.
    fn may_reject_content(&self, _range: ByteRange) -> bool {
        false
    }

    /// Checks that a write would not fail because of its content. A layer that acknowledges writes before this device
    /// has them calls this first: a later error could not be reported to any client, and the write would be lost.
    ///
    /// # Errors
    /// The error that the write would return.
    fn check_content(&self, _start: ByteOffset, _buffer: WriteBuf<'_>) -> IoResult {
        Ok(())
    }

    /// Makes every completed change durable.
    fn flush(&self) -> Io<'_>;

    /// Declares that the bytes are no longer needed. They may read as any earlier content, or as zeros. A device that
    /// cannot discard completes the request without effect.
    fn discard(&self, range: ByteRange) -> Io<'_>;

    /// Makes the bytes read as zeros.
    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_>;

    /// Allocates backing space for the range, so that later writes to it cannot fail with [`Failure::NoSpace`]. The
    /// content does not change, even with other requests in flight. Fails with `NoSpace` itself, having allocated a
    /// part or nothing. A device that cannot promise this (a copy-on-write file system, a store whose protocol has no
    /// such request) completes the request without effect, which is also the default.
    fn allocate(&self, range: ByteRange) -> Io<'_> {
        Io::ready(check_request(self.name(), &self.geometry(), Operation::Write, range))
    }

    /// Returns the extents of `range` (not empty), in order and without gaps from its start on: at least one, at most
    /// `limit`, none beyond its end. The list may stop before the end.
    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>>;

    /// Extends the device to at least `size` bytes, for a format that needs more space in it. New space reads as
    /// zeros; a flush makes the new size durable. By default a device has a fixed size, and fails a longer one with
    /// [`Failure::NoSpace`].
    fn grow(&self, size: ByteLen) -> BoxFuture<'_, IoResult> {
        let result = match size.get() <= self.geometry().size.get() {
            true => Ok(()),
            false => Err(IoError::new(self.name(), Operation::Grow, ByteOffset::ZERO.range(size), Failure::NoSpace)),
        };
        Box::pin(std::future::ready(result))
    }

    /// Flushes, and tidies up state that a crash would leave behind. No request is in flight, and none follows.
    fn close(&self) -> BoxFuture<'_, IoResult> {
        match self.geometry().read_only {
            true => Box::pin(std::future::ready(Ok(()))),
            false => Box::pin(self.flush()),
        }
    }

    /// Returns the announcements of size changes.
    fn size_changes(&self) -> &SizeChanges;
}

/// Checks a request against a device's geometry, as every backend does first.
///
/// # Errors
/// [`Failure::OutOfRange`], [`Failure::Misaligned`], or [`Failure::ReadOnly`] for a change.
pub fn check_request(
    name: &Rc<str>,
    geometry: &Geometry,
    operation: Operation,
    range: ByteRange,
) -> Result<(), IoError> {
    let inside = range.checked_end().is_some_and(|end| end.get() <= geometry.size.get());
    let failure = if !inside {
        Failure::OutOfRange
    } else if !range.is_aligned(u64::from(geometry.block_size)) {
        Failure::Misaligned
    } else if geometry.read_only && matches!(operation, Operation::Write | Operation::Discard | Operation::WriteZeroes)
    {
        Failure::ReadOnly
    } else {
        return Ok(());
    };
    Err(IoError::new(name, operation, range, failure))
}

/// A request in flight.
pub struct Io<'a> {
    state: IoState<'a>,
    /// Declared after `state`, and so dropped after it: watches are notified only when the request no longer accesses
    /// its buffer.
    watched: [Option<WatchEntry<'a>>; WATCHES_MAX],
    /// Dropped last, because the other fields borrow from the device.
    shared_device: Option<Rc<SharedDevice>>,
}

/// A device that is shared with its in-flight requests: the reference count is their number.
pub(crate) struct SharedDevice(pub(crate) Rc<dyn BlockDevice>);

/// The number of layers that can watch one request without a task: single bytes, read-ahead, and the format or the
/// cache.
const WATCHES_MAX: usize = 3;

/// A recipient of the end of requests, for a layer that locks the range of a request until then.
pub trait RequestWatch {
    /// Called when the request of `ticket` has completed or was dropped.
    fn request_ended(&self, ticket: u32);

    /// Called when a request has completed with an error; [`RequestWatch::request_ended`] follows.
    fn request_failed(&self, _: &IoError) {}
}

struct WatchEntry<'a> {
    watch: &'a dyn RequestWatch,
    ticket: u32,
}

impl Drop for WatchEntry<'_> {
    fn drop(&mut self) {
        self.watch.request_ended(self.ticket);
    }
}

enum IoState<'a> {
    Ready(Option<IoResult>),
    File(FileIo<'a>),
    Nbd(PendingReply<'a>),
    Task(BoxFuture<'a, IoResult>),
}

impl<'a> Io<'a> {
    /// Returns a request that has completed synchronously.
    pub fn ready(result: IoResult) -> Self {
        Self::new(IoState::Ready(Some(result)))
    }

    /// Returns a request of several steps, which starts when it is first awaited.
    pub fn task(steps: impl Future<Output = IoResult> + 'a) -> Self {
        Self::new(IoState::Task(Box::pin(steps)))
    }

    pub(crate) fn file(io: FileIo<'a>) -> Self {
        Self::new(IoState::File(io))
    }

    fn new(state: IoState<'a>) -> Self {
        Self { state, watched: [const { None }; WATCHES_MAX], shared_device: None }
    }

    /// Starts a request on a device that lives as long as the request. `start_request` must not store the device
    /// anywhere but in the returned request.
    pub(crate) fn on_shared(
        device: &Rc<SharedDevice>,
        start_request: impl FnOnce(&'a dyn BlockDevice) -> Self,
    ) -> Self {
        // SAFETY: the device does not move, and the returned request shares ownership of it. That share is dropped
        // after all that borrows from it; a completed request borrows nothing. The callers, all in `filter::switch`,
        // only call a method of the device.
        let borrowed: &'a dyn BlockDevice = unsafe { &*Rc::as_ptr(&device.0) };
        let mut io = start_request(borrowed);
        if !io.is_ready() {
            io.shared_device = Some(Rc::clone(device));
        }
        io
    }

    /// Notifies `watch` once when the request ends, with `ticket`: at once if it has completed synchronously. A
    /// request that already has the maximum number of watches is wrapped in a task.
    pub fn watched(mut self, watch: &'a dyn RequestWatch, ticket: u32) -> Self {
        if self.watched.iter().all(Option::is_some) {
            let inner = self;
            self = Self::task(inner);
        }
        let watched = WatchEntry { watch, ticket };
        if !matches!(self.state, IoState::Ready(_)) {
            let free = self.watched.iter_mut().find(|slot| slot.is_none());
            if let Some(slot) = free {
                *slot = Some(watched);
            }
        }
        self
    }

    pub(crate) fn nbd(request: PendingReply<'a>) -> Self {
        Self::new(IoState::Nbd(request))
    }

    /// Returns true if the request has completed synchronously.
    pub fn is_ready(&self) -> bool {
        matches!(self.state, IoState::Ready(_))
    }

    /// Takes the result, if the request has completed synchronously.
    pub fn take_ready_result(&mut self) -> Option<IoResult> {
        match &mut self.state {
            IoState::Ready(result) => result.take(),
            IoState::File(_) | IoState::Nbd(_) | IoState::Task(_) => None,
        }
    }
}

impl Future for Io<'_> {
    type Output = IoResult;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<IoResult> {
        let result = std::task::ready!(match &mut self.state {
            IoState::Ready(result) => match result.take() {
                Some(result) => Poll::Ready(result),
                None => panic!("a request was polled after it had completed"),
            },
            IoState::File(io) => Pin::new(io).poll(context),
            IoState::Nbd(request) => Pin::new(request).poll(context),
            IoState::Task(steps) => steps.as_mut().poll(context),
        });
        if let Err(error) = &result {
            let watched = self.watched.iter().flatten();
            watched.for_each(|watched| watched.watch.request_failed(error));
        }
        self.watched = [const { None }; WATCHES_MAX];
        if self.shared_device.is_some() {
            // `state` borrows from the device, so it is dropped first.
            self.state = IoState::Ready(None);
            self.shared_device = None;
        }
        Poll::Ready(result)
    }
}

/// Waits for all requests, and returns the first failure.
///
/// # Errors
/// The error of the request that failed first.
pub async fn join<'a, A: smallvec::Array<Item = Io<'a>>>(mut ios: SmallVec<A>) -> IoResult {
    match &mut ios[..] {
        [] => return Ok(()),
        [only] => return only.await,
        _ => {}
    }
    let mut failure = Ok(());
    std::future::poll_fn(|context| {
        let mut index = 0;
        while index < ios.len() {
            match Pin::new(&mut ios[index]).poll(context) {
                Poll::Pending => index += 1,
                Poll::Ready(result) => {
                    drop(ios.swap_remove(index));
                    if failure.is_ok() {
                        failure = result;
                    }
                }
            }
        }
        if ios.is_empty() { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
    failure
}

/// Announces changes of a device's size to waiting tasks. A layer returns the object of the device below.
#[derive(Default)]
pub struct SizeChanges {
    generation: Cell<u64>,
    /// Announced sizes with their generations. Each size is smaller than all later ones.
    announced_sizes: RefCell<Vec<(u64, ByteLen)>>,
    changed: Signal,
}

impl SizeChanges {
    /// Returns the number of changes so far. Callers get it before they read the geometry, then wait for a later one.
    pub fn generation(&self) -> u64 {
        self.generation.get()
    }

    /// Returns the smallest size that was announced after `generation`. Data beyond it is lost, whatever the present
    /// size is.
    pub fn smallest_since(&self, generation: u64) -> Option<ByteLen> {
        let announced = self.announced_sizes.borrow();
        let first = announced.iter().find(|(at, _)| *at > generation);
        first.map(|(_, size)| *size)
    }

    /// Announces a change to `size`, which may be smaller than before.
    pub fn announce_size(&self, size: ByteLen) {
        let mut announced = self.announced_sizes.borrow_mut();
        announced.retain(|(_, other)| *other < size);
        announced.push((self.generation() + 1, size));
        drop(announced);
        self.announce();
    }

    /// Announces a change.
    pub fn announce(&self) {
        self.generation.set(self.generation.get() + 1);
        self.wake();
    }

    /// Wakes all waiting tasks to check their condition again, with or without a change.
    pub fn wake(&self) {
        self.changed.raise();
    }

    /// Completes once there was a change after `generation`.
    pub async fn changed_after(&self, generation: u64) {
        self.changed_after_or(generation, || false).await;
    }

    /// Completes once there was a change after `generation`, or `should_stop` returns true after a
    /// [`SizeChanges::wake`].
    pub async fn changed_after_or(&self, generation: u64, should_stop: impl Fn() -> bool) {
        let is_done = || self.generation.get() != generation || should_stop();
        self.changed.when(is_done).await;
    }
}
