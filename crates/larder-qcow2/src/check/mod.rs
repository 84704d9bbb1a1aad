//! Finding and mending what is wrong with an image's metadata, as `qemu-img check` does.
//!
//! A check walks everything that refers to clusters ([`walk`]), counts the references ([`count`]), and compares them
//! with the refcounts that the image has ([`stored`]) and with the flags that say "used once" ([`copied`]). What is
//! counted as one error is what QEMU counts as one.
//!
//! Repair ([`repair`]) writes in an order that a crash may cut off anywhere: no step leaves an image worse than it found
//! it, and the bits that mark it as dirty or corrupt are cleared last.
//!
//! Memory: about 1.4 bytes for each cluster of the image that is used, and never more than
//! [`CheckOptions::memory_max`]; an image that would need more is refused. Tables are read one cluster at a time.

mod copied;
mod count;
mod entries;
mod repair;
mod stored;
mod walk;

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;
use std::task::Poll;

use larder_block::{AlignedBuf, BlockDevice, ByteLen, ByteOffset, IoError, ReadBuf, WriteBuf, WriteFlags};

pub use repair::{Repair, Repaired, discard_session, repair};

use crate::entry::OFFSET;
use crate::header::{Header, HeaderError, TableAt};
use crate::open::{OpenError, read_area};
use count::{Counts, OutOfMemory};
use walk::Walk;

/// Findings that are told one by one; further ones are counted only.
const FINDINGS_MAX: usize = 200;

/// How to check.
#[derive(Clone, Copy, Debug)]
pub struct CheckOptions {
    /// What counting references may take.
    pub memory_max: ByteLen,
    /// Bytes of tables that may be read: tables of a crafted image can lead to the same tables again and again.
    pub work_max: ByteLen,
    /// Bytes of the file, if the device is larger because it fills up a file's last block.
    pub file_len: Option<ByteLen>,
}

/// Enough for 48 TiB of 64 KiB clusters, all used.
pub const CHECK_MEMORY_DEFAULT: ByteLen = ByteLen::mib(1024);

impl Default for CheckOptions {
    fn default() -> Self {
        Self {
            memory_max: CHECK_MEMORY_DEFAULT,
            work_max: ByteLen::new(u64::MAX),
            file_len: None,
        }
    }
}

/// How grave a finding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The image is damaged, or will be when it is written.
    Error,
    /// Space is lost, nothing else.
    Leak,
}

/// Something that is wrong.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// How grave.
    pub severity: Severity,
    /// What and where.
    pub text: String,
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Error => "error",
            Severity::Leak => "leak",
        };
        write!(f, "{severity}: {}", self.text)
    }
}

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Errors.
    pub errors: u64,
    /// Leaked clusters.
    pub leaks: u64,
    /// The first of both.
    pub findings: Vec<Finding>,
    /// The header says that the refcounts may be wrong.
    pub dirty: bool,
    /// The header says that the image is corrupt.
    pub corrupt: bool,
    /// Clusters of the disk.
    pub total_clusters: u64,
    /// Those of them that have a place in the image.
    pub allocated_clusters: u64,
    /// Those that do not lie behind the one before.
    pub fragmented_clusters: u64,
    /// Those that are compressed.
    pub compressed_clusters: u64,
    /// Where the last used cluster of the image ends, in bytes.
    pub image_end: u64,
    /// References to what lies past the end of the file, as a whole or in part.
    pub past_end: u64,
    /// Something that is needed and lies past the end of the file, so that a repair can only make it worse.
    pub cut_off: Option<String>,
    /// Of the header, the L1 table and the refcount table, two that lie in the same place: nobody can tell whose the
    /// bytes there are, so that a repair can only make it worse.
    pub overlap: Option<String>,
    /// L2 tables of which the end is missing: the first of them.
    cut_tables: Vec<String>,
    /// The persistent bitmaps lie past the end of the file, at least in part.
    cut_bitmaps: bool,
    /// Errors in refcounts and flags, which follow from the rest of the metadata.
    derived_errors: u64,
    /// Entries that can be mended, or dropped.
    mendable: u64,
    /// Errors that cannot be mended.
    lost: u64,
    /// The refcount table or a block cannot be used.
    structures_unusable: bool,
}

impl Report {
    /// Nothing is wrong.
    pub fn is_clean(&self) -> bool {
        self.errors == 0 && self.leaks == 0 && !self.dirty && !self.corrupt
    }

    /// No repair can do anything but make it worse.
    pub fn is_hopeless(&self) -> bool {
        self.cut_off.is_some() || self.overlap.is_some()
    }

    fn note(&mut self, severity: Severity, text: impl FnOnce() -> String) {
        match severity {
            Severity::Error => self.errors += 1,
            Severity::Leak => self.leaks += 1,
        }
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(Finding { severity, text: text() });
        }
    }

    /// An error that follows from what is right.
    fn derived(&mut self, text: impl FnOnce() -> String) {
        self.derived_errors += 1;
        self.note(Severity::Error, text);
    }

    /// An error that a repair can do nothing about.
    fn lost(&mut self, text: impl FnOnce() -> String) {
        self.lost += 1;
        self.note(Severity::Error, text);
    }

    /// An error that a repair can do away with.
    fn mendable(&mut self, text: impl FnOnce() -> String) {
        self.mendable += 1;
        self.note(Severity::Error, text);
    }
}

/// Why an image could not be checked.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CheckError {
    #[error("{name}: {source}")]
    Header { name: String, source: HeaderError },
    #[error("{0}")]
    Io(String),
    #[error(transparent)]
    Open(OpenError),
    #[error(
        "{name}: counting the references of its {clusters} clusters of {cluster_len} bytes may take {} MiB, more than the {} MiB allowed",
        needed.div_ceil(1 << 20),
        allowed >> 20
    )]
    Memory {
        name: String,
        clusters: u64,
        cluster_len: u64,
        needed: u64,
        allowed: u64,
    },
    #[error(
        "{name}: it must be checked before it is used, and its tables lead to more than {} MiB of tables, more than a sound \
         image of its size has; see `larder disk check`",
        allowed >> 20
    )]
    Work { name: String, allowed: u64 },
    #[error(
        "{name}: a server of it was killed, and may have left a journal with what was not flushed: serve the image once, which puts that into it, or give it up with `larder disk check --discard-journal`, then repair it"
    )]
    CutOff { name: String },
    #[error("{name}: there is no room for a new refcount table and its blocks, {needed} bytes; nothing else was lost")]
    NoRoom { name: String, needed: u64 },
}

impl From<IoError> for CheckError {
    fn from(error: IoError) -> Self {
        Self::Io(error.to_string())
    }
}

impl From<OpenError> for CheckError {
    fn from(error: OpenError) -> Self {
        match error {
            OpenError::Header { name, source } => Self::Header { name, source },
            error => Self::Open(error),
        }
    }
}

/// Checks the image in `file`, a device with blocks of 512 bytes, which nobody changes meanwhile. An external data file
/// is not needed.
///
/// # Errors
/// See [`CheckError`]; damage is not one of them.
pub async fn check(file: &Rc<dyn BlockDevice>, options: CheckOptions) -> Result<Report, CheckError> {
    let image = Image::read(file, options).await?;
    let mut walk = Walk::new(&image, options, false);
    walk.all().await?;
    stored::compare(&mut walk).await?;
    copied::check(&mut walk).await?;
    Ok(walk.report)
}

/// How many references lead past the end of the file, as [`Report::past_end`]. Little is read unless there is reason to
/// think that something is missing.
///
/// # Errors
/// See [`CheckError`].
pub async fn past_end(file: &Rc<dyn BlockDevice>, options: CheckOptions) -> Result<u64, CheckError> {
    let image = Image::read(file, options).await?;
    let header = &image.header;
    let tables = [header.l1, header.refcount_table].map(|table| (table.offset, table.entries * 8));
    let is_whole = tables.iter().all(|(offset, len)| image.holds(*offset, *len))
        && (header.snapshots == 0 || image.holds(header.snapshots_offset, 1));
    if is_whole && !stored::has_use_past_end(&image).await? && !has_cut_table(&image).await? {
        return Ok(0);
    }
    Ok(check(file, options).await?.past_end)
}

/// Whether an L2 table lies where the file ends.
async fn has_cut_table(image: &Image) -> Result<bool, CheckError> {
    let l1 = image.read_table(image.header.l1).await?;
    let mut tables = l1.iter().map(|entry| entry & OFFSET).filter(|offset| *offset != 0);
    Ok(tables.any(|offset| !image.holds(offset, image.cluster_len())))
}

/// An image as the check sees it.
struct Image {
    file: Rc<dyn BlockDevice>,
    name: Rc<str>,
    header: Header,
    refcount_table: Vec<u64>,
    /// Bytes of the file.
    size: u64,
    /// Bytes of tables that may be read...
    work_max: u64,
    /// ...and were.
    work: Cell<u64>,
}

/// The check lets others run each time that it has read so many bytes.
const YIELD_EVERY: u64 = 4 << 20;

/// The part of a refcount table's entry that is no offset.
const REFCOUNT_ENTRY_RESERVED: u64 = 511;

impl Image {
    async fn read(file: &Rc<dyn BlockDevice>, options: CheckOptions) -> Result<Self, CheckError> {
        let name = Rc::clone(file.name());
        let area = read_area(file).await?;
        let header = Header::parse(&area).map_err(|source| CheckError::Header {
            name: name.to_string(),
            source,
        })?;
        let mut image = Self {
            file: Rc::clone(file),
            name,
            header,
            refcount_table: Vec::new(),
            size: options.file_len.unwrap_or(file.geometry().size).get(),
            work_max: options.work_max.get(),
            work: Cell::new(0),
        };
        image.refcount_table = image.read_table(image.header.refcount_table).await?;
        Ok(image)
    }

    /// Bytes of the file.
    fn size(&self) -> u64 {
        self.size
    }

    /// Clusters of the file.
    fn file_clusters(&self) -> u64 {
        self.size().div_ceil(self.cluster_len())
    }

    fn cluster_len(&self) -> u64 {
        self.header.shape.cluster_len()
    }

    /// Whether the image has no snapshots, but a place for their table that cannot be one: QEMU refuses to open it.
    fn has_senseless_snapshots_offset(&self) -> bool {
        let offset = self.header.snapshots_offset;
        self.header.snapshots == 0 && (!self.is_aligned(offset) || offset > i64::MAX as u64)
    }

    fn is_aligned(&self, offset: u64) -> bool {
        offset & (self.cluster_len() - 1) == 0
    }

    fn cluster_of(&self, offset: u64) -> u64 {
        offset >> self.header.shape.cluster_bits
    }

    /// The clusters that `len` bytes (at least 1) at `offset` touch.
    fn clusters_of(&self, offset: u64, len: u64) -> std::ops::RangeInclusive<u64> {
        self.cluster_of(offset)..=self.cluster_of(offset + len - 1)
    }

    /// Reads `len` bytes at `offset`, both multiples of 512; what lies behind the end of the file is zeros, as in QEMU.
    async fn read_bytes(&self, offset: u64, len: u64) -> Result<AlignedBuf, CheckError> {
        self.work(len).await?;
        let mut bytes = AlignedBuf::zeroed(ByteLen::new(len).as_usize());
        let end = self.size().next_multiple_of(512);
        let there = end.saturating_sub(offset).min(len) as usize;
        if there > 0 {
            self.file
                .read(ByteOffset::new(offset), ReadBuf::new(&mut bytes[..there]))
                .await?;
        }
        Ok(bytes)
    }

    /// Counts bytes of tables that are about to be read.
    async fn work(&self, len: u64) -> Result<(), CheckError> {
        let before = self.work.get();
        let after = before.saturating_add(len);
        if after > self.work_max {
            return Err(CheckError::Work {
                name: self.name.to_string(),
                allowed: self.work_max,
            });
        }
        self.work.set(after);
        if before / YIELD_EVERY != after / YIELD_EVERY {
            yield_now().await;
        }
        Ok(())
    }

    async fn read_table(&self, at: TableAt) -> Result<Vec<u64>, CheckError> {
        let bytes = self
            .read_bytes(at.offset, (at.entries * 8).next_multiple_of(512))
            .await?;
        Ok(words(&bytes).take(at.entries as usize).collect())
    }

    /// Writes the sectors of `new` that differ from `old`, which the file has at `offset`.
    async fn write_changes(&self, offset: u64, old: &[u8], new: &[u8]) -> Result<(), CheckError> {
        let sectors = old.len() / 512;
        let changed = |sector: usize| old[sector * 512..][..512] != new[sector * 512..][..512];
        let mut sector = 0;
        while sector < sectors {
            if !changed(sector) {
                sector += 1;
                continue;
            }
            let end = (sector..sectors).find(|sector| !changed(*sector)).unwrap_or(sectors);
            let at = ByteOffset::new(offset + sector as u64 * 512);
            self.file
                .write(at, WriteBuf::new(&new[sector * 512..end * 512]), WriteFlags::NONE)
                .await?;
            sector = end;
        }
        Ok(())
    }

    /// Where the refcount block is, if it can be read.
    fn refcount_block(&self, index: u64) -> Option<u64> {
        let offset = *self.refcount_table.get(usize::try_from(index).ok()?)? & !REFCOUNT_ENTRY_RESERVED;
        (offset != 0 && self.is_aligned(offset) && offset < self.size()).then_some(offset)
    }

    /// The L2 table that an L1 entry refers to, if it can be read.
    fn l2_table(&self, l1_entry: u64) -> Option<u64> {
        let offset = l1_entry & OFFSET;
        (offset != 0 && self.is_aligned(offset) && offset < self.size()).then_some(offset)
    }

    fn out_of_memory(&self, options: CheckOptions) -> impl Fn(OutOfMemory) -> CheckError + use<> {
        let (name, clusters, cluster_len) = (Rc::clone(&self.name), self.file_clusters(), self.cluster_len());
        move |OutOfMemory| CheckError::Memory {
            name: name.to_string(),
            clusters,
            cluster_len,
            needed: Counts::memory_for(clusters),
            allowed: options.memory_max.get(),
        }
    }
}

/// Lets other tasks of the loop run.
async fn yield_now() {
    let mut yielded = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

/// The big-endian numbers of a table.
fn words(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.chunks_exact(8).map(|bytes| {
        let mut word = [0; 8];
        word.copy_from_slice(bytes);
        u64::from_be_bytes(word)
    })
}
