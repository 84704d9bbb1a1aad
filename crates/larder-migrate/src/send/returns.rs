//! Return path: bytes from the destination's QEMU to the source's.
//!
//! A separate thread writes them. The source's QEMU may read slowly, and the control connection, which delivers them,
//! must not wait for it. The queue is bounded, in bytes and in time.

use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::SendError;
use super::channel::Channel;

/// Time limit for QEMU to read some of the returned bytes.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum queued bytes. The largest output of QEMU comes when post-copy resumes after a break: a bit for each page
/// of a RAM block. This limit suffices for 2 TiB.
const WAITING_MAX: usize = 64 << 20;
/// Bytes counted for the overhead of a message.
const MESSAGE_LEN: usize = 64;

/// Event from the destination.
pub(super) enum Back {
    /// Bytes from its QEMU.
    Bytes(Vec<u8>),
    /// Its QEMU has closed the channel; `refused` is true if it does not take the remaining bytes.
    Closed { refused: bool },
}

impl Back {
    const fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len() + MESSAGE_LEN,
            Self::Closed { .. } => MESSAGE_LEN,
        }
    }
}

/// Writing end of the queue.
pub(super) struct Returns {
    queue: mpsc::Sender<(Arc<Channel>, Back)>,
    waiting: Arc<AtomicUsize>,
}

/// Reading end of the queue, which returns events in order.
pub(super) struct Returning {
    queue: mpsc::Receiver<(Arc<Channel>, Back)>,
    waiting: Arc<AtomicUsize>,
}

impl Returns {
    /// Creates an empty queue.
    pub(super) fn new() -> (Self, Returning) {
        let (sender, receiver) = mpsc::channel();
        let waiting = Arc::new(AtomicUsize::new(0));
        let returns = Self {
            queue: sender,
            waiting: Arc::clone(&waiting),
        };
        let queue = receiver;
        (returns, Returning { queue, waiting })
    }

    /// Queues an event; never blocks.
    pub(super) fn put(&self, channel: Arc<Channel>, back: Back) -> Result<(), SendError> {
        let len = back.len();
        if self.waiting.fetch_add(len, Ordering::Relaxed) + len > WAITING_MAX {
            return Err(SendError::Return {
                channel: channel.number,
            });
        }
        // It fails only when the session is over.
        let _ = self.queue.send((channel, back));
        Ok(())
    }
}

impl Returning {
    /// Waits for the next event; returns `None` when no more will come.
    pub(super) fn next(&self) -> Option<(Arc<Channel>, Back)> {
        let next = self.queue.recv().ok()?;
        self.waiting.fetch_sub(next.1.len(), Ordering::Relaxed);
        Some(next)
    }

    /// Writes bytes to QEMU, unless it has closed the channel.
    pub(super) fn write(&self, channel: &Channel, bytes: &[u8]) -> Result<(), SendError> {
        match (&*channel.socket).write_all(bytes) {
            Ok(()) => Ok(()),
            Err(error) => match error.kind() {
                // QEMU has closed the channel, which the reading lane sees.
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Ok(()),
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Err(SendError::Return {
                    channel: channel.number,
                }),
                _ => Err(SendError::io("writing to QEMU")(error)),
            },
        }
    }
}

/// Sets up a connection of QEMU for blocking writes with a time limit.
pub(super) fn set_up(socket: &UnixStream) -> io::Result<()> {
    socket.set_nonblocking(false)?;
    socket.set_write_timeout(Some(TIMEOUT))
}
