//! A bounded pool of buffers that direct I/O accepts.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::ops::{Deref, DerefMut};
use std::task::{Poll, Waker};

use crate::buffer::AlignedBuf;

/// Buffers of one size, allocated on first use and then retained. When all are in use, callers wait in order.
pub struct BufferPool {
    len: usize,
    state: RefCell<State>,
}

struct State {
    idle: Vec<AlignedBuf>,
    /// The number of buffers that may still be allocated.
    unmade: usize,
    /// Waiting callers, in order. A caller that was given a buffer and has not taken it yet is still listed.
    waiting: VecDeque<Waiter>,
    next_number: u64,
}

struct Waiter {
    number: u64,
    waker: Waker,
    handed: Option<AlignedBuf>,
}

impl BufferPool {
    /// Creates a pool of at most `count` buffers (at least one) of `len` bytes.
    pub fn new(count: usize, len: usize) -> Self {
        Self {
            len,
            state: RefCell::new(State {
                idle: Vec::new(),
                unmade: count.max(1),
                waiting: VecDeque::new(),
                next_number: 0,
            }),
        }
    }

    /// Returns the length of a buffer in bytes.
    pub fn buffer_len(&self) -> usize {
        self.len
    }

    /// Returns a buffer as soon as it is this caller's turn. The buffer has the content that its last user left.
    pub async fn take(&self) -> PooledBuf<'_> {
        let mut place = Place {
            pool: self,
            number: None,
        };
        let buffer = std::future::poll_fn(|context| place.poll(context.waker())).await;
        PooledBuf {
            pool: self,
            buffer: Some(buffer),
        }
    }

    fn give_back(&self, buffer: AlignedBuf) {
        let mut state = self.state.borrow_mut();
        match state.waiting.iter_mut().find(|waiter| waiter.handed.is_none()) {
            Some(waiter) => {
                waiter.handed = Some(buffer);
                waiter.waker.wake_by_ref();
            }
            None => state.idle.push(buffer),
        }
    }
}

/// A position in the queue, until a buffer is taken or this value is dropped.
struct Place<'a> {
    pool: &'a BufferPool,
    number: Option<u64>,
}

impl Place<'_> {
    fn poll(&mut self, waker: &Waker) -> Poll<AlignedBuf> {
        let state = &mut *self.pool.state.borrow_mut();
        let Some(number) = self.number else {
            if let Some(buffer) = state.idle.pop() {
                return Poll::Ready(buffer);
            }
            if state.unmade > 0 {
                state.unmade -= 1;
                return Poll::Ready(AlignedBuf::zeroed(self.pool.len));
            }
            self.number = Some(state.next_number);
            state.waiting.push_back(Waiter {
                number: state.next_number,
                waker: waker.clone(),
                handed: None,
            });
            state.next_number += 1;
            return Poll::Pending;
        };
        let Some(index) = state.waiting.iter().position(|waiter| waiter.number == number) else {
            return Poll::Pending;
        };
        let waiter = &mut state.waiting[index];
        let Some(buffer) = waiter.handed.take() else {
            waiter.waker = waker.clone();
            return Poll::Pending;
        };
        state.waiting.remove(index);
        self.number = None;
        Poll::Ready(buffer)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        let handed = {
            let mut state = self.pool.state.borrow_mut();
            let index = state.waiting.iter().position(|waiter| waiter.number == number);
            index
                .and_then(|index| state.waiting.remove(index))
                .and_then(|waiter| waiter.handed)
        };
        if let Some(buffer) = handed {
            self.pool.give_back(buffer);
        }
    }
}

/// A buffer of the pool, which is returned when this value is dropped.
pub struct PooledBuf<'a> {
    pool: &'a BufferPool,
    /// Always `Some` until the drop.
    buffer: Option<AlignedBuf>,
}

impl Deref for PooledBuf<'_> {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        self.buffer.as_deref().unwrap_or_default()
    }
}

impl DerefMut for PooledBuf<'_> {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buffer.as_deref_mut().unwrap_or_default()
    }
}

impl Drop for PooledBuf<'_> {
    fn drop(&mut self) {
        if let Some(buffer) = self.buffer.take() {
            self.pool.give_back(buffer);
        }
    }
}
