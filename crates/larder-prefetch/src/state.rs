//! State of a disk's read-ahead, and its transitions: recording a read, forgetting blocks, planning and ending a
//! fetch.

use std::collections::VecDeque;
use std::ops::Range;
use std::task::Waker;

use larder_block::IoVec;
use smallvec::SmallVec;

use crate::cache::{Cache, FetchId, SlotIndex, Unread};
use crate::extents::Extents;
use crate::interest::Interest;
use crate::pace::Pace;
use crate::seen::{Seen, regions_around};
use crate::streams::{Bounds, FETCH_MAX, Pattern, StreamId, Streams};
use crate::units::{BLOCK_BITS, BLOCKS_PER_REGION, BLOCKS_PER_SLOT, Block, SLOT_LEN, bits_in_slot, parts_of};
use crate::writes::Writes;
use crate::{PrefetchOptions, Statistics};

/// Fewest blocks next to a read that must have been read before a stream begins.
const EVIDENCE_MIN: u64 = 3;

/// Most blocks next to a read that must have been read before a stream begins.
const EVIDENCE_MAX: u64 = 64;

/// Bytes fetched between two checks of the wasted share.
const LOOK_AFTER: u64 = 256 << 10;

/// Wasted share of the fetched bytes, in units of 1/64, above which the caution grows; below [`LITTLE`] it shrinks.
const TOO_MUCH: u64 = 6;
const LITTLE: u64 = 2;

/// The highest caution.
const CAUTION_MAX: u32 = 4;

/// Memory for fetches, and for reads that wait for them.
const TASK_BYTES: usize = 40 << 10;

/// Slots that a fetch touches at most.
const SLOTS_PER_FETCH: usize = (FETCH_MAX as usize >> (BLOCK_BITS + 2)) + 1;

pub(crate) struct State {
    pub(crate) cache: Cache,
    pub(crate) seen: Seen,
    pub(crate) interest: Interest,
    pub(crate) streams: Streams,
    pub(crate) extents: Extents,
    pub(crate) pace: Pace,
    pub(crate) counts: Statistics,
    /// Streams that want a fetch.
    queue: VecDeque<StreamId>,
    pub(crate) running: Vec<FetchId>,
    next_fetch: FetchId,
    /// Wakers of reads that wait for a fetch.
    pub(crate) waiting: Vec<(FetchId, Waker)>,
    ahead_max: u64,
    caution: u32,
    /// Fetched and wasted bytes at the last check.
    looked: (u64, u64),
    /// Set during a query of the extents; there is one at a time.
    pub(crate) asking: bool,
    /// Set when no fetch may start any more.
    pub(crate) closing: bool,
}

/// Planned fetch, with the slots that are assigned to it.
pub(crate) struct Planned {
    pub(crate) id: FetchId,
    pub(crate) stream: StreamId,
    pub(crate) pattern: Pattern,
    pub(crate) blocks: Range<Block>,
    pub(crate) slots: SmallVec<[SlotIndex; SLOTS_PER_FETCH]>,
    /// Memory for the blocks, in order.
    pub(crate) memory: SmallVec<[IoVec; SLOTS_PER_FETCH]>,
    /// Set if it is unknown whether there is data around the fetch.
    pub(crate) asks: bool,
}

impl State {
    pub(crate) fn new(options: PrefetchOptions) -> Self {
        let memory = options.memory.as_usize();
        let tables = size_of::<Self>() + Seen::BYTES + Extents::BYTES + TASK_BYTES;
        let slots = memory.saturating_sub(tables) / (Cache::SLOT_BYTES + Streams::STREAM_BYTES);
        let cache = Cache::new(slots);
        let streams = Streams::new(cache.len());
        Self {
            counts: Statistics {
                memory: (tables + cache.len() * (Cache::SLOT_BYTES + Streams::STREAM_BYTES)) as u64,
                ..Statistics::default()
            },
            cache,
            seen: Seen::new(),
            interest: Interest::new(),
            streams,
            extents: Extents::new(),
            pace: Pace::new(),
            queue: VecDeque::new(),
            running: Vec::new(),
            next_fetch: 0,
            waiting: Vec::new(),
            ahead_max: options.ahead_max.get(),
            caution: 0,
            looked: (0, 0),
            asking: false,
            closing: false,
        }
    }

    /// Returns an empty state that continues the counters of `before`, of which no fetch may be in flight.
    pub(crate) fn after(before: &mut Self, options: PrefetchOptions) -> Self {
        before.forget_all();
        let mut state = Self::new(options);
        state.counts = Statistics {
            memory: state.counts.memory,
            ..before.counts
        };
        state.looked = (before.counts.fetched, before.counts.wasted);
        // Each fetch has a number of its own.
        state.next_fetch = before.next_fetch;
        state.waiting = std::mem::take(&mut before.waiting);
        state.asking = before.asking;
        state
    }

    pub(crate) fn statistics(&self) -> Statistics {
        let counts = self.counts;
        Statistics {
            unread: counts.fetched - counts.used - counts.wasted,
            streams: self.streams.active(),
            ..counts
        }
    }

    fn bounds(&self) -> Bounds {
        Bounds {
            ahead_max: self.ahead_max,
            memory: (self.cache.len() * SLOT_LEN) as u64,
            caution: self.caution,
        }
    }

    /// Records a read of `blocks`, which neither this layer nor the one below had in memory; returns whether a fetch
    /// may start.
    pub(crate) fn missed(&mut self, blocks: &Range<Block>) -> bool {
        if let Some(id) = self.stream_of(blocks) {
            self.seen.assign(blocks, id);
            self.consider(id);
        }
        self.seen.note(blocks.clone());
        self.has_work()
    }

    /// Returns the stream to which a read of `blocks` belongs, which are not in memory.
    fn stream_of(&mut self, blocks: &Range<Block>) -> Option<StreamId> {
        let len = blocks.end - blocks.start;
        if !self.seen.knows_around(blocks) && self.slot_before(blocks).is_none() {
            return self.begin_strided(blocks);
        }
        if let Some(known) = self.stream_near(blocks) {
            return Some(known);
        }
        let evidence = ((len * 2).max(EVIDENCE_MIN) << self.caution).min(EVIDENCE_MAX);
        let before = blocks.start.saturating_sub(evidence)..blocks.start;
        if before.end - before.start >= EVIDENCE_MIN && self.seen.were_read(before) {
            self.begin(Pattern::Forward, blocks, 0)
        } else if self.seen.were_read(blocks.end..blocks.end + evidence) {
            self.begin(Pattern::Backward, blocks, 0)
        } else {
            self.begin_strided(blocks)
        }
    }

    fn begin_strided(&mut self, blocks: &Range<Block>) -> Option<StreamId> {
        let step = self.seen.step_to(blocks.start)?;
        let is_step = step.unsigned_abs() > blocks.end - blocks.start && self.caution <= CAUTION_MAX / 2;
        is_step.then(|| self.begin(Pattern::Strided, blocks, step)).flatten()
    }

    fn begin(&mut self, pattern: Pattern, blocks: &Range<Block>, step: i64) -> Option<StreamId> {
        let bounds = self.bounds();
        let begun = self.streams.begin(pattern, blocks, step, bounds, self.seen.now())?;
        self.interest.wake();
        match pattern {
            Pattern::Forward => self.counts.streams_forward += 1,
            Pattern::Backward => self.counts.streams_backward += 1,
            Pattern::Strided => self.counts.streams_strided += 1,
        }
        Some(begun)
    }

    /// Returns the stream whose reader is near `blocks`.
    fn stream_near(&mut self, blocks: &Range<Block>) -> Option<StreamId> {
        let (bounds, next) = (self.bounds(), self.next_fetch);
        let in_memory = self.slot_before(blocks).map(|slot| self.cache.slot(slot).stream);
        let (first, last) = regions_around(blocks);
        let here = blocks.start.saturating_sub(1) / BLOCKS_PER_REGION;
        let around = [
            self.seen.stream_at(here),
            self.seen.stream_at(first),
            self.seen.stream_at(last),
            in_memory,
        ];
        for id in around.into_iter().flatten() {
            if let Some(stream) = self.streams.get(id)
                && stream.is_near(blocks)
            {
                stream.missed(blocks, next, bounds);
                self.interest.wake();
                self.streams.touch(id, self.seen.now());
                return Some(id);
            }
        }
        None
    }

    /// Returns the slot of the block before `blocks`.
    fn slot_before(&self, blocks: &Range<Block>) -> Option<SlotIndex> {
        self.cache.find(blocks.start.saturating_sub(1) / BLOCKS_PER_SLOT)
    }

    /// Queues a stream if it wants a fetch.
    fn consider(&mut self, id: StreamId) {
        let bounds = self.bounds();
        self.streams.give_up_forsaken(self.seen.now(), bounds);
        let active = self.streams.active();
        if let Some(stream) = self.streams.get(id)
            && !stream.queued
            && stream.wanted(bounds, active).is_some()
        {
            stream.queued = true;
            self.queue.push_back(id);
        }
    }

    /// Records a read of `blocks` from memory, which got the blocks `bits` from a slot.
    pub(crate) fn used(&mut self, index: SlotIndex, bits: u8, blocks: &Range<Block>) {
        let slot = self.cache.slot_mut(index);
        let (new, id) = ((slot.unread & bits).count_ones(), slot.stream);
        slot.unread &= !bits;
        self.interest.wake();
        self.streams.touch(id, self.seen.now());
        if new > 0 {
            self.counts.used += u64::from(new) << BLOCK_BITS;
            self.streams.used(id, new, blocks);
            self.seen.assign(blocks, id);
            self.cache.settle(index);
        }
        self.consider(id);
        if let Some((block, step)) = self.streams.stalled_step(id) {
            self.seen.expect(block, step);
        }
    }

    /// Records that a read of `blocks` waits for a fetch into a slot.
    pub(crate) fn is_waited_for(&mut self, index: SlotIndex, fetch: FetchId, blocks: &Range<Block>) {
        let (id, bounds, next) = (self.cache.slot(index).stream, self.bounds(), self.next_fetch);
        self.interest.wake();
        if let Some(stream) = self.streams.get(id) {
            stream.waited(blocks, fetch, next, bounds);
        }
        self.streams.touch(id, self.seen.now());
        self.seen.assign(blocks, id);
        self.consider(id);
    }

    /// Removes `blocks` from memory.
    pub(crate) fn forget(&mut self, blocks: &Range<Block>) {
        let parts = parts_of(blocks);
        if parts.end - parts.start <= self.cache.len() as u64 {
            for part in parts {
                if let Some(index) = self.cache.find(part) {
                    self.forget_in(index, blocks);
                }
            }
        } else {
            for index in 0..self.cache.len() as SlotIndex {
                if self.cache.holds_any(index, &parts) {
                    self.forget_in(index, blocks);
                }
            }
        }
    }

    /// Removes all blocks from memory, and stops all streams.
    pub(crate) fn forget_all(&mut self) {
        self.forget(&(0..Block::MAX));
        self.queue.clear();
        self.streams.stop_all();
    }

    /// Removes the blocks that were fetched before fetch `limit` from memory.
    pub(crate) fn forget_before(&mut self, limit: FetchId) {
        for index in 0..self.cache.len() as SlotIndex {
            let slot = self.cache.slot(index);
            let is_old = |block: &usize| (slot.fetches[*block].wrapping_sub(limit) as i32) < 0;
            let old = (0..BLOCKS_PER_SLOT as usize).filter(is_old);
            let bits = slot.present & old.fold(0, |bits, block| bits | 1 << block);
            if bits != 0 {
                let lost = self.cache.forget(index, bits);
                self.count_lost(lost);
            }
        }
    }

    /// Returns the number of the next fetch.
    pub(crate) fn next_fetch(&self) -> FetchId {
        self.next_fetch
    }

    fn forget_in(&mut self, index: SlotIndex, blocks: &Range<Block>) {
        let bits = self.cache.bits(index, blocks);
        let lost = self.cache.forget(index, bits);
        self.count_lost(lost);
    }

    fn count_lost(&mut self, lost: Option<Unread>) {
        if let Some(lost) = lost {
            self.counts.wasted += u64::from(lost.wasted) << BLOCK_BITS;
            self.streams.lost(lost.stream, lost.blocks);
        }
    }

    /// Adapts the caution to the share of wasted bytes.
    fn look_at_waste(&mut self) {
        let (fetched, wasted) = (self.counts.fetched - self.looked.0, self.counts.wasted - self.looked.1);
        if fetched < LOOK_AFTER {
            return;
        }
        self.looked = (self.counts.fetched, self.counts.wasted);
        if wasted * 64 > fetched * TOO_MUCH {
            self.caution = (self.caution + 1).min(CAUTION_MAX);
        } else if wasted * 64 < fetched * LITTLE {
            self.caution = self.caution.saturating_sub(1);
        }
    }

    /// Returns whether a fetch may start.
    #[inline]
    pub(crate) fn has_work(&self) -> bool {
        !self.queue.is_empty() && self.running.len() < self.pace.limit() && !self.closing
    }

    /// Plans the next fetch, if one may start.
    pub(crate) fn plan(&mut self, disk: u64, writes: &Writes) -> Option<Planned> {
        while self.has_work() {
            let id = self.queue.pop_front()?;
            let planned = self.plan_for(id, disk >> BLOCK_BITS, writes);
            if let Some(stream) = self.streams.get(id) {
                stream.queued = false;
            }
            if let Some(planned) = planned {
                self.consider(id);
                return Some(planned);
            }
        }
        None
    }

    fn plan_for(&mut self, id: StreamId, disk: Block, writes: &Writes) -> Option<Planned> {
        let bounds = self.bounds();
        // Each round without a fetch advances by a slot at least, so that there are few.
        for _ in 0..EVIDENCE_MAX {
            let active = self.streams.active();
            let stream = self.streams.get(id)?;
            let pattern = stream.pattern;
            let wanted = stream.wanted(bounds, active)?;
            let wanted = wanted.start.min(disk)..wanted.end.min(disk);
            if wanted.is_empty() {
                return None;
            }
            let (piece, is_missing) = self.piece(pattern, &wanted, writes);
            if !is_missing {
                if let Some(stream) = self.streams.get(id) {
                    stream.advance(&piece);
                }
                continue;
            }
            let planned = self.set_out(id, pattern, &piece)?;
            if let Some(stream) = self.streams.get(id) {
                stream.advance(&planned.blocks);
            }
            return Some(planned);
        }
        None
    }

    /// Returns the first piece of `wanted`, in the order of the pattern, whose blocks are all missing or all not.
    fn piece(&self, pattern: Pattern, wanted: &Range<Block>, writes: &Writes) -> (Range<Block>, bool) {
        let missing = |block: Block| {
            let part = block / BLOCKS_PER_SLOT;
            let bit = 1u8 << (block % BLOCKS_PER_SLOT);
            let here = self.cache.find(part).map(|index| self.cache.slot(index));
            let is_here = here.is_some_and(|slot| (slot.busy | slot.present) & bit != 0);
            let is_hole = matches!(self.extents.find(block), Some((_, false)));
            !is_here && !is_hole
        };
        let changing = writes.touch(wanted);
        let is_missing = |block: Block| missing(block) && !(changing && writes.touch(&(block..block + 1)));
        match pattern {
            Pattern::Backward => {
                let first = is_missing(wanted.end - 1);
                let alike = wanted
                    .clone()
                    .rev()
                    .take_while(|block| is_missing(*block) == first)
                    .count() as u64;
                (wanted.end - alike..wanted.end, first)
            }
            _ => {
                let first = is_missing(wanted.start);
                let alike = wanted.clone().take_while(|block| is_missing(*block) == first).count() as u64;
                (wanted.start..wanted.start + alike, first)
            }
        }
    }

    /// Assigns slots to `wanted`, as many as are available.
    fn set_out(&mut self, stream: StreamId, pattern: Pattern, wanted: &Range<Block>) -> Option<Planned> {
        let id = self.next_fetch;
        self.next_fetch = id.wrapping_add(1);
        let mut parts: SmallVec<[u64; SLOTS_PER_FETCH]> = parts_of(wanted).collect();
        if pattern == Pattern::Backward {
            parts.reverse();
        }
        let mut slots = SmallVec::new();
        let mut blocks = None::<Range<Block>>;
        for part in parts {
            let bits = bits_in_slot(wanted, part);
            let index = match self.cache.find(part) {
                Some(index) => {
                    // Another stream's blocks in the slot belong to this stream now.
                    let slot = self.cache.slot_mut(index);
                    let (other, unread) = (slot.stream, slot.unread.count_ones());
                    slot.stream = stream;
                    self.streams.give(other, stream, unread);
                    index
                }
                None => {
                    let Some((index, lost)) = self.cache.take(part, stream) else {
                        break;
                    };
                    self.count_lost(lost);
                    index
                }
            };
            let slot = self.cache.slot_mut(index);
            slot.flying |= bits;
            slot.busy |= bits;
            slot.unread |= bits;
            for block in (0..BLOCKS_PER_SLOT as usize).filter(|block| bits >> block & 1 != 0) {
                slot.fetches[block] = id;
            }
            self.cache.settle(index);
            self.streams.fetched(stream, bits.count_ones().into());
            let first = part * BLOCKS_PER_SLOT;
            let here = wanted.start.max(first)..wanted.end.min(first + BLOCKS_PER_SLOT);
            blocks = Some(match blocks {
                None => here,
                Some(blocks) => blocks.start.min(here.start)..blocks.end.max(here.end),
            });
            slots.push(index);
        }
        let blocks = blocks?;
        if pattern == Pattern::Backward {
            slots.reverse();
        }
        let memory = slots.iter().map(|index| {
            let first = self.cache.slot(*index).start() >> BLOCK_BITS;
            let (from, to) = (blocks.start.max(first), blocks.end.min(first + BLOCKS_PER_SLOT));
            let memory = self.cache.memory(*index, from << BLOCK_BITS);
            IoVec::new(memory.base(), ((to - from) << BLOCK_BITS) as usize)
        });
        let memory = memory.collect();
        self.running.push(id);
        let asks = !self.asking && self.extents.find(blocks.start).is_none();
        self.asking |= asks;
        Some(Planned {
            id,
            stream,
            pattern,
            blocks,
            slots,
            memory,
            asks,
        })
    }

    /// Ends a fetch; returns the wakers of the reads that wait for it.
    pub(crate) fn end(&mut self, planned: &Planned, succeeded: bool) -> SmallVec<[Waker; 8]> {
        let mut landed = 0;
        for index in &planned.slots {
            let all = self.cache.bits(*index, &planned.blocks);
            let slot = self.cache.slot_mut(*index);
            let bits = slot.flying & all;
            slot.flying &= !all;
            slot.busy &= !all;
            landed += u64::from(bits.count_ones());
            if succeeded {
                slot.present |= bits;
                self.cache.settle(*index);
            } else {
                let unread = slot.unread & bits;
                slot.unread &= !bits;
                let owner = slot.stream;
                self.cache.settle(*index);
                self.streams.lost(owner, unread.count_ones());
            }
        }
        if succeeded {
            let all = planned.blocks.end - planned.blocks.start;
            self.counts.fetched += all << BLOCK_BITS;
            self.counts.wasted += (all - landed) << BLOCK_BITS;
        } else {
            self.counts.errors += 1;
            self.streams.stop(planned.stream);
        }
        self.look_at_waste();
        self.running.retain(|running| *running != planned.id);
        self.consider(planned.stream);
        let waiting = self.waiting.extract_if(.., |(id, _)| *id == planned.id);
        waiting.map(|(_, waker)| waker).collect()
    }
}
