//! `larder-bench migrate`: how fast a guest may change its memory and still be moved, and what that costs, by QEMU's own
//! methods and by Larder.
//!
//! Two QEMUs stand in two network namespaces that a limited link joins. An emulated guest changes its memory at a rate and
//! checks it. It is moved to and fro: where it has come to is where it goes away from next, so it is booted once for each
//! rate, and the methods take turns with it. [`table::published`] has what was published of this experiment.
//!
//! It is root's: it makes the namespaces, which are gone when it ends, however it does.

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
use larder_bench::campaign::larder_beside;
use larder_bench::campaign::migration::vm::Release;

use link::{Link, Speed};
use load::Load;
use method::Method;

/// Move a guest that changes its memory, by QEMU's own methods and by Larder
#[derive(Args)]
pub(crate) struct Arguments {
    /// What the guest writes
    #[arg(long, value_name = "LOAD", value_delimiter = ',', value_enum, default_values_t = Load::DEFAULT)]
    loads: Vec<Load>,
    /// Mbit/s of the link, each way; none: loopback
    #[arg(long, value_name = "MBIT", value_delimiter = ',', default_values_t = [Speed::Limited(1000), Speed::Limited(100)])]
    link: Vec<Speed>,
    /// Who moves it; they take turns
    #[arg(long, value_name = "METHOD", value_delimiter = ',', value_enum, default_values_t = Method::DEFAULT)]
    modes: Vec<Method>,
    /// How fast it changes its memory, in 10^6 bytes per second; without this the largest rate is looked for at which it
    /// can be moved
    #[arg(long, value_name = "MB", value_delimiter = ',')]
    rates: Vec<u64>,
    /// Of given rates: how often each method moves it
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
    /// Where the search begins: up from there with those who can move it, from half of that with the others, and so on
    #[arg(long, value_name = "MB", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    from: u64,
    /// Where the search ends
    #[arg(long, value_name = "MB", default_value_t = 2000)]
    to: u64,
    /// Seconds that a move may take
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
    /// For how many milliseconds the guest may stand still, as QEMU and Larder are told
    #[arg(long, default_value_t = 300)]
    downtime: u64,
    /// Of the search: for how many it may really have stood still; twice as many if not given
    #[arg(long)]
    accept: Option<u64>,
    /// MiB of the guest's memory
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(256..))]
    memory: u64,
    /// MiB of that which it changes. What of it goes over in the downtime, compressed, is moved at any rate: it should be
    /// more
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u64).range(1..))]
    size: u64,
    /// Of so many pages one is checked before it is changed
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    check: u64,
    /// Channels for pages of QEMU's multifd methods; Larder has its own default
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..))]
    channels: u8,
    /// Move by QEMU 10 of the test bed, not the host's QEMU
    #[arg(long)]
    debian13: bool,
    /// The larder to move with; by default the one beside this program
    #[arg(long, value_name = "FILE")]
    larder: Option<PathBuf>,
    /// Further words for `larder migrate`: --larder-words=--lanes,4
    #[arg(long, value_name = "WORD", value_delimiter = ',', allow_hyphen_values = true)]
    larder_words: Vec<String>,
    /// Where all figures go, as JSON
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

impl Arguments {
    fn release(&self) -> Release {
        if self.debian13 {
            Release::Debian13
        } else {
            Release::Host
        }
    }

    /// For how many milliseconds a guest that was moved may have stood still.
    fn accept_ms(&self) -> f64 {
        self.accept.unwrap_or(2 * self.downtime) as f64
    }
}

/// What all moves of a table have in common.
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
    let larder = larder_beside(arguments.larder.as_deref())?;
    let mut all = Vec::new();
    let mut broken = 0;
    for &speed in &arguments.link {
        for &load in &arguments.loads {
            let bench = Bench {
                arguments,
                larder: larder.clone(),
                link: Link::new(speed)?,
                load,
            };
            let mut rows = Vec::new();
            // What has been measured is shown, whatever comes in between, and the next table is made all the same.
            if let Err(error) = search::measure(&bench, &mut rows) {
                eprintln!("{}, {}: {error:#}", load.name(), speed.words());
                broken += 1;
            }
            table::show(&bench, &rows);
            all.extend(rows.iter().flat_map(|row| row.json(&bench)));
            if let Some(path) = &arguments.json {
                let text = serde_json::to_string_pretty(&all)?;
                std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))?;
            }
        }
    }
    ensure!(broken == 0, "{broken} tables broke off: why is said above");
    Ok(())
}
