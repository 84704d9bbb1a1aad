//! Requests replayed against Larder, and what became of what it read ahead for them.

use larder_block::ByteLen;

use super::place::Place;
use super::servers::{Export, Prefetch, Serve};
use crate::vhost_user::client::{Client, Replayed, Request};

/// A disk to be served.
#[derive(Clone, Copy)]
pub(super) struct Disk<'a> {
    /// A path, or an NBD URI.
    pub(super) image: &'a str,
    pub(super) format: &'a str,
    pub(super) read_only: bool,
    /// The client spins for completions: a disk on this machine leaves a processor for it.
    pub(super) client_spins: bool,
}

/// Requests for it.
pub(super) struct Load<R> {
    pub(super) requests: R,
    /// Requests in flight at most.
    pub(super) depth: usize,
    /// Bytes of the largest.
    pub(super) largest: usize,
}

/// What came of them.
pub(super) struct Measured {
    pub(super) replayed: Replayed,
    pub(super) shares: Shares,
}

/// What became of the reads, in % of the reads, and of what was read ahead, in % of the bytes that were read.
#[derive(Clone, Copy, Default)]
pub(super) struct Shares {
    /// Reads whose bytes were all in memory.
    pub(super) hits: f64,
    /// Reads that waited for bytes on their way.
    pub(super) waits: f64,
    /// Reads of which a part was in memory, or on its way.
    pub(super) parts: f64,
    /// Bytes read ahead.
    pub(super) fetched: f64,
    /// Those that were dropped unread.
    pub(super) wasted: f64,
    /// Those that were neither read nor dropped when it ended.
    pub(super) unread: f64,
}

/// Serves the disk anew, and makes the requests.
pub(super) fn measure(
    place: &Place,
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
    let larder = serve.start(place)?;
    let memory = load.depth * load.largest.next_multiple_of(ByteLen::kib(4).as_usize());
    let mut client = match disk.read_only {
        true => Client::connect_read_only(larder.socket(), disk.client_spins, memory)?,
        false => Client::connect_with(larder.socket(), disk.client_spins, memory)?,
    };
    let replayed = client.replay(load.requests, load.depth, load.largest)?;
    let shares = match prefetch {
        Prefetch::Off => Shares::default(),
        _ => {
            let statistics = larder.statistics()?;
            let of_reads = |count: u64| count as f64 * 100.0 / replayed.latencies.len() as f64;
            let of_bytes = |bytes: u64| bytes as f64 * 100.0 / replayed.read_bytes as f64;
            Shares {
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

/// The middle one of several rounds, each figure by itself.
pub(super) fn median_of(rounds: &[Shares]) -> Shares {
    let median = |figure: fn(&Shares) -> f64| crate::figures::median(&rounds.iter().map(figure).collect::<Vec<_>>());
    Shares {
        hits: median(|shares| shares.hits),
        waits: median(|shares| shares.waits),
        parts: median(|shares| shares.parts),
        fetched: median(|shares| shares.fetched),
        wasted: median(|shares| shares.wasted),
        unread: median(|shares| shares.unread),
    }
}

/// The two that are compared, in the order of a round: who comes first alternates.
pub(super) fn contenders(round: usize) -> [Prefetch; 2] {
    match round % 2 {
        0 => [Prefetch::Off, Prefetch::Default],
        _ => [Prefetch::Default, Prefetch::Off],
    }
}
