//! Direct access to qcow2 images on the simulated disks, without `larder-qcow2`'s code, so that its mistakes are not
//! repeated here. Checks the images after a stop, and takes internal snapshots, which Larder cannot take.

use std::collections::HashMap;

use larder_block::ByteOffset;
use larder_block::backend::simulated::SimulatedMedium;

const COPIED: u64 = 1 << 63;
const COMPRESSED: u64 = 1 << 62;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
const ZERO: u64 = 1;
/// Bytes of a snapshot's table entry. Its ID is the checksum of the snapshot's content.
const SNAPSHOT_BYTES: usize = 40 + 16 + 16;

/// The content of an image file.
pub(super) struct ImageBytes {
    bytes: Vec<u8>,
}

/// Returns the offsets of the L1 table and the refcount table of the image on a disk.
pub(super) fn tables(medium: &SimulatedMedium) -> [u64; 2] {
    let mut bytes = vec![0; 64.min(medium.size().as_usize())];
    medium.read(ByteOffset::ZERO, &mut bytes);
    let header = ImageBytes { bytes };
    [header.long(40), header.long(48)]
}

/// The disk's or a snapshot's mapping, whose tables refer to clusters.
#[derive(Clone, Copy)]
struct MappingTree {
    l1: u64,
    entries: u64,
    is_active: bool,
}

impl ImageBytes {
    /// Reads the image on a disk; `None` if there is none.
    pub(super) fn of(medium: &SimulatedMedium) -> Option<Self> {
        let mut bytes = vec![0; medium.size().as_usize()];
        medium.read(ByteOffset::ZERO, &mut bytes);
        Self::new(bytes)
    }

    /// Parses the image in a file's bytes; `None` if there is none.
    pub(super) fn new(bytes: Vec<u8>) -> Option<Self> {
        bytes.starts_with(b"QFI\xfb").then_some(Self { bytes })
    }

    fn long(&self, at: u64) -> u64 {
        let end = at.saturating_add(8) as usize;
        let found = self.bytes.get(at as usize..end).and_then(|bytes| bytes.try_into().ok());
        found.map_or(0, u64::from_be_bytes)
    }

    fn short(&self, at: u64) -> u64 {
        self.long(at) >> 32
    }

    fn set_long(&mut self, at: u64, word: u64) {
        self.bytes[at as usize..at as usize + 8].copy_from_slice(&word.to_be_bytes());
    }

    fn cluster_bits(&self) -> u64 {
        self.short(20)
    }

    fn cluster_len(&self) -> u64 {
        1 << self.cluster_bits()
    }

    fn is_extended(&self) -> bool {
        self.short(4) >= 3 && self.long(72) & 16 != 0
    }

    fn refcount_order(&self) -> u64 {
        if self.short(4) >= 3 { self.short(96) } else { 4 }
    }

    fn trees(&self) -> Vec<MappingTree> {
        let mut trees = vec![MappingTree { l1: self.long(40), entries: self.short(36), is_active: true }];
        if self.short(60) > 0 {
            let at = self.long(64);
            trees.push(MappingTree { l1: self.long(at), entries: self.short(at + 8), is_active: false });
        }
        trees
    }

    /// Returns the offset of a cluster's refcount, and its shift within the byte; `None` without a refcount block.
    fn refcount_position(&self, cluster: u64) -> Option<(u64, u64)> {
        let order = self.refcount_order();
        let block_bits = self.cluster_bits() + 3 - order;
        let index = cluster >> block_bits;
        let blocks = self.short(56) << (self.cluster_bits() - 3);
        let block = (index < blocks).then(|| self.long(self.long(48) + index * 8))?;
        let bit = (cluster & ((1 << block_bits) - 1)) << order;
        (block != 0).then_some((block + bit / 8, bit % 8))
    }

    fn refcount(&self, cluster: u64) -> u64 {
        let Some((at, shift)) = self.refcount_position(cluster) else {
            return 0;
        };
        let order = self.refcount_order();
        let word = |bytes: u64| (0..bytes).fold(0, |word, byte| word << 8 | self.byte(at + byte));
        match order {
            0..3 => self.byte(at) >> shift & ((1 << (1 << order)) - 1),
            _ => word(1 << (order - 3)),
        }
    }

    fn byte(&self, at: u64) -> u64 {
        self.bytes.get(at as usize).copied().unwrap_or(0).into()
    }

    /// Increments a cluster's refcount.
    fn raise(&mut self, cluster: u64) -> Option<()> {
        let (at, shift) = self.refcount_position(cluster)?;
        let order = self.refcount_order();
        // Refcounts are small: there is no carry beyond the last byte.
        let last = at as usize + ((1usize << order) / 8).max(1) - 1;
        self.bytes[last] += 1 << shift;
        Some(())
    }

    /// Returns the L2 entries of a tree: guest cluster, offset of the entry, entry.
    fn entries(&self, tree: MappingTree) -> Vec<(u64, u64, u64)> {
        let entry_len = if self.is_extended() { 16 } else { 8 };
        let in_table = self.cluster_len() / entry_len;
        let mut found = Vec::new();
        for index in 0..tree.entries {
            let table = self.long(tree.l1 + index * 8) & OFFSET;
            if table == 0 {
                continue;
            }
            for within in 0..in_table {
                let at = table + within * entry_len;
                found.push((index * in_table + within, at, self.long(at)));
            }
        }
        found
    }

    /// Checks that the refcounts cover all references, that no tree refers to a cluster twice, that clusters marked
    /// as used once have one reference, and that snapshots have kept their content.
    pub(super) fn check(&self) -> Result<(), String> {
        let bits = self.cluster_bits();
        let mut counts: HashMap<u64, u64> = HashMap::new();
        let mut count = |offset: u64, len: u64| {
            for cluster in offset >> bits..(offset + len).div_ceil(1 << bits) {
                *counts.entry(cluster).or_default() += 1;
            }
        };
        count(0, 1);
        let (table, table_len) = (self.long(48), self.short(56) << bits);
        count(table, table_len);
        for block in (table..table + table_len).step_by(8).map(|at| self.long(at)) {
            count(block, u64::from(block != 0));
        }
        let mut used_once = Vec::new();
        for tree in self.trees() {
            let mut seen = HashMap::new();
            let mut add_reference = |offset: u64, what: String| match seen.insert(offset >> bits, what.clone()) {
                Some(other) => Err(format!("cluster {} is used both by {other} and by {what}", offset >> bits)),
                None => Ok(()),
            };
            count(tree.l1, tree.entries * 8);
            for index in 0..tree.entries {
                let entry = self.long(tree.l1 + index * 8);
                if entry & OFFSET != 0 {
                    add_reference(entry & OFFSET, format!("L2 table {index}"))?;
                    count(entry & OFFSET, 1);
                    used_once.extend((tree.is_active && entry & COPIED != 0).then_some(entry & OFFSET));
                }
            }
            for (cluster, _, entry) in self.entries(tree) {
                if entry & COMPRESSED != 0 || entry & OFFSET == 0 {
                    continue;
                }
                add_reference(entry & OFFSET, format!("guest cluster {cluster}"))?;
                count(entry & OFFSET, 1);
                used_once.extend((tree.is_active && entry & COPIED != 0).then_some(entry & OFFSET));
            }
            if !tree.is_active {
                count(tree.l1, 0);
                count(self.long(64), 1);
                let id = self.long(self.long(64) + 56);
                let sum = self.checksum(tree);
                if sum != id {
                    return Err("the content of an internal snapshot has changed".to_owned());
                }
            }
        }
        for (cluster, references) in &counts {
            let refcount = self.refcount(*cluster);
            if refcount < *references {
                return Err(format!("cluster {cluster} has {references} references, but its refcount is {refcount}"));
            }
        }
        match used_once.iter().find(|offset| counts.get(&(**offset >> bits)) != Some(&1)) {
            Some(offset) => Err(format!("cluster {} has the COPIED flag, but more than one reference", offset >> bits)),
            None => Ok(()),
        }
    }

    /// Returns a checksum of a tree's content.
    fn checksum(&self, tree: MappingTree) -> u64 {
        let mut sum = 0xcbf2_9ce4_8422_2325u64;
        let mut add = |word: u64| sum = (sum.rotate_left(5) ^ word).wrapping_mul(0x0100_0000_01b3);
        for (cluster, at, entry) in self.entries(tree) {
            let bitmap = if self.is_extended() { self.long(at + 8) } else { 0 };
            let host = entry & OFFSET;
            if host == 0 && entry & ZERO == 0 && bitmap == 0 {
                continue;
            }
            add(cluster);
            add(entry & ZERO);
            add(bitmap);
            if host == 0 || (entry & ZERO != 0 && !self.is_extended()) {
                continue;
            }
            // The content of unallocated subclusters is irrelevant.
            let parts = if self.is_extended() { 32 } else { 1 };
            let part_len = self.cluster_len() / parts;
            for part in (0..parts).filter(|part| !self.is_extended() || bitmap >> part & 1 != 0) {
                let from = host + part * part_len;
                (from..from + part_len).step_by(8).for_each(|at| add(self.long(at)));
            }
        }
        sum
    }

    /// Takes a snapshot, if the image has none and its refcounts have room for one. Returns whether it did. The
    /// caller must then write the first sector after all others.
    pub(super) fn take_snapshot(&mut self) -> bool {
        let active = self.trees()[0];
        let l1_len = (active.entries * 8).next_multiple_of(self.cluster_len());
        let l1 = (self.bytes.len() as u64).next_multiple_of(self.cluster_len());
        let table = l1 + l1_len;
        let added = l1 >> self.cluster_bits()..(table >> self.cluster_bits()) + 1;
        let is_full = |cluster: u64| self.refcount_position(cluster).is_none() || self.refcount(cluster) != 0;
        if self.short(60) > 0 || self.refcount_order() == 0 || l1_len == 0 || added.clone().any(is_full) {
            return false;
        }
        self.bytes.resize((table + self.cluster_len()) as usize, 0);
        for cluster in added {
            self.raise(cluster);
        }
        for (_, at, entry) in self.entries(active) {
            if entry & OFFSET != 0 {
                self.set_long(at, entry & !COPIED);
                self.raise((entry & OFFSET) >> self.cluster_bits());
            }
        }
        for index in 0..active.entries {
            let entry = self.long(active.l1 + index * 8) & !COPIED;
            self.set_long(active.l1 + index * 8, entry);
            self.set_long(l1 + index * 8, entry);
            if entry != 0 {
                self.raise(entry >> self.cluster_bits());
            }
        }
        let copy = MappingTree { l1, is_active: false, ..active };
        let sum = self.checksum(copy);
        self.set_long(table, l1);
        // Number of entries of the L1 table, and the lengths of ID and name.
        self.set_long(table + 8, active.entries << 32 | 8 << 16);
        self.set_long(table + 32, 16);
        self.set_long(table + 48, self.long(24));
        self.set_long(table + 56, sum);
        debug_assert!(SNAPSHOT_BYTES as u64 <= self.cluster_len());
        let name_and_count = self.long(56) & !0xffff_ffff | 1;
        self.set_long(56, name_and_count);
        self.set_long(64, table);
        true
    }

    /// Returns the file's content.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }
}
