//! `larder-bench cache`: measures the gain from a cache on a fast drive, as in the published experiment.
//!
//! The drives are simulated, the programs are not: each VM has a `larder disk serve`, and all of them use the same
//! drives. See `docs/benchmarks.md`.

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

use sheets::ReadDuringProgram;

/// Measure Larder's cache
#[derive(Args)]
pub(crate) struct Arguments {
    /// Parts to measure; all by default
    #[arg(long = "part", value_name = "PART", value_delimiter = ',', value_enum, default_values_t = Part::value_variants().to_vec())]
    parts: Vec<Part>,
    /// Numbers of VMs, one table row for each
    #[arg(long, value_delimiter = ',', default_value = "1,2,4,8,16,32,56,84,112")]
    vms: Vec<usize>,
    /// Factor by which all times are longer than the drives' own
    #[arg(long, default_value_t = 200.0)]
    dilation: f64,
    /// Effect of a read on a flash program that has begun
    #[arg(long, value_enum, default_value_t = ReadDuringProgram::Suspended)]
    programs: ReadDuringProgram,
    /// MiB of each VM's disk, of which 12/15 are cached
    #[arg(long, default_value_t = 15)]
    disk: u64,
    /// Cache hits in 100 reads, for the part that uses the models alone
    #[arg(long, default_value_t = 79.0)]
    hits: f64,
    /// Reads of each whole disk before it is measured
    #[arg(long, default_value_t = 3)]
    warm: u32,
    /// Sizes in GiB of the caches of the parts memory and opening; opening uses only the largest
    #[arg(long, value_delimiter = ',', default_value = "1,10,100")]
    caches: Vec<u64>,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 10.0)]
    seconds: f64,
    /// Seconds of requests before each measurement
    #[arg(long, default_value_t = 4.0)]
    before: f64,
    /// Rounds in which hits are measured
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Line size of the cache whose hits are measured
    #[arg(long, default_value = "4K")]
    line: String,
    /// File for a plot of the results, as SVG
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Directory for sockets
    #[arg(long, default_value = "target")]
    folder: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Part {
    /// Compare the drives' models with the published data of the drives
    Drives,
    /// Calculate the published experiment from the models alone, for each assumption about facts that data sheets
    /// omit
    Models,
    /// Run the published experiment: latency by number of VMs
    Seed,
    /// Compare the cost of a hit with that of a read without a cache
    Hits,
    /// Measure the memory that caches need
    Memory,
    /// Measure how soon a cache is usable after its server starts
    Opening,
    /// Measure the effect of VMs that scan their disks on another VM's cache
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

fn drives(programs: ReadDuringProgram) {
    println!("Random requests of 4 KiB.\n");
    println!("| drive | | published | model | ratio |");
    println!("|{}", " --- |".repeat(5));
    for drive in sheets::ALL {
        for row in sheets::calibrate(&drive) {
            println!(
                "| {} | {} | {:.0} | {:.0} | {:.3} |",
                drive.name,
                row.metric,
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
