//! Session with the destination.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use tracing::Span;

use super::{LATE_WARNING_INTERVAL, POLL_INTERVAL};
use crate::moving::messages::{ToDestination, ToSource};
use crate::moving::socket_dir::SocketDir;
use crate::notes::{Notes, ReceivedNote};
use crate::progress::SenderProgress;
use crate::send::{self, SendError, Sender, Steering};

/// Time limit for a session to end after everything is done.
const SESSION_END_TIMEOUT: Duration = Duration::from_secs(30);

/// Session with the destination, and the thread that carries it.
pub(super) struct Carrier {
    pub(super) notes: Notes,
    pub(super) steering: Arc<Steering>,
    pub(super) socket_dir: SocketDir,
    pub(super) thread: Option<JoinHandle<Result<(), SendError>>>,
}

impl Carrier {
    pub(super) fn start(options: &send::Options, user: u32, progress: &Arc<SenderProgress>) -> Result<Self, String> {
        let sender = Sender::connect(options).map_err(|error| error.to_string())?;
        let (socket, listener) =
            SocketDir::with_listener(user).map_err(|error| format!("cannot create a socket for QEMU: {error}"))?;
        let steering = Arc::new(Steering::default());
        steering.hold.store(true, Ordering::Relaxed);
        let notes = sender.notes();
        let (steered, progress, span) = (Arc::clone(&steering), Arc::clone(progress), Span::current());
        let thread = thread::Builder::new()
            .name("larder-send".to_owned())
            .spawn(move || span.in_scope(|| sender.carry(&listener, &progress, &steered)))
            .map_err(|error| format!("cannot start a thread: {error}"))?;
        Ok(Self { notes, steering, socket_dir: socket, thread: Some(thread) })
    }

    /// Sends a message to the destination and waits for the answer, as long as the session lives. Cancellation is
    /// ignored until `patience` has passed.
    pub(super) fn ask(
        &self,
        request: &ToDestination,
        cancel: &AtomicBool,
        patience: Duration,
    ) -> Result<ToSource, String> {
        self.notes.send(&serde_json::to_vec(request).expect("plain data"));
        let started = Instant::now();
        let mut last_warning = started;
        loop {
            if started.elapsed() >= patience && cancel.load(Ordering::Relaxed) {
                return Err("cancelled".to_owned());
            }
            match self.notes.receive(POLL_INTERVAL) {
                ReceivedNote::Timeout => {}
                ReceivedNote::SessionEnded => return Err("the connection was lost".to_owned()),
                ReceivedNote::Note(note) => {
                    return serde_json::from_slice(&note)
                        .map_err(|error| format!("its answer cannot be parsed ({error})"));
                }
            }
            if last_warning.elapsed() > LATE_WARNING_INTERVAL {
                last_warning = Instant::now();
                tracing::warn!("the destination has not answered for {} s", started.elapsed().as_secs());
            }
        }
    }

    pub(super) fn is_over(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Ends the session in order once QEMU's channels have ended, for which they are given time.
    pub(super) fn end(mut self) -> Result<(), SendError> {
        self.steering.hold.store(false, Ordering::Relaxed);
        let until = Instant::now() + SESSION_END_TIMEOUT;
        while !self.is_over() && Instant::now() < until {
            thread::sleep(POLL_INTERVAL);
        }
        self.steering.stop.store(true, Ordering::Relaxed);
        self.join()
    }

    /// Ends the session at once; returns the error if it had failed before.
    pub(super) fn abort(mut self) -> Option<SendError> {
        self.steering.stop.store(true, Ordering::Relaxed);
        self.join().err().filter(|error| !matches!(error, SendError::Stopped))
    }

    fn join(&mut self) -> Result<(), SendError> {
        match self.thread.take().map(JoinHandle::join) {
            Some(Ok(result)) => result,
            Some(Err(_)) => Err(SendError::Panicked { what: "the sender" }),
            None => Ok(()),
        }
    }
}

impl Drop for Carrier {
    fn drop(&mut self) {
        self.steering.stop.store(true, Ordering::Relaxed);
        let _ = self.join();
    }
}
