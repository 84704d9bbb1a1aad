//! The streams that are read ahead of, and how far each one is.
//!
//! A stream has a distance that it wants to be ahead of its reader. It grows when the reader has to wait for a fetch or
//! overtakes it, shrinks when what was fetched was not wanted, and a little whenever all goes well for a while: so it
//! finds what the device's latency and the reader's pace call for. It is held down by what the stream has been good for
//! so far, by the memory that there is for each stream, and by the user's limit.
//!
//! (Linux's read-ahead doubles a window; AMP, Gill and Bathen, FAST 2007, adapts degree and trigger by such events.)

use std::ops::Range;

use crate::cache::FetchId;
use crate::units::{BLOCK_BITS, Block, SLOT_LEN};

/// The first distance, in bytes.
const AHEAD_FIRST: u64 = 32 << 10;

/// A stream is ahead of its reader by no more than the first distance and this part of what it has read.
const PROOF_BITS: u32 = 4;

/// The longest fetch, in bytes.
pub(crate) const FETCH_MAX: u64 = 128 << 10;

/// After so many bytes without a wait the distance shrinks by an eighth.
const CALM: u64 = 4 << 20;

/// A stream that so many reads of the disk have passed by has no share of the memory any more.
const FORSAKEN_AFTER: u32 = 1024;

/// How many streams are looked at to find one that is forsaken, whenever the memory is not enough for all.
const FORSAKEN_LOOKS: usize = 2;

/// How many streams are looked at to find one to replace.
const LOOKS: usize = 8;

/// Which stream; a stream that is replaced has another serial.
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

/// How a stream goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pattern {
    /// To higher offsets.
    Forward,
    /// To lower offsets.
    Backward,
    /// By steps over what is not read.
    Strided,
}

/// A stream.
#[derive(Clone)]
pub(crate) struct Stream {
    serial: u16,
    pub(crate) pattern: Pattern,
    /// For `Strided`: from one read to the next, in blocks, and how many blocks each has.
    step: i64,
    step_blocks: u64,
    /// Where the reader is: the end of what it has read (for `Backward`, the start).
    at: Block,
    /// What is fetched next: the first block (for `Backward`, the end).
    pub(crate) front: Block,
    /// How far ahead of the reader the front is to be, in bytes.
    ahead: u64,
    /// Bytes that were fetched, or are on their way, and not read.
    unread: u64,
    /// Bytes that were fetched, or on their way, and dropped unread.
    lost: u64,
    /// Bytes that its reader has read, found in memory or not.
    read: u64,
    /// Who waits for a fetch before this one says nothing new: the distance has grown since.
    grown: FetchId,
    calm: u64,
    /// When it was read last, in reads of the disk.
    touched: u32,
    /// It waits for a fetch to be started.
    pub(crate) queued: bool,
}

/// What bounds all streams.
#[derive(Clone, Copy)]
pub(crate) struct Bounds {
    /// No stream is further ahead, in bytes.
    pub(crate) ahead_max: u64,
    /// Bytes of memory.
    pub(crate) memory: u64,
    /// How much has been fetched for nothing lately; 0 is fine.
    pub(crate) caution: u32,
}

/// All streams.
pub(crate) struct Streams {
    streams: Vec<Stream>,
    next: usize,
    /// Streams for which there is something in memory, and that are read.
    active: u64,
    /// The one that is looked at next for whether it is.
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

    /// How many have something in memory, and are read.
    pub(crate) fn active(&self) -> u64 {
        self.active
    }

    /// Gives up streams that nobody reads any more, if the share of each stream holds those down that are read. `now` is
    /// in reads of the disk. What was fetched for them stays in memory until something else needs the room.
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

    /// A stream was read, at `now` in reads of the disk.
    pub(crate) fn touch(&mut self, id: StreamId, now: u32) {
        if let Some(stream) = self.get(id) {
            stream.touched = now;
        }
    }

    /// A stream whose last read was of `blocks`, in the place of one that has nothing in memory.
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

    /// Blocks were set out to be fetched.
    pub(crate) fn fetched(&mut self, id: StreamId, blocks: u64) {
        let Some(stream) = self.get(id) else { return };
        let was = stream.unread;
        stream.unread += blocks << BLOCK_BITS;
        self.active += u64::from(was == 0 && blocks > 0);
    }

    /// Unread blocks of one stream are another's now.
    pub(crate) fn give(&mut self, from: StreamId, to: StreamId, blocks: u32) {
        if from == to || blocks == 0 {
            return;
        }
        self.leave(from, blocks);
        self.fetched(to, blocks.into());
    }

    /// Blocks that were unread are read, or gone.
    pub(crate) fn leave(&mut self, id: StreamId, blocks: u32) -> Option<&mut Stream> {
        let stream = self.streams.get_mut(usize::from(id.index));
        let stream = stream.filter(|stream| stream.serial == id.serial)?;
        let was = stream.unread;
        stream.unread = was.saturating_sub(u64::from(blocks) << BLOCK_BITS);
        self.active -= u64::from(was > 0 && stream.unread == 0);
        Some(stream)
    }

    /// The reader has read `new` blocks for the first time, and `blocks` in all.
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

    /// Where a strided stream goes on whose reader has read all that was fetched.
    pub(crate) fn stalled_step(&mut self, id: StreamId) -> Option<(Block, i64)> {
        let stream = self.get(id)?;
        (stream.pattern == Pattern::Strided && stream.unread == 0).then_some((stream.front, stream.step))
    }

    /// Nothing is fetched for it any more.
    pub(crate) fn stop(&mut self, id: StreamId) {
        if let Some(stream) = self.leave(id, u32::MAX) {
            stream.serial = stream.serial.wrapping_add(1);
            stream.queued = false;
        }
    }

    /// Nothing is fetched any more for any of those that there are.
    pub(crate) fn stop_all(&mut self) {
        for index in 0..self.streams.len() {
            let serial = self.streams[index].serial;
            self.stop(StreamId {
                index: index as u16,
                serial,
            });
        }
    }

    /// Blocks were fetched, or set out to be, for nothing.
    pub(crate) fn lost(&mut self, id: StreamId, blocks: u32) {
        if let Some(stream) = self.leave(id, blocks) {
            stream.lost += u64::from(blocks) << BLOCK_BITS;
            stream.ahead = (stream.ahead / 2).max(stream.first());
        }
    }
}

impl Stream {
    /// One that there is not.
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

    /// The reader has read `blocks`, which were not in memory; the next fetch is `next`.
    pub(crate) fn missed(&mut self, blocks: &Range<Block>, next: FetchId, bounds: Bounds) {
        self.read += (blocks.end - blocks.start) << BLOCK_BITS;
        if self.go_to(blocks) {
            self.late(next, next, bounds);
        }
    }

    /// The reader waits for `fetch` to bring some of `blocks`; the next fetch is `next`.
    pub(crate) fn waited(&mut self, blocks: &Range<Block>, fetch: FetchId, next: FetchId, bounds: Bounds) {
        self.go_to(blocks);
        self.late(fetch, next, bounds);
    }

    /// The reader had to wait for a fetch, or was faster; the next fetch is `next`.
    fn late(&mut self, fetch: FetchId, next: FetchId, bounds: Bounds) {
        self.calm = 0;
        // If something else holds it down, a longer distance is no help.
        let is_what_counts = self.ahead <= self.allowance(bounds);
        if is_what_counts && fetch.wrapping_sub(self.grown) as i32 >= 0 {
            self.grown = next;
            self.ahead = (self.ahead * 2).min(bounds.ahead_max);
        }
    }

    /// The reader has read `blocks`; whether it is further than before.
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

    /// Whether `blocks`, which are not in memory, are what this stream would read about now.
    pub(crate) fn is_near(&self, blocks: &Range<Block>) -> bool {
        let near = FETCH_MAX >> BLOCK_BITS;
        match self.pattern {
            Pattern::Forward | Pattern::Backward => blocks.start.abs_diff(self.at) <= near,
            Pattern::Strided => blocks.start == self.front,
        }
    }

    /// How many bytes may have been fetched and not been read: what is fetched for nothing is bounded by what was not.
    fn allowance(&self, bounds: Bounds) -> u64 {
        (self.first() >> bounds.caution.min(1)) + (self.read >> (PROOF_BITS + bounds.caution))
    }

    /// The least distance: two of its reads, so that one of them is all there while the next is on its way.
    fn first(&self) -> u64 {
        AHEAD_FIRST.max(self.step_blocks << (BLOCK_BITS + 1))
    }

    /// The next fetch, if there is one to be made now: up to so many blocks, from the front on.
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

    /// The front is never behind the reader.
    fn catch_up(&mut self) {
        match self.pattern {
            Pattern::Forward => self.front = self.front.max(self.at),
            Pattern::Backward => self.front = self.front.min(self.at),
            Pattern::Strided => {}
        }
    }

    /// Of what was wanted, `blocks` are dealt with: fetched, or not worth it.
    pub(crate) fn advance(&mut self, blocks: &Range<Block>) {
        self.front = match self.pattern {
            Pattern::Forward => blocks.end,
            Pattern::Backward => blocks.start,
            // At the disk's end there is nothing to be wanted any more.
            Pattern::Strided => self.front.checked_add_signed(self.step).unwrap_or(Block::MAX >> 16),
        };
    }
}
