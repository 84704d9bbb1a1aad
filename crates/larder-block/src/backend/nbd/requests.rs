//! The requests of an export: waiting, on the wire, or answered.
//!
//! A request lives in a slot from the call until the caller has taken the result. It does not own memory: a read's
//! payload goes into the caller's buffer, a write's payload comes from there. A caller that drops the request early
//! takes its buffer away. Data that must still be sent or kept is copied before the drop returns, and data that still
//! arrives is discarded.
//!
//! Slots are numbered. Slot and generation together are the cookie on the wire, so a reply to a request that no
//! longer exists is recognised.

use std::collections::VecDeque;
use std::task::Waker;

use super::log::{Entry, LogPosition, ReplayLog};
use crate::buffer::{ReadBuf, WriteBuf};
use crate::device::Extent;
use crate::error::Failure;
use crate::nbd::{Command, CommandFlags};
use crate::units::ByteRange;

/// The identity of a request: the number of its slot, and the slot's generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RequestId {
    slot: u32,
    generation: u32,
}

impl RequestId {
    pub(super) fn cookie(self) -> u64 {
        u64::from(self.generation) << 32 | u64::from(self.slot)
    }

    pub(super) fn from_cookie(cookie: u64) -> Self {
        Self { slot: cookie as u32, generation: (cookie >> 32) as u32 }
    }
}

/// The content of a request to the server.
#[derive(Clone, Copy, Debug)]
pub(super) struct NbdRequest {
    pub(super) command: Command,
    pub(super) flags: CommandFlags,
    pub(super) range: ByteRange,
}

impl NbdRequest {
    /// Returns the length in bytes of the payload sent with the request.
    pub(super) fn payload_len(&self) -> usize {
        match self.command {
            Command::Write => self.range.len.as_usize(),
            _ => 0,
        }
    }
}

/// The source or destination of a request's payload.
pub(super) enum PayloadBuffer {
    /// There is no payload, or its caller has dropped the request.
    None,
    /// The caller's buffer of a read; replaced before the caller's future is dropped.
    ReadInto(ReadBuf<'static>),
    /// The caller's buffer of a write; replaced before the caller's future is dropped.
    WriteFrom(WriteBuf<'static>),
    /// A copy of the data of a write whose caller has dropped the request.
    Copied(Box<[u8]>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    Queued,
    /// The number of payload bytes sent so far.
    Sending(usize),
    Sent,
    Done(Result<(), Failure>),
}

/// The owner of a request, which waits for the answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Caller,
    /// None: the caller has dropped the request.
    Abandoned,
    /// The replay log, which needs space.
    Log,
}

pub(super) struct Slot {
    generation: u32,
    state: State,
    owner: Owner,
    request: NbdRequest,
    memory: PayloadBuffer,
    waker: Option<Waker>,
    /// The position in the order of submission.
    sequence: u64,
    /// The reservation in the log, in bytes of data.
    reserved: Option<u64>,
    /// The position in the log that a flush covers.
    log_position: LogPosition,
    /// The bytes of a read that were accounted for.
    received: u64,
    /// The failure from an error chunk that came before the last chunk.
    failure: Option<Failure>,
    /// The answer, if it came before the whole payload was sent.
    early_result: Option<Result<(), Failure>>,
    extents: Vec<Extent>,
    extents_limit: usize,
}

/// The table of all requests of an export. See the [module](self).
pub(super) struct Requests {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Slots that wait to be sent, in order.
    queue: VecDeque<u32>,
    /// The number of requests that were sent, or are being sent, and have no answer.
    on_wire: usize,
    on_wire_max: usize,
    next_sequence: u64,
    answered: u64,
    /// A flush for the log is in flight.
    log_flush_in_flight: bool,
    /// Changes wait for space in the log.
    is_log_full: bool,
}

impl Requests {
    pub(super) fn new(on_wire_max: usize) -> Self {
        Self {
            slots: Vec::new(),
            free: Vec::new(),
            queue: VecDeque::new(),
            on_wire: 0,
            on_wire_max,
            next_sequence: 0,
            answered: 0,
            log_flush_in_flight: false,
            is_log_full: false,
        }
    }

    pub(super) fn on_wire(&self) -> usize {
        self.on_wire
    }

    pub(super) fn answered(&self) -> u64 {
        self.answered
    }

    /// Returns true if requests wait to be sent.
    pub(super) fn is_waiting(&self) -> bool {
        !self.queue.is_empty()
    }

    /// Returns the number of requests that have not been answered.
    pub(super) fn unanswered(&self) -> usize {
        self.on_wire + self.queue.len()
    }

    pub(super) fn submit(&mut self, request: NbdRequest, memory: PayloadBuffer, limit: usize) -> RequestId {
        self.insert(request, memory, limit, Owner::Caller)
    }

    /// Adds a request that has failed before it was sent.
    pub(super) fn submit_failed(&mut self, request: NbdRequest, failure: Failure) -> RequestId {
        let id = self.insert(request, PayloadBuffer::None, 0, Owner::Caller);
        self.queue.pop_back();
        self.slots[id.slot as usize].state = State::Done(Err(failure));
        id
    }

    fn insert(&mut self, request: NbdRequest, memory: PayloadBuffer, limit: usize, owner: Owner) -> RequestId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::new());
            (self.slots.len() - 1) as u32
        });
        self.next_sequence += 1;
        let slot = &mut self.slots[index as usize];
        debug_assert_eq!(slot.state, State::Free);
        slot.state = State::Queued;
        slot.owner = owner;
        slot.request = request;
        slot.memory = memory;
        slot.sequence = self.next_sequence;
        slot.received = 0;
        slot.failure = None;
        slot.early_result = None;
        slot.extents_limit = limit;
        self.queue.push_back(index);
        RequestId { slot: index, generation: slot.generation }
    }

    fn slot(&self, id: RequestId) -> Option<&Slot> {
        self.slots.get(id.slot as usize).filter(|slot| slot.generation == id.generation && slot.state != State::Free)
    }

    fn slot_mut(&mut self, id: RequestId) -> Option<&mut Slot> {
        self.slots
            .get_mut(id.slot as usize)
            .filter(|slot| slot.generation == id.generation && slot.state != State::Free)
    }

    fn release(&mut self, index: u32) {
        let slot = &mut self.slots[index as usize];
        slot.generation = slot.generation.wrapping_add(1);
        slot.state = State::Free;
        slot.memory = PayloadBuffer::None;
        slot.waker = None;
        slot.extents = Vec::new();
        self.free.push(index);
    }

    /// Takes the answer, or stores `waker` to be woken for it. A call after the answer was taken is a bug of the
    /// caller.
    pub(super) fn poll(&mut self, id: RequestId, waker: &Waker) -> Option<Result<Vec<Extent>, Failure>> {
        let Some(slot) = self.slot_mut(id) else { panic!("a request was polled after it had completed") };
        let State::Done(result) = slot.state else {
            match &mut slot.waker {
                Some(stored) => stored.clone_from(waker),
                None => slot.waker = Some(waker.clone()),
            }
            return None;
        };
        let extents = std::mem::take(&mut slot.extents);
        self.release(id.slot);
        Some(result.map(|()| extents))
    }

    /// Abandons a request, whose caller takes its buffer away. Does nothing if the answer was taken.
    pub(super) fn abandon(&mut self, id: RequestId, log: &ReplayLog) {
        let Some(slot) = self.slot_mut(id) else {
            return;
        };
        slot.waker = None;
        slot.owner = Owner::Abandoned;
        match slot.state {
            State::Free => {}
            State::Queued => {
                self.queue.retain(|index| *index != id.slot);
                self.release(id.slot);
            }
            State::Done(_) => self.release(id.slot),
            // The rest of the payload must be sent unchanged, or the server would write garbage. A change that may
            // yet be acknowledged must be available for a replay, because it may have been read by then.
            State::Sending(_) => slot.copy_payload(),
            State::Sent if log.is_enabled() => slot.copy_payload(),
            State::Sent => slot.memory = PayloadBuffer::None,
        }
    }

    /// Starts the next request, if the wire has room for one. Changes for which the log has no space wait for a
    /// flush; other requests overtake them.
    pub(super) fn start_next(&mut self, log: &mut ReplayLog) -> Option<(RequestId, NbdRequest)> {
        if self.on_wire >= self.on_wire_max {
            return None;
        }
        self.is_log_full = false;
        for position in 0..self.queue.len() {
            let index = self.queue[position];
            let slot = &mut self.slots[index as usize];
            if slot.request.command.is_change() {
                let data_len = slot.request.payload_len() as u64;
                if self.is_log_full || !log.reserve(data_len) {
                    self.is_log_full = true;
                    continue;
                }
                slot.reserved = Some(data_len);
            }
            slot.log_position = log.end_position();
            slot.state = State::Sending(0);
            self.queue.remove(position);
            self.on_wire += 1;
            let slot = &self.slots[index as usize];
            let id = RequestId { slot: index, generation: slot.generation };
            return Some((id, slot.request));
        }
        None
    }

    /// Enqueues a flush if changes wait for space in the log that only a flush can make.
    pub(super) fn flush_for_log_space(&mut self, log: &ReplayLog) {
        if self.is_log_full && log.len() > 0 {
            self.start_log_flush();
        }
    }

    /// Enqueues a flush, so that the log's changes need not be replayed again, unless such a flush is in flight.
    pub(super) fn start_log_flush(&mut self) {
        if !self.log_flush_in_flight {
            self.log_flush_in_flight = true;
            let flush = NbdRequest { command: Command::Flush, flags: CommandFlags::NONE, range: ByteRange::default() };
            self.insert(flush, PayloadBuffer::None, 0, Owner::Log);
            // The flush goes before the changes that wait for it.
            self.queue.rotate_right(1);
        }
    }

    /// Returns the part of a payload that is not sent yet; empty when all is sent.
    pub(super) fn unsent(&self, id: RequestId) -> WriteBuf<'_> {
        let Some(Slot { state: State::Sending(sent), memory, .. }) = self.slot(id) else {
            return WriteBuf::new(&[]);
        };
        match memory {
            PayloadBuffer::WriteFrom(buffer) => buffer.skip(*sent),
            PayloadBuffer::Copied(bytes) => WriteBuf::new(bytes).skip(*sent),
            PayloadBuffer::None | PayloadBuffer::ReadInto(_) => WriteBuf::new(&[]),
        }
    }

    /// Records that `count` more bytes of a payload were sent.
    pub(super) fn advance(&mut self, id: RequestId, count: usize) {
        if let Some(Slot { state: State::Sending(sent), .. }) = self.slot_mut(id) {
            *sent += count;
        }
    }

    /// Records that the request is sent. Completes it if its answer has come already.
    pub(super) fn sent(&mut self, id: RequestId, log: &mut ReplayLog) {
        let Some(slot) = self.slot_mut(id) else {
            return;
        };
        slot.state = State::Sent;
        if slot.owner == Owner::Abandoned && !log.is_enabled() {
            slot.memory = PayloadBuffer::None;
        }
        if let Some(result) = slot.early_result.take() {
            self.finish(id, result, log);
        }
    }

    /// Returns the request on the wire that has this cookie, if there is one.
    pub(super) fn on_wire_request(&self, cookie: u64) -> Option<(RequestId, NbdRequest)> {
        let id = RequestId::from_cookie(cookie);
        let slot = self.slot(id)?;
        match slot.state {
            State::Sending(_) if slot.early_result.is_none() => Some((id, slot.request)),
            State::Sent => Some((id, slot.request)),
            _ => None,
        }
    }

    /// Returns `len` bytes of a read's buffer from `from` on; `None` if its caller has dropped the request.
    pub(super) fn read_target(&self, id: RequestId, from: usize, len: usize) -> Option<ReadBuf<'_>> {
        match &self.slot(id)?.memory {
            PayloadBuffer::ReadInto(buffer) => Some(buffer.slice(from, len)),
            _ => None,
        }
    }

    /// Accounts for `len` bytes of a read, and returns the total.
    pub(super) fn received(&mut self, id: RequestId, len: u64) -> u64 {
        match self.slot_mut(id) {
            Some(slot) => {
                slot.received = slot.received.saturating_add(len);
                slot.received
            }
            None => 0,
        }
    }

    pub(super) fn received_so_far(&self, id: RequestId) -> u64 {
        self.slot(id).map_or(0, |slot| slot.received)
    }

    /// Records the failure from an error chunk, with which the last chunk will complete the request.
    pub(super) fn record_failure(&mut self, id: RequestId, failure: Failure) {
        if let Some(slot) = self.slot_mut(id) {
            slot.failure.get_or_insert(failure);
        }
    }

    pub(super) fn failure_so_far(&self, id: RequestId) -> Option<Failure> {
        self.slot(id)?.failure
    }

    /// Adds an extent to the answer. Returns false if the limit is reached.
    pub(super) fn push_extent(&mut self, id: RequestId, extent: Extent) -> bool {
        match self.slot_mut(id) {
            Some(slot) if slot.extents.len() < slot.extents_limit => {
                slot.extents.push(extent);
                true
            }
            _ => false,
        }
    }

    pub(super) fn has_extents(&self, id: RequestId) -> bool {
        self.slot(id).is_some_and(|slot| !slot.extents.is_empty())
    }

    /// Completes the request: a successful change is appended to the log, and a successful flush releases the log.
    pub(super) fn finish(&mut self, id: RequestId, result: Result<(), Failure>, log: &mut ReplayLog) {
        let Some(slot) = self.slot_mut(id) else {
            return;
        };
        if let State::Sending(_) = slot.state {
            slot.early_result = Some(result);
            return;
        }
        debug_assert_eq!(slot.state, State::Sent);
        let reserved = slot.reserved.take();
        match (reserved, result) {
            (Some(_), Ok(())) => slot.append_to_log(log),
            (Some(data_len), Err(_)) => log.unreserve(data_len),
            (None, Ok(())) if slot.request.command == Command::Flush => log.release(slot.log_position),
            (None, _) => {}
        }
        self.on_wire -= 1;
        self.answered += 1;
        self.complete(id.slot, result);
        // Only a change starts a flush: a failed flush that starts another one at once would loop for ever.
        if reserved.is_some() && log.is_half_full() {
            self.start_log_flush();
        }
    }

    fn complete(&mut self, index: u32, result: Result<(), Failure>) {
        let slot = &mut self.slots[index as usize];
        match slot.owner {
            Owner::Caller => {
                slot.state = State::Done(result);
                slot.memory = PayloadBuffer::None;
                if let Some(waker) = slot.waker.take() {
                    waker.wake();
                }
            }
            Owner::Abandoned => self.release(index),
            Owner::Log => {
                self.release(index);
                self.log_flush_in_flight = false;
                if let Err(failure) = result {
                    tracing::warn!(event = "flush-failed", %failure, "a flush to free space in the replay log failed");
                    self.fail_waiting_changes(failure);
                }
            }
        }
    }

    /// Fails the changes that wait for space in the log after a failed flush, because they would wait for ever.
    fn fail_waiting_changes(&mut self, failure: Failure) {
        if !std::mem::take(&mut self.is_log_full) {
            return;
        }
        let queue = std::mem::take(&mut self.queue);
        for index in queue {
            if self.slots[index as usize].request.command.is_change() {
                self.complete(index, Err(failure));
            } else {
                self.queue.push_back(index);
            }
        }
    }

    /// Requeues all unanswered requests after a broken connection, in their old order, to be sent on another one.
    pub(super) fn requeue(&mut self, log: &mut ReplayLog) {
        let mut requeued = Vec::new();
        for index in 0..self.slots.len() as u32 {
            let slot = &mut self.slots[index as usize];
            if !matches!(slot.state, State::Sending(_) | State::Sent) {
                continue;
            }
            if let Some(data_len) = slot.reserved.take() {
                log.unreserve(data_len);
            }
            let droppable = slot.owner == Owner::Abandoned
                && match slot.request.command {
                    Command::Write => !matches!(slot.memory, PayloadBuffer::Copied(_)),
                    command => !command.is_change(),
                };
            if droppable {
                self.release(index);
                continue;
            }
            slot.state = State::Queued;
            slot.received = 0;
            slot.failure = None;
            slot.early_result = None;
            slot.extents.clear();
            requeued.push(index);
        }
        requeued.extend(self.queue.drain(..));
        requeued.sort_by_key(|index| self.slots[*index as usize].sequence);
        self.queue.extend(requeued);
        self.on_wire = 0;
    }

    /// Fails all requests that wait.
    pub(super) fn fail_queued(&mut self, failure: Failure) {
        for index in std::mem::take(&mut self.queue) {
            self.complete(index, Err(failure));
        }
    }
}

impl Slot {
    fn new() -> Self {
        Self {
            generation: 0,
            state: State::Free,
            owner: Owner::Abandoned,
            request: NbdRequest { command: Command::Flush, flags: CommandFlags::NONE, range: ByteRange::default() },
            memory: PayloadBuffer::None,
            waker: None,
            sequence: 0,
            reserved: None,
            log_position: LogPosition::default(),
            received: 0,
            failure: None,
            early_result: None,
            extents: Vec::new(),
            extents_limit: 0,
        }
    }

    /// Copies the caller's memory where it is still needed.
    fn copy_payload(&mut self) {
        self.memory = match std::mem::replace(&mut self.memory, PayloadBuffer::None) {
            PayloadBuffer::WriteFrom(buffer) => PayloadBuffer::Copied(buffer.to_vec().into_boxed_slice()),
            PayloadBuffer::Copied(bytes) => PayloadBuffer::Copied(bytes),
            PayloadBuffer::ReadInto(_) | PayloadBuffer::None => PayloadBuffer::None,
        };
    }

    fn append_to_log(&self, log: &mut ReplayLog) {
        let data = match &self.memory {
            PayloadBuffer::WriteFrom(buffer) => Some(*buffer),
            PayloadBuffer::Copied(bytes) => Some(WriteBuf::new(bytes)),
            PayloadBuffer::ReadInto(_) | PayloadBuffer::None => None,
        };
        let entry = Entry { command: self.request.command, range: self.request.range };
        log.append(entry, data);
    }
}
