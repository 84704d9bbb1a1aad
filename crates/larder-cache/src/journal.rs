//! The journal's bytes: what has changed since the pages were written.
//!
//! A ring of sectors, numbered from 1 on without end; number n lies at n modulo the ring's length. A commit is one or
//! more sectors, written at once. A sector is written whole or not at all, so one that is not what it should be was
//! either never written (it is older, or zero), or it is damaged. A record says all of what a slot holds from then on.
//!
//! A record is *firm* or *loose*. What a firm one says is so whatever happens. A loose one was written without a flush,
//! after data that was written without one: if the host has not lost power since, both are there; otherwise only those
//! below the *firm end* that a later sector tells are to be believed. No sector below that end can be missing; those
//! behind it can, one without the other.
//!
//! ```text
//! byte 0   CRC32C of the cache's identity and the rest of the sector, u32
//!      4   session, u32: grows with every opening
//!      8   sequence of the sector, u64
//!      16  firm end: sectors with a lower sequence are durable, and so is the data that they tell of, u64
//!      24  sequence of the oldest sector that is still needed, u64
//!      32  records, u16
//!      34  zero, 6 bytes
//!      40  records: slot, u32 (set times 256, plus way), then an entry, whose flag 2 is set if the record is loose
//! ```

use crate::entry::{self, Entry};
use crate::shape::{SECTOR, Shape, Slot};

pub(crate) const SECTOR_LEN: usize = SECTOR as usize;
const HEADER_LEN: usize = 40;

/// What a slot holds from now on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    pub(crate) slot: Slot,
    pub(crate) entry: Entry,
    /// It is only to be believed if the host has not lost power since, or if it is below a firm end.
    pub(crate) loose: bool,
}

/// Set in the flags of a loose record's entry.
const FLAG_LOOSE: u8 = 2;

/// Where the flags are in a record.
const FLAGS_AT: usize = 4 + entry::FLAGS_AT;

/// How many records fit in a sector.
pub(crate) fn records_per_sector(shape: &Shape) -> usize {
    (SECTOR_LEN - HEADER_LEN) / record_len(shape)
}

fn record_len(shape: &Shape) -> usize {
    4 + entry::len_for(shape.line_bits)
}

/// Where the next commit goes, and what it says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Position {
    pub(crate) session: u32,
    /// Of the first sector.
    pub(crate) sequence: u64,
    /// The oldest sector that is still needed.
    pub(crate) tail: u64,
    /// Sectors below this one are durable, and the data that they tell of.
    pub(crate) firm_end: u64,
}

/// Writes a commit into `bytes`, whole sectors; those that the records do not need are empty.
pub(crate) fn encode(shape: &Shape, seed: u32, position: Position, records: &[Record], bytes: &mut [u8]) {
    bytes.fill(0);
    let mut left = records.chunks(records_per_sector(shape));
    for (index, sector) in bytes.chunks_exact_mut(SECTOR_LEN).enumerate() {
        let records = left.next().unwrap_or_default();
        sector[4..8].copy_from_slice(&position.session.to_le_bytes());
        sector[8..16].copy_from_slice(&(position.sequence + index as u64).to_le_bytes());
        sector[16..24].copy_from_slice(&position.firm_end.to_le_bytes());
        sector[24..32].copy_from_slice(&position.tail.to_le_bytes());
        sector[32..34].copy_from_slice(&(records.len() as u16).to_le_bytes());
        for (place, record) in sector[HEADER_LEN..].chunks_exact_mut(record_len(shape)).zip(records) {
            place[..4].copy_from_slice(&record.slot.0.to_le_bytes());
            record.entry.encode(shape, &mut place[4..]);
            place[FLAGS_AT] |= if record.loose { FLAG_LOOSE } else { 0 };
        }
        let sum = crc32c::crc32c_append(seed, &sector[4..]);
        sector[..4].copy_from_slice(&sum.to_le_bytes());
    }
    debug_assert!(left.next().is_none(), "the records fit");
}

#[derive(Clone, Copy, Debug)]
struct Header {
    session: u32,
    sequence: u64,
    firm_end: u64,
    tail: u64,
    records: u16,
}

enum Sector {
    Never,
    Broken,
    Whole(Header),
}

fn decode_header(shape: &Shape, seed: u32, bytes: &[u8]) -> Sector {
    if bytes.iter().all(|byte| *byte == 0) {
        return Sector::Never;
    }
    let word = |at: usize| u32::from_le_bytes([bytes[at], bytes[at + 1], bytes[at + 2], bytes[at + 3]]);
    let long = |at: usize| u64::from(word(at)) | u64::from(word(at + 4)) << 32;
    let header = Header {
        session: word(4),
        sequence: long(8),
        firm_end: long(16),
        tail: long(24),
        records: word(32) as u16,
    };
    let is_sound = word(0) == crc32c::crc32c_append(seed, &bytes[4..])
        && usize::from(header.records) <= records_per_sector(shape)
        && header.tail <= header.firm_end
        && header.firm_end <= header.sequence
        && header.sequence - header.tail < shape.journal_sectors();
    if is_sound {
        Sector::Whole(header)
    } else {
        Sector::Broken
    }
}

/// What a journal holds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Contents {
    /// The last session that wrote to it; 0 if none did.
    pub(crate) session: u32,
    /// The oldest sector that is needed.
    pub(crate) tail: u64,
    /// The sequence after the last sector.
    pub(crate) end: u64,
    /// Those that are to be believed, in the order in which they were made, each with its sector's sequence.
    pub(crate) records: Vec<(u64, Record)>,
    /// Sectors with records that are not, by their sequences, as they are to be from now on.
    pub(crate) disbelieved: Vec<(u64, Vec<u8>)>,
}

/// A part of the journal that must have been written is not readable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Damaged;

/// What is known of how a journal was left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WasLeft {
    /// By a clean stop, which has noted the end.
    Clean { end: u64 },
    /// By a process that was killed, while the host went on.
    Killed,
    /// Perhaps by a loss of power.
    Somehow,
}

/// Reads a whole journal.
pub(crate) fn read(shape: &Shape, seed: u32, bytes: &[u8], was_left: WasLeft) -> Result<Contents, Damaged> {
    let sectors: Vec<Sector> = bytes
        .chunks_exact(SECTOR_LEN)
        .map(|bytes| decode_header(shape, seed, bytes))
        .collect();
    let count = sectors.len() as u64;
    let whole = |sector: &Sector| match sector {
        Sector::Whole(header) => Some(*header),
        Sector::Never | Sector::Broken => None,
    };
    let newest = sectors
        .iter()
        .filter_map(whole)
        .max_by_key(|header| (header.session, header.sequence));
    let mut contents = Contents {
        session: newest.map_or(0, |header| header.session),
        tail: newest.map_or(1, |header| header.tail),
        end: newest.map_or(1, |header| header.tail),
        records: Vec::new(),
        disbelieved: Vec::new(),
    };
    let mut session = 0;
    loop {
        let index = contents.end % count;
        match &sectors[index as usize] {
            Sector::Whole(header) if header.sequence == contents.end && header.session >= session => {
                session = header.session;
                let from = index as usize * SECTOR_LEN;
                let sector = &bytes[from..from + SECTOR_LEN];
                let places = sector[HEADER_LEN..].chunks_exact(record_len(shape));
                for place in places.take(usize::from(header.records)) {
                    let slot = Slot(u32::from_le_bytes([place[0], place[1], place[2], place[3]]));
                    let loose = place[FLAGS_AT] & FLAG_LOOSE != 0;
                    let mut entry = [0; entry::LEN_MAX];
                    let entry = &mut entry[..place.len() - 4];
                    entry.copy_from_slice(&place[4..]);
                    entry[entry::FLAGS_AT] &= !FLAG_LOOSE;
                    let entry = Entry::decode(shape, entry).ok_or(Damaged)?;
                    if slot.set() >= shape.sets {
                        return Err(Damaged);
                    }
                    contents.records.push((contents.end, Record { slot, entry, loose }));
                }
                contents.end += 1;
            }
            Sector::Broken => return Err(Damaged),
            Sector::Never | Sector::Whole(_) => break,
        }
        if contents.end - contents.tail >= count {
            break;
        }
    }
    // Of what lies behind the end, some was being written when it was cut off, or was not durable yet.
    let told = sectors.iter().filter_map(whole).map(|header| header.firm_end);
    let firm_end = told.max().unwrap_or(contents.end);
    if firm_end > contents.end {
        return Err(Damaged);
    }
    match was_left {
        WasLeft::Clean { end } if end != contents.end => return Err(Damaged),
        WasLeft::Clean { .. } | WasLeft::Killed => {}
        WasLeft::Somehow => {
            let is_believed = |(sequence, record): &(u64, Record)| !record.loose || *sequence < firm_end;
            let mut lost: Vec<u64> = contents
                .records
                .iter()
                .filter(|record| !is_believed(record))
                .map(|(sequence, _)| *sequence)
                .collect();
            lost.dedup();
            contents.records.retain(is_believed);
            for sequence in lost {
                let Sector::Whole(header) = &sectors[(sequence % count) as usize] else {
                    continue;
                };
                let position = Position {
                    session: header.session,
                    sequence,
                    tail: header.tail,
                    firm_end: header.firm_end,
                };
                let of_it = contents.records.iter().filter(|(of, _)| *of == sequence);
                let kept: Vec<Record> = of_it.map(|(_, record)| *record).collect();
                let mut sector = vec![0; SECTOR_LEN];
                encode(shape, seed, position, &kept, &mut sector);
                contents.disbelieved.push((sequence, sector));
            }
        }
    }
    Ok(contents)
}

#[cfg(test)]
mod tests {
    use super::*;
    use larder_block::ByteLen;
    use proptest::prelude::*;

    const SEED: u32 = 77;

    fn shape() -> Shape {
        let shape = Shape::for_size(ByteLen::mib(4), 12, 512).expect("large enough");
        Shape {
            journal_len: 64 * SECTOR,
            ..shape
        }
    }

    fn record(number: u32) -> Record {
        Record {
            slot: Slot::new(0, number % 100),
            entry: Entry {
                tag: number + 1,
                valid: 0xff,
                ..Entry::default()
            },
            loose: number.is_multiple_of(3),
        }
    }

    /// A journal as it was written.
    struct Written {
        bytes: Vec<u8>,
        /// Those that are needed, with their sequences.
        records: Vec<(u64, Record)>,
        end: u64,
        /// Where the last commit begins.
        last: u64,
    }

    /// Commits of so many records each.
    fn written(commits: &[usize]) -> Written {
        let shape = shape();
        let mut bytes = vec![0; shape.journal_len as usize];
        let (mut all, mut sequence, mut number, mut last) = (Vec::new(), 1, 0, 1);
        for count in commits {
            let records: Vec<Record> = (0..*count).map(|index| record(number + index as u32)).collect();
            number += *count as u32;
            let sectors = records.len().div_ceil(records_per_sector(&shape)).max(1);
            let tail = (sequence + sectors as u64).saturating_sub(60).max(1).min(sequence);
            let position = Position {
                session: 1,
                sequence,
                tail,
                firm_end: sequence,
            };
            let mut commit = vec![0; sectors * SECTOR_LEN];
            encode(&shape, SEED, position, &records, &mut commit);
            for (index, sector) in commit.chunks_exact(SECTOR_LEN).enumerate() {
                let at = ((sequence + index as u64) % 64) as usize * SECTOR_LEN;
                bytes[at..at + SECTOR_LEN].copy_from_slice(sector);
            }
            let of_sector = |index: usize| sequence + (index / records_per_sector(&shape)) as u64;
            all.extend(
                records
                    .iter()
                    .enumerate()
                    .map(|(index, record)| (of_sector(index), *record)),
            );
            last = sequence;
            sequence += sectors as u64;
            all.retain(|(at, _)| *at >= tail);
        }
        Written {
            bytes,
            records: all,
            end: sequence,
            last,
        }
    }

    proptest! {
        #[test]
        fn what_was_committed_is_read(commits in prop::collection::vec(0_usize..150, 0..40)) {
            let Written { bytes, records, end, .. } = written(&commits);
            let found = read(&shape(), SEED, &bytes, WasLeft::Clean { end }).expect("is whole");
            prop_assert_eq!(found.records, records);
            prop_assert_eq!(found.end, end);
        }

        #[test]
        fn a_torn_last_commit_is_as_far_as_it_goes(
            commits in prop::collection::vec(1_usize..150, 2..40),
            kept in any::<u8>(),
        ) {
            let mut torn = written(&commits[..commits.len() - 1]).bytes;
            let Written { bytes: after, records, end, last: start } = written(&commits);
            let mut first_missing = None;
            for sequence in start..end {
                let at = (sequence % 64) as usize * SECTOR_LEN;
                if kept >> (sequence - start) & 1 == 1 {
                    torn[at..at + SECTOR_LEN].copy_from_slice(&after[at..at + SECTOR_LEN]);
                } else {
                    first_missing.get_or_insert(sequence);
                }
            }
            let found = read(&shape(), SEED, &torn, WasLeft::Killed).expect("is torn, not damaged");
            let end = first_missing.unwrap_or(end);
            prop_assert_eq!(found.end, end);
            let last: Vec<_> = found.records.iter().filter(|(at, _)| *at >= start).collect();
            let wanted: Vec<_> = records.iter().filter(|(at, _)| (start..end).contains(at)).collect();
            prop_assert_eq!(last, wanted);
        }

        /// Commits that nobody has flushed may be there one without the other; what is loose in them is not believed.
        #[test]
        fn what_was_not_flushed_is_believed_if_it_is_firm(commits in 1_u64..50, flushed in 0_u64..50, kept in any::<u64>()) {
            let shape = shape();
            let flushed = flushed.min(commits - 1);
            let mut bytes = vec![0; shape.journal_len as usize];
            for sequence in 1..=commits {
                let position = Position { session: 1, sequence, tail: 1, firm_end: sequence.min(flushed + 1) };
                let at = (sequence % 64) as usize * SECTOR_LEN;
                if sequence <= flushed || kept >> sequence & 1 == 1 {
                    encode(&shape, SEED, position, &[record(sequence as u32)], &mut bytes[at..at + SECTOR_LEN]);
                }
            }
            let end = (flushed + 1..=commits).find(|sequence| kept >> sequence & 1 == 0).unwrap_or(commits + 1);
            let killed = read(&shape, SEED, &bytes, WasLeft::Killed).expect("is torn, not damaged");
            prop_assert_eq!((killed.end, killed.records.len() as u64), (end, end - 1));
            let firm_end = (flushed + 1..=commits).any(|sequence| kept >> sequence & 1 == 1);
            let firm_end = if firm_end { flushed + 1 } else { flushed };
            let lost_power = read(&shape, SEED, &bytes, WasLeft::Somehow).expect("is torn, not damaged");
            let wanted = (1..end).filter(|sequence| !sequence.is_multiple_of(3) || *sequence < firm_end);
            let found = lost_power.records.iter().map(|(sequence, _)| *sequence);
            prop_assert!(found.eq(wanted));
        }

        #[test]
        fn a_flipped_bit_is_seen_or_is_of_no_matter(
            commits in prop::collection::vec(1_usize..150, 1..40),
            at in 0_usize..64 * SECTOR_LEN,
            bit in 0_u32..8,
        ) {
            let Written { mut bytes, records, end, .. } = written(&commits);
            bytes[at] ^= 1 << bit;
            if let Ok(found) = read(&shape(), SEED, &bytes, WasLeft::Killed) {
                prop_assert_eq!(found.end, end);
                prop_assert_eq!(found.records, records);
            }
        }
    }
}
