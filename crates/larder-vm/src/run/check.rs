//! Check whether disks can be served, before anything is started.
//!
//! Each image is opened as its server will open it. All of them are held open at the same time, so an image that is
//! named twice is detected. The content of the disks is not changed. No NBD server is contacted, because some exit
//! after their first client.
//!
//! The files of the disks stay open, with QEMU's locks, in the result ([`DiskLocks`]), so no other process can open
//! them between the check and the servers.

use larder_block::Loop;
use larder_block::backend::file::{FileOpenError, LockedFile};
use larder_block::backend::image_lock::LockError;
use larder_export::activity::Activity;
use larder_export::vhost_user::{OptionsError, VhostUserServer};
use larder_qcow2::OpenError as Qcow2Error;
use larder_qcow2::header::HeaderError;

use super::disk_locks::DiskLocks;
use super::drive::QemuOnlyReason;
use super::plan::OptionSource;
use crate::disk::DiskError;
use crate::disk_spec::DiskSpec;
use crate::image::{self, ImageAddress, ImageError};
use crate::limits::LimitsTextError;

/// Reason why a disk cannot be served.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)]
pub enum CheckError {
    #[error("{source}{advice}")]
    Image { source: ImageError, advice: &'static str },
    #[error("disk {image}: {source_name} gives it twice; if that is intended, add {share_option} to both")]
    Duplicate { image: ImageAddress, source_name: &'static str, share_option: &'static str },
    #[error("disk {image}: {source}")]
    Options { image: ImageAddress, source: OptionsError },
    #[error("disk {image}: {source}")]
    Limits { image: ImageAddress, source: LimitsTextError },
    #[error(transparent)]
    Uring(DiskError),
}

impl CheckError {
    /// Returns whether the reason remains after the process that uses the image now has ended: it concerns the image
    /// itself, not its state during that use.
    pub fn is_permanent(&self) -> bool {
        fn concerns_image(error: &ImageError) -> bool {
            match error {
                ImageError::OtherFormat { .. }
                | ImageError::TooShort { .. }
                | ImageError::Limits { .. }
                | ImageError::BackingCycle { .. }
                | ImageError::BackingUnsupported { .. }
                | ImageError::Address(_)
                | ImageError::NoFormat { .. }
                | ImageError::Chain(_)
                | ImageError::NoDataFile { .. } => true,
                ImageError::Backing { source, .. } | ImageError::DataFile { source, .. } => concerns_image(source),
                ImageError::File(error) => !matches!(error, FileOpenError::Locked { .. } | FileOpenError::Os { .. }),
                ImageError::Qcow2(Qcow2Error::Header { source, .. }) => !matches!(source, HeaderError::Corrupt),
                _ => false,
            }
        }
        match self {
            Self::Image { source, .. } => concerns_image(source),
            Self::Options { .. } | Self::Limits { .. } => true,
            Self::Duplicate { .. } | Self::Uring(_) => false,
        }
    }
}

/// Result of the check.
#[derive(Debug, Default)]
pub struct DiskCheckReport {
    /// Problems; empty if all disks can be served.
    pub problems: Vec<CheckError>,
    /// Images of `-drive` that QEMU can read and Larder cannot, with reasons.
    pub left_to_qemu: Vec<(ImageAddress, QemuOnlyReason)>,
    /// Disks that could not be checked completely, because they include an NBD server.
    pub unchecked: Vec<ImageAddress>,
    /// Files of the disks that can be served.
    pub disk_locks: Vec<DiskLocks>,
}

/// Checks every disk; each is given with its source.
pub fn check_disks(disks: &[(&DiskSpec, OptionSource)]) -> DiskCheckReport {
    let mut report = DiskCheckReport::default();
    if disks.is_empty() {
        return report;
    }
    let Some(on) = create_loop(&mut report) else {
        return report;
    };
    let mut opened = Vec::with_capacity(disks.len());
    for &(disk, given_by) in disks {
        let mut hold = DiskLocks::new(&disk.image);
        match on.block_on(open_disk(&on, disk, given_by, &mut hold.files)) {
            Ok(server) => {
                opened.push(server);
                report.disk_locks.push(hold);
            }
            Err(CheckError::Image { source, .. }) if ends_at_nbd_server(&source) => {
                report.unchecked.push(disk.image.clone());
                report.disk_locks.push(hold);
            }
            Err(error)
                if is_locked_by_check(&error)
                    && disks.iter().filter(|(other, _)| is_same_file(other, disk)).count() > 1 =>
            {
                report.problems.push(CheckError::Duplicate {
                    image: disk.image.clone(),
                    source_name: given_by.name(),
                    share_option: given_by.share_notation(),
                });
            }
            Err(error) => match qemu_only_reason(&error) {
                Some(why) if matches!(given_by, OptionSource::Drive | OptionSource::Device) => {
                    report.left_to_qemu.push((disk.image.clone(), QemuOnlyReason(why)));
                }
                _ => report.problems.push(error),
            },
        }
    }
    report
}

/// Checks the disks of a VM's file that the VM's server has open now, as far as that is possible without disturbing the
/// server ([`image::inspect_served`]).
pub fn check_served(disks: &[&DiskSpec]) -> DiskCheckReport {
    let mut found = DiskCheckReport::default();
    if disks.is_empty() {
        return found;
    }
    let Some(on) = create_loop(&mut found) else {
        return found;
    };
    for disk in disks {
        match on.block_on(inspect_disk(&on, disk)) {
            Ok(()) => {}
            Err(CheckError::Image { source, .. }) if ends_at_nbd_server(&source) => {
                found.unchecked.push(disk.image.clone());
            }
            Err(error) => found.problems.push(error),
        }
    }
    found
}

/// Returns a loop for the check; without one, that is the problem.
fn create_loop(found: &mut DiskCheckReport) -> Option<Loop> {
    match Loop::new(std::time::Duration::ZERO) {
        Ok(on) => Some(on),
        Err(error) => {
            found.problems.push(CheckError::Uring(DiskError::Uring(error)));
            None
        }
    }
}

async fn inspect_disk(on: &Loop, disk: &DiskSpec) -> Result<(), CheckError> {
    let options = disk.image_options().map_err(|source| CheckError::Limits { image: disk.image.clone(), source })?;
    let inspected = image::inspect_served(on, &disk.image, &options).await;
    inspected.map_err(|source| CheckError::Image { advice: advice(&source, disk, OptionSource::File), source })
}

/// Returns whether the only obstacle is an NBD server that was not contacted.
fn ends_at_nbd_server(error: &ImageError) -> bool {
    match error {
        ImageError::NotContacted { .. } => true,
        ImageError::Backing { source, .. } | ImageError::DataFile { source, .. } => ends_at_nbd_server(source),
        _ => false,
    }
}

/// Returns the reason why Larder refuses a disk that QEMU can serve. What QEMU refuses as well is a problem, and so
/// is data of the disk in a killed server's journal or in a cache: QEMU would not see it.
fn qemu_only_reason(error: &CheckError) -> Option<String> {
    match error {
        CheckError::Image { source: ImageError::OtherFormat { format, .. }, .. } => {
            Some(format!("it looks like a {format} image, which Larder cannot interpret"))
        }
        CheckError::Image { source, .. } if is_qemu_only(source) => Some(source.to_string()),
        CheckError::Options { source: source @ OptionsError::PartialSector { .. }, .. } => Some(source.to_string()),
        _ => None,
    }
}

fn is_qemu_only(error: &ImageError) -> bool {
    match error {
        ImageError::OtherFormat { .. }
        | ImageError::BackingUnsupported { .. }
        | ImageError::SharedWriter { .. }
        | ImageError::Address(_) => true,
        ImageError::File(error) => matches!(
            error,
            FileOpenError::UnsupportedKind { .. } | FileOpenError::Empty { .. } | FileOpenError::EmptyDevice { .. }
        ),
        ImageError::Backing { source, .. } | ImageError::DataFile { source, .. } => is_qemu_only(source),
        ImageError::Qcow2(error) => matches!(
            error,
            Qcow2Error::Dirty { .. }
                | Qcow2Error::Header {
                    source: HeaderError::Encrypted(_) | HeaderError::Incompatible(_) | HeaderError::Text(_),
                    ..
                }
        ),
        _ => false,
    }
}

fn is_locked_by_check(error: &CheckError) -> bool {
    matches!(
        error,
        CheckError::Image {
            source: ImageError::File(FileOpenError::Locked { source: LockError::InUseByThisProcess { .. }, .. }),
            ..
        }
    )
}

/// Returns whether both are the same file, under any name.
fn is_same_file(one: &DiskSpec, other: &DiskSpec) -> bool {
    let file = |disk: &DiskSpec| match &disk.image {
        ImageAddress::Path(path) => std::fs::canonicalize(path).ok(),
        ImageAddress::Nbd(_) => None,
    };
    file(one).is_some() && file(one) == file(other)
}

async fn open_disk(
    on: &Loop,
    disk: &DiskSpec,
    given_by: OptionSource,
    held: &mut Vec<LockedFile>,
) -> Result<std::rc::Rc<VhostUserServer>, CheckError> {
    let options = disk.image_options().map_err(|source| CheckError::Limits { image: disk.image.clone(), source })?;
    let opened = image::try_to_open(on, &disk.image, &options, held).await;
    let device = opened.map_err(|source| CheckError::Image { advice: advice(&source, disk, given_by), source })?;
    let activity = Activity::new(on);
    VhostUserServer::new(on, device, &disk.vhost_user_options(), &activity)
        .map_err(|source| CheckError::Options { image: disk.image.clone(), source })
}

/// Returns advice on how to resolve an error, after `; `, in the notation of the disk's source.
pub fn advice(error: &ImageError, disk: &DiskSpec, given_by: OptionSource) -> &'static str {
    use std::io::ErrorKind::{PermissionDenied, ReadOnlyFilesystem};
    let is_in_file = given_by == OptionSource::File;
    match error {
        ImageError::OtherFormat { .. } if is_in_file => "; if it is a raw disk nevertheless, add format = \"raw\"",
        ImageError::OtherFormat { .. } => {
            "; if it is a raw disk nevertheless, add format=raw; otherwise attach it with -drive, and QEMU serves it"
        }
        ImageError::Qcow2(Qcow2Error::Header { source: HeaderError::Magic(_), .. }) => match is_in_file {
            true => "; correct the format in the VM's file, or restore the image if it should have that format",
            false => "; without format= Larder detects the format",
        },
        source if is_qemu_only(source) && !is_in_file => "; attach it with -drive, and QEMU serves it",
        ImageError::File(FileOpenError::Open { source, .. })
            if !disk.read_only
                // Larder's own refusals, which have no number, hold for reading as well.
                && source.raw_os_error().is_some()
                && matches!(source.kind(), PermissionDenied | ReadOnlyFilesystem) =>
        {
            match is_in_file {
                true => "; with readonly = true Larder only reads it",
                false => "; with readonly=on Larder only reads it",
            }
        }
        ImageError::File(FileOpenError::Locked { source: LockError::InUse { .. }, .. }) => match given_by {
            _ if disk.share => "; the other process must share it too",
            OptionSource::File => "; if both are meant to use it, set share = true",
            OptionSource::Option => "; if both are meant to use it, add share=on",
            OptionSource::Device => "; if both are meant to use it, add share-rw=on to its -device",
            OptionSource::Drive => {
                "; if both are meant to use it, give it if=none and attach it with -device virtio-blk-pci,share-rw=on"
            }
        },
        _ => "",
    }
}
