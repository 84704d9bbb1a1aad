//! What a disk did between two looks at it.

use larder_vm::control::state::{CacheState, DiskState, Latency, LatencyBucket, PrefetchState, RequestCounts};
use serde::Serialize;

/// Of one disk; all `_s` are per second, times are in seconds, ratios from 0 to 1, and `None` where there was nothing to
/// take them of.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Rates {
    /// The time between the two looks.
    pub(crate) seconds: f64,
    pub(crate) read: KindRates,
    pub(crate) write: KindRates,
    pub(crate) flush: KindRates,
    pub(crate) discard: KindRates,
    pub(crate) write_zeroes: KindRates,
    /// The share of the time in which there were requests under way.
    pub(crate) busy: f64,
    /// Reads that the cache had all of, of those that came to it.
    pub(crate) cache_hit_ratio: Option<f64>,
    /// Reads that found all or a part of their bytes read ahead, of those short enough.
    pub(crate) prefetch_hit_ratio: Option<f64>,
    /// Bytes for guests from memory, and from the cache; bytes from the disk for whatever reason.
    pub(crate) tiers: Tiers,
    pub(crate) prefetch: Option<PrefetchRates>,
    /// Bytes written to the cache's device, from the cache to the disk, and brought in.
    pub(crate) cache: Option<CacheRates>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct KindRates {
    pub(crate) requests_s: f64,
    pub(crate) bytes_s: f64,
    pub(crate) errors_s: f64,
    pub(crate) mean: Option<f64>,
    pub(crate) p50: Option<f64>,
    pub(crate) p99: Option<f64>,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Tiers {
    pub(crate) memory_s: Option<f64>,
    pub(crate) cache_s: Option<f64>,
    pub(crate) disk_s: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct PrefetchRates {
    pub(crate) fetched_s: f64,
    pub(crate) used_s: f64,
    pub(crate) wasted_s: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct CacheRates {
    pub(crate) written_s: f64,
    pub(crate) cleaned_s: f64,
    pub(crate) filled_s: f64,
}

/// What was counted in between; `None` once a count has gone down, which a new server's do.
struct Between {
    seconds: f64,
    is_one: bool,
}

impl Between {
    fn count(&mut self, before: u64, now: u64) -> u64 {
        self.is_one &= now >= before;
        now.saturating_sub(before)
    }

    fn rate(&mut self, before: u64, now: u64) -> f64 {
        self.count(before, now) as f64 / self.seconds
    }

    fn kind(&mut self, before: &RequestCounts, now: &RequestCounts) -> KindRates {
        let times = self.latency(&before.latency, &now.latency);
        let seconds = |time: std::time::Duration| time.as_secs_f64();
        KindRates {
            requests_s: self.rate(before.count, now.count),
            bytes_s: self.rate(before.bytes, now.bytes),
            errors_s: self.rate(before.errors, now.errors),
            mean: times.mean().map(seconds),
            p50: times.quantile(0.5).map(seconds),
            p99: times.quantile(0.99).map(seconds),
        }
    }

    fn latency(&mut self, before: &Latency, now: &Latency) -> Latency {
        let mut old = before.buckets.iter().peekable();
        let mut buckets = Vec::with_capacity(now.buckets.len());
        // Buckets are in order, and none goes away.
        for bucket in &now.buckets {
            let was = old.next_if(|old| old.below_ns == bucket.below_ns);
            let count = self.count(was.map_or(0, |old| old.count), bucket.count);
            if count > 0 {
                buckets.push(LatencyBucket {
                    below_ns: bucket.below_ns,
                    count,
                });
            }
        }
        self.is_one &= old.peek().is_none();
        Latency {
            count: self.count(before.count, now.count),
            sum_ns: self.count(before.sum_ns, now.sum_ns),
            max_ns: now.max_ns,
            buckets,
        }
    }

    fn prefetch(&mut self, before: &PrefetchState, now: &PrefetchState) -> PrefetchRates {
        PrefetchRates {
            fetched_s: self.rate(before.fetched, now.fetched),
            used_s: self.rate(before.used, now.used),
            wasted_s: self.rate(before.wasted, now.wasted),
        }
    }

    fn prefetch_hits(&mut self, before: &PrefetchState, now: &PrefetchState) -> Option<f64> {
        let hits = self.count(before.hits, now.hits)
            + self.count(before.waits, now.waits)
            + self.count(before.partial_hits, now.partial_hits);
        ratio(hits, self.count(before.misses, now.misses))
    }

    fn cache_hits(&mut self, before: &CacheState, now: &CacheState) -> Option<f64> {
        let others = self.count(before.partial_hits, now.partial_hits)
            + self.count(before.misses, now.misses)
            + self.count(before.bypassed_slow, now.bypassed_slow);
        ratio(self.count(before.hits, now.hits), others)
    }
}

fn ratio(part: u64, others: u64) -> Option<f64> {
    let all = part.saturating_add(others);
    (all > 0).then(|| part as f64 / all as f64)
}

impl Rates {
    /// What a disk did, if both are of one server and there is time in between.
    pub(crate) fn between(before: &DiskState, now: &DiskState) -> Option<Self> {
        let time = now.time_ns.checked_sub(before.time_ns).filter(|time| *time > 0)?;
        let mut of = Between {
            seconds: time as f64 / 1e9,
            is_one: true,
        };
        let (was, is) = (&before.requests, &now.requests);
        let read = of.kind(&was.read, &is.read);
        let prefetch = before.prefetch.as_ref().zip(now.prefetch.as_ref());
        // Another cache counts anew.
        let cache = before.cache.as_ref().zip(now.cache.as_ref());
        let cache = cache.filter(|(was, is)| was.file == is.file);
        let ahead = prefetch.map(|(was, is)| of.prefetch(was, is));
        let memory_s = ahead.as_ref().map(|ahead| ahead.used_s);
        let cache_s = cache.map(|(was, is)| of.rate(was.hit_bytes, is.hit_bytes));
        let disk_s = match cache {
            Some((was, is)) => of.rate(was.disk_read, is.disk_read),
            None => (read.bytes_s + ahead.as_ref().map_or(0.0, |ahead| ahead.fetched_s - ahead.used_s)).max(0.0),
        };
        let rates = Self {
            seconds: of.seconds,
            write: of.kind(&was.write, &is.write),
            flush: of.kind(&was.flush, &is.flush),
            discard: of.kind(&was.discard, &is.discard),
            write_zeroes: of.kind(&was.write_zeroes, &is.write_zeroes),
            busy: of.count(was.busy_ns, is.busy_ns) as f64 / time as f64,
            cache_hit_ratio: cache.and_then(|(was, is)| of.cache_hits(was, is)),
            prefetch_hit_ratio: prefetch.and_then(|(was, is)| of.prefetch_hits(was, is)),
            tiers: Tiers {
                memory_s,
                cache_s,
                disk_s,
            },
            prefetch: ahead,
            cache: cache.map(|(was, is)| CacheRates {
                written_s: of.rate(was.cache_written, is.cache_written),
                cleaned_s: of.rate(was.cleaned, is.cleaned),
                filled_s: of.rate(was.filled, is.filled),
            }),
            read,
        };
        of.is_one.then_some(rates)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// A disk after `reads` reads of 4 KiB in `seconds` s, half of them in less than 1 µs, the others in less than 2 µs.
    pub(crate) fn disk(seconds: u64, reads: u64) -> DiskState {
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
    fn rates_are_those_between_two_looks() {
        let rates = Rates::between(&disk(10, 1000), &disk(12, 5000)).expect("time has passed");
        assert_eq!(rates.read.requests_s, 2000.0);
        assert_eq!(rates.read.bytes_s, 2000.0 * 4096.0);
        assert_eq!((rates.read.p50, rates.read.p99), (Some(1.024e-6), Some(2e-6)));
        assert_eq!(rates.read.mean, Some(1e-6));
        assert_eq!((rates.write.requests_s, rates.write.p99), (0.0, None));
        assert_eq!((rates.busy, rates.tiers.disk_s), (0.5, rates.read.bytes_s));
    }

    #[test]
    fn a_server_that_was_started_anew_has_no_rates() {
        assert_eq!(Rates::between(&disk(10, 1000), &disk(2, 10)), None);
        assert_eq!(Rates::between(&disk(10, 1000), &disk(12, 10)), None);
        assert_eq!(Rates::between(&disk(10, 1000), &disk(10, 1000)), None);
    }
}
