//! Classification of pages from a sample.

use super::Way;
use crate::PAGE;
use crate::batch::Method;

/// Class of similar batches. It depends on how evenly their bytes are distributed over the 256 values, and on whether
/// their words grow, grow by a constant step, or repeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Class(u8);

/// Number of 64-byte lines in a sample.
const LINES: usize = 32;
const LINE: usize = 64;
const SAMPLE: usize = LINES * LINE;
/// Number of entropy levels: whole bits, 0 to 7.
const SPREADS: u8 = 8;
/// Entropy of a byte, in bits, from which every method leaves at least three quarters of a page.
const DENSE: u8 = 6;
/// Expected nanoseconds per byte of a thread that hands a batch to a device.
const DEVICE_NS: f32 = 0.05;

impl Class {
    /// Number of classes.
    pub const COUNT: usize = 4 * SPREADS as usize;

    pub(super) fn all() -> impl Iterator<Item = Self> {
        (0..Self::COUNT as u8).map(Self)
    }

    /// Returns whether every method is expected to leave most of the data, because its bytes are distributed nearly
    /// at random.
    #[must_use]
    pub const fn is_dense(self) -> bool {
        self.0 < SPREADS && self.0 >= DENSE
    }

    /// Returns whether the best method is expected to leave at most 1/32 of the data.
    #[must_use]
    pub const fn is_slight(self) -> bool {
        matches!(self.0 / SPREADS, 2 | 3) || self.0 == 0
    }

    /// Describes the pages of the class, for people.
    #[must_use]
    pub fn words(self) -> String {
        let bits = self.0 % SPREADS;
        let spread = format!("{bits} to {} bits per byte", bits + 1);
        match self.0 / SPREADS {
            0 => spread,
            1 => format!("growing words, {spread}"),
            2 => format!("counting words, {spread}"),
            _ => format!("repeated words, {spread}"),
        }
    }

    pub(super) const fn index(self) -> usize {
        self.0 as usize
    }

    /// Classifies the pages of `runs`, whose format is that of [`crate::batch::Encoder::encode`]. It reads 32 lines,
    /// spaced as far apart as possible, which takes about 2 us. Without pages the class is that of zeros.
    #[must_use]
    pub fn of<R: AsRef<[u8]>>(runs: &[R]) -> Self {
        let lines: usize = runs.iter().map(|run| run.as_ref().len() / LINE).sum();
        let mut counts = [0u16; 256];
        let mut of_words = [0usize; 4];
        let mut taken = 0;
        // Lines of the earlier runs.
        let mut lines_before = 0;
        for run in runs.iter().map(|run| run.as_ref().as_chunks::<LINE>().0) {
            while taken < LINES.min(lines) {
                // The position within pages varies, because many pages begin with a header.
                let at = (taken * lines / LINES + taken * 7 % (lines / LINES).clamp(1, PAGE / LINE)).min(lines - 1);
                let Some(line) = at.checked_sub(lines_before).and_then(|at| run.get(at)) else {
                    break;
                };
                for &byte in line {
                    counts[usize::from(byte)] += 1;
                }
                of_words[usize::from(words(line))] += 1;
                taken += 1;
            }
            lines_before += run.len();
        }
        let [_, growing, counting, repeating] = of_words;
        let most = |lines: usize| lines * 2 > taken;
        let of_words = if most(repeating) {
            3
        } else if most(counting) {
            2
        } else {
            u8::from(most(growing + counting))
        };
        Self(spread(&counts, taken * LINE) + SPREADS * of_words)
    }

    /// Returns the expected remaining share of each byte, and the nanoseconds for it, with the way of this index:
    /// measured by `examples/batches` on memory of the class. A device is expected to take nearly no time, so that it
    /// is tried soon.
    pub(super) fn expected(self, way: usize) -> (f32, f32) {
        // Order of the methods: lz4, lz4-fast, words-lz4, zstd-fast, zstd and deflate.
        const OF_SPREAD: [[(f32, f32); Method::COUNT]; SPREADS as usize] = [
            // Nearly all zeros.
            [
                (0.03, 0.15),
                (0.03, 0.11),
                (0.13, 0.50),
                (0.025, 0.15),
                (0.02, 0.25),
                (0.03, 0.21),
            ],
            [
                (0.2, 0.6),
                (0.23, 0.5),
                (0.4, 0.9),
                (0.2, 0.8),
                (0.15, 1.0),
                (0.17, 0.9),
            ],
            // Heaps.
            [
                (0.47, 1.9),
                (0.49, 1.8),
                (0.9, 1.1),
                (0.48, 2.1),
                (0.35, 3.0),
                (0.37, 2.1),
            ],
            // Text, programs.
            [
                (0.55, 1.5),
                (0.65, 1.2),
                (0.9, 0.5),
                (0.53, 1.9),
                (0.37, 2.4),
                (0.4, 2.1),
            ],
            // Text, records.
            [
                (0.4, 1.4),
                (0.45, 1.1),
                (0.97, 0.7),
                (0.4, 1.6),
                (0.25, 2.0),
                (0.27, 1.6),
            ],
            [(0.6, 1.4), (0.7, 1.0), (1.0, 0.5), (0.6, 1.5), (0.5, 2.0), (0.5, 2.0)],
            // Base64, dense programs.
            [
                (0.97, 0.5),
                (0.99, 0.3),
                (1.0, 0.2),
                (0.97, 0.5),
                (0.77, 1.2),
                (0.75, 1.5),
            ],
            // Compressed or encrypted data.
            [
                (1.0, 0.08),
                (1.0, 0.08),
                (1.0, 0.2),
                (1.0, 0.12),
                (1.0, 0.15),
                (1.0, 0.55),
            ],
        ];
        const GROWING: [(f32, f32); Method::COUNT] = [
            (0.52, 1.1),
            (0.52, 1.1),
            (0.13, 0.24),
            (0.41, 1.9),
            (0.17, 1.8),
            (0.23, 1.5),
        ];
        const COUNTING: [(f32, f32); Method::COUNT] = [
            (0.51, 0.9),
            (0.51, 0.9),
            (0.005, 0.16),
            (0.3, 1.8),
            (0.11, 1.8),
            (0.17, 1.2),
        ];
        const REPEATING: [(f32, f32); Method::COUNT] = [
            (0.007, 0.04),
            (0.007, 0.04),
            (0.014, 0.15),
            (0.007, 0.08),
            (0.003, 0.08),
            (0.03, 0.10),
        ];
        let of_spread = &OF_SPREAD[usize::from(self.0 % SPREADS)];
        let of_methods = [of_spread, &GROWING, &COUNTING, &REPEATING][usize::from(self.0 / SPREADS)];
        match of_methods.get(way) {
            Some(expected) => *expected,
            None => (of_methods[Way::Device.method().index()].0, DEVICE_NS),
        }
    }
}

/// Returns the collision entropy of `sampled` bytes in whole bits, 0 to 7. It follows from the probability that two
/// random bytes are equal.
fn spread(counts: &[u16; 256], sampled: usize) -> u8 {
    const _: () = assert!(SAMPLE <= u16::MAX as usize);
    let pairs: u64 = counts.iter().map(|&count| u64::from(count).pow(2)).sum();
    // Each byte equals itself, which has no significance.
    let equal = pairs.saturating_sub(sampled as u64).max(1);
    let all = (sampled as u64).pow(2).max(1);
    // The slight increase keeps random deviations from reducing a whole number of bits, such as that of base64.
    let bits = ((all + all / 16) / equal).max(1).ilog2();
    bits.min(u32::from(SPREADS) - 1) as u8
}

/// Classifies the majority of the 64-bit words of a line: 3 if a word equals the previous word and is not 0; 2 if its
/// difference to the previous word equals the previous difference and is not 0; 1 if that holds, or if the difference
/// is from 1 to 65,535; otherwise 0.
fn words(line: &[u8; LINE]) -> u8 {
    let words: [u64; LINE / 8] = std::array::from_fn(|at| u64::from_le_bytes(line.as_chunks().0[at]));
    let mut differences = words.windows(2).map(|two| two[1].wrapping_sub(two[0]));
    let mut before = differences.next().unwrap_or(0);
    let (mut growing, mut counting) = (0, 0);
    for difference in differences.by_ref() {
        let same = difference != 0 && difference == before;
        growing += usize::from(same || (1..1 << 16).contains(&difference));
        counting += usize::from(same);
        before = difference;
    }
    let repeating = words.windows(2).filter(|two| two[0] == two[1] && two[0] != 0).count();
    let most = |count: usize| count > words.len() / 2;
    if most(repeating) {
        3
    } else if most(counting) {
        2
    } else {
        u8::from(most(growing))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::BATCH_BYTES;
    use crate::measure::Kind;

    fn classes(kind: Kind) -> Vec<Class> {
        let memory = kind.memory(16 * BATCH_BYTES, 5);
        memory.chunks(BATCH_BYTES).map(|batch| Class::of(&[batch])).collect()
    }

    #[test]
    fn differently_compressing_memory_differs_in_class() {
        let one = |kind: Kind| {
            let classes = classes(kind);
            assert!(
                classes.iter().all(|class| *class == classes[0]),
                "{kind:?}: {classes:?}"
            );
            classes[0]
        };
        assert_eq!(one(Kind::Random), Class(7));
        assert!(one(Kind::Random).is_dense() && !one(Kind::Sparse).is_dense());
        assert_eq!(one(Kind::Base64), Class(6));
        assert_eq!(one(Kind::Sparse), Class(0));
        assert_eq!(one(Kind::Counter).0 / SPREADS, 2);
        assert!(classes(Kind::Filled).iter().all(|class| class.0 / SPREADS == 3));
        let mut slight = Kind::ALL.to_vec();
        slight.retain(|&kind| classes(kind).iter().all(|class| class.is_slight()));
        assert_eq!(slight, [Kind::Zeros, Kind::Filled, Kind::Sparse, Kind::Counter]);
        assert!(classes(Kind::Sequence).iter().all(|class| class.0 / SPREADS == 1));
        assert!(one(Kind::Heap).0 < 4);
    }

    #[test]
    fn class_does_not_depend_on_runs() {
        let memory = Kind::Mixed.memory(BATCH_BYTES, 9);
        for pages in 1..=64 {
            let batch = &memory[..pages * PAGE];
            let class = Class::of(&[batch]);
            for run in [1, 3, 7] {
                let runs: Vec<&[u8]> = batch.chunks(run * PAGE).collect();
                assert_eq!(Class::of(&runs), class, "{pages} pages in runs of {run}");
            }
            assert!(class.index() < Class::COUNT);
        }
        assert_eq!(Class::of::<&[u8]>(&[]), Class(0));
    }
}
