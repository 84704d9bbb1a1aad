//! Read latencies. While the cache device is slower than the disk, data that both have is read from the disk.
//!
//! A fast device may be slow at times: an SSD during garbage collection, or one whose bandwidth other programs use.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use larder_block::LoopTime;
use larder_block::histogram::{Histogram, is_sample_due};

/// Average latency of hits below which the cache is used, however fast the disk is: on a host that is short of
/// processors, any request takes some milliseconds at times.
const SLOW_LATENCY_MIN: Duration = Duration::from_millis(10);

/// Reads that must have been timed before an average counts.
const READS_MIN: u32 = 16;

/// One hit in this many that complete in the call is timed, and counts for all: reading the clock twice would cost a
/// tenth of such a hit.
const READY_HITS_PER_SAMPLE: u32 = 16;

/// Inverse weight of a read in the moving average.
const SMOOTHING: u32 = 16;

/// Time for which a slow cache is not read from. It doubles each time that the cache is still slow, up to
/// [`BYPASS_MAX`].
const BYPASS_MIN: Duration = Duration::from_secs(1);
const BYPASS_MAX: Duration = Duration::from_secs(32);

/// Moving average of latencies.
#[derive(Clone, Copy, Debug, Default)]
struct Average {
    value: Duration,
    count: u32,
}

impl Average {
    fn add(&mut self, time: Duration) {
        self.count = self.count.saturating_add(1);
        // The first values have equal weights.
        let weight = self.count.min(SMOOTHING);
        self.value = (self.value * (weight - 1) + time) / weight;
    }

    fn reliable(&self) -> Option<Duration> {
        (self.count >= READS_MIN).then_some(self.value)
    }
}

/// Latencies of reads, and the decision that follows from them.
#[derive(Default)]
pub(crate) struct LatencyBypass {
    hits: RefCell<Histogram>,
    misses: RefCell<Histogram>,
    /// Hits that completed in the call since one was timed.
    untimed: Cell<u32>,
    hit: Cell<Average>,
    miss: Cell<Average>,
    /// Until this time, the cache is read from only for data that the disk does not have.
    bypass_until: Cell<Option<LoopTime>>,
    bypass_time: Cell<Duration>,
}

impl LatencyBypass {
    /// Returns whether the next hit is to be timed if it completes in the call.
    pub(crate) fn should_time_next(&self) -> bool {
        is_sample_due(&self.untimed, READY_HITS_PER_SAMPLE)
    }

    /// Records a timed hit that completed in the call.
    pub(crate) fn record_ready_hit(&self, since: LoopTime, now: LoopTime) {
        self.count_hit(now.since(since), READY_HITS_PER_SAMPLE, now);
    }

    /// Records the completion of a read that the cache served entirely; `since` is the time at which it started.
    pub(crate) fn record_hit(&self, since: LoopTime, now: LoopTime) {
        self.count_hit(now.since(since), 1, now);
    }

    fn count_hit(&self, time: Duration, count: u32, now: LoopTime) {
        self.hits.borrow_mut().add_many(time, count);
        let mut hit = self.hit.get();
        hit.add(time);
        self.hit.set(hit);
        let Some(slow) = hit.reliable().filter(|time| *time > SLOW_LATENCY_MIN) else {
            if hit.count >= READS_MIN {
                self.bypass_time.set(Duration::ZERO);
            }
            return;
        };
        // If the disk's latency is unknown, reads from the disk will measure it.
        if self.miss.get().reliable().is_none_or(|disk| disk < slow) && self.bypass_until.get().is_none() {
            let bypass_time = (self.bypass_time.get() * 2).clamp(BYPASS_MIN, BYPASS_MAX);
            self.bypass_time.set(bypass_time);
            self.bypass_until.set(Some(now.after(bypass_time)));
            tracing::debug!(
                event = "cache-bypassed",
                "reads bypass the cache for {bypass_time:?} where the disk has the data: a hit takes {slow:.1?}"
            );
        }
    }

    /// Records the completion of a read that needed the disk; `since` is the time at which it started.
    pub(crate) fn record_miss(&self, since: LoopTime, now: LoopTime) {
        let time = now.since(since);
        self.misses.borrow_mut().add(time);
        let mut miss = self.miss.get();
        miss.add(time);
        self.miss.set(miss);
        if self.bypass_until.get().is_some() && miss.reliable().is_some_and(|disk| disk >= self.hit.get().value) {
            self.end_bypass("the disk is no faster");
        }
    }

    #[cold]
    fn end_bypass(&self, why: &str) {
        self.bypass_until.set(None);
        tracing::debug!(event = "cache-used", "reads use the cache again: {why}");
    }

    /// Returns whether reads should bypass the cache.
    pub(crate) fn is_active(&self, now: LoopTime) -> bool {
        let Some(until) = self.bypass_until.get() else {
            return false;
        };
        if now < until {
            return true;
        }
        self.end_bypass("its latency is measured again");
        self.hit.set(Average::default());
        false
    }

    pub(crate) fn hits(&self) -> Histogram {
        self.hits.borrow().clone()
    }

    pub(crate) fn misses(&self) -> Histogram {
        self.misses.borrow().clone()
    }
}
