//! Driver's side of a virtqueue, split and packed (virtio 1.2, 2.7 and 2.8). It keeps its own state, as a driver
//! does, and trusts only those bytes of the device that the ring is for. A caller that wants to violate the rules has
//! the addresses.

use std::sync::Arc;
use std::sync::atomic::{Ordering, fence};

use super::memory::Memory;

pub const DESC_F_NEXT: u16 = 1;
pub const DESC_F_WRITE: u16 = 2;
pub const DESC_F_INDIRECT: u16 = 4;
pub const DESC_F_AVAIL: u16 = 1 << 7;
pub const DESC_F_USED: u16 = 1 << 15;

/// Piece of guest memory for the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Buffer {
    pub address: u64,
    pub len: u32,
}

/// Guest addresses of the ring's three parts.
#[derive(Clone, Copy, Debug)]
pub struct Places {
    pub descriptors: u64,
    pub driver: u64,
    pub device: u64,
}

/// Ring options of a driver.
#[derive(Clone, Copy, Debug)]
pub struct RingOptions {
    pub size: u16,
    pub packed: bool,
    pub event_index: bool,
}

/// Driver's side of a virtqueue.
pub struct DriverRing {
    memory: Arc<Memory>,
    places: Places,
    options: RingOptions,
    /// Split: free descriptors. Packed: free buffer ids.
    free: Vec<u16>,
    free_slots: u16,
    /// Chains in flight, by id: their descriptors (split), or as many zeros (packed).
    chains: Vec<Vec<u16>>,
    next_available: u16,
    published: u16,
    /// Packed: number of slots added since the last [`DriverRing::publish`].
    added: u16,
    next_used: u16,
    available_wrap: bool,
    used_wrap: bool,
}

fn passed(event: u16, new: u16, old: u16) -> bool {
    new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old)
}

impl DriverRing {
    /// Creates a ring: zeroes its memory and begins at 0.
    pub fn new(memory: &Arc<Memory>, places: Places, options: RingOptions) -> Self {
        let size = usize::from(options.size);
        memory.write(places.descriptors, &vec![0; 16 * size]);
        let (driver, device) = if options.packed { (4, 4) } else { (6 + 2 * size, 6 + 8 * size) };
        memory.write(places.driver, &vec![0; driver]);
        memory.write(places.device, &vec![0; device]);
        Self {
            memory: Arc::clone(memory),
            places,
            options,
            free: (0..options.size).rev().collect(),
            free_slots: options.size,
            chains: vec![Vec::new(); size],
            next_available: 0,
            published: 0,
            added: 0,
            next_used: 0,
            available_wrap: true,
            used_wrap: true,
        }
    }

    pub fn places(&self) -> Places {
        self.places
    }

    pub fn options(&self) -> RingOptions {
        self.options
    }

    /// Returns the number of free descriptors.
    pub fn free_slots(&self) -> usize {
        usize::from(self.free_slots)
    }

    /// Returns the id of the next chain.
    pub fn next_id(&self) -> Option<u16> {
        self.free.last().copied()
    }

    /// Returns the ids in flight.
    pub fn in_flight(&self) -> Vec<u16> {
        (0..self.options.size).filter(|id| !self.chains[usize::from(*id)].is_empty()).collect()
    }

    /// Returns the base for SET_VRING_BASE as QEMU sends it at the start, or after a server was killed.
    pub fn base(&self) -> u32 {
        if !self.options.packed {
            // QEMU uses the used index, because it does not know which later requests are in flight.
            return u32::from(self.memory.word16(self.places.device + 2).load(Ordering::Acquire));
        }
        let used = u32::from(self.next_used) | u32::from(self.used_wrap) << 15;
        used << 16 | used
    }

    /// Adds a chain, through an indirect table at `table` if given. Split rings publish it with
    /// [`DriverRing::publish`].
    pub fn add(&mut self, readable: &[Buffer], writable: &[Buffer], table: Option<u64>) -> u16 {
        let all: Vec<(Buffer, u16)> = (readable.iter().map(|buffer| (*buffer, 0)))
            .chain(writable.iter().map(|buffer| (*buffer, DESC_F_WRITE)))
            .collect();
        let all = match table {
            None => all,
            Some(table) => {
                self.write_table(table, &all);
                vec![(Buffer { address: table, len: 16 * all.len() as u32 }, DESC_F_INDIRECT)]
            }
        };
        assert!(all.len() <= self.free_slots(), "the ring is full");
        self.free_slots -= all.len() as u16;
        if self.options.packed { self.add_packed(&all) } else { self.add_split(&all) }
    }

    fn write_table(&self, table: u64, all: &[(Buffer, u16)]) {
        for (index, (buffer, flags)) in all.iter().enumerate() {
            let last = index + 1 == all.len();
            // Packed tables are not linked: the flag has no meaning there.
            let next = if last || self.options.packed { 0 } else { DESC_F_NEXT };
            let (link, flags) = (index as u16 + 1, flags | next);
            let at = table + 16 * index as u64;
            self.write_descriptor(at, *buffer, if self.options.packed { [0, flags] } else { [flags, link] });
        }
    }

    /// Writes a descriptor; `tail` is its last two words.
    pub fn write_descriptor(&self, at: u64, buffer: Buffer, tail: [u16; 2]) {
        self.memory.write(at, &buffer.address.to_le_bytes());
        self.memory.write(at + 8, &buffer.len.to_le_bytes());
        self.memory.write(at + 12, &tail[0].to_le_bytes());
        self.memory.word16(at + 14).store(tail[1], Ordering::Release);
    }

    fn add_split(&mut self, all: &[(Buffer, u16)]) -> u16 {
        let taken: Vec<u16> = all.iter().map(|_| self.free.pop().expect("counted")).collect();
        for (index, (buffer, flags)) in all.iter().enumerate() {
            let next = taken.get(index + 1).copied();
            let flags = flags | if next.is_some() { DESC_F_NEXT } else { 0 };
            let at = self.places.descriptors + 16 * u64::from(taken[index]);
            self.write_descriptor(at, *buffer, [flags, next.unwrap_or(0)]);
        }
        let id = taken[0];
        self.chains[usize::from(id)] = taken;
        self.put_available(id);
        id
    }

    /// Puts a head into the available ring, valid or not.
    pub fn put_available(&mut self, id: u16) {
        let slot = u64::from(self.next_available % self.options.size);
        self.memory.word16(self.places.driver + 4 + 2 * slot).store(id, Ordering::Relaxed);
        self.next_available = self.next_available.wrapping_add(1);
    }

    fn add_packed(&mut self, all: &[(Buffer, u16)]) -> u16 {
        let id = self.free.pop().expect("as many ids as places");
        let head = self.places.descriptors + 16 * u64::from(self.next_available);
        let mut head_flags = 0;
        for (index, (buffer, flags)) in all.iter().enumerate() {
            let at = self.places.descriptors + 16 * u64::from(self.next_available);
            let next = if index + 1 == all.len() { 0 } else { DESC_F_NEXT };
            let lap = if self.available_wrap { DESC_F_AVAIL } else { DESC_F_USED };
            let flags = flags | next | lap;
            if index == 0 {
                // The first descriptor becomes available last.
                head_flags = flags;
                self.memory.write(at, &buffer.address.to_le_bytes());
                self.memory.write(at + 8, &buffer.len.to_le_bytes());
                self.memory.write(at + 12, &id.to_le_bytes());
            } else {
                self.write_descriptor(at, *buffer, [id, flags]);
            }
            self.next_available += 1;
            self.added += 1;
            if self.next_available == self.options.size {
                self.next_available = 0;
                self.available_wrap = !self.available_wrap;
            }
        }
        self.chains[usize::from(id)] = vec![0; all.len()];
        self.memory.word16(head + 14).store(head_flags, Ordering::Release);
        id
    }

    /// Publishes the added chains, and returns whether the device wants a kick for them.
    pub fn publish(&mut self) -> bool {
        let (old, new) = (self.published, self.next_available);
        self.published = new;
        if self.options.packed {
            let added = std::mem::take(&mut self.added);
            return self.packed_wants_kick(new, new.wrapping_sub(added));
        }
        self.memory.word16(self.places.driver + 2).store(new, Ordering::Release);
        fence(Ordering::SeqCst);
        if self.options.event_index {
            let at = self.places.device + 4 + 8 * u64::from(self.options.size);
            return passed(self.memory.word16(at).load(Ordering::Relaxed), new, old);
        }
        self.memory.word16(self.places.device).load(Ordering::Relaxed) & 1 == 0
    }

    fn packed_wants_kick(&self, new: u16, old: u16) -> bool {
        fence(Ordering::SeqCst);
        match self.memory.word16(self.places.device + 2).load(Ordering::Acquire) & 3 {
            1 => false,
            2 => {
                let place = self.memory.word16(self.places.device).load(Ordering::Relaxed);
                let mut event = place & 0x7fff;
                if (place & 0x8000 != 0) != self.available_wrap {
                    event = event.wrapping_sub(self.options.size);
                }
                passed(event, new, old)
            }
            _ => true,
        }
    }

    /// Takes the next used chain: its id, and the number of bytes that the device reports as written.
    pub fn take_used(&mut self) -> Option<(u16, u32)> {
        let (id, written) = if self.options.packed { self.packed_used()? } else { self.split_used()? };
        let chain = std::mem::take(&mut self.chains[usize::from(id)]);
        assert!(!chain.is_empty(), "chain {id} was given back, but is not in flight");
        self.free_slots += chain.len() as u16;
        if self.options.packed {
            self.free.push(id);
            self.next_used += chain.len() as u16;
            if self.next_used >= self.options.size {
                self.next_used -= self.options.size;
                self.used_wrap = !self.used_wrap;
            }
        } else {
            self.free.extend(chain.into_iter().rev());
            self.next_used = self.next_used.wrapping_add(1);
        }
        Some((id, written))
    }

    fn split_used(&self) -> Option<(u16, u32)> {
        if self.memory.word16(self.places.device + 2).load(Ordering::Acquire) == self.next_used {
            return None;
        }
        let at = self.places.device + 4 + 8 * u64::from(self.next_used % self.options.size);
        let id = self.memory.word32(at).load(Ordering::Relaxed);
        assert!(id < u32::from(self.options.size), "the device gave back chain {id}");
        Some((id as u16, self.memory.word32(at + 4).load(Ordering::Relaxed)))
    }

    fn packed_used(&self) -> Option<(u16, u32)> {
        let at = self.places.descriptors + 16 * u64::from(self.next_used);
        let flags = self.memory.word16(at + 14).load(Ordering::Acquire);
        let both = (flags & DESC_F_AVAIL != 0, flags & DESC_F_USED != 0);
        if both != (self.used_wrap, self.used_wrap) {
            return None;
        }
        let id = self.memory.word16(at + 12).load(Ordering::Relaxed);
        assert!(id < self.options.size, "the device gave back buffer {id}");
        Some((id, self.memory.word32(at + 8).load(Ordering::Relaxed)))
    }

    /// Enables an interrupt for the next used chain. The caller must recheck the ring afterwards.
    pub fn want_interrupt(&mut self) {
        let driver = self.places.driver;
        match (self.options.packed, self.options.event_index) {
            (true, true) => {
                let place = self.next_used | u16::from(self.used_wrap) << 15;
                self.memory.word16(driver).store(place, Ordering::Relaxed);
                self.memory.word16(driver + 2).store(2, Ordering::Release);
            }
            (true, false) => self.memory.word16(driver + 2).store(0, Ordering::Release),
            (false, true) => {
                let at = driver + 4 + 2 * u64::from(self.options.size);
                self.memory.word16(at).store(self.next_used, Ordering::Relaxed);
            }
            (false, false) => self.memory.word16(driver).store(0, Ordering::Relaxed),
        }
        fence(Ordering::SeqCst);
    }
}
