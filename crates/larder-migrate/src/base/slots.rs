//! Memory of the old versions: a slot of 4 KiB for each page.
//!
//! The memory is one mapping. The kernel allocates the used part on demand, 2 MiB at a time where it can: with faults
//! of 4 KiB, a tenth to a fifth of a migration's CPU time was spent on them. Slots are used from the first on, so no
//! more memory is allocated than is used.
//!
//! Invariant: the bytes of a slot are reached only through [`Slots::lock`], which locks the slot's whole chunk.

use std::ptr::NonNull;
use std::slice;
use std::sync::{Mutex, MutexGuard, PoisonError};

use larder_codec::PAGE;
use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Slots under one lock.
const CHUNK_SLOTS: u32 = 64;

/// Bytes of the slots, initially zeros.
pub struct Slots {
    /// Mapping of the slots; `None` if the kernel refused it.
    memory: Option<SlotMapping>,
    /// One lock per chunk.
    locks: Box<[Mutex<()>]>,
    len: u32,
}

/// Locked chunk of slots.
pub struct Chunk<'a> {
    slots: &'a mut [[u8; PAGE]],
    _lock: MutexGuard<'a, ()>,
}

impl Slots {
    /// Creates the slots that fit in `bytes`. No memory is allocated yet.
    #[must_use]
    pub fn new(bytes: u64) -> Self {
        let len = u32::try_from(bytes / PAGE as u64).unwrap_or(u32::MAX);
        let locks = (0..len.div_ceil(CHUNK_SLOTS)).map(|_| Mutex::new(())).collect();
        let memory = SlotMapping::map(len as usize * PAGE);
        Self { memory, locks, len }
    }

    /// Returns the number of slots.
    #[must_use]
    pub const fn len(&self) -> u32 {
        self.len
    }

    /// Returns true if there are no slots.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Locks and returns the chunk of `slot`. Returns `None` if there is no such slot, or no memory for any.
    pub fn lock(&self, slot: u32) -> Option<Chunk<'_>> {
        let memory = self.memory.as_ref().filter(|_| slot < self.len)?;
        let chunk = slot / CHUNK_SLOTS;
        let lock = self.locks[chunk as usize].lock().unwrap_or_else(PoisonError::into_inner);
        let first = chunk * CHUNK_SLOTS;
        let count = CHUNK_SLOTS.min(self.len - first) as usize;
        // SAFETY: the slots lie in the mapping, which lives as long as `self`; bytes need no alignment and have no
        // invalid values; the lock, which the chunk holds as long as the slice, excludes all other access.
        let slots = unsafe {
            let first = memory.base.as_ptr().add(first as usize * PAGE);
            slice::from_raw_parts_mut(first.cast(), count)
        };
        Some(Chunk { slots, _lock: lock })
    }
}

impl Chunk<'_> {
    /// Returns a slot of this chunk.
    pub fn page(&mut self, slot: u32) -> &mut [u8; PAGE] {
        &mut self.slots[(slot % CHUNK_SLOTS) as usize]
    }
}

/// Private anonymous mapping, initially zeros.
struct SlotMapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping belongs to no thread; `Slots` guards all access by its locks.
unsafe impl Send for SlotMapping {}
// SAFETY: the mapping belongs to no thread; `Slots` guards all access by its locks.
unsafe impl Sync for SlotMapping {}

impl SlotMapping {
    fn map(len: usize) -> Option<Self> {
        // The kernel refuses an empty mapping.
        let len = len.max(PAGE);
        let (protection, flags) = (ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE | MapFlags::NORESERVE);
        // SAFETY: a new mapping at an address of the kernel's choice.
        let base = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), len, protection, flags) }.ok()?;
        // SAFETY: the mapping that was just made. The advice is optional: without huge pages, small ones do.
        let _ = unsafe { rustix::mm::madvise(base, len, Advice::LinuxHugepage) };
        Some(Self { base: NonNull::new(base.cast())?, len })
    }
}

impl Drop for SlotMapping {
    fn drop(&mut self) {
        // SAFETY: the mapping made by `SlotMapping::map`; nothing borrows from it any more.
        let _ = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
    }
}
