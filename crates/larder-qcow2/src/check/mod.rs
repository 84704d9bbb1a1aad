//! Detects and repairs damage of an image's metadata, like `qemu-img check`.
//!
//! A check walks all references to clusters ([`walk`]), counts them ([`count`]), and compares them with the image's
//! refcounts ([`stored`]) and with the flags that mean "used once" ([`copied`]). Errors are counted like in QEMU.
//!
//! Repair ([`mod@repair`]) writes in an order that a crash may cut off anywhere: no step leaves an image worse than it
//! was, and the bits that mark it as dirty or corrupt are cleared last.
//!
//! Memory: about 1.4 bytes for each used cluster of the image, and never more than [`CheckOptions::memory_max`]; an
//! image that would need more is refused. Tables are read one cluster at a time.

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

pub use repair::{Repair, RepairReport, discard_session, repair};

use crate::entry::OFFSET;
use crate::header::{Header, HeaderError, TableLocation};
use crate::open::{OpenError, read_area};
use count::{OutOfMemory, ReferenceCounts};
use walk::Walk;

/// The maximum number of findings that are reported individually; further ones are only counted.
const FINDINGS_MAX: usize = 200;

/// Options of a check.
#[derive(Clone, Copy, Debug)]
pub struct CheckOptions {
    /// The maximum memory for counting references.
    pub memory_max: ByteLen,
    /// The maximum number of bytes of tables that are read: a crafted image's tables can refer to the same tables
    /// again and again.
    pub table_bytes_max: ByteLen,
    /// The length of the file, if the device is larger because it pads a file's last block.
    pub file_len: Option<ByteLen>,
}

/// The default memory limit, enough for 48 TiB of 64 KiB clusters, all used.
pub const CHECK_MEMORY_DEFAULT: ByteLen = ByteLen::mib(1024);

impl Default for CheckOptions {
    fn default() -> Self {
        Self { memory_max: CHECK_MEMORY_DEFAULT, table_bytes_max: ByteLen::new(u64::MAX), file_len: None }
    }
}

/// The severity of a finding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Severity {
    /// The image is damaged, or will be when it is written.
    Error,
    /// Space is lost, nothing else.
    Leak,
}

/// A fault that a check has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CheckFinding {
    /// The severity of the fault.
    pub severity: Severity,
    /// A description of the fault and its location.
    pub text: String,
}

impl fmt::Display for CheckFinding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let severity = match self.severity {
            Severity::Error => "error",
            Severity::Leak => "leak",
        };
        write!(f, "{severity}: {}", self.text)
    }
}

/// The result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// The number of errors.
    pub errors: u64,
    /// The number of leaked clusters.
    pub leaks: u64,
    /// The first errors and leaks, one by one.
    pub findings: Vec<CheckFinding>,
    /// The header marks the refcounts as possibly wrong.
    pub dirty: bool,
    /// The header marks the image as corrupt.
    pub corrupt: bool,
    /// The number of clusters of the disk.
    pub total_clusters: u64,
    /// The number of clusters of the disk that are allocated in the image.
    pub allocated_clusters: u64,
    /// The number of allocated clusters that do not follow the previous one in the file.
    pub fragmented_clusters: u64,
    /// The number of compressed clusters.
    pub compressed_clusters: u64,
    /// The end of the last used cluster of the image, in bytes.
    pub image_end: u64,
    /// The number of references that lead wholly or partially past the end of the file.
    pub past_end: u64,
    /// Required metadata that lies past the end of the file, so that any repair would make the image worse.
    pub cut_off: Option<String>,
    /// Two of the header, the L1 table and the refcount table that overlap. The owner of the bytes there is unknown,
    /// so that any repair would make the image worse.
    pub overlap: Option<String>,
    /// The first L2 tables whose end is missing.
    truncated_tables: Vec<String>,
    /// The persistent bitmaps lie wholly or partially past the end of the file.
    truncated_bitmaps: bool,
    /// The number of errors in refcounts and flags, which follow from the rest of the metadata.
    derived_errors: u64,
    /// The number of entries that can be corrected or dropped.
    repairable: u64,
    /// The number of errors that cannot be repaired.
    unrepairable: u64,
    /// The refcount table or a refcount block is unusable.
    structures_unusable: bool,
}

impl CheckReport {
    /// Returns true if the image has no errors and leaks, and is not marked as dirty or corrupt.
    pub fn is_clean(&self) -> bool {
        self.errors == 0 && self.leaks == 0 && !self.dirty && !self.corrupt
    }

    /// Returns true if any repair would make the image worse.
    pub fn is_unsafe_to_repair(&self) -> bool {
        self.cut_off.is_some() || self.overlap.is_some()
    }

    fn add_finding(&mut self, severity: Severity, text: impl FnOnce() -> String) {
        match severity {
            Severity::Error => self.errors += 1,
            Severity::Leak => self.leaks += 1,
        }
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(CheckFinding { severity, text: text() });
        }
    }

    /// Records an error in metadata that can be derived from the rest.
    fn add_derived(&mut self, text: impl FnOnce() -> String) {
        self.derived_errors += 1;
        self.add_finding(Severity::Error, text);
    }

    /// Records an error that a repair cannot fix.
    fn add_unrepairable(&mut self, text: impl FnOnce() -> String) {
        self.unrepairable += 1;
        self.add_finding(Severity::Error, text);
    }

    /// Records an error that a repair can fix.
    fn add_repairable(&mut self, text: impl FnOnce() -> String) {
        self.repairable += 1;
        self.add_finding(Severity::Error, text);
    }
}

/// The reason why an image could not be checked.
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
    Memory { name: String, clusters: u64, cluster_len: u64, needed: u64, allowed: u64 },
    #[error(
        "{name}: it must be checked before it is used, and its tables refer to more than {} MiB of tables, more than a valid \
         image of its size has; see `larder disk check`",
        allowed >> 20
    )]
    TooMuchTableData { name: String, allowed: u64 },
    #[error(
        "{name}: a server of this image was killed, and may have left a journal with unflushed writes: serve the image once, which applies the journal, or discard it with `larder disk check --discard-journal`, then repair the image"
    )]
    UnfinishedSession { name: String },
    #[error("{name}: there is no space for a new refcount table and its blocks, {needed} bytes; no data was lost")]
    NoSpace { name: String, needed: u64 },
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

/// Checks the image in `file`, a device with blocks of 512 bytes, which no other program may change meanwhile. An
/// external data file is not needed.
///
/// # Errors
/// See [`CheckError`]; damage is not one of them.
pub async fn check(file: &Rc<dyn BlockDevice>, options: CheckOptions) -> Result<CheckReport, CheckError> {
    let image = Image::read(file, options).await?;
    let mut walk = Walk::new(&image, options, false);
    walk.run().await?;
    stored::compare(&mut walk).await?;
    copied::check(&mut walk).await?;
    Ok(walk.report)
}

/// Returns the number of references that lead past the end of the file, as in [`CheckReport::past_end`]. Reads little
/// of the image unless something seems to be missing.
///
/// # Errors
/// See [`CheckError`].
pub async fn count_past_end(file: &Rc<dyn BlockDevice>, options: CheckOptions) -> Result<u64, CheckError> {
    let image = Image::read(file, options).await?;
    let header = &image.header;
    let tables = [header.l1, header.refcount_table].map(|table| (table.offset, table.entries * 8));
    let is_complete = tables.iter().all(|(offset, len)| image.contains(*offset, *len))
        && (header.snapshots == 0 || image.contains(header.snapshots_offset, 1));
    if is_complete && !stored::has_refcounts_past_end(&image).await? && !has_truncated_table(&image).await? {
        return Ok(0);
    }
    Ok(check(file, options).await?.past_end)
}

/// Returns true if the end of the file cuts off an L2 table.
async fn has_truncated_table(image: &Image) -> Result<bool, CheckError> {
    let l1 = image.read_table(image.header.l1).await?;
    let mut tables = l1.iter().map(|entry| entry & OFFSET).filter(|offset| *offset != 0);
    Ok(tables.any(|offset| !image.contains(offset, image.cluster_len())))
}

/// An image during a check.
struct Image {
    file: Rc<dyn BlockDevice>,
    name: Rc<str>,
    header: Header,
    refcount_table: Vec<u64>,
    /// The length of the file in bytes.
    size: u64,
    /// The maximum number of bytes of tables that are read.
    table_bytes_max: u64,
    /// The number of bytes of tables that were read.
    table_bytes_read: Cell<u64>,
}

/// The number of bytes read after which the check lets other tasks run.
const YIELD_INTERVAL_BYTES: u64 = 4 << 20;

/// The bits of a refcount table's entry that do not belong to the offset.
const REFCOUNT_ENTRY_RESERVED: u64 = 511;

impl Image {
    async fn read(file: &Rc<dyn BlockDevice>, options: CheckOptions) -> Result<Self, CheckError> {
        let name = Rc::clone(file.name());
        let area = read_area(file).await?;
        let header = Header::parse(&area).map_err(|source| CheckError::Header { name: name.to_string(), source })?;
        let mut image = Self {
            file: Rc::clone(file),
            name,
            header,
            refcount_table: Vec::new(),
            size: options.file_len.unwrap_or(file.geometry().size).get(),
            table_bytes_max: options.table_bytes_max.get(),
            table_bytes_read: Cell::new(0),
        };
        image.refcount_table = image.read_table(image.header.refcount_table).await?;
        Ok(image)
    }

    /// Returns the length of the file in bytes.
    fn size(&self) -> u64 {
        self.size
    }

    /// Returns the number of clusters of the file.
    fn file_clusters(&self) -> u64 {
        self.size().div_ceil(self.cluster_len())
    }

    fn cluster_len(&self) -> u64 {
        self.header.shape.cluster_len()
    }

    /// Returns true if the image has no snapshots, but an impossible offset of their table: QEMU refuses to open it.
    fn has_invalid_snapshots_offset(&self) -> bool {
        let offset = self.header.snapshots_offset;
        self.header.snapshots == 0 && (!self.is_aligned(offset) || offset > i64::MAX as u64)
    }

    fn is_aligned(&self, offset: u64) -> bool {
        offset & (self.cluster_len() - 1) == 0
    }

    fn cluster_of(&self, offset: u64) -> u64 {
        offset >> self.header.shape.cluster_bits
    }

    /// Returns the clusters that `len` bytes (at least 1) at `offset` touch.
    fn clusters_of(&self, offset: u64, len: u64) -> std::ops::RangeInclusive<u64> {
        self.cluster_of(offset)..=self.cluster_of(offset + len - 1)
    }

    /// Reads `len` bytes at `offset`, both multiples of 512. Bytes past the end of the file are zeros, as in QEMU.
    async fn read_bytes(&self, offset: u64, len: u64) -> Result<AlignedBuf, CheckError> {
        self.count_table_bytes(len).await?;
        let mut bytes = AlignedBuf::zeroed(ByteLen::new(len).as_usize());
        let end = self.size().next_multiple_of(512);
        let available = end.saturating_sub(offset).min(len) as usize;
        if available > 0 {
            self.file.read(ByteOffset::new(offset), ReadBuf::new(&mut bytes[..available])).await?;
        }
        Ok(bytes)
    }

    /// Accounts for bytes of tables that are about to be read.
    async fn count_table_bytes(&self, len: u64) -> Result<(), CheckError> {
        let before = self.table_bytes_read.get();
        let after = before.saturating_add(len);
        if after > self.table_bytes_max {
            return Err(CheckError::TooMuchTableData { name: self.name.to_string(), allowed: self.table_bytes_max });
        }
        self.table_bytes_read.set(after);
        if before / YIELD_INTERVAL_BYTES != after / YIELD_INTERVAL_BYTES {
            yield_now().await;
        }
        Ok(())
    }

    async fn read_table(&self, at: TableLocation) -> Result<Vec<u64>, CheckError> {
        let bytes = self.read_bytes(at.offset, (at.entries * 8).next_multiple_of(512)).await?;
        Ok(words(&bytes).take(at.entries as usize).collect())
    }

    /// Writes the sectors of `new` that differ from `old`, the file's content at `offset`.
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
            self.file.write(at, WriteBuf::new(&new[sector * 512..end * 512]), WriteFlags::NONE).await?;
            sector = end;
        }
        Ok(())
    }

    /// Returns the offset of a refcount block, if it is readable.
    fn refcount_block(&self, index: u64) -> Option<u64> {
        let offset = *self.refcount_table.get(usize::try_from(index).ok()?)? & !REFCOUNT_ENTRY_RESERVED;
        (offset != 0 && self.is_aligned(offset) && offset < self.size()).then_some(offset)
    }

    /// Returns the offset of the L2 table of an L1 entry, if it is readable.
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
            needed: ReferenceCounts::memory_for(clusters),
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

/// Returns the big-endian words of a table.
fn words(bytes: &[u8]) -> impl Iterator<Item = u64> + '_ {
    bytes.chunks_exact(8).map(|bytes| {
        let mut word = [0; 8];
        word.copy_from_slice(bytes);
        u64::from_be_bytes(word)
    })
}
