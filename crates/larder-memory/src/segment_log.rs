//! Format in which a tier stores pages: a log of segments, to which evicted pages are appended as objects in the
//! order of their eviction. Pages that were evicted together are adjacent, and can be read together.
//!
//! ```text
//! segment, 1 MiB    0  "LARDSEG\0"      8  number of the segment's filling      16  objects ...     0
//! object            0  page, 4 bytes    4  length, 2   6  encoding, 1   7  0xa7      8  data ...  padded to 16
//! ```
//!
//! An object is live if the entry of its page points to it. So paging in writes nothing to the log: the object
//! becomes dead space. A segment without live objects is free. A tier frees space by moving the live objects of some
//! segments to the end of the log, or down to the next tier.

use crate::entry::{LogOffset, PageEncoding, StoredObject};
use crate::units::{PAGE, PageIndex};
use larder_codec::Codec;

/// Size of a segment, in bytes: large enough to write to a disk at its full speed.
pub const SEGMENT_BYTES: usize = 1 << 20;

/// Maximum number of segments of a log: byte offsets have 44 bits.
pub const SEGMENTS_MAX: u32 = 1 << 24;

/// Offset of the first object in a segment, in bytes.
pub const SEGMENT_HEADER_BYTES: usize = 16;
const OBJECT_HEADER_BYTES: usize = 8;
const MAGIC: [u8; 8] = *b"LARDSEG\0";
const OBJECT_MAGIC: u8 = 0xa7;

/// Index of a segment in its log.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SegmentIndex(u32);

impl SegmentIndex {
    /// Makes the segment index `index`.
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// Returns the segment that contains `offset`.
    pub const fn containing(offset: LogOffset) -> Self {
        Self((offset.bytes() / SEGMENT_BYTES as u64) as u32)
    }

    /// Returns the index as a number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Returns the offset of the segment in the log, in bytes.
    pub const fn start(self) -> u64 {
        self.0 as u64 * SEGMENT_BYTES as u64
    }
}

/// Returns the bytes that an object with `len` bytes of data uses in a segment.
pub const fn object_bytes(len: u16) -> usize {
    (OBJECT_HEADER_BYTES + len as usize).next_multiple_of(LogOffset::UNIT_BYTES as usize)
}

/// Returns the offset in the log of the data of the object at `offset`, in bytes.
pub const fn data_at(offset: LogOffset) -> u64 {
    offset.bytes() + OBJECT_HEADER_BYTES as u64
}

/// Appends objects to a segment. It borrows only the unfilled part, so that earlier objects can be read concurrently.
pub struct Appender<'a> {
    segment: SegmentIndex,
    /// The bytes from `from` to the end of the segment.
    bytes: &'a mut [u8],
    from: usize,
    at: usize,
}

impl<'a> Appender<'a> {
    /// Continues at byte `from` of `segment`, of which `bytes` are the rest. At 0 it writes a new segment header with
    /// `generation`, which distinguishes successive uses of the segment.
    ///
    /// # Panics
    /// If `bytes` do not end at the end of the segment.
    pub fn new(segment: SegmentIndex, from: usize, bytes: &'a mut [u8], generation: u64) -> Self {
        assert_eq!(from + bytes.len(), SEGMENT_BYTES);
        let mut at = from;
        if from == 0 {
            bytes[..8].copy_from_slice(&MAGIC);
            bytes[8..SEGMENT_HEADER_BYTES].copy_from_slice(&generation.to_le_bytes());
            at = SEGMENT_HEADER_BYTES;
        }
        Self { segment, bytes, from, at }
    }

    /// Returns the offset of the next object in the segment, in bytes.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Returns the maximum length of the data of the next object.
    pub fn room(&self) -> usize {
        (SEGMENT_BYTES - self.at).saturating_sub(OBJECT_HEADER_BYTES).min(PAGE)
    }

    /// Returns the buffer for the data of the next object, of length [`Self::room`]. [`Self::append`] makes an object
    /// of it.
    pub fn next_data(&mut self) -> &mut [u8] {
        let room = self.room();
        let start = (self.at + OBJECT_HEADER_BYTES).min(SEGMENT_BYTES) - self.from;
        &mut self.bytes[start..start + room]
    }

    /// Appends an object whose data are the first `len` bytes of [`Self::next_data`].
    ///
    /// # Panics
    /// If `len` is 0 or more than [`Self::room`].
    pub fn append(&mut self, page: PageIndex, len: usize, encoding: PageEncoding) -> StoredObject {
        assert!(len > 0 && len <= self.room());
        let offset = LogOffset::from_bytes(self.segment.start() + self.at as u64);
        let len = len as u16;
        let object = &mut self.bytes[self.at - self.from..];
        object[..4].copy_from_slice(&page.get().to_le_bytes());
        object[4..6].copy_from_slice(&len.to_le_bytes());
        object[6] = encoding_number(encoding);
        object[7] = OBJECT_MAGIC;
        // Clears the padding, and the next header: stale bytes there must not be taken for an object.
        let end = object_bytes(len).min(object.len());
        let terminator = (end + OBJECT_HEADER_BYTES).min(object.len());
        object[OBJECT_HEADER_BYTES + usize::from(len)..terminator].fill(0);
        self.at += end;
        StoredObject { offset, len, encoding }
    }
}

fn encoding_number(encoding: PageEncoding) -> u8 {
    match encoding {
        PageEncoding::Raw => 0,
        PageEncoding::Codec(codec) => codec.number(),
    }
}

/// An object that was found in a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LogObject {
    /// The page of the object.
    pub page: PageIndex,
    /// The location and the encoding.
    pub stored: StoredObject,
}

/// Parses the object whose header is at byte `at` of `bytes`, which begin at byte `start` of the log. Returns `None`
/// if there is no valid and complete header.
pub fn object_at(bytes: &[u8], start: u64, at: usize) -> Option<LogObject> {
    let header = bytes.get(at..at.checked_add(OBJECT_HEADER_BYTES)?)?;
    let (page, rest) = header.split_first_chunk()?;
    let (len, rest) = rest.split_first_chunk()?;
    let len = u16::from_le_bytes(*len);
    let encoding = match rest[0] {
        0 => PageEncoding::Raw,
        number => PageEncoding::Codec(Codec::try_from(number).ok()?),
    };
    let offset = start.checked_add(at as u64)?;
    if rest[1] != OBJECT_MAGIC || len == 0 || usize::from(len) > PAGE || !offset.is_multiple_of(LogOffset::UNIT_BYTES) {
        return None;
    }
    Some(LogObject {
        page: PageIndex::new(u32::from_le_bytes(*page)),
        stored: StoredObject { offset: LogOffset::from_bytes(offset), len, encoding },
    })
}

/// Returns all objects of a segment in order, live and dead, up to the first invalid header.
pub fn objects(segment: SegmentIndex, bytes: &[u8]) -> impl Iterator<Item = LogObject> {
    objects_from(bytes, segment.start(), SEGMENT_HEADER_BYTES)
}

/// Returns the objects from byte `at` of `bytes` on, up to the first one that is invalid or incomplete. `bytes` begin
/// at byte `start` of the log.
pub fn objects_from(bytes: &[u8], start: u64, at: usize) -> impl Iterator<Item = LogObject> {
    let mut at = at;
    std::iter::from_fn(move || {
        let object = object_at(bytes, start, at)?;
        let end = at + object_bytes(object.stored.len);
        // The padding of the last object may be cut off.
        let has_all = at + OBJECT_HEADER_BYTES + usize::from(object.stored.len) <= bytes.len();
        at = end;
        has_all.then_some(object)
    })
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SegmentUse {
    Free,
    /// Free, with its memory still allocated. Such segments are used first.
    FreeAllocated,
    /// Free; its memory is being released.
    Releasing,
    /// Being filled.
    Open,
    /// Full and in the log.
    Sealed,
    /// Its live objects are being moved.
    Moving,
    /// A write has failed; not used again.
    Bad,
}

/// Table of the segments of a log, with their uses and their live bytes.
pub struct SegmentTable {
    uses: Vec<SegmentUse>,
    /// Bytes of live objects in each segment.
    live: Vec<u32>,
    /// Sequence number of the last take of each segment.
    generations: Vec<u64>,
    last_generation: u64,
    /// Free segments; the lowest is taken next.
    free: std::collections::BTreeSet<SegmentIndex>,
    free_allocated: Vec<SegmentIndex>,
    releasing: u32,
    /// Bytes of live objects in all segments.
    live_total: u64,
}

impl SegmentTable {
    /// Makes a log of `count` segments, all free.
    pub fn new(count: u32) -> Self {
        Self {
            uses: vec![SegmentUse::Free; count as usize],
            live: vec![0; count as usize],
            generations: vec![0; count as usize],
            last_generation: 0,
            free: (0..count).map(SegmentIndex).collect(),
            free_allocated: Vec::new(),
            releasing: 0,
            live_total: 0,
        }
    }

    /// Returns the index of the segment that contains an object.
    pub(crate) fn index_of(stored: StoredObject) -> usize {
        SegmentIndex::containing(stored.offset).0 as usize
    }

    /// Returns the bytes of the segment that an object uses.
    pub(crate) fn bytes_of(stored: StoredObject) -> u64 {
        object_bytes(stored.len) as u64
    }

    /// Checks that `live` equals the counted live bytes of each segment, and that no free segment has any.
    ///
    /// # Errors
    /// The first difference.
    pub(crate) fn check(&self, live: &[u64]) -> Result<(), String> {
        for (index, live) in live.iter().enumerate() {
            let (counted, segment_use) = (self.live[index], self.uses[index]);
            if u64::from(counted) != *live {
                return Err(format!("segment {index}: {counted} bytes are counted as live, but {live} are live"));
            }
            if *live > 0 && !matches!(segment_use, SegmentUse::Open | SegmentUse::Sealed | SegmentUse::Moving) {
                return Err(format!("segment {index}: it has {live} live bytes, but its use is {segment_use:?}"));
            }
        }
        match live.iter().sum::<u64>() == self.live_total {
            true => Ok(()),
            false => Err(format!(
                "{} bytes are counted as live in total, which is not the sum of the segments",
                self.live_total
            )),
        }
    }

    /// Returns the number of segments that have contents.
    pub fn used(&self) -> u32 {
        self.allocated() - self.free_allocated.len() as u32 - self.releasing
    }

    /// Returns the number of segments that use memory: those with contents, and free ones whose memory is not
    /// released yet.
    pub fn allocated(&self) -> u32 {
        (self.uses.len() - self.free.len()) as u32
    }

    /// Returns a free segment whose memory is to be released, if more than `spare_max` free segments use memory. The
    /// caller reports the end of it with [`Self::end_release`].
    pub fn begin_release(&mut self, spare_max: usize) -> Option<SegmentIndex> {
        if self.free_allocated.len() <= spare_max {
            return None;
        }
        let segment = self.free_allocated.pop()?;
        self.uses[segment.0 as usize] = SegmentUse::Releasing;
        self.releasing += 1;
        Some(segment)
    }

    /// Records that the memory of `segment` has been released.
    pub fn end_release(&mut self, segment: SegmentIndex) {
        debug_assert_eq!(self.uses[segment.0 as usize], SegmentUse::Releasing);
        self.uses[segment.0 as usize] = SegmentUse::Free;
        self.releasing -= 1;
        self.free.insert(segment);
    }

    /// Returns the number of segments that can be taken.
    pub fn available(&self) -> u32 {
        (self.free.len() + self.free_allocated.len()) as u32
    }

    /// Returns the number of all segments.
    pub fn count(&self) -> u32 {
        self.uses.len() as u32
    }

    /// Returns the bytes that live objects use, headers and padding included.
    pub fn live_bytes(&self) -> u64 {
        self.live_total
    }

    /// Takes a free segment to fill. Returns it and the sequence number of its filling.
    pub fn allocate(&mut self) -> Option<(SegmentIndex, u64)> {
        self.allocate_except(|_| false)
    }

    /// Takes a free segment to fill, like [`Self::allocate`], but none for which `is_excluded` returns true.
    pub fn allocate_except(&mut self, is_excluded: impl Fn(SegmentIndex) -> bool) -> Option<(SegmentIndex, u64)> {
        let segment = match self.free_allocated.iter().rposition(|segment| !is_excluded(*segment)) {
            Some(index) => self.free_allocated.remove(index),
            None => {
                let free = self.free.iter().copied().find(|segment| !is_excluded(*segment))?;
                self.free.remove(&free);
                free
            }
        };
        self.last_generation += 1;
        self.generations[segment.0 as usize] = self.last_generation;
        self.uses[segment.0 as usize] = SegmentUse::Open;
        Some((segment, self.last_generation))
    }

    /// Records that `segment` is full.
    pub fn seal(&mut self, segment: SegmentIndex) {
        debug_assert_eq!(self.uses[segment.0 as usize], SegmentUse::Open);
        self.uses[segment.0 as usize] = SegmentUse::Sealed;
        self.free_if_dead(segment);
    }

    /// Records that `segment` could not be written to. It is not taken again.
    pub fn mark_bad(&mut self, segment: SegmentIndex) {
        debug_assert_eq!(self.uses[segment.0 as usize], SegmentUse::Open);
        self.uses[segment.0 as usize] = SegmentUse::Bad;
    }

    /// Gives back a segment that was taken and has no contents.
    pub fn undo_allocate(&mut self, segment: SegmentIndex) {
        debug_assert_eq!(self.uses[segment.0 as usize], SegmentUse::Open);
        self.uses[segment.0 as usize] = SegmentUse::Free;
        self.free.insert(segment);
    }

    /// Records that the object at `stored` is live.
    pub fn add_live(&mut self, stored: StoredObject) {
        let index = SegmentIndex::containing(stored.offset).0 as usize;
        let bytes = object_bytes(stored.len) as u32;
        debug_assert!(matches!(self.uses[index], SegmentUse::Open | SegmentUse::Sealed | SegmentUse::Moving));
        self.live[index] += bytes;
        self.live_total += u64::from(bytes);
    }

    /// Adopts a live object that an earlier pager has stored. Returns false if it cannot exist: it is outside the
    /// log, or its segment would be more than full.
    pub fn adopt(&mut self, stored: StoredObject) -> bool {
        let segment = SegmentIndex::containing(stored.offset);
        let index = segment.0 as usize;
        let within = (stored.offset.bytes() % SEGMENT_BYTES as u64) as usize;
        if index >= self.uses.len()
            || within < SEGMENT_HEADER_BYTES
            || within + OBJECT_HEADER_BYTES + usize::from(stored.len) > SEGMENT_BYTES
            || self.live[index] as usize + object_bytes(stored.len) > SEGMENT_BYTES
        {
            return false;
        }
        self.free.remove(&segment);
        self.uses[index] = SegmentUse::Sealed;
        self.add_live(stored);
        true
    }

    /// Records for all segments without live objects whether they use memory. Called once after all live objects are
    /// adopted.
    pub fn adopt_allocated(&mut self, is_allocated: impl Fn(SegmentIndex) -> bool) {
        let found: Vec<SegmentIndex> = self.free.iter().copied().filter(|free| is_allocated(*free)).collect();
        for segment in found {
            self.free.remove(&segment);
            self.uses[segment.0 as usize] = SegmentUse::FreeAllocated;
            self.free_allocated.push(segment);
        }
    }

    /// Records that the object at `stored` is dead.
    pub fn remove_live(&mut self, stored: StoredObject) {
        let segment = SegmentIndex::containing(stored.offset);
        let bytes = object_bytes(stored.len) as u32;
        self.live[segment.0 as usize] -= bytes;
        self.live_total -= u64::from(bytes);
        self.free_if_dead(segment);
    }

    fn free_if_dead(&mut self, segment: SegmentIndex) {
        let index = segment.0 as usize;
        if self.live[index] == 0 && self.uses[index] == SegmentUse::Sealed {
            self.uses[index] = SegmentUse::FreeAllocated;
            self.free_allocated.push(segment);
        }
    }

    /// Returns the full segment that was taken first, to move its live objects. The segment is reserved until
    /// [`Self::unreserve`].
    pub fn reserve_oldest(&mut self) -> Option<SegmentIndex> {
        let segment = self.sealed().min_by_key(|segment| self.generations[segment.0 as usize])?;
        self.uses[segment.0 as usize] = SegmentUse::Moving;
        Some(segment)
    }

    /// Returns the full segment with the fewest live bytes, if they are fewer than `limit`, to move its live objects.
    /// The segment is reserved until [`Self::unreserve`].
    pub fn reserve_emptiest(&mut self, limit: u32) -> Option<SegmentIndex> {
        let segment = self.sealed().min_by_key(|segment| self.live[segment.0 as usize])?;
        if self.live[segment.0 as usize] >= limit {
            return None;
        }
        self.uses[segment.0 as usize] = SegmentUse::Moving;
        Some(segment)
    }

    fn sealed(&self) -> impl Iterator<Item = SegmentIndex> {
        (0..self.count()).map(SegmentIndex).filter(|segment| self.uses[segment.0 as usize] == SegmentUse::Sealed)
    }

    /// Ends the reservation of `segment`: all its live objects were moved or have died, or moving them has failed.
    pub fn unreserve(&mut self, segment: SegmentIndex) {
        debug_assert_eq!(self.uses[segment.0 as usize], SegmentUse::Moving);
        self.uses[segment.0 as usize] = SegmentUse::Sealed;
        self.free_if_dead(segment);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parsed_objects_equal_appended_objects() {
        let mut bytes = vec![0xff; SEGMENT_BYTES];
        let segment = SegmentIndex::new(3);
        let mut appender = Appender::new(segment, 0, &mut bytes, 1);
        let mut appended = Vec::new();
        let mut index = 0;
        loop {
            let len = 1 + (index as usize * 997) % PAGE;
            if len > appender.room() {
                break;
            }
            appender.next_data()[..len].fill(index as u8);
            let stored = appender.append(PageIndex::new(index), len, PageEncoding::Raw);
            appended.push(LogObject { page: PageIndex::new(index), stored });
            index += 1;
        }
        assert!(appended.len() > 400);
        let found: Vec<LogObject> = objects(segment, &bytes).collect();
        assert_eq!(found, appended);
        for object in found {
            let at = (data_at(object.stored.offset) - segment.start()) as usize;
            assert!(bytes[at..at + usize::from(object.stored.len)].iter().all(|byte| *byte == object.page.get() as u8));
        }
    }

    #[test]
    fn segment_without_live_objects_is_free() {
        let mut segments = SegmentTable::new(2);
        let mut bytes = vec![0; SEGMENT_BYTES];
        let (first, _) = segments.allocate().unwrap();
        let mut appender = Appender::new(first, 0, &mut bytes, 0);
        let stored = appender.append(PageIndex::new(1), 100, PageEncoding::Raw);
        segments.add_live(stored);
        segments.seal(first);
        assert_eq!(segments.used(), 1);
        segments.remove_live(stored);
        assert_eq!((segments.used(), segments.allocated(), segments.live_bytes()), (0, 1, 0));
        assert_eq!(segments.begin_release(0), Some(first));
        segments.end_release(first);
        assert_eq!(segments.allocated(), 0);
        assert!(segments.reserve_oldest().is_none());
    }

    #[test]
    fn failed_move_leaves_segment_the_oldest() {
        let mut segments = SegmentTable::new(4);
        let mut bytes = vec![0; SEGMENT_BYTES];
        let taken: Vec<_> = (0..3)
            .map(|_| {
                let (segment, _) = segments.allocate().unwrap();
                let stored = Appender::new(segment, 0, &mut bytes, 0).append(PageIndex::new(1), 100, PageEncoding::Raw);
                segments.add_live(stored);
                segments.seal(segment);
                segment
            })
            .collect();
        assert_eq!(segments.reserve_oldest(), Some(taken[0]));
        assert_eq!(segments.reserve_oldest(), Some(taken[1]));
        segments.unreserve(taken[0]);
        assert_eq!(segments.reserve_oldest(), Some(taken[0]));
        assert_eq!(segments.reserve_oldest(), Some(taken[2]));
        assert_eq!(segments.reserve_oldest(), None);
    }

    #[test]
    fn invalid_object_header_is_rejected() {
        let mut bytes = vec![0; 64];
        assert_eq!(object_at(&bytes, 0, 0), None);
        bytes[7] = OBJECT_MAGIC;
        assert_eq!(object_at(&bytes, 0, 0), None);
        bytes[4..6].copy_from_slice(&4097u16.to_le_bytes());
        assert_eq!(object_at(&bytes, 0, 0), None);
        bytes[4..6].copy_from_slice(&4096u16.to_le_bytes());
        bytes[6] = 99;
        assert_eq!(object_at(&bytes, 0, 0), None);
        bytes[6] = 0;
        assert!(object_at(&bytes, 0, 0).is_some());
        assert_eq!(object_at(&bytes, 0, 60), None);
    }

    #[test]
    fn take_skips_free_segment_in_use() {
        let mut log = SegmentTable::new(3);
        let first = log.allocate().unwrap().0;
        log.seal(first);
        let taken = log.allocate_except(|segment| segment == first || segment.get() == 1).unwrap().0;
        assert_eq!(taken, SegmentIndex::new(2));
        assert_eq!(log.allocate_except(|segment| segment == first || segment.get() == 1), None);
        assert_eq!(log.available(), 2);
        assert_eq!(log.allocate().unwrap().0, first);
    }
}
