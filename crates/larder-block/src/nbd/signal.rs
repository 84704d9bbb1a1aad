//! Waiting on one loop for something to change.

use std::cell::RefCell;
use std::future::Future;
use std::pin::pin;
use std::task::{Poll, Waker};

use smallvec::SmallVec;

/// Wakes everybody who waits for a condition over shared state, to look at it again.
#[derive(Default)]
pub struct Signal {
    waiting: RefCell<SmallVec<[Waker; 4]>>,
}

impl Signal {
    /// Tells that the state has changed.
    pub fn raise(&self) {
        for waker in self.waiting.take() {
            waker.wake();
        }
    }

    /// Completes with what `look` finds, as soon as it finds something; it looks at once and after every change.
    pub async fn until<T>(&self, mut look: impl FnMut() -> Option<T>) -> T {
        std::future::poll_fn(|context| match look() {
            Some(found) => Poll::Ready(found),
            None => {
                let mut waiting = self.waiting.borrow_mut();
                if !waiting.iter().any(|waker| waker.will_wake(context.waker())) {
                    waiting.push(context.waker().clone());
                }
                Poll::Pending
            }
        })
        .await
    }
}

/// The result of whichever ends first; the other one is dropped.
pub async fn first_of<T>(one: impl Future<Output = T>, other: impl Future<Output = T>) -> T {
    let (mut one, mut other) = (pin!(one), pin!(other));
    std::future::poll_fn(|context| match one.as_mut().poll(context) {
        Poll::Ready(value) => Poll::Ready(value),
        Poll::Pending => other.as_mut().poll(context),
    })
    .await
}
