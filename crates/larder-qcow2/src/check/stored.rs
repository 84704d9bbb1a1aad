//! The refcounts of the image: compared with the counted references, corrected in place, or rebuilt.

use std::collections::BTreeSet;
use std::ops::RangeInclusive;

use larder_block::{ByteLen, ByteOffset, WriteBuf, WriteFlags};

use crate::check::count::ReferenceCounts;
use crate::check::walk::Walk;
use crate::check::{CheckError, Image, REFCOUNT_ENTRY_RESERVED, Severity};
use crate::header::TableLocation;
use crate::refcount;

/// The maximum length of a refcount table that QEMU accepts, in bytes, unless a cluster is larger.
const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;

/// Compares every refcount with the counted references.
pub(super) async fn compare(walk: &mut Walk<'_>) -> Result<(), CheckError> {
    let image = walk.image;
    let bits = image.header.shape.refcount_block_bits();
    let clusters = image.file_clusters().max(walk.counts.end());
    let mut used_end = 0;
    let blocks = image.refcount_table.len() as u64;
    for block in 0..blocks {
        let (first, end) = (block << bits, (block + 1) << bits);
        let Some(bytes) = read_block(image, block).await? else {
            used_end = used_end.max(report_missing_block(walk, first, end.min(clusters)));
            continue;
        };
        for cluster in first..end {
            let stored = stored_in(image, &bytes, cluster);
            if stored == 1 {
                let added = walk.counts.set_stored_one(cluster, true);
                added.map_err(image.out_of_memory(walk.options))?;
            }
            if cluster >= clusters {
                continue;
            }
            let counted = walk.counts.get(cluster);
            if stored > 0 || counted > 0 {
                used_end = used_end.max(cluster + 1);
            }
            report_difference(walk, cluster, stored, counted);
        }
    }
    used_end = used_end.max(report_missing_block(walk, blocks << bits, clusters));
    walk.report.image_end = used_end << image.header.shape.cluster_bits;
    Ok(())
}

async fn read_block(image: &Image, block: u64) -> Result<Option<larder_block::AlignedBuf>, CheckError> {
    match image.refcount_block(block) {
        None => Ok(None),
        Some(offset) => {
            // Each refcount is compared, which takes as much work as an entry of a table.
            image.count_table_bytes(8 << image.header.shape.refcount_block_bits()).await?;
            Ok(Some(image.read_bytes(offset, image.cluster_len()).await?))
        }
    }
}

/// Returns true if a refcount marks a cluster past the end of the file as used, or cannot be read. A sound image has
/// at most one or two refcount blocks for such clusters.
pub(super) async fn has_refcounts_past_end(image: &Image) -> Result<bool, CheckError> {
    let bits = image.header.shape.refcount_block_bits();
    let first = image.file_clusters() >> bits;
    for block in first..image.refcount_table.len() as u64 {
        if image.refcount_table[block as usize] == 0 {
            continue;
        }
        let Some(bytes) = read_block(image, block).await? else {
            return Ok(true);
        };
        let clusters = image.file_clusters().max(block << bits)..(block + 1) << bits;
        if clusters.into_iter().any(|cluster| stored_in(image, &bytes, cluster) != 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

fn stored_in(image: &Image, block: &[u8], cluster: u64) -> u64 {
    let shape = image.header.shape;
    let index = cluster & ((1 << shape.refcount_block_bits()) - 1);
    refcount::read(block, shape.refcount_order, index as usize)
}

/// Reports clusters that are used but have no refcount at all, and returns the end of the last one.
fn report_missing_block(walk: &mut Walk<'_>, first: u64, end: u64) -> u64 {
    if first >= end {
        return 0;
    }
    let used: Vec<u64> = walk.counts.referenced_clusters(first, end).collect();
    for cluster in &used {
        walk.report.structures_unusable = true;
        report_difference(walk, *cluster, 0, walk.counts.get(*cluster));
    }
    used.last().map_or(0, |cluster| cluster + 1)
}

fn report_difference(walk: &mut Walk<'_>, cluster: u64, stored: u64, counted: u64) {
    let offset = cluster << walk.image.header.shape.cluster_bits;
    let text = || format!("cluster {cluster} at {offset:#x}: refcount {stored}, references {counted}");
    if stored < counted {
        walk.report.add_derived(text);
    } else if stored > counted {
        walk.report.add_finding(Severity::Leak, text);
    }
}

/// Corrects refcounts in place. Returns the number of too low ones that were left because `raise` is false.
pub(super) async fn correct(walk: &mut Walk<'_>, raise: bool, lower: bool) -> Result<u64, CheckError> {
    let image = walk.image;
    let shape = image.header.shape;
    let clusters = image.file_clusters().max(walk.counts.end());
    let mut too_low = 0;
    for block in 0..image.refcount_table.len() as u64 {
        let Some(offset) = image.refcount_block(block) else {
            continue;
        };
        let old = image.read_bytes(offset, shape.cluster_len()).await?;
        let mut new = old.to_vec();
        let first = block << shape.refcount_block_bits();
        let end = first + (1 << shape.refcount_block_bits());
        for cluster in first..end {
            let stored = stored_in(image, &old, cluster);
            let counted = match cluster < clusters {
                true => walk.counts.get(cluster),
                false => stored,
            };
            too_low += u64::from(stored < counted && !raise);
            let corrected = match stored < counted && raise || stored > counted && lower {
                true => counted,
                false => stored,
            };
            if corrected != stored {
                refcount::write(&mut new, shape.refcount_order, (cluster - first) as usize, corrected);
            }
            let added = walk.counts.set_stored_one(cluster, corrected == 1);
            added.map_err(image.out_of_memory(walk.options))?;
        }
        image.write_changes(offset, &old, &new).await?;
    }
    Ok(too_low)
}

/// The location of a new refcount structure: the table, followed by the blocks.
struct NewStructure {
    first: u64,
    table_clusters: u64,
    blocks: BTreeSet<u64>,
}

impl NewStructure {
    fn clusters(&self) -> u64 {
        self.table_clusters + self.blocks.len() as u64
    }

    fn end(&self) -> u64 {
        self.first + self.clusters()
    }

    /// Returns the first location from `first` on that has none of the clusters `taken`, which are sorted.
    fn avoiding(image: &Image, first: u64, needed: &BTreeSet<u64>, taken: &[RangeInclusive<u64>]) -> Option<Self> {
        let mut structure = Self::starting_at(image, first, needed)?;
        for clusters in taken {
            if structure.first <= *clusters.end() && *clusters.start() < structure.end() {
                structure = Self::starting_at(image, clusters.end() + 1, needed)?;
            }
        }
        Some(structure)
    }

    fn starting_at(image: &Image, first: u64, needed: &BTreeSet<u64>) -> Option<Self> {
        let shape = image.header.shape;
        let mut structure = Self { first, table_clusters: 1, blocks: needed.clone() };
        loop {
            let before = structure.clusters();
            let own_blocks =
                (first >> shape.refcount_block_bits())..=((structure.end() - 1) >> shape.refcount_block_bits());
            structure.blocks.extend(own_blocks);
            let entries = structure.blocks.last().map_or(1, |block| block + 1);
            structure.table_clusters = (entries * 8).div_ceil(shape.cluster_len());
            if structure.table_clusters * shape.cluster_len() > REFCOUNT_TABLE_BYTES_MAX.max(shape.cluster_len()) {
                return None;
            }
            if structure.clusters() == before {
                return Some(structure);
            }
        }
    }
}

/// Writes a new refcount table and blocks to unused clusters, and makes the header point to them by a write of one
/// sector, which a crash leaves old or new. If `keep_unreferenced` is true, clusters without references keep their old
/// refcount, as far as it is readable. Returns the end of the new structure in the file, in bytes.
pub(super) async fn rebuild(walk: &mut Walk<'_>, keep_unreferenced: bool) -> Result<u64, CheckError> {
    let image = walk.image;
    let shape = image.header.shape;
    let bits = shape.refcount_block_bits();
    // The location is after the old structure too, which is in effect until the header is written.
    let counts_end = walk.counts.end();
    remove_structure_counts(walk);
    let mut needed = BTreeSet::new();
    let mut from = 0;
    while let Some(cluster) = walk.counts.referenced_clusters(from, counts_end).next() {
        needed.insert(cluster >> bits);
        from = ((cluster >> bits) + 1) << bits;
        if from >= counts_end {
            break;
        }
    }
    let old_blocks: Vec<u64> = (0..image.refcount_table.len() as u64)
        .filter(|block| keep_unreferenced && is_trusted(image, &walk.counts, *block))
        .collect();
    needed.extend(&old_blocks);
    let structure = find_location(image, counts_end, &needed, keep_unreferenced).await?;
    for (index, block) in structure.blocks.iter().enumerate() {
        let mut bytes = vec![0; shape.cluster_len() as usize];
        let old = match old_blocks.contains(block) {
            true => read_block(image, *block).await?,
            false => None,
        };
        let first = block << bits;
        for cluster in first..first + (1 << bits) {
            let stored = old.as_ref().map_or(0, |old| stored_in(image, old, cluster));
            let in_structure = (structure.first..structure.end()).contains(&cluster);
            let count = if in_structure { 1 } else { walk.counts.get(cluster).max(stored) };
            if count > 0 {
                refcount::write(&mut bytes, shape.refcount_order, (cluster - first) as usize, count);
            }
            let added = walk.counts.set_stored_one(cluster, count == 1);
            added.map_err(image.out_of_memory(walk.options))?;
        }
        let at = (structure.first + structure.table_clusters + index as u64) << shape.cluster_bits;
        write(image, at, &bytes).await?;
    }
    let mut table = vec![0; (structure.table_clusters << shape.cluster_bits) as usize];
    for (index, block) in structure.blocks.iter().enumerate() {
        let at = (structure.first + structure.table_clusters + index as u64) << shape.cluster_bits;
        table[*block as usize * 8..][..8].copy_from_slice(&at.to_be_bytes());
    }
    let at = structure.first << shape.cluster_bits;
    write(image, at, &table).await?;
    // A crash before the header is durable leaves the old structure, untouched.
    image.file.flush().await?;
    let clusters = structure.table_clusters as u32;
    image.change_header(|sector| crate::header::set_refcount_table(sector, at, clusters)).await?;
    Ok(structure.end() << shape.cluster_bits)
}

async fn find_location(
    image: &Image,
    counts_end: u64,
    needed: &BTreeSet<u64>,
    keep_unreferenced: bool,
) -> Result<NewStructure, CheckError> {
    let bits = image.header.shape.cluster_bits;
    let occupied = old_structure(image);
    let mut bytes_needed = 0;
    for first in [image.file_clusters().max(counts_end), counts_end] {
        let Some(structure) = NewStructure::avoiding(image, first, needed, &occupied) else {
            continue;
        };
        bytes_needed = structure.clusters() << bits;
        // Clusters in the file without references may be all that is left of some data.
        let inside = first < image.file_clusters();
        if inside && keep_unreferenced {
            continue;
        }
        let end = structure.end() << bits;
        if end <= image.size() || image.file.grow(ByteLen::new(end)).await.is_ok() {
            return Ok(structure);
        }
    }
    Err(CheckError::NoSpace { name: image.name.to_string(), needed: bytes_needed })
}

/// Returns the clusters of the old refcount table and its blocks according to the image, sorted; also those past the
/// end of the file.
fn old_structure(image: &Image) -> Vec<RangeInclusive<u64>> {
    let TableLocation { offset, entries } = image.header.refcount_table;
    let blocks = image.refcount_table.iter().map(|entry| entry & !REFCOUNT_ENTRY_RESERVED);
    let blocks = blocks.filter(|offset| *offset != 0);
    let mut occupied: Vec<_> = blocks
        .map(|offset| image.clusters_of(offset, image.cluster_len().min(u64::MAX - offset)))
        .chain([image.clusters_of(offset, entries * 8)])
        .collect();
    occupied.sort_unstable_by_key(|clusters| *clusters.start());
    occupied
}

/// Removes the references to the old refcount table and its blocks.
fn remove_structure_counts(walk: &mut Walk<'_>) {
    let image = walk.image;
    for (index, entry) in image.refcount_table.iter().enumerate() {
        let usable = image.refcount_block(index as u64).is_some() && entry & REFCOUNT_ENTRY_RESERVED == 0;
        if usable {
            walk.counts.remove(image.cluster_of(*entry));
        }
    }
    let TableLocation { offset, entries } = image.header.refcount_table;
    if !image.is_past_end(offset, entries * 8) {
        for cluster in image.clusters_of(offset, entries * 8) {
            walk.counts.remove(cluster);
        }
    }
}

/// Returns true if an old refcount block has no other use. Its own reference was removed before.
fn is_trusted(image: &Image, counts: &ReferenceCounts, block: u64) -> bool {
    image.refcount_block(block).is_some_and(|offset| counts.get(image.cluster_of(offset)) == 0)
}

async fn write(image: &Image, offset: u64, bytes: &[u8]) -> Result<(), CheckError> {
    let write = image.file.write(ByteOffset::new(offset), WriteBuf::new(bytes), WriteFlags::NONE);
    Ok(write.await?)
}
