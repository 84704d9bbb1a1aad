//! Marker that a VM's disks belong to another host: the VM has moved there, or is to come from there. A server that
//! finds the marker opens no image until the VM arrives. So the marker is kept where it survives a reboot.
//!
//! ```text
//! STATE/moves/NAME-HASH      a line for the user: the reason; the hash is that of the path of the VM's file
//! ```

use std::ffi::OsString;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::process::geteuid;

use crate::image::{state_directory, write_atomically};
use crate::opener::opener_client;

/// Returns the directory of all markers.
fn markers_directory() -> Option<PathBuf> {
    state_directory().map(|folder| folder.join("moves"))
}

/// Returns the name under which state of the VM described in `file` is stored. VMs of the same name in different
/// directories are different VMs.
pub(super) fn vm_state_name(file: &Path) -> OsString {
    let file = std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
    let mut name = file.file_stem().unwrap_or_default().to_owned();
    name.push(format!("-{:08x}", crc32c::crc32c(file.as_os_str().as_bytes())));
    name
}

/// The marker of a VM, which may or may not exist.
pub struct InactiveMarker {
    /// Path of the marker; `None` if no directory for it is known.
    path: Option<PathBuf>,
}

impl InactiveMarker {
    /// Returns the marker of the VM described in `file`.
    pub fn for_vm(file: &Path) -> Self {
        Self { path: markers_directory().map(|folder| folder.join(vm_state_name(file))) }
    }

    /// Returns whether the marker exists.
    ///
    /// # Errors
    /// The file system does not answer that.
    pub fn exists(&self) -> io::Result<bool> {
        if let Some(helper) = opener_client() {
            return helper.is_away();
        }
        self.path.as_ref().map_or(Ok(false), |path| path.try_exists().map_err(|error| with_path(path, &error)))
    }

    /// Creates the marker's directory, while this process still can.
    pub(super) fn prepare(&self) -> io::Result<()> {
        if opener_client().is_some() {
            return Ok(());
        }
        let no_directory = || {
            io::Error::other(
                "neither $XDG_STATE_HOME nor $HOME gives a directory for the marker that the VM is on another host",
            )
        };
        let path = self.path.as_ref().ok_or_else(no_directory)?;
        let directory = path.parent().unwrap_or(path);
        create_owned_by_parent(directory).map_err(|error| with_path(directory, &error))
    }

    /// Creates the marker, durably.
    ///
    /// # Errors
    /// Writing fails; the marker may exist all the same.
    pub fn create(&self, why: &str) -> io::Result<()> {
        if let Some(helper) = opener_client() {
            return helper.set_away(Some(why));
        }
        self.prepare()?;
        let Some(path) = &self.path else { return Ok(()) };
        write_atomically(path, &format!("{why}\n")).map_err(|error| with_path(path, &error))
    }

    /// Removes the marker, durably.
    ///
    /// # Errors
    /// Removal fails; the marker may still exist.
    pub fn remove(&self) -> io::Result<()> {
        if let Some(helper) = opener_client() {
            return helper.set_away(None);
        }
        let Some(path) = &self.path else { return Ok(()) };
        match fs::remove_file(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
            removed => removed.map_err(|error| with_path(path, &error))?,
        }
        let directory = path.parent().unwrap_or(path);
        let flushed = File::open(directory).and_then(|directory| directory.sync_all());
        flushed.map_err(|error| with_path(directory, &error))
    }
}

/// Creates a directory, unless it exists. Root's commands prepare files that a service of another user reads, so root
/// changes the owner of a directory that it has created to that of the parent. The change applies to that directory,
/// never to one that the user may have put in its place.
fn create_owned_by_parent(folder: &Path) -> io::Result<()> {
    let parent = folder.parent().unwrap_or(folder);
    DirBuilder::new().recursive(true).mode(0o700).create(parent)?;
    match DirBuilder::new().mode(0o700).create(folder) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => return Ok(()),
        created => created?,
    }
    let parent_metadata = parent.metadata()?;
    if geteuid().is_root() && parent_metadata.uid() != 0 {
        let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let created = File::from(rustix::fs::open(folder, flags, Mode::empty())?);
        fchown(&created, Some(parent_metadata.uid()), Some(parent_metadata.gid()))?;
    }
    Ok(())
}

fn with_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    /// The user of the services owns the directory in which the markers' directory is, and so could put a link there.
    #[test]
    fn marker_is_not_written_through_symlink() {
        let state = tempfile::tempdir().expect("a directory");
        let elsewhere = tempfile::tempdir().expect("another one");
        let link = state.path().join("moves");
        std::os::unix::fs::symlink(elsewhere.path(), &link).expect("links");
        let note = InactiveMarker { path: Some(link.join("web")) };
        note.create("gone").expect_err("its directory is a link");
        fs::remove_file(&link).expect("is ours");
        fs::create_dir(&link).expect("is ours");
        let victim = elsewhere.path().join("victim");
        fs::write(&victim, "ours").expect("writes");
        std::os::unix::fs::symlink(&victim, link.join("web.new")).expect("links");
        note.create("gone").expect("the link is replaced");
        assert_eq!(fs::read_to_string(&victim).expect("is there"), "ours");
        assert_eq!(fs::read_to_string(link.join("web")).expect("is there"), "gone\n");
    }

    use super::*;

    #[test]
    fn marker_exists_until_it_is_removed() {
        let place = tempfile::tempdir().expect("a directory");
        let note = || InactiveMarker { path: Some(place.path().join("moves").join("web")) };
        assert!(!note().exists().expect("can be told"));
        note().remove().expect("there is none");
        note().create("gone").expect("is made");
        note().create("gone again").expect("is made again");
        assert!(note().exists().expect("can be told"));
        note().remove().expect("goes");
        assert!(!note().exists().expect("can be told"));
        let [one, other] =
            ["/etc/larder/vms/web.toml", "/srv/web.toml"].map(|file| InactiveMarker::for_vm(Path::new(file)).path);
        assert_ne!(one, other);
        let nowhere = InactiveMarker { path: None };
        nowhere.create("gone").expect_err("there is nowhere");
    }
}
