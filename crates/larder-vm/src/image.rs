//! Addresses of disk images (a path or an NBD URI), and how an image is opened as a stack of layers.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::file::{Caching, FileDevice, FileOpenError, FileOptions, FileRole, LockedFile};
use larder_block::backend::image_lock::{self, LockMode};
use larder_block::backend::nbd::{NbdDevice, NbdOptions};
use larder_block::filter::align::{Align, AlignOptions};
use larder_block::filter::ignore_discard::IgnoreDiscard;
use larder_block::filter::throttle::{Throttle, ThrottleLimitError, ThrottleLimits};
use larder_block::nbd::NbdUri;
use larder_block::opener::{self, Access, PathSource, opener};
use larder_block::{BlockDevice, ByteLen, Geometry, Loop, printable};
use larder_prefetch::Prefetch;
pub use larder_prefetch::PrefetchOptions;
pub use larder_qcow2::METADATA_MEMORY_DEFAULT;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

mod address;
mod cache;
mod cache_replacement;
mod cache_slot;
mod cache_spec;
mod cache_state;
mod cache_tools;
mod chain;
mod disk_id;
mod file_handle;
mod host_clock;
pub mod journal;
mod modification_proof;
mod open_cache;
mod prefetch_spec;
mod protected_files;

pub(crate) use address::driver_prefix;
pub use address::{ImageAddress, ImageAddressError};
pub use cache::CacheError;
pub(crate) use cache::{absolute, random};
pub use cache_slot::{CacheSlot, ReplaceOptions};
pub use cache_spec::{
    CACHE_ENDURANCE_MAX, CACHE_ENDURANCE_MIN, CACHE_LINE_DEFAULT, CACHE_MODES, CacheOptions, CacheSpec, CacheSpecError,
    cache_mode_long_name, cache_mode_name, parse_cache_endurance, parse_cache_line, parse_cache_mode,
};
pub use cache_state::state_directory;
use cache_state::{OtherCache, StateFile};
pub(crate) use cache_state::{state_files_of_disk, state_files_of_image, used_marker_path, write_atomically};
pub use cache_tools::{
    CacheReport, CacheToolError, DropOutcome, FlushOptions, Resized, drop_cache, flush_cache, inspect_cache,
    resize_cache, set_cache_mode,
};
pub(crate) use chain::policy::toml_string;
pub use chain::policy::{
    Author, ChainError, ChainImage, ChainPolicy, NamedChain, NamedImage, PinnedBy, PinnedChain,
    chain_text as format_chain_journals, check_author, not_utf8_message, pinned_chain,
};
pub use chain::{ChainPart, PartRole, is_same_image, named_chain, probe};
pub(crate) use disk_id::has_identity;
/// Write policy of a cache.
pub use larder_cache::CacheMode;
pub use open_cache::OpenCache;
pub use prefetch_spec::{PrefetchMemory, PrefetchMemoryError, PrefetchSpec, PrefetchSpecError, parse_prefetch_len};

/// Format of an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// Raw: the image is the disk, byte for byte.
    Raw,
    /// QEMU's qcow2 format, with the backing files and the data file that the image names.
    Qcow2,
}

impl Format {
    /// Returns the format with this QEMU name.
    pub fn from_name(name: &str) -> Option<Self> {
        [Self::Raw, Self::Qcow2].into_iter().find(|format| format.name() == name)
    }

    /// Returns the format of an image that QEMU opens with the driver of that name. The drivers that only access a
    /// file, a device or an export give the bytes of a raw image.
    pub fn from_driver(name: &str) -> Option<Self> {
        match name {
            "file" | "host_device" | "host_cdrom" | "nbd" => Some(Self::Raw),
            name => Self::from_name(name),
        }
    }

    /// Returns QEMU's name for the format.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// Options for opening an image.
#[derive(Clone, Debug)]
pub struct ImageOptions {
    /// Format of the image; if `None`, the format is probed from the image's first bytes.
    pub format: Option<Format>,
    /// Policy for the other files that the image's header names.
    pub chain: ChainPolicy,
    /// Memory limit of the metadata cache of a qcow2 image.
    pub metadata_memory: ByteLen,
    /// Read-ahead options, if read-ahead is wanted. It is never used with an image that others may write.
    pub prefetch: Option<PrefetchOptions>,
    /// Options of the image's cache, if it has one.
    pub cache: Option<CacheOptions>,
    /// Refuse writes.
    pub read_only: bool,
    /// Allow other processes to use the image at the same time.
    pub share: bool,
    /// Process that locks the image against other users, unless `share` is set.
    pub claim: LockMode,
    /// Role of a file that is opened as raw bytes.
    pub role: FileRole,
    /// Use of the host's page cache.
    pub caching: Caching,
    /// Ignore discards, so that the image stays allocated.
    pub keep_space: bool,
    /// Add a layer that accepts requests for any bytes, not only for whole blocks.
    pub single_bytes: bool,
    /// Options of connections to NBD servers.
    pub nbd: NbdOptions,
    /// Throughput and request rate limits of the disk.
    pub limits: ThrottleLimits,
    /// Change nothing, and connect to no NBD server; see [`try_to_open`].
    pub trial: bool,
    /// The image was in use on another host: all cached data of it is treated as stale.
    pub used_elsewhere: bool,
}

impl Default for ImageOptions {
    fn default() -> Self {
        Self {
            format: None,
            chain: ChainPolicy::FOLLOW,
            metadata_memory: METADATA_MEMORY_DEFAULT,
            prefetch: Some(PrefetchOptions::default()),
            cache: None,
            read_only: false,
            share: false,
            claim: LockMode::Direct,
            role: FileRole::Image,
            caching: Caching::Auto,
            keep_space: false,
            single_bytes: false,
            nbd: NbdOptions::default(),
            limits: ThrottleLimits::NONE,
            trial: false,
            used_elsewhere: false,
        }
    }
}

/// Reason why an image cannot be opened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ImageError {
    #[error(transparent)]
    File(#[from] larder_block::backend::file::FileOpenError),
    #[error(transparent)]
    Nbd(Box<larder_block::backend::nbd::NbdOpenError>),
    #[error(
        "{image} looks like a {format} image, which Larder does not support; convert it with qemu-img convert -O qcow2"
    )]
    OtherFormat { image: String, format: &'static str },
    #[error(
        "{image}: the file has {len} bytes, but a qcow2 header alone has {QCOW2_HEADER_BYTES}: the file was truncated, or never written completely; get a complete copy"
    )]
    TooShort { image: String, len: u64 },
    #[error(
        "{image}: the VM's file does not give its format, and a guest could write the first bytes of another format; add format = {found} to this disk in the VM's file"
    )]
    NoFormat { image: String, found: String },
    #[error("limits of {image}: {source}")]
    Limits { image: String, source: ThrottleLimitError },
    #[error(transparent)]
    Qcow2(larder_qcow2::OpenError),
    #[error(transparent)]
    Address(#[from] ImageAddressError),
    #[error(transparent)]
    Chain(Box<ChainError>),
    #[error("{image}: its backing file '{}' cannot be opened: {source}", printable(name))]
    Backing { image: String, name: String, source: Box<ImageError> },
    #[error("{image}: its backing file '{}' {}", printable(name), printable(why))]
    BackingCycle { image: String, name: String, why: String },
    #[error("{image}: its backing file '{}' {}", printable(name), printable(why))]
    BackingUnsupported { image: String, name: String, why: String },
    #[error("{image}: its external data file '{}' cannot be opened: {source}", printable(name))]
    DataFile { image: String, name: String, source: Box<ImageError> },
    #[error(
        "{image}: a qcow2 image cannot be shared while it is written: two programs that write its metadata destroy it; share it read-only"
    )]
    SharedWriter { image: String },
    #[error("{image}: its journal: {source}")]
    Journal { image: String, source: std::io::Error },
    #[error(
        "{image}: its server was killed after the host's last boot, and the journal with the guest's unflushed changes is not to be found ({searched}); serve the image as the same user, or as root, or discard the unflushed changes with `larder disk check --discard-journal {image}`"
    )]
    JournalMissing { image: String, searched: String },
    #[error(
        "{image}: its server was killed, and the image has been changed since by another program, or replaced by a copy: the guest's {changes} unflushed changes in {} no longer fit it. If that guest still runs, end it: its disk is not in the state that it expects. `larder disk check --discard-journal {image}` discards the changes",
        journal.display()
    )]
    JournalStale { image: String, journal: PathBuf, changes: u64 },
    #[error("cache of {image}: {source}")]
    Cache { image: String, source: Box<CacheError> },
    #[error(
        "{image}: it is the cache of {disk}, and has data that was never written to that disk; serving it as a disk would destroy that data. Serve {disk} with this cache; or write the data to the disk with `larder disk cache flush {image}`; or discard it with `larder disk cache drop --lose-dirty {image}`"
    )]
    IsCache { image: String, disk: String },
    #[error(
        "{image}: it is a swap cache with memory of the running process {pid}; serving it as a disk would destroy that memory. Name another image"
    )]
    IsSwap { image: String, pid: u32 },
    #[error("the NBD server of {uri} was not contacted")]
    NotContacted { uri: String },
    #[error("{image}: its guest data is in an external data file, but its header does not name one")]
    NoDataFile { image: String },
}

/// Shortest time for which data prefetched from an NBD server stays valid; it may stay valid for up to twice as long.
const NBD_PREFETCH_MAX_AGE: Duration = Duration::from_secs(2);

/// The smallest block size that every guest can use, in bytes.
const GUEST_BLOCK_BYTES: u32 = 512;

/// Length of a version 3 qcow2 header, in bytes. A version 2 header is shorter, but no valid image is.
const QCOW2_HEADER_BYTES: u64 = 104;

/// Magic numbers of the formats other than raw: offset, bytes, name of the format. They are those that QEMU probes
/// for (`bdrv_probe` of its drivers).
const MAGICS: [(usize, &[u8], &str); 10] = [
    (0, b"QFI\xfb", "qcow2"),
    (0, b"KDMV", "VMDK"),
    (0, b"vhdxfile", "VHDX"),
    (0, b"conectix", "VPC"),
    (0, b"QED\0", "QED"),
    (64, b"\x7f\x10\xda\xbe", "VDI"),
    (0, b"LUKS\xba\xbe", "LUKS"),
    (0, b"WithoutFreeSpace", "Parallels"),
    (0, b"WithouFreSpacExt", "Parallels"),
    (0, b"Bochs Virtual HD Image", "Bochs"),
];

/// Number of bytes at the start of an image that are enough to probe its format.
pub const PROBE_BYTES: usize = 512;

impl From<ChainError> for ImageError {
    fn from(error: ChainError) -> Self {
        Self::Chain(Box::new(error))
    }
}

/// An image with every layer that its options require.
pub struct OpenImage {
    /// The disk, to be served and closed.
    pub device: Rc<dyn BlockDevice>,
    /// Format of the image.
    pub format: Format,
    /// Files that were opened for the image: the image, then its backing files and data files, in the order in which
    /// headers refer to them.
    pub parts: Vec<ChainPart>,
    /// The image's cache, for its statistics.
    pub cache: Option<CacheSlot>,
    /// Read-ahead layer, for its statistics; `None` if the image is shared, which forbids read-ahead.
    pub prefetch: Option<Rc<Prefetch>>,
    /// Layer that enforces the limits.
    pub throttle: Rc<Throttle>,
}

/// Opens an image with every layer that its options require: the backend and alignment, the format with all files
/// that it refers to, then cache, read-ahead, discard policy, single bytes and limits.
///
/// # Errors
/// See [`ImageError`].
pub async fn open(on: &Loop, image: &ImageAddress, options: &ImageOptions) -> Result<OpenImage, ImageError> {
    open_and_hold(on, image, options, &mut Vec::new()).await
}

async fn open_and_hold(
    on: &Loop,
    image: &ImageAddress,
    options: &ImageOptions,
    held_files: &mut Vec<LockedFile>,
) -> Result<OpenImage, ImageError> {
    if options.cache.is_none() && !options.trial {
        // Opening may change the image. Its caches are the same for both formats.
        let other_caches = StateFile::other_caches(&disk_id::identity(image, Format::Raw), &[]);
        let is_in_use = options.claim == LockMode::Direct && is_in_use(image);
        match refuse_dirty(on, image, &other_caches).await {
            // Opening the image below reports that it is in use.
            Err(_) if is_in_use && !options.share => {}
            Err(ImageError::Cache { image, source }) if is_in_use => {
                let source = source.for_served_disk();
                return Err(ImageError::Cache { image, source });
            }
            checked => checked?,
        }
    }
    let mut opened = chain::open(on, image, options, held_files).await?;
    let cache = open_cache(on, image, options, &mut opened).await?;
    let chain::OpenedChain { mut device, format, parts, .. } = opened;
    if let Some(cache) = &cache {
        device = cache.device();
    }
    let without_prefetch = Rc::clone(&device);
    let prefetch = (!options.share && !options.trial).then(|| {
        let prefetch = options.prefetch.unwrap_or(PrefetchOptions::OFF);
        Prefetch::new(on, Rc::clone(&device), prefetch)
    });
    if let Some(prefetch) = &prefetch {
        if let ImageAddress::Nbd(_) = image {
            // An export has no lock: others may write to it.
            prefetch.set_max_age(NBD_PREFETCH_MAX_AGE);
        }
        device = Rc::clone(prefetch) as Rc<dyn BlockDevice>;
    }
    if options.keep_space {
        device = Rc::new(IgnoreDiscard::new(device));
    }
    if options.single_bytes {
        // Below the layer that exchanges images during a move: a block read from this image is written back to this
        // image.
        device = Rc::new(Align::with_rmw_source(device, without_prefetch, AlignOptions::BYTES));
    }
    let throttle = Throttle::new(on, device, options.limits)
        .map_err(|source| ImageError::Limits { image: image.to_string(), source })?;
    let throttle = Rc::new(throttle);
    Ok(OpenImage { device: Rc::clone(&throttle) as Rc<dyn BlockDevice>, format, parts, cache, prefetch, throttle })
}

/// Opens the cache that the options require. A trial opens no cache, and changes nothing.
async fn open_cache(
    on: &Loop,
    image: &ImageAddress,
    options: &ImageOptions,
    opened: &mut chain::OpenedChain,
) -> Result<Option<CacheSlot>, ImageError> {
    let failed = |source| ImageError::Cache { image: image.to_string(), source: Box::new(source) };
    let identity = disk_id::identity(image, opened.format);
    let Some(cache_options) = &options.cache else {
        let mut other_caches = StateFile::other_caches(&identity, &[]);
        // A trial contacts no NBD server.
        other_caches.retain(|cache| !options.trial || cache.is_local());
        if let Err(error) = refuse_dirty(on, image, &other_caches).await {
            let _ = opened.device.close().await;
            return Err(error);
        }
        if !options.read_only && !options.trial {
            other_caches.iter().for_each(OtherCache::mark_used);
        }
        return Ok(None);
    };
    let cache_options = match options.trial {
        true => cache_replacement::resolve_read_only(cache_options, &identity),
        false => cache_replacement::resolve(cache_options, &identity),
    };
    if options.trial {
        let checked = cache::check_openable(on, (image, &identity), &cache_options, options).await;
        return checked.map(|()| None).map_err(failed);
    }
    let disk = cache::CachedDisk {
        image: image.clone(),
        device: Rc::clone(&opened.device),
        identity,
        files: std::mem::take(&mut opened.files),
        proof: std::mem::take(&mut opened.proof),
        lacks_timestamps: opened.lacks_timestamps,
        last_use: match options.used_elsewhere {
            true => cache::LastUse::OtherHost,
            false => cache::LastUse::FromFingerprints,
        },
    };
    match CacheSlot::open(on, disk, &cache_options, options).await {
        Ok(cache) => Ok(Some(cache)),
        Err(source) => {
            // Without this close, the image looks as if its server had been killed. The error that is reported is the
            // first one.
            let _ = opened.device.close().await;
            Err(failed(source))
        }
    }
}

/// Returns the caches that may hold newer data than the image, according to their state files: those of a server in
/// write-back mode that is running, or that was killed.
pub fn dirty_caches(image: &ImageAddress, format: Format) -> Vec<ImageAddress> {
    let other_caches = StateFile::other_caches(&disk_id::identity(image, format), &[]);
    let dirty = other_caches.iter().filter(|cache| cache.is_dirty());
    dirty.filter_map(OtherCache::file).collect()
}

/// Records that an image is about to be changed without its caches, if it has any. The caches of a killed server
/// become stale.
///
/// # Errors
/// One of the caches may hold newer data than the image ([`ImageError::Cache`]).
pub async fn mark_caches_stale(on: &Loop, image: &ImageAddress, format: Format) -> Result<(), ImageError> {
    let other_caches = StateFile::other_caches(&disk_id::identity(image, format), &[]);
    refuse_dirty(on, image, &other_caches).await?;
    other_caches.iter().for_each(OtherCache::mark_used);
    Ok(())
}

/// Records that an image is about to be changed whose journal is lost or no longer fits it, so that no server can
/// open it first. Clean caches become stale; dirty caches keep their data, for the user to decide about.
pub fn mark_clean_caches_stale(image: &ImageAddress, format: Format) {
    let other_caches = StateFile::other_caches(&disk_id::identity(image, format), &[]);
    // Dirty caches detect the change by the image's timestamps.
    let clean = other_caches.iter().filter(|cache| !cache.is_dirty());
    clean.for_each(OtherCache::mark_used);
}

/// Checks that a raw image, which is about to be changed, is not a file of Larder's own that is still needed.
///
/// # Errors
/// The file is still needed: [`ImageError::IsCache`], [`ImageError::IsSwap`].
pub async fn refuse_protected_file(image: &ImageAddress, device: &Rc<dyn BlockDevice>) -> Result<(), ImageError> {
    protected_files::refuse_protected(image, device, false).await
}

/// Refuses an image with a dirty cache.
///
/// # Errors
/// One of the caches may hold newer data than the image.
async fn refuse_dirty(on: &Loop, image: &ImageAddress, other_caches: &[OtherCache]) -> Result<(), ImageError> {
    let refused = cache::refuse_dirty(on, other_caches).await;
    refused.map_err(|source| ImageError::Cache { image: image.to_string(), source: Box::new(source) })
}

/// Returns whether a process, perhaps this one, has the image open for writing, as far as its locks show.
fn is_in_use(image: &ImageAddress) -> bool {
    let ImageAddress::Path(path) = image else { return false };
    image_lock::other_users(path).is_ok_and(|users| users.is_some())
}

/// Opens an image like [`open`], but only to check whether it can be opened. No NBD server is contacted, since some
/// exit after their first client, and nothing is changed: the journal of a killed server is not replayed. The files
/// that were opened, up to an NBD server or another error, are then in `held_files`: as long as they stay there, only a
/// server with [`LockMode::Inherited`] can open the image.
///
/// # Errors
/// See [`ImageError`]; [`ImageError::NotContacted`] if the image can be opened as far as an NBD server in its chain.
pub async fn try_to_open(
    on: &Loop,
    image: &ImageAddress,
    options: &ImageOptions,
    held_files: &mut Vec<LockedFile>,
) -> Result<Rc<dyn BlockDevice>, ImageError> {
    let options = ImageOptions { trial: true, claim: LockMode::ForChildren, ..options.clone() };
    Ok(open_and_hold(on, image, &options, held_files).await?.device)
}

/// Checks an image that its server has open now, as far as that is possible without disturbing the server: whether its
/// files exist, whether their formats and the names in their headers are those of the options, and whether the cache
/// fits. The files are only read, and not locked. No NBD server is contacted.
///
/// # Errors
/// See [`try_to_open`].
pub async fn inspect_served(on: &Loop, image: &ImageAddress, options: &ImageOptions) -> Result<(), ImageError> {
    let options = ImageOptions { trial: true, claim: LockMode::Unlocked, ..options.clone() };
    open_and_hold(on, image, &options, &mut Vec::new()).await.map(drop)
}

/// Returns the geometry and format of an image that another host may have open and write to. The image is not locked
/// or changed, and is closed again.
///
/// # Errors
/// See [`ImageError`].
pub async fn read_geometry(
    on: &Loop,
    image: &ImageAddress,
    options: &ImageOptions,
) -> Result<(Geometry, Format), ImageError> {
    let read_options = ImageOptions { read_only: true, share: true, prefetch: None, cache: None, ..options.clone() };
    let opened = open(on, image, &read_options).await?;
    let geometry = Geometry { read_only: options.read_only, ..opened.device.geometry() };
    // Nothing was written, so a failed close loses nothing.
    let _ = opened.device.close().await;
    Ok((geometry, opened.format))
}

/// Opens a file, a block device or an NBD export as raw bytes, with blocks of 512 bytes. A `container` holds a disk
/// in another format, rather than being the disk itself: a file is padded to whole blocks.
///
/// # Errors
/// See [`ImageError`].
pub async fn open_bytes(
    on: &Loop,
    image: &ImageAddress,
    options: &ImageOptions,
    container: bool,
) -> Result<Rc<dyn BlockDevice>, ImageError> {
    match image {
        ImageAddress::Path(path) => Ok(with_guest_block_size(open_file(on, path, options, container, None).await?)),
        ImageAddress::Nbd(uri) => Ok(with_guest_block_size(open_export(on, uri, options).await?)),
    }
}

/// Opens an image like [`open_bytes`], and returns the author of its content as well. `is_probed` means that its
/// format was probed.
///
/// # Errors
/// See [`ImageError`].
pub async fn open_bytes_and_author(
    on: &Loop,
    image: &ImageAddress,
    options: &ImageOptions,
    container: bool,
    is_probed: bool,
) -> Result<(Rc<dyn BlockDevice>, Author), ImageError> {
    let ImageAddress::Path(path) = image else {
        return Ok((open_bytes(on, image, options, container).await?, Author::Server));
    };
    let file = open_file(on, path, options, container, None).await?;
    // The path may lead to another file by now.
    let found = file.metadata().map_err(|source| FileOpenError::Os {
        path: path.clone(),
        what: "reading its owner",
        source,
    })?;
    Ok((with_guest_block_size(file), Author::from_file(&found, is_probed)))
}

async fn open_file(
    on: &Loop,
    path: &Path,
    options: &ImageOptions,
    container: bool,
    mark: Option<PathBuf>,
) -> Result<Rc<FileDevice>, ImageError> {
    if container {
        refuse_too_short(path)?;
    }
    let file = FileOptions {
        role: options.role.clone(),
        by_header_only: options.chain == ChainPolicy::FOLLOW,
        read_only: options.read_only,
        share: options.share,
        exclusive: matches!(options.role, FileRole::CacheOf(_)),
        lock_mode: options.claim,
        caching: options.caching,
        container,
        write_record_directory: mark,
    };
    Ok(FileDevice::open(on, path, file).await?)
}

pub(crate) async fn open_export(on: &Loop, uri: &NbdUri, options: &ImageOptions) -> Result<Rc<NbdDevice>, ImageError> {
    let nbd = NbdOptions { read_only: options.read_only, ..options.nbd.clone() };
    let opened = NbdDevice::open(on, uri, nbd).await;
    opened.map_err(Box::new).map_err(ImageError::Nbd)
}

fn with_guest_block_size(device: Rc<dyn BlockDevice>) -> Rc<dyn BlockDevice> {
    let geometry = device.geometry();
    if geometry.block_size > GUEST_BLOCK_BYTES || geometry.memory_alignment > 1 {
        let align = AlignOptions { block_size: GUEST_BLOCK_BYTES, ..AlignOptions::default() };
        return Rc::new(Align::new(device, align));
    }
    device
}

/// Refuses a file that is too short for a qcow2 header. It must run before the file is opened as a container, which
/// pads it to whole blocks and so hides its length.
fn refuse_too_short(path: &Path) -> Result<(), ImageError> {
    let len = opener::metadata(path).ok().filter(|found| found.is_file()).map(|found| found.len());
    match len {
        Some(len) if (1..QCOW2_HEADER_BYTES).contains(&len) => {
            Err(ImageError::TooShort { image: path.display().to_string(), len })
        }
        _ => Ok(()),
    }
}

/// Returns the format, other than raw, that the first bytes of a file or block device indicate. An unreadable file
/// yields `None`: the caller's open reports the error.
fn detect_file_format(path: &Path) -> Option<&'static str> {
    let mut head = [0; PROBE_BYTES];
    let mut file = opener().open(path, Access::Read, PathSource::User).ok()?;
    let count = file.read(&mut head).ok()?;
    detect_format(&head[..count])
}

/// Returns the format, other than raw, that these first bytes of an image indicate.
pub fn detect_format(head: &[u8]) -> Option<&'static str> {
    let matches_at = |at: usize, magic: &[u8]| head.get(at..).is_some_and(|tail| tail.starts_with(magic));
    let known = MAGICS.iter().find(|(at, magic, _)| matches_at(*at, magic));
    known.map(|(_, _, format)| *format)
}
