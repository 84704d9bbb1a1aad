//! Shared state of a simulated host: randomness, time, the moment at which the pager is killed, and the log.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::{Duration, Instant};

use larder_block::backend::simulated::SeededRng;
use larder_memory::pager::Pager;
use larder_memory::shared::SharedMemory;
use larder_memory::state::PagerState;
use larder_memory::worker::{Job, WorkerResult, WorkerState};
use std::sync::Arc;

use super::guest::{Guest, Helper};
use super::kernel::Kernel;
use super::process::Process;
use super::shape::Shape;

/// Panic payload that unwinds through a pager when it is killed.
pub(super) struct Killed;

/// Events right after which a kill of the pager is worthwhile, because it can lose what the pager has just learned or
/// done.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Moment {
    /// The pager has read that pages were discarded or unmapped, a notification that is not repeated.
    ToldOfRemoval,
    /// A missing page was installed.
    Filled,
    /// The pager has received a result of the worker.
    ToldOfWork,
    /// The pager has received a result of a disk.
    ToldOfDisk,
}

pub(super) const KILL_TRIGGERS: [Moment; 4] =
    [Moment::ToldOfRemoval, Moment::Filled, Moment::ToldOfWork, Moment::ToldOfDisk];

/// A kill that is due some steps after the `count`th event of a kind.
struct PlannedKill {
    moment: Moment,
    count: u64,
    steps: u64,
}

/// The simulated host.
pub(super) struct World {
    pub(super) shape: Shape,
    random: RefCell<SeededRng>,
    /// Start of virtual time. Only differences to it matter.
    base: Instant,
    now: Cell<Duration>,
    /// Number of calls of the pager and changes of its state until it is killed; 0: never.
    kill_in: Cell<u64>,
    kill_after: Cell<Option<PlannedKill>>,
    /// Calls of the pager in 1000 during which other actors run.
    meanwhile_per_mille: Cell<u32>,
    /// Nesting depth of calls.
    depth: Cell<u32>,
    pub(super) kernel: RefCell<Kernel>,
    pub(super) process: RefCell<Process>,
    pub(super) pager: RefCell<Option<Pager<Guest, Helper>>>,
    pub(super) memory: RefCell<Option<(Arc<PagerState>, Arc<SharedMemory>)>>,
    pub(super) hands: RefCell<Option<WorkerState>>,
    pub(super) jobs: RefCell<VecDeque<Job>>,
    pub(super) done: RefCell<VecDeque<WorkerResult>>,
    broken: RefCell<Option<String>>,
    is_logged: bool,
    log: RefCell<Vec<String>>,
}

thread_local! {
    /// The world of this thread, for code that cannot hold it.
    static CURRENT: RefCell<Option<Rc<World>>> = const { RefCell::new(None) };
    static START: Instant = Instant::now();
}

/// Calls `what` with this thread's world, if there is one.
pub(super) fn with_current<T>(what: impl FnOnce(&Rc<World>) -> T) -> Option<T> {
    let world = CURRENT.with_borrow(Clone::clone)?;
    Some(what(&world))
}

/// Sets this thread's world.
pub(super) fn set_current(world: Option<&Rc<World>>) {
    CURRENT.set(world.cloned());
}

/// Returns a constant time, for code that must not depend on the host's speed.
pub(super) fn frozen_clock() -> Instant {
    START.with(|start| *start)
}

impl World {
    pub(super) fn new(shape: Shape, random: SeededRng, is_logged: bool) -> Rc<Self> {
        Rc::new(Self {
            kernel: RefCell::new(Kernel::new()),
            process: RefCell::new(Process::new(&shape)),
            shape,
            random: RefCell::new(random),
            base: Instant::now(),
            now: Cell::new(Duration::from_secs(1)),
            kill_in: Cell::new(0),
            kill_after: Cell::new(None),
            meanwhile_per_mille: Cell::new(0),
            depth: Cell::new(0),
            pager: RefCell::new(None),
            memory: RefCell::new(None),
            hands: RefCell::new(None),
            jobs: RefCell::default(),
            done: RefCell::default(),
            broken: RefCell::new(None),
            is_logged,
            log: RefCell::default(),
        })
    }

    pub(super) fn below(&self, bound: u64) -> u64 {
        self.random.borrow_mut().below(bound)
    }

    pub(super) fn between(&self, least: u64, most: u64) -> u64 {
        self.random.borrow_mut().between(least, most)
    }

    pub(super) fn chance(&self, per_mille: u32) -> bool {
        self.random.borrow_mut().chance(per_mille)
    }

    pub(super) fn pick<T: Copy>(&self, choices: &[T]) -> T {
        self.random.borrow_mut().pick(choices)
    }

    pub(super) fn now(&self) -> Duration {
        self.now.get()
    }

    pub(super) fn instant(&self) -> Instant {
        self.base + self.now.get()
    }

    /// Lets time pass, and completes device I/O that ends by then.
    pub(super) fn pass(&self, time: Duration) {
        let until = self.now.get() + time;
        self.process.borrow_mut().complete_device_io(self, until);
        self.now.set(until);
    }

    pub(super) fn log(&self, what: impl FnOnce() -> String) {
        if self.is_logged {
            let line = format!("{:>9.3} ms  {}", self.now.get().as_secs_f64() * 1e3, what());
            self.log.borrow_mut().push(line);
        }
    }

    pub(super) fn logged(&self) -> String {
        self.log.borrow().join("\n")
    }

    /// Records a violated invariant.
    pub(super) fn fail(&self, reason: String) {
        self.log(|| format!("!!! {reason}"));
        self.broken.borrow_mut().get_or_insert(reason);
    }

    pub(super) fn broken(&self) -> Option<String> {
        self.broken.borrow().clone()
    }

    /// Plans to kill the pager after this number of steps; 0 cancels the plan.
    pub(super) fn kill_in(&self, steps: u64) {
        self.kill_in.set(steps);
        self.kill_after.set(None);
    }

    /// Plans to kill the pager `steps` steps after the `count`th event of this kind.
    pub(super) fn kill_after(&self, moment: Moment, count: u64, steps: u64) {
        self.kill_after.set(Some(PlannedKill { moment, count, steps }));
    }

    /// Records an event.
    pub(super) fn comes(&self, moment: Moment) {
        let Some(mut kill) = self.kill_after.take() else { return };
        if kill.moment == moment {
            kill.count -= 1;
            if kill.count == 0 {
                self.log(|| format!("--- to be killed {} steps after this: {moment:?}", kill.steps));
                self.kill_in.set(kill.steps);
                return;
            }
        }
        self.kill_after.set(Some(kill));
    }

    pub(super) fn set_interleave(&self, per_mille: u32) {
        self.meanwhile_per_mille.set(per_mille);
    }

    /// Marks a point of the pager's or the worker's code where the pager may be killed.
    pub(super) fn point(&self) {
        match self.kill_in.get() {
            0 => {}
            1 => {
                self.kill_in.set(0);
                self.log(|| "--- pager killed during a call".to_owned());
                std::panic::resume_unwind(Box::new(Killed));
            }
            left => self.kill_in.set(left - 1),
        }
    }

    /// Marks a call of the pager or its worker, where the pager may be killed and other actors may run.
    pub(super) fn call(self: &Rc<Self>) {
        self.point();
        if self.depth.get() < 2 && self.chance(self.meanwhile_per_mille.get()) {
            self.depth.set(self.depth.get() + 1);
            let _guard = Back(self);
            for _ in 0..self.between(1, 3) {
                match self.below(8) {
                    0 => self.work(),
                    1 => self.turn(),
                    _ => Process::step(self),
                }
            }
        }
    }

    /// Lets the worker do a job, if there is one and the worker is free.
    pub(super) fn work(self: &Rc<Self>) {
        let Ok(mut hands) = self.hands.try_borrow_mut() else {
            return;
        };
        let Some(hands) = &mut *hands else { return };
        let Some(job) = self.jobs.borrow_mut().pop_front() else {
            return;
        };
        self.point();
        let done = hands.run_job(job);
        self.point();
        self.done.borrow_mut().push_back(done);
    }

    /// Lets the pager run, unless it is running.
    pub(super) fn turn(self: &Rc<Self>) {
        self.run_pager_once();
    }

    pub(super) fn run_pager_once(self: &Rc<Self>) -> bool {
        let Ok(mut pager) = self.pager.try_borrow_mut() else {
            return false;
        };
        let Some(pager) = &mut *pager else { return false };
        match pager.turn(self.instant()) {
            Ok(worked) => worked,
            Err(error) => {
                self.fail(format!("the pager failed: {error}"));
                false
            }
        }
    }

    /// Returns whether the worker has a job, or a result that the pager has not received.
    pub(super) fn is_worker_busy(&self) -> bool {
        !self.jobs.borrow().is_empty() || !self.done.borrow().is_empty()
    }
}

/// Decrements the depth on drop, also when a kill unwinds.
struct Back<'a>(&'a World);

impl Drop for Back<'_> {
    fn drop(&mut self) {
        self.0.depth.set(self.0.depth.get() - 1);
    }
}
