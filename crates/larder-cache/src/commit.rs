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
use crate::page::{self, Version};
use crate::shape::{COMMIT_SECTORS, COMMIT_UNIT, JOURNAL_AT, SECTOR, Slot};
use larder_block::signal::Signal;

/// The most bytes that one commit writes.
const COMMIT_MAX: u64 = 64 << 10;
/// Pages that are written concurrently.
const PAGES_AT_ONCE: usize = 16;

/// Sectors of the journal that are reserved for stating the durable end: a checkpoint needs that to make room.
const RESERVED: u64 = 4 * COMMIT_SECTORS;

/// Error of a cache device that does not work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failed;

/// Unflushed record that was written.
struct Loose {
    /// Sequence of the record's sector.
    sequence: u64,
    number: u64,
    record: Record,
}

/// Queue of records for the journal, and the journal's state.
pub(crate) struct Commits {
    queue: RefCell<Vec<Record>>,
    /// Records queued since the cache was opened. `written` counts those that are written, and durable if they are
    /// firm.
    queued: Cell<u64>,
    written: Cell<u64>,
    /// Unflushed records that were written and are not known to be durable.
    loose: RefCell<VecDeque<Loose>>,
    /// Sectors below this one are durable, and so is the data that they refer to.
    firm_end: Cell<u64>,
    /// Highest durable end that a durable sector states. `to_tell` is the one that is to be stated.
    told: Cell<u64>,
    to_tell: Cell<u64>,
    running: Cell<bool>,
    waiting: Signal,
    session: u32,
    /// Sequence of the next sector that is begun; `tail` is that of the oldest sector that is needed.
    end: Cell<u64>,
    tail: Cell<u64>,
    /// Records of the last sector, if more can be added to it.
    open: RefCell<Option<Vec<Record>>>,
    /// Content of the last block that was written, up to the end.
    block: RefCell<Vec<u8>>,
    /// Index of the change mark that changes set now; each set has two.
    half: Cell<usize>,
    checkpoint_runs: Cell<bool>,
}

impl Commits {
    /// Begins a journal at `end`; `block` holds the sectors of its block before the end.
    pub(crate) fn new(session: u32, tail: u64, end: u64, block: Vec<u8>) -> Self {
        Self {
            queue: RefCell::default(),
            queued: Cell::new(0),
            written: Cell::new(0),
            loose: RefCell::default(),
            // The opening has made durable whatever it found.
            firm_end: Cell::new(end),
            told: Cell::new(tail),
            to_tell: Cell::new(tail),
            running: Cell::new(false),
            waiting: Signal::default(),
            session,
            end: Cell::new(end),
            tail: Cell::new(tail),
            open: RefCell::default(),
            block: RefCell::new(block),
            half: Cell::new(0),
            checkpoint_runs: Cell::new(false),
        }
    }

    /// Wakes tasks that wait for a commit, so that they check their conditions again.
    pub(crate) fn wake(&self) {
        self.waiting.raise();
    }

    /// Returns the number of records queued so far.
    pub(crate) fn queued(&self) -> u64 {
        self.queued.get()
    }

    /// Returns whether the first `records` records are written, and durable if they are firm.
    pub(crate) fn have_written(&self, records: u64) -> bool {
        self.written.get() >= records
    }

    fn has_to_tell(&self) -> bool {
        self.to_tell.get() > self.told.get()
    }

    /// Returns the sequence of the next sector that is begun, if none is being written.
    pub(crate) fn end(&self) -> u64 {
        self.end.get()
    }

    /// Returns the first sector that may get more records, or is getting some.
    pub(crate) fn growing(&self) -> u64 {
        self.end.get() - u64::from(self.open.borrow().is_some())
    }
}

impl Cache {
    /// Queues a durable record that a slot holds `entry`.
    pub(crate) fn queue(&self, slot: Slot, entry: Entry) {
        let number = self.commits.queued.get();
        self.ledger.borrow_mut().commit_begins(slot, entry, number);
        self.push(slot, entry, false);
    }

    /// Queues an unflushed record that a slot holds `entry`: it outlives this process, but perhaps not a power loss.
    pub(crate) fn queue_loose(&self, slot: Slot, entry: Entry) {
        let memory = || self.index.borrow().entry(slot);
        self.ledger
            .borrow_mut()
            .loosen(slot, entry, self.commits.queued.get(), memory);
        self.push(slot, entry, true);
    }

    fn push(&self, slot: Slot, entry: Entry, loose: bool) {
        self.commits.queue.borrow_mut().push(Record { slot, entry, loose });
        self.commits.queued.set(self.commits.queued.get() + 1);
    }

    /// Starts to write the queue.
    pub(crate) fn start_commit(&self) {
        let has_work = !self.commits.queue.borrow().is_empty() || self.commits.has_to_tell();
        if !has_work || self.commits.running.replace(true) {
            return;
        }
        let Some(cache) = self.this.upgrade() else { return };
        self.spawn(async move { cache.run_commits().await });
    }

    /// Writes all queued records, so that they outlive this process, and makes the firm ones durable.
    pub(crate) async fn commit(&self) -> Result<(), Failed> {
        let records = self.commits.queued();
        self.committed(|commits| commits.have_written(records)).await
    }

    async fn committed(&self, is_over: impl Fn(&Commits) -> bool) -> Result<(), Failed> {
        self.start_commit();
        self.commits
            .waiting
            .when(|| is_over(&self.commits) || self.has_failed())
            .await;
        is_over(&self.commits).then_some(()).ok_or(Failed)
    }

    /// Makes all unflushed records durable, if there are any, and flushes the data that writes have put into the
    /// cache.
    pub(crate) async fn harden(&self) -> Result<(), Failed> {
        let has_none = self.commits.loose.borrow().is_empty() && self.kept.is_flushed();
        if has_none || !self.may_be_dirty.get() {
            return Ok(());
        }
        self.harden_all().await
    }

    /// Writes the queued records, and makes all unflushed ones durable.
    pub(crate) async fn harden_queued(&self) -> Result<(), Failed> {
        self.commit().await?;
        self.harden().await
    }

    /// Flushes the cache device, and makes all unflushed records durable.
    pub(crate) async fn harden_all(&self) -> Result<(), Failed> {
        if self.has_failed() {
            return Err(Failed);
        }
        let commits = &self.commits;
        let end = commits.end.get();
        let has_loose = || commits.loose.borrow().front().is_some_and(|loose| loose.sequence < end);
        let flush = self.kept.begin();
        if let Err(error) = self.fast.flush().await {
            drop(flush);
            self.fail(&error);
            return Err(Failed);
        }
        flush.done();
        commits.firm_end.set(commits.firm_end.get().max(end));
        if !has_loose() {
            return Ok(());
        }
        commits.to_tell.set(commits.to_tell.get().max(end));
        // A task that waits for journal space gives way to this sector.
        commits.waiting.raise();
        self.committed(|commits| commits.told.get() >= end).await
    }

    /// States that everything that an opening has found is durable.
    pub(crate) async fn tell_all(&self) {
        let end = self.commits.end.get();
        self.commits.to_tell.set(end);
        // A failure was already recorded.
        let _ = self.committed(|commits| commits.told.get() >= end).await;
    }

    async fn run_commits(&self) {
        let commits = &self.commits;
        let per_sector = journal::records_per_sector(&self.shape);
        let ring = self.shape.journal_sectors();
        let most = per_sector * (COMMIT_MAX / SECTOR).min(ring / 4) as usize;
        while !self.has_failed() {
            let ready = commits.queue.borrow().len().min(most);
            let count = match commits.has_to_tell() {
                true => 0,
                false if ready == 0 => break,
                false => ready,
            };
            let is_added = self.can_be_added(count);
            let sectors = if is_added {
                0
            } else {
                count.div_ceil(per_sector).max(1) as u64
            };
            let reserved = if count == 0 { 0 } else { RESERVED.min(ring / 4) };
            let end = || (commits.end.get() + sectors).next_multiple_of(COMMIT_SECTORS);
            let used = || end() + reserved - commits.tail.get();
            if used() > ring / 2 {
                self.start_checkpoint();
            }
            if used() > ring {
                // A checkpoint that began long ago may free too little, and then another one is needed.
                let is_over = || {
                    used() <= ring
                        || (count > 0 && commits.has_to_tell())
                        || !commits.checkpoint_runs.get()
                        || self.has_failed()
                };
                commits.waiting.when(is_over).await;
                continue;
            }
            let records: Vec<Record> = commits.queue.borrow_mut().drain(..count).collect();
            if let Err(error) = self.write_commit(records, is_added, sectors).await {
                self.fail(&error);
            }
        }
        commits.running.set(false);
        commits.waiting.raise();
    }

    /// Returns whether the first `count` queued records can be added to the last sector.
    fn can_be_added(&self, count: usize) -> bool {
        let (open, queue) = (self.commits.open.borrow(), self.commits.queue.borrow());
        let room = open
            .as_ref()
            .map_or(0, |records| journal::records_per_sector(&self.shape) - records.len());
        (1..=room).contains(&count) && queue[..count].iter().all(|record| !record.loose)
    }

    /// Writes a commit into `sectors` sectors, for which there is room, or adds it to the last sector. A commit
    /// without records only states the durable end.
    async fn write_commit(&self, mut records: Vec<Record>, is_added: bool, sectors: u64) -> IoResult {
        let commits = &self.commits;
        let ring = self.shape.journal_sectors();
        let sequence = commits.end.get() - u64::from(is_added);
        let end = commits.end.get() + sectors;
        let position = Position {
            session: commits.session,
            sequence,
            tail: commits.tail.get(),
            firm_end: commits.firm_end.get().min(sequence),
        };
        let is_firm = records.iter().any(|record| !record.loose);
        let is_all_firm = records.iter().all(|record| !record.loose);
        // An unflushed sector before a durable record must not be missing, or the record would not be found.
        let is_forced = is_all_firm && (records.is_empty() || position.firm_end == sequence);
        {
            let mut index = self.index.borrow_mut();
            let mut policy = index.policy();
            records
                .iter_mut()
                .for_each(|record| record.entry.hotness = policy.save(record.slot));
        }
        let mut said = match is_added {
            true => commits.open.borrow().clone().unwrap_or_default(),
            false => Vec::new(),
        };
        said.extend_from_slice(&records);
        // Whole blocks are written; the part of the first one that is written already does not change.
        let from = sequence - sequence % COMMIT_SECTORS;
        let count = end.next_multiple_of(COMMIT_SECTORS) - from;
        let mut bytes = AlignedBuf::zeroed((count * SECTOR) as usize);
        let before = ((sequence - from) * SECTOR) as usize;
        bytes[..before].copy_from_slice(&commits.block.borrow()[..before]);
        journal::encode(&self.shape, self.seed, position, &said, &mut bytes[before..]);
        let first = from % ring;
        // Up to the ring's end, and from its start.
        let split = ((ring - first).min(count) * SECTOR) as usize;
        let flags = if is_forced { WriteFlags::FUA } else { WriteFlags::NONE };
        let bytes = Rc::new(bytes);
        let mut ios: SmallVec<[Io<'_>; 2]> = SmallVec::new();
        for (at, part) in [(first, 0..split), (0, split..bytes.len())] {
            if !part.is_empty() {
                let at = ByteOffset::new(JOURNAL_AT + at * SECTOR);
                ios.push(Io::task(self.fast.write(at, Rc::clone(&bytes), part, flags)));
            }
        }
        join(ios).await?;
        if is_firm && !is_forced {
            let flush = self.kept.begin();
            self.fast.flush().await?;
            flush.done();
        }
        if is_firm || is_forced {
            commits.told.set(position.firm_end);
            // A sector that only states the durable end may survive where one before it does not.
            if !records.is_empty() || commits.firm_end.get() >= sequence {
                commits.firm_end.set(end);
            }
        }
        commits.end.set(end);
        let is_open = is_all_firm && commits.firm_end.get() == end;
        let of_last = (said.len().max(1) - 1) / journal::records_per_sector(&self.shape);
        *commits.open.borrow_mut() =
            is_open.then(|| said.split_off(of_last * journal::records_per_sector(&self.shape)));
        *commits.block.borrow_mut() = bytes[bytes.len() - COMMIT_UNIT as usize..].to_vec();
        let emptied = records.iter().filter(|record| record.entry.is_empty() && !record.loose);
        let emptied = emptied.map(|record| record.slot);
        self.are_written(&records, sequence);
        self.have_left(emptied);
        self.counts.borrow_mut().metadata_written += count * SECTOR;
        commits.waiting.raise();
        Ok(())
    }

    /// Applies written records to the ledger. The first ones are in sector `sequence`; all were flushed if one is
    /// firm.
    fn are_written(&self, records: &[Record], sequence: u64) {
        let commits = &self.commits;
        let per_sector = journal::records_per_sector(&self.shape);
        let (mut index, mut ledger) = (self.index.borrow_mut(), self.ledger.borrow_mut());
        let mut loose = commits.loose.borrow_mut();
        for (at, record) in records.iter().enumerate() {
            let slot = record.slot;
            let entry = Entry {
                hotness: 0,
                ..record.entry
            };
            index.set_changed(slot.set(), commits.half.get(), true);
            if record.loose {
                loose.push_back(Loose {
                    sequence: sequence + (at / per_sector) as u64,
                    number: commits.written.get() + at as u64,
                    record: Record { entry, ..*record },
                });
            } else {
                ledger.commit_ends(slot, entry, index.entry(slot));
            }
        }
        while let Some(first) = loose.front().filter(|loose| loose.sequence < commits.told.get()) {
            let Record { slot, entry, .. } = first.record;
            ledger.harden(slot, entry, first.number, index.entry(slot));
            loose.pop_front();
        }
        commits.written.set(commits.written.get() + records.len() as u64);
    }

    fn start_checkpoint(&self) {
        if self.commits.checkpoint_runs.replace(true) {
            return;
        }
        let Some(cache) = self.this.upgrade() else { return };
        self.spawn(async move {
            if let Err(error) = cache.checkpoint().await {
                cache.fail(&error);
            }
            cache.commits.checkpoint_runs.set(false);
            cache.commits.waiting.raise();
        });
    }

    /// Writes the pages of all changed sets. No change may be under way.
    pub(crate) async fn checkpoint_all(&self) -> IoResult {
        self.commits.waiting.when(|| !self.commits.checkpoint_runs.get()).await;
        self.checkpoint().await?;
        self.checkpoint().await
    }

    /// Writes the pages of all sets that have changed so far, and frees the journal's beginning.
    async fn checkpoint(&self) -> IoResult {
        let commits = &self.commits;
        let old = commits.half.get();
        commits.half.set(1 - old);
        // A commit in flight is at the cut or after it, and sets the other mark.
        let cut = commits.growing();
        // Pages have only durable records, so an unflushed one must not be only in the part of the journal that is
        // freed.
        if self.harden().await.is_err() {
            return Ok(());
        }
        let mut sets = 0..self.shape.sets;
        loop {
            let batch: SmallVec<[u32; PAGES_AT_ONCE]> = sets
                .by_ref()
                .filter(|set| self.index.borrow().is_changed(*set, old))
                .take(PAGES_AT_ONCE)
                .collect();
            if batch.is_empty() {
                break;
            }
            let pages: SmallVec<[Io<'_>; PAGES_AT_ONCE]> =
                batch.iter().map(|set| Io::task(self.write_page(*set, old))).collect();
            join(pages).await?;
            // Files in memory complete in the call, so nothing above yields.
            yield_now().await;
        }
        self.fast.flush().await?;
        commits.firm_end.set(commits.firm_end.get().max(cut));
        commits.tail.set(cut);
        Ok(())
    }

    async fn write_page(&self, set: u32, half: usize) -> IoResult {
        self.load(set).await?;
        if self.is_fenced(set) {
            self.index.borrow_mut().set_changed(set, half, false);
            return Ok(());
        }
        let mut bytes = AlignedBuf::zeroed(self.shape.page_len as usize);
        let newest = {
            let (mut index, ledger) = (self.index.borrow_mut(), self.ledger.borrow());
            index.set_changed(set, half, false);
            let index = &mut *index;
            let entries: Vec<Entry> = index
                .slots_of(set)
                .map(|slot| Entry {
                    hotness: index.policy().save(slot),
                    ..ledger
                        .get(slot)
                        .map_or_else(|| index.entry(slot), |place| place.durable)
                })
                .collect();
            // The page has neither unflushed records nor those that its last sector gets later.
            let growing = self.commits.growing();
            let loose = self.commits.loose.borrow().front().map(|loose| loose.sequence);
            let newest = index.newest_page(set).next();
            let version = Version {
                sequence: loose.map_or(growing, |loose| loose.min(growing)),
                turn: newest.turn,
            };
            page::encode(&self.shape, self.seed, set, version, &entries, &mut bytes);
            newest
        };
        let at = self.shape.page_at(set, newest.is_second);
        let len = bytes.len();
        self.fast.write(at, Rc::new(bytes), 0..len, WriteFlags::NONE).await?;
        self.index.borrow_mut().set_newest_page(set, newest);
        self.counts.borrow_mut().metadata_written += ByteLen::of_buffer(len).get();
        Ok(())
    }
}
