//! `larder-bench prefetch`: the gain, cost and waste of reading ahead.
//!
//! Each part measures Larder with read-ahead on and off in one run, in rounds that alternate between the two and
//! their peers. It prints a table in Markdown: medians over the rounds, and ratios of each round with their spread.
//! Each measurement starts a new server, so that nothing is left of the previous one; images are on the disk, and not
//! in the page cache.

mod fio;
mod guest;
mod instructions;
mod local;
mod long_reads;
mod measure;
mod memory;
mod patterns;
pub(crate) mod place;
mod qemu_img;
mod remote;
mod rows;
pub(crate) mod servers;
pub(crate) mod slow;
mod traces;

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use place::Place;

/// Measure Larder's read-ahead
#[derive(Args)]
pub(crate) struct Arguments {
    /// Parts to measure; all by default
    #[arg(long = "part", value_name = "PART", value_delimiter = ',', value_enum, default_values_t = Part::value_variants().to_vec())]
    parts: Vec<Part>,
    /// Directory for images, inside this project, /tmp or /dev/shm, on the disk to be measured
    #[arg(long, default_value = "target")]
    folder: PathBuf,
    /// Number of rounds, whose median is shown; the default depends on the part
    #[arg(long)]
    rounds: Option<usize>,
    /// Seconds of each measurement without a set number of requests; the default depends on the part
    #[arg(long)]
    seconds: Option<f64>,
    /// Requests of each measurement with a set number of them; the default depends on the part
    #[arg(long)]
    count: Option<u64>,
    /// Directory of the block traces cloudphysics.vscsi, arc-P6.lis.zst and arc-OLTP.lis.zst
    #[arg(long)]
    traces: Option<PathBuf>,
    /// Factor by which a trace with timestamps is replayed faster
    #[arg(long, default_value_t = 10.0)]
    speed_up: f64,
    /// Another larder, such as the previous version: compare its instructions with those of this one, with and
    /// without a cache
    #[arg(long, value_name = "PROGRAM")]
    against: Option<PathBuf>,
    /// With --against, compare only the loads whose name has this text, such as "raw, random write, depth 32"
    #[arg(long, value_name = "TEXT", default_value = "", requires = "against")]
    load: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Part {
    /// Read a qcow2 image sequentially with `qemu-img bench`
    QemuImg,
    /// Measure the 18 rows of the published table with fio, on the disk
    Fio,
    /// Measure the published table over a remote disk
    Remote,
    /// Measure the peak memory
    Memory,
    /// Measure gain and waste for various orders of reads, on this machine's disk and on a remote one
    Patterns,
    /// Replay published block traces
    Traces,
    /// Count user-space instructions for each request
    Instructions,
    /// Boot a Debian guest that reads files
    Guest,
    /// Measure reads longer than the limit for read-ahead
    LongReads,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    for part in &arguments.parts {
        match part {
            Part::QemuImg => qemu_img::run(arguments)?,
            Part::Fio => local::run(arguments)?,
            Part::Remote => remote::run(arguments)?,
            Part::Memory => memory::run(arguments)?,
            Part::Patterns => patterns::run(arguments)?,
            Part::Traces => traces::run(arguments)?,
            Part::Instructions => instructions::run(arguments)?,
            Part::Guest => guest::run(arguments)?,
            Part::LongReads => long_reads::run(arguments)?,
        }
        println!();
    }
    Ok(())
}

const GIB: u64 = 1 << 30;

/// Size of the measured disks in bytes, as published.
const DISK_BYTES: u64 = 2 * GIB;

impl Arguments {
    /// Creates a directory for images on the disk.
    fn place(&self) -> anyhow::Result<Place> {
        Place::new(&self.folder)
    }

    fn rounds(&self, default: usize) -> usize {
        self.rounds.unwrap_or(default).max(1)
    }

    fn seconds(&self, default: f64) -> f64 {
        self.seconds.unwrap_or(default)
    }
}
