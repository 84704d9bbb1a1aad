//! `larder-bench vhost-user`: Larder's vhost-user-blk server beside QEMU's storage daemon, in one run.
//!
//! Each round measures every server in turn on the same image with the same client; the table shows medians over the
//! rounds. CPU is the server's own, all threads, per request.

mod client;
mod server;

use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use clap::Args;

use client::{Client, Workload};
use server::Server;

/// Compare vhost-user-blk servers on one image
#[derive(Args)]
pub(crate) struct Arguments {
    /// The raw image; its content is overwritten
    #[arg(long)]
    image: PathBuf,
    /// A server as NAME=COMMAND, where {image} and {socket} stand for the paths; repeat for each
    #[arg(long = "server", required = true, value_name = "NAME=COMMAND")]
    servers: Vec<String>,
    /// Bytes of a request
    #[arg(long, value_delimiter = ',', default_value = "4096")]
    blocks: Vec<usize>,
    /// Requests in flight
    #[arg(long, value_delimiter = ',', default_value = "1,8,64")]
    depths: Vec<usize>,
    /// Rounds; the median is shown
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Seconds of each measurement
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// The client sleeps on an event for completions instead of spinning
    #[arg(long)]
    event_client: bool,
    /// Only reads
    #[arg(long)]
    reads_only: bool,
}

/// One server at one workload: a value per round.
#[derive(Default, Clone)]
struct Series {
    iops: Vec<f64>,
    cpu_us: Vec<f64>,
}

pub(crate) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let servers: Vec<(&str, &str)> = arguments
        .servers
        .iter()
        .map(|text| text.split_once('=').with_context(|| format!("'{text}' is not NAME=COMMAND")))
        .collect::<anyhow::Result<_>>()?;
    let folder = tempfile::tempdir()?;
    let socket = folder.path().join("bench.sock");
    let workloads = workloads(arguments);
    let mut series = vec![vec![Series::default(); workloads.len()]; servers.len()];
    for _ in 0..arguments.rounds {
        for ((_, command), series) in servers.iter().zip(&mut series) {
            let server = Server::start(command, &arguments.image, &socket)?;
            let mut client = Client::connect(&socket, !arguments.event_client)?;
            // Every page of the image in the page cache, and written at least once.
            fill(&mut client)?;
            for (workload, series) in workloads.iter().zip(series) {
                let before = server.cpu_time()?;
                let outcome = client.run(workload)?;
                let used = server.cpu_time()?.0 - before.0;
                series.iops.push(outcome.iops());
                series.cpu_us.push(used.as_secs_f64() * 1e6 / outcome.requests as f64);
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
                    polling: !arguments.event_client,
                });
            }
        }
    }
    workloads
}

fn fill(client: &mut Client) -> anyhow::Result<()> {
    let workload = Workload {
        write: true,
        block: 1 << 20,
        depth: 4,
        duration: Duration::from_millis(200),
        polling: true,
    };
    debug_assert!(client.capacity() >= 1 << 20);
    client.run(&workload)?;
    Ok(())
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted.get(sorted.len() / 2).copied().unwrap_or(f64::NAN)
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
        let mut figures = Vec::new();
        for server in series {
            let (iops, cpu) = (median(&server[index].iops), median(&server[index].cpu_us));
            print!(" {iops:>12.0} {cpu:>9.2}");
            figures.push((iops, cpu));
        }
        if let [(first, first_cpu), .., (last, last_cpu)] = figures[..] {
            print!(" {:>8.2} {:>8.2}", first / last, first_cpu / last_cpu);
        }
        println!();
    }
}

fn size(bytes: usize) -> String {
    larder_block::ByteLen::of_buffer(bytes).to_string()
}
