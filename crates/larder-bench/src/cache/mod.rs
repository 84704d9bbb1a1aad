//! `larder-bench cache`: what a cache on a fast drive gains, as in the published experiment.
//!
//! The drives are simulated, the programs are not: one `larder disk serve` for each VM, all of them over the same drives.
//! See `docs/benchmarks.md`.

mod closed;
mod drive;
mod hits;
mod isolation;
mod load;
mod models;
mod opening;
mod plot;
mod rack;
mod seed;
mod sheets;
mod vms;

use std::path::PathBuf;

use clap::{Args, ValueEnum};

use sheets::Programs;

/// Measure Larder's cache
#[derive(Args)]
pub(crate) struct Arguments {
    /// What to measure; by default all
    #[arg(long = "part", value_name = "PART", value_delimiter = ',', value_enum, default_values_t = Part::value_variants().to_vec())]
    parts: Vec<Part>,
    /// How many VMs at a time, one table row for each
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,56,84,112")]
    vms: Vec<usize>,
    /// How many times as long as the drives' everything takes
    #[arg(long, default_value_t = 200.0)]
    dilation: f64,
    /// What a read does to a program of the flash that has begun
    #[arg(long, value_enum, default_value_t = Programs::Suspended)]
    programs: Programs,
    /// MiB of each VM's disk, of which 12/15 are cached
    #[arg(long, default_value_t = 15)]
    disk: u64,
    /// Of 100 reads those that the cache has, with nothing but the models
    #[arg(long, default_value_t = 79.0)]
    hits: f64,
    /// How often each disk is read before it is measured
    #[arg(long, default_value_t = 3)]
    warm: u32,
    /// GiB of the caches of which memory and opening are measured; of the latter the largest
    #[arg(long, value_delimiter = ',', default_value = "1,10,100")]
    caches: Vec<u64>,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Seconds of requests before that
    #[arg(long, default_value_t = 4.0)]
    before: f64,
    /// How often hits are measured
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// The cache's lines where hits are measured
    #[arg(long, default_value = "4K")]
    line: String,
    /// Where a plot goes, as SVG
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Where sockets go
    #[arg(long, default_value = "target")]
    folder: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Part {
    /// The drives' models beside what is published of the drives
    Drives,
    /// The published experiment with nothing but the models, by what data sheets do not say of them
    Models,
    /// The published experiment: latency by the number of VMs
    Seed,
    /// What a hit costs beside a read without a cache
    Hits,
    /// What caches take of memory
    Memory,
    /// How soon a cache can be used when its server starts
    Opening,
    /// What VMs that read all of their disks do to the cache of another one
    Isolation,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    for part in &arguments.parts {
        match part {
            Part::Drives => drives(arguments.programs),
            Part::Models => models::run(arguments),
            Part::Seed => seed::run(arguments)?,
            Part::Hits => hits::run(arguments)?,
            Part::Memory => opening::memory(arguments)?,
            Part::Opening => opening::opening(arguments)?,
            Part::Isolation => isolation::run(arguments)?,
        }
        println!();
    }
    Ok(())
}

fn drives(programs: Programs) {
    println!("4 KiB at random.\n");
    println!("| drive | | published | model | ratio |");
    println!("|{}", " --- |".repeat(5));
    for drive in sheets::ALL {
        for row in sheets::calibrated(&drive) {
            println!(
                "| {} | {} | {:.0} | {:.0} | {:.3} |",
                drive.name,
                row.what,
                row.published,
                row.model,
                row.model / row.published
            );
        }
    }
    println!();
    for drive in sheets::ALL {
        println!("{}: {:?}", drive.name, drive.model(programs));
    }
}
