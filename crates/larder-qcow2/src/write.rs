//! Writes that change the mapping: into clusters that are unallocated, zero, compressed, or shared with a snapshot.
//!
//! The data is written first, to clusters to which nothing refers (together with the parts of them that the guest
//! does not overwrite), and the mapping is changed in memory after that. Until a commit the image does not have the
//! change: a crash leaves the old mapping, and the new clusters free or leaked.

use larder_block::buffer_pool::BufferPool;
use larder_block::range_lock::RangeLockMode;
use larder_block::{ByteOffset, ByteRange, IoError, IoResult, IoVec, Operation, ReadBuf, WriteBuf, WriteFlags};
use smallvec::SmallVec;

use crate::device::{Piece, Qcow2};
use crate::entry::{ClusterContent, L2Entry};
use crate::journal::Record;
use crate::shape::Shape;
use crate::space::{Allocation, FreedClusters};

/// The treatment of a cluster that cannot be written in place.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Treatment {
    /// Allocate a new host cluster, and copy the guest's other data of the cluster, if the old one had some.
    Move { copies: bool },
    /// Use the present host cluster, at this offset, some of whose parts are zero or unallocated.
    Fill { host: u64 },
}

/// The layout of a buffer of two clusters for the data around a write: each byte is at its offset in the cluster, the
/// first cluster's data first, so that direct I/O finds it aligned.
struct CopyLayout {
    shape: Shape,
    padded_range: ByteRange,
}

/// The number of clusters of a buffer for [`CopyLayout`].
const COPY_BUFFER_CLUSTERS: u64 = 2;
/// The memory for the buffers of [`CopyLayout`], in bytes; at least [`COPY_BUFFERS_MIN`] buffers are permitted.
const COPY_BUFFERS_BYTES: u64 = 2 << 20;
const COPY_BUFFERS_MIN: u64 = 2;
/// The number of bytes up to which reading a gap costs less than another request.
const GAP_BYTES_MAX: u64 = 64 << 10;

impl CopyLayout {
    fn new(shape: Shape, padded_range: ByteRange) -> Self {
        Self { shape, padded_range }
    }

    fn cluster(&self, at: ByteOffset) -> u64 {
        at.get() >> self.shape.cluster_bits
    }

    /// Returns the location in the buffer of a range of one cluster, the first or the last.
    fn position(&self, range: ByteRange) -> std::ops::Range<usize> {
        let first = self.cluster(range.start) == self.cluster(self.padded_range.start);
        let cluster_len = self.shape.cluster_len();
        let within = range.start.get() % cluster_len;
        let at = if first { within } else { cluster_len + within } as usize;
        at..at + range.len.as_usize()
    }

    /// Returns true if both sides should be read together.
    fn are_near(&self, head: ByteRange, tail: ByteRange) -> bool {
        self.cluster(head.start) == self.cluster(tail.start) && (tail.start - head.end()).get() <= GAP_BYTES_MAX
    }
}

/// Returns the buffers for the surroundings of writes.
pub(crate) fn copy_buffers(shape: Shape) -> BufferPool {
    let len = COPY_BUFFER_CLUSTERS * shape.cluster_len();
    BufferPool::new((COPY_BUFFERS_BYTES / len).max(COPY_BUFFERS_MIN) as usize, len as usize)
}

impl Qcow2 {
    pub(crate) async fn write_steps(&self, range: ByteRange, buffer: WriteBuf<'_>, flags: WriteFlags) -> IoResult {
        let failed = |error: IoError| self.error(Operation::Write, range, error.failure());
        self.before_change().await.map_err(failed)?;
        let write = async || {
            let _in_flight = self.in_flight.count_until_drop();
            self.write_pieces(range, buffer).await
        };
        self.retry_on_no_space(write).await.map_err(failed)?;
        self.after_change(flags.fua).await.map_err(failed)
    }

    /// Writes `range` for a request that is counted as in flight.
    pub(crate) async fn write_pieces(&self, range: ByteRange, buffer: WriteBuf<'_>) -> IoResult {
        let mut rest = range;
        while !rest.is_empty() {
            let part = buffer.skip((rest.start - range.start).as_usize());
            let done = self.write_part(rest, part).await?;
            rest = ByteRange::between(rest.start + done.len, range.end());
        }
        Ok(())
    }

    /// Writes the beginning of `range`. Returns the written part, which may be empty if another request has mapped it
    /// meanwhile.
    async fn write_part(&self, range: ByteRange, buffer: WriteBuf<'_>) -> IoResult<ByteRange> {
        let piece = self.find(range).await?;
        if piece.content == ClusterContent::Data && piece.copied {
            let written = ByteRange::new(range.start.get(), piece.len);
            self.check_inside(piece, written)?;
            if self.data_file.is_some() {
                self.extend_data_file(piece.host + piece.len).await?;
            }
            let part = buffer.slice(0, piece.len as usize);
            self.data().write(ByteOffset::new(piece.host), part, WriteFlags::NONE).await?;
            return Ok(written);
        }
        let shape = self.shape;
        // Only one leaf is written at a time.
        let leaf_span = shape.cluster_len() << shape.leaf_bits();
        let leaf_end = ByteOffset::new(range.start.align_down(leaf_span).get() + leaf_span);
        let part = range.intersection(ByteRange::between(range.start, leaf_end));
        let _lock = self.mapping_locks.lock(part.widened(shape.cluster_len()), RangeLockMode::Exclusive).await;
        self.write_new(part, buffer).await
    }

    /// Refuses a corrupt entry that points past the end of the file, which the guest must not write.
    fn check_inside(&self, piece: Piece, range: ByteRange) -> IoResult {
        let size = self.data().geometry().size.get();
        if piece.host + piece.len > size && self.data_file.is_none() {
            return Err(self.corrupt_entry(Operation::Write, range, piece.entry));
        }
        Ok(())
    }

    /// Returns the treatment of a cluster; `None` if it can be written in place, or its entry is invalid.
    fn treatment(&self, entry: L2Entry) -> Option<Treatment> {
        let shape = self.shape;
        let contents = || (0..shape.subclusters_per_cluster()).map(|part| entry.content(shape, part));
        if contents().any(|content| content == ClusterContent::Corrupt) {
            return None;
        }
        if let Some(host) = entry.host(shape).filter(|_| entry.is_copied()) {
            return contents().any(|content| content != ClusterContent::Data).then_some(Treatment::Fill { host });
        }
        Some(Treatment::Move {
            copies: contents().any(|content| matches!(content, ClusterContent::Data | ClusterContent::Compressed)),
        })
    }

    /// Writes the beginning of `range`, whose mapping is locked, to new or unused space.
    async fn write_new(&self, range: ByteRange, buffer: WriteBuf<'_>) -> IoResult<ByteRange> {
        let shape = self.shape;
        let empty = ByteRange::new(range.start.get(), 0);
        let piece = self.find(range).await?;
        if piece.content == ClusterContent::Data && piece.copied {
            return Ok(empty);
        }
        let first = range.start.get() >> shape.cluster_bits;
        let clusters = ((range.end().get() - 1) >> shape.cluster_bits) + 1 - first;
        let Some(treatment) = self.treatment(piece.entry) else {
            return Err(self.corrupt_entry(Operation::Write, range, piece.entry));
        };
        let count_max = match treatment {
            Treatment::Fill { .. } => 1,
            Treatment::Move { .. } => self.count_same_treatment(first, clusters, treatment),
        };
        let _reservation = self.reserve_journal(count_max).await?;
        self.make_table_writable(first >> shape.table_bits()).await?;
        let (target, allocation) = self.choose_target(first, count_max, treatment).await?;
        let count = allocation.as_ref().map_or(count_max, |allocation| allocation.count);
        let reads_zero = allocation.as_ref().is_some_and(|allocation| allocation.reads_zero);

        let span = ByteRange::new(first << shape.cluster_bits, count << shape.cluster_bits);
        let part = match treatment {
            // Other parts of the cluster may be written in place meanwhile.
            Treatment::Fill { .. } => range.intersection(ByteRange::new(range.start.get(), piece.len)),
            Treatment::Move { .. } => range,
        };
        let part = part.intersection(span);
        // Copying takes whole clusters; otherwise only partially written parts are completed.
        let unit = match treatment {
            Treatment::Move { copies: true } => shape.cluster_len(),
            _ => shape.subcluster_len(),
        };
        let padded_range = part.widened(unit);
        self.write_padded(padded_range, part, buffer, target + (padded_range.start - span.start).get(), reads_zero)
            .await?;

        // Only this request changes these entries, but their leaf may have been evicted.
        self.find(ByteRange::new(range.start.get(), 1)).await?;
        self.map_clusters(first, count, target, padded_range, treatment);
        if let Some(allocation) = allocation {
            allocation.keep();
        }
        Ok(part)
    }

    /// Returns how many of `count` clusters from `first` on (in one loaded leaf) have the same treatment.
    fn count_same_treatment(&self, first: u64, count: u64, treatment: Treatment) -> u64 {
        let mut same = 0;
        while same < count {
            let found = self.map.borrow_mut().run_at(first + same, (count - same) as usize);
            match found {
                Some((entry, run)) if self.treatment(entry) == Some(treatment) => same += run as u64,
                _ => break,
            }
        }
        same.max(1)
    }

    /// Returns the host offset for clusters from `first` on, and the allocation for it.
    async fn choose_target(
        &self,
        first: u64,
        count_max: u64,
        treatment: Treatment,
    ) -> IoResult<(u64, Option<Allocation<'_>>)> {
        if let Treatment::Fill { host } = treatment {
            return Ok((host, None));
        }
        if self.data_file.is_some() {
            // The guest's clusters have the same offsets in the data file as on the disk (as in QEMU).
            let target = first << self.shape.cluster_bits;
            return Ok((target, None));
        }
        let allocation = self.allocate(count_max).await?;
        Ok((allocation.first << self.shape.cluster_bits, Some(allocation)))
    }

    /// Writes `part` from `buffer` to `target`, together with the guest's present data around it, up to `padded_range`.
    async fn write_padded(
        &self,
        padded_range: ByteRange,
        part: ByteRange,
        buffer: WriteBuf<'_>,
        target: u64,
        reads_zero: bool,
    ) -> IoResult {
        let head = ByteRange::between(padded_range.start, part.start);
        let tail = ByteRange::between(part.end(), padded_range.end());
        let head = self.range_to_copy(head, reads_zero).await?;
        let tail = self.range_to_copy(tail, reads_zero).await?;
        let middle = buffer.slice(0, part.len.as_usize());
        if head.is_empty() && tail.is_empty() {
            return self.write_data(target + (part.start - padded_range.start).get(), middle).await;
        }
        let mut bytes = self.copy_buffers.acquire().await;
        let layout = CopyLayout::new(self.shape, padded_range);
        if !head.is_empty() && !tail.is_empty() && layout.are_near(head, tail) {
            let all = ByteRange::between(head.start, tail.end());
            self.read_for_copy(all, &mut bytes[layout.position(all)]).await?;
        } else {
            for side in [head, tail] {
                self.read_for_copy(side, &mut bytes[layout.position(side)]).await?;
            }
        }
        let mut pieces = SmallVec::<[IoVec; 8]>::new();
        let piece_of = |bytes: &[u8]| IoVec::new(bytes.as_ptr().cast_mut(), bytes.len());
        pieces.push(piece_of(&bytes[layout.position(head)]));
        pieces.extend(middle.pieces());
        pieces.push(piece_of(&bytes[layout.position(tail)]));
        pieces.retain(|piece| !piece.is_empty());
        // SAFETY: `bytes` lives until the write has ended and nothing writes to it; the middle is valid as long as
        // `buffer` is, which outlives this call.
        let all = unsafe { WriteBuf::from_pieces(&pieces) };
        let start = if head.is_empty() { part.start } else { head.start };
        self.write_data(target + (start - padded_range.start).get(), all).await
    }

    async fn write_data(&self, at: u64, bytes: WriteBuf<'_>) -> IoResult {
        if self.data_file.is_some() {
            self.extend_data_file(at + bytes.len() as u64).await?;
        }
        self.data().write(ByteOffset::new(at), bytes, WriteFlags::NONE).await
    }

    /// Returns the part of `range` that must be copied. `range` may exceed the disk's end. The part is all of it, or
    /// nothing if it has only zeros and the target reads as zeros already.
    async fn range_to_copy(&self, range: ByteRange, target_reads_zero: bool) -> IoResult<ByteRange> {
        let on_disk = range.intersection(ByteOffset::ZERO.range(self.geometry.get().size));
        if target_reads_zero && self.reads_as_zeros(on_disk).await? {
            return Ok(ByteRange::new(range.start.get(), 0));
        }
        Ok(range)
    }

    /// Reads the guest's data in `range`, with zeros beyond the disk's end.
    async fn read_for_copy(&self, range: ByteRange, bytes: &mut [u8]) -> IoResult {
        let on_disk = range.intersection(ByteOffset::ZERO.range(self.geometry.get().size));
        let (present, beyond) = bytes.split_at_mut(on_disk.len.as_usize());
        beyond.fill(0);
        self.read_steps(on_disk, ReadBuf::new(present)).await
    }

    /// Returns true if `range` reads as zeros according to the map.
    pub(crate) async fn reads_as_zeros(&self, range: ByteRange) -> IoResult<bool> {
        let mut rest = range;
        while !rest.is_empty() {
            let piece = self.find(rest).await?;
            let at = ByteRange::new(rest.start.get(), piece.len);
            let zeros = match piece.content {
                ClusterContent::Zero => true,
                ClusterContent::Unallocated => self.backed_part(at).is_empty(),
                _ => false,
            };
            if !zeros {
                return Ok(false);
            }
            rest = ByteRange::between(at.end(), rest.end());
        }
        Ok(true)
    }

    /// Extends the data file to `end`, because it may be shorter than the disk.
    async fn extend_data_file(&self, end: u64) -> IoResult {
        if end <= self.data().geometry().size.get() {
            return Ok(());
        }
        self.data().grow(larder_block::ByteLen::new(end)).await
    }

    /// Changes the mapping: the clusters are at `target` now, and have data in `padded_range`.
    fn map_clusters(&self, first: u64, count: u64, target: u64, padded_range: ByteRange, treatment: Treatment) {
        let shape = self.shape;
        let copies = treatment == Treatment::Move { copies: true };
        let mut step = 0;
        while step < count {
            let cluster = first + step;
            let found = self.map.borrow_mut().run_at(cluster, (count - step) as usize);
            let Some((old, run)) = found else {
                panic!("the leaf of cluster {cluster} was evicted while it was locked");
            };
            if matches!(treatment, Treatment::Move { .. }) {
                self.free_host(old, run as u64);
            }
            if shape.extended && !copies {
                for cluster in cluster..cluster + run as u64 {
                    let host = target + ((cluster - first) << shape.cluster_bits);
                    let entry = self.with_subclusters(old, cluster, host, padded_range);
                    self.set_entries(cluster, 1, entry);
                }
            }
            step += run as u64;
        }
        if !shape.extended || copies {
            self.set_entries(first, count, L2Entry::data(shape, target));
        }
    }

    /// Returns the extended entry of a cluster whose parts in `padded_range` are data now.
    fn with_subclusters(&self, old: L2Entry, cluster: u64, host: u64, padded_range: ByteRange) -> L2Entry {
        let shape = self.shape;
        let span = ByteRange::new(cluster << shape.cluster_bits, shape.cluster_len());
        let inside = padded_range.intersection(span);
        let first = (inside.start - span.start).get() / shape.subcluster_len();
        let subclusters = inside.len.get() / shape.subcluster_len();
        let mask = ((1u64 << subclusters) - 1) << first;
        L2Entry { word: host | crate::entry::COPIED, bitmap: old.bitmap & !(mask << 32) | mask }
    }

    /// Changes entries of one loaded leaf in memory, and records the change in the journal, in which space is
    /// reserved.
    pub(crate) fn set_entries(&self, first: u64, count: u64, entry: L2Entry) {
        let mut map = self.map.borrow_mut();
        let mut step = 0;
        while let (Some(journal), true) = (&self.journal, step < count) {
            let cluster = first + step;
            let Some((old, run)) = map.run_at(cluster, (count - step) as usize) else {
                panic!("the leaf of cluster {cluster} was evicted while it was locked");
            };
            journal.append(Record { cluster, count: run as u64, old, new: entry.advanced(self.shape, step) });
            step += run as u64;
        }
        map.set_run(first, count as usize, entry);
    }

    /// Frees the host clusters of a run, which does not use them any more.
    pub(crate) fn free_host(&self, first: L2Entry, run: u64) {
        let bits = self.shape.cluster_bits;
        let freed = if first.is_compressed() {
            let at = first.compressed_location(self.shape);
            let last = (at.offset + at.len - 1) >> bits;
            FreedClusters { first: at.offset >> bits, count: last + 1 - (at.offset >> bits) }
        } else {
            match first.host(self.shape) {
                Some(host) if self.data_file.is_none() => FreedClusters { first: host >> bits, count: run },
                _ => return,
            }
        };
        if let Some(cluster) = self.metadata_in(&(freed.first..freed.first + freed.count)) {
            tracing::error!(
                "{}: cluster {cluster} held both guest data and metadata: the image is corrupt; run `larder disk check`",
                self.name
            );
            return;
        }
        self.freed.borrow_mut().push(freed);
    }
}
