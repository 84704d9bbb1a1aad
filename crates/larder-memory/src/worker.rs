//! What takes time and needs no decision: reading and compressing pages that are to go, and taking them out of memory.
//! Done on a thread beside the owner's, which faults do not wait for.

use std::collections::VecDeque;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::task::Waker;
use std::time::Instant;

use larder_block::AlignedBuf;
use larder_codec::{Choice, Encoder, Goal, uniform_word};

use crate::crypt::Cipher;
use crate::entry::{Encoding, Location, Stored, Tier, Word, checksum};
use crate::guest::Backing;
use crate::log::{Appender, SEGMENT, SEGMENT_HEADER, SegmentIndex, data_at, objects_from};
use crate::shared::SharedMemory;
use crate::state::State;
use crate::units::{PAGE, PageIndex, PageRun, runs};

/// The unfilled rest of a segment, which the worker may fill.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Lease {
    /// Which.
    pub segment: SegmentIndex,
    /// From which byte on.
    pub from: usize,
    /// Number of the segment's filling.
    pub filling: u64,
}

/// Which eviction a job is of.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct BatchIndex(pub u8);

/// Something to do. Pages are in rising order.
pub enum Job {
    /// Append a copy of each page to a log in memory, as far as there is room.
    Store {
        /// Whose.
        batch: BatchIndex,
        /// Which pages.
        pages: Vec<PageIndex>,
        /// Where to.
        lease: Lease,
        /// Pages that cannot be compressed, too.
        raw: bool,
    },
    /// Take the pages out of memory.
    Punch {
        /// Whose.
        batch: BatchIndex,
        /// Which pages.
        pages: Vec<PageIndex>,
    },
    /// Append what lives of a segment in memory to another.
    Move {
        /// Which.
        segment: SegmentIndex,
        /// Where to.
        lease: Lease,
    },
    /// Append what lives of a segment to another, in memory, that is to go to a disk.
    Demote {
        /// Which.
        origin: Origin,
        /// From which byte of it on.
        at: usize,
        /// Where to.
        into: DiskLease,
    },
    /// Give back the memory of a free segment.
    Release(SegmentIndex),
}

/// A segment of which what lives is to go to a disk.
pub enum Origin {
    /// Of compressed RAM.
    Ram(SegmentIndex),
    /// Of a disk.
    Disk {
        /// Which.
        tier: Tier,
        /// Which of it.
        segment: SegmentIndex,
        /// What was read there.
        bytes: AlignedBuf,
        /// It is enciphered still.
        is_encrypted: bool,
    },
}

/// Memory that is to be written to a disk as a segment, and its unfilled rest, which the worker may fill.
pub struct DiskLease {
    /// Whose.
    pub tier: Tier,
    /// Where and how far.
    pub lease: Lease,
    /// All of it.
    pub bytes: AlignedBuf,
}

/// How a page was stored.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// It is one word all over; nothing was appended.
    Uniform(u64),
    /// Appended, with its checksum.
    Stored(Stored, u32),
    /// Not: it cannot be compressed, and would take as much memory as it does.
    Kept,
}

/// What has been done.
pub enum Done {
    /// See [`Job::Store`].
    Stored {
        /// Whose.
        batch: BatchIndex,
        /// The pages of the job.
        pages: Vec<PageIndex>,
        /// What became of the first of them; of the rest nothing, for want of room, or of a failure.
        outcomes: Vec<Outcome>,
        /// The lease, with what is still unfilled.
        lease: Lease,
        /// Why no more could be read.
        failed: Option<io::Error>,
    },
    /// See [`Job::Punch`].
    Punched {
        /// Whose.
        batch: BatchIndex,
        /// The pages of the job.
        pages: Vec<PageIndex>,
        /// Some of them may be there still.
        failed: Option<io::Error>,
    },
    /// See [`Job::Move`].
    Moved {
        /// Which.
        segment: SegmentIndex,
        /// What was alive when it was looked at.
        copied: Vec<Copied>,
        /// Likewise; it was not copied, as the pages are in memory too. With what their entries said.
        left_out: Vec<(PageIndex, Word)>,
        /// The lease, with what is still unfilled.
        lease: Lease,
        /// There was room for all.
        complete: bool,
    },
    /// See [`Job::Demote`].
    Demoted {
        /// Which.
        origin: Origin,
        /// From where on it is to be gone on with; nothing if that was all.
        next_at: Option<usize>,
        /// What was alive when it was looked at.
        copied: Vec<Copied>,
        /// Likewise; it was not copied, as the pages are in memory too. With what their entries said.
        left_out: Vec<(PageIndex, Word)>,
        /// With what is still unfilled.
        into: DiskLease,
        /// There is no room for more: it is as it is to be on the disk.
        is_full: bool,
    },
    /// See [`Job::Release`].
    Released(SegmentIndex),
}

/// An object that was copied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Copied {
    /// Whose copy it is.
    pub page: PageIndex,
    /// What its entry said.
    pub from: Word,
    /// Where the copy is.
    pub to: Stored,
}

/// Who does jobs, in the order in which they are given.
pub trait Worker {
    /// To be done.
    fn give(&self, job: Job);

    /// What has been done, in order. `waker` is woken when there is more.
    fn take(&self, waker: Option<&Waker>) -> Option<Done>;
}

/// How a job is done, wherever that is.
pub struct Hands {
    backing: Arc<dyn Backing>,
    state: Arc<State>,
    compressed: Arc<SharedMemory>,
    cipher: Option<Cipher>,
    encoder: Encoder,
    choice: Choice,
    /// By which it is told which codec is how fast.
    clock: fn() -> Instant,
    read: Box<[u8]>,
}

/// How many pages are read in one call at most.
const READ_PAGES: usize = 64;

impl Hands {
    /// For pages of `backing`, to be stored in `compressed`.
    pub fn new(backing: Arc<dyn Backing>, state: Arc<State>, compressed: Arc<SharedMemory>) -> Self {
        Self {
            backing,
            cipher: state.cipher(),
            state,
            compressed,
            encoder: Encoder::new(),
            choice: Choice::new(Goal::Speed),
            clock: Instant::now,
            read: vec![0; READ_PAGES * PAGE].into_boxed_slice(),
        }
    }

    /// Has the time told by `clock`: where that is simulated, so are the codecs that are chosen.
    #[must_use]
    pub fn with_clock(self, clock: fn() -> Instant) -> Self {
        Self { clock, ..self }
    }

    /// Does `job`.
    pub fn work(&mut self, job: Job) -> Done {
        match job {
            Job::Store {
                batch,
                pages,
                lease,
                raw,
            } => self.store(batch, pages, lease, raw),
            Job::Punch { batch, pages } => {
                let failed = runs(pages.iter().copied())
                    .try_for_each(|run| self.backing.punch(run))
                    .err();
                Done::Punched { batch, pages, failed }
            }
            Job::Move { segment, lease } => self.move_out(segment, lease),
            Job::Demote { origin, at, into } => self.demote(origin, at, into),
            Job::Release(segment) => {
                if let Err(error) = self.compressed.release(segment.start() as usize, SEGMENT) {
                    tracing::warn!("memory of compressed pages cannot be given back: {error}");
                }
                Done::Released(segment)
            }
        }
    }

    /// The bytes of a lease.
    ///
    /// # Safety
    /// The lease is the only one, and nobody reads what is in it.
    #[allow(clippy::mut_from_ref)]
    unsafe fn leased(compressed: &SharedMemory, lease: Lease) -> &mut [u8] {
        let len = SEGMENT - lease.from;
        let at = compressed.at(lease.segment.start() as usize + lease.from, len);
        // SAFETY: in the mapping; not shared, by this function's contract.
        unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), len) }
    }

    fn move_out(&mut self, segment: SegmentIndex, mut lease: Lease) -> Done {
        let from = self.sealed(segment);
        // SAFETY: the owner gives one lease at a time, and reads only what was appended before it.
        let bytes = unsafe { Self::leased(&self.compressed, lease) };
        let mut appender = Appender::new(lease.segment, lease.from, bytes, lease.filling);
        let living = append_living(&self.state, Tier::Ram, segment, from, SEGMENT_HEADER, &mut appender);
        lease.from = appender.at();
        Done::Moved {
            segment,
            copied: living.copied,
            left_out: living.left_out,
            lease,
            complete: living.next_at.is_none(),
        }
    }

    /// A full segment of compressed RAM.
    fn sealed(&self, segment: SegmentIndex) -> &[u8] {
        let from = self.compressed.at(segment.start() as usize, SEGMENT);
        // SAFETY: in the mapping; nobody writes to a segment as long as it is full and something of it is moved.
        unsafe { std::slice::from_raw_parts(from.as_ptr(), SEGMENT) }
    }

    fn demote(&mut self, mut origin: Origin, at: usize, mut into: DiskLease) -> Done {
        if let Origin::Disk {
            tier,
            segment,
            bytes,
            is_encrypted,
        } = &mut origin
            && std::mem::take(is_encrypted)
            && let Some(cipher) = &self.cipher
        {
            cipher.decrypt(*tier, segment.start(), bytes);
        }
        let DiskLease { tier: to, lease, bytes } = &mut into;
        let mut appender = Appender::new(lease.segment, lease.from, &mut bytes[lease.from..], lease.filling);
        let living = match &origin {
            Origin::Ram(segment) => append_living(
                &self.state,
                Tier::Ram,
                *segment,
                self.sealed(*segment),
                at,
                &mut appender,
            ),
            Origin::Disk {
                tier, segment, bytes, ..
            } => append_living(&self.state, *tier, *segment, bytes, at, &mut appender),
        };
        lease.from = appender.at();
        let is_full = living.next_at.is_some() || lease.from + 2 * PAGE >= SEGMENT;
        if is_full && let Some(cipher) = &self.cipher {
            // All of it, with what is left of others behind what was filled.
            cipher.encrypt(*to, lease.segment.start(), bytes);
        }
        Done::Demoted {
            origin,
            next_at: living.next_at,
            copied: living.copied,
            left_out: living.left_out,
            into,
            is_full,
        }
    }

    fn store(&mut self, batch: BatchIndex, pages: Vec<PageIndex>, mut lease: Lease, raw: bool) -> Done {
        // SAFETY: the owner gives one lease at a time, and reads only what was appended before it.
        let bytes = unsafe { Self::leased(&self.compressed, lease) };
        let mut appender = Appender::new(lease.segment, lease.from, bytes, lease.filling);
        let mut outcomes = Vec::with_capacity(pages.len());
        let mut failed = None;
        'pages: for run in runs(pages.iter().copied()) {
            let mut rest = run;
            while rest.count > 0 {
                let now = PageRun {
                    first: rest.first,
                    count: rest.count.min(READ_PAGES as u32),
                };
                let into = &mut self.read[..now.bytes() as usize];
                if let Err(error) = self.backing.read(now, into) {
                    failed = Some(error);
                    break 'pages;
                }
                let (contents, _) = into.as_chunks::<PAGE>();
                for (page, content) in now.pages().zip(contents) {
                    let choice = &mut self.choice;
                    match store_page(&mut self.encoder, choice, self.clock, &mut appender, page, content, raw) {
                        Some(outcome) => outcomes.push(outcome),
                        None => break 'pages,
                    }
                }
                rest.count -= now.count;
                if rest.count > 0 {
                    rest.first = now.end();
                }
            }
        }
        lease.from = appender.at();
        Done::Stored {
            batch,
            pages,
            outcomes,
            lease,
            failed,
        }
    }
}

/// What became of the objects of a segment that live.
#[derive(Default)]
struct Living {
    copied: Vec<Copied>,
    left_out: Vec<(PageIndex, Word)>,
    /// Where to go on, if there was no room for all.
    next_at: Option<usize>,
}

/// Appends those objects of a segment that live, from byte `at` on, but for those of pages that are in memory too.
fn append_living(
    state: &State,
    tier: Tier,
    segment: SegmentIndex,
    from: &[u8],
    at: usize,
    appender: &mut Appender<'_>,
) -> Living {
    let mut living = Living::default();
    for object in objects_from(from, segment.start(), at) {
        if object.page.get() >= state.capacity() {
            continue;
        }
        let word = state.word(object.page);
        if !matches!(word.decode(), Some(Location::In { tier: of, stored, .. }) if of == tier && stored == object.stored)
        {
            continue;
        }
        if word.is_clean() {
            living.left_out.push((object.page, word));
            continue;
        }
        let len = usize::from(object.stored.len);
        let within = (object.stored.place.bytes() - segment.start()) as usize;
        if appender.room() < len {
            living.next_at = Some(within);
            break;
        }
        let data = (data_at(object.stored.place) - segment.start()) as usize;
        appender.next_data()[..len].copy_from_slice(&from[data..data + len]);
        living.copied.push(Copied {
            page: object.page,
            from: word,
            to: appender.append(object.page, len, object.stored.encoding),
        });
    }
    living
}

/// Above this length a page is kept as it is: what compression would save is not worth the decoding.
const WORTH_BYTES: usize = PAGE * 7 / 8;

/// Appends a page; `None` if there is no room for it.
fn store_page(
    encoder: &mut Encoder,
    choice: &mut Choice,
    clock: fn() -> Instant,
    appender: &mut Appender<'_>,
    page: PageIndex,
    content: &[u8; PAGE],
    raw: bool,
) -> Option<Outcome> {
    if let Some(word) = uniform_word(content) {
        return Some(Outcome::Uniform(word));
    }
    let room = appender.room();
    if let Some(codec) = choice.pick() {
        let started = clock();
        let out = appender.next_data();
        let limit = out.len().min(WORTH_BYTES);
        let len = encoder.encode(codec, content, &mut out[..limit]);
        // Where the room was less than what is worth it, that it did not fit says nothing of the codec.
        if len.is_some() || room >= WORTH_BYTES {
            choice.record(codec, len, (clock() - started).as_nanos() as u64);
        }
        if let Some(len) = len {
            let stored = appender.append(page, len, Encoding::Codec(codec));
            return Some(Outcome::Stored(stored, checksum(page, content)));
        }
    }
    if room < PAGE {
        return None;
    }
    if !raw {
        return Some(Outcome::Kept);
    }
    appender.next_data()[..PAGE].copy_from_slice(content);
    let stored = appender.append(page, PAGE, Encoding::Raw);
    Some(Outcome::Stored(stored, checksum(page, content)))
}

/// A thread that does jobs.
pub struct Thread {
    shared: Arc<Shared>,
    handle: Option<std::thread::JoinHandle<()>>,
}

struct Shared {
    queues: Mutex<Queues>,
    given: Condvar,
    /// There is something in `done`: looked at without the lock.
    any_done: AtomicBool,
}

#[derive(Default)]
struct Queues {
    jobs: VecDeque<Job>,
    done: VecDeque<Done>,
    waker: Option<Waker>,
    ended: bool,
}

impl Thread {
    /// Starts it.
    ///
    /// # Errors
    /// No thread can be started.
    pub fn start(mut hands: Hands) -> io::Result<Self> {
        let shared = Arc::new(Shared {
            queues: Mutex::default(),
            given: Condvar::new(),
            any_done: AtomicBool::new(false),
        });
        let theirs = Arc::clone(&shared);
        let handle = std::thread::Builder::new()
            .name("larder-evict".to_owned())
            .spawn(move || {
                while let Some(job) = theirs.next() {
                    let done = hands.work(job);
                    theirs.finish(done);
                }
            })?;
        Ok(Self {
            shared,
            handle: Some(handle),
        })
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
            if queues.ended {
                return None;
            }
            queues = self.given.wait(queues).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn finish(&self, done: Done) {
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

impl Worker for Thread {
    fn give(&self, job: Job) {
        self.shared.lock().jobs.push_back(job);
        self.shared.given.notify_one();
    }

    fn take(&self, waker: Option<&Waker>) -> Option<Done> {
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

impl Drop for Thread {
    fn drop(&mut self) {
        self.shared.lock().ended = true;
        self.shared.given.notify_one();
        if let Some(handle) = self.handle.take() {
            // A panic there has ended the process already.
            let _ = handle.join();
        }
    }
}
