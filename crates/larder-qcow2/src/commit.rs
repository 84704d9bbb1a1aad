//! Commits: changes in memory become durable in the image, in an order that a crash may cut off anywhere.
//!
//! 1. Refcounts, new refcount blocks, and new L2 tables are written: nothing in the image refers to them yet. A crash
//!    leaves leaks. The number of the commit is written too, for the journal.
//! 2. *Barrier.* (With new refcount blocks only: then the refcount table, and another barrier.) The guest's data is
//!    durable too.
//! 3. L2 slices and L1 entries are written: they refer only to durable data. A crash leaves each sector old or new.
//! 4. *Barrier.* Nothing in the image refers to the freed clusters any more: they are released.
//!
//! Large commits consist of several such batches. Each batch copies its metadata at one moment, so that concurrent
//! changes, which are not durable, stay out. Metadata whose write fails is dirty again, and the next commit writes it.

use std::borrow::Cow;
use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};

use larder_block::event_loop::WorkSlice;
use larder_block::range_lock::{RangeLockMode, RangeLocks};
use larder_block::{
    ByteLen, ByteOffset, ByteRange, Failure, Io, IoError, IoResult, Operation, SizeChanges, WriteBuf, WriteFlags,
    ZeroFlags, join,
};
use rustix::io::Errno;
use smallvec::smallvec;

use crate::device::{NewTable, Qcow2};
use crate::entry::L2Entry;
use crate::header::{self, HEADER_SECTOR_BYTES, TableLocation};
use crate::journal::{Journal, JournalReservation};
use crate::map::LeafIndex;
use crate::read::Ios;
use crate::refcount::SliceIndex;
use crate::space::FreedClusters;

/// The maximum number of leaves that are copied at one moment and written between two barriers: 8 MiB, about 5 ms.
const BATCH_LEAVES_MAX: usize = 2048;

/// The maximum number of writes in flight at the same time.
const WRITES_IN_FLIGHT_MAX: usize = 32;

/// The maximum length in bytes to which adjacent pieces are merged into one write.
const WRITE_BYTES_MAX: usize = 1 << 20;

const LOCK_RANGE: ByteRange = ByteRange::new(0, 1);

/// The commits of an image so far.
#[derive(Default)]
pub(crate) struct Commits {
    lock: RangeLocks,
    started: Cell<u64>,
    /// The number of the last commit that succeeded.
    succeeded: Cell<u64>,
    running: Cell<bool>,
}

/// An offset in the image, and the bytes to write there.
type Write = (u64, Vec<u8>);

/// A part of a commit: the writes around one pair of barriers.
#[derive(Default)]
struct Batch {
    leaves: Vec<LeafIndex>,
    tables: BTreeMap<u64, NewTable>,
    /// Writes of metadata to which nothing refers.
    unreferenced: Vec<Write>,
    /// Writes of references to data that is durable by then.
    referring: Vec<Write>,
}

/// Refcounts that are being written.
#[derive(Default)]
struct RefcountBatch {
    slices: Vec<SliceIndex>,
    blocks: BTreeSet<u64>,
    new_table_at: Option<TableLocation>,
    /// The writes of slices and of a moved table.
    writes: Vec<Write>,
    table_sectors: Vec<Write>,
}

impl Commits {
    pub(crate) fn is_running(&self) -> bool {
        self.running.get()
    }

    /// Returns true if a flush must do more than flush the file.
    pub(crate) fn has_work(&self, image: &Qcow2) -> bool {
        self.running.get()
            || !image.map.borrow().dirty().is_empty()
            || !image.new_tables.borrow().is_empty()
            || image.refcounts.borrow().is_dirty()
            || image.header_uncertain.get()
    }
}

impl Qcow2 {
    /// Makes all completed changes durable.
    pub(crate) async fn commit(&self) -> IoResult {
        let commits = &self.commits;
        let needed = commits.started.get() + 1;
        let _lock = commits.lock.lock(LOCK_RANGE, RangeLockMode::Exclusive).await;
        if commits.succeeded.get() >= needed {
            return Ok(());
        }
        self.commit_locked().await
    }

    /// Commits until the journal is less than half full, so that requests need not wait for space in it unless it
    /// fills faster than that. An error is not reported here: a request that waits for space, or flushes, commits
    /// again and gets the error.
    pub(crate) async fn commit_ahead(&self) {
        // The condition is checked again under the lock, because closing the image may have emptied the journal by
        // then. An image without a session has no changes yet.
        let is_due =
            || self.autoclear_pending.get().is_none() && self.journal.as_ref().is_some_and(Journal::is_half_full);
        while is_due() {
            let _lock = self.commits.lock.lock(LOCK_RANGE, RangeLockMode::Exclusive).await;
            if !is_due() || self.commit_locked().await.is_err() {
                break;
            }
        }
    }

    async fn commit_locked(&self) -> IoResult {
        let commits = &self.commits;
        let number = commits.started.get() + 1;
        commits.started.set(number);
        let running = RunningGuard::begin(&commits.running);
        let result = self.write_commit().await;
        drop(running);
        match result {
            Ok(()) => {
                commits.succeeded.set(number);
                Ok(())
            }
            Err(error) => Err(self.error(Operation::Flush, ByteRange::default(), error.failure())),
        }
    }

    async fn write_commit(&self) -> IoResult {
        self.rewrite_uncertain_header().await?;
        let journal_end = self.journal.as_ref().map(Journal::end);
        let freed = FreedGuard { image: self, freed: std::mem::take(&mut *self.freed.borrow_mut()) };
        let epoch = self.in_flight.next_epoch();
        // An image without a session has no changes yet.
        let journal = self.journal.as_ref().filter(|_| self.autoclear_pending.get().is_none());
        let mut number = journal.map(Journal::next_commit);
        let committed = number;
        let leaves: Vec<LeafIndex> = self.map.borrow().dirty().iter().copied().collect();
        let mut chunks = leaves.chunks(BATCH_LEAVES_MAX).peekable();
        loop {
            let chunk = chunks.next().unwrap_or_default();
            let last = chunks.peek().is_none();
            let batch_write = BatchWrite { image: self, batch: self.collect_batch(chunk, last), done: false };
            batch_write.write(number.take()).await?;
            if last {
                break;
            }
        }
        if let (Some(journal), Some(end), Some(number)) = (journal, journal_end, committed) {
            journal.committed(number, end);
        }
        let freed = freed.into_freed();
        if !freed.is_empty() {
            self.released.borrow_mut().extend(freed.into_iter().map(|freed| (epoch, freed)));
            self.in_flight.ended.announce();
        }
        Ok(())
    }

    /// Copies the metadata to write, as it is now. The L1 entries of new tables belong to the `last` batch of a
    /// commit, when all that they refer to has been written.
    fn collect_batch(&self, leaves: &[LeafIndex], last: bool) -> Batch {
        let shape = self.shape;
        let mut batch = Batch::default();
        let mut map = self.map.borrow_mut();
        let mut new_tables = self.new_tables.borrow_mut();
        let leaves_of_table = shape.table_bits() - shape.leaf_bits();
        for leaf in leaves {
            let table = leaf >> leaves_of_table;
            let offset = self.l1.borrow()[table as usize] & crate::entry::OFFSET;
            let within = leaf & ((1 << leaves_of_table) - 1);
            let mut bytes = vec![0; shape.slice_len() as usize];
            map.take_dirty(*leaf, &mut bytes);
            let write = (offset + within * shape.slice_len(), bytes);
            let unreferenced = new_tables.get(&table).is_some_and(|table| !table.attempted);
            match unreferenced {
                true => batch.unreferenced.push(write),
                false => batch.referring.push(write),
            }
            batch.leaves.push(*leaf);
        }
        if last {
            batch.tables = std::mem::take(&mut *new_tables);
            let sectors: BTreeSet<u64> = batch.tables.keys().map(|index| index * 8 / 512).collect();
            for sector in sectors {
                batch.referring.push(self.l1_sector(sector));
            }
        }
        batch
    }

    /// Returns a sector of the L1 table, without tables that were created after the batch was taken.
    fn l1_sector(&self, sector: u64) -> Write {
        let l1 = self.l1.borrow();
        let mut bytes = vec![0; 512];
        let first = sector as usize * 64;
        for (out, entry) in bytes.chunks_exact_mut(8).zip(l1.iter().skip(first)) {
            out.copy_from_slice(&entry.to_be_bytes());
        }
        (self.l1_location.get().offset + sector * 512, bytes)
    }

    fn collect_refcounts(&self) -> RefcountBatch {
        let mut batch = RefcountBatch::default();
        let mut refcounts = self.refcounts.borrow_mut();
        for (slice, offset, bytes) in refcounts.take_dirty() {
            batch.slices.push(slice);
            batch.writes.push((offset, bytes));
        }
        // New blocks stay listed as new until they are written.
        batch.blocks = refcounts.new_blocks.clone();
        batch.new_table_at = refcounts.next_table_location;
        let bytes_of = |entries: &[u64], len: usize| {
            let mut bytes = vec![0; len];
            for (out, entry) in bytes.chunks_exact_mut(8).zip(entries) {
                out.copy_from_slice(&entry.to_be_bytes());
            }
            bytes
        };
        if let Some(at) = batch.new_table_at {
            let bytes = bytes_of(refcounts.table(), at.entries as usize * 8);
            batch.writes.push((at.offset, bytes));
            return batch;
        }
        let sectors: BTreeSet<u64> = batch.blocks.iter().map(|block| block / 64).collect();
        for sector in sectors {
            let entries = refcounts.table().get(sector as usize * 64..).unwrap_or_default();
            let offset = refcounts.table_location.offset + sector * 512;
            batch.table_sectors.push((offset, bytes_of(entries, 512)));
        }
        batch
    }

    /// Writes metadata to which nothing refers yet, durably, with the guest's data.
    async fn write_unreferenced(&self, writes: &[Write]) -> IoResult {
        self.write_all(writes).await?;
        if let Some(data_file) = &self.data_file {
            data_file.flush().await?;
        }
        self.write_refcounts().await
    }

    /// Makes the refcounts durable, and all earlier writes to the image.
    pub(crate) async fn write_refcounts(&self) -> IoResult {
        let _lock = self.refcount_lock.lock(LOCK_RANGE, RangeLockMode::Exclusive).await;
        let batch_write = RefcountBatchWrite { image: self, batch: self.collect_refcounts(), done: false };
        batch_write.write().await
    }

    async fn write_all(&self, writes: &[Write]) -> IoResult {
        let mut sorted: Vec<&Write> = writes.iter().collect();
        sorted.sort_by_key(|(offset, _)| *offset);
        let mut merged: Vec<(u64, Cow<'_, [u8]>)> = Vec::new();
        for (offset, bytes) in sorted {
            match merged.last_mut() {
                Some((at, last)) if *at + last.len() as u64 == *offset && last.len() < WRITE_BYTES_MAX => {
                    last.to_mut().extend_from_slice(bytes);
                }
                _ => merged.push((*offset, Cow::Borrowed(bytes))),
            }
        }
        let mut slice = WorkSlice::new(WRITES_IN_FLIGHT_MAX as u64);
        for chunk in merged.chunks(WRITES_IN_FLIGHT_MAX) {
            let ios: Ios<'_> = chunk
                .iter()
                .map(|(offset, bytes)| {
                    self.file.write(ByteOffset::new(*offset), WriteBuf::new(bytes), WriteFlags::NONE)
                })
                .collect();
            join(ios).await?;
            // A file in memory completes all of them synchronously.
            slice.complete_steps(chunk.len() as u64).await;
        }
        Ok(())
    }

    /// Changes the header's first sector durably.
    async fn change_header(&self, change: impl FnOnce(&mut [u8; HEADER_SECTOR_BYTES])) -> IoResult {
        self.write_header(change, true).await
    }

    /// Writes the number of a commit to the header. It need not be durable, because its purpose ends with the host's
    /// memory.
    async fn write_commit_number(&self, number: u64) -> IoResult {
        let change = |sector: &mut [u8; HEADER_SECTOR_BYTES]| {
            let other_bits = header::autoclear(&*sector) & !header::AUTOCLEAR_SESSION;
            header::set_autoclear(sector, other_bits | number);
        };
        self.write_header(change, false).await
    }

    async fn write_header(&self, change: impl FnOnce(&mut [u8; HEADER_SECTOR_BYTES]), durably: bool) -> IoResult {
        let _lock = self.header_lock.lock(LOCK_RANGE, RangeLockMode::Exclusive).await;
        let mut sector = *self.header.borrow();
        change(&mut sector);
        // If the write fails, the image may have the old header or the new one.
        self.header_uncertain.set(true);
        self.file.write(ByteOffset::ZERO, WriteBuf::new(&sector), WriteFlags::NONE).await?;
        if durably {
            self.file.flush().await?;
        }
        *self.header.borrow_mut() = sector;
        self.header_uncertain.set(false);
        Ok(())
    }

    /// Writes the valid header again if an earlier write of a header has failed.
    async fn rewrite_uncertain_header(&self) -> IoResult {
        match self.header_uncertain.get() {
            true => self.change_header(|_| {}).await,
            false => Ok(()),
        }
    }

    /// Commits before a request that changed something completes, if it must be durable: without a journal it must,
    /// because the guest may outlive this process.
    pub(crate) async fn after_change(&self, fua: bool) -> IoResult {
        if fua || (self.journal.is_none() && self.commits.has_work(self)) {
            return self.commit().await;
        }
        Ok(())
    }

    /// Reserves space in the journal for `records` changes.
    pub(crate) async fn reserve_journal(&self, records: u64) -> IoResult<Option<JournalReservation<'_>>> {
        let Some(journal) = &self.journal else {
            return Ok(None);
        };
        loop {
            if let Some(reservation) = journal.reserve(records) {
                return Ok(Some(reservation));
            }
            self.commit().await?;
        }
    }

    /// Prepares the image for its first change.
    pub(crate) async fn before_change(&self) -> IoResult {
        if self.is_prepared() {
            return Ok(());
        }
        let _lock = self.commits.lock.lock(LOCK_RANGE, RangeLockMode::Exclusive).await;
        if self.file_ends_pending.replace(false) {
            self.extend_files().await;
        }
        let Some(bits) = self.autoclear_pending.get() else {
            return Ok(());
        };
        if let Some(journal) = &self.journal {
            // The journal's session is set just before the header's. A journal of a session that no image has belongs
            // to another state of the image.
            journal.set_session(bits & header::AUTOCLEAR_SESSION);
        }
        self.change_header(|sector| header::set_autoclear(sector, bits)).await?;
        self.autoclear_pending.set(None);
        Ok(())
    }

    /// Returns true if no preparation is needed before a change.
    pub(crate) fn is_prepared(&self) -> bool {
        self.autoclear_pending.get().is_none() && !self.file_ends_pending.get()
    }

    /// Extends the files so that they end where they can grow concurrently with writes (see
    /// [`larder_block::backend::file`]). An error is ignored here: a request that needs a longer file gets its own.
    async fn extend_files(&self) {
        let size = self.file.geometry().size;
        let _ = self.file.grow(size).await;
        if let Some(data_file) = &self.data_file {
            let _ = data_file.grow(self.geometry.get().size).await;
        }
    }

    /// Makes everything durable and releases freed space.
    pub(crate) async fn close_steps(&self) -> IoResult {
        if !self.geometry.get().read_only {
            self.finish_session().await?;
        }
        let others = [&self.data_file, &self.backing].into_iter().flatten();
        for file in [&self.file].into_iter().chain(others) {
            file.close().await?;
        }
        Ok(())
    }

    /// Commits everything, so that the next server needs no journal.
    async fn finish_session(&self) -> IoResult {
        loop {
            self.commit().await.inspect_err(|error| self.log_uncommitted_changes(error))?;
            self.reclaim().await?;
            if !self.commits.has_work(self) && self.freed.borrow().is_empty() {
                break;
            }
        }
        let Some(journal) = &self.journal else { return Ok(()) };
        if self.autoclear_pending.get().is_none() {
            let other_bits = header::autoclear(&*self.header.borrow()) & !header::AUTOCLEAR_SESSION;
            self.change_header(|sector| header::set_autoclear(sector, other_bits)).await?;
        }
        journal.remove();
        Ok(())
    }

    /// Logs, after a failed commit that is the last one, where the missing changes are, and how to apply them to the
    /// image.
    fn log_uncommitted_changes(&self, error: &IoError) {
        let Some(journal) = &self.journal else { return };
        tracing::error!(
            "{error}: the mapping of the last writes is only in the journal {} and is lost when the host reboots; fix the cause of the failure (on a full file system, free some space), then serve the image again as the same user, or run `larder disk check --repair`, which applies the journal to the image; do not move or copy the image before",
            journal.path()
        );
    }

    /// Extends the disk to `size` bytes, if it has fewer. The image gets the new size when the added space durably
    /// reads as zeros: a crash before leaves the old size.
    pub(crate) async fn grow_steps(&self, size: ByteLen) -> IoResult {
        let operation = |failure| self.error(Operation::Grow, ByteOffset::ZERO.range(size), failure);
        let failed = |error: IoError| operation(error.failure());
        if self.geometry.get().read_only {
            return Err(operation(Failure::ReadOnly));
        }
        if !size.get().is_multiple_of(512) {
            return Err(operation(Failure::Misaligned));
        }
        if self.shape.version < 3 && header::snapshots(&*self.header.borrow()) > 0 {
            // Snapshots in version 2 do not store the size of the disk.
            return Err(operation(Failure::Unsupported));
        }
        let entries = self.shape.l1_entries(size.get());
        if entries * 8 > header::L1_BYTES_MAX || size.get() > self.shape.size_max() {
            return Err(operation(Failure::Os(Errno::FBIG.raw_os_error())));
        }
        self.before_change().await.map_err(failed)?;
        let _grow_lock = self.grow_lock.lock(LOCK_RANGE, RangeLockMode::Exclusive).await;
        let old = self.geometry.get().size;
        if size <= old {
            return Ok(());
        }
        if let Some(data_file) = &self.data_file {
            // The data file may be used as the disk itself by other programs.
            data_file.grow(size).await.map_err(failed)?;
        }
        let grow_l1 = async || self.grow_l1_table(entries).await;
        self.retry_on_no_space(grow_l1).await.map_err(failed)?;
        self.map.borrow_mut().grow(size.get().div_ceil(self.shape.cluster_len()));
        let added = ByteRange::between(ByteOffset::ZERO + old, ByteOffset::ZERO + size);
        if self.has_raw_data_file() {
            // The new tables may reuse the old L1 table's clusters.
            let map = async || self.map_data_file(added).await;
            self.retry_on_no_space(map).await.map_err(failed)?;
        } else {
            self.clear_added(added).await.map_err(failed)?;
        }
        let commit_lock = self.commits.lock.lock(LOCK_RANGE, RangeLockMode::Exclusive).await;
        let changed = self.change_header(|sector| header::set_size(sector, size.get()));
        changed.await.map_err(failed)?;
        let mut geometry = self.geometry.get();
        geometry.size = size;
        self.geometry.set(geometry);
        // The change is announced even if the caller drops the request now.
        let _announce_on_drop = AnnounceOnDrop(&self.size_changes);
        drop(commit_lock);
        // No request writes past the old end yet. Requests in flight may have treated the cluster that the old end
        // cuts off as whole.
        self.in_flight.drain().await;
        Ok(())
    }

    /// Returns true if other programs may use the data file as the disk itself.
    fn has_raw_data_file(&self) -> bool {
        self.shape.data_file && header::autoclear(&*self.header.borrow()) & header::AUTOCLEAR_RAW_DATA != 0
    }

    /// Makes `added`, past the disk's end, read as zeros durably. Any content there does not belong to the disk: data
    /// of a longer backing file, the rest of the cluster that the end cuts off, clusters from when the disk was
    /// longer, and the VM's state, which QEMU stores there while it saves a snapshot, and after it has reverted to
    /// one. Such clusters are freed.
    ///
    /// A crash leaves a part of them unmapped. No program misses them: a snapshot has its own tables.
    async fn clear_added(&self, added: ByteRange) -> IoResult {
        let unit = self.shape.cluster_len();
        let cut_off = added.intersection(ByteRange::between(added.start, added.start.align_up(unit)));
        if !cut_off.is_empty() {
            self.zero_steps(cut_off, ZeroFlags::default()).await?;
        }
        let whole = ByteRange::between(added.start.align_up(unit), added.end().align_up(unit));
        let unmap = ZeroFlags { unmap: true, ..ZeroFlags::default() };
        self.zero_steps(whole, unmap).await?;
        self.commit().await
    }

    /// Maps the added clusters of a disk whose data file is raw. QEMU demands that every cluster of the disk is data
    /// there, so that programs that use the file itself see the same (`docs/interop/qcow2.txt`, "raw external data").
    async fn map_data_file(&self, added: ByteRange) -> IoResult {
        let shape = self.shape;
        let unit = shape.cluster_len();
        let leaf_span = unit << shape.leaf_bits();
        let mut rest = ByteRange::between(added.start.align_up(unit), added.end().align_up(unit));
        while !rest.is_empty() {
            let leaf_end = ByteOffset::new(rest.start.align_down(leaf_span).get() + leaf_span);
            let part = rest.intersection(ByteRange::between(rest.start, leaf_end));
            let count = part.len.get() / unit;
            let _lock = self.mapping_locks.lock(part, RangeLockMode::Exclusive).await;
            let _reservation = self.reserve_journal(count).await?;
            self.make_table_writable(part.start.get() / shape.table_span()).await?;
            // There is no await from here on, so the leaf is not evicted.
            self.find(part).await?;
            let data = L2Entry::data(shape, part.start.get());
            self.set_entries(part.start.get() >> shape.cluster_bits, count, data);
            rest = ByteRange::between(part.end(), rest.end());
        }
        self.commit().await
    }

    /// Extends the L1 table to at least `entries` entries.
    async fn grow_l1_table(&self, entries: u64) -> IoResult {
        let _lock = self.commits.lock.lock(LOCK_RANGE, RangeLockMode::Exclusive).await;
        let old = self.l1_location.get();
        if entries <= old.entries {
            return Ok(());
        }
        let (table, allocation) = self.write_grown_l1_table(entries).await?;
        // The table is kept even if the header cannot be written, because the header may refer to the table
        // nonetheless.
        allocation.keep();
        self.change_header(|sector| header::set_l1(sector, table)).await?;
        self.l1_location.set(table);
        self.l1.borrow_mut().resize(entries as usize, 0);
        self.tables_writable.borrow_mut().resize(entries as usize, false);
        if old.entries > 0 {
            self.freed.borrow_mut().push(FreedClusters {
                first: old.offset >> self.shape.cluster_bits,
                count: (old.entries * 8).div_ceil(self.shape.cluster_len()),
            });
        }
        Ok(())
    }

    /// Writes the L1 table, as it is in the image, to a location with space for `entries`.
    async fn write_grown_l1_table(&self, entries: u64) -> IoResult<(TableLocation, crate::space::Allocation<'_>)> {
        let cluster_len = self.shape.cluster_len();
        let clusters = (entries * 8).div_ceil(cluster_len);
        let allocation = self.allocate_run(clusters).await?;
        let at = TableLocation { offset: allocation.first << self.shape.cluster_bits, entries };
        let mut bytes = vec![0; (clusters * cluster_len) as usize];
        {
            let l1 = self.l1.borrow();
            let new_tables = self.new_tables.borrow();
            for (index, (out, entry)) in bytes.chunks_exact_mut(8).zip(l1.iter()).enumerate() {
                let durable = new_tables.get(&(index as u64)).map_or(*entry, |table| table.old_entry);
                out.copy_from_slice(&durable.to_be_bytes());
            }
        }
        // The refcounts of the table's clusters must be durable before the header refers to them.
        self.write_all(&[(at.offset, bytes)]).await?;
        self.write_refcounts().await?;
        Ok((at, allocation))
    }
}

/// Announces a change of size when it is dropped.
struct AnnounceOnDrop<'a>(&'a SizeChanges);

impl Drop for AnnounceOnDrop<'_> {
    fn drop(&mut self) {
        self.0.announce();
    }
}

/// Marks a commit as running until it is dropped.
struct RunningGuard<'a>(&'a Cell<bool>);

impl<'a> RunningGuard<'a> {
    fn begin(running: &'a Cell<bool>) -> Self {
        running.set(true);
        Self(running)
    }
}

impl Drop for RunningGuard<'_> {
    fn drop(&mut self) {
        self.0.set(false);
    }
}

/// Freed clusters that a commit has taken. A commit that fails or is dropped puts them back.
struct FreedGuard<'a> {
    image: &'a Qcow2,
    freed: Vec<FreedClusters>,
}

impl FreedGuard<'_> {
    fn into_freed(mut self) -> Vec<FreedClusters> {
        std::mem::take(&mut self.freed)
    }
}

impl Drop for FreedGuard<'_> {
    fn drop(&mut self) {
        self.image.freed.borrow_mut().append(&mut self.freed);
    }
}

/// A batch that is being written. If it fails or is dropped, its metadata is dirty again.
struct BatchWrite<'a> {
    image: &'a Qcow2,
    batch: Batch,
    done: bool,
}

impl BatchWrite<'_> {
    /// Writes the batch, and before its references, the number of a commit that begins with it.
    async fn write(mut self, number: Option<u64>) -> IoResult {
        let (image, batch) = (self.image, &mut self.batch);
        let mut first: Ios<'_> = smallvec![Io::task(image.write_unreferenced(&batch.unreferenced))];
        first.extend(number.map(|number| Io::task(image.write_commit_number(number))));
        join(first).await?;
        if !batch.referring.is_empty() {
            batch.tables.values_mut().for_each(|table| table.attempted = true);
            image.write_all(&batch.referring).await?;
            image.file.flush().await?;
        }
        self.done = true;
        Ok(())
    }
}

impl Drop for BatchWrite<'_> {
    fn drop(&mut self) {
        let (image, batch) = (self.image, &mut self.batch);
        let mut map = image.map.borrow_mut();
        batch.leaves.iter().for_each(|leaf| map.finish_write(*leaf, self.done));
        if !self.done {
            image.new_tables.borrow_mut().append(&mut batch.tables);
        }
    }
}

/// Refcounts that are being written. If that fails or is dropped, they are dirty again.
struct RefcountBatchWrite<'a> {
    image: &'a Qcow2,
    batch: RefcountBatch,
    done: bool,
}

impl RefcountBatchWrite<'_> {
    async fn write(mut self) -> IoResult {
        let (image, batch) = (self.image, &mut self.batch);
        if batch.new_table_at.is_some() {
            // If an earlier write of the header failed, the header may refer to the new table's location already.
            image.rewrite_uncertain_header().await?;
        }
        image.write_all(&batch.writes).await?;
        image.file.flush().await?;
        if !batch.table_sectors.is_empty() {
            image.write_all(&batch.table_sectors).await?;
            image.file.flush().await?;
        }
        if let Some(at) = batch.new_table_at {
            let clusters = at.entries * 8 / image.shape.cluster_len();
            image.change_header(|sector| header::set_refcount_table(sector, at.offset, clusters as u32)).await?;
            image.refcounts.borrow_mut().table_location = at;
        }
        self.done = true;
        Ok(())
    }
}

impl Drop for RefcountBatchWrite<'_> {
    fn drop(&mut self) {
        let batch = &mut self.batch;
        let mut refcounts = self.image.refcounts.borrow_mut();
        for slice in &batch.slices {
            refcounts.finish_write(*slice, self.done);
        }
        if self.done {
            refcounts.new_blocks.retain(|block| !batch.blocks.contains(block));
            // Another location may have been found meanwhile.
            refcounts.next_table_location.take_if(|at| Some(*at) == batch.new_table_at);
        }
    }
}
