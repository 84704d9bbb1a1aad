//! Space in the image: finding free clusters, and giving clusters back.
//!
//! Free clusters are taken from a window: a run of clusters whose refcounts are known to be 0, inside the file. The next
//! window is looked for from a cursor on, which never passes a free cluster, so that space that was given back is used
//! again; behind the last used cluster the file grows.
//!
//! A guest that was told that its data is written must not learn at a flush that there is no room for the way to it. So
//! whatever a commit will write has room of its own in the file system before any data goes where it leads: the file is
//! sparse where nothing was written yet, and so may tables be that others have copied. New tables are written as zeros
//! when they are taken, and of those that exist the parts that will change are allocated. (A copy-on-write file system
//! takes new room for each write all the same.)
//!
//! A cluster that is taken has its refcount raised in memory at once; that a commit may write it early is harmless (a
//! crash then leaves a leak). A cluster that is given back goes through three stages: *freed* (nothing in memory refers
//! to it), *released* (nothing in the image does), and free, once no request from before is under way.

use std::ops::Range;

use larder_block::backend::file::CONTAINER_UNIT;
use larder_block::range_lock::Mode;
use larder_block::{AlignedBuf, ByteLen, ByteOffset, ByteRange, Failure, IoResult, Operation, ReadBuf, ZeroFlags};

use crate::device::{NewTable, Qcow2};
use crate::entry::OFFSET;
use crate::header::TableAt;
use crate::refcount::{Known, SliceIndex, Space as Found};

/// How many slices of refcounts are looked through before the end of the file is used instead.
const SEARCH_SLICES_MAX: usize = 16;

/// The file grows by a quarter, but no more than this, in bytes.
const GROWTH_MAX: u64 = 16 << 20;

/// What tables are written in, in bytes.
const SECTOR: u64 = 512;

/// The refcount table's longest length, in bytes, as in QEMU.
const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;

/// Clusters that one use of has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Freed {
    pub(crate) first: u64,
    pub(crate) count: u64,
}

/// The same clusters, with those together that lie so. One that is freed twice stays there twice.
fn runs(mut freed: Vec<Freed>) -> Vec<Freed> {
    freed.sort_unstable_by_key(|freed| freed.first);
    freed.dedup_by(|next, last| {
        let follows = last.first + last.count == next.first;
        last.count += if follows { next.count } else { 0 };
        follows
    });
    freed
}

/// Where free clusters are.
pub(crate) struct Space {
    /// Free clusters, ready to be taken.
    window: Range<u64>,
    /// No cluster before this one is free, as far as is known, except those in the window.
    cursor: u64,
    /// From this cluster on the file reads as zeros, because nothing was ever written there.
    untouched: u64,
    /// From this cluster on nothing is taken, because an entry leads there although the file had ended before it when the
    /// image was opened. So nothing is ever taken behind it, and such an entry is known again by where it leads.
    lost_from: u64,
    /// A slice of refcounts that has room of its own in the file.
    secured: Option<SliceIndex>,
    /// How many clusters were given back.
    reclaimed: u64,
}

impl Space {
    pub(crate) fn new(file_clusters: u64) -> Self {
        Self {
            window: 0..0,
            cursor: 0,
            untouched: file_clusters,
            lost_from: u64::MAX,
            secured: None,
            reclaimed: 0,
        }
    }

    /// Ends the window where nothing was ever written, which is returned.
    fn end_window(&mut self) -> u64 {
        if self.window.end > self.untouched {
            self.window.end = self.untouched.max(self.window.start);
            self.cursor = self.cursor.min(self.untouched);
        }
        self.untouched
    }

    /// An entry leads to this cluster, where nothing was taken.
    pub(crate) fn lose(&mut self, cluster: u64) {
        self.lost_from = self.lost_from.min(cluster);
        if self.window.end > cluster {
            self.window.end = cluster.max(self.window.start);
            self.cursor = self.cursor.min(cluster);
        }
    }

    /// Whether entries that lead here were found to lead behind the end.
    pub(crate) fn is_lost(&self, cluster: u64) -> bool {
        cluster >= self.lost_from
    }

    /// Nothing was taken from this cluster on.
    pub(crate) fn untouched(&self) -> u64 {
        self.untouched
    }

    /// A cluster is in use and was written.
    pub(crate) fn touch(&mut self, cluster: u64) {
        self.untouched = self.untouched.max(cluster + 1);
    }

    /// Takes up to `most` clusters from the window that are alike in whether they read as zeros.
    fn take(&mut self, most: u64) -> Option<(Range<u64>, bool)> {
        let first = self.window.start;
        let reads_zero = first >= self.untouched;
        let until = if reads_zero {
            self.window.end
        } else {
            self.window.end.min(self.untouched)
        };
        let count = most.min(until.saturating_sub(first));
        if count == 0 {
            return None;
        }
        let taken = first..first + count;
        self.window.start = taken.end;
        self.untouched = self.untouched.max(taken.end);
        Some((taken, reads_zero))
    }
}

/// Clusters that were taken. They are given back when this is dropped, unless they are kept.
pub(crate) struct Allocation<'a> {
    image: &'a Qcow2,
    pub(crate) first: u64,
    pub(crate) count: u64,
    /// They read as zeros.
    pub(crate) reads_zero: bool,
    kept: bool,
}

impl Allocation<'_> {
    /// Something refers to them now.
    pub(crate) fn keep(mut self) {
        self.kept = true;
    }
}

impl Drop for Allocation<'_> {
    fn drop(&mut self) {
        if !self.kept {
            self.image.freed.borrow_mut().push(Freed {
                first: self.first,
                count: self.count,
            });
        }
    }
}

impl Qcow2 {
    fn no_space(&self) -> larder_block::IoError {
        self.error(Operation::Write, ByteRange::default(), Failure::NoSpace)
    }

    /// Takes 1 to `most` clusters that follow each other.
    pub(crate) async fn allocate(&self, most: u64) -> IoResult<Allocation<'_>> {
        loop {
            let slice = match self.space.borrow().window.clone() {
                window if window.is_empty() => None,
                window => Some(self.refcounts.borrow().get(window.start)),
            };
            match slice {
                // The window's slice was forgotten meanwhile.
                Some(Known::Absent(slice, offset)) => self.load_refcounts(slice, offset).await?,
                Some(Known::Is(0)) => {
                    let taken = self.space.borrow_mut().take(most);
                    let Some((clusters, reads_zero)) = taken else {
                        continue;
                    };
                    let mut refcounts = self.refcounts.borrow_mut();
                    clusters.clone().for_each(|cluster| refcounts.set(cluster, 1));
                    return Ok(Allocation {
                        image: self,
                        first: clusters.start,
                        count: clusters.end - clusters.start,
                        reads_zero,
                        kept: false,
                    });
                }
                Some(Known::Is(_)) => self.space.borrow_mut().window = 0..0,
                None => {
                    let _alone = self.finding_space.enter(ByteRange::new(0, 1), Mode::Exclusive).await;
                    if self.space.borrow().window.is_empty() {
                        self.open_window().await?;
                    }
                }
            }
        }
    }

    /// Reads a slice of refcounts.
    async fn load_refcounts(&self, slice: u64, offset: u64) -> IoResult {
        let at = ByteRange::new(offset, self.shape.slice_len());
        let in_cluster = self.shape.cluster_len() - 1;
        let is_aligned = offset & in_cluster == (slice * self.shape.slice_len()) & in_cluster;
        let size = self.file.geometry().size;
        if !is_aligned || at.checked_end().is_none_or(|end| end.get() > size.get()) {
            tracing::error!(
                "{}: a refcount block is said to be at {offset:#x}, outside the file or not aligned; run `larder disk check`",
                self.name
            );
            return Err(self.error(Operation::Read, at, Failure::Invalid));
        }
        let mut bytes = AlignedBuf::zeroed(at.len.as_usize());
        self.file.read(at.start, ReadBuf::new(&mut bytes)).await?;
        self.refcounts.borrow_mut().load(slice, &bytes);
        Ok(())
    }

    /// Finds the next free clusters and has the file cover them.
    async fn open_window(&self) -> IoResult {
        let slice_clusters = 1u64 << self.shape.refcount_slice_bits();
        let mut searched = 0;
        let mut cursor = self.space.borrow().cursor;
        loop {
            if searched > SEARCH_SLICES_MAX {
                // The rest of the search is for the next window.
                self.space.borrow_mut().cursor = cursor;
                let end = self.space.borrow().untouched;
                if cursor < end {
                    return self.open_window_at(end).await;
                }
            }
            let found = self.refcounts.borrow().space(cursor, slice_clusters);
            match found {
                Known::Absent(slice, offset) => {
                    searched += 1;
                    self.load_refcounts(slice, offset).await?;
                }
                Known::Is(Found::Full(next)) => cursor = next,
                Known::Is(Found::NoBlock | Found::Free(..)) => {
                    let opened = self.open_window_at(cursor).await;
                    if opened.is_ok() {
                        let mut space = self.space.borrow_mut();
                        space.cursor = space.window.end;
                    }
                    return opened;
                }
            }
        }
    }

    /// Opens a window with the first free clusters from `from` on.
    async fn open_window_at(&self, from: u64) -> IoResult {
        let slice_clusters = 1u64 << self.shape.refcount_slice_bits();
        let mut from = from;
        loop {
            let found = self.refcounts.borrow().space(from, slice_clusters);
            match found {
                Known::Absent(slice, offset) => self.load_refcounts(slice, offset).await?,
                Known::Is(Found::Full(next)) => from = next,
                Known::Is(Found::NoBlock) => self.add_refcount_block(self.block_of(from), from).await?,
                Known::Is(Found::Free(first, count)) => {
                    if !self.refcounts.borrow().is_settled(first) {
                        // Writing it failed before.
                        self.write_refcounts().await?;
                    }
                    self.secure_refcounts(first).await?;
                    let count = self.cover(first, count).await?;
                    self.check_free(first..first + count)?;
                    // A commit may have given clusters back meanwhile, but taken none: only this opens windows.
                    self.space.borrow_mut().window = first..first + count;
                    return Ok(());
                }
            }
        }
    }

    /// Has the slice with a cluster's refcount, whose block exists, have room of its own.
    async fn secure_refcounts(&self, cluster: u64) -> IoResult {
        let slice = cluster >> self.shape.refcount_slice_bits();
        if self.space.borrow().secured == Some(slice) {
            return Ok(());
        }
        let offset = self.refcounts.borrow().slice_offset(slice);
        if let Some(offset) = offset {
            let at = ByteRange::new(offset, self.shape.slice_len());
            self.file.allocate(at).await?;
        }
        self.space.borrow_mut().secured = Some(slice);
        Ok(())
    }

    /// Has the file cover up to `count` clusters from `first` on; how many it could.
    async fn cover(&self, first: u64, count: u64) -> IoResult<u64> {
        let bits = self.shape.cluster_bits;
        let size = self.file.geometry().size.get();
        if first + count > OFFSET >> bits {
            return Err(self.no_space());
        }
        let needed = (first + count) << bits;
        if needed <= size {
            return Ok(count);
        }
        // A window that reaches into the file only is enough, if it is not empty.
        let step = (size / 4).clamp(1 << bits, GROWTH_MAX.max(1 << bits));
        let at_least = (first + 1) << bits;
        let wanted = needed.min(at_least.max(size + step)) >> bits << bits;
        let grown = self.lengthen(wanted).await;
        let covered = (self.file.geometry().size.get() >> bits)
            .saturating_sub(first)
            .min(count);
        match grown {
            _ if covered > 0 => Ok(covered),
            Ok(()) => Err(self.no_space()),
            Err(error) => Err(error),
        }
    }

    /// Makes the file at least `size` bytes long, with an end that can be moved beside writes.
    async fn lengthen(&self, size: u64) -> IoResult {
        if size <= self.file.geometry().size.get() {
            return Ok(());
        }
        self.file
            .grow(ByteLen::new(size.next_multiple_of(CONTAINER_UNIT)))
            .await
    }

    /// Refuses to take clusters for free that are in use whatever their refcounts say.
    fn check_free(&self, clusters: Range<u64>) -> IoResult {
        match self.metadata_in(&clusters) {
            Some(cluster) => {
                tracing::error!(
                    "{}: cluster {cluster} holds metadata but its refcount is 0: the image is corrupt; run `larder disk check --repair`",
                    self.name
                );
                Err(self.error(Operation::Write, ByteRange::default(), Failure::Invalid))
            }
            None => self.check_not_lost(clusters),
        }
    }

    /// Refuses to take clusters that entries lead to, although the file had ended before them, or any behind them.
    fn check_not_lost(&self, clusters: Range<u64>) -> IoResult {
        let cluster = self.space.borrow().lost_from;
        if clusters.end <= cluster {
            return Ok(());
        }
        tracing::error!(
            "{}: an entry leads to cluster {cluster}, which was past the end of the file: the image is corrupt; run `larder disk check --repair`",
            self.name
        );
        Err(self.error(Operation::Write, ByteRange::default(), Failure::Invalid))
    }

    /// The first of these clusters that holds metadata.
    pub(crate) fn metadata_in(&self, clusters: &Range<u64>) -> Option<u64> {
        let metadata = self.metadata.borrow();
        let at = metadata.partition_point(|cluster| *cluster < clusters.start);
        metadata.get(at).copied().filter(|cluster| *cluster < clusters.end)
    }

    fn block_of(&self, cluster: u64) -> u64 {
        self.refcounts.borrow().block_of(cluster)
    }

    /// Makes a refcount block, in whose part of the image nothing is used yet, out of a cluster: one that it counts itself,
    /// or one of a block that exists.
    async fn add_refcount_block(&self, block: u64, cluster: u64) -> IoResult {
        if block >= self.refcounts.borrow().table().len() as u64 {
            self.lengthen_refcount_table(block + 1).await?;
            self.write_refcounts().await?;
            if self.refcounts.borrow().has_block(block) {
                return Ok(());
            }
        }
        self.cover(cluster, 1).await?;
        self.check_free(cluster..cluster + 1)?;
        self.clear_cluster(cluster).await?;
        let table = self.refcounts.borrow().table_at;
        let table = ByteRange::new(table.offset, table.entries * 8).widened(SECTOR);
        self.file.allocate(table).await?;
        if self.block_of(cluster) != block {
            self.secure_refcounts(cluster).await?;
            // So that its slice is loaded; there is no waiting until it is changed.
            self.refcount(cluster).await?;
        }
        self.use_as_refcount_block(block, cluster);
        // Before a cluster of it is used: a replay must find it.
        self.write_refcounts().await
    }

    /// Makes a cluster of metadata read as zeros, with room of its own.
    async fn clear_cluster(&self, cluster: u64) -> IoResult {
        self.space.borrow_mut().touch(cluster);
        let at = ByteRange::new(cluster << self.shape.cluster_bits, self.shape.cluster_len());
        self.file.write_zeroes(at, ZeroFlags::default()).await
    }

    /// `cluster` is covered, cleared, and in `block`'s own part of the image.
    fn use_as_refcount_block(&self, block: u64, cluster: u64) {
        self.refcounts
            .borrow_mut()
            .add_block(block, cluster << self.shape.cluster_bits);
        let known = self.refcounts.borrow().get(cluster);
        if let Known::Absent(slice, _) = known {
            // A new block reads as zeros; no need to ask the file.
            let zeros = vec![0; self.shape.slice_len() as usize];
            self.refcounts.borrow_mut().load(slice, &zeros);
        }
        self.refcounts.borrow_mut().set(cluster, 1);
    }

    /// Moves the refcount table to where it has room for `blocks` blocks at least.
    async fn lengthen_refcount_table(&self, blocks: u64) -> IoResult {
        let per_cluster = self.shape.cluster_len() / 8;
        let block_bits = self.shape.refcount_block_bits();
        let first = {
            let refcounts = self.refcounts.borrow();
            (refcounts.table().len() as u64) << block_bits
        };
        // The table lies in the first part of the image that it adds, behind that part's new blocks.
        let mut entries = (blocks + blocks / 2).next_multiple_of(per_cluster);
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
            entries = needed.next_multiple_of(per_cluster);
        };
        if entries * 8 > REFCOUNT_TABLE_BYTES_MAX {
            tracing::error!(
                "{}: the image cannot grow: its refcount table is as long as it may be",
                self.name
            );
            return Err(self.no_space());
        }
        let all = new_blocks + table_clusters;
        self.check_free(first..first + all)?;
        let size = (first + all) << self.shape.cluster_bits;
        self.lengthen(size).await?;
        for cluster in first..first + all {
            self.clear_cluster(cluster).await?;
        }
        let mut refcounts = self.refcounts.borrow_mut();
        let old = refcounts.moves_to.unwrap_or(refcounts.table_at);
        refcounts.lengthen(entries);
        for index in 0..new_blocks {
            let block = (first >> block_bits) + index;
            refcounts.add_block(block, (first + index) << self.shape.cluster_bits);
        }
        let zeros = vec![0; self.shape.slice_len() as usize];
        for cluster in first..first + all {
            if let Known::Absent(slice, _) = refcounts.get(cluster) {
                refcounts.load(slice, &zeros);
            }
            refcounts.set(cluster, 1);
        }
        refcounts.moves_to = Some(TableAt {
            offset: (first + new_blocks) << self.shape.cluster_bits,
            entries,
        });
        self.freed.borrow_mut().push(Freed {
            first: old.offset >> self.shape.cluster_bits,
            count: old.entries.div_ceil(per_cluster),
        });
        Ok(())
    }

    /// Takes `count` clusters in a row, behind all others.
    pub(crate) async fn allocate_run(&self, count: u64) -> IoResult<Allocation<'_>> {
        let _alone = self.finding_space.enter(ByteRange::new(0, 1), Mode::Exclusive).await;
        loop {
            // Whoever takes from the window meanwhile takes nothing of the run.
            let first = self.space.borrow_mut().end_window();
            let missing = {
                let refcounts = self.refcounts.borrow();
                let (from, to) = (refcounts.block_of(first), refcounts.block_of(first + count - 1));
                (from..=to).find(|block| !refcounts.has_block(*block))
            };
            if let Some(block) = missing {
                // Where the run would begin, so that it moves on by one cluster. A run may be longer than what a block
                // counts, so it cannot wait for a place that no block begins in.
                self.add_refcount_block(block, first).await?;
                continue;
            }
            self.check_free(first..first + count)?;
            self.lengthen((first + count) << self.shape.cluster_bits).await?;
            for cluster in first..first + count {
                self.secure_refcounts(cluster).await?;
                while let Known::Absent(slice, offset) = {
                    let refcounts = self.refcounts.borrow();
                    refcounts.get(cluster)
                } {
                    self.load_refcounts(slice, offset).await?;
                }
                // Behind the end of the file as it was, so free; a slice at a time, so no slice is forgotten.
                self.refcounts.borrow_mut().set(cluster, 1);
            }
            self.space.borrow_mut().untouched = first + count;
            return Ok(Allocation {
                image: self,
                first,
                count,
                reads_zero: true,
                kept: false,
            });
        }
    }

    /// Has the active L2 table `index` exist, belong to the active L1 table alone, and have room of its own.
    pub(crate) async fn own_table(&self, index: u64) -> IoResult {
        let is_secured = |image: &Self| image.tables_secured.borrow()[index as usize];
        if is_secured(self) {
            return Ok(());
        }
        let _held = self.tables.enter(ByteRange::new(index, 1), Mode::Exclusive).await;
        if is_secured(self) {
            return Ok(());
        }
        let old = self.l1.borrow()[index as usize];
        if old & crate::entry::COPIED != 0 && old & OFFSET != 0 {
            let at = ByteRange::new(old & OFFSET, self.shape.cluster_len());
            self.file.allocate(at).await?;
        } else {
            self.new_table(index, old).await?;
        }
        self.tables_secured.borrow_mut()[index as usize] = true;
        Ok(())
    }

    /// Makes an L2 table for L1 entry `index`, which is `old`.
    async fn new_table(&self, index: u64, old: u64) -> IoResult {
        if !self.l1_secured.get() {
            let table = self.l1_at.get();
            let at = ByteRange::new(table.offset, table.entries * 8).widened(SECTOR);
            self.file.allocate(at).await?;
            self.l1_secured.set(true);
        }
        let new = self.allocate(1).await?;
        let at = ByteOffset::new(new.first << self.shape.cluster_bits);
        if old & OFFSET == 0 {
            self.clear_cluster(new.first).await?;
        } else {
            // A snapshot has it too. No leaf of a table that is shared is dirty, so the image's copy is all there is.
            let mut bytes = AlignedBuf::zeroed(self.shape.cluster_len() as usize);
            self.file
                .read(ByteOffset::new(old & OFFSET), ReadBuf::new(&mut bytes))
                .await?;
            self.file
                .write(at, larder_block::WriteBuf::new(&bytes), larder_block::WriteFlags::NONE)
                .await?;
            self.freed.borrow_mut().push(Freed {
                first: (old & OFFSET) >> self.shape.cluster_bits,
                count: 1,
            });
        }
        self.l1.borrow_mut()[index as usize] = at.get() | crate::entry::COPIED;
        let new_table = NewTable {
            before: old,
            attempted: false,
        };
        self.new_tables.borrow_mut().insert(index, new_table);
        new.keep();
        Ok(())
    }

    /// Makes clusters free that nothing refers to and no request can touch any more.
    pub(crate) async fn reclaim(&self) -> IoResult {
        let _alone = self.reclaiming.enter(ByteRange::new(0, 1), Mode::Exclusive).await;
        let ready: Vec<Freed> = {
            let mut released = self.released.borrow_mut();
            let in_flight = &self.in_flight;
            let ended = released.extract_if(.., |(epoch, _)| in_flight.has_ended(*epoch));
            runs(ended.map(|(_, freed)| freed).collect())
        };
        for (index, freed) in ready.iter().enumerate() {
            let mut left = *freed;
            if let Err(error) = self.reclaim_run(&mut left).await {
                // What is left is tried again, or leaks.
                let rest = std::iter::once(&left).chain(&ready[index + 1..]);
                self.released.borrow_mut().extend(rest.map(|freed| (0, *freed)));
                return Err(error);
            }
        }
        Ok(())
    }

    /// Makes a run of clusters free; what is left of it if that fails. What nobody else uses is punched out of the file
    /// together, because a file system frees whole blocks only, and one cluster may be less.
    async fn reclaim_run(&self, run: &mut Freed) -> IoResult {
        while run.count > 0 {
            let mut unshared = 0;
            while unshared < run.count && self.refcount(run.first + unshared).await? == 1 {
                unshared += 1;
            }
            let bits = self.shape.cluster_bits;
            let size = self.file.geometry().size.get();
            let end = ((run.first + unshared) << bits).min(size);
            if end > run.first << bits {
                // Before anybody can take it. If the file cannot, the space is kept.
                let start = run.first << bits;
                let _ = self.file.discard(ByteRange::new(start, end - start)).await;
            }
            for _ in 0..unshared.max(1) {
                self.reclaim_cluster(run.first).await?;
                run.first += 1;
                run.count -= 1;
            }
        }
        Ok(())
    }

    /// Does what `attempt` does, once more if there was no room and some could be made: what was freed before, and had
    /// not been given back yet.
    pub(crate) async fn with_room(&self, attempt: impl AsyncFn() -> IoResult) -> IoResult {
        let before = self.space.borrow().reclaimed;
        match attempt().await {
            Err(error) if error.failure() == Failure::NoSpace => {
                let made = self.make_room().await;
                match made.is_ok() && self.space.borrow().reclaimed != before {
                    true => attempt().await,
                    false => Err(error),
                }
            }
            result => result,
        }
    }

    async fn make_room(&self) -> IoResult {
        if !self.freed.borrow().is_empty() {
            self.commit().await?;
        }
        self.reclaim().await
    }

    /// How often a cluster is used.
    pub(crate) async fn refcount(&self, cluster: u64) -> IoResult<u64> {
        loop {
            let known = self.refcounts.borrow().get(cluster);
            match known {
                Known::Is(count) => return Ok(count),
                Known::Absent(slice, offset) => self.load_refcounts(slice, offset).await?,
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
            // An L1 table, L2 table, or refcount table that was left behind.
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

    #[test]
    fn nothing_is_taken_from_where_an_entry_leads_on() {
        let mut space = Space::new(10);
        space.window = 10..20;
        space.lose(15);
        space.lose(13);
        assert_eq!(space.take(100), Some((10..13, true)));
        assert_eq!(space.take(1), None);
        assert!(space.is_lost(13) && !space.is_lost(12));
        // Where the next window is looked for.
        assert!(space.window.is_empty() && space.cursor <= 13);
    }
}
