//! Files that a VM's file names for two purposes. A cache is overwritten, so its file must have no other purpose.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use larder_block::opener;

use super::config::{VmConfig, VmDisk};
use crate::image::{ChainPolicy, ImageAddress};

/// Interval between checks for a command to give up, while the file systems are asked.
const GIVE_UP_POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A file of a disk.
struct NamedFile<'a> {
    disk: &'a VmDisk,
    address: &'a ImageAddress,
    role: &'static str,
    identity: FileIdentity,
    is_cache: bool,
    is_written: bool,
}

/// Identity of a file under any name.
#[derive(PartialEq, Eq)]
enum FileIdentity {
    /// Device and inode number.
    File(u64, u64),
    /// Number of a block device.
    Device(u64),
    /// Path of a file that does not exist yet.
    New(PathBuf),
    /// URI of an NBD export.
    Export(String),
}

impl FileIdentity {
    fn from_address(address: &ImageAddress) -> Self {
        let path = match address {
            ImageAddress::Path(path) => path,
            ImageAddress::Nbd(uri) => return Self::Export(uri.to_string()),
        };
        match opener::metadata(path) {
            Ok(found) if found.file_type().is_block_device() => Self::Device(found.rdev()),
            Ok(found) => Self::File(found.dev(), found.ino()),
            Err(_) => Self::New(resolve_new_path(path)),
        }
    }
}

/// Returns the path of a file that is to be made, without symbolic links as far as this process may follow them.
fn resolve_new_path(path: &Path) -> PathBuf {
    let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let directory = path.parent().and_then(|directory| directory.canonicalize().ok());
    match (directory, path.file_name()) {
        (Some(directory), Some(name)) => directory.join(name),
        _ => path,
    }
}

fn disk_files(disk: &VmDisk) -> Vec<NamedFile<'_>> {
    let spec = &disk.spec;
    let is_written = !spec.read_only;
    let file = |what, address, is_written| NamedFile {
        disk,
        address,
        role: what,
        identity: FileIdentity::from_address(address),
        is_cache: false,
        is_written,
    };
    let mut files = vec![file("the image", &spec.image, is_written)];
    if let ChainPolicy::Pinned { chain, .. } = &spec.chain {
        let data_file = chain.data_file.iter();
        files.extend(data_file.map(|address| file("the data file", address, is_written)));
        for backing in &chain.backing {
            files.push(file("a backing file", &backing.image, false));
            let data_file = backing.data_file.iter();
            files.extend(data_file.map(|address| file("the data file of a backing file", address, false)));
        }
    }
    files.extend(
        spec.disk_cache.file.iter().map(|address| NamedFile { is_cache: true, ..file("the cache", address, true) }),
    );
    files
}

/// Returns what is wrong with files that have two purposes, one of them to be a cache. For the disks that `is_served`
/// names, whose files no lock protects from this process, other purposes that exclude each other count too.
pub(super) fn file_conflicts(config: &VmConfig, is_served: &dyn Fn(&VmDisk) -> bool) -> Vec<String> {
    let files: Vec<NamedFile<'_>> = config.disks.iter().flat_map(disk_files).collect();
    let mut clashes = Vec::new();
    for (number, one) in files.iter().enumerate() {
        for other in &files[number + 1..] {
            let is_conflict = match one.is_cache || other.is_cache {
                true => true,
                false => {
                    let is_written = one.is_written || other.is_written;
                    let is_shared = one.disk.spec.share && other.disk.spec.share;
                    let is_local = matches!(one.address, ImageAddress::Path(_));
                    let are_served = is_served(one.disk) && is_served(other.disk);
                    is_local && are_served && is_written && !is_shared && one.disk.name != other.disk.name
                }
            };
            if is_conflict && one.identity == other.identity {
                clashes.push(describe_conflict(one, other));
            }
        }
    }
    clashes
}

fn describe_conflict(one: &NamedFile<'_>, other: &NamedFile<'_>) -> String {
    let advice = match one.is_cache || other.is_cache {
        true => "a cache is overwritten: give it a file or device that has no other purpose",
        false => "give each its own, or, if both are meant to use it, set share = true for both",
    };
    format!(
        "{} is {} of disk {} and {} of disk {}; {advice}",
        one.address, one.role, one.disk.name, other.role, other.disk.name
    )
}

/// Returns the first of the [`file_conflicts`] with a cache, unless `is_cancelled` while a file server does not answer.
pub(super) fn cache_conflict(config: &VmConfig, is_cancelled: impl Fn() -> bool) -> Option<String> {
    if config.disks.iter().all(|disk| disk.spec.disk_cache.file.is_none()) {
        return None;
    }
    let (sender, found) = mpsc::channel();
    let config = config.clone();
    let thread = std::thread::spawn(move || {
        // The receiver may have given up.
        let _ = sender.send(file_conflicts(&config, &|_| false).into_iter().next());
    });
    loop {
        match found.recv_timeout(GIVE_UP_POLL_INTERVAL) {
            Ok(clash) => {
                // The caller may count on this process's threads.
                let _ = thread.join();
                return clash;
            }
            Err(RecvTimeoutError::Timeout) if !is_cancelled() => {}
            Err(_) => return None,
        }
    }
}
