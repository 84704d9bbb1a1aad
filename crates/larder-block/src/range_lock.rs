//! Locks on ranges of a disk.
//!
//! A range is locked together with others (a change of whole blocks), or exclusively (a read, modify and write).
//! Requests are served in order of arrival, as far as they share a block, so none starves.
//!
//! Invariants: two granted entries that overlap are both shared; an entry waits only for earlier entries. The size is
//! bounded by the number of requests in flight.

use std::cell::RefCell;
use std::task::{Poll, Waker};

use crate::device::RequestWatch;
use crate::units::ByteRange;

/// The mode of a range lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeLockMode {
    /// Together with other shared locks.
    Shared,
    /// Exclusively.
    Exclusive,
}

/// The locked ranges, and the requests that wait for them.
#[derive(Default)]
pub struct RangeLocks {
    entries: RefCell<Entries>,
}

#[derive(Default)]
struct Entries {
    /// The entries by ticket; `None` is free.
    slots: Vec<Option<Entry>>,
    free: Vec<LockTicket>,
    next_arrival: u64,
    exclusive: usize,
    waiting: usize,
}

struct Entry {
    range: ByteRange,
    mode: RangeLockMode,
    /// The position in the order of arrival.
    arrival: u64,
    granted: bool,
    waker: Option<Waker>,
}

/// The number of an entry; reused once the entry is removed.
pub type LockTicket = u32;

impl RangeLocks {
    /// Locks `range` in shared mode; `None` if it must wait. The ticket is released through
    /// [`RequestWatch::request_ended`].
    pub fn try_lock_shared(&self, range: ByteRange) -> Option<LockTicket> {
        let mut entries = self.entries.borrow_mut();
        let arrival = entries.next_arrival;
        if entries.exclusive > 0 && entries.must_wait(range, RangeLockMode::Shared, arrival) {
            return None;
        }
        Some(entries.add(range, RangeLockMode::Shared, true))
    }

    /// Locks `range` once all earlier conflicting requests have released it.
    pub async fn lock(&self, range: ByteRange, mode: RangeLockMode) -> RangeLockGuard<'_> {
        let guard = {
            let mut entries = self.entries.borrow_mut();
            let arrival = entries.next_arrival;
            let granted = !entries.must_wait(range, mode, arrival);
            RangeLockGuard { ranges: self, ticket: entries.add(range, mode, granted) }
        };
        std::future::poll_fn(|context| {
            let mut entries = self.entries.borrow_mut();
            match &mut entries.slots[guard.ticket as usize] {
                Some(entry) if !entry.granted => {
                    entry.waker = Some(context.waker().clone());
                    Poll::Pending
                }
                _ => Poll::Ready(()),
            }
        })
        .await;
        guard
    }

    /// Returns true if a part of `range` is locked or waited for.
    pub fn overlaps(&self, range: ByteRange) -> bool {
        let entries = self.entries.borrow();
        entries.slots.iter().flatten().any(|entry| entry.range.overlaps(range))
    }

    fn unlock(&self, ticket: LockTicket) {
        let woken = self.entries.borrow_mut().remove(ticket);
        woken.into_iter().for_each(Waker::wake);
    }
}

impl RequestWatch for RangeLocks {
    fn request_ended(&self, ticket: u32) {
        self.unlock(ticket);
    }
}

/// A lock on a range, which is released when this value is dropped.
pub struct RangeLockGuard<'a> {
    ranges: &'a RangeLocks,
    ticket: LockTicket,
}

impl Drop for RangeLockGuard<'_> {
    fn drop(&mut self) {
        self.ranges.unlock(self.ticket);
    }
}

impl Entries {
    fn add(&mut self, range: ByteRange, mode: RangeLockMode, granted: bool) -> LockTicket {
        let entry = Entry { range, mode, arrival: self.next_arrival, granted, waker: None };
        self.next_arrival += 1;
        self.exclusive += usize::from(mode == RangeLockMode::Exclusive);
        self.waiting += usize::from(!granted);
        match self.free.pop() {
            Some(ticket) => {
                self.slots[ticket as usize] = Some(entry);
                ticket
            }
            None => {
                self.slots.push(Some(entry));
                (self.slots.len() - 1) as LockTicket
            }
        }
    }

    /// Removes an entry, and returns the wakers of the requests that it had blocked.
    fn remove(&mut self, ticket: LockTicket) -> Vec<Waker> {
        let Some(removed) = self.slots[ticket as usize].take() else {
            return Vec::new();
        };
        self.free.push(ticket);
        self.exclusive -= usize::from(removed.mode == RangeLockMode::Exclusive);
        self.waiting -= usize::from(!removed.granted);
        if self.waiting == 0 {
            return Vec::new();
        }
        self.grant(removed.range)
    }

    /// Grants the entries that overlap `range` and no longer have to wait. Returns their wakers.
    fn grant(&mut self, range: ByteRange) -> Vec<Waker> {
        let mut woken = Vec::new();
        for index in 0..self.slots.len() {
            let Some(entry) = &self.slots[index] else {
                continue;
            };
            let is_candidate = !entry.granted && entry.range.overlaps(range);
            if !is_candidate || self.must_wait(entry.range, entry.mode, entry.arrival) {
                continue;
            }
            self.waiting -= 1;
            if let Some(entry) = &mut self.slots[index] {
                entry.granted = true;
                woken.extend(entry.waker.take());
            }
        }
        woken
    }

    /// Returns true if an entry that arrived as `arrival` must wait for an earlier one.
    fn must_wait(&self, range: ByteRange, mode: RangeLockMode, arrival: u64) -> bool {
        self.slots.iter().flatten().any(|entry| {
            entry.arrival < arrival
                && entry.range.overlaps(range)
                && (mode == RangeLockMode::Exclusive || entry.mode == RangeLockMode::Exclusive)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::pin::pin;
    use std::task::Context;

    fn blocks(first: u64, count: u64) -> ByteRange {
        ByteRange::new(first * 4096, count * 4096)
    }

    #[test]
    fn shared_lock_waits_behind_exclusive() {
        let ranges = RangeLocks::default();
        let mut context = Context::from_waker(Waker::noop());
        let first = ranges.try_lock_shared(blocks(0, 4)).expect("no other lock");
        let second = ranges.try_lock_shared(blocks(2, 4)).expect("shared");
        let mut exclusive = pin!(ranges.lock(blocks(3, 1), RangeLockMode::Exclusive));
        assert!(exclusive.as_mut().poll(&mut context).is_pending());
        assert!(ranges.try_lock_shared(blocks(3, 1)).is_none());
        assert!(ranges.try_lock_shared(blocks(8, 1)).is_some());
        ranges.unlock(first);
        assert!(exclusive.as_mut().poll(&mut context).is_pending());
        ranges.unlock(second);
        let Poll::Ready(guard) = exclusive.as_mut().poll(&mut context) else {
            panic!("no conflicting lock is left");
        };
        drop(guard);
        assert!(ranges.try_lock_shared(blocks(3, 1)).is_some());
    }

    #[test]
    fn dropped_waiter_unblocks_the_next() {
        let ranges = RangeLocks::default();
        let mut context = Context::from_waker(Waker::noop());
        let share = ranges.try_lock_shared(blocks(0, 1)).expect("no other lock");
        let mut cancelled = Box::pin(ranges.lock(blocks(0, 1), RangeLockMode::Exclusive));
        assert!(cancelled.as_mut().poll(&mut context).is_pending());
        let mut next = pin!(ranges.lock(blocks(0, 1), RangeLockMode::Shared));
        assert!(next.as_mut().poll(&mut context).is_pending());
        drop(cancelled);
        assert!(next.as_mut().poll(&mut context).is_ready());
        ranges.unlock(share);
    }
}
