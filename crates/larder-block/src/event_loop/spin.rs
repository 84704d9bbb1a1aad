//! Whether to spin for the next piece of work or to sleep at once: what spinning has saved against what it has cost.
//!
//! Sleeping costs a wake-up when work comes; spinning costs the time until it comes. A [`Predictor`] keeps the balance
//! of the two. While it is positive the loop spins, up to its limit; when it runs out the loop sleeps at once, and tries
//! again after a while, ever more rarely as long as that does not pay.

use std::time::Duration;

/// What a sleep and a wake-up cost, in nanoseconds: the two switches, the system call, and on a virtualised host the
/// interrupt to another processor (measured at 10 to 50 us).
const WAKE_NANOS: i64 = 20_000;

/// The balance a try begins with, in nanoseconds: room for one spin in vain of the default limit.
const TRY_NANOS: i64 = 60_000;

/// The most that is saved up, so that a change of the load is noticed soon.
const BALANCE_MAX_NANOS: i64 = 400_000;

/// Sleeps between two tries at most.
const SKIP_MAX: u32 = 64;

/// Decides for one kind of waiting.
#[derive(Debug, Default)]
pub(super) struct Predictor {
    spinning: bool,
    balance_nanos: i64,
    /// Short sleeps before the next try.
    skip: u32,
    /// As many after the next failure.
    skip_next: u32,
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
        }
    }

    /// Work came only after the loop had gone to sleep, having spun for `spun`. It was a `long` sleep if the work belongs
    /// to another burst.
    pub(super) fn slept(&mut self, spun: Duration, long: bool) {
        if self.spinning {
            self.add(-nanos(spun));
        }
        if long {
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
            // One more than is counted down at once.
            self.skip = self.skip_next + 1;
        }
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
    fn one_late_piece_of_work_changes_nothing() {
        assert!(spinning_percent((0..10_000).map(|index| if index % 100 == 0 { 90 } else { 5 })) > 80);
    }
}
