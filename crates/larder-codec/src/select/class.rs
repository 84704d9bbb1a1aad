//! Classification of pages from a sample.

use super::BatchEncoding;
use crate::PAGE;
use crate::batch::Method;

/// Class of similar batches. It depends on how evenly their bytes are distributed over the 256 values, and on whether
/// their words grow, grow by a constant step, or repeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BatchClass(u8);

/// Number of 64-byte lines in a sample.
const SAMPLE_LINES: usize = 32;
const LINE_BYTES: usize = 64;
const SAMPLE_BYTES: usize = SAMPLE_LINES * LINE_BYTES;
/// Number of entropy levels: whole bits, 0 to 7.
const ENTROPY_LEVELS: u8 = 8;
/// Entropy of a byte, in bits, from which every method leaves at least three quarters of a page.
const DENSE_ENTROPY_BITS_MIN: u8 = 6;
/// Expected nanoseconds per byte of a thread that hands a batch to a device.
const DEVICE_NS_PER_BYTE: f32 = 0.05;

impl BatchClass {
    /// Number of classes.
    pub const COUNT: usize = 4 * ENTROPY_LEVELS as usize;

    pub(super) fn all() -> impl Iterator<Item = Self> {
        (0..Self::COUNT as u8).map(Self)
    }

    /// Returns whether every method is expected to leave most of the data, because its bytes are distributed nearly
    /// at random.
    #[must_use]
    pub const fn is_nearly_incompressible(self) -> bool {
        self.0 < ENTROPY_LEVELS && self.0 >= DENSE_ENTROPY_BITS_MIN
    }

    /// Returns whether the best method is expected to leave at most 1/32 of the data.
    #[must_use]
    pub const fn is_highly_compressible(self) -> bool {
        matches!(self.0 / ENTROPY_LEVELS, 2 | 3) || self.0 == 0
    }

    /// Describes the pages of the class, for people.
    #[must_use]
    pub fn describe(self) -> String {
        let bits = self.0 % ENTROPY_LEVELS;
        let entropy = format!("{bits} to {} bits per byte", bits + 1);
        match self.0 / ENTROPY_LEVELS {
            0 => entropy,
            1 => format!("growing words, {entropy}"),
            2 => format!("counting words, {entropy}"),
            _ => format!("repeated words, {entropy}"),
        }
    }

    pub(super) const fn index(self) -> usize {
        self.0 as usize
    }

    /// Classifies the pages of `runs`, whose format is that of [`crate::batch::Encoder::encode`]. It reads 32 lines,
    /// spaced as far apart as possible, which takes about 2 us. Without pages the class is that of zeros.
    #[must_use]
    pub fn of<R: AsRef<[u8]>>(runs: &[R]) -> Self {
        let lines: usize = runs.iter().map(|run| run.as_ref().len() / LINE_BYTES).sum();
        let mut counts = [0u16; 256];
        let mut word_patterns = [0usize; 4];
        let mut sampled = 0;
        // Lines of the earlier runs.
        let mut lines_before = 0;
        for run in runs.iter().map(|run| run.as_ref().as_chunks::<LINE_BYTES>().0) {
            while sampled < SAMPLE_LINES.min(lines) {
                // The position within pages varies, because many pages begin with a header.
                let at = (sampled * lines / SAMPLE_LINES
                    + sampled * 7 % (lines / SAMPLE_LINES).clamp(1, PAGE / LINE_BYTES))
                .min(lines - 1);
                let Some(line) = at.checked_sub(lines_before).and_then(|at| run.get(at)) else {
                    break;
                };
                for &byte in line {
                    counts[usize::from(byte)] += 1;
                }
                word_patterns[usize::from(word_pattern(line))] += 1;
                sampled += 1;
            }
            lines_before += run.len();
        }
        let [_, growing, counting, repeating] = word_patterns;
        let is_majority = |lines: usize| lines * 2 > sampled;
        let word_pattern = if is_majority(repeating) {
            3
        } else if is_majority(counting) {
            2
        } else {
            u8::from(is_majority(growing + counting))
        };
        Self(entropy_bits(&counts, sampled * LINE_BYTES) + ENTROPY_LEVELS * word_pattern)
    }

    /// Returns the expected remaining share of each byte, and the nanoseconds for it, with the way of this index:
    /// measured by `examples/batches` on memory of the class. A device is expected to take nearly no time, so that it
    /// is tried soon.
    pub(super) fn expected_result(self, encoding: usize) -> (f32, f32) {
        // Order of the methods: lz4, lz4-fast, words-lz4, zstd-fast, zstd and deflate.
        const BY_ENTROPY: [[(f32, f32); Method::COUNT]; ENTROPY_LEVELS as usize] = [
            // Nearly all zeros.
            [(0.03, 0.15), (0.03, 0.11), (0.13, 0.50), (0.025, 0.15), (0.02, 0.25), (0.03, 0.21)],
            [(0.2, 0.6), (0.23, 0.5), (0.4, 0.9), (0.2, 0.8), (0.15, 1.0), (0.17, 0.9)],
            // Heaps.
            [(0.47, 1.9), (0.49, 1.8), (0.9, 1.1), (0.48, 2.1), (0.35, 3.0), (0.37, 2.1)],
            // Text, programs.
            [(0.55, 1.5), (0.65, 1.2), (0.9, 0.5), (0.53, 1.9), (0.37, 2.4), (0.4, 2.1)],
            // Text, records.
            [(0.4, 1.4), (0.45, 1.1), (0.97, 0.7), (0.4, 1.6), (0.25, 2.0), (0.27, 1.6)],
            [(0.6, 1.4), (0.7, 1.0), (1.0, 0.5), (0.6, 1.5), (0.5, 2.0), (0.5, 2.0)],
            // Base64, dense programs.
            [(0.97, 0.5), (0.99, 0.3), (1.0, 0.2), (0.97, 0.5), (0.77, 1.2), (0.75, 1.5)],
            // Compressed or encrypted data.
            [(1.0, 0.08), (1.0, 0.08), (1.0, 0.2), (1.0, 0.12), (1.0, 0.15), (1.0, 0.55)],
        ];
        const GROWING: [(f32, f32); Method::COUNT] =
            [(0.52, 1.1), (0.52, 1.1), (0.13, 0.24), (0.41, 1.9), (0.17, 1.8), (0.23, 1.5)];
        const COUNTING: [(f32, f32); Method::COUNT] =
            [(0.51, 0.9), (0.51, 0.9), (0.005, 0.16), (0.3, 1.8), (0.11, 1.8), (0.17, 1.2)];
        const REPEATING: [(f32, f32); Method::COUNT] =
            [(0.007, 0.04), (0.007, 0.04), (0.014, 0.15), (0.007, 0.08), (0.003, 0.08), (0.03, 0.10)];
        let by_entropy = &BY_ENTROPY[usize::from(self.0 % ENTROPY_LEVELS)];
        let by_method = [by_entropy, &GROWING, &COUNTING, &REPEATING][usize::from(self.0 / ENTROPY_LEVELS)];
        match by_method.get(encoding) {
            Some(expected) => *expected,
            None => (by_method[BatchEncoding::Device.method().index()].0, DEVICE_NS_PER_BYTE),
        }
    }
}

/// Returns the collision entropy of `sampled` bytes in whole bits, 0 to 7. It follows from the probability that two
/// random bytes are equal.
fn entropy_bits(counts: &[u16; 256], sampled: usize) -> u8 {
    const _: () = assert!(SAMPLE_BYTES <= u16::MAX as usize);
    let pairs: u64 = counts.iter().map(|&count| u64::from(count).pow(2)).sum();
    // Each byte equals itself, which has no significance.
    let equal = pairs.saturating_sub(sampled as u64).max(1);
    let all = (sampled as u64).pow(2).max(1);
    // The slight increase keeps random deviations from reducing a whole number of bits, such as that of base64.
    let bits = ((all + all / 16) / equal).max(1).ilog2();
    bits.min(u32::from(ENTROPY_LEVELS) - 1) as u8
}

/// Classifies the majority of the 64-bit words of a line: 3 if a word equals the previous word and is not 0; 2 if its
/// difference to the previous word equals the previous difference and is not 0; 1 if that holds, or if the difference
/// is from 1 to 65,535; otherwise 0.
fn word_pattern(line: &[u8; LINE_BYTES]) -> u8 {
    let words: [u64; LINE_BYTES / 8] = std::array::from_fn(|at| u64::from_le_bytes(line.as_chunks().0[at]));
    let mut differences = words.windows(2).map(|two| two[1].wrapping_sub(two[0]));
    let mut previous = differences.next().unwrap_or(0);
    let (mut growing, mut counting) = (0, 0);
    for difference in differences.by_ref() {
        let same = difference != 0 && difference == previous;
        growing += usize::from(same || (1..1 << 16).contains(&difference));
        counting += usize::from(same);
        previous = difference;
    }
    let repeating = words.windows(2).filter(|two| two[0] == two[1] && two[0] != 0).count();
    let is_majority = |count: usize| count > words.len() / 2;
    if is_majority(repeating) {
        3
    } else if is_majority(counting) {
        2
    } else {
        u8::from(is_majority(growing))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::batch::BATCH_BYTES;
    use crate::measure::MemoryContent;

    fn classes(kind: MemoryContent) -> Vec<BatchClass> {
        let memory = kind.generate(16 * BATCH_BYTES, 5);
        memory.chunks(BATCH_BYTES).map(|batch| BatchClass::of(&[batch])).collect()
    }

    #[test]
    fn differently_compressing_memory_differs_in_class() {
        let one = |kind: MemoryContent| {
            let classes = classes(kind);
            assert!(classes.iter().all(|class| *class == classes[0]), "{kind:?}: {classes:?}");
            classes[0]
        };
        assert_eq!(one(MemoryContent::Random), BatchClass(7));
        assert!(
            one(MemoryContent::Random).is_nearly_incompressible()
                && !one(MemoryContent::Sparse).is_nearly_incompressible()
        );
        assert_eq!(one(MemoryContent::Base64), BatchClass(6));
        assert_eq!(one(MemoryContent::Sparse), BatchClass(0));
        assert_eq!(one(MemoryContent::Counter).0 / ENTROPY_LEVELS, 2);
        assert!(classes(MemoryContent::Filled).iter().all(|class| class.0 / ENTROPY_LEVELS == 3));
        let mut slight = MemoryContent::ALL.to_vec();
        slight.retain(|&kind| classes(kind).iter().all(|class| class.is_highly_compressible()));
        assert_eq!(
            slight,
            [MemoryContent::Zeros, MemoryContent::Filled, MemoryContent::Sparse, MemoryContent::Counter]
        );
        assert!(classes(MemoryContent::Sequence).iter().all(|class| class.0 / ENTROPY_LEVELS == 1));
        assert!(one(MemoryContent::Heap).0 < 4);
    }

    #[test]
    fn class_does_not_depend_on_runs() {
        let memory = MemoryContent::Mixed.generate(BATCH_BYTES, 9);
        for pages in 1..=64 {
            let batch = &memory[..pages * PAGE];
            let class = BatchClass::of(&[batch]);
            for run in [1, 3, 7] {
                let runs: Vec<&[u8]> = batch.chunks(run * PAGE).collect();
                assert_eq!(BatchClass::of(&runs), class, "{pages} pages in runs of {run}");
            }
            assert!(class.index() < BatchClass::COUNT);
        }
        assert_eq!(BatchClass::of::<&[u8]>(&[]), BatchClass(0));
    }
}
