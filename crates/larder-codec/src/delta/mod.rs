//! Delta of a page against an older version: the set of changed 64-bit words, and their differences.
//!
//! ```text
//! byte 0      bits 0-3: encoding of the changes: 0 no word has changed
//!                                                1 one difference follows, 8 bytes, for all changed words
//!                                                2, 3, 4, 5 one difference of 1, 2, 4 or 8 bytes for each changed word
//!             bit 4: only some words have changed, and a map follows; else all 512 have
//! the map     8 bytes, bit b of byte a: the map's byte 8a + b is present; then those bytes, none of them 0,
//!             bit b of byte a of 64: word 8a + b has changed
//! the differences, in the order of the words: new - old modulo 2^64, signed, little-endian, as the words are
//! ```
//!
//! A counter, an index or a pointer that moves differs by a small number, and a table that is rewritten often differs
//! everywhere by the same one: 9 bytes for the page. 16 changed words anywhere take at most 153 bytes, and 33 if they
//! were incremented by less than 128.
//!
//! Invariants: [`apply`] turns the same older version into the newer one with a delta from [`encode`], in every later
//! version of this format. No input makes [`apply`] panic, and after an error the page is unchanged. It is not
//! checked that the older version is the same on both sides; the caller of [`apply`] must know that.

mod map;

use thiserror::Error;

use crate::PAGE;
use map::{ChangeMap, WORDS};

/// Size of a word, in bytes.
const WORD_BYTES: usize = PAGE / WORDS;

/// Encoding number in the lower half of the first byte: no change.
const UNCHANGED: u8 = 0;
const ONE_DIFFERENCE: u8 = 1;
/// Bytes of a difference, for encodings from number 2 on.
const WIDTHS: [usize; 4] = [1, 2, 4, 8];
/// Flag in the first byte: a map follows.
const MAPPED: u8 = 1 << 4;

/// Length of the longest delta in bytes, that of a page with every word changed. With one word less it is equally
/// long. Only an `out` of this length is sufficient for every delta.
pub const DELTA_BYTES_MAX: usize = 1 + 8 + WORDS / 8 + PAGE - WORD_BYTES;

/// Reason why bytes are not a delta of a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum ApplyError {
    /// The bytes end too early.
    #[error("a page delta needs {needed} bytes but has only {len}")]
    Short {
        /// Length of the delta, as far as the present bytes determine it.
        needed: usize,
        /// Number of present bytes.
        len: usize,
    },
    /// The first byte has no meaning in this version.
    #[error("a page delta begins with {0:#04x}, which is undefined")]
    Unknown(u8),
    /// A byte of the map that is marked as present is 0.
    #[error("byte {0} of a page's change map is marked as present but is 0")]
    Map(usize),
}

/// Returns how many of the page's 512 words have changed; takes about 100 ns.
#[must_use]
pub fn changed_words(new: &[u8; PAGE], old: &[u8; PAGE]) -> u32 {
    ChangeMap::between(new, old).count()
}

/// Encodes `new` as a delta against `old` into the front of `out`, and returns its length, at least 1. Returns `None`
/// if it does not fit; `out` then has no meaningful contents. A page that is nearly all new costs about 100 ns until
/// this is detected.
#[must_use]
pub fn encode(new: &[u8; PAGE], old: &[u8; PAGE], out: &mut [u8]) -> Option<usize> {
    let changed = ChangeMap::between(new, old);
    let count = changed.count() as usize;
    if count == 0 {
        *out.first_mut()? = UNCHANGED;
        return Some(1);
    }
    let mapped = count < WORDS;
    let head_bytes = 1 + if mapped { changed.map_bytes() } else { 0 };
    let room = out.len().checked_sub(head_bytes)?;
    let encoding = choose_encoding(&changed, new, old, room)?;

    out[0] = encoding | if mapped { MAPPED } else { 0 };
    if mapped {
        changed.write_map(&mut out[1..head_bytes]);
    }
    let end = head_bytes + difference_bytes(encoding, count);
    let differences = &mut out[head_bytes..end];
    match encoding {
        ONE_DIFFERENCE => {
            let word = changed.words().next().expect("at least one word has changed");
            differences.copy_from_slice(&difference(new, old, word).to_le_bytes());
        }
        2 => write::<1>(&changed, new, old, differences),
        3 => write::<2>(&changed, new, old, differences),
        4 => write::<4>(&changed, new, old, differences),
        _ => write::<8>(&changed, new, old, differences),
    }
    Some(end)
}

/// Turns the older version in `page` into the newer one, with the delta at the start of `data`, and returns the
/// length of the delta.
///
/// # Errors
/// `data` does not begin with a delta; `page` is unchanged.
pub fn apply(page: &mut [u8; PAGE], data: &[u8]) -> Result<usize, ApplyError> {
    let len = data.len();
    let (&first, rest) = data.split_first().ok_or(ApplyError::Short { needed: 1, len })?;
    let encoding = first & !MAPPED;
    match first {
        UNCHANGED => return Ok(1),
        _ if encoding == UNCHANGED || usize::from(encoding) > 1 + WIDTHS.len() => {
            return Err(ApplyError::Unknown(first));
        }
        _ => {}
    }
    let (changed, map_bytes) = if first & MAPPED == 0 { (ChangeMap::ALL, 0) } else { ChangeMap::read_map(rest)? };
    let from = 1 + map_bytes;
    let to = from + difference_bytes(encoding, changed.count() as usize);
    let differences = data.get(from..to).ok_or(ApplyError::Short { needed: to, len })?;
    match encoding {
        ONE_DIFFERENCE => {
            let difference = u64::from_le_bytes(differences.try_into().expect("the length of one difference"));
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

/// Returns the number of the shortest encoding; `None` if it takes more than `room`.
fn choose_encoding(changed: &ChangeMap, new: &[u8; PAGE], old: &[u8; PAGE], room: usize) -> Option<u8> {
    let count = changed.count() as usize;
    let mut first = None;
    let mut all_same = true;
    // The leading zeros are common to all differences, or ones if a difference is negative.
    let mut magnitudes = 0;
    for group in changed.groups() {
        for word in group {
            let difference = difference(new, old, word);
            all_same &= *first.get_or_insert(difference) == difference;
            magnitudes |= difference ^ ((difference as i64 >> 63) as u64);
        }
        // The scan of a page that is nearly all new ends early.
        if !all_same && difference_bytes(width_encoding(magnitudes), count) > room {
            return None;
        }
    }
    let number = width_encoding(magnitudes);
    // If both encodings are equally short, such as for one changed byte, the one with a width per word is used.
    let encoding = if all_same && difference_bytes(number, count) > WORD_BYTES { ONE_DIFFERENCE } else { number };
    (difference_bytes(encoding, count) <= room).then_some(encoding)
}

/// Returns the number of the smallest width that holds differences of these bits and a sign.
fn width_encoding(magnitudes: u64) -> u8 {
    let bits = u64::BITS - magnitudes.leading_zeros() + 1;
    match bits {
        0..=8 => 2,
        9..=16 => 3,
        17..=32 => 4,
        _ => 5,
    }
}

/// Returns the bytes that `count` differences take with encoding `encoding`, from 1 on.
fn difference_bytes(encoding: u8, count: usize) -> usize {
    match encoding {
        ONE_DIFFERENCE => WORD_BYTES,
        _ => WIDTHS[usize::from(encoding) - 2] * count,
    }
}

fn word_of(page: &[u8; PAGE], word: usize) -> u64 {
    u64::from_le_bytes(page.as_chunks::<WORD_BYTES>().0[word])
}

fn difference(new: &[u8; PAGE], old: &[u8; PAGE], word: usize) -> u64 {
    word_of(new, word).wrapping_sub(word_of(old, word))
}

fn add(page: &mut [u8; PAGE], word: usize, difference: u64) {
    let target = &mut page.as_chunks_mut::<WORD_BYTES>().0[word];
    *target = u64::from_le_bytes(*target).wrapping_add(difference).to_le_bytes();
}

fn write<const WIDTH: usize>(changed: &ChangeMap, new: &[u8; PAGE], old: &[u8; PAGE], to: &mut [u8]) {
    for (word, target) in changed.words().zip(to.as_chunks_mut::<WIDTH>().0) {
        *target = *difference(new, old, word).to_le_bytes().first_chunk().expect("at most the width of a word");
    }
}

fn read<const WIDTH: usize>(changed: &ChangeMap, page: &mut [u8; PAGE], from: &[u8]) {
    let unused_bits = u64::BITS - 8 * WIDTH as u32;
    for (word, bytes) in changed.words().zip(from.as_chunks::<WIDTH>().0) {
        let mut wide = [0; WORD_BYTES];
        wide[..WIDTH].copy_from_slice(bytes);
        // Shifting up and back down extends the sign.
        let signed = (u64::from_le_bytes(wide) << unused_bits) as i64 >> unused_bits;
        add(page, word, signed as u64);
    }
}
