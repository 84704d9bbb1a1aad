//! Copies of what guests write, in memory that is bounded: a guest that writes more at once waits for it.
//!
//! A copy belongs to the request that writes it to the cache device, and its room is free again when that request has
//! ended, also if the caller that waited for it has gone (see [`crate::watch`]). Room is reserved before anything is allocated for
//! a write, and nobody who has it waits for another write.

use std::cell::RefCell;
use std::ops::Deref;
use std::rc::Rc;

use larder_block::budget::{Budget, Share};
use larder_block::{AlignedBuf, WriteBuf};

/// Bytes of all copies at the same time.
const BYTES_MAX: usize = 32 << 20;

/// A copy takes as much at least; buffers of this length are kept to be used again, so many at most.
const LEN_MIN: usize = 64 << 10;
const KEPT_MAX: usize = 16;

/// The memory for copies.
pub(crate) struct Copies {
    bytes: Rc<Budget>,
    kept: Rc<RefCell<Vec<AlignedBuf>>>,
}

impl Default for Copies {
    fn default() -> Self {
        Self {
            bytes: Budget::new(BYTES_MAX),
            kept: Rc::default(),
        }
    }
}

/// Room for one copy.
pub(crate) struct Room {
    _share: Share,
    kept: Rc<RefCell<Vec<AlignedBuf>>>,
}

/// What a guest has written. It may be longer.
pub(crate) struct WriteCopy {
    memory: Option<AlignedBuf>,
    room: Room,
}

impl Deref for WriteCopy {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.memory.as_deref().unwrap_or_default()
    }
}

impl Drop for WriteCopy {
    fn drop(&mut self) {
        let mut kept = self.room.kept.borrow_mut();
        if let Some(memory) = self.memory.take()
            && memory.len() == LEN_MIN
            && kept.len() < KEPT_MAX
        {
            kept.push(memory);
        }
    }
}

impl Copies {
    /// Room for a copy of `len` bytes, once it is this caller's turn; `None` if `is_over` meanwhile, which [`Copies::wake`]
    /// has those who wait look at.
    pub(crate) async fn reserve(&self, len: usize, is_over: impl Fn() -> bool) -> Option<Room> {
        let share = self.bytes.take(len.max(LEN_MIN), is_over).await?;
        let kept = Rc::clone(&self.kept);
        Some(Room { _share: share, kept })
    }

    /// Has those who wait look whether it is over.
    pub(crate) fn wake(&self) {
        self.bytes.wake();
    }
}

impl Room {
    /// A copy of `buffer`, for which the room was reserved.
    pub(crate) fn copy(self, buffer: WriteBuf<'_>) -> Rc<WriteCopy> {
        let kept = match buffer.len() <= LEN_MIN {
            true => self.kept.borrow_mut().pop(),
            false => None,
        };
        let mut memory = kept.unwrap_or_else(|| AlignedBuf::zeroed(buffer.len().max(LEN_MIN)));
        buffer.copy_to_slice(&mut memory[..buffer.len()]);
        Rc::new(WriteCopy {
            memory: Some(memory),
            room: self,
        })
    }
}
