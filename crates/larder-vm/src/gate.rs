//! Holds up whoever wants to be served until the process is ready for them.

use std::future::poll_fn;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Poll, Waker};

/// A gate, which is opened once; open from the start unless it is made [closed](Gate::closed).
#[derive(Clone, Debug, Default)]
pub struct Gate(Option<Arc<Mutex<State>>>);

#[derive(Debug, Default)]
struct State {
    is_open: bool,
    waiting: Vec<Waker>,
}

impl Gate {
    /// One that is closed.
    pub fn closed() -> Self {
        Self(Some(Arc::default()))
    }

    /// Opens it, from any thread.
    pub fn open(&self) {
        let Some(state) = &self.0 else { return };
        let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
        state.is_open = true;
        state.waiting.drain(..).for_each(Waker::wake);
    }

    /// Completes once it is open.
    pub async fn opened(&self) {
        let Some(state) = &self.0 else { return };
        poll_fn(|context| {
            let mut state = state.lock().unwrap_or_else(PoisonError::into_inner);
            if state.is_open {
                return Poll::Ready(());
            }
            state.waiting.push(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}
