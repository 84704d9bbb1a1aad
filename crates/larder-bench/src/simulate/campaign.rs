//! Many seeds, on several threads.

use std::cell::RefCell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::Args;

use super::seed::{Run, Summary};
use super::stack::{self, STACKS, Stack};

/// Findings after which a campaign ends.
const FINDINGS_MAX: usize = 5;

/// How often progress is shown.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(10);

/// Random work on stacks of layers over simulated disks that fail and stop, checked against the block contract
#[derive(Args, Debug)]
pub struct Arguments {
    /// How many seeds
    #[arg(long, default_value_t = 10_000)]
    seeds: u64,
    /// The first seed
    #[arg(long, default_value_t = 0)]
    start: u64,
    /// Threads; all cores if not given
    #[arg(long)]
    jobs: Option<usize>,
    /// Only this stack; otherwise each seed takes the next one
    #[arg(long, value_parser = clap::builder::PossibleValuesParser::new(STACKS.iter().map(|stack| stack.name())))]
    stack: Option<String>,
    /// Print what happened even if all promises were kept
    #[arg(long)]
    log: bool,
}

/// A seed that broke a promise.
#[derive(Debug)]
pub struct Finding {
    /// The stack's name.
    pub stack: &'static str,
    /// Which seed.
    pub seed: u64,
    /// The promise that was broken.
    pub broken: String,
    /// What happened.
    pub log: String,
}

impl std::fmt::Display for Finding {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self {
            stack,
            seed,
            broken,
            log,
        } = self;
        write!(
            f,
            "{log}\nseed {seed} on {stack}: {broken}\n\
             replay: cargo run --release -p larder-bench -- simulate --stack {stack} --start {seed} --seeds 1\n"
        )
    }
}

thread_local! {
    /// Where this thread panicked last.
    static PANIC: RefCell<Option<String>> = const { RefCell::new(None) };
}

/// Runs one seed on one stack.
///
/// # Errors
/// The promise that was broken, with the log.
pub fn simulate(stack: &'static dyn Stack, seed: u64) -> Result<Summary, Box<Finding>> {
    simulate_with_log(stack, seed).0
}

fn simulate_with_log(stack: &'static dyn Stack, seed: u64) -> (Result<Summary, Box<Finding>>, Run<'static>) {
    let mut run = Run::new(stack, seed);
    let result = catch_unwind(AssertUnwindSafe(|| run.run()));
    let result = result.unwrap_or_else(|panic| {
        let message = PANIC.take().or_else(|| panic.downcast_ref::<String>().cloned());
        Err(format!("panicked: {}", message.unwrap_or_default()))
    });
    let result = result.map_err(|broken| {
        Box::new(Finding {
            stack: stack.name(),
            seed,
            broken,
            log: run.log(),
        })
    });
    (result, run)
}

/// A campaign; whether all promises were kept.
///
/// # Errors
/// The arguments make no sense.
pub fn run(arguments: &Arguments) -> anyhow::Result<bool> {
    let stacks = match &arguments.stack {
        None => STACKS.to_vec(),
        Some(name) => vec![stack::find(name).ok_or_else(|| anyhow::anyhow!("no stack is called {name}"))?],
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
        let jobs: Vec<_> = (0..arguments.jobs.unwrap_or(cores).max(1))
            .map(|_| scope.spawn(|| campaign.work()))
            .collect();
        campaign.show_progress(begin, || jobs.iter().all(|job| job.is_finished()));
    });
    drop(std::panic::take_hook());
    Ok(campaign.report(begin.elapsed()))
}

struct Campaign {
    stacks: Vec<&'static dyn Stack>,
    start: u64,
    seeds: u64,
    log: bool,
    taken: AtomicU64,
    total: Mutex<(u64, Summary)>,
    findings: AtomicUsize,
}

impl Campaign {
    /// Takes seeds until there are no more, or enough was found.
    fn work(&self) {
        loop {
            let index = self.taken.fetch_add(1, Ordering::Relaxed);
            if index >= self.seeds || self.findings() >= FINDINGS_MAX {
                return;
            }
            let seed = self.start.wrapping_add(index);
            let stack = self.stacks[(seed % self.stacks.len() as u64) as usize];
            let (result, run) = simulate_with_log(stack, seed);
            if self.log {
                println!("{}", run.log());
            }
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

    /// Prints what came out; whether nothing was found.
    fn report(&self, elapsed: Duration) -> bool {
        let (seeds, total) = *lock(&self.total);
        println!(
            "{seeds} seeds kept all promises, {} did not; {} requests, {} stops, {} L1 and {} refcount tables moved, {:.0} s of virtual time in {:.1} s",
            self.findings(),
            total.requests,
            total.stops,
            total.moves[0],
            total.moves[1],
            total.virtual_time.as_secs_f64(),
            elapsed.as_secs_f64(),
        );
        self.findings() == 0
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
