//! Watchdog of the cache device: a device that does not answer for long counts as failed.
//!
//! Requests in flight are counted by the second in which they began, and a timer that runs while there are any advances
//! from second to second. If some are then as old as [`RESPONSE_TIMEOUT`], the device *hangs*: the cache has failed,
//! and the device gets no request any more until it has answered all earlier ones.
//!
//! Most requests have memory of their own, which they own until they end. A caller that waits for one gets an error
//! when the device hangs, while the request stays with the device ([`OrphanedRequest`]). A read into a guest's memory
//! cannot be left behind: the device may write there as long as it has not answered, so the caller keeps waiting. For
//! that reason new reads go to the disk once others have been in flight for a while ([`CacheDevice::is_late`]).
//!
//! A request that was left behind changes the device after the cache has failed. From then on only dirty data is
//! trusted, and no dirty data is read before the device has answered everything.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::ops::{Deref, Range};
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use larder_block::event_loop::WeakLoop;
use larder_block::{
    AlignedBuf, BlockDevice, ByteLen, ByteOffset, ByteRange, Failure, Io, IoError, IoResult, Operation, ReadBuf,
    RequestWatch, WriteBuf, WriteFlags,
};

use crate::copy_pool::CopyPool;
use crate::{Cache, DeviceState};

/// Time after which a device that does not answer counts as failed: half of the time after which a guest resets a
/// SCSI disk, so that the other half is left for the disk. Garbage collection of an SSD takes a second or two, a
/// flush of a busy one some more. An SSD that resets itself may take longer than this, and is not used any more then.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(15);

/// Interval at which the age of requests in flight is checked.
const TICK_INTERVAL: Duration = Duration::from_secs(1);

/// One slot for each tick that a request may take, and one for requests that begin now.
const AGE_SLOTS: usize = (RESPONSE_TIMEOUT.as_secs() / TICK_INTERVAL.as_secs()) as usize + 1;

/// Age in ticks from which a request is late.
const LATE_TICKS: usize = 2;

/// Cache device with its watchdog.
pub(crate) struct CacheDevice {
    this: Weak<Self>,
    cache: Weak<Cache>,
    on: WeakLoop,
    device: Rc<dyn BlockDevice>,
    /// Requests in flight, in a ring by the tick in which they began; `current_tick` is the present tick, and the next
    /// one the oldest.
    ages: [Cell<u32>; AGE_SLOTS],
    current_tick: Cell<usize>,
    timer_running: Cell<bool>,
    is_late: Cell<bool>,
    hanging: Cell<bool>,
    waiters: RefCell<Waiters>,
    read_errors: Cell<u64>,
    write_errors: Cell<u64>,
    /// Bytes that were requested.
    bytes_read: Cell<u64>,
    bytes_written: Cell<u64>,
    pub(crate) copies: CopyPool,
}

/// Wakers of tasks that wait for requests that can be left behind.
#[derive(Default)]
struct Waiters {
    wakers: Vec<Option<Waker>>,
    free: Vec<usize>,
}

impl CacheDevice {
    /// Wraps `device`, which `cache` uses.
    pub(crate) fn new(on: WeakLoop, device: Rc<dyn BlockDevice>, cache: Weak<Cache>) -> Rc<Self> {
        Rc::new_cyclic(|this| Self {
            this: this.clone(),
            cache,
            on,
            device,
            ages: Default::default(),
            current_tick: Cell::new(0),
            timer_running: Cell::new(false),
            is_late: Cell::new(false),
            hanging: Cell::new(false),
            waiters: RefCell::default(),
            read_errors: Cell::new(0),
            write_errors: Cell::new(0),
            bytes_read: Cell::new(0),
            bytes_written: Cell::new(0),
            copies: CopyPool::default(),
        })
    }

    /// Returns whether some requests have been in flight for seconds.
    pub(crate) fn is_late(&self) -> bool {
        self.is_late.get()
    }

    /// Returns whether the device hangs: it did not answer for [`RESPONSE_TIMEOUT`], and has not answered everything
    /// since.
    pub(crate) fn is_hanging(&self) -> bool {
        self.hanging.get()
    }

    /// Returns how many requests have failed or timed out: reads, and others.
    pub(crate) fn errors(&self) -> (u64, u64) {
        (self.read_errors.get(), self.write_errors.get())
    }

    /// Returns the bytes requested so far: read, and written.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (self.bytes_read.get(), self.bytes_written.get())
    }

    /// Reads into a guest's memory; the caller waits for the device however long that takes.
    pub(crate) fn read_for_guest<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        if self.hanging.get() {
            let error = self.timeout_error(Operation::Read, start.range(buffer.byte_len()));
            self.request_failed(&error);
            return Io::ready(Err(error));
        }
        self.bytes_read.set(self.bytes_read.get() + buffer.byte_len().get());
        let mut read = self.device.read(start, buffer);
        let Some(result) = read.take_ready_result() else {
            return read.watched(self, self.begin_request());
        };
        if let Err(error) = &result {
            self.request_failed(error);
        }
        Io::ready(result)
    }

    /// Reads into a part of `memory`, which is lost on error.
    pub(crate) async fn read(
        &self,
        start: ByteOffset,
        mut memory: AlignedBuf,
        part: Range<usize>,
    ) -> IoResult<AlignedBuf> {
        let device = Rc::clone(&self.device);
        let range = start.range(ByteLen::of_buffer(part.len()));
        let steps = async move {
            let read = device.read(start, ReadBuf::new(&mut memory[part])).await;
            read.map(|()| memory)
        };
        self.run_owned(Operation::Read, range, steps).await
    }

    /// Writes a part of `memory`.
    pub(crate) async fn write<M: Deref<Target = [u8]> + 'static>(
        &self,
        start: ByteOffset,
        memory: Rc<M>,
        part: Range<usize>,
        flags: WriteFlags,
    ) -> IoResult {
        let device = Rc::clone(&self.device);
        let range = start.range(ByteLen::of_buffer(part.len()));
        let steps = async move { device.write(start, WriteBuf::new(&memory[part]), flags).await };
        self.run_owned(Operation::Write, range, steps).await
    }

    /// Flushes the device, like [`BlockDevice::flush`].
    pub(crate) async fn flush(&self) -> IoResult {
        let device = Rc::clone(&self.device);
        let steps = async move { device.flush().await };
        self.run_owned(Operation::Flush, ByteRange::default(), steps).await
    }

    /// Closes the device, like [`BlockDevice::close`].
    pub(crate) async fn close(&self) -> IoResult {
        let device = Rc::clone(&self.device);
        let steps = async move { device.close().await };
        self.run_owned(Operation::Flush, ByteRange::default(), steps).await
    }

    /// Runs a request that owns all that it needs.
    async fn run_owned<T: 'static>(
        &self,
        operation: Operation,
        range: ByteRange,
        steps: impl Future<Output = IoResult<T>> + 'static,
    ) -> IoResult<T> {
        let result = match self.hanging.get() {
            true => None,
            false => {
                let count = match operation {
                    Operation::Read => &self.bytes_read,
                    _ => &self.bytes_written,
                };
                count.set(count.get() + range.len.get());
                let request = OwnedRequest { device: self, steps: Some(Box::pin(steps)), in_flight: None };
                request.await
            }
        };
        let result = result.unwrap_or_else(|| Err(self.timeout_error(operation, range)));
        if let Err(error) = &result {
            self.request_failed(error);
        }
        result
    }

    fn timeout_error(&self, operation: Operation, range: ByteRange) -> IoError {
        IoError::new(self.device.name(), operation, range, Failure::Unreachable)
    }

    /// Returns the name of the cache's device.
    pub(crate) fn name(&self) -> &str {
        self.device.name()
    }

    /// Counts a request in flight; returns the tick in which it began, for [`RequestWatch::request_ended`].
    fn begin_request(&self) -> u32 {
        let now = self.current_tick.get();
        self.ages[now].set(self.ages[now].get() + 1);
        if !self.timer_running.get() && !self.hanging.get() {
            self.start_timer();
        }
        now as u32
    }

    fn in_flight(&self) -> u32 {
        self.ages.iter().map(Cell::get).sum()
    }

    fn start_timer(&self) {
        let (this, on) = (self.this.clone(), self.on.clone());
        let Some(spawner) = on.upgrade() else { return };
        self.timer_running.set(true);
        spawner.spawn(async move {
            loop {
                let Some(sleep) = on.upgrade().map(|on| on.sleep(TICK_INTERVAL)) else {
                    return;
                };
                sleep.await;
                match this.upgrade() {
                    Some(fast) if fast.tick() => {}
                    _ => return,
                }
            }
        });
    }

    /// Advances by one tick; returns whether the timer continues.
    fn tick(&self) -> bool {
        let oldest = (self.current_tick.get() + 1) % AGE_SLOTS;
        let is_idle = self.in_flight() == 0;
        let hangs = self.ages[oldest].get() > 0;
        let is_late = (LATE_TICKS..AGE_SLOTS)
            .any(|age| self.ages[(self.current_tick.get() + AGE_SLOTS - age) % AGE_SLOTS].get() > 0);
        self.set_late(is_late);
        if hangs {
            self.mark_hanging();
        }
        let continues = !is_idle && !hangs;
        if continues {
            self.current_tick.set(oldest);
        }
        self.timer_running.set(continues);
        continues
    }

    fn set_late(&self, is_late: bool) {
        if self.is_late.replace(is_late) == is_late {
            return;
        }
        let device = self.device.name();
        match is_late {
            true => tracing::debug!(
                event = "cache-bypassed",
                "reads bypass the cache where the disk has the data: {device} has not answered requests for {} s",
                LATE_TICKS as u64 * TICK_INTERVAL.as_secs()
            ),
            false => tracing::debug!(event = "cache-used", "{device} answers in time: reads use the cache again"),
        }
    }

    fn mark_hanging(&self) {
        self.hanging.set(true);
        let owned = {
            let waiting = self.waiters.borrow();
            waiting.wakers.len() - waiting.free.len()
        };
        if let Some(cache) = self.cache.upgrade() {
            cache.handle_timeout(self.device.name(), RESPONSE_TIMEOUT, self.in_flight() as usize - owned);
        }
        let waiting = self.waiters.borrow();
        waiting.wakers.iter().flatten().for_each(Waker::wake_by_ref);
    }
}

impl RequestWatch for CacheDevice {
    fn request_failed(&self, error: &IoError) {
        if error.failure().is_memory_fault() {
            return;
        }
        let errors = match error.operation() {
            Operation::Read => &self.read_errors,
            _ => &self.write_errors,
        };
        errors.set(errors.get() + 1);
    }

    fn request_ended(&self, began: u32) {
        let age = &self.ages[began as usize];
        age.set(age.get() - 1);
        if self.hanging.get() && self.in_flight() == 0 {
            self.hanging.set(false);
            self.is_late.set(false);
            if let Some(cache) = self.cache.upgrade() {
                cache.handle_recovery(self.device.name());
            }
        }
    }
}

/// Request that is left behind if the device hangs; its output is `None` then.
struct OwnedRequest<'a, F: Future + 'static> {
    device: &'a CacheDevice,
    /// Steps of the request; `None` once it has ended or is left behind.
    steps: Option<Pin<Box<F>>>,
    /// Tick in which the request began, and the index of its waker.
    in_flight: Option<(u32, usize)>,
}

impl<F: Future + 'static> OwnedRequest<'_, F> {
    fn register_waker(&mut self, waker: &Waker) {
        let mut waiting = self.device.waiters.borrow_mut();
        let index = match self.in_flight {
            Some((_, place)) => place,
            None => {
                let index = waiting.free.pop().unwrap_or(waiting.wakers.len());
                if index == waiting.wakers.len() {
                    waiting.wakers.push(None);
                }
                drop(waiting);
                self.in_flight = Some((self.device.begin_request(), index));
                waiting = self.device.waiters.borrow_mut();
                index
            }
        };
        match &mut waiting.wakers[index] {
            Some(registered) => registered.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
    }

    /// Stops waiting; returns the tick in which the request began, if it was in flight.
    fn stop_waiting(&mut self) -> Option<u32> {
        let (began, index) = self.in_flight.take()?;
        let mut waiting = self.device.waiters.borrow_mut();
        waiting.wakers[index] = None;
        waiting.free.push(index);
        Some(began)
    }

    fn orphan(&mut self) {
        let (Some(steps), Some(began)) = (self.steps.take(), self.stop_waiting()) else {
            return;
        };
        let orphaned = OrphanedRequest { device: self.device.this.clone(), steps: Some(steps), began };
        match self.device.on.upgrade() {
            Some(on) => on.spawn(orphaned),
            None => drop(orphaned),
        }
    }
}

impl<F: Future + 'static> Future for OwnedRequest<'_, F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(steps) = &mut self.steps else {
            return Poll::Ready(None);
        };
        if let Poll::Ready(output) = steps.as_mut().poll(context) {
            self.steps = None;
            if let Some(began) = self.stop_waiting() {
                self.device.request_ended(began);
            }
            return Poll::Ready(Some(output));
        }
        self.register_waker(context.waker());
        if self.device.hanging.get() {
            self.orphan();
            return Poll::Ready(None);
        }
        Poll::Pending
    }
}

impl<F: Future + 'static> Drop for OwnedRequest<'_, F> {
    fn drop(&mut self) {
        if self.device.hanging.get() {
            self.orphan();
        }
        // Otherwise a caller that cancels the request may rely on its end.
        self.steps = None;
        if let Some(began) = self.stop_waiting() {
            self.device.request_ended(began);
        }
    }
}

/// Request for which no caller waits. Its memory is the device's until that has answered, or forever if the loop ends
/// first.
struct OrphanedRequest<F: Future> {
    device: Weak<CacheDevice>,
    steps: Option<Pin<Box<F>>>,
    began: u32,
}

impl<F: Future> Future for OrphanedRequest<F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if let Some(steps) = &mut self.steps {
            let _ = std::task::ready!(steps.as_mut().poll(context));
            self.steps = None;
            if let Some(device) = self.device.upgrade() {
                device.request_ended(self.began);
            }
        }
        Poll::Ready(())
    }
}

impl<F: Future> Drop for OrphanedRequest<F> {
    fn drop(&mut self) {
        // Dropping the steps would wait for the device.
        std::mem::forget(self.steps.take());
    }
}

impl Cache {
    /// Handles a device that has not answered for `patience`; `reads` is the number of reads that keep waiting for
    /// it.
    fn handle_timeout(&self, device: &str, patience: Duration, reads: usize) {
        let seconds = patience.as_secs();
        if self.has_failed() {
            tracing::error!(
                event = "cache-hung",
                "{}: {device}, which was its cache, has not answered for {seconds} s; data that only this device has cannot be read until it answers",
                self.lower.name()
            );
            return;
        }
        let waiting = match reads {
            0 => String::new(),
            _ => format!("; reads in flight that still wait for it: {reads}"),
        };
        self.fail(&format_args!("{device} has not answered for {seconds} s{waiting}"));
    }

    /// Handles a device that has answered all its requests after it hung.
    fn handle_recovery(&self, device: &str) {
        tracing::warn!(
            event = "cache-answers",
            "{}: {device}, which was its cache, has answered again",
            self.lower.name()
        );
        let Some(cache) = self.this.upgrade() else { return };
        if self.state.get() == DeviceState::FailedRecorded && self.may_be_dirty.get() {
            self.spawn(async move { cache.rescue().await });
        }
    }
}
