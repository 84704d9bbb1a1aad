//! `larder-bench discard`: the cost of a discard or write-zeroes of a whole disk with a cache, and the delay of
//! concurrent requests. The client talks to the program `larder` over NBD with extended headers, so that it is one
//! request.

pub(crate) mod client;
mod kernel;

use std::fmt;
use std::path::PathBuf;
use std::process::Command as Program;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use clap::Args;
use larder_block::ByteLen;
use larder_block::nbd::Command;
use larder_codec::measure::cpu_time;

use self::client::Client;
use crate::prefetch::place::Place;
use crate::prefetch::servers::{Export, Prefetch, Serve, text};
use crate::vhost_user::client::Random;

const BLOCK: u64 = 4096;

/// Bytes that fill blocks written before the discard, and blocks written during it.
const OLD: u8 = 0xa5;
const NEW_BYTE: u8 = 0x5a;

/// Duration of the measurement of other requests without a discard, for comparison.
const QUIET: Duration = Duration::from_secs(1);

/// Minimum duration of that measurement from the discard's start, since a discard that ends at once would leave no
/// samples.
const BESIDE: Duration = Duration::from_millis(20);

/// Measure discards and write-zeroes of whole disks
#[derive(Args)]
pub(crate) struct Arguments {
    /// Size of the disk, which is empty except for the cached blocks
    #[arg(long, default_value = "8T")]
    size: String,
    /// Formats of the image
    #[arg(long, value_delimiter = ',', default_value = "raw,qcow2")]
    formats: Vec<String>,
    /// Sizes of the cache, which is a sparse file; 0 means no cache
    #[arg(long, value_delimiter = ',', default_value = "0,64M,10G")]
    caches: Vec<String>,
    /// Line sizes of the cache
    #[arg(long, value_delimiter = ',', default_value = "4K,64K")]
    lines: Vec<String>,
    /// Modes of the cache
    #[arg(long, value_delimiter = ',', default_value = "wt,wb,wa,pt")]
    modes: Vec<String>,
    /// Random blocks of 4 KiB that are written and read before the discard
    #[arg(long, default_value_t = 20_000)]
    blocks: u64,
    /// Directory for images and caches
    #[arg(long, default_value = "target")]
    folder: PathBuf,
}

/// A disk with its cache.
#[derive(Clone, Copy)]
struct Setup<'a> {
    format: &'a str,
    cache: &'a str,
    line: &'a str,
    mode: &'a str,
}

impl fmt::Display for Setup<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.cache {
            "0" => write!(f, "{} | none | | ", self.format),
            cache => write!(f, "{} | {cache} | {} | {}", self.format, self.line, self.mode),
        }
    }
}

/// Results of one measurement.
struct Outcome {
    cached_bytes: u64,
    took: Duration,
    cpu: Duration,
    /// The longest read and write without a discard, and during it.
    quiet: [Duration; 2],
    beside: [Duration; 2],
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    println!(
        "A sparse disk of {}, {} blocks of 4 KiB at random offsets written and read before; then one request for the whole disk, \
         concurrent with one reader and one writer of random blocks. Times in ms; the longest read and write, and in brackets those \
         in one second without the request\n",
        arguments.size, arguments.blocks
    );
    println!("| image | cache | line | mode | cached, KiB | request | duration | CPU | longest read | longest write |");
    println!("|{}", " --- |".repeat(10));
    print_row("raw file, no server | none | | ", "punched in pieces of 1 GiB", &measure_kernel(arguments)?);
    for format in &arguments.formats {
        for cache in &arguments.caches {
            for line in &arguments.lines {
                for mode in &arguments.modes {
                    let setup = Setup { format, cache, line, mode };
                    for command in [Command::Trim, Command::WriteZeroes] {
                        let outcome = measure(arguments, setup, command)?;
                        print_row(&setup.to_string(), &format!("{command:?}"), &outcome);
                    }
                    if cache == "0" {
                        break;
                    }
                }
                if cache == "0" {
                    break;
                }
            }
        }
    }
    Ok(())
}

fn ms(time: Duration) -> String {
    format!("{:.1}", time.as_secs_f64() * 1e3)
}

/// Formats the longest read (0) or write (1) during the discard, and in brackets that without one.
fn longest_of(outcome: &Outcome, index: usize) -> String {
    format!("{} ({})", ms(outcome.beside[index]), ms(outcome.quiet[index]))
}

/// Prints one row of the table. `of` is its first four columns.
fn print_row(columns: &str, request: &str, outcome: &Outcome) {
    println!(
        "| {columns} | {} | {request} | {} | {} | {} | {} |",
        outcome.cached_bytes >> 10,
        ms(outcome.took),
        ms(outcome.cpu),
        longest_of(outcome, 0),
        longest_of(outcome, 1)
    );
}

/// Measures the file system alone.
fn measure_kernel(arguments: &Arguments) -> anyhow::Result<Outcome> {
    let scratch = Place::new(&arguments.folder)?;
    let image = scratch.unused("image");
    let size: ByteLen = arguments.size.parse().map_err(anyhow::Error::msg)?;
    let disk = kernel::make(&image, size.get(), arguments.blocks)?;
    let connect = |command: Command| {
        let mut disk = kernel::Disk::open(&image)?;
        Ok(move |at| disk.request(command, at))
    };
    let (_, quiet) = beside(size.get(), connect, QUIET, || Ok(()))?;
    let before = cpu_time();
    let (elapsed, beside) = beside(size.get(), connect, BESIDE, || disk.clear(size.get()))?;
    Ok(Outcome { cached_bytes: 0, took: elapsed, cpu: cpu_time() - before, quiet, beside })
}

fn measure(arguments: &Arguments, setup: Setup<'_>, command: Command) -> anyhow::Result<Outcome> {
    let scratch = Place::new(&arguments.folder)?;
    let image = scratch.unused("image");
    let mut create = Program::new("qemu-img");
    create.args(["create", "-q", "-f", setup.format]).arg(&image).arg(&arguments.size);
    ensure!(create.status().context("starting qemu-img")?.success(), "{create:?} failed");
    let options = match setup.cache {
        "0" => String::new(),
        size => format!(
            "--cache {} --cache-size {size} --cache-line {} --cache-mode {}",
            text(&scratch.unused("cache"))?,
            setup.line,
            setup.mode
        ),
    };
    let serve = Serve {
        image: text(&image)?,
        format: setup.format,
        prefetch: Prefetch::Default,
        export: Export::Nbd,
        options: &options,
    };
    let larder = serve.start(&scratch)?;
    let mut client = Client::connect(larder.socket())?;
    fill(&mut client, arguments.blocks)?;
    let size = client.size;
    let connect = |command: Command| {
        let mut client = Client::connect(larder.socket())?;
        let data: &[u8] = match command {
            Command::Write => &[NEW_BYTE; BLOCK as usize],
            _ => &[],
        };
        Ok(move |at| client.request(command, at, BLOCK, data).map(drop))
    };
    let (_, quiet) = beside(size, connect, QUIET, || Ok(()))?;
    let cached_bytes = larder.status()?["disks"][0]["cache"]["occupancy"].as_u64().unwrap_or(0);
    let before = larder.server().cpu_time()?.0;
    let (elapsed, beside) = beside(size, connect, BESIDE, || client.request(command, 0, size, &[]).map(drop))?;
    let cpu = larder.server().cpu_time()?.0 - before;
    check_discarded(&mut client, arguments.blocks)?;
    Ok(Outcome { cached_bytes, took: elapsed, cpu, quiet, beside })
}

/// Returns the offsets of the blocks that are written before the discard.
fn blocks(size: u64, count: u64) -> impl Iterator<Item = u64> {
    let mut random = Random::default();
    (0..count).map(move |_| random.below(size / BLOCK) * BLOCK)
}

fn fill(client: &mut Client, count: u64) -> anyhow::Result<()> {
    let data = [OLD; BLOCK as usize];
    for at in blocks(client.size, count) {
        client.request(Command::Write, at, BLOCK, &data)?;
    }
    // In cache modes that keep no writes, reads fill the cache.
    for at in blocks(client.size, count) {
        client.request(Command::Read, at, BLOCK, &[])?;
    }
    client.request(Command::Flush, 0, 0, &[]).map(drop)
}

/// Checks that no block written before the discard is left.
fn check_discarded(client: &mut Client, count: u64) -> anyhow::Result<()> {
    for at in blocks(client.size, count) {
        let found = client.request(Command::Read, at, BLOCK, &[])?;
        ensure!(!found.contains(&OLD), "data written before the discard is still at offset {at}");
    }
    Ok(())
}

/// Runs `action` while a reader and a writer send requests, for at least `duration_min`. Returns the duration of
/// `action`, and the longest read and write. `connect` returns the function that sends each client's requests, for the
/// block at an offset of the disk of `size` bytes.
fn beside<R: FnMut(u64) -> anyhow::Result<()>>(
    size: u64,
    connect: impl Fn(Command) -> anyhow::Result<R> + Sync,
    duration_min: Duration,
    action: impl FnOnce() -> anyhow::Result<()>,
) -> anyhow::Result<(Duration, [Duration; 2])> {
    let (stop, connect) = (&AtomicBool::new(false), &connect);
    thread::scope(|scope| {
        let clients =
            [Command::Read, Command::Write].map(|command| scope.spawn(move || longest(size, connect(command)?, stop)));
        // Lets both clients start.
        thread::sleep(BESIDE);
        let started = Instant::now();
        let result = action();
        let elapsed = started.elapsed();
        thread::sleep(duration_min.saturating_sub(elapsed));
        stop.store(true, Ordering::Relaxed);
        let mut times = [Duration::ZERO; 2];
        for (time, other) in times.iter_mut().zip(clients) {
            *time = other.join().map_err(|_| anyhow::anyhow!("a client panicked"))??;
        }
        result.map(|()| (elapsed, times))
    })
}

/// Returns the longest latency of requests for random blocks, until `is_over` is set.
fn longest(
    size: u64,
    mut request: impl FnMut(u64) -> anyhow::Result<()>,
    is_over: &AtomicBool,
) -> anyhow::Result<Duration> {
    let mut random = Random::default();
    let mut longest = Duration::ZERO;
    while !is_over.load(Ordering::Relaxed) {
        let at = random.below(size / BLOCK) * BLOCK;
        let started = Instant::now();
        request(at)?;
        longest = longest.max(started.elapsed());
    }
    Ok(longest)
}
