//! What both sides of a session have: threads that each do a part of it, a reason to end, and what must be shut for everybody
//! to notice.

use std::fmt::Display;
use std::io;
use std::net::{Shutdown, TcpStream};
use std::os::unix::net::UnixStream;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};

use crate::control::Mailbox;
use crate::wire::{Kind, Message};

/// Why a side of a session fails.
pub(crate) trait Failure: Display + Sized {
    /// What it tells of that.
    fn weight(&self) -> Weight;

    /// The thread that does `what` has panicked.
    fn panicked(what: &'static str) -> Self;

    /// Whether one has.
    fn is_panic(&self) -> bool;

    /// The system does not do `what`.
    fn system(what: &'static str, source: io::Error) -> Self;
}

/// A side of a session, as far as both do the same.
pub(crate) trait Side: Sync {
    /// Why it may fail.
    type Error: Failure + Send;
    /// What its threads are called.
    const THREAD: &'static str;

    /// How it ends.
    fn ending(&self) -> &Ending<Self::Error>;

    /// What is said to the other side.
    fn mailbox(&self) -> &Mailbox;

    /// Both sides have said that nothing will follow, or this one has and the other one knows.
    fn ended(&self) -> &AtomicBool;

    /// Lets everybody go home, whatever has become of the other side meanwhile.
    fn go_home(&self);

    /// Has a thread do its part of the session, which fails if that does.
    fn spawn<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        what: &'static str,
        does: impl FnOnce() -> Result<(), Self::Error> + Send + 'scope,
    ) {
        let thread = thread::Builder::new().name(Self::THREAD.to_owned());
        if let Err(source) = thread.spawn_scoped(scope, move || self.part(what, does)) {
            self.fail(Failure::system("starting a thread", source));
        }
    }

    /// Does a part in this thread.
    fn part(&self, what: &'static str, does: impl FnOnce() -> Result<(), Self::Error>) {
        match part(does, || Failure::panicked(what)) {
            // What nobody takes any more may still be on its way when all is over.
            Err(error) if self.ended().load(Ordering::Acquire) && !error.is_panic() => {}
            Err(error) => self.fail(error),
            Ok(()) => {}
        }
    }

    /// The session fails.
    fn fail(&self, error: Self::Error) {
        let weight = error.weight();
        self.ending().fail(error, weight, |error| {
            // The other side knows what it has said itself.
            if weight != Weight::Told {
                let told = error.to_string();
                self.mailbox()
                    .send(&Message::with_body(Kind::Failed, 0, told.as_bytes()));
            }
            self.mailbox().close();
        });
        self.ending().shut();
        self.go_home();
    }
}

/// The sockets of the link that a session has now, for whoever must make those notice that wait on them.
#[derive(Default)]
pub(crate) struct LinkSockets(Mutex<Sockets>);

#[derive(Default)]
struct Sockets {
    /// Which link.
    link: u32,
    control: Option<TcpStream>,
    lanes: Vec<TcpStream>,
    /// What comes is shut at once.
    is_over: bool,
}

impl LinkSockets {
    /// Another link is the session's; those of the one before are shut.
    pub(crate) fn turn(&self, link: u32) {
        let mut sockets = lock(&self.0);
        sockets.shut();
        sockets.link = link;
    }

    /// One more of a link; shut at once if that is not the session's any more.
    pub(crate) fn add(&self, link: u32, socket: TcpStream, is_control: bool) {
        let mut sockets = lock(&self.0);
        if link != sockets.link || sockets.is_over && !is_control {
            shut(&socket);
        } else if is_control {
            sockets.control = Some(socket);
        } else {
            sockets.lanes.push(socket);
        }
    }

    /// This link is lost: nobody is to wait on it any more.
    pub(crate) fn cut(&self, link: u32) {
        let mut sockets = lock(&self.0);
        if link == sockets.link {
            sockets.shut();
        }
    }

    /// The session is over, but for what is said last.
    fn shut_lanes(&self) {
        let mut sockets = lock(&self.0);
        sockets.is_over = true;
        sockets.lanes.drain(..).for_each(|socket| shut(&socket));
    }
}

impl Sockets {
    fn shut(&mut self) {
        self.lanes
            .drain(..)
            .chain(self.control.take())
            .for_each(|socket| shut(&socket));
    }
}

fn shut(socket: &TcpStream) {
    // It fails if the other side has closed it, and whoever waits knows then.
    let _ = socket.shutdown(Shutdown::Both);
}

/// The end of a session that fails: the first error counts, and all connections are shut after it, so that QEMU sees a
/// broken connection and never the orderly end of one. The control connection is left out, on which the sides tell one
/// another why; that waits to be sent before they are shut, which the other side notices.
///
/// An error that is but a symptom, such as a connection that the other side has closed, gives way to what the other side
/// says.
pub(crate) struct Ending<E> {
    error: Mutex<Option<Failed<E>>>,
    to_shut: Mutex<ToShut>,
    /// Between the hosts.
    pub(crate) sockets: LinkSockets,
}

#[derive(Default)]
struct ToShut {
    all: Vec<Arc<UnixStream>>,
    /// What comes is shut at once.
    is_over: bool,
}

struct Failed<E> {
    error: E,
    weight: Weight,
}

/// What an error tells of why a session fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weight {
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
    pub(crate) fn new() -> Self {
        Self {
            error: Mutex::new(None),
            to_shut: Mutex::default(),
            sockets: LinkSockets::default(),
        }
    }

    /// A connection to QEMU, to be shut by [`Self::shut`]; at once if that was.
    pub(crate) fn shut_later(&self, qemu: Arc<UnixStream>) {
        let mut to_shut = lock(&self.to_shut);
        if to_shut.is_over {
            let _ = qemu.shutdown(Shutdown::Both);
        } else {
            to_shut.all.push(qemu);
        }
    }

    /// The session fails, for this reason if it has none yet, which `tell` then tells the other side: before anybody else
    /// can think that there is nothing to tell.
    pub(crate) fn fail(&self, error: E, weight: Weight, tell: impl FnOnce(&E)) {
        let mut failure = lock(&self.error);
        match &*failure {
            None => tell(&error),
            Some(before) if before.weight == Weight::Symptom && weight == Weight::Told => {}
            Some(_) => return,
        }
        *failure = Some(Failed { error, weight });
    }

    /// Shuts everything, so that nobody waits any more.
    pub(crate) fn shut(&self) {
        let mut to_shut = lock(&self.to_shut);
        to_shut.is_over = true;
        for qemu in to_shut.all.drain(..) {
            let _ = qemu.shutdown(Shutdown::Both);
        }
        self.sockets.shut_lanes();
    }

    /// Whether it has.
    #[must_use]
    pub(crate) fn has_failed(&self) -> bool {
        lock(&self.error).is_some()
    }

    /// Why it failed, once nobody else looks.
    #[must_use]
    pub(crate) fn into_error(self) -> Option<E> {
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
fn part<E>(does: impl FnOnce() -> Result<(), E>, panicked: impl FnOnce() -> E) -> Result<(), E> {
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
        ending.shut_later(Arc::clone(&there));
        ending.shut();
        ending.shut_later(Arc::clone(&late_there));
        assert_eq!(here.read(&mut [0]).expect("reads"), 0);
        assert_eq!(late_here.read(&mut [0]).expect("reads"), 0);
    }

    #[test]
    fn what_comes_of_a_link_that_was_lost_is_shut_too() {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let pair = || {
            let here = TcpStream::connect(listener.local_addr().expect("bound")).expect("connects");
            (here, listener.accept().expect("it does").0)
        };
        let sockets = LinkSockets::default();
        let [(mut old, there), (mut late, late_there), (new, new_there)] = [pair(), pair(), pair()];
        sockets.add(0, there, true);
        sockets.turn(2);
        sockets.add(1, late_there, false);
        sockets.add(2, new_there, false);
        sockets.cut(1);
        assert_eq!(old.read(&mut [0]).expect("reads"), 0);
        assert_eq!(late.read(&mut [0]).expect("reads"), 0);
        new.set_nonblocking(true).expect("a socket");
        assert!((&new).read(&mut [0]).is_err(), "it lives");
    }

    #[test]
    fn a_thread_that_panics_is_an_error() {
        assert_eq!(part(|| Err("it failed"), || "it panicked"), Err("it failed"));
        assert_eq!(part(|| panic!("as a test"), || "it panicked"), Err("it panicked"));
        assert_eq!(part(|| Ok(()), || "it panicked"), Ok(()));
    }
}
