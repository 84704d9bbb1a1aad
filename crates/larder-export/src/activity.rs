//! What a disk is asked for, through all its exports together, and how long that takes.
//!
//! Every request is counted. One that is not answered in the call, and that is alone, is timed, by the loop's turns. Of those
//! that are answered in the call, and of those that begin beside others, one of so many is timed, and stands for all of
//! them: to time each would cost a twentieth of what they take.

use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use larder_block::histogram::{Histogram, is_due};
use larder_block::{Io, IoError, IoResult, Loop};

/// Of so many requests that are answered in the call one is timed, for all of them.
const IN_CALL: u32 = 16;

/// The same of those that begin while others are under way.
const BESIDE: u32 = 8;

/// Failures that are all told. A dead disk fails every request: the log gets these, then every power of two.
const TOLD_ALL: u64 = 10;

/// What a request asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Kind {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
}

impl Kind {
    const COUNT: usize = 5;
}

/// Counts what a disk is asked for. The numbers only grow. Times are in nanoseconds.
pub struct Activity {
    on: Loop,
    kinds: [Counter; Kind::COUNT],
    errors: Cell<u64>,
    /// Requests that may have been answered in the call since one was timed.
    untimed: Cell<u32>,
    /// Those that have begun beside others since one was timed.
    untimed_beside: Cell<u32>,
    /// Requests under way that were not answered in the call, and since when there are any.
    waiting: Cell<u32>,
    busy_since: Cell<u64>,
    busy: Cell<u64>,
}

#[derive(Default)]
struct Counter {
    requests: Cell<u64>,
    bytes: Cell<u64>,
    errors: Cell<u64>,
    times: RefCell<Histogram>,
}

/// What was counted of requests of one kind.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counts {
    /// Requests that have ended, those that failed included.
    pub requests: u64,
    /// Bytes that were read, written, discarded or zeroed by those that did not fail.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// How long they took.
    pub times: Histogram,
}

fn add(counter: &Cell<u64>, amount: u64) {
    counter.set(counter.get() + amount);
}

impl Activity {
    /// Nothing so far. The exports are on the loop `on`.
    pub fn new(on: &Loop) -> Rc<Self> {
        Rc::new(Self {
            on: on.clone(),
            kinds: Default::default(),
            errors: Cell::new(0),
            untimed: Cell::new(0),
            untimed_beside: Cell::new(0),
            waiting: Cell::new(0),
            busy_since: Cell::new(0),
            busy: Cell::new(0),
        })
    }

    /// What there was of one kind.
    pub fn of(&self, kind: Kind) -> Counts {
        let counter = &self.kinds[kind as usize];
        Counts {
            requests: counter.requests.get(),
            bytes: counter.bytes.get(),
            errors: counter.errors.get(),
            times: counter.times.borrow().clone(),
        }
    }

    /// Requests that are under way.
    pub fn under_way(&self) -> u32 {
        self.waiting.get()
    }

    /// For how long there were any under way.
    pub fn busy(&self) -> Duration {
        let until_now = match self.waiting.get() {
            0 => 0,
            _ => self.on.now().as_nanos().saturating_sub(self.busy_since.get()),
        };
        Duration::from_nanos(self.busy.get() + until_now)
    }

    /// The device has failed a request.
    pub(crate) fn report(&self, error: &IoError) {
        add(&self.errors, 1);
        let errors = self.errors.get();
        if errors <= TOLD_ALL || errors.is_power_of_two() {
            tracing::error!(errors, "{error}");
        }
    }

    /// Begins a request of so many bytes, and counts it when it has ended.
    pub(crate) async fn count<'a>(&self, kind: Kind, bytes: u64, begin: impl FnOnce() -> Io<'a>) -> IoResult {
        let begun = is_due(&self.untimed, IN_CALL).then(|| self.on.now().as_nanos());
        // It is large: where it is made, it stays.
        let mut io = pin!(begin());
        if io.is_ready() {
            let result = io.as_mut().await;
            if let Some(begun) = begun {
                self.timed_in_call(kind, begun);
            }
            self.ended(kind, bytes, result.is_ok());
            return result;
        }
        let waiting = self.wait();
        let result = io.as_mut().await;
        waiting.ended(kind, bytes, result.is_ok());
        result
    }

    /// A request that is not answered in the call begins.
    #[inline]
    pub(crate) fn wait(&self) -> Waiting<'_> {
        let others = self.waiting.get();
        self.waiting.set(others + 1);
        let weight = match others {
            0 => 1,
            _ if is_due(&self.untimed_beside, BESIDE) => BESIDE,
            _ => 0,
        };
        let begun = match weight {
            0 => 0,
            _ => self.on.turn_time().as_nanos(),
        };
        if others == 0 {
            self.busy_since.set(begun);
        }
        Waiting {
            activity: self,
            begun,
            weight,
        }
    }

    /// The time of this turn, or of now if `begun` was in this turn.
    fn time_after(&self, begun: u64) -> u64 {
        match self.on.turn_time().as_nanos() {
            turn if turn > begun => turn,
            _ => self.on.now().as_nanos().max(begun),
        }
    }

    /// The last request that was under way is not any more.
    #[inline(never)]
    fn rests(&self) {
        let since = self.busy_since.get();
        add(&self.busy, self.time_after(since) - since);
    }

    #[inline]
    fn ended(&self, kind: Kind, bytes: u64, succeeded: bool) {
        let counter = &self.kinds[kind as usize];
        add(&counter.requests, 1);
        match succeeded {
            true => add(&counter.bytes, bytes),
            false => add(&counter.errors, 1),
        }
    }

    #[cold]
    fn timed_in_call(&self, kind: Kind, begun: u64) {
        let nanos = self.on.now().as_nanos().saturating_sub(begun);
        self.kinds[kind as usize].times.borrow_mut().add_nanos(nanos, IN_CALL);
        if self.waiting.get() == 0 {
            add(&self.busy, nanos * u64::from(IN_CALL));
        }
    }
}

/// A request that is under way. One that is dropped was given up, or is of no kind that is counted.
pub(crate) struct Waiting<'a> {
    activity: &'a Activity,
    begun: u64,
    /// For how many it is timed; 0 if it is not.
    weight: u32,
}

impl Waiting<'_> {
    /// It has ended, and was one of these.
    #[inline]
    pub(crate) fn ended(self, kind: Kind, bytes: u64, succeeded: bool) {
        if self.weight > 0 {
            self.timed(kind);
        }
        self.activity.ended(kind, bytes, succeeded);
    }

    #[inline(never)]
    fn timed(&self, kind: Kind) {
        let nanos = self.activity.time_after(self.begun) - self.begun;
        let mut times = self.activity.kinds[kind as usize].times.borrow_mut();
        times.add_nanos(nanos, self.weight);
    }
}

impl Drop for Waiting<'_> {
    #[inline]
    fn drop(&mut self) {
        let left = self.activity.waiting.get() - 1;
        self.activity.waiting.set(left);
        if left == 0 {
            self.activity.rests();
        }
    }
}
