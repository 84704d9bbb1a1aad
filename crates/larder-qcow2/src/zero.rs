//! Discards and zeroes: whole clusters are unmapped or marked as zeros; partial clusters at the ends of zeroes are
//! written.
//!
//! A discarded cluster reads as zeros. Over a backing file that takes a zero cluster, which version 2 does not have;
//! such an image keeps the content.

use larder_block::event_loop::WorkSlice;
use larder_block::range_lock::RangeLockMode;
use larder_block::{AlignedBuf, ByteOffset, ByteRange, Failure, IoError, IoResult, Operation, WriteBuf, ZeroFlags};

use crate::device::{Piece, Qcow2};
use crate::entry::{ALL_ALLOCATED, ClusterContent, L2Entry};

/// The maximum number of leaves of the map that are processed before other tasks run.
const LEAVES_PER_SLICE: u64 = 8;

/// The number of empty L1 entries or single clusters that cost as much as a leaf.
const STEPS_PER_LEAF: u64 = 128;

/// Divides the work on a long range into slices: a step is a cluster or an L1 entry, and a leaf is
/// [`STEPS_PER_LEAF`].
fn work_slice() -> WorkSlice {
    WorkSlice::new(LEAVES_PER_SLICE * STEPS_PER_LEAF)
}

/// The requested change of a range of whole clusters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ZeroMode {
    Discard,
    /// Zeros; the space may be deallocated.
    Unmap,
    /// Zeros; allocated space stays allocated.
    KeepAllocated,
}

impl Qcow2 {
    /// Returns the whole clusters in `range`; a cluster that the disk's end cuts off counts as whole.
    fn whole_clusters(&self, range: ByteRange) -> ByteRange {
        let unit = self.shape.cluster_len();
        let disk_end = ByteOffset::ZERO + self.geometry.get().size;
        let end = match range.end() == disk_end {
            true => disk_end,
            false => range.end().align_down(unit),
        };
        let start = range.start.align_up(unit).min(end);
        ByteRange::between(start, end)
    }

    pub(crate) async fn discard_steps(&self, range: ByteRange) -> IoResult {
        let failed = |error: IoError| self.error(Operation::Discard, range, error.failure());
        if range.is_empty() {
            return Ok(());
        }
        self.before_change().await.map_err(failed)?;
        if self.data_file.is_some() {
            let _in_flight = self.in_flight.count_until_drop();
            return self.discard_data(range).await.map_err(failed);
        }
        // A discard may need a new L2 table.
        let discard = async || {
            let _in_flight = self.in_flight.count_until_drop();
            let whole = self.whole_clusters(range);
            self.unmap(whole, ZeroMode::Discard).await.map(drop)
        };
        self.retry_on_no_space(discard).await.map_err(failed)?;
        self.after_change(false).await.map_err(failed)
    }

    /// Discards data in an external data file, in which the guest's clusters keep their offsets.
    async fn discard_data(&self, range: ByteRange) -> IoResult {
        let mut slice = work_slice();
        let mut rest = range;
        while !rest.is_empty() {
            slice.complete_steps(1).await;
            let piece = self.find(rest).await?;
            let size = self.data().geometry().size.get();
            let len = piece.len.min(size.saturating_sub(piece.host));
            if piece.content == ClusterContent::Data && len > 0 {
                self.data().discard(ByteRange::new(piece.host, len)).await?;
            }
            rest = ByteRange::between(rest.start + larder_block::ByteLen::new(piece.len), rest.end());
        }
        Ok(())
    }

    pub(crate) async fn zero_steps(&self, range: ByteRange, flags: ZeroFlags) -> IoResult {
        let failed = |error: IoError| self.error(Operation::WriteZeroes, range, error.failure());
        if flags.fast_only && (self.whole_clusters(range).is_empty() || self.shape.version < 3) {
            return Err(self.error(Operation::WriteZeroes, range, Failure::Unsupported));
        }
        self.before_change().await.map_err(failed)?;
        let zero = async || {
            let _in_flight = self.in_flight.count_until_drop();
            // The disk does not grow over these clusters while this request is counted.
            let whole = self.whole_clusters(range);
            let mode = if flags.unmap { ZeroMode::Unmap } else { ZeroMode::KeepAllocated };
            let to_write = self.unmap(whole, mode).await?;
            let (head, tail) = match whole.is_empty() {
                true => (range, ByteRange::default()),
                false => (ByteRange::between(range.start, whole.start), ByteRange::between(whole.end(), range.end())),
            };
            for edge in [head, tail].into_iter().chain(to_write) {
                self.write_zero_data(edge).await?;
            }
            Ok(())
        };
        self.retry_on_no_space(zero).await.map_err(failed)?;
        self.after_change(flags.fua).await.map_err(failed)
    }

    /// Writes zeros as data where the range does not read as zeros already.
    async fn write_zero_data(&self, range: ByteRange) -> IoResult {
        let unit = self.shape.cluster_len();
        let mut zeros: Option<AlignedBuf> = None;
        let mut slice = work_slice();
        let mut rest = range;
        while !rest.is_empty() {
            slice.complete_steps(1).await;
            let cluster_end = ByteOffset::new(rest.start.align_down(unit).get() + unit);
            let part = rest.intersection(ByteRange::between(rest.start, cluster_end));
            if !self.reads_as_zeros(part).await? {
                let zeros = zeros.get_or_insert_with(|| AlignedBuf::zeroed(unit as usize));
                let zeros = &zeros[..part.len.as_usize()];
                self.write_pieces(part, WriteBuf::new(zeros)).await?;
            }
            rest = ByteRange::between(part.end(), rest.end());
        }
        Ok(())
    }

    /// Unmaps whole clusters, or marks them as zeros. Returns the parts that must be written, because the mapping
    /// cannot express them.
    async fn unmap(&self, range: ByteRange, mode: ZeroMode) -> IoResult<Vec<ByteRange>> {
        let shape = self.shape;
        let mut to_write = Vec::new();
        let mut slice = work_slice();
        let mut rest = range;
        while !rest.is_empty() {
            if let Some(unmapped) = self.range_without_table(rest).filter(|part| self.backed_part(*part).is_empty()) {
                rest = ByteRange::between(unmapped.end(), rest.end());
                slice.complete_steps(1).await;
                continue;
            }
            slice.complete_steps(STEPS_PER_LEAF).await;
            let leaf_span = shape.cluster_len() << shape.leaf_bits();
            let leaf_end = ByteOffset::new(rest.start.align_down(leaf_span).get() + leaf_span);
            let part = rest.intersection(ByteRange::between(rest.start, leaf_end));
            let locked_range = part.widened(shape.cluster_len());
            let _lock = self.mapping_locks.lock(locked_range, RangeLockMode::Exclusive).await;
            self.unmap_in_leaf(part, mode, &mut to_write).await?;
            rest = ByteRange::between(part.end(), rest.end());
        }
        Ok(to_write)
    }

    async fn unmap_in_leaf(&self, range: ByteRange, mode: ZeroMode, to_write: &mut Vec<ByteRange>) -> IoResult {
        let shape = self.shape;
        if !self.needs_change(range, mode).await? {
            return Ok(());
        }
        let _reservation = self.reserve_journal(clusters_of(shape, range)).await?;
        self.make_table_writable(range.start.get() / shape.table_span()).await?;
        let mut in_place = Vec::new();
        let mut rest = range;
        // There is no await from here on, so the leaf is not evicted.
        self.find(rest).await?;
        while !rest.is_empty() {
            let (piece, at) = self.first_run(rest);
            match self.change_for(piece, at, mode) {
                RunChange::Nothing => {}
                RunChange::To(entry) => {
                    let (first, count) = (at.start.get() >> shape.cluster_bits, clusters_of(shape, at));
                    if entry.host(shape).is_none() {
                        self.free_host(piece.entry, count);
                    }
                    self.set_entries(first, count, entry);
                }
                RunChange::InPlace => in_place.push(ByteRange::new(piece.host, at.len.get())),
                RunChange::Write => to_write.push(at),
            }
            rest = ByteRange::between(at.end(), rest.end());
        }
        for host in in_place {
            self.zero_in_place(host, mode).await?;
        }
        Ok(())
    }

    async fn zero_in_place(&self, host: ByteRange, mode: ZeroMode) -> IoResult {
        let data = self.data();
        let in_file = host.intersection(ByteOffset::ZERO.range(data.geometry().size));
        let flags = ZeroFlags { unmap: mode == ZeroMode::Unmap, ..ZeroFlags::default() };
        data.write_zeroes(in_file, flags).await
    }

    async fn needs_change(&self, range: ByteRange, mode: ZeroMode) -> IoResult<bool> {
        self.find(range).await?;
        let mut rest = range;
        while !rest.is_empty() {
            let (piece, at) = self.first_run(rest);
            if self.change_for(piece, at, mode) != RunChange::Nothing {
                return Ok(true);
            }
            rest = ByteRange::between(at.end(), rest.end());
        }
        Ok(false)
    }

    /// Returns the run of clusters at the beginning of `range`, which begins at a cluster, in a loaded leaf.
    fn first_run(&self, range: ByteRange) -> (Piece, ByteRange) {
        let shape = self.shape;
        let cluster = range.start.get() >> shape.cluster_bits;
        let found = self.map.borrow_mut().run_at(cluster, clusters_of(shape, range) as usize);
        let Some((entry, count)) = found else {
            panic!("the leaf of cluster {cluster} was evicted while it was in use");
        };
        let at = range.intersection(ByteRange::new(range.start.get(), (count as u64) << shape.cluster_bits));
        let piece = Piece {
            content: entry.content(shape, 0),
            host: entry.host(shape).unwrap_or(0),
            len: at.len.get(),
            copied: entry.is_copied(),
            entry,
        };
        (piece, at)
    }

    /// Returns the change of a run of clusters.
    fn change_for(&self, piece: Piece, at: ByteRange, mode: ZeroMode) -> RunChange {
        let (shape, entry) = (self.shape, piece.entry);
        let corrupt =
            (0..shape.subclusters_per_cluster()).any(|part| entry.content(shape, part) == ClusterContent::Corrupt);
        if corrupt {
            // A corrupt entry is kept, and reported when it is read.
            return match mode {
                ZeroMode::Discard => RunChange::Nothing,
                ZeroMode::Unmap | ZeroMode::KeepAllocated => RunChange::Write,
            };
        }
        let backed = !self.backed_part(at).is_empty();
        let has_host = entry.host(shape).is_some();
        let all_zero = match shape.extended && !entry.is_compressed() {
            true => {
                let zero = (entry.bitmap >> 32) as u32;
                let allocated = (entry.bitmap & ALL_ALLOCATED) as u32;
                allocated == 0 && (zero == u32::MAX || !backed)
            }
            false => piece.content == ClusterContent::Zero || (piece.content == ClusterContent::Unallocated && !backed),
        };
        // After zeroing in place, an unallocated subcluster would still read from the backing file.
        let zeroed = match piece.content == ClusterContent::Data && (!shape.extended || entry.bitmap == ALL_ALLOCATED) {
            true => RunChange::InPlace,
            false => RunChange::Write,
        };
        if shape.data_file {
            return if all_zero { RunChange::Nothing } else { zeroed };
        }
        if all_zero && (!has_host || mode == ZeroMode::KeepAllocated) {
            return RunChange::Nothing;
        }
        let unmapped_entry = match (backed, shape.version) {
            (false, _) => L2Entry::UNALLOCATED,
            (true, 3..) => L2Entry::zero(shape),
            (true, _) if mode == ZeroMode::Discard => return RunChange::Nothing,
            (true, _) => return RunChange::Write,
        };
        if mode != ZeroMode::KeepAllocated || !has_host || !piece.copied {
            return RunChange::To(unmapped_entry);
        }
        // A zero flag on a host cluster would hide in-flight writes to it, until the next write removes the flag.
        zeroed
    }
}

/// The change of a run of clusters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum RunChange {
    Nothing,
    /// The entries become a run that begins with this one.
    To(L2Entry),
    /// The host clusters are zeroed.
    InPlace,
    /// Zeros are written.
    Write,
}

fn clusters_of(shape: crate::shape::Shape, range: ByteRange) -> u64 {
    range.len.get().div_ceil(shape.cluster_len())
}
