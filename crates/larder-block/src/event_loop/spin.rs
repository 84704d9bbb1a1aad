//! The decision whether to spin for the next piece of work or to sleep at once, by comparing the saved and the wasted
//! time of earlier spinning.
//!
//! Sleeping costs a wake-up when work arrives; spinning costs the time until it arrives. A [`SpinPredictor`] keeps the
//! balance of the two. While it is positive the loop spins, up to its limit; when it is used up the loop sleeps at
//! once, and retries spinning after a while, ever more rarely as long as that does not pay.
//!
//! A thread that the kernel preempts while it spins has kept another thread from a processor, most likely the QEMU
//! that it waits for. That cost cannot be weighed against a wake-up, so spinning stops then, for longer.

use std::time::{Duration, Instant};

/// The cost of a sleep and a wake-up, in nanoseconds: the two switches, the system call, and on a virtualised host
/// the interrupt to another processor (measured at 10 to 50 us). With a much lower value, any hiccup would stop
/// spinning for a client that needs 20 us between two requests; QEMU's I/O threads spin for as long.
const WAKE_NANOS: i64 = 32_000;

/// The initial balance of a try, in nanoseconds: enough for one fruitless spin of the default limit.
const TRIAL_BALANCE_NANOS: i64 = 60_000;

/// The maximum balance, in nanoseconds, so that a change of the load is noticed soon.
const BALANCE_MAX_NANOS: i64 = 400_000;

/// The maximum number of sleeps between two tries.
const SKIP_MAX: u32 = 64;

/// The minimum and maximum number of sleeps until the next try after the thread was preempted.
const CONTENDED_SKIP_MIN: u32 = 32;
const CONTENDED_SKIP_MAX: u32 = 4096;

/// The maximum time between two checks for work of a spinning thread that is not preempted.
const CHECK_GAP_MAX: Duration = Duration::from_micros(10);

/// The spin decision for one kind of waiting.
#[derive(Debug, Default)]
pub(super) struct SpinPredictor {
    spinning: bool,
    balance_nanos: i64,
    /// The number of short sleeps left before the next try.
    skip: u32,
    /// The number of short sleeps after the next failed try.
    skip_next: u32,
    /// The last try ended because the thread was preempted.
    contended: bool,
}

impl SpinPredictor {
    /// Returns true if the loop should spin now.
    pub(super) fn should_spin(&self) -> bool {
        self.spinning
    }

    /// Records that work came while the loop had been spinning for `spun`.
    pub(super) fn record_hit(&mut self, spun: Duration) {
        self.add_gain(WAKE_NANOS - nanos(spun));
        if self.balance_nanos == BALANCE_MAX_NANOS {
            self.skip_next = 0;
            self.contended = false;
        }
    }

    /// Records that the thread was preempted while it was spinning.
    pub(super) fn record_preemption(&mut self) {
        self.spinning = false;
        self.contended = true;
        self.skip_next = (self.skip_next * 2).clamp(CONTENDED_SKIP_MIN, CONTENDED_SKIP_MAX);
        self.skip = self.skip_next;
    }

    /// Records that work came only after the loop had gone to sleep, having spun for `spun`. `is_new_burst` is true if
    /// the work belongs to another burst.
    pub(super) fn record_sleep(&mut self, spun: Duration, is_new_burst: bool) {
        if self.spinning {
            self.add_gain(-nanos(spun));
        }
        if is_new_burst && !self.contended {
            *self = Self::default();
        } else if !self.spinning && self.skip > 0 {
            self.skip -= 1;
        } else if !self.spinning {
            self.spinning = true;
            self.balance_nanos = TRIAL_BALANCE_NANOS;
        }
    }

    fn add_gain(&mut self, gain_nanos: i64) {
        self.balance_nanos = (self.balance_nanos + gain_nanos).min(BALANCE_MAX_NANOS);
        if self.balance_nanos < 0 {
            self.spinning = false;
            self.skip_next = (self.skip_next * 2).clamp(1, SKIP_MAX);
            self.contended = false;
            // One more than the skips to wait, because one is counted down at once.
            self.skip = self.skip_next + 1;
        }
    }
}

/// Detects preemption of a spinning thread, by reading the clock as often as it checks for work.
#[derive(Debug)]
pub(super) struct PreemptionDetector {
    checked_at: Instant,
    /// The number of involuntary context switches when it was last read.
    involuntary_switches: libc::c_long,
}

impl PreemptionDetector {
    pub(super) fn new() -> Self {
        Self { checked_at: Instant::now(), involuntary_switches: involuntary_switches() }
    }

    /// Starts watching when the thread begins to spin.
    pub(super) fn start(&mut self, now: Instant) {
        self.checked_at = now;
    }

    /// Returns true if the thread was preempted since the last call. A pause alone is no proof: it may be an
    /// interrupt, or the hypervisor below this host.
    pub(super) fn was_preempted(&mut self, now: Instant) -> bool {
        let pause = now - self.checked_at;
        self.checked_at = now;
        if pause <= CHECK_GAP_MAX {
            return false;
        }
        let before = std::mem::replace(&mut self.involuntary_switches, involuntary_switches());
        self.involuntary_switches != before
    }
}

/// Returns the number of involuntary context switches of this thread.
fn involuntary_switches() -> libc::c_long {
    // SAFETY: zeros are a valid `rusage`, and the kernel may fill it.
    unsafe {
        let mut usage: libc::rusage = std::mem::zeroed();
        libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage);
        usage.ru_nivcsw
    }
}

fn nanos(duration: Duration) -> i64 {
    i64::try_from(duration.as_nanos()).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMIT: Duration = Duration::from_micros(50);

    /// Simulates work at the given intervals, and returns the percentage of time spent spinning.
    fn spinning_percent(intervals_micros: impl Iterator<Item = u64>) -> u64 {
        let mut predictor = SpinPredictor::default();
        let (mut spun, mut total) = (Duration::ZERO, Duration::ZERO);
        for interval in intervals_micros.map(Duration::from_micros) {
            total += interval;
            if predictor.should_spin() && interval <= LIMIT {
                spun += interval;
                predictor.record_hit(interval);
            } else {
                let wasted = if predictor.should_spin() { LIMIT } else { Duration::ZERO };
                spun += wasted;
                predictor.record_sleep(wasted, interval > LIMIT * 8);
            }
        }
        (spun.as_nanos() * 100 / total.as_nanos()) as u64
    }

    #[test]
    fn predictor_spins_for_immediate_work() {
        assert!(spinning_percent(std::iter::repeat_n(5, 10_000)) > 95);
    }

    #[test]
    fn predictor_sleeps_for_late_work() {
        assert!(spinning_percent(std::iter::repeat_n(90, 10_000)) < 5);
        assert!(spinning_percent(std::iter::repeat_n(45, 10_000)) < 10);
        assert!(spinning_percent(std::iter::repeat_n(1_000, 10_000)) == 0);
    }

    #[test]
    fn preempted_thread_hardly_spins() {
        let mut predictor = SpinPredictor::default();
        let mut spins = 0;
        for index in 0..10_000 {
            if predictor.should_spin() {
                spins += 1;
                predictor.record_preemption();
            }
            predictor.record_sleep(Duration::ZERO, index % 4 == 0);
        }
        assert!((1..20).contains(&spins), "{spins}");
        // No thread preempts it any more.
        (0..5_000).for_each(|_| predictor.record_sleep(Duration::ZERO, false));
        (0..100).for_each(|_| predictor.record_hit(Duration::from_micros(5)));
        assert!(predictor.should_spin());
    }

    #[test]
    fn one_late_wakeup_keeps_spinning() {
        assert!(spinning_percent((0..10_000).map(|index| if index % 100 == 0 { 90 } else { 5 })) > 80);
    }
}
