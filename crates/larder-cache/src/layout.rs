//! Block layout of a cache, and the mapping of lines to slots.
//!
//! A cache is set-associative. Consecutive lines of the disk belong to consecutive sets (line number modulo the
//! number of sets), so that a run of lines is spread evenly. The number of sets is a prime, so that strides of a
//! power of two are, too. A line may use any way of its set. The lines of one way lie side by side in the order of
//! the sets: neighbours on the disk that share a way number are neighbours in the cache.
//!
//! ```text
//! byte 0     superblock, twice 4 KiB
//!      8192  journal, 512-byte sectors
//!            pages, two for each set
//!            data: way 0 of every set, way 1 of every set, ...
//! ```

use std::ops::Range;

use larder_block::{ByteLen, ByteOffset};
use larder_policy::geometry::{self, is_prime};

use crate::page;

/// Bytes of a sector, the unit of valid and dirty data.
pub(crate) const SECTOR: u64 = 512;
pub(crate) const SECTOR_BITS: u32 = 9;

/// Bytes of each of the two superblocks.
pub(crate) const SUPERBLOCK_LEN: u64 = 4096;
/// Offset of the journal.
pub(crate) const JOURNAL_AT: u64 = 2 * SUPERBLOCK_LEN;

/// Bytes of a block of the journal, the unit of commits: an SSD writes it without reading first.
pub(crate) const COMMIT_UNIT: u64 = 4096;
pub(crate) const COMMIT_SECTORS: u64 = COMMIT_UNIT / SECTOR;

/// The most ways of a set. A page has room for them, so that a cache can grow.
pub(crate) const WAYS_MAX: u32 = geometry::WAYS_MAX as u32;
/// The fewest ways of a set, except in the smallest caches.
const WAYS_MIN: u32 = 4;
/// Number of sets that a very small cache should have at least.
const SETS_MIN: u64 = 8;

/// Bytes of a cache for each byte of its journal. With lines of 4 KiB and full sectors, half a journal has ten
/// records for each set, so a page is written once for ten records.
const JOURNAL_SHARE: u64 = 4096;
/// Fewest bytes of a journal. [`JOURNAL_MAX`] is the most, because all of it is read before the first request.
const JOURNAL_MIN: u64 = 16 << 10;
const JOURNAL_MAX: u64 = 16 << 20;

/// Number of a part of the disk as long as a line: the part begins at this number times the line's length.
pub(crate) type Line = u64;

/// Location of a line in the cache: set times 256, plus way.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub(crate) struct Slot(pub(crate) u32);

impl Slot {
    pub(crate) fn new(set: u32, way: u32) -> Self {
        debug_assert!(way < WAYS_MAX);
        Self(set << 8 | way)
    }

    pub(crate) fn set(self) -> u32 {
        self.0 >> 8
    }

    pub(crate) fn way(self) -> u32 {
        self.0 & 0xff
    }
}

/// Sectors of a line, the first one in the lowest bit.
pub(crate) type SectorMask = u128;

/// Block layout of a cache. Fields without a length in bytes are counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheLayout {
    pub(crate) line_bits: u32,
    pub(crate) sets: u32,
    pub(crate) ways: u32,
    pub(crate) journal_len: u64,
    /// Bytes of one of a set's two pages.
    pub(crate) page_len: u64,
}

impl CacheLayout {
    /// Returns the shape of a cache in a file or device of `size` bytes; `None` if it is too small. `page_unit` is
    /// the number of bytes that the device writes at once.
    pub(crate) fn for_size(size: ByteLen, line_bits: u32, page_unit: u64) -> Option<Self> {
        let journal_len = (size.get() / JOURNAL_SHARE).clamp(JOURNAL_MIN, JOURNAL_MAX) / COMMIT_UNIT * COMMIT_UNIT;
        let room = size.get().checked_sub(JOURNAL_AT + journal_len)?;
        let lines = room >> line_bits;
        let ways = (lines / SETS_MIN).clamp(WAYS_MIN.into(), WAYS_MAX.into());
        let page_len = page::len_for(line_bits).next_multiple_of(page_unit.max(SECTOR));
        // There may be a gap before the data, which begins at a multiple of the line's length.
        let room = room.checked_sub(1 << line_bits)?;
        let set_len = (ways << line_bits) + 2 * page_len;
        // A slot's number has 24 bits for the set. Fewer sets would leave room unused.
        let fewest = u32::try_from(room / set_len).unwrap_or(u32::MAX).clamp(1, (1 << 24) - 1);
        let with_sets = |sets: u32| {
            let ways = (room / u64::from(sets)).checked_sub(2 * page_len)? >> line_bits;
            let ways = ways.min(WAYS_MAX.into()) as u32;
            (ways > 0).then_some(Self { line_bits, sets, ways, journal_len, page_len })
        };
        // Among the next primes, take the one that leaves the least room unused.
        let primes = (fewest..=fewest.saturating_add(fewest / 2).min((1 << 24) - 1))
            .filter(|sets| is_prime((*sets).into()))
            .take(64);
        primes.chain([1]).filter_map(with_sets).max_by_key(Self::slots)
    }

    /// Returns whether this program can work with the shape, in `size` bytes.
    pub(crate) fn is_valid(&self, size: ByteLen) -> bool {
        let lines_fit = |layout: &Self| {
            let data = u64::from(layout.sets) * u64::from(layout.ways);
            data.checked_shl(layout.line_bits)
                .and_then(|len| layout.data_at().checked_add(len))
                .is_some_and(|end| end <= size.get())
        };
        (12..=16).contains(&self.line_bits)
            && (1..1 << 24).contains(&self.sets)
            && (1..=WAYS_MAX).contains(&self.ways)
            && self.journal_len.is_multiple_of(COMMIT_UNIT)
            && (COMMIT_UNIT * 4..=1 << 30).contains(&self.journal_len)
            && self.page_len >= page::len_for(self.line_bits)
            && self.page_len <= 1 << 16
            && self.page_len.is_multiple_of(SECTOR)
            && lines_fit(self)
    }

    /// Returns how many ways of a full set have no line, so that a new line need not wait for an eviction.
    pub(crate) fn spare_ways(&self) -> usize {
        1
    }

    /// Returns the number of sets.
    pub fn sets(&self) -> u32 {
        self.sets
    }

    /// Returns the bytes of a line.
    pub fn line_len(&self) -> u64 {
        1 << self.line_bits
    }

    pub(crate) fn sectors_per_line(&self) -> u32 {
        1 << (self.line_bits - SECTOR_BITS)
    }

    /// Returns the bytes of a line's sector mask.
    pub(crate) fn mask_len(&self) -> usize {
        (self.sectors_per_line() / 8) as usize
    }

    pub(crate) fn slots(&self) -> u64 {
        u64::from(self.sets) * u64::from(self.ways)
    }

    /// Returns the bytes of data that the cache can hold.
    pub fn capacity(&self) -> ByteLen {
        ByteLen::new(self.slots() << self.line_bits)
    }

    pub(crate) fn set_of(&self, line: Line) -> u32 {
        (line % u64::from(self.sets)) as u32
    }

    /// Returns the sets of consecutive lines: a run of sets, and perhaps another one from the first set on.
    pub(crate) fn runs_of_sets(&self, lines: Range<Line>) -> [Range<u32>; 2] {
        let sets = u64::from(self.sets);
        let count = lines.end.saturating_sub(lines.start);
        if count >= sets {
            return [0..self.sets, 0..0];
        }
        let first = lines.start % sets;
        let end = first + count;
        [first as u32..end.min(sets) as u32, 0..end.saturating_sub(sets) as u32]
    }

    /// Returns each set of consecutive lines once.
    pub(crate) fn sets_of(&self, lines: Range<Line>) -> impl Iterator<Item = u32> + use<> {
        self.runs_of_sets(lines).into_iter().flatten()
    }

    /// Returns the number that distinguishes a line from the others of its set; never zero.
    pub(crate) fn tag_of(&self, line: Line) -> u32 {
        u32::try_from(line / u64::from(self.sets) + 1).unwrap_or(u32::MAX)
    }

    pub(crate) fn line_of(&self, set: u32, tag: u32) -> Line {
        (u64::from(tag) - 1) * u64::from(self.sets) + u64::from(set)
    }

    /// Returns the size of the longest disk whose lines all have a tag.
    pub(crate) fn disk_max(&self) -> ByteLen {
        let lines = u64::from(u32::MAX - 1) * u64::from(self.sets);
        ByteLen::new(lines.min(1 << (63 - self.line_bits)) << self.line_bits)
    }

    pub(crate) fn journal_sectors(&self) -> u64 {
        self.journal_len / SECTOR
    }

    fn pages_at(&self) -> u64 {
        JOURNAL_AT + self.journal_len
    }

    /// Returns the position of the first (`false`) or second page of a set.
    pub(crate) fn page_at(&self, set: u32, second: bool) -> ByteOffset {
        ByteOffset::new(self.pages_at() + (u64::from(set) * 2 + u64::from(second)) * self.page_len)
    }

    pub(crate) fn pages_len(&self) -> u64 {
        u64::from(self.sets) * 2 * self.page_len
    }

    fn data_at(&self) -> u64 {
        (self.pages_at() + self.pages_len()).next_multiple_of(self.line_len())
    }

    /// Returns the position of a slot's data.
    pub(crate) fn data_of(&self, slot: Slot) -> ByteOffset {
        let index = u64::from(slot.way()) * u64::from(self.sets) + u64::from(slot.set());
        ByteOffset::new(self.data_at() + (index << self.line_bits))
    }

    /// Returns the bytes of the file or device that the cache needs.
    pub(crate) fn len(&self) -> ByteLen {
        ByteLen::new(self.data_at() + (self.slots() << self.line_bits))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shape_fits_and_uses_most_space() {
        for line_bits in 12..=16 {
            for unit in [512, 4096] {
                for size in [1 << 20, 10 << 20, 1 << 30, 100 << 30, 3_000_000_000, 8 << 40] {
                    let size = ByteLen::new(size);
                    let Some(shape) = CacheLayout::for_size(size, line_bits, unit) else {
                        assert!(size <= ByteLen::mib(1), "{line_bits} {size}");
                        continue;
                    };
                    assert!(shape.is_valid(size), "{shape:?} {size}");
                    assert!(shape.len() <= size);
                    let least = match size.get() {
                        small if small <= 1 << 20 => 0.6,
                        small if small <= 16 << 20 => 0.92,
                        _ => 0.98,
                    };
                    let used = shape.capacity().get() as f64 / size.get() as f64;
                    assert!(used > least, "{shape:?} uses {used} of {size}");
                }
            }
        }
        assert_eq!(CacheLayout::for_size(ByteLen::kib(32), 12, 512), None);
    }

    #[test]
    fn every_slot_has_distinct_data_position() {
        let shape = CacheLayout::for_size(ByteLen::mib(4), 12, 512).expect("large enough");
        let mut positions = std::collections::HashSet::new();
        for set in 0..shape.sets {
            for way in 0..shape.ways {
                let at = shape.data_of(Slot::new(set, way)).get();
                assert!(at.is_multiple_of(shape.line_len()) && at + shape.line_len() <= shape.len().get());
                assert!(at >= shape.page_at(shape.sets - 1, true).get() + shape.page_len);
                assert!(positions.insert(at));
            }
        }
        for line in [0, 1, 77, 1 << 30] {
            assert_eq!(shape.line_of(shape.set_of(line), shape.tag_of(line)), line);
        }
    }
}
