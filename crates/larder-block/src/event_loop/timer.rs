//! Timers of a loop: a heap of deadlines, each with the waker of its waiting task.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use super::{Loop, LoopTime, WeakLoop};

/// Deadlines in order. A cancelled timer leaves its heap entry behind, which is skipped when it expires. When such
/// entries outnumber the live ones the heap is rebuilt, so its size stays within twice the number of live timers.
#[derive(Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Reverse<(LoopTime, u64)>>,
    wakers: std::collections::HashMap<u64, Waker>,
    next_key: u64,
}

impl Timers {
    pub(super) fn is_empty(&self) -> bool {
        self.wakers.is_empty()
    }

    fn insert(&mut self, deadline: LoopTime, waker: Waker) -> u64 {
        let key = self.next_key;
        self.next_key += 1;
        self.heap.push(Reverse((deadline, key)));
        self.wakers.insert(key, waker);
        key
    }

    fn cancel(&mut self, key: u64) {
        self.wakers.remove(&key);
        if self.heap.len() > 64 && self.heap.len() > 2 * self.wakers.len() {
            let wakers = &self.wakers;
            self.heap.retain(|Reverse((_, key))| wakers.contains_key(key));
        }
    }

    /// Returns the next deadline. It may be that of a cancelled timer: waking too early is harmless.
    pub(super) fn next(&self) -> Option<LoopTime> {
        if self.wakers.is_empty() {
            return None;
        }
        self.heap.peek().map(|Reverse((deadline, _))| *deadline)
    }

    pub(super) fn pop_expired(&mut self, now: LoopTime) -> Option<Waker> {
        while let Some(Reverse((deadline, key))) = self.heap.peek().copied() {
            if deadline > now {
                return None;
            }
            self.heap.pop();
            if let Some(waker) = self.wakers.remove(&key) {
                return Some(waker);
            }
        }
        None
    }
}

/// A future that completes at its deadline, see [`Loop::sleep`].
pub struct Sleep {
    owner: WeakLoop,
    deadline: LoopTime,
    key: Option<u64>,
}

impl Sleep {
    pub(super) fn new(owner: &Loop, deadline: LoopTime) -> Self {
        Self { owner: owner.downgrade(), deadline, key: None }
    }
}

impl Future for Sleep {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let Some(owner) = self.owner.upgrade() else {
            return Poll::Pending;
        };
        if owner.now() >= self.deadline {
            return Poll::Ready(());
        }
        let mut timers = owner.0.timers.borrow_mut();
        match self.key {
            Some(key) if timers.wakers.contains_key(&key) => {
                timers.wakers.insert(key, context.waker().clone());
            }
            _ => self.key = Some(timers.insert(self.deadline, context.waker().clone())),
        }
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        if let (Some(key), Some(owner)) = (self.key, self.owner.upgrade()) {
            owner.0.timers.borrow_mut().cancel(key);
        }
    }
}
