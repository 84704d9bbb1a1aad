//! Rate limit of log messages, so that a guest, an image or a client cannot fill the log. Each callsite may log a
//! burst, and after that one message per interval, preceded by the number of messages that were left out. Messages at
//! debug and trace level, which the user has enabled, are all logged.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::{Level, Metadata};

/// Number of messages that one callsite may log in a burst.
const BURST_MESSAGES: u32 = 100;
/// Time after which a callsite may log one more message.
const REFILL_INTERVAL: Duration = Duration::from_secs(10);

/// Rate limit for a writer of messages. It is not a filter of tracing's layers: one that refuses a message leaves the
/// thread's filter state wrong (tracing-subscriber 0.3.23).
pub(super) struct LogLimiter {
    buckets: Mutex<HashMap<Identifier, TokenBucket>>,
    /// Writes a separate line.
    write_line: fn(&str),
}

impl LogLimiter {
    pub(super) fn new(write_line: fn(&str)) -> Self {
        Self { buckets: Mutex::default(), write_line }
    }

    /// Returns true if a message of this callsite is to be written.
    pub(super) fn allows(&self, metadata: &Metadata<'_>) -> bool {
        if *metadata.level() > Level::INFO {
            return true;
        }
        let now = Instant::now();
        let decision = {
            let mut places = self.buckets.lock().unwrap_or_else(PoisonError::into_inner);
            let known = places.entry(metadata.callsite());
            known.or_insert_with(|| TokenBucket::new(now)).decide(now)
        };
        if let Decision::AllowAfter(left_out) = decision {
            (self.write_line)(&format!("{left_out} messages like the next one were suppressed"));
        }
        decision != Decision::Suppress
    }
}

/// Token bucket of one callsite.
struct TokenBucket {
    tokens: u32,
    /// Time up to which `tokens` accounts for passed intervals.
    since: Instant,
    suppressed: u64,
}

/// Decision about a message.
#[derive(Debug, PartialEq, Eq)]
enum Decision {
    Allow,
    Suppress,
    /// Logged, after this number of messages that were left out.
    AllowAfter(u64),
}

impl TokenBucket {
    fn new(now: Instant) -> Self {
        Self { tokens: BURST_MESSAGES, since: now, suppressed: 0 }
    }

    fn decide(&mut self, now: Instant) -> Decision {
        let passed = now.saturating_duration_since(self.since);
        let more = u32::try_from(passed.as_nanos() / REFILL_INTERVAL.as_nanos()).unwrap_or(u32::MAX);
        self.tokens = self.tokens.saturating_add(more).min(BURST_MESSAGES);
        self.since = match self.tokens {
            BURST_MESSAGES => now,
            _ => self.since + REFILL_INTERVAL * more,
        };
        if self.tokens == 0 {
            self.suppressed += 1;
            return Decision::Suppress;
        }
        self.tokens -= 1;
        match std::mem::take(&mut self.suppressed) {
            0 => Decision::Allow,
            left_out => Decision::AllowAfter(left_out),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A callsite logs a burst, then one message per interval, and reports how many were left out in between.
    #[test]
    fn callsite_messages_are_rate_limited() {
        let begin = Instant::now();
        let mut place = TokenBucket::new(begin);
        for _ in 0..BURST_MESSAGES {
            assert_eq!(place.decide(begin), Decision::Allow);
        }
        for _ in 0..1000 {
            assert_eq!(place.decide(begin + REFILL_INTERVAL / 2), Decision::Suppress);
        }
        assert_eq!(place.decide(begin + REFILL_INTERVAL), Decision::AllowAfter(1000));
        assert_eq!(place.decide(begin + REFILL_INTERVAL), Decision::Suppress);
        assert_eq!(place.decide(begin + REFILL_INTERVAL * 5 / 2), Decision::AllowAfter(1));
        assert_eq!(place.decide(begin + REFILL_INTERVAL * 5 / 2), Decision::Suppress);
        assert_eq!(place.decide(begin + REFILL_INTERVAL * 3), Decision::AllowAfter(1), "no time is lost");
        let later = begin + REFILL_INTERVAL * 10_000;
        for _ in 0..BURST_MESSAGES {
            assert_eq!(place.decide(later), Decision::Allow);
        }
        assert_eq!(place.decide(later), Decision::Suppress);
    }
}
