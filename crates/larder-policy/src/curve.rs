//! Miss-ratio curve: the estimated miss ratio of an LRU cache of every size, computed online in constant memory.
//!
//! SHARDS of fixed size (Waldspurger, Park, Garthwaite and Ahmad, "Efficient MRC Construction with SHARDS", FAST 15):
//! the sample consists of the lines whose hash is below a threshold, which is lowered whenever there are too many.
//! The reuse distance of a line is the number of other sampled lines used since its last use; divided by the sampled
//! share, it is the size of the smallest cache that would have kept the line. Counts under an earlier threshold are
//! scaled down with the threshold. A surplus or lack of sampled uses is corrected at distance 0 (the paper's
//! SHARDS-adj).

use std::collections::{BinaryHeap, HashMap};

use crate::hash::mix;

/// Default number of sampled lines.
pub const SAMPLE_DEFAULT: usize = 8 << 10;

/// Resolution of distances: an eighth of a power of two.
const BUCKETS_PER_POWER: usize = 8;
const DISTANCE_BUCKETS: usize = 48 * BUCKETS_PER_POWER;

/// Miss-ratio curve under construction. It takes some 64 bytes for each sampled line, and 3 KiB.
pub struct MissRatioCurve {
    /// Exclusive bound of the hashes of sampled lines.
    threshold: u64,
    sample: usize,
    /// Time of the last use of each sampled line, by its hash.
    last: HashMap<u64, u32>,
    hashes: BinaryHeap<u64>,
    /// Number of lines last used at each time: a Fenwick tree over times, which are renumbered when they run out.
    times: Vec<u32>,
    now: u32,
    /// Number of uses by distance, scaled to the present threshold.
    distances: Vec<f64>,
    first_uses: f64,
    uses: u64,
}

/// Point of a miss-ratio curve.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CurvePoint {
    /// Size of the cache, in lines.
    pub lines: u64,
    /// Share of uses that miss, 0 to 1.
    pub miss_ratio: f64,
}

impl MissRatioCurve {
    /// Creates a curve from a sample of `sample` lines, at least 16.
    pub fn new(sample: usize) -> Self {
        let sample = sample.max(16);
        Self {
            threshold: u64::MAX,
            sample,
            last: HashMap::with_capacity(sample + 1),
            hashes: BinaryHeap::with_capacity(sample + 1),
            times: vec![0; 4 * sample],
            now: 0,
            distances: vec![0.0; DISTANCE_BUCKETS],
            first_uses: 0.0,
            uses: 0,
        }
    }

    /// Records a use of a line.
    pub fn record_use(&mut self, line: u64) {
        self.uses += 1;
        let hash = mix(line);
        if hash < self.threshold {
            self.record_sampled(hash);
        }
    }

    fn record_sampled(&mut self, hash: u64) {
        if self.now as usize == self.times.len() {
            self.renumber();
        }
        match self.last.insert(hash, self.now) {
            Some(before) => {
                let since = self.last.len() as u64 - u64::from(self.used_until(before));
                self.add(before, -1);
                let share = self.share();
                self.distances[distance_bucket((since as f64 / share) as u64)] += 1.0;
            }
            None => {
                self.first_uses += 1.0;
                self.hashes.push(hash);
            }
        }
        self.add(self.now, 1);
        self.now += 1;
        while self.last.len() > self.sample {
            self.lower_threshold();
        }
    }

    /// Returns the sampled share of all lines.
    fn share(&self) -> f64 {
        self.threshold as f64 / u64::MAX as f64
    }

    /// Lowers the threshold, so that the lines with the highest hash leave the sample.
    fn lower_threshold(&mut self) {
        let Some(highest) = self.hashes.pop() else { return };
        if let Some(time) = self.last.remove(&highest) {
            self.add(time, -1);
        }
        let scale = highest as f64 / self.threshold as f64;
        self.distances.iter_mut().for_each(|count| *count *= scale);
        self.first_uses *= scale;
        self.threshold = highest;
    }

    /// Returns the number of lines last used at `time` or before.
    fn used_until(&self, time: u32) -> u32 {
        let mut sum = 0;
        let mut at = time as usize + 1;
        while at > 0 {
            sum += self.times[at - 1];
            at &= at - 1;
        }
        sum
    }

    fn add(&mut self, time: u32, count: i32) {
        let mut at = time as usize + 1;
        while at <= self.times.len() {
            self.times[at - 1] = self.times[at - 1].wrapping_add_signed(count);
            at += at & at.wrapping_neg();
        }
    }

    fn renumber(&mut self) {
        let mut order: Vec<(u32, u64)> = self.last.iter().map(|(hash, time)| (*time, *hash)).collect();
        order.sort_unstable();
        self.times.fill(0);
        self.now = 0;
        for (_, hash) in order {
            self.last.insert(hash, self.now);
            self.add(self.now, 1);
            self.now += 1;
        }
    }

    /// Returns the curve so far: a point for each size at which it falls, the largest last. Empty if no line was
    /// used.
    pub fn points(&self) -> Vec<CurvePoint> {
        let sampled = self.first_uses + self.distances.iter().sum::<f64>();
        let expected = self.uses as f64 * self.share();
        if expected == 0.0 {
            return Vec::new();
        }
        let mut hits = expected - sampled;
        let mut points = vec![CurvePoint { lines: 0, miss_ratio: 1.0 }];
        for (at, count) in self.distances.iter().enumerate() {
            hits += count;
            if *count > 0.0 {
                points.push(CurvePoint {
                    lines: bucket_cache_lines(at),
                    miss_ratio: (1.0 - hits / expected).clamp(0.0, 1.0),
                });
            }
        }
        points
    }

    /// Returns the miss ratio of a cache of `lines` lines, 0 to 1.
    pub fn miss_ratio(&self, lines: u64) -> f64 {
        CurvePoint::miss_ratio(&self.points(), lines)
    }
}

impl CurvePoint {
    /// Returns the miss ratio of a cache of `lines` lines, 0 to 1, from the points of a curve. Between two points it
    /// is that of the smaller size.
    pub fn miss_ratio(points: &[Self], lines: u64) -> f64 {
        let after = points.partition_point(|point| point.lines <= lines);
        let last = after.checked_sub(1).map(|index| points[index].miss_ratio);
        last.unwrap_or(1.0)
    }
}

/// Returns the index at which a distance is counted.
fn distance_bucket(distance: u64) -> usize {
    let parts = BUCKETS_PER_POWER as u64;
    if distance < parts {
        return distance as usize;
    }
    let power = distance.ilog2() - parts.ilog2();
    let within = (distance >> power) - parts;
    (((u64::from(power) + 1) * parts + within) as usize).min(DISTANCE_BUCKETS - 1)
}

/// Returns the size of the smallest cache that keeps all distances counted at an index: the highest distance plus
/// one.
fn bucket_cache_lines(index: usize) -> u64 {
    let (power, within) = (index / BUCKETS_PER_POWER, (index % BUCKETS_PER_POWER) as u64);
    match power {
        0 => within + 1,
        power => (BUCKETS_PER_POWER as u64 + within + 1) << (power - 1),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::{AccessOutcome, LineAccess, Lru, ReferenceCache};

    /// Returns the miss ratio of a real LRU cache.
    fn lru_misses(lines: &[u64], capacity: usize) -> f64 {
        let mut cache = Lru::new(capacity, 1 << 16);
        let missed = lines.iter().filter(|line| {
            let access = LineAccess { key: **line as u32, request_lines: 1, write: false, at_ms: 0 };
            cache.access(access) != AccessOutcome::Hit
        });
        missed.count() as f64 / lines.len() as f64
    }

    fn skewed(count: u64) -> Vec<u64> {
        let line = |at: u64| {
            let random = mix(at);
            (random >> 32) % (1 << (random % 17))
        };
        (0..count).map(line).collect()
    }

    /// The curve equals the miss ratios of a real LRU cache, and is close to them if only a sample is followed.
    #[test]
    fn curve_matches_real_lru() {
        let lines = skewed(400_000);
        let mut all = MissRatioCurve::new(1 << 17);
        let mut sampled = MissRatioCurve::new(2_048);
        for line in &lines {
            all.record_use(*line);
            sampled.record_use(*line);
        }
        assert!(sampled.last.len() <= 2_048 && sampled.threshold < u64::MAX);
        for capacity in [8, 64, 512, 1_000, 4_096, 20_000, 65_536] {
            let truth = lru_misses(&lines, capacity);
            let exact = all.miss_ratio(capacity as u64);
            let close = sampled.miss_ratio(capacity as u64);
            // Between powers of two the curve is less exact.
            let slack = if capacity.is_power_of_two() { 1e-9 } else { 0.01 };
            assert!((exact - truth).abs() <= slack, "{capacity}: {exact} for {truth}");
            // A sample is too small for caches that would keep none of it.
            let slack = if capacity < 512 { 1.0 } else { 0.03 };
            assert!((close - truth).abs() < slack, "{capacity}: {close}, sampled, for {truth}");
        }
    }

    /// The size at each index is one more than the highest distance counted there.
    #[test]
    fn sizes_bound_counted_distances() {
        let mut before = 0;
        for distance in 0..100_000u64 {
            let at = distance_bucket(distance);
            assert!(
                distance < bucket_cache_lines(at) && (at == 0 || distance >= bucket_cache_lines(at - 1)),
                "{distance}"
            );
            assert!(at >= before);
            before = at;
        }
        assert!(distance_bucket(u64::MAX) < DISTANCE_BUCKETS);
    }

    /// Without uses there are no points, and every cache misses.
    #[test]
    fn unused_curve_is_empty() {
        let curve = MissRatioCurve::new(100);
        assert!(curve.points().is_empty());
        assert_eq!(curve.miss_ratio(5), 1.0);
    }
}
