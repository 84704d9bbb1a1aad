//! Opening an image: its header and tables are read and checked before they are trusted.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};

use larder_block::range_lock::RangeLocks;
use larder_block::{
    AlignedBuf, BlockDevice, ByteLen, ByteOffset, ExtentKind, Failure, Geometry, IoError, Loop, ReadBuf, SizeChanges,
};

use crate::check::{self, CheckOptions, Repair};
use crate::commit::Commits;
use crate::compressed::Decompressor;
use crate::device::Qcow2;
use crate::entry::OFFSET;
use crate::header::{
    AUTOCLEAR_BITMAPS, AUTOCLEAR_RAW_DATA, AUTOCLEAR_SESSION, HEADER_AREA_BYTES_MAX, HEADER_SECTOR_BYTES, Header,
    HeaderError, TableLocation,
};
use crate::in_flight::InFlight;
use crate::journal::{Journal, JournalContents, Record, new_session};
use crate::map::Map;
use crate::map::MapLimit;
use crate::metadata_memory::{LimitExceeded, MetadataMemory};
use crate::read::load_map;
use crate::refcount::{self, Refcounts};
use crate::shape::Shape;
use crate::space::{AllocatorState, search_ahead};

/// Options for opening an image.
pub struct OpenOptions {
    /// Refuse changes.
    pub read_only: bool,
    /// The common memory limit for the metadata of the disk's images.
    pub metadata_memory: Rc<MetadataMemory>,
    /// The journal in which changes of the mapping are recorded for the next process, in case this one is killed. Its
    /// content is discarded if it does not fit the image, so the caller must have checked it before.
    pub journal: Option<Journal>,
    /// The changes in a killed process's journal that this process cannot use itself, because it belongs to another
    /// user. They are committed to the image when it is opened. A read-only image is not changed, and reads as if it
    /// had them.
    pub orphaned_journal: Option<JournalContents>,
    /// Read all metadata in the background, within the memory limit; otherwise it is read when it is needed.
    pub load_ahead: bool,
}

/// The default memory limit, enough for 3 TiB of the worst fragmentation at 64 KiB clusters, and for any contiguous
/// disk.
pub const METADATA_MEMORY_DEFAULT: ByteLen = ByteLen::mib(256);

/// The maximum number of refcount blocks for clusters past the end of the file that are checked before the whole
/// image is checked. A sound image has one or two.
const REFCOUNT_BLOCKS_PAST_END_MAX: usize = 16;

impl Default for OpenOptions {
    fn default() -> Self {
        Self {
            read_only: false,
            metadata_memory: MetadataMemory::new(METADATA_MEMORY_DEFAULT),
            journal: None,
            orphaned_journal: None,
            load_ahead: true,
        }
    }
}

/// The other open files that an image needs.
#[derive(Default)]
pub struct RelatedFiles {
    /// The backing file, if the header has one.
    pub backing: Option<Rc<dyn BlockDevice>>,
    /// The external data file, if the header has one.
    pub data_file: Option<Rc<dyn BlockDevice>>,
}

/// The reason why an image cannot be opened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum OpenError {
    #[error("{name}: {source}")]
    Header { name: String, source: HeaderError },
    #[error("{0}")]
    Io(String),
    #[error(
        "{name}: {what} is at {offset:#x} with {len} bytes, past the end of the file ({size:#x} bytes): the image is truncated"
    )]
    Truncated { name: String, what: &'static str, offset: u64, len: u64, size: u64 },
    #[error(
        "{name}: the file ends at {size:#x}, and {lost} entries of its tables point past its end: the image is truncated, and the data there is lost; get a complete copy of the image, read the remaining data with --read-only, or run `larder disk check --repair`, after which the lost data reads as zeros"
    )]
    PastEnd { name: String, lost: u64, size: u64 },
    #[error("{name}: {first} and {second} overlap: the image is corrupt")]
    Overlap { name: String, first: &'static str, second: &'static str },
    #[error("{name}: its guest data is in an external data file, which was not opened")]
    NoDataFile { name: String },
    #[error(
        "{name}: its refcounts may be wrong, because a program that writes them lazily was killed, and they cannot be repaired: {why}"
    )]
    Dirty { name: String, why: String },
    #[error(
        "{name}: its L1 and refcount tables take {} MiB of memory; the limit for all such tables of a disk is {} MiB: raise it with --metadata-memory",
        tables.div_ceil(1 << 20),
        allowed >> 20
    )]
    Metadata { name: String, tables: u64, allowed: u64 },
    #[error(
        "{name}: no cluster is free for the uncommitted changes of a killed server, which are safe in its journal: provide space (a larger device, or free space in the file system), then open the image again"
    )]
    NoSpace { name: String },
    #[error(
        "{name}: the previous server was killed, and its journal does not match the image, as if the image had been replaced by another one; the journal is {journal}; `larder disk check --discard-journal` discards it, and with it the writes that the guest had not flushed"
    )]
    Journal { name: String, journal: String },
}

impl From<IoError> for OpenError {
    fn from(error: IoError) -> Self {
        Self::Io(error.to_string())
    }
}

/// Reads the header of the image in `file`.
///
/// # Errors
/// See [`OpenError`].
pub async fn read_header(file: &Rc<dyn BlockDevice>) -> Result<Header, OpenError> {
    let name = file.name();
    let refused = |source| OpenError::Header { name: name.to_string(), source };
    let area = read_area(file).await?;
    Header::parse(&area).map_err(refused)
}

/// Reads the first cluster, or the existing part of it.
pub(crate) async fn read_area(file: &Rc<dyn BlockDevice>) -> Result<AlignedBuf, OpenError> {
    let size = file.geometry().size.get();
    let read = async |len: u64| {
        let mut bytes = AlignedBuf::zeroed(len.min(size) as usize);
        file.read(ByteOffset::ZERO, ReadBuf::new(&mut bytes)).await?;
        Ok::<_, IoError>(bytes)
    };
    let sector = read(HEADER_SECTOR_BYTES as u64).await?;
    let area =
        Header::area_len(&sector).map_err(|source| OpenError::Header { name: file.name().to_string(), source })?;
    Ok(read(area.min(HEADER_AREA_BYTES_MAX)).await?)
}

/// An image whose tables were read, and the changes that a killed server left for it.
struct OpenedImage {
    image: Rc<Qcow2>,
    orphaned_journal: Option<JournalContents>,
    /// Changes to replay, and the path of their journal.
    replay_records: Option<(Vec<Record>, String)>,
}

impl Qcow2 {
    /// Opens the image in `file`, a device with blocks of 512 bytes. Only the header and the top-level tables are
    /// read, so the first request can follow at once.
    ///
    /// # Errors
    /// See [`OpenError`].
    pub async fn open(
        on: &Loop,
        file: Rc<dyn BlockDevice>,
        related: RelatedFiles,
        options: OpenOptions,
    ) -> Result<Rc<Self>, OpenError> {
        let (read_only, load_ahead) = (options.read_only, options.load_ahead);
        let metadata_memory = Rc::clone(&options.metadata_memory);
        let mut opened = Self::read_tables(on, Rc::clone(&file), related, options).await?;
        if let ReplayResult::NoSpace = opened.replay().await? {
            free_leaks(&file, check_options(&file, metadata_memory.limit()).await).await?;
            let OpenedImage { image, orphaned_journal, .. } = opened;
            // No other owner has the image yet.
            let Some(image) = Rc::into_inner(image) else {
                unreachable!("the image is in use before it is open");
            };
            drop(image.map);
            let related = RelatedFiles { backing: image.backing, data_file: image.data_file };
            let options =
                OpenOptions { read_only, metadata_memory, journal: image.journal, orphaned_journal, load_ahead };
            opened = Self::read_tables(on, file, related, options).await?;
            if let ReplayResult::NoSpace = opened.replay().await? {
                return Err(OpenError::NoSpace { name: opened.image.name.to_string() });
            }
        }
        let OpenedImage { image, orphaned_journal, .. } = opened;
        let read_only = image.geometry.get().read_only;
        if orphaned_journal.is_some() && !read_only {
            // The other journal is not continued, so all its changes must be committed.
            image.commit().await?;
            image.before_change().await?;
        }
        if !read_only {
            let ended = Rc::clone(&image.in_flight.ended);
            on.spawn(reclaim(Rc::downgrade(&image), ended));
            if let Some(journal) = &image.journal {
                on.spawn(commit_ahead(Rc::downgrade(&image), Rc::clone(&journal.half_full)));
            }
        }
        if load_ahead {
            on.spawn(load_metadata_ahead(Rc::downgrade(&image)));
        }
        Ok(image)
    }

    /// Reads and checks the header and the top-level tables.
    async fn read_tables(
        on: &Loop,
        file: Rc<dyn BlockDevice>,
        related: RelatedFiles,
        options: OpenOptions,
    ) -> Result<OpenedImage, OpenError> {
        let name = Rc::clone(file.name());
        let parse = |area: &AlignedBuf| {
            Header::parse(area).map_err(|source| OpenError::Header { name: name.to_string(), source })
        };
        let mut area = read_area(&file).await?;
        let mut header = parse(&area)?;
        let read_only = options.read_only || file.geometry().read_only;
        if header.corrupt && !read_only {
            return Err(OpenError::Header { name: name.to_string(), source: HeaderError::Corrupt });
        }
        if header.dirty && !read_only {
            repair_dirty(&file, check_options(&file, options.metadata_memory.limit()).await).await?;
            area = read_area(&file).await?;
            header = parse(&area)?;
        }
        if header.shape.data_file && related.data_file.is_none() {
            return Err(OpenError::NoDataFile { name: name.to_string() });
        }
        let shape = header.shape;
        let data_file = related.data_file.filter(|_| shape.data_file);
        check_tables(&name, &header, file.geometry().size.get())?;
        let tables_bytes = [header.l1, header.refcount_table].map(|table| table.entries * 8);
        let share = options.metadata_memory.share(tables_bytes.iter().sum());
        let share = share.map_err(|LimitExceeded { allowed }| OpenError::Metadata {
            name: name.to_string(),
            tables: tables_bytes.iter().sum(),
            allowed,
        })?;
        let l1 = read_table(&file, header.l1).await?;
        let refcount_table = match read_only {
            true => Vec::new(),
            false => read_table(&file, header.refcount_table).await?,
        };
        let metadata = match read_only {
            true => Vec::new(),
            false => metadata_clusters(&name, &header, &l1, &refcount_table)?,
        };
        if !read_only && has_refcounts_past_end(&file, shape, &refcount_table).await? {
            check_not_truncated(&file, check_options(&file, options.metadata_memory.limit()).await).await?;
        }
        let file_size = file.geometry().size.get();
        let file_clusters = file_size.div_ceil(shape.cluster_len());
        if !read_only && file_size & (shape.cluster_len() - 1) != 0 {
            // The last cluster can then be used as a whole. A block device is not changed.
            let _ = file.grow(ByteLen::new(file_clusters << shape.cluster_bits)).await;
        }
        let data = data_file.as_ref().unwrap_or(&file).geometry();
        let size = header.size & !511;
        let geometry = Geometry {
            size: ByteLen::new(size),
            block_size: 512,
            physical_block_size: data.physical_block_size,
            discard_granularity: shape.cluster_len() as u32,
            memory_alignment: data.memory_alignment,
            read_only,
            fast_zeroes: shape.version >= 3,
        };
        let preserved_mask = if shape.data_file { AUTOCLEAR_RAW_DATA } else { 0 };
        let preserved = header.autoclear & preserved_mask;
        if !read_only && header.bitmaps.is_some() && header.autoclear & AUTOCLEAR_BITMAPS != 0 {
            tracing::warn!(
                "{name}: it has persistent bitmaps, which Larder does not keep up to date: the first change makes them invalid, and an incremental backup that uses them must begin with a full one"
            );
        }
        // Version 2 has no autoclear bits for the session.
        let journal = options.journal.filter(|_| !read_only && shape.version >= 3);
        let session = header.autoclear & AUTOCLEAR_SESSION;
        let continues_session = journal.as_ref().is_some_and(|journal| journal.fits(session));
        let orphaned_journal = options.orphaned_journal.filter(|left| !continues_session && left.fits(session));
        let (records, journal_path) = match (&journal, &orphaned_journal) {
            (_, Some(left)) => (left.records.clone(), "the killed server's journal".to_owned()),
            (Some(journal), None) if continues_session => (journal.records(), journal.path()),
            _ => (Vec::new(), String::new()),
        };
        if session != 0 && !continues_session && orphaned_journal.is_none() && !read_only {
            tracing::warn!(
                "{name}: the previous server was killed, and its journal is missing: the writes that its guest had not flushed are lost, as after a reboot of the host"
            );
        }
        let new_autoclear = match (&journal, continues_session) {
            (None, _) => preserved,
            (Some(journal), true) => {
                journal.set_session(session);
                preserved | session
            }
            (Some(journal), false) => {
                journal.begin_session(0);
                preserved | new_session()
            }
        };
        let mut sector = [0; HEADER_SECTOR_BYTES];
        sector.copy_from_slice(&area[..HEADER_SECTOR_BYTES]);
        let clusters = size.div_ceil(shape.cluster_len());
        let image = Rc::new(Self {
            name,
            on: on.downgrade(),
            file,
            data_file,
            backing: related.backing,
            shape,
            geometry: Cell::new(geometry),
            header: RefCell::new(sector),
            header_uncertain: Cell::new(false),
            autoclear_pending: Cell::new((new_autoclear != header.autoclear).then_some(new_autoclear)),
            file_ends_pending: Cell::new(!read_only),
            tables_writable: RefCell::new(vec![false; l1.len()]),
            l1_allocated: Cell::new(false),
            l1: RefCell::new(l1),
            l1_location: Cell::new(header.l1),
            new_tables: RefCell::new(BTreeMap::new()),
            map: RefCell::new(Map::new(shape, clusters, MapLimit::Share(share))),
            refcounts: RefCell::new(Refcounts::new(shape, header.refcount_table, refcount_table)),
            space: RefCell::new(AllocatorState::new(file_size, file_clusters)),
            freed: RefCell::default(),
            released: RefCell::default(),
            metadata: RefCell::new(metadata),
            mapping_locks: RangeLocks::default(),
            leaf_locks: RangeLocks::default(),
            table_locks: RangeLocks::default(),
            allocation_lock: RangeLocks::default(),
            reclaim_lock: RangeLocks::default(),
            commits: Commits::default(),
            refcount_lock: RangeLocks::default(),
            header_lock: RangeLocks::default(),
            grow_lock: RangeLocks::default(),
            journal,
            in_flight: InFlight::new(),
            decompressor: Decompressor::new(header.compression),
            slice_buffers: crate::read::slice_buffers(),
            copy_buffers: crate::write::copy_buffers(shape),
            size_changes: SizeChanges::default(),
        });
        let changes = (continues_session || orphaned_journal.is_some()).then_some((records, journal_path));
        Ok(OpenedImage { image, orphaned_journal, replay_records: changes })
    }
}

/// The result of a replay.
enum ReplayResult {
    /// The image has all changes, or there were none.
    Done,
    /// There is no free cluster for a table that the changes need.
    NoSpace,
}

impl OpenedImage {
    /// Replays the changes that a killed server had recorded.
    async fn replay(&self) -> Result<ReplayResult, OpenError> {
        let image = &self.image;
        let Some((records, journal)) = self.replay_records.as_ref().filter(|(records, _)| !records.is_empty()) else {
            return Ok(ReplayResult::Done);
        };
        let is_consistent = match image.replay(records).await {
            Err(error) if error.failure() == Failure::NoSpace => return Ok(ReplayResult::NoSpace),
            result => result?,
        };
        if !is_consistent {
            return Err(OpenError::Journal { name: image.name.to_string(), journal: journal.clone() });
        }
        if !image.geometry.get().read_only {
            tracing::info!(
                "{}: the previous server was killed; its {} uncommitted changes of the mapping are replayed. Space that it was allocating or freeing may be leaked: when the image is not in use, `larder disk check --repair=leaks` frees it",
                image.name,
                records.len()
            );
        }
        Ok(ReplayResult::Done)
    }
}

/// Frees the clusters that a killed server had taken or freed without a commit. On a full device these included its
/// tables, for which the next server needs the space again. Clusters to which only the journal refers are freed too;
/// a replay takes them again before it allocates any, as it does after a kill in between.
async fn free_leaks(file: &Rc<dyn BlockDevice>, options: CheckOptions) -> Result<(), OpenError> {
    let name = file.name();
    tracing::warn!(
        "{name}: no cluster is free for the uncommitted changes of a killed server; searching for clusters that it leaked"
    );
    let repaired = check::repair(file, Repair::Refcounts, options).await;
    let repaired = repaired.map_err(|error| OpenError::Io(error.to_string()))?;
    tracing::warn!("{name}: {} leaked clusters were freed", repaired.leaks_fixed());
    Ok(())
}

/// The minimum number of bytes of tables that a check may read before an image is used.
const CHECK_TABLE_BYTES_MIN: u64 = 256 << 20;

/// The additional bytes of tables for each byte of data in the file. In a sound image each table has its own
/// location, and is read twice, by the walk and for its flags. The tables of a crafted image may refer to the same
/// table again and again.
const CHECK_TABLE_BYTES_PER_DATA_BYTE: u64 = 4;

/// The maximum number of the file's extents that are summed up for that limit; later ones do not count.
const DATA_EXTENTS_MAX: usize = 1 << 20;
const EXTENTS_PER_QUERY: usize = 1024;

/// The minimum memory for a check before use, and the bytes of data for each byte of memory. A check may use the
/// memory of the map, which is empty then, or as much as a sound image with as much data needs, even with the
/// smallest clusters.
const CHECK_MEMORY_MIN: u64 = 64 << 20;
const CHECK_DATA_BYTES_PER_MEMORY_BYTE: u64 = 256;

/// Returns the limits for a check before an image is used.
async fn check_options(file: &Rc<dyn BlockDevice>, metadata_memory: ByteLen) -> CheckOptions {
    let size = file.geometry().size;
    let (mut at, mut extents, mut data) = (0, 0, 0);
    while at < size.get() && extents < DATA_EXTENTS_MAX {
        let rest = ByteOffset::new(at).range(ByteLen::new(size.get() - at));
        let Ok(found) = file.extents(rest, EXTENTS_PER_QUERY).await else {
            // The extents are unknown.
            data += rest.len.get();
            break;
        };
        if found.is_empty() {
            break;
        }
        for extent in found {
            at += extent.range.len.get();
            extents += 1;
            data += if extent.kind == ExtentKind::Data { extent.range.len.get() } else { 0 };
        }
    }
    let memory = (data / CHECK_DATA_BYTES_PER_MEMORY_BYTE).min(check::CHECK_MEMORY_DEFAULT.get());
    CheckOptions {
        memory_max: metadata_memory.max(ByteLen::new(memory.max(CHECK_MEMORY_MIN))),
        table_bytes_max: ByteLen::new(
            data.saturating_mul(CHECK_TABLE_BYTES_PER_DATA_BYTE).saturating_add(CHECK_TABLE_BYTES_MIN),
        ),
        ..CheckOptions::default()
    }
}

/// Repairs the refcounts of a dirty image. An image with other damage is not changed.
async fn repair_dirty(file: &Rc<dyn BlockDevice>, options: CheckOptions) -> Result<(), OpenError> {
    let name = file.name();
    let dirty = |why: String| OpenError::Dirty { name: name.to_string(), why };
    let repaired = check::repair(file, Repair::Refcounts, options).await;
    let repaired = repaired.map_err(|error| dirty(error.to_string()))?;
    if repaired.after.errors > 0 {
        let errors = repaired.after.errors;
        let hint = "see `larder disk check`, copy the image, then use `larder disk check --repair`";
        return Err(dirty(format!("{errors} errors are not errors of refcounts; {hint}")));
    }
    let (errors, leaks) = (repaired.errors_fixed(), repaired.leaks_fixed());
    tracing::warn!(
        "{name}: a program that writes refcounts lazily was killed; its refcounts were repaired ({errors} errors fixed, {leaks} leaked clusters freed)"
    );
    Ok(())
}

/// Returns true if a refcount marks a cluster past the end of the file as used, or cannot be read. That happens in a
/// truncated image, and after a crash that left unused space allocated.
async fn has_refcounts_past_end(
    file: &Rc<dyn BlockDevice>,
    shape: Shape,
    refcount_table: &[u64],
) -> Result<bool, IoError> {
    let size = file.geometry().size.get();
    let end = size.div_ceil(shape.cluster_len());
    let first = end >> shape.refcount_block_bits();
    let blocks = (first..).zip(refcount_table.iter().skip(usize::try_from(first).unwrap_or(usize::MAX)));
    for (number, (block, offset)) in blocks.filter(|(_, offset)| **offset != 0).enumerate() {
        let in_file = offset & (shape.cluster_len() - 1) == 0 && *offset <= size.saturating_sub(shape.cluster_len());
        if !in_file || number >= REFCOUNT_BLOCKS_PAST_END_MAX {
            return Ok(true);
        }
        let mut bytes = AlignedBuf::zeroed(ByteLen::new(shape.cluster_len()).as_usize());
        file.read(ByteOffset::new(*offset), ReadBuf::new(&mut bytes)).await?;
        let base = block << shape.refcount_block_bits();
        let mut counts = end.saturating_sub(base)..1 << shape.refcount_block_bits();
        if counts.any(|index| refcount::read(&bytes, shape.refcount_order, index as usize) != 0) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Refuses an image that is truncated: if it were changed, the file would grow over the lost part, which could then
/// no longer be distinguished from zeros.
async fn check_not_truncated(file: &Rc<dyn BlockDevice>, options: CheckOptions) -> Result<(), OpenError> {
    let report = check::check(file, options).await;
    let found = report.map_err(|error| OpenError::Io(error.to_string()))?;
    match found.past_end {
        0 => Ok(()),
        lost => Err(OpenError::PastEnd { name: file.name().to_string(), lost, size: file.geometry().size.get() }),
    }
}

/// Reclaims space whenever requests have ended that may have accessed it.
async fn reclaim(image: Weak<Qcow2>, ended: Rc<SizeChanges>) {
    loop {
        let generation = ended.generation();
        match image.upgrade() {
            Some(image) => {
                if let Err(error) = image.reclaim().await {
                    tracing::warn!("{error}; the space of freed clusters is not reused for now");
                }
            }
            None => return,
        }
        ended.changed_after(generation).await;
    }
}

/// Commits whenever the journal has become half full.
async fn commit_ahead(image: Weak<Qcow2>, half_full: Rc<SizeChanges>) {
    loop {
        let generation = half_full.generation();
        match image.upgrade() {
            Some(image) => image.commit_ahead().await,
            None => return,
        }
        half_full.changed_after(generation).await;
    }
}

/// Reads metadata before a request needs it.
async fn load_metadata_ahead(image: Weak<Qcow2>) {
    load_map(Weak::clone(&image)).await;
    let is_writable = |image: Rc<Qcow2>| !image.geometry.get().read_only;
    if image.upgrade().is_some_and(is_writable) {
        search_ahead(image).await;
    }
}

async fn read_table(file: &Rc<dyn BlockDevice>, at: TableLocation) -> Result<Vec<u64>, IoError> {
    let mut bytes = AlignedBuf::zeroed((at.entries * 8).next_multiple_of(512) as usize);
    if at.entries > 0 {
        file.read(ByteOffset::new(at.offset), ReadBuf::new(&mut bytes)).await?;
    }
    let entries = bytes.chunks_exact(8).take(at.entries as usize).map(|bytes| {
        let mut word = [0; 8];
        word.copy_from_slice(bytes);
        u64::from_be_bytes(word)
    });
    Ok(entries.collect())
}

pub(crate) fn check_tables(name: &Rc<str>, header: &Header, size: u64) -> Result<(), OpenError> {
    let cluster_len = header.shape.cluster_len();
    let tables = [
        ("the header", 0, cluster_len),
        ("the L1 table", header.l1.offset, header.l1.entries * 8),
        ("the refcount table", header.refcount_table.offset, header.refcount_table.entries * 8),
    ];
    for (index, (what, offset, len)) in tables.into_iter().enumerate() {
        let end = (offset + len).next_multiple_of(512);
        if len > 0 && index > 0 && end > size {
            return Err(OpenError::Truncated { name: name.to_string(), what, offset, len, size });
        }
        for (other, other_offset, other_len) in tables.into_iter().take(index) {
            if len > 0 && other_len > 0 && offset < other_offset + other_len && other_offset < offset + len {
                return Err(OpenError::Overlap { name: name.to_string(), first: other, second: what });
            }
        }
    }
    Ok(())
}

/// Returns the clusters of the header, the top-level tables, L2 tables and refcount blocks, sorted. An image in which
/// two of these share a cluster is refused: changing one would damage the other.
fn metadata_clusters(
    name: &Rc<str>,
    header: &Header,
    l1: &[u64],
    refcount_table: &[u64],
) -> Result<Vec<u64>, OpenError> {
    let bits = header.shape.cluster_bits;
    let mut found: Vec<(u64, &'static str)> = Vec::new();
    let mut add = |what, offset: u64, len: u64| {
        let clusters = (offset >> bits)..(offset + len).div_ceil(1 << bits);
        found.extend(clusters.map(|cluster| (cluster, what)));
    };
    add("the header", 0, 1);
    add("the L1 table", header.l1.offset, header.l1.entries * 8);
    let table = header.refcount_table;
    add("the refcount table", table.offset, table.entries * 8);
    if header.snapshots > 0 {
        add("the snapshot table", header.snapshots_offset, 1);
    }
    let tables = l1.iter().map(|entry| (entry & OFFSET, "an L2 table"));
    let blocks = refcount_table.iter().map(|entry| (*entry, "a refcount block"));
    for (offset, what) in tables.chain(blocks) {
        // Tables at unaligned offsets are never used.
        if offset != 0 && offset & (header.shape.cluster_len() - 1) == 0 {
            add(what, offset, 1);
        }
    }
    found.sort_unstable();
    for pair in found.windows(2) {
        if let [(cluster, first), (other, second)] = *pair
            && cluster == other
        {
            return Err(OpenError::Overlap { name: name.to_string(), first, second });
        }
    }
    Ok(found.into_iter().map(|(cluster, _)| cluster).collect())
}
