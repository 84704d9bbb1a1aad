//! A disk under compressed RAM: segments of a log, written as a whole, and read in parts.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

use larder_block::{
    AlignedBuf, BlockDevice, BoxFuture, ByteOffset, IoError, IoResult, Loop, ReadBuf, WriteBuf, WriteFlags,
};

use crate::log::{SEGMENT, SegmentIndex};

/// Which request an answer is to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Ticket(pub u64);

/// What has been done. The memory is given back.
pub enum Finished {
    /// See [`Store::write`].
    Written {
        /// Which.
        segment: SegmentIndex,
        /// What was written.
        bytes: AlignedBuf,
        /// Why not.
        failed: Option<IoError>,
    },
    /// See [`Store::read`].
    Read {
        /// Which request.
        ticket: Ticket,
        /// What was read, at its beginning.
        bytes: AlignedBuf,
        /// Why not.
        failed: Option<IoError>,
    },
}

/// Where segments are kept. Requests are begun, and end in any order. What was written needs to be there only as long as
/// the host runs.
pub trait Store {
    /// What it is called.
    fn name(&self) -> &str;

    /// How many segments there is room for.
    fn segments(&self) -> u32;

    /// What reads must begin and end at multiples of, in bytes.
    fn block_bytes(&self) -> usize;

    /// Writes a whole segment. It is not read, or written again, before that has ended.
    fn write(&self, segment: SegmentIndex, bytes: AlignedBuf);

    /// Reads the `len` bytes of the log from `start` on, into as many of `bytes`.
    fn read(&self, start: u64, len: usize, bytes: AlignedBuf, ticket: Ticket);

    /// What has been done.
    fn take(&self) -> Option<Finished>;
}

/// A step before each write to a disk.
pub trait BeforeWrite {
    /// Completes once `segment` may be written. An error fails the write.
    fn before_write(&self, segment: SegmentIndex) -> BoxFuture<'_, IoResult>;
}

/// On a block device: its first [`SEGMENT`] bytes are not of the log.
pub struct DeviceStore {
    on: Loop,
    segments: u32,
    inner: Rc<Inner>,
}

struct Inner {
    device: Rc<dyn BlockDevice>,
    before: Option<Rc<dyn BeforeWrite>>,
    finished: RefCell<VecDeque<Finished>>,
    /// Writes under way, and the task that waits for the last of them to end.
    writing: Cell<usize>,
    waiting: RefCell<Option<Waker>>,
}

impl Inner {
    async fn write(&self, segment: SegmentIndex, bytes: &AlignedBuf) -> IoResult {
        if let Some(before) = &self.before {
            before.before_write(segment).await?;
        }
        let at = ByteOffset::new(DeviceStore::LOG_AT + segment.start());
        self.device.write(at, WriteBuf::new(bytes), WriteFlags::NONE).await
    }
}

/// The writes of a [`DeviceStore`], which may outlive it.
pub struct PendingWrites(Rc<Inner>);

impl PendingWrites {
    /// Waits until no write is under way. The store is gone, or begins none any more.
    pub async fn ended(&self) {
        poll_fn(|context| match self.0.writing.get() {
            0 => Poll::Ready(()),
            _ => {
                *self.0.waiting.borrow_mut() = Some(context.waker().clone());
                Poll::Pending
            }
        })
        .await;
    }
}

impl DeviceStore {
    /// As many segments of `device`, whose requests are made on this loop.
    pub fn new(on: &Loop, device: Rc<dyn BlockDevice>, segments: u32, before: Option<Rc<dyn BeforeWrite>>) -> Self {
        Self {
            on: on.clone(),
            segments,
            inner: Rc::new(Inner {
                device,
                before,
                finished: RefCell::default(),
                writing: Cell::new(0),
                waiting: RefCell::default(),
            }),
        }
    }

    /// Its writes, to wait for their end.
    pub fn pending_writes(&self) -> PendingWrites {
        PendingWrites(Rc::clone(&self.inner))
    }

    /// Where the log begins on the device.
    const LOG_AT: u64 = SEGMENT as u64;
}

impl Store for DeviceStore {
    fn name(&self) -> &str {
        self.inner.device.name()
    }

    fn segments(&self) -> u32 {
        self.segments
    }

    fn block_bytes(&self) -> usize {
        self.inner.device.geometry().block_size as usize
    }

    fn write(&self, segment: SegmentIndex, bytes: AlignedBuf) {
        let inner = Rc::clone(&self.inner);
        inner.writing.update(|count| count + 1);
        self.on.spawn(async move {
            let written = inner.write(segment, &bytes).await;
            inner.writing.update(|count| count - 1);
            if inner.writing.get() == 0
                && let Some(waiting) = inner.waiting.take()
            {
                waiting.wake();
            }
            inner.finished.borrow_mut().push_back(Finished::Written {
                segment,
                bytes,
                failed: written.err(),
            });
        });
    }

    fn read(&self, start: u64, len: usize, mut bytes: AlignedBuf, ticket: Ticket) {
        let inner = Rc::clone(&self.inner);
        self.on.spawn(async move {
            let at = ByteOffset::new(Self::LOG_AT + start);
            let read = inner.device.read(at, ReadBuf::new(&mut bytes[..len])).await;
            inner.finished.borrow_mut().push_back(Finished::Read {
                ticket,
                bytes,
                failed: read.err(),
            });
        });
    }

    fn take(&self) -> Option<Finished> {
        self.inner.finished.borrow_mut().pop_front()
    }
}
