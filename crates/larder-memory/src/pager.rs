//! The pager: answers faults, and keeps the memory within its limit by sending cold pages away.
//!
//! One thread owns it. It decides everything; what takes time and needs no decision is done by a [`Worker`] beside it.
//! It keeps nothing that a successor would miss: where each page is stands in the [`State`], and which pages are in
//! memory the kernel knows.
//!
//! # The phases of a page
//! ```text
//!            fault: zeros, or from a tier              chosen to go: write-protected
//!   Absent ─────────────────────────────▶ Resident ──────────────────────────────▶ Leaving
//!     ▲                                      ▲                                        │ copied, and the entry
//!     │ it is out of the file                └──── it was written to: stays ──────────┤ leads to the copy
//!     └────────────────────────────── Punching ◀──────────────────────────────────────┘
//! ```
//! - *Leaving*: reads go on, a write waits until the page is free again. The copy counts once the entry leads to it.
//! - *Punching*: whoever touches the page waits until it is out, and then gets the copy. Nothing can be written to it any
//!   more, so the copy is what is in memory, wherever this process is killed: the successor finds the page in memory,
//!   and drops the copy, or finds it gone, and uses the copy.
//! - A page that is in memory although it should not be wins over its copy, always: whoever has put it there came later.
//!
//! # What goes
//! The process may give pages up (a balloon, free page reporting, virtio-mem): it takes them out of the file and
//! then says so (`MADV_DONTNEED`), which the kernel tells us. Such a page reads as zeros from then on, whatever is in memory
//! or stored of it: in between it may have been put in place, with what it had before. Not understood is a process that
//! takes pages out and says nothing (`fallocate` alone): of pages that are in memory it gets zeros, of those that are not
//! the copy. One that says so and leaves them in the file (which by itself changes nothing in shared memory) gets zeros.

mod adopt;
mod ahead;
mod balance;
mod check;
mod detach;
mod disk;
mod evict;
mod fault;
mod figures;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_codec::Decoder;

use crate::crypt::Cipher;
use crate::entry::{Location, Tier, Word};
use crate::guest::GuestMemory;
use crate::lists::{Lists, Queue};
use crate::log::{SEGMENT, Segments, object_bytes};
use crate::pressure::{Meter, Pressure};
use crate::shared::SharedMemory;
use crate::state::{Region, State};
use crate::store::Store;
use crate::units::{PAGE, PAGE_BYTES, PageIndex, PageRun};
use crate::userfaultfd::{Message, RawMessage};
use crate::worker::{Job, Lease, Worker};

pub use disk::DiskStatus;
pub use evict::COMPRESSED_BYTES_MIN;
pub use figures::{Figures, Source};

use ahead::Streams;
use disk::Disks;
use evict::Batches;

/// How the pager is to work.
#[derive(Clone, Debug)]
pub struct Options {
    /// How much memory may be used in all, in bytes: what is in memory of the process, compressed pages, and what the
    /// pager itself needs for each page.
    pub limit_bytes: u64,
    /// How much of that may be compressed pages, in bytes.
    pub compressed_bytes: u64,
    /// How long a page stays in memory after writes to it have been stopped, because device I/O that has begun before
    /// still writes to it. Nothing, where there is no such I/O.
    pub quarantine: Duration,
    /// The number of the thread whose faults are answered first: QEMU's main one, whose stall stops everything.
    pub first_thread: Option<u32>,
    /// Pages are brought besides those that are wanted, where somebody goes through memory.
    pub prefetch: bool,
    /// How many threads of the process do its work: nothing goes on while all of them wait.
    pub workers: usize,
}

/// Where a page is, as far as its owner knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Absent,
    Resident,
    Punching,
    /// It is being read from a disk.
    Reading,
    /// In this eviction.
    Leaving(u8),
}

/// The phases of all pages, a byte each.
struct Phases(Vec<u8>);

const LEAVING: u8 = 0x80;

impl Phases {
    fn get(&self, page: PageIndex) -> Phase {
        match self.0[page.as_usize()] {
            0 => Phase::Absent,
            1 => Phase::Resident,
            2 => Phase::Punching,
            3 => Phase::Reading,
            batch => Phase::Leaving(batch & !LEAVING),
        }
    }

    fn set(&mut self, page: PageIndex, phase: Phase) {
        self.0[page.as_usize()] = match phase {
            Phase::Absent => 0,
            Phase::Resident => 1,
            Phase::Punching => 2,
            Phase::Reading => 3,
            Phase::Leaving(batch) => LEAVING | batch,
        };
    }
}

/// Somebody waits for a page that cannot be had now.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    since: Instant,
    /// To write to it.
    write: bool,
}

/// See the module's description.
pub struct Pager<G, W> {
    guest: G,
    worker: W,
    state: Arc<State>,
    compressed: Arc<SharedMemory>,
    options: Options,
    regions: Vec<Region>,
    phases: Phases,
    lists: Lists,
    /// How many pages are in memory: of all phases but absent.
    present: u32,
    /// The log of compressed RAM.
    ram: Segments,
    disks: Disks,
    /// Pages that the worker takes out of memory.
    punching: usize,
    /// Pages that are being read.
    reading: usize,
    streams: Streams,
    /// Those of pages that nobody has written to.
    zero_streams: Streams,
    /// The segment that is being filled, unless the worker has it.
    lease: Option<Lease>,
    /// The worker has the lease.
    lease_is_out: bool,
    batches: Batches,
    /// Those who wait until their page is out of memory.
    waiting: HashMap<PageIndex, Waiting>,
    /// Those who wait until there is room, in the order of their coming.
    stalled: VecDeque<(PageIndex, Waiting)>,
    /// Those of which the protection was lifted for somebody a moment ago, and when.
    let_write: Vec<(PageIndex, Instant)>,
    /// Those that were lost, and given up since.
    to_clear: Vec<PageIndex>,
    /// One that was lost could not be made unreadable.
    is_unmarked: bool,
    decoder: Decoder,
    content: Box<[u8; PAGE]>,
    /// For what is on disks, if that is enciphered.
    cipher: Option<Cipher>,
    /// An object of a disk, deciphered.
    deciphered: Box<[u8]>,
    /// Pages that are put in place together.
    ahead: Box<[u8]>,
    figures: Figures,
    pressure: Meter,
    stored: StoredPages,
    /// Why nothing is evicted, since when; told once until it is over.
    stuck: Option<(Stuck, Instant)>,
    /// Tries since that brought nothing.
    stuck_tries: u32,
    told_stuck: Option<(Stuck, Instant)>,
    /// There was no memory for a page, or writes could not be stopped: nothing of it is tried again before.
    no_memory_until: Option<Instant>,
    /// When the log had that last.
    no_memory_logged: Option<Instant>,
    no_eviction_until: Option<Instant>,
    /// So many pages one after the other could not be compressed.
    kept_in_row: u32,
    /// Jobs that the worker has.
    jobs: u32,
    /// See [`Self::pause_evictions`].
    are_evictions_paused: bool,
    /// All is to be brought back.
    is_leaving: bool,
    /// Up to here it has been.
    brought_back: u32,
    /// When this turn began.
    now: Instant,
}

/// How many pages are stored where.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StoredPages {
    /// As one word.
    pub uniform: u32,
    /// In compressed RAM.
    pub ram: u32,
    /// In the swap cache on an SSD.
    pub ssd: u32,
    /// In the slow store.
    pub slow: u32,
    /// On one of these disks, and in memory too.
    pub clean: u32,
    /// They cannot be read any more.
    pub lost: u32,
}

impl StoredPages {
    fn of(&mut self, word: Word) -> Option<&mut u32> {
        match word.decode() {
            Some(Location::Uniform { .. }) => Some(&mut self.uniform),
            Some(Location::In { clean: true, .. }) => Some(&mut self.clean),
            Some(Location::In { tier: Tier::Ram, .. }) => Some(&mut self.ram),
            Some(Location::In { tier: Tier::Ssd, .. }) => Some(&mut self.ssd),
            Some(Location::In { tier: Tier::Slow, .. }) => Some(&mut self.slow),
            Some(Location::Lost) => Some(&mut self.lost),
            Some(Location::Nowhere) | None => None,
        }
    }

    fn change(&mut self, from: Word, to: Word) {
        if let Some(count) = self.of(from) {
            *count -= 1;
        }
        if let Some(count) = self.of(to) {
            *count += 1;
        }
    }
}

/// Why the limit is not kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Stuck {
    /// All tiers have all the room that they may have.
    TiersFull,
    /// Compressed pages have all the room that they may have, and the disk below cannot be written to.
    DiskFailed,
    /// Pages cannot be read or taken out of memory.
    Memory,
    /// No page can be compressed, and there is no tier for such pages.
    Incompressible,
}

/// Bytes that the pager needs for each page, in memory or not: entry, phase, links.
pub const OVERHEAD_BYTES: u64 = 16 + 1 + 9;

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    /// For the memory `guest`, which `state` tells of. Of its pages those in `present`, in rising order, are in memory.
    /// What an earlier pager has left is taken over. `stores` are the disks, the fastest first.
    ///
    /// From here on all faults must be answered by it.
    pub fn new(
        guest: G,
        worker: W,
        state: Arc<State>,
        compressed: Arc<SharedMemory>,
        stores: Vec<(Tier, Box<dyn Store>)>,
        present: &[PageRun],
        options: Options,
    ) -> Self {
        let regions = state.regions();
        let pages = regions.last().map_or(0, |last| last.first.get() + last.pages);
        let pressure = Meter::new(options.workers, Instant::now());
        let mut pager = Self {
            guest,
            worker,
            phases: Phases(vec![0; pages as usize]),
            lists: Lists::new(pages),
            present: 0,
            ram: Segments::new((compressed.len() / SEGMENT) as u32),
            disks: Disks::new(stores),
            punching: 0,
            reading: 0,
            options,
            streams: Streams::default(),
            zero_streams: Streams::default(),
            cipher: state.cipher(),
            state,
            compressed,
            regions,
            lease: None,
            lease_is_out: false,
            batches: Batches::default(),
            waiting: HashMap::new(),
            stalled: VecDeque::new(),
            let_write: Vec::new(),
            to_clear: Vec::new(),
            is_unmarked: false,
            decoder: Decoder::new(),
            content: Box::new([0; PAGE]),
            deciphered: vec![0; object_bytes(PAGE as u16)].into_boxed_slice(),
            ahead: vec![0; disk::AHEAD_PAGES * PAGE].into_boxed_slice(),
            figures: Figures::default(),
            pressure,
            stored: StoredPages::default(),
            stuck: None,
            stuck_tries: 0,
            told_stuck: None,
            no_memory_until: None,
            no_memory_logged: None,
            no_eviction_until: None,
            kept_in_row: 0,
            jobs: 0,
            are_evictions_paused: false,
            is_leaving: false,
            brought_back: 0,
            now: Instant::now(),
        };
        pager.adopt(present);
        pager
    }

    /// What it has done so far.
    pub fn figures(&self) -> &Figures {
        &self.figures
    }

    /// The limit, in bytes.
    pub fn limit_bytes(&self) -> u64 {
        self.options.limit_bytes
    }

    /// How much of the limit may be compressed pages, in bytes.
    pub fn compressed_limit_bytes(&self) -> u64 {
        self.options.compressed_bytes
    }

    /// Sets the limit and how much of it may be compressed pages, in bytes.
    pub fn set_limit(&mut self, limit_bytes: u64, compressed_bytes: u64) {
        self.options.limit_bytes = limit_bytes;
        self.options.compressed_bytes = compressed_bytes;
        self.is_stuck_no_more();
        self.kept_in_row = 0;
    }

    /// Pauses evictions, before the first turn, or resumes them: while another process may write to memory without a fault,
    /// no page is evicted, and no stored copy of a page in memory is valid.
    pub fn pause_evictions(&mut self, pause: bool) {
        if self.are_evictions_paused == pause {
            return;
        }
        self.are_evictions_paused = pause;
        match pause {
            true => tracing::warn!(
                "no page is evicted until all servers of the VM's disks are served: memory may exceed its budget"
            ),
            false => tracing::info!("all servers of the VM's disks are served: pages are evicted again"),
        }
    }

    /// Returns true while evictions are paused.
    pub fn are_evictions_paused(&self) -> bool {
        self.are_evictions_paused
    }

    /// The guest's memory.
    pub fn guest(&self) -> &G {
        &self.guest
    }

    /// Does all that there is to do now; whether there was anything.
    ///
    /// # Errors
    /// The process has ended.
    pub fn turn(&mut self, now: Instant) -> io::Result<bool> {
        self.now = now;
        let mut worked = self.receive()?;
        while let Some(done) = self.worker.take(None) {
            self.done(done);
            worked = true;
        }
        worked |= self.take_from_disks();
        worked |= self.balance(now);
        if worked {
            self.pressure.waits(self.stalled(), Instant::now());
        }
        Ok(worked)
    }

    /// The worker wakes `waker` when there is more; whether there is something already.
    pub fn wake_by(&mut self, waker: &std::task::Waker) -> bool {
        match self.worker.take(Some(waker)) {
            Some(done) => {
                self.done(done);
                true
            }
            None => false,
        }
    }

    fn receive(&mut self) -> io::Result<bool> {
        let state = Arc::clone(&self.state);
        // SAFETY: memory of the state, valid for all values of a message; only this thread uses it.
        let messages: &mut [RawMessage] = unsafe { state.messages().as_mut() };
        let count = self.guest.receive(messages)?;
        if count > 0 {
            self.pressure.waits(self.stalled() + count, Instant::now());
        }
        let messages = &mut messages[..count];
        self.handle(messages);
        Ok(count > 0)
    }

    /// Handles messages, and clears each.
    fn handle(&mut self, messages: &mut [RawMessage]) {
        // Whoever has given pages up goes on as soon as that was read, and may use them again: what is brought for others
        // must not bring what was there, or put there what is then taken out.
        for raw in messages.iter_mut() {
            match raw.decode() {
                Some(Message::Removed(range)) => self.removed(range, false),
                Some(Message::Unmapped(range)) => self.removed(range, true),
                _ => continue,
            }
            *raw = RawMessage::default();
        }
        if let Some(first) = self.options.first_thread
            && messages.len() > 1
        {
            for raw in messages.iter_mut() {
                if let Some(Message::Fault {
                    address,
                    write,
                    cause,
                    thread,
                }) = raw.decode()
                    && thread == first
                {
                    self.fault_at(address, cause, write);
                    *raw = RawMessage::default();
                }
            }
        }
        for raw in messages {
            match raw.decode() {
                // Heard above.
                None | Some(Message::Removed(_) | Message::Unmapped(_)) => {}
                Some(Message::Fault {
                    address, cause, write, ..
                }) => self.fault_at(address, cause, write),
                Some(Message::Other(event)) => tracing::warn!("the kernel tells event {event:#x}, which is not known"),
            }
            *raw = RawMessage::default();
        }
    }

    fn page_at(&self, address: u64) -> Option<PageIndex> {
        self.regions.iter().find_map(|region| region.page_at(address))
    }

    /// What is used of the limit, in bytes.
    pub fn used_bytes(&self) -> u64 {
        u64::from(self.present) * PAGE_BYTES
            + self.compressed_bytes()
            + self.overhead_bytes()
            + self.disks.buffer_bytes()
            + self.streams.bytes()
    }

    /// What compressed pages take, in bytes.
    pub fn compressed_bytes(&self) -> u64 {
        u64::from(self.ram.allocated()) * SEGMENT as u64
    }

    fn overhead_bytes(&self) -> u64 {
        self.phases.0.len() as u64 * OVERHEAD_BYTES
    }

    /// How many pages are in memory.
    pub fn present_pages(&self) -> u32 {
        self.present
    }

    /// Why the limit is not kept, if it is not.
    pub fn stuck(&self) -> Option<Stuck> {
        self.stuck.map(|(why, _)| why)
    }

    /// How many pages are stored where.
    pub fn stored_pages(&self) -> StoredPages {
        self.stored
    }

    /// How many pages there are.
    pub fn pages(&self) -> u32 {
        self.phases.0.len() as u32
    }

    /// How much of the time was lost by waiting until now.
    pub fn pressure(&mut self, now: Instant) -> Pressure {
        self.pressure.look(now)
    }

    /// How many who wait for a page cannot be answered now.
    pub fn stalled(&self) -> usize {
        self.stalled.len() + self.waiting.len()
    }

    /// The regions.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// There is a region more, which the state knows, and of which faults are told since a moment ago. Of its pages those
    /// in `present`, in rising order, are in memory.
    pub fn add_region(&mut self, region: Region, present: &[PageRun]) {
        let pages = region.first.get() + region.pages;
        self.phases.0.resize(pages as usize, 0);
        self.lists.grow(pages);
        self.regions.push(region);
        for page in present.iter().flat_map(|run| run.pages()) {
            self.settle(page, Queue::Probation);
        }
        self.guest.wake(PageRun {
            first: region.first,
            count: region.pages,
        });
    }

    /// `page` is in memory now, and may go some time.
    fn settle(&mut self, page: PageIndex, queue: Queue) {
        match self.phases.get(page) {
            Phase::Absent => self.present += 1,
            Phase::Resident => self.lists.remove(page),
            Phase::Punching | Phase::Leaving(_) => {}
            Phase::Reading => unreachable!("it is absent first"),
        }
        self.phases.set(page, Phase::Resident);
        self.lists.push(queue, page);
    }

    /// `page` is not in memory any more.
    fn vanish(&mut self, page: PageIndex) {
        match self.phases.get(page) {
            Phase::Absent | Phase::Reading => return,
            Phase::Resident => self.lists.remove(page),
            Phase::Punching | Phase::Leaving(_) => {}
        }
        self.phases.set(page, Phase::Absent);
        self.present -= 1;
    }

    fn give(&mut self, job: Job) {
        self.jobs += 1;
        self.worker.give(job);
    }

    /// `page` is there, or nowhere, or what `word` says. What the entry said before is not looked at.
    fn set_word(&mut self, page: PageIndex, word: Word) {
        self.stored.change(self.state.word(page), word);
        self.state.replace(page, word);
    }
}
