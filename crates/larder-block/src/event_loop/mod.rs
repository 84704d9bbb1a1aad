//! The single-threaded loop that runs a disk: tasks, timers, io_uring and adaptive polling.
//!
//! One loop is one thread. All parts of a disk - its queues, its layers, its backend - run on one loop and share
//! state without locks. One iteration of the loop is called a turn. A loop made by [`Loop::new`] does I/O through
//! io_uring and sleeps when there is nothing to do; one made by [`Loop::simulated`] has no kernel behind it and its
//! clock jumps to the next timer, so that a whole stack runs deterministically from a seed.
//!
//! Invariants:
//! - Tasks run one at a time, only inside [`Loop::block_on`], in the order in which they were woken.
//! - In the steady state nothing is allocated: tasks of a [`TaskPool`] and ring operations reuse their slots.
//! - The loop sleeps only after every [`Poller`] has been armed (asked to raise an event for new work) and then found
//!   without work, so no request is missed.
//! - A sleep that lasts longer than [`RECHECK_AFTER`] is interrupted once, in case an event was lost on either side:
//!   a guest whose memory barriers do nothing is slow at times, and does not hang.

mod pool;
mod ring;
mod slice;
mod socket;
mod spin;
mod timer;
mod waker;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::future::Future;
use std::io;
use std::pin::{Pin, pin};
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

pub use pool::TaskPool;
pub use ring::RingOp;
pub(crate) use ring::{Ring, RingTransfer, TransferBuffer, TransferOptions};
pub use slice::WorkSlice;
pub use socket::{Listener, Socket, SocketAddress};
pub use timer::Sleep;

use spin::{PreemptionDetector, SpinPredictor};
use timer::Timers;
use waker::RemoteWakes;

/// The default of the maximum time for which the loop spins for new work before it sleeps. A wake-up costs about 30
/// us on a virtualised host; spinning longer than that costs more than it can save.
pub const POLL_MAX_DEFAULT: Duration = Duration::from_micros(50);

/// The multiple of the spinning limit after which work no longer belongs to the same burst.
const LONG_IDLE_FACTOR: u32 = 8;

/// The sleeping time after which the loop rechecks memory, once. Events can be lost without a fault in this program:
/// QEMU before 8.1 omits the memory barriers of a guest that it emulates on a single processor (TCG without `-smp
/// 2`), which then goes to sleep between two accesses that pass each other. The time is long enough to cost a busy
/// guest nothing, and short enough to go unnoticed.
const RECHECK_AFTER: Duration = Duration::from_millis(2);

/// A source of work in memory, such as a virtqueue.
pub trait Poller {
    /// Processes new work, and returns true if there was some. Called in a tight loop.
    fn poll(&self) -> bool;

    /// Asks the producer of work to raise an event for new work from now on, which wakes a task of this loop. Returns
    /// true if there is work already; then the loop does not sleep.
    fn arm(&self) -> bool;

    /// Stops requesting events: the loop is awake and polls.
    fn disarm(&self);

    /// Repeats notifications that the producer may have missed, because nothing has happened for a while.
    /// [`Poller::poll`] is called next.
    fn recheck(&self);
}

/// A hook that runs once at the end of a turn of the loop, see [`Loop::call_at_turn_end`].
pub(crate) trait TurnEndHook {
    /// Runs after all tasks of the turn, before the loop submits and reaps again.
    fn on_turn_end(&self);
}

/// A handle to the loop of this thread. Cheap to clone.
#[derive(Clone)]
pub struct Loop(Rc<Core>);

/// A handle that does not keep the loop alive, for use inside the loop's own tasks.
#[derive(Clone)]
pub struct WeakLoop(Weak<Core>);

struct Core {
    id: waker::LoopId,
    tasks: RefCell<Vec<TaskSlot>>,
    free_tasks: RefCell<Vec<TaskIndex>>,
    ready: RefCell<VecDeque<TaskIndex>>,
    remote: RemoteWakes,
    timers: RefCell<Timers>,
    clock: Clock,
    /// The time of this turn, see [`Loop::turn_time`].
    turn_time: Cell<Option<LoopTime>>,
    ring: Option<Ring>,
    pollers: RefCell<Vec<Rc<dyn Poller>>>,
    turn_end_hooks: RefCell<Vec<Rc<dyn TurnEndHook>>>,
    poll_max: Cell<Duration>,
    counters: Counters,
}

/// Counters of the loop, for status output and tests.
#[derive(Default)]
struct Counters {
    sleeps: Cell<u64>,
    task_polls: Cell<u64>,
}

/// A snapshot of the loop's counters.
#[derive(Clone, Copy, Debug, Default)]
pub struct LoopStatistics {
    /// The number of times that the thread went to sleep in the kernel.
    pub sleeps: u64,
    /// The number of times that a task was polled.
    pub task_polls: u64,
}

enum Clock {
    Real(Instant),
    /// The nanoseconds since the start.
    Simulated(Cell<u64>),
}

/// A point in the loop's time, in nanoseconds since the loop began.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct LoopTime(u64);

impl LoopTime {
    /// Returns the nanoseconds since the loop began.
    pub fn as_nanos(self) -> u64 {
        self.0
    }

    /// Returns the time `delay` after this one.
    pub fn after(self, delay: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(delay.as_nanos()).unwrap_or(u64::MAX)))
    }

    /// Returns the time from `earlier` to this point; zero if `earlier` is not earlier.
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

type TaskIndex = u32;

/// A unit of execution of the loop. `poll` returns true if it has finished and its slot may be freed.
trait Task {
    fn poll(&self, context: &mut Context<'_>) -> bool;
}

struct TaskSlot {
    task: Option<Rc<dyn Task>>,
    queued: bool,
}

/// A spawned future with its concrete type.
struct Spawned<F>(RefCell<Option<Pin<Box<F>>>>);

impl<F: Future<Output = ()>> Task for Spawned<F> {
    fn poll(&self, context: &mut Context<'_>) -> bool {
        let Ok(mut slot) = self.0.try_borrow_mut() else {
            return false;
        };
        let Some(future) = slot.as_mut() else {
            return true;
        };
        let finished = future.as_mut().poll(context).is_ready();
        if finished {
            *slot = None;
        }
        finished
    }
}

/// Lets every other ready task run once first.
pub async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

impl Loop {
    /// Creates a loop over io_uring for this thread. It spins up to `poll_max` for new work before it sleeps.
    ///
    /// # Errors
    /// The kernel lacks io_uring, forbids it (`kernel.io_uring_disabled`), or the process is out of descriptors.
    pub fn new(poll_max: Duration) -> io::Result<Self> {
        let remote = RemoteWakes::new()?;
        let ring = Ring::new()?;
        Ok(Self::build(Clock::Real(Instant::now()), Some(ring), remote, poll_max))
    }

    /// Creates a loop without a kernel behind it. Its clock starts at zero and jumps to the next timer when nothing
    /// else can run.
    ///
    /// # Errors
    /// The process is out of descriptors.
    pub fn simulated() -> io::Result<Self> {
        let remote = RemoteWakes::new()?;
        Ok(Self::build(Clock::Simulated(Cell::new(0)), None, remote, Duration::ZERO))
    }

    fn build(clock: Clock, ring: Option<Ring>, remote: RemoteWakes, poll_max: Duration) -> Self {
        let id = waker::register(&remote);
        Self(Rc::new(Core {
            id,
            tasks: RefCell::default(),
            free_tasks: RefCell::default(),
            ready: RefCell::default(),
            remote,
            timers: RefCell::default(),
            clock,
            turn_time: Cell::new(None),
            ring,
            pollers: RefCell::default(),
            turn_end_hooks: RefCell::default(),
            poll_max: Cell::new(poll_max),
            counters: Counters::default(),
        }))
    }

    /// Returns a handle that does not keep the loop alive.
    pub fn downgrade(&self) -> WeakLoop {
        WeakLoop(Rc::downgrade(&self.0))
    }

    /// Returns true if the loop has no kernel behind it.
    pub fn is_simulated(&self) -> bool {
        matches!(self.0.clock, Clock::Simulated(_))
    }

    /// Returns the present in the loop's time.
    pub fn now(&self) -> LoopTime {
        self.0.now()
    }

    /// Returns the time of this turn of the loop, which is read once per turn: reading the clock costs more than some
    /// requests do.
    pub fn turn_time(&self) -> LoopTime {
        self.0.turn_time()
    }

    /// Returns a snapshot of the loop's counters.
    pub fn statistics(&self) -> LoopStatistics {
        LoopStatistics { sleeps: self.0.counters.sleeps.get(), task_polls: self.0.counters.task_polls.get() }
    }

    /// Runs `future` on this loop, concurrently with other tasks, until the future or the loop ends.
    pub fn spawn(&self, future: impl Future<Output = ()> + 'static) {
        let task = Rc::new(Spawned(RefCell::new(Some(Box::pin(future)))));
        let index = self.0.insert_task(task);
        self.0.enqueue(index);
    }

    /// Runs `future` as a task and passes its result to the handle.
    pub fn spawn_with_result<T: 'static>(&self, future: impl Future<Output = T> + 'static) -> JoinHandle<T> {
        let shared = Rc::new(JoinState { value: RefCell::new(None), waker: RefCell::new(None) });
        let state = Rc::clone(&shared);
        self.spawn(async move {
            let value = future.await;
            *state.value.borrow_mut() = Some(value);
            if let Some(waker) = state.waker.borrow_mut().take() {
                waker.wake();
            }
        });
        JoinHandle(shared)
    }

    /// Completes after `delay`.
    pub fn sleep(&self, delay: Duration) -> Sleep {
        Sleep::new(self, self.now().after(delay))
    }

    /// Completes at `deadline`, or at once if it has passed.
    pub fn sleep_until(&self, deadline: LoopTime) -> Sleep {
        Sleep::new(self, deadline)
    }

    /// Returns `future`'s result, or `None` if it takes longer than `limit`.
    pub async fn timeout<T>(&self, limit: Duration, future: impl Future<Output = T>) -> Option<T> {
        let mut future = pin!(future);
        let mut sleep = pin!(self.sleep(limit));
        std::future::poll_fn(|context| {
            if let Poll::Ready(value) = future.as_mut().poll(context) {
                return Poll::Ready(Some(value));
            }
            sleep.as_mut().poll(context).map(|()| None)
        })
        .await
    }

    /// Adds a source of work to the polling phase until the guard is dropped.
    pub fn add_poller(&self, poller: Rc<dyn Poller>) -> PollerGuard {
        self.0.pollers.borrow_mut().push(Rc::clone(&poller));
        PollerGuard { core: Rc::downgrade(&self.0), poller }
    }

    /// Calls `hook` once, at the end of this turn of the loop.
    pub(crate) fn call_at_turn_end(&self, hook: Rc<dyn TurnEndHook>) {
        self.0.turn_end_hooks.borrow_mut().push(hook);
    }

    /// Sets the maximum time for which the loop spins for new work before it sleeps.
    pub fn set_poll_max(&self, poll_max: Duration) {
        self.0.poll_max.set(poll_max);
    }

    /// Runs the loop until `future` ends, and returns its result. Other tasks are retained, and continue with the
    /// next call.
    ///
    /// # Panics
    /// In a simulated loop, if `future` can never end because no task is ready and no timer is set: a hang is
    /// detected.
    pub fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        let core = &*self.0;
        let _current = waker::enter(core);
        let mut future = pin!(future);
        let main = core.insert_task(Rc::new(MainTask));
        let waker = waker::task_waker(core.id, main);
        let mut context = Context::from_waker(&waker);
        core.enqueue(main);
        let mut idle = IdlePhase::new(core);
        loop {
            core.turn_time.set(None);
            let mut worked = false;
            let count = core.ready.borrow().len();
            for _ in 0..count {
                let Some(index) = core.ready.borrow_mut().pop_front() else {
                    break;
                };
                worked = true;
                if index == main {
                    core.tasks.borrow_mut()[main as usize].queued = false;
                    if let Poll::Ready(value) = future.as_mut().poll(&mut context) {
                        core.remove_task(main);
                        return value;
                    }
                } else {
                    core.run_task(index);
                }
            }
            core.end_turn();
            worked |= core.drain_remote_wakes();
            worked |= core.poll_sources();
            worked |= core.fire_timers();
            if worked || !core.ready.borrow().is_empty() {
                idle.end();
                continue;
            }
            idle.wait();
        }
    }
}

/// The task slot of `block_on`'s future, which lives on the stack; the slot only carries wake-ups.
struct MainTask;

impl Task for MainTask {
    fn poll(&self, _: &mut Context<'_>) -> bool {
        false
    }
}

/// The result of a spawned task, see [`Loop::spawn_with_result`].
pub struct JoinHandle<T>(Rc<JoinState<T>>);

struct JoinState<T> {
    value: RefCell<Option<T>>,
    waker: RefCell<Option<std::task::Waker>>,
}

impl<T> Future for JoinHandle<T> {
    type Output = T;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<T> {
        if let Some(value) = self.0.value.borrow_mut().take() {
            return Poll::Ready(value);
        }
        *self.0.waker.borrow_mut() = Some(context.waker().clone());
        Poll::Pending
    }
}

/// Keeps a [`Poller`] in its loop until it is dropped, see [`Loop::add_poller`].
pub struct PollerGuard {
    core: Weak<Core>,
    poller: Rc<dyn Poller>,
}

impl Drop for PollerGuard {
    fn drop(&mut self) {
        if let Some(core) = self.core.upgrade() {
            core.pollers.borrow_mut().retain(|poller| !Rc::ptr_eq(poller, &self.poller));
        }
    }
}

impl WeakLoop {
    /// Returns the loop, if it still exists.
    pub fn upgrade(&self) -> Option<Loop> {
        self.0.upgrade().map(Loop)
    }
}

impl Core {
    fn now(&self) -> LoopTime {
        match &self.clock {
            Clock::Real(start) => LoopTime(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)),
            Clock::Simulated(nanos) => LoopTime(nanos.get()),
        }
    }

    fn turn_time(&self) -> LoopTime {
        self.turn_time.get().unwrap_or_else(|| {
            let now = self.now();
            self.turn_time.set(Some(now));
            now
        })
    }

    fn insert_task(&self, task: Rc<dyn Task>) -> TaskIndex {
        let slot = TaskSlot { task: Some(task), queued: false };
        if let Some(index) = self.free_tasks.borrow_mut().pop() {
            self.tasks.borrow_mut()[index as usize] = slot;
            return index;
        }
        let mut tasks = self.tasks.borrow_mut();
        tasks.push(slot);
        TaskIndex::try_from(tasks.len() - 1).unwrap_or_else(|_| panic!("more than 2^32 tasks on one loop"))
    }

    fn remove_task(&self, index: TaskIndex) {
        let task = {
            let mut tasks = self.tasks.borrow_mut();
            let slot = &mut tasks[index as usize];
            // A wake-up that is still queued finds an empty slot, or wakes the slot's next task once too often.
            slot.task.take()
        };
        drop(task);
        self.free_tasks.borrow_mut().push(index);
    }

    /// Puts a task into the ready queue, once.
    fn enqueue(&self, index: TaskIndex) {
        if let Some(slot) = self.tasks.borrow_mut().get_mut(index as usize)
            && slot.task.is_some()
            && !slot.queued
        {
            slot.queued = true;
            self.ready.borrow_mut().push_back(index);
        }
    }

    fn run_task(&self, index: TaskIndex) {
        let task = {
            let mut tasks = self.tasks.borrow_mut();
            let slot = &mut tasks[index as usize];
            slot.queued = false;
            slot.task.clone()
        };
        let Some(task) = task else { return };
        self.counters.task_polls.set(self.counters.task_polls.get() + 1);
        let waker = waker::task_waker(self.id, index);
        if task.poll(&mut Context::from_waker(&waker)) {
            self.remove_task(index);
        }
    }

    #[inline]
    fn end_turn(&self) {
        if !self.turn_end_hooks.borrow().is_empty() {
            self.run_turn_end_hooks();
        }
    }

    #[inline(never)]
    fn run_turn_end_hooks(&self) {
        loop {
            // A hook may register itself again.
            let hook = self.turn_end_hooks.borrow_mut().pop();
            match hook {
                Some(hook) => hook.on_turn_end(),
                None => return,
            }
        }
    }

    fn drain_remote_wakes(&self) -> bool {
        if !self.remote.has_wakes() {
            return false;
        }
        let mut any = false;
        self.remote.drain(|index| {
            any = true;
            self.enqueue(index);
        });
        any
    }

    /// Reaps the ring's completions and polls the pollers. Returns true if there was work.
    fn poll_sources(&self) -> bool {
        let mut worked = match &self.ring {
            Some(ring) => ring.submit_and_reap(),
            None => false,
        };
        let count = self.pollers.borrow().len();
        for index in 0..count {
            let poller = self.pollers.borrow().get(index).map(Rc::clone);
            worked |= poller.is_some_and(|poller| poller.poll());
        }
        worked
    }

    fn fire_timers(&self) -> bool {
        if self.timers.borrow().is_empty() {
            return false;
        }
        let now = self.turn_time();
        let mut any = false;
        loop {
            let expired = self.timers.borrow_mut().pop_expired(now);
            match expired {
                Some(waker) => waker.wake(),
                None => return any,
            }
            any = true;
        }
    }

    /// Arms every poller. Returns true if one of them has work already.
    fn arm_pollers(&self) -> bool {
        let mut work = false;
        for poller in self.pollers.borrow().iter() {
            work |= poller.arm();
        }
        work
    }

    fn disarm_pollers(&self) {
        for poller in self.pollers.borrow().iter() {
            poller.disarm();
        }
    }

    fn has_pollers(&self) -> bool {
        !self.pollers.borrow().is_empty()
    }

    fn recheck_pollers(&self) {
        for poller in self.pollers.borrow().iter() {
            poller.recheck();
        }
    }
}

/// The idle phase of the loop: it spins for a while where that pays, then sleeps.
struct IdlePhase<'a> {
    core: &'a Core,
    /// One predictor for waiting for new requests alone, and one for waiting for in-flight transfers too. Between the
    /// requests of a fast guest over a slow disk, spinning pays; while the disk works, it does not.
    predictors: [SpinPredictor; 2],
    preemption: PreemptionDetector,
    period: Option<IdlePeriod>,
}

/// A period without work.
struct IdlePeriod {
    since: Instant,
    /// The index of the predictor in use.
    predictor_index: usize,
    /// The time for which the loop had spun when it went to sleep.
    spun: Option<Duration>,
    /// The pollers were asked to recheck.
    rechecked: bool,
}

impl<'a> IdlePhase<'a> {
    fn new(core: &'a Core) -> Self {
        Self { core, predictors: Default::default(), preemption: PreemptionDetector::new(), period: None }
    }

    /// Ends the period without work, and trains the predictor with its outcome.
    fn end(&mut self) {
        let Some(period) = self.period.take() else { return };
        let predictor = &mut self.predictors[period.predictor_index];
        let now = Instant::now();
        let waited = now - period.since;
        match period.spun {
            None if self.preemption.was_preempted(now) => predictor.record_preemption(),
            None => predictor.record_hit(waited),
            Some(spun) => predictor.record_sleep(spun, waited > self.core.poll_max.get() * LONG_IDLE_FACTOR),
        }
    }

    fn wait(&mut self) {
        let core = self.core;
        let Some(ring) = &core.ring else {
            return self.advance_clock();
        };
        let now = Instant::now();
        let period = self.period.get_or_insert_with(|| {
            self.preemption.start(now);
            IdlePeriod { since: now, predictor_index: usize::from(ring.has_transfers()), spun: None, rechecked: false }
        });
        if period.spun.is_none() {
            let predictor = &mut self.predictors[period.predictor_index];
            let spun = if predictor.should_spin() { now - period.since } else { Duration::ZERO };
            if predictor.should_spin() && self.preemption.was_preempted(now) {
                predictor.record_preemption();
            }
            if predictor.should_spin() && spun < core.poll_max.get() {
                // The caller's loop does the polling; here only the time is checked.
                std::hint::spin_loop();
                return;
            }
            period.spun = Some(spun);
        }
        if !core.arm_pollers() {
            core.remote.prepare_to_sleep(ring);
            if !core.remote.has_wakes() && core.ready.borrow().is_empty() {
                let timer = core.timers.borrow().next().map(|deadline| deadline.since(core.now()));
                let recheck = (!period.rechecked && core.has_pollers()).then_some(RECHECK_AFTER);
                core.counters.sleeps.set(core.counters.sleeps.get() + 1);
                ring.sleep(timer.into_iter().chain(recheck).min());
                if recheck.is_some() && period.since.elapsed() >= RECHECK_AFTER {
                    period.rechecked = true;
                    core.recheck_pollers();
                }
            }
            core.remote.end_sleep();
        }
        core.disarm_pollers();
    }

    /// Advances simulated time to the next timer.
    fn advance_clock(&self) {
        let Clock::Simulated(now) = &self.core.clock else {
            return;
        };
        match self.core.timers.borrow().next() {
            Some(deadline) => now.set(now.get().max(deadline.as_nanos())),
            None => {
                panic!("simulation: no task is ready and no timer is set, but the awaited future has not completed")
            }
        }
    }
}
