//! `larder-bench foreign-writes`: kills the server of a disk with a cache, lets another program write to the image,
//! and checks that the next server returns no stale data from the cache.
//!
//! Each attempt has a disk, a cache and servers of its own. The cache holds the whole disk when the server is killed,
//! idle or under load. The other program writes to data that is clean in the cache. A model has the allowed content
//! of each sector: another program's write, an acknowledged write, or, for requests in flight, the old or the new
//! content. The next server is started with the same arguments, and the whole disk is read through it several times.
//! In the end QEMU reads the image.
//!
//! A server may refuse to serve in two cases only, and must not have changed the image then: a write-back cache is
//! dirty, or QEMU has opened a qcow2 image whose journal had changes.
//!
//! Controls are the same attempts without another program. They show that a cache stays warm when no other program
//! writes.

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

use super::cached::{CacheMode, CacheRetention};
use super::disk::Format;
use super::find_larder;
use attempt::{Done, Plan};
use guest::Load;
use model::{Mismatch, Wrong};

pub use attempt::Outcome;
pub use store::Place;

/// Kill servers of disks with a cache, have another program write to the image, and compare what the next server serves
#[derive(Args, Clone, Debug)]
pub struct Arguments {
    /// Number of attempts in which another program writes
    #[arg(long, value_name = "N", default_value_t = 504)]
    tries: u32,
    /// Number of attempts without another program; by default the same as --tries
    #[arg(long, value_name = "N")]
    controls: Option<u32>,
    /// Number of concurrent attempts
    #[arg(long, value_name = "N", default_value_t = 48)]
    at_once: usize,
    /// Delays between the kill and the other program's write, in seconds
    #[arg(long, value_name = "SECONDS", value_delimiter = ',', default_value = "0.1,1,5,10,20,30,60")]
    delays: Vec<f64>,
    /// Seed of all random choices
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run a single attempt of the campaign: N, or control-N
    #[arg(long, value_name = "TRY")]
    only: Option<String>,
    /// Path of larder; by default the one in this program's directory
    #[arg(long, value_name = "PROGRAM")]
    larder: Option<PathBuf>,
    /// Directories for images, used in turn; their file systems determine which changes can be proven
    #[arg(long, value_name = "DIRECTORY", value_delimiter = ',', default_value = ".")]
    folder: Vec<PathBuf>,
}

/// Parameters of a campaign.
#[derive(Clone, Debug)]
pub struct Campaign<'a> {
    /// Path of the `larder` program.
    pub larder: &'a Path,
    /// Directories for images, which the attempts use in turn.
    pub folders: &'a [PathBuf],
    /// Number of attempts in which another program writes.
    pub tries: u32,
    /// Number of attempts without another program.
    pub controls: u32,
    /// Number of concurrent attempts.
    pub at_once: usize,
    /// Delays between the kill and the other program's write.
    pub delays: &'a [Duration],
    /// Seed of all random choices.
    pub seed: u64,
}

/// Results of the attempts with one kind of disk, or one delay.
#[derive(Clone, Debug, Default)]
pub struct Cell {
    /// Number of attempts with each outcome.
    pub outcomes: BTreeMap<Outcome, u32>,
    /// Attempts in which another program's write was missing.
    pub stale: u32,
    /// Attempts in which an acknowledged request was missing.
    pub lost: u32,
    /// Attempts that failed otherwise.
    pub failed: u32,
    /// Requests in flight at kills.
    pub in_flight: usize,
}

/// Results of the controls with one kind of image location.
#[derive(Clone, Debug, Default)]
pub struct ControlResults {
    /// Outcomes of the attempts.
    pub cell: Cell,
    /// Cache survival over the kills.
    pub warmth: CacheRetention,
    /// Number of attempts with an idle guest.
    pub idle: u32,
    /// Most bytes to be compared after an idle server was killed.
    pub unproven_idle: u64,
    /// Most bytes to be compared after a server under load was killed.
    pub unproven_busy: u64,
}

/// A format, a cache mode and an image location.
type Kind = (&'static str, &'static str, Place);

/// Results of a campaign.
#[derive(Debug, Default)]
pub struct Report {
    /// Results of attempts with another program, by kind of disk.
    pub kinds: BTreeMap<Kind, Cell>,
    /// Results of the same attempts, by delay.
    pub delays: BTreeMap<Duration, Cell>,
    /// Results of attempts without another program.
    pub controls: BTreeMap<Place, ControlResults>,
    /// Failures, each with the command that repeats it.
    pub failures: Vec<String>,
}

/// Minimum for the median share of checkpointed lines that survive a plain kill.
const CHECKPOINTED_RETENTION_MIN: f64 = 0.99;

const PROGRESS_INTERVAL: Duration = Duration::from_secs(30);

const MODES: [CacheMode; 4] = [CacheMode::Wt, CacheMode::Wa, CacheMode::Pt, CacheMode::Wb];
const FORMATS: [Format; 2] = [Format::Raw, Format::Qcow2];

/// Runs a campaign and prints its results. Returns whether there were no failures.
///
/// # Errors
/// If the program is missing, or there are no delays or directories.
pub fn main(arguments: &Arguments) -> anyhow::Result<bool> {
    let larder = find_larder(arguments.larder.as_deref())?;
    let seconds = arguments.delays.iter().map(|seconds| Duration::try_from_secs_f64(*seconds));
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
        ensure!(!plans.is_empty(), "--only {only}: no such attempt within --tries and --controls");
    }
    let report = campaign.run_plans(&plans);
    println!("{report}");
    for failure in &report.failures {
        println!("\nFAILED: {failure}");
    }
    Ok(report.failures.is_empty())
}

impl Campaign<'_> {
    /// Runs all attempts.
    ///
    /// # Errors
    /// If there are no delays or directories.
    pub fn run(&self) -> anyhow::Result<Report> {
        Ok(self.run_plans(&self.plans()?))
    }

    /// Returns the plans of all attempts, evenly spread over all kinds of disks, delays and loads.
    fn plans(&self) -> anyhow::Result<Vec<Plan>> {
        ensure!(!self.delays.is_empty(), "--delays is empty");
        ensure!(!self.folders.is_empty(), "--folder is empty: no directory for images");
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
        // The step 7 is coprime to the number of kinds, so that a few attempts cover all sorts too.
        let kind = index * 7 % kinds;
        let (location, kind) = (kind % Place::ALL.len(), kind / Place::ALL.len());
        let (mode, format) = (kind % MODES.len(), kind / MODES.len());
        let (delay_round, delay_index) = (round / self.delays.len(), round % self.delays.len());
        Plan {
            number,
            is_control,
            format: FORMATS[format],
            mode: MODES[mode],
            place: Place::ALL[location],
            delay: self.delays[(delay_index + index) % self.delays.len()],
            load: Load::ALL[(delay_round + mode + format) % Load::ALL.len()],
            seed: self.seed << 32 | u64::from(number) << 1 | u64::from(is_control),
        }
    }

    fn run_plans(&self, plans: &[Plan]) -> Report {
        let (next, report) = (AtomicUsize::new(0), Mutex::new(Report::default()));
        let last_progress = Mutex::new(Instant::now());
        std::thread::scope(|scope| {
            for _ in 0..self.at_once.clamp(1, plans.len().max(1)) {
                scope.spawn(|| {
                    while let Some(plan) = plans.get(next.fetch_add(1, Ordering::Relaxed)) {
                        let directory = &self.folders[plan.number as usize / 2 % self.folders.len()];
                        let result = attempt::run(self.larder, directory, plan);
                        let mut report = report.lock().unwrap_or_else(PoisonError::into_inner);
                        report.add(plan, &result, self);
                        let mut last_progress = last_progress.lock().unwrap_or_else(PoisonError::into_inner);
                        if last_progress.elapsed() > PROGRESS_INTERVAL {
                            *last_progress = Instant::now();
                            eprintln!(
                                "{} of {} attempts, {} failures",
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
        report.check_controls();
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

    /// Returns the number of attempts with this outcome.
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
            let delays: Vec<String> = campaign.delays.iter().map(|delay| delay.as_secs_f64().to_string()).collect();
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
            self.kinds.entry((format, plan.mode.word(), plan.place)).or_default().add(done);
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
                    "{}: after a plain kill of an idle server, the next one did not use the cache at once: {:?}, seed {}",
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

    /// Checks that plain kills preserve nearly all checkpointed lines.
    fn check_controls(&mut self) {
        for (place, controls) in &self.controls {
            if let Some(share) = controls.warmth.of_settled().filter(|share| *share < CHECKPOINTED_RETENTION_MIN) {
                self.failures.push(format!(
                    "{}: the median share of checkpointed lines that survive a plain kill is {:.2} %",
                    place.word(),
                    share * 100.0
                ));
            }
        }
    }

    /// Returns the sum of all attempts with another program.
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

/// Column titles of a [`Cell`]'s row.
const COLUMNS: &str = "attempts | stale | lost | failed | compared | emptied | refused (dirty) | refused (journal) | trusted | requests in flight |";

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rule = "--- | ".repeat(10);
        writeln!(f, "| image, mode, location | {COLUMNS}\n| --- | {}", rule.trim_end())?;
        for ((format, mode, place), cell) in &self.kinds {
            writeln!(f, "| {format}, {mode}, {} | {cell} |", place.word())?;
        }
        writeln!(f, "| all | {} |", self.total())?;
        writeln!(f, "\n| delay between kill and write | {COLUMNS}\n| --- | {}", rule.trim_end())?;
        for (delay, cell) in &self.delays {
            writeln!(f, "| {delay:?} | {cell} |")?;
        }
        writeln!(f, "\n| no other program wrote | {COLUMNS}\n| --- | {}", rule.trim_end())?;
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
    /// Attempts cover all combinations once, and a small number of them is spread evenly.
    fn tries_cover_kinds_delays_and_loads() {
        let delays: Vec<Duration> = (1..=7).map(Duration::from_secs).collect();
        let key = |plan: &Plan| {
            let load = Load::ALL.iter().position(|load| *load == plan.load);
            (plan.format == Format::Raw, plan.mode.word(), plan.place, plan.delay, load)
        };
        let all: BTreeSet<_> = plans(504, 0, &delays).iter().map(key).collect();
        assert_eq!(all.len(), 504, "each combination occurs once");
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
