//! Streams that are read ahead, and the progress of each.
//!
//! Each stream has a distance by which it should be ahead of its reader. The distance grows when the reader waits for
//! a fetch or overtakes it. It shrinks when fetched data was not used, and a little after a while without waits. So
//! it adapts to the device's latency and the reader's pace. It is bounded by the amount that the stream has read, by
//! the stream's share of the memory, and by the user's limit.
//!
//! (Linux's read-ahead doubles a window; AMP, Gill and Bathen, FAST 2007, adapts degree and trigger by such events.)

use std::ops::Range;

use crate::cache::FetchId;
use crate::units::{BLOCK_BITS, Block, SLOT_LEN};

/// Initial distance, in bytes.
const AHEAD_INITIAL: u64 = 32 << 10;

/// log2 of a divisor: a stream may be ahead by the initial distance, and by the bytes that its reader has read
/// divided by it.
const ALLOWANCE_SHIFT: u32 = 4;

/// The longest fetch, in bytes.
pub(crate) const FETCH_MAX: u64 = 128 << 10;

/// Bytes without a wait after which the distance shrinks by an eighth.
const SHRINK_AFTER_BYTES: u64 = 4 << 20;

/// Reads of the disk after which a stream that was not read again loses its share of the memory.
const IDLE_READS_MAX: u32 = 1024;

/// Streams that are checked for being abandoned, whenever the memory does not suffice for all.
const IDLE_SCANS_MAX: usize = 2;

/// Streams that are checked in search of one to replace.
const REPLACE_SCANS_MAX: usize = 8;

/// Identity of a stream. A new stream in the same entry has another serial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamId {
    index: u16,
    serial: u16,
}

impl Default for StreamId {
    fn default() -> Self {
        Self { index: u16::MAX, serial: 0 }
    }
}

/// Order in which a stream reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// Reads continue at higher offsets.
    Forward,
    /// Reads continue at lower offsets.
    Backward,
    /// Reads continue at a constant step, with unread data in between.
    Strided,
}

/// Detected stream of reads.
#[derive(Clone)]
pub(crate) struct Stream {
    serial: u16,
    pub(crate) pattern: Pattern,
    /// Distance between the starts of reads in blocks, for `Strided`; `step_blocks` is the length of each read.
    step: i64,
    step_blocks: u64,
    /// End of the data that was read (for `Backward`, the start).
    at: Block,
    /// First block of the next fetch (for `Backward`, the end).
    pub(crate) front: Block,
    /// Distance by which `front` should be ahead of the reader, in bytes.
    ahead: u64,
    /// Bytes that were fetched or are in flight, and not read.
    unread: u64,
    /// Bytes that were fetched or in flight, and dropped unread.
    wasted: u64,
    /// Bytes that were read, found in memory or not.
    read: u64,
    /// First fetch since the distance grew: waits for earlier ones do not let it grow again.
    grown_at_fetch: FetchId,
    bytes_without_wait: u64,
    /// Time of the last read, in reads of the disk.
    touched: u32,
    /// Set while the stream is queued for a fetch.
    pub(crate) queued: bool,
}

/// Bounds that apply to every stream.
#[derive(Clone, Copy)]
pub(crate) struct StreamBounds {
    /// The longest distance, in bytes.
    pub(crate) ahead_max: u64,
    /// Bytes of memory.
    pub(crate) memory: u64,
    /// Level of recent waste; 0 is the normal state.
    pub(crate) backoff: u32,
}

/// All streams.
pub(crate) struct StreamTable {
    streams: Vec<Stream>,
    next: usize,
    /// Number of streams that are read and have data in memory.
    active: u64,
    /// Stream that was checked last for being abandoned.
    hand: usize,
}

impl StreamTable {
    pub(crate) const STREAM_BYTES: usize = size_of::<Stream>();

    pub(crate) fn new(count: usize) -> Self {
        Self { streams: vec![Stream::IDLE; count.clamp(1, 4096)], next: 0, active: 0, hand: 0 }
    }

    pub(crate) fn get(&mut self, id: StreamId) -> Option<&mut Stream> {
        let stream = self.streams.get_mut(usize::from(id.index))?;
        (stream.serial == id.serial).then_some(stream)
    }

    /// Returns the number of streams that are read and have data in memory.
    pub(crate) fn active(&self) -> u64 {
        self.active
    }

    /// Stops some streams that are no longer read, if the memory is too small for all streams. `now` is in reads of
    /// the disk. The streams' data stays in memory until its slots are needed.
    pub(crate) fn stop_idle(&mut self, now: u32, bounds: StreamBounds) {
        if self.active * bounds.ahead_max <= bounds.memory {
            return;
        }
        for _ in 0..IDLE_SCANS_MAX {
            self.hand = (self.hand + 1) % self.streams.len();
            let stream = &self.streams[self.hand];
            if stream.unread > 0 && now.wrapping_sub(stream.touched) > IDLE_READS_MAX {
                let id = StreamId { index: self.hand as u16, serial: stream.serial };
                self.stop(id);
            }
        }
    }

    /// Records that a stream was read at `now`, in reads of the disk.
    pub(crate) fn touch(&mut self, id: StreamId, now: u32) {
        if let Some(stream) = self.get(id) {
            stream.touched = now;
        }
    }

    /// Begins a stream whose last read was of `blocks`, in place of one without data in memory.
    pub(crate) fn begin(
        &mut self,
        pattern: Pattern,
        blocks: &Range<Block>,
        step: i64,
        bounds: StreamBounds,
        now: u32,
    ) -> Option<StreamId> {
        if (self.active + 1) * 2 * SLOT_LEN as u64 > bounds.memory {
            return None;
        }
        for _ in 0..REPLACE_SCANS_MAX.min(self.streams.len()) {
            let index = self.next;
            self.next = (index + 1) % self.streams.len();
            let stream = &mut self.streams[index];
            if stream.unread > 0 || stream.queued {
                continue;
            }
            let len = blocks.end - blocks.start;
            let (at, front) = match pattern {
                Pattern::Forward => (blocks.end, blocks.end),
                Pattern::Backward => (blocks.start, blocks.start),
                Pattern::Strided => (blocks.start, blocks.start.checked_add_signed(step)?),
            };
            let serial = stream.serial.wrapping_add(1);
            *stream = Stream { serial, pattern, step, step_blocks: len, at, front, touched: now, ..Stream::IDLE };
            stream.ahead = stream.ahead_min();
            return Some(StreamId { index: index as u16, serial });
        }
        None
    }

    /// Records that a fetch of some blocks has started.
    pub(crate) fn record_fetch(&mut self, id: StreamId, blocks: u64) {
        let Some(stream) = self.get(id) else { return };
        let before = stream.unread;
        stream.unread += blocks << BLOCK_BITS;
        self.active += u64::from(before == 0 && blocks > 0);
    }

    /// Transfers unread blocks from one stream to another.
    pub(crate) fn transfer(&mut self, from: StreamId, to: StreamId, blocks: u32) {
        if from == to || blocks == 0 {
            return;
        }
        self.remove_unread(from, blocks);
        self.record_fetch(to, blocks.into());
    }

    /// Records that unread blocks were read or dropped.
    pub(crate) fn remove_unread(&mut self, id: StreamId, blocks: u32) -> Option<&mut Stream> {
        let stream = self.streams.get_mut(usize::from(id.index));
        let stream = stream.filter(|stream| stream.serial == id.serial)?;
        let before = stream.unread;
        stream.unread = before.saturating_sub(u64::from(blocks) << BLOCK_BITS);
        self.active -= u64::from(before > 0 && stream.unread == 0);
        Some(stream)
    }

    /// Records that the reader has read `blocks`, of which `new` for the first time.
    pub(crate) fn record_use(&mut self, id: StreamId, new: u32, blocks: &Range<Block>) {
        let Some(stream) = self.remove_unread(id, new) else {
            return;
        };
        stream.read += u64::from(new) << BLOCK_BITS;
        stream.bytes_without_wait += u64::from(new) << BLOCK_BITS;
        if stream.bytes_without_wait > SHRINK_AFTER_BYTES {
            stream.bytes_without_wait = 0;
            stream.ahead = (stream.ahead - stream.ahead / 8).max(stream.ahead_min());
        }
        stream.advance_reader(blocks);
    }

    /// Returns the expected position and the step of a strided stream whose fetched blocks were all read.
    pub(crate) fn stalled_step(&mut self, id: StreamId) -> Option<(Block, i64)> {
        let stream = self.get(id)?;
        (stream.pattern == Pattern::Strided && stream.unread == 0).then_some((stream.front, stream.step))
    }

    /// Stops a stream: nothing more is fetched for it.
    pub(crate) fn stop(&mut self, id: StreamId) {
        if let Some(stream) = self.remove_unread(id, u32::MAX) {
            stream.serial = stream.serial.wrapping_add(1);
            stream.queued = false;
        }
    }

    /// Stops all streams.
    pub(crate) fn stop_all(&mut self) {
        for index in 0..self.streams.len() {
            let serial = self.streams[index].serial;
            self.stop(StreamId { index: index as u16, serial });
        }
    }

    /// Records blocks that were fetched, or being fetched, in vain.
    pub(crate) fn record_wasted(&mut self, id: StreamId, blocks: u32) {
        if let Some(stream) = self.remove_unread(id, blocks) {
            stream.wasted += u64::from(blocks) << BLOCK_BITS;
            stream.ahead = (stream.ahead / 2).max(stream.ahead_min());
        }
    }
}

impl Stream {
    /// Entry without a stream.
    const IDLE: Self = Self {
        serial: 0,
        pattern: Pattern::Forward,
        step: 0,
        step_blocks: 0,
        at: 0,
        front: 0,
        ahead: 0,
        unread: 0,
        wasted: 0,
        read: 0,
        grown_at_fetch: 0,
        bytes_without_wait: 0,
        touched: 0,
        queued: false,
    };

    /// Records a read of `blocks` that were not in memory; `next` is the next fetch.
    pub(crate) fn record_miss(&mut self, blocks: &Range<Block>, next: FetchId, bounds: StreamBounds) {
        self.read += (blocks.end - blocks.start) << BLOCK_BITS;
        if self.advance_reader(blocks) {
            self.grow_distance(next, next, bounds);
        }
    }

    /// Records that the reader waits for `fetch`, which gets some of `blocks`; `next` is the next fetch.
    pub(crate) fn record_wait(&mut self, blocks: &Range<Block>, fetch: FetchId, next: FetchId, bounds: StreamBounds) {
        self.advance_reader(blocks);
        self.grow_distance(fetch, next, bounds);
    }

    /// Lets the distance grow after the reader waited for or overtook a fetch; `next` is the next fetch.
    fn grow_distance(&mut self, fetch: FetchId, next: FetchId, bounds: StreamBounds) {
        self.bytes_without_wait = 0;
        // If another bound is lower, a longer distance has no effect.
        let is_binding = self.ahead <= self.allowance(bounds);
        if is_binding && fetch.wrapping_sub(self.grown_at_fetch) as i32 >= 0 {
            self.grown_at_fetch = next;
            self.ahead = (self.ahead * 2).min(bounds.ahead_max);
        }
    }

    /// Moves the reader's position past `blocks`; returns whether it was behind.
    fn advance_reader(&mut self, blocks: &Range<Block>) -> bool {
        let before = self.at;
        match self.pattern {
            Pattern::Forward => self.at = before.max(blocks.end),
            Pattern::Backward => self.at = before.min(blocks.start),
            Pattern::Strided if self.step > 0 => self.at = before.max(blocks.start),
            Pattern::Strided => self.at = before.min(blocks.start),
        }
        self.at != before
    }

    /// Returns whether `blocks`, which are not in memory, are near the stream's position.
    pub(crate) fn is_near(&self, blocks: &Range<Block>) -> bool {
        let near = FETCH_MAX >> BLOCK_BITS;
        match self.pattern {
            Pattern::Forward | Pattern::Backward => blocks.start.abs_diff(self.at) <= near,
            Pattern::Strided => blocks.start == self.front,
        }
    }

    /// Returns how many bytes may be fetched and unread or lost: the waste is bounded by a share of the bytes read.
    fn allowance(&self, bounds: StreamBounds) -> u64 {
        (self.ahead_min() >> bounds.backoff.min(1)) + (self.read >> (ALLOWANCE_SHIFT + bounds.backoff))
    }

    /// Returns the shortest distance: two of the stream's reads, so that one is complete while the next is being
    /// fetched.
    fn ahead_min(&self) -> u64 {
        AHEAD_INITIAL.max(self.step_blocks << (BLOCK_BITS + 1))
    }

    /// Returns the blocks of the next fetch, from the front on, if one is due.
    pub(crate) fn due_fetch(&mut self, bounds: StreamBounds, active: u64) -> Option<Range<Block>> {
        self.move_front_to_reader();
        let share = bounds.memory / active.max(1);
        let allowance = self.allowance(bounds);
        let credit = allowance.saturating_sub(self.unread + self.wasted) >> BLOCK_BITS;
        let ahead = self.ahead.min(allowance).min(share).min(bounds.ahead_max);
        let ahead_blocks = ahead >> BLOCK_BITS;
        let most = match self.pattern {
            Pattern::Strided => self.step_blocks,
            _ => (ahead_blocks / 2).clamp(1, FETCH_MAX >> BLOCK_BITS),
        };
        if credit < most || self.unread + (most << BLOCK_BITS) > share {
            return None;
        }
        match self.pattern {
            Pattern::Forward => {
                let end = self.at + ahead_blocks;
                let room = end.saturating_sub(self.front);
                (room >= most).then(|| self.front..self.front + most)
            }
            Pattern::Backward => {
                let start = self.at.saturating_sub(ahead_blocks);
                let room = self.front.saturating_sub(start);
                let least = most.min(self.front);
                (room >= least && least > 0).then(|| self.front - least..self.front)
            }
            Pattern::Strided => {
                let steps = self.front.abs_diff(self.at) / self.step.unsigned_abs().max(1);
                (steps * self.step_blocks <= ahead_blocks && credit >= self.step_blocks)
                    .then(|| self.front..self.front + self.step_blocks)
            }
        }
    }

    /// Moves the front to the reader if the reader has overtaken it.
    fn move_front_to_reader(&mut self) {
        match self.pattern {
            Pattern::Forward => self.front = self.front.max(self.at),
            Pattern::Backward => self.front = self.front.min(self.at),
            Pattern::Strided => {}
        }
    }

    /// Moves the front past `blocks`, which are being fetched or need not be.
    pub(crate) fn advance(&mut self, blocks: &Range<Block>) {
        self.front = match self.pattern {
            Pattern::Forward => blocks.end,
            Pattern::Backward => blocks.start,
            // Nothing is wanted past the disk's end.
            Pattern::Strided => self.front.checked_add_signed(self.step).unwrap_or(Block::MAX >> 16),
        };
    }
}
