//! qcow2 images over simulated disks.

use std::fs::File;
use std::rc::Rc;

use larder_block::backend::simulated::{SeededRng, SimulatedDevice, SimulatedMedium};
use larder_block::filter::align::{Align, AlignOptions};
use larder_block::{BlockDevice, BoxFuture, ByteLen, ByteOffset, Loop, ReadBuf, WriteBuf, WriteFlags};
use larder_qcow2::check::{self, CheckOptions, Repair};
use larder_qcow2::header::{self, AUTOCLEAR_SESSION, HEADER_SECTOR_BYTES};
use larder_qcow2::journal::{Journal, JournalContents, is_of_this_boot};
use larder_qcow2::shape::Shape;
use larder_qcow2::{MetadataMemory, OpenOptions, Qcow2, RelatedFiles, read_header};

use super::qcow2_image::{self, ImageBytes};
use super::stack::{Disk, Opened, Outcome, Stack};

/// A stack of qcow2 images of every kind, with others as backing files: each opening may put another overlay on top.
pub(super) struct Qcow2Stack {
    pub(super) name: &'static str,
    /// Block size of the disks, in bytes.
    pub(super) block_size: u32,
    /// True if all images have version 3, and thus a journal. Without a journal, a kill may undo an incomplete or
    /// failed request even after a read has seen its effect.
    pub(super) journaled: bool,
}

impl Qcow2Stack {
    fn file(&self, disk: &Rc<SimulatedDevice>) -> Rc<dyn BlockDevice> {
        match self.block_size {
            512 => Rc::clone(disk) as _,
            _ => Rc::new(Align::new(Rc::clone(disk) as _, AlignOptions::default())),
        }
    }

    fn shape(&self, random: &mut SeededRng) -> Shape {
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
            data_file: false,
        };
        if !extended && random.chance(400) {
            // Small clusters make all tables short, so that they soon must grow.
            shape.cluster_bits = 9;
            shape.refcount_order = if version == 3 { 6 } else { 4 };
        }
        shape
    }

    /// Creates an empty image, sometimes with a file so long that the refcount table covers hardly more.
    async fn create(&self, file: &Rc<dyn BlockDevice>, size: ByteLen, random: &mut SeededRng) -> Outcome<()> {
        let shape = self.shape(random);
        larder_qcow2::create(file, shape, size).await?;
        let blocks = file.geometry().size.get().min(shape.cluster_len()) / 8;
        let counted_clusters = blocks << shape.refcount_block_bits();
        let len = (counted_clusters - random.below(64)) << shape.cluster_bits;
        if len <= LONG_FILE_BYTES_MAX && random.chance(700) {
            file.grow(ByteLen::new(len)).await?;
        }
        Ok(())
    }

    /// Creates an image longer than the overlay's disk, with data after the disk's end that must never be read.
    async fn create_longer(
        &self,
        on: &Loop,
        file: &Rc<dyn BlockDevice>,
        size: ByteLen,
        random: &mut SeededRng,
    ) -> Outcome<()> {
        let sectors = random.between(1, 512);
        self.create(file, size + ByteLen::new(sectors * 512), random).await?;
        let options = OpenOptions { load_ahead: false, ..OpenOptions::default() };
        let image = Qcow2::open(on, Rc::clone(file), RelatedFiles::default(), options).await?;
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

/// Maximum initial length of an image's file, in bytes.
const LONG_FILE_BYTES_MAX: u64 = 8 << 20;

impl Qcow2Stack {
    /// Opens the images in `files`, the last of them for writing.
    async fn chain(
        on: &Loop,
        disks: &[Rc<SimulatedDevice>],
        files: &[Rc<dyn BlockDevice>],
        random: &mut SeededRng,
    ) -> Outcome<Rc<Qcow2>> {
        let mut top: Option<Rc<Qcow2>> = None;
        for (index, file) in files.iter().enumerate() {
            let is_last = index + 1 == files.len();
            let (mut journal, mut leftover_journal) = (None, None);
            let user = random.pick(&[0, 0, 1]);
            let files = [disks[index].host_memory(user)?, disks[index].host_memory(1 - user)?];
            if is_last {
                journal = Some(Journal::map(&files[0])?);
                leftover_journal = JournalContents::read(&files[1])?;
                handle_lost_journal(file, &files, random).await?;
            }
            let options = OpenOptions {
                journal,
                orphaned_journal: leftover_journal,
                read_only: !is_last,
                metadata_memory: MetadataMemory::new(random.pick(&[ByteLen::ZERO, ByteLen::kib(2), ByteLen::mib(64)])),
                load_ahead: random.chance(300),
            };
            let others = RelatedFiles { backing: top.map(|backing| backing as _), data_file: None };
            top = Some(Qcow2::open(on, Rc::clone(file), others, options).await?);
            if is_last && random.chance(800) {
                // The journal's changes are in the image now.
                files[1].set_len(0)?;
            }
        }
        Ok(top.ok_or("there is no image on the disks")?)
    }
}

/// Handles the loss of a killed server's journal. Either the user discards it, or the image is served as it is
/// because the host was rebooted, after it had written all its dirty data to disks. Sometimes the image is repaired
/// then.
async fn handle_lost_journal(file: &Rc<dyn BlockDevice>, journals: &[Rc<File>], random: &mut SeededRng) -> Outcome<()> {
    let session = read_header(file).await?.autoclear & AUTOCLEAR_SESSION;
    let fits_session =
        |journal: &Rc<File>| Ok(JournalContents::read_header(journal)?.is_some_and(|left| left.fits(session)));
    let found: Vec<bool> = journals.iter().map(fits_session).collect::<std::io::Result<_>>()?;
    if session == 0 || found.contains(&true) {
        return Ok(());
    }
    if random.chance(500) {
        check::discard_session(file).await?;
    } else if is_of_this_boot(session) {
        let mut sector = [0; HEADER_SECTOR_BYTES];
        file.read(ByteOffset::ZERO, ReadBuf::new(&mut sector)).await?;
        let other_boot_session = header::autoclear(&sector) ^ 1 << 63;
        header::set_autoclear(&mut sector, other_boot_session);
        file.flush().await?;
        file.write(ByteOffset::ZERO, WriteBuf::new(&sector), WriteFlags::NONE).await?;
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

/// Takes an internal snapshot in a closed image, as another program would.
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
    // Until the header is written, the only effect is that some refcounts are too high.
    let (header, rest) = bytes.split_at(512);
    file.write(ByteOffset::new(512), WriteBuf::new(rest), WriteFlags::NONE).await?;
    file.flush().await?;
    file.write(ByteOffset::ZERO, WriteBuf::new(header), WriteFlags::NONE).await?;
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

    fn disks(&self, random: &mut SeededRng) -> Vec<Disk> {
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
            let mut random = SeededRng::new(disks[0].seed());
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
        mut random: SeededRng,
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
                // As a user would, this closes the image cleanly before an overlay goes on top.
                let top = Self::chain(on, disks, &files, &mut random).await?;
                top.close().await?;
                let file = self.file(&disks[files.len()]);
                self.create(&file, top.geometry().size, &mut random).await?;
                files.push(file);
            }
            if random.chance(250) {
                // The image must be closed, with no journal to replay.
                Self::chain(on, disks, &files, &mut random).await?.close().await?;
                if let Some(file) = files.last() {
                    take_snapshot(file).await?;
                }
            }
            Ok(Opened::plain(Self::chain(on, disks, &files, &mut random).await?))
        })
    }

    fn check(&self, media: &[SimulatedMedium]) -> Result<(), String> {
        let images = media.iter().filter_map(ImageBytes::of);
        images
            .enumerate()
            .try_for_each(|(index, image)| image.check().map_err(|reason| format!("image {index}: {reason}")))
    }

    fn tables(&self, media: &[SimulatedMedium]) -> Vec<[u64; 2]> {
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
