//! Who may work on which ranges of a disk at the same time.
//!
//! A range is taken together with others (a change of whole blocks), or alone (one that reads, modifies and writes). Requests for blocks are served in the order in which they came, as far as they share a block, so none
//! starves.
//!
//! Invariants: two granted entries that overlap are both shared; an entry waits only for entries that came before it.
//! Bounded by the requests that are under way.

use std::cell::RefCell;
use std::task::{Poll, Waker};

use crate::device::Watch;
use crate::units::ByteRange;

/// How a range is to be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    /// With others that share it.
    Shared,
    /// Alone.
    Exclusive,
}

/// Which ranges are taken, and who waits for them.
#[derive(Default)]
pub struct Ranges {
    entries: RefCell<Entries>,
}

#[derive(Default)]
struct Entries {
    /// By ticket; `None` is free.
    slots: Vec<Option<Entry>>,
    free: Vec<Ticket>,
    next_turn: u64,
    exclusive: usize,
    waiting: usize,
}

struct Entry {
    range: ByteRange,
    mode: Mode,
    /// Its place in the order of arrival.
    turn: u64,
    granted: bool,
    waker: Option<Waker>,
}

/// Which entry; handed out again once it is left.
pub type Ticket = u32;

impl Ranges {
    /// Takes `range` to be changed together with others of its kind; `None` if it must wait. The ticket
    /// is given back through [`Watch::ended`].
    pub fn try_share(&self, range: ByteRange) -> Option<Ticket> {
        let mut entries = self.entries.borrow_mut();
        let turn = entries.next_turn;
        if entries.exclusive > 0 && entries.must_wait(range, Mode::Shared, turn) {
            return None;
        }
        Some(entries.add(range, Mode::Shared, true))
    }

    /// Takes `range` once all who came before have left it.
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

    /// Whether somebody has a part of `range`, or waits for it.
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

/// A range that is taken until this is dropped.
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

    /// Removes an entry; who may go on because of it.
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

    /// Grants what no longer has to wait of the entries that overlap `range`.
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

    /// Whether one that came at `turn` must wait for one that came before.
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
    fn a_later_share_does_not_pass_one_who_waits_for_the_same_block() {
        let ranges = Ranges::default();
        let mut context = Context::from_waker(Waker::noop());
        let first = ranges.try_share(blocks(0, 4)).expect("nobody else");
        let second = ranges.try_share(blocks(2, 4)).expect("shared");
        let mut alone = pin!(ranges.enter(blocks(3, 1), Mode::Exclusive));
        assert!(alone.as_mut().poll(&mut context).is_pending());
        assert!(ranges.try_share(blocks(3, 1)).is_none());
        assert!(ranges.try_share(blocks(8, 1)).is_some());
        ranges.leave(first);
        assert!(alone.as_mut().poll(&mut context).is_pending());
        ranges.leave(second);
        let Poll::Ready(held) = alone.as_mut().poll(&mut context) else {
            panic!("nobody is in the way");
        };
        drop(held);
        assert!(ranges.try_share(blocks(3, 1)).is_some());
    }

    #[test]
    fn one_who_gives_up_waiting_lets_the_next_go() {
        let ranges = Ranges::default();
        let mut context = Context::from_waker(Waker::noop());
        let share = ranges.try_share(blocks(0, 1)).expect("nobody else");
        let mut gives_up = Box::pin(ranges.enter(blocks(0, 1), Mode::Exclusive));
        assert!(gives_up.as_mut().poll(&mut context).is_pending());
        let mut next = pin!(ranges.enter(blocks(0, 1), Mode::Shared));
        assert!(next.as_mut().poll(&mut context).is_pending());
        drop(gives_up);
        assert!(next.as_mut().poll(&mut context).is_ready());
        ranges.leave(share);
    }
}
