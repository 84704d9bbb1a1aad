//! Pool of request buffers of a server.

use std::cell::{Cell, RefCell};
use std::ops::{Deref, DerefMut};
use std::rc::Rc;

use larder_block::AlignedBuf;
use larder_block::nbd::PAYLOAD_LEN_MAX;

/// Smallest buffer, in bytes.
const BUFFER_BYTES_MIN: usize = 4096;

/// Number of size classes: powers of two from [`BUFFER_BYTES_MIN`] to the longest payload.
const SIZE_CLASSES: usize = (PAYLOAD_LEN_MAX as usize / BUFFER_BYTES_MIN).ilog2() as usize + 1;

/// Bytes that the pool retains for reuse at most.
const FREE_BYTES_MAX: usize = 64 << 20;

/// Free buffers, by size class.
#[derive(Default)]
pub(super) struct Buffers {
    free: RefCell<[Vec<AlignedBuf>; SIZE_CLASSES]>,
    free_bytes: Cell<usize>,
}

/// Buffer of a pool, returned to it on drop. It contains the data of its previous user, so it must be filled before
/// it is exposed.
pub(super) struct Buffer {
    /// Memory of the buffer; `None` only during the drop.
    memory: Option<AlignedBuf>,
    len: usize,
    class: usize,
    pool: Rc<Buffers>,
}

fn class_of(len: usize) -> usize {
    let size = len.max(BUFFER_BYTES_MIN).next_power_of_two();
    (size / BUFFER_BYTES_MIN).ilog2() as usize
}

/// Returns the memory that a buffer of `len` bytes takes, in bytes.
pub(super) fn buffer_bytes(len: usize) -> usize {
    BUFFER_BYTES_MIN << class_of(len)
}

impl Buffers {
    /// Takes a buffer of `len` bytes, at most the longest payload.
    pub(super) fn take(self: &Rc<Self>, len: usize) -> Buffer {
        assert!(len <= PAYLOAD_LEN_MAX as usize);
        let class = class_of(len);
        let memory = self.free.borrow_mut()[class].pop();
        let memory = match memory {
            Some(memory) => {
                self.free_bytes.set(self.free_bytes.get() - memory.len());
                memory
            }
            None => AlignedBuf::zeroed(buffer_bytes(len)),
        };
        Buffer { memory: Some(memory), len, class, pool: Rc::clone(self) }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let Some(memory) = self.memory.take() else {
            return;
        };
        let free_bytes = self.pool.free_bytes.get() + memory.len();
        if free_bytes <= FREE_BYTES_MAX {
            self.pool.free_bytes.set(free_bytes);
            self.pool.free.borrow_mut()[self.class].push(memory);
        }
    }
}

impl Deref for Buffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.memory.as_deref().map_or(&[], |memory| &memory[..self.len])
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        let len = self.len;
        self.memory.as_deref_mut().map_or(&mut [], |memory| &mut memory[..len])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_reused_and_pool_bounded() {
        let pool = Rc::new(Buffers::default());
        assert_eq!(buffer_bytes(1), 4096);
        assert_eq!(buffer_bytes(4097), 8192);
        assert_eq!(buffer_bytes(PAYLOAD_LEN_MAX as usize), 32 << 20);
        let buffer = pool.take(5000);
        assert_eq!(buffer.len(), 5000);
        let at = buffer.as_ptr();
        drop(buffer);
        assert_eq!(pool.free_bytes.get(), 8192);
        assert_eq!(pool.take(8000).as_ptr(), at, "the same memory again");
        let many: Vec<_> = (0..5).map(|_| pool.take(32 << 20)).collect();
        drop(many);
        assert!(pool.free_bytes.get() <= FREE_BYTES_MAX);
    }
}
