//! Limits of the requests in flight. Each connection has a limit of requests and of buffer bytes; all connections of
//! a server share a limit of buffer bytes. A connection at a limit is not read from, so a client that asks for more
//! waits with its own memory.
//!
//! A part of the server's memory is reserved in equal shares, one for each possible connection, so small requests
//! never wait for other clients. The rest is common, and allocated in the order of requests. A client that holds
//! common memory, and keeps the server waiting while others wait for that memory, is disconnected.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};

use larder_block::nbd::PAYLOAD_LEN_MAX;
use larder_block::signal::Signal;

use super::buffers::buffer_bytes;

/// Divisor of a server's memory: this part is reserved for connections with small requests.
const RESERVED_DIVISOR: usize = 4;

/// Buffer memory of all connections of a server.
pub(super) struct BufferMemory {
    /// Bytes reserved for each connection.
    reserved_per_connection: usize,
    /// Bytes that all connections share.
    shared_max: usize,
    /// Shared bytes that are in use.
    shared: Cell<usize>,
    /// Connections that wait for shared bytes, in order; a connection waits for one request at a time.
    queue: RefCell<VecDeque<Rc<Limits>>>,
    /// Raised on releases while there is a queue.
    freed: Signal,
    /// Raised when a connection joins the queue.
    queued: Signal,
    connections: RefCell<Vec<Weak<Limits>>>,
}

/// Limits of a connection, and its requests in flight.
pub(super) struct Limits {
    requests_max: usize,
    bytes_max: usize,
    requests: Cell<usize>,
    bytes: Cell<usize>,
    released: Signal,
    memory: Rc<BufferMemory>,
    /// Number of waits for the client so far, and number of present ones.
    waits: Cell<u64>,
    waiting: Cell<u32>,
    /// True if the connection is to be closed because others need its memory.
    has_timed_out: Cell<bool>,
}

/// Permit for one request to be in flight; dropping it releases its memory.
pub(super) struct Permit {
    limits: Rc<Limits>,
    bytes: usize,
}

impl BufferMemory {
    /// Creates a pool of `bytes` for up to `connections` connections. The longest request always fits, even if
    /// `bytes` is smaller.
    pub(super) fn new(bytes: usize, connections: usize) -> Rc<Self> {
        let connections = connections.max(1);
        let reserved_per_connection = bytes / RESERVED_DIVISOR / connections;
        Rc::new(Self {
            reserved_per_connection,
            shared_max: (bytes - reserved_per_connection * connections).max(buffer_bytes(PAYLOAD_LEN_MAX as usize)),
            shared: Cell::new(0),
            queue: RefCell::default(),
            freed: Signal::default(),
            queued: Signal::default(),
            connections: RefCell::default(),
        })
    }

    /// Returns how many of a connection's `bytes` are shared ones.
    fn shared_part_of(&self, bytes: usize) -> usize {
        bytes.saturating_sub(self.reserved_per_connection)
    }

    fn has_queue(&self) -> bool {
        !self.queue.borrow().is_empty()
    }

    /// Waits until a connection is in the queue.
    pub(super) async fn queued(&self) {
        self.queued.until(|| self.has_queue().then_some(())).await;
    }

    /// Returns the connections that hold shared memory and keep the server waiting, each with the number of its wait.
    pub(super) fn stalled(&self) -> Vec<(Weak<Limits>, u64)> {
        let connections = self.connections.borrow();
        let stalled = connections.iter().filter_map(|connection| {
            let wait = connection.upgrade()?.stalled_wait()?;
            Some((Weak::clone(connection), wait))
        });
        stalled.collect()
    }

    /// Marks those of `stalled`, an earlier result, that are still in the same wait, if another connection is in the
    /// queue.
    pub(super) fn time_out_stalled(&self, stalled: &[(Weak<Limits>, u64)]) {
        let same_wait = |(connection, wait): &(Weak<Limits>, u64)| {
            let limits = connection.upgrade()?;
            (limits.stalled_wait() == Some(*wait)).then_some(limits)
        };
        let stalled: Vec<Rc<Limits>> = stalled.iter().filter_map(same_wait).collect();
        let is_other = |waiting: &Rc<Limits>| !stalled.iter().any(|limits| Rc::ptr_eq(limits, waiting));
        if self.queue.borrow().iter().any(is_other) {
            stalled.iter().for_each(|limits| limits.has_timed_out.set(true));
        }
    }
}

/// Position of a connection in the queue, until it is dropped.
struct QueuePosition<'a>(&'a Rc<Limits>);

impl<'a> QueuePosition<'a> {
    fn enqueue(limits: &'a Rc<Limits>) -> Self {
        limits.memory.queue.borrow_mut().push_back(Rc::clone(limits));
        limits.memory.queued.raise();
        Self(limits)
    }

    fn is_first(&self) -> bool {
        let queue = self.0.memory.queue.borrow();
        queue.front().is_some_and(|first| Rc::ptr_eq(first, self.0))
    }
}

impl Drop for QueuePosition<'_> {
    fn drop(&mut self) {
        let memory = &self.0.memory;
        memory.queue.borrow_mut().retain(|limits| !Rc::ptr_eq(limits, self.0));
        memory.freed.raise();
    }
}

impl Limits {
    /// Creates the limits of a new connection, which shares `memory` with others.
    pub(super) fn new(requests_max: usize, bytes_max: usize, memory: &Rc<BufferMemory>) -> Rc<Self> {
        let limits = Rc::new(Self {
            requests_max: requests_max.max(1),
            bytes_max,
            requests: Cell::new(0),
            bytes: Cell::new(0),
            released: Signal::default(),
            memory: Rc::clone(memory),
            waits: Cell::new(0),
            waiting: Cell::new(0),
            has_timed_out: Cell::new(false),
        });
        let mut connections = memory.connections.borrow_mut();
        connections.retain(|connection| connection.strong_count() > 0);
        connections.push(Rc::downgrade(&limits));
        drop(connections);
        limits
    }

    /// Waits until a request that needs `bytes` of buffers may begin. The connection's own limits always allow one
    /// request.
    pub(super) async fn permit(self: &Rc<Self>, bytes: usize) -> Permit {
        self.released
            .until(|| {
                let requests = self.requests.get();
                let has_bytes = self.bytes.get() + bytes <= self.bytes_max;
                (requests == 0 || (requests < self.requests_max && has_bytes)).then_some(())
            })
            .await;
        if self.shared_needed(bytes) > 0 && (self.memory.has_queue() || !self.has_room(bytes)) {
            let position = QueuePosition::enqueue(self);
            // Memory that the connection itself releases may make shared memory unnecessary.
            let may_begin = || self.shared_needed(bytes) == 0 || (position.is_first() && self.has_room(bytes));
            self.memory.freed.until(|| may_begin().then_some(())).await;
        }
        let memory = &self.memory;
        memory.shared.set(memory.shared.get() + self.shared_needed(bytes));
        self.requests.set(self.requests.get() + 1);
        self.bytes.set(self.bytes.get() + bytes);
        Permit { limits: Rc::clone(self), bytes }
    }

    /// Returns the shared bytes that a request of `bytes` needs now.
    fn shared_needed(&self, bytes: usize) -> usize {
        let in_use = self.bytes.get();
        self.memory.shared_part_of(in_use + bytes) - self.memory.shared_part_of(in_use)
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.memory.shared.get() + self.shared_needed(bytes) <= self.memory.shared_max
    }

    /// Runs `operation`, which waits for the client: for it to receive replies, or to send an announced payload.
    pub(super) async fn wait_for_client<T>(&self, operation: impl Future<Output = T>) -> T {
        struct Wait<'a>(&'a Cell<u32>);
        impl Drop for Wait<'_> {
            fn drop(&mut self) {
                self.0.set(self.0.get() - 1);
            }
        }
        self.waits.set(self.waits.get() + 1);
        self.waiting.set(self.waiting.get() + 1);
        let _wait = Wait(&self.waiting);
        operation.await
    }

    /// Returns the number of the present wait for the client, if the connection holds shared memory meanwhile.
    fn stalled_wait(&self) -> Option<u64> {
        let is_stalled = self.waiting.get() > 0 && self.memory.shared_part_of(self.bytes.get()) > 0;
        is_stalled.then(|| self.waits.get())
    }

    /// Returns whether the connection is to be closed because others wait for its memory.
    pub(super) fn has_timed_out(&self) -> bool {
        self.has_timed_out.get()
    }

    /// Returns whether a request is in flight that does not wait for the client.
    pub(super) fn is_working(&self) -> bool {
        self.requests.get() > 0 && self.waiting.get() == 0
    }

    /// Waits until no request is in flight.
    pub(super) async fn until_idle(&self) {
        self.released.until(|| (self.requests.get() == 0).then_some(())).await;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let (limits, memory) = (&*self.limits, &*self.limits.memory);
        let (before, after) = (limits.bytes.get(), limits.bytes.get() - self.bytes);
        limits.requests.set(limits.requests.get() - 1);
        limits.bytes.set(after);
        limits.released.raise();
        let shared = memory.shared_part_of(before) - memory.shared_part_of(after);
        memory.shared.set(memory.shared.get() - shared);
        if memory.has_queue() {
            memory.freed.raise();
        }
    }
}
