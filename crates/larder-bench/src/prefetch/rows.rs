//! The 18 rows of the published table of Virtuozzo's PCache (2016): sequential and random 4 KiB reads, one at a time
//! and 4 and 32 in flight, by 1, 4 and 16 jobs.

use super::fio::{Job, Measured};
use super::place::Place;
use super::servers::{Export, Larder, Prefetch, Serve};
use crate::figures::{median, ratio};

/// Bytes of a read.
pub(super) const BLOCK: u64 = 4096;

/// Reads in flight, and the published gains of sequential reads by 1, 4 and 16 jobs.
const PUBLISHED_GAINS: [(u32, [f64; 3]); 3] =
    [(1, [4.41, 3.31, 1.80]), (4, [2.90, 1.79, 1.78]), (32, [0.99, 1.22, 1.46])];

/// Target gain of random reads; the published ones are between 0.98 and 1.07.
const RANDOM_GAIN_TARGET: f64 = 0.98;

const JOBS: [u32; 3] = [1, 4, 16];

/// A row of the table.
pub(super) struct Row {
    random: bool,
    pub(super) depth: u32,
    pub(super) jobs: u32,
    /// Target ratio of IOPS with read-ahead to IOPS without.
    wanted: f64,
    /// IOPS of each round.
    pub(super) off: Vec<f64>,
    pub(super) on: Vec<f64>,
    /// Bytes that were prefetched in vain, in percent of the bytes read.
    wasted: Vec<f64>,
    /// IOPS of the same reads from memory, which bound every read-ahead.
    pub(super) bound: Vec<f64>,
}

/// Returns all rows, the sequential ones first. The targets are the published gains, or `gain_sync` for sequential
/// reads one at a time.
pub(super) fn all(gain_sync: Option<f64>) -> Vec<Row> {
    let mut rows = Vec::new();
    for random in [false, true] {
        for (depth, gains) in PUBLISHED_GAINS {
            for (jobs, gain) in JOBS.into_iter().zip(gains) {
                let wanted = match gain_sync {
                    _ if random => RANDOM_GAIN_TARGET,
                    Some(gain) if depth == 1 => gain,
                    _ => gain,
                };
                rows.push(Row {
                    random,
                    depth,
                    jobs,
                    wanted,
                    off: Vec::new(),
                    on: Vec::new(),
                    wasted: Vec::new(),
                    bound: Vec::new(),
                });
            }
        }
    }
    rows
}

impl Row {
    fn name(&self) -> String {
        let order = if self.random { "random" } else { "sequential" };
        let concurrency = match self.depth {
            1 => "sync".to_owned(),
            depth => format!("AIO {depth}"),
        };
        format!("{order}, {concurrency} | {}", self.jobs)
    }

    /// Returns the row's fio job on a disk of `size` bytes.
    pub(super) fn job(&self, size: u64, seconds: f64) -> Job {
        Job { random: self.random, block: BLOCK, depth: self.depth, jobs: self.jobs, seconds, size }
    }

    /// Measures a round: without read-ahead, with it, and for sequential reads the bound.
    pub(super) fn measure(&mut self, scratch: &Place, job: &Job, servers: &RowServers<'_>) -> anyhow::Result<()> {
        let run = |serve: &Serve<'_>| -> anyhow::Result<(Measured, Larder)> {
            let larder = serve.start(scratch)?;
            Ok((job.run_nbd(larder.socket())?, larder))
        };
        self.off.push(run(&servers.off)?.0.iops);
        let (on, larder) = run(&servers.on)?;
        self.on.push(on.iops);
        let wasted = larder.statistics()?.wasted as f64;
        self.wasted.push(100.0 * wasted / (on.reads * BLOCK) as f64);
        drop(larder);
        if !self.random {
            self.bound.push(run(&servers.bound)?.0.iops);
        }
        Ok(())
    }
}

/// Servers on which the rows are measured.
pub(super) struct RowServers<'a> {
    pub(super) off: Serve<'a>,
    pub(super) on: Serve<'a>,
    /// Server of a disk in memory.
    pub(super) bound: Serve<'a>,
}

impl<'a> RowServers<'a> {
    /// Configures servers for a raw image, and for another one in memory, which has the options `in_memory_options`.
    pub(super) fn of(image: &'a str, in_memory: &'a str, in_memory_options: &'a str) -> Self {
        let off = Serve { image, format: "raw", prefetch: Prefetch::Off, export: Export::Nbd, options: "--read-only" };
        Self {
            off,
            on: Serve { prefetch: Prefetch::Default, ..off },
            bound: Serve { image: in_memory, options: in_memory_options, ..off },
        }
    }
}

/// Prints the rows. `ceiling` returns the reads per second that the disk can deliver for a sequential row.
pub(super) fn print(rows: &[Row], ceiling: impl Fn(&Row) -> f64) {
    println!("| 4 KiB reads | jobs | off, IOPS | on, IOPS | gain | target | bound | wasted, % of read |");
    println!("|{}", " --- |".repeat(8));
    for row in rows {
        let (off, on) = (median(&row.off), median(&row.on));
        print!("| {} | {off:.0} | {on:.0} | {} |", row.name(), ratio(&row.on, &row.off));
        let bound = match row.random {
            true => String::new(),
            false => {
                let bound = ceiling(row).min(median(&row.bound)) / off;
                let note = if bound < row.wanted { ", below target" } else { "" };
                format!("{bound:.2}{note}")
            }
        };
        println!(" {:.2} | {bound} | {:.2} |", row.wanted, median(&row.wasted));
    }
}
