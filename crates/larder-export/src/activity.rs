//! Statistics of a disk's requests, across all its exports: counts and durations.
//!
//! Every request is counted. Durations are sampled: a request that does not complete within the call, and that is
//! alone, is always timed, with the time of the loop's turns. One in a fixed number is timed, with that weight, of the
//! requests that complete within the call and of those that begin while others are in flight. Timing each of them
//! would cost a twentieth of their duration.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use larder_block::histogram::{Histogram, is_sample_due};
use larder_block::{Io, IoError, IoResult, Loop, Operation};

/// Sampling rate of requests that complete within the call: one of so many is timed.
const SYNC_SAMPLE_INTERVAL: u32 = 16;

/// Sampling rate of requests that begin while others are in flight.
const CONCURRENT_SAMPLE_INTERVAL: u32 = 8;

/// Number of failures that are all logged. A dead disk fails every request, so further failures are logged only when
/// their count is a power of two.
const ERRORS_LOGGED_SINGLY_MAX: u64 = 10;

/// Duration in nanoseconds from which a timed request is slow; also the minimum time between two events of slow
/// requests.
const SLOW_NANOS: u64 = 1_000_000_000;

/// Kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum RequestKind {
    Read,
    Write,
    Flush,
    Discard,
    WriteZeroes,
}

impl RequestKind {
    const COUNT: usize = 5;

    const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Flush => "flush",
            Self::Discard => "discard",
            Self::WriteZeroes => "write-zeroes request",
        }
    }
}

/// Statistics of a disk's requests. Counters only grow. Times are in nanoseconds.
pub struct Activity {
    on: Loop,
    kinds: [Counter; RequestKind::COUNT],
    errors: Cell<u64>,
    /// Requests since the last timed one that may have completed within the call.
    untimed: Cell<u32>,
    /// Requests since the last timed one that began while others were in flight.
    untimed_concurrent: Cell<u32>,
    /// Requests in flight that did not complete within the call, and the start of this busy period.
    in_flight: Cell<u32>,
    busy_since: Cell<u64>,
    busy: Cell<u64>,
    /// Time of the last event of a slow request.
    slow_logged_at: Cell<u64>,
}

#[derive(Default)]
struct Counter {
    requests: Cell<u64>,
    bytes: Cell<u64>,
    errors: Cell<u64>,
    times: RefCell<Histogram>,
}

/// Statistics of one kind of request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestTotals {
    /// Requests that have ended, failed ones included.
    pub requests: u64,
    /// Bytes that successful requests read, wrote, discarded or zeroed.
    pub bytes: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Durations of the requests.
    pub times: Histogram,
}

/// Returns the kind of the event of a failed request.
const fn failure_event(operation: Operation) -> &'static str {
    match operation {
        Operation::Read => "read-failed",
        Operation::Write => "write-failed",
        Operation::Flush => "flush-failed",
        Operation::Discard => "discard-failed",
        Operation::WriteZeroes => "write-zeroes-failed",
        Operation::Extents => "extents-failed",
        Operation::Grow => "growth-failed",
    }
}

fn add(counter: &Cell<u64>, amount: u64) {
    counter.set(counter.get() + amount);
}

impl Activity {
    /// Creates statistics without requests. The exports run on the loop `on`.
    pub fn new(on: &Loop) -> Rc<Self> {
        Rc::new(Self {
            on: on.clone(),
            kinds: Default::default(),
            errors: Cell::new(0),
            untimed: Cell::new(0),
            untimed_concurrent: Cell::new(0),
            in_flight: Cell::new(0),
            busy_since: Cell::new(0),
            busy: Cell::new(0),
            slow_logged_at: Cell::new(0),
        })
    }

    /// Returns the statistics of one kind of request.
    pub fn totals(&self, kind: RequestKind) -> RequestTotals {
        let counter = &self.kinds[kind as usize];
        RequestTotals {
            requests: counter.requests.get(),
            bytes: counter.bytes.get(),
            errors: counter.errors.get(),
            times: counter.times.borrow().clone(),
        }
    }

    /// Returns the number of requests in flight.
    pub fn in_flight(&self) -> u32 {
        self.in_flight.get()
    }

    /// Returns the total time for which requests were in flight.
    pub fn busy(&self) -> Duration {
        let until_now = match self.in_flight.get() {
            0 => 0,
            _ => self.on.now().as_nanos().saturating_sub(self.busy_since.get()),
        };
        Duration::from_nanos(self.busy.get() + until_now)
    }

    /// Counts an error of the device, and logs it.
    pub(crate) fn report(&self, error: &IoError) {
        add(&self.errors, 1);
        let errors = self.errors.get();
        if errors <= ERRORS_LOGGED_SINGLY_MAX || errors.is_power_of_two() {
            tracing::error!(event = failure_event(error.operation()), errors, "{error}");
        }
    }

    /// Logs a slow request, unless another one was logged a moment ago.
    #[cold]
    fn report_slow(&self, kind: RequestKind, nanos: u64) {
        let now = self.on.now().as_nanos();
        if now.saturating_sub(self.slow_logged_at.get()) < SLOW_NANOS {
            return;
        }
        self.slow_logged_at.set(now);
        let seconds = Duration::from_nanos(nanos).as_secs_f64();
        tracing::debug!(event = "slow-request", "a {} took {seconds:.1} s", kind.name());
    }

    /// Returns the time, if the next request is to be timed in case that it completes within the call.
    #[inline]
    pub(crate) fn sample_start(&self) -> Option<u64> {
        is_sample_due(&self.untimed, SYNC_SAMPLE_INTERVAL).then(|| self.on.now().as_nanos())
    }

    /// Waits for a request of `bytes` bytes, and counts it. `started_at` is the result of [`Self::sample_start`] before
    /// the request was started.
    #[inline]
    pub(crate) async fn wait_and_count(
        &self,
        kind: RequestKind,
        bytes: u64,
        started_at: Option<u64>,
        io: &mut Io<'_>,
    ) -> IoResult {
        if let Some(result) = io.take_ready_result() {
            if let Some(started_at) = started_at {
                self.record_sync_duration(kind, started_at);
            }
            self.count_ended(kind, bytes, result.is_ok());
            return result;
        }
        let request = self.start_request();
        let result = io.await;
        request.finish(kind, bytes, result.is_ok());
        result
    }

    /// Registers the start of a request that does not complete within the call.
    #[inline]
    pub(crate) fn start_request(&self) -> InFlightRequest<'_> {
        let in_flight = self.in_flight.get();
        self.in_flight.set(in_flight + 1);
        let weight = match in_flight {
            0 => 1,
            _ if is_sample_due(&self.untimed_concurrent, CONCURRENT_SAMPLE_INTERVAL) => CONCURRENT_SAMPLE_INTERVAL,
            _ => 0,
        };
        let started_at = match weight {
            0 => 0,
            _ => self.on.turn_time().as_nanos(),
        };
        if in_flight == 0 {
            self.busy_since.set(started_at);
        }
        InFlightRequest { activity: self, started_at, weight }
    }

    /// Returns the time of this turn, or the present time if `started_at` was in this turn.
    fn time_after(&self, started_at: u64) -> u64 {
        match self.on.turn_time().as_nanos() {
            turn if turn > started_at => turn,
            _ => self.on.now().as_nanos().max(started_at),
        }
    }

    /// Ends the busy period when the last request in flight has ended.
    #[inline(never)]
    fn end_busy_period(&self) {
        let since = self.busy_since.get();
        add(&self.busy, self.time_after(since) - since);
    }

    #[inline]
    fn count_ended(&self, kind: RequestKind, bytes: u64, succeeded: bool) {
        let counter = &self.kinds[kind as usize];
        add(&counter.requests, 1);
        match succeeded {
            true => add(&counter.bytes, bytes),
            false => add(&counter.errors, 1),
        }
    }

    #[cold]
    fn record_sync_duration(&self, kind: RequestKind, started_at: u64) {
        let nanos = self.on.now().as_nanos().saturating_sub(started_at);
        self.kinds[kind as usize].times.borrow_mut().add_nanos(nanos, SYNC_SAMPLE_INTERVAL);
        if nanos >= SLOW_NANOS {
            self.report_slow(kind, nanos);
        }
        if self.in_flight.get() == 0 {
            add(&self.busy, nanos * u64::from(SYNC_SAMPLE_INTERVAL));
        }
    }
}

/// Request in flight. Dropping it means that the request was cancelled, or is of a kind that is not counted.
pub(crate) struct InFlightRequest<'a> {
    activity: &'a Activity,
    started_at: u64,
    /// Number of requests that this one is timed for; 0 if it is not timed.
    weight: u32,
}

impl InFlightRequest<'_> {
    /// Counts the request as ended.
    #[inline(always)]
    pub(crate) fn finish(self, kind: RequestKind, bytes: u64, succeeded: bool) {
        if self.weight > 0 {
            self.record_duration(kind);
        }
        self.activity.count_ended(kind, bytes, succeeded);
    }

    #[inline(never)]
    fn record_duration(&self, kind: RequestKind) {
        let nanos = self.activity.time_after(self.started_at) - self.started_at;
        let mut times = self.activity.kinds[kind as usize].times.borrow_mut();
        times.add_nanos(nanos, self.weight);
        if nanos >= SLOW_NANOS {
            self.activity.report_slow(kind, nanos);
        }
    }
}

impl Drop for InFlightRequest<'_> {
    #[inline]
    fn drop(&mut self) {
        let remaining = self.activity.in_flight.get() - 1;
        self.activity.in_flight.set(remaining);
        if remaining == 0 {
            self.activity.end_busy_period();
        }
    }
}
