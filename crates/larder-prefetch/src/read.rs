//! The guest's reads.

use std::cell::Cell;
use std::ops::Range;
use std::task::Poll;

use larder_block::{ByteOffset, Io, IoResult, ReadBuf, RequestWatch, join};
use smallvec::SmallVec;

use crate::Prefetch;
use crate::cache::{BlockCache, FetchId, SlotIndex};
use crate::state::State;
use crate::units::{BLOCK_BITS, Block, SLOT_BITS, blocks_of, completed_blocks, parts_of};

/// Blocks of a long read that the history records at most, from its end.
const HISTORY_BLOCKS_MAX: u64 = 128;

/// Reads of more bytes are long.
const LONG_READ_LEN: u64 = 64 << 10;

/// Long reads in flight from which on further ones bypass the cache.
const LONG_READS_MAX: u32 = 2;

/// Number of long reads in flight.
#[derive(Default)]
pub(crate) struct LongReads(Cell<u32>);

impl RequestWatch for LongReads {
    fn request_ended(&self, _: u32) {
        self.0.set(self.0.get() - 1);
    }
}

/// Result of looking up a read in memory.
enum ReadLookup {
    Missing,
    Present,
    Partial,
}

/// Result of looking up a piece of a read, no longer than a slot.
enum PieceState {
    Present,
    InFlight(SlotIndex, FetchId),
    Missing,
}

impl Prefetch {
    #[inline(never)]
    pub(crate) fn read_any<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        let options = self.options.get();
        if self.skips_random_read(start.get(), buffer.len() as u64) {
            return self.lower.read(start, buffer);
        }
        if buffer.len() as u64 <= LONG_READ_LEN {
            return self.read_steps(start, buffer, options.largest_read.get());
        }
        let others = self.long_reads.0.get();
        let largest = if others < LONG_READS_MAX { options.largest_read.get() } else { 0 };
        self.long_reads.0.set(others + 1);
        self.read_steps(start, buffer, largest).watched(&self.long_reads, 0)
    }

    /// Returns whether a read is skipped because the access is random and none of its blocks is in memory.
    #[inline]
    fn skips_random_read(&self, at: u64, len: u64) -> bool {
        let mut state = self.state.borrow_mut();
        if !state.random_detector.is_random()
            || !self.is_valid_request(at, len)
            || len > LONG_READ_LEN.min(self.options.get().largest_read.get())
        {
            return false;
        }
        let is_skipped = is_absent(&state.cache, &blocks_of(at, len))
            && !state.random_detector.detects_locality(&completed_blocks(at, len));
        state.counts.misses += u64::from(is_skipped);
        is_skipped
    }

    /// Returns whether a read consists of whole sectors, and its end can be represented.
    fn is_valid_request(&self, at: u64, len: u64) -> bool {
        len > 0 && (at | len) & (self.block_size - 1) == 0 && at.checked_add(len).is_some()
    }

    /// Performs a read, which bypasses the memory if it is longer than `largest`.
    fn read_steps<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>, largest: u64) -> Io<'a> {
        let (at, len) = (start.get(), buffer.len() as u64);
        if !self.is_valid_request(at, len) {
            return self.lower.read(start, buffer);
        }
        let (blocks, done) = (blocks_of(at, len), completed_blocks(at, len));
        if len > largest {
            let mut state = self.state.borrow_mut();
            state.counts.bypassed += 1;
            let first = done.start.max(done.end.saturating_sub(HISTORY_BLOCKS_MAX));
            state.history.record(first..done.end);
            drop(state);
            return self.lower.read(start, buffer);
        }
        let mut state = self.state.borrow_mut();
        let mut found = find(&state.cache, &blocks);
        if !matches!(found, ReadLookup::Missing) && self.has_size_changed() {
            state.invalidate(&(0..Block::MAX));
            found = ReadLookup::Missing;
        }
        match found {
            ReadLookup::Missing => {
                state.counts.misses += 1;
                state.random_detector.record_miss();
                drop(state);
                let read = self.lower.read(start, buffer);
                // Data that the layer below has in memory need not be here too.
                if !read.is_ready() && self.state.borrow_mut().record_miss(&done) {
                    self.start_fetches();
                }
                read
            }
            ReadLookup::Present => {
                state.counts.hits += 1;
                state.history.record(done.clone());
                state.copy(at, buffer, &done);
                drop(state);
                self.start_fetches();
                Io::ready(Ok(()))
            }
            ReadLookup::Partial => {
                state.history.record(done.clone());
                match state.piece_at(at, at + len) {
                    PieceState::InFlight(slot, fetch) if piece_end(&state.cache, at, at + len) == at + len => {
                        state.counts.waits += 1;
                        state.record_wait(slot, fetch, &done);
                        drop(state);
                        self.start_fetches();
                        Io::task(self.wait_and_copy(at, buffer, done))
                    }
                    _ => {
                        drop(state);
                        Io::task(self.read_pieces(start, buffer, done))
                    }
                }
            }
        }
    }

    /// Performs a read of which a part is in memory or being fetched. The read completes the blocks `done`.
    async fn read_pieces(&self, start: ByteOffset, buffer: ReadBuf<'_>, done: Range<Block>) -> IoResult {
        let (mut at, end) = (start.get(), start.get() + buffer.len() as u64);
        let part_of = |from: u64, to: u64| buffer.slice((from - start.get()) as usize, (to - from) as usize);
        let mut ios: SmallVec<[Io<'_>; 4]> = SmallVec::new();
        // Start of the missing range before the present piece.
        let mut missing_from = at;
        let (mut waits, mut is_partial) = (false, false);
        while at < end {
            let mut state = self.state.borrow_mut();
            let to = piece_end(&state.cache, at, end);
            let piece = state.piece_at(at, to);
            if !matches!(piece, PieceState::Missing) && missing_from < at {
                is_partial = true;
                ios.push(self.lower.read(ByteOffset::new(missing_from), part_of(missing_from, at)));
            }
            match piece {
                PieceState::Missing => {}
                PieceState::Present => {
                    state.copy(at, part_of(at, to), &done);
                    missing_from = to;
                }
                PieceState::InFlight(slot, fetch) => {
                    waits = true;
                    state.record_wait(slot, fetch, &done);
                    ios.push(Io::task(self.wait_and_copy(at, part_of(at, to), done.clone())));
                    missing_from = to;
                }
            }
            at = to;
        }
        if missing_from < end {
            is_partial = true;
            ios.push(self.lower.read(ByteOffset::new(missing_from), part_of(missing_from, end)));
        }
        {
            let counts = &mut self.state.borrow_mut().counts;
            let count = match (is_partial, waits) {
                (true, _) => &mut counts.partial_hits,
                (false, true) => &mut counts.waits,
                (false, false) => &mut counts.hits,
            };
            *count += 1;
        }
        self.start_fetches();
        join(ios).await
    }

    /// Reads a piece, no longer than a slot, that was being fetched, for a read that completes the blocks `done`.
    async fn wait_and_copy(&self, at: u64, buffer: ReadBuf<'_>, done: Range<Block>) -> IoResult {
        loop {
            let in_flight = {
                let mut state = self.state.borrow_mut();
                match state.piece_at(at, at + buffer.len() as u64) {
                    PieceState::Present => {
                        state.copy(at, buffer, &done);
                        drop(state);
                        self.start_fetches();
                        return Ok(());
                    }
                    PieceState::InFlight(_, fetch) => Some(fetch),
                    PieceState::Missing => None,
                }
            };
            match in_flight {
                Some(fetch) => self.wait_fetch(fetch).await,
                None => return self.lower.read(ByteOffset::new(at), buffer).await,
            }
        }
    }

    /// Completes once a fetch has ended.
    pub(crate) async fn wait_fetch(&self, fetch: FetchId) {
        std::future::poll_fn(|context| {
            let mut state = self.state.borrow_mut();
            if !state.running.contains(&fetch) {
                return Poll::Ready(());
            }
            let is_registered =
                |(id, waker): &(FetchId, std::task::Waker)| *id == fetch && waker.will_wake(context.waker());
            if !state.waiting.iter().any(is_registered) {
                state.waiting.push((fetch, context.waker().clone()));
            }
            Poll::Pending
        })
        .await;
    }

    /// Returns whether the disk's size has changed since the last call. If so, data in memory may be stale.
    fn has_size_changed(&self) -> bool {
        let generation = self.lower.size_changes().generation();
        self.generation.replace(generation) != generation
    }
}

/// Returns whether it is certain after one look-up that none of `blocks` is in memory.
#[inline]
fn is_absent(cache: &BlockCache, blocks: &Range<Block>) -> bool {
    let parts = parts_of(blocks);
    parts.end - parts.start == 1 && cache.find(parts.start).is_none()
}

/// Looks up `blocks` in memory.
fn find(cache: &BlockCache, blocks: &Range<Block>) -> ReadLookup {
    if is_absent(cache, blocks) {
        return ReadLookup::Missing;
    }
    let parts = parts_of(blocks);
    let (mut some, mut all) = (false, true);
    for part in parts {
        let (bits, wanted) = match cache.find(part) {
            None => ((0, 0), 1),
            Some(index) => {
                let slot = cache.slot(index);
                ((slot.present, slot.in_flight), cache.bits(index, blocks))
            }
        };
        some |= (bits.0 | bits.1) & wanted != 0;
        all &= bits.0 & wanted == wanted;
    }
    match (all, some) {
        (true, _) => ReadLookup::Present,
        (false, true) => ReadLookup::Partial,
        (false, false) => ReadLookup::Missing,
    }
}

/// Returns the end of the piece from `at` on: bytes in one slot that are all present, all flying or all missing.
fn piece_end(cache: &BlockCache, at: u64, end: u64) -> u64 {
    let slot_end = ((at >> SLOT_BITS) + 1) << SLOT_BITS;
    let end = end.min(slot_end);
    let Some(index) = cache.find(at >> SLOT_BITS) else {
        return end;
    };
    let slot = cache.slot(index);
    let kind = |block: Block| {
        let bits = cache.bits(index, &(block..block + 1));
        (slot.present & bits != 0, slot.in_flight & bits != 0)
    };
    let mut block = at >> BLOCK_BITS;
    let first = kind(block);
    loop {
        block += 1;
        let start = block << BLOCK_BITS;
        if start >= end || kind(block) != first {
            return start.min(end);
        }
    }
}

impl State {
    /// Looks up the bytes from `at` to `to`, which are in one slot.
    fn piece_at(&self, at: u64, to: u64) -> PieceState {
        let blocks = blocks_of(at, to - at);
        let Some(index) = self.cache.find(at >> SLOT_BITS) else {
            return PieceState::Missing;
        };
        let (slot, bits) = (self.cache.slot(index), self.cache.bits(index, &blocks));
        let in_flight = slot.in_flight & bits;
        if slot.present & bits == bits {
            PieceState::Present
        } else if in_flight != 0 {
            PieceState::InFlight(index, slot.fetches[in_flight.trailing_zeros() as usize])
        } else {
            PieceState::Missing
        }
    }

    /// Copies bytes from `at` on, all of which are in memory, to `buffer`, for a read that completes the blocks
    /// `done`.
    fn copy(&mut self, at: u64, buffer: ReadBuf<'_>, done: &Range<Block>) {
        let (mut from, end) = (at, at + buffer.len() as u64);
        while from < end {
            let to = end.min(((from >> SLOT_BITS) + 1) << SLOT_BITS);
            let Some(index) = self.cache.find(from >> SLOT_BITS) else {
                return;
            };
            let (memory, len) = (self.cache.memory(index, from), (to - from) as usize);
            // SAFETY: the memory belongs to the slot, and is not freed before the cache. The bytes are of present
            // blocks, to which no fetch writes. The slice ends before any other use of the memory.
            let bytes = unsafe { std::slice::from_raw_parts(memory.base().cast_const(), len) };
            buffer.slice((from - at) as usize, len).copy_from_slice(bytes);
            let copied = blocks_of(from, to - from);
            let bits = self.cache.bits(index, &(copied.start..copied.end.min(done.end)));
            self.record_use(index, bits, done);
            from = to;
        }
    }
}
