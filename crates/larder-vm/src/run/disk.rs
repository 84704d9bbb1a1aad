//! A disk that `larder run` serves, and the `larder disk serve` command that does so.

use std::ffi::OsString;
use std::path::Path;

use super::limits::Limits;
use crate::image::ImageAddress;

/// Whether the host's page cache is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Cache {
    /// As `larder disk serve` chooses.
    #[default]
    Auto,
    /// Direct I/O where the file system has it.
    Direct,
    /// Through the page cache.
    Buffered,
}

/// What to serve, and how it looks to the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Disk {
    /// A raw image, a block device, or an NBD export.
    pub image: ImageAddress,
    /// The user says that it is raw; otherwise an image that begins like another format is refused.
    pub is_raw: bool,
    /// Refuse changes.
    pub read_only: bool,
    /// Let other processes use the image too.
    pub share: bool,
    /// Page cache or not.
    pub cache: Cache,
    /// Virtqueues; QEMU chooses if none are given.
    pub queues: Option<u16>,
    /// Descriptors of each virtqueue, as the device has it.
    pub queue_size: Option<u16>,
    /// The serial number that the guest sees.
    pub serial: Option<String>,
    /// The sector size that the guest sees, in bytes, if not the usual.
    pub block_size: Option<u32>,
    /// Whether the guest's discards free space; otherwise they are ignored.
    pub discard: bool,
    /// How much per second.
    pub limits: Limits,
}

impl Disk {
    /// An image with everything at its default.
    pub fn new(image: ImageAddress) -> Self {
        Self {
            image,
            is_raw: false,
            read_only: false,
            share: false,
            cache: Cache::Auto,
            queues: None,
            queue_size: None,
            serial: None,
            block_size: None,
            discard: true,
            limits: Limits::default(),
        }
    }

    /// The arguments with which this program serves the disk on `socket`, and makes `ready` once it does.
    pub fn serve_arguments(&self, socket: &Path, ready: &Path) -> Vec<OsString> {
        let mut arguments: Vec<OsString> = vec!["disk".into(), "serve".into(), "--socket".into(), socket.into()];
        arguments.extend(["--pidfile".into(), ready.into()]);
        if self.is_raw {
            arguments.extend(["--format".into(), "raw".into()]);
        }
        if self.read_only {
            arguments.push("--read-only".into());
        }
        if self.share {
            arguments.push("--share".into());
        }
        if self.cache == Cache::Buffered {
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
        if !self.limits.is_empty() {
            arguments.extend(["--throttle".into(), self.limits.to_string().into()]);
        }
        let image = match &self.image {
            ImageAddress::Path(path) => path.into(),
            ImageAddress::Nbd(uri) => uri.to_string().into(),
        };
        arguments.extend(["--".into(), image]);
        arguments
    }
}
