//! Loads the metadata that an earlier process has left: the journal at once, the pages of sets on demand, and all
//! pages gradually in the background.

use std::cell::{Cell, RefCell};
use std::collections::HashSet;
use std::ops::Range;
use std::rc::Rc;

use larder_block::event_loop::yield_now;
use larder_block::memory::trim_heap;
use larder_block::range_lock::{Mode as Hold, Ranges};
use larder_block::{AlignedBuf, ByteRange, Failure, IoError, IoResult, Operation, WriteFlags};

use crate::entry::Entry;
use crate::journal::Records;
use crate::page::{self, Believed, Newest, Version};
use crate::shape::{Line, Sectors, Slot};
use crate::{Cache, Detached, EIO};

/// Bytes of pages that are read at once.
const CHUNK_LEN: u64 = 256 << 10;

/// Fewest freed bytes for which the allocator is asked to return memory.
const TRIM_MIN: usize = 64 << 10;

/// Metadata that is still to be loaded.
pub(crate) struct Left {
    records: Records,
    /// Oldest sector of the journal that was needed. A page that should have been complete by then, and is not, is
    /// damaged.
    tail: u64,
}

/// State of the loading of sets.
pub(crate) struct Loading {
    left: RefCell<Left>,
    /// Sets that are being loaded.
    busy: Ranges,
    /// Set once the background loading must stop.
    stopped: Cell<bool>,
    /// Sets with damaged pages, in a cache that may have had dirty lines there: requests for their lines fail.
    fenced: RefCell<HashSet<u32>>,
}

impl Loading {
    pub(crate) fn new(records: Records, tail: u64) -> Self {
        Self {
            left: RefCell::new(Left { records, tail }),
            busy: Ranges::default(),
            stopped: Cell::new(false),
            fenced: RefCell::default(),
        }
    }

    /// Returns whether the content of any set is unknown.
    pub(crate) fn has_fences(&self) -> bool {
        !self.fenced.borrow().is_empty()
    }

    /// Returns the sets that have records in the journal.
    pub(crate) fn sets(&self) -> Vec<u32> {
        self.left.borrow().records.sets().collect()
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
        for sets in self.shape.runs_of_sets(lines) {
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
        let all = ByteRange::new(0, self.shape.sets.into());
        drop(self.loading.busy.enter(all, Hold::Exclusive).await);
    }

    /// Loads some sets; returns whether `goes_on` held all the time.
    async fn load_sets(&self, sets: Range<u32>, goes_on: impl Fn() -> bool) -> IoResult<bool> {
        let per_chunk = (CHUNK_LEN / (2 * self.shape.page_len)).max(1) as u32;
        let mut from = sets.start;
        while from < sets.end {
            if !goes_on() {
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

    async fn load_while(&self, goes_on: impl Fn() -> bool) -> IoResult {
        if !self.load_sets(0..self.shape.sets, goes_on).await? {
            return Ok(());
        }
        let records = std::mem::replace(&mut self.loading.left.borrow_mut().records, Records::none(&self.shape));
        if records.memory() >= TRIM_MIN {
            drop(records);
            trim_heap();
        }
        Ok(())
    }

    async fn load_chunk(&self, sets: Range<u32>) -> IoResult {
        let range = ByteRange::new(sets.start.into(), (sets.end - sets.start).into());
        let _held = self.loading.busy.enter(range, Hold::Exclusive).await;
        if sets.clone().all(|set| self.index.borrow().is_loaded(set)) {
            return Ok(());
        }
        let pair_len = 2 * self.shape.page_len as usize;
        let len = pair_len * sets.len();
        let at = self.shape.page_at(sets.start, false);
        let bytes = self.fast.read(at, AlignedBuf::zeroed(len), 0..len).await?;
        let tail = self.loading.left.borrow().tail;
        for (set, pair) in sets.zip(bytes.chunks_exact(pair_len)) {
            if !self.index.borrow().is_loaded(set) {
                let found = page::believed(&self.shape, self.seed, set, pair, tail);
                self.mend_pages(set, pair, found.as_ref()).await?;
                self.take_up(set, found);
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
        if !fenced.is_empty() && self.shape.sets_of(lines).any(|set| fenced.contains(&set)) {
            return Err(IoError::new(self.lower.name(), operation, range, Failure::Os(EIO)));
        }
        Ok(())
    }

    /// Repairs the damaged pages of a set before a line is put into the set: a later process could not know their
    /// former content. A set that may have had dirty lines is left as it is, because a repair of the device may
    /// recover them.
    async fn mend_pages(&self, set: u32, pair: &[u8], found: Option<&Believed>) -> IoResult {
        let len = self.shape.page_len as usize;
        let mut bytes = AlignedBuf::zeroed(len);
        let places = match found {
            Some(found) if !found.has_damage => return Ok(()),
            None if self.was_dirty => return Ok(()),
            Some(found) => {
                // The damaged page is replaced by a copy of the good one.
                let is_second = found.newest.is_second;
                let whole = pair.chunks_exact(len).nth(is_second.into());
                bytes.copy_from_slice(whole.unwrap_or_default());
                !is_second..=!is_second
            }
            None => {
                // The journal's records of the set are discarded with its pages.
                let empty = vec![Entry::default(); self.shape.ways as usize];
                let version = Version {
                    sequence: self.commits.growing(),
                    turn: 0,
                };
                page::encode(&self.shape, self.seed, set, version, &empty, &mut bytes);
                false..=true
            }
        };
        let bytes = Rc::new(bytes);
        for is_second in [false, true].into_iter().filter(|page| places.contains(page)) {
            let at = self.shape.page_at(set, is_second);
            let written = self.fast.write(at, Rc::clone(&bytes), 0..len, WriteFlags::NONE);
            written.await?;
        }
        self.fast.flush().await
    }

    fn take_up(&self, set: u32, found: Option<Believed>) {
        let Some(found) = found else {
            self.is_damaged(set);
            return;
        };
        let newest = found.newest;
        let entries = found.with(self.loading.left.borrow().records.of_set(set), &self.shape);
        self.install(set, &entries, newest);
    }

    fn is_damaged(&self, set: u32) {
        if self.was_dirty {
            tracing::error!(
                "{}: the cache's metadata of set {set} of {} is damaged, and the set may have had data that is nowhere else: reads and writes there fail; `larder disk cache drop --lose-dirty {}` discards that data",
                self.lower.name(),
                self.shape.sets,
                self.fast.name()
            );
            self.loading.fenced.borrow_mut().insert(set);
        } else {
            tracing::warn!(
                "{}: the cache's metadata of set {set} is damaged; the set begins anew, empty",
                self.lower.name()
            );
        }
        let empty = vec![Entry::default(); self.shape.ways as usize];
        let newest = Newest {
            is_second: true,
            turn: 0,
        };
        self.install(set, &empty, newest);
    }

    /// Installs the entries of a set in memory. Clean sectors of open lines are dropped.
    fn install(&self, set: u32, entries: &[Entry], newest: Newest) {
        let mut removed = Vec::new();
        {
            let mut index = self.index.borrow_mut();
            index.set_newest_page(set, newest);
            let mut hotness = Vec::new();
            let is_kept = |(_, entry): &(usize, &Entry)| {
                !entry.is_empty() && self.believed(set, entry) != 0 && self.is_inside(set, entry)
            };
            let by_way = entries.iter().enumerate().filter(is_kept);
            let mut by_tag: Vec<(u32, usize)> = by_way.map(|(way, entry)| (entry.tag, way)).collect();
            by_tag.sort_unstable();
            let mut kept = vec![false; entries.len()];
            for copies in by_tag.chunk_by(|one, other| one.0 == other.0) {
                // If a line is there twice, the dirty copy is the later one.
                let is_dirty = |(_, way): &&(u32, usize)| entries[*way].dirty != 0;
                let newest = copies.iter().rev().find(is_dirty).or(copies.first());
                newest.into_iter().for_each(|(_, way)| kept[*way] = true);
            }
            for (way, entry) in entries.iter().enumerate().filter(|(_, entry)| !entry.is_empty()) {
                let slot = Slot::new(set, way as u32);
                let valid = self.believed(set, entry);
                let dirty = entry.dirty & valid;
                if kept[way] {
                    let line = self.shape.line_of(set, entry.tag);
                    index.insert(slot, line, valid, dirty);
                    if self.comparing.is_enabled() && valid & !dirty != 0 {
                        index.unproven.insert(line);
                    }
                    hotness.push((way as u8, entry.hotness));
                }
                if !kept[way] || (valid, dirty) != (entry.valid, entry.dirty) || entry.open {
                    removed.push((slot, Entry { hotness: 0, ..*entry }));
                }
            }
            index.policy().load(set, hotness);
            index.set_loaded(set);
        }
        for (slot, entry) in removed {
            self.ledger.borrow_mut().note(slot, || entry);
            let now = self.index.borrow().entry(slot);
            if now.is_empty() {
                self.leaves(slot, entry);
            }
            self.queue(slot, now);
        }
    }

    /// Returns the trusted sectors of an entry.
    fn believed(&self, set: u32, entry: &Entry) -> Sectors {
        let Some(Detached { superseded }) = &self.only_dirty else {
            return entry.believed();
        };
        let line = self.shape.line_of(set, entry.tag);
        let whole = self.range_of(line..line + 1);
        let newer = superseded.iter().filter(|range| range.overlaps(whole));
        // The disk may have become shorter.
        let disk = ByteRange::new(0, self.lower.geometry().size.get());
        let inside = match whole.overlaps(disk) {
            true => self.shape.part_of(line, disk).sectors,
            false => 0,
        };
        newer.fold(entry.dirty & inside, |dirty, range| {
            dirty & !self.shape.part_of(line, *range).sectors
        })
    }

    fn is_inside(&self, set: u32, entry: &Entry) -> bool {
        let line = self.shape.line_of(set, entry.tag);
        let size = self.lower.geometry().size.get();
        line.checked_shl(self.shape.line_bits).is_some_and(|start| start < size)
    }
}
