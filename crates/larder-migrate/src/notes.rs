//! What those who move a VM tell one another over a session: notes, which the carrying of streams hands on unseen.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::control::Mailbox;
use crate::wire::{Kind, Message};

/// Notes that wait to be read, at most; a peer that sends more is out of its mind.
const WAITING_MAX: usize = 64;

/// One side's end.
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
    over: bool,
}

/// What there was to read.
#[derive(Debug, PartialEq, Eq)]
pub enum Received {
    /// A note.
    Note(Vec<u8>),
    /// None in this time.
    Nothing,
    /// None, and none will come: the session is over.
    Over,
}

impl Notes {
    pub(crate) fn new(mailbox: Arc<Mailbox>) -> Self {
        Self {
            mailbox,
            inbox: Arc::default(),
        }
    }

    /// Sends one, of at most [`crate::wire::BODY_MAX`] bytes. Whether it arrives is not known.
    pub fn send(&self, note: &[u8]) {
        self.mailbox.send(&Message::with_body(Kind::Note, 0, note));
    }

    /// Waits for one.
    #[must_use]
    pub fn receive(&self, wait: Duration) -> Received {
        let until = Instant::now() + wait;
        let mut state = self.lock();
        loop {
            if let Some(note) = state.waiting.pop_front() {
                return Received::Note(note);
            }
            if state.over {
                return Received::Over;
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Received::Nothing;
            }
            let (next, _) = self
                .inbox
                .changed
                .wait_timeout(state, left)
                .unwrap_or_else(PoisonError::into_inner);
            state = next;
        }
    }

    /// One has come; `false` if there are too many.
    pub(crate) fn deliver(&self, note: Vec<u8>) -> bool {
        let mut state = self.lock();
        if state.waiting.len() == WAITING_MAX {
            return false;
        }
        state.waiting.push_back(note);
        self.inbox.changed.notify_all();
        true
    }

    pub(crate) fn end(&self) {
        self.lock().over = true;
        self.inbox.changed.notify_all();
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.inbox.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
