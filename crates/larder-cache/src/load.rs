//! Loads the metadata that an earlier process has left: the journal at once, the pages of sets on demand, and all
//! pages gradually in the background.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::ops::Range;
use std::rc::Rc;

use larder_block::event_loop::yield_now;
use larder_block::memory::trim_heap;
use larder_block::range_lock::{RangeLockMode as DiskLocks, RangeLocks};
use larder_block::{AlignedBuf, ByteRange, Failure, IoError, IoResult, Operation, WriteFlags};

use crate::entry::Entry;
use crate::journal::Records;
use crate::layout::{Line, SectorMask, Slot};
use crate::page::{self, NewestPage, TrustedPage, Version};
use crate::{Cache, EIO, FailureRecord};

/// Bytes of pages that are read at once.
const CHUNK_LEN: u64 = 256 << 10;

/// Fewest freed bytes for which the allocator is asked to return memory.
const TRIM_MIN: usize = 64 << 10;

/// Metadata that is still to be loaded.
pub(crate) struct PendingMetadata {
    records: Records,
    /// Oldest sector of the journal that was needed. A page that should have been complete by then, and is not, is
    /// damaged.
    tail: u64,
}

/// State of the loading of sets.
pub(crate) struct Loading {
    pending: RefCell<PendingMetadata>,
    /// Sets that are being loaded.
    busy: RangeLocks,
    /// Set once the background loading must stop.
    stopped: Cell<bool>,
    /// Sets with damaged pages, in a cache that may have had dirty lines there: requests for their lines fail.
    fenced: RefCell<HashSet<u32>>,
}

impl Loading {
    pub(crate) fn new(records: Records, tail: u64) -> Self {
        Self {
            pending: RefCell::new(PendingMetadata { records, tail }),
            busy: RangeLocks::default(),
            stopped: Cell::new(false),
            fenced: RefCell::default(),
        }
    }

    /// Returns whether the content of any set is unknown.
    pub(crate) fn has_fenced_sets(&self) -> bool {
        !self.fenced.borrow().is_empty()
    }

    /// Returns the sets that have records in the journal.
    pub(crate) fn sets(&self) -> Vec<u32> {
        self.pending.borrow().records.sets().collect()
    }
}

impl Cache {
    /// Loads the metadata of a set into memory.
    pub(crate) async fn load(&self, set: u32) -> IoResult {
        if self.index.borrow().is_loaded(set) {
            return Ok(());
        }
        self.load_chunk(set..set + 1).await
    }

    /// Loads the sets of some lines.
    pub(crate) async fn load_lines(&self, lines: Range<Line>) -> IoResult {
        if self.index.borrow().are_all_loaded() {
            return Ok(());
        }
        for sets in self.layout.runs_of_sets(lines) {
            self.load_sets(sets, || true).await?;
        }
        Ok(())
    }

    /// Loads the metadata of the whole cache.
    ///
    /// # Errors
    /// An error of the cache device.
    pub async fn load_all(&self) -> IoResult {
        self.load_while(|| true).await
    }

    /// Loads all sets in the background, until the cache is closed.
    pub(crate) async fn load_ahead(&self) -> IoResult {
        self.load_while(|| !self.loading.stopped.get()).await
    }

    /// Stops the background loading for good, and waits until it has stopped.
    pub(crate) async fn stop_loading(&self) {
        self.loading.stopped.set(true);
        let all = ByteRange::new(0, self.layout.sets.into());
        drop(self.loading.busy.lock(all, DiskLocks::Exclusive).await);
    }

    /// Loads some sets; returns whether `may_continue` held all the time.
    async fn load_sets(&self, sets: Range<u32>, may_continue: impl Fn() -> bool) -> IoResult<bool> {
        let per_chunk = (CHUNK_LEN / (2 * self.layout.page_len)).max(1) as u32;
        let mut from = sets.start;
        while from < sets.end {
            if !may_continue() {
                return Ok(false);
            }
            let to = sets.end.min(from + per_chunk);
            let is_loaded = (from..to).all(|set| self.index.borrow().is_loaded(set));
            if !is_loaded {
                self.load_chunk(from..to).await?;
            }
            from = to;
        }
        Ok(true)
    }

    async fn load_while(&self, may_continue: impl Fn() -> bool) -> IoResult {
        if !self.load_sets(0..self.layout.sets, may_continue).await? {
            return Ok(());
        }
        let records = std::mem::replace(&mut self.loading.pending.borrow_mut().records, Records::empty(&self.layout));
        if records.memory_bytes() >= TRIM_MIN {
            drop(records);
            trim_heap();
        }
        Ok(())
    }

    async fn load_chunk(&self, sets: Range<u32>) -> IoResult {
        let range = ByteRange::new(sets.start.into(), (sets.end - sets.start).into());
        let _held = self.loading.busy.lock(range, DiskLocks::Exclusive).await;
        if sets.clone().all(|set| self.index.borrow().is_loaded(set)) {
            return Ok(());
        }
        let pair_len = 2 * self.layout.page_len as usize;
        let len = pair_len * sets.len();
        let at = self.layout.page_at(sets.start, false);
        let bytes = self.fast.read(at, AlignedBuf::zeroed(len), 0..len).await?;
        let tail = self.loading.pending.borrow().tail;
        for (set, pair) in sets.zip(bytes.chunks_exact(pair_len)) {
            if !self.index.borrow().is_loaded(set) {
                let found = page::trusted_page(&self.layout, self.seed, set, pair, tail);
                self.repair_pages(set, pair, found.as_ref()).await?;
                self.install_page(set, found);
                // Installing a set takes a while, and requests come first.
                yield_now().await;
            }
        }
        Ok(())
    }

    /// Returns whether the content of a set is unknown.
    pub(crate) fn is_fenced(&self, set: u32) -> bool {
        self.loading.fenced.borrow().contains(&set)
    }

    /// Refuses a request for lines of a set whose pages are damaged.
    pub(crate) fn check_fence(&self, lines: Range<Line>, operation: Operation, range: ByteRange) -> IoResult {
        let fenced = self.loading.fenced.borrow();
        if !fenced.is_empty() && self.layout.sets_of(lines).any(|set| fenced.contains(&set)) {
            return Err(IoError::new(self.lower.name(), operation, range, Failure::Os(EIO)));
        }
        Ok(())
    }

    /// Repairs the damaged pages of a set before a line is put into the set: a later process could not know their
    /// former content. A set that may have had dirty lines is left as it is, because a repair of the device may
    /// recover them.
    async fn repair_pages(&self, set: u32, pair: &[u8], found: Option<&TrustedPage>) -> IoResult {
        let len = self.layout.page_len as usize;
        let mut bytes = AlignedBuf::zeroed(len);
        let pages = match found {
            Some(found) if !found.has_damage => return Ok(()),
            None if self.was_dirty => return Ok(()),
            Some(found) => {
                // The damaged page is replaced by a copy of the good one.
                let is_second = found.newest.is_second;
                let good_page = pair.chunks_exact(len).nth(is_second.into());
                bytes.copy_from_slice(good_page.unwrap_or_default());
                !is_second..=!is_second
            }
            None => {
                // The journal's records of the set are discarded with its pages.
                let empty = vec![Entry::default(); self.layout.ways as usize];
                let version = Version { sequence: self.commits.growing_sector(), turn: 0 };
                page::encode(&self.layout, self.seed, set, version, &empty, &mut bytes);
                false..=true
            }
        };
        let bytes = Rc::new(bytes);
        for is_second in [false, true].into_iter().filter(|page| pages.contains(page)) {
            let at = self.layout.page_at(set, is_second);
            let written = self.fast.write(at, Rc::clone(&bytes), 0..len, WriteFlags::NONE);
            written.await?;
        }
        self.fast.flush().await
    }

    fn install_page(&self, set: u32, found: Option<TrustedPage>) {
        let Some(found) = found else {
            self.handle_damaged_set(set);
            return;
        };
        let newest = found.newest;
        let entries = found.apply_records(self.loading.pending.borrow().records.of_set(set), &self.layout);
        self.install(set, &entries, newest);
    }

    fn handle_damaged_set(&self, set: u32) {
        if self.was_dirty {
            tracing::error!(
                "{}: the cache's metadata of set {set} of {} is damaged, and the set may have had data that is nowhere else: reads and writes there fail; `larder disk cache drop --lose-dirty {}` discards that data",
                self.lower.name(),
                self.layout.sets,
                self.fast.name()
            );
            self.loading.fenced.borrow_mut().insert(set);
        } else {
            tracing::warn!("{}: the cache's metadata of set {set} is damaged; the set starts empty", self.lower.name());
        }
        let empty = vec![Entry::default(); self.layout.ways as usize];
        let newest = NewestPage { is_second: true, turn: 0 };
        self.install(set, &empty, newest);
    }

    /// Installs the entries of a set in memory. Clean sectors of open lines are dropped.
    fn install(&self, set: u32, entries: &[Entry], newest: NewestPage) {
        let mut removed = Vec::new();
        {
            let mut index = self.index.borrow_mut();
            index.set_newest_page(set, newest);
            let mut hotness = Vec::new();
            let is_usable = |(_, entry): &(usize, &Entry)| {
                !entry.is_empty() && self.trusted(set, entry) != 0 && self.is_on_disk(set, entry)
            };
            let by_way = entries.iter().enumerate().filter(is_usable);
            let mut by_tag: Vec<(u32, usize)> = by_way.map(|(way, entry)| (entry.tag, way)).collect();
            by_tag.sort_unstable();
            let mut used = vec![false; entries.len()];
            for copies in by_tag.chunk_by(|one, other| one.0 == other.0) {
                // If a line is there twice, the dirty copy is the later one.
                let is_dirty = |(_, way): &&(u32, usize)| entries[*way].dirty != 0;
                let newest = copies.iter().rev().find(is_dirty).or(copies.first());
                newest.into_iter().for_each(|(_, way)| used[*way] = true);
            }
            for (way, entry) in entries.iter().enumerate().filter(|(_, entry)| !entry.is_empty()) {
                let slot = Slot::new(set, way as u32);
                let valid = self.trusted(set, entry);
                let dirty = entry.dirty & valid;
                if used[way] {
                    let line = self.layout.line_of(set, entry.tag);
                    index.insert(slot, line, valid, dirty);
                    if self.comparison.is_enabled() && valid & !dirty != 0 {
                        index.unproven.insert(line);
                    }
                    hotness.push((way as u8, entry.hotness));
                }
                if !used[way] || (valid, dirty) != (entry.valid, entry.dirty) || entry.open {
                    removed.push((slot, Entry { hotness: 0, ..*entry }));
                }
            }
            index.policy().load(set, hotness);
            index.set_loaded(set);
        }
        for (slot, entry) in removed {
            self.ledger.borrow_mut().record_change(slot, || entry);
            let now = self.index.borrow().entry(slot);
            if now.is_empty() {
                self.add_pending_removal(slot, entry);
            }
            self.queue(slot, now);
        }
    }

    /// Returns the trusted sectors of an entry.
    fn trusted(&self, set: u32, entry: &Entry) -> SectorMask {
        let Some(FailureRecord { superseded }) = &self.only_dirty else {
            return entry.trusted();
        };
        let line = self.layout.line_of(set, entry.tag);
        let line_range = self.range_of(line..line + 1);
        let newer = superseded.iter().filter(|range| range.overlaps(line_range));
        // The disk may have become shorter.
        let disk = ByteRange::new(0, self.lower.geometry().size.get());
        let inside = match line_range.overlaps(disk) {
            true => self.layout.part_of(line, disk).sectors,
            false => 0,
        };
        newer.fold(entry.dirty & inside, |dirty, range| dirty & !self.layout.part_of(line, *range).sectors)
    }

    fn is_on_disk(&self, set: u32, entry: &Entry) -> bool {
        let line = self.layout.line_of(set, entry.tag);
        let size = self.lower.geometry().size.get();
        line.checked_shl(self.layout.line_bits).is_some_and(|start| start < size)
    }
}
