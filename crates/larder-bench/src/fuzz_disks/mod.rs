//! A differential fuzzer for disks. It makes images with every combination of qcow2 features, sends random requests
//! over NBD and vhost-user-blk through the real program, with kills, restarts, growth and caches between them, and
//! compares the results with a model of the bytes and with QEMU's tools.
//!
//! A seed determines the image and the steps. It does not determine which requests a kill interrupts, nor the order
//! in which concurrent requests are carried out. A failing case is shortened, and printed as the command that repeats
//! it.
//!
//! The invariants:
//! - A read returns the last write; a discarded sector holds its old bytes or zeros. Concurrent requests may take
//!   effect in any order, for each sector separately.
//! - A range whose block status is zero reads as zeros.
//! - After a kill the next server has all acknowledged requests; of those in flight each sector is old or new.
//!   Without a next server QEMU reads at least the flushed requests.
//! - `qemu-img check` finds nothing, or after a kill only leaks; `larder disk check` finds the same.
//! - Backing files and snapshots keep their bytes, and a raw data file is the disk.

mod build;
mod coverage;
pub mod fault;
mod flight;
mod guest;
mod live;
mod model;
pub(crate) mod nbd;
mod random;
mod shape;
mod shorten;
mod steps;
mod tools;
mod world;

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use coverage::FeatureCoverage;
use fault::{Fault, QEMU_DAMAGE};
use random::SeededRandom;
use shape::{REMOVABLE, Shape, Wanted};
use steps::Step;
use world::World;

use crate::campaign::find_larder;

/// Number of findings after which a campaign ends.
const FINDINGS_MAX: usize = 5;
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// Send random requests to disks with every combination of features, and compare with a model and with QEMU
#[derive(Args, Clone, Debug)]
pub struct Arguments {
    /// Number of images
    #[arg(long, default_value_t = 1000)]
    images: u64,
    /// Seed of the first image; each further image has the next number
    #[arg(long, default_value_t = 0)]
    seed: u64,
    /// Make only images with an external data file
    #[arg(long)]
    data_files_only: bool,
    /// Kill a server of each image at least once
    #[arg(long)]
    kills: bool,
    /// Remove these features from the images that the seeds give
    #[arg(long, value_delimiter = ',', value_parser = clap::builder::PossibleValuesParser::new(REMOVABLE))]
    without: Vec<String>,
    /// Run only these of the seed's steps: 3,5-7
    #[arg(long, value_delimiter = ',')]
    steps: Vec<String>,
    /// Print the steps of each image
    #[arg(long)]
    log: bool,
    /// Print a failing case as it is, without shortening it
    #[arg(long)]
    whole: bool,
    /// Number of findings after which the campaign ends
    #[arg(long, default_value_t = FINDINGS_MAX)]
    findings: usize,
    /// Number of threads; all cores by default
    #[arg(long)]
    jobs: Option<usize>,
    /// Directory of the images; its file system determines how they are read and written
    #[arg(long, default_value = "/dev/shm")]
    folder: PathBuf,
    /// Directory for the images of failing cases
    #[arg(long, default_value = "target/fuzz-disks")]
    keep: PathBuf,
    /// Path of larder; by default the one in this program's directory
    #[arg(long)]
    larder: Option<PathBuf>,
}

/// One image and its steps.
#[derive(Clone, Debug)]
struct Case {
    seed: u64,
    shape: Shape,
    removed: Vec<String>,
    steps: Vec<Step>,
    /// Numbers of the seed's remaining steps; `None`: all of them.
    kept: Option<Vec<usize>>,
    wanted: Wanted,
}

/// Result of a case.
#[derive(Debug, Default)]
struct Done {
    features: Vec<String>,
    requests: u64,
}

impl Case {
    fn new(seed: u64, wanted: Wanted) -> Self {
        let mut shape = Shape::random(&mut SeededRandom::new(seed, 0), wanted);
        let steps = steps::random(&mut SeededRandom::new(seed, 1), &shape, wanted);
        shape.has_kills = steps.iter().any(|step| matches!(step, Step::Kill { .. }));
        Self { seed, shape, removed: Vec::new(), steps, kept: None, wanted }
    }

    fn remove(&mut self, feature: &str) {
        self.shape.remove(feature);
        self.removed.push(feature.to_owned());
    }

    /// Returns the seed's remaining steps, with their numbers.
    fn steps(&self) -> Vec<(usize, &Step)> {
        match &self.kept {
            None => self.steps.iter().enumerate().collect(),
            Some(kept) => kept.iter().filter_map(|index| Some((*index, self.steps.get(*index)?))).collect(),
        }
    }

    /// Returns the command that repeats the case.
    fn command(&self) -> String {
        let mut command = format!("larder-bench fuzz-disks --images 1 --seed {}", self.seed);
        if self.wanted.data_file {
            command.push_str(" --data-files-only");
        }
        if self.wanted.kills {
            command.push_str(" --kills");
        }
        if !self.removed.is_empty() {
            command.push_str(&format!(" --without {}", self.removed.join(",")));
        }
        if let Some(kept) = &self.kept {
            command.push_str(&format!(" --steps {}", shorten::ranges(kept)));
        }
        command
    }

    /// Runs the case in a new directory, which is then removed. Files of a failing case are copied to `keep`.
    fn run(&self, larder: &Path, directory: &Path, keep: Option<&Path>) -> Result<Done, Fault> {
        let case_directory = tempfile::Builder::new().prefix("fuzz").tempdir_in(directory)?;
        let result = self.run_in(larder, case_directory.path());
        if let (Err(_), Some(keep)) = (&result, keep) {
            copy_files(case_directory.path(), keep)?;
        }
        result
    }

    fn run_in(&self, larder: &Path, directory: &Path) -> Result<Done, Fault> {
        let mut world = World::new(larder, directory, &self.shape, self.seed)?;
        for (index, step) in self.steps() {
            let result = world.step(step);
            result.map_err(|fault| Fault { step: Some(index), ..fault })?;
        }
        world.end()?;
        let mut features = self.shape.features();
        features.extend(world.events.iter().map(|event| (*event).to_owned()));
        Ok(Done { features, requests: world.requests })
    }
}

fn copy_files(from: &Path, to: &Path) -> Result<(), Fault> {
    let _ = std::fs::remove_dir_all(to);
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            std::fs::copy(entry.path(), to.join(entry.file_name()))?;
        }
    }
    Ok(())
}

/// Result of a campaign.
#[derive(Debug)]
pub struct Report {
    /// Failures, each with the command that repeats it.
    pub findings: Vec<String>,
    /// Images without a finding.
    pub images: u64,
    /// Images that QEMU damaged itself.
    pub skipped: u64,
    /// Requests that were compared.
    pub requests: u64,
    coverage: FeatureCoverage,
}

struct Campaign<'a> {
    arguments: &'a Arguments,
    larder: PathBuf,
    wanted: Wanted,
    kept: Option<Vec<usize>>,
    taken: AtomicU64,
    images: AtomicU64,
    found: AtomicUsize,
    report: Mutex<Report>,
}

/// Runs a campaign and prints its result. Returns whether no case failed.
///
/// # Errors
/// If the arguments are inconsistent, or something is missing.
pub fn run(arguments: &Arguments) -> anyhow::Result<bool> {
    let begin = Instant::now();
    let report = campaign(arguments, true)?;
    let wanted = Wanted { data_file: arguments.data_files_only, kills: arguments.kills };
    println!("{}", report.coverage.table(wanted));
    println!(
        "{} images without a difference, {} with a difference, {} damaged by QEMU; {} requests in {:.1} s",
        report.images,
        report.findings.len(),
        report.skipped,
        report.requests,
        begin.elapsed().as_secs_f64()
    );
    Ok(report.findings.is_empty())
}

/// Runs a campaign of test size with this program.
///
/// # Errors
/// If something is missing.
pub fn short(larder: &Path, seeds: std::ops::Range<u64>, data_files_only: bool, kills: bool) -> anyhow::Result<Report> {
    let arguments = Arguments {
        images: seeds.end - seeds.start,
        seed: seeds.start,
        data_files_only,
        kills,
        without: Vec::new(),
        steps: Vec::new(),
        log: false,
        whole: false,
        findings: 1,
        jobs: None,
        folder: PathBuf::from("/dev/shm"),
        keep: PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/fuzz-disks"),
        larder: Some(larder.to_owned()),
    };
    campaign(&arguments, false)
}

fn campaign(arguments: &Arguments, prints_progress: bool) -> anyhow::Result<Report> {
    let larder = find_larder(arguments.larder.as_deref())?;
    let kept = shorten::numbers(&arguments.steps).context("--steps")?;
    ensure!(kept.is_none() || arguments.images == 1, "--steps is for one image: --images 1");
    let campaign = Campaign {
        arguments,
        larder,
        wanted: Wanted { data_file: arguments.data_files_only, kills: arguments.kills },
        kept,
        taken: AtomicU64::new(0),
        images: AtomicU64::new(0),
        found: AtomicUsize::new(0),
        report: Mutex::new(Report {
            findings: Vec::new(),
            images: 0,
            skipped: 0,
            requests: 0,
            coverage: FeatureCoverage::default(),
        }),
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let jobs = arguments.jobs.unwrap_or(cores).max(1).min(arguments.images.max(1) as usize);
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..jobs).map(|_| scope.spawn(|| campaign.work())).collect();
        if prints_progress {
            campaign.show_progress(|| threads.iter().all(|thread| thread.is_finished()));
        }
    });
    Ok(campaign.report.into_inner().unwrap_or_else(PoisonError::into_inner))
}

impl Campaign<'_> {
    /// Runs seeds until there are no more, or there are enough findings.
    fn work(&self) {
        loop {
            let index = self.taken.fetch_add(1, Ordering::Relaxed);
            let enough_findings = self.found.load(Ordering::Relaxed) >= self.arguments.findings;
            if index >= self.arguments.images || enough_findings {
                return;
            }
            self.one(self.arguments.seed.wrapping_add(index));
        }
    }

    fn one(&self, seed: u64) {
        let mut case = Case::new(seed, self.wanted);
        self.arguments.without.iter().for_each(|feature| case.remove(feature));
        case.kept.clone_from(&self.kept);
        if self.arguments.log {
            println!("{}", shorten::describe(&case));
        }
        let keep = self.arguments.keep.join(format!("seed-{seed}"));
        let result = case.run(&self.larder, &self.arguments.folder, Some(&keep));
        let finding = match result {
            Ok(done) => {
                let mut report = self.lock();
                report.images += 1;
                report.requests += done.requests;
                report.coverage.add(&done.features);
                self.images.fetch_add(1, Ordering::Relaxed);
                return;
            }
            Err(fault) if fault.kind == QEMU_DAMAGE => {
                self.lock().skipped += 1;
                return;
            }
            Err(fault) => {
                self.found.fetch_add(1, Ordering::Relaxed);
                self.explain(case, fault, &keep)
            }
        };
        println!("{finding}");
        self.lock().findings.push(finding);
    }

    /// Shortens a failing case. Returns the finding's text.
    fn explain(&self, case: Case, fault: Fault, keep: &Path) -> String {
        let full_command = case.command();
        let (case, fault) = match self.arguments.whole {
            true => (case, fault),
            false => shorten::shorten(case, fault, &self.larder, &self.arguments.folder, keep),
        };
        format!(
            "{}\n{fault}\nrepeat with: {}\nthe full case: {full_command}\nfiles of the case: {}\n",
            shorten::describe(&case),
            case.command(),
            keep.display()
        )
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Report> {
        self.report.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn show_progress(&self, finished: impl Fn() -> bool) {
        let begin = Instant::now();
        let mut next = PROGRESS_INTERVAL;
        while !finished() {
            std::thread::sleep(Duration::from_millis(20));
            if begin.elapsed() >= next {
                next += PROGRESS_INTERVAL;
                let (images, found) = (self.images.load(Ordering::Relaxed), self.found.load(Ordering::Relaxed));
                eprintln!("{images} of {} images, {found} findings", self.arguments.images);
            }
        }
    }
}
