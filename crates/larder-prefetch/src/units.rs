//! Units of the disk and of memory.

use std::ops::Range;

/// Number of a block of the disk.
pub(crate) type Block = u64;

/// log2 of the bytes of a block, the unit of the history and of cached data.
pub(crate) const BLOCK_BITS: u32 = 12;
pub(crate) const BLOCK_LEN: u64 = 1 << BLOCK_BITS;

/// Blocks of a region, the unit of the history: 64 KiB.
pub(crate) const BLOCKS_PER_REGION: u64 = 16;

/// Blocks of a slot, the unit of allocation: 16 KiB.
pub(crate) const BLOCKS_PER_SLOT: u64 = 4;
pub(crate) const SLOT_BITS: u32 = BLOCK_BITS + 2;
pub(crate) const SLOT_LEN: usize = 1 << SLOT_BITS;

/// Returns the blocks that `len` bytes (not 0) from `start` on touch.
pub(crate) fn blocks_of(start: u64, len: u64) -> Range<Block> {
    start >> BLOCK_BITS..((start + (len - 1)) >> BLOCK_BITS) + 1
}

/// Returns the blocks that a read of `len` bytes completes: a block at its end that it reads only a part of is left
/// out, because the next sequential read begins there. At least one block.
pub(crate) fn completed_blocks(start: u64, len: u64) -> Range<Block> {
    let first = start >> BLOCK_BITS;
    first..((start + len) >> BLOCK_BITS).max(first + 1)
}

/// Returns those of `blocks` in the slot-sized part `part` of the disk, as bits.
pub(crate) fn bits_in_slot(blocks: &Range<Block>, part: u64) -> u8 {
    let first = part * BLOCKS_PER_SLOT;
    let from = blocks.start.clamp(first, first + BLOCKS_PER_SLOT) - first;
    let to = blocks.end.clamp(first, first + BLOCKS_PER_SLOT) - first;
    ((1u32 << to) - (1u32 << from)) as u8
}

/// Returns the slot-sized parts of the disk that `blocks` touch.
pub(crate) fn parts_of(blocks: &Range<Block>) -> Range<u64> {
    blocks.start / BLOCKS_PER_SLOT..blocks.end.div_ceil(BLOCKS_PER_SLOT)
}
