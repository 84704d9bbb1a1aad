//! Runs the pager on an event loop: it has a turn when there is work, and sleeps otherwise.

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

/// Interval of the search for hotplugged memory.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// Interval of turns without events while pages are in quarantine.
const TICK_QUARANTINED: Duration = Duration::from_millis(20);
/// Interval of turns while pages wait for disk requests to end.
const TICK_IO: Duration = Duration::from_millis(2);
/// Interval of turns at all other times.
const TICK: Duration = Duration::from_millis(500);

/// Number of pages that a detach pages in between two checks for faults.
const BRING_PAGES: u32 = 128;

/// Time after which a detach is stopped if the kernel has no memory for any page, although a check found enough.
const NO_MEMORY_MAX: Duration = Duration::from_secs(5);

/// Maximum pause between two attempts to stop a thread for detaching.
const LET_GO_AGAIN: Duration = Duration::from_millis(500);

/// Maximum time that disk servers get to complete their requests after the process has ended.
const FINISH_MAX: Duration = Duration::from_secs(5);
/// Interval of the inspection of their mappings.
const FINISH_EVERY: Duration = Duration::from_millis(10);

/// Reason why the service has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The process has ended.
    ProcessEnded,
    /// The process was detached from.
    Detached,
}

/// Error of a detach. The process remains managed.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum DetachError {
    #[error("a detach is already in progress")]
    UnderWay,
    #[error("the process has ended, or was already detached from")]
    Over,
    #[error("nothing was changed: {0}")]
    NoRoom(Shortage),
    #[error("stopped, and its memory is limited to the budget again: {0}")]
    RanShort(Shortage),
    #[error(
        "stopped, and its memory is limited to the budget again: the kernel had no free memory to page in any \
        page for {} s",
        NO_MEMORY_MAX.as_secs()
    )]
    NoMemory,
    #[error("cancelled: its memory is limited to the budget again")]
    Cancelled,
}

/// A detach that was started, to be completed by [`Service::detach`].
#[must_use]
pub struct Detach(Room);

/// Status of the managed memory.
#[derive(Clone, Debug)]
pub struct Status {
    /// Size of all memory that is mapped now, in bytes.
    pub bytes: u64,
    /// Memory that is resident, in bytes.
    pub present_bytes: u64,
    /// Memory that counts against the limit, in bytes.
    pub used_bytes: u64,
    /// The limit, in bytes.
    pub limit_bytes: u64,
    /// Memory that compressed pages use, in bytes.
    pub compressed_bytes: u64,
    /// Limit of the memory for compressed pages, in bytes.
    pub compressed_limit_bytes: u64,
    /// Status of each tier on a disk, the fastest first.
    pub disks: Vec<DiskStatus>,
    /// Numbers of stored pages, by location.
    pub stored: StoredPages,
    /// Number of waiters for a page that cannot be served now.
    pub stalled: usize,
    /// Reason why the limit is exceeded, if it is.
    pub stuck: Option<Stuck>,
    /// A detach is in progress.
    pub detaching: bool,
    /// Reason why a detach waits, or why the last one was stopped or cancelled.
    pub detach_problem: Option<String>,
    /// Statistics of the pager.
    pub figures: Figures,
    /// Share of time lost by waiting for pages.
    pub pressure: Pressure,
}

/// Service that runs one pager on an event loop.
pub struct Service {
    attached: RefCell<Option<Attached>>,
    /// Wakes the task that waits for kernel messages.
    watcher: RefCell<Option<Waker>>,
    /// The task is to wait for the descriptor to become readable.
    is_watch_wanted: Cell<bool>,
    /// The task waits for the descriptor to become readable.
    is_watched: Cell<bool>,
    is_detaching: Cell<bool>,
    /// The process has ended, and only its disk servers are still served.
    has_process_ended: Cell<bool>,
    /// The detach in progress is to be stopped.
    is_cancelled: Cell<bool>,
    detach_problem: RefCell<Option<String>>,
    /// Directory in which pagers that detach at the same time claim memory ([`crate::room`]).
    ledger: Option<PathBuf>,
    end: Cell<Option<End>>,
    changed: Signal,
    /// Requests for inspections of the views.
    views: views::Wish,
    guard: RefCell<Option<PollerGuard>>,
}

impl Service {
    /// Starts to resolve faults on the loop `on`. `ledger` is the directory of [`crate::room`], which must exist;
    /// without it, other pagers that detach at the same time are unknown.
    ///
    /// # Errors
    /// If a descriptor cannot be made.
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

    /// Completes when the service has ended.
    pub async fn ended(&self) -> End {
        self.changed.until(|| self.end.get()).await
    }

    /// Returns the status of the memory, or `None` if the service has ended.
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

    /// Sets the limit and the part of it that compressed pages may use, in bytes.
    pub fn set_limit(&self, limit_bytes: u64, compressed_bytes: u64) {
        if let Some(attached) = &mut *self.attached.borrow_mut() {
            attached.pager.set_limit(limit_bytes, compressed_bytes);
        }
        self.nudge();
    }

    /// Starts to detach, after a check that there is room for all pages ([`crate::room`]). Nothing is evicted from
    /// then on.
    ///
    /// # Errors
    /// See [`DetachError`]. Nothing has changed then.
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
        tracing::info!("detaching: all pages are being paged in");
        Ok(Detach(room))
    }

    /// Pages everything in, and detaches from the process. Returns the maximum time that a thread of it was stopped,
    /// or `None` if its descriptors could not be closed, which is logged. The room is checked again before each step.
    ///
    /// # Errors
    /// See [`DetachError`]. The memory remains managed then.
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
                    tracing::warn!("the detach was stopped: {error}");
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

    /// Stops a detach, at any time, and enforces the budget again. Returns true if a detach was in progress.
    pub fn cancel_detach(&self) -> bool {
        let is_detaching = self.is_detaching.get();
        self.is_cancelled.set(is_detaching);
        self.nudge();
        is_detaching
    }

    /// Pages everything in, in steps, and detaches from the process. Faults are resolved between the steps.
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
                    // Another limit applies, which is invisible from here.
                    let (since, least) = no_memory.unwrap_or((Instant::now(), needed_bytes));
                    match needed_bytes < least {
                        true => no_memory = None,
                        false if since.elapsed() > NO_MEMORY_MAX => return Err(DetachError::NoMemory),
                        false => no_memory = Some((since, least)),
                    }
                    pause = Some(TICK_IO);
                }
                if needed_bytes == 0 {
                    // The process may have to report holes yet, which the pager receives in its turns.
                    pause = Some(TICK_IO);
                }
                // From here on the pager has no other turn, so nothing can be evicted or stored any more.
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

    /// Resolves faults after the process has ended, until no server has the memory mapped. Otherwise requests in
    /// flight that wait for its memory would block those servers forever.
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
                "a disk server of the VM still has the memory of the ended process mapped after {} s: its requests that \
                 wait for memory fail",
                FINISH_MAX.as_secs()
            );
            attached.pager.guest().views().give_up_waiting();
        }
    }

    /// Records that everything is in memory, but the process cannot be detached from yet. Logs each reason once.
    fn waits_to_let_go(&self, error: &InjectError) {
        let why = format!(
            "all of its memory is paged in, but it cannot be detached from yet: {error}; this is retried until it succeeds"
        );
        if self.detach_problem.borrow().as_ref() != Some(&why) {
            tracing::warn!("{why}");
            self.detach_problem.replace(Some(why));
        }
    }

    /// Returns true if the process is not inspected any more.
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

    /// Wakes the loop, so that the pager has a turn.
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

/// Wakes the loop when kernel messages are available; the poller reads them.
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

/// Gives the pager a turn at intervals, for work that is due by time.
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

/// Searches for hotplugged memory.
async fn look(on: Loop, mut target: Target, options: Options, service: Weak<Service>) {
    let mut not_yet = HashSet::new();
    loop {
        on.sleep(LOOK_EVERY).await;
        let is_over = |service: &Rc<Service>| service.is_ending();
        if service.upgrade().is_none_or(|service| is_over(&service)) {
            return;
        }
        // Reading the mappings may wait for a thread that waits for the pager.
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
                    tracing::warn!("hotplugged memory is not managed: {why}");
                }
                for caution in changes.cautions {
                    tracing::warn!("{caution}");
                }
                let mut attached = service.attached.borrow_mut();
                if let Some(attached) = attached.as_ref().filter(|_| !changes.gone.is_empty()) {
                    tracing::info!(count = changes.gone.len(), "memory was hot-unplugged");
                    attached.close_marks_of_gone();
                }
                for memory in changes.new {
                    let (name, place) = (memory.name.clone(), memory.place);
                    let limit = match not_yet.contains(&place) {
                        true => RETRY_LIMIT,
                        false => INJECT_LIMIT,
                    };
                    match attached.as_mut().map(|attached| attached.add(memory, limit)) {
                        Some(Ok(())) => tracing::info!(memory = name, mib = place.bytes >> 20, "memory was hotplugged"),
                        // No thread could be stopped, for example because the process is frozen or traced.
                        Some(Err(AttachError::Inject(error))) => {
                            target.forget(place);
                            if not_yet.insert(place) {
                                tracing::warn!("hotplugged memory is not managed yet: {error}; this is retried");
                            }
                        }
                        Some(Err(error)) => tracing::warn!("hotplugged memory is not managed: {error}"),
                        None => return,
                    }
                }
            }
            Err(error) => tracing::debug!("cannot search for hotplugged memory: {error}"),
        }
    }
}
