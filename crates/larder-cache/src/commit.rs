//! Makes the lines' metadata durable: writes the journal, and later the pages.
//!
//! A commit with durable (*firm*) records ends with a flush, or is written with FUA. One with unflushed (*loose*)
//! records is only written. It becomes durable when a flush that began after it has ended, and a later sector,
//! written with FUA, says so ([`Cache::harden`]).
//!
//! One commit after the other fills a sector, so that the journal has room for many, and a page is written once for
//! many records: a sector whose records are all durable, as all before it are, is written again with more of them.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use larder_block::event_loop::yield_now;
use larder_block::{AlignedBuf, ByteLen, ByteOffset, Io, IoResult, WriteFlags, join};
use smallvec::SmallVec;

use crate::Cache;
use crate::entry::Entry;
use crate::journal::{self, Position, Record};
use crate::layout::{COMMIT_SECTORS, COMMIT_UNIT, JOURNAL_AT, SECTOR, Slot};
use crate::page::{self, Version};
use larder_block::signal::Signal;

/// The most bytes that one commit writes.
const COMMIT_BYTES_MAX: u64 = 64 << 10;
/// Pages that are written concurrently.
const PAGES_IN_FLIGHT_MAX: usize = 16;

/// Sectors of the journal that are reserved for stating the durable end: a checkpoint needs that to make room.
const RESERVED_SECTORS: u64 = 4 * COMMIT_SECTORS;

/// Error of a cache device that does not work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheFailed;

/// Unflushed record that was written.
struct UnflushedRecord {
    /// Sequence of the record's sector.
    sequence: u64,
    number: u64,
    record: Record,
}

/// Queue of records for the journal, and the journal's state.
pub(crate) struct CommitQueue {
    queue: RefCell<Vec<Record>>,
    /// Records queued since the cache was opened. `written` counts those that are written, and durable if they are
    /// firm.
    queued: Cell<u64>,
    written: Cell<u64>,
    /// Unflushed records that were written and are not known to be durable.
    unflushed: RefCell<VecDeque<UnflushedRecord>>,
    /// Sectors below this one are durable, and so is the data that they refer to.
    durable_end: Cell<u64>,
    /// Highest durable end that a durable sector states. `end_to_state` is the one that is to be stated.
    stated_end: Cell<u64>,
    end_to_state: Cell<u64>,
    running: Cell<bool>,
    changed: Signal,
    session: u32,
    /// Sequence of the next sector that is begun; `tail` is that of the oldest sector that is needed.
    end: Cell<u64>,
    tail: Cell<u64>,
    /// Records of the last sector, if more can be added to it.
    last_sector: RefCell<Option<Vec<Record>>>,
    /// Content of the last block that was written, up to the end.
    block: RefCell<Vec<u8>>,
    /// Index of the change mark that changes set now; each set has two.
    change_mark: Cell<usize>,
    checkpoint_running: Cell<bool>,
}

impl CommitQueue {
    /// Begins a journal at `end`; `block` holds the sectors of its block before the end.
    pub(crate) fn new(session: u32, tail: u64, end: u64, block: Vec<u8>) -> Self {
        Self {
            queue: RefCell::default(),
            queued: Cell::new(0),
            written: Cell::new(0),
            unflushed: RefCell::default(),
            // The opening has made durable whatever it found.
            durable_end: Cell::new(end),
            stated_end: Cell::new(tail),
            end_to_state: Cell::new(tail),
            running: Cell::new(false),
            changed: Signal::default(),
            session,
            end: Cell::new(end),
            tail: Cell::new(tail),
            last_sector: RefCell::default(),
            block: RefCell::new(block),
            change_mark: Cell::new(0),
            checkpoint_running: Cell::new(false),
        }
    }

    /// Wakes tasks that wait for a commit, so that they check their conditions again.
    pub(crate) fn wake(&self) {
        self.changed.raise();
    }

    /// Returns the number of records queued so far.
    pub(crate) fn queued(&self) -> u64 {
        self.queued.get()
    }

    /// Returns whether the first `records` records are written, and durable if they are firm.
    pub(crate) fn has_written(&self, records: u64) -> bool {
        self.written.get() >= records
    }

    fn has_end_to_state(&self) -> bool {
        self.end_to_state.get() > self.stated_end.get()
    }

    /// Returns the sequence of the next sector that is begun, if none is being written.
    pub(crate) fn end(&self) -> u64 {
        self.end.get()
    }

    /// Returns the first sector that may get more records, or is getting some.
    pub(crate) fn growing_sector(&self) -> u64 {
        self.end.get() - u64::from(self.last_sector.borrow().is_some())
    }
}

impl Cache {
    /// Queues a durable record that a slot holds `entry`.
    pub(crate) fn queue(&self, slot: Slot, entry: Entry) {
        let number = self.commits.queued.get();
        self.ledger.borrow_mut().begin_commit(slot, entry, number);
        self.push(slot, entry, false);
    }

    /// Queues an unflushed record that a slot holds `entry`: it outlives this process, but perhaps not a power loss.
    pub(crate) fn queue_unflushed(&self, slot: Slot, entry: Entry) {
        let memory = || self.index.borrow().entry(slot);
        self.ledger.borrow_mut().queue_unflushed(slot, entry, self.commits.queued.get(), memory);
        self.push(slot, entry, true);
    }

    fn push(&self, slot: Slot, entry: Entry, is_unflushed: bool) {
        self.commits.queue.borrow_mut().push(Record { slot, entry, unflushed: is_unflushed });
        self.commits.queued.set(self.commits.queued.get() + 1);
    }

    /// Starts to write the queue.
    pub(crate) fn start_commit(&self) {
        let has_work = !self.commits.queue.borrow().is_empty() || self.commits.has_end_to_state();
        if !has_work || self.commits.running.replace(true) {
            return;
        }
        let Some(cache) = self.this.upgrade() else { return };
        self.spawn(async move { cache.run_commits().await });
    }

    /// Writes all queued records, so that they outlive this process, and makes the firm ones durable.
    pub(crate) async fn commit(&self) -> Result<(), CacheFailed> {
        let records = self.commits.queued();
        self.wait_committed(|commits| commits.has_written(records)).await
    }

    async fn wait_committed(&self, is_over: impl Fn(&CommitQueue) -> bool) -> Result<(), CacheFailed> {
        self.start_commit();
        self.commits.changed.when(|| is_over(&self.commits) || self.has_failed()).await;
        is_over(&self.commits).then_some(()).ok_or(CacheFailed)
    }

    /// Makes all unflushed records durable, if there are any, and flushes the data that writes have put into the
    /// cache.
    pub(crate) async fn harden(&self) -> Result<(), CacheFailed> {
        let has_none = self.commits.unflushed.borrow().is_empty() && self.device_flush_tracker.is_flushed();
        if has_none || !self.may_be_dirty.get() {
            return Ok(());
        }
        self.harden_all().await
    }

    /// Writes the queued records, and makes all unflushed ones durable.
    pub(crate) async fn harden_queued(&self) -> Result<(), CacheFailed> {
        self.commit().await?;
        self.harden().await
    }

    /// Flushes the cache device, and makes all unflushed records durable.
    pub(crate) async fn harden_all(&self) -> Result<(), CacheFailed> {
        if self.has_failed() {
            return Err(CacheFailed);
        }
        let commits = &self.commits;
        let end = commits.end.get();
        let has_unflushed = || commits.unflushed.borrow().front().is_some_and(|loose| loose.sequence < end);
        let flush = self.device_flush_tracker.begin_flush();
        if let Err(error) = self.fast.flush().await {
            drop(flush);
            self.fail(&error);
            return Err(CacheFailed);
        }
        flush.finish();
        commits.durable_end.set(commits.durable_end.get().max(end));
        if !has_unflushed() {
            return Ok(());
        }
        commits.end_to_state.set(commits.end_to_state.get().max(end));
        // A task that waits for journal space gives way to this sector.
        commits.changed.raise();
        self.wait_committed(|commits| commits.stated_end.get() >= end).await
    }

    /// States that everything that an opening has found is durable.
    pub(crate) async fn state_durable_end(&self) {
        let end = self.commits.end.get();
        self.commits.end_to_state.set(end);
        // A failure was already recorded.
        let _ = self.wait_committed(|commits| commits.stated_end.get() >= end).await;
    }

    async fn run_commits(&self) {
        let commits = &self.commits;
        let per_sector = journal::records_per_sector(&self.layout);
        let ring = self.layout.journal_sectors();
        let records_max = per_sector * (COMMIT_BYTES_MAX / SECTOR).min(ring / 4) as usize;
        while !self.has_failed() {
            let ready = commits.queue.borrow().len().min(records_max);
            let count = match commits.has_end_to_state() {
                true => 0,
                false if ready == 0 => break,
                false => ready,
            };
            let extends_last_sector = self.fits_last_sector(count);
            let sectors = if extends_last_sector { 0 } else { count.div_ceil(per_sector).max(1) as u64 };
            let reserved = if count == 0 { 0 } else { RESERVED_SECTORS.min(ring / 4) };
            let end = || (commits.end.get() + sectors).next_multiple_of(COMMIT_SECTORS);
            let used = || end() + reserved - commits.tail.get();
            if used() > ring / 2 {
                self.start_checkpoint();
            }
            if used() > ring {
                // A checkpoint that began long ago may free too little, and then another one is needed.
                let is_over = || {
                    used() <= ring
                        || (count > 0 && commits.has_end_to_state())
                        || !commits.checkpoint_running.get()
                        || self.has_failed()
                };
                commits.changed.when(is_over).await;
                continue;
            }
            let records: Vec<Record> = commits.queue.borrow_mut().drain(..count).collect();
            if let Err(error) = self.write_commit(records, extends_last_sector, sectors).await {
                self.fail(&error);
            }
        }
        commits.running.set(false);
        commits.changed.raise();
    }

    /// Returns whether the first `count` queued records can be added to the last sector.
    fn fits_last_sector(&self, count: usize) -> bool {
        let (open, queue) = (self.commits.last_sector.borrow(), self.commits.queue.borrow());
        let room = open.as_ref().map_or(0, |records| journal::records_per_sector(&self.layout) - records.len());
        (1..=room).contains(&count) && queue[..count].iter().all(|record| !record.unflushed)
    }

    /// Writes a commit into `sectors` sectors, for which there is room, or adds it to the last sector. A commit
    /// without records only states the durable end.
    async fn write_commit(&self, mut records: Vec<Record>, extends_last_sector: bool, sectors: u64) -> IoResult {
        let commits = &self.commits;
        let ring = self.layout.journal_sectors();
        let sequence = commits.end.get() - u64::from(extends_last_sector);
        let end = commits.end.get() + sectors;
        let position = Position {
            session: commits.session,
            sequence,
            tail: commits.tail.get(),
            durable_end: commits.durable_end.get().min(sequence),
        };
        let has_durable = records.iter().any(|record| !record.unflushed);
        let all_durable = records.iter().all(|record| !record.unflushed);
        // An unflushed sector before a durable record must not be missing, or the record would not be found.
        let uses_fua = all_durable && (records.is_empty() || position.durable_end == sequence);
        {
            let mut index = self.index.borrow_mut();
            let mut policy = index.policy();
            records.iter_mut().for_each(|record| record.entry.hotness = policy.save(record.slot));
        }
        let mut sector_records = match extends_last_sector {
            true => commits.last_sector.borrow().clone().unwrap_or_default(),
            false => Vec::new(),
        };
        sector_records.extend_from_slice(&records);
        // Whole blocks are written; the part of the first one that is written already does not change.
        let from = sequence - sequence % COMMIT_SECTORS;
        let count = end.next_multiple_of(COMMIT_SECTORS) - from;
        let mut bytes = AlignedBuf::zeroed((count * SECTOR) as usize);
        let before = ((sequence - from) * SECTOR) as usize;
        bytes[..before].copy_from_slice(&commits.block.borrow()[..before]);
        journal::encode(&self.layout, self.seed, position, &sector_records, &mut bytes[before..]);
        let first = from % ring;
        // Up to the ring's end, and from its start.
        let split = ((ring - first).min(count) * SECTOR) as usize;
        let flags = if uses_fua { WriteFlags::FUA } else { WriteFlags::NONE };
        let bytes = Rc::new(bytes);
        let mut ios: SmallVec<[Io<'_>; 2]> = SmallVec::new();
        for (at, part) in [(first, 0..split), (0, split..bytes.len())] {
            if !part.is_empty() {
                let at = ByteOffset::new(JOURNAL_AT + at * SECTOR);
                ios.push(Io::task(self.fast.write(at, Rc::clone(&bytes), part, flags)));
            }
        }
        join(ios).await?;
        if has_durable && !uses_fua {
            let flush = self.device_flush_tracker.begin_flush();
            self.fast.flush().await?;
            flush.finish();
        }
        if has_durable || uses_fua {
            commits.stated_end.set(position.durable_end);
            // A sector that only states the durable end may survive where one before it does not.
            if !records.is_empty() || commits.durable_end.get() >= sequence {
                commits.durable_end.set(end);
            }
        }
        commits.end.set(end);
        let is_open = all_durable && commits.durable_end.get() == end;
        let last_sector_index = (sector_records.len().max(1) - 1) / journal::records_per_sector(&self.layout);
        *commits.last_sector.borrow_mut() =
            is_open.then(|| sector_records.split_off(last_sector_index * journal::records_per_sector(&self.layout)));
        *commits.block.borrow_mut() = bytes[bytes.len() - COMMIT_UNIT as usize..].to_vec();
        let emptied = records.iter().filter(|record| record.entry.is_empty() && !record.unflushed);
        let emptied = emptied.map(|record| record.slot);
        self.apply_written(&records, sequence);
        self.finish_removals(emptied);
        self.counts.borrow_mut().metadata_written += count * SECTOR;
        commits.changed.raise();
        Ok(())
    }

    /// Applies written records to the ledger. The first ones are in sector `sequence`; all were flushed if one is
    /// firm.
    fn apply_written(&self, records: &[Record], sequence: u64) {
        let commits = &self.commits;
        let per_sector = journal::records_per_sector(&self.layout);
        let (mut index, mut ledger) = (self.index.borrow_mut(), self.ledger.borrow_mut());
        let mut unflushed = commits.unflushed.borrow_mut();
        for (at, record) in records.iter().enumerate() {
            let slot = record.slot;
            let entry = Entry { hotness: 0, ..record.entry };
            index.set_changed(slot.set(), commits.change_mark.get(), true);
            if record.unflushed {
                unflushed.push_back(UnflushedRecord {
                    sequence: sequence + (at / per_sector) as u64,
                    number: commits.written.get() + at as u64,
                    record: Record { entry, ..*record },
                });
            } else {
                ledger.end_commit(slot, entry, index.entry(slot));
            }
        }
        while let Some(first) = unflushed.front().filter(|loose| loose.sequence < commits.stated_end.get()) {
            let Record { slot, entry, .. } = first.record;
            ledger.mark_durable(slot, entry, first.number, index.entry(slot));
            unflushed.pop_front();
        }
        commits.written.set(commits.written.get() + records.len() as u64);
    }

    fn start_checkpoint(&self) {
        if self.commits.checkpoint_running.replace(true) {
            return;
        }
        let Some(cache) = self.this.upgrade() else { return };
        self.spawn(async move {
            if let Err(error) = cache.checkpoint().await {
                cache.fail(&error);
            }
            cache.commits.checkpoint_running.set(false);
            cache.commits.changed.raise();
        });
    }

    /// Writes the pages of all changed sets. No change may be under way.
    pub(crate) async fn checkpoint_all(&self) -> IoResult {
        self.commits.changed.when(|| !self.commits.checkpoint_running.get()).await;
        self.checkpoint().await?;
        self.checkpoint().await
    }

    /// Writes the pages of all sets that have changed so far, and frees the journal's beginning.
    async fn checkpoint(&self) -> IoResult {
        let commits = &self.commits;
        let old = commits.change_mark.get();
        commits.change_mark.set(1 - old);
        // A commit in flight is at the cut or after it, and sets the other mark.
        let cut = commits.growing_sector();
        // Pages have only durable records, so an unflushed one must not be only in the part of the journal that is
        // freed.
        if self.harden().await.is_err() {
            return Ok(());
        }
        let mut sets = 0..self.layout.sets;
        loop {
            let batch: SmallVec<[u32; PAGES_IN_FLIGHT_MAX]> = sets
                .by_ref()
                .filter(|set| self.index.borrow().is_changed(*set, old))
                .take(PAGES_IN_FLIGHT_MAX)
                .collect();
            if batch.is_empty() {
                break;
            }
            let pages: SmallVec<[Io<'_>; PAGES_IN_FLIGHT_MAX]> =
                batch.iter().map(|set| Io::task(self.write_page(*set, old))).collect();
            join(pages).await?;
            // Files in memory complete in the call, so nothing above yields.
            yield_now().await;
        }
        self.fast.flush().await?;
        commits.durable_end.set(commits.durable_end.get().max(cut));
        commits.tail.set(cut);
        Ok(())
    }

    async fn write_page(&self, set: u32, half: usize) -> IoResult {
        self.load(set).await?;
        if self.is_fenced(set) {
            self.index.borrow_mut().set_changed(set, half, false);
            return Ok(());
        }
        let mut bytes = AlignedBuf::zeroed(self.layout.page_len as usize);
        let newest = {
            let (mut index, ledger) = (self.index.borrow_mut(), self.ledger.borrow());
            index.set_changed(set, half, false);
            let index = &mut *index;
            let entries: Vec<Entry> = index
                .slots_of(set)
                .map(|slot| Entry {
                    hotness: index.policy().save(slot),
                    ..ledger.get(slot).map_or_else(|| index.entry(slot), |state| state.durable)
                })
                .collect();
            // The page has neither unflushed records nor those that its last sector gets later.
            let growing = self.commits.growing_sector();
            let unflushed = self.commits.unflushed.borrow().front().map(|loose| loose.sequence);
            let newest = index.newest_page(set).next();
            let version =
                Version { sequence: unflushed.map_or(growing, |loose| loose.min(growing)), turn: newest.turn };
            page::encode(&self.layout, self.seed, set, version, &entries, &mut bytes);
            newest
        };
        let at = self.layout.page_at(set, newest.is_second);
        let len = bytes.len();
        self.fast.write(at, Rc::new(bytes), 0..len, WriteFlags::NONE).await?;
        self.index.borrow_mut().set_newest_page(set, newest);
        self.counts.borrow_mut().metadata_written += ByteLen::of_buffer(len).get();
        Ok(())
    }
}
