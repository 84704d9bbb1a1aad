//! Rate limit of log messages, so that a guest, an image or a client cannot fill the log. Each callsite may log a
//! burst, and after that one message per interval, preceded by the number of messages that were left out. Messages at
//! debug and trace level, which the user has enabled, are all logged.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::{Level, Metadata};

/// Number of messages that one callsite may log in a burst.
const AT_ONCE: u32 = 100;
/// Time after which a callsite may log one more message.
const ONE_PER: Duration = Duration::from_secs(10);

/// Rate limit for a writer of messages. It is not a filter of tracing's layers: one that refuses a message leaves the
/// thread's filter state wrong (tracing-subscriber 0.3.23).
pub(super) struct Limit {
    places: Mutex<HashMap<Identifier, Place>>,
    /// Writes a separate line.
    write_line: fn(&str),
}

impl Limit {
    pub(super) fn new(write_line: fn(&str)) -> Self {
        Self {
            places: Mutex::default(),
            write_line,
        }
    }

    /// Returns true if a message of this callsite is to be written.
    pub(super) fn passes(&self, place: &Metadata<'_>) -> bool {
        if *place.level() > Level::INFO {
            return true;
        }
        let now = Instant::now();
        let fate = {
            let mut places = self.places.lock().unwrap_or_else(PoisonError::into_inner);
            let known = places.entry(place.callsite());
            known.or_insert_with(|| Place::new(now)).another(now)
        };
        if let Fate::LoggedAfter(left_out) = fate {
            (self.write_line)(&format!("{left_out} messages like the next one were suppressed"));
        }
        fate != Fate::LeftOut
    }
}

/// Token bucket of one callsite.
struct Place {
    left: u32,
    /// Time up to which `left` accounts for passed intervals.
    since: Instant,
    left_out: u64,
}

/// Decision about a message.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    Logged,
    LeftOut,
    /// Logged, after this number of messages that were left out.
    LoggedAfter(u64),
}

impl Place {
    fn new(now: Instant) -> Self {
        Self {
            left: AT_ONCE,
            since: now,
            left_out: 0,
        }
    }

    fn another(&mut self, now: Instant) -> Fate {
        let passed = now.saturating_duration_since(self.since);
        let more = u32::try_from(passed.as_nanos() / ONE_PER.as_nanos()).unwrap_or(u32::MAX);
        self.left = self.left.saturating_add(more).min(AT_ONCE);
        self.since = match self.left {
            AT_ONCE => now,
            _ => self.since + ONE_PER * more,
        };
        if self.left == 0 {
            self.left_out += 1;
            return Fate::LeftOut;
        }
        self.left -= 1;
        match std::mem::take(&mut self.left_out) {
            0 => Fate::Logged,
            left_out => Fate::LoggedAfter(left_out),
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
        let mut place = Place::new(begin);
        for _ in 0..AT_ONCE {
            assert_eq!(place.another(begin), Fate::Logged);
        }
        for _ in 0..1000 {
            assert_eq!(place.another(begin + ONE_PER / 2), Fate::LeftOut);
        }
        assert_eq!(place.another(begin + ONE_PER), Fate::LoggedAfter(1000));
        assert_eq!(place.another(begin + ONE_PER), Fate::LeftOut);
        assert_eq!(place.another(begin + ONE_PER * 5 / 2), Fate::LoggedAfter(1));
        assert_eq!(place.another(begin + ONE_PER * 5 / 2), Fate::LeftOut);
        assert_eq!(
            place.another(begin + ONE_PER * 3),
            Fate::LoggedAfter(1),
            "no time is lost"
        );
        let later = begin + ONE_PER * 10_000;
        for _ in 0..AT_ONCE {
            assert_eq!(place.another(later), Fate::Logged);
        }
        assert_eq!(place.another(later), Fate::LeftOut);
    }
}
