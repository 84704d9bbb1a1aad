//! What may be under way. A connection has so many requests and so many bytes of buffers; all connections of a server
//! together have so many bytes. A connection at a limit is not read from, so a client that asks for more waits in its
//! own memory.
//!
//! A part of the server's memory is set aside in equal shares, one for each connection that there may be: small requests
//! never wait for other clients. The rest is common, and given out in the order in which it is asked for. A client that
//! has some of it, and keeps the server waiting while others wait for it, loses its connection.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};

use larder_block::nbd::PAYLOAD_LEN_MAX;
use larder_block::signal::Signal;

use super::buffers::room_of;

/// Of a server's memory, this part is set aside for connections that have hardly anything.
const OWN_PART: usize = 4;

/// The memory of all connections of a server.
pub(super) struct Memory {
    /// Bytes that each connection has to itself.
    own: usize,
    /// Bytes that are there for all...
    common_max: usize,
    /// ...and those of them that are taken.
    common: Cell<usize>,
    /// Who waits for common bytes, in order; a connection waits for one request at a time.
    queue: RefCell<VecDeque<Rc<Limits>>>,
    /// Raised while there is a queue.
    freed: Signal,
    /// There is a queue now.
    queued: Signal,
    connections: RefCell<Vec<Weak<Limits>>>,
}

/// The limits of a connection, and what is under way.
pub(super) struct Limits {
    requests_max: usize,
    bytes_max: usize,
    requests: Cell<usize>,
    bytes: Cell<usize>,
    released: Signal,
    memory: Rc<Memory>,
    /// Times that the server has waited for the client, and those that last.
    waits: Cell<u64>,
    waiting: Cell<u32>,
    /// The connection is to end, for the sake of others.
    is_given_up: Cell<bool>,
}

/// Leave for one request to be under way, until it is dropped.
pub(super) struct Permit {
    limits: Rc<Limits>,
    bytes: usize,
}

impl Memory {
    /// Some `bytes` for up to `connections`. Whatever they are, the longest request fits.
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

    /// Of the `bytes` of a connection, those that are common.
    fn common_of(&self, bytes: usize) -> usize {
        bytes.saturating_sub(self.own)
    }

    fn has_queue(&self) -> bool {
        !self.queue.borrow().is_empty()
    }

    /// Waits until somebody waits.
    pub(super) async fn queued(&self) {
        self.queued.until(|| self.has_queue().then_some(())).await;
    }

    /// The connections that have common memory and keep the server waiting, with what tells one wait from another.
    pub(super) fn stalled(&self) -> Vec<(Weak<Limits>, u64)> {
        let connections = self.connections.borrow();
        let stalled = connections.iter().filter_map(|connection| {
            let wait = connection.upgrade()?.wait_of()?;
            Some((Weak::clone(connection), wait))
        });
        stalled.collect()
    }

    /// Gives up those of `stalled`, as they were some time ago, that are in the same wait, if another one is in the queue.
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

/// A connection's place in the queue, until it is dropped.
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
    /// Those of a new connection, which shares `memory` with others.
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

    /// Waits until a request that needs `bytes` of buffers may begin. Of the connection's own limits, one request always
    /// may.
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
            // What the connection itself gives back may make it need nothing common any more.
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

    /// The common bytes that a request of `bytes` needs now.
    fn common_for(&self, bytes: usize) -> usize {
        let held = self.bytes.get();
        self.memory.common_of(held + bytes) - self.memory.common_of(held)
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.memory.common.get() + self.common_for(bytes) <= self.memory.common_max
    }

    /// Waits for the client: to take its answers, or to send what it has announced.
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

    /// Which wait for the client lasts now, if it has common memory meanwhile.
    fn wait_of(&self) -> Option<u64> {
        let is_stalled = self.waiting.get() > 0 && self.memory.common_of(self.bytes.get()) > 0;
        is_stalled.then(|| self.waits.get())
    }

    /// Whether the connection is to end because others wait for its memory.
    pub(super) fn is_given_up(&self) -> bool {
        self.is_given_up.get()
    }

    /// Whether a request is under way that does not wait for the client.
    pub(super) fn is_working(&self) -> bool {
        self.requests.get() > 0 && self.waiting.get() == 0
    }

    /// Waits until nothing is under way.
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
