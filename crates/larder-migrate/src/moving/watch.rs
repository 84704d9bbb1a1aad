//! Monitor of a migration: its progress, and whether it will converge.

use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use crate::progress::{SenderProgress, SenderTotals};
use crate::qmp::{Qmp, QmpError, QmpEvent};

/// Time over which rates are averaged.
const RATE_WINDOW: Duration = Duration::from_secs(1);
/// Rounds without gain after which the migration is judged not to converge.
const STALLED_ROUNDS_MAX: u32 = 3;

/// Snapshot of a migration.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct MigrationReport {
    /// Seconds since QEMU began to migrate.
    pub seconds: f64,
    /// Status as reported by QEMU.
    pub status: String,
    /// Number of the round, from 1; the first round sends all memory.
    pub round: u64,
    /// Bytes of memory still to be sent in this round.
    pub remaining_bytes: u64,
    /// Total bytes of memory.
    pub total_bytes: u64,
    /// Bytes of memory dirtied per second, as QEMU measured it in the previous round.
    pub dirty_bytes_per_s: u64,
    /// Bytes of QEMU's stream sent per second.
    pub stream_bytes_per_s: u64,
    /// Bytes sent on the link per second.
    pub wire_bytes_per_s: u64,
    /// CPU time of the lanes, in processors: reading, encoding, encrypting, writing.
    pub processors: f64,
    /// Part of the CPU time spent encoding, in processors.
    pub encoding: f64,
    /// Average number of lanes that wait for the link.
    pub waiting: f64,
    /// Seconds to the expected end, if the rates stay the same.
    pub expected_seconds: Option<f64>,
    /// Expected downtime if the guest were stopped now, in milliseconds.
    pub expected_downtime_ms: Option<u64>,
    /// Downtime of the guest in milliseconds, once it is over and if it is known.
    pub downtime_ms: Option<u64>,
    /// Reason why the migration will not end at this rate, and possible remedies.
    pub verdict: Option<String>,
    /// Sums of everything sent so far.
    pub totals: SenderTotals,
}

/// Statistics of the guest's memory from QEMU (`query-migrate`, `ram`); 0 where QEMU does not report a value yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RamStats {
    /// Number of the round, from 1.
    pub round: u64,
    /// Bytes still to be sent in this round.
    pub remaining_bytes: u64,
    /// Total bytes.
    pub total_bytes: u64,
    /// Bytes dirtied per second, measured by QEMU over at least a second.
    pub dirty_bytes_per_s: u64,
}

impl RamStats {
    /// Extracts the statistics from the whole answer.
    #[must_use]
    pub fn parse(migration: &Value) -> Self {
        let ram = &migration["ram"];
        let number = |name: &str| ram[name].as_u64().unwrap_or(0);
        Self {
            round: number("dirty-sync-count"),
            remaining_bytes: number("remaining"),
            total_bytes: number("total"),
            dirty_bytes_per_s: number("dirty-pages-rate").saturating_mul(number("page-size").max(4096)),
        }
    }
}

/// Returns the words for a `ShutdownCause` of QEMU (qapi/run-state.json).
fn shutdown_cause(reason: Option<&str>) -> &'static str {
    match reason {
        Some("guest-shutdown") => "the guest shut down",
        Some("guest-reset") => "the guest rebooted, which ends its QEMU (-no-reboot),",
        Some("guest-panic") => "the guest panicked",
        Some("host-qmp-system-reset") => "QEMU received the command to reset, which ends it (-no-reboot),",
        Some("host-qmp-quit") => "QEMU received the command to quit",
        Some("host-signal") => "QEMU was ended by a signal",
        _ => "QEMU was shut down",
    }
}

/// Monitor of a migration, fed with QEMU's events and statistics.
pub struct MigrationMonitor {
    downtime_ms: u64,
    stopped: Option<Instant>,
    /// Set once the migration has failed or the guest runs again.
    resumed: bool,
    /// Cause in the event that ends QEMU.
    shutdown: Option<&'static str>,
    /// Set if QEMU reported that event while the guest ran.
    shutdown_before_stop: bool,
    samples: Vec<(Duration, SenderTotals)>,
    round: u64,
    /// Losses of the link before this round.
    losses: u64,
    /// Bytes remaining at the beginning of the best round so far.
    least_remaining: u64,
    stalled_rounds: u32,
    verdict: Option<String>,
}

impl MigrationMonitor {
    /// Creates the monitor of a migration that has begun.
    #[must_use]
    pub const fn new(downtime_ms: u64) -> Self {
        Self {
            downtime_ms,
            stopped: None,
            resumed: false,
            shutdown: None,
            shutdown_before_stop: false,
            samples: Vec::new(),
            round: 0,
            losses: 0,
            least_remaining: u64::MAX,
            stalled_rounds: 0,
            verdict: None,
        }
    }

    /// Waits for an event for up to `wait`, and processes it.
    ///
    /// # Errors
    /// QEMU has exited.
    pub fn poll_event(&mut self, qmp: &mut Qmp, wait: Duration) -> Result<(), QmpError> {
        if let Some(event) = qmp.event(wait)? {
            self.process_event(&event, Instant::now());
        }
        Ok(())
    }

    fn process_event(&mut self, event: &QmpEvent, at: Instant) {
        match event.name.as_str() {
            "STOP" => self.stopped = Some(at),
            "RESUME" => self.resumed = true,
            "SHUTDOWN" => {
                self.shutdown = Some(shutdown_cause(event.data["reason"].as_str()));
                self.shutdown_before_stop = self.stopped.is_none();
            }
            "MIGRATION" if event.data["status"] == "failed" || event.data["status"] == "cancelled" => {
                self.resumed = true
            }
            _ => {}
        }
    }

    /// Returns true if QEMU, which has exited since, had resumed the guest here or had been about to.
    pub fn has_resumed(&mut self, qmp: &mut Qmp) -> bool {
        self.process_pending(qmp);
        self.resumed
    }

    /// Processes all events that have arrived.
    fn process_pending(&mut self, qmp: &mut Qmp) {
        while let Ok(Some(event)) = qmp.event(Duration::ZERO) {
            self.process_event(&event, Instant::now());
        }
    }

    /// Returns the cause of QEMU's end, as a subject and a verb, if QEMU has reported it.
    pub fn shutdown_cause(&mut self, qmp: &mut Qmp) -> Option<&'static str> {
        self.process_pending(qmp);
        self.shutdown
    }

    /// Returns the cause of QEMU's end if the guest ran until then: pre-copy sends the last of a VM only after it has
    /// stopped the guest.
    pub fn shutdown_before_stop(&mut self, qmp: &mut Qmp) -> Option<&'static str> {
        self.process_pending(qmp);
        self.shutdown.filter(|_| self.shutdown_before_stop)
    }

    /// Returns when the guest stopped, if that was reported.
    ///
    /// # Errors
    /// QEMU has exited.
    pub fn stopped_at(&mut self, qmp: &mut Qmp) -> Result<Option<Instant>, QmpError> {
        while self.stopped.is_none() {
            match qmp.event(Duration::ZERO)? {
                None => break,
                Some(event) => {
                    let ago = std::time::SystemTime::now()
                        .duration_since(std::time::UNIX_EPOCH)
                        .unwrap_or_default()
                        .saturating_sub(event.at);
                    let now = Instant::now();
                    self.process_event(&event, now.checked_sub(ago).unwrap_or(now));
                }
            }
        }
        Ok(self.stopped)
    }

    /// Changes the permitted downtime.
    pub const fn set_downtime(&mut self, downtime_ms: u64) {
        self.downtime_ms = downtime_ms;
    }

    /// Returns why the migration will not end at this rate; `None` while that is unknown.
    #[must_use]
    pub fn verdict(&self) -> Option<String> {
        self.verdict.clone()
    }

    /// Takes a sample and returns the snapshot.
    pub fn report(&mut self, migration: &Value, progress: &SenderProgress, elapsed: Duration) -> MigrationReport {
        let ram = RamStats::parse(migration);
        let totals = progress.totals();
        self.samples.push((elapsed, totals.clone()));
        self.samples.retain(|(at, _)| elapsed.saturating_sub(*at) <= RATE_WINDOW);
        let (since, first) = &self.samples[0];
        let seconds = (elapsed - *since).as_secs_f64();
        let per_second = |now: u64, then: u64| {
            if seconds > 0.0 { ((now - then) as f64 / seconds) as u64 } else { 0 }
        };
        let mut report = MigrationReport {
            seconds: elapsed.as_secs_f64(),
            status: migration["status"].as_str().unwrap_or("none").to_owned(),
            round: ram.round,
            remaining_bytes: ram.remaining_bytes,
            total_bytes: ram.total_bytes,
            dirty_bytes_per_s: ram.dirty_bytes_per_s,
            stream_bytes_per_s: per_second(totals.raw_bytes, first.raw_bytes),
            wire_bytes_per_s: per_second(totals.wire_bytes, first.wire_bytes),
            processors: per_second(totals.cpu_ns, first.cpu_ns) as f64 / 1e9,
            encoding: per_second(totals.encode_cpu_ns, first.encode_cpu_ns) as f64 / 1e9,
            waiting: per_second(totals.write_ns, first.write_ns) as f64 / 1e9,
            expected_seconds: None,
            expected_downtime_ms: None,
            downtime_ms: None,
            verdict: None,
            totals,
        };
        let gain = report.stream_bytes_per_s.saturating_sub(report.dirty_bytes_per_s);
        if gain > 0 && report.status == "active" {
            report.expected_seconds = Some(report.remaining_bytes as f64 / gain as f64);
        }
        self.update_verdict(&report, progress.link().losses);
        report.verdict.clone_from(&self.verdict);
        report
    }

    /// Compares the bytes remaining at the beginning of each round with those of earlier rounds.
    fn update_verdict(&mut self, report: &MigrationReport, losses: u64) {
        if report.round == self.round || report.status != "active" {
            return;
        }
        self.round = report.round;
        // A round during which the link was lost does not predict later rounds.
        if std::mem::replace(&mut self.losses, losses) != losses {
            return;
        }
        if report.round < 2 || report.stream_bytes_per_s == 0 {
            return;
        }
        let allowed = report.stream_bytes_per_s / 1000 * self.downtime_ms;
        if report.remaining_bytes < self.least_remaining / 10 * 9 || report.remaining_bytes <= allowed {
            self.least_remaining = self.least_remaining.min(report.remaining_bytes);
            self.stalled_rounds = 0;
            self.verdict = None;
            return;
        }
        self.stalled_rounds += 1;
        if self.stalled_rounds < STALLED_ROUNDS_MAX {
            return;
        }
        let mb = |bytes: u64| bytes / 1_000_000;
        let needed = self.least_remaining.saturating_mul(1000) / report.stream_bytes_per_s;
        self.verdict = Some(format!(
            "it will not end at this rate: the guest changes {} MB of its memory per second, and {} MB are transferred ({} MB on \
            the link); allow a downtime of about {} ms, post-copy or throttling, or use a faster link",
            mb(report.dirty_bytes_per_s),
            mb(report.stream_bytes_per_s),
            mb(report.wire_bytes_per_s),
            needed.next_multiple_of(100)
        ));
    }
}
