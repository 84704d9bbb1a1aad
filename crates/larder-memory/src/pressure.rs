//! Pressure of memory: the share of time lost by waiting for pages, as the kernel's PSI measures it for its own
//! memory (Documentation/accounting/psi.rst). *some* is the time in which at least one thread waits, *full* the time
//! in which all threads wait that could work.
//!
//! Threads that wait for the same page count once. Faults that the kernel resolves by itself are not counted.

use std::time::{Duration, Instant};

/// Time windows of the averages.
const WINDOWS: [Duration; 3] = [Duration::from_secs(10), Duration::from_secs(60), Duration::from_secs(300)];

/// Lost time.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct StallTime {
    /// Exponentially decaying averages over the last 10, 60 and 300 seconds, each a share from 0 to 1.
    pub averages: [f64; 3],
    /// Sum of all lost time.
    pub total: Duration,
}

/// Time lost by waiting for memory.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub struct Pressure {
    /// Time in which at least one thread waited.
    pub some: StallTime,
    /// Time in which all threads waited.
    pub full: StallTime,
}

/// Meter of the pressure.
#[derive(Debug)]
pub(crate) struct PressureMeter {
    pressure: Pressure,
    /// Number of threads that could work.
    threads: usize,
    /// Number of waiting threads, and the time of its last change.
    waiting: usize,
    changed_at: Instant,
    /// Time of the last update of the averages, and the totals at that time.
    averaged_at: Instant,
    averaged_totals: [Duration; 2],
}

impl PressureMeter {
    /// Makes a meter for `workers` threads. If all of them wait, nothing progresses.
    pub(crate) fn new(workers: usize, now: Instant) -> Self {
        Self {
            pressure: Pressure::default(),
            threads: workers.max(1),
            waiting: 0,
            changed_at: now,
            averaged_at: now,
            averaged_totals: [Duration::ZERO; 2],
        }
    }

    /// Sets the number of waiting threads.
    pub(crate) fn set_waiting(&mut self, waiting: usize, now: Instant) {
        let passed = now.saturating_duration_since(self.changed_at);
        if self.waiting > 0 {
            self.pressure.some.total += passed;
        }
        if self.waiting >= self.threads {
            self.pressure.full.total += passed;
        }
        self.waiting = waiting;
        self.changed_at = now;
    }

    /// Returns the time lost up to `now`, with averages as of `now`. Called every few seconds at least.
    pub(crate) fn update(&mut self, now: Instant) -> Pressure {
        self.set_waiting(self.waiting, now);
        let passed = now.saturating_duration_since(self.averaged_at).as_secs_f64();
        if passed > 0.0 {
            let stalls = [&mut self.pressure.some, &mut self.pressure.full];
            for (lost, before) in stalls.into_iter().zip(&mut self.averaged_totals) {
                let share = (lost.total - *before).as_secs_f64() / passed;
                for (average, window) in lost.averages.iter_mut().zip(WINDOWS) {
                    let decay = (-passed / window.as_secs_f64()).exp();
                    *average = *average * decay + share * (1.0 - decay);
                }
                *before = lost.total;
            }
            self.averaged_at = now;
        }
        self.pressure
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_and_full_times_are_accumulated() {
        let start = Instant::now();
        let at = |ms| start + Duration::from_millis(ms);
        let mut meter = PressureMeter::new(2, start);
        meter.set_waiting(1, at(100));
        meter.set_waiting(2, at(300));
        meter.set_waiting(1, at(350));
        meter.set_waiting(0, at(400));
        meter.set_waiting(3, at(900));
        let Pressure { some, full } = meter.update(at(1000));
        assert_eq!(some.total, Duration::from_millis(300 + 100));
        assert_eq!(full.total, Duration::from_millis(50 + 100));
        // 40 % of a second: 0.4 (1 - exp(-1/10)).
        assert!((some.averages[0] - 0.038_065).abs() < 1e-6, "{some:?}");
        assert!((full.averages[2] - 0.15 * (1.0 - (-1.0_f64 / 300.0).exp())).abs() < 1e-12);
        // The threads still wait.
        let later = meter.update(at(3000));
        assert_eq!(later.full.total, Duration::from_millis(2150));
        assert_eq!(meter.update(at(3000)), later);
    }

    #[test]
    fn constant_waiting_is_full_pressure() {
        let start = Instant::now();
        let mut meter = PressureMeter::new(1, start);
        meter.set_waiting(1, start);
        let mut pressure = Pressure::default();
        for second in 1..=3600 {
            pressure = meter.update(start + Duration::from_secs(second));
        }
        for share in [pressure.some, pressure.full].map(|lost| lost.averages).concat() {
            assert!(share > 0.999 && share <= 1.0, "{pressure:?}");
        }
    }
}
