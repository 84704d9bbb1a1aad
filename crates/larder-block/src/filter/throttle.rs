//! Limits how much a disk does per second: bytes and requests, of reads, of writes, and of both together.
//!
//! The limits are those of libvirt's `<iotune>` and QEMU's throttling, and mean the same (see [`Limits`]). A request
//! that comes while there is room goes straight through. Otherwise it waits, reads behind reads and writes behind
//! writes, in the order in which they came; where both wait for the same limit they take turns. Write-zeroes counts
//! as a write of as many bytes. Flushes and discards are not limited.
//!
//! Invariants:
//! - Only the first of each queue has a timer. Without limits nothing waits and there is no timer.
//! - What waits is the callers' own requests; nothing is copied, and the memory for a place in a queue is bounded by
//!   them.
//! - Whoever leaves a queue wakes the first of both, so nobody waits for an event that has passed.

mod bucket;
mod limits;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bucket::Bucket;
pub use limits::{Limit, LimitError, Limits};

use crate::buffer::{ReadBuf, WriteBuf};
use crate::device::{BlockDevice, Io, WriteFlags, ZeroFlags};
use crate::event_loop::{Loop, LoopTime, Sleep, WeakLoop};
use crate::filter::Filter;
use crate::units::{ByteLen, ByteOffset, ByteRange};

/// Which queue.
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
    /// Whether there are limits; all that a request looks at if there are none.
    limited: Cell<bool>,
    state: RefCell<State>,
}

struct State {
    limits: Limits,
    /// Shared by both directions.
    totals: [Bucket; 2],
    /// By direction.
    parts: [[Bucket; 2]; 2],
    queues: [Queue; 2],
    /// Who goes first when both could.
    turn: Direction,
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
    /// `lower`, limited, on `on`.
    ///
    /// # Errors
    /// The limits make no sense.
    pub fn new(on: &Loop, lower: Rc<dyn BlockDevice>, limits: Limits) -> Result<Self, LimitError> {
        limits.check()?;
        Ok(Self {
            lower,
            on: on.downgrade(),
            limited: Cell::new(limits.limits_anything()),
            state: RefCell::new(State::new(limits, on.now())),
        })
    }

    /// The limits that are set.
    pub fn limits(&self) -> Limits {
        self.state.borrow().limits
    }

    /// Sets other limits, from now on and also for what waits. As in QEMU, what was done before does not count.
    ///
    /// # Errors
    /// The limits make no sense; the old ones stay.
    pub fn set_limits(&self, limits: Limits) -> Result<(), LimitError> {
        limits.check()?;
        self.limited.set(limits.limits_anything());
        let now = self.now();
        let mut state = self.state.borrow_mut();
        let queues = std::mem::take(&mut state.queues);
        *state = State {
            queues,
            ..State::new(limits, now)
        };
        state.wake_first();
        Ok(())
    }

    /// How many requests wait.
    pub fn waiting(&self) -> usize {
        self.state.borrow().queues.iter().map(|queue| queue.waiting.len()).sum()
    }

    fn now(&self) -> LoopTime {
        self.on.upgrade().map_or_else(LoopTime::default, |on| on.now())
    }

    /// Lets a request through, now or when there is room.
    #[inline(never)]
    fn pass<'a>(&'a self, direction: Direction, bytes: ByteLen, request: impl FnOnce() -> Io<'a> + 'a) -> Io<'a> {
        if self.state.borrow_mut().admit_first(direction, bytes, self.now()) {
            return request();
        }
        Io::task(async move {
            let admission = Admission {
                throttle: self,
                direction,
                bytes,
                place: None,
                timer: None,
            };
            admission.await;
            request().await
        })
    }
}

impl State {
    fn new(limits: Limits, now: LoopTime) -> Self {
        let pair = |bytes, requests| [Bucket::new(bytes, now), Bucket::new(requests, now)];
        Self {
            limits,
            totals: pair(limits.bytes_total, limits.requests_total),
            parts: [
                pair(limits.bytes_read, limits.requests_read),
                pair(limits.bytes_write, limits.requests_write),
            ],
            queues: Default::default(),
            turn: Direction::Read,
        }
    }

    fn queue(&mut self, direction: Direction) -> &mut Queue {
        &mut self.queues[direction as usize]
    }

    /// How long the first request of a direction has to wait.
    fn wait(&mut self, direction: Direction, now: LoopTime) -> Duration {
        let own = &mut self.parts[direction as usize];
        let all = self.totals.iter_mut().chain(own);
        all.map(|bucket| bucket.wait(now)).max().unwrap_or_default()
    }

    /// Whether the first request of a direction may go, and if not, after how long to ask again; `None` to be woken.
    fn may_go(&mut self, direction: Direction, now: LoopTime) -> Result<(), Option<Duration>> {
        let wait = self.wait(direction, now);
        if !wait.is_zero() {
            return Err(Some(wait));
        }
        let other = direction.other();
        if self.turn == other && !self.queue(other).waiting.is_empty() && self.wait(other, now).is_zero() {
            // It leaves its queue now and wakes us.
            if let Some(first) = self.queue(other).waiting.front() {
                first.waker.wake_by_ref();
            }
            return Err(None);
        }
        Ok(())
    }

    /// Counts a request that goes now.
    fn count(&mut self, direction: Direction, bytes: ByteLen, now: LoopTime) {
        let amounts = [bytes.get() as f64, self.limits.requests(bytes)];
        for buckets in [&mut self.totals, &mut self.parts[direction as usize]] {
            for (bucket, amount) in buckets.iter_mut().zip(amounts) {
                bucket.fill(amount, now);
            }
        }
        self.turn = direction.other();
    }

    /// Lets a request that has just come go at once, if nobody waits before it and there is room.
    fn admit_first(&mut self, direction: Direction, bytes: ByteLen, now: LoopTime) -> bool {
        let goes = self.queue(direction).waiting.is_empty() && self.may_go(direction, now).is_ok();
        if goes {
            self.count(direction, bytes, now);
        }
        goes
    }

    fn wake_first(&self) {
        for queue in &self.queues {
            if let Some(first) = queue.waiting.front() {
                first.waker.wake_by_ref();
            }
        }
    }
}

/// Completes when a request may go; counts it then.
struct Admission<'a> {
    throttle: &'a Throttle,
    direction: Direction,
    bytes: ByteLen,
    /// Its number in its queue, once it has one.
    place: Option<u64>,
    /// Set while it is the first and has to wait for room.
    timer: Option<Sleep>,
}

impl Admission<'_> {
    /// Takes a place, or renews the waker; whether it is the first.
    fn queue_up(&mut self, state: &mut State, waker: &Waker) -> bool {
        let queue = state.queue(self.direction);
        let number = *self.place.get_or_insert_with(|| {
            let number = queue.next_number;
            queue.next_number += 1;
            queue.waiting.push_back(Waiter {
                number,
                waker: waker.clone(),
            });
            number
        });
        // Numbers ascend.
        if let Ok(index) = queue.waiting.binary_search_by_key(&number, |waiter| waiter.number) {
            let waiter = &mut queue.waiting[index];
            if !waiter.waker.will_wake(waker) {
                waiter.waker = waker.clone();
            }
            return index == 0;
        }
        false
    }

    fn leave(&mut self, state: &mut State) {
        let Some(number) = self.place.take() else {
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
            let first = this.queue_up(state, context.waker());
            this.timer = None;
            if !first {
                return Poll::Pending;
            }
            let wait = match state.may_go(this.direction, now) {
                Ok(()) => {
                    state.count(this.direction, this.bytes, now);
                    this.leave(state);
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
        if self.place.is_some() {
            let throttle = self.throttle;
            self.leave(&mut throttle.state.borrow_mut());
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
        self.pass(Direction::Read, buffer.byte_len(), move || {
            self.lower.read(start, buffer)
        })
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        if !self.limited.get() {
            return self.lower.write(start, buffer, flags);
        }
        self.pass(Direction::Write, buffer.byte_len(), move || {
            self.lower.write(start, buffer, flags)
        })
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        if !self.limited.get() {
            return self.lower.write_zeroes(range, flags);
        }
        self.pass(Direction::Write, range.len, move || {
            self.lower.write_zeroes(range, flags)
        })
    }
}
