//! The part `isolation`: the effect of VMs that scan their whole disks on the cache of a VM that reads the same
//! working set all the time.
//!
//! Each VM is a `larder disk serve` of its own, with a cache of its own. All caches are files in the same directory.
//! The disks are slow stores in this process.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde_json::Value;

use super::Arguments;
use super::drive::BLOCK;
use crate::prefetch::place::Place;
use crate::prefetch::servers::{Export, Larder, Prefetch, Serve, text};
use crate::prefetch::slow::SlowStore;
use crate::vhost_user::client::{Client, Random, Request};

/// Bytes of each disk.
const DISK: u64 = 1 << 30;
/// Bytes of each cache's file.
const CACHE: u64 = 96 << 20;
/// Bytes of the working set that one VM reads over and over.
const HOT: u64 = 64 << 20;
/// Latency of a read from a disk.
const DELAY: Duration = Duration::from_millis(2);

/// Number of VMs that scan their disks, for each phase.
const SCANNING_VMS_BY_PHASE: [usize; 4] = [0, 1, 3, 0];
const SCAN_BYTES: usize = 1 << 20;
const SCAN_DEPTH: usize = 8;

/// Reads in flight, and passes over the working set at most, until the cache holds it.
const WARM_DEPTH: usize = 16;
const WARM_PASSES: u32 = 20;

/// A VM, before its client connects.
struct Vm {
    larder: Larder,
    _store: SlowStore,
}

/// Statistics of a VM's cache.
#[derive(Clone, Copy, Debug, Default)]
struct Told {
    hits: u64,
    misses: u64,
    /// Bytes that are cached.
    cached_bytes: u64,
    evicted_lines: u64,
}

impl Vm {
    fn start(scratch: &Place) -> anyhow::Result<Self> {
        let store = SlowStore::start(scratch, DISK, DELAY)?;
        let cache = scratch.unused("cache");
        let serve = Serve {
            image: store.uri(),
            format: "raw",
            prefetch: Prefetch::Off,
            export: Export::VhostUser,
            options: &format!("--poll-us 0 --cache {} --cache-size {CACHE}", text(&cache)?),
        };
        Ok(Self { larder: serve.start(scratch)?, _store: store })
    }

    fn told(&self) -> anyhow::Result<Told> {
        let answer: Value = self.larder.status()?;
        let cache = &answer["disks"][0]["cache"];
        let counter = |name: &str| {
            let value = cache[name].as_u64();
            value.with_context(|| format!("larder status reports no {name} of the cache: {answer}"))
        };
        Ok(Told {
            hits: counter("hits")?,
            misses: counter("misses")? + counter("partial_hits")?,
            cached_bytes: counter("occupancy")?,
            evicted_lines: counter("evicted")?,
        })
    }
}

/// A read of a random block of the working set.
fn working_set_read(random: &mut Random) -> Request {
    Request { write: false, start: random.below(HOT / BLOCK) * BLOCK, len: BLOCK as usize, due: None }
}

pub(super) fn run(arguments: &Arguments) -> anyhow::Result<()> {
    let scratch = Place::new(&arguments.folder)?;
    let scanning_max = SCANNING_VMS_BY_PHASE.into_iter().max().unwrap_or(0);
    let hot = Vm::start(&scratch)?;
    let scanners: Vec<Vm> = (0..scanning_max).map(|_| Vm::start(&scratch)).collect::<anyhow::Result<_>>()?;
    let mut client = Client::connect_with(hot.larder.socket(), false, WARM_DEPTH * BLOCK as usize)?;
    warm_up(&hot, &mut client)?;
    println!(
        "One VM reads {} MiB at random, 4 KiB at a time; other VMs scan their disks of {} MiB. Each VM has a cache of {} MiB.\n",
        HOT >> 20,
        DISK >> 20,
        CACHE >> 20
    );
    println!(
        "| scanning VMs | hits, % | cached, MiB | evicted lines | reads/s | median, us | P99, us | scans, MiB/s | scanners' cached, MiB | scanners' evicted lines |"
    );
    println!("|{}", " --- |".repeat(10));
    let mut random = Random::default();
    for count in SCANNING_VMS_BY_PHASE {
        let scanning = &scanners[..count];
        let (from, scanners_before) = (hot.told()?, sum_counters(scanning)?);
        let phase_result = phase(&mut client, scanning, arguments.seconds, &mut random)?;
        let (to, scanners_after) = (hot.told()?, sum_counters(scanning)?);
        let (hits, misses) = (to.hits - from.hits, to.misses - from.misses);
        let mut reads = phase_result.read_latencies;
        reads.sort_unstable();
        let percentile_us = |share: f64| {
            let at = (reads.len() as f64 * share) as usize;
            reads.get(at).map_or(0.0, |elapsed| elapsed.as_secs_f64() * 1e6)
        };
        println!(
            "| {count} | {:.2} | {:.2} | {} | {:.0} | {:.0} | {:.0} | {:.0} | {:.1} | {} |",
            hits as f64 * 100.0 / (hits + misses) as f64,
            mib(to.cached_bytes),
            to.evicted_lines - from.evicted_lines,
            reads.len() as f64 / arguments.seconds,
            percentile_us(0.5),
            percentile_us(0.99),
            mib(phase_result.scanned_bytes) / arguments.seconds,
            mib(scanners_after.cached_bytes),
            scanners_after.evicted_lines - scanners_before.evicted_lines
        );
    }
    Ok(())
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// Sums the statistics of several caches.
fn sum_counters(vms: &[Vm]) -> anyhow::Result<Told> {
    let mut sum = Told::default();
    for vm in vms {
        let sample = vm.told()?;
        sum.hits += sample.hits;
        sum.misses += sample.misses;
        sum.cached_bytes += sample.cached_bytes;
        sum.evicted_lines += sample.evicted_lines;
    }
    Ok(sum)
}

/// Reads the working set until the cache holds all of it.
fn warm_up(vm: &Vm, client: &mut Client) -> anyhow::Result<()> {
    for _ in 0..WARM_PASSES {
        let before = vm.told()?.misses;
        let reads = (0..HOT / BLOCK).map(|block| Request {
            write: false,
            start: block * BLOCK,
            len: BLOCK as usize,
            due: None,
        });
        client.replay(reads, WARM_DEPTH, BLOCK as usize)?;
        if vm.told()?.misses == before {
            return Ok(());
        }
    }
    ensure!(vm.told()?.cached_bytes >= HOT, "the cache does not hold the working set");
    Ok(())
}

/// Results of one phase.
struct Seen {
    /// Latency of each read of the VM under test.
    read_latencies: Vec<Duration>,
    /// Bytes that the scanning VMs have read.
    scanned_bytes: u64,
}

/// Reads the working set in one VM while others scan their whole disks.
fn phase(client: &mut Client, scanning: &[Vm], seconds: f64, random: &mut Random) -> anyhow::Result<Seen> {
    let (stop, scanned) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let scans: Vec<_> = scanning.iter().map(|vm| scope.spawn(|| scan(vm, &stop, &scanned))).collect();
        let end = Instant::now() + Duration::from_secs_f64(seconds);
        let mut reads = std::iter::from_fn(|| (Instant::now() < end).then(|| working_set_read(random)));
        let replayed = client.replay(&mut reads, 1, BLOCK as usize);
        stop.store(true, Ordering::Relaxed);
        for scan in scans {
            scan.join().ok().context("a scanning thread panicked")??;
        }
        Ok(Seen { read_latencies: replayed?.latencies, scanned_bytes: scanned.load(Ordering::Relaxed) })
    })
}

/// Reads a whole disk over and over until `stop` is set.
fn scan(vm: &Vm, stop: &AtomicBool, scanned: &AtomicU64) -> anyhow::Result<()> {
    let mut client = Client::connect_with(vm.larder.socket(), false, SCAN_DEPTH * SCAN_BYTES)?;
    let mut chunks = (0..DISK / SCAN_BYTES as u64).cycle();
    let reads = std::iter::from_fn(|| {
        let chunk = chunks.next().filter(|_| !stop.load(Ordering::Relaxed))?;
        Some(Request { write: false, start: chunk * SCAN_BYTES as u64, len: SCAN_BYTES, due: None })
    });
    let replayed = client.replay(reads, SCAN_DEPTH, SCAN_BYTES)?;
    scanned.fetch_add(replayed.read_bytes, Ordering::Relaxed);
    Ok(())
}
