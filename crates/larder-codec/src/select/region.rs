//! Deviation of a region's compressibility from that of its pages' class.
//!
//! The logarithms of the ratios are compared. In this sense a region that compresses twice as well as its class
//! leaves 25 % where the class leaves 50, and 96 % where it leaves 98: incompressible pages stay incompressible,
//! whatever other pages are near.

use super::BatchEncoding;
use crate::PAGE;

/// Deviations of a region from its class: base-2 logarithms of the quotient of both log ratios; 0 means none.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RegionDeviation {
    key: u64,
    /// Deviation with every way.
    common: f32,
    /// Additional deviation with each way.
    per_encoding: [f32; BatchEncoding::COUNT],
}

/// Largest deviation: 16 times better or worse than the class.
const LOG_MAX: f32 = 4.0;
/// Shares of a new deviation that are attributed to all methods, and to its own method.
const COMMON_SHARE: f32 = 0.2;
const ENCODING_SHARE: f32 = 0.3;
/// Shares of a region's deviations that are expected of the next region. They are smaller than 1 because a part of a
/// deviation is chance, and a method that is no longer picked gets no further results that would correct it.
const NEIGHBOUR_COMMON: f32 = 0.75;
const NEIGHBOUR_ENCODING: f32 = 0.5;
/// Factor by which a method's own deviation decays with each batch, so that the method is tried again in time.
const DECAY_FACTOR: f32 = 1.0 - 1.0 / 32.0;
/// Logarithm assigned to the ratio of incompressible data; greater than 0, so that ratios can be compared.
const LOG_RATIO_MIN: f32 = 0.01;

/// Returns the logarithm of the ratio of pages that are reduced to `bytes` bytes each, at least [`LOG_RATIO_MIN`].
fn log_ratio(bytes: f32) -> f32 {
    LOG_RATIO_MIN + (PAGE as f32 / bytes.clamp(1.0, PAGE as f32)).ln()
}

impl RegionDeviation {
    /// Empty slot. Its key belongs to no region, because keys are region numbers plus one.
    const EMPTY: Self = Self { key: 0, common: 0.0, per_encoding: [0.0; BatchEncoding::COUNT] };

    /// Returns the initial deviations of the next region.
    fn next(&self, key: u64) -> Self {
        Self {
            key,
            common: self.common * NEIGHBOUR_COMMON,
            per_encoding: self.per_encoding.map(|own| own * NEIGHBOUR_ENCODING),
        }
    }

    /// Returns the expected encoded bytes of a page of this region with the encoding of index `encoding`, where the
    /// class has `bytes`.
    pub(super) fn expected_bytes(&self, encoding: usize, bytes: f32) -> f32 {
        let factor = (self.common + self.per_encoding[encoding]).exp2();
        (PAGE as f32 * (LOG_RATIO_MIN - log_ratio(bytes) * factor).exp()).clamp(1.0, PAGE as f32)
    }

    /// Records that pages were reduced to `bytes` each, where the class had `expected`.
    pub(super) fn record(&mut self, encoding: usize, expected: f32, bytes: f32) {
        let deviation = (log_ratio(bytes) / log_ratio(self.expected_bytes(encoding, expected))).log2();
        self.common = (self.common + COMMON_SHARE * deviation).clamp(-LOG_MAX, LOG_MAX);
        for own in &mut self.per_encoding {
            *own *= DECAY_FACTOR;
        }
        let encoding_deviation = &mut self.per_encoding[encoding];
        *encoding_deviation = (*encoding_deviation + ENCODING_SHARE * deviation).clamp(-LOG_MAX, LOG_MAX);
    }
}

/// Table of regions, of a fixed size.
pub(super) struct RegionTable(Vec<RegionDeviation>);

impl RegionTable {
    pub(super) fn new(regions_max: usize) -> Self {
        Self(vec![RegionDeviation::EMPTY; regions_max.max(1).next_power_of_two()])
    }

    /// Returns the region of this number. A region without a slot replaces the one in the slot of its remainder, and
    /// starts from the region before it.
    pub(super) fn get_or_insert(&mut self, number: u64) -> &mut RegionDeviation {
        let key = number.wrapping_add(1).max(1);
        let slot = self.slot_of(key);
        if self.0[slot].key != key {
            let previous = self.0[self.slot_of(key - 1)];
            let before = if previous.key == key - 1 { previous } else { RegionDeviation::EMPTY };
            self.0[slot] = before.next(key);
        }
        &mut self.0[slot]
    }

    fn slot_of(&self, key: u64) -> usize {
        (key & (self.0.len() as u64 - 1)) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::Method;

    const LZ4: usize = BatchEncoding::Cpu(Method::Lz4).index();
    const ZSTD: usize = BatchEncoding::Cpu(Method::Zstd).index();

    /// A region keeps its deviations, and the next region starts from a part of them.
    #[test]
    fn next_region_inherits_deviations() {
        let mut regions = RegionTable::new(16);
        for _ in 0..50 {
            regions.get_or_insert(3).record(LZ4, 2048.0, 1024.0);
        }
        let bytes_of = |regions: &mut RegionTable, number| regions.get_or_insert(number).expected_bytes(LZ4, 2048.0);
        assert!(bytes_of(&mut regions, 3) < 1200.0);
        assert!(bytes_of(&mut regions, 4) < 1500.0);
        // A deviation with one method applies in part to the others, and not to incompressible data.
        let other = regions.get_or_insert(4).expected_bytes(ZSTD, 2048.0);
        assert!(other > 1200.0 && other < 1900.0, "{other}");
        assert!(regions.get_or_insert(3).expected_bytes(LZ4, PAGE as f32) > 0.97 * PAGE as f32);
        assert!((bytes_of(&mut regions, 7) - 2048.0).abs() < 1.0);
        // 19 shares the slot of 3.
        assert!((bytes_of(&mut regions, 19) - 2048.0).abs() < 1.0);
        assert!((bytes_of(&mut regions, 3) - 2048.0).abs() < 1.0);
    }

    #[test]
    fn extreme_numbers_and_records_are_tolerated() {
        let mut regions = RegionTable::new(0);
        for number in [0, 1, u64::MAX - 1, u64::MAX] {
            for bytes in [1.0, PAGE as f32] {
                for _ in 0..100 {
                    regions.get_or_insert(number).record(ZSTD, 1.0, bytes);
                    regions.get_or_insert(number).record(LZ4, PAGE as f32, bytes);
                }
                let bytes = regions.get_or_insert(number).expected_bytes(ZSTD, 100.0);
                assert!(bytes.is_finite() && bytes > 0.0 && bytes <= PAGE as f32);
            }
        }
    }
}
