//! The RAM blocks of a migration and their numbers.
//!
//! Shared by the parsers of all channels: a multifd packet names its block, a record of the main channel names it where it
//! changes, and the size is told once, at the beginning of the main channel. A parser asks here only where a name is
//! another than the last one, so the lock is of no account.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::units::PAGE_BYTES;

/// A RAM block, by its number in this migration: from 0, in the order in which the parsers met them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BlockId(u16);

impl BlockId {
    /// Block number `id`.
    pub const fn new(id: u16) -> Self {
        Self(id)
    }

    /// Its number.
    pub const fn get(self) -> u16 {
        self.0
    }

    /// Its number, to index tables of blocks with.
    pub const fn as_usize(self) -> usize {
        self.0 as usize
    }
}

/// What is known of a RAM block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Block {
    /// QEMU's name of it, such as `pc.ram`; not always UTF-8, but for QEMU it always has been.
    pub name: Box<[u8]>,
    /// Bytes in use, or none if a channel named it before the main channel told.
    pub len_bytes: Option<u64>,
    /// The page size of its memory on the source, where the stream tells: post-copy, and other than 4 KiB.
    pub page_bytes: Option<u64>,
}

/// What a parser needs of a block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Found {
    pub(super) id: BlockId,
    /// How many pages it has, if its size is known.
    pub(super) pages: Option<u32>,
}

/// The RAM blocks of one migration. Clones are the same list.
#[derive(Clone, Default, Debug)]
pub struct Blocks {
    table: Arc<Mutex<Table>>,
}

#[derive(Default, Debug)]
struct Table {
    list: Vec<Block>,
    by_name: HashMap<Box<[u8]>, BlockId>,
    /// The section of the main channel that has RAM; a main channel that is connected anew does not tell it again.
    ram_section: Option<u32>,
}

impl Blocks {
    /// So many blocks are kept, of names of 255 bytes at most. A machine has a few dozen; pages of others are literal.
    pub const MAX: usize = 4096;

    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// All that are known, by number.
    pub fn list(&self) -> Vec<Block> {
        self.lock().list.clone()
    }

    /// What is known of one.
    pub fn get(&self, id: BlockId) -> Option<Block> {
        self.lock().list.get(id.as_usize()).cloned()
    }

    /// How many are known.
    pub fn len(&self) -> usize {
        self.lock().list.len()
    }

    /// Whether none is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The block of this name, new or not; none if there are [`Self::MAX`] others.
    pub(super) fn named(&self, name: &[u8]) -> Option<Found> {
        self.lock().named(name)
    }

    /// The same, and its size is told.
    pub(super) fn sized(&self, name: &[u8], len_bytes: u64) -> Option<Found> {
        let mut table = self.lock();
        let id = table.named(name)?.id;
        table.list[id.as_usize()].len_bytes = Some(len_bytes);
        Some(table.found(id))
    }

    /// The page size of a block's memory is told.
    pub(super) fn page_size(&self, id: BlockId, bytes: u64) {
        if let Some(block) = self.lock().list.get_mut(id.as_usize()) {
            block.page_bytes = Some(bytes);
        }
    }

    /// See [`Table::ram_section`].
    pub(super) fn ram_section(&self) -> Option<u32> {
        self.lock().ram_section
    }

    pub(super) fn set_ram_section(&self, section: u32) {
        self.lock().ram_section = Some(section);
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // No change of the table can stop half-way.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn named(&mut self, name: &[u8]) -> Option<Found> {
        if let Some(&id) = self.by_name.get(name) {
            return Some(self.found(id));
        }
        if self.list.len() >= Blocks::MAX {
            return None;
        }
        let id = BlockId(u16::try_from(self.list.len()).ok()?);
        self.list.push(Block {
            name: name.into(),
            len_bytes: None,
            page_bytes: None,
        });
        self.by_name.insert(name.into(), id);
        Some(self.found(id))
    }

    fn found(&self, id: BlockId) -> Found {
        let pages = |len_bytes: u64| u32::try_from(len_bytes / PAGE_BYTES).unwrap_or(u32::MAX);
        Found {
            id,
            pages: self.list[id.as_usize()].len_bytes.map(pages),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_has_one_number_for_all_who_ask() {
        let blocks = Blocks::new();
        let other = blocks.clone();
        let ram = blocks.named(b"pc.ram").unwrap();
        assert_eq!(ram.pages, None);
        let rom = other.sized(b"pc.rom", 0x20000).unwrap();
        assert_eq!((rom.id, rom.pages), (BlockId::new(1), Some(32)));
        assert_eq!(other.named(b"pc.ram").unwrap().id, ram.id);
        assert_eq!(blocks.named(b"pc.rom").unwrap().pages, Some(32));
    }

    #[test]
    fn more_blocks_than_any_machine_has_are_not_kept() {
        let blocks = Blocks::new();
        for index in 0..Blocks::MAX {
            assert!(blocks.named(format!("{index}").as_bytes()).is_some());
        }
        assert!(blocks.named(b"one more").is_none());
        assert!(blocks.named(b"17").is_some());
        assert_eq!(blocks.len(), Blocks::MAX);
    }
}
