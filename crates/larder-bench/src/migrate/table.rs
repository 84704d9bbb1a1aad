//! Output of the measured moves.

use serde_json::{Value, json};

use super::Bench;
use super::guest::Move;
use super::load::Load;
use super::method::Method;
use super::moving::Outcome;
use super::search::verdict;
use crate::figures::median;

const PAGE_BYTES: f64 = 4096.0;

/// Moves of a guest that changes its memory at this rate.
pub(super) struct Row {
    pub(super) method: Method,
    /// Configured rate, in 10^6 bytes per second.
    pub(super) rate: u64,
    /// Rate that the guest reaches without moves.
    pub(super) alone: f64,
    pub(super) moves: Vec<Move>,
}

/// Published results (Intel, KVM Forum): guests with 4 CPUs and 32 GB, and with 8 and 128 GB, over 40 Gbit/s, with
/// 300 ms of downtime and compression level 1.
pub(super) fn published(load: Load) -> &'static str {
    match load {
        Load::Constant => {
            "\
| published, 40 Gbit/s | none | 16 CPU threads | QAT |
|---|---|---|---|
| 10^4 pages/s | 17-29 | 39-50 | 133-138 |
| largest rate, MB/s | 1100 | 1900 | 5000 |
| extra CPU, % | - | 678 | < 40 |
| ratio | - | 87.6 | 922 |
"
        }
        Load::Sequence => {
            "\
| published, 40 Gbit/s | none | 16 CPU threads | QAT |
|---|---|---|---|
| 10^4 pages/s | 17-29 | ~19 | 81-116 |
| largest rate, MB/s | 1100 | 700 | 4200 |
| extra CPU, % | - | 1600 | < 70 |
| ratio | - | 4.97 | 4.81 |
"
        }
        Load::Memcached => {
            "\
| published, 40 Gbit/s | none | 16 CPU threads | QAT |
|---|---|---|---|
| 10^4 pages/s | 18-22 | 7-10 | 48-53 |
| migration time, s | never ends | never ends | 60 |
| dirty syncs | never ends | never ends | 10 |
| ratio | - | 1.6 | 1.6 |
"
        }
        Load::Random | Load::Mixed => "",
    }
}

impl Move {
    /// Returns the bytes of sent pages that were not zero.
    fn sent_bytes(&self) -> f64 {
        self.pages as f64 * PAGE_BYTES
    }

    fn pages_per_s(&self) -> f64 {
        self.pages as f64 / self.total_s
    }

    /// Returns the ratio of the bytes of sent nonzero pages to the bytes on the link.
    fn ratio(&self) -> f64 {
        self.sent_bytes() / self.there_bytes as f64
    }

    fn cpu_per_gib(&self) -> f64 {
        (self.cpu_s[0] + self.cpu_s[1]) / (self.sent_bytes() / f64::from(1 << 30))
    }

    fn outcome(&self) -> &str {
        match &self.outcome {
            Outcome::Moved => "moved",
            Outcome::DidNotEnd => "timed out",
            Outcome::TooLate => "completed after its timeout",
            Outcome::Failed(why) => why,
        }
    }

    /// Describes the move in one line.
    pub(super) fn line(&self) -> String {
        let downtime = self.downtime_ms.map_or(String::new(), |ms| format!(", downtime {ms:.0} ms"));
        format!(
            "{} in {:.2} s{downtime}; {} rounds, {:.1} MB sent",
            self.outcome(),
            self.total_s,
            self.rounds,
            self.there_bytes as f64 / 1e6
        )
    }
}

impl Row {
    /// Share of the configured rate below which a guest counts as unable to reach it.
    pub(super) const SLOW: f64 = 0.8;

    /// Returns whether the guest cannot reach the configured rate.
    fn exceeds_guest_speed(&self) -> bool {
        self.alone < Self::SLOW * self.rate as f64
    }

    /// Returns the rate that the guest kept during moves, in 10^6 bytes per second.
    fn kept(&self) -> f64 {
        self.median(|of| of.kept)
    }

    /// Returns the successful moves, or all if none succeeded.
    fn counted(&self) -> Vec<&Move> {
        let moved: Vec<&Move> = self.moves.iter().filter(|of| of.outcome == Outcome::Moved).collect();
        if moved.is_empty() {
            return self.moves.iter().collect();
        }
        moved
    }

    fn median(&self, of: impl Fn(&Move) -> f64) -> f64 {
        let values: Vec<f64> = self.counted().into_iter().map(of).collect();
        median(&values)
    }

    fn line(&self) -> String {
        let moved = self.moves.iter().filter(|of| of.outcome == Outcome::Moved).count();
        let mut outcome = format!("{moved} of {}", self.moves.len());
        let mut failures: Vec<&str> = self.moves.iter().map(Move::outcome).collect();
        failures.retain(|&what| what != "moved");
        failures.sort_unstable();
        failures.dedup();
        if !failures.is_empty() {
            outcome = format!("{outcome}: {}", failures.join("; "));
        }
        let downtime = match self.median(|of| of.downtime_ms.unwrap_or(f64::NAN)) {
            ms if ms.is_nan() => "-".to_owned(),
            ms => format!("{ms:.0}"),
        };
        format!(
            "| {} | {} | {:.0} | {outcome} | {:.2} | {downtime} | {:.0} | {:.0} | {:.1} | {:.2} | {:.2} | {:.2} | {:.2} | {:.2} |",
            self.method.name(),
            self.rate,
            self.kept(),
            self.median(|of| of.total_s),
            self.median(|of| of.rounds as f64),
            self.median(Move::pages_per_s),
            self.median(|of| of.there_bytes as f64) / 1e6,
            self.median(|of| of.back_bytes as f64) / 1e6,
            self.median(Move::ratio),
            self.median(|of| of.cpu_s[0]),
            self.median(|of| of.cpu_s[1]),
            self.median(Move::cpu_per_gib),
        )
    }

    pub(super) fn json(&self, bench: &Bench<'_>) -> Vec<Value> {
        let row = |of: &Move| {
            json!({
                "load": bench.load.name(),
                "link": bench.link.speed.to_string(),
                "method": self.method.name(),
                "rate-mb-s": self.rate,
                "outcome": of.outcome(),
                "alone-rate-mb-s": self.alone,
                "kept-rate-mb-s": of.kept,
                "total-s": of.total_s,
                "downtime-ms": of.downtime_ms,
                "rounds": of.rounds,
                "pages": of.pages,
                "zero-pages": of.zeros,
                "there-bytes": of.there_bytes,
                "back-bytes": of.back_bytes,
                "ratio": of.ratio(),
                "cpu-source-s": of.cpu_s[0],
                "cpu-destination-s": of.cpu_s[1],
            })
        };
        self.moves.iter().map(row).collect()
    }
}

/// Prints the table of one load and link, and the published results.
pub(super) fn show(bench: &Bench<'_>, rows: &[Row]) {
    let arguments = bench.arguments;
    let qemu = if arguments.debian13 { "10" } else { "7.2" };
    println!(
        "\n{}, {}; QEMU {qemu}, {} MiB, of which {} change; downtime limit {} ms, time limit {} s\n",
        bench.load.name(),
        bench.link.speed.words(),
        arguments.memory,
        arguments.size,
        arguments.downtime,
        arguments.limit
    );
    println!(
        "| method | rate set, MB/s | rate during moves | moved | total, s | downtime, ms | rounds | pages/s | MB sent | MB returned | ratio | CPU s source | destination | per GiB sent |"
    );
    println!("|---|---|---|---|---|---|---|---|---|---|---|---|---|---|");
    for row in rows.iter().filter(|row| !row.moves.is_empty()) {
        println!("{}", row.line());
    }
    if arguments.rates.is_empty() {
        largest(bench, rows);
    }
    println!("\n{}", published(bench.load));
}

/// Prints the result of the search.
fn largest(bench: &Bench<'_>, rows: &[Row]) {
    println!("\nA move succeeds if the downtime is at most {:.0} ms.", bench.arguments.accept_ms());
    println!(
        "\n| method | largest rate set at which moves succeed, MB/s | rate during moves | highest rate during moves at any rate set | next rate |\n|---|---|---|---|---|"
    );
    for &method in &bench.arguments.modes {
        let rows_of_method = |good: bool| {
            rows.iter()
                .filter(move |row| row.method == method && verdict(row, bench.arguments.accept_ms()) == Some(good))
        };
        let best = rows_of_method(true).next_back();
        let rate_set = match best {
            // The configured rate is higher than the actual one then.
            Some(row) if row.exceeds_guest_speed() => {
                format!("{}, but the guest alone reaches {:.0}", row.rate, row.alone)
            }
            Some(row) => row.rate.to_string(),
            None => "none".to_owned(),
        };
        let next = match rows_of_method(false).next_back() {
            Some(row) => format!("{}: no", row.rate),
            None if best.is_some_and(Row::exceeds_guest_speed) => "the guest reaches no higher rate".to_owned(),
            None => "not tried".to_owned(),
        };
        let format_rate = |rate: Option<f64>| rate.map_or("-".to_owned(), |rate| format!("{rate:.0}"));
        let kept = format_rate(best.map(Row::kept));
        // A guest that gets less processor time is moved more easily, so the maximum need not be at the highest rate.
        let most = format_rate(rows_of_method(true).map(Row::kept).reduce(f64::max));
        println!("| {} | {rate_set} | {kept} | {most} | {next} |", method.name());
    }
}
