//! Sorted set of lines, which finds the few relevant lines of a long range.
//!
//! A line takes two bytes, up to four while the set grows, or one bit where many are close to each other. The cost of
//! finding the lines of a range depends on the lines that are found, not on the range's length.

use std::collections::BTreeMap;
use std::ops::Range;

use roaring::RoaringBitmap;

use crate::layout::Line;

/// Lines of a chunk, as a power of two. A bitmap of more lines would have a longer list of containers, each of 2^16
/// lines, and a new container moves those after it.
const CHUNK_BITS: u32 = 24;

#[derive(Default)]
pub(crate) struct LineSet {
    /// Chunks by line / 2^24; none is empty.
    chunks: BTreeMap<u64, RoaringBitmap>,
    count: u64,
}

fn chunk_of(line: Line) -> u64 {
    line >> CHUNK_BITS
}

fn in_chunk(line: Line) -> u32 {
    (line & ((1 << CHUNK_BITS) - 1)) as u32
}

impl LineSet {
    pub(crate) fn len(&self) -> u64 {
        self.count
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }

    pub(crate) fn contains(&self, line: Line) -> bool {
        let chunk = self.chunks.get(&chunk_of(line));
        chunk.is_some_and(|chunk| chunk.contains(in_chunk(line)))
    }

    /// Adds a line; returns whether it was absent.
    pub(crate) fn insert(&mut self, line: Line) -> bool {
        let is_new = self.chunks.entry(chunk_of(line)).or_default().insert(in_chunk(line));
        self.count += u64::from(is_new);
        is_new
    }

    /// Removes a line; returns whether it was present.
    pub(crate) fn remove(&mut self, line: Line) -> bool {
        let Some(chunk) = self.chunks.get_mut(&chunk_of(line)) else {
            return false;
        };
        if !chunk.remove(in_chunk(line)) {
            return false;
        }
        if chunk.is_empty() {
            self.chunks.remove(&chunk_of(line));
        }
        self.count -= 1;
        true
    }

    /// Adds all lines of `other`.
    pub(crate) fn append(&mut self, other: Self) {
        for (number, lines) in other.chunks {
            let chunk = self.chunks.entry(number).or_default();
            let before = chunk.len();
            *chunk |= lines;
            self.count += chunk.len() - before;
        }
    }

    /// Returns those of `lines` that are in the set, in order.
    pub(crate) fn within(&self, lines: Range<Line>) -> impl Iterator<Item = Line> {
        let (first, end) = match lines.is_empty() {
            true => (0, 0),
            false => (chunk_of(lines.start), chunk_of(lines.end - 1) + 1),
        };
        self.chunks.range(first..end).flat_map(move |(number, chunk)| {
            let base = number << CHUNK_BITS;
            let from = lines.start.saturating_sub(base) as u32;
            let to = (lines.end - base).min(1 << CHUNK_BITS) as u32;
            chunk.range(from..to).map(move |at| base + Line::from(at))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FAR: Line = (1 << 32) + 5;

    #[test]
    fn range_finds_its_lines_across_chunks() {
        let mut set = LineSet::default();
        let lines = [0, 7, (1 << 24) - 1, 1 << 24, 3 << 24, FAR];
        for line in lines {
            assert!(set.insert(line));
            assert!(!set.insert(line));
        }
        let within = |range: Range<Line>| set.within(range).collect::<Vec<_>>();
        assert_eq!(within(0..Line::MAX), lines);
        assert_eq!(within(7..1 << 24), [7, (1 << 24) - 1]);
        assert_eq!(within(8..3 << 24), [(1 << 24) - 1, 1 << 24]);
        // The offset of the end in its chunk is less than that of the start.
        assert_eq!(within(10..FAR), [(1 << 24) - 1, 1 << 24, 3 << 24]);
        assert_eq!(within((3 << 24) + 10..Line::MAX), [FAR]);
        assert_eq!(within(FAR + 1..Line::MAX), [0; 0]);
        assert_eq!(within(9..9), [0; 0]);
        assert_eq!(set.len(), 6);
    }

    #[test]
    fn removed_lines_are_absent() {
        let mut set = LineSet::default();
        assert!(set.insert(5) && set.insert(FAR));
        assert!(set.remove(5) && !set.remove(5) && !set.remove(6));
        assert!(!set.contains(5) && set.contains(FAR));
        let mut other = LineSet::default();
        assert!(other.insert(FAR) && other.insert(9));
        set.append(other);
        assert_eq!(set.len(), 2);
        assert!(set.remove(9) && set.remove(FAR));
        assert!(set.is_empty() && set.within(0..Line::MAX).next().is_none());
    }
}
