//! A pager attaches to a process that works, and detaches, over and over; the process must notice nothing but pauses.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;

use super::Random;
use super::memory::{Attach, Verifier};
use super::memory_guest::{DiskIo, MemoryGuest, Options};
use super::memory_kills::{Load, VERIFIER_BUDGET, VERIFIER_MIB, verifier};
use super::pauses::Pauses;

/// A quarantine and what an eviction takes on a busy machine.
const PAGES_GO_WITHIN: Duration = Duration::from_secs(30);

/// Attach to a process that works on its memory, and detach, over and over
#[derive(Args)]
pub struct Arguments {
    /// How many times
    #[arg(long, default_value_t = 1000)]
    count: u32,
    /// Whose memory
    #[arg(long, value_enum, default_value_t = Load::Threads)]
    load: Load,
    /// Folder of the guest's disk
    #[arg(long, default_value = ".")]
    folder: PathBuf,
    /// The larder to attach with; by default the one beside this program
    #[arg(long)]
    larder: Option<PathBuf>,
    /// Where the random moments come from
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// What came of it.
#[derive(Debug, Default)]
pub struct Report {
    /// For how long a thread of the process stood still at each attach.
    pub pauses: Pauses,
    /// From each start of the program until it had attached.
    pub attaches: Pauses,
    /// From each wish to detach until the program had ended.
    pub detaches: Pauses,
    /// Pages that were evicted.
    pub evicted: u64,
    /// Accesses of the verifier, or rounds of the guest.
    pub done: u64,
}

/// What a verifier that is started with `command` notices.
///
/// # Errors
/// Something was not as it was written, or stands still.
pub fn of_verifier(
    larder: &Path,
    command: Command,
    folder: &Path,
    count: u32,
    random: &mut Random,
) -> anyhow::Result<Report> {
    let mut verifier = Verifier::start(command)?;
    let budget = VERIFIER_BUDGET.to_string();
    let attach = Attach::new(larder, folder, verifier.pid(), &["--budget", &budget]);
    let mut report = Report::default();
    let before = descriptors(verifier.pid())?;
    for round in 0..count {
        report.attach(&attach, random).with_context(|| {
            let said = verifier.process.output();
            format!("attach {round}; the verifier: {said}")
        })?;
        verifier.report()?;
        std::thread::sleep(Duration::from_micros(random.below(50_000)));
    }
    let after = descriptors(verifier.pid())?;
    ensure!(before == after, "{before} descriptors have become {after}");
    report.done = verifier.stop()?;
    Ok(report)
}

/// What a guest notices.
///
/// # Errors
/// Something was not as it was written, or stands still.
pub fn of_guest(larder: &Path, io: DiskIo, folder: &Path, count: u32, random: &mut Random) -> anyhow::Result<Report> {
    let options = Options {
        disk: Some(io),
        ..Options::default()
    };
    let guest = MemoryGuest::start(options, folder)?;
    let budget = (guest.used()? / 2).to_string();
    let attach = Attach::new(larder, folder, guest.pid(), &["--budget", &budget]);
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
        self.pauses.push(pager.stood_still.context("there was no other pager")?);
        // Some have evicted nothing by then, some as much as they should. Where the process has disks open for direct I/O
        // the first pages go when their quarantine is over.
        let (waits_for_pages, micros) = match random.below(4) {
            0 => (false, 0),
            1 => (false, 20_000),
            2 => (false, 500_000),
            _ => (true, 100_000),
        };
        let give_up = started + PAGES_GO_WITHIN;
        while waits_for_pages && pager.state()?.evicted_pages == 0 {
            ensure!(Instant::now() < give_up, "no page went within {PAGES_GO_WITHIN:?}");
            std::thread::sleep(Duration::from_millis(20));
        }
        std::thread::sleep(Duration::from_micros(random.below(micros + 1)));
        self.evicted += pager.state()?.evicted_pages;
        let asked = Instant::now();
        pager.detach()?;
        self.detaches.push(asked.elapsed());
        Ok(())
    }
}

fn descriptors(pid: u32) -> anyhow::Result<usize> {
    Ok(std::fs::read_dir(format!("/proc/{pid}/fd"))?.count())
}

/// Runs the campaign and prints what came of it.
///
/// # Errors
/// Something was not as it was written, or is missing.
pub fn main(arguments: &Arguments) -> anyhow::Result<()> {
    let larder = super::larder_beside(arguments.larder.as_deref())?;
    let folder = tempfile::tempdir_in(&arguments.folder).context("a folder for the disk")?;
    let folder = folder.path().canonicalize()?;
    let mut random = Random::new(arguments.seed);
    let (count, did) = (arguments.count, "rounds of the guest");
    let (report, did) = match arguments.load {
        Load::Verifier => {
            let command = verifier(VERIFIER_MIB)?;
            (of_verifier(&larder, command, &folder, count, &mut random)?, "accesses")
        }
        Load::Threads => (of_guest(&larder, DiskIo::Threads, &folder, count, &mut random)?, did),
        Load::Uring => (of_guest(&larder, DiskIo::Uring, &folder, count, &mut random)?, did),
    };
    println!(
        "attached and detached {count} times; {} pages went; {} {did} without a mismatch",
        report.evicted, report.done
    );
    println!("a thread stood still at each attach, {}", report.pauses);
    println!("from the start until attached, {}", report.attaches);
    println!("from the wish until detached, {}", report.detaches);
    Ok(())
}
