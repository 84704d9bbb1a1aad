//! Page of a set: the metadata of all its lines, as of a position in the journal.
//!
//! A set has two pages, which are written in turn, so that the older one is intact while the newer one is written.
//! Each sector has its own checksum: an interrupted write leaves intact sectors that do not match each other, and
//! only damage leaves broken ones.
//!
//! Both pages may have the same position in the journal, since a journal sector is written again with more records.
//! Their turns tell which one is newer.
//!
//! ```text
//! byte 0   CRC32C of the cache's identity and the rest of the sector, u32
//!      4   the set, u32
//!      8   sequence, u64: journal records with a lower one are included
//!      16  the sector's number in the page, u16
//!      18  zero, 2 bytes
//!      20  turn, u8: 0 to 3, one more than that of the page before, or 0 after 3
//!      21  zero, 3 bytes
//!      24  entries in the order of the ways, as many as fit
//! ```

use crate::entry::{self, Entry};
use crate::journal::Record;
use crate::layout::{CacheLayout, SECTOR, WAYS_MAX};

const SECTOR_LEN: usize = SECTOR as usize;
const HEADER_LEN: usize = 24;

/// Number of different turns.
pub(crate) const TURNS: u8 = 4;

/// Returns the turn of the next page.
fn next_turn(turn: u8) -> u8 {
    (turn + 1) % TURNS
}

/// Version of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Version {
    /// Journal records below this sequence are included.
    pub(crate) sequence: u64,
    pub(crate) turn: u8,
}

impl Version {
    /// Returns whether a set's page of this version is newer than its other page.
    fn is_newer_than(self, other: Self) -> bool {
        self.sequence > other.sequence || (self.sequence == other.sequence && self.turn == next_turn(other.turn))
    }
}

/// Position and turn of the newer one of a set's two pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NewestPage {
    /// Set if the newer page is the second of the two.
    pub(crate) is_second: bool,
    pub(crate) turn: u8,
}

impl NewestPage {
    /// Returns the page that is written next.
    pub(crate) fn next(self) -> Self {
        Self { is_second: !self.is_second, turn: next_turn(self.turn) }
    }
}

/// Result of reading a page.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum PageState {
    /// The page was never written.
    Unwritten,
    /// Writing the page was interrupted.
    Torn,
    /// A sector of the page is corrupt.
    Damaged,
    /// The page is intact.
    Intact { version: Version, entries: Vec<Entry> },
}

fn per_sector(line_bits: u32) -> usize {
    (SECTOR_LEN - HEADER_LEN) / entry::len_for(line_bits)
}

/// Returns the bytes of a page with room for [`WAYS_MAX`] entries.
pub(crate) fn len_for(line_bits: u32) -> u64 {
    (WAYS_MAX as usize).div_ceil(per_sector(line_bits)) as u64 * SECTOR
}

/// Encodes a page into `bytes`, which are as long as the shape says.
pub(crate) fn encode(layout: &CacheLayout, seed: u32, set: u32, version: Version, entries: &[Entry], bytes: &mut [u8]) {
    bytes.fill(0);
    let len = entry::len_for(layout.line_bits);
    let mut rest = entries.chunks(per_sector(layout.line_bits));
    for (index, sector) in bytes.chunks_exact_mut(SECTOR_LEN).enumerate() {
        sector[4..8].copy_from_slice(&set.to_le_bytes());
        sector[8..16].copy_from_slice(&version.sequence.to_le_bytes());
        sector[16..18].copy_from_slice(&(index as u16).to_le_bytes());
        sector[20] = version.turn;
        let cells = sector[HEADER_LEN..].chunks_exact_mut(len);
        for (cell, entry) in cells.zip(rest.next().unwrap_or_default()) {
            entry.encode(layout, cell);
        }
        let sum = crc32c::crc32c_append(seed, &sector[4..]);
        sector[..4].copy_from_slice(&sum.to_le_bytes());
    }
}

/// Decodes a page.
pub(crate) fn decode(layout: &CacheLayout, seed: u32, set: u32, bytes: &[u8]) -> PageState {
    let (mut versions, mut entries, mut unwritten) = (Vec::new(), Vec::new(), 0);
    let sectors = bytes.chunks_exact(SECTOR_LEN);
    let count = sectors.len();
    for (index, sector) in sectors.enumerate() {
        if sector.iter().all(|byte| *byte == 0) {
            unwritten += 1;
            continue;
        }
        let word = |at: usize| u32::from_le_bytes([sector[at], sector[at + 1], sector[at + 2], sector[at + 3]]);
        let is_intact =
            word(0) == crc32c::crc32c_append(seed, &sector[4..]) && word(4) == set && word(16) as usize == index;
        if !is_intact {
            return PageState::Damaged;
        }
        versions.push(Version { sequence: u64::from(word(8)) | u64::from(word(12)) << 32, turn: sector[20] % TURNS });
        let cells = sector[HEADER_LEN..].chunks_exact(entry::len_for(layout.line_bits));
        for cell in cells.take(per_sector(layout.line_bits)) {
            let Some(entry) = Entry::decode(layout, cell) else {
                return PageState::Damaged;
            };
            entries.push(entry);
        }
    }
    match versions[..] {
        [] => PageState::Unwritten,
        _ if unwritten > 0 => PageState::Torn,
        [version, ..] if versions.len() == count && versions.iter().all(|other| *other == version) => {
            entries.resize(layout.ways as usize, Entry::default());
            PageState::Intact { version, entries }
        }
        _ => PageState::Torn,
    }
}

/// Trusted content of a set's two pages.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TrustedPage {
    /// Journal records below this sequence are included.
    sequence: u64,
    entries: Vec<Entry>,
    /// Position and turn of the trusted page.
    pub(crate) newest: NewestPage,
    /// Set if the other page is damaged.
    pub(crate) has_damage: bool,
}

impl TrustedPage {
    /// Returns the entries of the set's slots after `records`, the set's records in the journal.
    pub(crate) fn apply_records(
        self,
        records: impl Iterator<Item = (u64, Record)>,
        layout: &CacheLayout,
    ) -> Vec<Entry> {
        let mut entries = self.entries;
        for (sequence, Record { slot, entry, .. }) in records {
            if sequence >= self.sequence && slot.way() < layout.ways {
                entries[slot.way() as usize] = entry;
            }
        }
        entries
    }
}

/// Returns the trusted one of a set's two pages; `tail` is the oldest sector of the journal that is needed. Returns
/// `None` if records may be missing.
pub(crate) fn trusted_page(layout: &CacheLayout, seed: u32, set: u32, pair: &[u8], tail: u64) -> Option<TrustedPage> {
    let (first, second) = pair.split_at(layout.page_len as usize);
    let (first, second) = (decode(layout, seed, set, first), decode(layout, seed, set, second));
    let has_damage = first == PageState::Damaged || second == PageState::Damaged;
    // The other page is older, or was interrupted. If it is damaged, it may have been newer, unless the journal has
    // all records since.
    let suffices = |version: Version, other: &PageState| *other != PageState::Damaged || version.sequence >= tail;
    let empty_page = || (Version::default(), vec![Entry::default(); layout.ways as usize]);
    let ((version, entries), is_second) = match (first, second) {
        (PageState::Intact { version: other, .. }, PageState::Intact { version, entries })
            if version.is_newer_than(other) =>
        {
            ((version, entries), true)
        }
        (PageState::Intact { version, entries }, other) if suffices(version, &other) => ((version, entries), false),
        (other, PageState::Intact { version, entries }) if suffices(version, &other) => ((version, entries), true),
        // The first page ever was being written, and is written again: the two are never both torn.
        (PageState::Unwritten | PageState::Torn, PageState::Unwritten) => (empty_page(), true),
        (PageState::Unwritten, PageState::Torn) => (empty_page(), false),
        _ => return None,
    };
    let Version { sequence, turn } = version;
    Some(TrustedPage { sequence, entries, newest: NewestPage { is_second, turn }, has_damage })
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_block::ByteLen;

    const SEED: u32 = 3;

    fn page(shape: &CacheLayout, sequence: u64) -> (Vec<Entry>, Vec<u8>) {
        let entries: Vec<Entry> =
            (0..shape.ways).map(|way| Entry { tag: way + sequence as u32, valid: 1, ..Entry::default() }).collect();
        let mut bytes = vec![0; shape.page_len as usize];
        let turn = (sequence % 4) as u8;
        encode(shape, SEED, 5, Version { sequence, turn }, &entries, &mut bytes);
        (entries, bytes)
    }

    /// Reading distinguishes intact, interrupted, damaged and unwritten pages, for all line lengths.
    #[test]
    fn decode_distinguishes_whole_torn_damaged_pages() {
        for line_bits in 12..=16 {
            let shape = CacheLayout::for_size(ByteLen::mib(64), line_bits, 512).expect("large enough");
            let (entries, old) = page(&shape, 7);
            let version = Version { sequence: 7, turn: 3 };
            let intact = PageState::Intact { version, entries };
            assert_eq!(decode(&shape, SEED, 5, &old), intact);
            assert_eq!(decode(&shape, SEED, 4, &old), PageState::Damaged, "another set's");
            assert_eq!(decode(&shape, SEED, 5, &vec![0; old.len()]), PageState::Unwritten);
            let (_, new) = page(&shape, 9);
            for cut in (SECTOR_LEN..old.len()).step_by(SECTOR_LEN) {
                let torn = [&new[..cut], &old[cut..]].concat();
                assert_eq!(decode(&shape, SEED, 5, &torn), PageState::Torn, "{cut}");
                let first = [&new[..cut], &vec![0; old.len() - cut]].concat();
                assert_eq!(decode(&shape, SEED, 5, &first), PageState::Torn, "{cut}");
            }
            for at in 0..old.len() {
                let mut damaged = old.clone();
                damaged[at] ^= 1 << (at % 8);
                assert_eq!(decode(&shape, SEED, 5, &damaged), PageState::Damaged, "byte {at}");
            }
        }
    }

    /// The later of two pages of the same journal sector is used.
    #[test]
    fn later_turn_wins_between_equal_sequences() {
        let shape = CacheLayout::for_size(ByteLen::mib(64), 12, 512).expect("large enough");
        let page = |sequence, turn, valid| {
            let entries = vec![Entry { tag: 1, valid, ..Entry::default() }; shape.ways as usize];
            let mut bytes = vec![0; shape.page_len as usize];
            encode(&shape, SEED, 5, Version { sequence, turn }, &entries, &mut bytes);
            bytes
        };
        let mut newest = NewestPage::default();
        let mut pages = [page(9, 0, 1), vec![0; shape.page_len as usize]];
        for round in 0..12 {
            newest = newest.next();
            let valid = 2 + round;
            let new = page(9 + u64::from(round > 8), newest.turn, valid);
            let old = std::mem::replace(&mut pages[usize::from(newest.is_second)], new.clone());
            let found = trusted_page(&shape, SEED, 5, &pages.concat(), 0).expect("whole");
            assert_eq!((found.newest, found.entries[0].valid), (newest, valid));
            if round > 0 {
                // Its write was interrupted.
                let torn = [&new[..SECTOR_LEN], &old[SECTOR_LEN..]].concat();
                let mut pages = pages.clone();
                pages[usize::from(newest.is_second)] = torn;
                let found = trusted_page(&shape, SEED, 5, &pages.concat(), 0).expect("whole");
                assert_eq!(found.entries[0].valid, valid - 1);
            }
        }
    }
}
