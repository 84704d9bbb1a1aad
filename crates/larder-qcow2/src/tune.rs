//! What the size of QEMU's L2 cache means for an image: how much of the disk it covers, and whether that is enough.
//!
//! A guest's request needs the L2 entry of its cluster. While the cache covers what the guest uses, it is there;
//! otherwise QEMU reads tables again and again, up to three I/Os for one of the guest's, and loses up to eleven twelfths
//! of its speed (measured on disks of 100 GiB and 1 TiB, with clusters of 256 KiB to 2 MiB).

use crate::shape::Shape;

/// What QEMU gave the L2 cache before 3.1: 1 MiB, or 8 clusters if they are larger.
const OLD_CACHE_MIN: u64 = 1 << 20;
const OLD_CACHE_CLUSTERS: u64 = 8;
/// What it gives at most since, unless told otherwise (on Linux).
pub const CACHE_MAX: u64 = 32 << 20;
/// What QEMU keeps for refcounts before all else when only the sum of both caches is given (`cache-size`), in clusters.
const REFCOUNT_CACHE_CLUSTERS: u64 = 4;

/// The clusters that are worth choosing among: smaller ones save nothing, larger ones are not allowed.
const CHOICE_BITS: std::ops::RangeInclusive<u32> = 16..=21;

/// An L2 cache, and what it does for a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cache {
    /// Bytes of the cache.
    pub bytes: u64,
    /// Bytes of the disk that it covers.
    pub covers: u64,
    /// It does not cover the disk.
    pub thrashes: bool,
}

/// What there is to know about an image's tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Advice {
    /// Clusters of the disk.
    pub clusters: u64,
    /// L2 tables of a fully allocated disk.
    pub tables: u64,
    /// Bytes of the active L1 table.
    pub l1_bytes: u64,
    /// Bytes of all L2 tables of a fully allocated disk.
    pub l2_bytes: u64,
    /// QEMU's cache before version 3.1.
    pub old: Cache,
    /// QEMU's cache today.
    pub today: Cache,
    /// The cache that covers the disk.
    pub needed_bytes: u64,
    /// The sum of both caches, as libvirt gives it, with which the L2 cache covers the disk.
    pub needed_sum_bytes: u64,
    /// Bytes of a cluster of a new image of this size that QEMU's default of today would cover; `None` if none does.
    pub cluster_len: Option<u64>,
    /// The same for the default before 3.1.
    pub cluster_len_old: Option<u64>,
    /// What Larder's map takes if the clusters lie one behind the other, and at worst.
    pub larder_contiguous: u64,
    /// See `larder_contiguous`.
    pub larder_worst: u64,
}

/// What Larder's map takes for a group of leaves that are one run each, with its share of the directory.
const GROUP_BYTES: u64 = 208;
const GROUP_LEAVES: u64 = 8;
/// What it takes for a cluster at worst; and if subclusters are allocated by themselves.
const CLUSTER_BYTES_WORST: u64 = 5;
const CLUSTER_BYTES_WORST_EXTENDED: u64 = 16;

impl Advice {
    /// For an image of a disk of `size` bytes.
    pub fn of(shape: Shape, size: u64) -> Self {
        let cluster_len = shape.cluster_len();
        let clusters = size.div_ceil(cluster_len);
        let tables = shape.l1_entries(size);
        let needed_bytes = needed(shape, size);
        let groups = clusters.div_ceil(GROUP_LEAVES << shape.leaf_bits());
        let cluster_bytes_worst = match shape.extended {
            true => CLUSTER_BYTES_WORST_EXTENDED,
            false => CLUSTER_BYTES_WORST,
        };
        Self {
            clusters,
            tables,
            l1_bytes: tables * 8,
            l2_bytes: tables * cluster_len,
            old: cache(shape, size, old_cache(shape)),
            today: cache(shape, size, CACHE_MAX.min(needed_bytes)),
            needed_bytes,
            needed_sum_bytes: needed_bytes + REFCOUNT_CACHE_CLUSTERS * cluster_len,
            cluster_len: choose(shape, size, |_| CACHE_MAX),
            cluster_len_old: choose(shape, size, old_cache),
            larder_contiguous: groups * GROUP_BYTES,
            larder_worst: groups * GROUP_BYTES + clusters * cluster_bytes_worst,
        }
    }
}

fn old_cache(shape: Shape) -> u64 {
    OLD_CACHE_MIN.max(OLD_CACHE_CLUSTERS * shape.cluster_len())
}

/// The smallest cache that covers the disk, in whole clusters as QEMU has it.
fn needed(shape: Shape, size: u64) -> u64 {
    (size.div_ceil(shape.cluster_len()) * shape.entry_len()).next_multiple_of(shape.cluster_len())
}

fn cache(shape: Shape, size: u64, bytes: u64) -> Cache {
    let covers = bytes / shape.entry_len() * shape.cluster_len();
    Cache {
        bytes,
        covers,
        thrashes: covers < size,
    }
}

/// The smallest clusters with which the cache covers the disk.
fn choose(shape: Shape, size: u64, bytes: impl Fn(Shape) -> u64) -> Option<u64> {
    let shapes = CHOICE_BITS.map(|cluster_bits| Shape { cluster_bits, ..shape });
    let mut fitting = shapes.filter(|shape| !cache(*shape, size, bytes(*shape)).thrashes);
    fitting.next().map(Shape::cluster_len)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const TIB: u64 = 1 << 40;

    fn advice(size: u64, cluster_kib: u64) -> Advice {
        let shape = Shape {
            cluster_bits: (cluster_kib << 10).trailing_zeros(),
            extended: false,
            refcount_order: 4,
            version: 3,
            data_file: false,
        };
        Advice::of(shape, size)
    }

    #[test]
    fn the_old_default_covers_what_was_published() {
        let covered = [64, 256, 512, 1024, 2048].map(|cluster_kib| advice(TIB, cluster_kib).old.covers);
        assert_eq!(covered, [8 * GIB, 64 * GIB, 256 * GIB, TIB, 4 * TIB]);
    }

    #[test]
    fn disks_of_100_gib_with_256_kib_clusters_thrash_with_the_old_default() {
        assert!(advice(100 * GIB, 256).old.thrashes);
        assert!(!advice(100 * GIB, 256).today.thrashes);
    }

    #[test]
    fn disks_of_100_gib_with_512_kib_clusters_are_fine_with_the_old_default() {
        assert!(!advice(100 * GIB, 512).old.thrashes);
    }

    #[test]
    fn disks_of_1_tib_with_512_kib_clusters_thrash_with_the_old_default() {
        assert!(advice(TIB, 512).old.thrashes);
    }

    #[test]
    fn disks_of_1_tib_with_1_mib_clusters_are_fine_with_the_old_default() {
        assert!(!advice(TIB, 1024).old.thrashes);
    }

    #[test]
    fn disks_of_1_tib_with_2_mib_clusters_are_fine_with_the_old_default() {
        assert!(!advice(TIB, 2048).old.thrashes);
    }

    #[test]
    fn a_tib_of_64_kib_clusters_needs_128_mib_and_thrashes_today_too() {
        let advice = advice(TIB, 64);
        assert_eq!(advice.needed_bytes, 128 << 20);
        assert_eq!(advice.needed_sum_bytes, (128 << 20) + (256 << 10));
        assert!(advice.today.thrashes);
        assert_eq!(advice.today.covers, 256 * GIB);
        assert_eq!((advice.clusters, advice.tables), (1 << 24, 2048));
        assert_eq!(advice.cluster_len, Some(256 << 10));
        assert_eq!(advice.cluster_len_old, Some(1 << 20));
        assert!(advice.larder_contiguous < 1 << 20);
    }

    #[test]
    fn a_disk_that_no_cluster_size_suits_is_said_to_be_so() {
        assert_eq!(advice(64 * TIB, 64).cluster_len, None);
    }
}
