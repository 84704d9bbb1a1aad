//! Rates of a VM's memory between two samples.

use serde::Serialize;

use super::memory::{FaultsState, MemoryState, SwapTier};
use super::state::Latency;

/// Rates of a VM's memory. Times are in seconds, sizes in bytes, fractions from 0 to 1; `None` means that there was
/// nothing to measure.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct MemoryRates {
    /// Time between the two samples.
    pub interval: f64,
    /// Faults on pages that had never been touched.
    pub zero: FaultRates,
    /// Faults on uniform pages, which repeat one word.
    pub uniform: FaultRates,
    /// Faults on compressed pages.
    pub compressed: FaultRates,
    /// Faults on pages that were read from a disk.
    pub disk: FaultRates,
    /// Write faults on pages that were being evicted.
    pub write: FaultRates,
    /// Refaults per second: pages that returned so soon that slightly more memory would have avoided their eviction.
    pub refaults: f64,
    /// Pages evicted per second.
    pub evicted: f64,
    /// Pages prefetched per second.
    pub ahead: f64,
    /// Fraction of the time in which some thread waited.
    pub some: f64,
    /// Fraction of the time in which all vCPUs waited.
    pub full: f64,
    /// Bytes per second written to the swap cache.
    pub swap_written: f64,
    /// Bytes per second read from the swap cache.
    pub swap_read: f64,
    /// Bytes per second written to the slow store.
    pub slow_written: f64,
    /// Bytes per second read from the slow store.
    pub slow_read: f64,
}

/// Rates of one kind of fault.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct FaultRates {
    /// Faults per second.
    pub per_second: f64,
    /// Mean latency.
    pub await_seconds: Option<f64>,
    /// Median latency.
    pub p50_seconds: Option<f64>,
    /// 99th percentile of the latency.
    pub p99_seconds: Option<f64>,
}

impl MemoryRates {
    /// Returns the rates since Larder attached to the memory.
    pub fn since_start(now: &MemoryState) -> Self {
        MemoryDelta::new(None, now, now.time_ns.max(1)).rates().unwrap_or_default()
    }

    /// Returns the rates between two samples; `None` if no time has passed, or the pager was restarted in between.
    pub fn between(before: &MemoryState, now: &MemoryState) -> Option<Self> {
        let time = now.time_ns.checked_sub(before.time_ns).filter(|time| *time > 0)?;
        MemoryDelta::new(Some(before), now, time).rates()
    }
}

/// Differences between two samples.
struct MemoryDelta<'a> {
    before: Option<&'a MemoryState>,
    now: &'a MemoryState,
    seconds: f64,
}

impl<'a> MemoryDelta<'a> {
    fn new(before: Option<&'a MemoryState>, now: &'a MemoryState, time_ns: u64) -> Self {
        let seconds = time_ns as f64 / 1e9;
        Self { before, now, seconds }
    }

    fn rate(&self, counter: impl Fn(&MemoryState) -> u64) -> Option<f64> {
        let before = self.before.map(&counter).unwrap_or_default();
        Some(counter(self.now).checked_sub(before)? as f64 / self.seconds)
    }

    fn faults(&self, counter: impl Fn(&FaultsState) -> &Latency) -> Option<FaultRates> {
        let now = counter(&self.now.faults);
        let new = match self.before {
            Some(before) => now.since(counter(&before.faults))?,
            None => now.clone(),
        };
        let quantile = |share| new.quantile(share).map(|time| time.as_secs_f64());
        Some(FaultRates {
            per_second: new.count as f64 / self.seconds,
            await_seconds: new.mean().map(|time| time.as_secs_f64()),
            p50_seconds: quantile(0.5),
            p99_seconds: quantile(0.99),
        })
    }

    fn rates(&self) -> Option<MemoryRates> {
        let share = |of: fn(&MemoryState) -> u64| Some((self.rate(of)? / 1e6).min(1.0));
        let disk = |tier: SwapTier, of: fn(&super::memory::SwapState) -> u64| {
            self.rate(|state| state.disks.iter().filter(|disk| disk.tier == tier).map(of).sum())
        };
        Some(MemoryRates {
            interval: self.seconds,
            zero: self.faults(|faults| &faults.zero)?,
            uniform: self.faults(|faults| &faults.uniform)?,
            compressed: self.faults(|faults| &faults.compressed)?,
            disk: self.faults(|faults| &faults.disk)?,
            write: self.faults(|faults| &faults.write)?,
            refaults: self.rate(|state| state.refaults)?,
            evicted: self.rate(|state| state.evicted_pages)?,
            ahead: self.rate(|state| state.ahead_pages)?,
            some: share(|state| state.pressure.some.total_us)?,
            full: share(|state| state.pressure.full.total_us)?,
            swap_written: disk(SwapTier::SwapCache, |disk| disk.written_bytes)?,
            swap_read: disk(SwapTier::SwapCache, |disk| disk.read_bytes)?,
            slow_written: disk(SwapTier::SlowStore, |disk| disk.written_bytes)?,
            slow_read: disk(SwapTier::SlowStore, |disk| disk.read_bytes)?,
        })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// Returns a sample after `seconds` s. In each second there were 100 faults of 10 µs on compressed pages, and 0.1
    /// s were lost.
    fn memory(seconds: u64) -> MemoryState {
        let none = json!({"count": 0, "sum_ns": 0, "max_ns": 0, "buckets": []});
        let count = seconds * 100;
        let faults = json!({"count": count, "sum_ns": count * 10_000, "max_ns": 10_000,
                            "buckets": [{"below_ns": 10_240, "count": count}]});
        let none_lost = json!({"avg10": 0.0, "avg60": 0.0, "avg300": 0.0, "total_us": 0});
        let lost = json!({"avg10": 10.0, "avg60": 10.0, "avg300": 10.0, "total_us": seconds * 100_000});
        let state = json!({
            "process": "x", "pid": 1, "time_ns": seconds * 1_000_000_000, "size": 1, "resident": 1, "budget": 1, "used": 1,
            "compressed": {"pages": 0, "used": 0, "limit": 0},
            "disks": [{"tier": "swap-cache", "name": "x", "pages": 0, "used": 0, "live": 0, "limit": 0,
                       "written_bytes": seconds * 4096, "read_bytes": 0, "failed": false}],
            "uniform_pages": 0, "lost_pages": 0,
            "faults": {"zero": none, "uniform": none, "compressed": faults, "disk": none, "write": none},
            "refaults": seconds * 5, "evicted_pages": 0, "evicted_clean_pages": 0, "evicted_uniform_pages": 0,
            "evicted_bytes": 0, "ahead_pages": 0, "ahead_zero_pages": 0, "streamed_faults": 0, "clean_pages": 0,
            "saved_pages": 0, "kept_pages": 0, "given_up_pages": 0, "stalled": 0,
            "pressure": {"some": lost, "full": none_lost}, "problem": null, "detaching": false
        });
        serde_json::from_value(state).expect("memory")
    }

    #[test]
    fn rates_are_differences_of_two_samples() {
        let rates = MemoryRates::between(&memory(10), &memory(14)).expect("time has passed");
        assert_eq!((rates.interval, rates.compressed.per_second), (4.0, 100.0));
        assert_eq!(rates.compressed.await_seconds, Some(10e-6));
        assert_eq!(rates.compressed.p99_seconds, Some(10e-6));
        assert_eq!((rates.disk.per_second, rates.disk.p50_seconds), (0.0, None));
        assert_eq!((rates.some, rates.full, rates.refaults), (0.1, 0.0, 5.0));
        assert_eq!((rates.swap_written, rates.slow_written), (4096.0, 0.0));
        assert_eq!(MemoryRates::since_start(&memory(10)).compressed.per_second, 100.0);
    }

    #[test]
    fn restarted_pager_has_no_rates() {
        assert_eq!(MemoryRates::between(&memory(10), &memory(2)), None);
        assert_eq!(MemoryRates::between(&memory(10), &memory(10)), None);
        let mut anew = memory(12);
        anew.refaults = 1;
        assert_eq!(MemoryRates::between(&memory(10), &anew), None);
    }
}
