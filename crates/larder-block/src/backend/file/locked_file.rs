//! A file that stays open together with its locks, and a check that its path still leads to it.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{FileDevice, FileRole};
use crate::opener;

/// A device's open file. While this value lives, the file is open and has the device's locks, even after the device
/// is dropped.
#[derive(Debug)]
pub struct LockedFile {
    path: PathBuf,
    file: File,
}

/// The reason why a path no longer leads to the file that was opened by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PathChange {
    /// The file was renamed.
    Moved,
    /// The file has no name any more: it was deleted, or replaced by another file.
    Removed,
}

impl LockedFile {
    /// Returns the path by which the file was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the reason if the path does not lead to this file any more.
    ///
    /// # Errors
    /// The path cannot be followed.
    pub fn path_change(&self) -> io::Result<Option<PathChange>> {
        path_change(&self.file, &self.path)
    }

    /// Discards the file's content and keeps its size.
    ///
    /// # Errors
    /// The size cannot be set.
    pub fn clear(&self) -> io::Result<()> {
        let len = self.file.metadata()?.len();
        // A crash between the two calls leaves an empty file.
        self.file.set_len(0)?;
        self.file.set_len(len)
    }

    /// Returns a path to the content that works as long as this process has the file open, whatever its name.
    pub fn content_path(&self) -> PathBuf {
        content_path(&self.file)
    }
}

impl AsFd for FileDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl FileDevice {
    /// Keeps the file open with its locks. Closing the device releases the locks nonetheless; dropping it does not.
    ///
    /// # Errors
    /// There are too many open descriptors.
    pub fn retain_locks(&self) -> io::Result<LockedFile> {
        Ok(LockedFile {
            path: self.path.clone(),
            // `try_clone` shares the open file description, and with it the locks.
            file: self.file.try_clone()?,
        })
    }

    /// Returns the metadata of the open file itself, wherever its path leads by now.
    ///
    /// # Errors
    /// The host's error.
    pub fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }

    /// Rechecks where the path leads, and logs a change.
    pub(super) fn recheck_path(&self) {
        if let Ok(change) = path_change(&self.file, &self.path) {
            self.report_path_change(change);
        }
    }

    /// Logs a change of where the path leads.
    pub(super) fn report_path_change(&self, change: Option<PathChange>) {
        if self.reported_path_change.replace(change) == change {
            return;
        }
        let image = &self.name;
        if let FileRole::CacheOf(disk) = &self.role {
            return log_cache_path_change(disk, image, change);
        }
        match change {
            None => tracing::info!(event = "path-changed", %image, "the image is at its path again"),
            Some(PathChange::Moved) => tracing::warn!(
                event = "path-changed", %image,
                "the image was moved while in use: the next server would open another file, or none; move it back"
            ),
            Some(PathChange::Removed) => tracing::warn!(
                event = "path-changed", %image,
                "the image was deleted or replaced while in use: its data is lost when the server exits; to save it, \
                 pause the guest and copy {}",
                content_path(&self.file).display()
            ),
        }
    }
}

/// Logs where the path of a disk's cache leads.
fn log_cache_path_change(disk: &str, cache: &str, change: Option<PathChange>) {
    match change {
        None => tracing::info!(event = "path-changed", image = disk, cache, "the cache is at its path again"),
        Some(PathChange::Moved) => tracing::warn!(
            event = "path-changed",
            image = disk,
            cache,
            "the disk's cache was moved while in use: the next server would not find it; move it back"
        ),
        Some(PathChange::Removed) => tracing::warn!(
            event = "path-changed",
            image = disk,
            cache,
            "the disk's cache was deleted or replaced while in use: when the server exits, the cache is lost, with all data that the disk \
             lacks: do not kill the server; `larder disk cache replace {cache} --control PATH --with FILE` writes all of that data to the \
             disk and switches to another cache, `larder disk cache flush {cache} --control PATH` only writes the present dirty data, and a \
             regular stop of the server writes it, too"
        ),
    }
}

/// Returns the reason if `path` leads to another file than `file`, or to none.
pub(super) fn path_change(file: &File, path: &Path) -> io::Result<Option<PathChange>> {
    let open_file = file.metadata()?;
    match opener::metadata(path) {
        Ok(at_path) if (at_path.dev(), at_path.ino()) == (open_file.dev(), open_file.ino()) => return Ok(None),
        Ok(_) => {}
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {}
        Err(error) => return Err(error),
    }
    Ok(Some(match open_file.nlink() {
        0 => PathChange::Removed,
        _ => PathChange::Moved,
    }))
}

fn content_path(file: &File) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into()
}
