//! What is known of where the disk has data: holes are not fetched. It is a hint; a write may have made data of a hole.

use std::ops::Range;

use larder_block::{Extent, ExtentKind};

use crate::units::{BLOCK_BITS, Block};

/// Pieces that are remembered, the last ones.
const PIECES: usize = 64;

pub(crate) struct Extents {
    pieces: [(Range<Block>, bool); PIECES],
    next: usize,
    /// Some may be holes.
    has_holes: bool,
}

impl Extents {
    pub(crate) const BYTES: usize = size_of::<Self>();

    pub(crate) fn new() -> Self {
        Self {
            pieces: std::array::from_fn(|_| (0..0, false)),
            next: 0,
            has_holes: false,
        }
    }

    /// Which blocks around `block` are alike, and whether they are data; `None` if it is not known.
    pub(crate) fn find(&self, block: Block) -> Option<&(Range<Block>, bool)> {
        self.pieces.iter().find(|(range, _)| range.contains(&block))
    }

    /// Something may be written to `blocks`.
    pub(crate) fn forget_holes(&mut self, blocks: &Range<Block>) {
        if self.has_holes {
            self.forget(blocks);
        }
    }

    fn forget(&mut self, blocks: &Range<Block>) {
        for (range, _) in &mut self.pieces {
            if range.start < blocks.end && blocks.start < range.end {
                *range = 0..0;
            }
        }
    }

    /// Notes what the device has said. A block that is data in part is data.
    pub(crate) fn note(&mut self, extent: Extent) {
        let (start, end) = (extent.range.start.get(), extent.range.end().get());
        let is_data = extent.kind == ExtentKind::Data;
        let blocks = match is_data {
            true => start >> BLOCK_BITS..end.div_ceil(1 << BLOCK_BITS),
            false => start.div_ceil(1 << BLOCK_BITS)..end >> BLOCK_BITS,
        };
        if blocks.start < blocks.end {
            self.forget(&blocks);
            self.has_holes |= !is_data;
            self.pieces[self.next] = (blocks, is_data);
            self.next = (self.next + 1) % PIECES;
        }
    }
}
