//! When QEMU is let stop the guest and send the rest.
//!
//! QEMU stops it when what is left takes no longer than its `downtime-limit`, at the rate of the last tenth of a second. Between
//! it and the link lies Larder, and that rate says how well the pages compress that went last: pages of zeros at the end of
//! memory go twenty times faster than what the guest keeps changing, and the guest would stand still for seconds. So QEMU's
//! limit is kept at nearly nothing, and raised beyond all bounds at the moment when Larder expects the rest to go over in
//! time: at the rate at which the changed pages of whole rounds went before.
//!
//! A limit that is raised or lowered too late costs downtime or time, and nothing else.

use std::collections::VecDeque;
use std::time::Duration;

use serde_json::Value;

use crate::moving::watch::Ram;

/// QEMU's limit while the guest is to run, in milliseconds: of 0 it takes what is left for nothing without looking at what
/// was changed meanwhile.
pub(super) const LIMIT_MS: u64 = 1;
/// And when it is to stop: QEMU's largest.
pub(super) const LIMIT_TO_END_MS: u64 = 2_000_000;

/// From what is seen of QEMU until it stops the guest, which it thinks about every 100 ms.
const REACTION: Duration = Duration::from_millis(150);
/// What is sent in less time says little about the rate.
const RATE_OVER: Duration = Duration::from_millis(100);
/// That are remembered.
const ROUNDS_MAX: usize = 16;
/// Until changed pages have gone over for so long, it is the link's rate that counts: they compress, if at all.
const LINK_RATE_OVER: Duration = Duration::from_secs(1);

/// What is seen at a time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Look {
    /// Since the move began.
    at: Duration,
    /// From 1.
    round: u64,
    remaining_bytes: u64,
    /// As QEMU has counted, 0 in its first second.
    dirty_bytes_per_s: u64,
    /// Of QEMU's stream, in frames.
    raw_bytes: u64,
    /// On the link.
    wire_bytes: u64,
}

impl Look {
    /// At what QEMU says (`query-migrate`) and what was sent.
    pub(super) fn new(at: Duration, migration: &Value, raw_bytes: u64, wire_bytes: u64) -> Self {
        let ram = Ram::of(migration);
        Self {
            at,
            round: ram.round,
            remaining_bytes: ram.remaining_bytes,
            dirty_bytes_per_s: ram.dirty_bytes_per_s,
            raw_bytes,
            wire_bytes,
        }
    }
}

/// Expects how long the guest would stand still.
#[derive(Default)]
pub(super) struct Ending {
    /// Looks of the last second of the first round.
    first: VecDeque<Look>,
    /// The second round and those after it, up to [`ROUNDS_MAX`].
    rounds: VecDeque<Round>,
}

#[derive(Clone, Copy)]
struct Round {
    /// The first look at it.
    begun: Look,
    /// The one before it: in so much time the guest changed what was left in the beginning.
    after: Duration,
}

impl Ending {
    /// How long the rest would take from QEMU to its end on the link, if QEMU were let end it now; `None` while nothing
    /// can be said.
    pub(super) fn expected(&mut self, look: Look) -> Option<Duration> {
        let before = self.rounds.back().map_or(Duration::ZERO, |round| round.begun.at);
        let last = self.rounds.back().map_or(1, |round| round.begun.round);
        if look.round > last {
            self.rounds.push_back(Round {
                begun: look,
                after: look.at - before,
            });
            if self.rounds.len() > ROUNDS_MAX {
                self.rounds.pop_front();
            }
        }
        let Some(round) = self.rounds.back() else {
            self.first.push_back(look);
            while self.first.len() > 2 && look.at - self.first[1].at >= LINK_RATE_OVER {
                self.first.pop_front();
            }
            return None;
        };
        let meanwhile = look.at - round.begun.at + REACTION;
        let rest = self.rest(&look, meanwhile) / self.rate(&look)?;
        Some(Duration::try_from_secs_f64(rest).unwrap_or(Duration::MAX))
    }

    /// Bytes of changed pages that go over in a second: of the latest rounds that took long enough, all but one of them
    /// whole.
    fn rate(&self, look: &Look) -> Option<f64> {
        let last = self.rounds.len() - 1;
        let long = self.rounds.iter().take(last).rev();
        let long = long
            .map(|round| round.begun)
            .find(|begun| look.at - begun.at >= RATE_OVER);
        match long {
            Some(begun) => per_second(&begun, look, |look| look.raw_bytes),
            None => per_second(self.first.front()?, look, |look| look.wire_bytes),
        }
    }

    /// Bytes that would be left: those that are, and what was changed for so long. Both were changed since the round before
    /// began, and the guest changes no more pages in that time than it did in a longer one.
    fn rest(&self, look: &Look, meanwhile: Duration) -> f64 {
        let after = self.rounds.back().map_or(Duration::ZERO, |round| round.after);
        // QEMU counts over a second at least.
        let last = self.rounds.back().filter(|_| after >= RATE_OVER);
        let last = last.map_or(0.0, |round| round.begun.remaining_bytes as f64 / after.as_secs_f64());
        let changed = last.max(look.dirty_bytes_per_s as f64) * meanwhile.as_secs_f64();
        let rest = look.remaining_bytes as f64 + changed;
        let longer = self.rounds.iter().rev().find(|round| round.after >= after + meanwhile);
        longer.map_or(rest, |round| rest.min(round.begun.remaining_bytes as f64))
    }
}

fn per_second(from: &Look, to: &Look, bytes: impl Fn(&Look) -> u64) -> Option<f64> {
    let seconds = (to.at - from.at).as_secs_f64();
    let rate = (bytes(to) - bytes(from)) as f64 / seconds;
    (rate.is_finite() && rate > 0.0).then_some(rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    /// A QEMU that sends all that is left, round by round, and a guest that changes so much in a second, of at most so much.
    struct Model {
        ending: Ending,
        look: Look,
        dirty: u64,
        working_set: u64,
        /// Of changed pages, in a second.
        rate: u64,
        ratio: u64,
    }

    impl Model {
        const STEP: Duration = Duration::from_millis(50);

        fn new(dirty: u64, working_set: u64, rate: u64, ratio: u64) -> Self {
            let mut model = Self {
                ending: Ending::default(),
                look: Look {
                    round: 1,
                    ..Look::default()
                },
                dirty,
                working_set,
                rate,
                ratio,
            };
            // The first round: 20 times faster, as most of it is empty.
            for _ in 0..40 {
                model.sends(20 * rate / 20, 20 * ratio);
                assert_eq!(model.ending.expected(model.look), None);
            }
            model.next_round(Duration::from_secs(2));
            model
        }

        fn sends(&mut self, raw: u64, ratio: u64) {
            self.look.at += Self::STEP;
            self.look.raw_bytes += raw;
            self.look.wire_bytes += raw / ratio;
            self.look.remaining_bytes = self.look.remaining_bytes.saturating_sub(raw);
        }

        fn next_round(&mut self, took: Duration) {
            self.look.round += 1;
            let changed = (self.dirty as f64 * took.as_secs_f64()) as u64;
            self.look.remaining_bytes = changed.min(self.working_set);
            self.look.dirty_bytes_per_s = self.dirty;
        }

        /// How long the guest would really stand still when at most `limit` was expected; `None`: it never was.
        fn stands_still(&mut self, limit: Duration) -> Option<Duration> {
            let mut begun = self.look.at;
            for _ in 0..400 {
                if self
                    .ending
                    .expected(self.look)
                    .is_some_and(|expected| expected <= limit)
                {
                    let meanwhile = (self.look.at - begun + REACTION).as_secs_f64();
                    let changed = (self.dirty as f64 * meanwhile).min(self.working_set as f64);
                    let rest = self.look.remaining_bytes as f64 + changed;
                    return Some(Duration::from_secs_f64(rest / self.rate as f64));
                }
                self.sends(self.rate / 20, self.ratio);
                if self.look.remaining_bytes == 0 {
                    self.next_round(self.look.at - begun);
                    begun = self.look.at;
                }
            }
            None
        }
    }

    const LIMIT: Duration = Duration::from_millis(250);

    #[test]
    fn a_guest_stops_for_no_longer_than_it_may_however_fast_other_pages_went() {
        for (dirty, ratio) in [(5 * MB, 1), (9 * MB, 1), (5 * MB, 20), (0, 1)] {
            let mut model = Model::new(dirty, 128 * MB, 12 * MB, ratio);
            let stood = model.stands_still(LIMIT);
            assert!(
                stood.is_some_and(|stood| stood <= LIMIT * 12 / 10),
                "{dirty}: {stood:?}"
            );
        }
    }

    #[test]
    fn one_that_changes_more_than_goes_over_is_not_stopped() {
        assert_eq!(Model::new(14 * MB, 512 * MB, 12 * MB, 1).stands_still(LIMIT), None);
        // What it changes fits the time.
        assert!(Model::new(14 * MB, 2 * MB, 12 * MB, 1).stands_still(LIMIT).is_some());
    }

    #[test]
    fn nothing_is_expected_of_no_time_and_no_bytes() {
        let mut ending = Ending::default();
        for round in [0, 1, 2, 2, 3, 4] {
            let look = Look {
                round,
                remaining_bytes: u64::MAX,
                dirty_bytes_per_s: u64::MAX,
                ..Look::default()
            };
            assert_eq!(ending.expected(look), None);
        }
    }
}
