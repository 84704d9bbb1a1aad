//! Rates of a disk between two samples.

use serde::Serialize;

use super::state::{CacheState, DiskState, Latency, LatencyBucket, PrefetchState, RequestCounts};

/// Rates of one disk. Times are in seconds, sizes in bytes, fractions from 0 to 1; `None` means that there was
/// nothing to measure.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct DiskRates {
    /// Time between the two samples.
    pub interval: f64,
    /// Reads.
    pub read: RequestRates,
    /// Writes.
    pub write: RequestRates,
    /// Flushes.
    pub flush: RequestRates,
    /// Discards.
    pub discard: RequestRates,
    /// Requests to write zeroes.
    pub write_zeroes: RequestRates,
    /// Mean number of requests in flight (iostat's aqu-sz).
    pub queue: f64,
    /// Fraction of the time with at least one request in flight.
    pub utilization: f64,
    /// Fraction of the reads reaching the cache that were completely in the cache.
    pub cache_hits: Option<f64>,
    /// Fraction of reads that were completely prefetched.
    pub prefetch_hits: Option<f64>,
    /// Sources of the bytes for guests.
    pub tiers: TierRates,
    /// Read-ahead.
    pub prefetch: Option<PrefetchRates>,
    /// Internal work of the cache.
    pub cache: Option<CacheRates>,
}

/// Rates of one kind of request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct RequestRates {
    /// Requests per second.
    pub per_second: f64,
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// Failed requests per second.
    pub errors_per_second: f64,
    /// Mean latency.
    pub await_seconds: Option<f64>,
    /// Median latency.
    pub p50_seconds: Option<f64>,
    /// 99th percentile of the latency.
    pub p99_seconds: Option<f64>,
    /// Mean request size.
    pub bytes: Option<f64>,
}

/// Bytes per second for guests from prefetched memory and from the cache, and bytes per second from the disk for any
/// reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct TierRates {
    pub memory: Option<f64>,
    pub cache: Option<f64>,
    pub disk: f64,
}

/// Bytes per second that were prefetched, that were then read by a guest, and that were dropped unread.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct PrefetchRates {
    pub fetched: f64,
    pub used: f64,
    pub wasted: f64,
}

/// Bytes per second written to the cache's device, written from the cache to the disk, and filled into the cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[allow(missing_docs)]
pub struct CacheRates {
    pub written: f64,
    pub cleaned: f64,
    pub filled: f64,
}

impl DiskRates {
    /// Returns the rates since the start of the disk's server.
    pub fn since_start(now: &DiskState) -> Self {
        DiskDelta::new(now.time_ns).rates(None, now)
    }

    /// Returns the rates between two samples of a disk; `None` if no time has passed, or the server was restarted in
    /// between.
    pub fn between(before: &DiskState, now: &DiskState) -> Option<Self> {
        let time = now.time_ns.checked_sub(before.time_ns).filter(|time| *time > 0)?;
        let mut between = DiskDelta::new(time);
        let rates = between.rates(Some(before), now);
        between.is_monotonic.then_some(rates)
    }
}

/// Differences between two samples. Detects counters that have decreased, which means that the server was restarted.
struct DiskDelta {
    time_ns: u64,
    is_monotonic: bool,
}

impl DiskDelta {
    fn new(time_ns: u64) -> Self {
        Self { time_ns: time_ns.max(1), is_monotonic: true }
    }

    fn seconds(&self) -> f64 {
        self.time_ns as f64 / 1e9
    }

    fn delta<T>(&mut self, before: Option<&T>, now: &T, counter: impl Fn(&T) -> u64) -> u64 {
        let (before, now) = (before.map(&counter).unwrap_or_default(), counter(now));
        self.is_monotonic &= now >= before;
        now.saturating_sub(before)
    }

    fn rate<T>(&mut self, before: Option<&T>, now: &T, counter: impl Fn(&T) -> u64) -> f64 {
        self.delta(before, now, counter) as f64 / self.seconds()
    }

    fn rates(&mut self, before: Option<&DiskState>, now: &DiskState) -> DiskRates {
        let (was, is) = (before.map(|before| &before.requests), &now.requests);
        let kinds = [
            self.kind(was.map(|was| &was.read), &is.read),
            self.kind(was.map(|was| &was.write), &is.write),
            self.kind(was.map(|was| &was.flush), &is.flush),
            self.kind(was.map(|was| &was.discard), &is.discard),
            self.kind(was.map(|was| &was.write_zeroes), &is.write_zeroes),
        ];
        let [read, write, flush, discard, write_zeroes] = kinds;
        let busy = self.delta(was, is, |it| it.busy_ns) as f64 / self.time_ns as f64;
        let cache = now.cache.as_ref().map(|cache| {
            let before = before.and_then(|before| before.cache.as_ref());
            // The counters of a new cache start at zero.
            (before.filter(|before| before.file == cache.file), cache)
        });
        let ahead = now.prefetch.as_ref().map(|ahead| {
            let before = before.and_then(|before| before.prefetch.as_ref());
            (before, ahead)
        });
        let prefetch = ahead.map(|(was, is)| PrefetchRates {
            fetched: self.rate(was, is, |it| it.fetched),
            used: self.rate(was, is, |it| it.used),
            wasted: self.rate(was, is, |it| it.wasted),
        });
        let disk = match cache {
            Some((was, is)) => self.rate(was, is, |it| it.disk_read),
            None => {
                let unused_prefetch = prefetch.map_or(0.0, |ahead| ahead.fetched - ahead.used);
                (read.bytes_per_second + unused_prefetch).max(0.0)
            }
        };
        DiskRates {
            interval: self.seconds(),
            read,
            write,
            flush,
            discard,
            write_zeroes,
            // Little's law.
            queue: kinds.iter().map(|kind| kind.per_second * kind.await_seconds.unwrap_or_default()).sum(),
            utilization: busy.min(1.0),
            cache_hits: cache.and_then(|(was, is)| self.cache_hits(was, is)),
            prefetch_hits: ahead.and_then(|(was, is)| self.prefetch_hits(was, is)),
            tiers: TierRates {
                memory: prefetch.map(|ahead| ahead.used),
                cache: cache.map(|(was, is)| self.rate(was, is, |it| it.hit_bytes)),
                disk,
            },
            prefetch,
            cache: cache.map(|(was, is)| CacheRates {
                written: self.rate(was, is, |it| it.cache_written),
                cleaned: self.rate(was, is, |it| it.cleaned),
                filled: self.rate(was, is, |it| it.filled),
            }),
        }
    }

    fn kind(&mut self, before: Option<&RequestCounts>, now: &RequestCounts) -> RequestRates {
        let times = match before {
            Some(before) => {
                let times = now.latency.since(&before.latency);
                self.is_monotonic &= times.is_some();
                times.unwrap_or_default()
            }
            None => now.latency.clone(),
        };
        let seconds = |time: std::time::Duration| time.as_secs_f64();
        let (count, bytes) = (self.delta(before, now, |it| it.count), self.delta(before, now, |it| it.bytes));
        RequestRates {
            per_second: count as f64 / self.seconds(),
            bytes_per_second: bytes as f64 / self.seconds(),
            errors_per_second: self.rate(before, now, |it| it.errors),
            await_seconds: times.mean().map(seconds),
            p50_seconds: times.quantile(0.5).map(seconds),
            p99_seconds: times.quantile(0.99).map(seconds),
            bytes: (count > 0).then(|| bytes as f64 / count as f64),
        }
    }

    fn cache_hits(&mut self, before: Option<&CacheState>, now: &CacheState) -> Option<f64> {
        let hits = self.delta(before, now, |it| it.hits);
        let rest_count = self.delta(before, now, |it| it.partial_hits + it.misses + it.bypassed_slow);
        fraction(hits, rest_count)
    }

    fn prefetch_hits(&mut self, before: Option<&PrefetchState>, now: &PrefetchState) -> Option<f64> {
        let hits = self.delta(before, now, |it| it.hits + it.waits);
        let other_reads = self.delta(before, now, |it| it.partial_hits + it.misses + it.bypassed);
        fraction(hits, other_reads)
    }
}

fn fraction(part: u64, others: u64) -> Option<f64> {
    let all = part.saturating_add(others);
    (all > 0).then(|| part as f64 / all as f64)
}

impl Latency {
    /// Returns the latencies since `before`; `None` if that is not an earlier state of the same counters.
    pub fn since(&self, before: &Self) -> Option<Self> {
        let mut old = before.buckets.iter().peekable();
        let mut buckets = Vec::with_capacity(self.buckets.len());
        // Buckets are sorted, and none disappears.
        for bucket in &self.buckets {
            let was = old.next_if(|old| old.below_ns == bucket.below_ns);
            let count = bucket.count.checked_sub(was.map_or(0, |old| old.count))?;
            if count > 0 {
                let below_ns = bucket.below_ns;
                buckets.push(LatencyBucket { below_ns, count });
            }
        }
        match old.peek() {
            Some(_) => None,
            None => Some(Self {
                count: self.count.checked_sub(before.count)?,
                sum_ns: self.sum_ns.checked_sub(before.sum_ns)?,
                max_ns: self.max_ns,
                buckets,
            }),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns a disk after `reads` reads of 4 KiB in `seconds` s, half of them in less than 1 µs, the others in less
    /// than 2 µs.
    fn disk(seconds: u64, reads: u64) -> DiskState {
        let none = json!({"count": 0, "bytes": 0, "errors": 0,
                          "latency": {"count": 0, "sum_ns": 0, "max_ns": 0, "buckets": []}});
        let latency = json!({"count": reads, "sum_ns": reads * 1000, "max_ns": 2000, "buckets": [
            {"below_ns": 1024, "count": reads / 2}, {"below_ns": 2048, "count": reads - reads / 2}]});
        let state = json!({
            "image": "x", "format": "raw", "size": 1, "block_size": 512, "read_only": false,
            "time_ns": seconds * 1_000_000_000, "exports": {"vhost_user": null, "nbd": null},
            "requests": {"read": {"count": reads, "bytes": reads * 4096, "errors": 0, "latency": latency},
                         "write": none, "flush": none, "discard": none, "write_zeroes": none,
                         "under_way": 0, "busy_ns": seconds * 500_000_000},
            "limits": {}, "prefetch": null
        });
        serde_json::from_value(state).expect("a disk")
    }

    #[test]
    fn rates_are_differences_of_two_samples() {
        let rates = DiskRates::between(&disk(10, 1000), &disk(12, 5000)).expect("time has passed");
        assert_eq!((rates.interval, rates.read.per_second), (2.0, 2000.0));
        assert_eq!(rates.read.bytes_per_second, 2000.0 * 4096.0);
        assert_eq!((rates.read.p50_seconds, rates.read.p99_seconds), (Some(1.024e-6), Some(2e-6)));
        assert_eq!((rates.read.await_seconds, rates.read.bytes), (Some(1e-6), Some(4096.0)));
        assert_eq!((rates.write.per_second, rates.write.p99_seconds), (0.0, None));
        assert_eq!((rates.utilization, rates.tiers.disk), (0.5, rates.read.bytes_per_second));
        assert_eq!(rates.queue, 2000.0 * 1e-6);
        assert_eq!(DiskRates::since_start(&disk(10, 1000)).read.per_second, 100.0);
    }

    #[test]
    fn restarted_server_has_no_rates() {
        assert_eq!(DiskRates::between(&disk(10, 1000), &disk(2, 10)), None);
        assert_eq!(DiskRates::between(&disk(10, 1000), &disk(12, 10)), None);
        assert_eq!(DiskRates::between(&disk(10, 1000), &disk(10, 1000)), None);
    }
}
