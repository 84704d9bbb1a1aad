//! Progress of a sender, for monitoring.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use larder_codec::batch::Method;
use larder_codec::select::Chosen;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use crate::encode::Outcome;
use crate::stream::Facts;

/// Interval at which lanes update the selector's choice.
const CHOICE_EVERY: Duration = Duration::from_millis(250);

/// Counters of a sender, updated by all lanes.
pub struct Progress {
    begun: Instant,
    state: Mutex<State>,
}

/// State of the connections to the other host.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinkState {
    /// Number of losses.
    pub losses: u64,
    /// Time of the current loss; `None` while the link is up.
    pub lost: Option<Instant>,
    /// Time of the last restoration.
    pub back: Option<Instant>,
}

impl LinkState {
    pub(crate) fn lose(&mut self) {
        self.losses += 1;
        self.lost = Some(Instant::now());
    }

    /// Marks the link as restored; returns how long it was lost.
    pub(crate) fn restore(&mut self) -> Duration {
        let now = Instant::now();
        self.back = Some(now);
        self.lost.take().map_or(Duration::ZERO, |lost| now - lost)
    }
}

#[derive(Default)]
struct State {
    totals: Totals,
    link: LinkState,
    flight: Duration,
    channels: Vec<Option<Facts>>,
    choice: Choice,
    chosen: Option<Instant>,
}

/// Methods that the selector picks now, and the reason.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choice {
    /// Encoder time, in nanoseconds, that saving a byte on the wire is worth.
    pub ns_per_byte: f32,
    /// Choice for each class of pages that has occurred.
    pub classes: Vec<Chosen>,
}

/// CPU time of a lane's thread, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct Spent {
    /// Total: reading, encoding or decoding, encrypting or decrypting, writing.
    pub all_ns: u64,
    /// Part of the total spent encoding or decoding frames.
    pub work_ns: u64,
}

/// Meter of the thread's CPU time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuTime {
    since_ns: u64,
    work_ns: u64,
}

impl CpuTime {
    /// Starts to measure the calling thread now.
    pub(crate) fn of_thread() -> Self {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        Self {
            since_ns: (now.tv_sec as u64) * 1_000_000_000 + now.tv_nsec as u64,
            work_ns: 0,
        }
    }

    /// Returns the CPU time of the thread since the start.
    pub(crate) fn elapsed(self) -> Duration {
        Duration::from_nanos(Self::of_thread().since_ns.saturating_sub(self.since_ns))
    }

    /// Counts the CPU time since `begun` as encoding or decoding.
    pub(crate) fn worked(&mut self, begun: Self) {
        self.work_ns += Self::of_thread().since_ns.saturating_sub(begun.since_ns);
    }

    /// Returns the CPU time since the last call, and starts anew.
    pub(crate) fn spent(&mut self) -> Spent {
        let now = Self::of_thread();
        let spent = Spent {
            all_ns: now.since_ns.saturating_sub(self.since_ns),
            work_ns: self.work_ns,
        };
        *self = now;
        spent
    }
}

/// Sums since the session began.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Totals {
    /// Bytes of QEMU's channels in frames.
    pub raw_bytes: u64,
    /// Bytes of frames.
    pub wire_bytes: u64,
    /// Bytes that the destination's QEMU has taken.
    pub delivered_bytes: u64,
    /// Number of frames.
    pub frames: u64,
    /// Zero pages that QEMU sent as zero-page records.
    pub zero_pages: u64,
    /// Uniform pages.
    pub same_pages: u64,
    /// Pages sent as deltas to an older version.
    pub delta_pages: u64,
    /// Bytes of the deltas.
    pub delta_bytes: u64,
    /// Pages sent without encoding.
    pub plain_pages: u64,
    /// Pages sent encoded, by the index of the method.
    pub encoded_pages: [u64; Method::COUNT],
    /// Bytes of the encoded pages, by the index of the method.
    pub encoded_bytes: [u64; Method::COUNT],
    /// Encoded pages that a device has encoded.
    pub device_pages: u64,
    /// Nanoseconds that lanes spent encoding frames.
    pub encode_ns: u64,
    /// Nanoseconds that lanes waited for the link.
    pub write_ns: u64,
    /// Nanoseconds of CPU time of the lanes in total.
    pub cpu_ns: u64,
    /// Part of the CPU time spent encoding frames.
    pub encode_cpu_ns: u64,
}

impl Progress {
    /// Creates the counters of a session that begins now.
    #[must_use]
    pub fn new() -> Self {
        Self {
            begun: Instant::now(),
            state: Mutex::default(),
        }
    }

    /// Returns the sums so far.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.lock().totals.clone()
    }

    /// Returns the state of the connections.
    #[must_use]
    pub fn link(&self) -> LinkState {
        self.lock().link
    }

    pub(crate) fn link_lost(&self) {
        self.lock().link.lose();
    }

    pub(crate) fn link_back(&self) -> Duration {
        self.lock().link.restore()
    }

    /// Returns the time since the session began.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    pub(crate) fn channel_opened(&self, number: u16) {
        let mut state = self.lock();
        let len = state.channels.len().max(usize::from(number) + 1);
        state.channels.resize(len, None);
    }

    pub(crate) fn facts(&self, number: u16, facts: &Facts) {
        if let Some(place) = self.lock().channels.get_mut(usize::from(number)) {
            *place = Some(facts.clone());
        }
    }

    /// Counts bytes that the destination's QEMU has taken; `time` is how long the last of them took from QEMU to
    /// QEMU.
    pub(crate) fn delivered(&self, bytes: u64, time: Option<Duration>) {
        let mut state = self.lock();
        state.totals.delivered_bytes += bytes;
        if let Some(time) = time {
            state.flight = state.flight * 7 / 8 + time / 8;
        }
    }

    /// Returns the recent average time of bytes from one QEMU to the other.
    pub fn flight(&self) -> Duration {
        self.lock().flight
    }

    pub(crate) fn sent(&self, raw_len: usize, outcome: &Outcome, encoded: Duration, written: Duration) {
        let mut state = self.lock();
        let totals = &mut state.totals;
        totals.frames += 1;
        totals.raw_bytes += raw_len as u64;
        totals.wire_bytes += u64::from(outcome.wire_bytes);
        totals.zero_pages += u64::from(outcome.zeros);
        totals.same_pages += u64::from(outcome.same);
        totals.delta_pages += u64::from(outcome.deltas);
        totals.delta_bytes += u64::from(outcome.delta_bytes);
        match outcome.method {
            None => totals.plain_pages += u64::from(outcome.whole),
            Some(method) => {
                totals.encoded_pages[method.index()] += u64::from(outcome.whole);
                totals.encoded_bytes[method.index()] += u64::from(outcome.whole_bytes);
                if outcome.by_device {
                    totals.device_pages += u64::from(outcome.whole);
                }
            }
        }
        totals.encode_ns += encoded.as_nanos() as u64;
        totals.write_ns += written.as_nanos() as u64;
    }

    /// Returns the selector's choice as last reported.
    #[must_use]
    pub fn choice(&self) -> Choice {
        self.lock().choice.clone()
    }

    /// Adds CPU time of a lane. Every [`CHOICE_EVERY`], also updates the selector's choice by calling `choice`.
    pub(crate) fn spent(&self, spent: Spent, choice: impl FnOnce() -> Choice) {
        let now = Instant::now();
        let is_time = {
            let mut state = self.lock();
            state.totals.cpu_ns += spent.all_ns;
            state.totals.encode_cpu_ns += spent.work_ns;
            let is_time = state.chosen.is_none_or(|chosen| now - chosen > CHOICE_EVERY);
            if is_time {
                state.chosen = Some(now);
            }
            is_time
        };
        if is_time {
            let choice = choice();
            self.lock().choice = choice;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Progress {
    fn default() -> Self {
        Self::new()
    }
}
