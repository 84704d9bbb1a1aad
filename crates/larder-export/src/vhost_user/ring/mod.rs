//! Virtqueues: popping descriptor chains that the guest made available, pushing them as used, and enabling or
//! suppressing notifications. Split and packed layout (virtio 1.2, sections 2.7 and 2.8).
//!
//! This module reads memory that a guest controls: every index, length and address is checked, every walk is bounded,
//! and a ring that violates the rules is an error, never a panic.

mod packed;
mod split;

use larder_block::IoVec;

use super::memory::{BadAddress, GuestMemory, MemoryError};
use super::message::RingAddresses;

pub(super) use packed::Cursor;
pub use packed::PackedRing;
pub use split::SplitRing;

/// Largest ring that virtio 1.2 allows, in descriptors.
pub const RING_SIZE_MAX: u32 = 32768;

/// Largest number of descriptors of one chain: twice the most that Linux and Windows drivers use. A chain may not be
/// longer than the ring, except through an indirect table.
const CHAIN_MAX: u32 = 2048;

const DESC_F_NEXT: u16 = 1;
const DESC_F_WRITE: u16 = 2;
const DESC_F_INDIRECT: u16 = 4;

/// Size of a descriptor in either layout, in bytes.
const DESC_BYTES: u64 = 16;

/// Identifier of a popped chain, for pushing it as used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Head {
    /// Split: index of the first descriptor. Packed: buffer id.
    pub id: u16,
    /// Number of slots in the ring that the chain occupies; split: always 1.
    pub slots: u16,
}

/// Memory of one chain: first the pieces that the device reads, then those that it writes.
#[derive(Default)]
pub struct DescriptorChain {
    pieces: Vec<IoVec>,
    /// Number of pieces that the device reads.
    readable_count: usize,
}

impl DescriptorChain {
    /// Returns the pieces that the device reads.
    pub fn readable(&self) -> &[IoVec] {
        &self.pieces[..self.readable_count]
    }

    /// Returns the pieces that the device writes.
    pub fn writable(&self) -> &[IoVec] {
        &self.pieces[self.readable_count..]
    }

    /// Returns the number of pieces.
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Returns the number of pieces that fit without a new allocation.
    pub fn capacity(&self) -> usize {
        self.pieces.capacity()
    }

    /// Returns the total length of all pieces, in bytes.
    pub fn bytes(&self) -> usize {
        self.pieces.iter().map(|piece| piece.len()).sum()
    }

    /// Empties the chain for the next request, and keeps its allocation.
    pub fn clear(&mut self) {
        self.pieces.clear();
        self.readable_count = 0;
    }

    fn push(&mut self, memory: &GuestMemory, descriptor: Descriptor) -> Result<(), RingError> {
        let writable = descriptor.flags & DESC_F_WRITE != 0;
        if !writable && self.readable_count < self.pieces.len() {
            return Err(RingError::ReadableAfterWritable);
        }
        memory.translate(descriptor.address, u64::from(descriptor.len), &mut self.pieces)?;
        if !writable {
            self.readable_count = self.pieces.len();
        }
        Ok(())
    }
}

/// Descriptor, copied out of guest memory before it is checked.
#[derive(Clone, Copy, Debug)]
struct Descriptor {
    address: u64,
    len: u32,
    flags: u16,
    /// Split: index of the next descriptor. Packed: buffer id.
    link: u16,
}

/// Violation of the ring's rules by the guest. The queue stops until it is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum RingError {
    #[error("the available index went from {from} to {to}, more than the {size} descriptors of the ring")]
    AvailableIndex { from: u16, to: u16, size: u16 },
    #[error("descriptor {index} is outside the ring of {size}")]
    DescriptorIndex { index: u16, size: u32 },
    #[error("a chain of more than {0} descriptors, or one that loops")]
    ChainTooLong(u32),
    #[error("an indirect table of {0} bytes, which is not a multiple of 16 or exceeds {max}", max = CHAIN_MAX as u64 * DESC_BYTES)]
    IndirectLength(u32),
    #[error("an indirect table inside an indirect table, or with descriptors after it")]
    NestedIndirect,
    #[error("a readable descriptor after a writable one")]
    ReadableAfterWritable,
    #[error(
        "more chains in flight than the {size} descriptors of the ring: some were made available again before they were used"
    )]
    TooManyInFlight { size: u32 },
    #[error(transparent)]
    Address(#[from] BadAddress),
}

/// Ring of either layout.
pub enum Ring {
    /// Classic layout: descriptor table, available ring, used ring.
    Split(SplitRing),
    /// Packed layout: one ring of descriptors that both sides write.
    Packed(PackedRing),
}

/// Position of a ring, which the front-end keeps while no server runs the ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingPosition {
    /// Next chain to pop: an index, for packed rings with the wrap counter in bit 15.
    pub available: u16,
    /// Next slot to push to, in the same encoding. Split rings store it in the used ring itself.
    pub used: u16,
}

impl RingPosition {
    /// Decodes the value of SET_VRING_BASE.
    pub fn from_base(base: u32, packed: bool) -> Self {
        Self { available: base as u16, used: if packed { (base >> 16) as u16 } else { 0 } }
    }

    /// Encodes the value for GET_VRING_BASE.
    pub fn to_base(self, packed: bool) -> u32 {
        let used = if packed { u32::from(self.used) << 16 } else { 0 };
        used | u32::from(self.available)
    }
}

/// Parameters of a ring, except for its addresses.
#[derive(Clone, Copy, Debug, Default)]
pub struct RingLayout {
    /// True for the packed layout, false for the split one.
    pub packed: bool,
    /// True if notifications are suppressed by index (VIRTIO_F_EVENT_IDX).
    pub event_index: bool,
    /// Number of descriptors.
    pub size: u32,
}

impl Ring {
    /// Creates a ring in `memory` that continues at `position`.
    ///
    /// # Errors
    /// A part of the ring is not in guest memory or not aligned.
    pub fn new(
        memory: &GuestMemory,
        layout: RingLayout,
        addresses: &RingAddresses,
        position: RingPosition,
    ) -> Result<Self, MemoryError> {
        if layout.packed {
            PackedRing::new(memory, layout, addresses, position).map(Self::Packed)
        } else {
            SplitRing::new(memory, layout, addresses, position).map(Self::Split)
        }
    }

    /// Pops the next available chain into `chain` (empty), if there is one.
    ///
    /// # Errors
    /// The guest violated the rules. Chains that were popped before stay valid.
    #[inline]
    pub fn pop_avail(&mut self, memory: &GuestMemory, chain: &mut DescriptorChain) -> Result<Option<Head>, RingError> {
        match self {
            Self::Split(ring) => ring.pop_avail(memory, chain),
            Self::Packed(ring) => ring.pop_avail(memory, chain),
        }
    }

    /// Returns whether a chain is available.
    #[inline]
    pub fn has_available(&self) -> bool {
        match self {
            Self::Split(ring) => ring.has_available(),
            Self::Packed(ring) => ring.has_available(),
        }
    }

    /// Enables or suppresses kicks for chains that become available.
    pub fn set_kicks_enabled(&mut self, enabled: bool) {
        match self {
            Self::Split(ring) => ring.set_kicks_enabled(enabled),
            Self::Packed(ring) => ring.set_kicks_enabled(enabled),
        }
    }

    /// Pushes a chain as used, with `written` bytes written. Returns the changed memory, for the dirty log.
    #[inline]
    pub fn push_used(&mut self, head: Head, written: u32) -> IoVec {
        match self {
            Self::Split(ring) => ring.push_used(head, written),
            Self::Packed(ring) => ring.push_used(head, written),
        }
    }

    /// Returns whether the guest wants an interrupt for chains pushed since this last returned true. The caller must
    /// then interrupt it.
    pub fn wants_interrupt(&mut self) -> bool {
        match self {
            Self::Split(ring) => ring.wants_interrupt(),
            Self::Packed(ring) => ring.wants_interrupt(),
        }
    }

    /// Forgets earlier interrupts: the next [`Ring::wants_interrupt`] does not rely on them.
    pub fn reset_interrupt_state(&mut self) {
        match self {
            Self::Split(ring) => ring.reset_interrupt_state(),
            Self::Packed(ring) => ring.reset_interrupt_state(),
        }
    }

    /// Returns the position at which the ring continues.
    pub fn position(&self) -> RingPosition {
        match self {
            Self::Split(ring) => ring.position(),
            Self::Packed(ring) => ring.position(),
        }
    }
}

/// Returns whether the other side asked for an event at or before `new` and after `old` (virtio 1.2, 2.7.10): it
/// wants one when the index passes `event`.
fn event_passed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

/// Copies descriptor `index` of a table in guest memory.
///
/// # Safety
/// The table has more than `index` descriptors, all mapped.
unsafe fn read_descriptor(table: *const u8, index: usize) -> [u8; 16] {
    // SAFETY: by this function's contract; volatile because the guest may write at the same time.
    unsafe { table.add(index * 16).cast::<[u8; 16]>().read_volatile() }
}

/// Follows an indirect table. `parse` decodes a descriptor of 16 bytes; `chained` is true if descriptors are
/// linked by index (split) or simply adjacent (packed).
fn follow_indirect(
    memory: &GuestMemory,
    chain: &mut DescriptorChain,
    table: Descriptor,
    chained: bool,
    parse: impl Fn([u8; 16]) -> Descriptor,
) -> Result<(), RingError> {
    let count = table.len / DESC_BYTES as u32;
    if !table.len.is_multiple_of(DESC_BYTES as u32) || count == 0 || count > CHAIN_MAX {
        return Err(RingError::IndirectLength(table.len));
    }
    let mut index = 0u32;
    for _ in 0..count {
        let address = table
            .address
            .checked_add(u64::from(index) * DESC_BYTES)
            .ok_or(BadAddress { address: table.address, bytes: u64::from(table.len) })?;
        let raw = read_guest_descriptor(memory, address)?;
        let descriptor = parse(raw);
        if descriptor.flags & DESC_F_INDIRECT != 0 {
            return Err(RingError::NestedIndirect);
        }
        chain.push(memory, descriptor)?;
        if chained {
            if descriptor.flags & DESC_F_NEXT == 0 {
                return Ok(());
            }
            index = u32::from(descriptor.link);
            if index >= count {
                return Err(RingError::DescriptorIndex { index: descriptor.link, size: count });
            }
        } else {
            index += 1;
        }
    }
    if chained {
        return Err(RingError::ChainTooLong(count));
    }
    Ok(())
}

/// Copies a descriptor, which must lie in one region of guest memory.
fn read_guest_descriptor(memory: &GuestMemory, address: u64) -> Result<[u8; 16], BadAddress> {
    let base = memory.contiguous(address, DESC_BYTES)?;
    // SAFETY: `contiguous` found 16 mapped bytes there; volatile because the guest may write at the same time.
    Ok(unsafe { base.cast::<[u8; 16]>().read_volatile() })
}

#[cfg(test)]
mod tests {
    use super::event_passed;

    #[test]
    fn event_is_due_when_index_passes() {
        assert!(event_passed(0, 1, 0));
        assert!(event_passed(4, 6, 3));
        assert!(!event_passed(6, 6, 3));
        assert!(!event_passed(2, 6, 3));
        assert!(event_passed(0xffff, 0, 0xffff));
        assert!(event_passed(0xfffe, 2, 0xfff0));
    }
}
