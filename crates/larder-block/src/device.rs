//! The contract of every layer of the block path: a block device over a block device.
//!
//! A request is a method call that returns a future. What can be answered at once (a hit in RAM, a page-cache read) is
//! answered in the call: its [`Io`] is ready. What the layer below answers is that layer's `Io`, handed through without
//! a wrapper. Only what needs several steps becomes a task. A layer is written as straight code, and its fast path
//! costs a function call.
//!
//! # What every device promises
//! 1. A request starts when the method is called, or at the latest when its future is first polled, and completes
//!    exactly once, when its future resolves. Requests under way at the same time are unordered. Dropping a future gives
//!    the request up: it may or may not have happened, but when the drop returns the buffer is no longer touched.
//! 2. A read returns, for each byte, the last completed write, or, where a write is under way, either the old or the new
//!    one, sector by sector.
//! 3. What a completed [`flush`](BlockDevice::flush) (or a FUA write) covers survives a crash: every write that had
//!    completed when the flush was called. Other writes may be lost, sector by sector, in any order, but a sector reads
//!    as one of the versions it was given, and never changes its mind.
//! 4. A failed write, discard or write-zeroes leaves each sector of its range old or new. A failed flush has promised
//!    nothing, and the next flush that succeeds covers all that this one should have.
//! 5. Requests that are not multiples of [`Geometry::block_size`], or leave the device, fail without effect.
//! 6. The size may change between requests ([`BlockDevice::size_changes`]); it never changes other geometry.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use smallvec::SmallVec;

use crate::backend::file::FileIo;
use crate::backend::nbd::Pending;
use crate::buffer::{ReadBuf, WriteBuf};
use crate::error::{Failure, IoError, IoResult, Operation};
use crate::signal::Signal;
use crate::units::{ByteLen, ByteOffset, ByteRange};

/// What a device is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Geometry {
    /// Bytes that can be addressed; a multiple of `block_size`.
    pub size: ByteLen,
    /// Every request's start and length is a multiple of this; a power of two, in bytes.
    pub block_size: u32,
    /// A request smaller than this, or not aligned to it, costs a read first; in bytes, for the guest's information.
    pub physical_block_size: u32,
    /// The alignment and smallest size at which a discard frees anything, in bytes; 0 if the device cannot discard.
    pub discard_granularity: u32,
    /// Where a buffer of a request must begin in memory for the request to go without a copy; a power of two, in bytes.
    pub memory_alignment: u32,
    /// Changes are refused.
    pub read_only: bool,
    /// Writing zeroes is cheaper than writing a buffer of zeros.
    pub fast_zeroes: bool,
}

/// How a write is to be done.
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

/// How zeroes are to be written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ZeroFlags {
    /// The space may be given back.
    pub unmap: bool,
    /// Fail with [`Failure::Unsupported`] if it would not be faster than writing a buffer of zeros (NBD's FAST_ZERO).
    pub fast_only: bool,
    /// As in [`WriteFlags`].
    pub fua: bool,
}

/// What a part of a disk holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExtentKind {
    /// Allocated; anything.
    Data,
    /// Allocated, and reads as zeros.
    Zero,
    /// Not allocated, and reads as zeros.
    Hole,
}

/// A part of a disk that is all of one kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Which part.
    pub range: ByteRange,
    /// What it holds.
    pub kind: ExtentKind,
}

/// A future in a box, for what is not on the fast path.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// A block device, or a layer over one. See the module for what it promises.
pub trait BlockDevice {
    /// Its name as the user knows it, for messages.
    fn name(&self) -> &Rc<str>;

    /// What it is like now.
    fn geometry(&self) -> Geometry;

    /// Fills `buffer` from the bytes that begin at `start`.
    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a>;

    /// Writes `buffer` to the bytes that begin at `start`.
    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a>;

    /// Returns whether a write to `range` may fail because of its bytes.
    fn minds_content(&self, _range: ByteRange) -> bool {
        false
    }

    /// Checks whether a write would fail because of its bytes. A layer that acknowledges writes before this device has them
    /// asks first: a later error could be reported to no client, and the write never be made.
    ///
    /// # Errors
    /// The one that the write would end with.
    fn check_content(&self, _start: ByteOffset, _buffer: WriteBuf<'_>) -> IoResult {
        Ok(())
    }

    /// Makes every completed change durable.
    fn flush(&self) -> Io<'_>;

    /// Tells that the bytes are no longer needed. They may read as anything that they once were, or as zeros.
    /// A device that cannot discard completes it without effect.
    fn discard(&self, range: ByteRange) -> Io<'_>;

    /// Makes the bytes read as zeros.
    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_>;

    /// Has the bytes have room of their own, so that a write to them does not fail with [`Failure::NoSpace`] later. What
    /// they hold stays as it is, whatever else is under way. Fails with `NoSpace` itself, with part of the room taken or
    /// none. A device that cannot promise it (a copy-on-write file system, a store behind a protocol that has no such
    /// request) completes it without effect, as does every device that does not say otherwise.
    fn allocate(&self, range: ByteRange) -> Io<'_> {
        Io::ready(check_request(self.name(), &self.geometry(), Operation::Write, range))
    }

    /// What the bytes of `range` (not empty) hold: extents in order without gaps from its start on, at least one, at
    /// most `limit`, none beyond its end. It may stop before the end.
    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>>;

    /// Makes the device at least `size` bytes long, for a format that keeps more in it. What is new reads as zeros; a
    /// flush makes the new size durable. Unless it says otherwise a device has a fixed size, and fails a longer one
    /// with [`Failure::NoSpace`].
    fn grow(&self, size: ByteLen) -> BoxFuture<'_, IoResult> {
        let result = match size.get() <= self.geometry().size.get() {
            true => Ok(()),
            false => Err(IoError::new(
                self.name(),
                Operation::Grow,
                ByteOffset::ZERO.range(size),
                Failure::NoSpace,
            )),
        };
        Box::pin(std::future::ready(result))
    }

    /// Leaves everything as if nobody had used it: flushes, and tidies up what a crash would leave untidy. No request
    /// is under way, and none follows.
    fn close(&self) -> BoxFuture<'_, IoResult> {
        match self.geometry().read_only {
            true => Box::pin(std::future::ready(Ok(()))),
            false => Box::pin(self.flush()),
        }
    }

    /// Where changes of the size are announced.
    fn size_changes(&self) -> &SizeChanges;
}

/// Checks a request against a device; what every backend does first.
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
    } else if geometry.read_only
        && matches!(
            operation,
            Operation::Write | Operation::Discard | Operation::WriteZeroes
        )
    {
        Failure::ReadOnly
    } else {
        return Ok(());
    };
    Err(IoError::new(name, operation, range, failure))
}

/// A request under way.
pub struct Io<'a> {
    state: State<'a>,
    /// Behind `state`: what still touches the buffer is gone before they are told.
    watched: [Option<Watched<'a>>; WATCHES],
    /// Behind both: what they borrow from.
    lent: Option<Rc<Lent>>,
}

/// A device that requests have a share in: how many there are tells how many are under way.
pub(crate) struct Lent(pub(crate) Rc<dyn BlockDevice>);

/// Layers that can watch one request without a task: single bytes, read-ahead, and the format or the cache.
const WATCHES: usize = 3;

/// Who is to be told when a request ends; for a layer that keeps others off its range until then.
pub trait Watch {
    /// The request that `ticket` stands for has completed, or has been given up.
    fn ended(&self, ticket: u32);

    /// One has completed with an error; [`Watch::ended`] follows.
    fn failed(&self, _: &IoError) {}
}

struct Watched<'a> {
    watch: &'a dyn Watch,
    ticket: u32,
}

impl Drop for Watched<'_> {
    fn drop(&mut self) {
        self.watch.ended(self.ticket);
    }
}

enum State<'a> {
    Ready(Option<IoResult>),
    File(FileIo<'a>),
    Nbd(Pending<'a>),
    Task(BoxFuture<'a, IoResult>),
}

impl<'a> Io<'a> {
    /// A request that was answered in the call.
    pub fn ready(result: IoResult) -> Self {
        Self::new(State::Ready(Some(result)))
    }

    /// A request that takes several steps. Starts when first awaited.
    pub fn task(steps: impl Future<Output = IoResult> + 'a) -> Self {
        Self::new(State::Task(Box::pin(steps)))
    }

    pub(crate) fn file(io: FileIo<'a>) -> Self {
        Self::new(State::File(io))
    }

    fn new(state: State<'a>) -> Self {
        Self {
            state,
            watched: [const { None }; WATCHES],
            lent: None,
        }
    }

    /// A request to a device that lives as long as the request, whatever else becomes of it. `begin` must keep the device
    /// that it is given nowhere but in what it returns.
    pub(crate) fn lent(device: &Rc<Lent>, begin: impl FnOnce(&'a dyn BlockDevice) -> Self) -> Self {
        // SAFETY: the device does not move, and what is returned has a share in it, which is dropped behind all that
        // borrows it, unless it borrows nothing because it was answered. The callers, all in `filter::switch`, do nothing
        // but call a method of the device.
        let borrowed: &'a dyn BlockDevice = unsafe { &*Rc::as_ptr(&device.0) };
        let mut io = begin(borrowed);
        if !io.is_ready() {
            io.lent = Some(Rc::clone(device));
        }
        io
    }

    /// The same request, of whose end `watch` is told once, with `ticket`: at once if it was answered in the call. A
    /// request that has all its watches already is wrapped in a task.
    pub fn watched(mut self, watch: &'a dyn Watch, ticket: u32) -> Self {
        if self.watched.iter().all(Option::is_some) {
            let inner = self;
            self = Self::task(inner);
        }
        let watched = Watched { watch, ticket };
        if !matches!(self.state, State::Ready(_)) {
            let free = self.watched.iter_mut().find(|slot| slot.is_none());
            if let Some(slot) = free {
                *slot = Some(watched);
            }
        }
        self
    }

    pub(crate) fn nbd(request: Pending<'a>) -> Self {
        Self::new(State::Nbd(request))
    }

    /// Whether the request was answered in the call.
    pub fn is_ready(&self) -> bool {
        matches!(self.state, State::Ready(_))
    }

    /// The result, if the request was answered in the call.
    pub fn result_now(&mut self) -> Option<IoResult> {
        match &mut self.state {
            State::Ready(result) => result.take(),
            State::File(_) | State::Nbd(_) | State::Task(_) => None,
        }
    }
}

impl Future for Io<'_> {
    type Output = IoResult;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<IoResult> {
        let result = std::task::ready!(match &mut self.state {
            State::Ready(result) => match result.take() {
                Some(result) => Poll::Ready(result),
                None => panic!("a request's result was asked for twice"),
            },
            State::File(io) => Pin::new(io).poll(context),
            State::Nbd(request) => Pin::new(request).poll(context),
            State::Task(steps) => steps.as_mut().poll(context),
        });
        if let Err(error) = &result {
            let watched = self.watched.iter().flatten();
            watched.for_each(|watched| watched.watch.failed(error));
        }
        self.watched = [const { None }; WATCHES];
        if self.lent.is_some() {
            // First what borrows from it.
            self.state = State::Ready(None);
            self.lent = None;
        }
        Poll::Ready(result)
    }
}

/// Waits for all; the first failure, if any.
///
/// # Errors
/// That of the request that failed first.
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

/// Announces changes of a device's size to those who wait for them. Layers hand through the one of the device below.
#[derive(Default)]
pub struct SizeChanges {
    generation: Cell<u64>,
    /// Sizes, each smaller than all that came after it, and when they came.
    least: RefCell<Vec<(u64, ByteLen)>>,
    changed: Signal,
}

impl SizeChanges {
    /// How many changes there have been. Ask before reading the geometry, then wait for a later one.
    pub fn generation(&self) -> u64 {
        self.generation.get()
    }

    /// The smallest size that has been announced after `generation`: what lay behind it is gone, whatever size there is
    /// now.
    pub fn least_since(&self, generation: u64) -> Option<ByteLen> {
        let least = self.least.borrow();
        let first = least.iter().find(|(at, _)| *at > generation);
        first.map(|(_, size)| *size)
    }

    /// Announces a change to `size`, by which the device may have become smaller.
    pub fn announce_size(&self, size: ByteLen) {
        let mut least = self.least.borrow_mut();
        least.retain(|(_, other)| *other < size);
        least.push((self.generation() + 1, size));
        drop(least);
        self.announce();
    }

    /// Announces a change.
    pub fn announce(&self) {
        self.generation.set(self.generation.get() + 1);
        self.wake();
    }

    /// Lets everyone who waits look again, whether there was a change or not.
    pub fn wake(&self) {
        self.changed.raise();
    }

    /// Completes once there has been a change after `generation`.
    pub async fn after(&self, generation: u64) {
        self.after_or(generation, || false).await;
    }

    /// Completes once there has been a change after `generation`, or `enough` says so after a [`SizeChanges::wake`].
    pub async fn after_or(&self, generation: u64, enough: impl Fn() -> bool) {
        let is_over = || self.generation.get() != generation || enough();
        self.changed.when(is_over).await;
    }
}
