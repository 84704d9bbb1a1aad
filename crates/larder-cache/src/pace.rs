//! How long reads take, and whether the cache device is slower than the disk: then what both have is read from the disk
//! for a while.
//!
//! A fast device may be slow at times: an SSD that tidies up, or one whose bandwidth somebody else takes.

use std::cell::{Cell, RefCell};
use std::time::Duration;

use larder_block::LoopTime;
use larder_block::histogram::{Histogram, is_due};

/// Hits that are quicker than this on average are left to the cache, whatever the disk can do: on a host that is short of
/// processors anything takes some milliseconds at times.
const SLOW_MIN: Duration = Duration::from_millis(10);

/// So many reads must have been timed before anything is concluded from them.
const READS_MIN: u32 = 16;

/// Of so many hits that are answered in the call one is timed, for all of them: asking the clock twice would cost a tenth
/// of what they take.
const IN_CALL: u32 = 16;

/// The weight of a read in the average is one over this.
const SMOOTHING: u32 = 16;

/// How long a cache that is slow is left alone; twice as long each time that it still is, up to the most.
const REST_MIN: Duration = Duration::from_secs(1);
const REST_MAX: Duration = Duration::from_secs(32);

/// A moving average of times.
#[derive(Clone, Copy, Debug, Default)]
struct Average {
    value: Duration,
    count: u32,
}

impl Average {
    fn add(&mut self, time: Duration) {
        self.count = self.count.saturating_add(1);
        // The plain mean at first.
        let weight = self.count.min(SMOOTHING);
        self.value = (self.value * (weight - 1) + time) / weight;
    }

    fn known(&self) -> Option<Duration> {
        (self.count >= READS_MIN).then_some(self.value)
    }
}

/// What reads are timed for.
#[derive(Default)]
pub(crate) struct Pace {
    hits: RefCell<Histogram>,
    misses: RefCell<Histogram>,
    /// Hits that were answered in the call since one was timed.
    untimed: Cell<u32>,
    hit: Cell<Average>,
    miss: Cell<Average>,
    /// The cache is not read from until then if that can be avoided.
    rests_until: Cell<Option<LoopTime>>,
    rest: Cell<Duration>,
}

impl Pace {
    /// Whether the next hit is to be timed if it is answered in the call.
    pub(crate) fn times_this_one(&self) -> bool {
        is_due(&self.untimed, IN_CALL)
    }

    /// A hit that was to be timed has been answered in the call.
    pub(crate) fn hit_in_call(&self, since: LoopTime, now: LoopTime) {
        self.count_hit(now.since(since), IN_CALL, now);
    }

    /// A read that the cache had all of was made at `since`, and is complete.
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
        // What is not known of the disk is found out by reading from it.
        if self.miss.get().known().is_none_or(|disk| disk < slow) && self.rests_until.get().is_none() {
            let rest = (self.rest.get() * 2).clamp(REST_MIN, REST_MAX);
            self.rest.set(rest);
            self.rests_until.set(Some(now.after(rest)));
        }
    }

    /// A read that the disk was needed for was made at `since`, and is complete.
    pub(crate) fn miss(&self, since: LoopTime, now: LoopTime) {
        let time = now.since(since);
        self.misses.borrow_mut().add(time);
        let mut miss = self.miss.get();
        miss.add(time);
        self.miss.set(miss);
        if self.rests_until.get().is_some() && miss.known().is_some_and(|disk| disk >= self.hit.get().value) {
            // The disk is no better.
            self.rests_until.set(None);
        }
    }

    /// Whether the cache is to be left alone.
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
