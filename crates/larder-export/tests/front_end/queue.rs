//! virtio-blk requests on one virtqueue, with its events.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use super::memory::Memory;
use super::ring::{Buffer, DriverRing, Places, RingOptions};

pub const T_IN: u32 = 0;
pub const T_OUT: u32 = 1;
pub const T_FLUSH: u32 = 4;
pub const T_GET_ID: u32 = 8;
pub const T_DISCARD: u32 = 11;
pub const T_WRITE_ZEROES: u32 = 13;

/// Value of the status byte until the device writes it.
pub const UNANSWERED: u8 = 0xff;

/// Largest ring for which [`AREA_BYTES`] is sufficient, in descriptors.
pub const SIZE_MAX: u16 = 1024;
const SLOT_BYTES: u64 = 256;
const SLOT_SEGMENT: u64 = 16;
const SLOT_STATUS: u64 = 32;
const SLOT_TABLE: u64 = 64;
const DRIVER_AT: u64 = 0x4000;
const DEVICE_AT: u64 = 0x6000;
const SLOTS_AT: u64 = 0x1_0000;

/// Largest number of descriptors of the indirect table in a slot.
const SLOT_TABLE_LEN: usize = 12;

/// Guest memory of a queue of up to [`SIZE_MAX`] descriptors, in bytes.
pub const AREA_BYTES: u64 = SLOTS_AT + SLOT_BYTES * SIZE_MAX as u64;

/// Returns the number of areas of [`AREA_BYTES`] that a ring of `size` descriptors needs.
fn areas(size: u16) -> u64 {
    u64::from(size.div_ceil(SIZE_MAX).max(1))
}

/// Returns the guest memory that a queue of `size` descriptors needs, in bytes.
pub fn area_bytes(size: u16) -> u64 {
    AREA_BYTES * areas(size)
}

/// Request of a driver.
#[derive(Clone, Debug)]
pub struct Request<'a> {
    pub kind: u32,
    pub sector: u64,
    /// Data that the device reads.
    pub out: &'a [Buffer],
    /// Data that the device writes.
    pub into: &'a [Buffer],
}

impl<'a> Request<'a> {
    pub fn read(sector: u64, into: &'a [Buffer]) -> Self {
        Self { kind: T_IN, sector, out: &[], into }
    }

    pub fn write(sector: u64, out: &'a [Buffer]) -> Self {
        Self { kind: T_OUT, sector, out, into: &[] }
    }

    pub fn flush() -> Self {
        Self { kind: T_FLUSH, sector: 0, out: &[], into: &[] }
    }
}

/// Completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    pub id: u16,
    pub status: u8,
    pub written: u32,
}

/// Virtqueue of the disk.
pub struct Queue {
    memory: Arc<Memory>,
    slots: u64,
    pub ring: DriverRing,
    pub kick: OwnedFd,
    pub call: OwnedFd,
    indirect: bool,
    /// Number of kicks sent, and of interrupts received.
    pub kicks: u64,
    pub interrupts: u64,
}

impl Queue {
    /// Creates a queue whose rings and headers begin at guest address `area`.
    pub fn new(memory: &Arc<Memory>, area: u64, options: RingOptions, indirect: bool) -> io::Result<Self> {
        let areas = areas(options.size);
        let places = Places { descriptors: area, driver: area + DRIVER_AT * areas, device: area + DEVICE_AT * areas };
        Ok(Self {
            memory: Arc::clone(memory),
            slots: area + SLOTS_AT * areas,
            ring: DriverRing::new(memory, places, options),
            kick: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            call: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            indirect,
            kicks: 0,
            interrupts: 0,
        })
    }

    fn slot(&self, id: u16) -> u64 {
        self.slots + SLOT_BYTES * u64::from(id)
    }

    /// Returns whether a request with `pieces` data pieces fits now.
    pub fn has_room(&self, pieces: usize) -> bool {
        self.ring.free_slots() >= if self.indirect { 1 } else { pieces + 2 }
    }

    /// Adds a request; [`Queue::go`] publishes it to the device.
    pub fn add(&mut self, request: &Request<'_>) -> u16 {
        let id = self.ring.next_id().expect("the ring is full");
        let table = self.indirect.then_some(self.slot(id) + SLOT_TABLE);
        let descriptors = request.out.len() + request.into.len() + 2;
        assert!(descriptors <= SLOT_TABLE_LEN || !self.indirect);
        self.add_with(request, table)
    }

    /// Adds a request through an indirect table at `table`, which has room for its data's descriptors and two more.
    pub fn add_through(&mut self, request: &Request<'_>, table: u64) -> u16 {
        self.add_with(request, Some(table))
    }

    fn add_with(&mut self, request: &Request<'_>, table: Option<u64>) -> u16 {
        let id = self.ring.next_id().expect("the ring is full");
        let slot = self.slot(id);
        let mut header = [0; 16];
        header[..4].copy_from_slice(&request.kind.to_le_bytes());
        header[8..].copy_from_slice(&request.sector.to_le_bytes());
        self.memory.write(slot, &header);
        self.memory.write(slot + SLOT_STATUS, &[UNANSWERED]);
        let mut readable = vec![Buffer { address: slot, len: 16 }];
        readable.extend(request.out);
        let mut writable = request.into.to_vec();
        writable.push(Buffer { address: slot + SLOT_STATUS, len: 1 });
        let got = self.ring.add(&readable, &writable, table);
        assert_eq!(got, id);
        id
    }

    /// Adds a discard or write-zeroes of one segment.
    pub fn add_segment(&mut self, kind: u32, sector: u64, sectors: u32, flags: u32) -> u16 {
        let id = self.ring.next_id().expect("the ring is full");
        let at = self.slot(id) + SLOT_SEGMENT;
        let mut segment = sector.to_le_bytes().to_vec();
        segment.extend(sectors.to_le_bytes());
        segment.extend(flags.to_le_bytes());
        self.memory.write(at, &segment);
        let out = [Buffer { address: at, len: 16 }];
        self.add(&Request { kind, sector: 0, out: &out, into: &[] })
    }

    /// Publishes the added requests, and kicks if the device wants it.
    pub fn go(&mut self) {
        if self.ring.publish() {
            self.kick_now();
        }
    }

    /// Publishes the added requests without a kick, as a guest that read the device's event suppression too early.
    pub fn show_silently(&mut self) {
        self.ring.publish();
    }

    /// Enables interrupts without a recheck of the used ring, as a guest that read the ring too early.
    pub fn want_interrupt_too_late(&mut self) {
        self.ring.want_interrupt();
    }

    pub fn kick_now(&mut self) {
        self.kicks += 1;
        let _ = rustix::io::write(&self.kick, &1u64.to_ne_bytes());
    }

    /// Returns a completion that has already arrived.
    pub fn try_complete(&mut self) -> Option<Completion> {
        let (id, written) = self.ring.take_used()?;
        let mut status = [0];
        self.memory.read(self.slot(id) + SLOT_STATUS, &mut status);
        let [status] = status;
        Some(Completion { id, status, written })
    }

    /// Waits for the next completion, asleep until the device's interrupt.
    ///
    /// # Errors
    /// `TimedOut`: no completion arrived, or one arrived without an interrupt.
    pub fn complete(&mut self, limit: Duration) -> io::Result<Completion> {
        let give_up = Instant::now() + limit;
        loop {
            if let Some(completion) = self.try_complete() {
                return Ok(completion);
            }
            self.ring.want_interrupt();
            if let Some(completion) = self.try_complete() {
                return Ok(completion);
            }
            self.wait_for_interrupt(give_up)?;
        }
    }

    /// Waits for an interrupt and consumes it.
    pub fn wait_for_interrupt(&mut self, give_up: Instant) -> io::Result<()> {
        let left = give_up.saturating_duration_since(Instant::now());
        let limit = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: i64::from(left.subsec_nanos()) };
        let mut events = [PollFd::new(&self.call, PollFlags::IN)];
        let count = match poll(&mut events, Some(&limit)) {
            Err(rustix::io::Errno::INTR) => return Ok(()),
            other => other?,
        };
        if count == 0 {
            return Err(io::ErrorKind::TimedOut.into());
        }
        let mut counter = [0; 8];
        let _ = rustix::io::read(self.call.as_fd(), &mut counter);
        self.interrupts += 1;
        Ok(())
    }

    /// Makes one request and waits for its completion.
    pub fn run(&mut self, request: &Request<'_>) -> io::Result<Completion> {
        let id = self.add(request);
        self.finish(id)
    }

    /// Publishes the added requests and waits for `id`, the only one in flight.
    pub fn finish(&mut self, id: u16) -> io::Result<Completion> {
        self.go();
        let completion = self.complete(Duration::from_secs(240))?;
        assert_eq!(completion.id, id, "another request came back");
        Ok(completion)
    }
}
