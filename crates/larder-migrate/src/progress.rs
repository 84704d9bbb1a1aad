//! Progress of a sender, for monitoring.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use larder_codec::batch::Method;
use larder_codec::select::ClassPick;
use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

use crate::encode::FrameStats;
use crate::stream::StreamFacts;

/// Interval at which lanes update the selector's choice.
const CHOICE_INTERVAL: Duration = Duration::from_millis(250);

/// Counters of a sender, updated by all lanes.
pub struct SenderProgress {
    started: Instant,
    state: Mutex<State>,
}

/// State of the connections to the other host.
#[derive(Clone, Copy, Debug, Default)]
pub struct LinkState {
    /// Number of losses.
    pub losses: u64,
    /// Time of the current loss; `None` while the link is up.
    pub lost_since: Option<Instant>,
    /// Time of the last restoration.
    pub restored_at: Option<Instant>,
}

impl LinkState {
    pub(crate) fn mark_lost(&mut self) {
        self.losses += 1;
        self.lost_since = Some(Instant::now());
    }

    /// Marks the link as restored; returns how long it was lost.
    pub(crate) fn restore(&mut self) -> Duration {
        let now = Instant::now();
        self.restored_at = Some(now);
        self.lost_since.take().map_or(Duration::ZERO, |lost| now - lost)
    }
}

#[derive(Default)]
struct State {
    totals: SenderTotals,
    link: LinkState,
    transit_time: Duration,
    channels: Vec<Option<StreamFacts>>,
    choice: SelectorChoice,
    choice_updated: Option<Instant>,
}

/// Methods that the selector picks now, and the reason.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct SelectorChoice {
    /// Encoder time, in nanoseconds, that saving a byte on the wire is worth.
    pub ns_per_byte: f32,
    /// Choice for each class of pages that has occurred.
    pub classes: Vec<ClassPick>,
}

/// CPU time of a lane's thread, in nanoseconds.
#[derive(Clone, Copy, Debug, Default)]
pub struct CpuUsage {
    /// Total: reading, encoding or decoding, encrypting or decrypting, writing.
    pub total_ns: u64,
    /// Part of the total spent encoding or decoding frames.
    pub codec_ns: u64,
}

/// Meter of the thread's CPU time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuTime {
    since_ns: u64,
    codec_ns: u64,
}

impl CpuTime {
    /// Starts to measure the calling thread now.
    pub(crate) fn now() -> Self {
        let now = clock_gettime(ClockId::ThreadCPUTime);
        Self { since_ns: (now.tv_sec as u64) * 1_000_000_000 + now.tv_nsec as u64, codec_ns: 0 }
    }

    /// Returns the CPU time of the thread since the start.
    pub(crate) fn elapsed(self) -> Duration {
        Duration::from_nanos(Self::now().since_ns.saturating_sub(self.since_ns))
    }

    /// Counts the CPU time since `started` as encoding or decoding.
    pub(crate) fn add_codec_time(&mut self, started: Self) {
        self.codec_ns += Self::now().since_ns.saturating_sub(started.since_ns);
    }

    /// Returns the CPU time since the last call, and starts anew.
    pub(crate) fn lap(&mut self) -> CpuUsage {
        let now = Self::now();
        let usage = CpuUsage { total_ns: now.since_ns.saturating_sub(self.since_ns), codec_ns: self.codec_ns };
        *self = now;
        usage
    }
}

/// Sums since the session began.
#[derive(Clone, Debug, Default, Serialize)]
pub struct SenderTotals {
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

impl SenderProgress {
    /// Creates the counters of a session that begins now.
    #[must_use]
    pub fn new() -> Self {
        Self { started: Instant::now(), state: Mutex::default() }
    }

    /// Returns the sums so far.
    #[must_use]
    pub fn totals(&self) -> SenderTotals {
        self.lock().totals.clone()
    }

    /// Returns the state of the connections.
    #[must_use]
    pub fn link(&self) -> LinkState {
        self.lock().link
    }

    pub(crate) fn mark_link_lost(&self) {
        self.lock().link.mark_lost();
    }

    pub(crate) fn mark_link_restored(&self) -> Duration {
        self.lock().link.restore()
    }

    /// Returns the time since the session began.
    #[must_use]
    pub fn elapsed(&self) -> Duration {
        self.started.elapsed()
    }

    pub(crate) fn add_channel(&self, number: u16) {
        let mut state = self.lock();
        let len = state.channels.len().max(usize::from(number) + 1);
        state.channels.resize(len, None);
    }

    pub(crate) fn set_facts(&self, number: u16, facts: &StreamFacts) {
        if let Some(entry) = self.lock().channels.get_mut(usize::from(number)) {
            *entry = Some(facts.clone());
        }
    }

    /// Counts bytes that the destination's QEMU has taken; `time` is how long the last of them took from QEMU to
    /// QEMU.
    pub(crate) fn add_delivered(&self, bytes: u64, time: Option<Duration>) {
        let mut state = self.lock();
        state.totals.delivered_bytes += bytes;
        if let Some(time) = time {
            state.transit_time = state.transit_time * 7 / 8 + time / 8;
        }
    }

    /// Returns the recent average time of bytes from one QEMU to the other.
    pub fn transit_time(&self) -> Duration {
        self.lock().transit_time
    }

    pub(crate) fn add_frame(&self, raw_len: usize, stats: &FrameStats, encoded: Duration, written: Duration) {
        let mut state = self.lock();
        let totals = &mut state.totals;
        totals.frames += 1;
        totals.raw_bytes += raw_len as u64;
        totals.wire_bytes += u64::from(stats.wire_bytes);
        totals.zero_pages += u64::from(stats.zeros);
        totals.same_pages += u64::from(stats.uniform);
        totals.delta_pages += u64::from(stats.deltas);
        totals.delta_bytes += u64::from(stats.delta_bytes);
        match stats.method {
            None => totals.plain_pages += u64::from(stats.full_pages),
            Some(method) => {
                totals.encoded_pages[method.index()] += u64::from(stats.full_pages);
                totals.encoded_bytes[method.index()] += u64::from(stats.full_pages_bytes);
                if stats.by_device {
                    totals.device_pages += u64::from(stats.full_pages);
                }
            }
        }
        totals.encode_ns += encoded.as_nanos() as u64;
        totals.write_ns += written.as_nanos() as u64;
    }

    /// Returns the selector's choice as last reported.
    #[must_use]
    pub fn choice(&self) -> SelectorChoice {
        self.lock().choice.clone()
    }

    /// Adds CPU time of a lane. Every [`CHOICE_INTERVAL`], also updates the selector's choice by calling `choice`.
    pub(crate) fn add_cpu_usage(&self, usage: CpuUsage, choice: impl FnOnce() -> SelectorChoice) {
        let now = Instant::now();
        let is_due = {
            let mut state = self.lock();
            state.totals.cpu_ns += usage.total_ns;
            state.totals.encode_cpu_ns += usage.codec_ns;
            let is_due = state.choice_updated.is_none_or(|chosen| now - chosen > CHOICE_INTERVAL);
            if is_due {
                state.choice_updated = Some(now);
            }
            is_due
        };
        if is_due {
            let choice = choice();
            self.lock().choice = choice;
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for SenderProgress {
    fn default() -> Self {
        Self::new()
    }
}
