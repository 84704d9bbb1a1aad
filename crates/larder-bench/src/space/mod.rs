//! `larder-bench space`: qcow2 images that fill a device to the last cluster, through the front door: a loop device of the
//! size that `qemu-img measure` gives, over a sparse file; the program; an NBD client.
//!
//! For each size of disk and cluster the disk is written in random order, cluster by cluster, while clusters that were
//! written are discarded and written again without a flush between. No write may find the device full. A disk whose
//! clusters are too many to be written is made with all of them mapped (`preallocation=metadata`), and random ones are
//! discarded and written again. Then the image is in a file, and its server is started again and again: the file may not
//! grow while clusters are free.
//!
//! Most clusters are written with zeros, which are dug out of the sparse file again, so that a large disk takes little
//! space; some clusters hold their number, and are read again at the end.

mod device;
mod served;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;
use larder_block::ByteLen;
use larder_block::backend::simulated::Random;

use crate::campaign::larder_beside;
use device::LoopDevice;
use served::{Outcome, Served, Step};

/// Fill qcow2 images on loop devices of a fixed size to the last cluster, with discards between, and watch whether image
/// files grow over starts
#[derive(Args, Debug)]
pub struct Arguments {
    /// The programs, each measured in turn; by default the one beside this program
    #[arg(long = "larder", value_name = "PROGRAM")]
    programs: Vec<PathBuf>,
    /// Sizes of disks
    #[arg(long, value_name = "SIZES", value_delimiter = ',', default_value = "8G,64G,1T")]
    sizes: Vec<ByteLen>,
    /// Sizes of clusters
    #[arg(
        long,
        value_name = "SIZES",
        value_delimiter = ',',
        default_value = "512,1K,2K,4K,8K,16K,32K,64K,128K,256K,512K,1M,2M"
    )]
    cluster_sizes: Vec<ByteLen>,
    /// Clusters of a disk that is filled from empty, at most; one with more begins with all clusters mapped
    #[arg(long, value_name = "COUNT", default_value_t = 140_000)]
    clusters_max: u64,
    /// Bytes that are written to each disk, at most (a cluster that is smaller than 4 KiB counts as that)
    #[arg(long, value_name = "SIZE", default_value = "9G")]
    bytes_max: ByteLen,
    /// Starts of the server of an image in a file
    #[arg(long, value_name = "COUNT", default_value_t = 50)]
    starts: u32,
    /// The directory for images; by default /var/tmp
    #[arg(long, value_name = "DIRECTORY")]
    folder: Option<PathBuf>,
    /// The seed of the random choices
    #[arg(long, default_value_t = 1)]
    seed: u64,
}

/// One disk.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// Bytes of the disk.
    pub size: u64,
    /// Bytes of a cluster.
    pub cluster_len: u64,
    /// Clusters of a disk that is filled from empty, at most.
    pub clusters_max: u64,
    /// Bytes that are written, at most.
    pub bytes_max: u64,
    /// The seed of the random choices.
    pub seed: u64,
}

/// The result of filling a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Filled {
    /// The disk began empty; otherwise with all clusters mapped.
    pub from_empty: bool,
    /// Clusters that were allocated.
    pub allocated: u64,
    /// Writes that found no room.
    pub refused: u64,
    /// CPU time of the server while it allocated, all threads.
    pub cpu: Duration,
    /// The longest write.
    pub longest: Duration,
    /// The first write of a server that knows nothing of the image yet.
    pub first: Duration,
}

impl Filled {
    fn count(&mut self, outcome: Outcome) {
        self.allocated += outcome.done;
        self.refused += outcome.refused;
        self.longest = self.longest.max(outcome.longest);
    }
}

/// Writes in flight.
const DEPTH: usize = 16;

/// Clusters between two discards.
const DISCARD_INTERVAL: usize = 256;

/// Clusters of one round of discards.
const DISCARDED: usize = 64;

/// The server is stopped, and zeros are dug out, when so much was written.
const BETWEEN_DIGGING: u64 = 512 << 20;

/// One cluster in so many holds its number.
const STAMPED: u64 = 64;

/// `qemu-img check` of more clusters takes too long.
const CHECKED_CLUSTERS_MAX: u64 = 1 << 24;

/// Runs the experiment, and prints a table; whether no write was refused and no file grew.
///
/// # Errors
/// A program is missing or fails.
pub fn run(arguments: &Arguments) -> anyhow::Result<bool> {
    let programs = match &arguments.programs[..] {
        [] => vec![larder_beside(None)?],
        programs => programs.to_vec(),
    };
    let folder = arguments.folder.clone().unwrap_or_else(|| PathBuf::from("/var/tmp"));
    println!(
        "{:>8} {:>8}  {:7} {:>10} {:>8} {:>9} {:>10} {:>10}  program",
        "disk", "cluster", "begins", "allocated", "refused", "CPU us", "first ms", "longest ms"
    );
    let mut passed = true;
    for size in &arguments.sizes {
        for cluster_len in &arguments.cluster_sizes {
            if size.get() > size_max(cluster_len.get()) {
                continue;
            }
            for program in &programs {
                let case = Case {
                    size: size.get(),
                    cluster_len: cluster_len.get(),
                    clusters_max: arguments.clusters_max,
                    bytes_max: arguments.bytes_max.get(),
                    seed: arguments.seed,
                };
                let label = format!("{:>8} {:>8}", text_of(size.get()), text_of(cluster_len.get()));
                match fill(program, &folder, case) {
                    Ok(filled) => {
                        println!(
                            "{label}  {:7} {:>10} {:>8} {:>9.2} {:>10.1} {:>10.1}  {}",
                            if filled.from_empty { "empty" } else { "mapped" },
                            filled.allocated,
                            filled.refused,
                            filled.cpu.as_secs_f64() * 1e6 / filled.allocated.max(1) as f64,
                            filled.first.as_secs_f64() * 1e3,
                            filled.longest.as_secs_f64() * 1e3,
                            program.display()
                        );
                        passed &= filled.refused == 0;
                    }
                    Err(why) => {
                        println!("{label}  {why:#}  {}", program.display());
                        passed = false;
                    }
                }
            }
        }
    }
    for program in &programs {
        let grown = growth(program, &folder, 8 << 30, 65536, arguments.starts)?;
        let starts = arguments.starts;
        println!(
            "growth of a file over {starts} starts: {grown} bytes  {}",
            program.display()
        );
        passed &= grown == 0;
    }
    Ok(passed)
}

/// Bytes of the largest disk that QEMU makes with clusters of so many bytes and refcounts of 16 bits: the L1 table and the
/// refcount table have limits. Half of it, so that there is room for the metadata.
fn size_max(cluster_len: u64) -> u64 {
    const L1_BYTES_MAX: u64 = 32 << 20;
    const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;
    let by_l1 = L1_BYTES_MAX / 8 * (cluster_len / 8) * cluster_len;
    let by_refcounts = REFCOUNT_TABLE_BYTES_MAX / 8 * (cluster_len / 2) * cluster_len;
    by_l1.min(by_refcounts) / 2
}

fn text_of(bytes: u64) -> String {
    let mut unit = 0;
    while unit < 4 && bytes >> (10 * (unit + 1)) > 0 && bytes.trailing_zeros() >= 10 * (unit + 1) {
        unit += 1;
    }
    format!("{}{}", bytes >> (10 * unit), ["", "K", "M", "G", "T"][unit as usize])
}

pub(crate) fn qemu_img(arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new("qemu-img").args(arguments).output();
    let output = output.context("qemu-img; testbed/setup.sh installs it")?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    ensure!(
        output.status.success(),
        "qemu-img {arguments:?}: {} {}",
        text(&output.stdout),
        text(&output.stderr)
    );
    Ok(text(&output.stdout))
}

/// Bytes of an image of which all clusters are in use, as QEMU counts.
fn measured(case: Case) -> anyhow::Result<u64> {
    let options = format!("cluster_size={}", case.cluster_len);
    let size = case.size.to_string();
    let output = qemu_img(&[
        "measure", "--output", "json", "-O", "qcow2", "-o", &options, "--size", &size,
    ])?;
    let measured: serde_json::Value = serde_json::from_str(&output)?;
    measured["fully-allocated"]
        .as_u64()
        .context("qemu-img measure gives no size")
}

fn make(image: &Path, case: Case, mapped: bool) -> anyhow::Result<()> {
    let preallocation = if mapped { "metadata" } else { "off" };
    let options = format!("cluster_size={},preallocation={preallocation}", case.cluster_len);
    let image = image.to_str().context("the path is no UTF-8")?;
    let size = case.size.to_string();
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", &options, image, &size]).map(drop)
}

/// Fills a device that is as large as it must be.
///
/// # Errors
/// A program is missing or fails; the image has errors afterwards, or lacks data.
pub fn fill(program: &Path, folder: &Path, case: Case) -> anyhow::Result<Filled> {
    let folder = tempfile::Builder::new().prefix("larder-space-").tempdir_in(folder)?;
    let device = LoopDevice::new(&folder.path().join("device"), measured(case)?)?;
    let clusters = case.size / case.cluster_len;
    let writable = case.bytes_max / case.cluster_len.max(4096);
    let from_empty = clusters <= case.clusters_max.min(writable);
    make(device.path(), case, !from_empty)?;
    let mut filled = Filled {
        from_empty,
        ..Filled::default()
    };
    let mut filling = Filling {
        program,
        case,
        device: &device,
        folder: folder.path(),
        random: Random::new(case.seed),
        stamped: HashSet::new(),
        filled: &mut filled,
    };
    if from_empty {
        let mut order: Vec<u64> = (0..clusters).collect();
        filling.shuffle(&mut order);
        filling.write(&order, true)?;
    }
    // All clusters of the device are in use then, except the discarded ones.
    let count = (writable / 4).min(clusters / 4).min(case.clusters_max / 4).max(1);
    let again: HashSet<u64> = (0..count).map(|_| filling.random.below(clusters)).collect();
    let mut again: Vec<u64> = again.into_iter().collect();
    again.sort_unstable();
    filling.discard(&again)?;
    filling.shuffle(&mut again);
    filling.write(&again, true)?;
    filling.verify()?;
    if clusters <= CHECKED_CLUSTERS_MAX {
        qemu_img(&["check", "-q", "-f", "qcow2", &device.path().display().to_string()])?;
    }
    Ok(filled)
}

struct Filling<'a> {
    program: &'a Path,
    case: Case,
    device: &'a LoopDevice,
    folder: &'a Path,
    random: Random,
    /// Clusters that hold their number.
    stamped: HashSet<u64>,
    filled: &'a mut Filled,
}

impl Filling<'_> {
    fn shuffle(&mut self, clusters: &mut [u64]) {
        for last in (1..clusters.len()).rev() {
            clusters.swap(last, self.random.below(last as u64 + 1) as usize);
        }
    }

    fn serve(&self) -> anyhow::Result<Served> {
        Served::start(self.program, self.device.path(), self.folder)
    }

    fn discard(&self, clusters: &[u64]) -> anyhow::Result<()> {
        let served = self.serve()?;
        let steps = clusters.iter().map(|cluster| Step::Discard {
            at: cluster * self.case.cluster_len,
            len: self.case.cluster_len,
        });
        for steps in steps.collect::<Vec<_>>().chunks(1 << 16) {
            let outcome = served.run(steps, DEPTH)?;
            ensure!(outcome.refused == 0, "{} discards found no room", outcome.refused);
        }
        served.stop()
    }

    /// Writes clusters that are free, in pieces between which zeros are dug out of the device's file. With `discards`
    /// some of those that were written are discarded at once and written again.
    fn write(&mut self, clusters: &[u64], discards: bool) -> anyhow::Result<()> {
        let piece = (BETWEEN_DIGGING / self.case.cluster_len.max(4096)).max(1) as usize;
        for clusters in clusters.chunks(piece) {
            let served = self.serve()?;
            let before = served.cpu_time()?;
            let (first, rest) = clusters.split_at(1);
            let outcome = served.run(&self.writes(first), 1)?;
            self.filled.first = self.filled.first.max(outcome.longest);
            self.filled.count(outcome);
            for some in rest.chunks(DISCARD_INTERVAL) {
                let outcome = served.run(&self.writes(some), DEPTH)?;
                self.filled.count(outcome);
                if !discards {
                    continue;
                }
                let from = self.random.below(some.len() as u64) as usize;
                let again = &some[from..some.len().min(from + DISCARDED)];
                let discard = again.iter().map(|cluster| Step::Discard {
                    at: cluster * self.case.cluster_len,
                    len: self.case.cluster_len,
                });
                served.run(&discard.collect::<Vec<_>>(), DEPTH)?;
                let outcome = served.run(&self.writes(again), DEPTH)?;
                self.filled.count(outcome);
            }
            self.filled.cpu += served.cpu_time()?.saturating_sub(before);
            served.stop()?;
            self.device.dig_holes()?;
        }
        Ok(())
    }

    /// Writes of the beginnings of clusters.
    fn writes(&mut self, clusters: &[u64]) -> Vec<Step> {
        let len = self.case.cluster_len.min(4096);
        let steps = clusters.iter().map(|cluster| {
            let is_stamped = cluster.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & (STAMPED - 1) == 0;
            if is_stamped {
                self.stamped.insert(*cluster);
            }
            Step::Write {
                at: cluster * self.case.cluster_len,
                len,
                stamp: if is_stamped { cluster + 1 } else { 0 },
            }
        });
        steps.collect()
    }

    /// Reads what holds its number.
    fn verify(&self) -> anyhow::Result<()> {
        if self.filled.refused > 0 {
            // The refused writes left no data.
            return Ok(());
        }
        let served = self.serve()?;
        for cluster in &self.stamped {
            let found = served.stamp(cluster * self.case.cluster_len)?;
            if found != cluster + 1 {
                bail!("cluster {cluster} holds {found}, not its number");
            }
        }
        served.stop()
    }
}

/// By how many bytes an image file grows while its server is started `starts` times, and some of the clusters are written
/// that are free far inside.
///
/// # Errors
/// A program is missing or fails.
pub fn growth(program: &Path, folder: &Path, size: u64, cluster_len: u64, starts: u32) -> anyhow::Result<u64> {
    let folder = tempfile::Builder::new().prefix("larder-space-").tempdir_in(folder)?;
    let image = folder.path().join("image.qcow2");
    let case = Case {
        size,
        cluster_len,
        clusters_max: 0,
        bytes_max: 0,
        seed: 0,
    };
    make(&image, case, true)?;
    let clusters = size / cluster_len;
    // The last 16th but one is free.
    let (from, count) = (clusters / 16 * 14, clusters / 16);
    let served = Served::start(program, &image, folder.path())?;
    let discard = Step::Discard {
        at: from * cluster_len,
        len: count * cluster_len,
    };
    served.run(&[discard], 1)?;
    served.stop()?;
    let before = image.metadata()?.len();
    for start in 0..u64::from(starts) {
        let served = Served::start(program, &image, folder.path())?;
        let write = Step::Write {
            at: (from + start % count) * cluster_len,
            len: cluster_len.min(4096),
            stamp: 1,
        };
        ensure!(
            served.run(&[write], 1)?.refused == 0,
            "start {start}: no room in a file"
        );
        served.stop()?;
    }
    Ok(image.metadata()?.len() - before)
}
