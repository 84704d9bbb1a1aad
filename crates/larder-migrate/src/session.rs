//! What both sides of a session have: a first reason to end, and what must be shut for everybody to notice.

use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

/// Something that a thread may wait on, and that ends its waiting when it is shut.
pub enum Shut {
    /// A connection to the other host.
    Link(TcpStream),
    /// A connection to QEMU.
    Qemu(UnixStream),
}

impl Shut {
    fn shut(&self) {
        // It fails if the other side has closed it, and whoever waits knows then.
        let _ = match self {
            Self::Link(socket) => socket.shutdown(Shutdown::Both),
            Self::Qemu(socket) => socket.shutdown(Shutdown::Both),
        };
    }
}

/// The end of a session that fails: the first error counts, and all connections are shut with it, so that QEMU sees a
/// broken connection and never the orderly end of one.
pub struct Ending<E> {
    error: OnceLock<E>,
    to_shut: Mutex<Vec<Shut>>,
}

impl<E> Ending<E> {
    /// Of a session that goes on.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            error: OnceLock::new(),
            to_shut: Mutex::new(Vec::new()),
        }
    }

    /// To be shut when the session fails; at once if it has.
    pub fn shut_later(&self, shut: Shut) {
        let mut to_shut = self.lock();
        if self.error.get().is_some() {
            shut.shut();
        }
        to_shut.push(shut);
    }

    /// The session fails, for this reason if it has none yet. Returns whether it had none.
    pub fn fail(&self, error: E) -> bool {
        let first = self.error.set(error).is_ok();
        for shut in &*self.lock() {
            shut.shut();
        }
        first
    }

    /// Why it failed.
    #[must_use]
    pub fn error(&self) -> Option<&E> {
        self.error.get()
    }

    /// Why it failed, once nobody else looks.
    #[must_use]
    pub fn into_error(self) -> Option<E> {
        self.error.into_inner()
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Shut>> {
        self.to_shut.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<E> Default for Ending<E> {
    fn default() -> Self {
        Self::new()
    }
}
