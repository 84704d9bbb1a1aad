//! Options of a served disk, as given to `larder run --disk` or in a VM's file.

pub mod keys;
pub mod limits;

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::time::Duration;

use larder_block::ByteLen;
use larder_block::backend::file::Caching;
use larder_block::backend::nbd::NbdOptions;
use larder_export::vhost_user::{OptionsError, QUEUES_MAX, Serial, VhostUserOptions};

use crate::image::{
    CacheSpec, CacheSpecError, ChainPolicy, Format, ImageAddress, ImageOptions, METADATA_MEMORY_DEFAULT,
    PrefetchMemory, PrefetchSpec, PrefetchSpecError, cache_mode_name,
};
use crate::limits::{LimitsTextError, parse_limits};
use limits::NamedLimits;

/// Use of the host's page cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PageCacheMode {
    /// The default of `larder disk serve`.
    #[default]
    Auto,
    /// Direct I/O, if the file system supports it.
    Direct,
    /// Buffered I/O through the page cache.
    Buffered,
}

/// Options of a disk: the image, and its properties in the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSpec {
    /// Image, block device or NBD export.
    pub image: ImageAddress,
    /// Format of the image; if unset, it is probed.
    pub format: Option<Format>,
    /// Policy for the other files that the image's header names.
    pub chain: ChainPolicy,
    /// Memory limit of the metadata cache of a qcow2 image; if unset, the server's default.
    pub metadata_memory: Option<ByteLen>,
    /// Read-ahead options; the server has defaults for those that are unset.
    pub prefetch: PrefetchSpec,
    /// Options of its cache on a fast device; the server has defaults for those that are unset.
    pub disk_cache: CacheSpec,
    /// Control socket of the server; none if unset.
    pub control: Option<PathBuf>,
    /// Refuse writes.
    pub read_only: bool,
    /// Allow other processes to use the image at the same time.
    pub share: bool,
    /// Use of the page cache.
    pub page_cache: PageCacheMode,
    /// Number of virtqueues; if unset, QEMU chooses.
    pub queues: Option<u16>,
    /// Size of each virtqueue in descriptors, as the device offers it; if unset, virtio-blk's default.
    pub queue_size: Option<u16>,
    /// Serial number in the guest.
    pub serial: Option<String>,
    /// Sector size in the guest, in bytes; if unset, the default.
    pub block_size: Option<u32>,
    /// The guest's discards free space in the image; otherwise they are ignored.
    pub discard: bool,
    /// Longest spin of the server before it sleeps, in microseconds; if unset, the server's default.
    pub poll_us: Option<u64>,
    /// Longest wait of requests for an unreachable NBD server, in seconds; if unset, the server's default.
    pub nbd_reconnect: Option<u64>,
    /// Limits on requests and bytes per second.
    pub limits: NamedLimits,
}

/// Reason why options contradict each other.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum DiskSpecError {
    #[error(transparent)]
    Limits(#[from] LimitsTextError),
    #[error(transparent)]
    Prefetch(#[from] PrefetchSpecError),
    #[error(transparent)]
    Cache(#[from] CacheSpecError),
    #[error(transparent)]
    Guest(#[from] OptionsError),
}

impl DiskSpec {
    /// Returns an image with default options.
    pub fn new(image: ImageAddress) -> Self {
        Self {
            image,
            format: None,
            chain: ChainPolicy::FOLLOW,
            metadata_memory: None,
            prefetch: PrefetchSpec::default(),
            disk_cache: CacheSpec::default(),
            control: None,
            read_only: false,
            share: false,
            page_cache: PageCacheMode::Auto,
            queues: None,
            queue_size: None,
            serial: None,
            block_size: None,
            discard: true,
            poll_us: None,
            nbd_reconnect: None,
            limits: NamedLimits::default(),
        }
    }

    /// Checks that each value is in range, and that the values are compatible: everything that can be known without
    /// opening the image. After this check no server refuses a disk because of its options.
    ///
    /// # Errors
    /// See [`DiskSpecError`].
    pub fn check(&self) -> Result<(), DiskSpecError> {
        self.limits.check()?;
        self.prefetch.options(self.share)?;
        self.disk_cache.options(self.share)?;
        self.vhost_user_options().check()?;
        Ok(())
    }

    /// Returns the options for opening the image. Contradictions in `prefetch` and `disk_cache` must have been
    /// refused before.
    ///
    /// # Errors
    /// The limits contradict each other.
    pub fn image_options(&self) -> Result<ImageOptions, LimitsTextError> {
        let defaults = ImageOptions::default();
        Ok(ImageOptions {
            format: self.format,
            chain: self.chain.clone(),
            metadata_memory: self.metadata_memory.unwrap_or(METADATA_MEMORY_DEFAULT),
            prefetch: self.prefetch.options(self.share).ok().flatten(),
            cache: self.disk_cache.options(self.share).ok().flatten(),
            read_only: self.read_only,
            share: self.share,
            caching: match self.page_cache {
                PageCacheMode::Auto | PageCacheMode::Direct => Caching::Auto,
                PageCacheMode::Buffered => Caching::Buffered,
            },
            keep_space: !self.discard,
            nbd: NbdOptions {
                reconnect: self.nbd_reconnect.map_or(defaults.nbd.reconnect, Duration::from_secs),
                ..defaults.nbd
            },
            limits: parse_limits(&self.limits.to_string())?,
            ..defaults
        })
    }

    /// Returns a message for the user if the guest sees only part of the given serial number.
    pub fn serial_warning(&self) -> Option<String> {
        self.serial.as_deref().and_then(Serial::truncation_warning)
    }

    /// Returns the options of the vhost-user-blk device.
    pub fn vhost_user_options(&self) -> VhostUserOptions {
        let defaults = VhostUserOptions::default();
        VhostUserOptions {
            queues: self.queues.unwrap_or(QUEUES_MAX),
            queue_size: self.queue_size.unwrap_or(defaults.queue_size),
            serial: self.serial.as_deref().map(Serial::of).unwrap_or_default(),
            block_size: self.block_size.unwrap_or(defaults.block_size),
        }
    }

    /// Returns the arguments with which this program serves the disk on `socket`, and creates `ready` once it does.
    /// The image comes first, so that a list of processes shows it even if it truncates long lines.
    pub fn serve_arguments(&self, socket: &Path, ready: &Path) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec!["disk".into(), "serve".into(), self.image_argument()];
        arguments.extend(["--socket".into(), socket.into(), "--pidfile".into(), ready.into()]);
        if let Some(format) = self.format {
            arguments.extend(["--format".into(), format.name().into()]);
        }
        if self.chain == (ChainPolicy::Follow { trust_image: true }) {
            arguments.push("--trust-image".into());
        }
        if let Some(memory) = self.metadata_memory {
            arguments.extend(["--metadata-memory".into(), memory.get().to_string().into()]);
        }
        if let Some(prefetch) = self.prefetch.memory {
            let memory = match prefetch {
                PrefetchMemory::Off => "off".to_owned(),
                PrefetchMemory::Size(memory) => memory.get().to_string(),
            };
            arguments.extend(["--prefetch".into(), memory.into()]);
        }
        if let Some(ahead) = self.prefetch.ahead {
            arguments.extend(["--prefetch-ahead".into(), ahead.get().to_string().into()]);
        }
        if let Some(read) = self.prefetch.largest_read {
            arguments.extend(["--prefetch-largest-read".into(), read.get().to_string().into()]);
        }
        arguments.extend(self.cache_arguments());
        if let Some(control) = &self.control {
            arguments.push(join_argument("--control=", control.as_os_str()));
        }
        if self.read_only {
            arguments.push("--read-only".into());
        }
        if self.share {
            arguments.push("--share".into());
        }
        if self.page_cache == PageCacheMode::Buffered {
            arguments.push("--buffered".into());
        }
        if !self.discard {
            arguments.extend(["--discard".into(), "ignore".into()]);
        }
        if let Some(queues) = self.queues {
            arguments.extend(["--queues".into(), queues.to_string().into()]);
        }
        if let Some(size) = self.queue_size {
            arguments.extend(["--queue-size".into(), size.to_string().into()]);
        }
        if let Some(serial) = &self.serial {
            arguments.push(format!("--serial={serial}").into());
        }
        if let Some(block_size) = self.block_size {
            arguments.extend(["--block-size".into(), block_size.to_string().into()]);
        }
        if let Some(poll_us) = self.poll_us {
            arguments.extend(["--poll-us".into(), poll_us.to_string().into()]);
        }
        if let Some(seconds) = self.nbd_reconnect {
            arguments.extend(["--nbd-reconnect".into(), seconds.to_string().into()]);
        }
        if !self.limits.is_empty() {
            arguments.extend(["--throttle".into(), self.limits.to_string().into()]);
        }
        arguments
    }

    fn cache_arguments(&self) -> Vec<OsString> {
        let cache = &self.disk_cache;
        let mut arguments = Vec::new();
        match &cache.file {
            Some(ImageAddress::Path(path)) => arguments.push(join_argument("--cache=", path.as_os_str())),
            Some(ImageAddress::Nbd(uri)) => arguments.extend(["--cache".into(), uri.to_string().into()]),
            None => {}
        }
        if let Some(size) = cache.size {
            arguments.extend(["--cache-size".into(), size.get().to_string().into()]);
        }
        if let Some(line) = cache.line {
            arguments.extend(["--cache-line".into(), line.get().to_string().into()]);
        }
        if let Some(mode) = cache.mode {
            arguments.extend(["--cache-mode".into(), cache_mode_name(mode).into()]);
        }
        if let Some(endurance) = cache.endurance {
            arguments.extend(["--cache-endurance".into(), endurance.get().to_string().into()]);
        }
        if cache.exclusive {
            arguments.push("--cache-exclusive".into());
        }
        arguments
    }

    /// Returns the image as an argument that cannot be parsed as an option.
    fn image_argument(&self) -> OsString {
        match &self.image {
            ImageAddress::Path(path) if path.as_os_str().as_encoded_bytes().starts_with(b"-") => {
                Path::new(".").join(path).into()
            }
            ImageAddress::Path(path) => path.into(),
            ImageAddress::Nbd(uri) => uri.to_string().into(),
        }
    }
}

/// Joins an option and a value that may itself look like an option.
pub(crate) fn join_argument(option: &str, value: impl AsRef<OsStr>) -> OsString {
    let mut argument = OsString::from(option);
    argument.push(value);
    argument
}
