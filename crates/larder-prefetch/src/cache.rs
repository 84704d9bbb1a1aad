//! Cache of blocks that are in memory or being fetched.
//!
//! Memory is allotted in slots of four blocks, each for one aligned part of the disk, found by a hash. Each slot is
//! in one of three lists: free, *done* (the guest has read all of it, so it is reused first), and *unread*, oldest
//! first.
//!
//! Invariants:
//! - A block is present, flying (being fetched), or neither, never both. A block that a write touches is neither,
//!   from before the write starts.
//! - A slot that a fetch writes to stays assigned to its part of the disk until that fetch has ended, and no other
//!   fetch gets the same blocks of it, whatever their state.
//! - A block that is unread is present or flying.

use larder_block::{AlignedBuf, IoVec};
use std::ops::Range;
use std::ptr::NonNull;

use crate::PrefetchOptions;
use crate::streams::StreamId;
use crate::units::{BLOCK_BITS, BLOCKS_PER_SLOT, Block, SLOT_LEN, bits_in_slot};

/// Index of a slot.
pub(crate) type SlotIndex = u16;

const NONE: u16 = u16::MAX;

/// The most slots: with more, the table could have more positions than a `u16` can count.
const SLOTS_MAX: usize = NONE as usize / 8;

const _: () = assert!(PrefetchOptions::MEMORY_MAX.as_usize() / BlockCache::SLOT_BYTES <= SLOTS_MAX);

/// Bytes of the table for each slot: it has four to eight positions of two bytes.
const TABLE_BYTES_PER_SLOT: usize = 16;

/// Bytes of one allocation, which holds many slots: the allocator takes up to a page more for aligned memory.
const PIECE_LEN: usize = 16 * SLOT_LEN;
const PIECE_OVERHEAD: usize = 4096 + size_of::<AlignedBuf>();

/// Number of a fetch, which is not used again soon.
pub(crate) type FetchId = u32;

/// Memory for one part of the disk.
pub(crate) struct Slot {
    /// Number of the part.
    part: u64,
    /// Memory of the slot, allocated on first use.
    memory: Option<NonNull<u8>>,
    /// Blocks that can be read.
    pub(crate) present: u8,
    /// Blocks that will be present when their fetch has ended.
    pub(crate) in_flight: u8,
    /// Blocks that a fetch writes to, wanted or not.
    pub(crate) busy: u8,
    /// Blocks that were not requested yet.
    pub(crate) unread: u8,
    /// For each block, the last fetch that wrote to it.
    pub(crate) fetches: [FetchId; BLOCKS_PER_SLOT as usize],
    /// Stream for which the blocks were fetched.
    pub(crate) stream: StreamId,
    list: ListKind,
    previous: u16,
    next: u16,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum ListKind {
    Free = 0,
    Done = 1,
    Unread = 2,
}

#[derive(Clone, Copy)]
struct List {
    first: u16,
    last: u16,
}

/// Unread blocks that a slot lost.
pub(crate) struct DroppedUnread {
    pub(crate) stream: StreamId,
    /// Blocks that had been fetched.
    pub(crate) wasted: u32,
    /// Blocks that had been fetched or were being fetched.
    pub(crate) blocks: u32,
}

/// All slots.
pub(crate) struct BlockCache {
    slots: Box<[Slot]>,
    /// Memory of the slots; the last allocation is handed out from its start on.
    memory: Vec<AlignedBuf>,
    /// Bytes of the last allocation that were handed out.
    allotted: usize,
    lists: [List; 3],
    /// Slots by part, with linear probing.
    table: Box<[u16]>,
    /// Number of bits by which a hash is shifted.
    shift: u32,
}

impl BlockCache {
    /// Bytes of memory that a slot takes in total.
    pub(crate) const SLOT_BYTES: usize =
        SLOT_LEN + size_of::<Slot>() + TABLE_BYTES_PER_SLOT + PIECE_OVERHEAD / (PIECE_LEN / SLOT_LEN);

    pub(crate) fn new(slots: usize) -> Self {
        let slots = slots.clamp(1, SLOTS_MAX);
        let positions = (slots * 4).next_power_of_two().max(16);
        let mut cache = Self {
            slots: (0..slots).map(|_| Slot::default()).collect(),
            memory: Vec::with_capacity(slots.div_ceil(PIECE_LEN / SLOT_LEN)),
            allotted: PIECE_LEN,
            lists: [List { first: NONE, last: NONE }; 3],
            table: vec![NONE; positions].into_boxed_slice(),
            shift: 64 - positions.trailing_zeros(),
        };
        for index in 0..slots as u16 {
            cache.append(index, ListKind::Free);
        }
        cache
    }

    pub(crate) fn len(&self) -> usize {
        self.slots.len()
    }

    fn hash_position(&self, part: u64) -> usize {
        (part.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> self.shift) as usize
    }

    /// Returns the slot of a part of the disk.
    #[inline]
    pub(crate) fn find(&self, part: u64) -> Option<SlotIndex> {
        let mask = self.table.len() - 1;
        let mut position = self.hash_position(part);
        loop {
            match self.table[position] {
                NONE => return None,
                index if self.slots[usize::from(index)].part == part => return Some(index),
                _ => position = (position + 1) & mask,
            }
        }
    }

    pub(crate) fn slot(&self, index: SlotIndex) -> &Slot {
        &self.slots[usize::from(index)]
    }

    pub(crate) fn slot_mut(&mut self, index: SlotIndex) -> &mut Slot {
        &mut self.slots[usize::from(index)]
    }

    /// Returns whether no data is in memory or being fetched.
    pub(crate) fn is_empty(&self) -> bool {
        [ListKind::Done, ListKind::Unread].into_iter().all(|kind| self.lists[kind as usize].first == NONE)
    }

    /// Returns whether a slot is in use for one of `parts`.
    pub(crate) fn holds_any(&self, index: SlotIndex, parts: &Range<u64>) -> bool {
        let slot = self.slot(index);
        slot.list != ListKind::Free && parts.contains(&slot.part)
    }

    /// Returns those of `blocks` that lie in a slot, as bits.
    pub(crate) fn bits(&self, index: SlotIndex, blocks: &Range<Block>) -> u8 {
        bits_in_slot(blocks, self.slot(index).part)
    }

    /// Returns the memory for the bytes of the disk from `start` to the end of its slot.
    pub(crate) fn memory(&self, index: SlotIndex, start: u64) -> IoVec {
        let within = start as usize & (SLOT_LEN - 1);
        let base = self.slot(index).memory.map_or(std::ptr::null_mut(), NonNull::as_ptr);
        IoVec::new(base.wrapping_add(within), SLOT_LEN - within)
    }

    /// Assigns a slot to a part that has none: a free one, one that was read, or the oldest unread one. Also returns
    /// the unread blocks that the slot lost. Returns `None` if fetches write to all slots.
    pub(crate) fn allocate(&mut self, part: u64, stream: StreamId) -> Option<(SlotIndex, Option<DroppedUnread>)> {
        let index =
            [ListKind::Free, ListKind::Done, ListKind::Unread].into_iter().find_map(|kind| self.oldest_idle(kind))?;
        let dropped = self.clear(index);
        if self.slot(index).memory.is_none() {
            self.slot_mut(index).memory = self.new_memory();
        }
        let slot = self.slot_mut(index);
        slot.part = part;
        slot.stream = stream;
        self.insert_into_table(index);
        self.unlink(index);
        self.append(index, ListKind::Unread);
        Some((index, dropped))
    }

    fn new_memory(&mut self) -> Option<NonNull<u8>> {
        if self.allotted == PIECE_LEN {
            let unallocated = self.slots.len() * SLOT_LEN - self.memory.len() * PIECE_LEN;
            self.memory.push(AlignedBuf::zeroed(unallocated.min(PIECE_LEN)));
            self.allotted = 0;
        }
        let piece = self.memory.last_mut()?;
        let memory = NonNull::new(piece.as_mut_ptr().wrapping_add(self.allotted));
        self.allotted += SLOT_LEN;
        memory
    }

    fn oldest_idle(&self, kind: ListKind) -> Option<SlotIndex> {
        let mut index = self.lists[kind as usize].first;
        while index != NONE {
            let slot = self.slot(index);
            if slot.busy == 0 {
                return Some(index);
            }
            index = slot.next;
        }
        None
    }

    /// Moves a slot to the list that fits its blocks. A slot without present blocks, to which no fetch writes,
    /// becomes free.
    pub(crate) fn update_list(&mut self, index: SlotIndex) {
        let slot = self.slot(index);
        let kind = match slot {
            Slot { present: 0, busy: 0, .. } => ListKind::Free,
            Slot { unread: 0, busy: 0, .. } => ListKind::Done,
            _ => ListKind::Unread,
        };
        if slot.list == kind {
            return;
        }
        if kind == ListKind::Free {
            self.remove_from_table(index);
        }
        self.unlink(index);
        self.append(index, kind);
    }

    /// Removes blocks from a slot; returns the unread ones among them.
    pub(crate) fn invalidate(&mut self, index: SlotIndex, bits: u8) -> Option<DroppedUnread> {
        let slot = self.slot_mut(index);
        let unread = slot.unread & bits;
        let dropped = DroppedUnread {
            stream: slot.stream,
            wasted: (unread & slot.present).count_ones(),
            blocks: unread.count_ones(),
        };
        slot.present &= !bits;
        slot.in_flight &= !bits;
        slot.unread &= !bits;
        self.update_list(index);
        (dropped.blocks > 0).then_some(dropped)
    }

    fn clear(&mut self, index: SlotIndex) -> Option<DroppedUnread> {
        if self.slot(index).list == ListKind::Free {
            return None;
        }
        self.invalidate(index, (1 << BLOCKS_PER_SLOT) - 1)
    }

    fn insert_into_table(&mut self, index: SlotIndex) {
        let mask = self.table.len() - 1;
        let mut position = self.hash_position(self.slot(index).part);
        while self.table[position] != NONE {
            position = (position + 1) & mask;
        }
        self.table[position] = index;
    }

    /// Removes a slot from the table, and moves up the slots that linear probing has put after it.
    fn remove_from_table(&mut self, index: SlotIndex) {
        let mask = self.table.len() - 1;
        let mut hole = self.hash_position(self.slot(index).part);
        while self.table[hole] != index {
            hole = (hole + 1) & mask;
        }
        let mut position = hole;
        loop {
            self.table[hole] = NONE;
            loop {
                position = (position + 1) & mask;
                let other = self.table[position];
                if other == NONE {
                    return;
                }
                let hashed = self.hash_position(self.slot(other).part);
                // Move the entry if the hole lies between its hashed and its present position.
                if (position.wrapping_sub(hashed) & mask) >= (position.wrapping_sub(hole) & mask) {
                    self.table[hole] = other;
                    hole = position;
                    break;
                }
            }
        }
    }

    fn append(&mut self, index: SlotIndex, kind: ListKind) {
        let last = self.lists[kind as usize].last;
        let slot = self.slot_mut(index);
        (slot.list, slot.previous, slot.next) = (kind, last, NONE);
        match last {
            NONE => self.lists[kind as usize].first = index,
            last => self.slot_mut(last).next = index,
        }
        self.lists[kind as usize].last = index;
    }

    fn unlink(&mut self, index: SlotIndex) {
        let slot = self.slot(index);
        let (kind, previous, next) = (slot.list, slot.previous, slot.next);
        match previous {
            NONE => self.lists[kind as usize].first = next,
            previous => self.slot_mut(previous).next = next,
        }
        match next {
            NONE => self.lists[kind as usize].last = previous,
            next => self.slot_mut(next).previous = previous,
        }
    }
}

impl Default for Slot {
    fn default() -> Self {
        Self {
            part: u64::MAX,
            memory: None,
            present: 0,
            in_flight: 0,
            unread: 0,
            busy: 0,
            fetches: [0; BLOCKS_PER_SLOT as usize],
            stream: StreamId::default(),
            list: ListKind::Free,
            previous: NONE,
            next: NONE,
        }
    }
}

impl Slot {
    /// Returns the offset of the slot's part on the disk in bytes.
    pub(crate) fn start(&self) -> u64 {
        (self.part * BLOCKS_PER_SLOT) << BLOCK_BITS
    }
}
