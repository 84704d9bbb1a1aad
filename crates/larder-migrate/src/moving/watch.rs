//! How a migration goes: what there is to show, and whether it will end.

use std::time::{Duration, Instant};

use serde::Serialize;
use serde_json::Value;

use crate::progress::{Progress, Totals};
use crate::qmp::{Event, Qmp, QmpError};

/// Rates are averages over this long.
const RATE_OVER: Duration = Duration::from_secs(1);
/// Rounds that bring nothing before it is said that none will.
const ROUNDS_WITHOUT_GAIN: u32 = 3;

/// A moment of a migration.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Report {
    /// Since QEMU began, in seconds.
    pub seconds: f64,
    /// As QEMU says it.
    pub status: String,
    /// From 1; the first sends all memory.
    pub round: u64,
    /// Bytes of memory that are still to be sent in this round.
    pub remaining_bytes: u64,
    /// Bytes of memory in all.
    pub total_bytes: u64,
    /// Bytes of memory that the guest changes in a second, as QEMU saw it in the round before.
    pub dirty_bytes_per_s: u64,
    /// Bytes of QEMU's stream that are sent in a second.
    pub stream_bytes_per_s: u64,
    /// Bytes on the link in a second.
    pub wire_bytes_per_s: u64,
    /// Processors that the lanes take: reading, encoding, encrypting, writing.
    pub processors: f64,
    /// Of these, for encoding.
    pub encoding: f64,
    /// Lanes that wait for the link, on an average.
    pub waiting: f64,
    /// In seconds, if it goes on so.
    pub expected_seconds: Option<f64>,
    /// For which the guest would stand still if it were to stop now, in milliseconds.
    pub expected_downtime_ms: Option<u64>,
    /// How long the guest stood still, in milliseconds, once that is over and if it is known.
    pub downtime_ms: Option<u64>,
    /// Why it will not end at this rate, and what can be done.
    pub verdict: Option<String>,
    /// All that was sent so far.
    pub totals: Totals,
}

/// What QEMU says of its guest's memory (`query-migrate`, `ram`); 0 is what it does not say yet.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ram {
    /// From 1.
    pub round: u64,
    /// Bytes that are still to be sent in this round.
    pub remaining_bytes: u64,
    /// Bytes in all.
    pub total_bytes: u64,
    /// Bytes that the guest changes in a second, as QEMU has counted over a second at least.
    pub dirty_bytes_per_s: u64,
}

impl Ram {
    /// Out of the whole answer.
    #[must_use]
    pub fn of(migration: &Value) -> Self {
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

/// The words for a `ShutdownCause` of QEMU's (qapi/run-state.json).
fn shutdown_cause(reason: Option<&str>) -> &'static str {
    match reason {
        Some("guest-shutdown") => "the guest shut down",
        Some("guest-reset") => "the guest rebooted, on which its QEMU ends (-no-reboot),",
        Some("guest-panic") => "the guest panicked",
        Some("host-qmp-system-reset") => "QEMU received the command to reset, on which it ends (-no-reboot),",
        Some("host-qmp-quit") => "QEMU received the command to quit",
        Some("host-signal") => "QEMU was ended by a signal",
        _ => "QEMU was shut down",
    }
}

/// Looks at a migration again and again.
pub struct Watch {
    downtime_ms: u64,
    stopped: Option<Instant>,
    /// Its migration has failed, or it runs again.
    gone_on: bool,
    /// The event that ends QEMU.
    shutdown: Option<&'static str>,
    /// QEMU reported it while the guest ran.
    shutdown_before_stop: bool,
    samples: Vec<(Duration, Totals)>,
    round: u64,
    /// Times that the link was lost before this round.
    losses: u64,
    /// Remaining at the beginning of the best round so far.
    least: u64,
    without_gain: u32,
    verdict: Option<String>,
}

impl Watch {
    /// Of one that has begun.
    #[must_use]
    pub const fn new(downtime_ms: u64) -> Self {
        Self {
            downtime_ms,
            stopped: None,
            gone_on: false,
            shutdown: None,
            shutdown_before_stop: false,
            samples: Vec::new(),
            round: 0,
            losses: 0,
            least: u64::MAX,
            without_gain: 0,
            verdict: None,
        }
    }

    /// Waits for events, until one comes or the time is over.
    ///
    /// # Errors
    /// QEMU has gone.
    pub fn hear(&mut self, qmp: &mut Qmp, wait: Duration) -> Result<(), QmpError> {
        if let Some(event) = qmp.event(wait)? {
            self.take(&event, Instant::now());
        }
        Ok(())
    }

    fn take(&mut self, event: &Event, at: Instant) {
        match event.name.as_str() {
            "STOP" => self.stopped = Some(at),
            "RESUME" => self.gone_on = true,
            "SHUTDOWN" => {
                self.shutdown = Some(shutdown_cause(event.data["reason"].as_str()));
                self.shutdown_before_stop = self.stopped.is_none();
            }
            "MIGRATION" if event.data["status"] == "failed" || event.data["status"] == "cancelled" => {
                self.gone_on = true
            }
            _ => {}
        }
    }

    /// Whether QEMU, which has ended since, had let the guest go on here, or had been about to.
    pub fn has_gone_on(&mut self, qmp: &mut Qmp) -> bool {
        self.take_pending(qmp);
        self.gone_on
    }

    /// Takes all events that have arrived.
    fn take_pending(&mut self, qmp: &mut Qmp) {
        while let Ok(Some(event)) = qmp.event(Duration::ZERO) {
            self.take(&event, Instant::now());
        }
    }

    /// Returns the event that ends QEMU, as a subject and a verb, if QEMU has reported one.
    pub fn shutdown_cause(&mut self, qmp: &mut Qmp) -> Option<&'static str> {
        self.take_pending(qmp);
        self.shutdown
    }

    /// Returns the same event if the guest ran until then: pre-copy sends the last of a VM only after it has stopped the guest.
    pub fn shutdown_before_stop(&mut self, qmp: &mut Qmp) -> Option<&'static str> {
        self.take_pending(qmp);
        self.shutdown.filter(|_| self.shutdown_before_stop)
    }

    /// When the guest stopped, as far as that was heard.
    ///
    /// # Errors
    /// QEMU has gone.
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
                    self.take(&event, now.checked_sub(ago).unwrap_or(now));
                }
            }
        }
        Ok(self.stopped)
    }

    /// The guest may stand still for another time than was said before.
    pub const fn allow(&mut self, downtime_ms: u64) {
        self.downtime_ms = downtime_ms;
    }

    /// Why it will not end at this rate; `None` while that is not known.
    #[must_use]
    pub fn verdict(&self) -> Option<String> {
        self.verdict.clone()
    }

    /// What there is to say now.
    pub fn report(&mut self, migration: &Value, progress: &Progress, elapsed: Duration) -> Report {
        let ram = Ram::of(migration);
        let totals = progress.totals();
        self.samples.push((elapsed, totals.clone()));
        self.samples.retain(|(at, _)| elapsed.saturating_sub(*at) <= RATE_OVER);
        let (since, first) = &self.samples[0];
        let seconds = (elapsed - *since).as_secs_f64();
        let per_second = |now: u64, then: u64| {
            if seconds > 0.0 {
                ((now - then) as f64 / seconds) as u64
            } else {
                0
            }
        };
        let mut report = Report {
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
        let gains = report.stream_bytes_per_s.saturating_sub(report.dirty_bytes_per_s);
        if gains > 0 && report.status == "active" {
            report.expected_seconds = Some(report.remaining_bytes as f64 / gains as f64);
        }
        self.judge(&report, progress.link().losses);
        report.verdict.clone_from(&self.verdict);
        report
    }

    /// At the beginning of each round what is left is compared with the rounds before.
    fn judge(&mut self, report: &Report, losses: u64) {
        if report.round == self.round || report.status != "active" {
            return;
        }
        self.round = report.round;
        // A round in which nothing went over for a while says nothing of those that come.
        if std::mem::replace(&mut self.losses, losses) != losses {
            return;
        }
        if report.round < 2 || report.stream_bytes_per_s == 0 {
            return;
        }
        let allowed = report.stream_bytes_per_s / 1000 * self.downtime_ms;
        if report.remaining_bytes < self.least / 10 * 9 || report.remaining_bytes <= allowed {
            self.least = self.least.min(report.remaining_bytes);
            self.without_gain = 0;
            self.verdict = None;
            return;
        }
        self.without_gain += 1;
        if self.without_gain < ROUNDS_WITHOUT_GAIN {
            return;
        }
        let mb = |bytes: u64| bytes / 1_000_000;
        let needed = self.least.saturating_mul(1000) / report.stream_bytes_per_s;
        self.verdict = Some(format!(
            "it will not end at this rate: the guest changes {} MB in a second, and {} MB of its memory go over ({} MB on \
            the link); you can allow a downtime of some {} ms, post-copy, throttling, or a faster link",
            mb(report.dirty_bytes_per_s),
            mb(report.stream_bytes_per_s),
            mb(report.wire_bytes_per_s),
            needed.next_multiple_of(100)
        ));
    }
}
