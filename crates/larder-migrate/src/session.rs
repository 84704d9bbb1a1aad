//! What both sides of a session have: a reason to end, and what must be shut for everybody to notice.

use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Something that a thread may wait on, and that ends its waiting when it is shut.
pub enum Shut {
    /// A connection to the other host.
    Link(TcpStream),
    /// A connection to QEMU.
    Qemu(Arc<UnixStream>),
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

/// The end of a session that fails: the first error counts, and all connections are shut after it, so that QEMU sees a
/// broken connection and never the orderly end of one. The control connection is left out, on which the sides tell one
/// another why; that waits to be sent before they are shut, which the other side notices.
///
/// An error that is but a symptom, such as a connection that the other side has closed, gives way to what the other side
/// says.
pub struct Ending<E> {
    error: Mutex<Option<Failure<E>>>,
    to_shut: Mutex<ToShut>,
}

#[derive(Default)]
struct ToShut {
    all: Vec<Shut>,
    /// What comes is shut at once.
    is_over: bool,
}

struct Failure<E> {
    error: E,
    weight: Weight,
}

/// What an error tells of why a session fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Weight {
    /// That something broke, and not why: perhaps the other side knows.
    Symptom,
    /// Why.
    Cause,
    /// Why, as the other side says.
    Told,
}

impl<E> Ending<E> {
    /// Of a session that goes on.
    #[must_use]
    pub fn new() -> Self {
        Self {
            error: Mutex::new(None),
            to_shut: Mutex::default(),
        }
    }

    /// To be shut by [`Self::shut`]; at once if that was.
    pub fn shut_later(&self, shut: Shut) {
        let mut to_shut = lock(&self.to_shut);
        if to_shut.is_over {
            shut.shut();
        } else {
            to_shut.all.push(shut);
        }
    }

    /// The session fails, for this reason if it has none yet, which `tell` then tells the other side: before anybody else
    /// can think that there is nothing to tell.
    pub fn fail(&self, error: E, weight: Weight, tell: impl FnOnce(&E)) {
        let mut failure = lock(&self.error);
        match &*failure {
            None => tell(&error),
            Some(before) if before.weight == Weight::Symptom && weight == Weight::Told => {}
            Some(_) => return,
        }
        *failure = Some(Failure { error, weight });
    }

    /// Shuts everything, so that nobody waits any more.
    pub fn shut(&self) {
        let mut to_shut = lock(&self.to_shut);
        to_shut.is_over = true;
        for shut in to_shut.all.drain(..) {
            shut.shut();
        }
    }

    /// Whether it has.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        lock(&self.error).is_some()
    }

    /// Why it failed, once nobody else looks.
    #[must_use]
    pub fn into_error(self) -> Option<E> {
        let failure = self.error.into_inner().unwrap_or_else(PoisonError::into_inner);
        failure.map(|failure| failure.error)
    }
}

impl<E> Default for Ending<E> {
    fn default() -> Self {
        Self::new()
    }
}

/// Does the part of a thread. A panic in it is an error like others, so that nobody waits for what the thread has left
/// undone.
///
/// # Errors
/// Those of the part, or `panicked`.
pub fn part<E>(does: impl FnOnce() -> Result<(), E>, panicked: impl FnOnce() -> E) -> Result<(), E> {
    // What it has left half changed is part of a session that ends.
    catch_unwind(AssertUnwindSafe(does)).unwrap_or_else(|_| Err(panicked()))
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn the_first_error_counts_unless_it_was_a_symptom_and_the_other_side_knows_more() {
        let ending = Ending::new();
        let mut told = Vec::new();
        ending.fail("the lane broke", Weight::Symptom, |error| told.push(*error));
        ending.fail("QEMU's socket was shut", Weight::Cause, |error| told.push(*error));
        ending.fail("no QEMU waits", Weight::Told, |error| told.push(*error));
        ending.fail("something else", Weight::Told, |error| told.push(*error));
        assert_eq!(told, ["the lane broke"]);
        assert_eq!(ending.into_error(), Some("no QEMU waits"));
        let ending = Ending::new();
        ending.fail("a wrong checksum", Weight::Cause, |_| {});
        ending.fail("it closed the connection", Weight::Told, |_| {});
        assert_eq!(ending.into_error(), Some("a wrong checksum"));
    }

    #[test]
    fn what_comes_after_the_end_is_shut_too() {
        let ending = Ending::<()>::new();
        let pairs = [(), ()].map(|()| UnixStream::pair().expect("sockets"));
        let [(mut here, there), (mut late_here, late_there)] = pairs;
        let [there, late_there] = [there, late_there].map(Arc::new);
        ending.shut_later(Shut::Qemu(Arc::clone(&there)));
        ending.shut();
        ending.shut_later(Shut::Qemu(Arc::clone(&late_there)));
        assert_eq!(here.read(&mut [0]).expect("reads"), 0);
        assert_eq!(late_here.read(&mut [0]).expect("reads"), 0);
    }

    #[test]
    fn a_thread_that_panics_is_an_error() {
        assert_eq!(part(|| Err("it failed"), || "it panicked"), Err("it failed"));
        assert_eq!(part(|| panic!("as a test"), || "it panicked"), Err("it panicked"));
        assert_eq!(part(|| Ok(()), || "it panicked"), Ok(()));
    }
}
