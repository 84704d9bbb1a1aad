//! What the destination's QEMU says, on its way to the source's.
//!
//! It is written by a thread of its own: the source's QEMU may take its time to read it, and the control connection, over
//! which it comes, must not wait for that. What waits is bounded, in bytes and in time.

use std::io::{self, Write as _};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use super::SendError;
use super::channel::Channel;

/// How long QEMU may take to read something of what comes back.
const TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes that may wait for it. The most that QEMU says at once is, when post-copy goes on after a break, a bit for each page
/// of a RAM block: these are for 2 TiB.
const WAITING_MAX: usize = 64 << 20;
/// Of a message of the other side's that has few bytes or none.
const MESSAGE_LEN: usize = 64;

/// Something from the destination.
pub(super) enum Back {
    /// Its QEMU has said this.
    Bytes(Vec<u8>),
    /// Its QEMU has closed the channel, perhaps with bytes to come that it does not take.
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

/// Where it is put.
pub(super) struct Returns {
    queue: mpsc::Sender<(Arc<Channel>, Back)>,
    waiting: Arc<AtomicUsize>,
}

/// Where it is taken, in order.
pub(super) struct Returning {
    queue: mpsc::Receiver<(Arc<Channel>, Back)>,
    waiting: Arc<AtomicUsize>,
}

impl Returns {
    /// With nothing in between.
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

    /// Never waits.
    pub(super) fn put(&self, channel: Arc<Channel>, back: Back) -> Result<(), SendError> {
        let len = back.len();
        if self.waiting.fetch_add(len, Ordering::Relaxed) + len > WAITING_MAX {
            return Err(SendError::Return {
                channel: channel.number,
            });
        }
        // It fails when the session is over.
        let _ = self.queue.send((channel, back));
        Ok(())
    }
}

impl Returning {
    /// Waits for the next; `None` when nothing more will come.
    pub(super) fn next(&self) -> Option<(Arc<Channel>, Back)> {
        let next = self.queue.recv().ok()?;
        self.waiting.fetch_sub(next.1.len(), Ordering::Relaxed);
        Some(next)
    }

    /// Writes something to QEMU, if that still reads it.
    pub(super) fn write(&self, channel: &Channel, bytes: &[u8]) -> Result<(), SendError> {
        match (&*channel.socket).write_all(bytes) {
            Ok(()) => Ok(()),
            Err(error) => match error.kind() {
                // QEMU has closed it, which the reader sees.
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Ok(()),
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => Err(SendError::Return {
                    channel: channel.number,
                }),
                _ => Err(SendError::io("writing to QEMU")(error)),
            },
        }
    }
}

/// Of a connection of QEMU's.
pub(super) fn set_up(socket: &UnixStream) -> io::Result<()> {
    socket.set_nonblocking(false)?;
    socket.set_write_timeout(Some(TIMEOUT))
}
