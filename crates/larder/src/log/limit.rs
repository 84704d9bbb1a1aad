//! What a guest, an image or a client causes again and again is not logged without end: of each place in the code that logs, so
//! many messages at once, and then one now and then, and before it how many were left out. Messages of the levels debug and
//! trace, which somebody has asked for, are all logged.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;
use tracing::{Level, Metadata};

/// Messages of one place that are logged at once, and the time after which there may be one more.
const AT_ONCE: u32 = 100;
const ONE_PER: Duration = Duration::from_secs(10);

/// The limit, for a writer of messages. It is no filter of tracing's layers: one that refuses a message leaves the filters'
/// state of the thread wrong (tracing-subscriber 0.3.23).
pub(super) struct Limit {
    places: Mutex<HashMap<Identifier, Place>>,
    /// Writes a line of its own.
    write_line: fn(&str),
}

impl Limit {
    pub(super) fn new(write_line: fn(&str)) -> Self {
        Self {
            places: Mutex::default(),
            write_line,
        }
    }

    /// Whether a message of this place is written.
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
            (self.write_line)(&format!("{left_out} messages like the next one were left out"));
        }
        fate != Fate::LeftOut
    }
}

struct Place {
    left: u32,
    /// When `left` was last right.
    since: Instant,
    left_out: u64,
}

/// What becomes of a message.
#[derive(Debug, PartialEq, Eq)]
enum Fate {
    Logged,
    LeftOut,
    /// Logged, after so many that were not.
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

    #[test]
    fn a_place_logs_so_many_at_once_and_then_one_now_and_then() {
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
