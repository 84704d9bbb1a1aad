//! What is known about a line: the kinds of lines between which reuse is told apart.
//!
//! A class is how the line was asked for last (read or write, by a short, medium or long request), and how often it was
//! used before, as far as that is remembered. Both say much about when a line is wanted again: what is written is often
//! written again, pieces of long reads seldom are, and what was used often will be.

use crate::policy::{Access, Context};

/// Uses before the last one are told apart up to this; see [`count`].
pub(crate) const USES_MAX: u8 = 7;

/// Requests of fewer bytes are short, of fewer than the second medium.
const SHORT: u64 = 16 << 10;
const MEDIUM: u64 = 64 << 10;

/// Numbers of classes are below this. 0 is that of none.
pub(crate) const COUNT: usize = 64;

/// The highest number of a class.
pub(crate) const LAST: u8 = 48;

/// A class: 1 to [`LAST`]. Its number less one has the uses before in its lowest three bits, above them how it was asked
/// for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Class(u8);

impl Class {
    /// The class of a line that is asked for thus after so many uses.
    pub(crate) fn new(context: &Context, uses: u8) -> Self {
        let length = match context.request_bytes {
            bytes if bytes < SHORT => 0,
            bytes if bytes < MEDIUM => 1,
            _ => 2,
        };
        let write = u8::from(context.access == Access::Write);
        Self(1 + (length * 2 + write) * (USES_MAX + 1) + uses.min(USES_MAX))
    }

    /// From the byte that [`Self::number`] gave, or any other.
    pub(crate) fn from_number(number: u8) -> Self {
        Self(number.clamp(1, LAST))
    }

    /// 1 to [`LAST`].
    pub(crate) fn number(self) -> u8 {
        self.0
    }

    /// Uses before the last one, up to [`USES_MAX`].
    pub(crate) fn uses(self) -> u8 {
        (self.0 - 1) % (USES_MAX + 1)
    }
}

/// One use more. From the third on, not each is counted: so few numbers tell how often up to some hundred times (Morris,
/// "Counting Large Numbers of Events in Small Registers", Communications of the ACM 21, 1978).
pub(crate) fn count(uses: u8, random: u64) -> u8 {
    let rare = uses.saturating_sub(1);
    if random & ((1 << rare) - 1) == 0 {
        (uses + 1).min(USES_MAX)
    } else {
        uses
    }
}
