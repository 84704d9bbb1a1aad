//! `larder-bench memory`: what it costs a program to have less memory than it uses, by who keeps the rest.
//!
//! It is root's: it makes a control group, a swap file and settings of zswap for itself, all of which are undone when it
//! ends, however it does. See `docs/benchmarks.md`.

pub(crate) mod act;
mod cgroup;
mod density;
mod encryption;
mod faults;
mod larder;
mod pager;
mod plot;
mod swap;
pub(crate) mod touch;
mod tpch;
mod working_set;
mod workload;

use std::path::{Path, PathBuf};

use anyhow::bail;
use clap::{Args, ValueEnum};
use larder_block::ByteLen;

use pager::Variant;

/// Measure programs that have less memory than they use
#[derive(Args)]
pub(crate) struct Arguments {
    /// What to measure; by default all
    #[arg(long = "part", value_name = "PART", value_delimiter = ',', value_enum, default_values_t = Part::value_variants().to_vec())]
    parts: Vec<Part>,
    /// Who keeps what does not fit; by default all, one after the other
    #[arg(long, value_name = "VARIANT", value_delimiter = ',', value_enum, default_values_t = Variant::value_variants().to_vec())]
    variants: Vec<Variant>,
    /// The peak of the program's memory, in % of what it may use, one table row for each and each variant
    #[arg(long, value_delimiter = ',', default_value = "100,110,125,150,175,200,250")]
    levels: Vec<u32>,
    /// The tables' scale factor: GB of text that they would be
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    /// Passes over the queries under a limit; the first one is the cold one
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..))]
    passes: u32,
    /// How often each row is measured; medians are shown
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// The program's threads
    #[arg(long, default_value_t = 2)]
    threads: u32,
    /// MiB of the warm working set, instead of measuring it
    #[arg(long)]
    working_set: Option<u64>,
    /// How zswap compresses: the first that this kernel has
    #[arg(long, value_delimiter = ',', default_value = "zstd,lz4,lzo-rle,lzo")]
    compressors: Vec<String>,
    /// What of the limit zswap's pool may take, about: the kernel rounds it to hundredths of the machine's memory
    #[arg(long, default_value_t = 0.25)]
    zswap_pool: f64,
    /// Milliseconds that each request of the slow store takes besides
    #[arg(long, default_value_t = 3)]
    slow_ms: u64,
    /// What of the limit Larder's compressed RAM may take; by default as Larder has it
    #[arg(long)]
    compressed: Option<f64>,
    /// The larder to measure; by default the one beside this program
    #[arg(long, value_name = "FILE")]
    larder: Option<PathBuf>,
    /// Of density: the memory of each VM, in MiB
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(32..))]
    density_mib: u64,
    /// Of density: what may really be used for all of them
    #[arg(long, default_value = "1GiB")]
    density_ram: ByteLen,
    /// Of density: how many VMs there are at first, and at most, in fours
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(4..))]
    density_from: u32,
    /// See above
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(4..))]
    density_most: u32,
    /// Of density: for what share of the time VMs may wait for pages, in %
    #[arg(long, default_value_t = 5.0)]
    density_stall: f64,
    /// Of density: for how many seconds VMs are looked at, after as many in which they are not
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(2..))]
    density_seconds: u64,
    /// Of density: the parts that a VM which is idle, web, and scan has with Larder of what is left when each has the least
    /// budget
    #[arg(long, value_delimiter = ',', num_args = 3, default_values_t = [1, 4, 1])]
    density_weights: Vec<u64>,
    /// Where a plot goes, as SVG
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Where the swap file goes: on the disk that is to be measured
    #[arg(long, default_value = "target")]
    folder: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Part {
    /// How long whoever touches a page that is not in memory waits for it, against the least that the kernel allows
    Faults,
    /// What the encryption of a swap cache costs the pager
    Encryption,
    /// TPC-H queries in DuckDB, by how much more memory they use than they may
    Tpch,
    /// How many VMs there may be for each GiB of memory before they wait for it too much
    Density,
}

const MIB: u64 = 1 << 20;

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    for part in &arguments.parts {
        match part {
            Part::Faults => faults::run(arguments)?,
            Part::Encryption => encryption::run(arguments)?,
            Part::Tpch => tpch::run(arguments)?,
            Part::Density => density::run(arguments)?,
        }
    }
    Ok(())
}

/// Hundredths of the machine's memory that zswap's pool may take under this limit in bytes, as few as there are.
fn pool_percent(arguments: &Arguments, limit: u64) -> anyhow::Result<u64> {
    let hundredth = (cgroup::named(Path::new("/proc/meminfo"), "MemTotal")? << 10) / 100;
    let percent = (limit as f64 * arguments.zswap_pool / hundredth as f64)
        .round()
        .max(1.0) as u64;
    if percent * hundredth > limit / 2 {
        bail!("a hundredth of this machine's memory, the least that zswap's pool has, is half of {limit} bytes");
    }
    Ok(percent)
}
