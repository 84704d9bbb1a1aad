//! Stands between QEMU and a disk's server, so that QEMU never sees a server go.
//!
//! QEMU can reconnect to a server, but not at every moment: before 9.1 it loses a vhost-user-blk device for good when
//! the connection ends while the guest's driver is not running, as it is not during most of a boot. So QEMU's connection
//! ends here. Its messages are handed on as they are, one at a time, and what the next server has to know is kept
//! ([`Record`]): a successor is told that first, then gets the message that its predecessor did not answer. Requests go
//! from the guest's memory to the server as ever; nothing of them passes here.
//!
//! Invariants:
//! - A message counts as said once it was answered, or once it was sent if it has no answer.
//! - Where a running ring goes on is none of our business: it is in the region of requests in flight, which we only hand
//!   on. Where a stopped one does is in the answer to GET_VRING_BASE.
//! - QEMU waits for an answer without an end, and does nothing else meanwhile. While there is no server it waits for
//!   [`AWAY_STEPS_MAX`]; then, or if it is about to end, its connection ends. While there is one it waits as it would without
//!   us.
//! - A server that closes the connection, lives and listens on refuses what QEMU says. Then so do we: QEMU's connection
//!   ends.

mod wire;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use larder_export::vhost_user::record::{Message, Record, has_reply, is_refusal};
use rustix::event::{EventfdFlags, Timespec, eventfd};

use super::plan::PlannedDisk;
use crate::listen::{ListenError, SocketFile, listener_has_ended};
use wire::{Broken, receive, send, wait};

/// How often a server that is being started is tried. Waiting is counted in these: time in which all of us were stopped,
/// the next server included, does not count.
const STEP: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 2_000_000,
};

/// How long there may be no server before QEMU's messages find the connection closed: 20 s. QEMU takes that for an
/// error of the disk's, and connects again.
const AWAY_STEPS_MAX: u32 = 10_000;

/// How long a process may take to end after its connection has: 5 s.
const END_STEPS_MAX: u32 = 2_500;

/// The pause after a connection that ended with an error.
const REST: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// Why there is no keeper.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum KeeperError {
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("cannot make a thread between QEMU and the server: {0}")]
    Os(#[from] io::Error),
}

/// A thread between QEMU and the server of one disk. It ends when this is dropped.
pub(super) struct Keeper {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// What the thread is told.
struct Shared {
    /// Rung when it is to end.
    bell: OwnedFd,
    qemu_ends: AtomicBool,
}

impl Keeper {
    /// Listens where QEMU looks for the disk, and takes what it says to the disk's server.
    pub(super) fn start(planned: &PlannedDisk) -> Result<Self, KeeperError> {
        let socket = SocketFile::bind(&planned.socket)?;
        let listener = UnixListener::from(socket.descriptor()?);
        let shared = Arc::new(Shared {
            bell: eventfd(0, EventfdFlags::CLOEXEC).map_err(io::Error::from)?,
            qemu_ends: AtomicBool::new(false),
        });
        let mut worker = Worker {
            shared: Arc::clone(&shared),
            disk: planned.disk.image.to_string(),
            server: planned.server_socket(),
            away_steps: 0,
        };
        let thread = std::thread::Builder::new().name("keeper".to_owned()).spawn(move || {
            let _socket = socket;
            worker.run(&listener);
        })?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// QEMU has been asked to end: it no longer waits for a server that is not there.
    pub(super) fn qemu_ends(&self) {
        self.shared.qemu_ends.store(true, Ordering::Relaxed);
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // A counter that is full has been rung.
        let _ = rustix::io::write(&self.shared.bell, &1u64.to_ne_bytes());
        // A panic there has ended the process.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

struct Worker {
    shared: Arc<Shared>,
    /// Its name in messages.
    disk: String,
    /// Where its server listens.
    server: PathBuf,
    /// For how long there has been none.
    away_steps: u32,
}

impl Worker {
    /// Serves one connection of QEMU's after the other.
    fn run(&mut self, listener: &UnixListener) {
        loop {
            let error = match self.serve(listener) {
                Ok(()) => continue,
                Err(Broken::Over) => return,
                Err(Broken::Io(error)) => error,
            };
            // It is about to end and finds its disk gone: nothing that would surprise anybody.
            if !self.shared.qemu_ends.load(Ordering::Relaxed) {
                tracing::error!("disk {}: QEMU's connection to it is closed: {error}", self.disk);
            }
            if wait(&[], &self.shared.bell, Some(REST)).is_err() {
                return;
            }
        }
    }

    fn serve(&mut self, listener: &UnixListener) -> Result<(), Broken> {
        wait(&[listener.as_fd()], &self.shared.bell, None)?;
        let (front, _) = listener.accept()?;
        let connection = Connection {
            worker: self,
            front,
            back: None,
            record: Record::default(),
        };
        connection.run()
    }

    /// Whether QEMU has waited for a server for long enough.
    fn must_give_up(&self) -> bool {
        self.away_steps > AWAY_STEPS_MAX || self.shared.qemu_ends.load(Ordering::Relaxed)
    }
}

/// One connection of QEMU's, and the servers that serve it one after the other.
struct Connection<'a> {
    worker: &'a mut Worker,
    front: UnixStream,
    /// The present server, told all of `record`.
    back: Option<UnixStream>,
    record: Record,
}

impl Connection<'_> {
    /// Serves QEMU until it disconnects.
    fn run(mut self) -> Result<(), Broken> {
        loop {
            // Without a server it is tried again soon.
            let limit = (self.back.is_none() && !self.connect()?).then_some(STEP);
            let streams = [Some(&self.front), self.back.as_ref()].into_iter().flatten();
            let streams: Vec<_> = streams.map(AsFd::as_fd).collect();
            let bell = &self.worker.shared.bell;
            match wait(&streams, bell, limit)? {
                None => {}
                Some(0) => {
                    let Some(message) = receive(&self.front, bell)? else {
                        return Ok(());
                    };
                    let reply = self.ask(&message)?;
                    if let Some(reply) = &reply {
                        send(reply, &self.front, &self.worker.shared.bell)?;
                    }
                    self.record.note(message, reply.as_ref());
                }
                // A server says nothing unasked: it has gone.
                Some(_) => self.lost()?,
            }
        }
    }

    /// Has a message of QEMU's answered, by the next server if this one dies over it.
    fn ask(&mut self, message: &Message) -> Result<Option<Message>, Broken> {
        loop {
            if let Some(back) = &self.back {
                match ask(back, message, &self.worker.shared.bell) {
                    Err(Broken::Io(_)) => self.lost()?,
                    answered => return answered,
                }
            } else if !self.connect()? {
                if self.worker.must_give_up() {
                    return Err(io::Error::new(io::ErrorKind::TimedOut, "it has no server").into());
                }
                wait(&[], &self.worker.shared.bell, Some(STEP))?;
            }
        }
    }

    /// The server's connection has ended.
    ///
    /// # Errors
    /// The server goes on without it.
    fn lost(&mut self) -> Result<(), Broken> {
        let Some(back) = self.back.take() else { return Ok(()) };
        for _ in 0..END_STEPS_MAX {
            if listener_has_ended(&back) {
                return Ok(());
            }
            wait(&[], &self.worker.shared.bell, Some(STEP))?;
        }
        // One that was told to stop listens no more; it may take its time to write back what it holds.
        match wire::connect(&self.worker.server) {
            Ok(_) => Err(io::Error::other("its server refuses it; see the message before this one").into()),
            Err(_) => Ok(()),
        }
    }

    /// Connects to the next server and tells it all that was said. False if there is none yet.
    fn connect(&mut self) -> Result<bool, Broken> {
        self.worker.away_steps = self.worker.away_steps.saturating_add(1);
        let Ok(back) = wire::connect(&self.worker.server) else {
            return Ok(false);
        };
        // The socket of a dead one may live on for a moment.
        if listener_has_ended(&back) {
            return Ok(false);
        }
        let back = self.back.insert(back);
        for message in self.record.messages() {
            match ask(back, message, &self.worker.shared.bell) {
                Ok(Some(reply)) if is_refusal(message, &reply) => {
                    let error = format!("its new server refuses request {}", message.request());
                    return Err(io::Error::other(error).into());
                }
                Ok(_) => {}
                Err(Broken::Over) => return Err(Broken::Over),
                Err(Broken::Io(_)) => {
                    self.lost()?;
                    return Ok(false);
                }
            }
        }
        self.worker.away_steps = 0;
        Ok(true)
    }
}

/// Sends a message, and waits for the reply if it has one.
fn ask(back: &UnixStream, message: &Message, bell: &OwnedFd) -> Result<Option<Message>, Broken> {
    send(message, back, bell)?;
    if !has_reply(message) {
        return Ok(None);
    }
    match receive(back, bell)? {
        None => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
        reply => Ok(reply),
    }
}
