//! The journal's bytes: what has changed since the pages were written.
//!
//! A ring of sectors, numbered from 1 on without end; number n lies at n modulo the ring's length. A commit is one or
//! more sectors, written at once. A sector is written whole or not at all, so one that is not what it should be was
//! either never written (it is older, or zero), or it is damaged. A record says all of what a slot holds from then on.
//!
//! ```text
//! byte 0   CRC32C of the cache's identity and the rest of the sector, u32
//!      4   session, u32: grows with every opening
//!      8   sequence of the sector, u64
//!      16  sequence of the first sector of its commit, u64
//!      24  sequence of the oldest sector that is still needed, u64
//!      32  records, u16
//!      34  zero, 6 bytes
//!      40  records: slot, u32 (set times 256, plus way), then an entry
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
}

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
}

/// Writes a commit into `bytes`, whole sectors; those that the records do not need are empty.
pub(crate) fn encode(shape: &Shape, seed: u32, position: Position, records: &[Record], bytes: &mut [u8]) {
    bytes.fill(0);
    let mut left = records.chunks(records_per_sector(shape));
    for (index, sector) in bytes.chunks_exact_mut(SECTOR_LEN).enumerate() {
        let records = left.next().unwrap_or_default();
        sector[4..8].copy_from_slice(&position.session.to_le_bytes());
        sector[8..16].copy_from_slice(&(position.sequence + index as u64).to_le_bytes());
        sector[16..24].copy_from_slice(&position.sequence.to_le_bytes());
        sector[24..32].copy_from_slice(&position.tail.to_le_bytes());
        sector[32..34].copy_from_slice(&(records.len() as u16).to_le_bytes());
        for (place, record) in sector[HEADER_LEN..].chunks_exact_mut(record_len(shape)).zip(records) {
            place[..4].copy_from_slice(&record.slot.0.to_le_bytes());
            record.entry.encode(shape, &mut place[4..]);
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
    commit: u64,
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
        commit: long(16),
        tail: long(24),
        records: word(32) as u16,
    };
    let is_sound = word(0) == crc32c::crc32c_append(seed, &bytes[4..])
        && usize::from(header.records) <= records_per_sector(shape)
        && header.tail <= header.commit
        && header.commit <= header.sequence
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
    /// In the order in which they were made, each with its sector's sequence.
    pub(crate) records: Vec<(u64, Record)>,
}

/// A part of the journal that must have been written is not readable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Damaged;

/// Reads a whole journal. `clean_end` is the end that a clean stop has noted.
pub(crate) fn read(shape: &Shape, seed: u32, bytes: &[u8], clean_end: Option<u64>) -> Result<Contents, Damaged> {
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
                    let entry = Entry::decode(shape, &place[4..]).ok_or(Damaged)?;
                    if slot.set() >= shape.sets {
                        return Err(Damaged);
                    }
                    contents.records.push((contents.end, Record { slot, entry }));
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
    // What lies behind the end can only be the rest of the commit that was being written.
    let is_behind = |header: &Header| header.session >= session && header.sequence > contents.end;
    if sectors
        .iter()
        .filter_map(whole)
        .any(|header| is_behind(&header) && header.commit > contents.end)
    {
        return Err(Damaged);
    }
    match clean_end {
        Some(end) if end != contents.end => Err(Damaged),
        _ => Ok(contents),
    }
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
            let found = read(&shape(), SEED, &bytes, Some(end)).expect("is whole");
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
            let found = read(&shape(), SEED, &torn, None).expect("is torn, not damaged");
            let end = first_missing.unwrap_or(end);
            prop_assert_eq!(found.end, end);
            let last: Vec<_> = found.records.iter().filter(|(at, _)| *at >= start).collect();
            let wanted: Vec<_> = records.iter().filter(|(at, _)| (start..end).contains(at)).collect();
            prop_assert_eq!(last, wanted);
        }

        #[test]
        fn a_flipped_bit_is_seen_or_is_of_no_matter(
            commits in prop::collection::vec(1_usize..150, 1..40),
            at in 0_usize..64 * SECTOR_LEN,
            bit in 0_u32..8,
        ) {
            let Written { mut bytes, records, end, .. } = written(&commits);
            bytes[at] ^= 1 << bit;
            if let Ok(found) = read(&shape(), SEED, &bytes, None) {
                prop_assert_eq!(found.end, end);
                prop_assert_eq!(found.records, records);
            }
        }
    }
}
