//! The bytes of a channel between the lanes, which decode them in any order, and the writer, which hands them to QEMU in
//! theirs.
//!
//! Invariants:
//! - No byte is given to the writer twice, and none after a gap.
//! - What waits, and what the writer has in hand, is no more than the window, in no more than [`CHANNEL_FRAMES_MAX`] pieces,
//!   and takes at most twice its bytes of memory.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, PoisonError};

use super::{ReceiveError, lock};
use crate::wire::{CHANNEL_FRAMES_MAX, FrameHeader};

/// The bytes of a channel, in pieces that may come in any order.
pub(super) struct Queue {
    pub(super) number: u16,
    window: u64,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// By the offset of their first byte, none of which is below `next`.
    pieces: BTreeMap<u64, Vec<u8>>,
    /// The offset of the next byte for the writer.
    next: u64,
    /// Bytes that QEMU took.
    taken: u64,
    /// Of these, those that the sender knows of.
    told: u64,
    /// Pieces of which it does not.
    untold_pieces: usize,
    /// Bytes in all, once the sender has closed the channel.
    total: Option<u64>,
    /// Buffers to use again.
    spare: Vec<Vec<u8>>,
    opened: bool,
    stopped: bool,
    /// QEMU takes nothing more; what comes is dropped.
    refused: bool,
    /// QEMU has closed it.
    closed: bool,
}

pub(super) enum Next {
    Bytes(Vec<u8>),
    End,
}

impl Queue {
    /// Buffers that are kept for use again.
    const SPARE_MAX: usize = 16;
    /// Bytes that QEMU takes before the sender is told, if more waits for QEMU; a quarter of the window, if that is less.
    const TELL_EVERY: u64 = 1 << 20;

    pub(super) fn new(number: u16, window: u32) -> Self {
        Self {
            number,
            window: window.into(),
            state: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// An empty buffer for a frame, which must lie within the window.
    pub(super) fn buffer(&self, header: &FrameHeader) -> Result<Vec<u8>, ReceiveError> {
        let mut state = lock(&self.state);
        let end = header.offset + u64::from(header.raw_len);
        let most = (state.taken + self.window).min(state.total.unwrap_or(u64::MAX));
        if header.offset < state.next || end > most {
            return Err(ReceiveError::Window {
                channel: self.number,
                begin: header.offset,
                end,
                most,
            });
        }
        Ok(state.spare.pop().unwrap_or_default())
    }

    pub(super) fn put(&self, offset: u64, bytes: Vec<u8>) -> Result<(), ReceiveError> {
        let mut state = lock(&self.state);
        if state.refused {
            return Ok(());
        }
        let end = offset + bytes.len() as u64;
        let fits_before = state
            .pieces
            .range(..=offset)
            .next_back()
            .is_none_or(|(at, piece)| at + piece.len() as u64 <= offset);
        let fits_after = state.pieces.range(offset..).next().is_none_or(|(at, _)| end <= *at);
        if offset < state.next || !fits_before || !fits_after {
            return Err(ReceiveError::Window {
                channel: self.number,
                begin: offset,
                end,
                most: state.next,
            });
        }
        if state.pieces.len() >= CHANNEL_FRAMES_MAX {
            return Err(ReceiveError::Frames { channel: self.number });
        }
        // A few bytes that wait must not hold the room of a whole frame.
        let bytes = if bytes.len() < bytes.capacity() / 2 {
            let small = bytes.as_slice().to_vec();
            state.spare(bytes);
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

    /// Waits for what comes next; `None` when the session is over. `tell` is to tell the sender how many bytes QEMU took:
    /// at times, and before anything is waited for.
    pub(super) fn next(&self, tell: impl Fn(u64)) -> Option<Next> {
        let mut state = lock(&self.state);
        loop {
            if state.stopped {
                return None;
            }
            let next = state.next;
            let piece = state.pieces.remove(&next);
            let enough = Self::TELL_EVERY.min(self.window / 4);
            if state.taken > state.told
                && (piece.is_none()
                    || state.taken - state.told >= enough
                    || state.untold_pieces >= CHANNEL_FRAMES_MAX / 4)
            {
                tell(state.taken);
                state.told = state.taken;
                state.untold_pieces = 0;
            }
            if let Some(bytes) = piece {
                state.next += bytes.len() as u64;
                return Some(Next::Bytes(bytes));
            }
            if state.total == Some(next) {
                return Some(Next::End);
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// QEMU took these bytes.
    pub(super) fn taken(&self, bytes: Vec<u8>) {
        let mut state = lock(&self.state);
        state.taken += bytes.len() as u64;
        state.untold_pieces += 1;
        state.spare(bytes);
    }

    /// The sender opens the channel; `false` if it has before.
    pub(super) fn open(&self) -> bool {
        !std::mem::replace(&mut lock(&self.state).opened, true)
    }

    /// QEMU has closed it.
    pub(super) fn closed(&self) {
        lock(&self.state).closed = true;
    }

    /// The sender has closed the channel after so many bytes.
    pub(super) fn close(&self, total: u64) -> Result<(), ReceiveError> {
        let mut state = lock(&self.state);
        let last = state
            .pieces
            .last_key_value()
            .map_or(state.next, |(at, piece)| at + piece.len() as u64);
        if state.total.is_some() || total < last {
            return Err(ReceiveError::Message(format!(
                "the end of channel {} at {total} bytes, of which {last} have come, or a second end",
                self.number
            )));
        }
        state.total = Some(total);
        self.changed.notify_all();
        Ok(())
    }

    /// Its number, if something is still to be delivered or QEMU has not closed it.
    pub(super) fn is_open(&self) -> Option<u16> {
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
    fn spare(&mut self, bytes: Vec<u8>) {
        if self.spare.len() < Queue::SPARE_MAX {
            self.spare.push(bytes);
        }
    }
}
