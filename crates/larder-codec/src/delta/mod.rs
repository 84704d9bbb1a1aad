//! A page told by an older version of it: which 64-bit words have changed, and by how much.
//!
//! ```text
//! byte 0      bits 0-3: how the words have changed: 0 none has
//!                                                   1 all that have, by the one difference that follows, 8 bytes
//!                                                   2, 3, 4, 5 by differences of 1, 2, 4 or 8 bytes, one for each
//!             bit 4: only some have, and a map follows; else all 512 have
//! the map     8 bytes, bit b of byte a: the map's byte 8a + b is there; then those bytes, none of them 0,
//!             bit b of byte a of 64: word 8a + b has changed
//! the differences, of words in their order: new - old modulo 2^64, signed, little-endian, as the words are
//! ```
//!
//! A counter, an index or a pointer that moves differs by a small number, and a table that is rewritten often differs
//! everywhere by the same one: 9 bytes for the page. 16 words changed anywhere take at most 153 bytes, and 33 if they were
//! counted up by less than 128.
//!
//! Invariants: what [`encode`] makes, [`apply`] turns the same older version into the newer one, in every later version of
//! this format. No bytes make [`apply`] panic, and after an error the page is as it was. What is not here: whether the
//! older version is the same on both sides. Who applies must know.

mod map;

use thiserror::Error;

use crate::PAGE;
use map::{Changed, WORDS};

/// Bytes of a word.
const WORD: usize = PAGE / WORDS;

/// In the lower half of the first byte.
const UNCHANGED: u8 = 0;
const ONE_DIFFERENCE: u8 = 1;
/// Bytes of a difference, from number 2 on.
const WIDTHS: [usize; 4] = [1, 2, 4, 8];
/// In the first byte.
const MAPPED: u8 = 1 << 4;

/// Bytes of the longest delta, of a page with every word changed. With a word less it is as long; no shorter `out` is
/// sure to do.
pub const DELTA_BYTES_MAX: usize = 1 + 8 + WORDS / 8 + PAGE - WORD;

/// Why bytes are no delta of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ApplyError {
    /// They end too early.
    #[error("a page's delta needs {needed} bytes, of which there are {len}")]
    Short {
        /// Bytes that it takes, as far as those that are there tell.
        needed: usize,
        /// Bytes that are there.
        len: usize,
    },
    /// The first byte has no meaning in this version.
    #[error("a page's delta begins with {0:#04x}, which has no meaning")]
    Unknown(u8),
    /// A byte of the map that is said to be there is 0.
    #[error("byte {0} of a page's map of changes is there and 0")]
    Map(usize),
}

/// How many of the page's 512 words are not as they were; some 100 ns.
#[must_use]
pub fn changed_words(new: &[u8; PAGE], old: &[u8; PAGE]) -> u32 {
    Changed::between(new, old).count()
}

/// Tells `new` by `old` in the front of `out`, and returns the bytes it takes there, at least 1; `None` if they do not
/// fit, and `out` is then of no meaning. A page that is nearly all new costs some 100 ns until this is seen.
#[must_use]
pub fn encode(new: &[u8; PAGE], old: &[u8; PAGE], out: &mut [u8]) -> Option<usize> {
    let changed = Changed::between(new, old);
    let count = changed.count() as usize;
    if count == 0 {
        *out.first_mut()? = UNCHANGED;
        return Some(1);
    }
    let mapped = count < WORDS;
    let before = 1 + if mapped { changed.map_bytes() } else { 0 };
    let room = out.len().checked_sub(before)?;
    let how = how(&changed, new, old, room)?;

    out[0] = how | if mapped { MAPPED } else { 0 };
    if mapped {
        changed.write_map(&mut out[1..before]);
    }
    let end = before + difference_bytes(how, count);
    let differences = &mut out[before..end];
    match how {
        ONE_DIFFERENCE => {
            let word = changed.words().next().expect("a word has changed");
            differences.copy_from_slice(&difference(new, old, word).to_le_bytes());
        }
        2 => write::<1>(&changed, new, old, differences),
        3 => write::<2>(&changed, new, old, differences),
        4 => write::<4>(&changed, new, old, differences),
        _ => write::<8>(&changed, new, old, differences),
    }
    Some(end)
}

/// Turns the older version in `page` into the newer one, by the delta that `data` begins with, and returns the bytes it
/// takes there.
///
/// # Errors
/// `data` begins with no delta; `page` is as it was.
pub fn apply(page: &mut [u8; PAGE], data: &[u8]) -> Result<usize, ApplyError> {
    let len = data.len();
    let (&first, rest) = data.split_first().ok_or(ApplyError::Short { needed: 1, len })?;
    let how = first & !MAPPED;
    match first {
        UNCHANGED => return Ok(1),
        _ if how == UNCHANGED || usize::from(how) > 1 + WIDTHS.len() => return Err(ApplyError::Unknown(first)),
        _ => {}
    }
    let (changed, map_bytes) = if first & MAPPED == 0 {
        (Changed::ALL, 0)
    } else {
        Changed::read_map(rest)?
    };
    let from = 1 + map_bytes;
    let to = from + difference_bytes(how, changed.count() as usize);
    let differences = data.get(from..to).ok_or(ApplyError::Short { needed: to, len })?;
    match how {
        ONE_DIFFERENCE => {
            let difference = u64::from_le_bytes(differences.try_into().expect("as long as one difference"));
            for word in changed.words() {
                add(page, word, difference);
            }
        }
        2 => read::<1>(&changed, page, differences),
        3 => read::<2>(&changed, page, differences),
        4 => read::<4>(&changed, page, differences),
        _ => read::<8>(&changed, page, differences),
    }
    Ok(to)
}

/// The shortest way to tell the differences; `None` if it takes more than `room`.
fn how(changed: &Changed, new: &[u8; PAGE], old: &[u8; PAGE], room: usize) -> Option<u8> {
    let count = changed.count() as usize;
    let mut first = None;
    let mut all_same = true;
    // Its leading zeros are those that every difference has, or ones if it is negative.
    let mut magnitudes = 0;
    for group in changed.groups() {
        for word in group {
            let difference = difference(new, old, word);
            all_same &= *first.get_or_insert(difference) == difference;
            magnitudes |= difference ^ ((difference as i64 >> 63) as u64);
        }
        // A new page is not looked at to its end.
        if !all_same && difference_bytes(number_of(magnitudes), count) > room {
            return None;
        }
    }
    let number = number_of(magnitudes);
    // Of equals the one with the widths, such as of one byte changed.
    let how = if all_same && difference_bytes(number, count) > WORD {
        ONE_DIFFERENCE
    } else {
        number
    };
    (difference_bytes(how, count) <= room).then_some(how)
}

/// The number of the least width that holds differences of these bits and a sign.
fn number_of(magnitudes: u64) -> u8 {
    let bits = u64::BITS - magnitudes.leading_zeros() + 1;
    match bits {
        0..=8 => 2,
        9..=16 => 3,
        17..=32 => 4,
        _ => 5,
    }
}

/// Bytes that `count` differences take, told in way number `how`, from 1 on.
fn difference_bytes(how: u8, count: usize) -> usize {
    match how {
        ONE_DIFFERENCE => WORD,
        _ => WIDTHS[usize::from(how) - 2] * count,
    }
}

fn word_of(page: &[u8; PAGE], word: usize) -> u64 {
    u64::from_le_bytes(page.as_chunks::<WORD>().0[word])
}

fn difference(new: &[u8; PAGE], old: &[u8; PAGE], word: usize) -> u64 {
    word_of(new, word).wrapping_sub(word_of(old, word))
}

fn add(page: &mut [u8; PAGE], word: usize, difference: u64) {
    let place = &mut page.as_chunks_mut::<WORD>().0[word];
    *place = u64::from_le_bytes(*place).wrapping_add(difference).to_le_bytes();
}

fn write<const WIDTH: usize>(changed: &Changed, new: &[u8; PAGE], old: &[u8; PAGE], to: &mut [u8]) {
    for (word, place) in changed.words().zip(to.as_chunks_mut::<WIDTH>().0) {
        *place = *difference(new, old, word)
            .to_le_bytes()
            .first_chunk()
            .expect("no wider than a word");
    }
}

fn read<const WIDTH: usize>(changed: &Changed, page: &mut [u8; PAGE], from: &[u8]) {
    let unused_bits = u64::BITS - 8 * WIDTH as u32;
    for (word, bytes) in changed.words().zip(from.as_chunks::<WIDTH>().0) {
        let mut wide = [0; WORD];
        wide[..WIDTH].copy_from_slice(bytes);
        // To the top and back down, which repeats the sign.
        let signed = (u64::from_le_bytes(wide) << unused_bits) as i64 >> unused_bits;
        add(page, word, signed as u64);
    }
}
