//! The content of a page, which is derived from the number of the write that made it. So a page identifies its last
//! write.

use larder_memory::units::PAGE;

/// Words of a page.
pub(super) const WORDS: usize = PAGE / 8;

/// Content of a page.
pub(super) type PageWords = [u64; WORDS];

/// Identifier of a write, from its number and kind; 0: zeros.
pub(super) type Stamp = u64;

/// Compressibility of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Kind {
    /// Incompressible.
    Random,
    /// Compresses to a fraction.
    Structured,
    /// One repeated word.
    Uniform,
}

const KINDS: [Kind; 3] = [Kind::Random, Kind::Structured, Kind::Uniform];

/// Returns the stamp of write number `number`, whose content is of this kind.
pub(super) fn stamp(number: u64, kind: Kind) -> Stamp {
    number * 4 + 1 + kind as u64
}

fn mixed(stamp: Stamp, index: usize) -> u64 {
    let mixed = (stamp << 10 | index as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ mixed >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ mixed >> 32
}

fn word(stamp: Stamp, index: usize) -> u64 {
    if stamp == 0 {
        return 0;
    }
    match KINDS[((stamp - 1) % 4) as usize] {
        Kind::Random => mixed(stamp, index),
        Kind::Structured if index.is_multiple_of(8) => mixed(stamp, index),
        Kind::Structured | Kind::Uniform => stamp,
    }
}

/// Returns the content that the write with this stamp writes.
pub(super) fn words(stamp: Stamp) -> PageWords {
    std::array::from_fn(|index| word(stamp, index))
}

/// Returns whether a page holds the content of that write.
pub(super) fn is(words: &PageWords, stamp: Stamp) -> bool {
    words.iter().enumerate().all(|(index, found)| *found == word(stamp, index))
}
