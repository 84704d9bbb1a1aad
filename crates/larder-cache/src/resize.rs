//! Resizing: copies the lines of a closed cache into a new one of another size.

use std::rc::Rc;

use larder_block::{AlignedBuf, BlockDevice, ByteOffset, Io, IoResult, ReadBuf, WriteBuf, WriteFlags, join};
use smallvec::SmallVec;

use crate::entry::{self, Entry};
use crate::layout::{CacheLayout, Slot};
use crate::offline::{LineCounts, MetadataDamage, read_set_entries};
use crate::open::{CacheCreateOptions, CacheOpenError, create, read_superblock, write_superblock};
use crate::page::{self, Version};
use crate::superblock::Superblock;

/// Bytes of lines that are copied concurrently.
const COPY_BATCH_LEN: u64 = 1 << 20;

/// Creates a cache on `to`, of its whole size, with the content of the closed cache on `from` as far as there is
/// room, and with another identity. Until this succeeds, `to` has an empty cache or none. Returns how many lines the
/// new cache has.
///
/// # Errors
/// See [`CacheOpenError`]. [`CacheOpenError::TooSmall`] if `to` has no room for a cache, or not for all dirty lines.
pub async fn copy(
    from: &Rc<dyn BlockDevice>,
    to: &Rc<dyn BlockDevice>,
    uuid: [u8; 16],
) -> Result<LineCounts, CacheOpenError> {
    let io = |source| CacheOpenError::Io { cache: to.name().to_string(), source };
    let old = read_superblock(from).await?;
    let options = CacheCreateOptions {
        line_bits: old.layout.line_bits,
        mode: old.mode,
        uuid,
        disk: old.disk.clone(),
        disk_size: old.disk_size,
    };
    let layout = create(to, &options).await?;
    let mut new_sets = NewSets::new(layout);
    let mut batch = Vec::new();
    let mut sets = read_set_entries(from, &old, old.boot).await?;
    while let Some((set, entries)) = sets.next().await? {
        for (way, entry) in entries.iter().enumerate() {
            let trusted = Entry { valid: entry.trusted(), open: false, ..*entry };
            if trusted.valid == 0 {
                continue;
            }
            let line = old.layout.line_of(set, entry.tag);
            let moved = Entry { tag: layout.tag_of(line), ..trusted };
            match new_sets.insert(layout.set_of(line), &moved) {
                Some(slot) => batch.push((old.layout.data_of(Slot::new(set, way as u32)), layout.data_of(slot))),
                None if entry.dirty != 0 => {
                    return Err(CacheOpenError::TooSmall {
                        cache: to.name().to_string(),
                        size: to.geometry().size,
                        line: layout.line_len() >> 10,
                        least: from.geometry().size,
                    });
                }
                None => {}
            }
        }
        if batch.len() as u64 * layout.line_len() >= COPY_BATCH_LEN {
            copy_lines(from, to, &layout, &std::mem::take(&mut batch)).await.map_err(io)?;
        }
    }
    if old.may_be_dirty && sets.damage() != MetadataDamage::default() {
        // The old cache still has the data that cannot be found in it.
        return Err(CacheOpenError::Damaged { cache: from.name().to_string(), disk: old.disk.name });
    }
    copy_lines(from, to, &layout, &batch).await.map_err(io)?;
    to.flush().await.map_err(io)?;
    let new = read_superblock(to).await?;
    let new = Superblock { sequence: new.sequence + 1, unproven: old.unproven, ..new };
    if new.unproven {
        // Written before any line exists that could be trusted.
        write_superblock(to, &new).await.map_err(io)?;
    }
    write_pages(to, &new, &new_sets).await.map_err(io)?;
    let new = Superblock { sequence: new.sequence + 1, may_be_dirty: old.may_be_dirty, samples: old.samples, ..new };
    write_superblock(to, &new).await.map_err(io)?;
    Ok(new_sets.lines)
}

/// Content of the new cache's sets.
struct NewSets {
    layout: CacheLayout,
    /// Encoded entries by set and way.
    entries: Vec<u8>,
    /// Number of ways in use, for each set.
    used_ways: Vec<u16>,
    lines: LineCounts,
}

impl NewSets {
    fn new(layout: CacheLayout) -> Self {
        Self {
            layout,
            entries: vec![0; layout.slots() as usize * entry::len_for(layout.line_bits)],
            used_ways: vec![0; layout.sets as usize],
            lines: LineCounts::default(),
        }
    }

    fn bytes_of(&self, slot: Slot) -> std::ops::Range<usize> {
        let len = entry::len_for(self.layout.line_bits);
        let index = slot.set() as usize * self.layout.ways as usize + slot.way() as usize;
        index * len..(index + 1) * len
    }

    /// Assigns a slot to a line, if its set has room.
    fn insert(&mut self, set: u32, entry: &Entry) -> Option<Slot> {
        let used = &mut self.used_ways[set as usize];
        if u32::from(*used) >= self.layout.ways {
            return None;
        }
        let slot = Slot::new(set, (*used).into());
        *used += 1;
        let at = self.bytes_of(slot);
        entry.encode(&self.layout, &mut self.entries[at]);
        self.lines.lines += 1;
        self.lines.dirty += u64::from(entry.dirty != 0);
        Some(slot)
    }

    fn entries_of(&self, set: u32) -> Vec<Entry> {
        let entry = |way| Entry::decode(&self.layout, &self.entries[self.bytes_of(Slot::new(set, way))]);
        (0..self.layout.ways).map(|way| entry(way).unwrap_or_default()).collect()
    }
}

/// Copies whole lines from slot to slot, including invalid sectors.
async fn copy_lines(
    from: &Rc<dyn BlockDevice>,
    to: &Rc<dyn BlockDevice>,
    layout: &CacheLayout,
    lines: &[(ByteOffset, ByteOffset)],
) -> IoResult {
    let len = layout.line_len() as usize;
    let mut bytes = AlignedBuf::zeroed(len * lines.len());
    let reads: SmallVec<[Io<'_>; 16]> =
        bytes.chunks_exact_mut(len).zip(lines).map(|(piece, (at, _))| from.read(*at, ReadBuf::new(piece))).collect();
    join(reads).await?;
    let writes: SmallVec<[Io<'_>; 16]> = bytes
        .chunks_exact(len)
        .zip(lines)
        .map(|(piece, (_, at))| to.write(*at, WriteBuf::new(piece), WriteFlags::NONE))
        .collect();
    join(writes).await
}

/// Writes the first page of each set, durably.
async fn write_pages(to: &Rc<dyn BlockDevice>, superblock: &Superblock, new_sets: &NewSets) -> IoResult {
    let layout = superblock.layout;
    let mut bytes = AlignedBuf::zeroed(layout.page_len as usize);
    for set in 0..layout.sets {
        let version = Version { sequence: 1, turn: 0 };
        page::encode(&layout, superblock.seed(), set, version, &new_sets.entries_of(set), &mut bytes);
        let at = layout.page_at(set, false);
        to.write(at, WriteBuf::new(&bytes), WriteFlags::NONE).await?;
    }
    to.flush().await
}
