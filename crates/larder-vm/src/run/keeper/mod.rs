//! Proxy between QEMU and a disk's server, so that QEMU never sees a server disconnect.
//!
//! QEMU can reconnect to a server, but not at every moment. Before 9.1 it loses a vhost-user-blk device for good if
//! the connection ends while the guest's driver is not running, which is the case during most of a boot. So QEMU's
//! connection ends in this process. Its messages are forwarded unchanged, one at a time, and those that the next
//! server needs are recorded ([`Record`]): a successor first gets the recorded messages, and then the message that
//! its predecessor did not answer. Requests still pass from the guest's memory directly to the server, not through
//! the keeper.
//!
//! Invariants:
//! - A message is recorded once it was answered, or once it was sent if it has no answer.
//! - The keeper does not track the positions of running rings: they are in the in-flight region, which it only
//!   forwards. The position of a stopped ring is in the answer to GET_VRING_BASE.
//! - QEMU waits for an answer without a limit, and does nothing else meanwhile. While there is no server it waits for
//!   at most [`AWAY_STEPS_MAX`]; then, or if it is about to end, its connection is closed. While there is a server it
//!   waits as it would without the keeper.
//! - A server that closes the connection but keeps running and listening refuses QEMU's message. The keeper then
//!   closes QEMU's connection as well.

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

/// Interval between attempts to connect to a starting server. Waiting is counted in these steps, so time in which all
/// processes were stopped, including the next server, does not count.
const STEP: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 2_000_000,
};

/// Number of steps without a server after which QEMU's connection is closed: 20 s. QEMU treats that as an error of
/// the disk, and reconnects.
const AWAY_STEPS_MAX: u32 = 10_000;

/// Number of steps for a process to end after its connection has ended: 5 s.
const END_STEPS_MAX: u32 = 2_500;

/// Pause after a connection that ended with an error.
const REST: Timespec = Timespec {
    tv_sec: 0,
    tv_nsec: 100_000_000,
};

/// Reason why a keeper cannot be started.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum KeeperError {
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("cannot start the proxy between QEMU and the server: {0}")]
    Os(#[from] io::Error),
}

/// A thread between QEMU and the server of one disk. It ends when this is dropped.
pub(super) struct Keeper {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

/// State shared with the thread.
struct Shared {
    /// Eventfd that makes the thread end.
    bell: OwnedFd,
    qemu_ends: AtomicBool,
}

impl Keeper {
    /// Listens on the socket to which QEMU connects, and forwards its messages to the disk's server.
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

    /// Records that QEMU is about to end: its messages no longer wait for a missing server.
    pub(super) fn qemu_ends(&self) {
        self.shared.qemu_ends.store(true, Ordering::Relaxed);
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        // The write fails only if the counter is full, and then the eventfd is readable already.
        let _ = rustix::io::write(&self.shared.bell, &1u64.to_ne_bytes());
        // A panic of the thread has aborted the process.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

struct Worker {
    shared: Arc<Shared>,
    /// Name of the disk in messages.
    disk: String,
    /// Socket of its server.
    server: PathBuf,
    /// Number of steps since the last server.
    away_steps: u32,
}

impl Worker {
    /// Serves QEMU's connections one after the other.
    fn run(&mut self, listener: &UnixListener) {
        loop {
            let error = match self.serve(listener) {
                Ok(()) => continue,
                Err(Broken::Over) => return,
                Err(Broken::Io(error)) => error,
            };
            // If QEMU is about to end, a missing disk is expected.
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

    /// Returns whether QEMU has waited for a server for long enough.
    fn must_give_up(&self) -> bool {
        self.away_steps > AWAY_STEPS_MAX || self.shared.qemu_ends.load(Ordering::Relaxed)
    }
}

/// One connection of QEMU's, and the successive servers that serve it.
struct Connection<'a> {
    worker: &'a mut Worker,
    front: UnixStream,
    /// The present server, which has received all of `record`.
    back: Option<UnixStream>,
    record: Record,
}

impl Connection<'_> {
    /// Serves QEMU until it disconnects.
    fn run(mut self) -> Result<(), Broken> {
        loop {
            // Without a server, the next attempt follows soon.
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
                // A server sends nothing unasked, so its connection has ended.
                Some(_) => self.lost()?,
            }
        }
    }

    /// Forwards a message of QEMU's and returns the answer, from the next server if this one dies before it answers.
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

    /// Handles the end of the server's connection.
    ///
    /// # Errors
    /// The server keeps running without the connection.
    fn lost(&mut self) -> Result<(), Broken> {
        let Some(back) = self.back.take() else { return Ok(()) };
        for _ in 0..END_STEPS_MAX {
            if listener_has_ended(&back) {
                return Ok(());
            }
            wait(&[], &self.worker.shared.bell, Some(STEP))?;
        }
        // A server that is stopping does not listen any more, but may still be writing back its data.
        match wire::connect(&self.worker.server) {
            Ok(_) => Err(io::Error::other("its server refuses it; see the message before this one").into()),
            Err(_) => Ok(()),
        }
    }

    /// Connects to the next server and replays the record to it. Returns false if there is no server yet.
    fn connect(&mut self) -> Result<bool, Broken> {
        self.worker.away_steps = self.worker.away_steps.saturating_add(1);
        let Ok(back) = wire::connect(&self.worker.server) else {
            return Ok(false);
        };
        // The socket of a dead server may exist for a moment longer.
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
