//! A value that another thread sets, and that a disk's thread can wait for.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

/// A value that can be set on any thread, and never becomes unset.
#[derive(Clone, Debug)]
pub struct Latch<T>(Arc<Mutex<LatchState<T>>>);

#[derive(Debug)]
struct LatchState<T> {
    value: Option<T>,
    wakers: Vec<Waker>,
}

impl<T> Default for Latch<T> {
    fn default() -> Self {
        Self(Arc::new(Mutex::new(LatchState { value: None, wakers: Vec::new() })))
    }
}

impl<T: Copy> Latch<T> {
    /// Sets the value, replacing an earlier one.
    pub fn set(&self, value: T) {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.value = Some(value);
        state.wakers.drain(..).for_each(Waker::wake);
    }

    /// Returns the value, if it is set.
    pub fn get(&self) -> Option<T> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).value
    }

    /// Completes once the value is set.
    pub async fn wait_until_set(&self) {
        poll_fn(|context| {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if state.value.is_some() {
                return Poll::Ready(());
            }
            if !state.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
                state.wakers.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }
}
