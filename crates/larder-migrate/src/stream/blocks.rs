//! RAM blocks of a migration and their numbers.
//!
//! The parsers of all channels share them. A multifd packet names its block, a record of the main channel names it
//! where it changes, and the size is sent once, at the beginning of the main channel. A parser accesses the table
//! only where a name differs from the last one, so the cost of the lock is negligible.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::units::PAGE_BYTES;

/// Number of a RAM block in this migration: from 0, in the order in which the parsers met the blocks.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BlockId(u16);

impl BlockId {
    /// Creates the number `id`.
    pub const fn new(id: u16) -> Self {
        Self(id)
    }

    /// Returns the number.
    pub const fn get(self) -> u16 {
        self.0
    }

    /// Returns the number as an index into tables of blocks.
    pub const fn as_usize(self) -> usize {
        self.0 as usize
    }
}

/// Known properties of a RAM block.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RamBlock {
    /// Name in QEMU, such as `pc.ram`. QEMU's names have always been UTF-8, which is not assumed here.
    pub name: Box<[u8]>,
    /// Bytes in use; `None` if a channel named the block before the main channel sent its size.
    pub len_bytes: Option<u64>,
    /// Page size of its memory on the source, if the stream has it: with post-copy, and if other than 4 KiB.
    pub page_bytes: Option<u64>,
}

/// Properties of a block that a parser needs.
#[derive(Clone, Copy, Debug)]
pub(super) struct BlockRef {
    pub(super) id: BlockId,
    /// Number of pages, if the size is known.
    pub(super) pages: Option<u32>,
}

/// RAM blocks of one migration. Clones share the list.
#[derive(Clone, Default, Debug)]
pub struct Blocks {
    table: Arc<Mutex<Table>>,
}

#[derive(Default, Debug)]
struct Table {
    list: Vec<RamBlock>,
    by_name: HashMap<Box<[u8]>, BlockId>,
    /// Number of the main channel's section that has RAM; a main channel that reconnects does not send it again.
    ram_section: Option<u32>,
}

impl Blocks {
    /// Maximum blocks kept, with names of at most 255 bytes. A machine has a few dozen; pages of others are literal.
    pub const MAX: usize = 4096;

    /// Creates an empty list.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns all known blocks, by number.
    pub fn list(&self) -> Vec<RamBlock> {
        self.lock().list.clone()
    }

    /// Returns the properties of a block.
    pub fn get(&self, id: BlockId) -> Option<RamBlock> {
        self.lock().list.get(id.as_usize()).cloned()
    }

    /// Returns the number of known blocks.
    pub fn len(&self) -> usize {
        self.lock().list.len()
    }

    /// Returns true if no block is known.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the block with this name, adding it if needed; `None` if there are [`Self::MAX`] others.
    pub(super) fn get_or_add(&self, name: &[u8]) -> Option<BlockRef> {
        self.lock().get_or_add(name)
    }

    /// Returns the block with this name like [`Self::get_or_add`], and sets its size.
    pub(super) fn set_size(&self, name: &[u8], len_bytes: u64) -> Option<BlockRef> {
        let mut table = self.lock();
        let id = table.get_or_add(name)?.id;
        table.list[id.as_usize()].len_bytes = Some(len_bytes);
        Some(table.block_ref(id))
    }

    /// Sets the page size of a block's memory.
    pub(super) fn set_page_size(&self, id: BlockId, bytes: u64) {
        if let Some(block) = self.lock().list.get_mut(id.as_usize()) {
            block.page_bytes = Some(bytes);
        }
    }

    /// Returns [`Table::ram_section`].
    pub(super) fn ram_section(&self) -> Option<u32> {
        self.lock().ram_section
    }

    pub(super) fn set_ram_section(&self, section: u32) {
        self.lock().ram_section = Some(section);
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // No change of the table can be left half-made by a panic.
        self.table.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    fn get_or_add(&mut self, name: &[u8]) -> Option<BlockRef> {
        if let Some(&id) = self.by_name.get(name) {
            return Some(self.block_ref(id));
        }
        if self.list.len() >= Blocks::MAX {
            return None;
        }
        let id = BlockId(u16::try_from(self.list.len()).ok()?);
        self.list.push(RamBlock { name: name.into(), len_bytes: None, page_bytes: None });
        self.by_name.insert(name.into(), id);
        Some(self.block_ref(id))
    }

    fn block_ref(&self, id: BlockId) -> BlockRef {
        let pages = |len_bytes: u64| u32::try_from(len_bytes / PAGE_BYTES).unwrap_or(u32::MAX);
        BlockRef { id, pages: self.list[id.as_usize()].len_bytes.map(pages) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parsers_share_block_numbers() {
        let blocks = Blocks::new();
        let other = blocks.clone();
        let ram = blocks.get_or_add(b"pc.ram").unwrap();
        assert_eq!(ram.pages, None);
        let rom = other.set_size(b"pc.rom", 0x20000).unwrap();
        assert_eq!((rom.id, rom.pages), (BlockId::new(1), Some(32)));
        assert_eq!(other.get_or_add(b"pc.ram").unwrap().id, ram.id);
        assert_eq!(blocks.get_or_add(b"pc.rom").unwrap().pages, Some(32));
    }

    #[test]
    fn block_table_is_bounded() {
        let blocks = Blocks::new();
        for index in 0..Blocks::MAX {
            assert!(blocks.get_or_add(format!("{index}").as_bytes()).is_some());
        }
        assert!(blocks.get_or_add(b"one more").is_none());
        assert!(blocks.get_or_add(b"17").is_some());
        assert_eq!(blocks.len(), Blocks::MAX);
    }
}
