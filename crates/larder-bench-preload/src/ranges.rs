//! Allocator of address ranges.

use std::collections::BTreeMap;
use std::ops::Range;

/// Set of the free ranges of `0..len`, of which no two are adjacent.
#[derive(Debug)]
pub(crate) struct FreeRanges {
    /// End of each free range, by its start.
    free: BTreeMap<usize, usize>,
}

impl FreeRanges {
    /// Creates a set in which all of `0..len` is free.
    pub(crate) fn new(len: usize) -> Self {
        Self { free: BTreeMap::from([(0, len)]) }
    }

    /// Allocates the first free range of `len`, which keeps used memory together.
    pub(crate) fn allocate(&mut self, len: usize) -> Option<usize> {
        let (start, end) = self.free.iter().find(|(start, end)| *end - *start >= len)?;
        let (start, end) = (*start, *end);
        self.free.remove(&start);
        if start + len < end {
            self.free.insert(start + len, end);
        }
        Some(start)
    }

    /// Allocates `range` if all of it is free.
    pub(crate) fn allocate_at(&mut self, range: &Range<usize>) -> bool {
        let Some((start, end)) = self.free.range(..=range.start).next_back() else {
            return false;
        };
        let (start, end) = (*start, *end);
        if end < range.end {
            return false;
        }
        self.free.remove(&start);
        if start < range.start {
            self.free.insert(start, range.start);
        }
        if range.end < end {
            self.free.insert(range.end, end);
        }
        true
    }

    /// Frees `range`, parts of which may be free already.
    pub(crate) fn release(&mut self, range: Range<usize>) {
        let Range { mut start, mut end } = range;
        // Merges ranges that overlap it or are adjacent. Ends increase with starts, so the last ones are checked
        // first.
        while let Some((other_start, other_end)) = self.free.range(..=end).next_back() {
            let (other_start, other_end) = (*other_start, *other_end);
            if other_end < start {
                break;
            }
            self.free.remove(&other_start);
            start = start.min(other_start);
            end = end.max(other_end);
        }
        self.free.insert(start, end);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LEN: usize = 64;

    #[derive(Clone, Debug)]
    enum Step {
        Allocate(usize),
        AllocateAt(Range<usize>),
        Release(Range<usize>),
    }

    fn range() -> impl Strategy<Value = Range<usize>> {
        (0..LEN, 1..16usize).prop_map(|(start, len)| start..(start + len).min(LEN))
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            (1..16usize).prop_map(Step::Allocate),
            range().prop_map(Step::AllocateAt),
            range().prop_map(Step::Release),
        ]
    }

    proptest! {
        /// Allocated ranges were free, and freed ranges can be allocated again.
        #[test]
        fn ranges_match_reference_model(steps in prop::collection::vec(step(), 1..100)) {
            let mut ranges = FreeRanges::new(LEN);
            let mut free = [true; LEN];
            for step in steps {
                match step {
                    Step::Allocate(len) => {
                        let first = (0..=LEN - len).find(|start| free[*start..start + len].iter().all(|free| *free));
                        prop_assert_eq!(ranges.allocate(len), first);
                        if let Some(start) = first {
                            free[start..start + len].fill(false);
                        }
                    }
                    Step::AllocateAt(range) => {
                        let all = free[range.clone()].iter().all(|free| *free);
                        prop_assert_eq!(ranges.allocate_at(&range), all);
                        if all {
                            free[range].fill(false);
                        }
                    }
                    Step::Release(range) => {
                        ranges.release(range.clone());
                        free[range].fill(true);
                    }
                }
                let mut listed_free = [false; LEN];
                let mut last = None;
                for (start, end) in &ranges.free {
                    prop_assert!(start < end && last.is_none_or(|last| last < *start));
                    last = Some(*end);
                    listed_free[*start..*end].fill(true);
                }
                prop_assert_eq!(listed_free, free);
            }
        }
    }
}
