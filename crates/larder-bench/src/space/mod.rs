//! `larder-bench space`: qcow2 images that fill a device to the last cluster, tested from outside: a loop device of
//! the size that `qemu-img measure` reports, over a sparse file; the program; an NBD client.
//!
//! For each size of disk and cluster the whole disk is written in random order, cluster by cluster. Meanwhile written
//! clusters are discarded and rewritten without a flush in between. No write may find the device full. A disk with
//! too many clusters to write is created with all of them mapped (`preallocation=metadata`), and random ones are
//! discarded and rewritten. Then the image is in a file, whose server is restarted repeatedly: the file may not grow
//! while clusters are free.
//!
//! Most clusters are written with zeros, which are punched out of the sparse file again, so that a large disk takes
//! little space. Some clusters hold their number, and are read again at the end.

mod device;
mod served;

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, bail, ensure};
use clap::Args;
use larder_block::ByteLen;
use larder_block::backend::simulated::SeededRng;

use crate::campaign::find_larder;
use device::LoopDevice;
use served::{Outcome, Served, Step};

/// Fill qcow2 images on loop devices of a fixed size to the last cluster, with discards in between, and check whether
/// image files grow over restarts
#[derive(Args, Debug)]
pub struct Arguments {
    /// Programs to measure in turn; by default larder in this program's directory
    #[arg(long = "larder", value_name = "PROGRAM")]
    programs: Vec<PathBuf>,
    /// Sizes of disks
    #[arg(long, value_name = "SIZES", value_delimiter = ',', default_value = "8G,64G,1T")]
    sizes: Vec<ByteLen>,
    /// Cluster sizes
    #[arg(
        long,
        value_name = "SIZES",
        value_delimiter = ',',
        default_value = "512,1K,2K,4K,8K,16K,32K,64K,128K,256K,512K,1M,2M"
    )]
    cluster_sizes: Vec<ByteLen>,
    /// Maximum number of clusters of a disk that is filled from empty; larger disks begin with all clusters mapped
    #[arg(long, value_name = "COUNT", default_value_t = 140_000)]
    clusters_max: u64,
    /// Maximum number of bytes written to each disk (a cluster smaller than 4 KiB counts as 4 KiB)
    #[arg(long, value_name = "SIZE", default_value = "9G")]
    bytes_max: ByteLen,
    /// Number of server starts for an image in a file
    #[arg(long, value_name = "COUNT", default_value_t = 50)]
    starts: u32,
    /// Directory for images; by default /var/tmp
    #[arg(long, value_name = "DIRECTORY")]
    folder: Option<PathBuf>,
    /// Seed of the random choices
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
    /// Maximum number of clusters of a disk that is filled from empty.
    pub clusters_max: u64,
    /// Maximum number of bytes written.
    pub bytes_max: u64,
    /// Seed of the random choices.
    pub seed: u64,
}

/// Result of filling a device.
#[derive(Clone, Copy, Debug, Default)]
pub struct Filled {
    /// True if the disk began empty, false if all its clusters were mapped.
    pub from_empty: bool,
    /// Clusters that were allocated.
    pub allocated: u64,
    /// Writes that failed for lack of space.
    pub refused: u64,
    /// CPU time of all the server's threads during the allocation.
    pub cpu: Duration,
    /// Latency of the slowest write.
    pub longest: Duration,
    /// Latency of the first write after a start, when the server has no metadata in memory.
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

/// Clusters written between two discards.
const DISCARD_INTERVAL: usize = 256;

/// Clusters in one round of discards.
const DISCARDED: usize = 64;

/// Bytes written after which the server is stopped and zeros are punched out.
const PUNCH_INTERVAL_BYTES: u64 = 512 << 20;

/// Interval, in clusters, of those that hold their number.
const NUMBERED_CLUSTER_INTERVAL: u64 = 64;

/// Limit above which `qemu-img check` takes too long.
const CHECKED_CLUSTERS_MAX: u64 = 1 << 24;

/// Runs the experiment, and prints a table. Returns whether no write was refused and no file grew.
///
/// # Errors
/// If a program is missing or fails.
pub fn run(arguments: &Arguments) -> anyhow::Result<bool> {
    let programs = match &arguments.programs[..] {
        [] => vec![find_larder(None)?],
        programs => programs.to_vec(),
    };
    let directory = arguments.folder.clone().unwrap_or_else(|| PathBuf::from("/var/tmp"));
    println!(
        "{:>8} {:>8}  {:7} {:>10} {:>8} {:>9} {:>10} {:>10}  program",
        "disk", "cluster", "start", "allocated", "refused", "CPU us", "first ms", "longest ms"
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
                match fill(program, &directory, case) {
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
                    Err(reason) => {
                        println!("{label}  {reason:#}  {}", program.display());
                        passed = false;
                    }
                }
            }
        }
    }
    for program in &programs {
        let grown = growth(program, &directory, 8 << 30, 65536, arguments.starts)?;
        let starts = arguments.starts;
        println!("growth of an image file over {starts} server starts: {grown} bytes  {}", program.display());
        passed &= grown == 0;
    }
    Ok(passed)
}

/// Returns the size of the largest disk that QEMU makes with this cluster size and 16-bit refcounts, for which the L1
/// table and the refcount table have limits. It is halved, to leave room for the metadata.
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
    ensure!(output.status.success(), "qemu-img {arguments:?}: {} {}", text(&output.stdout), text(&output.stderr));
    Ok(text(&output.stdout))
}

/// Returns the size of an image with all clusters in use, as QEMU calculates it.
fn measured(case: Case) -> anyhow::Result<u64> {
    let options = format!("cluster_size={}", case.cluster_len);
    let size = case.size.to_string();
    let output = qemu_img(&["measure", "--output", "json", "-O", "qcow2", "-o", &options, "--size", &size])?;
    let measured: serde_json::Value = serde_json::from_str(&output)?;
    measured["fully-allocated"].as_u64().context("qemu-img measure reports no size")
}

fn make(image: &Path, case: Case, mapped: bool) -> anyhow::Result<()> {
    let preallocation = if mapped { "metadata" } else { "off" };
    let options = format!("cluster_size={},preallocation={preallocation}", case.cluster_len);
    let image = image.to_str().context("the path is not UTF-8")?;
    let size = case.size.to_string();
    qemu_img(&["create", "-q", "-f", "qcow2", "-o", &options, image, &size]).map(drop)
}

/// Fills a device of exactly the required size.
///
/// # Errors
/// If a program is missing or fails, or the image then has errors or lacks data.
pub fn fill(program: &Path, directory: &Path, case: Case) -> anyhow::Result<Filled> {
    let directory = tempfile::Builder::new().prefix("larder-space-").tempdir_in(directory)?;
    let device = LoopDevice::new(&directory.path().join("device"), measured(case)?)?;
    let clusters = case.size / case.cluster_len;
    let writable = case.bytes_max / case.cluster_len.max(4096);
    let from_empty = clusters <= case.clusters_max.min(writable);
    make(device.path(), case, !from_empty)?;
    let mut filled = Filled { from_empty, ..Filled::default() };
    let mut filling = Filling {
        program,
        case,
        device: &device,
        folder: directory.path(),
        random: SeededRng::new(case.seed),
        stamped: HashSet::new(),
        filled: &mut filled,
    };
    if from_empty {
        let mut order: Vec<u64> = (0..clusters).collect();
        filling.shuffle(&mut order);
        filling.write(&order, true)?;
    }
    // Now all clusters of the device are in use, except the discarded ones.
    let count = (writable / 4).min(clusters / 4).min(case.clusters_max / 4).max(1);
    let rewritten: HashSet<u64> = (0..count).map(|_| filling.random.below(clusters)).collect();
    let mut rewritten: Vec<u64> = rewritten.into_iter().collect();
    rewritten.sort_unstable();
    filling.discard(&rewritten)?;
    filling.shuffle(&mut rewritten);
    filling.write(&rewritten, true)?;
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
    random: SeededRng,
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
        let steps = clusters
            .iter()
            .map(|cluster| Step::Discard { at: cluster * self.case.cluster_len, len: self.case.cluster_len });
        for steps in steps.collect::<Vec<_>>().chunks(1 << 16) {
            let outcome = served.run(steps, DEPTH)?;
            ensure!(outcome.refused == 0, "{} discards failed for lack of space", outcome.refused);
        }
        served.stop()
    }

    /// Writes free clusters, in batches after which zeros are punched out of the device's file. With `discards`, some
    /// of the clusters are discarded at once and rewritten.
    fn write(&mut self, clusters: &[u64], discards: bool) -> anyhow::Result<()> {
        let batch_clusters = (PUNCH_INTERVAL_BYTES / self.case.cluster_len.max(4096)).max(1) as usize;
        for clusters in clusters.chunks(batch_clusters) {
            let served = self.serve()?;
            let before = served.cpu_time()?;
            let (first, rest) = clusters.split_at(1);
            let outcome = served.run(&self.writes(first), 1)?;
            self.filled.first = self.filled.first.max(outcome.longest);
            self.filled.count(outcome);
            for batch in rest.chunks(DISCARD_INTERVAL) {
                let outcome = served.run(&self.writes(batch), DEPTH)?;
                self.filled.count(outcome);
                if !discards {
                    continue;
                }
                let from = self.random.below(batch.len() as u64) as usize;
                let again = &batch[from..batch.len().min(from + DISCARDED)];
                let discard = again
                    .iter()
                    .map(|cluster| Step::Discard { at: cluster * self.case.cluster_len, len: self.case.cluster_len });
                served.run(&discard.collect::<Vec<_>>(), DEPTH)?;
                let outcome = served.run(&self.writes(again), DEPTH)?;
                self.filled.count(outcome);
            }
            self.filled.cpu += served.cpu_time()?.saturating_sub(before);
            served.stop()?;
            self.device.punch_zeros()?;
        }
        Ok(())
    }

    /// Returns writes of the beginnings of clusters.
    fn writes(&mut self, clusters: &[u64]) -> Vec<Step> {
        let len = self.case.cluster_len.min(4096);
        let steps = clusters.iter().map(|cluster| {
            let is_numbered = cluster.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32 & (NUMBERED_CLUSTER_INTERVAL - 1) == 0;
            if is_numbered {
                self.stamped.insert(*cluster);
            }
            Step::Write { at: cluster * self.case.cluster_len, len, stamp: if is_numbered { cluster + 1 } else { 0 } }
        });
        steps.collect()
    }

    /// Reads the clusters that hold their number.
    fn verify(&self) -> anyhow::Result<()> {
        if self.filled.refused > 0 {
            // Refused writes have left no data.
            return Ok(());
        }
        let served = self.serve()?;
        for cluster in &self.stamped {
            let found = served.stamp(cluster * self.case.cluster_len)?;
            if found != cluster + 1 {
                bail!("cluster {cluster} holds {found}, not its number plus 1");
            }
        }
        served.stop()
    }
}

/// Returns the bytes by which an image file grows while its server is started `starts` times and some of the free
/// clusters in its middle are written.
///
/// # Errors
/// If a program is missing or fails.
pub fn growth(program: &Path, directory: &Path, size: u64, cluster_len: u64, starts: u32) -> anyhow::Result<u64> {
    let directory = tempfile::Builder::new().prefix("larder-space-").tempdir_in(directory)?;
    let image = directory.path().join("image.qcow2");
    let case = Case { size, cluster_len, clusters_max: 0, bytes_max: 0, seed: 0 };
    make(&image, case, true)?;
    let clusters = size / cluster_len;
    // The last 16th but one is free.
    let (from, count) = (clusters / 16 * 14, clusters / 16);
    let served = Served::start(program, &image, directory.path())?;
    let discard = Step::Discard { at: from * cluster_len, len: count * cluster_len };
    served.run(&[discard], 1)?;
    served.stop()?;
    let before = image.metadata()?.len();
    for start in 0..u64::from(starts) {
        let served = Served::start(program, &image, directory.path())?;
        let write = Step::Write { at: (from + start % count) * cluster_len, len: cluster_len.min(4096), stamp: 1 };
        ensure!(served.run(&[write], 1)?.refused == 0, "server start {start}: no space in the image file");
        served.stop()?;
    }
    Ok(image.metadata()?.len() - before)
}
