//! Backoff of restarts of a server that died.

use std::time::Duration;

/// Lifetime after which a server counts as healthy, and its next death as the first.
const HEALTHY_LIFETIME_MIN: Duration = Duration::from_secs(2);

const DELAY_MIN: Duration = Duration::from_millis(100);
const DELAY_MAX: Duration = Duration::from_secs(5);

/// Backoff of a server: zero after the first death; then, while it keeps dying, doubling up to 5 s.
#[derive(Clone, Copy, Debug, Default)]
pub struct RestartBackoff {
    deaths: u32,
}

impl RestartBackoff {
    /// Returns the pause before the restart of a server that died after `lifetime`.
    pub fn next_delay(&mut self, lifetime: Duration) -> Duration {
        if lifetime >= HEALTHY_LIFETIME_MIN {
            self.deaths = 0;
        }
        self.deaths = self.deaths.saturating_add(1);
        match self.deaths {
            1 => Duration::ZERO,
            deaths => DELAY_MIN.saturating_mul(1 << (deaths - 2).min(10)).min(DELAY_MAX),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_restart_is_immediate_then_delayed() {
        let mut backoff = RestartBackoff::default();
        let mut next = |lived| backoff.next_delay(Duration::from_millis(lived)).as_millis();
        assert_eq!([next(3), next(3), next(3), next(3)], [0, 100, 200, 400]);
        for _ in 0..100 {
            assert!(next(3) <= 5000);
        }
        assert_eq!(next(3), 5000);
        assert_eq!([next(60_000), next(3)], [0, 100]);
    }
}
