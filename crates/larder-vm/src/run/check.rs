//! Whether the planned disks can be served, found out before anything is started.
//!
//! Each image is opened as its server will open it; all are held open together, so that an image that is named twice is
//! found. What the disks hold is not written to. An NBD server is not asked: some end after their first client.
//!
//! The files stay open, with QEMU's locks, in what is found ([`Hold`]), so nobody gets between the check and the servers.

use larder_block::Loop;
use larder_block::backend::file::{Caching, HeldFile, OpenError};
use larder_block::backend::image_lock::LockError;
use larder_export::vhost_user::{OptionsError, QUEUES_MAX, VhostUserOptions, VhostUserServer};
use larder_qcow2::OpenError as Qcow2Error;
use larder_qcow2::header::HeaderError;

use super::disk::{Cache, Disk, GivenBy};
use super::drive::Reason;
use super::hold::Hold;
use super::plan::PlannedDisk;
use crate::disk::DiskError;
use crate::image::{self, ImageAddress, ImageError, ImageOptions, METADATA_MEMORY_DEFAULT};
use crate::limits::{LimitsTextError, parse_limits};

/// Why a disk cannot be served.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CheckError {
    #[error("{source}{advice}")]
    Image { source: ImageError, advice: &'static str },
    #[error(
        "disk {image}: the command line has it twice; share=on (share-rw=on at a -device) at both lets it, if that is meant"
    )]
    Twice { image: ImageAddress },
    #[error("disk {image}: {source}")]
    Options { image: ImageAddress, source: OptionsError },
    #[error("disk {image}: {source}")]
    Limits {
        image: ImageAddress,
        source: LimitsTextError,
    },
    #[error(transparent)]
    Uring(DiskError),
}

/// What was found.
#[derive(Debug, Default)]
pub struct Findings {
    /// What stands in the way; nothing if all disks can be served.
    pub problems: Vec<CheckError>,
    /// Images of `-drive` that QEMU can read and Larder cannot, and why.
    pub left: Vec<(ImageAddress, Reason)>,
    /// The disks of which not all can be said, because there is an NBD server in them.
    pub unchecked: Vec<ImageAddress>,
    /// The files of the disks that can be served.
    pub holds: Vec<Hold>,
}

/// Tries every disk.
pub fn check(disks: &[PlannedDisk]) -> Findings {
    let mut found = Findings::default();
    if disks.is_empty() {
        return found;
    }
    let on = match Loop::new(std::time::Duration::ZERO) {
        Ok(on) => on,
        Err(error) => {
            found.problems.push(CheckError::Uring(DiskError::Uring(error)));
            return found;
        }
    };
    let mut held = Vec::with_capacity(disks.len());
    for planned in disks {
        let mut hold = Hold::new(&planned.disk.image);
        match on.block_on(open(&on, planned, &mut hold.files)) {
            Ok(server) => {
                held.push(server);
                found.holds.push(hold);
            }
            Err(CheckError::Image { source, .. }) if ends_at_a_server(&source) => {
                found.unchecked.push(planned.disk.image.clone());
                found.holds.push(hold);
            }
            Err(error)
                if is_held_here(&error)
                    && disks.iter().filter(|other| is_same(&other.disk, &planned.disk)).count() > 1 =>
            {
                let image = planned.disk.image.clone();
                found.problems.push(CheckError::Twice { image });
            }
            Err(error) => match only_qemus(&error) {
                Some(why) if planned.given_by != GivenBy::Option => {
                    found.left.push((planned.disk.image.clone(), Reason(why)));
                }
                _ => found.problems.push(error),
            },
        }
    }
    found
}

/// Whether nothing is wrong, but for an NBD server that was not asked.
fn ends_at_a_server(error: &ImageError) -> bool {
    match error {
        ImageError::NotAsked { .. } => true,
        ImageError::Backing { source, .. } | ImageError::DataFile { source, .. } => ends_at_a_server(source),
        _ => false,
    }
}

/// Why QEMU alone can read an image, if it is that.
fn only_qemus(error: &CheckError) -> Option<String> {
    let CheckError::Image { source, .. } = error else {
        return None;
    };
    match source {
        ImageError::OtherFormat { format, .. } => {
            Some(format!("it looks like a {format} image, which Larder cannot interpret"))
        }
        _ if is_only_qemus(source) => Some(source.to_string()),
        _ => None,
    }
}

fn is_only_qemus(error: &ImageError) -> bool {
    match error {
        ImageError::OtherFormat { .. } | ImageError::BackingUnknown { .. } => true,
        ImageError::Backing { source, .. } | ImageError::DataFile { source, .. } => is_only_qemus(source),
        ImageError::Qcow2(error) => matches!(
            error,
            Qcow2Error::Dirty { .. }
                | Qcow2Error::Header {
                    source: HeaderError::Encrypted(_) | HeaderError::Incompatible(_),
                    ..
                }
        ),
        _ => false,
    }
}

fn is_held_here(error: &CheckError) -> bool {
    matches!(
        error,
        CheckError::Image {
            source: ImageError::File(OpenError::Locked {
                source: LockError::InUseHere { .. },
                ..
            }),
            ..
        }
    )
}

/// Whether both are the same file, by whatever name.
fn is_same(one: &Disk, other: &Disk) -> bool {
    let file = |disk: &Disk| match &disk.image {
        ImageAddress::Path(path) => std::fs::canonicalize(path).ok(),
        ImageAddress::Nbd(_) => None,
    };
    file(one).is_some() && file(one) == file(other)
}

async fn open(
    on: &Loop,
    planned: &PlannedDisk,
    held: &mut Vec<HeldFile>,
) -> Result<std::rc::Rc<VhostUserServer>, CheckError> {
    let disk = &planned.disk;
    let options = image_options(disk).map_err(|source| CheckError::Limits {
        image: disk.image.clone(),
        source,
    })?;
    let opened = image::try_to_open(on, &disk.image, &options, held).await;
    let device = opened.map_err(|source| CheckError::Image {
        advice: advice(&source, planned),
        source,
    })?;
    VhostUserServer::new(on, device, &vhost_user_options(disk)).map_err(|source| CheckError::Options {
        image: disk.image.clone(),
        source,
    })
}

fn image_options(disk: &Disk) -> Result<ImageOptions, LimitsTextError> {
    Ok(ImageOptions {
        format: disk.format,
        metadata_memory: disk.metadata_memory.unwrap_or(METADATA_MEMORY_DEFAULT),
        // What contradicts itself has been refused.
        cache: disk.disk_cache.options(disk.share).ok().flatten(),
        read_only: disk.read_only,
        share: disk.share,
        caching: match disk.cache {
            Cache::Auto | Cache::Direct => Caching::Auto,
            Cache::Buffered => Caching::Buffered,
        },
        keep_space: !disk.discard,
        limits: parse_limits(&disk.limits.to_string())?,
        ..ImageOptions::default()
    })
}

fn vhost_user_options(disk: &Disk) -> VhostUserOptions {
    let usual = VhostUserOptions::default();
    VhostUserOptions {
        queues: disk.queues.unwrap_or(QUEUES_MAX),
        queue_size: disk.queue_size.unwrap_or(usual.queue_size),
        serial: disk.serial.clone().unwrap_or_default(),
        block_size: disk.block_size.unwrap_or(usual.block_size),
    }
}

/// `; ` and what the user can write to have it otherwise, in the words of the option that the disk is given by.
fn advice(error: &ImageError, planned: &PlannedDisk) -> &'static str {
    use std::io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
    match error {
        ImageError::OtherFormat { .. } => {
            "; if its bytes are the disk all the same, add format=raw; otherwise attach it by -drive, and QEMU serves it"
        }
        ImageError::Qcow2(Qcow2Error::Header {
            source: HeaderError::Magic(_),
            ..
        }) => "; without format= it is served as what it begins like",
        source if is_only_qemus(source) => "; attach it by -drive, and QEMU serves it",
        ImageError::File(OpenError::Open { source, .. })
            if !planned.disk.read_only && matches!(source.kind(), PermissionDenied | ReadOnlyFilesystem) =>
        {
            "; with readonly=on it is only read"
        }
        ImageError::File(OpenError::Locked {
            source: LockError::InUse { .. },
            ..
        }) => match planned.given_by {
            _ if planned.disk.share => "; the other process must let others use it too",
            GivenBy::Option => "; share=on lets both use it, if both are meant to",
            GivenBy::Device => "; share-rw=on at its -device lets both use it, if both are meant to",
            GivenBy::Drive => {
                "; if both are meant to use it, give it if=none and attach it by -device virtio-blk-pci,share-rw=on"
            }
        },
        _ => "",
    }
}
