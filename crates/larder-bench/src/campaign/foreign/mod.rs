//! `larder-bench foreign-writes`: the server of a disk with a cache is killed, another program writes to the image, and the next
//! server must not serve old data from the cache.
//!
//! Each try has a disk, a cache and servers of its own. The cache holds the whole disk when the server is killed, idle or under
//! load. The other program writes to what the cache holds clean. A model knows what each sector may hold then: what another
//! program has written, what was acknowledged, or, of requests in flight, the old or the new content. The next server is started
//! with the same words, and all of the disk is read through it several times; QEMU reads the image in the end.
//!
//! A server may refuse to serve in two cases only, and has not changed the image then: a write-back cache has data that the disk
//! has not, or a qcow2 image was opened by QEMU while its journal had changes.
//!
//! Controls are the same without another program. They show that a cache stays warm where nobody has written.

mod attempt;
mod guest;
mod model;
mod store;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;

use super::cached::{CacheMode, Warmth};
use super::disk::Format;
use super::larder_beside;
use attempt::{Done, Plan};
use guest::Load;
use model::{Mismatch, Wrong};

pub use attempt::Outcome;
pub use store::Place;

/// Kill servers of disks with a cache, have another program write to the image, and compare what the next server serves
#[derive(Args, Clone, Debug)]
pub struct Arguments {
    /// Number of tries in which another program writes
    #[arg(long, value_name = "N", default_value_t = 504)]
    tries: u32,
    /// Number of tries without another program; by default as many as the others
    #[arg(long, value_name = "N")]
    controls: Option<u32>,
    /// Number of tries at the same time
    #[arg(long, value_name = "N", default_value_t = 48)]
    at_once: usize,
    /// Times between the kill and the other program's write, in seconds
    #[arg(
        long,
        value_name = "SECONDS",
        value_delimiter = ',',
        default_value = "0.1,1,5,10,20,30,60"
    )]
    delays: Vec<f64>,
    /// The source of everything random
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run one try of the campaign alone: N, or control-N
    #[arg(long, value_name = "TRY")]
    only: Option<String>,
    /// The larder to serve with; by default the one beside this program
    #[arg(long, value_name = "PROGRAM")]
    larder: Option<PathBuf>,
    /// Directories for images, which the tries use in turn; their file systems decide what is proven
    #[arg(long, value_name = "DIRECTORY", value_delimiter = ',', default_value = ".")]
    folder: Vec<PathBuf>,
}

/// What a campaign does.
#[derive(Clone, Debug)]
pub struct Campaign<'a> {
    /// The program.
    pub larder: &'a Path,
    /// Directories for images, which the tries use in turn.
    pub folders: &'a [PathBuf],
    /// The number of tries in which another program writes.
    pub tries: u32,
    /// The number of tries without another program.
    pub controls: u32,
    /// The number of tries at the same time.
    pub at_once: usize,
    /// Times between the kill and the other program's write.
    pub delays: &'a [Duration],
    /// The source of everything random.
    pub seed: u64,
}

/// The tries of one kind of disk, or of one delay.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    /// How many had each outcome.
    pub outcomes: BTreeMap<Outcome, u32>,
    /// Tries in which another program's write was not there.
    pub stale: u32,
    /// Tries in which an acknowledged request was not there.
    pub lost: u32,
    /// Tries that failed otherwise.
    pub failed: u32,
    /// Requests that were in flight at kills.
    pub in_flight: usize,
}

/// The controls of one kind of place.
#[derive(Clone, Debug, Default)]
pub struct Controls {
    /// What became of their caches.
    pub cell: Cell,
    /// How warm the caches were.
    pub warmth: Warmth,
    /// How many were idle.
    pub idle: u32,
    /// The most bytes that were to be compared, of those that were idle when their server was killed.
    pub unproven_idle: u64,
    /// The same of the others.
    pub unproven_busy: u64,
}

/// A format, a mode and a place.
type Kind = (&'static str, &'static str, Place);

/// What came of a campaign.
#[derive(Debug, Default)]
pub struct Report {
    /// The tries with another program, by what the disk is.
    pub kinds: BTreeMap<Kind, Cell>,
    /// The same tries by the delay.
    pub delays: BTreeMap<Duration, Cell>,
    /// The tries without another program.
    pub controls: BTreeMap<Place, Controls>,
    /// What must not be, each with what repeats it.
    pub failures: Vec<String>,
}

/// The share of the settled lines that a plain kill leaves, at the median.
const SETTLED_MIN: f64 = 0.99;

const PROGRESS_INTERVAL: Duration = Duration::from_secs(30);

const MODES: [CacheMode; 4] = [CacheMode::Wt, CacheMode::Wa, CacheMode::Pt, CacheMode::Wb];
const FORMATS: [Format; 2] = [Format::Raw, Format::Qcow2];

/// Runs a campaign and prints what came of it; whether all was as it must be.
///
/// # Errors
/// The program is missing, or there are no delays or folders.
pub fn main(arguments: &Arguments) -> anyhow::Result<bool> {
    let larder = larder_beside(arguments.larder.as_deref())?;
    let seconds = arguments
        .delays
        .iter()
        .map(|seconds| Duration::try_from_secs_f64(*seconds));
    let delays = seconds.collect::<Result<Vec<_>, _>>().context("--delays")?;
    let campaign = Campaign {
        larder: &larder,
        folders: &arguments.folder,
        tries: arguments.tries,
        controls: arguments.controls.unwrap_or(arguments.tries),
        at_once: arguments.at_once,
        delays: &delays,
        seed: arguments.seed,
    };
    let mut plans = campaign.plans()?;
    if let Some(only) = &arguments.only {
        plans.retain(|plan| plan.name() == *only);
        ensure!(
            !plans.is_empty(),
            "there is no try {only} among those of --tries and --controls"
        );
    }
    let report = campaign.run_plans(&plans);
    println!("{report}");
    for failure in &report.failures {
        println!("\nFAILED: {failure}");
    }
    Ok(report.failures.is_empty())
}

impl Campaign<'_> {
    /// Runs all tries.
    ///
    /// # Errors
    /// There are no delays or folders.
    pub fn run(&self) -> anyhow::Result<Report> {
        Ok(self.run_plans(&self.plans()?))
    }

    /// Returns what is tried, evenly spread over all kinds of disks, delays and loads.
    fn plans(&self) -> anyhow::Result<Vec<Plan>> {
        ensure!(!self.delays.is_empty(), "there are no delays");
        ensure!(!self.folders.is_empty(), "there is no folder for images");
        let mut plans = Vec::new();
        for number in 0..self.tries.max(self.controls) {
            for is_control in [false, true] {
                let count = if is_control { self.controls } else { self.tries };
                if number < count {
                    plans.push(self.plan(number, is_control));
                }
            }
        }
        Ok(plans)
    }

    fn plan(&self, number: u32, is_control: bool) -> Plan {
        let kinds = FORMATS.len() * MODES.len() * Place::ALL.len();
        let (round, index) = (number as usize / kinds, number as usize % kinds);
        // A step that has no divisor in common with the number of kinds: a few tries are of all sorts, too.
        let kind = index * 7 % kinds;
        let (place, kind) = (kind % Place::ALL.len(), kind / Place::ALL.len());
        let (mode, format) = (kind % MODES.len(), kind / MODES.len());
        let (turn, of_turn) = (round / self.delays.len(), round % self.delays.len());
        Plan {
            number,
            is_control,
            format: FORMATS[format],
            mode: MODES[mode],
            place: Place::ALL[place],
            delay: self.delays[(of_turn + index) % self.delays.len()],
            load: Load::ALL[(turn + mode + format) % Load::ALL.len()],
            seed: self.seed << 32 | u64::from(number) << 1 | u64::from(is_control),
        }
    }

    fn run_plans(&self, plans: &[Plan]) -> Report {
        let (next, report) = (AtomicUsize::new(0), Mutex::new(Report::default()));
        let shown = Mutex::new(Instant::now());
        std::thread::scope(|scope| {
            for _ in 0..self.at_once.clamp(1, plans.len().max(1)) {
                scope.spawn(|| {
                    while let Some(plan) = plans.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let folder = &self.folders[plan.number as usize / 2 % self.folders.len()];
                        let done = attempt::run(self.larder, folder, plan);
                        let mut report = report.lock().unwrap_or_else(PoisonError::into_inner);
                        report.add(plan, &done, self);
                        let mut shown = shown.lock().unwrap_or_else(PoisonError::into_inner);
                        if shown.elapsed() > PROGRESS_INTERVAL {
                            *shown = Instant::now();
                            eprintln!(
                                "{} of {} tries, {} failures",
                                report.count(),
                                plans.len(),
                                report.failures.len()
                            );
                        }
                    }
                });
            }
        });
        let mut report = report.into_inner().unwrap_or_else(PoisonError::into_inner);
        report.judge_controls();
        report
    }
}

impl Plan {
    fn name(&self) -> String {
        match self.is_control {
            false => self.number.to_string(),
            true => format!("control-{}", self.number),
        }
    }
}

impl Cell {
    fn add(&mut self, done: &anyhow::Result<Done>) {
        match done {
            Ok(done) => {
                *self.outcomes.entry(done.outcome).or_default() += 1;
                self.in_flight += done.in_flight;
            }
            Err(error) => match error.downcast_ref::<Mismatch>().map(|mismatch| mismatch.wrong) {
                Some(Wrong::Stale) => self.stale += 1,
                Some(Wrong::Lost) => self.lost += 1,
                None => self.failed += 1,
            },
        }
    }

    /// Returns how many tries had an outcome.
    pub fn count(&self, outcome: Outcome) -> u32 {
        self.outcomes.get(&outcome).copied().unwrap_or_default()
    }

    fn tries(&self) -> u32 {
        self.outcomes.values().sum::<u32>() + self.stale + self.lost + self.failed
    }
}

impl Report {
    fn add(&mut self, plan: &Plan, done: &anyhow::Result<Done>, campaign: &Campaign<'_>) {
        let format = match plan.format {
            Format::Raw => "raw",
            Format::Qcow2 => "qcow2",
        };
        if let Err(error) = done {
            let label = match error.downcast_ref::<Mismatch>().map(|mismatch| mismatch.wrong) {
                Some(Wrong::Stale) => "STALE",
                Some(Wrong::Lost) => "LOST",
                None => "FAILED",
            };
            let delays: Vec<String> = campaign
                .delays
                .iter()
                .map(|delay| delay.as_secs_f64().to_string())
                .collect();
            let failure = format!(
                "{label}: {format}, {}, {}, {:?} after the kill, {:?}; repeat with larder-bench foreign-writes --tries {} --controls {} --delays {} --seed {} --only {}: {error:#}",
                plan.mode.word(),
                plan.place.word(),
                plan.delay,
                plan.load,
                campaign.tries,
                campaign.controls,
                delays.join(","),
                campaign.seed,
                plan.name()
            );
            eprintln!("{failure}");
            self.failures.push(failure);
        }
        if !plan.is_control {
            self.kinds
                .entry((format, plan.mode.word(), plan.place))
                .or_default()
                .add(done);
            self.delays.entry(plan.delay).or_default().add(done);
            if done.as_ref().is_ok_and(|done| done.outcome == Outcome::Believed) {
                self.failures.push(format!(
                    "{}: another program wrote, and the cache was trusted; seed {}",
                    plan.name(),
                    campaign.seed
                ));
            }
            return;
        }
        let controls = self.controls.entry(plan.place).or_default();
        controls.cell.add(done);
        let is_idle = plan.load == Load::Idle;
        controls.idle += u32::from(is_idle);
        if let Ok(done) = done {
            let unproven = match is_idle {
                true => &mut controls.unproven_idle,
                false => &mut controls.unproven_busy,
            };
            *unproven = done.unproven.max(*unproven);
            controls.warmth.add(done.warmth.clone());
            if is_idle && plan.place != Place::Nbd && done.outcome != Outcome::Believed {
                self.failures.push(format!(
                    "{}: a plain kill of an idle server, and the next one did not use the cache at once: {:?}, seed {}",
                    plan.name(),
                    done.outcome,
                    campaign.seed
                ));
            }
        }
    }

    fn count(&self) -> u32 {
        let kinds = self.kinds.values();
        let controls = self.controls.values().map(|controls| &controls.cell);
        kinds.chain(controls).map(Cell::tries).sum()
    }

    /// Plain kills leave nearly all settled lines.
    fn judge_controls(&mut self) {
        for (place, controls) in &self.controls {
            if let Some(share) = controls.warmth.of_settled().filter(|share| *share < SETTLED_MIN) {
                self.failures.push(format!(
                    "{}: a plain kill leaves {:.2} % of the settled lines at the median",
                    place.word(),
                    share * 100.0
                ));
            }
        }
    }

    /// Returns the sum of all tries with another program.
    pub fn total(&self) -> Cell {
        self.kinds.values().fold(Cell::default(), |mut sum, cell| {
            for (outcome, count) in &cell.outcomes {
                *sum.outcomes.entry(*outcome).or_default() += count;
            }
            sum.stale += cell.stale;
            sum.lost += cell.lost;
            sum.failed += cell.failed;
            sum.in_flight += cell.in_flight;
            sum
        })
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} | {} | {} | {} | {} | {} | {} | {} | {} | {}",
            self.tries(),
            self.stale,
            self.lost,
            self.failed,
            self.count(Outcome::Compared),
            self.count(Outcome::Anew),
            self.count(Outcome::Refused),
            self.count(Outcome::JournalRefused),
            self.count(Outcome::Believed),
            self.in_flight
        )
    }
}

/// The columns of a [`Cell`].
const COLUMNS: &str = "tries | stale | lost | failed | compared | begun anew | refused (dirty) | refused (journal) | trusted | requests in flight |";

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rule = "--- | ".repeat(10);
        writeln!(f, "| image, mode, place | {COLUMNS}\n| --- | {}", rule.trim_end())?;
        for ((format, mode, place), cell) in &self.kinds {
            writeln!(f, "| {format}, {mode}, {} | {cell} |", place.word())?;
        }
        writeln!(f, "| all | {} |", self.total())?;
        writeln!(
            f,
            "\n| written so long after the kill | {COLUMNS}\n| --- | {}",
            rule.trim_end()
        )?;
        for (delay, cell) in &self.delays {
            writeln!(f, "| {delay:?} | {cell} |")?;
        }
        writeln!(f, "\n| nobody wrote | {COLUMNS}\n| --- | {}", rule.trim_end())?;
        for (place, controls) in &self.controls {
            writeln!(f, "| {} | {} |", place.word(), controls.cell)?;
        }
        for (place, controls) in &self.controls {
            write!(
                f,
                "\n{}: {}; to be compared: at most {} bytes after {} idle kills, {} bytes after the others",
                place.word(),
                controls.warmth,
                controls.unproven_idle,
                controls.idle,
                controls.unproven_busy
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn plans(tries: u32, controls: u32, delays: &[Duration]) -> Vec<Plan> {
        let campaign = Campaign {
            larder: Path::new("larder"),
            folders: &[PathBuf::from(".")],
            tries,
            controls,
            at_once: 1,
            delays,
            seed: 1,
        };
        campaign.plans().expect("plans")
    }

    #[test]
    fn tries_are_spread_over_all_kinds_delays_and_loads() {
        let delays: Vec<Duration> = (1..=7).map(Duration::from_secs).collect();
        let key = |plan: &Plan| {
            let load = Load::ALL.iter().position(|load| *load == plan.load);
            (
                plan.format == Format::Raw,
                plan.mode.word(),
                plan.place,
                plan.delay,
                load,
            )
        };
        let all: BTreeSet<_> = plans(504, 0, &delays).iter().map(key).collect();
        assert_eq!(all.len(), 504, "each once");
        let few = plans(24, 12, &delays[..2]);
        assert_eq!(few.len(), 36);
        let tries: BTreeSet<_> = few.iter().filter(|plan| !plan.is_control).map(key).collect();
        let of = |index: u32| tries.iter().filter(|key| key.4 == Some(index as usize)).count();
        assert_eq!(tries.len(), 24);
        assert!((0..3).all(|load| of(load) >= 6), "{tries:?}");
        let seeds: BTreeSet<u64> = few.iter().map(|plan| plan.seed).collect();
        assert_eq!(seeds.len(), 36);
    }
}
