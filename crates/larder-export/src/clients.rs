//! Clients of a disk, counted across all its exports.

use std::cell::Cell;
use std::rc::Rc;

/// Counter of a disk's clients, which calls back when the last one has disconnected.
pub struct Clients {
    count: Cell<usize>,
    last_left: Box<dyn Fn()>,
}

/// Registration of one client, which ends when it is dropped.
pub(crate) struct Client(Rc<Clients>);

impl Clients {
    /// Creates a counter without clients. `last_left` is called whenever the count returns to zero.
    pub fn new(last_left: impl Fn() + 'static) -> Rc<Self> {
        Rc::new(Self {
            count: Cell::new(0),
            last_left: Box::new(last_left),
        })
    }

    pub(crate) fn enter(self: &Rc<Self>) -> Client {
        self.count.set(self.count.get() + 1);
        Client(Rc::clone(self))
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let clients = &self.0;
        clients.count.set(clients.count.get() - 1);
        if clients.count.get() == 0 {
            (clients.last_left)();
        }
    }
}
