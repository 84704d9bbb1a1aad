//! Frames that a lane has sent, until the receiver has them.
//!
//! What compressed well is copied: its bytes are few, and its frame's buffers many. What did not keeps its frame, with the
//! bytes where they are. Both are bounded, [`Kept::is_full`].

use std::collections::VecDeque;
use std::io::{self, IoSlice};

use crate::encode::{Frame, SLICES_MAX};
use crate::link::Link;

/// Bytes of a frame that are copied, at most.
const COPIED_MAX: usize = 48 << 10;
/// Bytes that may be kept of copied frames.
const COPIES_MAX: usize = 4 << 20;
/// Frames that may be kept as they are: some 270 KiB on the link each, and three times that in memory.
const FRAMES_MAX: usize = 24;
/// All frames, so that small ones are told of in time.
const COUNT_MAX: usize = 1024;

/// Frames of whose memory others are made.
pub(super) type Spare = Vec<Box<Frame>>;

/// In the order in which they were sent.
#[derive(Default)]
pub(super) struct Kept {
    entries: VecDeque<Entry>,
    /// The number of the first of them, of all that the lane has sent.
    first: u64,
    copies: VecDeque<u8>,
    /// That are kept as they are.
    frames: usize,
}

enum Entry {
    /// So many bytes of the copies.
    Copied(usize),
    Frame(Box<Frame>),
}

impl Kept {
    /// Whether something must be confirmed first.
    pub(super) fn is_full(&self) -> bool {
        self.copies.len() >= COPIES_MAX || self.frames >= FRAMES_MAX || self.entries.len() >= COUNT_MAX
    }

    /// Keeps one, which a device may have encoded; gives it back if a copy is kept.
    pub(super) fn push(&mut self, mut frame: Box<Frame>, by_device: bool) -> Option<Box<Frame>> {
        let mut slices = [IoSlice::new(&[]); SLICES_MAX];
        let count = frame.slices(&mut slices);
        let len: usize = slices[..count].iter().map(|slice| slice.len()).sum();
        // What a device has made is in its memory, which it needs again.
        if len <= COPIED_MAX || by_device {
            slices[..count].iter().for_each(|slice| self.copies.extend(&**slice));
            self.entries.push_back(Entry::Copied(len));
            return Some(frame);
        }
        self.frames += 1;
        self.entries.push_back(Entry::Frame(frame));
        None
    }

    /// The receiver has so many frames of the lane; those that were kept for it are put into `free`.
    pub(super) fn release(&mut self, count: u64, free: &mut Spare) {
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

    /// Sends those again that a receiver lacks who has so many; how many these are.
    pub(super) fn repeat(&mut self, count: u64, link: &mut Link) -> io::Result<usize> {
        let has = usize::try_from(count.saturating_sub(self.first)).unwrap_or(usize::MAX);
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
            if number >= has {
                link.write_all_vectored(slices)?;
                sent += 1;
            }
        }
        Ok(sent)
    }
}
