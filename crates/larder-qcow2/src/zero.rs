//! Discards and zeroes: whole clusters are unmapped or marked as zeros; partial clusters at the ends of zeroes are
//! written.
//!
//! A discarded cluster reads as zeros. Over a backing file that takes a zero cluster, which version 2 does not have;
//! such an image keeps the content.

use larder_block::event_loop::WorkSlice;
use larder_block::range_lock::RangeLockMode;
use larder_block::{AlignedBuf, ByteOffset, ByteRange, Failure, IoError, IoResult, Operation, WriteBuf, ZeroFlags};

use crate::device::{Piece, Qcow2};
use crate::entry::{ALL_ALLOCATED, Content, Entry};

/// The maximum number of leaves of the map that are processed before other tasks run.
const LEAVES_PER_SLICE: u64 = 8;

/// The number of empty L1 entries or single clusters that cost as much as a leaf.
const SHORT_STEPS_PER_LEAF: u64 = 128;

/// Divides the work on a long range into slices: a step is a cluster or an L1 entry, and a leaf is
/// [`SHORT_STEPS_PER_LEAF`].
fn work_slice() -> WorkSlice {
    WorkSlice::new(LEAVES_PER_SLICE * SHORT_STEPS_PER_LEAF)
}

/// The requested change of a range of whole clusters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Want {
    Discard,
    /// Zeros; the space may be deallocated.
    Unmap,
    /// Zeros; allocated space stays allocated.
    Keep,
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
            let _counted = self.in_flight.counted();
            return self.discard_data(range).await.map_err(failed);
        }
        // A discard may need a new L2 table.
        let discard = async || {
            let _counted = self.in_flight.counted();
            let whole = self.whole_clusters(range);
            self.unmap(whole, Want::Discard).await.map(drop)
        };
        self.with_room(discard).await.map_err(failed)?;
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
            if piece.content == Content::Data && len > 0 {
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
            let _counted = self.in_flight.counted();
            // The disk does not grow over these clusters while this request is counted.
            let whole = self.whole_clusters(range);
            let want = if flags.unmap { Want::Unmap } else { Want::Keep };
            let left = self.unmap(whole, want).await?;
            let (head, tail) = match whole.is_empty() {
                true => (range, ByteRange::default()),
                false => (
                    ByteRange::between(range.start, whole.start),
                    ByteRange::between(whole.end(), range.end()),
                ),
            };
            for edge in [head, tail].into_iter().chain(left) {
                self.write_zero_data(edge).await?;
            }
            Ok(())
        };
        self.with_room(zero).await.map_err(failed)?;
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
    async fn unmap(&self, range: ByteRange, want: Want) -> IoResult<Vec<ByteRange>> {
        let shape = self.shape;
        let mut left = Vec::new();
        let mut slice = work_slice();
        let mut rest = range;
        while !rest.is_empty() {
            if let Some(unmapped) = self.without_table(rest).filter(|part| self.backed(*part).is_empty()) {
                rest = ByteRange::between(unmapped.end(), rest.end());
                slice.complete_steps(1).await;
                continue;
            }
            slice.complete_steps(SHORT_STEPS_PER_LEAF).await;
            let leaf_span = shape.cluster_len() << shape.leaf_bits();
            let leaf_end = ByteOffset::new(rest.start.align_down(leaf_span).get() + leaf_span);
            let part = rest.intersection(ByteRange::between(rest.start, leaf_end));
            let held = part.widened(shape.cluster_len());
            let _held = self.mapping.lock(held, RangeLockMode::Exclusive).await;
            self.unmap_in_leaf(part, want, &mut left).await?;
            rest = ByteRange::between(part.end(), rest.end());
        }
        Ok(left)
    }

    async fn unmap_in_leaf(&self, range: ByteRange, want: Want, left: &mut Vec<ByteRange>) -> IoResult {
        let shape = self.shape;
        if !self.changes_anything(range, want).await? {
            return Ok(());
        }
        let _room = self.journal_room(clusters_of(shape, range)).await?;
        self.own_table(range.start.get() / shape.table_span()).await?;
        let mut in_place = Vec::new();
        let mut rest = range;
        // There is no await from here on, so the leaf is not evicted.
        self.find(rest).await?;
        while !rest.is_empty() {
            let (piece, at) = self.run(rest);
            match self.unmapped(piece, at, want) {
                Change::Nothing => {}
                Change::To(entry) => {
                    let (first, count) = (at.start.get() >> shape.cluster_bits, clusters_of(shape, at));
                    if entry.host(shape).is_none() {
                        self.free_host(piece.entry, count);
                    }
                    self.set_entries(first, count, entry);
                }
                Change::InPlace => in_place.push(ByteRange::new(piece.host, at.len.get())),
                Change::Write => left.push(at),
            }
            rest = ByteRange::between(at.end(), rest.end());
        }
        for host in in_place {
            self.zero_in_place(host, want).await?;
        }
        Ok(())
    }

    async fn zero_in_place(&self, host: ByteRange, want: Want) -> IoResult {
        let data = self.data();
        let there = host.intersection(ByteOffset::ZERO.range(data.geometry().size));
        let flags = ZeroFlags {
            unmap: want == Want::Unmap,
            ..ZeroFlags::default()
        };
        data.write_zeroes(there, flags).await
    }

    async fn changes_anything(&self, range: ByteRange, want: Want) -> IoResult<bool> {
        self.find(range).await?;
        let mut rest = range;
        while !rest.is_empty() {
            let (piece, at) = self.run(rest);
            if self.unmapped(piece, at, want) != Change::Nothing {
                return Ok(true);
            }
            rest = ByteRange::between(at.end(), rest.end());
        }
        Ok(false)
    }

    /// Returns the run of clusters at the beginning of `range`, which begins at a cluster, in a loaded leaf.
    fn run(&self, range: ByteRange) -> (Piece, ByteRange) {
        let shape = self.shape;
        let cluster = range.start.get() >> shape.cluster_bits;
        let found = self
            .map
            .borrow_mut()
            .run_at(cluster, clusters_of(shape, range) as usize);
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
    fn unmapped(&self, piece: Piece, at: ByteRange, want: Want) -> Change {
        let (shape, entry) = (self.shape, piece.entry);
        let corrupt = (0..shape.parts()).any(|part| entry.content(shape, part) == Content::Corrupt);
        if corrupt {
            // A corrupt entry is kept, and reported when it is read.
            return match want {
                Want::Discard => Change::Nothing,
                Want::Unmap | Want::Keep => Change::Write,
            };
        }
        let backed = !self.backed(at).is_empty();
        let has_host = entry.host(shape).is_some();
        let all_zero = match shape.extended && !entry.is_compressed() {
            true => {
                let zero = (entry.bitmap >> 32) as u32;
                let allocated = (entry.bitmap & ALL_ALLOCATED) as u32;
                allocated == 0 && (zero == u32::MAX || !backed)
            }
            false => piece.content == Content::Zero || (piece.content == Content::Unallocated && !backed),
        };
        // After zeroing in place, an unallocated subcluster would still read from the backing file.
        let zeroed = match piece.content == Content::Data && (!shape.extended || entry.bitmap == ALL_ALLOCATED) {
            true => Change::InPlace,
            false => Change::Write,
        };
        if shape.data_file {
            return if all_zero { Change::Nothing } else { zeroed };
        }
        if all_zero && (!has_host || want == Want::Keep) {
            return Change::Nothing;
        }
        let gone = match (backed, shape.version) {
            (false, _) => Entry::UNALLOCATED,
            (true, 3..) => Entry::zero(shape),
            (true, _) if want == Want::Discard => return Change::Nothing,
            (true, _) => return Change::Write,
        };
        if want != Want::Keep || !has_host || !piece.copied {
            return Change::To(gone);
        }
        // A zero flag on a host cluster would hide in-flight writes to it, until the next write removes the flag.
        zeroed
    }
}

/// The change of a run of clusters.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    Nothing,
    /// The entries become a run that begins with this one.
    To(Entry),
    /// The host clusters are zeroed.
    InPlace,
    /// Zeros are written.
    Write,
}

fn clusters_of(shape: crate::shape::Shape, range: ByteRange) -> u64 {
    range.len.get().div_ceil(shape.cluster_len())
}
