//! A connection of the source's QEMU, and how what goes over it ends.

use std::collections::VecDeque;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::lock;
use crate::stream::{self, Blocks, Parser};
use crate::wire::{CHANNEL_FRAMES_MAX, FRAME_RAW_MAX};

/// One connection of QEMU's.
pub(super) struct Channel {
    pub(super) number: u16,
    pub(super) socket: Arc<UnixStream>,
    reading: Mutex<Reading>,
    /// The last that it has said.
    pub(super) returned: Mutex<Tail>,
}

/// The last bytes of a stream.
#[derive(Default)]
pub(super) struct Tail([u8; 8]);

impl Tail {
    /// What QEMU says last on a return path (`MIG_RP_MSG_SHUT`: be16 1, be16 4, be32 0) once it has loaded all.
    const LOADED: [u8; 8] = [0, 1, 0, 4, 0, 0, 0, 0];

    pub(super) fn take(&mut self, bytes: &[u8]) {
        let bytes = &bytes[bytes.len().saturating_sub(self.0.len())..];
        self.0.copy_within(bytes.len().., 0);
        let from = self.0.len() - bytes.len();
        self.0[from..].copy_from_slice(bytes);
    }

    pub(super) fn says_loaded(&self) -> bool {
        self.0 == Self::LOADED
    }
}

pub(super) struct Reading {
    pub(super) parser: Parser,
    /// Read, but not yet part of a frame.
    pub(super) left_over: Vec<u8>,
    /// Bytes that are part of frames.
    pub(super) offset: u64,
    /// Bytes that the destination's QEMU has taken.
    pub(super) delivered: u64,
    /// Where the frames end that it has not.
    pub(super) under_way: VecDeque<u64>,
    /// Nobody reads until more is delivered.
    pub(super) paused: bool,
    /// QEMU has closed it, and the receiver was told.
    pub(super) ended: bool,
    /// The destination's QEMU has closed it.
    pub(super) closed: bool,
    /// Before the source's.
    pub(super) closed_first: bool,
    /// With bytes to come that it does not take.
    pub(super) refused: bool,
    done: bool,
}

impl Reading {
    /// Whether it has just come to its end for both QEMUs: there is nothing more to read, to deliver, or to bring back.
    pub(super) fn is_done_now(&mut self) -> bool {
        let delivered = self.refused || self.delivered == self.offset;
        let was_done = self.done;
        self.done = self.ended && self.closed && delivered;
        self.done && !was_done
    }

    /// So many bytes more are in a frame.
    pub(super) fn framed(&mut self, len: usize) {
        self.offset += len as u64;
        self.under_way.push_back(self.offset);
    }

    /// The destination's QEMU has taken so many bytes from the beginning; how many more than before. `None`: so many it
    /// cannot have, or had before.
    pub(super) fn delivered(&mut self, bytes: u64) -> Option<u64> {
        if bytes > self.offset {
            return None;
        }
        let more = bytes.checked_sub(self.delivered)?;
        self.delivered = bytes;
        while self.under_way.front().is_some_and(|&end| end <= bytes) {
            self.under_way.pop_front();
        }
        Some(more)
    }

    /// Whether the receiver may have no room for another frame.
    pub(super) fn must_pause(&self, window: u32) -> bool {
        let bytes = self.offset - self.delivered + FRAME_RAW_MAX as u64;
        bytes > window.into() || self.under_way.len() >= CHANNEL_FRAMES_MAX
    }
}

impl Channel {
    /// That QEMU has just opened.
    pub(super) fn new(number: u16, socket: Arc<UnixStream>, blocks: &Blocks) -> Self {
        Self {
            number,
            socket,
            reading: Mutex::new(Reading {
                parser: Parser::new(blocks),
                left_over: Vec::new(),
                offset: 0,
                delivered: 0,
                under_way: VecDeque::new(),
                paused: false,
                ended: false,
                closed: false,
                closed_first: false,
                refused: false,
                done: false,
            }),
            returned: Mutex::default(),
        }
    }

    /// Why the migration that this channel was the main one of has not ended well; `None` if it has, or if that cannot be
    /// known. The parser is believed only as far as it has understood all.
    pub(super) fn broke_off(&self) -> Option<&'static str> {
        let reading = self.reading();
        let facts = reading.parser.facts();
        let is_main = matches!(facts.channel, stream::Channel::Main | stream::Channel::Resumed);
        if !is_main || facts.losses > 0 || facts.colo {
            return None;
        }
        let answers = facts.return_path || facts.postcopy_resumed;
        let well = if answers {
            lock(&self.returned).says_loaded()
        } else {
            facts.ram_ended && !reading.refused
        };
        match (well, reading.closed_first || reading.refused) {
            (true, _) => None,
            (false, true) => Some("the destination's QEMU has closed its end, or has ended"),
            (false, false) => Some("the source's QEMU has cancelled it, given it up, or ended"),
        }
    }

    pub(super) fn reading(&self) -> MutexGuard<'_, Reading> {
        self.reading.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_came_last_is_known_however_it_came() {
        let said = [&[9; 30][..], &Tail::LOADED].concat();
        for piece in 1..=said.len() {
            let mut tail = Tail::default();
            for bytes in said.chunks(piece) {
                assert!(!tail.says_loaded());
                tail.take(bytes);
            }
            assert!(tail.says_loaded(), "{piece}");
            tail.take(&[]);
            assert!(tail.says_loaded());
            tail.take(&[0]);
            assert!(!tail.says_loaded());
        }
    }
}
