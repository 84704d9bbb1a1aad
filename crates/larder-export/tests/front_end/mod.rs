//! vhost-user front-end for tests: a guest without QEMU, which follows or violates the protocol as a test requires.
//!
//! It behaves as QEMU does where that matters: it keeps the in-flight region after a server was killed, continues at
//! the used index, requests acknowledgements, and suppresses kicks and interrupts by the rules.
#![allow(dead_code, unreachable_pub, reason = "each test program uses a part of it")]

pub mod memory;
pub mod queue;
pub mod ring;
pub mod wire;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::sync::Arc;

use memory::{Memory, USER_BASE};
use queue::{Queue, area_bytes};
use ring::RingOptions;
use wire::{Wire, longs, words};

pub const F_RO: u64 = 1 << 5;
pub const F_FLUSH: u64 = 1 << 9;
pub const F_CONFIG_WCE: u64 = 1 << 11;
pub const F_LOG_ALL: u64 = 1 << 26;
pub const F_INDIRECT: u64 = 1 << 28;
pub const F_EVENT_IDX: u64 = 1 << 29;
pub const F_PROTOCOL: u64 = 1 << 30;
pub const F_VERSION_1: u64 = 1 << 32;
pub const F_PACKED: u64 = 1 << 34;

pub const P_LOG_SHMFD: u64 = 1 << 1;
pub const P_REPLY_ACK: u64 = 1 << 3;
pub const P_BACKEND_REQ: u64 = 1 << 5;
pub const P_INFLIGHT: u64 = 1 << 12;
pub const P_STATUS: u64 = 1 << 16;

/// Configuration of a guest.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    pub queues: u16,
    pub size: u16,
    pub packed: bool,
    pub event_index: bool,
    pub indirect: bool,
    /// Guest memory for data in bytes, after the memory of the queues.
    pub data_bytes: usize,
    /// Features that the guest does not accept.
    pub without: u64,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            queues: 1,
            size: 128,
            packed: false,
            event_index: true,
            indirect: false,
            data_bytes: 4 << 20,
            without: 0,
        }
    }
}

/// Guest with its front-end.
pub struct FrontEnd {
    pub wire: Wire,
    pub options: Options,
    pub memory: Arc<Memory>,
    pub queues: Vec<Queue>,
    /// In-flight region: its description, and its file.
    pub inflight: Option<(Vec<u8>, OwnedFd)>,
    /// This side's end of the back-end channel.
    pub channel: Option<UnixStream>,
    pub features: u64,
}

impl FrontEnd {
    /// Connects and sets everything up.
    pub fn connect(path: &Path, options: Options) -> io::Result<Self> {
        Self::over(UnixStream::connect(path)?, options)
    }

    pub fn over(stream: UnixStream, options: Options) -> io::Result<Self> {
        let bytes = area_bytes(options.size) as usize * usize::from(options.queues) + options.data_bytes;
        let memory = Arc::new(Memory::new(bytes.next_multiple_of(4096))?);
        Self::with_memory(stream, options, memory)
    }

    pub fn with_memory(stream: UnixStream, options: Options, memory: Arc<Memory>) -> io::Result<Self> {
        let mut this = Self::unconfigured(stream, options, memory)?;
        this.negotiate()?;
        this.set_memory()?;
        this.start_queues()?;
        Ok(this)
    }

    /// Creates a guest that is connected and has sent no message.
    pub fn unconfigured(stream: UnixStream, options: Options, memory: Arc<Memory>) -> io::Result<Self> {
        let ring = RingOptions { size: options.size, packed: options.packed, event_index: options.event_index };
        let queues = (0..options.queues)
            .map(|index| Queue::new(&memory, area_bytes(options.size) * u64::from(index), ring, options.indirect))
            .collect::<io::Result<_>>()?;
        Ok(Self { wire: Wire::new(stream)?, options, memory, queues, inflight: None, channel: None, features: 0 })
    }

    /// Returns the first guest address for data.
    pub fn data(&self) -> u64 {
        area_bytes(self.options.size) * u64::from(self.options.queues)
    }

    pub fn queue(&mut self) -> &mut Queue {
        &mut self.queues[0]
    }

    /// Continues with another server, after the previous one was killed or has closed the connection.
    pub fn reconnect(&mut self, stream: UnixStream) -> io::Result<()> {
        self.wire = Wire::new(stream)?;
        self.channel = None;
        self.negotiate()?;
        self.set_memory()?;
        self.start_queues()
    }

    pub fn negotiate(&mut self) -> io::Result<()> {
        let offered = self.wire.ask_u64(wire::GET_FEATURES)?;
        let protocol = self.wire.ask_u64(wire::GET_PROTOCOL_FEATURES)?;
        self.wire.tell_u64(wire::SET_PROTOCOL_FEATURES, protocol)?;
        self.wire.acknowledged = protocol & P_REPLY_ACK != 0;
        self.wire.tell(wire::SET_OWNER, &[], &[])?;
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(std::time::Duration::from_secs(240)))?;
        self.wire.tell(wire::SET_BACKEND_REQ_FD, &[], &[theirs.as_fd()])?;
        self.channel = Some(ours);
        let mut without = self.options.without | F_LOG_ALL;
        for (wanted, feature) in [
            (self.options.packed, F_PACKED),
            (self.options.event_index, F_EVENT_IDX),
            (self.options.indirect, F_INDIRECT),
        ] {
            without |= if wanted { 0 } else { feature };
        }
        self.features = offered & !without;
        self.wire.tell_u64(wire::SET_FEATURES, self.features)
    }

    /// Encodes one region description, as in SET_MEM_TABLE and ADD_MEM_REG.
    pub fn region(start: u64, bytes: u64) -> Vec<u8> {
        longs(&[start, bytes, USER_BASE + start, start])
    }

    pub fn set_memory(&mut self) -> io::Result<()> {
        let mut table = words(&[1, 0]);
        table.extend(Self::region(0, self.memory.bytes() as u64));
        self.wire.tell(wire::SET_MEM_TABLE, &table, &[self.memory.file()])
    }

    /// Hands over the in-flight region, and starts every queue.
    pub fn start_queues(&mut self) -> io::Result<()> {
        self.set_inflight()?;
        (0..self.queues.len()).try_for_each(|index| self.start_queue(index))
    }

    /// Hands over the in-flight region, which is requested from the server if there is none yet.
    pub fn set_inflight(&mut self) -> io::Result<()> {
        if self.inflight.is_none() {
            let mut wish = longs(&[0, 0]);
            wish.extend(self.options.queues.to_ne_bytes());
            wish.extend(self.options.size.to_ne_bytes());
            wish.extend([0; 4]);
            let mut reply = self.wire.ask(wire::GET_INFLIGHT_FD, &wish)?;
            let file = reply.files.pop().ok_or_else(|| io::Error::other("no file for requests in flight"))?;
            self.inflight = Some((reply.payload, file));
        }
        if let Some((description, file)) = &self.inflight {
            self.wire.tell(wire::SET_INFLIGHT_FD, description, &[file.as_fd()])?;
        }
        Ok(())
    }

    pub fn start_queue(&mut self, index: usize) -> io::Result<()> {
        self.start_queue_at(index, self.queues[index].ring.base())
    }

    /// Starts a queue at the position `base`.
    pub fn start_queue_at(&mut self, index: usize, base: u32) -> io::Result<()> {
        let queue = &self.queues[index];
        let ring = index as u32;
        self.wire.tell_ring(wire::SET_VRING_NUM, ring, u32::from(self.options.size))?;
        self.wire.tell_ring(wire::SET_VRING_BASE, ring, base)?;
        self.set_addresses(index, 0)?;
        self.wire.tell(wire::SET_VRING_KICK, &longs(&[index as u64]), &[queue.kick.as_fd()])?;
        self.wire.tell(wire::SET_VRING_CALL, &longs(&[index as u64]), &[queue.call.as_fd()])?;
        self.wire.tell_ring(wire::SET_VRING_ENABLE, ring, 1)
    }

    pub fn set_addresses(&self, index: usize, flags: u32) -> io::Result<()> {
        let places = self.queues[index].ring.places();
        let mut payload = words(&[index as u32, flags]);
        payload.extend(longs(&[
            USER_BASE + places.descriptors,
            USER_BASE + places.device,
            USER_BASE + places.driver,
            0,
        ]));
        self.wire.tell(wire::SET_VRING_ADDR, &payload, &[])
    }

    /// Stops a queue with GET_VRING_BASE and returns its position.
    pub fn stop_queue(&self, index: usize) -> io::Result<u32> {
        let reply = self.wire.ask(wire::GET_VRING_BASE, &words(&[index as u32, 0]))?;
        let bytes = reply.payload.get(4..8).and_then(|bytes| bytes.try_into().ok());
        bytes.map(u32::from_ne_bytes).ok_or_else(|| io::Error::other("no ring base"))
    }

    /// Reads bytes of the configuration space.
    pub fn config(&self, offset: u32, len: u32) -> io::Result<Vec<u8>> {
        let mut payload = words(&[offset, len, 0]);
        payload.resize(12 + len as usize, 0);
        let reply = self.wire.ask(wire::GET_CONFIG, &payload)?;
        Ok(reply.payload.get(12..).unwrap_or_default().to_vec())
    }

    pub fn set_config(&self, offset: u32, bytes: &[u8]) -> io::Result<()> {
        let mut payload = words(&[offset, bytes.len() as u32, 0]);
        payload.extend(bytes);
        self.wire.tell(wire::SET_CONFIG, &payload, &[])
    }

    /// Returns the disk's size, in bytes.
    pub fn capacity(&self) -> io::Result<u64> {
        let bytes = self.config(0, 8)?;
        let sectors: [u8; 8] = bytes.try_into().map_err(|_| io::Error::other("no capacity"))?;
        Ok(u64::from_le_bytes(sectors) * 512)
    }
}
