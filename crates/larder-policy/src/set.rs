//! The state of one set: what is known about each line, when it was used last, and what left a short while ago.
//!
//! ```text
//! 0        4       6       8        9       10        24      24+w    24+2w      24+4w
//! | swept  | next  | lines | ranked | count | victims | class | stamp | ghosts   |
//! | u32    | u16   | u16   | u8     | u8    | u8 x14  | u8 xw | u8 xw | u16 xw   |
//! ```
//!
//! `class` is by way, 0 where no line is. `stamp` is the lower byte of the tick at which the line was used last. A byte
//! tells 256 ticks apart, so `swept` has the tick at which stamps were last known to be of the [`STAMP_AGE_MAX`] ticks
//! before; before they can be mistaken, those that are too old are moved on. `ghosts` is a ring of what left or was not
//! let in; `next` is where the next one goes. A ghost is 13 bits of the line's hash, and its uses. `lines` is how many there
//! are. `victims` are `count` of the ways that are worth least, the least last, as of the tick whose lower byte is
//! `ranked`: a look at all ways finds several, so that there need not be one for each.

use crate::age::{AGE_OF, AGES, HORIZON, age};
use crate::class::{self, Class, USES_MAX};
use crate::geometry::WAYS_MAX;
use crate::worth::RANK_NONE;

const HEADER: usize = 24;

/// Where the fields of the header are.
const NEXT: usize = 4;
const LINES: usize = 6;
const RANKED: usize = 8;
const COUNT: usize = 9;
const VICTIMS: usize = 10;

const VICTIMS_MAX: usize = HEADER - VICTIMS;

/// Victims are looked for in so many parts of a set, one in each.
const PARTS: usize = 32;

/// The age, in ticks, that a stamp has at most after a sweep, and how long until the next one.
const STAMP_AGE_MAX: u32 = HORIZON;
const SWEEP_TICKS: u32 = 32;

/// Bytes of the state of a set.
pub(crate) const fn bytes(ways: usize) -> usize {
    HEADER + 4 * ways
}

/// Where in the state of a set the bytes are that a hit of `way` changes.
pub(crate) fn touched(ways: usize, way: u8) -> [usize; 3] {
    let class = HEADER + usize::from(way);
    [0, class, class + ways]
}

/// A set, over the bytes of its state.
pub(crate) struct Set<'a> {
    header: &'a mut [u8],
    classes: &'a mut [u8],
    stamps: &'a mut [u8],
    ghosts: &'a mut [u8],
    tick: u32,
}

impl<'a> Set<'a> {
    /// The set as of `tick`, which never decreases.
    pub(crate) fn new(state: &'a mut [u8], ways: usize, tick: u32) -> Self {
        assert_eq!(
            state.len(),
            bytes(ways),
            "the state of a set has the length that the policy asked for"
        );
        let (header, rest) = state.split_at_mut(HEADER);
        let (classes, rest) = rest.split_at_mut(ways);
        let (stamps, ghosts) = rest.split_at_mut(ways);
        let mut set = Self {
            header,
            classes,
            stamps,
            ghosts,
            tick,
        };
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

    /// The class of the line in `way`, if there is one.
    pub(crate) fn class(&self, way: u8) -> Option<Class> {
        Some(self.classes[usize::from(way)])
            .filter(|class| *class != 0)
            .map(Class::from_number)
    }

    /// The class of the line in `way`, and its age, if there is one.
    pub(crate) fn line(&self, way: u8) -> Option<(Class, usize)> {
        Some((self.class(way)?, self.age_of(self.stamps[usize::from(way)])))
    }

    /// The line in `way` is of this class, and was used `ticks` ago.
    pub(crate) fn put(&mut self, way: u8, class: Class, ticks: u32) {
        let here = &mut self.classes[usize::from(way)];
        let new = *here == 0;
        *here = class.number();
        self.stamps[usize::from(way)] = self.tick.wrapping_sub(ticks) as u8;
        if new {
            self.set_field(LINES, self.lines() + 1);
        } else {
            self.spare(way);
        }
    }

    /// `way` has no line.
    pub(crate) fn clear(&mut self, way: u8) {
        let class = std::mem::take(&mut self.classes[usize::from(way)]);
        if class != 0 {
            self.set_field(LINES, self.lines() - 1);
            self.spare(way);
        }
    }

    /// `way` is not one of the next victims.
    fn spare(&mut self, way: u8) {
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

    /// Whether every way has a line, but for some that are kept without one.
    pub(crate) fn is_full(&self, spare_ways: usize) -> bool {
        self.lines() + spare_ways >= self.classes.len()
    }

    /// The way of the line that is worth least, if there is a line, by worths of classes and ages.
    pub(crate) fn least(&mut self, worths: &[u32]) -> Option<u8> {
        if self.header[COUNT] == 0 || self.header[RANKED] != self.tick as u8 {
            self.rank(worths);
        }
        let count = usize::from(self.header[COUNT]);
        (count > 0).then(|| self.header[VICTIMS + count - 1])
    }

    /// The same of the lines that are `allowed`.
    pub(crate) fn least_of(&mut self, worths: &[u32], mut allowed: impl FnMut(u8) -> bool) -> Option<u8> {
        let first = self.least(worths)?;
        if allowed(first) {
            return Some(first);
        }
        let mut least = None;
        let mut least_worth = u32::MAX;
        for way in 0..self.classes.len() {
            let worth = self.worth(worths, way);
            if worth < least_worth && allowed(way as u8) {
                (least, least_worth) = (Some(way as u8), worth);
            }
        }
        least
    }

    fn worth(&self, worths: &[u32], way: usize) -> u32 {
        worths[usize::from(self.classes[way]) % class::COUNT * AGES + self.age_of(self.stamps[way])]
    }

    #[inline(never)]
    fn rank(&mut self, worths: &[u32]) {
        // A worth and its way are one number.
        let mut all = [u32::MAX; WAYS_MAX];
        let now = self.tick as u8;
        for (way, ((number, class), stamp)) in all.iter_mut().zip(&*self.classes).zip(&*self.stamps).enumerate() {
            let age = AGE_OF[usize::from(now.wrapping_sub(*stamp))];
            *number = worths[usize::from(*class) % class::COUNT * AGES + usize::from(age)] << 8 | way as u32;
        }
        // The least of each of a few parts of the set, of which the least is the least of all, and the next ones nearly the
        // next ones.
        let mut least = [u32::MAX; PARTS];
        for part in all.chunks_exact(PARTS) {
            for (least, number) in least.iter_mut().zip(part) {
                *least = (*least).min(*number);
            }
        }
        least.sort_unstable();
        let lines = least.partition_point(|number| *number >> 8 < RANK_NONE);
        let count = VICTIMS_MAX.min(lines);
        for (victim, number) in self.header[VICTIMS..].iter_mut().zip(least[..count].iter().rev()) {
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

    /// Where the ghost of a line is.
    pub(crate) fn find_ghost(&self, hash: u64) -> Option<usize> {
        const PIECE: usize = 64;
        let wanted = ghost(hash, 0);
        let is = |bytes: &[u8]| u16::from_le_bytes([bytes[0], bytes[1]]) & !u16::from(USES_MAX) == wanted;
        // A piece is compared without a branch, which the compiler makes a few instructions.
        for (piece, ghosts) in self.ghosts.chunks(PIECE).enumerate() {
            if ghosts.chunks_exact(2).fold(false, |found, ghost| found | is(ghost)) {
                let within = ghosts.chunks_exact(2).position(is)?;
                return Some(piece * PIECE / 2 + within);
            }
        }
        None
    }

    /// How often the line was used whose ghost is there.
    pub(crate) fn ghost_uses(&self, index: usize) -> u8 {
        self.ghost_at(index) as u8 & USES_MAX
    }

    /// The ghost there is of a line that is here now.
    pub(crate) fn forget(&mut self, index: usize) {
        self.set_ghost(index, 0);
    }

    /// A line that is not here, and no ghost, is remembered.
    pub(crate) fn remember(&mut self, hash: u64, uses: u8) {
        let next = self.field(NEXT);
        self.set_ghost(next, ghost(hash, uses));
        self.set_field(NEXT, (next + 1) % self.classes.len());
    }
}

/// What a ghost is; never 0.
fn ghost(hash: u64, uses: u8) -> u16 {
    let bits = (hash >> 48) as u16 & !u16::from(USES_MAX);
    bits.max(u16::from(USES_MAX) + 1) | u16::from(uses.min(USES_MAX))
}
