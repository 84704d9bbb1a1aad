//! A limited amount of something (bytes of memory, in-flight requests) that its users share. A user that finds too
//! little left waits. Waiting users are served in order of arrival.

use std::cell::Cell;
use std::rc::Rc;

use crate::range_lock::{RangeLockMode, RangeLocks};
use crate::signal::Signal;
use crate::units::ByteRange;

/// A limited number of units that users share.
pub struct Semaphore {
    total_units: usize,
    free_units: Cell<usize>,
    /// The queue of waiting users.
    queue: RangeLocks,
    waiter_count: Cell<usize>,
    changed: Signal,
}

/// A part of a budget, which is returned when this value is dropped.
pub struct SemaphorePermit {
    semaphore: Rc<Semaphore>,
    units: usize,
}

impl Drop for SemaphorePermit {
    fn drop(&mut self) {
        self.semaphore.free_units.set(self.semaphore.free_units.get() + self.units);
        self.semaphore.changed.raise();
    }
}

/// Counts one waiting user.
struct WaiterGuard<'a>(&'a Cell<usize>);

impl<'a> WaiterGuard<'a> {
    fn new(count: &'a Cell<usize>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for WaiterGuard<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Semaphore {
    /// Creates a budget of `units` units.
    #[must_use]
    pub fn new(units: usize) -> Rc<Self> {
        Rc::new(Self {
            total_units: units,
            free_units: Cell::new(units),
            queue: RangeLocks::default(),
            waiter_count: Cell::new(0),
            changed: Signal::default(),
        })
    }

    /// Returns the number of free units.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free_units.get()
    }

    /// Takes `units` units (all of them, if the budget is smaller), once it is this caller's turn. Returns `None` if
    /// `is_cancelled` becomes true meanwhile, which [`Semaphore::wake`] makes waiting users check.
    pub async fn acquire(self: &Rc<Self>, units: usize, is_cancelled: impl Fn() -> bool) -> Option<SemaphorePermit> {
        let units = units.min(self.total_units);
        if self.waiter_count.get() == 0
            && let Some(share) = self.try_acquire(units)
        {
            return Some(share);
        }
        let _waiter = WaiterGuard::new(&self.waiter_count);
        let _turn = self.queue.lock(ByteRange::new(0, 1), RangeLockMode::Exclusive).await;
        let attempt = || match is_cancelled() {
            true => Some(None),
            false => self.try_acquire(units).map(Some),
        };
        self.changed.until(attempt).await
    }

    fn try_acquire(self: &Rc<Self>, units: usize) -> Option<SemaphorePermit> {
        self.free_units.set(self.free_units.get().checked_sub(units)?);
        let semaphore = Rc::clone(self);
        Some(SemaphorePermit { semaphore, units })
    }

    /// Makes waiting users check whether they should stop waiting.
    pub fn wake(&self) {
        self.changed.raise();
    }
}

#[cfg(test)]
mod tests {
    use std::future::Future;
    use std::pin::{Pin, pin};
    use std::task::{Context, Poll, Waker};

    use super::*;

    fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
        future.poll(&mut Context::from_waker(Waker::noop()))
    }

    fn expect_ready(result: Poll<Option<SemaphorePermit>>) -> SemaphorePermit {
        match result {
            Poll::Ready(Some(share)) => share,
            _ => panic!("enough units are free"),
        }
    }

    #[test]
    fn budget_grants_shares_in_order() {
        let budget = Semaphore::new(10);
        let cancelled = Cell::new(false);
        let is_cancelled = || cancelled.get();
        let (first, other) = (
            expect_ready(poll(pin!(budget.acquire(5, is_cancelled)))),
            expect_ready(poll(pin!(budget.acquire(4, is_cancelled)))),
        );
        let mut large = pin!(budget.acquire(5, is_cancelled));
        assert!(poll(large.as_mut()).is_pending());
        let mut small = pin!(budget.acquire(1, is_cancelled));
        assert!(poll(small.as_mut()).is_pending(), "waiters are served in order of arrival");
        {
            let mut cancelled_waiter = Box::pin(budget.acquire(1, is_cancelled));
            assert!(poll(cancelled_waiter.as_mut()).is_pending());
        }
        drop(first);
        let (large, small) = (expect_ready(poll(large.as_mut())), expect_ready(poll(small.as_mut())));
        let mut none = pin!(budget.acquire(1, is_cancelled));
        assert!(poll(none.as_mut()).is_pending());
        cancelled.set(true);
        assert!(matches!(poll(none.as_mut()), Poll::Ready(None)));
        drop((large, small, other));
        assert_eq!(budget.free(), 10);
        let all = expect_ready(poll(pin!(budget.acquire(20, || false))));
        assert!(poll(pin!(budget.acquire(1, || false))).is_pending());
        drop(all);
        assert_eq!(budget.free(), 10);
    }
}
