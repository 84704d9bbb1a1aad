//! Rate limiter of a sender.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Limit on the use of a resource by all lanes together: bytes of the link, or nanoseconds of CPU time, per second.
/// Each call passes the rate, so that it may change; a use that already waits then waits according to the new rate.
pub struct RateLimiter(Mutex<LimiterState>);

struct LimiterState {
    /// Total amount taken, and the total that the rate has allowed.
    reserved: f64,
    allowed: f64,
    /// Time of the last update of `allowed`.
    updated_at: Instant,
}

/// Amount taken. It is allowed once the rate has allowed everything taken before it.
#[derive(Clone, Copy, Debug)]
#[must_use]
pub struct Reservation {
    from: f64,
    to: f64,
}

impl RateLimiter {
    /// Maximum credit after a pause, as time at the current rate.
    const BURST: Duration = Duration::from_millis(10);
    /// Maximum pause before the limiter must be asked again, since the rate may have changed.
    pub const DELAY_MAX: Duration = Duration::from_millis(200);

    /// Creates a limiter with nothing taken.
    #[must_use]
    pub fn new() -> Self {
        Self(Mutex::new(LimiterState { reserved: 0.0, allowed: 0.0, updated_at: Instant::now() }))
    }

    /// Takes an amount. Without a rate it is allowed at once; a rate below 1 counts as 1.
    pub fn reserve(&self, amount: u64, rate: Option<f64>, now: Instant) -> Reservation {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.refill(rate, now);
        let from = state.reserved;
        state.reserved += amount as f64;
        Reservation { from, to: state.reserved }
    }

    /// Returns how long to wait before the amount taken may be used, at most [`Self::DELAY_MAX`] at once.
    #[must_use]
    pub fn delay_before(&self, reservation: Reservation, rate: Option<f64>, now: Instant) -> Duration {
        self.delay_until(reservation.from, rate, now)
    }

    /// Returns how long to wait until an amount already used is allowed, at most [`Self::DELAY_MAX`] at once.
    #[must_use]
    pub fn delay_after(&self, reservation: Reservation, rate: Option<f64>, now: Instant) -> Duration {
        self.delay_until(reservation.to, rate, now)
    }

    fn delay_until(&self, target: f64, rate: Option<f64>, now: Instant) -> Duration {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.refill(rate, now);
        match rate {
            Some(rate) if target > state.allowed => {
                let seconds = (target - state.allowed) / rate.max(1.0);
                // Rounding must not produce a pause of zero.
                Duration::try_from_secs_f64(seconds)
                    .unwrap_or(Self::DELAY_MAX)
                    .clamp(Duration::from_nanos(1), Self::DELAY_MAX)
            }
            _ => Duration::ZERO,
        }
    }
}

impl LimiterState {
    fn refill(&mut self, rate: Option<f64>, now: Instant) {
        let passed = now.saturating_duration_since(self.updated_at);
        self.updated_at = self.updated_at.max(now);
        self.allowed = match rate {
            None => self.reserved,
            Some(rate) => {
                let rate = rate.max(1.0);
                let cap = self.reserved + rate * RateLimiter::BURST.as_secs_f64();
                (self.allowed + rate * passed.as_secs_f64()).min(cap)
            }
        };
    }
}

impl Default for RateLimiter {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Takes `count` times 10 kB, each before it is sent; returns when the last is sent.
    fn send(pace: &RateLimiter, count: u32, rate: Option<f64>, mut now: Instant) -> Instant {
        for _ in 0..count {
            let reservation = pace.reserve(10_000, rate, now);
            loop {
                let pause = pace.delay_before(reservation, rate, now);
                if pause.is_zero() {
                    break;
                }
                now += pause;
            }
        }
        now
    }

    #[test]
    fn sending_obeys_rate() {
        let pace = RateLimiter::new();
        let begin = Instant::now();
        let took = send(&pace, 1000, Some(1e6), begin).duration_since(begin);
        // 10 MB at 1 MB/s, less the last 10 kB, which need not be waited for, and the burst.
        assert!(took > Duration::from_millis(9960) && took < Duration::from_millis(10_000), "{took:?}");
    }

    /// A pause earns no credit beyond the burst.
    #[test]
    fn idle_time_is_not_made_up() {
        let pace = RateLimiter::new();
        let begin = Instant::now();
        let _ = send(&pace, 1, Some(1e6), begin);
        let later = begin + Duration::from_secs(60);
        let end = send(&pace, 100, Some(1e6), later);
        assert!(end.duration_since(later) > Duration::from_millis(960));
    }

    #[test]
    fn unlimited_rate_never_waits() {
        let pace = RateLimiter::new();
        let now = Instant::now();
        let first = pace.reserve(u64::MAX, None, now);
        let next = pace.reserve(1, None, now);
        assert_eq!(pace.delay_before(next, None, now), Duration::ZERO);
        assert_eq!(pace.delay_after(first, None, now), Duration::ZERO);
    }

    /// A use that waits under a low rate continues at the new rate, or at once without one.
    #[test]
    fn waiting_use_adopts_new_rate() {
        let pace = RateLimiter::new();
        let now = Instant::now();
        let _ = pace.reserve(1_000_000, Some(10.0), now);
        let waiting = pace.reserve(1, Some(10.0), now);
        assert_eq!(pace.delay_before(waiting, Some(10.0), now), RateLimiter::DELAY_MAX);
        let pause = pace.delay_before(waiting, Some(1e7), now);
        assert!(pause > Duration::from_millis(80) && pause < Duration::from_millis(101), "{pause:?}");
        assert_eq!(pace.delay_before(waiting, None, now), Duration::ZERO);
    }

    /// Use that is reported afterwards is paid by a pause of its full time.
    #[test]
    fn used_amount_is_waited_for_fully() {
        let pace = RateLimiter::new();
        let begin = Instant::now();
        let mut now = begin;
        // Half a processor: each 10 ms of CPU time take 20 ms.
        for _ in 0..100 {
            now += Duration::from_millis(10);
            let reservation = pace.reserve(10_000_000, Some(0.5e9), now);
            loop {
                let pause = pace.delay_after(reservation, Some(0.5e9), now);
                if pause.is_zero() {
                    break;
                }
                now += pause;
            }
        }
        let took = now.duration_since(begin);
        assert!(took > Duration::from_millis(1980) && took < Duration::from_millis(2001), "{took:?}");
    }
}
