//! The memory of old versions: a slot of 4 KiB for each.
//!
//! It is one mapping, of which the kernel backs with memory what is used, 2 MiB at a time where it can: with faults of
//! 4 KiB a tenth to a fifth of a migration's CPU time went there. Slots are given out from the first on, so no more of it
//! is backed than is used.
//!
//! Invariant: the bytes of a slot are reached only through [`Slots::lock`], which locks those around it.

use std::ptr::NonNull;
use std::slice;
use std::sync::{Mutex, MutexGuard, PoisonError};

use larder_codec::PAGE;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Slots that are locked at a time.
const CHUNK_SLOTS: u32 = 64;

/// The bytes of the slots, of zeros at first.
pub struct Slots {
    /// `None`: the process may not have so much.
    memory: Option<Memory>,
    /// Of each chunk.
    locks: Box<[Mutex<()>]>,
    len: u32,
}

/// A chunk of slots that is being read and changed.
pub struct Chunk<'a> {
    slots: &'a mut [[u8; PAGE]],
    _lock: MutexGuard<'a, ()>,
}

impl Slots {
    /// As many as fit `bytes`, none of which takes memory yet.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let len = u32::try_from(bytes / PAGE as u64).unwrap_or(u32::MAX);
        let locks = (0..len.div_ceil(CHUNK_SLOTS)).map(|_| Mutex::new(())).collect();
        let memory = Memory::of(len as usize * PAGE);
        Self { memory, locks, len }
    }

    /// How many there are.
    #[must_use]
    pub const fn len(&self) -> u32 {
        self.len
    }

    /// Whether there are none.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The chunk that `slot` lies in; `None` if there is no such slot, or no memory for any.
    pub fn lock(&self, slot: u32) -> Option<Chunk<'_>> {
        let memory = self.memory.as_ref().filter(|_| slot < self.len)?;
        let chunk = slot / CHUNK_SLOTS;
        let lock = self.locks[chunk as usize]
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let first = chunk * CHUNK_SLOTS;
        let count = CHUNK_SLOTS.min(self.len - first) as usize;
        // SAFETY: the slots lie in the mapping, which lives as long as `self`; bytes have no alignment and any value; the
        // lock, which the chunk holds as long as the slice, keeps all others from them.
        let slots = unsafe {
            let first = memory.base.as_ptr().add(first as usize * PAGE);
            slice::from_raw_parts_mut(first.cast(), count)
        };
        Some(Chunk { slots, _lock: lock })
    }
}

impl Chunk<'_> {
    /// A slot of this chunk.
    pub fn page(&mut self, slot: u32) -> &mut [u8; PAGE] {
        &mut self.slots[(slot % CHUNK_SLOTS) as usize]
    }
}

/// A private mapping of zeros.
struct Memory {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: it is memory, which no thread owns; who may read and change it is for `Slots` to say.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    fn of(len: usize) -> Option<Self> {
        // A mapping of nothing is none.
        let len = len.max(PAGE);
        let (how, flags) = (
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        );
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, how, flags) }.ok()?;
        // SAFETY: that mapping. Where the kernel has no huge pages the others serve.
        let _ = unsafe { rustix::mm::madvise(base, len, Advice::LinuxHugepage) };
        Some(Self {
            base: NonNull::new(base.cast())?,
            len,
        })
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: the mapping that was made, of which nothing is borrowed any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
