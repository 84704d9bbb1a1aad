//! The disk: the state of an open image, and the requests of a single step.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;

use larder_block::buffer_pool::BufferPool;
use larder_block::event_loop::WeakLoop;
use larder_block::range_lock::RangeLocks;
use larder_block::{
    BlockDevice, BoxFuture, ByteLen, ByteOffset, ByteRange, Extent, Failure, Geometry, Io, IoError, IoResult,
    Operation, ReadBuf, SizeChanges, WriteBuf, WriteFlags, ZeroFlags, check_request,
};

use crate::commit::Commits;
use crate::compressed::Decompressor;
use crate::entry::{ClusterContent, L2Entry};
use crate::header::{HEADER_SECTOR_BYTES, TableLocation};
use crate::in_flight::InFlight;
use crate::journal::Journal;
use crate::map::{Map, MapStatistics};
use crate::refcount::Refcounts;
use crate::shape::Shape;
use crate::space::{AllocatorState, FreedClusters};

/// A qcow2 image as a block device. Open it with [`crate::open`].
pub struct Qcow2 {
    pub(crate) name: Rc<str>,
    pub(crate) on: WeakLoop,
    /// The image file, with blocks of 512 bytes.
    pub(crate) file: Rc<dyn BlockDevice>,
    /// The external data file, if the guest's data is not in the image file.
    pub(crate) data_file: Option<Rc<dyn BlockDevice>>,
    /// The source of unallocated clusters.
    pub(crate) backing: Option<Rc<dyn BlockDevice>>,
    pub(crate) shape: Shape,
    pub(crate) geometry: Cell<Geometry>,
    /// The first sector of the header, as it is in the image.
    pub(crate) header: RefCell<[u8; HEADER_SECTOR_BYTES]>,
    /// The image may have another header, because a write of the header failed.
    pub(crate) header_uncertain: Cell<bool>,
    /// The autoclear bits that the header must get before the first change.
    pub(crate) autoclear_pending: Cell<Option<u64>>,
    /// The ends of the files must be adjusted before the first change.
    pub(crate) file_ends_pending: Cell<bool>,
    pub(crate) l1: RefCell<Vec<u64>>,
    pub(crate) l1_location: Cell<TableLocation>,
    /// L2 tables to which no durable L1 entry refers yet.
    pub(crate) new_tables: RefCell<BTreeMap<u64, NewTable>>,
    /// For each L1 entry, true if its L2 table can be changed: it has no other user, and its space in the file is
    /// allocated.
    pub(crate) tables_writable: RefCell<Vec<bool>>,
    /// The L1 table's space in the file is allocated.
    pub(crate) l1_allocated: Cell<bool>,
    pub(crate) map: RefCell<Map>,
    pub(crate) refcounts: RefCell<Refcounts>,
    pub(crate) space: RefCell<AllocatorState>,
    /// Clusters to which nothing in memory refers any more, but the image may.
    pub(crate) freed: RefCell<Vec<FreedClusters>>,
    /// Clusters to which nothing in the image refers either, by the epoch after which they are free.
    pub(crate) released: RefCell<Vec<(u64, FreedClusters)>>,
    /// The host clusters that hold metadata, sorted, as they were when the image was opened, without those freed
    /// since; empty if the image is read-only.
    pub(crate) metadata: RefCell<Vec<u64>>,
    /// Locks on guest clusters (in bytes) whose mapping is being changed.
    pub(crate) mapping_locks: RangeLocks,
    /// Locks on leaves (a byte each) that are being read.
    pub(crate) leaf_locks: RangeLocks,
    /// Locks on L2 tables (a byte each) that are being created.
    pub(crate) table_locks: RangeLocks,
    pub(crate) allocation_lock: RangeLocks,
    pub(crate) reclaim_lock: RangeLocks,
    pub(crate) commits: Commits,
    pub(crate) refcount_lock: RangeLocks,
    pub(crate) header_lock: RangeLocks,
    pub(crate) grow_lock: RangeLocks,
    /// The changes that outlive this process. Without a journal each change of the mapping is committed at once.
    pub(crate) journal: Option<Journal>,
    pub(crate) in_flight: InFlight,
    pub(crate) decompressor: Decompressor,
    /// Buffers for slices of L2 tables.
    pub(crate) slice_buffers: BufferPool,
    /// Buffers for copy-on-write, see [`crate::write::copy_buffers`].
    pub(crate) copy_buffers: BufferPool,
    pub(crate) size_changes: SizeChanges,
}

/// An L2 table to which the image's L1 table does not refer yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewTable {
    /// The L1 entry in the image.
    pub(crate) old_entry: u64,
    /// The image's entry may refer to the new table already, because writing it failed.
    pub(crate) attempted: bool,
}

/// The location of a part of the disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) content: ClusterContent,
    /// The host offset of the first byte; meaningless without a host cluster.
    pub(crate) host: u64,
    /// The length in bytes, at least 1.
    pub(crate) len: u64,
    /// The host cluster may be changed in place.
    pub(crate) copied: bool,
    /// The entry of the first cluster.
    pub(crate) entry: L2Entry,
}

impl Qcow2 {
    /// Returns the device with the guest's data.
    pub(crate) fn data(&self) -> &Rc<dyn BlockDevice> {
        self.data_file.as_ref().unwrap_or(&self.file)
    }

    /// Returns statistics of the metadata cache.
    pub fn map_statistics(&self) -> MapStatistics {
        self.map.borrow().statistics()
    }

    /// Returns the geometry of the image's format.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Looks up the beginning of `range` (not empty, on the disk): the longest part that is of one kind and
    /// contiguous. Returns `None` if its leaf must be loaded first.
    #[inline]
    pub(crate) fn look_up(&self, range: ByteRange) -> Option<Piece> {
        let shape = self.shape;
        let start = range.start.get();
        let within = start & (shape.cluster_len() - 1);
        let clusters = (within + range.len.get() + shape.cluster_len() - 1) >> shape.cluster_bits;
        let limit = usize::try_from(clusters).unwrap_or(usize::MAX);
        let (entry, count) = self.map.borrow_mut().run_at(start >> shape.cluster_bits, limit)?;
        let run_len = ((count as u64) << shape.cluster_bits) - within;
        let (content, len) = if shape.extended && !entry.is_compressed() {
            self.subclusters_at(entry, within, run_len)
        } else {
            (entry.content(shape, 0), run_len)
        };
        Some(Piece {
            content,
            host: entry.host(shape).unwrap_or(0) + within,
            len: len.min(range.len.get()),
            copied: entry.is_copied(),
            entry,
        })
    }

    /// Returns the content and the length in bytes of equal subclusters of a run from `within` on.
    fn subclusters_at(&self, entry: L2Entry, within: u64, run_len: u64) -> (ClusterContent, u64) {
        let shape = self.shape;
        let first = (within / shape.subcluster_len()) as u32;
        let content = entry.content(shape, first);
        let mut subcluster = first + 1;
        while subcluster < shape.subclusters_per_cluster() && entry.content(shape, subcluster) == content {
            subcluster += 1;
        }
        let is_uniform =
            first == 0 && subcluster == shape.subclusters_per_cluster() || entry.bitmap == crate::entry::ALL_ALLOCATED;
        let len = match is_uniform {
            true => run_len,
            false => u64::from(subcluster) * shape.subcluster_len() - within,
        };
        (content, len)
    }

    /// Returns the location of all of `range`, if it is contiguous data whose leaf is loaded.
    #[inline]
    fn look_up_contiguous(&self, range: ByteRange) -> Option<Piece> {
        let piece = self.look_up(range)?;
        let is_contiguous_data = piece.content == ClusterContent::Data && piece.len == range.len.get();
        (is_contiguous_data && piece.host + piece.len <= self.data().geometry().size.get()).then_some(piece)
    }

    pub(crate) fn error(&self, operation: Operation, range: ByteRange, failure: Failure) -> IoError {
        IoError::new(&self.name, operation, range, failure)
    }

    fn check_range(&self, operation: Operation, range: ByteRange) -> IoResult {
        check_request(&self.name, &self.geometry.get(), operation, range)
    }

    /// Returns true if a change may be made in place without further steps.
    fn can_change_in_place(&self, fua: bool) -> bool {
        // Without a journal a write must not go to a location that only this process's memory maps.
        let commits = fua || self.journal.is_none();
        self.is_prepared() && !(commits && self.commits.has_work(self))
    }
}

impl BlockDevice for Qcow2 {
    fn name(&self) -> &Rc<str> {
        &self.name
    }

    fn geometry(&self) -> Geometry {
        self.geometry.get()
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        let range = start.range(buffer.byte_len());
        if let Err(error) = self.check_range(Operation::Read, range) {
            return Io::ready(Err(error));
        }
        if range.is_empty() {
            return Io::ready(Ok(()));
        }
        match self.look_up_contiguous(range) {
            Some(piece) => {
                let ticket = self.in_flight.enter();
                let read = self.data().read(ByteOffset::new(piece.host), buffer);
                read.watched(&self.in_flight, ticket)
            }
            None => Io::task(self.read_steps(range, buffer)),
        }
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        let range = start.range(buffer.byte_len());
        if let Err(error) = self.check_range(Operation::Write, range) {
            return Io::ready(Err(error));
        }
        if range.is_empty() {
            return Io::ready(Ok(()));
        }
        match self.look_up_contiguous(range) {
            Some(piece) if piece.copied && self.can_change_in_place(flags.fua) => {
                let ticket = self.in_flight.enter();
                let write = self.data().write(ByteOffset::new(piece.host), buffer, flags);
                write.watched(&self.in_flight, ticket)
            }
            _ => Io::task(self.write_steps(range, buffer, flags)),
        }
    }

    fn flush(&self) -> Io<'_> {
        let needs_no_commit = self.data_file.is_none() && !self.commits.has_work(self);
        // A read-only image may have changes in memory, which are never written.
        if needs_no_commit || self.geometry.get().read_only {
            return self.file.flush();
        }
        Io::task(self.commit())
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        match self.check_range(Operation::Discard, range) {
            Err(error) => Io::ready(Err(error)),
            Ok(()) => Io::task(self.discard_steps(range)),
        }
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        match self.check_range(Operation::WriteZeroes, range) {
            Err(error) => Io::ready(Err(error)),
            Ok(()) => Io::task(self.zero_steps(range, flags)),
        }
    }

    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        Box::pin(async move {
            self.check_range(Operation::Extents, range)?;
            self.extents_steps(range, limit).await
        })
    }

    fn grow(&self, size: ByteLen) -> BoxFuture<'_, IoResult> {
        Box::pin(self.grow_steps(size))
    }

    fn close(&self) -> BoxFuture<'_, IoResult> {
        Box::pin(self.close_steps())
    }

    fn size_changes(&self) -> &SizeChanges {
        &self.size_changes
    }
}
