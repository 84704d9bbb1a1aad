//! Fuzz target: a whole connection to a disk in RAM, with messages in any order and with any contents, over guest
//! memory that changes meanwhile. Some steps are valid parts of a set-up, so that later phases are reached.

use std::io::Read;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::memory::MemoryDevice;
use larder_block::event_loop::{Socket, yield_now};
use larder_block::{ByteLen, Loop};
use larder_export::activity::Activity;
use larder_export::vhost_user::{VhostUserOptions, VhostUserServer};
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::MemfdFlags;

use super::Input;
use crate::front_end::wire::{self, Wire, longs, words};

const MEMORY_BYTES: u64 = 1 << 16;
const USER_BASE: u64 = 1 << 32;

struct Kit {
    on: Loop,
    server: Rc<VhostUserServer>,
}

thread_local! {
    static KIT: Kit = {
        let on = Loop::new(Duration::ZERO).expect("io_uring");
        let device = Rc::new(MemoryDevice::new(ByteLen::new(1 << 20), 512));
        let options = VhostUserOptions { queues: 2, ..VhostUserOptions::default() };
        let server = VhostUserServer::new(&on, device, &options, &Activity::new(&on)).expect("sound options");
        Kit { on, server }
    };
}

struct Guest {
    stream: UnixStream,
    memory: OwnedFd,
    other: OwnedFd,
    event: OwnedFd,
    log: OwnedFd,
}

fn memfd(bytes: u64) -> OwnedFd {
    let file = rustix::fs::memfd_create("fuzz", MemfdFlags::CLOEXEC).expect("a memfd");
    rustix::fs::ftruncate(&file, bytes).expect("a size");
    file
}

pub fn run(data: &[u8]) {
    KIT.with(|kit| {
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        ours.set_nonblocking(true).expect("an option");
        let guest = Guest {
            stream: ours,
            memory: memfd(MEMORY_BYTES),
            other: memfd(1 << 14),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).expect("an event"),
            log: memfd(1 << 12),
        };
        let on = &kit.on;
        on.block_on(async {
            let socket = Socket::from_descriptor(on, theirs.into()).expect("a socket");
            let server = Rc::clone(&kit.server);
            let served = on.spawn_with_result(async move { server.serve(socket).await });
            let mut input = Input(data);
            for _ in 0..128 {
                if input.is_empty() {
                    break;
                }
                guest.step(&mut input);
                for _ in 0..3 {
                    yield_now().await;
                }
            }
            let _ = guest.stream.shutdown(std::net::Shutdown::Both);
            served.await;
        });
    });
}

impl Guest {
    fn send(&self, request: u32, payload: &[u8], files: &[BorrowedFd<'_>]) {
        let wire = self.stream.try_clone().and_then(Wire::new);
        // The server may have closed the connection, or be too slow: both are acceptable.
        let _ = wire.and_then(|wire| wire.send_raw(&Wire::encode(request, true, payload), files));
        let mut replies = [0; 4096];
        let _ = (&self.stream).read(&mut replies);
    }

    fn step(&self, input: &mut Input<'_>) {
        match input.byte() % 8 {
            0 => self.any_message(input),
            1 => self.negotiate(input),
            2 => self.set_memory(),
            3 => self.start_ring(input),
            4 => {
                let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
            }
            5 => self.raw_bytes(input),
            _ => self.patch(input),
        }
    }

    fn file(&self, choice: u8) -> BorrowedFd<'_> {
        match choice % 5 {
            0 => self.memory.as_fd(),
            1 => self.other.as_fd(),
            2 => self.event.as_fd(),
            3 => self.log.as_fd(),
            _ => self.stream.as_fd(),
        }
    }

    fn any_message(&self, input: &mut Input<'_>) {
        let request = u32::from(input.byte() % 48);
        let choices = input.bytes(usize::from(input.0.first().copied().unwrap_or(0) % 4));
        let files: Vec<_> = choices.iter().map(|choice| self.file(*choice)).collect();
        let len = usize::from(input.byte() % 80);
        let mut payload = input.bytes(len).to_vec();
        payload.resize(len, 0);
        self.send(request, &payload, &files);
    }

    fn raw_bytes(&self, input: &mut Input<'_>) {
        let len = usize::from(input.byte() % 40);
        let wire = self.stream.try_clone().and_then(Wire::new);
        let _ = wire.and_then(|wire| wire.send_raw(input.bytes(len), &[]));
    }

    fn negotiate(&self, input: &mut Input<'_>) {
        let protocol = [0x1_b22b, 0b1000][usize::from(input.byte() & 1)];
        self.send(wire::SET_PROTOCOL_FEATURES, &longs(&[protocol]), &[]);
        let choice = input.byte();
        let mut features = 1 << 30 | 1 << 32 | 1 << 28 | 1 << 9;
        features |= u64::from(choice & 1) << 29 | u64::from(choice >> 1 & 1) << 34 | u64::from(choice >> 2 & 1) << 26;
        self.send(wire::SET_FEATURES, &longs(&[features]), &[]);
    }

    fn set_memory(&self) {
        let mut table = words(&[1, 0]);
        table.extend(longs(&[0, MEMORY_BYTES, USER_BASE, 0]));
        self.send(wire::SET_MEM_TABLE, &table, &[self.memory.as_fd()]);
        self.send(wire::SET_LOG_BASE, &longs(&[1 << 12, 0]), &[self.log.as_fd()]);
    }

    fn start_ring(&self, input: &mut Input<'_>) {
        let ring = u32::from(input.byte() % 2);
        let size = 1u32 << (input.byte() % 8);
        if input.byte() & 1 != 0 {
            // An in-flight region with arbitrary contents.
            let contents = input.bytes(64);
            let _ = rustix::io::pwrite(&self.other, contents, 0);
            let mut description = longs(&[1 << 14, 0]);
            description.extend(2u16.to_ne_bytes());
            description.extend((size as u16).to_ne_bytes());
            description.extend([0; 4]);
            self.send(wire::SET_INFLIGHT_FD, &description, &[self.other.as_fd()]);
        }
        self.send(wire::SET_VRING_NUM, &words(&[ring, size]), &[]);
        self.send(wire::SET_VRING_BASE, &words(&[ring, u32::from(input.word()) * 0x1_0001]), &[]);
        let at = USER_BASE + u64::from(ring) * 0x8000;
        let mut addresses = words(&[ring, u32::from(input.byte() & 1)]);
        addresses.extend(longs(&[at, at + 0x2000, at + 0x1000, 0]));
        self.send(wire::SET_VRING_ADDR, &addresses, &[]);
        self.send(wire::SET_VRING_KICK, &longs(&[u64::from(ring)]), &[self.event.as_fd()]);
        self.send(wire::SET_VRING_CALL, &longs(&[u64::from(ring)]), &[self.event.as_fd()]);
        self.send(wire::SET_VRING_ENABLE, &words(&[ring, 1]), &[]);
    }

    /// Overwrites some of the guest's memory, usually in the rings.
    fn patch(&self, input: &mut Input<'_>) {
        let ring = u64::from(input.byte() % 2) * 0x8000;
        let at = match input.byte() % 4 {
            0 => ring + u64::from(input.byte()) % 128 * 16,
            1 => ring + 0x1000 + u64::from(input.byte()) % 64,
            2 => ring + 0x2000 + u64::from(input.byte()) % 64,
            _ => u64::from(input.word()),
        };
        let len = usize::from(input.byte() % 65).min((MEMORY_BYTES - at) as usize);
        let _ = rustix::io::pwrite(&self.memory, input.bytes(len), at);
    }
}
