//! L1 and L2 entries (QEMU `docs/interop/qcow2.txt`, "Cluster mapping").

use crate::shape::Shape;

/// The table or cluster is used once, so it may be changed in place.
pub const COPIED: u64 = 1 << 63;
/// The cluster is compressed.
pub const COMPRESSED: u64 = 1 << 62;
/// The cluster reads as zeros (standard entries only).
pub const ZERO: u64 = 1;
/// The bits with the offset of the table or cluster, in bytes.
pub const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// In memory only: marks the entry of a cluster that must not be used, because its target is metadata, another
/// cluster's offset in the data file, or past the end of the file. The bit is reserved; the image never gets it.
pub const DAMAGED: u64 = 1 << 56;
/// All subclusters are allocated.
pub const ALL_ALLOCATED: u64 = 0xffff_ffff;
/// All subclusters are zero.
pub const ALL_ZERO: u64 = ALL_ALLOCATED << 32;

/// An L2 entry with the layout on disk.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct L2Entry {
    /// The first 64 bits.
    pub word: u64,
    /// The second 64 bits of an extended entry: the low half marks the allocated subclusters, the high half the zero
    /// ones. 0 in standard entries.
    pub bitmap: u64,
}

/// The content of a cluster, or of a subcluster of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ClusterContent {
    /// The content of the backing file, or zeros.
    Unallocated,
    /// Zeros.
    Zero,
    /// Data in the image.
    Data,
    /// Compressed data in the image.
    Compressed,
    /// The entry is invalid.
    Corrupt,
}

/// The location of a compressed cluster.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CompressedLocation {
    /// The offset of the first byte, which may be unaligned.
    pub offset: u64,
    /// The maximum length in bytes.
    pub len: u64,
}

impl L2Entry {
    /// The entry of an unallocated cluster.
    pub const UNALLOCATED: Self = Self { word: 0, bitmap: 0 };

    /// Returns the entry of a zero cluster without a host cluster.
    pub const fn zero(shape: Shape) -> Self {
        if shape.extended { Self { word: 0, bitmap: ALL_ZERO } } else { Self { word: ZERO, bitmap: 0 } }
    }

    /// Returns the entry of a fully allocated host cluster that is used once.
    pub const fn data(shape: Shape, host: u64) -> Self {
        Self { word: host | COPIED, bitmap: if shape.extended { ALL_ALLOCATED } else { 0 } }
    }

    /// Returns true if the cluster is compressed.
    pub const fn is_compressed(self) -> bool {
        self.word & COMPRESSED != 0
    }

    /// Returns the offset of the host cluster, if there is one. With an external data file, 0 is the offset of its
    /// first cluster (an entry without a host cluster lacks [`COPIED`]); otherwise 0 means no host cluster.
    pub const fn host(self, shape: Shape) -> Option<u64> {
        let offset = self.word & OFFSET;
        if self.is_compressed() || (offset == 0 && !self.has_host_at_zero(shape)) { None } else { Some(offset) }
    }

    /// Returns true if an offset of 0 is the offset of a host cluster.
    const fn has_host_at_zero(self, shape: Shape) -> bool {
        shape.data_file && self.is_copied() && (shape.extended || self.word & ZERO == 0)
    }

    /// Returns true if the host cluster belongs to this entry alone.
    pub const fn is_copied(self) -> bool {
        self.word & COPIED != 0
    }

    /// Returns true if the cluster must not be used; see [`DAMAGED`].
    pub const fn is_damaged(self) -> bool {
        !self.is_compressed() && self.word & DAMAGED != 0
    }

    /// Returns the first 64 bits as written to the image.
    pub const fn on_disk(self) -> u64 {
        if self.is_damaged() { self.word & !DAMAGED } else { self.word }
    }

    /// Returns the location of the compressed data.
    pub const fn compressed_location(self, shape: Shape) -> CompressedLocation {
        let bits = shape.compressed_offset_bits();
        let offset = self.word & ((1 << bits) - 1);
        let sectors = (self.word & !(COPIED | COMPRESSED)) >> bits;
        CompressedLocation {
            offset,
            // The count is the number of sectors after the one with the first byte.
            len: (sectors + 1) * 512 - (offset & 511),
        }
    }

    /// Returns true if the entry has the zero flag in an image of version 2, which does not define the flag. The
    /// cluster may be meant to hold zeros, the data at the entry's offset, or the backing file's data.
    pub const fn has_unknown_zero_flag(self, shape: Shape) -> bool {
        shape.version < 3 && !self.is_compressed() && self.word & ZERO != 0
    }

    /// Returns the content of subcluster `subcluster` (of [`Shape::subclusters_per_cluster`]).
    pub const fn content(self, shape: Shape, subcluster: u32) -> ClusterContent {
        if self.is_compressed() {
            return if shape.data_file { ClusterContent::Corrupt } else { ClusterContent::Compressed };
        }
        if self.word & (DAMAGED | OFFSET & (shape.cluster_len() - 1)) != 0 {
            return ClusterContent::Corrupt;
        }
        let has_host = self.host(shape).is_some();
        if shape.extended {
            let allocated = self.bitmap >> subcluster & 1 != 0;
            let zero = self.bitmap >> (subcluster + 32) & 1 != 0;
            return match (allocated, zero) {
                (true, true) => ClusterContent::Corrupt,
                (true, false) if has_host => ClusterContent::Data,
                (true, false) => ClusterContent::Corrupt,
                (false, true) => ClusterContent::Zero,
                (false, false) => ClusterContent::Unallocated,
            };
        }
        if self.has_unknown_zero_flag(shape) {
            ClusterContent::Corrupt
        } else if self.word & ZERO != 0 {
            ClusterContent::Zero
        } else if has_host {
            ClusterContent::Data
        } else {
            ClusterContent::Unallocated
        }
    }

    /// Returns true if `other`, the entry `count` clusters later, continues this one's run: it has the same kind, and
    /// the host cluster that follows.
    pub const fn continues(self, shape: Shape, count: u64, other: Self) -> bool {
        if self.is_compressed() || self.bitmap != other.bitmap {
            return false;
        }
        self.advanced(shape, count).word == other.word
    }

    /// Returns the entry `count` clusters later in the same run.
    pub const fn advanced(self, shape: Shape, count: u64) -> Self {
        match self.host(shape) {
            None => self,
            Some(_) => Self { word: self.word.wrapping_add(count << shape.cluster_bits), bitmap: self.bitmap },
        }
    }
}
