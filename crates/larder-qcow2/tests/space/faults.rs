//! Tests of space in images whose devices fail, are extended, or end while they are searched.

use std::cell::Cell;
use std::rc::Rc;

use larder_block::backend::simulated::{FaultEffect, InjectedFault, LatencyDistribution};
use larder_block::event_loop::yield_now;
use larder_block::{BlockDevice, ByteOffset, ByteRange, Failure, Operation, WriteBuf, WriteFlags};
use larder_qcow2::shape::Shape;

use crate::kit::{Kit, shape};
use crate::measured;

/// The effect of a sector that the device cannot read or write.
const EIO: FaultEffect = FaultEffect::Fail(Failure::Os(5));

/// The device has no free cluster, or only the last one is free, so that the window extends into the new part.
#[test]
fn extension_during_search_hides_old_bytes() {
    for free in [0, 1] {
        let shape = shape(12, 4);
        let kit = Kit::new(shape, 1 << 22, 64, LatencyDistribution::NONE);
        let image = kit.open();
        let full = kit.fill_up(&image);
        (full - free..full).for_each(|cluster| kit.discard(&image, cluster));
        kit.close(image);
        let image = kit.open();
        // The new part is longer than the range of the slice with the last cluster's refcount.
        let at = kit.refcount_block(0);
        kit.device.extension.set(Some((at, 9 << 20)));
        (full..full + 4).for_each(|cluster| kit.assert_rest_is_zeros(&image, cluster));
        assert!(kit.device.extension.get().is_none(), "no search has read refcounts");
        kit.close(image);
    }
}

/// A longer L1 table has its refcounts in several slices. Each write on the way to it fails in turn, and the disk is
/// grown again before the clusters that were taken for the table are free.
#[test]
fn retried_grow_keeps_its_table() {
    let clusters = 300 * 64 * 64;
    for after in 0.. {
        let kit = Kit::new(shape(9, 4), 1 << 20, 64, LatencyDistribution::NONE);
        kit.device.is_fixed.set(false);
        let image = kit.open();
        kit.write(&image, 0, 1).expect("it is written");
        kit.inject(InjectedFault::once(EIO).on(Operation::Write).after(after));
        let is_complete = kit.grow(&image, clusters).is_ok();
        kit.simulated.clear_faults();
        kit.grow(&image, clusters).expect("nothing is wrong any more");
        kit.write(&image, clusters - 1, 2).expect("it is written");
        kit.on.block_on(image.close()).expect("it is closed");
        let found = kit.check();
        assert_eq!(found.errors, 0, "write {after} failed: {found:?}");
        let image = kit.open();
        kit.assert_holds(&image, 0, 1);
        kit.assert_holds(&image, clusters - 1, 2);
        if is_complete {
            break;
        }
    }
}

/// The tail of the file is free, and its refcounts are in one slice with those of clusters past the end.
#[test]
fn file_with_free_tail_keeps_size() {
    let kit = Kit::new(shape(16, 4), 1 << 26, 100, LatencyDistribution::NONE);
    kit.device.is_fixed.set(false);
    let size = kit.file().geometry().size;
    for start in 0..50 {
        let image = kit.open();
        kit.write(&image, start, 2).expect("it is written");
        kit.close(image);
        assert_eq!(kit.file().geometry().size, size, "start {start}");
    }
}

/// The last free clusters are used for a new table and its data. On disk all clusters are in use, because the server
/// is killed before the next commit, or during it before the L1 table refers to the new table. In the latter case the
/// image already has the discard that the journal has recorded, and the discarded cluster may be the one for the
/// table.
#[test]
fn full_device_opens_after_server_kill() {
    for is_killed_in_commit in [false, true] {
        let shape = shape(9, 4);
        let kit = Kit::new(shape, 1 << 20, 400, LatencyDistribution::NONE);
        let image = kit.open();
        let full = kit.fill_up(&image);
        kit.discard(&image, 8);
        kit.discard(&image, 9);
        kit.flush(&image).expect("it is durable");
        kit.discard(&image, 7);
        let far = full + 200;
        kit.write(&image, far, 3).expect("two clusters are free");
        if is_killed_in_commit {
            let l1 = ByteRange::new(kit.word(40), 512);
            let before = kit.read(&*kit.file(), l1.start.get(), 512);
            kit.inject(InjectedFault::always(EIO).on(Operation::Write).within(l1));
            kit.flush(&image).expect_err("the L1 table cannot be written");
            kit.simulated.clear_faults();
            // Each sector whose write fails is the old one or the new one: the L1 table's sector is old, the L2
            // table's new.
            kit.overwrite(l1.start, &before);
            let l2 = ByteOffset::new(kit.word(l1.start.get()) << 1 >> 1);
            let mut entries = kit.read(&*kit.file(), l2.get(), 512);
            entries[7 * 8..][..8].fill(0);
            kit.overwrite(l2, &entries);
        }
        drop(image);
        let image = kit.open();
        kit.assert_holds(&image, far, 3);
        kit.assert_holds(&image, 6, 1);
        kit.assert_holds(&image, 7, 0);
        kit.close(image);
        let image = kit.open();
        kit.assert_holds(&image, far, 3);
        kit.assert_holds(&image, full - 1, 1);
    }
}

/// Other tasks run while many clusters are reclaimed, in one run or separately.
#[test]
fn reclaiming_many_clusters_yields() {
    for apart in [1, 2] {
        let clusters = 32_768;
        let kit = Kit::new(shape(9, 4), clusters << 9, 64, LatencyDistribution::NONE);
        kit.device.is_fixed.set(false);
        let image = kit.open();
        let bytes = vec![1; (clusters << 9) as usize];
        let written = image.write(ByteOffset::ZERO, WriteBuf::new(&bytes), WriteFlags::NONE);
        kit.on.block_on(written).expect("it is written");
        let is_done = Rc::new(Cell::new(false));
        let until = Rc::clone(&is_done);
        let turns = kit.on.block_on(async {
            let watch = kit.on.spawn_with_result(async move {
                let mut turns = 0;
                while !until.get() {
                    turns += 1;
                    yield_now().await;
                }
                turns
            });
            for cluster in (0..clusters).step_by(apart) {
                let discarded = image.discard(kit.range(cluster)).await;
                discarded.expect("it is discarded");
            }
            image.close().await.expect("it is closed");
            is_done.set(true);
            watch.await
        });
        assert!(turns >= 8, "others have run {turns} times");
    }
}

/// The device is full except for one cluster, and a slice of refcounts of other clusters cannot be read.
#[test]
fn unreadable_refcounts_fail_no_other_allocation() {
    let shape = shape(9, 4);
    let clusters = 20_000;
    let kit = Kit::new(shape, clusters << 9, measured(shape, clusters), LatencyDistribution::NONE);
    let image = kit.open();
    (0..clusters).for_each(|cluster| kit.write(&image, cluster, 1).expect("there is room"));
    kit.discard(&image, clusters - 1);
    kit.close(image);
    let image = kit.open();
    let unreadable = kit.refcount_block(10);
    kit.inject(InjectedFault::always(EIO).on(Operation::Read).within(unreadable));
    kit.write(&image, clusters - 1, 2).expect("a cluster is free");
    // Clusters of both slices are freed; one with a readable refcount is reused.
    let in_it = 256 * 10;
    (in_it..in_it + 100).for_each(|cluster| kit.discard(&image, cluster));
    kit.discard(&image, clusters - 2);
    kit.write(&image, clusters - 2, 3).expect("a cluster can be given back");
    kit.simulated.clear_faults();
    (in_it..in_it + 90).for_each(|cluster| kit.write(&image, cluster, 4).expect("they are free now"));
    kit.close(image);
    let image = kit.open();
    kit.assert_holds(&image, clusters - 1, 2);
    kit.assert_holds(&image, clusters - 2, 3);
    kit.assert_holds(&image, in_it, 4);
}

/// A file that can grow does so if no cluster with a readable refcount is free.
#[test]
fn unreadable_refcounts_make_file_grow() {
    let kit = Kit::new(shape(9, 4), 1 << 20, 64, LatencyDistribution::NONE);
    kit.device.is_fixed.set(false);
    let image = kit.open();
    (0..600).for_each(|cluster| kit.write(&image, cluster, 1).expect("there is room"));
    kit.close(image);
    let image = kit.open();
    let unreadable = kit.refcount_block(0);
    kit.inject(InjectedFault::always(EIO).on(Operation::Read).within(unreadable));
    (600..1000).for_each(|cluster| kit.write(&image, cluster, 2).expect("the file grows"));
    kit.simulated.clear_faults();
    kit.close(image);
}

/// The file system refuses larger files with its own error. Discarded clusters are used then, like on a full device.
#[test]
fn largest_file_reuses_freed_clusters() {
    let kit = Kit::new(shape(9, 4), 1 << 20, 400, LatencyDistribution::NONE);
    kit.device.is_fixed.set(false);
    let too_large = FaultEffect::Fail(Failure::Os(27));
    kit.inject(InjectedFault::always(too_large).on(Operation::Grow));
    let image = kit.open();
    let full = kit.fill_up(&image);
    let error = kit.write(&image, full, 1).expect_err("it is full");
    assert_eq!(error.failure(), Failure::NoSpace);
    (3..200).for_each(|cluster| kit.discard(&image, cluster));
    kit.write(&image, full, 2).expect("clusters were discarded");
    (100..200).for_each(|cluster| kit.discard(&image, cluster));
    // A longer L1 table needs contiguous clusters.
    kit.grow(&image, 64 * 64 * 10).expect("clusters were discarded");
    kit.close(image);
    let image = kit.open();
    kit.assert_holds(&image, full, 2);
    kit.assert_holds(&image, 2, 1);
}

/// The image file has exactly the space that the grown disk needs, a part of it in the replaced L1 table.
#[test]
fn grown_raw_disk_reuses_l1_table() {
    let shape = Shape { data_file: true, ..shape(9, 4) };
    let (tables_before, tables) = (64 * 6, 64 * 7);
    let (header, refcount_table, refcount_blocks) = (1, 1, 2);
    let needed = header + refcount_table + refcount_blocks + tables / 64 + tables;
    let kit = Kit::new(shape, tables_before << 15, needed, LatencyDistribution::NONE);
    let mut header = kit.read(&*kit.file(), 0, 512);
    // Other programs may use the data file as the disk.
    header[95] |= 2;
    kit.overwrite(ByteOffset::ZERO, &header);
    let image = kit.open();
    (0..tables_before).for_each(|table| kit.write(&image, table * 64, 1).expect("there is room"));
    kit.grow(&image, tables * 64).expect("there is room");
    kit.write(&image, tables * 64 - 1, 2).expect("it is mapped");
    kit.close(image);
    let image = kit.open();
    kit.assert_holds(&image, 0, 1);
    kit.assert_holds(&image, tables * 64 - 1, 2);
}

/// The device has more clusters than the longest refcount table counts.
#[test]
fn device_beyond_longest_table_is_usable() {
    let kit = Kit::new(shape(9, 4), 1 << 20, (1 << 28) + 1000, LatencyDistribution::NONE);
    let image = kit.open();
    kit.write(&image, 0, 1).expect("there is room");
    kit.flush(&image).expect("it is durable");
    // The number of the table's clusters is the upper half of the word.
    let clusters = kit.word(56) >> 32;
    assert_eq!(clusters, (8 << 20) / 512);
    kit.assert_holds(&image, 0, 1);
}
