//! Packed layout: one ring of descriptors that driver and device write in turn (virtio 1.2, section 2.8).
//!
//! A descriptor is available when its AVAIL flag equals the driver's wrap counter and its USED flag does not; used
//! when both equal the device's. Counters flip each time an index wraps.

use std::sync::atomic::{AtomicU16, Ordering, fence};

use larder_block::IoVec;

use super::{
    CHAIN_MAX, DESC_BYTES, DESC_F_INDIRECT, DESC_F_NEXT, DESC_F_WRITE, Descriptor, DescriptorChain, Head, RingError,
    RingLayout, RingPosition, event_passed, follow_indirect, read_descriptor,
};
use crate::vhost_user::memory::{GuestMemory, MemoryError};
use crate::vhost_user::message::RingAddresses;

const DESC_F_AVAIL: u16 = 1 << 7;
const DESC_F_USED: u16 = 1 << 15;

const EVENT_ENABLE: u16 = 0;
const EVENT_DISABLE: u16 = 1;
const EVENT_AT_INDEX: u16 = 2;

/// Index into the ring, with its wrap counter in bit 15.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::vhost_user) struct Cursor(pub(in crate::vhost_user) u16);

impl Cursor {
    fn index(self) -> u16 {
        self.0 & 0x7fff
    }

    fn wrap(self) -> bool {
        self.0 & 0x8000 != 0
    }

    /// Returns the cursor advanced by `count` (at most `size`) slots.
    pub(in crate::vhost_user) fn advanced(self, count: u16, size: u16) -> Self {
        let next = u32::from(self.index()) + u32::from(count);
        if next >= u32::from(size) {
            Self((next - u32::from(size)) as u16 | (self.0 ^ 0x8000) & 0x8000)
        } else {
            Self(next as u16 | self.0 & 0x8000)
        }
    }
}

/// Packed ring. Its pointers are into guest memory that its owner keeps mapped, checked for size and alignment.
pub struct PackedRing {
    size: u16,
    event_index: bool,
    descriptors: *mut u8,
    /// Driver event suppression (off_wrap, flags): the notifications that the driver wants.
    driver_event: *mut u16,
    /// Device event suppression (off_wrap, flags): the notifications that the device wants.
    device_event: *mut u16,
    next_available: Cursor,
    next_used: Cursor,
    /// Slots pushed as used since the last interrupt, at most `size`. `None`: a previous server pushed some and may
    /// have been killed before it interrupted. The guest's event index is then not sufficient, so the guest is
    /// interrupted.
    used_since_interrupt: Option<u16>,
}

impl PackedRing {
    pub(super) fn new(
        memory: &GuestMemory,
        layout: RingLayout,
        addresses: &RingAddresses,
        position: RingPosition,
    ) -> Result<Self, MemoryError> {
        let size = u64::from(layout.size);
        let descriptors = memory.ring_part("the descriptor ring", addresses.descriptors, size * DESC_BYTES, 16)?;
        let driver_event = memory.ring_part("the driver event suppression", addresses.driver, 4, 4)?;
        let device_event = memory.ring_part("the device event suppression", addresses.device, 4, 4)?;
        let in_ring = |cursor: u16| {
            // A position outside the ring is treated as the start of the ring.
            let index = cursor & 0x7fff;
            Cursor(if u64::from(index) < size { cursor } else { cursor & 0x8000 })
        };
        Ok(Self {
            size: layout.size as u16,
            event_index: layout.event_index,
            descriptors,
            driver_event: driver_event.cast(),
            device_event: device_event.cast(),
            next_available: in_ring(position.available),
            next_used: in_ring(position.used),
            used_since_interrupt: None,
        })
    }

    fn flags(&self, index: u16) -> &AtomicU16 {
        // SAFETY: `index` is below the size; the flags are the last two bytes of the 16; aligned and mapped.
        unsafe { AtomicU16::from_ptr(self.descriptors.add(usize::from(index) * 16 + 14).cast()) }
    }

    /// Returns word 0 (off_wrap) or 1 (flags) of an event suppression structure.
    fn event_word(&self, at: *mut u16, index: usize) -> &AtomicU16 {
        debug_assert!(index < 2);
        // SAFETY: `new` checked that both structures are mapped and aligned; the owner keeps them mapped as long as
        // self lives.
        unsafe { AtomicU16::from_ptr(at.add(index)) }
    }

    fn is_available(&self, cursor: Cursor) -> bool {
        let flags = self.flags(cursor.index()).load(Ordering::Acquire);
        let (available, used) = (flags & DESC_F_AVAIL != 0, flags & DESC_F_USED != 0);
        available == cursor.wrap() && used != cursor.wrap()
    }

    pub(super) fn has_available(&self) -> bool {
        self.is_available(self.next_available)
    }

    #[inline]
    pub(super) fn pop_avail(
        &mut self,
        memory: &GuestMemory,
        chain: &mut DescriptorChain,
    ) -> Result<Option<Head>, RingError> {
        if !self.has_available() {
            return Ok(None);
        }
        let mut cursor = self.next_available;
        let mut slots = 0;
        loop {
            let descriptor = self.descriptor(cursor);
            slots += 1;
            cursor = cursor.advanced(1, self.size);
            if descriptor.flags & DESC_F_INDIRECT != 0 {
                if descriptor.flags & DESC_F_NEXT != 0 || slots > 1 {
                    return Err(RingError::NestedIndirect);
                }
                follow_indirect(memory, chain, descriptor, false, parse)?;
            } else {
                chain.push(memory, descriptor)?;
            }
            if descriptor.flags & DESC_F_NEXT == 0 {
                self.next_available = cursor;
                return Ok(Some(Head { id: descriptor.link, slots }));
            }
            if slots >= self.size || u32::from(slots) >= CHAIN_MAX {
                return Err(RingError::ChainTooLong(u32::from(slots)));
            }
        }
    }

    fn descriptor(&self, cursor: Cursor) -> Descriptor {
        // SAFETY: the cursor is below the size.
        parse(unsafe { read_descriptor(self.descriptors, usize::from(cursor.index())) })
    }

    /// Fills `chain` from copies of descriptors that a previous server left in flight.
    pub(in crate::vhost_user) fn follow_copies(
        memory: &GuestMemory,
        copies: impl Iterator<Item = [u8; 16]>,
        chain: &mut DescriptorChain,
    ) -> Result<(), RingError> {
        for raw in copies {
            let descriptor = parse(raw);
            if descriptor.flags & DESC_F_INDIRECT != 0 {
                follow_indirect(memory, chain, descriptor, false, parse)?;
            } else {
                chain.push(memory, descriptor)?;
            }
        }
        Ok(())
    }

    /// Returns the raw descriptors of the `slots` slots before the next one to pop: those of the chain popped last.
    pub(in crate::vhost_user) fn last_popped(&self, slots: u16) -> impl Iterator<Item = [u8; 16]> + '_ {
        let first = u32::from(self.next_available.index()) + u32::from(self.size) - u32::from(slots);
        (0..u32::from(slots)).map(move |offset| {
            let index = (first + offset) % u32::from(self.size);
            // SAFETY: the index is below the size.
            unsafe { read_descriptor(self.descriptors, index as usize) }
        })
    }

    pub(super) fn set_kicks_enabled(&mut self, enabled: bool) {
        let flags = match (enabled, self.event_index) {
            (false, _) => EVENT_DISABLE,
            (true, false) => EVENT_ENABLE,
            (true, true) => {
                self.event_word(self.device_event, 0).store(self.next_available.0, Ordering::Relaxed);
                EVENT_AT_INDEX
            }
        };
        // Release: off_wrap is visible before the flags that refer to it.
        self.event_word(self.device_event, 1).store(flags, Ordering::Release);
        if enabled {
            // The fence orders this before the caller's recheck of the ring.
            fence(Ordering::SeqCst);
        }
    }

    #[inline]
    pub(super) fn push_used(&mut self, head: Head, written: u32) -> IoVec {
        let index = self.next_used.index();
        // SAFETY: the index is below the size.
        let base = unsafe { self.descriptors.add(usize::from(index) * 16) };
        // SAFETY: len (u32 at 8) and id (u16 at 12) of a mapped, aligned descriptor that the device may write.
        unsafe {
            base.add(8).cast::<u32>().write_volatile(written);
            base.add(12).cast::<u16>().write_volatile(head.id);
        }
        let mut flags = if written > 0 { DESC_F_WRITE } else { 0 };
        if self.next_used.wrap() {
            flags |= DESC_F_AVAIL | DESC_F_USED;
        }
        // Release: the guest sees the entry, and the data, before the flags.
        self.flags(index).store(flags, Ordering::Release);
        self.next_used = self.next_used.advanced(head.slots, self.size);
        self.used_since_interrupt =
            self.used_since_interrupt.map(|count| count.saturating_add(head.slots).min(self.size));
        IoVec::new(base, DESC_BYTES as usize)
    }

    pub(super) fn wants_interrupt(&mut self) -> bool {
        // The used descriptors must be visible before the guest's event suppression is read.
        fence(Ordering::SeqCst);
        let flags = self.event_word(self.driver_event, 1).load(Ordering::Acquire) & 3;
        let wants = match (flags, self.used_since_interrupt) {
            (EVENT_DISABLE, _) | (_, Some(0)) => false,
            (EVENT_AT_INDEX, Some(count)) if self.event_index => {
                let wanted = Cursor(self.event_word(self.driver_event, 0).load(Ordering::Relaxed));
                // Both are distances on a line that increases by `size` with every wrap.
                let new = self.next_used.index();
                let mut event = wanted.index();
                if wanted.wrap() != self.next_used.wrap() {
                    event = event.wrapping_sub(self.size);
                }
                event_passed(event, new, new.wrapping_sub(count))
            }
            _ => true,
        };
        if wants {
            self.used_since_interrupt = Some(0);
        }
        wants
    }

    pub(super) fn reset_interrupt_state(&mut self) {
        self.used_since_interrupt = None;
    }

    pub(super) fn position(&self) -> RingPosition {
        RingPosition { available: self.next_available.0, used: self.next_used.0 }
    }

    /// Returns the next slot to push to.
    pub(in crate::vhost_user) fn used_cursor(&self) -> Cursor {
        self.next_used
    }

    /// Continues at `used`, after `popped_slots` slots that were popped before and not pushed.
    pub(in crate::vhost_user) fn resume_at(&mut self, used: Cursor, popped_slots: u16) {
        self.next_used = used;
        self.next_available = used.advanced(popped_slots, self.size);
    }

    /// Returns whether the slot at `cursor`, which the driver had made available in the lap of `cursor`, has been
    /// pushed as used since. The slot need not look used: the driver may have reused it for its next lap.
    pub(in crate::vhost_user) fn was_pushed_used(&self, cursor: Cursor) -> bool {
        !self.is_available(cursor)
    }
}

fn parse(raw: [u8; 16]) -> Descriptor {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = raw;
    Descriptor {
        address: u64::from_le_bytes([a, b, c, d, e, f, g, h]),
        len: u32::from_le_bytes([i, j, k, l]),
        link: u16::from_le_bytes([m, n]),
        flags: u16::from_le_bytes([o, p]),
    }
}
