//! Tasks whose memory is reused, for the one future per request that an export runs.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Context;

use super::{Loop, Task, TaskIndex, waker};

/// Tasks of one future type. Starting a task allocates nothing if the pool held that many tasks before; the caller
/// bounds their number.
pub struct TaskPool<F> {
    owner: Loop,
    idle: Rc<IdleSlots<F>>,
}

type IdleSlots<F> = RefCell<Vec<Rc<Slot<F>>>>;

struct Slot<F> {
    future: RefCell<Option<F>>,
    index: Cell<TaskIndex>,
    idle: std::rc::Weak<IdleSlots<F>>,
    self_ref: std::rc::Weak<Slot<F>>,
}

impl<F: Future<Output = ()> + 'static> Slot<F> {
    fn run(&self, context: &mut Context<'_>) {
        let Ok(mut slot) = self.future.try_borrow_mut() else {
            return;
        };
        let Some(future) = slot.as_mut() else { return };
        // SAFETY: the future lives in an `Rc` that never moves it, and is only removed by being dropped in place.
        let future = unsafe { Pin::new_unchecked(future) };
        if future.poll(context).is_ready() {
            *slot = None;
            drop(slot);
            if let (Some(idle), Some(idle_slot)) = (self.idle.upgrade(), self.self_ref.upgrade()) {
                idle.borrow_mut().push(idle_slot);
            }
        }
    }
}

impl<F: Future<Output = ()> + 'static> Task for Slot<F> {
    fn poll(&self, context: &mut Context<'_>) -> bool {
        self.run(context);
        // The slot stays registered in the loop for the next future, until the pool is dropped.
        self.idle.strong_count() == 0 && self.future.try_borrow().is_ok_and(|future| future.is_none())
    }
}

impl<F: Future<Output = ()> + 'static> TaskPool<F> {
    /// Creates a pool of tasks on the loop `owner`.
    pub fn new(owner: &Loop) -> Self {
        Self { owner: owner.clone(), idle: Rc::default() }
    }

    /// Starts the future that `make` returns, and polls it once before returning, so that work without waiting is done
    /// by then. The future is large, so it is made where it stays.
    pub fn start(&self, make: impl FnOnce() -> F) {
        let idle = self.idle.borrow_mut().pop();
        let slot = idle.unwrap_or_else(|| self.create_slot());
        *slot.future.borrow_mut() = Some(make());
        let waker = waker::task_waker(self.owner.0.id, slot.index.get());
        slot.run(&mut Context::from_waker(&waker));
    }

    #[cold]
    fn create_slot(&self) -> Rc<Slot<F>> {
        let slot = Rc::new_cyclic(|me| Slot {
            future: RefCell::new(None),
            index: Cell::new(0),
            idle: Rc::downgrade(&self.idle),
            self_ref: std::rc::Weak::clone(me),
        });
        let task: Rc<dyn Task> = Rc::clone(&slot) as Rc<dyn Task>;
        slot.index.set(self.owner.0.insert_task(task));
        slot
    }
}

impl<F> Drop for TaskPool<F> {
    fn drop(&mut self) {
        // Idle slots would otherwise stay registered. A busy slot is removed when its future ends.
        for slot in self.idle.take() {
            self.owner.0.remove_task(slot.index.get());
        }
    }
}
