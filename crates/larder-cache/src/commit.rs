//! Makes what is known of the lines durable: the journal is written, and the pages after it.

use std::cell::{Cell, RefCell};

use larder_block::{AlignedBuf, ByteLen, ByteOffset, Io, IoResult, WriteBuf, WriteFlags, join};
use smallvec::SmallVec;

use crate::Cache;
use crate::entry::Entry;
use crate::journal::{self, Position, Record, SECTOR_LEN};
use crate::page;
use crate::shape::{COMMIT_UNIT, JOURNAL_AT, SECTOR, Slot};
use crate::waiters::Waiters;

/// The most that is written at once.
const COMMIT_MAX: u64 = 64 << 10;
/// Pages that are being written at the same time.
const PAGES_AT_ONCE: usize = 16;

/// The cache device does not work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Failed;

/// What waits to be written to the journal, and where that is.
pub(crate) struct Commits {
    queue: RefCell<Vec<Record>>,
    /// Records queued, and records durable, since the cache was opened.
    queued: Cell<u64>,
    durable: Cell<u64>,
    running: Cell<bool>,
    waiting: Waiters,
    session: u32,
    /// Of the next sector that is written.
    end: Cell<u64>,
    tail: Cell<u64>,
    /// Which of a set's two marks is set by changes now.
    half: Cell<usize>,
    checkpoint_runs: Cell<bool>,
}

impl Commits {
    pub(crate) fn new(session: u32, tail: u64, end: u64) -> Self {
        Self {
            queue: RefCell::default(),
            queued: Cell::new(0),
            durable: Cell::new(0),
            running: Cell::new(false),
            waiting: Waiters::default(),
            session,
            end: Cell::new(end),
            tail: Cell::new(tail),
            half: Cell::new(0),
            checkpoint_runs: Cell::new(false),
        }
    }

    /// Something has happened that those who wait for a commit want to know.
    pub(crate) fn wake(&self) {
        self.waiting.wake();
    }

    /// Of the next sector that is written, if nothing is being written.
    pub(crate) fn end(&self) -> u64 {
        self.end.get()
    }
}

impl Cache {
    /// Has the next commit say that a slot holds `entry` from then on.
    pub(crate) fn queue(&self, slot: Slot, entry: Entry) {
        self.ledger.borrow_mut().commit_begins(slot, entry);
        self.commits.queue.borrow_mut().push(Record { slot, entry });
        self.commits.queued.set(self.commits.queued.get() + 1);
    }

    /// Starts to write what is queued.
    pub(crate) fn start_commit(&self) {
        if self.commits.queue.borrow().is_empty() || self.commits.running.replace(true) {
            return;
        }
        let Some(cache) = self.this.upgrade() else { return };
        self.spawn(async move { cache.run_commits().await });
    }

    /// Makes all that is queued durable.
    pub(crate) async fn commit(&self) -> Result<(), Failed> {
        let wanted = self.commits.queued.get();
        self.start_commit();
        let is_over = || self.commits.durable.get() >= wanted || self.has_failed();
        self.commits.waiting.until(is_over).await;
        if self.commits.durable.get() >= wanted {
            Ok(())
        } else {
            Err(Failed)
        }
    }

    async fn run_commits(&self) {
        while !self.has_failed() {
            let per_sector = journal::records_per_sector(&self.shape);
            let most = per_sector * (COMMIT_MAX / SECTOR) as usize;
            let mut records: Vec<Record> = {
                let mut queue = self.commits.queue.borrow_mut();
                let count = queue.len().min(most);
                queue.drain(..count).collect()
            };
            if records.is_empty() {
                break;
            }
            if let Err(error) = self.write_commit(&mut records).await {
                self.fail(&error);
            }
        }
        self.commits.running.set(false);
        self.commits.waiting.wake();
    }

    async fn write_commit(&self, records: &mut [Record]) -> IoResult {
        let commits = &self.commits;
        let len = (records.len().div_ceil(journal::records_per_sector(&self.shape)) * SECTOR_LEN) as u64;
        let len = len.next_multiple_of(COMMIT_UNIT);
        let (count, ring) = (len / SECTOR, self.shape.journal_sectors());
        let used = || commits.end.get() + count - commits.tail.get();
        if used() > ring / 2 {
            self.start_checkpoint();
        }
        commits.waiting.until(|| used() <= ring || self.has_failed()).await;
        if self.has_failed() {
            return Ok(());
        }
        let position = Position {
            session: commits.session,
            sequence: commits.end.get(),
            tail: commits.tail.get(),
        };
        let mut bytes = AlignedBuf::zeroed(len as usize);
        {
            let policy = &mut self.index.borrow_mut().policy;
            records
                .iter_mut()
                .for_each(|record| record.entry.hotness = policy.save(record.slot));
        }
        journal::encode(&self.shape, self.seed, position, records, &mut bytes);
        let first = position.sequence % ring;
        // Up to the ring's end, and from its start.
        let split = ((ring - first).min(count) * SECTOR) as usize;
        let mut ios: SmallVec<[Io<'_>; 2]> = SmallVec::new();
        for (at, part) in [(first, &bytes[..split]), (0, &bytes[split..])] {
            if !part.is_empty() {
                let at = ByteOffset::new(JOURNAL_AT + at * SECTOR);
                ios.push(self.fast.write(at, WriteBuf::new(part), WriteFlags::FUA));
            }
        }
        join(ios).await?;
        commits.end.set(position.sequence + count);
        {
            let (mut index, mut ledger) = (self.index.borrow_mut(), self.ledger.borrow_mut());
            for Record { slot, entry } in &*records {
                index.set_changed(slot.set(), commits.half.get(), true);
                let entry = Entry { hotness: 0, ..*entry };
                ledger.commit_ends(*slot, entry, index.entry(*slot));
            }
        }
        let emptied = records.iter().filter(|record| record.entry.is_empty());
        self.have_left(emptied.map(|record| record.slot));
        commits.durable.set(commits.durable.get() + records.len() as u64);
        self.counts.borrow_mut().metadata_written += len;
        commits.waiting.wake();
        Ok(())
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
            cache.commits.waiting.wake();
        });
    }

    /// Writes the pages of all sets that have changed; nothing is changing.
    pub(crate) async fn checkpoint_all(&self) -> IoResult {
        self.commits.waiting.until(|| !self.commits.checkpoint_runs.get()).await;
        self.checkpoint().await?;
        self.checkpoint().await
    }

    /// Writes the pages of all sets that have changed up to now, after which the journal's beginning is not needed.
    async fn checkpoint(&self) -> IoResult {
        let commits = &self.commits;
        let old = commits.half.get();
        commits.half.set(1 - old);
        // A commit that is being written has this sequence, and marks the other half.
        let cut = commits.end.get();
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
        }
        self.fast.flush().await?;
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
        let second = {
            let (mut index, ledger) = (self.index.borrow_mut(), self.ledger.borrow());
            index.set_changed(set, half, false);
            let index = &mut *index;
            let entries: Vec<Entry> = index
                .slots_of(set)
                .map(|slot| Entry {
                    hotness: index.policy.save(slot),
                    ..ledger
                        .get(slot)
                        .map_or_else(|| index.entry(slot), |place| place.durable)
                })
                .collect();
            page::encode(
                &self.shape,
                self.seed,
                set,
                self.commits.end.get(),
                &entries,
                &mut bytes,
            );
            !index.is_page_second(set)
        };
        let at = self.shape.page_at(set, second);
        self.fast.write(at, WriteBuf::new(&bytes), WriteFlags::NONE).await?;
        self.index.borrow_mut().set_page_second(set, second);
        self.counts.borrow_mut().metadata_written += ByteLen::of_buffer(bytes.len()).get();
        Ok(())
    }
}
