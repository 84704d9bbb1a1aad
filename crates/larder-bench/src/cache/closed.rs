//! Closed-loop clients, each with one request in flight, that send their requests straight to the drive models. The
//! result is the upper bound for any program that runs over these drives.

use super::drive::{Drive, Model, Nanos, Token, mixed};
use super::load::Requests;

/// One access to one drive: the part of a request that a single drive serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct DriveAccess {
    /// Index of the drive.
    pub(super) drive: usize,
    pub(super) write: bool,
    /// Address in blocks.
    pub(super) address: u64,
}

/// A client's request. Its legs begin together, and it completes when all of them have.
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) accesses: [Option<DriveAccess>; 2],
    pub(super) write: bool,
}

/// Latencies and rate that a run measured.
#[derive(Clone, Debug, Default)]
pub(super) struct Outcome {
    /// Latency of each read, in order of completion.
    pub(super) read_latencies: Vec<Nanos>,
    pub(super) write_latencies: Vec<Nanos>,
    /// Requests per second.
    pub(super) iops: f64,
}

/// Measured interval of a run. Requests that complete before `start` are not counted.
#[derive(Clone, Copy, Debug)]
pub(super) struct MeasuredInterval {
    pub(super) start: Nanos,
    pub(super) end: Nanos,
}

struct Client {
    started_at: Nanos,
    write: bool,
    accesses_left: usize,
}

/// Runs `clients` closed-loop clients. When a client's request completes, it sends the next one that `next` returns
/// for its number.
pub(super) fn run(
    models: &[Model],
    clients: usize,
    span: MeasuredInterval,
    mut next: impl FnMut(usize) -> Request,
) -> Outcome {
    let mut drives: Vec<Drive> = models.iter().map(|model| Drive::new(*model)).collect();
    let mut outcome = Outcome::default();
    let mut start_request = |drives: &mut [Drive], client_index: usize, now: Nanos| {
        let request = next(client_index);
        let legs = request.accesses.iter().flatten();
        let client = Client { started_at: now, write: request.write, accesses_left: legs.clone().count() };
        for leg in legs {
            drives[leg.drive].request(client_index as Token, leg.write, leg.address);
        }
        client
    };
    let mut in_flight: Vec<Client> =
        (0..clients).map(|client_index| start_request(&mut drives, client_index, 0)).collect();
    let mut completed = Vec::new();
    while let Some(now) = drives.iter().filter_map(Drive::next).min()
        && now < span.end
    {
        for drive in &mut drives {
            drive.run_until(now, |_, token| completed.push(token as usize));
        }
        for client_index in completed.drain(..) {
            let client = &mut in_flight[client_index];
            client.accesses_left -= 1;
            if client.accesses_left > 0 {
                continue;
            }
            if now >= span.start {
                let latencies = if client.write { &mut outcome.write_latencies } else { &mut outcome.read_latencies };
                latencies.push(now - client.started_at);
            }
            in_flight[client_index] = start_request(&mut drives, client_index, now);
        }
    }
    let count = (outcome.read_latencies.len() + outcome.write_latencies.len()) as f64;
    outcome.iops = count * 1e9 / (span.end - span.start) as f64;
    outcome
}

/// Runs the published experiment's requests of `clients` VMs, with a disk of `disk` bytes each, on one drive.
pub(super) fn run_on_one_drive(model: Model, clients: usize, disk: u64, span: MeasuredInterval) -> Outcome {
    let mut requests: Vec<Requests> = (0..clients).map(|number| Requests::of(number, disk)).collect();
    run(&[model], clients, span, |number| {
        let (write, block) = requests[number].next_request();
        let leg = DriveAccess { drive: 0, write, address: address(number, block) };
        Request { accesses: [Some(leg), None], write }
    })
}

/// Runs the published experiment's requests with a cache on drive `fast` in front of drive `slow`. The share `hits`
/// of the lines is cached, always the same lines: they are read from the cache and written to both drives.
pub(super) fn cached(
    fast: Model,
    slow: Model,
    clients: usize,
    disk: u64,
    hits: f64,
    span: MeasuredInterval,
) -> Outcome {
    let mut requests: Vec<Requests> = (0..clients).map(|number| Requests::of(number, disk)).collect();
    let is_hit = |number, block| (mixed(mixed(address(number, block))) as f64) < hits * u64::MAX as f64;
    run(&[fast, slow], clients, span, |number| {
        let (write, block) = requests[number].next_request();
        let hit = is_hit(number, block);
        let leg = |drive| DriveAccess { drive, write, address: address(number, block) };
        let slow = (write || !hit).then(|| leg(1));
        Request { accesses: [hit.then(|| leg(0)), slow], write }
    })
}

/// Returns the address of a VM's block on a drive that all VMs share.
pub(super) fn address(number: usize, block: u64) -> u64 {
    (number as u64) << 40 | block
}
