//! The flag that marks a table or cluster of the active tables as used once: it must agree with the refcount.

use crate::check::walk::{Walk, entries, guest_offset};
use crate::check::{CheckError, Image, words};
use crate::entry::{COPIED, OFFSET};

/// Reports flags that do not agree with the image's refcounts.
pub(super) async fn check(walk: &mut Walk<'_>) -> Result<(), CheckError> {
    let image = walk.image;
    if image.header.l1.offset >= image.size() {
        return Ok(());
    }
    for (index, entry) in image.read_table(image.header.l1).await?.into_iter().enumerate() {
        let offset = entry & OFFSET;
        if offset == 0 {
            continue;
        }
        let is_one = walk.counts.is_stored_one(image.cluster_of(offset));
        if is_one != (entry & COPIED != 0) {
            let which = || format!("L1 entry {index}, {entry:#018x}, is wrongly flagged as used {}", times(!is_one));
            walk.report.add_derived(which);
        }
        if let Some(table) = image.l2_table(entry) {
            check_l2(walk, index as u64, table).await?;
        }
    }
    Ok(())
}

async fn check_l2(walk: &mut Walk<'_>, l1_index: u64, table: u64) -> Result<(), CheckError> {
    let image = walk.image;
    let shape = image.header.shape;
    let bytes = image.read_bytes(table, shape.cluster_len()).await?;
    for (index, entry) in entries(image, &bytes).enumerate() {
        let Some(host) = entry.host(shape) else {
            continue;
        };
        let is_one = shape.data_file || walk.counts.is_stored_one(image.cluster_of(host));
        if is_one != entry.is_copied() {
            let guest = guest_offset(image, l1_index, index);
            walk.report.add_derived(|| {
                format!(
                    "the entry of guest offset {guest:#x}, {:#018x}, is wrongly flagged as used {}",
                    entry.word,
                    times(!is_one)
                )
            });
        }
    }
    Ok(())
}

fn times(one: bool) -> &'static str {
    if one { "once" } else { "more than once" }
}

/// Corrects the flags. A table whose clusters have another use too is left unchanged.
pub(super) async fn repair(walk: &Walk<'_>) -> Result<(), CheckError> {
    let image = walk.image;
    if image.header.l1.offset >= image.size() {
        return Ok(());
    }
    let at = image.header.l1;
    let old = image.read_bytes(at.offset, (at.entries * 8).next_multiple_of(512)).await?;
    let mut new = old.to_vec();
    for (index, entry) in words(&old).take(at.entries as usize).enumerate() {
        let offset = entry & OFFSET;
        if offset == 0 {
            continue;
        }
        let flagged = with_flag(entry, walk.counts.is_stored_one(image.cluster_of(offset)));
        new[index * 8..][..8].copy_from_slice(&flagged.to_be_bytes());
        if let Some(table) = image.l2_table(entry)
            && walk.counts.is_table_only(image.cluster_of(table))
        {
            repair_l2(walk, table).await?;
        }
    }
    if is_sole_user(walk, at.offset, at.entries * 8) {
        image.write_changes(at.offset, &old, &new).await?;
    }
    Ok(())
}

async fn repair_l2(walk: &Walk<'_>, table: u64) -> Result<(), CheckError> {
    let image: &Image = walk.image;
    let shape = image.header.shape;
    let old = image.read_bytes(table, shape.cluster_len()).await?;
    let mut new = old.to_vec();
    for (index, entry) in entries(image, &old).enumerate() {
        let Some(host) = entry.host(shape) else {
            continue;
        };
        let is_one = shape.data_file || walk.counts.is_stored_one(image.cluster_of(host));
        let flagged = with_flag(entry.word, is_one);
        new[index * shape.entry_len() as usize..][..8].copy_from_slice(&flagged.to_be_bytes());
    }
    image.write_changes(table, &old, &new).await
}

const fn with_flag(entry: u64, is_one: bool) -> u64 {
    if is_one { entry | COPIED } else { entry & !COPIED }
}

/// Returns true if a table is the only user of its clusters.
pub(super) fn is_sole_user(walk: &Walk<'_>, offset: u64, len: u64) -> bool {
    len > 0 && walk.image.clusters_of(offset, len).all(|cluster| walk.counts.get(cluster) == 1)
}
