//! The kernel of the simulated host: the pages of shared files, their mappings by the process, and userfaultfd, as in
//! Linux (mm/userfaultfd.c, fs/userfaultfd.c, mm/shmem.c, mm/memory.c).

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use larder_memory::state::Region;
use larder_memory::units::{PAGE_BYTES, PageIndex, PageRun};
use larder_memory::userfaultfd::{AddressRange, FaultCause, FillResult, RawUffdMessage, UffdMessage};

use super::content::{PageWords, WORDS};

/// A page of physical memory. Device I/O keeps it alive even after it has been punched out of its file.
pub(super) type Frame = Rc<RefCell<PageWords>>;

/// The process's page table entry.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Pte {
    None,
    Mapped {
        protected: bool,
    },
    /// Nothing is mapped; a later mapping is write-protected.
    Protected,
    /// An access gets SIGBUS.
    Poison,
}

struct Page {
    frame: Option<Frame>,
    pte: Pte,
}

/// A mapping of a file.
pub(super) struct MappedArea {
    pub(super) region: Region,
    /// True if the area is registered with userfaultfd.
    pub(super) is_registered: bool,
    /// True if the area is still mapped.
    pub(super) is_mapped: bool,
    /// True if the pager has closed the area's file, after the notification that it was unmapped.
    pub(super) is_forgotten: bool,
}

/// A thread that waits for a page.
struct Waiter {
    thread: usize,
    page: PageIndex,
    write: bool,
    cause: FaultCause,
    is_read: bool,
}

struct Event {
    message: UffdMessage,
    thread: usize,
}

/// Result of an access.
pub(super) enum Access {
    Done(Frame),
    Waits,
    MemoryError,
}

pub(super) struct Kernel {
    pages: Vec<Page>,
    pub(super) areas: Vec<MappedArea>,
    waiters: Vec<Waiter>,
    events: VecDeque<Event>,
    /// Number of threads that wait until their event is read, or whose event was read and that have not yet
    /// continued.
    changing: usize,
    /// Threads whose event was read.
    heard: Vec<usize>,
    /// True if memory allocations fail.
    pub(super) is_short: bool,
}

impl Kernel {
    pub(super) fn new() -> Self {
        Self {
            pages: Vec::new(),
            areas: Vec::new(),
            waiters: Vec::new(),
            events: VecDeque::new(),
            changing: 0,
            heard: Vec::new(),
            is_short: false,
        }
    }

    pub(super) fn pages(&self) -> u32 {
        self.pages.len() as u32
    }

    /// Adds a mapping, of pages after all others.
    pub(super) fn map(&mut self, pages: u32) -> Region {
        let region = Region {
            first: PageIndex::new(self.pages()),
            pages,
            address: (self.areas.len() as u64 + 1) << 32,
            offset: (self.areas.len() as u64 % 3) * PAGE_BYTES,
            device: 1,
            inode: self.areas.len() as u64 + 1,
        };
        self.pages.extend((0..pages).map(|_| Page { frame: None, pte: Pte::None }));
        self.areas.push(MappedArea { region, is_registered: false, is_mapped: true, is_forgotten: false });
        region
    }

    pub(super) fn area(&self, page: PageIndex) -> &MappedArea {
        let area = self.areas.iter().find(|area| area.region.contains(page));
        area.expect("every page belongs to an area")
    }

    fn page(&mut self, page: PageIndex) -> &mut Page {
        &mut self.pages[page.as_usize()]
    }

    pub(super) fn is_present(&self, page: PageIndex) -> bool {
        self.pages[page.as_usize()].frame.is_some()
    }

    /// Returns the number of pages in memory in mapped areas.
    pub(super) fn present_pages(&self) -> u32 {
        let mapped = self.areas.iter().filter(|area| area.is_mapped);
        mapped
            .flat_map(|area| (0..area.region.pages).filter(|offset| self.is_present(area.region.first.plus(*offset))))
            .count() as u32
    }

    // Operations of the process.

    pub(super) fn access(&mut self, thread: usize, page: PageIndex, write: bool) -> Access {
        let is_registered = self.area(page).is_registered;
        let of = self.page(page);
        let cause = match (of.pte, &of.frame) {
            (Pte::Poison, _) => return Access::MemoryError,
            (Pte::Mapped { protected }, Some(frame)) if !(protected && write && is_registered) => {
                return Access::Done(Rc::clone(frame));
            }
            (Pte::Mapped { .. }, Some(_)) => FaultCause::Protected,
            (Pte::Mapped { .. }, None) => unreachable!("a punched-out page is not mapped"),
            (Pte::None | Pte::Protected, Some(_)) => FaultCause::Minor,
            (Pte::None | Pte::Protected, None) => FaultCause::Missing,
        };
        if !is_registered {
            of.pte = Pte::Mapped { protected: false };
            let frame = of.frame.get_or_insert_with(|| Rc::new(RefCell::new([0; WORDS])));
            return Access::Done(Rc::clone(frame));
        }
        self.waiters.push(Waiter { thread, page, write, cause, is_read: false });
        Access::Waits
    }

    pub(super) fn is_waiting(&self, thread: usize) -> bool {
        self.waiters.iter().any(|waiter| waiter.thread == thread)
    }

    /// Returns one of the pages that a thread waits for; `pick` chooses an index below the count that it is given.
    pub(super) fn random_waited_page(&self, pick: impl FnOnce(u64) -> u64) -> Option<PageIndex> {
        let count = self.waiters.len() as u64;
        (count > 0).then(|| self.waiters[pick(count) as usize].page)
    }

    pub(super) fn waits_in(&self, region: &Region) -> bool {
        self.waiters.iter().any(|waiter| region.contains(waiter.page))
    }

    fn zap(&mut self, page: PageIndex) {
        let of = self.page(page);
        of.pte = match of.pte {
            Pte::Mapped { protected: true } => Pte::Protected,
            Pte::Mapped { protected: false } => Pte::None,
            other => other,
        };
    }

    /// Punches a page out of its file.
    pub(super) fn punch(&mut self, page: PageIndex) {
        self.zap(page);
        self.page(page).frame = None;
    }

    /// Removes the mapping of a page, as the host's reclaim does.
    pub(super) fn reclaim(&mut self, page: PageIndex) {
        self.zap(page);
    }

    fn range_of(&self, run: PageRun) -> AddressRange {
        let region = self.area(run.first).region;
        AddressRange { start: region.address_of(run.first), len: run.bytes() }
    }

    /// Begins `MADV_DONTNEED`, which sends an event and waits until it is read. Returns whether it must wait.
    pub(super) fn begin_dontneed(&mut self, thread: usize, run: PageRun) -> bool {
        if !self.area(run.first).is_registered {
            return false;
        }
        self.changing += 1;
        let message = UffdMessage::Removed(self.range_of(run));
        self.events.push_back(Event { message, thread });
        true
    }

    /// Lets the thread continue if its event was read. Returns whether it was.
    pub(super) fn take_event_read(&mut self, thread: usize) -> bool {
        let Some(index) = self.heard.iter().position(|heard| *heard == thread) else {
            return false;
        };
        self.heard.swap_remove(index);
        self.changing -= 1;
        true
    }

    /// Completes `MADV_DONTNEED`: removes the mappings of the pages, and their poison if `drops_poison` is set.
    pub(super) fn finish_dontneed(&mut self, run: PageRun, drops_poison: bool) {
        for page in run.pages() {
            self.zap(page);
            let of = self.page(page);
            if drops_poison && of.pte == Pte::Poison {
                of.pte = Pte::None;
            }
        }
    }

    pub(super) fn unmap(&mut self, thread: usize, area: usize) -> bool {
        let region = self.areas[area].region;
        self.areas[area].is_mapped = false;
        let run = PageRun { first: region.first, count: region.pages };
        for page in run.pages() {
            self.page(page).pte = Pte::None;
        }
        if !self.areas[area].is_registered {
            return false;
        }
        self.changing += 1;
        self.events.push_back(Event { message: UffdMessage::Unmapped(self.range_of(run)), thread });
        true
    }

    // Operations of the pager.

    /// Registers the area with userfaultfd, so that its faults are reported.
    pub(super) fn register(&mut self, first: PageIndex) {
        let area = self.areas.iter_mut().find(|area| area.region.first == first);
        area.expect("the area was mapped").is_registered = true;
    }

    /// Records that the pager has closed the file of an area.
    pub(super) fn forget(&mut self, first: PageIndex) {
        let area = self.areas.iter_mut().find(|area| area.region.first == first);
        area.expect("the area was mapped").is_forgotten = true;
    }

    /// Ends userfaultfd for all memory.
    pub(super) fn unregister_all(&mut self) {
        for page in &mut self.pages {
            page.pte = match page.pte {
                Pte::Mapped { .. } => Pte::Mapped { protected: false },
                Pte::Protected => Pte::None,
                other => other,
            };
        }
        for area in &mut self.areas {
            area.is_registered = false;
        }
        self.waiters.clear();
        self.heard.extend(self.events.drain(..).map(|event| event.thread));
    }

    pub(super) fn receive(&mut self, buffer: &mut [RawUffdMessage]) -> usize {
        let mut count = 0;
        for waiter in self.waiters.iter_mut().filter(|waiter| !waiter.is_read) {
            if count == buffer.len() {
                return count;
            }
            waiter.is_read = true;
            let area = self.areas.iter().find(|area| area.region.contains(waiter.page));
            let message = UffdMessage::Fault {
                address: area.map_or(0, |area| area.region.address_of(waiter.page)),
                write: waiter.write,
                cause: waiter.cause,
                thread: waiter.thread as u32 + 100,
            };
            buffer[count] = message.into();
            count += 1;
        }
        while count < buffer.len()
            && let Some(event) = self.events.pop_front()
        {
            buffer[count] = event.message.into();
            self.heard.push(event.thread);
            count += 1;
        }
        count
    }

    pub(super) fn has_unread_messages(&self) -> bool {
        self.waiters.iter().any(|waiter| !waiter.is_read) || !self.events.is_empty()
    }

    pub(super) fn wake(&mut self, run: PageRun) {
        self.waiters.retain(|waiter| waiter.page < run.first || waiter.page >= run.end());
    }

    fn cannot(&self, page: PageIndex) -> Option<FillResult> {
        let area = self.area(page);
        if !area.is_mapped || !area.is_registered {
            return Some(FillResult::Unmapped);
        }
        (self.changing > 0).then_some(FillResult::MappingChanged)
    }

    /// UFFDIO_COPY or UFFDIO_ZEROPAGE of one page.
    pub(super) fn copy(&mut self, page: PageIndex, arguments: PageWords, protected: bool) -> FillResult {
        if let Some(reason) = self.cannot(page) {
            return reason;
        }
        if self.is_short {
            return FillResult::NoMemory;
        }
        let of = self.page(page);
        if of.frame.is_some() {
            return FillResult::AlreadyPresent;
        }
        of.frame = Some(Rc::new(RefCell::new(arguments)));
        of.pte = Pte::Mapped { protected };
        self.wake(PageRun::one(page));
        FillResult::Done
    }

    /// UFFDIO_CONTINUE. Waiting threads are woken in any case.
    pub(super) fn resolve_minor(&mut self, page: PageIndex) {
        if self.cannot(page).is_none() {
            let of = self.page(page);
            if of.frame.is_some() && !matches!(of.pte, Pte::Mapped { .. }) {
                of.pte = Pte::Mapped { protected: false };
            }
        }
        self.wake(PageRun::one(page));
    }

    /// UFFDIO_WRITEPROTECT. Returns whether it was possible.
    pub(super) fn protect(&mut self, run: PageRun, protected: bool) -> bool {
        if run.pages().any(|page| self.cannot(page).is_some()) {
            return false;
        }
        for page in run.pages() {
            let of = self.page(page);
            of.pte = match (of.pte, protected) {
                (Pte::Mapped { .. }, protected) => Pte::Mapped { protected },
                (Pte::None, true) => Pte::Protected,
                (Pte::Protected, false) => Pte::None,
                (other, _) => other,
            };
        }
        if !protected {
            self.wake(run);
        }
        true
    }

    /// UFFDIO_POISON.
    pub(super) fn poison(&mut self, page: PageIndex) -> FillResult {
        if let Some(reason) = self.cannot(page) {
            return reason;
        }
        let of = self.page(page);
        if of.pte != Pte::None {
            return FillResult::AlreadyPresent;
        }
        of.pte = Pte::Poison;
        self.wake(PageRun::one(page));
        FillResult::Done
    }

    /// Returns the file's content; zeros where there is no page.
    pub(super) fn read(&self, page: PageIndex) -> PageWords {
        match &self.pages[page.as_usize()].frame {
            Some(frame) => *frame.borrow(),
            None => [0; WORDS],
        }
    }
}
