//! The VMs: each is a `larder disk serve` and a client with one request in flight.

use std::path::Path;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};

use super::drive::{BLOCK, mixed};
use super::load::Requests;
use crate::prefetch::place::Place;
use crate::prefetch::servers::{Export, Larder, Prefetch, Serve};
use crate::vhost_user::client::{Client, Request};

/// A VM: its server, and the thread of its client.
struct Vm {
    larder: Larder,
    commands: Sender<Order>,
    responses: Receiver<anyhow::Result<Vec<Duration>>>,
    thread: Option<JoinHandle<()>>,
}

/// Order to a client. The client answers with the latency of each read.
#[derive(Clone, Copy, Debug)]
enum Order {
    /// Reads every block once, in a random order that differs from pass to pass.
    ReadAll { pass: u32 },
    /// Sends the experiment's requests until `to`, and reports those after `from`.
    Run { from: Instant, to: Instant },
}

/// All VMs of an experiment.
pub(super) struct Vms {
    vms: Vec<Vm>,
}

/// Hits and misses of reads so far, summed over all VMs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Hits {
    pub(super) hits: u64,
    pub(super) misses: u64,
    /// Bytes that reads have filled into the caches.
    pub(super) filled_bytes: u64,
}

impl Hits {
    /// Returns the difference from an earlier value.
    pub(super) fn since(self, earlier: Self) -> Self {
        Self {
            hits: self.hits - earlier.hits,
            misses: self.misses - earlier.misses,
            filled_bytes: self.filled_bytes - earlier.filled_bytes,
        }
    }

    pub(super) fn ratio(self) -> f64 {
        self.hits as f64 / (self.hits + self.misses) as f64
    }
}

impl Vms {
    /// Starts `count` VMs on disks of `disk` bytes. `image` gives the URI of each disk, `options` the options of its
    /// server.
    pub(super) fn start(
        scratch: &Place,
        count: usize,
        disk: u64,
        image: impl Fn(usize) -> String,
        options: impl Fn(usize) -> String,
    ) -> anyhow::Result<Self> {
        let vms = (0..count)
            .map(|number| {
                let serve = Serve {
                    image: &image(number),
                    format: "raw",
                    prefetch: Prefetch::Off,
                    export: Export::VhostUser,
                    // Hundreds of spinning servers would leave no processor for those with work.
                    options: &format!("--poll-us 0 {}", options(number)),
                };
                Vm::start(serve.start(scratch)?, Requests::of(number, disk), disk)
            })
            .collect::<anyhow::Result<_>>()?;
        Ok(Self { vms })
    }

    /// Makes each VM read all of its disk.
    pub(super) fn read_all(&self, pass: u32) -> anyhow::Result<()> {
        self.order(self.vms.len(), Order::ReadAll { pass }).map(drop)
    }

    /// Runs the first `count` VMs for `before` seconds unmeasured, then for `seconds`. Returns the latency of each
    /// measured read.
    pub(super) fn run(&self, count: usize, before: f64, seconds: f64) -> anyhow::Result<Vec<Duration>> {
        let from = Instant::now() + Duration::from_secs_f64(before);
        let to = from + Duration::from_secs_f64(seconds);
        self.order(count, Order::Run { from, to })
    }

    fn order(&self, count: usize, order: Order) -> anyhow::Result<Vec<Duration>> {
        let vms = &self.vms[..count];
        for vm in vms {
            // A thread that has ended has left its error as its answer.
            let _ = vm.commands.send(order);
        }
        let mut reads = Vec::new();
        for vm in vms {
            reads.extend(vm.responses.recv().context("a client has ended")??);
        }
        Ok(reads)
    }

    /// Sums the statistics of all caches.
    pub(super) fn hits(&self) -> anyhow::Result<Hits> {
        let mut sum = Hits::default();
        for vm in &self.vms {
            let answer = vm.larder.status()?;
            let cache = &answer["disks"][0]["cache"];
            let counter = |name: &str| {
                let value = cache[name].as_u64();
                value.with_context(|| format!("larder status reports no {name} of the cache: {answer}"))
            };
            sum.hits += counter("hits")?;
            sum.misses += counter("misses")? + counter("partial_hits")?;
            sum.filled_bytes += counter("filled")?;
        }
        Ok(sum)
    }

    /// CPU time of all servers so far.
    pub(super) fn cpu_time(&self) -> anyhow::Result<Duration> {
        self.vms.iter().map(|vm| Ok(vm.larder.server().cpu_time()?.0)).sum()
    }
}

impl Vm {
    fn start(larder: Larder, requests: Requests, disk: u64) -> anyhow::Result<Self> {
        let (orders, command_receiver) = channel();
        let (done, answers) = channel();
        let socket = larder.socket().to_owned();
        let client = move || {
            let result = client(&socket, requests, disk, &command_receiver, &done);
            if let Err(error) = result {
                // The receiver is dropped if the experiment has ended.
                let _ = done.send(Err(error));
            }
        };
        Ok(Self {
            larder,
            commands: orders,
            responses: answers,
            thread: Some(std::thread::Builder::new().name("client".to_owned()).spawn(client)?),
        })
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        // Dropping the sender ends the client.
        self.commands = channel().0;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Executes orders until the sender is dropped.
fn client(
    socket: &Path,
    mut requests: Requests,
    disk: u64,
    orders: &Receiver<Order>,
    answers: &Sender<anyhow::Result<Vec<Duration>>>,
) -> anyhow::Result<()> {
    let block = BLOCK as usize;
    let mut client = Client::connect_with(socket, false, block)?;
    while let Ok(order) = orders.recv() {
        let mut replay = |requests: &mut dyn Iterator<Item = (bool, u64)>| {
            let requests =
                requests.map(|(write, number)| Request { write, start: number * BLOCK, len: block, due: None });
            client.replay(requests, 1, block)
        };
        let reads = match order {
            Order::ReadAll { pass } => {
                let mut blocks: Vec<u64> = (0..disk / BLOCK).collect();
                blocks.sort_unstable_by_key(|block| mixed(u64::from(pass) << 40 | block));
                replay(&mut blocks.into_iter().map(|number| (false, number)))?
            }
            Order::Run { from, to } => {
                let mut replay_until = |end: Instant| {
                    replay(&mut std::iter::from_fn(|| (Instant::now() < end).then(|| requests.next_request())))
                };
                replay_until(from)?;
                replay_until(to)?
            }
        };
        if answers.send(Ok(reads.latencies)).is_err() {
            bail!("the experiment no longer waits for the results");
        }
    }
    Ok(())
}
