//! The part `hits`: the cost of a cache hit, compared with a read of the same file by a Larder without a cache.
//!
//! The cache's file and the directly read file lie in tmpfs, so that the measurement covers the program and not a
//! drive. The disk behind the cache answers after 2 ms.

use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};

use super::Arguments;
use crate::figures::{median, ratio};
use crate::prefetch::place::Place;
use crate::prefetch::servers::{Export, Larder, Prefetch, Serve, slow_nbd, text};
use crate::vhost_user::Series;
use crate::vhost_user::client::{Client, Outcome, Random, Workload};

const DISK_BYTES: u64 = 256 << 20;
/// Large enough for the whole disk, however its lines are distributed over the sets.
const CACHE_SIZE: &str = "512M";
const BLOCK: usize = 4096;
const DEPTHS: [usize; 3] = [1, 8, 64];
const LATENCY: Duration = Duration::from_millis(2);
/// Turns of the two readers at each depth within a round, so that load from elsewhere on the host affects both alike.
const TURNS: usize = 20;
/// Reads of the whole disk at most until the cache has it.
const WARMUP_PASSES_MAX: usize = 4;

/// The two servers that are compared.
#[derive(Clone, Copy)]
enum Reader {
    Direct,
    Cache,
}

/// Measured series by depth: direct reads of the file, and cache hits.
type SeriesByDepth = [[Series; 2]; DEPTHS.len()];

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let mut series = SeriesByDepth::default();
    for _ in 0..arguments.rounds {
        // Memory placement alone changes the result by a tenth, so each round starts new servers.
        measure(arguments, &mut series)?;
    }
    println!(
        "Random reads of 4 KiB, a disk of 256 MiB, all of it in the cache, lines of {}; files in tmpfs; {} rounds of {} s\n",
        arguments.line, arguments.rounds, arguments.seconds
    );
    println!("| depth | direct reads, IOPS | hits, IOPS | hits / direct | CPU per direct read, us | CPU per hit, us |");
    println!("|{}", " --- |".repeat(6));
    for (depth, [direct, cached]) in DEPTHS.iter().zip(&series) {
        println!(
            "| {depth} | {:.0} | {:.0} | {} | {:.2} | {:.2} |",
            median(&direct.iops),
            median(&cached.iops),
            ratio(&cached.iops, &direct.iops),
            median(&direct.cpu_us),
            median(&cached.cpu_us)
        );
    }
    Ok(())
}

fn measure(arguments: &Arguments, series: &mut SeriesByDepth) -> anyhow::Result<()> {
    let memory = Place::new(Path::new("/dev/shm"))?;
    let file = memory.raw_image(DISK_BYTES)?;
    let (_remote, uri) = slow_nbd(&memory, &file, LATENCY)?;
    let cache = memory.unused("cache");
    let options = format!("--cache {} --cache-size {CACHE_SIZE} --cache-line {}", text(&cache)?, arguments.line);
    let serve =
        |image, options| Serve { image, format: "raw", prefetch: Prefetch::Off, export: Export::VhostUser, options };
    let direct = serve(text(&file)?, "--read-only").start(&memory)?;
    let cached = serve(&uri, &options).start(&memory)?;
    warm(&cached)?;
    for (depth, row) in DEPTHS.iter().zip(series) {
        let mut sums = [(Outcome::default(), Duration::ZERO); 2];
        let workload = Workload {
            write: false,
            block: BLOCK,
            depth: *depth,
            duration: Duration::from_secs_f64(arguments.seconds / TURNS as f64),
        };
        for turn in 0..2 * TURNS {
            let reader = [Reader::Direct, Reader::Cache][turn % 2];
            let larder = match reader {
                Reader::Direct => &direct,
                Reader::Cache => &cached,
            };
            let mut client = connect(larder, reader, *depth)?;
            let before = larder.server().cpu_time()?;
            let misses = misses(larder, reader)?;
            let outcome = client.run(&workload)?;
            let (sum, cpu_time) = &mut sums[turn % 2];
            *cpu_time += larder.server().cpu_time()?.0 - before.0;
            sum.requests += outcome.requests;
            sum.elapsed += outcome.elapsed;
            let missed = self::misses(larder, reader)? - misses;
            ensure!(missed == 0, "{missed} of {} reads were not cache hits", outcome.requests);
        }
        for (series, (outcome, cpu_time)) in row.iter_mut().zip(sums) {
            series.push(outcome, cpu_time);
        }
    }
    Ok(())
}

fn connect(larder: &Larder, reader: Reader, depth: usize) -> anyhow::Result<Client> {
    match reader {
        Reader::Direct => Client::connect_read_only(larder.socket(), true, depth * BLOCK),
        Reader::Cache => Client::connect_with(larder.socket(), true, depth * BLOCK),
    }
}

/// Number of reads so far that the cache could not serve alone.
fn misses(larder: &Larder, reader: Reader) -> anyhow::Result<u64> {
    if matches!(reader, Reader::Direct) {
        return Ok(0);
    }
    let status = larder.status()?;
    let cache = &status["disks"][0]["cache"];
    let counter = |name: &str| cache[name].as_u64().with_context(|| format!("no cache counter {name} in {status}"));
    Ok(counter("misses")? + counter("partial_hits")?)
}

/// Reads the whole disk in random order until the cache holds all of it.
fn warm(larder: &Larder) -> anyhow::Result<()> {
    let depth = 16;
    let mut client = connect(larder, Reader::Cache, depth)?;
    let mut offsets: Vec<u64> = (0..DISK_BYTES).step_by(BLOCK).collect();
    Random::default().shuffle(&mut offsets);
    let workload = Workload { write: false, block: BLOCK, depth, duration: Duration::ZERO };
    for _ in 0..WARMUP_PASSES_MAX {
        let before = misses(larder, Reader::Cache)?;
        client.run_at(&workload, &offsets)?;
        if misses(larder, Reader::Cache)? == before {
            return Ok(());
        }
    }
    anyhow::bail!("the cache does not hold the whole disk")
}
