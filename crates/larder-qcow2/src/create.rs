//! Creation of an empty image.

use std::rc::Rc;

use larder_block::{BlockDevice, ByteLen, ByteOffset, ByteRange, IoResult, WriteBuf, WriteFlags, ZeroFlags};

use crate::header::{MAGIC, TableLocation};
use crate::refcount;
use crate::shape::Shape;

/// Writes an empty image of a disk of `size` bytes into `file`, which grows as needed.
///
/// # Errors
/// The file's error.
pub async fn create(file: &Rc<dyn BlockDevice>, shape: Shape, size: ByteLen) -> IoResult {
    let bits = shape.cluster_bits;
    let cluster_len = shape.cluster_len();
    let l1_entries = shape.l1_entries(size.get());
    let l1_clusters = (l1_entries * 8).div_ceil(cluster_len).max(1);
    let (mut blocks, mut table_clusters) = (1, 1);
    let clusters = loop {
        let clusters = 1 + table_clusters + blocks + l1_clusters;
        let needed = clusters.div_ceil(1 << shape.refcount_block_bits());
        let needed_table = (needed * 8).div_ceil(cluster_len);
        if needed <= blocks && needed_table <= table_clusters {
            break clusters;
        }
        (blocks, table_clusters) = (needed, needed_table);
    };
    let first_block = 1 + table_clusters;
    let l1 = TableLocation { offset: (first_block + blocks) << bits, entries: l1_entries };
    file.grow(ByteLen::new(clusters << bits)).await?;
    file.write_zeroes(ByteRange::new(0, clusters << bits), ZeroFlags::default()).await?;
    let mut table = vec![0; (table_clusters << bits) as usize];
    for (index, out) in table.chunks_exact_mut(8).take(blocks as usize).enumerate() {
        out.copy_from_slice(&((first_block + index as u64) << bits).to_be_bytes());
    }
    let mut counts = vec![0; (blocks << bits) as usize];
    (0..clusters as usize).for_each(|cluster| refcount::write(&mut counts, shape.refcount_order, cluster, 1));
    let header = encode_header(shape, size, l1, table_clusters);
    // The header is written last: after a crash there is an image or none.
    for (offset, bytes) in [(1 << bits, &table), (first_block << bits, &counts), (0, &header)] {
        if offset == 0 {
            file.flush().await?;
        }
        file.write(ByteOffset::new(offset), WriteBuf::new(bytes), WriteFlags::NONE).await?;
    }
    file.flush().await
}

fn encode_header(shape: Shape, size: ByteLen, l1: TableLocation, table_clusters: u64) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(MAGIC);
    bytes.extend(shape.version.to_be_bytes());
    bytes.extend([0; 12]);
    bytes.extend(shape.cluster_bits.to_be_bytes());
    bytes.extend(size.get().to_be_bytes());
    bytes.extend([0; 4]);
    bytes.extend((l1.entries as u32).to_be_bytes());
    bytes.extend(l1.offset.to_be_bytes());
    bytes.extend((1u64 << shape.cluster_bits).to_be_bytes());
    bytes.extend((table_clusters as u32).to_be_bytes());
    bytes.extend([0; 12]);
    if shape.version >= 3 {
        let incompatible = u64::from(shape.extended) << 4 | u64::from(shape.data_file) << 2;
        bytes.extend(incompatible.to_be_bytes());
        bytes.extend([0; 16]);
        bytes.extend(shape.refcount_order.to_be_bytes());
        bytes.extend(104u32.to_be_bytes());
    }
    bytes.resize(512, 0);
    bytes
}
