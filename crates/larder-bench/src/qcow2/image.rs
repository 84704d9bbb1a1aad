//! Images with every cluster allocated and no data: metadata and a hole, so that a TiB takes seconds to make and
//! little space. The layout is that of `qemu-img create -o preallocation=metadata`, or has the data in random order,
//! the worst fragmentation.
//!
//! ```text
//! header | refcount table | refcount blocks | L1 table | L2 tables | data (a hole)
//! ```

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::Path;

use crate::vhost_user::client::Random;

/// Order of the data clusters in the file.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Order {
    /// The guest's order.
    Contiguous,
    Shuffled,
}

/// Layout of an image.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Layout {
    /// Bytes of the disk, a multiple of the cluster size.
    pub(crate) size: u64,
    pub(crate) cluster_bits: u32,
    pub(crate) order: Order,
}

/// First cluster of each part of an image.
struct Parts {
    refcount_blocks: u64,
    l1: u64,
    l2: u64,
    data: u64,
    end: u64,
}

const REFCOUNT_TABLE_CLUSTER: u64 = 1;
const HEADER_BYTES: u32 = 104;
/// Refcount width: 16 bits.
const REFCOUNT_ORDER: u32 = 4;
/// Flag of a table or cluster with a refcount of exactly one.
const COPIED: u64 = 1 << 63;

impl Layout {
    fn cluster_len(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Bytes of the disk that one L2 table maps.
    pub(crate) fn table_span(&self) -> u64 {
        self.cluster_len() * (self.cluster_len() / 8)
    }

    fn parts(&self) -> Parts {
        let cluster_len = self.cluster_len();
        let data = self.size / cluster_len;
        let tables = self.size.div_ceil(self.table_span());
        let l1_clusters = (tables * 8).div_ceil(cluster_len);
        let mut blocks = 1u64;
        loop {
            let refcount_blocks = REFCOUNT_TABLE_CLUSTER + (blocks * 8).div_ceil(cluster_len);
            let l1 = refcount_blocks + blocks;
            let l2 = l1 + l1_clusters;
            let end = l2 + tables + data;
            let needed = end.div_ceil(cluster_len / 2);
            if needed <= blocks {
                return Parts { refcount_blocks, l1, l2, data: l2 + tables, end };
            }
            blocks = needed;
        }
    }

    /// Returns the byte offset of the data, which extends to the end of the file.
    pub(crate) fn data_offset(&self) -> u64 {
        self.parts().data << self.cluster_bits
    }

    /// Writes the image, and syncs it to the disk.
    pub(crate) fn write(&self, path: &Path) -> std::io::Result<()> {
        let parts = self.parts();
        let file = File::create(path)?;
        file.set_len(parts.end << self.cluster_bits)?;
        let mut out = BufWriter::with_capacity(1 << 20, &file);
        let clusters = |from: u64, to: u64| (to - from) << self.cluster_bits;
        let words = |from: u64, to: u64| clusters(from, to) / 8;
        let at = |cluster: u64| cluster << self.cluster_bits;

        let tables = parts.data - parts.l2;
        let header = self.header(tables, at(parts.l1), parts.refcount_blocks - REFCOUNT_TABLE_CLUSTER);
        out.write_all(&header)?;
        out.write_all(&vec![0; self.cluster_len() as usize - header.len()])?;
        let blocks = parts.l1 - parts.refcount_blocks;
        for block in 0..words(REFCOUNT_TABLE_CLUSTER, parts.refcount_blocks) {
            let offset = if block < blocks { at(parts.refcount_blocks + block) } else { 0 };
            out.write_all(&offset.to_be_bytes())?;
        }
        for cluster in 0..clusters(parts.refcount_blocks, parts.l1) / 2 {
            out.write_all(&u16::from(cluster < parts.end).to_be_bytes())?;
        }
        for table in 0..words(parts.l1, parts.l2) {
            let entry = if table < tables { at(parts.l2 + table) | COPIED } else { 0 };
            out.write_all(&entry.to_be_bytes())?;
        }
        let data = parts.end - parts.data;
        let mut shuffled = Vec::new();
        if self.order == Order::Shuffled {
            shuffled.extend(0..data as u32);
            Random::default().shuffle(&mut shuffled);
        }
        for cluster in 0..words(parts.l2, parts.data) {
            let data_index = shuffled.get(cluster as usize).map_or(cluster, |data_index| u64::from(*data_index));
            let entry = if cluster < data { at(parts.data + data_index) | COPIED } else { 0 };
            out.write_all(&entry.to_be_bytes())?;
        }
        out.flush()?;
        drop(out);
        file.sync_all()
    }

    /// Returns a version 3 header without extensions (QEMU `docs/interop/qcow2.txt`, "Header").
    fn header(&self, tables: u64, l1_offset: u64, refcount_table_clusters: u64) -> Vec<u8> {
        let mut bytes = Vec::new();
        bytes.extend(b"QFI\xfb");
        bytes.extend(3u32.to_be_bytes());
        // No backing file.
        bytes.extend([0; 12]);
        bytes.extend(self.cluster_bits.to_be_bytes());
        bytes.extend(self.size.to_be_bytes());
        // No encryption.
        bytes.extend([0; 4]);
        bytes.extend((tables as u32).to_be_bytes());
        bytes.extend(l1_offset.to_be_bytes());
        bytes.extend((REFCOUNT_TABLE_CLUSTER << self.cluster_bits).to_be_bytes());
        bytes.extend((refcount_table_clusters as u32).to_be_bytes());
        // No snapshots, no features.
        bytes.extend([0; 12 + 24]);
        bytes.extend(REFCOUNT_ORDER.to_be_bytes());
        bytes.extend(HEADER_BYTES.to_be_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    #[test]
    /// `qemu-img check` reports all clusters as allocated, the expected fragmentation, and no error.
    fn qemu_check_finds_all_clusters_allocated() {
        for (order, fragmented) in [(Order::Contiguous, "0.00% fragmented"), (Order::Shuffled, "9")] {
            for (size, cluster_bits) in [(3 << 30, 16), (1 << 30, 18), (64 << 20, 12)] {
                let layout = Layout { size, cluster_bits, order };
                let directory = tempfile::tempdir().unwrap();
                let path = directory.path().join("image.qcow2");
                layout.write(&path).unwrap();
                let check = Command::new("qemu-img").arg("check").arg(&path).output().unwrap();
                let output = String::from_utf8_lossy(&check.stdout);
                assert!(check.status.success(), "{layout:?}: {output}");
                let clusters = size >> cluster_bits;
                let allocated = format!("{clusters}/{clusters} = 100.00% allocated, {fragmented}");
                assert!(output.contains(&allocated), "{layout:?}: {output}");
            }
        }
    }
}
