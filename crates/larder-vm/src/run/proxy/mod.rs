//! Proxy between QEMU and a disk's server, so that QEMU never sees a server disconnect.
//!
//! QEMU can reconnect to a server, but not at every moment. Before 9.1 it loses a vhost-user-blk device for good if
//! the connection ends while the guest's driver is not running, which is the case during most of a boot. So QEMU's
//! connection ends in this process. Its messages are forwarded unchanged, one at a time, and those that the next
//! server needs are recorded ([`MessageRecord`]): a successor first gets the recorded messages, and then the message
//! that its predecessor did not answer. Requests still pass from the guest's memory directly to the server, not through
//! the proxy.
//!
//! Invariants:
//! - A message is recorded once it was answered, or once it was sent if it has no answer.
//! - The proxy does not track the positions of running rings: they are in the in-flight region, which it only
//!   forwards. The position of a stopped ring is in the answer to GET_VRING_BASE.
//! - QEMU waits for an answer without a limit, and does nothing else meanwhile. While there is no server it waits for
//!   at most [`NO_SERVER_POLLS_MAX`]; then, or if it is about to end, its connection is closed. While there is a server
//!   it waits as it would without the proxy.
//! - A server that closes the connection but keeps running and listening refuses QEMU's message. The proxy then
//!   closes QEMU's connection as well.

mod wire;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;

use larder_export::vhost_user::message_record::{MessageRecord, RecordedMessage, has_reply, is_refusal};
use rustix::event::{EventfdFlags, Timespec, eventfd};

use super::plan::PlannedDisk;
use crate::listen::{ListenError, SocketFile, listener_exited};
use wire::{ProxyStop, receive, send, wait_readable};

/// Interval between attempts to connect to a starting server. Waiting is counted in these steps, so time in which all
/// processes were stopped, including the next server, does not count.
const POLL_INTERVAL: Timespec = Timespec { tv_sec: 0, tv_nsec: 2_000_000 };

/// Number of steps without a server after which QEMU's connection is closed: 20 s. QEMU treats that as an error of
/// the disk, and reconnects.
const NO_SERVER_POLLS_MAX: u32 = 10_000;

/// Number of steps for a process to end after its connection has ended: 5 s.
const EXIT_POLLS_MAX: u32 = 2_500;

/// Pause after a connection that ended with an error.
const ERROR_PAUSE: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// Reason why a proxy cannot be started.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ProxyError {
    #[error(transparent)]
    Listen(#[from] ListenError),
    #[error("cannot start the proxy between QEMU and the server: {0}")]
    Os(#[from] io::Error),
}

/// A thread between QEMU and the server of one disk. It ends when this is dropped.
pub(super) struct VhostUserProxy {
    shared: Arc<ProxyShared>,
    thread: Option<JoinHandle<()>>,
}

/// State shared with the thread.
struct ProxyShared {
    /// Eventfd that makes the thread end.
    stop_event: OwnedFd,
    qemu_ending: AtomicBool,
}

impl VhostUserProxy {
    /// Listens on the socket to which QEMU connects, and forwards its messages to the disk's server.
    pub(super) fn start(planned: &PlannedDisk) -> Result<Self, ProxyError> {
        let socket = SocketFile::bind(&planned.socket)?;
        let listener = UnixListener::from(socket.descriptor()?);
        let shared = Arc::new(ProxyShared {
            stop_event: eventfd(0, EventfdFlags::CLOEXEC).map_err(io::Error::from)?,
            qemu_ending: AtomicBool::new(false),
        });
        let mut worker = ProxyWorker {
            shared: Arc::clone(&shared),
            disk: planned.disk.image.to_string(),
            server: planned.server_socket(),
            polls_without_server: 0,
        };
        let thread = std::thread::Builder::new().name("keeper".to_owned()).spawn(move || {
            let _socket = socket;
            worker.run(&listener);
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Records that QEMU is about to end: its messages no longer wait for a missing server.
    pub(super) fn set_qemu_ending(&self) {
        self.shared.qemu_ending.store(true, Ordering::Relaxed);
    }
}

impl Drop for VhostUserProxy {
    fn drop(&mut self) {
        // The write fails only if the counter is full, and then the eventfd is readable already.
        let _ = rustix::io::write(&self.shared.stop_event, &1u64.to_ne_bytes());
        // A panic of the thread has aborted the process.
        let _ = self.thread.take().map(JoinHandle::join);
    }
}

struct ProxyWorker {
    shared: Arc<ProxyShared>,
    /// Name of the disk in messages.
    disk: String,
    /// Socket of its server.
    server: PathBuf,
    /// Number of steps since the last server.
    polls_without_server: u32,
}

impl ProxyWorker {
    /// Serves QEMU's connections one after the other.
    fn run(&mut self, listener: &UnixListener) {
        loop {
            let error = match self.serve(listener) {
                Ok(()) => continue,
                Err(ProxyStop::Stopped) => return,
                Err(ProxyStop::Io(error)) => error,
            };
            // If QEMU is about to end, a missing disk is expected.
            if !self.shared.qemu_ending.load(Ordering::Relaxed) {
                tracing::error!("disk {}: QEMU's connection to it is closed: {error}", self.disk);
            }
            if wait_readable(&[], &self.shared.stop_event, Some(ERROR_PAUSE)).is_err() {
                return;
            }
        }
    }

    fn serve(&mut self, listener: &UnixListener) -> Result<(), ProxyStop> {
        wait_readable(&[listener.as_fd()], &self.shared.stop_event, None)?;
        let (front, _) = listener.accept()?;
        let connection =
            ProxyConnection { worker: self, frontend: front, backend: None, record: MessageRecord::default() };
        connection.run()
    }

    /// Returns whether QEMU has waited for a server for long enough.
    fn is_timed_out(&self) -> bool {
        self.polls_without_server > NO_SERVER_POLLS_MAX || self.shared.qemu_ending.load(Ordering::Relaxed)
    }
}

/// One connection of QEMU's, and the successive servers that serve it.
struct ProxyConnection<'a> {
    worker: &'a mut ProxyWorker,
    frontend: UnixStream,
    /// The present server, which has received all of `record`.
    backend: Option<UnixStream>,
    record: MessageRecord,
}

impl ProxyConnection<'_> {
    /// Serves QEMU until it disconnects.
    fn run(mut self) -> Result<(), ProxyStop> {
        loop {
            // Without a server, the next attempt follows soon.
            let timeout = (self.backend.is_none() && !self.connect_backend()?).then_some(POLL_INTERVAL);
            let streams = [Some(&self.frontend), self.backend.as_ref()].into_iter().flatten();
            let streams: Vec<_> = streams.map(AsFd::as_fd).collect();
            let bell = &self.worker.shared.stop_event;
            match wait_readable(&streams, bell, timeout)? {
                None => {}
                Some(0) => {
                    let Some(message) = receive(&self.frontend, bell)? else {
                        return Ok(());
                    };
                    let reply = self.forward(&message)?;
                    if let Some(reply) = &reply {
                        send(reply, &self.frontend, &self.worker.shared.stop_event)?;
                    }
                    self.record.apply(message, reply.as_ref());
                }
                // A server sends nothing unasked, so its connection has ended.
                Some(_) => self.on_backend_lost()?,
            }
        }
    }

    /// Forwards a message of QEMU's and returns the answer, from the next server if this one dies before it answers.
    fn forward(&mut self, message: &RecordedMessage) -> Result<Option<RecordedMessage>, ProxyStop> {
        loop {
            if let Some(back) = &self.backend {
                match exchange(back, message, &self.worker.shared.stop_event) {
                    Err(ProxyStop::Io(_)) => self.on_backend_lost()?,
                    result => return result,
                }
            } else if !self.connect_backend()? {
                if self.worker.is_timed_out() {
                    return Err(io::Error::new(io::ErrorKind::TimedOut, "it has no server").into());
                }
                wait_readable(&[], &self.worker.shared.stop_event, Some(POLL_INTERVAL))?;
            }
        }
    }

    /// Handles the end of the server's connection.
    ///
    /// # Errors
    /// The server keeps running without the connection.
    fn on_backend_lost(&mut self) -> Result<(), ProxyStop> {
        let Some(back) = self.backend.take() else { return Ok(()) };
        for _ in 0..EXIT_POLLS_MAX {
            if listener_exited(&back) {
                return Ok(());
            }
            wait_readable(&[], &self.worker.shared.stop_event, Some(POLL_INTERVAL))?;
        }
        // A server that is stopping does not listen any more, but may still be writing back its data.
        match wire::connect(&self.worker.server) {
            Ok(_) => Err(io::Error::other("its server refuses it; see the message before this one").into()),
            Err(_) => Ok(()),
        }
    }

    /// Connects to the next server and replays the record to it. Returns false if there is no server yet.
    fn connect_backend(&mut self) -> Result<bool, ProxyStop> {
        self.worker.polls_without_server = self.worker.polls_without_server.saturating_add(1);
        let Ok(back) = wire::connect(&self.worker.server) else {
            return Ok(false);
        };
        // The socket of a dead server may exist for a moment longer.
        if listener_exited(&back) {
            return Ok(false);
        }
        let back = self.backend.insert(back);
        for message in self.record.messages() {
            match exchange(back, message, &self.worker.shared.stop_event) {
                Ok(Some(reply)) if is_refusal(message, &reply) => {
                    let error = format!("its new server refuses request {}", message.request());
                    return Err(io::Error::other(error).into());
                }
                Ok(_) => {}
                Err(ProxyStop::Stopped) => return Err(ProxyStop::Stopped),
                Err(ProxyStop::Io(_)) => {
                    self.on_backend_lost()?;
                    return Ok(false);
                }
            }
        }
        self.worker.polls_without_server = 0;
        Ok(true)
    }
}

/// Sends a message, and waits for the reply if it has one.
fn exchange(
    back: &UnixStream,
    message: &RecordedMessage,
    bell: &OwnedFd,
) -> Result<Option<RecordedMessage>, ProxyStop> {
    send(message, back, bell)?;
    if !has_reply(message) {
        return Ok(None);
    }
    match receive(back, bell)? {
        None => Err(io::Error::from(io::ErrorKind::UnexpectedEof).into()),
        reply => Ok(reply),
    }
}
