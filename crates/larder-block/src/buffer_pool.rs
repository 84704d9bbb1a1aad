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
    unallocated: usize,
    /// Waiting callers, in order. A caller that was given a buffer and has not taken it yet is still listed.
    waiting: VecDeque<Waiter>,
    next_number: u64,
}

struct Waiter {
    number: u64,
    waker: Waker,
    assigned: Option<AlignedBuf>,
}

impl BufferPool {
    /// Creates a pool of at most `count` buffers (at least one) of `len` bytes.
    pub fn new(count: usize, len: usize) -> Self {
        Self {
            len,
            state: RefCell::new(State {
                idle: Vec::new(),
                unallocated: count.max(1),
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
    pub async fn acquire(&self) -> PooledBuf<'_> {
        let mut position = QueuePosition { pool: self, number: None };
        let buffer = std::future::poll_fn(|context| position.poll(context.waker())).await;
        PooledBuf { pool: self, buffer: Some(buffer) }
    }

    fn release(&self, buffer: AlignedBuf) {
        let mut state = self.state.borrow_mut();
        match state.waiting.iter_mut().find(|waiter| waiter.assigned.is_none()) {
            Some(waiter) => {
                waiter.assigned = Some(buffer);
                waiter.waker.wake_by_ref();
            }
            None => state.idle.push(buffer),
        }
    }
}

/// A position in the queue, until a buffer is taken or this value is dropped.
struct QueuePosition<'a> {
    pool: &'a BufferPool,
    number: Option<u64>,
}

impl QueuePosition<'_> {
    fn poll(&mut self, waker: &Waker) -> Poll<AlignedBuf> {
        let state = &mut *self.pool.state.borrow_mut();
        let Some(number) = self.number else {
            if let Some(buffer) = state.idle.pop() {
                return Poll::Ready(buffer);
            }
            if state.unallocated > 0 {
                state.unallocated -= 1;
                return Poll::Ready(AlignedBuf::zeroed(self.pool.len));
            }
            self.number = Some(state.next_number);
            state.waiting.push_back(Waiter { number: state.next_number, waker: waker.clone(), assigned: None });
            state.next_number += 1;
            return Poll::Pending;
        };
        let Some(index) = state.waiting.iter().position(|waiter| waiter.number == number) else {
            return Poll::Pending;
        };
        let waiter = &mut state.waiting[index];
        let Some(buffer) = waiter.assigned.take() else {
            waiter.waker = waker.clone();
            return Poll::Pending;
        };
        state.waiting.remove(index);
        self.number = None;
        Poll::Ready(buffer)
    }
}

impl Drop for QueuePosition<'_> {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        let assigned = {
            let mut state = self.pool.state.borrow_mut();
            let index = state.waiting.iter().position(|waiter| waiter.number == number);
            index.and_then(|index| state.waiting.remove(index)).and_then(|waiter| waiter.assigned)
        };
        if let Some(buffer) = assigned {
            self.pool.release(buffer);
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
            self.pool.release(buffer);
        }
    }
}
