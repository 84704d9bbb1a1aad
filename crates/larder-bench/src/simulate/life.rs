//! One life of a stack, from its opening to its stop: workers that send random requests, and their shared state.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

use larder_block::backend::simulated::{SeededRng, SimulatedDevice};
use larder_block::event_loop::WeakLoop;
use larder_block::{BlockDevice, ByteLen, Failure, Geometry, LoopTime};

use super::log::{Event, Log};
use super::oracle::{Moment, Oracle};
use super::size::SizeOracle;
use super::stack::Opened;
use super::stamp::SECTOR;

/// Virtual time after which a request counts as hung. Slow disks, throttles and stuck requests take seconds.
pub(super) const PATIENCE: Duration = Duration::from_secs(120);

/// Interval at which stuck requests are released and hung ones are detected.
pub(super) const TICK: Duration = Duration::from_millis(500);

/// State of one seed over all its lives.
pub(super) struct Record {
    /// Allowed content of the disk.
    pub(super) oracle: RefCell<Oracle>,
    /// Allowed sizes of the disk.
    pub(super) sizes: RefCell<SizeOracle>,
    /// Events so far.
    pub(super) log: RefCell<Log>,
    /// Number of the next request, from 1. It also identifies the data that the request writes.
    pub(super) next_number: Cell<u32>,
    /// Key that distinguishes this seed's data from that of others.
    pub(super) key: u64,
}

/// State that the workers of one life share.
pub(super) struct Life {
    /// The loop, held weakly so that the life does not keep it alive.
    pub(super) on: WeakLoop,
    /// The top of the stack.
    pub(super) opened: Opened,
    /// The disks at the bottom.
    pub(super) disks: Vec<Rc<SimulatedDevice>>,
    /// State of the seed.
    pub(super) record: Rc<Record>,
    /// Expected behaviour of the stack.
    pub(super) expectations: Expectations,
    /// Requests still to be sent.
    pub(super) requests_left: Cell<u32>,
    /// Number of remaining requests below which the life stops.
    pub(super) stop_at: u32,
    /// For each worker, the request that it waits for.
    pub(super) waits: RefCell<Vec<Option<(u32, LoopTime)>>>,
    /// Workers that have not finished.
    pub(super) running: Cell<usize>,
    /// The violated invariant, if any.
    pub(super) broken: RefCell<Option<String>>,
    /// Waker of the task that waits for the end.
    pub(super) waker: RefCell<Option<Waker>>,
    /// Sizes of the disk, with the moments at which they began.
    pub(super) sizes: RefCell<Vec<(Moment, ByteLen)>>,
    /// Requests that have failed because of a disk.
    pub(super) failed: Cell<u64>,
}

/// Expected behaviour of a stack.
#[derive(Clone, Copy)]
pub(super) struct Expectations {
    /// True if the stack's size follows that of its first disk.
    pub(super) resizable: bool,
    /// True if the stack can grow.
    pub(super) growable: bool,
    /// True if a request fails only if a disk's request has failed.
    pub(super) fails_only_with_a_disk: bool,
    /// Number of disks that may fail, counted from the first.
    pub(super) failing: usize,
    /// True if the disks have little room for new allocations. Acknowledged data can be flushed all the same.
    pub(super) room_is_short: bool,
}

impl Record {
    /// Returns the number for a new request.
    pub(super) fn number(&self) -> u32 {
        let number = self.next_number.get();
        self.next_number.set(number + 1);
        number
    }
}

impl Life {
    /// Returns the current time of this life.
    pub(super) fn now(&self) -> LoopTime {
        self.on.upgrade().map_or_else(LoopTime::default, |on| on.now())
    }

    /// Logs an event.
    pub(super) fn log(&self, event: Event) {
        self.record.log.borrow_mut().add(self.now(), event);
    }

    /// Records a violated invariant, which ends the life.
    pub(super) fn fail(&self, reason: String) {
        self.broken.borrow_mut().get_or_insert(reason);
        self.wake();
    }

    fn wake(&self) {
        if let Some(waker) = self.waker.borrow_mut().take() {
            waker.wake();
        }
    }

    /// Takes one of the requests to be sent. Returns false if there is none.
    pub(super) fn claim_request(&self) -> bool {
        let left = self.requests_left.get();
        if left == 0 || self.broken.borrow().is_some() {
            return false;
        }
        self.requests_left.set(left - 1);
        if self.stop_is_due() {
            self.wake();
        }
        true
    }

    /// Records that a worker has finished.
    pub(super) fn finish_worker(&self) {
        self.running.set(self.running.get() - 1);
        self.wake();
    }

    fn stop_is_due(&self) -> bool {
        self.requests_left.get() < self.stop_at
    }

    /// Completes when the workers have finished, the moment to stop has come, or an invariant is violated.
    pub(super) async fn ended(&self) {
        std::future::poll_fn(|context| {
            if self.running.get() == 0 || self.stop_is_due() || self.broken.borrow().is_some() {
                return Poll::Ready(());
            }
            *self.waker.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }

    /// Returns a request that has hung, if any.
    pub(super) fn hanging(&self) -> Option<u32> {
        let now = self.now();
        let waits = self.waits.borrow();
        let hanging = waits.iter().flatten().find(|(_, since)| now.since(*since) > PATIENCE);
        hanging.map(|(number, _)| *number)
    }

    /// Returns the smallest and the largest size since `start`.
    pub(super) fn sizes_since(&self, start: Moment) -> (ByteLen, ByteLen) {
        let sizes = self.sizes.borrow();
        let first_size = sizes.iter().rposition(|(since, _)| *since <= start).unwrap_or(0);
        let later = sizes[first_size..].iter().map(|(_, size)| *size);
        let now = self.opened.device.geometry().size;
        later.fold((now, now), |(least, most), size| (least.min(size), most.max(size)))
    }

    /// Number of requests that the disks have failed.
    fn disk_failures(&self) -> u64 {
        self.disks.iter().map(|disk| disk.failures()).sum()
    }

    /// Counts a failure, which must be due to a disk.
    pub(super) fn count_failure(&self, number: u32, failure: Failure) {
        self.failed.set(self.failed.get() + 1);
        if self.expectations.fails_only_with_a_disk && self.failed.get() > self.disk_failures() {
            self.fail(format!("#{number} failed ({failure}), but no disk request failed"));
        }
    }

    /// Changes the size of the first disk.
    pub(super) fn resize(&self, random: &mut SeededRng) {
        let disk = &self.disks[0];
        let block = u64::from(disk.geometry().block_size);
        let from = disk.geometry().size;
        let blocks = (from.get() / block).max(2);
        let to = ByteLen::new(random.between(blocks / 2, blocks + blocks / 2).max(4) * block);
        let device = &self.opened.device;
        let (before, generation_before) = (device.geometry(), device.size_changes().generation());
        disk.set_size(to);
        self.log(Event::Resized { to });
        let expected = Geometry { size: to, ..before };
        if device.geometry() != expected {
            self.fail(format!("after a change of size the geometry is {:?}, not {expected:?}", device.geometry()));
        }
        if device.size_changes().generation() == generation_before {
            self.fail("a change of size was not reported to observers".to_owned());
        }
        let mut oracle = self.record.oracle.borrow_mut();
        oracle.resize(from.get() / SECTOR, to.get() / SECTOR);
        self.sizes.borrow_mut().push((oracle.now(), to));
        *self.record.sizes.borrow_mut() = SizeOracle::new(to);
    }

    /// Checks the size, which is at least `grown` after a successful growth to that.
    pub(super) fn see_size(&self, grown: Option<ByteLen>) {
        let size = self.opened.device.geometry().size;
        let check_result = self.record.sizes.borrow_mut().see(size);
        if let Err(reason) = check_result {
            self.fail(reason);
        }
        if let Some(to) = grown.filter(|to| size < *to) {
            self.fail(format!("the disk has a size of {size} after it was grown to {to}"));
        }
        let now = self.record.oracle.borrow().now();
        self.sizes.borrow_mut().push((now, size));
    }
}
