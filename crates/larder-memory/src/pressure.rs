//! How much of the time is lost by waiting for memory, as the kernel tells of its own (Documentation/accounting/psi.rst):
//! *some* is the time in which somebody waits, *full* that in which all do who could work.
//!
//! Who waits for the same page counts once. What the kernel itself takes for a fault is not seen.

use std::time::{Duration, Instant};

/// How far back averages reach.
const WINDOWS: [Duration; 3] = [
    Duration::from_secs(10),
    Duration::from_secs(60),
    Duration::from_secs(300),
];

/// A share of the time that was lost.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Lost {
    /// Of the last 10, 60 and 300 seconds, what is longer ago counting less and less: 0 to 1.
    pub averages: [f64; 3],
    /// All of it.
    pub total: Duration,
}

/// What was lost so far.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Pressure {
    /// See the module's description.
    pub some: Lost,
    /// See the module's description.
    pub full: Lost,
}

/// Measures it.
#[derive(Debug)]
pub(crate) struct Meter {
    pressure: Pressure,
    /// How many could work.
    workers: usize,
    /// How many wait, since when.
    waiting: usize,
    since: Instant,
    /// When averages were formed last, of what had been lost then.
    averaged: Instant,
    before: [Duration; 2],
}

impl Meter {
    /// Of so many who could work: if all of them wait nothing goes on.
    pub(crate) fn new(workers: usize, now: Instant) -> Self {
        Self {
            pressure: Pressure::default(),
            workers: workers.max(1),
            waiting: 0,
            since: now,
            averaged: now,
            before: [Duration::ZERO; 2],
        }
    }

    /// So many wait from now on.
    pub(crate) fn waits(&mut self, waiting: usize, now: Instant) {
        let passed = now.saturating_duration_since(self.since);
        if self.waiting > 0 {
            self.pressure.some.total += passed;
        }
        if self.waiting >= self.workers {
            self.pressure.full.total += passed;
        }
        self.waiting = waiting;
        self.since = now;
    }

    /// What was lost until now. The averages are as of now, too; it is to be asked every few seconds at least.
    pub(crate) fn look(&mut self, now: Instant) -> Pressure {
        self.waits(self.waiting, now);
        let passed = now.saturating_duration_since(self.averaged).as_secs_f64();
        if passed > 0.0 {
            let lost = [&mut self.pressure.some, &mut self.pressure.full];
            for (lost, before) in lost.into_iter().zip(&mut self.before) {
                let share = (lost.total - *before).as_secs_f64() / passed;
                for (average, window) in lost.averages.iter_mut().zip(WINDOWS) {
                    let kept = (-passed / window.as_secs_f64()).exp();
                    *average = *average * kept + share * (1.0 - kept);
                }
                *before = lost.total;
            }
            self.averaged = now;
        }
        self.pressure
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_lost_is_the_time_in_which_somebody_or_everybody_waits() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut meter = Meter::new(2, start);
        meter.waits(1, at(100));
        meter.waits(2, at(300));
        meter.waits(1, at(350));
        meter.waits(0, at(400));
        meter.waits(3, at(900));
        let Pressure { some, full } = meter.look(at(1000));
        assert_eq!(some.total, Duration::from_millis(300 + 100));
        assert_eq!(full.total, Duration::from_millis(50 + 100));
        // 40 % of a second: 0.4 (1 - exp(-1/10)).
        assert!((some.averages[0] - 0.038_065).abs() < 1e-6, "{some:?}");
        assert!((full.averages[2] - 0.15 * (1.0 - (-1.0_f64 / 300.0).exp())).abs() < 1e-12);
        // They wait on.
        let later = meter.look(at(3000));
        assert_eq!(later.full.total, Duration::from_millis(2150));
        assert_eq!(meter.look(at(3000)), later);
    }

    #[test]
    fn who_waits_all_the_time_loses_all_of_it() {
        let start = Instant::now();
        let mut meter = Meter::new(1, start);
        meter.waits(1, start);
        let mut pressure = Pressure::default();
        for second in 1..=3600 {
            pressure = meter.look(start + Duration::from_secs(second));
        }
        for share in [pressure.some, pressure.full].map(|lost| lost.averages).concat() {
            assert!(share > 0.999 && share <= 1.0, "{pressure:?}");
        }
    }
}
