//! Limits a disk's throughput per second: bytes and requests, of reads, of writes, and of both together.
//!
//! The limits are those of libvirt's `<iotune>` and QEMU's throttling, with the same meaning (see [`ThrottleLimits`]).
//! A request within the limits is passed on at once. Otherwise it waits, reads behind reads and writes behind writes,
//! in order of arrival; where both wait for the same limit they take turns. Write-zeroes counts as a write of as many
//! bytes. Flushes and discards are not limited.
//!
//! Invariants:
//! - Only the first request of each queue has a timer. Without limits no request waits and there is no timer.
//! - The queues hold the callers' own requests; nothing is copied, and the memory of the queues is bounded by the
//!   number of requests.
//! - A request that leaves a queue wakes the first of both queues, so none waits for an event that has passed.

mod bucket;
mod limits;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bucket::LeakyBucket;
pub use limits::{RateLimit, ThrottleLimitError, ThrottleLimits};

use crate::buffer::{ReadBuf, WriteBuf};
use crate::device::{BlockDevice, Io, WriteFlags, ZeroFlags};
use crate::event_loop::{Loop, LoopTime, Sleep, WeakLoop};
use crate::filter::Filter;
use crate::units::{ByteLen, ByteOffset, ByteRange};

/// The queue of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Direction {
    Read = 0,
    Write = 1,
}

impl Direction {
    fn other(self) -> Self {
        match self {
            Self::Read => Self::Write,
            Self::Write => Self::Read,
        }
    }
}

/// A device that does no more than its limits allow, over one that may. All promises are the lower device's.
pub struct Throttle {
    lower: Rc<dyn BlockDevice>,
    on: WeakLoop,
    /// Limits are set. Requests check only this if there are none.
    limited: Cell<bool>,
    state: RefCell<State>,
}

struct State {
    limits: ThrottleLimits,
    /// The limits of both directions together.
    total_buckets: [LeakyBucket; 2],
    /// The limits by direction.
    direction_buckets: [[LeakyBucket; 2]; 2],
    queues: [Queue; 2],
    /// The direction whose request goes first when both could.
    next_direction: Direction,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Waiter>,
    next_number: u64,
}

struct Waiter {
    number: u64,
    waker: Waker,
}

impl Throttle {
    /// Creates a throttled layer over `lower`, on the loop `on`.
    ///
    /// # Errors
    /// The limits are invalid.
    pub fn new(on: &Loop, lower: Rc<dyn BlockDevice>, limits: ThrottleLimits) -> Result<Self, ThrottleLimitError> {
        limits.check()?;
        Ok(Self {
            lower,
            on: on.downgrade(),
            limited: Cell::new(limits.is_limited()),
            state: RefCell::new(State::new(limits, on.now())),
        })
    }

    /// Returns the limits that are set.
    pub fn limits(&self) -> ThrottleLimits {
        self.state.borrow().limits
    }

    /// Sets other limits, from now on and for waiting requests too. As in QEMU, earlier requests do not count.
    ///
    /// # Errors
    /// The limits are invalid; the old ones stay in effect.
    pub fn set_limits(&self, limits: ThrottleLimits) -> Result<(), ThrottleLimitError> {
        limits.check()?;
        self.limited.set(limits.is_limited());
        let now = self.now();
        let mut state = self.state.borrow_mut();
        let queues = std::mem::take(&mut state.queues);
        *state = State { queues, ..State::new(limits, now) };
        state.wake_first();
        Ok(())
    }

    /// Returns the number of waiting requests.
    pub fn waiting(&self) -> usize {
        self.state.borrow().queues.iter().map(|queue| queue.waiting.len()).sum()
    }

    fn now(&self) -> LoopTime {
        self.on.upgrade().map_or_else(LoopTime::default, |on| on.now())
    }

    /// Passes a request on, now or when the limits permit.
    #[inline(never)]
    fn throttle_request<'a>(
        &'a self,
        direction: Direction,
        bytes: ByteLen,
        request: impl FnOnce() -> Io<'a> + 'a,
    ) -> Io<'a> {
        if self.state.borrow_mut().admit_first(direction, bytes, self.now()) {
            return request();
        }
        Io::task(async move {
            let admission = Admission { throttle: self, direction, bytes, queue_number: None, timer: None };
            admission.await;
            request().await
        })
    }
}

impl State {
    fn new(limits: ThrottleLimits, now: LoopTime) -> Self {
        let pair = |bytes, requests| [LeakyBucket::new(bytes, now), LeakyBucket::new(requests, now)];
        Self {
            limits,
            total_buckets: pair(limits.bytes_total, limits.requests_total),
            direction_buckets: [
                pair(limits.bytes_read, limits.requests_read),
                pair(limits.bytes_write, limits.requests_write),
            ],
            queues: Default::default(),
            next_direction: Direction::Read,
        }
    }

    fn queue(&mut self, direction: Direction) -> &mut Queue {
        &mut self.queues[direction as usize]
    }

    /// Returns the waiting time of the first request of a direction.
    fn wait(&mut self, direction: Direction, now: LoopTime) -> Duration {
        let buckets = &mut self.direction_buckets[direction as usize];
        let all_buckets = self.total_buckets.iter_mut().chain(buckets);
        all_buckets.map(|bucket| bucket.wait(now)).max().unwrap_or_default()
    }

    /// Returns `Ok` if the first request of a direction may start. Otherwise returns the time after which to check
    /// again, or `None` to be woken.
    fn may_start(&mut self, direction: Direction, now: LoopTime) -> Result<(), Option<Duration>> {
        let wait = self.wait(direction, now);
        if !wait.is_zero() {
            return Err(Some(wait));
        }
        let other = direction.other();
        if self.next_direction == other && !self.queue(other).waiting.is_empty() && self.wait(other, now).is_zero() {
            // The other request now leaves its queue and wakes this one.
            if let Some(first) = self.queue(other).waiting.front() {
                first.waker.wake_by_ref();
            }
            return Err(None);
        }
        Ok(())
    }

    /// Counts a request that starts now.
    fn charge(&mut self, direction: Direction, bytes: ByteLen, now: LoopTime) {
        let amounts = [bytes.get() as f64, self.limits.request_cost(bytes)];
        for buckets in [&mut self.total_buckets, &mut self.direction_buckets[direction as usize]] {
            for (bucket, amount) in buckets.iter_mut().zip(amounts) {
                bucket.fill(amount, now);
            }
        }
        self.next_direction = direction.other();
    }

    /// Admits a new request at once, if none waits before it and the limits permit. Returns true if it was admitted.
    fn admit_first(&mut self, direction: Direction, bytes: ByteLen, now: LoopTime) -> bool {
        let admitted = self.queue(direction).waiting.is_empty() && self.may_start(direction, now).is_ok();
        if admitted {
            self.charge(direction, bytes, now);
        }
        admitted
    }

    fn wake_first(&self) {
        for queue in &self.queues {
            if let Some(first) = queue.waiting.front() {
                first.waker.wake_by_ref();
            }
        }
    }
}

/// A future that completes when a request may start, and counts the request.
struct Admission<'a> {
    throttle: &'a Throttle,
    direction: Direction,
    bytes: ByteLen,
    /// The request's number in its queue, once it has one.
    queue_number: Option<u64>,
    /// Set while the request is the first and has to wait for the limits.
    timer: Option<Sleep>,
}

impl Admission<'_> {
    /// Enters the queue, or renews the waker. Returns true if the request is the first.
    fn enqueue(&mut self, state: &mut State, waker: &Waker) -> bool {
        let queue = state.queue(self.direction);
        let number = *self.queue_number.get_or_insert_with(|| {
            let number = queue.next_number;
            queue.next_number += 1;
            queue.waiting.push_back(Waiter { number, waker: waker.clone() });
            number
        });
        // The numbers ascend, so the queue is sorted.
        if let Ok(index) = queue.waiting.binary_search_by_key(&number, |waiter| waiter.number) {
            let waiter = &mut queue.waiting[index];
            if !waiter.waker.will_wake(waker) {
                waiter.waker = waker.clone();
            }
            return index == 0;
        }
        false
    }

    fn dequeue(&mut self, state: &mut State) {
        let Some(number) = self.queue_number.take() else {
            return;
        };
        let waiting = &mut state.queue(self.direction).waiting;
        if let Ok(index) = waiting.binary_search_by_key(&number, |waiter| waiter.number) {
            waiting.remove(index);
        }
        state.wake_first();
    }
}

impl Future for Admission<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        loop {
            let now = this.throttle.now();
            let state = &mut *this.throttle.state.borrow_mut();
            let first = this.enqueue(state, context.waker());
            this.timer = None;
            if !first {
                return Poll::Pending;
            }
            let wait = match state.may_start(this.direction, now) {
                Ok(()) => {
                    state.charge(this.direction, this.bytes, now);
                    this.dequeue(state);
                    return Poll::Ready(());
                }
                Err(None) => return Poll::Pending,
                Err(Some(wait)) => wait,
            };
            let Some(mut timer) = this.throttle.on.upgrade().map(|on| on.sleep(wait)) else {
                return Poll::Pending;
            };
            if Pin::new(&mut timer).poll(context).is_pending() {
                this.timer = Some(timer);
                return Poll::Pending;
            }
        }
    }
}

impl Drop for Admission<'_> {
    fn drop(&mut self) {
        if self.queue_number.is_some() {
            let throttle = self.throttle;
            self.dequeue(&mut throttle.state.borrow_mut());
        }
    }
}

impl Filter for Throttle {
    fn lower(&self) -> &Rc<dyn BlockDevice> {
        &self.lower
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        if !self.limited.get() {
            return self.lower.read(start, buffer);
        }
        self.throttle_request(Direction::Read, buffer.byte_len(), move || self.lower.read(start, buffer))
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        if !self.limited.get() {
            return self.lower.write(start, buffer, flags);
        }
        self.throttle_request(Direction::Write, buffer.byte_len(), move || self.lower.write(start, buffer, flags))
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        if !self.limited.get() {
            return self.lower.write_zeroes(range, flags);
        }
        self.throttle_request(Direction::Write, range.len, move || self.lower.write_zeroes(range, flags))
    }
}
