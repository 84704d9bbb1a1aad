//! Presents blocks of 512 bytes (or another size, down to one byte), at any address in memory, over a device with
//! larger blocks and memory alignment. Only this layer of the block path splits requests.
//!
//! - A request that fits the device below is passed on, at the cost of a check.
//! - Memory that the device does not accept is bounced through a bounded pool of buffers; long requests in pieces.
//! - A partial block is written by reading the block, changing the part, and writing the whole block back. That read
//!   bypasses a layer that caches earlier reads ([`Align::with_rmw_source`]): stale bytes, written back, would undo
//!   concurrent writes of other clients.
//!
//! Invariants:
//! - While a block is read, changed and written back, no other request changes it: a change of whole blocks waits,
//!   and one in flight is waited for. So a completed change is never undone by a neighbour's.
//! - Outside the changed part, a block is written back with its former content: a crash that keeps some of its
//!   sectors and loses others leaves the neighbours as they were, within the device's own atomicity.
//! - A buffer is taken before blocks are locked, and a request that has locked blocks waits only for the device, so
//!   there is no deadlock.
//!
//! How it fails: with the device's failure, for the whole of the request, some of whose sectors may have been
//! changed.

use std::rc::Rc;

use crate::buffer::{ReadBuf, WriteBuf};
use crate::buffer_pool::BufferPool;
use crate::device::{BlockDevice, BoxFuture, Extent, Geometry, Io, WriteFlags, ZeroFlags, check_request};
use crate::error::{Failure, IoError, IoResult, Operation};
use crate::filter::Filter;
use crate::range_lock::{RangeLockMode, RangeLocks};
use crate::units::{ByteLen, ByteOffset, ByteRange};

/// Options for the alignment.
#[derive(Clone, Copy, Debug)]
pub struct AlignOptions {
    /// The block size to present, in bytes, a power of two; if the device's is smaller, that is presented.
    pub block_size: u32,
    /// The maximum length of a bounced piece, in bytes; rounded up to two blocks of the device.
    pub bounce_len: ByteLen,
    /// The number of pieces that are bounced at the same time; more wait.
    pub bounce_count: usize,
}

impl AlignOptions {
    /// Single bytes, for NBD clients: 16 pieces of 64 KiB, allocated on demand.
    pub const BYTES: Self = Self { block_size: 1, bounce_len: ByteLen::kib(64), bounce_count: 16 };
}

impl Default for AlignOptions {
    /// Returns blocks of 512 bytes and 16 pieces of 256 KiB, allocated on demand.
    fn default() -> Self {
        Self { block_size: 512, bounce_len: ByteLen::kib(256), bounce_count: 16 }
    }
}

/// A device with small blocks over one with large ones. It keeps the promises of [`crate::device`] as far as the
/// device below does.
///
/// A request that waits for a block waits for the requests that have locked it, so a caller with several requests
/// must poll all of them concurrently.
pub struct Align {
    lower: Rc<dyn BlockDevice>,
    /// The source of the unchanged rest of a partially written block.
    rmw_source: Rc<dyn BlockDevice>,
    /// The block size presented, in bytes.
    block_size: u32,
    /// The block size below, in bytes.
    lower_block_size: u64,
    /// The memory alignment of the device below, in bytes.
    memory_alignment: usize,
    locks: RangeLocks,
    pool: BufferPool,
}

/// The next part of a request.
enum Piece {
    /// Whole blocks in memory that the device accepts.
    Direct(ByteRange),
    /// A part that goes through a bounce buffer.
    Bounced(ByteRange),
}

/// The data to write.
#[derive(Clone, Copy)]
enum Source<'a> {
    Buffer(WriteBuf<'a>),
    Zeros,
}

impl Align {
    /// Creates a layer over `lower` with smaller blocks and no memory alignment.
    ///
    /// # Panics
    /// If the block size in `options` is not a power of two.
    pub fn new(lower: Rc<dyn BlockDevice>, options: AlignOptions) -> Self {
        let rmw_source = Rc::clone(&lower);
        Self::with_rmw_source(lower, rmw_source, options)
    }

    /// Creates a layer like [`Align::new`] over a `lower` that may cache earlier reads of the device below it,
    /// `rmw_source`. The rest of a partially written block is read from `rmw_source`, which has every completed write,
    /// so it is never stale.
    ///
    /// # Panics
    /// If the block size in `options` is not a power of two, or the two devices have different blocks.
    pub fn with_rmw_source(lower: Rc<dyn BlockDevice>, rmw_source: Rc<dyn BlockDevice>, options: AlignOptions) -> Self {
        assert!(options.block_size.is_power_of_two());
        let geometry = lower.geometry();
        assert_eq!(geometry.block_size, rmw_source.geometry().block_size);
        let unit = u64::from(geometry.block_size);
        let bounce_len = ByteOffset::new(options.bounce_len.get().max(2 * unit)).align_up(unit);
        Self {
            lower,
            rmw_source,
            block_size: options.block_size.min(geometry.block_size),
            lower_block_size: unit,
            memory_alignment: geometry.memory_alignment as usize,
            locks: RangeLocks::default(),
            pool: BufferPool::new(options.bounce_count, bounce_len.get() as usize),
        }
    }

    fn check_range(&self, operation: Operation, range: ByteRange) -> IoResult {
        check_request(self.lower.name(), &Filter::geometry(self), operation, range)
    }

    fn error(&self, operation: Operation, range: ByteRange, failure: Failure) -> IoError {
        IoError::new(self.lower.name(), operation, range, failure)
    }

    /// Returns true if partial blocks may have to be written, so that changes must be serialised.
    fn splits_blocks(&self) -> bool {
        u64::from(self.block_size) < self.lower_block_size
    }

    /// Passes on a change of whole blocks, or makes it wait for requests that have locked them.
    fn forward_change<'a>(&'a self, range: ByteRange, change: impl FnOnce() -> Io<'a> + 'a) -> Io<'a> {
        // The device refuses a range past 2^64.
        if !self.splits_blocks() || range.checked_end().is_none() {
            return change();
        }
        match self.locks.try_lock_shared(range) {
            Some(ticket) => change().watched(&self.locks, ticket),
            None => Io::task(async move {
                let _lock = self.locks.lock(range, RangeLockMode::Shared).await;
                change().await
            }),
        }
    }

    /// Returns the next part of `rest`; `fits` returns true if the device accepts the memory of a part.
    fn next_piece(&self, rest: ByteRange, fits: impl Fn(ByteRange) -> bool) -> Piece {
        let bounce_len = ByteLen::of_buffer(self.pool.buffer_len());
        let full_blocks = rest.narrowed(self.lower_block_size);
        let direct = !full_blocks.is_empty() && fits(full_blocks);
        if direct && full_blocks.start == rest.start {
            return Piece::Direct(full_blocks);
        }
        let enclosing = rest.widened(self.lower_block_size);
        if enclosing.len <= bounce_len {
            return Piece::Bounced(rest);
        }
        let end = if direct { full_blocks.start } else { enclosing.start + bounce_len };
        Piece::Bounced(ByteRange::between(rest.start, end.min(rest.end())))
    }

    async fn read_steps(&self, range: ByteRange, buffer: ReadBuf<'_>) -> IoResult {
        let failed = |error: IoError| self.error(Operation::Read, range, error.failure());
        let part_of = |part: ByteRange| buffer.slice((part.start - range.start).as_usize(), part.len.as_usize());
        let mut rest = range;
        while !rest.is_empty() {
            let fits = |part| part_of(part).is_aligned(self.memory_alignment);
            let done = match self.next_piece(rest, fits) {
                Piece::Direct(part) => {
                    self.lower.read(part.start, part_of(part)).await.map_err(failed)?;
                    part
                }
                Piece::Bounced(part) => {
                    self.read_bounced(part, part_of(part)).await.map_err(failed)?;
                    part
                }
            };
            rest = ByteRange::between(done.end(), range.end());
        }
        Ok(())
    }

    async fn read_bounced(&self, range: ByteRange, buffer: ReadBuf<'_>) -> IoResult {
        let enclosing = range.widened(self.lower_block_size);
        let mut bounce = self.pool.acquire().await;
        let bounce = &mut bounce[..enclosing.len.as_usize()];
        self.lower.read(enclosing.start, ReadBuf::new(bounce)).await?;
        let from = (range.start - enclosing.start).as_usize();
        buffer.copy_from_slice(&bounce[from..][..range.len.as_usize()]);
        Ok(())
    }

    async fn write_steps(&self, range: ByteRange, buffer: WriteBuf<'_>, flags: WriteFlags) -> IoResult {
        let failed = |error: IoError| self.error(Operation::Write, range, error.failure());
        let part_of = |part: ByteRange| buffer.slice((part.start - range.start).as_usize(), part.len.as_usize());
        let mut rest = range;
        while !rest.is_empty() {
            let fits = |part| part_of(part).is_aligned(self.memory_alignment);
            let done = match self.next_piece(rest, fits) {
                Piece::Direct(part) => {
                    let _lock = self.locks.lock(part, RangeLockMode::Shared).await;
                    self.lower.write(part.start, part_of(part), flags).await.map_err(failed)?;
                    part
                }
                Piece::Bounced(part) => {
                    let source = Source::Buffer(part_of(part));
                    self.write_bounced(part, source, flags).await.map_err(failed)?;
                    part
                }
            };
            rest = ByteRange::between(done.end(), range.end());
        }
        Ok(())
    }

    /// Writes at most a bounce buffer's length, with any start and end.
    async fn write_bounced(&self, range: ByteRange, source: Source<'_>, flags: WriteFlags) -> IoResult {
        let enclosing = range.widened(self.lower_block_size);
        let mut bounce = self.pool.acquire().await;
        let bounce = &mut bounce[..enclosing.len.as_usize()];
        let mode = match enclosing == range {
            true => RangeLockMode::Shared,
            false => RangeLockMode::Exclusive,
        };
        let _lock = self.locks.lock(enclosing, mode).await;
        self.read_partial_blocks(range, enclosing, bounce).await?;
        let from = (range.start - enclosing.start).as_usize();
        let changed = &mut bounce[from..][..range.len.as_usize()];
        match source {
            Source::Buffer(buffer) => buffer.copy_to_slice(changed),
            Source::Zeros => changed.fill(0),
        }
        self.lower.write(enclosing.start, WriteBuf::new(bounce), flags).await
    }

    /// Reads the blocks of `enclosing` that `range` covers partially.
    async fn read_partial_blocks(&self, range: ByteRange, enclosing: ByteRange, bounce: &mut [u8]) -> IoResult {
        let unit = self.lower_block_size as usize;
        let (head, tail) = (range.start > enclosing.start, range.end() < enclosing.end());
        let all = bounce.len();
        let parts = match (head, tail) {
            (true, true) if all <= 2 * unit => [0..all, 0..0],
            _ => [if head { 0..unit } else { 0..0 }, if tail { all - unit..all } else { 0..0 }],
        };
        for part in parts.into_iter().filter(|part| !part.is_empty()) {
            let start = enclosing.start + ByteLen::of_buffer(part.start);
            self.rmw_source.read(start, ReadBuf::new(&mut bounce[part])).await?;
        }
        Ok(())
    }

    async fn zero_steps(&self, range: ByteRange, flags: ZeroFlags) -> IoResult {
        let failed = |error: IoError| self.error(Operation::WriteZeroes, range, error.failure());
        let full_blocks = range.narrowed(self.lower_block_size);
        if full_blocks.is_empty() {
            if flags.fast_only {
                return Err(self.error(Operation::WriteZeroes, range, Failure::Unsupported));
            }
            return self.zero_bounced(range, flags).await.map_err(failed);
        }
        // The whole blocks go first, because the device may refuse them, and then nothing has been changed.
        {
            let _lock = self.locks.lock(full_blocks, RangeLockMode::Shared).await;
            self.lower.write_zeroes(full_blocks, flags).await.map_err(failed)?;
        }
        let head = ByteRange::between(range.start, full_blocks.start);
        let tail = ByteRange::between(full_blocks.end(), range.end());
        for edge in [head, tail].into_iter().filter(|edge| !edge.is_empty()) {
            self.zero_bounced(edge, flags).await.map_err(failed)?;
        }
        Ok(())
    }

    /// Writes zeros in at most two blocks.
    async fn zero_bounced(&self, range: ByteRange, flags: ZeroFlags) -> IoResult {
        let flags = WriteFlags { fua: flags.fua };
        self.write_bounced(range, Source::Zeros, flags).await
    }

    async fn extents_steps(&self, range: ByteRange, limit: usize) -> IoResult<Vec<Extent>> {
        self.check_range(Operation::Extents, range)?;
        let enclosing = range.widened(self.lower_block_size);
        let mut found = self.lower.extents(enclosing, limit).await?;
        for extent in &mut found {
            extent.range = extent.range.intersection(range);
        }
        found.retain(|extent| !extent.range.is_empty());
        Ok(found)
    }
}

impl Filter for Align {
    fn lower(&self) -> &Rc<dyn BlockDevice> {
        &self.lower
    }

    fn geometry(&self) -> Geometry {
        let lower = self.lower.geometry();
        Geometry {
            block_size: self.block_size,
            physical_block_size: lower.physical_block_size.max(lower.block_size),
            memory_alignment: 1,
            ..lower
        }
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        let range = start.range(buffer.byte_len());
        if range.is_aligned(self.lower_block_size) && buffer.is_aligned(self.memory_alignment) {
            return self.lower.read(start, buffer);
        }
        match self.check_range(Operation::Read, range) {
            Err(error) => Io::ready(Err(error)),
            Ok(()) => Io::task(self.read_steps(range, buffer)),
        }
    }

    fn write<'a>(&'a self, start: ByteOffset, buffer: WriteBuf<'a>, flags: WriteFlags) -> Io<'a> {
        let range = start.range(buffer.byte_len());
        if range.is_aligned(self.lower_block_size) && buffer.is_aligned(self.memory_alignment) {
            let write = move || self.lower.write(start, buffer, flags);
            return self.forward_change(range, write);
        }
        match self.check_range(Operation::Write, range) {
            Err(error) => Io::ready(Err(error)),
            Ok(()) => Io::task(self.write_steps(range, buffer, flags)),
        }
    }

    fn discard(&self, range: ByteRange) -> Io<'_> {
        let full_blocks = match range.checked_end() {
            Some(_) => range.narrowed(self.lower_block_size),
            None => range,
        };
        // Partial blocks at the ends are not discarded.
        if full_blocks != range {
            if let Err(error) = self.check_range(Operation::Discard, range) {
                return Io::ready(Err(error));
            }
            if full_blocks.is_empty() {
                return Io::ready(Ok(()));
            }
        }
        self.forward_change(full_blocks, move || self.lower.discard(full_blocks))
    }

    fn write_zeroes(&self, range: ByteRange, flags: ZeroFlags) -> Io<'_> {
        if range.is_aligned(self.lower_block_size) {
            let zero = move || self.lower.write_zeroes(range, flags);
            return self.forward_change(range, zero);
        }
        match self.check_range(Operation::WriteZeroes, range) {
            Err(error) => Io::ready(Err(error)),
            Ok(()) => Io::task(self.zero_steps(range, flags)),
        }
    }

    fn allocate(&self, range: ByteRange) -> Io<'_> {
        // An allocation changes no content, so it needs no lock.
        match self.check_range(Operation::Write, range) {
            Err(error) => Io::ready(Err(error)),
            Ok(()) => self.lower.allocate(range.widened(self.lower_block_size)),
        }
    }

    fn extents(&self, range: ByteRange, limit: usize) -> BoxFuture<'_, IoResult<Vec<Extent>>> {
        if range.is_aligned(self.lower_block_size) {
            return self.lower.extents(range, limit);
        }
        Box::pin(self.extents_steps(range, limit))
    }
}
