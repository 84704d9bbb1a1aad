//! Runs the pager on an event loop: it has a turn when there is work, and sleeps otherwise.

mod server_scan;

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
use crate::external_mappings::MappingScan;
use crate::headroom::{HeadroomCheck, MemoryShortage};
use crate::inject::InjectError;
use crate::pager::{DiskStatus, PagerStats, StoredPages, StuckReason};
use crate::pressure::Pressure;
use crate::target::{InspectOptions, Target};
use crate::units::PAGE_BYTES;

/// Interval of the search for hotplugged memory.
const HOTPLUG_SCAN_INTERVAL: Duration = Duration::from_secs(2);

/// Interval of turns without events while pages are in quarantine.
const TICK_INTERVAL_QUARANTINED: Duration = Duration::from_millis(20);
/// Interval of turns while pages wait for disk requests to end.
const TICK_INTERVAL_IO: Duration = Duration::from_millis(2);
/// Interval of turns at all other times.
const TICK_INTERVAL: Duration = Duration::from_millis(500);

/// Number of pages that a detach pages in between two checks for faults.
const DETACH_STEP_PAGES: u32 = 128;

/// Time after which a detach is stopped if the kernel has no memory for any page, although a check found enough.
const NO_MEMORY_TIMEOUT: Duration = Duration::from_secs(5);

/// Maximum pause between two attempts to stop a thread for detaching.
const DETACH_RETRY_DELAY_MAX: Duration = Duration::from_millis(500);

/// Maximum time that disk servers get to complete their requests after the process has ended.
const SERVER_DRAIN_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of the inspection of their mappings.
const SERVER_DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Reason why the service has ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PagerExit {
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
    InProgress,
    #[error("the process has ended, or was already detached from")]
    Ended,
    #[error("nothing was changed: {0}")]
    InsufficientMemory(MemoryShortage),
    #[error("stopped, and its memory is limited to the budget again: {0}")]
    MemoryRanOut(MemoryShortage),
    #[error(
        "stopped, and its memory is limited to the budget again: the kernel had no free memory to page in any \
        page for {} s",
        NO_MEMORY_TIMEOUT.as_secs()
    )]
    NoMemory,
    #[error("cancelled: its memory is limited to the budget again")]
    Cancelled,
}

/// A detach that was started, to be completed by [`PagerService::detach`].
#[must_use]
pub struct PendingDetach(HeadroomCheck);

/// Status of the managed memory.
#[derive(Clone, Debug)]
pub struct PagerStatus {
    /// Size of all memory that is mapped now, in bytes.
    pub bytes: u64,
    /// Memory that is resident, in bytes.
    pub resident_bytes: u64,
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
    pub stuck: Option<StuckReason>,
    /// A detach is in progress.
    pub detaching: bool,
    /// Reason why a detach waits, or why the last one was stopped or cancelled.
    pub detach_problem: Option<String>,
    /// Statistics of the pager.
    pub stats: PagerStats,
    /// Share of time lost by waiting for pages.
    pub pressure: Pressure,
}

/// Service that runs one pager on an event loop.
pub struct PagerService {
    attached: RefCell<Option<Attached>>,
    /// Wakes the task that waits for kernel messages.
    waker: RefCell<Option<Waker>>,
    /// The task is to wait for the descriptor to become readable.
    watch_requested: Cell<bool>,
    /// The task waits for the descriptor to become readable.
    is_watching: Cell<bool>,
    is_detaching: Cell<bool>,
    /// The process has ended, and only its disk servers are still served.
    has_process_ended: Cell<bool>,
    /// The detach in progress is to be stopped.
    cancel_requested: Cell<bool>,
    detach_problem: RefCell<Option<String>>,
    /// Directory in which pagers that detach at the same time claim memory ([`crate::headroom`]).
    ledger: Option<PathBuf>,
    end: Cell<Option<PagerExit>>,
    ended_signal: Signal,
    /// Requests for inspections of the views.
    scan_requests: server_scan::ScanRequests,
    guard: RefCell<Option<PollerGuard>>,
}

impl PagerService {
    /// Starts to resolve faults on the loop `on`. `ledger` is the directory of [`crate::headroom`], which must exist;
    /// without it, other pagers that detach at the same time are unknown.
    ///
    /// # Errors
    /// If a descriptor cannot be made.
    pub fn start(
        on: &Loop,
        mut attached: Attached,
        options: InspectOptions,
        ledger: Option<PathBuf>,
    ) -> io::Result<Rc<Self>> {
        let events = attached.events().try_clone_to_owned()?;
        let pidfd = attached.pidfd()?;
        let target = attached.target.take();
        let misses_servers = attached.pager.evictions_paused();
        let files = Arc::clone(&attached.files);
        let service = Rc::new(Self {
            attached: RefCell::new(Some(attached)),
            waker: RefCell::new(None),
            watch_requested: Cell::new(false),
            is_watching: Cell::new(false),
            is_detaching: Cell::new(false),
            has_process_ended: Cell::new(false),
            cancel_requested: Cell::new(false),
            detach_problem: RefCell::new(None),
            ledger,
            end: Cell::new(None),
            ended_signal: Signal::default(),
            scan_requests: server_scan::ScanRequests::default(),
            guard: RefCell::new(None),
        });
        if misses_servers {
            service.scan_requests.request_search();
        }
        let weak = Rc::downgrade(&service);
        on.spawn(watch(on.clone(), events, weak.clone()));
        on.spawn(watch_process(on.clone(), pidfd, weak.clone()));
        on.spawn(tick(on.clone(), weak.clone()));
        on.spawn(server_scan::watch(on.clone(), server_scan::FileWatch::new(&files), weak.clone()));
        if let Some(target) = target {
            on.spawn(scan_hotplug(on.clone(), target, options, weak));
        }
        *service.guard.borrow_mut() = Some(on.add_poller(Rc::clone(&service) as Rc<dyn Poller>));
        Ok(service)
    }

    /// Completes when the service has ended.
    pub async fn ended(&self) -> PagerExit {
        self.ended_signal.until(|| self.end.get()).await
    }

    /// Returns the status of the memory, or `None` if the service has ended.
    pub fn status(&self) -> Option<PagerStatus> {
        let mut attached = self.attached.borrow_mut();
        let pager = &mut attached.as_mut()?.pager;
        let pressure = pager.pressure(Instant::now());
        Some(PagerStatus {
            bytes: {
                let regions = pager.regions().iter().filter(|region| !region.is_unmapped());
                regions.map(|region| region.bytes()).sum()
            },
            resident_bytes: u64::from(pager.resident_pages()) * PAGE_BYTES,
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
            stats: pager.stats().clone(),
            pressure,
        })
    }

    /// Sets the limit and the part of it that compressed pages may use, in bytes.
    pub fn set_limit(&self, limit_bytes: u64, compressed_bytes: u64) {
        if let Some(attached) = &mut *self.attached.borrow_mut() {
            attached.pager.set_limit(limit_bytes, compressed_bytes);
        }
        self.wake();
    }

    /// Starts to detach, after a check that there is room for all pages ([`crate::headroom`]). Nothing is evicted from
    /// then on.
    ///
    /// # Errors
    /// See [`DetachError`]. Nothing has changed then.
    pub fn begin_detach(&self) -> Result<PendingDetach, DetachError> {
        if self.is_detaching.get() {
            return Err(DetachError::InProgress);
        }
        if self.has_process_ended.get() {
            return Err(DetachError::Ended);
        }
        let room = {
            let mut attached = self.attached.borrow_mut();
            let attached = attached.as_mut().ok_or(DetachError::Ended)?;
            let mut room = HeadroomCheck::new(attached.pid(), Arc::clone(&attached.files), self.ledger.clone());
            let pager = &mut attached.pager;
            let checked = room.check(pager.stored_bytes(), pager.compressed_bytes());
            checked.map_err(|shortage| self.record_detach_error(DetachError::InsufficientMemory(shortage)))?;
            pager.begin_detach();
            room
        };
        self.is_detaching.set(true);
        self.cancel_requested.set(false);
        self.detach_problem.replace(None);
        tracing::info!("detaching: all pages are being paged in");
        Ok(PendingDetach(room))
    }

    /// Pages everything in, and detaches from the process. Returns the maximum time that a thread of it was stopped,
    /// or `None` if its descriptors could not be closed, which is logged. The room is checked again before each step.
    ///
    /// # Errors
    /// See [`DetachError`]. The memory remains managed then.
    pub async fn detach(&self, on: &Loop, PendingDetach(room): PendingDetach) -> Result<Option<Duration>, DetachError> {
        let detached = self.page_in_and_detach(on, room).await;
        self.is_detaching.set(false);
        match detached {
            Ok(paused_for) => {
                self.set_ended(PagerExit::Detached);
                Ok(paused_for)
            }
            Err(error) => {
                if let Some(attached) = &mut *self.attached.borrow_mut()
                    && !self.has_process_ended.get()
                {
                    attached.pager.cancel_detach();
                    tracing::warn!("the detach was stopped: {error}");
                }
                self.wake();
                Err(self.record_detach_error(error))
            }
        }
    }

    fn record_detach_error(&self, error: DetachError) -> DetachError {
        self.detach_problem.replace(Some(error.to_string()));
        error
    }

    /// Stops a detach, at any time, and enforces the budget again. Returns true if a detach was in progress.
    pub fn cancel_detach(&self) -> bool {
        let is_detaching = self.is_detaching.get();
        self.cancel_requested.set(is_detaching);
        tracing::debug!(is_detaching, "the detach is to be cancelled");
        self.wake();
        is_detaching
    }

    /// Pages everything in, in steps, and detaches from the process. Faults are resolved between the steps.
    async fn page_in_and_detach(&self, on: &Loop, mut room: HeadroomCheck) -> Result<Option<Duration>, DetachError> {
        let mut no_memory: Option<(Instant, u64)> = None;
        let mut attempts = 0_u32;
        loop {
            if self.cancel_requested.get() {
                return Err(DetachError::Cancelled);
            }
            if self.has_process_ended.get() {
                return Err(DetachError::Ended);
            }
            let mut pause = None;
            {
                let mut attached_now = self.attached.borrow_mut();
                let attached = attached_now.as_mut().ok_or(DetachError::Ended)?;
                let pager = &mut attached.pager;
                let needed_bytes = pager.stored_bytes();
                if room.is_check_due(needed_bytes) || pager.lacks_memory() {
                    let checked = room.check(needed_bytes, pager.compressed_bytes());
                    checked.map_err(DetachError::MemoryRanOut)?;
                }
                if pager.lacks_memory() {
                    // Another limit applies, which is invisible from here.
                    let (since, needed_min) = no_memory.unwrap_or((Instant::now(), needed_bytes));
                    match needed_bytes < needed_min {
                        true => no_memory = None,
                        false if since.elapsed() > NO_MEMORY_TIMEOUT => return Err(DetachError::NoMemory),
                        false => no_memory = Some((since, needed_min)),
                    }
                    pause = Some(TICK_INTERVAL_IO);
                }
                if needed_bytes == 0 {
                    // The process may have to report holes yet, which the pager receives in its turns.
                    pause = Some(TICK_INTERVAL_IO);
                }
                // From here on the pager has no other turn, so nothing can be evicted or stored any more.
                if pager.page_in_step(DETACH_STEP_PAGES) {
                    let limit = if attempts == 0 { INJECT_LIMIT } else { RETRY_LIMIT };
                    match attached.detach(limit) {
                        Ok(paused_for) => {
                            attached_now.take();
                            return Ok(paused_for);
                        }
                        Err(error) => self.record_detach_retry(&error),
                    }
                    pause = Some(DETACH_RETRY_DELAY_MAX.min(TICK_INTERVAL_IO * (1 << attempts.min(10))));
                    attempts += 1;
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
    async fn drain_servers(&self, on: &Loop) {
        let deadline = Instant::now() + SERVER_DRAIN_TIMEOUT;
        if let Some(attached) = &mut *self.attached.borrow_mut() {
            attached.pager.begin_detach();
        }
        loop {
            let scans = {
                let attached = self.attached.borrow();
                let Some(attached) = &*attached else { return };
                let mappings = attached.pager.guest().external_mappings();
                mappings.remove_exited();
                (mappings.scan_requests(true), attached.pager.regions().to_vec())
            };
            let has_mapped = on.run_blocking(move || {
                let (all, regions) = scans;
                let mut scanned = all.into_iter().filter_map(|of| MappingScan::perform(of, &regions).ok());
                scanned.any(|scan| scan.has_mappings())
            });
            if !has_mapped.await.is_ok_and(|has_mapped| has_mapped) {
                return;
            }
            if Instant::now() > deadline {
                break;
            }
            on.sleep(SERVER_DRAIN_POLL_INTERVAL).await;
        }
        if let Some(attached) = &*self.attached.borrow() {
            tracing::warn!(
                "a disk server of the VM still has the memory of the ended process mapped after {} s: its requests that \
                 wait for memory fail",
                SERVER_DRAIN_TIMEOUT.as_secs()
            );
            attached.pager.guest().external_mappings().fail_waiters();
        }
    }

    /// Records that everything is in memory, but the process cannot be detached from yet. Logs each reason once.
    fn record_detach_retry(&self, error: &InjectError) {
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

    fn set_ended(&self, end: PagerExit) {
        if self.end.get().is_none() {
            tracing::debug!(?end, "the memory is no longer managed");
            self.end.set(Some(end));
            self.ended_signal.raise();
            self.guard.borrow_mut().take();
            self.wake();
        }
    }

    /// Wakes the loop, so that the pager has a turn.
    fn wake(&self) {
        if let Some(waker) = self.waker.borrow_mut().take() {
            waker.wake();
        }
    }
}

impl Poller for PagerService {
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
                self.set_ended(PagerExit::ProcessEnded);
                false
            }
        }
    }

    fn arm(&self) -> bool {
        if !self.is_watching.get() {
            self.watch_requested.set(true);
            self.wake();
            return true;
        }
        let Ok(mut attached) = self.attached.try_borrow_mut() else {
            return true;
        };
        match (&mut *attached, &*self.waker.borrow()) {
            (Some(attached), Some(waker)) => attached.pager.set_waker(waker),
            _ => false,
        }
    }

    fn disarm(&self) {}

    fn recheck(&self) {}
}

/// Wakes the loop when kernel messages are available; the poller reads them.
async fn watch(on: Loop, events: OwnedFd, service: Weak<PagerService>) {
    loop {
        let is_requested = poll_fn(|context| {
            let Some(service) = service.upgrade().filter(|service| service.end.get().is_none()) else {
                return Poll::Ready(false);
            };
            if service.watch_requested.take() {
                service.is_watching.set(true);
                return Poll::Ready(true);
            }
            *service.waker.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        });
        if !is_requested.await {
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
            *service.waker.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        });
        if !is_readable.await {
            return;
        }
        if let Some(service) = service.upgrade() {
            service.is_watching.set(false);
        }
    }
}

async fn watch_process(on: Loop, pidfd: OwnedFd, service: Weak<PagerService>) {
    let ended = on.readable(pidfd.as_fd()).await;
    if let Err(error) = ended {
        tracing::warn!("cannot wait for the end of the process: {error}");
        return;
    }
    if let Some(service) = service.upgrade() {
        tracing::debug!("the process has ended; its disk servers complete their requests");
        service.has_process_ended.set(true);
        service.drain_servers(&on).await;
        service.attached.borrow_mut().take();
        service.set_ended(PagerExit::ProcessEnded);
    }
}

/// Gives the pager a turn at intervals, for work that is due by time.
async fn tick(on: Loop, service: Weak<PagerService>) {
    loop {
        let Some(of) = service.upgrade().filter(|service| service.end.get().is_none()) else {
            return;
        };
        let pause = match &mut *of.attached.borrow_mut() {
            None => TICK_INTERVAL,
            Some(Attached { pager, .. }) => {
                pager.pressure(Instant::now());
                let mappings = pager.guest().external_mappings();
                of.scan_requests.request_if_needed(mappings);
                match (pager.next_turn(), mappings.is_empty()) {
                    (None, _) => TICK_INTERVAL,
                    (Some(_), true) => TICK_INTERVAL_QUARANTINED,
                    (Some(_), false) => TICK_INTERVAL_IO,
                }
            }
        };
        drop(of);
        on.sleep(pause).await;
    }
}

/// Searches for hotplugged memory.
async fn scan_hotplug(on: Loop, mut target: Target, options: InspectOptions, service: Weak<PagerService>) {
    let mut retrying = HashSet::new();
    loop {
        on.sleep(HOTPLUG_SCAN_INTERVAL).await;
        let is_ending = |service: &Rc<PagerService>| service.is_ending();
        if service.upgrade().is_none_or(|service| is_ending(&service)) {
            return;
        }
        // Reading the mappings may wait for a thread that waits for the pager.
        let scanned = on.run_blocking(move || {
            let changes = target.rescan(&options);
            (target, changes)
        });
        let Ok((returned_target, changes)) = scanned.await else {
            return;
        };
        target = returned_target;
        let Some(service) = service.upgrade().filter(|service| !is_ending(service)) else {
            return;
        };
        match changes {
            Ok(changes) => {
                for why in changes.refused {
                    tracing::warn!("hotplugged memory is not managed: {why}");
                }
                for warning in changes.warnings {
                    tracing::warn!("{warning}");
                }
                let mut attached = service.attached.borrow_mut();
                if let Some(attached) = attached.as_ref().filter(|_| !changes.unmapped.is_empty()) {
                    tracing::info!(count = changes.unmapped.len(), "memory was hot-unplugged");
                    attached.close_markers_of_unmapped();
                }
                for memory in changes.added {
                    let (name, location) = (memory.name.clone(), memory.location);
                    let limit = match retrying.contains(&location) {
                        true => RETRY_LIMIT,
                        false => INJECT_LIMIT,
                    };
                    match attached.as_mut().map(|attached| attached.add_memory(memory, limit)) {
                        Some(Ok(())) => {
                            tracing::info!(memory = name, mib = location.bytes >> 20, "memory was hotplugged")
                        }
                        // No thread could be stopped, for example because the process is frozen or traced.
                        Some(Err(AttachError::Inject(error))) => {
                            target.report_again(location);
                            if retrying.insert(location) {
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
