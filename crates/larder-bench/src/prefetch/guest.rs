//! The part `guest`: a Debian guest boots and reads its files, with read-ahead on and off, on this machine's disk and
//! on an NBD server whose reads take a millisecond longer. Also, two guests boot at the same time.
//!
//! The guest's page cache is dropped before each job; its kernel has read-ahead of its own, 128 KiB at a time.
//! Seconds are by the guest's clock. Without KVM the emulated processor limits most of them. Therefore the table also
//! has the total latency of the guest's reads, summed over concurrent ones.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use larder_bench::campaign::guest::{Guest, GuestOptions, LIMIT, test_bed};
use larder_prefetch::PrefetchStatistics;

use super::Arguments;
use super::place::Place;
use super::servers::{Export, Larder, Prefetch, Serve, slow_nbd, text};
use crate::figures::{median, ratio};
use crate::vhost_user::server::Server;

/// Bytes of the file `/data` in the guest.
const DATA_BYTES: u64 = 128 << 20;

/// Additional latency of a read from the NBD server.
const LATENCY: Duration = Duration::from_millis(1);

/// The guest's script after boot. Each job begins when a line arrives on the console. It ends with a line of the
/// guest's clock and disk counters before and after: seconds, reads, sectors, ms.
const SCRIPT: &str = r#"
counts() {
  read -r seconds _ </proc/uptime
  read -r reads _ sectors ms _ </sys/block/vda/stat
  now="$seconds $reads $sectors $ms"
}
job() {
  name=$1; shift
  sync
  echo 3 >/proc/sys/vm/drop_caches
  echo "LARDER-READY $name:"
  read -r _
  counts; before=$now
  "$@" >/dev/null
  counts
  echo "LARDER-JOB $name: $before $now"
}
tree='/usr/share /var/lib/dpkg /usr/lib/systemd /usr/bin'
counts
echo "LARDER-JOB boot: 0 0 0 0 $now"
job 'dd bs=4k' dd if=/data bs=4k status=none
job 'dd bs=64k' dd if=/data bs=64k status=none
job 'dd bs=1M' dd if=/data bs=1M status=none
job 'dd bs=4k iflag=direct' dd if=/data bs=4k iflag=direct count=4096 status=none
job 'dd bs=64k iflag=direct' dd if=/data bs=64k iflag=direct count=1024 status=none
job 'tar' sh -c "tar -c -f - $tree 2>/run/tar.log | cat"
job 'grep -r' sh -c "grep -r larder-is-not-here $tree || true"
"#;

const BOOT: &str = "boot";

/// The jobs, in their order.
const JOBS: [&str; 7] =
    ["dd bs=4k", "dd bs=64k", "dd bs=1M", "dd bs=4k iflag=direct", "dd bs=64k iflag=direct", "tar", "grep -r"];

/// A configuration of read-ahead.
#[derive(Clone, Copy)]
struct Contender {
    name: &'static str,
    prefetch: Prefetch,
    options: &'static str,
}

const OFF: Contender = Contender { name: "off", prefetch: Prefetch::Off, options: "" };

const READ_AHEAD_ON: Contender = Contender { name: "on", prefetch: Prefetch::Default, options: "" };

const SETUPS: [Contender; 3] = [
    OFF,
    READ_AHEAD_ON,
    Contender {
        name: "on, reads up to 128 KiB",
        prefetch: Prefetch::Default,
        options: "--prefetch-largest-read 128KiB",
    },
];

/// Location of the guest's system.
#[derive(Clone, Copy)]
enum Store {
    /// A qcow2 overlay on this machine's disk.
    Disk,
    /// An NBD server with an additional latency of a millisecond.
    Remote,
}

/// Measurements of one job in one round.
#[derive(Clone, Copy)]
struct Figures {
    seconds: f64,
    /// The guest's read requests, with their total bytes and latency.
    requests: f64,
    bytes: f64,
    ms: f64,
    /// Read-ahead statistics; `None` if Larder does not read ahead.
    counts: Option<Counts>,
}

/// Larder's read-ahead statistics: numbers of reads, and bytes.
#[derive(Clone, Copy, Default)]
struct Counts {
    reads: f64,
    /// Reads whose bytes were all in memory or in flight.
    found: f64,
    partial: f64,
    bypassed: f64,
    wasted: f64,
}

impl From<PrefetchStatistics> for Counts {
    fn from(statistics: PrefetchStatistics) -> Self {
        let found = statistics.hits + statistics.waits;
        Self {
            reads: (found + statistics.partial_hits + statistics.misses + statistics.bypassed) as f64,
            found: found as f64,
            partial: statistics.partial_hits as f64,
            bypassed: statistics.bypassed as f64,
            wasted: statistics.wasted as f64,
        }
    }
}

impl Counts {
    fn with(&self, other: &Self, of: fn(f64, f64) -> f64) -> Self {
        Self {
            reads: of(self.reads, other.reads),
            found: of(self.found, other.found),
            partial: of(self.partial, other.partial),
            bypassed: of(self.bypassed, other.bypassed),
            wasted: of(self.wasted, other.wasted),
        }
    }
}

/// A guest and the servers of its disk, which are stopped with it.
struct Running {
    guest: Guest,
    larder: Larder,
    contender: Contender,
    begun: Instant,
    _nbd: Option<Server>,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let scratch = arguments.place()?;
    let system = system(&scratch)?;
    let rounds = arguments.rounds(1);
    for (store, what) in [
        (Store::Disk, "a new qcow2 overlay on this machine's disk"),
        (Store::Remote, "an NBD server (nbdkit) with 1 ms of additional read latency"),
    ] {
        let mut grid = vec![vec![Vec::new(); JOBS.len() + 1]; SETUPS.len()];
        for _ in 0..rounds {
            for (contender, row) in SETUPS.iter().zip(&mut grid) {
                let figures = jobs(&scratch, &system, store, *contender)?;
                row.iter_mut().zip(figures).for_each(|(all, new)| all.push(new));
            }
        }
        println!("A Debian guest, page cache empty, system on {what}\n");
        print(&grid);
    }
    pair(&scratch, &system, rounds)
}

/// Creates a raw image of a Debian system with a file of random data, on the disk and not in the page cache.
fn system(scratch: &Place) -> anyhow::Result<PathBuf> {
    let (system, data) = (scratch.unused("system"), scratch.raw_image(DATA_BYTES)?);
    succeed(Command::new("cp").arg("--sparse=always").args([&test_bed("debian12.ext4")?, &system]))?;
    let write = format!("write {} data", text(&data)?);
    succeed(Command::new("debugfs").args(["-w", "-R", &write]).arg(&system))?;
    std::fs::remove_file(data)?;
    Ok(system)
}

fn succeed(command: &mut Command) -> anyhow::Result<()> {
    let output = command.output().with_context(|| format!("starting {command:?}"))?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{command:?}: {}: {stderr}", output.status);
    Ok(())
}

/// Writes a file's dirty pages to the disk, and drops them from the page cache.
fn drop_from_page_cache(file: &Path) -> anyhow::Result<()> {
    let file = std::fs::File::open(file)?;
    file.sync_all()?;
    Ok(rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?)
}

/// Starts a guest, which boots.
fn start(scratch: &Place, system: &Path, store: Store, contender: Contender) -> anyhow::Result<Running> {
    drop_from_page_cache(system)?;
    let (image, format, nbd) = match store {
        Store::Disk => {
            let overlay = scratch.unused("overlay");
            let mut create = Command::new("qemu-img");
            create.args(["create", "-q", "-f", "qcow2", "-F", "raw", "-b"]);
            succeed(create.args([system, &overlay]))?;
            (text(&overlay)?.to_owned(), "qcow2", None)
        }
        Store::Remote => {
            let (server, uri) = slow_nbd(scratch, system, LATENCY)?;
            (uri, "raw", Some(server))
        }
    };
    let serve = Serve {
        image: &image,
        format,
        prefetch: contender.prefetch,
        export: Export::VhostUser,
        options: contender.options,
    };
    let larder = serve.start(scratch)?;
    let options = GuestOptions {
        processors: 1,
        disk: "num-queues=1".to_owned(),
        base: "boot.cpio.gz",
        ..GuestOptions::default()
    };
    let started = Instant::now();
    Ok(Running {
        guest: Guest::start(SCRIPT, larder.socket(), &options)?,
        larder,
        contender,
        begun: started,
        _nbd: nbd,
    })
}

impl Running {
    fn counts(&self) -> anyhow::Result<Option<Counts>> {
        match self.contender.prefetch {
            Prefetch::Off => Ok(None),
            _ => Ok(Some(self.larder.statistics()?.into())),
        }
    }

    /// Waits for the end of the job `name`. `before` has Larder's statistics from before it.
    fn figures(&self, name: &str, before: Option<Counts>) -> anyhow::Result<Figures> {
        let line = self.guest.process.wait_for(&format!("LARDER-JOB {name}: "), LIMIT)?;
        let numbers = line.rsplit(": ").next().unwrap_or_default().split_whitespace();
        let numbers: Vec<f64> = numbers.map(str::parse).collect::<Result<_, _>>()?;
        let [seconds, requests, sectors, ms, seconds_end, requests_end, sectors_end, ms_end] = numbers[..] else {
            anyhow::bail!("the guest printed '{line}', which is not seconds, reads, sectors and ms, twice");
        };
        let after = self.counts()?;
        Ok(Figures {
            seconds: seconds_end - seconds,
            requests: requests_end - requests,
            bytes: (sectors_end - sectors) * 512.0,
            ms: ms_end - ms,
            counts: after.zip(before).map(|(after, before)| after.with(&before, |after, before| after - before)),
        })
    }

    /// Waits until the guest has booted.
    fn boot(&self) -> anyhow::Result<Figures> {
        self.guest.process.wait_for("LARDER-GUEST-BOOTED", LIMIT)?;
        let seconds = self.begun.elapsed().as_secs_f64();
        let figures = self.figures(BOOT, Some(Counts::default()))?;
        Ok(Figures { seconds, ..figures })
    }
}

/// Boots a guest that runs all jobs. Returns the measurements of the boot, and of each job.
fn jobs(scratch: &Place, system: &Path, store: Store, contender: Contender) -> anyhow::Result<Vec<Figures>> {
    let mut running = start(scratch, system, store, contender)?;
    let mut figures = vec![running.boot()?];
    for job in JOBS {
        running.guest.process.wait_for(&format!("LARDER-READY {job}:"), LIMIT)?;
        let before = running.counts()?;
        running.guest.process.say("")?;
        figures.push(running.figures(job, before)?);
    }
    running.guest.finish()?;
    Ok(figures)
}

impl Figures {
    /// Combines the measurements of two guests that ran at the same time.
    fn combined_with(&self, other: &Self) -> Self {
        Self {
            seconds: self.seconds.max(other.seconds),
            requests: self.requests + other.requests,
            bytes: self.bytes + other.bytes,
            ms: self.ms + other.ms,
            counts: self.counts.zip(other.counts).map(|(one, other)| one.with(&other, |one, other| one + other)),
        }
    }
}

fn print_header() {
    println!(
        "| job | read-ahead | seconds | gain | read latency, ms | gain | KiB per read | hit or in flight | partial hit | too long | wasted, % of read |"
    );
    println!("|{}", " --- |".repeat(11));
}

/// Prints a table of the jobs; `grid[contender][job]` has the measurements of each round.
fn print(grid: &[Vec<Vec<Figures>>]) {
    print_header();
    for (index, job) in [BOOT].iter().chain(&JOBS).enumerate() {
        for (contender, row) in SETUPS.iter().zip(grid) {
            print_row(job, contender.name, &row[index], &grid[0][index]);
        }
    }
    println!();
}

/// Prints a row for one job and configuration, compared with that without read-ahead.
fn print_row(job: &str, contender: &str, all: &[Figures], off: &[Figures]) {
    let of = |all: &[Figures], value: fn(&Figures) -> f64| all.iter().map(value).collect::<Vec<f64>>();
    let (seconds, ms) = (of(all, |one| one.seconds), of(all, |one| one.ms));
    print!("| {job} | {contender} | {:.2} |", median(&seconds));
    let is_off = std::ptr::eq(all, off);
    let gain = |value: fn(&Figures) -> f64| match is_off {
        true => String::new(),
        false => ratio(&of(off, value), &of(all, value)),
    };
    print!(" {} | {:.0} | {} |", gain(|one| one.seconds), median(&ms), gain(|one| one.ms));
    let kib = of(all, |one| one.bytes / one.requests / 1024.0);
    print!(" {:.0} |", median(&kib));
    let share = |value: fn(&Counts, &Figures) -> f64| {
        let shares = all.iter().filter_map(|one| Some(100.0 * value(one.counts.as_ref()?, one)));
        let shares: Vec<f64> = shares.collect();
        match shares.is_empty() {
            true => String::new(),
            false => format!("{:.1} %", median(&shares)),
        }
    };
    println!(
        " {} | {} | {} | {} |",
        share(|counts, _| counts.found / counts.reads),
        share(|counts, _| counts.partial / counts.reads),
        share(|counts, _| counts.bypassed / counts.reads),
        share(|counts, one| counts.wasted / one.bytes)
    );
}

/// Measures two guests that boot at the same time, each from its own overlay.
fn pair(scratch: &Place, system: &Path, rounds: usize) -> anyhow::Result<()> {
    let contenders = [OFF, READ_AHEAD_ON];
    let mut grid = vec![Vec::new(); contenders.len()];
    for _ in 0..rounds {
        for (contender, row) in contenders.iter().zip(&mut grid) {
            let first = start(scratch, system, Store::Disk, *contender)?;
            let second = start(scratch, system, Store::Disk, *contender)?;
            row.push(first.boot()?.combined_with(&second.boot()?));
        }
    }
    println!("Two guests boot at the same time, each from a new qcow2 overlay of one system on this machine's disk\n");
    print_header();
    for (contender, row) in contenders.iter().zip(&grid) {
        print_row("two boots", contender.name, row, &grid[0]);
    }
    Ok(())
}
