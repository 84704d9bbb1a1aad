//! Runs several guests within a memory budget that is less than they use, for any length of time. The guests use and
//! verify their memory, while balloons inflate and deflate in some of them. No guest may find wrong data or hang.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use clap::Args;
use larder_block::ByteLen;
use larder_vm::control::memory::MemoryState;
use larder_vm::control::state::Latency;

use super::guest::Monitor;
use super::memory::{Attach, Pager};
use super::memory_guest::{FIRST_ROUND_TEXT, GUEST_CPUS, MemoryGuest, Options};

/// Keep the memory of several guests within a budget while they use and verify it
#[derive(Args)]
pub struct Arguments {
    /// Number of guests
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..))]
    count: u32,
    /// Memory of each guest, in MiB
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(256..))]
    mib: u64,
    /// Budget of all guests together; each guest has an equal part of it
    #[arg(long, default_value = "2GiB")]
    budget: ByteLen,
    /// Minutes to run, from when all guests are within the budget
    #[arg(long, default_value_t = 30.0)]
    minutes: f64,
    /// Number of guests with a balloon that inflates and deflates repeatedly
    #[arg(long, default_value_t = 2)]
    balloons: u32,
    /// Seconds without progress after which a guest counts as hung; by default 60 times the number of guest
    /// processors per processor of this machine
    #[arg(long)]
    patience: Option<u64>,
    /// Directory of the swap caches
    #[arg(long, default_value = ".")]
    folder: PathBuf,
    /// Path of larder; by default the one in this program's directory
    #[arg(long)]
    larder: Option<PathBuf>,
}

const MIB: u64 = 1 << 20;

/// Interval between checks of the guests.
const LOOK: Duration = Duration::from_secs(1);

/// Time for which a balloon keeps its size once it has reached it.
const REST: Duration = Duration::from_secs(10);

/// Divisor of the guest's memory that gives the balloon's size.
const BALLOON_DIVISOR: u64 = 8;

/// Divisor of the guest's memory that gives the balloon's permitted error: the guest counts in pages of its own.
const BALLOON_TOLERANCE_DIVISOR: u64 = 256;

/// Divisor of the budget that gives the permitted excess: evictions lag behind page-ins while direct I/O pins pages.
const OVER: u64 = 16;

/// Returns the guests' configuration. They fill nearly all memory that a balloon leaves; the rest is for their
/// system.
fn options(mib: u64) -> Options {
    Options { mib, old_mib: mib / 3, new_mib: mib / 5, ..Options::default() }
}

/// A balloon that alternates between two sizes.
struct Balloon {
    monitor: Monitor,
    /// Bytes of memory that the guest is to have now: all of it, or less.
    target: u64,
    /// Time when the target was set.
    since: Instant,
    /// Time when the target was reached, if it has been.
    reached: Option<Instant>,
    /// Number of targets reached.
    turns: u32,
}

/// A guest with the observations made of it.
struct Watched {
    guest: MemoryGuest,
    pager: Pager,
    memory: u64,
    balloon: Option<Balloon>,
    rounds: usize,
    /// Time when the last round ended.
    progress: Instant,
    longest_round: Duration,
    /// Most memory in use, as Larder reports it.
    used_most: u64,
    /// Most memory in use, as the kernel reports it for the process's memfds.
    files_most: u64,
    last: MemoryState,
    problem: Option<String>,
}

/// Runs the campaign and prints its results.
///
/// # Errors
/// If a page has wrong content, a guest or a pager hangs or exits, or something is missing.
pub fn main(arguments: &Arguments) -> anyhow::Result<()> {
    let larder = super::find_larder(arguments.larder.as_deref())?;
    let directory = tempfile::tempdir_in(&arguments.folder).context("creating a directory for the swap caches")?;
    let directory = directory.path().canonicalize()?;
    let processors = std::thread::available_parallelism()?.get() as u64;
    let load = u64::from(arguments.count * GUEST_CPUS).div_ceil(processors);
    let hang_timeout = Duration::from_secs(arguments.patience.unwrap_or(60 * load));
    let options = options(arguments.mib);
    let boot = |_| MemoryGuest::boot(options, &directory);
    let guests = (0..arguments.count).map(boot).collect::<anyhow::Result<Vec<_>>>()?;
    for guest in &guests {
        guest.process.wait_for(FIRST_ROUND_TEXT, hang_timeout)?;
    }
    eprintln!("{} guests are running; hang timeout {hang_timeout:.0?}", guests.len());
    let budget = arguments.budget.get() / u64::from(arguments.count);
    let mut observed_guests = Vec::new();
    for (number, guest) in guests.into_iter().enumerate() {
        let has_balloon = number < arguments.balloons as usize;
        observed_guests.push(Watched::attach(
            guest,
            arguments.mib * MIB,
            &larder,
            &directory.join(number.to_string()),
            budget,
            has_balloon,
        )?);
    }
    wait_within_budget(&mut observed_guests, hang_timeout)?;
    let seconds = arguments.minutes * 60.0;
    let (started, mut last_report) = (Instant::now(), Instant::now());
    while started.elapsed().as_secs_f64() < seconds && observed_guests.iter().any(|one| one.problem.is_none()) {
        std::thread::sleep(LOOK);
        for one in &mut observed_guests {
            one.look(hang_timeout);
        }
        if last_report.elapsed() > Duration::from_secs(60) {
            last_report = Instant::now();
            let rounds: Vec<usize> = observed_guests.iter().map(|one| one.rounds).collect();
            eprintln!("{:.0?}: rounds {rounds:?}", started.elapsed());
        }
    }
    let elapsed = started.elapsed();
    // Prints the last observed state: the unfinished rounds at the deadline are no failure.
    println!(
        "\n{} guests of {} MiB in {}, {} with balloons, for {elapsed:.0?}\n",
        observed_guests.len(),
        arguments.mib,
        arguments.budget,
        arguments.balloons
    );
    print(&observed_guests);
    end(observed_guests, hang_timeout)
}

/// Waits until each guest is within its budget, and starts the observations of its memory.
fn wait_within_budget(all: &mut [Watched], patience: Duration) -> anyhow::Result<()> {
    let deadline = Instant::now() + patience;
    for one in all.iter_mut() {
        while one.last.used > one.last.budget + one.last.budget / OVER {
            ensure!(Instant::now() < deadline, "memory use stays above its budget: {:#?}", one.last);
            std::thread::sleep(LOOK / 10);
            one.last = one.pager.state()?;
        }
    }
    for one in all {
        (one.rounds, one.progress) = (one.guest.rounds(), Instant::now());
        (one.used_most, one.files_most) = (0, 0);
    }
    Ok(())
}

/// Detaches all pagers and ends all guests, unless they have failed.
fn end(all: Vec<Watched>, patience: Duration) -> anyhow::Result<()> {
    let ended: Vec<anyhow::Result<usize>> = std::thread::scope(|scope| {
        let threads = all.into_iter().map(|one| scope.spawn(move || one.end(patience)));
        let threads: Vec<_> = threads.collect();
        let joined = threads.into_iter().map(|one| one.join());
        joined.map(|ended| ended.unwrap_or_else(|_| bail!("a thread panicked"))).collect()
    });
    let mut failed = 0;
    for (number, ended) in ended.iter().enumerate() {
        if let Err(error) = ended {
            failed += 1;
            println!("\nguest {number}: {error:#}");
        }
    }
    ensure!(failed == 0, "{failed} of {} guests failed", ended.len());
    let rounds: usize = ended.into_iter().filter_map(Result::ok).sum();
    println!("\nall pagers detached and all guests exited cleanly: {rounds} rounds without a mismatch");
    Ok(())
}

impl Watched {
    fn attach(
        guest: MemoryGuest,
        memory: u64,
        larder: &Path,
        directory: &Path,
        budget: u64,
        has_balloon: bool,
    ) -> anyhow::Result<Self> {
        std::fs::create_dir(directory)?;
        let (swap, size, budget) = (directory.join("swap"), (memory * 2).to_string(), budget.to_string());
        let swap = swap.display().to_string();
        let attach_options = ["--budget", &budget, "--swap-cache", &swap, "--swap-size", &size];
        let pager = Attach::new(larder, directory, guest.pid(), &attach_options).start()?;
        let balloon = match has_balloon {
            false => None,
            true => Some(Balloon {
                monitor: guest.monitor()?,
                target: memory,
                since: Instant::now(),
                reached: Some(Instant::now()),
                turns: 0,
            }),
        };
        Ok(Self {
            last: pager.state()?,
            pager,
            memory,
            balloon,
            rounds: guest.rounds(),
            guest,
            progress: Instant::now(),
            longest_round: Duration::ZERO,
            used_most: 0,
            files_most: 0,
            problem: None,
        })
    }

    /// Checks a guest, unless it has failed before.
    fn look(&mut self, patience: Duration) {
        if self.problem.is_none()
            && let Err(error) = self.see(patience)
        {
            let text = format!("{error:#}");
            eprintln!("{text}");
            self.problem = Some(text);
        }
    }

    fn see(&mut self, patience: Duration) -> anyhow::Result<()> {
        let console = || self.guest.process.output();
        ensure!(!self.guest.process.has_ended() && self.mismatches() == 0, "the guest failed: {}", console());
        let rounds = self.guest.rounds();
        if rounds > self.rounds {
            self.longest_round = self.longest_round.max(self.progress.elapsed());
            (self.rounds, self.progress) = (rounds, Instant::now());
        }
        self.last = self.pager.state()?;
        let waited = self.progress.elapsed();
        ensure!(
            waited < patience,
            "the guest has hung for {waited:.0?}; {} faults are waiting for pages, the pager's problem is {:?}; the guest's console: {}",
            self.last.stalled,
            self.last.problem,
            console()
        );
        self.used_most = self.used_most.max(self.last.used);
        self.files_most = self.files_most.max(memfd_bytes(self.guest.pid())?);
        if let Some(balloon) = &mut self.balloon {
            balloon.turn(self.memory, patience)?;
        }
        Ok(())
    }

    /// Counts console lines that report wrong data; the guest's script ends then.
    fn mismatches(&self) -> usize {
        let console = self.guest.process.output();
        let is_failure = |line: &&str| {
            line.starts_with("verify:") || line.contains(": FAILED") || line.starts_with("LARDER-GUEST-EXIT")
        };
        console.lines().filter(is_failure).count()
    }

    /// Detaches the pager and ends the guest. Returns the guest's number of rounds.
    fn end(mut self, patience: Duration) -> anyhow::Result<usize> {
        if let Some(problem) = self.problem {
            bail!(problem);
        }
        self.pager.detach()?;
        self.guest.finish_within(patience)
    }
}

impl Balloon {
    /// Checks the balloon's progress, and sets a new target when it is due.
    fn turn(&mut self, memory: u64, patience: Duration) -> anyhow::Result<()> {
        match self.reached {
            Some(reached) if reached.elapsed() < REST => return Ok(()),
            Some(_) => {
                let deflated = memory - memory / BALLOON_DIVISOR;
                self.target = if self.target == memory { deflated } else { memory };
                self.monitor.run("balloon", &format!("{{\"value\": {}}}", self.target))?;
                (self.since, self.reached) = (Instant::now(), None);
            }
            None => {}
        }
        let line = self.monitor.run("query-balloon", "{}")?;
        let answer: serde_json::Value = serde_json::from_str(&line)?;
        let actual = answer["return"]["actual"].as_u64();
        let actual = actual.with_context(|| format!("unexpected reply to query-balloon: {line}"))?;
        if actual.abs_diff(self.target) <= memory / BALLOON_TOLERANCE_DIVISOR {
            self.reached = Some(Instant::now());
            self.turns += 1;
        }
        let (waited, target) = (self.since.elapsed(), self.target);
        ensure!(waited < patience, "the balloon leaves {actual} bytes instead of {target} after {waited:.0?}");
        Ok(())
    }
}

/// Returns the size of all memfds that a process has open: its RAM, compressed pages, and page metadata.
fn memfd_bytes(pid: u32) -> anyhow::Result<u64> {
    use std::os::unix::fs::MetadataExt as _;
    let mut files = std::collections::BTreeMap::new();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let path = entry?.path();
        // The descriptor may have been closed meanwhile.
        let Ok(target) = std::fs::read_link(&path) else {
            continue;
        };
        if target.to_string_lossy().starts_with("/memfd:")
            && let Ok(file) = std::fs::metadata(&path)
        {
            files.insert(file.ino(), file.blocks() * 512);
        }
    }
    Ok(files.values().sum())
}

/// Prints a row for each guest.
fn print(all: &[Watched]) {
    println!(
        "| guest | rounds | longest, s | pages evicted | refaults | from compressed RAM: faults, P50, P99 in µs | from disk | \
         zeros | writes | stall some, s (avg300) | stall full, s (avg300) | pause at attach | peak use, % of the \
         budget: reported, memfds | discarded pages | balloon targets reached | mismatches |"
    );
    println!("|{}", " --- |".repeat(16));
    for (number, one) in all.iter().enumerate() {
        let (state, budget) = (&one.last, one.last.budget as f64);
        let faults = &state.faults;
        let stall = |stall: &larder_vm::control::memory::StallState| {
            format!("{:.1} ({:.1} %)", stall.total_us as f64 / 1e6, stall.avg300)
        };
        println!(
            "| {number} | {} | {:.0} | {} | {} | {} | {} | {} | {} | {} | {} | {:.1?} | {:.1}, {:.1} | {} | {} | {} |",
            one.rounds,
            one.longest_round.as_secs_f64(),
            state.evicted_pages,
            state.refaults,
            latency(&faults.compressed),
            latency(&faults.disk),
            latency(&faults.zero),
            latency(&faults.write),
            stall(&state.pressure.some),
            stall(&state.pressure.full),
            one.pager.stood_still.unwrap_or_default(),
            one.used_most as f64 * 100.0 / budget,
            one.files_most as f64 * 100.0 / budget,
            state.given_up_pages,
            one.balloon.as_ref().map_or("none".to_owned(), |balloon| balloon.turns.to_string()),
            one.mismatches(),
        );
    }
}

fn latency(of: &Latency) -> String {
    let us = |share| of.quantile(share).unwrap_or_default().as_secs_f64() * 1e6;
    format!("{}, {:.0}, {:.0}", of.count, us(0.5), us(0.99))
}
