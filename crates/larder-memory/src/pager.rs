//! The pager resolves faults, and keeps the memory within its limit by evicting cold pages.
//!
//! One thread owns the pager and makes all decisions. Slow work that needs no decision runs on a [`Worker`] in
//! another thread. Everything that a successor needs is outside the pager: the location of each page is in the
//! [`PagerState`], and the kernel knows which pages are in memory.
//!
//! # The phases of a page
//! ```text
//!            fault: zeros, or from a tier          chosen for eviction: write-protected
//!   Absent ─────────────────────────────▶ Resident ──────────────────────────────▶ Leaving
//!     ▲                                      ▲                                        │ copied, and the entry
//!     │ removed from the file                └──── written to: eviction cancelled ────┤ points to the copy
//!     └────────────────────────────── Punching ◀──────────────────────────────────────┘
//! ```
//! - *Leaving*: the page can be read. A write waits until the page is unprotected. The copy is valid once the entry
//!   points to it.
//! - *Punching*: a thread that touches the page waits until the page is removed, and then gets the copy. No write can
//!   reach the page any more, so memory and copy are equal wherever this process is killed. A successor that finds
//!   the page in memory drops the copy; a successor that finds it missing uses the copy.
//! - A page that is unexpectedly in memory always takes precedence over its copy, because it was put there later.
//!
//! # Memory that the process gives up
//! The process may give pages up (balloon, free page reporting, virtio-mem). It punches a hole in the file and then
//! calls `madvise(MADV_DONTNEED)`, which the kernel reports to the pager. From then on the page reads as zeros,
//! whatever is in memory or stored of it, because the pager may have put the old content back between the two calls.
//! A detach waits for such reports (`detach.rs`).
//!
//! A process that only punches holes (`fallocate` alone) is not supported: it gets zeros for pages that were in
//! memory, and the old copy for evicted pages. A process that only calls `MADV_DONTNEED`, which by itself changes
//! nothing in shared memory, gets zeros.

mod adopt;
mod balance;
mod check;
mod detach;
mod disk;
mod evict;
mod fault;
mod prefetch;
mod stats;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use larder_codec::Decoder;

use crate::crypt::Cipher;
use crate::entry::{CopyLocation, EntryWord, Tier};
use crate::guest::GuestMemory;
use crate::pressure::{Pressure, PressureMeter};
use crate::resident_queues::{ResidentQueue, ResidentQueues};
use crate::segment_log::{SEGMENT_BYTES, SegmentTable, object_bytes};
use crate::shared::SharedMemory;
use crate::state::{PagerState, Region};
use crate::store::SegmentStore;
use crate::units::{PAGE, PAGE_BYTES, PageIndex, PageRun};
use crate::userfaultfd::{RawUffdMessage, UffdMessage};
use crate::worker::{Job, SegmentLease, Worker};

pub use detach::HOLE_REPORT_DELAY_MAX;
pub use disk::DiskStatus;
pub use evict::COMPRESSED_BYTES_MIN;
pub use stats::{PageSource, PagerStats};

use disk::Disks;
use evict::Batches;
use prefetch::Streams;

/// Settings of a [`Pager`].
#[derive(Clone, Debug)]
pub struct PagerOptions {
    /// Limit of all memory used, in bytes: resident pages of the process, compressed pages, and the pager's own
    /// memory for each page.
    pub limit_bytes: u64,
    /// Part of the limit that compressed pages may use, in bytes.
    pub compressed_bytes: u64,
    /// Time that a page stays in memory after it was write-protected, because device I/O that began earlier still
    /// writes to it. Zero if there is no such I/O.
    pub quarantine: Duration,
    /// ID of the thread whose faults are resolved first: QEMU's main thread, because the whole VM stops when it
    /// stalls.
    pub priority_thread: Option<u32>,
    /// Enables prefetching of pages around sequential faults.
    pub prefetch: bool,
    /// Number of threads that do the work of the process. Nothing progresses while all of them wait.
    pub guest_threads: usize,
}

/// Phase of a page, as the pager knows it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    Absent,
    Resident,
    Punching,
    /// Being read from a disk.
    Reading,
    /// Being evicted, in the batch with this number.
    Evicting(u8),
}

/// Phases of all pages, one byte each.
struct Phases(Vec<u8>);

const EVICTING: u8 = 0x80;

impl Phases {
    fn get(&self, page: PageIndex) -> Phase {
        match self.0[page.as_usize()] {
            0 => Phase::Absent,
            1 => Phase::Resident,
            2 => Phase::Punching,
            3 => Phase::Reading,
            batch => Phase::Evicting(batch & !EVICTING),
        }
    }

    fn set(&mut self, page: PageIndex, phase: Phase) {
        self.0[page.as_usize()] = match phase {
            Phase::Absent => 0,
            Phase::Resident => 1,
            Phase::Punching => 2,
            Phase::Reading => 3,
            Phase::Evicting(batch) => EVICTING | batch,
        };
    }
}

/// A thread that waits for a page that is not available now.
#[derive(Clone, Copy, Debug)]
struct PageWaiter {
    since: Instant,
    /// The thread wants to write.
    wants_write: bool,
}

/// Pager of one process's memory. The module documentation describes it.
pub struct Pager<G, W> {
    guest: G,
    worker: W,
    state: Arc<PagerState>,
    compressed: Arc<SharedMemory>,
    options: PagerOptions,
    regions: Vec<Region>,
    phases: Phases,
    queues: ResidentQueues,
    /// Number of pages in memory, which is all phases but `Absent` and `Reading`.
    resident: u32,
    /// The log of compressed RAM.
    ram: SegmentTable,
    disks: Disks,
    /// Number of pages that the worker is removing from memory.
    punching: usize,
    /// Number of pages that are being read from a disk.
    reading: usize,
    streams: Streams,
    /// Streams of faults on pages that were never written to.
    zero_streams: Streams,
    /// Unfilled rest of the segment that is being filled; `None` while the worker has it.
    lease: Option<SegmentLease>,
    /// The worker has the lease.
    worker_has_lease: bool,
    batches: Batches,
    /// Threads that wait until their page is removed from memory, or read.
    waiters: HashMap<PageIndex, PageWaiter>,
    /// Threads that wait for free memory, in order of arrival.
    stalled: VecDeque<(PageIndex, PageWaiter)>,
    /// Pages that were recently unprotected for a writer, and the time of that.
    recently_unprotected: Vec<(PageIndex, Instant)>,
    /// Pages that were lost, and that the process has given up since.
    lost_then_discarded: Vec<PageIndex>,
    /// A lost page could not be poisoned yet.
    poison_pending: bool,
    decoder: Decoder,
    page_buffer: Box<[u8; PAGE]>,
    /// Cipher of the disks, if they are encrypted.
    cipher: Option<Cipher>,
    /// Buffer for a deciphered object of a disk.
    decrypted: Box<[u8]>,
    /// Buffer for pages that are put in place with one call.
    prefetch_buffer: Box<[u8]>,
    stats: PagerStats,
    pressure: PressureMeter,
    stored: StoredPages,
    /// Reason why nothing can be evicted, with the time of the last attempt.
    stuck: Option<(StuckReason, Instant)>,
    /// Number of retries since evictions became impossible.
    stuck_retries: u32,
    reported_stuck: Option<(StuckReason, Instant)>,
    /// No allocation is tried before this time, because one has failed.
    no_memory_until: Option<Instant>,
    /// Time of the last log message about a failed allocation.
    no_memory_logged: Option<Instant>,
    /// No eviction is tried before this time, because write-protection has failed.
    no_eviction_until: Option<Instant>,
    /// Number of consecutive pages that could not be compressed.
    incompressible_streak: u32,
    /// Number of jobs that the worker has.
    jobs: u32,
    /// Evictions are paused; see [`Self::pause_evictions`].
    evictions_paused: bool,
    /// A detach is in progress: all pages are paged in.
    is_detaching: bool,
    /// Next page that the detach inspects.
    detach_cursor: u32,
    /// Beginning of the first turn since which no page has been stored, except for copies of pages in memory.
    nothing_stored_since: Option<Instant>,
    /// Time at which the current turn began.
    now: Instant,
}

/// Numbers of stored pages, by location.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct StoredPages {
    /// Stored as one repeated word.
    pub uniform: u32,
    /// Stored in compressed RAM.
    pub ram: u32,
    /// Stored in the swap cache on an SSD.
    pub ssd: u32,
    /// Stored in the slow store.
    pub slow: u32,
    /// Stored in a tier and in memory too, with equal content.
    pub clean: u32,
    /// Lost: the page cannot be read back.
    pub lost: u32,
}

impl StoredPages {
    fn counter(&mut self, word: EntryWord) -> Option<&mut u32> {
        match word.decode() {
            Some(CopyLocation::Uniform { .. }) => Some(&mut self.uniform),
            Some(CopyLocation::InTier { clean: true, .. }) => Some(&mut self.clean),
            Some(CopyLocation::InTier { tier: Tier::Ram, .. }) => Some(&mut self.ram),
            Some(CopyLocation::InTier { tier: Tier::Ssd, .. }) => Some(&mut self.ssd),
            Some(CopyLocation::InTier { tier: Tier::Slow, .. }) => Some(&mut self.slow),
            Some(CopyLocation::Lost) => Some(&mut self.lost),
            Some(CopyLocation::NotStored) | None => None,
        }
    }

    fn change(&mut self, from: EntryWord, to: EntryWord) {
        if let Some(count) = self.counter(from) {
            *count -= 1;
        }
        if let Some(count) = self.counter(to) {
            *count += 1;
        }
    }
}

/// Reason why the limit is exceeded.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StuckReason {
    /// All tiers have used all of their space.
    TiersFull,
    /// Compressed pages have used all of their space, and the disk below cannot be written to.
    DiskFailed,
    /// Pages cannot be read or removed from memory.
    Memory,
    /// No page can be compressed, and no tier accepts incompressible pages.
    Incompressible,
}

/// Bytes that the pager needs for each page, resident or not: entry, phase, list links.
pub const OVERHEAD_BYTES_PER_PAGE: u64 = 16 + 1 + 9;

impl<G: GuestMemory, W: Worker> Pager<G, W> {
    /// Makes the pager of the memory `guest` that `state` describes. `resident` are the pages that are in memory, in
    /// rising order. `stores` are the disks, the fastest first. The pager adopts the pages that an earlier pager has
    /// stored.
    ///
    /// The caller must pass all faults to this pager from now on.
    pub fn new(
        guest: G,
        worker: W,
        state: Arc<PagerState>,
        compressed: Arc<SharedMemory>,
        stores: Vec<(Tier, Box<dyn SegmentStore>)>,
        resident: &[PageRun],
        options: PagerOptions,
    ) -> Self {
        let regions = state.regions();
        let pages = regions.last().map_or(0, |last| last.first.get() + last.pages);
        let pressure = PressureMeter::new(options.guest_threads, Instant::now());
        let mut pager = Self {
            guest,
            worker,
            phases: Phases(vec![0; pages as usize]),
            queues: ResidentQueues::new(pages),
            resident: 0,
            ram: SegmentTable::new((compressed.len() / SEGMENT_BYTES) as u32),
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
            worker_has_lease: false,
            batches: Batches::default(),
            waiters: HashMap::new(),
            stalled: VecDeque::new(),
            recently_unprotected: Vec::new(),
            lost_then_discarded: Vec::new(),
            poison_pending: false,
            decoder: Decoder::new(),
            page_buffer: Box::new([0; PAGE]),
            decrypted: vec![0; object_bytes(PAGE as u16)].into_boxed_slice(),
            prefetch_buffer: vec![0; disk::PREFETCH_FILL_PAGES_MAX * PAGE].into_boxed_slice(),
            stats: PagerStats::default(),
            pressure,
            stored: StoredPages::default(),
            stuck: None,
            stuck_retries: 0,
            reported_stuck: None,
            no_memory_until: None,
            no_memory_logged: None,
            no_eviction_until: None,
            incompressible_streak: 0,
            jobs: 0,
            evictions_paused: false,
            is_detaching: false,
            detach_cursor: 0,
            nothing_stored_since: None,
            now: Instant::now(),
        };
        pager.adopt(resident);
        pager
    }

    /// Returns the statistics since the pager was made.
    pub fn stats(&self) -> &PagerStats {
        &self.stats
    }

    /// Returns the limit in bytes.
    pub fn limit_bytes(&self) -> u64 {
        self.options.limit_bytes
    }

    /// Returns the part of the limit that compressed pages may use, in bytes.
    pub fn compressed_limit_bytes(&self) -> u64 {
        self.options.compressed_bytes
    }

    /// Sets the limit and the part of it that compressed pages may use, in bytes.
    pub fn set_limit(&mut self, limit_bytes: u64, compressed_bytes: u64) {
        self.options.limit_bytes = limit_bytes;
        self.options.compressed_bytes = compressed_bytes;
        self.clear_stuck();
        self.incompressible_streak = 0;
    }

    /// Pauses evictions, before the first turn, or resumes them. While another process may write to memory without a
    /// fault, no page is evicted, and no stored copy of a page in memory is valid.
    pub fn pause_evictions(&mut self, pause: bool) {
        if self.evictions_paused == pause {
            return;
        }
        self.evictions_paused = pause;
        match pause {
            true => tracing::warn!(
                "no page is evicted until all disk servers of the VM are registered: memory may exceed its budget"
            ),
            false => tracing::info!("all disk servers of the VM are registered: pages are evicted again"),
        }
    }

    /// Returns true while evictions are paused.
    pub fn evictions_paused(&self) -> bool {
        self.evictions_paused
    }

    /// Returns the guest's memory.
    pub fn guest(&self) -> &G {
        &self.guest
    }

    /// Does all work that is pending, and returns true if there was any.
    ///
    /// # Errors
    /// If the process has ended.
    pub fn turn(&mut self, now: Instant) -> io::Result<bool> {
        self.now = now;
        self.update_nothing_stored(now);
        let mut worked = self.receive()?;
        while let Some(done) = self.worker.next_result(None) {
            self.on_job_done(done);
            worked = true;
        }
        worked |= self.handle_disk_completions();
        worked |= self.balance(now);
        if worked {
            self.pressure.set_waiting(self.stalled(), Instant::now());
        }
        Ok(worked)
    }

    /// Registers `waker` with the worker, to be woken when a job is done. Returns true if a job was done already.
    pub fn set_waker(&mut self, waker: &std::task::Waker) -> bool {
        match self.worker.next_result(Some(waker)) {
            Some(done) => {
                self.on_job_done(done);
                true
            }
            None => false,
        }
    }

    fn receive(&mut self) -> io::Result<bool> {
        let state = Arc::clone(&self.state);
        // SAFETY: the memory belongs to the state and is valid for all values of a message; only this thread uses it.
        let messages: &mut [RawUffdMessage] = unsafe { state.messages().as_mut() };
        let count = self.guest.receive(messages)?;
        if count > 0 {
            self.pressure.set_waiting(self.stalled() + count, Instant::now());
        }
        let messages = &mut messages[..count];
        self.handle(messages);
        Ok(count > 0)
    }

    /// Handles messages, and clears each.
    fn handle(&mut self, messages: &mut [RawUffdMessage]) {
        // Removals come first: a thread that gives pages up continues as soon as its message is read, and may use the
        // pages again. Paging in must not bring back their old content, nor fill a page that a removal handled later
        // would drop.
        for raw in messages.iter_mut() {
            match raw.decode() {
                Some(UffdMessage::Removed(range)) => self.on_removed(range, false),
                Some(UffdMessage::Unmapped(range)) => self.on_removed(range, true),
                _ => continue,
            }
            *raw = RawUffdMessage::default();
        }
        if let Some(first) = self.options.priority_thread
            && messages.len() > 1
        {
            for raw in messages.iter_mut() {
                if let Some(UffdMessage::Fault { address, write, cause, thread }) = raw.decode()
                    && thread == first
                {
                    self.fault_at(address, cause, write);
                    *raw = RawUffdMessage::default();
                }
            }
        }
        for raw in messages {
            match raw.decode() {
                // Removals were handled above.
                None | Some(UffdMessage::Removed(_) | UffdMessage::Unmapped(_)) => {}
                Some(UffdMessage::Fault { address, cause, write, .. }) => self.fault_at(address, cause, write),
                Some(UffdMessage::Unknown(event)) => {
                    tracing::warn!("unknown event {event:#x} from the kernel's userfaultfd")
                }
            }
            *raw = RawUffdMessage::default();
        }
    }

    fn page_at(&self, address: u64) -> Option<PageIndex> {
        self.regions.iter().find_map(|region| region.page_at(address))
    }

    /// Returns the memory used of the limit, in bytes.
    pub fn used_bytes(&self) -> u64 {
        u64::from(self.resident) * PAGE_BYTES
            + self.compressed_bytes()
            + self.overhead_bytes()
            + self.disks.buffer_bytes()
            + self.streams.bytes()
    }

    /// Returns the memory that compressed pages use, in bytes.
    pub fn compressed_bytes(&self) -> u64 {
        u64::from(self.ram.allocated()) * SEGMENT_BYTES as u64
    }

    fn overhead_bytes(&self) -> u64 {
        self.phases.0.len() as u64 * OVERHEAD_BYTES_PER_PAGE
    }

    /// Returns the number of pages in memory.
    pub fn resident_pages(&self) -> u32 {
        self.resident
    }

    /// Returns the reason why the limit is exceeded, if it is.
    pub fn stuck(&self) -> Option<StuckReason> {
        self.stuck.map(|(why, _)| why)
    }

    /// Returns the numbers of stored pages, by location.
    pub fn stored_pages(&self) -> StoredPages {
        self.stored
    }

    /// Returns the number of pages.
    pub fn pages(&self) -> u32 {
        self.phases.0.len() as u32
    }

    /// Returns the share of time lost by waiting for pages, up to `now`.
    pub fn pressure(&mut self, now: Instant) -> Pressure {
        self.pressure.update(now)
    }

    /// Returns the number of waiters for a page that cannot be served now.
    pub fn stalled(&self) -> usize {
        self.stalled.len() + self.waiters.len()
    }

    /// Returns the regions.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Adds a region that is recorded in the state, and whose faults are reported already. `resident` are its pages
    /// that are in memory, in rising order.
    pub fn add_region(&mut self, region: Region, resident: &[PageRun]) {
        let pages = region.first.get() + region.pages;
        self.phases.0.resize(pages as usize, 0);
        self.queues.grow(pages);
        self.regions.push(region);
        for page in resident.iter().flat_map(|run| run.pages()) {
            self.enqueue(page, ResidentQueue::Probation);
        }
        self.guest.wake(PageRun { first: region.first, count: region.pages });
    }

    /// Records that `page` is in memory, and makes it evictable by appending it to `queue`.
    fn enqueue(&mut self, page: PageIndex, queue: ResidentQueue) {
        match self.phases.get(page) {
            Phase::Absent => self.resident += 1,
            Phase::Resident => self.queues.remove(page),
            Phase::Punching | Phase::Evicting(_) => {}
            Phase::Reading => unreachable!("a read page is marked absent before"),
        }
        self.phases.set(page, Phase::Resident);
        self.queues.push(queue, page);
    }

    /// Records that `page` is not in memory any more.
    fn mark_absent(&mut self, page: PageIndex) {
        match self.phases.get(page) {
            Phase::Absent | Phase::Reading => return,
            Phase::Resident => self.queues.remove(page),
            Phase::Punching | Phase::Evicting(_) => {}
        }
        self.phases.set(page, Phase::Absent);
        self.resident -= 1;
    }

    fn submit(&mut self, job: Job) {
        self.jobs += 1;
        self.worker.submit(job);
    }

    /// Sets the first word of the entry of `page`, whatever it was, and updates the counts of stored pages.
    fn set_word(&mut self, page: PageIndex, word: EntryWord) {
        self.stored.change(self.state.word(page), word);
        self.state.replace(page, word);
    }
}
