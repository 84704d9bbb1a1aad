//! Refcounts: how often each host cluster is used. A two-level table, like the L2 tables, held in memory as the slices
//! that are needed.
//!
//! Invariants: a dirty slice is held; a slice of a block that the image does not have yet is all zeros until it is
//! changed. What a crash leaves behind is decided by the commit (see [`crate::commit`]): it writes refcounts before
//! what refers to the clusters, and lowers them only after nothing does.

use std::collections::{BTreeSet, HashMap};

use crate::header::TableAt;
use crate::shape::Shape;

/// Slices kept although they are clean: 1 MiB of 4 KiB each.
const CLEAN_SLICES_MAX: usize = 256;

/// The refcounts of an image, as far as they are known.
pub(crate) struct Refcounts {
    shape: Shape,
    /// Where each block is; 0 where there is none. May be longer than the table in the image, which is moved then.
    table: Vec<u64>,
    /// Where the table is in the image.
    pub(crate) table_at: TableAt,
    /// Where the table goes with the next commit.
    pub(crate) moves_to: Option<TableAt>,
    /// Entries of the table that the image does not have yet.
    pub(crate) new_blocks: BTreeSet<u64>,
    slices: HashMap<u64, Box<[u8]>>,
    dirty: BTreeSet<u64>,
    /// Slices that are being written.
    writing: BTreeSet<u64>,
}

/// A slice of a refcount block, by its index from the start of the image.
pub(crate) type SliceIndex = u64;

/// What is known about a cluster or a place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Known<T> {
    /// This.
    Is(T),
    /// The slice must be read first, from this offset.
    Absent(SliceIndex, u64),
}

/// What there is from a cluster on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Space {
    /// So many free clusters, from the one that is given on.
    Free(u64, u64),
    /// None before this cluster.
    Full(u64),
    /// No refcount block for it: everything is free, but the block must be made first.
    NoBlock,
}

impl Refcounts {
    pub(crate) fn new(shape: Shape, table_at: TableAt, table: Vec<u64>) -> Self {
        Self {
            shape,
            table,
            table_at,
            moves_to: None,
            new_blocks: BTreeSet::new(),
            slices: HashMap::new(),
            dirty: BTreeSet::new(),
            writing: BTreeSet::new(),
        }
    }

    pub(crate) fn table(&self) -> &[u64] {
        &self.table
    }

    /// Whether anything has changed that the image does not have.
    pub(crate) fn is_dirty(&self) -> bool {
        !self.dirty.is_empty() || !self.new_blocks.is_empty() || self.moves_to.is_some()
    }

    /// The block that a cluster's refcount is in.
    pub(crate) fn block_of(&self, cluster: u64) -> u64 {
        cluster >> self.shape.refcount_block_bits()
    }

    pub(crate) fn has_block(&self, block: u64) -> bool {
        self.table.get(block as usize).is_some_and(|offset| *offset != 0)
    }

    /// Whether the image has the block of a cluster.
    pub(crate) fn is_settled(&self, cluster: u64) -> bool {
        self.moves_to.is_none() && !self.new_blocks.contains(&self.block_of(cluster))
    }

    /// Makes the table long enough for `blocks` blocks; it must be moved then.
    pub(crate) fn lengthen(&mut self, blocks: u64) {
        self.table.resize(blocks as usize, 0);
    }

    fn slice_of(&self, cluster: u64) -> SliceIndex {
        cluster >> self.shape.refcount_slice_bits()
    }

    /// Where a slice is in the image.
    pub(crate) fn slice_offset(&self, slice: SliceIndex) -> Option<u64> {
        let per_block = self.shape.refcount_block_bits() - self.shape.refcount_slice_bits();
        let block = *self.table.get((slice >> per_block) as usize)?;
        let within = slice & ((1 << per_block) - 1);
        (block != 0).then(|| block.saturating_add(within * self.shape.slice_len()))
    }

    /// A new block at `offset`, which reads as zeros there.
    pub(crate) fn add_block(&mut self, block: u64, offset: u64) {
        self.table[block as usize] = offset;
        self.new_blocks.insert(block);
        let per_block = self.shape.refcount_block_bits() - self.shape.refcount_slice_bits();
        let first = block << per_block;
        // The first slice will be needed next; the others are read when they are, as zeros.
        let zeros = vec![0; self.shape.slice_len() as usize];
        self.slices.insert(first, zeros.into());
    }

    /// Puts a slice in that was read, unless it is there.
    pub(crate) fn load(&mut self, slice: SliceIndex, bytes: &[u8]) {
        if self.slices.len() >= CLEAN_SLICES_MAX + self.dirty.len() + self.writing.len() {
            let (dirty, writing) = (&self.dirty, &self.writing);
            self.slices
                .retain(|index, _| dirty.contains(index) || writing.contains(index));
        }
        self.slices.entry(slice).or_insert_with(|| bytes.into());
    }

    /// How often a cluster is used.
    pub(crate) fn get(&self, cluster: u64) -> Known<u64> {
        let slice = self.slice_of(cluster);
        let Some(offset) = self.slice_offset(slice) else {
            return Known::Is(0);
        };
        match self.slices.get(&slice) {
            Some(bytes) => Known::Is(read(bytes, self.shape.refcount_order, self.index(cluster))),
            None => Known::Absent(slice, offset),
        }
    }

    fn index(&self, cluster: u64) -> usize {
        (cluster & ((1 << self.shape.refcount_slice_bits()) - 1)) as usize
    }

    /// Sets how often a cluster is used; its slice must be held.
    pub(crate) fn set(&mut self, cluster: u64, count: u64) {
        debug_assert!(count <= self.shape.refcount_max());
        let (slice, index) = (self.slice_of(cluster), self.index(cluster));
        let order = self.shape.refcount_order;
        let Some(bytes) = self.slices.get_mut(&slice) else {
            panic!("refcount of cluster {cluster} is changed, but slice {slice} is not loaded");
        };
        write(bytes, order, index, count);
        self.dirty.insert(slice);
    }

    /// Looks for free clusters from `cluster` on, within one slice.
    pub(crate) fn space(&self, cluster: u64, most: u64) -> Known<Space> {
        let slice = self.slice_of(cluster);
        let Some(offset) = self.slice_offset(slice) else {
            return Known::Is(Space::NoBlock);
        };
        let Some(bytes) = self.slices.get(&slice) else {
            return Known::Absent(slice, offset);
        };
        let order = self.shape.refcount_order;
        let all = 1usize << self.shape.refcount_slice_bits();
        let base = slice << self.shape.refcount_slice_bits();
        let is_free = |index: &usize| read(bytes, order, *index) == 0;
        let Some(first) = (self.index(cluster)..all).find(is_free) else {
            return Known::Is(Space::Full(base + all as u64));
        };
        let end = (first..all).find(|index| !is_free(index)).unwrap_or(all);
        Known::Is(Space::Free(base + first as u64, ((end - first) as u64).min(most)))
    }

    /// The dirty slices and where they go; they count as clean until [`Refcounts::written`] says otherwise.
    pub(crate) fn take_dirty(&mut self) -> Vec<(SliceIndex, u64, Vec<u8>)> {
        let mut taken = Vec::new();
        for slice in std::mem::take(&mut self.dirty) {
            if let (Some(offset), Some(bytes)) = (self.slice_offset(slice), self.slices.get(&slice)) {
                taken.push((slice, offset, bytes.to_vec()));
                self.writing.insert(slice);
            }
        }
        taken
    }

    /// A slice that was taken has been written, or not.
    pub(crate) fn written(&mut self, slice: SliceIndex, success: bool) {
        self.writing.remove(&slice);
        if !success {
            self.dirty.insert(slice);
        }
    }
}

/// Refcount `index` of a slice. Widths below a byte begin at its low bits, wider ones are big-endian.
pub(crate) fn read(bytes: &[u8], order: u32, index: usize) -> u64 {
    if order < 3 {
        let bits = 1usize << order;
        let per_byte = 8 / bits;
        let byte = u64::from(bytes[index / per_byte]);
        return byte >> (index % per_byte * bits) & ((1 << bits) - 1);
    }
    let width = 1usize << (order - 3);
    let at = index * width;
    bytes[at..at + width]
        .iter()
        .fold(0, |value, byte| value << 8 | u64::from(*byte))
}

/// Changes refcount `index` of a slice.
pub(crate) fn write(bytes: &mut [u8], order: u32, index: usize, count: u64) {
    if order < 3 {
        let bits = 1usize << order;
        let per_byte = 8 / bits;
        let shift = index % per_byte * bits;
        let mask = ((1u16 << bits) - 1) as u8;
        let byte = &mut bytes[index / per_byte];
        *byte = *byte & !(mask << shift) | (count as u8 & mask) << shift;
        return;
    }
    let width = 1usize << (order - 3);
    let at = index * width;
    bytes[at..at + width].copy_from_slice(&count.to_be_bytes()[8 - width..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refcounts_of_every_width_read_as_they_were_written() {
        for order in 0..=6 {
            let max = u64::MAX >> (64 - (1u32 << order));
            let count = (512 * 8) >> order;
            let mut bytes = vec![0; 512];
            let value = |index: usize| (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) & max;
            (0..count).for_each(|index| write(&mut bytes, order, index, value(index)));
            assert!(
                (0..count).all(|index| read(&bytes, order, index) == value(index)),
                "{order}"
            );
            write(&mut bytes, order, 5, 0);
            assert_eq!(read(&bytes, order, 5), 0);
            assert_eq!(read(&bytes, order, 6), value(6));
        }
    }
}
