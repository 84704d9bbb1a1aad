//! State of an earlier pager, of arbitrary bytes.

use larder_memory::entry::Tier;
use larder_memory::shared::SharedMemory;
use larder_memory::state::PagerState;
use larder_memory::units::PageIndex;
use std::sync::atomic::Ordering;

use super::Input;

/// Offset of the entries, which follow the regions.
pub const ENTRIES_AT: usize = 72 << 10;
/// Number of entries that fit in the memory.
pub const CAPACITY: u32 = 64;

/// Makes memory whose parts begin with bytes of `input`. Some bits of `input` select a valid size and header.
pub fn memory(input: &mut Input<'_>) -> SharedMemory {
    let flags = input.byte();
    let bytes = ENTRIES_AT + CAPACITY as usize * 16;
    let bytes = if flags & 1 != 0 { bytes } else { usize::from(input.word()) * 3 + 128 };
    let memory = SharedMemory::create(c"fuzz-state", bytes).expect("memory");
    let put = |at: usize, content: &[u8]| {
        for (offset, chunk) in content.chunks(8).enumerate() {
            let mut word = [0; 8];
            word[..chunk.len()].copy_from_slice(chunk);
            if at + offset * 8 + 8 <= bytes {
                memory.word(at + offset * 8).store(u64::from_le_bytes(word), Ordering::Relaxed);
            }
        }
    };
    put(0, input.bytes(128));
    let regions = input.byte() % 6;
    put(8 << 10, input.bytes(usize::from(regions) * 64));
    let swap = input.byte() % 128;
    put(512, input.bytes(usize::from(swap)));
    let messages = input.byte() % 4;
    put(4 << 10, input.bytes(usize::from(messages) * 32));
    put(ENTRIES_AT, input.0);
    if flags & 2 != 0 {
        put(0, b"LARDMEM\0");
        memory.half_word(8).store(1, Ordering::Relaxed);
        memory.half_word(12).store(CAPACITY, Ordering::Relaxed);
        memory.word(16).store(1, Ordering::Relaxed);
        memory.word(24).store(u64::from(flags >> 2 & 1), Ordering::Relaxed);
    }
    if flags & 8 != 0 {
        let mut header = [0; 64];
        for (index, chunk) in header.chunks_exact_mut(8).enumerate() {
            chunk.copy_from_slice(&memory.word(index * 8).load(Ordering::Relaxed).to_le_bytes());
        }
        memory.half_word(64).store(crc32c::crc32c(&header), Ordering::Relaxed);
        memory.half_word(72).store(u32::from(regions), Ordering::Relaxed);
    }
    memory
}

/// Opens the state, and reads all of it.
pub fn run(data: &[u8]) {
    let memory = memory(&mut Input(data));
    let state = match PagerState::open(memory, 1) {
        Ok(state) => state,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return;
        }
    };
    let mut next = 0;
    for region in state.regions() {
        assert_eq!(region.first.get(), next);
        next += region.pages;
    }
    assert!(next <= state.capacity());
    let _ = (state.userfaultfd_number(), state.is_encrypted(), state.cipher().is_some());
    for tier in [Tier::Ram, Tier::Ssd, Tier::Slow] {
        let _ = state.swap(tier);
    }
    for page in (0..state.capacity()).map(PageIndex::new) {
        let _ = (state.word(page).decode(), state.eviction_record(page));
    }
}
