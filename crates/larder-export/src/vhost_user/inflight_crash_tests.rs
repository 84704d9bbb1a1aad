//! Crash tests: in random sequences a server is killed before any one of its writes to the in-flight region. A
//! successor must find every request that the driver still waits for, exactly once.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::rc::Rc;
use std::sync::Arc;

use super::super::memory::GuestMemory;
use super::super::message::{InflightInfo, RegionInfo, RingAddresses};
use super::super::ring::{DescriptorChain, Head, Ring, RingLayout, RingPosition};
use super::{InflightQueue, InflightRegion};

#[path = "../../tests/front_end/memory.rs"]
#[allow(dead_code, unreachable_pub)]
mod memory;
#[path = "../../tests/front_end/ring.rs"]
#[allow(dead_code, unreachable_pub)]
mod ring;

use memory::{Memory, USER_BASE};
use ring::{Buffer, DriverRing, Places, RingOptions};

thread_local! {
    /// Number of writes until the crash; `None` means no crash.
    static WRITES_UNTIL_CRASH: Cell<Option<u32>> = const { Cell::new(None) };
}

struct Crash;

/// Called before each write to the region.
pub(super) fn crash_if_due() {
    match WRITES_UNTIL_CRASH.get() {
        Some(0) => {
            WRITES_UNTIL_CRASH.set(None);
            resume_unwind(Box::new(Crash));
        }
        writes_left => WRITES_UNTIL_CRASH.set(writes_left.map(|left| left - 1)),
    }
}

/// Returns the result of `step`, or `None` if the server crashed in it.
fn unless_crashed<T>(step: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(step)) {
        Ok(value) => Some(value),
        Err(panic) if panic.is::<Crash>() => None,
        Err(panic) => resume_unwind(panic),
    }
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

const RING_OFFSETS: Places = Places { descriptors: 0, driver: 0x1000, device: 0x2000 };
const DATA: u64 = 0x4000;
const MEMORY_BYTES: usize = 1 << 20;

/// State that survives a server: the guest, and the in-flight region with its file.
struct TestState {
    memory: Arc<Memory>,
    driver: DriverRing,
    region: (InflightInfo, OwnedFd),
    layout: RingLayout,
    /// Address of the chain's first buffer by chain id; the address identifies the request.
    pending: BTreeMap<u16, u64>,
    next_address: u64,
}

struct Server {
    ring: Ring,
    record: InflightQueue,
    popped: Vec<(Head, u16)>,
}

impl TestState {
    fn new(packed: bool, size: u16) -> Self {
        let memory = Arc::new(Memory::new(MEMORY_BYTES).expect("memory"));
        let options = RingOptions { size, packed, event_index: false };
        Self {
            driver: DriverRing::new(&memory, RING_OFFSETS, options),
            memory,
            region: InflightRegion::create(1, size, packed, true).expect("a region"),
            layout: RingLayout { packed, event_index: false, size: u32::from(size) },
            pending: BTreeMap::new(),
            next_address: DATA,
        }
    }

    fn guest_memory(&self) -> GuestMemory {
        let info = RegionInfo { guest_address: 0, len: MEMORY_BYTES as u64, user_address: USER_BASE, file_offset: 0 };
        let file = self.memory.file().try_clone_to_owned().expect("a descriptor");
        GuestMemory::default().with(info, &file).expect("maps")
    }

    /// Makes a request available on behalf of the driver, if there is room.
    fn add(&mut self, random: &mut Random) {
        let count = 1 + random.below(3) as usize;
        if self.driver.free_slots() < count {
            return;
        }
        let address = self.next_address;
        self.next_address = if address + 64 >= MEMORY_BYTES as u64 { DATA } else { address + 64 };
        let buffers: Vec<_> = (0..count as u64).map(|index| Buffer { address: address + index, len: 1 }).collect();
        let id = self.driver.add(&buffers, &[], None);
        self.driver.publish();
        self.pending.insert(id, address);
    }

    /// Collects the used requests on behalf of the driver.
    fn collect(&mut self) {
        while let Some((id, _)) = self.driver.take_used() {
            assert!(self.pending.remove(&id).is_some(), "chain {id} was used twice");
        }
    }

    /// Starts a new server without new requests; returns `None` if it crashes.
    fn start(&mut self, memory: &GuestMemory) -> Option<Server> {
        let addresses = RingAddresses {
            descriptors: USER_BASE + RING_OFFSETS.descriptors,
            driver: USER_BASE + RING_OFFSETS.driver,
            device: USER_BASE + RING_OFFSETS.device,
            log: false,
        };
        let position = RingPosition::from_base(self.driver.base(), self.layout.packed);
        let mut ring = Ring::new(memory, self.layout, &addresses, position).expect("a ring");
        let region = InflightRegion::adopt(&self.region.0, &self.region.1, self.layout.packed).expect("the region");
        let size = self.layout.size as u16;
        let mut record = Rc::new(region).queue(0, size, self.layout.packed).expect("notes");
        let found = unless_crashed(|| record.recover(&mut ring))?;
        self.collect();
        let mut popped = Vec::new();
        for request in &found {
            let mut chain = DescriptorChain::default();
            record.read_chain(&ring, memory, request, &mut chain).expect("a valid chain");
            self.check_address(memory, request.head, &chain);
            assert!(popped.iter().all(|(head, _): &(Head, u16)| head.id != request.head.id), "found twice");
            popped.push((request.head, request.entry_index));
        }
        Some(Server { ring, record, popped })
    }

    fn check_address(&self, memory: &GuestMemory, head: Head, chain: &DescriptorChain) {
        let address = self.pending.get(&head.id);
        let address = *address
            .unwrap_or_else(|| panic!("chain {} was resubmitted, but the driver does not wait for it", head.id));
        let base = memory.contiguous(address, 1).expect("in memory");
        assert_eq!(chain.readable()[0].base(), base, "chain {} belongs to another request", head.id);
    }
}

impl Server {
    fn pop(&mut self, world: &TestState, memory: &GuestMemory) -> Option<bool> {
        let mut chain = DescriptorChain::default();
        let Some(head) = self.ring.pop_avail(memory, &mut chain).expect("a valid ring") else {
            return Some(false);
        };
        world.check_address(memory, head, &chain);
        let entry_index = unless_crashed(|| self.record.begin(&self.ring, head))?;
        self.popped.push((head, entry_index));
        Some(true)
    }

    fn push_used(&mut self, random: &mut Random) -> Option<()> {
        if self.popped.is_empty() {
            return Some(());
        }
        let (head, entry_index) = self.popped.swap_remove(random.below(self.popped.len() as u64) as usize);
        unless_crashed(|| {
            self.record.before_push_used(&self.ring, head, entry_index);
            self.ring.push_used(head, 0);
            self.record.after_push_used(&self.ring, entry_index);
        })
    }
}

fn run(seed: u64, packed: bool) {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let size = if packed { 3 + random.below(6) as u16 } else { 8 };
    let mut world = TestState::new(packed, size);
    let memory = world.guest_memory();
    WRITES_UNTIL_CRASH.set(None);
    let mut server = world.start(&memory).expect("no crash is due");
    for _ in 0..300 {
        if random.below(20) == 0 && WRITES_UNTIL_CRASH.get().is_none() {
            WRITES_UNTIL_CRASH.set(Some(random.below(30) as u32));
        }
        let alive = match random.below(6) {
            0 | 1 => {
                world.add(&mut random);
                Some(())
            }
            2 => {
                world.collect();
                Some(())
            }
            3 => server.pop(&world, &memory).map(|_| ()),
            _ => server.push_used(&mut random),
        };
        if alive.is_some() {
            continue;
        }
        // The guest continues meanwhile, and may reuse the slots that it sees used.
        for _ in 0..random.below(12) {
            world.collect();
            world.add(&mut random);
        }
        server = loop {
            if random.below(2) == 0 {
                WRITES_UNTIL_CRASH.set(Some(random.below(10) as u32));
            }
            if let Some(server) = world.start(&memory) {
                break server;
            }
        };
        WRITES_UNTIL_CRASH.set(None);
        while server.pop(&world, &memory).expect("no crash is due") {}
        let mut known: Vec<u16> = server.popped.iter().map(|(head, _)| head.id).collect();
        known.sort_unstable();
        assert!(
            world.pending.keys().copied().eq(known),
            "seed {seed}: the requests that the driver waits for are not those in flight"
        );
    }
    WRITES_UNTIL_CRASH.set(None);
    while server.pop(&world, &memory).expect("no crash is due") || !server.popped.is_empty() {
        server.push_used(&mut random);
    }
    world.collect();
    assert!(world.pending.is_empty(), "seed {seed}: {:?} were never pushed as used", world.pending);
}

/// Over split rings, a crash at any write loses no request, and repeats none that was answered.
#[test]
fn crash_keeps_requests_over_split_rings() {
    (0..3000).for_each(|seed| run(seed, false));
}

/// Over packed rings, a crash at any write loses no request, and repeats none that was answered.
#[test]
fn crash_keeps_requests_over_packed_rings() {
    (0..3000).for_each(|seed| run(seed, true));
}
