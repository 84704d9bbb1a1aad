//! What is simulated: stacks of layers over simulated disks. To add one, implement [`Stack`] and name it in [`STACKS`].

use std::fs::File;
use std::rc::Rc;

use larder_block::backend::memory::MemoryDevice;
use larder_block::backend::simulated::{Medium, Options, Random, ServiceModel, SimulatedDevice, SlowDevice};
use larder_block::filter::align::{Align, AlignOptions};
use larder_block::filter::throttle::{Limit, Limits, Throttle};
use larder_block::{BlockDevice, BoxFuture, ByteLen, ByteOffset, Loop, ReadBuf, WriteBuf, WriteFlags};
use larder_prefetch::{Prefetch, PrefetchOptions};
use larder_qcow2::check::{self, CheckOptions, Repair};
use larder_qcow2::header::{self, AUTOCLEAR_SESSION, HEADER_SECTOR};
use larder_qcow2::journal::{Journal, Left, is_of_this_boot};
use larder_qcow2::shape::Shape;
use larder_qcow2::{OpenOptions, Others, Qcow2, read_header};

use super::cached::Cached;
use super::qcow2_image::{self, ImageBytes};

/// A disk that a stack stands on.
#[derive(Clone, Copy, Debug)]
pub struct Disk {
    /// Its size.
    pub size: ByteLen,
    /// What it writes at once or not at all, in bytes.
    pub sector_size: u32,
    /// Its block size, in bytes.
    pub block_size: u32,
    /// The alignment of memory that it insists on, in bytes.
    pub memory_alignment: u32,
}

impl Disk {
    /// A disk of 512-byte blocks that takes any memory, of a random small size.
    pub fn small(random: &mut Random) -> Self {
        Self {
            size: ByteLen::kib(random.between(4, 64) * 4),
            sector_size: 512,
            block_size: 512,
            memory_alignment: 1,
        }
    }

    /// The same with blocks of 4096 bytes and direct I/O's demands on memory; sometimes it tears its blocks.
    pub fn small_4k(random: &mut Random) -> Self {
        Self {
            sector_size: random.pick(&[512, 4096]),
            block_size: 4096,
            memory_alignment: 512,
            ..Self::small(random)
        }
    }

    /// The disk before anything was written.
    pub fn medium(&self) -> Medium {
        let mut medium = Medium::new(self.size, self.sector_size);
        medium.track_room();
        medium
    }

    /// What a simulated device over it is like.
    pub fn options(&self, seed: u64) -> Options {
        Options {
            seed,
            block_size: self.block_size,
            memory_alignment: self.memory_alignment,
            ..Options::default()
        }
    }
}

/// What comes of formatting or opening a stack. Not `anyhow`'s, because a device's errors stay on its thread.
pub type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

/// Something that may be changed while the stack runs, such as limits.
pub type Poke = Rc<dyn Fn(&mut Random)>;

/// A stack that has been opened.
pub struct Opened {
    /// Its top.
    pub device: Rc<dyn BlockDevice>,
    /// Changes its settings at random.
    pub poke: Option<Poke>,
}

impl Opened {
    /// Nothing to change.
    pub fn plain(device: Rc<dyn BlockDevice>) -> Self {
        Self { device, poke: None }
    }
}

/// A stack of layers. One value serves every seed, on every thread: what differs comes from the random numbers, and
/// what outlives a stop must lie on the disks.
pub trait Stack: Sync {
    /// What it is called on the command line.
    fn name(&self) -> &'static str;

    /// The stack under its own layer, if it is one over another: what it does not say itself is as there.
    fn below(&self) -> Option<&'static dyn Stack> {
        None
    }

    /// How many of its disks, the last ones, are its own layer's.
    fn own_disks(&self) -> usize {
        0
    }

    /// What disks it stands on, at least one.
    fn disks(&self, random: &mut Random) -> Vec<Disk>;

    /// Makes new disks ready, once, without faults and stops.
    fn format<'a>(&'a self, _: &'a Loop, _: &'a [Rc<SimulatedDevice>]) -> BoxFuture<'a, Outcome<()>> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Opens it, for the first time or after a stop at any moment, even during an earlier opening. Its tasks must not
    /// keep the loop alive. `random` is another one each time.
    fn open<'a>(
        &'a self,
        on: &'a Loop,
        disks: &'a [Rc<SimulatedDevice>],
        random: Random,
    ) -> BoxFuture<'a, Outcome<Opened>>;

    /// Checks what a stop has left on the disks, apart from what can be read through the stack.
    ///
    /// # Errors
    /// What is wrong.
    fn check(&self, media: &[Medium]) -> Result<(), String> {
        match self.below() {
            Some(below) => below.check(&media[..media.len() - self.own_disks()]),
            None => Ok(()),
        }
    }

    /// Where tables lie on the disks that may move, to count how often they do; two numbers for each disk that has some.
    fn tables(&self, media: &[Medium]) -> Vec<[u64; 2]> {
        match self.below() {
            Some(below) => below.tables(&media[..media.len() - self.own_disks()]),
            None => Vec::new(),
        }
    }

    /// How many of its disks may fail requests, from the first on.
    fn failing(&self, disks: usize) -> usize {
        disks
    }

    /// Whether its size follows that of its first disk.
    fn is_resizable(&self) -> bool {
        self.below().is_none_or(Stack::is_resizable)
    }

    /// Whether it can be made larger ([`BlockDevice::grow`]).
    fn is_growable(&self) -> bool {
        self.below().is_some_and(Stack::is_growable)
    }

    /// Whether what it holds outlives a stop; if not, it is run once and verified before it ends.
    fn is_persistent(&self) -> bool {
        true
    }

    /// Whether a killed process loses nothing that had completed. If not, it is only stopped by losing power.
    fn survives_kill(&self) -> bool {
        self.below().is_none_or(Stack::survives_kill)
    }

    /// Whether it keeps something in its host's memory for the case that its process is killed. If so, that is sometimes
    /// lost with the process: what was flushed must be there without it.
    fn keeps_host_memory(&self) -> bool {
        self.below().is_some_and(Stack::keeps_host_memory)
    }

    /// Whether a request fails only because one of a disk did.
    fn fails_only_with_a_disk(&self) -> bool {
        true
    }
}

/// Every stack.
pub const STACKS: &[&dyn Stack] = &[
    &Plain {
        name: "plain",
        block_size: 512,
    },
    &Plain {
        name: "plain-4k",
        block_size: 4096,
    },
    &Aligned {
        name: "align",
        throttled: false,
    },
    &Throttled,
    &Slow,
    &Aligned {
        name: "align-throttle",
        throttled: true,
    },
    &Memory,
    &Qcow2Stack {
        name: "qcow2",
        block_size: 512,
        journaled: true,
    },
    &Qcow2Stack {
        name: "qcow2-4k",
        block_size: 4096,
        journaled: true,
    },
    &Qcow2Stack {
        name: "qcow2-v2",
        block_size: 512,
        journaled: false,
    },
    &Cached {
        name: "cache",
        below: &Plain {
            name: "plain",
            block_size: 512,
        },
        write_back: false,
    },
    &Cached {
        name: "cache-back",
        below: &Plain {
            name: "plain",
            block_size: 512,
        },
        write_back: true,
    },
    &Prefetched {
        name: "prefetch",
        below: &Plain {
            name: "plain",
            block_size: 512,
        },
    },
    &Prefetched {
        name: "prefetch-qcow2",
        below: &Qcow2Stack {
            name: "qcow2",
            block_size: 512,
            journaled: true,
        },
    },
];

/// The stack of that name.
pub fn find(name: &str) -> Option<&'static dyn Stack> {
    STACKS.iter().copied().find(|stack| stack.name() == name)
}

/// The simulated disk itself: what the oracle and the disk think of each other.
struct Plain {
    name: &'static str,
    block_size: u32,
}

impl Stack for Plain {
    fn name(&self) -> &'static str {
        self.name
    }

    fn disks(&self, random: &mut Random) -> Vec<Disk> {
        match self.block_size {
            512 => vec![Disk::small(random)],
            _ => vec![Disk::small_4k(random)],
        }
    }

    fn open<'a>(&'a self, _: &'a Loop, disks: &'a [Rc<SimulatedDevice>], _: Random) -> BoxFuture<'a, Outcome<Opened>> {
        let device: Rc<dyn BlockDevice> = Rc::clone(&disks[0]) as _;
        Box::pin(async { Ok(Opened::plain(device)) })
    }
}

/// The align filter over large blocks, sometimes with the throttle over it.
struct Aligned {
    name: &'static str,
    throttled: bool,
}

impl Stack for Aligned {
    fn name(&self) -> &'static str {
        self.name
    }

    fn disks(&self, random: &mut Random) -> Vec<Disk> {
        vec![Disk::small_4k(random)]
    }

    fn open<'a>(
        &'a self,
        on: &'a Loop,
        disks: &'a [Rc<SimulatedDevice>],
        mut random: Random,
    ) -> BoxFuture<'a, Outcome<Opened>> {
        Box::pin(async move {
            let options = AlignOptions {
                block_size: 512,
                bounce_len: ByteLen::kib(random.pick(&[8, 16, 64])),
                bounce_count: random.between(1, 4) as usize,
            };
            let aligned = Rc::new(Align::new(Rc::clone(&disks[0]) as _, options));
            if self.throttled {
                return throttled(on, aligned, &mut random);
            }
            Ok(Opened::plain(aligned))
        })
    }
}

/// The throttle over small blocks.
struct Throttled;

impl Stack for Throttled {
    fn name(&self) -> &'static str {
        "throttle"
    }

    fn disks(&self, random: &mut Random) -> Vec<Disk> {
        vec![Disk::small(random)]
    }

    fn open<'a>(
        &'a self,
        on: &'a Loop,
        disks: &'a [Rc<SimulatedDevice>],
        mut random: Random,
    ) -> BoxFuture<'a, Outcome<Opened>> {
        Box::pin(async move { throttled(on, Rc::clone(&disks[0]) as _, &mut random) })
    }
}

fn throttled(on: &Loop, lower: Rc<dyn BlockDevice>, random: &mut Random) -> Outcome<Opened> {
    let throttle = Rc::new(Throttle::new(on, lower, limits(random))?);
    let poked = Rc::clone(&throttle);
    let poke: Poke = Rc::new(move |random| {
        // They were checked when they were made.
        let _ = poked.set_limits(limits(random));
    });
    Ok(Opened {
        device: throttle,
        poke: Some(poke),
    })
}

/// Limits that make requests wait, but for seconds, not minutes.
fn limits(random: &mut Random) -> Limits {
    let mut limit = |least: u64| match random.below(3) {
        0 => Limit::NONE,
        1 => Limit::per_second(random.between(least, least * 50)),
        _ => {
            let average = random.between(least, least * 10);
            Limit {
                average,
                burst: random.between(average, average * 10),
                burst_seconds: random.between(0, 3) as u32,
            }
        }
    };
    let mut limits = Limits {
        bytes_total: limit(1 << 20),
        requests_read: limit(100),
        requests_write: limit(100),
        ..Limits::NONE
    };
    let on_requests = limits.requests_read.average > 0 || limits.requests_write.average > 0;
    if random.chance(500) && on_requests {
        limits.request_size = ByteLen::kib(4);
    }
    if random.chance(100) {
        limits = Limits::NONE;
    }
    limits
}

/// A disk as slow as one of the models.
struct Slow;

impl Stack for Slow {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn disks(&self, random: &mut Random) -> Vec<Disk> {
        vec![Disk::small(random)]
    }

    fn open<'a>(
        &'a self,
        on: &'a Loop,
        disks: &'a [Rc<SimulatedDevice>],
        mut random: Random,
    ) -> BoxFuture<'a, Outcome<Opened>> {
        let (_, model) = random.pick(&ServiceModel::PRESETS);
        let device = SlowDevice::new(on, Rc::clone(&disks[0]) as _, model);
        Box::pin(async { Ok(Opened::plain(Rc::new(device))) })
    }
}

/// The disk in RAM, which forgets everything when it is closed.
struct Memory;

impl Stack for Memory {
    fn name(&self) -> &'static str {
        "memory"
    }

    fn disks(&self, random: &mut Random) -> Vec<Disk> {
        vec![Disk::small(random)]
    }

    fn open<'a>(
        &'a self,
        _: &'a Loop,
        disks: &'a [Rc<SimulatedDevice>],
        mut random: Random,
    ) -> BoxFuture<'a, Outcome<Opened>> {
        let size = disks[0].geometry().size;
        let device = Rc::new(MemoryDevice::new(size, random.pick(&[512, 4096])));
        Box::pin(async { Ok(Opened::plain(device)) })
    }

    fn is_resizable(&self) -> bool {
        false
    }

    fn is_persistent(&self) -> bool {
        false
    }
}

/// Read-ahead over another stack, with so little memory that it is often short of it.
struct Prefetched {
    name: &'static str,
    below: &'static dyn Stack,
}

impl Stack for Prefetched {
    fn name(&self) -> &'static str {
        self.name
    }

    fn below(&self) -> Option<&'static dyn Stack> {
        Some(self.below)
    }

    fn disks(&self, random: &mut Random) -> Vec<Disk> {
        self.below.disks(random)
    }

    fn format<'a>(&'a self, on: &'a Loop, disks: &'a [Rc<SimulatedDevice>]) -> BoxFuture<'a, Outcome<()>> {
        self.below.format(on, disks)
    }

    fn open<'a>(
        &'a self,
        on: &'a Loop,
        disks: &'a [Rc<SimulatedDevice>],
        mut random: Random,
    ) -> BoxFuture<'a, Outcome<Opened>> {
        Box::pin(async move {
            let options = PrefetchOptions {
                memory: ByteLen::kib(random.pick(&[64, 96, 160, 1024])),
                largest_read: ByteLen::kib(random.pick(&[4, 16, 64, 128])),
                ahead_max: ByteLen::kib(random.pick(&[16, 64, 1024])),
            };
            let lower = self.below.open(on, disks, random).await?.device;
            Ok(Opened::plain(Prefetch::over(on, lower, options)))
        })
    }
}

/// Images of every kind, over each other as backing files: whenever it is opened, another overlay may be put on top.
struct Qcow2Stack {
    name: &'static str,
    block_size: u32,
    /// Version 3 only, which has a journal. Without one a request that has not completed, or failed, may be undone by a
    /// kill after somebody has seen what it did.
    journaled: bool,
}

impl Qcow2Stack {
    fn file(&self, disk: &Rc<SimulatedDevice>) -> Rc<dyn BlockDevice> {
        match self.block_size {
            512 => Rc::clone(disk) as _,
            _ => Rc::new(Align::new(Rc::clone(disk) as _, AlignOptions::default())),
        }
    }

    fn shape(&self, random: &mut Random) -> Shape {
        let version = match self.journaled {
            true => 3,
            false => random.between(2, 3) as u32,
        };
        let extended = version == 3 && random.chance(300);
        let mut shape = Shape {
            cluster_bits: if extended { 14 } else { random.between(9, 14) as u32 },
            extended,
            refcount_order: if version == 3 { random.below(7) as u32 } else { 4 },
            version,
        };
        if !extended && random.chance(400) {
            // All tables are short, and soon too short.
            shape.cluster_bits = 9;
            shape.refcount_order = if version == 3 { 6 } else { 4 };
        }
        shape
    }

    /// Makes an empty image, sometimes with a file so long that the refcount table counts little more.
    async fn create(&self, file: &Rc<dyn BlockDevice>, size: ByteLen, random: &mut Random) -> Outcome<()> {
        let shape = self.shape(random);
        larder_qcow2::create(file, shape, size).await?;
        let blocks = file.geometry().size.get().min(shape.cluster_len()) / 8;
        let counted = blocks << shape.refcount_block_bits();
        let len = (counted - random.below(64)) << shape.cluster_bits;
        if len <= FILE_LONG_MAX && random.chance(700) {
            file.grow(ByteLen::new(len)).await?;
        }
        Ok(())
    }

    /// Makes an image that is longer than the disk over it, with bytes there that must never be seen.
    async fn create_longer(
        &self,
        on: &Loop,
        file: &Rc<dyn BlockDevice>,
        size: ByteLen,
        random: &mut Random,
    ) -> Outcome<()> {
        let sectors = random.between(1, 512);
        self.create(file, size + ByteLen::new(sectors * 512), random).await?;
        let options = OpenOptions {
            load_ahead: false,
            ..OpenOptions::default()
        };
        let image = Qcow2::open(on, Rc::clone(file), Others::default(), options).await?;
        for _ in 0..random.between(1, 8) {
            let first = random.below(sectors);
            let count = random.between(1, (sectors - first).min(64));
            let bytes = vec![0xa5; count as usize * 512];
            let at = ByteOffset::ZERO + size + ByteLen::new(first * 512);
            image.write(at, WriteBuf::new(&bytes), WriteFlags::NONE).await?;
        }
        Ok(image.close().await?)
    }
}

/// The longest file that an image is made with, in bytes.
const FILE_LONG_MAX: u64 = 8 << 20;

impl Qcow2Stack {
    /// Opens the images in `files`, the last of them to be written.
    async fn chain(
        on: &Loop,
        disks: &[Rc<SimulatedDevice>],
        files: &[Rc<dyn BlockDevice>],
        random: &mut Random,
    ) -> Outcome<Rc<Qcow2>> {
        let mut top: Option<Rc<Qcow2>> = None;
        for (index, file) in files.iter().enumerate() {
            let is_last = index + 1 == files.len();
            let (mut journal, mut left) = (None, None);
            let user = random.pick(&[0, 0, 1]);
            let files = [disks[index].host_memory(user)?, disks[index].host_memory(1 - user)?];
            if is_last {
                journal = Some(Journal::map(&files[0])?);
                left = Left::read(&files[1])?;
                give_up_session(file, &files, random).await?;
            }
            let options = OpenOptions {
                journal,
                left,
                read_only: !is_last,
                metadata_memory: random.pick(&[ByteLen::ZERO, ByteLen::kib(2), ByteLen::mib(64)]),
                load_ahead: random.chance(300),
            };
            let others = Others {
                backing: top.map(|backing| backing as _),
                data_file: None,
            };
            top = Some(Qcow2::open(on, Rc::clone(file), others, options).await?);
            if is_last && random.chance(800) {
                // It is in the image now.
                files[1].set_len(0)?;
            }
        }
        Ok(top.ok_or("no image")?)
    }
}

/// Does what is done when the journal of a killed server is lost: the image's user gives it up, or the image is served
/// as it is, because the host was started anew, with all that it had not yet written on its disks. Sometimes the image is
/// repaired then.
async fn give_up_session(file: &Rc<dyn BlockDevice>, journals: &[Rc<File>], random: &mut Random) -> Outcome<()> {
    let session = read_header(file).await?.autoclear & AUTOCLEAR_SESSION;
    let has = |journal: &Rc<File>| Ok(Left::head(journal)?.is_some_and(|left| left.fits(session)));
    let found: Vec<bool> = journals.iter().map(has).collect::<std::io::Result<_>>()?;
    if session == 0 || found.contains(&true) {
        return Ok(());
    }
    if random.chance(500) {
        check::discard_session(file).await?;
    } else if is_of_this_boot(session) {
        let mut sector = [0; HEADER_SECTOR];
        file.read(ByteOffset::ZERO, ReadBuf::new(&mut sector)).await?;
        let of_another = header::autoclear(&sector) ^ 1 << 63;
        header::set_autoclear(&mut sector, of_another);
        file.flush().await?;
        file.write(ByteOffset::ZERO, WriteBuf::new(&sector), WriteFlags::NONE)
            .await?;
        file.flush().await?;
    }
    if random.chance(300) {
        let what = random.pick(&[Repair::Leaks, Repair::All]);
        let repaired = check::repair(file, what, CheckOptions::default()).await?;
        if !repaired.after.is_clean() && (what == Repair::All || repaired.before.errors == 0) {
            return Err(format!("the repair of {what:?} leaves {:?}", repaired.after).into());
        }
    }
    Ok(())
}

/// Takes an internal snapshot in an image that nobody has open, as another program would.
async fn take_snapshot(file: &Rc<dyn BlockDevice>) -> Outcome<()> {
    let mut bytes = vec![0; file.geometry().size.as_usize()];
    file.read(ByteOffset::ZERO, ReadBuf::new(&mut bytes)).await?;
    let Some(mut image) = ImageBytes::new(bytes) else {
        return Ok(());
    };
    if !image.take_snapshot() {
        return Ok(());
    }
    let bytes = image.bytes();
    file.grow(ByteLen::of_buffer(bytes.len())).await?;
    // Without the header this changes nothing but refcounts that are too high.
    let (header, rest) = bytes.split_at(512);
    file.write(ByteOffset::new(512), WriteBuf::new(rest), WriteFlags::NONE)
        .await?;
    file.flush().await?;
    file.write(ByteOffset::ZERO, WriteBuf::new(header), WriteFlags::NONE)
        .await?;
    Ok(file.flush().await?)
}

async fn has_image(file: &Rc<dyn BlockDevice>) -> Outcome<bool> {
    let mut bytes = [0; 512];
    file.read(ByteOffset::ZERO, ReadBuf::new(&mut bytes)).await?;
    Ok(bytes[..4] == larder_qcow2::header::MAGIC)
}

impl Stack for Qcow2Stack {
    fn name(&self) -> &'static str {
        self.name
    }

    fn disks(&self, random: &mut Random) -> Vec<Disk> {
        let disk = Disk {
            size: ByteLen::kib(4),
            sector_size: 512,
            block_size: self.block_size,
            memory_alignment: if self.block_size == 512 { 1 } else { 512 },
        };
        vec![disk; random.between(1, 3) as usize]
    }

    fn format<'a>(&'a self, on: &'a Loop, disks: &'a [Rc<SimulatedDevice>]) -> BoxFuture<'a, Outcome<()>> {
        Box::pin(async move {
            let mut random = Random::new(disks[0].seed());
            let size = ByteLen::new(random.between(8, 512) * 512);
            let overlay = random.chance(300).then_some(disks).and_then(|disks| disks.get(1));
            if let Some(overlay) = overlay {
                self.create_longer(on, &self.file(&disks[0]), size, &mut random).await?;
                return self.create(&self.file(overlay), size, &mut random).await;
            }
            self.create(&self.file(&disks[0]), size, &mut random).await
        })
    }

    fn open<'a>(
        &'a self,
        on: &'a Loop,
        disks: &'a [Rc<SimulatedDevice>],
        mut random: Random,
    ) -> BoxFuture<'a, Outcome<Opened>> {
        Box::pin(async move {
            let mut files: Vec<Rc<dyn BlockDevice>> = Vec::new();
            for disk in disks {
                let file = self.file(disk);
                if !has_image(&file).await? {
                    break;
                }
                files.push(file);
            }
            if files.len() < disks.len() && random.chance(500) {
                // As a user does it: the image is left tidy before another one goes on top.
                let top = Self::chain(on, disks, &files, &mut random).await?;
                top.close().await?;
                let file = self.file(&disks[files.len()]);
                self.create(&file, top.geometry().size, &mut random).await?;
                files.push(file);
            }
            if random.chance(250) {
                // It must not be in use, nor be taken up from a journal.
                Self::chain(on, disks, &files, &mut random).await?.close().await?;
                if let Some(file) = files.last() {
                    take_snapshot(file).await?;
                }
            }
            Ok(Opened::plain(Self::chain(on, disks, &files, &mut random).await?))
        })
    }

    fn check(&self, media: &[Medium]) -> Result<(), String> {
        let images = media.iter().filter_map(ImageBytes::of);
        images
            .enumerate()
            .try_for_each(|(index, image)| image.check().map_err(|why| format!("image {index}: {why}")))
    }

    fn tables(&self, media: &[Medium]) -> Vec<[u64; 2]> {
        media.iter().map(qcow2_image::tables).collect()
    }

    fn is_resizable(&self) -> bool {
        false
    }

    fn is_growable(&self) -> bool {
        true
    }

    fn survives_kill(&self) -> bool {
        self.journaled
    }

    fn keeps_host_memory(&self) -> bool {
        true
    }
}
