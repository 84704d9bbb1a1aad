//! The pager on its loop: it is called when there is something to do, and sleeps else.

mod views;

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::{Duration, Instant};

use larder_block::event_loop::{Loop, Poller, PollerGuard, yield_now};
use larder_block::signal::Signal;

use crate::attach::Attached;
use crate::inject::InjectError;
use crate::pager::{DiskStatus, Figures, StoredPages, Stuck};
use crate::pressure::Pressure;
use crate::target::{Options, Target};
use crate::units::PAGE_BYTES;

/// How often it is looked whether memory was plugged in.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// How often it is called while pages are in quarantine, and else, though nothing happens.
const TICK_QUARANTINED: Duration = Duration::from_millis(20);
/// The same while pages wait for requests of disks to end.
const TICK_IO: Duration = Duration::from_millis(2);
const TICK: Duration = Duration::from_millis(500);

/// How many pages are brought back between two looks for faults, when all are to.
const BRING_PAGES: u32 = 128;

/// Why it is over.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum End {
    /// The process has ended.
    ProcessEnded,
    /// It was detached from.
    Detached,
}

/// Why a process is not detached from.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum DetachError {
    #[error("it is being detached from already")]
    UnderWay,
    #[error("it is over: the process has ended, or was detached from")]
    Over,
    #[error(
        "{} MiB are to come back into memory, and the host has {} MiB free: free some first",
        needed_bytes >> 20, free_bytes >> 20
    )]
    NoRoom { needed_bytes: u64, free_bytes: u64 },
}

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
    end: Cell<Option<End>>,
    changed: Signal,
    /// The views are to be looked at.
    views: views::Wish,
    guard: RefCell<Option<PollerGuard>>,
}

impl Service {
    /// Answers faults on this loop from now on.
    ///
    /// # Errors
    /// No descriptor can be made.
    pub fn start(on: &Loop, mut attached: Attached, options: Options) -> io::Result<Rc<Self>> {
        let events = attached.events().try_clone_to_owned()?;
        let pidfd = attached.pidfd()?;
        let target = attached.target.take();
        let files = Arc::clone(&attached.files);
        let service = Rc::new(Self {
            attached: RefCell::new(Some(attached)),
            watcher: RefCell::new(None),
            is_watch_wanted: Cell::new(false),
            is_watched: Cell::new(false),
            is_detaching: Cell::new(false),
            end: Cell::new(None),
            changed: Signal::default(),
            views: views::Wish::default(),
            guard: RefCell::new(None),
        });
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

    /// Brings everything back, and leaves the process as it was: for how long a thread of it stood still at most; nothing
    /// if what it was given could not be closed in it, which is told in the log.
    ///
    /// # Errors
    /// See [`DetachError`]: nothing has changed then.
    pub async fn detach(&self) -> Result<Option<Duration>, DetachError> {
        if self.is_detaching.get() {
            return Err(DetachError::UnderWay);
        }
        {
            let mut attached = self.attached.borrow_mut();
            let pager = &mut attached.as_mut().ok_or(DetachError::Over)?.pager;
            let needed_bytes = pager.stored_bytes();
            // What compressed pages take becomes free on the way.
            let free_bytes = free_bytes().saturating_add(pager.compressed_bytes());
            if needed_bytes > free_bytes {
                return Err(DetachError::NoRoom {
                    needed_bytes,
                    free_bytes,
                });
            }
            pager.begin_detach();
        }
        self.is_detaching.set(true);
        tracing::info!("detaching: everything is brought back");
        let attached = loop {
            {
                let mut attached = self.attached.borrow_mut();
                let is_back = match &mut *attached {
                    Some(attached) => attached.pager.bring_back(BRING_PAGES),
                    None => return Err(DetachError::Over),
                };
                // From here on nobody else has a turn: nothing can be evicted, or stored, any more.
                if is_back && let Some(attached) = attached.take() {
                    break attached;
                }
            }
            yield_now().await;
        };
        let stood_still = match attached.let_go() {
            Ok(stood_still) => Some(stood_still),
            Err(InjectError::Gone { .. }) => None,
            Err(error) => {
                tracing::warn!("detached, but the process keeps descriptors that do nothing: {error}");
                None
            }
        };
        self.is_over(End::Detached);
        Ok(stood_still)
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
    loop {
        on.sleep(LOOK_EVERY).await;
        let is_over = |service: &Rc<Service>| service.end.get().is_some() || service.is_detaching.get();
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
                    let (name, bytes) = (memory.name.clone(), memory.place.bytes);
                    match attached.as_mut().map(|attached| attached.add(memory)) {
                        Some(Ok(())) => tracing::info!(memory = name, mib = bytes >> 20, "memory was plugged in"),
                        Some(Err(error)) => tracing::warn!("memory that was plugged in is not managed: {error}"),
                        None => return,
                    }
                }
            }
            Err(error) => tracing::debug!("cannot look for memory that was plugged in: {error}"),
        }
    }
}

/// What the host can still give, in bytes.
fn free_bytes() -> u64 {
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let free = memory.lines().find_map(|line| line.strip_prefix("MemAvailable:"));
    let kib = free.and_then(|free| free.trim().trim_end_matches(" kB").parse().ok());
    kib.map_or(u64::MAX, |kib: u64| kib << 10)
}
