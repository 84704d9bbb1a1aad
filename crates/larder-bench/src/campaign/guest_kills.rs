//! Kills a server at random moments under a guest that writes, flushes and verifies. The guest must notice no more
//! than a pause.

use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::Random;
use super::cached::CacheRetention;
use super::disk::{self, Disk, Format, Victim};
use super::guest::{Guest, GuestOptions, KERNEL_ERROR_CHECK_SCRIPT, LIMIT, ROUNDS};
use super::pauses::DurationSample;

/// Result of the campaign.
#[derive(Debug)]
pub struct Report {
    /// Servers killed while the guest ran its load.
    pub kills: u32,
    /// Rounds that the guest wrote and verified.
    pub rounds: usize,
    /// Times from each kill until the next server had its client back: QEMU, which retries once a second, or Larder.
    pub reconnects: DurationSample,
    /// Kills that interrupted requests in flight.
    pub interrupted: u32,
    /// Cache survival over the kills.
    pub warmth: CacheRetention,
}

/// Bytes that the guest writes and reads; the disk has twice this size.
pub const WORKING_SET_BYTES: u64 = 32 << 20;

/// Kills the victim `count` times.
///
/// # Errors
/// If the guest sees an error or wrong data, or hangs.
pub fn run<'a>(
    victim: impl Into<Victim<'a>>,
    image: &'a Path,
    directory: &Path,
    properties: &str,
    count: u32,
    random: &mut Random,
) -> anyhow::Result<Report> {
    let victim = victim.into();
    disk::create(&victim, image, WORKING_SET_BYTES * 2)?;
    let mut disk = Disk::start(victim, image, directory)?;
    let options = GuestOptions { disk: properties.to_owned(), ..GuestOptions::default() };
    let mut guest = Guest::start(&[ROUNDS, KERNEL_ERROR_CHECK_SCRIPT].concat(), disk.socket(), &options)?;
    guest.process.wait_for("ROUND 1", LIMIT)?;
    let (mut reconnects, mut interrupted) = (DurationSample::default(), 0);
    for kill in 0..count {
        // A kill may come anywhere in the guest's rounds: writing, flushing, verifying.
        std::thread::sleep(Duration::from_micros(random.below(700_000)));
        if guest.process.output().contains("LARDER-GUEST-EXIT") {
            bail!("the guest exited: {}", guest.process.output());
        }
        interrupted += u32::from(disk.was_interrupted());
        disk.record_cache_stats()?;
        let killed = Instant::now();
        disk.kill()?;
        disk.restart()?;
        // Loading ends before QEMU reconnects.
        disk.record_retention()?;
        disk.wait_until_connected().with_context(|| {
            let console = guest.process.output();
            format!("after kill {kill}; the guest's console: {console}")
        })?;
        reconnects.push(killed.elapsed());
    }
    guest.process.say("stop")?;
    let console = guest.finish()?;
    let rounds = console.matches("ROUND").count();
    interrupted += u32::from(disk.was_interrupted());
    let (is_checked, warmth) = (disk.format() == Format::Qcow2, disk.warmth.clone());
    disk.stop()?;
    if is_checked {
        disk::qcow2_contents(image)?;
    }
    Ok(Report { kills: count, rounds, reconnects, interrupted, warmth })
}
