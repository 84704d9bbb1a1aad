//! A server is killed at random moments under a client that keeps books of what it wrote and what it flushed. After
//! each kill the image itself is compared, and the next server must answer what was in flight.
//!
//! What the image may hold: for each sector the last write that had completed, or one that was under way. (The host
//! does not crash here, so more must be there than what was flushed; the books tell both apart.) If it is Larder that is
//! killed, the image is compared before the next one starts. A remote server may lose what was not flushed, and Larder
//! repeats it: the image is compared when all is answered and flushed. A qcow2 image shows what was flushed at once, and
//! the rest after the next server has flushed it; `qemu-img check` must find no error in it at either time.
//!
//! A read gives no less than what had completed when it began. With a cache all of the disk is read after each kill, some
//! servers are stopped instead, some are started in another mode, and some without the cache, which must be noticed.

use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::Context;

use super::Random;
use super::cached::Warmth;
use super::client::Client;
pub use super::client::DISK;
use super::disk::{self, Disk, Format, Victim};
use super::front_end::{FrontEnd, Options};
use super::pauses::Pauses;

/// A server lives no longer.
const LIFE_US: u64 = 60_000;

/// What a server says of a cache that is not the disk's any more.
const BEGINS_ANEW: [&str; 2] = ["begins anew", "is not believed"];
/// What is not told from the killed server's own changes.
const NOT_ITS_OWN: Duration = Duration::from_secs(60);

/// What came of it.
#[derive(Debug, Default)]
pub struct Report {
    /// Servers killed.
    pub kills: u32,
    /// Servers stopped.
    pub stops: u32,
    /// Servers started without the cache, and others that were refused, or began anew, because the image was changed.
    pub without: u32,
    /// Writes acknowledged.
    pub writes: u64,
    /// Reads compared.
    pub reads: u64,
    /// Flushes acknowledged.
    pub flushes: u64,
    /// Requests that were in flight when a server was killed.
    pub interrupted: u64,
    /// Caches that had what the disk had not when their server was killed.
    pub dirty: u32,
    /// Caches of them that were written to the disk before the next server was started.
    pub flushed: u32,
    /// From the kill to the first answer with the next server, its start included.
    pub pauses: Pauses,
    /// How warm its cache was.
    pub warmth: Warmth,
}

impl Report {
    /// Both together.
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
/// A write was lost, a read gave what was older, a request failed, an answer never came, or a server did not start.
pub fn run<'a>(
    victim: impl Into<Victim<'a>>,
    image: &'a Path,
    folder: &Path,
    options: Options,
    count: u32,
    random: &mut Random,
) -> anyhow::Result<Report> {
    let victim = victim.into();
    disk::create(&victim, image, DISK)?;
    let disk = Disk::start(victim, image, folder)?;
    let guest = FrontEnd::connect(disk.socket(), options)?;
    let mut rounds = Rounds {
        client: Client::new(guest),
        disk,
        report: Report::default(),
    };
    while rounds.report.kills < count {
        rounds
            .client
            .work(Duration::from_micros(random.below(LIFE_US)), random)?;
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
    /// The server is killed, or, with a cache, stopped or left out for a while.
    fn round(&mut self, random: &mut Random) -> anyhow::Result<()> {
        let has_cache = self.disk.victim().cache.is_some() && !self.disk.is_remote();
        match random.below(if has_cache { 24 } else { 1 }) {
            1 | 2 => self.stop(random),
            3 if !self.disk.victim().whole => self.change_without_cache(random),
            _ => self.kill(random),
        }
    }

    /// Kills the victim, and has the next server go on.
    fn kill(&mut self, random: &mut Random) -> anyhow::Result<()> {
        let has = self.disk.note_holds()?;
        self.client.submit(random);
        let killed = Instant::now();
        self.disk.kill()?;
        let begin = Instant::now();
        let is_dirty = has.is_some_and(|has| has.dirty > 0);
        self.report.dirty += u32::from(is_dirty);
        self.client.collect()?;
        self.report.interrupted += self.client.in_flight() as u64;
        if !self.disk.is_remote() {
            let whole = self.disk.victim().whole;
            if whole && random.below(2) == 0 {
                self.disk.kill_store();
            }
            if is_dirty && !whole && random.below(8) == 0 {
                self.refuse_changed()?;
                self.report.without += 1;
            }
            // A store that lives on may still carry out what it was asked.
            if !whole || !self.disk.has_store() {
                let has_all = self.disk.victim().image_has_all();
                let is_flushed = !has_all && !whole && random.below(8) == 0;
                if is_flushed {
                    self.disk.flush_cache()?;
                    self.report.flushed += 1;
                }
                if has_all || is_flushed {
                    self.compare_at_rest()?;
                }
            }
        }
        let compared = begin.elapsed();
        self.restart(random)?;
        let begin = Instant::now();
        self.disk.count_warmth()?;
        let loaded = begin.elapsed();
        if self.disk.is_remote() {
            self.disk.wait_until_connected()?;
        } else {
            self.reconnect()?;
        }
        if self.client.in_flight() == 0 {
            self.client.submit(random);
        }
        self.client.wait()?;
        // The comparison is ours, not part of the pause.
        self.report.pauses.push(killed.elapsed() - compared - loaded);
        self.report.kills += 1;
        self.compare_served(random)
    }

    /// Mostly in the mode of the campaign.
    fn restart(&mut self, random: &mut Random) -> anyhow::Result<()> {
        match self.disk.victim().cache {
            Some(cache) if random.below(8) == 0 => {
                let others = cache.mode.others();
                self.disk.restart_as(others[random.below(others.len() as u64) as usize])
            }
            _ => self.disk.restart(),
        }
    }

    /// Compares what the next server gives.
    fn compare_served(&mut self, random: &mut Random) -> anyhow::Result<()> {
        self.client.finish()?;
        if let Some(from) = self.disk.holds()? {
            self.client.read_all(random).context("all of the disk")?;
            let to = self.disk.holds()?.unwrap_or_default();
            if !self.disk.is_passed_by() {
                self.disk.warmth.reread(from, to);
            }
        }
        // What is committed by a flush can be seen; before, only the next server knew of it.
        if self.disk.is_remote() || self.disk.format() == Format::Qcow2 {
            self.compare_settled()?;
        }
        Ok(())
    }

    /// Stops Larder, and starts it again.
    fn stop(&mut self, random: &mut Random) -> anyhow::Result<()> {
        self.client.submit(random);
        self.disk.end()?;
        self.client.collect()?;
        if !self.disk.victim().whole {
            self.compare_at_rest()?;
        }
        self.restart(random)?;
        self.reconnect()?;
        self.report.stops += 1;
        self.compare_served(random)
    }

    /// The disk is served, and written to, without its cache, and then with it again, which must notice.
    fn change_without_cache(&mut self, random: &mut Random) -> anyhow::Result<()> {
        // After a kill a change is only told from the server's own if it comes late enough; and the image is the disk only
        // if nothing is written back.
        let is_killed = self.disk.victim().image_has_all() && random.below(2) == 0;
        match is_killed {
            true => self.disk.kill()?,
            false => self.disk.end()?,
        }
        self.client.collect()?;
        self.disk.restart_without_cache()?;
        self.reconnect()?;
        self.client.work(Duration::from_micros(random.below(LIFE_US)), random)?;
        self.client.settle()?;
        self.disk.end()?;
        if is_killed {
            self.disk.set_modified(NOT_ITS_OWN)?;
        }
        self.disk.restart()?;
        self.disk.has_said_one_of(&BEGINS_ANEW)?;
        self.reconnect()?;
        self.client
            .read_all(random)
            .context("a disk that was changed without its cache")?;
        self.disk.end()?;
        self.disk.set_modified(Duration::ZERO)?;
        self.disk.restart()?;
        self.reconnect()?;
        self.report.without += 1;
        Ok(())
    }

    /// A cache that has what the disk has not is not opened for one that was changed without it, and stays as it is.
    fn refuse_changed(&self) -> anyhow::Result<()> {
        let before = self.disk.modified()?;
        self.disk.set_modified(NOT_ITS_OWN)?;
        self.disk.is_refused("the disk was changed since without it")?;
        self.disk.set_modified_to(before)
    }

    fn reconnect(&mut self) -> anyhow::Result<()> {
        Ok(self.client.guest.reconnect(UnixStream::connect(self.disk.socket())?)?)
    }

    /// Compares what a server has left on the image.
    fn compare_at_rest(&self) -> anyhow::Result<()> {
        let bytes = contents_of(self.disk.format(), self.disk.image())?;
        let compared = match self.disk.format() {
            Format::Raw => self.client.books.compare(&bytes),
            Format::Qcow2 => self.client.books.compare_flushed(&bytes),
        };
        compared.context("the image of a server that has ended")
    }

    /// Compares the image when all is answered and flushed.
    fn compare_settled(&mut self) -> anyhow::Result<()> {
        self.client.settle()?;
        match self.disk.victim().image_has_all() {
            true => self
                .client
                .books
                .compare(&contents_of(self.disk.format(), self.disk.image())?)
                .context("the image after a flush"),
            false => Ok(()),
        }
    }

    /// All that was written is there when the last server has ended.
    fn end(mut self) -> anyhow::Result<Report> {
        self.client.settle()?;
        self.disk.end()?;
        self.client
            .books
            .compare(&contents_of(self.disk.format(), self.disk.image())?)
            .context("the image in the end")?;
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

/// The disk's bytes.
fn contents_of(format: Format, image: &Path) -> anyhow::Result<Vec<u8>> {
    match format {
        Format::Raw => Ok(std::fs::read(image)?),
        Format::Qcow2 => disk::qcow2_contents(image),
    }
}
