//! The content of a simulated disk: the durable image, and separately every version of a sector written since.
//!
//! Invariants:
//! - The versions of a sector are in the order in which they were applied; a read returns the last one.
//! - Making a version durable removes it and all older ones, never a newer one.
//! - A power loss picks one of durable image and versions for each sector, once, and writes it into the image.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::rc::Rc;

use super::image::Image;
use super::random::Random;
use crate::units::{ByteLen, ByteOffset, ByteRange};

/// The number of a change (write, zeroes, discard) of a medium, in the order in which the changes started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ChangeNumber(u64);

/// The index of a sector of [`Medium::sector_size`] bytes.
type SectorIndex = u64;

/// The content of a sector.
#[derive(Clone)]
pub(super) enum Content {
    Zeros,
    /// A sector that begins at this offset in the buffer of a write.
    Bytes(Rc<[u8]>, usize),
}

#[derive(Clone)]
struct Version {
    change: ChangeNumber,
    content: Content,
}

/// The content that a change writes, see [`Medium::apply`].
#[derive(Clone)]
pub(super) enum Source {
    /// A write's data; its first byte belongs to the first byte of the change's range.
    Data(Rc<[u8]>),
    Zeros,
    /// Each sector keeps its content, or becomes zeros, or returns to its durable content.
    Discard,
}

/// The changes that a flush covers: those that had completed when it was called.
pub(super) struct FlushMark {
    next: ChangeNumber,
    under_way: Vec<ChangeNumber>,
}

impl FlushMark {
    /// Covers every change so far except those `under_way`.
    pub(super) fn new(medium: &Medium, under_way: impl Iterator<Item = ChangeNumber>) -> Self {
        Self {
            next: medium.next,
            under_way: under_way.collect(),
        }
    }

    fn covers(&self, change: ChangeNumber) -> bool {
        change < self.next && !self.under_way.contains(&change)
    }
}

/// The content of a simulated disk. It outlives the device, so that a new one can be opened over it.
#[derive(Clone)]
pub struct Medium {
    size: ByteLen,
    sector_size: u32,
    durable: Image,
    volatile: BTreeMap<SectorIndex, Vec<Version>>,
    next: ChangeNumber,
    /// Files in the host's memory, by user, which a power loss removes.
    host_memory: BTreeMap<u32, Rc<File>>,
    /// The allocated parts, of [`ROOM_UNIT`] bytes each, if allocation is tracked: like the blocks of a sparse file.
    with_room: Option<BTreeSet<u64>>,
}

/// The unit of allocation, in bytes.
pub(super) const ROOM_UNIT: u64 = 4096;

impl Medium {
    /// Creates a disk of `size` bytes of zeros that writes `sector_size` bytes (a power of two) atomically. A size
    /// that is no multiple of it is rounded down.
    ///
    /// # Panics
    /// If `sector_size` is not a power of two.
    pub fn new(size: ByteLen, sector_size: u32) -> Self {
        let size = ByteOffset::new(size.get()).align_down(u64::from(sector_size)) - ByteOffset::ZERO;
        Self {
            size,
            sector_size,
            durable: Image::default(),
            volatile: BTreeMap::new(),
            next: ChangeNumber(0),
            host_memory: BTreeMap::new(),
            with_room: None,
        }
    }

    /// Tracks the allocated parts, so that space can be limited; none is allocated yet. Costs memory for each
    /// allocated part.
    pub fn track_room(&mut self) {
        self.with_room = Some(BTreeSet::new());
    }

    /// Returns the number of unallocated parts of `range`.
    pub(super) fn without_room(&self, range: ByteRange) -> u64 {
        let wide = range.widened(ROOM_UNIT);
        self.with_room.as_ref().map_or(0, |parts| {
            let has = parts.range(room_units(wide)).count() as u64;
            wide.len.get() / ROOM_UNIT - has
        })
    }

    /// Allocates `range`.
    pub(super) fn take_room(&mut self, range: ByteRange) {
        if let Some(parts) = &mut self.with_room {
            parts.extend(room_units(range.widened(ROOM_UNIT)));
        }
    }

    /// Deallocates the parts that are wholly in `range`, and returns the number that were allocated.
    pub(super) fn give_room_back(&mut self, range: ByteRange) -> u64 {
        self.with_room.as_mut().map_or(0, |parts| {
            let given: Vec<u64> = parts.range(room_units(range.narrowed(ROOM_UNIT))).copied().collect();
            given.iter().for_each(|part| {
                parts.remove(part);
            });
            given.len() as u64
        })
    }

    /// Returns a user's file in the memory of the disk's host. It outlives the process, but not a power loss.
    pub(super) fn host_memory(&mut self, user: u32) -> io::Result<Rc<File>> {
        if let Some(file) = self.host_memory.get(&user) {
            return Ok(Rc::clone(file));
        }
        let memory = rustix::fs::memfd_create("larder-simulated", rustix::fs::MemfdFlags::CLOEXEC)?;
        let file = Rc::new(File::from(memory));
        self.host_memory.insert(user, Rc::clone(&file));
        Ok(file)
    }

    /// Removes the files in the host's memory.
    pub(super) fn lose_host_memory(&mut self) {
        self.host_memory.clear();
    }

    /// Returns the disk's size in bytes.
    pub fn size(&self) -> ByteLen {
        self.size
    }

    /// Returns the length in bytes of an atomic write.
    pub fn sector_size(&self) -> u32 {
        self.sector_size
    }

    /// Returns the number of sectors with versions that a power loss may lose.
    pub fn volatile_sectors(&self) -> usize {
        self.volatile.len()
    }

    /// Fills `buffer` with the present content of the bytes from `start` on.
    pub fn read(&self, start: ByteOffset, buffer: &mut [u8]) {
        self.durable.read(start, buffer);
        let range = start.range(ByteLen::of_buffer(buffer.len()));
        for (sector, versions) in self.volatile.range(self.sectors(range)) {
            let Some(newest) = versions.last() else {
                continue;
            };
            let place = self.range_of(*sector);
            let wanted = place.intersection(range);
            let into = (wanted.start - range.start).as_usize();
            let from = (wanted.start - place.start).as_usize();
            let into = &mut buffer[into..into + wanted.len.as_usize()];
            match &newest.content {
                Content::Zeros => into.fill(0),
                Content::Bytes(bytes, at) => into.copy_from_slice(&bytes[at + from..][..into.len()]),
            }
        }
    }

    /// Writes `bytes` durably and without a version, to prepare a disk.
    pub fn write_durably(&mut self, start: ByteOffset, bytes: &[u8]) {
        let range = start.range(ByteLen::of_buffer(bytes.len()));
        let (first, behind) = (self.sectors(range).start, self.sectors(range).end);
        for sector in first..behind {
            self.volatile.remove(&sector);
        }
        self.durable.write(start, bytes);
        self.take_room(range);
    }

    /// Returns the first part of `range` that may hold anything but zeros. The bytes before it are zeros.
    pub(super) fn next_data(&self, range: ByteRange) -> Option<ByteRange> {
        let durable = self.durable.next_data(range);
        let volatile = self.volatile.range(self.sectors(range)).next();
        let volatile = volatile.map(|(sector, _)| self.range_of(*sector).intersection(range));
        match (durable, volatile) {
            (Some(durable), Some(volatile)) if volatile.start < durable.start => Some(volatile),
            (Some(durable), _) => Some(durable),
            (None, volatile) => volatile,
        }
    }

    /// Returns the number for a change that starts now.
    pub(super) fn start_change(&mut self) -> ChangeNumber {
        let change = self.next;
        self.next = ChangeNumber(change.0 + 1);
        change
    }

    /// Applies the sectors of `part` of a change of `whole`: reads return them from now on. `choose` decides for each
    /// sector whether it is applied at all.
    pub(super) fn apply(
        &mut self,
        change: ChangeNumber,
        whole: ByteRange,
        part: ByteRange,
        source: &Source,
        random: &mut Random,
        mut choose: impl FnMut(&mut Random) -> bool,
    ) {
        for sector in self.changed_sectors(part, source) {
            if !choose(random) {
                continue;
            }
            if let Some(content) = self.content(whole, sector, source, random) {
                let versions = self.volatile.entry(sector).or_default();
                versions.push(Version { change, content });
            }
        }
    }

    /// Returns the sectors of `range` that a change from `source` affects. Zeros and discards affect only sectors
    /// that may hold data.
    fn changed_sectors(&self, range: ByteRange, source: &Source) -> Vec<SectorIndex> {
        if let Source::Data(_) = source {
            return self.sectors(range).collect();
        }
        let mut sectors = Vec::new();
        let mut rest = range;
        while let Some(data) = self.next_data(rest) {
            sectors.extend(self.sectors(data));
            rest = ByteRange::between(data.end(), range.end());
        }
        sectors.dedup();
        sectors
    }

    /// Returns the content that a change gives a sector; `None` if the sector keeps its content.
    fn content(&self, whole: ByteRange, sector: SectorIndex, source: &Source, random: &mut Random) -> Option<Content> {
        let place = self.range_of(sector);
        match source {
            Source::Zeros => Some(Content::Zeros),
            Source::Data(bytes) => {
                let at = (place.start - whole.start).as_usize();
                Some(Content::Bytes(Rc::clone(bytes), at))
            }
            Source::Discard => match random.below(8) {
                0..3 => None,
                3..7 => Some(Content::Zeros),
                _ => {
                    let mut bytes = vec![0; self.sector_size as usize];
                    self.durable.read(place.start, &mut bytes);
                    Some(Content::Bytes(bytes.into(), 0))
                }
            },
        }
    }

    /// Makes the changes that `mark` covers durable.
    pub(super) fn flush(&mut self, mark: &FlushMark) {
        let durable = &mut self.durable;
        let sector_size = u64::from(self.sector_size);
        self.volatile.retain(|sector, versions| {
            let newest = versions.iter().rposition(|version| mark.covers(version.change));
            settle(
                durable,
                ByteOffset::new(sector * sector_size),
                sector_size,
                versions,
                newest,
            );
            !versions.is_empty()
        });
    }

    /// Makes `change` durable, and the versions that it overwrote.
    pub(super) fn force(&mut self, change: ChangeNumber, range: ByteRange) {
        let sectors: Vec<SectorIndex> = self.volatile.range(self.sectors(range)).map(|(s, _)| *s).collect();
        for sector in sectors {
            let place = self.range_of(sector);
            let Some(versions) = self.volatile.get_mut(&sector) else {
                continue;
            };
            let newest = versions.iter().rposition(|version| version.change == change);
            settle(&mut self.durable, place.start, place.len.get(), versions, newest);
            if versions.is_empty() {
                self.volatile.remove(&sector);
            }
        }
    }

    /// Loses power. Each sector keeps its durable content or one of the versions since.
    pub(super) fn lose_power(&mut self, random: &mut Random) {
        self.lose_host_memory();
        let fate = random.pick(&[Fate::NothingSurvives, Fate::AllSurvives, Fate::Random, Fate::Random]);
        let sector_size = u64::from(self.sector_size);
        for (sector, mut versions) in std::mem::take(&mut self.volatile) {
            let survivor = match fate {
                Fate::NothingSurvives => None,
                Fate::AllSurvives => versions.len().checked_sub(1),
                Fate::Random => (random.below(versions.len() as u64 + 1) as usize).checked_sub(1),
            };
            let start = ByteOffset::new(sector * sector_size);
            settle(&mut self.durable, start, sector_size, &mut versions, survivor);
        }
    }

    /// Changes the size at once and durably, as the host's administrator does. Data after the new end is lost; added
    /// space reads as zeros.
    pub(super) fn set_size(&mut self, size: ByteLen) {
        let end = ByteOffset::new(size.get());
        if size < self.size {
            let cut = ByteRange::between(end, ByteOffset::new(self.size.get()));
            self.durable.zero(cut);
            self.volatile.split_off(&self.sectors(cut).start);
        }
        self.size = size;
    }

    fn sectors(&self, range: ByteRange) -> std::ops::Range<SectorIndex> {
        let unit = u64::from(self.sector_size);
        range.start.get() / unit..range.end().get().div_ceil(unit)
    }

    fn range_of(&self, sector: SectorIndex) -> ByteRange {
        let unit = u64::from(self.sector_size);
        ByteRange::new(sector * unit, unit)
    }
}

fn room_units(range: ByteRange) -> std::ops::Range<u64> {
    range.start.get() / ROOM_UNIT..range.end().get() / ROOM_UNIT
}

/// The effect of a power loss on unflushed sectors.
#[derive(Clone, Copy)]
enum Fate {
    NothingSurvives,
    AllSurvives,
    Random,
}

/// Makes version `newest` of a sector durable, and removes it and all older ones from the versions.
fn settle(
    durable: &mut Image,
    start: ByteOffset,
    sector_size: u64,
    versions: &mut Vec<Version>,
    newest: Option<usize>,
) {
    let Some(newest) = newest else { return };
    match versions.drain(..=newest).next_back().map(|version| version.content) {
        Some(Content::Bytes(bytes, at)) => durable.write(start, &bytes[at..][..sector_size as usize]),
        Some(Content::Zeros) => durable.zero(start.range(ByteLen::new(sector_size))),
        None => {}
    }
}
