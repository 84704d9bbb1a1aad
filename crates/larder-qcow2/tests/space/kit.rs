//! An image in a device whose size, faults and clusters the test controls.

use std::cell::Cell;
use std::rc::Rc;

use larder_block::backend::simulated::{
    InjectedFault, LatencyDistribution, SimulatedDevice, SimulatedMedium, SimulatedOptions,
};
use larder_block::filter::Filter;
use larder_block::{
    BlockDevice, BoxFuture, ByteLen, ByteOffset, ByteRange, Failure, Io, IoError, IoResult, Loop, Operation, ReadBuf,
    WriteBuf, WriteFlags,
};
use larder_qcow2::check::{self, CheckOptions, CheckReport};
use larder_qcow2::journal::Journal;
use larder_qcow2::shape::Shape;
use larder_qcow2::{OpenOptions, Qcow2, RelatedFiles};

/// A device that cannot grow once it is fixed, unless another program extends it.
pub(crate) struct Fixed {
    lower: Rc<dyn BlockDevice>,
    pub(crate) is_fixed: Cell<bool>,
    /// An extension of the device, in bytes, by another program just before the next read that touches the range.
    pub(crate) extension: Cell<Option<(ByteRange, u64)>>,
}

/// The content of the new part of an extended device.
pub(crate) const OLD_BYTE: u8 = 0x5e;

impl Fixed {
    /// Extends the device, as another program would.
    pub(crate) async fn extend(&self, len: u64) -> IoResult {
        let end = self.lower.geometry().size;
        let old_bytes = vec![OLD_BYTE; len as usize];
        self.lower.grow(end + ByteLen::new(len)).await?;
        let at = ByteOffset::ZERO + end;
        self.lower.write(at, WriteBuf::new(&old_bytes), WriteFlags::NONE).await
    }
}

impl Filter for Fixed {
    fn lower(&self) -> &Rc<dyn BlockDevice> {
        &self.lower
    }

    fn read<'a>(&'a self, start: ByteOffset, buffer: ReadBuf<'a>) -> Io<'a> {
        let range = start.range(buffer.byte_len());
        let Some((_, len)) = self.extension.get().filter(|(at, _)| at.overlaps(range)) else {
            return self.lower.read(start, buffer);
        };
        self.extension.set(None);
        Io::task(async move {
            self.extend(len).await?;
            self.lower.read(start, buffer).await
        })
    }

    fn grow(&self, size: ByteLen) -> BoxFuture<'_, IoResult> {
        if !self.is_fixed.get() || size <= self.lower.geometry().size {
            return self.lower.grow(size);
        }
        let range = ByteOffset::ZERO.range(size);
        let error = IoError::new(self.lower.name(), Operation::Grow, range, Failure::NoSpace);
        Box::pin(std::future::ready(Err(error)))
    }
}

pub(crate) struct Kit {
    pub(crate) on: Loop,
    pub(crate) shape: Shape,
    pub(crate) device: Rc<Fixed>,
    pub(crate) simulated: Rc<SimulatedDevice>,
    pub(crate) data_file: Option<Rc<dyn BlockDevice>>,
    pub(crate) journal: std::fs::File,
}

impl Kit {
    /// Creates an empty image of a disk of `size` bytes in a device of `clusters` clusters.
    pub(crate) fn new(shape: Shape, size: u64, clusters: u64, latency: LatencyDistribution) -> Self {
        let on = Loop::simulated().expect("a loop");
        let options = SimulatedOptions { latency, ..SimulatedOptions::default() };
        let empty = || SimulatedDevice::open(&on, SimulatedMedium::new(ByteLen::ZERO, 512), options.clone());
        let simulated = empty();
        let device = Rc::new(Fixed {
            lower: Rc::clone(&simulated) as _,
            is_fixed: Cell::new(false),
            extension: Cell::new(None),
        });
        let data_file = shape.data_file.then(|| empty() as Rc<dyn BlockDevice>);
        let file = Rc::clone(&device) as Rc<dyn BlockDevice>;
        on.block_on(larder_qcow2::create(&file, shape, ByteLen::new(size))).expect("it is made");
        on.block_on(file.grow(ByteLen::new(clusters << shape.cluster_bits))).expect("it grows");
        device.is_fixed.set(true);
        Self { on, shape, device, simulated, data_file, journal: tempfile::tempfile().expect("a file") }
    }

    pub(crate) fn open(&self) -> Rc<Qcow2> {
        let options = OpenOptions {
            journal: Some(Journal::map(&self.journal).expect("a journal")),
            load_ahead: false,
            ..OpenOptions::default()
        };
        let others = RelatedFiles { data_file: self.data_file.clone(), ..RelatedFiles::default() };
        let opening = Qcow2::open(&self.on, self.file(), others, options);
        self.on.block_on(opening).expect("it is sound")
    }

    pub(crate) fn file(&self) -> Rc<dyn BlockDevice> {
        Rc::clone(&self.device) as _
    }

    /// Closes the image, and checks that it is sound.
    pub(crate) fn close(&self, image: Rc<Qcow2>) {
        self.on.block_on(image.close()).expect("it is closed");
        let found = self.check();
        assert!(found.is_clean(), "{found:?}");
    }

    pub(crate) fn check(&self) -> CheckReport {
        let file = self.file();
        let checking = check::check(&file, CheckOptions::default());
        self.on.block_on(checking).expect("it is read")
    }

    /// Writes guest clusters until one finds no space, and returns the number that were written.
    pub(crate) fn fill_up(&self, image: &Qcow2) -> u64 {
        (0..).find(|cluster| self.write(image, *cluster, 1).is_err()).expect("the device is full at some time")
    }

    /// Writes sectors of the image, which must not be in use.
    pub(crate) fn overwrite(&self, at: ByteOffset, bytes: &[u8]) {
        let written = self.simulated.write(at, WriteBuf::new(bytes), WriteFlags::NONE);
        self.on.block_on(written).expect("it is written");
    }

    /// Returns a word of the image, in the format's byte order.
    pub(crate) fn word(&self, at: u64) -> u64 {
        let sector = self.read(&*self.file(), at & !511, 512);
        let word = &sector[(at & 511) as usize..][..8];
        word.iter().fold(0, |word, byte| word << 8 | u64::from(*byte))
    }

    /// Returns the location of a refcount block in the image.
    pub(crate) fn refcount_block(&self, index: u64) -> ByteRange {
        let table = self.word(48);
        ByteRange::new(self.word(table + index * 8), self.cluster_len())
    }

    pub(crate) fn cluster_len(&self) -> u64 {
        self.shape.cluster_len()
    }

    pub(crate) fn range(&self, cluster: u64) -> ByteRange {
        ByteRange::new(cluster << self.shape.cluster_bits, self.cluster_len())
    }

    /// Writes a guest cluster.
    pub(crate) fn write(&self, image: &Qcow2, cluster: u64, with: u8) -> IoResult {
        let bytes = vec![with; self.cluster_len() as usize];
        let at = self.range(cluster).start;
        self.on.block_on(image.write(at, WriteBuf::new(&bytes), WriteFlags::NONE))
    }

    pub(crate) fn flush(&self, image: &Qcow2) -> IoResult {
        self.on.block_on(image.flush())
    }

    pub(crate) fn grow(&self, image: &Qcow2, clusters: u64) -> IoResult {
        let size = ByteLen::new(clusters << self.shape.cluster_bits);
        self.on.block_on(image.grow(size))
    }

    /// Adds a fault to the device, until it is healed.
    pub(crate) fn inject(&self, fault: InjectedFault) {
        self.simulated.inject(fault);
    }

    pub(crate) fn discard(&self, image: &Qcow2, cluster: u64) {
        let discarded = self.on.block_on(image.discard(self.range(cluster)));
        discarded.expect("it is discarded");
    }

    pub(crate) fn read(&self, device: &dyn BlockDevice, at: u64, len: u64) -> Vec<u8> {
        let mut bytes = vec![0; len as usize];
        let read = device.read(ByteOffset::new(at), ReadBuf::new(&mut bytes));
        self.on.block_on(read).expect("it is read");
        bytes
    }

    /// Writes the first sector of an unwritten guest cluster, and checks that the rest reads as zeros.
    pub(crate) fn assert_rest_is_zeros(&self, image: &Qcow2, cluster: u64) {
        let at = self.range(cluster).start;
        let written = image.write(at, WriteBuf::new(&[9; 512]), WriteFlags::NONE);
        self.on.block_on(written).expect("there is room");
        let bytes = self.read(image, at.get(), self.cluster_len());
        assert!(bytes[..512].iter().all(|byte| *byte == 9));
        assert!(bytes[512..].iter().all(|byte| *byte == 0), "cluster {cluster}");
    }

    pub(crate) fn assert_holds(&self, image: &Qcow2, cluster: u64, with: u8) {
        let bytes = self.read(image, cluster << self.shape.cluster_bits, self.cluster_len());
        assert!(bytes.iter().all(|byte| *byte == with), "cluster {cluster}");
    }
}

pub(crate) fn shape(cluster_bits: u32, refcount_order: u32) -> Shape {
    Shape { cluster_bits, extended: false, refcount_order, version: 3, data_file: false }
}
