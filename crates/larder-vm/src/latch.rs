//! A value that another thread sets, and that a disk's thread can wait for.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

/// A value that can be set on any thread, and never becomes unset.
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
    /// Sets the value, replacing an earlier one.
    pub fn set(&self, word: T) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.said = Some(word);
        state.waiting.drain(..).for_each(Waker::wake);
    }

    /// Returns the value, if it is set.
    pub fn get(&self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).said
    }

    /// Completes once the value is set.
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
