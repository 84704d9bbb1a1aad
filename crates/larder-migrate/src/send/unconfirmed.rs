//! Frames that a lane has sent and the receiver has not confirmed.
//!
//! A frame that compressed well is copied: its bytes are few, and its buffers are large. A frame that did not is kept
//! uncopied, with its bytes in place. Both are bounded, see [`UnconfirmedFrames::is_full`].

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use crate::encode::{Frame, SLICES_MAX};
use crate::link::Link;

/// Maximum bytes of a frame that is copied.
const COPIED_FRAME_BYTES_MAX: usize = 48 << 10;
/// Maximum bytes of all copies.
const COPIES_BYTES_MAX: usize = 4 << 20;
/// Maximum frames that are kept uncopied: each some 270 KiB on the link, and three times that in memory.
const UNCOPIED_FRAMES_MAX: usize = 24;
/// Maximum frames kept in total, so that the confirmation of small frames is not delayed too long.
const ENTRIES_MAX: usize = 1024;

/// Free frames, whose memory is reused.
pub(super) type FreeFrames = Vec<Box<Frame>>;

/// Unconfirmed frames, in the order in which they were sent.
#[derive(Default)]
pub(super) struct UnconfirmedFrames {
    entries: VecDeque<Entry>,
    /// Number of the first entry, among all frames of the lane.
    first: u64,
    copies: VecDeque<u8>,
    /// Number of frames that are kept uncopied.
    frames: usize,
}

enum Entry {
    /// Number of bytes in the copies.
    Copied(usize),
    Frame(Box<Frame>),
}

impl UnconfirmedFrames {
    /// Returns true if a confirmation must come before another frame is kept.
    pub(super) fn is_full(&self) -> bool {
        self.copies.len() >= COPIES_BYTES_MAX || self.frames >= UNCOPIED_FRAMES_MAX || self.entries.len() >= ENTRIES_MAX
    }

    /// Keeps a frame; returns it if only a copy of its bytes is kept. `by_device` is true if a device encoded it.
    pub(super) fn push(&mut self, mut frame: Box<Frame>, by_device: bool) -> Option<Box<Frame>> {
        let mut slices = [IoSlice::new(&[]); SLICES_MAX];
        let count = frame.slices(&mut slices);
        let len: usize = slices[..count].iter().map(|slice| slice.len()).sum();
        // A device's output is always copied, because the device needs its memory again.
        if len <= COPIED_FRAME_BYTES_MAX || by_device {
            slices[..count].iter().for_each(|slice| self.copies.extend(&**slice));
            self.entries.push_back(Entry::Copied(len));
            return Some(frame);
        }
        self.frames += 1;
        self.entries.push_back(Entry::Frame(frame));
        None
    }

    /// Drops the frames that the receiver has confirmed, `count` in all; uncopied frames are moved to `free`.
    pub(super) fn release(&mut self, count: u64, free: &mut FreeFrames) {
        while self.first < count {
            match self.entries.pop_front() {
                Some(Entry::Copied(len)) => drop(self.copies.drain(..len)),
                Some(Entry::Frame(frame)) => {
                    self.frames -= 1;
                    free.push(frame);
                }
                None => return,
            }
            self.first += 1;
        }
    }

    /// Sends again the frames that a receiver with `count` frames lacks; returns how many.
    pub(super) fn resend(&mut self, count: u64, link: &mut Link) -> io::Result<usize> {
        let confirmed = usize::try_from(count.saturating_sub(self.first)).unwrap_or(usize::MAX);
        let (front, back) = self.copies.as_slices();
        let mut at = 0;
        let mut sent = 0;
        for (number, entry) in self.entries.iter_mut().enumerate() {
            let mut slices = [IoSlice::new(&[]); SLICES_MAX];
            let slices = match entry {
                Entry::Copied(len) => {
                    let (from, to) = (at, at + *len);
                    at = to;
                    let split = front.len();
                    slices[0] = IoSlice::new(&front[from.min(split)..to.min(split)]);
                    slices[1] = IoSlice::new(&back[from.saturating_sub(split)..to.saturating_sub(split)]);
                    &mut slices[..2]
                }
                Entry::Frame(frame) => {
                    let count = frame.slices(&mut slices);
                    &mut slices[..count]
                }
            };
            if number >= confirmed {
                link.write_all_vectored(slices)?;
                sent += 1;
            }
        }
        Ok(sent)
    }
}
