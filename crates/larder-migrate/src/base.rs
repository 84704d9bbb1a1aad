//! Old versions of pages that deltas are encoded against. Sender and receiver hold identical copies.
//!
//! ```text
//! sender   Index: slots of pages, victims                 receiver
//!          Slots: slot -> 4 KiB   <-- the same bytes -->  Slots: slot -> 4 KiB
//!          Frontier: order of the frames                  Frontier: order of the frames
//! ```
//!
//! The sender alone decides which slot a page has; the receiver follows the frames. A frame that uses or changes a
//! slot names the frames that must have done so before it ([`crate::wire::FrameHeader::after`]), and both sides wait
//! for those. So a slot goes through the same versions on both sides, although frames are processed concurrently.
//!
//! The waits cannot deadlock: a frame waits for frames with lower numbers only; each lane carries frames in the order
//! of their numbers; and a receiver decodes a frame without waiting for QEMU to take an earlier one.
//!
//! The content of a slot is not trusted: each frame carries a checksum of its decoded bytes.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

mod slots;

pub use slots::{Chunk, Slots};

/// Guest page, as one number that combines its RAM block and its index in the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageKey(u64);

impl PageKey {
    /// Bits of a page's index in its block.
    const PAGE_BITS: u32 = 40;

    /// Returns the key, or `None` for a page past 4 PiB or a block past the 2^24th; no old version of such a page is
    /// kept.
    #[must_use]
    pub const fn new(block: u32, page: u64) -> Option<Self> {
        if page >> Self::PAGE_BITS != 0 || block >> (u64::BITS - Self::PAGE_BITS) != 0 {
            return None;
        }
        Some(Self((block as u64) << Self::PAGE_BITS | page))
    }

    /// Returns the number of the 1 MiB region that the page lies in. Numbers are unique across all blocks.
    #[must_use]
    pub const fn region(self) -> u64 {
        self.0 >> 8
    }
}

/// Map from pages to slots, which only the sender has.
pub struct BaseIndex {
    slots: HashMap<PageKey, u32, BuildHasherDefault<KeyHasher>>,
    entries: Vec<Entry>,
    limit: u32,
    /// Position of the clock hand, where the search for a victim continues.
    hand: u32,
    sent_pages: SentPages,
}

struct Entry {
    key: PageKey,
    /// Number of the last frame that used or changed the slot.
    frame: u64,
    /// The page was sent again since the clock hand passed.
    referenced: bool,
    /// Consecutive deltas that saved too little.
    misses: u8,
    /// Times that the page was sent without a slot since its last delta was tried.
    skipped_sends: u8,
}

/// Number of consecutive deltas that save too little after which deltas of a page are suspended.
const MISSES_MAX: u8 = 2;
/// Number of times that such a page is sent per delta that is tried all the same.
const RETRY_EVERY: u8 = 8;
/// Maximum number of slots that the search for a victim inspects.
const SEARCH_MAX: usize = 32;

/// Policy for keeping an old version of a page, which costs memory and a copy at either end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BasePolicy {
    /// Keep the page from the first time that it is sent, whatever its deltas have saved.
    OnFirstSend,
    /// Keep the page once it is sent a second time; most pages are sent once.
    OnSecondSend,
    /// Do not keep the page: it compresses to almost nothing anyway.
    Never,
}

/// Slot of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BaseSlot {
    /// Slot that holds the old version, and later the new one.
    pub slot: u32,
    /// True if the slot holds an older version of this page, false if it holds another page or none.
    pub has_base: bool,
}

impl BaseIndex {
    /// Creates an index of `limit` slots, the number that both sides keep.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self { slots: HashMap::default(), entries: Vec::new(), limit, hand: 0, sent_pages: SentPages::default() }
    }

    /// Returns the slot of a page of `frame`, and raises `after` where earlier frames must be done first. Returns
    /// `None` if the page gets no slot: there is no room, its deltas save nothing, or `policy` excludes it.
    ///
    /// A page that was never sent before gets only a free slot.
    pub fn assign_slot(&mut self, key: PageKey, frame: u64, policy: BasePolicy, after: &mut u64) -> Option<BaseSlot> {
        if policy == BasePolicy::Never {
            self.sent_pages.insert(key);
            return None;
        }
        if let Some(&slot) = self.slots.get(&key) {
            let entry = &mut self.entries[slot as usize];
            entry.referenced = true;
            if entry.misses >= MISSES_MAX && policy != BasePolicy::OnFirstSend {
                entry.skipped_sends += 1;
                if entry.skipped_sends < RETRY_EVERY {
                    return None;
                }
                entry.skipped_sends = 0;
            }
            Self::add_dependency(entry, frame, after);
            return Some(BaseSlot { slot, has_base: true });
        }
        let first = self.sent_pages.insert(key);
        if first && policy != BasePolicy::OnFirstSend {
            return None;
        }
        let slot = if (self.entries.len() as u64) < u64::from(self.limit) {
            self.entries.push(Entry::new(key, frame));
            (self.entries.len() - 1) as u32
        } else if first {
            return None;
        } else {
            let slot = self.find_victim()?;
            let entry = &mut self.entries[slot as usize];
            Self::add_dependency(entry, frame, after);
            self.slots.remove(&entry.key);
            *entry = Entry::new(key, frame);
            slot
        };
        self.slots.insert(key, slot);
        Some(BaseSlot { slot, has_base: false })
    }

    /// Records whether the delta of the page in `slot` saved much.
    pub fn record_saving(&mut self, slot: u32, saved: bool) {
        let entry = &mut self.entries[slot as usize];
        entry.misses = if saved { 0 } else { (entry.misses + 1).min(MISSES_MAX) };
    }

    /// Returns the number of pages that have a slot.
    #[must_use]
    pub fn used(&self) -> u32 {
        self.entries.len() as u32
    }

    fn add_dependency(entry: &mut Entry, frame: u64, after: &mut u64) {
        // Within a frame both sides follow the order of its pages.
        if entry.frame != frame {
            *after = (*after).max(entry.frame + 1);
            entry.frame = frame;
        }
    }

    fn find_victim(&mut self) -> Option<u32> {
        for _ in 0..SEARCH_MAX.min(self.entries.len()) {
            let slot = self.hand;
            self.hand = (self.hand + 1) % self.entries.len() as u32;
            if !std::mem::take(&mut self.entries[slot as usize].referenced) {
                return Some(slot);
            }
        }
        None
    }
}

impl Entry {
    const fn new(key: PageKey, frame: u64) -> Self {
        Self { key, frame, referenced: false, misses: 0, skipped_sends: 0 }
    }
}

/// Set of pages that were sent at least once: a bit for each, allocated in pieces of 128 MiB of guest memory.
#[derive(Default)]
struct SentPages {
    pieces: HashMap<u64, Box<[u64; Self::WORDS]>, BuildHasherDefault<KeyHasher>>,
}

impl SentPages {
    const WORDS: usize = 512;
    const PAGES: u64 = 64 * Self::WORDS as u64;
    /// Maximum pieces: 64 MiB of bits, for 2 TiB of guest memory. Pages beyond that count as sent before.
    const PIECES_MAX: usize = 16 << 10;

    /// Marks the page as sent; returns true if it was not marked before.
    fn insert(&mut self, key: PageKey) -> bool {
        let piece = key.0 / Self::PAGES;
        if self.pieces.len() == Self::PIECES_MAX && !self.pieces.contains_key(&piece) {
            return false;
        }
        let words = self.pieces.entry(piece).or_insert_with(|| Box::new([0; Self::WORDS]));
        let page = key.0 % Self::PAGES;
        let word = &mut words[(page / 64) as usize];
        let bit = 1 << (page % 64);
        let first = *word & bit == 0;
        *word |= bit;
        first
    }
}

/// Hasher that spreads page numbers by one multiplication (Knuth's). The hash table uses the high bits last, so they
/// are folded down.
#[derive(Default)]
struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(byte.into());
        }
    }

    fn write_u64(&mut self, value: u64) {
        let product = u128::from(self.0 ^ value) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (product as u64) ^ ((product >> 64) as u64);
    }
}

/// Progress of a session's frames, for frames that must wait for earlier ones.
pub struct Frontier {
    progress: Mutex<FrontierState>,
    changed: Condvar,
}

/// Maximum distance of a frame from the first one that is not done. The windows of the channels stop a correct sender
/// long before.
const AHEAD_MAX: u64 = 1 << 18;

#[derive(Default)]
struct FrontierState {
    /// All frames with lower numbers are done.
    next: u64,
    /// Frames above `next` that lanes running ahead have done.
    done_ahead: BTreeSet<u64>,
    stopped: bool,
}

/// Error: the session ended during a wait.
#[derive(Debug, PartialEq, Eq)]
pub struct Stopped;

impl Frontier {
    /// Creates a frontier at which no frame is done.
    #[must_use]
    pub fn new() -> Self {
        Self { progress: Mutex::default(), changed: Condvar::new() }
    }

    /// Waits until all frames below `after` are done.
    ///
    /// # Errors
    /// The session ends.
    pub fn wait(&self, after: u64) -> Result<(), Stopped> {
        let mut progress = self.lock();
        while progress.next < after && !progress.stopped {
            progress = self.changed.wait(progress).unwrap_or_else(PoisonError::into_inner);
        }
        if progress.stopped { Err(Stopped) } else { Ok(()) }
    }

    /// Records that frame `number` has made all its changes to slots. Returns false if that is impossible: the frame
    /// was recorded before, or it is [`AHEAD_MAX`] or more ahead.
    pub fn mark_done(&self, number: u64) -> bool {
        let mut progress = self.lock();
        if number < progress.next || number - progress.next >= AHEAD_MAX {
            return false;
        }
        if !progress.done_ahead.insert(number) {
            return false;
        }
        let before = progress.next;
        while let Some(first) = progress.done_ahead.first().copied().filter(|&first| first == progress.next) {
            progress.done_ahead.remove(&first);
            progress.next += 1;
        }
        if progress.next != before {
            self.changed.notify_all();
        }
        true
    }

    /// Ends all waits.
    pub fn stop(&self) {
        self.lock().stopped = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, FrontierState> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Frontier {
    fn default() -> Self {
        Self::new()
    }
}
