//! A disk under compressed RAM: segments of a log, written as a whole, and read in parts.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use larder_block::{AlignedBuf, BlockDevice, ByteOffset, IoError, Loop, ReadBuf, WriteBuf, WriteFlags};

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

/// On a block device: its first [`SEGMENT`] bytes are not of the log.
pub struct DeviceStore {
    on: Loop,
    segments: u32,
    inner: Rc<Inner>,
}

struct Inner {
    device: Rc<dyn BlockDevice>,
    finished: RefCell<VecDeque<Finished>>,
}

impl DeviceStore {
    /// As many segments of `device`, whose requests are made on this loop.
    pub fn new(on: &Loop, device: Rc<dyn BlockDevice>, segments: u32) -> Self {
        Self {
            on: on.clone(),
            segments,
            inner: Rc::new(Inner {
                device,
                finished: RefCell::default(),
            }),
        }
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
        self.on.spawn(async move {
            let at = ByteOffset::new(Self::LOG_AT + segment.start());
            let written = inner.device.write(at, WriteBuf::new(&bytes), WriteFlags::NONE).await;
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
