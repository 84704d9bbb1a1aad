//! Kill campaigns: the real program is killed over and over under load, with a real client that would notice errors.

// The tests of the export crate use the same front-end.
#[path = "../../../larder-export/tests/front_end/mod.rs"]
#[allow(missing_docs)]
pub mod front_end;

pub mod books;
pub mod boot_kills;
pub mod cached;
mod client;
pub mod disk;
pub mod fio_kills;
pub mod flush_kills;
pub mod foreign;
pub mod guest;
pub mod guest_kills;
pub mod memory;
pub mod memory_attach;
pub mod memory_guest;
pub mod memory_guests;
pub mod memory_kills;
pub mod migrate_kills;
pub mod migration;
pub mod pauses;
pub mod process;
pub mod restarts;
pub mod server;
pub mod service;
pub mod verifier;

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use cached::{CacheMode, TestCacheOptions};
use clap::{Args, ValueEnum};
use disk::{Format, Target, Victim};
use larder_block::ByteLen;

/// Repeatedly kill a server under load
#[derive(Args)]
pub struct Arguments {
    /// Number of kills
    #[arg(long, default_value_t = 100)]
    count: u32,
    /// Server to kill
    #[arg(long, value_enum, default_value_t = Target::Larder)]
    target: Target,
    /// Format of the image; a new qcow2 image is made every 10 kills
    #[arg(long, value_enum, default_value_t)]
    format: Format,
    /// Client under whose requests the server is killed
    #[arg(long, value_enum, default_value_t = Load::Guest)]
    load: Load,
    /// Give the disk a cache, in this mode
    #[arg(long, value_enum)]
    cache_mode: Option<CacheMode>,
    /// Size of the cache; by default three quarters of the load's working set
    #[arg(long, requires = "cache_mode")]
    cache_size: Option<ByteLen>,
    /// Stack all layers: read-ahead over the cache over qcow2 over NBD
    #[arg(long, requires = "cache_mode")]
    whole: bool,
    /// Directory of the image; its file system determines how the image is read and written
    #[arg(long, default_value = ".")]
    folder: PathBuf,
    /// Use packed virtqueues
    #[arg(long)]
    packed: bool,
    /// Path of larder; by default the one in this program's directory
    #[arg(long)]
    larder: Option<PathBuf>,
    /// Seed of the random moments
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Load {
    /// A guest that writes, flushes and verifies
    Guest,
    /// A client that checks the image after each kill
    Flush,
    /// fio over NBD, which verifies its earlier writes
    Fio,
    /// Guests that boot under `larder run`; --count is their number, and each has a raw and a qcow2 disk
    Boot,
}

/// A pseudo-random number generator (xorshift64).
pub struct Random(u64);

impl Random {
    /// Creates the generator for a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// Returns the next number below `limit`.
    pub fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// Returns the path of `larder`: `given`, or the one in this program's directory.
pub fn find_larder(given: Option<&Path>) -> anyhow::Result<PathBuf> {
    let larder = match given {
        Some(path) => path.to_owned(),
        None => std::env::current_exe()?.with_file_name("larder"),
    };
    ensure!(larder.exists(), "{} is missing: cargo build --release -p larder", larder.display());
    Ok(larder)
}

/// Runs a campaign and prints its results.
///
/// # Errors
/// If the client noticed an error, or something is missing.
pub fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let larder = find_larder(arguments.larder.as_deref())?;
    let image_directory = tempfile::tempdir_in(&arguments.folder).context("creating a directory for the image")?;
    let socket_directory = tempfile::tempdir()?;
    let image = image_directory.path().join("disk.raw");
    let mut random = Random::new(arguments.seed);
    let victim = arguments.victim(&larder)?;
    match arguments.load {
        Load::Guest => {
            let properties = if arguments.packed { "num-queues=2,packed=on" } else { "num-queues=2" };
            let report =
                guest_kills::run(victim, &image, socket_directory.path(), properties, arguments.count, &mut random)?;
            println!("{} kills; the guest wrote and verified {} rounds without an error", report.kills, report.rounds);
            println!("{} kills interrupted requests in flight", report.interrupted);
            println!("time from the kill until reconnected, {}", report.reconnects);
            print_retention(victim, &report.warmth);
        }
        Load::Boot => boot(arguments, victim, image_directory.path(), &mut random)?,
        Load::Flush => flush(arguments, victim, &image, socket_directory.path(), &mut random)?,
        Load::Fio => {
            let report = fio_kills::run(victim, &image, socket_directory.path(), arguments.count, &mut random)?;
            println!(
                "{} kills and {} stops under fio, {} of its jobs had completed; it verified {} regions: no write was lost, no data was stale",
                report.kills, report.stops, report.completed, report.verified
            );
            println!("time from the kill until served again, {}", report.pauses);
            print_dirty_kills(victim, report.dirty);
            print_retention(victim, &report.warmth);
        }
    }
    Ok(())
}

impl Arguments {
    fn victim<'a>(&self, larder: &'a Path) -> anyhow::Result<Victim<'a>> {
        ensure!(
            self.format == Format::Raw || self.target == Target::Larder || self.whole,
            "only Larder itself serves qcow2 images"
        );
        ensure!(
            !self.whole || self.load != Load::Boot,
            "--whole is not possible with --load boot: larder run has no such disk"
        );
        let working_set = match self.load {
            Load::Guest => guest_kills::WORKING_SET_BYTES,
            Load::Flush => flush_kills::DISK,
            Load::Fio => fio_kills::DISK,
            Load::Boot => boot_kills::DISK / 2,
        };
        let size = self.cache_size.map_or(working_set / 4 * 3, ByteLen::get);
        Ok(Victim {
            larder,
            target: self.target,
            format: if self.whole { Format::Qcow2 } else { self.format },
            cache: self.cache_mode.map(|mode| TestCacheOptions { mode, size }),
            whole: self.whole,
        })
    }
}

fn boot(arguments: &Arguments, victim: Victim<'_>, directory: &Path, random: &mut Random) -> anyhow::Result<()> {
    let report = boot_kills::run(victim.larder, directory, victim.cache, arguments.count, random)?;
    for failure in &report.failures {
        println!("{failure}");
    }
    println!("{} guests booted under {} kills, {} of them failed", report.boots, report.kills, report.failures.len());
    ensure!(report.failures.is_empty(), "some guests failed");
    Ok(())
}

fn flush(
    arguments: &Arguments,
    victim: Victim<'_>,
    image: &Path,
    sockets: &Path,
    random: &mut Random,
) -> anyhow::Result<()> {
    let options = front_end::Options { queues: 2, packed: arguments.packed, ..front_end::Options::default() };
    let kills_per_image = match victim.format {
        Format::Raw => arguments.count,
        Format::Qcow2 => 10,
    };
    let mut report = flush_kills::Report::default();
    while report.kills < arguments.count {
        let count = kills_per_image.min(arguments.count - report.kills);
        report.add(flush_kills::run(victim, image, sockets, options, count, random)?);
    }
    println!(
        "{} kills under {} writes, {} reads and {} flushes, {} requests interrupted: no acknowledged write was lost, no read was stale",
        report.kills, report.writes, report.reads, report.flushes, report.interrupted
    );
    println!("time from the kill to the next completion, {}", report.pauses);
    if victim.cache.is_some() {
        println!(
            "{} stops in addition; the image was changed {} times without the cache, which was detected",
            report.stops, report.without
        );
    }
    print_dirty_kills(victim, report.dirty);
    if report.flushed > 0 {
        println!("{} caches were flushed to their disks before the next server started", report.flushed);
    }
    print_retention(victim, &report.warmth);
    Ok(())
}

fn print_retention(victim: Victim<'_>, warmth: &cached::CacheRetention) {
    if victim.cache.is_some() {
        println!("{warmth}");
    }
}

fn print_dirty_kills(victim: Victim<'_>, dirty: u32) {
    if victim.cache.is_some_and(|cache| cache.mode.keeps_dirty()) {
        println!("{dirty} kills left dirty lines, which only the cache held");
    }
}
