//! Resizing: copies the lines of a closed cache into a new one of another size.

use std::rc::Rc;

use larder_block::{AlignedBuf, BlockDevice, ByteOffset, Io, IoResult, ReadBuf, WriteBuf, WriteFlags, join};
use smallvec::SmallVec;

use crate::entry::{self, Entry};
use crate::offline::{Damage, Lines, entries_of_all};
use crate::open::{CreateOptions, OpenError, create, read_superblock, write_superblock};
use crate::page::{self, Version};
use crate::shape::{Shape, Slot};
use crate::superblock::Superblock;

/// Bytes of lines that are copied concurrently.
const COPIED_AT_ONCE: u64 = 1 << 20;

/// Creates a cache on `to`, of its whole size, with the content of the closed cache on `from` as far as there is
/// room, and with another identity. Until this succeeds, `to` has an empty cache or none. Returns how many lines the
/// new cache has.
///
/// # Errors
/// See [`OpenError`]. [`OpenError::TooSmall`] if `to` has no room for a cache, or not for all dirty lines.
pub async fn copy(from: &Rc<dyn BlockDevice>, to: &Rc<dyn BlockDevice>, uuid: [u8; 16]) -> Result<Lines, OpenError> {
    let io = |source| OpenError::Io {
        cache: to.name().to_string(),
        source,
    };
    let old = read_superblock(from).await?;
    let options = CreateOptions {
        line_bits: old.shape.line_bits,
        mode: old.mode,
        uuid,
        disk: old.disk.clone(),
        disk_size: old.disk_size,
    };
    let shape = create(to, &options).await?;
    let mut places = Places::new(shape);
    let mut batch = Vec::new();
    let mut sets = entries_of_all(from, &old, old.boot).await?;
    while let Some((set, entries)) = sets.next().await? {
        for (way, entry) in entries.iter().enumerate() {
            let believed = Entry {
                valid: entry.believed(),
                open: false,
                ..*entry
            };
            if believed.valid == 0 {
                continue;
            }
            let line = old.shape.line_of(set, entry.tag);
            let moved = Entry {
                tag: shape.tag_of(line),
                ..believed
            };
            match places.put(shape.set_of(line), &moved) {
                Some(slot) => batch.push((old.shape.data_of(Slot::new(set, way as u32)), shape.data_of(slot))),
                None if entry.dirty != 0 => {
                    return Err(OpenError::TooSmall {
                        cache: to.name().to_string(),
                        size: to.geometry().size,
                        line: shape.line_len() >> 10,
                        least: from.geometry().size,
                    });
                }
                None => {}
            }
        }
        if batch.len() as u64 * shape.line_len() >= COPIED_AT_ONCE {
            copy_lines(from, to, &shape, &std::mem::take(&mut batch))
                .await
                .map_err(io)?;
        }
    }
    if old.may_be_dirty && sets.damage() != Damage::default() {
        // The old cache still has the data that cannot be found in it.
        return Err(OpenError::Damaged {
            cache: from.name().to_string(),
            disk: old.disk.name,
        });
    }
    copy_lines(from, to, &shape, &batch).await.map_err(io)?;
    to.flush().await.map_err(io)?;
    let new = read_superblock(to).await?;
    let new = Superblock {
        sequence: new.sequence + 1,
        unproven: old.unproven,
        ..new
    };
    if new.unproven {
        // Written before any line exists that could be trusted.
        write_superblock(to, &new).await.map_err(io)?;
    }
    write_pages(to, &new, &places).await.map_err(io)?;
    let new = Superblock {
        sequence: new.sequence + 1,
        may_be_dirty: old.may_be_dirty,
        samples: old.samples,
        ..new
    };
    write_superblock(to, &new).await.map_err(io)?;
    Ok(places.lines)
}

/// Content of the new cache's sets.
struct Places {
    shape: Shape,
    /// Encoded entries by set and way.
    entries: Vec<u8>,
    /// Number of ways in use, for each set.
    taken: Vec<u16>,
    lines: Lines,
}

impl Places {
    fn new(shape: Shape) -> Self {
        Self {
            shape,
            entries: vec![0; shape.slots() as usize * entry::len_for(shape.line_bits)],
            taken: vec![0; shape.sets as usize],
            lines: Lines::default(),
        }
    }

    fn bytes_of(&self, slot: Slot) -> std::ops::Range<usize> {
        let len = entry::len_for(self.shape.line_bits);
        let index = slot.set() as usize * self.shape.ways as usize + slot.way() as usize;
        index * len..(index + 1) * len
    }

    /// Assigns a slot to a line, if its set has room.
    fn put(&mut self, set: u32, entry: &Entry) -> Option<Slot> {
        let taken = &mut self.taken[set as usize];
        if u32::from(*taken) >= self.shape.ways {
            return None;
        }
        let slot = Slot::new(set, (*taken).into());
        *taken += 1;
        let at = self.bytes_of(slot);
        entry.encode(&self.shape, &mut self.entries[at]);
        self.lines.lines += 1;
        self.lines.dirty += u64::from(entry.dirty != 0);
        Some(slot)
    }

    fn entries_of(&self, set: u32) -> Vec<Entry> {
        let entry = |way| Entry::decode(&self.shape, &self.entries[self.bytes_of(Slot::new(set, way))]);
        (0..self.shape.ways).map(|way| entry(way).unwrap_or_default()).collect()
    }
}

/// Copies whole lines from slot to slot, including invalid sectors.
async fn copy_lines(
    from: &Rc<dyn BlockDevice>,
    to: &Rc<dyn BlockDevice>,
    shape: &Shape,
    lines: &[(ByteOffset, ByteOffset)],
) -> IoResult {
    let len = shape.line_len() as usize;
    let mut bytes = AlignedBuf::zeroed(len * lines.len());
    let reads: SmallVec<[Io<'_>; 16]> = bytes
        .chunks_exact_mut(len)
        .zip(lines)
        .map(|(piece, (at, _))| from.read(*at, ReadBuf::new(piece)))
        .collect();
    join(reads).await?;
    let writes: SmallVec<[Io<'_>; 16]> = bytes
        .chunks_exact(len)
        .zip(lines)
        .map(|(piece, (_, at))| to.write(*at, WriteBuf::new(piece), WriteFlags::NONE))
        .collect();
    join(writes).await
}

/// Writes the first page of each set, durably.
async fn write_pages(to: &Rc<dyn BlockDevice>, superblock: &Superblock, places: &Places) -> IoResult {
    let shape = superblock.shape;
    let mut bytes = AlignedBuf::zeroed(shape.page_len as usize);
    for set in 0..shape.sets {
        let version = Version { sequence: 1, turn: 0 };
        page::encode(
            &shape,
            superblock.seed(),
            set,
            version,
            &places.entries_of(set),
            &mut bytes,
        );
        let at = shape.page_at(set, false);
        to.write(at, WriteBuf::new(&bytes), WriteFlags::NONE).await?;
    }
    to.flush().await
}
