//! The part `traces`: replays recorded disk requests of virtual machines and workstations against Larder.
//!
//! - `cloudphysics.vscsi`: one virtual disk over two hours, reads and writes with timestamps (CloudPhysics, as
//!   sampled by libCacheSim, whose README asks that a sample not be used alone to rank algorithms).
//! - `arc-P6.lis.zst`, `arc-OLTP.lis.zst`: reads of a Windows NT workstation, and of a database, without timestamps,
//!   from Nimrod Megiddo and Dharmendra S. Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003.
//!   The pages of OLTP are numbered in the order of their first read, so every first read seems to be sequential,
//!   wherever the page was on its disk: the gain there is an upper bound.

use std::path::Path;
use std::time::Duration;

use anyhow::bail;
use larder_policy::trace;

use super::Arguments;
use super::measure::{Disk, Load, ReadAheadShares, contenders, measure, median_shares};
use super::place::Place;
use super::servers::Prefetch;
use super::slow::SlowStore;
use crate::figures::{median, ratio};
use crate::vhost_user::client::Request;

/// Latencies of the simulated disks: an SSD, and a hard disk or remote disk.
const DISK_LATENCIES: [Duration; 2] = [Duration::from_micros(200), Duration::from_millis(2)];

/// Requests in flight, for traces without timestamps.
const DEPTHS: [usize; 2] = [1, 4];

/// Maximum number of requests in flight, for a trace with timestamps.
const TIMED_DEPTH: usize = 128;

/// Requests of a measurement. The count for the trace with timestamps covers about one of the two periods in which
/// its disk is read at all.
const COUNT: u64 = 3_000;
const TIMED_REQUESTS_DEFAULT: u64 = 40_000;

/// One round suffices: the trace's timestamps take the time, not the machine's work.
const ROUNDS: usize = 1;

/// Number of pieces, spread over a whole trace without timestamps, that form its excerpt.
const EXCERPT_PIECES: usize = 8;

const SECTOR: u64 = 512;

/// A trace, or an excerpt.
struct Trace {
    name: &'static str,
    requests: Vec<Request>,
    /// Maximum requests in flight, one table row for each value.
    depths: Vec<usize>,
}

/// Measurements of a trace at a depth on a disk, a value for each round.
#[derive(Default)]
struct Figures {
    /// Mean and 99th percentile of the reads' latencies, in us, off and on.
    means: [Vec<f64>; 2],
    late: [Vec<f64>; 2],
    shares: Vec<ReadAheadShares>,
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let Some(directory) = &arguments.traces else {
        println!("No traces are replayed without --traces DIRECTORY");
        return Ok(());
    };
    let scratch = arguments.place()?;
    let (count, timed_count) = match arguments.count {
        Some(count) => (count, count),
        None => (COUNT, TIMED_REQUESTS_DEFAULT),
    };
    let timed = Trace {
        name: "CloudPhysics",
        requests: busiest_window(
            &requests(&directory.join("cloudphysics.vscsi"), SECTOR, arguments.speed_up)?,
            timed_count,
        ),
        depths: vec![TIMED_DEPTH],
    };
    let untimed = |name, file: &str, unit| {
        let requests = excerpt(&requests(&directory.join(file), unit, 1.0)?, count);
        anyhow::Ok(Trace { name, requests, depths: DEPTHS.to_vec() })
    };
    let traces = [timed, untimed("P6", "arc-P6.lis.zst", SECTOR)?, untimed("OLTP", "arc-OLTP.lis.zst", 4096)?];
    println!(
        "CloudPhysics: the window of {timed_count} requests with the most reads, with their timestamps, {} times as fast. \
         P6, OLTP: {count} reads in {EXCERPT_PIECES} pieces of the whole trace, as fast as they complete. \
         A disk behind NBD. Latencies of reads in us.\n",
        arguments.speed_up
    );
    println!(
        "| trace | depth | disk | reads | hits | waits | partial hits | fetched | wasted | unread \
         | mean, off | on | off / on | P99, off | on | off / on |"
    );
    println!("|{}", " --- |".repeat(16));
    for trace in &traces {
        for delay in DISK_LATENCIES {
            for depth in &trace.depths {
                replay(arguments, &scratch, trace, *depth, delay)?;
            }
        }
    }
    Ok(())
}

/// Replays a trace at a depth, and prints the row.
fn replay(arguments: &Arguments, scratch: &Place, trace: &Trace, depth: usize, delay: Duration) -> anyhow::Result<()> {
    let end = trace.requests.iter().map(|request| request.start + request.len as u64).max();
    let largest = trace.requests.iter().map(|request| request.len).max();
    let (Some(end), Some(largest)) = (end, largest) else {
        bail!("the trace {} has no requests", trace.name);
    };
    let store = SlowStore::start(scratch, end.next_multiple_of(1 << 20), delay)?;
    let disk = Disk { image: store.uri(), format: "raw", read_only: false, client_spins: false };
    let mut figures = Figures::default();
    let mut reads = 0;
    for round in 0..arguments.rounds(ROUNDS) {
        for prefetch in contenders(round) {
            let load = Load { requests: trace.requests.iter().copied(), depth, largest };
            let measured = measure(scratch, disk, prefetch, load)?;
            let mut latencies = measured.replayed.latencies;
            latencies.sort_unstable();
            reads = latencies.len();
            let on = usize::from(prefetch != Prefetch::Off);
            let sum: Duration = latencies.iter().sum();
            let us = |time: Duration| time.as_secs_f64() * 1e6;
            figures.means[on].push(us(sum) / reads as f64);
            figures.late[on].push(latencies.get(reads * 99 / 100).copied().map_or(f64::NAN, us));
            if on == 1 {
                figures.shares.push(measured.shares);
            }
        }
    }
    let shares = median_shares(&figures.shares);
    print!(
        "| {} | {depth} | {delay:?} | {reads} | {:.1} | {:.1} | {:.1} | {:.1} | {:.2} | {:.2} |",
        trace.name, shares.hits, shares.waits, shares.parts, shares.fetched, shares.wasted, shares.unread
    );
    for [off, on] in [&figures.means, &figures.late] {
        print!(" {:.0} | {:.0} | {} |", median(off), median(on), ratio(off, on));
    }
    println!();
    Ok(())
}

/// Reads the requests of a trace. Blocks have `block` bytes if the trace does not say. Timestamps are divided by
/// `speed_up`.
fn requests(path: &Path, block: u64, speed_up: f64) -> anyhow::Result<Vec<Request>> {
    let requests = trace::read(path, block)?.requests.into_iter().map(|request| Request {
        write: request.write,
        start: request.start,
        len: request.len as usize,
        due: request.at.map(|at| at.div_f64(speed_up)),
    });
    Ok(requests.collect())
}

/// Returns the window of `count` successive requests with the most reads. The first one is due at once.
fn busiest_window(requests: &[Request], count: u64) -> Vec<Request> {
    let count = requests.len().min(count as usize);
    let reads = |requests: &[Request]| requests.iter().filter(|request| !request.write).count();
    let mut window_reads = reads(&requests[..count]);
    let (mut best, mut best_reads) = (0, window_reads);
    for first in 1..=requests.len() - count {
        window_reads += reads(&requests[first + count - 1..first + count]);
        window_reads -= reads(&requests[first - 1..first]);
        if window_reads > best_reads {
            (best, best_reads) = (first, window_reads);
        }
    }
    let chosen = &requests[best..best + count];
    let first_due = chosen.first().and_then(|request| request.due);
    let since = |due: Duration| first_due.map_or(due, |first_due| due.saturating_sub(first_due));
    let shifted = chosen.iter().map(|request| Request { due: request.due.map(since), ..*request });
    shifted.collect()
}

/// Returns `count` requests, as pieces of successive requests.
fn excerpt(requests: &[Request], count: u64) -> Vec<Request> {
    let count = count as usize;
    if count >= requests.len() {
        return requests.to_vec();
    }
    let len = count.div_ceil(EXCERPT_PIECES);
    let pieces =
        (0..EXCERPT_PIECES).flat_map(|piece| requests.iter().skip(piece * (requests.len() / EXCERPT_PIECES)).take(len));
    pieces.take(count).copied().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(write: bool, start: u64, len: usize, due_us: u64) -> Request {
        Request { write, start, len, due: Some(Duration::from_micros(due_us)) }
    }

    #[test]
    /// The window has the most reads, and its timestamps start at 0.
    fn busiest_window_has_most_reads() {
        let requests: Vec<Request> = (0..10).map(|at| request(!(4..7).contains(&at), at, 1, at)).collect();
        let first: Vec<Request> = busiest_window(&requests, 3);
        let expected: Vec<Request> = (4..7).map(|at| request(false, at, 1, at - 4)).collect();
        assert_eq!(first, expected);
        assert_eq!(busiest_window(&requests, 100).len(), 10);
    }

    #[test]
    fn excerpt_spreads_over_whole_trace() {
        let requests: Vec<Request> = (0..800).map(|at| request(false, at, 1, at)).collect();
        let starts: Vec<u64> = excerpt(&requests, 16).iter().map(|request| request.start).collect();
        let expected: Vec<u64> = (0..8).flat_map(|piece| [piece * 100, piece * 100 + 1]).collect();
        assert_eq!(starts, expected);
    }
}
