//! The walk over all references to clusters of the image.

use crate::bitmap::read_bitmaps;
use crate::check::count::{Counts, Use};
use crate::check::entries::{Examined, Remedy};
use crate::check::{CheckError, CheckOptions, FINDINGS_MAX, Image, REFCOUNT_ENTRY_RESERVED, Report, words};
use crate::entry::{ALL_ALLOCATED, Entry, OFFSET};
use crate::header::{AUTOCLEAR_BITMAPS, L1_BYTES_MAX, TableAt};
use crate::open::{OpenError, check_tables};
use crate::snapshot::read_snapshots;

/// The number of bytes of a bitmap's table that are read at once, and the maximum number of entries of a table
/// (QEMU's bound).
const TABLE_STEP: u64 = 64 << 10;
const BITMAP_TABLE_ENTRIES_MAX: u64 = 0x800_0000;
/// The reserved bits of a bitmap's table entry, and the flag for a part of ones.
const BITMAP_ENTRY_RESERVED: u64 = 0xff00_0000_0000_01fe;
const BITMAP_ALL_ONES: u64 = 1;

/// A walk over all metadata of an image, and its results.
pub(super) struct Walk<'a> {
    pub(super) image: &'a Image,
    pub(super) counts: Counts,
    pub(super) report: Report,
    pub(super) options: CheckOptions,
    /// References are counted as they are after entries have been corrected and dropped.
    mended: bool,
    /// Entries that lead past the end of the file cannot be dropped.
    pub(super) leads_past_end: bool,
}

/// An L1 table to walk.
#[derive(Clone, Debug)]
pub(super) struct L1 {
    pub(super) at: TableAt,
    /// The ID of the snapshot; `None` for the active table.
    pub(super) snapshot: Option<String>,
}

impl L1 {
    pub(super) fn name(&self) -> String {
        match &self.snapshot {
            None => "the active L1 table".to_owned(),
            Some(id) => format!("the L1 table of snapshot {id}"),
        }
    }
}

impl<'a> Walk<'a> {
    pub(super) fn new(image: &'a Image, options: CheckOptions, mended: bool) -> Self {
        let report = Report {
            dirty: image.header.dirty,
            corrupt: image.header.corrupt,
            total_clusters: image.header.size.div_ceil(image.cluster_len()),
            ..Report::default()
        };
        Self {
            image,
            counts: Counts::new(options.memory_max.get()),
            report,
            options,
            mended,
            leads_past_end: false,
        }
    }

    /// Walks the whole image. Returns the L1 tables that were walked.
    pub(super) async fn all(&mut self) -> Result<Vec<L1>, CheckError> {
        // Tables past the end of the file are reported where they are walked.
        if let Err(OpenError::Overlap { first, second, .. }) =
            check_tables(&self.image.name, &self.image.header, self.image.size())
        {
            let text = format!("{first} and {second} overlap");
            self.report.lost(|| text.clone());
            self.report.overlap = Some(text);
        }
        self.refer(0, self.image.cluster_len(), || "the header".to_owned())?;
        let mut tables = vec![L1 {
            at: self.image.header.l1,
            snapshot: None,
        }];
        self.l1(&tables[0]).await?;
        let found = self.snapshots().await?;
        tables.extend(found);
        self.bitmaps().await?;
        self.refcount_structures()?;
        Ok(tables)
    }

    async fn snapshots(&mut self) -> Result<Vec<L1>, CheckError> {
        let header = &self.image.header;
        let table = read_snapshots(&self.image.file, header).await?;
        if self.image.has_senseless_snapshots_offset() {
            let offset = header.snapshots_offset;
            self.report
                .mendable(|| format!("there are no snapshots, and the offset of their table, {offset:#x}, is invalid"));
        }
        if let Some(damage) = table.damage {
            self.report.lost(|| format!("the snapshot table is damaged: {damage}"));
        }
        for index in table.incomplete {
            self.report
                .lost(|| format!("entry {index} of the snapshot table lacks the extra data that version 3 requires"));
        }
        if header.shape.data_file && header.snapshots > 0 {
            self.report
                .lost(|| "there are internal snapshots although the data is in an external data file".to_owned());
        }
        let mut walked = Vec::new();
        for snapshot in table.snapshots {
            let l1 = L1 {
                at: snapshot.l1,
                snapshot: Some(snapshot.id),
            };
            if !self.image.is_aligned(l1.at.offset) || l1.at.entries > L1_BYTES_MAX / 8 {
                let (offset, entries) = (l1.at.offset, l1.at.entries);
                self.report
                    .lost(|| format!("{} is invalid: {entries} entries at {offset:#x}", l1.name()));
                continue;
            }
            self.l1(&l1).await?;
            walked.push(l1);
        }
        // The length of a table that is cut off is at least one byte more than the readable part.
        let len = match table.is_cut {
            true => self.image.size().saturating_sub(header.snapshots_offset) + 1,
            false => table.len,
        };
        self.refer(header.snapshots_offset, len, || "the snapshot table".to_owned())?;
        Ok(walked)
    }

    async fn l1(&mut self, l1: &L1) -> Result<(), CheckError> {
        let image = self.image;
        self.refer(l1.at.offset, l1.at.entries * 8, || l1.name())?;
        if l1.at.offset >= image.size() {
            return Ok(());
        }
        let entries = image.read_table(l1.at).await?;
        for (index, entry) in entries.into_iter().enumerate().filter(|(_, entry)| *entry != 0) {
            let examined = image.examine_l1(entry);
            self.note(&examined, || format!("entry {index} of {}, {entry:#018x},", l1.name()));
            if let Some((offset, len)) = examined.refers_to {
                self.count(offset, len, Use::L2Table)?;
                self.l2(l1, index as u64, offset).await?;
            }
        }
        Ok(())
    }

    async fn l2(&mut self, l1: &L1, l1_index: u64, offset: u64) -> Result<(), CheckError> {
        let image = self.image;
        let shape = image.header.shape;
        let bytes = image.read_bytes(offset, shape.cluster_len()).await?;
        self.note_cut_table(l1, l1_index, offset);
        let active = l1.snapshot.is_none();
        // The offset of the next cluster if the disk were not fragmented.
        let mut next = None;
        for (index, entry) in entries(image, &bytes).enumerate() {
            if entry == Entry::UNALLOCATED {
                continue;
            }
            let guest = guest_offset(image, l1_index, index);
            let examined = image.examine_l2(entry, guest);
            self.note(&examined, || {
                format!(
                    "the entry of guest offset {guest:#x} in {}, {:#018x},",
                    l1.name(),
                    entry.word
                )
            });
            if active {
                self.count_fragments(entry, &examined, &mut next);
            }
            let Some((at, len)) = examined.refers_to else {
                continue;
            };
            // QEMU does not count entries that it considers invalid.
            let senseless = entry.is_compressed() && entry.bitmap != 0 && !self.mended;
            let gone = self.mended && examined.is_dropped();
            if !senseless && !gone {
                self.count(at, len, Use::Other)?;
            }
        }
        Ok(())
    }

    /// Reports an L2 table whose end is missing: every program reads the rest as zeros, which means unallocated.
    fn note_cut_table(&mut self, l1: &L1, l1_index: u64, offset: u64) {
        let (image, shape) = (self.image, self.image.header.shape);
        let Some(there) = image
            .size()
            .checked_sub(offset)
            .filter(|len| *len < shape.cluster_len())
        else {
            return;
        };
        let clusters = there / shape.entry_len();
        let first = ((l1_index << shape.table_bits()) + clusters) << shape.cluster_bits;
        let end = ((l1_index + 1) << shape.table_bits() << shape.cluster_bits).min(image.header.size);
        if first >= end {
            return;
        }
        let which = format!(
            "the L2 table at {offset:#x} in {}, for guest offsets from {first:#x} to {end:#x}",
            l1.name()
        );
        self.report.past_end += 1;
        self.report.mendable(|| format!("the file ends within {which}"));
        if self.report.cut_tables.len() < FINDINGS_MAX {
            self.report.cut_tables.push(which);
        }
    }

    /// Counts fragmented clusters like QEMU, so that the numbers agree.
    fn count_fragments(&mut self, entry: Entry, examined: &Examined<Entry>, next: &mut Option<u64>) {
        let (report, header) = (&mut self.report, &self.image.header);
        if entry.is_compressed() {
            if !header.shape.data_file && entry.bitmap == 0 {
                report.allocated_clusters += 1;
                report.compressed_clusters += 1;
                report.fragmented_clusters += 1;
            }
            return;
        }
        let torn = header.shape.extended && entry.bitmap & ALL_ALLOCATED & entry.bitmap >> 32 != 0;
        let Some(host) = entry.host(header.shape).filter(|_| !torn) else {
            return;
        };
        debug_assert!(examined.refers_to.is_some() || !examined.faults.is_empty() || header.shape.data_file);
        report.allocated_clusters += 1;
        if next.is_some_and(|next| next != host) {
            report.fragmented_clusters += 1;
        }
        *next = Some(host + header.shape.cluster_len());
    }

    async fn bitmaps(&mut self) -> Result<(), CheckError> {
        let image = self.image;
        let Some(at) = image
            .header
            .bitmaps
            .filter(|_| image.header.autoclear & AUTOCLEAR_BITMAPS != 0)
        else {
            return Ok(());
        };
        self.refer_bitmap(at.directory_offset, at.directory_len, || {
            "the bitmap directory".to_owned()
        })?;
        if self.report.cut_bitmaps {
            return Ok(());
        }
        let (bitmaps, damage) = read_bitmaps(&image.file, at).await?;
        if let Some(damage) = damage {
            self.report.lost(|| format!("the bitmaps are damaged: {damage}"));
        }
        for bitmap in bitmaps {
            let table = bitmap.table;
            let fits = image.is_aligned(table.offset) && table.entries <= BITMAP_TABLE_ENTRIES_MAX;
            if !fits {
                self.report.lost(|| {
                    let TableAt { offset, entries } = table;
                    format!(
                        "the table of bitmap '{}' is invalid: {entries} entries at {offset:#x}",
                        bitmap.name
                    )
                });
                continue;
            }
            self.refer_bitmap(table.offset, table.entries * 8, || {
                format!("the table of bitmap '{}'", bitmap.name)
            })?;
            if image.holds(table.offset, table.entries * 8) {
                self.bitmap_table(table, &bitmap.name).await?;
            }
        }
        Ok(())
    }

    async fn bitmap_table(&mut self, table: TableAt, name: &str) -> Result<(), CheckError> {
        let bytes_all = table.entries * 8;
        let mut from = 0;
        while from < bytes_all {
            let len = (bytes_all - from).min(TABLE_STEP);
            let bytes = self
                .image
                .read_bytes(table.offset + from, len.next_multiple_of(512))
                .await?;
            for (index, entry) in words(&bytes[..len as usize]).enumerate() {
                let offset = entry & OFFSET;
                let senseless = entry & BITMAP_ENTRY_RESERVED != 0
                    || offset != 0 && entry & BITMAP_ALL_ONES != 0
                    || !self.image.is_aligned(offset);
                if senseless {
                    let index = from / 8 + index as u64;
                    self.report
                        .lost(|| format!("entry {index} of the table of bitmap '{name}', {entry:#018x}, is invalid"));
                } else if offset != 0 {
                    self.refer_bitmap(offset, self.image.cluster_len(), || {
                        format!("a cluster of bitmap '{name}'")
                    })?;
                }
            }
            from += len;
        }
        Ok(())
    }

    fn refcount_structures(&mut self) -> Result<(), CheckError> {
        let image = self.image;
        for (index, entry) in image
            .refcount_table
            .iter()
            .enumerate()
            .filter(|(_, entry)| **entry != 0)
        {
            let offset = entry & !REFCOUNT_ENTRY_RESERVED;
            let wrong = if entry & REFCOUNT_ENTRY_RESERVED != 0 {
                Some("has reserved bits set")
            } else if !image.is_aligned(offset) {
                Some("is not aligned to clusters")
            } else if image.refcount_block(index as u64).is_none() {
                Some("points past the end of the file")
            } else {
                None
            };
            if let Some(wrong) = wrong {
                self.report.structures_unusable = true;
                self.report
                    .derived(|| format!("entry {index} of the refcount table, {entry:#018x}, {wrong}"));
                continue;
            }
            self.count(offset, image.cluster_len(), Use::Other)?;
            let count = self.counts.get(image.cluster_of(offset));
            if count != 1 {
                self.report.structures_unusable = true;
                self.report.derived(|| {
                    format!(
                        "refcount block {index} at {offset:#x} is also used for something else ({count} references)"
                    )
                });
            }
        }
        let TableAt { offset, entries } = image.header.refcount_table;
        if !image.holds(offset, entries * 8) {
            self.report.structures_unusable = true;
            self.report.derived(|| {
                format!("the refcount table at {offset:#x} lies wholly or partly past the end of the file")
            });
        }
        if image.is_past_end(offset, entries * 8) {
            return Ok(());
        }
        self.count(offset, entries * 8, Use::Other)?;
        if image
            .clusters_of(offset, entries * 8)
            .any(|cluster| self.counts.get(cluster) != 1)
        {
            self.report.structures_unusable = true;
        }
        Ok(())
    }

    fn note<E>(&mut self, examined: &Examined<E>, which: impl Fn() -> String) {
        self.report.past_end += u64::from(examined.is_past_end);
        for fault in &examined.faults {
            match fault.remedy {
                Remedy::None => self.report.lost(|| format!("{} {}", which(), fault.what)),
                Remedy::Mend | Remedy::Drop => self.report.mendable(|| format!("{} {}", which(), fault.what)),
            }
        }
    }

    /// Counts a reference to `len` bytes at `offset`, without which no repair is possible.
    fn refer(&mut self, offset: u64, len: u64, what: impl Fn() -> String) -> Result<(), CheckError> {
        if self.image.holds(offset, len) {
            return self.count(offset, len, Use::Other);
        }
        let text = self.cut(offset, len, what);
        self.report.lost(|| text.clone());
        self.report.cut_off.get_or_insert(text);
        Ok(())
    }

    /// Counts a reference that only bitmaps need.
    fn refer_bitmap(&mut self, offset: u64, len: u64, what: impl Fn() -> String) -> Result<(), CheckError> {
        if self.image.holds(offset, len) {
            return self.count(offset, len, Use::Other);
        }
        let text = self.cut(offset, len, what);
        self.report.mendable(|| text);
        self.report.cut_bitmaps = true;
        Ok(())
    }

    fn cut(&mut self, offset: u64, len: u64, what: impl Fn() -> String) -> String {
        self.report.past_end += 1;
        let where_to = if offset < self.image.size() { "reaches" } else { "lies" };
        format!(
            "{}, {len} bytes at {offset:#x}, {where_to} past the end of the file",
            what()
        )
    }

    fn count(&mut self, offset: u64, len: u64, used_as: Use) -> Result<(), CheckError> {
        if len == 0 {
            return Ok(());
        }
        let max = self.image.header.shape.refcount_max();
        for cluster in self.image.clusters_of(offset, len) {
            if self.counts.get(cluster) >= max {
                self.report.lost(|| {
                    format!(
                        "cluster {cluster} at {:#x} is used more than {max} times, more than its refcount can express",
                        cluster << self.image.header.shape.cluster_bits
                    )
                });
                continue;
            }
            let added = self.counts.add(cluster, used_as);
            added.map_err(self.image.out_of_memory(self.options))?;
        }
        Ok(())
    }
}

/// Returns the entries of an L2 table.
pub(super) fn entries<'a>(image: &Image, table: &'a [u8]) -> impl Iterator<Item = Entry> + use<'a> {
    let extended = image.header.shape.extended;
    let mut words = words(table);
    std::iter::from_fn(move || {
        let word = words.next()?;
        let bitmap = if extended { words.next()? } else { 0 };
        Some(Entry { word, bitmap })
    })
}

/// Returns the guest offset of entry `index` of the L2 table of L1 entry `l1_index`.
pub(super) fn guest_offset(image: &Image, l1_index: u64, index: usize) -> u64 {
    let shape = image.header.shape;
    ((l1_index << shape.table_bits()) + index as u64) << shape.cluster_bits
}
