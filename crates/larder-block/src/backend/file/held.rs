//! A file that stays open, with its locks, and whether its path still leads to it.

use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use super::{FileDevice, Role};
use crate::opener;

/// A device's open file: while this lives, the file is open and has the device's locks, whatever becomes of the device.
#[derive(Debug)]
pub struct HeldFile {
    path: PathBuf,
    file: File,
}

/// Why a path no longer leads to the file that was opened by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Displaced {
    /// The file has another name now.
    Moved,
    /// The file has no name any more: it was deleted, or another one was put in its place.
    Removed,
}

impl HeldFile {
    /// The path by which it was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// See [`displaced`].
    ///
    /// # Errors
    /// The path cannot be followed.
    pub fn displaced(&self) -> io::Result<Option<Displaced>> {
        displaced(&self.file, &self.path)
    }

    /// Takes all that is in the file, which keeps its size.
    ///
    /// # Errors
    /// Its size cannot be set.
    pub fn clear(&self) -> io::Result<()> {
        let len = self.file.metadata()?.len();
        // A crash between the two leaves it empty.
        self.file.set_len(0)?;
        self.file.set_len(len)
    }

    /// Where its contents are to be had as long as this process keeps it, whatever its name.
    pub fn contents(&self) -> PathBuf {
        contents(&self.file)
    }
}

impl AsFd for FileDevice {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl FileDevice {
    /// Keeps the file open. A device that is closed gives its locks back all the same, one that is dropped does not.
    ///
    /// # Errors
    /// There are too many descriptors.
    pub fn hold(&self) -> io::Result<HeldFile> {
        Ok(HeldFile {
            path: self.path.clone(),
            // The same open file description: the locks are its own.
            file: self.file.try_clone()?,
        })
    }

    /// What the host says of the file itself, wherever its path leads by now.
    ///
    /// # Errors
    /// The host's.
    pub fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }

    /// Looks where the path leads, and tells of a change.
    pub(super) fn check_path(&self) {
        if let Ok(found) = displaced(&self.file, &self.path) {
            self.is_displaced(found);
        }
    }

    /// Tells of a change of where the path leads.
    pub(super) fn is_displaced(&self, found: Option<Displaced>) {
        if self.displaced.replace(found) == found {
            return;
        }
        let image = &self.name;
        if let Role::CacheOf(disk) = &self.role {
            return tell_of_cache(disk, image, found);
        }
        match found {
            None => tracing::info!(%image, "the image has its name again"),
            Some(Displaced::Moved) => tracing::warn!(
                %image,
                "the image was moved while it is in use: its next server would serve another file, or none; move it back"
            ),
            Some(Displaced::Removed) => tracing::warn!(
                %image,
                "the image was deleted or replaced while it is in use: what it has is lost when its server ends; to keep it, \
                 pause the guest and copy {}",
                contents(&self.file).display()
            ),
        }
    }
}

/// Where the path of a disk's cache leads.
fn tell_of_cache(disk: &str, cache: &str, found: Option<Displaced>) {
    match found {
        None => tracing::info!(image = disk, cache, "the cache has its name again"),
        Some(Displaced::Moved) => tracing::warn!(
            image = disk,
            cache,
            "its cache was moved while it is in use: its next server would not find it; move it back"
        ),
        Some(Displaced::Removed) => tracing::warn!(
            image = disk,
            cache,
            "its cache was deleted or replaced while it is in use, and is gone when its server ends, with what it has that the disk \
             has not: do not kill the server; `larder disk cache replace {cache} --control PATH --with FILE` writes all of that to the \
             disk and has another cache used, `larder disk cache flush {cache} --control PATH` only writes what there is now, and a \
             stop of the server writes it, too"
        ),
    }
}

/// Whether `path` leads to another file than the one that was opened by it, or nowhere.
pub(super) fn displaced(file: &File, path: &Path) -> io::Result<Option<Displaced>> {
    let ours = file.metadata()?;
    match opener::metadata(path) {
        Ok(there) if (there.dev(), there.ino()) == (ours.dev(), ours.ino()) => return Ok(None),
        Ok(_) => {}
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::NotADirectory) => {}
        Err(error) => return Err(error),
    }
    Ok(Some(match ours.nlink() {
        0 => Displaced::Removed,
        _ => Displaced::Moved,
    }))
}

fn contents(file: &File) -> PathBuf {
    format!("/proc/{}/fd/{}", std::process::id(), file.as_raw_fd()).into()
}
