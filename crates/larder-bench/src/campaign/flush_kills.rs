//! Kills a server at random moments under a client that tracks its writes and flushes. After each kill the image
//! itself is checked, and the next server must answer the requests in flight.
//!
//! For each sector the image may hold the last completed write, or one that was in flight. (The host does not crash
//! here, so the image must hold more than the flushed writes; the client tracks both.) If Larder is the victim, the
//! image is checked before the next one starts. A remote server may lose unflushed writes, and Larder repeats them:
//! then the image is checked once all requests are answered and flushed. A qcow2 image shows the flushed writes at
//! once, and the rest after the next server has flushed; `qemu-img check` must find no error in it at either time.
//!
//! A read must return data no older than the writes that had completed when the read began. With a cache the whole
//! disk is read after each kill. Some servers are stopped instead, some are started in another cache mode, and some
//! without the cache, which the next server must detect.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;

use super::Random;
use super::cached::CacheRetention;
use super::client::Client;
pub use super::client::DISK;
use super::disk::{self, Disk, Format, Victim};
use super::front_end::{FrontEnd, Options};
use super::pauses::DurationSample;

/// Lifetime of a server at most.
const SERVER_LIFETIME_US_MAX: u64 = 60_000;

/// Log texts of a server that discards its stale cache.
const CACHE_EMPTIED_TEXTS: [&str; 2] = ["starts empty", "cached data is not used"];
/// Time shift that is too long to be attributed to the killed server's own writes.
const FOREIGN_MTIME_SHIFT: Duration = Duration::from_secs(60);

/// Result of the campaign.
#[derive(Debug, Default)]
pub struct Report {
    /// Servers killed.
    pub kills: u32,
    /// Servers stopped.
    pub stops: u32,
    /// Changes of the image without the cache, after which the cache was emptied or refused.
    pub without: u32,
    /// Writes acknowledged.
    pub writes: u64,
    /// Reads compared.
    pub reads: u64,
    /// Flushes acknowledged.
    pub flushes: u64,
    /// Requests in flight at kills.
    pub interrupted: u64,
    /// Kills at which the cache held dirty lines.
    pub dirty: u32,
    /// Caches whose dirty lines were written to the disk before the next server was started.
    pub flushed: u32,
    /// Times from a kill to the first answer of the next server, its start included.
    pub pauses: DurationSample,
    /// Cache survival over the kills.
    pub warmth: CacheRetention,
}

impl Report {
    /// Adds another report's results.
    pub fn add(&mut self, other: Self) {
        self.kills += other.kills;
        self.stops += other.stops;
        self.without += other.without;
        self.writes += other.writes;
        self.reads += other.reads;
        self.flushes += other.flushes;
        self.interrupted += other.interrupted;
        self.dirty += other.dirty;
        self.flushed += other.flushed;
        self.pauses.add(other.pauses);
        self.warmth.add(other.warmth);
    }
}

/// Kills the victim `count` times.
///
/// # Errors
/// If a write is lost, a read returns stale data, a request fails, an answer does not arrive, or a server does not
/// start.
pub fn run<'a>(
    victim: impl Into<Victim<'a>>,
    image: &'a Path,
    directory: &Path,
    options: Options,
    count: u32,
    random: &mut Random,
) -> anyhow::Result<Report> {
    let victim = victim.into();
    disk::create(&victim, image, DISK)?;
    let disk = Disk::start(victim, image, directory)?;
    let guest = FrontEnd::connect(disk.socket(), options)?;
    let mut rounds = Rounds { client: Client::new(guest), disk, report: Report::default() };
    while rounds.report.kills < count {
        rounds.client.work(Duration::from_micros(random.below(SERVER_LIFETIME_US_MAX)), random)?;
        let kill = rounds.report.kills;
        rounds.round(random).with_context(|| format!("at kill {kill}"))?;
    }
    rounds.end()
}

struct Rounds<'a> {
    client: Client,
    disk: Disk<'a>,
    report: Report,
}

impl Rounds<'_> {
    /// Kills the server, or, with a cache, sometimes stops it or serves the disk without its cache for a while.
    fn round(&mut self, random: &mut Random) -> anyhow::Result<()> {
        let has_cache = self.disk.victim().cache.is_some() && !self.disk.is_remote();
        match random.below(if has_cache { 24 } else { 1 }) {
            1 | 2 => self.stop(random),
            3 if !self.disk.victim().whole => self.change_without_cache(random),
            _ => self.kill(random),
        }
    }

    /// Kills the victim, and continues with the next server.
    fn kill(&mut self, random: &mut Random) -> anyhow::Result<()> {
        let cache_stats = self.disk.record_cache_stats()?;
        self.client.submit(random);
        let killed = Instant::now();
        self.disk.kill()?;
        let begin = Instant::now();
        let is_dirty = cache_stats.is_some_and(|cache_stats| cache_stats.dirty_bytes > 0);
        self.report.dirty += u32::from(is_dirty);
        self.client.collect()?;
        self.report.interrupted += self.client.in_flight() as u64;
        if !self.disk.is_remote() {
            let whole = self.disk.victim().whole;
            if whole && random.below(2) == 0 {
                self.disk.kill_nbd_server();
            }
            if is_dirty && !whole && random.below(8) == 0 {
                self.assert_changed_disk_refused()?;
                self.report.without += 1;
            }
            // A store that is still running may complete outstanding requests.
            if !whole || !self.disk.has_store() {
                let has_all = self.disk.victim().image_has_flushed_data();
                let is_flushed = !has_all && !whole && random.below(8) == 0;
                if is_flushed {
                    self.disk.flush_cache()?;
                    self.report.flushed += 1;
                }
                if has_all || is_flushed {
                    self.check_image_after_exit()?;
                }
            }
        }
        let check_time = begin.elapsed();
        self.restart(random)?;
        let begin = Instant::now();
        self.disk.record_retention()?;
        let load_time = begin.elapsed();
        if self.disk.is_remote() {
            self.disk.wait_until_connected()?;
        } else {
            self.reconnect()?;
        }
        if self.client.in_flight() == 0 {
            self.client.submit(random);
        }
        self.client.wait()?;
        // The check's own time is not part of the pause.
        self.report.pauses.push(killed.elapsed() - check_time - load_time);
        self.report.kills += 1;
        self.check_served_data(random)
    }

    /// Restarts the server, mostly in the campaign's cache mode.
    fn restart(&mut self, random: &mut Random) -> anyhow::Result<()> {
        match self.disk.victim().cache {
            Some(cache) if random.below(8) == 0 => {
                let others = cache.mode.others();
                self.disk.restart_with_mode(others[random.below(others.len() as u64) as usize])
            }
            _ => self.disk.restart(),
        }
    }

    /// Checks the data that the next server returns.
    fn check_served_data(&mut self, random: &mut Random) -> anyhow::Result<()> {
        self.client.finish()?;
        if let Some(from) = self.disk.holds()? {
            self.client.read_all(random).context("reading the whole disk")?;
            let to = self.disk.holds()?.unwrap_or_default();
            if !self.disk.may_bypass_cache() {
                self.disk.warmth.reread(from, to);
            }
        }
        // After a flush the image itself can be checked. Before, only the server knows all of its mapping.
        if self.disk.is_remote() || self.disk.format() == Format::Qcow2 {
            self.check_image_after_flush()?;
        }
        Ok(())
    }

    /// Stops Larder, and starts it again.
    fn stop(&mut self, random: &mut Random) -> anyhow::Result<()> {
        self.client.submit(random);
        self.disk.end()?;
        self.client.collect()?;
        if !self.disk.victim().whole {
            self.check_image_after_exit()?;
        }
        self.restart(random)?;
        self.reconnect()?;
        self.report.stops += 1;
        self.check_served_data(random)
    }

    /// Writes to the disk through a server without its cache. The next server with the cache must detect that.
    fn change_without_cache(&mut self, random: &mut Random) -> anyhow::Result<()> {
        // After a kill, a late enough change is needed to tell it from the server's own writes, and the image must be
        // complete, with no dirty lines.
        let is_killed = self.disk.victim().image_has_flushed_data() && random.below(2) == 0;
        match is_killed {
            true => self.disk.kill()?,
            false => self.disk.end()?,
        }
        self.client.collect()?;
        self.disk.restart_without_cache()?;
        self.reconnect()?;
        self.client.work(Duration::from_micros(random.below(SERVER_LIFETIME_US_MAX)), random)?;
        self.client.settle()?;
        self.disk.end()?;
        if is_killed {
            self.disk.shift_image_mtime(FOREIGN_MTIME_SHIFT)?;
        }
        self.disk.restart()?;
        self.disk.assert_logged_any(&CACHE_EMPTIED_TEXTS)?;
        self.reconnect()?;
        self.client.read_all(random).context("reading a disk that was changed without its cache")?;
        self.disk.end()?;
        self.disk.shift_image_mtime(Duration::ZERO)?;
        self.disk.restart()?;
        self.reconnect()?;
        self.report.without += 1;
        Ok(())
    }

    /// Asserts that a dirty cache is refused for a disk that was changed without it, and is not modified.
    fn assert_changed_disk_refused(&self) -> anyhow::Result<()> {
        let before = self.disk.modified()?;
        self.disk.shift_image_mtime(FOREIGN_MTIME_SHIFT)?;
        self.disk.is_refused("the disk was changed since without it")?;
        self.disk.set_image_mtime(before)
    }

    fn reconnect(&mut self) -> anyhow::Result<()> {
        Ok(self.client.guest.reconnect(UnixStream::connect(self.disk.socket())?)?)
    }

    /// Checks the image after a server's end.
    fn check_image_after_exit(&self) -> anyhow::Result<()> {
        let bytes = disk_contents(self.disk.format(), self.disk.image())?;
        let compared = match self.disk.format() {
            Format::Raw => self.client.books.compare(&bytes),
            Format::Qcow2 => self.client.books.compare_flushed(&bytes),
        };
        compared.context("checking the image after its server's exit")
    }

    /// Checks the image when all requests are answered and flushed.
    fn check_image_after_flush(&mut self) -> anyhow::Result<()> {
        self.client.settle()?;
        match self.disk.victim().image_has_flushed_data() {
            true => self
                .client
                .books
                .compare(&disk_contents(self.disk.format(), self.disk.image())?)
                .context("checking the image after a flush"),
            false => Ok(()),
        }
    }

    /// Stops the last server, and checks that the image has all writes.
    fn end(mut self) -> anyhow::Result<Report> {
        self.client.settle()?;
        self.disk.end()?;
        self.client
            .books
            .compare(&disk_contents(self.disk.format(), self.disk.image())?)
            .context("checking the final image")?;
        let done = self.client.done;
        let report = Report {
            writes: done.writes,
            reads: done.reads,
            flushes: done.flushes,
            warmth: std::mem::take(&mut self.disk.warmth),
            ..self.report
        };
        Ok(report)
    }
}

/// Returns the disk's bytes.
fn disk_contents(format: Format, image: &Path) -> anyhow::Result<Vec<u8>> {
    match format {
        Format::Raw => Ok(std::fs::read(image)?),
        Format::Qcow2 => disk::qcow2_contents(image),
    }
}
