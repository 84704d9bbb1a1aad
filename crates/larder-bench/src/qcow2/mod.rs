//! `larder-bench qcow2`: the cost of the qcow2 format, compared with raw and with QEMU's storage daemon, through
//! vhost-user-blk.
//!
//! Each round measures every server in turn with the same client at the same offsets. The tables show medians over
//! the rounds, and the ratios of each round with their spread. CPU is the server's own, all threads, per request.

pub(crate) mod image;
mod report;
mod servers;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::{Args, ValueEnum};
use tempfile::TempDir;

use crate::figures::{median, spread};
use crate::vhost_user::client::{Client, Random, Workload};
use crate::vhost_user::{Series, debian13};
use image::{Layout, Order};
use servers::{Access, Contender, L2Cache};

/// Compare qcow2 with raw and with QEMU's storage daemon
#[derive(Args)]
pub(crate) struct Arguments {
    /// Parts to measure; all by default
    #[arg(long = "part", value_name = "PART", value_delimiter = ',', value_enum, default_values_t = Part::value_variants().to_vec())]
    parts: Vec<Part>,
    /// Directory for images, inside this project, /tmp or /dev/shm; by default tmpfs for parts that measure the
    /// software, and target for parts that measure reads of metadata
    #[arg(long)]
    folder: Option<PathBuf>,
    /// Requests in flight
    #[arg(long, value_delimiter = ',', default_value = "1,8,64")]
    depths: Vec<usize>,
    /// Requests in flight, for random reads of large disks
    #[arg(long, value_delimiter = ',', default_value = "8")]
    cliff_depths: Vec<usize>,
    /// Number of rounds, whose median is shown
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Seconds of each measurement without a set number of requests
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
enum Part {
    /// Measure 4 KiB reads and writes of allocated clusters
    #[value(alias = "a")]
    Allocated,
    /// Measure writes that allocate clusters, with a flush at the end
    #[value(alias = "b")]
    Allocating,
    /// Measure random reads of a whole disk of 1 TiB
    #[value(alias = "c")]
    Cliff,
    /// Measure cluster sizes around the limit of QEMU's cache before 3.1
    Clusters,
    /// Measure random reads of a whole disk of 16 TiB
    Huge,
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// log2 of the default cluster size.
const CLUSTER_BITS: u32 = 16;

/// Size of a disk whose data is in the page cache.
const SMALL_DISK_BYTES: u64 = GIB;
/// Size of an initially empty disk, and numbers of writes to it.
const EMPTY_DISK_BYTES: u64 = 16 * GIB;
const RANDOM_WRITES: u64 = 65_536;
const SEQUENTIAL_WRITES: u64 = 16_384;
/// Number of writes that each copy 64 KiB from the backing file.
const OVERLAY_WRITES: u64 = 8_192;
/// Below 16 TiB: with its metadata the file must not exceed ext4's maximum file size.
const HUGE_DISK_BYTES: u64 = 16 * TIB - 16 * GIB;

const BLOCK: usize = 4096;
/// Requests in flight while caches are warmed.
const WARM_DEPTH: usize = 8;

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    for part in &arguments.parts {
        match part {
            Part::Allocated => allocated(arguments)?,
            Part::Allocating => measure_allocating(arguments)?,
            Part::Cliff => measure_large_disk(arguments)?,
            Part::Clusters => clusters(arguments)?,
            Part::Huge => huge(arguments)?,
        }
    }
    Ok(())
}

/// Creates an empty directory for images, removed when the result is dropped.
fn folder(arguments: &Arguments, default: &str) -> anyhow::Result<TempDir> {
    let within = match &arguments.folder {
        Some(folder) => folder.clone(),
        None => std::path::absolute(default)?,
    };
    fs::create_dir_all(&within)?;
    let folder = tempfile::Builder::new().prefix("larder-bench-").tempdir_in(within)?;
    Ok(folder)
}

fn socket(folder: &TempDir) -> PathBuf {
    folder.path().join("socket")
}

fn names(contenders: &[Contender]) -> Vec<String> {
    contenders.iter().map(|contender| contender.name.clone()).collect()
}

fn allocated(arguments: &Arguments) -> anyhow::Result<()> {
    let workload = |write: bool, depth: usize| Workload {
        write,
        block: BLOCK,
        depth,
        duration: Duration::from_secs_f64(arguments.seconds),
    };
    let of_depths = |write: bool| arguments.depths.iter().map(move |depth| workload(write, *depth));
    let workloads: Vec<Workload> = of_depths(false).chain(of_depths(true)).collect();
    for order in [Order::Contiguous, Order::Shuffled] {
        println!("4 KiB, random, {SMALL_GIB} GiB of allocated clusters of 64 KiB, {order:?}, page cache\n");
        let folder = folder(arguments, "/dev/shm")?;
        let (raw, qcow2) = (folder.path().join("raw"), folder.path().join("qcow2"));
        fs::File::create(&raw)?.set_len(SMALL_DISK_BYTES)?;
        let layout = Layout { size: SMALL_DISK_BYTES, cluster_bits: CLUSTER_BITS, order };
        layout.write(&qcow2)?;
        let contenders = [
            servers::larder_raw(&raw, Access::Buffered)?,
            servers::larder_qcow2(&qcow2, Access::Buffered, None)?,
            servers::qemu(&qcow2, Access::Buffered, L2Cache::Default)?,
        ];
        let mut grid = vec![vec![Series::default(); workloads.len()]; contenders.len()];
        for _ in 0..arguments.rounds {
            for (contender, row) in contenders.iter().zip(&mut grid) {
                let server = contender.start(&socket(&folder))?;
                let mut client = Client::connect(&socket(&folder), true)?;
                // Loads every page of the image into the page cache, so that no hole is measured.
                client.fill()?;
                for (workload, series) in workloads.iter().zip(row) {
                    let before = server.cpu_time()?;
                    let outcome = client.run(workload)?;
                    series.push(outcome, server.cpu_time()?.0 - before.0);
                }
            }
        }
        let verb = |write| if write { "write" } else { "read" };
        let names_of_workloads: Vec<String> =
            workloads.iter().map(|workload| format!("{}, depth {}", verb(workload.write), workload.depth)).collect();
        report::print(&names(&contenders), &names_of_workloads, &grid, &[0, 2]);
    }
    Ok(())
}

const SMALL_GIB: u64 = SMALL_DISK_BYTES / GIB;

/// A pattern of writes to unallocated clusters.
struct Allocation {
    what: &'static str,
    disk: u64,
    has_backing: bool,
    block: usize,
    offsets: Vec<u64>,
}

fn allocations() -> Vec<Allocation> {
    let cluster_len = 1u64 << CLUSTER_BITS;
    // One write in each of the chosen clusters, at a random block.
    let scattered = |disk: u64, count: u64| {
        let mut random = Random::default();
        let mut clusters: Vec<u64> = (0..disk / cluster_len).collect();
        random.shuffle(&mut clusters);
        clusters.truncate(count as usize);
        let blocks = cluster_len / BLOCK as u64;
        let write_offset = |cluster: u64| cluster * cluster_len + random.below(blocks) * BLOCK as u64;
        clusters.into_iter().map(write_offset).collect()
    };
    vec![
        Allocation {
            what: "4 KiB, random, empty image",
            disk: EMPTY_DISK_BYTES,
            has_backing: false,
            block: BLOCK,
            offsets: scattered(EMPTY_DISK_BYTES, RANDOM_WRITES),
        },
        Allocation {
            what: "64 KiB, sequential, empty image",
            disk: EMPTY_DISK_BYTES,
            has_backing: false,
            block: cluster_len as usize,
            offsets: (0..SEQUENTIAL_WRITES).map(|index| index * cluster_len).collect(),
        },
        Allocation {
            what: "4 KiB, random, overlay",
            disk: SMALL_DISK_BYTES,
            has_backing: true,
            block: BLOCK,
            offsets: scattered(SMALL_DISK_BYTES, OVERLAY_WRITES),
        },
    ]
}

fn measure_allocating(arguments: &Arguments) -> anyhow::Result<()> {
    println!(
        "Writes that allocate clusters of 64 KiB, each write another cluster, including the final flush, page cache\n"
    );
    let folder = folder(arguments, "/dev/shm")?;
    let (backing, image) = (folder.path().join("backing"), folder.path().join("image"));
    fill_backing(&backing)?;
    let contenders = [
        servers::larder_qcow2(&image, Access::Buffered, None)?,
        servers::qemu(&image, Access::Buffered, L2Cache::Default)?,
    ];
    let allocations = allocations();
    let cases: Vec<(&Allocation, usize)> = allocations
        .iter()
        .flat_map(|allocation| arguments.depths.iter().map(move |depth| (allocation, *depth)))
        .collect();
    let mut grid = vec![vec![Series::default(); cases.len()]; contenders.len()];
    for _ in 0..arguments.rounds {
        for (column, (allocation, depth)) in cases.iter().enumerate() {
            for (contender, row) in contenders.iter().zip(&mut grid) {
                create(&image, allocation.disk, allocation.has_backing.then_some(&backing))?;
                let server = contender.start(&socket(&folder))?;
                let mut client = Client::connect(&socket(&folder), true)?;
                let workload =
                    Workload { write: true, block: allocation.block, depth: *depth, duration: Duration::ZERO };
                let before = server.cpu_time()?;
                let outcome = client.run_at(&workload, &allocation.offsets)?;
                row[column].push(outcome, server.cpu_time()?.0 - before.0);
            }
        }
    }
    let workloads: Vec<String> =
        cases.iter().map(|(allocation, depth)| format!("{}, depth {depth}", allocation.what)).collect();
    report::print(&names(&contenders), &workloads, &grid, &[1]);
    Ok(())
}

/// Writes a raw image without holes.
fn fill_backing(path: &Path) -> anyhow::Result<()> {
    use std::io::Write;
    let mut file = fs::File::create(path)?;
    let bytes = vec![0xa5; MIB as usize];
    for _ in 0..SMALL_DISK_BYTES / MIB {
        file.write_all(&bytes)?;
    }
    Ok(())
}

/// Creates a qcow2 image with QEMU's defaults.
fn create(path: &Path, size: u64, backing: Option<&PathBuf>) -> anyhow::Result<()> {
    let mut command = Command::new("qemu-img");
    command.args(["create", "-q", "-f", "qcow2"]);
    if let Some(backing) = backing {
        command.arg("-F").arg("raw").arg("-b").arg(backing);
    }
    let status = command.arg(path).arg(size.to_string()).status();
    let status = status.context("qemu-img is missing: testbed/setup.sh installs it")?;
    if !status.success() {
        bail!("qemu-img create: {status}");
    }
    Ok(())
}

/// Startup times of a server in ms: from its start, except `first`, which is from when its socket exists.
#[derive(Default, Clone)]
struct StartupTimes {
    socket: Vec<f64>,
    first: Vec<f64>,
    idle: Vec<f64>,
    memory_mib: Vec<f64>,
}

/// Measures random reads over the whole disk. The servers may have images of their own, all of the same size.
fn measure_random_reads(
    arguments: &Arguments,
    folder: &TempDir,
    contenders: &[Contender],
    layout: Layout,
    references: &[usize],
) -> anyhow::Result<()> {
    let depths = &arguments.cliff_depths;
    let mut grid = vec![vec![Series::default(); depths.len()]; contenders.len()];
    let mut starts = vec![StartupTimes::default(); contenders.len()];
    for _ in 0..arguments.rounds {
        for ((contender, row), starts) in contenders.iter().zip(&mut grid).zip(&mut starts) {
            let begin = Instant::now();
            let server = contender.start(&socket(folder))?;
            let socket_time = begin.elapsed();
            let mut client = Client::connect_with(&socket(folder), true, BLOCK)?;
            let read = |depth: usize| Workload {
                write: false,
                block: BLOCK,
                depth,
                duration: Duration::from_secs_f64(arguments.seconds),
            };
            client.run_at(&read(1), &[layout.size / 2])?;
            let first_read = begin.elapsed() - socket_time;
            let idle_time = servers::wait_until_idle(&server)?;
            let idle = begin.elapsed() - idle_time;
            drop(client);
            let mut client = Client::connect(&socket(folder), true)?;
            // One read of each L2 table fills a cache that covers the disk.
            let tables: Vec<u64> = (0..layout.size).step_by(layout.table_span() as usize).collect();
            client.run_at(&read(WARM_DEPTH), &tables)?;
            for (depth, series) in depths.iter().zip(row) {
                let before = server.cpu_time()?;
                let outcome = client.run(&read(*depth))?;
                series.push(outcome, server.cpu_time()?.0 - before.0);
            }
            starts.socket.push(socket_time.as_secs_f64() * 1e3);
            starts.first.push(first_read.as_secs_f64() * 1e3);
            starts.idle.push(idle.as_secs_f64() * 1e3);
            starts.memory_mib.push(server.memory_bytes()? as f64 / MIB as f64);
        }
    }
    let workloads: Vec<String> = depths.iter().map(|depth| format!("read, depth {depth}")).collect();
    report::print(&names(contenders), &workloads, &grid, references);
    println!("| server | memory MiB | socket after, ms | first read, ms later | idle after, ms |");
    println!("| --- | --- | --- | --- | --- |");
    for (contender, starts) in contenders.iter().zip(&starts) {
        println!(
            "| {} | {:.1} | {:.1} | {:.1} ({}) | {:.0} |",
            contender.name,
            median(&starts.memory_mib),
            median(&starts.socket),
            median(&starts.first),
            spread(&starts.first, 1),
            median(&starts.idle)
        );
    }
    println!();
    Ok(())
}

/// Returns the time in ms that `debian13.sh` takes before QEMU starts, which is included in the startup time of
/// QEMU's socket.
fn chroot_ms() -> anyhow::Result<f64> {
    let begin = Instant::now();
    let status = Command::new(debian13()?).arg("true").status()?;
    if !status.success() {
        bail!("entering the chroot failed: {status}");
    }
    Ok(begin.elapsed().as_secs_f64() * 1e3)
}

fn measure_large_disk(arguments: &Arguments) -> anyhow::Result<()> {
    println!(
        "Entering the chroot takes {:.0} ms, which is part of the time until QEMU's socket exists\n",
        chroot_ms()?
    );
    for order in [Order::Contiguous, Order::Shuffled] {
        let folder = folder(arguments, "target")?;
        let access = Access::best_of(folder.path())?;
        println!("4 KiB, random, all of 1 TiB, allocated clusters of 64 KiB without data, {order:?}, {access:?}\n");
        let (raw, qcow2) = (folder.path().join("raw"), folder.path().join("qcow2"));
        fs::File::create(&raw)?.set_len(TIB)?;
        let layout = Layout { size: TIB, cluster_bits: CLUSTER_BITS, order };
        layout.write(&qcow2)?;
        let larder = |memory| servers::larder_qcow2(&qcow2, access, memory);
        let qemu = |bytes| servers::qemu(&qcow2, access, L2Cache::Of(bytes));
        let contenders = [
            servers::larder_raw(&raw, access)?,
            larder(None)?,
            larder(Some(32 * MIB))?,
            larder(Some(8 * MIB))?,
            larder(Some(MIB))?,
            qemu(128 * MIB)?,
            qemu(32 * MIB)?,
            qemu(MIB)?,
        ];
        measure_random_reads(arguments, &folder, &contenders, layout, &[0, 6])?;
    }
    Ok(())
}

/// Measures IBM's five cases: a cache of whole tables, too small in the first and the third.
fn clusters(arguments: &Arguments) -> anyhow::Result<()> {
    let cases = [(100 * GIB, 256 * KIB), (100 * GIB, 512 * KIB), (TIB, 512 * KIB), (TIB, MIB), (TIB, 2 * MIB)];
    for (size, cluster_len) in cases {
        let folder = folder(arguments, "target")?;
        let access = Access::best_of(folder.path())?;
        println!(
            "4 KiB, random, all of {} GiB, allocated clusters of {} KiB without data, {access:?}\n",
            size / GIB,
            cluster_len / KIB
        );
        let image = folder.path().join("qcow2");
        let layout = Layout { size, cluster_bits: cluster_len.trailing_zeros(), order: Order::Contiguous };
        layout.write(&image)?;
        let contenders = [
            servers::larder_qcow2(&image, access, None)?,
            servers::qemu(&image, access, L2Cache::Old { cluster_len })?,
            servers::qemu(&image, access, L2Cache::recommended(&image)?)?,
        ];
        measure_random_reads(arguments, &folder, &contenders, layout, &[1])?;
    }
    Ok(())
}

fn huge(arguments: &Arguments) -> anyhow::Result<()> {
    let folder = folder(arguments, "target")?;
    let access = Access::best_of(folder.path())?;
    println!("4 KiB, random, all of 16 TiB less 16 GiB, allocated clusters of 64 KiB without data, {access:?}\n");
    let image = folder.path().join("qcow2");
    let layout = Layout { size: HUGE_DISK_BYTES, cluster_bits: CLUSTER_BITS, order: Order::Contiguous };
    layout.write(&image)?;
    let contenders = [
        servers::larder_qcow2(&image, access, None)?,
        servers::qemu(&image, access, L2Cache::Default)?,
        servers::qemu(&image, access, L2Cache::Of(2 * GIB))?,
    ];
    measure_random_reads(arguments, &folder, &contenders, layout, &[1])
}
