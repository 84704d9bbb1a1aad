//! Decision when QEMU may stop the guest and send the rest.
//!
//! QEMU stops the guest when the remaining bytes take no longer than its `downtime-limit`, at the rate of the last
//! tenth of a second. Larder is between QEMU and the link, so that rate depends on how well the most recent pages
//! compress: zero pages at the end of memory are sent twenty times faster than the pages that the guest keeps
//! changing, and the downtime would be seconds. So QEMU's limit is kept near zero. It is raised to its maximum once
//! Larder expects the rest to be sent in time, at the rate at which the changed pages of whole earlier rounds were
//! sent.
//!
//! A limit that is raised or lowered too late costs only downtime or time.

use std::collections::VecDeque;
use std::time::Duration;

use serde_json::Value;

use crate::moving::watch::RamStats;

/// Limit of QEMU while the guest is to run, in milliseconds. With 0, QEMU would consider nothing to be left without
/// checking which pages were dirtied meanwhile.
pub(super) const DOWNTIME_LIMIT_RUN_MS: u64 = 1;
/// Limit of QEMU when the guest is to stop, in milliseconds: QEMU's maximum.
pub(super) const DOWNTIME_LIMIT_STOP_MS: u64 = 2_000_000;

/// Time from a sample of QEMU until it stops the guest, which it considers every 100 ms.
const QEMU_REACTION_TIME: Duration = Duration::from_millis(150);
/// Minimum time over which a rate is measured.
const RATE_WINDOW_MIN: Duration = Duration::from_millis(100);
/// Maximum rounds that are remembered.
const ROUNDS_MAX: usize = 16;
/// Time over which the link's rate is measured. It is used until changed pages have been sent for long enough, since
/// their compression can only make them faster.
const LINK_RATE_WINDOW: Duration = Duration::from_secs(1);

/// Sample of a migration.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MigrationSample {
    /// Time since the move began.
    at: Duration,
    /// Number of the round, from 1.
    round: u64,
    remaining_bytes: u64,
    /// Bytes dirtied per second as counted by QEMU, 0 in its first second.
    dirty_bytes_per_s: u64,
    /// Bytes of QEMU's stream in frames.
    raw_bytes: u64,
    /// Bytes on the link.
    wire_bytes: u64,
}

impl MigrationSample {
    /// Creates a sample from QEMU's statistics (`query-migrate`) and the bytes sent.
    pub(super) fn new(at: Duration, migration: &Value, raw_bytes: u64, wire_bytes: u64) -> Self {
        let ram = RamStats::parse(migration);
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

/// Estimator of the downtime.
#[derive(Default)]
pub(super) struct DowntimeEstimator {
    /// Samples of the last second of the first round.
    first: VecDeque<MigrationSample>,
    /// Second and later rounds, up to [`ROUNDS_MAX`].
    rounds: VecDeque<Round>,
}

#[derive(Clone, Copy)]
struct Round {
    /// First sample of the round.
    first: MigrationSample,
    /// Time since the round before began, in which the guest dirtied the bytes that remained at this round's start.
    previous_duration: Duration,
}

impl DowntimeEstimator {
    /// Returns how long the rest would take from QEMU to the end of the link if QEMU were allowed to stop the guest
    /// now; `None` while that is unknown.
    pub(super) fn estimate(&mut self, sample: MigrationSample) -> Option<Duration> {
        let before = self.rounds.back().map_or(Duration::ZERO, |round| round.first.at);
        let last = self.rounds.back().map_or(1, |round| round.first.round);
        if sample.round > last {
            self.rounds.push_back(Round { first: sample, previous_duration: sample.at - before });
            if self.rounds.len() > ROUNDS_MAX {
                self.rounds.pop_front();
            }
        }
        let Some(round) = self.rounds.back() else {
            self.first.push_back(sample);
            while self.first.len() > 2 && sample.at - self.first[1].at >= LINK_RATE_WINDOW {
                self.first.pop_front();
            }
            return None;
        };
        let delay = sample.at - round.first.at + QEMU_REACTION_TIME;
        let seconds = self.bytes_after(&sample, delay) / self.send_rate(&sample)?;
        Some(Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX))
    }

    /// Returns the bytes of changed pages sent per second: over the latest rounds that took long enough, all of them
    /// whole except the current one.
    fn send_rate(&self, sample: &MigrationSample) -> Option<f64> {
        let last = self.rounds.len() - 1;
        let long = self.rounds.iter().take(last).rev();
        let long = long.map(|round| round.first).find(|first| sample.at - first.at >= RATE_WINDOW_MIN);
        match long {
            Some(first) => per_second(&first, sample, |sample| sample.raw_bytes),
            None => per_second(self.first.front()?, sample, |sample| sample.wire_bytes),
        }
    }

    /// Returns the bytes that would remain after another `delay`: those remaining now, and those dirtied until
    /// then. All of them are dirtied after the previous round began, and the guest dirties no more pages in that time
    /// than it did in a longer one.
    fn bytes_after(&self, sample: &MigrationSample, delay: Duration) -> f64 {
        let after = self.rounds.back().map_or(Duration::ZERO, |round| round.previous_duration);
        // QEMU counts over at least a second.
        let last = self.rounds.back().filter(|_| after >= RATE_WINDOW_MIN);
        let last = last.map_or(0.0, |round| round.first.remaining_bytes as f64 / after.as_secs_f64());
        let changed = last.max(sample.dirty_bytes_per_s as f64) * delay.as_secs_f64();
        let bytes = sample.remaining_bytes as f64 + changed;
        let longer = self.rounds.iter().rev().find(|round| round.previous_duration >= after + delay);
        longer.map_or(bytes, |round| bytes.min(round.first.remaining_bytes as f64))
    }
}

fn per_second(from: &MigrationSample, to: &MigrationSample, bytes: impl Fn(&MigrationSample) -> u64) -> Option<f64> {
    let seconds = (to.at - from.at).as_secs_f64();
    let rate = (bytes(to) - bytes(from)) as f64 / seconds;
    (rate.is_finite() && rate > 0.0).then_some(rate)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MB: u64 = 1_000_000;

    /// Model of a QEMU that sends everything that remains, round by round, and of a guest that dirties `dirty` bytes
    /// per second, within at most `working_set` bytes.
    struct Model {
        estimator: DowntimeEstimator,
        sample: MigrationSample,
        dirty: u64,
        working_set: u64,
        /// Bytes of changed pages sent per second.
        rate: u64,
        ratio: u64,
    }

    impl Model {
        const STEP: Duration = Duration::from_millis(50);

        fn new(dirty: u64, working_set: u64, rate: u64, ratio: u64) -> Self {
            let mut model = Self {
                estimator: DowntimeEstimator::default(),
                sample: MigrationSample { round: 1, ..MigrationSample::default() },
                dirty,
                working_set,
                rate,
                ratio,
            };
            // The first round is 20 times faster, as most of it is empty.
            for _ in 0..40 {
                model.send(20 * rate / 20, 20 * ratio);
                assert_eq!(model.estimator.estimate(model.sample), None);
            }
            model.next_round(Duration::from_secs(2));
            model
        }

        fn send(&mut self, raw: u64, ratio: u64) {
            self.sample.at += Self::STEP;
            self.sample.raw_bytes += raw;
            self.sample.wire_bytes += raw / ratio;
            self.sample.remaining_bytes = self.sample.remaining_bytes.saturating_sub(raw);
        }

        fn next_round(&mut self, took: Duration) {
            self.sample.round += 1;
            let changed = (self.dirty as f64 * took.as_secs_f64()) as u64;
            self.sample.remaining_bytes = changed.min(self.working_set);
            self.sample.dirty_bytes_per_s = self.dirty;
        }

        /// Returns the real downtime once at most `limit` is expected; `None` if that never happens.
        fn downtime(&mut self, limit: Duration) -> Option<Duration> {
            let mut round_start = self.sample.at;
            for _ in 0..400 {
                if self.estimator.estimate(self.sample).is_some_and(|expected| expected <= limit) {
                    let delay = (self.sample.at - round_start + QEMU_REACTION_TIME).as_secs_f64();
                    let changed = (self.dirty as f64 * delay).min(self.working_set as f64);
                    let bytes = self.sample.remaining_bytes as f64 + changed;
                    return Some(Duration::from_secs_f64(bytes / self.rate as f64));
                }
                self.send(self.rate / 20, self.ratio);
                if self.sample.remaining_bytes == 0 {
                    self.next_round(self.sample.at - round_start);
                    round_start = self.sample.at;
                }
            }
            None
        }
    }

    const LIMIT: Duration = Duration::from_millis(250);

    #[test]
    /// The downtime stays within the limit, however fast other pages were sent.
    fn downtime_stays_within_limit() {
        for (dirty, ratio) in [(5 * MB, 1), (9 * MB, 1), (5 * MB, 20), (0, 1)] {
            let mut model = Model::new(dirty, 128 * MB, 12 * MB, ratio);
            let downtime = model.downtime(LIMIT);
            assert!(downtime.is_some_and(|downtime| downtime <= LIMIT * 12 / 10), "{dirty}: {downtime:?}");
        }
    }

    /// A guest that dirties more than the link carries is not stopped, unless its working set fits the limit.
    #[test]
    fn non_converging_guest_is_not_stopped() {
        assert_eq!(Model::new(14 * MB, 512 * MB, 12 * MB, 1).downtime(LIMIT), None);
        // Its working set is sent within the limit.
        assert!(Model::new(14 * MB, 2 * MB, 12 * MB, 1).downtime(LIMIT).is_some());
    }

    #[test]
    fn zero_time_gives_no_estimate() {
        let mut estimator = DowntimeEstimator::default();
        for round in [0, 1, 2, 2, 3, 4] {
            let sample = MigrationSample {
                round,
                remaining_bytes: u64::MAX,
                dirty_bytes_per_s: u64::MAX,
                ..MigrationSample::default()
            };
            assert_eq!(estimator.estimate(sample), None);
        }
    }
}
