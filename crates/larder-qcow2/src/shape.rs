//! The sizes that follow from a header: clusters, tables, and the pieces in which metadata is read and written.

use crate::entry::OFFSET;

/// A part of an L2 table or refcount block is read and written in pieces of this many bytes (or a cluster, if that is
/// smaller).
pub const SLICE_BYTES_MAX: u64 = 4096;

/// Subclusters of a cluster in an image with extended L2 entries.
pub const SUBCLUSTERS: u32 = 32;

/// The sizes of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// log2 of a cluster's bytes, 9 to 21.
    pub cluster_bits: u32,
    /// L2 entries have 128 bits, the second half a bitmap of subclusters.
    pub extended: bool,
    /// log2 of a refcount's bits, 0 to 6.
    pub refcount_order: u32,
    /// 2 or 3.
    pub version: u32,
    /// The guest's data is in an external data file, where each guest cluster has its own offset. Only there is 0 a host
    /// offset.
    pub data_file: bool,
}

impl Shape {
    /// Bytes of a cluster.
    pub const fn cluster_len(self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of an L2 entry.
    pub const fn entry_len(self) -> u64 {
        if self.extended { 16 } else { 8 }
    }

    /// log2 of the entries of an L2 table.
    pub const fn table_bits(self) -> u32 {
        self.cluster_bits - self.entry_len().trailing_zeros()
    }

    /// Bytes of a slice of an L2 table or a refcount block.
    pub const fn slice_len(self) -> u64 {
        if self.cluster_len() < SLICE_BYTES_MAX {
            self.cluster_len()
        } else {
            SLICE_BYTES_MAX
        }
    }

    /// log2 of the entries of a slice of an L2 table: what a leaf of the map covers.
    pub const fn leaf_bits(self) -> u32 {
        self.slice_len().trailing_zeros() - self.entry_len().trailing_zeros()
    }

    /// Bytes of the disk that one L2 table maps.
    pub const fn table_span(self) -> u64 {
        1 << (self.cluster_bits + self.table_bits())
    }

    /// The largest disk, in bytes: in an external data file a cluster's offset must fit an L2 entry.
    pub const fn size_max(self) -> u64 {
        if self.data_file { OFFSET + 512 } else { i64::MAX as u64 }
    }

    /// How many L1 entries a disk of `size` bytes takes.
    pub const fn l1_entries(self, size: u64) -> u64 {
        size.div_ceil(self.table_span())
    }

    /// Subclusters of a cluster: the parts that can be allocated or zero by themselves.
    pub const fn parts(self) -> u32 {
        if self.extended { SUBCLUSTERS } else { 1 }
    }

    /// Bytes of a part.
    pub const fn part_len(self) -> u64 {
        self.cluster_len() / self.parts() as u64
    }

    /// log2 of the refcounts of a slice of a refcount block.
    pub const fn refcount_slice_bits(self) -> u32 {
        self.slice_len().trailing_zeros() + 3 - self.refcount_order
    }

    /// log2 of the refcounts of a refcount block.
    pub const fn refcount_block_bits(self) -> u32 {
        self.cluster_bits + 3 - self.refcount_order
    }

    /// The largest refcount that can be stored.
    pub const fn refcount_max(self) -> u64 {
        u64::MAX >> (64 - (1u32 << self.refcount_order))
    }

    /// log2 of the units in which a compressed cluster's place is given, and of the bits of their count.
    pub const fn compressed_offset_bits(self) -> u32 {
        62 - (self.cluster_bits - 8)
    }
}
