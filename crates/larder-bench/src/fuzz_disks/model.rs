//! The bytes that a disk may hold, now and after a crash.

use std::collections::BTreeMap;
use std::ops::Range;

/// Bytes of a sector, which a crash does not tear.
pub(super) const SECTOR: usize = 512;

type Sector = [u8; SECTOR];

/// Effect of a request on its range.
#[derive(Clone, Debug)]
pub(super) enum Effect {
    Bytes(Vec<u8>),
    Zeroes,
    /// Each sector keeps its bytes or becomes zeros.
    Discard,
}

/// A change of the disk. Concurrent changes may overlap.
#[derive(Clone, Debug)]
pub(super) struct Change {
    pub(super) range: Range<u64>,
    pub(super) effect: Effect,
    /// True if the request succeeded. Otherwise any of its sectors may be changed or not.
    pub(super) is_acknowledged: bool,
    pub(super) fua: bool,
}

/// Possible content of a disk.
#[derive(Clone, Debug)]
pub(super) struct Model {
    now: Vec<u8>,
    /// Further contents that a sector may have now.
    maybe: BTreeMap<usize, Vec<Sector>>,
    /// Unflushed history: contents that a sector may have again after a crash.
    stale: BTreeMap<usize, Vec<Sector>>,
    /// All former contents of a sector, under a write-back cache. A discard drops the cache's sectors, and the disk
    /// may have any older content.
    older: Option<BTreeMap<usize, Vec<Sector>>>,
    /// True if a read may see a sector of which a concurrent write has changed only some bytes.
    has_torn_reads: bool,
}

/// Contents that the sectors of a batch of changes may have had before it.
pub(super) type Before = BTreeMap<usize, Vec<Sector>>;

fn add(all: &mut Vec<Sector>, sector: Sector) {
    if !all.contains(&sector) {
        all.push(sector);
    }
}

impl Change {
    fn covers(&self, sector: usize) -> bool {
        let start = (sector * SECTOR) as u64;
        self.range.start <= start && start + SECTOR as u64 <= self.range.end
    }

    /// Returns the content of a sector after the change, if it was `old`.
    fn apply(&self, sector: usize, old: &Sector) -> Sector {
        let first = (sector * SECTOR) as u64;
        let start = self.range.start.max(first);
        let end = self.range.end.min(first + SECTOR as u64);
        let mut new = *old;
        let part = &mut new[(start - first) as usize..(end - first) as usize];
        match &self.effect {
            Effect::Bytes(bytes) => {
                let from = (start - self.range.start) as usize;
                part.copy_from_slice(&bytes[from..from + part.len()]);
            }
            Effect::Zeroes | Effect::Discard => part.fill(0),
        }
        new
    }
}

impl Model {
    pub(super) fn new(now: Vec<u8>) -> Self {
        assert_eq!(now.len() % SECTOR, 0, "whole sectors");
        Self { now, maybe: BTreeMap::new(), stale: BTreeMap::new(), older: None, has_torn_reads: false }
    }

    pub(super) fn size(&self) -> u64 {
        self.now.len() as u64
    }

    fn sector(&self, sector: usize) -> Sector {
        let mut bytes = [0; SECTOR];
        bytes.copy_from_slice(&self.now[sector * SECTOR..(sector + 1) * SECTOR]);
        bytes
    }

    fn values(&self, sector: usize) -> Vec<Sector> {
        let mut values = vec![self.sector(sector)];
        values.extend(self.maybe.get(&sector).into_iter().flatten());
        values
    }

    /// Applies concurrent changes, in any order. Returns the possible contents of their sectors before.
    pub(super) fn change(&mut self, changes: &[Change]) -> Before {
        let mut changes_by_sector: BTreeMap<usize, Vec<&Change>> = BTreeMap::new();
        for change in changes.iter().filter(|change| !change.range.is_empty()) {
            let sectors = change.range.start as usize / SECTOR..(change.range.end as usize).div_ceil(SECTOR);
            sectors.for_each(|sector| changes_by_sector.entry(sector).or_default().push(change));
        }
        let mut before = Before::new();
        for (sector, changes) in changes_by_sector {
            let old = self.values(sector);
            let mut new = outcomes(sector, &changes, &old);
            if let Some(older) = &mut self.older {
                let older = older.entry(sector).or_default();
                // If two changes are concurrent, the disk may have one and the cache the other.
                old.iter().chain(&new).for_each(|value| add(older, *value));
                if changes.iter().any(|change| matches!(change.effect, Effect::Discard)) {
                    older.iter().for_each(|value| add(&mut new, *value));
                }
            }
            let is_durable = changes.len() == 1 && changes[0].fua && changes[0].is_acknowledged;
            if is_durable {
                self.stale.remove(&sector);
            } else {
                let stale = self.stale.entry(sector).or_default();
                old.iter().chain(&new).for_each(|value| add(stale, *value));
            }
            self.set(sector, new);
            before.insert(sector, old);
        }
        before
    }

    fn set(&mut self, sector: usize, mut values: Vec<Sector>) {
        let now = values.remove(0);
        self.now[sector * SECTOR..(sector + 1) * SECTOR].copy_from_slice(&now);
        match values.is_empty() {
            true => self.maybe.remove(&sector),
            false => self.maybe.insert(sector, values),
        };
    }

    /// Sets whether a write-back cache may hold writes that the disk lacks.
    pub(super) fn set_write_back(&mut self, write_back: bool) {
        match write_back {
            true => _ = self.older.get_or_insert_default(),
            false => self.older = None,
        }
    }

    /// Sets whether the kernel copies the image's bytes for reads and writes, as on tmpfs and through the page cache.
    /// Two such copies may overtake each other within a sector, more than once. Direct I/O to a disk does not tear
    /// sectors.
    pub(super) fn set_torn_reads(&mut self, has_torn_reads: bool) {
        self.has_torn_reads = has_torn_reads;
    }

    /// Records that all changes answered so far are durable.
    pub(super) fn flushed(&mut self) {
        self.stale.clear();
    }

    /// Checks a client's read at `start`. `before` has the old contents of sectors that were changed while the read
    /// was in flight. For other sectors the read decides between the possible contents.
    pub(super) fn read(&mut self, start: u64, bytes: &[u8], before: &Before) -> Result<(), String> {
        let is_equal = self.now.get(start as usize..start as usize + bytes.len()) == Some(bytes);
        let end = start as usize + bytes.len();
        let sectors = start as usize / SECTOR..end.div_ceil(SECTOR);
        if is_equal && before.is_empty() && self.maybe.range(sectors.clone()).next().is_none() {
            return Ok(());
        }
        for sector in sectors {
            let first = sector * SECTOR;
            let part = first.max(start as usize)..(first + SECTOR).min(end);
            let within = part.start - first..part.end - first;
            let is = &bytes[part.start - start as usize..part.end - start as usize];
            let mut values = self.values(sector);
            let others = before.get(&sector);
            values.extend(others.into_iter().flatten());
            let fits = |value: &Sector| &value[within.clone()] == is;
            let may_be_torn = self.has_torn_reads && others.is_some();
            let is_possible = values.iter().any(fits) || (may_be_torn && is_torn(is, &values, within.start));
            if !is_possible {
                return Err(wrong(part.start, is, &values, within));
            }
            if others.is_none() && values.len() > 1 {
                let left = values.into_iter().filter(fits).collect();
                self.set(sector, left);
            }
        }
        Ok(())
    }

    /// Checks the content of the whole disk after a crash.
    pub(super) fn check_after_crash(&self, bytes: &[u8]) -> Result<(), String> {
        if bytes.len() != self.now.len() {
            return Err(format!("the disk has {} bytes, not {}", bytes.len(), self.now.len()));
        }
        if self.now == bytes {
            return Ok(());
        }
        for (sector, is) in bytes.chunks_exact(SECTOR).enumerate() {
            let mut values = self.values(sector);
            values.extend(self.stale.get(&sector).into_iter().flatten());
            if !values.iter().any(|value| value == is) {
                return Err(wrong(sector * SECTOR, is, &values, 0..SECTOR));
            }
        }
        Ok(())
    }

    /// Checks the content of the whole disk.
    pub(super) fn check(&mut self, bytes: &[u8]) -> Result<(), String> {
        match bytes.len() == self.now.len() {
            true => self.read(0, bytes, &Before::new()),
            false => Err(format!("the disk has {} bytes, not {}", bytes.len(), self.now.len())),
        }
    }

    /// Checks that a range may be zeros. `Err` has the first sector that cannot.
    pub(super) fn may_be_zero(&self, range: Range<u64>, before: &Before) -> Result<(), u64> {
        for sector in range.start as usize / SECTOR..(range.end as usize).div_ceil(SECTOR) {
            let first = (sector * SECTOR) as u64;
            let within =
                (range.start.max(first) - first) as usize..(range.end.min(first + SECTOR as u64) - first) as usize;
            let now = self.values(sector);
            let before = before.get(&sector).into_iter().flatten();
            if !now.iter().chain(before).any(|value| value[within.clone()].iter().all(|byte| *byte == 0)) {
                return Err(first);
            }
        }
        Ok(())
    }

    /// Appends zeroed sectors.
    pub(super) fn grow(&mut self, by: u64) {
        self.now.resize(self.now.len() + by as usize, 0);
    }
}

/// Returns all possible contents of a sector after these changes, which may have taken effect or not.
fn outcomes(sector: usize, changes: &[&Change], old: &[Sector]) -> Vec<Sector> {
    let mut new = Vec::new();
    let mut all = old.to_vec();
    // Two passes cover the cases in which the first change in the list is applied last.
    for _ in 0..changes.len().min(2) {
        for change in changes {
            for value in all.clone() {
                let value = change.apply(sector, &value);
                add(&mut all, value);
                add(&mut new, value);
            }
        }
    }
    let is_sure = |change: &&Change| change.is_acknowledged && !matches!(change.effect, Effect::Discard);
    let changed_for_sure = match changes {
        [change] => is_sure(change),
        changes => changes.iter().any(|change| is_sure(change) && change.covers(sector)),
    };
    if changed_for_sure { new } else { all }
}

/// Returns whether each byte comes from one of these contents.
fn is_torn(is: &[u8], values: &[Sector], start: usize) -> bool {
    let is_of_one = |(at, byte): (usize, &u8)| values.iter().any(|value| value[start + at] == *byte);
    is.iter().enumerate().all(is_of_one)
}

fn wrong(at: usize, is: &[u8], values: &[Sector], within: Range<usize>) -> String {
    let differs = |value: &Sector| value[within.clone()].iter().zip(is).position(|(left, right)| left != right);
    // The longest prefix that matches one of the contents ends at this byte.
    let byte = values.iter().filter_map(differs).max().unwrap_or(0);
    let show = |bytes: &[u8]| {
        let end = (byte + 8).min(bytes.len());
        format!("{:02x?}", &bytes[byte.min(end)..end])
    };
    let may: Vec<String> = values.iter().take(4).map(|value| show(&value[within.clone()])).collect();
    format!("offset {:#x} holds {}, expected one of {}", at + byte, show(is), may.join(", "))
}
