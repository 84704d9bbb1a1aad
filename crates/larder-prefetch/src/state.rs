//! State of a disk's read-ahead, and its transitions: recording a read, forgetting blocks, planning and ending a
//! fetch.

use std::collections::VecDeque;
use std::ops::Range;
use std::task::Waker;

use larder_block::IoVec;
use smallvec::SmallVec;

use crate::cache::{BlockCache, DroppedUnread, FetchId, SlotIndex};
use crate::extents::Extents;
use crate::fetch_limit::FetchLimit;
use crate::history::{ReadHistory, regions_around};
use crate::random_detector::RandomDetector;
use crate::streams::{FETCH_MAX, Pattern, StreamBounds, StreamId, StreamTable};
use crate::units::{BLOCK_BITS, BLOCKS_PER_REGION, BLOCKS_PER_SLOT, Block, SLOT_LEN, bits_in_slot, parts_of};
use crate::writes::Writes;
use crate::{PrefetchOptions, PrefetchStatistics};

/// Fewest blocks next to a read that must have been read before a stream begins.
const EVIDENCE_MIN: u64 = 3;

/// Most blocks next to a read that must have been read before a stream begins.
const EVIDENCE_MAX: u64 = 64;

/// Bytes fetched between two checks of the wasted share.
const WASTE_CHECK_BYTES: u64 = 256 << 10;

/// Wasted share of the fetched bytes, in units of 1/64, above which the caution grows; below [`WASTE_LOW_64THS`] it
/// shrinks.
const WASTE_HIGH_64THS: u64 = 6;
const WASTE_LOW_64THS: u64 = 2;

/// The highest caution.
const BACKOFF_MAX: u32 = 4;

/// Memory for fetches, and for reads that wait for them.
const TASK_BYTES: usize = 40 << 10;

/// Slots that a fetch touches at most.
const SLOTS_PER_FETCH: usize = (FETCH_MAX as usize >> (BLOCK_BITS + 2)) + 1;

pub(crate) struct State {
    pub(crate) cache: BlockCache,
    pub(crate) history: ReadHistory,
    pub(crate) random_detector: RandomDetector,
    pub(crate) streams: StreamTable,
    pub(crate) extents: Extents,
    pub(crate) fetch_limit: FetchLimit,
    pub(crate) counts: PrefetchStatistics,
    /// Streams that want a fetch.
    queue: VecDeque<StreamId>,
    pub(crate) running: Vec<FetchId>,
    next_fetch: FetchId,
    /// Wakers of reads that wait for a fetch.
    pub(crate) waiting: Vec<(FetchId, Waker)>,
    ahead_max: u64,
    backoff: u32,
    /// Fetched and wasted bytes at the last check.
    waste_checked: (u64, u64),
    /// Set during a query of the extents; there is one at a time.
    pub(crate) query_running: bool,
    /// Set when no fetch may start any more.
    pub(crate) closing: bool,
}

/// Planned fetch, with the slots that are assigned to it.
pub(crate) struct PlannedFetch {
    pub(crate) id: FetchId,
    pub(crate) stream: StreamId,
    pub(crate) pattern: Pattern,
    pub(crate) blocks: Range<Block>,
    pub(crate) slots: SmallVec<[SlotIndex; SLOTS_PER_FETCH]>,
    /// Memory for the blocks, in order.
    pub(crate) memory: SmallVec<[IoVec; SLOTS_PER_FETCH]>,
    /// Set if it is unknown whether there is data around the fetch.
    pub(crate) needs_extents: bool,
}

impl State {
    pub(crate) fn new(options: PrefetchOptions) -> Self {
        let memory = options.memory.as_usize();
        let tables = size_of::<Self>() + ReadHistory::BYTES + Extents::BYTES + TASK_BYTES;
        let slots = memory.saturating_sub(tables) / (BlockCache::SLOT_BYTES + StreamTable::STREAM_BYTES);
        let cache = BlockCache::new(slots);
        let streams = StreamTable::new(cache.len());
        Self {
            counts: PrefetchStatistics {
                memory: (tables + cache.len() * (BlockCache::SLOT_BYTES + StreamTable::STREAM_BYTES)) as u64,
                ..PrefetchStatistics::default()
            },
            cache,
            history: ReadHistory::new(),
            random_detector: RandomDetector::new(),
            streams,
            extents: Extents::new(),
            fetch_limit: FetchLimit::new(),
            queue: VecDeque::new(),
            running: Vec::new(),
            next_fetch: 0,
            waiting: Vec::new(),
            ahead_max: options.ahead_max.get(),
            backoff: 0,
            waste_checked: (0, 0),
            query_running: false,
            closing: false,
        }
    }

    /// Returns an empty state that continues the counters of `previous`, of which no fetch may be in flight.
    pub(crate) fn reset_from(previous: &mut Self, options: PrefetchOptions) -> Self {
        previous.invalidate_all();
        let mut state = Self::new(options);
        state.counts = PrefetchStatistics { memory: state.counts.memory, ..previous.counts };
        state.waste_checked = (previous.counts.fetched, previous.counts.wasted);
        // Each fetch has a number of its own.
        state.next_fetch = previous.next_fetch;
        state.waiting = std::mem::take(&mut previous.waiting);
        state.query_running = previous.query_running;
        state
    }

    pub(crate) fn statistics(&self) -> PrefetchStatistics {
        let counts = self.counts;
        PrefetchStatistics {
            unread: counts.fetched - counts.used - counts.wasted,
            streams: self.streams.active(),
            ..counts
        }
    }

    fn bounds(&self) -> StreamBounds {
        StreamBounds { ahead_max: self.ahead_max, memory: (self.cache.len() * SLOT_LEN) as u64, backoff: self.backoff }
    }

    /// Records a read of `blocks`, which neither this layer nor the one below had in memory; returns whether a fetch
    /// may start.
    pub(crate) fn record_miss(&mut self, blocks: &Range<Block>) -> bool {
        if let Some(id) = self.stream_of(blocks) {
            self.history.assign(blocks, id);
            self.queue_if_due(id);
        }
        self.history.record(blocks.clone());
        self.has_work()
    }

    /// Returns the stream to which a read of `blocks` belongs, which are not in memory.
    fn stream_of(&mut self, blocks: &Range<Block>) -> Option<StreamId> {
        let len = blocks.end - blocks.start;
        if !self.history.has_read_near(blocks) && self.slot_before(blocks).is_none() {
            return self.begin_strided(blocks);
        }
        if let Some(stream) = self.stream_near(blocks) {
            return Some(stream);
        }
        let evidence = ((len * 2).max(EVIDENCE_MIN) << self.backoff).min(EVIDENCE_MAX);
        let before = blocks.start.saturating_sub(evidence)..blocks.start;
        if before.end - before.start >= EVIDENCE_MIN && self.history.were_read(before) {
            self.begin(Pattern::Forward, blocks, 0)
        } else if self.history.were_read(blocks.end..blocks.end + evidence) {
            self.begin(Pattern::Backward, blocks, 0)
        } else {
            self.begin_strided(blocks)
        }
    }

    fn begin_strided(&mut self, blocks: &Range<Block>) -> Option<StreamId> {
        let step = self.history.step_to(blocks.start)?;
        let is_step = step.unsigned_abs() > blocks.end - blocks.start && self.backoff <= BACKOFF_MAX / 2;
        is_step.then(|| self.begin(Pattern::Strided, blocks, step)).flatten()
    }

    fn begin(&mut self, pattern: Pattern, blocks: &Range<Block>, step: i64) -> Option<StreamId> {
        let bounds = self.bounds();
        let stream = self.streams.begin(pattern, blocks, step, bounds, self.history.now())?;
        self.random_detector.record_stream_read();
        match pattern {
            Pattern::Forward => self.counts.streams_forward += 1,
            Pattern::Backward => self.counts.streams_backward += 1,
            Pattern::Strided => self.counts.streams_strided += 1,
        }
        Some(stream)
    }

    /// Returns the stream whose reader is near `blocks`.
    fn stream_near(&mut self, blocks: &Range<Block>) -> Option<StreamId> {
        let (bounds, next) = (self.bounds(), self.next_fetch);
        let in_memory = self.slot_before(blocks).map(|slot| self.cache.slot(slot).stream);
        let (first, last) = regions_around(blocks);
        let region_before = blocks.start.saturating_sub(1) / BLOCKS_PER_REGION;
        let around = [
            self.history.stream_at(region_before),
            self.history.stream_at(first),
            self.history.stream_at(last),
            in_memory,
        ];
        for id in around.into_iter().flatten() {
            if let Some(stream) = self.streams.get(id)
                && stream.is_near(blocks)
            {
                stream.record_miss(blocks, next, bounds);
                self.random_detector.record_stream_read();
                self.streams.touch(id, self.history.now());
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
    fn queue_if_due(&mut self, id: StreamId) {
        let bounds = self.bounds();
        self.streams.stop_idle(self.history.now(), bounds);
        let active = self.streams.active();
        if let Some(stream) = self.streams.get(id)
            && !stream.queued
            && stream.due_fetch(bounds, active).is_some()
        {
            stream.queued = true;
            self.queue.push_back(id);
        }
    }

    /// Records a read of `blocks` from memory, which got the blocks `bits` from a slot.
    pub(crate) fn record_use(&mut self, index: SlotIndex, bits: u8, blocks: &Range<Block>) {
        let slot = self.cache.slot_mut(index);
        let (new, id) = ((slot.unread & bits).count_ones(), slot.stream);
        slot.unread &= !bits;
        self.random_detector.record_stream_read();
        self.streams.touch(id, self.history.now());
        if new > 0 {
            self.counts.used += u64::from(new) << BLOCK_BITS;
            self.streams.record_use(id, new, blocks);
            self.history.assign(blocks, id);
            self.cache.update_list(index);
        }
        self.queue_if_due(id);
        if let Some((block, step)) = self.streams.stalled_step(id) {
            self.history.expect(block, step);
        }
    }

    /// Records that a read of `blocks` waits for a fetch into a slot.
    pub(crate) fn record_wait(&mut self, index: SlotIndex, fetch: FetchId, blocks: &Range<Block>) {
        let (id, bounds, next) = (self.cache.slot(index).stream, self.bounds(), self.next_fetch);
        self.random_detector.record_stream_read();
        if let Some(stream) = self.streams.get(id) {
            stream.record_wait(blocks, fetch, next, bounds);
        }
        self.streams.touch(id, self.history.now());
        self.history.assign(blocks, id);
        self.queue_if_due(id);
    }

    /// Removes `blocks` from memory.
    pub(crate) fn invalidate(&mut self, blocks: &Range<Block>) {
        let parts = parts_of(blocks);
        if parts.end - parts.start <= self.cache.len() as u64 {
            for part in parts {
                if let Some(index) = self.cache.find(part) {
                    self.invalidate_in_slot(index, blocks);
                }
            }
        } else {
            for index in 0..self.cache.len() as SlotIndex {
                if self.cache.holds_any(index, &parts) {
                    self.invalidate_in_slot(index, blocks);
                }
            }
        }
    }

    /// Removes all blocks from memory, and stops all streams.
    pub(crate) fn invalidate_all(&mut self) {
        self.invalidate(&(0..Block::MAX));
        self.queue.clear();
        self.streams.stop_all();
    }

    /// Removes the blocks that were fetched before fetch `limit` from memory.
    pub(crate) fn expire_before(&mut self, limit: FetchId) {
        for index in 0..self.cache.len() as SlotIndex {
            let slot = self.cache.slot(index);
            let is_old = |block: &usize| (slot.fetches[*block].wrapping_sub(limit) as i32) < 0;
            let old = (0..BLOCKS_PER_SLOT as usize).filter(is_old);
            let bits = slot.present & old.fold(0, |bits, block| bits | 1 << block);
            if bits != 0 {
                let dropped = self.cache.invalidate(index, bits);
                self.count_dropped(dropped);
            }
        }
    }

    /// Returns the number of the next fetch.
    pub(crate) fn next_fetch(&self) -> FetchId {
        self.next_fetch
    }

    fn invalidate_in_slot(&mut self, index: SlotIndex, blocks: &Range<Block>) {
        let bits = self.cache.bits(index, blocks);
        let dropped = self.cache.invalidate(index, bits);
        self.count_dropped(dropped);
    }

    fn count_dropped(&mut self, dropped: Option<DroppedUnread>) {
        if let Some(dropped) = dropped {
            self.counts.wasted += u64::from(dropped.wasted) << BLOCK_BITS;
            self.streams.record_wasted(dropped.stream, dropped.blocks);
        }
    }

    /// Adapts the caution to the share of wasted bytes.
    fn adapt_backoff(&mut self) {
        let (fetched, wasted) = (self.counts.fetched - self.waste_checked.0, self.counts.wasted - self.waste_checked.1);
        if fetched < WASTE_CHECK_BYTES {
            return;
        }
        self.waste_checked = (self.counts.fetched, self.counts.wasted);
        if wasted * 64 > fetched * WASTE_HIGH_64THS {
            self.backoff = (self.backoff + 1).min(BACKOFF_MAX);
        } else if wasted * 64 < fetched * WASTE_LOW_64THS {
            self.backoff = self.backoff.saturating_sub(1);
        }
    }

    /// Returns whether a fetch may start.
    #[inline]
    pub(crate) fn has_work(&self) -> bool {
        !self.queue.is_empty() && self.running.len() < self.fetch_limit.limit() && !self.closing
    }

    /// Plans the next fetch, if one may start.
    pub(crate) fn plan(&mut self, disk: u64, writes: &Writes) -> Option<PlannedFetch> {
        while self.has_work() {
            let id = self.queue.pop_front()?;
            let planned = self.plan_for(id, disk >> BLOCK_BITS, writes);
            if let Some(stream) = self.streams.get(id) {
                stream.queued = false;
            }
            if let Some(planned) = planned {
                self.queue_if_due(id);
                return Some(planned);
            }
        }
        None
    }

    fn plan_for(&mut self, id: StreamId, disk: Block, writes: &Writes) -> Option<PlannedFetch> {
        let bounds = self.bounds();
        // Each round without a fetch advances by a slot at least, so that there are few.
        for _ in 0..EVIDENCE_MAX {
            let active = self.streams.active();
            let stream = self.streams.get(id)?;
            let pattern = stream.pattern;
            let wanted = stream.due_fetch(bounds, active)?;
            let wanted = wanted.start.min(disk)..wanted.end.min(disk);
            if wanted.is_empty() {
                return None;
            }
            let (piece, is_missing) = self.first_piece(pattern, &wanted, writes);
            if !is_missing {
                if let Some(stream) = self.streams.get(id) {
                    stream.advance(&piece);
                }
                continue;
            }
            let planned = self.assign_slots(id, pattern, &piece)?;
            if let Some(stream) = self.streams.get(id) {
                stream.advance(&planned.blocks);
            }
            return Some(planned);
        }
        None
    }

    /// Returns the first piece of `wanted`, in the order of the pattern, whose blocks are all missing or all not.
    fn first_piece(&self, pattern: Pattern, wanted: &Range<Block>, writes: &Writes) -> (Range<Block>, bool) {
        let missing = |block: Block| {
            let part = block / BLOCKS_PER_SLOT;
            let bit = 1u8 << (block % BLOCKS_PER_SLOT);
            let cached = self.cache.find(part).map(|index| self.cache.slot(index));
            let is_present = cached.is_some_and(|slot| (slot.busy | slot.present) & bit != 0);
            let is_hole = matches!(self.extents.find(block), Some((_, false)));
            !is_present && !is_hole
        };
        let changing = writes.overlaps(wanted);
        let is_missing = |block: Block| missing(block) && !(changing && writes.overlaps(&(block..block + 1)));
        match pattern {
            Pattern::Backward => {
                let first = is_missing(wanted.end - 1);
                let len = wanted.clone().rev().take_while(|block| is_missing(*block) == first).count() as u64;
                (wanted.end - len..wanted.end, first)
            }
            _ => {
                let first = is_missing(wanted.start);
                let len = wanted.clone().take_while(|block| is_missing(*block) == first).count() as u64;
                (wanted.start..wanted.start + len, first)
            }
        }
    }

    /// Assigns slots to `wanted`, as many as are available.
    fn assign_slots(&mut self, stream: StreamId, pattern: Pattern, wanted: &Range<Block>) -> Option<PlannedFetch> {
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
                    self.streams.transfer(other, stream, unread);
                    index
                }
                None => {
                    let Some((index, dropped)) = self.cache.allocate(part, stream) else {
                        break;
                    };
                    self.count_dropped(dropped);
                    index
                }
            };
            let slot = self.cache.slot_mut(index);
            slot.in_flight |= bits;
            slot.busy |= bits;
            slot.unread |= bits;
            for block in (0..BLOCKS_PER_SLOT as usize).filter(|block| bits >> block & 1 != 0) {
                slot.fetches[block] = id;
            }
            self.cache.update_list(index);
            self.streams.record_fetch(stream, bits.count_ones().into());
            let first = part * BLOCKS_PER_SLOT;
            let in_slot = wanted.start.max(first)..wanted.end.min(first + BLOCKS_PER_SLOT);
            blocks = Some(match blocks {
                None => in_slot,
                Some(blocks) => blocks.start.min(in_slot.start)..blocks.end.max(in_slot.end),
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
        let needs_extents = !self.query_running && self.extents.find(blocks.start).is_none();
        self.query_running |= needs_extents;
        Some(PlannedFetch { id, stream, pattern, blocks, slots, memory, needs_extents })
    }

    /// Ends a fetch; returns the wakers of the reads that wait for it.
    pub(crate) fn end_fetch(&mut self, planned: &PlannedFetch, succeeded: bool) -> SmallVec<[Waker; 8]> {
        let mut arrived = 0;
        for index in &planned.slots {
            let all = self.cache.bits(*index, &planned.blocks);
            let slot = self.cache.slot_mut(*index);
            let bits = slot.in_flight & all;
            slot.in_flight &= !all;
            slot.busy &= !all;
            arrived += u64::from(bits.count_ones());
            if succeeded {
                slot.present |= bits;
                self.cache.update_list(*index);
            } else {
                let unread = slot.unread & bits;
                slot.unread &= !bits;
                let owner = slot.stream;
                self.cache.update_list(*index);
                self.streams.record_wasted(owner, unread.count_ones());
            }
        }
        if succeeded {
            let all = planned.blocks.end - planned.blocks.start;
            self.counts.fetched += all << BLOCK_BITS;
            self.counts.wasted += (all - arrived) << BLOCK_BITS;
        } else {
            self.counts.errors += 1;
            self.streams.stop(planned.stream);
        }
        self.adapt_backoff();
        self.running.retain(|running| *running != planned.id);
        self.queue_if_due(planned.stream);
        let waiting = self.waiting.extract_if(.., |(id, _)| *id == planned.id);
        waiting.map(|(_, waker)| waker).collect()
    }
}
