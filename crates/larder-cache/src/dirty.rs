//! Which lines are dirty, in the order of the disk.

use std::ops::Range;

use crate::lines::LineSet;
use crate::shape::Line;

#[derive(Default)]
pub(crate) struct DirtyLines {
    /// Those that became dirty lately, and those that are to be cleaned.
    young: LineSet,
    old: LineSet,
}

impl DirtyLines {
    pub(crate) fn len(&self) -> u64 {
        self.young.len() + self.old.len()
    }

    /// A line is dirty that was not.
    pub(crate) fn insert(&mut self, line: Line) {
        self.young.insert(line);
    }

    /// A line is not dirty any more.
    pub(crate) fn remove(&mut self, line: Line) {
        if !self.old.remove(line) {
            self.young.remove(line);
        }
    }

    /// All are to be cleaned.
    pub(crate) fn age(&mut self) {
        self.old.append(std::mem::take(&mut self.young));
    }

    /// Whether some are to be cleaned.
    pub(crate) fn has_old(&self) -> bool {
        !self.old.is_empty()
    }

    /// The next ones that are to be cleaned, from `line` on, or from the first one if there are none.
    pub(crate) fn old_from(&self, line: Line, count: usize) -> Vec<Line> {
        let next: Vec<Line> = self.old.within(line..Line::MAX).take(count).collect();
        match next.is_empty() {
            true => self.old.within(0..Line::MAX).take(count).collect(),
            false => next,
        }
    }

    /// Those of some lines, in order; no more than `count`.
    pub(crate) fn within(&self, lines: Range<Line>, count: usize) -> Vec<Line> {
        let mut found: Vec<Line> = [&self.young, &self.old]
            .into_iter()
            .flat_map(|of| of.within(lines.clone()).take(count))
            .collect();
        found.sort_unstable();
        found.truncate(count);
        found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dirty_lines_past_32_bits_are_found() {
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
