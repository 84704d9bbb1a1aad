//! Replays requests against Larder, and measures the use of its read-ahead.

use larder_block::ByteLen;

use super::place::Place;
use super::servers::{Export, Prefetch, Serve};
use crate::vhost_user::client::{Client, Replayed, Request};

/// A disk to serve.
#[derive(Clone, Copy)]
pub(super) struct Disk<'a> {
    /// A path, or an NBD URI.
    pub(super) image: &'a str,
    pub(super) format: &'a str,
    pub(super) read_only: bool,
    /// True if the client spins for completions: a local disk leaves it a processor.
    pub(super) client_spins: bool,
}

/// Requests for the disk.
pub(super) struct Load<R> {
    pub(super) requests: R,
    /// Maximum number of requests in flight.
    pub(super) depth: usize,
    /// Bytes of the largest request.
    pub(super) largest: usize,
}

/// Results of a load.
pub(super) struct Measured {
    pub(super) replayed: Replayed,
    pub(super) shares: ReadAheadShares,
}

/// Use of read-ahead: reads in % of all reads, and bytes in % of the bytes read.
#[derive(Clone, Copy, Default)]
pub(super) struct ReadAheadShares {
    /// Reads whose bytes were all in memory.
    pub(super) hits: f64,
    /// Reads that waited for bytes in flight.
    pub(super) waits: f64,
    /// Reads of which only a part was in memory or in flight.
    pub(super) parts: f64,
    /// Bytes read ahead.
    pub(super) fetched: f64,
    /// Bytes that were dropped unread.
    pub(super) wasted: f64,
    /// Bytes that were neither read nor dropped at the end.
    pub(super) unread: f64,
}

/// Starts a new server for the disk, and sends the requests.
pub(super) fn measure(
    scratch: &Place,
    disk: Disk<'_>,
    prefetch: Prefetch,
    load: Load<impl IntoIterator<Item = Request>>,
) -> anyhow::Result<Measured> {
    let serve = Serve {
        image: disk.image,
        format: disk.format,
        prefetch,
        export: Export::VhostUser,
        options: if disk.read_only { "--read-only" } else { "" },
    };
    let larder = serve.start(scratch)?;
    let memory = load.depth * load.largest.next_multiple_of(ByteLen::kib(4).as_usize());
    let mut client = match disk.read_only {
        true => Client::connect_read_only(larder.socket(), disk.client_spins, memory)?,
        false => Client::connect_with(larder.socket(), disk.client_spins, memory)?,
    };
    let replayed = client.replay(load.requests, load.depth, load.largest)?;
    let shares = match prefetch {
        Prefetch::Off => ReadAheadShares::default(),
        _ => {
            let statistics = larder.statistics()?;
            let of_reads = |count: u64| count as f64 * 100.0 / replayed.latencies.len() as f64;
            let of_bytes = |bytes: u64| bytes as f64 * 100.0 / replayed.read_bytes as f64;
            ReadAheadShares {
                hits: of_reads(statistics.hits),
                waits: of_reads(statistics.waits),
                parts: of_reads(statistics.partial_hits),
                fetched: of_bytes(statistics.fetched),
                wasted: of_bytes(statistics.wasted),
                unread: of_bytes(statistics.unread),
            }
        }
    };
    Ok(Measured { replayed, shares })
}

/// Returns the medians over several rounds, for each value separately.
pub(super) fn median_shares(rounds: &[ReadAheadShares]) -> ReadAheadShares {
    let median =
        |value: fn(&ReadAheadShares) -> f64| crate::figures::median(&rounds.iter().map(value).collect::<Vec<_>>());
    ReadAheadShares {
        hits: median(|shares| shares.hits),
        waits: median(|shares| shares.waits),
        parts: median(|shares| shares.parts),
        fetched: median(|shares| shares.fetched),
        wasted: median(|shares| shares.wasted),
        unread: median(|shares| shares.unread),
    }
}

/// Returns the two configurations to compare; which is first alternates with the round.
pub(super) fn contenders(round: usize) -> [Prefetch; 2] {
    match round % 2 {
        0 => [Prefetch::Off, Prefetch::Default],
        _ => [Prefetch::Default, Prefetch::Off],
    }
}
