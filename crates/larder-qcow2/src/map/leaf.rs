//! The entries of one L2 slice in as little memory as they allow.
//!
//! A leaf has one of four forms, the smallest that fits: one run (clusters that are contiguous in the image, or all
//! alike), a list of runs, entries packed into 1 to 7 bytes each, or the entries as on disk. Every form gives back
//! exactly the original entries, invalid ones included.

use smallvec::SmallVec;

use crate::entry::{ALL_ALLOCATED, ALL_ZERO, COMPRESSED, COPIED, L2Entry, ZERO};
use crate::shape::Shape;

/// The maximum number of entries of a leaf.
pub const LEAF_ENTRIES_MAX: usize = 512;

/// The bytes per entry up to which a changed list of runs stays a list: the maximum of packed entries on disks up to
/// 16 TiB. Finding the smallest form takes as long as a write.
const RUN_BYTES_PER_ENTRY_MAX: usize = 5;
/// The capacity for runs on the stack; more runs use a list on the heap.
const INLINE_RUNS_MAX: usize = 128;

/// One L2 slice.
#[derive(Default)]
pub(super) enum Leaf {
    /// Not read yet, or evicted again.
    #[default]
    Absent,
    /// One run, which begins with this entry.
    Run(CompactEntry),
    Runs(Box<[Run]>),
    Packed(Box<Packed>),
    Raw(Box<[L2Entry]>),
}

/// An entry without the bits that follow from its kind: the kind in the low 3 bits, above them a number. For a host
/// cluster the number is its index in the image, for a compressed one the bits with its location.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CompactEntry(u64);

const KIND_BITS: u32 = 3;
const UNALLOCATED: u64 = 0;
const ZERO_PLAIN: u64 = 1;
const DATA: u64 = 2;
const DATA_SHARED: u64 = 3;
const ZERO_HOST: u64 = 4;
const ZERO_SHARED: u64 = 5;
const COMPRESSED_DATA: u64 = 6;

/// A run of clusters, by the index of its first one.
#[derive(Clone, Copy)]
pub(super) struct Run {
    compact: CompactEntry,
    first: u16,
}

/// Entries of `width` bytes, relative to the lowest location in them.
pub(super) struct Packed {
    /// The lowest location, in clusters.
    base: u64,
    width: u8,
    /// `width` bytes per entry, little-endian, and 7 more so that 8 bytes can be loaded anywhere.
    bytes: Box<[u8]>,
}

impl CompactEntry {
    /// Returns the compact form; `None` if the entry has bits that do not follow from its kind.
    fn of(shape: Shape, entry: L2Entry) -> Option<Self> {
        let L2Entry { word, bitmap } = entry;
        if word & COMPRESSED != 0 {
            let location = word & !COMPRESSED;
            return (bitmap == 0 && location >> (64 - KIND_BITS) == 0).then_some(Self::new(COMPRESSED_DATA, location));
        }
        let host = entry.host(shape);
        let copied = word & COPIED != 0;
        let zero = match shape.extended {
            false => word & ZERO != 0,
            true => bitmap == ALL_ZERO,
        };
        let flags = match (copied, zero && !shape.extended) {
            (true, true) => COPIED | ZERO,
            (true, false) => COPIED,
            (false, true) => ZERO,
            (false, false) => 0,
        };
        let offset = host.unwrap_or(0);
        if word != offset | flags || offset & (shape.cluster_len() - 1) != 0 {
            return None;
        }
        let data = match host.is_some() && shape.extended {
            true => ALL_ALLOCATED,
            false => 0,
        };
        if !zero && bitmap != data {
            return None;
        }
        let kind = match (host.is_some(), zero, copied) {
            (false, false, false) => UNALLOCATED,
            (false, true, false) => ZERO_PLAIN,
            (false, _, true) => return None,
            (true, false, true) => DATA,
            (true, false, false) => DATA_SHARED,
            (true, true, true) => ZERO_HOST,
            (true, true, false) => ZERO_SHARED,
        };
        Some(Self::new(kind, offset >> shape.cluster_bits))
    }

    const fn new(kind: u64, number: u64) -> Self {
        Self(number << KIND_BITS | kind)
    }

    const fn kind(self) -> u64 {
        self.0 & ((1 << KIND_BITS) - 1)
    }

    const fn number(self) -> u64 {
        self.0 >> KIND_BITS
    }

    const fn has_host(self) -> bool {
        matches!(self.kind(), DATA | DATA_SHARED | ZERO_HOST | ZERO_SHARED)
    }

    const fn is_compressed(self) -> bool {
        self.kind() == COMPRESSED_DATA
    }

    fn entry(self, shape: Shape) -> L2Entry {
        let host = self.number() << shape.cluster_bits;
        let (zero_word, zero_bitmap) = match shape.extended {
            false => (ZERO, 0),
            true => (0, ALL_ZERO),
        };
        let data_bitmap = if shape.extended { ALL_ALLOCATED } else { 0 };
        let (word, bitmap) = match self.kind() {
            ZERO_PLAIN => (zero_word, zero_bitmap),
            DATA => (host | COPIED, data_bitmap),
            DATA_SHARED => (host, data_bitmap),
            ZERO_HOST => (host | COPIED | zero_word, zero_bitmap),
            ZERO_SHARED => (host | zero_word, zero_bitmap),
            COMPRESSED_DATA => (self.number() | COMPRESSED, 0),
            _ => (0, 0),
        };
        L2Entry { word, bitmap }
    }

    /// Returns the compact entry `count` clusters later in the same run.
    const fn advanced(self, count: u64) -> Self {
        if self.has_host() { Self(self.0 + (count << KIND_BITS)) } else { self }
    }

    fn continues(self, count: u64, other: Self) -> bool {
        !self.is_compressed() && self.advanced(count) == other
    }

    /// Returns the lowest location that packing must be able to express, in clusters.
    fn location(self, shape: Shape) -> Option<u64> {
        if self.is_compressed() {
            let offset = self.number() & ((1 << shape.compressed_offset_bits()) - 1);
            return Some(offset >> shape.cluster_bits);
        }
        self.has_host().then(|| self.number())
    }

    /// Returns the number relative to `base` (clusters), for packing. A compressed cluster's sector count goes below
    /// its offset, so that the number stays small.
    fn relative(self, shape: Shape, base: u64) -> u64 {
        if self.is_compressed() {
            let bits = shape.compressed_offset_bits();
            let offset = self.number() & ((1 << bits) - 1);
            let sectors = self.number() >> bits;
            let relative = (offset - (base << shape.cluster_bits)) << (62 - bits) | sectors;
            return relative << KIND_BITS | COMPRESSED_DATA;
        }
        if self.has_host() { (self.number() - base) << KIND_BITS | self.kind() } else { self.0 }
    }

    fn from_relative(shape: Shape, base: u64, relative: u64) -> Self {
        let code = Self(relative);
        if code.is_compressed() {
            let bits = shape.compressed_offset_bits();
            let count_bits = 62 - bits;
            let sectors = code.number() & ((1 << count_bits) - 1);
            let offset = (code.number() >> count_bits) + (base << shape.cluster_bits);
            return Self::new(COMPRESSED_DATA, sectors << bits | offset);
        }
        if code.has_host() { Self::new(code.kind(), code.number() + base) } else { code }
    }
}

impl Packed {
    fn new(shape: Shape, compacts: &[CompactEntry]) -> Option<Self> {
        let base = compacts.iter().filter_map(|compact| compact.location(shape)).min().unwrap_or(0);
        let widest = compacts.iter().map(|compact| compact.relative(shape, base)).max().unwrap_or(0);
        let width = (64 - widest.leading_zeros()).div_ceil(8).max(1) as usize;
        // The shifted offset of a distant compressed cluster may not fit.
        let fits = compacts
            .iter()
            .all(|compact| CompactEntry::from_relative(shape, base, compact.relative(shape, base)) == *compact);
        if width > 7 || !fits {
            return None;
        }
        let mut packed = Self { base, width: width as u8, bytes: vec![0; compacts.len() * width + 7].into() };
        for (index, compact) in compacts.iter().enumerate() {
            packed.store(index, compact.relative(shape, base));
        }
        Some(packed)
    }

    fn load(&self, shape: Shape, index: usize) -> CompactEntry {
        let at = index * usize::from(self.width);
        let mut bytes = [0; 8];
        bytes.copy_from_slice(&self.bytes[at..at + 8]);
        let relative = u64::from_le_bytes(bytes) & (u64::MAX >> (64 - 8 * u32::from(self.width)));
        CompactEntry::from_relative(shape, self.base, relative)
    }

    fn store(&mut self, index: usize, relative: u64) {
        let width = usize::from(self.width);
        let at = index * width;
        self.bytes[at..at + width].copy_from_slice(&relative.to_le_bytes()[..width]);
    }

    /// Stores an entry in place. Returns false if it does not fit.
    fn try_set(&mut self, shape: Shape, index: usize, compact: CompactEntry) -> bool {
        if compact.location(shape).is_some_and(|location| location < self.base) {
            return false;
        }
        let relative = compact.relative(shape, self.base);
        let fits = relative >> (8 * u32::from(self.width)) == 0
            && CompactEntry::from_relative(shape, self.base, relative) == compact;
        if fits {
            self.store(index, relative);
        }
        fits
    }
}

impl Leaf {
    /// A leaf with all entries unallocated.
    pub(super) const UNALLOCATED: Self = Self::Run(CompactEntry(UNALLOCATED));

    pub(super) fn is_loaded(&self) -> bool {
        !matches!(self, Self::Absent)
    }

    /// Returns the smallest form for `entries`.
    pub(super) fn of(shape: Shape, entries: &[L2Entry]) -> Self {
        let mut compacts = SmallVec::<[CompactEntry; LEAF_ENTRIES_MAX]>::new();
        for entry in entries {
            match CompactEntry::of(shape, *entry) {
                Some(compact) => compacts.push(compact),
                None => return Self::Raw(entries.into()),
            }
        }
        let mut runs = SmallVec::<[Run; 64]>::new();
        for (index, compact) in compacts.iter().enumerate() {
            let continues =
                runs.last().is_some_and(|run| run.compact.continues(index as u64 - u64::from(run.first), *compact));
            if !continues {
                runs.push(Run { compact: *compact, first: index as u16 });
            }
        }
        if let [run] = runs[..]
            && !run.compact.is_compressed()
        {
            return Self::Run(run.compact);
        }
        let run_bytes = runs.len() * size_of::<Run>();
        match Packed::new(shape, &compacts) {
            Some(packed) if packed.bytes.len() < run_bytes => Self::Packed(Box::new(packed)),
            _ if run_bytes < size_of_val(entries) => Self::Runs(runs[..].into()),
            _ => Self::Raw(entries.into()),
        }
    }

    /// Returns the memory on the heap in bytes.
    pub(super) fn heap_bytes(&self) -> usize {
        match self {
            Self::Absent | Self::Run(_) => 0,
            Self::Runs(runs) => size_of_val(&runs[..]),
            Self::Packed(packed) => size_of::<Packed>() + packed.bytes.len(),
            Self::Raw(entries) => size_of_val(&entries[..]),
        }
    }

    /// Returns entry `index`, and a lower bound of the length of its run, itself included; at most `limit` entries
    /// are checked.
    pub(super) fn run_at(&self, shape: Shape, index: usize, limit: usize) -> (L2Entry, usize) {
        let all = 1usize << shape.leaf_bits();
        let limit = limit.min(all - index);
        match self {
            Self::Absent => (L2Entry::UNALLOCATED, 0),
            Self::Run(first) => (first.advanced(index as u64).entry(shape), limit),
            Self::Runs(runs) => {
                let after = runs.partition_point(|run| usize::from(run.first) <= index);
                let run = runs[after - 1];
                let end = runs.get(after).map_or(all, |next| usize::from(next.first));
                let entry = run.compact.advanced((index - usize::from(run.first)) as u64);
                (entry.entry(shape), limit.min(end - index))
            }
            Self::Packed(packed) => {
                let first = packed.load(shape, index);
                let mut count = 1;
                while count < limit && first.continues(count as u64, packed.load(shape, index + count)) {
                    count += 1;
                }
                (first.entry(shape), count)
            }
            Self::Raw(entries) => {
                let first = entries[index];
                let mut count = 1;
                while count < limit && first.continues(shape, count as u64, entries[index + count]) {
                    count += 1;
                }
                (first, count)
            }
        }
    }

    /// Expands all entries to `entries`.
    pub(super) fn expand(&self, shape: Shape, entries: &mut [L2Entry]) {
        let mut index = 0;
        while index < entries.len() {
            let (first, count) = self.run_at(shape, index, entries.len() - index);
            for step in 0..count.max(1) {
                entries[index + step] = first.advanced(shape, step as u64);
            }
            index += count.max(1);
        }
    }

    /// Returns this list of runs after a change of `count` entries from `index` on; `None` if another form may be
    /// smaller, or is needed.
    fn with_run(&self, shape: Shape, index: usize, count: usize, compact: CompactEntry) -> Option<Self> {
        let all = 1usize << shape.leaf_bits();
        let single;
        let runs = match self {
            Self::Runs(runs) => &runs[..],
            Self::Run(compact) => {
                single = [Run { compact: *compact, first: 0 }];
                &single
            }
            _ => return None,
        };
        let end = index + count;
        let mut changed = SmallVec::<[Run; INLINE_RUNS_MAX]>::new();
        let mut push = |compact: CompactEntry, first: usize| {
            let continues = changed
                .last()
                .is_some_and(|run: &Run| run.compact.continues((first - usize::from(run.first)) as u64, compact));
            if !continues {
                let first = first as u16;
                changed.push(Run { compact, first });
            }
        };
        let before = runs.partition_point(|run| usize::from(run.first) < index);
        runs[..before].iter().for_each(|run| push(run.compact, run.first.into()));
        if count > 1 && compact.is_compressed() {
            return None;
        }
        push(compact, index);
        let after = runs.partition_point(|run| usize::from(run.first) <= end) - 1;
        if end < all {
            let split = runs[after];
            push(split.compact.advanced((end - usize::from(split.first)) as u64), end);
            runs[after + 1..].iter().for_each(|run| push(run.compact, run.first.into()));
        }
        match changed[..] {
            [run] if !run.compact.is_compressed() => Some(Self::Run(run.compact)),
            _ if changed.len() * size_of::<Run>() <= all * RUN_BYTES_PER_ENTRY_MAX => {
                Some(Self::Runs(changed[..].into()))
            }
            _ => None,
        }
    }

    /// Changes the `count` entries from `index` on into a run that begins with `first`.
    pub(super) fn set_run(&mut self, shape: Shape, index: usize, count: usize, first: L2Entry) {
        match self {
            Self::Packed(packed) => {
                let in_place = (0..count).all(|step| {
                    CompactEntry::of(shape, first.advanced(shape, step as u64))
                        .is_some_and(|compact| packed.try_set(shape, index + step, compact))
                });
                if in_place {
                    return;
                }
            }
            Self::Raw(entries) => {
                for step in 0..count {
                    entries[index + step] = first.advanced(shape, step as u64);
                }
                return;
            }
            Self::Run(_) | Self::Runs(_) => {
                let compact = CompactEntry::of(shape, first);
                if let Some(runs) = compact.and_then(|compact| self.with_run(shape, index, count, compact)) {
                    *self = runs;
                    return;
                }
            }
            Self::Absent => {}
        }
        let mut entries = [L2Entry::UNALLOCATED; LEAF_ENTRIES_MAX];
        let entries = &mut entries[..1 << shape.leaf_bits()];
        self.expand(shape, entries);
        for step in 0..count {
            entries[index + step] = first.advanced(shape, step as u64);
        }
        *self = Self::of(shape, entries);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::entry::OFFSET;
    use proptest::prelude::*;

    fn shapes() -> impl Strategy<Value = Shape> {
        (9u32..=21, any::<bool>(), any::<bool>()).prop_map(|(cluster_bits, extended, data_file)| Shape {
            cluster_bits: if extended { cluster_bits.max(14) } else { cluster_bits },
            extended,
            refcount_order: 4,
            version: 3,
            data_file,
        })
    }

    /// Generates entries as in real images: runs, scattered clusters, compressed ones, and invalid ones.
    fn entry(shape: Shape) -> impl Strategy<Value = L2Entry> {
        let first = if shape.data_file { 0u64 } else { 1 };
        let host = prop_oneof![first..4, 1u64..1 << 24].prop_map(move |index| index << shape.cluster_bits);
        prop_oneof![
            3 => Just(L2Entry::UNALLOCATED),
            3 => Just(L2Entry::zero(shape)),
            20 => host.clone().prop_map(move |host| L2Entry::data(shape, host)),
            2 => host.clone().prop_map(move |host| L2Entry { word: host, ..L2Entry::data(shape, host) }),
            2 => host.prop_map(move |host| {
                let zero = L2Entry::zero(shape);
                L2Entry { word: zero.word | host | COPIED, bitmap: zero.bitmap }
            }),
            2 => (0u64..1 << 40, 0u64..2).prop_map(move |(offset, sectors)| L2Entry {
                word: COMPRESSED | sectors << shape.compressed_offset_bits() | offset,
                bitmap: 0,
            }),
            1 => (any::<u64>(), any::<u64>()).prop_map(move |(word, bitmap)| L2Entry {
                word,
                bitmap: if shape.extended { bitmap } else { 0 },
            }),
        ]
    }

    /// Returns true if an entry has a host cluster, according to the format's specification.
    fn has_host(shape: Shape, entry: L2Entry) -> bool {
        let plain_zero = !shape.extended && entry.word & ZERO != 0;
        entry.word & OFFSET != 0 || (shape.data_file && entry.word & COPIED != 0 && !plain_zero)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]
        #[test]
        fn leaf_restores_original_entries(
            (shape, runs, changes) in shapes().prop_flat_map(|shape| {
                let run = (entry(shape), prop_oneof![Just(1usize), 1usize..200]);
                let change = (any::<prop::sample::Index>(), entry(shape), 1usize..40);
                (Just(shape), prop::collection::vec(run, 1..40), prop::collection::vec(change, 0..40))
            }),
        ) {
            let all = 1usize << shape.leaf_bits();
            let mut expected: Vec<L2Entry> = runs
                .iter()
                .flat_map(|(first, count)| (0..*count as u64).map(|step| {
                    if first.is_compressed() { *first } else { L2Entry { word: first.word.wrapping_add(
                        if has_host(shape, *first) { step << shape.cluster_bits } else { 0 }), ..*first } }
                }))
                .take(all)
                .collect();
            expected.resize(all, L2Entry::UNALLOCATED);
            let mut leaf = Leaf::of(shape, &expected);
            let check = |leaf: &Leaf, expected: &[L2Entry]| {
                let mut got = vec![L2Entry::UNALLOCATED; all];
                leaf.expand(shape, &mut got);
                prop_assert_eq!(&got[..], expected);
                for index in (0..all).step_by(7) {
                    let (first, count) = leaf.run_at(shape, index, all);
                    prop_assert!(count >= 1);
                    prop_assert_eq!(first, expected[index]);
                }
                Ok(())
            };
            check(&leaf, &expected)?;
            for (at, first, count) in changes {
                let at = at.index(all);
                let count = match first.is_compressed() || first.word.checked_add(40 << shape.cluster_bits).is_none() {
                    true => 1,
                    false => count.min(all - at),
                };
                leaf.set_run(shape, at, count, first);
                for step in 0..count {
                    expected[at + step] = first.advanced(shape, step as u64);
                }
                check(&leaf, &expected)?;
            }
        }
    }

    /// The worst fragmentation of 16 TiB takes at most five bytes per cluster.
    #[test]
    fn worst_fragmentation_takes_five_bytes() {
        let shape = Shape { cluster_bits: 16, extended: false, refcount_order: 4, version: 3, data_file: false };
        // Scattered over 16 TiB.
        let entries: Vec<L2Entry> =
            (0..512u64).map(|index| L2Entry::data(shape, (1 + index * 0x9e37_79b9 % (1 << 28)) << 16)).collect();
        let leaf = Leaf::of(shape, &entries);
        assert!(leaf.heap_bytes() <= 5 * 512, "{}", leaf.heap_bytes());
    }
}
