//! Tests of images in a file of a fixed size, like a block device or an export: no write fails while a cluster is
//! free. Images in files that can grow do so only when no cluster is free.

mod faults;
mod kit;

use larder_block::backend::simulated::{LatencyDistribution, SeededRng};
use larder_block::{BlockDevice, ByteLen, Io, ReadBuf, WriteBuf, WriteFlags, join};
use larder_qcow2::Qcow2;
use larder_qcow2::shape::Shape;
use smallvec::SmallVec;

use crate::kit::{Kit, shape};

/// Returns the number of clusters of an image of a disk of `clusters` clusters when all are in use, like `qemu-img
/// measure`.
fn measured(shape: Shape, clusters: u64) -> u64 {
    let len = shape.cluster_len();
    let tables = clusters.div_ceil(len / 8);
    let others = 1 + (tables * 8).div_ceil(len) + tables + clusters;
    let (mut blocks, mut table) = (0, 0);
    loop {
        let all = others + blocks + table;
        let needed = all.div_ceil(1 << shape.refcount_block_bits());
        if needed == blocks {
            return all;
        }
        blocks = needed;
        table = (blocks * 8).div_ceil(len);
    }
}

/// Writes each cluster of the disk once, in random order, and some again after a discard that no flush has followed.
fn fill(kit: &Kit, image: &Qcow2, clusters: u64, random: &mut SeededRng) {
    let mut order: Vec<u64> = (0..clusters).collect();
    for last in (1..order.len()).rev() {
        order.swap(last, random.below(last as u64 + 1) as usize);
    }
    for (step, cluster) in order.iter().enumerate() {
        let written = kit.write(image, *cluster, *cluster as u8);
        written.unwrap_or_else(|error| panic!("{:?}: step {step} of {clusters}: {error}", kit.shape));
        if random.chance(100) {
            let again = order[random.below(step as u64 + 1) as usize];
            kit.discard(image, again);
            let written = kit.write(image, again, again as u8);
            written.unwrap_or_else(|error| panic!("{:?}: again after step {step}: {error}", kit.shape));
        }
    }
}

/// Devices have exactly the measured size, and tables have to move while they fill up.
#[test]
fn measured_device_size_fits_every_cluster() {
    for (cluster_bits, refcount_order, clusters) in [
        (9, 6, 6000),
        (9, 4, 20_000),
        (9, 4, 16_300),
        (9, 0, 6000),
        (12, 4, 3000),
        (13, 6, 5000),
        (16, 4, 300),
        (21, 4, 20),
    ] {
        let shape = shape(cluster_bits, refcount_order);
        let kit = Kit::new(shape, clusters << cluster_bits, measured(shape, clusters), LatencyDistribution::NONE);
        let mut random = SeededRng::new(clusters);
        let image = kit.open();
        fill(&kit, &image, clusters, &mut random);
        kit.close(image);
        let image = kit.open();
        (0..clusters).for_each(|cluster| kit.assert_holds(&image, cluster, cluster as u8));
        kit.close(image);
    }
}

/// The refcount of each free cluster is in another slice, and the server has read none of them.
#[test]
fn full_device_finds_single_free_cluster() {
    let shape = shape(9, 4);
    // A slice has 256 clusters, so there are about 80 slices.
    let clusters = 20_000;
    let kit = Kit::new(shape, clusters << 9, measured(shape, clusters), LatencyDistribution::NONE);
    let image = kit.open();
    (0..clusters).for_each(|cluster| kit.write(&image, cluster, 1).expect("there is room"));
    kit.close(image);
    for cluster in [19_999, 3, 10_000, 19_000] {
        let image = kit.open();
        kit.discard(&image, cluster);
        kit.close(image);
        let image = kit.open();
        kit.write(&image, cluster, 7).expect("the cluster is free");
        kit.assert_holds(&image, cluster, 7);
        kit.close(image);
    }
}

/// In-flight requests delay the reuse of freed clusters; a write waits for them before it fails.
#[test]
fn writes_wait_for_freed_clusters() {
    let shape = shape(12, 4);
    let clusters = 256;
    let kit = Kit::new(shape, clusters << 12, measured(shape, clusters), LatencyDistribution::VARIED);
    let image = kit.open();
    (0..clusters).for_each(|cluster| kit.write(&image, cluster, 1).expect("there is room"));
    for round in 2..20u8 {
        let first = u64::from(round) * 8;
        (first..first + 64).for_each(|cluster| kit.discard(&image, cluster));
        let bytes = vec![round; kit.cluster_len() as usize];
        let mut read = vec![vec![0; kit.cluster_len() as usize]; 16];
        let mut requests: SmallVec<[Io<'_>; 4]> = SmallVec::new();
        for (index, buffer) in (0..).zip(&mut read) {
            requests.push(image.read(kit.range(index * 3 % clusters).start, ReadBuf::new(buffer)));
        }
        for cluster in first..first + 64 {
            let at = kit.range(cluster).start;
            requests.push(image.write(at, WriteBuf::new(&bytes), WriteFlags::NONE));
        }
        let done = kit.on.block_on(join(requests));
        done.unwrap_or_else(|error| panic!("round {round}: {error}"));
        (first..first + 64).for_each(|cluster| kit.assert_holds(&image, cluster, round));
    }
    kit.close(image);
}

#[test]
fn fixed_device_grows_into_free_clusters() {
    let shape = shape(9, 4);
    let clusters = 8192;
    let kit = Kit::new(shape, clusters << 9, measured(shape, clusters) + 64, LatencyDistribution::NONE);
    let image = kit.open();
    (0..clusters).for_each(|cluster| kit.write(&image, cluster, 1).expect("there is room"));
    // Space for a longer L1 table, without a flush.
    (2000..2600).for_each(|cluster| kit.discard(&image, cluster));
    let grown = kit.on.block_on(image.grow(ByteLen::new((2 * clusters) << 9)));
    grown.expect("there are free clusters in a row");
    kit.write(&image, 2 * clusters - 1, 5).expect("there is room");
    kit.close(image);
    let image = kit.open();
    kit.assert_holds(&image, 2 * clusters - 1, 5);
    kit.assert_holds(&image, clusters - 1, 1);
    kit.assert_holds(&image, 2300, 0);
    kit.close(image);
}

/// A logical volume that is extended contains old bytes of other volumes.
#[test]
fn extended_device_hides_old_bytes() {
    let shape = shape(16, 4);
    let kit = Kit::new(shape, 1 << 24, 8, LatencyDistribution::NONE);
    let image = kit.open();
    let cluster = kit.fill_up(&image);
    kit.on.block_on(kit.device.extend(4 << 16)).expect("it is extended");
    (cluster..cluster + 3).for_each(|cluster| kit.assert_rest_is_zeros(&image, cluster));
    kit.close(image);
}

/// A file that could grow keeps its length over many openings, while clusters are free far inside.
#[test]
fn reopened_file_reuses_free_clusters() {
    let shape = shape(9, 4);
    let clusters = 20_000;
    let kit = Kit::new(shape, clusters << 9, measured(shape, clusters), LatencyDistribution::NONE);
    kit.device.is_fixed.set(false);
    let image = kit.open();
    (0..clusters).for_each(|cluster| kit.write(&image, cluster, 1).expect("it is written"));
    (18_000..19_000).for_each(|cluster| kit.discard(&image, cluster));
    kit.close(image);
    let size = kit.file().geometry().size;
    for start in 0..50 {
        let image = kit.open();
        for cluster in 18_000..18_010 {
            kit.write(&image, cluster + start * 10, 2).expect("it is written");
        }
        kit.close(image);
        assert_eq!(kit.file().geometry().size, size, "start {start}");
    }
}
