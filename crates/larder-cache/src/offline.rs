//! What can be said of a cache, and done to it, while nobody uses it.

use std::rc::Rc;

use larder_block::{AlignedBuf, BlockDevice, ByteOffset, ReadBuf};

use crate::entry::Entry;
use crate::journal::{self, Record};
use crate::open::{OpenError, read_superblock, write_superblock};
use crate::page::{self, Found};
use crate::shape::JOURNAL_AT;
use crate::superblock::Superblock;
use crate::{Mode, Shape};

/// So many bytes of pages are read at once.
const CHUNK_LEN: u64 = 256 << 10;

/// What a cache that nobody uses would have if it were opened for the same, unchanged disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lines {
    /// Lines that it has something of.
    pub lines: u64,
    /// Of them those that have data which the disk has not.
    pub dirty: u64,
}

/// Counts the lines of the cache with this superblock; nothing is counted of what is damaged.
///
/// # Errors
/// [`OpenError::Io`].
pub async fn count_lines(fast: &Rc<dyn BlockDevice>, superblock: &Superblock) -> Result<Lines, OpenError> {
    let io = |source| OpenError::Io {
        cache: fast.name().to_string(),
        source,
    };
    let shape = superblock.shape;
    let mut bytes = AlignedBuf::zeroed(shape.journal_len as usize);
    let read = fast.read(ByteOffset::new(JOURNAL_AT), ReadBuf::new(&mut bytes)).await;
    read.map_err(io)?;
    let clean_end = superblock.clean.then_some(superblock.journal_end);
    let Ok(contents) = journal::read(&shape, superblock.seed(), &bytes, clean_end) else {
        return Ok(Lines::default());
    };
    let mut records = contents.records;
    records.sort_by_key(|(_, record)| record.slot.set());
    let mut found = Lines::default();
    let pair_len = 2 * shape.page_len;
    let per_chunk = (CHUNK_LEN / pair_len).max(1) as u32;
    for first in (0..shape.sets).step_by(per_chunk as usize) {
        let sets = first..shape.sets.min(first + per_chunk);
        let mut bytes = AlignedBuf::zeroed(sets.len() * pair_len as usize);
        let read = fast.read(shape.page_at(first, false), ReadBuf::new(&mut bytes)).await;
        read.map_err(io)?;
        for (set, pair) in sets.zip(bytes.chunks_exact(pair_len as usize)) {
            let from = records.partition_point(|(_, record)| record.slot.set() < set);
            let to = records.partition_point(|(_, record)| record.slot.set() <= set);
            let entries = entries_of(&shape, superblock.seed(), set, pair, &records[from..to]);
            found.lines += entries.iter().filter(|entry| entry.believed() != 0).count() as u64;
            found.dirty += entries.iter().filter(|entry| entry.dirty != 0).count() as u64;
        }
    }
    Ok(found)
}

/// The newer of a set's pages, and what the journal says of it since.
fn entries_of(shape: &Shape, seed: u32, set: u32, pair: &[u8], records: &[(u64, Record)]) -> Vec<Entry> {
    let pages = pair.chunks_exact(shape.page_len as usize);
    let whole = pages.filter_map(|page| match page::decode(shape, seed, set, page) {
        Found::Whole { sequence, entries } => Some((sequence, entries)),
        _ => None,
    });
    let newest = whole.max_by_key(|(sequence, _)| *sequence);
    let (since, mut entries) = newest.unwrap_or_else(|| (0, vec![Entry::default(); shape.ways as usize]));
    for (sequence, Record { slot, entry }) in records {
        if *sequence >= since && slot.way() < shape.ways {
            entries[slot.way() as usize] = *entry;
        }
    }
    entries
}

/// Has a cache that nobody uses do something else with writes when it is opened the next time.
///
/// # Errors
/// [`OpenError::Superblock`] and [`OpenError::Io`].
pub async fn set_mode(fast: &Rc<dyn BlockDevice>, mode: Mode) -> Result<(), OpenError> {
    let superblock = read_superblock(fast).await?;
    let superblock = Superblock {
        sequence: superblock.sequence + 1,
        mode,
        ..superblock
    };
    let written = write_superblock(fast, &superblock).await;
    written.map_err(|source| OpenError::Io {
        cache: fast.name().to_string(),
        source,
    })
}
