//! Closed-loop clients, each with one request in flight, that send their requests straight to the drive models. The
//! result is the upper bound for any program that runs over these drives.

use super::drive::{Drive, Model, Nanos, Token, mixed};
use super::load::Requests;

/// One access to one drive: the part of a request that a single drive serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Leg {
    /// Index of the drive.
    pub(super) drive: usize,
    pub(super) write: bool,
    /// Address in blocks.
    pub(super) address: u64,
}

/// A client's request. Its legs begin together, and it completes when all of them have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) legs: [Option<Leg>; 2],
    pub(super) write: bool,
}

/// Latencies and rate that a run measured.
#[derive(Clone, Debug, Default)]
pub(super) struct Outcome {
    /// Latency of each read, in order of completion.
    pub(super) reads: Vec<Nanos>,
    pub(super) writes: Vec<Nanos>,
    /// Requests per second.
    pub(super) iops: f64,
}

/// Measured interval of a run. Requests that complete before `from` are not counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    pub(super) from: Nanos,
    pub(super) to: Nanos,
}

struct Client {
    began: Nanos,
    write: bool,
    legs: usize,
}

/// Runs `clients` closed-loop clients. When a client's request completes, it sends the next one that `next` returns
/// for its number.
pub(super) fn run(models: &[Model], clients: usize, span: Span, mut next: impl FnMut(usize) -> Request) -> Outcome {
    let mut drives: Vec<Drive> = models.iter().map(|model| Drive::new(*model)).collect();
    let mut outcome = Outcome::default();
    let mut begin = |drives: &mut [Drive], number: usize, now: Nanos| {
        let request = next(number);
        let legs = request.legs.iter().flatten();
        let client = Client {
            began: now,
            write: request.write,
            legs: legs.clone().count(),
        };
        for leg in legs {
            drives[leg.drive].request(number as Token, leg.write, leg.address);
        }
        client
    };
    let mut at_work: Vec<Client> = (0..clients).map(|number| begin(&mut drives, number, 0)).collect();
    let mut over = Vec::new();
    while let Some(now) = drives.iter().filter_map(Drive::next).min()
        && now < span.to
    {
        for drive in &mut drives {
            drive.run_until(now, |_, token| over.push(token as usize));
        }
        for number in over.drain(..) {
            let client = &mut at_work[number];
            client.legs -= 1;
            if client.legs > 0 {
                continue;
            }
            if now >= span.from {
                let list = if client.write {
                    &mut outcome.writes
                } else {
                    &mut outcome.reads
                };
                list.push(now - client.began);
            }
            at_work[number] = begin(&mut drives, number, now);
        }
    }
    let count = (outcome.reads.len() + outcome.writes.len()) as f64;
    outcome.iops = count * 1e9 / (span.to - span.from) as f64;
    outcome
}

/// Runs the published experiment's requests of `clients` VMs, with a disk of `disk` bytes each, on one drive.
pub(super) fn on_one_drive(model: Model, clients: usize, disk: u64, span: Span) -> Outcome {
    let mut requests: Vec<Requests> = (0..clients).map(|number| Requests::of(number, disk)).collect();
    run(&[model], clients, span, |number| {
        let (write, block) = requests[number].next_one();
        let leg = Leg {
            drive: 0,
            write,
            address: address(number, block),
        };
        Request {
            legs: [Some(leg), None],
            write,
        }
    })
}

/// Runs the published experiment's requests with a cache on drive `fast` in front of drive `slow`. The share `hits`
/// of the lines is cached, always the same lines: they are read from the cache and written to both drives.
pub(super) fn cached(fast: Model, slow: Model, clients: usize, disk: u64, hits: f64, span: Span) -> Outcome {
    let mut requests: Vec<Requests> = (0..clients).map(|number| Requests::of(number, disk)).collect();
    let is_hit = |number, block| (mixed(mixed(address(number, block))) as f64) < hits * u64::MAX as f64;
    run(&[fast, slow], clients, span, |number| {
        let (write, block) = requests[number].next_one();
        let hit = is_hit(number, block);
        let leg = |drive| Leg {
            drive,
            write,
            address: address(number, block),
        };
        let slow = (write || !hit).then(|| leg(1));
        Request {
            legs: [hit.then(|| leg(0)), slow],
            write,
        }
    })
}

/// Returns the address of a VM's block on a drive that all VMs share.
pub(super) fn address(number: usize, block: u64) -> u64 {
    (number as u64) << 40 | block
}
