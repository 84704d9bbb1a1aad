//! What a disk is asked for, through all its exports together, and how long that takes.
//!
//! Every request is counted. Those that are not answered in the call are all timed. Of those that are, one of
//! [`IN_CALL`] is, and stands for all of them: asking the clock twice would cost a twentieth of what they take.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::time::Duration;

use larder_block::histogram::Histogram;
use larder_block::{IoError, Loop, LoopTime};

/// Of so many requests that are answered in the call one is timed, for all of them.
const IN_CALL: u32 = 16;

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

/// Counts what a disk is asked for. The numbers only grow.
pub struct Activity {
    on: Loop,
    kinds: [Counter; Kind::COUNT],
    errors: Cell<u64>,
    /// Requests that were answered in the call since one was timed.
    untimed: Cell<u32>,
    /// Requests under way that were not answered in the call, and since when there are any.
    waiting: Cell<u32>,
    busy_since: Cell<LoopTime>,
    busy: Cell<Duration>,
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
            waiting: Cell::new(0),
            busy_since: Cell::default(),
            busy: Cell::default(),
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
            0 => Duration::ZERO,
            _ => self.on.now().since(self.busy_since.get()),
        };
        self.busy.get() + until_now
    }

    /// The device has failed a request.
    pub(crate) fn report(&self, error: &IoError) {
        add(&self.errors, 1);
        let errors = self.errors.get();
        if errors <= TOLD_ALL || errors.is_power_of_two() {
            tracing::error!(errors, "{error}");
        }
    }

    /// Measures a request, which begins now.
    pub(crate) fn timer(&self) -> Timer<'_> {
        Timer {
            activity: self,
            begun: None,
            waits: false,
        }
    }

    fn is_due(&self) -> bool {
        let untimed = self.untimed.get() + 1;
        let is_due = untimed >= IN_CALL;
        self.untimed.set(if is_due { 0 } else { untimed });
        is_due
    }

    fn begin_wait(&self, now: LoopTime) {
        if self.waiting.get() == 0 {
            self.busy_since.set(now);
        }
        self.waiting.set(self.waiting.get() + 1);
    }

    fn end_wait(&self, now: LoopTime) {
        self.waiting.set(self.waiting.get() - 1);
        if self.waiting.get() == 0 {
            self.busy.set(self.busy.get() + now.since(self.busy_since.get()));
        }
    }
}

/// The clock of one request.
pub(crate) struct Timer<'a> {
    activity: &'a Activity,
    /// When it began, if it is timed.
    begun: Option<LoopTime>,
    /// It was not answered in the call, and is under way.
    waits: bool,
}

impl Timer<'_> {
    /// Carries the request out.
    pub(crate) async fn run<T>(&mut self, request: impl Future<Output = T>) -> T {
        let activity = self.activity;
        let mut request = pin!(request);
        std::future::poll_fn(|context| {
            if self.waits {
                return request.as_mut().poll(context);
            }
            if activity.is_due() {
                self.begun = Some(activity.on.now());
            }
            let polled = request.as_mut().poll(context);
            if polled.is_pending() {
                let begun = *self.begun.get_or_insert_with(|| activity.on.turn_time());
                activity.begin_wait(begun);
                self.waits = true;
            }
            polled
        })
        .await
    }

    /// It has ended, and was one of these.
    pub(crate) fn ended(mut self, kind: Kind, bytes: u64, succeeded: bool) {
        let counter = &self.activity.kinds[kind as usize];
        add(&counter.requests, 1);
        match succeeded {
            true => add(&counter.bytes, bytes),
            false => add(&counter.errors, 1),
        }
        if let Some(begun) = self.begun {
            self.timed(counter, begun);
        }
    }

    #[cold]
    fn timed(&mut self, counter: &Counter, begun: LoopTime) {
        let activity = self.activity;
        if std::mem::take(&mut self.waits) {
            let now = activity.on.turn_time();
            counter.times.borrow_mut().add(now.since(begun));
            activity.end_wait(now);
        } else {
            let time = activity.on.now().since(begun);
            counter.times.borrow_mut().add_many(time, IN_CALL);
            if activity.waiting.get() == 0 {
                activity.busy.set(activity.busy.get() + time * IN_CALL);
            }
        }
    }
}

impl Drop for Timer<'_> {
    /// One that was given up, or is of no kind that is counted, is under way no more.
    fn drop(&mut self) {
        if self.waits {
            self.activity.end_wait(self.activity.on.turn_time());
        }
    }
}
