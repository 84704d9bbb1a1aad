//! Attaches a pager to a process under load, and detaches it, over and over. The process must notice no more than
//! pauses.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;

use super::Random;
use super::memory::{Attach, Verifier};
use super::memory_guest::{DiskIo, MemoryGuest, Options};
use super::memory_kills::{Load, VERIFIER_BUDGET, VERIFIER_MIB, verifier};
use super::pauses::DurationSample;

/// Limit for the first eviction: the quarantine, and an eviction on a busy machine.
const FIRST_EVICTION_TIMEOUT: Duration = Duration::from_secs(30);

/// Repeatedly attach a pager to a process that uses its memory, and detach it
#[derive(Args)]
pub struct Arguments {
    /// Number of attaches
    #[arg(long, default_value_t = 1000)]
    count: u32,
    /// Process whose memory is managed
    #[arg(long, value_enum, default_value_t = Load::Threads)]
    load: Load,
    /// Directory of the guest's disk
    #[arg(long, default_value = ".")]
    folder: PathBuf,
    /// Path of larder; by default the one in this program's directory
    #[arg(long)]
    larder: Option<PathBuf>,
    /// Seed of the random moments
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// Result of the campaign.
#[derive(Debug, Default)]
pub struct Report {
    /// Duration for which each attach paused a thread of the process.
    pub pauses: DurationSample,
    /// Times from each start of the pager until it had attached.
    pub attaches: DurationSample,
    /// Times from each request to detach until the pager had exited.
    pub detaches: DurationSample,
    /// Pages that were evicted.
    pub evicted: u64,
    /// Accesses of the verifier, or rounds of the guest.
    pub done: u64,
}

/// Runs the campaign with a verifier, which is started with `command`.
///
/// # Errors
/// If a page has wrong content, or the verifier makes no progress.
pub fn of_verifier(
    larder: &Path,
    command: Command,
    directory: &Path,
    count: u32,
    random: &mut Random,
) -> anyhow::Result<Report> {
    let mut verifier = Verifier::start(command)?;
    let budget = VERIFIER_BUDGET.to_string();
    let attach = Attach::new(larder, directory, verifier.pid(), &["--budget", &budget]);
    let mut report = Report::default();
    let before = descriptors(verifier.pid())?;
    for round in 0..count {
        report.attach(&attach, random).with_context(|| {
            let output = verifier.process.output();
            format!("attach {round}; the verifier: {output}")
        })?;
        verifier.report()?;
        std::thread::sleep(Duration::from_micros(random.below(50_000)));
    }
    let after = descriptors(verifier.pid())?;
    ensure!(before == after, "the process had {before} open descriptors before, and has {after} now");
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
    directory: &Path,
    count: u32,
    random: &mut Random,
) -> anyhow::Result<Report> {
    let options = Options { disk: Some(io), ..Options::default() };
    let guest = MemoryGuest::start(options, directory)?;
    let budget = (guest.used()? / 2).to_string();
    let attach = Attach::new(larder, directory, guest.pid(), &["--budget", &budget]);
    let mut report = Report::default();
    for round in 0..count {
        report.attach(&attach, random).with_context(|| {
            let console = guest.process.output();
            format!("attach {round}; the guest: {console}")
        })?;
        std::thread::sleep(Duration::from_micros(random.below(200_000)));
        if round % 50 == 49 {
            guest.works(0).with_context(|| format!("after attach {round}"))?;
        }
    }
    guest.works(1)?;
    report.done = guest.finish()? as u64;
    Ok(report)
}

impl Report {
    fn attach(&mut self, attach: &Attach, random: &mut Random) -> anyhow::Result<()> {
        let started = Instant::now();
        let mut pager = attach.start()?;
        self.attaches.push(started.elapsed());
        self.pauses
            .push(pager.stood_still.context("the pager reports no pause, although it took over from no other pager")?);
        // Some pagers have evicted nothing when they detach, some all that they should. If the process has files open
        // for direct I/O, the first pages are evicted after their quarantine.
        let (waits_for_pages, micros) = match random.below(4) {
            0 => (false, 0),
            1 => (false, 20_000),
            2 => (false, 500_000),
            _ => (true, 100_000),
        };
        let deadline = started + FIRST_EVICTION_TIMEOUT;
        while waits_for_pages && pager.state()?.evicted_pages == 0 {
            ensure!(Instant::now() < deadline, "no page was evicted within {FIRST_EVICTION_TIMEOUT:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(Duration::from_micros(random.below(micros + 1)));
        self.evicted += pager.state()?.evicted_pages;
        let requested = Instant::now();
        pager.detach()?;
        self.detaches.push(requested.elapsed());
        Ok(())
    }
}

fn descriptors(pid: u32) -> anyhow::Result<usize> {
    Ok(std::fs::read_dir(format!("/proc/{pid}/fd"))?.count())
}

/// Runs the campaign and prints its results.
///
/// # Errors
/// If a page has wrong content, or something is missing.
pub fn main(arguments: &Arguments) -> anyhow::Result<()> {
    let larder = super::find_larder(arguments.larder.as_deref())?;
    let directory = tempfile::tempdir_in(&arguments.folder).context("creating a directory for the disk")?;
    let directory = directory.path().canonicalize()?;
    let mut random = Random::new(arguments.seed);
    let (count, progress_unit) = (arguments.count, "rounds of the guest");
    let (report, progress_unit) = match arguments.load {
        Load::Verifier => {
            let command = verifier(VERIFIER_MIB)?;
            (of_verifier(&larder, command, &directory, count, &mut random)?, "accesses")
        }
        Load::Threads => (of_guest(&larder, DiskIo::Threads, &directory, count, &mut random)?, progress_unit),
        Load::Uring => (of_guest(&larder, DiskIo::Uring, &directory, count, &mut random)?, progress_unit),
    };
    println!(
        "attached and detached {count} times; {} pages evicted; {} {progress_unit} without a mismatch",
        report.evicted, report.done
    );
    println!("pause of a thread at each attach, {}", report.pauses);
    println!("time from the start of the pager to the attach, {}", report.attaches);
    println!("time from the request to the completed detach, {}", report.detaches);
    Ok(())
}
