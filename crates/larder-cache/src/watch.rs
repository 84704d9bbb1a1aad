//! Watchdog of the cache device: a device that does not answer for long counts as failed.
//!
//! Requests in flight are counted by the second in which they began, and a timer that runs while there are any
//! advances from second to second. If some are then as old as [`PATIENCE`], the device *hangs*: the cache has failed,
//! and the device gets no request any more until it has answered all earlier ones.
//!
//! Most requests have memory of their own, which they own until they end. A caller that waits for one gets an error
//! when the device hangs, while the request stays with the device ([`LeftBehind`]). A read into a guest's memory
//! cannot be left behind: the device may write there as long as it has not answered, so the caller keeps waiting. For
//! that reason new reads go to the disk once others have been in flight for a while ([`Fast::is_late`]).
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
    AlignedBuf, BlockDevice, ByteLen, ByteOffset, ByteRange, Failure, Io, IoError, IoResult, Operation, ReadBuf, Watch,
    WriteBuf, WriteFlags,
};

use crate::copies::Copies;
use crate::{Cache, State};

/// Time after which a device that does not answer counts as failed: half of the time after which a guest resets a
/// SCSI disk, so that the other half is left for the disk. Garbage collection of an SSD takes a second or two, a
/// flush of a busy one some more. An SSD that resets itself may take longer than this, and is not used any more then.
const PATIENCE: Duration = Duration::from_secs(15);

/// Interval at which the age of requests in flight is checked.
const TICK: Duration = Duration::from_secs(1);

/// One slot for each tick that a request may take, and one for requests that begin now.
const AGES: usize = (PATIENCE.as_secs() / TICK.as_secs()) as usize + 1;

/// Age in ticks from which a request is late.
const LATE: usize = 2;

/// Cache device with its watchdog.
pub(crate) struct Fast {
    this: Weak<Self>,
    cache: Weak<Cache>,
    on: WeakLoop,
    device: Rc<dyn BlockDevice>,
    /// Requests in flight, in a ring by the tick in which they began; `now` is the present tick, and the next one the
    /// oldest.
    ages: [Cell<u32>; AGES],
    now: Cell<usize>,
    is_timed: Cell<bool>,
    is_late: Cell<bool>,
    hangs: Cell<bool>,
    waiting: RefCell<Waiting>,
    read_errors: Cell<u64>,
    write_errors: Cell<u64>,
    /// Bytes that were requested.
    read: Cell<u64>,
    written: Cell<u64>,
    pub(crate) copies: Copies,
}

/// Wakers of tasks that wait for requests that can be left behind.
#[derive(Default)]
struct Waiting {
    wakers: Vec<Option<Waker>>,
    free: Vec<usize>,
}

impl Fast {
    /// Wraps `device`, which `cache` uses.
    pub(crate) fn new(on: WeakLoop, device: Rc<dyn BlockDevice>, cache: Weak<Cache>) -> Rc<Self> {
        Rc::new_cyclic(|this| Self {
            this: this.clone(),
            cache,
            on,
            device,
            ages: Default::default(),
            now: Cell::new(0),
            is_timed: Cell::new(false),
            is_late: Cell::new(false),
            hangs: Cell::new(false),
            waiting: RefCell::default(),
            read_errors: Cell::new(0),
            write_errors: Cell::new(0),
            read: Cell::new(0),
            written: Cell::new(0),
            copies: Copies::default(),
        })
    }

    /// Returns whether some requests have been in flight for seconds.
    pub(crate) fn is_late(&self) -> bool {
        self.is_late.get()
    }

    /// Returns whether the device hangs: it did not answer for [`PATIENCE`], and has not answered everything since.
    pub(crate) fn is_hanging(&self) -> bool {
        self.hangs.get()
    }

    /// Returns how many requests have failed or timed out: reads, and others.
    pub(crate) fn errors(&self) -> (u64, u64) {
        (self.read_errors.get(), self.write_errors.get())
    }

    /// Returns the bytes requested so far: read, and written.
    pub(crate) fn bytes(&self) -> (u64, u64) {
        (self.read.get(), self.written.get())
    }

    /// Reads into a guest's memory; the caller waits for the device however long that takes.
    pub(crate) fn read_for_guest<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        if self.hangs.get() {
            let error = self.no_answer(Operation::Read, start.range(buffer.byte_len()));
            self.failed(&error);
            return Io::ready(Err(error));
        }
        self.read.set(self.read.get() + buffer.byte_len().get());
        let mut read = self.device.read(start, buffer);
        let Some(result) = read.result_now() else {
            return read.watched(self, self.begins());
        };
        if let Err(error) = &result {
            self.failed(error);
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
        self.own(Operation::Read, range, steps).await
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
        self.own(Operation::Write, range, steps).await
    }

    /// Flushes the device, like [`BlockDevice::flush`].
    pub(crate) async fn flush(&self) -> IoResult {
        let device = Rc::clone(&self.device);
        let steps = async move { device.flush().await };
        self.own(Operation::Flush, ByteRange::default(), steps).await
    }

    /// Closes the device, like [`BlockDevice::close`].
    pub(crate) async fn close(&self) -> IoResult {
        let device = Rc::clone(&self.device);
        let steps = async move { device.close().await };
        self.own(Operation::Flush, ByteRange::default(), steps).await
    }

    /// Runs a request that owns all that it needs.
    async fn own<T: 'static>(
        &self,
        operation: Operation,
        range: ByteRange,
        steps: impl Future<Output = IoResult<T>> + 'static,
    ) -> IoResult<T> {
        let result = match self.hangs.get() {
            true => None,
            false => {
                let count = match operation {
                    Operation::Read => &self.read,
                    _ => &self.written,
                };
                count.set(count.get() + range.len.get());
                let request = Request {
                    of: self,
                    steps: Some(Box::pin(steps)),
                    under_way: None,
                };
                request.await
            }
        };
        let result = result.unwrap_or_else(|| Err(self.no_answer(operation, range)));
        if let Err(error) = &result {
            self.failed(error);
        }
        result
    }

    fn no_answer(&self, operation: Operation, range: ByteRange) -> IoError {
        IoError::new(self.device.name(), operation, range, Failure::Unreachable)
    }

    /// Returns the name of the cache's device.
    pub(crate) fn name(&self) -> &str {
        self.device.name()
    }

    /// Counts a request in flight; returns the tick in which it began, for [`Watch::ended`].
    fn begins(&self) -> u32 {
        let now = self.now.get();
        self.ages[now].set(self.ages[now].get() + 1);
        if !self.is_timed.get() && !self.hangs.get() {
            self.start_timer();
        }
        now as u32
    }

    fn under_way(&self) -> u32 {
        self.ages.iter().map(Cell::get).sum()
    }

    fn start_timer(&self) {
        let (this, on) = (self.this.clone(), self.on.clone());
        let Some(spawner) = on.upgrade() else { return };
        self.is_timed.set(true);
        spawner.spawn(async move {
            loop {
                let Some(sleep) = on.upgrade().map(|on| on.sleep(TICK)) else {
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
        let oldest = (self.now.get() + 1) % AGES;
        let is_idle = self.under_way() == 0;
        let hangs = self.ages[oldest].get() > 0;
        self.is_late
            .set((LATE..AGES).any(|age| self.ages[(self.now.get() + AGES - age) % AGES].get() > 0));
        if hangs {
            self.hangs();
        }
        let goes_on = !is_idle && !hangs;
        if goes_on {
            self.now.set(oldest);
        }
        self.is_timed.set(goes_on);
        goes_on
    }

    fn hangs(&self) {
        self.hangs.set(true);
        let own = {
            let waiting = self.waiting.borrow();
            waiting.wakers.len() - waiting.free.len()
        };
        if let Some(cache) = self.cache.upgrade() {
            cache.gets_no_answer(self.device.name(), PATIENCE, self.under_way() as usize - own);
        }
        let waiting = self.waiting.borrow();
        waiting.wakers.iter().flatten().for_each(Waker::wake_by_ref);
    }
}

impl Watch for Fast {
    fn failed(&self, error: &IoError) {
        if error.failure().is_of_memory() {
            return;
        }
        let errors = match error.operation() {
            Operation::Read => &self.read_errors,
            _ => &self.write_errors,
        };
        errors.set(errors.get() + 1);
    }

    fn ended(&self, began: u32) {
        let age = &self.ages[began as usize];
        age.set(age.get() - 1);
        if self.hangs.get() && self.under_way() == 0 {
            self.hangs.set(false);
            self.is_late.set(false);
            if let Some(cache) = self.cache.upgrade() {
                cache.has_answered(self.device.name());
            }
        }
    }
}

/// Request that is left behind if the device hangs; its output is `None` then.
struct Request<'a, F: Future + 'static> {
    of: &'a Fast,
    /// Steps of the request; `None` once it has ended or is left behind.
    steps: Option<Pin<Box<F>>>,
    /// Tick in which the request began, and the index of its waker.
    under_way: Option<(u32, usize)>,
}

impl<F: Future + 'static> Request<'_, F> {
    fn wait(&mut self, waker: &Waker) {
        let mut waiting = self.of.waiting.borrow_mut();
        let place = match self.under_way {
            Some((_, place)) => place,
            None => {
                let place = waiting.free.pop().unwrap_or(waiting.wakers.len());
                if place == waiting.wakers.len() {
                    waiting.wakers.push(None);
                }
                drop(waiting);
                self.under_way = Some((self.of.begins(), place));
                waiting = self.of.waiting.borrow_mut();
                place
            }
        };
        match &mut waiting.wakers[place] {
            Some(own) => own.clone_from(waker),
            none => *none = Some(waker.clone()),
        }
    }

    /// Stops waiting; returns the tick in which the request began, if it was in flight.
    fn ends(&mut self) -> Option<u32> {
        let (began, place) = self.under_way.take()?;
        let mut waiting = self.of.waiting.borrow_mut();
        waiting.wakers[place] = None;
        waiting.free.push(place);
        Some(began)
    }

    fn leave_behind(&mut self) {
        let (Some(steps), Some(began)) = (self.steps.take(), self.ends()) else {
            return;
        };
        let left = LeftBehind {
            of: self.of.this.clone(),
            steps: Some(steps),
            began,
        };
        match self.of.on.upgrade() {
            Some(on) => on.spawn(left),
            None => drop(left),
        }
    }
}

impl<F: Future + 'static> Future for Request<'_, F> {
    type Output = Option<F::Output>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(steps) = &mut self.steps else {
            return Poll::Ready(None);
        };
        if let Poll::Ready(output) = steps.as_mut().poll(context) {
            self.steps = None;
            if let Some(began) = self.ends() {
                self.of.ended(began);
            }
            return Poll::Ready(Some(output));
        }
        self.wait(context.waker());
        if self.of.hangs.get() {
            self.leave_behind();
            return Poll::Ready(None);
        }
        Poll::Pending
    }
}

impl<F: Future + 'static> Drop for Request<'_, F> {
    fn drop(&mut self) {
        if self.of.hangs.get() {
            self.leave_behind();
        }
        // Otherwise a caller that cancels the request may rely on its end.
        self.steps = None;
        if let Some(began) = self.ends() {
            self.of.ended(began);
        }
    }
}

/// Request for which no caller waits. Its memory is the device's until that has answered, or forever if the loop ends
/// first.
struct LeftBehind<F: Future> {
    of: Weak<Fast>,
    steps: Option<Pin<Box<F>>>,
    began: u32,
}

impl<F: Future> Future for LeftBehind<F> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if let Some(steps) = &mut self.steps {
            let _ = std::task::ready!(steps.as_mut().poll(context));
            self.steps = None;
            if let Some(of) = self.of.upgrade() {
                of.ended(self.began);
            }
        }
        Poll::Ready(())
    }
}

impl<F: Future> Drop for LeftBehind<F> {
    fn drop(&mut self) {
        // Dropping the steps would wait for the device.
        std::mem::forget(self.steps.take());
    }
}

impl Cache {
    /// Handles a device that has not answered for `patience`; `reads` is the number of reads that keep waiting for
    /// it.
    fn gets_no_answer(&self, device: &str, patience: Duration, reads: usize) {
        let seconds = patience.as_secs();
        if self.has_failed() {
            tracing::error!(
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
    fn has_answered(&self, device: &str) {
        tracing::warn!(
            "{}: {device}, which was its cache, has answered again",
            self.lower.name()
        );
        let Some(cache) = self.this.upgrade() else { return };
        if self.state.get() == State::Detached && self.may_be_dirty.get() {
            self.spawn(async move { cache.rescue().await });
        }
    }
}
