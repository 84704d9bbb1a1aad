//! Which lines are dirty, in the order of the disk.

use std::ops::Range;

use roaring::RoaringTreemap;

use crate::shape::Line;

/// Two bytes for a line, or a bit where many are near each other.
#[derive(Default)]
pub(crate) struct DirtyLines {
    /// Those that became dirty lately, and those that are to be cleaned.
    young: RoaringTreemap,
    old: RoaringTreemap,
    count: u64,
}

impl DirtyLines {
    pub(crate) fn len(&self) -> u64 {
        self.count
    }

    /// A line is dirty that was not.
    pub(crate) fn insert(&mut self, line: Line) {
        self.young.insert(line);
        self.count += 1;
    }

    /// A line is not dirty any more.
    pub(crate) fn remove(&mut self, line: Line) {
        if !self.old.remove(line) {
            self.young.remove(line);
        }
        self.count -= 1;
    }

    /// All are to be cleaned.
    pub(crate) fn age(&mut self) {
        self.old |= std::mem::take(&mut self.young);
    }

    /// Whether some are to be cleaned.
    pub(crate) fn has_old(&self) -> bool {
        !self.old.is_empty()
    }

    /// The next ones that are to be cleaned, from `line` on, or from the first one if there are none.
    pub(crate) fn old_from(&self, line: Line, count: usize) -> Vec<Line> {
        let next: Vec<Line> = from(&self.old, line).take(count).collect();
        match next.is_empty() {
            true => self.old.iter().take(count).collect(),
            false => next,
        }
    }

    /// Those of some lines, in order; no more than `count`.
    pub(crate) fn within(&self, lines: Range<Line>, count: usize) -> Vec<Line> {
        let mut found: Vec<Line> = [&self.young, &self.old]
            .into_iter()
            .flat_map(|of| from(of, lines.start).take_while(|line| *line < lines.end).take(count))
            .collect();
        found.sort_unstable();
        found.truncate(count);
        found
    }
}

/// The lines from `line` on.
fn from(lines: &RoaringTreemap, line: Line) -> impl Iterator<Item = Line> {
    let mut iter = lines.iter();
    iter.advance_to(line);
    iter
}
