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
//! - A slot gets another line only when recovery would find the slot empty ([`slot_allocation`]).
//! - A line's metadata is persisted only after its data has been flushed ([`persist`]).
//! - No request waits for the cache device where the disk can answer. If the cache device fails, the disk serves
//!   everything.

mod change;
mod clean;
mod commit;
mod compare;
mod copy_pool;
mod device;
mod dirty;
mod disk_size;
mod entry;
mod failed_cache;
mod fill;
mod flush_tracker;
mod hot;
mod index;
mod journal;
mod latency_bypass;
mod layout;
mod ledger;
mod line_parts;
mod line_set;
mod load;
mod offline;
mod open;
mod page;
mod persist;
mod policy;
mod read;
mod resize;
mod samples;
mod set_table;
mod slot_allocation;
mod superblock;
mod usage;
mod watchdog;
mod write_back;

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::rc::{Rc, Weak};
use std::time::Duration;

use larder_block::event_loop::WeakLoop;
use larder_block::histogram::Histogram;
use larder_block::range_lock::RangeLocks;
use larder_block::semaphore::Semaphore;
use larder_block::{BlockDevice, BoxFuture, ByteOffset, ByteRange, Failure, IoError, IoResult, LoopTime, Operation};

pub use clean::CleanOptions;
pub use larder_block::backend::file::Verdict;
pub use layout::CacheLayout;
pub use offline::{LineCounts, MetadataDamage, count_lines, set_mode};
pub use open::{CacheCreateOptions, CacheOpenError, CacheOpenOptions, PersistOptions, create, read_superblock};
pub use resize::copy;
pub use superblock::{DiskId, Superblock, SuperblockError};

use change::DiskChanges;
use clean::Cleaner;
use commit::CommitQueue;
use compare::Comparison;
use fill::Fills;
use flush_tracker::FlushTracker;
use index::LineIndex;
use larder_block::signal::Signal;
use larder_policy::policy::{AccessContext, AccessKind};
use latency_bypass::LatencyBypass;
use layout::{Line, Slot};
use ledger::Ledger;
use line_set::LineSet;
use load::Loading;
use persist::MetadataPersister;
use slot_allocation::PendingRemovals;
use usage::Usage;
use watchdog::CacheDevice;

const EIO: i32 = 5;

/// Rounds of cleaning or persisting while new lines become dirty or unpersisted; the rest waits until no request
/// comes.
const CLEAN_ROUNDS_MAX: u32 = 4;

/// The handling of writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CacheMode {
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

impl CacheMode {
    fn number(self) -> u32 {
        match self {
            Self::WriteThrough => 0,
            Self::WriteBack => 1,
            Self::WriteAround => 2,
            Self::PassThrough => 3,
        }
    }

    fn from_number(number: u32) -> Option<Self> {
        [Self::WriteThrough, Self::WriteBack, Self::WriteAround, Self::PassThrough]
            .into_iter()
            .find(|mode| mode.number() == number)
    }
}

/// Counters of requests since the cache was opened, or of bytes where stated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStatistics {
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
    pub unpersisted: u64,
    /// Bytes in loaded lines that are not used before they were compared with the disk ([`Verdict::Unproven`]).
    pub unproven: u64,
}

/// Durable storage apart from the cache device, which records that the cache's content is invalid: a cache device
/// that fails cannot record that itself. The next opening passes the record in [`CacheOpenOptions::failure`].
pub trait FailureLog {
    /// Records, durably, that the cache's content is invalid, except for dirty data.
    fn record_failed(&self) -> BoxFuture<'_, std::io::Result<()>>;

    /// Records in addition, durably, that the dirty data of `range` is invalid too: the disk has newer data.
    fn record_superseded(&self, range: ByteRange) -> BoxFuture<'_, std::io::Result<()>>;

    /// Removes all these records, durably: the cache is valid again.
    fn clear(&self) -> BoxFuture<'_, std::io::Result<()>>;
}

/// The records of a [`FailureLog`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FailureRecord {
    /// Ranges of the disk of which no cached data is valid.
    pub superseded: Vec<ByteRange>,
}

/// State of the cache device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DeviceState {
    Working,
    /// The device has failed, and the witness is recording that.
    Failing,
    /// The device has failed, and that is recorded for the next opening.
    FailedRecorded,
    /// The device has failed, and that could not be recorded. The next opening would trust the cache's content, so
    /// writes fail.
    FailedUnrecorded,
}

/// Cache of one disk on a faster device, as a filter over the disk.
pub struct Cache {
    this: Weak<Self>,
    on: WeakLoop,
    lower: Rc<dyn BlockDevice>,
    fast: Rc<CacheDevice>,
    layout: CacheLayout,
    /// Initial value of all checksums.
    seed: u32,
    mode: Cell<CacheMode>,
    superblock: RefCell<Superblock>,
    /// Held while the superblock is written: one write at a time, or an older one could land last.
    superblock_lock: RangeLocks,
    fingerprint: Box<dyn Fn() -> Vec<u8>>,
    index: RefCell<LineIndex>,
    ledger: RefCell<Ledger>,
    pending_removals: RefCell<PendingRemovals>,
    /// Ranges whose dirty data was removed from memory. Recovery no longer finds that data once the given number of
    /// records is written.
    dropped_dirty: RefCell<Vec<(ByteRange, u64)>>,
    loading: Loading,
    commits: CommitQueue,
    persister: MetadataPersister,
    changes: DiskChanges,
    /// Locations of the guest's last writes.
    recent_writes: samples::RecentWrites,
    /// Flush state of the dirty data that writes have put on the cache device.
    device_flush_tracker: FlushTracker,
    cleaner: Cleaner,
    comparison: Comparison,
    /// The disk's size in bytes as the cache knows it; `size_generation` is the change of size that it belongs to.
    size: Cell<u64>,
    /// End of the part of the disk that the cache may hold, in bytes.
    content_end: Cell<u64>,
    size_generation: Cell<u64>,
    size_lock: RangeLocks,
    fills: Fills,
    /// Budget of fragments that concurrent reads may consist of.
    fragments: Rc<Semaphore>,
    /// Wakes tasks that wait for readers to leave a slot.
    reader_done: Signal,
    counts: RefCell<CacheStatistics>,
    bypass: LatencyBypass,
    usage: Usage,
    /// The most lines whose metadata may be unpersisted.
    unpersisted_max: usize,
    /// The longest time for which a line's metadata may be unpersisted.
    persist_delay_max: Duration,
    /// Way in which the last line was put.
    way_hint: Cell<u32>,
    /// Set if there may have been dirty lines when the cache was opened.
    was_dirty: bool,
    /// Set if there may be dirty lines now, which the superblock says too.
    may_be_dirty: Cell<bool>,
    /// Set if only dirty lines were valid when the cache was opened, except for the ranges given.
    only_dirty: Option<FailureRecord>,
    /// Lines of a failed cache whose content no later opening will use.
    superseded: RefCell<LineSet>,
    state: Cell<DeviceState>,
    failure_log: Box<dyn FailureLog>,
    /// Wakes tasks that wait for the witness's record.
    failure_recorded: Signal,
}

impl Cache {
    /// Returns the counters since the cache was opened.
    pub fn statistics(&self) -> CacheStatistics {
        let index = self.index.borrow();
        let (read_errors, write_errors) = self.fast.errors();
        let (cache_read, cache_written) = self.fast.bytes();
        CacheStatistics {
            lines: index.lines.len(),
            dirty_lines: index.dirty.len(),
            unpersisted: self.ledger.borrow().len() as u64,
            unproven: index.unproven.len() << self.layout.line_bits,
            cleaned: self.cleaner.written.get(),
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
        self.bypass.hits()
    }

    /// Returns the latency of reads that needed the disk.
    pub fn miss_latency(&self) -> Histogram {
        self.bypass.misses()
    }

    /// Returns the cache's block layout.
    pub fn layout(&self) -> CacheLayout {
        self.layout
    }

    /// Returns the current handling of writes.
    pub fn mode(&self) -> CacheMode {
        self.mode.get()
    }

    /// Changes the handling of writes, also for the next opening. No byte is lost or becomes stale. In a mode without
    /// dirty data, all dirty lines are written to the disk first; [`CacheStatistics::dirty_lines`] shows the progress.
    ///
    /// # Errors
    /// The disk fails a write of dirty data, or the cache device does not work. The new mode applies all the same,
    /// until the cache is closed.
    pub async fn set_mode(&self, mode: CacheMode) -> IoResult {
        self.mode.set(mode);
        if mode != CacheMode::WriteBack {
            self.changes.wait_drained().await;
            self.clean().await?;
            self.record_clean().await?;
        }
        // The mode may have changed again in between.
        self.update_superblock(|superblock| superblock.mode = self.mode.get()).await
    }

    /// Records that no line can be dirty, if all were clean a moment ago and the mode is no longer write-back.
    async fn record_clean(&self) -> IoResult {
        for _ in 0..CLEAN_ROUNDS_MAX {
            if !self.may_be_dirty.get() || self.persist_metadata().await.is_err() {
                return Ok(());
            }
            // After a change of the mode and back, writes that saw the old mode may still be in flight.
            self.changes.wait_drained().await;
            if self.mode.get() == CacheMode::WriteBack {
                return Ok(());
            }
            if self.is_known_clean() {
                self.may_be_dirty.set(false);
                let update = self.update_superblock(|superblock| superblock.may_be_dirty = self.may_be_dirty.get());
                return update.await;
            }
            // Dirty lines were being filled.
        }
        Ok(())
    }

    /// Returns whether the next opening will assume that the cache may have dirty data.
    pub fn is_recorded_dirty(&self) -> bool {
        self.superblock.borrow().may_be_dirty
    }

    /// Returns whether the cache may have dirty data, or get some without another change of the mode.
    pub fn may_be_dirty(&self) -> bool {
        self.may_be_dirty.get() || self.mode.get() == CacheMode::WriteBack
    }

    /// Returns whether the cache device works. One that has failed is not used until the cache is opened again.
    pub fn is_working(&self) -> bool {
        !self.has_failed()
    }

    /// Returns whether the cache failed because its device timed out, and the device still has requests to answer.
    /// Reads that were under way there may never complete, nor may they be dropped.
    pub fn is_hanging(&self) -> bool {
        self.fast.is_hanging()
    }

    fn spawn(&self, task: impl Future<Output = ()> + 'static) {
        if let Some(on) = self.on.upgrade() {
            on.spawn(task);
        }
    }

    /// Returns the end of the part of the disk that the cache can hold.
    fn end(&self) -> ByteOffset {
        ByteOffset::new(self.lower.geometry().size.min(self.layout.disk_max()).get())
    }

    fn has_failed(&self) -> bool {
        self.state.get() != DeviceState::Working
    }

    /// Marks the cache as failed, and starts to record that.
    fn fail(&self, why: &dyn std::fmt::Display) {
        if self.has_failed() {
            return;
        }
        self.state.set(DeviceState::Failing);
        tracing::error!(
            event = "cache-failed",
            "{}: its cache does not work any more, and is not used until it is opened again: {why}",
            self.lower.name()
        );
        self.reader_done.raise();
        self.fragments.wake();
        self.fast.copies.wake();
        self.commits.wake();
        let Some(cache) = self.this.upgrade() else { return };
        self.spawn(async move {
            let state = match cache.failure_log.record_failed().await {
                Ok(()) => DeviceState::FailedRecorded,
                Err(error) => {
                    tracing::error!(
                        event = "cache-failed",
                        "{}: cannot record that its cache is invalid, so writes fail: {error}",
                        cache.lower.name()
                    );
                    DeviceState::FailedUnrecorded
                }
            };
            cache.state.set(state);
            cache.failure_recorded.raise();
            cache.commits.wake();
            if state == DeviceState::FailedRecorded && cache.may_be_dirty.get() {
                cache.rescue().await;
            }
        });
    }

    /// Writes the dirty data of a failed cache to the disk.
    async fn rescue(&self) {
        match self.clean_and_invalidate().await {
            Ok(()) => tracing::warn!(
                event = "cache-rescued",
                "{}: all data that only its cache had is written to it now",
                self.lower.name()
            ),
            Err(error) => tracing::error!(
                event = "write-back-failed",
                "{}: data that only its cache has could not be written to it, and cannot be read until it can be written: {}: {error}",
                self.lower.name(),
                self.format_dirty_ranges()
            ),
        }
    }

    /// Writes all dirty data to the disk, before the disk is used without the cache. If the cache has failed, the
    /// witness records that its content is invalid.
    ///
    /// # Errors
    /// The disk or the cache device fails a request, or the record cannot be written.
    pub async fn flush_dirty(&self) -> IoResult {
        match (self.may_be_dirty.get(), self.has_failed()) {
            (false, _) => Ok(()),
            (true, false) => self.clean().await,
            (true, true) => self.clean_and_invalidate().await,
        }
    }

    /// Writes most dirty data to the disk while the guest's writes continue.
    ///
    /// # Errors
    /// As in [`Cache::flush_dirty`].
    pub async fn flush_most_dirty(&self) -> IoResult {
        match self.may_be_dirty.get() && !self.has_failed() {
            true => self.clean_rounds(CLEAN_ROUNDS_MAX).await,
            false => self.flush_dirty().await,
        }
    }

    /// Returns whether the disk certainly has all data: no set is damaged, and recovery would find no dirty data. No
    /// request may be under way.
    pub async fn disk_has_all_data(&self) -> bool {
        if !self.may_be_dirty.get() || self.has_failed() {
            return true;
        }
        for _ in 0..CLEAN_ROUNDS_MAX {
            // A fill continues after its read has ended, and its line cannot be persisted until then.
            self.fills.wait_idle().await;
            if self.persist_metadata().await.is_err() {
                return false;
            }
            if self.is_known_clean() {
                return true;
            }
        }
        false
    }

    /// Stops all writes to the disk for good, because another cache owns the disk from now on.
    pub async fn inactivate(&self) {
        self.cleaner.inactivate().await;
    }

    /// Writes the dirty data of a failed cache to the disk, and records that the cache's content is invalid.
    async fn clean_and_invalidate(&self) -> IoResult {
        self.clean().await?;
        let everything = ByteRange::new(0, u64::MAX >> 1);
        let recorded = self.failure_log.record_superseded(everything).await;
        recorded.map_err(|_| self.device_error(Operation::Flush, everything))?;
        self.may_be_dirty.set(false);
        Ok(())
    }

    /// Returns the error of a request that fails because of the cache device.
    fn device_error(&self, operation: Operation, range: ByteRange) -> IoError {
        IoError::new(self.lower.name(), operation, range, Failure::Os(EIO))
    }

    /// Waits until the cache's failure is recorded for the next opening.
    async fn wait_failure_recorded(&self, operation: Operation, range: ByteRange) -> IoResult {
        self.failure_recorded.when(|| self.state.get() != DeviceState::Failing).await;
        match self.state.get() {
            DeviceState::FailedRecorded => Ok(()),
            _ => Err(self.device_error(operation, range)),
        }
    }

    /// Returns whether memory has, or recovery would find, data of `range` that the disk does not have.
    fn has_dirty_data(&self, range: ByteRange) -> bool {
        if !self.may_be_dirty.get() {
            return false;
        }
        let lines = self.layout.lines_of(range);
        let index = self.index.borrow();
        if !index.are_loaded(lines.clone()) {
            return true;
        }
        let (leaving, ledger) = (self.pending_removals.borrow(), self.ledger.borrow());
        let superseded = self.superseded.borrow();
        let is_dirty = |line: Line, slot: Slot| {
            let recoverable = ledger.get(slot).map_or(0, |state| state.possibly_dirty());
            index.dirty(slot) | recoverable != 0 && !superseded.contains(line)
        };
        let mut cached = index.lines.within(lines.clone());
        cached.any(|line| index.find(line).is_some_and(|slot| is_dirty(line, slot)))
            || leaving.within(lines).any(|(line, slot)| !index.lines.contains(line) && is_dirty(line, slot))
    }

    /// Records that no cached data of exactly this range is valid.
    async fn record_superseded(&self, operation: Operation, range: ByteRange) -> IoResult {
        self.failure_log.record_superseded(range).await.map_err(|error| {
            tracing::error!(
                "{}: cannot record that the disk has newer data than its cache: {error}",
                self.lower.name()
            );
            self.device_error(operation, range)
        })
    }

    /// Returns the policy's context of a request of `request_bytes` that came at `now`.
    fn context(&self, now: LoopTime, access: AccessKind, request_bytes: u64) -> AccessContext {
        AccessContext { access, request_bytes, now: Duration::from_nanos(now.as_nanos()) }
    }

    fn now(&self) -> LoopTime {
        self.on.upgrade().map(|on| on.now()).unwrap_or_default()
    }

    /// Returns the time of the current turn of the loop: cheaper than [`Self::now`], and less exact.
    fn turn_time(&self) -> LoopTime {
        self.on.upgrade().map(|on| on.turn_time()).unwrap_or_default()
    }

    /// Returns whether an uncached line is to be filled. Each request asks once for each line.
    fn should_admit(&self, line: Line, context: AccessContext) -> bool {
        let set = self.layout.set_of(line);
        self.report_written(context.now);
        let is_admitted = self.index.borrow_mut().policy().admit(set, line, context);
        if is_admitted {
            self.usage.count_admitted(self.layout.line_len());
        }
        is_admitted
    }

    /// Loads the sets of a range into memory.
    async fn load_range(&self, range: ByteRange, operation: Operation) -> IoResult {
        if self.has_size_changed() {
            self.apply_size().await?;
        }
        let lines = self.layout.lines_of(range);
        if let Err(error) = self.load_lines(lines.clone()).await {
            self.fail(&error);
            return match self.may_be_dirty.get() {
                true => Err(self.device_error(operation, range)),
                false => Ok(()),
            };
        }
        self.check_fence(lines, operation, range)
    }
}
