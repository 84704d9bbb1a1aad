//! Waiting on one loop for a change of state, or for the first of two futures.

use std::cell::RefCell;
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::task::{Poll, Waker};

use smallvec::SmallVec;

/// A condition variable for tasks of one loop: it wakes all waiting tasks to check shared state again.
#[derive(Default)]
pub struct Signal {
    waiting: RefCell<SmallVec<[Waker; 4]>>,
}

impl Signal {
    /// Announces that the state has changed.
    #[inline]
    pub fn raise(&self) {
        if !self.waiting.borrow().is_empty() {
            self.waiting.take().into_iter().for_each(Waker::wake);
        }
    }

    /// Completes with the result of `check`, as soon as there is one. `check` is called at once and after every change.
    pub async fn until<T>(&self, mut check: impl FnMut() -> Option<T>) -> T {
        poll_fn(|context| match check() {
            Some(value) => Poll::Ready(value),
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

    /// Completes once `condition` returns true. It is called at once and after every change.
    pub async fn when(&self, mut condition: impl FnMut() -> bool) {
        self.until(|| condition().then_some(())).await;
    }
}

/// Returns the result of the future that completes first, of `one` if both do; the other one is dropped.
pub async fn first_of<T>(one: impl Future<Output = T>, other: impl Future<Output = T>) -> T {
    let (mut one, mut other) = (pin!(one), pin!(other));
    poll_fn(|context| match one.as_mut().poll(context) {
        Poll::Ready(value) => Poll::Ready(value),
        Poll::Pending => other.as_mut().poll(context),
    })
    .await
}
