//! Kills a server at random moments while fio writes over NBD. fio then verifies its earlier writes, through the next
//! server and, if the format and cache mode allow, on the image itself.
//!
//! The disk has four regions. One fio job writes a whole region in requests of 2, 4, 16 or 64 KiB in a random order,
//! and puts its number and the offset into every 16 bytes. The same job, in verify-only mode, detects stale and
//! misplaced data. (fio's own checksums do not: those of an earlier job are valid too.) After each kill nbdcopy reads
//! the whole disk. In the region that was being written, each sector must hold the job's data or the previous data.
//! All other sectors must be unchanged, and later checks expect the content that this one found.

use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};

use super::Random;
use super::cached::CacheRetention;
use super::disk::{self, Disk, Export, Format, Victim};
use super::pauses::DurationSample;
use super::process::{Process, killed_with_parent};

/// Bytes of the disk.
pub const DISK: u64 = 16 << 20;
const REGIONS: usize = 4;
const REGION: u64 = DISK / REGIONS as u64;
const SECTOR: usize = 512;
/// Sizes of a job's requests, one size for each job. With mixed sizes fio would have to repeat the same sequence to
/// verify, which it does not do when the job's position in the list of jobs differs.
const REQUESTS: [u64; 4] = [2 << 10, 4 << 10, 16 << 10, 64 << 10];
/// Prefix of a job's number, so that no other bytes look like it.
const STAMP: u64 = 0x4c41_5244 << 32;
const LIMIT: Duration = Duration::from_secs(120);

/// Result of the campaign.
#[derive(Debug, Default)]
pub struct Report {
    /// Servers killed while fio wrote.
    pub kills: u32,
    /// Servers stopped.
    pub stops: u32,
    /// Jobs that had completed before the kill.
    pub completed: u32,
    /// Regions that fio verified, through a server or on the image.
    pub verified: u32,
    /// Kills at which the cache held dirty lines.
    pub dirty: u32,
    /// Times from a kill until the next server listens.
    pub pauses: DurationSample,
    /// Cache survival over the kills.
    pub warmth: CacheRetention,
}

struct Rounds<'a> {
    disk: Disk<'a>,
    /// Job that has written each region completely; `None` if it was interrupted.
    jobs: [Option<u64>; REGIONS],
    next_job: u64,
    /// Content of the disk at the last check.
    seen: Vec<u8>,
    copy: &'a Path,
    report: Report,
}

/// Kills the victim `count` times. `directory` is for sockets, and for a copy of the disk.
///
/// # Errors
/// If fio or nbdcopy finds wrong data, or a server does not start.
pub fn run<'a>(
    victim: impl Into<Victim<'a>>,
    image: &'a Path,
    directory: &Path,
    count: u32,
    random: &mut Random,
) -> anyhow::Result<Report> {
    let victim = victim.into();
    ensure!(
        victim.target == disk::Target::Larder,
        "the fio campaign can kill only Larder: nothing reconnects fio to another server"
    );
    disk::create(&victim, image, DISK)?;
    let copy = directory.join("copy");
    let mut rounds = Rounds {
        disk: Disk::export(victim, image, directory, Export::Nbd)?,
        jobs: [None; REGIONS],
        next_job: 1,
        seen: vec![0; DISK as usize],
        copy: &copy,
        report: Report::default(),
    };
    for region in 0..REGIONS {
        rounds.write_whole(region)?;
    }
    rounds.look(None)?;
    while rounds.report.kills < count {
        let kill = rounds.report.kills;
        let is_stop = random.below(12) == 0;
        rounds.round(is_stop, random).with_context(|| format!("at kill {kill}"))?;
    }
    let Rounds { disk, mut report, seen, .. } = rounds;
    report.warmth = disk.warmth.clone();
    disk.stop()?;
    // In every cache mode, a stopped server leaves all data on the disk.
    let found = match victim.format {
        Format::Raw => std::fs::read(image)?,
        Format::Qcow2 => disk::qcow2_contents(image)?,
    };
    ensure!(found == seen, "the image differs from what the last server returned");
    Ok(report)
}

impl Rounds<'_> {
    /// Runs a job that writes a region, kills or stops the server, and checks the whole disk.
    fn round(&mut self, is_stop: bool, random: &mut Random) -> anyhow::Result<()> {
        let region = random.below(REGIONS as u64) as usize;
        let job = self.next_job_number();
        // Reads of another region fill the cache meanwhile.
        let read_region = (region + 1 + random.below(REGIONS as u64 - 1) as usize) % REGIONS;
        let uri = format!("--uri={}", self.disk.uri());
        let mut command = fio("nbd", &uri);
        write(&mut command, region, job);
        if let Some(written) = self.jobs[read_region] {
            verify(&mut command, read_region, written);
        }
        let mut writer = Process::start(command)?;
        writer.wait_for("connected to NBD server", LIMIT)?;
        std::thread::sleep(Duration::from_micros(random.below(200_000)));
        let is_done = writer.wait(Duration::ZERO).is_ok_and(|status| status.success());
        let before = self.seen[range_of(region)].to_vec();
        let pause = self.end(is_stop)?;
        // fio would retry the dead server forever.
        drop(writer);
        self.jobs[region] = is_done.then_some(job);
        self.report.completed += u32::from(is_done);
        let victim = self.disk.victim();
        if victim.format == Format::Raw && (is_stop || victim.image_has_flushed_data()) {
            let image = format!("--filename={}", self.disk.image().display());
            self.verify_all("psync", &image)?;
        }
        let begin = Instant::now();
        self.disk.restart()?;
        if !is_stop {
            self.report.pauses.push(pause + begin.elapsed());
        }
        self.disk.record_retention()?;
        self.verify_all("nbd", &uri)?;
        self.look(Some((region, job, &before)))?;
        if self.jobs[region].is_none() {
            self.write_whole(region)?;
            self.look(None)?;
        }
        Ok(())
    }

    /// Kills or stops the server. Returns the time that it took.
    fn end(&mut self, is_stop: bool) -> anyhow::Result<Duration> {
        let cache_stats = self.disk.record_cache_stats()?;
        let begin = Instant::now();
        match is_stop {
            true => {
                self.disk.end()?;
                self.report.stops += 1;
            }
            false => {
                self.disk.kill()?;
                self.report.kills += 1;
                self.report.dirty += u32::from(cache_stats.is_some_and(|cache_stats| cache_stats.dirty_bytes > 0));
            }
        }
        Ok(begin.elapsed())
    }

    fn next_job_number(&mut self) -> u64 {
        self.next_job += 1;
        self.next_job - 1
    }

    /// Lets fio write a whole region, and verify it.
    fn write_whole(&mut self, region: usize) -> anyhow::Result<()> {
        let job = self.next_job_number();
        let uri = format!("--uri={}", self.disk.uri());
        let mut command = fio("nbd", &uri);
        write(&mut command, region, job);
        command.arg("--do_verify=1");
        run_to_completion(command)?;
        self.jobs[region] = Some(job);
        // Marks the content as unknown until the next check.
        let start = range_of(region).start;
        self.seen[start..start + SECTOR].fill(0xff);
        Ok(())
    }

    /// Lets fio verify all regions that one job has written.
    fn verify_all(&mut self, engine: &str, target: &str) -> anyhow::Result<()> {
        let mut command = fio(engine, target);
        for (region, job) in self.jobs.iter().enumerate() {
            if let Some(job) = job {
                verify(&mut command, region, *job);
                self.report.verified += 1;
            }
        }
        match self.jobs.iter().any(Option::is_some) {
            true => run_to_completion(command).with_context(|| format!("fio verifies over {engine}")),
            false => Ok(()),
        }
    }

    /// Reads the whole disk and checks that it has not changed. In the region that a job was writing, each sector may
    /// instead hold the job's data. Newly written regions may hold anything.
    fn look(&mut self, writing: Option<(usize, u64, &[u8])>) -> anyhow::Result<()> {
        let copy_output = Command::new("nbdcopy").arg(self.disk.uri()).arg(self.copy).output().context("nbdcopy")?;
        ensure!(copy_output.status.success(), "nbdcopy: {}", String::from_utf8_lossy(&copy_output.stderr));
        let found = std::fs::read(self.copy)?;
        std::fs::remove_file(self.copy)?;
        ensure!(found.len() as u64 == DISK, "the disk has {} bytes", found.len());
        for region in 0..REGIONS {
            let range = range_of(region);
            let (now, previous) = (&found[range.clone()], &self.seen[range.clone()]);
            match writing {
                Some((written, job, before)) if written == region => compare_written(range.start, now, before, job)?,
                _ if previous[..SECTOR].iter().all(|byte| *byte == 0xff) => {}
                _ => ensure!(now == previous, "region {region} has changed"),
            }
        }
        self.seen = found;
        Ok(())
    }
}

fn range_of(region: usize) -> std::ops::Range<usize> {
    region * REGION as usize..(region + 1) * REGION as usize
}

/// Returns the fio command with the options that all jobs share.
fn fio(engine: &str, place: &str) -> Command {
    let mut command = killed_with_parent("fio");
    command.args([
        &format!("--ioengine={engine}"),
        place,
        "--rw=randwrite",
        &format!("--size={REGION}"),
        "--iodepth=16",
        "--randrepeat=0",
        "--verify=pattern",
        "--verify_fatal=1",
        "--verify_state_save=0",
        "--output-format=terse",
    ]);
    command
}

fn add_job_arguments(command: &mut Command, region: usize, job: u64) {
    command.args([
        &format!("--name={job}"),
        &format!("--offset={}", range_of(region).start),
        &format!("--randseed={job}"),
        &format!("--bs={}", request_of(job)),
        &format!("--verify_pattern=0x{:016x}%o", STAMP | job),
    ]);
}

fn request_of(job: u64) -> u64 {
    REQUESTS[job as usize % REQUESTS.len()]
}

/// Adds a job that writes a region.
fn write(command: &mut Command, region: usize, job: u64) {
    add_job_arguments(command, region, job);
    command.arg("--do_verify=0");
}

/// Adds the same job in verify-only mode.
fn verify(command: &mut Command, region: usize, job: u64) {
    add_job_arguments(command, region, job);
    command.arg("--verify_only");
}

fn run_to_completion(command: Command) -> anyhow::Result<()> {
    let mut fio = Process::start(command)?;
    let status = fio.wait(LIMIT)?;
    ensure!(status.success(), "fio exited with {status}: {}", fio.output());
    Ok(())
}

/// Checks that each sector of a region that begins at `start` holds the job's data or the previous data.
fn compare_written(start: usize, now: &[u8], before: &[u8], job: u64) -> anyhow::Result<()> {
    for (index, (now, before)) in now.chunks(SECTOR).zip(before.chunks(SECTOR)).enumerate() {
        let at = (start + index * SECTOR) as u64;
        ensure!(
            now == before || is_written_by_job(at, now, job),
            "the sector at {at} holds neither job {job}'s data nor its previous data: {:02x?}",
            &now[..16]
        );
    }
    Ok(())
}

/// Returns whether every 16 bytes of the sector hold the job's number and the offset of its request.
fn is_written_by_job(at: u64, sector: &[u8], job: u64) -> bool {
    let (Some(stamp), Some(begin)) = (sector.first_chunk::<8>(), sector[8..].first_chunk::<8>()) else {
        return false;
    };
    let begin = u64::from_le_bytes(*begin);
    u64::from_be_bytes(*stamp) == STAMP | job
        && begin == at - at % request_of(job)
        && sector.chunks(16).all(|piece| piece == &sector[..16])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    /// A torn, stale or misplaced sector in the region of an interrupted job is detected.
    fn torn_or_misplaced_sector_is_detected() {
        let piece = |job: u64, begin: u64| [(STAMP | job).to_be_bytes(), begin.to_le_bytes()].concat();
        let before = piece(1, 0).repeat(64);
        let written = [piece(2, 0).repeat(32), piece(1, 0).repeat(32)].concat();
        assert!(compare_written(0, &written, &before, 2).is_ok());
        assert!(compare_written(0, &written, &before, 3).is_err());
        let mut torn = written.clone();
        torn[16..32].copy_from_slice(&before[16..32]);
        assert!(compare_written(0, &torn, &before, 2).is_err());
        let elsewhere = [piece(2, 16 << 10).repeat(32), piece(1, 0).repeat(32)].concat();
        assert!(compare_written(0, &elsewhere, &before, 2).is_err());
    }
}
