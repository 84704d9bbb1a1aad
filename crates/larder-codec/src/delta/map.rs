//! Map of the changed words of a page.

use super::ApplyError;
use crate::PAGE;

/// Number of 64-bit words of a page.
pub(super) const WORDS: usize = PAGE / 8;
/// Number of words that one element of the map covers.
const GROUP_WORDS: usize = u64::BITS as usize;

/// Bit map: bit b of element a stands for word 64a + b.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ChangeMap([u64; WORDS / GROUP_WORDS]);

impl ChangeMap {
    pub(super) const ALL: Self = Self([u64::MAX; WORDS / GROUP_WORDS]);

    /// Compares two pages, with AVX2 if the CPU has it.
    pub(super) fn between(new: &[u8; PAGE], old: &[u8; PAGE]) -> Self {
        #[cfg(target_arch = "x86_64")]
        if is_x86_feature_detected!("avx2") {
            // SAFETY: the CPU has AVX2.
            return unsafe { between_avx2(new, old) };
        }
        between_portable(new, old)
    }

    /// Returns the number of changed words.
    pub(super) fn count(&self) -> u32 {
        self.0.iter().map(|group| group.count_ones()).sum()
    }

    /// Returns the indexes of the changed words, in order.
    pub(super) fn words(&self) -> impl Iterator<Item = usize> {
        self.groups().flatten()
    }

    /// Returns the indexes of the changed words, in groups of 64 words of the page.
    pub(super) fn groups(&self) -> impl Iterator<Item = impl Iterator<Item = usize>> {
        self.0.iter().enumerate().map(|(index, &bits)| SetBits { bits, base: index * GROUP_WORDS })
    }

    /// Returns the number of bytes that [`Self::write_map`] writes: from 9 to 72.
    pub(super) fn map_bytes(&self) -> usize {
        size_of::<u64>() + self.0.iter().map(|group| nonzero_bytes(*group).count_ones() as usize).sum::<usize>()
    }

    /// Writes the map into `to`, which must have its exact length.
    pub(super) fn write_map(&self, to: &mut [u8]) {
        let (presence, bytes) = to.split_at_mut(size_of::<u64>());
        let mut targets = bytes.iter_mut();
        for (top, group) in presence.iter_mut().zip(self.0) {
            *top = nonzero_bytes(group);
            let present = group.to_le_bytes().into_iter().filter(|&byte| byte != 0);
            // The destinations must be the second argument: `zip` consumes an item of the first iterator before it
            // finds the second one exhausted.
            for (byte, target) in present.zip(&mut targets) {
                *target = byte;
            }
        }
    }

    /// Reads the map at the start of `data`, which is everything after a delta's first byte; returns it with its
    /// length.
    pub(super) fn read_map(data: &[u8]) -> Result<(Self, usize), ApplyError> {
        // Lengths include the delta's first byte.
        let short = |needed| ApplyError::Short { needed: 1 + needed, len: 1 + data.len() };
        let (presence, rest) = data.split_first_chunk::<{ size_of::<u64>() }>().ok_or(short(size_of::<u64>()))?;
        let present: usize = presence.iter().map(|top| top.count_ones() as usize).sum();
        let map_bytes = presence.len() + present;
        let mut bytes = rest.get(..present).ok_or(short(map_bytes))?.iter();
        let mut changed = Self([0; WORDS / GROUP_WORDS]);
        for (index, (group, top)) in changed.0.iter_mut().zip(presence).enumerate() {
            let mut parts = [0; GROUP_WORDS / 8];
            for at in (0..8).filter(|at| top >> at & 1 == 1) {
                parts[at] = *bytes.next().expect("as many bytes as bits");
                if parts[at] == 0 {
                    return Err(ApplyError::Map(index * 8 + at));
                }
            }
            *group = u64::from_le_bytes(parts);
        }
        Ok((changed, map_bytes))
    }
}

/// Returns a byte whose bit b is set if byte b of `group` is not 0.
fn nonzero_bytes(group: u64) -> u8 {
    let bytes = group.to_le_bytes();
    (0..8).map(|at| u8::from(bytes[at] != 0) << at).sum()
}

/// Iterator over the bits that are set, from the lowest on.
struct SetBits {
    bits: u64,
    base: usize,
}

impl Iterator for SetBits {
    type Item = usize;

    fn next(&mut self) -> Option<usize> {
        let bit = self.bits.trailing_zeros() as usize;
        (self.bits != 0).then(|| {
            self.bits &= self.bits - 1;
            self.base + bit
        })
    }
}

fn between_portable(new: &[u8; PAGE], old: &[u8; PAGE]) -> ChangeMap {
    let (new, old) = (new.as_chunks::<{ 8 * GROUP_WORDS }>().0, old.as_chunks::<{ 8 * GROUP_WORDS }>().0);
    ChangeMap(std::array::from_fn(|group| {
        let (new, old) = (&new[group], &old[group]);
        // Shortcut for groups without a change.
        if new == old {
            return 0;
        }
        let words = new.as_chunks::<8>().0.iter().zip(old.as_chunks::<8>().0);
        words.enumerate().map(|(bit, (new, old))| u64::from(new != old) << bit).sum()
    }))
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
fn between_avx2(new: &[u8; PAGE], old: &[u8; PAGE]) -> ChangeMap {
    use std::arch::x86_64::{__m256i, _mm256_castsi256_pd, _mm256_cmpeq_epi64, _mm256_loadu_si256, _mm256_movemask_pd};

    const VECTOR: usize = size_of::<__m256i>();
    let (new, old) = (new.as_chunks::<VECTOR>().0, old.as_chunks::<VECTOR>().0);
    let load = |from: &[u8; VECTOR]| {
        // SAFETY: `from` is as long as a vector, and this load needs no alignment.
        unsafe { _mm256_loadu_si256(from.as_ptr().cast()) }
    };
    ChangeMap(std::array::from_fn(|group| {
        (0..GROUP_WORDS / 4)
            .map(|quarter| {
                let at = group * (GROUP_WORDS / 4) + quarter;
                let equal = _mm256_cmpeq_epi64(load(&new[at]), load(&old[at]));
                let changed = !_mm256_movemask_pd(_mm256_castsi256_pd(equal)) as u64 & 0xf;
                changed << (4 * quarter)
            })
            .fold(0, |bits, four| bits | four)
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        #[cfg(target_arch = "x86_64")]
        fn avx2_and_portable_comparison_agree(
            base in any::<u8>(),
            bits in prop::collection::vec(0..PAGE * 8, 0..700),
        ) {
            assert!(is_x86_feature_detected!("avx2"), "the machine has no AVX2");
            let old = [base; PAGE];
            let mut new = old;
            for bit in bits {
                new[bit / 8] ^= 1 << (bit % 8);
            }
            let changed = between_portable(&new, &old);
            // SAFETY: the assertion above checks that the CPU has AVX2.
            prop_assert_eq!(unsafe { between_avx2(&new, &old) }, changed);
            let words: Vec<usize> = changed.words().collect();
            let expected: Vec<usize> = (0..WORDS).filter(|w| new[8 * w..][..8] != old[8 * w..][..8]).collect();
            prop_assert_eq!(words.len(), changed.count() as usize);
            prop_assert_eq!(words, expected);
        }
    }
}
