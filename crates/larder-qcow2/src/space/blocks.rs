//! Refcount blocks and the refcount table: they are extended as the image needs them.

use larder_block::event_loop::WorkSlice;
use larder_block::{ByteRange, Failure, IoResult, ZeroFlags};

use super::{Allocation, FreedClusters, STEPS_PER_SLICE};
use crate::device::Qcow2;
use crate::header::TableLocation;
use crate::refcount::SliceLookup;

/// The unit in which tables are written, in bytes.
pub(super) const SECTOR_BYTES: u64 = 512;

/// The maximum length of the refcount table: 8 MiB, as in QEMU.
const REFCOUNT_TABLE_ENTRIES_MAX: u64 = 1 << 20;

impl Qcow2 {
    pub(super) fn block_of(&self, cluster: u64) -> u64 {
        self.refcounts.borrow().block_of(cluster)
    }

    /// Extends the refcount table for all of the file as it was opened, while there is space: a device that is nearly
    /// full has no space for a longer table.
    pub(super) async fn grow_refcount_table_to_file(&self) -> IoResult {
        let clusters = self.space.borrow().initial_clusters;
        // Limited to the clusters that the longest table can count.
        let clusters = clusters.min(REFCOUNT_TABLE_ENTRIES_MAX << self.shape.refcount_block_bits());
        let counted = self.refcounts.borrow().counted_clusters();
        if clusters <= counted || self.space.borrow().failed_growth_clusters == clusters {
            return Ok(());
        }
        // If extending fails, the counted part can be used nonetheless; an allocation after it tries again.
        self.space.borrow_mut().failed_growth_clusters = clusters;
        match self.grow_refcount_table(self.block_of(clusters - 1) + 1).await {
            Err(error) if error.failure() == Failure::NoSpace => Ok(()),
            Err(error) => Err(error),
            Ok(()) => self.write_refcounts().await,
        }
    }

    /// Creates a refcount block, whose part of the image is still unused, in a cluster: one in that part, or one of
    /// an existing block.
    pub(super) async fn add_refcount_block(&self, block: u64, cluster: u64) -> IoResult {
        if block >= self.refcounts.borrow().table().len() as u64 {
            self.grow_refcount_table(block + 1).await?;
            self.write_refcounts().await?;
            if self.refcounts.borrow().has_block(block) {
                return Ok(());
            }
        }
        self.create_refcount_block(block, cluster).await
    }

    /// Creates a refcount block like [`Self::add_refcount_block`], for which the refcount table already has an entry.
    pub(super) async fn create_refcount_block(&self, block: u64, cluster: u64) -> IoResult {
        self.extend_to_cover(cluster, 1).await?;
        self.check_free(cluster..cluster + 1)?;
        self.clear_clusters(cluster, 1).await?;
        let table = self.refcounts.borrow().table_location;
        let table = ByteRange::new(table.offset, table.entries * 8).widened(SECTOR_BYTES);
        self.file.allocate(table).await?;
        if self.block_of(cluster) != block {
            self.allocate_refcount_slice(cluster).await?;
            // This loads the cluster's slice; there is no await until it is changed.
            self.refcount(cluster).await?;
        }
        self.register_refcount_block(block, cluster);
        // The block must be durable before one of its clusters is used, because a replay must find it.
        self.write_refcounts().await
    }

    /// Makes clusters of metadata read as zeros, with allocated space.
    pub(super) async fn clear_clusters(&self, first: u64, count: u64) -> IoResult {
        self.space.borrow_mut().mark_written_before(first + count);
        let bits = self.shape.cluster_bits;
        let at = ByteRange::new(first << bits, count << bits);
        self.file.write_zeroes(at, ZeroFlags::default()).await
    }

    /// Registers a block in `cluster`, which is covered, cleared, and in `block`'s own part of the image or in one
    /// whose slice is loaded.
    fn register_refcount_block(&self, block: u64, cluster: u64) {
        let mut refcounts = self.refcounts.borrow_mut();
        refcounts.add_block(block, cluster << self.shape.cluster_bits);
        if let SliceLookup::NotLoaded(slice, _) = refcounts.get(cluster) {
            // A new block reads as zeros, so the file need not be read.
            refcounts.load_zeros(slice);
        }
        refcounts.set(cluster, 1);
    }

    /// Moves the refcount table to a location with space for at least `blocks` blocks; the next commit makes the
    /// image use it.
    async fn grow_refcount_table(&self, blocks: u64) -> IoResult {
        let entries = self.refcount_entries(blocks)?;
        match self.grow_table_at_end(entries).await {
            Err(error) if error.failure() == Failure::NoSpace => self.grow_table_inside(entries).await,
            result => result,
        }
    }

    /// Returns the number of entries of a table for `blocks` blocks: as many as the file needed when it was opened,
    /// so that a device of the measured size is enough; half as many again for a file that has grown.
    fn refcount_entries(&self, blocks: u64) -> IoResult<u64> {
        let initial_blocks = self.space.borrow().initial_clusters;
        let initial_blocks = initial_blocks.div_ceil(1 << self.shape.refcount_block_bits());
        let wanted = if blocks <= initial_blocks { initial_blocks } else { blocks + blocks / 2 };
        self.round_up_table_entries(wanted.min(REFCOUNT_TABLE_ENTRIES_MAX).max(blocks))
    }

    /// Rounds a number of entries up to whole clusters of the table.
    fn round_up_table_entries(&self, entries: u64) -> IoResult<u64> {
        let entries = entries.next_multiple_of(self.shape.cluster_len() / 8);
        if entries <= REFCOUNT_TABLE_ENTRIES_MAX {
            return Ok(entries);
        }
        tracing::error!("{}: the image cannot grow: its refcount table has its maximum length", self.name);
        Err(self.no_space())
    }

    /// Moves the refcount table into the first part of the image that it does not count, after that part's new
    /// blocks.
    async fn grow_table_at_end(&self, entries: u64) -> IoResult {
        let per_cluster = self.shape.cluster_len() / 8;
        let block_bits = self.shape.refcount_block_bits();
        let first = self.refcounts.borrow().counted_clusters();
        let mut entries = entries;
        let (new_blocks, table_clusters) = loop {
            let table_clusters = entries / per_cluster;
            let mut new_blocks = 1;
            while (new_blocks + table_clusters) > new_blocks << block_bits {
                new_blocks += 1;
            }
            let needed = (first >> block_bits) + new_blocks;
            if needed <= entries {
                break (new_blocks, table_clusters);
            }
            entries = self.round_up_table_entries(needed)?;
        };
        let cluster_count = new_blocks + table_clusters;
        self.check_free(first..first + cluster_count)?;
        self.extend_file((first + cluster_count) << self.shape.cluster_bits).await?;
        self.clear_clusters(first, cluster_count).await?;
        let mut refcounts = self.refcounts.borrow_mut();
        refcounts.grow_table(entries);
        for index in 0..new_blocks {
            let block = (first >> block_bits) + index;
            refcounts.add_block(block, (first + index) << self.shape.cluster_bits);
        }
        for cluster in first..first + cluster_count {
            if let SliceLookup::NotLoaded(slice, _) = refcounts.get(cluster) {
                refcounts.load_zeros(slice);
            }
            refcounts.set(cluster, 1);
        }
        drop(refcounts);
        self.move_refcount_table(first + new_blocks, entries);
        Ok(())
    }

    /// Moves the refcount table to free clusters in the part of the image that it counts already. The window must be
    /// empty. A crash before the header points there leaves these clusters leaked, and the old table in use.
    async fn grow_table_inside(&self, entries: u64) -> IoResult {
        let count = entries * 8 / self.shape.cluster_len();
        let run = self.allocate_run_inside(count).await?;
        self.clear_clusters(run.first, run.count).await?;
        self.refcounts.borrow_mut().grow_table(entries);
        self.move_refcount_table(run.first, entries);
        run.keep();
        Ok(())
    }

    /// Sets the new location of the refcount table to `first`, and frees the old one.
    fn move_refcount_table(&self, first: u64, entries: u64) {
        let mut refcounts = self.refcounts.borrow_mut();
        let old = refcounts.next_table_location.unwrap_or(refcounts.table_location);
        refcounts.next_table_location = Some(TableLocation { offset: first << self.shape.cluster_bits, entries });
        self.freed.borrow_mut().push(FreedClusters {
            first: old.offset >> self.shape.cluster_bits,
            count: (old.entries * 8).div_ceil(self.shape.cluster_len()),
        });
    }

    /// Takes `count` contiguous free clusters inside the file. The window must be empty, and the caller must hold
    /// `allocation_lock`.
    pub(super) async fn allocate_run_inside(&self, count: u64) -> IoResult<Allocation<'_>> {
        let Some(first) = self.find_run(count).await? else {
            return Err(self.no_space());
        };
        self.allocate_run_at(first, count, false).await
    }

    /// Takes free clusters that the file covers and blocks count.
    pub(super) async fn allocate_run_at(&self, first: u64, count: u64, reads_zero: bool) -> IoResult<Allocation<'_>> {
        let mut run = Allocation::new(self, first, 0, reads_zero);
        // A run that fails midway is freed like any other, and the next one must not begin here before that.
        self.space.borrow_mut().mark_written_before(first + count);
        let mut slice = WorkSlice::new(STEPS_PER_SLICE);
        for cluster in first..first + count {
            slice.complete_steps(1).await;
            self.allocate_refcount_slice(cluster).await?;
            self.refcount(cluster).await?;
            // Slices are processed one at a time, so the present one is not dropped.
            self.refcounts.borrow_mut().set(cluster, 1);
            run.count += 1;
        }
        Ok(run)
    }
}
