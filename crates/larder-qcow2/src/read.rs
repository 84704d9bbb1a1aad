//! Requests that change nothing: reads of several steps, and extents.

use std::rc::Weak;

use larder_block::buffer_pool::BufferPool;
use larder_block::event_loop::{WorkSlice, yield_now};
use larder_block::range_lock::RangeLockMode;
use larder_block::{
    ByteLen, ByteOffset, ByteRange, Extent, ExtentKind, Failure, Io, IoError, IoResult, Operation, ReadBuf, join,
};
use smallvec::SmallVec;

use crate::device::{Piece, Qcow2};
use crate::entry::{ClusterContent, DAMAGED, L2Entry, OFFSET};
use crate::map::{LEAF_ENTRIES_MAX, LeafIndex, decode};

/// The in-flight requests to the lower devices on behalf of one request.
pub(crate) type Ios<'a> = SmallVec<[Io<'a>; 4]>;

/// The maximum number of requests to the lower devices in flight on behalf of one request.
const LOWER_REQUESTS_MAX: usize = 64;

/// The number of runs of clusters that are listed in a row before other tasks run.
const EXTENT_RUNS_PER_SLICE: u64 = 256;

/// The length in bytes of a piece of metadata that is loaded in advance, and the number of pieces loaded at the same
/// time.
const LOAD_PIECE_BYTES: u64 = 64 << 10;
const LOADS_IN_FLIGHT_MAX: usize = 4;

/// The maximum number of pieces of metadata that are read at the same time, including those for the guest's requests.
const METADATA_READS_IN_FLIGHT_MAX: usize = 16;

/// Returns the buffers for reads of metadata. They are pooled, because between the map's small allocations they would
/// leave holes on the heap.
pub(crate) fn slice_buffers() -> BufferPool {
    BufferPool::new(METADATA_READS_IN_FLIGHT_MAX, LOAD_PIECE_BYTES as usize)
}

impl Qcow2 {
    pub(crate) async fn read_steps(&self, range: ByteRange, buffer: ReadBuf<'_>) -> IoResult {
        let failed = |error: IoError| self.error(Operation::Read, range, error.failure());
        let _in_flight = self.in_flight.count_until_drop();
        let mut ios = Ios::new();
        let mut rest = range;
        while !rest.is_empty() {
            let piece = self.find(rest).await.map_err(failed)?;
            let from = (rest.start - range.start).as_usize();
            let part = buffer.slice(from, piece.len as usize);
            let at = ByteRange::new(rest.start.get(), piece.len);
            if let Some(io) = self.read_piece(piece, at, part)? {
                ios.push(io);
            }
            if ios.len() >= LOWER_REQUESTS_MAX {
                join(std::mem::take(&mut ios)).await.map_err(failed)?;
            }
            rest = ByteRange::between(at.end(), range.end());
        }
        join(ios).await.map_err(failed)
    }

    /// Starts reading a piece; `None` if it is complete already.
    fn read_piece<'a>(&'a self, piece: Piece, range: ByteRange, buffer: ReadBuf<'a>) -> IoResult<Option<Io<'a>>> {
        match piece.content {
            ClusterContent::Data => self.read_data(piece, range, buffer).map(Some),
            ClusterContent::Zero => {
                buffer.fill_zero();
                Ok(None)
            }
            ClusterContent::Unallocated => Ok(self.read_backing(range, buffer)),
            ClusterContent::Compressed => Ok(Some(Io::task(self.read_compressed(piece.entry, range, buffer)))),
            ClusterContent::Corrupt => Err(self.corrupt_entry(Operation::Read, range, piece.entry)),
        }
    }

    fn read_data<'a>(&'a self, piece: Piece, range: ByteRange, buffer: ReadBuf<'a>) -> IoResult<Io<'a>> {
        let size = self.data().geometry().size.get();
        let available = piece.len.min(size.saturating_sub(piece.host));
        if available < piece.len {
            let readable_end = size.next_multiple_of(self.shape.cluster_len()).max(piece.host);
            // A data file may be shorter than the disk, like a raw image. In the image file the last cluster may be
            // cut off at the end of its data.
            if self.data_file.is_none() && piece.host + piece.len > readable_end {
                let readable_len = readable_end - piece.host;
                let clusters = ((range.start.get() + readable_len) >> self.shape.cluster_bits)
                    - (range.start.get() >> self.shape.cluster_bits);
                let at = ByteRange::between(range.start + ByteLen::new(readable_len), range.end());
                let entry = piece.entry.advanced(self.shape, clusters);
                return Err(self.corrupt_entry(Operation::Read, at, entry));
            }
            buffer.skip(available as usize).fill_zero();
            if available == 0 {
                return Ok(Io::ready(Ok(())));
            }
        }
        let there = available as usize;
        Ok(self.data().read(ByteOffset::new(piece.host), buffer.slice(0, there)))
    }

    /// Starts reading the backing file's part of `range`, with zeros past its end; `None` if it has no part of it.
    pub(crate) fn read_backing<'a>(&'a self, range: ByteRange, buffer: ReadBuf<'a>) -> Option<Io<'a>> {
        let backed = self.backed_part(range);
        buffer.skip(backed.len.as_usize()).fill_zero();
        let backing = self.backing.as_ref().filter(|_| !backed.is_empty())?;
        Some(backing.read(range.start, buffer.slice(0, backed.len.as_usize())))
    }

    /// Returns the part of `range` that the backing file covers, from the start of `range` on.
    pub(crate) fn backed_part(&self, range: ByteRange) -> ByteRange {
        match &self.backing {
            Some(backing) => range.intersection(ByteOffset::ZERO.range(backing.geometry().size)),
            None => ByteRange::new(range.start.get(), 0),
        }
    }

    /// Looks up the beginning of `range`, loading its leaf if necessary.
    pub(crate) async fn find(&self, range: ByteRange) -> IoResult<Piece> {
        loop {
            if let Some(piece) = self.look_up(range) {
                return Ok(piece);
            }
            self.load_leaf(range.start.get() >> self.shape.cluster_bits).await?;
        }
    }

    /// Loads the leaf of a guest cluster into the map.
    pub(crate) async fn load_leaf(&self, cluster: u64) -> IoResult {
        let shape = self.shape;
        let index = self.map.borrow().leaf_of(cluster);
        let _lock = self.leaf_locks.lock(ByteRange::new(index, 1), RangeLockMode::Exclusive).await;
        if self.map.borrow().is_loaded(index) {
            return Ok(());
        }
        let table = self.l1.borrow()[(cluster >> shape.table_bits()) as usize];
        if table & OFFSET == 0 {
            self.map.borrow_mut().load_unallocated(index);
            return Ok(());
        }
        let in_table = index & ((1 << (shape.table_bits() - shape.leaf_bits())) - 1);
        let at = ByteRange::new((table & OFFSET) + in_table * shape.slice_len(), shape.slice_len());
        if table & OFFSET & (shape.cluster_len() - 1) != 0 || at.end().get() > self.file.geometry().size.get() {
            let l1_index = cluster >> shape.table_bits();
            tracing::error!(
                "{}: L1 entry {l1_index} points to {:#x}, which {}; run `larder disk check`",
                self.name,
                table & OFFSET,
                match table & OFFSET & (shape.cluster_len() - 1) {
                    0 => "is past the end of the file",
                    _ => "is no multiple of the cluster size",
                }
            );
            return Err(self.error(Operation::Read, at, Failure::Invalid));
        }
        let mut buffer = self.slice_buffers.acquire().await;
        let bytes = &mut buffer[..at.len.as_usize()];
        self.file.read(at.start, ReadBuf::new(bytes)).await?;
        let mut entries = [L2Entry::UNALLOCATED; LEAF_ENTRIES_MAX];
        let entries = &mut entries[..1 << shape.leaf_bits()];
        decode(shape, bytes, entries);
        self.mark_damaged(index, entries);
        self.map.borrow_mut().load(index, entries);
        Ok(())
    }

    /// Loads `count` leaves of one L2 table into the map, except those that are loaded.
    async fn load_leaves(&self, first: LeafIndex, count: u64) -> IoResult {
        let shape = self.shape;
        let leaves = 1u64 << (shape.table_bits() - shape.leaf_bits());
        let _lock = self.leaf_locks.lock(ByteRange::new(first, count), RangeLockMode::Exclusive).await;
        let table = self.l1.borrow()[(first / leaves) as usize] & OFFSET;
        let at = ByteRange::new(table + first % leaves * shape.slice_len(), count * shape.slice_len());
        let outside = at.end().get() > self.file.geometry().size.get() || table & (shape.cluster_len() - 1) != 0;
        let missing = {
            let map = self.map.borrow();
            (first..first + count).any(|leaf| !map.is_loaded(leaf))
        };
        if table == 0 || outside || !missing {
            // Damage is reported to a guest's request for these clusters.
            return Ok(());
        }
        let mut buffer = self.slice_buffers.acquire().await;
        let bytes = &mut buffer[..at.len.as_usize()];
        self.file.read(at.start, ReadBuf::new(bytes)).await?;
        let mut entries = [L2Entry::UNALLOCATED; LEAF_ENTRIES_MAX];
        let entries = &mut entries[..1 << shape.leaf_bits()];
        for (leaf, bytes) in (first..).zip(bytes.chunks_exact(shape.slice_len() as usize)) {
            if self.map.borrow().is_loaded(leaf) {
                continue;
            }
            decode(shape, bytes, entries);
            self.mark_damaged(leaf, entries);
            self.map.borrow_mut().load(leaf, entries);
        }
        Ok(())
    }

    /// Returns the next leaves from `from` on that have an L2 table, as many as are loaded together.
    fn allocated_leaves(&self, from: LeafIndex) -> Option<(LeafIndex, u64)> {
        let shape = self.shape;
        let leaves = 1u64 << (shape.table_bits() - shape.leaf_bits());
        let leaf_count = self.map.borrow().leaves();
        let l1 = self.l1.borrow();
        let mut first = from;
        while first < leaf_count {
            let end = (first / leaves + 1) * leaves;
            if l1[(first / leaves) as usize] & OFFSET != 0 {
                let count_max = (LOAD_PIECE_BYTES / shape.slice_len()).max(1);
                return Some((first, count_max.min(end.min(leaf_count) - first)));
            }
            first = end;
        }
        None
    }

    /// Marks the entries of a leaf from the image that must not be used.
    fn mark_damaged(&self, leaf: LeafIndex, entries: &mut [L2Entry]) {
        if self.shape.data_file {
            self.mark_misplaced(leaf, entries);
        } else if !self.geometry.get().read_only {
            self.mark_invalid_targets(entries);
        }
    }

    /// Marks entries that point to another offset of the data file than their own, where another cluster is.
    fn mark_misplaced(&self, leaf: LeafIndex, entries: &mut [L2Entry]) {
        let shape = self.shape;
        let first = leaf << shape.leaf_bits();
        for (cluster, entry) in (first..).zip(entries) {
            let expected = cluster << shape.cluster_bits;
            if entry.host(shape).is_some_and(|host| host != expected) {
                entry.word |= DAMAGED;
            }
        }
    }

    /// Marks entries through which the guest would change metadata, or that point past the end of the file at the
    /// time it was opened. A cluster to which one of the latter points is never allocated.
    fn mark_invalid_targets(&self, entries: &mut [L2Entry]) {
        let (metadata, mut space) = (self.metadata.borrow(), self.space.borrow_mut());
        // All clusters that this process has taken itself are before `end`.
        let end = space.unwritten_from();
        for entry in entries {
            let Some(cluster) = entry.host(self.shape).map(|host| host >> self.shape.cluster_bits) else {
                continue;
            };
            let is_past_end = cluster >= end;
            if is_past_end {
                space.exclude_from(cluster);
            }
            let is_metadata = || entry.is_copied() && metadata.binary_search(&cluster).is_ok();
            if is_past_end || is_metadata() {
                entry.word |= DAMAGED;
            }
        }
    }

    /// Logs an invalid entry, and returns the error for the request that met it.
    pub(crate) fn corrupt_entry(&self, operation: Operation, range: ByteRange, entry: L2Entry) -> IoError {
        let cluster = range.start.get() >> self.shape.cluster_bits;
        let (table, index) = (cluster >> self.shape.table_bits(), cluster & ((1 << self.shape.table_bits()) - 1));
        let host = entry.word & OFFSET;
        let size = self.data().geometry().size;
        tracing::error!(
            "{}: entry {index} of L2 table {table} ({:#018x}) {}; run `larder disk check`",
            self.name,
            entry.on_disk(),
            if self.shape.data_file && entry.is_damaged() {
                let expected = cluster << self.shape.cluster_bits;
                format!("points to {host:#x} of the data file, where only {expected:#x} is valid")
            } else if entry.has_unknown_zero_flag(self.shape) {
                "has the zero flag, which version 2 does not define".to_owned()
            } else if host & (self.shape.cluster_len() - 1) != 0 {
                format!("points to {host:#x}, which is no multiple of the cluster size")
            } else if host >= size.get() {
                format!("points to {host:#x}, past the end of the file ({:#x})", size.get())
            } else if entry.is_damaged() && self.space.borrow().is_excluded(host >> self.shape.cluster_bits) {
                format!("points to {host:#x}, past the end of the file when it was opened")
            } else if entry.is_damaged() {
                format!("points to {host:#x}, which holds metadata")
            } else {
                format!("is invalid (subclusters {:#018x})", entry.bitmap)
            }
        );
        self.error(operation, range, Failure::Invalid)
    }

    pub(crate) async fn extents_steps(&self, range: ByteRange, limit: usize) -> IoResult<Vec<Extent>> {
        let _in_flight = self.in_flight.count_until_drop();
        let mut found: Vec<Extent> = Vec::new();
        let mut slice = WorkSlice::new(EXTENT_RUNS_PER_SLICE);
        let mut rest = range;
        while !rest.is_empty() && found.len() < limit.max(1) {
            slice.complete_steps(1).await;
            if let Some(unmapped) = self.range_without_table(rest) {
                self.unallocated_extents(unmapped, limit, &mut found).await?;
                let end = found.last().map_or(unmapped.end(), |last| last.range.end());
                rest = ByteRange::between(end, range.end());
                continue;
            }
            let piece = self.find(rest).await?;
            let at = ByteRange::new(rest.start.get(), piece.len);
            let zero_host = piece.content == ClusterContent::Zero && piece.entry.host(self.shape).is_some();
            let kind = match piece.content {
                ClusterContent::Unallocated => {
                    self.unallocated_extents(at, limit, &mut found).await?;
                    None
                }
                ClusterContent::Zero if zero_host => Some(ExtentKind::Zero),
                ClusterContent::Zero => Some(ExtentKind::Hole),
                _ => Some(ExtentKind::Data),
            };
            if let Some(kind) = kind {
                push_extent(&mut found, at, kind);
            }
            let end = found.last().map_or(at.end(), |last| last.range.end());
            rest = ByteRange::between(end, range.end());
        }
        found.truncate(limit.max(1));
        Ok(found)
    }

    /// Returns the beginning of `range` that belongs to one L1 entry, if that has no L2 table. The map is not needed
    /// for it.
    pub(crate) fn range_without_table(&self, range: ByteRange) -> Option<ByteRange> {
        let span = self.shape.table_span();
        let table = range.start.get() / span;
        let has_none = self.l1.borrow()[table as usize] & OFFSET == 0;
        has_none.then(|| range.intersection(ByteRange::new(table * span, span)))
    }

    /// Appends the backing file's extents of an unallocated range, with a hole past its end.
    async fn unallocated_extents(&self, range: ByteRange, limit: usize, found: &mut Vec<Extent>) -> IoResult {
        let backed = self.backed_part(range);
        match &self.backing {
            Some(backing) if !backed.is_empty() => {
                for extent in backing.extents(backed, limit).await? {
                    push_extent(found, extent.range, extent.kind);
                }
                Ok(())
            }
            _ => {
                push_extent(found, range, ExtentKind::Hole);
                Ok(())
            }
        }
    }
}

/// Appends an extent, merging it with the last one if that is of the same kind.
fn push_extent(found: &mut Vec<Extent>, range: ByteRange, kind: ExtentKind) {
    match found.last_mut() {
        Some(last) if last.kind == kind => last.range.len += range.len,
        _ => found.push(Extent { range, kind }),
    }
}

/// Loads the whole map, within the memory limit and while the disk is open: several pieces at a time while the guest
/// is idle, one otherwise.
pub(crate) async fn load_map(image: Weak<Qcow2>) {
    let mut leaf = 0;
    loop {
        yield_now().await;
        let Some(image) = image.upgrade() else { return };
        if image.map.borrow().is_full() {
            return;
        }
        let loads_max = if image.in_flight.is_idle() { LOADS_IN_FLIGHT_MAX } else { 1 };
        let mut loads = Ios::new();
        while loads.len() < loads_max
            && let Some((first, count)) = image.allocated_leaves(leaf)
        {
            loads.push(Io::task(image.load_leaves(first, count)));
            leaf = first + count;
        }
        if loads.is_empty() {
            return;
        }
        if let Err(error) = join(loads).await {
            tracing::warn!("{error}; the metadata is read on demand instead");
            return;
        }
    }
}
