//! The part `patterns`: the gain and waste of read-ahead for various orders of reads.

use std::time::{Duration, Instant};

use super::measure::{Disk, Load, ReadAheadShares, contenders, measure, median_shares};
use super::place::Place;
use super::servers::{Prefetch, text};
use super::slow::SlowStore;
use super::{Arguments, GIB};
use crate::figures::{median, ratio};
use crate::vhost_user::client::{Random, Request};

/// Requests in flight.
const DEPTHS: [usize; 2] = [1, 4];

const DISK_BYTES: u64 = GIB;

/// Latency of the remote store's requests.
const DELAY: Duration = Duration::from_micros(500);

/// Seconds of a measurement.
const SECONDS_DEFAULT: f64 = 0.5;

const ROUNDS: usize = 3;

const KIB: u64 = 1 << 10;
const SECTOR: u64 = 512;

/// Default size of a read in bytes.
const BLOCK: u64 = 4 * KIB;

/// Bytes of the longest read.
const LARGEST: u64 = 64 * KIB;

/// Number of interleaved readers.
const READERS: u64 = 64;

/// Number of reads in a window that is shuffled.
const WINDOW: usize = 8;

/// Offset and length of each read in bytes, without an end.
type Reads = Box<dyn Iterator<Item = (u64, u64)>>;

struct Pattern {
    name: &'static str,
    /// Returns the reads of a disk of this size in bytes.
    reads: fn(u64) -> Reads,
}

const PATTERNS: [Pattern; 15] = [
    Pattern { name: "forward", reads: |disk| blocks((0..disk / BLOCK).cycle()) },
    Pattern { name: "forward, 64 KiB", reads: |disk| strided(disk, 64 * KIB, 64 * KIB) },
    Pattern {
        name: "forward, 64 KiB from sector 63 on",
        reads: |disk| Box::new(strided(disk, 64 * KIB, 64 * KIB).map(|(start, len)| (start + 63 * SECTOR, len))),
    },
    Pattern { name: "backward", reads: |disk| blocks((0..disk / BLOCK).rev().cycle()) },
    Pattern { name: "4 of 64 KiB", reads: |disk| strided(disk, 4 * KIB, 64 * KIB) },
    Pattern { name: "12 of 20 KiB", reads: |disk| strided(disk, 12 * KIB, 20 * KIB) },
    Pattern { name: "16 KiB of 1 MiB", reads: |disk| strided(disk, 16 * KIB, 1024 * KIB) },
    Pattern { name: "64 interleaved", reads: interleaved },
    Pattern { name: "forward, 10 % random", reads: mixed },
    Pattern { name: "forward, 5 % skipped", reads: |disk| forward_with_gaps(disk, 20, 1) },
    Pattern { name: "forward, 20 % skipped", reads: |disk| forward_with_gaps(disk, 10, 4) },
    Pattern { name: "forward, reordered by up to 7", reads: reordered },
    Pattern {
        name: "random",
        reads: |disk| {
            let mut random = Random::default();
            blocks(std::iter::repeat_with(move || random.below(disk / BLOCK)))
        },
    },
    Pattern { name: "random runs of 16 to 64 KiB", reads: |disk| runs(disk, |random| 4 + random.below(13)) },
    Pattern {
        name: "random runs of 4 KiB to 8 MiB",
        reads: |disk| {
            runs(disk, |random| {
                let least = 1 << random.below(11);
                least + random.below(least)
            })
        },
    },
];

/// Reads of whole blocks.
fn blocks(numbers: impl Iterator<Item = u64> + 'static) -> Reads {
    Box::new(numbers.map(|block| (block * BLOCK, BLOCK)))
}

/// Reads `len` bytes of every `step`. At the end of the disk it starts again, a block further on.
fn strided(disk: u64, len: u64, step: u64) -> Reads {
    let steps = disk / step - 2;
    Box::new((0..).map(move |read| (read % steps * step + read / steps * BLOCK % step, len)))
}

/// Sequential readers in turn, each in its own part of the disk.
fn interleaved(disk: u64) -> Reads {
    let part = disk / BLOCK / READERS;
    blocks((0..).map(move |read| read % READERS * part + read / READERS % part))
}

fn mixed(disk: u64) -> Reads {
    let mut random = Random::default();
    let mut forward = (0..disk / BLOCK).cycle();
    blocks(std::iter::from_fn(move || match random.below(10) {
        0 => Some(random.below(disk / BLOCK)),
        _ => forward.next(),
    }))
}

/// Skips up to `gap_max` blocks after one block in `every`.
fn forward_with_gaps(disk: u64, every: u64, gap_max: u64) -> Reads {
    let mut random = Random::default();
    let mut block = 0;
    blocks(std::iter::repeat_with(move || {
        let is_gap = random.below(every) == 0;
        let gap = if is_gap { 1 + random.below(gap_max) } else { 0 };
        block = (block + 1 + gap) % (disk / BLOCK);
        block
    }))
}

/// Sequential, but in a random order within each window that a queue may hold.
fn reordered(disk: u64) -> Reads {
    let mut random = Random::default();
    let windows = (0..disk / BLOCK / WINDOW as u64).cycle();
    blocks(windows.flat_map(move |window| {
        let mut order: [u64; WINDOW] = std::array::from_fn(|index| window * WINDOW as u64 + index as u64);
        random.shuffle(&mut order);
        order
    }))
}

/// Runs of as many blocks as `len` returns, each at a random offset.
fn runs(disk: u64, len: fn(&mut Random) -> u64) -> Reads {
    let mut random = Random::default();
    let next_run = move || {
        let blocks = len(&mut random);
        let start = random.below(disk / BLOCK - blocks);
        start..start + blocks
    };
    blocks(std::iter::repeat_with(next_run).flatten())
}

/// Measurements of a pattern at a depth, a value for each round.
#[derive(Default)]
struct Figures {
    iops_off: Vec<f64>,
    iops_on: Vec<f64>,
    shares: Vec<ReadAheadShares>,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let scratch = arguments.place()?;
    let image = scratch.qcow2_image(DISK_BYTES)?;
    println!("A qcow2 image of 1 GiB on the disk, direct I/O\n");
    let local = Disk { image: text(&image)?, format: "qcow2", read_only: true, client_spins: true };
    measure_patterns(arguments, &scratch, local)?;
    let store = SlowStore::start(&scratch, DISK_BYTES, DELAY)?;
    println!("\nA raw image of 1 GiB behind NBD, {DELAY:?} of latency per request\n");
    let remote = Disk { image: store.uri(), format: "raw", read_only: true, client_spins: false };
    measure_patterns(arguments, &scratch, remote)
}

fn measure_patterns(arguments: &Arguments, scratch: &Place, disk: Disk<'_>) -> anyhow::Result<()> {
    let seconds = Duration::from_secs_f64(arguments.seconds(SECONDS_DEFAULT));
    let cases: Vec<(&Pattern, usize)> =
        PATTERNS.iter().flat_map(|pattern| DEPTHS.map(|depth| (pattern, depth))).collect();
    let mut rows: Vec<Figures> = cases.iter().map(|_| Figures::default()).collect();
    for round in 0..arguments.rounds(ROUNDS) {
        for ((pattern, depth), figures) in cases.iter().zip(&mut rows) {
            for prefetch in contenders(round) {
                let mut started = None;
                let in_time = |_: &_| started.get_or_insert_with(Instant::now).elapsed() < seconds;
                let reads = (pattern.reads)(DISK_BYTES).take_while(in_time);
                let load = Load {
                    requests: reads.map(|(start, len)| Request { write: false, start, len: len as usize, due: None }),
                    depth: *depth,
                    largest: LARGEST as usize,
                };
                let measured = measure(scratch, disk, prefetch, load)?;
                let iops = measured.replayed.latencies.len() as f64 / measured.replayed.elapsed.as_secs_f64();
                match prefetch {
                    Prefetch::Off => figures.iops_off.push(iops),
                    _ => {
                        figures.iops_on.push(iops);
                        figures.shares.push(measured.shares);
                    }
                }
            }
        }
    }
    println!("| pattern | depth | IOPS, off | on | gain | hits | waits | partial hits | fetched | wasted | unread |");
    println!("|{}", " --- |".repeat(11));
    for ((pattern, depth), figures) in cases.iter().zip(&rows) {
        let shares = median_shares(&figures.shares);
        println!(
            "| {} | {depth} | {:.0} | {:.0} | {} | {:.1} | {:.1} | {:.1} | {:.1} | {:.2} | {:.2} |",
            pattern.name,
            median(&figures.iops_off),
            median(&figures.iops_on),
            ratio(&figures.iops_on, &figures.iops_off),
            shares.hits,
            shares.waits,
            shares.parts,
            shares.fetched,
            shares.wasted,
            shares.unread,
        );
    }
    Ok(())
}
