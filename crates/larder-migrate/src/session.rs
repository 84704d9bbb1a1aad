//! Parts that both sides of a session share: threads that each do one task, an error that ends the session, and the
//! sockets to shut so that all threads notice the end.

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

/// Reason for which a side of a session fails.
pub(crate) trait Failure: Display + Sized {
    /// Returns how much the error explains the failure.
    fn weight(&self) -> Weight;

    /// Creates the error for a panic in the thread whose task is `what`.
    fn panicked(what: &'static str) -> Self;

    /// Returns true if the error is a panic.
    fn is_panic(&self) -> bool;

    /// Creates the error for a failed system call during `what`.
    fn system(what: &'static str, source: io::Error) -> Self;
}

/// Side of a session, with the behaviour that is the same on both.
pub(crate) trait Side: Sync {
    /// Error of the side.
    type Error: Failure + Send;
    /// Name of its threads.
    const THREAD: &'static str;

    /// Returns the record of the session's end.
    fn ending(&self) -> &Ending<Self::Error>;

    /// Returns the messages to the other side.
    fn mailbox(&self) -> &Mailbox;

    /// Returns the flag that is set once both sides have sent END, or this side has and the other one has confirmed
    /// it.
    fn ended(&self) -> &AtomicBool;

    /// Stops all threads, whatever the state of the other side.
    fn go_home(&self);

    /// Spawns a thread for one task; the session fails if the task fails.
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

    /// Runs a task in this thread.
    fn part(&self, what: &'static str, does: impl FnOnce() -> Result<(), Self::Error>) {
        match part(does, || Failure::panicked(what)) {
            // After the end, leftover data that is no longer accepted may cause errors.
            Err(error) if self.ended().load(Ordering::Acquire) && !error.is_panic() => {}
            Err(error) => self.fail(error),
            Ok(()) => {}
        }
    }

    /// Fails the session with this error.
    fn fail(&self, error: Self::Error) {
        let weight = error.weight();
        self.ending().fail(error, weight, |error| {
            // The other side already knows an error that it reported itself.
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

/// Sockets of the session's current link, which are shut to wake the threads that wait on them.
#[derive(Default)]
pub(crate) struct LinkSockets(Mutex<Sockets>);

#[derive(Default)]
struct Sockets {
    /// Number of the link.
    link: u32,
    control: Option<TcpStream>,
    lanes: Vec<TcpStream>,
    /// Set after the end: new lanes are shut at once.
    is_over: bool,
}

impl LinkSockets {
    /// Switches to another link and shuts the sockets of the previous one.
    pub(crate) fn turn(&self, link: u32) {
        let mut sockets = lock(&self.0);
        sockets.shut();
        sockets.link = link;
    }

    /// Adds a socket of a link; it is shut at once if that link is not the session's current one.
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

    /// Marks this link as lost: shuts its sockets, so that no thread waits on them.
    pub(crate) fn cut(&self, link: u32) {
        let mut sockets = lock(&self.0);
        if link == sockets.link {
            sockets.shut();
        }
    }

    /// Shuts the lanes after the end; the control connection stays open for the last messages.
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
    // It fails if the other side has closed the socket, and then no thread waits.
    let _ = socket.shutdown(Shutdown::Both);
}

/// End of a failed session. The first error counts. After it all connections are shut, so that QEMU sees a broken
/// connection and never an orderly end. The control connection is left open: the sides exchange reasons on it. The
/// reason is queued before the others are shut, because the other side notices that.
///
/// An error that is only a symptom, such as a connection closed by the other side, is replaced by the reason that the
/// other side reports.
pub(crate) struct Ending<E> {
    error: Mutex<Option<Failed<E>>>,
    to_shut: Mutex<ToShut>,
    /// Sockets between the hosts.
    pub(crate) sockets: LinkSockets,
}

#[derive(Default)]
struct ToShut {
    all: Vec<Arc<UnixStream>>,
    /// Set after the end: new connections are shut at once.
    is_over: bool,
}

struct Failed<E> {
    error: E,
    weight: Weight,
}

/// Weight of an error as an explanation of a session's failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Weight {
    /// Consequence of an unknown cause, which the other side may know.
    Symptom,
    /// Cause, known to this side.
    Cause,
    /// Cause, reported by the other side.
    Told,
}

impl<E> Ending<E> {
    /// Creates the record of a session that has not failed.
    #[must_use]
    pub(crate) fn new() -> Self {
        Self {
            error: Mutex::new(None),
            to_shut: Mutex::default(),
            sockets: LinkSockets::default(),
        }
    }

    /// Registers a connection to QEMU for [`Self::shut`]; shuts it at once if that was called before.
    pub(crate) fn shut_later(&self, qemu: Arc<UnixStream>) {
        let mut to_shut = lock(&self.to_shut);
        if to_shut.is_over {
            let _ = qemu.shutdown(Shutdown::Both);
        } else {
            to_shut.all.push(qemu);
        }
    }

    /// Fails the session, with this error unless it has a better one. `tell` then reports the first error to the
    /// other side, before another thread can find that there is nothing to report.
    pub(crate) fn fail(&self, error: E, weight: Weight, tell: impl FnOnce(&E)) {
        let mut failure = lock(&self.error);
        match &*failure {
            None => tell(&error),
            Some(before) if before.weight == Weight::Symptom && weight == Weight::Told => {}
            Some(_) => return,
        }
        *failure = Some(Failed { error, weight });
    }

    /// Shuts all connections, so that no thread waits on one.
    pub(crate) fn shut(&self) {
        let mut to_shut = lock(&self.to_shut);
        to_shut.is_over = true;
        for qemu in to_shut.all.drain(..) {
            let _ = qemu.shutdown(Shutdown::Both);
        }
        self.sockets.shut_lanes();
    }

    /// Returns true if the session has failed.
    #[must_use]
    pub(crate) fn has_failed(&self) -> bool {
        lock(&self.error).is_some()
    }

    /// Returns the error, once no other thread uses the session.
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

/// Runs the task of a thread. A panic in it becomes an error, so that no other thread waits for its unfinished work.
///
/// # Errors
/// Errors of the task, or `panicked`.
fn part<E>(does: impl FnOnce() -> Result<(), E>, panicked: impl FnOnce() -> E) -> Result<(), E> {
    // Half-made changes are harmless: they belong to a session that ends.
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
    /// A symptom is replaced by the cause that the other side reports; any other first error stays.
    fn reported_cause_replaces_symptom() {
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
    fn connection_added_after_end_is_shut() {
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

    /// Sockets of a lost link are shut, also those added late; those of the current link stay open.
    #[test]
    fn sockets_of_lost_link_are_shut() {
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
    fn panicking_thread_becomes_error() {
        assert_eq!(part(|| Err("it failed"), || "it panicked"), Err("it failed"));
        assert_eq!(part(|| panic!("as a test"), || "it panicked"), Err("it panicked"));
        assert_eq!(part(|| Ok(()), || "it panicked"), Ok(()));
    }
}
