//! Known data and holes of the disk: holes are not fetched. This is a hint, since a write may have put data into a
//! hole.

use std::ops::Range;

use larder_block::{Extent, ExtentKind};

use crate::units::{BLOCK_BITS, Block};

/// Number of ranges that are remembered, the newest ones.
const RANGES_MAX: usize = 64;

pub(crate) struct Extents {
    ranges: [(Range<Block>, bool); RANGES_MAX],
    next: usize,
    /// Set if some ranges may be holes.
    has_holes: bool,
}

impl Extents {
    pub(crate) const BYTES: usize = size_of::<Self>();

    pub(crate) fn new() -> Self {
        Self { ranges: std::array::from_fn(|_| (0..0, false)), next: 0, has_holes: false }
    }

    /// Returns the known range around `block`, and whether it is data; `None` if unknown.
    pub(crate) fn find(&self, block: Block) -> Option<&(Range<Block>, bool)> {
        self.ranges.iter().find(|(range, _)| range.contains(&block))
    }

    /// Forgets holes in `blocks`, because a write may put data there.
    pub(crate) fn invalidate_holes(&mut self, blocks: &Range<Block>) {
        if self.has_holes {
            self.invalidate(blocks);
        }
    }

    fn invalidate(&mut self, blocks: &Range<Block>) {
        for (range, _) in &mut self.ranges {
            if range.start < blocks.end && blocks.start < range.end {
                *range = 0..0;
            }
        }
    }

    /// Records an extent that the device has reported. A block that is partly data counts as data.
    pub(crate) fn insert(&mut self, extent: Extent) {
        let (start, end) = (extent.range.start.get(), extent.range.end().get());
        let is_data = extent.kind == ExtentKind::Data;
        let blocks = match is_data {
            true => start >> BLOCK_BITS..end.div_ceil(1 << BLOCK_BITS),
            false => start.div_ceil(1 << BLOCK_BITS)..end >> BLOCK_BITS,
        };
        if blocks.start < blocks.end {
            self.invalidate(&blocks);
            self.has_holes |= !is_data;
            self.ranges[self.next] = (blocks, is_data);
            self.next = (self.next + 1) % RANGES_MAX;
        }
    }
}
