//! Whether to spin for the next piece of work or to sleep at once: what spinning has saved against what it has cost.
//!
//! Sleeping costs a wake-up when work comes; spinning costs the time until it comes. A [`Predictor`] keeps the balance
//! of the two. While it is positive the loop spins, up to its limit; when it runs out the loop sleeps at once, and tries
//! again after a while, ever more rarely as long as that does not pay.
//!
//! A thread that is stopped while it spins has kept somebody else from a processor, most likely the QEMU that it waits
//! for. That cannot be weighed against a wake-up, so spinning ends there, for longer.

use std::time::{Duration, Instant};

/// What a sleep and a wake-up cost, in nanoseconds: the two switches, the system call, and on a virtualised host the
/// interrupt to another processor (measured at 10 to 50 us). Much less, and a client that needs 20 us between two requests
/// is not worth spinning for after any hiccup; QEMU's I/O threads spin for as long.
const WAKE_NANOS: i64 = 32_000;

/// The balance a try begins with, in nanoseconds: room for one spin in vain of the default limit.
const TRY_NANOS: i64 = 60_000;

/// The most that is saved up, so that a change of the load is noticed soon.
const BALANCE_MAX_NANOS: i64 = 400_000;

/// Sleeps between two tries at most.
const SKIP_MAX: u32 = 64;

/// Sleeps until the next try after somebody else had wanted the processor, at least and at most.
const CONTENDED_SKIP_MIN: u32 = 32;
const CONTENDED_SKIP_MAX: u32 = 4096;

/// Who spins looks for work more often than this, unless it is stopped.
const LOOK_MAX: Duration = Duration::from_micros(10);

/// Decides for one kind of waiting.
#[derive(Debug, Default)]
pub(super) struct Predictor {
    spinning: bool,
    balance_nanos: i64,
    /// Short sleeps before the next try.
    skip: u32,
    /// As many after the next failure.
    skip_next: u32,
    /// The last try ended because somebody else wanted the processor.
    contended: bool,
}

impl Predictor {
    /// Whether to spin now.
    pub(super) fn spins(&self) -> bool {
        self.spinning
    }

    /// Work came while the loop had been spinning for `spun`.
    pub(super) fn found(&mut self, spun: Duration) {
        self.add(WAKE_NANOS - nanos(spun));
        if self.balance_nanos == BALANCE_MAX_NANOS {
            self.skip_next = 0;
            self.contended = false;
        }
    }

    /// Spinning was stopped: somebody else wanted the processor.
    pub(super) fn stopped(&mut self) {
        self.spinning = false;
        self.contended = true;
        self.skip_next = (self.skip_next * 2).clamp(CONTENDED_SKIP_MIN, CONTENDED_SKIP_MAX);
        self.skip = self.skip_next;
    }

    /// Work came only after the loop had gone to sleep, having spun for `spun`. It was a `long` sleep if the work belongs
    /// to another burst.
    pub(super) fn slept(&mut self, spun: Duration, long: bool) {
        if self.spinning {
            self.add(-nanos(spun));
        }
        if long && !self.contended {
            *self = Self::default();
        } else if !self.spinning && self.skip > 0 {
            self.skip -= 1;
        } else if !self.spinning {
            self.spinning = true;
            self.balance_nanos = TRY_NANOS;
        }
    }

    fn add(&mut self, gain_nanos: i64) {
        self.balance_nanos = (self.balance_nanos + gain_nanos).min(BALANCE_MAX_NANOS);
        if self.balance_nanos < 0 {
            self.spinning = false;
            self.skip_next = (self.skip_next * 2).clamp(1, SKIP_MAX);
            self.contended = false;
            // One more than is counted down at once.
            self.skip = self.skip_next + 1;
        }
    }
}

/// Sees whether a thread that spins is stopped for another one, by looking at the time as often as at the work.
#[derive(Debug)]
pub(super) struct Watch {
    looked: Instant,
    /// How often the kernel had stopped the thread for others when that was last asked.
    stops: libc::c_long,
}

impl Watch {
    pub(super) fn new() -> Self {
        Self {
            looked: Instant::now(),
            stops: stops(),
        }
    }

    /// The thread begins to spin.
    pub(super) fn begin(&mut self, now: Instant) {
        self.looked = now;
    }

    /// The thread spins on; whether it was stopped since it last looked. A pause alone does not say so: it may be an
    /// interrupt, or the host of this host.
    pub(super) fn was_stopped(&mut self, now: Instant) -> bool {
        let pause = now - self.looked;
        self.looked = now;
        if pause <= LOOK_MAX {
            return false;
        }
        let before = std::mem::replace(&mut self.stops, stops());
        self.stops != before
    }
}

/// How often the kernel has stopped this thread for another one.
fn stops() -> libc::c_long {
    // SAFETY: zeros are a valid `rusage`, and it is one that the kernel may fill.
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

    /// Lets work come at these intervals; how much of the time was spent spinning, in percent.
    fn spinning_percent(intervals_micros: impl Iterator<Item = u64>) -> u64 {
        let mut predictor = Predictor::default();
        let (mut spun, mut total) = (Duration::ZERO, Duration::ZERO);
        for interval in intervals_micros.map(Duration::from_micros) {
            total += interval;
            if predictor.spins() && interval <= LIMIT {
                spun += interval;
                predictor.found(interval);
            } else {
                let wasted = if predictor.spins() { LIMIT } else { Duration::ZERO };
                spun += wasted;
                predictor.slept(wasted, interval > LIMIT * 8);
            }
        }
        (spun.as_nanos() * 100 / total.as_nanos()) as u64
    }

    #[test]
    fn it_spins_for_work_that_comes_at_once() {
        assert!(spinning_percent(std::iter::repeat_n(5, 10_000)) > 95);
    }

    #[test]
    fn it_does_not_spin_for_work_that_takes_longer() {
        assert!(spinning_percent(std::iter::repeat_n(90, 10_000)) < 5);
        assert!(spinning_percent(std::iter::repeat_n(45, 10_000)) < 10);
        assert!(spinning_percent(std::iter::repeat_n(1_000, 10_000)) == 0);
    }

    #[test]
    fn it_hardly_spins_where_others_want_the_processor() {
        let mut predictor = Predictor::default();
        let mut spins = 0;
        for index in 0..10_000 {
            if predictor.spins() {
                spins += 1;
                predictor.stopped();
            }
            predictor.slept(Duration::ZERO, index % 4 == 0);
        }
        assert!((1..20).contains(&spins), "{spins}");
        // They have gone.
        (0..5_000).for_each(|_| predictor.slept(Duration::ZERO, false));
        (0..100).for_each(|_| predictor.found(Duration::from_micros(5)));
        assert!(predictor.spins());
    }

    #[test]
    fn one_late_piece_of_work_changes_nothing() {
        assert!(spinning_percent((0..10_000).map(|index| if index % 100 == 0 { 90 } else { 5 })) > 80);
    }
}
