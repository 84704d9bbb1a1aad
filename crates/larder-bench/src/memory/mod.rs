//! `larder-bench memory`: the cost for a program of having less memory than it uses, by pager.
//!
//! It needs root: it makes a control group, a swap file and settings of zswap, all of which are undone when it ends
//! in any way. See `docs/benchmarks.md`.

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
    /// Parts to measure; all by default
    #[arg(long = "part", value_name = "PART", value_delimiter = ',', value_enum, default_values_t = Part::value_variants().to_vec())]
    parts: Vec<Part>,
    /// Pagers to compare; by default all, one after the other
    #[arg(long, value_name = "VARIANT", value_delimiter = ',', value_enum, default_values_t = Variant::value_variants().to_vec())]
    variants: Vec<Variant>,
    /// Peaks of the program's memory in % of its limit, one table row for each level and pager
    #[arg(long, value_delimiter = ',', default_value = "100,110,125,150,175,200,250")]
    levels: Vec<u32>,
    /// Scale factor of the tables, which is their size in GB as text
    #[arg(long, default_value_t = 1.0)]
    scale: f64,
    /// Passes over the queries under a limit; the first one is the cold one
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(2..))]
    passes: u32,
    /// Measurements of each row, of which medians are shown
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Threads of the program
    #[arg(long, default_value_t = 2)]
    threads: u32,
    /// Size of the warm working set in MiB; measured by default
    #[arg(long)]
    working_set: Option<u64>,
    /// Compressors for zswap; the first one that this kernel has is used
    #[arg(long, value_delimiter = ',', default_value = "zstd,lz4,lzo-rle,lzo")]
    compressors: Vec<String>,
    /// Approximate share of the limit for zswap's pool; the kernel rounds it to hundredths of the machine's memory
    #[arg(long, default_value_t = 0.25)]
    zswap_pool: f64,
    /// Additional latency of each request to the slow store, in milliseconds
    #[arg(long, default_value_t = 3)]
    slow_ms: u64,
    /// Share of the limit for Larder's compressed RAM; Larder's own default if not given
    #[arg(long)]
    compressed: Option<f64>,
    /// Path of larder; by default the one in this program's directory
    #[arg(long, value_name = "FILE")]
    larder: Option<PathBuf>,
    /// For density: memory of each VM, in MiB
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(32..))]
    density_mib: u64,
    /// For density: memory available to all VMs together
    #[arg(long, default_value = "1GiB")]
    density_ram: ByteLen,
    /// For density: initial number of VMs, a multiple of four
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(4..))]
    density_from: u32,
    /// For density: maximum number of VMs, a multiple of four
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u32).range(4..))]
    density_most: u32,
    /// For density: share of the time that VMs may wait for pages, in %
    #[arg(long, default_value_t = 5.0)]
    density_stall: f64,
    /// For density: seconds of measurement, after as many seconds of warm-up
    #[arg(long, default_value_t = 30, value_parser = clap::value_parser!(u64).range(2..))]
    density_seconds: u64,
    /// For density: weights of idle, web and scan VMs, by which Larder divides the memory beyond the minimum budgets
    #[arg(long, value_delimiter = ',', num_args = 3, default_values_t = [1, 4, 1])]
    density_weights: Vec<u64>,
    /// File for a plot, as SVG
    #[arg(long)]
    plot: Option<PathBuf>,
    /// Directory of the swap file, on the disk to be measured
    #[arg(long, default_value = "target")]
    folder: PathBuf,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Part {
    /// Measure the latency of faults on evicted pages, against the minimum that the kernel allows
    Faults,
    /// Measure the pager's cost of encrypting a swap cache
    Encryption,
    /// Run TPC-H queries in DuckDB, by the ratio of the memory that they use to their limit
    Tpch,
    /// Find the number of VMs for each GiB of memory before they wait for it too much
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

/// Returns the minimum percentage of the machine's memory for zswap's pool under this limit in bytes.
fn zswap_pool_percent(arguments: &Arguments, limit: u64) -> anyhow::Result<u64> {
    let hundredth = (cgroup::named(Path::new("/proc/meminfo"), "MemTotal")? << 10) / 100;
    let percent = (limit as f64 * arguments.zswap_pool / hundredth as f64).round().max(1.0) as u64;
    if percent * hundredth > limit / 2 {
        bail!(
            "1 % of this machine's memory, the minimum of zswap's pool, is more than half of the limit of {limit} bytes"
        );
    }
    Ok(percent)
}
