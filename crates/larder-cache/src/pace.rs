//! Read latencies. While the cache device is slower than the disk, data that both have is read from the disk.
//!
//! A fast device may be slow at times: an SSD during garbage collection, or one whose bandwidth other programs use.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use larder_block::LoopTime;
use larder_block::histogram::{Histogram, is_due};

/// Average latency of hits below which the cache is used, however fast the disk is: on a host that is short of
/// processors, any request takes some milliseconds at times.
const SLOW_MIN: Duration = Duration::from_millis(10);

/// Reads that must have been timed before an average counts.
const READS_MIN: u32 = 16;

/// One hit in this many that complete in the call is timed, and counts for all: reading the clock twice would cost a
/// tenth of such a hit.
const IN_CALL: u32 = 16;

/// Inverse weight of a read in the moving average.
const SMOOTHING: u32 = 16;

/// Time for which a slow cache is not read from. It doubles each time that the cache is still slow, up to
/// [`REST_MAX`].
const REST_MIN: Duration = Duration::from_secs(1);
const REST_MAX: Duration = Duration::from_secs(32);

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

    fn known(&self) -> Option<Duration> {
        (self.count >= READS_MIN).then_some(self.value)
    }
}

/// Latencies of reads, and the decision that follows from them.
#[derive(Default)]
pub(crate) struct Pace {
    hits: RefCell<Histogram>,
    misses: RefCell<Histogram>,
    /// Hits that completed in the call since one was timed.
    untimed: Cell<u32>,
    hit: Cell<Average>,
    miss: Cell<Average>,
    /// Until this time, the cache is read from only for data that the disk does not have.
    rests_until: Cell<Option<LoopTime>>,
    rest: Cell<Duration>,
}

impl Pace {
    /// Returns whether the next hit is to be timed if it completes in the call.
    pub(crate) fn times_this_one(&self) -> bool {
        is_due(&self.untimed, IN_CALL)
    }

    /// Records a timed hit that completed in the call.
    pub(crate) fn hit_in_call(&self, since: LoopTime, now: LoopTime) {
        self.count_hit(now.since(since), IN_CALL, now);
    }

    /// Records the completion of a read that the cache served entirely; `since` is the time at which it started.
    pub(crate) fn hit(&self, since: LoopTime, now: LoopTime) {
        self.count_hit(now.since(since), 1, now);
    }

    fn count_hit(&self, time: Duration, count: u32, now: LoopTime) {
        self.hits.borrow_mut().add_many(time, count);
        let mut hit = self.hit.get();
        hit.add(time);
        self.hit.set(hit);
        let Some(slow) = hit.known().filter(|time| *time > SLOW_MIN) else {
            if hit.count >= READS_MIN {
                self.rest.set(Duration::ZERO);
            }
            return;
        };
        // If the disk's latency is unknown, reads from the disk will measure it.
        if self.miss.get().known().is_none_or(|disk| disk < slow) && self.rests_until.get().is_none() {
            let rest = (self.rest.get() * 2).clamp(REST_MIN, REST_MAX);
            self.rest.set(rest);
            self.rests_until.set(Some(now.after(rest)));
        }
    }

    /// Records the completion of a read that needed the disk; `since` is the time at which it started.
    pub(crate) fn miss(&self, since: LoopTime, now: LoopTime) {
        let time = now.since(since);
        self.misses.borrow_mut().add(time);
        let mut miss = self.miss.get();
        miss.add(time);
        self.miss.set(miss);
        if self.rests_until.get().is_some() && miss.known().is_some_and(|disk| disk >= self.hit.get().value) {
            // The disk is no faster.
            self.rests_until.set(None);
        }
    }

    /// Returns whether reads should bypass the cache.
    pub(crate) fn rests(&self, now: LoopTime) -> bool {
        let Some(until) = self.rests_until.get() else {
            return false;
        };
        if now < until {
            return true;
        }
        self.rests_until.set(None);
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
