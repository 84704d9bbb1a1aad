//! Refcounts: the number of uses of each host cluster. They form a two-level table, like the L2 tables, of which the
//! needed slices are in memory.
//!
//! A set of all slices without a free cluster (`full`) is maintained, so that each slice is read once for a search,
//! and again only after one of its clusters became free.
//!
//! Invariants: a dirty slice is in memory; a slice of a block that the image does not have yet is all zeros until it
//! is changed; a slice with a refcount of 0 is not in `full`. The state after a crash is determined by the commit
//! (see [`crate::commit`]): it writes refcounts before references to the clusters, and lowers them only when there
//! are no references any more.

use std::collections::{BTreeSet, HashMap};

use crate::header::TableLocation;
use crate::shape::Shape;
use crate::slice_set::SliceSet;

/// The maximum number of clean slices in memory: 1 MiB of 4 KiB each.
const CLEAN_SLICES_MAX: usize = 256;

/// The refcounts of an image, as far as they are known.
pub(crate) struct Refcounts {
    shape: Shape,
    /// The offset of each block; 0 where there is none. This table may be longer than the one in the image, which is
    /// then moved.
    table: Vec<u64>,
    /// The location of the table in the image.
    pub(crate) table_location: TableLocation,
    /// The location to which the next commit moves the table.
    pub(crate) next_table_location: Option<TableLocation>,
    /// Entries of the table that the image does not have yet.
    pub(crate) new_blocks: BTreeSet<u64>,
    slices: HashMap<u64, Box<[u8]>>,
    dirty: BTreeSet<u64>,
    /// Slices that are being written.
    writing: BTreeSet<u64>,
    /// Slices in which no refcount is 0. A slice that is not in the set may have free clusters or none.
    full: SliceSet,
    /// The number of times that clean slices were dropped from memory.
    drop_count: u64,
}

/// A slice of a refcount block, by its index from the start of the image.
pub(crate) type SliceIndex = u64;

/// The result of a query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SliceLookup<T> {
    /// The value.
    Value(T),
    /// The slice must be read first, from this offset.
    NotLoaded(SliceIndex, u64),
}

/// The space from a cluster on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FreeSpace {
    /// A run of free clusters: the first, and the count.
    Free(u64, u64),
    /// No cluster before this one is free.
    Full(u64),
    /// There is no refcount block: all its clusters are free, but the block must be created first.
    NoBlock,
}

impl Refcounts {
    pub(crate) fn new(shape: Shape, table_at: TableLocation, table: Vec<u64>) -> Self {
        Self {
            shape,
            table,
            table_location: table_at,
            next_table_location: None,
            new_blocks: BTreeSet::new(),
            slices: HashMap::new(),
            dirty: BTreeSet::new(),
            writing: BTreeSet::new(),
            full: SliceSet::default(),
            drop_count: 0,
        }
    }

    pub(crate) fn table(&self) -> &[u64] {
        &self.table
    }

    /// Returns true if there are changes that the image does not have.
    pub(crate) fn is_dirty(&self) -> bool {
        !self.dirty.is_empty() || !self.new_blocks.is_empty() || self.next_table_location.is_some()
    }

    /// Returns the block of a cluster's refcount.
    pub(crate) fn block_of(&self, cluster: u64) -> u64 {
        cluster >> self.shape.refcount_block_bits()
    }

    /// Returns the number of clusters for which the table has entries, with or without blocks.
    pub(crate) fn counted_clusters(&self) -> u64 {
        (self.table.len() as u64) << self.shape.refcount_block_bits()
    }

    pub(crate) fn has_block(&self, block: u64) -> bool {
        self.table.get(block as usize).is_some_and(|offset| *offset != 0)
    }

    /// Returns true if the image has the block of a cluster.
    pub(crate) fn has_durable_block(&self, cluster: u64) -> bool {
        self.next_table_location.is_none() && !self.new_blocks.contains(&self.block_of(cluster))
    }

    /// Extends the table to `blocks` blocks. The caller must then move it.
    pub(crate) fn grow_table(&mut self, blocks: u64) {
        self.table.resize(blocks as usize, 0);
    }

    fn slice_of(&self, cluster: u64) -> SliceIndex {
        cluster >> self.shape.refcount_slice_bits()
    }

    /// Returns the offset of a slice in the image.
    pub(crate) fn slice_offset(&self, slice: SliceIndex) -> Option<u64> {
        let per_block = self.shape.refcount_block_bits() - self.shape.refcount_slice_bits();
        let block = *self.table.get((slice >> per_block) as usize)?;
        let within = slice & ((1 << per_block) - 1);
        (block != 0).then(|| block.saturating_add(within * self.shape.slice_len()))
    }

    /// Adds a new block at `offset`, where the image reads as zeros.
    pub(crate) fn add_block(&mut self, block: u64, offset: u64) {
        self.table[block as usize] = offset;
        self.new_blocks.insert(block);
        let per_block = self.shape.refcount_block_bits() - self.shape.refcount_slice_bits();
        let first = block << per_block;
        // The first slice is needed next. The others are read, as zeros, when they are needed.
        let zeros = vec![0; self.shape.slice_len() as usize];
        self.slices.insert(first, zeros.into());
    }

    /// Returns a number that changes when slices are dropped from memory; see [`Refcounts::load`].
    pub(crate) fn drop_count(&self) -> u64 {
        self.drop_count
    }

    /// Inserts a slice, unless it is present. `drops` is the value of [`Refcounts::drop_count`] when the slice was
    /// read. If slices were dropped meanwhile, this one may have been loaded, changed, written and dropped since, and
    /// must be read again.
    pub(crate) fn load(&mut self, slice: SliceIndex, bytes: &[u8], drops: u64) {
        if drops != self.drop_count {
            return;
        }
        if self.slices.len() >= CLEAN_SLICES_MAX + self.dirty.len() + self.writing.len() {
            let (dirty, writing) = (&self.dirty, &self.writing);
            self.slices.retain(|index, _| dirty.contains(index) || writing.contains(index));
            self.drop_count += 1;
        }
        self.slices.entry(slice).or_insert_with(|| bytes.into());
    }

    /// Inserts a slice of a new block, unless it is present.
    pub(crate) fn load_zeros(&mut self, slice: SliceIndex) {
        let zeros = vec![0; self.shape.slice_len() as usize];
        self.load(slice, &zeros, self.drop_count);
    }

    /// Returns the refcount of a cluster.
    pub(crate) fn get(&self, cluster: u64) -> SliceLookup<u64> {
        let slice = self.slice_of(cluster);
        let Some(offset) = self.slice_offset(slice) else {
            return SliceLookup::Value(0);
        };
        match self.slices.get(&slice) {
            Some(bytes) => SliceLookup::Value(read(bytes, self.shape.refcount_order, self.index(cluster))),
            None => SliceLookup::NotLoaded(slice, offset),
        }
    }

    fn index(&self, cluster: u64) -> usize {
        (cluster & ((1 << self.shape.refcount_slice_bits()) - 1)) as usize
    }

    /// Sets the refcount of a cluster, whose slice must be in memory.
    pub(crate) fn set(&mut self, cluster: u64, count: u64) {
        debug_assert!(count <= self.shape.refcount_max());
        let (slice, index) = (self.slice_of(cluster), self.index(cluster));
        let order = self.shape.refcount_order;
        let Some(bytes) = self.slices.get_mut(&slice) else {
            panic!("refcount of cluster {cluster} is changed, but slice {slice} is not loaded");
        };
        write(bytes, order, index, count);
        self.dirty.insert(slice);
        if count == 0 {
            self.full.remove(slice);
        }
    }

    /// Searches for free clusters from `cluster` on, within one slice.
    pub(crate) fn find_free(&mut self, cluster: u64) -> SliceLookup<FreeSpace> {
        let slice = self.slice_of(cluster);
        let bits = self.shape.refcount_slice_bits();
        if self.full.contains(slice) {
            return SliceLookup::Value(FreeSpace::Full(self.full.next_absent(slice) << bits));
        }
        let Some(offset) = self.slice_offset(slice) else {
            return SliceLookup::Value(FreeSpace::NoBlock);
        };
        let Some(bytes) = self.slices.get(&slice) else {
            return SliceLookup::NotLoaded(slice, offset);
        };
        let order = self.shape.refcount_order;
        let base = slice << bits;
        let Some(first) = find(bytes, order, self.index(cluster), true) else {
            if find(bytes, order, 0, true).is_none() {
                self.full.insert(slice);
            }
            return SliceLookup::Value(FreeSpace::Full((slice + 1) << bits));
        };
        let end = find(bytes, order, first, false).unwrap_or(1 << bits);
        SliceLookup::Value(FreeSpace::Free(base + first as u64, (end - first) as u64))
    }

    /// Returns the slices from `slice` on that [`Refcounts::find_free`] would need to be read next, up to `slices_max`,
    /// before `limit`, and with their offsets.
    pub(crate) fn unread(&self, slice: SliceIndex, limit: SliceIndex, slices_max: usize) -> Vec<(SliceIndex, u64)> {
        let mut found = Vec::new();
        let mut next = self.full.next_absent(slice);
        while found.len() < slices_max && next < limit && !self.slices.contains_key(&next) {
            let Some(offset) = self.slice_offset(next) else { break };
            found.push((next, offset));
            next = self.full.next_absent(next + 1);
        }
        found
    }

    /// Records the result of reading a slice for a search: only that it is full, or else the whole slice. `drops` is
    /// as in [`Refcounts::load`].
    pub(crate) fn load_for_search(&mut self, slice: SliceIndex, bytes: &[u8], drops: u64) {
        let is_current = drops == self.drop_count && !self.slices.contains_key(&slice);
        if is_current && find(bytes, self.shape.refcount_order, 0, true).is_none() {
            self.full.insert(slice);
        } else {
            self.load(slice, bytes, drops);
        }
    }

    /// Returns the dirty slices with their offsets. They are no longer dirty, but stay in memory until
    /// [`Refcounts::finish_write`].
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

    /// Ends the writing of a slice. After a failure the slice is dirty again.
    pub(crate) fn finish_write(&mut self, slice: SliceIndex, success: bool) {
        self.writing.remove(&slice);
        if !success {
            self.dirty.insert(slice);
        }
    }
}

/// Finds the first refcount of a slice from `from` on that is 0 (`zero` is true) or not 0.
fn find(bytes: &[u8], order: u32, from: usize, zero: bool) -> Option<usize> {
    let per_word = 64 >> order;
    let mut index = from;
    while index < (bytes.len() * 8) >> order {
        if index.is_multiple_of(per_word) {
            let at = (index << order) / 8;
            let word = bytes[at..at + 8].iter().fold(0, |word, byte| word << 8 | u64::from(*byte));
            let is_without = if zero { !has_zero(word, order) } else { word == 0 };
            if is_without {
                index += per_word;
                continue;
            }
        }
        if (read(bytes, order, index) == 0) == zero {
            return Some(index);
        }
        index += 1;
    }
    None
}

/// Returns whether one of the refcounts in a word is 0: subtracting 1 from a zero borrows from its highest bit.
fn has_zero(word: u64, order: u32) -> bool {
    let width = 1u32 << order;
    let lowest_bits = u64::MAX / (u64::MAX >> (64 - width));
    let highest_bits = lowest_bits << (width - 1);
    word.wrapping_sub(lowest_bits) & !word & highest_bits != 0
}

/// Returns refcount `index` of a slice. Widths below a byte begin at its low bits, wider ones are big-endian.
pub(crate) fn read(bytes: &[u8], order: u32, index: usize) -> u64 {
    if order < 3 {
        let bits = 1usize << order;
        let per_byte = 8 / bits;
        let byte = u64::from(bytes[index / per_byte]);
        return byte >> (index % per_byte * bits) & ((1 << bits) - 1);
    }
    let width = 1usize << (order - 3);
    let at = index * width;
    bytes[at..at + width].iter().fold(0, |value, byte| value << 8 | u64::from(*byte))
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
    fn refcounts_of_every_width_round_trip() {
        for order in 0..=6 {
            let max = u64::MAX >> (64 - (1u32 << order));
            let count = (512 * 8) >> order;
            let mut bytes = vec![0; 512];
            let value = |index: usize| (index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) & max;
            (0..count).for_each(|index| write(&mut bytes, order, index, value(index)));
            assert!((0..count).all(|index| read(&bytes, order, index) == value(index)), "{order}");
            write(&mut bytes, order, 5, 0);
            assert_eq!(read(&bytes, order, 5), 0);
            assert_eq!(read(&bytes, order, 6), value(6));
        }
    }
    #[test]
    fn find_agrees_with_reading_each_refcount() {
        for order in 0..=6 {
            let max = u64::MAX >> (64 - (1u32 << order));
            let count = (512 * 8) >> order;
            for (zeros, values) in [(0, 1), (0, max), (1, 1), (3, max), (count, 1)] {
                let mut bytes = vec![0; 512];
                (0..count).for_each(|index| write(&mut bytes, order, index, values));
                (0..zeros).for_each(|index| write(&mut bytes, order, (index * 37 + count / 2) % count, 0));
                for from in [0, 1, count / 2, count - 1] {
                    for zero in [true, false] {
                        let expected = (from..count).find(|index| (read(&bytes, order, *index) == 0) == zero);
                        assert_eq!(find(&bytes, order, from, zero), expected, "{order} {zeros} {from} {zero}");
                    }
                }
            }
        }
    }

    const SHAPE: Shape = Shape { cluster_bits: 9, extended: false, refcount_order: 4, version: 3, data_file: false };

    fn refcounts(blocks: u64) -> Refcounts {
        let table_at = TableLocation { offset: 512, entries: 64 };
        let table = (0..64).map(|block| if block < blocks { 1024 + block * 512 } else { 0 });
        Refcounts::new(SHAPE, table_at, table.collect())
    }

    /// A slice has 256 clusters here.
    #[test]
    fn full_slice_is_skipped_until_freed() {
        let mut refcounts = refcounts(3);
        let full: Vec<u8> = [0, 1].repeat(256);
        let mut one_free = full.clone();
        write(&mut one_free, 4, 100, 0);
        refcounts.load_for_search(0, &full, 0);
        refcounts.load_for_search(1, &one_free, 0);
        assert_eq!(refcounts.find_free(0), SliceLookup::Value(FreeSpace::Full(256)));
        assert_eq!(refcounts.find_free(256), SliceLookup::Value(FreeSpace::Free(356, 1)));
        refcounts.set(356, 1);
        assert_eq!(refcounts.find_free(256), SliceLookup::Value(FreeSpace::Full(512)));
        assert_eq!(refcounts.find_free(0), SliceLookup::Value(FreeSpace::Full(512)));
        assert_eq!(refcounts.unread(0, 64, 9), [(2, 1024 + 1024)]);
        assert!(matches!(refcounts.find_free(512), SliceLookup::NotLoaded(2, _)));
        assert_eq!(refcounts.find_free(768), SliceLookup::Value(FreeSpace::NoBlock));
        refcounts.set(300, 0);
        assert_eq!(refcounts.find_free(0), SliceLookup::Value(FreeSpace::Full(256)));
        assert_eq!(refcounts.find_free(256), SliceLookup::Value(FreeSpace::Free(300, 1)));
    }

    #[test]
    fn slice_read_before_drops_is_ignored() {
        let mut refcounts = refcounts(64);
        let drop_count = refcounts.drop_count();
        let empty = vec![0; 512];
        (0..=CLEAN_SLICES_MAX as u64).for_each(|slice| refcounts.load(slice, &empty, drop_count));
        assert_ne!(refcounts.drop_count(), drop_count);
        refcounts.load(5, &empty, drop_count);
        refcounts.load_for_search(6, &[0, 1].repeat(256), drop_count);
        assert!(matches!(refcounts.get(5 * 256), SliceLookup::NotLoaded(5, _)));
        assert!(matches!(refcounts.find_free(6 * 256), SliceLookup::NotLoaded(6, _)));
    }
}
