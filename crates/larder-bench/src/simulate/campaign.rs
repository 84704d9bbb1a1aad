//! Runs many seeds, on several threads.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;

use super::memory::{self, MEMORY_SUBJECTS, Memory};
use super::seed::{self, Summary};
use super::stack::{STACKS, Stack};

/// Number of findings after which a campaign ends.
const FINDINGS_MAX: usize = 5;

/// Interval between progress messages.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// Check random work against the invariants, on stacks of layers over simulated disks that fail and stop, and on
/// memory whose pager is killed
#[derive(Args, Debug)]
pub struct Arguments {
    /// Number of seeds
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    /// First seed
    #[arg(long, default_value_t = 0)]
    start: u64,
    /// Number of threads; all cores by default
    #[arg(long)]
    jobs: Option<usize>,
    /// Use only this stack; by default successive seeds use successive stacks
    #[arg(long, value_parser = clap::builder::PossibleValuesParser::new(Subject::all().map(Subject::name)))]
    stack: Option<String>,
    /// Print the log even if all invariants hold
    #[arg(long)]
    log: bool,
}

/// A seed that violated an invariant.
#[derive(Debug)]
pub struct Finding {
    /// Name of the stack.
    pub stack: &'static str,
    /// The seed.
    pub seed: u64,
    /// The violated invariant.
    pub broken: String,
    /// Log of the run.
    pub log: String,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { stack, seed, broken, log } = self;
        write!(
            f,
            "{log}\nseed {seed} on {stack}: {broken}\n\
             replay: cargo run --release -p larder-bench -- simulate --stack {stack} --start {seed} --seeds 1\n"
        )
    }
}

thread_local! {
    /// Message of the last panic of this thread.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// A subject of simulation.
#[derive(Clone, Copy)]
pub enum Subject {
    /// A stack of layers over disks.
    Stack(&'static dyn Stack),
    /// Memory and its pager.
    Memory(&'static Memory),
}

impl Subject {
    /// Returns all subjects.
    pub fn all() -> impl Iterator<Item = Self> {
        let stacks = STACKS.iter().copied().map(Self::Stack);
        stacks.chain(MEMORY_SUBJECTS.into_iter().map(Self::Memory))
    }

    /// Returns the name of the subject.
    pub fn name(self) -> &'static str {
        match self {
            Self::Stack(stack) => stack.name(),
            Self::Memory(memory) => memory.name(),
        }
    }

    fn run(self, seed: u64, is_logged: bool) -> Run {
        match self {
            Self::Stack(stack) => Run::Stack(Box::new(seed::Run::new(stack, seed))),
            Self::Memory(memory) => Run::Memory(Box::new(memory.run(seed, is_logged))),
        }
    }
}

/// A run of one seed, whose log is available even after a panic.
enum Run {
    Stack(Box<seed::Run<'static>>),
    Memory(Box<memory::Run>),
}

impl Run {
    fn run(&mut self) -> Result<Summary, String> {
        match self {
            Self::Stack(run) => run.run(),
            Self::Memory(run) => run.run(),
        }
    }

    fn log(&self) -> String {
        match self {
            Self::Stack(run) => run.log(),
            Self::Memory(run) => run.log(),
        }
    }
}

/// Runs one seed.
///
/// # Errors
/// The violated invariant, with the log.
pub fn simulate(subject: Subject, seed: u64) -> Result<Summary, Box<Finding>> {
    let result = simulate_with_log(subject, seed, false).0;
    match (subject, result) {
        // A memory log takes long to write, so it is written only now: a seed always does the same.
        (Subject::Memory(_), Err(result)) => Err(simulate_with_log(subject, seed, true).0.err().unwrap_or(result)),
        (_, result) => result,
    }
}

fn simulate_with_log(subject: Subject, seed: u64, is_logged: bool) -> (Result<Summary, Box<Finding>>, String) {
    let mut run = subject.run(seed, is_logged);
    let result = catch_unwind(AssertUnwindSafe(|| run.run()));
    let result = result.unwrap_or_else(|panic| {
        let message = PANIC.take().or_else(|| panic.downcast_ref::<String>().cloned());
        Err(format!("panicked: {}", message.unwrap_or_default()))
    });
    let log = if result.is_err() || is_logged { run.log() } else { String::new() };
    let result = result.map_err(|broken| Box::new(Finding { stack: subject.name(), seed, broken, log: log.clone() }));
    (result, log)
}

/// Runs a campaign. Returns whether all invariants held.
///
/// # Errors
/// If the arguments are inconsistent.
pub fn run(arguments: &Arguments) -> anyhow::Result<bool> {
    let stacks: Vec<Subject> = match &arguments.stack {
        None => Subject::all().collect(),
        Some(name) => Subject::all().filter(|subject| subject.name() == name).collect(),
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let campaign = Campaign {
        stacks,
        start: arguments.start,
        seeds: arguments.seeds,
        log: arguments.log,
        taken: AtomicU64::new(0),
        total: Mutex::default(),
        findings: AtomicUsize::new(0),
    };
    std::panic::set_hook(Box::new(|panic| PANIC.set(Some(panic.to_string()))));
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let jobs: Vec<_> =
            (0..arguments.jobs.unwrap_or(cores).max(1)).map(|_| scope.spawn(|| campaign.work())).collect();
        campaign.show_progress(begin, || jobs.iter().all(|job| job.is_finished()));
    });
    drop(std::panic::take_hook());
    Ok(campaign.report(begin.elapsed()))
}

struct Campaign {
    stacks: Vec<Subject>,
    start: u64,
    seeds: u64,
    log: bool,
    taken: AtomicU64,
    total: Mutex<(u64, Summary)>,
    findings: AtomicUsize,
}

impl Campaign {
    /// Runs seeds until there are no more, or there are enough findings.
    fn work(&self) {
        loop {
            let index = self.taken.fetch_add(1, Ordering::Relaxed);
            if index >= self.seeds || self.findings() >= FINDINGS_MAX {
                return;
            }
            let seed = self.start.wrapping_add(index);
            let stack = self.stacks[(seed % self.stacks.len() as u64) as usize];
            let result = match self.log {
                true => {
                    let (result, log) = simulate_with_log(stack, seed, true);
                    println!("{log}");
                    result
                }
                false => simulate(stack, seed),
            };
            match result {
                Ok(summary) => self.add(summary),
                Err(finding) => {
                    println!("{finding}");
                    self.findings.fetch_add(1, Ordering::Relaxed);
                }
            }
        }
    }

    fn findings(&self) -> usize {
        self.findings.load(Ordering::Relaxed)
    }

    fn add(&self, summary: Summary) {
        let (seeds, total) = &mut *lock(&self.total);
        *seeds += 1;
        total.requests += summary.requests;
        total.stops += summary.stops;
        total.pages_out += summary.pages_out;
        total.pages_lost += summary.pages_lost;
        (0..2).for_each(|kind| total.moves[kind] += summary.moves[kind]);
        total.virtual_time += summary.virtual_time;
    }

    fn show_progress(&self, begin: Instant, finished: impl Fn() -> bool) {
        let mut next = PROGRESS_INTERVAL;
        while !finished() {
            std::thread::sleep(Duration::from_millis(20));
            if begin.elapsed() >= next {
                next += PROGRESS_INTERVAL;
                let (seeds, _) = *lock(&self.total);
                eprintln!("{seeds} of {} seeds, {} findings", self.seeds, self.findings());
            }
        }
    }

    /// Prints the results. Returns whether there are no findings.
    fn report(&self, elapsed: Duration) -> bool {
        let (seeds, total) = *lock(&self.total);
        println!(
            "{seeds} seeds without a violation, {} with one; {} requests, {} stops, {} L1 and {} refcount tables moved, {} pages of memory \
            evicted and {} lost, {:.0} s of virtual time in {:.1} s",
            self.findings(),
            total.requests,
            total.stops,
            total.moves[0],
            total.moves[1],
            total.pages_out,
            total.pages_lost,
            total.virtual_time.as_secs_f64(),
            elapsed.as_secs_f64(),
        );
        self.findings() == 0
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
