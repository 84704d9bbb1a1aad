//! Repair of an image.
//!
//! 1. Entries are corrected, and those whose target does not exist are dropped: each write makes one sector better.
//!    *Barrier.*
//! 2. Refcounts are set to the counted references: in place, where every sector is old or right; or, if the structure
//!    is unusable, in a new one to which the header points once it is durable. No cluster with references is freed,
//!    and no cluster at all while errors are left that may hide references. *Barrier.*
//! 3. The flags of the active tables follow the refcounts. *Barrier.*
//! 4. The image is checked again. If no error is left, the dirty and corrupt bits are cleared. *Barrier.*
//!
//! A table that shares clusters with another use is never written: its apparent entries may be a guest's data.
//!
//! An image whose L1 table, snapshot table or a snapshot's L1 table is cut off is not changed: the file would grow
//! over the lost part, which could then no longer be distinguished from zeros. For the same reason refcounts are not
//! rebuilt while entries that cannot be dropped lead past the end of the file. An image in which the L1 table, the
//! refcount table or the header overlap is not changed either.

use std::rc::Rc;

use larder_block::{AlignedBuf, BlockDevice, ByteLen, ByteOffset, ReadBuf, WriteBuf, WriteFlags};

use crate::check::entries::Remedy;
use crate::check::walk::{L1Table, Walk, entries, guest_offset};
use crate::check::{CheckError, CheckOptions, CheckReport, Image, check, copied, stored, words};
use crate::header::{self, AUTOCLEAR_BITMAPS, AUTOCLEAR_RAW_DATA, AUTOCLEAR_SESSION, HEADER_SECTOR_BYTES};
use crate::journal::is_of_this_boot;

/// The maximum number of dropped entries that are reported individually.
const DROPPED_LISTED_MAX: usize = 200;

/// The kind of damage to repair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    /// Leaked clusters, if there is no other damage to which they may belong.
    Leaks,
    /// Refcounts, and the flags that follow from them; nothing if there is other damage. For images that are dirty.
    Refcounts,
    /// All damage that can be repaired.
    All,
}

/// The result of a repair.
#[derive(Clone, Debug, Default)]
pub struct RepairReport {
    /// The report before the repair.
    pub before: CheckReport,
    /// The report after the repair. If it [is hopeless](CheckReport::is_unsafe_to_repair), nothing was changed.
    pub after: CheckReport,
    /// The first entries whose target did not exist, and which are zero or unallocated now.
    pub dropped: Vec<String>,
    /// The number of all dropped entries.
    pub dropped_count: u64,
    /// The refcount table and its blocks were rebuilt.
    pub rebuilt: bool,
}

impl RepairReport {
    /// Returns the number of errors that were fixed.
    pub fn errors_fixed(&self) -> u64 {
        self.before.errors.saturating_sub(self.after.errors)
    }

    /// Returns the number of leaked clusters that were freed.
    pub fn leaks_fixed(&self) -> u64 {
        self.before.leaks.saturating_sub(self.after.leaks)
    }
}

/// Checks the image in `file`, a device with blocks of 512 bytes, and repairs it. No other program may use the image
/// meanwhile.
///
/// # Errors
/// See [`CheckError`]. The image is no worse then than before.
pub async fn repair(
    file: &Rc<dyn BlockDevice>,
    what: Repair,
    options: CheckOptions,
) -> Result<RepairReport, CheckError> {
    let before = check(file, options).await?;
    let is_refused = match what {
        // The file would grow over the lost part, which could then no longer be distinguished from zeros.
        Repair::All => before.is_unsafe_to_repair(),
        Repair::Leaks => before.leaks == 0 || before.repairable + before.unrepairable > 0 || before.structures_unusable,
        Repair::Refcounts => before.repairable + before.unrepairable > 0,
    };
    let mut repaired = RepairReport { after: before.clone(), before, ..RepairReport::default() };
    if repaired.before.errors + repaired.before.leaks > 0 && !is_refused {
        let len = repair_image(file, what, options, &mut repaired).await?;
        let options = CheckOptions { file_len: options.file_len.map(|_| len), ..options };
        repaired.after = check(file, options).await?;
    }
    let after = &mut repaired.after;
    if (after.dirty || after.corrupt) && after.errors == 0 {
        Image::read(file, CheckOptions::default())
            .await?
            .change_header(|sector| header::set_state(sector, false, false))
            .await?;
        (after.dirty, after.corrupt) = (false, false);
    }
    Ok(repaired)
}

/// Discards a killed server's journal with its changes that are not in the image: the journal is invalid from then
/// on. No other program may use the image meanwhile.
///
/// # Errors
/// See [`CheckError`].
pub async fn discard_session(file: &Rc<dyn BlockDevice>) -> Result<(), CheckError> {
    let image = Image::read(file, CheckOptions::default()).await?;
    let bits = image.header.autoclear;
    if bits & AUTOCLEAR_SESSION != 0 {
        let remaining_bits = bits & !AUTOCLEAR_SESSION;
        image.change_header(|sector| header::set_autoclear(sector, remaining_bits)).await?;
    }
    Ok(())
}

/// Repairs the image, and returns the length of the file after it.
async fn repair_image(
    file: &Rc<dyn BlockDevice>,
    what: Repair,
    options: CheckOptions,
    repaired: &mut RepairReport,
) -> Result<ByteLen, CheckError> {
    let mut image = Image::read(file, options).await?;
    // Clusters to which only a journal refers look leaked. A repair of refcounts is followed by a replay, which
    // raises them again.
    if is_of_this_boot(image.header.autoclear & AUTOCLEAR_SESSION) && what != Repair::Refcounts {
        return Err(CheckError::UnfinishedSession { name: image.name.to_string() });
    }
    image.extend_to_cluster().await?;
    for table in std::mem::take(&mut repaired.before.truncated_tables) {
        repaired.add_dropped(|| table);
    }
    let mut known = AUTOCLEAR_BITMAPS | AUTOCLEAR_RAW_DATA;
    if what == Repair::Refcounts {
        known |= AUTOCLEAR_SESSION;
    }
    if repaired.before.truncated_bitmaps {
        known &= !AUTOCLEAR_BITMAPS;
        repaired.add_dropped(|| "the persistent bitmaps".to_owned());
    }
    if image.header.autoclear & !known != 0 {
        let remaining_bits = image.header.autoclear & known;
        image.change_header(|sector| header::set_autoclear(sector, remaining_bits)).await?;
        image.header.autoclear = remaining_bits;
    }
    let mut walk = Walk::new(&image, options, what == Repair::All);
    let tables = walk.run().await?;
    if what == Repair::All && image.has_invalid_snapshots_offset() {
        image.change_header(header::clear_snapshots_offset).await?;
    }
    if what == Repair::All && walk.report.repairable > 0 {
        repair_entries(&mut walk, &tables, repaired).await?;
        file.flush().await?;
    }
    let (raise, lower) = (what != Repair::Leaks, walk.report.unrepairable == 0);
    let mut file_len = image.size();
    let is_unusable = repaired.before.structures_unusable || walk.report.structures_unusable;
    if raise && is_unusable && walk.points_past_end {
        // A new structure would be allocated where an unrepairable table points, and the lost data would read as that
        // structure.
        return Ok(ByteLen::new(file_len));
    }
    let too_low = if raise && is_unusable {
        file_len = stored::rebuild(&mut walk, !lower).await?.max(file_len);
        repaired.rebuilt = true;
        0
    } else {
        stored::correct(&mut walk, raise, lower).await?
    };
    file.flush().await?;
    if what != Repair::Leaks || too_low == 0 {
        copied::repair(&walk).await?;
        file.flush().await?;
    }
    Ok(ByteLen::new(file_len))
}

/// Corrects the entries of all tables, one table after the other.
async fn repair_entries(
    walk: &mut Walk<'_>,
    tables: &[L1Table],
    repaired: &mut RepairReport,
) -> Result<(), CheckError> {
    for l1 in tables.iter().filter(|l1| l1.at.offset < walk.image.size()) {
        repair_l1(walk, l1, repaired).await?;
    }
    Ok(())
}

async fn repair_l1(walk: &mut Walk<'_>, l1: &L1Table, repaired: &mut RepairReport) -> Result<(), CheckError> {
    let image = walk.image;
    let len = l1.at.entries * 8;
    let old = image.read_bytes(l1.at.offset, len.next_multiple_of(512)).await?;
    let mut new = old.to_vec();
    for (index, entry) in words(&old).take(l1.at.entries as usize).enumerate() {
        let examined = image.examine_l1(entry);
        if entry == 0 {
            continue;
        }
        if let Some((offset, _)) = examined.refers_to {
            repair_l2(walk, l1, index as u64, offset, repaired).await?;
        }
        if examined.is_dropped() {
            repaired.add_dropped(|| format!("entry {index} of {}, {entry:#018x}", l1.name()));
        }
        new[index * 8..][..8].copy_from_slice(&examined.corrected.to_be_bytes());
    }
    if new == old[..] {
        return Ok(());
    }
    if !copied::is_sole_user(walk, l1.at.offset, len) {
        let unchanged = words(&old).take(l1.at.entries as usize);
        walk.points_past_end |= unchanged.filter(|entry| *entry != 0).any(|entry| image.examine_l1(entry).is_past_end);
        walk.report.add_unrepairable(|| format!("{} is also used for something else", l1.name()));
        return Ok(());
    }
    image.write_changes(l1.at.offset, &old, &new).await
}

async fn repair_l2(
    walk: &mut Walk<'_>,
    l1: &L1Table,
    l1_index: u64,
    offset: u64,
    repaired: &mut RepairReport,
) -> Result<(), CheckError> {
    let image = walk.image;
    let shape = image.header.shape;
    let old = image.read_bytes(offset, shape.cluster_len()).await?;
    let mut new = old.to_vec();
    let mut dropped = Vec::new();
    for (index, entry) in entries(image, &old).enumerate() {
        let examined = image.examine_l2(entry, guest_offset(image, l1_index, index));
        if examined.faults.iter().all(|fault| fault.remedy == Remedy::None) {
            continue;
        }
        if examined.is_dropped() {
            dropped.push((guest_offset(image, l1_index, index), entry));
        }
        let out = &mut new[index * shape.entry_len() as usize..];
        out[..8].copy_from_slice(&examined.corrected.word.to_be_bytes());
        if shape.extended {
            out[8..16].copy_from_slice(&examined.corrected.bitmap.to_be_bytes());
        }
    }
    if new == old[..] {
        return Ok(());
    }
    if !walk.counts.is_table_only(image.cluster_of(offset)) {
        walk.points_past_end |= (0..)
            .zip(entries(image, &old))
            .any(|(index, entry)| image.examine_l2(entry, guest_offset(image, l1_index, index)).is_past_end);
        walk.report.add_unrepairable(|| format!("the L2 table at {offset:#x} is also used for something else"));
        return Ok(());
    }
    for (guest, entry) in dropped {
        repaired.add_dropped(|| format!("the entry of guest offset {guest:#x} in {}, {:#018x}", l1.name(), entry.word));
    }
    image.write_changes(offset, &old, &new).await
}

impl RepairReport {
    fn add_dropped(&mut self, what: impl FnOnce() -> String) {
        self.dropped_count += 1;
        if self.dropped.len() < DROPPED_LISTED_MAX {
            self.dropped.push(what());
        }
    }
}

impl Image {
    /// Extends the file to whole clusters, so that the last one can be written as a whole. A block device is not
    /// changed.
    async fn extend_to_cluster(&mut self) -> Result<(), CheckError> {
        let aligned_size = self.file_clusters() << self.header.shape.cluster_bits;
        if aligned_size == self.size || self.file.grow(ByteLen::new(aligned_size)).await.is_err() {
            return Ok(());
        }
        self.size = aligned_size;
        Ok(())
    }

    /// Changes the header's first sector in the file durably.
    pub(super) async fn change_header(&self, change: impl FnOnce(&mut [u8])) -> Result<(), CheckError> {
        let mut sector = AlignedBuf::zeroed(HEADER_SECTOR_BYTES);
        self.file.read(ByteOffset::ZERO, ReadBuf::new(&mut sector)).await?;
        change(&mut sector);
        self.file.write(ByteOffset::ZERO, WriteBuf::new(&sector), WriteFlags::NONE).await?;
        Ok(self.file.flush().await?)
    }
}
