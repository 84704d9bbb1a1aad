//! The guest: a vhost-user-blk front-end with one queue, which reconnects to the next server after a kill.

use std::ops::Range;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, ensure};

use super::random::SeededRandom;
use crate::campaign::front_end::queue::{self, Completion};
use crate::campaign::front_end::ring::Buffer;
use crate::campaign::front_end::{FrontEnd, Options};

const PATIENCE: Duration = Duration::from_secs(120);
/// Guest memory for the data of requests in flight.
const DATA_BYTES: usize = 16 << 20;
/// Maximum number of buffers of one request.
const PIECES_MAX: u64 = 6;
const DISCARD_UNMAP: u32 = 1;

/// The guest.
pub(super) struct Guest {
    front: FrontEnd,
    /// Offset of the next request's data.
    next: u64,
    /// Random source for the division of requests into buffers.
    dice: SeededRandom,
}

/// Buffers of a request.
pub(super) type Place = Vec<Buffer>;

impl Guest {
    pub(super) fn connect(socket: &Path, packed: bool, indirect: bool, seed: u64) -> anyhow::Result<Self> {
        let options = Options { packed, indirect, data_bytes: DATA_BYTES, ..Options::default() };
        let front = FrontEnd::connect(socket, options).context("connecting the guest")?;
        Ok(Self { next: 0, front, dice: SeededRandom::new(seed, 4) })
    }

    /// Connects to the next server, which answers the requests in flight.
    pub(super) fn reconnect(&mut self, socket: &Path) -> anyhow::Result<()> {
        let stream = UnixStream::connect(socket)?;
        self.front.reconnect(stream).context("reconnecting the guest")
    }

    pub(super) fn capacity(&self) -> anyhow::Result<u64> {
        Ok(self.front.capacity()?)
    }

    /// Returns whether guest memory and the queue have room for another request with `len` bytes of data.
    pub(super) fn has_room(&self, len: u64) -> bool {
        self.next + len <= DATA_BYTES as u64 && self.front.queues[0].has_room(PIECES_MAX as usize)
    }

    /// Frees all memory; no request may be in flight.
    pub(super) fn is_idle(&mut self) {
        self.next = 0;
    }

    fn place(&mut self, len: u64) -> Place {
        let start = self.front.data() + self.next;
        self.next += len;
        let mut place = Vec::new();
        let mut at = 0;
        let pieces = 1 + self.dice.below(PIECES_MAX);
        while at < len {
            let is_last = place.len() as u64 + 1 >= pieces;
            let buffer_len = if is_last { len - at } else { 1 + self.dice.below(len - at) };
            place.push(Buffer { address: start + at, len: buffer_len as u32 });
            at += buffer_len;
        }
        place
    }

    pub(super) fn read(&mut self, range: &Range<u64>) -> (u16, Place) {
        let place = self.place(range.end - range.start);
        let request = queue::Request::read(range.start / 512, &place);
        let id = self.front.queue().add(&request);
        self.front.queue().go();
        (id, place)
    }

    pub(super) fn write(&mut self, range: &Range<u64>, data: &[u8]) -> u16 {
        let place = self.place(data.len() as u64);
        self.front.memory.write(place[0].address, data);
        let request = queue::Request::write(range.start / 512, &place);
        let id = self.front.queue().add(&request);
        self.front.queue().go();
        id
    }

    pub(super) fn discard(&mut self, range: &Range<u64>) -> u16 {
        self.segment(queue::T_DISCARD, range, 0)
    }

    pub(super) fn write_zeroes(&mut self, range: &Range<u64>, unmap: bool) -> u16 {
        self.segment(queue::T_WRITE_ZEROES, range, if unmap { DISCARD_UNMAP } else { 0 })
    }

    fn segment(&mut self, kind: u32, range: &Range<u64>, flags: u32) -> u16 {
        let sectors = (range.end - range.start) / 512;
        let id = self.front.queue().add_segment(kind, range.start / 512, sectors as u32, flags);
        self.front.queue().go();
        id
    }

    pub(super) fn flush(&mut self) -> u16 {
        let id = self.front.queue().add(&queue::Request::flush());
        self.front.queue().go();
        id
    }

    pub(super) fn data(&self, place: &Place) -> Vec<u8> {
        let mut data = Vec::new();
        for piece in place {
            data.extend(self.front.memory.read_vec(piece.address, piece.len as usize));
        }
        data
    }

    /// Waits for the next answer.
    pub(super) fn complete(&mut self) -> anyhow::Result<Completion> {
        let completion = self.front.queue().complete(PATIENCE);
        let completion = completion.context("no completion over vhost-user-blk")?;
        ensure!(completion.status != queue::UNANSWERED, "a completion without a status");
        Ok(completion)
    }
}
