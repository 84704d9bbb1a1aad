//! External mappings of managed memory: Larder's own disk servers map it, and their requests read and write it.
//!
//! Each such process has a userfaultfd of the pager, like the managed process. All processes map the same file, so a
//! page is evicted once for all of them, and put in place once for all of them. Write-protecting, unprotecting and
//! waking must be done in each process. Invariants:
//!
//! - **A page that is clean, or being evicted, is write-protected in every view.** A new view is protected as a whole
//!   before it is used. A needless protection costs a fault, and nothing else.
//! - The data that a server publishes ([`larder_export::view`]) is trusted only as far as errors harm that server: a
//!   wrong count of requests keeps pages in memory.
//! - A server that has exited is skipped: its successor repeats its requests before the guest is notified.
//! - When the managed process has ended, requests in flight still read its memory. The pages that they wait for are
//!   put in place through the view ([`Views::fill_waiting`]) until the server has unmapped them.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::io;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicBool, Ordering};

use larder_export::view::ViewMemory;
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};
use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use crate::attach::INJECT_LIMIT;
use crate::inject::{InjectError, with_stopped_thread};
use crate::state::Region;
use crate::target::{Viewer, mapped_by};
use crate::units::{PAGE_BYTES, PageIndex, PageRun};
use crate::userfaultfd::{self, Cause, Filled, Message, NEEDED_BY_VIEWS, Range, RawMessage, Userfaultfd, feature};

/// Maximum number of faults read from one view at a time.
const MESSAGES: usize = 16;

/// Error of adding a process that has managed memory mapped.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ViewError {
    #[error("{0}")]
    Inject(#[from] InjectError),
    #[error("process {pid}, which serves a disk of the VM: {what}: {source}", pid = .pid.as_raw_pid())]
    Failed {
        pid: Pid,
        what: &'static str,
        source: io::Error,
    },
}

/// Pages that a view has mapped at this address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Part {
    address: u64,
    run: PageRun,
}

impl Part {
    /// Returns the address range of the pages of `run` that this part maps.
    fn of(&self, run: PageRun) -> Option<Range> {
        let first = run.first.max(self.run.first);
        let end = run.end().min(self.run.end());
        (first < end).then(|| Range {
            start: self.address + u64::from(first.get() - self.run.first.get()) * PAGE_BYTES,
            len: u64::from(end.get() - first.get()) * PAGE_BYTES,
        })
    }

    fn page_at(&self, address: u64) -> Option<PageIndex> {
        let within = address.checked_sub(self.address)? / PAGE_BYTES;
        (within < u64::from(self.run.count)).then(|| self.run.first.plus(within as u32))
    }

    fn range(&self) -> Range {
        Range {
            start: self.address,
            len: self.run.bytes(),
        }
    }
}

/// Another process that has managed memory mapped.
pub struct View {
    pid: Pid,
    pidfd: OwnedFd,
    memory: ViewMemory,
    userfaultfd: Userfaultfd,
    number: u32,
    parts: Vec<Part>,
    /// Pages that threads of the process wait for.
    waiting: BTreeSet<PageIndex>,
    /// The epoch whose requests the pager waits for.
    waits_for: Option<u32>,
    has_ended: AtomicBool,
}

/// A view to be inspected. `wanted` counts the mappings whose registration its server had requested by then.
#[derive(Clone, Copy, Debug)]
pub struct ToLook {
    pid: Pid,
    wanted: u64,
}

/// Mappings found by an inspection of a view. They include all those whose registration the server had requested
/// before the inspection began.
pub struct Looked {
    of: ToLook,
    parts: Vec<Part>,
}

impl View {
    /// Makes a userfaultfd in that process, or takes the one that an earlier pager has left there.
    ///
    /// # Errors
    /// If the process has ended, or cannot be accessed.
    pub fn begin(viewer: Viewer) -> Result<Self, ViewError> {
        let Viewer { pid, descriptor } = viewer;
        let failed = |what| move |source: io::Error| ViewError::Failed { pid, what, source };
        let pidfd =
            pidfd_open(pid, PidfdFlags::empty()).map_err(|errno| failed("cannot open a pidfd")(errno.into()))?;
        let take = |number, what| {
            let taken = pidfd_getfd(&pidfd, number, PidfdGetfdFlags::empty());
            taken.map_err(|errno| failed(what)(errno.into()))
        };
        let memory = take(descriptor, "cannot fetch its view memory")?;
        let memory = ViewMemory::open(memory.as_fd()).map_err(failed("cannot read its view memory"))?;
        let left = memory.userfaultfd_number().filter(|number| {
            let found = std::fs::read_link(format!("/proc/{pid}/fd/{number}"));
            found.is_ok_and(|is| is.as_os_str() == "anon_inode:[userfaultfd]")
        });
        let number = match left {
            Some(number) => number,
            None => make_userfaultfd(pid)?,
        };
        let userfaultfd = Userfaultfd::new(take(number as i32, "cannot fetch its userfaultfd")?);
        userfaultfd::available()
            .and_then(|available| userfaultfd.enable(NEEDED_BY_VIEWS | available & feature::POISON))
            .map_err(failed("cannot enable the userfaultfd's features"))?;
        memory.set_userfaultfd_number(Some(number));
        Ok(Self {
            pid,
            pidfd,
            memory,
            userfaultfd,
            number,
            parts: Vec::new(),
            waiting: BTreeSet::new(),
            waits_for: None,
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
    pub fn look(&self, regions: &[Region]) -> io::Result<Looked> {
        Looked::now(self.to_look(), regions)
    }

    /// Prepares an inspection by another thread.
    fn to_look(&self) -> ToLook {
        ToLook {
            pid: self.pid,
            wanted: self.memory.wanted_and_served().0,
        }
    }

    /// Registers new mappings, so that their faults are reported from now on. With `protect` they are write-protected
    /// too.
    fn register(&mut self, looked: Looked, protect: bool) -> io::Result<()> {
        for part in &looked.parts {
            if self.parts.contains(part) {
                continue;
            }
            self.userfaultfd.register_missing(part.range())?;
            if protect {
                self.userfaultfd.protect(part.range())?;
            }
            // Threads that waited for an earlier pager retry.
            self.userfaultfd.wake(part.range())?;
        }
        self.parts = looked.parts;
        self.memory.serve(looked.of.wanted);
        Ok(())
    }

    /// Calls `what` with the parts of `run` that the process has mapped. Ranges that it has unmapped since are
    /// ignored.
    fn each(&self, run: PageRun, what: impl Fn(Range) -> io::Result<()>) -> io::Result<()> {
        for range in self.parts.iter().filter_map(|part| part.of(run)) {
            match what(range) {
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {
                    self.has_ended.store(true, Ordering::Relaxed)
                }
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
                done => done?,
            }
        }
        Ok(())
    }

    /// Removes the pages of `run` from the waiting set, and calls `what` for each.
    fn arrived(&mut self, run: PageRun, what: impl Fn(&Userfaultfd, Range) -> io::Result<()>) {
        if self.waiting.is_empty() {
            return;
        }
        let pages: Vec<PageIndex> = self.waiting.range(run.first..run.end()).copied().collect();
        for page in pages {
            self.waiting.remove(&page);
            let done = self.each(PageRun::one(page), |range| what(&self.userfaultfd, range));
            if done.is_err() {
                // The thread faults again.
                let _ = self.each(PageRun::one(page), |range| self.userfaultfd.wake(range));
            }
        }
    }

    fn receive(&mut self, found: &mut Vec<(PageIndex, Cause, bool)>) {
        let mut buffer = [RawMessage::default(); MESSAGES];
        let count = match self.userfaultfd.receive(&mut buffer) {
            Ok(count) => count,
            Err(_) => return self.has_ended.store(true, Ordering::Relaxed),
        };
        for raw in &buffer[..count] {
            let Some(Message::Fault {
                address, cause, write, ..
            }) = raw.decode()
            else {
                continue;
            };
            if let Some(page) = self.parts.iter().find_map(|part| part.page_at(address)) {
                self.waiting.insert(page);
                found.push((page, cause, write));
            } else {
                // A newer mapping, perhaps of another pager: the thread faults again.
                let page = Range {
                    start: address & !(PAGE_BYTES - 1),
                    len: PAGE_BYTES,
                };
                let _ = self.userfaultfd.wake(page);
            }
        }
    }

    /// Detaches from the process.
    pub(crate) fn let_go(self) {
        self.unregister();
        self.close();
    }

    /// Unregisters its memory, and wakes threads that wait. The userfaultfd does nothing any more, and a later pager
    /// makes its own.
    pub(crate) fn unregister(&self) {
        for part in &self.parts {
            let range = part.range();
            // Ranges that were unmapped, or whose process has ended, need no unregistering.
            let _ = self.userfaultfd.unprotect(range);
            let _ = self.userfaultfd.unregister(range);
        }
        self.memory.set_userfaultfd_number(None);
    }

    /// Closes the userfaultfd in the process. Does nothing to its memory, which may belong to another pager by now.
    fn close(self) {
        let closed = with_stopped_thread(self.pid, INJECT_LIMIT, |thread| thread.close(self.number as i32));
        match closed {
            Ok(_) | Err(InjectError::Gone { .. }) => {}
            Err(error) => tracing::warn!("an unused descriptor stays open in a disk server: {error}"),
        }
    }
}

impl Looked {
    /// Returns true if any of the regions is mapped.
    pub fn has_mapped(&self) -> bool {
        !self.parts.is_empty()
    }

    /// Inspects the mappings of the process. May take a while, so the pager's thread does not call it.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn now(of: ToLook, regions: &[Region]) -> io::Result<Self> {
        let mut parts = Vec::new();
        for region in regions.iter().filter(|region| !region.is_gone()) {
            for place in mapped_by(of.pid, region)? {
                let from = place.offset.max(region.offset);
                let end = (place.offset + place.bytes).min(region.offset + region.bytes());
                parts.push(Part {
                    address: place.address + (from - place.offset),
                    run: PageRun {
                        first: region.first.plus(((from - region.offset) / PAGE_BYTES) as u32),
                        count: ((end - from) / PAGE_BYTES) as u32,
                    },
                });
            }
        }
        Ok(Self { of, parts })
    }
}

fn make_userfaultfd(pid: Pid) -> Result<u32, ViewError> {
    let failed = |source| ViewError::Failed {
        pid,
        what: "cannot open /dev/userfaultfd",
        source,
    };
    let device = userfaultfd::device().map_err(failed)?;
    let (number, _) = with_stopped_thread(pid, INJECT_LIMIT, |thread| {
        let given = thread.give_descriptors(&[device.as_fd()])?;
        let made = userfaultfd::make_in(thread, given[0]);
        thread.close(given[0])?;
        made
    })?;
    Ok(number as u32)
}

/// All views of one managed process.
pub struct Views {
    all: RefCell<Vec<View>>,
    /// Epoll descriptor: readable when one of the userfaultfds is, that of the managed process included.
    events: OwnedFd,
    grace: Cell<Grace>,
    /// A view has ended.
    lost: Cell<bool>,
}

/// Counters of grace periods. In each, the pager waits for the requests that began before it.
#[derive(Clone, Copy, Default)]
struct Grace {
    begun: u64,
    ended: u64,
    wanted: u64,
}

impl Views {
    /// Makes an empty set. `userfaultfd` is that of the managed process.
    ///
    /// # Errors
    /// If a descriptor cannot be made.
    pub fn new(userfaultfd: &Userfaultfd) -> io::Result<Self> {
        let events = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        epoll::add(
            &events,
            userfaultfd,
            epoll::EventData::new_u64(0),
            epoll::EventFlags::IN,
        )?;
        Ok(Self {
            all: RefCell::default(),
            events,
            grace: Cell::default(),
            lost: Cell::new(false),
        })
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
        self.all.borrow().iter().map(View::pid).collect()
    }

    /// Adds a view with its mappings. `protect` must be set if pages may be clean, or being evicted, already.
    ///
    /// # Errors
    /// If the mappings cannot be registered, because another userfaultfd has them or the process has ended.
    pub fn add(&self, mut view: View, looked: Looked, protect: bool) -> io::Result<()> {
        view.register(looked, protect)?;
        let data = epoll::EventData::new_u64(0);
        epoll::add(&self.events, &view.userfaultfd, data, epoll::EventFlags::IN)?;
        tracing::info!(
            pid = view.pid.as_raw_pid(),
            "a disk server of the VM has its memory mapped"
        );
        self.all.borrow_mut().push(view);
        Ok(())
    }

    /// Returns the views that wait for an inspection, or all of them.
    pub fn to_look(&self, all: bool) -> Vec<ToLook> {
        let views = self.all.borrow();
        let waits = |view: &&View| {
            let (wanted, served) = view.memory.wanted_and_served();
            all || wanted != served
        };
        views.iter().filter(waits).map(View::to_look).collect()
    }

    /// Registers the result of an inspection.
    pub fn looked(&self, looked: Looked) {
        let mut all = self.all.borrow_mut();
        let Some(view) = all.iter_mut().find(|view| view.pid == looked.of.pid) else {
            return;
        };
        if let Err(error) = view.register(looked, true) {
            // The server still waits, and is inspected again.
            tracing::warn!(
                pid = view.pid.as_raw_pid(),
                "the mappings of a disk server of the VM cannot be registered: {error}"
            );
        }
    }

    /// Removes the views whose processes have ended. Returns true if there was one since the last call.
    pub fn leave_out_ended(&self) -> bool {
        let mut lost = self.lost.take();
        self.all.borrow_mut().retain(|view| {
            let now = Timespec { tv_sec: 0, tv_nsec: 0 };
            let mut events = [PollFd::from_borrowed_fd(view.pidfd.as_fd(), PollFlags::IN)];
            let has_ended = view.has_ended() || poll(&mut events, Some(&now)).is_ok_and(|count| count > 0);
            lost |= has_ended;
            !has_ended
        });
        lost
    }

    /// Reads at most `most` faults of all views: the page, the cause, and whether the thread wants to write.
    pub fn receive(&self, most: usize) -> Vec<(PageIndex, Cause, bool)> {
        let mut found = Vec::new();
        for view in &mut *self.all.borrow_mut() {
            if found.len() + MESSAGES <= most {
                view.receive(&mut found);
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
        all.iter()
            .try_for_each(|view| view.each(run, |range| view.userfaultfd.protect(range)))
    }

    /// Removes the write-protection of these pages in all views, and wakes threads that wait to write.
    ///
    /// # Errors
    /// If mappings are changing.
    pub fn unprotect(&self, run: PageRun) -> io::Result<()> {
        let mut all = self.all.borrow_mut();
        all.iter_mut().try_for_each(|view| {
            view.each(run, |range| view.userfaultfd.unprotect(range))?;
            view.waiting.retain(|page| *page < run.first || *page >= run.end());
            Ok(())
        })
    }

    /// Wakes threads of all views that wait for these pages, which are in place now. If the pages are not
    /// `protected`, the threads may also write.
    pub fn arrived(&self, run: PageRun, protected: bool) {
        for view in &mut *self.all.borrow_mut() {
            view.arrived(run, |userfaultfd, range| match protected {
                true => userfaultfd.wake(range),
                false => userfaultfd.unprotect(range),
            });
        }
    }

    /// Puts a page in place through a view in which a thread waits for it, because the managed process has ended.
    /// `fill` takes the view's userfaultfd and the page's address there.
    pub fn fill_waiting(&self, page: PageIndex, fill: impl Fn(&Userfaultfd, u64) -> Filled) -> Filled {
        let mut filled = Filled::Gone;
        for view in self.all.borrow().iter().filter(|view| view.waiting.contains(&page)) {
            let place = view.parts.iter().find_map(|part| part.of(PageRun::one(page)));
            if let Some(place) = place {
                filled = fill(&view.userfaultfd, place.start);
            }
            if filled == Filled::Done {
                break;
            }
        }
        if filled == Filled::Done {
            self.arrived(PageRun::one(page), false);
        }
        filled
    }

    /// Ends all waits for pages with a memory error.
    pub fn give_up_waiting(&self) {
        let waiting = |view: &View| view.waiting.iter().copied().collect::<Vec<_>>();
        let pages: Vec<PageIndex> = self.all.borrow().iter().flat_map(waiting).collect();
        pages.into_iter().for_each(|page| self.poison(page));
    }

    /// Wakes threads of all views that wait for these pages. They retry.
    pub fn wake(&self, run: PageRun) {
        for view in &mut *self.all.borrow_mut() {
            view.arrived(run, Userfaultfd::wake);
        }
    }

    /// Poisons a missing page in all views: a thread that touches it gets a memory error.
    pub fn poison(&self, page: PageIndex) {
        for view in &mut *self.all.borrow_mut() {
            let userfaultfd = &view.userfaultfd;
            let poisoned = view.each(PageRun::one(page), |range| match userfaultfd.poison(range.start) {
                Filled::Done | Filled::Present | Filled::Gone => Ok(()),
                Filled::Changing | Filled::NoMemory => Err(io::ErrorKind::Other.into()),
            });
            if poisoned.is_err() {
                tracing::debug!(?page, "cannot be poisoned now");
            }
            view.arrived(PageRun::one(page), Userfaultfd::wake);
        }
    }

    /// Returns a mark of the current time, for [`Self::io_has_ended`].
    pub fn io_mark(&self) -> u64 {
        if self.is_empty() {
            return 0;
        }
        let mut grace = self.grace.get();
        // The grace period in progress may have begun before some of the requests.
        grace.wanted = grace.begun + 1;
        self.grace.set(grace);
        grace.wanted
    }

    /// Returns true if all requests have ended that were in flight when `mark` was made.
    pub fn io_has_ended(&self, mark: u64) -> bool {
        let mut grace = self.grace.get();
        while grace.ended < mark {
            let mut all = self.all.borrow_mut();
            if grace.begun > grace.ended {
                let is_over =
                    |view: &View| view.has_ended() || view.waits_for.is_none_or(|epoch| view.memory.is_over(epoch));
                if !all.iter().all(is_over) {
                    break;
                }
                grace.ended = grace.begun;
            } else if grace.wanted > grace.ended {
                grace.begun += 1;
                for view in &mut *all {
                    view.waits_for = Some(view.memory.change_epoch());
                }
            } else {
                break;
            }
        }
        self.grace.set(grace);
        // Without views there was nothing to wait for.
        grace.ended >= mark
    }

    /// Calls `what` with all views.
    pub(crate) fn with<T>(&self, what: impl FnOnce(&[View]) -> T) -> T {
        what(&self.all.borrow())
    }

    /// Detaches from all views.
    pub(crate) fn let_go(&self) {
        self.all.take().into_iter().for_each(View::let_go);
    }

    /// Closes the descriptors in all views, which were unregistered before.
    pub(crate) fn close(&self) {
        self.all.take().into_iter().for_each(View::close);
    }
}
