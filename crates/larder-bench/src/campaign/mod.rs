//! Kill campaigns: the real program, killed over and over under load, with a real client that would notice.

// One front-end for the tests of the export and for this.
#[path = "../../../larder-export/tests/front_end/mod.rs"]
#[allow(missing_docs)]
pub mod front_end;

pub mod boot_kills;
pub mod disk;
pub mod flush_kills;
pub mod guest;
pub mod guest_kills;
pub mod pauses;
pub mod process;
pub mod server;

use std::path::PathBuf;

use anyhow::Context;
use clap::{Args, ValueEnum};
use disk::{Format, Target, Victim};

/// Kill a server over and over under load
#[derive(Args)]
pub struct Arguments {
    /// How many times
    #[arg(long, default_value_t = 100)]
    count: u32,
    /// Which server
    #[arg(long, value_enum, default_value_t = Target::Larder)]
    target: Target,
    /// What the image is; a qcow2 image is made anew every 10 kills
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    /// Whose requests it is killed under
    #[arg(long, value_enum, default_value_t = Load::Guest)]
    load: Load,
    /// Folder of the image: its file system decides how it is read and written
    #[arg(long, default_value = ".")]
    folder: PathBuf,
    /// Packed virtqueues
    #[arg(long)]
    packed: bool,
    /// The larder to serve with; by default the one beside this program
    #[arg(long)]
    larder: Option<PathBuf>,
    /// Where the random moments come from
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Load {
    /// A guest that writes, flushes and verifies
    Guest,
    /// A client that knows what must be in the image after each kill
    Flush,
    /// Guests that boot under `larder run`; --count is theirs, and each has a raw and a qcow2 disk
    Boot,
}

/// A sequence of numbers that only looks random.
pub struct Random(u64);

impl Random {
    /// The sequence of a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        // xorshift64
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// Runs a campaign and prints what came of it.
///
/// # Errors
/// The client noticed, or something is missing.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let larder = match &arguments.larder {
        Some(path) => path.clone(),
        None => std::env::current_exe()?.with_file_name("larder"),
    };
    anyhow::ensure!(
        larder.exists(),
        "{} is missing: cargo build --release -p larder",
        larder.display()
    );
    let images = tempfile::tempdir_in(&arguments.folder).context("a folder for the image")?;
    let sockets = tempfile::tempdir()?;
    let image = images.path().join("disk.raw");
    let mut random = Random::new(arguments.seed);
    let victim = Victim {
        larder: &larder,
        target: arguments.target,
        format: arguments.format,
    };
    anyhow::ensure!(
        arguments.format == Format::Raw || arguments.target == Target::Larder,
        "only Larder itself serves qcow2 images"
    );
    match arguments.load {
        Load::Guest => {
            let disk = if arguments.packed {
                "num-queues=2,packed=on"
            } else {
                "num-queues=2"
            };
            let report = guest_kills::run(victim, &image, sockets.path(), disk, arguments.count, &mut random)?;
            println!(
                "{} kills; the guest wrote and verified {} rounds without an error",
                report.kills, report.rounds
            );
            println!("{} kills met requests in flight", report.interrupted);
            println!("from the kill until connected again, {}", report.reconnects);
        }
        Load::Boot => {
            let report = boot_kills::run(&larder, images.path(), arguments.count, &mut random)?;
            for failure in &report.failures {
                println!("{failure}");
            }
            println!(
                "{} guests booted under {} kills, {} of them failed",
                report.boots,
                report.kills,
                report.failures.len()
            );
            anyhow::ensure!(report.failures.is_empty(), "not every guest got through");
        }
        Load::Flush => {
            let options = front_end::Options {
                queues: 2,
                packed: arguments.packed,
                ..front_end::Options::default()
            };
            let at_once = match arguments.format {
                Format::Raw => arguments.count,
                Format::Qcow2 => 10,
            };
            let mut report = flush_kills::Report::default();
            while report.kills < arguments.count {
                let count = at_once.min(arguments.count - report.kills);
                let part = flush_kills::run(victim, &image, sockets.path(), options, count, &mut random)?;
                report.add(part);
            }
            println!(
                "{} kills under {} writes and {} flushes, {} requests interrupted: nothing acknowledged was lost",
                report.kills, report.writes, report.flushes, report.interrupted
            );
            println!("from the kill to the next answer, {}", report.pauses);
        }
    }
    Ok(())
}
