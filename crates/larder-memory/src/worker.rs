//! Slow work that needs no decision: reading and compressing evicted pages, and removing them from memory. It runs on
//! a thread of its own, which faults do not wait for.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::Waker;
use std::time::Instant;

use larder_block::AlignedBuf;
use larder_codec::{CodecGoal, CodecSelector, Encoder, uniform_word};

use crate::crypt::Cipher;
use crate::entry::{CopyLocation, EntryWord, PageEncoding, StoredObject, Tier, checksum};
use crate::guest::Backing;
use crate::segment_log::{Appender, SEGMENT_BYTES, SEGMENT_HEADER_BYTES, SegmentIndex, data_at, objects_from};
use crate::shared::SharedMemory;
use crate::state::PagerState;
use crate::units::{PAGE, PageIndex, PageRun, runs};

/// Unfilled rest of a segment, which the worker may fill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SegmentLease {
    /// The segment.
    pub segment: SegmentIndex,
    /// Offset of the unfilled rest, in bytes.
    pub from: usize,
    /// Sequence number of the segment's filling.
    pub generation: u64,
}

/// Index of the batch that a job belongs to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchIndex(pub u8);

/// A job for the worker. Pages are in rising order.
pub enum Job {
    /// Appends a copy of each page to a log in memory, as far as there is room.
    Store {
        /// The batch of the pages.
        batch: BatchIndex,
        /// The pages, in rising order.
        pages: Vec<PageIndex>,
        /// The space to append to.
        lease: SegmentLease,
        /// Stores incompressible pages too.
        allow_raw: bool,
    },
    /// Removes the pages from memory.
    Punch {
        /// The batch of the pages.
        batch: BatchIndex,
        /// The pages, in rising order.
        pages: Vec<PageIndex>,
    },
    /// Appends the live objects of a segment of compressed RAM to another one.
    Move {
        /// The segment to move from.
        segment: SegmentIndex,
        /// The space to append to.
        lease: SegmentLease,
    },
    /// Appends the live objects of a segment to a buffer that becomes a segment of a disk.
    Demote {
        /// The segment to move from.
        origin: DemotionSource,
        /// Offset of the first object to move, in bytes.
        at: usize,
        /// The buffer to append to.
        into: DiskLease,
    },
    /// Frees the memory of an empty segment.
    Release(SegmentIndex),
}

/// A segment whose live objects are moved to a disk.
pub enum DemotionSource {
    /// A segment of compressed RAM.
    Ram(SegmentIndex),
    /// A segment of a disk.
    Disk {
        /// The tier of the disk.
        tier: Tier,
        /// The segment's index on the disk.
        segment: SegmentIndex,
        /// The segment as it was read.
        bytes: AlignedBuf,
        /// The bytes are not decrypted yet.
        is_encrypted: bool,
    },
}

/// Buffer that becomes a segment of a disk, and its unfilled rest, which the worker may fill.
pub struct DiskLease {
    /// The tier of the disk.
    pub tier: Tier,
    /// The segment, and the offset of its unfilled rest.
    pub lease: SegmentLease,
    /// The whole buffer.
    pub bytes: AlignedBuf,
}

/// Result of storing a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StoreOutcome {
    /// The page consists of this repeated word; nothing was appended.
    Uniform(u64),
    /// The page was appended, and has this checksum.
    Stored(StoredObject, u32),
    /// The page was not stored, because it cannot be compressed and would use as much memory as before.
    Incompressible,
}

/// Result of a job.
pub enum WorkerResult {
    /// Result of [`Job::Store`].
    Stored {
        /// The batch of the pages.
        batch: BatchIndex,
        /// The pages of the job.
        pages: Vec<PageIndex>,
        /// Results for the first pages. The others were not stored, for want of room or after an error.
        outcomes: Vec<StoreOutcome>,
        /// The lease, with the space that is still unfilled.
        lease: SegmentLease,
        /// Error that stopped the job.
        failed: Option<io::Error>,
    },
    /// Result of [`Job::Punch`].
    Punched {
        /// The batch of the pages.
        batch: BatchIndex,
        /// The pages of the job.
        pages: Vec<PageIndex>,
        /// Error that stopped the job; some of the pages may still be in memory.
        failed: Option<io::Error>,
    },
    /// Result of [`Job::Move`].
    Moved {
        /// The segment that was moved from.
        segment: SegmentIndex,
        /// Objects that were live and have been copied.
        copied: Vec<CopiedObject>,
        /// Live objects that were not copied, because their pages are in memory too, with the words of their entries.
        skipped: Vec<(PageIndex, EntryWord)>,
        /// The lease, with the space that is still unfilled.
        lease: SegmentLease,
        /// There was room for all objects.
        complete: bool,
    },
    /// Result of [`Job::Demote`].
    Demoted {
        /// The segment that was moved from.
        origin: DemotionSource,
        /// Offset of the next object to move, or `None` if all were moved.
        next_at: Option<usize>,
        /// Objects that were live and have been copied.
        copied: Vec<CopiedObject>,
        /// Live objects that were not copied, because their pages are in memory too, with the words of their entries.
        skipped: Vec<(PageIndex, EntryWord)>,
        /// The buffer, with the space that is still unfilled.
        into: DiskLease,
        /// The buffer is full, and in the form in which it is written to the disk.
        is_full: bool,
    },
    /// Result of [`Job::Release`].
    Released(SegmentIndex),
}

/// An object that was copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CopiedObject {
    /// The page of the object.
    pub page: PageIndex,
    /// The first word of the page's entry at that time.
    pub from: EntryWord,
    /// The location of the copy.
    pub to: StoredObject,
}

/// Executes jobs, in the order in which they are given.
pub trait Worker {
    /// Queues a job.
    fn submit(&self, job: Job);

    /// Returns the next result, in order. If there is none, `waker` is woken when there is one.
    fn next_result(&self, waker: Option<&Waker>) -> Option<WorkerResult>;
}

/// Implementation of the jobs, independent of the thread that runs them.
pub struct WorkerState {
    backing: Arc<dyn Backing>,
    state: Arc<PagerState>,
    compressed: Arc<SharedMemory>,
    cipher: Option<Cipher>,
    encoder: Encoder,
    codec_selector: CodecSelector,
    /// Clock that measures the speed of the codecs.
    clock: fn() -> Instant,
    read_buffer: Box<[u8]>,
}

/// Maximum number of pages read with one call.
const READ_PAGES: usize = 64;

impl WorkerState {
    /// Makes a worker that reads pages of `backing` and stores them in `compressed`.
    pub fn new(backing: Arc<dyn Backing>, state: Arc<PagerState>, compressed: Arc<SharedMemory>) -> Self {
        Self {
            backing,
            cipher: state.cipher(),
            state,
            compressed,
            encoder: Encoder::new(),
            codec_selector: CodecSelector::new(CodecGoal::Speed),
            clock: Instant::now,
            read_buffer: vec![0; READ_PAGES * PAGE].into_boxed_slice(),
        }
    }

    /// Replaces the clock. With a simulated clock the choice of codecs is reproducible.
    #[must_use]
    pub fn with_clock(self, clock: fn() -> Instant) -> Self {
        Self { clock, ..self }
    }

    /// Runs `job`, and returns its result.
    pub fn run_job(&mut self, job: Job) -> WorkerResult {
        match job {
            Job::Store { batch, pages, lease, allow_raw: raw } => self.store(batch, pages, lease, raw),
            Job::Punch { batch, pages } => {
                let failed = runs(pages.iter().copied()).try_for_each(|run| self.backing.punch(run)).err();
                WorkerResult::Punched { batch, pages, failed }
            }
            Job::Move { segment, lease } => self.move_live(segment, lease),
            Job::Demote { origin, at, into } => self.demote(origin, at, into),
            Job::Release(segment) => {
                if let Err(error) = self.compressed.release(segment.start() as usize, SEGMENT_BYTES) {
                    tracing::warn!("memory of compressed pages cannot be freed: {error}");
                }
                WorkerResult::Released(segment)
            }
        }
    }

    /// Returns the bytes of a lease.
    ///
    /// # Safety
    /// The lease must be the only one, and no thread may read its bytes.
    #[allow(clippy::mut_from_ref)]
    unsafe fn leased_bytes(compressed: &SharedMemory, lease: SegmentLease) -> &mut [u8] {
        let len = SEGMENT_BYTES - lease.from;
        let at = compressed.ptr_at(lease.segment.start() as usize + lease.from, len);
        // SAFETY: the range is in the mapping, and is not shared, by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), len) }
    }

    fn move_live(&mut self, segment: SegmentIndex, mut lease: SegmentLease) -> WorkerResult {
        let from = self.sealed_bytes(segment);
        // SAFETY: the pager gives one lease at a time, and reads only objects that were appended before it.
        let bytes = unsafe { Self::leased_bytes(&self.compressed, lease) };
        let mut appender = Appender::new(lease.segment, lease.from, bytes, lease.generation);
        let live = append_live(&self.state, Tier::Ram, segment, from, SEGMENT_HEADER_BYTES, &mut appender);
        lease.from = appender.at();
        WorkerResult::Moved {
            segment,
            copied: live.copied,
            skipped: live.skipped,
            lease,
            complete: live.next_at.is_none(),
        }
    }

    /// Returns the bytes of a full segment of compressed RAM.
    fn sealed_bytes(&self, segment: SegmentIndex) -> &[u8] {
        let from = self.compressed.ptr_at(segment.start() as usize, SEGMENT_BYTES);
        // SAFETY: the range is in the mapping; no thread writes to a segment while it is full and being moved.
        unsafe { std::slice::from_raw_parts(from.as_ptr(), SEGMENT_BYTES) }
    }

    fn demote(&mut self, mut origin: DemotionSource, at: usize, mut into: DiskLease) -> WorkerResult {
        if let DemotionSource::Disk { tier, segment, bytes, is_encrypted } = &mut origin
            && std::mem::take(is_encrypted)
            && let Some(cipher) = &self.cipher
        {
            cipher.decrypt(*tier, segment.start(), bytes);
        }
        let DiskLease { tier: to, lease, bytes } = &mut into;
        let mut appender = Appender::new(lease.segment, lease.from, &mut bytes[lease.from..], lease.generation);
        let live = match &origin {
            DemotionSource::Ram(segment) => {
                append_live(&self.state, Tier::Ram, *segment, self.sealed_bytes(*segment), at, &mut appender)
            }
            DemotionSource::Disk { tier, segment, bytes, .. } => {
                append_live(&self.state, *tier, *segment, bytes, at, &mut appender)
            }
        };
        lease.from = appender.at();
        let is_full = live.next_at.is_some() || lease.from + 2 * PAGE >= SEGMENT_BYTES;
        if is_full && let Some(cipher) = &self.cipher {
            // The whole buffer is encrypted, stale bytes of earlier use after the objects included.
            cipher.encrypt(*to, lease.segment.start(), bytes);
        }
        WorkerResult::Demoted {
            origin,
            next_at: live.next_at,
            copied: live.copied,
            skipped: live.skipped,
            into,
            is_full,
        }
    }

    fn store(&mut self, batch: BatchIndex, pages: Vec<PageIndex>, mut lease: SegmentLease, raw: bool) -> WorkerResult {
        // SAFETY: the pager gives one lease at a time, and reads only objects that were appended before it.
        let bytes = unsafe { Self::leased_bytes(&self.compressed, lease) };
        let mut appender = Appender::new(lease.segment, lease.from, bytes, lease.generation);
        let mut outcomes = Vec::with_capacity(pages.len());
        let mut failed = None;
        'pages: for run in runs(pages.iter().copied()) {
            let mut rest = run;
            while rest.count > 0 {
                let part = PageRun { first: rest.first, count: rest.count.min(READ_PAGES as u32) };
                let into = &mut self.read_buffer[..part.bytes() as usize];
                if let Err(error) = self.backing.read(part, into) {
                    failed = Some(error);
                    break 'pages;
                }
                let (contents, _) = into.as_chunks::<PAGE>();
                for (page, content) in part.pages().zip(contents) {
                    let choice = &mut self.codec_selector;
                    match store_page(&mut self.encoder, choice, self.clock, &mut appender, page, content, raw) {
                        Some(outcome) => outcomes.push(outcome),
                        None => break 'pages,
                    }
                }
                rest.count -= part.count;
                if rest.count > 0 {
                    rest.first = part.end();
                }
            }
        }
        lease.from = appender.at();
        WorkerResult::Stored { batch, pages, outcomes, lease, failed }
    }
}

/// Live objects of a segment, and what was done with them.
#[derive(Default)]
struct LiveObjects {
    copied: Vec<CopiedObject>,
    skipped: Vec<(PageIndex, EntryWord)>,
    /// Offset of the next object, if there was no room for all.
    next_at: Option<usize>,
}

/// Appends the live objects of a segment, from byte `at` on, except those of pages that are in memory too.
fn append_live(
    state: &PagerState,
    tier: Tier,
    segment: SegmentIndex,
    from: &[u8],
    at: usize,
    appender: &mut Appender<'_>,
) -> LiveObjects {
    let mut live = LiveObjects::default();
    for object in objects_from(from, segment.start(), at) {
        if object.page.get() >= state.capacity() {
            continue;
        }
        let word = state.word(object.page);
        if !matches!(word.decode(), Some(CopyLocation::InTier { tier: of, object: stored, .. }) if of == tier && stored == object.stored)
        {
            continue;
        }
        if word.is_clean() {
            live.skipped.push((object.page, word));
            continue;
        }
        let len = usize::from(object.stored.len);
        let within = (object.stored.offset.bytes() - segment.start()) as usize;
        if appender.room() < len {
            live.next_at = Some(within);
            break;
        }
        let data = (data_at(object.stored.offset) - segment.start()) as usize;
        appender.next_data()[..len].copy_from_slice(&from[data..data + len]);
        live.copied.push(CopiedObject {
            page: object.page,
            from: word,
            to: appender.append(object.page, len, object.stored.encoding),
        });
    }
    live
}

/// Maximum size of a compressed page. Above it, decoding costs more than the space that compression saves.
const COMPRESSED_PAGE_BYTES_MAX: usize = PAGE * 7 / 8;

/// Appends a page, or returns `None` if there is no room for it.
fn store_page(
    encoder: &mut Encoder,
    choice: &mut CodecSelector,
    clock: fn() -> Instant,
    appender: &mut Appender<'_>,
    page: PageIndex,
    content: &[u8; PAGE],
    raw: bool,
) -> Option<StoreOutcome> {
    if let Some(word) = uniform_word(content) {
        return Some(StoreOutcome::Uniform(word));
    }
    let room = appender.room();
    if let Some(codec) = choice.pick() {
        let started = clock();
        let out = appender.next_data();
        let limit = out.len().min(COMPRESSED_PAGE_BYTES_MAX);
        let len = encoder.encode(codec, content, &mut out[..limit]);
        // If the room was smaller than the maximum size, a page that did not fit says nothing about the codec.
        if len.is_some() || room >= COMPRESSED_PAGE_BYTES_MAX {
            choice.record(codec, len, (clock() - started).as_nanos() as u64);
        }
        if let Some(len) = len {
            let stored = appender.append(page, len, PageEncoding::Codec(codec));
            return Some(StoreOutcome::Stored(stored, checksum(page, content)));
        }
    }
    if room < PAGE {
        return None;
    }
    if !raw {
        return Some(StoreOutcome::Incompressible);
    }
    appender.next_data()[..PAGE].copy_from_slice(content);
    let stored = appender.append(page, PAGE, PageEncoding::Raw);
    Some(StoreOutcome::Stored(stored, checksum(page, content)))
}

/// Thread that runs jobs.
pub struct WorkerThread {
    shared: Arc<Shared>,
    handle: Option<std::thread::JoinHandle<()>>,
}

struct Shared {
    queues: Mutex<Queues>,
    job_submitted: Condvar,
    /// `done` is not empty. Read without the lock.
    any_done: AtomicBool,
}

#[derive(Default)]
struct Queues {
    jobs: VecDeque<Job>,
    done: VecDeque<WorkerResult>,
    waker: Option<Waker>,
    is_stopping: bool,
}

impl WorkerThread {
    /// Starts the thread.
    ///
    /// # Errors
    /// If the thread cannot be started.
    pub fn start(mut hands: WorkerState) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            queues: Mutex::default(),
            job_submitted: Condvar::new(),
            any_done: AtomicBool::new(false),
        });
        let thread_shared = Arc::clone(&shared);
        let handle = std::thread::Builder::new().name("larder-evict".to_owned()).spawn(move || {
            while let Some(job) = thread_shared.next() {
                let done = hands.run_job(job);
                thread_shared.finish(done);
            }
        })?;
        Ok(Self { shared, handle: Some(handle) })
    }
}

impl Shared {
    fn lock(&self) -> std::sync::MutexGuard<'_, Queues> {
        self.queues.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn next(&self) -> Option<Job> {
        let mut queues = self.lock();
        loop {
            if let Some(job) = queues.jobs.pop_front() {
                return Some(job);
            }
            if queues.is_stopping {
                return None;
            }
            queues = self.job_submitted.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn finish(&self, done: WorkerResult) {
        let waker = {
            let mut queues = self.lock();
            queues.done.push_back(done);
            queues.waker.take()
        };
        self.any_done.store(true, Ordering::Release);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Worker for WorkerThread {
    fn submit(&self, job: Job) {
        self.shared.lock().jobs.push_back(job);
        self.shared.job_submitted.notify_one();
    }

    fn next_result(&self, waker: Option<&Waker>) -> Option<WorkerResult> {
        if waker.is_none() && !self.shared.any_done.load(Ordering::Acquire) {
            return None;
        }
        let mut queues = self.shared.lock();
        let done = queues.done.pop_front();
        match (&done, waker) {
            (None, Some(waker)) => queues.waker = Some(waker.clone()),
            (None, None) => self.shared.any_done.store(false, Ordering::Release),
            _ => {}
        }
        done
    }
}

impl Drop for WorkerThread {
    fn drop(&mut self) {
        self.shared.lock().is_stopping = true;
        self.shared.job_submitted.notify_one();
        if let Some(handle) = self.handle.take() {
            // A panic in the thread has aborted the process already.
            let _ = handle.join();
        }
    }
}
