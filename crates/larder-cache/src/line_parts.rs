//! Division of a request's range into lines.

use larder_block::{ByteOffset, ByteRange};

use crate::layout::{CacheLayout, Line, SECTOR_BITS, SectorMask};

/// Part of a request in one line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LinePart {
    pub(crate) line: Line,
    pub(crate) sectors: SectorMask,
    /// Range of the part on the disk.
    pub(crate) range: ByteRange,
}

impl CacheLayout {
    pub(crate) fn line_at(&self, at: ByteOffset) -> Line {
        at.get() >> self.line_bits
    }

    /// Returns the lines that a range touches.
    pub(crate) fn lines_of(&self, range: ByteRange) -> std::ops::Range<Line> {
        match range.is_empty() {
            true => 0..0,
            false => self.line_at(range.start)..self.line_at(ByteOffset::new(range.end().get() - 1)) + 1,
        }
    }

    /// Returns the part of `line` that is in `range`, which touches it.
    pub(crate) fn part_of(&self, line: Line, range: ByteRange) -> LinePart {
        let line_range = ByteRange::new(line << self.line_bits, self.line_len());
        let range = line_range.intersection(range);
        let first = (range.start.get() - line_range.start.get()) >> SECTOR_BITS;
        let count = range.len.get() >> SECTOR_BITS;
        LinePart { line, sectors: sector_run(first as u32, count as u32), range }
    }

    pub(crate) fn parts_of(&self, range: ByteRange) -> impl Iterator<Item = LinePart> + use<> {
        let layout = *self;
        self.lines_of(range).map(move |line| layout.part_of(line, range))
    }

    /// Returns the offset of a byte in its line.
    pub(crate) fn offset_in_line(&self, at: ByteOffset) -> u64 {
        at.get() & (self.line_len() - 1)
    }
}

/// Returns `count` sectors from `first` on.
fn sector_run(first: u32, count: u32) -> SectorMask {
    match count {
        0 => 0,
        _ => (SectorMask::MAX >> (SectorMask::BITS - count)) << first,
    }
}

/// Returns the maximal runs of sectors of `part` that are all in `mask` or all not, in order, each with whether it is
/// in it.
pub(crate) fn runs(part: LinePart, mask: SectorMask) -> impl Iterator<Item = (bool, ByteRange)> {
    let first = part.sectors.trailing_zeros();
    let end = SectorMask::BITS - part.sectors.leading_zeros();
    let base = part.range.start.get() - (u64::from(first) << SECTOR_BITS);
    let mut at = first;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let from = at;
        let inside = mask >> at & 1 == 1;
        while at < end && (mask >> at & 1 == 1) == inside {
            at += 1;
        }
        let range = ByteRange::new(base + (u64::from(from) << SECTOR_BITS), u64::from(at - from) << SECTOR_BITS);
        Some((inside, range))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_block::ByteLen;

    /// Ranges are cut at line boundaries, and lines at changes of the sector mask.
    #[test]
    fn range_splits_at_lines_and_mask() {
        let shape = CacheLayout::for_size(ByteLen::mib(4), 12, 512).expect("large enough");
        let range = ByteRange::new(4096 - 1024, 1024 + 4096 + 512);
        let parts: Vec<LinePart> = shape.parts_of(range).collect();
        assert_eq!(parts.len(), 3);
        assert_eq!((parts[0].line, parts[0].sectors), (0, 0b1100_0000));
        assert_eq!((parts[1].line, parts[1].sectors), (1, 0xff));
        assert_eq!((parts[2].line, parts[2].sectors), (2, 1));
        assert_eq!(parts[2].range, ByteRange::new(8192, 512));
        let found: Vec<_> = runs(parts[1], 0b0011_1001).collect();
        let wanted = [(true, 0, 1), (false, 1, 2), (true, 3, 3), (false, 6, 2)];
        let wanted = wanted.map(|(inside, from, count)| (inside, ByteRange::new(4096 + from * 512, count * 512)));
        assert_eq!(found, wanted);
        let big = CacheLayout::for_size(ByteLen::mib(64), 16, 512).expect("large enough");
        assert_eq!(big.part_of(0, ByteRange::new(0, 1 << 20)).sectors, SectorMask::MAX);
        assert_eq!(runs(big.part_of(0, ByteRange::new(0, 1 << 20)), SectorMask::MAX).count(), 1);
    }
}
