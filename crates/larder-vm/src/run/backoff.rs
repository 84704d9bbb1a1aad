//! Backoff of restarts of a server that died.

use std::time::Duration;

/// Lifetime after which a server counts as healthy, and its next death as the first.
const WELL: Duration = Duration::from_secs(2);

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);

/// Backoff of a server: zero after the first death; then, while it keeps dying, doubling up to 5 s.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff {
    deaths: u32,
}

impl Backoff {
    /// Returns the pause before the restart of a server that died after `lived`.
    pub fn died(&mut self, lived: Duration) -> Duration {
        if lived >= WELL {
            self.deaths = 0;
        }
        self.deaths = self.deaths.saturating_add(1);
        match self.deaths {
            1 => Duration::ZERO,
            deaths => FIRST.saturating_mul(1 << (deaths - 2).min(10)).min(LONGEST),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_restart_is_immediate_then_delayed() {
        let mut backoff = Backoff::default();
        let mut next = |lived| backoff.died(Duration::from_millis(lived)).as_millis();
        assert_eq!([next(3), next(3), next(3), next(3)], [0, 100, 200, 400]);
        for _ in 0..100 {
            assert!(next(3) <= 5000);
        }
        assert_eq!(next(3), 5000);
        assert_eq!([next(60_000), next(3)], [0, 100]);
    }
}
