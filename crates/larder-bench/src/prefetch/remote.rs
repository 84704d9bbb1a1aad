//! The part `remote`: the published table over a remote disk, an NBD server with a latency of 2 ms.

use std::fs::File;
use std::io;
use std::path::Path;
use std::time::Duration;

use super::fio::Job;
use super::rows::{self, BLOCK, RowServers};
use super::servers::text;
use super::{Arguments, DISK_BYTES, GIB};
use crate::figures::median;
use crate::vhost_user::server::Server;

/// Additional latency of a request.
const LATENCY: Duration = Duration::from_millis(2);

/// Number of requests that the server delays concurrently: more than the rows have in flight.
const NBDKIT_THREADS: u32 = 1024;

/// Target gain of sequential reads, one at a time.
const SYNC_GAIN_TARGET: f64 = 15.0;

/// Larder's maximum distance ahead of a reader, and its memory for read-ahead, by default.
const AHEAD_MAX: u64 = 1 << 20;
const MEMORY: u64 = 4 << 20;

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let seconds = arguments.seconds(1.0);
    let place = arguments.place()?;
    // The image is in the page cache, not on tmpfs, where a search for the next hole takes longer than the read.
    let image = place.raw_image(DISK_BYTES)?;
    io::copy(&mut File::open(&image)?, &mut io::sink())?;
    let socket = place.unused("socket");
    let command = format!(
        "nbdkit --foreground --unix {{socket}} --threads {NBDKIT_THREADS} --log=null --filter=delay file {{image}} \
         rdelay={}ms",
        LATENCY.as_millis()
    );
    let _nbdkit = Server::start(&command, &image, &socket)?;
    let uri = format!("nbd+unix:///?socket={}", text(&socket)?);
    let servers = RowServers::of(&uri, text(&image)?, "--read-only --buffered");
    let mut long_read_bandwidths = Vec::new();
    let mut rows = rows::all(Some(SYNC_GAIN_TARGET));
    for _ in 0..arguments.rounds(3) {
        long_read_bandwidths.push(long_reads(&socket, seconds)?);
        for row in &mut rows {
            let job = row.job(DISK_BYTES, seconds);
            row.measure(&place, &job, &servers)?;
        }
    }
    let ceiling = median(&long_read_bandwidths);
    let sync_iops = rows.first().map_or(f64::NAN, |row| median(&row.off));
    println!(
        "fio over NBD, a raw disk of {} GiB behind an NBD server with {LATENCY:?} of additional latency, {:.2} ms \
         per request one at a time. Long reads reach {:.0} MB/s. *Bound*: as above, limited by that bandwidth, and by \
         {} MiB per reader and {} MiB in total in flight\n",
        DISK_BYTES / GIB,
        1e3 / sync_iops,
        ceiling / 1e6,
        AHEAD_MAX >> 20,
        MEMORY >> 20,
    );
    rows::print(&rows, |row| {
        let ahead = (u64::from(row.jobs) * AHEAD_MAX).min(MEMORY) as f64 * sync_iops;
        ceiling.min(ahead) / BLOCK as f64
    });
    Ok(())
}

/// Returns the bytes per second of long reads at a depth that hides the latency.
fn long_reads(socket: &Path, seconds: f64) -> anyhow::Result<f64> {
    let job = Job { random: false, block: 128 << 10, depth: 64, jobs: 1, seconds, size: DISK_BYTES };
    Ok(job.run_nbd(socket)?.bytes_per_second)
}
