//! Inspection and changes of a cache that is not in use.

use std::rc::Rc;

use larder_block::{AlignedBuf, BlockDevice, ByteOffset, IoError, ReadBuf};

use crate::entry::Entry;
use crate::journal::{self, Records};
use crate::layout::JOURNAL_AT;
use crate::open::{CacheOpenError, read_superblock, write_superblock};
use crate::page;
use crate::superblock::Superblock;
use crate::{CacheLayout, CacheMode};

/// Bytes of pages that are read at once.
const CHUNK_LEN: u64 = 256 << 10;

/// Content of an unused cache, if it were opened for the same, unchanged disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LineCounts {
    /// Cached lines.
    pub lines: u64,
    /// Cached lines with dirty data.
    pub dirty: u64,
    /// Damaged metadata, which is not counted.
    pub damage: MetadataDamage,
}

/// Damage of a cache's metadata.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MetadataDamage {
    /// Set if the journal is damaged, so that the content of all sets is unknown.
    pub journal: bool,
    /// Number of sets whose content is unknown.
    pub sets: u32,
}

/// Counts the lines of the cache with this superblock, as far as they are known. `boot` identifies the host's present
/// boot, as in [`OpenOptions::boot`](crate::CacheOpenOptions::boot).
///
/// # Errors
/// [`CacheOpenError::Io`].
pub async fn count_lines(
    fast: &Rc<dyn BlockDevice>,
    superblock: &Superblock,
    boot: [u8; 16],
) -> Result<LineCounts, CacheOpenError> {
    let mut found = LineCounts::default();
    let mut sets = read_set_entries(fast, superblock, boot).await?;
    while let Some((_, entries)) = sets.next().await? {
        found.lines += entries.iter().filter(|entry| entry.trusted() != 0).count() as u64;
        found.dirty += entries.iter().filter(|entry| entry.dirty != 0).count() as u64;
    }
    found.damage = sets.damage();
    Ok(found)
}

/// Iterator over the entries of all sets; damaged ones have none.
pub(crate) struct SetEntries<'a> {
    fast: &'a Rc<dyn BlockDevice>,
    layout: CacheLayout,
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
pub(crate) async fn read_set_entries<'a>(
    fast: &'a Rc<dyn BlockDevice>,
    superblock: &Superblock,
    boot: [u8; 16],
) -> Result<SetEntries<'a>, CacheOpenError> {
    let layout = superblock.layout;
    let mut bytes = AlignedBuf::zeroed(layout.journal_len as usize);
    let read = fast.read(ByteOffset::new(JOURNAL_AT), ReadBuf::new(&mut bytes)).await;
    read.map_err(|source| io_error(fast, source))?;
    let stop_kind = superblock.stop_kind(boot);
    let contents = journal::read(&layout, superblock.seed(), bytes.to_vec(), stop_kind).ok();
    let tail = contents.as_ref().map_or(1, |contents| contents.tail);
    let records = contents.map(|contents| contents.records);
    Ok(SetEntries {
        fast,
        layout,
        seed: superblock.seed(),
        records,
        tail,
        damaged: 0,
        next: 0,
        bytes: AlignedBuf::zeroed(0),
        used: 0,
    })
}

impl SetEntries<'_> {
    /// Returns the damage found so far.
    pub(crate) fn damage(&self) -> MetadataDamage {
        MetadataDamage { journal: self.records.is_none(), sets: self.damaged }
    }

    /// Returns the next set with its slots' entries.
    pub(crate) async fn next(&mut self) -> Result<Option<(u32, Vec<Entry>)>, CacheOpenError> {
        let set = self.next;
        let Some(records) = self.records.as_ref().filter(|_| set < self.layout.sets) else {
            return Ok(None);
        };
        let pair_len = 2 * self.layout.page_len as usize;
        if self.used >= self.bytes.len() {
            let sets = (CHUNK_LEN as usize / pair_len).clamp(1, (self.layout.sets - set) as usize);
            self.bytes = AlignedBuf::zeroed(sets * pair_len);
            self.used = 0;
            let at = self.layout.page_at(set, false);
            let read = self.fast.read(at, ReadBuf::new(&mut self.bytes)).await;
            read.map_err(|source| io_error(self.fast, source))?;
        }
        let pair = &self.bytes[self.used..self.used + pair_len];
        let page = page::trusted_page(&self.layout, self.seed, set, pair, self.tail);
        self.damaged += u32::from(page.is_none());
        let entries = page.map(|believed| believed.apply_records(records.of_set(set), &self.layout));
        let entries = entries.unwrap_or_default();
        self.used += pair_len;
        self.next += 1;
        Ok(Some((set, entries)))
    }
}

fn io_error(fast: &Rc<dyn BlockDevice>, source: IoError) -> CacheOpenError {
    CacheOpenError::Io { cache: fast.name().to_string(), source }
}

/// Sets the mode in which an unused cache handles writes when it is opened the next time.
///
/// # Errors
/// [`CacheOpenError::Superblock`] and [`CacheOpenError::Io`].
pub async fn set_mode(fast: &Rc<dyn BlockDevice>, mode: CacheMode) -> Result<(), CacheOpenError> {
    let superblock = read_superblock(fast).await?;
    let superblock = Superblock { sequence: superblock.sequence + 1, mode, ..superblock };
    let written = write_superblock(fast, &superblock).await;
    written.map_err(|source| io_error(fast, source))
}
