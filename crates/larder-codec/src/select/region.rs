//! By how much better or worse the pages of a region compress than those of their class.
//!
//! What is compared is the logarithm of the ratio, since a region that compresses twice as well as its class in this sense
//! leaves 25 % where the class leaves 50, and 96 % where it leaves 98: what does not compress stays so, whatever else lies
//! beside it.

use super::Way;
use crate::PAGE;

/// Logarithms of base 2; 0: as the class.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Region {
    key: u64,
    /// In any way.
    common: f32,
    /// By this one, beyond the common one.
    own: [f32; Way::COUNT],
}

/// 16 times better or worse than the class.
const LOG_MAX: f32 = 4.0;
/// What of a surprise is put down to all methods, and to its own.
const COMMON_SHARE: f32 = 0.2;
const OWN_SHARE: f32 = 0.3;
/// What of a region is to be expected of the next one: less of what was chance, of which a method that was not picked
/// any more has had no more.
const NEIGHBOUR_COMMON: f32 = 0.75;
const NEIGHBOUR_OWN: f32 = 0.5;
/// What is left of a method's own after each batch: in time it is tried again.
const KEPT: f32 = 1.0 - 1.0 / 32.0;
/// The logarithm of the ratio of what does not compress; more than 0, to be compared with.
const LEAST: f32 = 0.01;

/// Of pages that are left with so many bytes each, at least [`LEAST`].
fn log_ratio(bytes: f32) -> f32 {
    LEAST + (PAGE as f32 / bytes.clamp(1.0, PAGE as f32)).ln()
}

impl Region {
    /// Of no number that a region has: those are offset by one.
    const NEVER: Self = Self {
        key: 0,
        common: 0.0,
        own: [0.0; Way::COUNT],
    };

    /// What is known of the one after it.
    fn next(&self, key: u64) -> Self {
        Self {
            key,
            common: self.common * NEIGHBOUR_COMMON,
            own: self.own.map(|own| own * NEIGHBOUR_OWN),
        }
    }

    /// Bytes to expect of a page by the way of this index, where the class has `bytes`.
    pub(super) fn bytes_of(&self, way: usize, bytes: f32) -> f32 {
        let better = (self.common + self.own[way]).exp2();
        (PAGE as f32 * (LEAST - log_ratio(bytes) * better).exp()).clamp(1.0, PAGE as f32)
    }

    /// Hears of pages that were left with `bytes`, where the class had `expected`.
    pub(super) fn record(&mut self, way: usize, expected: f32, bytes: f32) {
        let surprise = (log_ratio(bytes) / log_ratio(self.bytes_of(way, expected))).log2();
        self.common = (self.common + COMMON_SHARE * surprise).clamp(-LOG_MAX, LOG_MAX);
        for own in &mut self.own {
            *own *= KEPT;
        }
        let own = &mut self.own[way];
        *own = (*own + OWN_SHARE * surprise).clamp(-LOG_MAX, LOG_MAX);
    }
}

/// A bounded table of them.
pub(super) struct Regions(Vec<Region>);

impl Regions {
    pub(super) fn new(regions_max: usize) -> Self {
        Self(vec![Region::NEVER; regions_max.max(1).next_power_of_two()])
    }

    /// The region of this number; if it has no place, it takes the one of its remainder and starts from the one before it.
    pub(super) fn of(&mut self, number: u64) -> &mut Region {
        let key = number.wrapping_add(1).max(1);
        let place = self.place(key);
        if self.0[place].key != key {
            let before = self.0[self.place(key - 1)];
            let before = if before.key == key - 1 { before } else { Region::NEVER };
            self.0[place] = before.next(key);
        }
        &mut self.0[place]
    }

    fn place(&self, key: u64) -> usize {
        (key & (self.0.len() as u64 - 1)) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::Method;

    const LZ4: usize = Way::Here(Method::Lz4).index();
    const ZSTD: usize = Way::Here(Method::Zstd).index();

    #[test]
    fn a_region_remembers_and_the_next_one_starts_from_it() {
        let mut regions = Regions::new(16);
        for _ in 0..50 {
            regions.of(3).record(LZ4, 2048.0, 1024.0);
        }
        let bytes_of = |regions: &mut Regions, number| regions.of(number).bytes_of(LZ4, 2048.0);
        assert!(bytes_of(&mut regions, 3) < 1200.0);
        assert!(bytes_of(&mut regions, 4) < 1500.0);
        // What holds for one method holds in part for the others, and not for what does not compress.
        let other = regions.of(4).bytes_of(ZSTD, 2048.0);
        assert!(other > 1200.0 && other < 1900.0, "{other}");
        assert!(regions.of(3).bytes_of(LZ4, PAGE as f32) > 0.97 * PAGE as f32);
        assert!((bytes_of(&mut regions, 7) - 2048.0).abs() < 1.0);
        // 19 has 3's place.
        assert!((bytes_of(&mut regions, 19) - 2048.0).abs() < 1.0);
        assert!((bytes_of(&mut regions, 3) - 2048.0).abs() < 1.0);
    }

    #[test]
    fn any_number_and_any_record_does() {
        let mut regions = Regions::new(0);
        for number in [0, 1, u64::MAX - 1, u64::MAX] {
            for bytes in [1.0, PAGE as f32] {
                for _ in 0..100 {
                    regions.of(number).record(ZSTD, 1.0, bytes);
                    regions.of(number).record(LZ4, PAGE as f32, bytes);
                }
                let bytes = regions.of(number).bytes_of(ZSTD, 100.0);
                assert!(bytes.is_finite() && bytes > 0.0 && bytes <= PAGE as f32);
            }
        }
    }
}
