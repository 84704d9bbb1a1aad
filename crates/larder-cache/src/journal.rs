//! Encoding and reading of the journal: the changes since the pages were written.
//!
//! The journal is a ring of sectors, numbered from 1 on without end; sector n lies at n modulo the ring's length. A
//! commit is one or more sectors written at once, or the last sector again with more records than before. A sector is
//! written whole or not at all. So a sector with unexpected content was either never written (it is older, or zero)
//! or is damaged, and one that was being rewritten has its old or its new content. A record holds the whole state of
//! a slot from then on.
//!
//! Whole blocks of the device are written. So a write covers the sectors of the block before the commit, unchanged,
//! and after the commit *blanks*. A blank has the sequence of the sector that will be there, states the durable end
//! like any sector, and ends the journal.
//!
//! A record is *firm* or *loose*. A firm record is durable. A loose one was written without a flush, after data that
//! was written without a flush. If the host has not lost power since, both are there. Otherwise only loose records
//! below the *firm end* that a later sector states are trusted. No sector below the firm end can be missing; those
//! from there on can be missing independently of each other.
//!
//! ```text
//! byte 0   CRC32C of the cache's identity and the rest of the sector, u32
//!      4   session, u32: grows with every opening
//!      8   sequence of the sector, u64
//!      16  firm end: sectors with a lower sequence are durable, and so is the data that they refer to, u64
//!      24  sequence of the oldest sector that is still needed, u64
//!      32  records, u16; 0xffff in a blank
//!      34  zero, 6 bytes
//!      40  records: slot, u32 (set times 256, plus way), then an entry, whose flag 2 is set if the record is loose
//! ```

use crate::entry::{self, Entry};
use crate::layout::{COMMIT_SECTORS, COMMIT_UNIT, CacheLayout, SECTOR, Slot};

pub(crate) const SECTOR_LEN: usize = SECTOR as usize;
const HEADER_LEN: usize = 40;
/// Number of records that a blank has instead: the sector is not written yet.
const BLANK: u16 = u16::MAX;

/// State of a slot from this record on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) slot: Slot,
    pub(crate) entry: Entry,
    /// Set if recovery trusts the record only below a firm end, or if the host has not lost power since it was
    /// written.
    pub(crate) unflushed: bool,
}

/// Flag of a loose record's entry.
const FLAG_UNFLUSHED: u8 = 2;

/// Offset of the flags in a record.
const FLAGS_AT: usize = 4 + entry::FLAGS_AT;

/// Returns how many records fit in a sector.
pub(crate) fn records_per_sector(layout: &CacheLayout) -> usize {
    (SECTOR_LEN - HEADER_LEN) / record_len(layout)
}

fn record_len(layout: &CacheLayout) -> usize {
    4 + entry::len_for(layout.line_bits)
}

/// Position of a commit, and the header fields of its sectors.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) session: u32,
    /// Sequence of the first sector.
    pub(crate) sequence: u64,
    /// Sequence of the oldest sector that is still needed.
    pub(crate) tail: u64,
    /// Sectors below this one are durable, and so is the data that they refer to.
    pub(crate) durable_end: u64,
}

/// Encodes a commit into `bytes`, whole sectors. Sectors after the first that the records do not need become blanks.
pub(crate) fn encode(layout: &CacheLayout, seed: u32, position: Position, records: &[Record], bytes: &mut [u8]) {
    bytes.fill(0);
    let mut remaining = records.chunks(records_per_sector(layout));
    for (index, sector) in bytes.chunks_exact_mut(SECTOR_LEN).enumerate() {
        let chunk = remaining.next();
        let count = match chunk {
            None if index > 0 => BLANK,
            found => found.unwrap_or_default().len() as u16,
        };
        sector[4..8].copy_from_slice(&position.session.to_le_bytes());
        sector[8..16].copy_from_slice(&(position.sequence + index as u64).to_le_bytes());
        sector[16..24].copy_from_slice(&position.durable_end.to_le_bytes());
        sector[24..32].copy_from_slice(&position.tail.to_le_bytes());
        sector[32..34].copy_from_slice(&count.to_le_bytes());
        let cells = sector[HEADER_LEN..].chunks_exact_mut(record_len(layout));
        for (cell, record) in cells.zip(chunk.unwrap_or_default()) {
            cell[..4].copy_from_slice(&record.slot.0.to_le_bytes());
            record.entry.encode(layout, &mut cell[4..]);
            cell[FLAGS_AT] |= if record.unflushed { FLAG_UNFLUSHED } else { 0 };
        }
        let sum = crc32c::crc32c_append(seed, &sector[4..]);
        sector[..4].copy_from_slice(&sum.to_le_bytes());
    }
    debug_assert!(remaining.next().is_none(), "the records fit");
}

/// Decodes a record; `None` if it is invalid.
fn decode(layout: &CacheLayout, bytes: &[u8]) -> Option<Record> {
    let slot = Slot(u32::from_le_bytes(bytes[..4].try_into().ok()?));
    let mut entry = [0; entry::LEN_MAX];
    let entry = &mut entry[..bytes.len() - 4];
    entry.copy_from_slice(&bytes[4..]);
    entry[entry::FLAGS_AT] &= !FLAG_UNFLUSHED;
    let record =
        Record { slot, entry: Entry::decode(layout, entry)?, unflushed: bytes[FLAGS_AT] & FLAG_UNFLUSHED != 0 };
    (slot.set() < layout.sets).then_some(record)
}

/// Records of a journal that was read, by set. They stay encoded in the journal's bytes, because there may be
/// millions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Records {
    layout: CacheLayout,
    /// Content of the whole ring.
    bytes: Vec<u8>,
    /// Sequence of the oldest sector that is needed.
    tail: u64,
    /// Set and position of each record (see [`key`]), sorted once all are there.
    keys: Vec<u64>,
}

/// Bits of a key for the record's index in its sector. [`SECTOR_KEY_BITS`] hold the sector's distance from the tail.
const RECORD_BITS: u32 = 6;
const SECTOR_KEY_BITS: u32 = 34;

impl Records {
    /// Returns no records.
    pub(crate) fn empty(layout: &CacheLayout) -> Self {
        Self { layout: *layout, bytes: Vec::new(), tail: 1, keys: Vec::new() }
    }

    /// Returns the bytes of memory that the records take.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.bytes.len() + size_of_val(&self.keys[..])
    }

    /// Returns the sequence of a record's sector, and the record's bytes.
    fn at(&self, key: u64) -> (u64, &[u8]) {
        let sequence = self.tail + ((key >> RECORD_BITS) & ((1 << SECTOR_KEY_BITS) - 1));
        let index = (key & ((1 << RECORD_BITS) - 1)) as usize;
        let sector = (sequence % self.layout.journal_sectors()) as usize * SECTOR_LEN;
        let len = record_len(&self.layout);
        let from = sector + HEADER_LEN + index * len;
        (sequence, &self.bytes[from..from + len])
    }

    /// Returns the records of a set, oldest first, each with the sequence of its sector.
    pub(crate) fn of_set(&self, set: u32) -> impl Iterator<Item = (u64, Record)> {
        let from = self.keys.partition_point(|key| set_of_key(*key) < set);
        let keys = self.keys[from..].iter().take_while(move |key| set_of_key(**key) == set);
        keys.filter_map(|key| {
            let (sequence, encoded) = self.at(*key);
            Some((sequence, decode(&self.layout, encoded)?))
        })
    }

    /// Returns the sets that have records.
    pub(crate) fn sets(&self) -> impl Iterator<Item = u32> {
        let chunks = self.keys.chunk_by(|one, other| set_of_key(*one) == set_of_key(*other));
        chunks.map(|chunk| set_of_key(chunk[0]))
    }
}

/// Returns the key of a record; keys sort by set, then by age. `sector` counts from the tail.
fn key(set: u32, sector: u64, index: usize) -> u64 {
    u64::from(set) << (SECTOR_KEY_BITS + RECORD_BITS) | sector << RECORD_BITS | index as u64
}

fn set_of_key(key: u64) -> u32 {
    (key >> (SECTOR_KEY_BITS + RECORD_BITS)) as u32
}

#[derive(Clone, Copy, Debug)]
struct Header {
    session: u32,
    sequence: u64,
    durable_end: u64,
    tail: u64,
    records: u16,
}

enum SectorState {
    Unwritten,
    Damaged,
    Intact(Header),
}

fn decode_header(layout: &CacheLayout, seed: u32, bytes: &[u8]) -> SectorState {
    if bytes.iter().all(|byte| *byte == 0) {
        return SectorState::Unwritten;
    }
    let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
    let header =
        Header { session: word(4), sequence: long(8), durable_end: long(16), tail: long(24), records: word(32) as u16 };
    let is_valid = word(0) == crc32c::crc32c_append(seed, &bytes[4..])
        && (header.records == BLANK || usize::from(header.records) <= records_per_sector(layout))
        && header.tail <= header.durable_end
        && header.durable_end <= header.sequence
        && header.sequence - header.tail < layout.journal_sectors();
    if is_valid { SectorState::Intact(header) } else { SectorState::Damaged }
}

/// Content of a journal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct JournalRecords {
    /// Last session that wrote to the journal; 0 if none did.
    pub(crate) session: u32,
    /// Sequence of the oldest sector that is needed.
    pub(crate) tail: u64,
    /// Sequence after the last sector.
    pub(crate) end: u64,
    /// Records that are trusted.
    pub(crate) records: Records,
    /// Sectors with records that are not trusted: sequence and new content without them, to be written back.
    pub(crate) untrusted: Vec<(u64, Vec<u8>)>,
    /// Blocks with damaged sectors that are not needed: position in the ring, and new content, to be written back.
    /// Past the end, a damaged sector would later be taken for a missing one.
    pub(crate) repaired: Vec<(u64, Vec<u8>)>,
    /// Sectors before the end in the block that contains it, with their new content.
    pub(crate) block: Vec<u8>,
}

/// Error of a journal of which a part that must have been written is unreadable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct JournalDamaged;

/// State in which a journal was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StopKind {
    /// Left by a clean stop, which has recorded the end.
    Clean { end: u64 },
    /// Left by a process that was killed, while the host kept running.
    Killed,
    /// Left in an unknown way, perhaps by a power loss.
    Unknown,
}

/// Reads a whole journal.
pub(crate) fn read(
    layout: &CacheLayout,
    seed: u32,
    bytes: Vec<u8>,
    stop_kind: StopKind,
) -> Result<JournalRecords, JournalDamaged> {
    let sectors: Vec<SectorState> =
        bytes.chunks_exact(SECTOR_LEN).map(|bytes| decode_header(layout, seed, bytes)).collect();
    let count = sectors.len() as u64;
    let intact = |sector: &SectorState| match sector {
        SectorState::Intact(header) => Some(*header),
        SectorState::Unwritten | SectorState::Damaged => None,
    };
    let newest = sectors.iter().filter_map(intact).max_by_key(|header| (header.session, header.sequence));
    let tail = newest.map_or(1, |header| header.tail);
    let mut records = Records { layout: *layout, bytes, tail, keys: Vec::new() };
    let (mut session, mut end) = (0, tail);
    let mut unflushed: Vec<u64> = Vec::new();
    while end - tail < count {
        match &sectors[(end % count) as usize] {
            SectorState::Intact(header)
                if header.sequence == end && header.session >= session && header.records != BLANK =>
            {
                session = header.session;
                for index in 0..usize::from(header.records) {
                    let (_, encoded) = records.at(key(0, end - tail, index));
                    let record = decode(layout, encoded).ok_or(JournalDamaged)?;
                    records.keys.push(key(record.slot.set(), end - tail, index));
                    if record.unflushed && unflushed.last() != Some(&end) {
                        unflushed.push(end);
                    }
                }
                end += 1;
            }
            // The clean stop had written nothing from here on.
            SectorState::Damaged if stop_kind == (StopKind::Clean { end }) => break,
            SectorState::Damaged => return Err(JournalDamaged),
            SectorState::Unwritten | SectorState::Intact(_) => break,
        }
    }
    // Sectors past the end were cut off by the crash, or were not durable yet.
    let stated = sectors.iter().filter_map(intact).map(|header| header.durable_end);
    let durable_end = stated.max().unwrap_or(end);
    if durable_end > end {
        return Err(JournalDamaged);
    }
    let mut untrusted = Vec::new();
    match stop_kind {
        StopKind::Clean { end: recorded_end } if recorded_end != end => return Err(JournalDamaged),
        StopKind::Clean { .. } | StopKind::Killed => {}
        StopKind::Unknown => {
            for sequence in unflushed.into_iter().filter(|sequence| *sequence >= durable_end) {
                let SectorState::Intact(header) = &sectors[(sequence % count) as usize] else {
                    continue;
                };
                let position =
                    Position { session: header.session, sequence, tail: header.tail, durable_end: header.durable_end };
                let all = (0..usize::from(header.records)).map(|index| records.at(key(0, sequence - tail, index)).1);
                let durable: Vec<Record> =
                    all.filter_map(|encoded| decode(layout, encoded)).filter(|record| !record.unflushed).collect();
                let mut sector = vec![0; SECTOR_LEN];
                encode(layout, seed, position, &durable, &mut sector);
                untrusted.push((sequence, sector));
            }
            let mut keys = std::mem::take(&mut records.keys);
            let is_trusted = |key: &u64| {
                let (sequence, encoded) = records.at(*key);
                encoded[FLAGS_AT] & FLAG_UNFLUSHED == 0 || sequence < durable_end
            };
            keys.retain(is_trusted);
            records.keys = keys;
        }
    }
    records.keys.sort_unstable();
    let repaired = zero_damaged(&sectors, &mut records.bytes);
    let in_block = end % COMMIT_SECTORS;
    let from = ((end - in_block) % count) as usize * SECTOR_LEN;
    let mut block = records.bytes[from..from + in_block as usize * SECTOR_LEN].to_vec();
    for (sequence, sector) in &untrusted {
        if let Some(index) = sequence.checked_sub(end - in_block) {
            let from = index as usize * SECTOR_LEN;
            block[from..from + SECTOR_LEN].copy_from_slice(sector);
        }
    }
    Ok(JournalRecords {
        session: newest.map_or(0, |header| header.session),
        tail,
        end,
        records,
        untrusted,
        repaired,
        block,
    })
}

/// Zeroes damaged sectors, as if they were never written; none of them is needed. Returns the blocks that had some,
/// with their new content.
fn zero_damaged(sectors: &[SectorState], bytes: &mut [u8]) -> Vec<(u64, Vec<u8>)> {
    let per_block = COMMIT_SECTORS as usize;
    let blocks = bytes.chunks_mut(COMMIT_UNIT as usize).zip(sectors.chunks(per_block));
    let repaired = blocks.enumerate().filter_map(|(number, (bytes, sectors))| {
        let mut is_damaged = false;
        for (bytes, sector) in bytes.chunks_exact_mut(SECTOR_LEN).zip(sectors) {
            if matches!(sector, SectorState::Damaged) {
                bytes.fill(0);
                is_damaged = true;
            }
        }
        is_damaged.then(|| ((number * per_block) as u64, bytes.to_vec()))
    });
    repaired.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_block::ByteLen;
    use proptest::prelude::*;

    const SEED: u32 = 77;

    fn shape() -> CacheLayout {
        let shape = CacheLayout::for_size(ByteLen::mib(4), 12, 512).expect("large enough");
        CacheLayout { journal_len: 64 * SECTOR, ..shape }
    }

    fn record(number: u32) -> Record {
        Record {
            slot: Slot::new(number % 3, number % 100),
            entry: Entry { tag: number + 1, valid: 0xff, ..Entry::default() },
            unflushed: number.is_multiple_of(3),
        }
    }

    /// Returns all records, oldest first.
    fn in_order(found: &JournalRecords) -> Vec<(u64, Record)> {
        let records = &found.records;
        let mut keys = records.keys.clone();
        keys.sort_unstable_by_key(|key| key & ((1 << (SECTOR_KEY_BITS + RECORD_BITS)) - 1));
        let decoded = keys.iter().map(|key| records.at(*key));
        decoded.map(|(sequence, encoded)| (sequence, decode(&records.layout, encoded).expect("was decoded"))).collect()
    }

    /// Journal as it was written.
    struct Written {
        bytes: Vec<u8>,
        /// Records that are needed, with the sequences of their sectors.
        records: Vec<(u64, Record)>,
        end: u64,
        /// Sequence of the last commit's first sector.
        last: u64,
    }

    /// Writes commits with the given numbers of records.
    fn written(commits: &[usize]) -> Written {
        let shape = shape();
        let mut bytes = vec![0; shape.journal_len as usize];
        let (mut all, mut sequence, mut number, mut last) = (Vec::new(), 1, 0, 1);
        for count in commits {
            let records: Vec<Record> = (0..*count).map(|index| record(number + index as u32)).collect();
            number += *count as u32;
            let sectors = records.len().div_ceil(records_per_sector(&shape)).max(1);
            let blanks = (sequence + sectors as u64).next_multiple_of(COMMIT_SECTORS);
            let tail = blanks.saturating_sub(60).max(1).min(sequence);
            let position = Position { session: 1, sequence, tail, durable_end: sequence };
            let mut commit = vec![0; (blanks - sequence) as usize * SECTOR_LEN];
            encode(&shape, SEED, position, &records, &mut commit);
            for (index, sector) in commit.chunks_exact(SECTOR_LEN).enumerate() {
                let at = ((sequence + index as u64) % 64) as usize * SECTOR_LEN;
                bytes[at..at + SECTOR_LEN].copy_from_slice(sector);
            }
            let of_sector = |index: usize| sequence + (index / records_per_sector(&shape)) as u64;
            all.extend(records.iter().enumerate().map(|(index, record)| (of_sector(index), *record)));
            last = sequence;
            sequence += sectors as u64;
            all.retain(|(at, _)| *at >= tail);
        }
        Written { bytes, records: all, end: sequence, last }
    }

    proptest! {
        /// Reading a cleanly closed journal returns every needed record, in order.
        #[test]
        fn journal_returns_committed_records(commits in prop::collection::vec(0_usize..150, 0..40)) {
            let Written { bytes, records, end, .. } = written(&commits);
            let found = read(&shape(), SEED, bytes, StopKind::Clean { end }).expect("is whole");
            prop_assert_eq!(in_order(&found), records);
            prop_assert_eq!(found.end, end);
        }

        /// The records of a torn last commit are found up to the first missing sector.
        #[test]
        fn torn_commit_keeps_its_first_sectors(
            commits in prop::collection::vec(1_usize..150, 2..40),
            kept in any::<u16>(),
        ) {
            let mut torn = written(&commits[..commits.len() - 1]).bytes;
            let Written { bytes: after, records, end, last: start } = written(&commits);
            let mut first_missing = None;
            for sequence in start..end.next_multiple_of(COMMIT_SECTORS) {
                let at = (sequence % 64) as usize * SECTOR_LEN;
                if kept >> (sequence - start) & 1 == 1 {
                    torn[at..at + SECTOR_LEN].copy_from_slice(&after[at..at + SECTOR_LEN]);
                } else {
                    first_missing.get_or_insert(sequence);
                }
            }
            let found = read(&shape(), SEED, torn, StopKind::Killed).expect("is torn, not damaged");
            let end = first_missing.unwrap_or(end).min(end);
            prop_assert_eq!(found.end, end);
            let found = in_order(&found);
            let last: Vec<_> = found.iter().filter(|(at, _)| *at >= start).collect();
            let wanted: Vec<_> = records.iter().filter(|(at, _)| (start..end).contains(at)).collect();
            prop_assert_eq!(last, wanted);
        }

        /// Unflushed commits may survive independently of each other; their loose records are not trusted after a
        /// power loss.
        #[test]
        fn power_loss_drops_unflushed_loose_records(commits in 1_u64..50, flushed in 0_u64..50, kept in any::<u64>()) {
            let shape = shape();
            let flushed = flushed.min(commits - 1);
            let mut bytes = vec![0; shape.journal_len as usize];
            for sequence in 1..=commits {
                let position = Position { session: 1, sequence, tail: 1, durable_end: sequence.min(flushed + 1) };
                let at = (sequence % 64) as usize * SECTOR_LEN;
                if sequence <= flushed || kept >> sequence & 1 == 1 {
                    encode(&shape, SEED, position, &[record(sequence as u32)], &mut bytes[at..at + SECTOR_LEN]);
                }
            }
            let end = (flushed + 1..=commits).find(|sequence| kept >> sequence & 1 == 0).unwrap_or(commits + 1);
            let killed = read(&shape, SEED, bytes.clone(), StopKind::Killed).expect("is torn, not damaged");
            prop_assert_eq!((killed.end, in_order(&killed).len() as u64), (end, end - 1));
            let firm_end = (flushed + 1..=commits).any(|sequence| kept >> sequence & 1 == 1);
            let firm_end = if firm_end { flushed + 1 } else { flushed };
            let after_power_loss = read(&shape, SEED, bytes, StopKind::Unknown).expect("is torn, not damaged");
            let wanted = (1..end).filter(|sequence| !sequence.is_multiple_of(3) || *sequence < firm_end);
            let found = in_order(&after_power_loss);
            prop_assert!(found.iter().map(|(sequence, _)| *sequence).eq(wanted));
        }

        /// A journal with a flipped bit is refused, or read without any change.
        #[test]
        fn journal_detects_relevant_bit_flips(
            commits in prop::collection::vec(1_usize..150, 1..40),
            at in 0_usize..64 * SECTOR_LEN,
            bit in 0_u32..8,
        ) {
            let Written { mut bytes, records, end, .. } = written(&commits);
            bytes[at] ^= 1 << bit;
            if let Ok(found) = read(&shape(), SEED, bytes, StopKind::Killed) {
                prop_assert_eq!(found.end, end);
                prop_assert_eq!(in_order(&found), records);
            }
        }
    }
}
