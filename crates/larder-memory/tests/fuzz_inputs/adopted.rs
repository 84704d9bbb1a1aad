//! A successor that finds a state of arbitrary bytes. If the state can be opened, the successor runs without a panic.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Instant;

use larder_codec::PAGE;
use larder_memory::entry::Tier;
use larder_memory::pager::Pager;
use larder_memory::segment_log::SEGMENT_BYTES;
use larder_memory::shared::SharedMemory;
use larder_memory::state::PagerState;
use larder_memory::units::{PageIndex, PageRun};
use larder_memory::worker::WorkerState;

use super::Input;
use super::guest::{AtOnce, Disk, Guest};
use super::state::{CAPACITY, memory};
use super::stored::{fault, options};

pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let there = u32::from(input.byte()) % 8;
    let Ok(state) = PagerState::open(memory(&mut input), 1) else {
        return;
    };
    let regions = state.regions();
    let pages = regions.last().map_or(0, |last| last.first.get() + last.pages);
    let guest = Guest::new(CAPACITY);
    let present: Vec<PageRun> = (0..pages.min(CAPACITY))
        .filter(|page| there > 0 && page % 8 < there)
        .map(|page| PageRun::one(PageIndex::new(page)))
        .collect();
    for run in &present {
        larder_memory::guest::GuestMemory::fill(&guest, run.first, &[7; PAGE], false);
    }
    let compressed = Arc::new(SharedMemory::create(c"fuzz-compressed", 2 * SEGMENT_BYTES).expect("memory"));
    let state = Arc::new(state);
    let hands = WorkerState::new(Arc::new(guest.clone()), Arc::clone(&state), Arc::clone(&compressed));
    let disk = Disk::new(Rc::new(RefCell::new(vec![0x5a; 2 * SEGMENT_BYTES])));
    let mut pager = Pager::new(
        guest.clone(),
        AtOnce::new(hands),
        state,
        compressed,
        vec![(Tier::Ssd, Box::new(disk) as _)],
        &present,
        options(),
    );
    for region in regions.iter().filter(|region| !region.is_unmapped()) {
        for page in 0..region.pages.min(CAPACITY) {
            guest.tell(fault(region.address + u64::from(page) * PAGE as u64, page % 3 == 0));
        }
    }
    for _ in 0..1000 {
        if !pager.turn(Instant::now()).expect("it goes on") {
            break;
        }
    }
}
