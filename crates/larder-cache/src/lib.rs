//! A cache on a fast device that belongs to one disk, as a block filter.
//!
//! The cache device holds lines of the disk, so that hot data is read at its speed. Memory maps lines to slots
//! ([`index`]): some ten bytes for a line, and up to four more where the lines are scattered. A journal and pages on
//! the device hold the metadata that survives a crash ([`journal`], [`page`]), so that the cache is warm after a
//! stop, a kill or a power loss. A *crash* is a kill of the process or a power loss of the host; *recovery* is the
//! opening of the cache after a crash.
//!
//! Invariants:
//! - A read never returns a byte older than the last completed write, also after a crash, and also after the line was
//!   evicted. Clean data equals the durable data of the disk, or is marked as invalid before the two can differ
//!   ([`change`]).
//! - Data that may differ from the disk is compared with it before it is used ([`compare`]).
//! - A slot gets another line only when recovery would find the slot empty ([`place`]).
//! - A line's metadata is persisted only after its data has been flushed ([`settle`]).
//! - No request waits for the cache device where the disk can answer. If the cache device fails, the disk serves
//!   everything.

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

/// Rounds of cleaning or persisting while new lines become dirty or unpersisted; the rest waits until no request
/// comes.
const ROUNDS: u32 = 4;

/// The handling of writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Mode {
    /// Writes go to the disk and to the cache, and complete when both have the data.
    #[default]
    WriteThrough,
    /// Writes go to the cache only; the disk gets the data later.
    WriteBack,
    /// Writes go to the disk only; reads fill the cache.
    WriteAround,
    /// The cache is not used, and data that is written does not stay in it.
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

/// Counters of requests since the cache was opened, or of bytes where stated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Statistics {
    /// Reads served entirely from the cache.
    pub hits: u64,
    /// Reads served partly from the cache.
    pub partial_hits: u64,
    /// Reads of which the cache had nothing.
    pub misses: u64,
    /// Reads of cached data that went to the disk, because the cache device was slower than the disk.
    pub bypassed_slow: u64,
    /// Reads that waited for another read's data, or copied it.
    pub joined: u64,
    /// Bytes read from the cache device for guests.
    pub hit_bytes: u64,
    /// Bytes filled into the cache after reads.
    pub filled: u64,
    /// Bytes of [`Self::filled`] that no guest has asked for on this host: they were hot on another host.
    pub warmed: u64,
    /// Reads that filled nothing, because too many fills or a write of the same range were under way.
    pub bypassed_busy: u64,
    /// Lines evicted to make room.
    pub evicted: u64,
    /// Bytes of journal and pages written.
    pub metadata_written: u64,
    /// Dirty bytes written to the disk.
    pub cleaned: u64,
    /// Bytes read from the disk.
    pub disk_read: u64,
    /// Bytes written to the disk.
    pub disk_written: u64,
    /// Bytes read from the cache device, for any purpose.
    pub cache_read: u64,
    /// Bytes written to the cache device, for any purpose.
    pub cache_written: u64,
    /// Reads of the cache device that failed or timed out.
    pub read_errors: u64,
    /// Requests to the cache device other than reads that failed or timed out.
    pub write_errors: u64,
    /// Cached lines.
    pub lines: u64,
    /// Cached lines with dirty data.
    pub dirty_lines: u64,
    /// Lines whose metadata on the cache device differs from memory, so that recovery would find another state.
    pub unsettled: u64,
    /// Bytes in loaded lines that are not used before they were compared with the disk ([`Verdict::Unproven`]).
    pub unproven: u64,
}

/// Durable storage apart from the cache device, which records that the cache's content is invalid: a cache device
/// that fails cannot record that itself. The next opening passes the record in [`OpenOptions::detached`].
pub trait Witness {
    /// Records, durably, that the cache's content is invalid, except for dirty data.
    fn detach(&self) -> BoxFuture<'_, std::io::Result<()>>;

    /// Records in addition, durably, that the dirty data of `range` is invalid too: the disk has newer data.
    fn supersede(&self, range: ByteRange) -> BoxFuture<'_, std::io::Result<()>>;

    /// Removes all these records, durably: the cache is valid again.
    fn attach(&self) -> BoxFuture<'_, std::io::Result<()>>;
}

/// The records of a [`Witness`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Detached {
    /// Ranges of the disk of which no cached data is valid.
    pub superseded: Vec<ByteRange>,
}

/// State of the cache device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Works,
    /// The device has failed, and the witness is recording that.
    Failing,
    /// The device has failed, and that is recorded for the next opening.
    Detached,
    /// The device has failed, and that could not be recorded. The next opening would trust the cache's content, so
    /// writes fail.
    Unwitnessed,
}

/// Cache of one disk on a faster device, as a filter over the disk.
pub struct Cache {
    this: Weak<Self>,
    on: WeakLoop,
    lower: Rc<dyn BlockDevice>,
    fast: Rc<Fast>,
    shape: Shape,
    /// Initial value of all checksums.
    seed: u32,
    mode: Cell<Mode>,
    superblock: RefCell<Superblock>,
    /// Held while the superblock is written: one write at a time, or an older one could land last.
    noting: Ranges,
    stamp: Box<dyn Fn() -> Vec<u8>>,
    index: RefCell<Index>,
    ledger: RefCell<Ledger>,
    leaving: RefCell<Leaving>,
    /// Ranges whose dirty data was removed from memory. Recovery no longer finds that data once the given number of
    /// records is written.
    undoing: RefCell<Vec<(ByteRange, u64)>>,
    loading: Loading,
    commits: Commits,
    settling: Settling,
    changes: Changes,
    /// Locations of the guest's last writes.
    written: samples::Written,
    /// Flush state of the dirty data that writes have put on the cache device.
    kept: Flushing,
    cleaning: Cleaning,
    comparing: Comparing,
    /// The disk's size in bytes as the cache knows it; `size_generation` is the change of size that it belongs to.
    size: Cell<u64>,
    /// End of the part of the disk that the cache may hold, in bytes.
    reach: Cell<u64>,
    size_generation: Cell<u64>,
    sizing: Ranges,
    fills: Fills,
    /// Budget of fragments that concurrent reads may consist of.
    fragments: Rc<Budget>,
    /// Wakes tasks that wait for readers to leave a slot.
    readers: Signal,
    counts: RefCell<Statistics>,
    pace: Pace,
    usage: Usage,
    /// The most lines whose metadata may be unpersisted.
    unsettled_max: usize,
    /// The longest time for which a line's metadata may be unpersisted.
    settle_after: Duration,
    /// Way in which the last line was put.
    way_hint: Cell<u32>,
    /// Set if there may have been dirty lines when the cache was opened.
    was_dirty: bool,
    /// Set if there may be dirty lines now, which the superblock says too.
    may_be_dirty: Cell<bool>,
    /// Set if only dirty lines were valid when the cache was opened, except for the ranges given.
    only_dirty: Option<Detached>,
    /// Lines of a failed cache whose content no later opening will use.
    superseded: RefCell<LineSet>,
    state: Cell<State>,
    witness: Box<dyn Witness>,
    /// Wakes tasks that wait for the witness's record.
    detaching: Signal,
}

impl Cache {
    /// Returns the counters since the cache was opened.
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

    /// Returns the latency of reads that the cache device served entirely.
    pub fn hit_latency(&self) -> Histogram {
        self.pace.hits()
    }

    /// Returns the latency of reads that needed the disk.
    pub fn miss_latency(&self) -> Histogram {
        self.pace.misses()
    }

    /// Returns the cache's block layout.
    pub fn shape(&self) -> Shape {
        self.shape
    }

    /// Returns the current handling of writes.
    pub fn mode(&self) -> Mode {
        self.mode.get()
    }

    /// Changes the handling of writes, also for the next opening. No byte is lost or becomes stale. In a mode without
    /// dirty data, all dirty lines are written to the disk first; [`Statistics::dirty_lines`] shows the progress.
    ///
    /// # Errors
    /// The disk fails a write of dirty data, or the cache device does not work. The new mode applies all the same,
    /// until the cache is closed.
    pub async fn set_mode(&self, mode: Mode) -> IoResult {
        self.mode.set(mode);
        if mode != Mode::WriteBack {
            self.changes.drained().await;
            self.clean().await?;
            self.is_clean().await?;
        }
        // The mode may have changed again in between.
        self.note(|superblock| superblock.mode = self.mode.get()).await
    }

    /// Records that no line can be dirty, if all were clean a moment ago and the mode is no longer write-back.
    async fn is_clean(&self) -> IoResult {
        for _ in 0..ROUNDS {
            if !self.may_be_dirty.get() || self.settle().await.is_err() {
                return Ok(());
            }
            // After a change of the mode and back, writes that saw the old mode may still be in flight.
            self.changes.drained().await;
            if self.mode.get() == Mode::WriteBack {
                return Ok(());
            }
            if self.is_known_clean() {
                self.may_be_dirty.set(false);
                let note = self.note(|superblock| superblock.may_be_dirty = self.may_be_dirty.get());
                return note.await;
            }
            // Dirty lines were being filled.
        }
        Ok(())
    }

    /// Returns whether the next opening will assume that the cache may have dirty data.
    pub fn is_noted_dirty(&self) -> bool {
        self.superblock.borrow().may_be_dirty
    }

    /// Returns whether the cache may have dirty data, or get some without another change of the mode.
    pub fn may_be_dirty(&self) -> bool {
        self.may_be_dirty.get() || self.mode.get() == Mode::WriteBack
    }

    /// Returns whether the cache device works. One that has failed is not used until the cache is opened again.
    pub fn works(&self) -> bool {
        !self.has_failed()
    }

    /// Returns whether the cache failed because its device timed out, and the device still has requests to answer.
    /// Reads that were under way there may never complete, nor may they be dropped.
    pub fn hangs(&self) -> bool {
        self.fast.is_hanging()
    }

    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        if let Some(on) = self.on.upgrade() {
            on.spawn(task);
        }
    }

    /// Returns the end of the part of the disk that the cache can hold.
    fn end(&self) -> ByteOffset {
        ByteOffset::new(self.lower.geometry().size.min(self.shape.disk_max()).get())
    }

    fn has_failed(&self) -> bool {
        self.state.get() != State::Works
    }

    /// Marks the cache as failed, and starts to record that.
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
                        "{}: cannot record that its cache is invalid, so writes fail: {error}",
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

    /// Writes the dirty data of a failed cache to the disk.
    async fn rescue(&self) {
        match self.let_go().await {
            Ok(()) => tracing::warn!(
                "{}: all data that only its cache had is written to it now",
                self.lower.name()
            ),
            Err(error) => tracing::error!(
                "{}: data that only its cache has could not be written to it, and cannot be read until it can be written: {}: {error}",
                self.lower.name(),
                self.dirty_text()
            ),
        }
    }

    /// Writes all dirty data to the disk, before the disk is used without the cache. If the cache has failed, the
    /// witness records that its content is invalid.
    ///
    /// # Errors
    /// The disk or the cache device fails a request, or the record cannot be written.
    pub async fn hand_over(&self) -> IoResult {
        match (self.may_be_dirty.get(), self.has_failed()) {
            (false, _) => Ok(()),
            (true, false) => self.clean().await,
            (true, true) => self.let_go().await,
        }
    }

    /// Writes most dirty data to the disk while the guest's writes continue.
    ///
    /// # Errors
    /// As in [`Cache::hand_over`].
    pub async fn hand_over_most(&self) -> IoResult {
        match self.may_be_dirty.get() && !self.has_failed() {
            true => self.clean_rounds(ROUNDS).await,
            false => self.hand_over().await,
        }
    }

    /// Returns whether the disk certainly has all data: no set is damaged, and recovery would find no dirty data. No
    /// request may be under way.
    pub async fn has_handed_over(&self) -> bool {
        if !self.may_be_dirty.get() || self.has_failed() {
            return true;
        }
        for _ in 0..ROUNDS {
            // A fill continues after its read has ended, and its line cannot be persisted until then.
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

    /// Stops all writes to the disk for good, because another cache owns the disk from now on.
    pub async fn abandon(&self) {
        self.cleaning.abandon().await;
    }

    /// Writes the dirty data of a failed cache to the disk, and records that the cache's content is invalid.
    async fn let_go(&self) -> IoResult {
        self.clean().await?;
        let whole = ByteRange::new(0, u64::MAX >> 1);
        let noted = self.witness.supersede(whole).await;
        noted.map_err(|_| self.refused(Operation::Flush, whole))?;
        self.may_be_dirty.set(false);
        Ok(())
    }

    /// Returns the error of a request that fails because of the cache device.
    fn refused(&self, operation: Operation, range: ByteRange) -> IoError {
        IoError::new(self.lower.name(), operation, range, Failure::Os(EIO))
    }

    /// Waits until the cache's failure is recorded for the next opening.
    async fn detached(&self, operation: Operation, range: ByteRange) -> IoResult {
        self.detaching.when(|| self.state.get() != State::Failing).await;
        match self.state.get() {
            State::Detached => Ok(()),
            _ => Err(self.refused(operation, range)),
        }
    }

    /// Returns whether memory has, or recovery would find, data of `range` that the disk does not have.
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

    /// Records that no cached data of exactly this range is valid.
    async fn note_superseded(&self, operation: Operation, range: ByteRange) -> IoResult {
        self.witness.supersede(range).await.map_err(|error| {
            tracing::error!(
                "{}: cannot record that the disk has newer data than its cache: {error}",
                self.lower.name()
            );
            self.refused(operation, range)
        })
    }

    /// Returns the policy's context of a request of `request_bytes` that came at `now`.
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

    /// Returns the time of the current turn of the loop: cheaper than [`Self::now`], and less exact.
    fn turn_time(&self) -> LoopTime {
        self.on.upgrade().map(|on| on.turn_time()).unwrap_or_default()
    }

    /// Returns whether an uncached line is to be filled. Each request asks once for each line.
    fn admits(&self, line: Line, context: Context) -> bool {
        let set = self.shape.set_of(line);
        self.tell_written(context.now);
        let admits = self.index.borrow_mut().policy().admit(set, line, context);
        if admits {
            self.usage.admitted(self.shape.line_len());
        }
        admits
    }

    /// Loads the sets of a range into memory.
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
