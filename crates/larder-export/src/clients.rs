//! Clients of a disk, counted across all its exports.

use std::cell::Cell;
use std::rc::Rc;

/// Counter of a disk's clients, which calls back when the last one has disconnected.
pub struct Clients {
    count: Cell<usize>,
    on_last_disconnect: Box<dyn Fn()>,
}

/// Registration of one client, which ends when it is dropped.
pub(crate) struct ClientRegistration(Rc<Clients>);

impl Clients {
    /// Creates a counter without clients. `on_last_disconnect` is called whenever the count returns to zero.
    pub fn new(on_last_disconnect: impl Fn() + 'static) -> Rc<Self> {
        Rc::new(Self { count: Cell::new(0), on_last_disconnect: Box::new(on_last_disconnect) })
    }

    pub(crate) fn register(self: &Rc<Self>) -> ClientRegistration {
        self.count.set(self.count.get() + 1);
        ClientRegistration(Rc::clone(self))
    }
}

impl Drop for ClientRegistration {
    fn drop(&mut self) {
        let clients = &self.0;
        clients.count.set(clients.count.get() - 1);
        if clients.count.get() == 0 {
            (clients.on_last_disconnect)();
        }
    }
}
