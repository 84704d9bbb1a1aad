//! Copies of the guest's writes in bounded memory: a guest that writes more at once waits.
//!
//! A copy belongs to the request that writes it to the cache device. Its room is free again when that request has
//! ended, also if the caller that waited for the request was cancelled (see [`crate::watchdog`]). Room is reserved
//! before anything is allocated for a write, and the holder of room waits for no other write.

use std::cell::RefCell;
use std::ops::Deref;
use std::rc::Rc;

use larder_block::semaphore::{Semaphore, SemaphorePermit};
use larder_block::{AlignedBuf, WriteBuf};

/// Bytes that all copies together may take.
const COPY_BYTES_MAX: usize = 32 << 20;

/// Length of the shortest copy in bytes. Buffers of this length are reused; [`FREE_BUFFERS_MAX`] bounds how many are
/// retained.
const COPY_LEN_MIN: usize = 64 << 10;
const FREE_BUFFERS_MAX: usize = 16;

/// Bounded memory for copies.
pub(crate) struct CopyPool {
    bytes: Rc<Semaphore>,
    free_buffers: Rc<RefCell<Vec<AlignedBuf>>>,
}

impl Default for CopyPool {
    fn default() -> Self {
        Self { bytes: Semaphore::new(COPY_BYTES_MAX), free_buffers: Rc::default() }
    }
}

/// Reserved room for one copy.
pub(crate) struct CopyReservation {
    _share: SemaphorePermit,
    free_buffers: Rc<RefCell<Vec<AlignedBuf>>>,
}

/// Copy of a guest's write. The buffer may be longer than the write.
pub(crate) struct WriteCopy {
    memory: Option<AlignedBuf>,
    room: CopyReservation,
}

impl Deref for WriteCopy {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.memory.as_deref().unwrap_or_default()
    }
}

impl Drop for WriteCopy {
    fn drop(&mut self) {
        let mut free = self.room.free_buffers.borrow_mut();
        if let Some(memory) = self.memory.take()
            && memory.len() == COPY_LEN_MIN
            && free.len() < FREE_BUFFERS_MAX
        {
            free.push(memory);
        }
    }
}

impl CopyPool {
    /// Reserves room for a copy of `len` bytes, in the order of arrival. Returns `None` as soon as `is_over`, which
    /// waiting tasks check again after [`CopyPool::wake`].
    pub(crate) async fn reserve(&self, len: usize, is_over: impl Fn() -> bool) -> Option<CopyReservation> {
        let share = self.bytes.acquire(len.max(COPY_LEN_MIN), is_over).await?;
        let free_buffers = Rc::clone(&self.free_buffers);
        Some(CopyReservation { _share: share, free_buffers })
    }

    /// Makes waiting tasks check their `is_over` again.
    pub(crate) fn wake(&self) {
        self.bytes.wake();
    }
}

impl CopyReservation {
    /// Copies `buffer`, for which the room was reserved.
    pub(crate) fn copy(self, buffer: WriteBuf<'_>) -> Rc<WriteCopy> {
        let reused = match buffer.len() <= COPY_LEN_MIN {
            true => self.free_buffers.borrow_mut().pop(),
            false => None,
        };
        let mut memory = reused.unwrap_or_else(|| AlignedBuf::zeroed(buffer.len().max(COPY_LEN_MIN)));
        buffer.copy_to_slice(&mut memory[..buffer.len()]);
        Rc::new(WriteCopy { memory: Some(memory), room: self })
    }
}
