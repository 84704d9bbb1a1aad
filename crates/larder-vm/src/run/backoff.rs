//! How soon a server that died is started again.

use std::time::Duration;

/// A server that lived this long was well; its next death counts as the first.
const WELL: Duration = Duration::from_secs(2);

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);

/// At once after the first death; then, while it keeps dying, twice as long each time, up to 5 s.
#[derive(Clone, Copy, Debug, Default)]
pub struct Backoff {
    deaths: u32,
}

impl Backoff {
    /// It died after `lived`; how long to wait now.
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
    fn the_first_restart_is_at_once_and_the_next_ones_wait_longer() {
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
