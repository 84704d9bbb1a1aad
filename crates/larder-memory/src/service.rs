//! The pager on its loop: it is called when there is something to do, and sleeps else.

mod views;

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::future::poll_fn;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::PathBuf;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use larder_block::event_loop::{Loop, Poller, PollerGuard, yield_now};
use larder_block::signal::Signal;

use crate::attach::{AttachError, Attached, INJECT_LIMIT, RETRY_LIMIT};
use crate::inject::InjectError;
use crate::pager::{DiskStatus, Figures, StoredPages, Stuck};
use crate::pressure::Pressure;
use crate::room::{Room, Shortage};
use crate::target::{Options, Target};
use crate::units::PAGE_BYTES;
use crate::views::Looked;

/// How often it is looked whether memory was plugged in.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// How often it is called while pages are in quarantine, and else, though nothing happens.
const TICK_QUARANTINED: Duration = Duration::from_millis(20);
/// The same while pages wait for requests of disks to end.
const TICK_IO: Duration = Duration::from_millis(2);
const TICK: Duration = Duration::from_millis(500);

/// How many pages are brought back between two looks for faults, when all are to.
const BRING_PAGES: u32 = 128;

/// If the kernel has no memory for any of them for so long, though there should be some, a detach is stopped.
const NO_MEMORY_MAX: Duration = Duration::from_secs(5);

/// The longest pause between two tries to let go.
const LET_GO_AGAIN: Duration = Duration::from_millis(500);

/// After the process has ended, servers of its disks have so long to complete their requests.
const FINISH_MAX: Duration = Duration::from_secs(5);
/// The pause between two looks at their mappings.
const FINISH_EVERY: Duration = Duration::from_millis(10);

/// Why it is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The process has ended.
    ProcessEnded,
    /// It was detached from.
    Detached,
}

/// An error of a detach. The process remains managed then.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum DetachError {
    #[error("it is being detached from already")]
    UnderWay,
    #[error("it is over: the process has ended, or was detached from")]
    Over,
    #[error("nothing was changed: {0}")]
    NoRoom(Shortage),
    #[error("stopped, and its memory is kept within the budget again: {0}")]
    RanShort(Shortage),
    #[error(
        "stopped, and its memory is kept within the budget again: the kernel has had no memory for pages that were to come \
        back for {} s",
        NO_MEMORY_MAX.as_secs()
    )]
    NoMemory,
    #[error("cancelled: its memory is kept within the budget again")]
    Cancelled,
}

/// A detach that was begun, to be completed by [`Service::detach`].
#[must_use]
pub struct Detach(Room);

/// How the memory is now.
#[derive(Clone, Debug)]
pub struct Status {
    /// All of the memory that there is now, in bytes.
    pub bytes: u64,
    /// What of it is in memory, in bytes.
    pub present_bytes: u64,
    /// What counts against the limit, in bytes.
    pub used_bytes: u64,
    /// The limit, in bytes.
    pub limit_bytes: u64,
    /// What compressed pages take, in bytes.
    pub compressed_bytes: u64,
    /// What they may take, in bytes.
    pub compressed_limit_bytes: u64,
    /// What each tier on a disk holds, the fastest first.
    pub disks: Vec<DiskStatus>,
    /// What is stored where.
    pub stored: StoredPages,
    /// How many who wait for a page cannot be answered now.
    pub stalled: usize,
    /// Why the limit is not kept, if it is not.
    pub stuck: Option<Stuck>,
    /// It is being detached from.
    pub detaching: bool,
    /// The reason why a detach waits, or why the last one was stopped or cancelled.
    pub detach_problem: Option<String>,
    /// What was done so far.
    pub figures: Figures,
    /// How much of the time was lost by waiting.
    pub pressure: Pressure,
}

/// See the module's description.
pub struct Service {
    attached: RefCell<Option<Attached>>,
    /// Wakes the task that waits for the kernel to say something.
    watcher: RefCell<Option<Waker>>,
    /// It is to wait for that.
    is_watch_wanted: Cell<bool>,
    /// It does.
    is_watched: Cell<bool>,
    is_detaching: Cell<bool>,
    /// It has: nothing is left but to answer servers of its disks.
    has_process_ended: Cell<bool>,
    /// The detach that is under way is to be stopped.
    is_cancelled: Cell<bool>,
    detach_problem: RefCell<Option<String>>,
    /// The folder in which pagers that detach at once claim memory ([`crate::room`]).
    ledger: Option<PathBuf>,
    end: Cell<Option<End>>,
    changed: Signal,
    /// The views are to be looked at.
    views: views::Wish,
    guard: RefCell<Option<PollerGuard>>,
}

impl Service {
    /// Answers faults on this loop from now on. `ledger` is the folder of [`crate::room`], which exists; without one, other
    /// pagers that detach at the same time are not known.
    ///
    /// # Errors
    /// No descriptor can be made.
    pub fn start(on: &Loop, mut attached: Attached, options: Options, ledger: Option<PathBuf>) -> io::Result<Rc<Self>> {
        let events = attached.events().try_clone_to_owned()?;
        let pidfd = attached.pidfd()?;
        let target = attached.target.take();
        let misses_views = attached.pager.are_evictions_paused();
        let files = Arc::clone(&attached.files);
        let service = Rc::new(Self {
            attached: RefCell::new(Some(attached)),
            watcher: RefCell::new(None),
            is_watch_wanted: Cell::new(false),
            is_watched: Cell::new(false),
            is_detaching: Cell::new(false),
            has_process_ended: Cell::new(false),
            is_cancelled: Cell::new(false),
            detach_problem: RefCell::new(None),
            ledger,
            end: Cell::new(None),
            changed: Signal::default(),
            views: views::Wish::default(),
            guard: RefCell::new(None),
        });
        if misses_views {
            service.views.hunt();
        }
        let me = Rc::downgrade(&service);
        on.spawn(watch(on.clone(), events, me.clone()));
        on.spawn(watch_process(on.clone(), pidfd, me.clone()));
        on.spawn(tick(on.clone(), me.clone()));
        on.spawn(views::watch(on.clone(), views::Bell::new(&files), me.clone()));
        if let Some(target) = target {
            on.spawn(look(on.clone(), target, options, me));
        }
        *service.guard.borrow_mut() = Some(on.add_poller(Rc::clone(&service) as Rc<dyn Poller>));
        Ok(service)
    }

    /// Completes when it is over.
    pub async fn ended(&self) -> End {
        self.changed.until(|| self.end.get()).await
    }

    /// How the memory is now; none if it is over.
    pub fn status(&self) -> Option<Status> {
        let mut attached = self.attached.borrow_mut();
        let pager = &mut attached.as_mut()?.pager;
        let pressure = pager.pressure(Instant::now());
        Some(Status {
            bytes: {
                let regions = pager.regions().iter().filter(|region| !region.is_gone());
                regions.map(|region| region.bytes()).sum()
            },
            present_bytes: u64::from(pager.present_pages()) * PAGE_BYTES,
            used_bytes: pager.used_bytes(),
            limit_bytes: pager.limit_bytes(),
            compressed_bytes: pager.compressed_bytes(),
            compressed_limit_bytes: pager.compressed_limit_bytes(),
            disks: pager.disk_status(),
            stored: pager.stored_pages(),
            stalled: pager.stalled(),
            stuck: pager.stuck(),
            detaching: self.is_detaching.get(),
            detach_problem: self.detach_problem.borrow().clone(),
            figures: pager.figures().clone(),
            pressure,
        })
    }

    /// Sets the limit, and how much of it may be compressed pages, in bytes.
    pub fn set_limit(&self, limit_bytes: u64, compressed_bytes: u64) {
        if let Some(attached) = &mut *self.attached.borrow_mut() {
            attached.pager.set_limit(limit_bytes, compressed_bytes);
        }
        self.nudge();
    }

    /// Begins to detach: nothing is evicted any more. There is room for everything ([`crate::room`]).
    ///
    /// # Errors
    /// See [`DetachError`]: nothing has changed.
    pub fn begin_detach(&self) -> Result<Detach, DetachError> {
        if self.is_detaching.get() {
            return Err(DetachError::UnderWay);
        }
        if self.has_process_ended.get() {
            return Err(DetachError::Over);
        }
        let room = {
            let mut attached = self.attached.borrow_mut();
            let attached = attached.as_mut().ok_or(DetachError::Over)?;
            let mut room = Room::new(attached.pid(), Arc::clone(&attached.files), self.ledger.clone());
            let pager = &mut attached.pager;
            let checked = room.check(pager.stored_bytes(), pager.compressed_bytes());
            checked.map_err(|shortage| self.is_not_detached(DetachError::NoRoom(shortage)))?;
            pager.begin_detach();
            room
        };
        self.is_detaching.set(true);
        self.is_cancelled.set(false);
        self.detach_problem.replace(None);
        tracing::info!("detaching: everything is brought back");
        Ok(Detach(room))
    }

    /// Brings everything back, and leaves the process as it was: for how long a thread of it stood still at most; nothing
    /// if what it was given could not be closed in it, as the log says then. Room is checked again before each step.
    ///
    /// # Errors
    /// See [`DetachError`]: the memory is managed on then.
    pub async fn detach(&self, on: &Loop, Detach(room): Detach) -> Result<Option<Duration>, DetachError> {
        let let_go = self.bring_back(on, room).await;
        self.is_detaching.set(false);
        match let_go {
            Ok(stood_still) => {
                self.is_over(End::Detached);
                Ok(stood_still)
            }
            Err(error) => {
                if let Some(attached) = &mut *self.attached.borrow_mut()
                    && !self.has_process_ended.get()
                {
                    attached.pager.cancel_detach();
                    tracing::warn!("the detach has ended: {error}");
                }
                self.nudge();
                Err(self.is_not_detached(error))
            }
        }
    }

    fn is_not_detached(&self, error: DetachError) -> DetachError {
        self.detach_problem.replace(Some(error.to_string()));
        error
    }

    /// Stops a detach, at any time, and keeps the memory within its budget again. Returns whether one was under way.
    pub fn cancel_detach(&self) -> bool {
        let is_detaching = self.is_detaching.get();
        self.is_cancelled.set(is_detaching);
        self.nudge();
        is_detaching
    }

    /// Brings everything back, in steps, and lets go of the process. Faults are answered meanwhile.
    async fn bring_back(&self, on: &Loop, mut room: Room) -> Result<Option<Duration>, DetachError> {
        let mut no_memory: Option<(Instant, u64)> = None;
        let mut tries = 0_u32;
        loop {
            if self.is_cancelled.get() {
                return Err(DetachError::Cancelled);
            }
            if self.has_process_ended.get() {
                return Err(DetachError::Over);
            }
            let mut pause = None;
            {
                let mut attached_now = self.attached.borrow_mut();
                let attached = attached_now.as_mut().ok_or(DetachError::Over)?;
                let pager = &mut attached.pager;
                let needed_bytes = pager.stored_bytes();
                if room.is_due(needed_bytes) || pager.lacks_memory() {
                    let checked = room.check(needed_bytes, pager.compressed_bytes());
                    checked.map_err(DetachError::RanShort)?;
                }
                if pager.lacks_memory() {
                    // A limit that is not seen from here.
                    let (since, least) = no_memory.unwrap_or((Instant::now(), needed_bytes));
                    match needed_bytes < least {
                        true => no_memory = None,
                        false if since.elapsed() > NO_MEMORY_MAX => return Err(DetachError::NoMemory),
                        false => no_memory = Some((since, least)),
                    }
                    pause = Some(TICK_IO);
                }
                // From here on nobody else has a turn: nothing can be evicted, or stored, any more.
                if pager.bring_back(BRING_PAGES) {
                    let limit = if tries == 0 { INJECT_LIMIT } else { RETRY_LIMIT };
                    match attached.let_go(limit) {
                        Ok(stood_still) => {
                            attached_now.take();
                            return Ok(stood_still);
                        }
                        Err(error) => self.waits_to_let_go(&error),
                    }
                    pause = Some(LET_GO_AGAIN.min(TICK_IO * (1 << tries.min(10))));
                    tries += 1;
                }
            }
            match pause {
                Some(pause) => on.sleep(pause).await,
                None => yield_now().await,
            }
        }
    }

    /// The process has ended. Requests that servers of its disks have under way may still wait for its memory, and would
    /// keep those servers for good: faults are answered until no server has it mapped.
    async fn let_servers_finish(&self, on: &Loop) {
        let give_up = Instant::now() + FINISH_MAX;
        if let Some(attached) = &mut *self.attached.borrow_mut() {
            attached.pager.begin_detach();
        }
        loop {
            let to_look = {
                let attached = self.attached.borrow();
                let Some(attached) = &*attached else { return };
                let views = attached.pager.guest().views();
                views.leave_out_ended();
                (views.to_look(true), attached.pager.regions().to_vec())
            };
            let has_mapped = on.run_blocking(move || {
                let (all, regions) = to_look;
                let mut looked = all.into_iter().filter_map(|of| Looked::now(of, &regions).ok());
                looked.any(|looked| looked.has_mapped())
            });
            if !has_mapped.await.is_ok_and(|has_mapped| has_mapped) {
                return;
            }
            if Instant::now() > give_up {
                break;
            }
            on.sleep(FINISH_EVERY).await;
        }
        if let Some(attached) = &*self.attached.borrow() {
            tracing::warn!(
                "a server of the VM's disks still has the memory of the ended process mapped after {} s: its requests that \
                 wait for memory fail",
                FINISH_MAX.as_secs()
            );
            attached.pager.guest().views().give_up_waiting();
        }
    }

    /// Everything is in memory, and the process cannot be let go of: that is logged once for each reason.
    fn waits_to_let_go(&self, error: &InjectError) {
        let why = format!(
            "all of its memory is back, and it cannot be let go of yet: {error}; it is tried again until it can"
        );
        if self.detach_problem.borrow().as_ref() != Some(&why) {
            tracing::warn!("{why}");
            self.detach_problem.replace(Some(why));
        }
    }

    /// Nothing of the process is looked at any more.
    fn is_ending(&self) -> bool {
        self.has_process_ended.get() || self.end.get().is_some()
    }

    fn is_over(&self, end: End) {
        if self.end.get().is_none() {
            self.end.set(Some(end));
            self.changed.raise();
            self.guard.borrow_mut().take();
            self.nudge();
        }
    }

    /// Wakes the loop, which then has a turn.
    fn nudge(&self) {
        if let Some(waker) = self.watcher.borrow_mut().take() {
            waker.wake();
        }
    }
}

impl Poller for Service {
    fn poll(&self) -> bool {
        let Ok(mut attached) = self.attached.try_borrow_mut() else {
            return false;
        };
        let Some(Attached { pager, .. }) = &mut *attached else {
            return false;
        };
        match pager.turn(Instant::now()) {
            Ok(worked) => worked,
            Err(error) => {
                tracing::info!("the process has ended: {error}");
                attached.take();
                drop(attached);
                self.is_over(End::ProcessEnded);
                false
            }
        }
    }

    fn arm(&self) -> bool {
        if !self.is_watched.get() {
            self.is_watch_wanted.set(true);
            self.nudge();
            return true;
        }
        let Ok(mut attached) = self.attached.try_borrow_mut() else {
            return true;
        };
        match (&mut *attached, &*self.watcher.borrow()) {
            (Some(attached), Some(waker)) => attached.pager.wake_by(waker),
            _ => false,
        }
    }

    fn disarm(&self) {}

    fn recheck(&self) {}
}

/// Turns what the kernel says into turns of the loop: the poller reads it.
async fn watch(on: Loop, events: OwnedFd, service: Weak<Service>) {
    loop {
        let is_there = poll_fn(|context| {
            let Some(service) = service.upgrade().filter(|service| service.end.get().is_none()) else {
                return Poll::Ready(false);
            };
            if service.is_watch_wanted.take() {
                service.is_watched.set(true);
                return Poll::Ready(true);
            }
            *service.watcher.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        });
        if !is_there.await {
            return;
        }
        let mut readable = std::pin::pin!(on.readable(events.as_fd()));
        let is_readable = poll_fn(|context| {
            let Some(service) = service.upgrade().filter(|service| service.end.get().is_none()) else {
                return Poll::Ready(false);
            };
            if let Poll::Ready(done) = readable.as_mut().poll(context) {
                return Poll::Ready(done.is_ok());
            }
            *service.watcher.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        });
        if !is_readable.await {
            return;
        }
        if let Some(service) = service.upgrade() {
            service.is_watched.set(false);
        }
    }
}

async fn watch_process(on: Loop, pidfd: OwnedFd, service: Weak<Service>) {
    let ended = on.readable(pidfd.as_fd()).await;
    if let Err(error) = ended {
        tracing::warn!("cannot wait for the end of the process: {error}");
        return;
    }
    if let Some(service) = service.upgrade() {
        service.has_process_ended.set(true);
        service.let_servers_finish(&on).await;
        service.attached.borrow_mut().take();
        service.is_over(End::ProcessEnded);
    }
}

/// Gives it a turn now and then: time passes.
async fn tick(on: Loop, service: Weak<Service>) {
    loop {
        let Some(of) = service.upgrade().filter(|service| service.end.get().is_none()) else {
            return;
        };
        let pause = match &mut *of.attached.borrow_mut() {
            None => TICK,
            Some(Attached { pager, .. }) => {
                pager.pressure(Instant::now());
                let views = pager.guest().views();
                of.views.look_at(views);
                match (pager.next_turn(), views.is_empty()) {
                    (None, _) => TICK,
                    (Some(_), true) => TICK_QUARANTINED,
                    (Some(_), false) => TICK_IO,
                }
            }
        };
        drop(of);
        on.sleep(pause).await;
    }
}

/// Looks for memory that was plugged in.
async fn look(on: Loop, mut target: Target, options: Options, service: Weak<Service>) {
    let mut not_yet = HashSet::new();
    loop {
        on.sleep(LOOK_EVERY).await;
        let is_over = |service: &Rc<Service>| service.is_ending();
        if service.upgrade().is_none_or(|service| is_over(&service)) {
            return;
        }
        // Reading of mappings may wait for a thread that waits for us.
        let looked = on.run_blocking(move || {
            let changes = target.memories_now(&options);
            (target, changes)
        });
        let Ok((back, changes)) = looked.await else { return };
        target = back;
        let Some(service) = service.upgrade().filter(|service| !is_over(service)) else {
            return;
        };
        match changes {
            Ok(changes) => {
                for why in changes.refused {
                    tracing::warn!("memory that was plugged in is not managed: {why}");
                }
                for caution in changes.cautions {
                    tracing::warn!("{caution}");
                }
                let mut attached = service.attached.borrow_mut();
                if let Some(attached) = attached.as_ref().filter(|_| !changes.gone.is_empty()) {
                    tracing::info!(count = changes.gone.len(), "memory was unplugged");
                    attached.close_marks_of_gone();
                }
                for memory in changes.new {
                    let (name, place) = (memory.name.clone(), memory.place);
                    let limit = match not_yet.contains(&place) {
                        true => RETRY_LIMIT,
                        false => INJECT_LIMIT,
                    };
                    match attached.as_mut().map(|attached| attached.add(memory, limit)) {
                        Some(Ok(())) => tracing::info!(memory = name, mib = place.bytes >> 20, "memory was plugged in"),
                        // No thread could be stopped: it is frozen, say, or traced by another process.
                        Some(Err(AttachError::Inject(error))) => {
                            target.forget(place);
                            if not_yet.insert(place) {
                                tracing::warn!(
                                    "memory that was plugged in is not managed yet: {error}; it is tried again"
                                );
                            }
                        }
                        Some(Err(error)) => tracing::warn!("memory that was plugged in is not managed: {error}"),
                        None => return,
                    }
                }
            }
            Err(error) => tracing::debug!("cannot look for memory that was plugged in: {error}"),
        }
    }
}
