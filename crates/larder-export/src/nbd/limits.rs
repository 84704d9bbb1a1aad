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

use super::buffers::room_of;

/// Divisor of a server's memory: this part is reserved for connections with small requests.
const OWN_PART: usize = 4;

/// Buffer memory of all connections of a server.
pub(super) struct Memory {
    /// Bytes reserved for each connection.
    own: usize,
    /// Bytes that all connections share.
    common_max: usize,
    /// Shared bytes that are in use.
    common: Cell<usize>,
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
    memory: Rc<Memory>,
    /// Number of waits for the client so far, and number of present ones.
    waits: Cell<u64>,
    waiting: Cell<u32>,
    /// True if the connection is to be closed because others need its memory.
    is_given_up: Cell<bool>,
}

/// Permit for one request to be in flight; dropping it releases its memory.
pub(super) struct Permit {
    limits: Rc<Limits>,
    bytes: usize,
}

impl Memory {
    /// Creates a pool of `bytes` for up to `connections` connections. The longest request always fits, even if
    /// `bytes` is smaller.
    pub(super) fn new(bytes: usize, connections: usize) -> Rc<Self> {
        let connections = connections.max(1);
        let own = bytes / OWN_PART / connections;
        Rc::new(Self {
            own,
            common_max: (bytes - own * connections).max(room_of(PAYLOAD_LEN_MAX as usize)),
            common: Cell::new(0),
            queue: RefCell::default(),
            freed: Signal::default(),
            queued: Signal::default(),
            connections: RefCell::default(),
        })
    }

    /// Returns how many of a connection's `bytes` are shared ones.
    fn common_of(&self, bytes: usize) -> usize {
        bytes.saturating_sub(self.own)
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
            let wait = connection.upgrade()?.wait_of()?;
            Some((Weak::clone(connection), wait))
        });
        stalled.collect()
    }

    /// Marks those of `stalled`, an earlier result, that are still in the same wait, if another connection is in the
    /// queue.
    pub(super) fn give_up(&self, stalled: &[(Weak<Limits>, u64)]) {
        let same_wait = |(connection, wait): &(Weak<Limits>, u64)| {
            let limits = connection.upgrade()?;
            (limits.wait_of() == Some(*wait)).then_some(limits)
        };
        let stalled: Vec<Rc<Limits>> = stalled.iter().filter_map(same_wait).collect();
        let is_other = |waiting: &Rc<Limits>| !stalled.iter().any(|limits| Rc::ptr_eq(limits, waiting));
        if self.queue.borrow().iter().any(is_other) {
            stalled.iter().for_each(|limits| limits.is_given_up.set(true));
        }
    }
}

/// Position of a connection in the queue, until it is dropped.
struct Place<'a>(&'a Rc<Limits>);

impl<'a> Place<'a> {
    fn take(limits: &'a Rc<Limits>) -> Self {
        limits.memory.queue.borrow_mut().push_back(Rc::clone(limits));
        limits.memory.queued.raise();
        Self(limits)
    }

    fn is_first(&self) -> bool {
        let queue = self.0.memory.queue.borrow();
        queue.front().is_some_and(|first| Rc::ptr_eq(first, self.0))
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let memory = &self.0.memory;
        memory.queue.borrow_mut().retain(|limits| !Rc::ptr_eq(limits, self.0));
        memory.freed.raise();
    }
}

impl Limits {
    /// Creates the limits of a new connection, which shares `memory` with others.
    pub(super) fn new(requests_max: usize, bytes_max: usize, memory: &Rc<Memory>) -> Rc<Self> {
        let limits = Rc::new(Self {
            requests_max: requests_max.max(1),
            bytes_max,
            requests: Cell::new(0),
            bytes: Cell::new(0),
            released: Signal::default(),
            memory: Rc::clone(memory),
            waits: Cell::new(0),
            waiting: Cell::new(0),
            is_given_up: Cell::new(false),
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
                let room = self.bytes.get() + bytes <= self.bytes_max;
                (requests == 0 || (requests < self.requests_max && room)).then_some(())
            })
            .await;
        if self.common_for(bytes) > 0 && (self.memory.has_queue() || !self.has_room(bytes)) {
            let place = Place::take(self);
            // Memory that the connection itself releases may make shared memory unnecessary.
            let may = || self.common_for(bytes) == 0 || (place.is_first() && self.has_room(bytes));
            self.memory.freed.until(|| may().then_some(())).await;
        }
        let memory = &self.memory;
        memory.common.set(memory.common.get() + self.common_for(bytes));
        self.requests.set(self.requests.get() + 1);
        self.bytes.set(self.bytes.get() + bytes);
        Permit {
            limits: Rc::clone(self),
            bytes,
        }
    }

    /// Returns the shared bytes that a request of `bytes` needs now.
    fn common_for(&self, bytes: usize) -> usize {
        let held = self.bytes.get();
        self.memory.common_of(held + bytes) - self.memory.common_of(held)
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.memory.common.get() + self.common_for(bytes) <= self.memory.common_max
    }

    /// Runs `doing`, which waits for the client: for it to receive replies, or to send an announced payload.
    pub(super) async fn client<T>(&self, doing: impl Future<Output = T>) -> T {
        struct Wait<'a>(&'a Cell<u32>);
        impl Drop for Wait<'_> {
            fn drop(&mut self) {
                self.0.set(self.0.get() - 1);
            }
        }
        self.waits.set(self.waits.get() + 1);
        self.waiting.set(self.waiting.get() + 1);
        let _wait = Wait(&self.waiting);
        doing.await
    }

    /// Returns the number of the present wait for the client, if the connection holds shared memory meanwhile.
    fn wait_of(&self) -> Option<u64> {
        let is_stalled = self.waiting.get() > 0 && self.memory.common_of(self.bytes.get()) > 0;
        is_stalled.then(|| self.waits.get())
    }

    /// Returns whether the connection is to be closed because others wait for its memory.
    pub(super) fn is_given_up(&self) -> bool {
        self.is_given_up.get()
    }

    /// Returns whether a request is in flight that does not wait for the client.
    pub(super) fn is_working(&self) -> bool {
        self.requests.get() > 0 && self.waiting.get() == 0
    }

    /// Waits until no request is in flight.
    pub(super) async fn idle(&self) {
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
        let common = memory.common_of(before) - memory.common_of(after);
        memory.common.set(memory.common.get() - common);
        if memory.has_queue() {
            memory.freed.raise();
        }
    }
}
