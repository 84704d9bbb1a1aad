//! The walk over all references to clusters of the image.

use crate::bitmap::read_bitmaps;
use crate::check::count::{ReferenceCounts, ReferenceKind};
use crate::check::entries::{Examination, Remedy};
use crate::check::{CheckError, CheckOptions, CheckReport, FINDINGS_MAX, Image, REFCOUNT_ENTRY_RESERVED, words};
use crate::entry::{ALL_ALLOCATED, L2Entry, OFFSET};
use crate::header::{AUTOCLEAR_BITMAPS, L1_BYTES_MAX, TableLocation};
use crate::open::{OpenError, check_tables};
use crate::snapshot::read_snapshots;

/// The number of bytes of a bitmap's table that are read at once, and the maximum number of entries of a table
/// (QEMU's bound).
const TABLE_STEP_BYTES: u64 = 64 << 10;
const BITMAP_TABLE_ENTRIES_MAX: u64 = 0x800_0000;
/// The reserved bits of a bitmap's table entry, and the flag for a part of ones.
const BITMAP_ENTRY_RESERVED: u64 = 0xff00_0000_0000_01fe;
const BITMAP_ALL_ONES: u64 = 1;

/// A walk over all metadata of an image, and its results.
pub(super) struct Walk<'a> {
    pub(super) image: &'a Image,
    pub(super) counts: ReferenceCounts,
    pub(super) report: CheckReport,
    pub(super) options: CheckOptions,
    /// References are counted as they are after entries have been corrected and dropped.
    as_repaired: bool,
    /// Entries that lead past the end of the file cannot be dropped.
    pub(super) points_past_end: bool,
}

/// An L1 table to walk.
#[derive(Clone, Debug)]
pub(super) struct L1Table {
    pub(super) at: TableLocation,
    /// The ID of the snapshot; `None` for the active table.
    pub(super) snapshot: Option<String>,
}

impl L1Table {
    pub(super) fn name(&self) -> String {
        match &self.snapshot {
            None => "the active L1 table".to_owned(),
            Some(id) => format!("the L1 table of snapshot {id}"),
        }
    }
}

impl<'a> Walk<'a> {
    pub(super) fn new(image: &'a Image, options: CheckOptions, mended: bool) -> Self {
        let report = CheckReport {
            dirty: image.header.dirty,
            corrupt: image.header.corrupt,
            total_clusters: image.header.size.div_ceil(image.cluster_len()),
            ..CheckReport::default()
        };
        Self {
            image,
            counts: ReferenceCounts::new(options.memory_max.get()),
            report,
            options,
            as_repaired: mended,
            points_past_end: false,
        }
    }

    /// Walks the whole image. Returns the L1 tables that were walked.
    pub(super) async fn run(&mut self) -> Result<Vec<L1Table>, CheckError> {
        // Tables past the end of the file are reported where they are walked.
        if let Err(OpenError::Overlap { first, second, .. }) =
            check_tables(&self.image.name, &self.image.header, self.image.size())
        {
            let text = format!("{first} and {second} overlap");
            self.report.add_unrepairable(|| text.clone());
            self.report.overlap = Some(text);
        }
        self.count_required(0, self.image.cluster_len(), || "the header".to_owned())?;
        let mut tables = vec![L1Table { at: self.image.header.l1, snapshot: None }];
        self.walk_l1(&tables[0]).await?;
        let found = self.walk_snapshots().await?;
        tables.extend(found);
        self.walk_bitmaps().await?;
        self.walk_refcount_structures()?;
        Ok(tables)
    }

    async fn walk_snapshots(&mut self) -> Result<Vec<L1Table>, CheckError> {
        let header = &self.image.header;
        let table = read_snapshots(&self.image.file, header).await?;
        if self.image.has_invalid_snapshots_offset() {
            let offset = header.snapshots_offset;
            self.report.add_repairable(|| {
                format!("there are no snapshots, and the offset of their table, {offset:#x}, is invalid")
            });
        }
        if let Some(damage) = table.damage {
            self.report.add_unrepairable(|| format!("the snapshot table is damaged: {damage}"));
        }
        for index in table.incomplete {
            self.report.add_unrepairable(|| {
                format!("entry {index} of the snapshot table lacks the extra data that version 3 requires")
            });
        }
        if header.shape.data_file && header.snapshots > 0 {
            self.report.add_unrepairable(|| {
                "there are internal snapshots although the data is in an external data file".to_owned()
            });
        }
        let mut walked = Vec::new();
        for snapshot in table.snapshots {
            let l1 = L1Table { at: snapshot.l1, snapshot: Some(snapshot.id) };
            if !self.image.is_aligned(l1.at.offset) || l1.at.entries > L1_BYTES_MAX / 8 {
                let (offset, entries) = (l1.at.offset, l1.at.entries);
                self.report.add_unrepairable(|| format!("{} is invalid: {entries} entries at {offset:#x}", l1.name()));
                continue;
            }
            self.walk_l1(&l1).await?;
            walked.push(l1);
        }
        // The length of a table that is cut off is at least one byte more than the readable part.
        let len = match table.is_truncated {
            true => self.image.size().saturating_sub(header.snapshots_offset) + 1,
            false => table.len,
        };
        self.count_required(header.snapshots_offset, len, || "the snapshot table".to_owned())?;
        Ok(walked)
    }

    async fn walk_l1(&mut self, l1: &L1Table) -> Result<(), CheckError> {
        let image = self.image;
        self.count_required(l1.at.offset, l1.at.entries * 8, || l1.name())?;
        if l1.at.offset >= image.size() {
            return Ok(());
        }
        let entries = image.read_table(l1.at).await?;
        for (index, entry) in entries.into_iter().enumerate().filter(|(_, entry)| *entry != 0) {
            let examined = image.examine_l1(entry);
            self.report_faults(&examined, || format!("entry {index} of {}, {entry:#018x},", l1.name()));
            if let Some((offset, len)) = examined.refers_to {
                self.count(offset, len, ReferenceKind::L2Table)?;
                self.walk_l2(l1, index as u64, offset).await?;
            }
        }
        Ok(())
    }

    async fn walk_l2(&mut self, l1: &L1Table, l1_index: u64, offset: u64) -> Result<(), CheckError> {
        let image = self.image;
        let shape = image.header.shape;
        let bytes = image.read_bytes(offset, shape.cluster_len()).await?;
        self.report_truncated_table(l1, l1_index, offset);
        let active = l1.snapshot.is_none();
        // The offset of the next cluster if the disk were not fragmented.
        let mut next = None;
        for (index, entry) in entries(image, &bytes).enumerate() {
            if entry == L2Entry::UNALLOCATED {
                continue;
            }
            let guest = guest_offset(image, l1_index, index);
            let examined = image.examine_l2(entry, guest);
            self.report_faults(&examined, || {
                format!("the entry of guest offset {guest:#x} in {}, {:#018x},", l1.name(), entry.word)
            });
            if active {
                self.count_fragments(entry, &examined, &mut next);
            }
            let Some((at, len)) = examined.refers_to else {
                continue;
            };
            // QEMU does not count entries that it considers invalid.
            let is_invalid = entry.is_compressed() && entry.bitmap != 0 && !self.as_repaired;
            let is_dropped = self.as_repaired && examined.is_dropped();
            if !is_invalid && !is_dropped {
                self.count(at, len, ReferenceKind::Other)?;
            }
        }
        Ok(())
    }

    /// Reports an L2 table whose end is missing: every program reads the rest as zeros, which means unallocated.
    fn report_truncated_table(&mut self, l1: &L1Table, l1_index: u64, offset: u64) {
        let (image, shape) = (self.image, self.image.header.shape);
        let Some(available) = image.size().checked_sub(offset).filter(|len| *len < shape.cluster_len()) else {
            return;
        };
        let clusters = available / shape.entry_len();
        let first = ((l1_index << shape.table_bits()) + clusters) << shape.cluster_bits;
        let end = ((l1_index + 1) << shape.table_bits() << shape.cluster_bits).min(image.header.size);
        if first >= end {
            return;
        }
        let which =
            format!("the L2 table at {offset:#x} in {}, for guest offsets from {first:#x} to {end:#x}", l1.name());
        self.report.past_end += 1;
        self.report.add_repairable(|| format!("the file ends within {which}"));
        if self.report.truncated_tables.len() < FINDINGS_MAX {
            self.report.truncated_tables.push(which);
        }
    }

    /// Counts fragmented clusters like QEMU, so that the numbers agree.
    fn count_fragments(&mut self, entry: L2Entry, examined: &Examination<L2Entry>, next: &mut Option<u64>) {
        let (report, header) = (&mut self.report, &self.image.header);
        if entry.is_compressed() {
            if !header.shape.data_file && entry.bitmap == 0 {
                report.allocated_clusters += 1;
                report.compressed_clusters += 1;
                report.fragmented_clusters += 1;
            }
            return;
        }
        let is_contradictory = header.shape.extended && entry.bitmap & ALL_ALLOCATED & entry.bitmap >> 32 != 0;
        let Some(host) = entry.host(header.shape).filter(|_| !is_contradictory) else {
            return;
        };
        debug_assert!(examined.refers_to.is_some() || !examined.faults.is_empty() || header.shape.data_file);
        report.allocated_clusters += 1;
        if next.is_some_and(|next| next != host) {
            report.fragmented_clusters += 1;
        }
        *next = Some(host + header.shape.cluster_len());
    }

    async fn walk_bitmaps(&mut self) -> Result<(), CheckError> {
        let image = self.image;
        let Some(at) = image.header.bitmaps.filter(|_| image.header.autoclear & AUTOCLEAR_BITMAPS != 0) else {
            return Ok(());
        };
        self.count_bitmap(at.directory_offset, at.directory_len, || "the bitmap directory".to_owned())?;
        if self.report.truncated_bitmaps {
            return Ok(());
        }
        let (bitmaps, damage) = read_bitmaps(&image.file, at).await?;
        if let Some(damage) = damage {
            self.report.add_unrepairable(|| format!("the bitmaps are damaged: {damage}"));
        }
        for bitmap in bitmaps {
            let table = bitmap.table;
            let fits = image.is_aligned(table.offset) && table.entries <= BITMAP_TABLE_ENTRIES_MAX;
            if !fits {
                self.report.add_unrepairable(|| {
                    let TableLocation { offset, entries } = table;
                    format!("the table of bitmap '{}' is invalid: {entries} entries at {offset:#x}", bitmap.name)
                });
                continue;
            }
            self.count_bitmap(table.offset, table.entries * 8, || format!("the table of bitmap '{}'", bitmap.name))?;
            if image.contains(table.offset, table.entries * 8) {
                self.walk_bitmap_table(table, &bitmap.name).await?;
            }
        }
        Ok(())
    }

    async fn walk_bitmap_table(&mut self, table: TableLocation, name: &str) -> Result<(), CheckError> {
        let bytes_all = table.entries * 8;
        let mut from = 0;
        while from < bytes_all {
            let len = (bytes_all - from).min(TABLE_STEP_BYTES);
            let bytes = self.image.read_bytes(table.offset + from, len.next_multiple_of(512)).await?;
            for (index, entry) in words(&bytes[..len as usize]).enumerate() {
                let offset = entry & OFFSET;
                let is_invalid = entry & BITMAP_ENTRY_RESERVED != 0
                    || offset != 0 && entry & BITMAP_ALL_ONES != 0
                    || !self.image.is_aligned(offset);
                if is_invalid {
                    let index = from / 8 + index as u64;
                    self.report.add_unrepairable(|| {
                        format!("entry {index} of the table of bitmap '{name}', {entry:#018x}, is invalid")
                    });
                } else if offset != 0 {
                    self.count_bitmap(offset, self.image.cluster_len(), || format!("a cluster of bitmap '{name}'"))?;
                }
            }
            from += len;
        }
        Ok(())
    }

    fn walk_refcount_structures(&mut self) -> Result<(), CheckError> {
        let image = self.image;
        for (index, entry) in image.refcount_table.iter().enumerate().filter(|(_, entry)| **entry != 0) {
            let offset = entry & !REFCOUNT_ENTRY_RESERVED;
            let fault = if entry & REFCOUNT_ENTRY_RESERVED != 0 {
                Some("has reserved bits set")
            } else if !image.is_aligned(offset) {
                Some("is not aligned to clusters")
            } else if image.refcount_block(index as u64).is_none() {
                Some("points past the end of the file")
            } else {
                None
            };
            if let Some(wrong) = fault {
                self.report.structures_unusable = true;
                self.report.add_derived(|| format!("entry {index} of the refcount table, {entry:#018x}, {wrong}"));
                continue;
            }
            self.count(offset, image.cluster_len(), ReferenceKind::Other)?;
            let count = self.counts.get(image.cluster_of(offset));
            if count != 1 {
                self.report.structures_unusable = true;
                self.report.add_derived(|| {
                    format!(
                        "refcount block {index} at {offset:#x} is also used for something else ({count} references)"
                    )
                });
            }
        }
        let TableLocation { offset, entries } = image.header.refcount_table;
        if !image.contains(offset, entries * 8) {
            self.report.structures_unusable = true;
            self.report.add_derived(|| {
                format!("the refcount table at {offset:#x} lies wholly or partly past the end of the file")
            });
        }
        if image.is_past_end(offset, entries * 8) {
            return Ok(());
        }
        self.count(offset, entries * 8, ReferenceKind::Other)?;
        if image.clusters_of(offset, entries * 8).any(|cluster| self.counts.get(cluster) != 1) {
            self.report.structures_unusable = true;
        }
        Ok(())
    }

    fn report_faults<E>(&mut self, examined: &Examination<E>, which: impl Fn() -> String) {
        self.report.past_end += u64::from(examined.is_past_end);
        for fault in &examined.faults {
            match fault.remedy {
                Remedy::None => self.report.add_unrepairable(|| format!("{} {}", which(), fault.what)),
                Remedy::Correct | Remedy::Drop => self.report.add_repairable(|| format!("{} {}", which(), fault.what)),
            }
        }
    }

    /// Counts a reference to `len` bytes at `offset`, without which no repair is possible.
    fn count_required(&mut self, offset: u64, len: u64, what: impl Fn() -> String) -> Result<(), CheckError> {
        if self.image.contains(offset, len) {
            return self.count(offset, len, ReferenceKind::Other);
        }
        let text = self.describe_past_end(offset, len, what);
        self.report.add_unrepairable(|| text.clone());
        self.report.cut_off.get_or_insert(text);
        Ok(())
    }

    /// Counts a reference that only bitmaps need.
    fn count_bitmap(&mut self, offset: u64, len: u64, what: impl Fn() -> String) -> Result<(), CheckError> {
        if self.image.contains(offset, len) {
            return self.count(offset, len, ReferenceKind::Other);
        }
        let text = self.describe_past_end(offset, len, what);
        self.report.add_repairable(|| text);
        self.report.truncated_bitmaps = true;
        Ok(())
    }

    fn describe_past_end(&mut self, offset: u64, len: u64, what: impl Fn() -> String) -> String {
        self.report.past_end += 1;
        let where_to = if offset < self.image.size() { "reaches" } else { "lies" };
        format!("{}, {len} bytes at {offset:#x}, {where_to} past the end of the file", what())
    }

    fn count(&mut self, offset: u64, len: u64, kind: ReferenceKind) -> Result<(), CheckError> {
        if len == 0 {
            return Ok(());
        }
        let max = self.image.header.shape.refcount_max();
        for cluster in self.image.clusters_of(offset, len) {
            if self.counts.get(cluster) >= max {
                self.report.add_unrepairable(|| {
                    format!(
                        "cluster {cluster} at {:#x} is used more than {max} times, more than its refcount can express",
                        cluster << self.image.header.shape.cluster_bits
                    )
                });
                continue;
            }
            let added = self.counts.add(cluster, kind);
            added.map_err(self.image.out_of_memory(self.options))?;
        }
        Ok(())
    }
}

/// Returns the entries of an L2 table.
pub(super) fn entries<'a>(image: &Image, table: &'a [u8]) -> impl Iterator<Item = L2Entry> + use<'a> {
    let extended = image.header.shape.extended;
    let mut words = words(table);
    std::iter::from_fn(move || {
        let word = words.next()?;
        let bitmap = if extended { words.next()? } else { 0 };
        Some(L2Entry { word, bitmap })
    })
}

/// Returns the guest offset of entry `index` of the L2 table of L1 entry `l1_index`.
pub(super) fn guest_offset(image: &Image, l1_index: u64, index: usize) -> u64 {
    let shape = image.header.shape;
    ((l1_index << shape.table_bits()) + index as u64) << shape.cluster_bits
}
