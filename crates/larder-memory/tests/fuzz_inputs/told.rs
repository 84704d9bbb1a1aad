//! Input from the kernel: userfaultfd messages of arbitrary bytes, for a pager with some pages in memory and some
//! stored; and tables of mappings and sockets.

use std::sync::Arc;
use std::time::Instant;

use larder_codec::PAGE;
use larder_memory::guest::GuestMemory as _;
use larder_memory::pager::Pager;
use larder_memory::segment_log::SEGMENT_BYTES;
use larder_memory::shared::SharedMemory;
use larder_memory::state::{PagerState, Region};
use larder_memory::units::{PageIndex, PageRun};
use larder_memory::userfaultfd::RawUffdMessage;
use larder_memory::worker::WorkerState;

use super::Input;
use super::guest::{AtOnce, Guest};
use super::stored::{ADDRESS, PAGES, fault, options};

/// Passes messages of these bytes to a pager, half of them about existing memory.
pub fn messages(data: &[u8]) {
    let mut input = Input(data);
    let state = PagerState::create(PAGES, 1).expect("a state");
    let region = Region { first: PageIndex::new(0), pages: PAGES, address: ADDRESS, offset: 0, device: 1, inode: 1 };
    state.add_region(&region).expect("room");
    let compressed = SharedMemory::create(c"fuzz-compressed", 8 * SEGMENT_BYTES).expect("memory");
    let (state, compressed) = (Arc::new(state), Arc::new(compressed));
    let guest = Guest::new(PAGES);
    let half = PAGES / 2;
    for page in 0..half {
        let content = std::array::from_fn::<u8, PAGE, _>(|at| ((at as u32 * (page + 1)) >> 3) as u8);
        guest.fill(PageIndex::new(page), &content, false);
    }
    let hands = WorkerState::new(Arc::new(guest.clone()), Arc::clone(&state), Arc::clone(&compressed));
    let mut pager = Pager::new(
        guest.clone(),
        AtOnce::new(hands),
        state,
        compressed,
        Vec::new(),
        &[PageRun { first: PageIndex::new(0), count: half }],
        options(),
    );
    while !input.is_empty() {
        let kind = input.byte();
        let mut message = [0; 32];
        if kind & 1 == 0 {
            let bytes = input.bytes(32);
            message[..bytes.len()].copy_from_slice(bytes);
        } else {
            let page = u64::from(input.byte()) % u64::from(PAGES + 2);
            let start = ADDRESS + page * PAGE as u64;
            message = match kind >> 1 & 3 {
                0 | 1 => fault(start, kind & 8 != 0),
                what => {
                    let mut message = [0; 32];
                    message[0] = if what == 2 { 0x15 } else { 0x16 };
                    message[8..16].copy_from_slice(&start.to_le_bytes());
                    let end = start + u64::from(input.byte() % 32) * PAGE as u64;
                    message[16..24].copy_from_slice(&end.to_le_bytes());
                    message
                }
            };
            // Write-protected, or not mapped.
            message[8] |= if message[0] == 0x12 { kind >> 4 & 6 } else { 0 };
        }
        let _ = RawUffdMessage::from_bytes(message).decode();
        guest.tell(message);
        if kind & 16 != 0 {
            // Small limits make pages leave and return.
            pager.set_limit(1 << (12 + kind % 16), 1 << 20);
        }
        for _ in 0..64 {
            if !pager.turn(Instant::now()).expect("it goes on") {
                break;
            }
        }
    }
    assert!(pager.resident_pages() <= PAGES && pager.pages() == PAGES);
}

/// Parses the kernel's tables.
pub fn tables(data: &[u8]) {
    larder_memory::target::parse_tables(data);
}
