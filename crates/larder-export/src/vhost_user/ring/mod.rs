//! Virtqueues: taking descriptor chains that the guest made available, giving them back used, and asking for or
//! suppressing notifications. Split and packed layout (virtio 1.2, sections 2.7 and 2.8).
//!
//! Everything here reads memory that a guest controls: every index, length and address is checked, every walk is
//! bounded, and a ring that breaks the rules is an error, never a panic.

mod packed;
mod split;

use larder_block::IoVec;

use super::memory::{BadAddress, GuestMemory, MemoryError};
use super::message::RingAddresses;

pub(super) use packed::Cursor;
pub use packed::PackedRing;
pub use split::SplitRing;

/// The largest ring, in descriptors, as virtio 1.2 allows.
pub const RING_SIZE_MAX: u32 = 32768;

/// The most descriptors in one chain that are followed: what Linux and Windows drivers use at most, doubled. A chain
/// may not be longer than the ring, except through an indirect table.
const CHAIN_MAX: u32 = 2048;

const DESC_F_NEXT: u16 = 1;
const DESC_F_WRITE: u16 = 2;
const DESC_F_INDIRECT: u16 = 4;

/// Size of a descriptor in either layout, in bytes.
const DESC_BYTES: u64 = 16;

/// What identifies a chain that was taken, for giving it back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Head {
    /// Split: the index of the first descriptor. Packed: the buffer id.
    pub id: u16,
    /// Places in the ring that the chain takes up; split: always 1.
    pub slots: u16,
}

/// The memory of one chain: first what the device reads, then what it writes.
#[derive(Default)]
pub struct Chain {
    pieces: Vec<IoVec>,
    /// How many of the pieces are for the device to read.
    readable_count: usize,
}

impl Chain {
    /// The pieces that the device reads.
    pub fn readable(&self) -> &[IoVec] {
        &self.pieces[..self.readable_count]
    }

    /// The pieces that the device writes.
    pub fn writable(&self) -> &[IoVec] {
        &self.pieces[self.readable_count..]
    }

    /// How many pieces it has.
    pub fn pieces(&self) -> usize {
        self.pieces.len()
    }

    /// Pieces that it has memory for.
    pub fn room(&self) -> usize {
        self.pieces.capacity()
    }

    /// Bytes of all its pieces.
    pub fn bytes(&self) -> usize {
        self.pieces.iter().map(|piece| piece.len()).sum()
    }

    /// Empties it for the next request; its memory is kept.
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

/// One descriptor, copied out of guest memory before it is looked at.
#[derive(Clone, Copy, Debug)]
struct Descriptor {
    address: u64,
    len: u32,
    flags: u16,
    /// Split: the next descriptor. Packed: the buffer id.
    link: u16,
}

/// How a guest broke the rules of its ring. The queue stops until it is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)]
pub enum RingError {
    #[error("the available index went from {from} to {to}, more than the {size} descriptors of the ring")]
    AvailableIndex { from: u16, to: u16, size: u16 },
    #[error("descriptor {index} of a ring of {size}")]
    DescriptorIndex { index: u16, size: u32 },
    #[error("a chain of more than {0} descriptors, or one that loops")]
    ChainTooLong(u32),
    #[error("an indirect table of {0} bytes, no multiple of 16 or longer than {max}", max = CHAIN_MAX as u64 * DESC_BYTES)]
    IndirectLength(u32),
    #[error("an indirect table inside an indirect table, or with descriptors behind it")]
    NestedIndirect,
    #[error("a readable descriptor behind a writable one")]
    ReadableAfterWritable,
    #[error(
        "more in flight than the {size} descriptors of the ring: some were made available again before they were used"
    )]
    TooManyInFlight { size: u32 },
    #[error(transparent)]
    Address(#[from] BadAddress),
}

/// A ring of either layout.
pub enum Ring {
    /// The classic layout: descriptor table, available ring, used ring.
    Split(SplitRing),
    /// One ring of descriptors that both sides write.
    Packed(PackedRing),
}

/// Where a ring goes on: the front-end keeps it while nobody serves the ring.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RingPosition {
    /// The next chain to take: an index, for packed rings with the wrap counter in bit 15.
    pub available: u16,
    /// The next place to give back to, likewise. Split rings have it in the used ring itself.
    pub used: u16,
}

impl RingPosition {
    /// From the value of SET_VRING_BASE.
    pub fn from_base(base: u32, packed: bool) -> Self {
        Self {
            available: base as u16,
            used: if packed { (base >> 16) as u16 } else { 0 },
        }
    }

    /// The value for GET_VRING_BASE.
    pub fn to_base(self, packed: bool) -> u32 {
        let used = if packed { u32::from(self.used) << 16 } else { 0 };
        used | u32::from(self.available)
    }
}

/// What a ring is like, apart from where it is.
#[derive(Clone, Copy, Debug, Default)]
pub struct RingLayout {
    /// Packed instead of split.
    pub packed: bool,
    /// Notifications by index (VIRTIO_F_EVENT_IDX).
    pub event_index: bool,
    /// Number of descriptors.
    pub size: u32,
}

impl Ring {
    /// A ring in `memory`, going on at `position`.
    ///
    /// # Errors
    /// A part of it is not in guest memory or not aligned.
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

    /// Takes the next available chain into `chain` (empty), if there is one.
    ///
    /// # Errors
    /// The guest broke the rules. What had been taken before stays valid.
    pub fn take(&mut self, memory: &GuestMemory, chain: &mut Chain) -> Result<Option<Head>, RingError> {
        match self {
            Self::Split(ring) => ring.take(memory, chain),
            Self::Packed(ring) => ring.take(memory, chain),
        }
    }

    /// Whether a chain is available.
    pub fn has_available(&self) -> bool {
        match self {
            Self::Split(ring) => ring.has_available(),
            Self::Packed(ring) => ring.has_available(),
        }
    }

    /// Asks for (or no longer for) a kick when a chain becomes available.
    pub fn want_kicks(&mut self, want: bool) {
        match self {
            Self::Split(ring) => ring.want_kicks(want),
            Self::Packed(ring) => ring.want_kicks(want),
        }
    }

    /// Gives a chain back, `written` bytes of it written. Returns the memory that this changed, for the dirty log.
    pub fn give_back(&mut self, head: Head, written: u32) -> IoVec {
        match self {
            Self::Split(ring) => ring.give_back(head, written),
            Self::Packed(ring) => ring.give_back(head, written),
        }
    }

    /// Whether the guest wants to be interrupted for what was given back since this last said so. Then it is to be
    /// interrupted.
    pub fn wants_interrupt(&mut self) -> bool {
        match self {
            Self::Split(ring) => ring.wants_interrupt(),
            Self::Packed(ring) => ring.wants_interrupt(),
        }
    }

    /// Interrupts so far count no more: the next [`Ring::wants_interrupt`] does not rely on them.
    pub fn forget_interrupts(&mut self) {
        match self {
            Self::Split(ring) => ring.forget_interrupts(),
            Self::Packed(ring) => ring.forget_interrupts(),
        }
    }

    /// Where it goes on.
    pub fn position(&self) -> RingPosition {
        match self {
            Self::Split(ring) => ring.position(),
            Self::Packed(ring) => ring.position(),
        }
    }
}

/// Whether the other side asked for an event at or before `new` and after `old` (virtio 1.2, 2.7.10): it wants one when
/// the index passes `event`.
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

/// Follows an indirect table: `parse` makes a descriptor of 16 bytes; `chained` says whether they are linked by index
/// (split) or simply follow each other (packed).
fn take_indirect(
    memory: &GuestMemory,
    chain: &mut Chain,
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
            .ok_or(BadAddress {
                address: table.address,
                bytes: u64::from(table.len),
            })?;
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
                return Err(RingError::DescriptorIndex {
                    index: descriptor.link,
                    size: count,
                });
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

/// Copies a descriptor, all of which lies in one region of guest memory.
fn read_guest_descriptor(memory: &GuestMemory, address: u64) -> Result<[u8; 16], BadAddress> {
    let base = memory.contiguous(address, DESC_BYTES)?;
    // SAFETY: `contiguous` found 16 mapped bytes there; volatile because the guest may write at the same time.
    Ok(unsafe { base.cast::<[u8; 16]>().read_volatile() })
}

#[cfg(test)]
mod tests {
    use super::event_passed;

    #[test]
    fn events_are_due_when_the_index_passes_them() {
        assert!(event_passed(0, 1, 0));
        assert!(event_passed(4, 6, 3));
        assert!(!event_passed(6, 6, 3));
        assert!(!event_passed(2, 6, 3));
        assert!(event_passed(0xffff, 0, 0xffff));
        assert!(event_passed(0xfffe, 2, 0xfff0));
    }
}
