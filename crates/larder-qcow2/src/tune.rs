//! The effect of the size of QEMU's L2 cache on an image: the part of the disk that it covers, and whether that is
//! enough.
//!
//! A guest's request needs the L2 entry of its cluster. While the cache covers the guest's working set, the entry is
//! cached. Otherwise QEMU reads tables again and again, up to three I/Os for one of the guest's, and loses up to
//! eleven twelfths of its speed (measured on disks of 100 GiB and 1 TiB, with clusters of 256 KiB to 2 MiB).

use crate::shape::Shape;

/// QEMU's default L2 cache before 3.1: 1 MiB, or 8 clusters if they are larger.
const OLD_CACHE_BYTES_MIN: u64 = 1 << 20;
const OLD_CACHE_CLUSTERS: u64 = 8;
/// QEMU's maximum default L2 cache since 3.1 (on Linux), in bytes.
pub const L2_CACHE_BYTES_MAX: u64 = 32 << 20;
/// The minimum that QEMU reserves for refcounts if only the sum of both caches is given (`cache-size`), in clusters.
const REFCOUNT_CACHE_CLUSTERS: u64 = 4;

/// The cluster sizes to recommend: smaller ones save nothing, larger ones are not allowed.
const CLUSTER_BITS_CHOICES: std::ops::RangeInclusive<u32> = 16..=21;

/// An L2 cache, and its effect on a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct L2CacheCoverage {
    /// The size of the cache in bytes.
    pub bytes: u64,
    /// The number of bytes of the disk that the cache covers.
    pub covers: u64,
    /// The cache does not cover the disk.
    pub thrashes: bool,
}

/// The properties of an image's tables, and recommended sizes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheAdvice {
    /// The number of clusters of the disk.
    pub clusters: u64,
    /// The number of L2 tables of a fully allocated disk.
    pub tables: u64,
    /// The length of the active L1 table in bytes.
    pub l1_bytes: u64,
    /// The length of all L2 tables of a fully allocated disk in bytes.
    pub l2_bytes: u64,
    /// QEMU's default cache before version 3.1.
    pub before_3_1: L2CacheCoverage,
    /// QEMU's default cache today.
    pub since_3_1: L2CacheCoverage,
    /// The size in bytes of the cache that covers the disk.
    pub needed_bytes: u64,
    /// The sum of both caches, as configured by libvirt, with which the L2 cache covers the disk.
    pub needed_sum_bytes: u64,
    /// The cluster size in bytes of a new image of this size that QEMU's present default would cover; `None` if there
    /// is none.
    pub cluster_len: Option<u64>,
    /// The cluster size in bytes of a new image of this size that the default before 3.1 would cover; `None` if there
    /// is none.
    pub cluster_len_before_3_1: Option<u64>,
    /// The memory in bytes of Larder's map if the clusters are contiguous.
    pub larder_contiguous: u64,
    /// The memory in bytes of Larder's map in the worst case.
    pub larder_worst: u64,
}

/// The memory in bytes that Larder's map takes for a group of leaves of one run each, including the directory.
const GROUP_BYTES: u64 = 208;
const GROUP_LEAVES: u64 = 8;
/// The worst-case memory in bytes for a cluster, without and with separately allocated subclusters.
const CLUSTER_BYTES_WORST: u64 = 5;
const CLUSTER_BYTES_WORST_EXTENDED: u64 = 16;

impl CacheAdvice {
    /// Returns the advice for an image of a disk of `size` bytes.
    pub fn of(shape: Shape, size: u64) -> Self {
        let cluster_len = shape.cluster_len();
        let clusters = size.div_ceil(cluster_len);
        let tables = shape.l1_entries(size);
        let needed_bytes = covering_cache_bytes(shape, size);
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
            before_3_1: coverage(shape, size, old_cache(shape)),
            since_3_1: coverage(shape, size, L2_CACHE_BYTES_MAX.min(needed_bytes)),
            needed_bytes,
            needed_sum_bytes: needed_bytes + REFCOUNT_CACHE_CLUSTERS * cluster_len,
            cluster_len: smallest_covering_cluster_len(shape, size, |_| L2_CACHE_BYTES_MAX),
            cluster_len_before_3_1: smallest_covering_cluster_len(shape, size, old_cache),
            larder_contiguous: groups * GROUP_BYTES,
            larder_worst: groups * GROUP_BYTES + clusters * cluster_bytes_worst,
        }
    }
}

fn old_cache(shape: Shape) -> u64 {
    OLD_CACHE_BYTES_MIN.max(OLD_CACHE_CLUSTERS * shape.cluster_len())
}

/// Returns the smallest cache that covers the disk, in whole clusters as in QEMU.
fn covering_cache_bytes(shape: Shape, size: u64) -> u64 {
    (size.div_ceil(shape.cluster_len()) * shape.entry_len()).next_multiple_of(shape.cluster_len())
}

fn coverage(shape: Shape, size: u64, bytes: u64) -> L2CacheCoverage {
    let covers = bytes / shape.entry_len() * shape.cluster_len();
    L2CacheCoverage { bytes, covers, thrashes: covers < size }
}

/// Returns the smallest cluster size with which the cache covers the disk.
fn smallest_covering_cluster_len(shape: Shape, size: u64, bytes: impl Fn(Shape) -> u64) -> Option<u64> {
    let shapes = CLUSTER_BITS_CHOICES.map(|cluster_bits| Shape { cluster_bits, ..shape });
    let mut fitting = shapes.filter(|shape| !coverage(*shape, size, bytes(*shape)).thrashes);
    fitting.next().map(Shape::cluster_len)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;
    const TIB: u64 = 1 << 40;

    fn advice(size: u64, cluster_kib: u64) -> CacheAdvice {
        let shape = Shape {
            cluster_bits: (cluster_kib << 10).trailing_zeros(),
            extended: false,
            refcount_order: 4,
            version: 3,
            data_file: false,
        };
        CacheAdvice::of(shape, size)
    }

    #[test]
    fn old_default_covers_published_sizes() {
        let covered = [64, 256, 512, 1024, 2048].map(|cluster_kib| advice(TIB, cluster_kib).before_3_1.covers);
        assert_eq!(covered, [8 * GIB, 64 * GIB, 256 * GIB, TIB, 4 * TIB]);
    }

    /// The default cache before 3.1 does not cover a disk of 100 GiB with clusters of 256 KiB; today's does.
    #[test]
    fn old_default_thrashes_100g_256k() {
        assert!(advice(100 * GIB, 256).before_3_1.thrashes);
        assert!(!advice(100 * GIB, 256).since_3_1.thrashes);
    }

    /// The default cache before 3.1 covers a disk of 100 GiB with clusters of 512 KiB.
    #[test]
    fn old_default_covers_100g_512k() {
        assert!(!advice(100 * GIB, 512).before_3_1.thrashes);
    }

    /// The default cache before 3.1 does not cover a disk of 1 TiB with clusters of 512 KiB.
    #[test]
    fn old_default_thrashes_1t_512k() {
        assert!(advice(TIB, 512).before_3_1.thrashes);
    }

    /// The default cache before 3.1 covers a disk of 1 TiB with clusters of 1 MiB.
    #[test]
    fn old_default_covers_1t_1m() {
        assert!(!advice(TIB, 1024).before_3_1.thrashes);
    }

    /// The default cache before 3.1 covers a disk of 1 TiB with clusters of 2 MiB.
    #[test]
    fn old_default_covers_1t_2m() {
        assert!(!advice(TIB, 2048).before_3_1.thrashes);
    }

    /// A disk of 1 TiB with clusters of 64 KiB needs a cache of 128 MiB, which today's default is below.
    #[test]
    fn present_default_thrashes_1t_64k() {
        let advice = advice(TIB, 64);
        assert_eq!(advice.needed_bytes, 128 << 20);
        assert_eq!(advice.needed_sum_bytes, (128 << 20) + (256 << 10));
        assert!(advice.since_3_1.thrashes);
        assert_eq!(advice.since_3_1.covers, 256 * GIB);
        assert_eq!((advice.clusters, advice.tables), (1 << 24, 2048));
        assert_eq!(advice.cluster_len, Some(256 << 10));
        assert_eq!(advice.cluster_len_before_3_1, Some(1 << 20));
        assert!(advice.larder_contiguous < 1 << 20);
    }

    #[test]
    fn huge_disk_gets_no_cluster_size() {
        assert_eq!(advice(64 * TIB, 64).cluster_len, None);
    }
}
