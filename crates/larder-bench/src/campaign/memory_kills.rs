//! A pager is killed at random moments under a process that works on its memory, and another one takes its place; the
//! process must notice nothing but a pause.

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
use super::pauses::Pauses;

/// Kill the pager of a process that works on its memory over and over
#[derive(Args)]
pub struct Arguments {
    /// How many times
    #[arg(long, default_value_t = 500)]
    count: u32,
    /// Whose memory
    #[arg(long, value_enum, default_value_t = Load::Verifier)]
    load: Load,
    /// Kill each amid a burst of evictions, not every sixth
    #[arg(long)]
    burst: bool,
    /// Give it a swap cache, which compressed pages go to
    #[arg(long)]
    swap: bool,
    /// Folder of the guest's disk and the swap cache
    #[arg(long, default_value = ".")]
    folder: PathBuf,
    /// The larder to attach with; by default the one beside this program
    #[arg(long)]
    larder: Option<PathBuf>,
    /// Where the random moments come from
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Whose memory it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Load {
    /// A program that writes and verifies
    Verifier,
    /// A guest with a disk whose I/O threads do
    Threads,
    /// A guest with a disk whose I/O io_uring does, past the page cache
    Uring,
}

/// How it is killed.
#[derive(Clone, Copy, Debug)]
pub struct Kills {
    /// How many times.
    pub count: u32,
    /// Every so many, the budget is lowered right before.
    pub burst_every: u32,
}

/// What came of it.
#[derive(Debug, Default)]
pub struct Report {
    /// Pagers killed that had attached.
    pub kills: u32,
    /// Of them, those that had just been told to evict much.
    pub bursts: u32,
    /// Pagers killed before they said that they had attached.
    pub early: u32,
    /// From each kill until another one served.
    pub served: Pauses,
    /// The process's longest access from then until it worked again; of a verifier.
    pub stalls: Pauses,
    /// Pages that were evicted.
    pub evicted: u64,
    /// Pages that came back to one who waited.
    pub faults: u64,
    /// Accesses of the verifier, or rounds of the guest.
    pub done: u64,
}

/// The program whose memory it is, in MiB, and the budget.
pub const VERIFIER_MIB: u64 = 64;
/// See above.
pub const VERIFIER_BUDGET: u64 = 32 << 20;

/// What a verifier that is started with `command` notices.
///
/// # Errors
/// Something was not as it was written, or stands still.
pub fn of_verifier(
    larder: &Path,
    command: Command,
    words: &[&str],
    folder: &Path,
    kills: Kills,
    random: &mut Random,
) -> anyhow::Result<Report> {
    let mut verifier = Verifier::start(command)?;
    let budget = VERIFIER_BUDGET.to_string();
    let attach = Attach::new(
        larder,
        folder,
        verifier.pid(),
        &[&["--budget", &budget], words].concat(),
    );
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

/// What a guest notices.
///
/// # Errors
/// Something was not as it was written, or stands still.
pub fn of_guest(
    larder: &Path,
    io: DiskIo,
    words: &[&str],
    folder: &Path,
    kills: Kills,
    random: &mut Random,
) -> anyhow::Result<Report> {
    let options = Options {
        disk: Some(io),
        ..Options::default()
    };
    let guest = MemoryGuest::start(options, folder)?;
    let budget = guest.used()? / 2;
    let text = budget.to_string();
    let attach = Attach::new(larder, folder, guest.pid(), &[&["--budget", &text], words].concat());
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
    /// Kills one, and has another one take its place.
    fn kill(
        &mut self,
        attach: &Attach,
        mut pager: Pager,
        budget: u64,
        kill: u32,
        kills: Kills,
        random: &mut Random,
    ) -> anyhow::Result<Pager> {
        self.count(&pager)?;
        if kill.is_multiple_of(kills.burst_every) {
            let patch = MemoryPatch {
                budget: Some(budget / 4 * 3),
                ..MemoryPatch::default()
            };
            limit_memory(attach.control(), patch)?;
            std::thread::sleep(Duration::from_micros(random.below(20_000)));
            self.bursts += 1;
        }
        let killed = Instant::now();
        pager.process.kill();
        self.kills += 1;
        // Some successors do not come far, either.
        while random.below(6) == 0 {
            let mut early = super::process::Process::start(attach.command())?;
            std::thread::sleep(Duration::from_micros(random.below(40_000)));
            early.kill();
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

/// Runs the campaign and prints what came of it.
///
/// # Errors
/// Something was not as it was written, or is missing.
pub fn main(arguments: &Arguments) -> anyhow::Result<()> {
    let larder = super::larder_beside(arguments.larder.as_deref())?;
    let folder = tempfile::tempdir_in(&arguments.folder).context("a folder for the disk")?;
    let folder = folder.path().canonicalize()?;
    let kills = Kills {
        count: arguments.count,
        burst_every: if arguments.burst { 1 } else { 6 },
    };
    let swap = folder.join("swap").display().to_string();
    let words = match arguments.swap {
        true => vec!["--swap-cache", &swap, "--swap-size", "1GiB", "--compressed", "4MiB"],
        false => Vec::new(),
    };
    let mut random = Random::new(arguments.seed);
    let report = match arguments.load {
        Load::Verifier => {
            let command = verifier(VERIFIER_MIB)?;
            of_verifier(&larder, command, &words, &folder, kills, &mut random)?
        }
        Load::Threads => of_guest(&larder, DiskIo::Threads, &words, &folder, kills, &mut random)?,
        Load::Uring => of_guest(&larder, DiskIo::Uring, &words, &folder, kills, &mut random)?,
    };
    let did = match arguments.load {
        Load::Verifier => "accesses",
        Load::Threads | Load::Uring => "rounds of the guest",
    };
    println!(
        "{} kills, {} of them amid a burst of evictions, and {} of successors that were still beginning; {} pages went, {} came \
         back to one who waited; {} {did} without a mismatch",
        report.kills, report.bursts, report.early, report.evicted, report.faults, report.done
    );
    println!("from the kill until another one served, {}", report.served);
    if !report.stalls.is_empty() {
        println!("the longest access after each, {}", report.stalls);
    }
    Ok(())
}

/// This program, as a verifier.
///
/// # Errors
/// It is not known where this program is.
pub fn verifier(mib: u64) -> anyhow::Result<Command> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["verify-memory", "--mib", &mib.to_string()]);
    Ok(command)
}
