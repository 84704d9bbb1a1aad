//! Memory, a disk and a worker for a pager, all in this process.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex, MutexGuard};
use std::task::Waker;

use larder_block::AlignedBuf;
use larder_codec::PAGE;
use larder_memory::guest::{Backing, GuestMemory};
use larder_memory::segment_log::{SEGMENT_BYTES, SegmentIndex};
use larder_memory::state::Region;
use larder_memory::store::{ReadId, SegmentStore, StoreCompletion};
use larder_memory::units::{PageIndex, PageRun};
use larder_memory::userfaultfd::{FillResult, RawUffdMessage};
use larder_memory::worker::{Job, Worker, WorkerResult, WorkerState};

#[derive(Clone, PartialEq)]
pub enum Page {
    Missing,
    Poisoned,
    There(Box<[u8; PAGE]>),
}

#[derive(Clone)]
pub struct Guest(Arc<Mutex<Inner>>);

struct Inner {
    pages: Vec<Page>,
    messages: VecDeque<RawUffdMessage>,
}

impl Guest {
    pub fn new(pages: u32) -> Self {
        Self(Arc::new(Mutex::new(Inner { pages: vec![Page::Missing; pages as usize], messages: VecDeque::new() })))
    }

    fn inner(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().expect("nobody has panicked")
    }

    pub fn page(&self, page: u32) -> Page {
        self.inner().pages[page as usize].clone()
    }

    pub fn tell(&self, message: [u8; 32]) {
        self.inner().messages.push_back(RawUffdMessage::from_bytes(message));
    }

    fn put(&self, page: PageIndex, content: &[u8; PAGE]) -> FillResult {
        match self.inner().pages.get_mut(page.as_usize()) {
            Some(place @ Page::Missing) => {
                *place = Page::There(Box::new(*content));
                FillResult::Done
            }
            Some(_) => FillResult::AlreadyPresent,
            None => FillResult::Unmapped,
        }
    }
}

impl GuestMemory for Guest {
    fn receive(&self, buffer: &mut [RawUffdMessage]) -> io::Result<usize> {
        let mut inner = self.inner();
        let count = inner.messages.len().min(buffer.len());
        for (into, message) in buffer.iter_mut().zip(inner.messages.drain(..count)) {
            *into = message;
        }
        Ok(count)
    }

    fn fill(&self, first: PageIndex, content: &[u8], _protect: bool) -> (usize, FillResult) {
        let (pages, _) = content.as_chunks::<PAGE>();
        for (index, content) in pages.iter().enumerate() {
            match self.put(first.plus(index as u32), content) {
                FillResult::Done => {}
                other => return (index, other),
            }
        }
        (pages.len(), FillResult::Done)
    }

    fn fill_zero(&self, page: PageIndex) -> FillResult {
        self.put(page, &[0; PAGE])
    }

    fn poison(&self, page: PageIndex) -> FillResult {
        match self.inner().pages.get_mut(page.as_usize()) {
            Some(place @ Page::Missing) => {
                *place = Page::Poisoned;
                FillResult::Done
            }
            Some(_) => FillResult::AlreadyPresent,
            None => FillResult::Unmapped,
        }
    }

    fn map(&self, _page: PageIndex) {}

    fn protect(&self, _run: PageRun) -> io::Result<()> {
        Ok(())
    }

    fn unprotect(&self, _run: PageRun) -> io::Result<()> {
        Ok(())
    }

    fn wake(&self, _run: PageRun) {}

    fn visit_resident(&self, run: PageRun, found: &mut dyn FnMut(PageRun)) -> io::Result<()> {
        let there: Vec<PageIndex> = {
            let inner = self.inner();
            let is_there = |page: &PageIndex| matches!(inner.pages.get(page.as_usize()), Some(Page::There(_)));
            run.pages().filter(is_there).collect()
        };
        there.into_iter().for_each(|page| found(PageRun::one(page)));
        Ok(())
    }

    fn read(&self, page: PageIndex, into: &mut [u8; PAGE]) -> io::Result<()> {
        Backing::read(self, PageRun::one(page), into)
    }

    fn remove_pages(&self, run: PageRun) -> io::Result<()> {
        self.punch(run)
    }

    fn drop_region(&self, _region: &Region) {}
}

impl Backing for Guest {
    fn read(&self, run: PageRun, into: &mut [u8]) -> io::Result<()> {
        let (pages, _) = into.as_chunks_mut::<PAGE>();
        for (page, into) in run.pages().zip(pages) {
            match self.inner().pages.get(page.as_usize()) {
                Some(Page::There(content)) => *into = **content,
                _ => into.fill(0),
            }
        }
        Ok(())
    }

    fn punch(&self, run: PageRun) -> io::Result<()> {
        for page in run.pages() {
            if let Some(place @ Page::There(_)) = self.inner().pages.get_mut(page.as_usize()) {
                *place = Page::Missing;
            }
        }
        Ok(())
    }

    fn visit_resident(&self, run: PageRun, found: &mut dyn FnMut(PageRun)) -> io::Result<()> {
        GuestMemory::visit_resident(self, run, found)
    }
}

/// Worker that does every job immediately.
pub struct AtOnce {
    hands: RefCell<WorkerState>,
    done: RefCell<VecDeque<WorkerResult>>,
}

impl AtOnce {
    pub fn new(hands: WorkerState) -> Self {
        Self { hands: RefCell::new(hands), done: RefCell::default() }
    }
}

impl Worker for AtOnce {
    fn submit(&self, job: Job) {
        let done = self.hands.borrow_mut().run_job(job);
        self.done.borrow_mut().push_back(done);
    }

    fn next_result(&self, _waker: Option<&Waker>) -> Option<WorkerResult> {
        self.done.borrow_mut().pop_front()
    }
}

/// A disk in memory.
pub struct Disk {
    pub bytes: Rc<RefCell<Vec<u8>>>,
    finished: RefCell<VecDeque<StoreCompletion>>,
}

impl Disk {
    pub fn new(bytes: Rc<RefCell<Vec<u8>>>) -> Self {
        Self { bytes, finished: RefCell::default() }
    }
}

impl SegmentStore for Disk {
    fn name(&self) -> &str {
        "a disk"
    }

    fn segments(&self) -> u32 {
        (self.bytes.borrow().len() / SEGMENT_BYTES) as u32
    }

    fn block_bytes(&self) -> usize {
        512
    }

    fn write(&self, segment: SegmentIndex, bytes: AlignedBuf) {
        let at = segment.start() as usize;
        self.bytes.borrow_mut()[at..at + SEGMENT_BYTES].copy_from_slice(&bytes);
        self.finished.borrow_mut().push_back(StoreCompletion::Written { segment, bytes, failed: None });
    }

    fn read(&self, start: u64, len: usize, mut bytes: AlignedBuf, ticket: ReadId) {
        let at = start as usize;
        bytes[..len].copy_from_slice(&self.bytes.borrow()[at..at + len]);
        self.finished.borrow_mut().push_back(StoreCompletion::Read { read_id: ticket, bytes, failed: None });
    }

    fn next_completion(&self) -> Option<StoreCompletion> {
        self.finished.borrow_mut().pop_front()
    }
}
