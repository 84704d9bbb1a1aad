//! The metadata cache: the location of each guest cluster of the whole disk, in memory.
//!
//! The map is divided into leaves, one for each slice of an L2 table (4 KiB of it: 512 clusters), and each leaf has
//! the smallest form that its entries allow. A contiguously allocated disk of 64 KiB clusters takes 0.8 MiB per TiB,
//! the worst fragmentation 5 bytes per cluster. A look-up is three array accesses and, in a list of runs, a binary
//! search.
//!
//! Under a memory limit, leaves that were not used recently are evicted, and read again from the image when they are
//! needed, by a clock algorithm over groups of eight. Dirty leaves are not evicted, because the image does not have
//! them yet.
//!
//! Invariants: a leaf of an L2 table that does not exist is never absent once its group exists; `leaf_bytes` is the
//! memory that the leaves own in addition to their groups; a dirty leaf is loaded.

mod directory;
mod leaf;

use std::collections::BTreeSet;

use directory::Directory;
pub use leaf::LEAF_ENTRIES_MAX;
use leaf::Leaf;

use crate::entry::L2Entry;
use crate::metadata_memory::MetadataShare;
use crate::shape::Shape;

/// The number of leaves of a group.
const GROUP_LEAVES: u64 = 8;

/// The index of a slice of the guest's clusters, from the start of the disk.
pub type LeafIndex = u64;

/// The memory limit of a map.
pub(crate) enum MapLimit {
    /// A limit in bytes.
    #[cfg(test)]
    Bytes(usize),
    /// A share of the limit for all images of a disk.
    Share(MetadataShare),
}

impl MapLimit {
    fn bytes(&self) -> usize {
        match self {
            #[cfg(test)]
            Self::Bytes(bytes) => *bytes,
            Self::Share(share) => share.map_bytes(),
        }
    }
}

/// The map of a disk.
pub struct Map {
    shape: Shape,
    groups: Directory<Group>,
    leaves: u64,
    dirty: BTreeSet<LeafIndex>,
    /// Leaves that are being written: until then the image has an older version.
    writing: BTreeSet<LeafIndex>,
    /// The memory that leaves own, in bytes.
    leaf_bytes: usize,
    limit: MapLimit,
    hand: usize,
    statistics: MapStatistics,
}

#[derive(Default)]
struct Group {
    leaves: [Leaf; GROUP_LEAVES as usize],
    /// One bit per leaf: used since the clock hand last visited the group.
    used: u8,
}

/// The counters of a map.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MapStatistics {
    /// The memory in use, in bytes.
    pub bytes: u64,
    /// The number of loaded leaves.
    pub loaded: u64,
    /// The number of leaves evicted to stay below the limit.
    pub evicted: u64,
    /// The number of look-ups whose leaf was absent.
    pub misses: u64,
}

impl Map {
    /// Creates an empty map of a disk of `clusters` guest clusters, which takes about `limit` bytes at most.
    pub(crate) fn new(shape: Shape, clusters: u64, limit: MapLimit) -> Self {
        let mut map = Self {
            shape,
            groups: Directory::new(),
            leaves: 0,
            dirty: BTreeSet::new(),
            writing: BTreeSet::new(),
            leaf_bytes: 0,
            limit,
            hand: 0,
            statistics: MapStatistics::default(),
        };
        map.grow(clusters);
        map
    }

    /// Extends the map to at least `clusters` guest clusters.
    pub fn grow(&mut self, clusters: u64) {
        self.leaves = self.leaves.max(clusters.div_ceil(1 << self.shape.leaf_bits()));
        self.groups.grow(self.leaves.div_ceil(GROUP_LEAVES) as usize);
    }

    /// Returns the number of leaves of the disk.
    pub fn leaves(&self) -> u64 {
        self.leaves
    }

    /// Returns the leaf of a guest cluster.
    pub fn leaf_of(&self, cluster: u64) -> LeafIndex {
        cluster >> self.shape.leaf_bits()
    }

    /// Returns the counters.
    pub fn statistics(&self) -> MapStatistics {
        MapStatistics { bytes: self.bytes() as u64, ..self.statistics }
    }

    fn bytes(&self) -> usize {
        self.groups.bytes() + self.leaf_bytes
    }

    /// Returns true if the memory limit is reached.
    pub fn is_full(&self) -> bool {
        self.bytes() >= self.limit.bytes()
    }

    fn leaf(&self, index: LeafIndex) -> Option<&Leaf> {
        let group = self.groups.get((index / GROUP_LEAVES) as usize)?;
        Some(&group.leaves[(index % GROUP_LEAVES) as usize])
    }

    /// Returns true if a leaf is loaded.
    pub fn is_loaded(&self, index: LeafIndex) -> bool {
        self.leaf(index).is_some_and(Leaf::is_loaded)
    }

    /// Returns the entry of a guest cluster, and a lower bound of the length of its run, itself included (at most
    /// `limit`, and within its leaf). Returns `None` if its leaf is not loaded.
    #[inline]
    pub fn run_at(&mut self, cluster: u64, limit: usize) -> Option<(L2Entry, usize)> {
        let leaf = cluster >> self.shape.leaf_bits();
        let index = (cluster & ((1 << self.shape.leaf_bits()) - 1)) as usize;
        if let Some(group) = self.groups.get_mut((leaf / GROUP_LEAVES) as usize) {
            let slot = (leaf % GROUP_LEAVES) as usize;
            group.used |= 1 << slot;
            let (entry, count) = group.leaves[slot].run_at(self.shape, index, limit);
            if count > 0 {
                return Some((entry, count));
            }
        }
        self.statistics.misses += 1;
        None
    }

    /// Inserts a leaf, unless it is loaded.
    pub fn load(&mut self, index: LeafIndex, entries: &[L2Entry]) {
        if !self.is_loaded(index) {
            self.insert_leaf(index, Leaf::of(self.shape, entries));
        }
    }

    /// Inserts a leaf of an L2 table that does not exist, unless the leaf is loaded.
    pub fn load_unallocated(&mut self, index: LeafIndex) {
        if !self.is_loaded(index) {
            self.insert_leaf(index, Leaf::UNALLOCATED);
        }
    }

    fn insert_leaf(&mut self, index: LeafIndex, leaf: Leaf) {
        self.leaf_bytes += leaf.heap_bytes();
        self.statistics.loaded += 1;
        let group = self.groups.get_or_insert((index / GROUP_LEAVES) as usize);
        let slot = (index % GROUP_LEAVES) as usize;
        group.leaves[slot] = leaf;
        group.used |= 1 << slot;
        if self.bytes() > self.limit.bytes() {
            self.evict(index);
        }
    }

    /// Changes the `count` entries from `cluster` on (all in one loaded leaf) into a run that begins with `first`.
    /// The leaf becomes dirty.
    ///
    /// # Panics
    /// If the leaf is not loaded.
    pub fn set_run(&mut self, cluster: u64, count: usize, first: L2Entry) {
        let index = cluster >> self.shape.leaf_bits();
        let within = (cluster & ((1 << self.shape.leaf_bits()) - 1)) as usize;
        let Some(group) = self.groups.get_mut((index / GROUP_LEAVES) as usize) else {
            panic!("leaf {index} is changed but not loaded");
        };
        let leaf = &mut group.leaves[(index % GROUP_LEAVES) as usize];
        assert!(leaf.is_loaded(), "leaf {index} is changed but not loaded");
        let before = leaf.heap_bytes();
        leaf.set_run(self.shape, within, count, first);
        self.leaf_bytes = self.leaf_bytes + leaf.heap_bytes() - before;
        self.dirty.insert(index);
    }

    /// Returns the dirty leaves, in order.
    pub fn dirty(&self) -> &BTreeSet<LeafIndex> {
        &self.dirty
    }

    /// Encodes a dirty leaf as its slice on disk. The leaf counts as being written, and is not evicted, until
    /// [`Map::finish_write`].
    pub fn take_dirty(&mut self, index: LeafIndex, bytes: &mut [u8]) {
        self.encode(index, bytes);
        self.dirty.remove(&index);
        self.writing.insert(index);
    }

    /// Ends the writing of a leaf from [`Map::take_dirty`]. After a failure the leaf is dirty again.
    pub fn finish_write(&mut self, index: LeafIndex, success: bool) {
        self.writing.remove(&index);
        if !success {
            self.dirty.insert(index);
        }
    }

    fn encode(&self, index: LeafIndex, bytes: &mut [u8]) {
        let mut entries = [L2Entry::UNALLOCATED; LEAF_ENTRIES_MAX];
        let entries = &mut entries[..1 << self.shape.leaf_bits()];
        if let Some(leaf) = self.leaf(index) {
            leaf.expand(self.shape, entries);
        }
        encode(self.shape, entries, bytes);
    }

    /// Evicts leaves, except `except`, until the memory is within the limit. Dirty leaves are not evicted, even above
    /// the limit.
    fn evict(&mut self, except: LeafIndex) {
        // Each group is visited at most twice: the first visit may find that it has been used.
        let mut groups_left = self.groups.used() * 2;
        let limit = self.limit.bytes();
        while self.bytes() > limit && groups_left > 0 {
            groups_left -= 1;
            let Some(number) = self.groups.next_present(self.hand) else {
                return;
            };
            self.hand = number + 1;
            let Some(group) = self.groups.get_mut(number) else {
                return;
            };
            let first = number as u64 * GROUP_LEAVES;
            let mut has_loaded = false;
            for slot in 0..GROUP_LEAVES {
                let (index, leaf) = (first + slot, &mut group.leaves[slot as usize]);
                if !leaf.is_loaded() {
                    continue;
                }
                let needed = self.dirty.contains(&index) || self.writing.contains(&index);
                if group.used >> slot & 1 != 0 || index == except || needed {
                    has_loaded = true;
                    continue;
                }
                self.leaf_bytes -= leaf.heap_bytes();
                self.statistics.loaded -= 1;
                self.statistics.evicted += 1;
                *leaf = Leaf::Absent;
            }
            group.used = 0;
            if !has_loaded {
                self.groups.remove(number);
            }
        }
    }
}

/// Decodes the entries of a slice.
pub fn decode(shape: Shape, bytes: &[u8], entries: &mut [L2Entry]) {
    let word_at = |at: usize| {
        let mut word = [0; 8];
        word.copy_from_slice(&bytes[at..at + 8]);
        u64::from_be_bytes(word)
    };
    for (index, entry) in entries.iter_mut().enumerate() {
        *entry = match shape.extended {
            false => L2Entry { word: word_at(index * 8), bitmap: 0 },
            true => L2Entry { word: word_at(index * 16), bitmap: word_at(index * 16 + 8) },
        };
    }
}

fn encode(shape: Shape, entries: &[L2Entry], bytes: &mut [u8]) {
    for (entry, out) in entries.iter().zip(bytes.chunks_exact_mut(shape.entry_len() as usize)) {
        out[..8].copy_from_slice(&entry.on_disk().to_be_bytes());
        if shape.extended {
            out[8..].copy_from_slice(&entry.bitmap.to_be_bytes());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape { cluster_bits: 16, extended: false, refcount_order: 4, version: 3, data_file: false };

    fn load_all(map: &mut Map, host: impl Fn(u64) -> u64) {
        let mut entries = [L2Entry::UNALLOCATED; LEAF_ENTRIES_MAX];
        for leaf in 0..map.leaves() {
            for (index, entry) in entries.iter_mut().enumerate() {
                *entry = L2Entry::data(SHAPE, host(leaf * 512 + index as u64) << 16);
            }
            map.load(leaf, &entries);
        }
    }

    #[test]
    fn contiguous_tib_takes_under_a_mib() {
        let clusters = (1u64 << 40) / 65536;
        let mut map = Map::new(SHAPE, clusters, MapLimit::Bytes(usize::MAX));
        load_all(&mut map, |cluster| cluster + 100);
        assert!(map.bytes() < 1 << 20, "{}", map.bytes());
        assert_eq!(map.run_at(clusters - 1, 8), Some((L2Entry::data(SHAPE, (clusters + 99) << 16), 1)));
    }

    #[test]
    fn eviction_keeps_limit_and_dirty_leaves() {
        let mut map = Map::new(SHAPE, 512 * 1000, MapLimit::Bytes(100_000));
        map.load_unallocated(3);
        map.set_run(3 * 512 + 5, 1, L2Entry::data(SHAPE, 77 << 16));
        load_all(&mut map, |cluster| 1 + cluster * 0x9e37_79b9 % (1 << 28));
        assert!(map.bytes() <= 100_000, "{}", map.bytes());
        assert!(map.statistics().evicted > 500);
        assert_eq!(map.run_at(3 * 512 + 5, 1), Some((L2Entry::data(SHAPE, 77 << 16), 1)));
        let mut slice = [0; 4096];
        map.take_dirty(3, &mut slice);
        map.finish_write(3, true);
        assert!(map.dirty().is_empty());
        let mut entries = [L2Entry::UNALLOCATED; LEAF_ENTRIES_MAX];
        decode(SHAPE, &slice, &mut entries);
        assert_eq!(entries[5], L2Entry::data(SHAPE, 77 << 16));
        assert_eq!(entries[6], L2Entry::UNALLOCATED);
    }
}
