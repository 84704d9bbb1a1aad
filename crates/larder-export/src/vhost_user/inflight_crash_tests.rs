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
use super::super::ring::{Chain, Head, Ring, RingLayout, RingPosition};
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
    static LIFE: Cell<Option<u32>> = const { Cell::new(None) };
}

struct Death;

/// Called before each write to the region.
pub(super) fn die_if_due() {
    match LIFE.get() {
        Some(0) => {
            LIFE.set(None);
            resume_unwind(Box::new(Death));
        }
        left => LIFE.set(left.map(|left| left - 1)),
    }
}

/// Returns the result of `step`, or `None` if the server crashed in it.
fn unless_dead<T>(step: impl FnOnce() -> T) -> Option<T> {
    match catch_unwind(AssertUnwindSafe(step)) {
        Ok(value) => Some(value),
        Err(panic) if panic.is::<Death>() => None,
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

const PLACES: Places = Places {
    descriptors: 0,
    driver: 0x1000,
    device: 0x2000,
};
const DATA: u64 = 0x4000;
const MEMORY_BYTES: usize = 1 << 20;

/// State that survives a server: the guest, and the in-flight region with its file.
struct World {
    memory: Arc<Memory>,
    driver: DriverRing,
    region: (InflightInfo, OwnedFd),
    layout: RingLayout,
    /// Address of the chain's first buffer by chain id; the address identifies the request.
    waiting: BTreeMap<u16, u64>,
    next_name: u64,
}

struct Server {
    ring: Ring,
    notes: InflightQueue,
    taken: Vec<(Head, u16)>,
}

impl World {
    fn new(packed: bool, size: u16) -> Self {
        let memory = Arc::new(Memory::new(MEMORY_BYTES).expect("memory"));
        let options = RingOptions {
            size,
            packed,
            event_index: false,
        };
        Self {
            driver: DriverRing::new(&memory, PLACES, options),
            memory,
            region: InflightRegion::create(1, size, packed, true).expect("a region"),
            layout: RingLayout {
                packed,
                event_index: false,
                size: u32::from(size),
            },
            waiting: BTreeMap::new(),
            next_name: DATA,
        }
    }

    fn guest_memory(&self) -> GuestMemory {
        let info = RegionInfo {
            guest_address: 0,
            len: MEMORY_BYTES as u64,
            user_address: USER_BASE,
            file_offset: 0,
        };
        let file = self.memory.file().try_clone_to_owned().expect("a descriptor");
        GuestMemory::default().with(info, &file).expect("maps")
    }

    /// Makes a request available on behalf of the driver, if there is room.
    fn add(&mut self, random: &mut Random) {
        let count = 1 + random.below(3) as usize;
        if self.driver.free_slots() < count {
            return;
        }
        let name = self.next_name;
        self.next_name = if name + 64 >= MEMORY_BYTES as u64 {
            DATA
        } else {
            name + 64
        };
        let buffers: Vec<_> = (0..count as u64)
            .map(|index| Buffer {
                address: name + index,
                len: 1,
            })
            .collect();
        let id = self.driver.add(&buffers, &[], None);
        self.driver.publish();
        self.waiting.insert(id, name);
    }

    /// Collects the used requests on behalf of the driver.
    fn collect(&mut self) {
        while let Some((id, _)) = self.driver.take_used() {
            assert!(self.waiting.remove(&id).is_some(), "chain {id} was used twice");
        }
    }

    /// Starts a new server without new requests; returns `None` if it crashes.
    fn start(&mut self, memory: &GuestMemory) -> Option<Server> {
        let addresses = RingAddresses {
            descriptors: USER_BASE + PLACES.descriptors,
            driver: USER_BASE + PLACES.driver,
            device: USER_BASE + PLACES.device,
            log: false,
        };
        let position = RingPosition::from_base(self.driver.base(), self.layout.packed);
        let mut ring = Ring::new(memory, self.layout, &addresses, position).expect("a ring");
        let region = InflightRegion::adopt(&self.region.0, &self.region.1, self.layout.packed).expect("the region");
        let size = self.layout.size as u16;
        let mut notes = Rc::new(region).queue(0, size, self.layout.packed).expect("notes");
        let found = unless_dead(|| notes.recover(&mut ring))?;
        self.collect();
        let mut taken = Vec::new();
        for left in &found {
            let mut chain = Chain::default();
            notes.chain_of(&ring, memory, left, &mut chain).expect("a valid chain");
            self.check_name(memory, left.head, &chain);
            assert!(
                taken.iter().all(|(head, _): &(Head, u16)| head.id != left.head.id),
                "found twice"
            );
            taken.push((left.head, left.note));
        }
        Some(Server { ring, notes, taken })
    }

    fn check_name(&self, memory: &GuestMemory, head: Head, chain: &Chain) {
        let name = self.waiting.get(&head.id);
        let name =
            *name.unwrap_or_else(|| panic!("chain {} was resubmitted, but the driver does not wait for it", head.id));
        let base = memory.contiguous(name, 1).expect("in memory");
        assert_eq!(
            chain.readable()[0].base(),
            base,
            "chain {} belongs to another request",
            head.id
        );
    }
}

impl Server {
    fn take(&mut self, world: &World, memory: &GuestMemory) -> Option<bool> {
        let mut chain = Chain::default();
        let Some(head) = self.ring.take(memory, &mut chain).expect("a valid ring") else {
            return Some(false);
        };
        world.check_name(memory, head, &chain);
        let note = unless_dead(|| self.notes.begin(&self.ring, head))?;
        self.taken.push((head, note));
        Some(true)
    }

    fn give_back(&mut self, random: &mut Random) -> Option<()> {
        if self.taken.is_empty() {
            return Some(());
        }
        let (head, note) = self.taken.swap_remove(random.below(self.taken.len() as u64) as usize);
        unless_dead(|| {
            self.notes.before_give_back(&self.ring, head, note);
            self.ring.give_back(head, 0);
            self.notes.after_give_back(&self.ring, note);
        })
    }
}

fn run(seed: u64, packed: bool) {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let size = if packed { 3 + random.below(6) as u16 } else { 8 };
    let mut world = World::new(packed, size);
    let memory = world.guest_memory();
    LIFE.set(None);
    let mut server = world.start(&memory).expect("no crash is due");
    for _ in 0..300 {
        if random.below(20) == 0 && LIFE.get().is_none() {
            LIFE.set(Some(random.below(30) as u32));
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
            3 => server.take(&world, &memory).map(|_| ()),
            _ => server.give_back(&mut random),
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
                LIFE.set(Some(random.below(10) as u32));
            }
            if let Some(server) = world.start(&memory) {
                break server;
            }
        };
        LIFE.set(None);
        while server.take(&world, &memory).expect("no crash is due") {}
        let mut known: Vec<u16> = server.taken.iter().map(|(head, _)| head.id).collect();
        known.sort_unstable();
        assert!(
            world.waiting.keys().copied().eq(known),
            "seed {seed}: the requests that the driver waits for are not those in flight"
        );
    }
    LIFE.set(None);
    while server.take(&world, &memory).expect("no crash is due") || !server.taken.is_empty() {
        server.give_back(&mut random);
    }
    world.collect();
    assert!(
        world.waiting.is_empty(),
        "seed {seed}: {:?} were never pushed as used",
        world.waiting
    );
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
