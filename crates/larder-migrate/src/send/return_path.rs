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
use super::channel::SourceChannel;

/// Time limit for QEMU to read some of the returned bytes.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum queued bytes. The largest output of QEMU comes when post-copy resumes after a break: a bit for each page
/// of a RAM block. This limit suffices for 2 TiB.
const QUEUED_BYTES_MAX: usize = 64 << 20;
/// Bytes counted for the overhead of a message.
const MESSAGE_OVERHEAD_BYTES: usize = 64;

/// Event from the destination.
pub(super) enum ReturnEvent {
    /// Bytes from its QEMU.
    Bytes(Vec<u8>),
    /// Its QEMU has closed the channel; `refused` is true if it does not take the remaining bytes.
    Closed { refused: bool },
}

impl ReturnEvent {
    const fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len() + MESSAGE_OVERHEAD_BYTES,
            Self::Closed { .. } => MESSAGE_OVERHEAD_BYTES,
        }
    }
}

/// Writing end of the queue.
pub(super) struct ReturnSender {
    queue: mpsc::Sender<(Arc<SourceChannel>, ReturnEvent)>,
    queued_bytes: Arc<AtomicUsize>,
}

/// Reading end of the queue, which returns events in order.
pub(super) struct ReturnReceiver {
    queue: mpsc::Receiver<(Arc<SourceChannel>, ReturnEvent)>,
    queued_bytes: Arc<AtomicUsize>,
}

impl ReturnSender {
    /// Creates an empty queue.
    pub(super) fn new() -> (Self, ReturnReceiver) {
        let (sender, receiver) = mpsc::channel();
        let queued_bytes = Arc::new(AtomicUsize::new(0));
        let return_sender = Self { queue: sender, queued_bytes: Arc::clone(&queued_bytes) };
        let queue = receiver;
        (return_sender, ReturnReceiver { queue, queued_bytes })
    }

    /// Queues an event; never blocks.
    pub(super) fn enqueue(&self, channel: Arc<SourceChannel>, event: ReturnEvent) -> Result<(), SendError> {
        let len = event.len();
        if self.queued_bytes.fetch_add(len, Ordering::Relaxed) + len > QUEUED_BYTES_MAX {
            return Err(SendError::ReturnPathStalled { channel: channel.number });
        }
        // It fails only when the session is over.
        let _ = self.queue.send((channel, event));
        Ok(())
    }
}

impl ReturnReceiver {
    /// Waits for the next event; returns `None` when no more will come.
    pub(super) fn next(&self) -> Option<(Arc<SourceChannel>, ReturnEvent)> {
        let next = self.queue.recv().ok()?;
        self.queued_bytes.fetch_sub(next.1.len(), Ordering::Relaxed);
        Some(next)
    }

    /// Writes bytes to QEMU, unless it has closed the channel.
    pub(super) fn write(&self, channel: &SourceChannel, bytes: &[u8]) -> Result<(), SendError> {
        match (&*channel.socket).write_all(bytes) {
            Ok(()) => Ok(()),
            Err(error) => match error.kind() {
                // QEMU has closed the channel, which the reading lane sees.
                io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset => Ok(()),
                io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
                    Err(SendError::ReturnPathStalled { channel: channel.number })
                }
                _ => Err(SendError::io("writing to QEMU")(error)),
            },
        }
    }
}

/// Sets up a connection of QEMU for blocking writes with a time limit.
pub(super) fn set_up_socket(socket: &UnixStream) -> io::Result<()> {
    socket.set_nonblocking(false)?;
    socket.set_write_timeout(Some(WRITE_TIMEOUT))
}
