//! Fuzzing of whole images: a sound image is created and written to, then damaged, and served. An undamaged image
//! must hold the written data. A damaged one must not panic, hang, or have guest data written over its metadata.

use std::fs::File;
use std::rc::Rc;

use larder_block::backend::memory::MemoryDevice;
use larder_block::backend::simulated::{
    LatencyDistribution, SimulatedDevice, SimulatedMedium, SimulatedOptions, SparseImage,
};
use larder_block::{
    BlockDevice, ByteLen, ByteOffset, ByteRange, ExtentKind, IoResult, Loop, ReadBuf, WriteBuf, WriteFlags, ZeroFlags,
};
use larder_qcow2::journal::Journal;
use larder_qcow2::shape::Shape;
use larder_qcow2::{MetadataMemory, OpenOptions, Qcow2, RelatedFiles};

use super::Input;
use super::guard::{Guard, Places};
use super::model::{self, Model, SECTOR};
use super::mutate::Damage;

const BEFORE_MAX: usize = 24;
const AFTER_MAX: usize = 48;
const DAMAGES_MAX: u64 = 6;
/// The maximum length of a request in sectors, except for those over the whole disk.
const REQUEST_SECTORS_MAX: u64 = 96;
/// The maximum size to which a disk is grown: the map's directory takes a byte per MiB of small clusters.
const GROWTH_MAX: u64 = 1 << 32;

/// The kind and the range of a request.
#[derive(Clone, Copy, Debug)]
enum Request {
    Read(ByteRange),
    Write(ByteRange, u32, bool),
    Zeroes(ByteRange, ZeroFlags),
    Discard(ByteRange),
    Extents(ByteRange, usize),
    Flush,
    Grow(u64),
}

struct Run<'a> {
    input: Input<'a>,
    latency: LatencyDistribution,
    /// The expected content of the disk, as long as nothing was damaged.
    model: Option<Model>,
    number: u32,
    backing: Option<u64>,
    journal: Option<File>,
    seed: u64,
}

/// Runs one fuzz input.
pub fn run(data: &[u8]) {
    let mut input = Input(data);
    let shape = shape(&mut input);
    let size = match input.byte() % 4 {
        0..=2 => (1 + input.below(2048)) * SECTOR,
        _ => (1 + input.below(1 << 20)) * SECTOR,
    };
    let flags = input.byte();
    let mut run = Run {
        latency: match flags & 1 {
            0 => LatencyDistribution::NONE,
            _ => LatencyDistribution::VARIED,
        },
        backing: (flags & 2 != 0).then(|| (1 + u64::from(flags >> 4) * 9) * SECTOR),
        journal: (flags & 4 != 0).then(journal),
        model: Some(Model::default()),
        number: 1,
        seed: flags.into(),
        input,
    };
    if let (Some(model), Some(len)) = (&mut run.model, run.backing) {
        model.write(0, len, u32::MAX);
    }
    let (mut bytes, mut file_size) = run.make(shape, size);
    let mut sector = [0; 512];
    bytes.read(ByteOffset::ZERO, &mut sector);
    let mut damage = Damage { places: Places::read(&sector), bytes: &mut bytes, size: &mut file_size };
    let damages = run.input.below(DAMAGES_MAX);
    for _ in 0..damages {
        damage.one(&mut run.input);
        run.model = None;
    }
    // Twice, because the next server must be able to open the image that the first one leaves.
    for _ in 0..2 {
        (bytes, file_size) = run.serve(bytes, file_size);
    }
}

fn journal() -> File {
    let memory = rustix::fs::memfd_create("larder-fuzz", rustix::fs::MemfdFlags::CLOEXEC);
    File::from(memory.expect("memory"))
}

fn shape(input: &mut Input<'_>) -> Shape {
    let flags = input.byte();
    let version = if flags & 3 == 0 { 2 } else { 3 };
    let extended = version == 3 && flags & 12 == 0;
    Shape {
        cluster_bits: match extended {
            true => 14,
            false => 9 + u32::from(flags >> 4) % 8,
        },
        extended,
        refcount_order: if version == 3 { u32::from(input.byte() % 7) } else { 4 },
        version,
        data_file: false,
    }
}

impl Run<'_> {
    fn device(&self, on: &Loop, bytes: &SparseImage, size: u64) -> Rc<Guard> {
        let mut medium = SimulatedMedium::new(ByteLen::new(size), 512);
        let mut at = ByteOffset::ZERO;
        let end = ByteOffset::new(size);
        while let Some(data) = bytes.next_data(ByteRange::between(at, end)) {
            let mut page = vec![0; data.len.as_usize()];
            bytes.read(data.start, &mut page);
            medium.write_durably(data.start, &page);
            at = data.end();
        }
        let options = SimulatedOptions { latency: self.latency, seed: self.seed, ..SimulatedOptions::default() };
        Guard::new(SimulatedDevice::open(on, medium, options), bytes.clone())
    }

    /// Returns the backing file and the data file of the image.
    async fn others(&self, on: &Loop, file: &Rc<dyn BlockDevice>) -> RelatedFiles {
        let backing = match self.backing {
            Some(len) => {
                let device = Rc::new(MemoryDevice::new(ByteLen::new(len), 512));
                let mut bytes = vec![0; len as usize];
                model::fill(u32::MAX, &mut bytes);
                let write = device.write(ByteOffset::ZERO, WriteBuf::new(&bytes), WriteFlags::NONE);
                write.await.expect("it fits");
                Some(device as Rc<dyn BlockDevice>)
            }
            None => None,
        };
        let has_data_file = larder_qcow2::read_header(file).await.is_ok_and(|header| header.shape.data_file);
        let data_file = has_data_file.then(|| {
            let medium = SimulatedMedium::new(ByteLen::kib(64), 512);
            SimulatedDevice::open(on, medium, SimulatedOptions::default()) as _
        });
        RelatedFiles { backing, data_file }
    }

    async fn open(&mut self, on: &Loop, file: &Rc<Guard>) -> Option<Rc<Qcow2>> {
        let flags = self.input.byte();
        let lower = Rc::clone(file) as Rc<dyn BlockDevice>;
        let others = self.others(on, &lower).await;
        let journal = self.journal.as_ref().map(|file| Journal::map(file).expect("a map"));
        let options = OpenOptions {
            journal,
            orphaned_journal: None,
            read_only: self.model.is_none() && flags & 7 == 7,
            metadata_memory: MetadataMemory::new(
                [ByteLen::mib(1), ByteLen::ZERO, ByteLen::kib(2)][usize::from(flags >> 3) % 3],
            ),
            load_ahead: flags & 64 != 0,
        };
        let read_only = options.read_only;
        match Qcow2::open(on, lower, others, options).await {
            Ok(image) => {
                if !read_only {
                    file.arm();
                }
                Some(image)
            }
            Err(error) => {
                assert!(self.model.is_none(), "a sound image is refused: {error}");
                None
            }
        }
    }

    /// Creates a sound image, and returns the content and length of its file.
    fn make(&mut self, shape: Shape, size: u64) -> (SparseImage, u64) {
        let on = Loop::simulated().expect("a loop");
        let file = self.device(&on, &SparseImage::default(), 512);
        on.block_on(async {
            let lower = Rc::clone(&file) as Rc<dyn BlockDevice>;
            let made = larder_qcow2::create(&lower, shape, ByteLen::new(size)).await;
            made.expect("it is made");
            let image = self.open(&on, &file).await.expect("it is sound");
            let requests = self.input.below(BEFORE_MAX as u64);
            for _ in 0..requests {
                self.ask(&image).await;
            }
            image.close().await.expect("it is closed");
        });
        file.disarm();
        (file.bytes(), file.geometry().size.get())
    }

    /// Opens an image, makes requests, and closes it, or not.
    fn serve(&mut self, bytes: SparseImage, size: u64) -> (SparseImage, u64) {
        let on = Loop::simulated().expect("a loop");
        let file = self.device(&on, &bytes, size);
        on.block_on(async {
            let Some(image) = self.open(&on, &file).await else {
                return;
            };
            for _ in 0..AFTER_MAX {
                if self.input.is_empty() {
                    break;
                }
                match self.model.is_some() {
                    true => self.ask(&image).await,
                    false => self.ask_together(&on, &image).await,
                }
            }
            // A journal compensates for a killed process; without one everything was committed anyway.
            if self.input.byte() & 3 != 0 {
                let closed = image.close().await;
                assert!(self.model.is_none() || closed.is_ok(), "{closed:?}");
            }
        });
        file.disarm();
        (file.bytes(), file.geometry().size.get())
    }

    fn range(&mut self, size: u64) -> ByteRange {
        let sectors = size / SECTOR;
        let first = match self.input.byte() % 4 {
            0 => 0,
            1 => self.input.below(sectors.min(64)),
            _ => self.input.below(sectors),
        };
        let len = 1 + self.input.below(REQUEST_SECTORS_MAX.min(sectors - first));
        ByteRange::new(first * SECTOR, len.min(sectors - first) * SECTOR)
    }

    fn request(&mut self, size: u64) -> Request {
        let kind = self.input.byte();
        let whole = ByteRange::new(0, size / SECTOR * SECTOR);
        if size < SECTOR {
            return Request::Flush;
        }
        match kind % 16 {
            0..=3 => Request::Read(self.range(size)),
            4..=9 => {
                self.number += 1;
                Request::Write(self.range(size), self.number, kind & 32 != 0)
            }
            10 => {
                let flags = ZeroFlags { unmap: kind & 32 != 0, fua: kind & 64 != 0, fast_only: false };
                let range = if kind & 128 != 0 { whole } else { self.range(size) };
                Request::Zeroes(range, flags)
            }
            11 => Request::Discard(if kind & 128 != 0 { whole } else { self.range(size) }),
            12 => {
                let range = if kind & 128 != 0 { whole } else { self.range(size) };
                Request::Extents(range, usize::from(kind >> 4))
            }
            13 => {
                let added = SECTOR * (1 + self.input.below(1 << 16));
                let to = match kind & 128 != 0 && self.model.is_none() {
                    true => self.input.long(),
                    false => (size + added) & !511,
                };
                match to.min(GROWTH_MAX.max(size)) {
                    to if kind & 64 == 0 => Request::Grow(to),
                    _ => Request::Flush,
                }
            }
            _ => Request::Flush,
        }
    }

    /// Makes one request to a sound image, which must succeed with a correct result.
    async fn ask(&mut self, image: &Rc<Qcow2>) {
        let request = self.request(image.geometry().size.get());
        let before = image.geometry().size.get();
        let (done, bytes) = perform(image, request).await;
        done.unwrap_or_else(|error| panic!("{request:?}: {error}"));
        let Some(model) = &mut self.model else { return };
        match request {
            Request::Read(range) => model.see(range.start.get(), &bytes),
            Request::Write(range, number, _) => model.write(range.start.get(), range.len.get(), number),
            Request::Zeroes(range, _) => model.write(range.start.get(), range.len.get(), 0),
            Request::Discard(range) => model.discard(range.start.get(), range.len.get()),
            // The backing file's data there does not belong to the disk.
            Request::Grow(to) => match self.backing {
                Some(len) if before < len => model.write(before, len.min(to.max(before)) - before, 0),
                _ => {}
            },
            Request::Extents(..) | Request::Flush => {}
        }
    }

    /// Makes up to four requests at the same time.
    async fn ask_together(&mut self, on: &Loop, image: &Rc<Qcow2>) {
        let count = 1 + self.input.below(4);
        let mut under_way = Vec::new();
        for _ in 0..count {
            let request = self.request(image.geometry().size.get());
            let image = Rc::clone(image);
            under_way.push(on.spawn_with_result(async move {
                // An error is permitted, because the image is damaged.
                let _ = perform(&image, request).await;
            }));
        }
        for task in under_way {
            task.await;
        }
    }
}

/// Makes a request, and returns the bytes that it read.
async fn perform(image: &Rc<Qcow2>, request: Request) -> (IoResult, Vec<u8>) {
    let mut bytes = Vec::new();
    let done = match request {
        Request::Read(range) => {
            bytes = vec![0xee; range.len.as_usize()];
            image.read(range.start, ReadBuf::new(&mut bytes)).await
        }
        Request::Write(range, number, fua) => {
            bytes = vec![0; range.len.as_usize()];
            model::fill(number, &mut bytes);
            image.write(range.start, WriteBuf::new(&bytes), WriteFlags { fua }).await
        }
        Request::Zeroes(range, flags) => image.write_zeroes(range, flags).await,
        Request::Discard(range) => image.discard(range).await,
        Request::Extents(range, limit) => image.extents(range, limit).await.map(|extents| {
            assert!(!extents.is_empty() && extents.len() <= limit.max(1));
            let mut at = range.start;
            for extent in &extents {
                assert!(extent.range.start == at && !extent.range.is_empty());
                assert!(matches!(extent.kind, ExtentKind::Data | ExtentKind::Zero | ExtentKind::Hole));
                at = extent.range.end();
            }
            assert!(at <= range.end());
        }),
        Request::Flush => image.flush().await,
        Request::Grow(size) => image.grow(ByteLen::new(size)).await,
    };
    (done, bytes)
}
