//! Disk tier under compressed RAM: segments of a log, which are written as a whole and read in parts.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::poll_fn;
use std::rc::Rc;
use std::task::{Poll, Waker};

use larder_block::{
    AlignedBuf, BlockDevice, BoxFuture, ByteOffset, IoError, IoResult, Loop, ReadBuf, WriteBuf, WriteFlags,
};

use crate::segment_log::{SEGMENT_BYTES, SegmentIndex};

/// Identifier of a read request.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct ReadId(pub u64);

/// Completed request. It returns the buffer.
pub enum StoreCompletion {
    /// Completion of [`SegmentStore::write`].
    Written {
        /// The segment.
        segment: SegmentIndex,
        /// The buffer that was written.
        bytes: AlignedBuf,
        /// Error of the write.
        failed: Option<IoError>,
    },
    /// Completion of [`SegmentStore::read`].
    Read {
        /// Identifier of the request.
        read_id: ReadId,
        /// The buffer, with the data at its beginning.
        bytes: AlignedBuf,
        /// Error of the read.
        failed: Option<IoError>,
    },
}

/// Storage of segments. Requests are asynchronous, and complete in any order. Data need to survive only as long as
/// the host runs.
pub trait SegmentStore {
    /// Returns the name of the storage.
    fn name(&self) -> &str;

    /// Returns the capacity in segments.
    fn segments(&self) -> u32;

    /// Returns the alignment of reads, in bytes.
    fn block_bytes(&self) -> usize;

    /// Starts to write a whole segment. The caller neither reads nor writes the segment again before this has
    /// completed.
    fn write(&self, segment: SegmentIndex, bytes: AlignedBuf);

    /// Starts to read `len` bytes from offset `start` of the log into the beginning of `bytes`.
    fn read(&self, start: u64, len: usize, bytes: AlignedBuf, read_id: ReadId);

    /// Returns the next completed request.
    fn next_completion(&self) -> Option<StoreCompletion>;
}

/// Step before each write to a disk.
pub trait BeforeWrite {
    /// Completes once `segment` may be written.
    ///
    /// # Errors
    /// The write fails with this error.
    fn before_write(&self, segment: SegmentIndex) -> BoxFuture<'_, IoResult>;
}

/// Store on a block device. The first [`SEGMENT_BYTES`] bytes of the device do not belong to the log.
pub struct DeviceStore {
    on: Loop,
    segments: u32,
    inner: Rc<Inner>,
}

struct Inner {
    device: Rc<dyn BlockDevice>,
    before: Option<Rc<dyn BeforeWrite>>,
    completions: RefCell<VecDeque<StoreCompletion>>,
    /// Number of writes in progress, and the task that waits until there are none.
    writes_in_flight: Cell<usize>,
    drain_waker: RefCell<Option<Waker>>,
}

impl Inner {
    async fn write(&self, segment: SegmentIndex, bytes: &AlignedBuf) -> IoResult {
        if let Some(before) = &self.before {
            before.before_write(segment).await?;
        }
        let at = ByteOffset::new(DeviceStore::LOG_START_BYTES + segment.start());
        self.device.write(at, WriteBuf::new(bytes), WriteFlags::NONE).await
    }
}

/// Writes of a [`DeviceStore`], which may outlive it.
pub struct PendingWrites(Rc<Inner>);

impl PendingWrites {
    /// Waits until no write is in progress. The caller ensures that the store starts no more.
    pub async fn drained(&self) {
        poll_fn(|context| match self.0.writes_in_flight.get() {
            0 => Poll::Ready(()),
            _ => {
                *self.0.drain_waker.borrow_mut() = Some(context.waker().clone());
                Poll::Pending
            }
        })
        .await;
    }
}

impl DeviceStore {
    /// Makes a store of `segments` segments on `device`, whose requests run on the loop `on`.
    pub fn new(on: &Loop, device: Rc<dyn BlockDevice>, segments: u32, before: Option<Rc<dyn BeforeWrite>>) -> Self {
        Self {
            on: on.clone(),
            segments,
            inner: Rc::new(Inner {
                device,
                before,
                completions: RefCell::default(),
                writes_in_flight: Cell::new(0),
                drain_waker: RefCell::default(),
            }),
        }
    }

    /// Returns a handle that waits for the end of all writes.
    pub fn pending_writes(&self) -> PendingWrites {
        PendingWrites(Rc::clone(&self.inner))
    }

    /// Offset of the log on the device, in bytes.
    const LOG_START_BYTES: u64 = SEGMENT_BYTES as u64;
}

impl SegmentStore for DeviceStore {
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
        inner.writes_in_flight.update(|count| count + 1);
        self.on.spawn(async move {
            let written = inner.write(segment, &bytes).await;
            inner.writes_in_flight.update(|count| count - 1);
            if inner.writes_in_flight.get() == 0
                && let Some(waiting) = inner.drain_waker.take()
            {
                waiting.wake();
            }
            inner.completions.borrow_mut().push_back(StoreCompletion::Written {
                segment,
                bytes,
                failed: written.err(),
            });
        });
    }

    fn read(&self, start: u64, len: usize, mut bytes: AlignedBuf, read_id: ReadId) {
        let inner = Rc::clone(&self.inner);
        self.on.spawn(async move {
            let at = ByteOffset::new(Self::LOG_START_BYTES + start);
            let read = inner.device.read(at, ReadBuf::new(&mut bytes[..len])).await;
            inner.completions.borrow_mut().push_back(StoreCompletion::Read { read_id, bytes, failed: read.err() });
        });
    }

    fn next_completion(&self) -> Option<StoreCompletion> {
        self.inner.completions.borrow_mut().pop_front()
    }
}
