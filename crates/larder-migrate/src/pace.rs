//! How fast a sender may be.

use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// A bound on the bytes per second that all lanes together send.
pub struct Pace {
    bytes_per_s: Option<u64>,
    /// When all that was taken so far has gone at this rate.
    free_at: Mutex<Instant>,
}

impl Pace {
    /// What may go at once after a pause.
    const BURST: Duration = Duration::from_millis(10);

    /// Without a bound if `None`; at least 1 byte per second.
    #[must_use]
    pub fn new(bytes_per_s: Option<u64>) -> Self {
        Self {
            bytes_per_s: bytes_per_s.map(|rate| rate.max(1)),
            free_at: Mutex::new(Instant::now()),
        }
    }

    /// How long to wait before `bytes` are sent. They count as sent.
    #[must_use]
    pub fn take(&self, bytes: u64, now: Instant) -> Duration {
        let Some(rate) = self.bytes_per_s else {
            return Duration::ZERO;
        };
        let takes = Duration::from_nanos(
            u64::try_from(u128::from(bytes) * 1_000_000_000 / u128::from(rate)).unwrap_or(u64::MAX),
        );
        let mut free_at = self.free_at.lock().unwrap_or_else(PoisonError::into_inner);
        let earliest = now.checked_sub(Self::BURST).unwrap_or(now);
        let begins = (*free_at).max(earliest);
        *free_at = begins.checked_add(takes).unwrap_or(begins);
        begins.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_much_goes_as_was_said() {
        let pace = Pace::new(Some(1_000_000));
        let begin = Instant::now();
        let mut now = begin;
        for _ in 0..1000 {
            now += pace.take(10_000, now);
        }
        // 10 MB at 1 MB/s, the last of which need not be waited for, and the burst.
        let took = now.duration_since(begin);
        assert!(
            took > Duration::from_millis(9960) && took < Duration::from_millis(10_000),
            "{took:?}"
        );
    }

    #[test]
    fn a_pause_is_not_made_up_for() {
        let pace = Pace::new(Some(1_000_000));
        let begin = Instant::now();
        assert_eq!(pace.take(10_000, begin), Duration::ZERO);
        let later = begin + Duration::from_secs(60);
        let mut now = later;
        for _ in 0..100 {
            now += pace.take(10_000, now);
        }
        assert!(now.duration_since(later) > Duration::from_millis(960));
    }

    #[test]
    fn without_a_bound_nothing_waits() {
        assert_eq!(Pace::new(None).take(u64::MAX, Instant::now()), Duration::ZERO);
    }
}
