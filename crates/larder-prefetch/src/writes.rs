//! Changes of the disk that are under way: nothing of their ranges is fetched until they have ended.

use std::cell::RefCell;
use std::ops::Range;

use larder_block::RequestWatch;

use crate::units::Block;

/// Ranges of the changes that are under way, which bound the table's size.
#[derive(Default)]
pub(crate) struct Writes(RefCell<RangeTable>);

#[derive(Default)]
struct RangeTable {
    ranges: Vec<Range<Block>>,
    free: Vec<u32>,
}

impl Writes {
    /// Begins a change of `blocks`; the returned ticket ends it through
    /// [`RequestWatch::request_ended`].
    pub(crate) fn begin(&self, blocks: Range<Block>) -> u32 {
        let table = &mut *self.0.borrow_mut();
        match table.free.pop() {
            Some(ticket) => {
                table.ranges[ticket as usize] = blocks;
                ticket
            }
            None => {
                table.ranges.push(blocks);
                (table.ranges.len() - 1) as u32
            }
        }
    }

    /// Returns whether a change that touches `blocks` is under way.
    pub(crate) fn overlaps(&self, blocks: &Range<Block>) -> bool {
        let table = self.0.borrow();
        let overlaps = |range: &Range<Block>| range.start < blocks.end && blocks.start < range.end;
        table.ranges.iter().any(overlaps)
    }
}

impl RequestWatch for Writes {
    fn request_ended(&self, ticket: u32) {
        let table = &mut *self.0.borrow_mut();
        table.ranges[ticket as usize] = 0..0;
        table.free.push(ticket);
    }
}
