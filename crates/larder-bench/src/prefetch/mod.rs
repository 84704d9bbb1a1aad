//! `larder-bench prefetch`: what reading ahead gains, costs and wastes.
//!
//! Each part measures Larder with read-ahead on and off in one run, in rounds that alternate between the two and their
//! peers, and prints a table in Markdown: medians over the rounds, ratios of each round with their spread. A server is
//! started anew for each measurement, so that none finds what another has left in it; images are on the disk, and not
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
    /// What to measure; by default all
    #[arg(long = "part", value_name = "PART", value_delimiter = ',', value_enum, default_values_t = Part::value_variants().to_vec())]
    parts: Vec<Part>,
    /// Where images go, inside this project, /tmp or /dev/shm: on the disk that is to be measured
    #[arg(long, default_value = "target")]
    folder: PathBuf,
    /// Rounds; the median is shown. By default what each part needs
    #[arg(long)]
    rounds: Option<usize>,
    /// Seconds of each measurement that has no set number of requests. By default what each part needs
    #[arg(long)]
    seconds: Option<f64>,
    /// Requests of each measurement that has a set number of them. By default what each part needs
    #[arg(long)]
    count: Option<u64>,
    /// Where the block traces cloudphysics.vscsi, arc-P6.lis.zst and arc-OLTP.lis.zst are
    #[arg(long)]
    traces: Option<PathBuf>,
    /// How many times as fast a trace with times is replayed
    #[arg(long, default_value_t = 10.0)]
    speed_up: f64,
    /// Another larder, such as that of the version before: the instructions of both are compared, with and without a cache
    #[arg(long, value_name = "PROGRAM")]
    against: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Part {
    /// `qemu-img bench`: sequential reads of a qcow2 image
    QemuImg,
    /// fio: the 18 rows of the published table, on the disk
    Fio,
    /// The same over a remote disk
    Remote,
    /// The memory that is held at most
    Memory,
    /// Orders in which a disk may be read, on this machine's disk and on one far away: gain and waste
    Patterns,
    /// Block traces of others, replayed
    Traces,
    /// User-space instructions for each request
    Instructions,
    /// A Debian guest that boots and reads files
    Guest,
    /// Reads that are longer than those that are read ahead of
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

/// Bytes of the disks that are measured, as published.
const DISK_BYTES: u64 = 2 * GIB;

impl Arguments {
    /// A folder for images on the disk.
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
