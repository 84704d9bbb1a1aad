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

use tracing::Span;

use crate::control::Mailbox;
use crate::wire::{Message, MessageKind};

/// Reason for which a side of a session fails.
pub(crate) trait SessionFailure: Display + Sized {
    /// Returns how much the error explains the failure.
    fn rank(&self) -> ErrorRank;

    /// Creates the error for a panic in the thread whose task is `what`.
    fn panicked(what: &'static str) -> Self;

    /// Returns true if the error is a panic.
    fn is_panic(&self) -> bool;

    /// Creates the error for a failed system call during `what`.
    fn system(what: &'static str, source: io::Error) -> Self;
}

/// Side of a session, with the behaviour that is the same on both.
pub(crate) trait SessionSide: Sync {
    /// Error of the side.
    type Error: SessionFailure + Send;
    /// Name of its threads.
    const THREAD: &'static str;

    /// Returns the record of the session's end.
    fn outcome(&self) -> &SessionOutcome<Self::Error>;

    /// Returns the messages to the other side.
    fn mailbox(&self) -> &Mailbox;

    /// Returns the flag that is set once both sides have sent END, or this side has and the other one has confirmed
    /// it.
    fn ended(&self) -> &AtomicBool;

    /// Stops all threads, whatever the state of the other side.
    fn shutdown(&self);

    /// Spawns a thread for one task; the session fails if the task fails.
    fn spawn<'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        what: &'static str,
        task: impl FnOnce() -> Result<(), Self::Error> + Send + 'scope,
    ) {
        let thread = thread::Builder::new().name(Self::THREAD.to_owned());
        let span = Span::current();
        if let Err(source) = thread.spawn_scoped(scope, move || span.in_scope(|| self.run_task(what, task))) {
            self.fail(SessionFailure::system("starting a thread", source));
        }
    }

    /// Runs a task in this thread.
    fn run_task(&self, what: &'static str, task: impl FnOnce() -> Result<(), Self::Error>) {
        match catch_panic(task, || SessionFailure::panicked(what)) {
            // After the end, leftover data that is no longer accepted may cause errors.
            Err(error) if self.ended().load(Ordering::Acquire) && !error.is_panic() => {}
            Err(error) => self.fail(error),
            Ok(()) => {}
        }
    }

    /// Fails the session with this error.
    fn fail(&self, error: Self::Error) {
        let rank = error.rank();
        self.outcome().fail(error, rank, |error| {
            // The other side already knows an error that it reported itself.
            if rank != ErrorRank::Reported {
                let text = error.to_string();
                self.mailbox().send(&Message::with_body(MessageKind::Failed, 0, text.as_bytes()));
            }
            self.mailbox().close();
        });
        self.outcome().shut();
        self.shutdown();
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
    pub(crate) fn switch_link(&self, link: u32) {
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
    pub(crate) fn shut_link(&self, link: u32) {
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
        self.lanes.drain(..).chain(self.control.take()).for_each(|socket| shut(&socket));
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
pub(crate) struct SessionOutcome<E> {
    error: Mutex<Option<RankedError<E>>>,
    qemu_sockets: Mutex<QemuSockets>,
    /// Sockets between the hosts.
    pub(crate) sockets: LinkSockets,
}

#[derive(Default)]
struct QemuSockets {
    all: Vec<Arc<UnixStream>>,
    /// Set after the end: new connections are shut at once.
    is_over: bool,
}

struct RankedError<E> {
    error: E,
    rank: ErrorRank,
}

/// Weight of an error as an explanation of a session's failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorRank {
    /// Consequence of an unknown cause, which the other side may know.
    Symptom,
    /// Cause, known to this side.
    Cause,
    /// Cause, reported by the other side.
    Reported,
}

impl<E> SessionOutcome<E> {
    /// Creates the record of a session that has not failed.
    #[must_use]
    pub(crate) fn new() -> Self {
        Self { error: Mutex::new(None), qemu_sockets: Mutex::default(), sockets: LinkSockets::default() }
    }

    /// Registers a connection to QEMU for [`Self::shut`]; shuts it at once if that was called before.
    pub(crate) fn add_qemu_socket(&self, qemu: Arc<UnixStream>) {
        let mut qemu_sockets = lock(&self.qemu_sockets);
        if qemu_sockets.is_over {
            let _ = qemu.shutdown(Shutdown::Both);
        } else {
            qemu_sockets.all.push(qemu);
        }
    }

    /// Fails the session, with this error unless it has a better one. `report` then reports the first error to the
    /// other side, before another thread can find that there is nothing to report.
    pub(crate) fn fail(&self, error: E, rank: ErrorRank, report: impl FnOnce(&E)) {
        let mut failure = lock(&self.error);
        match &*failure {
            None => report(&error),
            Some(first) if first.rank == ErrorRank::Symptom && rank == ErrorRank::Reported => {}
            Some(_) => return,
        }
        *failure = Some(RankedError { error, rank });
    }

    /// Shuts all connections, so that no thread waits on one.
    pub(crate) fn shut(&self) {
        let mut qemu_sockets = lock(&self.qemu_sockets);
        qemu_sockets.is_over = true;
        for qemu in qemu_sockets.all.drain(..) {
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

impl<E> Default for SessionOutcome<E> {
    fn default() -> Self {
        Self::new()
    }
}

/// Runs the task of a thread. A panic in it becomes an error, so that no other thread waits for its unfinished work.
///
/// # Errors
/// Errors of the task, or `panicked`.
fn catch_panic<E>(task: impl FnOnce() -> Result<(), E>, panicked: impl FnOnce() -> E) -> Result<(), E> {
    // Half-made changes are harmless: they belong to a session that ends.
    catch_unwind(AssertUnwindSafe(task)).unwrap_or_else(|_| Err(panicked()))
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
        let outcome = SessionOutcome::new();
        let mut reported = Vec::new();
        outcome.fail("the lane broke", ErrorRank::Symptom, |error| reported.push(*error));
        outcome.fail("QEMU's socket was shut", ErrorRank::Cause, |error| reported.push(*error));
        outcome.fail("no QEMU waits", ErrorRank::Reported, |error| reported.push(*error));
        outcome.fail("something else", ErrorRank::Reported, |error| reported.push(*error));
        assert_eq!(reported, ["the lane broke"]);
        assert_eq!(outcome.into_error(), Some("no QEMU waits"));
        let outcome = SessionOutcome::new();
        outcome.fail("a wrong checksum", ErrorRank::Cause, |_| {});
        outcome.fail("it closed the connection", ErrorRank::Reported, |_| {});
        assert_eq!(outcome.into_error(), Some("a wrong checksum"));
    }

    #[test]
    fn connection_added_after_end_is_shut() {
        let outcome = SessionOutcome::<()>::new();
        let pairs = [(), ()].map(|()| UnixStream::pair().expect("sockets"));
        let [(mut here, there), (mut late_here, late_there)] = pairs;
        let [there, late_there] = [there, late_there].map(Arc::new);
        outcome.add_qemu_socket(Arc::clone(&there));
        outcome.shut();
        outcome.add_qemu_socket(Arc::clone(&late_there));
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
        sockets.switch_link(2);
        sockets.add(1, late_there, false);
        sockets.add(2, new_there, false);
        sockets.shut_link(1);
        assert_eq!(old.read(&mut [0]).expect("reads"), 0);
        assert_eq!(late.read(&mut [0]).expect("reads"), 0);
        new.set_nonblocking(true).expect("a socket");
        assert!((&new).read(&mut [0]).is_err(), "it lives");
    }

    #[test]
    fn panicking_thread_becomes_error() {
        assert_eq!(catch_panic(|| Err("it failed"), || "it panicked"), Err("it failed"));
        assert_eq!(catch_panic(|| panic!("as a test"), || "it panicked"), Err("it panicked"));
        assert_eq!(catch_panic(|| Ok(()), || "it panicked"), Ok(()));
    }
}
