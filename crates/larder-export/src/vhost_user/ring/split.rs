//! Split layout: descriptor table, available ring, used ring (virtio 1.2, section 2.7).

use std::sync::atomic::{AtomicU16, AtomicU32, Ordering, fence};

use larder_block::IoVec;

use super::{
    DESC_BYTES, DESC_F_INDIRECT, DESC_F_NEXT, Descriptor, DescriptorChain, Head, RingError, RingLayout, RingPosition,
    event_passed, follow_indirect, read_descriptor,
};
use crate::vhost_user::memory::{GuestMemory, MemoryError};
use crate::vhost_user::message::RingAddresses;

const AVAIL_F_NO_INTERRUPT: u16 = 1;
const USED_F_NO_NOTIFY: u16 = 1;

/// Largest distance from `next_used` to the recorded last interrupt: not less than the largest ring, so that every
/// index a guest can still wait for is after it, and small enough that the index cannot wrap.
const INTERRUPT_DISTANCE_MAX: u16 = super::RING_SIZE_MAX as u16;

/// Split ring. Its pointers are into guest memory that its owner keeps mapped, checked for size and alignment.
pub struct SplitRing {
    size: u16,
    event_index: bool,
    descriptors: *const u8,
    /// Available ring: flags, idx, ring\[size\], used_event: u16 each.
    available: *mut u16,
    /// Used ring: flags, idx: u16; then (id, len): u32 each.
    used: *mut u16,
    /// Index of the next available chain; also the value stored as avail_event after the used ring.
    next_available: u16,
    next_used: u16,
    /// `next_used` at the last interrupt, or [`INTERRUPT_DISTANCE_MAX`] before now if that is later. `None`: a previous
    /// server pushed chains and may have been killed before it interrupted. The guest's event index is then not
    /// sufficient, so the guest is interrupted.
    last_interrupt: Option<u16>,
}

impl SplitRing {
    pub(super) fn new(
        memory: &GuestMemory,
        layout: RingLayout,
        addresses: &RingAddresses,
        position: RingPosition,
    ) -> Result<Self, MemoryError> {
        let size = u64::from(layout.size);
        let descriptors = memory.ring_part("the descriptor table", addresses.descriptors, size * DESC_BYTES, 16)?;
        let available = memory.ring_part("the available ring", addresses.driver, 6 + 2 * size, 2)?;
        let used = memory.ring_part("the used ring", addresses.device, 6 + 8 * size, 4)?;
        let mut ring = Self {
            size: layout.size as u16,
            event_index: layout.event_index,
            descriptors,
            available: available.cast(),
            used: used.cast(),
            next_available: position.available,
            next_used: 0,
            last_interrupt: None,
        };
        ring.next_used = ring.used_word(1).load(Ordering::Relaxed);
        Ok(ring)
    }

    fn available_word(&self, index: usize) -> &AtomicU16 {
        // SAFETY: `index` is at most size + 2, inside the part that `new` checked, aligned, and mapped as long as
        // self lives.
        unsafe { AtomicU16::from_ptr(self.available.add(index)) }
    }

    fn used_word(&self, index: usize) -> &AtomicU16 {
        // SAFETY: as above; only 0, 1 and the avail_event after the ring are used.
        unsafe { AtomicU16::from_ptr(self.used.add(index)) }
    }

    fn mask(&self, index: u16) -> usize {
        // The size is a power of two.
        usize::from(index & (self.size - 1))
    }

    pub(super) fn has_available(&self) -> bool {
        self.available_word(1).load(Ordering::Acquire) != self.next_available
    }

    #[inline]
    pub(super) fn pop_avail(
        &mut self,
        memory: &GuestMemory,
        chain: &mut DescriptorChain,
    ) -> Result<Option<Head>, RingError> {
        let available = self.available_word(1).load(Ordering::Acquire);
        let waiting = available.wrapping_sub(self.next_available);
        if waiting == 0 {
            return Ok(None);
        }
        if waiting > self.size {
            return Err(RingError::AvailableIndex { from: self.next_available, to: available, size: self.size });
        }
        let id = self.available_word(2 + self.mask(self.next_available)).load(Ordering::Relaxed);
        self.follow(memory, id, chain)?;
        self.next_available = self.next_available.wrapping_add(1);
        Ok(Some(Head { id, slots: 1 }))
    }

    /// Fills `chain` from the descriptors that begin at `id`; also for a chain that a previous server left in flight.
    pub(in crate::vhost_user) fn follow(
        &self,
        memory: &GuestMemory,
        id: u16,
        chain: &mut DescriptorChain,
    ) -> Result<(), RingError> {
        let mut index = id;
        for _ in 0..self.size {
            if index >= self.size {
                return Err(RingError::DescriptorIndex { index, size: u32::from(self.size) });
            }
            // SAFETY: the table has `size` descriptors.
            let descriptor = parse(unsafe { read_descriptor(self.descriptors, usize::from(index)) });
            if descriptor.flags & DESC_F_INDIRECT != 0 {
                if descriptor.flags & DESC_F_NEXT != 0 {
                    return Err(RingError::NestedIndirect);
                }
                return follow_indirect(memory, chain, descriptor, true, parse);
            }
            chain.push(memory, descriptor)?;
            if descriptor.flags & DESC_F_NEXT == 0 {
                return Ok(());
            }
            index = descriptor.link;
        }
        Err(RingError::ChainTooLong(u32::from(self.size)))
    }

    pub(super) fn set_kicks_enabled(&mut self, enabled: bool) {
        if self.event_index {
            // An event index that has already passed requests no kick.
            if enabled {
                let at = 2 + 4 * usize::from(self.size);
                self.used_word(at).store(self.next_available, Ordering::Relaxed);
            }
        } else {
            let flags = if enabled { 0 } else { USED_F_NO_NOTIFY };
            self.used_word(0).store(flags, Ordering::Relaxed);
        }
        if enabled {
            // The fence orders this before the caller's recheck of the available index.
            fence(Ordering::SeqCst);
        }
    }

    #[inline]
    pub(super) fn push_used(&mut self, head: Head, written: u32) -> IoVec {
        let at = 2 + 4 * self.mask(self.next_used);
        // SAFETY: entry `mask(next_used)` of the used ring, in bounds and aligned to 4 as `new` checked.
        let (id, len) = unsafe {
            let entry = self.used.add(at).cast::<u32>();
            (AtomicU32::from_ptr(entry), AtomicU32::from_ptr(entry.add(1)))
        };
        id.store(u32::from(head.id), Ordering::Relaxed);
        len.store(written, Ordering::Relaxed);
        self.next_used = self.next_used.wrapping_add(1);
        // Release: the guest sees the entry, and the data, before the index.
        self.used_word(1).store(self.next_used, Ordering::Release);
        // From the index at the start to the entry: a superset of the changed bytes, usually one page.
        IoVec::new(self.used.cast(), 2 * at + 8)
    }

    pub(super) fn wants_interrupt(&mut self) -> bool {
        // The used index must be visible before the guest's event suppression is read.
        fence(Ordering::SeqCst);
        let wanted = match self.last_interrupt {
            None => true,
            Some(at) if at == self.next_used => false,
            Some(at) if self.event_index => {
                let used_event = self.available_word(2 + usize::from(self.size)).load(Ordering::Relaxed);
                event_passed(used_event, self.next_used, at)
            }
            Some(_) => self.available_word(0).load(Ordering::Relaxed) & AVAIL_F_NO_INTERRUPT == 0,
        };
        let at = self.last_interrupt.filter(|_| !wanted).unwrap_or(self.next_used);
        let since = self.next_used.wrapping_sub(at).min(INTERRUPT_DISTANCE_MAX);
        self.last_interrupt = Some(self.next_used.wrapping_sub(since));
        wanted
    }

    pub(super) fn reset_interrupt_state(&mut self) {
        self.last_interrupt = None;
    }

    pub(super) fn position(&self) -> RingPosition {
        RingPosition { available: self.next_available, used: self.next_used }
    }

    /// Returns the index of the used ring, as the guest sees it.
    pub(in crate::vhost_user) fn used_index(&self) -> u16 {
        self.next_used
    }

    /// Continues after `count` chains that were popped before and not pushed.
    pub(in crate::vhost_user) fn resume_after(&mut self, count: u16) {
        self.next_available = self.next_used.wrapping_add(count);
    }
}

fn parse(raw: [u8; 16]) -> Descriptor {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = raw;
    Descriptor {
        address: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
        len: u32::from_le_bytes([i, j, k, l]),
        flags: u16::from_le_bytes([m, n]),
        link: u16::from_le_bytes([o, p]),
    }
}
