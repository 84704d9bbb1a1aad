//! The part `long-reads`: the read size above which read-ahead brings no gain. A guest's kernel reads ahead itself,
//! 128 KiB at a time by default. Here a client without other work sends such reads, sequential and random.

use std::time::Duration;

use super::Arguments;
use super::place::Place;
use super::servers::{Export, Prefetch, Serve, text};
use super::slow::SlowStore;
use crate::figures::{median, ratio};
use crate::vhost_user::client::{Client, Random, Workload};

const IMAGE_BYTES: u64 = 256 << 20;

/// Bytes to read in a measurement, by default.
const READ_BYTES: u64 = 128 << 20;

/// Latency of the NBD server's requests.
const LATENCY: Duration = Duration::from_millis(1);

/// Limits of the read size for read-ahead.
const LARGEST: [&str; 3] = ["64KiB", "128KiB", "256KiB"];

/// Reads of one size, with a certain number in flight.
#[derive(Clone, Copy)]
struct Reads {
    random: bool,
    block: usize,
    depth: usize,
}

const READS: [Reads; 8] = [
    Reads::new(false, 64, 1),
    Reads::new(false, 128, 1),
    Reads::new(false, 128, 2),
    Reads::new(false, 128, 8),
    Reads::new(false, 256, 1),
    Reads::new(false, 256, 2),
    Reads::new(true, 64, 2),
    Reads::new(true, 128, 2),
];

/// Measurements of one server with one kind of reads, a value for each round.
#[derive(Clone, Default)]
struct Series {
    bytes_per_second: Vec<f64>,
    cpu_us: Vec<f64>,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let scratch = arguments.place()?;
    let image = scratch.raw_image(IMAGE_BYTES)?;
    let remote = SlowStore::start(&scratch, IMAGE_BYTES, LATENCY)?;
    for (image, what) in [(text(&image)?, "this machine's disk"), (remote.uri(), "an NBD server with 1 ms of latency")]
    {
        let mut grid = vec![vec![Series::default(); LARGEST.len() + 1]; READS.len()];
        for _ in 0..arguments.rounds(3) {
            for (reads, row) in READS.iter().zip(&mut grid) {
                let largest = [None].into_iter().chain(LARGEST.map(Some));
                for (largest, series) in largest.zip(row) {
                    let bytes = arguments.count.map_or(READ_BYTES, |count| count * reads.block as u64);
                    measure(&scratch, image, largest, *reads, bytes, series)?;
                }
            }
        }
        println!("Long reads over vhost-user-blk, a raw image on {what}: MB/s (CPU of the server per read, us)\n");
        print(&grid);
    }
    Ok(())
}

/// Reads `bytes` of `image` once, with read-ahead for reads up to `largest`, or without.
fn measure(
    scratch: &Place,
    image: &str,
    largest: Option<&str>,
    reads: Reads,
    bytes: u64,
    series: &mut Series,
) -> anyhow::Result<()> {
    let (prefetch, options) = match largest {
        None => (Prefetch::Off, String::new()),
        Some(len) => (Prefetch::Default, format!("--prefetch-largest-read {len}")),
    };
    let serve = Serve { image, format: "raw", prefetch, export: Export::VhostUser, options: &options };
    let larder = serve.start(scratch)?;
    let workload = Workload { write: false, block: reads.block, depth: reads.depth, duration: Duration::ZERO };
    let mut client = Client::connect_with(larder.socket(), false, reads.block * reads.depth)?;
    let before = larder.server().cpu_time()?;
    let outcome = client.run_at(&workload, &reads.offsets(bytes))?;
    let cpu = larder.server().cpu_time()?.0 - before.0;
    series.bytes_per_second.push(outcome.iops() * reads.block as f64);
    series.cpu_us.push(cpu.as_secs_f64() * 1e6 / outcome.requests as f64);
    Ok(())
}

impl Reads {
    const fn new(random: bool, kib: usize, depth: usize) -> Self {
        Self { random, block: kib << 10, depth }
    }

    fn offsets(&self, bytes: u64) -> Vec<u64> {
        let (block, blocks) = (self.block as u64, IMAGE_BYTES / self.block as u64);
        let mut random = Random::default();
        let number = |index: u64| match self.random {
            true => random.below(blocks),
            false => index % blocks,
        };
        (0..bytes / block).map(number).map(|number| number * block).collect()
    }
}

fn print(grid: &[Vec<Series>]) {
    print!("| reads | off |");
    for largest in LARGEST {
        print!(" up to {largest} | gain |");
    }
    println!("\n|{}", " --- |".repeat(2 + 2 * LARGEST.len()));
    for (reads, row) in READS.iter().zip(grid) {
        let order = if reads.random { "random" } else { "sequential" };
        print!("| {order}, {} KiB, depth {} |", reads.block >> 10, reads.depth);
        for (index, series) in row.iter().enumerate() {
            let speed = median(&series.bytes_per_second) / 1e6;
            print!(" {speed:.0} ({:.0}) |", median(&series.cpu_us));
            if index > 0 {
                print!(" {} |", ratio(&series.bytes_per_second, &row[0].bytes_per_second));
            }
        }
        println!();
    }
    println!();
}
