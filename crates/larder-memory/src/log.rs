//! The form in which a tier holds pages: a log of segments, into which evicted pages are appended as objects, in the
//! order of their eviction. What was evicted together lies together, so that it can be read back together.
//!
//! ```text
//! segment, 1 MiB    0  "LARDSEG\0"      8  number of the segment's filling      16  objects ...     0
//! object            0  page, 4 bytes    4  length, 2   6  encoding, 1   7  0xa7      8  data ...  padded to 16
//! ```
//!
//! Whether an object is alive only the page's entry says: it is if the entry leads to it. So nothing is written when a
//! page is wanted back; its object becomes dead space. A segment without a living object is free. A tier makes room by
//! moving the living ones of some segments to the end of the log, or down to the next tier.

use crate::entry::{Encoding, Place, Stored};
use crate::units::{PAGE, PageIndex};
use larder_codec::Codec;

/// Bytes of a segment: long enough that a disk is written at its full rate.
pub const SEGMENT: usize = 1 << 20;

/// How many segments a log may have: places are of 44 bits.
pub const SEGMENTS_MAX: u32 = 1 << 24;

/// Bytes before the first object of a segment.
pub const SEGMENT_HEADER: usize = 16;
const OBJECT_HEADER: usize = 8;
const MAGIC: [u8; 8] = *b"LARDSEG\0";
const OBJECT_MAGIC: u8 = 0xa7;

/// Number of a segment in its log.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct SegmentIndex(u32);

impl SegmentIndex {
    /// Segment number `index`.
    pub const fn new(index: u32) -> Self {
        Self(index)
    }

    /// That in which `place` is.
    pub const fn of(place: Place) -> Self {
        Self((place.bytes() / SEGMENT as u64) as u32)
    }

    /// Its number.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// Where it begins in the log.
    pub const fn start(self) -> u64 {
        self.0 as u64 * SEGMENT as u64
    }
}

/// Bytes that an object with `len` bytes of data takes in a segment.
pub const fn object_bytes(len: u16) -> usize {
    (OBJECT_HEADER + len as usize).next_multiple_of(Place::UNIT as usize)
}

/// Where the data of the object at `place` begins.
pub const fn data_at(place: Place) -> u64 {
    place.bytes() + OBJECT_HEADER as u64
}

/// Appends objects to a segment. It has only the part of it that is not filled: what was appended earlier may be read
/// meanwhile.
pub struct Appender<'a> {
    segment: SegmentIndex,
    /// From `from` to the segment's end.
    bytes: &'a mut [u8],
    from: usize,
    at: usize,
}

impl<'a> Appender<'a> {
    /// Goes on at byte `from` of `segment` with `bytes`, which are the rest of it; from 0 on it begins afresh, with
    /// `filling` to tell its fillings apart.
    ///
    /// # Panics
    /// `bytes` do not reach to the segment's end.
    pub fn new(segment: SegmentIndex, from: usize, bytes: &'a mut [u8], filling: u64) -> Self {
        assert_eq!(from + bytes.len(), SEGMENT);
        let mut at = from;
        if from == 0 {
            bytes[..8].copy_from_slice(&MAGIC);
            bytes[8..SEGMENT_HEADER].copy_from_slice(&filling.to_le_bytes());
            at = SEGMENT_HEADER;
        }
        Self {
            segment,
            bytes,
            from,
            at,
        }
    }

    /// Where the next object comes, in bytes from the segment's start.
    pub fn at(&self) -> usize {
        self.at
    }

    /// Room for the data of another object.
    pub fn room(&self) -> usize {
        (SEGMENT - self.at).saturating_sub(OBJECT_HEADER).min(PAGE)
    }

    /// Where the data of the next object goes; as long as [`Self::room`]. What is written there counts with
    /// [`Self::append`].
    pub fn next_data(&mut self) -> &mut [u8] {
        let room = self.room();
        let start = (self.at + OBJECT_HEADER).min(SEGMENT) - self.from;
        &mut self.bytes[start..start + room]
    }

    /// Appends an object whose data are the first `len` bytes of [`Self::next_data`].
    ///
    /// # Panics
    /// `len` is 0 or more than [`Self::room`].
    pub fn append(&mut self, page: PageIndex, len: usize, encoding: Encoding) -> Stored {
        assert!(len > 0 && len <= self.room());
        let place = Place::of_bytes(self.segment.start() + self.at as u64);
        let len = len as u16;
        let object = &mut self.bytes[self.at - self.from..];
        object[..4].copy_from_slice(&page.get().to_le_bytes());
        object[4..6].copy_from_slice(&len.to_le_bytes());
        object[6] = encoding_number(encoding);
        object[7] = OBJECT_MAGIC;
        // The padding, and no header after it: what was there before must not be taken for an object.
        let end = object_bytes(len).min(object.len());
        let terminator = (end + OBJECT_HEADER).min(object.len());
        object[OBJECT_HEADER + usize::from(len)..terminator].fill(0);
        self.at += end;
        Stored { place, len, encoding }
    }
}

fn encoding_number(encoding: Encoding) -> u8 {
    match encoding {
        Encoding::Raw => 0,
        Encoding::Codec(codec) => codec.number(),
    }
}

/// An object as it is found in a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Object {
    /// Of which page.
    pub page: PageIndex,
    /// Where, and how.
    pub stored: Stored,
}

/// The object whose header is at byte `at` of `bytes`, which begin at byte `start` of the log. `None` where there is
/// none, or not all of its header.
pub fn object_at(bytes: &[u8], start: u64, at: usize) -> Option<Object> {
    let header = bytes.get(at..at.checked_add(OBJECT_HEADER)?)?;
    let (page, rest) = header.split_first_chunk()?;
    let (len, rest) = rest.split_first_chunk()?;
    let len = u16::from_le_bytes(*len);
    let encoding = match rest[0] {
        0 => Encoding::Raw,
        number => Encoding::Codec(Codec::try_from(number).ok()?),
    };
    let place = start.checked_add(at as u64)?;
    if rest[1] != OBJECT_MAGIC || len == 0 || usize::from(len) > PAGE || !place.is_multiple_of(Place::UNIT) {
        return None;
    }
    Some(Object {
        page: PageIndex::new(u32::from_le_bytes(*page)),
        stored: Stored {
            place: Place::of_bytes(place),
            len,
            encoding,
        },
    })
}

/// All objects of a segment, alive or not, in order, until what follows is none.
pub fn objects(segment: SegmentIndex, bytes: &[u8]) -> impl Iterator<Item = Object> {
    objects_from(bytes, segment.start(), SEGMENT_HEADER)
}

/// The objects from the one at byte `at` of `bytes` on, which begin at byte `start` of the log. They
/// end where `bytes` do not have all of one.
pub fn objects_from(bytes: &[u8], start: u64, at: usize) -> impl Iterator<Item = Object> {
    let mut at = at;
    std::iter::from_fn(move || {
        let object = object_at(bytes, start, at)?;
        let end = at + object_bytes(object.stored.len);
        // The padding of the last one may be cut off.
        let has_all = at + OBJECT_HEADER + usize::from(object.stored.len) <= bytes.len();
        at = end;
        has_all.then_some(object)
    })
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Use {
    Free,
    /// Free, with what it takes still allocated: used again first.
    Warm,
    /// Free, and what it takes is being given back.
    Cooling,
    /// Being filled.
    Open,
    /// Full, and in the log.
    Sealed,
    /// What lives in it is being moved.
    Leaving,
    /// It could not be written to: not used again.
    Bad,
}

/// Which segments of a log are used, and how much of each is alive.
pub struct Segments {
    uses: Vec<Use>,
    /// Bytes of living objects.
    live: Vec<u32>,
    /// When each was taken, as a count.
    taken: Vec<u64>,
    taken_last: u64,
    /// Free ones; the lowest is taken next.
    free: std::collections::BTreeSet<SegmentIndex>,
    warm: Vec<SegmentIndex>,
    cooling: u32,
    /// Bytes of living objects in all segments.
    live_total: u64,
}

impl Segments {
    /// A log of `count` segments, all free.
    pub fn new(count: u32) -> Self {
        Self {
            uses: vec![Use::Free; count as usize],
            live: vec![0; count as usize],
            taken: vec![0; count as usize],
            taken_last: 0,
            free: (0..count).map(SegmentIndex).collect(),
            warm: Vec::new(),
            cooling: 0,
            live_total: 0,
        }
    }

    /// In which segment an object is.
    pub(crate) fn index_of(stored: Stored) -> usize {
        SegmentIndex::of(stored.place).0 as usize
    }

    /// How many bytes of it the object takes.
    pub(crate) fn bytes_of(stored: Stored) -> u64 {
        object_bytes(stored.len) as u64
    }

    /// Whether so many bytes of each segment live as is counted, and no segment is free of which something does.
    ///
    /// # Errors
    /// What is not so.
    pub(crate) fn check(&self, live: &[u64]) -> Result<(), String> {
        for (index, live) in live.iter().enumerate() {
            let (counted, is_used_as) = (self.live[index], self.uses[index]);
            if u64::from(counted) != *live {
                return Err(format!(
                    "segment {index}: {counted} bytes are counted as alive, {live} are"
                ));
            }
            if *live > 0 && !matches!(is_used_as, Use::Open | Use::Sealed | Use::Leaving) {
                return Err(format!(
                    "segment {index}: {live} bytes live in it, and it is {is_used_as:?}"
                ));
            }
        }
        match live.iter().sum::<u64>() == self.live_total {
            true => Ok(()),
            false => Err(format!("{} bytes are counted as alive in all", self.live_total)),
        }
    }

    /// How many have something in them.
    pub fn used(&self) -> u32 {
        self.allocated() - self.warm.len() as u32 - self.cooling
    }

    /// How many take space: used ones, and free ones whose space was not given back yet.
    pub fn allocated(&self) -> u32 {
        (self.uses.len() - self.free.len()) as u32
    }

    /// A free segment that takes space, if there are more than `keep` of them, for that to be given back, until
    /// [`Self::cooled`].
    pub fn cool(&mut self, keep: usize) -> Option<SegmentIndex> {
        if self.warm.len() <= keep {
            return None;
        }
        let segment = self.warm.pop()?;
        self.uses[segment.0 as usize] = Use::Cooling;
        self.cooling += 1;
        Some(segment)
    }

    /// What `segment` took has been given back.
    pub fn cooled(&mut self, segment: SegmentIndex) {
        debug_assert_eq!(self.uses[segment.0 as usize], Use::Cooling);
        self.uses[segment.0 as usize] = Use::Free;
        self.cooling -= 1;
        self.free.insert(segment);
    }

    /// How many can be taken.
    pub fn available(&self) -> u32 {
        (self.free.len() + self.warm.len()) as u32
    }

    /// How many there are.
    pub fn count(&self) -> u32 {
        self.uses.len() as u32
    }

    /// Bytes of living objects, with what each of them takes.
    pub fn live_bytes(&self) -> u64 {
        self.live_total
    }

    /// A free segment, to be filled, and the number of its filling.
    pub fn take(&mut self) -> Option<(SegmentIndex, u64)> {
        self.take_but(|_| false)
    }

    /// The same, but none of which `is_used` says so.
    pub fn take_but(&mut self, is_used: impl Fn(SegmentIndex) -> bool) -> Option<(SegmentIndex, u64)> {
        let segment = match self.warm.iter().rposition(|segment| !is_used(*segment)) {
            Some(index) => self.warm.remove(index),
            None => {
                let free = self.free.iter().copied().find(|segment| !is_used(*segment))?;
                self.free.remove(&free);
                free
            }
        };
        self.taken_last += 1;
        self.taken[segment.0 as usize] = self.taken_last;
        self.uses[segment.0 as usize] = Use::Open;
        Some((segment, self.taken_last))
    }

    /// It is full.
    pub fn seal(&mut self, segment: SegmentIndex) {
        debug_assert_eq!(self.uses[segment.0 as usize], Use::Open);
        self.uses[segment.0 as usize] = Use::Sealed;
        self.free_if_dead(segment);
    }

    /// It could not be written to. It is not taken again.
    pub fn spoil(&mut self, segment: SegmentIndex) {
        debug_assert_eq!(self.uses[segment.0 as usize], Use::Open);
        self.uses[segment.0 as usize] = Use::Bad;
    }

    /// It was taken, and nothing was put there.
    pub fn untake(&mut self, segment: SegmentIndex) {
        debug_assert_eq!(self.uses[segment.0 as usize], Use::Open);
        self.uses[segment.0 as usize] = Use::Free;
        self.free.insert(segment);
    }

    /// The object at `stored` lives.
    pub fn add(&mut self, stored: Stored) {
        let index = SegmentIndex::of(stored.place).0 as usize;
        let bytes = object_bytes(stored.len) as u32;
        debug_assert!(matches!(self.uses[index], Use::Open | Use::Sealed | Use::Leaving));
        self.live[index] += bytes;
        self.live_total += u64::from(bytes);
    }

    /// A successor has found an object that lives; whether it can be: it is in the log, and its segment not more than
    /// full.
    pub fn found(&mut self, stored: Stored) -> bool {
        let segment = SegmentIndex::of(stored.place);
        let index = segment.0 as usize;
        let within = (stored.place.bytes() % SEGMENT as u64) as usize;
        if index >= self.uses.len()
            || within < SEGMENT_HEADER
            || within + OBJECT_HEADER + usize::from(stored.len) > SEGMENT
            || self.live[index] as usize + object_bytes(stored.len) > SEGMENT
        {
            return false;
        }
        self.free.remove(&segment);
        self.uses[index] = Use::Sealed;
        self.add(stored);
        true
    }

    /// A successor has found that these take space; those in which nothing lives are free.
    pub fn found_allocated(&mut self, takes_space: impl Fn(SegmentIndex) -> bool) {
        let found: Vec<SegmentIndex> = self.free.iter().copied().filter(|free| takes_space(*free)).collect();
        for segment in found {
            self.free.remove(&segment);
            self.uses[segment.0 as usize] = Use::Warm;
            self.warm.push(segment);
        }
    }

    /// The object at `stored` lives no more.
    pub fn remove(&mut self, stored: Stored) {
        let segment = SegmentIndex::of(stored.place);
        let bytes = object_bytes(stored.len) as u32;
        self.live[segment.0 as usize] -= bytes;
        self.live_total -= u64::from(bytes);
        self.free_if_dead(segment);
    }

    fn free_if_dead(&mut self, segment: SegmentIndex) {
        let index = segment.0 as usize;
        if self.live[index] == 0 && self.uses[index] == Use::Sealed {
            self.uses[index] = Use::Warm;
            self.warm.push(segment);
        }
    }

    /// The full segment that was taken first, whose objects are to be moved; it stays until [`Self::left`].
    pub fn oldest(&mut self) -> Option<SegmentIndex> {
        let segment = self.sealed().min_by_key(|segment| self.taken[segment.0 as usize])?;
        self.uses[segment.0 as usize] = Use::Leaving;
        Some(segment)
    }

    /// The full segment of which the least lives, if that is less than `limit` bytes, to be moved likewise.
    pub fn emptiest(&mut self, limit: u32) -> Option<SegmentIndex> {
        let segment = self.sealed().min_by_key(|segment| self.live[segment.0 as usize])?;
        if self.live[segment.0 as usize] >= limit {
            return None;
        }
        self.uses[segment.0 as usize] = Use::Leaving;
        Some(segment)
    }

    fn sealed(&self) -> impl Iterator<Item = SegmentIndex> {
        (0..self.count())
            .map(SegmentIndex)
            .filter(|segment| self.uses[segment.0 as usize] == Use::Sealed)
    }

    /// All objects of `segment` that lived were moved or have died, or moving them has failed.
    pub fn left(&mut self, segment: SegmentIndex) {
        debug_assert_eq!(self.uses[segment.0 as usize], Use::Leaving);
        self.uses[segment.0 as usize] = Use::Sealed;
        self.free_if_dead(segment);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_found_as_they_were_appended() {
        let mut bytes = vec![0xff; SEGMENT];
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
            let stored = appender.append(PageIndex::new(index), len, Encoding::Raw);
            appended.push(Object {
                page: PageIndex::new(index),
                stored,
            });
            index += 1;
        }
        assert!(appended.len() > 400);
        let found: Vec<Object> = objects(segment, &bytes).collect();
        assert_eq!(found, appended);
        for object in found {
            let at = (data_at(object.stored.place) - segment.start()) as usize;
            assert!(
                bytes[at..at + usize::from(object.stored.len)]
                    .iter()
                    .all(|byte| *byte == object.page.get() as u8)
            );
        }
    }

    #[test]
    fn a_segment_is_free_when_nothing_in_it_lives() {
        let mut segments = Segments::new(2);
        let mut bytes = vec![0; SEGMENT];
        let (first, _) = segments.take().unwrap();
        let mut appender = Appender::new(first, 0, &mut bytes, 0);
        let stored = appender.append(PageIndex::new(1), 100, Encoding::Raw);
        segments.add(stored);
        segments.seal(first);
        assert_eq!(segments.used(), 1);
        segments.remove(stored);
        assert_eq!(
            (segments.used(), segments.allocated(), segments.live_bytes()),
            (0, 1, 0)
        );
        assert_eq!(segments.cool(0), Some(first));
        segments.cooled(first);
        assert_eq!(segments.allocated(), 0);
        assert!(segments.oldest().is_none());
    }

    #[test]
    fn a_segment_whose_moving_failed_is_the_oldest_again() {
        let mut segments = Segments::new(4);
        let mut bytes = vec![0; SEGMENT];
        let taken: Vec<_> = (0..3)
            .map(|_| {
                let (segment, _) = segments.take().unwrap();
                let stored = Appender::new(segment, 0, &mut bytes, 0).append(PageIndex::new(1), 100, Encoding::Raw);
                segments.add(stored);
                segments.seal(segment);
                segment
            })
            .collect();
        assert_eq!(segments.oldest(), Some(taken[0]));
        assert_eq!(segments.oldest(), Some(taken[1]));
        segments.left(taken[0]);
        assert_eq!(segments.oldest(), Some(taken[0]));
        assert_eq!(segments.oldest(), Some(taken[2]));
        assert_eq!(segments.oldest(), None);
    }

    #[test]
    fn what_cannot_be_an_object_is_none() {
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
    fn a_segment_that_is_in_use_is_not_taken_though_it_is_free() {
        let mut log = Segments::new(3);
        let first = log.take().unwrap().0;
        log.seal(first);
        let taken = log
            .take_but(|segment| segment == first || segment.get() == 1)
            .unwrap()
            .0;
        assert_eq!(taken, SegmentIndex::new(2));
        assert_eq!(log.take_but(|segment| segment == first || segment.get() == 1), None);
        assert_eq!(log.available(), 2);
        assert_eq!(log.take().unwrap().0, first);
    }
}
