//! Wakers of a loop's tasks: a number, not an allocation, that may be used from any thread.
//!
//! A waker is the pair (loop, task). On the loop's own thread waking pushes the task onto the ready queue; from any
//! other thread it goes through the loop's [`RemoteWakes`] queue and an eventfd. Task numbers are reused, so a late
//! wake-up may reach a later task: spurious wake-ups are allowed by `Future`'s contract.

use std::cell::Cell;
use std::os::fd::{AsRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{RawWaker, RawWakerVTable, Waker};

use rustix::event::{EventfdFlags, eventfd};

use super::ring::{Ring, RingOp};
use super::{Core, TaskIndex};

pub(super) type LoopId = u32;

/// The queue of wake-ups for a loop from other threads.
pub(super) struct RemoteWakes {
    shared: Arc<Shared>,
    /// The ring's poll of the eventfd, while there is one.
    event_poll: Cell<Option<RingOp>>,
}

struct Shared {
    woken: Mutex<Vec<TaskIndex>>,
    /// Set while `woken` is not empty.
    has_woken: AtomicBool,
    /// Set while the loop sleeps or is about to, so that a wake-up must write the eventfd.
    asleep: AtomicBool,
    event: OwnedFd,
}

/// The existing loops, by number. Numbers are reused.
static LOOPS: Mutex<Vec<Option<Arc<Shared>>>> = Mutex::new(Vec::new());

thread_local! {
    static CURRENT: Cell<*const Core> = const { Cell::new(ptr::null()) };
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Assigns a loop the lowest free number.
pub(super) fn register(remote: &RemoteWakes) -> LoopId {
    let mut loops = lock(&LOOPS);
    let entry = Some(Arc::clone(&remote.shared));
    let index = match loops.iter().position(Option::is_none) {
        Some(free) => {
            loops[free] = entry;
            free
        }
        None => {
            loops.push(entry);
            loops.len() - 1
        }
    };
    LoopId::try_from(index).unwrap_or_else(|_| panic!("more than 2^32 loops"))
}

/// Makes `core` the loop of this thread until the guard is dropped.
pub(super) fn enter(core: &Core) -> impl Drop + use<> {
    struct Guard(*const Core);
    impl Drop for Guard {
        fn drop(&mut self) {
            CURRENT.set(self.0);
        }
    }
    Guard(CURRENT.replace(ptr::from_ref(core)))
}

const VTABLE: RawWakerVTable = RawWakerVTable::new(|data| RawWaker::new(data, &VTABLE), wake, wake, |_| {});

/// Returns a waker for task `index` of loop `id`.
pub(super) fn task_waker(id: LoopId, index: TaskIndex) -> Waker {
    let packed = (id as usize) << 32 | index as usize;
    // SAFETY: the data is a number; cloning and dropping do nothing, waking is safe from any thread (see `wake`).
    unsafe { Waker::new(ptr::without_provenance(packed), &VTABLE) }
}

fn wake(data: *const ()) {
    let packed = data.addr();
    let (id, index) = ((packed >> 32) as LoopId, packed as TaskIndex);
    let current = CURRENT.get();
    if !current.is_null() {
        // SAFETY: `enter` has set it to a loop that `block_on` of this very thread borrows until it is reset.
        let core = unsafe { &*current };
        if core.id == id {
            core.enqueue(index);
            return;
        }
    }
    let shared = lock(&LOOPS).get(id as usize).and_then(Option::clone);
    if let Some(shared) = shared {
        shared.push(index);
    }
}

impl Shared {
    fn push(&self, index: TaskIndex) {
        lock(&self.woken).push(index);
        self.has_woken.store(true, Ordering::SeqCst);
        if self.asleep.load(Ordering::SeqCst) {
            // The only possible error is a full counter, and then the event is raised already.
            let _ = rustix::io::write(&self.event, &1u64.to_ne_bytes());
        }
    }
}

impl RemoteWakes {
    pub(super) fn new() -> std::io::Result<Self> {
        Ok(Self {
            shared: Arc::new(Shared {
                woken: Mutex::default(),
                has_woken: AtomicBool::new(false),
                asleep: AtomicBool::new(false),
                event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            }),
            event_poll: Cell::new(None),
        })
    }

    pub(super) fn has_wakes(&self) -> bool {
        self.shared.has_woken.load(Ordering::SeqCst)
    }

    /// Passes the tasks that other threads have woken to `wake`.
    pub(super) fn drain(&self, mut wake: impl FnMut(TaskIndex)) {
        self.shared.has_woken.store(false, Ordering::SeqCst);
        let woken = std::mem::take(&mut *lock(&self.shared.woken));
        woken.into_iter().for_each(&mut wake);
    }

    /// Makes wake-ups write the eventfd from now on, and the ring watch it. The caller must check `has_wakes` once
    /// more before it sleeps.
    pub(super) fn prepare_to_sleep(&self, ring: &Ring) {
        let poll = self.event_poll.take().filter(|watch| !watch.is_done());
        let poll = poll.unwrap_or_else(|| {
            let mut counter = [0; 8];
            // Resets the counter, which is empty if the last wake-up came without a write.
            let _ = rustix::io::read(&self.shared.event, &mut counter);
            ring.poll_readable(self.shared.event.as_raw_fd())
        });
        self.event_poll.set(Some(poll));
        self.shared.asleep.store(true, Ordering::SeqCst);
    }

    pub(super) fn end_sleep(&self) {
        self.shared.asleep.store(false, Ordering::SeqCst);
    }
}

impl Drop for RemoteWakes {
    fn drop(&mut self) {
        for entry in lock(&LOOPS).iter_mut() {
            if entry.as_ref().is_some_and(|shared| Arc::ptr_eq(shared, &self.shared)) {
                *entry = None;
            }
        }
    }
}
