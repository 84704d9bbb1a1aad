//! A cache on a fast device that belongs to one disk, as a block filter.
//!
//! Lines of the disk are kept on the cache device, so that hot data is read at its speed. Where what lies is in memory
//! ([`index`]), some ten bytes for a line, and up to four more where the lines are scattered; what a crash leaves of that
//! is written down in a journal and in pages ([`journal`], [`page`]), so that the cache is warm after anything.
//!
//! Invariants:
//! - A read never finds an older byte than the last completed write, also after a crash, and also after the line has left
//!   the cache: what the cache holds without being dirty is what the disk holds, durably, or it is marked as not to be
//!   believed before they can differ ([`change`]).
//! - What may not be what the disk has is compared with it before it is used ([`compare`]).
//! - A slot gets another line only when a crash would leave it empty ([`place`]).
//! - A line is written down only after its data has been flushed ([`settle`]).
//! - The cache device is never waited for where the disk can answer; if it fails, the disk is all there is.

mod apart;
mod change;
mod clean;
mod commit;
mod compare;
mod copies;
mod copy;
mod device;
mod dirty;
mod entry;
mod fill;
mod flushing;
mod hot;
mod index;
mod journal;
mod ledger;
mod lines;
mod load;
mod offline;
mod open;
mod pace;
mod page;
mod parts;
mod place;
mod policy;
mod read;
mod samples;
mod sets;
mod settle;
mod shape;
mod size;
mod superblock;
mod usage;
mod watch;
mod write_back;

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::{Rc, Weak};
use std::time::Duration;

use larder_block::budget::Budget;
use larder_block::event_loop::WeakLoop;
use larder_block::histogram::Histogram;
use larder_block::range_lock::Ranges;
use larder_block::{BlockDevice, BoxFuture, ByteOffset, ByteRange, Failure, IoError, IoResult, LoopTime, Operation};

pub use clean::CleanOptions;
pub use copy::copy;
pub use larder_block::backend::file::Verdict;
pub use offline::{Damage, Lines, count_lines, set_mode};
pub use open::{CreateOptions, OpenError, OpenOptions, SettleOptions, create, read_superblock};
pub use shape::Shape;
pub use superblock::{DiskId, Superblock, SuperblockError};

use change::Changes;
use clean::Cleaning;
use commit::Commits;
use compare::Comparing;
use fill::Fills;
use flushing::Flushing;
use index::Index;
use larder_block::signal::Signal;
use larder_policy::policy::{Access, Context};
use ledger::Ledger;
use lines::LineSet;
use load::Loading;
use pace::Pace;
use place::Leaving;
use settle::Settling;
use shape::{Line, Slot};
use usage::Usage;
use watch::Fast;

const EIO: i32 = 5;

/// Rounds of cleaning or settling while new lines become dirty or unsettled; the rest waits until no request comes.
const ROUNDS: u32 = 4;

/// What is done with writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Mode {
    /// To the disk and to the cache; complete when the disk has it.
    #[default]
    WriteThrough,
    /// To the cache only; the disk gets it later.
    WriteBack,
    /// To the disk only; reads fill the cache.
    WriteAround,
    /// The cache is not used, and nothing of what is written stays in it.
    PassThrough,
}

impl Mode {
    fn number(self) -> u32 {
        match self {
            Self::WriteThrough => 0,
            Self::WriteBack => 1,
            Self::WriteAround => 2,
            Self::PassThrough => 3,
        }
    }

    fn from_number(number: u32) -> Option<Self> {
        [
            Self::WriteThrough,
            Self::WriteBack,
            Self::WriteAround,
            Self::PassThrough,
        ]
        .into_iter()
        .find(|mode| mode.number() == number)
    }
}

/// What has been done so far; requests, or bytes where it says so.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Reads that the cache had all of.
    pub hits: u64,
    /// Reads that it had a part of.
    pub partial_hits: u64,
    /// Reads that it had nothing of.
    pub misses: u64,
    /// Reads of what the cache has that went to the disk all the same, because the cache device was slower than it.
    pub bypassed_slow: u64,
    /// Reads that waited for another one's data, or copied it.
    pub joined: u64,
    /// Bytes read from the cache device for guests.
    pub hit_bytes: u64,
    /// Bytes brought in after reads.
    pub filled: u64,
    /// Bytes of these that no guest has asked for here: they were hot elsewhere.
    pub warmed: u64,
    /// Reads that were not kept because too much was being brought in, or was being written.
    pub bypassed_busy: u64,
    /// Lines taken out to make room.
    pub evicted: u64,
    /// Bytes of the journal and of pages written.
    pub metadata_written: u64,
    /// Bytes written to the disk that only the cache had.
    pub cleaned: u64,
    /// Bytes read from the disk, and written to it.
    pub disk_read: u64,
    /// See above.
    pub disk_written: u64,
    /// Bytes read from the cache device, and written to it, for whatever reason.
    pub cache_read: u64,
    /// See above.
    pub cache_written: u64,
    /// Reads of the cache device, and other requests to it, that have failed or were not answered in time.
    pub read_errors: u64,
    /// See above.
    pub write_errors: u64,
    /// Lines in the cache.
    pub lines: u64,
    /// Of them those that have data which the disk has not.
    pub dirty_lines: u64,
    /// Lines of which a crash would leave something else than is in the cache now.
    pub unsettled: u64,
    /// Bytes in cached lines that are not compared with the disk yet, and not used before ([`Verdict::Unproven`]); as far as
    /// the lines are loaded.
    pub unproven: u64,
}

/// A place apart from the cache device, where it can be noted what of the cache is not to be believed any more: the device
/// itself, which fails, cannot be told. Whoever opens the cache next says so in [`OpenOptions::detached`].
pub trait Witness {
    /// Notes, durably, that what the cache has is not to be believed, but for what only the cache has.
    fn detach(&self) -> BoxFuture<'_, std::io::Result<()>>;

    /// Notes besides, durably, that what only the cache has of `range` is not to be believed either: the disk has newer.
    fn supersede(&self, range: ByteRange) -> BoxFuture<'_, std::io::Result<()>>;

    /// Forgets all that, durably: the cache is to be believed.
    fn attach(&self) -> BoxFuture<'_, std::io::Result<()>>;
}

/// What a [`Witness`] has noted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Detached {
    /// Of these ranges of the disk nothing is to be believed.
    pub superseded: Vec<ByteRange>,
}

/// Whether the cache device works.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Works,
    /// It does not, and that is being noted.
    Failing,
    /// It does not, and the next one will know.
    Detached,
    /// It does not, and the next one would not know: what it has must not become older than the disk.
    Unwitnessed,
}

/// A disk with a cache.
pub struct Cache {
    this: Weak<Self>,
    on: WeakLoop,
    lower: Rc<dyn BlockDevice>,
    fast: Rc<Fast>,
    shape: Shape,
    /// What checksums begin with.
    seed: u32,
    mode: Cell<Mode>,
    superblock: RefCell<Superblock>,
    /// Held while it is written: one at a time, or an older one could be the last.
    noting: Ranges,
    stamp: Box<dyn Fn() -> Vec<u8>>,
    index: RefCell<Index>,
    ledger: RefCell<Ledger>,
    leaving: RefCell<Leaving>,
    /// Ranges of which something was taken out of memory that only the cache had; when so many records are written, no crash
    /// finds it any more.
    undoing: RefCell<Vec<(ByteRange, u64)>>,
    loading: Loading,
    commits: Commits,
    settling: Settling,
    changes: Changes,
    /// Where the guest wrote last.
    written: samples::Written,
    /// Data that writes have put into the cache, and that only it has.
    kept: Flushing,
    cleaning: Cleaning,
    comparing: Comparing,
    /// The disk's size in bytes, as far as it is known, and the change that it is of.
    size: Cell<u64>,
    /// Behind this there is nothing in the cache.
    reach: Cell<u64>,
    size_generation: Cell<u64>,
    sizing: Ranges,
    fills: Fills,
    /// Fragments that reads may be of at the same time.
    fragments: Rc<Budget>,
    /// Those who wait for readers to leave a slot.
    readers: Signal,
    counts: RefCell<Statistics>,
    pace: Pace,
    usage: Usage,
    /// So many lines may be unsettled.
    unsettled_max: usize,
    /// And for so long.
    settle_after: Duration,
    /// Where the last line was put.
    way_hint: Cell<u32>,
    /// There may have been dirty lines when it was opened.
    was_dirty: bool,
    /// There may be now: that is noted.
    may_be_dirty: Cell<bool>,
    /// It was opened after something that only dirty lines survive, apart from some ranges.
    only_dirty: Option<Detached>,
    /// Lines of which a crash does not believe what a cache has that has failed.
    superseded: RefCell<LineSet>,
    state: Cell<State>,
    witness: Box<dyn Witness>,
    /// Those who wait until it is noted.
    detaching: Signal,
}

impl Cache {
    /// What has been done so far.
    pub fn statistics(&self) -> Statistics {
        let index = self.index.borrow();
        let (read_errors, write_errors) = self.fast.errors();
        let (cache_read, cache_written) = self.fast.bytes();
        Statistics {
            lines: index.lines.len(),
            dirty_lines: index.dirty.len(),
            unsettled: self.ledger.borrow().len() as u64,
            unproven: index.unproven.len() << self.shape.line_bits,
            cleaned: self.cleaning.written.get(),
            disk_read: self.usage.disk.read().get(),
            disk_written: self.usage.disk.written().get(),
            cache_read,
            cache_written,
            read_errors,
            write_errors,
            ..*self.counts.borrow()
        }
    }

    /// How long reads took that the cache had all of: from the cache device.
    pub fn hit_latency(&self) -> Histogram {
        self.pace.hits()
    }

    /// How long reads took that the disk was needed for.
    pub fn miss_latency(&self) -> Histogram {
        self.pace.misses()
    }

    /// How it is laid out.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// What is done with writes now.
    pub fn mode(&self) -> Mode {
        self.mode.get()
    }

    /// Has writes go another way from now on, also when the cache is opened the next time. No byte is lost or becomes
    /// stale. If the disk then always has all that was written, all that it has not is written to it first, which
    /// [`Statistics::dirty_lines`] tells the progress of.
    ///
    /// # Errors
    /// If the disk does not take what only the cache has, or the cache device does not work. The mode has changed all the
    /// same, until the cache is closed.
    pub async fn set_mode(&self, mode: Mode) -> IoResult {
        self.mode.set(mode);
        if mode != Mode::WriteBack {
            self.changes.drained().await;
            self.clean().await?;
            self.is_clean().await?;
        }
        // Another change of the mode may have come in between.
        self.note(|superblock| superblock.mode = self.mode.get()).await
    }

    /// Everything was clean a moment ago: if nobody writes back any more, it is noted that nothing can be dirty.
    async fn is_clean(&self) -> IoResult {
        for _ in 0..ROUNDS {
            if !self.may_be_dirty.get() || self.settle().await.is_err() {
                return Ok(());
            }
            // If the mode was changed to and fro meanwhile, writes may be on their way that have seen that they may be dirty.
            self.changes.drained().await;
            if self.mode.get() == Mode::WriteBack {
                return Ok(());
            }
            if self.is_known_clean() {
                self.may_be_dirty.set(false);
                let note = self.note(|superblock| superblock.may_be_dirty = self.may_be_dirty.get());
                return note.await;
            }
            // Lines that were dirty were being filled.
        }
        Ok(())
    }

    /// Whether whoever opens it next will take it for one that may have what the disk has not.
    pub fn is_noted_dirty(&self) -> bool {
        self.superblock.borrow().may_be_dirty
    }

    /// Whether it may have, or get without being asked, what the disk has not.
    pub fn may_be_dirty(&self) -> bool {
        self.may_be_dirty.get() || self.mode.get() == Mode::WriteBack
    }

    /// Whether the cache device works; one that does not is not used until the cache is opened again.
    pub fn works(&self) -> bool {
        !self.has_failed()
    }

    /// Whether the cache device gives no answer for so long that the cache has failed, and has not since: reads that were
    /// under way there may never end, nor may they be dropped.
    pub fn hangs(&self) -> bool {
        self.fast.is_hanging()
    }

    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        if let Some(on) = self.on.upgrade() {
            on.spawn(task);
        }
    }

    /// Behind the last byte that can be in the cache.
    fn end(&self) -> ByteOffset {
        ByteOffset::new(self.lower.geometry().size.min(self.shape.disk_max()).get())
    }

    fn has_failed(&self) -> bool {
        self.state.get() != State::Works
    }

    /// The cache device does not work.
    fn fail(&self, why: &dyn std::fmt::Display) {
        if self.has_failed() {
            return;
        }
        self.state.set(State::Failing);
        tracing::error!(
            "{}: its cache does not work any more, and is not used until it is opened again: {why}",
            self.lower.name()
        );
        self.readers.raise();
        self.fragments.wake();
        self.fast.copies.wake();
        self.commits.wake();
        let Some(cache) = self.this.upgrade() else { return };
        self.spawn(async move {
            let state = match cache.witness.detach().await {
                Ok(()) => State::Detached,
                Err(error) => {
                    tracing::error!(
                        "{}: that its cache is not to be believed any more cannot be noted, so writes fail: {error}",
                        cache.lower.name()
                    );
                    State::Unwitnessed
                }
            };
            cache.state.set(state);
            cache.detaching.raise();
            cache.commits.wake();
            if state == State::Detached && cache.may_be_dirty.get() {
                cache.rescue().await;
            }
        });
    }

    /// Writes to the disk what only the cache has, which has failed.
    async fn rescue(&self) {
        match self.let_go().await {
            Ok(()) => tracing::warn!("{}: all that only its cache had is on it now", self.lower.name()),
            Err(error) => tracing::error!(
                "{}: what only its cache has could not be written to it, and cannot be read as long as that is so: {}: {error}",
                self.lower.name(),
                self.dirty_text()
            ),
        }
    }

    /// Has the disk have all that only the cache has, before the disk is used without it; whoever opens one that has failed
    /// knows that then.
    ///
    /// # Errors
    /// What the disk or the cache device has said, or that it cannot be noted.
    pub async fn hand_over(&self) -> IoResult {
        match (self.may_be_dirty.get(), self.has_failed()) {
            (false, _) => Ok(()),
            (true, false) => self.clean().await,
            (true, true) => self.let_go().await,
        }
    }

    /// The same of most of it, while the guest goes on.
    ///
    /// # Errors
    /// As in [`Cache::hand_over`].
    pub async fn hand_over_most(&self) -> IoResult {
        match self.may_be_dirty.get() && !self.has_failed() {
            true => self.clean_rounds(ROUNDS).await,
            false => self.hand_over().await,
        }
    }

    /// Whether the disk has all that only this cache had, for certain: no part of it is damaged, and no crash finds anything.
    /// No request is under way.
    pub async fn has_handed_over(&self) -> bool {
        if !self.may_be_dirty.get() || self.has_failed() {
            return true;
        }
        for _ in 0..ROUNDS {
            // A fill continues after its read has ended, and its line cannot settle until then.
            self.fills.idle().await;
            if self.settle().await.is_err() {
                return false;
            }
            if self.is_known_clean() {
                return true;
            }
        }
        false
    }

    /// The disk is another cache's from now on: nothing is written to it any more.
    pub async fn abandon(&self) {
        self.cleaning.abandon().await;
    }

    /// Has the disk have all that there is, and whoever opens the cache, which has failed, next, know that.
    async fn let_go(&self) -> IoResult {
        self.clean().await?;
        let whole = ByteRange::new(0, u64::MAX >> 1);
        let noted = self.witness.supersede(whole).await;
        noted.map_err(|_| self.refused(Operation::Flush, whole))?;
        self.may_be_dirty.set(false);
        Ok(())
    }

    /// A request that cannot be done because of the cache device.
    fn refused(&self, operation: Operation, range: ByteRange) -> IoError {
        IoError::new(self.lower.name(), operation, range, Failure::Os(EIO))
    }

    /// Waits until the next one to open the cache will know that it has failed.
    async fn detached(&self, operation: Operation, range: ByteRange) -> IoResult {
        self.detaching.when(|| self.state.get() != State::Failing).await;
        match self.state.get() {
            State::Detached => Ok(()),
            _ => Err(self.refused(operation, range)),
        }
    }

    /// The cache, or a crash, has something of `range` that the disk has not.
    fn has_only(&self, range: ByteRange) -> bool {
        if !self.may_be_dirty.get() {
            return false;
        }
        let lines = self.shape.lines_of(range);
        let index = self.index.borrow();
        if !index.are_loaded(lines.clone()) {
            return true;
        }
        let (leaving, ledger) = (self.leaving.borrow(), self.ledger.borrow());
        let superseded = self.superseded.borrow();
        let has_only = |line: Line, slot: Slot| {
            let left = ledger.get(slot).map_or(0, |place| place.any_dirty());
            index.dirty(slot) | left != 0 && !superseded.contains(line)
        };
        let mut cached = index.lines.within(lines.clone());
        cached.any(|line| index.find(line).is_some_and(|slot| has_only(line, slot)))
            || leaving
                .within(lines)
                .any(|(line, slot)| !index.lines.contains(line) && has_only(line, slot))
    }

    /// Notes that nothing that the cache has of exactly this range is to be believed.
    async fn note_superseded(&self, operation: Operation, range: ByteRange) -> IoResult {
        self.witness.supersede(range).await.map_err(|error| {
            tracing::error!(
                "{}: that its cache has something older than what is there cannot be noted: {error}",
                self.lower.name()
            );
            self.refused(operation, range)
        })
    }

    /// The circumstances of a request of so many bytes that came at `now`, for the policy.
    fn context(&self, now: LoopTime, access: Access, request_bytes: u64) -> Context {
        Context {
            access,
            request_bytes,
            now: Duration::from_nanos(now.as_nanos()),
        }
    }

    fn now(&self) -> LoopTime {
        self.on.upgrade().map(|on| on.now()).unwrap_or_default()
    }

    /// The same, and cheap: when a request began, to the length of a turn of the loop.
    fn turn_time(&self) -> LoopTime {
        self.on.upgrade().map(|on| on.turn_time()).unwrap_or_default()
    }

    /// Whether a line that is not in the cache shall be brought in. To be asked once for each request.
    fn admits(&self, line: Line, context: Context) -> bool {
        let set = self.shape.set_of(line);
        self.tell_written(context.now);
        let admits = self.index.borrow_mut().policy().admit(set, line, context);
        if admits {
            self.usage.admitted(self.shape.line_len());
        }
        admits
    }

    /// Has the sets of a range in memory.
    async fn load_range(&self, range: ByteRange, operation: Operation) -> IoResult {
        if self.has_other_size() {
            self.see_size().await?;
        }
        let lines = self.shape.lines_of(range);
        if let Err(error) = self.load_lines(lines.clone()).await {
            self.fail(&error);
            return match self.may_be_dirty.get() {
                true => Err(self.refused(operation, range)),
                false => Ok(()),
            };
        }
        self.check_fence(lines, operation, range)
    }
}
