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
const AHEAD_FIRST: u64 = 32 << 10;

/// log2 of a divisor: a stream may be ahead by the initial distance, and by the bytes that its reader has read
/// divided by it.
const PROOF_BITS: u32 = 4;

/// The longest fetch, in bytes.
pub(crate) const FETCH_MAX: u64 = 128 << 10;

/// Bytes without a wait after which the distance shrinks by an eighth.
const CALM: u64 = 4 << 20;

/// Reads of the disk after which a stream that was not read again loses its share of the memory.
const FORSAKEN_AFTER: u32 = 1024;

/// Streams that are checked for being abandoned, whenever the memory does not suffice for all.
const FORSAKEN_LOOKS: usize = 2;

/// Streams that are checked in search of one to replace.
const LOOKS: usize = 8;

/// Identity of a stream. A new stream in the same entry has another serial.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StreamId {
    index: u16,
    serial: u16,
}

impl Default for StreamId {
    fn default() -> Self {
        Self {
            index: u16::MAX,
            serial: 0,
        }
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
    lost: u64,
    /// Bytes that were read, found in memory or not.
    read: u64,
    /// First fetch since the distance grew: waits for earlier ones do not let it grow again.
    grown: FetchId,
    calm: u64,
    /// Time of the last read, in reads of the disk.
    touched: u32,
    /// Set while the stream is queued for a fetch.
    pub(crate) queued: bool,
}

/// Bounds that apply to every stream.
#[derive(Clone, Copy)]
pub(crate) struct Bounds {
    /// The longest distance, in bytes.
    pub(crate) ahead_max: u64,
    /// Bytes of memory.
    pub(crate) memory: u64,
    /// Level of recent waste; 0 is the normal state.
    pub(crate) caution: u32,
}

/// All streams.
pub(crate) struct Streams {
    streams: Vec<Stream>,
    next: usize,
    /// Number of streams that are read and have data in memory.
    active: u64,
    /// Stream that was checked last for being abandoned.
    hand: usize,
}

impl Streams {
    pub(crate) const STREAM_BYTES: usize = size_of::<Stream>();

    pub(crate) fn new(count: usize) -> Self {
        Self {
            streams: vec![Stream::IDLE; count.clamp(1, 4096)],
            next: 0,
            active: 0,
            hand: 0,
        }
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
    pub(crate) fn give_up_forsaken(&mut self, now: u32, bounds: Bounds) {
        if self.active * bounds.ahead_max <= bounds.memory {
            return;
        }
        for _ in 0..FORSAKEN_LOOKS {
            self.hand = (self.hand + 1) % self.streams.len();
            let stream = &self.streams[self.hand];
            if stream.unread > 0 && now.wrapping_sub(stream.touched) > FORSAKEN_AFTER {
                let id = StreamId {
                    index: self.hand as u16,
                    serial: stream.serial,
                };
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
        bounds: Bounds,
        now: u32,
    ) -> Option<StreamId> {
        if (self.active + 1) * 2 * SLOT_LEN as u64 > bounds.memory {
            return None;
        }
        for _ in 0..LOOKS.min(self.streams.len()) {
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
            *stream = Stream {
                serial,
                pattern,
                step,
                step_blocks: len,
                at,
                front,
                touched: now,
                ..Stream::IDLE
            };
            stream.ahead = stream.first();
            return Some(StreamId {
                index: index as u16,
                serial,
            });
        }
        None
    }

    /// Records that a fetch of some blocks has started.
    pub(crate) fn fetched(&mut self, id: StreamId, blocks: u64) {
        let Some(stream) = self.get(id) else { return };
        let was = stream.unread;
        stream.unread += blocks << BLOCK_BITS;
        self.active += u64::from(was == 0 && blocks > 0);
    }

    /// Transfers unread blocks from one stream to another.
    pub(crate) fn give(&mut self, from: StreamId, to: StreamId, blocks: u32) {
        if from == to || blocks == 0 {
            return;
        }
        self.leave(from, blocks);
        self.fetched(to, blocks.into());
    }

    /// Records that unread blocks were read or dropped.
    pub(crate) fn leave(&mut self, id: StreamId, blocks: u32) -> Option<&mut Stream> {
        let stream = self.streams.get_mut(usize::from(id.index));
        let stream = stream.filter(|stream| stream.serial == id.serial)?;
        let was = stream.unread;
        stream.unread = was.saturating_sub(u64::from(blocks) << BLOCK_BITS);
        self.active -= u64::from(was > 0 && stream.unread == 0);
        Some(stream)
    }

    /// Records that the reader has read `blocks`, of which `new` for the first time.
    pub(crate) fn used(&mut self, id: StreamId, new: u32, blocks: &Range<Block>) {
        let Some(stream) = self.leave(id, new) else { return };
        stream.read += u64::from(new) << BLOCK_BITS;
        stream.calm += u64::from(new) << BLOCK_BITS;
        if stream.calm > CALM {
            stream.calm = 0;
            stream.ahead = (stream.ahead - stream.ahead / 8).max(stream.first());
        }
        stream.go_to(blocks);
    }

    /// Returns the expected position and the step of a strided stream whose fetched blocks were all read.
    pub(crate) fn stalled_step(&mut self, id: StreamId) -> Option<(Block, i64)> {
        let stream = self.get(id)?;
        (stream.pattern == Pattern::Strided && stream.unread == 0).then_some((stream.front, stream.step))
    }

    /// Stops a stream: nothing more is fetched for it.
    pub(crate) fn stop(&mut self, id: StreamId) {
        if let Some(stream) = self.leave(id, u32::MAX) {
            stream.serial = stream.serial.wrapping_add(1);
            stream.queued = false;
        }
    }

    /// Stops all streams.
    pub(crate) fn stop_all(&mut self) {
        for index in 0..self.streams.len() {
            let serial = self.streams[index].serial;
            self.stop(StreamId {
                index: index as u16,
                serial,
            });
        }
    }

    /// Records blocks that were fetched, or being fetched, in vain.
    pub(crate) fn lost(&mut self, id: StreamId, blocks: u32) {
        if let Some(stream) = self.leave(id, blocks) {
            stream.lost += u64::from(blocks) << BLOCK_BITS;
            stream.ahead = (stream.ahead / 2).max(stream.first());
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
        lost: 0,
        read: 0,
        grown: 0,
        calm: 0,
        touched: 0,
        queued: false,
    };

    /// Records a read of `blocks` that were not in memory; `next` is the next fetch.
    pub(crate) fn missed(&mut self, blocks: &Range<Block>, next: FetchId, bounds: Bounds) {
        self.read += (blocks.end - blocks.start) << BLOCK_BITS;
        if self.go_to(blocks) {
            self.late(next, next, bounds);
        }
    }

    /// Records that the reader waits for `fetch`, which gets some of `blocks`; `next` is the next fetch.
    pub(crate) fn waited(&mut self, blocks: &Range<Block>, fetch: FetchId, next: FetchId, bounds: Bounds) {
        self.go_to(blocks);
        self.late(fetch, next, bounds);
    }

    /// Lets the distance grow after the reader waited for or overtook a fetch; `next` is the next fetch.
    fn late(&mut self, fetch: FetchId, next: FetchId, bounds: Bounds) {
        self.calm = 0;
        // If another bound is lower, a longer distance has no effect.
        let is_what_counts = self.ahead <= self.allowance(bounds);
        if is_what_counts && fetch.wrapping_sub(self.grown) as i32 >= 0 {
            self.grown = next;
            self.ahead = (self.ahead * 2).min(bounds.ahead_max);
        }
    }

    /// Moves the reader's position past `blocks`; returns whether it was behind.
    fn go_to(&mut self, blocks: &Range<Block>) -> bool {
        let was = self.at;
        match self.pattern {
            Pattern::Forward => self.at = was.max(blocks.end),
            Pattern::Backward => self.at = was.min(blocks.start),
            Pattern::Strided if self.step > 0 => self.at = was.max(blocks.start),
            Pattern::Strided => self.at = was.min(blocks.start),
        }
        self.at != was
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
    fn allowance(&self, bounds: Bounds) -> u64 {
        (self.first() >> bounds.caution.min(1)) + (self.read >> (PROOF_BITS + bounds.caution))
    }

    /// Returns the shortest distance: two of the stream's reads, so that one is complete while the next is being
    /// fetched.
    fn first(&self) -> u64 {
        AHEAD_FIRST.max(self.step_blocks << (BLOCK_BITS + 1))
    }

    /// Returns the blocks of the next fetch, from the front on, if one is due.
    pub(crate) fn wanted(&mut self, bounds: Bounds, active: u64) -> Option<Range<Block>> {
        self.catch_up();
        let share = bounds.memory / active.max(1);
        let allowance = self.allowance(bounds);
        let credit = allowance.saturating_sub(self.unread + self.lost) >> BLOCK_BITS;
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
    fn catch_up(&mut self) {
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
