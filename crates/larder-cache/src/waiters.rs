//! Tasks that wait for something to be so.

use std::cell::RefCell;
use std::task::{Poll, Waker};

/// Those who wait; all are woken whenever something has happened, and look for themselves.
#[derive(Default)]
pub(crate) struct Waiters(RefCell<Vec<Waker>>);

impl Waiters {
    /// Something has happened.
    pub(crate) fn wake(&self) {
        if !self.0.borrow().is_empty() {
            let waiting = std::mem::take(&mut *self.0.borrow_mut());
            waiting.into_iter().for_each(Waker::wake);
        }
    }

    /// Completes when `is_so`.
    pub(crate) async fn until(&self, is_so: impl Fn() -> bool) {
        std::future::poll_fn(|context| {
            if is_so() {
                return Poll::Ready(());
            }
            let mut waiting = self.0.borrow_mut();
            if !waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                waiting.push(context.waker().clone());
            }
            Poll::Pending
        })
        .await;
    }
}
