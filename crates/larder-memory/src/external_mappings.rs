//! External mappings of managed memory: Larder's own disk servers map it, and their requests read and write it.
//!
//! Each such process has a userfaultfd of the pager, like the managed process. All processes map the same file, so a
//! page is evicted once for all of them, and put in place once for all of them. Write-protecting, unprotecting and
//! waking must be done in each process. Invariants:
//!
//! - **A page that is clean, or being evicted, is write-protected in every view.** A new view is protected as a whole
//!   before it is used. A needless protection costs a fault, and nothing else.
//! - The data that a server publishes ([`larder_export::external_mapping`]) is trusted only as far as errors harm that
//!   server: a wrong count of requests keeps pages in memory.
//! - A server that has exited is skipped: its successor repeats its requests before the guest is notified.
//! - When the managed process has ended, requests in flight still read its memory. The pages that they wait for are
//!   put in place through the view ([`ExternalMappings::fill_waiting`]) until the server has unmapped them.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use larder_export::external_mapping::ExternalMappingState;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::attach::INJECT_LIMIT;
use crate::inject::{InjectError, with_stopped_thread};
use crate::state::Region;
use crate::target::{DiskServerProcess, mappings_of_region};
use crate::units::{PAGE_BYTES, PageIndex, PageRun};
use crate::userfaultfd::{
    self, AddressRange, EXTERNAL_FEATURE_BITS, FaultCause, FillResult, RawUffdMessage, UffdMessage, Userfaultfd,
    feature,
};

/// Maximum number of faults read from one view at a time.
const MESSAGES_MAX: usize = 16;

/// Error of adding a process that has managed memory mapped.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ExternalMappingError {
    #[error("{0}")]
    Inject(#[from] InjectError),
    #[error("process {pid}, which serves a disk of the VM: {what}: {source}", pid = .pid.as_raw_pid())]
    Failed { pid: Pid, what: &'static str, source: io::Error },
}

/// Pages that a view has mapped at this address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct MappedRange {
    address: u64,
    run: PageRun,
}

impl MappedRange {
    /// Returns the address range of the pages of `run` that this part maps.
    fn intersection(&self, run: PageRun) -> Option<AddressRange> {
        let first = run.first.max(self.run.first);
        let end = run.end().min(self.run.end());
        (first < end).then(|| AddressRange {
            start: self.address + u64::from(first.get() - self.run.first.get()) * PAGE_BYTES,
            len: u64::from(end.get() - first.get()) * PAGE_BYTES,
        })
    }

    fn page_at(&self, address: u64) -> Option<PageIndex> {
        let within = address.checked_sub(self.address)? / PAGE_BYTES;
        (within < u64::from(self.run.count)).then(|| self.run.first.plus(within as u32))
    }

    fn range(&self) -> AddressRange {
        AddressRange { start: self.address, len: self.run.bytes() }
    }
}

/// Another process that has managed memory mapped.
pub struct ExternalMapping {
    pid: Pid,
    pidfd: OwnedFd,
    memory: ExternalMappingState,
    userfaultfd: Userfaultfd,
    userfaultfd_number: u32,
    ranges: Vec<MappedRange>,
    /// Pages that threads of the process wait for.
    awaited_pages: BTreeSet<PageIndex>,
    /// The epoch whose requests the pager waits for.
    awaited_epoch: Option<u32>,
    has_ended: AtomicBool,
}

/// A view to be inspected. `requested` counts the mappings whose registration its server had requested by then.
#[derive(Clone, Copy, Debug)]
pub struct ScanRequest {
    pid: Pid,
    requested: u64,
}

/// Mappings found by an inspection of a view. They include all those whose registration the server had requested
/// before the inspection began.
pub struct MappingScan {
    request: ScanRequest,
    ranges: Vec<MappedRange>,
}

impl ExternalMapping {
    /// Makes a userfaultfd in that process, or takes the one that an earlier pager has left there.
    ///
    /// # Errors
    /// If the process has ended, or cannot be accessed.
    pub fn attach(server: DiskServerProcess) -> Result<Self, ExternalMappingError> {
        let DiskServerProcess { pid, descriptor } = server;
        let failed = |what| move |source: io::Error| ExternalMappingError::Failed { pid, what, source };
        let pidfd =
            pidfd_open(pid, PidfdFlags::empty()).map_err(|errno| failed("cannot open a pidfd")(errno.into()))?;
        let fetch = |number, what| {
            let taken = pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty());
            taken.map_err(|errno| failed(what)(errno.into()))
        };
        let memory = fetch(descriptor, "cannot fetch its view memory")?;
        let memory = ExternalMappingState::open(memory.as_fd()).map_err(failed("cannot read its view memory"))?;
        let reused = memory.userfaultfd_number().filter(|number| {
            let found = std::fs::read_link(format!("/proc/{pid}/fd/{number}"));
            found.is_ok_and(|is| is.as_os_str() == "anon_inode:[userfaultfd]")
        });
        let number = match reused {
            Some(number) => number,
            None => make_userfaultfd(pid)?,
        };
        let userfaultfd = Userfaultfd::new(fetch(number as i32, "cannot fetch its userfaultfd")?);
        userfaultfd::available_features()
            .and_then(|available| userfaultfd.enable(EXTERNAL_FEATURE_BITS | available & feature::POISON))
            .map_err(failed("cannot enable the userfaultfd's features"))?;
        memory.set_userfaultfd_number(Some(number));
        Ok(Self {
            pid,
            pidfd,
            memory,
            userfaultfd,
            userfaultfd_number: number,
            ranges: Vec::new(),
            awaited_pages: BTreeSet::new(),
            awaited_epoch: None,
            has_ended: AtomicBool::new(false),
        })
    }

    /// Returns the PID.
    pub fn pid(&self) -> Pid {
        self.pid
    }

    fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Relaxed)
    }

    /// Finds the parts of `regions` that the process has mapped.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn scan(&self, regions: &[Region]) -> io::Result<MappingScan> {
        MappingScan::perform(self.scan_request(), regions)
    }

    /// Prepares an inspection by another thread.
    fn scan_request(&self) -> ScanRequest {
        ScanRequest { pid: self.pid, requested: self.memory.requested_and_registered().0 }
    }

    /// Registers new mappings, so that their faults are reported from now on. With `protect` they are write-protected
    /// too.
    fn register(&mut self, scan: MappingScan, protect: bool) -> io::Result<()> {
        for part in &scan.ranges {
            if self.ranges.contains(part) {
                continue;
            }
            self.userfaultfd.register_missing(part.range())?;
            if protect {
                self.userfaultfd.protect(part.range())?;
            }
            // Threads that waited for an earlier pager retry.
            self.userfaultfd.wake(part.range())?;
        }
        self.ranges = scan.ranges;
        self.memory.set_registered(scan.request.requested);
        Ok(())
    }

    /// Calls `visit` with the parts of `run` that the process has mapped. Ranges that it has unmapped since are
    /// ignored.
    fn for_each_range(&self, run: PageRun, visit: impl Fn(AddressRange) -> io::Result<()>) -> io::Result<()> {
        for range in self.ranges.iter().filter_map(|part| part.intersection(run)) {
            match visit(range) {
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
                    self.has_ended.store(true, Ordering::Relaxed)
                }
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
                done => done?,
            }
        }
        Ok(())
    }

    /// Removes the pages of `run` from the waiting set, and calls `resolve` for each.
    fn wake_arrived(&mut self, run: PageRun, resolve: impl Fn(&Userfaultfd, AddressRange) -> io::Result<()>) {
        if self.awaited_pages.is_empty() {
            return;
        }
        let pages: Vec<PageIndex> = self.awaited_pages.range(run.first..run.end()).copied().collect();
        for page in pages {
            self.awaited_pages.remove(&page);
            let done = self.for_each_range(PageRun::one(page), |range| resolve(&self.userfaultfd, range));
            if done.is_err() {
                // The thread faults again.
                let _ = self.for_each_range(PageRun::one(page), |range| self.userfaultfd.wake(range));
            }
        }
    }

    fn receive(&mut self, found: &mut Vec<(PageIndex, FaultCause, bool)>) {
        let mut buffer = [RawUffdMessage::default(); MESSAGES_MAX];
        let count = match self.userfaultfd.receive(&mut buffer) {
            Ok(count) => count,
            Err(_) => return self.has_ended.store(true, Ordering::Relaxed),
        };
        for raw in &buffer[..count] {
            let Some(UffdMessage::Fault { address, cause, write, .. }) = raw.decode() else {
                continue;
            };
            if let Some(page) = self.ranges.iter().find_map(|part| part.page_at(address)) {
                self.awaited_pages.insert(page);
                found.push((page, cause, write));
            } else {
                // A newer mapping, perhaps of another pager: the thread faults again.
                let page = AddressRange { start: address & !(PAGE_BYTES - 1), len: PAGE_BYTES };
                let _ = self.userfaultfd.wake(page);
            }
        }
    }

    /// Detaches from the process.
    pub(crate) fn detach(self) {
        self.unregister();
        self.close();
    }

    /// Unregisters its memory, and wakes threads that wait. The userfaultfd does nothing any more, and a later pager
    /// makes its own.
    pub(crate) fn unregister(&self) {
        for part in &self.ranges {
            let range = part.range();
            // Ranges that were unmapped, or whose process has ended, need no unregistering.
            let _ = self.userfaultfd.unprotect(range);
            let _ = self.userfaultfd.unregister(range);
        }
        self.memory.set_userfaultfd_number(None);
    }

    /// Closes the userfaultfd in the process. Does nothing to its memory, which may belong to another pager by now.
    fn close(self) {
        let closed = with_stopped_thread(self.pid, INJECT_LIMIT, |thread| thread.close(self.userfaultfd_number as i32));
        match closed {
            Ok(_) | Err(InjectError::Exited { .. }) => {}
            Err(error) => tracing::warn!("an unused descriptor stays open in a disk server: {error}"),
        }
    }
}

impl MappingScan {
    /// Returns true if any of the regions is mapped.
    pub fn has_mappings(&self) -> bool {
        !self.ranges.is_empty()
    }

    /// Inspects the mappings of the process. May take a while, so the pager's thread does not call it.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn perform(of: ScanRequest, regions: &[Region]) -> io::Result<Self> {
        let mut ranges = Vec::new();
        for region in regions.iter().filter(|region| !region.is_unmapped()) {
            for location in mappings_of_region(of.pid, region)? {
                let from = location.offset.max(region.offset);
                let end = (location.offset + location.bytes).min(region.offset + region.bytes());
                ranges.push(MappedRange {
                    address: location.address + (from - location.offset),
                    run: PageRun {
                        first: region.first.plus(((from - region.offset) / PAGE_BYTES) as u32),
                        count: ((end - from) / PAGE_BYTES) as u32,
                    },
                });
            }
        }
        Ok(Self { request: of, ranges })
    }
}

fn make_userfaultfd(pid: Pid) -> Result<u32, ExternalMappingError> {
    let failed = |source| ExternalMappingError::Failed { pid, what: "cannot open /dev/userfaultfd", source };
    let device = userfaultfd::open_device().map_err(failed)?;
    let (number, _) = with_stopped_thread(pid, INJECT_LIMIT, |thread| {
        let given = thread.send_descriptors(&[device.as_fd()])?;
        let made = userfaultfd::create_in(thread, given[0]);
        thread.close(given[0])?;
        made
    })?;
    Ok(number as u32)
}

/// All views of one managed process.
pub struct ExternalMappings {
    all: RefCell<Vec<ExternalMapping>>,
    /// Epoll descriptor: readable when one of the userfaultfds is, that of the managed process included.
    events: OwnedFd,
    grace: Cell<Grace>,
    /// A view has ended.
    has_exited_server: Cell<bool>,
}

/// Counters of grace periods. In each, the pager waits for the requests that began before it.
#[derive(Clone, Copy, Default)]
struct Grace {
    started: u64,
    ended: u64,
    requested: u64,
}

impl ExternalMappings {
    /// Makes an empty set. `userfaultfd` is that of the managed process.
    ///
    /// # Errors
    /// If a descriptor cannot be made.
    pub fn new(userfaultfd: &Userfaultfd) -> io::Result<Self> {
        let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(&events, userfaultfd, epoll::EventData::new_u64(0), epoll::EventFlags::IN)?;
        Ok(Self { all: RefCell::default(), events, grace: Cell::default(), has_exited_server: Cell::new(false) })
    }

    /// Returns a descriptor that is readable when a message is available.
    pub fn events(&self) -> BorrowedFd<'_> {
        self.events.as_fd()
    }

    /// Returns true if there is no view.
    pub fn is_empty(&self) -> bool {
        self.all.borrow().is_empty()
    }

    /// Returns the PIDs of all views.
    pub fn pids(&self) -> Vec<Pid> {
        self.all.borrow().iter().map(ExternalMapping::pid).collect()
    }

    /// Adds a view with its mappings. `protect` must be set if pages may be clean, or being evicted, already.
    ///
    /// # Errors
    /// If the mappings cannot be registered, because another userfaultfd has them or the process has ended.
    pub fn add(&self, mut mapping: ExternalMapping, scan: MappingScan, protect: bool) -> io::Result<()> {
        mapping.register(scan, protect)?;
        let data = epoll::EventData::new_u64(0);
        epoll::add(&self.events, &mapping.userfaultfd, data, epoll::EventFlags::IN)?;
        tracing::info!(pid = mapping.pid.as_raw_pid(), "a disk server of the VM has its memory mapped");
        self.all.borrow_mut().push(mapping);
        Ok(())
    }

    /// Returns the views that wait for an inspection, or all of them.
    pub fn scan_requests(&self, all: bool) -> Vec<ScanRequest> {
        let mappings = self.all.borrow();
        let waits = |mapping: &&ExternalMapping| {
            let (requested, served) = mapping.memory.requested_and_registered();
            all || requested != served
        };
        mappings.iter().filter(waits).map(ExternalMapping::scan_request).collect()
    }

    /// Registers the result of an inspection.
    pub fn register_scan(&self, looked: MappingScan) {
        let mut all = self.all.borrow_mut();
        let Some(mapping) = all.iter_mut().find(|view| view.pid == looked.request.pid) else {
            return;
        };
        if let Err(error) = mapping.register(looked, true) {
            // The server still waits, and is inspected again.
            tracing::warn!(
                pid = mapping.pid.as_raw_pid(),
                "the mappings of a disk server of the VM cannot be registered: {error}"
            );
        }
    }

    /// Removes the views whose processes have ended. Returns true if there was one since the last call.
    pub fn remove_exited(&self) -> bool {
        let mut has_exited = self.has_exited_server.take();
        self.all.borrow_mut().retain(|mapping| {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            let mut events = [PollFd::from_borrowed_fd(mapping.pidfd.as_fd(), PollFlags::IN)];
            let has_ended = mapping.has_ended() || poll(&mut events, Some(&now)).is_ok_and(|count| count > 0);
            has_exited |= has_ended;
            !has_ended
        });
        has_exited
    }

    /// Reads at most `max` faults of all views: the page, the cause, and whether the thread wants to write.
    pub fn receive(&self, max: usize) -> Vec<(PageIndex, FaultCause, bool)> {
        let mut found = Vec::new();
        for mapping in &mut *self.all.borrow_mut() {
            if found.len() + MESSAGES_MAX <= max {
                mapping.receive(&mut found);
            }
        }
        found
    }

    /// Write-protects these pages in all views: from now on writes to them fault and wait.
    ///
    /// # Errors
    /// If mappings are changing, or there is no memory.
    pub fn protect(&self, run: PageRun) -> io::Result<()> {
        let all = self.all.borrow();
        all.iter().try_for_each(|mapping| mapping.for_each_range(run, |range| mapping.userfaultfd.protect(range)))
    }

    /// Removes the write-protection of these pages in all views, and wakes threads that wait to write.
    ///
    /// # Errors
    /// If mappings are changing.
    pub fn unprotect(&self, run: PageRun) -> io::Result<()> {
        let mut all = self.all.borrow_mut();
        all.iter_mut().try_for_each(|mapping| {
            mapping.for_each_range(run, |range| mapping.userfaultfd.unprotect(range))?;
            mapping.awaited_pages.retain(|page| *page < run.first || *page >= run.end());
            Ok(())
        })
    }

    /// Wakes threads of all views that wait for these pages, which are in place now. If the pages are not
    /// `protected`, the threads may also write.
    pub fn wake_arrived(&self, run: PageRun, protected: bool) {
        for mapping in &mut *self.all.borrow_mut() {
            mapping.wake_arrived(run, |userfaultfd, range| match protected {
                true => userfaultfd.wake(range),
                false => userfaultfd.unprotect(range),
            });
        }
    }

    /// Puts a page in place through a view in which a thread waits for it, because the managed process has ended.
    /// `fill` takes the view's userfaultfd and the page's address there.
    pub fn fill_waiting(&self, page: PageIndex, fill: impl Fn(&Userfaultfd, u64) -> FillResult) -> FillResult {
        let mut filled = FillResult::Unmapped;
        for view in self.all.borrow().iter().filter(|mapping| mapping.awaited_pages.contains(&page)) {
            let range = view.ranges.iter().find_map(|part| part.intersection(PageRun::one(page)));
            if let Some(place) = range {
                filled = fill(&view.userfaultfd, place.start);
            }
            if filled == FillResult::Done {
                break;
            }
        }
        if filled == FillResult::Done {
            self.wake_arrived(PageRun::one(page), false);
        }
        filled
    }

    /// Ends all waits for pages with a memory error.
    pub fn fail_waiters(&self) {
        let waiting = |mapping: &ExternalMapping| mapping.awaited_pages.iter().copied().collect::<Vec<_>>();
        let pages: Vec<PageIndex> = self.all.borrow().iter().flat_map(waiting).collect();
        pages.into_iter().for_each(|page| self.poison(page));
    }

    /// Wakes threads of all views that wait for these pages. They retry.
    pub fn wake(&self, run: PageRun) {
        for mapping in &mut *self.all.borrow_mut() {
            mapping.wake_arrived(run, Userfaultfd::wake);
        }
    }

    /// Poisons a missing page in all views: a thread that touches it gets a memory error.
    pub fn poison(&self, page: PageIndex) {
        for mapping in &mut *self.all.borrow_mut() {
            let userfaultfd = &mapping.userfaultfd;
            let poisoned = mapping.for_each_range(PageRun::one(page), |range| match userfaultfd.poison(range.start) {
                FillResult::Done | FillResult::AlreadyPresent | FillResult::Unmapped => Ok(()),
                FillResult::MappingChanged | FillResult::NoMemory => Err(io::ErrorKind::Other.into()),
            });
            if poisoned.is_err() {
                tracing::debug!(?page, "cannot be poisoned now");
            }
            mapping.wake_arrived(PageRun::one(page), Userfaultfd::wake);
        }
    }

    /// Returns a mark of the current time, for [`Self::is_io_fence_passed`].
    pub fn io_fence(&self) -> u64 {
        if self.is_empty() {
            return 0;
        }
        let mut grace = self.grace.get();
        // The grace period in progress may have begun before some of the requests.
        grace.requested = grace.started + 1;
        self.grace.set(grace);
        grace.requested
    }

    /// Returns true if all requests have ended that were in flight when `fence` was made.
    pub fn is_io_fence_passed(&self, fence: u64) -> bool {
        let mut grace = self.grace.get();
        while grace.ended < fence {
            let mut all = self.all.borrow_mut();
            if grace.started > grace.ended {
                let is_drained = |mapping: &ExternalMapping| {
                    mapping.has_ended() || mapping.awaited_epoch.is_none_or(|epoch| mapping.memory.is_drained(epoch))
                };
                if !all.iter().all(is_drained) {
                    break;
                }
                grace.ended = grace.started;
            } else if grace.requested > grace.ended {
                grace.started += 1;
                for mapping in &mut *all {
                    mapping.awaited_epoch = Some(mapping.memory.next_epoch());
                }
            } else {
                break;
            }
        }
        self.grace.set(grace);
        // Without views there was nothing to wait for.
        grace.ended >= fence
    }

    /// Calls `what` with all views.
    pub(crate) fn with_all<T>(&self, what: impl FnOnce(&[ExternalMapping]) -> T) -> T {
        what(&self.all.borrow())
    }

    /// Detaches from all views.
    pub(crate) fn detach_all(&self) {
        self.all.take().into_iter().for_each(ExternalMapping::detach);
    }

    /// Closes the descriptors in all views, which were unregistered before.
    pub(crate) fn close_all(&self) {
        self.all.take().into_iter().for_each(ExternalMapping::close);
    }
}
