//! Simulated disk, cache device, and record of the cache's failures.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;

use larder_block::backend::simulated::{Latency, Medium, Options, SimulatedDevice};
use larder_block::{BlockDevice, BoxFuture, ByteLen, ByteRange, Loop};
use larder_cache::{
    Cache, CleanOptions, CreateOptions, Detached, DiskId, Mode, OpenOptions, SettleOptions, Verdict, Witness, create,
};

pub(crate) const LINE: usize = 4096;

/// Record of a cache's failures, in memory.
#[derive(Clone, Default)]
pub(crate) struct Notes(Rc<Noted>);

#[derive(Default)]
struct Noted {
    detached: RefCell<Option<Detached>>,
    detaches: Cell<u32>,
}

impl Notes {
    pub(crate) fn detached(&self) -> Option<Detached> {
        self.0.detached.borrow().clone()
    }

    /// Returns how often a failure of the cache was recorded.
    pub(crate) fn detaches(&self) -> u32 {
        self.0.detaches.get()
    }
}

impl Witness for Notes {
    fn detach(&self) -> BoxFuture<'_, io::Result<()>> {
        self.0.detached.borrow_mut().get_or_insert_default();
        self.0.detaches.set(self.0.detaches.get() + 1);
        Box::pin(std::future::ready(Ok(())))
    }

    fn supersede(&self, range: ByteRange) -> BoxFuture<'_, io::Result<()>> {
        let mut detached = self.0.detached.borrow_mut();
        detached.get_or_insert_default().superseded.push(range);
        Box::pin(std::future::ready(Ok(())))
    }

    fn attach(&self) -> BoxFuture<'_, io::Result<()>> {
        self.0.detached.take();
        self.0.detaches.set(0);
        Box::pin(std::future::ready(Ok(())))
    }
}

/// Opens a device without latency.
pub(crate) fn device(on: &Loop, medium: Medium) -> Rc<SimulatedDevice> {
    let options = Options {
        latency: Latency::NONE,
        ..Options::default()
    };
    SimulatedDevice::open(on, medium, options)
}

/// Creates a cache on `fast`.
pub(crate) async fn make(fast: &Rc<SimulatedDevice>, uuid: u8, mode: Mode, disk_size: ByteLen) {
    let options = CreateOptions {
        line_bits: LINE.trailing_zeros(),
        mode,
        uuid: [uuid; 16],
        disk: DiskId::default(),
        disk_size,
    };
    let fast: Rc<dyn BlockDevice> = Rc::clone(fast) as _;
    create(&fast, &options).await.expect("has room");
}

pub(crate) fn options(notes: &Notes) -> OpenOptions {
    OpenOptions {
        mode: None,
        disk: DiskId::default(),
        verdict: Verdict::Proven,
        stamp: Box::new(Vec::new),
        detached: notes.detached(),
        witness: Box::new(notes.clone()),
        boot: [1; 16],
        endurance: None,
        cleaning: CleanOptions::default(),
        load_ahead: true,
        settling: SettleOptions::default(),
    }
}

pub(crate) async fn open(
    on: &Loop,
    disk: &Rc<SimulatedDevice>,
    fast: &Rc<SimulatedDevice>,
    options: OpenOptions,
) -> Rc<Cache> {
    let opened = Cache::open(on, Rc::clone(disk) as _, Rc::clone(fast) as _, options).await;
    opened.expect("can be opened")
}
