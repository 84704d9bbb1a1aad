//! Classes of lines, for each of which reuse is learnt separately.
//!
//! A class combines the kind of the last access (read or write, by a short, medium or long request) with the number
//! of earlier uses, as far as that is known. Both predict the next use: written lines are often written again, pieces
//! of long reads are seldom read again, and lines that were used often are used again.

use crate::policy::{AccessContext, AccessKind};

/// The highest number of uses before the last one that a class distinguishes; see [`count_use`].
pub(crate) const USES_MAX: u8 = 7;

/// Requests of fewer bytes are short; requests of fewer than [`MEDIUM_BYTES`] bytes are medium.
const SHORT_BYTES: u64 = 16 << 10;
const MEDIUM_BYTES: u64 = 64 << 10;

/// Exclusive bound of class numbers. Number 0 means no class.
pub(crate) const COUNT: usize = 64;

/// The highest number of a class.
pub(crate) const LAST: u8 = 48;

/// Class number, 1 to [`LAST`]. The number minus one has the earlier uses in its lowest three bits, and the kind of
/// access above them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Class(u8);

impl Class {
    /// Returns the class of a line that is accessed in `context` after `uses` earlier uses.
    pub(crate) fn new(context: &AccessContext, uses: u8) -> Self {
        let length = match context.request_bytes {
            bytes if bytes < SHORT_BYTES => 0,
            bytes if bytes < MEDIUM_BYTES => 1,
            _ => 2,
        };
        let write = u8::from(context.access == AccessKind::Write);
        Self(1 + (length * 2 + write) * (USES_MAX + 1) + uses.min(USES_MAX))
    }

    /// Returns the class of a number from [`Self::number`]; any other byte is clamped.
    pub(crate) fn from_number(number: u8) -> Self {
        Self(number.clamp(1, LAST))
    }

    /// Returns the number, 1 to [`LAST`].
    pub(crate) fn number(self) -> u8 {
        self.0
    }

    /// Returns the uses before the last one, up to [`USES_MAX`].
    pub(crate) fn uses(self) -> u8 {
        (self.0 - 1) % (USES_MAX + 1)
    }
}

/// Counts one more use. From the third use on, the counter increases with falling probability, so that it can
/// represent some hundred uses (Morris, "Counting Large Numbers of Events in Small Registers", Communications of the
/// ACM 21, 1978).
pub(crate) fn count_use(uses: u8, random: u64) -> u8 {
    let rare = uses.saturating_sub(1);
    if random & ((1 << rare) - 1) == 0 { (uses + 1).min(USES_MAX) } else { uses }
}
