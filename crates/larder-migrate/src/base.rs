//! The old versions of pages that deltas are made against, which sender and receiver hold alike.
//!
//! ```text
//! sender   Index: page -> slot, which to replace         receiver
//!          Slots: slot -> 4 KiB   <-- the same bytes -->  Slots: slot -> 4 KiB
//!          Frontier: in which order                       Frontier: in which order
//! ```
//!
//! The sender alone decides which slot a page has; the receiver does what the frames say. A frame that takes or changes
//! a slot says which frames must have done so before it ([`crate::wire::FrameHeader::after`]), and both sides wait for
//! those, so that a slot goes through the same versions on both, however the frames run beside one another.
//!
//! No cycle of waiting: a frame waits for frames with lower numbers only; each lane carries frames in the order of their
//! numbers; and a receiver decodes a frame without waiting for QEMU to take an earlier one.
//!
//! What a slot holds is not believed: a frame has a checksum of what it becomes.

use std::collections::{BTreeSet, HashMap};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

mod slots;

pub use slots::{Chunk, Slots};

/// One page of a guest in one number: its RAM block and its place there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageKey(u64);

impl PageKey {
    /// Bits of the number of a page in its block.
    const PAGE_BITS: u32 = 40;

    /// `None` for a page past 4 PiB, or a block past the 2^24th, of which nothing is kept.
    #[must_use]
    pub const fn new(block: u32, page: u64) -> Option<Self> {
        if page >> Self::PAGE_BITS != 0 || block >> (u64::BITS - Self::PAGE_BITS) != 0 {
            return None;
        }
        Some(Self((block as u64) << Self::PAGE_BITS | page))
    }

    /// The stretch of a MiB that the page lies in, of all blocks.
    #[must_use]
    pub const fn region(self) -> u64 {
        self.0 >> 8
    }
}

/// The sender's knowledge of the slots.
pub struct Index {
    slots: HashMap<PageKey, u32, BuildHasherDefault<KeyHasher>>,
    entries: Vec<Entry>,
    limit: u32,
    /// Where the search for a slot to replace goes on.
    hand: u32,
    seen: Seen,
}

struct Entry {
    key: PageKey,
    /// The last frame that took or changed it.
    frame: u64,
    /// Sent again since the hand passed.
    referenced: bool,
    /// Deltas running that saved too little.
    misses: u8,
    /// Times that the page was left out since its last delta.
    left_out: u8,
}

/// Deltas running that saved too little, after which a page is left out.
const MISSES_MAX: u8 = 2;
/// Of so many times that such a page is sent, one is tried all the same.
const RETRY_EVERY: u8 = 8;
/// Slots that are looked at for one to replace.
const SEARCH_MAX: usize = 32;

/// When an old version of a page is worth its memory, and a copy at either end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Keep {
    /// From the first time on that the page is sent, and whatever deltas of it have saved.
    AtOnce,
    /// Once the page was sent again: most are sent once.
    SentAgain,
    /// Not as long as next to nothing is left of it anyway.
    Never,
}

/// Where the old version of a page is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Of the version, and of the new one afterwards.
    pub slot: u32,
    /// The slot holds an older version of this page, not one of another page.
    pub holds: bool,
}

impl Index {
    /// For as many slots as both sides keep.
    #[must_use]
    pub fn new(limit: u32) -> Self {
        Self {
            slots: HashMap::default(),
            entries: Vec::new(),
            limit,
            hand: 0,
            seen: Seen::default(),
        }
    }

    /// The slot of a page that goes into `frame`, and how far frames must have come before (`after`, raised as needed).
    /// `None`: it is kept nowhere, because there is no room, or because deltas of it save nothing.
    ///
    /// One that was never sent before gets a free slot only.
    pub fn place(&mut self, key: PageKey, frame: u64, keep: Keep, after: &mut u64) -> Option<Place> {
        if keep == Keep::Never {
            self.seen.insert(key);
            return None;
        }
        if let Some(&slot) = self.slots.get(&key) {
            let entry = &mut self.entries[slot as usize];
            entry.referenced = true;
            if entry.misses >= MISSES_MAX && keep != Keep::AtOnce {
                entry.left_out += 1;
                if entry.left_out < RETRY_EVERY {
                    return None;
                }
                entry.left_out = 0;
            }
            Self::claim(entry, frame, after);
            return Some(Place { slot, holds: true });
        }
        let first = self.seen.insert(key);
        if first && keep != Keep::AtOnce {
            return None;
        }
        let slot = if (self.entries.len() as u64) < u64::from(self.limit) {
            self.entries.push(Entry::new(key, frame));
            (self.entries.len() - 1) as u32
        } else if first {
            return None;
        } else {
            let slot = self.victim()?;
            let entry = &mut self.entries[slot as usize];
            Self::claim(entry, frame, after);
            self.slots.remove(&entry.key);
            *entry = Entry::new(key, frame);
            slot
        };
        self.slots.insert(key, slot);
        Some(Place { slot, holds: false })
    }

    /// Hears whether the delta of a page saved much.
    pub fn learn(&mut self, slot: u32, saved: bool) {
        let entry = &mut self.entries[slot as usize];
        entry.misses = if saved { 0 } else { (entry.misses + 1).min(MISSES_MAX) };
    }

    /// Pages that are kept.
    #[must_use]
    pub fn used(&self) -> u32 {
        self.entries.len() as u32
    }

    fn claim(entry: &mut Entry, frame: u64, after: &mut u64) {
        // Within a frame both sides go by the order of its pages.
        if entry.frame != frame {
            *after = (*after).max(entry.frame + 1);
            entry.frame = frame;
        }
    }

    fn victim(&mut self) -> Option<u32> {
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
        Self {
            key,
            frame,
            referenced: false,
            misses: 0,
            left_out: 0,
        }
    }
}

/// Which pages were sent at all: a bit for each, in pieces of 128 MiB of the guest.
#[derive(Default)]
struct Seen {
    pieces: HashMap<u64, Box<[u64; Self::WORDS]>, BuildHasherDefault<KeyHasher>>,
}

impl Seen {
    const WORDS: usize = 512;
    const PAGES: u64 = 64 * Self::WORDS as u64;
    /// 64 MiB of bits, for 2 TiB of guest. What lies beyond counts as sent before.
    const PIECES_MAX: usize = 16 << 10;

    /// Whether the page was not there.
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

/// Page numbers spread by one multiplication (Knuth's; the high bits are what the table uses last, so they are folded
/// down).
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

/// How far the frames of a session have come, for those that must come after others.
pub struct Frontier {
    progress: Mutex<Progress>,
    changed: Condvar,
}

/// Frames that one may be ahead of the first that is not done: the windows of the channels stop an honest sender long
/// before.
const AHEAD_MAX: u64 = 1 << 18;

#[derive(Default)]
struct Progress {
    /// All frames below are done.
    next: u64,
    /// Done beyond it, by lanes that ran ahead.
    beyond: BTreeSet<u64>,
    stopped: bool,
}

/// The session ended while somebody waited.
#[derive(Debug, PartialEq, Eq)]
pub struct Stopped;

impl Frontier {
    /// With no frame done.
    #[must_use]
    pub fn new() -> Self {
        Self {
            progress: Mutex::default(),
            changed: Condvar::new(),
        }
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

    /// Frame `number` has done all that it does to the slots. `false` if it cannot be: it was done before, or is further
    /// ahead than [`AHEAD_MAX`].
    pub fn done(&self, number: u64) -> bool {
        let mut progress = self.lock();
        if number < progress.next || number - progress.next >= AHEAD_MAX {
            return false;
        }
        if !progress.beyond.insert(number) {
            return false;
        }
        let before = progress.next;
        while let Some(first) = progress.beyond.first().copied().filter(|&first| first == progress.next) {
            progress.beyond.remove(&first);
            progress.next += 1;
        }
        if progress.next != before {
            self.changed.notify_all();
        }
        true
    }

    /// Ends all waiting.
    pub fn stop(&self) {
        self.lock().stopped = true;
        self.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, Progress> {
        self.progress.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Default for Frontier {
    fn default() -> Self {
        Self::new()
    }
}
