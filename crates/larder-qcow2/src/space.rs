//! Space in the image: allocation and reclaiming of clusters.
//!
//! Free clusters are taken from a window: a run of clusters whose refcounts are known to be 0, inside the file. The
//! next window is the first free run from a cursor on (see [`search`]), which moves back to reclaimed space; only if
//! there is none the file grows.
//!
//! After a write was acknowledged, a flush must not fail because there is no space for the mapping of its data. So
//! all metadata that a commit will write has allocated space in the file system before any data is written: the file
//! is sparse where nothing was written yet, and copied files may have sparse tables. New tables are written as zeros
//! when they are taken, and the parts of existing tables that will change are allocated. (A copy-on-write file system
//! takes new space for each write nonetheless.)
//!
//! The refcount of a taken cluster is raised in memory at once; a commit may write it early, which is harmless (a
//! crash then leaves a leak). A cluster whose use ends goes through three stages: *freed* (nothing in memory refers
//! to it), *released* (nothing in the image does), and free, once no earlier request is in flight. A request that
//! finds no space waits for clusters in the first two stages, and is retried.

mod blocks;
mod search;

use std::ops::Range;

use larder_block::event_loop::WorkSlice;
use larder_block::range_lock::RangeLockMode;
use larder_block::{AlignedBuf, ByteOffset, ByteRange, Failure, IoResult, Operation, ReadBuf};

use crate::device::{NewTable, Qcow2};
use crate::entry::OFFSET;
use crate::refcount::SliceLookup;
use crate::slice_set::SliceSet;
use blocks::SECTOR_BYTES;
pub(crate) use search::search_ahead;

/// The maximum number of attempts of a request that finds no space, while other requests free and take clusters.
const ATTEMPTS_MAX: u32 = 64;

/// The number of clusters that are processed before other tasks run.
pub(crate) const STEPS_PER_SLICE: u64 = 4096;

/// The number of failed parts of runs after which reclaiming stops.
const RECLAIM_FAILURES_MAX: usize = 32;

/// Clusters of which one use has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FreedClusters {
    pub(crate) first: u64,
    pub(crate) count: u64,
}

impl FreedClusters {
    /// Takes the clusters before `end`, which is after the first one.
    fn split_before(&mut self, end: u64) -> Self {
        let taken = Self { first: self.first, count: self.count.min(end - self.first) };
        self.first += taken.count;
        self.count -= taken.count;
        taken
    }
}

/// Merges adjacent clusters into runs. A cluster that is freed twice stays listed twice.
fn merge_runs(mut freed: Vec<FreedClusters>) -> Vec<FreedClusters> {
    freed.sort_unstable_by_key(|freed| freed.first);
    freed.dedup_by(|next, last| {
        let follows = last.first + last.count == next.first;
        last.count += if follows { next.count } else { 0 };
        follows
    });
    freed
}

/// The state of the search for free clusters.
pub(crate) struct AllocatorState {
    /// Free clusters, ready to be taken.
    window: Range<u64>,
    /// The start of the next search: as far as is known, no cluster before it is free, except those in the window.
    cursor: u64,
    /// The last search has stopped at its limit of slices.
    is_unfinished: bool,
    /// The cluster from which on the file reads as zeros, because nothing was ever written there.
    unwritten_from: u64,
    /// The cluster from which on none is taken, because an entry points there although the file had ended before it
    /// when the image was opened. So such an entry can still be recognised by its target.
    excluded_from: u64,
    /// Slices of refcounts whose space in the file is allocated.
    allocated_slices: SliceSet,
    /// Slices of refcounts that a search could not read, and that were logged.
    unreadable: SliceSet,
    /// The length of the file in bytes when it was opened or has last grown for this image.
    known_size: u64,
    /// The number of clusters of the file when it was opened, or when another program has extended it: all clusters
    /// if it cannot grow.
    initial_clusters: u64,
    /// The value of `initial_clusters` when the refcount table could not be extended to it.
    failed_growth_clusters: u64,
    /// The number of reclaimed clusters.
    reclaimed: u64,
    /// The number of searches that found no cluster.
    refusals: u64,
}

impl AllocatorState {
    /// Creates the state for a file of `size` bytes, whose last cluster of `file_clusters` may be partial.
    pub(crate) fn new(size: u64, file_clusters: u64) -> Self {
        Self {
            window: 0..0,
            cursor: 0,
            is_unfinished: false,
            unwritten_from: file_clusters,
            excluded_from: u64::MAX,
            allocated_slices: SliceSet::default(),
            unreadable: SliceSet::default(),
            known_size: size,
            initial_clusters: file_clusters,
            failed_growth_clusters: 0,
            reclaimed: 0,
            refusals: 0,
        }
    }

    /// Empties the window.
    fn close_window(&mut self) {
        if !self.window.is_empty() {
            self.cursor = self.cursor.min(self.window.start);
        }
        self.window = 0..0;
    }

    /// Sets the cursor to `to`, unless clusters before `from`, the former cursor, were reclaimed since.
    fn advance(&mut self, from: u64, to: u64) {
        if self.cursor == from {
            self.cursor = to;
        }
    }

    /// Records that an entry points to this cluster, which was not taken.
    pub(crate) fn exclude_from(&mut self, cluster: u64) {
        self.excluded_from = self.excluded_from.min(cluster);
        if self.window.end > cluster {
            self.window.end = cluster.max(self.window.start);
            self.cursor = self.cursor.min(cluster);
        }
    }

    /// Returns true if entries that point to this cluster were found to point past the end.
    pub(crate) fn is_excluded(&self, cluster: u64) -> bool {
        cluster >= self.excluded_from
    }

    /// Returns the cluster from which on none was taken.
    pub(crate) fn unwritten_from(&self) -> u64 {
        self.unwritten_from
    }

    /// Records that a cluster is in use and was written.
    pub(crate) fn mark_written(&mut self, cluster: u64) {
        self.mark_written_before(cluster + 1);
    }

    /// Records that clusters before this one may have any content.
    fn mark_written_before(&mut self, end: u64) {
        self.unwritten_from = self.unwritten_from.max(end);
    }

    /// Takes up to `count_max` clusters from the window. Either all or none of them read as zeros.
    fn take(&mut self, count_max: u64) -> Option<(Range<u64>, bool)> {
        let first = self.window.start;
        let reads_zero = first >= self.unwritten_from;
        let until = if reads_zero { self.window.end } else { self.window.end.min(self.unwritten_from) };
        let count = count_max.min(until.saturating_sub(first));
        if count == 0 {
            return None;
        }
        let taken = first..first + count;
        self.window.start = taken.end;
        self.unwritten_from = self.unwritten_from.max(taken.end);
        Some((taken, reads_zero))
    }
}

/// Released clusters that are being reclaimed. When this value is dropped, the rest of them is released as before,
/// for the next attempt.
struct Reclaiming<'a> {
    image: &'a Qcow2,
    /// The runs to reclaim, in reverse order.
    runs: Vec<FreedClusters>,
    failed: Vec<FreedClusters>,
}

impl Drop for Reclaiming<'_> {
    fn drop(&mut self) {
        let unreclaimed = self.runs.drain(..).chain(self.failed.drain(..)).filter(|freed| freed.count > 0);
        self.image.released.borrow_mut().extend(unreclaimed.map(|freed| (0, freed)));
    }
}

/// Taken clusters. They are freed when this value is dropped, unless they are kept.
pub(crate) struct Allocation<'a> {
    image: &'a Qcow2,
    pub(crate) first: u64,
    pub(crate) count: u64,
    /// The clusters read as zeros.
    pub(crate) reads_zero: bool,
    is_kept: bool,
}

impl<'a> Allocation<'a> {
    fn new(image: &'a Qcow2, first: u64, count: u64, reads_zero: bool) -> Self {
        Self { image, first, count, reads_zero, is_kept: false }
    }

    /// Keeps the clusters, because something refers to them now.
    pub(crate) fn keep(mut self) {
        self.is_kept = true;
    }
}

impl Drop for Allocation<'_> {
    fn drop(&mut self) {
        if !self.is_kept && self.count > 0 {
            self.image.freed.borrow_mut().push(FreedClusters { first: self.first, count: self.count });
        }
    }
}

impl Qcow2 {
    fn no_space(&self) -> larder_block::IoError {
        self.space.borrow_mut().refusals += 1;
        self.error(Operation::Write, ByteRange::default(), Failure::NoSpace)
    }

    /// Takes 1 to `count_max` contiguous clusters.
    pub(crate) async fn allocate(&self, count_max: u64) -> IoResult<Allocation<'_>> {
        loop {
            let slice = match self.space.borrow().window.clone() {
                window if window.is_empty() => None,
                window => Some(self.refcounts.borrow().get(window.start)),
            };
            match slice {
                // The window's slice was dropped from memory meanwhile.
                Some(SliceLookup::NotLoaded(slice, offset)) => self.load_refcounts(slice, offset).await?,
                Some(SliceLookup::Value(0)) => {
                    let taken = self.space.borrow_mut().take(count_max);
                    let Some((clusters, reads_zero)) = taken else {
                        continue;
                    };
                    let mut refcounts = self.refcounts.borrow_mut();
                    clusters.clone().for_each(|cluster| refcounts.set(cluster, 1));
                    let count = clusters.end - clusters.start;
                    return Ok(Allocation::new(self, clusters.start, count, reads_zero));
                }
                Some(SliceLookup::Value(_)) => self.space.borrow_mut().close_window(),
                None => {
                    let _lock = self.allocation_lock.lock(ByteRange::new(0, 1), RangeLockMode::Exclusive).await;
                    if self.space.borrow().window.is_empty() {
                        self.open_window().await?;
                    }
                }
            }
        }
    }

    /// Refuses clusters that are in use although their refcounts are 0.
    fn check_free(&self, clusters: Range<u64>) -> IoResult {
        match self.metadata_in(&clusters) {
            Some(cluster) => {
                tracing::error!(
                    "{}: cluster {cluster} holds metadata but its refcount is 0: the image is corrupt; run `larder disk check --repair`",
                    self.name
                );
                Err(self.error(Operation::Write, ByteRange::default(), Failure::Invalid))
            }
            None => self.check_not_excluded(clusters),
        }
    }

    /// Refuses clusters to which entries point although the file had ended before them, and all later clusters.
    fn check_not_excluded(&self, clusters: Range<u64>) -> IoResult {
        let cluster = self.space.borrow().excluded_from;
        if clusters.end <= cluster {
            return Ok(());
        }
        tracing::error!(
            "{}: an entry points to cluster {cluster}, which was past the end of the file: the image is corrupt; run `larder disk check --repair`",
            self.name
        );
        Err(self.error(Operation::Write, ByteRange::default(), Failure::Invalid))
    }

    /// Returns the first cluster of `clusters` that holds metadata.
    pub(crate) fn metadata_in(&self, clusters: &Range<u64>) -> Option<u64> {
        let metadata = self.metadata.borrow();
        let at = metadata.partition_point(|cluster| *cluster < clusters.start);
        metadata.get(at).copied().filter(|cluster| *cluster < clusters.end)
    }

    /// Takes `count` contiguous clusters: after all others, or inside a file that cannot grow.
    pub(crate) async fn allocate_run(&self, count: u64) -> IoResult<Allocation<'_>> {
        let _lock = self.allocation_lock.lock(ByteRange::new(0, 1), RangeLockMode::Exclusive).await;
        self.space.borrow_mut().close_window();
        match self.allocate_run_at_end(count).await {
            Err(error) if error.failure() == Failure::NoSpace => self.allocate_run_inside(count).await,
            result => result,
        }
    }

    async fn allocate_run_at_end(&self, count: u64) -> IoResult<Allocation<'_>> {
        loop {
            let first = self.space.borrow().unwritten_from;
            // Checked before refcount blocks are created for space that the file cannot get.
            self.extend_to_cover(first, 1).await?;
            let missing = {
                let refcounts = self.refcounts.borrow();
                let (from, to) = (refcounts.block_of(first), refcounts.block_of(first + count - 1));
                (from..=to).find(|block| !refcounts.has_block(*block))
            };
            if let Some(block) = missing {
                // The block is placed at the start of the run, so that the run moves on by one cluster. A run may be
                // longer than a block's range of clusters, so it cannot wait for a location where no block begins.
                self.add_refcount_block(block, first).await?;
                continue;
            }
            self.check_free(first..first + count)?;
            self.extend_file((first + count) << self.shape.cluster_bits).await?;
            // These clusters are past the former end of the file, so they are free.
            return self.allocate_run_at(first, count, true).await;
        }
    }

    /// Ensures that the active L2 table `index` exists, belongs to the active L1 table alone, and has allocated
    /// space.
    pub(crate) async fn make_table_writable(&self, index: u64) -> IoResult {
        let is_writable = |image: &Self| image.tables_writable.borrow()[index as usize];
        if is_writable(self) {
            return Ok(());
        }
        let _lock = self.table_locks.lock(ByteRange::new(index, 1), RangeLockMode::Exclusive).await;
        if is_writable(self) {
            return Ok(());
        }
        let old = self.l1.borrow()[index as usize];
        if old & crate::entry::COPIED != 0 && old & OFFSET != 0 {
            let at = ByteRange::new(old & OFFSET, self.shape.cluster_len());
            self.file.allocate(at).await?;
        } else {
            self.create_table(index, old).await?;
        }
        self.tables_writable.borrow_mut()[index as usize] = true;
        Ok(())
    }

    /// Creates an L2 table for L1 entry `index`, whose value is `old`.
    async fn create_table(&self, index: u64, old: u64) -> IoResult {
        if !self.l1_allocated.get() {
            let table = self.l1_location.get();
            let at = ByteRange::new(table.offset, table.entries * 8).widened(SECTOR_BYTES);
            self.file.allocate(at).await?;
            self.l1_allocated.set(true);
        }
        let new = self.allocate(1).await?;
        let at = ByteOffset::new(new.first << self.shape.cluster_bits);
        if old & OFFSET == 0 {
            self.clear_clusters(new.first, 1).await?;
        } else {
            // A snapshot shares the old table. No leaf of a shared table is dirty, so the image's copy is complete.
            let mut bytes = AlignedBuf::zeroed(self.shape.cluster_len() as usize);
            self.file.read(ByteOffset::new(old & OFFSET), ReadBuf::new(&mut bytes)).await?;
            self.file.write(at, larder_block::WriteBuf::new(&bytes), larder_block::WriteFlags::NONE).await?;
            self.freed.borrow_mut().push(FreedClusters { first: (old & OFFSET) >> self.shape.cluster_bits, count: 1 });
        }
        self.l1.borrow_mut()[index as usize] = at.get() | crate::entry::COPIED;
        let new_table = NewTable { old_entry: old, attempted: false };
        self.new_tables.borrow_mut().insert(index, new_table);
        new.keep();
        Ok(())
    }

    /// Frees released clusters that no request can access any more.
    pub(crate) async fn reclaim(&self) -> IoResult {
        let _lock = self.reclaim_lock.lock(ByteRange::new(0, 1), RangeLockMode::Exclusive).await;
        let mut ready = Reclaiming {
            image: self,
            runs: {
                let mut released = self.released.borrow_mut();
                let in_flight = &self.in_flight;
                let ended = released.extract_if(.., |(epoch, _)| in_flight.has_ended(*epoch));
                merge_runs(ended.map(|(_, freed)| freed).collect())
            },
            failed: Vec::new(),
        };
        // Runs are taken from the end of the list, so the first of the image comes first.
        ready.runs.reverse();
        let mut slice = WorkSlice::new(STEPS_PER_SLICE);
        let mut result = Ok(());
        while let Some(run) = ready.runs.last_mut() {
            let Err(error) = self.reclaim_run(run, &mut slice).await else {
                ready.runs.pop();
                continue;
            };
            // Clusters with unreadable refcounts must not block the others.
            let slice_end = ((run.first >> self.shape.refcount_slice_bits()) + 1) << self.shape.refcount_slice_bits();
            let failed = run.split_before(slice_end);
            ready.failed.push(failed);
            result = Err(error);
            if ready.failed.len() >= RECLAIM_FAILURES_MAX {
                break;
            }
        }
        result
    }

    /// Frees a run of clusters; after a failure, `run` is the rest of it. Contiguous clusters without another use are
    /// punched out of the file together, because a file system frees whole blocks only, and one cluster may be less.
    async fn reclaim_run(&self, run: &mut FreedClusters, slice: &mut WorkSlice) -> IoResult {
        while run.count > 0 {
            let mut unshared = 0;
            while unshared < run.count {
                match self.refcount(run.first + unshared).await {
                    Ok(1) => unshared += 1,
                    // The clusters before it are freed first.
                    Err(error) if unshared == 0 => return Err(error),
                    _ => break,
                }
                slice.complete_steps(1).await;
            }
            let bits = self.shape.cluster_bits;
            let size = self.file.geometry().size.get();
            let end = ((run.first + unshared) << bits).min(size);
            if end > run.first << bits {
                // Done before the clusters can be taken again. If the file cannot discard, the space stays allocated.
                let start = run.first << bits;
                let _ = self.file.discard(ByteRange::new(start, end - start)).await;
            }
            for _ in 0..unshared.max(1) {
                self.reclaim_cluster(run.first).await?;
                run.first += 1;
                run.count -= 1;
                slice.complete_steps(1).await;
            }
        }
        Ok(())
    }

    /// Makes an attempt, and repeats it while it finds no space and freed clusters could be reclaimed meanwhile.
    /// Requests in flight are waited for, so the caller must not be counted as one, nor hold a lock that one needs.
    pub(crate) async fn retry_on_no_space(&self, attempt: impl AsyncFn() -> IoResult) -> IoResult {
        let mut attempts = 0;
        loop {
            let (reclaimed, refusals) = {
                let space = self.space.borrow();
                (space.reclaimed, space.refusals)
            };
            let error = match attempt().await {
                Err(error) if error.failure() == Failure::NoSpace => error,
                result => return result,
            };
            // Reclaiming may fail for some clusters and succeed for others.
            let _ = self.reclaim_freed(reclaimed).await;
            if self.space.borrow().reclaimed == reclaimed {
                return Err(error);
            }
            // Other requests may have taken the clusters first. If the file system is full, there is only one more
            // attempt.
            attempts += 1;
            let is_full = self.space.borrow().refusals == refusals;
            if attempts > ATTEMPTS_MAX || (is_full && attempts > 1) {
                return Err(error);
            }
        }
    }

    /// Reclaims freed clusters, until more than `reclaimed` were reclaimed since the image was opened, or none is
    /// left.
    async fn reclaim_freed(&self, reclaimed: u64) -> IoResult {
        if !self.freed.borrow().is_empty() || self.commits.is_running() {
            self.commit().await?;
        }
        let result = self.reclaim().await;
        if self.space.borrow().reclaimed == reclaimed && !self.released.borrow().is_empty() {
            self.in_flight.drain().await;
            return self.reclaim().await;
        }
        result
    }

    /// Returns the refcount of a cluster, reading it if necessary.
    pub(crate) async fn refcount(&self, cluster: u64) -> IoResult<u64> {
        loop {
            let known = self.refcounts.borrow().get(cluster);
            match known {
                SliceLookup::Value(count) => return Ok(count),
                SliceLookup::NotLoaded(slice, offset) => self.load_refcounts(slice, offset).await?,
            }
        }
    }

    async fn reclaim_cluster(&self, cluster: u64) -> IoResult {
        let count = self.refcount(cluster).await?;
        if count == 0 {
            tracing::error!(
                "{}: cluster {cluster} was in use but its refcount is 0; run `larder disk check`",
                self.name
            );
            return Ok(());
        }
        self.refcounts.borrow_mut().set(cluster, count - 1);
        if count == 1 {
            // The cluster may be part of a former L1 table, L2 table, or refcount table.
            let mut metadata = self.metadata.borrow_mut();
            if let Ok(at) = metadata.binary_search(&cluster) {
                metadata.remove(at);
            }
            let mut space = self.space.borrow_mut();
            space.reclaimed += 1;
            if !space.window.contains(&cluster) {
                space.cursor = space.cursor.min(cluster);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// No cluster is taken from the first one on to which an entry points past the file's former end.
    #[test]
    fn no_cluster_taken_after_excluded_one() {
        let mut space = AllocatorState::new(10 << 16, 10);
        space.window = 10..20;
        space.exclude_from(15);
        space.exclude_from(13);
        assert_eq!(space.take(100), Some((10..13, true)));
        assert_eq!(space.take(1), None);
        assert!(space.is_excluded(13) && !space.is_excluded(12));
        // The next window is searched from the cursor.
        assert!(space.window.is_empty() && space.cursor <= 13);
    }
}
