//! Who uses a disk: the clients of all its exports together.

use std::cell::Cell;
use std::rc::Rc;

/// Counts the clients of a disk, and tells when the last one has left.
pub struct Clients {
    count: Cell<usize>,
    last_left: Box<dyn Fn()>,
}

/// One of them, until it is dropped.
pub(crate) struct Client(Rc<Clients>);

impl Clients {
    /// Nobody so far. `last_left` is called whenever there is nobody any more.
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
