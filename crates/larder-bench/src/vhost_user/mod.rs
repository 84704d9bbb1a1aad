//! `larder-bench vhost-user`: compares Larder's vhost-user-blk server with QEMU's storage daemon, in one run.
//!
//! Each round measures every server in turn on the same image with the same client; the table shows medians over the
//! rounds. CPU is the server's own, all threads, per request.

pub(crate) mod client;
pub(crate) mod server;

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, bail};
use clap::Args;

use crate::figures::median;
use client::{Client, Outcome, Workload};
use server::Server;

/// Compare vhost-user-blk servers on one image
#[derive(Args)]
pub(crate) struct Arguments {
    /// Raw image, whose content is overwritten; by default 1 GiB on tmpfs
    #[arg(long)]
    image: Option<PathBuf>,
    /// Server as NAME=COMMAND, where {image} and {socket} stand for the paths; repeat for each. By default Larder and
    /// QEMU 10's storage daemon
    #[arg(long = "server", value_name = "NAME=COMMAND")]
    servers: Vec<String>,
    /// Bytes of a request
    #[arg(long, value_delimiter = ',', default_value = "4096")]
    blocks: Vec<usize>,
    /// Requests in flight
    #[arg(long, value_delimiter = ',', default_value = "1,8,64")]
    depths: Vec<usize>,
    /// Number of rounds, whose median is shown
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// Let the client wait for completions on an event instead of spinning
    #[arg(long)]
    event_client: bool,
    /// Measure only reads
    #[arg(long)]
    reads_only: bool,
}

/// Measurements of one server with one workload, a value for each round.
#[derive(Default, Clone)]
pub(crate) struct Series {
    pub(crate) iops: Vec<f64>,
    pub(crate) cpu_us: Vec<f64>,
}

impl Series {
    pub(crate) fn push(&mut self, outcome: Outcome, cpu_time: Duration) {
        self.iops.push(outcome.iops());
        self.cpu_us.push(cpu_time.as_secs_f64() * 1e6 / outcome.requests as f64);
    }
}

/// Size in bytes of the image that is made by default.
const IMAGE_BYTES: u64 = 1 << 30;

/// Returns the path of the larder that was built together with this program.
pub(crate) fn larder() -> anyhow::Result<PathBuf> {
    let larder = std::env::current_exe()?.with_file_name("larder");
    if !larder.exists() {
        bail!("{} is missing: cargo build --release --workspace", larder.display());
    }
    Ok(larder)
}

/// Returns the script that runs a command in the chroot with QEMU 10.
pub(crate) fn debian13() -> anyhow::Result<&'static Path> {
    let script = Path::new("testbed/debian13.sh");
    if !script.exists() {
        bail!("{} is missing: run this in the project's directory", script.display());
    }
    Ok(script)
}

/// Returns Larder, and QEMU's storage daemon with its I/O thread and adaptive polling.
fn default_servers() -> anyhow::Result<Vec<String>> {
    let (larder, enter) = (larder()?, debian13()?);
    Ok(vec![
        format!("larder={} disk serve {{image}} --socket {{socket}}", larder.display()),
        format!(
            "qemu-storage-daemon={} qemu-storage-daemon --object iothread,id=io,poll-max-ns=32768 \
             --blockdev driver=file,filename={{image}},node-name=disk,aio=threads \
             --export vhost-user-blk,id=export,node-name=disk,addr.type=unix,addr.path={{socket}},iothread=io,writable=on",
            enter.display()
        ),
    ])
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let commands = if arguments.servers.is_empty() { default_servers()? } else { arguments.servers.clone() };
    let temporary_image = match &arguments.image {
        Some(_) => None,
        None => {
            let file = tempfile::Builder::new().prefix("larder-bench-").tempfile_in("/dev/shm")?;
            file.as_file().set_len(IMAGE_BYTES)?;
            Some(file)
        }
    };
    let image = match (&arguments.image, &temporary_image) {
        (Some(path), _) => path.as_path(),
        (None, Some(file)) => file.path(),
        (None, None) => bail!("no image"),
    };
    let servers: Vec<(&str, &str)> = commands
        .iter()
        .map(|text| text.split_once('=').with_context(|| format!("'{text}' is not NAME=COMMAND")))
        .collect::<anyhow::Result<_>>()?;
    let directory = tempfile::tempdir()?;
    let socket = directory.path().join("bench.sock");
    let workloads = workloads(arguments);
    let mut series = vec![vec![Series::default(); workloads.len()]; servers.len()];
    for _ in 0..arguments.rounds {
        for ((_, command), series) in servers.iter().zip(&mut series) {
            let server = Server::start(command, image, &socket)?;
            let mut client = Client::connect(&socket, !arguments.event_client)?;
            // Loads every page of the image into the page cache, so that no hole is measured.
            client.fill()?;
            for (workload, series) in workloads.iter().zip(series) {
                let before = server.cpu_time()?;
                let outcome = client.run(workload)?;
                series.push(outcome, server.cpu_time()?.0 - before.0);
            }
        }
    }
    print(&servers, &workloads, &series);
    Ok(())
}

fn workloads(arguments: &Arguments) -> Vec<Workload> {
    let mut workloads = Vec::new();
    for block in &arguments.blocks {
        for write in [false, true] {
            for depth in &arguments.depths {
                if write && arguments.reads_only {
                    continue;
                }
                workloads.push(Workload {
                    write,
                    block: *block,
                    depth: *depth,
                    duration: Duration::from_secs_f64(arguments.seconds),
                });
            }
        }
    }
    workloads
}

fn print(servers: &[(&str, &str)], workloads: &[Workload], series: &[Vec<Series>]) {
    print!("{:<22}", "");
    for (name, _) in servers {
        print!(" {name:>12} {:>9}", "CPU us");
    }
    println!(" {:>8} {:>8}", "IOPS x", "CPU x");
    for (index, workload) in workloads.iter().enumerate() {
        let verb = if workload.write { "write" } else { "read" };
        print!("{:<22}", format!("{verb} {} depth {}", size(workload.block), workload.depth));
        let mut results = Vec::new();
        for server in series {
            let (iops, cpu) = (median(&server[index].iops), median(&server[index].cpu_us));
            print!(" {iops:>12.0} {cpu:>9.2}");
            results.push((iops, cpu));
        }
        if let [(first, first_cpu), .., (last, last_cpu)] = results[..] {
            print!(" {:>8.2} {:>8.2}", first / last, first_cpu / last_cpu);
        }
        println!();
    }
}

fn size(bytes: usize) -> String {
    larder_block::ByteLen::of_buffer(bytes).to_string()
}
