//! Locks on ranges of a disk.
//!
//! A range is locked together with others (a change of whole blocks), or exclusively (a read, modify and write).
//! Requests are served in order of arrival, as far as they share a block, so none starves.
//!
//! Invariants: two granted entries that overlap are both shared; an entry waits only for earlier entries. The size is
//! bounded by the number of requests in flight.

use std::cell::RefCell;
use std::task::{Poll, Waker};

use crate::device::Watch;
use crate::units::ByteRange;

/// The mode of a range lock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// Together with other shared locks.
    Shared,
    /// Exclusively.
    Exclusive,
}

/// The locked ranges, and the requests that wait for them.
#[derive(Default)]
pub struct Ranges {
    entries: RefCell<Entries>,
}

#[derive(Default)]
struct Entries {
    /// The entries by ticket; `None` is free.
    slots: Vec<Option<Entry>>,
    free: Vec<Ticket>,
    next_turn: u64,
    exclusive: usize,
    waiting: usize,
}

struct Entry {
    range: ByteRange,
    mode: Mode,
    /// The position in the order of arrival.
    turn: u64,
    granted: bool,
    waker: Option<Waker>,
}

/// The number of an entry; reused once the entry is removed.
pub type Ticket = u32;

impl Ranges {
    /// Locks `range` in shared mode; `None` if it must wait. The ticket is released through [`Watch::ended`].
    pub fn try_share(&self, range: ByteRange) -> Option<Ticket> {
        let mut entries = self.entries.borrow_mut();
        let turn = entries.next_turn;
        if entries.exclusive > 0 && entries.must_wait(range, Mode::Shared, turn) {
            return None;
        }
        Some(entries.add(range, Mode::Shared, true))
    }

    /// Locks `range` once all earlier conflicting requests have released it.
    pub async fn enter(&self, range: ByteRange, mode: Mode) -> Held<'_> {
        let held = {
            let mut entries = self.entries.borrow_mut();
            let turn = entries.next_turn;
            let granted = !entries.must_wait(range, mode, turn);
            Held {
                ranges: self,
                ticket: entries.add(range, mode, granted),
            }
        };
        std::future::poll_fn(|context| {
            let mut entries = self.entries.borrow_mut();
            match &mut entries.slots[held.ticket as usize] {
                Some(entry) if !entry.granted => {
                    entry.waker = Some(context.waker().clone());
                    Poll::Pending
                }
                _ => Poll::Ready(()),
            }
        })
        .await;
        held
    }

    /// Returns true if a part of `range` is locked or waited for.
    pub fn touch(&self, range: ByteRange) -> bool {
        let entries = self.entries.borrow();
        entries.slots.iter().flatten().any(|entry| entry.range.overlaps(range))
    }

    fn leave(&self, ticket: Ticket) {
        let woken = self.entries.borrow_mut().remove(ticket);
        woken.into_iter().for_each(Waker::wake);
    }
}

impl Watch for Ranges {
    fn ended(&self, ticket: u32) {
        self.leave(ticket);
    }
}

/// A lock on a range, which is released when this value is dropped.
pub struct Held<'a> {
    ranges: &'a Ranges,
    ticket: Ticket,
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.ranges.leave(self.ticket);
    }
}

impl Entries {
    fn add(&mut self, range: ByteRange, mode: Mode, granted: bool) -> Ticket {
        let entry = Entry {
            range,
            mode,
            turn: self.next_turn,
            granted,
            waker: None,
        };
        self.next_turn += 1;
        self.exclusive += usize::from(mode == Mode::Exclusive);
        self.waiting += usize::from(!granted);
        match self.free.pop() {
            Some(ticket) => {
                self.slots[ticket as usize] = Some(entry);
                ticket
            }
            None => {
                self.slots.push(Some(entry));
                (self.slots.len() - 1) as Ticket
            }
        }
    }

    /// Removes an entry, and returns the wakers of the requests that it had blocked.
    fn remove(&mut self, ticket: Ticket) -> Vec<Waker> {
        let Some(left) = self.slots[ticket as usize].take() else {
            return Vec::new();
        };
        self.free.push(ticket);
        self.exclusive -= usize::from(left.mode == Mode::Exclusive);
        self.waiting -= usize::from(!left.granted);
        if self.waiting == 0 {
            return Vec::new();
        }
        self.grant(left.range)
    }

    /// Grants the entries that overlap `range` and no longer have to wait. Returns their wakers.
    fn grant(&mut self, range: ByteRange) -> Vec<Waker> {
        let mut woken = Vec::new();
        for index in 0..self.slots.len() {
            let Some(entry) = &self.slots[index] else {
                continue;
            };
            let concerned = !entry.granted && entry.range.overlaps(range);
            if !concerned || self.must_wait(entry.range, entry.mode, entry.turn) {
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

    /// Returns true if an entry of turn `turn` must wait for an earlier one.
    fn must_wait(&self, range: ByteRange, mode: Mode, turn: u64) -> bool {
        self.slots.iter().flatten().any(|entry| {
            entry.turn < turn
                && entry.range.overlaps(range)
                && (mode == Mode::Exclusive || entry.mode == Mode::Exclusive)
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
        let ranges = Ranges::default();
        let mut context = Context::from_waker(Waker::noop());
        let first = ranges.try_share(blocks(0, 4)).expect("no other lock");
        let second = ranges.try_share(blocks(2, 4)).expect("shared");
        let mut alone = pin!(ranges.enter(blocks(3, 1), Mode::Exclusive));
        assert!(alone.as_mut().poll(&mut context).is_pending());
        assert!(ranges.try_share(blocks(3, 1)).is_none());
        assert!(ranges.try_share(blocks(8, 1)).is_some());
        ranges.leave(first);
        assert!(alone.as_mut().poll(&mut context).is_pending());
        ranges.leave(second);
        let Poll::Ready(held) = alone.as_mut().poll(&mut context) else {
            panic!("no conflicting lock is left");
        };
        drop(held);
        assert!(ranges.try_share(blocks(3, 1)).is_some());
    }

    #[test]
    fn dropped_waiter_unblocks_the_next() {
        let ranges = Ranges::default();
        let mut context = Context::from_waker(Waker::noop());
        let share = ranges.try_share(blocks(0, 1)).expect("no other lock");
        let mut gives_up = Box::pin(ranges.enter(blocks(0, 1), Mode::Exclusive));
        assert!(gives_up.as_mut().poll(&mut context).is_pending());
        let mut next = pin!(ranges.enter(blocks(0, 1), Mode::Shared));
        assert!(next.as_mut().poll(&mut context).is_pending());
        drop(gives_up);
        assert!(next.as_mut().poll(&mut context).is_ready());
        ranges.leave(share);
    }
}
