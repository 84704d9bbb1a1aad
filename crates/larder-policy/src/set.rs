//! State of one set: class and last use of each line, and recently evicted lines.
//!
//! ```text
//! 0        4       6       8        9       10        24      24+w    24+2w      24+4w
//! | swept  | next  | lines | ranked | count | victims | class | stamp | ghosts   |
//! | u32    | u16   | u16   | u8     | u8    | u8 x14  | u8 xw | u8 xw | u16 xw   |
//! ```
//!
//! `class` is by way, 0 for an empty way. `stamp` is the lower byte of the tick of the line's last use. A byte
//! represents only 256 ticks, so `swept` has the last tick at which no stamp was older than [`STAMP_AGE_MAX`]. Before
//! stamps become ambiguous, a sweep moves those that are too old forward. `ghosts` is a ring of lines that were
//! evicted or not admitted; `next` is the position of the next one. A ghost consists of 13 bits of the line's hash,
//! and its uses. `lines` is the number of lines. `victims` has `count` ways with the lowest scores, the lowest last,
//! as of the tick whose lower byte is `ranked`: one scan of all ways finds several, so that not every eviction needs
//! a scan.

use crate::age::{AGE_OF, AGES, HORIZON_TICKS, age};
use crate::class::{self, Class, USES_MAX};
use crate::geometry::WAYS_MAX;
use crate::score::RANK_NONE;

const HEADER: usize = 24;

/// Offsets of the fields of the header.
const NEXT: usize = 4;
const LINES: usize = 6;
const RANKED: usize = 8;
const COUNT: usize = 9;
const VICTIMS: usize = 10;

const VICTIMS_MAX: usize = HEADER - VICTIMS;

/// Parts of a set in each of which a scan finds one victim.
const STRIPES: usize = 32;

/// The highest age of a stamp after a sweep, in ticks. [`SWEEP_TICKS`] is the interval of sweeps.
const STAMP_AGE_MAX: u32 = HORIZON_TICKS;
const SWEEP_TICKS: u32 = 32;

/// Returns the bytes of a set's state.
pub(crate) const fn bytes(ways: usize) -> usize {
    HEADER + 4 * ways
}

/// Returns the offsets in a set's state that a hit of `way` changes.
pub(crate) fn touched_offsets(ways: usize, way: u8) -> [usize; 3] {
    let class = HEADER + usize::from(way);
    [0, class, class + ways]
}

/// Accessor of a set's state.
pub(crate) struct Set<'a> {
    header: &'a mut [u8],
    classes: &'a mut [u8],
    stamps: &'a mut [u8],
    ghosts: &'a mut [u8],
    tick: u32,
}

impl<'a> Set<'a> {
    /// Wraps a set's state as of `tick`, which never decreases.
    pub(crate) fn new(state: &'a mut [u8], ways: usize, tick: u32) -> Self {
        assert_eq!(state.len(), bytes(ways), "a set's state has the length that Policy::set_bytes returns");
        let (header, rest) = state.split_at_mut(HEADER);
        let (classes, rest) = rest.split_at_mut(ways);
        let (stamps, ghosts) = rest.split_at_mut(ways);
        let mut set = Self { header, classes, stamps, ghosts, tick };
        let swept = set.swept();
        if tick.wrapping_sub(swept) >= SWEEP_TICKS {
            set.sweep(swept);
        }
        set
    }

    fn swept(&self) -> u32 {
        u32::from_le_bytes([self.header[0], self.header[1], self.header[2], self.header[3]])
    }

    #[cold]
    fn sweep(&mut self, swept: u32) {
        let since = self.tick.wrapping_sub(swept);
        for stamp in self.stamps.iter_mut() {
            // A stamp may be newer than the last sweep.
            let before = u32::from((swept as u8).wrapping_add(SWEEP_TICKS as u8).wrapping_sub(*stamp));
            let age = (before + since).saturating_sub(SWEEP_TICKS).min(STAMP_AGE_MAX);
            *stamp = self.tick.wrapping_sub(age) as u8;
        }
        self.header[..4].copy_from_slice(&self.tick.to_le_bytes());
    }

    fn age_of(&self, stamp: u8) -> usize {
        age(u32::from((self.tick as u8).wrapping_sub(stamp)))
    }

    /// Returns the class of the line in `way`, if there is one.
    pub(crate) fn class(&self, way: u8) -> Option<Class> {
        Some(self.classes[usize::from(way)]).filter(|class| *class != 0).map(Class::from_number)
    }

    /// Returns class and age of the line in `way`, if there is one.
    pub(crate) fn line(&self, way: u8) -> Option<(Class, usize)> {
        Some((self.class(way)?, self.age_of(self.stamps[usize::from(way)])))
    }

    /// Records that the line in `way` is of `class`, and was used `ticks` ago.
    pub(crate) fn put(&mut self, way: u8, class: Class, ticks: u32) {
        let here = &mut self.classes[usize::from(way)];
        let new = *here == 0;
        *here = class.number();
        self.stamps[usize::from(way)] = self.tick.wrapping_sub(ticks) as u8;
        if new {
            self.set_field(LINES, self.lines() + 1);
        } else {
            self.drop_victim(way);
        }
    }

    /// Marks `way` as empty.
    pub(crate) fn clear(&mut self, way: u8) {
        let class = std::mem::take(&mut self.classes[usize::from(way)]);
        if class != 0 {
            self.set_field(LINES, self.lines() - 1);
            self.drop_victim(way);
        }
    }

    /// Removes `way` from the next victims.
    fn drop_victim(&mut self, way: u8) {
        let count = usize::from(self.header[COUNT]);
        let victims = &mut self.header[VICTIMS..VICTIMS + count];
        if let Some(index) = victims.iter().position(|victim| *victim == way) {
            victims[index..].rotate_left(1);
            self.header[COUNT] -= 1;
        }
    }

    fn field(&self, at: usize) -> usize {
        usize::from(u16::from_le_bytes([self.header[at], self.header[at + 1]]))
    }

    fn set_field(&mut self, at: usize, value: usize) {
        self.header[at..at + 2].copy_from_slice(&(value as u16).to_le_bytes());
    }

    fn lines(&self) -> usize {
        self.field(LINES)
    }

    /// Returns whether every way has a line, except for `spare_ways`.
    pub(crate) fn is_full(&self, spare_ways: usize) -> bool {
        self.lines() + spare_ways >= self.classes.len()
    }

    /// Returns the way with the lowest score, if there is a line; `ranks` has the scores by class and age.
    pub(crate) fn lowest(&mut self, ranks: &[u32]) -> Option<u8> {
        if self.header[COUNT] == 0 || self.header[RANKED] != self.tick as u8 {
            self.rank(ranks);
        }
        let count = usize::from(self.header[COUNT]);
        (count > 0).then(|| self.header[VICTIMS + count - 1])
    }

    /// Returns the `allowed` way with the lowest score, if there is one.
    pub(crate) fn lowest_allowed(&mut self, ranks: &[u32], mut allowed: impl FnMut(u8) -> bool) -> Option<u8> {
        let first = self.lowest(ranks)?;
        if allowed(first) {
            return Some(first);
        }
        let mut least = None;
        let mut lowest_score = u32::MAX;
        for way in 0..self.classes.len() {
            let score = self.score(ranks, way);
            if score < lowest_score && allowed(way as u8) {
                (least, lowest_score) = (Some(way as u8), score);
            }
        }
        least
    }

    fn score(&self, ranks: &[u32], way: usize) -> u32 {
        ranks[usize::from(self.classes[way]) % class::COUNT * AGES + self.age_of(self.stamps[way])]
    }

    #[inline(never)]
    fn rank(&mut self, ranks: &[u32]) {
        // Score and way are packed into one number.
        let mut all = [u32::MAX; WAYS_MAX];
        let now = self.tick as u8;
        for (way, ((number, class), stamp)) in all.iter_mut().zip(&*self.classes).zip(&*self.stamps).enumerate() {
            let age = AGE_OF[usize::from(now.wrapping_sub(*stamp))];
            *number = ranks[usize::from(*class) % class::COUNT * AGES + usize::from(age)] << 8 | way as u32;
        }
        // Takes the minimum of each part. The overall minimum is exact; the runners-up are approximate.
        let mut lowest = [u32::MAX; STRIPES];
        for stripe in all.chunks_exact(STRIPES) {
            for (least, number) in lowest.iter_mut().zip(stripe) {
                *least = (*least).min(*number);
            }
        }
        lowest.sort_unstable();
        let lines = lowest.partition_point(|number| *number >> 8 < RANK_NONE);
        let count = VICTIMS_MAX.min(lines);
        for (victim, number) in self.header[VICTIMS..].iter_mut().zip(lowest[..count].iter().rev()) {
            *victim = *number as u8;
        }
        self.header[COUNT] = count as u8;
        self.header[RANKED] = now;
    }

    fn ghost_at(&self, index: usize) -> u16 {
        u16::from_le_bytes([self.ghosts[2 * index], self.ghosts[2 * index + 1]])
    }

    fn set_ghost(&mut self, index: usize, ghost: u16) {
        self.ghosts[2 * index..2 * index + 2].copy_from_slice(&ghost.to_le_bytes());
    }

    /// Returns the position of a line's ghost.
    pub(crate) fn find_ghost(&self, hash: u64) -> Option<usize> {
        const PIECE: usize = 64;
        let wanted = ghost(hash, 0);
        let matches_ghost = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]) & !u16::from(USES_MAX) == wanted;
        // Each piece is compared without a branch, which compiles to a few vector instructions.
        for (piece, ghosts) in self.ghosts.chunks(PIECE).enumerate() {
            if ghosts.chunks_exact(2).fold(false, |found, ghost| found | matches_ghost(ghost)) {
                let within = ghosts.chunks_exact(2).position(matches_ghost)?;
                return Some(piece * PIECE / 2 + within);
            }
        }
        None
    }

    /// Returns the number of uses in a ghost.
    pub(crate) fn ghost_uses(&self, index: usize) -> u8 {
        self.ghost_at(index) as u8 & USES_MAX
    }

    /// Removes the ghost of a line that is in the set now.
    pub(crate) fn remove_ghost(&mut self, index: usize) {
        self.set_ghost(index, 0);
    }

    /// Adds the ghost of a line that is not in the set.
    pub(crate) fn add_ghost(&mut self, hash: u64, uses: u8) {
        let next = self.field(NEXT);
        self.set_ghost(next, ghost(hash, uses));
        self.set_field(NEXT, (next + 1) % self.classes.len());
    }
}

/// Encodes a ghost; never 0.
fn ghost(hash: u64, uses: u8) -> u16 {
    let bits = (hash >> 48) as u16 & !u16::from(USES_MAX);
    bits.max(u16::from(USES_MAX) + 1) | u16::from(uses.min(USES_MAX))
}
