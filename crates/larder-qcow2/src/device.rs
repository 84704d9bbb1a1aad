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
use crate::entry::{Content, Entry};
use crate::header::{HEADER_SECTOR, TableAt};
use crate::in_flight::InFlight;
use crate::journal::Journal;
use crate::map::{Map, MapStatistics};
use crate::refcount::Refcounts;
use crate::shape::Shape;
use crate::space::{Freed, Space};

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
    pub(crate) header: RefCell<[u8; HEADER_SECTOR]>,
    /// The image may have another header, because a write of the header failed.
    pub(crate) header_uncertain: Cell<bool>,
    /// The autoclear bits that the header must get before the first change.
    pub(crate) autoclear_pending: Cell<Option<u64>>,
    /// The ends of the files must be adjusted before the first change.
    pub(crate) ends_pending: Cell<bool>,
    pub(crate) l1: RefCell<Vec<u64>>,
    pub(crate) l1_at: Cell<TableAt>,
    /// L2 tables to which no durable L1 entry refers yet.
    pub(crate) new_tables: RefCell<BTreeMap<u64, NewTable>>,
    /// For each L1 entry, true if its L2 table can be changed: it has no other user, and its space in the file is
    /// allocated.
    pub(crate) tables_secured: RefCell<Vec<bool>>,
    /// The L1 table's space in the file is allocated.
    pub(crate) l1_secured: Cell<bool>,
    pub(crate) map: RefCell<Map>,
    pub(crate) refcounts: RefCell<Refcounts>,
    pub(crate) space: RefCell<Space>,
    /// Clusters to which nothing in memory refers any more, but the image may.
    pub(crate) freed: RefCell<Vec<Freed>>,
    /// Clusters to which nothing in the image refers either, by the epoch after which they are free.
    pub(crate) released: RefCell<Vec<(u64, Freed)>>,
    /// The host clusters that hold metadata, sorted, as they were when the image was opened, without those freed
    /// since; empty if the image is read-only.
    pub(crate) metadata: RefCell<Vec<u64>>,
    /// Locks on guest clusters (in bytes) whose mapping is being changed.
    pub(crate) mapping: RangeLocks,
    /// Locks on leaves (a byte each) that are being read.
    pub(crate) loading: RangeLocks,
    /// Locks on L2 tables (a byte each) that are being created.
    pub(crate) tables: RangeLocks,
    pub(crate) finding_space: RangeLocks,
    pub(crate) reclaiming: RangeLocks,
    pub(crate) commits: Commits,
    pub(crate) writing_refcounts: RangeLocks,
    pub(crate) writing_header: RangeLocks,
    pub(crate) growing: RangeLocks,
    /// The changes that outlive this process. Without a journal each change of the mapping is committed at once.
    pub(crate) journal: Option<Journal>,
    pub(crate) in_flight: InFlight,
    pub(crate) decompressor: Decompressor,
    /// Buffers for slices of L2 tables.
    pub(crate) slices: BufferPool,
    /// Buffers for copy-on-write, see [`crate::write::copies`].
    pub(crate) copies: BufferPool,
    pub(crate) changes: SizeChanges,
}

/// An L2 table to which the image's L1 table does not refer yet.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewTable {
    /// The L1 entry in the image.
    pub(crate) before: u64,
    /// The image's entry may refer to the new table already, because writing it failed.
    pub(crate) attempted: bool,
}

/// The location of a part of the disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) content: Content,
    /// The host offset of the first byte; meaningless without a host cluster.
    pub(crate) host: u64,
    /// The length in bytes, at least 1.
    pub(crate) len: u64,
    /// The host cluster may be changed in place.
    pub(crate) copied: bool,
    /// The entry of the first cluster.
    pub(crate) entry: Entry,
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
            self.parts_at(entry, within, run_len)
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
    fn parts_at(&self, entry: Entry, within: u64, run_len: u64) -> (Content, u64) {
        let shape = self.shape;
        let first = (within / shape.part_len()) as u32;
        let content = entry.content(shape, first);
        let mut part = first + 1;
        while part < shape.parts() && entry.content(shape, part) == content {
            part += 1;
        }
        let whole = first == 0 && part == shape.parts() || entry.bitmap == crate::entry::ALL_ALLOCATED;
        let len = match whole {
            true => run_len,
            false => u64::from(part) * shape.part_len() - within,
        };
        (content, len)
    }

    /// Returns the location of all of `range`, if it is contiguous data whose leaf is loaded.
    #[inline]
    fn direct(&self, range: ByteRange) -> Option<Piece> {
        let piece = self.look_up(range)?;
        let together = piece.content == Content::Data && piece.len == range.len.get();
        (together && piece.host + piece.len <= self.data().geometry().size.get()).then_some(piece)
    }

    pub(crate) fn error(&self, operation: Operation, range: ByteRange, failure: Failure) -> IoError {
        IoError::new(&self.name, operation, range, failure)
    }

    fn checked(&self, operation: Operation, range: ByteRange) -> IoResult {
        check_request(&self.name, &self.geometry.get(), operation, range)
    }

    /// Returns true if a change may be made in place without further steps.
    fn is_plain(&self, fua: bool) -> bool {
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
        if let Err(error) = self.checked(Operation::Read, range) {
            return Io::ready(Err(error));
        }
        if range.is_empty() {
            return Io::ready(Ok(()));
        }
        match self.direct(range) {
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
        if let Err(error) = self.checked(Operation::Write, range) {
            return Io::ready(Err(error));
        }
        if range.is_empty() {
            return Io::ready(Ok(()));
        }
        match self.direct(range) {
            Some(piece) if piece.copied && self.is_plain(flags.fua) => {
                let ticket = self.in_flight.enter();
                let write = self.data().write(ByteOffset::new(piece.host), buffer, flags);
                write.watched(&self.in_flight, ticket)
            }
            _ => Io::task(self.write_steps(range, buffer, flags)),
        }
    }

    fn flush(&self) -> Io<'_> {
        let is_plain = self.data_file.is_none() && !self.commits.has_work(self);
        // A read-only image may have changes in memory, which are never written.
        if is_plain || self.geometry.get().read_only {
            return self.file.flush();
        }
        Io::task(self.commit())
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        match self.checked(Operation::Discard, range) {
            Err(error) => Io::ready(Err(error)),
            Ok(()) => Io::task(self.discard_steps(range)),
        }
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        match self.checked(Operation::WriteZeroes, range) {
            Err(error) => Io::ready(Err(error)),
            Ok(()) => Io::task(self.zero_steps(range, flags)),
        }
    }

    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        Box::pin(async move {
            self.checked(Operation::Extents, range)?;
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
        &self.changes
    }
}
