//! Notes: messages between the movers of a VM over a session, which carries them without interpreting them.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::control::Mailbox;
use crate::wire::{Message, MessageKind};

/// Maximum notes that wait to be read; a peer that sends more is faulty.
const QUEUED_NOTES_MAX: usize = 64;

/// One side's end of the exchange of notes.
#[derive(Clone)]
pub struct Notes {
    mailbox: Arc<Mailbox>,
    inbox: Arc<Inbox>,
}

#[derive(Default)]
struct Inbox {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    waiting: VecDeque<Vec<u8>>,
    is_over: bool,
}

/// Result of waiting for a note.
#[derive(Debug, PartialEq, Eq)]
pub enum ReceivedNote {
    /// Note that was received.
    Note(Vec<u8>),
    /// No note arrived in time.
    Timeout,
    /// The session is over; no note will arrive.
    SessionEnded,
}

impl Notes {
    pub(crate) fn new(mailbox: Arc<Mailbox>) -> Self {
        Self { mailbox, inbox: Arc::default() }
    }

    /// Sends a note of at most [`crate::wire::BODY_MAX`] bytes. Delivery is not reported.
    pub fn send(&self, note: &[u8]) {
        self.mailbox.send(&Message::with_body(MessageKind::Note, 0, note));
    }

    /// Waits for a note.
    #[must_use]
    pub fn receive(&self, wait: Duration) -> ReceivedNote {
        let until = Instant::now() + wait;
        let mut state = self.lock();
        loop {
            if let Some(note) = state.waiting.pop_front() {
                return ReceivedNote::Note(note);
            }
            if state.is_over {
                return ReceivedNote::SessionEnded;
            }
            let remaining = until.saturating_duration_since(Instant::now());
            if remaining.is_zero() {
                return ReceivedNote::Timeout;
            }
            let (next, _) = self.inbox.changed.wait_timeout(state, remaining).unwrap_or_else(PoisonError::into_inner);
            state = next;
        }
    }

    /// Queues a received note; returns false if too many are waiting.
    pub(crate) fn deliver(&self, note: Vec<u8>) -> bool {
        let mut state = self.lock();
        if state.waiting.len() == QUEUED_NOTES_MAX {
            return false;
        }
        state.waiting.push_back(note);
        self.inbox.changed.notify_all();
        true
    }

    pub(crate) fn end(&self) {
        self.lock().is_over = true;
        self.inbox.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.inbox.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
