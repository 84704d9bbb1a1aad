//! State that must outlive the pager: the managed regions, the location of each page, and the last messages of the
//! kernel.
//!
//! The state is in memory of which the managed process holds descriptors, so it lives exactly as long as the memory
//! that it describes. A successor finds it there, and it is freed when the process ends. The process cannot write to
//! it unless it runs as the pager's user: its descriptors are read-only, and only the pager's user can open the files
//! for writing.
//!
//! ```text
//! "larder-pages"
//!      0  header        magic "LARDMEM\0", version, features, CRC32C, number of regions, descriptor numbers
//!    128  key           64 bytes, if the disks are encrypted: the key is nowhere else
//!    512  swap cache    its identity: 768 bytes, see below; 2048  slow store, in the same form
//!   4 KiB messages      64 messages of the kernel, 32 bytes each, as they were read; unused ones are zeros
//!   8 KiB regions       960 of 64 bytes
//!  72 KiB entries       16 bytes for each page of all regions (see [`crate::entry`])
//!
//! swap cache, slow store
//!      0  1 once the rest is valid      4  segments       8  identity, 16 bytes
//!     24  length of its name           32  name
//! "larder-compressed"   the log of compressed RAM (see [`crate::log`])
//! ```

use std::io;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

use zeroize::Zeroizing;

use crate::crypt::{Cipher, KEY_BYTES};
use crate::entry::{EntryWord, EvictionRecord, Tier};
use crate::shared::SharedMemory;
use crate::units::{PAGE_BYTES, PageIndex};
use crate::userfaultfd::RawUffdMessage;

/// Name of the memfd with header and entries, as /proc shows it.
pub const PAGES_NAME: &str = "larder-pages";
/// Name of the memfd with compressed pages, as /proc shows it.
pub const COMPRESSED_NAME: &str = "larder-compressed";

const MAGIC: u64 = u64::from_le_bytes(*b"LARDMEM\0");
const VERSION: u32 = 1;

/// Maximum number of messages read at a time. More threads than this rarely wait at the same time.
pub const MESSAGES_MAX: usize = 64;
/// Maximum number of regions. QEMU has at most 509 memory slots.
pub const REGIONS_MAX: usize = 960;

const FEATURES_AT: usize = 24;
const HEADER_CHECKED_BYTES: usize = 64;
const CHECKSUM_AT: usize = 64;
const REGION_COUNT_AT: usize = 72;
const USERFAULTFD_AT: usize = 80;
const EVICTED_AT: usize = 88;
const RING_AT: usize = 96;
const RING_MEMORY_AT: usize = 100;
const KEY_AT: usize = 128;
const SWAPS_AT: [usize; 2] = [512, 2048];
const SWAP_NAME_AT: usize = 32;
/// Maximum length of the name of a swap cache, in bytes.
const SWAP_NAME_MAX: usize = 1024;
const MESSAGES_AT: usize = 4 << 10;
const REGIONS_AT: usize = 8 << 10;
const REGION_BYTES: usize = 64;
const ENTRIES_AT: usize = 72 << 10;
const ENTRY_BYTES: usize = 16;

/// Feature bit: the disks are encrypted.
const FEATURE_ENCRYPTED: u64 = 1;

/// Feature bit: the userfaultfd may be in a ring ([`crate::locked_ring`]).
const FEATURE_LOCKED_RING: u64 = 2;

/// Memory of the managed process that is one mapping of one file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Region {
    /// Number of its first page.
    pub first: PageIndex,
    /// Number of pages.
    pub pages: u32,
    /// Address in the process, or 0 once the process has unmapped the region.
    pub address: u64,
    /// Offset in the file, in bytes.
    pub offset: u64,
    /// Device number of the file's file system.
    pub device: u64,
    /// Inode number of the file.
    pub inode: u64,
}

impl Region {
    /// Returns the length of the region, in bytes.
    pub const fn bytes(&self) -> u64 {
        self.pages as u64 * PAGE_BYTES
    }

    /// Returns true if the process has unmapped the region. Its page numbers are not used again.
    pub const fn is_unmapped(&self) -> bool {
        self.address == 0
    }

    /// Returns true if `page` belongs to the region.
    pub fn contains(&self, page: PageIndex) -> bool {
        page >= self.first && page.get() - self.first.get() < self.pages
    }
}

/// Identity of a disk that stores pages of the process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct SwapIdentity {
    /// Unique identifier of the disk.
    pub uuid: [u8; 16],
    /// Number of segments.
    pub segments: u32,
    /// Name of the disk: a path or an address.
    pub name: String,
}

/// Error of opening or changing a state.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// The memory is not a state, or is damaged.
    #[error("the state that an earlier pager has left is damaged: {0}")]
    Damaged(&'static str),
    /// The state has another format version.
    #[error(
        "the state that an earlier pager has left has format version {0}, this program knows version {VERSION}: continue with the larder that attached"
    )]
    Version(u32),
    /// The state has features that this version does not support.
    #[error(
        "the state that an earlier pager has left has features {0:#x} that this program does not know: continue with the larder that attached"
    )]
    Features(u64),
    /// The name of a disk is too long.
    #[error("the name of a swap cache can have at most {0} bytes")]
    SwapNameTooLong(usize),
    /// The memory cannot be opened.
    #[error("the state that an earlier pager has left cannot be opened: {0}")]
    Open(#[from] io::Error),
}

/// State of one managed process.
pub struct PagerState {
    memory: SharedMemory,
    capacity: u32,
    observer: Option<fn()>,
}

impl PagerState {
    /// Makes a state for `capacity` pages, none of which is stored, of the process that started at `start_time` (field
    /// 22 of /proc/PID/stat).
    ///
    /// # Errors
    /// If there is no memory.
    pub fn create(capacity: u32, start_time: u64) -> io::Result<Self> {
        let bytes = ENTRIES_AT + capacity as usize * ENTRY_BYTES;
        let memory = SharedMemory::create(c"larder-pages", bytes)?;
        memory.word(0).store(MAGIC, Ordering::Relaxed);
        memory.half_word(8).store(VERSION, Ordering::Relaxed);
        memory.half_word(12).store(capacity, Ordering::Relaxed);
        memory.word(16).store(start_time, Ordering::Relaxed);
        memory.half_word(CHECKSUM_AT).store(Self::header_checksum(&memory), Ordering::Release);
        Ok(Self { memory, capacity, observer: None })
    }

    /// Opens the state that another pager has left in `memory`, of the process that started at `start_time`.
    ///
    /// # Errors
    /// If the memory is not a state, has another version, or is damaged.
    pub fn open(memory: SharedMemory, start_time: u64) -> Result<Self, StateError> {
        if memory.len() < ENTRIES_AT || memory.word(0).load(Ordering::Relaxed) != MAGIC {
            return Err(StateError::Damaged("it has no header of a state"));
        }
        let version = memory.half_word(8).load(Ordering::Relaxed);
        if version != VERSION {
            return Err(StateError::Version(version));
        }
        if memory.half_word(CHECKSUM_AT).load(Ordering::Acquire) != Self::header_checksum(&memory) {
            return Err(StateError::Damaged("its header has a wrong checksum"));
        }
        let capacity = memory.half_word(12).load(Ordering::Relaxed);
        if memory.len() < ENTRIES_AT + capacity as usize * ENTRY_BYTES {
            return Err(StateError::Damaged("it is shorter than its header specifies"));
        }
        if memory.word(16).load(Ordering::Relaxed) != start_time {
            return Err(StateError::Damaged("it belongs to another process"));
        }
        let unknown = memory.word(FEATURES_AT).load(Ordering::Relaxed) & !(FEATURE_ENCRYPTED | FEATURE_LOCKED_RING);
        if unknown != 0 {
            return Err(StateError::Features(unknown));
        }
        let state = Self { memory, capacity, observer: None };
        let mut next = 0;
        for region in state.regions() {
            let fits = region.pages > 0
                && region.first.get() == next
                && region.address.is_multiple_of(PAGE_BYTES)
                && region.offset.is_multiple_of(PAGE_BYTES)
                && region.address.checked_add(region.bytes()).is_some()
                && region.offset.checked_add(region.bytes()).is_some();
            next = region.first.get().saturating_add(region.pages);
            if !fits || next > capacity {
                return Err(StateError::Damaged("its regions are inconsistent"));
            }
        }
        Ok(state)
    }

    fn header_checksum(memory: &SharedMemory) -> u32 {
        let mut bytes = [0; HEADER_CHECKED_BYTES];
        for (offset, chunk) in bytes.chunks_exact_mut(8).enumerate() {
            chunk.copy_from_slice(&memory.word(offset * 8).load(Ordering::Relaxed).to_le_bytes());
        }
        crc32c::crc32c(&bytes)
    }

    /// Generates a random key and enables encryption of the disks. The key is stored only in this state. Called
    /// before another process has the state.
    ///
    /// # Errors
    /// If the kernel has no random numbers.
    pub fn generate_key(&self) -> io::Result<()> {
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        // SAFETY: the kernel writes the given number of bytes to a buffer of that size.
        let made = unsafe { libc::getrandom(key.as_mut_ptr().cast(), KEY_BYTES, 0) };
        if made != KEY_BYTES as isize {
            return Err(io::Error::last_os_error());
        }
        let (words, _) = key.as_chunks::<8>();
        for (index, word) in words.iter().enumerate() {
            let at = self.memory.word(KEY_AT + index * 8);
            at.store(u64::from_le_bytes(*word), Ordering::Relaxed);
        }
        self.add_feature(FEATURE_ENCRYPTED);
        Ok(())
    }

    /// Sets the feature bit that requires successors to support rings. Called before another process has the state.
    pub fn require_ring_support(&self) {
        self.add_feature(FEATURE_LOCKED_RING);
    }

    fn add_feature(&self, feature: u64) {
        self.memory.word(FEATURES_AT).fetch_or(feature, Ordering::Relaxed);
        self.memory.half_word(CHECKSUM_AT).store(Self::header_checksum(&self.memory), Ordering::Release);
    }

    /// Returns true if the disks are encrypted.
    pub fn is_encrypted(&self) -> bool {
        self.memory.word(FEATURES_AT).load(Ordering::Relaxed) & FEATURE_ENCRYPTED != 0
    }

    /// Returns the cipher of the disks, if they are encrypted. A damaged key is not detected here, but by the
    /// checksum of every page.
    pub fn cipher(&self) -> Option<Cipher> {
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        let (words, _) = key.as_chunks_mut::<8>();
        for (index, word) in words.iter_mut().enumerate() {
            *word = self.memory.word(KEY_AT + index * 8).load(Ordering::Relaxed).to_le_bytes();
        }
        self.is_encrypted().then(|| Cipher::new(&key))
    }

    /// Wipes the key. Called when no page is stored any more, and no successor follows.
    pub fn wipe_key(&self) {
        (0..KEY_BYTES / 8).for_each(|index| self.memory.word(KEY_AT + index * 8).store(0, Ordering::Relaxed));
    }

    /// Calls `observer` before each change of an entry or a region. A simulator stops the pager there.
    pub fn set_observer(&mut self, observer: fn()) {
        self.observer = Some(observer);
    }

    fn before_change(&self) {
        if let Some(observer) = self.observer {
            observer();
        }
    }

    /// Returns the memory of the state, to be locked and passed to the process.
    pub fn memory(&self) -> &SharedMemory {
        &self.memory
    }

    /// Returns the number of pages that have entries.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Returns the descriptor number, in the managed process, of the userfaultfd or of the ring that holds it. Set
    /// before memory is registered.
    pub fn userfaultfd_number(&self) -> Option<u32> {
        self.number(USERFAULTFD_AT)
    }

    /// Records [`Self::userfaultfd_number`].
    pub fn set_userfaultfd_number(&self, number: u32) {
        self.set_number(USERFAULTFD_AT, Some(number));
    }

    /// Returns the descriptor number, in the managed process, of a pager's ring.
    pub fn ring_number(&self) -> Option<u32> {
        self.number(RING_AT)
    }

    /// Records [`Self::ring_number`].
    pub fn set_ring_number(&self, number: Option<u32>) {
        self.set_number(RING_AT, number);
    }

    /// Returns the descriptor number, in the managed process, of the ring's memory, if [`Self::userfaultfd_number`]
    /// is that of a ring.
    pub fn ring_memory_number(&self) -> Option<u32> {
        self.number(RING_MEMORY_AT)
    }

    /// Records [`Self::ring_memory_number`].
    pub fn set_ring_memory_number(&self, number: u32) {
        self.set_number(RING_MEMORY_AT, Some(number));
    }

    fn number(&self, at: usize) -> Option<u32> {
        // Stored as the number plus one; zero means none.
        self.memory.half_word(at).load(Ordering::Acquire).checked_sub(1)
    }

    fn set_number(&self, at: usize, number: Option<u32>) {
        let number = number.map_or(0, |number| number + 1);
        self.memory.half_word(at).store(number, Ordering::Release);
    }

    fn swap_at(tier: Tier) -> Option<usize> {
        match tier {
            Tier::Ram => None,
            Tier::Ssd => Some(SWAPS_AT[0]),
            Tier::Slow => Some(SWAPS_AT[1]),
        }
    }

    /// Returns the disk of a tier, if it has one.
    pub fn swap(&self, tier: Tier) -> Option<SwapIdentity> {
        let at = Self::swap_at(tier)?;
        if self.memory.half_word(at).load(Ordering::Acquire) != 1 {
            return None;
        }
        let word = |offset: usize| self.memory.word(at + offset).load(Ordering::Relaxed);
        let mut uuid = [0; 16];
        uuid[..8].copy_from_slice(&word(8).to_le_bytes());
        uuid[8..].copy_from_slice(&word(16).to_le_bytes());
        let len = (word(24) as usize).min(SWAP_NAME_MAX);
        let name = (0..len.div_ceil(8)).flat_map(|index| word(SWAP_NAME_AT + index * 8).to_le_bytes());
        let name: Vec<u8> = name.take(len).collect();
        Some(SwapIdentity {
            uuid,
            segments: self.memory.half_word(at + 4).load(Ordering::Relaxed),
            name: String::from_utf8_lossy(&name).into_owned(),
        })
    }

    /// Records the disk of a tier, before anything is stored there.
    ///
    /// # Errors
    /// If the name is too long, or the tier has no disk.
    pub fn set_swap(&self, tier: Tier, swap: &SwapIdentity) -> Result<(), StateError> {
        let name = swap.name.as_bytes();
        let (Some(at), true) = (Self::swap_at(tier), name.len() <= SWAP_NAME_MAX) else {
            return Err(StateError::SwapNameTooLong(SWAP_NAME_MAX));
        };
        let store = |offset: usize, word: u64| self.memory.word(at + offset).store(word, Ordering::Relaxed);
        self.memory.half_word(at).store(0, Ordering::Relaxed);
        self.memory.half_word(at + 4).store(swap.segments, Ordering::Relaxed);
        let (halves, _) = swap.uuid.as_chunks::<8>();
        for (index, half) in halves.iter().enumerate() {
            store(8 + index * 8, u64::from_le_bytes(*half));
        }
        store(24, name.len() as u64);
        for (index, chunk) in name.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            store(SWAP_NAME_AT + index * 8, u64::from_le_bytes(word));
        }
        self.memory.half_word(at).store(1, Ordering::Release);
        Ok(())
    }

    /// Returns the count of all evictions so far. It is the clock that measures refault distances.
    pub fn eviction_count(&self) -> &AtomicU64 {
        self.memory.word(EVICTED_AT)
    }

    /// Returns the regions, in the order of their pages.
    pub fn regions(&self) -> Vec<Region> {
        let count = self.memory.half_word(REGION_COUNT_AT).load(Ordering::Acquire) as usize;
        (0..count.min(REGIONS_MAX))
            .map(|index| {
                let at = REGIONS_AT + index * REGION_BYTES;
                let word = |offset: usize| self.memory.word(at + offset).load(Ordering::Relaxed);
                Region {
                    first: PageIndex::new(word(0) as u32),
                    pages: (word(0) >> 32) as u32,
                    address: word(8),
                    offset: word(16),
                    device: word(24),
                    inode: word(32),
                }
            })
            .collect()
    }

    /// Adds a region. A kill at any point leaves all of it or nothing.
    ///
    /// # Errors
    /// If there are [`REGIONS_MAX`] already, if its pages do not follow those of the last region, or if there are no
    /// entries for them.
    pub fn add_region(&self, region: &Region) -> Result<(), StateError> {
        let regions = self.regions();
        let next = regions.last().map_or(0, |last| last.first.get() + last.pages);
        let fits = region.first.get() == next && next.checked_add(region.pages).is_some_and(|end| end <= self.capacity);
        if !fits || regions.len() == REGIONS_MAX {
            return Err(StateError::Damaged("there is no space for another region"));
        }
        let at = REGIONS_AT + regions.len() * REGION_BYTES;
        let words = [
            u64::from(region.first.get()) | u64::from(region.pages) << 32,
            region.address,
            region.offset,
            region.device,
            region.inode,
        ];
        for (index, word) in words.into_iter().enumerate() {
            self.memory.word(at + index * 8).store(word, Ordering::Relaxed);
        }
        self.before_change();
        self.memory.half_word(REGION_COUNT_AT).store(regions.len() as u32 + 1, Ordering::Release);
        Ok(())
    }

    /// Records that the process has unmapped the region whose first page is `first`.
    pub fn mark_unmapped(&self, first: PageIndex) {
        if let Some(index) = self.regions().iter().position(|region| region.first == first) {
            self.before_change();
            self.memory.word(REGIONS_AT + index * REGION_BYTES + 8).store(0, Ordering::Release);
        }
    }

    fn entry_at(&self, page: PageIndex) -> usize {
        assert!(page.get() < self.capacity, "{page:?} is past the capacity of {}", self.capacity);
        ENTRIES_AT + page.as_usize() * ENTRY_BYTES
    }

    /// Returns word 0 of the entry of `page`, its location.
    pub fn word(&self, page: PageIndex) -> EntryWord {
        EntryWord(self.memory.word(self.entry_at(page)).load(Ordering::Acquire))
    }

    /// Returns word 1 of the entry of `page`: its proof, or its repeated word.
    pub fn second_word(&self, page: PageIndex) -> u64 {
        self.memory.word(self.entry_at(page) + 8).load(Ordering::Relaxed)
    }

    /// Returns the checksum and the eviction time of the copy of `page`.
    pub fn eviction_record(&self, page: PageIndex) -> EvictionRecord {
        EvictionRecord::from_word(self.second_word(page))
    }

    /// Sets the entry of `page`, which had no copy. The copy is valid from the last store on.
    pub fn insert(&self, page: PageIndex, word: EntryWord, second: u64) {
        let at = self.entry_at(page);
        debug_assert_eq!(self.word(page), EntryWord::NOT_STORED);
        self.before_change();
        self.memory.word(at + 8).store(second, Ordering::Relaxed);
        self.before_change();
        self.memory.word(at).store(word.0, Ordering::Release);
    }

    /// Records that `page` was evicted again, with an unchanged copy and checksum.
    pub fn set_eviction_record(&self, page: PageIndex, record: EvictionRecord) {
        self.before_change();
        self.memory.word(self.entry_at(page) + 8).store(record.to_word(), Ordering::Relaxed);
    }

    /// Changes the location of `page`, whose content is unchanged, or sets it to nowhere.
    pub fn replace(&self, page: PageIndex, word: EntryWord) {
        self.before_change();
        self.memory.word(self.entry_at(page)).store(word.0, Ordering::Release);
    }

    /// Returns the number of lost pages, in all regions that are mapped.
    pub fn lost_pages(&self) -> u32 {
        let regions = self.regions();
        let regions = regions.iter().filter(|region| !region.is_unmapped());
        let pages = regions.flat_map(|region| (0..region.pages).map(|offset| region.first.plus(offset)));
        pages.filter(|page| self.word(*page).is_lost()).count() as u32
    }

    /// Returns the buffer for the kernel's messages.
    pub fn messages(&self) -> NonNull<[RawUffdMessage]> {
        let base = self.memory.ptr_at(MESSAGES_AT, MESSAGES_MAX * size_of::<RawUffdMessage>());
        NonNull::slice_from_raw_parts(base.cast(), MESSAGES_MAX)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::{CopyLocation, LogOffset, PageEncoding, StoredObject};
    use std::os::fd::AsFd as _;

    #[test]
    fn reopened_state_is_unchanged() {
        let state = PagerState::create(1000, 77).unwrap();
        let region = Region {
            first: PageIndex::new(0),
            pages: 900,
            address: 0x7000_0000_0000,
            offset: 0x1000,
            device: 5,
            inode: 6,
        };
        state.add_region(&region).unwrap();
        state.set_userfaultfd_number(0);
        state.set_ring_memory_number(5);
        let swap = SwapIdentity { uuid: *b"0123456789abcdef", segments: 77, name: "/a/path that is odd".to_owned() };
        state.set_swap(Tier::Ssd, &swap).unwrap();
        let page = PageIndex::new(899);
        let word = EntryWord::encode(CopyLocation::InTier {
            tier: Tier::Ram,
            object: StoredObject { offset: LogOffset::from_bytes(4096), len: 4096, encoding: PageEncoding::Raw },
            clean: false,
        });
        let proof = EvictionRecord { checksum: 1, evicted_at: 2 };
        state.insert(page, word, proof.to_word());

        let again = SharedMemory::open(state.memory().read_only().unwrap().as_fd()).unwrap();
        let again = PagerState::open(again, 77).unwrap();
        assert_eq!(again.regions(), [region]);
        assert_eq!(again.userfaultfd_number(), Some(0));
        assert_eq!((again.ring_number(), again.ring_memory_number()), (None, Some(5)));
        assert_eq!((again.swap(Tier::Ssd), again.swap(Tier::Slow)), (Some(swap), None));
        assert_eq!(again.word(page), word);
        assert_eq!(again.eviction_record(page), proof);
        assert_eq!(again.word(PageIndex::new(0)), EntryWord::NOT_STORED);
    }

    #[test]
    fn state_key_is_unique_and_persistent() {
        let block = |state: &PagerState| {
            let mut block = [0; crate::crypt::BLOCK_BYTES];
            state.cipher().unwrap().encrypt(Tier::Ssd, 0, &mut block);
            block
        };
        let state = PagerState::create(10, 77).unwrap();
        assert!(!state.is_encrypted() && state.cipher().is_none());
        state.generate_key().unwrap();
        let again = SharedMemory::open(state.memory().read_only().unwrap().as_fd()).unwrap();
        let again = PagerState::open(again, 77).unwrap();
        assert!(again.is_encrypted());
        assert_eq!(block(&again), block(&state));
        let other = PagerState::create(10, 77).unwrap();
        other.generate_key().unwrap();
        assert_ne!(block(&other), block(&state));
        state.wipe_key();
        assert_ne!(block(&again), block(&other));
        assert_eq!(again.memory.word(KEY_AT + KEY_BYTES - 8).load(Ordering::Relaxed), 0);
    }

    #[test]
    fn unknown_features_are_rejected() {
        let state = PagerState::create(10, 77).unwrap();
        state.memory().word(FEATURES_AT).store(4, Ordering::Relaxed);
        let checksum = PagerState::header_checksum(state.memory());
        state.memory().half_word(CHECKSUM_AT).store(checksum, Ordering::Relaxed);
        let again = SharedMemory::open(state.memory().as_fd()).unwrap();
        assert!(matches!(PagerState::open(again, 77), Err(StateError::Features(4))));
    }

    #[test]
    fn foreign_or_damaged_state_is_rejected() {
        let state = PagerState::create(10, 77).unwrap();
        let open = |started| PagerState::open(SharedMemory::open(state.memory().as_fd()).unwrap(), started);
        assert!(matches!(open(78), Err(StateError::Damaged(_))));
        state.memory().half_word(8).store(9, Ordering::Relaxed);
        assert!(matches!(open(77), Err(StateError::Version(9))));
        state.memory().half_word(8).store(VERSION, Ordering::Relaxed);
        state.memory().half_word(12).store(5, Ordering::Relaxed);
        assert!(matches!(open(77), Err(StateError::Damaged("its header has a wrong checksum"))));
    }
}
