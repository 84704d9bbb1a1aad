//! Something that a disk's thread waits to be told by another one.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

/// A word that is said for good, on any thread.
#[derive(Clone, Debug)]
pub struct Latch<T>(Arc<Mutex<State<T>>>);

#[derive(Debug)]
struct State<T> {
    said: Option<T>,
    waiting: Vec<Waker>,
}

impl<T> Default for Latch<T> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(State {
            said: None,
            waiting: Vec::new(),
        })))
    }
}

impl<T: Copy> Latch<T> {
    /// Says it. The last word counts.
    pub fn set(&self, word: T) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.said = Some(word);
        state.waiting.drain(..).for_each(Waker::wake);
    }

    /// What has been said.
    pub fn get(&self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).said
    }

    /// Completes once something has been said.
    pub async fn is_set(&self) {
        poll_fn(|context| {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if state.said.is_some() {
                return Poll::Ready(());
            }
            if !state.waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                state.waiting.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }
}
