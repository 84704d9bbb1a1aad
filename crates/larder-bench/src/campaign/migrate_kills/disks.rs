//! The disk of the guest of [`super`]: its two hosts, which of them has the image open, and the final check of its
//! content. All of it is observed from outside, with QEMU's tools.
//!
//! This module restarts killed servers, as systemd would.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use tempfile::TempDir;

use super::super::disk::{Format, qcow2_contents};
use super::super::migration::LIMIT;
use super::super::migration::host::{Host, PLACES, WRITE_AND_VERIFY_SCRIPT};
use super::super::process::{Process, killed_with_parent};
use super::Place;

/// The guest's load, appended to [`WRITE_AND_VERIFY_SCRIPT`]. It prints a line after each write. Meanwhile fio writes
/// and verifies with many requests in flight; its progress is checked too.
const SCRIPT: &str = r#"
number=0
while :; do
  number=$((number + 1))
  fio --minimal --direct=1 --ioengine=libaio --iodepth=8 --rw=randwrite --bsrange=4k-64k --size=4m --offset=32m --fsync=16 \
    --verify=crc32c --verify_fatal=1 --randseed=$number --filename=/dev/vda --name=a >/fio 2>&1 ||
    { echo "MISMATCH: fio"; cat /fio; dmesg | tail; }
  echo $number >/verified
done &
tick=0 rounds=0 verified=
while :; do
  write_and_look $tick
  echo "TICK $tick"
  if [ $next = 0 ]; then
    echo "ROUND"
    rounds=$((rounds + 1))
    [ "$verified" = "$(cat /verified 2>/dev/null)" ] || rounds=0
    verified=$(cat /verified 2>/dev/null)
    [ $rounds -lt 40 ] || { echo "MISMATCH: fio stands still"; dmesg | tail; exit 1; }
  fi
  tick=$((tick + 1))
done
"#;

/// Returns the whole script.
pub(super) fn script() -> String {
    [WRITE_AND_VERIFY_SCRIPT, SCRIPT].concat()
}

/// Size of each of the guest's slots on the disk.
const PLACE_BYTES: usize = 64 << 10;
/// Size of a disk's atomic write.
const SECTOR_BYTES: usize = 512;

/// An export's size: a disk of 64 MiB plus the metadata of qcow2.
const EXPORT_BYTES: u64 = 96 << 20;

/// Options for the disks of a campaign's guests.
pub struct DiskOptions {
    /// Format of the images; by default both in turn.
    pub format: Option<Format>,
    /// True if the images are behind an NBD server, where no lock keeps two hosts from writing to one.
    pub nbd: bool,
    /// Directory of the images and caches.
    pub folder: PathBuf,
}

impl DiskOptions {
    /// Creates the disk of the guest with this number.
    pub(super) fn disk(&self, larder: &Path, guest: u32) -> anyhow::Result<Disks> {
        let default_format = if guest.is_multiple_of(2) { Format::Qcow2 } else { Format::Raw };
        Disks::new(larder, &self.folder, self.format.unwrap_or(default_format), self.nbd)
    }
}

/// A disk that is served on two hosts.
pub(super) struct Disks {
    format: Format,
    image: PathBuf,
    /// NBD server of the image, unless both hosts open the file themselves.
    export: Option<Process>,
    hosts: [Host; 2],
    servers: [Process; 2],
    /// Number of output lines of each server before the move.
    said_before: [usize; 2],
    /// Index of the host that runs the VM.
    at: usize,
    opens: Opens,
    _folder: TempDir,
}

/// Observes which servers have the image open, from another thread.
#[derive(Clone)]
pub(super) struct Opens {
    image: PathBuf,
    servers: Arc<[AtomicU32; 2]>,
}

impl Opens {
    /// Returns whether both servers have the image open for writing. NBD exports cannot be observed.
    pub(super) fn both(&self) -> bool {
        // The first server had it open before and after the other one had.
        [0, 1, 0].into_iter().all(|of| self.has(of))
    }

    fn has(&self, of: usize) -> bool {
        let process = format!("/proc/{}", self.servers[of].load(Ordering::Relaxed));
        let files = fs::read_dir(format!("{process}/fd")).into_iter().flatten().flatten();
        // The server may exit or close files meanwhile.
        let is_image = |file: &fs::DirEntry| fs::read_link(file.path()).is_ok_and(|to| to == self.image);
        let mut files = files.filter(is_image);
        files.any(|file| {
            let fdinfo = format!("{process}/fdinfo/{}", file.file_name().display());
            fs::read_to_string(fdinfo).is_ok_and(|fdinfo| is_writable(&fdinfo))
        })
    }
}

/// Returns whether fdinfo shows a file opened for writing.
fn is_writable(about: &str) -> bool {
    let flags = about.lines().find_map(|line| line.strip_prefix("flags:"));
    let flags = flags.and_then(|flags| i32::from_str_radix(flags.trim(), 8).ok());
    flags.is_some_and(|flags| flags & libc::O_ACCMODE != libc::O_RDONLY)
}

impl Disks {
    /// Creates a disk, optionally behind an NBD server. The VM may boot on the first host; the second one waits for
    /// it.
    pub(super) fn new(larder: &Path, directory: &Path, format: Format, nbd: bool) -> anyhow::Result<Self> {
        ensure!(rustix::process::geteuid().is_root(), "this needs root: each host has a boot ID of its own");
        let directory = tempfile::tempdir_in(directory)?;
        let image = directory.path().canonicalize()?.join("image");
        let (kind, options) = match format {
            Format::Raw => ("raw", ""),
            Format::Qcow2 => ("qcow2", "cluster_size=4k"),
        };
        let mut create = Command::new("qemu-img");
        create.args(["create", "-q", "-f", kind]).arg(&image).arg("64M");
        if !options.is_empty() {
            create.args(["-o", options]);
        }
        ensure!(create.status()?.success(), "qemu-img create failed");
        let export = nbd.then(|| export(&image, directory.path())).transpose()?;
        let text = match &export {
            Some((_, uri)) => uri,
            None => image.to_str().context("the directory's path is not UTF-8")?,
        };
        let host = |_| {
            let short = tempfile::tempdir_in("/dev/shm")?;
            Host::new(larder, (text, kind), "wb", short, tempfile::tempdir_in(directory.path())?)?.with_boot_ids()
        };
        let hosts = [host(0)?, host(1)?];
        let servers = [hosts[0].serve(&[])?, hosts[1].serve(&["--incoming"])?];
        let numbers = [servers[0].id(), servers[1].id()].map(AtomicU32::new);
        Ok(Self {
            opens: Opens { image: image.clone(), servers: Arc::new(numbers) },
            format,
            export: export.map(|(server, _)| server),
            image,
            hosts,
            said_before: [0; 2],
            servers,
            at: 0,
            _folder: directory,
        })
    }

    /// Returns the observer of the servers.
    pub(super) fn opens(&self) -> Opens {
        self.opens.clone()
    }

    /// Returns the host that runs the VM.
    pub(super) fn here(&self) -> &Host {
        &self.hosts[self.at]
    }

    /// Returns the other host.
    pub(super) fn there(&self) -> &Host {
        &self.hosts[1 - self.at]
    }

    /// Records that the VM now runs on the other host.
    pub(super) fn switch_hosts(&mut self) {
        self.at = 1 - self.at;
    }

    /// Records the start of a move.
    pub(super) fn begins(&mut self) {
        self.said_before = [0, 1].map(|of| self.servers[of].lines());
    }

    /// Returns whether the source has closed the image in this move.
    pub(super) fn has_left(&self) -> bool {
        self.servers[self.at].has_output_after(self.said_before[self.at], "its image is closed")
    }

    /// Returns whether the destination has opened the image in this move.
    pub(super) fn destination_opened_image(&self) -> bool {
        let there = 1 - self.at;
        self.servers[there].has_output_after(self.said_before[there], "its image is open")
    }

    /// Kills and restarts the server on the VM's host, or on the other one. Returns the killed server's output.
    pub(super) fn kill_server(&mut self, here: bool) -> anyhow::Result<String> {
        self.replace_server(here, false)
    }

    /// Kills and restarts the server, and clears its host's volatile state as a reboot does. Returns the killed
    /// server's output.
    pub(super) fn kill_host(&mut self, here: bool) -> anyhow::Result<String> {
        self.replace_server(here, true)
    }

    fn replace_server(&mut self, here: bool, restarts: bool) -> anyhow::Result<String> {
        let of = if here { self.at } else { 1 - self.at };
        self.servers[of].kill();
        let text = self.servers[of].output();
        if restarts {
            self.hosts[of].boots()?;
        }
        self.servers[of] = self.hosts[of].serve(&[])?;
        self.opens.servers[of].store(self.servers[of].id(), Ordering::Relaxed);
        Ok(text)
    }

    /// Returns the output of both servers, for diagnosis.
    pub(super) fn said(&self) -> String {
        let [one, other] = [self.at, 1 - self.at].map(|of| self.servers[of].output());
        format!("source's server: {one}\ndestination's server: {other}")
    }

    /// Checks that the hosts' view of the disk matches the VM's location.
    pub(super) fn check(&self, place: Place) -> anyhow::Result<()> {
        let availability =
            [self.here(), self.there()].map(|host| anyhow::Ok((!host.disk()?.away, !host.has_move_record()?)));
        let [here, there] = availability;
        let (here, there) = (here?, there?);
        let is_consistent = match place {
            Place::Source => [here, there] == [(true, true), (false, false)],
            Place::Destination => [here, there] == [(false, false), (true, true)],
            Place::Lost => !(here.0 && there.0),
        };
        ensure!(
            is_consistent,
            "the VM is at the {place:?}; its disk (open now, open after a restart): source {here:?}, destination {there:?}"
        );
        Ok(())
    }

    /// Ends both servers, and checks that the image has all data that the guest had flushed. The last tick that it
    /// printed is `ticks - 1`.
    pub(super) fn end(mut self, ticks: u64) -> anyhow::Result<()> {
        for (host, server) in self.hosts.iter().zip(&mut self.servers) {
            if !host.disk()?.away {
                let mut release = Process::start(host.vm(&["--expect"]))?;
                let released = release.wait(LIMIT)?.success();
                ensure!(released, "{}\n{}", release.output(), server.output());
            }
            server.signal(libc::SIGTERM);
            ensure!(server.wait(LIMIT)?.success(), "{}", server.output());
        }
        if let Some(export) = &mut self.export {
            export.signal(libc::SIGTERM);
            export.wait(LIMIT)?;
        }
        let contents = match self.format {
            Format::Raw => fs::read(&self.image)?,
            Format::Qcow2 => qcow2_contents(&self.image)?,
        };
        verify(&contents, ticks)
    }
}

/// Serves an image of fixed size on a socket in a directory. Returns the server and its URI. qemu-nbd completes the
/// requests of a client that was killed after it had sent them.
fn export(image: &Path, directory: &Path) -> anyhow::Result<(Process, String)> {
    File::options().write(true).open(image)?.set_len(EXPORT_BYTES)?;
    let socket = directory.join("nbd");
    let mut command = killed_with_parent("qemu-nbd");
    command.args(["-t", "-e", "16", "-f", "raw", "-k"]).arg(&socket).arg(image);
    let server = Process::start(command)?;
    let deadline = Instant::now() + LIMIT;
    while !socket.exists() {
        ensure!(Instant::now() < deadline, "qemu-nbd: {}", server.output());
        std::thread::sleep(Duration::from_millis(10));
    }
    Ok((server, format!("nbd+unix:///?socket={}", socket.display())))
}

/// Checks that all printed ticks are on the disk. For the next tick, each sector may have the old or the new data.
fn verify(contents: &[u8], ticks: u64) -> anyhow::Result<()> {
    let last = ticks.checked_sub(1).context("the guest has printed no tick")?;
    let written = |tick: u64| format!("tick {tick}\n").into_bytes().into_iter().cycle().take(PLACE_BYTES);
    for tick in (last + 1).saturating_sub(PLACES)..=last {
        let slot_start = (tick % PLACES) as usize * PLACE_BYTES;
        let actual = contents.get(slot_start..slot_start + PLACE_BYTES).context("the disk's content is too short")?;
        let expected: Vec<u8> = written(tick).collect();
        let next_content: Vec<u8> = written(tick + PLACES).collect();
        let is_in_flight = tick + PLACES == last + 1;
        let sectors =
            actual.chunks(SECTOR_BYTES).zip(expected.chunks(SECTOR_BYTES)).zip(next_content.chunks(SECTOR_BYTES));
        for (sector, ((actual, expected), next_content)) in sectors.enumerate() {
            ensure!(
                actual == expected || is_in_flight && actual == next_content,
                "sector {sector} of tick {tick} (the last tick is {last}) holds {:?}",
                String::from_utf8_lossy(&actual[..20])
            );
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Content of a disk after this number of ticks.
    fn disk(ticks: u64) -> Vec<u8> {
        let mut disk = vec![0; PLACES as usize * PLACE_BYTES];
        for tick in 0..ticks {
            let place = (tick % PLACES) as usize * PLACE_BYTES;
            let text = format!("tick {tick}\n").into_bytes();
            disk[place..place + PLACE_BYTES].iter_mut().zip(text.iter().cycle()).for_each(|(to, from)| *to = *from);
        }
        disk
    }

    #[test]
    /// All printed ticks must be on the disk, and at most one later tick.
    fn missing_or_extra_ticks_are_detected() {
        for ticks in [1, 5, PLACES, PLACES * 3 + 7] {
            verify(&disk(ticks), ticks).expect("all ticks are on the disk");
            // One tick was written but not printed.
            verify(&disk(ticks + 1), ticks).expect("one tick more is allowed");
            verify(&disk(ticks), ticks + 1).expect_err("a missing tick is detected");
            // With fewer ticks the slots were still empty.
            if ticks >= PLACES {
                verify(&disk(ticks + 2), ticks).expect_err("two ticks more are detected");
            }
            let mut damaged = disk(ticks);
            damaged[(ticks as usize - 1) % PLACES as usize * PLACE_BYTES + 777] ^= 1;
            verify(&damaged, ticks).expect_err("a wrong tick is detected");
        }
    }

    #[test]
    fn fdinfo_shows_file_open_for_writing() {
        assert!(is_writable("pos:\t0\nflags:\t02140002\n") && is_writable("flags:\t0100001\n"));
        assert!(!is_writable("pos:\t0\nflags:\t0100000\n") && !is_writable(""));
    }
}
