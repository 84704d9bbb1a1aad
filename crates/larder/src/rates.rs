//! What disks do in an interval.

use std::collections::HashMap;

use larder_vm::control::state::{CacheState, DiskState, PrefetchState, RequestCounts};
use larder_vm::control::{FetchError, fetch_disks};
use larder_vm::vm::find::Found;
use serde::Serialize;

use crate::output::Table;

/// Looks at disks again and again.
#[derive(Default)]
pub(crate) struct Sampler {
    before: HashMap<(String, String), DiskState>,
}

/// What was seen at a time.
#[derive(Default)]
pub(crate) struct Sample {
    /// Of each disk what it did since the time before, or since the start of its server.
    pub(crate) rates: Vec<Rates>,
    /// The disks, in the same order, and as they were before, if that is known.
    pub(crate) disks: Vec<(DiskState, Option<DiskState>)>,
}

impl Sampler {
    /// What there is to say of the disks that each VM has now.
    pub(crate) fn sample(&mut self, asked: Vec<(String, Vec<DiskState>)>) -> Sample {
        let mut before = std::mem::take(&mut self.before);
        let mut sample = Sample::default();
        for (vm, disks) in asked {
            for (place, disk) in disks.into_iter().enumerate() {
                let name = disk.name.clone().unwrap_or_else(|| place.to_string());
                let key = (vm.clone(), name);
                // A server that was started again begins anew.
                let old = before
                    .remove(&key)
                    .filter(|old| old.time_ns < disk.time_ns && old.requests.busy_ns <= disk.requests.busy_ns);
                sample.rates.push(Rates::new(&key, old.as_ref(), &disk));
                self.before.insert(key, disk.clone());
                sample.disks.push((disk, old));
            }
        }
        sample
    }
}

/// Asks all at once: one that is stuck holds up no other. Those that are not served are left out.
pub(crate) fn ask_all(vms: &[Found]) -> Vec<(String, Result<Vec<DiskState>, FetchError>)> {
    let asked: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = vms
            .iter()
            .map(|vm| scope.spawn(move || fetch_disks(&vm.control)))
            .collect();
        // A panic ends the process.
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    let all = vms.iter().zip(asked).filter_map(|(vm, asked)| match asked {
        Ok((_, disks)) => Some((vm.name.clone(), Ok(disks.disks))),
        Err(error) if is_not_served(&error) => None,
        Err(error) => Some((vm.name.clone(), Err(error))),
    });
    all.collect()
}

/// There is nobody, which is as it may be.
pub(crate) fn is_not_served(error: &FetchError) -> bool {
    matches!(error, FetchError::Missing { .. } | FetchError::Dead { .. })
}

/// What a disk did in an interval; times are in seconds, sizes in bytes.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Rates {
    pub(crate) vm: String,
    pub(crate) disk: String,
    /// How long the interval was.
    pub(crate) interval: f64,
    pub(crate) read: KindRates,
    pub(crate) write: KindRates,
    pub(crate) flush: KindRates,
    pub(crate) discard: KindRates,
    pub(crate) write_zeroes: KindRates,
    /// Requests under way, on average (iostat's aqu-sz).
    pub(crate) queue: f64,
    /// The share of the time in which there were any.
    pub(crate) utilization: f64,
    /// The share of reads that the cache had all of; `None` without reads, or a cache.
    pub(crate) cache_hits: Option<f64>,
    /// The share of reads that had been read ahead of; `None` without reads, or read-ahead.
    pub(crate) prefetch_hits: Option<f64>,
}

/// Requests of a kind.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub(crate) struct KindRates {
    pub(crate) per_second: f64,
    pub(crate) bytes_per_second: f64,
    pub(crate) errors_per_second: f64,
    /// How long they took on average; `None` without any.
    pub(crate) await_seconds: Option<f64>,
    /// How large they were on average.
    pub(crate) bytes: Option<f64>,
}

impl KindRates {
    fn new(before: Option<&RequestCounts>, now: &RequestCounts, seconds: f64) -> Self {
        let since = |now: u64, before: Option<u64>| (now - before.unwrap_or_default().min(now)) as f64;
        let count = since(now.count, before.map(|it| it.count));
        let bytes = since(now.bytes, before.map(|it| it.bytes));
        let errors = since(now.errors, before.map(|it| it.errors));
        let timed = since(now.latency.count, before.map(|it| it.latency.count));
        let time = since(now.latency.sum_ns, before.map(|it| it.latency.sum_ns)) / 1e9;
        Self {
            per_second: count / seconds,
            bytes_per_second: bytes / seconds,
            errors_per_second: errors / seconds,
            await_seconds: (timed > 0.0).then(|| time / timed),
            bytes: (count > 0.0).then(|| bytes / count),
        }
    }
}

impl Rates {
    /// Of a disk that was as `before`, if that is known, and is as `now`.
    fn new((vm, disk): &(String, String), before: Option<&DiskState>, now: &DiskState) -> Self {
        let seconds = ((now.time_ns - before.map_or(0, |before| before.time_ns)) as f64 / 1e9).max(1e-9);
        let all = &now.requests;
        let old = before.map(|before| &before.requests);
        let read = KindRates::new(old.map(|old| &old.read), &all.read, seconds);
        let write = KindRates::new(old.map(|old| &old.write), &all.write, seconds);
        let flush = KindRates::new(old.map(|old| &old.flush), &all.flush, seconds);
        let discard = KindRates::new(old.map(|old| &old.discard), &all.discard, seconds);
        let zeroes = KindRates::new(old.map(|old| &old.write_zeroes), &all.write_zeroes, seconds);
        let kinds = [&read, &write, &flush, &discard, &zeroes];
        // Little's law.
        let queue = kinds
            .iter()
            .map(|kind| kind.per_second * kind.await_seconds.unwrap_or_default())
            .sum();
        let busy = (all.busy_ns - old.map_or(0, |old| old.busy_ns)) as f64 / 1e9;
        Self {
            vm: vm.clone(),
            disk: disk.clone(),
            interval: seconds,
            read,
            write,
            flush,
            discard,
            write_zeroes: zeroes,
            queue,
            utilization: (busy / seconds).min(1.0),
            cache_hits: now
                .cache
                .as_ref()
                .and_then(|cache| share_of_hits(before.and_then(|before| before.cache.as_ref()), cache, cache_reads)),
            prefetch_hits: now.prefetch.as_ref().and_then(|prefetch| {
                share_of_hits(
                    before.and_then(|before| before.prefetch.as_ref()),
                    prefetch,
                    prefetch_reads,
                )
            }),
        }
    }
}

/// Hits, and all reads.
fn cache_reads(cache: &CacheState) -> (u64, u64) {
    let all = cache.hits + cache.partial_hits + cache.misses + cache.bypassed_slow;
    (cache.hits, all)
}

fn prefetch_reads(prefetch: &PrefetchState) -> (u64, u64) {
    let hits = prefetch.hits + prefetch.waits;
    (hits, hits + prefetch.partial_hits + prefetch.misses + prefetch.bypassed)
}

fn share_of_hits<T>(before: Option<&T>, now: &T, of: impl Fn(&T) -> (u64, u64)) -> Option<f64> {
    let ((hits, all), (old_hits, old_all)) = (of(now), before.map(of).unwrap_or_default());
    // One that was replaced begins anew.
    let (hits, all) = match hits >= old_hits && all >= old_all {
        true => (hits - old_hits, all - old_all),
        false => (hits, all),
    };
    (all > 0).then(|| hits as f64 / all as f64)
}

const MIB: f64 = (1 << 20) as f64;
const KIB: f64 = 1024.0;

/// A table of them.
pub(crate) fn table(rates: &[Rates]) -> String {
    let mut table = Table::new([
        "vm", "disk", "r/s", "rMiB/s", "r_await", "rareq-sz", "w/s", "wMiB/s", "w_await", "wareq-sz", "f/s", "f_await",
        "aqu-sz", "%util", "%hit", "%ahead",
    ]);
    let or_none =
        |value: Option<f64>, unit: f64| value.map_or_else(|| "-".to_owned(), |value| format!("{:.2}", value * unit));
    for it in rates {
        let of = |kind: &KindRates| {
            [
                format!("{:.1}", kind.per_second),
                format!("{:.2}", kind.bytes_per_second / MIB),
                or_none(kind.await_seconds, 1e3),
                or_none(kind.bytes, 1.0 / KIB),
            ]
        };
        let [reads, read_bytes, read_await, read_size] = of(&it.read);
        let [writes, written, write_await, write_size] = of(&it.write);
        table.row([
            it.vm.clone(),
            it.disk.clone(),
            reads,
            read_bytes,
            read_await,
            read_size,
            writes,
            written,
            write_await,
            write_size,
            format!("{:.1}", it.flush.per_second),
            or_none(it.flush.await_seconds, 1e3),
            format!("{:.2}", it.queue),
            format!("{:.1}", it.utilization * 100.0),
            or_none(it.cache_hits, 100.0),
            or_none(it.prefetch_hits, 100.0),
        ]);
    }
    table.into_text()
}
