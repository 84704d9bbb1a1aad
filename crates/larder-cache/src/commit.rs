//! Makes what is known of the lines durable: the journal is written, and the pages after it.
//!
//! A commit with firm records ends with a flush, or is forced. One with loose records is only written: it becomes firm
//! when a flush that began after it has ended, and a later sector, forced, tells so ([`Cache::harden`]).
//!
//! A sector is filled by one commit after the other, so that the journal has room for many, and a page is written for many
//! records: one whose records are all firm, as all before it is, is written again with more of them.

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

/// The most that is written at once.
const COMMIT_MAX: u64 = 64 << 10;
/// Pages that are being written at the same time.
const PAGES_AT_ONCE: usize = 16;

/// Sectors of the journal that are only for telling what is firm: a checkpoint needs that to make room.
const RESERVED: u64 = 4 * COMMIT_SECTORS;

/// The cache device does not work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failed;

/// A loose record that was written.
struct Loose {
    /// Of its sector.
    sequence: u64,
    number: u64,
    record: Record,
}

/// What waits to be written to the journal, and where that is.
pub(crate) struct Commits {
    queue: RefCell<Vec<Record>>,
    /// Records queued since the cache was opened, and those of them that are written, and durable if they are firm.
    queued: Cell<u64>,
    written: Cell<u64>,
    /// Loose records that were written and are not known to be firm.
    loose: RefCell<VecDeque<Loose>>,
    /// Sectors below this one are durable, with the data that they tell of.
    firm_end: Cell<u64>,
    /// The highest firm end that a durable sector tells, and the one that is to be told.
    told: Cell<u64>,
    to_tell: Cell<u64>,
    running: Cell<bool>,
    waiting: Signal,
    session: u32,
    /// Of the next sector that is begun.
    end: Cell<u64>,
    tail: Cell<u64>,
    /// What the last sector has, if it may get more.
    open: RefCell<Option<Vec<Record>>>,
    /// The last block that was written, up to the end.
    block: RefCell<Vec<u8>>,
    /// Which of a set's two marks is set by changes now.
    half: Cell<usize>,
    checkpoint_runs: Cell<bool>,
}

impl Commits {
    /// `block` is what the block in which the end lies has before it.
    pub(crate) fn new(session: u32, tail: u64, end: u64, block: Vec<u8>) -> Self {
        Self {
            queue: RefCell::default(),
            queued: Cell::new(0),
            written: Cell::new(0),
            loose: RefCell::default(),
            // What an opening has found was made durable.
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

    /// Something has happened that those who wait for a commit want to know.
    pub(crate) fn wake(&self) {
        self.waiting.raise();
    }

    /// How many records have been asked for.
    pub(crate) fn queued(&self) -> u64 {
        self.queued.get()
    }

    /// Whether so many records are written, and durable if they are firm.
    pub(crate) fn have_written(&self, records: u64) -> bool {
        self.written.get() >= records
    }

    fn has_to_tell(&self) -> bool {
        self.to_tell.get() > self.told.get()
    }

    /// Of the next sector that is begun, if nothing is being written.
    pub(crate) fn end(&self) -> u64 {
        self.end.get()
    }

    /// The first sector that may get more records, or is getting some.
    pub(crate) fn growing(&self) -> u64 {
        self.end.get() - u64::from(self.open.borrow().is_some())
    }
}

impl Cache {
    /// Has the next commit say, whatever happens, that a slot holds `entry` from then on.
    pub(crate) fn queue(&self, slot: Slot, entry: Entry) {
        let number = self.commits.queued.get();
        self.ledger.borrow_mut().commit_begins(slot, entry, number);
        self.push(slot, entry, false);
    }

    /// Has the next commit say that a slot holds `entry` from then on, if only this process dies.
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

    /// Starts to write what is queued.
    pub(crate) fn start_commit(&self) {
        let has_work = !self.commits.queue.borrow().is_empty() || self.commits.has_to_tell();
        if !has_work || self.commits.running.replace(true) {
            return;
        }
        let Some(cache) = self.this.upgrade() else { return };
        self.spawn(async move { cache.run_commits().await });
    }

    /// Writes all that is queued, so that it outlives this process, and makes it durable if it is firm.
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

    /// Makes all firm that was written loosely before, if there is any, and flushes what writes have put into the cache.
    pub(crate) async fn harden(&self) -> Result<(), Failed> {
        let has_none = self.commits.loose.borrow().is_empty() && self.kept.is_flushed();
        if has_none || !self.may_be_dirty.get() {
            return Ok(());
        }
        self.harden_all().await
    }

    /// Makes all firm that is to be written loosely.
    pub(crate) async fn harden_queued(&self) -> Result<(), Failed> {
        self.commit().await?;
        self.harden().await
    }

    /// Flushes the cache device, and makes all firm that was written loosely before.
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
        // Who waits for room lets it go first.
        commits.waiting.raise();
        self.committed(|commits| commits.told.get() >= end).await
    }

    /// Tells that all is firm that an opening has found.
    pub(crate) async fn tell_all(&self) {
        let end = self.commits.end.get();
        self.commits.to_tell.set(end);
        // A failure is known by then.
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
                // A checkpoint that began long ago may give up too little, and then another one is needed.
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

    /// Whether the first `count` queued records can be added to the last sector.
    fn can_be_added(&self, count: usize) -> bool {
        let (open, queue) = (self.commits.open.borrow(), self.commits.queue.borrow());
        let room = open
            .as_ref()
            .map_or(0, |records| journal::records_per_sector(&self.shape) - records.len());
        (1..=room).contains(&count) && queue[..count].iter().all(|record| !record.loose)
    }

    /// Writes a commit into so many sectors, for which there is room, or adds it to the last one. One without records only
    /// tells what is firm.
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
        // Sectors before it that were written loosely must not be missing where a firm record is to be found.
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
        // Whole blocks; what is written already of the first one stays what it is.
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
            // What tells only may be there where something before it is not.
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

    /// Records were written, the first ones into sector `sequence`, and flushed if one of them is firm.
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

    /// Writes the pages of all sets that have changed; nothing is changing.
    pub(crate) async fn checkpoint_all(&self) -> IoResult {
        self.commits.waiting.when(|| !self.commits.checkpoint_runs.get()).await;
        self.checkpoint().await?;
        self.checkpoint().await
    }

    /// Writes the pages of all sets that have changed up to now, after which the journal's beginning is not needed.
    async fn checkpoint(&self) -> IoResult {
        let commits = &self.commits;
        let old = commits.half.get();
        commits.half.set(1 - old);
        // A commit that is being written is there, or behind it, and marks the other half.
        let cut = commits.growing();
        // The pages have what is firm; what is loose must not be only in the part of the journal that is given up.
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
            // Files in memory do everything in the call.
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
            // What is loose is not in the page, nor what its last sector gets besides.
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
