//! Kills a pager at random moments under a process that uses its memory, and starts a successor. The process must
//! notice no more than a pause.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::{Args, ValueEnum};
use larder_vm::control::limit_memory;
use larder_vm::control::memory::MemoryPatch;

use super::Random;
use super::memory::{Attach, Pager, Verifier};
use super::memory_guest::{DiskIo, MemoryGuest, Options};
use super::pauses::DurationSample;

/// Repeatedly kill the pager of a process that uses its memory
#[derive(Args)]
pub struct Arguments {
    /// Number of kills
    #[arg(long, default_value_t = 500)]
    count: u32,
    /// Process whose memory is managed
    #[arg(long, value_enum, default_value_t = Load::Verifier)]
    load: Load,
    /// Precede each kill with a burst of evictions, not every sixth one
    #[arg(long)]
    burst: bool,
    /// Give the pager a swap cache, to which compressed pages are written
    #[arg(long)]
    swap: bool,
    /// Directory of the guest's disk and the swap cache
    #[arg(long, default_value = ".")]
    folder: PathBuf,
    /// Path of larder; by default the one in this program's directory
    #[arg(long)]
    larder: Option<PathBuf>,
    /// Seed of the random moments
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Process whose memory is managed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Load {
    /// A program that writes and verifies its memory
    Verifier,
    /// A guest with a disk whose I/O QEMU's threads do
    Threads,
    /// A guest with a disk whose I/O is done by io_uring, bypassing the page cache
    Uring,
}

/// Number and kind of the kills.
#[derive(Clone, Copy, Debug)]
pub struct KillPlan {
    /// Number of kills.
    pub count: u32,
    /// Interval, in kills, at which the budget is lowered right before a kill.
    pub burst_every: u32,
}

/// Result of the campaign.
#[derive(Debug, Default)]
pub struct Report {
    /// Attached pagers that were killed.
    pub kills: u32,
    /// Kills right after a lowered budget had started a burst of evictions.
    pub bursts: u32,
    /// Pagers that were killed before they reported that they had attached.
    pub early: u32,
    /// Times from each kill until a successor served faults.
    pub served: DurationSample,
    /// The verifier's longest access from each kill until it made progress again.
    pub stalls: DurationSample,
    /// Pages that were evicted.
    pub evicted: u64,
    /// Faults that brought pages back.
    pub faults: u64,
    /// Accesses of the verifier, or rounds of the guest.
    pub done: u64,
}

/// Memory of the verifier, in MiB.
pub const VERIFIER_MIB: u64 = 64;
/// Budget of the verifier, in bytes.
pub const VERIFIER_BUDGET: u64 = 32 << 20;

/// Runs the campaign with a verifier, which is started with `command`.
///
/// # Errors
/// If a page has wrong content, or the verifier makes no progress.
pub fn of_verifier(
    larder: &Path,
    command: Command,
    attach_options: &[&str],
    directory: &Path,
    kills: KillPlan,
    random: &mut Random,
) -> anyhow::Result<Report> {
    let mut verifier = Verifier::start(command)?;
    let budget = VERIFIER_BUDGET.to_string();
    let attach = Attach::new(larder, directory, verifier.pid(), &[&["--budget", &budget], attach_options].concat());
    let mut report = Report::default();
    let mut pager = attach.start()?;
    pager.wait_for_budget()?;
    for kill in 0..kills.count {
        std::thread::sleep(Duration::from_micros(random.below(150_000)));
        verifier.report()?;
        let before = verifier.report()?.accesses;
        pager = report
            .kill(&attach, pager, VERIFIER_BUDGET, kill, kills, random)
            .with_context(|| format!("kill {kill}; the verifier: {}", verifier.process.output()))?;
        let mut longest = Duration::ZERO;
        loop {
            let now = verifier.report().with_context(|| format!("after kill {kill}"))?;
            longest = longest.max(now.longest);
            if now.accesses > before + 500 {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        report.stalls.push(longest);
    }
    report.count(&pager)?;
    pager.detach()?;
    verifier.works()?;
    report.done = verifier.stop()?;
    Ok(report)
}

/// Runs the campaign with a guest.
///
/// # Errors
/// If a page has wrong content, or the guest makes no progress.
pub fn of_guest(
    larder: &Path,
    io: DiskIo,
    attach_options: &[&str],
    directory: &Path,
    kills: KillPlan,
    random: &mut Random,
) -> anyhow::Result<Report> {
    let options = Options { disk: Some(io), ..Options::default() };
    let guest = MemoryGuest::start(options, directory)?;
    let budget = guest.used()? / 2;
    let text = budget.to_string();
    let attach = Attach::new(larder, directory, guest.pid(), &[&["--budget", &text], attach_options].concat());
    let mut report = Report::default();
    let mut pager = attach.start()?;
    pager.wait_until(|state| state.evicted_pages > 0)?;
    for kill in 0..kills.count {
        std::thread::sleep(Duration::from_micros(random.below(500_000)));
        pager = report
            .kill(&attach, pager, budget, kill, kills, random)
            .with_context(|| format!("kill {kill}; the guest: {}", guest.process.output()))?;
        if kill % 20 == 19 {
            guest.works(0).with_context(|| format!("after kill {kill}"))?;
        }
    }
    guest.works(1)?;
    report.count(&pager)?;
    pager.detach()?;
    guest.works(0)?;
    report.done = guest.finish()? as u64;
    Ok(report)
}

impl Report {
    /// Kills a pager, and starts its successor.
    fn kill(
        &mut self,
        attach: &Attach,
        mut pager: Pager,
        budget: u64,
        kill: u32,
        kills: KillPlan,
        random: &mut Random,
    ) -> anyhow::Result<Pager> {
        self.count(&pager)?;
        if kill.is_multiple_of(kills.burst_every) {
            let patch = MemoryPatch { budget: Some(budget / 4 * 3), ..MemoryPatch::default() };
            limit_memory(attach.control(), patch)?;
            std::thread::sleep(Duration::from_micros(random.below(20_000)));
            self.bursts += 1;
        }
        let killed = Instant::now();
        pager.process.kill();
        self.kills += 1;
        // Some successors are killed while they start.
        while random.below(6) == 0 {
            let mut early_pager = super::process::Process::start(attach.command())?;
            std::thread::sleep(Duration::from_micros(random.below(40_000)));
            early_pager.kill();
            self.early += 1;
        }
        let pager = attach.start()?;
        self.served.push(killed.elapsed());
        Ok(pager)
    }

    fn count(&mut self, pager: &Pager) -> anyhow::Result<()> {
        let state = pager.state()?;
        self.evicted += state.evicted_pages;
        let faults = &state.faults;
        self.faults += faults.uniform.count + faults.compressed.count + faults.disk.count;
        Ok(())
    }
}

/// Runs the campaign and prints its results.
///
/// # Errors
/// If a page has wrong content, or something is missing.
pub fn main(arguments: &Arguments) -> anyhow::Result<()> {
    let larder = super::find_larder(arguments.larder.as_deref())?;
    let directory = tempfile::tempdir_in(&arguments.folder).context("creating a directory for the disk")?;
    let directory = directory.path().canonicalize()?;
    let kills = KillPlan { count: arguments.count, burst_every: if arguments.burst { 1 } else { 6 } };
    let swap = directory.join("swap").display().to_string();
    let attach_options = match arguments.swap {
        true => vec!["--swap-cache", &swap, "--swap-size", "1GiB", "--compressed", "4MiB"],
        false => Vec::new(),
    };
    let mut random = Random::new(arguments.seed);
    let report = match arguments.load {
        Load::Verifier => {
            let command = verifier(VERIFIER_MIB)?;
            of_verifier(&larder, command, &attach_options, &directory, kills, &mut random)?
        }
        Load::Threads => of_guest(&larder, DiskIo::Threads, &attach_options, &directory, kills, &mut random)?,
        Load::Uring => of_guest(&larder, DiskIo::Uring, &attach_options, &directory, kills, &mut random)?,
    };
    let progress_unit = match arguments.load {
        Load::Verifier => "accesses",
        Load::Threads | Load::Uring => "rounds of the guest",
    };
    println!(
        "{} kills, {} of them during a burst of evictions, and {} of successors that were starting; {} pages evicted, {} paged \
         in by faults; {} {progress_unit} without a mismatch",
        report.kills, report.bursts, report.early, report.evicted, report.faults, report.done
    );
    println!("time from the kill until the successor served faults, {}", report.served);
    if !report.stalls.is_empty() {
        println!("longest access after each kill, {}", report.stalls);
    }
    Ok(())
}

/// Returns the command that starts this program as a verifier.
///
/// # Errors
/// If this program's path is unknown.
pub fn verifier(mib: u64) -> anyhow::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["verify-memory", "--mib", &mib.to_string()]);
    Ok(command)
}
