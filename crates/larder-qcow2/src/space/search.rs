//! The search for free clusters: the next window, and runs of clusters.
//!
//! A search reads each slice of refcounts once, several at a time, and remembers the full ones, so it can be complete
//! with one bit for each slice. Where the file can grow, a search that has read [`SEARCH_SLICES_MAX`] slices without
//! success uses space at the file's end instead, and the next search continues it. A write fails only after a
//! complete search.

use std::ops::Range;
use std::rc::Weak;

use larder_block::backend::file::CONTAINER_UNIT;
use larder_block::event_loop::{WorkSlice, yield_now};
use larder_block::range_lock::RangeLockMode;
use larder_block::{AlignedBuf, ByteLen, ByteRange, Failure, IoError, IoResult, Operation, ReadBuf, join};
use rustix::io::Errno;

use super::STEPS_PER_SLICE;
use crate::device::Qcow2;
use crate::entry::OFFSET;
use crate::read::Ios;
use crate::refcount::{FreeSpace as Found, SliceIndex, SliceLookup};

/// The number of slices of refcounts that a search reads before it uses the end of the file instead, if the file can
/// grow: 32 MiB, for 1 TiB of clusters of 64 KiB.
const SEARCH_SLICES_MAX: usize = 8192;

/// The maximum number of slices that are read at the same time. A search begins with one and doubles.
const SLICE_READS_IN_FLIGHT_MAX: usize = 128;

/// The maximum number of unreadable slices that a search skips: two blocks of 64 KiB. A failing disk is slow, so
/// there are no more; the next search continues after them.
const UNREADABLE_SLICES_MAX: usize = 32;

/// The maximum growth of the file in one step, in bytes. Below it, a step is a quarter of the file's length.
const GROWTH_BYTES_MAX: u64 = 16 << 20;

/// The maximum growth of the file, in bytes, while a search is unfinished: the search may yet find free clusters
/// inside the file.
const GROWTH_UNFINISHED_BYTES_MAX: u64 = 1 << 20;

/// The result of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SearchResult {
    /// This cluster is free, or has no refcount block yet.
    Found(u64),
    /// No cluster is free.
    NoneFree,
    /// The search has reached its limit of slices, and no cluster before the given one is free.
    Unfinished(u64),
}

/// The limit of a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum WindowLimit {
    /// The file's end, if the window begins before it: the search may find other free clusters in the file, which
    /// need not grow before that.
    FileEnd,
    /// A part that is added to the file.
    AddedPart,
}

/// The remaining effort of a search: the slices that it may still read, and the slices of its next read.
struct SearchBudget {
    slices_left: usize,
    slices_per_read: usize,
    /// The number of unreadable slices that the search may still skip.
    unreadable_left: usize,
}

/// The result of reading slices for a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SliceRead {
    /// Some were read; or none, and the first one is to be read alone.
    Continue,
    /// The first one cannot be read: the search continues at this cluster.
    SkipTo(u64),
}

impl SearchBudget {
    fn of(slices: usize) -> Self {
        Self { slices_left: slices, slices_per_read: 1, unreadable_left: UNREADABLE_SLICES_MAX }
    }

    fn is_exhausted(&self) -> bool {
        self.slices_left == 0 || self.unreadable_left == 0
    }
}

impl Qcow2 {
    /// Returns the number of whole clusters of the file.
    pub(super) fn file_clusters(&self) -> u64 {
        self.file.geometry().size.get() >> self.shape.cluster_bits
    }

    /// Finds the next free clusters and extends the file to cover them.
    pub(super) async fn open_window(&self) -> IoResult {
        self.detect_growth();
        self.grow_refcount_table_to_file().await?;
        match self.open_window_inside(SEARCH_SLICES_MAX).await? {
            SearchResult::Found(_) => Ok(()),
            SearchResult::NoneFree => {
                let cursor = self.space.borrow().cursor;
                self.open_window_at_end().await?;
                let mut space = self.space.borrow_mut();
                let next = space.window.end;
                space.advance(cursor, next);
                Ok(())
            }
            SearchResult::Unfinished(_) => match self.open_window_at_end().await {
                Err(error) if error.failure() == Failure::NoSpace => match self.open_window_inside(usize::MAX).await? {
                    SearchResult::Found(_) => Ok(()),
                    _ => Err(error),
                },
                result => result,
            },
        }
    }

    /// Opens a window with the first free clusters inside the file. The error `NoSpace` means that the file system is
    /// full: there are free clusters, and no space for them.
    async fn open_window_inside(&self, slices: usize) -> IoResult<SearchResult> {
        let mut budget = SearchBudget::of(slices);
        let limit = self.file_clusters();
        let hint = self.space.borrow().cursor;
        let cursor = hint.min(limit);
        let mut full_error = None;
        // The cursor is only a hint; the set of full slices makes the search complete.
        for range in [cursor..limit, 0..cursor] {
            let found = self.search(range, &mut budget).await?;
            self.space.borrow_mut().is_unfinished = matches!(found, SearchResult::Unfinished(_));
            match found {
                SearchResult::NoneFree => continue,
                SearchResult::Unfinished(at) => {
                    self.space.borrow_mut().advance(hint, at);
                    return Ok(found);
                }
                SearchResult::Found(at) => match self.open_window_at(at, WindowLimit::FileEnd).await {
                    Err(error) if error.failure() == Failure::NoSpace => full_error = Some(error),
                    result => {
                        result?;
                        let mut space = self.space.borrow_mut();
                        let next = space.window.end;
                        space.advance(hint, next);
                        return Ok(found);
                    }
                },
            }
        }
        self.space.borrow_mut().advance(hint, limit);
        full_error.map_or(Ok(SearchResult::NoneFree), Err)
    }

    /// Searches for a free cluster in a range.
    async fn search(&self, range: Range<u64>, budget: &mut SearchBudget) -> IoResult<SearchResult> {
        let mut cursor = range.start;
        while cursor < range.end {
            let found = self.refcounts.borrow_mut().find_free(cursor);
            match found {
                SliceLookup::NotLoaded(..) if budget.is_exhausted() => return Ok(SearchResult::Unfinished(cursor)),
                SliceLookup::NotLoaded(slice, _) => {
                    if let SliceRead::SkipTo(next) = self.read_slices(slice, range.end, budget).await? {
                        cursor = next;
                    }
                }
                SliceLookup::Value(Found::Full(next)) => cursor = next,
                SliceLookup::Value(Found::Free(first, _)) if first >= range.end => break,
                SliceLookup::Value(Found::Free(first, _)) => return Ok(SearchResult::Found(first)),
                SliceLookup::Value(Found::NoBlock) => return Ok(SearchResult::Found(cursor)),
            }
        }
        Ok(SearchResult::NoneFree)
    }

    /// Reads slices from `slice` on that a search up to the cluster `limit` needs.
    async fn read_slices(&self, slice: SliceIndex, limit: u64, budget: &mut SearchBudget) -> IoResult<SliceRead> {
        let limit = limit.div_ceil(1 << self.shape.refcount_slice_bits());
        let (mut unread, drops) = {
            let refcounts = self.refcounts.borrow();
            let slices_max = budget.slices_per_read.min(budget.slices_left).max(1);
            (refcounts.unread(slice, limit, slices_max), refcounts.drop_count())
        };
        // The first slice with an invalid offset fails when it is needed.
        let is_valid = |(slice, offset): &(SliceIndex, u64)| self.slice_at(*slice, *offset).is_some();
        let valid = unread.iter().take_while(|found| is_valid(found)).count().max(1);
        unread.truncate(valid);
        let ranges: Vec<ByteRange> =
            unread.iter().map(|(slice, offset)| self.checked_slice_at(*slice, *offset)).collect::<IoResult<_>>()?;
        let mut bytes: Vec<AlignedBuf> = ranges.iter().map(|range| AlignedBuf::zeroed(range.len.as_usize())).collect();
        let reads: Ios<'_> = ranges
            .iter()
            .zip(&mut bytes)
            .map(|(range, bytes)| self.file.read(range.start, ReadBuf::new(bytes)))
            .collect();
        if let Err(error) = join(reads).await {
            if unread.len() > 1 {
                budget.slices_per_read = 1;
                return Ok(SliceRead::Continue);
            }
            return self.skip_unreadable(slice, error, budget);
        }
        let mut refcounts = self.refcounts.borrow_mut();
        for ((slice, _), bytes) in unread.iter().zip(&bytes) {
            refcounts.load_for_search(*slice, bytes, drops);
        }
        budget.slices_left = budget.slices_left.saturating_sub(unread.len());
        budget.slices_per_read = (budget.slices_per_read * 2).min(SLICE_READS_IN_FLIGHT_MAX);
        Ok(SliceRead::Continue)
    }

    /// Skips a slice that cannot be read, as if it had no free cluster, so that a bad sector does not fail requests
    /// that need no data from it. A corrupt image, or an unreachable one, is an error.
    fn skip_unreadable(&self, slice: SliceIndex, error: IoError, budget: &mut SearchBudget) -> IoResult<SliceRead> {
        if !matches!(error.failure(), Failure::Os(_)) {
            return Err(error);
        }
        let mut space = self.space.borrow_mut();
        if !space.unreadable.contains(slice) {
            space.unreadable.insert(slice);
            tracing::error!("{error}; clusters whose refcounts are there are not allocated");
        }
        budget.unreadable_left -= 1;
        Ok(SliceRead::SkipTo((slice + 1) << self.shape.refcount_slice_bits()))
    }

    /// Returns the location of a slice of refcounts, if it is in the file.
    fn slice_at(&self, slice: SliceIndex, offset: u64) -> Option<ByteRange> {
        let at = ByteRange::new(offset, self.shape.slice_len());
        let in_cluster = self.shape.cluster_len() - 1;
        let is_aligned = offset & in_cluster == (slice * self.shape.slice_len()) & in_cluster;
        let size = self.file.geometry().size;
        let is_inside = at.checked_end().is_some_and(|end| end.get() <= size.get());
        (is_aligned && is_inside).then_some(at)
    }

    fn checked_slice_at(&self, slice: SliceIndex, offset: u64) -> IoResult<ByteRange> {
        self.slice_at(slice, offset).ok_or_else(|| {
            tracing::error!(
                "{}: the refcount table points to {offset:#x}, which is outside the file or not aligned; run `larder disk check`",
                self.name
            );
            let at = ByteRange::new(offset, self.shape.slice_len());
            self.error(Operation::Read, at, Failure::Invalid)
        })
    }

    /// Reads a slice of refcounts.
    pub(super) async fn load_refcounts(&self, slice: SliceIndex, offset: u64) -> IoResult {
        let at = self.checked_slice_at(slice, offset)?;
        let drops = self.refcounts.borrow().drop_count();
        let mut bytes = AlignedBuf::zeroed(at.len.as_usize());
        self.file.read(at.start, ReadBuf::new(&mut bytes)).await?;
        self.refcounts.borrow_mut().load(slice, &bytes, drops);
        Ok(())
    }

    async fn open_window_at_end(&self) -> IoResult {
        let end = self.space.borrow().unwritten_from;
        // Checked before a refcount block is created for space that the file cannot get.
        self.extend_to_cover(end, 1).await?;
        self.open_window_at(end, WindowLimit::AddedPart).await
    }

    /// Opens a window with the first free clusters from `from` on.
    async fn open_window_at(&self, from: u64, limit: WindowLimit) -> IoResult {
        let mut from = from;
        loop {
            let found = self.refcounts.borrow_mut().find_free(from);
            match found {
                SliceLookup::NotLoaded(slice, offset) => self.load_refcounts(slice, offset).await?,
                SliceLookup::Value(Found::Full(next)) => from = next,
                SliceLookup::Value(Found::NoBlock) => self.add_refcount_block(self.block_of(from), from).await?,
                SliceLookup::Value(Found::Free(first, count)) => {
                    if !self.refcounts.borrow().has_durable_block(first) {
                        // An earlier write of it has failed.
                        self.write_refcounts().await?;
                    }
                    self.allocate_refcount_slice(first).await?;
                    let count = match limit {
                        WindowLimit::FileEnd if first < self.file_clusters() => {
                            self.detect_growth();
                            count.min(self.file_clusters() - first)
                        }
                        _ => self.extend_to_cover(first, count).await?,
                    };
                    self.check_free(first..first + count)?;
                    // A commit may have freed clusters meanwhile, but taken none: only this function opens windows.
                    self.space.borrow_mut().window = first..first + count;
                    return Ok(());
                }
            }
        }
    }

    /// Finds `count` contiguous free clusters inside the file, in the part that the refcount table counts. The window
    /// must be empty.
    pub(super) async fn find_run(&self, count: u64) -> IoResult<Option<u64>> {
        let mut budget = SearchBudget::of(usize::MAX);
        let counted = self.refcounts.borrow().counted_clusters();
        let limit = self.file_clusters().min(counted);
        let (mut run, mut cursor) = (0..0, 0);
        let mut slice = WorkSlice::new(STEPS_PER_SLICE);
        while cursor < limit {
            slice.complete_steps(1).await;
            let found = self.refcounts.borrow_mut().find_free(cursor);
            match found {
                SliceLookup::NotLoaded(..) if budget.is_exhausted() => return Ok(None),
                SliceLookup::NotLoaded(slice, _) => {
                    if let SliceRead::SkipTo(next) = self.read_slices(slice, limit, &mut budget).await? {
                        cursor = next;
                    }
                }
                SliceLookup::Value(Found::Full(next)) => cursor = next,
                SliceLookup::Value(Found::Free(first, free)) => {
                    if run.end != first {
                        run = first..first;
                    }
                    cursor = (first + free).min(limit);
                    run.end = cursor.max(run.start);
                    if run.end - run.start >= count {
                        self.check_free(run.start..run.start + count)?;
                        return Ok(Some(run.start));
                    }
                }
                SliceLookup::Value(Found::NoBlock) => {
                    // The block is placed at the start of the run, because a run may be longer than a block's part of
                    // the image.
                    let at = if run.end == cursor && !run.is_empty() { run.start } else { cursor };
                    self.create_refcount_block(self.block_of(cursor), at).await?;
                    run = at + 1..cursor.max(at + 1);
                }
            }
        }
        Ok(None)
    }

    /// Allocates space in the file for the slice with a cluster's refcount, whose block exists.
    pub(super) async fn allocate_refcount_slice(&self, cluster: u64) -> IoResult {
        let slice = cluster >> self.shape.refcount_slice_bits();
        if self.space.borrow().allocated_slices.contains(slice) {
            return Ok(());
        }
        let offset = self.refcounts.borrow().slice_offset(slice);
        if let Some(offset) = offset {
            let at = ByteRange::new(offset, self.shape.slice_len());
            self.file.allocate(at).await?;
        }
        self.space.borrow_mut().allocated_slices.insert(slice);
        Ok(())
    }

    /// Extends the file to cover up to `count` clusters from `first` on. Returns the number of clusters covered.
    pub(super) async fn extend_to_cover(&self, first: u64, count: u64) -> IoResult<u64> {
        // The clusters may lie in a part that was added since the search began.
        self.detect_growth();
        let bits = self.shape.cluster_bits;
        let size = self.file.geometry().size.get();
        if first + count > OFFSET >> bits {
            return Err(self.no_space());
        }
        let needed = (first + count) << bits;
        if needed <= size {
            return Ok(count);
        }
        // A window that lies only partially in the file is enough, if it is not empty.
        let growth_max = match self.space.borrow().is_unfinished {
            true => GROWTH_UNFINISHED_BYTES_MAX,
            false => GROWTH_BYTES_MAX,
        };
        let step = (size / 4).clamp(1 << bits, growth_max.max(1 << bits));
        let at_least = (first + 1) << bits;
        let wanted = needed.min(at_least.max(size + step)) >> bits << bits;
        let grown = self.extend_file(wanted).await;
        let covered = self.file_clusters().saturating_sub(first).min(count);
        match grown {
            _ if covered > 0 => Ok(covered),
            Err(error) if error.failure() != Failure::NoSpace => Err(error),
            _ => Err(self.no_space()),
        }
    }

    /// Extends the file to at least `size` bytes, with an end that can be moved concurrently with writes.
    pub(super) async fn extend_file(&self, size: u64) -> IoResult {
        self.detect_growth();
        if size <= self.file.geometry().size.get() {
            return Ok(());
        }
        let size = ByteLen::new(size.next_multiple_of(CONTAINER_UNIT));
        let grown = self.file.grow(size).await;
        if grown.is_ok() {
            let mut space = self.space.borrow_mut();
            space.known_size = space.known_size.max(size.get());
        }
        // Another program may have extended the file meanwhile.
        self.detect_growth();
        match grown {
            // A file system's maximum file size, or the user's limit, is handled like a full device: clusters inside
            // the file can still be used.
            Err(error) if error.failure() == Failure::Os(Errno::FBIG.raw_os_error()) => Err(self.no_space()),
            grown => grown,
        }
    }

    /// Detects a file that another program has extended, like a logical volume: the new part may have any content.
    fn detect_growth(&self) {
        let size = self.file.geometry().size.get();
        let mut space = self.space.borrow_mut();
        if size > space.known_size {
            space.known_size = size;
            space.initial_clusters = size.div_ceil(self.shape.cluster_len());
            let end = space.initial_clusters;
            space.mark_written_before(end);
        }
    }

    /// Searches a few slices for the first free cluster. Returns true if the search is complete.
    async fn search_step(&self) -> IoResult<bool> {
        let _lock = self.allocation_lock.lock(ByteRange::new(0, 1), RangeLockMode::Exclusive).await;
        if !self.space.borrow().window.is_empty() {
            return Ok(true);
        }
        let cursor = self.space.borrow().cursor;
        let mut budget =
            SearchBudget { slices_per_read: SLICE_READS_IN_FLIGHT_MAX, ..SearchBudget::of(SLICE_READS_IN_FLIGHT_MAX) };
        let found = self.search(cursor..self.file_clusters(), &mut budget).await?;
        if let SearchResult::Unfinished(at) = found {
            self.space.borrow_mut().advance(cursor, at);
        }
        Ok(!matches!(found, SearchResult::Unfinished(_)))
    }
}

/// Searches for the first free cluster before a request needs one.
pub(crate) async fn search_ahead(image: Weak<Qcow2>) {
    loop {
        yield_now().await;
        let Some(image) = image.upgrade() else { return };
        match image.search_step().await {
            Ok(false) => {}
            // A request that needs space reports the error.
            Ok(true) | Err(_) => return,
        }
    }
}
