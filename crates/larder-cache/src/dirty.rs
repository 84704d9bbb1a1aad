//! Set of the dirty lines, in the order of the disk.

use std::ops::Range;

use crate::layout::Line;
use crate::line_set::LineSet;

#[derive(Default)]
pub(crate) struct DirtyLines {
    /// Lines that became dirty recently; `old` has those that are to be cleaned.
    young: LineSet,
    old: LineSet,
}

impl DirtyLines {
    pub(crate) fn len(&self) -> u64 {
        self.young.len() + self.old.len()
    }

    /// Adds a line that has become dirty.
    pub(crate) fn insert(&mut self, line: Line) {
        self.young.insert(line);
    }

    /// Removes a line that is no longer dirty.
    pub(crate) fn remove(&mut self, line: Line) {
        if !self.old.remove(line) {
            self.young.remove(line);
        }
    }

    /// Marks all dirty lines as to be cleaned.
    pub(crate) fn age(&mut self) {
        self.old.append(std::mem::take(&mut self.young));
    }

    /// Returns whether any line is to be cleaned.
    pub(crate) fn has_old(&self) -> bool {
        !self.old.is_empty()
    }

    /// Returns the next `count` lines to clean, from `line` on, or from the first line if there are none after it.
    pub(crate) fn old_from(&self, line: Line, count: usize) -> Vec<Line> {
        let next: Vec<Line> = self.old.within(line..Line::MAX).take(count).collect();
        match next.is_empty() {
            true => self.old.within(0..Line::MAX).take(count).collect(),
            false => next,
        }
    }

    /// Returns the dirty ones of `lines`, sorted, at most `count`.
    pub(crate) fn within(&self, lines: Range<Line>, count: usize) -> Vec<Line> {
        let mut found: Vec<Line> =
            [&self.young, &self.old].into_iter().flat_map(|of| of.within(lines.clone()).take(count)).collect();
        found.sort_unstable();
        found.truncate(count);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dirty_lines_may_exceed_32_bits() {
        let far = (1 << 32) + 5;
        let mut dirty = DirtyLines::default();
        dirty.insert(far);
        assert_eq!(dirty.within(10..Line::MAX, 8), [far]);
        dirty.age();
        dirty.insert(3);
        assert_eq!(dirty.within(10..Line::MAX, 8), [far]);
        assert_eq!(dirty.old_from(10, 8), [far]);
        dirty.remove(far);
        dirty.remove(3);
        assert_eq!((dirty.len(), dirty.has_old()), (0, false));
    }
}
