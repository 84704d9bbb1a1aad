//! A set of slices of refcounts, with one bit each.

use crate::refcount::SliceIndex;

/// A set of slices by their index from the start of the image. It takes memory up to the highest one: 2 KiB for 1 TiB
/// of clusters of 64 KiB, 16 KiB for 1 TiB of clusters of 4 KiB (refcounts of 16 bits).
#[derive(Default)]
pub(crate) struct SliceSet {
    words: Vec<u64>,
}

fn bit_position(slice: SliceIndex) -> (usize, u64) {
    ((slice / 64) as usize, 1 << (slice % 64))
}

impl SliceSet {
    pub(crate) fn insert(&mut self, slice: SliceIndex) {
        let (word, bit) = bit_position(slice);
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= bit;
    }

    pub(crate) fn remove(&mut self, slice: SliceIndex) {
        let (word, bit) = bit_position(slice);
        if let Some(word) = self.words.get_mut(word) {
            *word &= !bit;
        }
    }

    pub(crate) fn contains(&self, slice: SliceIndex) -> bool {
        let (word, bit) = bit_position(slice);
        self.words.get(word).is_some_and(|word| word & bit != 0)
    }

    /// Returns the first slice from `from` on that is not in the set.
    pub(crate) fn next_absent(&self, from: SliceIndex) -> SliceIndex {
        let (first, bit) = bit_position(from);
        // Slices before `from` do not count.
        let mut before = bit - 1;
        for (index, word) in self.words.iter().enumerate().skip(first) {
            let absent = !(word | before);
            if absent != 0 {
                return index as u64 * 64 + u64::from(absent.trailing_zeros());
            }
            before = 0;
        }
        from.max(self.words.len() as u64 * 64)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn next_absent_slice_skips_members_only() {
        let mut set = SliceSet::default();
        assert_eq!(set.next_absent(7), 7);
        (0..200).filter(|slice| *slice != 130).for_each(|slice| set.insert(slice));
        assert_eq!(set.next_absent(0), 130);
        assert_eq!(set.next_absent(130), 130);
        assert_eq!(set.next_absent(131), 200);
        assert_eq!(set.next_absent(1000), 1000);
        assert!(set.contains(129) && !set.contains(130) && !set.contains(5000));
        set.remove(64);
        set.remove(9999);
        assert_eq!(set.next_absent(3), 64);
    }
}
