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

use super::image::SparseImage;
use super::random::SeededRng;
use crate::units::{ByteLen, ByteOffset, ByteRange};

/// The number of a change (write, zeroes, discard) of a medium, in the order in which the changes started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ChangeNumber(u64);

/// The index of a sector of [`SimulatedMedium::sector_size`] bytes.
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

/// The content that a change writes, see [`SimulatedMedium::apply`].
#[derive(Clone)]
pub(super) enum Source {
    /// A write's data; its first byte belongs to the first byte of the change's range.
    Data(Rc<[u8]>),
    Zeros,
    /// Each sector keeps its content, or becomes zeros, or returns to its durable content.
    Discard,
}

/// The changes that a flush covers: those that had completed when it was called.
pub(super) struct FlushCoverage {
    next: ChangeNumber,
    in_flight: Vec<ChangeNumber>,
}

impl FlushCoverage {
    /// Covers every change so far except those `in_flight`.
    pub(super) fn new(medium: &SimulatedMedium, in_flight: impl Iterator<Item = ChangeNumber>) -> Self {
        Self { next: medium.next, in_flight: in_flight.collect() }
    }

    fn covers(&self, change: ChangeNumber) -> bool {
        change < self.next && !self.in_flight.contains(&change)
    }
}

/// The content of a simulated disk. It outlives the device, so that a new one can be opened over it.
#[derive(Clone)]
pub struct SimulatedMedium {
    size: ByteLen,
    sector_size: u32,
    durable: SparseImage,
    volatile: BTreeMap<SectorIndex, Vec<Version>>,
    next: ChangeNumber,
    /// Files in the host's memory, by user, which a power loss removes.
    host_memory: BTreeMap<u32, Rc<File>>,
    /// The allocated parts, of [`ALLOCATION_UNIT_BYTES`] bytes each, if allocation is tracked: like the blocks of a
    /// sparse file.
    allocated_units: Option<BTreeSet<u64>>,
}

/// The unit of allocation, in bytes.
pub(super) const ALLOCATION_UNIT_BYTES: u64 = 4096;

impl SimulatedMedium {
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
            durable: SparseImage::default(),
            volatile: BTreeMap::new(),
            next: ChangeNumber(0),
            host_memory: BTreeMap::new(),
            allocated_units: None,
        }
    }

    /// Tracks the allocated parts, so that space can be limited; none is allocated yet. Costs memory for each
    /// allocated part.
    pub fn track_allocation(&mut self) {
        self.allocated_units = Some(BTreeSet::new());
    }

    /// Returns the number of unallocated parts of `range`.
    pub(super) fn unallocated_units(&self, range: ByteRange) -> u64 {
        let wide = range.widened(ALLOCATION_UNIT_BYTES);
        self.allocated_units.as_ref().map_or(0, |parts| {
            let allocated = parts.range(allocation_units(wide)).count() as u64;
            wide.len.get() / ALLOCATION_UNIT_BYTES - allocated
        })
    }

    /// Allocates `range`.
    pub(super) fn allocate(&mut self, range: ByteRange) {
        if let Some(parts) = &mut self.allocated_units {
            parts.extend(allocation_units(range.widened(ALLOCATION_UNIT_BYTES)));
        }
    }

    /// Deallocates the parts that are wholly in `range`, and returns the number that were allocated.
    pub(super) fn deallocate(&mut self, range: ByteRange) -> u64 {
        self.allocated_units.as_mut().map_or(0, |parts| {
            let deallocated: Vec<u64> =
                parts.range(allocation_units(range.narrowed(ALLOCATION_UNIT_BYTES))).copied().collect();
            deallocated.iter().for_each(|part| {
                parts.remove(part);
            });
            deallocated.len() as u64
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
    pub(super) fn clear_host_memory(&mut self) {
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
            let sector_range = self.range_of(*sector);
            let overlap = sector_range.intersection(range);
            let into = (overlap.start - range.start).as_usize();
            let from = (overlap.start - sector_range.start).as_usize();
            let into = &mut buffer[into..into + overlap.len.as_usize()];
            match &newest.content {
                Content::Zeros => into.fill(0),
                Content::Bytes(bytes, at) => into.copy_from_slice(&bytes[at + from..][..into.len()]),
            }
        }
    }

    /// Writes `bytes` durably and without a version, to prepare a disk.
    pub fn write_durably(&mut self, start: ByteOffset, bytes: &[u8]) {
        let range = start.range(ByteLen::of_buffer(bytes.len()));
        let (first, end) = (self.sectors(range).start, self.sectors(range).end);
        for sector in first..end {
            self.volatile.remove(&sector);
        }
        self.durable.write(start, bytes);
        self.allocate(range);
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

    /// Applies the sectors of `part` of a change of `change_range`: reads return them from now on. `choose` decides for
    /// each sector whether it is applied at all.
    pub(super) fn apply(
        &mut self,
        change: ChangeNumber,
        change_range: ByteRange,
        part: ByteRange,
        source: &Source,
        random: &mut SeededRng,
        mut choose: impl FnMut(&mut SeededRng) -> bool,
    ) {
        for sector in self.changed_sectors(part, source) {
            if !choose(random) {
                continue;
            }
            if let Some(content) = self.content(change_range, sector, source, random) {
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
    fn content(
        &self,
        change_range: ByteRange,
        sector: SectorIndex,
        source: &Source,
        random: &mut SeededRng,
    ) -> Option<Content> {
        let sector_range = self.range_of(sector);
        match source {
            Source::Zeros => Some(Content::Zeros),
            Source::Data(bytes) => {
                let at = (sector_range.start - change_range.start).as_usize();
                Some(Content::Bytes(Rc::clone(bytes), at))
            }
            Source::Discard => match random.below(8) {
                0..3 => None,
                3..7 => Some(Content::Zeros),
                _ => {
                    let mut bytes = vec![0; self.sector_size as usize];
                    self.durable.read(sector_range.start, &mut bytes);
                    Some(Content::Bytes(bytes.into(), 0))
                }
            },
        }
    }

    /// Makes the changes that `coverage` covers durable.
    pub(super) fn flush(&mut self, coverage: &FlushCoverage) {
        let durable = &mut self.durable;
        let sector_size = u64::from(self.sector_size);
        self.volatile.retain(|sector, versions| {
            let newest = versions.iter().rposition(|version| coverage.covers(version.change));
            make_durable(durable, ByteOffset::new(sector * sector_size), sector_size, versions, newest);
            !versions.is_empty()
        });
    }

    /// Makes `change` durable, and the versions that it overwrote.
    pub(super) fn flush_change(&mut self, change: ChangeNumber, range: ByteRange) {
        let sectors: Vec<SectorIndex> = self.volatile.range(self.sectors(range)).map(|(s, _)| *s).collect();
        for sector in sectors {
            let sector_range = self.range_of(sector);
            let Some(versions) = self.volatile.get_mut(&sector) else {
                continue;
            };
            let newest = versions.iter().rposition(|version| version.change == change);
            make_durable(&mut self.durable, sector_range.start, sector_range.len.get(), versions, newest);
            if versions.is_empty() {
                self.volatile.remove(&sector);
            }
        }
    }

    /// Loses power. Each sector keeps its durable content or one of the versions since.
    pub(super) fn lose_power(&mut self, random: &mut SeededRng) {
        self.clear_host_memory();
        let effect = random.pick(&[
            PowerLossEffect::NothingSurvives,
            PowerLossEffect::AllSurvives,
            PowerLossEffect::Random,
            PowerLossEffect::Random,
        ]);
        let sector_size = u64::from(self.sector_size);
        for (sector, mut versions) in std::mem::take(&mut self.volatile) {
            let survivor = match effect {
                PowerLossEffect::NothingSurvives => None,
                PowerLossEffect::AllSurvives => versions.len().checked_sub(1),
                PowerLossEffect::Random => (random.below(versions.len() as u64 + 1) as usize).checked_sub(1),
            };
            let start = ByteOffset::new(sector * sector_size);
            make_durable(&mut self.durable, start, sector_size, &mut versions, survivor);
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

fn allocation_units(range: ByteRange) -> std::ops::Range<u64> {
    range.start.get() / ALLOCATION_UNIT_BYTES..range.end().get() / ALLOCATION_UNIT_BYTES
}

/// The effect of a power loss on unflushed sectors.
#[derive(Clone, Copy)]
enum PowerLossEffect {
    NothingSurvives,
    AllSurvives,
    Random,
}

/// Makes version `newest` of a sector durable, and removes it and all older ones from the versions.
fn make_durable(
    durable: &mut SparseImage,
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
