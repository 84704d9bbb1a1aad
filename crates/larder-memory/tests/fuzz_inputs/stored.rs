//! A pager whose copies of pages are damaged, in compressed RAM or on a disk, encrypted or not: a page that is paged
//! in has its old content, or cannot be read.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_codec::{Codec, Encoder, PAGE};
use larder_memory::entry::{CopyLocation, EntryWord, EvictionRecord, PageEncoding, StoredObject, Tier, checksum};
use larder_memory::pager::{Pager, PagerOptions};
use larder_memory::segment_log::{Appender, SEGMENT_BYTES, SegmentIndex};
use larder_memory::shared::SharedMemory;
use larder_memory::state::{PagerState, Region};
use larder_memory::units::PageIndex;
use larder_memory::worker::WorkerState;

use super::Input;
use super::guest::{AtOnce, Disk, Guest, Page};

/// Number of pages of the memory. Half of them are stored in each tier.
pub const PAGES: u32 = 48;
/// Address of the memory in the process.
pub const ADDRESS: u64 = 0x7000_0000_0000;

pub fn options() -> PagerOptions {
    PagerOptions {
        limit_bytes: 64 << 20,
        compressed_bytes: 16 << 20,
        quarantine: Duration::ZERO,
        priority_thread: Some(1),
        prefetch: true,
        guest_threads: 2,
    }
}

/// Returns the content that a page had when it was evicted.
fn content(page: u32) -> [u8; PAGE] {
    let mut state = u64::from(page) + 1;
    std::array::from_fn(|at| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        // Every third page is incompressible.
        if page.is_multiple_of(3) || at % 8 < 3 { (state >> 33) as u8 } else { page as u8 }
    })
}

/// Appends a page, with the codec that its number selects.
fn append(encoder: &mut Encoder, appender: &mut Appender<'_>, page: u32) -> StoredObject {
    let content = content(page);
    let into = appender.next_data();
    let codecs: Vec<Codec> = (0..16).filter_map(|number| Codec::try_from(number).ok()).collect();
    let codec = codecs[page as usize % codecs.len()];
    let index = PageIndex::new(page);
    match encoder.encode(codec, &content, &mut into[..PAGE - 1]) {
        Some(len) => appender.append(index, len, PageEncoding::Codec(codec)),
        None => {
            into[..PAGE].copy_from_slice(&content);
            appender.append(index, PAGE, PageEncoding::Raw)
        }
    }
}

/// Returns the kernel's message about a fault.
pub fn fault(address: u64, write: bool) -> [u8; 32] {
    let mut message = [0; 32];
    message[0] = 0x12;
    message[8] = u8::from(write);
    message[16..24].copy_from_slice(&address.to_le_bytes());
    message
}

/// Makes a state with one region, of which nothing is stored yet.
fn new_state(is_encrypted: bool) -> PagerState {
    let state = PagerState::create(PAGES + 16, 1).expect("a state");
    if is_encrypted {
        state.generate_key().expect("a key");
    }
    let region = Region { first: PageIndex::new(0), pages: PAGES, address: ADDRESS, offset: 0, device: 1, inode: 1 };
    state.add_region(&region).expect("room");
    state
}

/// Compressed RAM and a disk, and the location of each page.
struct Copies {
    compressed: SharedMemory,
    disk: Vec<u8>,
    stored: Vec<(Tier, StoredObject)>,
}

impl Copies {
    /// Stores all pages, every second one on the disk.
    fn of(state: &PagerState) -> Self {
        let compressed = SharedMemory::create(c"fuzz-compressed", 8 * SEGMENT_BYTES).expect("memory");
        let mut encoder = Encoder::new();
        let mut disk = vec![0; 4 * SEGMENT_BYTES];
        let mut stored = Vec::new();
        {
            // SAFETY: in the mapping, and no other code uses it yet.
            let ram =
                unsafe { std::slice::from_raw_parts_mut(compressed.ptr_at(0, SEGMENT_BYTES).as_ptr(), SEGMENT_BYTES) };
            let segment = SegmentIndex::new(0);
            let mut in_ram = Appender::new(segment, 0, ram, 1);
            let mut on_disk = Appender::new(segment, 0, &mut disk[..SEGMENT_BYTES], 1);
            for page in 0..PAGES {
                let tier = if page % 2 == 0 { Tier::Ram } else { Tier::Ssd };
                let appender = if tier == Tier::Ram { &mut in_ram } else { &mut on_disk };
                stored.push((tier, append(&mut encoder, appender, page)));
            }
        }
        if let Some(cipher) = state.cipher() {
            cipher.encrypt(Tier::Ssd, 0, &mut disk[..SEGMENT_BYTES]);
        }
        for (page, (tier, stored)) in (0..PAGES).zip(&stored) {
            let word = EntryWord::encode(CopyLocation::InTier { tier: *tier, object: *stored, clean: false });
            let (checksum, page) = (checksum(PageIndex::new(page), &content(page)), PageIndex::new(page));
            let proof = EvictionRecord { checksum, evicted_at: 0 };
            state.insert(page, word, proof.to_word());
        }
        Self { compressed, disk, stored }
    }

    /// Makes a pager that takes over the state and its copies, with no page in memory.
    fn take_over(self, state: PagerState, options: PagerOptions) -> (Guest, Pager<Guest, AtOnce>) {
        let guest = Guest::new(PAGES);
        let (state, compressed) = (Arc::new(state), Arc::new(self.compressed));
        let hands = WorkerState::new(Arc::new(guest.clone()), Arc::clone(&state), Arc::clone(&compressed));
        let store = Disk::new(Rc::new(RefCell::new(self.disk)));
        let pager = Pager::new(
            guest.clone(),
            AtOnce::new(hands),
            state,
            compressed,
            vec![(Tier::Ssd, Box::new(store) as _)],
            &[],
            options,
        );
        (guest, pager)
    }
}

/// Reads every page while evictions are paused, with a limit of one page. No page is evicted, and no copy of a page
/// in memory is valid, since another process may write to the page without a fault.
pub fn paused() {
    let state = new_state(false);
    let options = PagerOptions { limit_bytes: PAGE as u64, ..options() };
    let (guest, mut pager) = Copies::of(&state).take_over(state, options);
    pager.pause_evictions(true);
    for page in 0..PAGES {
        if guest.page(page) == Page::Missing {
            guest.tell(fault(ADDRESS + u64::from(page) * PAGE as u64, false));
        }
        while pager.turn(Instant::now()).expect("it goes on") {}
    }
    assert_eq!((pager.resident_pages(), pager.stored_pages().clean), (PAGES, 0));
    for page in 0..PAGES {
        assert!(guest.page(page) == Page::There(Box::new(content(page))), "page {page}");
    }
    pager.pause_evictions(false);
    while pager.turn(Instant::now()).expect("it goes on") {}
    assert!(pager.resident_pages() < PAGES);
}

/// Damages copies as `data` says, then pages in every page.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let state = new_state(input.byte() & 1 != 0);
    let mut copies = Copies::of(&state);
    let Copies { compressed, disk, stored } = &mut copies;
    // Damages bytes of stored objects, and entries.
    let mut is_entry_changed = [false; PAGES as usize];
    while input.0.len() > 4 && input.byte() & 7 != 0 {
        let (what, value) = (input.byte(), input.byte());
        let (tier, place) = stored[usize::from(what) % stored.len()];
        let at = place.offset.bytes() as usize + usize::from(input.word()) % (usize::from(place.len) + 8);
        match (tier, value) {
            (_, 0) => {
                let page = u32::from(what) % PAGES;
                let word = EntryWord(state.word(PageIndex::new(page)).0 ^ 1 << (input.byte() % 64));
                state.replace(PageIndex::new(page), word);
                is_entry_changed[page as usize] = true;
            }
            (Tier::Ram, value) => {
                // SAFETY: in the mapping, and no other code uses it yet.
                unsafe { *compressed.ptr_at(at, 1).as_ptr() ^= value };
            }
            (_, value) => disk[at] ^= value,
        }
    }
    let (guest, mut pager) = copies.take_over(state, options());
    let first = input.byte();
    for page in 0..PAGES {
        let page = (page + u32::from(first)) % PAGES;
        if guest.page(page) == Page::Missing {
            guest.tell(fault(ADDRESS + u64::from(page) * PAGE as u64, page.is_multiple_of(5)));
        }
        while pager.turn(Instant::now()).expect("it goes on") {}
        let is_right = match guest.page(page) {
            Page::There(found) => *found == content(page) || is_entry_changed[page as usize],
            Page::Poisoned => true,
            Page::Missing => false,
        };
        assert!(is_right, "page {page} is not what it was, nor unreadable");
    }
}
