//! Copies of the guest's writes in bounded memory: a guest that writes more at once waits.
//!
//! A copy belongs to the request that writes it to the cache device. Its room is free again when that request has
//! ended, also if the caller that waited for the request was cancelled (see [`crate::watch`]). Room is reserved
//! before anything is allocated for a write, and the holder of room waits for no other write.

use std::cell::RefCell;
use std::ops::Deref;
use std::rc::Rc;

use larder_block::budget::{Budget, Share};
use larder_block::{AlignedBuf, WriteBuf};

/// Bytes that all copies together may take.
const BYTES_MAX: usize = 32 << 20;

/// Length of the shortest copy in bytes. Buffers of this length are reused; [`KEPT_MAX`] bounds how many are
/// retained.
const LEN_MIN: usize = 64 << 10;
const KEPT_MAX: usize = 16;

/// Bounded memory for copies.
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

/// Reserved room for one copy.
pub(crate) struct Room {
    _share: Share,
    kept: Rc<RefCell<Vec<AlignedBuf>>>,
}

/// Copy of a guest's write. The buffer may be longer than the write.
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
    /// Reserves room for a copy of `len` bytes, in the order of arrival. Returns `None` as soon as `is_over`, which
    /// waiting tasks check again after [`Copies::wake`].
    pub(crate) async fn reserve(&self, len: usize, is_over: impl Fn() -> bool) -> Option<Room> {
        let share = self.bytes.take(len.max(LEN_MIN), is_over).await?;
        let kept = Rc::clone(&self.kept);
        Some(Room { _share: share, kept })
    }

    /// Makes waiting tasks check their `is_over` again.
    pub(crate) fn wake(&self) {
        self.bytes.wake();
    }
}

impl Room {
    /// Copies `buffer`, for which the room was reserved.
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
