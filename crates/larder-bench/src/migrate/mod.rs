//! `larder-bench migrate`: the rate at which a guest may change its memory and still be moved, and the cost of that,
//! by QEMU's own methods and by Larder.
//!
//! Two QEMUs run in two network namespaces, joined by a limited link. An emulated guest changes its memory at a fixed
//! rate and checks it. It is moved back and forth, each move from the previous destination, so it is booted only once
//! for each rate, and the methods take turns with it. [`table::published`] has the published results of this
//! experiment.
//!
//! It needs root: it makes the namespaces, which are removed when it ends in any way.

pub(crate) mod cpu;
mod guest;
mod link;
mod load;
mod method;
mod moving;
mod search;
mod table;

use std::path::PathBuf;

use anyhow::{Context, ensure};
use clap::Args;
use larder_bench::campaign::find_larder;
use larder_bench::campaign::migration::vm::Release;

use link::{Link, Speed};
use load::Load;
use method::Method;

/// Move a guest that changes its memory, by QEMU's own methods and by Larder
#[derive(Args)]
pub(crate) struct Arguments {
    /// Data that the guest writes
    #[arg(long, value_name = "LOAD", value_delimiter = ',', value_enum, default_values_t = Load::DEFAULT)]
    loads: Vec<Load>,
    /// Bandwidth of the link in Mbit/s, for each direction; none: loopback
    #[arg(long, value_name = "MBIT", value_delimiter = ',', default_values_t = [Speed::Limited(1000), Speed::Limited(100)])]
    link: Vec<Speed>,
    /// Methods of moving the guest, which take turns
    #[arg(long, value_name = "METHOD", value_delimiter = ',', value_enum, default_values_t = Method::DEFAULT)]
    modes: Vec<Method>,
    /// Rates at which the guest changes its memory, in 10^6 bytes per second; by default the largest rate at which it
    /// can be moved is searched
    #[arg(long, value_name = "MB", value_delimiter = ',')]
    rates: Vec<u64>,
    /// With --rates: number of moves by each method
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Start of the search: upward with the methods that can move the guest at this rate, from half of it with the
    /// others, and so on
    #[arg(long, value_name = "MB", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    from: u64,
    /// End of the search
    #[arg(long, value_name = "MB", default_value_t = 2000)]
    to: u64,
    /// Time limit of a move in seconds
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
    /// Downtime limit that QEMU and Larder are given, in milliseconds
    #[arg(long, default_value_t = 300)]
    downtime: u64,
    /// For the search: longest actual downtime to accept, in milliseconds; twice --downtime by default
    #[arg(long)]
    accept: Option<u64>,
    /// Memory of the guest, in MiB
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(256..))]
    memory: u64,
    /// Size of the memory that the guest changes, in MiB. It should exceed the amount that is transferred,
    /// compressed, within the downtime: that much can be moved at any rate
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(1..))]
    size: u64,
    /// Number of pages of which one is checked before it is changed
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    check: u64,
    /// Channels for pages of QEMU's multifd methods; Larder has its own default
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..))]
    channels: u8,
    /// Use QEMU 10 of the test bed, not the host's QEMU
    #[arg(long)]
    debian13: bool,
    /// Path of larder; by default the one in this program's directory
    #[arg(long, value_name = "FILE")]
    larder: Option<PathBuf>,
    /// Further arguments for `larder migrate`: --larder-words=--lanes,4
    #[arg(long, value_name = "WORD", value_delimiter = ',', allow_hyphen_values = true)]
    larder_words: Vec<String>,
    /// File for all measurements, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Arguments {
    fn release(&self) -> Release {
        if self.debian13 { Release::Debian13 } else { Release::Host }
    }

    /// Returns the longest downtime to accept, in milliseconds.
    fn accept_ms(&self) -> f64 {
        self.accept.unwrap_or(2 * self.downtime) as f64
    }
}

/// Common parameters of all moves of a table.
struct Bench<'a> {
    arguments: &'a Arguments,
    larder: PathBuf,
    link: Link,
    load: Load,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    for load in &arguments.loads {
        load.is_there()?;
    }
    let larder = find_larder(arguments.larder.as_deref())?;
    let mut all = Vec::new();
    let mut failed_tables = 0;
    for &speed in &arguments.link {
        for &load in &arguments.loads {
            let bench = Bench { arguments, larder: larder.clone(), link: Link::new(speed)?, load };
            let mut rows = Vec::new();
            // After an error the measured rows are still printed, and the next table is made.
            if let Err(error) = search::measure(&bench, &mut rows) {
                eprintln!("{}, {}: {error:#}", load.name(), speed.words());
                failed_tables += 1;
            }
            table::show(&bench, &rows);
            all.extend(rows.iter().flat_map(|row| row.json(&bench)));
            if let Some(path) = &arguments.json {
                let text = serde_json::to_string_pretty(&all)?;
                std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
            }
        }
    }
    ensure!(failed_tables == 0, "{failed_tables} tables are incomplete: the errors are printed above");
    Ok(())
}
