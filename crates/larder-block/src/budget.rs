//! A limited amount of something (bytes of memory, in-flight requests) that its users share. A user that finds too
//! little left waits. Waiting users are served in order of arrival.

use std::cell::Cell;
use std::rc::Rc;

use crate::range_lock::{Mode, Ranges};
use crate::signal::Signal;
use crate::units::ByteRange;

/// A limited number of units that users share.
pub struct Budget {
    all: usize,
    free: Cell<usize>,
    /// The queue of waiting users.
    turns: Ranges,
    waiting: Cell<usize>,
    changed: Signal,
}

/// A part of a budget, which is returned when this value is dropped.
pub struct Share {
    of: Rc<Budget>,
    units: usize,
}

impl Drop for Share {
    fn drop(&mut self) {
        self.of.free.set(self.of.free.get() + self.units);
        self.of.changed.raise();
    }
}

/// Counts one waiting user.
struct Waits<'a>(&'a Cell<usize>);

impl<'a> Waits<'a> {
    fn new(count: &'a Cell<usize>) -> Self {
        count.set(count.get() + 1);
        Self(count)
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

impl Budget {
    /// Creates a budget of `units` units.
    #[must_use]
    pub fn new(units: usize) -> Rc<Self> {
        Rc::new(Self {
            all: units,
            free: Cell::new(units),
            turns: Ranges::default(),
            waiting: Cell::new(0),
            changed: Signal::default(),
        })
    }

    /// Returns the number of free units.
    #[must_use]
    pub fn free(&self) -> usize {
        self.free.get()
    }

    /// Takes `units` units (all of them, if the budget is smaller), once it is this caller's turn. Returns `None` if
    /// `is_over` becomes true meanwhile, which [`Budget::wake`] makes waiting users check.
    pub async fn take(self: &Rc<Self>, units: usize, is_over: impl Fn() -> bool) -> Option<Share> {
        let units = units.min(self.all);
        if self.waiting.get() == 0
            && let Some(share) = self.try_take(units)
        {
            return Some(share);
        }
        let _waits = Waits::new(&self.waiting);
        let _turn = self.turns.enter(ByteRange::new(0, 1), Mode::Exclusive).await;
        let found = || match is_over() {
            true => Some(None),
            false => self.try_take(units).map(Some),
        };
        self.changed.until(found).await
    }

    fn try_take(self: &Rc<Self>, units: usize) -> Option<Share> {
        self.free.set(self.free.get().checked_sub(units)?);
        let of = Rc::clone(self);
        Some(Share { of, units })
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

    fn now(result: Poll<Option<Share>>) -> Share {
        match result {
            Poll::Ready(Some(share)) => share,
            _ => panic!("enough units are free"),
        }
    }

    #[test]
    fn budget_grants_shares_in_order() {
        let budget = Budget::new(10);
        let over = Cell::new(false);
        let is_over = || over.get();
        let (first, other) = (
            now(poll(pin!(budget.take(5, is_over)))),
            now(poll(pin!(budget.take(4, is_over)))),
        );
        let mut large = pin!(budget.take(5, is_over));
        assert!(poll(large.as_mut()).is_pending());
        let mut small = pin!(budget.take(1, is_over));
        assert!(
            poll(small.as_mut()).is_pending(),
            "waiters are served in order of arrival"
        );
        {
            let mut leaves = Box::pin(budget.take(1, is_over));
            assert!(poll(leaves.as_mut()).is_pending());
        }
        drop(first);
        let (large, small) = (now(poll(large.as_mut())), now(poll(small.as_mut())));
        let mut none = pin!(budget.take(1, is_over));
        assert!(poll(none.as_mut()).is_pending());
        over.set(true);
        assert!(matches!(poll(none.as_mut()), Poll::Ready(None)));
        drop((large, small, other));
        assert_eq!(budget.free(), 10);
        let all = now(poll(pin!(budget.take(20, || false))));
        assert!(poll(pin!(budget.take(1, || false))).is_pending());
        drop(all);
        assert_eq!(budget.free(), 10);
    }
}
