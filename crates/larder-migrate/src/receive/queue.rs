//! Queue of a channel's bytes between the lanes, which decode them in any order, and the writer, which passes them to
//! QEMU in their order.
//!
//! Invariants:
//! - The writer gets no byte twice, and none after a gap.
//! - The waiting bytes and those in the writer's hands are at most the window, in at most [`CHANNEL_FRAMES_MAX`]
//!   pieces, and take at most twice their size in memory.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, PoisonError};

use super::{ReceiveError, lock};
use crate::wire::{CHANNEL_FRAMES_MAX, FrameHeader};

/// Queue of the bytes of a channel, in pieces that arrive in any order.
pub(super) struct ChannelQueue {
    pub(super) number: u16,
    window: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// Waiting pieces by the offset of their first byte, which is never below `next`.
    pieces: BTreeMap<u64, Vec<u8>>,
    /// Offset of the next byte for the writer.
    next: u64,
    /// Number of bytes that QEMU has taken.
    taken: u64,
    /// Part of `taken` that was reported to the sender.
    reported: u64,
    /// Number of taken pieces that were not reported to the sender.
    unreported_pieces: usize,
    /// Total bytes of the channel, once the sender has closed it.
    total: Option<u64>,
    /// Buffers for reuse.
    spare: Vec<Vec<u8>>,
    opened: bool,
    stopped: bool,
    /// Set if QEMU takes nothing more; further bytes are dropped.
    refused: bool,
    /// Set once QEMU has closed the channel.
    closed: bool,
}

pub(super) enum QueueItem {
    Bytes(Vec<u8>),
    End,
}

impl ChannelQueue {
    /// Maximum buffers for reuse.
    const SPARE_MAX: usize = 16;
    /// Bytes taken by QEMU after which the sender gets a report, even if more bytes wait; a quarter of the window, if
    /// less.
    const REPORT_BYTES: u64 = 1 << 20;

    pub(super) fn new(number: u16, window: u32) -> Self {
        Self { number, window: window.into(), state: Mutex::default(), changed: Condvar::new() }
    }

    /// Returns an empty buffer for a frame, which must lie within the window.
    pub(super) fn buffer(&self, header: &FrameHeader) -> Result<Vec<u8>, ReceiveError> {
        let mut state = lock(&self.state);
        let end = header.offset + u64::from(header.raw_len);
        let most = (state.taken + self.window).min(state.total.unwrap_or(u64::MAX));
        if header.offset < state.next || end > most {
            return Err(ReceiveError::OutsideWindow { channel: self.number, begin: header.offset, end, most });
        }
        Ok(state.spare.pop().unwrap_or_default())
    }

    pub(super) fn put(&self, offset: u64, bytes: Vec<u8>) -> Result<(), ReceiveError> {
        let mut state = lock(&self.state);
        if state.refused {
            return Ok(());
        }
        let end = offset + bytes.len() as u64;
        let fits_before =
            state.pieces.range(..=offset).next_back().is_none_or(|(at, piece)| at + piece.len() as u64 <= offset);
        let fits_after = state.pieces.range(offset..).next().is_none_or(|(at, _)| end <= *at);
        if offset < state.next || !fits_before || !fits_after {
            return Err(ReceiveError::OutsideWindow { channel: self.number, begin: offset, end, most: state.next });
        }
        if state.pieces.len() >= CHANNEL_FRAMES_MAX {
            return Err(ReceiveError::TooManyFrames { channel: self.number });
        }
        // A few waiting bytes must not hold the buffer of a whole frame.
        let bytes = if bytes.len() < bytes.capacity() / 2 {
            let small = bytes.as_slice().to_vec();
            state.recycle(bytes);
            small
        } else {
            bytes
        };
        state.pieces.insert(offset, bytes);
        if offset == state.next {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Waits for the next bytes; returns `None` when the session is over. Calls `report` with the number of bytes that
    /// QEMU has taken, for a report to the sender: at intervals, and before each wait.
    pub(super) fn next(&self, report: impl Fn(u64)) -> Option<QueueItem> {
        let mut state = lock(&self.state);
        loop {
            if state.stopped {
                return None;
            }
            let next = state.next;
            let piece = state.pieces.remove(&next);
            let enough = Self::REPORT_BYTES.min(self.window / 4);
            if state.taken > state.reported
                && (piece.is_none()
                    || state.taken - state.reported >= enough
                    || state.unreported_pieces >= CHANNEL_FRAMES_MAX / 4)
            {
                report(state.taken);
                state.reported = state.taken;
                state.unreported_pieces = 0;
            }
            if let Some(bytes) = piece {
                state.next += bytes.len() as u64;
                return Some(QueueItem::Bytes(bytes));
            }
            if state.total == Some(next) {
                return Some(QueueItem::End);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Records that QEMU has taken these bytes, and reuses their buffer.
    pub(super) fn mark_taken(&self, bytes: Vec<u8>) {
        let mut state = lock(&self.state);
        state.taken += bytes.len() as u64;
        state.unreported_pieces += 1;
        state.recycle(bytes);
    }

    /// Marks the channel as opened by the sender; returns false if it was opened before.
    pub(super) fn mark_opened(&self) -> bool {
        !std::mem::replace(&mut lock(&self.state).opened, true)
    }

    /// Marks the channel as closed by QEMU.
    pub(super) fn mark_closed(&self) {
        lock(&self.state).closed = true;
    }

    /// Marks the channel as closed by the sender, after `total` bytes.
    pub(super) fn close(&self, total: u64) -> Result<(), ReceiveError> {
        let mut state = lock(&self.state);
        let last = state.pieces.last_key_value().map_or(state.next, |(at, piece)| at + piece.len() as u64);
        if state.total.is_some() || total < last {
            return Err(ReceiveError::UnexpectedMessage(format!(
                "the end of channel {} at {total} bytes, of which {last} have arrived, or its second end",
                self.number
            )));
        }
        state.total = Some(total);
        self.changed.notify_all();
        Ok(())
    }

    /// Returns the channel's number if bytes are still to be delivered or QEMU has not closed it.
    pub(super) fn open_channel(&self) -> Option<u16> {
        let state = lock(&self.state);
        let delivered = state.refused || state.total == Some(state.taken);
        (!delivered || !state.closed).then_some(self.number)
    }

    pub(super) fn refuse(&self) {
        let mut state = lock(&self.state);
        state.refused = true;
        state.closed = true;
        state.pieces.clear();
    }

    pub(super) fn stop(&self) {
        lock(&self.state).stopped = true;
        self.changed.notify_all();
    }
}

impl State {
    fn recycle(&mut self, bytes: Vec<u8>) {
        if self.spare.len() < ChannelQueue::SPARE_MAX {
            self.spare.push(bytes);
        }
    }
}
