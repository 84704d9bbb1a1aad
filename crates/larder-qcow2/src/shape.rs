//! The sizes that follow from a header: clusters, tables, and the slices in which metadata is read and written.

use crate::entry::OFFSET;

/// The length in bytes of the slices in which L2 tables and refcount blocks are read and written (or a cluster, if
/// that is smaller).
pub const SLICE_BYTES_MAX: u64 = 4096;

/// The number of subclusters of a cluster in an image with extended L2 entries.
pub const SUBCLUSTERS: u32 = 32;

/// The sizes of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// The log2 of a cluster's length in bytes, 9 to 21.
    pub cluster_bits: u32,
    /// L2 entries have 128 bits; the second half is a bitmap of subclusters.
    pub extended: bool,
    /// The log2 of a refcount's width in bits, 0 to 6.
    pub refcount_order: u32,
    /// The version of the format, 2 or 3.
    pub version: u32,
    /// The guest's data is in an external data file, where the host offset of a guest cluster is its guest offset.
    /// Only there is 0 a host offset.
    pub data_file: bool,
}

impl Shape {
    /// Returns the length of a cluster in bytes.
    pub const fn cluster_len(self) -> u64 {
        1 << self.cluster_bits
    }

    /// Returns the length of an L2 entry in bytes.
    pub const fn entry_len(self) -> u64 {
        if self.extended { 16 } else { 8 }
    }

    /// Returns the log2 of the number of entries of an L2 table.
    pub const fn table_bits(self) -> u32 {
        self.cluster_bits - self.entry_len().trailing_zeros()
    }

    /// Returns the length in bytes of a slice of an L2 table or a refcount block.
    pub const fn slice_len(self) -> u64 {
        if self.cluster_len() < SLICE_BYTES_MAX { self.cluster_len() } else { SLICE_BYTES_MAX }
    }

    /// Returns the log2 of the number of entries of a slice of an L2 table, which are those of a leaf of the map.
    pub const fn leaf_bits(self) -> u32 {
        self.slice_len().trailing_zeros() - self.entry_len().trailing_zeros()
    }

    /// Returns the number of bytes of the disk that one L2 table maps.
    pub const fn table_span(self) -> u64 {
        1 << (self.cluster_bits + self.table_bits())
    }

    /// Returns the maximum size of a disk, in bytes: a cluster's offset in an external data file must fit an L2
    /// entry.
    pub const fn size_max(self) -> u64 {
        if self.data_file { OFFSET + 512 } else { i64::MAX as u64 }
    }

    /// Returns the number of L1 entries for a disk of `size` bytes.
    pub const fn l1_entries(self, size: u64) -> u64 {
        size.div_ceil(self.table_span())
    }

    /// Returns the number of parts of a cluster that can be allocated or zero separately: its subclusters, or 1.
    pub const fn subclusters_per_cluster(self) -> u32 {
        if self.extended { SUBCLUSTERS } else { 1 }
    }

    /// Returns the length of a part in bytes.
    pub const fn subcluster_len(self) -> u64 {
        self.cluster_len() / self.subclusters_per_cluster() as u64
    }

    /// Returns the log2 of the number of refcounts of a slice of a refcount block.
    pub const fn refcount_slice_bits(self) -> u32 {
        self.slice_len().trailing_zeros() + 3 - self.refcount_order
    }

    /// Returns the log2 of the number of refcounts of a refcount block.
    pub const fn refcount_block_bits(self) -> u32 {
        self.cluster_bits + 3 - self.refcount_order
    }

    /// Returns the maximum refcount that can be stored.
    pub const fn refcount_max(self) -> u64 {
        u64::MAX >> (64 - (1u32 << self.refcount_order))
    }

    /// Returns the number of bits of a compressed cluster's offset in its entry; the sector count is in the bits
    /// above.
    pub const fn compressed_offset_bits(self) -> u32 {
        62 - (self.cluster_bits - 8)
    }
}
