//! Inspection and changes of a cache that is not in use.

use std::rc::Rc;

use larder_block::{AlignedBuf, BlockDevice, ByteOffset, IoError, ReadBuf};

use crate::entry::Entry;
use crate::journal::{self, Records};
use crate::open::{OpenError, read_superblock, write_superblock};
use crate::page;
use crate::shape::JOURNAL_AT;
use crate::superblock::Superblock;
use crate::{Mode, Shape};

/// Bytes of pages that are read at once.
const CHUNK_LEN: u64 = 256 << 10;

/// Content of an unused cache, if it were opened for the same, unchanged disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lines {
    /// Cached lines.
    pub lines: u64,
    /// Cached lines with dirty data.
    pub dirty: u64,
    /// Damaged metadata, which is not counted.
    pub damage: Damage,
}

/// Damage of a cache's metadata.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Damage {
    /// Set if the journal is damaged, so that the content of all sets is unknown.
    pub journal: bool,
    /// Number of sets whose content is unknown.
    pub sets: u32,
}

/// Counts the lines of the cache with this superblock, as far as they are known. `boot` identifies the host's present
/// boot, as in [`OpenOptions::boot`](crate::OpenOptions::boot).
///
/// # Errors
/// [`OpenError::Io`].
pub async fn count_lines(
    fast: &Rc<dyn BlockDevice>,
    superblock: &Superblock,
    boot: [u8; 16],
) -> Result<Lines, OpenError> {
    let mut found = Lines::default();
    let mut sets = entries_of_all(fast, superblock, boot).await?;
    while let Some((_, entries)) = sets.next().await? {
        found.lines += entries.iter().filter(|entry| entry.believed() != 0).count() as u64;
        found.dirty += entries.iter().filter(|entry| entry.dirty != 0).count() as u64;
    }
    found.damage = sets.damage();
    Ok(found)
}

/// Iterator over the entries of all sets; damaged ones have none.
pub(crate) struct Sets<'a> {
    fast: &'a Rc<dyn BlockDevice>,
    shape: Shape,
    seed: u32,
    /// Records of the journal by set; `None` if the journal is damaged.
    records: Option<Records>,
    /// Oldest sector of the journal that is needed.
    tail: u64,
    /// Number of damaged sets so far.
    damaged: u32,
    next: u32,
    /// Pages of the sets from the next one on.
    bytes: AlignedBuf,
    used: usize,
}

/// Reads the journal, and returns an iterator over the sets' entries.
pub(crate) async fn entries_of_all<'a>(
    fast: &'a Rc<dyn BlockDevice>,
    superblock: &Superblock,
    boot: [u8; 16],
) -> Result<Sets<'a>, OpenError> {
    let shape = superblock.shape;
    let mut bytes = AlignedBuf::zeroed(shape.journal_len as usize);
    let read = fast.read(ByteOffset::new(JOURNAL_AT), ReadBuf::new(&mut bytes)).await;
    read.map_err(|source| failed(fast, source))?;
    let was_left = superblock.was_left(boot);
    let contents = journal::read(&shape, superblock.seed(), bytes.to_vec(), was_left).ok();
    let tail = contents.as_ref().map_or(1, |contents| contents.tail);
    let records = contents.map(|contents| contents.records);
    Ok(Sets {
        fast,
        shape,
        seed: superblock.seed(),
        records,
        tail,
        damaged: 0,
        next: 0,
        bytes: AlignedBuf::zeroed(0),
        used: 0,
    })
}

impl Sets<'_> {
    /// Returns the damage found so far.
    pub(crate) fn damage(&self) -> Damage {
        Damage {
            journal: self.records.is_none(),
            sets: self.damaged,
        }
    }

    /// Returns the next set with its slots' entries.
    pub(crate) async fn next(&mut self) -> Result<Option<(u32, Vec<Entry>)>, OpenError> {
        let set = self.next;
        let Some(records) = self.records.as_ref().filter(|_| set < self.shape.sets) else {
            return Ok(None);
        };
        let pair_len = 2 * self.shape.page_len as usize;
        if self.used >= self.bytes.len() {
            let sets = (CHUNK_LEN as usize / pair_len).clamp(1, (self.shape.sets - set) as usize);
            self.bytes = AlignedBuf::zeroed(sets * pair_len);
            self.used = 0;
            let at = self.shape.page_at(set, false);
            let read = self.fast.read(at, ReadBuf::new(&mut self.bytes)).await;
            read.map_err(|source| failed(self.fast, source))?;
        }
        let pair = &self.bytes[self.used..self.used + pair_len];
        let believed = page::believed(&self.shape, self.seed, set, pair, self.tail);
        self.damaged += u32::from(believed.is_none());
        let entries = believed.map(|believed| believed.with(records.of_set(set), &self.shape));
        let entries = entries.unwrap_or_default();
        self.used += pair_len;
        self.next += 1;
        Ok(Some((set, entries)))
    }
}

fn failed(fast: &Rc<dyn BlockDevice>, source: IoError) -> OpenError {
    OpenError::Io {
        cache: fast.name().to_string(),
        source,
    }
}

/// Sets the mode in which an unused cache handles writes when it is opened the next time.
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
    written.map_err(|source| failed(fast, source))
}
