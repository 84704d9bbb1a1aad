//! What one connection may have under way: so many requests, so many bytes of buffers. A connection at its limit is not
//! read from, so a client that asks for more waits in its own memory.

use std::cell::Cell;
use std::rc::Rc;

use larder_block::nbd::Signal;

/// The limits of a connection, and what is under way.
pub(super) struct Limits {
    requests_max: usize,
    bytes_max: usize,
    requests: Cell<usize>,
    bytes: Cell<usize>,
    released: Signal,
}

/// Leave for one request to be under way, until it is dropped.
pub(super) struct Permit {
    limits: Rc<Limits>,
    bytes: usize,
}

impl Limits {
    pub(super) fn new(requests_max: usize, bytes_max: usize) -> Rc<Self> {
        Rc::new(Self {
            requests_max: requests_max.max(1),
            bytes_max,
            requests: Cell::new(0),
            bytes: Cell::new(0),
            released: Signal::default(),
        })
    }

    /// Waits until a request that needs `bytes` of buffers may begin. One request always may.
    pub(super) async fn permit(self: &Rc<Self>, bytes: usize) -> Permit {
        self.released
            .until(|| {
                let requests = self.requests.get();
                let room = self.bytes.get() + bytes <= self.bytes_max;
                (requests == 0 || (requests < self.requests_max && room)).then_some(())
            })
            .await;
        self.requests.set(self.requests.get() + 1);
        self.bytes.set(self.bytes.get() + bytes);
        Permit {
            limits: Rc::clone(self),
            bytes,
        }
    }

    /// Waits until nothing is under way.
    pub(super) async fn idle(&self) {
        self.released.until(|| (self.requests.get() == 0).then_some(())).await;
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        let limits = &self.limits;
        limits.requests.set(limits.requests.get() - 1);
        limits.bytes.set(limits.bytes.get() - self.bytes);
        limits.released.raise();
    }
}
