//! What a user calls a disk: a path or an NBD URI, and how it is opened as a stack of layers.

use std::io::Read;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use larder_block::backend::file::{Caching, FileDevice, FileOptions, HeldFile, Role};
use larder_block::backend::image_lock::{self, Claim};
use larder_block::backend::nbd::{NbdDevice, NbdOptions};
use larder_block::filter::align::{Align, AlignOptions};
use larder_block::filter::keep_space::KeepSpace;
use larder_block::filter::throttle::{LimitError, Limits, Throttle};
use larder_block::nbd::NbdUri;
use larder_block::opener::{self, Access, NamedBy, opener};
use larder_block::{BlockDevice, ByteLen, Geometry, Loop};
use larder_prefetch::Prefetch;
pub use larder_prefetch::PrefetchOptions;
pub use larder_qcow2::METADATA_MEMORY_DEFAULT;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

mod address;
mod cache;
mod cache_note;
mod cache_place;
mod cache_tools;
mod cache_wish;
mod chain;
mod disk_id;
mod file_handle;
mod host_clock;
pub mod journal;
mod needed;
mod open_cache;
mod prefetch_memory;
mod proof;
mod replaced;

pub(crate) use address::driver_in;
pub use address::{ImageAddress, ImageAddressError};
pub use cache::CacheError;
pub(crate) use cache::{absolute, random};
pub use cache_note::state_folder;
use cache_note::{Note, Other};
pub(crate) use cache_note::{notes_of_disk, notes_of_image, used_mark, write_whole};
pub use cache_place::{CachePlace, Replacement};
pub use cache_tools::{
    CacheReport, CacheToolError, Dropped, FlushWish, Resized, drop_cache, flush_cache, inspect_cache, resize_cache,
    set_mode_of_cache,
};
pub use cache_wish::{
    CACHE_ENDURANCE_MAX, CACHE_ENDURANCE_MIN, CACHE_LINE_DEFAULT, CACHE_MODES, CacheOptions, CacheWish, CacheWishError,
    cache_mode_name, cache_mode_words, parse_cache_endurance, parse_cache_line, parse_cache_mode,
};
pub(crate) use chain::policy::toml_text;
pub use chain::policy::{
    Author, ChainError, ChainImage, ChainPolicy, NamedChain, NamedImage, PinnedBy, PinnedChain, pinned as pinned_chain,
    text as chain_text,
};
pub use chain::{ChainPart, PartRole, is_same, named_chain, probe};
pub(crate) use disk_id::is_disk;
/// What a cache does with writes.
pub use larder_cache::Mode as CacheMode;
pub use open_cache::OpenCache;
pub use prefetch_memory::{PrefetchMemory, PrefetchMemoryError, PrefetchWish, PrefetchWishError, parse_prefetch_len};

/// What an image's bytes mean.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Format {
    /// The disk itself, byte for byte.
    Raw,
    /// QEMU's format, with whatever backing files and data file it names.
    Qcow2,
}

impl Format {
    /// The format that QEMU calls so.
    pub fn of_name(name: &str) -> Option<Self> {
        [Self::Raw, Self::Qcow2]
            .into_iter()
            .find(|format| format.name() == name)
    }

    /// Returns the format of an image that QEMU opens by the driver of that name. The drivers of files, devices and exports
    /// alone give an image's bytes as they are.
    pub fn of_driver(name: &str) -> Option<Self> {
        match name {
            "file" | "host_device" | "host_cdrom" | "nbd" => Some(Self::Raw),
            name => Self::of_name(name),
        }
    }

    /// What QEMU calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Raw => "raw",
            Self::Qcow2 => "qcow2",
        }
    }
}

/// How to open an image.
#[derive(Clone, Debug)]
pub struct ImageOptions {
    /// Its format; `None` if the user has not said: what it begins like.
    pub format: Option<Format>,
    /// Which other files its header may have opened.
    pub chain: ChainPolicy,
    /// What the metadata cache of a qcow2 image may hold.
    pub metadata_memory: ByteLen,
    /// How to read ahead, if at all. Never done with an image that others may write.
    pub prefetch: Option<PrefetchOptions>,
    /// Its cache, if it has one.
    pub cache: Option<CacheOptions>,
    /// Refuse changes.
    pub read_only: bool,
    /// Let other processes use the image too.
    pub share: bool,
    /// Who sees to it that nobody else uses it, otherwise.
    pub claim: Claim,
    /// What a file is that is opened as it is.
    pub role: Role,
    /// The host's page cache or not.
    pub caching: Caching,
    /// Ignore discards, so that the image stays allocated.
    pub keep_space: bool,
    /// Accept requests for any bytes, not only for whole blocks, by a layer of its own.
    pub single_bytes: bool,
    /// How to use an NBD server.
    pub nbd: NbdOptions,
    /// What the disk may do per second.
    pub limits: Limits,
    /// Change nothing, and ask no NBD server; see [`try_to_open`].
    pub trial: bool,
    /// It was used on another host meanwhile: nothing that a cache has of it is believed.
    pub comes: bool,
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
            claim: Claim::Own,
            role: Role::Image,
            caching: Caching::Auto,
            keep_space: false,
            single_bytes: false,
            nbd: NbdOptions::default(),
            limits: Limits::NONE,
            trial: false,
            comes: false,
        }
    }
}

/// Why an image cannot be opened.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum ImageError {
    #[error(transparent)]
    File(#[from] larder_block::backend::file::OpenError),
    #[error(transparent)]
    Nbd(Box<larder_block::backend::nbd::OpenError>),
    #[error(
        "{image} looks like a {format} image, which Larder cannot interpret; qemu-img convert -O qcow2 makes a qcow2 image of it"
    )]
    OtherFormat { image: String, format: &'static str },
    #[error(
        "{image}: it has {len} bytes, too few for a qcow2 image, whose header alone has {QCOW2_HEADER_BYTES}: it was cut off, or never written to its end; get a whole copy of it"
    )]
    TooShort { image: String, len: u64 },
    #[error(
        "{image}: the VM's file does not say its format, and a guest could write what another one begins with; add format = {found} to this disk there"
    )]
    NoFormat { image: String, found: String },
    #[error("limits of {image}: {source}")]
    Limits { image: String, source: LimitError },
    #[error(transparent)]
    Qcow2(larder_qcow2::OpenError),
    #[error(transparent)]
    Name(#[from] ImageAddressError),
    #[error(transparent)]
    Chain(Box<ChainError>),
    #[error("{image}: its backing file '{name}' cannot be opened: {source}")]
    Backing {
        image: String,
        name: String,
        source: Box<ImageError>,
    },
    #[error("{image}: its backing file '{name}' {why}")]
    BackingName { image: String, name: String, why: String },
    #[error("{image}: its backing file '{name}' {why}")]
    BackingUnknown { image: String, name: String, why: String },
    #[error("{image}: its external data file '{name}' cannot be opened: {source}")]
    DataFile {
        image: String,
        name: String,
        source: Box<ImageError>,
    },
    #[error(
        "{image}: a qcow2 image cannot be shared while it is written: two programs that write its metadata destroy it; share it read-only"
    )]
    SharedWriter { image: String },
    #[error("{image}: its journal: {source}")]
    Journal { image: String, source: std::io::Error },
    #[error(
        "{image}: a server of it was killed since the host was started, and its journal, which has what a guest had not flushed, is not to be found ({looked}); serve it as the same user, or as root, or give up what was not flushed with `larder disk check --discard-journal {image}`"
    )]
    JournalMissing { image: String, looked: String },
    #[error(
        "{image}: a server of it was killed, and the image has been changed since by another program, or replaced by a copy: the {changes} changes in {}, which its guest had made and not flushed, do not fit it any more. If that guest still runs, end it: its disk is not what it believes. `larder disk check --discard-journal {image}` gives the changes up",
        journal.display()
    )]
    JournalOvertaken {
        image: String,
        journal: PathBuf,
        changes: u64,
    },
    #[error("cache of {image}: {source}")]
    Cache { image: String, source: Box<CacheError> },
    #[error(
        "{image}: it is the cache of {disk}, and has data that was never written to that disk; serving it as a disk would destroy that data. Serve {disk} with it; or have the data written to the disk with `larder disk cache flush {image}`; or give it up with `larder disk cache drop --lose-dirty {image}`"
    )]
    IsCache { image: String, disk: String },
    #[error(
        "{image}: it is a swap cache, with memory of process {pid}, which runs; serving it as a disk would destroy that memory. Give another image"
    )]
    IsSwap { image: String, pid: u32 },
    #[error("the server of {uri} was not asked")]
    NotAsked { uri: String },
    #[error("{image}: its guest data is in an external data file that it does not name")]
    NoDataFile { image: String },
}

/// How long what was fetched ahead from an NBD server is believed; it may be twice as long.
const BELIEVED_FOR: Duration = Duration::from_secs(2);

/// The smallest block size that every guest can use, in bytes.
const GUEST_BLOCK_BYTES: u32 = 512;

/// Bytes of a qcow2 header of version 3; one of version 2 is shorter, but no image of it is.
const QCOW2_HEADER_BYTES: u64 = 104;

/// How formats other than raw begin: what stands at which byte. As QEMU probes them (`bdrv_probe` of its drivers).
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

/// How much of an image tells what it begins like, in bytes.
pub const BEGINNING_BYTES: usize = 512;

impl From<ChainError> for ImageError {
    fn from(error: ChainError) -> Self {
        Self::Chain(Box::new(error))
    }
}

/// An image with every layer that its options call for.
pub struct OpenImage {
    /// The disk, to be served and closed.
    pub device: Rc<dyn BlockDevice>,
    /// What the image's bytes mean.
    pub format: Format,
    /// The files that were opened for it: the image, then its backing files and data files, as their headers lead to them.
    pub parts: Vec<ChainPart>,
    /// Its cache, to be asked what it has done.
    pub cache: Option<CachePlace>,
    /// The layer of it that reads ahead, to be asked what it has done; `None` if it is shared, and nothing may be.
    pub prefetch: Option<Rc<Prefetch>>,
    /// The layer of it that keeps to limits.
    pub throttle: Rc<Throttle>,
}

/// Opens an image with every layer that its options call for: the backend and alignment, the format with all files that
/// it refers to, then cache, read-ahead, discard policy, single bytes and limits.
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
    held: &mut Vec<HeldFile>,
) -> Result<OpenImage, ImageError> {
    if options.cache.is_none() && !options.trial {
        // Opening may change the image. Whatever format it is, the caches are the same.
        let others = Note::others(&disk_id::identity(image, Format::Raw), &[]);
        let is_in_use = options.claim == Claim::Own && is_in_use(image);
        match refuse_dirty(on, image, &others).await {
            // That it is in use is told when it is opened.
            Err(_) if is_in_use && !options.share => {}
            Err(ImageError::Cache { image, source }) if is_in_use => {
                let source = source.of_served();
                return Err(ImageError::Cache { image, source });
            }
            checked => checked?,
        }
    }
    let mut opened = chain::open(on, image, options, held).await?;
    let cache = open_cache(on, image, options, &mut opened).await?;
    let chain::Opened {
        mut device,
        format,
        parts,
        ..
    } = opened;
    if let Some(cache) = &cache {
        device = cache.device();
    }
    let unkept = Rc::clone(&device);
    let prefetch = (!options.share && !options.trial).then(|| {
        let prefetch = options.prefetch.unwrap_or(PrefetchOptions::OFF);
        Prefetch::over(on, Rc::clone(&device), prefetch)
    });
    if let Some(prefetch) = &prefetch {
        if let ImageAddress::Nbd(_) = image {
            // An export has no lock: others may write to it.
            prefetch.believe_for(BELIEVED_FOR);
        }
        device = Rc::clone(prefetch) as Rc<dyn BlockDevice>;
    }
    if options.keep_space {
        device = Rc::new(KeepSpace::new(device));
    }
    if options.single_bytes {
        // Below the switch for moves: a block read from this image is written back to this image.
        device = Rc::new(Align::with_edges(device, unkept, AlignOptions::BYTES));
    }
    let throttle = Throttle::new(on, device, options.limits).map_err(|source| ImageError::Limits {
        image: image.to_string(),
        source,
    })?;
    let throttle = Rc::new(throttle);
    Ok(OpenImage {
        device: Rc::clone(&throttle) as Rc<dyn BlockDevice>,
        format,
        parts,
        cache,
        prefetch,
        throttle,
    })
}

/// The cache that the options call for; of a trial nothing is changed, and there is none.
async fn open_cache(
    on: &Loop,
    image: &ImageAddress,
    options: &ImageOptions,
    opened: &mut chain::Opened,
) -> Result<Option<CachePlace>, ImageError> {
    let failed = |source| ImageError::Cache {
        image: image.to_string(),
        source: Box::new(source),
    };
    let identity = disk_id::identity(image, opened.format);
    let Some(wish) = &options.cache else {
        let others = Note::others(&identity, &[]);
        if !options.trial
            && let Err(error) = refuse_dirty(on, image, &others).await
        {
            let _ = opened.device.close().await;
            return Err(error);
        }
        if !options.read_only && !options.trial {
            others.iter().for_each(Other::is_used_without);
        }
        return Ok(None);
    };
    let wish = replaced::now(wish, &identity);
    if options.trial {
        let looked = cache::look(on, &identity, &wish, options).await;
        return looked.map(|()| None).map_err(failed);
    }
    let disk = cache::Cached {
        image: image.clone(),
        device: Rc::clone(&opened.device),
        identity,
        files: std::mem::take(&mut opened.files),
        proof: std::mem::take(&mut opened.proof),
        lacks_times: opened.lacks_times,
        used: match options.comes {
            true => cache::Used::Elsewhere,
            false => cache::Used::AsFilesTell,
        },
    };
    match CachePlace::open(on, disk, &wish, options).await {
        Ok(cache) => Ok(Some(cache)),
        Err(source) => {
            // Or it would look as if a server had been killed. What is said is why there is no disk.
            let _ = opened.device.close().await;
            Err(failed(source))
        }
    }
}

/// The caches of an image that may have, as far as is noted, what it has not: that of a server in write-back that works, or
/// was killed.
pub fn dirty_caches(image: &ImageAddress, format: Format) -> Vec<ImageAddress> {
    let others = Note::others(&disk_id::identity(image, format), &[]);
    let dirty = others.iter().filter(|other| other.is_dirty());
    dirty.filter_map(Other::file).collect()
}

/// An image is about to be changed without its caches, if it has any. Of those that were left by a server that was killed
/// nothing will be believed.
///
/// # Errors
/// One of them may have what the image has not ([`ImageError::Cache`]).
pub async fn use_without_cache(on: &Loop, image: &ImageAddress, format: Format) -> Result<(), ImageError> {
    let others = Note::others(&disk_id::identity(image, format), &[]);
    refuse_dirty(on, image, &others).await?;
    others.iter().for_each(Other::is_used_without);
    Ok(())
}

/// The same of an image that no server can open before it is changed, because its journal is gone or does not fit it any more: what
/// only a cache has stays there, for the user to decide about.
pub fn use_without_dirty_cache(image: &ImageAddress, format: Format) {
    let others = Note::others(&disk_id::identity(image, format), &[]);
    // Of the dirty ones the image's times tell.
    let clean = others.iter().filter(|other| !other.is_dirty());
    clean.for_each(Other::is_used_without);
}

/// A raw image is about to be changed, which must be no file of Larder's own that somebody needs.
///
/// # Errors
/// It is one: [`ImageError::IsCache`], [`ImageError::IsSwap`].
pub async fn refuse_needed(image: &ImageAddress, device: &Rc<dyn BlockDevice>) -> Result<(), ImageError> {
    needed::refuse(image, device, false).await
}

/// # Errors
/// One of the caches may have something that the image has not.
async fn refuse_dirty(on: &Loop, image: &ImageAddress, others: &[Other]) -> Result<(), ImageError> {
    let refused = cache::refuse_dirty(on, others).await;
    refused.map_err(|source| ImageError::Cache {
        image: image.to_string(),
        source: Box::new(source),
    })
}

/// Somebody, perhaps this process, has an image open so that it may change, as far as that is told.
fn is_in_use(image: &ImageAddress) -> bool {
    let ImageAddress::Path(path) = image else { return false };
    image_lock::used_by_others(path).is_ok_and(|users| users.is_some())
}

/// Opens an image as [`open`] does, only to see whether that can be done. No NBD server is asked, since some end after
/// their first client, and nothing is changed: what a killed server has left is not taken up. The files that were
/// opened, up to an NBD server or another error, are in `held` then: as long as they stay there, only a server with
/// [`Claim::Inherited`] can open the image.
///
/// # Errors
/// See [`ImageError`]; [`ImageError::NotAsked`] if all is well as far as that can be told.
pub async fn try_to_open(
    on: &Loop,
    image: &ImageAddress,
    options: &ImageOptions,
    held: &mut Vec<HeldFile>,
) -> Result<Rc<dyn BlockDevice>, ImageError> {
    let options = ImageOptions {
        trial: true,
        claim: Claim::ForOthers,
        ..options.clone()
    };
    Ok(open_and_hold(on, image, &options, held).await?.device)
}

/// What an image is like that another host may have open, and write to: it is not locked, nothing is changed, and it is
/// closed again.
///
/// # Errors
/// See [`ImageError`].
pub async fn look(on: &Loop, image: &ImageAddress, options: &ImageOptions) -> Result<(Geometry, Format), ImageError> {
    let to_look = ImageOptions {
        read_only: true,
        share: true,
        prefetch: None,
        cache: None,
        ..options.clone()
    };
    let opened = open(on, image, &to_look).await?;
    let geometry = Geometry {
        read_only: options.read_only,
        ..opened.device.geometry()
    };
    // Nothing was written.
    let _ = opened.device.close().await;
    Ok((geometry, opened.format))
}

/// Opens a file, a block device or an NBD export, byte for byte, with blocks of 512 bytes. A `container` is not the disk
/// itself: a file is filled up to whole blocks.
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
        ImageAddress::Path(path) => Ok(in_guest_blocks(open_file(on, path, options, container, None).await?)),
        ImageAddress::Nbd(uri) => Ok(in_guest_blocks(open_export(on, uri, options).await?)),
    }
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
        read_only: options.read_only,
        share: options.share,
        exclusive: matches!(options.role, Role::CacheOf(_)),
        claim: options.claim,
        caching: options.caching,
        container,
        mark,
    };
    Ok(FileDevice::open(on, path, file).await?)
}

pub(crate) async fn open_export(on: &Loop, uri: &NbdUri, options: &ImageOptions) -> Result<Rc<NbdDevice>, ImageError> {
    let nbd = NbdOptions {
        read_only: options.read_only,
        ..options.nbd.clone()
    };
    let opened = NbdDevice::open(on, uri, nbd).await;
    opened.map_err(Box::new).map_err(ImageError::Nbd)
}

fn in_guest_blocks(device: Rc<dyn BlockDevice>) -> Rc<dyn BlockDevice> {
    let geometry = device.geometry();
    if geometry.block_size > GUEST_BLOCK_BYTES || geometry.memory_alignment > 1 {
        let align = AlignOptions {
            block_size: GUEST_BLOCK_BYTES,
            ..AlignOptions::default()
        };
        return Rc::new(Align::new(device, align));
    }
    device
}

/// A container is filled up to whole blocks, so that its own length does not show later.
fn refuse_too_short(path: &Path) -> Result<(), ImageError> {
    let len = opener::metadata(path)
        .ok()
        .filter(|found| found.is_file())
        .map(|found| found.len());
    match len {
        Some(len) if (1..QCOW2_HEADER_BYTES).contains(&len) => Err(ImageError::TooShort {
            image: path.display().to_string(),
            len,
        }),
        _ => Ok(()),
    }
}

/// The format that a file or a block device begins like, other than raw. An unreadable one is left to whoever opens it
/// to complain.
fn recognise(path: &Path) -> Option<&'static str> {
    let mut head = [0; BEGINNING_BYTES];
    let mut file = opener().open(path, Access::Read, NamedBy::User).ok()?;
    let count = file.read(&mut head).ok()?;
    begins_like(&head[..count])
}

/// The format, other than raw, that an image with this beginning has.
pub fn begins_like(head: &[u8]) -> Option<&'static str> {
    let stands = |at: usize, magic: &[u8]| head.get(at..).is_some_and(|rest| rest.starts_with(magic));
    let known = MAGICS.iter().find(|(at, magic, _)| stands(*at, magic));
    known.map(|(_, _, format)| *format)
}
