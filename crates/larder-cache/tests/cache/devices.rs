//! Simulated disk, cache device, and record of the cache's failures.

use std::cell::{Cell, RefCell};
use std::io;
use std::rc::Rc;

use larder_block::backend::simulated::{LatencyDistribution, SimulatedDevice, SimulatedMedium, SimulatedOptions};
use larder_block::{BlockDevice, BoxFuture, ByteLen, ByteRange, Loop};
use larder_cache::{
    Cache, CacheCreateOptions, CacheMode, CacheOpenOptions, CleanOptions, DiskId, FailureLog, FailureRecord,
    PersistOptions, Verdict, create,
};

pub(crate) const LINE: usize = 4096;

/// Record of a cache's failures, in memory.
#[derive(Clone, Default)]
pub(crate) struct Notes(Rc<Noted>);

#[derive(Default)]
struct Noted {
    detached: RefCell<Option<FailureRecord>>,
    detaches: Cell<u32>,
}

impl Notes {
    pub(crate) fn detached(&self) -> Option<FailureRecord> {
        self.0.detached.borrow().clone()
    }

    /// Returns how often a failure of the cache was recorded.
    pub(crate) fn detaches(&self) -> u32 {
        self.0.detaches.get()
    }
}

impl FailureLog for Notes {
    fn record_failed(&self) -> BoxFuture<'_, io::Result<()>> {
        self.0.detached.borrow_mut().get_or_insert_default();
        self.0.detaches.set(self.0.detaches.get() + 1);
        Box::pin(std::future::ready(Ok(())))
    }

    fn record_superseded(&self, range: ByteRange) -> BoxFuture<'_, io::Result<()>> {
        let mut detached = self.0.detached.borrow_mut();
        detached.get_or_insert_default().superseded.push(range);
        Box::pin(std::future::ready(Ok(())))
    }

    fn clear(&self) -> BoxFuture<'_, io::Result<()>> {
        self.0.detached.take();
        self.0.detaches.set(0);
        Box::pin(std::future::ready(Ok(())))
    }
}

/// Opens a device without latency.
pub(crate) fn device(on: &Loop, medium: SimulatedMedium) -> Rc<SimulatedDevice> {
    let options = SimulatedOptions { latency: LatencyDistribution::NONE, ..SimulatedOptions::default() };
    SimulatedDevice::open(on, medium, options)
}

/// Creates a cache on `fast`.
pub(crate) async fn make(fast: &Rc<SimulatedDevice>, uuid: u8, mode: CacheMode, disk_size: ByteLen) {
    let options = CacheCreateOptions {
        line_bits: LINE.trailing_zeros(),
        mode,
        uuid: [uuid; 16],
        disk: DiskId::default(),
        disk_size,
    };
    let fast: Rc<dyn BlockDevice> = Rc::clone(fast) as _;
    create(&fast, &options).await.expect("has room");
}

pub(crate) fn options(notes: &Notes) -> CacheOpenOptions {
    CacheOpenOptions {
        mode: None,
        disk: DiskId::default(),
        verdict: Verdict::Unchanged,
        fingerprint: Box::new(Vec::new),
        failure: notes.detached(),
        failure_log: Box::new(notes.clone()),
        boot: [1; 16],
        endurance: None,
        cleaning: CleanOptions::default(),
        load_ahead: true,
        persist: PersistOptions::default(),
    }
}

pub(crate) async fn open(
    on: &Loop,
    disk: &Rc<SimulatedDevice>,
    fast: &Rc<SimulatedDevice>,
    options: CacheOpenOptions,
) -> Rc<Cache> {
    let opened = Cache::open(on, Rc::clone(disk) as _, Rc::clone(fast) as _, options).await;
    opened.expect("can be opened")
}
