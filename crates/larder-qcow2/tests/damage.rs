//! Tests of images with damaged metadata, or with metadata that only looks damaged.

use std::rc::Rc;

use larder_block::backend::simulated::{LatencyDistribution, SimulatedDevice, SimulatedMedium, SimulatedOptions};
use larder_block::{BlockDevice, ByteLen, ByteOffset, Failure, IoResult, Loop, ReadBuf, WriteBuf, WriteFlags};
use larder_qcow2::shape::Shape;
use larder_qcow2::{OpenError, OpenOptions, Qcow2, RelatedFiles};

const COPIED: u64 = 1 << 63;

/// Clusters of 512 bytes and refcounts of 64 bits, so that tables fill up soon.
const SHAPE: Shape = Shape { cluster_bits: 9, extended: false, refcount_order: 6, version: 3, data_file: false };

struct Kit {
    on: Loop,
    file: Rc<dyn BlockDevice>,
}

impl Kit {
    fn new(size: u64) -> Self {
        let on = Loop::simulated().expect("a loop");
        let options = SimulatedOptions { latency: LatencyDistribution::NONE, ..SimulatedOptions::default() };
        let file: Rc<dyn BlockDevice> = SimulatedDevice::open(&on, SimulatedMedium::new(ByteLen::ZERO, 512), options);
        let made = on.block_on(larder_qcow2::create(&file, SHAPE, ByteLen::new(size)));
        made.expect("it is made");
        Self { on, file }
    }

    fn open(&self) -> Result<Rc<Qcow2>, OpenError> {
        let opening = Qcow2::open(&self.on, Rc::clone(&self.file), RelatedFiles::default(), OpenOptions::default());
        self.on.block_on(opening)
    }

    fn write(&self, image: &Qcow2, at: u64, len: usize, with: u8) -> IoResult {
        let bytes = vec![with; len];
        self.on.block_on(image.write(ByteOffset::new(at), WriteBuf::new(&bytes), WriteFlags::NONE))
    }

    fn read(&self, device: &dyn BlockDevice, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        let read = self.on.block_on(device.read(ByteOffset::new(at), ReadBuf::new(&mut bytes)));
        read.expect("it is read");
        bytes
    }

    fn close(&self, image: Rc<Qcow2>) {
        self.on.block_on(image.close()).expect("it is closed");
    }

    fn word(&self, at: u64) -> u64 {
        let sector = self.read(&*self.file, at & !511, 512);
        let at = (at & 511) as usize;
        sector[at..at + 8].iter().fold(0, |word, byte| word << 8 | u64::from(*byte))
    }

    fn set_word(&self, at: u64, word: u64) {
        let mut sector = self.read(&*self.file, at & !511, 512);
        let within = (at & 511) as usize;
        sector[within..within + 8].copy_from_slice(&word.to_be_bytes());
        let write = self.file.write(ByteOffset::new(at & !511), WriteBuf::new(&sector), WriteFlags::NONE);
        self.on.block_on(write).expect("it is written");
    }

    /// Returns the offset of the L1 table.
    fn l1(&self) -> u64 {
        self.word(40)
    }

    fn refcount_table(&self) -> u64 {
        self.word(48)
    }
}

#[test]
fn moved_l1_table_space_is_reused() {
    let kit = Kit::new(32 << 10);
    let image = kit.open().expect("it is sound");
    kit.write(&image, 0, 512, 1).expect("it is written");
    let first = kit.l1();
    kit.on.block_on(image.grow(ByteLen::mib(4))).expect("it grows");
    assert_ne!(kit.l1(), first);
    for at in (0..2u64 << 20).step_by(64 << 10) {
        kit.write(&image, at, 64 << 10, 7).expect("it is written");
        kit.on.block_on(image.flush()).expect("it is durable");
    }
    kit.close(image);
    let image = kit.open().expect("it is sound");
    assert!(kit.read(&*image, 0, 2 << 20).iter().all(|byte| *byte == 7));
}

#[test]
fn moved_refcount_table_space_is_reused() {
    let kit = Kit::new(8 << 20);
    let image = kit.open().expect("it is sound");
    let first = kit.refcount_table();
    for at in (0..8u64 << 20).step_by(64 << 10) {
        kit.write(&image, at, 64 << 10, 9).expect("it is written");
        kit.on.block_on(image.flush()).expect("it is durable");
    }
    assert_ne!(kit.refcount_table(), first);
    kit.close(image);
    let image = kit.open().expect("it is sound");
    assert!(kit.read(&*image, 0, 8 << 20).iter().all(|byte| *byte == 9));
}

/// Space is found for an L1 table with more clusters than a refcount block counts.
#[test]
fn long_l1_table_finds_space() {
    let kit = Kit::new(32 << 10);
    let image = kit.open().expect("it is sound");
    kit.write(&image, 0, 512, 1).expect("it is written");
    // The L1 table has 1024 clusters; a block counts 64.
    kit.on.block_on(image.grow(ByteLen::mib(2048))).expect("it grows");
    kit.write(&image, 1 << 30, 64 << 10, 2).expect("it is written");
    kit.close(image);
    assert!(kit.file.geometry().size <= ByteLen::mib(8));
    let image = kit.open().expect("it is sound");
    assert_eq!(kit.read(&*image, 0, 512), [1; 512]);
    assert_eq!(kit.read(&*image, 1 << 30, 64 << 10), [2; 64 << 10]);
}

/// An L1 entry with a flag but without an offset counts as empty, and does not point to the header.
#[test]
fn l1_entry_of_zero_spares_header() {
    let kit = Kit::new(32 << 10);
    kit.set_word(kit.l1(), COPIED);
    let before = kit.read(&*kit.file, 0, 512);
    let image = kit.open().expect("there is no table");
    kit.write(&image, 0, 512, 1).expect("a table is made");
    kit.close(image);
    assert_eq!(kit.read(&*kit.file, 0, 512)[..88], before[..88]);
    let image = kit.open().expect("it is sound");
    assert_eq!(kit.read(&*image, 0, 512), [1; 512]);
}

#[test]
fn overlapping_tables_are_refused() {
    for at in [Kit::l1, Kit::refcount_table] {
        let kit = Kit::new(32 << 10);
        kit.set_word(kit.l1(), COPIED | at(&kit));
        let refused = kit.open().err();
        assert!(matches!(refused, Some(OpenError::Overlap { .. })), "{refused:?}");
    }
}

/// A write to a guest cluster whose entry points to metadata does not free the metadata.
#[test]
fn metadata_claimed_by_guest_stays_allocated() {
    let kit = Kit::new(32 << 10);
    let image = kit.open().expect("it is sound");
    kit.write(&image, 0, 512, 1).expect("it is written");
    kit.close(image);
    let l2 = kit.word(kit.l1()) & !COPIED;
    // The entry is marked as shared, so a write goes elsewhere and frees this cluster.
    kit.set_word(l2 + 8, kit.refcount_table());
    let before = kit.word(kit.refcount_table());
    let image = kit.open().expect("what is wrong is deep inside");
    kit.write(&image, 512, 512, 2).expect("it is written elsewhere");
    kit.close(image);
    assert_eq!(kit.word(kit.refcount_table()), before);
}

#[test]
fn invalid_refcount_block_fails_writes_only() {
    for block in [u64::MAX - 511, u64::MAX, 1 << 40, 512 + 8] {
        let kit = Kit::new(32 << 10);
        kit.set_word(kit.refcount_table(), block);
        let image = kit.open().expect("it is sound otherwise");
        assert_eq!(kit.read(&*image, 0, 512), [0; 512]);
        assert!(kit.write(&image, 0, 512, 1).is_err());
    }
}

#[test]
fn growth_over_corrupt_entry_is_refused() {
    let kit = Kit::new(16 << 10);
    let image = kit.open().expect("it is sound");
    kit.write(&image, 0, 512, 1).expect("it is written");
    kit.close(image);
    let l2 = kit.word(kit.l1()) & !COPIED;
    // An offset past the end of the disk, and no multiple of the cluster size.
    kit.set_word(l2 + 40 * 8, COPIED | ((3 << 9) + 256));
    let image = kit.open().expect("the damage is in a table");
    let error = kit.on.block_on(image.grow(ByteLen::kib(32))).expect_err("it is corrupt");
    assert_eq!(error.failure(), Failure::Invalid);
    assert_eq!(image.geometry().size, ByteLen::kib(16));
    assert_eq!(kit.read(&*image, 0, 512), [1; 512]);
    kit.close(image);
    assert_eq!(kit.word(24), 16 << 10);
}
